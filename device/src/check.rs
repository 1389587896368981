//! Conditions that a plan must meet for any device to run it.
//!
//! *In*: a [`Plan`]. *Out*: [`Checked`], or the first [`PlanError`]. *Promise*: in a plan that
//! passes, every operand of every launch has the type its kernel asks for and is inside its buffer
//! for all values of the loop variables, what a launch writes overlaps nothing else it touches (but
//! see [`LaunchCheck::in_place`]), and every kernel's own numbers are consistent. Devices rely on
//! it and check nothing again but integers in memory.
//!
//! The operands of a kernel are those of its [`signature`](KernelKind::signature).

use super::exchange::Collective;
use dreamc_compiler::format::Format;
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::kernel::{ints, times};
use dreamc_compiler::program::{
    ALIGNMENT, Affine, Buffer, KernelKind, Launch, Layout, MAPPED, Operand, Plan, ProgramKey, Slot, Space,
    Step, Storage,
};
use thiserror::Error;

/// Why a plan cannot be run.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PlanError {
    /// A buffer that is not in the arena.
    #[error("buffer `{buffer}`: {problem}")]
    Buffer {
        /// Its name.
        buffer: String,
        /// The mistake.
        problem: String,
    },
    /// A kernel whose numbers do not fit together.
    #[error("kernel {kernel}: {problem}")]
    Kernel {
        /// Its number.
        kernel: usize,
        /// The mistake.
        problem: String,
    },
    /// A loop that is not well formed.
    #[error("program `{program}`: {problem}")]
    Loop {
        /// The program.
        program: ProgramKey,
        /// The mistake.
        problem: String,
    },
    /// A launch whose operands do not fit its kernel.
    #[error("program `{program}`, {origin}: {problem}")]
    Launch {
        /// The program.
        program: ProgramKey,
        /// Origin of the launch.
        origin: String,
        /// The mistake.
        problem: String,
    },
}

/// Facts about a plan that passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// One entry for each launch of the lists, programs and launches in order, whatever loops they
    /// stand in.
    pub launches: Vec<LaunchCheck>,
}

/// Facts about a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchCheck {
    /// A row kernel that writes some rows over the very rows it reads: a row's inputs must be read
    /// before its outputs are written. No other kernel may do so.
    pub in_place: bool,
}

/// Checks a whole plan.
pub fn check(plan: &Plan) -> Result<Checked, PlanError> {
    for buffer in &plan.buffers {
        check_buffer(plan, buffer)
            .map_err(|problem| PlanError::Buffer { buffer: buffer.name.clone(), problem: problem.into() })?;
    }
    for (kernel, k) in plan.kernels.iter().enumerate() {
        k.check().map_err(|problem| PlanError::Kernel { kernel, problem })?;
    }
    let gradients =
        plan.buffers.iter().filter(|b| b.space == Space::Gradients).map(|b| b.offset + b.bytes()).max();
    let mut checker =
        Checker { plan, gradients: gradients.unwrap_or(0), checked: Checked::default(), counts: vec![] };
    for (&key, program) in &plan.programs {
        checker.counts = vec![None; program.variables as usize];
        checker.steps(key, &program.steps)?;
    }
    Ok(checker.checked)
}

fn check_buffer(plan: &Plan, buffer: &Buffer) -> Result<(), &'static str> {
    let size = buffer
        .shape
        .iter()
        .chain([&buffer.instances])
        .try_fold(1u64, |p, &f| p.checked_mul(f))
        .and_then(|numbers| Format { dtype: buffer.dtype }.bytes(numbers))
        .ok_or("its size does not fit in 64 bits")?;
    // A range of other buffers begins at any element of theirs.
    let alignment = if buffer.space == Space::Alias { buffer.dtype.bytes() } else { ALIGNMENT };
    if !buffer.offset.is_multiple_of(alignment) {
        return Err("it is not aligned");
    }
    if buffer.space == Space::Spread {
        return Ok(());
    }
    let (first, end) = match buffer.space {
        Space::Mapped => (MAPPED, MAPPED.saturating_add(plan.mapped)),
        _ => (0, plan.arena.min(MAPPED)),
    };
    match buffer.offset.checked_add(size) {
        Some(last) if buffer.offset >= first && last <= end && last <= isize::MAX as u64 => Ok(()),
        _ => Err("it lies beyond the arena"),
    }
}

/// Range of an operand, in bytes from the start of the arena, as far as it does not depend on
/// data.
struct Reach<'s> {
    slot: &'s Slot,
    /// First byte where all variables are 0.
    base: u64,
    /// Bytes per instance, and the instance.
    instance: (&'s Affine, u64),
    rows: u64,
    stride: u64,
    length: u64,
}

struct Checker<'p> {
    plan: &'p Plan,
    /// First byte after all gradients.
    gradients: u64,
    checked: Checked,
    /// How often each open loop runs.
    counts: Vec<Option<u64>>,
}

