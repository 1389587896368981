//! Processes that share the runs of a comparison: nothing is trained twice, and those of a worker
//! that was killed are taken over.

use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const SPEC: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 8}}
  body: [\"sa > mlp\"]
data: {text: book.txt}
train: {steps: 60, batch: 4, sequence: 16, precision: f32, checkpoint: {every: 10, keep: 1}, evaluate: {every: 20, batches: 1}}
";

const SUITE: &str = "\
name: shared
baseline: tiny.yaml
variants:
  - {name: wide, spec: tiny.yaml, set: {mlp.intermediate: 9}}
equal: {flops: 20%, parameters: 20%, tokens}
seeds: [0, 1, 2]
";

pub const RUNS: [&str; 6] =
    ["tiny-seed0", "tiny-seed1", "tiny-seed2", "wide-seed0", "wide-seed1", "wide-seed2"];

pub fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(40);
    Sandbox::with(&[("tiny.yaml", SPEC), ("shared.suite.yaml", SUITE), ("book.txt", &book)])
}

fn worker(s: &Sandbox) -> Child {
    worker_with(s, &[])
}

fn worker_with(s: &Sandbox, more: &[&str]) -> Child {
    let line = ["compare", "shared.suite.yaml", "--out", "out", "--worker", "--threads", "1"];
    let mut command: Command = s.command(&[&line, more].concat());
    command.env("DREAMC_HEARTBEAT", "400");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn four_workers_of_which_two_are_killed_train_every_run_once() {
    let s = sandbox();
    s.good(&["compare", "shared.suite.yaml", "--out", "alone"]);
    let mut workers: Vec<Child> = (0..4).map(|_| worker(&s)).collect();
    // Two die with a run in their hands.
    let begun = Instant::now();
    while !RUNS.iter().any(|run| s.path(&format!("out/{run}/metrics.jsonl")).exists()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "no worker began");
        sleep(Duration::from_millis(5));
    }
    for mut dies in workers.drain(..2) {
        dies.kill().unwrap();
        dies.wait().unwrap();
    }
    let mut trained = 0;
    for child in workers {
        let output = child.wait_with_output().unwrap();
        let (out, error) = texts(&output);
        assert!(output.status.success(), "{out}{error}");
        let own = out.lines().find_map(|line| line.split_once(" runs trained;"));
        trained += own.and_then(|(n, _)| n.trim().parse::<usize>().ok()).unwrap_or(0);
    }
    assert!((1..=RUNS.len()).contains(&trained), "{trained} runs were trained by those that lived");
    for run in RUNS {
        let (shared, alone) = (s.path(&format!("out/{run}")), s.path(&format!("alone/{run}")));
        assert_eq!(bits(&shared, 60), bits(&alone, 60), "{run}");
        assert_eq!(metrics(&shared), metrics(&alone), "{run}");
        let ledger: Value = serde_json::from_str(&s.read(&format!("out/{run}/ledger.json"))).unwrap();
        assert_eq!(ledger["status"], "finished");
    }
    assert!(s.path("out/report.html").exists());
    let left: Vec<_> = std::fs::read_dir(s.path("out")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains(".claim-")), "{left:?}");
    // One more finds all of it done.
    let output = worker(&s).wait_with_output().unwrap();
    assert!(texts(&output).0.contains("6 runs were trained before"), "{output:?}");
}

#[test]
fn a_run_that_failed_is_not_tried_by_other_workers() {
    let s = sandbox();
    let diverges = "mlp.intermediate: 9, train.learning_rate: 1e30, train.warmup: 1";
    let mut failing = SUITE.replace("mlp.intermediate: 9", diverges);
    failing = failing.replace("seeds: [0, 1, 2]", "seeds: [0]");
    s.write("shared.suite.yaml", &failing);
    for again in [false, true] {
        let output = worker_with(&s, &["--allow-unequal"]).wait_with_output().unwrap();
        let (out, error) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{out}{error}");
        assert!(error.contains("1 run failed"), "{error}");
        assert_eq!(out.contains("0 runs trained"), again, "{out}");
    }
    assert!(s.read("out/wide-seed0.claim-1").starts_with("failed: "));
}

#[test]
fn a_job_array_for_slurm_is_printed() {
    let s = sandbox();
    let script = s.good(&[
        "compare",
        "shared.suite.yaml",
        "--slurm",
        "16",
        "--device",
        "cuda:0",
        "--set",
        "train.steps=5",
    ]);
    for line in ["#SBATCH --array=0-15", "#SBATCH --gpus-per-task=1", "#SBATCH --job-name=shared"] {
        assert!(script.lines().any(|l| l == line), "{line}:\n{script}");
    }
    let last = script.trim_end().lines().last().unwrap();
    assert!(
        last.starts_with("exec dreamc compare '/") && last.contains("--worker --device cuda:0"),
        "{last}"
    );
    assert!(last.contains("--set 'train.steps=5'"), "{last}");
    let checked = Command::new("bash").arg("-n").arg("-c").arg(&script).status().unwrap();
    assert!(checked.success());
}

#[test]
fn claims_that_no_worker_wrote_hold_nobody_up() {
    let s = sandbox();
    s.write("shared.suite.yaml", &SUITE.replace("seeds: [0, 1, 2]", "seeds: [0]"));
    s.good(&["compare", "shared.suite.yaml", "--out", "out"]);
    let claim = |name: &str| s.path(&format!("out/wide-seed0.claim-{name}"));
    let again = |name: &str| {
        std::fs::remove_dir_all(s.path("out/wide-seed0")).unwrap();
        let output = worker(&s).wait_with_output().unwrap();
        let (out, error) = texts(&output);
        assert!(!error.contains("panicked"), "{name}: {error}");
        (output.status.code(), out + &error)
    };
    // Numbers as no worker writes them are no claims.
    for name in ["0001", "18446744073709551615", "18446744073709551614", "-1", "x"] {
        std::fs::write(claim(name), "process 1 on mars: 0\n").unwrap();
        let (code, said) = again(name);
        assert!(code == Some(0), "{name}: {said}");
        assert!(s.path("out/wide-seed0/ledger.json").exists(), "{name}");
    }
    // An unreadable claim is an error with its name, and no wait.
    type Make = fn(&std::path::Path);
    let made: [(&str, Make); 3] = [
        ("is a pipe or a device", |path| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success())
        }),
        ("is a folder", |path| std::fs::create_dir(path).unwrap()),
        ("No such file", |path| std::os::unix::fs::symlink("/nonexistent", path).unwrap()),
    ];
    for (problem, make) in made {
        make(&claim("1"));
        let (code, said) = again(problem);
        assert!(code != Some(0) && said.contains(problem) && said.contains("wide-seed0.claim-1"), "{said}");
        let path = claim("1");
        std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path)).unwrap();
        s.good(&["compare", "shared.suite.yaml", "--out", "out"]);
    }
}
