//! The table of rules. Each is directed, has a name, and says in a few lines which facts it needs
//! and what it makes of them.
//!
//! A rule looks at one e-node and gives pairs of classes that are equal, or nothing. It fires only
//! on proven facts: types, constants, which `group` an order comes from. No rule commutes or
//! reassociates sums, changes a dtype or a mask, or makes an operation with state or routing.
//! `tests.rs` proves each on random tensors and shows where it must refuse.

use super::language::{Graph, Operands, Source, Term};
use crate::ir::{Attention, Binary, Dim, Dims, Mask, Op, Reduce, Type, Unary, infer};
use crate::op::linear_attention::outside::{self, Place};
use crate::op::linear_attention::recognise;
use crate::op::{
    AttentionGrad, Concat, Constant, Contract, DepthAttention, DepthAttentionGrad, Group, Grouped,
    GroupedOuter, HeadLoss, LinearAttention, Recurrence, Reduction, Reshape, Rms, Rope, Route, Split, Tokens,
    TopTokens, Zeros,
};
use egg::Id;
use smallvec::smallvec;
use std::sync::Arc;

/// Where a rule may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Anywhere, before differentiation too: it keeps gradients as well as values.
    Differentiable,
    /// Only in functions that are not differentiated again, where `stop_gradient` means nothing any
    /// more.
    Final,
    /// Only in functions that have no derivative at all.
    Inference,
}

/// A rule.
#[derive(Debug)]
pub struct Rule {
    /// Its name, for `--only` and reports.
    pub name: &'static str,
    /// Its equation, in the notation of the paper.
    pub about: &'static str,
    /// The earliest stage at which it is sound.
    pub stage: Stage,
    /// The operations it looks at.
    pub at: fn(&Op) -> bool,
    /// Classes made equal by what such an e-node is: `(graph, its class, operation, operands)`.
    pub apply: fn(&mut Graph, Id, &Op, &[Id]) -> Option<Equal>,
}

/// A set of rules of [`RULES`], a bit each: those that look at an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Looks(u64);

const _: () = assert!(RULES.len() <= u64::BITS as usize);

impl Looks {
    /// The rules that look at `op`.
    pub fn at(op: &Op) -> Self {
        Looks(RULES.iter().enumerate().fold(0, |set, (n, rule)| set | u64::from((rule.at)(op)) << n))
    }

    /// The rules of either set.
    pub fn or(self, other: Self) -> Self {
        Looks(self.0 | other.0)
    }

    /// Whether the rule of that number is among them.
    pub fn has(self, n: usize) -> bool {
        self.0 >> n & 1 == 1
    }
}

/// Pairs of classes, each an old one and its equal.
pub type Equal = Vec<(Id, Id)>;

/// Sharing, which conversion into the e-graph does by itself.
pub const SHARE: &str = "share";

