//! `dreamc compile`: see what the compiler makes of a specification.

use crate::arguments::{Arithmetic, RewriteArguments, SpecArguments};
use clap::{Args, ValueEnum, value_parser};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::codegen::{Limits, Source};
use dreamc_compiler::count::device::Device;
use dreamc_compiler::lower::{Shape, lower};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Plan, ProgramKey, Task};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile, compile_timed};
use dreamc_device::gpu::{Table, Target, codes, distinct, narrow, registers, sources, table};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Parallel;
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::{output, say};
use std::collections::HashMap;
use std::time::Duration;

/// Print what the compiler makes of a specification
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc compile model.yaml --emit ir
  dreamc compile model.yaml --emit plan
  dreamc compile model.yaml --emit tensors
  dreamc compile model.yaml --emit kernels --target h200 --batch 8
  dreamc compile model.yaml --emit kernels --target h200 --gpus 64
  dreamc compile model.yaml --emit cuda > kernels.cu
  dreamc compile model.yaml --emit cubin --architecture sm_80
  dreamc compile model.yaml --timings")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    /// Representation to print
    #[arg(long, value_enum, default_value_t = Emit::Plan)]
    emit: Emit,

    /// Architecture of the GPU, for machine code; PTX is for compute_80
    #[arg(long, value_name = "NAME", default_value = "sm_90a")]
    architecture: String,

    /// Precision of matmuls: by default the recipe's where kernels are printed, else f32 (as the
    /// CPU runs it)
    #[arg(long, value_enum)]
    precision: Option<Arithmetic>,

    /// Sequences in a batch; a micro-batch of the recipe by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    batch: Option<u64>,

    /// Tokens in a sequence; the recipe's by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 24))]
    sequence: Option<u64>,

    /// With `--emit kernels`: compile the kernels by NVRTC and count their registers; the
    /// table otherwise states how many kernels of each kind have
    #[arg(long)]
    registers: bool,

    /// GPUs that share the batch: what they do together is in plan and kernels, which are those of
    /// the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u64).range(1..1 << 16))]
    gpus: u64,

    /// Print how long each pass takes, in place of a representation
    #[arg(long, conflicts_with = "emit")]
    timings: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Emit {
    /// Names, shapes and first values of the tensors
    Tensors,
    /// The tensor graph as lowered, one function for each distinct layer
    Ir,
    /// Buffers and launch lists
    Plan,
    /// Work and memory traffic of each kernel of a training step, how long its code should take on
    /// a GPU and why, and how long the data sheet gives it
    Kernels,
    /// The generated kernels
    Cuda,
    /// PTX of NVRTC for any GPU
    Ptx,
    /// Machine code, into the cache of kernels; names and sizes are printed
    Cubin,
}

/// A training step to be predicted.
pub struct Step<'a> {
    /// Sequences of a micro-batch.
    pub batch: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Architecture of the GPU.
    pub architecture: &'a str,
    /// Rewriting rules, and the roofline they choose by.
    pub rewrite: Rewriting,
    /// Whether NVRTC counts registers.
    pub registers: bool,
    /// GPUs that share the micro-batches.
    pub gpus: u64,
}

impl Step<'_> {
    /// The recipe's.
    pub fn of(spec: &Spec) -> Self {
        let batch = spec.train.batch / spec.train.accumulate.max(1);
        let sequence = prepare::sequence(spec);
        let rewrite = Rewriting::default();
        Step { batch: batch.max(1), sequence, architecture: "sm_90a", rewrite, gpus: 1, registers: false }
    }
}

/// The kernels of a training step, compiled for a GPU.
pub fn step_kernels(spec: &Spec, step: &Step, device: &'static Device) -> Result<Table, Failure> {
    let narrow = narrow(spec.train.precision, step.architecture);
    let shape = prepare::forward(step.batch, step.sequence);
    let (segments, rewrite) = (prepare::masked(spec), step.rewrite.clone());
    let compiled = compile(spec, &Options { train: true, segments, rewrite, narrow, ..shape })?;
    of_step(spec, &compiled.plan, step, device)
}

