//! Sums over ranks that overlap with the backward.
//!
//! *In*: a program that adds to gradients. *Out*: the same launches in the same order, with the sum
//! of each range of gradients after the last launch that touches it; where states are sharded over
//! the ranks, each rank gets its part of the range. *Promise*: every trained number is summed once,
//! by all ranks in the same order; no launch after a sum touches the range, so that a device may
//! overlap the two; the bits equal those of sums at the end of the program.
//!
//! A loop over sets of weights sums what each of its rounds is done with. Where rounds add to the
//! same weights, the last round is taken out of the loop, and looked at by itself.

use crate::assemble::Assembly;
use crate::memory;
use crate::program::{
    Affine, BufferId, Kernel, KernelKind, Launch, Layout, Operand, Program, Slot, Space, Step, kernel,
};
use std::ops::Range;

/// The range of the arena that a launch reaches through an operand.
struct Reach<'p> {
    buffer: BufferId,
    instance: &'p Affine,
    /// First element in the instance, and the end.
    elements: Range<u64>,
    bytes: Range<u64>,
}

impl Assembly<'_> {
    /// A program that is the last of a step to add to gradients, and sums them over the ranks.
    pub(crate) fn sending(&mut self, program: &Program) -> Program {
        // Those of experts that ranks share are whole on their owners.
        let all: Vec<BufferId> =
            self.set.gradients.values().copied().filter(|id| !self.is_cut(*id)).collect();
        let mut steps = program.steps.clone();
        let mut counts = vec![1; program.variables as usize];
        // Gradients that nothing adds to are summed, too: a gradient is never whole on one rank
        // and not on another.
        let untouched = self.send(&mut steps, &all, &mut counts);
        let sums = self.sums(&untouched);
        steps.extend(sums);
        Program { steps, variables: program.variables }
    }

    /// Puts each sum of gradients after the last step that touches them; returns the gradients that
    /// no step touches. `counts`: how often the loops run that these steps are in.
    fn send(&mut self, steps: &mut Vec<Step>, wanted: &[BufferId], counts: &mut Vec<u64>) -> Vec<BufferId> {
        let of = |id: &BufferId| {
            let range = self.bytes_of(*id);
            let touches = |step: &Step| self.touching(step, counts, &range, &mut |_| true);
            (steps.iter().rposition(touches), *id)
        };
        let last: Vec<(Option<usize>, BufferId)> = wanted.iter().map(of).collect();
        let at = |place: Option<usize>| -> Vec<BufferId> {
            last.iter().filter(|(found, _)| *found == place).map(|(_, id)| *id).collect()
        };
        for i in (0..steps.len()).rev() {
            let here = at(Some(i));
            if here.is_empty() {
                continue;
            }
            let after = match &mut steps[i] {
                Step::Launch(_) => self.sums(&here),
                Step::Loop { variable, count: 1, steps: inner, .. } => {
                    counts[*variable as usize] = 1;
                    let rest = self.send(inner, &here, counts);
                    self.sums(&rest)
                }
                Step::Loop { .. } => {
                    let Step::Loop { variable, count, reverse, steps: mut inner } = steps.remove(i) else {
                        continue;
                    };
                    let replaced = self.send_loop((variable, count, reverse), &mut inner, &here, counts);
                    steps.splice(i..i, replaced);
                    continue;
                }
            };
            steps.splice(i + 1..i + 1, after);
        }
        at(None)
    }

    /// The same of a loop of several rounds: what it becomes.
    fn send_loop(
        &mut self,
        (variable, count, reverse): (u32, u64, bool),
        inner: &mut Vec<Step>,
        wanted: &[BufferId],
        counts: &mut Vec<u64>,
    ) -> Vec<Step> {
        counts[variable as usize] = count;
        let (mut each, mut late) = (vec![], vec![]);
        for &id in wanted {
            match self.instances_of_round(inner, (variable, count), id, counts) {
                Some(instances) => each.push((id, instances)),
                None => late.push(id),
            }
        }
        for (id, instances) in each {
            let elements = self.plan.buffer(id).elements() * instances;
            let instance = Affine { base: 0, terms: vec![(variable, instances)] };
            let sum = self.sum(id, instance, elements);
            inner.push(sum);
        }
        counts[variable as usize] = 1;
        if late.is_empty() {
            return vec![Step::Loop { variable, count, reverse, steps: std::mem::take(inner) }];
        }
        let (before, last_round) = if reverse { (1, 0) } else { (0, count - 1) };
        let rounds =
            Step::Loop { variable, count: count - 1, reverse, steps: shifted(inner, variable, before) };
        let mut last = shifted(inner, variable, last_round);
        let rest = self.send(&mut last, &late, counts);
        let mut all = vec![rounds, Step::Loop { variable, count: 1, reverse, steps: last }];
        all.extend(self.sums(&rest));
        all
    }

    /// How many instances of a buffer each round of a loop has to itself, where it touches no
    /// others and all rounds together touch all.
    fn instances_of_round(
        &self,
        inner: &[Step],
        (variable, count): (u32, u64),
        id: BufferId,
        counts: &[u64],
    ) -> Option<u64> {
        let (range, b) = (self.bytes_of(id), self.plan.buffer(id));
        let own = b.instances.checked_div(count).filter(|own| *own > 0 && own * count == b.instances)?;
        let mut alone = true;
        for step in inner {
            self.touching(step, counts, &range, &mut |reach| {
                let fits = reach.instance.base * b.elements() + reach.elements.end <= own * b.elements();
                alone &= reach.buffer == id && reach.instance.terms == [(variable, own)] && fits;
                false
            });
        }
        alone.then_some(own)
    }

    /// Whether a step touches a range of bytes in a way that is looked for.
    fn touching(
        &self,
        step: &Step,
        counts: &[u64],
        range: &Range<u64>,
        is: &mut dyn FnMut(&Reach) -> bool,
    ) -> bool {
        match step {
            Step::Launch(launch) => {
                let slots = self.plan.kernel(launch.kernel).signature();
                let operands = launch.operands.iter().zip(&slots);
                let reaches = operands.filter_map(|(operand, slot)| self.reach(operand, slot, counts));
                let hits = reaches.filter(|r| r.bytes.start < range.end && range.start < r.bytes.end);
                hits.fold(false, |any, reach| is(&reach) | any)
            }
            Step::Loop { count: 0, .. } => false,
            Step::Loop { variable, count, steps, .. } => {
                let mut counts = counts.to_vec();
                counts[*variable as usize] = *count;
                steps.iter().fold(false, |any, step| self.touching(step, &counts, range, is) | any)
            }
        }
    }

    fn reach<'p>(&self, operand: &'p Operand, slot: &Slot, counts: &[u64]) -> Option<Reach<'p>> {
        let Operand::Tensor { buffer, instance, offset, stride } = operand else { return None };
        let b = self.plan.buffer(*buffer);
        if !matches!(b.space, Space::Gradients | Space::Alias) {
            return None;
        }
        let span = match slot.in_rows() {
            Some((0, _) | (_, 0)) => 0,
            Some((rows, length)) => (rows - 1) * if *stride == 0 { length } else { *stride } + length,
            None => match slot.layout {
                // As far as the buffer goes.
                Layout::UpTo(_) => b.elements(),
                Layout::Dense | Layout::Rows(_) | Layout::Matrix(_) | Layout::Index(_) => slot.span(|_| 0),
            },
        };
        let grows = instance.terms.iter().map(|&(v, f)| f * (counts[v as usize].saturating_sub(1)));
        let (low, high) = (instance.base, instance.base + grows.sum::<u64>());
        let place = |instance: u64, element: u64| b.offset + b.dtype.room(instance * b.elements() + element);
        let elements = *offset..offset + span;
        let bytes = place(low, elements.start)..place(high, elements.end);
        (span > 0).then_some(Reach { buffer: *buffer, instance, elements, bytes })
    }

    fn bytes_of(&self, id: BufferId) -> Range<u64> {
        let b = self.plan.buffer(id);
        b.offset..b.offset + b.bytes()
    }

    /// Sums of whole buffers; neighbours are one range.
    fn sums(&mut self, wanted: &[BufferId]) -> Vec<Step> {
        let offset = |id: &BufferId| self.plan.buffer(*id).offset;
        let mut all: Vec<BufferId> =
            self.set.gradients.values().copied().filter(|id| !self.is_cut(*id)).collect();
        all.sort_by_key(offset);
        let mut ranges: Vec<(BufferId, u64)> = vec![];
        let mut follows = false;
        for id in all {
            let wants = wanted.contains(&id);
            match ranges.last_mut() {
                Some((_, end)) if wants && follows => *end = self.bytes_of(id).end,
                _ if wants => ranges.push((id, self.bytes_of(id).end)),
                _ => {}
            }
            follows = wants;
        }
        let mut steps = vec![];
        for (id, end) in ranges {
            let b = self.plan.buffer(id);
            let elements = (end - b.offset) / b.dtype.bytes();
            steps.push(self.sum(id, Affine::default(), elements));
        }
        steps
    }

    fn sum(&mut self, buffer: BufferId, instance: Affine, elements: u64) -> Step {
        let operand = Operand::Tensor { buffer, instance: instance.clone(), offset: 0, stride: 0 };
        if !self.options.shard.states() {
            let kernel = kernel::AllReduce { elements, ranks: self.options.ranks, overlap: true };
            return self.launch(Kernel::AllReduce(kernel), vec![operand], "gradients");
        }
        // The number of the range's first among those that are cut.
        let b = self.plan.buffer(buffer);
        let all = self.bound(memory::Slot::Gradients).map_or(b.offset, |all| self.plan.buffer(all).offset);
        let begins = (b.offset - all) / b.dtype.bytes();
        let each = b.elements();
        let first = Affine {
            base: begins + instance.base * each,
            terms: instance.terms.iter().map(|&(v, f)| (v, f * each)).collect(),
        };
        let kernel = kernel::ReduceScatter { parts: self.parts(&self.set.cuts), elements };
        self.launch(Kernel::ReduceScatter(kernel), vec![operand, Operand::Index(first)], "gradients")
    }
}

/// Steps with so much added to a loop variable.
fn shifted(steps: &[Step], variable: u32, by: u64) -> Vec<Step> {
    let affine = |affine: &Affine| {
        let more: u64 = affine.terms.iter().filter(|(v, _)| *v == variable).map(|(_, f)| f * by).sum();
        Affine { base: affine.base + more, terms: affine.terms.clone() }
    };
    let operand = |operand: &Operand| match operand {
        Operand::Tensor { buffer, instance, offset, stride } => {
            Operand::Tensor { buffer: *buffer, instance: affine(instance), offset: *offset, stride: *stride }
        }
        Operand::Index(index) => Operand::Index(affine(index)),
    };
    let step = |step: &Step| match step {
        Step::Launch(launch) => Step::Launch(Launch {
            operands: launch.operands.iter().map(operand).collect(),
            places: launch.places.as_ref().map(operand),
            ..launch.clone()
        }),
        Step::Loop { variable: own, count, reverse, steps } => Step::Loop {
            variable: *own,
            count: *count,
            reverse: *reverse,
            steps: shifted(steps, variable, by),
        },
    };
    steps.iter().map(step).collect()
}
