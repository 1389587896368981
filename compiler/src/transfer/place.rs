//! The place of a weight in the graph: what it is a factor of, read off the first operation that
//! brings it together with something that is made of tokens.
//!
//! *In*: the functions of a lowered model. *Out*: [`Use`]. *Promise*: nothing is decided by the
//! name of a weight or of a dimension; what carries numbers along (reshapes, casts, sums with other
//! weights, products of two weights) is followed.

use crate::ir::{Binary, Binding, Dim, Dims, Function, Node, Op, Value};
use smallvec::smallvec;

/// The use of a weight where it meets tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Use {
    /// A row of it is looked up.
    Lookup {
        /// Dimensions of a row.
        each: Dims,
    },
    /// Sums of products.
    Product {
        /// Its dimensions that are summed over.
        over: Dims,
        /// Those with one such sum for each element.
        each: Dims,
        /// Whether a norm follows, which cancels the size of these sums.
        normed: bool,
    },
    /// Numbers that multiply, element by element.
    Factor,
    /// Numbers that are added.
    Term,
    /// A filter over a few tokens, of each channel.
    Taps,
    /// An operation for which no rule is known.
    Unknown(&'static str),
    /// Nothing reads it.
    Unread,
}

/// The use of the weight of that name; `one` says whether it begins as a factor of 1.
pub(crate) fn of<'f>(functions: impl Iterator<Item = &'f Function>, name: &str, one: bool) -> Use {
    let mut found = Use::Unread;
    for f in functions {
        let weight = |p: &crate::ir::Port| p.name == name && is_weight(p.binding);
        let Some(at) = f.params.iter().position(weight) else { continue };
        let walk = Walk { f, readers: f.readers(), still: still(f) };
        found = walk.from(Value(at as u32), &[], one);
        if found != Use::Unread {
            break;
        }
    }
    found
}

fn is_weight(binding: Binding) -> bool {
    matches!(binding, Binding::Weight | Binding::PassWeight | Binding::TurnWeight | Binding::Buffer)
}

/// Which values are made of weights and numbers alone.
pub(super) fn still(f: &Function) -> Vec<bool> {
    let mut still: Vec<bool> = f.params.iter().map(|p| is_weight(p.binding)).collect();
    still.resize(f.types.len(), false);
    for node in &f.nodes {
        let alone = node.inputs.iter().all(|v| still[v.index()]);
        node.results().for_each(|v| still[v.index()] = alone);
    }
    still
}

struct Walk<'f> {
    f: &'f Function,
    readers: Vec<Vec<usize>>,
    still: Vec<bool>,
}

