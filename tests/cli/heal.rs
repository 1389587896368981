//! A teacher in training, and arms that begin from a transplant: the way a user goes, and what is
//! refused.

use crate::support::sandbox::{Sandbox, bits, metrics, newest};
use serde_json::Value;
use std::fs;

const DENSE: &str = "\
model:
  name: dense
  vocab: 256
  hidden: 16
  context: 32
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, projection: none}}
    mlp: {mlp: {intermediate: 24}}
  body:
    - repeat: 2
      layers: [sa > mlp]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 1, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const STAGES: &str =
    "stages: [{match: layers, steps: 2}, {match: logits, temperature: 2, top: 8, loss: 0.5, steps: 2}]";

/// A loop of definitions' mixers over depth attention, in the place of layers.
fn mixture(heal: &str) -> String {
    let attention = "sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, projection: none}}\n    da: {depth: {heads: 1, head_size: 8}}";
    let text = DENSE
        .replace("sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, projection: none}}", attention)
        .replace("repeat: 2", "recur: 2")
        .replace("sa > mlp", "(da | sa) > mlp")
        .replace("name: dense", "name: mixture")
        .replace("steps: 4, ", "steps: 6, checkpoint: {every: 3}, ");
    format!("heal: {{{heal}}}\n{text}")
}

fn taught() -> Sandbox {
    let spec = mixture(&format!("teacher: runs/dense, {STAGES}"));
    let sandbox = Sandbox::with(&[("dense.yaml", DENSE), ("mixture.yaml", &spec)]);
    sandbox.good(&["train", "dense.yaml", "--out", "runs/dense"]);
    sandbox
}

fn ledger(sandbox: &Sandbox, run: &str) -> Value {
    serde_json::from_str(&sandbox.read(&format!("{run}/ledger.json"))).unwrap()
}

#[test]
fn a_teacher_is_matched_by_stages_and_a_run_goes_on_with_equal_bits() {
    let sandbox = taught();
    let weights = bits(&sandbox.path("runs/dense"), 4);
    let said = sandbox.good(&["train", "mixture.yaml", "--out", "runs/a", "--count"]);
    assert!(said.contains("layers, 2 steps") && said.contains("temperature 2"), "{said}");
    let lines = metrics(&sandbox.path("runs/a"));
    let taught: Vec<f64> = lines.iter().filter_map(|line| line["taught"].as_f64()).collect();
    assert_eq!(taught.len(), 6, "{taught:?}");
    assert!(taught[..4].iter().all(|taught| *taught > 0.0), "{taught:?}");
    assert_eq!(taught[4..], [0.0, 0.0], "no teacher behind the last stage");
    let account = ledger(&sandbox, "runs/a");
    // Four of six steps have a teacher.
    let (all, each) = (&account["teacher_flops"], account["teacher_flops_per_token"].as_f64().unwrap());
    assert!((all.as_f64().unwrap() / (4.0 * 4.0 * 32.0) - each * 1.5).abs() < 0.1 * each, "{account}");
    // Cut off after step 3, in the second stage.
    fs::create_dir_all(sandbox.path("runs/b")).unwrap();
    for entry in walk(&sandbox.path("runs/a")) {
        let to = sandbox.path("runs/b").join(entry.strip_prefix(sandbox.path("runs/a")).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(&entry, to).unwrap();
    }
    fs::remove_dir_all(newest(&sandbox.path("runs/b"))).unwrap();
    sandbox.good(&["resume", "runs/b"]);
    assert_eq!(bits(&sandbox.path("runs/a"), 6), bits(&sandbox.path("runs/b"), 6));
    // Kept on disk: the same bits, and the second run computes nothing of the teacher's.
    for run in ["runs/c", "runs/d"] {
        let spec = sandbox.read("mixture.yaml").replace("heal: {", "heal: {cache: 10MB, ");
        sandbox.write("kept.yaml", &spec);
        sandbox.good(&["train", "kept.yaml", "--out", run]);
        let (a, b) = (metrics(&sandbox.path("runs/a")), metrics(&sandbox.path(run)));
        let losses =
            |lines: &[Value]| lines.iter().filter_map(|line| line["norm"].as_f64()).collect::<Vec<_>>();
        assert_eq!(losses(&a), losses(&b));
    }
    assert_eq!(ledger(&sandbox, "runs/d")["teacher_flops"], 0);
    assert!(weights == bits(&sandbox.path("runs/dense"), 4), "a teacher stays as it is");
}

fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(walk(&path)) } else { found.push(path) }
    }
    found
}

