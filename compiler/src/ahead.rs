//! Exchanges that begin ahead of their use, or end later than they stand in a program's list.
//!
//! *In*: a program. *Out*: its [`Exchange`]s in the order in which ranks come to them, and where
//! each begins and ends. *Promise*: all ranks of a group begin them in one order, which the program
//! alone decides; nothing writes what an exchange reads between its beginning and its place, and
//! nothing reads or writes what it leaves between its place and its end. So bits are those of
//! exchanges that are waited for one by one.
//!
//! - *Weights* that are gathered do not change in a program: those of the next layer begin while
//!   this layer computes, as many as a second window of a layer holds.
//! - *Rows* of a turn are there before the loop of turns: those of the next turn begin while owners
//!   multiply the rows of this one.
//! - *Results* go back to their slots while the next turn computes; the last turn of a loop waits
//!   for all.
//! - *Gradients* of a layer are summed while the layer before it computes, as many as the windows
//!   of a layer hold.
//!
//! An exchange under way has a *slot* of the room, for numbers that were brought and that nothing
//! reads yet, or that are still going away. A slot is given again when its exchange is over. The
//! host has slots in its memory, a device that exchanges by itself, as GPUs by NCCL, next to its
//! arena.

use crate::program::kernel::{Gathered, Returned, Scattered, Sent};
use crate::program::{BufferId, Kernel, KernelKind, Launch, Operand, Plan, Program, Space, Step, listed};

/// The exchanges of a program, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// All of them.
    pub list: Vec<Exchange>,
    /// Those that begin at the beginning of the program.
    pub first: Vec<usize>,
    /// Bytes of all slots.
    pub room: u64,
}

/// An exchange at its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Number of its launch in the program's list.
    pub launch: usize,
    /// The loop variables there.
    pub variables: Vec<u64>,
    /// Whether it has begun before its place.
    pub begun: bool,
    /// An exchange that is over before it begins: its numbers take that one's room.
    pub over: Option<usize>,
    /// Whether it is over when the next launch begins.
    pub waits: bool,
    /// Those that begin after it.
    pub then: Vec<usize>,
    /// Where its slot begins in the room, in bytes.
    pub at: u64,
    /// Bytes of its slot.
    pub bytes: u64,
}

/// The use that an exchange makes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gathers,
    Scatters,
    Sends,
    Returns,
}

impl Kind {
    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel {
            Kernel::Gathered(_) => Some(Kind::Gathers),
            Kernel::Scattered(_) => Some(Kind::Scatters),
            Kernel::Sent(_) => Some(Kind::Sends),
            Kernel::Returned(_) => Some(Kind::Returns),
            _ => None,
        }
    }
}

/// A visit of an exchange.
struct Visit {
    launch: usize,
    variables: Vec<u64>,
    kind: Kind,
    bytes: u64,
    /// Which entry of its innermost loop it is in: rows of one entry are there before it.
    entry: usize,
    /// Which round of that entry.
    round: usize,
    /// Whether the round is the last.
    last: bool,
}

struct Walk<'p> {
    plan: &'p Plan,
    variables: Vec<u64>,
    visits: Vec<Visit>,
    entries: usize,
    rounds: usize,
}

impl Walk<'_> {
    fn steps(&mut self, steps: &[Step], number: &mut usize, (entry, last): (usize, bool)) {
        let round = self.rounds;
        for step in steps {
            match step {
                Step::Launch(launch) => {
                    self.launch(launch, *number, (entry, round, last));
                    *number += 1;
                }
                Step::Loop { variable, count, reverse, steps } => {
                    let first = *number;
                    *number += listed(steps).count();
                    if !exchanges(steps, self.plan) {
                        continue;
                    }
                    self.entries += 1;
                    let entry = self.entries;
                    for i in 0..*count {
                        self.variables[*variable as usize] = if *reverse { count - 1 - i } else { i };
                        self.rounds += 1;
                        self.steps(steps, &mut first.clone(), (entry, i + 1 == *count));
                    }
                }
            }
        }
    }

    fn launch(&mut self, launch: &Launch, number: usize, (entry, round, last): (usize, usize, bool)) {
        let kernel = self.plan.kernel(launch.kernel);
        let Some(kind) = Kind::of(kernel) else { return };
        let bytes = bytes(kernel, self.unit(launch));
        let variables = self.variables.clone();
        self.visits.push(Visit { launch: number, variables, kind, bytes, entry, round, last });
    }

    /// Bytes of an element of a launch's first operand.
    fn unit(&self, launch: &Launch) -> u64 {
        match launch.operands.first() {
            Some(Operand::Tensor { buffer, .. }) => self.plan.buffer(*buffer).dtype.bytes(),
            Some(Operand::Index(_)) | None => 0,
        }
    }
}