impl Walk<'_> {
    /// The use of a value that is made of weights alone; `inner` has been summed over in products
    /// with others. Where it is `one`, it is about 1.
    fn from(&self, v: Value, inner: &[Dim], one: bool) -> Use {
        let mut found = Use::Unread;
        for &at in &self.readers[v.index()] {
            let own = self.by(at, v, inner, one);
            match own {
                Use::Unread => {}
                Use::Unknown(_) => found = own,
                Use::Lookup { .. } | Use::Product { .. } | Use::Factor | Use::Term | Use::Taps => return own,
            }
        }
        found
    }

    /// The use of a value by one node.
    fn by(&self, at: usize, v: Value, inner: &[Dim], one: bool) -> Use {
        let node = &self.f.nodes[at];
        let dims = &self.f.ty(v).dims;
        let on = |inner: &[Dim]| {
            let all = node.results().map(|r| self.from(r, inner, one));
            all.into_iter().find(|u| *u != Use::Unread).unwrap_or(Use::Unread)
        };
        let others_still = node.inputs.iter().all(|i| self.still[i.index()]);
        let product = |over: &[Dim], each: Dims| {
            let summed: Dims = dims.iter().copied().filter(|d| over.contains(d)).collect();
            let summed = if summed.is_empty() { Dims::from_slice(inner) } else { summed };
            Use::Product { over: summed, each, normed: self.normed(node.first) }
        };
        let without = |over: &[Dim]| self.f.ty(v).without(over);
        match &node.op {
            Op::Unary(_)
            | Op::StopGradient
            | Op::Cast(_)
            | Op::Reduce(_)
            | Op::Rms(_)
            | Op::Softmax
            | Op::Reshape(_)
            | Op::Split(_)
            | Op::Concat(_)
            | Op::Arrange(_)
            | Op::Shift(_) => on(inner),
            // A gain of another weight is one of what that makes.
            Op::Binary(Binary::Mul) if others_still && one => Use::Factor,
            Op::Binary(Binary::Add) if others_still && self.adds_a_number(node) => {
                self.from(node.first, inner, true)
            }
            Op::Binary(_) if others_still => on(inner),
            Op::Binary(Binary::Add | Binary::Sub) => Use::Term,
            Op::Binary(Binary::Mul | Binary::Div | Binary::Max | Binary::Where) => Use::Factor,
            // Of two weights: the dimensions that are left meet tokens later.
            Op::Contract(c) if others_still => on(&[inner, &c.over].concat()),
            Op::Contract(c) => product(&c.over, without(&c.over)),
            Op::Grouped(g) => {
                product(&[g.over], dims.iter().copied().skip(1).filter(|d| *d != g.over).collect())
            }
            Op::ByHead(b) => {
                product(&[b.over], dims.iter().copied().skip(1).filter(|d| *d != b.over).collect())
            }
            Op::HeadLoss(_) => product(&dims[1..], dims[..1].into()),
            Op::ReadSources(_) => product(dims, smallvec![]),
            Op::Embed | Op::Pick => Use::Lookup { each: dims.iter().copied().skip(1).collect() },
            Op::Conv(_) => Use::Taps,
            // Sinks, balancing biases, and numbers of decay.
            Op::Attention(_) | Op::DepthAttention(_) | Op::Route(_) => Use::Term,
            Op::LinearAttention(_) | Op::Recurrence(_) | Op::Running(_) => Use::Factor,
            Op::Constant(_)
            | Op::RmsGrad(_)
            | Op::SoftmaxGrad
            | Op::Rope(_)
            | Op::Zeros(_)
            | Op::GroupedOuter(_)
            | Op::Group(_)
            | Op::RoundGroups(_)
            | Op::PickGrad(_)
            | Op::Gather
            | Op::Combine
            | Op::CombineGrad
            | Op::CombineGates
            | Op::AddCounts
            | Op::ChooseKeys(_)
            | Op::KeyMass(_)
            | Op::KeyScores(_)
            | Op::KeyScoresGrad(_)
            | Op::TopTokens(_)
            | Op::TakeTokens
            | Op::PutTokens(_)
            | Op::Decide(_)
            | Op::Keep
            | Op::KeepInts(_)
            | Op::Numbers
            | Op::Runs(_)
            | Op::Admit
            | Op::ConvGrad(_)
            | Op::RecurrenceGrad(_)
            | Op::LinearAttentionGrad(_)
            | Op::AttentionGrad(_)
            | Op::Number
            | Op::ReadSourcesGrad(_)
            | Op::CacheWrite
            | Op::Append
            | Op::CacheTake
            | Op::ShiftState
            | Op::Fp8(_)
            | Op::DepthAttentionGrad(_)
            | Op::EmbedGrad(_)
            | Op::CrossEntropy
            | Op::CrossEntropyGrad
            | Op::HeadLossGrad(_) => Use::Unknown(node.op.name()),
        }
    }

    /// Whether a sum is with a number that is written: `1 + w`.
    fn adds_a_number(&self, node: &Node) -> bool {
        let number = |v: &Value| {
            let made = self.f.nodes.iter().find(|n| n.results().any(|r| r == *v));
            made.is_some_and(|n| matches!(n.op, Op::Constant(_)))
        };
        node.inputs.iter().any(number)
    }

    /// Whether all that reads a value takes its norm away first.
    fn normed(&self, v: Value) -> bool {
        let readers = &self.readers[v.index()];
        let each = |&at: &usize| {
            let node = &self.f.nodes[at];
            let along = matches!(node.op, Op::Reshape(_) | Op::Cast(_) | Op::Arrange(_));
            matches!(node.op, Op::Rms(_)) || along && node.results().all(|r| self.normed(r))
        };
        !readers.is_empty() && readers.iter().all(each)
    }
}
