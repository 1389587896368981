//! Exchanges of ranks: bytes by link, and the messages of their algorithm.
//!
//! Two ways are built. *Rings* are NCCL's: a ring inside each node, and rings between the nodes of
//! the ranks with equal numbers in them. The *star* is dreamc's own over TCP: all bytes go through
//! rank 0, in frames, piece by piece.

use crate::machine::{Machine, Way};
use serde::Serialize;

/// Bytes of a number in an exchange.
const NUMBER: u64 = 4;

/// Bytes before those of a frame of the star: a tag, a rank, a length.
const HEAD: u64 = 17;

/// Bytes of a length.
const LENGTH: u64 = 8;

/// A thing that all ranks do together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The collective.
    pub what: What,
    /// Over how many ranks.
    pub ranks: u64,
}

/// A collective and its sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Sums of numbers, left on all ranks.
    Sum {
        /// How many.
        elements: u64,
    },
    /// Sums; each rank gets its part of the numbers.
    Scatter {
        /// Of each rank.
        lengths: Vec<u64>,
    },
    /// Each rank's part of the numbers, handed to all.
    Gather {
        /// Of each rank.
        lengths: Vec<u64>,
    },
    /// Bytes that each rank sends to others, and gets from them, through the host.
    ToAll {
        /// Of each rank, to all others together.
        sent: Vec<u64>,
        /// By each rank, of all others together.
        received: Vec<u64>,
    },
    /// Bytes of each rank, handed to all by the host.
    Pool {
        /// Of each.
        bytes: u64,
    },
}

/// Ranks on a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mesh<'m> {
    /// The machine.
    pub machine: &'m Machine,
    /// Ranks in all.
    pub ranks: u64,
    /// Numbers that go through the star at once.
    pub at_once: u64,
}

/// Bytes of a rank's links in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// Given to the exchanges of numbers by a rank.
    pub given: u64,
    /// Sent over the link inside a node by each rank.
    pub inside: u64,
    /// Sent over the link between nodes by each rank.
    pub between: u64,
    /// Sent by rank 0 through the star.
    pub star_sent: u64,
    /// Received by rank 0 through the star; all others together send as many.
    pub star_received: u64,
}

/// A piece of an exchange through the star.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes of the frame of each rank but the first.
    pub up: Vec<u64>,
    /// Bytes of the frame back to each of them.
    pub down: Vec<u64>,
}

/// A link of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Of the ranks of a node.
    Inside,
    /// Of the ranks with equal numbers in their nodes.
    Between,
}

impl Mesh<'_> {
    /// Ranks of a node.
    pub fn inside(&self) -> u64 {
        self.ranks.clamp(1, self.machine.cards)
    }

    /// Nodes.
    pub fn nodes(&self) -> u64 {
        self.ranks.div_ceil(self.machine.cards).max(1)
    }
}

impl Exchange {
    /// Numbers that take part.
    pub fn elements(&self) -> u64 {
        match &self.what {
            What::Sum { elements } => *elements,
            What::Scatter { lengths } | What::Gather { lengths } => lengths.iter().sum(),
            // Members take turns: in the mean of all ranks.
            What::ToAll { sent, .. } => sent.iter().sum::<u64>() / NUMBER / self.ranks.max(1),
            What::Pool { .. } => 0,
        }
    }

    /// Whether it goes through the star.
    pub fn by_star(&self, machine: &Machine) -> bool {
        match (&self.what, machine.way) {
            (What::Pool { .. } | What::ToAll { .. }, _) | (_, Way::Star) => true,
            (What::Sum { .. } | What::Scatter { .. } | What::Gather { .. }, Way::Rings) => false,
        }
    }

