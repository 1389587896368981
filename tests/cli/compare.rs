//! Comparisons as their users meet them: suites trained, refused, gone on with, reported and
//! analysed.

use crate::support::sandbox::{Sandbox, metrics, newest, texts};
use serde_json::Value;
use std::fs;
use std::process::Command;

const LAYERED: &str = "\
model:
  name: la
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 24, query: 8}}
  body:
    - repeat: 3
      layers: [\"sa > ea\"]
";

const RECURRENT: &str = "\
model:
  name: dr-da
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, projection: {query: 8}}}
    da: {depth: {heads: 1, head_size: 8, projection: {query: 8}}}
    ea: {experts: {count: 12, active: 2, intermediate: 24, query: 8}}
  body:
    - recur: 3
      layers: [\"(da | sa) > ea\"]
";

const SUITE: &str = "\
name: pair
baseline: la.yaml
variants:
  - spec: dr-da.yaml
    match: {flops: {ea.intermediate: 1}, params: ea.count}
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 12, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32,
        evaluate: {every: 4, batches: 1}, checkpoint: {every: 4, keep: 3}}
eval: {examples: 4, max_tokens: 8}
equal: {flops: 4%, parameters: 6%, tokens, data, order, tokenizer, schedule, optimizer, batch, precision, seeds}
seeds: [0, 1]
";

fn sandbox() -> Sandbox {
    Sandbox::with(&[("la.yaml", LAYERED), ("dr-da.yaml", RECURRENT), ("pair.suite.yaml", SUITE)])
}

/// All that a command says which fails.
fn said(sandbox: &Sandbox, line: &[&str]) -> String {
    let output = sandbox.run(line);
    assert!(!output.status.success(), "{line:?}");
    let (out, error) = texts(&output);
    out + &error
}

