//! Skipped tests, counted.
//!
//! In: the reason why the running test cannot run here. Out: a line in `target/skipped`, which
//! `.ci/run` prints last. Promise: a test that passes without a line there has run. [`missing`]
//! fails in CI (`CI=true`), where everything that a machine without a GPU can have is installed.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Skips the running test: it needs something that CI has, such as NVRTC.
///
/// # Panics
///
/// Where `CI=true`.
#[track_caller]
pub fn missing(reason: impl Display) {
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{reason}");
    skip(reason);
}

/// `found`, or a [`missing`] test.
#[track_caller]
pub fn need<T, E: Display>(found: Result<T, E>) -> Option<T> {
    found.map_err(missing).ok()
}

/// Skips the running test: it needs something that CI may lack, such as a GPU.
pub fn skip(reason: impl Display) {
    let reason = reason.to_string().replace('\n', " ");
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    println!("skipped: {reason}");
    let path = list();
    // One write, so that lines of tests that run side by side stay whole.
    let line = format!("{}::{test}: {reason}\n", program());
    let written = OpenOptions::new().create(true).append(true).open(&path);
    written
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// The file of skipped tests: `skipped` in the target folder of the running test program.
fn list() -> PathBuf {
    let program = std::env::current_exe().expect("a test program has a path");
    // target/debug/deps/PROGRAM, or target/debug/examples/PROGRAM
    program.ancestors().nth(3).unwrap_or(Path::new(".")).join("skipped")
}

/// The name of the running test program without cargo's hash.
fn program() -> String {
    let path = std::env::current_exe().expect("a test program has a path");
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    name.rsplit_once('-').map_or(name.as_ref(), |(name, _)| name).to_string()
}

/// Python with transformers and PyTorch: `DREAMC_HF`, or `.venv-hf` of the repository; nothing, and
/// counted as skipped, where it is missing.
pub fn transformers() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let venv = std::env::var_os("DREAMC_HF").map_or_else(|| root.join(".venv-hf"), PathBuf::from);
    let python = venv.join("bin/python");
    let missing = format!("{} is missing: `pip install -r tests/hf/requirements.txt`", python.display());
    need(if python.exists() { Ok(python) } else { Err(missing) })
}

/// Python with llama-cpp-python: `DREAMC_LLAMA`, or `.venv-llama` of the repository; nothing, and
/// counted as skipped, where it is missing: it has no wheel, and takes long to compile.
pub fn llama() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let venv = std::env::var_os("DREAMC_LLAMA").map_or_else(|| root.join(".venv-llama"), PathBuf::from);
    let python = venv.join("bin/python");
    if !python.exists() {
        skip(format!("{} is missing: `pip install llama-cpp-python`", python.display()));
        return None;
    }
    Some(python)
}
