//! Tests that are files: a folder of `*.ir`, each a test of its name.
//!
//! A file has an input and, after `; expect:`, the expected output as comments. `BLESS=1` writes
//! the output found in place of that expected.

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Tests every file below a folder: `output` of its input is as expected.
pub fn run(folder: &Path, output: fn(&str) -> Result<String, String>) -> ExitCode {
    let mut files = vec![];
    collect(folder, &mut files);
    files.sort();
    assert!(!files.is_empty(), "no file tests in {}", folder.display());
    let trial = |file: PathBuf| {
        let name = file.strip_prefix(folder).unwrap_or(&file).with_extension("").display().to_string();
        Trial::test(name, move || check(&file, output))
    };
    libtest_mimic::run(&Arguments::from_args(), files.into_iter().map(trial).collect()).exit_code()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the folder of file tests is readable") {
        let path = entry.expect("its entries are readable").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "ir") {
            files.push(path);
        }
    }
}

fn check(file: &Path, output: fn(&str) -> Result<String, String>) -> Result<(), Failed> {
    let text = std::fs::read_to_string(file)?;
    let (input, expected) = text.split_once("\n; expect:\n").unwrap_or((text.trim_end(), ""));
    let found: String =
        output(input)?.lines().map(|l| format!("; {l}").trim_end().to_string() + "\n").collect();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(file, format!("{}\n\n; expect:\n{found}", input.trim_end()))?;
    } else if found != expected {
        let hint = "BLESS=1 accepts the output found";
        return Err(format!("expected:\n{expected}found:\n{found}{hint}").into());
    }
    Ok(())
}
