//! How fast a specification trains and writes on a device, and what the device could do at best.
//!
//! *In*: a specification, a device, and how much to measure. *Out*: [`Training`], [`Decoding`],
//! [`ceiling`], [`copying`]. Weights are initial ones and tokens random: speed depends on neither,
//! but for experts, which random tokens spread evenly. Memory is written before it is read: what
//! nobody has written may be one page of zeros, which every cache holds. Medians are of whole
//! steps; the times of launches are the least of several runs, because other people's work comes
//! and goes, and by the device's own clock where it has one: work is counted in a run of its own,
//! so that no launch waits for the host.

mod blocks;

pub use blocks::{Reading, readings};

use crate::generate::{Cached, NextLogits, Writing, compile_cached};
use crate::model::{Memory, Model, ModelError, Scale};
use crate::train::{prepare, schedule};
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{
    Affine, Buffer, BufferId, Kernel, KernelId, KernelKind, Launch, Matrix, Operand, Plan, Program,
    ProgramKey, Space, Step, kernel, listed,
};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Options, compile};
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_device::group::{local, patience};
use dreamc_device::{Choice, Device, DeviceError, Group, Instrument, LaunchStats, Session};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Parallel, Precision};
use indexmap::IndexMap;
use serde::Serialize;
use std::thread;
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
    /// Random weights have no place for a moment.
    #[error("cannot write {}: {error}; TMPDIR names another folder", path.display())]
    Temporary {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        error: std::io::Error,
    },
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
    /// Steps measured, after one that was not.
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

/// How ranks in threads trained together.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Together {
    /// How many.
    pub ranks: u64,
    /// Seconds of the median step.
    pub step_seconds: f64,
    /// Seconds in which sums of gradients were under way, in the median step.
    pub exchanged_seconds: f64,
    /// Seconds of these in which nothing else was left to do.
    pub waited_seconds: f64,
    /// The share that the backward hid.
    pub hidden: f64,
}

/// How a specification wrote.
#[derive(Clone, Debug, Serialize)]
pub struct Decoding {
    /// Texts at once.
    pub sequences: usize,
    /// Tokens of the prompt of each.
    pub prompt: usize,
    /// Tokens written of each, one at a time.
    pub tokens: usize,
    /// Tensors stored in bf16.
    pub precision: &'static str,
    /// Tokens of the prompts a second.
    pub prompt_tokens_per_second: f64,
    /// Twice the multiply-adds of the prompts, a second.
    pub prompt_flops_per_second: f64,
    /// Tokens written a second, of all texts, by the median of the steps.
    pub tokens_per_second: f64,
    /// Bytes of the weights that the products of a step read: of experts those that are chosen,
    /// once for each choice.
    pub weights: u64,
    /// The same a second.
    pub weights_per_second: f64,
    /// The same in the fastest step.
    pub best_weights_per_second: f64,
    /// Bytes a second that the device reads where nothing else is to be done, the median of
    /// readings between the steps: other machines may share the memory, and rates of another
    /// second do not compare.
    pub read: f64,
    /// Launches of a step that took most time, least times of several runs.
    pub launches: Vec<LaunchTime>,
    /// Likewise those of a part of the prompts.
    pub prompt_launches: Vec<LaunchTime>,
}

/// Runs in which launches are timed.
const ROUNDS: usize = 4;
/// Times that prompts are read.
const PROMPTS: usize = 5;

/// Trains on random tokens for `steps` steps.
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
    let data = random_rows(spec, (batch, sequence));
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

    let programs = [ProgramKey::BACKWARD, ProgramKey::NORM, ProgramKey::UPDATE];
    let launches = launch_times(&model, &programs, &|| Ok(()))?;
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