#[test]
fn a_model_is_healed_from_its_donor_and_components_by_names() {
    let sandbox = taught();
    // The donor is the teacher, and a model that computes its function has nothing to learn.
    let same = DENSE.replace("name: dense", "name: same");
    sandbox.write(
        "same.yaml",
        &format!("transplant: {{from: runs/dense}}\nheal: {{stages: [{{match: [logits, layers]}}]}}\n{same}"),
    );
    sandbox.good(&["train", "same.yaml", "--out", "runs/same", "--set", "train.steps=1"]);
    let first = metrics(&sandbox.path("runs/same"))[0]["taught"].as_f64().unwrap();
    assert!(first.abs() < 1e-5, "{first}");
    let account = ledger(&sandbox, "runs/same");
    assert_eq!(account["donor_flops"], ledger(&sandbox, "runs/dense")["executed_flops"]);
    // Outputs, attention maps and hidden states at named places, of a model that loops.
    for stage in [
        "{match: layers.0@*.sa.out, from: layers.*.sa.out}",
        "{match: layers.0@*.sa.scores, from: layers.*.sa.scores}",
        "{match: [layers.0@1.out, logits], from: [layers.0.out, logits], weight: [0.1, 1]}",
    ] {
        sandbox.write("named.yaml", &mixture(&format!("teacher: runs/dense, stages: [{stage}]")));
        let run = ["train", "named.yaml", "--out", "runs/named", "--force", "--set", "train.steps=20"];
        sandbox.good(&[&run[..], &["--set", "train.learning_rate=3e-3"]].concat());
        let lines = metrics(&sandbox.path("runs/named"));
        let taught: Vec<f64> = lines.iter().filter_map(|line| line["taught"].as_f64()).collect();
        let least = taught.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(least < 0.9 * taught[0], "{stage}: {taught:?}");
    }
}

#[test]
fn what_cannot_be_taught_is_refused_at_its_token() {
    let sandbox = taught();
    let spec = |stages: &str| mixture(&format!("teacher: runs/dense, stages: [{stages}]"));
    let names = |text: String, from: &str, to: &str| text.replace(from, to);
    for (text, message) in [
        (mixture("teacher: runs/none, stages: [{match: logits}]"), "runs/none"),
        (
            names(spec("{match: logits}"), "vocab: 256", "vocab: 300"),
            "the teacher's vocabulary has 256 tokens, and the model's 300",
        ),
        (
            names(
                names(spec("{match: logits}"), "context: 32", "context: 64"),
                "sequence: 32",
                "sequence: 64",
            ),
            "rows have 64 tokens, and the teacher's context is 32",
        ),
        (spec("{match: layers.0@0.sb.out}"), "`layers.0@0.sb.out` names no value of the model"),
        (
            spec("{match: layers.0@0.sa.out, from: layers.7.sa.out}"),
            "`layers.7.sa.out` names no value of the teacher",
        ),
        (
            spec("{match: layers.*.sa.out, from: layers.0.sa.out}"),
            "are 2 values of the model and 1 of the teacher",
        ),
        (names(spec("{match: layers}"), "hidden: 16", "hidden: 24"), "is [4, 32, 24] and the teacher's"),
        (spec("{match: layers, steps: 40}"), "the stages take 40 steps, and training has 6"),
        (
            names(
                spec("{match: [logits, layers]}"),
                "warmup: 1",
                "warmup: 1, random_depth: {min: 1, max: 2}",
            ),
            "`layers` is inside the model, whose depth is drawn anew each step",
        ),
    ] {
        sandbox.write("bad.yaml", &text);
        let said = sandbox.error(&["train", "bad.yaml", "--out", "runs/bad"]);
        assert!(said.contains(message) && said.contains("bad.yaml"), "{message}: {said}");
        assert!(!sandbox.path("runs/bad").exists(), "{message}");
    }
    // A longer context than the rows is no matter.
    let long = DENSE.replace("context: 32", "context: 96").replace("name: dense", "name: long");
    sandbox.write("long.yaml", &long);
    sandbox.good(&["train", "long.yaml", "--out", "runs/long", "--set", "train.steps=1"]);
    sandbox.write("short.yaml", &mixture("teacher: runs/long, stages: [{match: logits}]"));
    sandbox.good(&["train", "short.yaml", "--out", "runs/short", "--set", "train.steps=1"]);
}

