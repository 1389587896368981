//! A run survives: being killed at every change it makes to a disk, a full disk, a folder that
//! cannot be written, damaged checkpoints, a second process, a clock that goes back. It goes on to
//! the same bits, or says what is wrong.
//!
//! `DREAMC_KILLS` is how many moments are tried of each program; 0 for every one. `DREAMC_SEED`
//! shifts them.

use crate::support::ptrace::{End, trace};
use crate::support::sandbox::{Sandbox, bits, metrics};
use dreamc_skip::skip;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A model that trains in a moment, on a text.
const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    ea: {experts: {count: 2, active: 1, intermediate: 4, query: 4}}
  body: [\"sa > ea\"]
data: {text: book.txt}
train: {steps: 4, batch: 2, sequence: 16, precision: f32, checkpoint: {every: 1, keep: 1},
        evaluate: {every: 2, batches: 1}}
";

const SUITE: &str = "\
name: pair
baseline: tiny.yaml
variants:
  - {name: wide, spec: tiny.yaml, set: {ea.intermediate: 8}}
equal: {flops: 10%, parameters: 10%, tokens}
seeds: [0]
";

fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(20);
    Sandbox::with(&[("tiny.yaml", TINY), ("pair.suite.yaml", SUITE), ("book.txt", &book)])
}

/// A command whose output nobody reads.
fn quiet(sandbox: &Sandbox, line: &[&str]) -> Command {
    let mut command = sandbox.command(line);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a command that fails with exit code 1 or 2 and without panicking; gives its error output.
fn fails(mut command: Command) -> String {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let error = error(&output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{command:?}: {:?}\n{error}", output.status);
    assert!(!error.contains("panicked"), "{error}");
    error
}

fn setting(name: &str, otherwise: usize) -> usize {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Bytes of weights and optimizer after a step, and the metrics without what a clock says.
fn result(run: &Path, step: u64) -> (Vec<Vec<u8>>, Vec<serde_json::Value>) {
    (bits(run, step), metrics(run))
}

/// Names of unfinished files below a folder.
fn unfinished(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(".tmp-") {
            found.push(entry.path());
        } else if entry.file_type().unwrap().is_dir() {
            found.extend(unfinished(&entry.path()));
        }
    }
    found
}

/// Moments `1..=all` to be killed at: all of them, or `wanted`, evenly.
fn moments(all: usize, wanted: usize) -> Vec<usize> {
    let seed = setting("DREAMC_SEED", 1);
    println!("DREAMC_KILLS={wanted} DREAMC_SEED={seed}: of {all} moments");
    if wanted == 0 || wanted >= all {
        return (1..=all).collect();
    }
    let step = all as f64 / wanted as f64;
    let shift = (seed * 7919 % 1000) as f64 / 1000.0 * step;
    (0..wanted).map(|i| 1 + (i as f64 * step + shift) as usize % all).collect()
}

/// Kills a command at a change; one that makes fewer, because what an earlier one cached is there,
/// ends well.
fn kill(command: Command, moment: usize) {
    let end = trace(command, moment).unwrap();
    assert!(matches!(end, End::Killed | End::Ended { success: true, .. }), "moment {moment}: {end:?}");
}

/// The line that goes on with what is in a folder.
fn go_on<'a>(folder: &Path, fresh: &[&'a str], resume: &[&'a str]) -> Vec<&'a str> {
    if folder.join("spec.yaml").exists() { resume.to_vec() } else { fresh.to_vec() }
}

#[test]
fn a_run_killed_at_any_change_to_the_disk_goes_on_to_the_same_bits() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "whole", "--no-rewrite"]);
    let whole = result(&sandbox.path("whole"), 4);
    let fresh = ["train", "tiny.yaml", "--out", "cut", "--no-rewrite"];
    let resume = ["resume", "cut"];
    let begin = || {
        let _ = fs::remove_dir_all(sandbox.path("cut"));
        let _ = fs::remove_dir_all(sandbox.path("cache"));
    };
    begin();
    let all = match trace(quiet(&sandbox, &fresh), usize::MAX) {
        Ok(End::Ended { changes, success }) => {
            assert!(success && changes > 100, "{changes}");
            changes
        }
        Ok(End::Killed) => unreachable!("there is no such moment"),
        Err(error) => return skip(format!("this system does not let a process be traced: {error}")),
    };
    for moment in moments(all, setting("DREAMC_KILLS", 40)) {
        begin();
        kill(quiet(&sandbox, &fresh), moment);
        // Once more, early in what goes on, where there is so much of it.
        let line = go_on(&sandbox.path("cut"), &fresh, &resume);
        trace(quiet(&sandbox, &line), 1 + moment % 12).unwrap();
        sandbox.good(&go_on(&sandbox.path("cut"), &fresh, &resume));
        assert_eq!(result(&sandbox.path("cut"), 4), whole, "moment {moment}");
        let left = unfinished(&sandbox.path("cut"));
        assert!(left.is_empty(), "moment {moment} leaves {left:?}");
    }
}

