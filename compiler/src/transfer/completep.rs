//! CompleteP (Dey et al., *Don't be lazy: CompleteP enables compute-efficient deep transformers*,
//! 2505.01618, table 1 with `α = 1`): [`Mup`](super::mup) over the width; what a component adds has
//! the factor `1/l` for `l` times as many layers, and rates in components none. AdamW's ε is
//! divided by how much wider the model is, and in components by `l` too.
//!
//! Where a multiplier `s` is in a weight's first values and rate, gradients of that weight are
//! those of the table over `s`, and so is its ε.

use super::{Growth, Place, Rule, Seen, Share, mup};

pub(super) struct Completep;

impl Rule for Completep {
    fn share(&self, seen: &Seen, growth: Growth) -> Share {
        let share = mup::depth(1.0, seen, growth, mup::width(seen));
        let passes = if seen.looped { growth.passes } else { 1.0 };
        let adds = if seen.averaged { 1.0 } else { 1.0 / (growth.layers * passes) };
        let eps = match seen.place {
            Place::Stream if seen.head => 1.0,
            Place::Stream => 1.0 / growth.width,
            Place::Branch => adds / growth.width,
            Place::End => 1.0 / growth.width,
        };
        Share { eps, ..share }
    }
}
