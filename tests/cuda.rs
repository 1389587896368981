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
        // A real one may be on this machine.
        command.env("DREAMC_CUBLASLT", "0");
        command
    }

    /// The same with cuBLASLt beside the driver.
    fn with_cublaslt() -> Option<Card> {
        let card = Card::new()?;
        std::os::unix::fs::symlink(library(), card.folder.path().join("libcublasLt.so.13")).unwrap();
        Some(card)
    }

    /// A command that uses cuBLASLt where it is faster, with kernels compiled but no choice made in the house's own cache.
    fn choosing(&self, house: &House, settings: &str, line: &[&str]) -> Command {
        let (from, to) =
            (Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda/kernels"), house.path("cache/kernels"));
        if !to.exists() {
            fs::create_dir_all(&to).unwrap();
            for file in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
                let name = file.file_name().to_string_lossy().into_owned();
                if !name.starts_with("choice-") && !name.starts_with('.') {
                    fs::hard_link(file.path(), to.join(name)).unwrap();
                }
            }
        }
        let mut command = self.command(house, settings, line);
        command.env("DREAMC_CACHE", house.path("cache")).env_remove("DREAMC_CUBLASLT");
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

fn choices(house: &House) -> Vec<PathBuf> {
    let all = fs::read_dir(house.path("cache/kernels")).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("choice-")).collect()
}

/// The second is recorded.
fn two_steps(out: &str) -> Vec<&str> {
    [&train("cuda", out)[..], &["--set", "train.steps=2"]].concat()
}

fn again(house: &House, run: &str) {
    let _ = fs::remove_dir_all(house.path(run));
}

