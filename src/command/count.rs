//! `dreamc count`: parameters, FLOPs, bytes and predicted time of a spec.

use crate::arguments::SpecArguments;
use crate::command::compile::{Step, step_kernels};
use clap::{Args, value_parser};
use dreamc_compiler::count::device::{Device, Predicted, Roofline};
use dreamc_compiler::count::executed::executed;
use dreamc_compiler::count::network::Scaling;
use dreamc_compiler::count::roofline::Bound;
use dreamc_compiler::count::{Counts, Memory, Options, PerToken, count};
use dreamc_compiler::ir::Extents;
use dreamc_compiler::matching::TOKENS;
use dreamc_compiler::rewrite::{Rewriting, Target};
use dreamc_compiler::{CompileError, compile, compile_within};
use dreamc_dsl::Spec;
use dreamc_runtime::checkpoint::Weights;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::number::{decimal_bytes, decimals, grouped, instant};
use dreamc_study::spec::make_absolute;
use dreamc_study::{note, output, show, transplant};
use indexmap::IndexMap;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// Count parameters, FLOPs and bytes of a specification, and predict its speed
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc count examples/dr-da-16.yaml
  dreamc count examples/dr-da-16.yaml --target h100
  dreamc count examples/dr-da-16.yaml --target h200 --gpus 64
  dreamc count examples/dr-da-16.yaml --set ea.count=1024 --json | jq .parameters.total
  dreamc count examples/tiny-dr-da.yaml --executed")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Length of the generated sequence, and of the prompt; 1024 by default, or the context where
    /// that is shorter
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 48))]
    tokens: Option<u64>,

    /// Predict times on this GPU by a roofline: h100, h200, a100, l40s, rtx4090; a training step is
    /// compiled for it, and has the time of `dreamc compile --emit kernels`
    #[arg(long, value_name = "NAME", value_parser = target)]
    target: Option<&'static Device>,

    /// With --target: predict a step whose batch this many of these GPUs share
    #[arg(long, value_name = "N", requires = "target", value_parser = value_parser!(u64).range(1..=1 << 20))]
    gpus: Option<u64>,

    /// Compile the specification and count what its programs execute, too
    #[arg(long)]
    executed: bool,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

fn target(name: &str) -> Result<&'static Device, String> {
    let unknown = || match name {
        "cpu" => format!(
            "no rates are known of a CPU, `dreamc bench` measures them; there are {}",
            Device::names()
        ),
        _ => format!("no such device is known; there are {}", Device::names()),
    };
    Device::find(name).ok_or_else(unknown)
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    counts: Counts,
    #[serde(skip_serializing_if = "Option::is_none")]
    executed: Option<Programs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scaling: Option<Scaling>,
    /// Ranks that own the experts together, of a recipe that shares them.
    #[serde(skip_serializing_if = "Option::is_none")]
    owners: Option<u64>,
    /// Most bytes that training may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes: Option<u64>,
    /// Weights of an imported or quantised model in their file.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<InFile>,
    /// A model whose values training matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    teacher: Option<Teacher>,
}

/// Weights in their file, where generation and evaluation read them.
#[derive(Default, Serialize)]
struct InFile {
    /// Bytes of all.
    bytes: u64,
    /// Numbers by format.
    numbers: IndexMap<String, u64>,
}

/// The weights that stand in the folder of an import.
fn stored(folder: &Path) -> Result<Option<InFile>, Failure> {
    let import = ["model.safetensors", "checksums.txt"].iter().all(|name| folder.join(name).is_file());
    if !import {
        return Ok(None);
    }
    let weights = Weights::open(folder, None)?;
    let mut found = InFile::default();
    for (name, shape) in weights.entries() {
        let Some(stored) = weights.stored(name) else { continue };
        let numbers: u64 = shape.iter().product();
        let (format, bytes) = match stored.packed {
            Some(packed) => (packed.name().into(), numbers / packed.unit() as u64 * packed.bytes() as u64),
            None => {
                let bytes = numbers * stored.dtype.bitsize() as u64 / 8;
                (format!("{:?}", stored.dtype).to_lowercase(), bytes)
            }
        };
        found.bytes += bytes;
        *found.numbers.entry(format).or_default() += numbers;
    }
    Ok(Some(found))
}

