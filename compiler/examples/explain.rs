//! Prints what rewriting does to specs: `cargo run --release -p dreamc-compiler --example explain -- [--proofs] SPEC…`.

use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile_with_report};
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let proofs = std::env::args().any(|a| a == "--proofs");
    for path in std::env::args().skip(1).filter(|a| a != "--proofs") {
        let (spec, _) = dreamc_dsl::load(Path::new(&path), &[]).map_err(|e| e.to_string())?;
        let options = Options {
            batch: 2,
            sequence: 64,
            train: true,
            logits: false,
            segments: false,
            depth: None,
            depths: vec![],
            cache: None,
            rewrite: Rewriting { proofs, ..Rewriting::default() },
        };
        let (_, report) = compile_with_report(&spec, &options)?;
        println!("{path}: {:.1} ms\n\n{report}", report.micros() as f64 / 1e3);
    }
    Ok(())
}
