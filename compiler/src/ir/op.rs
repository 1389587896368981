//! The operations and their result types.
//!
//! Notation: `x[b, t, h]` is a value with those dimensions; `..` stands for any leading dimensions (the *rows*).
//! Every operation is a pure function of its operands; "state" operands are consumed and returned, which the schedule
//! turns into updates in place. Sums are over the named dimensions in increasing index order.

use super::Dim;

/// An element-wise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Unary {
    /// `-x`
    Neg,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `tanh x`
    Tanh,
    /// `x · sigmoid(x)`
    Silu,
    /// Derivative of `Silu`.
    SiluGrad,
    /// `x/2 · (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`
    Gelu,
    /// Derivative of `Gelu`.
    GeluGrad,
    /// `max(x, 0)`
    Relu,
    /// `ln(1 + e^x)`
    Softplus,
    /// `1 / sqrt(x)`
    Rsqrt,
    /// `sqrt(x)`
    Sqrt,
    /// `1 / x`
    Recip,
    /// `x²`
    Square,
    /// 1 where `x > 0`, else 0; no gradient.
    Positive,
}

/// An element-wise function of two operands. The operand that lacks a dimension of the other is broadcast along it; the
/// result has the dimensions of the operand that has them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// `max(a, b)`
    Max,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduce {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Largest; no gradient.
    Max,
}

/// Which position a rotation encodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Positions {
    /// `positions[b, t]` is the second operand.
    Tokens,
    /// `depth[]` and `depths[]` are the second and third operands. Pair `i` uses `depth`; where `half_reversed`, odd
    /// pairs use `depths - 1 - depth`.
    Depth {
        /// Whether odd pairs count backwards from the last depth.
        half_reversed: bool,
    },
}

/// A rotation: pairs `(i, i + d/2)` of the last dimension by `position · base^(-2i/d)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f64,
    /// Which position is encoded.
    pub positions: Positions,
    /// Llama 3's frequency scaling.
    pub scaling: Option<RopeScaling>,
    /// Rotates backwards: the transpose, for gradients.
    pub inverse: bool,
}

/// Llama 3's frequency scaling; see [`dreamc_dsl::spec::RopeScaling`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeScaling {
    /// Division of the low frequencies.
    pub factor: f64,
    /// Wavelengths above `original_context / low` are divided.
    pub low: f64,
    /// Wavelengths below `original_context / high` are kept.
    pub high: f64,
    /// Context the model was first trained with.
    pub original_context: f64,
}

impl Rope {
    /// Angle per position of pair `i` of `pairs`.
    pub fn frequency(&self, i: u64, pairs: u64) -> f64 {
        let f = self.base.powf(-(i as f64) / pairs as f64);
        let Some(s) = self.scaling else { return f };
        let wavelength = std::f64::consts::TAU / f;
        let ratio = s.original_context / wavelength;
        if ratio < s.low {
            f / s.factor
        } else if ratio > s.high {
            f
        } else {
            let smooth = (ratio - s.low) / (s.high - s.low);
            (1.0 - smooth) * f / s.factor + smooth * f
        }
    }
}

/// Which keys a query sees, before the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mask {
    /// Keys and queries are the same tokens in order: query `i` sees keys `j <= i`.
    Causal,
    /// Two more operands, `query_positions[b, t]` and `key_positions[b, s]`: the query sees keys of its position or
    /// earlier; a negative key position is no key.
    Positions,
}

