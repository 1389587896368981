//! A command that refuses has changed nothing, and files of a person stay as they are.

use crate::support::sandbox::{Sandbox, texts};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

const LAYERED: &str = "\
model:
  name: la
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 24}}
  body:
    - sa > mlp
";

const SUITE: &str = "\
name: pair
baseline: la.yaml
variants: [{name: other, spec: la.yaml, set: {mlp.intermediate: 32}}]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 3, batch: 2, sequence: 32, precision: f32}
eval: {examples: 2, max_tokens: 4}
equal: {flops: none, parameters: none}
seeds: [0]
";

const RECIPE: &str = "\
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 3, batch: 2, sequence: 32, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

fn sandbox() -> Sandbox {
    let one = format!("{LAYERED}{RECIPE}");
    Sandbox::with(&[("la.yaml", LAYERED), ("pair.yaml", &one), ("pair.suite.yaml", SUITE)])
}

/// Every file below a folder, with its content.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(at).unwrap().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true if entry.file_name() == "cache" => {}
                true => open.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap().display().to_string();
                    all.insert(name, fs::read(&path).unwrap());
                }
            }
        }
    }
    all
}

/// Runs a command that must fail and change nothing; gives its code and error output.
fn refused(sandbox: &Sandbox, line: &[&str]) -> (i32, String) {
    let before = files(&sandbox.path(""));
    let result = sandbox.bad(line);
    let after = files(&sandbox.path(""));
    assert!(
        before == after,
        "{line:?} changed {:?}",
        after.keys().filter(|k| before.get(*k) != after.get(*k))
    );
    result
}

#[test]
fn a_refused_comparison_leaves_the_finished_one() {
    let sandbox = sandbox();
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    let line = ["compare", "pair.suite.yaml", "--out", "out", "--set", "train.steps=5"];
    let (code, err) = refused(&sandbox, &line);
    assert!(code == 2 && err.contains("was trained from another specification"), "{err}");
    // The same command again leaves all runs as they are.
    let out = sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    assert!(out.contains("2 runs were trained before") && out.contains("validation loss, nats"), "{out}");
    assert!(out.contains("1 seed: too few to test"), "{out}");
    let out = sandbox.good(&["watch", "out"]);
    assert!(out.contains("2 of 2 runs at their end") && out.contains("other, seed 0"), "{out}");
    let out = sandbox.good(&["eval", "out"]);
    assert!(out.contains("la, seed 0: la") && out.contains("other, seed 0: la"), "{out}");
    // A run that was killed before its first step does not hide the others.
    fs::remove_file(sandbox.path("out/other-seed0/metrics.jsonl")).unwrap();
    sandbox.good(&["report", "out"]);
}

#[test]
fn folders_of_a_person_are_left_alone() {
    let sandbox = sandbox();
    let (code, err) = refused(&sandbox, &["compare", "pair.suite.yaml", "--out", "."]);
    assert!(code == 2 && err.contains("is not the folder of a comparison"), "{err}");
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/la.yaml", "mine");
    let (code, err) = refused(&sandbox, &["compare", "pair.suite.yaml", "--out", "mine", "--force"]);
    assert!(code == 2 && err.contains("is left alone"), "{err}");
    // In a comparison's folder, a specification of another name is a person's.
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    sandbox.write("out/third.yaml", "mine");
    sandbox.write("third.suite.yaml", &SUITE.replace("name: other", "name: third"));
    let (code, err) = refused(&sandbox, &["compare", "third.suite.yaml", "--out", "out", "--force"]);
    assert!(code == 2 && err.contains("third.yaml"), "{err}");
}

#[test]
fn names_of_arms_stay_in_the_folder() {
    let sandbox = sandbox();
    for name in ["../x", "..", "/tmp/dreamc-x", "a/b"] {
        sandbox.write("bad.suite.yaml", &SUITE.replace("name: other", &format!("name: '{name}'")));
        let (code, err) = refused(&sandbox, &["compare", "bad.suite.yaml", "--out", "out"]);
        assert!(code == 1 && err.contains("bad.suite.yaml:3:") && err.contains("bad-name"), "{err}");
        let (code, _) = refused(&sandbox, &["match", "bad.suite.yaml", "--write", "out"]);
        assert_eq!(code, 1);
    }
    sandbox.write("twice.suite.yaml", &SUITE.replace("name: other", "name: la"));
    let (code, err) = refused(&sandbox, &["compare", "twice.suite.yaml", "--out", "out"]);
    assert!(code == 1 && err.contains("two arms are called `la`") && err.contains(":3:"), "{err}");
}

#[test]
fn a_match_that_fails_writes_nothing() {
    let sandbox = sandbox();
    let suite = "name: m\nbaseline: la.yaml\nvariants:\n  - {name: a, spec: la.yaml, match: {flops: {mlp.intermediate: 1}}}\n  \
                 - {name: b, spec: la.yaml, match: {flops: {mlp.intermediate: 1000}}}\n";
    sandbox.write("m.suite.yaml", suite);
    let before = files(&sandbox.path(""));
    let output = sandbox.run(&["match", "m.suite.yaml", "--write", "out", "--tolerance", "0"]);
    if !output.status.success() {
        assert!(before == files(&sandbox.path("")));
    }
}

