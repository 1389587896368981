//! Hyper-Connections: several streams; a unit reads a mixture of them, and they mix around it.
//!
//! The stream is `[b, t, N, h]`. Around every unit `f`, in this order: `u = Σ_i α_i X_i`,
//! `y = f(u)`, `X_i ← Σ_j M_ij X_j + β_i y` (Zhu et al. 2024, "Hyper-Connections", Equations 1 to
//! 5; for `mhc`, Xie et al. 2025, "mHC", with the head of DeepSeek V4). The `N` lanes are values of
//! their own inside a layer, and all of this is element-wise, so that row kernels read every lane
//! once.

use super::Wiring;
use crate::CompileError;
use crate::architecture::units;
use crate::bind::{Owner, Part};
use crate::compiled::{Init, TensorKind};
use crate::ir::{Dim, Op, Reduce, Type, Unary, Value};
use crate::lower::Lower;
use crate::op::{Concat, Rms, Split};
use dreamc_dsl::spec::{Expr, LaneKind};
use smallvec::smallvec;

/// Tensors of lanes.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("lanes", path)
    }

    /// The vectors that lanes begin with, in addition to the embedding.
    pub const EMBEDDING: Part = own("lanes.embed.weight");
    /// How much of each lane is read, of lanes with weights.
    pub const ALPHA: Part = own("alpha");
    /// How much of an output each lane gets.
    pub const BETA: Part = own("beta");
    /// How lanes mix.
    pub const MIX: Part = own("mix");
    /// The gain of the norm of a lane that moves these numbers.
    pub const NORM: Part = own("norm.weight");
    /// The vector by which a lane moves how much of it is read.
    pub const ALPHA_WEIGHT: Part = own("alpha_weight");
    /// The vector by which a lane moves how much of an output it gets.
    pub const BETA_WEIGHT: Part = own("beta_weight");
    /// The matrix by which a lane moves how it mixes with others.
    pub const MIX_WEIGHT: Part = own("mix_weight");
    /// The factor of the first and the last of these.
    pub const ALPHA_SCALE: Part = own("alpha_scale");
    /// The factor of the second.
    pub const BETA_SCALE: Part = own("beta_scale");
    /// The matrix of all numbers that lanes themselves make.
    pub const TABLE: Part = own("weight");
    /// Their offsets.
    pub const BIAS: Part = own("bias");
    /// Their factors.
    pub const SCALE: Part = own("scale");
    /// The matrix by which lanes say how much of each the final norm reads.
    pub const LAST: Part = own("lanes.weight");
    /// The offsets of these numbers.
    pub const LAST_BIAS: Part = own("lanes.bias");
    /// Their factor.
    pub const LAST_SCALE: Part = own("lanes.scale");
}

/// Added to every number that a sigmoid or softmax makes of the lanes, and to every sum that
/// divides.
const LEAST: f64 = 1e-6;

/// How often the columns of a mixing matrix are normalised.
const ITERATIONS: usize = 20;

/// The beginning of a factor on what depends on the lanes.
const SCALE: f64 = 0.01;

/// `N` lanes.
pub(crate) struct Lanes {
    pub count: u64,
    pub kind: LaneKind,
    /// Whether each begins with a vector of its own.
    pub embed: bool,
}

/// Numbers between a unit and the lanes: of all tokens, or of each.
struct Around {
    alpha: Vec<Value>,
    beta: Vec<Value>,
    /// `[to][from]`
    mix: Vec<Vec<Value>>,
}

impl Wiring for Lanes {
    fn begin(&self, lower: &mut Lower, x: Value) -> Value {
        let lanes = self.replaced_by(lower, x);
        if !self.embed {
            return lanes;
        }
        let (dims, zero) = ([self.lane(lower), lower.hidden()], Some(Init::Constant(0.0)));
        let e = lower.weight(Owner::Stream, part::EMBEDDING, &dims, TensorKind::Steady, zero);
        lower.b.add(lanes, e)
    }

    fn replaced_by(&self, lower: &mut Lower, x: Value) -> Value {
        self.join(lower, &vec![x; self.count as usize])
    }

