//! `dreamc plan`: memory, bytes, time and cost of a training by many ranks, before it begins.

use crate::arguments::SpecArguments;
use clap::{Args, value_parser};
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::format::Formats;
use dreamc_compiler::program::{Kernel, Plan, ProgramKey, Step, listed};
use dreamc_compiler::rewrite::{Rewriting, Target};
use dreamc_device::gpu::{prices, prices_by_rates};
use dreamc_device::paper::PaperDevice;
use dreamc_device::{AT_ONCE, Device, Group};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Shard;
use dreamc_plan::failure::{Job, Losses};
use dreamc_plan::machine;
use dreamc_plan::model::Seconds;
use dreamc_plan::simulate::simulate;
use dreamc_plan::timeline::Prices;
use dreamc_plan::{Bytes, Machine, Memory, Mesh, Work, forward, timeline};
use dreamc_runtime::train::teacher::Plan as Taught;
use dreamc_runtime::train::{Prepared, TrainError, prepare};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::number::{decimal_bytes, grouped, instant, many};
use dreamc_study::show::{self, duration, short, table};
use dreamc_study::spec::make_absolute;
use dreamc_study::{note, output};
use serde::Serialize;
use std::fmt::Write;

/// Plan a training by many ranks: memory, bytes, time, cost and failures, before it begins
#[derive(Args)]
#[command(after_help = "\
Lists the meshes that this program can run on the machine: ranks that share the batch, the optimizer's states whole or cut
over them, micro-batches of several sizes. Nothing runs: memory is that of the compiled plan, times are those of docs/plan.md.

Examples:
  dreamc plan examples/dr-da-16.yaml --machine h100x8 --nodes 4
  dreamc plan examples/dr-da-16.yaml --machine h200x8 --price 2.5 --failure-hours 24
  dreamc plan examples/quickstart.yaml --machine cpu --ranks 2 --simulate
  dreamc plan examples/dr-da-16.yaml --machine h100x8 --json | jq .meshes[0].seconds.step")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// A machine of the table: h100x8, h200x8, a100x8, cpu; or a file of one's own (docs/plan.md)
    #[arg(long, value_name = "NAME|FILE", default_value = "h100x8")]
    machine: String,

    /// Nodes of the machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u64).range(1..=8192))]
    nodes: u64,

    /// Ranks in all; by default one for each card of all nodes
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..=65_536))]
    ranks: Option<u64>,

    /// Price of a card for an hour, in whatever money
    #[arg(long, value_name = "PRICE")]
    price: Option<f64>,

    /// Hours between failures of the job; by default those of the machine's cards
    #[arg(long, value_name = "HOURS")]
    failure_hours: Option<f64>,

    /// Hold the time of each mesh to a simulation of all launches and messages
    #[arg(long)]
    simulate: bool,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    model: String,
    machine: Machine,
    nodes: u64,
    ranks: u64,
    /// Tokens of a step, steps of the run.
    tokens: u64,
    steps: u64,
    /// Those that fit, the fastest first.
    meshes: Vec<Offer>,
    /// Those that do not.
    too_large: Vec<TooLarge>,
    not_built: [&'static str; 3],
}

/// Forms of other programs, which this one does not run.
const NOT_BUILT: [&str; 3] = [
    "gradients cut over ranks and weights whole (ZeRO-2)",
    "matrices over ranks (tensor parallel)",
    "layers over ranks (pipeline)",
];

/// A mesh that fits.
#[derive(Serialize)]
struct Offer {
    /// Ranks that share the batch.
    data: u64,
    /// Tensors that are cut over them.
    shard: &'static str,
    /// Ranks that own the experts of a mixture together.
    experts: u64,
    /// Micro-batches of a step, and of a rank.
    accumulate: u64,
    micro_batches: u64,
    /// Rows of a micro-batch.
    rows: u64,
    /// Bytes of the rank that takes most.
    memory: Memory,
    bytes: Bytes,
    seconds: Seconds,
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated: Option<f64>,
    tokens_per_second: f64,
    /// Share of the cards' bf16 products that the model's own FLOPs are.
    #[serde(skip_serializing_if = "Option::is_none")]
    utilisation: Option<f64>,
    /// Bytes of a checkpoint, and those that the rank which holds most of it has in the memory of
    /// its host while it is written.
    checkpoint: u64,
    snapshot: u64,
    failures: Losses,
    /// Of the whole run, failures included.
    hours: f64,
    card_hours: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
}

