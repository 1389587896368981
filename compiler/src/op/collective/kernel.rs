//! Exchanges of the ranks of a group.

use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::{KernelKind, Slot, Work, index, input, ints, need, result, small, updated};

/// The sum over the ranks of a group, left on all of them. A plan for one rank has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllReduce {
    /// How many.
    pub elements: u64,
    /// Over how many ranks.
    pub ranks: u64,
    /// Whether nothing else touches them until the program ends, so that it may overlap with the
    /// launches after it.
    pub overlap: bool,
}

/// The sum over the ranks of a group of some of the numbers that are cut over them, from the one on
/// that the second operand names. Each rank gets those of its part; what is left of the others'
/// parts means nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReduceScatter {
    /// Whose part is which, of all numbers that are cut.
    pub parts: Parts,
    /// How many of them are summed.
    pub elements: u64,
}

/// The parts of all ranks, each brought by its own, left on all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AllGather {
    /// Whose part is which.
    pub parts: Parts,
}

/// Some of the numbers that are cut over the ranks of a group, from the one on that the third
/// operand names, brought together from the parts of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gathered {
    /// Whose part is which, of all numbers that are cut.
    pub parts: Parts,
    /// How many of them are brought together.
    pub elements: u64,
}

/// The sum over the ranks of a group of some of the numbers that are cut over them, from the one on
/// that the third operand names. Each rank adds what is of its part to its part.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scattered {
    /// Whose part is which, of all numbers that are cut.
    pub parts: Parts,
    /// How many of them are summed.
    pub elements: u64,
}

/// The rows of one rank's slots, which are sorted by expert, brought to the ranks that own their
/// experts: of the rank that the last operand names. Each rank gets the rows of its experts, by
/// expert, and where those of each begin; the rows after them mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sent {
    /// Slots, used or not.
    pub slots: u64,
    /// Length of a row.
    pub width: u64,
    /// The owners of experts.
    pub owners: Owners,
}

/// Rows that [`Sent`] has brought, by where those of each expert begin, brought back into the slots
/// of the rank that the last operand names; its slots of no expert become zero. Other ranks keep
/// what they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Returned {
    /// Slots, used or not.
    pub slots: u64,
    /// Length of a row.
    pub width: u64,
    /// The owners of experts.
    pub owners: Owners,
}

/// The sum over the ranks that own the same experts, left on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pooled {
    /// How many.
    pub elements: u64,
    /// The owners of experts.
    pub owners: Owners,
}

/// The experts of a mixture over ranks. `team` successive ranks are a team, which has all of the
/// experts; each member owns the same number, the first member the first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owners {
    /// Experts of the mixture; 0 where no mixture is meant.
    pub experts: u64,
    /// Ranks of a team.
    pub team: u64,
    /// Ranks in all.
    pub ranks: u64,
    /// The rank of this plan.
    pub rank: u64,
}

impl Owners {
    /// Experts of each member.
    pub fn own(&self) -> u64 {
        self.experts / self.team.max(1)
    }

    /// Number of this rank among its team.
    pub fn member(&self) -> u64 {
        self.rank % self.team.max(1)
    }

    /// The first rank of this team.
    pub fn first(&self) -> u64 {
        self.rank - self.member()
    }

    /// The ranks that own the experts of this rank, in order.
    pub fn alike(&self) -> impl Iterator<Item = u64> {
        (self.member()..self.ranks).step_by(self.team.max(1) as usize)
    }

    fn check(&self) -> Result<(), String> {
        need(self.team > 1, "experts over one rank")?;
        need(self.rank < self.ranks, "there is no such rank")?;
        need(self.ranks.is_multiple_of(self.team), "a team that ranks do not fill")?;
        need(self.experts.is_multiple_of(self.team), "members own different numbers of experts")
    }

    fn summary(&self) -> String {
        let Owners { experts, team, ranks, rank } = self;
        format!("{experts} experts over {team}, rank {rank} of {ranks}")
    }

    /// The operand that names a member of the team.
    fn source(&self) -> Slot {
        index("source", Some(self.team))
    }

    fn check_rows(&self, slots: u64) -> Result<(), String> {
        need(self.experts > 0, "no experts")?;
        small(slots, "more slots than integers")?;
        self.check()
    }
}

/// Numbers that are cut over the ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// Where the part of each rank begins, and where that of the last ends.
    pub cuts: Vec<u64>,
    /// The rank of this plan.
    pub rank: u64,
}

impl Parts {
    /// How many numbers there are.
    pub fn elements(&self) -> u64 {
        self.cuts.last().copied().unwrap_or(0)
    }

