//! Wrapped parts: tokens that take part, and those that skip.

use super::*;

/// Tensors and states of wrapped parts.
pub mod part {
    use crate::bind::{Counted, Part};

    const fn own(path: &'static str) -> Part {
        Part::new("skip", path)
    }

    /// The vector whose product with the stream is a score.
    pub const ROUTER: Part = own("router.weight");
    /// The factor of a score that is a norm.
    pub const SCALE: Part = own("router.scale.weight");
    /// The offset of such a score.
    pub const OFFSET: Part = own("router.offset.weight");
    /// The first matrix of a network that scores tokens.
    pub const NETWORK_UP: Part = own("network.up.weight");
    /// Its last.
    pub const NETWORK_DOWN: Part = own("network.down.weight");
    /// The first matrix of a predictor.
    pub const PREDICTOR_UP: Part = own("predictor.up.weight");
    /// Its last.
    pub const PREDICTOR_DOWN: Part = own("predictor.down.weight");
    /// Means of masks.
    pub const POOLED: Part = own("pooled").with_rows(0).counted(Counted::Never);
    /// Places of the tokens that a nested `skip` processed, -1 for the others: i32. A pass
    /// reads those of the pass before and leaves its own.
    pub const MEMBERS: Part = own("members");
}

impl Lower<'_> {
    /// Leaves the means of this application's masks for [`POOL`].
    pub(super) fn keep_pooled(&mut self) {
        for pool in 0..self.architecture.pools.len() {
            let own =
                self.pooled.iter().filter(|(p, _)| *p == pool).map(|(_, mean)| *mean).collect::<Vec<_>>();
            let Some(sum) = own.into_iter().reduce(|a, c| self.b.add(a, c)) else { continue };
            let (owner, ty) = (Owner::Pool(pool as u32), self.pool_type(pool));
            let sum = self.b.reshape(sum, &ty.dims[1..]);
            let row = self.row(owner);
            let (port, state) = self.state(owner, part::POOLED, Lifetime::Depth, ty);
            let written = self.b.op(Op::CacheWrite, &[state, sum, row]);
            self.b.result(port, written);
        }
    }

    pub(super) fn pool_type(&mut self, pool: usize) -> Type {
        let owner = Owner::Pool(pool as u32);
        let rows = self.dim_of(owner, "rows", self.architecture.rows_of(owner));
        let one = self.one();
        Type::f32(&[rows, one])
    }

    /// `λ·ReLU(mean - c*)`
    pub(super) fn penalty(&mut self, mean: Value, capacity: f64, weight: f64) -> Value {
        if capacity >= 1.0 {
            // No share is larger, but a rounded mean of ones may be.
            return self.b.scale(mean, 0.0);
        }
        let target = self.b.constant(capacity);
        let excess = self.b.sub(mean, target);
        let excess = self.b.unary(Unary::Relu, excess);
        self.b.scale(excess, weight)
    }

    /// A wrapped part: the update of tokens that take part, -0 for all others.
    pub(super) fn skip(&mut self, skip: &Skip, inner: &Expr, x: Value) -> Result<Value, CompileError> {
        let owner = Owner::Skip(self.skips);
        self.skips += 1;
        let rows = self.b.rows(x);
        let tokens = self.b.module.size(rows[1]);
        match &skip.rule {
            SkipRule::DepthChoice { capacity, .. } => self.chosen(owner, *capacity, inner, x),
            SkipRule::TopK { capacity, causal } => {
                let r = self.skip_score(owner, skip, x);
                let gate = self.skip_gate(skip, r);
                if self.form == Form::Inference && *capacity >= 1.0 {
                    self.observe_skip(owner, x, r, |_, ones| ones);
                    self.leave_members(owner, skip, |lower| {
                        let all = lower.places_in_order(&rows);
                        lower.taking_part(all)
                    });
                    let f = self.expr(inner, x)?;
                    let f = self.behind_part(skip, f, x);
                    return Ok(self.b.mul(f, gate));
                }
                let among = self.members_before(owner, skip);
                let z = match causal {
                    _ if self.form != Form::Inference => None,
                    None => None,
                    Some(CausalRule::Bce { .. }) => Some(r),
                    Some(CausalRule::Predictor { hidden, .. }) => {
                        Some(self.predictor(owner, skip, *hidden, x))
                    }
                };
                if let Some(z) = z {
                    let places = self.b.op(Decide { inclusive: false }, &[z]);
                    let places = self.taking_part(places);
                    let places = match among {
                        Some(among) => self.b.op(KeepInts { otherwise: -1 }, &[places, among]),
                        None => places,
                    };
                    self.leave_members(owner, skip, |_| places);
                    let taking = |lower: &mut Self, ones| lower.b.op(Op::Keep, &[ones, places]);
                    self.observe_skip(owner, x, z, taking);
                    let inside = self.masked(places, *capacity, false);
                    let merged = if skip.merge { self.merged(x, places)? } else { x };
                    let f = self.within(inside, inner, merged)?;
                    let f = self.behind_part(skip, f, x);
                    let update = self.b.mul(f, gate);
                    let update = self.b.op(Op::Keep, &[update, places]);
                    return if skip.merge { self.spread(update, places) } else { Ok(update) };
                }
                if self.shape.cache.is_some() {
                    return Err(CompileError::LooksAhead);
                }
                let asked = among.map(|among| {
                    let ones = self.ones(&rows);
                    self.b.op(Op::Keep, &[ones, among])
                });
                let ranked = asked.map_or(r, |asked| self.below_others(r, asked));
                let index = self.top_tokens(ranked, *capacity, tokens);
                self.leave_members(owner, skip, |lower| {
                    lower.b.op(PutTokens { tokens: rows[1] }, &[index, index])
                });
                let places = if skip.merge { Some(self.places_of(index, &rows)) } else { None };
                let merged = places.map_or(Ok(x), |places| self.merged(x, places))?;
                let taken = self.b.op(Op::TakeTokens, &[merged, index]);
                self.observe_skip(owner, x, r, |lower, ones| {
                    let taken = lower.b.op(Op::TakeTokens, &[ones, index]);
                    lower.b.op(PutTokens { tokens: rows[1] }, &[taken, index])
                });
                let f = self.within(Inside::Gathered { index, of: rows[1], ints: vec![] }, inner, taken)?;
                let f = self.behind_part(skip, f, taken);
                let gate = self.b.op(Op::TakeTokens, &[gate, index]);
                let update = self.b.mul(f, gate);
                let update = self.b.op(PutTokens { tokens: rows[1] }, &[update, index]);
                let update = places.map_or(Ok(update), |places| self.spread(update, places))?;
                if self.form.trains() && skip.scorer.z_loss != 0.0 {
                    let squares = self.b.unary(Unary::Square, r);
                    self.mean_of_asked(squares, (among, asked), skip.scorer.z_loss);
                }
                let (weight, z) = match causal {
                    None => return Ok(update),
                    Some(CausalRule::Bce { weight, into_input: true }) => (*weight, r),
                    Some(CausalRule::Bce { weight, into_input: false }) => {
                        let stopped = self.b.stop_gradient(x);
                        (*weight, self.skip_score(owner, skip, stopped))
                    }
                    Some(CausalRule::Predictor { hidden, weight }) => {
                        (*weight, self.predictor(owner, skip, *hidden, x))
                    }
                };
                // Binary cross-entropy `ln(1 + e^z) - z·member`, the mean over all tokens that
                // could be chosen.
                let ones = self.ones(&self.b.rows(taken));
                let member = self.b.op(PutTokens { tokens: rows[1] }, &[ones, index]);
                let member = self.b.mul(z, member);
                let soft = self.b.unary(Unary::Softplus, z);
                let each = self.b.sub(soft, member);
                self.mean_of_asked(each, (among, asked), weight);
                Ok(update)
            }
            SkipRule::Threshold { capacity, penalty, .. } => {
                let mut z = self.skip_score(owner, skip, x);
                let all_keys = skip.kv == SkipKv::All;
                if self.form == Form::Declared && all_keys {
                    let index = self.top_tokens(z, *capacity, tokens);
                    let places = if skip.merge { Some(self.places_of(index, &rows)) } else { None };
                    let x = places.map_or(Ok(x), |places| self.merged(x, places))?;
                    let f = self.of_all_keys(inner, x, index)?;
                    let f = self.b.op(PutTokens { tokens: rows[1] }, &[f, index]);
                    return places.map_or(Ok(f), |places| self.spread(f, places));
                }
                if self.form == Form::Declared {
                    let index = self.top_tokens(z, *capacity, tokens);
                    let places = if skip.merge { Some(self.places_of(index, &rows)) } else { None };
                    let x = places.map_or(Ok(x), |places| self.merged(x, places))?;
                    let taken = self.b.op(Op::TakeTokens, &[x, index]);
                    let f =
                        self.within(Inside::Gathered { index, of: rows[1], ints: vec![] }, inner, taken)?;
                    let f = self.b.op(PutTokens { tokens: rows[1] }, &[f, index]);
                    return places.map_or(Ok(f), |places| self.spread(f, places));
                }
                if skip.level == SkipLevel::Sequence {
                    if self.shape.cache.is_some() {
                        return Err(CompileError::LooksAhead);
                    }
                    z = self.sequence_mean(z);
                }
                let decision = self.b.stop_gradient(z);
                let places = self.b.op(Decide { inclusive: true }, &[decision]);
                let places = self.taking_part(places);
                let p = self.b.unary(Unary::Sigmoid, z);
                self.observe_skip(owner, x, p, |lower, ones| lower.b.op(Op::Keep, &[ones, places]));
                let merged = if skip.merge { self.merged(x, places)? } else { x };
                let inside = self.masked(places, *capacity, all_keys);
                let f = self.within(inside, inner, merged)?;
                if self.form == Form::Inference {
                    let update = self.b.op(Op::Keep, &[f, places]);
                    return if skip.merge { self.spread(update, places) } else { Ok(update) };
                }
                // Straight through: the value is the decision, the gradient that of `p`. Both sums
                // are exact.
                let ones = self.ones(&rows);
                let hard = self.b.op(Op::Keep, &[ones, places]);
                let stopped = self.b.stop_gradient(p);
                let difference = self.b.sub(hard, stopped);
                let mask = self.b.add(p, difference);
                let mean = self.b.reduce(Reduce::Mean, mask, &rows);
                match self.architecture.pool_of(skip) {
                    Some(pool) => self.pooled.push((pool, mean)),
                    None => {
                        let loss = self.penalty(mean, *capacity, *penalty);
                        self.auxiliary.push(loss);
                    }
                }
                let update = self.b.mul(f, mask);
                if !skip.merge {
                    return Ok(update);
                }
                let all = self.spread(update, places)?;
                let skipping = self.b.sub(ones, hard);
                let own = self.b.mul(update, skipping);
                Ok(self.b.add(all, own))
            }
        }
    }

    /// Adds a loss: the mean of `each` over the tokens that could be chosen, times a weight. Those
    /// are at places `among` and 1 in `asked`, where not all are.
    pub(super) fn mean_of_asked(
        &mut self,
        mut each: Value,
        (among, asked): (Option<Value>, Option<Value>),
        weight: f64,
    ) {
        let rows = self.b.dims(each);
        if let Some(among) = among {
            each = self.b.op(Op::Keep, &[each, among]);
        }
        let mut mean = self.b.reduce(Reduce::Mean, each, &rows);
        if let Some(asked) = asked {
            let share = self.b.reduce(Reduce::Mean, asked, &rows);
            mean = self.b.div(mean, share);
        }
        let loss = self.b.scale(mean, weight);
        self.auxiliary.push(loss);
    }

    /// Factor on the updates of chosen tokens, from their scores.
    fn skip_gate(&mut self, skip: &Skip, r: Value) -> Value {
        let gate = match skip.gate {
            SkipGate::Score => r,
            SkipGate::Sigmoid => self.b.unary(Unary::Sigmoid, r),
            SkipGate::Tanh => self.b.unary(Unary::Tanh, r),
        };
        self.b.scaled(gate, Some(skip.gate_scale).filter(|scale| *scale != 1.0))
    }

    /// The value that the gate multiplies: the update `f`, or the stream `x` with it.
    fn behind_part(&mut self, skip: &Skip, f: Value, x: Value) -> Value {
        if skip.whole { self.b.add(f, x) } else { f }
    }

    /// Scores that are below all others where a token is not asked: `asked` is 1 or 0.
    fn below_others(&mut self, r: Value, asked: Value) -> Value {
        const NEVER: f64 = 1e30;
        let one = self.b.constant(1.0);
        let absent = self.b.sub(asked, one);
        let absent = self.b.scale(absent, NEVER);
        self.b.add(r, absent)
    }

    fn members_port(&mut self, owner: Owner, name: &str) -> Port {
        let name = format!("{}.{name}", self.architecture.label(owner));
        let port = Port::new(name, Binding::State(Lifetime::Saved));
        self.facts.states.insert(port.name.clone(), State { owner, part: part::MEMBERS });
        port
    }

    /// Places of the tokens that the pass before processed, where this one chooses among them.
    fn members_before(&mut self, owner: Owner, skip: &Skip) -> Option<Value> {
        self.body.filter(|body| skip.nested && body.among.is_some())?;
        let (port, rows) = (self.members_port(owner, "among"), self.stream_rows());
        Some(self.b.param(&port.name, port.binding, Type::i32(&rows)))
    }

    /// Leaves the places of those that this one processes to the next.
    fn leave_members(&mut self, owner: Owner, skip: &Skip, places: impl FnOnce(&mut Self) -> Value) {
        if skip.nested {
            let places = places(self);
            let port = self.members_port(owner, "members");
            self.b.result(port, places);
        }
    }

    /// Places of the tokens at these numbers.
    pub(super) fn places_of(&mut self, index: Value, rows: &[Dim]) -> Value {
        let ones = self.ones(&self.b.dims(index));
        let member = self.b.op(PutTokens { tokens: rows[1] }, &[ones, index]);
        let places = self.b.op(Decide { inclusive: false }, &[member]);
        if !self.gathered() {
            return places;
        }
        let whole = self.token_ints(Ints::Places);
        self.b.op(KeepInts { otherwise: -1 }, &[whole, places])
    }

    /// The stream in which every token that takes part is the mean of itself and those that were
    /// skipped since the one before it; the others stay as they are.
    pub(super) fn merged(&mut self, x: Value, places: Value) -> Result<Value, CompileError> {
        let rows = self.b.rows(x);
        let keys = self.tokens_here(&rows);
        let mean = self.over_runs(x, places, keys, Op::Runs(Runs { begins: false }), places)?;
        let ones = self.ones(&rows);
        let taking = self.b.op(Op::Keep, &[ones, places]);
        let skipping = self.b.sub(ones, taking);
        let rest = self.b.mul(x, skipping);
        Ok(self.b.add(mean, rest))
    }

    /// Updates of tokens that take part; skipped tokens share the update of the one before them.
    pub(super) fn spread(&mut self, update: Value, places: Value) -> Result<Value, CompileError> {
        let queries = self.tokens_here(&self.b.rows(update));
        self.over_runs(update, queries, places, Op::Runs(Runs { begins: true }), places)
    }

    /// Places of the tokens that come to a wrapped part.
    pub(super) fn tokens_here(&mut self, rows: &[Dim]) -> Value {
        match self.inside.last() {
            Some(&Inside::Masked { places, .. }) => places,
            _ => self.all_places(rows),
        }
    }

    /// The mean over the keys of a query's run that are not after it: an attention with uniform
    /// weights.
    pub(super) fn over_runs(
        &mut self,
        x: Value,
        queries: Value,
        keys: Value,
        runs: Op,
        places: Value,
    ) -> Result<Value, CompileError> {
        /// Heads are no larger than attention's are.
        const LARGEST: u64 = 128;
        if self.shape.cache.is_some() {
            return Err(CompileError::Unsupported("skip(merge …) over caches"));
        }
        let dims = self.b.dims(x);
        let rows = &dims[..2];
        let documents = if self.shape.segments {
            self.given(Input::Segments)
        } else {
            let zeros = self.b.zeros(&Type::f32(rows));
            self.b.op(Decide { inclusive: false }, &[zeros])
        };
        let runs = self.b.op(runs, &[places, documents]);
        let hidden = self.architecture.model.hidden;
        let size = (1..=LARGEST).rev().find(|d| hidden.is_multiple_of(*d)).unwrap_or(1);
        let (heads, size) = (self.dim("merged_heads", hidden / size), self.dim("merged_size", size));
        let v = self.b.reshape(x, &[rows, &[heads, size]].concat());
        let zeros = self.b.zeros(&Type::f32(&self.b.dims(v)));
        let op =
            ir::Attention { scale: 1.0, mask: Mask::Positions, segments: true, ..ir::Attention::default() };
        let mean = self.b.ops(Op::Attention(op), &[zeros, zeros, v, queries, keys, runs])[0];
        Ok(self.b.reshape(mean, &dims))
    }

    /// The update of the tokens at `index` by a part whose attentions have every token for a key:
    /// what comes before its last attention is of all tokens, what comes after of those that take
    /// part.
    pub(super) fn of_all_keys(&mut self, expr: &Expr, x: Value, index: Value) -> Result<Value, CompileError> {
        match expr {
            Expr::Component(name) if self.attends(expr) => {
                self.asking = Some(index);
                self.component(name, x)
            }
            Expr::Parallel(terms) => {
                let mut wire = Wire::enter(x);
                for term in terms {
                    let output = self.of_all_keys(term, x, index)?;
                    wire.write(&mut self.b, output);
                }
                self.leave(wire)
            }
            Expr::Sequential(terms) if self.attends(expr) => {
                let last = terms.iter().rposition(|term| self.attends(term)).unwrap_or(0);
                let before = match &terms[..last] {
                    [] => None,
                    [one] => Some(self.expr(one, x)?),
                    more => Some(self.expr(&Expr::Sequential(more.to_vec()), x)?),
                };
                let mut wire = Wire::enter(x);
                before.into_iter().for_each(|output| wire.write(&mut self.b, output));
                let read = wire.read(&mut self.b);
                let output = self.of_all_keys(&terms[last], read, index)?;
                // From here on the tokens that take part are alone.
                let taken = self.b.op(Op::TakeTokens, &[x, index]);
                let mut wire = Wire::enter(taken);
                if let Some(before) = before {
                    let before = self.b.op(Op::TakeTokens, &[before, index]);
                    wire.write(&mut self.b, before);
                }
                wire.write(&mut self.b, output);
                let of = self.b.dims(x)[1];
                for term in &terms[last + 1..] {
                    let read = wire.read(&mut self.b);
                    let output = self.within(Inside::Gathered { index, of, ints: vec![] }, term, read)?;
                    wire.write(&mut self.b, output);
                }
                self.leave(wire)
            }
            Expr::Skip(skip, inner) if leaves_all_keys(skip) && self.attends(inner) => {
                self.skip_of_all_keys(skip, inner, x, index)
            }
            _ => {
                let (of, taken) = (self.b.dims(x)[1], self.b.op(Op::TakeTokens, &[x, index]));
                self.within(Inside::Gathered { index, of, ints: vec![] }, expr, taken)
            }
        }
    }

    /// A wrapped part among the tokens at `index`; all tokens are keys of it, too.
    fn skip_of_all_keys(
        &mut self,
        skip: &Skip,
        inner: &Expr,
        x: Value,
        index: Value,
    ) -> Result<Value, CompileError> {
        let SkipRule::Threshold { capacity, .. } = skip.rule else {
            return Err(CompileError::Unsupported("keys of all tokens of a part that others choose"));
        };
        let owner = Owner::Skip(self.skips);
        self.skips += 1;
        let (of, taken) = (self.b.dims(x)[1], self.b.op(Op::TakeTokens, &[x, index]));
        let rows = self.b.rows(taken);
        let z = self.skip_score(owner, skip, taken);
        let among = self.top_tokens(z, capacity, self.b.module.size(rows[1]));
        let chosen = self.b.op(Op::TakeTokens, &[index, among]);
        let merged = match skip.merge {
            true => {
                let places = self.places_of(chosen, &self.b.rows(x));
                self.merged(x, places)?
            }
            false => x,
        };
        let f = self.of_all_keys(inner, merged, chosen)?;
        let update = self.b.op(PutTokens { tokens: rows[1] }, &[f, among]);
        if !skip.merge {
            return Ok(update);
        }
        self.inside.push(Inside::Gathered { index, of, ints: vec![] });
        let places = self.places_of(among, &rows);
        let update = self.spread(update, places);
        self.inside.pop();
        update
    }

    /// A part in which tokens of negative place take no part; with `all_keys` they are keys and
    /// values all the same, as far as they take part in what is around.
    pub(super) fn masked(&self, places: Value, capacity: f64, all_keys: bool) -> Inside {
        let share = self.share(capacity);
        let keys = match self.inside.last() {
            _ if !all_keys => Some((places, share)),
            Some(&Inside::Masked { keys, .. }) => keys,
            _ => None,
        };
        Inside::Masked { places, share, keys }
    }

    /// Share of all tokens that should come through a part that lets this share through.
    pub(super) fn share(&self, capacity: f64) -> f64 {
        let around = self.inside.iter().rev().find_map(|i| match i {
            Inside::Masked { share, .. } => Some(*share),
            Inside::Gathered { .. } => None,
        });
        around.unwrap_or(1.0) * capacity
    }

    /// Lowers a wrapped part.
    pub(super) fn within(&mut self, inside: Inside, inner: &Expr, x: Value) -> Result<Value, CompileError> {
        let around = std::mem::replace(&mut self.ahead, false);
        self.inside.push(inside);
        let update = self.expr(inner, x);
        self.inside.pop();
        self.ahead = around;
        update
    }

    /// Whether a component in it reads keys of tokens: of others, or of its own at other depths.
    pub(super) fn attends(&self, expr: &Expr) -> bool {
        let components = &self.architecture.model.components;
        let mixes = |c: &str| components.get(c).map(|c| c.kind().mixes());
        crate::architecture::names(expr).into_iter().any(|c| match mixes(c) {
            Some(Mixes::Tokens | Mixes::Depths) => true,
            Some(Mixes::Features) | None => false,
        })
    }

    /// Tokens that decided to take part, without padding and without those that take no part in
    /// what is around.
    pub(super) fn taking_part(&mut self, places: Value) -> Value {
        let around = match self.inside.last() {
            Some(&Inside::Masked { places, .. }) => Some(places),
            _ if self.shape.cache.is_some() => Some(self.given(Input::Slots)),
            _ => None,
        };
        let places = match around {
            Some(around) => self.b.op(KeepInts { otherwise: -1 }, &[places, around]),
            None => places,
        };
        if !self.gathered() {
            return places;
        }
        // Rows were numbered as they stand here; their places are those in the sequence.
        let whole = self.token_ints(Ints::Places);
        self.b.op(KeepInts { otherwise: -1 }, &[whole, places])
    }

    /// Places of the share of tokens with the largest scores. The decision has no gradient.
    pub(super) fn top_tokens(&mut self, r: Value, capacity: f64, tokens: u64) -> Value {
        // Rounding errors of the product are below this.
        let k = ((capacity * tokens as f64 + 1e-9).floor() as u64).clamp(1, tokens.max(1));
        let k = self.dim(&format!("taken{k}"), k);
        let r = self.b.stop_gradient(r);
        self.b.op(TopTokens { k }, &[r])
    }

    pub(super) fn ones(&mut self, dims: &[Dim]) -> Value {
        let zeros = self.b.zeros(&Type::f32(dims));
        let one = self.b.constant(1.0);
        self.b.add(zeros, one)
    }

    /// The score of every token: `w·x`, or `scale·‖x‖ + bias`.
    pub(super) fn skip_score(&mut self, owner: Owner, skip: &Skip, x: Value) -> Value {
        let hidden = self.hidden();
        let init = matches!(skip.rule, SkipRule::Threshold { .. }).then_some(Init::Constant(0.0));
        let x = self.cooled(&skip.scorer, x);
        if let Some(size) = skip.scorer.network {
            let (inner, each) = (self.network_size(size), skip.each_pass);
            let (up, down) = ((TensorKind::Router, None), (TensorKind::Router, init));
            let up = self.weight_of_pass(owner, part::NETWORK_UP, &[inner, hidden], up, each);
            let a = self.b.contract(x, up, &[hidden]);
            let a = self.gelu_by_error_function(a);
            let down = self.weight_of_pass(owner, part::NETWORK_DOWN, &[inner], down, each);
            return self.one_each(a, down, inner);
        }
        if skip.input == SkipInput::Hidden {
            let kind = (TensorKind::Router, init);
            let w = self.weight_of_pass(owner, part::ROUTER, &[hidden], kind, skip.each_pass);
            return self.one_each(x, w, hidden);
        }
        let one = self.one();
        let mut scalar = |part: Part, init: Option<Init>| {
            let w = self.weight_of_pass(owner, part, &[one], (TensorKind::Router, init), skip.each_pass);
            self.b.reshape(w, &[])
        };
        let (scale, bias) = (scalar(part::SCALE, init), scalar(part::OFFSET, Some(Init::Constant(0.0))));
        let norm = self.norm_of(x);
        let scaled = self.b.mul(norm, scale);
        self.b.add(scaled, bias)
    }

    /// The rows that a router reads: `x / T`.
    pub(super) fn cooled(&mut self, scorer: &Scorer, x: Value) -> Value {
        match scorer.temperature {
            1.0 => x,
            temperature => self.b.scale(x, 1.0 / temperature),
        }
    }

    /// The inner dimension of a network that scores.
    pub(super) fn network_size(&mut self, size: u64) -> Dim {
        let inner = self.dim(&format!("network{size}"), size);
        self.routing(inner)
    }

    /// `‖x‖` of every token; its derivative is 0 where `x` is.
    pub(super) fn norm_of(&mut self, x: Value) -> Value {
        /// Changes no bit of a sum of squares above 1e-22 in f32.
        const LEAST: f64 = 1e-30;
        let hidden = self.hidden();
        let square = self.b.unary(Unary::Square, x);
        let sum = self.b.reduce(Reduce::Sum, square, &[hidden]);
        let least = self.b.constant(LEAST);
        let sum = self.b.add(sum, least);
        self.b.unary(Unary::Sqrt, sum)
    }

    /// `down·silu(up·x)`, one number for each token; no gradient reaches `x`.
    fn predictor(&mut self, owner: Owner, skip: &Skip, size: u64, x: Value) -> Value {
        let hidden = self.hidden();
        let inner = self.dim(&format!("predictor{size}"), size);
        let inner = self.routing(inner);
        let x = self.b.stop_gradient(x);
        let (kind, each) = ((TensorKind::Router, None), skip.each_pass);
        let up = self.weight_of_pass(owner, part::PREDICTOR_UP, &[inner, hidden], kind, each);
        let a = self.b.contract(x, up, &[hidden]);
        let a = self.b.unary(Unary::Silu, a);
        let down = self.weight_of_pass(owner, part::PREDICTOR_DOWN, &[inner], kind, each);
        self.one_each(a, down, inner)
    }

    /// The inner product of every row with a vector.
    pub(super) fn one_each(&mut self, x: Value, w: Value, over: Dim) -> Value {
        // A vector that scores tokens is a matrix of one row.
        let one = self.one();
        let one = self.routing(one);
        let w = self.b.reshape(w, &[one, over]);
        let y = self.b.contract(x, w, &[over]);
        let rows = self.b.rows(x);
        self.b.reshape(y, &rows)
    }

    /// The mean over each sequence, for each of its tokens.
    pub(super) fn sequence_mean(&mut self, z: Value) -> Value {
        let rows = self.b.dims(z);
        let one = self.one();
        let one = self.routing(one);
        let ones = self.ones(&[rows[1]]);
        let ones = self.b.reshape(ones, &[one, rows[1]]);
        let sum = self.b.contract(z, ones, &[rows[1]]);
        let mean = self.b.scale(sum, 1.0 / self.b.module.size(rows[1]) as f64);
        self.b.contract(mean, ones, &[one])
    }
}

/// Whether tokens that skip are keys and values of the wrapped part all the same.
fn leaves_all_keys(skip: &Skip) -> bool {
    matches!(skip.rule, SkipRule::Threshold { .. }) && skip.kv == SkipKv::All
}
