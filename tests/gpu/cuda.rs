//! The `cuda` device without a GPU: the program as its users run it, on a stand-in for the driver
//! (`driver/`).

use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use dreamc_nvrtc::Nvrtc;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Small, and with what makes launches differ from one another: a layer that is applied again,
/// caches along depth, experts.
pub const TINY: &str = "\
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

/// The stand-in where a loader finds it.
pub struct Card {
    pub folder: TempDir,
    pub nvrtc: PathBuf,
}

impl Card {
    /// By these names of libraries; `None` where NVRTC is missing.
    pub fn of(names: &[&str]) -> Option<Card> {
        let nvrtc = dreamc_skip::need(Nvrtc::find())?.path().expect("a file").to_path_buf();
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::os::unix::fs::symlink(library(), folder.path().join(name)).unwrap();
        }
        Some(Card { folder, nvrtc })
    }

    /// As the driver and as NVRTC.
    fn new() -> Option<Card> {
        let card = Card::of(&["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc.so.13"])?;
        // The kernels that most tests need are compiled once, by the first of them.
        static WARM: OnceLock<()> = OnceLock::new();
        WARM.get_or_init(|| {
            card.good(&sandbox(), "", &train("cuda", "run"));
        });
        Some(card)
    }

    /// A command with the stand-in as its driver.
    fn command(&self, sandbox: &Sandbox, settings: &str, line: &[&str]) -> Command {
        let mut command = sandbox.command(line);
        let log = sandbox.path("log");
        let _ = fs::remove_file(&log);
        let nvrtc = self.nvrtc.display();
        command.env("STANDIN", format!("{settings} log={} nvrtc={nvrtc}", log.display()));
        command.env("LD_LIBRARY_PATH", self.folder.path()).env("DREAMC_NVRTC", self.folder.path());
        command.env("DREAMC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda"));
        for variable in ["DREAMC_GRAPHS", "DREAMC_SYNCHRONOUS", "DREAMC_HOPPER"] {
            command.env_remove(variable);
        }
        // A real one may be on this machine.
        command.env("DREAMC_CUBLASLT", "0");
        // Proofs run every kernel twice more: tests of them ask for them.
        command.env("DREAMC_PROVE", "0");
        command
    }

    /// The same with cuBLASLt next to the driver.
    fn with_cublaslt() -> Option<Card> {
        let card = Card::new()?;
        std::os::unix::fs::symlink(library(), card.folder.path().join("libcublasLt.so.13")).unwrap();
        Some(card)
    }

    /// A command that uses cuBLASLt where it is faster, with kernels compiled but no choice made in
    /// the sandbox's own cache.
    fn choosing(&self, sandbox: &Sandbox, settings: &str, line: &[&str]) -> Command {
        let (from, to) =
            (Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda/kernels"), sandbox.path("cache/kernels"));
        if !to.exists() {
            fs::create_dir_all(&to).unwrap();
            for file in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
                let name = file.file_name().to_string_lossy().into_owned();
                if !["choice-", "proof-", "."].iter().any(|own| name.starts_with(own)) {
                    fs::hard_link(file.path(), to.join(name)).unwrap();
                }
            }
        }
        let mut command = self.command(sandbox, settings, line);
        command.env("DREAMC_CACHE", sandbox.path("cache")).env_remove("DREAMC_CUBLASLT");
        command
    }

    /// Runs a command that succeeds without a complaint of the driver's; gives its output.
    fn good(&self, sandbox: &Sandbox, settings: &str, line: &[&str]) -> String {
        self.succeeds(sandbox, &mut self.command(sandbox, settings, line))
    }

    fn succeeds(&self, sandbox: &Sandbox, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        let log = fs::read_to_string(sandbox.path("log")).unwrap_or_default();
        assert!(output.status.success(), "{command:?}: {:?}\n{out}\n{err}\n{log}", output.status);
        assert!(!log.contains("complaint"), "{command:?}:\n{log}");
        out
    }

    /// Runs a command that fails as a command does, without a complaint of the driver's; gives its
    /// error output.
    fn fails(&self, sandbox: &Sandbox, command: &mut Command) -> String {
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        let log = fs::read_to_string(sandbox.path("log")).unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {out}\n{err}\n{log}");
        assert!(!err.contains("panicked") && !log.contains("complaint"), "{command:?}:\n{err}\n{log}");
        err
    }
}

/// The shared library that cargo made of `driver/`, next to this test.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let library = tests.parent().unwrap().join("libdreamc_driver.so");
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

pub fn sandbox() -> Sandbox {
    let book = "the quick brown fox jumps over the lazy dog\n".repeat(20);
    Sandbox::with(&[("tiny.yaml", TINY), ("book.txt", &book)])
}

fn train<'a>(device: &'a str, out: &'a str) -> [&'a str; 6] {
    ["train", "tiny.yaml", "--device", device, "--out", out]
}

/// Weights, optimizer and metrics of a run.
fn result(sandbox: &Sandbox, run: &str) -> (Vec<Vec<u8>>, Vec<serde_json::Value>) {
    (bits(&sandbox.path(run), 4), metrics(&sandbox.path(run)))
}

/// How often something happened, from the log.
fn count(sandbox: &Sandbox, what: &str) -> u64 {
    let log = sandbox.read("log");
    let released = log.lines().find(|line| line.starts_with("released")).expect("the context is released");
    let of = |word: &str| word.strip_prefix(what)?.strip_prefix('=')?.parse().ok();
    released.split(' ').find_map(of).unwrap_or(0)
}

/// With graphs and without, waiting for each launch, with work that is done late or at once, on
/// either card: the same bits as on the interpreter, every call within the rules, and nothing
/// left.
#[test]
fn a_model_trains_as_on_the_interpreter_bit_for_bit() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    card.good(&sandbox, "", &train("ptx", "ptx"));
    let expected = result(&sandbox, "ptx");
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
        let mut command = card.command(&sandbox, settings, &train(device, &out));
        if !variable.is_empty() {
            command.env(variable, value);
        }
        card.succeeds(&sandbox, &mut command);
        assert!(result(&sandbox, &out) == expected, "{:?}: other bits than the interpreter", ways[i]);
        assert_eq!(count(&sandbox, "cuGraphLaunch") > 0, graphs, "{:?}", ways[i]);
        assert!(count(&sandbox, "kernel") > 100);
    }
}

