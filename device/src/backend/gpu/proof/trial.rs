//! A trial: a plan as a process needs it that knows addresses and texts, and no kernels.

use super::Trust;
use super::{Outcome, Rung, Verdict};
use crate::backend::Value;
use crate::backend::gpu::{Compiler, PlanLaunch, Sources, distinct, launches, table};
use crate::exchange::Collective;
use crate::executor::{self, Place};
use crate::{DeviceError, agree};
use dreamc_compiler::codegen::{Language, Source, Variant};
use dreamc_compiler::count::device::Device;
use dreamc_compiler::count::executed::{Launched, executed};
use dreamc_compiler::ir::{Attention, DType, Extents};
use dreamc_compiler::op::choose::Measure;
use dreamc_compiler::program::{
    AttentionShape, Buffer, Kernel, KernelKind, Launch, Layout, Operand, Plan, ProgramKey, Space, listed,
};
use serde::{Deserialize, Serialize};

/// Texts, launches, and what memory holds at the beginning.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Trial {
    /// Bytes of the arena.
    pub(super) arena: u64,
    /// Bytes of weights that stay as their file has them.
    pub(super) mapped: u64,
    /// Numbers written before anything runs; all else is zero.
    pub(super) fills: Vec<Fill>,
    /// Packed weights, likewise.
    pub(super) blocks: Vec<Blocks>,
    /// Sources of all rungs.
    pub(super) sources: Vec<Source>,
    /// The distinct launches.
    pub(super) distinct: Vec<Distinct>,
    /// The launches, in the order in which they take place.
    pub(super) steps: Vec<Step>,
    /// Distinct launches that are not to be proved.
    pub(super) known: Vec<usize>,
    /// Rungs that are not to run.
    pub(super) without: Vec<(usize, Rung)>,
}

/// A launch and its texts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Distinct {
    /// Layer and operation.
    origin: String,
    /// Kind and sizes.
    kernel: String,
    /// Its rungs, best first, and the source of each.
    pub(super) rungs: Vec<(Rung, usize)>,
    /// Seconds of a launch by the data sheet; 0 where the GPU is in no table.
    least: f64,
}

/// A launch that takes place.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Step {
    /// Which of the distinct ones.
    pub(super) distinct: usize,
    pub(super) operands: Vec<Number>,
    pub(super) places: Option<u64>,
    /// Buffers that it writes; empty where the launch was proved by an earlier step.
    pub(super) written: Vec<Range>,
    /// The beginning of what it reads.
    pub(super) read: Vec<Range>,
}

/// An operand, as kernels are given it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Number {
    /// A place in the arena, and elements from row to row.
    Tensor(u64, u64),
    /// An integer.
    Index(u64),
}

impl From<Value> for Number {
    fn from(value: Value) -> Self {
        match value {
            Value::Tensor { at, stride, .. } => Number::Tensor(at, stride),
            Value::Index(index) => Number::Index(index),
        }
    }
}

impl From<Number> for Value {
    /// Types are in the texts.
    fn from(number: Number) -> Self {
        match number {
            Number::Tensor(at, stride) => Value::Tensor { at, stride, dtype: DType::F32 },
            Number::Index(index) => Value::Index(index),
        }
    }
}

/// The type of numbers of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Type {
    F32,
    Bf16,
    I32,
}

impl Type {
    fn of(dtype: DType) -> Option<Type> {
        match dtype {
            DType::F32 => Some(Type::F32),
            DType::Bf16 => Some(Type::Bf16),
            // Codes are found exactly: they are equal or not, as integers are.
            DType::I32 | DType::E4m3 => Some(Type::I32),
            DType::Packed(_) => None,
        }
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Type::F32 | Type::I32 => 4,
            Type::Bf16 => 2,
        }
    }
}

/// Numbers of a buffer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Range {
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) dtype: Type,
    pub(super) name: String,
    /// How far two rungs may be apart.
    pub(super) bound: f64,
}

/// Numbers that memory holds at the beginning.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Fill {
    pub(super) at: u64,
    pub(super) elements: u64,
    pub(super) dtype: Type,
    pub(super) with: With,
}

/// Packed weights that memory holds at the beginning.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Blocks {
    /// Where, of the plan.
    pub(super) at: u64,
    pub(super) elements: u64,
    /// Name of the format.
    pub(super) format: String,
    /// Numbers of a row.
    pub(super) row: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum With {
    /// Floats around a centre, and how far from it at most.
    Around(f32, f32),
    /// Integers below a bound.
    Below(u64),
    /// The number of an element in its row of this length.
    Counted(u64),
    /// Three documents in each row of this length.
    Documents(u64),
}