/// A mesh that does not fit.
#[derive(Serialize)]
struct TooLarge {
    shard: &'static str,
    experts: u64,
    rows: u64,
    memory: u64,
}

/// A mesh to be looked at.
#[derive(Clone, Copy)]
struct Asked {
    ranks: u64,
    shard: Shard,
    experts: u64,
    accumulate: u64,
}

/// Memory of a GPU that no plan has: the context, code, and buffers of NCCL.
const BESIDE: u64 = 2 << 30;

/// Micro-batches that are looked at, at the most.
const SIZES: usize = 6;

pub fn run(a: Arguments) -> Done {
    let machine = machine::find(&a.machine).map_err(|e| Failure::Usage(e.to_string()))?;
    let mut spec = a.spec.load()?;
    make_absolute(&mut spec, &a.spec.base());
    for (name, value) in [("--price", a.price), ("--failure-hours", a.failure_hours)] {
        if let Some(value) = value.filter(|v| !(v.is_finite() && *v > 0.0)) {
            return Err(Failure::Usage(format!("{name} is {value}, and must be above 0")));
        }
    }
    let ranks = a.ranks.unwrap_or(a.nodes * machine.cards);
    let sizes = sizes(&spec, &machine, (ranks, a.nodes))?;
    let (mut meshes, mut too_large) = (vec![], vec![]);
    let teams = teams(&spec, &machine, ranks, sizes[0])?;
    let forms = Shard::ALL.into_iter().flat_map(|shard| teams.iter().map(move |&team| (shard, team)));
    for (shard, experts) in forms {
        for &accumulate in sizes.iter().filter(|_| ranks > 1 || !shard.states()) {
            match offer(&spec, &machine, Asked { ranks, shard, experts, accumulate }, &a)? {
                Ok(offer) => meshes.push(offer),
                Err(large) => too_large.push(large),
            }
        }
    }
    meshes
        .sort_by(|x, y| x.seconds.step.total_cmp(&y.seconds.step).then(x.memory.total.cmp(&y.memory.total)));
    let report = Report {
        model: spec.model.name.clone(),
        nodes: ranks.div_ceil(machine.cards),
        ranks,
        tokens: spec.train.batch * prepare::sequence(&spec),
        steps: spec.train.steps,
        meshes,
        too_large,
        not_built: NOT_BUILT,
        machine,
    };
    if a.json {
        return Ok(show::json(&report)?);
    }
    output::write(text(&report).as_bytes())?;
    if report.meshes.is_empty() {
        note!("no mesh that this program runs fits on {}", report.machine.name);
        return Err(Failure::Said);
    }
    Ok(())
}

/// How many ranks can own the experts of every mixture together, one alone first.
fn teams(spec: &Spec, machine: &Machine, ranks: u64, accumulate: u64) -> Result<Vec<u64>, Failure> {
    let divisors: Vec<u64> = (1..=ranks).filter(|team| ranks.is_multiple_of(*team)).collect();
    let asked = Asked { ranks, shard: Shard::None, experts: 1, accumulate };
    let (prepared, _) = match prepared(&with(spec, asked), machine, asked, 0) {
        // No mesh of whole experts fits into what training may take.
        Err(Failure::Error(e)) if matches!(e.downcast_ref(), Some(TrainError::Memory(_))) => {
            return Ok(vec![1]);
        }
        found => found?,
    };
    let experts: Vec<u64> = prepared.compiled.tensors.iter().filter_map(Tensor::experts).collect();
    let fits =
        |team: &u64| *team == 1 || !experts.is_empty() && experts.iter().all(|n| n.is_multiple_of(*team));
    Ok(divisors.into_iter().filter(fits).collect())
}