    fn layer(&self, lower: &mut Lower, x: Value, expr: &Expr) -> Result<Value, CompileError> {
        let mut lanes = self.split(lower, x);
        let (mut j, mut norms) = (0, 0);
        for unit in units(expr) {
            if *unit == Expr::Norm {
                let normed = lanes.iter().map(|&x| lower.norm(x, Owner::Norm(norms), super::part::GAIN, 1));
                lanes = normed.collect();
                norms += 1;
                continue;
            }
            let around = self.around(lower, j, &lanes);
            j += 1;
            let read = weighted(lower, &around.alpha, &lanes);
            let output = lower.expr(unit, read)?;
            let next = around.mix.iter().zip(&around.beta).map(|(mix, &beta)| {
                let mixed = weighted(lower, mix, &lanes);
                let own = lower.b.mul(output, beta);
                lower.b.add(mixed, own)
            });
            lanes = next.collect();
        }
        Ok(self.join(lower, &lanes))
    }

    fn end(&self, lower: &mut Lower, x: Value) -> Value {
        if self.kind != LaneKind::Mhc {
            let lane = self.lane(lower);
            return lower.b.reduce(Reduce::Sum, x, &[lane]);
        }
        let n = self.lane(lower);
        let z = self.product(lower, Owner::Output, part::LAST, x, n);
        let scale = lower.number(Owner::Output, part::LAST_SCALE, Init::Constant(SCALE));
        let bias = self.vector(lower, Owner::Output, part::LAST_BIAS, n, Init::Constant(0.0));
        let alpha = sigmoid(lower, z, scale, bias);
        let alpha = plus(lower, alpha, LEAST);
        let alpha = self.numbers(lower, alpha);
        let lanes = self.split(lower, x);
        weighted(lower, &alpha, &lanes)
    }
}

/// `Σ_i w_i x_i`
fn weighted(lower: &mut Lower, weights: &[Value], of: &[Value]) -> Value {
    let terms: Vec<Value> = weights.iter().zip(of).map(|(&w, &x)| lower.b.mul(x, w)).collect();
    let sum = terms.into_iter().reduce(|a, c| lower.b.add(a, c));
    sum.unwrap_or_else(|| lower.b.constant(0.0))
}

fn plus(lower: &mut Lower, x: Value, c: f64) -> Value {
    let c = lower.b.constant(c);
    lower.b.add(x, c)
}

/// `sigmoid(scale · z + bias)`
fn sigmoid(lower: &mut Lower, z: Value, scale: Value, bias: Value) -> Value {
    let z = lower.b.mul(z, scale);
    let z = lower.b.add(z, bias);
    lower.b.unary(Unary::Sigmoid, z)
}

impl Lanes {
    fn lane(&self, lower: &mut Lower) -> Dim {
        lower.dim("lane", self.count)
    }

    fn to(&self, lower: &mut Lower) -> Dim {
        lower.dim("lane_to", self.count)
    }

    fn pairs(&self, lower: &mut Lower) -> Dim {
        lower.dim("lane_pairs", self.count * self.count)
    }

    /// All lanes side by side, without mixing their rows with those of tokens.
    fn wide(&self, lower: &mut Lower, x: Value) -> Value {
        let hidden = lower.hidden();
        let size = lower.b.module.size(hidden);
        let wide = lower.dim("lanes", self.count * size);
        let dims = [&lower.b.dims(x)[..2], &[wide]].concat();
        lower.b.reshape(x, &dims)
    }

    fn split(&self, lower: &mut Lower, x: Value) -> Vec<Value> {
        let (wide, hidden) = (self.wide(lower, x), lower.hidden());
        let mut parts = lower.b.ops(Split(smallvec![hidden; self.count as usize]), &[wide]);
        parts.truncate(self.count as usize);
        parts
    }

    fn join(&self, lower: &mut Lower, lanes: &[Value]) -> Value {
        let (lane, hidden) = (self.lane(lower), lower.hidden());
        let size = lower.b.module.size(hidden);
        let wide = lower.dim("lanes", self.count * size);
        let rows = lower.b.rows(lanes[0]);
        let joined = lower.b.op(Concat(wide), lanes);
        lower.b.reshape(joined, &[&rows[..], &[lane, hidden]].concat())
    }

