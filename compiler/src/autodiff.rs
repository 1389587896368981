//! Reverse-mode differentiation of functions, and the decision what to keep for the way back.
//!
//! *In*: a function of the canonical or rewritten IR. *Out*: [`differentiate`] gives the *joint*
//! function, the forward nodes followed by the backward ones; [`partition`] cuts it into a forward
//! function that returns what it keeps and a backward function that takes it. *Promise*: every
//! result `d.{param}` is the derivative of the seeded results, checked against finite differences
//! for every operation and for whole random specs.
//!
//! The rule of an operation stands in its folder of [`crate::op`]: the cotangents of its operands
//! from those of its results.

use crate::CompileError;
use crate::build::Builder;
use crate::ir::{
    Binding, DType, Dims, Function, Lifetime, Module, Node, Op, Output, Port, Reduce, Type, Value,
};
use crate::op::{Cast, Class, Derivative};
use rustc_hash::{FxHashMap, FxHashSet};

/// Where a cotangent of a result comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// The parameter `d.{result}` of the joint function.
    Param,
    /// The number 1: the result is the loss.
    One,
}

/// The joint function of `f`: its nodes, then those of the derivative. `seeds` names the results
/// that have a cotangent; `wanted` says for which parameters `d.{param}` is returned. Cotangents of
/// state are state themselves.
pub fn differentiate(
    module: &mut Module,
    f: &Function,
    seeds: &[(&str, Seed)],
    wanted: &dyn Fn(&Port) -> bool,
) -> Result<Function, CompileError> {
    let defined = f.definitions();
    let wanted: Vec<bool> =
        f.params.iter().enumerate().map(|(i, p)| f.types[i].dtype.is_float() && wanted(p)).collect();
    // A value is active where its derivative is asked for by way of a differentiable operation.
    let mut active = vec![false; f.types.len()];
    active[..wanted.len()].copy_from_slice(&wanted);
    for node in &f.nodes {
        let blocked = matches!(node.op.signature().derivative, Derivative::Blocked(_) | Derivative::Held(_));
        if !blocked && node.inputs.iter().any(|v| active[v.index()]) {
            for r in node.results() {
                active[r.index()] = f.ty(r).dtype.is_float();
            }
        }
    }
    let mut b = Builder::new(module, format!("{}.joint", f.name));
    let mut map: Vec<Value> =
        f.params.iter().zip(&f.types).map(|(p, t)| b.param(&p.name, p.binding, t.clone())).collect();
    for node in &f.nodes {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| map[v.index()]).collect();
        map.extend(b.ops(node.op.clone(), &inputs));
    }
    for (port, v) in &f.results {
        b.result(port.clone(), map[v.index()]);
    }
    let mut reverse = Reverse { b, f, map, active, cotangents: vec![None; f.types.len()], defined };
    for &(name, seed) in seeds {
        let Some((port, v)) = f.results.iter().find(|(p, _)| p.name == name) else { continue };
        if !reverse.active[v.index()] {
            continue;
        }
        let d = match seed {
            Seed::Param => {
                let d = port.cotangent();
                reverse.b.param(&d.name, d.binding, f.ty(*v).clone())
            }
            Seed::One => reverse.b.constant(1.0),
        };
        reverse.add(*v, d);
    }
    for i in (0..f.nodes.len()).rev() {
        reverse.rule(i)?;
    }
    for (i, p) in f.params.iter().enumerate() {
        if wanted[i] {
            let d = match reverse.cotangents[i] {
                Some(d) => d,
                None => reverse.b.zeros(&f.types[i]),
            };
            reverse.b.result(p.cotangent(), d);
        }
    }
    Ok(reverse.b.finish()?)
}

pub(crate) struct Reverse<'m, 'f> {
    b: Builder<'m>,
    f: &'f Function,
    map: Vec<Value>,
    active: Vec<bool>,
    cotangents: Vec<Option<Value>>,
    defined: Vec<Option<usize>>,
}

impl Reverse<'_, '_> {
    /// Adds `d` to the cotangent of a value of `f`.
    fn add(&mut self, v: Value, d: Value) {
        if !self.active[v.index()] {
            return;
        }
        self.cotangents[v.index()] = Some(match self.cotangents[v.index()] {
            Some(sum) => self.b.add(sum, d),
            None => d,
        });
    }