/// Micro-batches of a step that `ranks` ranks can share, those nearest the recipe's first, in
/// order.
fn sizes(spec: &Spec, machine: &Machine, (ranks, nodes): (u64, u64)) -> Result<Vec<u64>, Failure> {
    let t = &spec.train;
    if ranks > nodes * machine.cards {
        return Err(Failure::Usage(format!(
            "{ranks} ranks on {} of {}: {} at the most, one for each card",
            many(nodes.into(), "node"),
            machine.name,
            nodes * machine.cards
        )));
    }
    if ranks > machine.cards && !ranks.is_multiple_of(machine.cards) {
        return Err(Failure::Usage(format!(
            "{ranks} ranks leave cards of a node idle: ask for at most {}, or for a multiple of it",
            machine.cards
        )));
    }
    if let Some(data) = t.parallel.data.filter(|&data| data != ranks) {
        return Err(Failure::Usage(format!(
            "train.parallel.data is {data}, and {ranks} ranks are planned: ask for `--ranks {data}`, or leave `data` out"
        )));
    }
    let fits = |n: &u64| t.batch.is_multiple_of(*n) && n.is_multiple_of(ranks);
    let mut all: Vec<u64> = (ranks..=t.batch).step_by(ranks.max(1) as usize).filter(fits).collect();
    if all.is_empty() {
        let most = (1..=ranks.min(t.batch)).rev().find(|n| t.batch.is_multiple_of(*n)).unwrap_or(1);
        return Err(Failure::Usage(format!(
            "{ranks} ranks cannot share a batch of {} rows equally: {most} can, or set train.batch to a multiple of {ranks}",
            t.batch
        )));
    }
    all.sort_by_key(|n| (n.abs_diff(t.accumulate), *n));
    all.truncate(SIZES);
    all.sort_unstable();
    Ok(all)
}

/// The recipe with a mesh.
fn with(spec: &Spec, asked: Asked) -> Spec {
    let mut spec = spec.clone();
    spec.train.accumulate = asked.accumulate;
    (spec.train.parallel.shard, spec.train.parallel.experts) = (asked.shard, asked.experts);
    spec
}

/// The programs of a rank of a mesh, and its memory.
fn prepared(spec: &Spec, machine: &Machine, asked: Asked, rank: u64) -> Result<(Prepared, Memory), Failure> {
    let (device, target) = match machine.device() {
        Some(device) => (PaperDevice::Gpu(device), Target::of(device)),
        None => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = cores / asked.ranks.min(machine.cards) as usize;
            (PaperDevice::cpu(threads.max(1)), Target::CPU)
        }
    };
    let rewriting = Rewriting { target, ..Rewriting::default() };
    let group = match asked.ranks {
        1 => Group::alone(),
        n => Group::on_paper(rank, n),
    };
    let prepared = prepare(spec, &device, &rewriting, &group, &Formats::default())?;
    let plan = &prepared.compiled.plan;
    let scratch = device.scratch_bytes(plan)?;
    let memory = Memory::of(plan, scratch).taught(prepared.teacher_memory(&device)?.total);
    Ok((prepared, memory))
}

/// Seconds of the launches of a plan on the machine.
fn priced(plan: &Plan, machine: &Machine, ranks: u64) -> Result<Prices, Failure> {
    let mut all = match (machine.device(), machine.shared_rates(ranks)) {
        (Some(device), _) => prices(plan, PaperDevice::architecture(device), device)?,
        (None, Some((rates, launch))) => prices_by_rates(plan, rates, launch)?,
        (None, None) => return Err(Failure::Usage(format!("{} has no rates", machine.name))),
    };
    all.values_mut().flatten().for_each(|seconds| *seconds *= machine.kernels);
    Ok(all)
}

/// The forward of the teacher of a micro-batch, in the mean over all steps; nothing without one.
fn lesson(spec: &Spec, prepared: &Prepared, machine: &Machine, ranks: u64) -> Result<Vec<Work>, Failure> {
    let (Some(heal), Some(teacher)) = (&spec.heal, &prepared.teacher) else { return Ok(vec![]) };
    let share = Taught::flops_over(heal, 1.0, spec.train.steps);
    Ok(forward(teacher.programs(), &priced(teacher.programs(), machine, ranks)?, share))
}

/// The rank with the longest part of what is cut, where something is.
fn longest(steps: &[Step], plan: &Plan) -> Option<u64> {
    listed(steps).find_map(|launch| {
        let parts = match plan.kernel(launch.kernel) {
            Kernel::AllGather(gather) => &gather.parts,
            Kernel::Gathered(gathered) => &gathered.parts,
            _ => return None,
        };
        (0..parts.ranks()).rev().max_by_key(|&rank| parts.of(rank).1)
    })
}

