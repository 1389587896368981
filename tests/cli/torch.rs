//! Runs that leave as PyTorch modules: trained here, loaded there.

use crate::support::sandbox::Sandbox;
use std::path::Path;
use std::process::Command;

/// A run, its checkpoint and its loss are the same model in PyTorch, with built-in mixers and with
/// defined ones. Both sides are f32: `torch/tests` holds gradients to 1e-4 in f64.
#[test]
fn a_trained_run_is_the_same_model_in_pytorch() {
    let Some(python) = dreamc_skip::transformers() else { return };
    let sandbox =
        Sandbox::with(&[("ids.json", "[[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1]]")]);
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let tiny = ["train.steps=3", "train.batch=2", "train.precision=f32"];
    for (name, more) in [("tiny-dr-da.yaml", &[][..]), ("gated-delta.dream", &["model.hidden=16"])] {
        let spec = examples.join(name);
        let run = format!("runs/{name}");
        let mut line = vec!["train", spec.to_str().unwrap(), "--out", &run];
        for set in tiny.iter().chain(more) {
            line.extend(["--set", set]);
        }
        sandbox.good(&line);
        let folder = format!("exports/{name}");
        sandbox.good(&["export", "torch", &run, "-o", &folder]);
        let (_, again) = sandbox.bad(&["export", "torch", &run, "-o", &folder]);
        assert!(again.contains("exists already"), "{again}");
        sandbox.good(&["probe", &run, "--ids", "ids.json", "-o", "probe.safetensors"]);
        let found = Command::new(&python)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/exported.py"))
            .args([sandbox.path(&folder), sandbox.path("ids.json"), sandbox.path("probe.safetensors")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(found.status.success(), "{name}: {text}{}", String::from_utf8_lossy(&found.stderr));
        let apart: Vec<f64> = text.lines().map(|line| line.parse().unwrap()).collect();
        assert!(apart.len() == 3 && apart[0] < 1e-5 && apart[1] < 1e-5 && apart[2] < 1e-3, "{name}: {text}");
        std::fs::remove_file(sandbox.path("probe.safetensors")).unwrap();
    }
}