fn choices(sandbox: &Sandbox) -> Vec<PathBuf> {
    let all = fs::read_dir(sandbox.path("cache/kernels")).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("choice-")).collect()
}

/// The second is recorded.
fn two_steps(out: &str) -> Vec<&str> {
    [&train("cuda", out)[..], &["--set", "train.steps=2"]].concat()
}

fn again(sandbox: &Sandbox, run: &str) {
    let _ = fs::remove_dir_all(sandbox.path(run));
}

pub fn losses(sandbox: &Sandbox, run: &str) -> Vec<f64> {
    metrics(&sandbox.path(run)).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// Products by the library wherever it can: the same losses up to rounding, the same bits however
/// they are launched, and no memory that was not counted.
#[test]
fn with_cublaslt_a_model_trains_alike() {
    let Some(card) = Card::with_cublaslt() else { return };
    for (precision, tolerance) in [("f32", 1e-6), ("bf16", 5e-3)] {
        let sandbox = sandbox();
        let sets = ["--set".to_string(), format!("train.precision={precision}")];
        let line = |out: &'static str| [&train("cuda", out)[..], &[&sets[0], &sets[1]]].concat();
        card.good(&sandbox, "", &line("generated"));
        assert_eq!(count(&sandbox, "cublasLtCreate"), 0);
        let expected = losses(&sandbox, "generated");
        let ways = [("DREAMC_GRAPHS", "1"), ("DREAMC_GRAPHS", "0"), ("DREAMC_SYNCHRONOUS", "1")];
        let mut bits = vec![];
        // How it is launched has nothing to do with types.
        for (variable, value) in &ways[..if precision == "f32" { 3 } else { 1 }] {
            again(&sandbox, "run");
            let mut command = card.command(&sandbox, "", &line("run"));
            card.succeeds(&sandbox, command.env("DREAMC_CUBLASLT", "1").env(variable, value));
            assert!(count(&sandbox, "product") > 50 && count(&sandbox, "cuEventElapsedTime") == 0);
            bits.push(result(&sandbox, "run"));
        }
        assert!(bits.iter().all(|run| *run == bits[0]), "{precision}: other bits");
        assert!(bits[0] != result(&sandbox, "generated"), "{precision}: the library rounds otherwise");
        let found = losses(&sandbox, "run");
        assert_eq!(found.len(), expected.len());
        for (x, y) in expected.iter().zip(&found) {
            assert!((x - y).abs() <= tolerance * x.abs(), "{precision}: {expected:?} {found:?}");
        }
    }
}

/// Memory is counted before anything is allocated, with the library's workspace, and suffices.
#[test]
fn the_workspace_of_cublaslt_is_counted() {
    let Some(card) = Card::with_cublaslt() else { return };
    let sandbox = sandbox();
    let line = [&train("cuda", "run")[..], &["--set", "train.steps=1"]].concat();
    let needed = |library: &str| {
        again(&sandbox, "run");
        let mut command = card.command(&sandbox, "memory=4194304", &line);
        let error = card.fails(&sandbox, command.env("DREAMC_CUBLASLT", library));
        let (_, rest) = error.split_once("the plan needs ").unwrap();
        rest.split(';').next().unwrap().parse::<u64>().unwrap()
    };
    let (with, without) = (needed("1"), needed("0"));
    assert_eq!(
        with - without,
        (4 << 20) - (2 << 20),
        "4 MiB of workspace in place of a page of scratch memory"
    );
    // Training and scoring share a session.
    let run = |memory: u64| {
        again(&sandbox, "run");
        let mut command = card.command(&sandbox, &format!("memory={memory}"), &line);
        command.env("DREAMC_CUBLASLT", "1");
        command
    };
    card.succeeds(&sandbox, &mut run(with));
    assert!(card.fails(&sandbox, &mut run(with - 1)).contains("most of it"));
}

#[test]
fn the_faster_one_of_cublaslt_and_ours_is_chosen_once() {
    let Some(card) = Card::with_cublaslt() else { return };
    let sandbox = sandbox();
    let line = two_steps("run");
    card.good(&sandbox, "", &two_steps("generated"));
    let mut always = card.command(&sandbox, "", &two_steps("always"));
    card.succeeds(&sandbox, always.env("DREAMC_CUBLASLT", "1"));
    let [generated, always] = ["generated", "always"].map(|run| metrics(&sandbox.path(run)));
    assert!(generated != always);
    let run = |sandbox: &Sandbox, settings: &str| {
        again(sandbox, "run");
        card.succeeds(sandbox, &mut card.choosing(sandbox, settings, &line));
        (
            metrics(&sandbox.path("run")),
            count(sandbox, "cuEventElapsedTime"),
            count(sandbox, "cublasLtCreate"),
        )
    };
    let (bits, measured, _) = run(&sandbox, "");
    assert!(bits == always && measured > 0, "the library is faster");
    let kept = choices(&sandbox).len();
    assert!(kept > 5, "{kept}");
    // It is slower by now, and nobody looks; whole files are not written again.
    let (bits, measured, _) = run(&sandbox, "product=9000");
    assert!(bits == always && measured == 0);
    // Files that are not whole: measured again.
    for (i, file) in choices(&sandbox).into_iter().enumerate() {
        fs::write(file, if i % 2 == 0 { "rubbish" } else { "" }).unwrap();
    }
    let (bits, measured, _) = run(&sandbox, "");
    assert!(bits == always && measured > 0 && choices(&sandbox).len() == kept);
    // Another card, driver or library is another question, and where ours are faster they are used,
    // without the library at work.
    let slow = Sandbox::with(&[]);
    for name in ["tiny.yaml", "book.txt"] {
        slow.write(name, &sandbox.read(name));
    }
    let (bits, measured, _) = run(&slow, "product=2000");
    assert!(bits == generated && measured > 0);
    let (bits, measured, started) = run(&slow, "product=1");
    assert!(bits == generated && (measured, started) == (0, 0));
    let (bits, measured, _) = run(&slow, "version=13010");
    assert!(bits == always && measured > 0);
    // Without a folder to keep it in nothing is measured, so that two runs are alike.
    again(&sandbox, "run");
    let mut command = card.choosing(&sandbox, "", &[&line[..], &["--set", "train.steps=1"]].concat());
    card.succeeds(&sandbox, command.env("DREAMC_CACHE", ""));
    assert_eq!((count(&sandbox, "cuEventElapsedTime"), count(&sandbox, "cublasLtCreate")), (0, 0));
}

/// Whatever cuBLASLt does wrong while it is tried: the generated kernel, in this run and in later
/// ones.
#[test]
fn a_cublaslt_that_fails_is_left_alone() {
    let Some(card) = Card::with_cublaslt() else { return };
    let line = two_steps("run");
    let generated = sandbox();
    card.good(&generated, "", &line);
    let generated = metrics(&generated.path("run"));
    // Of all products, or of one; some tried once more.
    let faults = [
        ("product=wrong", true, false),
        ("fault=cublasLtMatmulAlgoGetHeuristic:2:15", false, true),
        ("fault=cublasLtMatmul:3:13", false, false),
        ("fault=cuStreamEndCapture:2:901", false, false),
        ("fault=cuEventElapsedTime:1:400", false, false),
        ("fault=cublasLtCreate:1:1", false, true),
    ];
    for (fault, all, twice) in faults {
        let sandbox = sandbox();
        let run = |settings: &str| {
            again(&sandbox, "run");
            card.succeeds(&sandbox, &mut card.choosing(&sandbox, settings, &line));
            (bits(&sandbox.path("run"), 2), metrics(&sandbox.path("run")))
        };
        let first = run(fault);
        assert!(sandbox.read("log").contains("fault: ") || all, "{fault} was not met");
        assert_eq!(first.1 == generated, all, "{fault}");
        assert!(!twice || run("") == first, "{fault}: the second run chooses otherwise");
    }
    // A GPU that is gone is an error, and nothing is decided by it.
    let sandbox = sandbox();
    let error =
        card.fails(&sandbox, &mut card.choosing(&sandbox, "fault=product:1:700", &train("cuda", "run")));
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert_eq!(choices(&sandbox).len(), 0);
}

#[test]
fn what_is_asked_of_cublaslt_and_cannot_be_is_an_error() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let line = two_steps("run");
    let asked = |settings: &str, value: &str, synchronous: bool| {
        again(&sandbox, "run");
        let mut command = card.command(&sandbox, settings, &line);
        if synchronous {
            command.env("DREAMC_SYNCHRONOUS", "1");
        }
        command.env("DREAMC_CUBLASLT", value);
        command
    };
    // Where it is missing nothing changes; a real one on this machine refuses the stand-in for the
    // driver.
    card.good(&sandbox, "", &two_steps("generated"));
    card.succeeds(&sandbox, card.choosing(&sandbox, "", &line).env("DREAMC_CUBLASLT", ""));
    assert_eq!(bits(&sandbox.path("run"), 2), bits(&sandbox.path("generated"), 2));
    let error = card.fails(&sandbox, &mut asked("", "1", false));
    assert!(error.contains("pip install nvidia-cublas") || error.contains("cublasLtCreate"), "{error}");
    let error = card.fails(&sandbox, &mut asked("", "yes", false));
    assert!(error.contains("DREAMC_CUBLASLT is `yes`; it is 0"), "{error}");
    fs::write(card.folder.path().join("libcublasLt.so.13"), "no library").unwrap();
    assert!(card.fails(&sandbox, &mut asked("", "1", false)).contains("does not load"));
    fs::remove_file(card.folder.path().join("libcublasLt.so.13")).unwrap();

    let Some(card) = Card::with_cublaslt() else { return };
    let asked = |settings: &str, synchronous: bool| {
        again(&sandbox, "run");
        let mut command = card.command(&sandbox, settings, &line);
        if synchronous {
            command.env("DREAMC_SYNCHRONOUS", "1");
        }
        command.env("DREAMC_CUBLASLT", "1");
        command
    };
    let error = card.fails(&sandbox, &mut asked("fault=cublasLtCreate:1:1", false));
    assert!(
        error.contains("CUBLAS_STATUS_NOT_INITIALIZED") && error.contains("DREAMC_CUBLASLT=0"),
        "{error}"
    );
    let error = card.fails(&sandbox, &mut asked("fault=cublasLtMatmul:9:14", false));
    let named = error.contains("layer0.") && error.contains("cuBLASLt 13.10.0: cublasLtMatmul");
    assert!(named && error.contains("CUBLAS_STATUS_INTERNAL_ERROR"), "{error}");
    let error = card.fails(&sandbox, &mut asked("fault=product:9:700", true));
    let named = error.contains("layer0.") && error.contains(", cuBLASLt 13.10.0: a kernel failed");
    assert!(named && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    // One that served when it was chosen, and no longer does.
    card.succeeds(&sandbox, &mut card.choosing(&sandbox, "", &two_steps("chosen")));
    again(&sandbox, "run");
    let error = card
        .fails(&sandbox, &mut card.choosing(&sandbox, "fault=cublasLtMatmulAlgoGetHeuristic:3:15", &line));
    assert!(error.contains("computed before") && error.contains("DREAMC_CUBLASLT=0"), "{error}");
}

#[test]
fn every_command_gives_what_it_gives_on_the_interpreter() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    sandbox.good(&["train", "tiny.yaml", "--out", "run"]);
    let lines: [&[&str]; 2] =
        [&["eval", "run", "--json"], &["generate", "run", "the quick", "--max-tokens", "6"]];
    for line in lines {
        let on = |device: &'static str| {
            let out = card.good(&sandbox, "", &[line, &["--device", device]].concat());
            out.lines().filter(|line| !line.contains("seconds")).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(on("cuda"), on("ptx"), "{line:?}");
    }
    let cubin =
        card.good(&sandbox, "", &["compile", "tiny.yaml", "--emit", "cubin", "--architecture", "sm_80"]);
    assert!(!cubin.is_empty());
}

