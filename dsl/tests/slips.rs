//! One slip of the pen, one error: the likeliest, a file each in `slips`, in both spellings, and in
//! `definitions` those in formulas.
//!
//! Each file ends with its error as comments, which `BLESS=1 cargo test -p dreamc-dsl --test slips`
//! writes. No file may have a second error, nor a warning that follows from the first.

mod common;

use dreamc_dsl::{Diagnostics, Spelling, check, parse};

/// The errors and warnings of a text.
fn found(name: &str, text: &str) -> Diagnostics {
    match parse(name, text, Spelling::of(name)).and_then(|ast| check(&ast, &[])) {
        Err(found) => found,
        Ok((spec, warnings)) => Diagnostics::new(spec.sources, warnings),
    }
}

#[test]
fn one_slip_is_one_error() {
    let mut wrong = Vec::new();
    for path in common::files("tests/slips").into_iter().chain(common::files("tests/definitions")) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let sign = if name.ends_with(".dream") { "//" } else { "#" };
        let mark = format!("\n{sign}? ");
        let (source, expected) = text.split_once(&mark).unwrap_or((&text, ""));
        let source = source.trim_end();
        let found = found(&name, &format!("{source}\n"));
        let report: String = found
            .to_string()
            .trim_end()
            .lines()
            .map(|l| format!("\n{sign}? {l}").trim_end().to_string())
            .collect();
        if found.list.len() != 1 {
            wrong.push(format!("{name}: {} errors\n{report}", found.list.len()));
        }
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, format!("{source}\n{report}\n")).unwrap();
        } else if format!("{mark}{expected}").trim() != report.trim() {
            wrong.push(format!("{name} expects\n{mark}{expected}and has\n{report}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
