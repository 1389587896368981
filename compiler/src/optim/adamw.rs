//! AdamW: `m ← β1 m + (1 - β1) g`, `v ← β2 v + (1 - β2) g²`,
//! `w ← w - rate · (m̂ / (√v̂ + ε) + decay · w)`, with `m̂` and `v̂` corrected for their beginning
//! at zero.

use super::{Moved, Optimizer, Rule, Stepping, Whole};
use crate::ir::{Input, Unary, Value};

/// Its constants.
pub(crate) struct AdamW {
    /// How much of the means is kept at each step.
    pub betas: (f64, f64),
    /// Added to the root.
    pub eps: f64,
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn states(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn step(&self, s: &mut Stepping, rule: &Rule, g: Value, states: &[Value]) -> (Moved, Vec<Value>) {
        let m = s.mean(states[0], self.betas.0, g);
        let square = s.b.unary(Unary::Square, g);
        let v = s.mean(states[1], self.betas.1, square);
        let (first, second) = (s.given(Input::FirstCorrection), s.given(Input::SecondCorrection));
        let (corrected, variance) = (s.b.mul(m, first), s.b.mul(v, second));
        let root = s.b.unary(Unary::Sqrt, variance);
        let eps = s.b.constant(self.eps * rule.eps);
        let root = s.b.add(root, eps);
        let move_by = s.b.div(corrected, root);
        let (w, rate) = (s.weight(), s.rate(rule));
        let kept = s.decayed(rule, w, rate);
        let moved = s.b.mul(move_by, rate);
        (Moved::Weight(s.b.sub(kept, moved)), vec![m, v])
    }

    fn whole(&self) -> Option<&dyn Whole> {
        None
    }
}