#[test]
fn arms_begin_from_transplants_and_a_report_says_whether_donors_count() {
    let sandbox = taught();
    let experts = DENSE
        .replace(
            "mlp: {mlp: {intermediate: 24}}",
            "ea: {experts: {count: 4, active: 2, intermediate: 24, query: 8}}",
        )
        .replace("sa > mlp", "sa > ea")
        .replace("name: dense", "name: upcycled");
    sandbox.write("fresh.yaml", &experts.replace("name: upcycled", "name: fresh"));
    sandbox.write("upcycled.yaml", &format!("transplant: {{from: runs/dense}}\n{experts}"));
    let suite = |equal: &str| {
        format!(
            "name: up\nbaseline: fresh.yaml\nvariants: [upcycled.yaml]\nseeds: [0, 1]\nequal: {{{equal}}}\n"
        )
    };
    sandbox.write("up.suite.yaml", &suite("budget: 1%"));
    sandbox.good(&["compare", "up.suite.yaml", "--out", "free"]);
    let page = sandbox.read("free/report.md");
    assert!(page.contains("training FLOPs without a donor's"), "{page}");
    assert!(!page.contains('†'), "{page}");
    for seed in 0..2 {
        let spent = ledger(&sandbox, &format!("free/upcycled-seed{seed}"))["donor_flops"].clone();
        assert_eq!(spent, ledger(&sandbox, "runs/dense")["executed_flops"]);
    }
    sandbox.write("paid.suite.yaml", &suite("budget: 1%, donor: true"));
    let said = sandbox.error(&["compare", "paid.suite.yaml", "--out", "paid"]);
    assert!(said.contains("training FLOPs with the donor's") && !sandbox.path("paid").exists(), "{said}");
    sandbox.good(&["compare", "paid.suite.yaml", "--out", "paid", "--allow-unequal"]);
    let page = sandbox.read("paid/report.md");
    assert!(page.contains("training FLOPs with the donor's") && page.contains('†'), "{page}");
    sandbox.write("upcycled.yaml", &format!("transplant: {{from: runs/none}}\n{experts}"));
    let said = sandbox.error(&["compare", "up.suite.yaml", "--out", "none"]);
    assert!(said.contains("the donor cannot be opened") && !sandbox.path("none").exists(), "{said}");
}

