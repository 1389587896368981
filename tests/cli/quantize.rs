//! Models in fewer bits: quantised, measured against the original, read in their file.

use crate::serve::Server;
use crate::support::sandbox::Sandbox;
use crate::support::{read, root};
use serde_json::{Value, json};
use std::fs;

const SPEC: &str = "\
model:
  name: small
  vocab: 256
  hidden: 32
  context: 64
  components:
    sa: {sequence: {heads: 2, head_size: 16}}
    ea: {experts: {count: 4, active: 2, intermediate: 32, query: 8}}
  body:
    - repeat: 2
      layers: [sa > ea]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

fn trained() -> Sandbox {
    let sandbox = Sandbox::with(&[("small.yaml", SPEC)]);
    sandbox.good(&["train", "small.yaml", "--out", "runs/small"]);
    sandbox
}

#[test]
fn a_quantised_model_is_measured_beside_its_own_and_generates() {
    let sandbox = trained();
    let parts = "experts: q4_0, head: keep";
    let said =
        sandbox.good(&["quantize", "runs/small", "--format", "q8_0", "--parts", parts, "-o", "small-q"]);
    assert!(said.contains("q4_0 ") && said.contains("q8_0 ") && said.contains("f32 "), "{said}");
    assert!(said.contains("dreamc eval small-q --against runs/small"), "{said}");
    let json = sandbox.good(&["eval", "small-q", "--against", "runs/small", "--json"]);
    let reports: serde_json::Value = serde_json::from_str(&json).unwrap();
    let against = &reports[0]["against"];
    let number = |name: &str| against[name].as_f64().unwrap();
    assert!(number("targets") > 0.0 && number("divergence") > 0.0 && number("divergence") < 0.1, "{against}");
    assert!((number("loss") - number("other_loss")).abs() < 0.1, "{against}");
    assert!(number("flips") <= number("targets") / 4.0, "{against}");
    // Against itself a model is the same.
    let json = sandbox.good(&["eval", "runs/small", "--against", "runs/small", "--json"]);
    let reports: serde_json::Value = serde_json::from_str(&json).unwrap();
    let own = &reports[0]["against"];
    assert_eq!((own["divergence"].as_f64(), own["flips"].as_f64()), (Some(0.0), Some(0.0)), "{own}");
    let text = sandbox.good(&["eval", "small-q", "--against", "runs/small"]);
    for line in ["loss of the other", "loss above it", "KL divergence", "other likeliest token"] {
        assert!(text.contains(line), "{text}");
    }
    sandbox.good(&["generate", "small-q", "a", "--max-tokens", "4"]);
    let said = sandbox.good(&["count", "small-q"]);
    assert!(said.contains("bytes, weights in their file") && said.contains("numbers in q4_0"), "{said}");
    sandbox.write("ids.json", "[[1, 2, 3, 4]]");
    sandbox.good(&["probe", "small-q", "--ids", "ids.json", "-o", "probe.safetensors"]);
    // It leaves as the numbers of its blocks.
    sandbox.good(&["export", "weights", "small-q", "-o", "wide.safetensors"]);
    assert_eq!(
        sandbox.good(&["generate", "wide.safetensors", "a", "--max-tokens", "4", "--json"]).len(),
        sandbox.good(&["generate", "small-q", "a", "--max-tokens", "4", "--json"]).len()
    );
}