/// Kernels of other sizes, which take a while to compile.
#[test]
#[ignore = "two minutes"]
fn verify_and_bench_run() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let proved = card.good(&sandbox, "card=sm_90", &["verify", "tiny.yaml", "--device", "cuda"]);
    assert!(proved.contains("0 failed") && proved.contains("devices agree"), "{proved}");
    let bench =
        ["bench", "tiny.yaml", "--device", "cuda", "--steps", "2", "--tokens", "4", "--launches", "99"];
    let measured = card.good(&sandbox, "", &bench);
    assert!(measured.contains("tokens/s") && !measured.contains("plain products"), "{measured}");
    // And with every plain product by the library.
    let Some(card) = Card::with_cublaslt() else { return };
    let by_library = |settings: &str, line: &[&str]| {
        let mut command = card.command(&sandbox, settings, line);
        card.succeeds(&sandbox, command.env("DREAMC_CUBLASLT", "1"))
    };
    let proved = by_library("card=sm_90", &["verify", "tiny.yaml", "--device", "cuda"]);
    assert!(proved.contains("0 failed") && proved.contains("devices agree"), "{proved}");
    assert!(count(&sandbox, "product") > 50);
    let measured = by_library("", &bench);
    assert!(measured.contains("plain products, 100 % of their time"), "{measured}");
    assert!(measured.contains("cuBLASLt: asked for"), "{measured}");
}