impl<'p> Checker<'p> {
    fn steps(&mut self, program: ProgramKey, steps: &'p [Step]) -> Result<(), PlanError> {
        for step in steps {
            match step {
                Step::Launch(launch) => {
                    let checked = self.launch(launch).map_err(|problem| PlanError::Launch {
                        program,
                        origin: launch.origin.clone(),
                        problem,
                    })?;
                    self.checked.launches.push(checked);
                }
                Step::Loop { variable, count, steps, .. } => {
                    let fail = |problem: &str| PlanError::Loop {
                        program,
                        problem: format!("loop over variable {variable}: {problem}"),
                    };
                    match self.counts.get(*variable as usize) {
                        None => return Err(fail("there is no such variable")),
                        Some(Some(_)) => return Err(fail("the variable is in use")),
                        Some(None) => {}
                    }
                    self.counts[*variable as usize] = Some(*count);
                    self.steps(program, steps)?;
                    self.counts[*variable as usize] = None;
                }
            }
        }
        Ok(())
    }

    fn launch(&self, launch: &'p Launch) -> Result<LaunchCheck, String> {
        let kernel = self.plan.kernels.get(launch.kernel.0 as usize).ok_or("no such kernel")?;
        let slots = kernel.signature();
        if slots.len() != launch.operands.len() {
            return Err(format!("takes {} operands, has {}", slots.len(), launch.operands.len()));
        }
        let mut reaches = vec![];
        let rows = kernel.rows().map(|rows| ints("places", &[rows]));
        if let Some(places) = &launch.places {
            let slot = rows.as_ref().ok_or("a kernel without rows has places")?;
            let reach = self.operand(slot, places, &launch.operands, false);
            reaches.extend(reach.map_err(|problem| format!("places: {problem}"))?);
        }
        // The host does the group's part, and its indices have 64 bits.
        let wide = Collective::of(kernel).is_some();
        for (i, (slot, operand)) in slots.iter().zip(&launch.operands).enumerate() {
            let reach = self
                .operand(slot, operand, &launch.operands, wide)
                .map_err(|problem| format!("operand {i} (`{}`): {problem}", slot.name))?;
            reaches.extend(reach);
        }
        self.storage(&slots, launch)?;
        let mut in_place = false;
        for (i, a) in reaches.iter().enumerate() {
            for b in &reaches[i + 1..] {
                if !a.slot.role.writes() && !b.slot.role.writes() {
                    continue;
                }
                match self.overlap(a, b) {
                    Overlap::None => {}
                    Overlap::SameRow
                        if kernel.in_place() && !(a.slot.role.writes() && b.slot.role.writes()) =>
                    {
                        in_place = true;
                    }
                    _ => return Err(format!("operands `{}` and `{}` overlap", a.slot.name, b.slot.name)),
                }
            }
        }
        Ok(LaunchCheck { in_place })
    }

    /// Operands that must be of one type are, and those of any type have elements of one size.
    fn storage(&self, slots: &[Slot], launch: &Launch) -> Result<(), String> {
        let mut seen: Vec<(Storage, &str, DType)> = vec![];
        for (slot, operand) in slots.iter().zip(&launch.operands) {
            let Operand::Tensor { buffer, .. } = operand else { continue };
            let dtype = self.plan.buffer(*buffer).dtype;
            let same = |other: DType| match slot.storage {
                Storage::Is(_) | Storage::Weight => true,
                Storage::Float(_) => other == dtype,
                Storage::Any => other.bytes() == dtype.bytes(),
            };
            match seen.iter().find(|(storage, ..)| *storage == slot.storage) {
                Some(&(_, name, other)) if !same(other) => {
                    return Err(format!("`{name}` holds {other:?} and `{}` {dtype:?}", slot.name));
                }
                Some(_) => {}
                None => seen.push((slot.storage, slot.name, dtype)),
            }
        }
        Ok(())
    }

    /// The largest value of an expression over the open loops.
    fn largest(&self, affine: &Affine) -> Result<u64, String> {
        affine.terms.iter().try_fold(affine.base, |sum, &(variable, factor)| {
            let count = self.counts.get(variable as usize).copied().flatten();
            let count = count.ok_or_else(|| format!("variable {variable} has no value here"))?;
            let term = factor.checked_mul(count.saturating_sub(1));
            term.and_then(|t| sum.checked_add(t))
                .ok_or_else(|| "an index does not fit in 64 bits".to_string())
        })
    }

