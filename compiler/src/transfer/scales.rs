//! Sums of products of tokens: scores of attentions, and what definitions sum themselves.
//!
//! *In*: the model here and at the base, lowered. *Out*: the components in which such a sum is over
//! a size that grows, by a scale that is not the rule's. *Promise*: read off the operations, so
//! that an attention that a definition applies is seen as any other.

use crate::build::Marks;
use crate::ir::{Binary, Dim, Function, Node, Op, Reduce, Value};
use crate::lower::Lowered;
use crate::op::DepthAttention;
use indexmap::IndexMap;

/// How many products a sum is of: here, and at the base.
pub(super) type Sizes = [u64; 2];

/// By component: a size whose scores have another scale than the rule's, and one that formulas of
/// its own sum products over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Found {
    pub attention: Option<Sizes>,
    pub own: Option<Sizes>,
}

/// The components of a model with such sums, by the name that their nodes are marked with.
pub(super) fn scales(here: &Lowered, base: &Lowered) -> IndexMap<String, Found> {
    let mut found: IndexMap<String, Found> = IndexMap::new();
    let none = Marks::default();
    for f in here.module.functions.values() {
        let Some(at_base) = base.module.functions.get(&f.name) else { continue };
        let marks = here.facts.marks.get(&f.name).unwrap_or(&none);
        let still = super::place::still(f);
        let sizes = |dim: &Dim| {
            let own = here.module.size(*dim);
            [own, base.module.dims.get(here.module.name(*dim)).copied().unwrap_or(own)]
        };
        for (at, node) in f.nodes.iter().enumerate() {
            let inside = marks.parts.iter().filter(|(range, _)| range.contains(&at));
            let Some((_, name)) = inside.min_by_key(|(range, _)| range.len()) else { continue };
            let own = found.entry(name.clone()).or_default();
            if let Some(now) = scale(node) {
                let last = f.ty(node.inputs[0]).dims.last().map(sizes);
                let other = at_base.nodes.get(at).and_then(scale);
                own.attention = own.attention.or(last.filter(|sizes| !carried(now, other, *sizes)));
            }
            let grown = summed(f, node, &still).iter().map(sizes).find(|[here, base]| here != base);
            own.own = own.own.or(grown);
        }
    }
    found.retain(|_, own| *own != Found::default());
    found
}

/// Whether the scale of scores is that of the rule.
fn carried(here: f64, base: Option<f64>, [d, b]: Sizes) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
    let (d, b) = (d as f64, b as f64);
    d == b || near(here, b.sqrt() / d) || base.is_some_and(|base| near(here / base, b / d))
}

/// The factor of scores of an attention.
fn scale(node: &Node) -> Option<f64> {
    if let Op::Attention(a) | Op::DepthAttention(DepthAttention(a)) = &node.op { Some(a.scale) } else { None }
}

/// The dimensions that a node sums products of two values of tokens over, or the step of a
/// recurrence does.
fn summed(f: &Function, node: &Node, still: &[bool]) -> Vec<Dim> {
    let of_tokens = |node: &Node| node.inputs.iter().filter(|v| !still[v.index()]).count() > 1;
    if let Op::Contract(c) = &node.op {
        return if of_tokens(node) { c.over.to_vec() } else { vec![] };
    }
    if let Op::Reduce(r) = &node.op {
        let made = |v: Value| f.nodes.iter().find(|n| n.results().any(|r| r == v));
        let product = |n: &&Node| matches!(n.op, Op::Binary(Binary::Mul)) && of_tokens(n);
        let products = node.inputs.first().and_then(|v| made(*v)).filter(product);
        return if r.how == Reduce::Sum && products.is_some() { r.over.to_vec() } else { vec![] };
    }
    if let Op::LinearAttention(linear) = &node.op {
        return vec![linear.0.size];
    }
    if let Op::Recurrence(r) = &node.op {
        let step = r.step.function();
        let moving = vec![false; step.types.len()];
        return step.nodes.iter().flat_map(|node| summed(step, node, &moving)).collect();
    }
    vec![]
}