/// A kernel that faults, a GPU that is gone, in a launch or in a replay: an error that says so, a
/// run that goes on from its last checkpoint to the same bits, and a process that lets go of what
/// it can.
#[test]
fn a_lost_gpu_leaves_the_last_checkpoint() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    card.good(&sandbox, "", &train("cuda", "whole"));
    let expected = result(&sandbox, "whole");
    let faults = [
        ("kernel:300:700", "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel failed"),
        ("cuGraphLaunch:9:719", "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"),
        ("cuLaunchKernel:120:716", "CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel failed"),
        ("cuStreamSynchronize:150:214", "CUDA_ERROR_ECC_UNCORRECTABLE", "the GPU failed"),
    ];
    let mut all_saved = vec![];
    for (fault, name, what) in faults {
        let _ = fs::remove_dir_all(sandbox.path("run"));
        let error = card
            .fails(&sandbox, &mut card.command(&sandbox, &format!("fault={fault}"), &train("cuda", "run")));
        assert!(error.contains(name) && error.contains(what), "{fault}: {error}");
        assert!(error.contains("DREAMC_SYNCHRONOUS=1"), "{fault}: {error}");
        let saved = fs::read_dir(sandbox.path("run/checkpoints")).is_ok_and(|all| {
            all.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
        });
        assert_eq!(error.contains("`dreamc resume run` goes on after step"), saved, "{fault}: {error}");
        all_saved.push(saved);
        card.good(&sandbox, "", &["resume", "run", "--device", "cuda"]);
        assert!(result(&sandbox, "run") == expected, "{fault}: other bits");
    }
    assert!(all_saved.contains(&true) && all_saved.contains(&false), "{all_saved:?}");
    // Waiting for each launch it says which one: layer, operation, kernel.
    let _ = fs::remove_dir_all(sandbox.path("run"));
    let mut command = card.command(&sandbox, "fault=kernel:40:700", &train("cuda", "run"));
    let error = card.fails(&sandbox, command.env("DREAMC_SYNCHRONOUS", "1"));
    let named = error.contains("layer0.") && error.contains(", kernel ") && error.contains("a kernel failed");
    assert!(named && !error.contains("DREAMC_SYNCHRONOUS"), "{error}");
}

#[test]
fn what_the_driver_refuses_to_record_or_replay_is_launched() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    card.good(&sandbox, "", &train("cuda", "whole"));
    let expected = result(&sandbox, "whole");
    for fault in [
        "cuStreamBeginCapture:1:900",
        "cuStreamEndCapture:1:901",
        "cuGraphInstantiate:1:801",
        "cuGraphLaunch:3:2",
    ] {
        let settings = format!("fault={fault}");
        let _ = fs::remove_dir_all(sandbox.path("run"));
        card.good(&sandbox, &settings, &train("cuda", "run"));
        assert!(sandbox.read("log").contains("fault: "), "{fault} was not met");
        assert!(result(&sandbox, "run") == expected, "{fault}: other bits");
        let _ = fs::remove_dir_all(sandbox.path("run"));
        let error = card.fails(
            &sandbox,
            card.command(&sandbox, &settings, &train("cuda", "run")).env("DREAMC_GRAPHS", "1"),
        );
        assert!(error.contains(fault.split(':').next().unwrap()), "{fault}: {error}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_allocated() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let refused = |settings: &str| {
        let _ = fs::remove_dir_all(sandbox.path("run"));
        card.fails(&sandbox, &mut card.command(&sandbox, settings, &train("cuda", "run")))
    };
    let error = refused("memory=4194304");
    assert!(error.contains("room for 4194304 bytes") && error.contains("most of it"), "{error}");
    assert!(error.contains("train.batch") || error.contains("smaller model"), "{error}");
    assert_eq!(count(&sandbox, "cuMemAlloc"), 0);
    // Another process was faster.
    let error = refused("fault=cuMemAlloc:1:2");
    assert!(error.contains("cannot allocate") && error.contains("arena"), "{error}");
    let error = refused("fault=cuModuleLoadData:3:2");
    assert!(error.contains("memory of the GPU is full") && error.contains("kernel "), "{error}");
}

/// A Turing GPU trains by naive kernels, to the bits of another GPU that is asked for them.
#[test]
fn turing_trains_by_naive_kernels() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    card.good(&sandbox, "card=sm_75", &train("cuda", "turing"));
    let mut ampere = card.command(&sandbox, "card=sm_80", &train("cuda", "ampere"));
    card.succeeds(&sandbox, ampere.env("DREAMC_NAIVE", "1"));
    assert_eq!(bits(&sandbox.path("turing"), 4), bits(&sandbox.path("ampere"), 4));
    assert_eq!(losses(&sandbox, "turing"), losses(&sandbox, "ampere"));
    assert!(card.good(&sandbox, "card=sm_75", &["doctor"]).contains("naive kernels"));
}

