//! A step of a rank as the launches and exchanges of its plan, in order.
//!
//! *In*: a plan, seconds of each launch of its lists, micro-batches of a rank. *Out*: [`Work`],
//! loops unrolled. *Promise*: exchanges are the collectives of the plan, where the executor begins
//! them; the last micro-batch is [`LAST`] where sums of gradients overlap it.

use crate::exchange::{Exchange, What};
use dreamc_compiler::LAST;
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::program::kernel::{Pooled, Returned, Sent};
use dreamc_compiler::program::{Affine, Kernel, Launch, Operand, Owners, Parts, Plan, Step};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes that each rank brings to the pool of a step: losses, work, wishes to stop, its own time.
pub const POOLED: u64 = 34;

/// Something that a rank does in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A launch and its seconds.
    Launch(f64),
    /// An exchange that begins, and overlaps what follows.
    Begin(Arc<Exchange>),
    /// An exchange that is waited for.
    Wait(Arc<Exchange>),
    /// The end of a program: all exchanges that were begun are waited for.
    Join,
}

/// Seconds of one launch of each of the list of every program.
pub type Prices = HashMap<String, Vec<f64>>;

/// A step of `micro_batches` micro-batches of a rank. There are `ranks`, which bring `at_once`
/// numbers together at once; `before` each micro-batch runs what a [`forward`] has. Experts that
/// ranks share are chosen equally often.
pub fn timeline(
    plan: &Plan,
    prices: &Prices,
    before: &[Work],
    micro_batches: u64,
    (ranks, at_once): (u64, u64),
) -> Vec<Work> {
    let last = if plan.programs.contains_key(LAST) { LAST } else { "backward" };
    let mut work = vec![];
    for _ in 1..micro_batches.max(1) {
        work.extend_from_slice(before);
        program(plan, prices, at_once, "backward", &mut work);
    }
    work.extend_from_slice(before);
    program(plan, prices, at_once, last, &mut work);
    if ranks > 1 {
        work.push(Work::Wait(Arc::new(Exchange { what: What::Pool { bytes: POOLED }, ranks })));
    }
    program(plan, prices, at_once, "norm", &mut work);
    program(plan, prices, at_once, "update", &mut work);
    work
}

/// The forward of a model by itself, a teacher's. `share` of the steps have it: launches take that
/// part of their seconds, so that a step is the mean of all.
pub fn forward(plan: &Plan, prices: &Prices, share: f64) -> Vec<Work> {
    let mut work = vec![];
    program(plan, prices, 1, Entry::Whole.name(), &mut work);
    for each in &mut work {
        if let Work::Launch(seconds) = each {
            *seconds *= share;
        }
    }
    work
}

fn program(plan: &Plan, prices: &Prices, at_once: u64, name: &str, work: &mut Vec<Work>) {
    let Some(program) = plan.programs.get(name) else { return };
    let prices = prices.get(name).map_or(&[][..], Vec::as_slice);
    let mut walk = Walk { plan, prices, at_once, variables: vec![0; program.variables as usize], work };
    walk.steps(&program.steps, &mut 0);
    work.push(Work::Join);
}

struct Walk<'a> {
    plan: &'a Plan,
    prices: &'a [f64],
    /// Numbers that ranks bring together at once.
    at_once: u64,
    variables: Vec<u64>,
    work: &'a mut Vec<Work>,
}