fn exchanges(steps: &[Step], plan: &Plan) -> bool {
    listed(steps).any(|launch| Kind::of(plan.kernel(launch.kernel)).is_some())
}

/// Bytes that an exchange holds at the most; `unit` are those of an element of a row.
fn bytes(kernel: &Kernel, unit: u64) -> u64 {
    match kernel {
        Kernel::Gathered(Gathered { elements, .. }) | Kernel::Scattered(Scattered { elements, .. }) => {
            4 * elements
        }
        Kernel::Sent(Sent { slots, width, .. }) | Kernel::Returned(Returned { slots, width, .. }) => {
            slots * width * unit
        }
        _ => 0,
    }
}

/// Slots begin at multiples of this number of bytes, as tensors do.
const ALIGN: u64 = 256;

/// Bytes of the arena that an operand's buffer has.
fn range(plan: &Plan, operand: &Operand) -> Option<std::ops::Range<u64>> {
    let Operand::Tensor { buffer, .. } = operand else { return None };
    let b = plan.buffer(*buffer);
    (!matches!(b.space, Space::Mapped | Space::Spread)).then(|| b.offset..b.offset + b.bytes())
}

/// Whether launches other than exchanges of a kind touch what those have as an operand: write it,
/// or also read it.
fn disturbed(plan: &Plan, steps: &[Step], kind: Kind, (operand, reads): (usize, bool)) -> bool {
    let mut own: Vec<std::ops::Range<u64>> = vec![];
    let mut seen: std::collections::BTreeSet<BufferId> = Default::default();
    for launch in listed(steps) {
        if Kind::of(plan.kernel(launch.kernel)) == Some(kind)
            && let Some(Operand::Tensor { buffer, .. }) = launch.operands.get(operand)
            && seen.insert(*buffer)
        {
            own.extend(launch.operands.get(operand).and_then(|operand| range(plan, operand)));
        }
    }
    let mut meets = false;
    for launch in listed(steps) {
        let kernel = plan.kernel(launch.kernel);
        if Kind::of(kernel) == Some(kind) {
            continue;
        }
        for (operand, slot) in launch.operands.iter().zip(&kernel.signature()) {
            if (reads || slot.role.writes())
                && let Some(range) = range(plan, operand)
            {
                meets |= own.iter().any(|own| own.start < range.end && range.start < own.end);
            }
        }
    }
    meets
}

/// Where the exchanges of a program begin and end.
pub fn ahead(plan: &Plan, program: &Program) -> Ahead {
    if !exchanges(&program.steps, plan) {
        return Ahead::default();
    }
    let variables = vec![0; program.variables as usize];
    let mut walk = Walk { plan, variables, visits: vec![], entries: 0, rounds: 0 };
    walk.steps(&program.steps, &mut 0, (0, true));
    let visits = walk.visits;
    let steady = !disturbed(plan, &program.steps, Kind::Gathers, (1, false));
    let apart = !disturbed(plan, &program.steps, Kind::Scatters, (1, true));
    let exchange = |v: &Visit| Exchange {
        launch: v.launch,
        variables: v.variables.clone(),
        begun: false,
        over: None,
        waits: match v.kind {
            Kind::Gathers | Kind::Sends => true,
            Kind::Scatters => !apart,
            Kind::Returns => v.last,
        },
        then: vec![],
        at: 0,
        bytes: v.bytes,
    };
    let mut all = Ahead { list: visits.iter().map(exchange).collect(), first: vec![], room: 0 };
    if steady {
        gathers(&visits, &mut all);
    }
    rows(&visits, &mut all);
    bounded(&visits, &mut all.list, Kind::Scatters, window(&visits, Kind::Scatters));
    let most = visits.iter().filter(|v| v.kind == Kind::Returns).map(|v| v.bytes).max();
    bounded(&visits, &mut all.list, Kind::Returns, most.unwrap_or(0));
    Slots::default().place(&visits, &mut all);
    all
}

