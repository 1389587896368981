//! The `cuda` device without a GPU: the program as its users run it, on a stand-in for the driver (`tests/driver`).

mod support;

use dreamc_runtime::nvrtc::Nvrtc;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use support::house::{House, bits, metrics, texts};
use tempfile::TempDir;

/// Small, and with what makes launches differ from one another: a layer that is applied again, caches along depth, experts.
const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    da: {depth: {heads: 1, head_size: 8}}
    ea: {experts: {count: 2, active: 1, intermediate: 4, query: 4}}
  body:
    - recur: 2
      layers: [\"(da | sa) > ea\"]
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
        let card = Card { folder, nvrtc };
        // The kernels that most tests need are compiled once, by the first of them.
        static WARM: OnceLock<()> = OnceLock::new();
        WARM.get_or_init(|| {
            card.good(&house(), "", &train("cuda", "run"));
        });
        Some(card)
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
        self.succeeds(house, &mut self.command(house, settings, line))
    }

    fn succeeds(&self, house: &House, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        let log = fs::read_to_string(house.path("log")).unwrap_or_default();
        assert!(output.status.success(), "{command:?}: {:?}\n{out}\n{err}\n{log}", output.status);
        assert!(!log.contains("complaint"), "{command:?}:\n{log}");
        out
    }

    /// Runs a command that fails as a command does, without a complaint of the driver's; gives its error output.
    fn fails(&self, house: &House, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        let log = fs::read_to_string(house.path("log")).unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {out}\n{err}\n{log}");
        assert!(!err.contains("panicked") && !log.contains("complaint"), "{command:?}:\n{err}\n{log}");
        err
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

fn train<'a>(device: &'a str, out: &'a str) -> [&'a str; 6] {
    ["train", "tiny.yaml", "--device", device, "--out", out]
}

/// Weights, optimizer and metrics of a run.
fn result(house: &House, run: &str) -> (Vec<Vec<u8>>, Vec<serde_json::Value>) {
    (bits(&house.path(run), 4), metrics(&house.path(run)))
}

/// How often something happened, from the log.
fn count(house: &House, what: &str) -> u64 {
    let log = house.read("log");
    let released = log.lines().find(|line| line.starts_with("released")).expect("the context is released");
    let of = |word: &str| word.strip_prefix(what)?.strip_prefix('=')?.parse().ok();
    released.split(' ').find_map(of).unwrap_or(0)
}

/// With graphs and without, waiting for each launch, with work that is done late or at once, on either card: the same bits as on
/// the interpreter, every call within the rules, and nothing left behind.
#[test]
fn a_model_trains_as_on_the_interpreter_bit_for_bit() {
    let Some(card) = Card::new() else { return };
    let house = house();
    card.good(&house, "", &train("ptx", "ptx"));
    let expected = result(&house, "ptx");
    let ways: [(&str, &str, &str, bool); 6] = [
        ("", "", "cuda", true),
        ("DREAMC_GRAPHS", "1", "cuda:0", true),
        ("DREAMC_GRAPHS", "0", "cuda", false),
        ("DREAMC_SYNCHRONOUS", "1", "cuda", false),
        ("", "", "cuda timing=early", true),
        ("", "", "cuda:1 card=sm_90 cards=2", true),
    ];
    for (i, (variable, value, device, graphs)) in ways.into_iter().enumerate() {
        let out = format!("run{i}");
        let (device, settings) = device.split_once(' ').unwrap_or((device, ""));
        let mut command = card.command(&house, settings, &train(device, &out));
        if !variable.is_empty() {
            command.env(variable, value);
        }
        card.succeeds(&house, &mut command);
        assert!(result(&house, &out) == expected, "{:?}: other bits than the interpreter", ways[i]);
        assert_eq!(count(&house, "cuGraphLaunch") > 0, graphs, "{:?}", ways[i]);
        assert!(count(&house, "kernel") > 100);
    }
}

#[test]
fn every_command_gives_what_it_gives_on_the_interpreter() {
    let Some(card) = Card::new() else { return };
    let house = house();
    house.good(&["train", "tiny.yaml", "--out", "run"]);
    let lines: [&[&str]; 2] =
        [&["eval", "run", "--json"], &["generate", "run", "the quick", "--max-tokens", "6"]];
    for line in lines {
        let on = |device: &'static str| {
            let out = card.good(&house, "", &[line, &["--device", device]].concat());
            out.lines().filter(|line| !line.contains("seconds")).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(on("cuda"), on("ptx"), "{line:?}");
    }
    let cubin =
        card.good(&house, "", &["compile", "tiny.yaml", "--emit", "cubin", "--architecture", "sm_80"]);
    assert!(!cubin.is_empty());
}

