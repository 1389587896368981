//! The table of `docs/rewriting.md`: every example with and without rewriting, on the CPU.
//!
//! `cargo run --release -p dreamc-runtime --example rewriting [NAME …]`. FLOPs, bytes and launches
//! are those of the compiled programs. Times are of the process, not of the clock on the wall, so
//! that other work on the machine counts little; both programs run in turn, and the table has the
//! medians and the median of the ratios of neighbours. Examples that are too large for the
//! machine's memory are counted and not run.

use dreamc_compiler::count::executed::executed;
use dreamc_compiler::ir::Extents;
use dreamc_compiler::program::{KernelKind, Layout, Operand, Plan, ProgramKey, Role, Space, Step};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, Compiled, Options, compile_with_report};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::model::Model;
use std::error::Error;
use std::time::Duration;

/// Largest arenas that are run, together.
const LARGEST: u64 = 3 << 29;
/// Runs of each program.
const RUNS: usize = 9;
/// The places with which texts are decoded.
const PLACES: u64 = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "yaml"));
    paths.sort();
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    println!("| example | program | GFLOP | MB | launches | prepared MB | ms | ratio |");
    println!("|---|---|---|---|---|---|---|---|");
    for path in paths {
        let Ok((spec, _)) = dreamc_dsl::load(&path, &[]) else { continue };
        let name = &spec.model.name;
        if !wanted.is_empty() && !wanted.contains(name) {
            continue;
        }
        let both = |options: Options| -> Option<[Compiled; 2]> {
            let of = |rewrite| compile_with_report(&spec, &Options { rewrite, ..options.clone() });
            Some([of(Rewriting::off()).ok()?.0, of(Rewriting::default()).ok()?.0])
        };
        let training = Options { batch: 8, sequence: 64, train: true, ..Options::default() };
        let cache = Some(Cache { places: PLACES, chunk: 64, slack: f64::INFINITY, every: false });
        let writing = Options { logits: true, cache, ..Options::default() };
        for (options, programs) in [
            (training, &[ProgramKey::BACKWARD, ProgramKey::EVALUATE][..]),
            (writing, &[ProgramKey::DECODE][..]),
        ] {
            let Some(compiled) = both(options) else { continue };
            let arena: u64 = compiled.iter().map(|c| c.plan.arena).sum();
            let prepared: u64 = compiled[1]
                .plan
                .buffers
                .iter()
                .filter(|b| b.space == Space::Prepared)
                .map(|b| b.bytes())
                .sum();
            for &program in programs {
                let [a, b] = [figures(&compiled[0], program)?, figures(&compiled[1], program)?];
                let time = if arena < LARGEST { measure(&compiled, program)? } else { "| ".into() };
                println!(
                    "| {name} | {program} | {:.3} → {:.3} | {:.1} → {:.1} | {} → {} | {:.1} | {time} |",
                    a.0,
                    b.0,
                    a.1,
                    b.1,
                    a.2,
                    b.2,
                    prepared as f64 / 1e6,
                );
            }
        }
    }
    Ok(())
}

/// GFLOP, megabytes that kernels read and write, and launches of a program.
fn figures(compiled: &Compiled, program: ProgramKey) -> Result<(f64, f64, u128), Box<dyn Error>> {
    let plan = &compiled.plan;
    // Positions are data: every query sees every place.
    let pairs = Extents { pairs: Some(PLACES), ..Extents::default() };
    let e =
        executed(plan, program, &|_| if program == ProgramKey::DECODE { pairs } else { Extents::default() })?;
    let program = &plan.programs[&program];
    let mut variables = vec![0; program.variables as usize];
    let bytes = moved(plan, &program.steps, &mut variables);
    let launches = e.launches.iter().map(|l| l.times).sum();
    Ok((2.0 * e.multiply_adds as f64 / 1e9, bytes as f64 / 1e6, launches))
}

/// Bytes of the operands of all launches, those that are read and written twice.
fn moved(plan: &Plan, steps: &[Step], variables: &mut [u64]) -> u128 {
    let mut total = 0;
    for step in steps {
        match step {
            Step::Loop { variable, count, steps, .. } => {
                for i in 0..*count {
                    variables[*variable as usize] = i;
                    total += moved(plan, steps, variables);
                }
            }
            Step::Launch(launch) => {
                let row = |index: usize| match &launch.operands[index] {
                    Operand::Index(row) => row.at(variables),
                    Operand::Tensor { .. } => 0,
                };
                let signature = plan.kernel(launch.kernel).signature();
                for (slot, operand) in signature.iter().zip(&launch.operands) {
                    let Operand::Tensor { buffer, .. } = operand else { continue };
                    let elements = match slot.layout {
                        Layout::UpTo(_) => slot.span(row),
                        Layout::Dense | Layout::Rows(_) | Layout::Matrix(_) | Layout::Index(_) => {
                            slot.elements()
                        }
                    };
                    let times = match slot.role {
                        Role::Input | Role::Result => 1,
                        Role::Accumulated | Role::Updated => 2,
                    };
                    total += u128::from(elements * plan.buffer(*buffer).dtype.bytes() * times);
                }
            }
        }
    }
    total
}

/// Time that the process was running, all threads.
fn process_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a timespec to the address that it gets.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Milliseconds without and with, and how many times faster that is.
fn measure(compiled: &[Compiled; 2], program: ProgramKey) -> Result<String, Box<dyn Error>> {
    let device = CpuDevice::new(CpuOptions { threads: Some(1) });
    let mut models = vec![];
    for compiled in compiled {
        let mut model = Model::load(&device, compiled.clone())?;
        model.initialise(0)?;
        if compiled.plan.programs.contains_key(&ProgramKey::PREPARE) {
            model.session().run(ProgramKey::PREPARE)?;
        }
        model.session().run(program)?;
        models.push(model);
    }
    // Short programs are run many times for one measurement.
    let start = process_time();
    models[0].session().run(program)?;
    let once = (process_time() - start).as_secs_f64();
    let times = ((0.05 / once.max(1e-6)) as usize).clamp(1, 200);
    let mut found = [vec![], vec![]];
    for _ in 0..RUNS {
        for (model, found) in models.iter_mut().zip(&mut found) {
            let start = process_time();
            for _ in 0..times {
                model.session().run(program)?;
            }
            found.push((process_time() - start).as_secs_f64() * 1e3 / times as f64);
        }
    }
    let ratio = median(found[0].iter().zip(&found[1]).map(|(a, b)| a / b).collect());
    let [a, b] = found;
    Ok(format!("{:.2} → {:.2} | {ratio:.2}", median(a), median(b)))
}