    /// The messages that each rank sends one after another by rings: on which ring, how many
    /// bytes.
    pub fn rings(&self, mesh: &Mesh) -> Vec<(Ring, f64)> {
        let bytes = (NUMBER * self.elements()) as f64;
        let (inside, nodes) = (mesh.inside(), mesh.nodes());
        let pass = |ring, ranks: u64, bytes: f64| {
            std::iter::repeat_n((ring, bytes / ranks as f64), ranks.saturating_sub(1) as usize)
        };
        let within = || pass(Ring::Inside, inside, bytes);
        let across = || pass(Ring::Between, nodes, bytes / inside as f64);
        match self.what {
            What::Sum { .. } => within().chain(across()).chain(across()).chain(within()).collect(),
            What::Scatter { .. } => within().chain(across()).collect(),
            What::Gather { .. } => across().chain(within()).collect(),
            What::ToAll { .. } | What::Pool { .. } => vec![],
        }
    }

    /// The pieces in which it goes through the star.
    pub fn pieces(&self, at_once: u64) -> Vec<Piece> {
        let others = self.ranks.saturating_sub(1) as usize;
        let of = |elements: u64, each: u64| {
            let firsts = (0..elements).step_by(each.max(1) as usize);
            firsts.map(move |first| (first, each.min(elements - first)))
        };
        match &self.what {
            What::Pool { bytes } => {
                let all = self.ranks * (LENGTH + bytes);
                vec![Piece { up: vec![HEAD + bytes; others], down: vec![HEAD + all; others] }]
            }
            What::ToAll { sent, received } => {
                let frame = |bytes: &u64| HEAD + LENGTH * self.ranks + bytes;
                let of = |each: &[u64]| each.iter().skip(1).map(frame).collect();
                vec![Piece { up: of(sent), down: of(received) }]
            }
            What::Sum { elements } => of(*elements, at_once)
                .map(|(_, count)| {
                    let frame = vec![HEAD + NUMBER * count; others];
                    Piece { up: frame.clone(), down: frame }
                })
                .collect(),
            What::Scatter { lengths } => {
                let mut cuts = vec![0];
                cuts.extend(lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                }));
                let piece = |(first, count): (u64, u64)| {
                    let within = |at: u64| at.clamp(first, first + count);
                    let own = cuts.windows(2).skip(1).map(|c| HEAD + NUMBER * (within(c[1]) - within(c[0])));
                    let up = HEAD + LENGTH * self.ranks + NUMBER * count;
                    Piece { up: vec![up; others], down: own.collect() }
                };
                of(self.elements(), at_once).map(piece).collect()
            }
            What::Gather { lengths } => {
                let longest = lengths.iter().copied().max().unwrap_or(0);
                let each = longest.min((at_once / self.ranks.max(1)).max(1));
                let piece = |(first, _): (u64, u64)| {
                    let own = |length: &u64| NUMBER * length.saturating_sub(first).min(each);
                    let all: u64 = lengths.iter().map(|length| LENGTH + own(length)).sum();
                    let up = lengths.iter().skip(1).map(|length| HEAD + own(length)).collect();
                    Piece { up, down: vec![HEAD + all; others] }
                };
                of(longest, each).map(piece).collect()
            }
        }
    }

    /// Bytes of its messages.
    pub fn bytes(&self, mesh: &Mesh) -> Bytes {
        let mut bytes = Bytes { given: NUMBER * self.elements(), ..Bytes::default() };
        if self.by_star(mesh.machine) {
            for piece in self.pieces(mesh.at_once) {
                bytes.star_received += piece.up.iter().sum::<u64>();
                bytes.star_sent += piece.down.iter().sum::<u64>();
            }
            return bytes;
        }
        let of = |which: Ring| -> u64 {
            let sent = self.rings(mesh).into_iter().filter(|(ring, _)| *ring == which);
            sent.map(|(_, bytes)| bytes).sum::<f64>().round() as u64
        };
        (bytes.inside, bytes.between) = (of(Ring::Inside), of(Ring::Between));
        bytes
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        self.given += other.given;
        self.inside += other.inside;
        self.between += other.between;
        self.star_sent += other.star_sent;
        self.star_received += other.star_received;
    }
}
