//! Where a step's time goes: what every kernel of a plan computes and moves, how long the data
//! sheet gives it, and how long its code should take.
//!
//! *In*: a plan, how often each program runs in a step, an architecture and a device. *Out*:
//! [`Table`], one line for each distinct kernel, the dearest first. *Promise*: multiply-adds are
//! those of [`executed`], which devices are held to; bytes are those of each operand touched, read
//! once and written once; no expected time is less than the data sheet's. Exchanges of GPUs take
//! what [`Network`] gives them.

use super::machine::{Body, Code, Why, read_part};
use super::{STATUS_BYTES, Sources, Trust, cache, launches};
use crate::exchange::Collective;
use crate::staged::Room;
use crate::{DeviceError, executor};
use dreamc_compiler::codegen::{Limits, Source, Variant};
use dreamc_compiler::count::CountError;
use dreamc_compiler::count::device::Device;
use dreamc_compiler::count::executed::{Launched, Turns, executed};
use dreamc_compiler::count::network::Network;
use dreamc_compiler::count::roofline::{Bound, Demand, Rates};
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::kernel::Units;
use dreamc_compiler::program::{
    Kernel, KernelKind, Launch, Operand, Parts, Plan, ProgramKey, Role, Touches, listed,
};
use dreamc_compiler::rewrite::Target;
use std::collections::HashMap;
use std::fmt;
use thiserror::Error;

/// A distinct kernel of a plan; numbers are for all of its launches in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelLine {
    /// The kind and the sizes, as `--emit plan` has them.
    pub kernel: String,
    /// Launches of the plan's kernel.
    pub launches: u128,
    /// Multiplies and adds of matrix products.
    pub flops: f64,
    /// Whether values decide how many, so that `flops` is a bound.
    pub open: bool,
    /// Bytes of operands, read once and written once.
    pub bytes: f64,
    /// Seconds by the rates of the data sheet, below which no code of this kernel goes.
    pub least: f64,
    /// The part that takes them.
    pub bound: Bound,
    /// Seconds that its code should take.
    pub seconds: f64,
    /// Where most of them go.
    pub why: Why,
    /// Blocks, threads of a block and blocks of a processor at once, of the pass with most threads.
    pub launch: (u32, u32, u32),
}

/// The kernels of a step, the dearest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Whose rates these are.
    pub device: &'static Device,
    /// One for each kernel.
    pub lines: Vec<KernelLine>,
    /// Tokens of a step.
    pub tokens: u64,
}

/// Why there is no table.
#[derive(Debug, Error)]
pub enum TableError {
    /// The plan does not count.
    #[error(transparent)]
    Count(#[from] CountError),
    /// A kernel has no text.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A change of the codes that a table prices: of a kernel, by its line, those of its passes.
pub type Recode<'a> = dyn Fn(&str, &mut [Code]) + 'a;

/// The table of a plan. `times`: how often each of its programs runs in a step, which has `tokens`
/// tokens. `registers`: those of each entry of a source where NVRTC was asked
/// ([`registers`](super::registers)).
pub fn table(
    plan: &Plan,
    times: &dyn Fn(ProgramKey) -> u64,
    tokens: u64,
    architecture: &str,
    device: &'static Device,
    registers: &dyn Fn(&Source) -> HashMap<String, u32>,
    recode: &Recode,
) -> Result<Table, TableError> {
    let mut lines: Vec<KernelLine> = vec![];
    let mut known: HashMap<(u32, Option<usize>), usize> = HashMap::new();
    each_line(plan, times, architecture, device, registers, recode, &mut |_, key, line| {
        let at = *known.entry(key).or_insert(lines.len());
        match lines.get_mut(at) {
            Some(sum) => sum.add(&line),
            None => lines.push(line),
        }
    })?;
    lines.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.kernel.cmp(&b.kernel)));
    Ok(Table { device, lines, tokens })
}

/// Seconds of one launch of each of the list of every program, by the code of its kernel; 0 for
/// collectives, which the code says nothing of, and for what runs nothing.
pub fn prices(
    plan: &Plan,
    architecture: &str,
    device: &'static Device,
) -> Result<HashMap<ProgramKey, Vec<f64>>, TableError> {
    let mut all: HashMap<ProgramKey, Vec<f64>> = plan
        .programs
        .iter()
        .map(|(key, program)| (*key, vec![0.0; listed(&program.steps).count()]))
        .collect();
    each_line(plan, &|_| 1, architecture, device, &|_| HashMap::new(), &|_, _| {}, &mut |place, _, line| {
        let own = all.get_mut(&place.0).and_then(|list| list.get_mut(place.1));
        if let (Some(own), false) = (own, line.why == Why::Network) {
            *own = line.seconds / line.launches as f64;
        }
    })?;
    Ok(all)
}