fn losses(house: &House, run: &str) -> Vec<f64> {
    metrics(&house.path(run)).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// Products by the library wherever it can: the same losses up to rounding, the same bits however they are launched, and no memory
/// that was not counted.
#[test]
fn with_cublaslt_a_model_trains_alike() {
    let Some(card) = Card::with_cublaslt() else { return };
    for (precision, tolerance) in [("f32", 1e-6), ("bf16", 5e-3)] {
        let house = house();
        let sets = ["--set".to_string(), format!("train.precision={precision}")];
        let line = |out: &'static str| [&train("cuda", out)[..], &[&sets[0], &sets[1]]].concat();
        card.good(&house, "", &line("generated"));
        assert_eq!(count(&house, "cublasLtCreate"), 0);
        let expected = losses(&house, "generated");
        let ways = [("DREAMC_GRAPHS", "1"), ("DREAMC_GRAPHS", "0"), ("DREAMC_SYNCHRONOUS", "1")];
        let mut bits = vec![];
        // How it is launched has nothing to do with types.
        for (variable, value) in &ways[..if precision == "f32" { 3 } else { 1 }] {
            again(&house, "run");
            let mut command = card.command(&house, "", &line("run"));
            card.succeeds(&house, command.env("DREAMC_CUBLASLT", "1").env(variable, value));
            assert!(count(&house, "product") > 50 && count(&house, "cuEventRecord") == 0);
            bits.push(result(&house, "run"));
        }
        assert!(bits.iter().all(|run| *run == bits[0]), "{precision}: other bits");
        assert!(bits[0] != result(&house, "generated"), "{precision}: the library rounds otherwise");
        let found = losses(&house, "run");
        assert_eq!(found.len(), expected.len());
        for (x, y) in expected.iter().zip(&found) {
            assert!((x - y).abs() <= tolerance * x.abs(), "{precision}: {expected:?} {found:?}");
        }
    }
}

/// What is needed is said before anything is allocated, with the library's workspace, and is enough.
#[test]
fn the_workspace_of_cublaslt_is_counted() {
    let Some(card) = Card::with_cublaslt() else { return };
    let house = house();
    let line = [&train("cuda", "run")[..], &["--set", "train.steps=1"]].concat();
    let needed = |library: &str| {
        again(&house, "run");
        let mut command = card.command(&house, "memory=4194304", &line);
        let error = card.fails(&house, command.env("DREAMC_CUBLASLT", library));
        let (_, rest) = error.split_once("the plan needs ").unwrap();
        rest.split(';').next().unwrap().parse::<u64>().unwrap()
    };
    let (with, without) = (needed("1"), needed("0"));
    assert_eq!(
        with - without,
        (4 << 20) - (2 << 20),
        "4 MiB of workspace in place of a page of scratch memory"
    );
    // Training and scoring have a session each.
    let run = |memory: u64| {
        again(&house, "run");
        let mut command = card.command(&house, &format!("memory={memory}"), &line);
        command.env("DREAMC_CUBLASLT", "1");
        command
    };
    card.succeeds(&house, &mut run(2 * with));
    assert!(card.fails(&house, &mut run(2 * with - 1)).contains("most of it"));
}

#[test]
fn the_faster_one_of_cublaslt_and_ours_is_chosen_once() {
    let Some(card) = Card::with_cublaslt() else { return };
    let house = house();
    let line = two_steps("run");
    card.good(&house, "", &two_steps("generated"));
    let mut always = card.command(&house, "", &two_steps("always"));
    card.succeeds(&house, always.env("DREAMC_CUBLASLT", "1"));
    let [generated, always] = ["generated", "always"].map(|run| metrics(&house.path(run)));
    assert!(generated != always);
    let run = |house: &House, settings: &str| {
        again(house, "run");
        card.succeeds(house, &mut card.choosing(house, settings, &line));
        (metrics(&house.path("run")), count(house, "cuEventElapsedTime"), count(house, "cublasLtCreate"))
    };
    let (bits, measured, _) = run(&house, "");
    assert!(bits == always && measured > 0, "the library is faster");
    let kept = choices(&house).len();
    assert!(kept > 5, "{kept}");
    // It is slower by now, and nobody looks; whole files are not written again.
    let (bits, measured, _) = run(&house, "product=9000");
    assert!(bits == always && measured == 0);
    // Files that are not whole: measured again.
    for (i, file) in choices(&house).into_iter().enumerate() {
        fs::write(file, if i % 2 == 0 { "rubbish" } else { "" }).unwrap();
    }
    let (bits, measured, _) = run(&house, "");
    assert!(bits == always && measured > 0 && choices(&house).len() == kept);
    // Another card, driver or library is another question, and where ours are faster they are used, without the library at work.
    let slow = House::with(&[]);
    for name in ["tiny.yaml", "book.txt"] {
        slow.write(name, &house.read(name));
    }
    let (bits, measured, _) = run(&slow, "product=2000");
    assert!(bits == generated && measured > 0);
    let (bits, measured, started) = run(&slow, "product=1");
    assert!(bits == generated && (measured, started) == (0, 0));
    let (bits, measured, _) = run(&slow, "version=13010");
    assert!(bits == always && measured > 0);
    // Without a folder to keep it in nothing is measured, so that two runs are alike.
    again(&house, "run");
    let mut command = card.choosing(&house, "", &[&line[..], &["--set", "train.steps=1"]].concat());
    card.succeeds(&house, command.env("DREAMC_CACHE", ""));
    assert_eq!((count(&house, "cuEventElapsedTime"), count(&house, "cublasLtCreate")), (0, 0));
}

/// Whatever cuBLASLt does wrong while it is tried: the generated kernel, in this run and in later ones.
#[test]
fn a_cublaslt_that_fails_is_left_alone() {
    let Some(card) = Card::with_cublaslt() else { return };
    let line = two_steps("run");
    let generated = house();
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
        let house = house();
        let run = |settings: &str| {
            again(&house, "run");
            card.succeeds(&house, &mut card.choosing(&house, settings, &line));
            (bits(&house.path("run"), 2), metrics(&house.path("run")))
        };
        let first = run(fault);
        assert!(house.read("log").contains("fault: ") || all, "{fault} was not met");
        assert_eq!(first.1 == generated, all, "{fault}");
        assert!(!twice || run("") == first, "{fault}: the second run chooses otherwise");
    }
    // A GPU that is gone is an error, and nothing is decided by it.
    let house = house();
    let error = card.fails(&house, &mut card.choosing(&house, "fault=product:1:700", &train("cuda", "run")));
    assert!(error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert_eq!(choices(&house).len(), 0);
}

#[test]
fn what_is_asked_of_cublaslt_and_cannot_be_is_an_error() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let line = two_steps("run");
    let asked = |settings: &str, value: &str, synchronous: bool| {
        again(&house, "run");
        let mut command = card.command(&house, settings, &line);
        if synchronous {
            command.env("DREAMC_SYNCHRONOUS", "1");
        }
        command.env("DREAMC_CUBLASLT", value);
        command
    };
    // Where it is missing nothing changes; a real one that is on this machine refuses a driver that is none.
    card.good(&house, "", &two_steps("generated"));
    card.succeeds(&house, card.choosing(&house, "", &line).env("DREAMC_CUBLASLT", ""));
    assert_eq!(bits(&house.path("run"), 2), bits(&house.path("generated"), 2));
    let error = card.fails(&house, &mut asked("", "1", false));
    assert!(error.contains("pip install nvidia-cublas") || error.contains("cublasLtCreate"), "{error}");
    let error = card.fails(&house, &mut asked("", "yes", false));
    assert!(error.contains("DREAMC_CUBLASLT is `yes`; it is 0"), "{error}");
    fs::write(card.folder.path().join("libcublasLt.so.13"), "no library").unwrap();
    assert!(card.fails(&house, &mut asked("", "1", false)).contains("does not load"));
    fs::remove_file(card.folder.path().join("libcublasLt.so.13")).unwrap();

    let Some(card) = Card::with_cublaslt() else { return };
    let asked = |settings: &str, synchronous: bool| {
        again(&house, "run");
        let mut command = card.command(&house, settings, &line);
        if synchronous {
            command.env("DREAMC_SYNCHRONOUS", "1");
        }
        command.env("DREAMC_CUBLASLT", "1");
        command
    };
    let error = card.fails(&house, &mut asked("fault=cublasLtCreate:1:1", false));
    assert!(
        error.contains("CUBLAS_STATUS_NOT_INITIALIZED") && error.contains("DREAMC_CUBLASLT=0"),
        "{error}"
    );
    let error = card.fails(&house, &mut asked("fault=cublasLtMatmul:9:14", false));
    let named = error.contains("layer0.") && error.contains("cuBLASLt 13.10.0: cublasLtMatmul");
    assert!(named && error.contains("CUBLAS_STATUS_INTERNAL_ERROR"), "{error}");
    let error = card.fails(&house, &mut asked("fault=product:9:700", true));
    let named = error.contains("layer0.") && error.contains(", cuBLASLt 13.10.0: a kernel failed");
    assert!(named && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    // One that served when it was chosen, and no longer does.
    card.succeeds(&house, &mut card.choosing(&house, "", &two_steps("chosen")));
    again(&house, "run");
    let error =
        card.fails(&house, &mut card.choosing(&house, "fault=cublasLtMatmulAlgoGetHeuristic:3:15", &line));
    assert!(error.contains("computed before") && error.contains("DREAMC_CUBLASLT=0"), "{error}");
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
#[ignore = "two minutes"]
fn verify_and_bench_run() {
    let Some(card) = Card::new() else { return };
    let house = house();
    let proved = card.good(&house, "card=sm_90", &["verify", "tiny.yaml", "--device", "cuda"]);
    assert!(proved.contains("0 failed") && proved.contains("devices agree"), "{proved}");
    let bench =
        ["bench", "tiny.yaml", "--device", "cuda", "--steps", "2", "--tokens", "4", "--launches", "99"];
    let measured = card.good(&house, "", &bench);
    assert!(measured.contains("tokens/s") && !measured.contains("plain products"), "{measured}");
    // And with every plain product by the library.
    let Some(card) = Card::with_cublaslt() else { return };
    let by_library = |settings: &str, line: &[&str]| {
        let mut command = card.command(&house, settings, line);
        card.succeeds(&house, command.env("DREAMC_CUBLASLT", "1"))
    };
    let proved = by_library("card=sm_90", &["verify", "tiny.yaml", "--device", "cuda"]);
    assert!(proved.contains("0 failed") && proved.contains("devices agree"), "{proved}");
    assert!(count(&house, "product") > 50);
    let measured = by_library("", &bench);
    assert!(measured.contains("plain products, 100 % of their time"), "{measured}");
    assert!(measured.contains("cuBLASLt: asked for"), "{measured}");
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
    let mut only = "losses_cpu|losses_cuda|count|dreamc|launched|floor|generated|paths".to_string();
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