/// All rules.
pub const RULES: &[Rule] = &[
    Rule {
        name: "head-loss",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::CrossEntropy),
        apply: head_loss,
        about: "cross_entropy(cap(x·Wᵀ)) = head_loss(x, W): the logits are never stored",
    },
    Rule {
        name: "window",
        stage: Stage::Differentiable,
        at: |op| {
            matches!(
                op,
                Op::Attention(_) | Op::AttentionGrad(_) | Op::DepthAttention(_) | Op::DepthAttentionGrad(_)
            )
        },
        apply: window,
        about: "a window at least as long as the sequence is none",
    },
    Rule {
        name: "linear-attention",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Recurrence(_)),
        apply: linear_attention,
        about: "S_t = S_{t-1} (diag(α) + u·wᵀ) + v·kᵀ, o = S·q: a step that is linear in one state runs in chunks",
    },
    Rule {
        name: "depth-zero",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::DepthAttention(_)),
        apply: depth_zero,
        about: "depth attention at the first row is its value",
    },
    Rule {
        name: "norm-of-norm",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Rms(_)),
        apply: norm_of_norm,
        about: "rms(rms(x)) is one rms with another epsilon, times a number",
    },
    Rule {
        name: "norm-rotation",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Rms(_)),
        apply: norm_rotation,
        about: "rms(rope(x)) = rope(rms(x)): a rotation keeps lengths",
    },
    Rule {
        name: "one-expert",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Gather | Op::Grouped(_) | Op::Combine),
        apply: one_expert,
        about: "with one expert there is nothing to route: gather, grouped product and combine are dense",
    },
    Rule {
        name: ALL_EXPERTS,
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Combine),
        apply: all_experts,
        about: "every expert for every row is two dense products: nothing is chosen, Σ_e g_e·W2_e·f(W1_e·x)",
    },
    Rule {
        name: "all-tokens",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::TakeTokens | Op::PutTokens(_)),
        apply: all_tokens,
        about: "the top t of t tokens are all of them in order: nothing is taken or put (C = 1)",
    },
    Rule {
        name: "one-gate",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Softmax | Op::Binary(Binary::Div)),
        apply: one_gate,
        about: "a positive score normalised over itself, or a softmax over one, is 1",
    },
    Rule {
        name: "single",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Reduce(_) | Op::Arrange(_)),
        apply: single,
        about: "a sum over dimensions of one element, and an order that moves those alone, copies nothing",
    },
    Rule {
        name: "unit",
        stage: Stage::Differentiable,
        at: |op| matches!(op, Op::Binary(_) | Op::Combine),
        apply: unit,
        about: "x·1 = x, x + 0 = x, x·0 = 0: dead branches",
    },
    Rule {
        name: "stop-gradient",
        stage: Stage::Final,
        at: |op| matches!(op, Op::StopGradient),
        apply: stop_gradient,
        about: "a stopped gradient stops nothing where nothing is differentiated",
    },
    Rule {
        name: "factor",
        stage: Stage::Final,
        at: |op| matches!(op, Op::Binary(Binary::Add)),
        apply: factor,
        about: "a·s + b·s = (a + b)·s",
    },
    Rule {
        name: "merge-shared",
        stage: Stage::Final,
        at: |op| matches!(op, Op::Binary(Binary::Add)),
        apply: merge_shared,
        about: "W_e·x + W_shared·x = (W_e + W_shared)·x (Equations 7 and 8)",
    },
    Rule {
        name: "shared-gradient",
        stage: Stage::Final,
        at: |op| matches!(op, Op::GroupedOuter(_)),
        apply: shared_gradient,
        about: "the gradient of the shared expert is the sum of the experts' (Equation 8)",
    },
    Rule {
        name: "gate-gradient",
        stage: Stage::Final,
        at: |op| matches!(op, Op::CombineGates),
        apply: gate_gradient,
        about: "⟨d, W·a⟩ = ⟨Wᵀ·d, a⟩: gradients of gates need no outputs of experts, so none is kept (SonicMoE, 2512.14080)",
    },
    Rule {
        name: "fold-gain",
        stage: Stage::Final,
        at: |op| matches!(op, Op::Contract(_) | Op::Grouped(_)),
        apply: fold_gain,
        about: "W·(x ⊙ g) = (W ⊙ g)·x",
    },
    Rule {
        name: "fold-scale",
        stage: Stage::Final,
        at: |op| matches!(op, Op::Binary(Binary::Mul)),
        apply: fold_scale,
        about: "c·(W·x) = (c·W)·x",
    },
    Rule {
        name: "attention-scale",
        stage: Stage::Inference,
        at: |op| matches!(op, Op::Attention(_) | Op::DepthAttention(_)),
        apply: attention_scale,
        about: "the scale of attention goes into the gain of the queries",
    },
    Rule {
        name: "stack",
        stage: Stage::Inference,
        at: |op| matches!(op, Op::Contract(_)),
        apply: stack,
        about: "W_1·x, W_2·x, … are parts of one product with the matrices stacked",
    },
    Rule {
        name: "stack-experts",
        stage: Stage::Inference,
        at: |op| matches!(op, Op::Grouped(_)),
        apply: stack_experts,
        about: "the same for grouped products of the same slots",
    },
    Rule {
        name: "low-rank",
        stage: Stage::Final,
        at: |op| matches!(op, Op::Contract(_)),
        apply: low_rank,
        about: "B·(A·x) = (B·A)·x, whichever is cheaper",
    },
];

/// The rule of that name.
pub fn find(name: &str) -> Option<&'static Rule> {
    RULES.iter().find(|r| r.name == name)
}

// --- looking -------------------------------------------------------------------------------------

/// The operations of a class with attributes `P`, in order: attributes and operands.
fn each<'g, P: 'g>(g: &'g Graph, id: Id) -> impl Iterator<Item = (&'g P, &'g [Id])>
where
    &'g P: TryFrom<&'g Op>,
{
    operations(g, id).filter_map(|(op, x)| Some((<&P>::try_from(op).ok()?, x)))
}

/// The operations of a class, in order.
fn operations(g: &Graph, id: Id) -> impl Iterator<Item = (&Op, &[Id])> {
    g[id].nodes.iter().filter_map(|n| match n {
        Term::Op(o, x) => Some((&**o, &x[..])),
        Term::Param(..) | Term::Result(..) | Term::Return(_) => None,
    })
}

/// The operands of the first e-node of the class that is this operation.
fn operands<'g>(g: &'g Graph, id: Id, op: &Op) -> Option<&'g [Id]> {
    operations(g, id).find(|(o, _)| *o == op).map(|(_, x)| x)
}

/// The rows that the class gathers, and their order.
fn gathered(g: &Graph, id: Id) -> Option<(Id, Id)> {
    operands(g, id, &Op::Gather).map(|x| (x[0], x[1]))
}

/// The operands of a sum, product, … in the class.
fn binary(g: &Graph, id: Id, which: Binary) -> Option<(Id, Id)> {
    operands(g, id, &Op::Binary(which)).map(|x| (x[0], x[1]))
}

fn ty(g: &Graph, id: Id) -> Option<&Type> {
    g[id].data.types.first()
}

fn dims(g: &Graph, id: Id) -> Option<Dims> {
    ty(g, id).map(|t| t.dims.clone())
}

fn size(g: &Graph, d: Dim) -> u64 {
    g.analysis.module.size(d)
}

fn number(g: &Graph, id: Id) -> Option<f64> {
    g[id].data.constant
}

/// Whether it depends on weights and on nothing but weights.
fn is_weight(g: &Graph, id: Id) -> bool {
    g[id].data.source == Source::Weights
}