impl Walk<'_> {
    /// Walks steps whose first launch has a number in the list of the program, which is counted on.
    fn steps(&mut self, steps: &[Step], number: &mut usize) {
        for step in steps {
            match step {
                Step::Launch(launch) => {
                    self.launch(launch, *number);
                    *number += 1;
                }
                Step::Loop { variable, count, reverse, steps } => {
                    let first = *number;
                    *number += launches(steps);
                    for i in 0..*count {
                        self.variables[*variable as usize] = if *reverse { count - 1 - i } else { i };
                        self.steps(steps, &mut first.clone());
                    }
                }
            }
        }
    }

    fn launch(&mut self, launch: &Launch, number: usize) {
        let index = |operand: Option<&Operand>| match operand {
            Some(Operand::Index(index)) => self.at(index),
            Some(Operand::Tensor { .. }) | None => 0,
        };
        let lengths = |parts: &Parts| (0..parts.ranks()).map(|rank| parts.of(rank).1).collect();
        let kernel = self.plan.kernel(launch.kernel);
        let (exchange, overlaps) = if let Kernel::AllReduce(sum) = kernel {
            let what = What::Sum { elements: sum.elements };
            (Exchange { what, ranks: sum.ranks }, sum.overlap)
        } else if let Kernel::ReduceScatter(scatter) = kernel {
            let parts = scatter.parts.within(index(launch.operands.get(1)), scatter.elements);
            (Exchange { what: What::Scatter { lengths: lengths(&parts) }, ranks: parts.ranks() }, true)
        } else if let Kernel::AllGather(gather) = kernel {
            (
                Exchange {
                    what: What::Gather { lengths: lengths(&gather.parts) },
                    ranks: gather.parts.ranks(),
                },
                false,
            )
        } else if let Kernel::Gathered(gathered) = kernel {
            let parts = gathered.parts.within(index(launch.operands.get(2)), gathered.elements);
            (Exchange { what: What::Gather { lengths: lengths(&parts) }, ranks: parts.ranks() }, false)
        } else if let Kernel::Scattered(scattered) = kernel {
            let parts = scattered.parts.within(index(launch.operands.get(2)), scattered.elements);
            (Exchange { what: What::Scatter { lengths: lengths(&parts) }, ranks: parts.ranks() }, false)
        } else if let Kernel::Sent(Sent { slots, width, owners }) = kernel {
            let row = width * self.unit(&launch.operands);
            self.turn(*owners, (*slots, *width, row), (index(launch.operands.last()), true));
            return;
        } else if let Kernel::Returned(Returned { slots, width, owners }) = kernel {
            let row = width * self.unit(&launch.operands);
            self.turn(*owners, (*slots, *width, row), (index(launch.operands.last()), false));
            return;
        } else if let Kernel::Pooled(Pooled { elements, owners }) = kernel {
            self.pool(*elements, *owners);
            return;
        } else {
            self.work.push(Work::Launch(self.prices.get(number).copied().unwrap_or(0.0)));
            return;
        };
        let exchange = Arc::new(exchange);
        self.work.push(if overlaps { Work::Begin(exchange) } else { Work::Wait(exchange) });
    }

    /// Bytes of an element of a launch's first operand.
    fn unit(&self, operands: &[Operand]) -> u64 {
        match operands.first() {
            Some(Operand::Tensor { buffer, .. }) => self.plan.buffer(*buffer).dtype.bytes(),
            Some(Operand::Index(_)) | None => 0,
        }
    }

    fn wait(&mut self, what: What, ranks: u64) {
        self.work.push(Work::Wait(Arc::new(Exchange { what, ranks })));
    }

    /// A turn of a member of each team, whose slots are shared equally by the experts: its counts,
    /// then rows, from it to the others or back.
    fn turn(&mut self, owners: Owners, (slots, width, row): (u64, u64, u64), (source, away): (u64, bool)) {
        let Owners { experts, team, ranks, .. } = owners;
        let has = |rank: u64| rank % team == source;
        let lengths = (0..ranks).map(|rank| if has(rank) { experts + 1 } else { 0 }).collect();
        self.wait(What::Gather { lengths }, ranks);
        let (own, each) = (slots / team, (self.at_once / (width * team).max(1)).max(1));
        for first in (0..own).step_by(each as usize) {
            let bytes = (own - first).min(each) * row;
            let of_source = |rank| if has(rank) { bytes * (team - 1) } else { 0 };
            let of_others = |rank| if has(rank) { 0 } else { bytes };
            let (source, others) = ((0..ranks).map(of_source).collect(), (0..ranks).map(of_others).collect());
            let (sent, received) = if away { (source, others) } else { (others, source) };
            self.wait(What::ToAll { sent, received }, ranks);
        }
    }

    /// Sums over the ranks that own the same experts: each adds its part, and hands it to all.
    fn pool(&mut self, elements: u64, owners: Owners) {
        let (alike, ranks) = (owners.ranks / owners.team, owners.ranks);
        for first in (0..elements).step_by(self.at_once as usize) {
            let count = (elements - first).min(self.at_once);
            let each = count.div_ceil(alike);
            let part = |rank: u64| {
                let number = rank / owners.team;
                4 * (((number + 1) * each).min(count) - (number * each).min(count))
            };
            let all = vec![4 * count; ranks as usize];
            let parts: Vec<u64> = (0..ranks).map(|rank| part(rank) * alike).collect();
            self.wait(What::ToAll { sent: all.clone(), received: parts.clone() }, ranks);
            self.wait(What::ToAll { sent: parts, received: all }, ranks);
        }
    }

    fn at(&self, index: &Affine) -> u64 {
        index.at(&self.variables)
    }
}

/// Launches of a list, loops once.
fn launches(steps: &[Step]) -> usize {
    let of = |step: &Step| match step {
        Step::Launch(_) => 1,
        Step::Loop { steps, .. } => launches(steps),
    };
    steps.iter().map(of).sum()
}
