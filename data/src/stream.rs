//! Rows cut from one long run of tokens: text, and documents without prompts put one after another.
//!
//! *In*: a range of a shard, an epoch, a row number. *Out*: the row. *Promise*: each epoch visits
//! every token once, in an order and from an offset that are functions of (seed, epoch); nothing is
//! remembered between rows.

use super::DataError;
use super::batch::{Batch, NO_LOSS};
use super::shard::Shard;
use crate::rng::{Permutation, Philox};
use std::ops::Range;
use std::sync::Arc;

/// A range of a shard, cut into rows.
#[derive(Clone)]
pub struct Stream {
    /// The tokens.
    pub shard: Arc<Shard>,
    /// Which of them.
    pub range: Range<u64>,
    /// Tokens in a row.
    pub sequence: u64,
    /// Shuffles rows; without, they come in order.
    pub order: Option<Philox>,
    /// Rows begin at other tokens in every epoch: to learn from, not to measure on.
    pub shifts: bool,
    /// Targets a row takes loss on, for measuring: with fewer than a row has tokens, rows overlap,
    /// and each target is predicted from at least `sequence - stride` tokens, as far as there are
    /// any.
    pub stride: u64,
    /// Attention stops, and positions begin again, at each document.
    pub mask: bool,
    /// The token that ends documents, and as an input begins the next.
    pub end: u32,
    /// The first input of every row, and of every document under a mask, in place of the token
    /// before; the first token of a row is then predicted from it alone.
    pub begin: Option<u32>,
}

impl Stream {
    /// Rows of an epoch.
    pub fn rows(&self, epoch: u64) -> u64 {
        let targets = self.targets();
        if targets == 0 { 0 } else { (targets + self.shift(epoch)).div_ceil(self.stride) }
    }

    /// Tokens that are predicted: without a begin token, all but the first.
    fn targets(&self) -> u64 {
        (self.range.end - self.range.start).saturating_sub(u64::from(self.begin.is_none()))
    }

    /// Rows begin at other tokens in every epoch.
    fn shift(&self, epoch: u64) -> u64 {
        self.order.filter(|_| self.shifts).map_or(0, |philox| philox.bits(epoch, u64::MAX) % self.sequence)
    }

    /// Adds row `index` of an epoch. A row at either end of the range may be short; it is filled
    /// up.
    pub fn row(&self, epoch: u64, index: u64, out: &mut Batch) -> Result<(), DataError> {
        let place = match self.order {
            Some(philox) => Permutation::new(philox, epoch, self.rows(epoch)).at(index),
            None => index,
        };
        let shift = self.shift(epoch);
        let targets = self.targets();
        // The token that target `i` is, and the one before it.
        let first = self.range.start + u64::from(self.begin.is_none());
        let learn = (place * self.stride).saturating_sub(shift);
        let end = (place + 1) * self.stride - shift;
        let to = end.min(targets);
        // With overlap, what comes before the first target that counts is there to be read.
        let from = if self.stride == self.sequence { learn } else { end.saturating_sub(self.sequence) };
        // One more than the targets, before the first of them, where there is one.
        let read = (first + from).saturating_sub(1);
        let tokens = self.shard.tokens(read..first + to)?;
        let bytes = self.shard.bytes(first + from..first + to)?;
        let token = |at: u64| tokens[(at - read) as usize];
        let (mut position, mut segment) = (0, 0);
        for i in from..to {
            let before = (first + i).checked_sub(1).filter(|_| i > from || self.begin.is_none());
            let mut id = before.map_or(self.end as i32, token);
            if self.mask && i > from && id == self.end as i32 {
                (position, segment) = (0, segment + 1);
            }
            if let Some(begin) = self.begin.filter(|_| position == 0) {
                id = begin as i32;
            }
            out.ids.push(id);
            let target = token(first + i);
            out.targets.push(if i >= learn { target } else { NO_LOSS });
            out.bytes.push(if i >= learn { bytes[(i - from) as usize] } else { 0 });
            out.positions.push(position);
            out.segments.push(segment);
            position += 1;
        }
        out.pad_row(self.end);
        Ok(())
    }
}
