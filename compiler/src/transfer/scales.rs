//! Scores of attentions whose heads grow.
//!
//! *In*: the model here and at the base, lowered. *Out*: the components whose scores have another
//! scale than the rule's. *Promise*: read off the operations, so that an attention that a
//! definition applies is seen as any other. Sums that formulas of a definition write are
//! [`aligned`](super::aligned)'s.

use crate::build::Marks;
use crate::ir::{Dim, Node, Op};
use crate::lower::Lowered;
use crate::op::DepthAttention;
use indexmap::IndexMap;

/// How many products a sum is of: here, and at the base.
pub(super) type Sizes = [u64; 2];

/// The sizes of such heads, by the name that the nodes of a component are marked with.
pub(super) fn scales(here: &Lowered, base: &Lowered) -> IndexMap<String, Sizes> {
    let mut found: IndexMap<String, Sizes> = IndexMap::new();
    let none = Marks::default();
    for f in here.module.functions.values() {
        let Some(at_base) = base.module.functions.get(&f.name) else { continue };
        let marks = here.facts.marks.get(&f.name).unwrap_or(&none);
        let sizes = |dim: &Dim| {
            let own = here.module.size(*dim);
            [own, base.module.dims.get(here.module.name(*dim)).copied().unwrap_or(own)]
        };
        for (at, node) in f.nodes.iter().enumerate() {
            let inside = marks.parts.iter().filter(|(range, _)| range.contains(&at));
            let Some((_, name)) = inside.min_by_key(|(range, _)| range.len()) else { continue };
            let Some(now) = scale(node) else { continue };
            let Some(last) = f.ty(node.inputs[0]).dims.last().map(sizes) else { continue };
            if !carried(now, at_base.nodes.get(at).and_then(scale), last) {
                found.entry(name.clone()).or_insert(last);
            }
        }
    }
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