impl Trial {
    /// The trial of some programs of a plan, for the GPU that a compiler compiles for; `sheet`: its
    /// data sheet, where it is in a table; `most`: multiply-adds of a naive kernel that
    /// is waited for.
    pub(crate) fn of(
        plan: &Plan,
        programs: &[ProgramKey],
        compiler: &Compiler,
        (sheet, most): (Option<&'static Device>, f64),
    ) -> Result<Trial, DeviceError> {
        let chosen = programs.iter().filter_map(|key| plan.programs.get_key_value(key));
        let plan =
            Plan { programs: chosen.map(|(key, program)| (*key, program.clone())).collect(), ..plan.clone() };
        let listed = executor::list(&plan)?;
        let texts = compiler.texts();
        let planned = launches(&plan, &listed, texts);
        let mut trial = Trial {
            arena: plan.arena,
            mapped: plan.mapped,
            fills: fills(&plan),
            blocks: blocks(&plan),
            sources: vec![],
            distinct: vec![],
            steps: vec![],
            known: vec![],
            without: vec![],
        };
        let rungs = trial.rungs(&planned, texts)?;
        let mut first = 0;
        for (listed, (&key, program)) in listed.iter().zip(&plan.programs) {
            let least = least(&plan, key, sheet);
            let costs = costs(&plan, key);
            let mut known: Vec<Option<usize>> = vec![None; listed.launches.len()];
            for (number, launch) in agree::unrolled(program) {
                let kernel = plan.kernel(launch.kernel);
                // A thread for each element takes hours over the largest: the rung above it is
                // held against the one between.
                let rungs: Vec<(Rung, usize)> = rungs[first + number]
                    .iter()
                    .copied()
                    .filter(|(rung, _)| *rung != Rung::Naive || costs.get(number).is_none_or(|&c| c <= most))
                    .collect();
                if rungs.is_empty() || Collective::of(kernel).is_some() {
                    continue;
                }
                let slots = kernel.signature();
                let places = launch.operands.iter().zip(&slots).map(|(o, slot)| Place::of(&plan, o, slot));
                let known = &mut known[number];
                let same =
                    || trial.distinct.iter().position(|d| d.rungs == rungs && d.kernel == kernel.to_string());
                let before = known.or_else(same);
                let (written, read) =
                    if before.is_some() { (vec![], vec![]) } else { touched(&plan, &launch) };
                let distinct = before.unwrap_or_else(|| {
                    trial.distinct.push(Distinct {
                        origin: launch.origin.clone(),
                        kernel: kernel.to_string(),
                        rungs: rungs.clone(),
                        least: least.get(number).copied().unwrap_or(0.0),
                    });
                    trial.distinct.len() - 1
                });
                *known = Some(distinct);
                trial.steps.push(Step {
                    distinct,
                    operands: places.map(|place| place.at(&[]).into()).collect(),
                    places: launch.places.as_ref().map(|o| {
                        let slot = dreamc_compiler::op::kernel::ints("places", &[]);
                        Place::of(&plan, o, &slot).at(&[]).at()
                    }),
                    written,
                    read,
                });
            }
            first += listed.launches.len();
        }
        Ok(trial)
    }

    /// The rungs of each launch of the list, best first; nothing where nothing runs.
    fn rungs(
        &mut self,
        planned: &[PlanLaunch],
        texts: Variant,
    ) -> Result<Vec<Vec<(Rung, usize)>>, DeviceError> {
        let mut all: Vec<Vec<(Rung, usize)>> = vec![vec![]; planned.len()];
        let variants = [
            (Rung::Hopper, texts),
            (Rung::Common, Variant { hopper: false, ..texts }),
            (Rung::Naive, Variant { hopper: false, naive: true, ..texts }),
        ];
        for (rung, texts) in variants {
            let other: Vec<PlanLaunch> = planned
                .iter()
                .map(|p| PlanLaunch {
                    variant: Variant { hopper: texts.hopper, naive: texts.naive, ..p.variant },
                    ..*p
                })
                .collect();
            let sources = Sources::new("cuda", &other, &Trust::default())?;
            let begin = self.sources.len();
            for (rungs, launch) in all.iter_mut().zip(&other) {
                let found = sources.by_kernel.get(&(launch.id, launch.variant)).copied().flatten();
                let Some(number) = found else { continue };
                // Without anything of Hopper's own the best text is the common one.
                let own = sources.list[number].language == Language::Hopper;
                let rung = if rung == Rung::Hopper && !own { Rung::Common } else { rung };
                if rungs.iter().all(|(known, _)| *known != rung) {
                    rungs.push((rung, begin + number));
                }
            }
            self.sources.extend(sources.list);
        }
        Ok(all)
    }

    /// Sources of all rungs, each text once.
    pub(super) fn texts(&self) -> Vec<&Source> {
        distinct(&self.sources).0.into_iter().map(|i| &self.sources[i]).collect()
    }

    /// Sources of all rungs.
    pub(crate) fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Layer and operation of a distinct launch.
    pub fn origin(&self, launch: usize) -> &str {
        self.distinct.get(launch).map_or("", |d| &d.origin)
    }

    /// Kind and sizes of a distinct launch.
    pub fn kernel(&self, launch: usize) -> &str {
        self.distinct.get(launch).map_or("", |d| &d.kernel)
    }

    /// How many distinct launches there are.
    pub fn launches(&self) -> usize {
        self.distinct.len()
    }

    /// The share of the data sheet's rates that a verdict shows.
    pub fn share(&self, verdict: &Verdict) -> Option<f64> {
        let least = self.distinct.get(verdict.launch)?.least;
        match verdict.outcome {
            Outcome::Ran { seconds, .. } if seconds > 0.0 && least > 0.0 => Some(least / seconds),
            _ => None,
        }
    }

    /// Text and headers of a rung, for a report.
    pub fn text(&self, launch: usize, rung: Rung) -> Option<&str> {
        let rungs = &self.distinct.get(launch)?.rungs;
        let (_, source) = rungs.iter().find(|(r, _)| *r == rung)?;
        Some(&self.sources.get(*source)?.text)
    }
}

/// Multiply-adds that a GPU's threads make in the time of one that a thread makes alone: 44 s for
/// the norm of 1.2 billion gradients on an H200.
const ALONE: f64 = 4e3;

/// Multiply-adds of the naive kernel of each launch of a program's list: attention finds every
/// score again for each element of a head, and looks a list through for each key; a choice finds
/// all scores again for each block; the gradient of scores searches every list for each element of
/// a key; the gradient of an embedding looks at all ids, and one thread sums a norm.
fn costs(plan: &Plan, program: ProgramKey) -> Vec<f64> {
    let Ok(counted) = executed(plan, program, &|_| Extents::default()) else { return vec![] };
    let Some(list) = plan.programs.get(&program) else { return vec![] };
    let of = |(launch, counted): (&Launch, &Launched)| {
        let kernel = plan.kernel(launch.kernel);
        let once = counted.multiply_adds as f64 / counted.times.max(1) as f64;
        let looks = |s: &AttentionShape, a: &Attention| {
            let elements = (s.batch * s.queries * s.heads * s.size) as f64;
            a.among.map_or(0.0, |among| elements * s.keys as f64 * among.count as f64)
        };
        if let Kernel::Attention(a) = kernel {
            once * a.shape.size as f64 + looks(&a.shape, &a.attention)
        } else if let Kernel::AttentionGrad(a) = kernel {
            2.0 * once * a.shape.size as f64 + 2.0 * looks(&a.shape, &a.attention)
        } else if let Kernel::ChooseKeys(c) = kernel {
            let (s, count) = (&c.shape, c.count as f64);
            let again = if c.measure == Measure::Softmax { 2.0 * s.keys as f64 } else { 1.0 };
            let found = s.heads as f64 * s.size as f64 * again / c.block() as f64;
            let rows = (s.batch * s.queries) as f64;
            // A thread for each list.
            let alone = (ALONE / (rows * c.lists as f64)).max(1.0);
            alone * rows * s.keys as f64 * count * (c.lists as f64 * count + found)
        } else if let Kernel::KeyScoresGrad(g) = kernel {
            let (s, count) = (&g.scores.shape, g.scores.seen.among.map_or(1, |among| among.count));
            let searched = (s.batch * s.keys * s.queries * s.heads * s.size) as f64;
            once * s.size as f64 + searched * f64::from(count.ilog2() + 1)
        } else if let Kernel::EmbedGrad(e) = kernel {
            e.rows as f64 * e.vocab as f64 * e.width as f64
        } else if let Kernel::Norm(norm) = kernel {
            ALONE * norm.elements as f64
        } else {
            once
        }
    };
    listed(&list.steps).zip(&counted.launches).map(of).collect()
}

/// Seconds of each launch of a program's list by the data sheet.
fn least(plan: &Plan, program: ProgramKey, sheet: Option<&'static Device>) -> Vec<f64> {
    let Some(sheet) = sheet else { return vec![] };
    let Ok(counted) = executed(plan, program, &|_| Extents::default()) else { return vec![] };
    let Some(list) = plan.programs.get(&program) else { return vec![] };
    let launches: Vec<&Launch> = listed(&list.steps).collect();
    launches
        .into_iter()
        .zip(&counted.launches)
        .map(|(launch, counted)| sheet.rates().time(table::demand(plan, launch, counted)).seconds)
        .collect()
}

/// Bytes of what a launch reads that are looked at.
const LOOK: u64 = 1 << 20;

/// Buffers that a launch writes whose loop variables are filled in, whole instances of them, and
/// the beginning of what it reads.
fn touched(plan: &Plan, launch: &Launch) -> (Vec<Range>, Vec<Range>) {
    let kernel = plan.kernel(launch.kernel);
    let narrow = launch.operands.iter().any(|o| match o {
        Operand::Tensor { buffer, .. } => matches!(plan.buffer(*buffer).dtype, DType::Bf16 | DType::E4m3),
        Operand::Index(_) => false,
    });
    let (mut written, mut read): (Vec<Range>, Vec<Range>) = (vec![], vec![]);
    for (slot, operand) in kernel.signature().iter().zip(&launch.operands) {
        let Operand::Tensor { buffer, instance, .. } = operand else { continue };
        let b = plan.buffer(*buffer);
        let (Some(dtype), false) = (Type::of(b.dtype), b.space == Space::Mapped) else { continue };
        let one = b.dtype.room(b.elements());
        let (first, instances) = match slot.layout {
            // The rows of all depths so far.
            Layout::UpTo(_) => (0, b.instances),
            Layout::Dense | Layout::Rows(_) | Layout::Matrix(_) | Layout::Index(_) => (instance.at(&[]), 1),
        };
        let (at, bytes) = (b.offset + first * one, instances * one);
        let range = Range { at, bytes, dtype, name: b.name.clone(), bound: bound(dtype, narrow) };
        if !slot.role.writes() {
            read.push(Range { bytes: bytes.min(LOOK), ..range });
        } else if written.iter().all(|r| r.at != at) {
            written.push(range);
        }
    }
    (written, read)
}

/// How far two kernels may be apart that add up the same numbers in other orders, or round them to
/// bf16 on the way (2^-9 of each; of some the difference is taken afterwards).
fn bound(dtype: Type, narrow: bool) -> f64 {
    match (dtype, narrow) {
        (Type::I32, _) => 0.0,
        (Type::F32 | Type::Bf16, true) => 2e-2,
        (Type::F32 | Type::Bf16, false) => 1e-4,
    }
}

/// Numbers of a step: weights as large as they are at first, tokens, positions, documents.
fn fills(plan: &Plan) -> Vec<Fill> {
    let vocab = plan
        .kernels
        .iter()
        .find_map(|kernel| if let Kernel::Embed(embed) = kernel { Some(embed.vocab) } else { None });
    let of = |b: &Buffer| {
        let row = b.shape.last().copied().unwrap_or(1).max(1);
        let with = match (b.space, b.dtype) {
            (Space::Weights, DType::F32 | DType::Bf16) if b.shape.len() < 2 => With::Around(1.0, 0.25),
            (Space::Weights, DType::F32 | DType::Bf16) => With::Around(0.0, (3.0 / row as f32).sqrt()),
            (Space::Gradients, DType::F32 | DType::Bf16) => With::Around(0.0, 0.01),
            // Second moments are not negative.
            (Space::Optimizer, DType::F32 | DType::Bf16) => With::Around(1e-3, 5e-4),
            (Space::Io, DType::F32) => With::Around(scalar(&b.name), 0.0),
            (Space::Io, DType::I32) => match b.name.as_str() {
                "ids" | "targets" => With::Below(vocab.unwrap_or(2)),
                "segments" => With::Documents(row),
                "draws" => With::Below(1 << 31),
                _ => With::Counted(row),
            },
            _ => return None,
        };
        let dtype = Type::of(b.dtype)?;
        Some(Fill { at: b.offset, elements: b.elements() * b.instances, dtype, with })
    };
    plan.buffers.iter().filter_map(of).collect()
}

/// The packed weights of a plan.
fn blocks(plan: &Plan) -> Vec<Blocks> {
    let of = |b: &Buffer| {
        let DType::Packed(packed) = b.dtype else { return None };
        let row = b.shape.last().copied()?;
        let elements = b.elements() * b.instances;
        Some(Blocks { at: b.offset, elements, format: packed.name().into(), row })
    };
    plan.buffers.iter().filter_map(of).collect()
}

/// A step's scalars far from the beginning of training; gradients are as large as a token's.
fn scalar(name: &str) -> f32 {
    match name {
        "learning_rate" => 1e-3,
        "first_correction" => 10.0,
        "second_correction" => 1000.0,
        _ => 1.0,
    }
}
