//! A step by events: every launch and every message of every rank.
//!
//! *In*: the work of a step, a mesh, how much slower each rank is. *Out*: the seconds until the
//! last rank is done. *Promise*: nothing here knows the closed form. A rank launches one after
//! another; its exchanges are a queue, one at a time; a message occupies its sender for
//! `α + b / β`; a rank goes on to its next message when its own is sent and its neighbour's has
//! come. Through the star, frames of ranks share the link of rank 0, in each direction.

use crate::exchange::{self, Exchange, Mesh, Piece, Ring, Rows};
use crate::timeline::Work;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

/// Moments of a simulated step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulated {
    /// Seconds until the last rank is done.
    pub step: f64,
    /// Messages that were sent.
    pub messages: u64,
    /// Launches.
    pub launches: u64,
}

/// Simulates a step; `slower` is the factor on the launches of a rank.
pub fn simulate(work: &[Work], mesh: &Mesh, slower: &dyn Fn(u64) -> f64) -> Simulated {
    let exchanges: Vec<Plan> = work
        .iter()
        .filter_map(|work| match work {
            Work::Begin(exchange) | Work::Wait(exchange) => Some(Plan::of(exchange, mesh)),
            Work::Launch(_) | Work::Until(_) | Work::Join => None,
        })
        .collect();
    let rank = |rank| Rank { slower: slower(rank), ..Rank::default() };
    let mut events = Events {
        work,
        mesh: *mesh,
        exchanges,
        ranks: (0..mesh.ranks).map(rank).collect(),
        heap: BinaryHeap::new(),
        given: 0,
        star: Star::default(),
        found: Simulated::default(),
    };
    for rank in 0..mesh.ranks as usize {
        events.go(rank, 0.0);
    }
    while let Some(Event { at, what, .. }) = events.heap.pop() {
        events.found.step = events.found.step.max(at);
        events.happens(at, what);
    }
    events.found
}

/// The messages of an exchange.
enum Plan {
    Rings(Vec<(Ring, f64)>),
    Star(Vec<Piece>),
    /// Bytes between a member of each team and each of the others, again and again.
    Rows(Rows, Vec<u64>),
}

impl Plan {
    fn of(exchange: &Exchange, mesh: &Mesh) -> Self {
        match &exchange.what {
            _ if exchange.by_star(mesh.machine) => Plan::Star(exchange.pieces(mesh.at_once)),
            exchange::What::Rows(rows) => Plan::Rows(*rows, rows.laps()),
            _ => Plan::Rings(exchange.rings(mesh)),
        }
    }

    fn steps(&self) -> usize {
        match self {
            Plan::Rings(messages) => messages.len(),
            Plan::Star(pieces) => pieces.len(),
            Plan::Rows(_, laps) => laps.len(),
        }
    }
}

/// Waiting of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Waits {
    #[default]
    Nothing,
    /// For the end of an exchange.
    Exchange(usize),
    /// For the end of all that were begun.
    All,
}

#[derive(Default)]
struct Rank {
    slower: f64,
    /// The next piece of work, the next exchange that it begins, and how many are over.
    next: usize,
    begun: usize,
    over: usize,
    waits: Waits,
    queue: VecDeque<usize>,
    /// The exchange under way and its step.
    active: Option<(usize, usize)>,
    /// Whether the message of the step is sent, and that of the neighbour has come.
    sent: bool,
    come: bool,
    /// Messages that came before this rank was there.
    early: Vec<(usize, usize)>,
    /// When its links of rows from others are free, inside its node and between nodes.
    inbound: [f64; 2],
}

/// The link of rank 0 for the piece under way.
#[derive(Default)]
struct Star {
    inbound: f64,
    outbound: f64,
    come: u64,
}

enum What {
    /// A launch ends.
    Launched(usize),
    /// A message of a ring is sent, and has come.
    Passed { from: usize, to: usize, exchange: usize, step: usize },
    /// The rows of a rank are sent.
    Gone { from: usize, exchange: usize, step: usize },
    /// Rows have come.
    There { to: usize, exchange: usize, step: usize },
    /// A frame reaches the inbound link of rank 0.
    Reaches { from: usize, exchange: usize, piece: usize },
    /// A frame has come in whole.
    Came { exchange: usize, piece: usize },
    /// Rank 0 has sent all frames of a piece.
    Out { exchange: usize, piece: usize },
    /// A rank has its frame of a piece.
    Back { to: usize, exchange: usize, piece: usize },
}

