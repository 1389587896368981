//! Every command that reads a specification runs on every file of `examples`, or refuses it with a
//! sentence.

use crate::support::sandbox::{Sandbox, texts};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Files of `examples` that dreamc reads: names from its folder on.
fn files() -> Vec<String> {
    fn visit(folder: &Path, all: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap().flatten().map(|e| e.path()) {
            match entry.is_dir() {
                true => visit(&entry, all),
                false => all.push(entry),
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = vec![];
    visit(&root.join("examples"), &mut all);
    let read = |path: &PathBuf| path.extension().is_some_and(|e| e == "yaml" || e == "dream");
    let name = |path: PathBuf| path.strip_prefix(root).unwrap().to_str().unwrap().to_string();
    let mut names: Vec<String> = all.into_iter().filter(read).map(name).collect();
    names.sort();
    names
}

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::with(&[]);
    symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples"), sandbox.path("examples")).unwrap();
    sandbox
}

/// Runs a command on a file; gives what is wrong: an exit code other than 0 without a sentence that
/// is allowed, or a panic.
fn wrong(sandbox: &Sandbox, line: &[&str], refusals: &[&str]) -> Option<String> {
    let output = sandbox.run(line);
    let (_, err) = texts(&output);
    let refused = output.status.code().is_some_and(|code| code == 1 || code == 2)
        && refusals.iter().any(|words| err.contains(words));
    let good = (output.status.success() || refused) && !err.contains("panicked");
    (!good).then(|| format!("{}: {:?}\n{err}", line.join(" "), output.status.code()))
}

/// Runs commands on every specification; `line` gives them for a file.
fn every(specs: &[String], refusals: &[&str], lines: impl Fn(&str) -> Vec<Vec<String>>) {
    let sandbox = sandbox();
    let mut failed = vec![];
    for file in specs {
        for line in lines(file) {
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            failed.extend(wrong(&sandbox, &line, refusals));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

/// Specifications that begin from nothing of a reader's own.
fn specifications() -> Vec<String> {
    let specs = files().into_iter().filter(|f| !f.contains(".suite.") && !begins_elsewhere(f));
    let specs: Vec<String> = specs.collect();
    assert!(specs.len() > 60, "{specs:?}");
    specs
}

/// Whether a file names a model that its reader makes or downloads first:
/// tests/cli/router_tuning.rs does.
fn begins_elsewhere(file: &str) -> bool {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    text.lines().any(|line| {
        line.starts_with("base: ../../") || line == "base: strict.yaml" || line == "base: small-strict.yaml"
    })
}

#[test]
fn specifications_of_a_model_that_is_not_there_name_it() {
    let sandbox = sandbox();
    let files: Vec<String> = files().into_iter().filter(|f| begins_elsewhere(f)).collect();
    assert!(files.len() > 4 && files.len() < 10, "{files:?}");
    for file in files {
        let error = sandbox.error(&["count", &file]);
        assert!(error.contains("bad-base") && error.contains("there is no `examples/"), "{file}: {error}");
    }
}

/// Parameters of a model that a debug build measures in seconds.
const SMALL: u64 = 2_000_000;

#[test]
fn every_specification_is_read_counted_and_drawn() {
    every(&specifications(), &[], |file| {
        let commands = ["check", "show", "fmt --check", "count", "draw"];
        commands.iter().map(|command| words(&format!("{command} {file}"))).collect()
    });
}

#[test]
fn every_specification_compiles_and_explains_itself() {
    every(&specifications(), &[], |file| {
        ["compile", "explain"].iter().map(|command| words(&format!("{command} {file}"))).collect()
    });
}

/// A file of a reader's own is not there, and a model may be larger than the machine.
const LACKING: [&str; 6] = [
    "No such file",
    "the plan needs",
    "has no data; give",
    "the specification has no data",
    "there is no `examples/router-tuning/",
    "the donor cannot be opened",
];

#[test]
fn every_specification_says_what_training_would_be() {
    every(&specifications(), &LACKING, |file| vec![words(&format!("train {file} --dry-run"))]);
}

/// Those that are small, with little to train and to write; what no machine of a test holds is
/// refused.
#[test]
fn every_specification_is_measured() {
    let sandbox = sandbox();
    let parameters = |file: &String| -> u64 {
        let counted: serde_json::Value =
            serde_json::from_str(&sandbox.good(&["count", file, "--json"])).unwrap();
        counted["parameters"]["total"].as_u64().unwrap()
    };
    let small: Vec<String> = specifications().into_iter().filter(|f| parameters(f) < SMALL).collect();
    assert!(small.len() > 40, "{small:?}");
    every(&small, &[], |file| {
        vec![words(&format!(
            "bench {file} --steps 1 --batch 1 --sequence 16 --prompt 4 --tokens 4 --threads 2"
        ))]
    });
    for file in ["examples/published/deepseek-v3.dream", "examples/published/gpt-oss-120b.dream"] {
        let line = format!("bench {file} --steps 1 --batch 1 --sequence 16 --tokens 0");
        let error = sandbox.error(&words(&line).iter().map(String::as_str).collect::<Vec<_>>());
        assert!(error.contains("the plan needs") && error.contains("use a smaller model"), "{error}");
    }
}

/// Proofs that take a debug build less than a second a model. All proofs of all kinds of model run
/// in tests/numerics and tests/robustness.
#[test]
fn every_specification_is_proved_by_the_quick_proofs() {
    every(&specifications(), &[], |file| {
        vec![words(&format!("verify {file} --only names,coordinates,counts"))]
    });
}

/// Commands that write files next to the specification they read, on the tiny ones.
#[test]
fn tiny_specifications_are_trained_probed_and_read_again() {
    let sandbox = sandbox();
    sandbox.write("ids.json", "[[1, 2, 3, 4, 5]]");
    sandbox.write("book.txt", &"a line of a book, and another one\n".repeat(200));
    let tiny: Vec<String> = specifications().into_iter().filter(|f| f.contains("examples/tiny-")).collect();
    assert!(tiny.len() > 6, "{tiny:?}");
    let mut failed = vec![];
    for (i, file) in tiny.iter().enumerate() {
        let lines = [
            format!("probe {file} --ids ids.json -o probe-{i}.safetensors"),
            format!("diff {file} {}", tiny[(i + 1) % tiny.len()]),
            format!("compile {file} --emit plan"),
            format!(
                "train {file} --data book.txt --out run-{i} --set train.steps=1 --set train.batch=1 --set train.accumulate=1 --set train.sequence=16 \
                 --set train.warmup=0"
            ),
            format!("eval run-{i}"),
            format!("generate run-{i} a --greedy --max-tokens 4"),
            format!("export hf run-{i} -o exported-{i}"),
            format!("export weights run-{i} -o weights-{i}.safetensors"),
            format!("watch run-{i} --once"),
            format!("resume run-{i} --set train.steps=2"),
        ];
        for line in lines {
            let line = words(&line);
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            failed.extend(wrong(&sandbox, &line, &[]));
        }
    }
    failed.extend(wrong(&sandbox, &["runs", "."], &[]));
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_suite_is_checked_and_matched() {
    let suites: BTreeSet<String> = files().into_iter().filter(|f| f.contains(".suite.")).collect();
    assert!(suites.len() > 8, "{suites:?}");
    let suites: Vec<String> = suites.into_iter().collect();
    let lacking = ["no variant of the suite has a `match`", LACKING[4], LACKING[5]];
    every(&suites, &lacking, |file| {
        ["check", "fmt --check", "match"].iter().map(|command| words(&format!("{command} {file}"))).collect()
    });
    every(&suites, &LACKING, |file| {
        vec![
            words(&format!("compare {file} --dry-run --rate 1e12")),
            words(&format!("compare {file} --slurm 2")),
        ]
    });
}