    /// The parts of `elements` of the numbers, from `first` on.
    pub fn within(&self, first: u64, elements: u64) -> Parts {
        let last = first.saturating_add(elements);
        let cuts = self.cuts.iter().map(|&cut| cut.clamp(first, last) - first).collect();
        Parts { cuts, rank: self.rank }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u64 {
        self.cuts.len().saturating_sub(1) as u64
    }

    /// First number of a rank's part, and how many they are.
    pub fn of(&self, rank: u64) -> (u64, u64) {
        match self.cuts.get(rank as usize..) {
            Some([first, end, ..]) => (*first, end.saturating_sub(*first)),
            Some(_) | None => (0, 0),
        }
    }

    fn check(&self) -> Result<(), String> {
        match (self.ranks(), self.cuts.first()) {
            (2.., Some(0)) if self.rank >= self.ranks() => Err("there is no such rank".into()),
            (2.., Some(0)) if self.cuts.is_sorted() => Ok(()),
            (2.., _) => Err("the parts of ranks do not follow one another".into()),
            (0..2, _) => Err("parts of one rank".into()),
        }
    }

    /// The check of a kernel of `elements` of the numbers.
    fn check_some(&self, elements: u64) -> Result<(), String> {
        match elements <= self.elements() {
            true => self.check(),
            false => Err("more numbers than are cut".into()),
        }
    }

    /// The operand that names the first of `elements` of the numbers.
    fn first(&self, elements: u64) -> Slot {
        index("first", Some(self.elements().saturating_sub(elements) + 1))
    }

    fn summary(&self) -> String {
        let (first, count) = self.of(self.rank);
        format!("{}, {first}..{} of rank {} of {}", self.elements(), first + count, self.rank, self.ranks())
    }
}

/// A device runs nothing: the executor hands the range to the group.
macro_rules! by_the_group {
    () => {
        fn work(&self) -> Work {
            Work::default()
        }

        fn cuda(&self, _: Variant) -> Result<Option<Source>, CodegenError> {
            Ok(None)
        }

        fn naive(&self, _: Variant) -> Result<Option<Source>, CodegenError> {
            Ok(None)
        }
    };
}

impl KernelKind for AllReduce {
    fn signature(&self) -> Vec<Slot> {
        vec![updated("x", &[self.elements])]
    }

    fn check(&self) -> Result<(), String> {
        if self.ranks < 2 { Err("a sum over one rank".into()) } else { Ok(()) }
    }

    fn summary(&self) -> String {
        let overlap = if self.overlap { ", overlapping what follows" } else { "" };
        format!("all_reduce {} over {} ranks{overlap}", self.elements, self.ranks)
    }

    by_the_group!();
}

impl KernelKind for ReduceScatter {
    fn signature(&self) -> Vec<Slot> {
        vec![updated("x", &[self.elements]), self.parts.first(self.elements)]
    }

    fn check(&self) -> Result<(), String> {
        self.parts.check_some(self.elements)
    }

    fn summary(&self) -> String {
        format!("reduce_scatter {} of {}, overlapping what follows", self.elements, self.parts.summary())
    }

    by_the_group!();
}

impl KernelKind for Gathered {
    fn signature(&self) -> Vec<Slot> {
        let (_, own) = self.parts.of(self.parts.rank);
        vec![result("x", &[self.elements]), input("own", &[own]), self.parts.first(self.elements)]
    }

    fn check(&self) -> Result<(), String> {
        self.parts.check_some(self.elements)
    }

    fn summary(&self) -> String {
        format!("gathered {} of {}", self.elements, self.parts.summary())
    }

    by_the_group!();
}

impl KernelKind for Scattered {
    fn signature(&self) -> Vec<Slot> {
        let (_, own) = self.parts.of(self.parts.rank);
        vec![input("x", &[self.elements]), updated("own", &[own]), self.parts.first(self.elements)]
    }

    fn check(&self) -> Result<(), String> {
        self.parts.check_some(self.elements)
    }

    fn summary(&self) -> String {
        format!("scattered {} of {}", self.elements, self.parts.summary())
    }

    by_the_group!();
}

impl KernelKind for Sent {
    fn signature(&self) -> Vec<Slot> {
        let &Sent { slots, width, owners } = self;
        vec![
            input("x", &[slots, width]).float(0),
            ints("offsets", &[owners.experts.saturating_add(1)]),
            result("rows", &[slots, width]).float(0),
            result("begins", &[owners.own().saturating_add(1)]).ints(),
            owners.source(),
        ]
    }

    fn check(&self) -> Result<(), String> {
        self.owners.check_rows(self.slots)
    }

    fn summary(&self) -> String {
        format!("sent {}×{}, {}", self.slots, self.width, self.owners.summary())
    }

    by_the_group!();
}

impl KernelKind for Returned {
    fn signature(&self) -> Vec<Slot> {
        let &Returned { slots, width, owners } = self;
        vec![
            input("rows", &[slots, width]).float(0),
            ints("offsets", &[owners.experts.saturating_add(1)]),
            ints("begins", &[owners.own().saturating_add(1)]),
            updated("y", &[slots, width]).float(0),
            owners.source(),
        ]
    }

    fn check(&self) -> Result<(), String> {
        self.owners.check_rows(self.slots)
    }

    fn summary(&self) -> String {
        format!("returned {}×{}, {}", self.slots, self.width, self.owners.summary())
    }

    by_the_group!();
}

impl KernelKind for Pooled {
    fn signature(&self) -> Vec<Slot> {
        vec![updated("x", &[self.elements])]
    }

    fn check(&self) -> Result<(), String> {
        self.owners.check()
    }

    fn summary(&self) -> String {
        format!("pooled {}, {}", self.elements, self.owners.summary())
    }

    by_the_group!();
}

impl KernelKind for AllGather {
    fn signature(&self) -> Vec<Slot> {
        vec![updated("x", &[self.parts.elements()])]
    }

    fn check(&self) -> Result<(), String> {
        self.parts.check()
    }

    fn summary(&self) -> String {
        format!("all_gather {}", self.parts.summary())
    }

    by_the_group!();
}