    fn operand<'s>(
        &self,
        slot: &'s Slot,
        operand: &'s Operand,
        all: &[Operand],
        wide: bool,
    ) -> Result<Option<Reach<'s>>, String> {
        let (buffer, instance, offset, stride) = match (operand, slot.layout) {
            (Operand::Index(affine), Layout::Index(below)) => {
                let largest = self.largest(affine)?;
                return match below {
                    Some(bound) if largest >= bound => {
                        Err(format!("reaches {largest}, must stay below {bound}"))
                    }
                    _ if wide => Ok(None),
                    _ if largest > i32::MAX as u64 => Err("does not fit in 32 bits".into()),
                    _ => Ok(None),
                };
            }
            (Operand::Index(_), _) => return Err("must be a tensor".into()),
            (Operand::Tensor { .. }, Layout::Index(_)) => return Err("must be an index".into()),
            (Operand::Tensor { buffer, instance, offset, stride }, _) => {
                (*buffer, instance, *offset, *stride)
            }
        };
        let b = self.plan.buffers.get(buffer.0 as usize).ok_or("no such buffer")?;
        if b.space == Space::Spread {
            return Err(format!("`{}` is cut over ranks, and whole in no memory", b.name));
        }
        if b.space == Space::Mapped && slot.role.writes() {
            return Err("is written, and holds weights in their file".into());
        }
        let (wanted, fits) = match slot.storage {
            Storage::Is(dtype) => (dtype, b.dtype == dtype),
            Storage::Float(_) => (DType::F32, matches!(b.dtype, DType::F32 | DType::Bf16)),
            Storage::Weight => (DType::F32, b.dtype.is_float()),
            Storage::Any => (DType::F32, !matches!(b.dtype, DType::E4m3 | DType::Packed(_))),
        };
        if !fits {
            return Err(format!("holds {:?}, must be {wanted:?}", b.dtype));
        }
        let last = match slot.layout {
            Layout::UpTo(index) => match &all[index] {
                Operand::Index(affine) => self.largest(affine)?,
                Operand::Tensor { .. } => return Err("its row must be an index".into()),
            },
            Layout::Dense | Layout::Rows(_) | Layout::Matrix(_) | Layout::Index(_) => 0,
        };
        let (rows, stride, length) = match slot.in_rows() {
            Some((rows, length)) => (rows, if stride == 0 { length } else { stride }, length),
            None => {
                let elements = slot.span(|_| last);
                (1, elements, elements)
            }
        };
        if rows > 1 && stride < length {
            return Err(format!("rows of {length} are {stride} apart"));
        }
        if b.space == Space::Mapped && offset.saturating_add(slot.span(|_| last)) > b.elements() {
            return Err("reaches beyond one tensor of a file".into());
        }
        let unit = b.dtype.unit();
        if !offset.is_multiple_of(unit) || !b.elements().is_multiple_of(unit) {
            return Err(format!("begins within one of the blocks of {unit} that `{}` is made of", b.name));
        }
        let size = |elements: u64| b.dtype.room(elements);
        let span =
            if rows == 0 || length == 0 { 0 } else { times(&[rows - 1, stride]).saturating_add(length) };
        let first = times(&[self.largest(instance)?, b.elements()]).saturating_add(offset);
        let end = size(first.saturating_add(span)).saturating_add(b.offset);
        let limit = match b.space {
            Space::Gradients => self.gradients,
            _ => b.offset + b.bytes(),
        };
        if end > limit {
            return Err(format!(
                "reaches byte {end} of the arena, `{}` ({:?} x {}) ends at {limit}",
                b.name, b.shape, b.instances
            ));
        }
        if span == 0 {
            return Ok(None);
        }
        Ok(Some(Reach {
            slot,
            base: b.offset + size(offset),
            instance: (instance, size(b.elements())),
            rows,
            stride: size(stride),
            length: size(length),
        }))
    }

    /// Smallest and largest distance from the first byte of `a` to that of `b`, over the open
    /// loops. No term overflows: both ends were found to be in the arena.
    fn distance(&self, a: &Reach, b: &Reach) -> (i128, i128) {
        let mut slopes = vec![0i128; self.counts.len()];
        let mut base = b.base as i128 - a.base as i128;
        for (reach, sign) in [(a, -1), (b, 1)] {
            let (affine, bytes) = reach.instance;
            base += sign * affine.base as i128 * bytes as i128;
            for &(variable, factor) in &affine.terms {
                slopes[variable as usize] += sign * factor as i128 * bytes as i128;
            }
        }
        let (mut low, mut high) = (base, base);
        for (slope, count) in slopes.into_iter().zip(&self.counts) {
            let reach = slope * count.unwrap_or(1).saturating_sub(1) as i128;
            low += reach.min(0);
            high += reach.max(0);
        }
        (low, high)
    }

    fn overlap(&self, a: &Reach, b: &Reach) -> Overlap {
        let span = |r: &Reach| ((r.rows - 1) * r.stride + r.length) as i128;
        let (low, high) = self.distance(a, b);
        if low >= span(a) || high + span(b) <= 0 {
            return Overlap::None;
        }
        let (la, lb) = (a.length as i128, b.length as i128);
        if low != high || (a.rows > 1 && b.rows > 1 && a.stride != b.stride) {
            return Overlap::Some;
        }
        // From here on row `i` of `b` is `low + (i - j) · stride` after row `j` of `a`.
        let stride = match (a.rows, b.rows) {
            (1, 1) => i64::MAX as i128,
            (1, _) => b.stride as i128,
            _ => a.stride as i128,
        };
        let phase = low.rem_euclid(stride);
        if phase >= la && phase + lb <= stride {
            Overlap::None
        } else if low + stride >= la && low - stride + lb <= 0 {
            Overlap::SameRow
        } else {
            Overlap::Some
        }
    }
}

enum Overlap {
    None,
    /// Row `i` of one overlaps at most row `i` of the other.
    SameRow,
    Some,
}