#[test]
fn a_driver_that_does_not_serve_is_an_error_that_says_what_would() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let refused = |settings: &str, device: &str| {
        card.fails(&sandbox, &mut card.command(&sandbox, settings, &train(device, "run")))
    };
    let error = refused("cards=2 card=sm_90", "cuda:7");
    assert!(error.contains("cuda:0 (stand-in for sm_90), cuda:1 (stand-in for sm_90)"), "{error}");
    assert!(refused("cards=0", "cuda").contains("sees no GPU"));
    assert!(refused("card=sm_70", "cuda").contains("the kernels need 7.5 (Turing) or newer"));
    for (code, words) in [
        (34, "the toolkit's stub"),
        (802, "fabric manager"),
        (803, "restart the machine"),
        (804, "cuda-compat"),
    ] {
        let error = refused(&format!("fault=cuInit:1:{code}"), "cuda");
        assert!(error.contains(words) && error.contains("CUDA_ERROR_"), "{code}: {error}");
    }
    let error = refused("version=12040", "cuda");
    let package = "`pip install nvidia-cuda-nvrtc-cu12==12.4.*`";
    assert!(error.contains("the driver is for CUDA 12.4") && error.contains(package), "{error}");
    // The doctor says so, too, and of versions that go together that a kernel ran.
    let doctor = |settings: &str| card.good(&sandbox, settings, &["doctor"]);
    assert!(doctor("version=12040").contains(package));
    assert!(doctor("").contains("runs a kernel") && doctor("card=sm_120").contains("none of its own yet"));
    let broken = doctor("spoil=wrong:written");
    assert!(broken.contains("runs no kernel") && broken.contains("wrote 0"), "{broken}");
    // A library without one of the calls.
    let mut old = fs::read(library()).unwrap();
    let name = b"\0cuGraphInstantiateWithFlags\0";
    let places: Vec<usize> =
        old.windows(name.len()).enumerate().filter(|(_, w)| w == name).map(|(i, _)| i).collect();
    assert!(!places.is_empty());
    places.into_iter().for_each(|at| old[at + name.len() - 2] = b'_');
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so"), old).unwrap();
    let mut command = card.command(&sandbox, "", &train("cuda", "run"));
    let error =
        card.fails(&sandbox, command.env("LD_LIBRARY_PATH", folder.path()).env("DREAMC_NVRTC", &card.nvrtc));
    assert!(error.contains("lacks cuGraphInstantiateWithFlags") && error.contains("newer"), "{error}");
    fs::write(folder.path().join("libcuda.so"), "no library").unwrap();
}

/// Work that does not end is given up after a while, with the name of its launch where each is
/// waited for, and the process ends.
#[test]
fn a_kernel_that_does_not_end_is_given_up() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let given_up = |synchronous: &str| {
        again(&sandbox, "run");
        let mut command = card.command(&sandbox, "spoil=hang:combine_rows", &train("cuda", "run"));
        command.env("DREAMC_GPU_TIMEOUT", "3").env("DREAMC_SYNCHRONOUS", synchronous);
        card.fails(&sandbox, &mut command)
    };
    let error = given_up("0");
    assert!(error.contains("a kernel does not end") && error.contains("DREAMC_SYNCHRONOUS=1"), "{error}");
    let error = given_up("1");
    assert!(error.contains("layer0.") && error.contains("kernel combine"), "{error}");
    let mut command = card.command(&sandbox, "", &train("cuda", "other"));
    let error = card.fails(&sandbox, command.env("DREAMC_GPU_TIMEOUT", "soon"));
    assert!(error.contains("DREAMC_GPU_TIMEOUT is `soon`; it is a whole number of seconds"), "{error}");
}

/// The library that `DREAMC_NVRTC` names compiles, and no other that the loader knows by its plain
/// name: here the stand-in, which has nothing to wrap.
#[test]
fn the_nvrtc_that_is_named_compiles() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let mut command = card.command(&sandbox, "", &["compile", "tiny.yaml", "--emit", "ptx"]);
    command.env("STANDIN", "").env("DREAMC_NVRTC", &card.nvrtc).env("DREAMC_CACHE", "");
    let out = card.succeeds(&sandbox, &mut command);
    assert!(out.contains(".target sm_80"), "{out}");
}

/// Kernels of the smallest model and of one of odd sizes, each compared with its naive kernel from
/// the same memory, in a process of its own.
#[test]
fn the_doctor_proves_kernels() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let line = ["doctor", "--gpu", "--only", "smallest,smallest-bf16", "--json"];
    let report: serde_json::Value = serde_json::from_str(&card.good(&sandbox, "card=sm_90", &line)).unwrap();
    let lines = report["lines"].as_array().unwrap();
    let of = |kernel: &str, rung: &str| {
        lines.iter().filter(|l| l["kernel"] == kernel && l["rung"] == rung).count()
    };
    assert_eq!(report["wrong"], 0, "{report}");
    for kernel in ["rows", "product", "grouped", "attention", "attention_grad", "route", "group", "norm"] {
        let (common, naive) = (of(kernel, "common"), of(kernel, "naive"));
        assert!(common > 0 && common == naive, "{kernel}: {common} common, {naive} naive, in {report}");
    }
    assert!(lines.iter().all(|l| l["error"].as_f64().unwrap() <= l["bound"].as_f64().unwrap()), "{report}");
}

/// A kernel that is wrong, that faults, that does not end, that is not launched or does not compile
/// costs its own line and the exit code; the others are proved.
#[test]
fn the_doctor_goes_on_behind_a_kernel_that_is_spoiled() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let line = ["doctor", "--gpu", "--only", "smallest", "--patience", "20"];
    for (how, found) in [
        ("wrong", "WRONG"),
        ("fault", "FAULTS"),
        ("hang", "HANGS"),
        ("launch", "FAULTS"),
        ("compile", "NO CODE"),
    ] {
        let mut command = card.command(&sandbox, &format!("spoil={how}:combine_rows"), &line);
        if how == "compile" {
            command.env("DREAMC_CACHE", sandbox.path("cache"));
        }
        let output = command.output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{how}: {out}\n{err}");
        let count = |word: &str| out.lines().filter(|line| line.contains(word)).count();
        let spoiled = out
            .lines()
            .filter(|line| line.trim_start().starts_with("combine ") && line.contains(found))
            .count();
        assert!(spoiled > 0 && spoiled == count(found), "{how}: {out}\n{err}");
        let right = out.lines().filter(|line| line.ends_with(" right")).count();
        assert!(right > 40 && out.contains(&format!("{spoiled} are not right")), "{how}: {out}");
    }
}

/// Where a card, its driver, NVRTC and kernels meet for the first time each kernel is proved, once.
/// One that is wrong, faults, does not end, is not launched or does not compile is left for the
/// rung below it, said in one line and reported in a file, and the run ends with the numbers of the
/// interpreter.
#[test]
fn trust_is_earned_when_a_plan_is_loaded() {
    earn_trust(&["wrong"]);
}

/// The same of the other ways.
#[test]
#[ignore = "ten minutes"]
fn trust_is_earned_whatever_a_kernel_does() {
    earn_trust(&["", "fault", "hang", "launch", "compile"]);
}