    /// The numbers of the last dimension, each a value of the rows.
    fn numbers(&self, lower: &mut Lower, x: Value) -> Vec<Value> {
        let (one, rows) = (lower.one(), lower.b.rows(x));
        let n = lower.b.dims(x).last().map_or(0, |&d| lower.b.module.size(d)) as usize;
        let mut parts = lower.b.ops(Split(smallvec![one; n]), &[x]);
        parts.truncate(n);
        parts.into_iter().map(|part| lower.b.reshape(part, &rows)).collect()
    }

    fn vector(&self, lower: &mut Lower, owner: Owner, part: Part, dim: Dim, init: Init) -> Value {
        lower.weight(owner, part, &[dim], TensorKind::Gain, Some(init))
    }

    /// Of `N²` numbers, those by which each lane is made.
    fn rows_of(&self, pairs: Vec<Value>) -> Vec<Vec<Value>> {
        pairs.chunks(self.count as usize).map(<[Value]>::to_vec).collect()
    }

    fn around(&self, lower: &mut Lower, unit: u64, lanes: &[Value]) -> Around {
        let owner = Owner::Lanes(unit as u32);
        match self.kind {
            LaneKind::Static => self.weights(lower, owner, unit),
            LaneKind::Dynamic => self.dynamic(lower, owner, unit, lanes),
            LaneKind::Mhc => self.manifold(lower, owner, lanes),
        }
    }

    fn weights(&self, lower: &mut Lower, owner: Owner, unit: u64) -> Around {
        let (lane, to, pairs) = (self.lane(lower), self.to(lower), self.pairs(lower));
        let (kind, columns) = (TensorKind::Gain, self.count);
        let pick = Init::Pick { place: unit, step: 0, columns };
        let alpha = lower.weight_each(owner, part::ALPHA, &[lane], kind, pick);
        let beta = lower.weight_each(owner, part::BETA, &[lane], kind, Init::Constant(1.0));
        let identity = Init::Identity { columns, from: 0 };
        let mix = lower.weight_each(owner, part::MIX, &[to, lane], kind, identity);
        let mix = lower.b.reshape(mix, &[pairs]);
        Around {
            alpha: self.numbers(lower, alpha),
            beta: self.numbers(lower, beta),
            mix: {
                let pairs = self.numbers(lower, mix);
                self.rows_of(pairs)
            },
        }
    }

    /// Weights, and `s · tanh(RMSNorm(X_j) W)` of the lane that is read or written.
    fn dynamic(&self, lower: &mut Lower, owner: Owner, unit: u64, lanes: &[Value]) -> Around {
        let fixed = self.weights(lower, owner, unit);
        let (to, hidden) = (self.to(lower), lower.hidden());
        let alpha = self.vector(lower, owner, part::ALPHA_WEIGHT, hidden, Init::Constant(0.0));
        let beta = self.vector(lower, owner, part::BETA_WEIGHT, hidden, Init::Constant(0.0));
        let init = Some(Init::Constant(0.0));
        let mix = lower.weight(owner, part::MIX_WEIGHT, &[hidden, to], TensorKind::Matrix, init);
        let scale = lower.number(owner, part::ALPHA_SCALE, Init::Constant(SCALE));
        let beta_scale = lower.number(owner, part::BETA_SCALE, Init::Constant(SCALE));
        let normed: Vec<Value> = lanes.iter().map(|&x| lower.norm(x, owner, part::NORM, 1)).collect();
        let all = self.join(lower, &normed);
        // `[b, t, from, to]`
        let product = lower.b.contract(all, mix, &[hidden]);
        let pairs = self.pairs(lower);
        let dims = [&lower.b.dims(all)[..2], &[pairs]].concat();
        let product = lower.b.reshape(product, &dims);
        let moved = self.numbers(lower, product);
        let add = |lower: &mut Lower, fixed: Value, z: Value, scale: Value| {
            let z = lower.b.unary(Unary::Tanh, z);
            let z = lower.b.mul(z, scale);
            lower.b.add(z, fixed)
        };
        let each = |lower: &mut Lower, fixed: &[Value], w: Value, scale: Value| -> Vec<Value> {
            let pairs = normed.iter().zip(fixed);
            let numbers = pairs.map(|(&n, &fixed)| {
                let z = lower.b.mul(n, w);
                let z = lower.b.reduce(Reduce::Sum, z, &[hidden]);
                add(lower, fixed, z, scale)
            });
            numbers.collect()
        };
        let alpha = each(lower, &fixed.alpha, alpha, scale);
        let beta = each(lower, &fixed.beta, beta, beta_scale);
        let n = self.count as usize;
        let mix = fixed.mix.iter().enumerate().map(|(i, row)| {
            row.iter().enumerate().map(|(j, &fixed)| add(lower, fixed, moved[j * n + i], scale)).collect()
        });
        let mix = mix.collect();
        Around { alpha, beta, mix }
    }

