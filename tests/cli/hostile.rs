//! Files and limits that nobody means well with: each is an error that names its file, none hangs,
//! and none ends the process.

use crate::support::sandbox::{Sandbox, texts};
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components: {sa: {sequence: {heads: 1, head_size: 8}}}
  body: [sa]
data: {text: book.txt}
train: {steps: 2, batch: 2, sequence: 16, precision: f32}
";

fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(200);
    Sandbox::with(&[("tiny.yaml", TINY), ("book.txt", &book)])
}

/// Output of a command that must end within a minute.
fn ends(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{command:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(!err.contains("panicked"), "{err}");
    (output.status.code(), err)
}

#[test]
fn pipes_are_refused() {
    let sandbox = sandbox();
    let made = Command::new("mkfifo").arg(sandbox.path("pipe")).status().unwrap();
    assert!(made.success());
    fs::create_dir(sandbox.path("model")).unwrap();
    assert!(Command::new("mkfifo").arg(sandbox.path("model/config.json")).status().unwrap().success());
    let lines: [&[&str]; 3] = [
        &["train", "tiny.yaml", "--out", "run", "--set", "data.text=pipe"],
        &["train", "tiny.yaml", "--out", "run", "--set", "data.tokenizer=pipe"],
        &["import", "hf", "model"],
    ];
    for line in lines {
        let (code, err) = ends(sandbox.command(line));
        assert!(code != Some(0) && err.contains("is a pipe or a device; name a file"), "{line:?}: {err}");
    }
    assert!(!sandbox.path("run").exists());
}

#[test]
fn a_pipe_in_a_run_holds_nothing_up() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    for name in ["metrics.jsonl", "ledger.json"] {
        let path = sandbox.path("run").join(name);
        let text = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (code, err) = ends(sandbox.command(&["resume", "run"]));
        assert!(code != Some(0) && err.contains(name) && err.contains("is a pipe or a device"), "{err}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, text).unwrap();
    }
    sandbox.good(&["resume", "run"]);
}

#[test]
fn a_file_with_holes_is_refused_before_it_is_read() {
    let sandbox = sandbox();
    let file = fs::File::options().write(true).open(sandbox.path("book.txt")).unwrap();
    file.set_len(1 << 40).unwrap();
    let (code, err) = ends(sandbox.command(&["train", "tiny.yaml", "--out", "run"]));
    assert!(code == Some(1) && err.contains("book.txt: has a hole from byte "), "{err}");
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_with_a_name() {
    let sandbox = sandbox();
    let mut command = Command::new("sh");
    let line = format!("ulimit -f 8; exec {} train tiny.yaml --out run", env!("CARGO_BIN_EXE_dreamc"));
    command.args(["-c", &line]).current_dir(sandbox.path("")).env("DREAMC_CACHE", sandbox.path("cache"));
    let (code, err) = ends(command);
    assert!(
        code == Some(1)
            && err.contains("File too large")
            && err.contains(&*sandbox.path("").to_string_lossy())
            || err.contains("run/"),
        "{code:?} {err}"
    );
}

#[test]
fn numbers_beyond_reason_are_refused() {
    let sandbox = sandbox();
    let (code, err) = ends(sandbox.command(&["train", "tiny.yaml", "--threads", "10000"]));
    assert!(code == Some(2) && err.contains("from 1 to 1024"), "{err}");
    let vocab = (1u64 << 62).to_string();
    let (code, err) =
        ends(sandbox.command(&["tokenizer", "train", "book.txt", "--vocab", &vocab, "-o", "t.json"]));
    assert!(code != Some(0) && err.contains("is too large"), "{err}");
    assert!(!sandbox.path("t.json").exists());
}

#[test]
fn a_shard_that_is_cut_is_made_anew() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "first"]);
    for shard in fs::read_dir(sandbox.path("cache/shards")).unwrap().flatten() {
        let tokens = shard.path().join("tokens.bin");
        fs::File::options().write(true).open(tokens).unwrap().set_len(100).unwrap();
    }
    sandbox.good(&["train", "tiny.yaml", "--out", "second"]);
    let metrics = |run: &str| crate::support::sandbox::metrics(&sandbox.path(run));
    assert_eq!(metrics("first"), metrics("second"));
}

#[test]
fn a_shard_that_is_cut_while_a_run_reads_it_ends_the_run_with_an_error() {
    let sandbox = sandbox();
    let line = ["train", "tiny.yaml", "--out", "run", "--set", "train.steps=100000000"];
    let mut child = sandbox.command(&line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !fs::read_to_string(sandbox.path("run/metrics.jsonl")).is_ok_and(|t| t.lines().count() > 2) {
        assert!(child.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(10));
    }
    for shard in fs::read_dir(sandbox.path("cache/shards")).unwrap().flatten() {
        fs::File::options().write(true).open(shard.path().join("tokens.bin")).unwrap().set_len(10).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(
        output.status.code() == Some(1) && err.contains("tokens.bin: was cut short while it was used"),
        "{err}"
    );
}

#[test]
fn a_file_that_changes_while_it_is_tokenised_is_refused_and_not_kept() {
    let sandbox = sandbox();
    // Large enough that it is still being tokenised when it changes.
    let line = "the quick brown fox jumps over the lazy dog\n";
    fs::write(sandbox.path("book.txt"), line.repeat(1 << 19)).unwrap();
    let mut child = sandbox
        .command(&["train", "tiny.yaml", "--out", "run"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let building = || {
        let folders = fs::read_dir(sandbox.path("cache/shards"));
        folders.is_ok_and(|f| f.flatten().any(|e| e.path().join("tokens.bin").is_file()))
    };
    while !building() {
        assert!(
            child.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(120),
            "no shard is built"
        );
    }
    // In place, at the end, which is read last.
    let mut file = fs::File::options().append(true).open(sandbox.path("book.txt")).unwrap();
    file.write_all("another ending\n".as_bytes()).unwrap();
    drop(file);
    let output = child.wait_with_output().unwrap();
    let (_, err) = texts(&output);
    assert!(output.status.code() == Some(1) && err.contains("book.txt: changed while it was read"), "{err}");
    let left = fs::read_dir(sandbox.path("cache/shards")).unwrap().count();
    assert_eq!(left, 0, "nothing of it is kept");
}
