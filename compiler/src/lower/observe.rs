//! Observations that layers leave for the host.

use super::*;

impl Lower<'_> {
    /// Leaves a value for the host.
    pub(super) fn observe(&mut self, owner: Owner, what: Observation, value: Value) {
        if self.shape.observe {
            let name = format!("observed.{}.{}", self.architecture.label(owner), what.name());
            self.facts.observed.insert(name.clone(), (owner, what));
            self.b.result(Port::new(name, Binding::Observed), value);
        }
    }

    /// Leaves what a `skip` decided, for every token of the stream. `taking` keeps the rows of
    /// tokens that take part.
    pub(super) fn observe_skip(
        &mut self,
        owner: Owner,
        x: Value,
        score: Value,
        taking: impl FnOnce(&mut Self, Value) -> Value,
    ) {
        if !self.shape.observe {
            return;
        }
        let rows = self.b.rows(x);
        let ones = self.ones(&rows);
        let taking = taking(self, ones);
        let taking = self.b.add(ones, taking);
        let norm = self.norm_of(x);
        for (what, value) in
            [(Observation::Taking, taking), (Observation::Score, score), (Observation::Norm, norm)]
        {
            let value = self.every_token(value);
            self.observe(owner, what, value);
        }
    }

    /// Entropy in nats of a router's scores as shares of their sum, for each token.
    pub(super) fn entropy(&mut self, score: Score, logits: Value, scores: Value, e: Dim) -> Value {
        // The logarithm of a score that is 0 in floats is still a number.
        let logs = match score {
            Score::Sigmoid => {
                let z = self.b.unary(Unary::Neg, logits);
                let z = self.b.unary(Unary::Softplus, z);
                self.b.unary(Unary::Neg, z)
            }
            Score::Sqrtsoftplus => {
                let soft = self.b.unary(Unary::Softplus, logits);
                let log = self.b.unary(Unary::Log, soft);
                self.b.scale(log, 0.5)
            }
            Score::Softmax => {
                let largest = self.b.reduce(Reduce::Max, logits, &[e]);
                let shifted = self.b.sub(logits, largest);
                let exp = self.b.unary(Unary::Exp, shifted);
                let sum = self.b.reduce(Reduce::Sum, exp, &[e]);
                let log = self.b.unary(Unary::Log, sum);
                self.b.sub(shifted, log)
            }
        };
        let total = self.b.reduce(Reduce::Sum, scores, &[e]);
        let weighted = self.b.mul(scores, logs);
        let weighted = self.b.reduce(Reduce::Sum, weighted, &[e]);
        let mean = self.b.div(weighted, total);
        let log = self.b.unary(Unary::Log, total);
        self.b.sub(log, mean)
    }
}
