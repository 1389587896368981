//! Hypersphere Parameterization (Ren et al., *Rethinking Language Model Scaling under Transferable
//! Hypersphere Optimization*, 2603.28743): matrices that stay at the Frobenius norm of their first
//! values, whose rate is an angle.
//!
//! With `d` and `t` the depth and the training tokens over those of the base, an angle has the
//! factor `d^-1/2 · t^-0.32` and none of width. The output of a component has the factor `d^-1/2`,
//! as the norm of its last matrix has by default.
//!
//! Tensors of AdamW follow [`Mup`], times `t^-0.32`. The authors' program gives them the rate of
//! the matrices at every width.

use super::mup::Mup;
use super::{Growth, Rule, Seen, Share};

/// The exponent of the number of tokens.
const DATA: f64 = -0.32;

pub(super) struct Hyperp;

impl Rule for Hyperp {
    fn share(&self, seen: &Seen, growth: Growth) -> Share {
        let data = growth.tokens.powf(DATA);
        if seen.whole.is_some() {
            return Share { rate: data / growth.depth.sqrt(), ..Share::NONE };
        }
        let share = Mup.share(seen, growth);
        Share { rate: share.rate * data, ..share }
    }
}
