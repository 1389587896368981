//! Lion: `w ← w - rate · (sign(β1 m + (1 - β1) g) + decay · w)`, then `m ← β2 m + (1 - β2) g`
//! (Chen et al., *Symbolic Discovery of Optimization Algorithms*, 2302.06675, algorithm 2). The
//! sign of 0 is 0.

use super::{Moved, Optimizer, Rule, Stepping, Whole};
use crate::ir::{Unary, Value};

/// Its constants.
pub(crate) struct Lion {
    /// How much of the mean counts for the move, and how much of it is kept.
    pub betas: (f64, f64),
}

impl Optimizer for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn states(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn step(&self, s: &mut Stepping, rule: &Rule, g: Value, states: &[Value]) -> (Moved, Vec<Value>) {
        let toward = s.mean(states[0], self.betas.0, g);
        let m = s.mean(states[0], self.betas.1, g);
        let above = s.b.unary(Unary::Positive, toward);
        let against = s.b.unary(Unary::Neg, toward);
        let below = s.b.unary(Unary::Positive, against);
        let sign = s.b.sub(above, below);
        let rate = s.rate(rule);
        let (w, moved) = (s.weight(), s.b.mul(sign, rate));
        let kept = s.decayed(rule, w, rate);
        (Moved::Weight(s.b.sub(kept, moved)), vec![m])
    }

    fn whole(&self) -> Option<&dyn Whole> {
        None
    }
}