/// The launches of some programs by what they come from, those that take longest first. `rewind`
/// undoes what an earlier run has left in the state that a program adds to.
fn launch_times(
    model: &Model,
    programs: &[ProgramKey],
    rewind: &dyn Fn() -> Result<(), ModelError>,
) -> Result<Vec<LaunchTime>, BenchError> {
    let mut by_origin: IndexMap<(String, String), LaunchTime> = IndexMap::new();
    let run = |program: ProgramKey, instrument: Instrument| -> Result<Vec<LaunchStats>, BenchError> {
        rewind()?;
        let mut session = model.session();
        session.instrument(instrument);
        Ok(session.run(program)?.by_launch)
    };
    for &program in programs {
        let mut least = run(program, Instrument { count: true, time: false })?;
        for round in 0..ROUNDS {
            let launches = run(program, Instrument { count: false, time: true })?;
            for (least, launch) in least.iter_mut().zip(launches) {
                least.seconds = if round == 0 { launch.seconds } else { least.seconds.min(launch.seconds) };
            }
        }
        let session = model.session();
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
    Ok(launches)
}

/// Random rows.
fn random_rows(spec: &Spec, (batch, sequence): (u64, u64)) -> Batch {
    let tokens = batch * sequence;
    let mut random = Philox::new(spec.train.seed, "bench").stream(0);
    let mut ids = || (0..tokens).map(|_| random.below(spec.model.vocab) as i32).collect::<Vec<_>>();
    Batch {
        sequence: sequence as usize,
        ids: ids(),
        targets: ids(),
        positions: (0..tokens).map(|i| (i % sequence) as i32).collect(),
        segments: vec![0; tokens as usize],
        bytes: vec![0; tokens as usize],
        ..Batch::default()
    }
}

/// Trains on `ranks` ranks in threads of this process, each with a micro-batch of its own, to see
/// how much of the sums of gradients the backward hides.
pub fn together(
    spec: &Spec,
    device: &dyn Device,
    shape: (u64, u64),
    steps: usize,
    rewriting: &Rewriting,
    ranks: u64,
) -> Result<Together, BenchError> {
    let rank = |group: Group| -> Result<Vec<[f64; 3]>, BenchError> {
        let narrow = device.narrow(spec.train.precision);
        let (rank, segments, rewrite) = (group.rank(), prepare::masked(spec), rewriting.clone());
        let Parallel { shard, experts, .. } = spec.train.parallel;
        let forward = Options { ranks, rank, shard, experts, ..prepare::forward(shape.0, shape.1) };
        let options = Options { train: true, segments, rewrite, narrow, ..forward };
        let mut model = Model::of_rank(device, compile(spec, &options)?, &group)?;
        model.initialise(spec.train.seed)?;
        let data = random_rows(spec, shape);
        let tokens = (shape.0 * shape.1 * ranks) as f32;
        let scale = Scale { loss: 1.0 / tokens, auxiliary: 1.0 / ranks as f32 };
        let mut found = vec![];
        for _ in 0..=steps.max(1) {
            let begun = Instant::now();
            model.begin_step()?;
            model.last();
            let stats = model.backward(&data, scale, None)?;
            model.norm()?;
            model.update(&schedule::scalars(&spec.train, 1))?;
            found.push([begun.elapsed().as_secs_f64(), stats.exchanged, stats.waited]);
        }
        Ok(found)
    };
    let groups = local::groups(ranks, patience());
    let run = |group: Group| {
        let own = group.clone();
        rank(group).inspect_err(|error| own.fail(&error.to_string()))
    };
    let all: Vec<Result<Vec<[f64; 3]>, BenchError>> = thread::scope(|scope| {
        let run = &run;
        let start = |group: Group| scope.spawn(move || run(group));
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let mut first = vec![];
    for (i, found) in all.into_iter().enumerate() {
        let found = found?;
        if i == 0 {
            // After one step that is not measured.
            first = found[1..].to_vec();
        }
    }
    first.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let [step_seconds, exchanged_seconds, waited_seconds] =
        first.get(first.len() / 2).copied().unwrap_or_default();
    let hidden = 1.0 - (waited_seconds / exchanged_seconds.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
    Ok(Together { ranks, step_seconds, exchanged_seconds, waited_seconds, hidden })
}

/// Generates `sequences` texts at once with caches; `None` where the model cannot be sampled from.
/// `format`: of matrices, as they are in a quantised model.
pub fn decoding(
    spec: &Spec,
    device: &dyn Device,
    (sequences, prompt, tokens): (usize, usize, usize),
    rewriting: &Rewriting,
    format: Option<&str>,
) -> Result<Option<Decoding>, BenchError> {
    let narrow = device.writes(spec.train.precision);
    let writing = Writing {
        rows: sequences as u64,
        context: Some((prompt + tokens) as u64),
        prompt: Some(prompt as u64),
        rewrite: rewriting.clone(),
        narrow,
        ..Writing::default()
    };
    let compiled = match compile_cached(spec, &writing) {
        Ok(compiled) => compiled,
        Err(CompileError::Unsupported(_) | CompileError::LooksAhead) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let compiled = match format {
        Some(format) => {
            compile_cached(spec, &Writing { formats: blocks::formats(&compiled, format), ..writing })?
        }
        None => compiled,
    };
    let mut decoder = Cached::load(device, compiled)?;
    decoder.model().initialise(spec.train.seed)?;
    blocks::fill(decoder.loaded())?;
    let vocab = spec.model.vocab as u32;
    let text = |t: u32| (0..prompt as u32).map(|i| (i * 7 + 11 * t + 1) % vocab).collect::<Vec<u32>>();
    let texts: Vec<Vec<u32>> = (0..sequences as u32).map(text).collect();
    // The first run prepares weights.
    decoder.start(&texts)?;
    let mut prompts = vec![];
    for _ in 0..PROMPTS {
        let begun = Instant::now();
        decoder.start(&texts)?;
        prompts.push(begun.elapsed().as_secs_f64());
        // A device that is interpreted takes seconds for one.
        if prompts.iter().sum::<f64>() > 5.0 {
            break;
        }
    }
    prompts.sort_by(f64::total_cmp);
    let read = prompts[prompts.len() / 2];
    let (mut seconds, mut readings) = (vec![], vec![]);
    let mut reading = reading(device)?;
    for i in 0..tokens as u32 - 1 {
        // A device that is interpreted takes seconds for one.
        if i % STEPS_OF_A_READING == 0 && readings.iter().sum::<f64>() < 1.0 {
            readings.push(once(reading.as_mut())?);
        }
        let next: Vec<u32> = (0..sequences as u32).map(|t| (i * 5 + 11 * t + 3) % vocab).collect();
        let begun = Instant::now();
        decoder.advance(&next)?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    readings.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let parts = prompt.div_ceil(decoder.chunk());
    let [decode, prefill] =
        [Entry::Decode, Entry::Prefill].map(|entry| decoder.loaded().compiled().program(entry.task()));
    // A program that runs once more takes its tokens in once more: the last, or the prompt's last
    // part.
    let (last, part) = (prompt + tokens - 2, (parts - 1) * decoder.chunk());
    let (model, rewind) = (decoder.loaded(), |from: usize| decoder.forget_from(from));
    rewind(last)?;
    let weights = weights_read(model, decode)?;
    let launches = launch_times(model, &[decode], &|| rewind(last))?;
    let prompt_launches = launch_times(model, &[prefill], &|| rewind(part))?;
    let flops: u64 = prompt_launches.iter().map(|launch| launch.flops).sum();
    Ok(Some(Decoding {
        sequences,
        prompt,
        tokens,
        precision: narrow.name(),
        prompt_tokens_per_second: (sequences * prompt) as f64 / read,
        prompt_flops_per_second: (parts as u64 * flops) as f64 / read,
        tokens_per_second: sequences as f64 / median,
        weights,
        weights_per_second: weights as f64 / median,
        best_weights_per_second: weights as f64 / seconds[0],
        read: 4.0 * ELEMENTS as f64 / readings[readings.len() / 2],
        launches,
        prompt_launches,
    }))
}

/// Bytes of weights that the products of a program read: one multiply-add for each row and element,
/// or for each choice of an expert.
fn weights_read(model: &Model, program: ProgramKey) -> Result<u64, BenchError> {
    let mut session = model.session();
    session.instrument(Instrument { count: true, time: false });
    let stats = session.run(program)?.by_launch;
    let plan = session.plan();
    let mut bytes = 0;
    for launch in &stats {
        let kernel = plan.kernel(launch.kernel);
        let (name, rows) = if let Kernel::Product(k) = kernel {
            ("b", k.m)
        } else if let Kernel::Grouped(_) = kernel {
            ("w", 1)
        } else {
            continue;
        };
        let slots = kernel.signature();
        let operand = slots.iter().position(|slot| slot.name == name);
        let mut dtype = DType::F32;
        let same = |l: &&Launch| l.kernel == launch.kernel && l.origin == launch.origin;
        for l in listed(&plan.programs[&program].steps).filter(same) {
            if let Some(Operand::Tensor { buffer, .. }) = operand.and_then(|o| l.operands.get(o)) {
                dtype = plan.buffer(*buffer).dtype;
            }
        }
        bytes += dtype.room(launch.multiply_adds / rows.max(1));
    }
    Ok(bytes)
}

/// Floats that are copied or read: more than caches hold.
const ELEMENTS: u64 = 1 << 25;
/// Steps of writing from one reading of memory to the next.
const STEPS_OF_A_READING: u32 = 8;

/// A session that reads memory and does little else.
fn reading(device: &dyn Device) -> Result<Box<dyn Session>, DeviceError> {
    let buffers = [(DType::F32, vec![ELEMENTS]), (DType::F32, vec![1])];
    alone(device, &buffers, Kernel::Norm(kernel::Norm { elements: ELEMENTS }))
}

/// Bytes a second that a device reads and writes as it copies more than its caches hold; the best
/// of several runs.
pub fn copying(device: &dyn Device) -> Result<f64, BenchError> {
    let buffers = [DType::F32; 2].map(|dtype| (dtype, vec![ELEMENTS]));
    let kernel = Kernel::Copy(kernel::Copy { elements: ELEMENTS, accumulate: false });
    let mut session = alone(device, &buffers, kernel)?;
    let seconds = least(session.as_mut())?;
    Ok(8.0 * ELEMENTS as f64 / seconds)
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
        (Precision::Bf16 | Precision::Fp8, _) => DType::Bf16,
    };
    let layout = Matrix { row: n, column: 1 };
    let kernel = Kernel::Product(kernel::Product {
        m: n,
        n,
        k: n,
        a: layout,
        b: layout,
        accumulate: false,
        stored: false,
    });
    let buffers = [dtype, dtype, DType::F32].map(|dtype| (dtype, vec![n, n]));
    let mut session = alone(device, &buffers, kernel)?;
    Ok(Some(least(session.as_mut())?))
}

/// A session of one launch, whose operands are these buffers of floats. They hold numbers as good
/// as random: zeros switch fewer transistors, and are faster.
fn alone(
    device: &dyn Device,
    buffers: &[(DType, Vec<u64>)],
    kernel: Kernel,
) -> Result<Box<dyn Session>, DeviceError> {
    let (mut arena, mut all) = (0, vec![]);
    for (i, (dtype, shape)) in buffers.iter().enumerate() {
        let (name, shape) = (i.to_string(), shape.clone());
        all.push(Buffer { name, space: Space::Io, dtype: *dtype, shape, instances: 1, offset: arena });
        arena += 4 * all[i].elements();
    }
    let operand = |i: usize| Operand::Tensor {
        buffer: BufferId(i as u32),
        instance: Affine::default(),
        offset: 0,
        stride: 0,
    };
    let operands = (0..all.len()).map(operand).collect();
    let launch = Launch { kernel: KernelId(0), operands, places: None, origin: "bench".into() };
    let program = Program { steps: vec![Step::Launch(launch)], variables: 0 };
    let programs = [(ProgramKey::ALONE, program)].into_iter().collect();
    let elements: Vec<u64> = all.iter().map(Buffer::elements).collect();
    let plan = Plan { buffers: all, kernels: vec![kernel], programs, arena, mapped: 0 };
    let mut session = device.load(&plan, &Group::alone())?;
    for (i, n) in (0..).zip(elements) {
        let bits = |j: u64| (2 * j + u64::from(i)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let values = (0..n).map(|j| bits(j) as f32 / (1 << 24) as f32 - 0.5);
        match buffers[i as usize].0 {
            DType::Bf16 => {
                let values: Vec<half::bf16> = values.map(half::bf16::from_f32).collect();
                session.write_at(BufferId(i), 0, 0, &values)?;
            }
            // Weights of files have no buffers here.
            DType::E4m3 | DType::Packed(_) => {}
            DType::F32 | DType::I32 => session.write_at(BufferId(i), 0, 0, &values.collect::<Vec<f32>>())?,
        }
    }
    Ok(session)
}

/// Seconds of a session of one launch, the least of several runs.
fn least(session: &mut dyn Session) -> Result<f64, DeviceError> {
    let (mut best, begun) = (f64::INFINITY, Instant::now());
    for _ in 0..20 {
        best = best.min(once(session)?);
        // A device that is interpreted takes seconds for one.
        if begun.elapsed().as_secs_f64() > 5.0 {
            break;
        }
    }
    Ok(best)
}

/// Seconds of one run of a session of one launch.
fn once(session: &mut dyn Session) -> Result<f64, DeviceError> {
    session.instrument(Instrument { count: false, time: true });
    Ok(session.run(ProgramKey::ALONE)?.by_launch.iter().map(|l| l.seconds).sum())
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

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_device::cpu::CpuDevice;

    /// A page that nobody wrote is read from a cache, however many of them there are.
    #[test]
    fn memory_is_written_before_it_is_timed() {
        let kernel = Kernel::Copy(kernel::Copy { elements: 4096, accumulate: false });
        let buffers = [DType::F32; 2].map(|dtype| (dtype, vec![4096]));
        let session = alone(&CpuDevice::default(), &buffers, kernel).unwrap();
        for i in 0..2 {
            let mut values = vec![0.0f32; 4096];
            session.read_at(BufferId(i), 0, 0, &mut values).unwrap();
            assert!(values.chunks(512).all(|page| page.iter().any(|x| *x != 0.0)));
        }
    }
}
