//! Losses of the passes of a loop that may be left at each of them.
//!
//! Every pass but the last ends with a function that adds its share to the loss and passes the
//! stream on; the last pass leaves to the head. Where a gate shares out the loss, the logarithm of
//! what is left of it, `ln Π (1 - λ_j)`, is handed from pass to pass as a state of lifetime
//! [`Lifetime::Saved`] under two names: one that a function reads, one that it leaves. Where it
//! shares out logits, `Σ q_p n_p` of what the head reads of passes follows it in each row, so that
//! the head multiplies once.
//!
//! Where tokens leave by it ([`Shape::exit`]), a pass reads the same: the stream of a token that
//! left stays as it is, nobody asks for its rows, and its keys, its values and what states of texts
//! are made of are those that its last pass made, which a state of every component hands from pass
//! to pass.

use super::*;
use crate::architecture::Leaving;
use smallvec::smallvec;

/// Tensors and states of loops that tokens leave.
pub mod part {
    use crate::bind::{Counted, Part};

    const fn own(path: &'static str) -> Part {
        Part::new("exit", path)
    }

    /// A norm of the stream whose gain has a name.
    pub const NAMED_NORM: Part = own("norm.weight");
    /// The vector of the gate of an exit.
    pub const GATE: Part = own("weight");
    /// Its bias.
    pub const BIAS: Part = own("bias");
    /// The logarithm of the share of the loss that no pass has had yet.
    pub const LEFT: Part = own("left").with_rows(0);
    /// Keys that the last pass of each token made, in a row after those of a pass.
    pub const KEYS: Part = own("pass_keys").with_rows(0).counted(Counted::Never);
    /// Its values.
    pub const VALUES: Part = own("pass_values").with_rows(0).counted(Counted::Never);
}

/// The values that a pass leaves to the next one.
pub(super) struct Left {
    /// The share that is left, in logarithms: `[b, t]`.
    share: Value,
    /// `Σ q_p n_p` so far, `[b, t, h]`, where logits are expected.
    sum: Option<Value>,
}

