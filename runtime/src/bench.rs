//! How fast a specification trains and writes on a device, and what the device could do at best.
//!
//! *In*: a specification, a device, and how much to measure. *Out*: [`Training`], [`Decoding`],
//! [`ceiling`]. Weights are initial ones and tokens random: speed depends on neither, but for
//! experts, which random tokens spread evenly. Medians are of whole steps; the times of launches
//! are the least of several runs, because other people's work comes and goes.

use crate::data::Batch;
use crate::device::{Choice, Device, DeviceError, Group, Instrument};
use crate::generate::{Cached, NextLogits, Writing, compile_cached};
use crate::model::{Memory, Model, ModelError, Scale};
use crate::rng::Philox;
use crate::train::{prepare, schedule};
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{
    Affine, Buffer, BufferId, Kernel, KernelId, Launch, Matrix, Operand, Plan, Program, Space, Step, kernel,
};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Options, compile};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Precision;
use indexmap::IndexMap;
use serde::Serialize;
use std::time::Instant;
use thiserror::Error;

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum BenchError {
    /// It does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// It does not run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device does not do it.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// How a specification trained.
#[derive(Clone, Debug, Serialize)]
pub struct Training {
    /// Sequences in a step.
    pub batch: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Tensors stored in bf16.
    pub precision: &'static str,
    /// Tokens a second in the median step.
    pub tokens_per_second: f64,
    /// Tokens a second in the fastest step.
    pub best_tokens_per_second: f64,
    /// Seconds of the median step: forward, back, norm and update.
    pub step_seconds: f64,
    /// Steps measured, behind one that was not.
    pub steps: usize,
    /// Multiply-adds of products and attention that a step executed, twice.
    pub flops: u64,
    /// FLOP/s of the median step.
    pub flops_per_second: f64,
    /// Loss of the first step.
    pub loss: f32,
    /// Bytes on the device.
    pub memory: Memory,
    /// Launches that took most time, least times of several runs.
    pub launches: Vec<LaunchTime>,
}

/// The time of all launches of one origin in a step.
#[derive(Clone, Debug, Serialize)]
pub struct LaunchTime {
    /// The kernel in a few words.
    pub kernel: String,
    /// The kernel.
    pub origin: String,
    /// How often it is launched.
    pub count: u64,
    /// Seconds in all.
    pub seconds: f64,
    /// Multiply-adds in all, twice.
    pub flops: u64,
    /// The implementation chosen and why, where the GPU maker's library has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
}

/// How a specification wrote.
#[derive(Clone, Debug, Serialize)]
pub struct Decoding {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens written, one at a time.
    pub tokens: usize,
    /// Tokens of the prompt a second.
    pub prompt_tokens_per_second: f64,
    /// Tokens written a second.
    pub tokens_per_second: f64,
}

/// Runs in which launches are timed.
const ROUNDS: usize = 4;

/// Trains on random tokens for so many steps.
pub fn training(
    spec: &Spec,
    device: &dyn Device,
    (batch, sequence): (u64, u64),
    steps: usize,
    rewriting: &Rewriting,
) -> Result<Training, BenchError> {
    let narrow = device.narrow(spec.train.precision);
    let segments = prepare::masked(spec);
    let rewrite = rewriting.clone();
    let options = Options { train: true, segments, rewrite, narrow, ..prepare::forward(batch, sequence) };
    let mut model = Model::load(device, compile(spec, &options)?)?;
    model.initialise(spec.train.seed)?;
    let memory = model.memory();
    let tokens = batch * sequence;
    let mut random = Philox::new(spec.train.seed, "bench").stream(0);
    let mut ids = || (0..tokens).map(|_| random.below(spec.model.vocab) as i32).collect::<Vec<_>>();
    let data = Batch {
        sequence: sequence as usize,
        ids: ids(),
        targets: ids(),
        positions: (0..tokens).map(|i| (i % sequence) as i32).collect(),
        segments: vec![0; tokens as usize],
    };
    let scalars = schedule::scalars(&spec.train, 1);
    let scale = Scale { loss: 1.0 / tokens as f32, auxiliary: 1.0 };
    let step = |model: &mut Model| -> Result<f32, ModelError> {
        model.begin_step()?;
        model.backward(&data, scale, None)?;
        let loss = model.loss()?;
        model.norm()?;
        model.update(&scalars)?;
        Ok(loss)
    };
    let loss = step(&mut model)?;
    let mut seconds = vec![];
    for _ in 0..steps.max(1) {
        let begun = Instant::now();
        step(&mut model)?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];

    let mut session = model.session();
    session.instrument(Instrument { count: true, time: true });
    let mut by_origin: IndexMap<(String, String), LaunchTime> = IndexMap::new();
    for program in ["backward", "norm", "update"] {
        let mut least = session.run(program)?.by_launch;
        for _ in 1..ROUNDS {
            for (least, launch) in least.iter_mut().zip(session.run(program)?.by_launch) {
                least.seconds = least.seconds.min(launch.seconds);
            }
        }
        for (number, launch) in least.into_iter().enumerate() {
            let kernel = describe(session.plan().kernel(launch.kernel));
            let key = (kernel.clone(), launch.origin.clone());
            let choice = session.choice(program, number).cloned();
            let new = LaunchTime { kernel, origin: launch.origin, count: 0, seconds: 0.0, flops: 0, choice };
            let entry = by_origin.entry(key).or_insert(new);
            entry.count += launch.count;
            entry.seconds += launch.seconds;
            entry.flops += 2 * launch.multiply_adds;
        }
    }
    let mut launches: Vec<LaunchTime> = by_origin.into_values().collect();
    launches.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let flops = launches.iter().map(|l| l.flops).sum();
    Ok(Training {
        batch,
        sequence,
        precision: narrow.name(),
        tokens_per_second: tokens as f64 / median,
        best_tokens_per_second: tokens as f64 / seconds[0],
        step_seconds: median,
        steps: seconds.len(),
        flops,
        flops_per_second: flops as f64 / median,
        loss,
        memory,
        launches,
    })
}

/// Writes one text with caches; `None` where the model cannot be sampled from.
pub fn decoding(
    spec: &Spec,
    device: &dyn Device,
    (prompt, tokens): (usize, usize),
    rewriting: &Rewriting,
) -> Result<Option<Decoding>, BenchError> {
    let writing = Writing {
        context: Some((prompt + tokens) as u64),
        rewrite: rewriting.clone(),
        narrow: device.narrow(spec.train.precision),
        ..Writing::default()
    };
    let compiled = match compile_cached(spec, &writing) {
        Ok(compiled) => compiled,
        Err(CompileError::Unsupported(_) | CompileError::LooksAhead) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut decoder = Cached::load(device, compiled)?;
    decoder.model().initialise(spec.train.seed)?;
    let vocab = spec.model.vocab as u32;
    let text: Vec<u32> = (0..prompt as u32).map(|i| (i * 7 + 1) % vocab).collect();
    // The first run prepares weights.
    decoder.start(std::slice::from_ref(&text))?;
    let begun = Instant::now();
    decoder.start(&[text])?;
    let read = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    for i in 0..tokens as u32 - 1 {
        decoder.advance(&[(i * 5 + 3) % vocab])?;
    }
    let written = begun.elapsed().as_secs_f64();
    Ok(Some(Decoding {
        prompt,
        tokens,
        prompt_tokens_per_second: prompt as f64 / read,
        tokens_per_second: (tokens - 1) as f64 / written,
    }))
}

/// FLOP/s of a product large enough to hide everything else, in the type that products read for
/// `precision`; `None` where the device has no such products.
pub fn ceiling(device: &dyn Device, precision: Precision) -> Result<Option<f64>, BenchError> {
    let mut n = 1024;
    loop {
        let Some(seconds) = product(device, precision, n)? else { return Ok(None) };
        // On a fast device a small one is over before all of it works.
        if seconds > 5e-4 || n == 8192 {
            return Ok(Some(2.0 * (n * n * n) as f64 / seconds));
        }
        n *= 2;
    }
}

/// Seconds of the product of two matrices of `n` x `n`, the least of several runs.
fn product(device: &dyn Device, precision: Precision, n: u64) -> Result<Option<f64>, BenchError> {
    let dtype = match (precision, device.narrow(precision)) {
        (Precision::F32, _) => DType::F32,
        (Precision::Bf16, Narrow::Nothing) => return Ok(None),
        (Precision::Bf16, _) => DType::Bf16,
    };
    let buffer = |i: u64| Buffer {
        name: i.to_string(),
        space: Space::Io,
        dtype: if i < 2 { dtype } else { DType::F32 },
        shape: vec![n, n],
        instances: 1,
        offset: i * 4 * n * n,
    };
    let operands = [0, 1, 2].map(|i| Operand::Tensor {
        buffer: BufferId(i),
        instance: Affine::default(),
        offset: 0,
        stride: 0,
    });
    let layout = Matrix { row: n, column: 1 };
    let kernel = Kernel::Product(kernel::Product { m: n, n, k: n, a: layout, b: layout, accumulate: false });
    let launch =
        Launch { kernel: KernelId(0), operands: operands.to_vec(), places: None, origin: "ceiling".into() };
    let program = Program { steps: vec![Step::Launch(launch)], variables: 0 };
    let plan = Plan {
        buffers: (0..3).map(buffer).collect(),
        kernels: vec![kernel],
        programs: [("main".to_string(), program)].into_iter().collect(),
        arena: 12 * n * n,
    };
    let mut session = device.load(&plan, &Group::alone())?;
    // As good as random: zeros switch fewer transistors, and are faster.
    for i in 0..2 {
        let bits = |j: u64| (2 * j + u64::from(i)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let values = (0..n * n).map(|j| bits(j) as f32 / (1 << 24) as f32 - 0.5);
        match dtype {
            DType::Bf16 => {
                let values: Vec<half::bf16> = values.map(half::bf16::from_f32).collect();
                session.write_at(BufferId(i), 0, 0, &values)?;
            }
            DType::F32 | DType::I32 => session.write_at(BufferId(i), 0, 0, &values.collect::<Vec<f32>>())?,
        }
    }
    let (mut best, begun) = (f64::INFINITY, Instant::now());
    for _ in 0..20 {
        best = best.min(session.run("main")?.seconds);
        // A device that is interpreted takes seconds for one.
        if begun.elapsed().as_secs_f64() > 5.0 {
            break;
        }
    }
    Ok(Some(best))
}

/// A kernel in a few words.
fn describe(kernel: &Kernel) -> String {
    let Kernel::Rows(k) = kernel else { return kernel.to_string() };
    let ops = k.ops.iter().zip(&k.lengths).map(|(op, length)| {
        let name = format!("{op:?}");
        let name = name.trim_start_matches("Unary(").trim_start_matches("Binary { op: ");
        format!("{}{length}", name.split([' ', '(', ',']).next().unwrap_or_default())
    });
    format!("rows {}: {}", k.rows, ops.collect::<Vec<_>>().join(" "))
}
