//! Sweeps and ladders as their users meet them: tuned, trained, gone on with, refused.

use crate::support::sandbox::Sandbox;

const MODEL: &str = "\
let: {h: 16}
model:
  name: NAME
  vocab: 256
  hidden: h
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 2 * h}}
  body:
    - BODY
";

const SUITE: &str = "\
name: rise
baseline: layered.yaml
variants:
  - spec: shared.yaml
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 20, batch: 2, sequence: 32, learning_rate: 1e-3, warmup: 2, schedule: cosine, precision: f32,
        evaluate: {every: 10, batches: 1}}
eval: {examples: 4, max_tokens: 8}
sweep: {train.learning_rate: [1e-3, 4e-3]}
sweep_edge: allow
ladder: {sizes: {small: {h: 16}, large: {h: 32}}, budgets: [2e8, 4e8]}
equal: {flops: 90%, parameters: 90%}
seeds: [0, 1]
";

fn sandbox() -> Sandbox {
    let of = |name: &str, body: &str| MODEL.replace("NAME", name).replace("BODY", body);
    let layered = of("layered", "{repeat: 2, layers: [sa > mlp]}");
    let shared = of("shared", "{recur: 2, layers: [sa > mlp]}");
    let sandbox = Sandbox::with(&[("layered.yaml", &layered), ("shared.yaml", &shared)]);
    sandbox.write("rise.suite.yaml", SUITE);
    sandbox
}

#[test]
fn a_ladder_is_tuned_climbed_and_reported_once() {
    let sandbox = sandbox();
    let plan = sandbox.good(&["compare", "rise.suite.yaml", "--out", "out", "--dry-run"]);
    for part in ["small-2e8", "large-4e8", "FLOPs a run", "hours a run", "20 runs"] {
        assert!(plan.contains(part), "{part} is missing:\n{plan}");
    }
    assert!(!sandbox.path("out").exists());

    let line = ["compare", "rise.suite.yaml", "--out", "out", "--threads", "2"];
    let out = sandbox.good(&line);
    for part in ["layered goes on with learning_rate", "detects a difference of", "against the baseline"] {
        assert!(out.contains(part), "{part} is missing:\n{out}");
    }
    let report = sandbox.read("out/report.md");
    for part in [
        "## Tuning",
        "an end of its values",
        "too few seeds",
        "## Curves",
        "## Laws",
        "no law of compute",
        "nats a target",
    ] {
        assert!(report.contains(part), "{part} is missing:\n{report}");
    }
    assert!(!report.contains(" p = "), "two seeds have no p-value:\n{report}");
    assert!(sandbox.path("out/figures/equal-flops.svg").is_file());
    assert_eq!(sandbox.read("out/runs.csv").lines().count(), 1 + 2 * 2 * 2 * 2);
    assert!(sandbox.good(&["watch", "out"]).contains("trial"));

    // Nothing is trained a second time, and the report is the same to the byte.
    let checkpoint = sandbox.path("out/large-4e8/shared-seed1/ledger.json");
    let before = std::fs::read(&checkpoint).unwrap();
    sandbox.good(&line);
    assert_eq!(std::fs::read(&checkpoint).unwrap(), before);
    sandbox.good(&["report", "out"]);
    assert_eq!(sandbox.read("out/report.md"), report);
}

#[test]
fn a_best_value_at_the_edge_is_refused_with_the_value_to_add() {
    let sandbox = sandbox();
    let suite = SUITE.replace("sweep_edge: allow\n", "").replace("[1e-3, 4e-3]", "[1e-6, 2e-6, 4e-6]");
    sandbox.write("edge.suite.yaml", &suite);
    let (code, error) = sandbox.bad(&["compare", "edge.suite.yaml", "--out", "edge"]);
    assert_eq!(code, 1);
    assert!(error.contains("the largest of its values") && error.contains("Add 8.000e-6"), "{error}");
}

