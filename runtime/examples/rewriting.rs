//! The table of `docs/rewriting.md`: every example with and without rewriting, on the CPU.
//!
//! `cargo run --release -p dreamc-runtime --example rewriting`. FLOPs and launches are those of the compiled programs;
//! examples that are too large for the machine's memory are counted and not run.

use dreamc_compiler::count::executed::executed;
use dreamc_compiler::ir::Extents;
use dreamc_compiler::program::Space;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Compiled, Options, compile_with_report};
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::model::Model;
use std::error::Error;
use std::time::Instant;

/// Largest arena that is run.
const LARGEST: u64 = 1 << 30;
/// Runs of each program, of which the fastest counts.
const RUNS: usize = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "yaml"));
    paths.sort();
    println!("| example | program | GFLOP | launches | prepared MB | ms | rewriting ms |");
    println!("|---|---|---|---|---|---|---|");
    for path in paths {
        let Ok((spec, _)) = dreamc_dsl::load(&path, &[]) else { continue };
        let compiled = |rewrite| {
            let options = Options { batch: 8, sequence: 64, train: true, rewrite, ..Options::default() };
            compile_with_report(&spec, &options)
        };
        let (Ok((without, _)), Ok((with, report))) =
            (compiled(Rewriting::off()), compiled(Rewriting::default()))
        else {
            continue;
        };
        let prepared: u64 =
            with.plan.buffers.iter().filter(|b| b.space == Space::Prepared).map(|b| b.bytes()).sum();
        let runs = with.plan.arena.max(without.plan.arena) < LARGEST;
        for program in ["backward", "evaluate"] {
            let (a, b) = (figures(&without, program)?, figures(&with, program)?);
            let time = if runs {
                format!("{:.2} → {:.2}", time(without.clone(), program)?, time(with.clone(), program)?)
            } else {
                "".into()
            };
            println!(
                "| {} | {program} | {:.3} → {:.3} | {} → {} | {:.1} | {time} | {:.1} |",
                spec.model.name,
                a.0,
                b.0,
                a.1,
                b.1,
                prepared as f64 / 1e6,
                report.micros() as f64 / 1e3
            );
        }
    }
    Ok(())
}

/// GFLOP and launches of a program.
fn figures(compiled: &Compiled, program: &str) -> Result<(f64, u128), Box<dyn Error>> {
    let e = executed(&compiled.plan, program, &|_| Extents::default())?;
    Ok((2.0 * e.multiply_adds as f64 / 1e9, e.launches.iter().map(|l| l.times).sum()))
}

/// Milliseconds of the fastest run.
fn time(compiled: Compiled, program: &str) -> Result<f64, Box<dyn Error>> {
    let mut model = Model::load(&CpuDevice::new(CpuOptions::default()), compiled)?;
    model.initialise(0)?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        model.session().run(program)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}
