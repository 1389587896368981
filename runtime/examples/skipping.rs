//! Savings of Mixture-of-Depths: step time and decode rate at capacities 1, 1/2, 1/4 and 1/8.
//!
//! ```sh
//! cargo run --release -p dreamc-runtime --example skipping
//! ```
//!
//! Every layer of a small model, or every other one, is wrapped in `skip(capacity C, causal bce)`.
//! Each model learns random tokens for some steps, so that its routers decide for about a share C
//! of the tokens. Then training steps and greedy decoding are timed, one of each model in turn,
//! many times over: whatever else the machine does meets all of them alike. Figures are medians of
//! the time that the one thread ran, where the system says, else of wall-clock time. Caches are
//! what is reserved for keys and values of a whole text, and what the decoded text left in them;
//! ratios are to C = 1 with the same layers wrapped.

use dreamc_compiler::count::{self, count};
use dreamc_compiler::program::{Buffer, ProgramKey};
use dreamc_compiler::{Options, compile};
use dreamc_data::rng::{Philox, Stream};
use dreamc_device::Device;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::Spelling;
use dreamc_runtime::generate::{Cached, NextLogits, Writing, compile_cached};
use dreamc_runtime::model::Model;
use std::error::Error;
use std::time::Instant;

const BATCH: usize = 4;
const TOKENS: usize = 256;
const VOCAB: usize = 256;
const LEARN: usize = 40;
const ROUNDS: usize = 15;
const PROMPT: usize = 32;
const DECODED: usize = 64;
const CAPACITIES: [f64; 4] = [1.0, 0.5, 0.25, 0.125];

/// A model being timed.
struct Arm {
    layers: &'static str,
    capacity: f64,
    model: Model,
    cached: Cached,
    random: Stream,
    steps: usize,
    /// Seconds of training steps.
    step: Vec<f64>,
    /// Seconds of a token.
    token: Vec<f64>,
    /// Share of the tokens that the wrapped layers processed while decoding.
    processed: f64,
    /// Declared FLOPs a token: training, decoding.
    flops: (f64, f64),
    /// Bytes of keys and values that are reserved.
    caches: u64,
    /// Bytes of keys and values that the last text left there.
    held: u64,
}

fn text(layers: &str, capacity: f64) -> String {
    let wrapped = format!("\"skip(capacity {capacity}, causal bce 1) {{ sa > mlp }}\"");
    let other = if layers == "every" { wrapped.as_str() } else { "\"sa > mlp\"" };
    format!(
        "model:\n  name: skipping\n  vocab: {VOCAB}\n  hidden: 256\n  context: {TOKENS}\n  components:\n    \
         sa: {{sequence: {{heads: 4, head_size: 64}}}}\n    mlp: {{mlp: {{intermediate: 1024}}}}\n  \
         body:\n    - repeat: 2\n      layers: [{other}, {wrapped}]\n\
         train: {{steps: 1, batch: {BATCH}, sequence: {TOKENS}, weight_decay: 0, precision: f32}}\n"
    )
}

/// Nanoseconds that this thread has run.
fn ran() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}

