//! Losses of the passes of a loop that may be left at each of them.
//!
//! Every pass but the last ends with a function that adds its share to the loss and passes the
//! stream on; the last pass leaves to the head. Where a gate shares out the loss, the logarithm of
//! what is left of it, `ln Π (1 - λ_j)`, is handed from pass to pass as a state of lifetime
//! [`Lifetime::Saved`] under two names: one that a function reads, one that it leaves.

use super::*;
use crate::architecture::Leaving;

impl Lower<'_> {
    fn left_port(&mut self, name: &str) -> Port {
        let port = Port::new(name, Binding::State(Lifetime::Saved));
        self.facts.states.insert(port.name.clone(), State { owner: Owner::Exit, part: Part::Left });
        port
    }

    /// The share of the loss that is left before this, in logarithms: `[b, t]`.
    fn left(&mut self) -> Value {
        let (port, rows) = (self.left_port("exit.left"), self.stream_rows());
        self.b.param(&port.name, port.binding, Type::f32(&rows))
    }

    fn leave_left(&mut self, left: Value) {
        let port = self.left_port("exit.next");
        self.b.result(port, left);
    }

    /// Before the first pass.
    pub(super) fn begin_exits(&mut self) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        if self.form.trains() {
            let rows = self.stream_rows();
            let all = self.b.zeros(&Type::f32(&rows));
            self.leave_left(all);
        }
    }

    /// The end of a pass that is not the last.
    pub(super) fn exit(&mut self, leaving: &Leaving) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        // Listed where it is not read, too: it is a part of the model.
        let gate = match leaving.how {
            Exit::Last | Exit::Mean => None,
            Exit::Gate(entropy) => Some((self.exit_gate(), entropy)),
        };
        if !self.form.trains() {
            return;
        }
        let rows = self.stream_rows();
        let mut through = x;
        if let Some(k) = leaving.norm {
            through = self.norm_called(&format!("body.{k}.norm.weight"), x);
        }
        let (logits, _) = self.logits(through);
        let targets = Input::Targets;
        let targets = self.b.param(targets.name(), Binding::Batch(targets), Type::i32(&rows));
        let nll = self.b.ops(Op::CrossEntropy, &[logits, targets])[0];
        let each = match gate {
            None => self.b.scale(nll, 1.0 / leaving.passes as f64),
            Some(([w, c], entropy)) => {
                let hidden = self.hidden();
                let c = self.b.reshape(c, &[]);
                let z = self.one_each(x, w, hidden);
                let z = self.b.add(z, c);
                let left = self.left();
                let stay = self.b.unary(Unary::Softplus, z);
                let next = self.b.sub(left, stay);
                self.leave_left(next);
                // `ln λ = -softplus(-z)`
                let z = self.b.unary(Unary::Neg, z);
                let go = self.b.unary(Unary::Softplus, z);
                let share = self.b.sub(left, go);
                self.exit_share(nll, share, entropy, targets)
            }
        };
        let sum = self.b.reduce(Reduce::Sum, each, &rows);
        let scale = self.b.param(Input::LossScale.name(), Binding::Batch(Input::LossScale), Type::f32(&[]));
        let loss = self.b.mul(sum, scale);
        self.b.result(Output::Loss, loss);
    }

    /// Vector and bias of the gate.
    fn exit_gate(&mut self) -> [Value; 2] {
        let (hidden, one) = (self.hidden(), self.one());
        let zero = Some(Init::Constant(0.0));
        let w = self.weight(Owner::Exit, Part::ExitGate, &[hidden], TensorKind::Steady, None);
        [w, self.weight(Owner::Exit, Part::ExitBias, &[one], TensorKind::Steady, zero)]
    }

    /// `q (ℓ + β ln q)` of tokens that have a target, from `ln q`.
    fn exit_share(&mut self, nll: Value, share: Value, entropy: f64, targets: Value) -> Value {
        let q = self.b.unary(Unary::Exp, share);
        let entropy = self.b.scale(share, entropy);
        let each = self.b.add(nll, entropy);
        let each = self.b.mul(q, each);
        self.b.op(Op::Keep, &[each, targets])
    }

    /// The share of the loss that the last pass has.
    pub(super) fn last_share(&mut self, nll: Value, targets: Value) -> Value {
        let Some(leaving) = self.architecture.exit.filter(|_| self.form.trains()) else { return nll };
        match leaving.how {
            Exit::Last => nll,
            Exit::Mean => self.b.scale(nll, 1.0 / leaving.passes as f64),
            Exit::Gate(entropy) => {
                let left = self.left();
                self.exit_share(nll, left, entropy, targets)
            }
        }
    }

    /// A norm whose gain another body has.
    fn norm_called(&mut self, name: &str, x: Value) -> Value {
        let (norm, hidden) = (self.architecture.model.norm, self.hidden());
        let n = self.b.op(Rms { inner: 1, eps: norm.eps }, &[x]);
        let init = Init::Constant(if norm.unit_offset { 0.0 } else { 1.0 });
        let (owner, part, kind) = (Owner::Stream, Part::FinalNorm, TensorKind::Gain);
        let (dims, name) = (vec![hidden], name.to_string());
        let gain = self.b.param(&name, Binding::Weight, Type::f32(&dims));
        self.weights.push(Weight { name, dims, kind, init, passes: None, owner, part, balancing: None });
        let gain = match norm.unit_offset {
            true => {
                let one = self.b.constant(1.0);
                self.b.add(gain, one)
            }
            false => gain,
        };
        self.b.mul(n, gain)
    }
}
