//! Networks: dense, and mixtures of experts with their routers.

use super::*;

/// Tensors and states of networks, experts and routers.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("mixture", path)
    }

    /// The gate of an MLP, or of experts.
    pub const GATE: Part = own("gate.weight").with_low_rank();
    /// Their first matrix.
    pub const UP: Part = own("up.weight").with_low_rank();
    /// Their last matrix.
    pub const DOWN: Part = own("down.weight").with_low_rank().at_end();
    /// The bias of the gate of an MLP, or of each expert's.
    pub const GATE_BIAS: Part = own("gate.bias");
    /// The bias of their first matrix.
    pub const UP_BIAS: Part = own("up.bias");
    /// The bias of their last matrix.
    pub const DOWN_BIAS: Part = own("down.bias").at_end();
    /// The gate of shared experts.
    pub const SHARED_GATE: Part = own("shared.gate.weight").with_adapters();
    /// Their first matrix.
    pub const SHARED_UP: Part = own("shared.up.weight").with_adapters();
    /// Their last matrix.
    pub const SHARED_DOWN: Part = own("shared.down.weight").with_adapters().at_end();
    /// The vector whose product with the input gates what shared experts give.
    pub const SHARED_WEIGHT: Part = own("shared_gate.weight");
    /// A router's matrix.
    pub const ROUTER: Part = own("router.weight");
    /// The queries of a router.
    pub const ROUTER_QUERY: Part = own("router.query.weight");
    /// The keys of a router.
    pub const ROUTER_KEYS: Part = own("router.keys.weight");
    /// The gain of a router's queries.
    pub const ROUTER_QUERY_NORM: Part = own("router.q_norm.weight");
    /// The gain of a router's keys.
    pub const ROUTER_KEY_NORM: Part = own("router.k_norm.weight");
    /// The bias of a router's logits.
    pub const LOGIT_BIAS: Part = own("router.logit_bias");
    /// The balancing bias of a router.
    pub const ROUTER_BIAS: Part = own("router.bias");
    /// How often each candidate was chosen.
    pub const ROUTER_COUNTS: Part = own("router.counts");
}

/// The factor within `t`, and those of its powers from the fifth down.
const ERROR_FUNCTION: (f64, [f64; 5]) =
    (0.3275911, [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592]);

impl Lowering for spec::Experts {
    fn fits(&self, tokens: u64) -> Result<(), CompileError> {
        fits("the choice of experts", &[tokens, self.active])?;
        fits("shared experts", &[self.intermediate, self.shared.max(1)])?;
        let all = self.count.checked_add(self.noop).and_then(|n| n.checked_add(1));
        all.map(drop).ok_or(CompileError::Overflow("a mixture"))
    }

    fn lower(&self, l: &mut Lower, c: Owner, _: Kind, n: Value) -> Result<Value, CompileError> {
        if self.depth_stream {
            l.leave_depths(c, n, false);
        }
        Ok(l.experts(c, self, n))
    }
}

impl Lowering for spec::Mlp {
    fn fits(&self, _: u64) -> Result<(), CompileError> {
        Ok(())
    }

    fn lower(&self, l: &mut Lower, c: Owner, _: Kind, n: Value) -> Result<Value, CompileError> {
        if self.depth_stream {
            l.leave_depths(c, n, self.biased);
        }
        let i = l.dim_of(c, "intermediate", self.intermediate);
        let biases = self.biased.then_some([part::GATE_BIAS, part::UP_BIAS, part::DOWN_BIAS]);
        let parts = ([part::GATE, part::UP, part::DOWN], biases);
        Ok(l.network(c, parts, i, self.activation, n))
    }
}