/// Kernels of other sizes, which take a while to compile.
#[test]
#[ignore = "half a minute"]
fn verify_and_bench_run() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let proved = card.good(&house, "card=sm_90", &["verify", "tiny.yaml", "--device", "cuda"]);
    assert!(proved.contains("0 failed") && proved.contains("devices agree"), "{proved}");
    let bench =
        ["bench", "tiny.yaml", "--device", "cuda", "--steps", "2", "--tokens", "4", "--launches", "3"];
    let measured = card.good(&house, "", &bench);
    assert!(measured.contains("tokens/s"), "{measured}");
}

/// A kernel that faults, a GPU that is gone, in a launch or in a replay: an error that says so, a run that goes on from its last
/// checkpoint to the same bits, and a process that lets go of what it can.
#[test]
fn a_lost_gpu_leaves_the_last_checkpoint() {
    let Some(card) = Card::new() else { return };
    let house = house();
    card.good(&house, "", &train("cuda", "whole"));
    let expected = result(&house, "whole");
    let faults = [
        ("kernel:300:700", "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel failed"),
        ("cuGraphLaunch:9:719", "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"),
        ("cuLaunchKernel:120:716", "CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel failed"),
        ("cuStreamSynchronize:150:214", "CUDA_ERROR_ECC_UNCORRECTABLE", "the GPU failed"),
    ];
    let mut all_saved = vec![];
    for (fault, name, what) in faults {
        let _ = fs::remove_dir_all(house.path("run"));
        let error =
            card.fails(&house, &mut card.command(&house, &format!("fault={fault}"), &train("cuda", "run")));
        assert!(error.contains(name) && error.contains(what), "{fault}: {error}");
        assert!(error.contains("DREAMC_SYNCHRONOUS=1"), "{fault}: {error}");
        let saved = fs::read_dir(house.path("run/checkpoints")).is_ok_and(|all| {
            all.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
        });
        assert_eq!(error.contains("`dreamc resume run` goes on after step"), saved, "{fault}: {error}");
        all_saved.push(saved);
        card.good(&house, "", &["resume", "run", "--device", "cuda"]);
        assert!(result(&house, "run") == expected, "{fault}: other bits");
    }
    assert!(all_saved.contains(&true) && all_saved.contains(&false), "{all_saved:?}");
    // Waiting for each launch it says which one: layer, operation, kernel.
    let _ = fs::remove_dir_all(house.path("run"));
    let mut command = card.command(&house, "fault=kernel:40:700", &train("cuda", "run"));
    let error = card.fails(&house, command.env("DREAMC_SYNCHRONOUS", "1"));
    let named = error.contains("layer0.") && error.contains(", kernel ") && error.contains("a kernel failed");
    assert!(named && !error.contains("DREAMC_SYNCHRONOUS"), "{error}");
}

#[test]
fn what_the_driver_refuses_to_record_or_replay_is_launched() {
    let Some(card) = Card::new() else { return };
    let house = house();
    card.good(&house, "", &train("cuda", "whole"));
    let expected = result(&house, "whole");
    for fault in [
        "cuStreamBeginCapture:1:900",
        "cuStreamEndCapture:1:901",
        "cuGraphInstantiate:1:801",
        "cuGraphLaunch:3:2",
    ] {
        let settings = format!("fault={fault}");
        let _ = fs::remove_dir_all(house.path("run"));
        card.good(&house, &settings, &train("cuda", "run"));
        assert!(house.read("log").contains("fault: "), "{fault} was not met");
        assert!(result(&house, "run") == expected, "{fault}: other bits");
        let _ = fs::remove_dir_all(house.path("run"));
        let error = card
            .fails(&house, card.command(&house, &settings, &train("cuda", "run")).env("DREAMC_GRAPHS", "1"));
        assert!(error.contains(fault.split(':').next().unwrap()), "{fault}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_allocated() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let refused = |settings: &str| {
        let _ = fs::remove_dir_all(house.path("run"));
        card.fails(&house, &mut card.command(&house, settings, &train("cuda", "run")))
    };
    let error = refused("memory=4194304");
    assert!(error.contains("4194304 bytes free") && error.contains("most of it"), "{error}");
    assert!(error.contains("train.batch") || error.contains("smaller model"), "{error}");
    assert_eq!(count(&house, "cuMemAlloc"), 0);
    // Another process was faster.
    let error = refused("fault=cuMemAlloc:1:2");
    assert!(error.contains("cannot allocate") && error.contains("arena"), "{error}");
    let error = refused("fault=cuModuleLoadData:3:2");
    assert!(error.contains("memory of the GPU is full") && error.contains("kernel "), "{error}");
}

#[test]
fn a_driver_that_does_not_serve_is_an_error_that_says_what_would() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let refused = |settings: &str, device: &str| {
        card.fails(&house, &mut card.command(&house, settings, &train(device, "run")))
    };
    let error = refused("cards=2 card=sm_90", "cuda:7");
    assert!(error.contains("cuda:0 (stand-in for sm_90), cuda:1 (stand-in for sm_90)"), "{error}");
    assert!(refused("cards=0", "cuda").contains("sees no GPU"));
    assert!(refused("card=sm_75", "cuda").contains("compute capability 7.5"));
    assert!(refused("fault=cuInit:1:803", "cuda").contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"));
    let error = refused("version=12040", "cuda");
    assert!(error.contains("the driver is for CUDA 12.4") && error.contains("NVRTC"), "{error}");
    // A library without one of the calls.
    let mut old = fs::read(library()).unwrap();
    let name = b"\0cuGraphInstantiateWithFlags\0";
    let places: Vec<usize> =
        old.windows(name.len()).enumerate().filter(|(_, w)| w == name).map(|(i, _)| i).collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|at| old[at + name.len() - 2] = b'_');
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so"), old).unwrap();
    let mut command = card.command(&house, "", &train("cuda", "run"));
    let error =
        card.fails(&house, command.env("LD_LIBRARY_PATH", folder.path()).env("DREAMC_NVRTC", &card.nvrtc));
    assert!(error.contains("lacks cuGraphInstantiateWithFlags") && error.contains("newer"), "{error}");
    fs::write(folder.path().join("libcuda.so"), "no library").unwrap();
}