/// Whether it is a weight in blocks: another made of it would hold its numbers unpacked.
fn is_packed(g: &Graph, id: Id) -> bool {
    let packed = |name: &str| g.analysis.packed.iter().any(|own| own == name);
    g[id].nodes.iter().any(|term| matches!(term, Term::Param(_, name) if packed(name)))
}

fn is_data(g: &Graph, id: Id) -> bool {
    g[id].data.source == Source::Data
}

fn same(g: &Graph, a: Id, b: Id) -> bool {
    g.find(a) == g.find(b)
}

/// The operation on those operands, where it fits them.
fn make(g: &mut Graph, op: impl Into<Op>, inputs: &[Id]) -> Option<Id> {
    let op = op.into();
    let operands: Vec<&Type> = inputs.iter().filter_map(|&i| g[i].data.types.first()).collect();
    infer(&g.analysis.module, &op, &operands).ok()?;
    Some(g.add(Term::Op(Arc::new(op), Operands::from_slice(inputs))))
}

fn result(g: &mut Graph, k: u32, of: Id) -> Id {
    g.add(Term::Result(k, of))
}

/// A value with every element the same number.
fn filled(g: &mut Graph, dims: &[Dim], number: f64) -> Option<Id> {
    let zeros = make(g, Zeros(dims.into()), &[])?;
    if number == 0.0 {
        return Some(zeros);
    }
    let number = make(g, Constant(number), &[])?;
    make(g, Binary::Add, &[zeros, number])
}

/// Where slots come from.
struct Routed {
    /// The `group`, and what it groups.
    group: Id,
    chosen: Id,
    /// The dimension of experts.
    dim: Dim,
    /// Size of the dimension of experts.
    experts: u64,
    /// Choices for each row.
    k: u64,
    /// Whether every choice is of an expert that is there.
    complete: bool,
}

/// Facts of the `group` that all of these are results of: `(number of the result, value)`.
fn routed(g: &Graph, of: &[(u32, Id)]) -> Option<Routed> {
    let group = |k: u32, id: Id| {
        g[id].nodes.iter().find_map(|n| match n {
            Term::Result(j, x) if *j == k => Some(g.find(*x)),
            Term::Result(..) | Term::Param(..) | Term::Op(..) | Term::Return(_) => None,
        })
    };
    let &(k, id) = of.first()?;
    let made = group(k, id)?;
    if of.iter().any(|&(k, id)| group(k, id) != Some(made)) {
        return None;
    }
    let (&Group { experts: dim, .. }, x) = each(g, made).next()?;
    let chosen = x[0];
    let k = size(g, *dims(g, chosen)?.last()?);
    let candidates = each::<Route>(g, chosen).find_map(|(_, z)| dims(g, z[0])?.last().map(|&d| size(g, d)));
    let experts = size(g, dim);
    Some(Routed { group: made, chosen, dim, experts, k, complete: candidates.is_some_and(|c| c <= experts) })
}

/// E-nodes that use a class: the class of each, its operation and operands; in a fixed order.
fn users(g: &Graph, id: Id) -> Vec<(Id, Op, Vec<Id>)> {
    let mut all: Vec<(Id, Op, Vec<Id>)> = g[id]
        .parents()
        .filter_map(|p| match g.id_to_node(p) {
            Term::Op(o, x) => Some((g.find(p), Op::clone(o), x.iter().map(|&i| g.find(i)).collect())),
            Term::Param(..) | Term::Result(..) | Term::Return(_) => None,
        })
        .collect();
    all.sort_by(|a, b| (a.0, &a.2).cmp(&(b.0, &b.2)));
    all.dedup();
    all
}

// --- everywhere ----------------------------------------------------------------------------------

fn head_loss(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    if *op != Op::CrossEntropy {
        return None;
    }
    // cap(z) = c·tanh(z/c), as lowering writes it.
    let scaled = |id| {
        let (y, c) = binary(g, id, Binary::Mul)?;
        Some((y, number(g, c)?))
    };
    let capped = || {
        let (tanh, c) = scaled(x[0])?;
        let inner = operands(g, tanh, &Op::Unary(Unary::Tanh))?[0];
        let (z, r) = scaled(inner)?;
        (r == 1.0 / c).then_some((z, Some(c)))
    };
    let (logits, softcap) = capped().unwrap_or((x[0], None));
    let (h, w) = each(g, logits).find_map(|(Contract { over }, x)| {
        let (h, w) = (dims(g, x[0])?, dims(g, x[1])?);
        let plain = over.len() == 1 && w.len() == 2 && h.last() == over.last() && w.last() == over.last();
        plain.then(|| (x[0], x[1]))
    })?;
    let fused = make(g, HeadLoss { softcap }, &[h, w, x[1]])?;
    Some(vec![(id, fused)])
}

fn window(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    // Positions in a cache may be farther apart than there are keys.
    let useless = |a: &Attention, axis: usize| {
        let keys = size(g, *dims(g, x[1])?.get(axis)?);
        (a.mask == Mask::Causal && a.window? >= keys).then_some(Attention { window: None, ..a.clone() })
    };
    let mut plain = op.clone();
    if let Op::Attention(a) | Op::AttentionGrad(AttentionGrad(a)) = &mut plain {
        *a = useless(a, 1)?;
    } else if let Op::DepthAttention(DepthAttention(a)) | Op::DepthAttentionGrad(DepthAttentionGrad(a)) =
        &mut plain
    {
        *a = useless(a, 0)?;
    }
    let plain = make(g, plain, x)?;
    Some(vec![(id, plain)])
}