#[test]
fn a_comparison_killed_at_any_change_to_the_disk_goes_on_to_the_same_bits() {
    let sandbox = sandbox();
    let line = |out: &'static str| ["compare", "pair.suite.yaml", "--out", out, "--jobs", "1"];
    sandbox.good(&line("whole"));
    let results =
        |out: &str| ["tiny", "wide"].map(|arm| result(&sandbox.path(&format!("{out}/{arm}-seed0")), 4));
    let whole = results("whole");
    let all = match trace(quiet(&sandbox, &line("cut")), usize::MAX) {
        Ok(End::Ended { changes, success: true }) => changes,
        Ok(end) => panic!("{end:?}"),
        Err(error) => return skip(format!("this system does not let a process be traced: {error}")),
    };
    for moment in moments(all, setting("DREAMC_KILLS", 12)) {
        let _ = fs::remove_dir_all(sandbox.path("cut"));
        kill(quiet(&sandbox, &line("cut")), moment);
        trace(quiet(&sandbox, &line("cut")), 1 + moment % 40).unwrap();
        sandbox.good(&line("cut"));
        assert_eq!(results("cut"), whole, "moment {moment}");
        assert!(sandbox.path("cut/report.html").is_file());
    }
}

#[test]
fn an_import_killed_at_any_change_to_the_disk_is_made_again_and_leaves_nothing() {
    let sandbox = sandbox();
    let from = crate::support::root("tests/import/llama3_new");
    let line = |out: &'static str| ["import", "hf", from.to_str().unwrap(), "--out", out];
    sandbox.good(&line("models/cut"));
    let files = |folder: &str| {
        let mut all: Vec<_> = fs::read_dir(sandbox.path(folder))
            .unwrap()
            .map(|e| e.unwrap().path())
            .map(|p| (p.file_name().unwrap().to_owned(), fs::read(&p).unwrap()))
            .collect();
        all.sort();
        all
    };
    let whole = files("models/cut");
    fs::remove_dir_all(sandbox.path("models/cut")).unwrap();
    let all = match trace(quiet(&sandbox, &line("models/cut")), usize::MAX) {
        Ok(End::Ended { changes, success: true }) => changes,
        Ok(end) => panic!("{end:?}"),
        Err(error) => return skip(format!("this system does not let a process be traced: {error}")),
    };
    let mut left = 0;
    for moment in moments(all, setting("DREAMC_KILLS", 12)) {
        let _ = fs::remove_dir_all(sandbox.path("models/cut"));
        kill(quiet(&sandbox, &line("models/cut")), moment);
        left += unfinished(&sandbox.path("models")).len();
        // A folder was whole, or it is missing.
        if !sandbox.path("models/cut").exists() {
            sandbox.good(&line("models/cut"));
        }
        assert!(files("models/cut") == whole, "moment {moment}");
        let rest = unfinished(&sandbox.path("models"));
        assert!(rest.is_empty(), "moment {moment} leaves {rest:?}");
    }
    assert!(left > 0, "no kill left anything unfinished");
}