/// A report without what differs from machine to machine.
fn redacted(markdown: &str) -> String {
    const COLUMNS: [&str; 4] = ["training memory, bytes", "training time", "tokens/s", "time saved, ×"];
    // The language has more keys with every version, and each changes the hashes.
    const ROWS: [&str; 4] = ["| dreamc |", "| device |", "| machine |", "| specifications, BLAKE3 |"];
    let mut hidden: Vec<usize> = vec![];
    let mut out = String::new();
    for line in markdown.lines() {
        if let Some(row) = ROWS.iter().find(|r| line.starts_with(**r)) {
            out += &format!("{row} … |\n");
            continue;
        }
        if !line.starts_with('|') {
            hidden.clear();
            out += &format!("{line}\n");
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        if hidden.is_empty() {
            let head = cells.iter().enumerate().filter(|(_, c)| COLUMNS.contains(c)).map(|(i, _)| i);
            hidden = head.collect();
            out += &format!("{line}\n");
            continue;
        }
        if line.starts_with("|---") {
            out += &format!("{line}\n");
            continue;
        }
        let cells: Vec<&str> =
            cells.iter().enumerate().map(|(i, c)| if hidden.contains(&i) { "…" } else { c }).collect();
        out += &format!("| {} |\n", cells.join(" | "));
    }
    out
}

#[test]
fn two_arms_are_trained_alike_gone_on_with_and_reported() {
    let sandbox = sandbox();
    let out = sandbox.good(&["compare", "pair.suite.yaml", "--out", "out", "--jobs", "2", "--threads", "2"]);
    assert!(out.contains("4 runs trained"), "{out}");
    let report = sandbox.read("out/report.md");
    insta::assert_snapshot!("report", redacted(&report));
    let html = sandbox.read("out/report.html");
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("@media print"));
    // Its one script asks for nothing, and finds the points of three curves of two arms at least.
    assert_eq!(html.matches("<script").count(), 1);
    for outside in ["src=", "@import", "fetch(", "XMLHttpRequest", "import(", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert!(!html.replace("http://www.w3.org/2000/svg", "").contains("http"), "an address");
    assert!(html.matches("data-points=").count() >= 6);
    // Without it the page is whole: all that it shows is in the text that it reads.
    let (page, _) = html.split_once("<script").unwrap();
    assert!(!page.contains(" hidden>") && !page.contains(" hidden=") && page.contains("</svg>"));
    for svg in fs::read_dir(sandbox.path("out/figures")).unwrap() {
        assert!(!fs::read_to_string(svg.unwrap().path()).unwrap().contains("<script"));
    }
    assert!(sandbox.read("out/figures/validation-loss.svg").starts_with("<svg"));

    // Made anew from what the runs left: the same, to the byte.
    fs::remove_file(sandbox.path("out/report.md")).unwrap();
    sandbox.good(&["report", "out"]);
    assert_eq!(sandbox.read("out/report.md"), report);
    assert_eq!(sandbox.good(&["report", "out", "--markdown"]).trim_end(), report.trim_end());

    // A run that was stopped goes on to the same numbers; those at their end are left alone.
    let run = sandbox.path("out/dr-da-seed1");
    let before = metrics(&run);
    let ledger = fs::read_to_string(run.join("ledger.json")).unwrap();
    fs::write(run.join("ledger.json"), ledger.replace("\"finished\"", "\"interrupted\"")).unwrap();
    fs::remove_dir_all(newest(&run)).unwrap();
    assert!(sandbox.good(&["report", "out", "--markdown"]).contains("3 of 4 runs have come to their end"));
    let out = sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    assert!(out.contains("3 runs were trained before") && out.contains("1 run trained"), "{out}");
    assert_eq!(metrics(&run), before);
    assert_eq!(redacted(&sandbox.read("out/report.md")), redacted(&report));

    // A run of an older dreamc, which wrote a key less, is of the same specification; one whose
    // text was changed since is not.
    let text = fs::read_to_string(run.join("spec.yaml")).unwrap();
    let less = text.replacen("  embed_scale: none\n", "", 1);
    assert_ne!(less, text);
    let ledger = fs::read_to_string(run.join("ledger.json")).unwrap();
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    assert!(ledger.contains(&hash(&text)), "{ledger}");
    fs::write(run.join("ledger.json"), ledger.replace(&hash(&text), &hash(&less))).unwrap();
    let (code, error) = sandbox.bad(&["compare", "pair.suite.yaml", "--out", "out"]);
    assert!(code == 2 && error.contains("was trained from another specification"), "{error}");
    fs::write(run.join("spec.yaml"), less).unwrap();
    let out = sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    assert!(out.contains("4 runs were trained before"), "{out}");

    // Another recipe is another comparison.
    let (code, error) =
        sandbox.bad(&["compare", "pair.suite.yaml", "--out", "out", "--set", "train.steps=13"]);
    assert!(code == 2 && error.contains("was trained from another specification"), "{error}");

    // One of the runs, looked into.
    let found: Value =
        serde_json::from_str(&sandbox.good(&["analyze", "out/dr-da-seed0", "--sequences", "20", "--json"]))
            .unwrap();
    let tokens = found["observations"]["tokens"].as_u64().unwrap();
    assert!(tokens > 0 && tokens <= 20 * 32);
    let ea = found["experts"].as_array().unwrap().iter().find(|e| e["component"] == "ea").unwrap();
    for depth in ea["counts"].as_array().unwrap() {
        let chosen: u64 = depth.as_array().unwrap().iter().map(|c| c.as_u64().unwrap()).sum();
        assert_eq!(chosen, 2 * tokens);
    }
    let depths: Vec<u64> =
        found["depths"].as_array().unwrap().iter().map(|d| d["count"].as_u64().unwrap()).collect();
    assert_eq!(depths, [1, 2, 3, 4, 6]);
    let page = sandbox.read("out/dr-da-seed0/analysis/analysis.md");
    for part in ["Depth attention `da`", "Experts `ea`", "Projections of `sa`", "Loss against depth"] {
        assert!(page.contains(part), "{page}");
    }
    assert!(sandbox.path("out/dr-da-seed0/analysis/figures/lorenz-ea.svg").is_file());
    sandbox.good(&["analyze", "out/la-seed0", "--sequences", "8"]);

    // And looked at without a terminal.
    let picture = sandbox.good(&["watch", "out/dr-da-seed0"]);
    for part in ["step 12/12", "finished", "loss", "tokens/s", "experts", "memory", "exact match"] {
        assert!(picture.contains(part), "{picture}");
    }
}

#[test]
fn arms_that_do_not_agree_are_refused_or_marked() {
    let sandbox = sandbox();
    // Each arm has a recipe of its own, and one of them reads more.
    let own = SUITE.replace("name: pair", "name: own").replace("6%", "0.001%");
    let (head, tail) = own.split_once("train:").unwrap();
    let (_, tail) = tail.split_once("eval:").unwrap();
    sandbox.write("own.suite.yaml", &format!("{head}eval:{tail}").replace("match:", "set: {ea.count: 12} #"));
    let recipe = |steps: u64, rate: &str| {
        format!("train: {{steps: {steps}, batch: 4, sequence: 32, learning_rate: {rate}, precision: f32}}\n")
    };
    sandbox.write("la.yaml", &(LAYERED.to_string() + &recipe(2, "1e-3")));
    sandbox.write("dr-da.yaml", &(RECURRENT.to_string() + &recipe(3, "2e-3")));
    let (code, error) = sandbox.bad(&["compare", "own.suite.yaml", "--out", "out"]);
    assert_eq!(code, 1);
    for part in [
        "do not agree",
        "nothing was trained",
        "parameters",
        "training tokens",
        "schedule",
        "--allow-unequal",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!sandbox.path("out").exists());
    sandbox.good(&["compare", "own.suite.yaml", "--out", "out", "--allow-unequal"]);
    let report = sandbox.read("out/report.md");
    assert!(report.contains("† `dr-da` does not agree with the baseline"), "{report}");
    let rows = report.lines().filter(|l| l.starts_with("| dr-da") || l.contains("| dr-da"));
    for row in rows.clone() {
        assert!(row.contains("dr-da †"), "{row}");
    }
    assert!(rows.count() >= 4, "{report}");
}

#[test]
fn what_is_no_comparison_is_refused() {
    let sandbox = sandbox();
    let (code, error) = sandbox.bad(&["report", "."]);
    assert!(code == 2 && error.contains("compare.json"), "{error}");
    let (code, error) = sandbox.bad(&["compare", "la.yaml"]);
    assert!(code == 2 && error.contains("not a suite") && error.contains("--seeds 3"), "{error}");
    let (code, error) = sandbox.bad(&["compare", "pair.suite.yaml", "--seeds", "3"]);
    assert!(code == 2 && error.contains("`--set 'seeds=[0, 1, 2]'`"), "{error}");
    let (code, error) = sandbox.bad(&["compare", "pair.suite.yaml", "la.yaml"]);
    assert!(code == 2 && error.contains("name one suite, or specifications"), "{error}");
    sandbox
        .write("twice.suite.yaml", &SUITE.replace("- spec: dr-da.yaml", "- spec: dr-da.yaml\n    name: la"));
    let (code, error) = sandbox.bad(&["compare", "twice.suite.yaml"]);
    assert!(code == 1 && error.contains("two arms are called `la`"), "{error}");
    sandbox.write("tight.suite.yaml", &SUITE.replace("4%", "0.0001%"));
    let (code, error) = sandbox.bad(&["compare", "tight.suite.yaml", "--out", "out"]);
    assert!(code == 1 && error.contains("no match within"), "{error}");
    // A help is named, and is enough.
    let allowed = error.split("`equal: {flops: ").nth(1).and_then(|rest| rest.split('}').next());
    let allowed = allowed.unwrap_or_else(|| panic!("{error}"));
    sandbox.write("wider.suite.yaml", &SUITE.replace("4%", allowed));
    sandbox.good(&["compare", "wider.suite.yaml", "--out", "out", "--dry-run"]);
    assert!(!sandbox.path("out").exists());
    // A field of `match` that the model lacks is refused at its token, by `check` too.
    sandbox.write("field.suite.yaml", &SUITE.replace("params: ea.count", "params: eb.count"));
    for command in ["compare", "check"] {
        let error = said(&sandbox, &[command, "field.suite.yaml"]);
        assert!(error.contains("field.suite.yaml:5:"), "{error}");
        assert!(error.contains("the model has no component `eb`; it has `sa`, `da`, `ea`"), "{error}");
    }
    let (code, error) = sandbox.bad(&["analyze", "."]);
    assert!(code != 0 && !error.is_empty());
    let (code, error) = sandbox.bad(&["watch", "."]);
    assert!(code == 2 && error.contains("not a run folder"), "{error}");
}

/// Of two places that say something the nearer one holds: a variant over its suite, and a recipe of
/// an arm over nothing at all.
#[test]
fn what_a_variant_sets_takes_effect() {
    let sandbox = sandbox();
    let suite = "\
name: own
baseline: la.yaml
variants:
  - {name: other, spec: la.yaml, set: {train.warmup: 1, train.schedule: cosine, eval.max_tokens: 5, data.size: 3}}
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 2, batch: 2, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
eval: {examples: 2, max_tokens: 8}
equal: {schedule: false, data: false, order: false}
";
    sandbox.write("own.suite.yaml", suite);
    sandbox.good(&["compare", "own.suite.yaml", "--out", "out"]);
    let (base, other) = (sandbox.read("out/la.yaml"), sandbox.read("out/other.yaml"));
    for (line, own) in [
        ("warmup: 2\n", "warmup: 1\n"),
        ("schedule: constant\n", "kind: cosine"),
        ("max_tokens: 8\n", "max_tokens: 5\n"),
        ("size: 4\n", "size: 3\n"),
    ] {
        assert!(base.contains(line) && !other.contains(line), "{line}: {base}");
        assert!(other.contains(own) && !base.contains(own), "{own}: {other}");
    }
    // A setting that contradicts the recipe of the suite is refused at its token.
    sandbox.write("bad.suite.yaml", &suite.replace("train.schedule: cosine", "train.accumulate: 3"));
    let error = sandbox.error(&["compare", "bad.suite.yaml", "--out", "none"]);
    assert!(
        error.contains("bad.suite.yaml:4:") && error.contains("what the suite says of all arms"),
        "{error}"
    );

    // A recipe that a suite leaves to its arms is changed in each, not replaced.
    let recipe = "train: {steps: 3, batch: 4, sequence: 24, warmup: 1, precision: f32}\n";
    let data = "data: {task: permutation, size: 4, max_steps: 2}\n";
    sandbox.write("a.yaml", &(LAYERED.to_string() + recipe + data));
    sandbox.write("each.suite.yaml", "name: each\nbaseline: a.yaml\nvariants: [{name: b, spec: a.yaml}]\n");
    sandbox.good(&["compare", "each.suite.yaml", "--set", "train.steps=2", "--out", "each"]);
    let spec = sandbox.read("each/b.yaml");
    assert!(
        spec.contains("steps: 2\n") && spec.contains("batch: 4\n") && spec.contains("sequence: 24\n"),
        "{spec}"
    );
}

/// A field that the command line gives all arms and a variant gives itself is refused, whichever
/// section it is of.
#[test]
fn a_flag_does_not_take_the_place_of_what_a_variant_sets() {
    let sandbox = sandbox();
    let suite = "\
name: own
baseline: la.yaml
variants: [{name: other, spec: la.yaml, set: {train.warmup: 5, ea.count: 8}}]
data: {task: permutation, size: 4, max_steps: 2}
TRAINequal: {schedule: false, parameters: none, flops: none}
";
    let train = "train: {steps: 2, batch: 2, sequence: 32, precision: f32}\n";
    sandbox.write("shared.suite.yaml", &suite.replace("TRAIN", train));
    sandbox.write("each.suite.yaml", &suite.replace("TRAIN", ""));
    sandbox.write("la.yaml", &(LAYERED.to_string() + train));
    for file in ["shared.suite.yaml", "each.suite.yaml"] {
        let error = sandbox.error(&["compare", file, "--set", "train.warmup=1", "--dry-run"]);
        assert!(error.contains("this variant sets `train.warmup`, too"), "{error}");
        assert!(error.contains(&format!("{file}:3:")), "{error}");
        sandbox.good(&["compare", file, "--set", "train.learning_rate=1e-3", "--dry-run"]);
    }
    // Fields of an arm's own file that no suite uses are named.
    sandbox.write("la.yaml", &(LAYERED.to_string() + &train.replace("steps", "seed: 7, steps")));
    let output = sandbox.run(&["compare", "each.suite.yaml", "--dry-run"]);
    let (_, err) = crate::support::sandbox::texts(&output);
    assert!(err.contains("`train.seed` 7") && err.contains("the suite's `seeds`"), "{err}");
}

const SKIPS: &str = "\
name: skips
baseline: la.yaml
variants: [{spec: mod.yaml}]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 1, precision: f32}
eval: {examples: 4, max_tokens: 8}
equal: {flops: 60%, parameters: 60%}
";

