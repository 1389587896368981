//! An architecture as IR: the canonical form, written as the formulas of SEMANTICS are.
//!
//! *In*: an [`Architecture`]. *Out*: a [`Lowered`]: a module with the functions `embed`, one per distinct layer body, and
//! `head`, and a list of the weights each reads. Nothing is optimised here; rewriting does that, and declared counts are
//! taken from this form.
//!
//! Every term of a composition yields an *update* of the stream: a component its branch output; `a > b` the update of `a`
//! plus that of `b` on the stream so updated; `a | b` the sum of both on the same stream. A layer adds its update.

use crate::CompileError;
use crate::architecture::{Architecture, Body};
use crate::build::Builder;
use crate::compiled::{Init, Observation, TensorKind};
use crate::ir::{self, Dim, Function, Mask, Module, Op, Positions, Reduce, Role, Type, Unary, Value};
use dreamc_dsl::spec::{
    self, Activation, Component, EmbedScale, Expr, QkNorm, Router, RouterForm, Score, Select,
};

/// Size of the batch a module is lowered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub sequence: u64,
    /// Whether attention stops at document boundaries (`segments` input).
    pub segments: bool,
    /// Whether keys and values are appended to caches of so many places for each sequence, and attention reads those:
    /// `slots` says where, `key_positions` what is there.
    pub cache: Option<u64>,
    /// Whether layers return what routers choose and what depth attention asks for, see [`Observation`].
    pub observe: bool,
}

/// One token without caches.
impl Default for Shape {
    fn default() -> Self {
        Shape { batch: 1, sequence: 1, segments: false, cache: None, observe: false }
    }
}

/// A model as IR.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// The functions and dimensions.
    pub module: Module,
    /// Weights of each body, by parameter name, in order of definition; then those of `embed` and `head`.
    pub weights: Vec<Vec<Weight>>,
    /// Weights outside the layers, by full tensor name.
    pub globals: Vec<Weight>,
}

/// A tensor that a function reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Its name inside the layer, or its full name.
    pub name: String,
    /// Its dimensions.
    pub dims: Vec<Dim>,
    /// What it is.
    pub kind: TensorKind,
    /// How it begins.
    pub init: Init,
}

/// Name of the function that embeds tokens: `(ids) -> x`.
pub const EMBED: &str = "embed";
/// Name of the function from the last stream to the loss: `(x, targets, loss_scale) -> nll, loss`.
pub const HEAD: &str = "head";

/// Lowers an architecture for a batch shape.
pub fn lower(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, false)
}

/// The canonical inference form, of which declared counts are taken: as [`lower`], but the matrices of a projection
/// mixture stand for their sums with the shared expert (Equation 8), which is listed and not read.
pub fn lower_inference(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, true)
}

fn lower_as(architecture: &Architecture, shape: Shape, merged: bool) -> Result<Lowered, CompileError> {
    check_sizes(architecture, shape)?;
    let mut module = Module::default();
    module.dim("batch", shape.batch);
    module.dim("seq", shape.sequence);
    module.dim("hidden", architecture.model.hidden);
    module.dim("vocab", architecture.model.vocab);
    let mut functions = vec![];
    let mut weights = vec![];
    let mut globals = vec![];
    functions.push(embed(architecture, &mut module, &mut globals)?);
    for body in &architecture.bodies {
        let mut lower = Lower::new(architecture, Some(body), shape, &mut module, &body.name);
        lower.merged = merged;
        lower.layer(body)?;
        let (function, read) = lower.finish()?;
        functions.push(function);
        weights.push(read);
    }
    functions.push(head(architecture, shape, &mut module, &mut globals)?);
    module.functions = functions.into_iter().map(|f| (f.name.clone(), f)).collect();
    Ok(Lowered { module, weights, globals })
}