#[test]
fn unfair_ladders_are_refused() {
    let sandbox = sandbox();
    let refused = |from: &str, to: &str, part: &str| {
        assert!(SUITE.contains(from));
        sandbox.write("bad.suite.yaml", &SUITE.replace(from, to));
        let (_, error) = sandbox.bad(&["compare", "bad.suite.yaml", "--out", "bad"]);
        assert!(error.contains(part), "{part} is missing:\n{error}");
        assert!(!sandbox.path("bad").exists());
    };
    refused("schedule: cosine", "schedule: constant", "a constant rate never decays");
    refused("schedule: cosine, ", "", "a constant rate never decays");
    refused("sweep_edge: allow\n", "", "fewer than three values");
    refused("train.learning_rate: [", "train.steps: [", "cannot be tuned by a sweep");
    refused("[2e8, 4e8]", "[1e6]", "a cell needs at least 10");
    refused("flops: 90%", "tuning, flops: 0.001%", "do not agree");
    sandbox.write("gate.suite.yaml", &SUITE.replace("4e8]}", "4e8], gate: true}").replace("[0, 1]", "[0]"));
    assert!(sandbox.error(&["compare", "gate.suite.yaml"]).contains("one seed shows no noise"));
    refused("{h: 32}", "{nothing: 32}", "nothing");
    // Fields of the sweep are looked for before anything is trained, of --dry-run too.
    refused("train.learning_rate: [", "nosuch.field: [", "nosuch");
    let plan = SUITE.replace("train.learning_rate: [", "nosuch.field: [");
    sandbox.write("plan.suite.yaml", &plan);
    assert!(sandbox.error(&["compare", "plan.suite.yaml", "--dry-run"]).contains("nosuch"));
    refused("large: {h: 32}", "small: {h: 32}", "`small` is written twice");
    refused("{h: 32}", "{h: 32, h: 48}", "`h` is written twice");
    refused("4e-3]}", "4e-3], train.learning_rate: [2e-3, 3e-3]}", "`train.learning_rate` is written twice");
    // A field with two values is refused: one of the two would be lost.
    refused("4e8]}", "4e8], cooldown: 0.25}", "takes the place of a schedule");
    refused(
        "spec: shared.yaml",
        "{spec: shared.yaml, set: {train.warmup: 3}}",
        "the ladder scales `train.warmup`",
    );
    let error = sandbox.error(&["compare", "rise.suite.yaml", "--set", "train.learning_rate=1e-3"]);
    assert!(error.contains("the sweep gives `train.learning_rate` its values"), "{error}");
    assert!(
        error.contains("rise.suite.yaml:") && error.contains("--set sweep.train.learning_rate"),
        "{error}"
    );
}

/// Values go on from cell to cell, the carried rate is tried again, and every trial is listed.
#[test]
fn values_are_halved_and_a_carried_rate_is_tried_again() {
    let sandbox = sandbox();
    let suite = SUITE.replace("4e8]}", "4e8], transfer: mup, halving: 2, recheck: true}");
    let suite = suite.replace("[1e-3, 4e-3]", "[1e-3, 4e-3, 1.6e-2]").replace("[0, 1]", "[0]");
    sandbox.write("halve.suite.yaml", &suite);
    let plan = sandbox.good(&["compare", "halve.suite.yaml", "--out", "out", "--plan"]);
    // Three values at the first cell, two at the second, two more of the carried rate.
    for part in ["3 + 4", "one trial in 2 goes on", "carried by `mup`", "22 runs"] {
        assert!(plan.contains(part), "{part} is missing:\n{plan}");
    }
    let line = ["compare", "halve.suite.yaml", "--out", "out", "--threads", "2"];
    let out = sandbox.good(&line);
    assert!(out.contains("layered goes on with") && out.contains("the carried rate"), "{out}");
    let listed = sandbox.good(&["runs", "out"]);
    assert_eq!(listed.matches("finished").count(), 22, "{listed}");
    let report = sandbox.read("out/report.md");
    for part in
        ["The best of the cell before, tried at large-2e8", "Carried rates at large-2e8", "at half of it"]
    {
        assert!(report.contains(part), "{part} is missing:\n{report}");
    }
    let manifest: serde_json::Value = serde_json::from_str(&sandbox.read("out/ladder.json")).unwrap();
    assert_eq!(manifest["halved"][0]["trials"][0].as_array().unwrap().len(), 2, "{manifest}");
    // Nothing is trained again.
    let again = sandbox.good(&line);
    assert!(again.contains("the carried rate"), "{again}");
    let error = |from: &str, to: &str| {
        sandbox.write("bad.suite.yaml", &suite.replace(from, to));
        sandbox.error(&["compare", "bad.suite.yaml", "--dry-run"])
    };
    let one = error(", large: {h: 32}", "");
    assert!(one.contains("the ladder has one size alone"), "{one}");
}