/// Every command that reads packed weights says of an interpreted GPU what it says of the CPU, as
/// far as sums in another order do.
#[test]
fn packed_weights_are_measured_probed_and_served_on_a_gpu() {
    let Some(_) = dreamc_skip::need(dreamc_nvrtc::Nvrtc::find()) else { return };
    let sandbox = trained();
    let parts = "experts: mxfp4, head: q8_0";
    sandbox.good(&["quantize", "runs/small", "--format", "q4_0", "--parts", parts, "-o", "served"]);
    let near = |what: &str, a: f64, b: f64, scale: f64| {
        assert!((a - b).abs() <= 2e-5 * scale, "{what}: {a} and {b}");
    };

    let measured = |device: &str| -> Value {
        let line = ["eval", "served", "--against", "runs/small", "--json", "--device", device];
        serde_json::from_str(&sandbox.good(&line)).unwrap()
    };
    let (cpu, gpu) = (measured("cpu"), measured("ptx"));
    assert_eq!(cpu[0]["against"]["targets"], gpu[0]["against"]["targets"]);
    for name in ["loss", "other_loss", "divergence"] {
        let [a, b] = [&cpu, &gpu].map(|found| found[0]["against"][name].as_f64().unwrap());
        near(name, a, b, cpu[0]["against"]["loss"].as_f64().unwrap());
    }

    sandbox.write("ids.json", "[[1, 2, 3, 4, 9, 8, 7, 6]]");
    for device in ["cpu", "ptx"] {
        let out = format!("{device}.safetensors");
        sandbox.good(&["probe", "served", "--ids", "ids.json", "-o", &out, "--device", device]);
    }
    let [cpu, gpu] = ["cpu", "ptx"].map(|device| probed(&sandbox, device));
    assert!(cpu.iter().any(|(name, _)| name.starts_with("gradients.")), "there are no gradients");
    for ((name, a), (other, b)) in cpu.iter().zip(&gpu) {
        assert_eq!((name, a.len()), (other, b.len()));
        let scale = a.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        a.iter().zip(b).for_each(|(a, b)| near(name, *a, *b, scale.max(1e-3)));
    }

    // Rows of a server come and go, alone and together; the likeliest token is the same one.
    let line = ["generate", "served", "a", "--max-tokens", "8", "--json", "-t", "0"];
    let alone: Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    let server = Server::start(&sandbox, &["--rows", "3", "--device", "ptx"]);
    let ask =
        |prompts: Value| server.complete(json!({ "prompt": prompts, "max_tokens": 8, "temperature": 0 }));
    for answer in [ask(json!("a")), ask(json!(["a", "b"]))] {
        assert_eq!(answer["choices"][0]["text"], alone["text"]);
    }
}