#[test]
#[ignore = "compiles kernels at each kill"]
fn a_run_killed_while_it_caches_kernels_goes_on_to_the_same_bits() {
    let sandbox = sandbox();
    let line = |out: &'static str| {
        let model = ["train", "tiny.yaml", "--out", out, "--device", "ptx", "--set", "train.steps=1"];
        [&model[..], &["--set", "train.evaluate.every=0"]].concat()
    };
    sandbox.good(&line("whole"));
    let whole = result(&sandbox.path("whole"), 1);
    let kernels = sandbox.path("cache/kernels");
    let files = || fs::read_dir(&kernels).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    let again = |what: &str| {
        let _ = fs::remove_dir_all(sandbox.path("cut"));
        sandbox.good(&line("cut"));
        assert_eq!(result(&sandbox.path("cut"), 1), whole, "{what}");
    };
    let _ = fs::remove_dir_all(sandbox.path("cache"));
    let all = match trace(quiet(&sandbox, &line("cut")), usize::MAX) {
        Ok(End::Ended { changes, success: true }) => changes,
        Ok(end) => panic!("{end:?}"),
        Err(error) => return skip(format!("this system does not let a process be traced: {error}")),
    };
    // The kernels come first, in three changes each.
    for moment in moments(3 * files().len().min(all / 3), setting("DREAMC_KILLS", 12)) {
        let _ = fs::remove_dir_all(sandbox.path("cache"));
        let _ = fs::remove_dir_all(sandbox.path("cut"));
        kill(quiet(&sandbox, &line("cut")), moment);
        again(&format!("moment {moment}"));
    }
    for (i, file) in files().into_iter().enumerate() {
        let mut bytes = fs::read(&file).unwrap();
        let at = i * 997 % bytes.len();
        if i % 3 == 0 {
            bytes.truncate(at)
        } else {
            bytes[at] ^= 1 << (i % 8)
        }
        fs::write(&file, &bytes).unwrap();
    }
    again("damaged kernels");
    let left = unfinished(&kernels);
    assert!(left.is_empty(), "{left:?}");
}

/// Runs dreamc where no file may grow beyond `blocks` of 1024 bytes: a write fails, or where `kill`
/// the process is killed by it.
fn confined(sandbox: &Sandbox, line: &[&str], blocks: u64, kill: bool) -> Command {
    let mut command = Command::new("bash");
    let trap = if kill { "" } else { "trap '' XFSZ; " };
    command.args(["-c", &format!("{trap}ulimit -c 0; ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_dreamc")).args(line).current_dir(sandbox.path(""));
    command.env("DREAMC_CACHE", sandbox.path("cache")).stdin(Stdio::null());
    command
}

#[test]
fn a_write_that_fails_is_an_error_that_names_the_file_and_loses_nothing() {
    let sandbox = sandbox();
    let train = |out: &'static str| ["train", "tiny.yaml", "--out", out];
    sandbox.good(&train("whole"));
    let whole = result(&sandbox.path("whole"), 4);
    // 30 KiB hold the model and not the optimizer, 4 not the model, 1 not the specification, 0
    // nothing.
    for (blocks, named) in [(30, "step-0000000"), (4, "step-0000000"), (1, "run"), (0, "run")] {
        let _ = fs::remove_dir_all(sandbox.path("run"));
        let error = fails(confined(&sandbox, &train("run"), blocks, false));
        assert!(error.contains(named) && error.contains("File too large"), "{blocks}: {error}");
        assert!(unfinished(&sandbox.path("run")).is_empty());
        sandbox.good(&go_on(&sandbox.path("run"), &train("run"), &["resume", "run"]));
        assert_eq!(result(&sandbox.path("run"), 4), whole);
    }
    // With a checkpoint written: it is still there, and serves.
    sandbox.good(&["train", "tiny.yaml", "--out", "longer", "--set", "train.steps=8"]);
    let longer = result(&sandbox.path("longer"), 8);
    let error = fails(confined(&sandbox, &["resume", "run", "--set", "train.steps=8"], 30, false));
    assert!(error.contains("step-00000005") && error.contains("File too large"), "{error}");
    assert!(sandbox.path("run/checkpoints/step-00000004").is_dir());
    sandbox.good(&["resume", "run", "--set", "train.steps=8"]);
    assert_eq!(result(&sandbox.path("run"), 8).0[1], longer.0[1]);
    // The same where the write kills.
    for blocks in [0, 1, 4, 20, 30] {
        let _ = fs::remove_dir_all(sandbox.path("run"));
        assert!(!confined(&sandbox, &train("run"), blocks, true).output().unwrap().status.success());
        sandbox.good(&go_on(&sandbox.path("run"), &train("run"), &["resume", "run"]));
        assert_eq!(result(&sandbox.path("run"), 4), whole);
    }
}

/// Runs a script in namespaces of its own, where it may mount; `None` where the system does not
/// allow that.
fn alone(sandbox: &Sandbox, script: &str) -> Option<Output> {
    let run = |script: &str| {
        let mut command = Command::new("unshare");
        command.args([
            "--user",
            "--map-root-user",
            "--mount",
            "bash",
            "-c",
            script,
            env!("CARGO_BIN_EXE_dreamc"),
        ]);
        command.current_dir(sandbox.path("")).env("DREAMC_CACHE", sandbox.path("cache")).output()
    };
    let allowed = run("mkdir -p small && mount -t tmpfs -o size=4k none small");
    match allowed {
        Ok(output) if output.status.success() => Some(run(script).unwrap()),
        _ => {
            skip("this system does not let a test mount a file system");
            None
        }
    }
}

#[test]
fn a_full_disk_and_a_read_only_one_are_errors() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "whole"]);
    // Room for one checkpoint and not for two: the second save fails, the first one is whole.
    let script = "mkdir -p disk && mount -t tmpfs -o size=120k none disk || exit 9
        \"$0\" train tiny.yaml --out disk/run; echo \"code $?\" >&2
        mount -o remount,size=10m disk; \"$0\" resume disk/run >/dev/null || exit 8
        cmp disk/run/checkpoints/step-00000004/model.safetensors whole/checkpoints/step-00000004/model.safetensors || exit 7
        mount -o remount,ro disk; \"$0\" resume disk/run; echo \"code $?\" >&2
        \"$0\" train tiny.yaml --out disk/new; echo \"code $?\" >&2";
    let Some(output) = alone(&sandbox, script) else { return };
    let error = error(&output);
    assert!(output.status.success(), "{:?}: {error}", output.status);
    assert!(error.contains("No space left on device") && error.contains("step-0000000"), "{error}");
    assert_eq!(error.matches("Read-only file system").count(), 2, "{error}");
    assert_eq!(error.matches("code 1").count(), 3, "{error}");
    assert!(!error.contains("panicked"), "{error}");
}