/// A model whose values training matches.
#[derive(Serialize)]
struct Teacher {
    /// Its forward, a token of all steps.
    flops_per_token: f64,
    /// Weights in f32, and the forward of a micro-batch.
    bytes: u64,
}

/// The teacher of a specification; one that does not open is said, and not counted.
fn teacher(spec: &Spec, rows: u64) -> Option<Teacher> {
    let found =
        transplant::teacher_bytes(spec, rows).and_then(|bytes| Ok((bytes, transplant::teacher_flops(spec)?)));
    match found {
        Ok((bytes, flops_per_token)) => bytes.map(|bytes| Teacher { flops_per_token, bytes }),
        Err(failure) => {
            note!("the teacher is not counted: {failure}");
            None
        }
    }
}

/// Work of the compiled programs for one micro-batch.
#[derive(Serialize)]
struct Programs {
    /// By program.
    multiply_adds: IndexMap<String, u128>,
    /// Programs whose data decide how much they execute: these are the most.
    bounds: Vec<String>,
    /// Memory of all of them.
    arena_bytes: u64,
    /// Layers whose forward is computed again on the way back, to stay within `train.memory`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    computed_again: Vec<String>,
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    let tokens = a.tokens.unwrap_or(TOKENS.min(spec.model.context));
    let mut counts = count(&spec, &Options { tokens, device: a.target })?;
    if let (Some(device), Some(predicted)) = (a.target, &mut counts.predicted) {
        predicted.training = training(&spec, device, predicted.training)?;
    }
    let executed = if a.executed { Some(programs(&spec, &counts)?) } else { None };
    let scaling = a.gpus.zip(counts.predicted.as_ref()).map(|(gpus, predicted)| {
        let tokens = spec.train.batch as f64 * counts.sequence as f64;
        let gradients = counts.memory_bytes.gradients as f64;
        let seconds = tokens * predicted.training.seconds_per_token;
        Scaling::new(predicted.device, gpus, spec.train.batch, seconds, gradients)
    });
    let mut placed = spec.clone();
    make_absolute(&mut placed, &a.spec.base());
    let teacher = teacher(&placed, counts.micro_batch);
    let stored = stored(&a.spec.spec)?;
    let owners = Some(spec.train.parallel.experts).filter(|experts| *experts > 1);
    let report =
        Report { counts, executed, scaling, owners, limit_bytes: spec.train.memory, stored, teacher };
    if a.json {
        return Ok(show::json(&report)?);
    }
    Ok(output::write(table(&report).as_bytes())?)
}

/// A training token by the kernels of a step, each bound by products or by traffic of its own: the
/// time of `dreamc compile --emit kernels` by the data sheet. `whole` is that of all products
/// against all traffic, which no kernel reaches, and stays where a plan cannot be made.
fn training(spec: &Spec, device: &'static Device, whole: Roofline) -> Result<Roofline, Failure> {
    let Some(target) = Target::named(device.name) else { return Ok(whole) };
    let rewrite = Rewriting { target, ..Rewriting::default() };
    let table = match step_kernels(spec, &Step { rewrite, ..Step::of(spec) }, device) {
        Err(Failure::Error(error))
            if matches!(
                error.downcast_ref(),
                Some(CompileError::Unsupported(_) | CompileError::Overflow(_))
            ) =>
        {
            return Ok(whole);
        }
        table => table?,
    };
    Ok(Roofline { seconds_per_token: table.least() / table.tokens.max(1) as f64, ..whole })
}