fn offer(
    spec: &Spec,
    machine: &Machine,
    asked: Asked,
    a: &Arguments,
) -> Result<Result<Offer, TooLarge>, Failure> {
    let spec = with(spec, asked);
    let Asked { ranks, shard, experts, accumulate } = asked;
    let (shard_name, rows) = (shard.name(), spec.train.batch / accumulate);
    let large = |memory| TooLarge { shard: shard_name, experts, rows, memory };
    let (prepared, mut memory) = match self::prepared(&spec, machine, asked, 0) {
        Err(Failure::Error(e)) if matches!(e.downcast_ref(), Some(TrainError::Memory(_))) => {
            return Ok(Err(large(0)));
        }
        found => found?,
    };
    let plan = &prepared.compiled.plan;
    let cut = if shard.weights() { ProgramKey::BACKWARD } else { ProgramKey::UPDATE };
    let most = plan.programs.get(&cut).and_then(|program| longest(&program.steps, plan));
    if let Some(rank) = most.filter(|&rank| rank > 0) {
        let other = self::prepared(&spec, machine, asked, rank)?.1;
        if other.total > memory.total {
            memory = other;
        }
    }
    let on_node = ranks.min(machine.cards);
    let room = match machine.device() {
        Some(_) => machine.memory.saturating_sub(BESIDE),
        None => machine.memory / on_node,
    };
    if memory.total > room {
        return Ok(Err(large(memory.total)));
    }
    let mesh = Mesh { machine, ranks, at_once: AT_ONCE };
    let micro_batches = accumulate / ranks;
    let lesson = lesson(&spec, &prepared, machine, ranks)?;
    let work = timeline(plan, &priced(plan, machine, ranks)?, &lesson, micro_batches, &mesh);
    let seconds = mesh.step(&work);
    let simulated = a.simulate.then(|| simulate(&work, &mesh, &|_| 1.0).step);
    let (checkpoint, snapshot, failures) = failing(&prepared, &mesh, a.failure_hours);
    let tokens = (spec.train.batch * prepared.sequence) as f64;
    let hours = spec.train.steps as f64 * seconds.step / (1.0 - failures.share).max(1e-3) / 3600.0;
    let card_hours = hours * ranks as f64;
    let flops = prepared.declared.as_ref().map(|c| c.flops_per_token.training.mean());
    let utilisation = machine
        .device()
        .zip(flops)
        .map(|(device, flops)| flops * tokens / (seconds.step * device.bf16 * ranks as f64));
    Ok(Ok(Offer {
        data: ranks,
        shard: shard_name,
        experts,
        accumulate,
        micro_batches,
        rows,
        memory,
        bytes: mesh.bytes(&work),
        seconds,
        simulated,
        tokens_per_second: tokens / seconds.step,
        utilisation,
        checkpoint,
        snapshot,
        failures,
        hours,
        card_hours,
        cost: a.price.map(|price| price * card_hours),
    }))
}

/// Bytes of a checkpoint, those that rank 0 writes, and the costs of failures. Rank 0 has most: its
/// part of what is cut, and all that is whole.
fn failing(prepared: &Prepared, mesh: &Mesh, hours: Option<f64>) -> (u64, u64, Losses) {
    let machine = mesh.machine;
    let (mut bytes, mut own) = (0u64, 0u64);
    for t in &prepared.compiled.tensors {
        let (all, kept) = (4 * t.shape.iter().product::<u64>(), 4 * (t.kept.end - t.kept.start));
        let states = t.states.len() as u64;
        bytes += all * (1 + states);
        own += if t.cut { kept } else { all };
        own += states * if t.cut || prepared.compiled.cut.states() { kept } else { all };
    }
    let between = hours.map_or(machine.failure_hours / mesh.ranks as f64, |hours| hours) * 3600.0;
    // A step ends when all ranks have copied what they write, and they share one way to storage.
    let (stops, writes) = (own as f64 / machine.copy, bytes as f64 / machine.storage);
    (bytes, own, Job { between, stops, writes, restart: machine.restart }.losses())
}