#[test]
fn formatting_keeps_links_and_modes() {
    let sandbox = sandbox();
    sandbox.write("real.yaml", &LAYERED.replace("vocab: 256", "vocab:   256"));
    fs::set_permissions(sandbox.path("real.yaml"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("real.yaml", sandbox.path("link.yaml")).unwrap();
    sandbox.good(&["fmt", "link.yaml"]);
    assert_eq!(sandbox.read("real.yaml"), LAYERED);
    assert!(fs::symlink_metadata(sandbox.path("link.yaml")).unwrap().is_symlink());
    assert_eq!(fs::metadata(sandbox.path("real.yaml")).unwrap().permissions().mode() & 0o777, 0o600);
    // Devices and pipes are streams.
    sandbox.write("ids.json", "[[1, 2, 3]]");
    sandbox.good(&["probe", "la.yaml", "--ids", "ids.json", "-o", "/dev/null"]);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    assert!(std::process::Command::new("mkfifo").arg(sandbox.path("pipe")).status().unwrap().success());
    let (_, err) = refused_pipe(&sandbox);
    assert!(err.contains("nobody reads"), "{err}");
    assert!(sandbox.error(&["draw", "la.yaml", "-o", "pipe"]).contains("nobody reads"));
    assert!(!fs::metadata(sandbox.path("pipe")).unwrap().is_file());
    // A device by a link of the sandbox's own, so that a fault hurts nobody.
    symlink("/dev/null", sandbox.path("null")).unwrap();
    sandbox.good(&["draw", "la.yaml", "-o", "null"]);
    assert!(fs::symlink_metadata(sandbox.path("null")).unwrap().is_symlink());
}

fn refused_pipe(sandbox: &Sandbox) -> (i32, String) {
    sandbox.bad(&["probe", "la.yaml", "--ids", "ids.json", "-o", "pipe"])
}

#[test]
fn own_files_with_the_names_of_a_run_are_left_alone() {
    let sandbox = sandbox();
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/spec.yaml", &format!("{LAYERED}{RECIPE}"));
    let (code, err) = refused(&sandbox, &["train", "mine/spec.yaml", "--out", "mine", "--force"]);
    assert!(code == 2 && err.contains("is not a run of dreamc"), "{err}");
    fs::create_dir(sandbox.path("books")).unwrap();
    sandbox.write("books/ledger.json", "{\"own\": 1}");
    sandbox.write("books/run.lock", "mine");
    for force in [&["--force"][..], &[]] {
        let (code, err) = refused(&sandbox, &[&["train", "pair.yaml", "--out", "books"][..], force].concat());
        assert!(code == 2 && err.contains("is not a run of dreamc"), "{err}");
    }
}

#[test]
fn an_export_replaces_nothing_and_does_not_say_otherwise() {
    let sandbox = sandbox();
    sandbox.good(&["train", "pair.yaml", "--out", "run"]);
    fs::create_dir(sandbox.path("out")).unwrap();
    sandbox.good(&["export", "hf", "run", "-o", "out"]);
    sandbox.write("weights.safetensors", "mine");
    for line in
        [["export", "hf", "run", "-o", "out"], ["export", "weights", "run", "-o", "weights.safetensors"]]
    {
        let (code, err) = refused(&sandbox, &line);
        assert!(code == 2 && err.contains("exists already; choose another -o"), "{err}");
        assert!(!err.contains("--force"), "{err}");
    }
}

/// An option that a command lacks is answered by the place where it is, not by one of like letters.
#[test]
fn an_option_of_elsewhere_is_answered_by_its_place() {
    let sandbox = sandbox();
    let cases: [(&[&str], &str); 9] = [
        (&["train", "la.yaml", "--lr", "1e-3"], "`--set train.learning_rate=VALUE`"),
        (&["train", "la.yaml", "--steps", "3"], "`--set train.steps=VALUE`"),
        (&["train", "la.yaml", "--batch-size=3"], "`--set train.batch=VALUE`"),
        (&["train", "la.yaml", "--d-model", "3"], "`--set model.hidden=VALUE`"),
        (&["resume", "run", "--steps", "3"], "`--set train.steps=VALUE`"),
        (&["resume", "run", "--data", "a.txt"], "`dreamc train RUN --data FILE` begins another"),
        (
            &["resume", "run", "--seeds", "3"],
            "`dreamc train`, `dreamc compare` and `dreamc exam` have `--seeds`",
        ),
        (&["check", "la.yaml", "--slurm", "3"], "`dreamc compare` has `--slurm`; `dreamc check` does not"),
        (&["train", "la.yaml", "--dry-rum"], "a similar argument exists: '--dry-run'"),
    ];
    for (line, advice) in cases {
        let (code, error) = sandbox.bad(line);
        assert_eq!(code, 2, "{line:?}: {error}");
        assert!(error.contains(advice), "{line:?}: {error}");
        assert!(!error.contains("as a value") && !error.contains("'--set'"), "{line:?}: {error}");
    }
    // The advice names a field.
    sandbox.good(&[
        "train",
        "pair.yaml",
        "--set",
        "train.learning_rate=1e-3",
        "--set",
        "model.hidden=16",
        "--dry-run",
    ]);
}

/// A run at its end is said to be there, and says how it is trained longer.
#[test]
fn a_run_at_its_end_is_not_said_to_go_on() {
    let sandbox = sandbox();
    let small = &["--set", "train.steps=1"][..];
    let out = sandbox.good(&[&["train", "pair.yaml", "--out", "run"], small].concat());
    assert!(out.contains("finished after 1 step\n") && !out.contains("all that is held out"), "{out}");
    for line in
        [&["resume", "run"][..], &[&["train", "pair.yaml", "--out", "run", "--resume"], small].concat()]
    {
        let output = sandbox.run(line);
        let (out, said) = texts(&output);
        assert!(
            output.status.success() && said.contains("is at its end, after 1 step; `dreamc resume"),
            "{out}{said}"
        );
        assert!(!said.contains("going on") && !said.contains("goes on after"), "{said}");
    }
}
