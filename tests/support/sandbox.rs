//! A folder to run dreamc in, as its users do: the whole program, its output, its exit codes.

use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::checkpoint::safetensors::{self, Entry, Tensors};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A temporary folder with caches of its own.
pub struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    /// One with these files: name and text.
    pub fn with(files: &[(&str, &str)]) -> Self {
        let sandbox = Sandbox { folder: tempfile::tempdir().unwrap() };
        files.iter().for_each(|(name, text)| sandbox.write(name, text));
        sandbox
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub fn command(&self, line: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dreamc"));
        command.args(line).current_dir(self.folder.path());
        command.env("DREAMC_CACHE", self.path("cache")).stdin(Stdio::null());
        command
    }

    pub fn run(&self, line: &[&str]) -> Output {
        self.command(line).output().unwrap()
    }

    /// Runs a command that succeeds; gives its standard output.
    pub fn good(&self, line: &[&str]) -> String {
        let output = self.run(line);
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{line:?}: {:?}\n{out}\n{err}", output.status);
        out
    }

    /// Runs a command that fails; gives its exit code and error output.
    pub fn bad(&self, line: &[&str]) -> (i32, String) {
        let output = self.run(line);
        let (out, err) = texts(&output);
        assert!(!output.status.success(), "{line:?} succeeded\n{out}");
        assert!(!err.contains("panicked"), "{err}");
        (output.status.code().unwrap(), err)
    }

    /// Runs a command that fails; gives its error output.
    pub fn error(&self, line: &[&str]) -> String {
        self.bad(line).1
    }
}

/// Output and errors of a program.
pub fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Bytes of the weights and of the optimizer after a step; of parts, those of whole files with the
/// specification and the step.
pub fn bits(run: &Path, step: u64) -> Vec<Vec<u8>> {
    let folder = run.join(format!("checkpoints/step-{step:08}"));
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let whole = |name: &str, tensors: &Tensors| {
        if let Ok(bytes) = fs::read(folder.join(name)) {
            return bytes;
        }
        let texts: Vec<(&str, &str)> =
            ["spec", "step"].iter().filter_map(|key| Some((*key, tensors.metadata(key)?))).collect();
        let entries: Vec<Entry> =
            tensors.entries().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
        let mut bytes = vec![];
        let get = |i: usize| Ok(tensors.get(&entries[i].0).unwrap().unwrap().1);
        safetensors::write(&mut bytes, &texts, &entries, get).unwrap();
        bytes
    };
    vec![whole("model.safetensors", &checkpoint.model), whole("optimizer.safetensors", &checkpoint.optimizer)]
}

/// `metrics.jsonl` of a run without what a clock says.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        value.as_object_mut().unwrap().remove("seconds");
        value
    };
    text.lines().map(line).collect()
}

/// The last checkpoint of a run.
pub fn newest(run: &Path) -> PathBuf {
    let mut steps: Vec<PathBuf> =
        fs::read_dir(run.join("checkpoints")).unwrap().flatten().map(|e| e.path()).collect();
    steps.sort();
    steps.pop().unwrap()
}
