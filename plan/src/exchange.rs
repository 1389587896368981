//! Exchanges of ranks: bytes by link, and the messages of their algorithm.
//!
//! Two ways are built. *Rings* are NCCL's: a ring inside each node, and rings between the nodes of
//! the ranks with equal numbers in them. The *star* is dreamc's own over TCP: all bytes go through
//! rank 0, in frames, piece by piece. Rows of experts go from rank to rank where there are rings:
//! each link of a rank carries its messages one after another.

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
    /// Rows of one member of each team to the owners of their experts, or back: of experts that are
    /// chosen equally often.
    Rows(Rows),
    /// Sums over the ranks that own the same experts.
    Pooled {
        /// How many numbers.
        elements: u64,
        /// Ranks that own the experts together.
        team: u64,
    },
    /// So many bytes that each rank sends to others, and gets of them, by the host.
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

/// Rows of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Experts of the mixture.
    pub experts: u64,
    /// Ranks that own them together.
    pub team: u64,
    /// The member of each team whose turn it is.
    pub source: u64,
    /// Whether its rows go away.
    pub away: bool,
    /// Its slots, used or not.
    pub slots: u64,
    /// Numbers of a row, and bytes.
    pub width: u64,
    /// Bytes of a row.
    pub row: u64,
}

impl Rows {
    /// Bytes between the member and each of the others.
    pub fn bytes(&self) -> u64 {
        self.slots / self.team.max(1) * self.row
    }

    /// Messages one after another from the member to each of the others, or back: how many bytes.
    /// Before rows go away, owners get the number of rows of each expert.
    pub fn laps(&self) -> Vec<u64> {
        let counts = 4 * (self.experts / self.team.max(1) + 1);
        if self.away { vec![counts, self.bytes()] } else { vec![self.bytes()] }
    }

    /// The same by the host: the counts of all teams, then rows piece by piece.
    fn by_host(&self, ranks: u64, at_once: u64) -> Vec<What> {
        let has = |rank: u64| rank % self.team.max(1) == self.source;
        let lengths = (0..ranks).map(|rank| if has(rank) { self.experts + 1 } else { 0 }).collect();
        let mut all = vec![What::Gather { lengths }];
        let (own, each) = (self.slots / self.team.max(1), (at_once / (self.width * self.team).max(1)).max(1));
        let mut first = 0;
        while first < own {
            let bytes = (own - first).min(each) * self.row;
            let of_source = |rank| if has(rank) { bytes * (self.team - 1) } else { 0 };
            let of_others = |rank| if has(rank) { 0 } else { bytes };
            let (source, others) = ((0..ranks).map(of_source).collect(), (0..ranks).map(of_others).collect());
            let (sent, received) = if self.away { (source, others) } else { (others, source) };
            all.push(What::ToAll { sent, received });
            first = first.saturating_add(each);
        }
        all
    }
}

/// Sums over the ranks that own the same experts, by the host: each adds its part, and hands it to
/// all.
fn pooled_by_host(elements: u64, team: u64, ranks: u64, at_once: u64) -> Vec<What> {
    let (alike, mut first, mut all) = ((ranks / team.max(1)).max(1), 0, vec![]);
    while first < elements {
        let count = (elements - first).min(at_once);
        let each = count.div_ceil(alike);
        let part = |rank: u64| {
            let number = rank / team.max(1);
            4 * (((number + 1) * each).min(count) - (number * each).min(count))
        };
        let whole = vec![4 * count; ranks as usize];
        let parts: Vec<u64> = (0..ranks).map(|rank| part(rank) * alike).collect();
        all.push(What::ToAll { sent: whole.clone(), received: parts.clone() });
        all.push(What::ToAll { sent: parts, received: whole });
        first = first.saturating_add(at_once);
    }
    all
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

    /// Of the ranks that own the same experts: those of a node, and nodes.
    pub fn alike(&self, team: u64) -> (u64, u64) {
        let all = (self.ranks / team.max(1)).max(1);
        let inside = (self.inside() / team.max(1)).clamp(1, all);
        (inside, all.div_ceil(inside))
    }

    /// Members of a rank's team other than it: those on its node, and those on others.
    pub fn members(&self, rank: u64, team: u64) -> (u64, u64) {
        let (first, node) = (rank - rank % team.max(1), |rank| rank / self.machine.cards.max(1));
        let here = (first..first + team).filter(|&other| other != rank && node(other) == node(rank)).count();
        (here as u64, team.saturating_sub(1 + here as u64))
    }

    /// The members of that number in all teams that are placed differently over nodes.
    pub fn sources(&self, rows: &Rows) -> impl Iterator<Item = u64> {
        let (team, source, cards) = (rows.team.max(1), rows.source, self.machine.cards.max(1));
        let teams = (self.ranks / team).max(1);
        // Teams are placed alike again after as many as a node has cards.
        let differ = if cards.is_multiple_of(team) || team.is_multiple_of(cards) { 1 } else { cards };
        (0..teams.min(differ)).map(move |number| number * team + source)
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
            What::Rows(_) => {
                let parts = self.parts(u64::MAX).into_iter();
                parts.map(|what| Exchange { what, ranks: self.ranks }.elements()).sum()
            }
            What::Pooled { elements, .. } => 2 * elements,
            What::Pool { .. } => 0,
        }
    }

    /// The exchanges of the host that it is made of, where there are several.
    fn parts(&self, at_once: u64) -> Vec<What> {
        match &self.what {
            What::Rows(rows) => rows.by_host(self.ranks, at_once),
            What::Pooled { elements, team } => pooled_by_host(*elements, *team, self.ranks, at_once),
            What::Sum { .. }
            | What::Scatter { .. }
            | What::Gather { .. }
            | What::ToAll { .. }
            | What::Pool { .. } => vec![],
        }
    }

    /// Whether it goes through the star.
    pub fn by_star(&self, machine: &Machine) -> bool {
        match (&self.what, machine.way) {
            (What::Pool { .. } | What::ToAll { .. }, _) | (_, Way::Star) => true,
            (
                What::Sum { .. }
                | What::Scatter { .. }
                | What::Gather { .. }
                | What::Rows(_)
                | What::Pooled { .. },
                Way::Rings,
            ) => false,
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
            What::Pooled { elements, team } => {
                let (inside, nodes) = mesh.alike(team);
                let bytes = (NUMBER * elements) as f64;
                let within = || pass(Ring::Inside, inside, bytes);
                let across = || pass(Ring::Between, nodes, bytes / inside as f64);
                within().chain(across()).chain(across()).chain(within()).collect()
            }
            What::Rows(_) | What::ToAll { .. } | What::Pool { .. } => vec![],
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
            What::Rows(_) | What::Pooled { .. } => {
                let parts = self.parts(at_once).into_iter();
                parts.flat_map(|what| Exchange { what, ranks: self.ranks }.pieces(at_once)).collect()
            }
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
        if let What::Rows(rows) = &self.what {
            // Each member has its turn: in the mean of all ranks.
            let sent: u64 = rows.laps().into_iter().sum();
            let (here, there) = mesh.members(rows.source, rows.team);
            (bytes.inside, bytes.between) = (sent * here / rows.team, sent * there / rows.team);
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