#[test]
fn a_full_disk_of_one_rank_ends_all_and_they_go_on_to_the_same_bits() {
    let sandbox = sandbox();
    let parts = ["--set", "train.accumulate=2"];
    sandbox.good(&[&["launch", "-n", "2", "train", "tiny.yaml", "--out", "whole"], &parts[..]].concat());
    // Rank 0 writes, and the other waits for it: `timeout` would give 124.
    let script = "mkdir -p disk && mount -t tmpfs -o size=120k none disk || exit 9
        timeout 60 \"$0\" launch -n 2 train tiny.yaml --set train.accumulate=2 --out disk/run; echo \"code $?\" >&2
        mount -o remount,size=10m disk; \"$0\" launch -n 2 resume disk/run >/dev/null || exit 8
        cmp disk/run/checkpoints/step-00000004/model.safetensors whole/checkpoints/step-00000004/model.safetensors";
    let Some(output) = alone(&sandbox, script) else { return };
    let error = error(&output);
    assert!(output.status.success(), "{:?}: {error}", output.status);
    assert!(error.contains("No space left on device") && error.contains("code 1"), "{error}");
    assert!(error.contains("rank 1") && !error.contains("panicked"), "{error}");
}

#[test]
fn a_folder_without_permission_is_an_error() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let mode =
        |mode: u32| fs::set_permissions(sandbox.path("run"), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    if fs::write(sandbox.path("run/probe"), "").is_ok() {
        skip("root may write in every folder");
    } else {
        let _ = fs::remove_file(sandbox.path("run/run.lock"));
        let error = fails(sandbox.command(&["resume", "run", "--set", "train.steps=6"]));
        assert!(error.contains("run") && error.contains("Permission denied"), "{error}");
    }
    mode(0o755);
    sandbox.good(&["resume", "run", "--set", "train.steps=6"]);
}