fn depth_zero(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let &Op::DepthAttention(_) = op else { return None };
    let rows = size(g, *dims(g, x[1])?.first()?);
    if rows != 1 && number(g, x[3]) != Some(0.0) {
        return None;
    }
    let (value, row) = operands(g, x[2], &Op::CacheWrite).map(|y| (y[1], y[2]))?;
    let (of_value, of_query) = (dims(g, value)?, dims(g, x[0])?);
    let heads = |d: &[Dim]| d.len().checked_sub(2).map(|i| size(g, d[i]));
    if !same(g, row, x[3]) || heads(&of_value) != heads(&of_query) {
        return None;
    }
    let o = if of_value == of_query { value } else { make(g, Reshape(of_query), &[value])? };
    Some(vec![(id, o)])
}

/// `rms_e(x) = x / sqrt(m + e)` has mean square `m / (m + e)`, so
/// `rms_f(rms_e(x)) = x / sqrt((1 + f)·m + e·f)`.
fn norm_of_norm(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let &Op::Rms(Rms { inner, eps: f }) = op else { return None };
    let (y, e) = each::<Rms>(g, x[0]).find(|(rms, _)| rms.inner == inner).map(|(rms, y)| (y[0], rms.eps))?;
    let norm = make(g, Rms { inner, eps: e * f / (1.0 + f) }, &[y])?;
    let c = make(g, Constant(1.0 / (1.0 + f).sqrt()), &[])?;
    let scaled = make(g, Binary::Mul, &[norm, c])?;
    Some(vec![(id, scaled)])
}

fn norm_rotation(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let Op::Rms(_) = op else { return None };
    let (rope, mut operands) = each::<Rope>(g, x[0]).next().map(|(rope, y)| (*rope, y.to_vec()))?;
    operands[0] = make(g, op.clone(), &[operands[0]])?;
    let rotated = make(g, rope, &operands)?;
    Some(vec![(id, rotated)])
}

fn one_expert(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let alone = |r: Routed| (r.experts == 1 && r.k == 1 && r.complete).then_some(());
    let to = dims(g, id)?;
    let dense = if *op == Op::Gather {
        alone(routed(g, &[(0, x[1])])?)?;
        make(g, Reshape(to), &[x[0]])?
    } else if let Op::Grouped(Grouped { over }) = op {
        alone(routed(g, &[(1, x[2])])?)?;
        let matrix = dims(g, x[1])?[1..].to_vec();
        let w = make(g, Reshape(matrix.into()), &[x[1]])?;
        make(g, Contract { over: smallvec![*over] }, &[x[0], w])?
    } else {
        alone(routed(g, &[(2, x[1])])?)?;
        let y = make(g, Reshape(to.clone()), &[x[0]])?;
        match x.get(2) {
            None => y,
            Some(&gates) => {
                let gates = make(g, Reshape(to[..to.len() - 1].into()), &[gates])?;
                make(g, Binary::Mul, &[y, gates])?
            }
        }
    };
    Some(vec![(id, dense)])
}

/// Most experts that are laid side by side: their second matrices are joined one by one.
const SIDE_BY_SIDE: u64 = 16;

fn all_experts(g: &mut Graph, id: Id, _: &Op, x: &[Id]) -> Option<Equal> {
    let r = routed(g, &[(2, x[1])])?;
    if r.experts < 2 || r.experts > SIDE_BY_SIDE || r.k != r.experts || !r.complete {
        return None;
    }
    let (over, slots, w, offsets) =
        each(g, x[0]).next().map(|(&Grouped { over }, y)| (over, y[0], y[1], y[2]))?;
    let [_, h, i] = dims(g, w)?[..] else { return None };
    if i != over || routed(g, &[(1, offsets)])?.group != r.group {
        return None;
    }
    let mut a = of_all(g, &r, slots, DEPTH)?;
    if !dims(g, a)?.ends_with(&[r.dim, i]) {
        return None;
    }
    if let Some(&gates) = x.get(2) {
        let gates = gates_of_all(g, &r, gates, DEPTH)?;
        a = make(g, Binary::Mul, &[a, gates])?;
    }
    // The second matrices side by side, `[h, e·i]`.
    let (one, all) = (size(g, h).checked_mul(size(g, i))?, r.experts.checked_mul(size(g, i))?);
    let (one, whole) = (fresh(g, one), fresh(g, one.checked_mul(r.experts)?));
    let all = fresh(g, all);
    let flat = make(g, Reshape(smallvec![whole]), &[w])?;
    let split = make(g, Split(smallvec![one; r.experts as usize]), &[flat])?;
    let mut matrices = vec![];
    for k in 0..r.experts as u32 {
        let matrix = result(g, k, split);
        matrices.push(make(g, Reshape(smallvec![h, i]), &[matrix])?);
    }
    let w = make(g, Concat(all), &matrices)?;
    let mut rows = dims(g, a)?;
    rows.truncate(rows.len() - 2);
    rows.push(all);
    let a = make(g, Reshape(rows), &[a])?;
    let y = make(g, Contract { over: smallvec![all] }, &[a, w])?;
    (ty(g, y) == ty(g, id)).then(|| vec![(id, y)])
}