/// The same by rates alone, with `launch` seconds for whatever a launch does: of a CPU, whose
/// kernels no table knows.
pub fn prices_by_rates(
    plan: &Plan,
    rates: Rates,
    launch: f64,
) -> Result<HashMap<ProgramKey, Vec<f64>>, TableError> {
    let turns = Turns::of(plan);
    let of = |key: ProgramKey| -> Result<Vec<f64>, TableError> {
        let counted = executed(plan, key, &|launch| turns.even(plan, launch))?;
        let list: Vec<&Launch> = listed(&plan.programs[&key].steps).collect();
        let seconds = list.into_iter().zip(&counted.launches).map(|(own, counted)| {
            match Collective::of(plan.kernel(own.kernel)) {
                Some(_) => 0.0,
                None => launch + rates.time(demand(plan, own, counted)).seconds,
            }
        });
        Ok(seconds.collect())
    };
    plan.programs.keys().map(|&key| Ok((key, of(key)?))).collect()
}

/// A program and the number of a launch in its list.
type Listing = (ProgramKey, usize);

/// Gets the place of a launch, its kernel and text, and its line.
type Each<'a> = dyn FnMut(Listing, (u32, Option<usize>), KernelLine) + 'a;

/// Prices the launches of all programs that run, in the order of the list.
fn each_line(
    plan: &Plan,
    times: &dyn Fn(ProgramKey) -> u64,
    architecture: &str,
    device: &'static Device,
    registers: &dyn Fn(&Source) -> HashMap<String, u32>,
    recode: &Recode,
    each: &mut Each,
) -> Result<(), TableError> {
    let target = Target::of(device);
    let all = launches(plan, &executor::list(plan)?, variant(architecture, device));
    let sources = Sources::new("cuda", &all, &Trust::default())?;
    let codes = |source: &Source, share: f64| -> Vec<Code> {
        let counted = registers(source);
        source.passes.iter().map(|p| read_part(source, p, counted.get(&p.entry).copied(), share)).collect()
    };
    let whole: Vec<Vec<Code>> = sources.list.iter().map(|source| codes(source, 1.0)).collect();
    let turns = Turns::of(plan);
    let mut variants = all.iter();
    for (&program, steps) in &plan.programs {
        let often = times(program);
        let counted = executed(plan, program, &|launch| turns.even(plan, launch))?;
        for (number, (launch, counted)) in listed(&steps.steps).zip(&counted.launches).enumerate() {
            let Some(own) = variants.next() else { continue };
            if often == 0 || counted.times == 0 {
                continue;
            }
            let source = sources.by_kernel.get(&(own.id, own.variant)).copied().flatten();
            let name = plan.kernel(launch.kernel).to_string();
            let line = match (source, Collective::of(plan.kernel(launch.kernel))) {
                (Some(number), _) => {
                    let mut codes = match share(plan.kernel(launch.kernel), counted) {
                        share if share < 1.0 => codes(&sources.list[number], share),
                        _ => whole[number].clone(),
                    };
                    recode(&name, &mut codes);
                    let of = &sources.list[number];
                    of_launch(plan, launch, counted, often, (of, &codes), &target, device)
                }
                (None, Some(collective)) => {
                    exchanged(collective, name, counted.times * u128::from(often), device)
                }
                // Nothing to run.
                (None, None) => continue,
            };
            each((program, number), (launch.kernel.0, source), line);
        }
    }
    Ok(())
}

/// The texts of kernels for an architecture, on a GPU that is not here.
fn variant(architecture: &str, device: &Device) -> Variant {
    Variant { limits: Limits::of(device), ..cache::texts(architecture) }
}

/// Bytes outside the arena of a plan on a GPU that is not here: scratch, where products may be
/// those of cuBLASLt as much as its documentation recommends, the status word, and what ranks have
/// under way.
pub(crate) fn scratch_on_paper(
    plan: &Plan,
    architecture: &str,
    device: &'static Device,
) -> Result<u64, DeviceError> {
    let all = launches(plan, &executor::list(plan)?, variant(architecture, device));
    let sources = Sources::new(device.name, &all, &Trust::default())?;
    Ok(sources.scratch(&all, None) + STATUS_BYTES + Room::of(plan).bytes())
}