impl Lower<'_> {
    /// Logits, choice, groups, gates and counts of a router on the normalised input `n`. `experts`
    /// are candidates; the first `real` have matrices.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn route(
        &mut self,
        c: Owner,
        router: &Router,
        n: Value,
        experts: u64,
        real: u64,
        k: u64,
        projection: bool,
        biased: bool,
        round: Option<u64>,
    ) -> Routing {
        let hidden = self.hidden();
        let many = if projection { format!("projections{experts}") } else { "experts".into() };
        let candidates = if experts == real { many.clone() } else { "candidates".into() };
        let e = self.dim_of(c, &candidates, experts);
        let e = self.routing(e);
        let kind = TensorKind::Router;
        let logits = match &router.form {
            RouterForm::Linear => {
                let w = self.weight(c, part::ROUTER, &[e, hidden], kind, None);
                self.b.contract(n, w, &[hidden])
            }
            RouterForm::LowRank { query, rope } => {
                let size = self.dim_of(c, if projection { "router_query" } else { "query" }, *query);
                let size = self.routing(size);
                let w = self.weight(c, part::ROUTER_QUERY, &[size, hidden], kind, None);
                let keys = self.weight(c, part::ROUTER_KEYS, &[e, size], kind, None);
                let q = self.b.contract(n, w, &[hidden]);
                let mut q = self.norm_as(q, c, part::ROUTER_QUERY_NORM, 1, kind);
                if let Some(rope) = rope {
                    q = self.rope(q, c, *rope, true);
                }
                let keys = self.norm_as(keys, c, part::ROUTER_KEY_NORM, 1, kind);
                let z = self.b.contract(q, keys, &[size]);
                self.b.scale(z, 1.0 / (*query as f64).sqrt())
            }
        };
        let logits = match biased {
            true => {
                let bias = self.weight(c, part::LOGIT_BIAS, &[e], kind, Some(Init::Constant(0.0)));
                self.b.add(logits, bias)
            }
            false => logits,
        };
        let scores = match router.score {
            Score::Sigmoid => self.b.unary(Unary::Sigmoid, logits),
            Score::Softmax => self.b.op(Op::Softmax, &[logits]),
            Score::Sqrtsoftplus => self.sqrt_softplus(logits),
        };
        let mut selection = self.b.stop_gradient(match router.select {
            Select::Logit => logits,
            Select::Score => scores,
        });
        if let Some(law) = router.balance {
            let zero = Some(Init::Constant(0.0));
            let bias = self.weight(c, part::ROUTER_BIAS, &[e], TensorKind::Balance, zero);
            let counts = self.architecture.name_of(c, part::ROUTER_COUNTS);
            for w in self.weights.iter_mut().filter(|w| (w.owner, w.part) == (c, part::ROUTER_BIAS)) {
                w.balancing = Some(Balancing { counts: counts.clone(), law });
            }
            selection = self.b.add(selection, bias);
        }
        if router.groups > router.topk_groups {
            selection = self.best_groups(c, router, selection, experts);
        }
        let chosen_dim = if projection { self.dim("one", k) } else { self.dim_of(c, "active", k) };
        let chosen = self.b.op(Route { k: chosen_dim }, &[selection]);
        let rows = self.b.rows(n);
        let slots = self.b.module.elements(&rows) * k;
        let here = self.here(&rows);
        let slots = if k == 1 {
            self.dim(&format!("tokens{here}"), slots)
        } else {
            self.dim_of(c, &format!("slots{here}"), slots)
        };
        let (real_dim, offsets) =
            (self.dim_of(c, &many, real), self.dim_of(c, &format!("{many}+1"), real + 1));
        // Where counts are rounded each token has a spare choice, if there is another: the next.
        let round = round.filter(|_| self.form.trains());
        let spare = u64::from(round.is_some() && k < experts / router.groups.max(1) * router.topk_groups);
        let (taken, taken_slots) = match spare {
            0 => (chosen, slots),
            _ => {
                let taken = self.dim_of(c, "taken", k + spare);
                let all = self.b.module.elements(&rows) * (k + spare);
                let slots = self.dim_of(c, &format!("taken_slots{here}"), all);
                (self.b.op(Route { k: taken }, &[selection]), slots)
            }
        };
        if experts != real || spare > 0 {
            self.facts.taken.insert(real_dim, (real * k, experts * (k + spare)));
        }
        // A token that takes no part chooses nothing: that is, more than there is. Unless its keys
        // are wanted all the same.
        let wanted = match self.inside.last() {
            // One routing is for keys, too.
            Some(&Inside::Masked { keys, .. }) if projection && !self.form.trains() => {
                keys.map(|(keys, _)| keys)
            }
            _ => self.asked(),
        };
        let grouped = match wanted {
            Some(places) => self.b.op(KeepInts { otherwise: experts as i32 }, &[taken, places]),
            None => taken,
        };
        let group = Group { experts: real_dim, offsets, slots: taken_slots };
        let (grouped, rounded) = match round {
            None => (grouped, None),
            Some(tile) => {
                let scores = self.scores_of(router, logits, scores, taken);
                let fixed = self.b.stop_gradient(scores);
                let all = self.b.ops(group, &[grouped]);
                let by = RoundGroups { experts: real_dim, tile, spare, none: experts };
                (self.b.op(by, &[fixed, grouped, all[0], all[1]]), Some(scores))
            }
        };
        let groups = self.b.ops(group, &[grouped]);
        let (order, offsets, inverse) = (groups[0], groups[1], groups[2]);

        let mut gates = rounded.unwrap_or_else(|| self.scores_of(router, logits, scores, chosen));
        if router.normalise {
            // Of the choice, whether or not tiles take it.
            let of = if spare == 0 { gates } else { self.scores_of(router, logits, scores, chosen) };
            let sum = self.b.reduce(Reduce::Sum, of, &[chosen_dim]);
            gates = self.b.div(gates, sum);
        }
        gates = self.b.scale(gates, router.scale);
        for (value, name) in [(chosen, "chosen"), (gates, "gates")] {
            self.b.call(value, name);
            self.point(c, name, value);
        }
        // Gathered tokens are not those of the stream.
        if self.shape.observe && !self.gathered() {
            self.observe(c, Observation::Chosen, if round.is_some() { chosen } else { grouped });
            let entropy = self.entropy(router.score, logits, scores, e);
            let entropy = self.every_token(entropy);
            self.observe(c, Observation::Entropy, entropy);
        }

        // All candidates are counted, no-ops included: they are balanced like the others.
        let counted = if experts == real && round.is_none() {
            offsets
        } else {
            let all = self.dim_of(c, &format!("{candidates}+1"), experts + 1);
            self.b.ops(Group { experts: e, offsets: all, slots }, &[chosen])[1]
        };
        if router.balance.is_some() {
            let (port, counts) = self.state(c, part::ROUTER_COUNTS, Lifetime::Set, Type::f32(&[e]));
            // Balanced are the choices of tokens that take part, where training asks for those of
            // all.
            let taken = match self.inside.last() {
                Some(&Inside::Masked { places, .. }) if self.form.trains() => {
                    let all = self.dim_of(c, &format!("{candidates}+1"), experts + 1);
                    let kept = self.b.op(KeepInts { otherwise: experts as i32 }, &[chosen, places]);
                    self.b.ops(Group { experts: e, offsets: all, slots }, &[kept])[1]
                }
                _ => counted,
            };
            let counts = self.b.op(Op::AddCounts, &[counts, taken]);
            self.b.result(port, counts);
        }
        self.auxiliary_losses(router, logits, counted, e, slots, &rows);
        Routing { order, offsets, inverse, gates }
    }

    /// Scores of some experts of each token.
    fn scores_of(&mut self, router: &Router, logits: Value, scores: Value, chosen: Value) -> Value {
        // A sigmoid of the chosen logits is as good as choosing among the sigmoids, and much less
        // work.
        match router.score {
            Score::Sigmoid => {
                let z = self.b.op(Op::Pick, &[logits, chosen]);
                self.b.unary(Unary::Sigmoid, z)
            }
            Score::Sqrtsoftplus => {
                let z = self.b.op(Op::Pick, &[logits, chosen]);
                self.sqrt_softplus(z)
            }
            Score::Softmax => self.b.op(Op::Pick, &[scores, chosen]),
        }
    }

    /// `ln Σ e^z` over a dimension.
    pub(super) fn log_sum_exp(&mut self, z: Value, over: Dim) -> Value {
        let largest = self.b.reduce(Reduce::Max, z, &[over]);
        let largest = self.b.stop_gradient(largest);
        let shifted = self.b.sub(z, largest);
        let exp = self.b.unary(Unary::Exp, shifted);
        let sum = self.b.reduce(Reduce::Sum, exp, &[over]);
        let log = self.b.unary(Unary::Log, sum);
        self.b.add(log, largest)
    }

    fn sqrt_softplus(&mut self, z: Value) -> Value {
        let soft = self.b.unary(Unary::Softplus, z);
        self.b.unary(Unary::Sqrt, soft)
    }

    /// The values by which experts are chosen, those in groups that take no part far below all
    /// others. A group is as good as the sum of its two largest values (DeepSeek V3, 2412.19437,
    /// section 2.1.2, and its code).
    fn best_groups(&mut self, c: Owner, router: &Router, selection: Value, experts: u64) -> Value {
        const NEVER: f64 = 1e30;
        let rows = self.b.rows(selection);
        let each = experts / router.groups.max(1);
        let [groups, group] = [("groups", router.groups), ("group", each)].map(|(name, size)| {
            let dim = self.dim_of(c, name, size);
            self.routing(dim)
        });
        let taking = self.dim_of(c, "topk_groups", router.topk_groups);
        let values = self.b.reshape(selection, &[&rows[..], &[groups, group]].concat());
        let mut of_group = self.b.reduce(Reduce::Max, values, &[group]);
        if each > 1 {
            // The largest of the others; the same again where several are the largest.
            let (largest, one) = (of_group, self.b.constant(1.0));
            let below = self.b.sub(largest, values);
            let below = self.b.unary(Unary::Positive, below);
            let is_largest = self.b.sub(one, below);
            let times = self.b.reduce(Reduce::Sum, is_largest, &[group]);
            let away = self.b.scale(is_largest, -NEVER);
            let others = self.b.add(values, away);
            let second = self.b.reduce(Reduce::Max, others, &[group]);
            let between = self.b.constant(1.5);
            let several = self.b.sub(times, between);
            let several = self.b.unary(Unary::Positive, several);
            let single = self.b.sub(one, several);
            for (value, share) in [(largest, several), (second, single)] {
                let part = self.b.mul(value, share);
                of_group = self.b.add(of_group, part);
            }
        }
        let chosen = self.b.op(Route { k: taking }, &[of_group]);
        let chosen = self.b.op(Op::Pick, &[of_group, chosen]);
        // The worst group that takes part.
        let negative = self.b.unary(Unary::Neg, chosen);
        let most = self.b.reduce(Reduce::Max, negative, &[taking]);
        let worst = self.b.unary(Unary::Neg, most);
        let below = self.b.sub(worst, of_group);
        let outside = self.b.unary(Unary::Positive, below);
        let outside = self.b.scale(outside, NEVER);
        let values = self.b.sub(values, outside);
        let dims = self.b.dims(selection);
        self.b.reshape(values, &dims)
    }

    /// Switch load balancing `α·E·Σ_e f_e·P_e` and router z-loss `β·mean(logsumexp(z)²)`.
    pub(super) fn auxiliary_losses(
        &mut self,
        router: &Router,
        logits: Value,
        counted: Value,
        e: Dim,
        slots: Dim,
        rows: &[Dim],
    ) {
        if router.load_balance_loss != 0.0 {
            let p = self.b.op(Op::Softmax, &[logits]);
            let p = self.b.reduce(Reduce::Mean, p, rows);
            let zeros = self.b.zeros(&Type::f32(&[e]));
            let f = self.b.op(Op::AddCounts, &[zeros, counted]);
            let product = self.b.mul(p, f);
            let sum = self.b.reduce(Reduce::Sum, product, &[e]);
            let factor =
                router.load_balance_loss * self.b.module.size(e) as f64 / self.b.module.size(slots) as f64;
            let loss = self.b.scale(sum, factor);
            self.auxiliary.push(loss);
        }
        if router.z_loss != 0.0 {
            let lse = self.log_sum_exp(logits, e);
            let square = self.b.unary(Unary::Square, lse);
            let mean = self.b.reduce(Reduce::Mean, square, rows);
            let loss = self.b.scale(mean, router.z_loss);
            self.auxiliary.push(loss);
        }
    }

    pub(super) fn experts(&mut self, c: Owner, e: &spec::Experts, n: Value) -> Value {
        let r = self.route(c, &e.router, n, e.count + e.noop, e.count, e.active, false, e.biased, e.round);
        let (i, h) = (self.dim_of(c, "intermediate", e.intermediate), self.hidden());
        let many = self.dim_of(c, "experts", e.count);
        let x = self.b.op(Op::Gather, &[n, r.order]);
        let product = |lower: &mut Self, part, bias| {
            let w = lower.weight(c, part, &[many, i, h], TensorKind::Routed, None);
            let y = lower.b.op(Grouped { over: h }, &[x, w, r.offsets]);
            let y = lower.adapted_each(c, part, ([x, y, r.offsets], w), [many, i, h]);
            lower.bias_of_each(c, e, bias, y, r.offsets)
        };
        let gate = e.activation.gated().then(|| product(self, part::GATE, part::GATE_BIAS));
        let up = product(self, part::UP, part::UP_BIAS);
        let a = self.activate(e.activation, gate, up);
        let init = self.output_init();
        let down = self.weight(c, part::DOWN, &[many, h, i], TensorKind::Routed, init);
        let y = self.b.op(Grouped { over: i }, &[a, down, r.offsets]);
        let y = self.adapted_each(c, part::DOWN, ([a, y, r.offsets], down), [many, h, i]);
        let y = self.bias_of_each(c, e, part::DOWN_BIAS, y, r.offsets);
        let y = self.b.op(Op::Combine, &[y, r.inverse, r.gates]);
        if e.shared == 0 {
            return y;
        }
        let shared = self.dim_of(c, "shared", e.intermediate.saturating_mul(e.shared));
        let parts = [part::SHARED_GATE, part::SHARED_UP, part::SHARED_DOWN];
        let mut always = self.network(c, (parts, None), shared, e.activation, n);
        if e.shared_gate {
            let w = self.weight(c, part::SHARED_WEIGHT, &[h], TensorKind::Gain, None);
            let z = self.one_each(n, w, h);
            let share = self.b.unary(Unary::Sigmoid, z);
            always = self.b.mul(always, share);
        }
        self.b.add(y, always)
    }

    /// Slots and the bias of the expert that each belongs to: a product with a column of ones.
    fn bias_of_each(&mut self, c: Owner, e: &spec::Experts, part: Part, y: Value, offsets: Value) -> Value {
        if !e.biased {
            return y;
        }
        let dims = self.b.dims(y);
        let many = self.dim_of(c, "experts", e.count);
        let zero = Some(Init::Constant(0.0));
        let bias = self.weight(c, part, &[many, dims[1]], TensorKind::Gain, zero);
        let each = self.row_of_each(bias, y, offsets);
        self.b.add(y, each)
    }

    /// Of rows `[many, out]` that of the group of each slot, as slots of `y`.
    pub(super) fn row_of_each(&mut self, rows: Value, y: Value, offsets: Value) -> Value {
        let (dims, own, one) = (self.b.dims(y), self.b.dims(rows), self.one());
        let column = self.b.reshape(rows, &[own[0], own[1], one]);
        let ones = self.ones(&[dims[0], one]);
        self.b.op(Grouped { over: one }, &[ones, column, offsets])
    }

    /// `down(activation(gate n) ⊙ up n)` of every token; each matrix adds its bias, where there are
    /// biases.
    fn network(
        &mut self,
        c: Owner,
        ([gate, up, down], biases): ([Part; 3], Option<[Part; 3]>),
        i: Dim,
        activation: Activation,
        n: Value,
    ) -> Value {
        let h = self.hidden();
        let [of_gate, of_up, of_down] = biases.map_or([None; 3], |biases| biases.map(Some));
        let product = |lower: &mut Self, part, bias| {
            let y = lower.matrix(c, part, n, [i, h], None);
            lower.bias(c, bias, y)
        };
        let gate = activation.gated().then(|| product(self, gate, of_gate));
        let up = product(self, up, of_up);
        let a = self.activate(activation, gate, up);
        self.point(c, "act", a);
        let init = self.output_init();
        let y = self.matrix(c, down, a, [h, i], init);
        self.bias(c, of_down, y)
    }

    pub(super) fn activate(&mut self, activation: Activation, gate: Option<Value>, up: Value) -> Value {
        let f = match activation {
            Activation::GegluErf => {
                let a = self.gelu_by_error_function(gate.unwrap_or(up));
                return self.b.mul(a, up);
            }
            Activation::SwigluClamped => return self.clamped(gate.unwrap_or(up), up),
            Activation::Swiglu => Unary::Silu,
            Activation::Geglu | Activation::Gelu => Unary::Gelu,
            Activation::Relu | Activation::Relu2 => Unary::Relu,
        };
        match gate {
            Some(gate) => {
                let a = self.b.unary(f, gate);
                self.b.mul(a, up)
            }
            None => {
                let a = self.b.unary(f, up);
                if activation == Activation::Relu2 { self.b.unary(Unary::Square, a) } else { a }
            }
        }
    }

    /// `x · Φ(x) = max(x, 0) - |x| · p(t) · e^(-x²/2) / 2`, `t = 1 / (1 + 0.3275911 |x| / √2)`, `p`
    /// the polynomial of Abramowitz and Stegun, 7.1.26, whose error function is within 1.5e-7.
    pub(super) fn gelu_by_error_function(&mut self, x: Value) -> Value {
        let below = self.b.unary(Unary::Neg, x);
        let (above, below) = (self.b.unary(Unary::Relu, x), self.b.unary(Unary::Relu, below));
        let size = self.b.add(above, below);
        let one = self.b.constant(1.0);
        let t = self.b.scale(size, ERROR_FUNCTION.0 / std::f64::consts::SQRT_2);
        let t = self.b.add(t, one);
        let t = self.b.unary(Unary::Recip, t);
        let mut p = self.b.scale(t, ERROR_FUNCTION.1[0]);
        for &factor in &ERROR_FUNCTION.1[1..] {
            let factor = self.b.constant(factor);
            let sum = self.b.add(p, factor);
            p = self.b.mul(sum, t);
        }
        let square = self.b.unary(Unary::Square, x);
        let exponent = self.b.scale(square, -0.5);
        let tail = self.b.unary(Unary::Exp, exponent);
        let tail = self.b.mul(tail, p);
        let tail = self.b.mul(tail, size);
        let tail = self.b.scale(tail, 0.5);
        self.b.sub(above, tail)
    }

    /// `g · sigmoid(1.702 g) ⊙ (u + 1)`, `g` at most 7 and `u` between -7 and 7 (gpt-oss,
    /// `gpt_oss/torch/model.py`, `swiglu`). Within the bounds nothing is rounded.
    fn clamped(&mut self, gate: Value, up: Value) -> Value {
        let limit = self.b.constant(7.0);
        let at_most = |lower: &mut Self, x: Value| {
            let beyond = lower.b.sub(x, limit);
            let beyond = lower.b.unary(Unary::Relu, beyond);
            lower.b.sub(x, beyond)
        };
        let gate = at_most(self, gate);
        let up = at_most(self, up);
        let below = self.b.unary(Unary::Neg, up);
        let below = self.b.sub(below, limit);
        let below = self.b.unary(Unary::Relu, below);
        let up = self.b.add(up, below);
        let z = self.b.scale(gate, 1.702);
        let share = self.b.unary(Unary::Sigmoid, z);
        let gate = self.b.mul(gate, share);
        let one = self.b.constant(1.0);
        let up = self.b.add(up, one);
        self.b.mul(gate, up)
    }
}