/// The layered model with a part that half of the tokens skip.
fn skipping(rule: &str) -> String {
    let body = format!("\"skip(capacity 0.5{rule}) {{ sa > ea }}\"");
    LAYERED.replace("name: la", "name: mod").replace("\"sa > ea\"", &body)
}

#[test]
fn an_arm_that_reads_later_tokens_is_refused_or_marked() {
    let sandbox = sandbox();
    sandbox.write("mod.yaml", &skipping(""));
    sandbox.write("skips.suite.yaml", SKIPS);
    let (code, error) = sandbox.bad(&["compare", "skips.suite.yaml", "--out", "out"]);
    assert_eq!(code, 1);
    for part in [
        "tokens read for a loss",
        "earlier ones",
        "later ones, too",
        "causal bce 0.01",
        "nothing was trained",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!sandbox.path("out").exists());
    let out = sandbox.good(&["compare", "skips.suite.yaml", "--out", "out", "--allow-unequal"]);
    assert!(out.contains("mod †"), "{out}");
    let report = sandbox.read("out/report.md");
    assert!(report.contains("`mod †` reads later tokens where its loss is measured"), "{report}");
    assert!(report.contains("| mod † |") && !report.contains("| mod |"), "{report}");
    // Two arms that both do are alike, and their losses are still said to be none.
    sandbox.write(
        "both.suite.yaml",
        &SKIPS.replace("la.yaml", "mod.yaml").replace("{spec:", "{name: two, spec:"),
    );
    sandbox.good(&["compare", "both.suite.yaml", "--out", "both"]);
    let report = sandbox.read("both/report.md");
    assert!(report.contains("`two` reads later tokens where") && !report.contains('†'), "{report}");
}