/// The line of a collective, by the α–β model.
fn exchanged(collective: Collective, kernel: String, launches: u128, device: &Device) -> KernelLine {
    let network = Network::of(device);
    let bytes = |elements: u64| (elements * DType::F32.bytes()) as f64;
    let bytes = bytes(collective.elements());
    let once = match (collective, collective.owners(), collective.parts()) {
        (Collective::Sum(sum), ..) => network.all_reduce(sum.ranks, bytes),
        (Collective::Pooled(_), Some(owners), _) => {
            network.all_reduce(owners.ranks / owners.team.max(1), bytes)
        }
        (_, Some(owners), _) => network.half(owners.team, bytes),
        (_, None, parts) => network.half(parts.map_or(1, Parts::ranks), bytes),
    };
    let times = launches as f64;
    KernelLine {
        kernel,
        launches,
        flops: 0.0,
        open: false,
        bytes: bytes * times,
        least: once * times,
        bound: Bound::Network,
        seconds: once * times,
        why: Why::Network,
        launch: (0, 0, 0),
    }
}

/// Work that one launch asks of a device.
pub(super) fn demand(plan: &Plan, launch: &Launch, counted: &Launched) -> Demand {
    let times = counted.times.max(1) as f64;
    Demand {
        flops: 2.0 * counted.multiply_adds as f64 / times,
        narrow: reads(plan, launch, DType::Bf16),
        codes: reads(plan, launch, DType::E4m3),
        bytes: moved(plan, launch, counted),
        elementwise: counted.elementwise as f64 / times,
    }
}

/// Whether its first operand is of that type, and so what it multiplies.
fn reads(plan: &Plan, launch: &Launch, dtype: DType) -> bool {
    match launch.operands.first() {
        Some(Operand::Tensor { buffer, .. }) => plan.buffer(*buffer).dtype == dtype,
        _ => false,
    }
}

impl KernelLine {
    fn add(&mut self, other: &KernelLine) {
        self.launches += other.launches;
        self.flops += other.flops;
        self.open |= other.open;
        self.bytes += other.bytes;
        self.seconds += other.seconds;
        self.least += other.least;
    }
}

fn of_launch(
    plan: &Plan,
    launch: &Launch,
    counted: &Launched,
    often: u64,
    (source, codes): (&Source, &[Code]),
    target: &Target,
    device: &Device,
) -> KernelLine {
    let kernel = plan.kernel(launch.kernel);
    let launches = counted.times * u128::from(often);
    let one = demand(plan, launch, counted);
    let times = launches as f64;
    let (flops, bytes, elementwise) = (one.flops * times, one.bytes * times, one.elementwise * times);
    let sheet = device.rates().time(Demand { flops, bytes, elementwise, ..one });
    // Products by tiles and in attention are priced by their code, others are arithmetic of
    // threads.
    let multiplies = |code: &&Code| matches!(code.body, Body::Tiles(_) | Body::Attention(_));
    let by_threads = if codes.iter().any(|c| multiplies(&c)) { 0.0 } else { flops };
    let reached = target.rates.time(Demand { flops: by_threads, bytes, elementwise, ..Demand::default() });
    let each = counted.multiply_adds as f64 / counted.times as f64;
    let passes: Vec<_> = codes.iter().map(|code| code.estimate(each, device)).collect();
    let repeated = launches as f64 * f64::from(source.iterations);
    let by_code = passes.iter().map(|e| e.seconds).sum::<f64>() * repeated;
    let longest = passes.iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let (seconds, why) = match longest {
        Some(estimate) if by_code > reached.seconds => (by_code, estimate.why),
        _ => (
            reached.seconds,
            match reached.bound {
                Bound::TensorCores | Bound::Codes => Why::TensorCores,
                Bound::F32 => Why::Cores,
                Bound::Memory => Why::Memory,
                Bound::Elementwise => Why::Elementwise,
                Bound::Network => Why::Network,
            },
        ),
    };
    let most = codes.iter().zip(&passes).max_by(|a, b| a.0.threads().total_cmp(&b.0.threads()));
    KernelLine {
        kernel: kernel.to_string(),
        launches,
        flops,
        open: counted.open,
        bytes,
        least: sheet.seconds,
        bound: sheet.bound,
        seconds: seconds.max(sheet.seconds),
        why,
        launch: most.map_or((0, 0, 0), |(code, e)| (code.grid as u32, code.block, e.resident)),
    }
}