struct Event {
    at: f64,
    /// Of equal moments the first given.
    given: u64,
    what: What,
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The earliest is the greatest, as the heap has it on top.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.given.cmp(&self.given))
    }
}

struct Events<'w> {
    work: &'w [Work],
    mesh: Mesh<'w>,
    exchanges: Vec<Plan>,
    ranks: Vec<Rank>,
    heap: BinaryHeap<Event>,
    given: u64,
    star: Star,
    found: Simulated,
}

impl Events<'_> {
    fn give(&mut self, at: f64, what: What) {
        self.given += 1;
        self.heap.push(Event { at, given: self.given, what });
    }

    /// Goes on with the work of a rank until it has to wait.
    fn go(&mut self, rank: usize, now: f64) {
        while let Some(work) = self.work.get(self.ranks[rank].next) {
            let own = &mut self.ranks[rank];
            match work {
                Work::Launch(seconds) => {
                    own.next += 1;
                    self.found.launches += 1;
                    let at = now + seconds * own.slower;
                    return self.give(at, What::Launched(rank));
                }
                Work::Begin(_) | Work::Wait(_) => {
                    own.next += 1;
                    let exchange = own.begun;
                    own.begun += 1;
                    own.queue.push_back(exchange);
                    let waits = matches!(work, Work::Wait(_));
                    if waits {
                        own.waits = Waits::Exchange(exchange);
                    }
                    self.start(rank, now);
                    if waits {
                        return;
                    }
                }
                Work::Until(back) => {
                    own.next += 1;
                    let exchange = (own.begun - 1).saturating_sub(*back);
                    if own.over <= exchange {
                        own.waits = Waits::Exchange(exchange);
                        return;
                    }
                }
                Work::Join => {
                    if own.active.is_some() || !own.queue.is_empty() {
                        own.waits = Waits::All;
                        return;
                    }
                    own.next += 1;
                }
            }
        }
    }

    /// Begins the next exchange of a rank's queue where none is under way.
    fn start(&mut self, rank: usize, now: f64) {
        if self.ranks[rank].active.is_some() {
            return;
        }
        let Some(exchange) = self.ranks[rank].queue.pop_front() else { return };
        self.ranks[rank].active = Some((exchange, 0));
        self.step(rank, now);
    }

    /// Sends the message of the step that a rank is at, or ends its exchange.
    fn step(&mut self, rank: usize, now: f64) {
        let Some((exchange, step)) = self.ranks[rank].active else { return };
        if step >= self.exchanges[exchange].steps() {
            return self.ends(rank, exchange, now);
        }
        match &self.exchanges[exchange] {
            Plan::Rings(messages) => {
                let (ring, bytes) = messages[step];
                let own = &mut self.ranks[rank];
                own.sent = false;
                let early = own.early.iter().position(|&at| at == (exchange, step));
                own.come = early.map(|at| own.early.swap_remove(at)).is_some();
                let machine = self.mesh.machine;
                let (inside, nodes) = (self.mesh.inside() as usize, self.mesh.nodes() as usize);
                let (link, to) = match ring {
                    Ring::Inside => (&machine.inside, rank / inside * inside + (rank % inside + 1) % inside),
                    Ring::Between => (&machine.between, (rank + inside) % (inside * nodes)),
                };
                let at = now + link.latency + bytes / link.bandwidth;
                self.found.messages += 1;
                self.give(at, What::Passed { from: rank, to, exchange, step });
            }
            Plan::Rows(rows, laps) => {
                let (rows, bytes) = (*rows, laps[step]);
                self.rows(rank, &rows, bytes, (exchange, step), now);
            }
            Plan::Star(_) if rank == 0 => self.out(exchange, step, now),
            Plan::Star(_) => {
                self.found.messages += 1;
                let at = now + self.mesh.machine.host().latency;
                self.give(at, What::Reaches { from: rank, exchange, piece: step });
            }
        }
    }

    /// Sends rows of a turn, or waits for them.
    fn rows(&mut self, rank: usize, rows: &Rows, bytes: u64, (exchange, step): (usize, usize), now: f64) {
        let machine = self.mesh.machine;
        let team = rows.team.max(1) as usize;
        let (first, source) = (rank - rank % team, rank - rank % team + rows.source as usize);
        let node = |rank: usize| rank / machine.cards.max(1) as usize;
        let link = |from: usize, to: usize| usize::from(node(from) != node(to));
        let links = [&machine.inside, &machine.between];
        if rows.away && rank == source {
            let mut ends = [now; 2];
            for to in (first..first + team).filter(|to| *to != rank) {
                let which = link(rank, to);
                let begins = if ends[which] == now { now + links[which].latency } else { ends[which] };
                ends[which] = begins + bytes as f64 / links[which].bandwidth;
                self.found.messages += 1;
                self.give(ends[which], What::There { to, exchange, step });
            }
            self.give(ends[0].max(ends[1]), What::Gone { from: rank, exchange, step });
        } else if !rows.away && rank != source {
            let which = link(rank, source);
            let reaches = now + links[which].latency;
            let inbound = &mut self.ranks[source].inbound[which];
            *inbound = inbound.max(reaches) + bytes as f64 / links[which].bandwidth;
            let at = *inbound;
            self.found.messages += 1;
            self.give(at, What::There { to: source, exchange, step });
            self.give(at, What::Gone { from: rank, exchange, step });
        } else {
            self.came(rank, exchange, step, now);
        }
    }

    /// Lets a rank go on that has all rows that it waits for.
    fn came(&mut self, rank: usize, exchange: usize, step: usize, now: f64) {
        let Plan::Rows(rows, _) = &self.exchanges[exchange] else { return };
        let waits = if rows.away { 1 } else { rows.team.saturating_sub(1) as usize };
        let own = &mut self.ranks[rank];
        let come = own.early.iter().filter(|at| **at == (exchange, step)).count();
        if own.active == Some((exchange, step)) && come >= waits {
            own.early.retain(|at| *at != (exchange, step));
            self.next(rank, exchange, step, now);
        }
    }

    /// Rank 0 sends the results of a piece, once it is there and all frames have come.
    fn out(&mut self, exchange: usize, piece: usize, now: f64) {
        let here = self.ranks[0].active == Some((exchange, piece));
        let Plan::Star(pieces) = &self.exchanges[exchange] else { return };
        if !here || self.star.come < pieces[piece].up.len() as u64 {
            return;
        }
        self.star.come = 0;
        let link = self.mesh.machine.host();
        let mut at = self.star.outbound.max(now);
        let down = pieces[piece].down.clone();
        for (bytes, to) in down.into_iter().zip(1..) {
            at += bytes as f64 / link.bandwidth;
            self.found.messages += 1;
            self.give(at + link.latency, What::Back { to, exchange, piece });
        }
        self.star.outbound = at;
        self.give(at, What::Out { exchange, piece });
    }

    fn ends(&mut self, rank: usize, exchange: usize, now: f64) {
        self.ranks[rank].active = None;
        self.ranks[rank].over = self.ranks[rank].over.max(exchange + 1);
        self.start(rank, now);
        let own = &mut self.ranks[rank];
        let goes_on = match own.waits {
            Waits::Nothing => false,
            Waits::Exchange(waited) => waited == exchange,
            Waits::All => own.active.is_none() && own.queue.is_empty(),
        };
        if goes_on {
            own.waits = Waits::Nothing;
            self.go(rank, now);
        }
    }

    fn next(&mut self, rank: usize, exchange: usize, step: usize, now: f64) {
        self.ranks[rank].active = Some((exchange, step + 1));
        self.step(rank, now);
    }

    fn happens(&mut self, now: f64, what: What) {
        match what {
            What::Launched(rank) => self.go(rank, now),
            What::Passed { from, to, exchange, step } => {
                let there = self.ranks[to].active == Some((exchange, step));
                match there {
                    true => self.ranks[to].come = true,
                    false => self.ranks[to].early.push((exchange, step)),
                }
                self.ranks[from].sent = true;
                for rank in [from, to] {
                    let own = &self.ranks[rank];
                    if own.active == Some((exchange, step)) && own.sent && own.come {
                        self.next(rank, exchange, step, now);
                    }
                }
            }
            What::Gone { from, exchange, step } => self.next(from, exchange, step, now),
            What::There { to, exchange, step } => {
                self.ranks[to].early.push((exchange, step));
                self.came(to, exchange, step, now);
            }
            What::Reaches { from, exchange, piece } => {
                let Plan::Star(pieces) = &self.exchanges[exchange] else { return };
                let bytes = pieces[piece].up[from - 1] as f64;
                let at = self.star.inbound.max(now) + bytes / self.mesh.machine.host().bandwidth;
                self.star.inbound = at;
                self.give(at, What::Came { exchange, piece });
            }
            What::Came { exchange, piece } => {
                self.star.come += 1;
                self.out(exchange, piece, now);
            }
            What::Out { exchange, piece } => self.next(0, exchange, piece, now),
            What::Back { to, exchange, piece } => self.next(to, exchange, piece, now),
        }
    }
}
