//! A step of a rank as the launches and exchanges of its plan, in order.
//!
//! *In*: a plan, seconds of each launch of its lists, micro-batches of a rank, a mesh. *Out*:
//! [`Work`], loops unrolled. *Promise*: exchanges are the collectives of the plan, where the
//! executor begins them and waits for them; the last micro-batch is [`ProgramKey::LAST`] where
//! gradients are summed during it.

use crate::exchange::{Exchange, Mesh, Rows, What};
use crate::machine::Way;
use dreamc_compiler::ahead::{Ahead, ahead};
use dreamc_compiler::program::kernel::{Pooled, Returned, Sent};
use dreamc_compiler::program::{Kernel, Launch, Operand, Owners, Parts, Plan, ProgramKey, Step, listed};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Bytes that each rank brings to the pool of a step: losses, work, wishes to stop, its own time.
pub const POOLED: u64 = 35;

/// Something that a rank does in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A launch and its seconds.
    Launch(f64),
    /// An exchange that begins, and overlaps what follows.
    Begin(Arc<Exchange>),
    /// An exchange that is waited for.
    Wait(Arc<Exchange>),
    /// An exchange that was begun is waited for: the last, or the one that many before it.
    Until(usize),
    /// The end of a program: all exchanges that were begun are waited for.
    Join,
}

/// Seconds of one launch of each of the list of every program.
pub type Prices = HashMap<ProgramKey, Vec<f64>>;

/// A step of `micro_batches` of a rank; `before` each micro-batch runs what a [`forward`]
/// has. Experts that ranks share are as often chosen as one another.
pub fn timeline(plan: &Plan, prices: &Prices, before: &[Work], micro_batches: u64, mesh: &Mesh) -> Vec<Work> {
    let (ranks, mesh) = (mesh.ranks, Some(mesh));
    let sends = plan.programs.contains_key(&ProgramKey::LAST);
    let last = if sends { ProgramKey::LAST } else { ProgramKey::BACKWARD };
    let mut work = vec![];
    for _ in 1..micro_batches.max(1) {
        work.extend_from_slice(before);
        program(plan, prices, mesh, ProgramKey::BACKWARD, &mut work);
    }
    work.extend_from_slice(before);
    program(plan, prices, mesh, last, &mut work);
    if ranks > 1 {
        work.push(Work::Wait(Arc::new(Exchange { what: What::Pool { bytes: POOLED }, ranks })));
    }
    program(plan, prices, mesh, ProgramKey::NORM, &mut work);
    program(plan, prices, mesh, ProgramKey::UPDATE, &mut work);
    work
}

/// The forward of a model by itself, a teacher's. `share` of the steps have it: launches take that
/// part of their seconds, so that a step is the mean of all.
pub fn forward(plan: &Plan, prices: &Prices, share: f64) -> Vec<Work> {
    let mut work = vec![];
    program(plan, prices, None, ProgramKey::EVALUATE, &mut work);
    for each in &mut work {
        if let Work::Launch(seconds) = each {
            *seconds *= share;
        }
    }
    work
}

fn program(plan: &Plan, prices: &Prices, mesh: Option<&Mesh>, key: ProgramKey, work: &mut Vec<Work>) {
    let Some(program) = plan.programs.get(&key) else { return };
    let prices = prices.get(&key).map_or(&[][..], Vec::as_slice);
    let by_host = mesh.is_some_and(|mesh| mesh.machine.way == Way::Star);
    let ahead = if mesh.is_some() { ahead(plan, program) } else { Ahead::default() };
    let launches: Vec<&Launch> =
        if ahead.list.is_empty() { vec![] } else { listed(&program.steps).collect() };
    let jobs = vec![None; ahead.list.len()];
    let (variables, copy) = (vec![0; program.variables as usize], mesh.map_or(f64::MAX, |m| m.machine.copy));
    let mut walk = Walk {
        plan,
        prices,
        copy,
        variables,
        work,
        by_host,
        ahead: &ahead,
        launches,
        come: 0,
        jobs,
        begun: 0,
        sums: VecDeque::new(),
    };
    for &number in &ahead.first {
        walk.begin(number);
    }
    walk.steps(&program.steps, &mut 0);
    walk.end_sums(usize::MAX);
    work.push(Work::Join);
}