/// An arm is matched on the FLOPs that its capacity declares, and its router lets through another
/// share: the report shows it, and a suite may ask for it.
#[test]
fn what_skip_arms_process_is_shown_and_may_be_asked_for() {
    let sandbox = sandbox();
    sandbox.write("mod.yaml", &skipping(", causal bce 0.01"));
    sandbox.write("skips.suite.yaml", &SKIPS.replace("flops: 60%", "flops: 60%, flops_processed: 0.01%"));
    let out = sandbox.good(&["compare", "skips.suite.yaml", "--out", "out"]);
    assert!(out.contains("mod †"), "{out}");
    let report = sandbox.read("out/report.md");
    for part in [
        "| FLOPs processed per token | within 0.01 % |",
        "## Tokens processed",
        "| mod † | `layers.0.skip.0` | 50.0 % | 50.0 % |",
        "| processed | Δ processed |",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    // The count is that of a model whose capacity is what was processed.
    let ledger = |run: &str| -> Value {
        serde_json::from_str(&sandbox.read(&format!("out/{run}/ledger.json"))).unwrap()
    };
    let (base, own) = (ledger("la-seed0"), ledger("mod-seed0"));
    let number = |ledger: &Value, key: &str| ledger[key].as_f64().unwrap();
    let [declared, processed] =
        ["decode_flops_per_token", "processed_flops_per_token"].map(|key| number(&own, key));
    assert_eq!(number(&base, "processed_flops_per_token"), number(&base, "decode_flops_per_token"));
    let parts = metrics(&sandbox.path("out/mod-seed0")).pop().unwrap()["health"]["parts"].clone();
    let shares: Vec<f64> =
        parts.as_array().unwrap().iter().map(|p| p["processed"].as_f64().unwrap()).collect();
    assert_eq!(shares.len(), 3);
    let mean = shares.iter().sum::<f64>() / 3.0;
    let counted = |capacity: f64| {
        let field = skipping(", causal bce 0.01").replace("capacity 0.5", &format!("capacity {capacity:.6}"));
        sandbox.write("at.yaml", &field);
        let json: Value =
            serde_json::from_str(&sandbox.good(&["count", "at.yaml", "--tokens", "64", "--json"])).unwrap();
        json["flops_per_token"]["decode"].as_f64().unwrap()
    };
    assert!((counted(0.5) - declared).abs() < 1.0);
    if mean > 0.02 {
        let expected = counted(mean);
        assert!((processed / expected - 1.0).abs() < 0.02, "{processed} {expected} {shares:?}");
    } else {
        assert!(processed < declared, "{processed} {declared}");
    }
    // Generation is measured on what the model writes: the share of the last column is that of the
    // tokens written, which `eval` of the same run finds, too.
    let last = metrics(&sandbox.path("out/mod-seed0")).pop().unwrap()["health"].clone();
    let written = last["written"].as_u64().unwrap();
    assert!(written > 8, "{last}");
    let generated: Vec<f64> =
        last["parts"].as_array().unwrap().iter().map(|p| p["generation"].as_f64().unwrap()).collect();
    for share in &generated {
        let tokens = share * written as f64;
        assert!((tokens - tokens.round()).abs() < 1e-6, "{share} of {written} tokens");
    }
    let row = report.lines().find(|l| l.starts_with("| mod † | `layers.0.skip.0`")).unwrap();
    assert!(row.ends_with(&format!("| {:.1} % |", 100.0 * generated[0])), "{row} {generated:?}");
    let again: Value = serde_json::from_str(&sandbox.good(&["eval", "out/mod-seed0", "--json"])).unwrap();
    assert_eq!(again[0]["health"]["written"], last["written"]);
    assert_eq!(again[0]["health"]["parts"][0]["generation"], last["parts"][0]["generation"]);
    assert!(sandbox.good(&["eval", "out/mod-seed0"]).contains(&format!("of {written} tokens written")));
    // A suite that does not ask marks nobody.
    sandbox.write("free.suite.yaml", SKIPS);
    sandbox.good(&["compare", "free.suite.yaml", "--out", "free"]);
    assert!(!sandbox.read("free/report.md").contains('†'));
}

/// In Chromium the pointer shows the values of all arms, a click on a name hides its arm, nothing
/// is asked for from elsewhere, and a page without scripts is whole.
#[test]
fn a_report_shows_values_at_the_pointer_and_hides_arms() {
    let Some(python) = crate::support::python() else { return };
    let sandbox = sandbox();
    sandbox.write("pair.suite.yaml", &SUITE.replace("seeds: [0, 1]", "seeds: [0]"));
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/report_client.py");
    let output = Command::new(python).arg(script).arg(sandbox.path("out/report.html")).output().unwrap();
    let (out, err) = texts(&output);
    if out.contains("no Chromium") {
        return dreamc_skip::skip("no Chromium: apt-get install chromium");
    }
    assert!(output.status.success() && out.contains("all well"), "{out}{err}");
}

/// A refusal says what would be written to allow it, and that is enough.
#[test]
fn what_a_refusal_advises_is_enough() {
    let sandbox = sandbox();
    let suite = "\
name: own
baseline: la.yaml
variants: [{name: other, spec: la.yaml, set: {ea.count: 6, train.warmup: 1}}]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 2, batch: 2, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
";
    sandbox.write("own.suite.yaml", suite);
    let error = sandbox.error(&["compare", "own.suite.yaml", "--dry-run"]);
    assert!(error.contains("a key that is not there is enforced by its default"), "{error}");
    let advice = error.split('`').find(|part| part.starts_with("equal: {")).expect("advice");
    assert!(advice.contains("parameters: ") && advice.contains("schedule: false"), "{error}");
    sandbox.write("own.suite.yaml", &format!("{suite}{advice}\n"));
    sandbox.good(&["compare", "own.suite.yaml", "--dry-run"]);
}

/// Two specifications make a suite, which is shown, left in a file, and run; a file that says
/// something else stays as it is.
#[test]
fn specifications_are_compared_without_a_suite() {
    let recipe = "\
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 2, batch: 2, sequence: 32, learning_rate: 1e-3, warmup: 1, precision: f32}
eval: {examples: 2, max_tokens: 8}
";
    let sandbox = Sandbox::with(&[("la.yaml", &format!("{LAYERED}{recipe}")), ("dr-da.yaml", RECURRENT)]);
    let asked = ["compare", "la.yaml", "dr-da.yaml", "--seeds", "2"];
    let out = sandbox.good(&[&asked[..], &["--dry-run"]].concat());
    assert!(
        out.contains("la-against-dr-da.suite.yaml would be") && out.contains("2 arms, seeds 0, 1"),
        "{out}"
    );
    assert!(!sandbox.path("la-against-dr-da.suite.yaml").exists() && !sandbox.path("runs").exists());
    let out = sandbox.good(&asked);
    assert!(out.contains("4 runs trained"), "{out}");
    let made = sandbox.read("la-against-dr-da.suite.yaml");
    for part in [
        "baseline: la.yaml",
        "spec: dr-da.yaml",
        "match: {flops: {",
        "params: {ea.count: 1}",
        "seeds: [0, 1]",
    ] {
        assert!(made.contains(part), "{part}: {made}");
    }
    // The arm that had no data has the baseline's, and both the same recipe.
    assert!(made.contains("\ndata:\n") && made.contains("\ntrain:\n") && !made.contains("seed:"), "{made}");
    // It is a suite of its own, whose runs are those that were trained.
    let again = ["compare", "la-against-dr-da.suite.yaml", "--out", "runs/la-against-dr-da"];
    assert!(sandbox.good(&again).contains("4 runs were trained before"));
    assert!(sandbox.good(&asked).contains("4 runs were trained before"));
    sandbox.write("la-against-dr-da.suite.yaml", &made.replace("[0, 1]", "[0]"));
    let error = sandbox.error(&asked);
    assert!(error.contains("is left alone"), "{error}");
    assert!(sandbox.read("la-against-dr-da.suite.yaml").contains("[0]"));
}

/// A suite of the baseline alone trains it with every seed, and so does `train --seeds`; both are
/// added up.
#[test]
fn one_arm_with_several_seeds() {
    let sandbox = sandbox();
    let suite: String = SUITE
        .lines()
        .filter(|l| !l.contains("variants") && !l.contains("dr-da") && !l.contains("match"))
        .fold(String::new(), |text, line| text + line + "\n");
    sandbox.write("one.suite.yaml", &suite.replace("steps: 12", "steps: 2"));
    let out = sandbox.good(&["compare", "one.suite.yaml", "--out", "one"]);
    assert!(out.contains("1 arm, seeds 0, 1") && out.contains("2 runs trained"), "{out}");
    assert!(sandbox.read("one/report.md").contains("1 arm, 2 seeds; the baseline is `la`"));

    let recipe = "\
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 2, batch: 2, sequence: 32, warmup: 1, precision: f32, seed: 3}
eval: {examples: 2, max_tokens: 8}
";
    sandbox.write("a.yaml", &format!("{LAYERED}{recipe}"));
    let out = sandbox.good(&["train", "a.yaml", "--seeds", "2", "--out", "runs/a"]);
    assert!(out.contains("over seeds") && out.contains("2 of 2") && out.contains(" ± "), "{out}");
    let loss = |seed: u64| -> f64 {
        let ledger: Value =
            serde_json::from_str(&sandbox.read(&format!("runs/a-seed{seed}/ledger.json"))).unwrap();
        assert_eq!(ledger["seed"], seed);
        ledger["validation_loss"].as_f64().unwrap()
    };
    let mean = format!("{:.4} ±", (loss(3) + loss(4)) / 2.0);
    assert!(out.contains(&mean), "{mean}: {out}");
    // One seed after another is the same as by hand.
    sandbox.good(&["train", "a.yaml", "--set", "train.seed=4", "--out", "runs/b"]);
    assert_eq!(metrics(&sandbox.path("runs/b")), metrics(&sandbox.path("runs/a-seed4")));
    let out = sandbox.good(&["runs"]);
    assert!(out.contains(&mean) && out.contains("2 of 3"), "{out}");
    let runs: Value = serde_json::from_str(&sandbox.good(&["runs", "--json"])).unwrap();
    assert_eq!(runs[0]["recipe"], runs[1]["recipe"]);

    // Nothing is overwritten; what is trained is left as it is, what is missing is trained.
    let error = sandbox.error(&["train", "a.yaml", "--seeds", "2", "--out", "runs/a"]);
    assert!(error.contains("runs/a-seed3 exists already: go on with --resume"), "{error}");
    fs::remove_dir_all(sandbox.path("runs/a-seed4")).unwrap();
    let out = sandbox.good(&["train", "a.yaml", "--seeds", "2", "--out", "runs/a", "--resume"]);
    assert!(out.contains(&mean), "{out}");
    let error = sandbox.error(&["train", "a.yaml", "--resume"]);
    assert!(error.contains("--resume needs --out"), "{error}");
}

/// FLOPs of training are matched, demanded and shown.
#[test]
fn training_flops_are_a_quantity() {
    let sandbox = sandbox();
    let suite = SUITE
        .replace("flops: {ea.intermediate: 1}, params", "training: {ea.intermediate: 1}, params")
        .replace("flops: 4%,", "flops: none, training: 4%,");
    sandbox.write("training.suite.yaml", &suite);
    let out = sandbox.good(&["match", "training.suite.yaml"]);
    assert!(out.contains("training FLOPs per token"), "{out}");
    sandbox.good(&["compare", "training.suite.yaml", "--dry-run"]);
    // An arm that is matched on the FLOPs of generation alone is refused where training's are
    // asked.
    sandbox.write("other.suite.yaml", &SUITE.replace("flops: 4%,", "flops: 4%, training: 0.01%,"));
    let error = sandbox.error(&["compare", "other.suite.yaml", "--dry-run"]);
    assert!(error.contains("training FLOPs per token") && error.contains("equal: {training: "), "{error}");
    sandbox.write(
        "none.suite.yaml",
        &SUITE.replace("match: {flops: {ea.intermediate: 1}, params: ea.count}", "match: {}"),
    );
    let error = said(&sandbox, &["check", "none.suite.yaml"]);
    assert!(error.contains("`match` names no field"), "{error}");
    sandbox.write(
        "two.suite.yaml",
        &SUITE.replace("flops: {ea.intermediate: 1}", "flops: {ea.intermediate: 1, ea.count: 8}"),
    );
    let error = said(&sandbox, &["check", "two.suite.yaml"]);
    assert!(error.contains("`flops` is met by one field; `ea.count` is a second"), "{error}");
    sandbox.write(
        "gone.suite.yaml",
        &SUITE.replace("flops: {ea.intermediate: 1}", "flops: {ea.intermediat: 1}"),
    );
    let error = said(&sandbox, &["check", "gone.suite.yaml"]);
    assert!(error.contains("`ea.intermediat` is not an integer field; `ea` has"), "{error}");
    sandbox.write("twice.suite.yaml", &SUITE.replace("params: ea.count", "params: model.ea.intermediate"));
    let error = said(&sandbox, &["check", "twice.suite.yaml"]);
    assert!(
        error.contains("twice.suite.yaml:5:")
            && error.contains("`flops` varies `model.ea.intermediate` already"),
        "{error}"
    );
}
