//! Building functions: parameters may appear at any time, types are inferred, the first mistake is
//! kept for the end.

use crate::ir::{
    self, Binary, Binding, DType, Dim, Dims, Function, Index, Module, Node, Op, Port, Reduce, Type,
    TypeError, Unary, Value,
};
use crate::op::linear_attention::outside::Place;
use crate::op::{Arrange, Cast, Constant, Contract, Reduction, Reshape, Zeros};
use indexmap::IndexMap;
use std::ops::Range;

/// Builds one [`Function`] of a module.
///
/// A builder hands out values freely; a parameter made after nodes is moved before them by
/// [`Builder::finish`]. An operation that does not fit its operands is remembered and reported
/// there, so that lowering reads like a formula.
pub struct Builder<'m> {
    /// The module whose dimensions are used.
    pub module: &'m mut Module,
    name: String,
    params: Vec<(Port, Type)>,
    nodes: Vec<Node>,
    types: Vec<Type>,
    results: Vec<(Port, Value)>,
    error: Option<TypeError>,
    marks: Marks,
}

/// Facts about a function for people: no pass decides by them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Marks {
    /// Names that values have in the text.
    pub names: IndexMap<Value, String>,
    /// Ranges of nodes that a part of the text became, and its name; a part inside another stands
    /// before it.
    pub parts: Vec<(Range<usize>, String)>,
    /// The same of the step of a recurrence, by its first result.
    pub steps: IndexMap<Value, Marks>,
    /// Values that can be looked at and changed from outside ([`crate::probe`]), by name.
    pub points: Vec<(String, Value)>,
}

/// Marks values that stand for parameters until `finish` numbers them.
const PARAM: u32 = 1 << 31;

/// The number that a value has in a function of `params` parameters.
fn numbered(v: Value, params: u32) -> Value {
    if v.0 & PARAM != 0 { Value(v.0 & !PARAM) } else { Value(v.0 + params) }
}

impl<'m> Builder<'m> {
    /// A builder of a function of that name.
    pub fn new(module: &'m mut Module, name: impl Into<String>) -> Self {
        Builder {
            module,
            name: name.into(),
            params: vec![],
            nodes: vec![],
            types: vec![],
            results: vec![],
            error: None,
            marks: Marks::default(),
        }
    }

    /// Calls a value by the name that the text gives it, unless it has one.
    pub fn call(&mut self, v: Value, name: &str) {
        self.marks.names.entry(v).or_insert_with(|| name.to_string());
    }

    /// How many nodes there are.
    pub fn place(&self) -> usize {
        self.nodes.len()
    }

    /// Says that the nodes from that place on are what a part of the text became.
    pub fn part(&mut self, from: usize, name: &str) {
        self.marks.parts.push((from..self.nodes.len(), name.to_string()));
    }

    /// Names a value that can be looked at and changed from outside; a name that is taken gets a
    /// number.
    pub fn point(&mut self, name: String, v: Value) {
        let points = &self.marks.points;
        let free = |name: &String| points.iter().all(|(taken, _)| taken != name);
        let numbered = (2..).map(|n| format!("{name}.{n}"));
        let name = std::iter::once(name.clone()).chain(numbered).find(free);
        self.marks.points.extend(name.map(|name| (name, v)));
    }

    /// Keeps the marks of the step of the recurrence that gives a value.
    pub fn explain(&mut self, v: Value, step: Marks) {
        self.marks.steps.insert(v, step);
    }

    /// Everything known of values and nodes, with the values as [`Builder::finish`] numbers them.
    pub fn marks(&self) -> Marks {
        let number = |v: Value| numbered(v, self.params.len() as u32);
        let names = self.marks.names.iter().map(|(v, name)| (number(*v), name.clone())).collect();
        let steps = self.marks.steps.iter().map(|(v, marks)| (number(*v), marks.clone())).collect();
        let points = self.marks.points.iter().map(|(name, v)| (name.clone(), number(*v))).collect();
        Marks { names, parts: self.marks.parts.clone(), steps, points }
    }

    /// The parameter of that name, made where it is new.
    pub fn param(&mut self, name: &str, binding: Binding, ty: Type) -> Value {
        if let Some(i) = self.params.iter().position(|(p, _)| p.name == name) {
            return Value(i as u32 | PARAM);
        }
        self.params.push((Port::new(name, binding), ty));
        Value((self.params.len() - 1) as u32 | PARAM)
    }

    /// An `i32` scalar that the program's loops supply.
    pub fn index(&mut self, name: &str, index: Index) -> Value {
        self.param(name, Binding::Index(index), Type::i32(&[]))
    }

    /// The operation whose first result a value is.
    fn node(&self, v: Value) -> Option<&Node> {
        let at = self.nodes.binary_search_by_key(&v.0, |n| n.first.0).ok()?;
        self.nodes.get(at)
    }

    /// Type of a value.
    pub fn ty(&self, v: Value) -> &Type {
        if v.0 & PARAM != 0 { &self.params[(v.0 & !PARAM) as usize].1 } else { &self.types[v.index()] }
    }

    /// Dimensions of a value.
    pub fn dims(&self, v: Value) -> Dims {
        self.ty(v).dims.clone()
    }

    /// Dimensions of a value but the last.
    pub fn rows(&self, v: Value) -> Dims {
        let mut dims = self.dims(v);
        dims.pop();
        dims
    }