struct Walk<'a> {
    plan: &'a Plan,
    prices: &'a [f64],
    /// Bytes a second between a card and its host.
    copy: f64,
    variables: Vec<u64>,
    work: &'a mut Vec<Work>,
    /// Whether hosts exchange.
    by_host: bool,
    ahead: &'a Ahead,
    /// The launches of the list.
    launches: Vec<&'a Launch>,
    /// Exchanges that the program has come to, those that have begun, and how many have.
    come: usize,
    jobs: Vec<Option<usize>>,
    begun: usize,
    /// Sums of GPUs under way: a host adds its rank's part when one is over; the seconds that this
    /// takes.
    sums: VecDeque<(usize, f64)>,
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
                    *number += listed(steps).count();
                    for i in 0..*count {
                        self.variables[*variable as usize] = if *reverse { count - 1 - i } else { i };
                        self.steps(steps, &mut first.clone());
                    }
                }
            }
        }
    }

    fn launch(&mut self, launch: &Launch, number: usize) {
        let Some((exchange, overlaps)) = self.exchange(launch, &self.variables) else {
            self.work.push(Work::Launch(self.prices.get(number).copied().unwrap_or(0.0)));
            return;
        };
        let far = matches!(
            self.plan.kernel(launch.kernel),
            Kernel::Gathered(_) | Kernel::Scattered(_) | Kernel::Sent(_) | Kernel::Returned(_)
        );
        if far && !self.ahead.list.is_empty() {
            return self.come_to();
        }
        self.begun += 1;
        let exchange = Arc::new(exchange);
        self.work.push(if overlaps { Work::Begin(exchange) } else { Work::Wait(exchange) });
    }

    /// Begins an exchange, of those that may be ahead of their place.
    fn begin(&mut self, number: usize) {
        let of = &self.ahead.list[number];
        let kernel = self.plan.kernel(self.launches[of.launch].kernel);
        match (kernel, of.over) {
            (Kernel::Scattered(_), Some(before)) if !self.by_host => self.end_sums(before),
            (_, Some(before)) => self.until(before),
            (_, None) => {}
        }
        if let Some((exchange, _)) = self.exchange(self.launches[of.launch], &of.variables) {
            if let (Kernel::Scattered(scattered), What::Scatter { lengths }, false) =
                (kernel, &exchange.what, self.by_host)
            {
                let own = lengths.get(scattered.parts.rank as usize).copied().unwrap_or(0);
                self.sums.push_back((number, (3 * 4 * own) as f64 / self.copy));
            }
            self.work.push(Work::Begin(Arc::new(exchange)));
            self.jobs[number] = Some(self.begun);
            self.begun += 1;
        }
    }

    /// Waits for an exchange that was begun.
    fn until(&mut self, number: usize) {
        if let Some(job) = self.jobs[number] {
            self.work.push(Work::Until(self.begun - 1 - job));
        }
    }

    /// Waits for sums up to an exchange; each rank's host adds its part.
    fn end_sums(&mut self, last: usize) {
        while self.sums.front().is_some_and(|(number, _)| *number <= last)
            && let Some((number, seconds)) = self.sums.pop_front()
        {
            self.until(number);
            self.work.push(Work::Launch(seconds));
        }
    }

    /// Comes to the place of the next exchange of those.
    fn come_to(&mut self) {
        let number = self.come;
        self.come += 1;
        let Some(of) = self.ahead.list.get(number) else { return };
        if self.jobs[number].is_none() {
            self.begin(number);
        }
        match (of.waits, self.plan.kernel(self.launches[of.launch].kernel)) {
            (true, Kernel::Scattered(_)) if !self.by_host => self.end_sums(number),
            (true, _) => self.until(number),
            (false, _) => {}
        }
        for &next in &of.then {
            self.begin(next);
        }
    }

    /// The exchange of a launch, and whether it overlaps with what follows.
    fn exchange(&self, launch: &Launch, variables: &[u64]) -> Option<(Exchange, bool)> {
        let index = |operand: Option<&Operand>| match operand {
            Some(Operand::Index(index)) => index.at(variables),
            Some(Operand::Tensor { .. }) | None => 0,
        };
        let lengths = |parts: &Parts| (0..parts.ranks()).map(|rank| parts.of(rank).1).collect();
        let rows = |owners: &Owners, (slots, width): (u64, u64), away: bool| {
            let row = width * self.unit(&launch.operands);
            let source = index(launch.operands.last());
            let Owners { experts, team, ranks, .. } = *owners;
            (
                Exchange { what: What::Rows(Rows { experts, team, source, away, slots, width, row }), ranks },
                false,
            )
        };
        let kernel = self.plan.kernel(launch.kernel);
        Some(if let Kernel::AllReduce(sum) = kernel {
            let what = What::Sum { elements: sum.elements };
            (Exchange { what, ranks: sum.ranks }, sum.overlap)
        } else if let Kernel::ReduceScatter(scatter) = kernel {
            let parts = scatter.parts.within(index(launch.operands.get(1)), scatter.elements);
            (Exchange { what: What::Scatter { lengths: lengths(&parts) }, ranks: parts.ranks() }, true)
        } else if let Kernel::AllGather(gather) = kernel {
            let what = What::Gather { lengths: lengths(&gather.parts) };
            (Exchange { what, ranks: gather.parts.ranks() }, false)
        } else if let Kernel::Gathered(gathered) = kernel {
            let parts = gathered.parts.within(index(launch.operands.get(2)), gathered.elements);
            (Exchange { what: What::Gather { lengths: lengths(&parts) }, ranks: parts.ranks() }, false)
        } else if let Kernel::Scattered(scattered) = kernel {
            let parts = scattered.parts.within(index(launch.operands.get(2)), scattered.elements);
            (Exchange { what: What::Scatter { lengths: lengths(&parts) }, ranks: parts.ranks() }, false)
        } else if let Kernel::Sent(Sent { slots, width, owners }) = kernel {
            rows(owners, (*slots, *width), true)
        } else if let Kernel::Returned(Returned { slots, width, owners }) = kernel {
            rows(owners, (*slots, *width), false)
        } else if let Kernel::Pooled(Pooled { elements, owners }) = kernel {
            let what = What::Pooled { elements: *elements, team: owners.team };
            (Exchange { what, ranks: owners.ranks }, false)
        } else {
            return None;
        })
    }

    /// Bytes of an element of a launch's first operand.
    fn unit(&self, operands: &[Operand]) -> u64 {
        match operands.first() {
            Some(Operand::Tensor { buffer, .. }) => self.plan.buffer(*buffer).dtype.bytes(),
            Some(Operand::Index(_)) | None => 0,
        }
    }
}
