//! Executed counts: the multiply-adds of a plan's launches.
//!
//! *In*: a plan, a program of it, and what is known of extents that values decide. *Out*:
//! [`Executed`], launch by launch. *Promise*: where no extent is left open, a device that counts
//! its multiply-adds finds exactly these; where one is, these are the most there can be, and
//! [`Executed::open`] says so. Loops are summed, not walked.
//!
//! A kernel says itself what it computes ([`KernelKind::work`]); a test holds that to the
//! [`cost`](crate::ir::cost()) of its operation.

use super::walk::sum_rows;
use super::{CountError, total};
use crate::ir::{CostError, Extents};
use crate::op::attention::kernel::visible;
use crate::op::kernel::{Amount, Units};
use crate::program::{BufferId, Kernel, KernelKind, Launch, Operand, Plan, ProgramKey, Space, Step, listed};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// Work of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Executed {
    /// Multiply-adds of matrix products.
    pub multiply_adds: u128,
    /// Launches, in the order of the list, loops added up.
    pub launches: Vec<Launched>,
}

/// Work of a launch of the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Launched {
    /// Its origin.
    pub origin: String,
    /// How often it takes place.
    pub times: u128,
    /// Multiply-adds in all.
    pub multiply_adds: u128,
    /// Element-wise operations in all.
    pub elementwise: u128,
    /// Whether an extent was left open, so that `multiply_adds` is a bound.
    pub open: bool,
}

impl Executed {
    /// Whether some launch's extent was left open.
    pub fn open(&self) -> bool {
        self.launches.iter().any(|l| l.open)
    }
}

/// Counts a program of a plan. `known` gives the extents of a launch as far as they are known;
/// those of depth attention and of routing without no-ops follow from the plan.
pub fn executed(
    plan: &Plan,
    program: ProgramKey,
    known: &dyn Fn(&Launch) -> Extents,
) -> Result<Executed, CountError> {
    let mut walk = Walk { plan, known, partial: HashSet::new(), loops: vec![], out: Executed::default() };
    if let Some(program) = plan.programs.get(&program) {
        // Routing in a micro-batch is read by later launches of the same program only.
        walk.partial = partial_offsets(plan, &program.steps);
        walk.steps(&program.steps)?;
    }
    Ok(walk.out)
}

/// Inputs of masks; empty where a program takes none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// `positions[batch, queries]`
    pub positions: &'a [i32],
    /// `key_positions[batch, keys]`
    pub key_positions: &'a [i32],
    /// `segments[batch, queries]`
    pub segments: &'a [i32],
}

impl Masks<'_> {
    /// The extents of a sequence attention by these values; those of other launches stay open, and
    /// of attention over tokens that were chosen, whose masks are not what the host feeds.
    pub fn extents(&self, plan: &Plan, launch: &Launch) -> Extents {
        let Units::Pairs { shape, attention, masks } = plan.kernel(launch.kernel).work().units else {
            return Extents::default();
        };
        let fed = |operand: &Operand| match operand {
            Operand::Tensor { buffer, .. } => plan.buffer(*buffer).space == Space::Io,
            Operand::Index(_) => false,
        };
        // Inputs of a program are not fed.
        let read = attention.program.as_ref().is_some_and(|p| p.masks_by_operands());
        if read || !launch.operands.iter().skip(masks).take(attention.masks()).all(fed) {
            return Extents::default();
        }
        let pairs = visible(&shape, &attention, self.positions, self.key_positions, self.segments, &[]);
        Extents { pairs, ..Extents::default() }
    }
}

/// Loops in which ranks that share experts take turns: where the rows of each expert begin, which a
/// turn brings, and the ranks of a team.
#[derive(Clone, Debug, Default)]
pub struct Turns(HashMap<BufferId, u64>);

impl Turns {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        let mut all = HashMap::new();
        for program in plan.programs.values() {
            for launch in listed(&program.steps) {
                if let Kernel::Sent(sent) = plan.kernel(launch.kernel)
                    && let Some((begins, _)) = place(launch.operands.get(BEGINS))
                {
                    all.insert(begins, sent.owners.team);
                }
            }
        }
        Turns(all)
    }

    /// Extents of a grouped matmul in a turn, where experts are as often chosen as one another: of
    /// the slots of a rank those that choose experts of this one. Other launches stay open.
    pub fn even(&self, plan: &Plan, launch: &Launch) -> Extents {
        let Units::Slots { offsets, slots, .. } = plan.kernel(launch.kernel).work().units else {
            return Extents::default();
        };
        let team = place(launch.operands.get(offsets)).and_then(|(begins, _)| self.0.get(&begins));
        Extents { slots: team.map(|team| slots.div_ceil((*team).max(1))), ..Extents::default() }
    }
}