/// Counts of the training plan of a micro-batch.
fn programs(spec: &Spec, counts: &Counts) -> Result<Programs, Failure> {
    let options = dreamc_compiler::Options {
        batch: counts.micro_batch,
        sequence: counts.sequence,
        train: true,
        segments: spec.data.as_ref().is_some_and(|d| d.document_mask),
        ..Default::default()
    };
    let compiled = match spec.train.memory {
        None => compile(spec, &options)?,
        Some(most) => compile_within(spec, &[("", options)], most, |_| 0)?.0.swap_remove(0),
    };
    let plan = compiled.plan;
    let mut all = Programs {
        multiply_adds: IndexMap::new(),
        bounds: vec![],
        arena_bytes: plan.arena,
        computed_again: compiled.kept.into_iter().filter(|kept| kept.again).map(|kept| kept.body).collect(),
    };
    for &program in plan.programs.keys() {
        let found = executed(&plan, program, &|_| Extents::default())?;
        if found.open() {
            all.bounds.push(program.to_string());
        }
        if found.multiply_adds > 0 {
            all.multiply_adds.insert(program.to_string(), found.multiply_adds);
        }
    }
    Ok(all)
}

/// The table and, under it, what its numbers mean.
fn table(report: &Report) -> String {
    let c = &report.counts;
    let mut t = String::new();
    let precision = format!("{:?}", c.precision).to_lowercase();
    let _ = writeln!(t, "{}: depth {}, {precision}\n", c.model, c.depth);

    let p = &c.parameters;
    let share = |n: u128| format!("{:5.1} %", 100.0 * n as f64 / p.total.max(1) as f64);
    line(&mut t, "parameters", p.total, &decimals(p.total as f64));
    line(&mut t, "  active", p.active, &share(p.active));
    if let Some(trained) = p.trained {
        line(&mut t, "  trained", trained, &share(trained));
    }
    let k = &p.kinds;
    let kinds = [
        ("embedding", k.embedding),
        ("head", k.head),
        ("dense", k.dense),
        ("routed", k.routed),
        ("shared", k.shared),
        ("router", k.router),
        ("gain", k.gain),
    ];
    t.push_str("  by kind\n");
    for (name, n) in kinds.into_iter().filter(|k| k.1 > 0) {
        line(&mut t, &format!("    {name}"), n, &share(n));
    }
    t.push_str("  by component\n");
    for (name, &n) in &p.by_component {
        line(&mut t, &format!("    {name}"), n, &share(n));
    }
    if p.balance > 0 {
        line(&mut t, "  balancing biases", p.balance, "not in the total");
    }

    let f = &c.flops_per_token;
    let share = |n: &PerToken| format!("{:5.1} %", 100.0 * n.mean() / f.decode.mean().max(1.0));
    t.push('\n');
    mean(&mut t, "FLOPs per token, decode", f.decode, &decimals(f.decode.mean()));
    for (name, n) in &f.decode_by_component {
        mean(&mut t, &format!("    {name}"), *n, &share(n));
    }
    t.push_str("  by kind\n");
    for (name, n) in &f.decode_by_kind {
        mean(&mut t, &format!("    {}", name.replace('_', " ")), *n, &share(n));
    }
    mean(&mut t, "FLOPs per token, prefill", f.prefill, &decimals(f.prefill.mean()));
    mean(&mut t, "FLOPs per token, training", f.training, &decimals(f.training.mean()));
    mean(&mut t, "    forward", f.training_forward, "");
    mean(&mut t, "    backward", f.training_backward, "");
    mean(&mut t, "    recomputation", f.training_recomputation, "");
    let e = &c.elementwise_per_token;
    t.push_str("element-wise work per token\n");
    for (name, n) in [("decode", e.decode), ("prefill", e.prefill), ("training", e.training)] {
        mean(&mut t, &format!("    {name}"), n, "");
    }

    let m = &c.memory_bytes;
    t.push('\n');
    line(&mut t, "bytes, generation", m.generation, &decimal_bytes(m.generation));
    line(&mut t, "    weights", m.weights, &decimal_bytes(m.weights));
    line(&mut t, "    sequence cache, mean", m.sequence_cache, &decimal_bytes(m.sequence_cache));
    if m.text_state > 0 {
        line(&mut t, "    text states", m.text_state, "whatever the length");
    }
    line(&mut t, "    depth cache", m.depth_cache, &decimal_bytes(m.depth_cache));
    line(
        &mut t,
        "  sequence cache at context",
        m.sequence_cache_context,
        &decimal_bytes(m.sequence_cache_context),
    );
    t.push_str("  all caches at context, by component\n");
    for (name, &n) in &m.caches_by_component {
        line(&mut t, &format!("    {name}"), n, &decimal_bytes(n));
    }
    if let Some(stored) = &report.stored {
        line(
            &mut t,
            "bytes, weights in their file",
            stored.bytes.into(),
            &decimal_bytes(stored.bytes.into()),
        );
        for (format, numbers) in &stored.numbers {
            line(&mut t, &format!("    numbers in {format}"), u128::from(*numbers), "");
        }
    }
    line(&mut t, "bytes, training", m.training, &decimal_bytes(m.training));
    line(&mut t, "    weights", m.weights, &decimal_bytes(m.weights));
    line(&mut t, "    gradients", m.gradients, &decimal_bytes(m.gradients));
    line(&mut t, "    optimizer", m.optimizer, &decimal_bytes(m.optimizer));
    line(&mut t, "    activations", m.activations, &decimal_bytes(m.activations));
    for (name, &n) in &m.activations_by_component {
        line(&mut t, &format!("      {name}"), n, &decimal_bytes(n));
    }
    if let Some(teacher) = &report.teacher {
        let each = format!("{}FLOP a token of all steps", decimals(teacher.flops_per_token));
        line(
            &mut t,
            "  the teacher's, next to it",
            teacher.bytes.into(),
            &format!("{}, {each}", decimal_bytes(teacher.bytes.into())),
        );
    }
    if let Some(limit) = report.limit_bytes {
        line(&mut t, "    at most (train.memory)", limit.into(), &decimal_bytes(limit.into()));
    }

    if let Some(executed) = &report.executed {
        t.push_str("\nexecuted for a micro-batch, multiply-adds\n");
        for (name, &n) in &executed.multiply_adds {
            let note = if executed.bounds.contains(name) { "at most" } else { "" };
            line(&mut t, &format!("    {name}"), n, note);
        }
        line(
            &mut t,
            "  memory, planned",
            executed.arena_bytes.into(),
            &decimal_bytes(executed.arena_bytes.into()),
        );
        if !executed.computed_again.is_empty() {
            let _ = writeln!(t, "  computed again on the way back: {}", executed.computed_again.join(", "));
        }
    }
    if let Some(predicted) = &c.predicted {
        times(&mut t, predicted, m.training);
    }
    if let Some(scaling) = &report.scaling {
        many(
            &mut t,
            scaling,
            m,
            report.owners.map(|owners| (owners, k.routed as f64 / p.total.max(1) as f64)),
        );
    }
    conventions(&mut t, c);
    t
}