/// The part of its slots that a launch multiplies.
fn share(kernel: &Kernel, counted: &Launched) -> f64 {
    let work = kernel.work();
    let Units::Slots { slots, .. } = work.units else { return 1.0 };
    let all = counted.times as f64 * slots as f64 * work.each.multiply_adds as f64;
    if all > 0.0 { counted.multiply_adds as f64 / all } else { 1.0 }
}

/// Bytes of a launch's operands as far as it touches them.
fn moved(plan: &Plan, launch: &Launch, counted: &Launched) -> f64 {
    let mut bytes = 0.0;
    let kernel = plan.kernel(launch.kernel);
    let (share, slots) = match kernel.work().units {
        Units::Slots { slots, .. } => (share(kernel, counted), slots),
        _ => (1.0, 0),
    };
    for (slot, operand) in kernel.signature().iter().zip(&launch.operands) {
        let Operand::Tensor { buffer, .. } = operand else { continue };
        let all = slot.shape.iter().map(|&n| n as f64).product::<f64>();
        let elements = match slot.touches {
            // Of rows that are read in order, those of slots that are used.
            Touches::All
                if slot.role == Role::Input && matches!(slot.shape[..], [rows, _] if rows == slots) =>
            {
                all * share
            }
            Touches::All => all,
            Touches::AtMost(elements) => all.min(elements as f64),
            Touches::Share(of) => all * counted.multiply_adds as f64 / counted.times as f64 / of as f64,
        };
        let both = match slot.role {
            Role::Input | Role::Result => 1.0,
            Role::Accumulated | Role::Updated => 2.0,
        };
        let dtype = plan.buffer(*buffer).dtype;
        bytes += both * elements * dtype.bytes() as f64 / dtype.unit() as f64;
    }
    bytes
}

impl Table {
    /// Seconds of a step: what the code of each kernel should take.
    pub fn seconds(&self) -> f64 {
        self.lines.iter().map(|l| l.seconds).sum()
    }

    /// The same by the rates of the data sheet: no program of these kernels takes less.
    pub fn least(&self) -> f64 {
        self.lines.iter().map(|l| l.least).sum()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let total = self.seconds();
        writeln!(
            f,
            "{:>10} {:>6}  {:<12} {:>10}  {:<11} {:>8} {:>11} {:>10} {:>16} {:>9}  kernel",
            "ms",
            "share",
            "why",
            "least ms",
            "bound",
            "launches",
            "GFLOP",
            "MB",
            "blocks×threads",
            "resident"
        )?;
        for l in &self.lines {
            let flops = format!("{}{:.1}", if l.open { "≤" } else { "" }, l.flops / 1e9);
            let grid = format!("{}×{}", l.launch.0, l.launch.1);
            writeln!(
                f,
                "{:>10.3} {:>5.1}%  {:<12} {:>10.3}  {:<11} {:>8} {:>11} {:>10.1} {:>16} {:>9}  {}",
                1e3 * l.seconds,
                100.0 * l.seconds / total.max(f64::MIN_POSITIVE),
                l.why,
                1e3 * l.least,
                l.bound,
                l.launches,
                flops,
                l.bytes / 1e6,
                grid,
                l.launch.2,
                l.kernel
            )?;
        }
        let flops: f64 = self.lines.iter().map(|l| l.flops).sum();
        let bytes: f64 = self.lines.iter().map(|l| l.bytes).sum();
        let launches: u128 = self.lines.iter().map(|l| l.launches).sum();
        writeln!(
            f,
            "\n{}: {:.1} TFLOP, {:.1} GB, {launches} launches for {} tokens",
            self.device.title,
            flops / 1e12,
            bytes / 1e9,
            self.tokens
        )?;
        for (what, seconds) in
            [("expected of this code", total), ("by the data sheet, at least", self.least())]
        {
            writeln!(
                f,
                "  {what:<28} {:>9.1} ms {:>12.0} tokens/s {:>6.1}% of its bf16 products",
                1e3 * seconds,
                self.tokens as f64 / seconds.max(f64::MIN_POSITIVE),
                100.0 * flops / (seconds.max(f64::MIN_POSITIVE) * self.device.bf16)
            )?;
        }
        Ok(())
    }
}
