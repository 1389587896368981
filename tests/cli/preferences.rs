//! Preferences: pairs of answers, learned from with adapters and with whole weights, gone on with,
//! and refused where they do not fit.

use crate::support::sandbox::{Sandbox, newest};
use std::fs;

const BASE: &str = "\
model:
  name: small
  vocab: 256
  hidden: 32
  context: 32
  components:
    sa: {sequence: {heads: 2, head_size: 16}}
    mlp: {mlp: {intermediate: 48}}
  body:
    - repeat: 2
      layers: [sa > mlp]
data: {text: text.txt, validation: 0.1}
train: {steps: 4, batch: 4, sequence: 24, learning_rate: 1e-3, warmup: 2, precision: f32}
";

const TUNED: &str = "\
base: runs/small
model: {adapt: {components: [sa, mlp], rank: 4}}
data: {jsonl: pairs.jsonl, prompt: prompt, answer: chosen, rejected: rejected, validation: 0.25}
train: {steps: 24, batch: 8, learning_rate: 1e-2, warmup: 0, dpo: {beta: 0.5}}
";

fn pairs() -> String {
    let row = |i: usize| {
        let (prompt, chosen, rejected) = (format!("{i}+1"), format!("{}", i + 1), format!("no, {i}"));
        format!("{{\"prompt\": \"{prompt}\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}\n")
    };
    (0..24).map(row).collect()
}

fn trained() -> Sandbox {
    let text = "a plain text of no great length. ".repeat(40);
    let files = [("small.yaml", BASE), ("tuned.yaml", TUNED), ("text.txt", &text), ("pairs.jsonl", &pairs())];
    let sandbox = Sandbox::with(&files);
    sandbox.good(&["train", "small.yaml", "--out", "runs/small"]);
    sandbox
}

/// The figures of a run's last evaluation.
fn preferred(sandbox: &Sandbox, run: &str) -> serde_json::Value {
    let lines = sandbox.read(&format!("{run}/metrics.jsonl"));
    let last = lines.lines().rfind(|line| line.contains("preferred")).expect("an evaluation of pairs");
    serde_json::from_str::<serde_json::Value>(last).unwrap()["preferred"].clone()
}

#[test]
fn a_run_prefers_the_better_answers_and_goes_on_to_the_same_bits() {
    let sandbox = trained();
    let said = sandbox.good(&["train", "tuned.yaml", "--out", "runs/a"]);
    assert!(said.contains("preferred, held out"), "{said}");
    let found = preferred(&sandbox, "runs/a");
    let of = |name: &str| found[name].as_f64().unwrap();
    assert_eq!(of("pairs"), 6.0);
    assert!(of("share") > 0.8 && of("loss") < 0.6 && of("margin") > 0.0, "{found}");
    // The first loss is that of a model that is its reference.
    let first = sandbox.read("runs/a/metrics.jsonl");
    let first: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    let loss = first["loss"].as_f64().unwrap();
    assert!((loss - 2f64.ln()).abs() < 1e-4, "{loss}");

    let reference = fs::read(sandbox.path("runs/a/reference.safetensors")).unwrap();
    let bytes = |run: &str| fs::read(newest(&sandbox.path(run)).join("model.safetensors")).unwrap();
    for (spec, all) in [("tuned.yaml", None), ("whole.yaml", Some(""))] {
        let text = match all {
            None => TUNED.to_string(),
            Some(_) => TUNED.lines().filter(|l| !l.starts_with("model")).map(|l| format!("{l}\n")).collect(),
        };
        sandbox.write(spec, &text.replace("steps: 24", "steps: 6"));
        sandbox.good(&["train", spec, "--out", "runs/c", "--force"]);
        sandbox.good(&["train", spec, "--out", "runs/b", "--force", "--set", "train.steps=3"]);
        sandbox.good(&["resume", "runs/b", "--set", "train.steps=6"]);
        assert!(bytes("runs/b") == bytes("runs/c"), "{spec}");
        // The reference is that of the base, whatever is trained on it.
        assert!(fs::read(sandbox.path("runs/b/reference.safetensors")).unwrap() == reference, "{spec}");
    }
    sandbox.good(&["eval", "runs/b"]);
    sandbox.good(&["generate", "runs/a", "1+1", "-n", "2"]);

    // A run goes on with the reference that it began with, or not at all.
    let path = sandbox.path("runs/b/reference.safetensors");
    let mut damaged = reference.clone();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    fs::write(&path, damaged).unwrap();
    let said = sandbox.error(&["resume", "runs/b", "--set", "train.steps=8"]);
    assert!(said.contains("reference.safetensors") && said.contains("is damaged"), "{said}");
    fs::remove_file(&path).unwrap();
    let said = sandbox.error(&["resume", "runs/b", "--set", "train.steps=8"]);
    assert!(said.contains("reference.safetensors"), "{said}");
    assert!(!path.exists());
}

