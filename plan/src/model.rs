//! The seconds of a step in closed form: launches by their prices, exchanges by the α–β model.
//!
//! A message of `b` bytes takes `α + b / β` (Hockney, 1994). A ring of `p` ranks takes `p - 1`
//! messages of `1 / p` of the bytes for a reduce-scatter, and as many for an all-gather (Thakur,
//! Rabenseifner, Gropp, 2005, section 4). Exchanges that overlap launches are a queue: the
//! last of them ends at the latest of `begun(k) + Σ seconds(j ≥ k)` over all `k`.

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
            crate::What::ToAll { .. } | crate::What::Pool { .. } => 0.0,
        }
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
        // Of the program under way: launches and waits so far, exchanges in the queue with the
        // moment at which each began.
        let (mut now, mut queue): (f64, Vec<(f64, f64)>) = (0.0, vec![]);
        let join = |now: &mut f64, queue: &mut Vec<(f64, f64)>| {
            let mut behind = 0.0;
            let mut end = *now;
            for (begun, seconds) in queue.drain(..).rev() {
                behind += seconds;
                end = end.max(begun + behind);
            }
            let exposed = end - *now;
            let program = std::mem::take(now) + exposed;
            (program, exposed)
        };
        for work in work {
            match work {
                Work::Launch(seconds) => {
                    now += seconds;
                    total.launches += seconds;
                }
                Work::Begin(exchange) => {
                    let seconds = self.seconds(exchange);
                    total.exchanges += seconds;
                    queue.push((now, seconds));
                }
                Work::Wait(exchange) => {
                    let seconds = self.seconds(exchange);
                    total.exchanges += seconds;
                    total.exposed += seconds;
                    now += seconds;
                }
                Work::Join => {
                    let (program, exposed) = join(&mut now, &mut queue);
                    total.exposed += exposed;
                    total.step += program;
                }
            }
        }
        let (program, exposed) = join(&mut now, &mut queue);
        total.exposed += exposed;
        total.step += program;
        total
    }

    /// Bytes of a rank's links in a step.
    pub fn bytes(&self, work: &[Work]) -> Bytes {
        let mut bytes = Bytes::default();
        for work in work {
            match work {
                Work::Begin(exchange) | Work::Wait(exchange) => bytes += exchange.bytes(self),
                Work::Launch(_) | Work::Join => {}
            }
        }
        bytes
    }
}
