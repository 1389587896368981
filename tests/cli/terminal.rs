//! Streams, colours, standard input and exit codes: the habits of a terminal.

use crate::support::sandbox::{Sandbox, texts};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::process::{Output, Stdio};

/// A model that trains in a second.
pub const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 16, query: 8}}
  body:
    - recur: 2
      layers: [\"sa > ea\"]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 6, batch: 4, sequence: 32, learning_rate: 1e-3, precision: f32}
eval: {examples: 2, max_tokens: 8}
";

fn sandbox() -> Sandbox {
    Sandbox::with(&[("tiny.yaml", TINY), ("wrong.yaml", &TINY.replace("heads: 2", "haeds: 2"))])
}

/// Runs a command with a text as its standard input.
fn fed(sandbox: &Sandbox, line: &[&str], input: &str) -> Output {
    let mut command = sandbox.command(line);
    let mut process =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    process.wait_with_output().unwrap()
}

#[test]
fn colours_are_as_asked_for() {
    let sandbox = sandbox();
    let colored = |line: &[&str], set: &[(&str, &str)]| {
        let output = sandbox.command(line).envs(set.iter().copied()).output().unwrap();
        texts(&output).0.contains('\x1b')
    };
    let line = ["check", "wrong.yaml"];
    assert!(!colored(&line, &[]) && colored(&line, &[("CLICOLOR_FORCE", "1")]));
    assert!(!colored(&line, &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    assert!(colored(&["--color", "always", "check", "wrong.yaml"], &[("NO_COLOR", "1")]));
    assert!(!colored(&["check", "wrong.yaml", "--color", "never"], &[("CLICOLOR_FORCE", "1")]));
}

#[test]
fn losses_are_in_the_output_and_quiet_is_quiet() {
    let sandbox = sandbox();
    let output = sandbox.run(&["train", "tiny.yaml", "--out", "loud"]);
    let (out, err) = texts(&output);
    assert!(
        out.contains("step 6/6  loss ") && out.contains("norm ") && out.contains("rate "),
        "{out}\n{err}"
    );
    assert!(out.contains("tiny: ") && out.contains("finished after 6 steps"), "{out}");
    let (out, err) = texts(&sandbox.run(&["-q", "train", "tiny.yaml", "--out", "quiet"]));
    assert!(!out.contains("step 6/6") && !out.contains("tiny: ") && err.is_empty(), "{out}\n{err}");
    assert!(out.contains("finished after 6 steps"), "{out}");
    let (out, _) = texts(&sandbox.run(&["train", "tiny.yaml", "--out", "verbose", "-v"]));
    assert!((1..=6).all(|step| out.contains(&format!("step {step}/6  loss "))), "{out}");
    let (out, err) = texts(&sandbox.run(&["train", "tiny.yaml", "--out", "json", "--json"]));
    let ledger: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(ledger["steps"] == 6 && err.contains("step 6/6  loss "), "{err}");
}

#[test]
fn a_run_goes_on_when_nobody_reads_it() {
    let sandbox = sandbox();
    for (name, stream) in [("out", 1), ("err", 2), ("both", 3)] {
        let mut command = sandbox.command(&["train", "tiny.yaml", "--out", name, "-v"]);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if stream & 1 > 0 {
            drop(process.stdout.take());
        }
        if stream & 2 > 0 {
            drop(process.stderr.take());
        }
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {:?}", texts(&output));
        let ledger: serde_json::Value =
            serde_json::from_str(&sandbox.read(&format!("{name}/ledger.json"))).unwrap();
        assert_eq!((&ledger["status"], &ledger["steps"]), (&"finished".into(), &6.into()), "{name}");
    }
}

#[test]
fn full_devices_panic_nowhere() {
    let sandbox = sandbox();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let lines: [&[&str]; 8] = [
        &["check", "tiny.yaml"],
        &["check", "wrong.yaml"],
        &["count", "tiny.yaml", "--json"],
        &["show", "tiny.yaml"],
        &["compile", "tiny.yaml"],
        &["explain", "tiny.yaml"],
        &["schema"],
        &["data", "inspect", "tiny.yaml"],
    ];
    for line in lines {
        let output = sandbox.command(line).stdout(full()).output().unwrap();
        let (_, err) = texts(&output);
        assert!(output.status.code() == Some(1) && !err.contains("panicked"), "{line:?}: {err}");
        assert!(err.contains("standard output"), "{line:?}: {err}");
        let output = sandbox.command(line).stderr(full()).output().unwrap();
        let right = if line == ["check", "wrong.yaml"] { 1 } else { 0 };
        assert_eq!(output.status.code(), Some(right), "{line:?}");
    }
    // A training is whole; that its words were lost is said by the exit code.
    let line = ["train", "tiny.yaml", "--out", "run"];
    let output = sandbox.command(&line).stdout(full()).stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(sandbox.read("run/ledger.json").contains("\"finished\""));
    // A reader that goes away changes no exit code.
    let mut process = sandbox.command(&["check", "wrong.yaml"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(process.stdout.take());
    assert_eq!(process.wait().unwrap().code(), Some(1));
}

#[test]
fn a_dash_is_standard_input() {
    let sandbox = sandbox();
    let out = texts(&fed(&sandbox, &["count", "-"], TINY)).0;
    assert_eq!(out, sandbox.good(&["count", "tiny.yaml"]));
    let dream = sandbox.good(&["fmt", "tiny.yaml", "--to", "dream"]);
    assert_eq!(texts(&fed(&sandbox, &["count", "-"], &dream)).0, out);
    assert_eq!(texts(&fed(&sandbox, &["fmt", "-", "--to", "yaml"], &dream)).0, TINY);
    let output = fed(&sandbox, &["check", "-"], &TINY.replace("heads: 2", "haeds: 2"));
    assert!(output.status.code() == Some(1) && texts(&output).0.contains("standard input:7"), "{output:?}");
}

#[test]
fn pipes_in_the_file_system_are_refused_with_a_word() {
    let sandbox = sandbox();
    assert!(std::process::Command::new("mkfifo").arg(sandbox.path("pipe.yaml")).status().unwrap().success());
    let (code, err) = sandbox.bad(&["check", "pipe.yaml"]);
    assert!(code == 2 && err.is_empty(), "{err}");
    let (code, err) = sandbox.bad(&["train", "pipe.yaml"]);
    assert!(code == 2 && err.contains("it is a pipe"), "{err}");
    let (code, err) = sandbox.bad(&["probe", "tiny.yaml", "--ids", "pipe.yaml", "-o", "x.safetensors"]);
    assert!(code != 0 && err.contains("is a pipe"), "{err}");
}

#[test]
fn prompts_come_from_a_pipe_and_fit() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let prompt = "abcd 1-2 = ";
    let asked = sandbox.good(&["generate", "run", prompt, "-n", "4"]);
    let output = fed(&sandbox, &["generate", "run", "-n", "4"], &format!("{prompt}\n"));
    assert_eq!(texts(&output).0, asked);
    let output =
        fed(&sandbox, &["generate", "run", "-n", "4", "--interactive"], &format!("{prompt}\n/temp 0\n"));
    assert_eq!(texts(&output).0, asked);
    let output = fed(&sandbox, &["generate", "run", "--prompts", "-", "-n", "4"], &format!("{prompt}\n"));
    assert_eq!(texts(&output).0, asked);
    // A prompt that leaves no room is said to be cut; one that is not as the task has them gets a
    // hint.
    let (_, err) = texts(&sandbox.run(&["generate", "run", &"abcd ".repeat(40)]));
    assert!(err.contains("context is 64") && err.contains("left out"), "{err}");
    let (_, err) = texts(&sandbox.run(&["generate", "run", "abcd 1-2 =", "-n", "4"]));
    assert!(err.contains("end with \"= \""), "{err}");
    let output = sandbox.run(&["generate", "run", prompt, "-n", "100"]);
    let (out, err) = texts(&output);
    assert!(out.len() < 60 || err.contains("context of 64 tokens is full"), "{out}\n{err}");
    let (code, err) = sandbox.bad(&["generate", "run", prompt, "--depth", "0"]);
    assert!(code == 2 && err.contains("--depth"), "{err}");
    let (code, err) = sandbox.bad(&["generate", "tiny.yaml", prompt]);
    assert!(code == 2 && err.contains("is a specification"), "{err}");
}

#[test]
fn tokens_leave_a_loop_with_a_gate_and_no_other() {
    let sandbox = sandbox();
    let looped = |exit: &str| TINY.replace("- recur: 2\n", &format!("- recur: 3\n{exit}"));
    sandbox.write("gated.yaml", &looped("      exit: {gate: 0.1}\n"));
    sandbox.good(&["train", "gated.yaml", "--out", "gated"]);
    let prompt = "abcd 1-2 = ";
    let line = ["generate", "gated", prompt, "-n", "8", "--temperature", "0", "--exit", "0.3"];
    let cached = sandbox.good(&line);
    assert_eq!(cached, sandbox.good(&[&line[..], &["--no-cache"]].concat()));
    let passes = |said: &str| said.matches("loss after pass").count();
    assert_eq!(passes(&sandbox.good(&["eval", "gated"])), 3);
    assert!(sandbox.read("gated/metrics.jsonl").contains("\"passes\":[{\"loss\":"));
    let seen: Value = serde_json::from_str(&sandbox.good(&["analyze", "gated", "--json"])).unwrap();
    let shares = seen["observations"]["passes"].as_array().unwrap().iter();
    let all: f64 = shares.map(|pass| pass["share"].as_f64().unwrap()).sum();
    assert!((all - 1.0).abs() < 1e-6, "{all}");
    let (code, err) = sandbox.bad(&["generate", "gated", prompt, "--exit", "1"]);
    assert!(code == 2 && err.contains("from 0 to below 1"), "{err}");
    sandbox.write("plain.yaml", &looped(""));
    sandbox.good(&["train", "plain.yaml", "--out", "plain"]);
    let (_, err) = sandbox.bad(&["generate", "plain", prompt, "--exit", "0.5"]);
    assert!(err.contains("has none with `exit gate`"), "{err}");
}

#[test]
fn exit_codes_are_the_documented_ones() {
    let sandbox = sandbox();
    fs::create_dir(sandbox.path("empty")).unwrap();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let lines: [(&[&str], i32); 24] = [
        (&["runs", "none"], 2),
        (&["runs", "tiny.yaml"], 2),
        (&["import", "hf", "none"], 2),
        (&["new", "from", "none"], 2),
        (&["tokenizer", "train", "none", "--vocab", "300"], 2),
        (&["probe", "tiny.yaml", "--ids", "none", "-o", "x.safetensors"], 2),
        (&["generate", "run", "--prompts", "none"], 2),
        (&["eval", "run", "--data", "empty"], 2),
        (&["fit", "none"], 2),
        (&["eval", "none"], 2),
        (&["launch", "-n", "2", "train", "none.yaml"], 2),
        (&["launch", "-n", "2", "train", "-"], 2),
        (&["check", "wrong.yaml"], 1),
        (&["train", "wrong.yaml"], 1),
        (&["check", "none.yaml"], 2),
        (&["train", "none.yaml"], 2),
        (&["resume", "empty"], 2),
        (&["eval", "empty"], 2),
        (&["generate", "empty", "x"], 2),
        (&["analyze", "empty"], 2),
        (&["watch", "empty"], 2),
        (&["report", "empty"], 2),
        (&["compare", "tiny.yaml"], 2),
        (&["train", "tiny.yaml", "--threads", "10000"], 2),
    ];
    for (line, code) in lines {
        assert_eq!(sandbox.bad(line).0, code, "{line:?}");
    }
    let missing = sandbox.error(&["eval", "none"]);
    assert!(missing.contains("none: there is no such file or folder"), "{missing}");
    let folder = sandbox.error(&["eval", "run", "--data", "empty"]);
    assert!(folder.contains("--data empty: it is no file"), "{folder}");
    let help = sandbox.good(&["--help"]);
    for code in ["0 ", "1 ", "2 ", "130", "143"] {
        assert!(help.contains(&format!("\n  {code}")), "{help}");
    }
}

#[test]
fn a_run_that_diverged_says_so_last() {
    let sandbox = sandbox();
    let set = ["--set", "train.learning_rate=300", "--set", "train.clip=none", "--set", "train.steps=20"];
    let output = sandbox.run(&[&["train", "tiny.yaml", "--out", "run"], &set[..]].concat());
    let (out, err) = texts(&output);
    if output.status.success() {
        let last = out.lines().last().unwrap();
        assert!(last.contains("the run diverged") && last.contains("learning_rate"), "{out}");
    } else {
        assert!(err.contains("learning_rate"), "{err}");
    }
}

#[test]
fn check_reads_suites_and_looks_at_files() {
    let sandbox = sandbox();
    sandbox.write("s.suite.yaml", "name: s\nbaseline: tiny.yaml\nvariants: [{name: b, spec: wrong.yaml}]\n");
    let output = sandbox.run(&["check", "s.suite.yaml"]);
    let (out, _) = texts(&output);
    assert!(output.status.code() == Some(1) && out.contains("s.suite.yaml: no errors"), "{out}");
    assert!(out.contains("tiny.yaml: no errors") && out.contains("haeds"), "{out}");
    // A text that is not there is a warning, a tokenizer that does not fit an error.
    let text = TINY.replace("{task: permutation, size: 4, max_steps: 2}", "{text: nothing.txt}");
    sandbox.write("text.yaml", &text);
    let out = sandbox.good(&["check", "text.yaml"]);
    assert!(out.contains("warning[missing-file]") && out.contains("nothing.txt"), "{out}");
    sandbox.write("book.txt", &"the quick brown fox jumps over the lazy dog again and again\n".repeat(300));
    sandbox.good(&["tokenizer", "train", "book.txt", "--vocab", "300", "-o", "tokenizer.json"]);
    sandbox
        .write("small.yaml", &text.replace("text: nothing.txt", "text: book.txt, tokenizer: tokenizer.json"));
    let (code, _) = sandbox.bad(&["check", "small.yaml"]);
    let (out, _) = texts(&sandbox.run(&["check", "small.yaml"]));
    assert!(code == 1 && out.contains("error[small-vocab]") && out.contains("small.yaml:3"), "{out}");
}