/// The tensors of a probe on a device, by their names.
fn probed(sandbox: &Sandbox, device: &str) -> Vec<(String, Vec<f64>)> {
    let path = sandbox.path(&format!("{device}.safetensors"));
    let all = read(path.to_str().unwrap()).into_iter();
    let mut all: Vec<_> = all.map(|(name, tensor)| (name, tensor.floats().to_vec())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Experts, shared ones, a loop and a recurrence of the library.
const EVERY: &str = "\
model:
  name: every
  vocab: 256
  hidden: 32
  context: 64
  components:
    sa: {sequence: {heads: 2, head_size: 16}}
    ea: {experts: {count: 4, active: 2, intermediate: 32, query: 8, shared: 1}}
    mix: {gated_delta: {heads: 1, size: 32, value: 32}}
  body:
    - repeat: 1
      layers: [mix > ea]
    - recur: 2
      layers: [sa > ea]
data: {text: text.txt, validation: 0.1}
train: {steps: 60, batch: 8, sequence: 32, learning_rate: 3e-3, precision: f32}
";

#[test]
fn scales_that_a_text_decides_lose_less_than_rounding_to_nearest() {
    let sandbox = Sandbox::with(&[("every.yaml", EVERY)]);
    let text: String = (0..900).map(|i| format!("{i} by {} is {}. ", i % 7, i * (i % 7))).collect();
    let (learned, other) = text.split_at(text.len() / 2);
    sandbox.write("text.txt", learned);
    sandbox.write("other.txt", other);
    sandbox.good(&["train", "every.yaml", "--out", "runs/every"]);
    let divergence = |format: &str, data: Option<&str>| {
        let line = ["quantize", "runs/every", "--format", format, "-o", "out", "--force"];
        let data: Vec<&str> = data.iter().flat_map(|file| ["--data", *file]).collect();
        sandbox.good(&[&line[..], &data].concat());
        let json = sandbox.good(&["eval", "out", "--against", "runs/every", "--data", "other.txt", "--json"]);
        let reports: serde_json::Value = serde_json::from_str(&json).unwrap();
        reports[0]["against"]["divergence"].as_f64().unwrap()
    };
    for format in ["q4_0", "mxfp4"] {
        let (nearest, fitted) = (divergence(format, None), divergence(format, Some("text.txt")));
        assert!(fitted < nearest, "{format}: {fitted:e}, to nearest {nearest:e}");
    }
    // By part, and the same bits again.
    let line = ["quantize", "runs/every", "--format", "q8_0", "--data", "text.txt"];
    for out in ["a", "b"] {
        sandbox.good(&[&line[..], &["--parts", "experts: q4_0, shared: keep", "-o", out]].concat());
    }
    let bytes = |out: &str| fs::read(sandbox.path(out).join("model.safetensors")).unwrap();
    assert!(bytes("a") == bytes("b"));
    sandbox.write("short.txt", "too short");
    for (file, what) in [("short.txt", "fewer than a row of 32"), ("nowhere.txt", "there is no such file")] {
        let line = ["quantize", "runs/every", "--format", "q4_0", "--data", file, "-o", "none"];
        let said = sandbox.error(&line);
        assert!(said.contains(what) && !sandbox.path("none").exists(), "{said}");
    }
}

#[test]
fn what_is_asked_wrongly_is_refused_and_changes_nothing() {
    let sandbox = trained();
    let bad = |arguments: &[&str], what: &str| {
        let all = [&["quantize", "runs/small", "-o", "out"], arguments].concat();
        let said = sandbox.error(&all);
        assert!(said.contains(what), "{said}");
        assert!(!sandbox.path("out").exists(), "{said}");
    };
    bad(&["--format", "q5"], "there is no format `q5`");
    bad(&["--format", "q8_0", "--parts", "heads: q4_0"], "has no part `heads`");
    bad(&["--format", "q8_0", "--parts", "head q4_0"], "`head q4_0` is not `part: format`");
    bad(&["--format", "keep"], "all parts are kept");
    sandbox.good(&["quantize", "runs/small", "--format", "q8_0", "-o", "out"]);
    let said = sandbox.error(&["quantize", "runs/small", "--format", "q4_0", "-o", "out"]);
    assert!(said.contains("exists already"), "{said}");
    let said = sandbox.error(&["quantize", "out", "--format", "q4_0", "-o", "again"]);
    assert!(said.contains("is q8_0 already"), "{said}");
    let said = sandbox.error(&["eval", "out", "--against", "nowhere"]);
    assert!(said.contains("nowhere"), "{said}");
    // A file that is cut.
    let path = sandbox.path("out/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    sandbox.error(&["generate", "out", "a", "--max-tokens", "4"]);
}

/// The arguments of a line of a shell, without its comment.
fn words(line: &str) -> Vec<String> {
    let line = line.split("  #").next().unwrap_or_default();
    let mut words = vec![];
    for (i, part) in line.split('\'').enumerate() {
        match i % 2 {
            0 => words.extend(part.split_whitespace().map(String::from)),
            _ => words.push(part.to_string()),
        }
    }
    words
}

/// The lines of the page, with a short training.
#[test]
fn the_lines_of_the_page_run() {
    let sandbox = Sandbox::with(&[]);
    std::os::unix::fs::symlink(root("examples"), sandbox.path("examples")).unwrap();
    let page = fs::read_to_string(root("docs/quantize.md")).unwrap();
    let block = page.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    for line in block.lines() {
        let mut words = words(line.strip_prefix("dreamc ").unwrap());
        if words[0] == "train" {
            let short = ["train.steps=2", "train.batch=8", "eval.examples=1", "train.evaluate.batches=1"];
            words.extend(short.iter().flat_map(|field| ["--set".to_string(), field.to_string()]));
        }
        sandbox.good(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
}
