//! The range of a formula over a block of pairs, by interval arithmetic: which blocks a mask leaves
//! whole, and which it leaves nothing of.

use super::{Binary, Formula, Step, Unary};

/// Numbers from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The smallest.
    pub low: f64,
    /// The largest.
    pub high: f64,
}

/// A block of pairs: where its positions, its heads and what it reads are.
pub struct Block<'a> {
    /// Positions of its queries.
    pub query: Range,
    /// Positions of its keys.
    pub key: Range,
    /// Its heads.
    pub head: Range,
    /// The numbers of an operand, of a table those with indices in a range.
    pub read: &'a dyn Fn(usize, Option<Range>) -> Range,
}

/// How much of a block a mask leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// No pair.
    Empty,
    /// Every pair.
    Full,
    /// Perhaps some: each must be looked at.
    Mixed,
}

impl Range {
    /// Nothing is known.
    pub const ALL: Range = Range { low: f64::NEG_INFINITY, high: f64::INFINITY };

    /// Everything where a bound is no number.
    pub fn new(low: f64, high: f64) -> Range {
        if low.is_nan() || high.is_nan() { Range::ALL } else { Range { low, high } }
    }

    /// The least range that has both.
    pub fn join(self, other: Range) -> Range {
        Range::new(self.low.min(other.low), self.high.max(other.high))
    }

    /// The range of numbers; everything where there are none, or some is NaN.
    pub fn of(numbers: impl Iterator<Item = f64>) -> Range {
        let (mut low, mut high, mut nan) = (f64::INFINITY, f64::NEG_INFINITY, false);
        for x in numbers {
            nan |= x.is_nan();
            low = low.min(x);
            high = high.max(x);
        }
        if nan || low > high { Range::ALL } else { Range { low, high } }
    }

    fn is_point(self) -> bool {
        self.low == self.high
    }

    /// A comparison that holds for all of them, for none, or for some.
    fn truth(all: bool, none: bool) -> Range {
        Range { low: f64::from(u8::from(all)), high: f64::from(u8::from(!none)) }
    }

    fn unary(self, f: Unary) -> Range {
        let each = |r: Range| Range::new(f.apply(r.low), f.apply(r.high));
        match f {
            Unary::Stop => self,
            Unary::Neg => Range::new(-self.high, -self.low),
            Unary::Exp | Unary::Tanh | Unary::Floor => each(self),
            Unary::Log | Unary::Sqrt if self.low >= 0.0 => each(self),
            Unary::Log | Unary::Sqrt => Range::ALL,
            Unary::Abs if self.low >= 0.0 => self,
            Unary::Abs if self.high <= 0.0 => Range::new(-self.high, -self.low),
            Unary::Abs => Range::new(0.0, self.high.max(-self.low)),
            // Of an infinite number neither is one.
            Unary::Sin | Unary::Cos if self.low.is_finite() && self.high.is_finite() => {
                if self.is_point() {
                    each(self)
                } else {
                    Range { low: -1.0, high: 1.0 }
                }
            }
            Unary::Sin | Unary::Cos => Range::ALL,
        }
    }

    fn binary(self, f: Binary, other: Range) -> Range {
        let (a, b) = (self, other);
        // Bounds of a function that is monotone in each of the two.
        let corners = |f: fn(f64, f64) -> f64| {
            let all = [f(a.low, b.low), f(a.low, b.high), f(a.high, b.low), f(a.high, b.high)];
            Range::of(all.into_iter())
        };
        match f {
            Binary::Add => Range::new(a.low + b.low, a.high + b.high),
            Binary::Sub => Range::new(a.low - b.high, a.high - b.low),
            Binary::Mul => corners(|a, b| a * b),
            Binary::Div if b.low > 0.0 || b.high < 0.0 => corners(|a, b| a / b),
            Binary::Div => Range::ALL,
            Binary::Min => Range::new(a.low.min(b.low), a.high.min(b.high)),
            Binary::Max => Range::new(a.low.max(b.low), a.high.max(b.high)),
            Binary::Less => Range::truth(a.high < b.low, a.low >= b.high),
            Binary::AtMost => Range::truth(a.high <= b.low, a.low > b.high),
            Binary::Equal => {
                let point = a.is_point() && b.is_point() && a.low == b.low;
                Range::truth(point, a.high < b.low || b.high < a.low)
            }
        }
    }
}

impl Formula {
    /// Its range over a block.
    pub fn over(&self, block: &Block) -> Range {
        let mut ranges: Vec<Range> = Vec::with_capacity(self.steps().len());
        for step in self.steps() {
            ranges.push(match *step {
                Step::Number(x) => Range::new(x.0, x.0),
                Step::Score => Range::ALL,
                Step::Query => block.query,
                Step::Key => block.key,
                Step::Head => block.head,
                Step::Read(read) => (block.read)(read, None),
                Step::Lookup(read, x) => (block.read)(read, Some(ranges[x])),
                Step::Unary(f, x) => ranges[x].unary(f),
                Step::Binary(f, a, b) => ranges[a].binary(f, ranges[b]),
                Step::Where(c, a, b) => {
                    let c = ranges[c];
                    match (c.low > 0.0, c.high <= 0.0) {
                        (true, _) => ranges[a],
                        (_, true) => ranges[b],
                        (false, false) => ranges[a].join(ranges[b]),
                    }
                }
            });
        }
        ranges.last().copied().unwrap_or(Range::ALL)
    }

    /// How much of a block it leaves, as a mask.
    pub fn part(&self, block: &Block) -> Part {
        let range = self.over(block);
        match (range.low > 0.0, range.high <= 0.0) {
            (true, _) => Part::Full,
            (_, true) => Part::Empty,
            (false, false) => Part::Mixed,
        }
    }
}