fn times(t: &mut String, p: &Predicted, training: u128) {
    let _ = writeln!(t, "\n{}, at best", p.device.title);
    let mut row = |name: &str, r: Roofline| {
        let bound = match r.bound {
            Bound::TensorCores | Bound::Codes | Bound::F32 | Bound::Elementwise => "bound by products",
            Bound::Memory => "bound by memory traffic",
            Bound::Network => "bound by messages",
        };
        let rate = grouped((1.0 / r.seconds_per_token) as u128);
        let _ = writeln!(t, "    {name:<24}{:>18}   {rate} tokens/s, {bound}", instant(r.seconds_per_token));
    };
    row("decode", p.decode);
    row("prefill", p.prefill);
    row("training", p.training);
    let memory = u128::from(p.device.memory);
    let fits = if training <= memory { "fits into" } else { "does not fit into" };
    let _ = writeln!(t, "    training {fits} its {}", decimal_bytes(memory));
}

/// A step on many GPUs. `experts`: how many own the routed experts together, and the share of all
/// parameters that those are.
fn many(t: &mut String, s: &Scaling, m: &Memory, experts: Option<(u64, f64)>) {
    let network = &s.network;
    let _ = writeln!(t, "\na step on {} GPUs, at best", s.gpus);
    let mut row = |name: &str, seconds: f64, note: String| {
        let _ = writeln!(t, "{}", format!("    {name:<24}{:>18}   {note}", instant(seconds)).trim_end());
    };
    row("products and traffic", s.compute, format!("of each GPU, for 1 / {} of the batch", s.gpus));
    let links =
        format!("{} inside nodes of {}, {} between", network.inside.name, network.node, network.between.name);
    row("sum of gradients", s.communication, format!("of {}; {links}", decimal_bytes(m.gradients)));
    row("step, sum hidden", s.hidden, "by the backward, as far as that is as long".into());
    row("step, sum after", s.exposed, format!("efficiency {:.1} %", 100.0 * s.efficiency));
    if s.gpus > s.rows {
        let _ = writeln!(
            t,
            "    the batch has {} rows: no more GPUs than that can share it",
            grouped(s.rows.into())
        );
    }
    let gpus = u128::from(s.gpus.max(1));
    let part = m.training - m.states + m.states.div_ceil(gpus);
    let least = m.activations + (m.training - m.activations).div_ceil(gpus);
    for (name, bytes, note) in [
        ("memory, states whole", m.training, "of each GPU"),
        ("memory, states cut", part, "with `train.parallel: {shard: optimizer}`, as fast"),
        (
            "memory, weights cut",
            least,
            "with `{shard: weights}`, and the layers in use; it waits for their weights",
        ),
    ] {
        let _ = writeln!(t, "    {name:<24}{:>18}   {note}", decimal_bytes(bytes));
    }
    if let Some((owners, routed)) = experts {
        let held = (m.training - m.activations) as f64;
        let own = m.training - (held * routed * (1.0 - 1.0 / owners as f64)) as u128;
        let note = format!("owned by {owners} together, all else whole; it waits for their rows");
        let _ = writeln!(t, "    {:<24}{:>18}   {note}", "memory, experts shared", decimal_bytes(own));
    }
    t.push_str("    by the α–β model of NCCL's collectives (docs/scaling.md); ranks on CPUs exchange over TCP or MPI\n");
}

