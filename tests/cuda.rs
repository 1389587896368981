//! The `cuda` device without a GPU: the program as its users run it, on a stand-in for the driver (`tests/driver`).

mod support;

use dreamc_runtime::nvrtc::Nvrtc;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::house::{House, metrics, texts};
use tempfile::TempDir;

/// Every part of the language that has kernels of its own, small.
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
train: {steps: 4, batch: 2, sequence: 16, precision: f32, checkpoint: {every: 1, keep: 2},
        evaluate: {every: 2, batches: 1}}
";

/// The stand-in where a loader finds it, as the driver and as NVRTC.
struct Card {
    folder: TempDir,
    nvrtc: PathBuf,
}

impl Card {
    /// `None` where NVRTC is missing, which CI does not accept.
    fn new() -> Option<Card> {
        let nvrtc = match Nvrtc::find() {
            Ok(nvrtc) => nvrtc.path().expect("a file").to_path_buf(),
            Err(error) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{error}"),
            Err(error) => {
                println!("skipped: {error}");
                return None;
            }
        };
        let folder = tempfile::tempdir().unwrap();
        for name in ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc.so.13"] {
            std::os::unix::fs::symlink(library(), folder.path().join(name)).unwrap();
        }
        Some(Card { folder, nvrtc })
    }

    /// A command with the stand-in as its driver.
    fn command(&self, house: &House, settings: &str, line: &[&str]) -> Command {
        let mut command = house.command(line);
        let log = house.path("log");
        let _ = fs::remove_file(&log);
        let nvrtc = self.nvrtc.display();
        command.env("STANDIN", format!("{settings} log={} nvrtc={nvrtc}", log.display()));
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("DREAMC_NVRTC", self.folder.path());
        command.env("DREAMC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda"));
        for variable in ["DREAMC_GRAPHS", "DREAMC_SYNCHRONOUS", "DREAMC_HOPPER"] {
            command.env_remove(variable);
        }
        command
    }

    /// Runs a command that succeeds without a complaint of the driver's; gives its output.
    fn good(&self, house: &House, settings: &str, line: &[&str]) -> String {
        let output = self.command(house, settings, line).output().unwrap();
        let (out, err) = texts(&output);
        let log = fs::read_to_string(house.path("log")).unwrap_or_default();
        assert!(output.status.success(), "{line:?}: {:?}\n{out}\n{err}\n{log}", output.status);
        assert!(!log.contains("complaint"), "{line:?}:\n{log}");
        out
    }
}

/// The shared library that cargo made of `tests/driver`, beside this test.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let library = tests.parent().unwrap().join("libdreamc_driver.so");
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

fn house() -> House {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(20);
    House::with(&[("tiny.yaml", TINY), ("book.txt", &book)])
}

#[test]
fn a_model_trains_as_on_the_interpreter_bit_for_bit() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let train = |device: &'static str, out: &'static str| ["train", "tiny.yaml", "--device", device, "--out", out];
    card.good(&house, "", &train("ptx", "ptx"));
    card.good(&house, "", &train("cuda", "cuda"));
    println!("{}", house.read("log"));
    assert_eq!(metrics(&house.path("cuda")), metrics(&house.path("ptx")));
}
