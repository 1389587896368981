//! A step of a rank as the launches and exchanges of its plan, in order.
//!
//! *In*: a plan, seconds of each launch of its lists, micro-batches of a rank. *Out*: [`Work`],
//! loops unrolled. *Promise*: exchanges are the collectives of the plan, where the executor begins
//! them; the last micro-batch is [`LAST`] where gradients are summed beside it.

use crate::exchange::{Exchange, What};
use dreamc_compiler::LAST;
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::program::{Affine, Kernel, Launch, Operand, Parts, Plan, Step};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes that each rank brings to the pool of a step: losses, work, wishes to stop, its own time.
pub const POOLED: u64 = 34;

/// Something that a rank does in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A launch of so many seconds.
    Launch(f64),
    /// An exchange that begins, and goes on beside what follows.
    Begin(Arc<Exchange>),
    /// An exchange that is waited for.
    Wait(Arc<Exchange>),
    /// The end of a program: all exchanges that were begun are waited for.
    Join,
}

/// Seconds of one launch of each of the list of every program.
pub type Prices = HashMap<String, Vec<f64>>;

/// A step of so many micro-batches of a rank, of `ranks`; `before` each of them runs what a
/// [`forward`] has.
pub fn timeline(plan: &Plan, prices: &Prices, before: &[Work], micro_batches: u64, ranks: u64) -> Vec<Work> {
    let last = if plan.programs.contains_key(LAST) { LAST } else { "backward" };
    let mut work = vec![];
    for _ in 1..micro_batches.max(1) {
        work.extend_from_slice(before);
        program(plan, prices, "backward", &mut work);
    }
    work.extend_from_slice(before);
    program(plan, prices, last, &mut work);
    if ranks > 1 {
        work.push(Work::Wait(Arc::new(Exchange { what: What::Pool { bytes: POOLED }, ranks })));
    }
    program(plan, prices, "norm", &mut work);
    program(plan, prices, "update", &mut work);
    work
}

/// The forward of a model by itself, a teacher's. `share` of the steps have it: launches take that
/// part of their seconds, so that a step is the mean of all.
pub fn forward(plan: &Plan, prices: &Prices, share: f64) -> Vec<Work> {
    let mut work = vec![];
    program(plan, prices, Entry::Whole.name(), &mut work);
    for each in &mut work {
        if let Work::Launch(seconds) = each {
            *seconds *= share;
        }
    }
    work
}

fn program(plan: &Plan, prices: &Prices, name: &str, work: &mut Vec<Work>) {
    let Some(program) = plan.programs.get(name) else { return };
    let prices = prices.get(name).map_or(&[][..], Vec::as_slice);
    let mut walk = Walk { plan, prices, variables: vec![0; program.variables as usize], work };
    walk.steps(&program.steps, &mut 0);
    work.push(Work::Join);
}

struct Walk<'a> {
    plan: &'a Plan,
    prices: &'a [f64],
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
        } else {
            self.work.push(Work::Launch(self.prices.get(number).copied().unwrap_or(0.0)));
            return;
        };
        let exchange = Arc::new(exchange);
        self.work.push(if overlaps { Work::Begin(exchange) } else { Work::Wait(exchange) });
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