/// The kernels of a step: every micro-batch of a GPU forward and back, then the optimizer.
fn of_step(spec: &Spec, plan: &Plan, step: &Step, device: &'static Device) -> Result<Table, Failure> {
    let accumulate = spec.train.accumulate.max(1).div_ceil(step.gpus);
    let sums = plan.programs.contains_key(&ProgramKey::LAST);
    let times = |program: ProgramKey| match program.task {
        Task::Backward { depth: None, last: false } if sums => accumulate - 1,
        Task::Backward { depth: None, last: false } => accumulate,
        Task::Backward { depth: None, last: true } | Task::Norm | Task::Update => 1,
        _ => 0,
    };
    let tokens = accumulate * step.batch * step.sequence;
    let mut counted = HashMap::new();
    if step.registers {
        let sources = sources(plan, step.architecture, Limits::of(device))?;
        for &i in &distinct(&sources).0 {
            counted.insert(sources[i].text.clone(), registers(&sources[i], step.architecture)?);
        }
    }
    let registers = |source: &Source| counted.get(&source.text).cloned().unwrap_or_default();
    Ok(table(plan, &times, tokens, step.architecture, device, &registers, &|_, _| {})?)
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    let batch = a.batch.unwrap_or(spec.train.batch / spec.train.accumulate.max(1));
    let sequence = a.sequence.unwrap_or_else(|| prepare::sequence(&spec));
    let segments = prepare::masked(&spec);
    let rewrite = a.rewriting.rewriting()?;
    let of_gpu = matches!(a.emit, Emit::Kernels | Emit::Cuda | Emit::Ptx | Emit::Cubin);
    // The table's rates; what is not said is an H100.
    let device = Device::find(rewrite.target.name).or(Device::find("h100"));
    let limits = device.map_or(Limits::default(), Limits::of);
    let narrow = match a.precision {
        Some(Arithmetic::Bf16) => Narrow::Storage,
        None if a.emit == Emit::Ptx => spec.train.precision.into(),
        None if of_gpu => narrow(spec.train.precision, &a.architecture),
        Some(Arithmetic::F32) | None => Narrow::Nothing,
    };
    let (ranks, forward) = (a.gpus, prepare::forward(batch, sequence));
    let Parallel { shard, experts, .. } = if ranks > 1 { spec.train.parallel } else { Parallel::default() };
    let options = Options { train: true, segments, rewrite, narrow, ranks, shard, experts, ..forward };
    if a.emit == Emit::Ir {
        let architecture = Architecture::new(&spec.model, None)?;
        let lowered = lower(&architecture, Shape { batch, sequence, segments, ..Shape::default() })?;
        output::write(lowered.module.to_string().as_bytes())?;
        return Ok(());
    }
    let (compiled, timings) = compile_timed(&spec, &options)?;
    if a.timings {
        let all: Duration = timings.iter().map(|t| t.time).sum();
        for t in &timings {
            say!("{:<14} {:>9.2} ms  {:>4} times", t.pass.name(), t.time.as_secs_f64() * 1e3, t.runs)?;
        }
        say!("{:<14} {:>9.2} ms", "all", all.as_secs_f64() * 1e3)?;
        return Ok(());
    }
    match a.emit {
        Emit::Tensors => {
            for t in &compiled.tensors {
                say!("{:<48} {:<24} {:?}", t.name, format!("{:?}", t.shape), t.init)?;
            }
        }
        Emit::Ir | Emit::Plan => output::write(compiled.plan.to_string().as_bytes())?,
        Emit::Kernels => {
            let Some(device) = device else {
                return Err(Failure::Usage(format!("rates are known of {}", Device::names())));
            };
            let (architecture, rewrite) = (a.architecture.as_str(), options.rewrite);
            let (gpus, registers) = (a.gpus, a.registers);
            let step = Step { batch, sequence, architecture, rewrite, gpus, registers };
            let table = of_step(&spec, &compiled.plan, &step, device)?;
            output::write(table.to_string().as_bytes())?;
        }
        Emit::Cuda => {
            let sources = sources(&compiled.plan, &a.architecture, limits)?;
            for &i in &distinct(&sources).0 {
                say!("{}", sources[i].text)?;
            }
        }
        Emit::Ptx => {
            let sources = sources(&compiled.plan, "compute_80", Limits::default())?;
            let texts: Vec<_> = distinct(&sources).0.iter().map(|&i| &sources[i]).collect();
            for code in codes(&texts, Target::Ptx, "compute_80")? {
                say!("{}", String::from_utf8_lossy(&code))?;
            }
        }
        Emit::Cubin => {
            let sources = sources(&compiled.plan, &a.architecture, limits)?;
            let (firsts, texts) = distinct(&sources);
            let list: Vec<_> = firsts.iter().map(|&i| &sources[i]).collect();
            let codes = codes(&list, Target::Cubin, &a.architecture)?;
            for (i, (source, &text)) in sources.iter().zip(&texts).enumerate() {
                match firsts[text] {
                    first if first == i => say!("{:<60} {:>8} bytes", source.name, codes[text].len())?,
                    first => say!("{:<60} that of {}", source.name, sources[first].name)?,
                }
            }
        }
    }
    Ok(())
}