    /// Adds the cotangents of the operands of node `i` from those of its results.
    fn rule(&mut self, i: usize) -> Result<(), CompileError> {
        let node = &self.f.nodes[i];
        if node.results().all(|r| self.cotangents[r.index()].is_none()) {
            return Ok(());
        }
        let mut at = Adjoint { reverse: self, node };
        match node.op.signature().derivative {
            Derivative::Rule(op) => op.reverse(&mut at),
            Derivative::Blocked(_) | Derivative::Held(_) => Ok(()),
            Derivative::Missing(what) => at.missing(what),
        }
    }
}

/// A node whose operands' cotangents are wanted. Operands and results go by their numbers.
pub(crate) struct Adjoint<'r, 'm, 'f> {
    reverse: &'r mut Reverse<'m, 'f>,
    node: &'f Node,
}

impl<'m, 'f> Adjoint<'_, 'm, 'f> {
    /// The builder of the joint function.
    pub fn builder(&mut self) -> &mut Builder<'m> {
        &mut self.reverse.b
    }

    /// An operand in the joint function.
    pub fn operand(&self, k: usize) -> Value {
        self.reverse.map[self.node.inputs[k].index()]
    }

    /// All operands in the joint function.
    pub fn operands(&self) -> Vec<Value> {
        (0..self.node.inputs.len()).map(|k| self.operand(k)).collect()
    }

    /// A result in the joint function.
    pub fn result(&self, k: usize) -> Value {
        self.reverse.map[self.node.first.index() + k]
    }

    /// Type of an operand.
    pub fn ty(&self, k: usize) -> &'f Type {
        self.reverse.f.ty(self.node.inputs[k])
    }

    /// The cotangent of a result, where it has one.
    pub fn cotangent(&self, k: usize) -> Option<Value> {
        self.reverse.cotangents[self.node.first.index() + k]
    }

    /// The cotangent of a result; zeros where it has none.
    pub fn cotangent_or_zeros(&mut self, k: usize) -> Value {
        self.cotangent(k).unwrap_or_else(|| {
            let result = Value(self.node.first.0 + k as u32);
            self.reverse.b.zeros(self.reverse.f.ty(result))
        })
    }

    /// The cotangent of the first result, for the operations that need one.
    pub fn d(&self) -> Result<Value, CompileError> {
        self.cotangent(0).ok_or_else(|| {
            CompileError::Schedule(format!("`{}` is used by its side results alone", self.node.op.name()))
        })
    }

    /// The error that the derivative is missing.
    pub fn missing<T>(&self, what: &str) -> Result<T, CompileError> {
        Err(CompileError::Schedule(format!("`{}` has no derivative {what}", self.node.op.name())))
    }

    /// Whether an operand's cotangent is wanted.
    pub fn is_active(&self, k: usize) -> bool {
        self.reverse.active[self.node.inputs[k].index()]
    }

    /// Adds to the cotangent of an operand.
    pub fn add(&mut self, k: usize, d: Value) {
        self.reverse.add(self.node.inputs[k], d);
    }

    /// Sums `d` over the dimensions that an operand was broadcast along, and adds it.
    pub fn add_fitted(&mut self, k: usize, d: Value) {
        let (b, target) = (&mut self.reverse.b, &self.reverse.f.ty(self.node.inputs[k]).dims);
        let extra: Dims = b.dims(d).into_iter().filter(|x| !target.contains(x)).collect();
        let d = if extra.is_empty() { d } else { b.reduce(Reduce::Sum, d, &extra) };
        self.add(k, d);
    }

    /// The cotangent of an operand so far; zeros where there is none.
    pub fn so_far(&mut self, k: usize) -> Value {
        let v = self.node.inputs[k];
        self.reverse.cotangents[v.index()].unwrap_or_else(|| self.reverse.b.zeros(self.reverse.f.ty(v)))
    }

    /// Replaces the cotangent of an operand by one that [`Adjoint::so_far`] is in.
    pub fn replace(&mut self, k: usize, d: Value) {
        if self.is_active(k) {
            self.reverse.cotangents[self.node.inputs[k].index()] = Some(d);
        }
    }

    /// The results of the `group` that made an operand: an order or an inverse.
    pub fn group(&self, k: usize) -> Result<[Value; 3], CompileError> {
        let Reverse { f, map, defined, .. } = &*self.reverse;
        let node = defined[self.node.inputs[k].index()].map(|i| &f.nodes[i]);
        match node.filter(|n| matches!(n.op, Op::Group(_))) {
            Some(n) => Ok([0, 1, 2].map(|i| map[n.first.index() + i])),
            None => Err(CompileError::Schedule(
                "an order of slots must come from `group` in the same function".into(),
            )),
        }
    }

    /// `Σ a·b` with the dimensions in the order of operand `k`, whichever factor must come first
    /// for it.
    pub fn contract_like(&mut self, a: Value, b: Value, k: usize) -> Result<Value, CompileError> {
        let (like, build) = (&self.ty(k).dims, &mut self.reverse.b);
        let over: Dims = build.dims(a).into_iter().filter(|d| build.ty(b).has(*d)).collect();
        for (a, b) in [(a, b), (b, a)] {
            if [build.ty(a).without(&over), build.ty(b).without(&over)].concat() == **like {
                return Ok(build.contract(a, b, &over));
            }
        }
        Err(CompileError::Schedule("the gradient of a contraction would need a transposition".into()))
    }
}