/// An operation. Operands and results are listed in the comment of each.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    // --- element-wise -------------------------------------------------------------------------------------------
    /// `() -> f32[]`
    Constant(f64),
    /// `(x) -> x`
    Unary(Unary),
    /// `(a, b) -> a or b`, broadcasting by name.
    Binary(Binary),
    /// `(x) -> x` with the gradient stopped.
    StopGradient,
    /// `(x) -> x` stored as another type; values are rounded to nearest even.
    Cast(super::DType),

    // --- rows: reductions and rearrangements of the inner dimensions ----------------------------------------------
    /// `(x) -> x` without the dimensions.
    Reduce(Reduce, Vec<Dim>),
    /// `(x[.., d]) -> x · rsqrt(mean(x²) + eps)`; the mean is over the last dimension, or the last `inner` ones.
    Rms {
        /// How many trailing dimensions one norm covers.
        inner: usize,
        /// Added to the mean square.
        eps: f64,
    },
    /// `(x, dy) -> dx` of `Rms`.
    RmsGrad {
        /// As in `Rms`.
        inner: usize,
        /// As in `Rms`.
        eps: f64,
    },
    /// `(x[.., e]) -> softmax over the last dimension`.
    Softmax,
    /// `(y, dy) -> dx` of `Softmax`, `y` its result.
    SoftmaxGrad,
    /// `(x[.., d], position operands) -> x` rotated.
    Rope(Rope),
    /// `(x) -> x` with other dimensions of the same product, in row-major order.
    Reshape(Vec<Dim>),
    /// `(x[.., n]) -> x[.., n1], x[.., n2], …` cutting the last dimension.
    Split(Vec<Dim>),
    /// `(x[.., n1], x[.., n2], …) -> x[.., n]` joining the last dimension; the reverse of `Split`.
    Concat(Dim),
    /// `() -> f32` zeros of these dimensions.
    Zeros(Vec<Dim>),

    // --- products -------------------------------------------------------------------------------------------------
    /// `(a, b) -> f32 Σ_over a·b`; result dimensions are those of `a` without `over`, then those of `b` without `over`. The
    /// operands share exactly the dimensions `over`. All products take operands of one float type and give f32.
    Contract(Vec<Dim>),
    /// `(x[s, i], w[e, o, i], offsets[e1]) -> y[s, o]` where `over` is `i`, or `(x[s, o], w[e, o, i], offsets) -> y[s, i]`
    /// where it is `o`: rows `offsets[e]..offsets[e+1]` of `x` times matrix `e`. Rows beyond the last offset are zero.
    Grouped {
        /// The dimension summed over.
        over: Dim,
    },
    /// `(y[s, o], x[s, i], offsets[e1]) -> w[e, o, i]`: for each group the sum of outer products of its rows.
    GroupedOuter {
        /// The experts.
        experts: Dim,
    },

    // --- routing --------------------------------------------------------------------------------------------------
    /// `(z[.., e]) -> chosen i32[.., k]`: indices of the `k` largest, largest first, ties to the lowest index.
    Route {
        /// How many.
        k: Dim,
    },
    /// `(chosen[.., k]) -> order i32[slots], offsets i32[e1], inverse i32[.., k]`. Slots number the entries of `chosen` in
    /// row-major order; `order` lists them by expert (then by number), `offsets` says where each expert's begin, and
    /// `inverse` where each slot went. Choices of `experts` or more (no-ops) are in no group: they stand last in
    /// `order`, behind the last offset.
    Group {
        /// The experts.
        experts: Dim,
        /// Their number plus one.
        offsets: Dim,
        /// Product of the dimensions of `chosen`.
        slots: Dim,
    },
    /// `(table[.., e], chosen[.., k]) -> [.., k]`: the entries chosen.
    Pick,
    /// `(d[.., k], chosen[.., k]) -> [.., e]`: `d` at the chosen entries, zero elsewhere.
    PickGrad {
        /// The experts.
        experts: Dim,
    },
    /// `(x[.., h], order[slots]) -> [slots, h]`: row `order[s] / k` for slot `s`, `k` being slots per row.
    Gather,
    /// `(y[slots, h], inverse[.., k]) -> [.., h]`, or with `gates[.., k]` as third operand: `Σ_k gates · y[inverse]`.
    /// Slots in no group contribute nothing where `y`'s rows beyond the last offset are zero.
    Combine,
    /// `(d[.., h], order[slots], gates[.., k]) -> [slots, h]`: the gradient of `Combine` for `y`, `gates[order]·d[order/k]`.
    CombineGrad,
    /// `(d[.., h], y[slots, h], inverse[.., k]) -> [.., k]`: the gradient of `Combine` for the gates, `d·y[inverse]`.
    CombineGates,
    /// `(counts[e] f32, offsets[e1]) -> counts`: adds the size of every group.
    AddCounts,

    // --- tokens that skip -----------------------------------------------------------------------------------------
    // A *place* is a token's number in its sequence, from 0; a negative one stands for a token that takes no part.
    /// `(r[b, t]) -> index i32[b, k]`: the places of the `k` largest of each sequence, in increasing order of the places;
    /// ties go to the lowest place.
    TopTokens {
        /// How many.
        k: Dim,
    },
    /// `(x[b, t, ..], index i32[b, k]) -> x[b, k, ..]`: the rows at those places, which differ. Floats or integers.
    TakeTokens,
    /// `(x[b, k, ..], index i32[b, k]) -> x[b, t, ..]`: the rows put at those places, which differ; the reverse of
    /// `TakeTokens`. All other floats are -0, which changes no bit of what it is added to, all other integers -1.
    PutTokens {
        /// Tokens of a sequence.
        tokens: Dim,
    },
    /// `(z[b, t]) -> places i32[b, t]`: each token's own place where `z > 0`, or `z >= 0` where `inclusive`; -1 elsewhere.
    Decide {
        /// Whether 0 decides for the token.
        inclusive: bool,
    },
    /// `(x[b, t, ..], places i32[b, t]) -> x`: the rows of tokens that take part, bit for bit; all others are -0, whatever
    /// they were.
    Keep,
    /// `(x i32[b, t, ..], places i32[b, t]) -> x`: the rows of tokens that take part; all others are `otherwise`.
    KeepInts {
        /// What stands in the other rows.
        otherwise: i32,
    },
    /// `(places i32[b, t], documents i32[b, t]) -> runs i32[b, t]`: the number of the run that each token is in. A token that
    /// takes part begins a run, or ends one; so does a change of documents.
    Runs {
        /// Whether tokens that take part begin runs rather than end them.
        begins: bool,
    },
    /// `(cached i32[b, s], positions i32[b, t], places i32[b, t]) -> cached, slots i32[b, t]`: gives every token that takes
    /// part the next free entry of its sequence's cache and writes its position there. Free entries are negative and
    /// stand behind all others. `slots` is the entry, -1 for tokens that take no part. A cache with no free entry left is
    /// an error.
    Admit,

    // --- attention ------------------------------------------------------------------------------------------------
    /// `(q[b, t, H, d], k[b, s, G, d], v[b, s, G, d], mask operands) -> o[b, t, H, d], lse[b, t, H]`. Query head `i` reads
    /// key head `i / (H/G)`. A query that sees nothing gives zero, and -inf as `lse`.
    Attention(Attention),
    /// `(q, k, v, o, lse, do, mask operands) -> dq, dk, dv`.
    AttentionGrad(Attention),
    /// `(cache[D, ..], x[..], row[]) -> cache` with that row replaced.
    CacheWrite,
    /// `(cache[b, s, ..], x[b, t, ..], slots i32[b, t]) -> cache` with `x[b, i]` in place `slots[b, i]` of its sequence; a
    /// negative slot is not written. Slots of one sequence differ.
    Append,
    /// `(cache[D, ..], row[]) -> x[..], cache`: the row, and the cache with it set to zero; the reverse of `CacheWrite`.
    CacheTake,
    /// `(q[.., H, d], k[D, .., G, d], v[D, .., G, d], row[]) -> o[.., H, d]`: each position attends to rows `0..=row` of itself.
    /// A scaled score below [`ABSENT`] is that of a key which is not there: no soft-cap raises it.
    DepthAttention(Attention),
    /// `(q, k, v, row[], do, dk, dv) -> dq, dk, dv`: adds to the cotangents of the caches.
    DepthAttentionGrad(Attention),

    // --- ends -----------------------------------------------------------------------------------------------------
    /// `(table[V, h], ids[..]) -> [.., h]`.
    Embed,
    /// `(d[.., h], ids[..]) -> [V, h]`: the sum of the rows of each id.
    EmbedGrad {
        /// The vocabulary.
        vocab: Dim,
    },
    /// `(logits[.., V], targets[..]) -> nll[..], lse[..]`: `lse - logits[target]`. A negative target is no target: 0.
    CrossEntropy,
    /// `(logits, targets, lse, d[..]) -> dlogits`.
    CrossEntropyGrad,
    /// `(x[.., h], w[V, h], targets[..]) -> nll[..], lse[..]`: head, soft-cap and cross-entropy; the logits are never stored.
    HeadLoss {
        /// `c·tanh(z/c)` on the logits.
        softcap: Option<f64>,
    },
    /// `(x, w, targets, lse, d[..]) -> dx, dw`.
    HeadLossGrad {
        /// As in `HeadLoss`.
        softcap: Option<f64>,
    },
}

/// Scaled scores of depth attention below this are those of keys that are not there.
pub const ABSENT: f64 = -1e20;

/// What an attention does besides its operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Factor on `q·k`.
    pub scale: f64,
    /// `c·tanh(s/c)` on the scaled scores.
    pub softcap: Option<f64>,
    /// A query sees keys less than so many positions before it.
    pub window: Option<u64>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Whether the last operand is `segments[b, t]`: only keys of the query's own segment are seen.
    pub segments: bool,
}