/// Whether the sizes that lowering multiplies or adds fit into 64 bits.
fn check_sizes(architecture: &Architecture, shape: Shape) -> Result<(), CompileError> {
    let fits = |what, factors: &[u64]| {
        let product = factors.iter().try_fold(1u64, |n, &f| n.checked_mul(f));
        product.filter(|n| n.checked_mul(4).is_some()).ok_or(CompileError::Overflow(what))
    };
    let tokens = fits("a batch", &[shape.batch, shape.sequence])?;
    for component in architecture.model.components.values() {
        match component {
            Component::Sequence(a) | Component::Depth(a) => {
                fits("an attention", &[a.heads.max(a.kv_heads), a.head_size])?;
            }
            Component::Experts(e) => {
                fits("the choice of experts", &[tokens, e.active])?;
                e.count
                    .checked_add(e.noop)
                    .and_then(|n| n.checked_add(1))
                    .ok_or(CompileError::Overflow("a mixture"))?;
            }
            Component::Mlp(_) => {}
        }
    }
    Ok(())
}

fn embed(
    architecture: &Architecture,
    module: &mut Module,
    globals: &mut Vec<Weight>,
) -> Result<Function, CompileError> {
    let shape = Shape::default();
    let mut lower = Lower::new(architecture, None, shape, module, EMBED);
    let table = lower.weight(
        "embed.weight",
        &[("vocab", architecture.model.vocab), ("hidden", architecture.model.hidden)],
        TensorKind::Embedding,
        None,
    );
    let rows = lower.stream_rows();
    let ids = lower.b.param("ids", Role::Input, Type::i32(&rows));
    let x = lower.b.op(Op::Embed, &[table, ids]);
    let x = match architecture.model.embed_scale {
        None => x,
        Some(EmbedScale::SqrtHidden) => lower.b.scale(x, (architecture.model.hidden as f64).sqrt()),
        Some(EmbedScale::Value(c)) => lower.b.scale(x, c),
    };
    lower.b.result("x", x);
    let (function, read) = lower.finish()?;
    globals.extend(read);
    Ok(function)
}

fn head(
    architecture: &Architecture,
    shape: Shape,
    module: &mut Module,
    globals: &mut Vec<Weight>,
) -> Result<Function, CompileError> {
    let model = &architecture.model;
    let mut lower = Lower::new(architecture, None, shape, module, HEAD);
    let rows = lower.stream_rows();
    let hidden = lower.dim("hidden", model.hidden);
    let mut x = lower.stream();
    if architecture.final_norm {
        x = lower.norm(x, "norm.weight", 1);
    }
    let name = if model.tie { "embed.weight" } else { "head.weight" };
    let kind = if model.tie { TensorKind::Embedding } else { TensorKind::Head };
    let w = lower.weight(name, &[("vocab", model.vocab), ("hidden", model.hidden)], kind, None);
    let logits = lower.b.contract(x, w, &[hidden]);
    let logits = lower.b.softcap(logits, model.logit_softcap);
    let targets = lower.b.param("targets", Role::Input, Type::i32(&rows));
    let scale = lower.b.param("loss_scale", Role::Input, Type::f32(&[]));
    let nll = lower.b.ops(Op::CrossEntropy, &[logits, targets])[0];
    let sum = lower.b.reduce(Reduce::Sum, nll, &rows);
    let loss = lower.b.mul(sum, scale);
    lower.b.result("loss", loss);
    lower.b.result("nll", nll);
    lower.b.result("logits", logits);
    let (function, read) = lower.finish()?;
    globals.extend(read.into_iter().filter(|w| w.name != "embed.weight"));
    Ok(function)
}

struct Lower<'a> {
    architecture: &'a Architecture,
    body: Option<&'a Body>,
    shape: Shape,
    b: Builder<'a>,
    /// Whether matrices of projection mixtures stand for their sums with the shared one.
    merged: bool,
    weights: Vec<Weight>,
    /// Auxiliary losses of routers.
    auxiliary: Vec<Value>,
}

/// A routing decision and what follows from it.
struct Routing {
    order: Value,
    offsets: Value,
    inverse: Value,
    /// Gates `[.., k]`.
    gates: Value,
}

impl<'a> Lower<'a> {
    fn new(
        architecture: &'a Architecture,
        body: Option<&'a Body>,
        shape: Shape,
        module: &'a mut Module,
        name: &str,
    ) -> Self {
        let b = Builder::new(module, name);
        Lower { architecture, body, shape, b, merged: false, weights: vec![], auxiliary: vec![] }
    }

    fn finish(self) -> Result<(Function, Vec<Weight>), CompileError> {
        Ok((self.b.finish()?, self.weights))
    }

    fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.b.module.dim(name, size)
    }

    fn stream_rows(&mut self) -> Vec<Dim> {
        vec![Dim(0), Dim(1)]
    }

    fn stream(&mut self) -> Value {
        let mut dims = self.stream_rows();
        dims.push(self.dim("hidden", self.architecture.model.hidden));
        self.b.param("x", Role::Input, Type::f32(&dims))
    }

    /// A weight of those dimensions. `output` matrices, the last of a branch, begin smaller; `None` is the default.
    fn weight(&mut self, name: &str, dims: &[(&str, u64)], kind: TensorKind, init: Option<Init>) -> Value {
        let dims: Vec<Dim> = dims.iter().map(|(n, s)| self.dim(n, *s)).collect();
        let init = init.unwrap_or(Init::Normal((1.0 / (5.0 * self.architecture.model.hidden as f64)).sqrt()));
        let role = if kind == TensorKind::Balance { Role::Buffer } else { Role::Weight };
        if !self.weights.iter().any(|w| w.name == name) {
            self.weights.push(Weight { name: name.into(), dims: dims.clone(), kind, init });
        }
        self.b.param(name, role, Type::f32(&dims))
    }

    /// Initialisation of output projections and expert down-projections.
    fn output_init(&self) -> Option<Init> {
        let a = self.architecture;
        let n = a.attention_dimensions as f64;
        Some(Init::Normal((1.0 / (2.5 * a.model.hidden as f64 * a.depth as f64 * n)).sqrt()))
    }

    /// A gain of the shape of the last `inner` dimensions of `x`.
    fn gain(&mut self, name: &str, x: Value, inner: usize, kind: TensorKind) -> Value {
        let all = self.b.dims(x);
        let dims: Vec<(String, u64)> = all[all.len() - inner..]
            .iter()
            .map(|&d| (self.b.module.name(d).to_string(), self.b.module.size(d)))
            .collect();
        let dims: Vec<(&str, u64)> = dims.iter().map(|(n, s)| (n.as_str(), *s)).collect();
        let offset = self.architecture.model.norm.unit_offset;
        let w = self.weight(name, &dims, kind, Some(Init::Constant(if offset { 0.0 } else { 1.0 })));
        if !offset {
            return w;
        }
        let one = self.b.constant(1.0);
        self.b.add(w, one)
    }

    fn norm_as(&mut self, x: Value, name: &str, inner: usize, kind: TensorKind) -> Value {
        let n = self.b.op(Op::Rms { inner, eps: self.architecture.model.norm.eps }, &[x]);
        let g = self.gain(name, x, inner, kind);
        self.b.mul(n, g)
    }

    fn norm(&mut self, x: Value, name: &str, inner: usize) -> Value {
        self.norm_as(x, name, inner, TensorKind::Gain)
    }

    fn layer(&mut self, body: &Body) -> Result<(), CompileError> {
        let x = self.stream();
        let update = self.expr(&body.expr, x)?;
        let mut y = self.b.add(x, update);
        if body.residual_norm {
            y = self.norm(y, "residual_norm.weight", 1);
        }
        self.b.result("y", y);
        if let Some(sum) =
            self.auxiliary.drain(..).collect::<Vec<_>>().into_iter().reduce(|a, c| self.b.add(a, c))
        {
            self.b.result("aux", sum);
        }
        Ok(())
    }

    /// The update of a composition on the stream `x`.
    fn expr(&mut self, expr: &Expr, x: Value) -> Result<Value, CompileError> {
        match expr {
            Expr::Component(name) => self.component(name, x),
            Expr::Parallel(terms) => {
                let mut sum = self.expr(&terms[0], x)?;
                for term in &terms[1..] {
                    let update = self.expr(term, x)?;
                    sum = self.b.add(sum, update);
                }
                Ok(sum)
            }
            Expr::Sequential(terms) => {
                let mut sum = self.expr(&terms[0], x)?;
                for term in &terms[1..] {
                    let y = self.b.add(x, sum);
                    let update = self.expr(term, y)?;
                    sum = self.b.add(sum, update);
                }
                Ok(sum)
            }
            Expr::Skip(..) => Err(CompileError::Unsupported("skip(…)")),
        }
    }

    fn component(&mut self, name: &str, x: Value) -> Result<Value, CompileError> {
        let architecture = self.architecture;
        let component = architecture
            .model
            .components
            .get(name)
            .ok_or(CompileError::Unsupported("a component without definition"))?;
        let n = self.norm(x, &format!("{name}.norm.weight"), 1);
        let (y, post_norm) = match component {
            Component::Sequence(a) => (self.attention(name, a, n, false), a.post_norm),
            Component::Depth(a) => (self.attention(name, a, n, true), a.post_norm),
            Component::Experts(e) => (self.experts(name, e, n), e.post_norm),
            Component::Mlp(m) => (self.mlp(name, m, n), m.post_norm),
        };
        Ok(if post_norm { self.norm(y, &format!("{name}.post_norm.weight"), 1) } else { y })
    }

    fn attention(&mut self, c: &str, a: &spec::Attention, n: Value, depth: bool) -> Value {
        let rows = self.b.rows(n);
        let heads = self.dim(&format!("{c}.heads"), a.heads);
        let kv = self.dim(&format!("{c}.kv_heads"), a.kv_heads);
        let size = self.dim(&format!("{c}.size"), a.head_size);
        let (wide, narrow) = (a.heads * a.head_size, a.kv_heads * a.head_size);
        let queries = self.dim(&format!("{c}.q"), wide);
        let keys = self.dim(&format!("{c}.k"), narrow);
        let all = (format!("{c}.qkv"), wide + 2 * narrow);
        let with = |rows: &[Dim], more: &[Dim]| [rows, more].concat();

        // One routing decision serves both projections.
        let mixture = self
            .body
            .and_then(|b| b.recurrent)
            .and_then(|e| a.projection.as_ref().map(|p| (p, p.count.unwrap_or(e))));
        let routing = mixture
            .map(|(p, experts)| (self.route(c, &p.router, n, experts, experts, 1, true), p.shared, experts));
        let qkv = self.projection(
            c,
            "qkv",
            n,
            (&all.0, all.1),
            ("hidden", self.architecture.model.hidden),
            &routing,
            None,
        );

        let parts = self.b.ops(Op::Split(vec![queries, keys, keys]), &[qkv]);
        let (mut q, mut k) = (parts[0], parts[1]);
        if a.qk_norm == QkNorm::RmsAll {
            q = self.norm(q, &format!("{c}.q_norm.weight"), 1);
            k = self.norm(k, &format!("{c}.k_norm.weight"), 1);
        }
        let mut q = self.b.reshape(q, &with(&rows, &[heads, size]));
        let mut k = self.b.reshape(k, &with(&rows, &[kv, size]));
        let v = self.b.reshape(parts[2], &with(&rows, &[kv, size]));
        if a.qk_norm == QkNorm::Rms {
            q = self.norm(q, &format!("{c}.q_norm.weight"), 1);
            k = self.norm(k, &format!("{c}.k_norm.weight"), 1);
        }
        if let Some(rope) = a.rope {
            q = self.rope(q, rope, depth);
            k = self.rope(k, rope, depth);
        }
        let op = ir::Attention {
            scale: a.scale.unwrap_or(1.0 / (a.head_size as f64).sqrt()),
            softcap: a.softcap,
            window: a.window,
            mask: if !depth && self.shape.cache.is_some() { Mask::Positions } else { Mask::Causal },
            segments: !depth && self.shape.segments,
        };
        let o = if depth {
            let row = self.b.index(&format!("{c}.row"));
            let depths = self.dim(&format!("{c}.depths"), self.architecture.rows_of(c));
            let ty = Type::f32(&[vec![depths], rows.clone(), vec![kv, size]].concat());
            let mut cache = |name: &str, value| {
                let name = format!("{c}.{name}");
                let state = self.b.param(&name, Role::State, ty.clone());
                let written = self.b.op(Op::CacheWrite, &[state, value, row]);
                self.b.result(name, written);
                written
            };
            let (k, v) = (cache("keys", k), cache("values", v));
            self.observe(c, Observation::Queries, q);
            self.b.op(Op::DepthAttention(op), &[q, k, v, row])
        } else {
            let mut operands = vec![q, k, v];
            if let Some(places) = self.shape.cache {
                let places = self.dim("places", places);
                let slots = self.b.param("slots", Role::Input, Type::i32(&rows));
                let ty = Type::f32(&[rows[0], places, kv, size]);
                for (operand, name) in [(1, "keys"), (2, "values")] {
                    let name = format!("{c}.{name}");
                    let cache = self.b.param(&name, Role::State, ty.clone());
                    operands[operand] = self.b.op(Op::Append, &[cache, operands[operand], slots]);
                    self.b.result(name, operands[operand]);
                }
                operands.push(self.b.param("positions", Role::Input, Type::i32(&rows)));
                operands.push(self.b.param("key_positions", Role::Input, Type::i32(&[rows[0], places])));
            }
            if op.segments {
                operands.push(self.b.param("segments", Role::Input, Type::i32(&rows)));
            }
            self.b.ops(Op::Attention(op), &operands)[0]
        };
        let o = self.b.reshape(o, &with(&rows, &[queries]));
        let init = self.output_init();
        self.projection(
            c,
            "out",
            o,
            ("hidden", self.architecture.model.hidden),
            (&format!("{c}.q"), wide),
            &routing,
            init,
        )
    }

    fn rope(&mut self, x: Value, rope: spec::Rope, depth: bool) -> Value {
        let positions =
            if depth { Positions::Depth { half_reversed: rope.half_reversed } } else { Positions::Tokens };
        let scaling = rope.scaling.map(|s| ir::RopeScaling {
            factor: s.factor,
            low: s.low,
            high: s.high,
            original_context: s.original_context,
        });
        let op = Op::Rope(ir::Rope { base: rope.base, positions, scaling, inverse: false });
        if depth {
            let (l, all) = (self.b.index("depth"), self.b.index("depths"));
            self.b.op(op, &[x, l, all])
        } else {
            let rows = self.stream_rows();
            let positions = self.b.param("positions", Role::Input, Type::i32(&rows));
            self.b.op(op, &[x, positions])
        }
    }

    /// One projection of an attention: a matrix, or the mixture `s·W_e·x + stop_gradient(s)·W_shared·x` (Equation 7).
    #[allow(clippy::too_many_arguments)]
    fn projection(
        &mut self,
        c: &str,
        which: &str,
        x: Value,
        out: (&str, u64),
        inner: (&str, u64),
        routing: &Option<(Routing, bool, u64)>,
        init: Option<Init>,
    ) -> Value {
        let over = self.dim(inner.0, inner.1);
        let name = format!("{c}.{which}.weight");
        let Some((routing, shared, experts)) = routing else {
            let w = self.weight(&name, &[out, inner], TensorKind::Matrix, init);
            return self.b.contract(x, w, &[over]);
        };
        let many = format!("{c}.projections{experts}");
        let w = self.weight(&name, &[(&many, *experts), out, inner], TensorKind::Routed, init);
        let slots = self.b.op(Op::Gather, &[x, routing.order]);
        let y = self.b.op(Op::Grouped { over }, &[slots, w, routing.offsets]);
        let y = self.b.op(Op::Combine, &[y, routing.inverse]);
        let rows = self.b.rows(x);
        let s = self.b.reshape(routing.gates, &rows);
        let y = self.b.mul(y, s);
        if !shared {
            return y;
        }
        let w = self.weight(&format!("{c}.{which}.shared.weight"), &[out, inner], TensorKind::Shared, init);
        if self.merged {
            return y;
        }
        let common = self.b.contract(x, w, &[over]);
        let s = self.b.stop_gradient(s);
        let common = self.b.mul(common, s);
        self.b.add(y, common)
    }

    /// Logits, choice, groups, gates and counts of a router on the normalised input `n`. `experts` are candidates, of which
    /// the first `real` have matrices.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &mut self,
        c: &str,
        router: &Router,
        n: Value,
        experts: u64,
        real: u64,
        k: u64,
        projection: bool,
    ) -> Routing {
        let hidden = self.dim("hidden", self.architecture.model.hidden);
        let many = if projection { format!("{c}.projections{experts}") } else { format!("{c}.experts") };
        let candidates = if experts == real { many.clone() } else { format!("{c}.candidates") };
        let e = self.dim(&candidates, experts);
        let logits = match &router.form {
            RouterForm::Linear => {
                let w = self.weight(
                    &format!("{c}.router.weight"),
                    &[(&candidates, experts), ("hidden", self.architecture.model.hidden)],
                    TensorKind::Router,
                    None,
                );
                self.b.contract(n, w, &[hidden])
            }
            RouterForm::LowRank { query, rope } => {
                let name = if projection { format!("{c}.router_query") } else { format!("{c}.query") };
                let size = self.dim(&name, *query);
                let w = self.weight(
                    &format!("{c}.router.query.weight"),
                    &[(&name, *query), ("hidden", self.architecture.model.hidden)],
                    TensorKind::Router,
                    None,
                );
                let keys = self.weight(
                    &format!("{c}.router.keys.weight"),
                    &[(&candidates, experts), (&name, *query)],
                    TensorKind::Router,
                    None,
                );
                let q = self.b.contract(n, w, &[hidden]);
                let mut q = self.norm_as(q, &format!("{c}.router.q_norm.weight"), 1, TensorKind::Router);
                if let Some(rope) = rope {
                    q = self.rope(q, *rope, true);
                }
                let keys = self.norm_as(keys, &format!("{c}.router.k_norm.weight"), 1, TensorKind::Router);
                let z = self.b.contract(q, keys, &[size]);
                self.b.scale(z, 1.0 / (*query as f64).sqrt())
            }
        };
        let scores = match router.score {
            Score::Sigmoid => self.b.unary(Unary::Sigmoid, logits),
            Score::Softmax => self.b.op(Op::Softmax, &[logits]),
        };
        let mut selection = self.b.stop_gradient(match router.select {
            Select::Logit => logits,
            Select::Score => scores,
        });
        if router.balance.is_some() {
            let bias = self.weight(
                &format!("{c}.router.bias"),
                &[(&candidates, experts)],
                TensorKind::Balance,
                Some(Init::Constant(0.0)),
            );
            selection = self.b.add(selection, bias);
        }
        let chosen_dim = self.dim(&if projection { "one".into() } else { format!("{c}.active") }, k);
        let chosen = self.b.op(Op::Route { k: chosen_dim }, &[selection]);
        let rows = self.b.rows(n);
        let slots = self.b.module.elements(&rows) * k;
        let slots = self.dim(&if k == 1 { "tokens".into() } else { format!("{c}.slots") }, slots);
        let (real_dim, offsets) = (self.dim(&many, real), self.dim(&format!("{many}+1"), real + 1));
        let groups = self.b.ops(Op::Group { experts: real_dim, offsets, slots }, &[chosen]);
        let (order, offsets, inverse) = (groups[0], groups[1], groups[2]);

        // A sigmoid of the chosen logits is as good as choosing among the sigmoids, and much less work.
        let mut gates = match router.score {
            Score::Sigmoid => {
                let z = self.b.op(Op::Pick, &[logits, chosen]);
                self.b.unary(Unary::Sigmoid, z)
            }
            Score::Softmax => self.b.op(Op::Pick, &[scores, chosen]),
        };
        if router.normalise {
            let sum = self.b.reduce(Reduce::Sum, gates, &[chosen_dim]);
            gates = self.b.div(gates, sum);
        }
        gates = self.b.scale(gates, router.scale);
        if self.shape.observe {
            self.observe(c, Observation::Chosen, chosen);
            let entropy = self.entropy(router.score, logits, scores, e);
            self.observe(c, Observation::Entropy, entropy);
        }

        // All candidates are counted, no-ops included: they are balanced like the others.
        let counted = if experts == real {
            offsets
        } else {
            let all = self.dim(&format!("{candidates}+1"), experts + 1);
            self.b.ops(Op::Group { experts: e, offsets: all, slots }, &[chosen])[1]
        };
        if router.balance.is_some() {
            let name = format!("{c}.router.counts");
            let counts = self.b.param(&name, Role::State, Type::f32(&[e]));
            let counts = self.b.op(Op::AddCounts, &[counts, counted]);
            self.b.result(name, counts);
        }
        self.auxiliary_losses(router, logits, counted, e, slots, &rows);
        Routing { order, offsets, inverse, gates }
    }

    /// Leaves a value for the host.
    fn observe(&mut self, c: &str, what: Observation, value: Value) {
        if self.shape.observe {
            self.b.result(what.result(c), value);
        }
    }

    /// Entropy in nats of a router's scores as shares of their sum, for each token.
    fn entropy(&mut self, score: Score, logits: Value, scores: Value, e: Dim) -> Value {
        // The logarithm of a score that is 0 in floats is still a number.
        let logs = match score {
            Score::Sigmoid => {
                let z = self.b.unary(Unary::Neg, logits);
                let z = self.b.unary(Unary::Softplus, z);
                self.b.unary(Unary::Neg, z)
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

    /// Switch load balancing `α·E·Σ_e f_e·P_e` and router z-loss `β·mean(logsumexp(z)²)`.
    fn auxiliary_losses(
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
            let largest = self.b.reduce(Reduce::Max, logits, &[e]);
            let largest = self.b.stop_gradient(largest);
            let shifted = self.b.sub(logits, largest);
            let exp = self.b.unary(Unary::Exp, shifted);
            let sum = self.b.reduce(Reduce::Sum, exp, &[e]);
            let log = self.b.unary(Unary::Log, sum);
            let lse = self.b.add(log, largest);
            let square = self.b.unary(Unary::Square, lse);
            let mean = self.b.reduce(Reduce::Mean, square, rows);
            let loss = self.b.scale(mean, router.z_loss);
            self.auxiliary.push(loss);
        }
    }

    fn experts(&mut self, c: &str, e: &spec::Experts, n: Value) -> Value {
        let many = format!("{c}.experts");
        let r = self.route(c, &e.router, n, e.count + e.noop, e.count, e.active, false);
        let (inner, outer) =
            ((format!("{c}.intermediate"), e.intermediate), ("hidden", self.architecture.model.hidden));
        let (i, h) = (self.dim(&inner.0, inner.1), self.dim(outer.0, outer.1));
        let into = [(many.as_str(), e.count), (&inner.0, inner.1), outer];
        let from = [(many.as_str(), e.count), outer, (&inner.0, inner.1)];
        let x = self.b.op(Op::Gather, &[n, r.order]);
        let product = |lower: &mut Self, which: &str| {
            let w = lower.weight(&format!("{c}.{which}.weight"), &into, TensorKind::Routed, None);
            lower.b.op(Op::Grouped { over: h }, &[x, w, r.offsets])
        };
        let gate = e.activation.gated().then(|| product(self, "gate"));
        let up = product(self, "up");
        let a = self.activate(e.activation, gate, up);
        let init = self.output_init();
        let down = self.weight(&format!("{c}.down.weight"), &from, TensorKind::Routed, init);
        let y = self.b.op(Op::Grouped { over: i }, &[a, down, r.offsets]);
        self.b.op(Op::Combine, &[y, r.inverse, r.gates])
    }

    fn mlp(&mut self, c: &str, m: &spec::Mlp, n: Value) -> Value {
        let (inner, outer) =
            ((format!("{c}.intermediate"), m.intermediate), ("hidden", self.architecture.model.hidden));
        let (i, h) = (self.dim(&inner.0, inner.1), self.dim(outer.0, outer.1));
        let product = |lower: &mut Self, which: &str| {
            let w = lower.weight(
                &format!("{c}.{which}.weight"),
                &[(&inner.0, inner.1), outer],
                TensorKind::Matrix,
                None,
            );
            lower.b.contract(n, w, &[h])
        };
        let gate = m.activation.gated().then(|| product(self, "gate"));
        let up = product(self, "up");
        let a = self.activate(m.activation, gate, up);
        let init = self.output_init();
        let down =
            self.weight(&format!("{c}.down.weight"), &[outer, (&inner.0, inner.1)], TensorKind::Matrix, init);
        self.b.contract(a, down, &[i])
    }

    fn activate(&mut self, activation: Activation, gate: Option<Value>, up: Value) -> Value {
        let f = match activation {
            Activation::Swiglu => Unary::Silu,
            Activation::Geglu | Activation::Gelu => Unary::Gelu,
            Activation::Relu => Unary::Relu,
        };
        match gate {
            Some(gate) => {
                let a = self.b.unary(f, gate);
                self.b.mul(a, up)
            }
            None => self.b.unary(f, up),
        }
    }
}