/// Which results of a layer body have a cotangent, and where from: the stream, the loss of a pass,
/// the losses of a teacher, the auxiliary loss (as `aux` says), and state.
pub fn body_seeds(f: &Function, aux: Seed) -> Vec<(&str, Seed)> {
    let results = |binding: Binding, seed| {
        let of = f.results.iter().filter(move |(p, _)| p.binding == binding);
        of.map(move |(p, _)| (p.name.as_str(), seed))
    };
    let state = f.params.iter().filter(|p| p.binding.is_state()).map(|p| (p.name.as_str(), Seed::Param));
    let saved = results(Binding::State(Lifetime::Saved), Seed::Param);
    results(Binding::Stream, Seed::Param)
        .chain(results(Binding::Output(Output::Loss), Seed::One))
        .chain(results(Binding::Output(Output::Taught), Seed::One))
        .chain(results(Binding::Output(Output::Aux), aux))
        .chain(state)
        .chain(saved)
        .collect()
}

/// Those of the head: the losses, and the states that it hands on.
pub fn head_seeds(f: &Function) -> Vec<(&str, Seed)> {
    let handed = |p: &&Port| p.binding.is_state() && f.find_result(&p.name).is_some();
    let state = f.params.iter().filter(handed).map(|p| (p.name.as_str(), Seed::Param));
    let taught = f.find_result(Output::Taught.name()).map(|_| (Output::Taught.name(), Seed::One));
    std::iter::once((Output::Loss.name(), Seed::One)).chain(taught).chain(state).collect()
}

/// Whether the derivative of a parameter is asked for: of the stream, of state that is handed
/// through depth, and of those weights for which `trained` holds.
pub fn has_derivative(port: &Port, trained: impl Fn(&Port) -> bool) -> bool {
    match port.binding {
        Binding::Weight | Binding::PassWeight | Binding::TurnWeight => trained(port),
        Binding::Stream | Binding::State(Lifetime::Depth | Lifetime::Saved) => true,
        // Nothing is trained through what decoding keeps.
        Binding::State(Lifetime::Set | Lifetime::Token(_) | Lifetime::Text)
        | Binding::Value
        | Binding::Batch(_)
        | Binding::Buffer
        | Binding::Prepared
        | Binding::Saved
        | Binding::Index(_)
        | Binding::Output(_)
        | Binding::Observed
        | Binding::Patched
        | Binding::Cotangent(_) => false,
    }
}

/// A layer body without what only training asks for: selection counts, auxiliary losses and those
/// of a teacher.
pub fn without_training(f: &Function) -> Function {
    let trains = |p: &Port| {
        matches!(p.binding, Binding::State(Lifetime::Set) | Binding::Output(Output::Aux | Output::Taught))
    };
    prune(f, &|p| !trains(p))
}