fn all_tokens(g: &mut Graph, id: Id, _: &Op, x: &[Id]) -> Option<Equal> {
    // Places in increasing order, as many as there are tokens.
    let whole = |k: Dim, r: Id| Some(size(g, k) == size(g, *dims(g, r)?.get(1)?));
    each(g, x[1]).find(|(TopTokens { k }, r)| whole(*k, r[0]) == Some(true))?;
    let to = dims(g, id)?;
    let all = if dims(g, x[0])? == to { x[0] } else { make(g, Reshape(to), &[x[0]])? };
    Some(vec![(id, all)])
}

/// The rule that makes dense products of the experts of a mixture.
pub(super) const ALL_EXPERTS: &str = "all-experts";

/// How far back `all_experts` looks.
const DEPTH: usize = 12;

/// The operations of a class and their operands, to make others of.
fn copies(g: &Graph, id: Id) -> Vec<(Op, Vec<Id>)> {
    operations(g, id).map(|(op, x)| (op.clone(), x.to_vec())).collect()
}

/// The values of slots, for every row and expert: `[slots, ..]` as `[.., e, ..]`, or as rows where
/// experts do not differ.
fn of_all(g: &mut Graph, r: &Routed, id: Id, depth: usize) -> Option<Id> {
    let slots = *dims(g, id)?.first()?;
    copies(g, id).into_iter().filter(|_| depth > 0).find_map(|(op, x)| {
        if op == Op::Gather {
            return (routed(g, &[(0, x[1])])?.group == r.group).then(|| x[0]);
        }
        if let Op::Grouped(Grouped { over }) = op {
            let same_groups = routed(g, &[(1, x[2])])?.group == r.group;
            let rows = of_all(g, r, x[0], depth - 1)?;
            let direct = dims(g, rows)?.last() == Some(&over) && dims(g, x[1])?.last() == Some(&over);
            return (same_groups && direct)
                .then(|| make(g, Contract { over: smallvec![over] }, &[rows, x[1]]))?;
        }
        let mut operands = vec![];
        for &y in x.iter().filter(|_| is_element_wise(&op)) {
            let many = dims(g, y)?.contains(&slots);
            operands.push(if many { of_all(g, r, y, depth - 1)? } else { y });
        }
        is_element_wise(&op).then(|| make(g, op, &operands))?
    })
}

/// Whether an operation looks at one element at a time and stores it as it was.
fn is_element_wise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::StopGradient)
}

/// Gates of the chosen experts, `[.., k]`, for all experts in their order, `[.., e]`; and what is
/// summed of them over `k`.
fn gates_of_all(g: &mut Graph, r: &Routed, id: Id, depth: usize) -> Option<Id> {
    let k = *dims(g, r.chosen)?.last()?;
    copies(g, id).into_iter().filter(|_| depth > 0).find_map(|(op, x)| {
        if op == Op::Pick {
            return (same(g, x[1], r.chosen) && dims(g, x[0])?.last() == Some(&r.dim)).then(|| x[0]);
        }
        if let Op::Reduce(Reduction { how, over }) = &op {
            let all = if **over == [k] { gates_of_all(g, r, x[0], depth - 1)? } else { return None };
            return make(g, Reduction { how: *how, over: smallvec![r.dim] }, &[all]);
        }
        let mut operands = vec![];
        for &y in x.iter().filter(|_| is_element_wise(&op)) {
            let number = dims(g, y)?.is_empty();
            operands.push(if number { y } else { gates_of_all(g, r, y, depth - 1)? });
        }
        is_element_wise(&op).then(|| make(g, op, &operands))?
    })
}

fn one_gate(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let all = dims(g, id)?;
    let one = |d: &Dim| size(g, *d) == 1;
    if *op == Op::Softmax {
        all.last().filter(|d| one(d))?;
    } else {
        let summed = |r: &Reduction| r.how == Reduce::Sum && r.over.iter().all(one);
        let of = each(g, x[1]).find(|(r, _)| summed(r)).map(|(_, y)| y[0])?;
        // A sigmoid is positive: it is not divided by zero.
        operands(g, of, &Op::Unary(Unary::Sigmoid))?;
        if !same(g, of, x[0]) {
            return None;
        }
    }
    let ones = filled(g, &all, 1.0)?;
    Some(vec![(id, ones)])
}

fn single(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let (from, to) = (dims(g, x[0])?, dims(g, id)?);
    // Two dimensions of rows stay in front: row kernels go by them.
    if to.len() < 2 || from.get(..2) != to.get(..2) {
        return None;
    }
    let one = |d: &&Dim| size(g, **d) == 1;
    let moves = match op {
        Op::Reduce(r) => !r.over.iter().all(|d| one(&d)),
        Op::Arrange(_) => !from.iter().filter(|d| !one(d)).eq(to.iter().filter(|d| !one(d))),
        _ => true,
    };
    if moves {
        return None;
    }
    let same = make(g, Reshape(to), &[x[0]])?;
    Some(vec![(id, same)])
}