    /// Adds an operation with several results.
    pub fn ops(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Vec<Value> {
        let op = op.into();
        let operands: Vec<&Type> = inputs.iter().map(|&v| self.ty(v)).collect();
        let types = match ir::infer(self.module, &op, &operands) {
            Ok(types) => types,
            Err(e) => {
                self.error.get_or_insert(e);
                // Any types will do: the function is never used. Eight cover the operation with the
                // most results.
                return vec![inputs.first().copied().unwrap_or(Value(0)); 8];
            }
        };
        let first = Value(self.types.len() as u32);
        let count = types.len() as u32;
        self.types.extend(types);
        self.nodes.push(Node { op, inputs: inputs.to_vec(), first, count });
        (first.0..first.0 + count).map(Value).collect()
    }

    /// The value of `make`; where it makes none, no operation of it is left.
    pub fn attempt<T>(&mut self, make: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let (nodes, types) = (self.nodes.len(), self.types.len());
        let made = make(self);
        if made.is_none() {
            self.nodes.truncate(nodes);
            self.types.truncate(types);
        }
        made
    }

    /// Adds an operation with one result.
    pub fn op(&mut self, op: impl Into<Op>, inputs: &[Value]) -> Value {
        self.ops(op, inputs)[0]
    }

    /// A number.
    pub fn constant(&mut self, x: f64) -> Value {
        self.op(Constant(x), &[])
    }

    /// Element-wise function.
    pub fn unary(&mut self, f: Unary, x: Value) -> Value {
        self.op(Op::Unary(f), &[x])
    }

    /// `a + b`
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.op(Binary::Add, &[a, b])
    }

    /// `a - b`
    pub fn sub(&mut self, a: Value, b: Value) -> Value {
        self.op(Binary::Sub, &[a, b])
    }

    /// `a · b`, element by element
    pub fn mul(&mut self, a: Value, b: Value) -> Value {
        self.op(Binary::Mul, &[a, b])
    }

    /// `a / b`
    pub fn div(&mut self, a: Value, b: Value) -> Value {
        self.op(Binary::Div, &[a, b])
    }

    /// `c · x`; `x` itself where `c` is 1.
    pub fn scale(&mut self, x: Value, c: f64) -> Value {
        if c == 1.0 {
            return x;
        }
        let c = self.constant(c);
        self.mul(x, c)
    }

    /// `c · x`, where there is a `c`.
    pub fn scaled(&mut self, x: Value, c: Option<f64>) -> Value {
        c.map_or(x, |c| self.scale(x, c))
    }

    /// `c · tanh(x / c)`
    pub fn softcap(&mut self, x: Value, c: Option<f64>) -> Value {
        let Some(c) = c else { return x };
        let x = self.scale(x, 1.0 / c);
        let x = self.unary(Unary::Tanh, x);
        self.scale(x, c)
    }

    /// Sum over the dimensions `over` of both.
    pub fn contract(&mut self, a: Value, b: Value, over: &[Dim]) -> Value {
        self.op(Contract { over: over.into() }, &[a, b])
    }

    /// Reduction over dimensions.
    pub fn reduce(&mut self, how: Reduce, x: Value, over: &[Dim]) -> Value {
        self.op(Reduction { how, over: over.into() }, &[x])
    }

    /// Same elements, other dimensions.
    pub fn reshape(&mut self, x: Value, dims: &[Dim]) -> Value {
        if *self.ty(x).dims == *dims { x } else { self.op(Reshape(dims.into()), &[x]) }
    }

    /// Its elements in this order of dimensions, repeated along those that it lacks.
    pub fn arrange(&mut self, x: Value, dims: &[Dim]) -> Value {
        if *self.ty(x).dims == *dims { x } else { self.op(Arrange { to: dims.into() }, &[x]) }
    }

    /// The value with no gradient.
    pub fn stop_gradient(&mut self, x: Value) -> Value {
        self.op(Op::StopGradient, &[x])
    }

    /// Zeros.
    pub fn zeros(&mut self, ty: &Type) -> Value {
        let z = self.op(Zeros(ty.dims.clone()), &[]);
        if ty.dtype == DType::F32 { z } else { self.op(Cast(ty.dtype), &[z]) }
    }

    /// Returns a value. A name alone is a value of the caller.
    pub fn result(&mut self, port: impl Into<Port>, v: Value) {
        self.results.push((port.into(), v));
    }

    /// The function, parameters first.
    pub fn finish(self) -> Result<Function, TypeError> {
        if let Some(e) = self.error {
            return Err(e);
        }
        let shift = self.params.len() as u32;
        let number = |v: Value| numbered(v, shift);
        let (params, mut types): (Vec<_>, Vec<_>) = self.params.into_iter().unzip();
        types.extend(self.types);
        let nodes = self
            .nodes
            .into_iter()
            .map(|n| Node { inputs: n.inputs.into_iter().map(number).collect(), first: number(n.first), ..n })
            .collect();
        let results = self.results.into_iter().map(|(n, v)| (n, number(v))).collect();
        Ok(Function { name: self.name, params, types, nodes, results })
    }
}

impl Place for Builder<'_> {
    type Value = Value;

    fn make(&mut self, op: Op, inputs: &[Value]) -> Option<Value> {
        let operands: Vec<&Type> = inputs.iter().map(|&v| self.ty(v)).collect();
        ir::infer(self.module, &op, &operands).ok()?;
        Some(self.op(op, inputs))
    }

    fn dims(&self, of: Value) -> Option<Dims> {
        Some(Builder::dims(self, of))
    }

    fn number(&self, of: Value) -> Option<f64> {
        match self.node(of).map(|n| &n.op) {
            Some(Op::Constant(Constant(x))) => Some(*x),
            Some(Op::Zeros(_)) => Some(0.0),
            _ => None,
        }
    }

    fn operands(&self, of: Value, op: &Op) -> Option<Vec<Value>> {
        self.node(of).filter(|n| n.op == *op).map(|n| n.inputs.clone())
    }
}