#[test]
fn logits_are_matched_at_random_depths() {
    let sandbox = taught();
    let spec = mixture("teacher: runs/dense, stages: [{match: logits, steps: 5}]");
    sandbox.write("deep.yaml", &spec.replace("warmup: 1", "warmup: 1, random_depth: {min: 1, max: 3}"));
    sandbox.good(&["train", "deep.yaml", "--out", "runs/deep", "--count"]);
    let lines = metrics(&sandbox.path("runs/deep"));
    let seen = |key: &str| lines.iter().filter_map(|line| line[key].as_f64()).collect::<Vec<_>>();
    let (taught, depths) = (seen("taught"), seen("depth"));
    assert!(depths.iter().any(|depth| *depth != depths[0]), "{depths:?}");
    assert!(taught[..5].iter().all(|taught| *taught > 0.0) && taught[5] == 0.0, "{taught:?}");
    // The same teacher is matched better: a step of each depth moves the same weights.
    let run = [
        "train",
        "deep.yaml",
        "--out",
        "runs/long",
        "--set",
        "train.steps=30",
        "--set",
        "heal.stages=[{match: logits}]",
    ];
    sandbox.good(&[&run[..], &["--set", "train.learning_rate=3e-3"]].concat());
    let lines = metrics(&sandbox.path("runs/long"));
    let taught: Vec<f64> = lines.iter().filter_map(|line| line["taught"].as_f64()).collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    assert!(mean(&taught[25..]) < 0.95 * mean(&taught[..5]), "{taught:?}");
}

#[test]
fn a_teacher_has_its_memory_and_budgets_say_so() {
    let sandbox = taught();
    let said = sandbox.good(&["train", "mixture.yaml", "--dry-run"]);
    assert!(said.contains("teacher's memory") && said.contains("(weights "), "{said}");
    let json = sandbox.good(&["count", "mixture.yaml", "--json"]);
    let counts: Value = serde_json::from_str(&json).unwrap();
    let bytes = counts["teacher"]["bytes"].as_u64().unwrap();
    assert!(bytes > 0 && counts["teacher"]["flops_per_token"].as_f64().unwrap() > 0.0, "{counts}");
    assert!(sandbox.good(&["count", "mixture.yaml"]).contains("the teacher's, next to it"));
    // A run's figure has both, and a budget is of both.
    sandbox.good(&["train", "mixture.yaml", "--out", "runs/a"]);
    sandbox.write("alone.yaml", sandbox.read("mixture.yaml").split_once('\n').unwrap().1);
    sandbox.good(&["train", "alone.yaml", "--out", "runs/alone"]);
    let peak = |run: &str| ledger(&sandbox, run)["peak_memory"].as_u64().unwrap();
    assert!(peak("runs/a") >= peak("runs/alone") + bytes / 2, "{} {}", peak("runs/a"), peak("runs/alone"));
    let said =
        sandbox.error(&["train", "mixture.yaml", "--out", "runs/small", "--set", "train.memory=0.001MB"]);
    assert!(said.contains("of which the teacher takes"), "{said}");
    // A plan has its memory, and the forward of every micro-batch in those steps that have it.
    let plan = |spec: &str| {
        let json = sandbox.good(&["plan", spec, "--machine", "cpu", "--ranks", "1", "--json"]);
        let found: Value = serde_json::from_str(&json).unwrap();
        found["meshes"][0].clone()
    };
    let (taught, alone) = (plan("mixture.yaml"), plan("alone.yaml"));
    let kinds = taught["memory"].as_object().unwrap().iter();
    let kinds = kinds.filter(|(name, _)| !["total", "mapped"].contains(&name.as_str()));
    let sum: u64 = kinds.map(|(_, bytes)| bytes.as_u64().unwrap()).sum();
    assert_eq!(taught["memory"]["total"].as_u64(), Some(sum), "{taught}");
    assert!(taught["memory"]["teacher"].as_u64() > Some(0), "{taught}");
    assert!(alone["memory"]["teacher"].is_null(), "{alone}");
    let launches = |mesh: &Value| mesh["seconds"]["launches"].as_f64().unwrap();
    assert!(launches(&taught) > launches(&alone), "{taught} {alone}");
    assert!(sandbox.good(&["plan", "mixture.yaml", "--machine", "cpu", "--ranks", "1"]).contains("teacher"));
    // A teacher that is not there yet is said, and all else is counted.
    sandbox.write("none.yaml", &mixture(&format!("teacher: runs/none, {STAGES}")));
    let counts: Value = serde_json::from_str(&sandbox.good(&["count", "none.yaml", "--json"])).unwrap();
    assert!(counts["teacher"].is_null() && counts["parameters"]["total"].as_u64() > Some(0));
}
