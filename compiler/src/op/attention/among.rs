//! Keys of chosen blocks.

use super::*;

/// A choice of keys: the last operand of the mask is `chosen i32[b, t, C, n]`, the numbers of
/// blocks that a token's heads read, those of as many adjacent heads one list. A block has the keys
/// whose position divided by `block` is its number; a negative number is no block, and one that
/// stands twice counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Among {
    /// Tokens of a block.
    pub block: u64,
    /// Blocks of a list.
    pub count: u64,
    /// Lists of a token.
    pub heads: u64,
    /// Whether a query's own block is always in its lists, and the others complete, as many as
    /// there are: what makes the number of pairs known.
    pub own: bool,
}

impl Among {
    pub(in crate::op) fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.integer(&mut self.block)?;
        a.word("of")?;
        a.integer(&mut self.count)?;
        a.word("for")?;
        a.integer(&mut self.heads)?;
        a.flag("own", &mut self.own)
    }

    /// Keys that query `i` of a sequence sees at most; as many where its window leaves them.
    pub(super) fn keys(&self, i: u64) -> u64 {
        let block = self.block.max(1);
        if !self.own {
            // Of a block that is not complete the keys up to the query.
            return (i + 1).min(self.count.saturating_mul(block));
        }
        let others = (i / block).min(self.count.saturating_sub(1));
        others.saturating_mul(block).saturating_add(i % block + 1)
    }
}

/// The lists of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'a> {
    block: u64,
    count: usize,
    lists: usize,
    /// Query heads of a list.
    each: usize,
    numbers: &'a [i32],
}

impl<'a> Chosen<'a> {
    /// Those of sequence `b` with `t` queries of `heads` heads, among the lists of all sequences.
    pub fn of_sequence(among: Among, [b, t]: [usize; 2], heads: usize, all: &'a [i32]) -> Self {
        let [count, lists] = [among.count, among.heads].map(|n| n as usize);
        let sequence = t * lists * count;
        let each = (heads / lists.max(1)).max(1);
        let numbers = all.get(b * sequence..(b + 1) * sequence).unwrap_or_default();
        Chosen { block: among.block.max(1), count, lists, each, numbers }
    }

    /// The number of a head's list among those of a query.
    #[inline(always)]
    pub fn number(&self, head: usize) -> usize {
        head / self.each
    }

    /// The blocks of a query and a head.
    #[inline(always)]
    pub fn list(&self, query: usize, head: usize) -> &'a [i32] {
        let first = (query * self.lists + self.number(head)) * self.count;
        self.numbers.get(first..first + self.count).unwrap_or_default()
    }

    /// Whether a head of a query reads the key of that position.
    pub fn sees(&self, query: usize, head: usize, position: i64) -> bool {
        position >= 0
            && i32::try_from(position as u64 / self.block).is_ok_and(|b| self.list(query, head).contains(&b))
    }
}

/// Pairs of a query and an end of a block of `every` tokens that is up to it, and less than
/// `window` before it.
pub(super) fn ends(tokens: u64, window: u64, every: u64) -> u128 {
    let every = every.max(1);
    (1..=tokens).map(|i| u128::from(i / every - i.saturating_sub(window) / every)).sum()
}