#[test]
fn preferences_that_do_not_fit_are_errors_at_their_token() {
    let sandbox = Sandbox::with(&[]);
    let whole = format!("{BASE}eval: {{examples: 1}}\n");
    let data = "data: {jsonl: p.jsonl, prompt: q, answer: good, rejected: bad}";
    let say = |data: &str, train: &str| {
        let text = whole.replace("data: {text: text.txt, validation: 0.1}", data);
        sandbox.write("m.yaml", &text.replace("precision: f32}", &format!("precision: f32, {train}}}")));
        String::from_utf8(sandbox.run(&["check", "m.yaml"]).stdout).unwrap()
    };
    for (data, train, words) in [
        (data, "seed: 1", "rows with a `rejected` answer are pairs, for `train.dpo`"),
        ("data: {text: t.txt}", "dpo: {beta: 0.1}", "`dpo` learns from pairs, and `data` has none"),
        (
            "data: {text: t.txt, rejected: bad}",
            "dpo: {beta: 0.1}",
            "`rejected` goes with `jsonl` and `parquet`",
        ),
        ("data: {jsonl: p.jsonl, rejected: bad}", "dpo: {beta: 0.1}", "there is no `prompt`"),
        (data, "dpo: {beta: 0}", "`beta` is out of range: 0"),
        (data, "dpo: {smoothing: 0.7}", "most pairs would be the wrong way round"),
        (data, "dpo: {beta: 0.1}, z_loss: 0.1", "`z_loss` is of tokens that have a target"),
        (data, "dpo: {beta: 0.1}, accumulate: 4", "1 sequences at a time are no whole pairs"),
        (
            "data: {sources: [{jsonl: p.jsonl, prompt: q, answer: good, rejected: bad}, {text: t.txt}]}",
            "dpo: {beta: 0.1}",
            "pairs are read from one source",
        ),
    ] {
        let said = say(data, train);
        assert!(said.contains(words) && said.contains("m.yaml:1"), "{data} {train}: {said}");
    }
    let said = say(data, "dpo: {beta: 0.1, smoothing: 0.2}");
    assert!(!said.contains("error"), "{said}");
    assert!(say(data, "dpo: none").contains("for `train.dpo`"));
}

#[test]
fn rows_that_are_no_pairs_are_named() {
    let sandbox = trained();
    for (row, words) in [
        ("{\"prompt\": \"1\", \"chosen\": \"2\"}", "has no field \"rejected\""),
        ("{\"prompt\": \"1\", \"chosen\": \"2\", \"rejected\": \"2\"}", "the same answer"),
    ] {
        sandbox.write("pairs.jsonl", &format!("{}{row}\n", pairs()));
        let said = sandbox.error(&["train", "tuned.yaml", "--out", "runs/bad"]);
        assert!(said.contains("pairs.jsonl:25") && said.contains(words), "{said}");
        assert!(!sandbox.path("runs/bad").exists());
    }
}
