//! The first minutes: `dreamc` alone, `dreamc new`, `dreamc doctor`.

use crate::support::root;
use crate::support::sandbox::{Sandbox, metrics, texts};
use serde_json::Value;
use std::fs;

const KINDS: [&str; 4] = ["recurrent", "mod", "moe", "looped"];
const TWO_STEPS: [&str; 4] = ["--set", "train.steps=2", "--set", "train.batch=2"];

#[test]
fn dreamc_alone_shows_three_commands_which_run() {
    let sandbox = Sandbox::with(&[]);
    let said = sandbox.good(&[]);
    let lines: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("  dreamc ")).collect();
    assert_eq!(lines.len(), 3, "{said}");
    for line in lines {
        let line = line.split("  ").next().unwrap();
        let mut words: Vec<&str> = line.split_whitespace().collect();
        if words[0] == "train" {
            words.push("--dry-run");
        }
        sandbox.good(&words);
    }
    assert_eq!(sandbox.bad(&["--nothing"]).0, 2);
}

#[test]
fn every_new_specification_is_without_errors_and_trains() {
    let sandbox = Sandbox::with(&[]);
    for kind in KINDS {
        let said = sandbox.good(&["new", kind]);
        assert!(said.contains(&format!("next:\n  dreamc train {kind}.dream")), "{said}");
        let file = format!("{kind}.dream");
        assert_eq!(sandbox.good(&["check", &file]), format!("{file}: no errors\n"));
        assert_eq!(sandbox.good(&["fmt", "--check", &file]), "");
        assert!(sandbox.read(&file).lines().filter(|line| line.contains("//")).count() > 6);
        sandbox.good(&[&["train", &file, "--out", kind], &TWO_STEPS[..]].concat());
        // As YAML it is the same model.
        sandbox.good(&["new", kind, &format!("deep/er/{kind}.yaml")]);
        let yaml = format!("deep/er/{kind}.yaml");
        assert_eq!(sandbox.good(&["show", &file]), sandbox.good(&["show", &yaml]));
        assert!(sandbox.read(&yaml).contains("# "));
    }
    sandbox.good(&["new", "moe", "again"]);
    fs::remove_file(sandbox.path("recurrent.dream")).unwrap();
    sandbox.good(&["new"]);
    assert!(sandbox.read("recurrent.dream").contains("model recurrent {"));
}

#[test]
fn nothing_is_overwritten_and_a_refusal_changes_nothing() {
    let sandbox = Sandbox::with(&[("mine.dream", "precious")]);
    for line in [&["new", "mod", "mine"][..], &["new", "mod", "mine.dream"], &["new", "from", "x", "mine"]] {
        let (code, error) = sandbox.bad(line);
        assert!(code == 2 && error.contains("mine.dream is there already"), "{error}");
    }
    assert_eq!(sandbox.read("mine.dream"), "precious");
    for name in ["3d", "a b", "model/ü", "no\nway"] {
        let (code, error) = sandbox.bad(&["new", "mod", name]);
        assert!(code == 2 && error.contains("is no name of a model"), "{error}");
    }
    let names: Vec<_> = fs::read_dir(sandbox.path("")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(names, ["mine.dream"]);
}

#[test]
fn a_model_of_hugging_face_is_imported_and_trained_further() {
    let sandbox = Sandbox::with(&[]);
    fs::create_dir(sandbox.path("model")).unwrap();
    for entry in fs::read_dir(root("tests/import/gemma2_new")).unwrap().flatten() {
        fs::copy(entry.path(), sandbox.path("model").join(entry.file_name())).unwrap();
    }
    let said = sandbox.good(&["new", "from", "model", "specs/tuned"]);
    assert!(said.contains("imports/tuned: ") && said.contains("dreamc train specs/tuned.dream"), "{said}");
    assert_eq!(sandbox.good(&["check", "specs/tuned.dream"]), "specs/tuned.dream: no errors\n");
    let said = sandbox.good(&[&["train", "specs/tuned.dream", "--out", "run"], &TWO_STEPS[..]].concat());
    assert!(said.contains("begins from the weights of ") && said.contains("imports/tuned"), "{said}");
    let steps = metrics(&sandbox.path("run")).iter().filter(|line| line["norm"].is_f64()).count();
    assert_eq!(steps, 2);

    fs::remove_file(sandbox.path("model/tokenizer.json")).unwrap();
    let (code, error) = sandbox.bad(&["new", "from", "model", "other"]);
    assert!(code == 2 && error.contains("tokenizer.json"), "{error}");
    let (_, error) = sandbox.bad(&["new", "from", "nowhere"]);
    assert!(error.contains("there is no such folder"), "{error}");
    assert!(!sandbox.path("other.dream").exists() && !sandbox.path("imports/other").exists());
}

#[test]
fn the_doctor_says_what_is_here_and_what_to_install() {
    let sandbox = Sandbox::with(&[]);
    let report = |nvrtc: &str| -> (Value, String) {
        let run = |line: &[&str]| {
            let output = sandbox.command(line).env("DREAMC_NVRTC", nvrtc).output().unwrap();
            assert_eq!(output.status.code(), Some(0));
            texts(&output).0
        };
        (serde_json::from_str(&run(&["doctor", "--json"])).unwrap(), run(&["doctor"]))
    };
    let (json, text) = report("/nowhere");
    for part in ["dreamc", "processor", "CPU_device", "memory", "GPU", "NVRTC", "disk_here", "disk_of_caches"]
    {
        assert!(json[part].is_string(), "{part}: {json}");
        assert!(text.contains(&part.replace('_', " ")), "{text}");
    }
    let threads = std::thread::available_parallelism().unwrap();
    assert!(json["CPU_device"].as_str().unwrap().contains(&format!("{threads} thread")));
    assert!(json["missing"]["NVRTC"].as_str().unwrap().contains("pip install nvidia-cuda-nvrtc"), "{json}");
    assert!(text.contains("For more:\n") && text.contains("NVRTC: "), "{text}");
    assert!(json["disk_of_caches"].as_str().unwrap().ends_with("/cache"), "{json}");
}

#[test]
fn every_command_has_a_manual_page() {
    let sandbox = Sandbox::with(&[]);
    sandbox.good(&["completions", "--man", "share/man1"]);
    let help = sandbox.good(&["--help"]);
    let commands = help.lines().skip_while(|l| !l.starts_with("Commands:")).skip(1);
    let commands = commands.take_while(|l| l.starts_with("  ")).filter_map(|l| l.split_whitespace().next());
    for command in commands.filter(|name| *name != "help") {
        let page = sandbox.read(&format!("share/man1/dreamc-{command}.1"));
        assert!(page.contains(".SH SYNOPSIS"), "{command}: {page}");
    }
    assert!(sandbox.read("share/man1/dreamc.1").contains("130"), "exit codes");
    let (code, error) = sandbox.bad(&["completions", "--man", "/dev/null/x"]);
    assert!(code == 2 && error.contains("--man /dev/null/x"), "{error}");
    assert_eq!(sandbox.bad(&["completions"]).0, 2);
}
