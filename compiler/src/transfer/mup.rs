//! Maximal Update Parametrization over the width (Yang et al., *Tensor Programs V*, 2203.03466,
//! table 3, the columns of Adam) and Depth-µP over the depth (Yang et al., *Tensor Programs VI*,
//! 2310.02244).
//!
//! With `m` a weight's fan in over that at the base and `n` its fan out over that:
//!
//! | numbers | deviation of first values | rate |
//! |---|---|---|
//! | from a size that stays: embeddings | `1` | `1` |
//! | between sizes that grow | `m^-1/2` | `m^-1` |
//! | to a size that stays: the head, routers | `m^-1` | `m^-1` |
//! | gains, biases, filters | `1` | `1` |
//!
//! A step that is in proportion to the gradient (`sgd`) has the rate `n/m` for all: that is the
//! table's column of SGD, `fan_out`, `1`, `1/fan_in`.
//!
//! The head's multiplier of table 8 is in its first values and its rate, which is the same for
//! optimizers that do not look at the size of gradients. A step that Muon takes as a whole has
//! singular values of its own factor `√max(1, rows/columns)`, and should have `√(n/m)`.
//!
//! Depth-µP multiplies what a component adds by `l^-1/2` and rates in components by `l^-1/2`, for
//! `l` times as many layers. Passes of a loop add the same again: `p` times as many have the factor
//! `1/p` and no change of rates (2606.18524). The multiplier is in the last matrix, its first
//! values and its rate.
//!
//! Under `stream attend` the stream is a mean of sources, which norms bring to one size. First
//! values of `l` times as many sources add up to `l^1/2` of one, and what training adds to them,
//! which agrees, to `l`: rates in components have the factor `l^-1/2`, and what they add has none.
//! The papers say nothing of such a stream; `dreamc check-transfer` measures it.

use super::{Growth, Place, Rule, Seen, Share, Use};

pub(super) struct Mup;

impl Rule for Mup {
    fn share(&self, seen: &Seen, growth: Growth) -> Share {
        depth(0.5, seen, growth, width(seen))
    }
}

/// The factors of width.
pub(super) fn width(seen: &Seen) -> Share {
    let m = seen.fan_in.ratio();
    let n = seen.fan_out.ratio();
    let (init, rate) = match seen.of {
        Use::Product { normed: false, .. } if n == 1.0 && m != 1.0 => (1.0 / m, 1.0 / m),
        Use::Product { .. } => (m.powf(-0.5), 1.0 / m),
        Use::Lookup { .. } | Use::Factor | Use::Term | Use::Taps | Use::Unread => (1.0, 1.0),
        Use::Unknown(_) => return Share::NONE,
    };
    let rate = if seen.gradient { n / m } else { rate };
    let rate = seen.whole.map_or(rate, |own| (n / m).sqrt() / own);
    Share { init: Some(init), rate, eps: 1.0 }
}

/// The same with the factors of depth, where what is added falls with the power `alpha` of the
/// layers.
pub(super) fn depth(alpha: f64, seen: &Seen, growth: Growth, width: Share) -> Share {
    if seen.place == Place::Stream {
        return width;
    }
    if seen.averaged {
        // A gradient is in proportion to one over the size of the mean, whatever a norm makes of
        // it.
        let deep = if seen.gradient || alpha != 0.5 { 1.0 } else { growth.layers.powf(-0.5) };
        return Share { rate: width.rate * deep, ..width };
    }
    let passes = if seen.looped { growth.passes } else { 1.0 };
    let adds = growth.layers.powf(-alpha) / passes;
    // Applications of all layers add terms to a change that agree. A gradient is itself in
    // proportion to what is added, and the sum of those of all passes.
    let (smaller, ends) = if seen.gradient { (passes * adds, adds * adds) } else { (1.0, adds) };
    let rate = width.rate / (growth.layers * passes * adds * smaller);
    match seen.place {
        Place::End => Share { init: width.init.map(|init| init * adds), rate: rate * ends, ..width },
        Place::Stream | Place::Branch => Share { rate, ..width },
    }
}