fn earn_trust(ways: &[&str]) {
    let Some(card) = Card::new() else { return };
    let expected = {
        let sandbox = sandbox();
        card.good(&sandbox, "", &two_steps("run"));
        losses(&sandbox, "run")
    };
    for &how in ways {
        let sandbox = sandbox();
        let settings = if how.is_empty() { String::new() } else { format!("spoil={how}:combine_rows") };
        let run = |settings: &str| {
            again(&sandbox, "run");
            let mut command = card.choosing(&sandbox, settings, &two_steps("run"));
            command.env("DREAMC_CUBLASLT", "0").env("DREAMC_PROVE", "1").env("DREAMC_PATIENCE", "20");
            let output = command.output().unwrap();
            let (out, err) = texts(&output);
            assert!(output.status.success(), "{how}: {out}\n{err}");
            (err, losses(&sandbox, "run"))
        };
        let (err, found) = run(&settings);
        assert_eq!(err.matches("proving").count(), 1, "{how}: {err}");
        for (x, y) in expected.iter().zip(&found) {
            assert!((x - y).abs() <= 1e-5 * x.abs(), "{how}: {expected:?} {found:?}");
        }
        let left = err.matches("combine").count();
        assert_eq!(left > 0, !how.is_empty(), "{how}: {err}");
        let reports = fs::read_dir(sandbox.path("cache/reports")).map_or(0, Iterator::count);
        assert_eq!(reports > 0, !how.is_empty(), "{how}: {err}");
        // Nobody asks again, and what was left stays left: it would be wrong still.
        let (err, again) = run(&settings);
        assert!(!err.contains("proving") && again == found, "{how}: {err}");
        // Another driver is another meeting.
        if how.is_empty() {
            assert!(run("version=13010").0.contains("proving"));
        }
    }
}

/// Cards differ in the shared memory of a block.
#[test]
#[ignore = "kernels that nothing else needs"]
fn a_card_with_less_shared_memory_says_which_kernel_needs_more() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let line = [&train("cuda", "run")[..], &["--set", "sa.head_size=300"]].concat();
    let error = card.fails(&sandbox, &mut card.command(&sandbox, "card=sm_86", &line));
    assert!(error.contains("kernel attention_") && error.contains("this GPU has 101376"), "{error}");
    card.good(&sandbox, "", &[&line[..], &["--force"]].concat());
}

/// `benches/gpu/bench.py`, in small, on a stand-in for an H100: all that needs no PyTorch. The
/// calibration has the interpreter on both sides, so it is exact.
#[test]
#[ignore = "ten minutes"]
fn the_script_for_a_gpu_runs() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    sandbox.write(
        "nvidia-smi",
        "#!/bin/sh\ncase $1 in *memory*) echo 80000 MiB ;; *) echo NVIDIA H100 ;; esac\n",
    );
    fs::set_permissions(sandbox.path("nvidia-smi"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), sandbox.path("gpu")).unwrap();
    let only = "losses_cpu|losses_cuda|count|dreamc|launched|floor|generated|paths|calibration|probe_hopper";
    let program = card.command(&sandbox, "card=sm_90", &[]);
    let mut script = Command::new("python3");
    script.arg(crate::support::root("benches/gpu/bench.py")).args([
        "--models",
        "tiny-la",
        "--sequence",
        "16",
    ]);
    script.args(["--batch", "1", "--steps", "1", "--minutes", "30", "--each", "900", "--only", only]);
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
        [sandbox.path("")].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    script.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = script.env("PATH", path.unwrap()).current_dir(sandbox.path("")).output().unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{out}\n{err}\n{}", sandbox.read("results/results.json"));
    println!("{out}");
    for line in ["cuda against cpu", "| tiny-la | dreamc |", "| tiny-la | launched |", "| tiny-la | floor |"]
    {
        assert!(out.contains(line), "{out}");
    }
    assert_eq!(fs::read_dir(sandbox.path("results")).unwrap().count(), 2);
}