fn text(r: &Report) -> String {
    let mut t = String::new();
    let cards = match r.machine.device() {
        Some(device) => format!("{} of {}", many(r.ranks.into(), "rank"), device.title),
        None => many(r.ranks.into(), "rank"),
    };
    let _ = writeln!(t, "{} on {}: {cards}, {}", r.model, r.machine.title, many(r.nodes.into(), "node"));
    let _ = writeln!(t, "{} of {} tokens\n", many(r.steps.into(), "step"), grouped(r.tokens.into()));
    let mut rows = vec![
        [
            "mesh",
            "micro-batches",
            "memory",
            "step",
            "exposed",
            "tokens/s",
            "utilisation",
            "hours",
            "card-hours",
        ]
        .map(String::from)
        .to_vec(),
    ];
    rows.extend(r.meshes.iter().map(|o| {
        vec![
            mesh_name(o),
            format!("{} × {}", o.micro_batches, many(o.rows.into(), "row")),
            decimal_bytes(o.memory.total.into()),
            instant(o.seconds.step),
            instant(o.seconds.exposed),
            short(o.tokens_per_second),
            o.utilisation.map_or("".into(), |u| format!("{:.1} %", 100.0 * u)),
            format!("{:.2}", o.hours),
            format!("{:.1}", o.card_hours),
        ]
    }));
    if !r.meshes.is_empty() {
        t += &table(&rows);
    }
    if let Some(least) = r.too_large.iter().min_by_key(|l| l.memory) {
        let _ = writeln!(
            t,
            "  {} do not fit into {}; the smallest, {} with shard {}{}, takes {}",
            r.too_large.len(),
            decimal_bytes(r.machine.memory.into()),
            many(least.rows.into(), "row"),
            least.shard,
            if least.experts > 1 { format!(" and experts {}", least.experts) } else { String::new() },
            if least.memory > 0 {
                decimal_bytes(least.memory.into())
            } else {
                "more than train.memory".into()
            }
        );
    }
    if let Some(best) = r.meshes.first() {
        details(&mut t, r, best);
    }
    let _ = writeln!(t, "\nnot built, and not offered: {}", r.not_built.join("; "));
    let _ = writeln!(
        t,
        "Prices of kernels, links and failures: docs/plan.md; `--json` has the sources of {}.",
        r.machine.name
    );
    t
}

fn mesh_name(o: &Offer) -> String {
    let shard = Some(o.shard).filter(|shard| *shard != Shard::None.name());
    let experts = if o.experts > 1 { format!(", experts {}", o.experts) } else { String::new() };
    format!("data {}{}{experts}", o.data, shard.map_or(String::new(), |shard| format!(", shard {shard}")))
}

fn batches(n: u64) -> String {
    format!("{n} micro-batch{}", if n == 1 { "" } else { "es" })
}

/// The best mesh, line by line.
fn details(t: &mut String, r: &Report, o: &Offer) {
    let m = &r.machine;
    let _ = writeln!(t, "\n{}, {} of {}", mesh_name(o), batches(o.micro_batches), many(o.rows.into(), "row"));
    let mut row = |name: &str, value: String, note: String| {
        let _ = writeln!(t, "{}", format!("    {name:<26}{value:>16}   {note}").trim_end());
    };
    for (name, bytes) in o.memory.kinds() {
        if name == "teacher" && bytes == 0 {
            continue;
        }
        row(name, decimal_bytes(bytes.into()), String::new());
    }
    row("memory of a rank", decimal_bytes(o.memory.total.into()), "as it allocates it".into());
    let b = &o.bytes;
    for (bytes, link, whose) in [
        (b.inside, &m.inside, "sent by each rank in a step"),
        (b.between, &m.between, "sent by each rank in a step"),
        (b.star_sent, m.host(), "sent by rank 0 in a step"),
        (b.star_received, m.host(), "received by rank 0 in a step"),
    ] {
        if bytes > 0 {
            row(&link.name, decimal_bytes(bytes.into()), whose.into());
        }
    }
    row("launches", instant(o.seconds.launches), format!("prices of kernels × {}", m.kernels));
    row("exchanges", instant(o.seconds.exchanges), format!("{} of it exposed", instant(o.seconds.exposed)));
    row("step", instant(o.seconds.step), format!("{} tokens/s", grouped(o.tokens_per_second as u128)));
    if let Some(simulated) = o.simulated {
        row("step, simulated", instant(simulated), "every launch and message".into());
    }
    let f = &o.failures;
    row(
        "checkpoint",
        decimal_bytes(o.checkpoint.into()),
        format!("stops training for {}, is whole after {}", instant(f.stops), instant(f.writes)),
    );
    row("its snapshot", decimal_bytes(o.snapshot.into()), "of the host's memory, rank 0".into());
    row("failures", duration(f.between), "between two of the job, in the mean".into());
    row(
        "best distance",
        duration(f.distance),
        format!("between checkpoints (Daly; Young {})", duration(f.young)),
    );
    row(
        "lost at a failure",
        duration(f.lost),
        format!("{:.2} % of the time is no new work", 100.0 * f.share),
    );
    row("run", duration(3600.0 * o.hours), format!("{:.1} card-hours", o.card_hours));
    if let Some(cost) = o.cost {
        row("cost", format!("{cost:.2}"), "at the price given".into());
    }
}