fn unit(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let Op::Binary(which) = op else {
        // Gates that are all 1 do not gate.
        let (Op::Combine, Some(&gates)) = (op, x.get(2)) else { return None };
        let plain = (number(g, gates) == Some(1.0)).then(|| make(g, Op::Combine, &x[..2]))??;
        return Some(vec![(id, plain)]);
    };
    for (a, b) in [(x[0], x[1]), (x[1], x[0])] {
        let kept = ty(g, a) == ty(g, id);
        let equal = match (which, number(g, b)) {
            (Binary::Mul, Some(1.0)) | (Binary::Add, Some(0.0)) if kept => a,
            (Binary::Mul, Some(0.0)) => {
                let all = dims(g, id)?;
                make(g, Zeros(all), &[])?
            }
            _ => continue,
        };
        // Zeros are f32.
        return (ty(g, equal) == ty(g, id)).then(|| vec![(id, equal)]);
    }
    None
}

// --- what is not differentiated again ------------------------------------------------------------

fn stop_gradient(_: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    (*op == Op::StopGradient).then(|| vec![(id, x[0])])
}

fn factor(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    if *op != Op::Binary(Binary::Add) || ty(g, x[0]) != ty(g, x[1]) {
        return None;
    }
    let ((a, s), (b, t)) = (binary(g, x[0], Binary::Mul)?, binary(g, x[1], Binary::Mul)?);
    if !same(g, s, t) || ty(g, a) != ty(g, b) {
        return None;
    }
    let sum = make(g, Binary::Add, &[a, b])?;
    let product = make(g, Binary::Mul, &[sum, s])?;
    Some(vec![(id, product)])
}

fn merge_shared(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    if *op != Op::Binary(Binary::Add) {
        return None;
    }
    [(x[0], x[1]), (x[1], x[0])].into_iter().find_map(|(routed_part, shared_part)| {
        let (y, inverse) = operations(g, routed_part)
            .find(|(op, y)| **op == Op::Combine && y.len() == 2)
            .map(|(_, y)| (y[0], y[1]))?;
        let (over, slots, w, offsets) =
            each(g, y).next().map(|(&Grouped { over }, y)| (over, y[0], y[1], y[2]))?;
        let (input, order) = gathered(g, slots)?;
        let shared = |(c, y): &(&Contract, &[Id])| c.over[..] == [over] && same(g, y[0], input);
        let shared = each(g, shared_part).find(shared).map(|(_, y)| y[1])?;
        // A row in no group has nothing of its expert, but would still have the shared one.
        let r = routed(g, &[(0, order), (1, offsets), (2, inverse)])?;
        if r.k != 1 || !r.complete || dims(g, w)?[1..] != dims(g, shared)?[..] {
            return None;
        }
        let sum = make(g, Binary::Add, &[w, shared])?;
        let y = make(g, Grouped { over }, &[slots, sum, offsets])?;
        let merged = make(g, Op::Combine, &[y, inverse])?;
        Some(vec![(id, merged)])
    })
}

fn shared_gradient(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let &Op::GroupedOuter(GroupedOuter { experts }) = op else { return None };
    let ((d, order), (n, other)) = (gathered(g, x[0])?, gathered(g, x[1])?);
    let r = routed(g, &[(0, order), (0, other), (1, x[2])])?;
    if r.k != 1 || !r.complete {
        return None;
    }
    let rows = dims(g, d)?;
    let rows = rows[..rows.len() - 1].to_vec();
    let whole = Term::Op(
        Arc::new(Op::Contract(Contract { over: rows.into() })),
        Operands::from_slice(&[g.find(d), g.find(n)]),
    );
    let whole = g.lookup(whole)?;
    let sum = make(g, Reduction { how: Reduce::Sum, over: smallvec![experts] }, &[id])?;
    (ty(g, sum) == ty(g, whole)).then(|| vec![(whole, sum)])
}

/// With `u = Wᵀ·d` of each slot, before its gate `s`: the gate's gradient is `⟨u, a⟩`, that of `a`
/// is `s·u`, and that of `W` is `d ⊗ (s·a)`. Rows of slots in no group are zero in `u`, as in
/// `W·a`.
fn gate_gradient(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    if *op != Op::CombineGates {
        return None;
    }
    let (d, inverse) = (x[0], x[2]);
    let grouped = each(g, x[1]).next().map(|(&Grouped { over }, y)| (over, y[0], y[1], y[2]));
    let (inner, a, w, offsets) = grouped?;
    let r = routed(g, &[(1, offsets), (2, inverse)])?;
    let [_, outer, last] = dims(g, w)?[..] else { return None };
    if last != inner || !is_weight(g, w) {
        return None;
    }
    let order = result(g, 0, r.group);
    let slots = *dims(g, a)?.first()?;
    let one = fresh(g, 1);
    let rows = make(g, Op::Gather, &[d, order])?;
    let u = make(g, Grouped { over: outer }, &[rows, w, offsets])?;
    // A number of each slot, and of each choice.
    let product = make(g, Binary::Mul, &[u, a])?;
    let sums = make(g, Reduction { how: Reduce::Sum, over: smallvec![inner] }, &[product])?;
    let sums = make(g, Reshape(smallvec![slots, one]), &[sums])?;
    let places = make(g, Reshape(smallvec![slots]), &[inverse])?;
    let chosen = make(g, Op::Gather, &[sums, places])?;
    let to = dims(g, id)?;
    let gradient = make(g, Reshape(to), &[chosen])?;
    let mut equal = vec![(id, gradient)];
    for (gated, of, y) in users(g, g.find(d)) {
        if of != Op::CombineGrad || !same(g, y[0], d) || !same(g, y[1], order) {
            continue;
        }
        let gates = make(g, Reshape(smallvec![slots, one]), &[y[2]])?;
        let gates = make(g, Op::Gather, &[gates, order])?;
        let gates = make(g, Reshape(smallvec![slots]), &[gates])?;
        for (class, of, y) in users(g, gated) {
            let gated_first = same(g, y[0], gated);
            if of == Op::Grouped(Grouped { over: outer }) && gated_first && same(g, y[1], w) {
                equal.push((class, make(g, Binary::Mul, &[u, gates])?));
            } else if matches!(of, Op::GroupedOuter(_)) && gated_first && same(g, y[2], offsets) {
                let inputs = make(g, Binary::Mul, &[y[1], gates])?;
                equal.push((class, make(g, of, &[rows, inputs, offsets])?));
            }
        }
    }
    let fits = equal.iter().all(|&(old, new)| ty(g, old) == ty(g, new));
    fits.then_some(equal)
}