#[test]
fn runs_are_listed_and_told_apart() {
    let sandbox = sandbox();
    let suite = SUITE.replace("sweep: {", "# {").replace("sweep_edge: allow\n", "");
    let suite: String =
        suite.lines().filter(|l| !l.starts_with("ladder")).map(|l| format!("{l}\n")).collect();
    sandbox.write("plain.suite.yaml", &suite);
    sandbox.good(&["compare", "plain.suite.yaml", "--out", "out"]);
    let listed = sandbox.good(&["runs", "out"]);
    assert_eq!(listed.matches("finished").count(), 4, "{listed}");
    assert!(listed.contains("held-out loss, nats"));
    let found = sandbox.good(&["diff", "out/layered-seed0", "out/shared-seed1"]);
    for part in ["model.name", "train.seed", "run.validation_loss", "run.parameters"] {
        assert!(found.contains(part), "{part} is missing:\n{found}");
    }
    assert!(sandbox.good(&["diff", "layered.yaml", "layered.yaml"]).contains("no field differs"));
    // A run that is damaged hides no other.
    sandbox.write("out/layered-seed0/ledger.json", "{");
    let output = sandbox.run(&["runs", "out"]);
    let (listed, said) = crate::support::sandbox::texts(&output);
    assert!(output.status.success() && listed.matches("finished").count() == 3, "{listed}");
    assert!(said.contains("layered-seed0/ledger.json: not a ledger"), "{said}");
    assert!(sandbox.bad(&["runs", "out/layered-seed0/checkpoints"]).1.contains("holds no run"));
}

#[test]
fn branches_of_a_trunk_end_as_runs_trained_alone() {
    let sandbox = sandbox();
    let suite = SUITE.replace("sweep: {", "# {").replace("sweep_edge: allow\n", "");
    let suite = suite.replace("2e8, 4e8]}", "2e8, 4e8], cooldown: 0.25}").replace("[0, 1]", "[0]");
    let suite = suite.replace("schedule: cosine, ", "");
    sandbox.write("cool.suite.yaml", &suite);
    sandbox.good(&["compare", "cool.suite.yaml", "--out", "out"]);
    let ledger = |run: &str| -> serde_json::Value {
        serde_json::from_str(&sandbox.read(&format!("out/{run}/ledger.json"))).unwrap()
    };
    for cell in ["small-2e8", "small-4e8"] {
        let branch = ledger(&format!("{cell}/layered-seed0"));
        let trunk = ledger("small-trunk/layered-seed0");
        assert!(branch["steps"].as_u64() > Some(10) && trunk["status"] == "finished");
        let spec = format!("out/{cell}/layered-seed0/spec.yaml");
        sandbox.good(&["train", &spec, "--out", &format!("alone-{cell}")]);
        let alone: serde_json::Value =
            serde_json::from_str(&sandbox.read(&format!("alone-{cell}/ledger.json"))).unwrap();
        for key in ["validation_loss", "steps", "tokens", "executed_flops"] {
            assert_eq!(branch[key], alone[key], "{cell}: {key}");
        }
    }
}