/// Cuts a joint function. `forward` is the function it was made from. The forward function returns,
/// besides its own results, `saved.{n}`; the backward function takes them as parameters bound as
/// `Saved` and returns the cotangents.
///
/// Products, attentions and routing are kept; element-wise work, norms, rotations and gathers are
/// repeated, unless that would keep more bytes than the value has. Routing decisions are never
/// repeated.
pub fn partition(module: &Module, joint: &Function, forward: &Function) -> (Function, Function) {
    let defined = joint.definitions();
    let first_backward = forward.nodes.len();
    let is_forward = |v: Value| defined[v.index()].is_some_and(|n| n < first_backward);
    let bytes = |v: Value| joint.ty(v).dtype.room(module.elements(&joint.ty(v).dims));

    // The final value of a state is in the state's place when the way back begins, and so are the
    // rows of those before it that anybody reads of them: a row is read when it is complete.
    let mut in_state: FxHashMap<Value, Value> = FxHashMap::default();
    for (port, v) in &forward.results {
        if let (Some(p), Some(j)) = (forward.state_of(port), joint.find_result(&port.name))
            && *v != p
        {
            let mut at = j;
            in_state.insert(at, p);
            while let Some(node) = defined[at.index()].map(|n| &joint.nodes[n])
                && node.op == Op::CacheWrite
                && node.inputs[0] != p
            {
                at = node.inputs[0];
                in_state.insert(at, p);
            }
        }
    }
    let live = live_nodes(
        joint,
        joint.results.iter().filter(|(p, _)| p.binding.is_cotangent()).map(|(_, v)| *v),
        &|v| is_forward(v),
    );
    let mut needed: Vec<Value> = vec![];
    for (i, node) in joint.nodes.iter().enumerate().skip(first_backward) {
        if live[i] {
            needed
                .extend(node.inputs.iter().copied().filter(|&v| is_forward(v) && !in_state.contains_key(&v)));
        }
    }
    needed.extend(
        joint
            .results
            .iter()
            .filter(|(p, _)| p.binding.is_cotangent())
            .map(|(_, v)| *v)
            .filter(|&v| is_forward(v)),
    );
    needed.sort();
    needed.dedup();

    // The cast of a product is kept, not the product.
    let repeatable = |v: Value| {
        let node = &joint.nodes[node_of(&defined, v)];
        let stored = |x: Value| defined[x.index()].is_some_and(|n| !joint.nodes[n].op.class().repeats());
        node.op.class().repeats() && !(node.op == Op::Cast(Cast(DType::Bf16)) && stored(node.inputs[0]))
    };
    let mut saved: FxHashSet<Value> = needed.iter().copied().filter(|&v| !repeatable(v)).collect();
    let mut repeated: FxHashSet<Value> = FxHashSet::default();
    for &v in needed.iter().filter(|v| repeatable(**v)) {
        let (mut more, mut through, mut stack) = (FxHashSet::default(), FxHashSet::default(), vec![v]);
        while let Some(u) = stack.pop() {
            if !is_forward(u) || saved.contains(&u) || in_state.contains_key(&u) || !through.insert(u) {
                continue;
            }
            let node = &joint.nodes[node_of(&defined, u)];
            if repeatable(u) {
                stack.extend(&node.inputs);
            } else {
                through.remove(&u);
                more.insert(u);
            }
        }
        let cost: u64 = more.iter().map(|&u| bytes(u)).sum();
        // A part of a product is kept by keeping the product: the other parts are needed too, and a
        // view costs nothing.
        let view = through.iter().all(|&u| {
            let op = &joint.nodes[node_of(&defined, u)].op;
            matches!(op, Op::Cast(_)) || matches!(op.class(), Class::View { .. })
        });
        if cost < bytes(v) || view {
            saved.extend(more);
            repeated.extend(through);
        } else {
            saved.insert(v);
        }
    }
    let mut saved: Vec<Value> = saved.into_iter().collect();
    saved.sort();

    let mut front = Function::new(format!("{}.forward", forward.name));
    let kept = forward.params.len();
    front.params = joint.params[..kept].to_vec();
    front.types = joint.types[..kept].to_vec();
    let kept_as = |i: usize| Port::new(format!("saved.{i}"), Binding::Saved);
    let (cotangents, mut results): (Vec<(Port, Value)>, Vec<_>) =
        joint.results.iter().cloned().partition(|(p, _)| p.binding.is_cotangent());
    results.extend(saved.iter().enumerate().map(|(i, v)| (kept_as(i), *v)));
    let live = live_nodes(joint, results.iter().map(|(_, v)| *v), &|_| false);
    copy_nodes(
        joint,
        &mut front,
        (0..kept as u32).map(|i| (Value(i), Value(i))).collect(),
        &|i| i < first_backward && live[i],
        &results,
    );

    let mut back = Function::new(format!("{}.backward", forward.name));
    let results = cotangents;
    let stop: FxHashSet<Value> = saved.iter().copied().chain(in_state.keys().copied()).collect();
    let live = live_nodes(joint, results.iter().map(|(_, v)| *v), &|v| stop.contains(&v));
    let mut used: FxHashSet<Value> = results.iter().map(|(_, v)| *v).collect();
    for (i, node) in joint.nodes.iter().enumerate() {
        if live[i] {
            used.extend(node.inputs.iter().map(|v| in_state.get(v).copied().unwrap_or(*v)));
        }
    }
    let mut map = FxHashMap::default();
    for (i, p) in joint.params.iter().enumerate() {
        let v = Value(i as u32);
        if used.contains(&v) {
            map.insert(v, back.param(p.name.clone(), p.binding, joint.ty(v).clone()));
        }
    }
    for (value, state) in &in_state {
        if let Some(&p) = map.get(state) {
            map.insert(*value, p);
        }
    }
    for (i, v) in saved.iter().enumerate() {
        let Port { name, binding } = kept_as(i);
        map.insert(*v, back.param(name, binding, joint.ty(*v).clone()));
    }
    copy_nodes(joint, &mut back, map, &|i| live[i], &results);
    (front, back)
}

