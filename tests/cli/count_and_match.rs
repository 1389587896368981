//! `dreamc count` and `dreamc match` as people and programs see them.

use std::path::PathBuf;
use std::process::Command;

/// Standard output of a command that ends with this exit code, or its error stream where that is
/// not 0.
fn dreamc(arguments: &[&str], code: i32) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_dreamc"))
        .args(arguments)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples"))
        .output()
        .expect("starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let (stdout, stderr) = (text(out.stdout), text(out.stderr));
    assert_eq!(out.status.code(), Some(code), "{arguments:?}\n{stdout}{stderr}");
    if code == 0 { stdout } else { stderr }
}

fn json(arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&dreamc(&[arguments, &["--json"]].concat(), 0)).expect("JSON")
}

#[test]
fn a_step_on_many_gpus_is_predicted_from_its_gradients() {
    let of = |gpus: &str| json(&["count", "dr-da-16.yaml", "--target", "h200", "--gpus", gpus]);
    let (one, many) = (of("1"), of("64"));
    assert_eq!(one["scaling"]["communication"], 0.0);
    let number = |name: &str| many["scaling"][name].as_f64().unwrap();
    let gradients = many["memory_bytes"]["gradients"].as_f64().unwrap();
    let inside = 2.0 * 7.0 * (3.4e-6 + gradients / 8.0 / 450e9);
    let between = 2.0 * 7.0 * (14e-6 + gradients / 64.0 / 50e9);
    assert!((number("communication") - inside - between).abs() < 1e-9);
    assert!((number("compute") * 64.0 / one["scaling"]["compute"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    assert!(number("efficiency") < 1.0 && number("hidden") <= number("exposed"));
    let text = dreamc(&["count", "dr-da-16.yaml", "--target", "h200", "--gpus", "64"], 0);
    assert!(text.contains("a step on 64 GPUs, at best") && text.contains("NVLink 4"), "{text}");
    assert!(text.contains("memory, states whole") && text.contains("memory, states cut"), "{text}");
    assert!(text.contains("memory, weights cut") && !text.contains("experts shared"), "{text}");
    let shared = ["--set", "train.parallel.experts=8"];
    let text =
        dreamc(&[&["count", "la-16.yaml", "--target", "h200", "--gpus", "64"][..], &shared].concat(), 0);
    assert!(text.contains("memory, experts shared") && text.contains("owned by 8 together"), "{text}");
}

/// By the same table as `count`.
#[test]
fn kernels_of_a_gpu_among_many_have_their_exchanges() {
    let kernels = ["compile", "tiny-dr-da.yaml", "--emit", "kernels", "--target", "h200", "--gpus", "16"];
    let network = |more: &[&str], kernel: &str| -> f64 {
        let text = dreamc(&[&kernels[..], more].concat(), 0);
        let lines = text.lines().filter(|line| line.contains("network") && line.contains(kernel));
        let milliseconds = |line: &str| line.split_whitespace().next().unwrap().parse::<f64>().unwrap();
        let all: Vec<f64> = lines.map(milliseconds).collect();
        assert!(!all.is_empty(), "{text}");
        all.iter().sum()
    };
    let (sums, cut) = (network(&[], "all_reduce"), ["--set", "train.parallel.shard=optimizer"]);
    let (parts, weights) = (network(&cut, "reduce_scatter"), network(&cut, "all_gather"));
    let counted = json(&["count", "tiny-dr-da.yaml", "--target", "h200", "--gpus", "16"]);
    let expected = 1e3 * counted["scaling"]["communication"].as_f64().unwrap();
    // Gradients are sent in several sums, each with its latency.
    assert!(
        sums >= 0.9 * expected && parts > 0.4 * expected && weights > 0.4 * expected,
        "{sums} {parts} {weights} {expected}"
    );
}

#[test]
fn the_tables() {
    insta::assert_snapshot!("count", dreamc(&["count", "dr-da-16.yaml", "--target", "h100"], 0));
    insta::assert_snapshot!("count_tiny", dreamc(&["count", "tiny-la.yaml", "--executed"], 0));
    let kernels = ["compile", "tiny-dr-da.yaml", "--emit", "kernels", "--target", "h200"];
    insta::assert_snapshot!("kernels", dreamc(&kernels, 0));
    insta::assert_snapshot!("match", dreamc(&["match", "paper-16.suite.yaml"], 0));
}

/// Every pass has its line, and there is a sum.
#[test]
fn compiling_says_what_each_pass_takes() {
    let table = dreamc(&["compile", "tiny-dr-da.yaml", "--timings"], 0);
    let passes: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let expected = dreamc_compiler::PASSES.map(|pass| pass.name());
    assert_eq!(passes[..passes.len() - 1], expected, "{table}");
    assert!(
        table.lines().last().is_some_and(|line| line.starts_with("all ") && line.ends_with(" ms")),
        "{table}"
    );
}

/// Programs read these keys.
#[test]
fn stable_keys() {
    let counts = json(&["count", "dr-da-32.yaml", "--target", "h200"]);
    assert_eq!(counts["parameters"]["total"], 2_078_767_488_u64);
    for key in
        ["total", "active", "embedding", "head", "dense", "routed", "shared", "router", "gain", "balance"]
    {
        assert!(counts["parameters"][key].is_u64(), "parameters.{key}");
    }
    for key in ["decode", "prefill", "training"] {
        assert!(counts["flops_per_token"][key].is_u64(), "flops_per_token.{key}");
        assert!(counts["predicted"][key]["seconds_per_token"].as_f64() > Some(0.0), "predicted.{key}");
    }
    for key in ["weights", "gradients", "optimizer", "activations", "sequence_cache", "depth_cache"] {
        assert!(counts["memory_bytes"][key].is_u64(), "memory_bytes.{key}");
    }
    let matched = json(&["match", "dr-da-32.yaml", "--set", "ea.count=1024", "--set", "ea.intermediate=512"]);
    assert_eq!(matched["fields"], serde_json::json!({"ea.intermediate": 472, "ea.count": 1097}));
    assert_eq!(matched["baseline"]["parameters"], 2_079_015_936_u64);
    assert_eq!(matched["matched"]["flops_per_token"], 1_610_563_584_u64);
    assert!(matched["residual"]["parameters"].as_f64().is_some_and(|r| r.abs() < 2e-4));
    assert_eq!(matched["iterations"], 2);
}

/// Networks grow by the savings of skipped layers until a token costs as much as in the dense
/// model; the documentation says how wide.
#[test]
fn mixture_of_depths_at_equal_flops() {
    let found = json(&["match", "mod.suite.yaml"]);
    let variants = found["variants"].as_array().expect("variants");
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/mixture-of-depths.md");
    let docs = std::fs::read_to_string(docs).expect("documentation");
    for (arm, (name, width, parameters)) in
        variants.iter().zip([("mod-0.5", 392, 767_552), ("mod-0.125", 560, 1_025_600)])
    {
        assert_eq!((&arm["name"], &arm["fields"]["mlp.intermediate"]), (&name.into(), &width.into()));
        assert_eq!(arm["matched"]["parameters"], parameters);
        assert!(arm["residual"]["flops_per_token"].as_f64().expect("a residual").abs() < 0.005);
        assert!(docs.contains(&format!("| `{name}` | {width} |")), "{name}");
    }
    assert_eq!(variants.len(), 2);
}

/// Both suites of the paper find its four pairs, and write specs in which nothing else has changed.
#[test]
fn suites_and_what_they_write() {
    let folder = tempfile::tempdir().expect("a folder");
    for (suite, pairs) in [("16", [(504, 517), (480, 537)]), ("32", [(504, 1039), (472, 1097)])] {
        let to = folder.path().join(suite);
        let to = to.to_str().expect("text");
        let found = json(&["match", &format!("paper-{suite}.suite.yaml"), "--write", to]);
        for ((arm, name), (intermediate, count)) in
            found["variants"].as_array().expect("variants").iter().zip(["dr", "dr-da"]).zip(pairs)
        {
            assert_eq!(arm["name"], name);
            assert_eq!(arm["fields"]["ea.intermediate"], intermediate);
            assert_eq!(arm["fields"]["ea.count"], count);
            // The examples hold the matched values already.
            let original = format!("{}/examples/{name}-{suite}.yaml", env!("CARGO_MANIFEST_DIR"));
            let written = PathBuf::from(to).join(format!("{name}.yaml"));
            let read = |path: &std::path::Path| std::fs::read_to_string(path).expect("reads");
            assert_eq!(read(&written), read(original.as_ref()));
        }
    }
}

#[test]
fn both_spellings_count_alike() {
    for name in ["dr-da-16", "tiny-prelude-core-coda"] {
        let [yaml, dream] = ["yaml", "dream"].map(|spelling| json(&["count", &format!("{name}.{spelling}")]));
        assert_eq!(yaml, dream, "{name}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("matched.dream");
    let out = out.to_str().expect("text");
    let found = dreamc(
        &[
            "match",
            "dr-da-16.dream",
            "--set",
            "ea.count=512",
            "--set",
            "ea.intermediate=512",
            "--baseline",
            "la-16.yaml",
            "--flops",
            "ea.intermediate:8",
            "--params",
            "ea.count",
            "--write",
            out,
        ],
        0,
    );
    assert!(found.starts_with("dr-da-16: ea.intermediate 480, ea.count 537"), "{found}");
    let original = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/dr-da-16.dream");
    assert_eq!(
        std::fs::read_to_string(out).expect("reads"),
        std::fs::read_to_string(original).expect("reads")
    );
}

#[test]
fn what_cannot_be_done_is_said() {
    let cases: [(&[&str], i32, &str); 8] = [
        (&["match", "la-16.yaml"], 2, "nothing to compare with"),
        (&["match", "dr-16.yaml", "--tolerance", "1e-9"], 1, "`--tolerance 0.0"),
        (
            &["match", "dr-16.yaml", "--baseline", "la-16.yaml", "--auto", "--tolerance", "0"],
            1,
            "no two sizes meet FLOPs and parameters within 0 %; closest: ",
        ),
        (&["match", "dr-16.yaml", "--flops", "ea.intermediate:0"], 2, "write a field and its step"),
        (&["match", "dr-16.yaml", "--tolerance", "1e-9"], 1, "closest: ea.intermediate 504, ea.count 517"),
        (&["match", "dr-16.yaml", "--flops", "context"], 1, "no effect on FLOPs per token"),
        (&["count", "dr-16.yaml", "--target", "abacus"], 2, "there are h100"),
        (&["count", "dr-16.yaml", "--tokens", "0"], 2, "--tokens"),
    ];
    for (arguments, code, message) in cases {
        let found = dreamc(arguments, code);
        assert!(found.contains(message), "{arguments:?}: {found}");
    }
    // A thousand million experts are counted.
    let counts = json(&["count", "dr-16.yaml", "--set", "ea.count=1000000000"]);
    assert!(counts["parameters"]["total"].as_u64() > Some(1_548_000_000_000_000));
}

/// Without fields, the sizes that could meet each figure are shown with what each would reach, and
/// the pair that meets both, which `--auto` takes.
#[test]
fn sizes_are_proposed() {
    let folder = tempfile::tempdir().expect("a folder");
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let original = std::fs::read_to_string(format!("{examples}/dr-da-16.dream")).expect("reads");
    let (model, _) = original.split_once("\nmatch {").expect("a section");
    let spec = folder.path().join("free.dream");
    std::fs::write(&spec, model).expect("writes");
    let spec = spec.to_str().expect("text");
    let start = ["--set", "ea.count=512", "--set", "ea.intermediate=512"];
    let asked = [&["match", spec, "--baseline", "la-16.yaml"][..], &start].concat();
    let text = dreamc(&asked, 0);
    assert!(
        text.contains("Both within 0.5 %: --flops ea.intermediate:8 --params ea.count:1, or --auto"),
        "{text}"
    );
    for part in ["FLOPs per token by", "parameters by", "--flops hidden:", "--params hidden:", "reaches"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let shown = json(&asked);
    assert_eq!(shown["pair"]["fields"], serde_json::json!({"ea.intermediate": 480, "ea.count": 537}));
    let sizes = shown["params"].as_array().expect("sizes");
    assert_eq!((&sizes[0]["field"], &sizes[0]["meets"]), (&"ea.count".into(), &true.into()));
    let out = folder.path().join("matched.dream");
    let taken = dreamc(&[&asked[..], &["--auto", "--write", out.to_str().expect("text")]].concat(), 0);
    assert!(taken.starts_with("dr-da-16: ea.intermediate 480, ea.count 537"), "{taken}");
    assert_eq!(std::fs::read_to_string(&out).expect("reads"), model);
}

/// Documents are masked in this data, so how many keys a query sees is known only from the batch.
#[test]
fn a_run_counts_what_it_executes() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("run");
    let out = out.to_str().expect("text");
    let smaller = ["train.steps=2", "train.batch=4", "train.accumulate=2", "eval.examples=1"];
    let set: Vec<&str> = smaller.iter().flat_map(|s| ["--set", s]).collect();
    let found = dreamc(&[&["train", "tiny-dr-da.yaml", "--count", "--out", out], &set[..]].concat(), 0);
    assert!(found.contains("as the launch list says"), "{found}");
    let ledger = std::fs::read_to_string(folder.path().join("run/ledger.json")).expect("a ledger");
    let ledger: serde_json::Value = serde_json::from_str(&ledger).expect("JSON");
    assert!(ledger["executed_flops"].as_u64() > Some(0));
    assert_eq!(ledger["declared_flops_per_token"], 1_350_592.0);
}