/// Cards differ in the shared memory of a block.
#[test]
#[ignore = "kernels that nothing else needs"]
fn a_card_with_less_shared_memory_says_which_kernel_needs_more() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let line = [&train("cuda", "run")[..], &["--set", "sa.head_size=300"]].concat();
    let error = card.fails(&house, &mut card.command(&house, "card=sm_86", &line));
    assert!(error.contains("kernel attention_") && error.contains("this GPU has 101376"), "{error}");
    card.good(&house, "", &[&line[..], &["--force"]].concat());
}

/// `benches/gpu/bench.py`, in small, on a stand-in for an H100: all that needs no PyTorch. The calibration has the interpreter on both
/// sides, so it is exact; it is left out where the test executable `ptx` was not built.
#[test]
#[ignore = "ten minutes"]
fn the_script_for_a_gpu_runs() {
    let Some(card) = Card::new() else { return };
    let house = house();
    house.write(
        "nvidia-smi",
        "#!/bin/sh\ncase $1 in *memory*) echo 80000 MiB ;; *) echo NVIDIA H100 ;; esac\n",
    );
    fs::set_permissions(house.path("nvidia-smi"), fs::Permissions::from_mode(0o755)).unwrap();
    let beside = std::env::current_exe().unwrap();
    let built = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("ptx-") && path.extension().is_none()
    };
    let mut tests: Vec<PathBuf> =
        fs::read_dir(beside.parent().unwrap()).unwrap().map(|e| e.unwrap().path()).filter(built).collect();
    tests.sort_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
    let mut only = "losses_cpu|losses_cuda|count|dreamc|launched|floor|paths".to_string();
    if let Some(newest) = tests.last() {
        std::os::unix::fs::symlink(newest, house.path("ptx")).unwrap();
        only += "|calibration";
    }
    let program = card.command(&house, "card=sm_90", &[]);
    let mut script = Command::new("python3");
    script.arg(support::root("benches/gpu/bench.py")).args(["--models", "tiny-la", "--sequence", "16"]);
    script.args(["--batch", "1", "--steps", "1", "--minutes", "30", "--each", "900", "--only", &only]);
    script.args([
        "--dreamc",
        env!("CARGO_BIN_EXE_dreamc"),
        "--tests",
        ".",
        "--out",
        "results",
        "--work",
        "work",
    ]);
    let path = std::env::join_paths(
        [house.path("")].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    script.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = script.env("PATH", path.unwrap()).current_dir(house.path("")).output().unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{out}\n{err}\n{}", house.read("results/results.json"));
    println!("{out}");
    for line in ["cuda against cpu", "| tiny-la | dreamc |", "| tiny-la | launched |", "| tiny-la | floor |"]
    {
        assert!(out.contains(line), "{out}");
    }
    assert_eq!(fs::read_dir(house.path("results")).unwrap().count(), 2);
}

#[test]
fn two_processes_fill_one_cache_of_kernels() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let runs = ["one", "two"].map(|out| {
        let mut command = card.command(&house, "", &train("cuda", out));
        command.env("DREAMC_CACHE", house.path("cache")).args(["--set", "train.steps=1"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    runs.into_iter().for_each(|mut run| assert!(run.wait().unwrap().success()));
    assert_eq!(bits(&house.path("one"), 1), bits(&house.path("two"), 1));
    let names = fs::read_dir(house.path("cache/kernels")).unwrap().map(|e| e.unwrap().file_name());
    let names: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    assert!(names.len() > 20 && names.iter().all(|name| !name.starts_with(".tmp-")), "{names:?}");
}
