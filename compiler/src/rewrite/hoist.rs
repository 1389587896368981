//! Work that needs no data leaves the body: weights are prepared before the calls, sums of
//! gradients finished after them.
//!
//! *In*: an extracted function. *Out*: the same without its subexpressions of weights alone, which
//! become parameters `prepared.{n}`; and without gradients that are sums of other gradients.
//! [`Prepared`] keeps both as functions of their own, shared by all forms of a body: an expression
//! that evaluation and decoding both need is prepared once.

use super::language::Source;
use crate::ir::{Binding, Dims, Function, Module, Op, Port, Reduce, Value};
use crate::op::Reduction;
use indexmap::IndexMap;

/// Numbers of what is prepared, the same for the same expression of the same body in all functions
/// of a plan.
#[derive(Clone, Debug, Default)]
pub struct Names(indexmap::IndexSet<String>);

/// Work before and after the calls of one body, for each set of weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prepared {
    /// Functions from weights to one `prepared.{n}` each, by what they compute.
    before: IndexMap<String, Function>,
    /// Functions from one gradient to another each, by the name of the gradient.
    after: IndexMap<String, Function>,
}

impl Prepared {
    /// The functions that make what `users` read, in order.
    pub fn before<'a>(&'a self, users: &'a [&Function]) -> impl Iterator<Item = &'a Function> {
        self.before
            .values()
            .filter(|f| f.results.iter().any(|(made, _)| users.iter().any(|u| u.params.contains(made))))
    }

    /// The functions that finish gradients.
    pub fn after(&self) -> impl Iterator<Item = &Function> {
        self.after.values()
    }

    /// Moves expressions of weights out of `f`, a function of the body `scope`. The parameters that
    /// replace them come after its first `at`.
    pub fn hoist(
        &mut self,
        names: &mut Names,
        module: &Module,
        scope: &str,
        f: &Function,
        at: usize,
    ) -> Function {
        let source = sources(f);
        let defined = f.definitions();
        // A view stays where it is read.
        let base = |mut v: Value| {
            while let Some(n) = defined[v.index()].map(|n| &f.nodes[n]) {
                if !matches!(n.op, Op::Reshape(_) | Op::StopGradient) {
                    break;
                }
                v = n.inputs[0];
            }
            v
        };
        let read = f.nodes.iter().filter(|n| source[n.first.index()] == Source::Data).flat_map(|n| &n.inputs);
        let mut hoisted: IndexMap<Value, Port> = IndexMap::new();
        for &v in read {
            let v = base(v);
            if source[v.index()] != Source::Weights
                || defined[v.index()].is_none()
                || hoisted.contains_key(&v)
            {
                continue;
            }
            let mut alone =
                crate::autodiff::prune(&Function { results: vec![("".into(), v)], ..f.clone() }, &|_| true);
            alone.name = String::new();
            // The same expression is another one where there are more tokens: of prefill and of
            // decoding.
            let sizes: Vec<u64> = alone.types.iter().map(|ty| module.elements(&ty.dims)).collect();
            let what = format!("{scope}: {} {sizes:?}", module.show_function(&alone));
            let made = self.before.entry(what).or_insert_with_key(|what| {
                let (number, _) = names.0.insert_full(what.clone());
                alone.name = format!("prepare{number}");
                alone.results[0].0 = Port::new(format!("prepared.{number}"), Binding::Prepared);
                alone
            });
            hoisted.insert(v, made.results[0].0.clone());
        }
        if hoisted.is_empty() {
            return f.clone();
        }
        let at = at.min(f.params.len());
        let mut g = Function::new(f.name.clone());
        let mut map: Vec<Option<Value>> = vec![None; f.types.len()];
        for i in 0..=f.params.len() {
            if i == at {
                for (v, port) in &hoisted {
                    map[v.index()] = Some(g.param(port.name.clone(), port.binding, f.ty(*v).clone()));
                }
            }
            if let Some(Port { name, binding }) = f.params.get(i) {
                map[i] = Some(g.param(name.clone(), *binding, f.types[i].clone()));
            }
        }
        for node in &f.nodes {
            let inputs: Option<Vec<Value>> = node.inputs.iter().map(|v| map[v.index()]).collect();
            let Some(inputs) = inputs else { continue };
            if hoisted.contains_key(&node.first) {
                continue;
            }
            let types = node.results().map(|r| f.ty(r).clone()).collect();
            let first = g.push(node.op.clone(), inputs, types);
            for (k, r) in node.results().enumerate() {
                map[r.index()].get_or_insert(Value(first.0 + k as u32));
            }
        }
        g.results = f.results.iter().filter_map(|(n, v)| Some((n.clone(), map[v.index()]?))).collect();
        crate::autodiff::prune_nodes(&g)
    }

    /// Moves gradients that are sums over the experts of other gradients out of `f`: the sum of
    /// what all calls added is what they would have added one by one.
    pub fn sink(&mut self, f: &Function) -> Function {
        let defined = f.definitions();
        let mut kept = vec![];
        for (port, v) in &f.results {
            let sum = defined[v.index()].and_then(|n| {
                let node = &f.nodes[n];
                let Op::Reduce(Reduction { how: Reduce::Sum, over }) = &node.op else { return None };
                (over.len() == 1).then(|| (over.clone(), node.inputs[0]))
            });
            let of =
                sum.and_then(|(over, x)| Some((over, x, f.results.iter().find(|(_, r)| *r == x)?.0.clone())));
            match of {
                Some((over, x, of)) if port.binding.is_cotangent() && of.binding.is_cotangent() => {
                    self.after.insert(port.name.clone(), summed(f, port, &of, x, over));
                }
                _ => kept.push((port.clone(), *v)),
            }
        }
        crate::autodiff::prune_nodes(&Function { results: kept, ..f.clone() })
    }
}

fn summed(f: &Function, port: &Port, of: &Port, x: Value, over: Dims) -> Function {
    let mut g = Function::new(format!("finish.{port}"));
    let ty = f.ty(x).clone();
    let result = crate::ir::Type { dtype: ty.dtype, dims: ty.without(&over) };
    let x = g.param(of.name.clone(), of.binding, ty);
    let sum = g.push(Op::Reduce(Reduction { how: Reduce::Sum, over }), vec![x], vec![result]);
    g.results.push((port.clone(), sum));
    g
}

/// The source of each value.
pub fn sources(f: &Function) -> Vec<Source> {
    let mut source: Vec<Source> = f
        .params
        .iter()
        .map(|p| if p.binding.is_weights() { Source::Weights } else { Source::Data })
        .collect();
    for node in &f.nodes {
        let of = node.inputs.iter().map(|v| source[v.index()]).max().unwrap_or(Source::Constant);
        source.extend(node.results().map(|_| of));
    }
    source
}