/// Slots that are taken: where they begin and end, and the exchange.
#[derive(Default)]
struct Slots(Vec<(u64, u64, usize)>);

impl Slots {
    /// Gives every exchange a slot, the first that is free when it begins.
    fn place(mut self, visits: &[Visit], all: &mut Ahead) {
        for &number in &all.first.clone() {
            self.take(number, visits, all);
        }
        for number in 0..visits.len() {
            if !all.list[number].begun {
                self.take(number, visits, all);
            }
            if all.list[number].waits {
                self.leave(number, visits);
            }
            for &next in &all.list[number].then.clone() {
                self.take(next, visits, all);
            }
        }
    }

    fn take(&mut self, number: usize, visits: &[Visit], all: &mut Ahead) {
        if let Some(over) = all.list[number].over {
            self.leave(over, visits);
        }
        let bytes = visits[number].bytes.next_multiple_of(ALIGN);
        let mut at = 0;
        let before = self.0.iter().position(|&(begins, ends, _)| {
            let fits = at + bytes <= begins;
            at = if fits { at } else { ends };
            fits
        });
        self.0.insert(before.unwrap_or(self.0.len()), (at, at + bytes, number));
        all.list[number].at = at;
        all.room = all.room.max(at + bytes);
    }

    /// An exchange is over, and those of its kind that began before it.
    fn leave(&mut self, number: usize, visits: &[Visit]) {
        self.0.retain(|&(_, _, other)| other > number || visits[other].kind != visits[number].kind);
    }
}

/// Bytes of the exchanges of a kind in a round of a loop, where they are most; of one at least.
fn window(visits: &[Visit], kind: Kind) -> u64 {
    let (mut most, mut round, mut sum) = (0, 0, 0);
    for v in visits.iter().filter(|v| v.kind == kind) {
        // Those outside of loops have no round to share.
        sum = if v.round == round && v.entry > 0 { sum + v.bytes } else { v.bytes };
        round = v.round;
        most = most.max(sum);
    }
    most
}

/// Begins the gathers that follow as soon as there is room for them.
fn gathers(visits: &[Visit], all: &mut Ahead) {
    let room = window(visits, Kind::Gathers);
    let own: Vec<usize> = (0..visits.len()).filter(|&i| visits[i].kind == Kind::Gathers).collect();
    let (mut next, mut under_way) = (0, 0);
    let mut more = |under_way: &mut u64, list: &mut Vec<Exchange>| {
        let mut begun = vec![];
        while let Some(&i) = own.get(next)
            && *under_way + visits[i].bytes <= room
        {
            *under_way += visits[i].bytes;
            list[i].begun = true;
            begun.push(i);
            next += 1;
        }
        begun
    };
    all.first = more(&mut under_way, &mut all.list);
    for &i in &own {
        under_way -= visits[i].bytes;
        all.list[i].then = more(&mut under_way, &mut all.list);
    }
}

/// Begins the rows of the next turn when those of this one are there.
fn rows(visits: &[Visit], all: &mut Ahead) {
    let own: Vec<usize> = (0..visits.len()).filter(|&i| visits[i].kind == Kind::Sends).collect();
    for pair in own.windows(2) {
        if visits[pair[0]].entry == visits[pair[1]].entry && visits[pair[0]].entry > 0 {
            all.list[pair[1]].begun = true;
            all.list[pair[0]].then.push(pair[1]);
        }
    }
}

/// Keeps exchanges of a kind that are not waited for inside `room` bytes.
fn bounded(visits: &[Visit], list: &mut [Exchange], kind: Kind, room: u64) {
    let mut under_way: std::collections::VecDeque<usize> = Default::default();
    let mut bytes = 0;
    for i in (0..visits.len()).filter(|&i| visits[i].kind == kind) {
        while bytes + visits[i].bytes > room
            && let Some(first) = under_way.pop_front()
        {
            bytes -= visits[first].bytes;
            list[i].over = Some(first);
        }
        bytes += visits[i].bytes;
        under_way.push_back(i);
    }
}

/// Bytes of the slots of any program of a plan.
pub fn room(plan: &Plan) -> u64 {
    plan.programs.values().map(|program| ahead(plan, program).room).max().unwrap_or(0)
}