fn node_of(defined: &[Option<usize>], v: Value) -> usize {
    defined[v.index()].unwrap_or(0)
}

/// Which nodes the roots need, not looking beyond values for which `stop` holds.
fn live_nodes(f: &Function, roots: impl Iterator<Item = Value>, stop: &dyn Fn(Value) -> bool) -> Vec<bool> {
    let defined = f.definitions();
    let mut live = vec![false; f.nodes.len()];
    let mut stack: Vec<Value> = roots.collect();
    while let Some(v) = stack.pop() {
        if stop(v) {
            continue;
        }
        if let Some(n) = defined[v.index()]
            && !std::mem::replace(&mut live[n], true)
        {
            stack.extend(&f.nodes[n].inputs);
        }
    }
    live
}

/// Copies the chosen nodes of `from` after the parameters of `to`. Values already in `map` keep
/// their place there.
fn copy_nodes(
    from: &Function,
    to: &mut Function,
    mut map: FxHashMap<Value, Value>,
    chosen: &dyn Fn(usize) -> bool,
    results: &[(Port, Value)],
) {
    for (i, node) in from.nodes.iter().enumerate() {
        if !chosen(i) {
            continue;
        }
        let inputs = node.inputs.iter().map(|v| map[v]).collect();
        let types = node.results().map(|r| from.ty(r).clone()).collect();
        let first = to.push(node.op.clone(), inputs, types);
        for (k, r) in node.results().enumerate() {
            map.entry(r).or_insert(Value(first.0 + k as u32));
        }
    }
    to.results = results.iter().map(|(n, v)| (n.clone(), map[v])).collect();
}

/// Which nodes the results need for which `keep` holds.
pub(crate) fn needed(f: &Function, keep: &dyn Fn(&Port) -> bool) -> Vec<bool> {
    live_nodes(f, f.results.iter().filter(|(n, _)| keep(n)).map(|(_, v)| *v), &|_| false)
}

/// The function without the nodes that no result needs, and with all its parameters.
pub(crate) fn prune_nodes(f: &Function) -> Function {
    let live = needed(f, &|_| true);
    let mut to = Function::new(f.name.clone());
    let mut map = FxHashMap::default();
    for (i, p) in f.params.iter().enumerate() {
        map.insert(Value(i as u32), to.param(p.name.clone(), p.binding, f.types[i].clone()));
    }
    copy_nodes(f, &mut to, map, &|i| live[i], &f.results);
    to
}

/// The function with only the results for which `keep` holds, and only the nodes they need.
pub fn prune(f: &Function, keep: &dyn Fn(&Port) -> bool) -> Function {
    let results: Vec<(Port, Value)> = f.results.iter().filter(|(n, _)| keep(n)).cloned().collect();
    let live = live_nodes(f, results.iter().map(|(_, v)| *v), &|_| false);
    let mut used: FxHashSet<Value> = results.iter().map(|(_, v)| *v).collect();
    used.extend(f.nodes.iter().zip(&live).filter(|(_, l)| **l).flat_map(|(n, _)| n.inputs.iter().copied()));
    let mut to = Function::new(f.name.clone());
    let mut map = FxHashMap::default();
    for (i, p) in f.params.iter().enumerate() {
        let v = Value(i as u32);
        if used.contains(&v) {
            map.insert(v, to.param(p.name.clone(), p.binding, f.ty(v).clone()));
        }
    }
    copy_nodes(f, &mut to, map, &|i| live[i], &results);
    to
}