fn fold_gain(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let over = op.dims();
    let &[over] = &over[..] else { return None };
    if !is_weight(g, x[1]) {
        return None;
    }
    // The gain may stand after a gather of rows, which does not touch it.
    let gather = gathered(g, x[0]);
    let (y, gain) = binary(g, gather.map_or(x[0], |(y, _)| y), Binary::Mul)?;
    if !is_data(g, y) || !is_weight(g, gain) || dims(g, gain)?[..] != [over] {
        return None;
    }
    let w = make(g, Binary::Mul, &[x[1], gain])?;
    let y = match gather {
        Some((_, order)) => make(g, Op::Gather, &[y, order])?,
        None => y,
    };
    let folded = make(g, op.clone(), &[&[y, w], &x[2..]].concat())?;
    Some(vec![(id, folded)])
}

fn fold_scale(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    if *op != Op::Binary(Binary::Mul) || number(g, x[1]).is_none() || !dims(g, x[1])?.is_empty() {
        return None;
    }
    let applied = |(_, y): &(&Contract, &[Id])| is_weight(g, y[1]) && is_data(g, y[0]);
    let (product, y, w) = each(g, x[0]).find(applied).map(|(c, y)| (c.clone(), y[0], y[1]))?;
    let w = make(g, Binary::Mul, &[w, x[1]])?;
    let scaled = make(g, product, &[y, w])?;
    Some(vec![(id, scaled)])
}

fn attention_scale(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let mut plain = op.clone();
    let (Op::Attention(a) | Op::DepthAttention(DepthAttention(a))) = &mut plain else { return None };
    let scale = std::mem::replace(&mut a.scale, 1.0);
    if scale == 1.0 {
        return None;
    }
    let rope = each::<Rope>(g, x[0]).next().map(|(rope, y)| (*rope, y.to_vec()));
    let (y, gain) = binary(g, rope.as_ref().map_or(x[0], |(_, y)| y[0]), Binary::Mul)?;
    if !is_weight(g, gain) || !is_data(g, y) {
        return None;
    }
    let c = make(g, Constant(scale), &[])?;
    let gain = make(g, Binary::Mul, &[gain, c])?;
    let mut q = make(g, Binary::Mul, &[y, gain])?;
    if let Some((rope, mut operands)) = rope {
        operands[0] = q;
        q = make(g, rope, &operands)?;
    }
    let attention = make(g, plain, &[&[q], &x[1..]].concat())?;
    Some(vec![(id, attention)])
}

/// Matrices under each other: `[o1, i]`, `[o2, i]`, … or `[e, o1, i]`, … as `[.., o, i]`; `None`
/// where they do not fit.
fn stacked(g: &mut Graph, matrices: &[Id]) -> Option<(Id, Dims, Dim)> {
    let first = dims(g, *matrices.first()?)?;
    let (lead, i) = (first[..first.len() - 2].to_vec(), *first.last()?);
    let (mut parts, mut flat) = (vec![], vec![]);
    for &w in matrices {
        let d = dims(g, w)?;
        if d.len() != first.len() || d[..d.len() - 2] != lead[..] || d.last() != Some(&i) {
            return None;
        }
        let o = d[d.len() - 2];
        parts.push(o);
        let n = fresh(g, size(g, o).checked_mul(size(g, i))?);
        flat.push(make(g, Reshape([&lead[..], &[n]].concat().into()), &[w])?);
    }
    let rows = parts.iter().try_fold(0u64, |n, &o| n.checked_add(size(g, o)))?;
    let (all, rows) = (fresh(g, rows.checked_mul(size(g, i))?), fresh(g, rows));
    let w = make(g, Concat(all), &flat)?;
    let w = make(g, Reshape([&lead[..], &[rows, i]].concat().into()), &[w])?;
    Some((w, parts.into(), rows))
}

/// A dimension that stands for a size alone.
fn fresh(g: &mut Graph, size: u64) -> Dim {
    g.analysis.module.dim(format!("n{size}"), size)
}