/// Seconds that something takes.
fn timed<T>(work: impl FnOnce() -> Result<T, Box<dyn Error>>) -> Result<(f64, T), Box<dyn Error>> {
    let (before, wall) = (ran(), Instant::now());
    let found = work()?;
    let seconds = match (before, ran()) {
        (Some(before), Some(after)) => (after - before) as f64 / 1e9,
        _ => wall.elapsed().as_secs_f64(),
    };
    Ok((seconds, found))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Arm {
    fn new(device: &dyn Device, layers: &'static str, capacity: f64) -> Result<Arm, Box<dyn Error>> {
        let ast = dreamc_dsl::parse("skipping", &text(layers, capacity), Spelling::Yaml)?;
        let spec = dreamc_dsl::check(&ast, &[])?.0;
        let options =
            Options { batch: BATCH as u64, sequence: TOKENS as u64, train: true, ..Options::default() };
        let mut model = Model::load(device, compile(&spec, &options)?)?;
        model.initialise(0)?;
        let places: Vec<i32> = (0..BATCH * TOKENS).map(|i| (i % TOKENS) as i32).collect();
        put(&mut model, "positions", &places)?;
        put(&mut model, "loss_scale", &[1.0 / (BATCH * TOKENS) as f32])?;
        put(&mut model, "aux_scale", &[1.0f32])?;
        let cached =
            Cached::load(device, compile_cached(&spec, &Writing { slack: 1.25, ..Writing::default() })?)?;
        let counts = count(&spec, &count::Options { tokens: TOKENS as u64, ..count::Options::default() })?;
        let mut arm = Arm {
            layers,
            capacity,
            caches: kept(&cached).map(|b| b.bytes()).sum(),
            held: 0,
            model,
            cached,
            random: Philox::new(0, "skipping").stream(0),
            steps: 0,
            step: vec![],
            token: vec![],
            processed: 0.0,
            flops: (counts.flops_per_token.training.mean(), counts.flops_per_token.decode.mean()),
        };
        for _ in 0..LEARN {
            arm.train()?;
        }
        arm.step.clear();
        for t in arm.model.compiled().tensors.clone() {
            let values = arm.model.get(&t.name)?;
            arm.cached.model().set(&t.name, &values)?;
        }
        Ok(arm)
    }

    fn tokens(&mut self, n: usize) -> Vec<i32> {
        (0..n).map(|_| self.random.below(VOCAB as u64) as i32).collect()
    }

    /// One training step, timed.
    fn train(&mut self) -> Result<(), Box<dyn Error>> {
        let tokens = self.tokens(BATCH * TOKENS);
        put(&mut self.model, "ids", &tokens)?;
        put(&mut self.model, "targets", &tokens)?;
        self.steps += 1;
        let correct = |beta: f64| 1.0 / (1.0 - beta.powi(self.steps as i32));
        let scalars = [
            ("learning_rate", 3e-3),
            ("first_correction", correct(0.9)),
            ("second_correction", correct(0.999)),
            ("clip", 1.0),
        ];
        for (name, value) in scalars {
            put(&mut self.model, name, &[value as f32])?;
        }
        let mut session = self.model.session();
        let (seconds, ()) = timed(|| {
            for program in [ProgramKey::BACKWARD, ProgramKey::NORM, ProgramKey::UPDATE] {
                session.run(program)?;
            }
            Ok(())
        })?;
        self.step.push(seconds);
        Ok(())
    }

    /// A text of some tokens, timed after its prompt.
    fn decode(&mut self) -> Result<(), Box<dyn Error>> {
        let text: Vec<u32> = self.tokens(PROMPT + DECODED).into_iter().map(|t| t as u32).collect();
        let cached = &mut self.cached;
        cached.start(&[text[..PROMPT].to_vec()])?;
        let (seconds, ()) = timed(|| {
            for token in &text[PROMPT..] {
                cached.advance(&[*token])?;
            }
            Ok(())
        })?;
        self.token.push(seconds / DECODED as f64);
        let processed = cached.processed()?;
        let of = |applications: &[Vec<usize>]| applications.iter().map(|rows| rows[0]).sum::<usize>() as u64;
        // Keys and values are `[instance, row, entry, ..]`; skipped tokens have no entries.
        self.held = kept(cached)
            .map(|b| {
                let entries = processed.iter().find(|(name, _)| beside(name) == beside(&b.name));
                let entries = entries
                    .map_or((PROMPT + DECODED) as u64 * b.instances, |(_, applications)| of(applications));
                entries * b.bytes() / (b.instances * b.shape[1])
            })
            .sum();
        let counts: Vec<usize> = processed.iter().flat_map(|c| &c.1).map(|rows| rows[0]).collect();
        let all = counts.len() * (PROMPT + DECODED);
        self.processed = if all > 0 { counts.iter().sum::<usize>() as f64 / all as f64 } else { 1.0 };
        Ok(())
    }
}

/// Buffers of keys and values.
fn kept(cached: &Cached) -> impl Iterator<Item = &Buffer> {
    let buffers = &cached.loaded().compiled().plan.buffers;
    buffers.iter().filter(|b| b.name.ends_with(".keys") || b.name.ends_with(".values"))
}

/// Prefix of the caches of one component.
fn beside(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(before, _)| before)
}

fn put<T: dreamc_device::Element>(model: &mut Model, name: &str, values: &[T]) -> Result<(), Box<dyn Error>> {
    if let Some(id) = model.compiled().plan.find(name) {
        model.session().write_at(id, 0, 0, values)?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = CpuDevice::new(CpuOptions { threads: Some(1) });
    let clock = if ran().is_some() { "time the thread ran" } else { "wall-clock time" };
    println!(
        "{}, hidden 256, 4 layers, {BATCH} × {TOKENS} tokens a step, medians of {ROUNDS} rounds, {clock}\n",
        device.name()
    );
    println!(
        "| layers wrapped | C | step ms | ratio | FLOPs ratio | decode tokens/s | ms a token, ratio | FLOPs ratio | processed | caches KiB, reserved | ratio | held | ratio |"
    );
    println!("|{}", "---|".repeat(13));
    for layers in ["every", "every other"] {
        let mut arms =
            CAPACITIES.map(|c| Arm::new(&device, layers, c)).into_iter().collect::<Result<Vec<_>, _>>()?;
        for _ in 0..ROUNDS {
            for arm in &mut arms {
                arm.train()?;
                arm.decode()?;
            }
        }
        let of = |arm: &Arm| {
            (median(&arm.step), median(&arm.token), arm.flops, arm.caches as f64, arm.held as f64)
        };
        let Some(whole) = arms.first().map(of) else { continue };
        for arm in &arms {
            let (step, token, flops, caches, held) = of(arm);
            println!(
                "| {} | {} | {:.1} | {:.2} | {:.2} | {:.0} | {:.2} | {:.2} | {:.2} | {:.0} | {:.2} | {:.0} | {:.2} |",
                arm.layers,
                arm.capacity,
                step * 1e3,
                step / whole.0,
                flops.0 / whole.2.0,
                1.0 / token,
                token / whole.1,
                flops.1 / whole.2.1,
                arm.processed,
                caches / 1024.0,
                caches / whole.3,
                held / 1024.0,
                held / whole.4,
            );
        }
    }
    Ok(())
}