/// The operand of [`Sent`](crate::program::kernel::Sent) that says where the rows of each expert
/// begin.
const BEGINS: usize = 3;

/// Base address of a tensor, whatever the loops.
type Place = (BufferId, u64);

fn place(operand: Option<&Operand>) -> Option<Place> {
    match operand {
        Some(Operand::Tensor { buffer, offset, .. }) => Some((*buffer, *offset)),
        _ => None,
    }
}

/// Offsets of groupings that leave slots out: those of routers with no-op experts, and of rows that
/// another rank has for this one.
fn partial_offsets(plan: &Plan, steps: &[Step]) -> HashSet<Place> {
    let mut candidates = HashMap::new();
    let mut partial = HashSet::new();
    for l in listed(steps) {
        let kernel = plan.kernel(l.kernel);
        if let Kernel::Sent(_) = kernel {
            partial.extend(place(l.operands.get(BEGINS)));
        }
        let operand = |name: &str| {
            let at = kernel.signature().iter().position(|slot| slot.name == name)?;
            place(l.operands.get(at))
        };
        if let Kernel::Route(route) = kernel
            && let Some(chosen) = operand("chosen")
        {
            candidates.insert(chosen, route.experts);
        }
        if let Kernel::Group(group) = kernel {
            let of = operand("chosen").and_then(|p| candidates.get(&p));
            if of.is_none_or(|of| *of > group.experts) {
                partial.extend(operand("offsets"));
            }
        }
    }
    partial
}

struct Walk<'a> {
    plan: &'a Plan,
    known: &'a dyn Fn(&Launch) -> Extents,
    partial: HashSet<Place>,
    /// Variable and count of the loops around the step.
    loops: Vec<(u32, u64)>,
    out: Executed,
}

impl Walk<'_> {
    fn steps(&mut self, steps: &[Step]) -> Result<(), CountError> {
        for step in steps {
            match step {
                Step::Launch(launch) => self.launch(launch)?,
                Step::Loop { variable, count, steps, .. } => {
                    self.loops.push((*variable, *count));
                    self.steps(steps)?;
                    self.loops.pop();
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), CountError> {
        let times = self.loops.iter().try_fold(1u128, |n, l| n.checked_mul(l.1.into()));
        let times = times.ok_or(CountError::Overflow("launches"))?;
        let extents = (self.known)(launch);
        let work = self.plan.kernel(launch.kernel).work();
        let overflow = || CountError::Cost(CostError::Overflow("flops"));
        let units = match (&work.units, work.units.known(&extents)) {
            (Units::Depth { row, window, rows, .. }, _) if extents.row.is_none() => {
                self.rows_seen(launch.operands.get(*row), *window, times)?.checked_mul((*rows).into())
            }
            (_, units) => units.and_then(|n| n.checked_mul(times)),
        };
        let Amount { multiply_adds, elementwise } =
            units.and_then(|units| work.of(times, units)).ok_or_else(overflow)?;
        let open = work.multiplies() && launch.places.is_some()
            || match &work.units {
                Units::Slots { offsets, .. } => {
                    extents.slots.is_none()
                        && place(launch.operands.get(*offsets)).is_none_or(|p| self.partial.contains(&p))
                }
                Units::Pairs { attention: a, .. } => extents.pairs.is_none() && a.by_operands(),
                Units::None | Units::Rows { .. } | Units::Depth { .. } => false,
            };
        // A flop is half a multiply-add, and both are counted in 128 bits.
        multiply_adds.checked_mul(2).ok_or_else(overflow)?;
        self.out.multiply_adds = total("multiply-adds", [self.out.multiply_adds, multiply_adds])?;
        let origin = launch.origin.clone();
        self.out.launches.push(Launched { origin, times, multiply_adds, elementwise, open });
        Ok(())
    }

    /// Rows of a depth cache that a token sees, over all loops around a launch that runs `times`
    /// times.
    fn rows_seen(&self, row: Option<&Operand>, window: Option<u64>, times: u128) -> Result<u128, CountError> {
        let overflow = CountError::Overflow("cache rows");
        let (Some(Operand::Index(row)), last) = (row, window.map_or(u64::MAX, |w| w.saturating_sub(1)))
        else {
            return Ok(0);
        };
        let Some(rows) = sum_rows(row, &self.loops, last) else { return Err(overflow) };
        rows.checked_add(times).ok_or(overflow)
    }
}