    /// `W · RMSNorm(flatten X)`, the norm without gain.
    fn product(&self, lower: &mut Lower, owner: Owner, part: Part, x: Value, out: Dim) -> Value {
        let wide = self.wide(lower, x);
        let eps = lower.eps();
        let n = lower.b.op(Rms { inner: 1, eps }, &[wide]);
        let over = lower.b.dims(wide)[2];
        let w = lower.weight(owner, part, &[out, over], TensorKind::Matrix, None);
        lower.b.contract(n, w, &[over])
    }

    /// Functions of the lanes, the mixing matrix doubly stochastic.
    fn manifold(&self, lower: &mut Lower, owner: Owner, lanes: &[Value]) -> Around {
        let (lane, to, pairs) = (self.lane(lower), self.to(lower), self.pairs(lower));
        let all = lower.dim("lane_all", 2 * self.count + self.count * self.count);
        let x = self.join(lower, lanes);
        let z = self.product(lower, owner, part::TABLE, x, all);
        let three = lower.dim("lane_scales", 3);
        let scale = self.vector(lower, owner, part::SCALE, three, Init::Constant(SCALE));
        let scale = self.numbers(lower, scale);
        let bias = self.vector(lower, owner, part::BIAS, all, Init::Constant(0.0));
        let parts = Split(smallvec![lane, lane, pairs]);
        let z = lower.b.ops(parts.clone(), &[z]);
        let bias = lower.b.ops(parts, &[bias]);
        let alpha = sigmoid(lower, z[0], scale[0], bias[0]);
        let alpha = plus(lower, alpha, LEAST);
        let beta = sigmoid(lower, z[1], scale[1], bias[1]);
        let beta = lower.b.scale(beta, 2.0);
        let mix = lower.b.mul(z[2], scale[2]);
        let mix = lower.b.add(mix, bias[2]);
        let rows = lower.b.rows(mix);
        // Rows are lanes that are read, columns those that are written.
        let mix = lower.b.reshape(mix, &[&rows[..], &[lane, to]].concat());
        let mix = lower.b.op(Op::Softmax, &[mix]);
        let mut mix = plus(lower, mix, LEAST);
        let mut over = |lower: &mut Lower, dim: Dim| {
            let sum = lower.b.reduce(Reduce::Sum, mix, &[dim]);
            let sum = plus(lower, sum, LEAST);
            mix = lower.b.div(mix, sum);
        };
        over(lower, lane);
        for _ in 1..ITERATIONS {
            over(lower, to);
            over(lower, lane);
        }
        let mix = lower.b.reshape(mix, &[&rows[..], &[pairs]].concat());
        let moved = self.rows_of(self.numbers(lower, mix));
        let n = self.count as usize;
        let mix = (0..n).map(|to| moved.iter().map(|from| from[to]).collect()).collect();
        Around { alpha: self.numbers(lower, alpha), beta: self.numbers(lower, beta), mix }
    }
}

/// The type of a stream of lanes.
pub(crate) fn lane_type(lower: &mut Lower, rows: &[Dim], count: u64) -> Type {
    let dims = [lower.dim("lane", count), lower.hidden()];
    Type::f32(&[rows, &dims].concat())
}
