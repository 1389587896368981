//! Which rows of each value anybody needs.
//!
//! *In*: a function. *Out*: for each value [`Need`], and the function with its nodes in an order in
//! which places are computed before the rows that they choose. *Promise*: a row that is not needed
//! may hold anything; nothing that the function returns depends on it.
//!
//! Needs flow backwards from [`Op::Keep`], which takes the rows of tokens that take part and no
//! others, through operations whose rows depend on the same rows of their operands. Nothing is
//! marked when a function is built, so nothing can be marked wrongly, and rewriting need not know.

use super::row_dims;
use crate::ir::{Function, Node, Op, Type, Value};
use crate::op::Rows;

/// Which rows of a value are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// None so far.
    Nothing,
    /// Those of tokens whose entry of the value is not negative.
    Places(Value),
    /// All.
    All,
}

impl Need {
    fn or(self, other: Need) -> Need {
        match (self, other) {
            (Need::Nothing, n) | (n, Need::Nothing) => n,
            (a, b) if a == b => a,
            _ => Need::All,
        }
    }

    /// The places, where not all rows are needed.
    pub(super) fn places(self) -> Option<Value> {
        match self {
            Need::Places(v) => Some(v),
            _ => None,
        }
    }
}

/// The function in an order in which places are computed before the rows they choose, and the needs
/// of its values.
pub(super) fn needs(f: &Function) -> (Function, Vec<Need>) {
    if !f.nodes.iter().any(|n| n.op == Op::Keep) {
        return (f.clone(), vec![Need::All; f.types.len()]);
    }
    let found = flow(f);
    let (order, dropped) = order(f, &found);
    let mut new = vec![Value(u32::MAX); f.types.len()];
    let mut to = Function::new(f.name.clone());
    to.params = f.params.clone();
    to.types = f.types[..f.params.len()].to_vec();
    for (i, v) in new.iter_mut().enumerate().take(f.params.len()) {
        *v = Value(i as u32);
    }
    for i in order {
        let node = &f.nodes[i];
        let inputs = node.inputs.iter().map(|v| new[v.index()]).collect();
        let first = to.push(node.op.clone(), inputs, node.results().map(|r| f.ty(r).clone()).collect());
        for (k, r) in node.results().enumerate() {
            new[r.index()] = Value(first.0 + k as u32);
        }
    }
    to.results = f.results.iter().map(|(n, v)| (n.clone(), new[v.index()])).collect();
    let mut needs = vec![Need::All; f.types.len()];
    for (i, node) in f.nodes.iter().enumerate() {
        // The operation runs for the rows that any of its results needs.
        let own = node.results().fold(Need::Nothing, |n, r| n.or(found[r.index()]));
        for r in node.results() {
            needs[new[r.index()].index()] = match own {
                Need::Places(v) if !dropped[i] => Need::Places(new[v.index()]),
                _ => Need::All,
            };
        }
    }
    (to, needs)
}

/// Needs, from the results back.
fn flow(f: &Function) -> Vec<Need> {
    let defined = f.definitions();
    let mut needs = vec![Need::Nothing; f.types.len()];
    for (_, v) in &f.results {
        needs[v.index()] = Need::All;
    }
    for node in f.nodes.iter().rev() {
        let own = node.results().fold(Need::Nothing, |n, r| n.or(needs[r.index()]));
        if own == Need::Nothing {
            continue;
        }
        let mut asked = Asked { f, defined: &defined, node, own };
        if let Rows::One(one) = node.op.signature().rows
            && !one(&asked)
        {
            asked.own = Need::All;
            node.results().for_each(|r| needs[r.index()] = Need::All);
        }
        for (k, &input) in node.inputs.iter().enumerate() {
            let need = asked.operand(k);
            needs[input.index()] = needs[input.index()].or(need);
        }
    }
    needs
}

/// A node whose results are needed: what its operands are needed for.
pub(crate) struct Asked<'a> {
    f: &'a Function,
    defined: &'a [Option<usize>],
    /// The node.
    pub node: &'a Node,
    /// Which rows of its results are needed.
    pub own: Need,
}

impl<'a> Asked<'a> {
    /// The node that makes a value.
    pub fn maker(&self, v: Value) -> Option<&'a Node> {
        self.defined[v.index()].map(|n| &self.f.nodes[n])
    }

    /// Whether a value is a parameter.
    pub fn is_param(&self, v: Value) -> bool {
        self.defined[v.index()].is_none()
    }

    /// Type of an operand.
    pub fn ty(&self, k: usize) -> &'a Type {
        self.f.ty(self.node.inputs[k])
    }

    /// The tokens that keep their integer in a value, where it can be known from no integer.
    pub fn kept(&self, v: Value) -> Option<Need> {
        self.maker(v).filter(|n| matches!(n.op, Op::KeepInts(_))).map(|n| Need::Places(n.inputs[1]))
    }

    /// The rows of operand `k` that are needed.
    fn operand(&self, k: usize) -> Need {
        match self.node.op.signature().rows {
            Rows::All => Need::All,
            Rows::Same | Rows::One(_) => {
                // Row by row: the operand and the results have the same rows.
                let rows = row_dims(&self.ty(k).dims);
                let same = |r: Value| row_dims(&self.f.ty(r).dims) == rows;
                if rows.len() == 2 && self.node.results().all(same) { self.own } else { Need::All }
            }
            Rows::Of(need) => need(self, k),
        }
    }
}

/// Nodes in an order in which operands, and the places that choose rows, come first; and for which
/// nodes that cannot be.
fn order(f: &Function, needs: &[Need]) -> (Vec<usize>, Vec<bool>) {
    let defined = f.definitions();
    let n = f.nodes.len();
    let (mut order, mut dropped) = (Vec::with_capacity(n), vec![false; n]);
    let (mut begun, mut done) = (vec![false; n], vec![false; n]);
    for root in 0..n {
        let mut stack = vec![root];
        while let Some(&i) = stack.last() {
            if done[i] {
                stack.pop();
                continue;
            }
            let node = &f.nodes[i];
            if !std::mem::replace(&mut begun[i], true) {
                let places = node.results().find_map(|r| needs[r.index()].places());
                let first = places.and_then(|p| defined[p.index()]);
                stack.extend(first.filter(|&p| !done[p] && !begun[p]));
                // On top of the places: what these depend on must not wait for itself.
                continue;
            }
            let waiting: Vec<usize> =
                node.inputs.iter().filter_map(|v| defined[v.index()]).filter(|&d| !done[d]).collect();
            if waiting.is_empty() {
                let ready = |v: Value| defined[v.index()].is_none_or(|d| done[d]);
                dropped[i] = node.results().any(|r| needs[r.index()].places().is_some_and(|p| !ready(p)));
                done[i] = true;
                order.push(i);
                stack.pop();
            } else {
                stack.extend(waiting);
            }
        }
    }
    (order, dropped)
}
