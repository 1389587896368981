//! Generated CUDA, one kernel a file: `tests/kernels/**/*.ir`, after cranelift's `precise-output`.
//!
//! The first line is `; test cuda sm_80` (or `sm_90a`); then come the input and, after `; expect:`,
//! the CUDA of one kernel with its launches as comments. Each file is a test of its name,
//! `cargo test --test kernels rows/norm`. `BLESS=1 cargo test --test kernels` writes the CUDA found
//! in place of that expected.
//!
//! | line | meaning |
//! |---|---|
//! | `; kernel NAME` | which kernel, where there are several: the only one whose name begins so |
//! | `; plan SPEC` | the plan that trains an example, in place of a function |
//!
//! Results that are cotangents of weights are added to memory.
//! Last, a test counts the kernels of all examples, so that none appears or goes unseen.

#[path = "../support/files.rs"]
mod files;
#[path = "../support/mod.rs"]
mod support;

use dreamc_compiler::codegen::{Limits, Source};
use dreamc_compiler::ir::{DType, Function, Module, Port, parse};
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, BufferId, KernelId, Launch, Operand, Plan, Program, ProgramKey, Space, Step,
};
use dreamc_compiler::schedule::{Bind, LocalOperand, Place, Scheduled, schedule};
use dreamc_compiler::{Options, compile};
use dreamc_device::gpu::sources;
use std::fmt::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    files::run(&support::root("tests/kernels"), |input| source(input).map(|source| shown(&source)))
}

/// The kernel that a file is about.
fn source(input: &str) -> Result<Source, String> {
    let line = |start: &str| input.lines().find_map(|l| l.strip_prefix(start)).map(str::trim);
    let architecture = line("; test cuda ").ok_or("the first line is `; test cuda sm_80` or `sm_90a`")?;
    let plan = match line("; plan ") {
        Some(spec) => {
            let options = Options { batch: 2, sequence: 16, train: true, ..Options::default() };
            compile(&support::load(spec), &options).map_err(|e| e.to_string())?.plan
        }
        None => {
            let module = parse(input).map_err(|e| e.to_string())?;
            plan_of(&module, module.functions.values().last().ok_or("no function")?)?
        }
    };
    let found = sources(&plan, architecture, Limits::default()).map_err(|e| e.to_string())?;
    let wanted = line("; kernel ").unwrap_or("");
    let all: Vec<&str> = found.iter().map(|s| s.name.as_str()).collect();
    let mut named = found.iter().filter(|s| s.name.starts_with(wanted));
    match (named.next(), named.next()) {
        (Some(source), None) => Ok(source.clone()),
        _ => Err(format!("`; kernel NAME` chooses one of {}", all.join(", "))),
    }
}

/// A text and its launches.
fn shown(source: &Source) -> String {
    let mut text = format!("{}\n", source.text.trim_end());
    for pass in &source.passes {
        let _ = writeln!(text, "\n// {}: {} x {}", pass.entry, pass.grid, pass.block);
    }
    if source.scratch > 0 {
        let _ = writeln!(text, "// scratch: {} bytes", source.scratch);
    }
    text
}

/// A plan with one program, the launches of a function. Every value has a buffer of its own.
fn plan_of(module: &Module, f: &Function) -> Result<Plan, String> {
    let bind: Vec<Bind> = f.results.iter().map(|(port, _)| bind(f, port)).collect();
    let Scheduled { launches, temps } = schedule(module, f, &bind).map_err(|e| e.to_string())?;
    let mut plan = Plan::default();
    let mut buffer = |name: String, dtype: DType, elements: u64| {
        let offset = plan.arena;
        plan.arena += (elements * dtype.bytes()).next_multiple_of(ALIGNMENT);
        let buffer = Buffer { name, space: Space::Io, dtype, shape: vec![elements], instances: 1, offset };
        plan.buffers.push(buffer);
        BufferId(plan.buffers.len() as u32 - 1)
    };
    let mut value = |name: &str, v| {
        let ty = f.ty(v);
        buffer(name.into(), ty.dtype, module.elements(&ty.dims))
    };
    let params: Vec<BufferId> = f
        .params
        .iter()
        .enumerate()
        .map(|(i, p)| value(&p.name, dreamc_compiler::ir::Value(i as u32)))
        .collect();
    let results: Vec<BufferId> = f
        .results
        .iter()
        .zip(&bind)
        .map(|((name, v), bind)| match bind {
            Bind::State(param) => params[*param as usize],
            Bind::Store | Bind::Add | Bind::Ignore => value(&format!("={name}"), *v),
        })
        .collect();
    let temps: Vec<BufferId> = temps
        .iter()
        .enumerate()
        .map(|(i, t)| buffer(format!("t{i}"), t.dtype, t.bytes / t.dtype.bytes()))
        .collect();
    let operand = |operand: &LocalOperand| match operand {
        LocalOperand::Index(_) => Operand::Index(Affine::constant(0)),
        LocalOperand::View(view) => {
            let buffer = match view.place {
                Place::Param(i) => params[i as usize],
                Place::Result(i) => results[i as usize],
                Place::Temp(i) => temps[i as usize],
            };
            let instance = Affine::constant(0);
            Operand::Tensor { buffer, instance, offset: view.offset, stride: view.stride }
        }
    };
    let mut steps = vec![];
    for (i, launch) in launches.iter().enumerate() {
        steps.push(Step::Launch(Launch {
            kernel: KernelId(i as u32),
            operands: launch.operands.iter().map(operand).collect(),
            places: launch.places.as_ref().map(operand),
            origin: launch.origin.clone(),
        }));
    }
    plan.kernels = launches.into_iter().map(|launch| launch.kernel).collect();
    plan.programs.insert(ProgramKey::ALONE, Program { steps, variables: 0 });
    Ok(plan)
}

fn bind(f: &Function, result: &Port) -> Bind {
    match f.state_of(result) {
        Some(state) => Bind::State(state.0),
        None if result.binding.is_cotangent() => Bind::Add,
        None => Bind::Store,
    }
}
