//! Adapters on a frozen base: trained, gone on with, merged, counted, and refused where they do not
//! fit.

use crate::support::root;
use crate::support::sandbox::{Sandbox, newest};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use std::fs;

const BASE: &str = "\
model:
  name: small
  vocab: 256
  hidden: 32
  context: 64
  components:
    sa: {sequence: {heads: 2, head_size: 16}}
    ea: {experts: {count: 4, active: 2, intermediate: 32, query: 8}}
    mlp: {mlp: {intermediate: 48}}
  body:
    - repeat: 2
      layers: [sa > ea, sa > mlp]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const TUNED: &str =
    "base: runs/small\nmodel: {adapt: {components: [sa, ea, mlp], rank: 2, alpha: 6}}\ntrain: {steps: 4}\n";

/// With a trained base.
fn trained() -> Sandbox {
    let sandbox = Sandbox::with(&[("small.yaml", BASE), ("tuned.yaml", TUNED)]);
    sandbox.good(&["train", "small.yaml", "--out", "runs/small"]);
    sandbox
}

#[test]
fn adapters_are_trained_beside_a_base_that_stays_in_its_file() {
    let sandbox = trained();
    let base = newest(&sandbox.path("runs/small")).join("model.safetensors");
    let before = fs::read(&base).unwrap();
    let said = sandbox.good(&["train", "tuned.yaml", "--dry-run"]);
    assert!(said.contains("are trained") && said.contains("in its file"), "{said}");
    assert!(!sandbox.path("runs/small-001").exists());
    let said = sandbox.good(&["train", "tuned.yaml", "--out", "runs/tuned"]);
    assert!(said.contains("of which ") && !said.contains("begin anew"), "{said}");
    assert_eq!(fs::read(&base).unwrap(), before);

    // A checkpoint has the adapters and the base's reference.
    let folder = newest(&sandbox.path("runs/tuned"));
    let tuned = Tensors::open(&folder.join("model.safetensors")).unwrap();
    assert!(tuned.entries().count() > 0 && tuned.entries().all(|(name, _)| name.contains(".adapter_")));
    assert!(tuned.metadata("base_hash").is_some());
    let states = Tensors::open(&folder.join("optimizer.safetensors")).unwrap();
    assert!(states.entries().all(|(name, _)| name.contains(".adapter_")), "states of frozen weights");
    let numbers: u64 = tuned.entries().map(|(_, shape)| shape.iter().product::<u64>()).sum();
    let counted = sandbox.good(&["count", "tuned.yaml", "--json"]);
    let counted: serde_json::Value = serde_json::from_str(&counted).unwrap();
    assert_eq!(counted["parameters"]["trained"].as_u64(), Some(numbers), "{}", counted["parameters"]);
    assert_eq!(counted["memory_bytes"]["gradients"].as_u64(), Some(4 * numbers));
    let plain = sandbox.good(&["count", "small.yaml", "--json"]);
    let plain: serde_json::Value = serde_json::from_str(&plain).unwrap();
    let flops = |of: &serde_json::Value, what: &str| {
        of["flops_per_token"][what].as_f64().unwrap_or_else(|| panic!("{of}"))
    };
    // No matmul of a frozen matrix's gradient is left: back is about as much as forth.
    let share = |of: &serde_json::Value| flops(of, "training_backward") / flops(of, "training_forward");
    assert!(share(&plain) > 1.7 && share(&counted) < 1.5, "{} {}", share(&plain), share(&counted));

    // Every command reads both; merged they are one model with the same losses.
    sandbox.good(&["generate", "runs/tuned", "a", "-n", "2"]);
    let said = sandbox.good(&["merge", "runs/tuned", "-o", "merged"]);
    assert!(
        said.contains("adapters are in ") && said.contains("dreamc eval merged --against runs/tuned"),
        "{said}"
    );
    let json = sandbox.good(&["eval", "merged", "--against", "runs/tuned", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(report[0]["against"]["divergence"].as_f64().unwrap() < 1e-9, "{report}");
    let json = sandbox.good(&["eval", "runs/tuned", "--against", "runs/small", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(report[0]["against"]["divergence"].as_f64().unwrap() > 0.0, "{report}");
    let said = sandbox.error(&["merge", "merged", "-o", "again"]);
    assert!(said.contains("the model has no adapters"), "{said}");
    let said = sandbox.error(&["export", "hf", "runs/tuned", "-o", "hf"]);
    assert!(said.contains("`dreamc merge`") && !sandbox.path("hf").exists(), "{said}");
    let said = sandbox.error(&["export", "peft", "runs/tuned", "-o", "peft"]);
    assert!(said.contains("none computes the model") && !sandbox.path("peft").exists(), "{said}");

    // Another base is refused.
    sandbox.good(&["train", "small.yaml", "--out", "runs/other", "--set", "train.seed=1"]);
    let said = sandbox.error(&["generate", "runs/tuned", "a", "-n", "2", "--base", "runs/other"]);
    assert!(said.contains("was trained on other weights than runs/other: BLAKE3"), "{said}");
}

#[test]
fn a_run_of_adapters_goes_on_to_the_same_bits_and_begins_at_its_base() {
    let sandbox = trained();
    sandbox.good(&["train", "tuned.yaml", "--out", "runs/a", "--set", "train.steps=6"]);
    sandbox.good(&["train", "tuned.yaml", "--out", "runs/b"]);
    sandbox.good(&["resume", "runs/b", "--set", "train.steps=6"]);
    let bytes = |run: &str| fs::read(newest(&sandbox.path(run)).join("model.safetensors")).unwrap();
    assert!(bytes("runs/a") == bytes("runs/b"));
    // `B` is zero at first: with a rate of nothing the model is its base.
    sandbox.good(&["train", "tuned.yaml", "--out", "runs/still", "--set", "train.learning_rate=1e-30"]);
    let json = sandbox.good(&["eval", "runs/still", "--against", "runs/small", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(report[0]["against"]["divergence"].as_f64().unwrap() < 1e-12, "{report}");
    // On a quantised base, too.
    sandbox.good(&["quantize", "runs/small", "--format", "q8_0", "-o", "small-q"]);
    sandbox.write("packed.yaml", &TUNED.replace("runs/small", "small-q"));
    sandbox.good(&["train", "packed.yaml", "--out", "runs/packed"]);
    sandbox.good(&["eval", "runs/packed"]);
    let said = sandbox.good(&["merge", "runs/packed", "-o", "unpacked"]);
    assert!(said.contains("packed matrices are f32 now"), "{said}");
}

/// Magnitudes of rows begin as the norms of the base's, whatever its format is.
#[test]
fn a_run_of_dora_begins_at_its_base_goes_on_and_is_merged() {
    let sandbox = trained();
    sandbox.good(&["quantize", "runs/small", "--format", "q8_0", "-o", "small-q"]);
    let dora = TUNED.replace("rank: 2", "rank: 2, dora: true");
    sandbox.write("dora.yaml", &dora);
    sandbox.write("packed.yaml", &dora.replace("runs/small", "small-q"));
    let apart = |one: &str, other: &str| {
        let json = sandbox.good(&["eval", one, "--against", other, "--json"]);
        let report: serde_json::Value = serde_json::from_str(&json).unwrap();
        report[0]["against"]["divergence"].as_f64().unwrap()
    };
    for (spec, base, to) in [("dora.yaml", "runs/small", "plain"), ("packed.yaml", "small-q", "packed")] {
        let (still, run) = (format!("runs/still-{to}"), format!("runs/{to}"));
        sandbox.good(&["train", spec, "--out", &still, "--set", "train.learning_rate=1e-30"]);
        assert!(apart(&still, base) < 1e-9);
        sandbox.good(&["train", spec, "--out", &run]);
        sandbox.good(&["merge", &run, "-o", to]);
        assert!(apart(to, &run) < 1e-9 && apart(&run, base) > 1e-9);
    }
    sandbox.good(&["train", "dora.yaml", "--out", "runs/whole", "--set", "train.steps=6"]);
    sandbox.good(&["resume", "runs/plain", "--set", "train.steps=6"]);
    let bytes = |run: &str| fs::read(newest(&sandbox.path(run)).join("model.safetensors")).unwrap();
    assert!(bytes("runs/whole") == bytes("runs/plain"));
    // A number a row is trained as well as the factors.
    let trained = |spec: &str| {
        let counted = sandbox.good(&["count", spec, "--json"]);
        let counted: serde_json::Value = serde_json::from_str(&counted).unwrap();
        counted["parameters"]["trained"].as_u64().unwrap()
    };
    let rows = 2 * (2 * (3 * 32 + 32)) + 2 * 4 * (2 * 32 + 32) + 2 * (2 * 48 + 32);
    assert_eq!(trained("dora.yaml"), trained("tuned.yaml") + rows);
}

#[test]
fn adapters_that_do_not_fit_are_errors_at_their_token() {
    let sandbox = Sandbox::with(&[]);
    let say = |adapt: &str| {
        sandbox.write("m.yaml", &BASE.replace("  components:", &format!("  adapt: {adapt}\n  components:")));
        String::from_utf8(sandbox.run(&["check", "m.yaml"]).stdout).unwrap()
    };
    for (adapt, words) in [
        ("{rank: 4}", "`components` is missing in adapt"),
        ("{components: []}", "nothing is adapted"),
        ("{components: [sa, mpl]}", "there is no component `mpl`"),
        ("{components: [sa], matrices: [q, up]}", "no matrix of these components is called `up`"),
        ("{components: [sa], rank: 0}", "`rank` is too small: 0"),
        ("{components: [sa], alpha: -1}", "`alpha` is out of range: -1"),
        ("{components: [sa], rnak: 4}", "did you mean `rank`?"),
    ] {
        let said = say(adapt);
        assert!(said.contains(words) && said.contains("m.yaml:6:"), "{adapt}: {said}");
    }
    assert!(say("{components: [sa], matrices: [q, v]}").contains("no errors"));
    assert!(say("none").contains("no errors"));
}

/// The lines of the page, with a short training.
#[test]
fn the_lines_of_the_page_run() {
    let sandbox = Sandbox::with(&[]);
    std::os::unix::fs::symlink(root("examples"), sandbox.path("examples")).unwrap();
    let page = fs::read_to_string(root("docs/adapt.md")).unwrap();
    let block = |fence: &str| page.split(fence).nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    sandbox.write("tuned.yaml", block("```yaml\n"));
    for line in block("```sh\n").lines() {
        let line = line.split("  #").next().unwrap().trim_end();
        let mut words: Vec<&str> = line.strip_prefix("dreamc ").unwrap().split_whitespace().collect();
        if words[0] == "train" {
            let short = ["train.steps=2", "train.batch=8", "eval.examples=1", "train.evaluate.batches=1"];
            words.extend(short.iter().flat_map(|field| ["--set", field]));
        }
        sandbox.good(&words);
    }
}