impl Lower<'_> {
    fn left_port(&mut self, name: &str) -> Port {
        let port = Port::new(name, Binding::State(Lifetime::Saved));
        self.facts.states.insert(port.name.clone(), State { owner: Owner::Exit, part: part::LEFT });
        port
    }

    /// Whether training sees the logits that passes are expected to have.
    fn expects(&self) -> bool {
        let expected = matches!(self.architecture.exit, Some(Leaving { how: Exit::Expected(_), .. }));
        expected && self.form.trains()
    }

    /// `[b, t]`, or `[b, t, 1 + h]` with the sum of what the head reads.
    fn left_type(&mut self) -> Type {
        let rows = self.stream_rows();
        if !self.expects() {
            return Type::f32(&rows);
        }
        let wide = self.dim("left", self.architecture.model.hidden + 1);
        Type::f32(&[&rows[..], &[wide]].concat())
    }

    /// The values that passes before this one left.
    fn left(&mut self) -> Left {
        let (port, ty) = (self.left_port("exit.left"), self.left_type());
        let left = self.b.param(&port.name, port.binding, ty);
        if !self.expects() {
            return Left { share: left, sum: None };
        }
        let (one, hidden, rows) = (self.one(), self.hidden(), self.stream_rows());
        let parts = self.b.ops(Split(smallvec![one, hidden]), &[left]);
        Left { share: self.b.reshape(parts[0], &rows), sum: Some(parts[1]) }
    }

    fn leave_left(&mut self, Left { share, sum }: Left) {
        let (port, ty) = (self.left_port("exit.next"), self.left_type());
        let left = match (sum, ty.dims.last()) {
            (Some(sum), Some(&wide)) => {
                let (one, rows) = (self.one(), self.stream_rows());
                let share = self.b.reshape(share, &[&rows[..], &[one]].concat());
                self.b.op(Concat(wide), &[share, sum])
            }
            _ => share,
        };
        self.b.result(port, left);
    }

    /// The sum with `q n` of a pass, of `ln q`.
    fn expect(&mut self, sum: Option<Value>, share: Value, n: Value) -> Option<Value> {
        let sum = sum?;
        let q = self.b.unary(Unary::Exp, share);
        let part = self.b.mul(n, q);
        Some(self.b.add(sum, part))
    }

    /// The rows that the head multiplies, of the stream of the last pass through the norm: in
    /// training those of all passes, where logits are expected. And what passes left.
    pub(super) fn expected(&mut self, n: Value) -> (Value, Option<Left>) {
        let gated = self.architecture.exit.is_some_and(|leaving| leaving.how.gate().is_some());
        let left = (gated && self.form.trains()).then(|| self.left());
        let sum = left.as_ref().and_then(|left| self.expect(left.sum, left.share, n));
        (sum.unwrap_or(n), left)
    }

    /// Before the first pass.
    pub(super) fn begin_exits(&mut self) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        if self.form.trains() || self.shares().is_some() || self.observes() {
            let ty = self.left_type();
            let port = self.left_port("exit.next");
            let all = self.b.zeros(&ty);
            self.b.result(port, all);
        }
    }

    /// Whether what passes are worth is left for the host.
    fn observes(&self) -> bool {
        self.shape.observe && self.form == Form::Inference
    }

    /// The share of a token that has to have left for it to leave, where tokens leave by it.
    fn shares(&self) -> Option<f64> {
        let gated = self.architecture.exit.is_some_and(|leaving| leaving.how.gate().is_some());
        self.shape.exit.filter(|_| gated && self.form == Form::Inference)
    }

    /// The tokens that run this pass of a loop, and those that left it.
    pub(super) fn tokens_staying(&mut self) -> Option<Staying> {
        let share = self.shares().filter(|_| self.body.is_some_and(|body| body.leaves))?;
        // `Σ q > share` where `ln Π (1 - λ) < ln (1 - share)`.
        let bound = self.b.constant((1.0 - share).ln());
        let left = self.left().share;
        let over = self.b.sub(left, bound);
        let running = self.b.op(Decide { inclusive: true }, &[over]);
        let running = self.taking_part(running);
        let over = self.b.unary(Unary::Neg, over);
        let left = self.b.op(Decide { inclusive: false }, &[over]);
        Some(Staying { running, left })
    }

    /// The stream `y` of tokens that run this pass, and as it was, `x`, of those that left.
    pub(super) fn of_staying(&mut self, x: Value, y: Value) -> Value {
        let staying = if x == y { None } else { self.staying.or_else(|| self.tokens_staying()) };
        staying.map_or(y, |staying| self.either(staying, x, y))
    }

    fn either(&mut self, staying: Staying, before: Value, now: Value) -> Value {
        let now = self.b.op(Op::Keep, &[now, staying.running]);
        let before = self.b.op(Op::Keep, &[before, staying.left]);
        // Rows that are not kept are -0.
        self.b.add(now, before)
    }

    /// Keys and values of an application in a loop, of latents that are both once.
    pub(super) fn of_last_pass(&mut self, c: Owner, k: Value, v: Value) -> (Value, Value) {
        let keys = self.of_last(c, part::KEYS, k);
        (keys, if v == k { keys } else { self.of_last(c, part::VALUES, v) })
    }

    /// A value of an application in a loop that later tokens read: that which the last pass of each
    /// token made.
    pub(super) fn of_last(&mut self, c: Owner, part: Part, now: Value) -> Value {
        let Some(staying) = self.staying else { return now };
        let label = self.architecture.label(c);
        let (rows, by) = (self.architecture.rows_of(c), self.architecture.in_a_pass(&label));
        let (before, cache) = (self.row(c), self.cache_number(c));
        let after = self.b.index(&format!("{label}.after"), Index::Next { cache, by: by as u32 });
        let depths = self.dim_of(c, "passes", rows + by);
        let ty = Type::f32(&[&[depths], &self.b.dims(now)[..]].concat());
        let (port, state) = self.state(c, part, Lifetime::Depth, ty);
        let taken = self.b.ops(Op::CacheTake, &[state, before]);
        let now = self.either(staying, taken[0], now);
        let state = self.b.op(Op::CacheWrite, &[taken[1], taken[0], before]);
        let state = self.b.op(Op::CacheWrite, &[state, now, after]);
        self.b.result(port, state);
        now
    }

    /// The end of a pass that is not the last.
    pub(super) fn exit(&mut self, leaving: &Leaving) {
        let x = self.stream();
        self.b.result(Port::new("y", Binding::Stream), x);
        // Listed where it is not read, too: it is a part of the model.
        let gate = leaving.how.gate().map(|entropy| (self.exit_gate(), entropy));
        if !self.form.trains() && !self.observes() {
            if let (Some(_), Some((gate, _))) = (self.shares(), gate) {
                let read = wiring(&self.architecture.model).end(self, x);
                let (_, next, _) = self.go(read, gate);
                self.leave_left(Left { share: next, sum: None });
            }
            return;
        }
        let rows = self.stream_rows();
        // The final norm would read this where the pass is the last.
        let read = wiring(&self.architecture.model).end(self, x);
        let through = match leaving.norm {
            None => read,
            Some(k) => {
                let normed = match self.architecture.model.body.last() {
                    Some(Item::Statement(Statement::Norm(NormGain::Named(name)))) => {
                        self.norm_of_gain(name, x)
                    }
                    Some(Item::Statement(Statement::Norm(NormGain::Plain))) => self.norm_plain(x),
                    _ => self.norm_called(format!("body.{k}.norm.weight"), ends::part::FINAL_NORM, x),
                };
                wiring(&self.architecture.model).end(self, normed)
            }
        };
        let n = self.read_by_head(through);
        let targets = Input::Targets;
        let targets = self.b.param(targets.name(), Binding::Batch(targets), Type::i32(&rows));
        let nll = (!self.expects()).then(|| {
            let (logits, _) = self.logits(n);
            self.b.ops(Op::CrossEntropy, &[logits, targets])[0]
        });
        let share = gate.map(|(gate, entropy)| {
            let (z, next, left) = self.go(read, gate);
            // `ln λ = -softplus(-z)`
            let z = self.b.unary(Unary::Neg, z);
            let go = self.b.unary(Unary::Softplus, z);
            let share = self.b.sub(left.share, go);
            let sum = self.expect(left.sum, share, n);
            self.leave_left(Left { share: next, sum });
            (share, entropy)
        });
        if let (true, Some(nll)) = (self.observes(), nll) {
            self.observe(Owner::Exit, Observation::Loss, nll);
            if let Some((share, _)) = share {
                let q = self.b.unary(Unary::Exp, share);
                self.observe(Owner::Exit, Observation::Share, q);
            }
            return;
        }
        let each = match (nll, share) {
            (Some(nll), None) => self.b.scale(nll, 1.0 / leaving.passes as f64),
            (nll, Some((share, entropy))) => self.exit_share(nll, share, entropy, targets),
            (None, None) => return,
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
        let w = self.weight(Owner::Exit, part::GATE, &[hidden], TensorKind::Steady, None);
        [w, self.weight(Owner::Exit, part::BIAS, &[one], TensorKind::Steady, zero)]
    }

    /// `z = w·x + c`, the share left after this pass, and what was left before it.
    fn go(&mut self, x: Value, [w, c]: [Value; 2]) -> (Value, Value, Left) {
        let hidden = self.hidden();
        let c = self.b.reshape(c, &[]);
        let z = self.one_each(x, w, hidden);
        let z = self.b.add(z, c);
        let left = self.left();
        let stay = self.b.unary(Unary::Softplus, z);
        let next = self.b.sub(left.share, stay);
        (z, next, left)
    }

    /// `q (ℓ + β ln q)` of tokens that have a target, from `ln q`; without `ℓ` where the head has
    /// it.
    fn exit_share(&mut self, nll: Option<Value>, share: Value, entropy: f64, targets: Value) -> Value {
        let q = self.b.unary(Unary::Exp, share);
        let entropy = self.b.scale(share, entropy);
        let each = nll.map_or(entropy, |nll| self.b.add(nll, entropy));
        let each = self.b.mul(q, each);
        self.b.op(Op::Keep, &[each, targets])
    }

    /// The share of the loss that the last pass has.
    pub(super) fn last_share(&mut self, nll: Value, targets: Value, left: Option<Left>) -> Value {
        let Some(leaving) = self.architecture.exit.filter(|_| self.form.trains()) else { return nll };
        match (leaving.how, left) {
            (Exit::Mean, _) => self.b.scale(nll, 1.0 / leaving.passes as f64),
            (Exit::Gate(entropy), Some(left)) => self.exit_share(Some(nll), left.share, entropy, targets),
            (Exit::Expected(entropy), Some(left)) => {
                let entropy = self.exit_share(None, left.share, entropy, targets);
                self.b.add(nll, entropy)
            }
            (Exit::Last | Exit::Gate(_) | Exit::Expected(_), _) => nll,
        }
    }

    /// A norm whose gain is the one of that name.
    pub(super) fn norm_of_gain(&mut self, name: &str, x: Value) -> Value {
        let part = if name == spec::LAST_GAIN { ends::part::FINAL_NORM } else { part::NAMED_NORM };
        self.norm_called(spec::gain(name), part, x)
    }

    /// A norm of the stream without a gain.
    pub(super) fn norm_plain(&mut self, x: Value) -> Value {
        self.b.op(Rms { inner: 1, eps: self.eps() }, &[x])
    }

    /// A norm whose gain has this whole name: no body has it alone.
    fn norm_called(&mut self, name: String, part: Part, x: Value) -> Value {
        let (norm, hidden) = (self.architecture.model.norm, self.hidden());
        let n = self.b.op(Rms { inner: 1, eps: norm.eps }, &[x]);
        let init = Init::Constant(if norm.unit_offset { 0.0 } else { 1.0 });
        let dims = vec![hidden];
        let gain = self.b.param(&name, Binding::Weight, Type::f32(&dims));
        let (owner, kind, dims) = (Owner::Stream, TensorKind::Gain, dims.into());
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