#[test]
fn two_processes_fill_one_cache_of_kernels() {
    let Some(card) = Card::new() else { return };
    let sandbox = sandbox();
    let runs = ["one", "two"].map(|out| {
        let mut command = card.command(&sandbox, "", &train("cuda", out));
        command.env("DREAMC_CACHE", sandbox.path("cache")).args(["--set", "train.steps=1"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    });
    runs.into_iter().for_each(|mut run| assert!(run.wait().unwrap().success()));
    assert_eq!(bits(&sandbox.path("one"), 1), bits(&sandbox.path("two"), 1));
    let names = fs::read_dir(sandbox.path("cache/kernels")).unwrap().map(|e| e.unwrap().file_name());
    let names: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    assert!(names.len() > 20 && names.iter().all(|name| !name.starts_with(".tmp-")), "{names:?}");
}

/// A rank of two on cards of their own, as torchrun starts it; `settings` are its stand-in's.
fn rank(card: &Card, sandbox: &Sandbox, settings: &str, rank: u64, port: u16, out: &str) -> Command {
    let line = [&train("cuda", out)[..], &["--set", "train.accumulate=2"]].concat();
    let mut command = card.command(sandbox, &format!("cards=2 {settings}"), &line);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("LOCAL_RANK", rank.to_string());
    command.env("LOCAL_WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("DREAMC_NCCL", card.folder.path().join("libnccl.so.2"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The same with a stand-in for NCCL.
fn with_nccl() -> Option<Card> {
    let card = Card::new()?;
    std::os::unix::fs::symlink(library(), card.folder.path().join("libnccl.so.2")).unwrap();
    Some(card)
}

/// Two cards over NCCL train what one does, to the bits of two that sum through the host, and with
/// states or weights cut over them to the same.
#[test]
fn two_cards_train_what_one_trains() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let parts = ["--set", "train.accumulate=2"];
    let nccl = card.folder.path().join("libnccl.so.2").display().to_string();
    card.good(&sandbox, "", &[&train("cuda", "one")[..], &parts].concat());
    let two = |out: &str, nccl: &str, more: &[&str]| {
        let line = [&["launch", "-n", "2"][..], &train("cuda", out), &parts, more].concat();
        let mut command = card.command(&sandbox, "cards=2", &line);
        command.env("DREAMC_NCCL", nccl);
        card.succeeds(&sandbox, &mut command);
        sandbox.read("log")
    };
    assert!(two("nccl", &nccl, &[]).contains("ncclAllReduce="));
    assert!(!two("host", "0", &[]).contains("ncclAllReduce="));
    let shard = ["--set", "train.parallel.shard=optimizer"];
    let log = two("cut", &nccl, &shard);
    assert!(log.contains("ncclReduce=") && log.contains("ncclBroadcast="), "{log}");
    assert!(result(&sandbox, "nccl") == result(&sandbox, "host"), "sums of two are of any order");
    assert_eq!(result(&sandbox, "cut").1, result(&sandbox, "nccl").1);
    // Weights that are cut are gathered by broadcasts of their parts.
    let log = two("spread", &nccl, &["--set", "train.parallel.shard=weights"]);
    assert!(log.contains("ncclBroadcast="), "{log}");
    assert_eq!(result(&sandbox, "spread").1, result(&sandbox, "nccl").1);
    for (a, b) in losses(&sandbox, "nccl").iter().zip(losses(&sandbox, "one")) {
        assert!((a - b).abs() <= 1e-3 * b.abs(), "{a} and {b}");
    }
}

/// Cards that share experts pass rows to one another, to the bits of two that pass them through the
/// host, with weights whole or cut; four of them are one team, or two that sum over owners.
#[test]
fn cards_that_share_experts_pass_rows_to_one_another() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let nccl = card.folder.path().join("libnccl.so.2").display().to_string();
    let all = [
        "train.batch=4",
        "train.accumulate=4",
        "model.components.ea.experts.count=4",
        "model.components.sa.sequence.projection={count: 4}",
        "model.components.da.depth.projection={count: 4}",
    ];
    let run = |out: &str, ranks: &str, nccl: &str, more: &str| {
        let sets = all.iter().chain([&more]).flat_map(|set| ["--set", set]).collect::<Vec<_>>();
        let line = [&["launch", "-n", ranks][..], &train("cuda", out), &sets].concat();
        let mut command = card.command(&sandbox, "cards=4", &line);
        command.env("DREAMC_NCCL", nccl);
        card.succeeds(&sandbox, &mut command);
        sandbox.read("log")
    };
    run("whole", "2", &nccl, "train.parallel.experts=1");
    for shard in ["none", "weights"] {
        let set = format!("train.parallel={{experts: 2, shard: {shard}}}");
        let (direct, host) = (format!("direct-{shard}"), format!("host-{shard}"));
        let log = run(&direct, "2", &nccl, &set);
        assert!(log.contains("ncclSend=") && log.contains("ncclRecv="), "{log}");
        assert!(!run(&host, "2", "0", &set).contains("ncclSend="));
        assert!(result(&sandbox, &direct) == result(&sandbox, &host), "{shard}: other bits than by the host");
    }
    assert!(run("four", "4", &nccl, "train.parallel.experts=4").contains("ncclSend="));
    // Owners of the same experts sum their gradients among them.
    assert!(run("teams", "4", &nccl, "train.parallel.experts=2").contains("ncclCommSplit="));
    for out in ["direct-none", "direct-weights", "four", "teams"] {
        for (a, b) in losses(&sandbox, out).iter().zip(losses(&sandbox, "whole")) {
            assert!((a - b).abs() <= 1e-3 * b.abs(), "{out}: {a} and {b}");
        }
    }
}

/// `dreamc plan` for H100s says, to the byte, what two such cards that train allocate at most: with
/// states or weights cut, and with experts shared. One that has a smaller part allocates less.
/// Cards that exchange through the host allocate no more: their exchanges have their room there.
#[test]
fn cards_allocate_what_the_plan_says() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let nccl = card.folder.path().join("libnccl.so.2").display().to_string();
    let sizes = [
        "train.batch=4",
        "train.accumulate=4",
        "train.steps=1",
        "model.components.ea.experts.count=4",
        "model.components.sa.sequence.projection={count: 4}",
        "model.components.da.depth.projection={count: 4}",
    ]
    .map(|set| ["--set", set])
    .concat();
    let line = [&["plan", "tiny.yaml", "--machine", "h100x8", "--ranks", "2", "--json"][..], &sizes].concat();
    let plan: serde_json::Value = serde_json::from_str(&sandbox.good(&line)).unwrap();
    for (shard, experts) in [("none", 1), ("optimizer", 1), ("weights", 1), ("none", 2), ("weights", 2)] {
        let meshes = plan["meshes"].as_array().unwrap();
        let own = |mesh: &&serde_json::Value| {
            (mesh["shard"].as_str(), mesh["experts"].as_u64(), mesh["accumulate"].as_u64())
                == (Some(shard), Some(experts), Some(4))
        };
        let planned = meshes.iter().find(own).unwrap()["memory"]["total"].as_u64().unwrap();
        let cut = format!("train.parallel={{shard: {shard}, experts: {experts}}}");
        for (way, library) in [("nccl", nccl.as_str()), ("host", "0")] {
            let out = format!("{way}-{shard}-{experts}");
            let train = [&train("cuda", &out)[..], &["--target", "h100", "--set", &cut]].concat();
            let line = [&["launch", "-n", "2"][..], &train, &sizes].concat();
            let mut command = card.command(&sandbox, "cards=2 card=sm_90", &line);
            card.succeeds(&sandbox, command.env("DREAMC_NCCL", library));
            let log = sandbox.read("log");
            let most = log.lines().filter(|line| line.starts_with("released")).map(|line| {
                line.split(' ').find_map(|word| word.strip_prefix("most=")?.parse::<u64>().ok()).unwrap()
            });
            let most: Vec<u64> = most.collect();
            let largest = most.iter().copied().max().unwrap();
            let fits = if way == "nccl" { largest == planned } else { largest <= planned };
            assert!(most.len() == 2 && fits, "{way}, {shard}, experts over {experts}: {most:?} of {planned}");
        }
    }
}

/// Kernels that a card launches between the beginning of each exchange and the moment from which
/// its stream waits for it, by what is given to its streams.
fn kernels_meanwhile(log: &str, card: u64) -> Vec<u64> {
    let begins = format!("given: cuda:{card} ");
    let given: Vec<(&str, &str)> =
        log.lines().filter_map(|line| line.strip_prefix(&begins)?.split_once(' ')).collect();
    let main = given.iter().find(|(_, what)| what.starts_with("kernel")).expect("a kernel is launched").0;
    let (mut launched, mut found) = (0, vec![]);
    // Kernels before a record on that stream, by the event; and before an exchange, by its last
    // one.
    let (mut before, mut of) = (HashMap::new(), HashMap::new());
    let mut after = None;
    for (stream, what) in given {
        let (verb, event) = what.split_once(' ').unwrap_or((what, ""));
        match (stream == main, verb) {
            (true, "kernel") => launched += 1,
            (true, "replay") => launched += event.rsplit(' ').next().unwrap().parse::<u64>().unwrap(),
            (true, "record") => drop(before.insert(event, launched)),
            (false, "wait") => after = before.get(event).copied(),
            (false, "record") => drop(after.take().map(|launched: u64| of.insert(event, launched))),
            (true, "wait") => found.extend(of.remove(event).map(|before| launched - before)),
            _ => {}
        }
    }
    found
}

/// Exchanges that are ahead of their use begin, kernels run, and then the stream waits; a wait that
/// is left out is noticed.
#[test]
fn cards_compute_while_they_exchange() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let nccl = card.folder.path().join("libnccl.so.2").display().to_string();
    let command = |out: &str, settings: &str, set: &str| {
        let sets =
            ["train.batch=4", "train.accumulate=4", "train.steps=2", "model.components.ea.experts.count=4"];
        let sets = sets.iter().chain([&set]).flat_map(|set| ["--set", set]).collect::<Vec<_>>();
        let line = [&["launch", "-n", "2"][..], &train("cuda", out), &sets].concat();
        let mut command = card.command(&sandbox, &format!("cards=2 {settings}"), &line);
        command.env("DREAMC_NCCL", &nccl);
        command
    };
    let cut = "train.parallel={shard: weights}";
    for (out, set) in [("weights", cut), ("rows", "train.parallel={experts: 2}")] {
        card.succeeds(&sandbox, &mut command(out, "given=all", set));
        let log = sandbox.read("log");
        for number in 0..2 {
            let found = kernels_meanwhile(&log, number);
            let hidden = found.iter().filter(|kernels| **kernels > 0).count();
            println!("{out}, cuda:{number}: {hidden} of {} exchanges with kernels meanwhile", found.len());
            assert!(hidden > 8, "{out}: {found:?}");
        }
    }
    for lost in [1, 4, 0] {
        let out = format!("lost-{lost}");
        command(&out, &format!("lost={lost}"), cut).output().unwrap();
        let log = sandbox.read("log");
        assert!(log.contains("complaint: copy reads what an exchange still writes"), "{lost}: {log}");
    }
}