fn conventions(t: &mut String, c: &Counts) {
    let _ = write!(
        t,
        "
Counted on the canonical inference form, shared projection experts merged, and its derivative.
A FLOP is one multiply or one add of a matrix product: attention over the positions that exist, routers and
head included, embedding look-up not; element-wise work is beside it. Parameters: norm gains included,
balancing biases not. Active: all but the experts that a token cannot choose. Decode: mean over a
generated sequence of {} tokens. Prefill: a prompt as long, head on its last token. Training: micro-batches
of {} x {} tokens; recomputation is forward work that the backward repeats. Bytes: weights and activations in the
spec's precision, the rest in f32; activations are tensors that the backward reads; temporaries are not included.
",
        c.tokens, c.micro_batch, c.sequence
    );
    if c.predicted.is_some() {
        t.push_str(
            "Times: products at peak or their bytes at full bandwidth, whichever takes longer; decoding one sequence.\n\
             Training: the sum over the kernels of a step, as `dreamc compile --emit kernels` has it.\n",
        );
    }
}

fn line(t: &mut String, name: &str, n: u128, note: &str) {
    let text = format!("{name:<28}{:>24}   {note}", grouped(n));
    let _ = writeln!(t, "{}", text.trim_end());
}

fn mean(t: &mut String, name: &str, n: PerToken, note: &str) {
    line(t, name, n.mean().round() as u128, note);
}