/// Whether it is matrices under each other already, in whatever shape.
fn is_stack(g: &Graph, mut id: Id) -> bool {
    // A class may hold a reshape of itself; views are not deeper than this.
    for _ in 0..4 {
        if each::<Concat>(g, id).next().is_some() {
            return true;
        }
        let Some(of) = each::<Reshape>(g, id).next().map(|(_, y)| y[0]) else { break };
        id = of;
    }
    false
}

/// Products of weights with what `x` holds, by the e-nodes that `alike` accepts, as parts of one.
fn stack_of(g: &mut Graph, id: Id, op: &Op, x: &[Id], rank: usize) -> Option<Equal> {
    let input = g.find(x[0]);
    let rest: Vec<Id> = x[2..].iter().map(|&i| g.find(i)).collect();
    let mut products: Vec<(Id, Id)> = users(g, input)
        .into_iter()
        .filter(|(_, o, y)| o == op && y[0] == input && y[2..] == rest[..])
        .map(|(class, _, y)| (class, y[1]))
        .filter(|&(_, w)| {
            let over = op.dims();
            let last = dims(g, w).filter(|d| d.len() == rank).and_then(|d| d.last().copied());
            is_weight(g, w) && !is_packed(g, w) && last == over.last().copied() && !is_stack(g, w)
        })
        .collect();
    products.dedup_by_key(|p| p.0);
    // The first product of each input speaks for all.
    if products.len() < 2 || !same(g, products[0].0, id) || !is_data(g, input) {
        return None;
    }
    let matrices: Vec<Id> = products.iter().map(|p| p.1).collect();
    let (w, parts, _) = stacked(g, &matrices)?;
    let product = make(g, op.clone(), &[&[input, w], &rest[..]].concat())?;
    let split = make(g, Split(parts), &[product])?;
    Some(products.iter().enumerate().map(|(k, p)| (p.0, result(g, k as u32, split))).collect())
}

fn stack(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let Op::Contract(Contract { over }) = op else { return None };
    (over.len() == 1).then(|| stack_of(g, id, op, x, 2))?
}

fn stack_experts(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    matches!(op, Op::Grouped(_)).then(|| stack_of(g, id, op, x, 3))?
}

fn low_rank(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let Op::Contract(Contract { over }) = op else { return None };
    let contract = |id, want: fn(&Graph, Id) -> bool| {
        let found = each::<Contract>(g, id).find(|(_, y)| want(g, y[0]));
        found.map(|(c, y)| (c.over.clone(), y[0], y[1]))
    };
    let matrix = |id| dims(g, id).is_some_and(|d| d.len() == 2) && is_weight(g, id);
    if !is_data(g, x[0]) || over.len() != 1 || !matrix(x[1]) {
        return None;
    }
    // x·W with W = B·A is (x·A)·B.
    if let Some((r, b, a)) =
        contract(x[1], is_weight).filter(|(r, b, a)| r.len() == 1 && matrix(*b) && matrix(*a))
    {
        let y = make(g, op.clone(), &[x[0], a])?;
        let product = make(g, Contract { over: r }, &[y, b])?;
        return (ty(g, product) == ty(g, id)).then(|| vec![(id, product)]);
    }
    let (h, y, a) = contract(x[0], is_data).filter(|(h, _, a)| h.len() == 1 && matrix(*a))?;
    let w = make(g, op.clone(), &[x[1], a])?;
    let product = make(g, Contract { over: h }, &[y, w])?;
    (ty(g, product) == ty(g, id)).then(|| vec![(id, product)])
}

// --- recurrences ---------------------------------------------------------------------------------

fn linear_attention(g: &mut Graph, id: Id, op: &Op, x: &[Id]) -> Option<Equal> {
    let Op::Recurrence(Recurrence { step, tokens }) = op else { return None };
    let first = match tokens {
        Tokens::All => 0,
        Tokens::Segments => 1,
        // Nothing here makes an operation with state: lowering does.
        Tokens::Kept => return None,
    };
    let found = recognise(step).ok()?;
    // The last operand is the state, which must begin at zero.
    if number(g, *x.last()?) != Some(0.0) {
        return None;
    }
    let given = &x[first..x.len() - 1];
    let moved = outside::operands(g, step, &found, *tokens, given)?;
    let inputs = [&moved.inputs[..], &x[..first]].concat();
    let read = make(g, LinearAttention(moved.form.clone()), &inputs)?;
    let outputs = moved.outputs(g, read)?;
    let mut equal = vec![];
    for (k, own) in outputs.iter().enumerate() {
        let old = if outputs.len() == 1 { id } else { result(g, k as u32, id) };
        equal.push((old, *own));
    }
    Some(equal)
}

impl Place for Graph {
    type Value = Id;

    fn make(&mut self, op: Op, inputs: &[Id]) -> Option<Id> {
        make(self, op, inputs)
    }

    fn dims(&self, of: Id) -> Option<Dims> {
        dims(self, of)
    }

    fn number(&self, of: Id) -> Option<f64> {
        number(self, of)
    }

    fn operands(&self, of: Id, op: &Op) -> Option<Vec<Id>> {
        operands(self, of, op).map(<[Id]>::to_vec)
    }
}
