//! The seconds of a step in closed form: launches by their prices, exchanges by the α–β model.
//!
//! A message of `b` bytes takes `α + b / β` (Hockney, 1994). A ring of `p` ranks takes `p - 1`
//! messages of `1 / p` of the bytes for a reduce-scatter, and as many for an all-gather (Thakur,
//! Rabenseifner, Gropp, 2005, section 4). Exchanges that overlap launches are a queue:
//! each ends its own seconds after the later of its beginning and the end of the one before it.

use crate::exchange::{Bytes, Exchange, Mesh};
use crate::timeline::Work;
use dreamc_compiler::count::network::{Link, Network};
use serde::Serialize;

/// Seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Of launches.
    pub launches: f64,
    /// Of exchanges, one after another.
    pub exchanges: f64,
    /// Of exchanges that nothing hides.
    pub exposed: f64,
    /// Of the step.
    pub step: f64,
}

impl Mesh<'_> {
    /// The links as the formulas of collectives take them.
    pub fn network(&self) -> Network {
        let machine = self.machine;
        let link = |name, link: &crate::machine::Link| Link {
            name,
            latency: link.latency,
            bandwidth: link.bandwidth,
        };
        Network {
            node: machine.cards,
            inside: link("inside", &machine.inside),
            between: link("between", &machine.between),
        }
    }

    /// Seconds of an exchange by itself.
    pub fn seconds(&self, exchange: &Exchange) -> f64 {
        if exchange.ranks < 2 {
            return 0.0;
        }
        if exchange.by_star(self.machine) {
            return self.by_host(exchange);
        }
        let bytes = (4 * exchange.elements()) as f64;
        match exchange.what {
            crate::What::Sum { .. } => self.network().all_reduce(self.ranks, bytes),
            crate::What::Scatter { .. } | crate::What::Gather { .. } => {
                self.network().half(self.ranks, bytes)
            }
            crate::What::Pooled { elements, team } => {
                let (inside, nodes) = self.alike(team);
                let network = Network { node: inside, ..self.network() };
                network.all_reduce(inside * nodes, (4 * elements) as f64)
            }
            crate::What::Rows(rows) => {
                let of = |rank| rows.laps().into_iter().map(|bytes| self.lap(rank, rows.team, bytes)).sum();
                self.sources(&rows).map(of).fold(0.0, f64::max)
            }
            crate::What::ToAll { .. } | crate::What::Pool { .. } => 0.0,
        }
    }

    /// Seconds of a message of `bytes` bytes between a rank and each other member of its team:
    /// those of a link pass one after another, and both links work at the same time.
    pub fn lap(&self, rank: u64, team: u64, bytes: u64) -> f64 {
        let (here, there) = self.members(rank, team);
        let of = |count: u64, link: &crate::machine::Link| match count {
            0 => 0.0,
            _ => link.latency + (count * bytes) as f64 / link.bandwidth,
        };
        of(here, &self.machine.inside).max(of(there, &self.machine.between))
    }

    /// Seconds of an exchange through the star: the frames of a piece come in one after another,
    /// and go out so. A rank sends its next frame when it has its result; those that have theirs
    /// early send while others wait.
    pub fn by_host(&self, exchange: &Exchange) -> f64 {
        let link = self.machine.host();
        let time = |bytes: u64| bytes as f64 / link.bandwidth;
        let all = |frames: &[u64]| frames.iter().copied().map(time).sum::<f64>();
        let mut pieces = exchange.pieces(self.at_once).into_iter();
        let Some(mut before) = pieces.next() else { return 0.0 };
        let mut seconds = 2.0 * link.latency + all(&before.up) + all(&before.down);
        for piece in pieces {
            // The inbound link is free again at the later of two: every frame since the first
            // result, and the last frame since the last result.
            let first = before.down.first().copied().map_or(0.0, time);
            let early = first + all(&piece.up) - all(&before.down);
            let late = piece.up.last().copied().map_or(0.0, time);
            seconds += 2.0 * link.latency + early.max(late) + all(&piece.down);
            before = piece;
        }
        seconds
    }

    /// Seconds of a step.
    pub fn step(&self, work: &[Work]) -> Seconds {
        let mut total = Seconds::default();
        // Launches and waits so far, when the queue of exchanges is free, and the ends of all that
        // have begun.
        let (mut now, mut free): (f64, f64) = (0.0, 0.0);
        let mut ends = vec![];
        for work in work {
            let until = match work {
                Work::Launch(seconds) => {
                    now += seconds;
                    total.launches += seconds;
                    continue;
                }
                Work::Begin(exchange) | Work::Wait(exchange) => {
                    let seconds = self.seconds(exchange);
                    total.exchanges += seconds;
                    free = free.max(now) + seconds;
                    ends.push(free);
                    if let Work::Begin(_) = work { now } else { free }
                }
                Work::Until(back) => ends.iter().rev().nth(*back).copied().unwrap_or(now),
                Work::Join => free,
            };
            total.exposed += (until - now).max(0.0);
            now = now.max(until);
        }
        let end = now.max(free);
        total.exposed += end - now;
        total.step = end;
        total
    }

    /// Bytes of a rank's links in a step.
    pub fn bytes(&self, work: &[Work]) -> Bytes {
        let mut bytes = Bytes::default();
        for work in work {
            match work {
                Work::Begin(exchange) | Work::Wait(exchange) => bytes += exchange.bytes(self),
                Work::Launch(_) | Work::Until(_) | Work::Join => {}
            }
        }
        bytes
    }
}
