//! Stochastic gradient descent with momentum: `m ← μ m + g`, `w ← w (1 - rate · decay) - rate · m`
//! (Polyak, 1964, as Sutskever et al., 2013, write it, with the decay apart as in AdamW).

use super::{Moved, Optimizer, Rule, Stepping, Whole};
use crate::ir::Value;

/// Its constants.
pub(crate) struct Sgd {
    /// How much of the sum of gradients is kept.
    pub momentum: f64,
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn states(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn step(&self, s: &mut Stepping, rule: &Rule, g: Value, states: &[Value]) -> (Moved, Vec<Value>) {
        let before = s.b.scale(states[0], self.momentum);
        let m = s.b.add(before, g);
        let rate = s.rate(rule);
        let (w, moved) = (s.weight(), s.b.mul(m, rate));
        let kept = s.decayed(rule, w, rate);
        (Moved::Weight(s.b.sub(kept, moved)), vec![m])
    }

    fn whole(&self) -> Option<&dyn Whole> {
        None
    }
}