/// Programs with collectives are recorded between one and the next, sums whole or cut; a piece that
/// the driver refuses, the first or one in the middle, is launched with all that follows it.
#[test]
fn programs_with_collectives_are_recorded_in_pieces() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let nccl = card.folder.path().join("libnccl.so.2").display().to_string();
    let cut = ["--set", "train.parallel.shard=optimizer"];
    let two = |out: &str, graphs: &str, settings: &str, more: &[&str]| {
        let parts = ["--set", "train.accumulate=2"];
        let line = [&["launch", "-n", "2"][..], &train("cuda", out), &parts, more].concat();
        let mut command = card.command(&sandbox, &format!("cards=2 {settings}"), &line);
        command.env("DREAMC_NCCL", &nccl);
        if !graphs.is_empty() {
            command.env("DREAMC_GRAPHS", graphs);
        }
        card.succeeds(&sandbox, &mut command);
        count(&sandbox, "cuGraphLaunch")
    };
    assert_eq!(two("alone", "0", "", &[]), 0);
    let expected = result(&sandbox, "alone");
    for (out, more) in [("whole", &[][..]), ("cut", &cut)] {
        // Four steps; three of them are replayed, in several pieces each.
        let pieces = two(out, "1", "", more);
        println!("{out}: {pieces} replays");
        assert!(pieces > 12, "{out}: {pieces} replays");
        let found = result(&sandbox, out);
        assert!(found.1 == expected.1 && (found.0 == expected.0 || out == "cut"), "{out}: other bits");
    }
    for number in [1, 3, 6] {
        let _ = fs::remove_dir_all(sandbox.path("refused"));
        two("refused", "", &format!("fault=cuGraphLaunch:{number}:2"), &[]);
        assert!(sandbox.read("log").contains("fault: "), "replay {number} was not refused");
        assert!(result(&sandbox, "refused") == expected, "replay {number} refused: other bits");
    }
}

/// A rank whose NCCL reports an error, stands still, or that is killed, ends the other with its
/// number.
#[test]
fn a_rank_that_fails_on_its_card_ends_the_other() {
    let Some(card) = with_nccl() else { return };
    let sandbox = sandbox();
    let begun = |settings: &str, patience: &str, out: &str| -> Vec<std::process::Child> {
        let port = port();
        let of = |(number, settings): (u64, &str)| {
            let mut command = rank(&card, &sandbox, settings, number, port, out);
            command.env("DREAMC_RANK_TIMEOUT", patience);
            command.spawn().unwrap()
        };
        [(0, ""), (1, settings)].map(of).into()
    };
    let said = |child: std::process::Child| {
        let output = child.wait_with_output().unwrap();
        (output.status.code(), texts(&output).1)
    };
    for (settings, patience, words) in [
        ("fault=ncclAsync:5:6", "120", ["rank 1 failed: cuda:1: ", "remote process exited"]),
        ("fault=ncclHang:5:1", "15", ["NCCL has not moved for 15 s", "all ranks answer"]),
        ("fault=ncclCommInitRank:1:2", "15", ["DREAMC_NCCL", "rank "]),
    ] {
        let both: Vec<_> =
            begun(settings, patience, &settings.replace(':', "-")).into_iter().map(said).collect();
        assert!(both.iter().all(|(code, _)| *code == Some(1)), "{settings}: {both:?}");
        let some = |word: &str| both.iter().any(|(_, error)| error.contains(word));
        assert!(words.iter().all(|word| some(word)) || settings.contains("Init"), "{settings}: {both:?}");
    }
    let mut ranks = begun("", "120", "killed");
    let waited = std::time::Instant::now();
    while !sandbox.path("killed/checkpoints/step-00000001").exists() {
        assert!(waited.elapsed().as_secs() < 120, "no step was taken");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let mut killed = ranks.remove(1);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let (code, error) = said(ranks.remove(0));
    // It may have come to its end before.
    let names = error.contains("rank 1 ended without a word");
    assert!(code == Some(0) || (code == Some(1) && names), "{code:?} {error}");
}