#[test]
fn every_damage_to_a_checkpoint_is_told_and_the_one_before_serves() {
    let sandbox = sandbox();
    let line = ["train", "tiny.yaml", "--out", "run", "--set", "train.checkpoint.keep=2"];
    sandbox.good(&line);
    let whole = result(&sandbox.path("run"), 4);
    let newest = sandbox.path("run/checkpoints/step-00000004");
    let again = |name: &str, what: &str| {
        let output = sandbox.run(&["resume", "run"]);
        let error = error(&output);
        assert!(output.status.success(), "{what}: {error}");
        assert!(error.contains(name) && error.contains("going on after step 3"), "{what}: {error}");
        assert_eq!(result(&sandbox.path("run"), 4), whole, "{what}");
    };
    let tensors = fs::read(newest.join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(tensors[..8].try_into().unwrap()) as usize;
    let places =
        [0, 7, 8, header / 2, 7 + header, 8 + header, (8 + header + tensors.len()) / 2, tensors.len() - 1];
    for (i, at) in places.into_iter().enumerate() {
        let mut bytes = tensors.clone();
        bytes[at] ^= 1 << i;
        fs::write(newest.join("model.safetensors"), &bytes).unwrap();
        again("model.safetensors", &format!("bit {i} of byte {at}"));
    }
    for name in ["model.safetensors", "optimizer.safetensors", "state.json", "checksums.txt"] {
        let file = newest.join(name);
        let good = fs::read(&file).unwrap();
        for length in [0, 1, good.len() / 2, good.len() - 1] {
            fs::write(&file, &good[..length]).unwrap();
            again("step-00000004", &format!("{name} cut to {length}"));
        }
        let mut bytes = good.clone();
        bytes[good.len() / 3] ^= 16;
        fs::write(&file, &bytes).unwrap();
        again("step-00000004", &format!("{name} with a bit flipped"));
        fs::remove_file(&file).unwrap();
        again("step-00000004", &format!("{name} removed"));
    }
    // With none that is good, it says so, and which; nothing is removed.
    for step in [3, 4] {
        fs::write(sandbox.path(&format!("run/checkpoints/step-{step:08}/state.json")), "{}").unwrap();
    }
    let error = fails(sandbox.command(&["resume", "run"]));
    assert!(error.contains("none of its 2 checkpoints is good") && error.contains("state.json"), "{error}");
    assert!(sandbox.path("run/checkpoints/step-00000003/model.safetensors").is_file());
}

#[test]
fn a_damaged_newest_checkpoint_does_not_cost_the_good_ones() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run", "--set", "train.checkpoint.keep=2"]);
    let whole = result(&sandbox.path("run"), 4);
    for name in ["step-00000003", "step-00000004"] {
        assert!(sandbox.path(&format!("run/checkpoints/{name}")).is_dir());
    }
    // It goes on from step 3 with a longer plan and is stopped by a full disk at once: step 3 must
    // still be there.
    fs::write(sandbox.path("run/checkpoints/step-00000004/state.json"), "{}").unwrap();
    fails(confined(&sandbox, &["resume", "run"], 30, false));
    sandbox.good(&["resume", "run"]);
    assert_eq!(result(&sandbox.path("run"), 4), whole);
}

#[test]
fn a_damaged_cache_is_built_anew() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "whole"]);
    let whole = result(&sandbox.path("whole"), 4);
    let shards = sandbox.path("cache/shards");
    let shard = fs::read_dir(&shards).unwrap().next().unwrap().unwrap().path();
    for name in ["tokens.bin", "documents.bin", "shard.json", "checksums.txt"] {
        let file = shard.join(name);
        for damage in [0, 1, 2] {
            let mut bytes = fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            match damage {
                0 => bytes[middle] ^= 1,
                1 => bytes.truncate(middle),
                _ => bytes.clear(),
            }
            fs::write(&file, &bytes).unwrap();
            sandbox.good(&["train", "tiny.yaml", "--out", "run", "--force"]);
            assert_eq!(result(&sandbox.path("run"), 4), whole, "{name}, damage {damage}");
        }
    }
    assert!(unfinished(&shards).is_empty());
}

#[test]
fn a_clock_that_went_back_changes_nothing() {
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "whole", "--set", "train.steps=2"]);
    // As if all that there is had been written a year from now.
    let future = std::time::SystemTime::now() + std::time::Duration::from_secs(365 * 24 * 3600);
    let mut waiting = vec![sandbox.path("").to_path_buf()];
    while let Some(path) = waiting.pop() {
        fs::File::open(&path).unwrap().set_modified(future).unwrap();
        if path.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
    }
    sandbox.good(&["resume", "whole", "--set", "train.steps=4"]);
    sandbox.good(&["train", "tiny.yaml", "--out", "other"]);
    let (a, b) = (result(&sandbox.path("whole"), 4), result(&sandbox.path("other"), 4));
    assert_eq!(a.1.last(), b.1.last());
}

#[test]
fn a_report_reads_nothing_outside_its_folder() {
    let sandbox = sandbox();
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    let manifest = fs::read_to_string(sandbox.path("out/compare.json")).unwrap();
    let name = "../tiny";
    fs::write(sandbox.path("out/compare.json"), manifest.replace("\"wide\"", &format!("{name:?}"))).unwrap();
    let error = fails(sandbox.command(&["report", "out"]));
    assert!(
        error.contains("the name `../tiny` of an arm") && error.contains("use up to 200 letters"),
        "{error}"
    );
}

#[test]
fn damaged_ledgers_and_metrics_are_errors_that_name_the_file() {
    let sandbox = sandbox();
    sandbox.good(&["compare", "pair.suite.yaml", "--out", "out"]);
    for name in ["compare.json", "wide.yaml", "wide-seed0/ledger.json", "wide-seed0/metrics.jsonl"] {
        let file = sandbox.path("out").join(name);
        let good = fs::read(&file).unwrap();
        for (damage, bytes) in [
            ("cut", good[..good.len() / 2].to_vec()),
            ("binary", vec![0xFF; 64]),
            ("nested", b"[".repeat(100_000)),
        ] {
            fs::write(&file, [&bytes[..], b"\n"].concat()).unwrap();
            let error = fails(sandbox.command(&["report", "out"]));
            assert!(error.contains(name.split('/').next_back().unwrap()), "{name}, {damage}: {error}");
        }
        fs::write(&file, &good).unwrap();
        sandbox.good(&["report", "out"]);
    }
}

#[test]
fn steps_that_are_left_out_are_counted_and_a_resumed_run_leaves_out_the_same() {
    let sandbox = sandbox();
    let set = ["--set", "train.steps=90", "--set", "train.spike=0.3", "--set", "train.checkpoint.every=10"];
    let set = [&set[..], &["--set", "train.checkpoint.keep=20"]].concat();
    sandbox.good(&[&["train", "tiny.yaml", "--out", "whole"], &set[..]].concat());
    let whole = result(&sandbox.path("whole"), 90);
    let ledger = |run: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(sandbox.path(run).join("ledger.json")).unwrap()).unwrap()
    };
    let skipped = whole.1.iter().filter(|line| line["skipped"].is_string()).count();
    assert!(skipped > 0 && ledger("whole")["skipped_steps"] == skipped, "{skipped}");
    for step in [70, 80, 90] {
        fs::remove_dir_all(sandbox.path(&format!("whole/checkpoints/step-{step:08}"))).unwrap();
    }
    sandbox.good(&["resume", "whole"]);
    assert_eq!(result(&sandbox.path("whole"), 90), whole);
    assert_eq!(ledger("whole")["skipped_steps"], skipped);
}

#[test]
fn infinities_are_left_out_where_that_is_asked_for() {
    let sandbox = sandbox();
    // The first update destroys the weights; every later step would write NaN.
    let set = ["--set", "train.learning_rate=1e38", "--set", "train.warmup=0", "--set", "train.on_nan=skip"];
    let run = [&["train", "tiny.yaml", "--out", "run", "--set", "train.steps=20"], &set[..]].concat();
    sandbox.good(&run);
    let ledger: serde_json::Value =
        serde_json::from_slice(&fs::read(sandbox.path("run/ledger.json")).unwrap()).unwrap();
    let left_out = ledger["skipped_steps"].as_u64().unwrap();
    assert!((10..20).contains(&left_out) && ledger["status"] == "finished", "{ledger}");
    let metrics = fs::read_to_string(sandbox.path("run/metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"skipped\":\"the ").count() as u64, left_out);
    // A run that does not come back is stopped.
    let long = [&["train", "tiny.yaml", "--out", "long", "--set", "train.steps=200"], &set[..]].concat();
    let error = fails(sandbox.command(&long));
    assert!(error.contains("learning_rate") && error.contains("the last good checkpoint is kept"), "{error}");
}
