//! A step as loops over one workspace: what devices run.
//!
//! *In*: the function of a step, or of its adjoint. *Out*: a [`Program`]. *Promise*: each loop
//! reads what stands before the place it writes to, and every value that leaves the step is dense.
//!
//! Dimensions along which nothing in the step is joined, as heads mostly are, are taken out: a task
//! has one element of each of them.

use super::Step;
use crate::ir::{Binary, Dim, Dims, Function, Module, Node, Op, Reduce, Type, Unary, Value};
use crate::op::{Bits, Concat, Contract, Reduction, Rms, RmsGrad, Split};
use smallvec::smallvec;
use std::collections::HashMap;

/// A step on a workspace of floats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Floats of the workspace.
    pub size: u64,
    /// Sizes of the dimensions along which a task has one element.
    pub parallel: Vec<u64>,
    /// The inputs of the step.
    pub inputs: Vec<Port>,
    /// Loops in order.
    pub codes: Vec<Code>,
    /// Its results.
    pub outputs: Vec<Port>,
}

/// A value that enters or leaves a step: dense in the workspace, and in a row of an operand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Port {
    /// Its first float in the workspace.
    pub at: u64,
    /// Sizes and, in the row, strides of its dimensions, slowest first.
    pub axes: Vec<(u64, u64)>,
    /// In the row, the strides of the dimensions along which a task has one element.
    pub parallel: Vec<u64>,
    /// Elements of the row.
    pub row: u64,
}

/// A loop of a [`Code`]: its size, and elements from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Axis {
    /// Steps.
    pub size: u64,
    /// In the result; none where it joins.
    pub to: u64,
    /// In the first operand.
    pub a: u64,
    /// In the second operand.
    pub b: u64,
}

/// The operation of a [`Code`] on each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
    /// A number.
    Fill(Bits),
    /// The first operand.
    Copy,
    /// A function of the first operand.
    Unary(Unary),
    /// A function of both.
    Binary(Binary),
    /// The sum of the first operand.
    Sum,
    /// The sum of the products of both.
    Product,
    /// The largest of the first operand.
    Max,
}

/// Nested loops.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    /// The loops, the innermost last.
    pub axes: Vec<Axis>,
    /// Their operation.
    pub how: How,
    /// First element of the result.
    pub to: u64,
    /// First element of the first operand.
    pub a: u64,
    /// First element of the second operand.
    pub b: u64,
}

impl How {
    /// Whether it joins elements.
    pub fn joins(self) -> bool {
        match self {
            How::Sum | How::Product | How::Max => true,
            How::Fill(_) | How::Copy | How::Unary(_) | How::Binary(_) => false,
        }
    }
}

impl Code {
    /// Elements of the result.
    pub fn results(&self) -> u64 {
        self.axes.iter().filter(|x| x.to > 0).map(|x| x.size).product()
    }
}

impl Port {
    /// Elements of it that a task has.
    pub fn elements(&self) -> u64 {
        self.axes.iter().map(|(size, _)| size).product()
    }
}

impl Program {
    /// Tasks of a sequence.
    pub fn tasks(&self) -> u64 {
        self.parallel.iter().product()
    }

    /// That of a step: states, rows, constants -> outputs, states.
    pub fn forward(module: &Module, step: &Step) -> Result<Program, String> {
        let f = step.function();
        Build::program(module, f, &parallel(&[f]))
    }

    /// The programs of a step (only its states are wanted) and of its adjoint, over the same tasks.
    pub fn backward(module: &Module, step: &Step, adjoint: &Function) -> Result<[Program; 2], String> {
        // All parameters stay, because they number the operands.
        let mut states = step.function().clone();
        states.results.retain(|(p, _)| p.binding.is_state());
        let states = crate::autodiff::prune_nodes(&states);
        let parallel = parallel(&[&states, adjoint]);
        Ok([Build::program(module, &states, &parallel)?, Build::program(module, adjoint, &parallel)?])
    }
}

/// The leading dimensions of the first state along which nothing in the functions is joined, which
/// all of their states and results have. A matrix of each is left to a task, which is worth one.
fn parallel(functions: &[&Function]) -> Dims {
    let states = |f: &Function| {
        let state = |i: &usize| f.params[*i].binding.is_state();
        (0..f.params.len()).filter(state).map(|i| Value(i as u32)).collect::<Vec<Value>>()
    };
    let Some(&first) = states(functions[0]).first() else { return smallvec![] };
    let dims = &functions[0].ty(first).dims;
    let most = states(functions[0]).iter().map(|v| functions[0].ty(*v).dims.len()).max().unwrap_or(0);
    let free = |d: &Dim| {
        functions.iter().all(|f| {
            let mut values = states(f).into_iter().chain(f.results.iter().map(|(_, v)| *v));
            values.all(|v| f.ty(v).has(*d)) && f.nodes.iter().all(|node| !joined(f, node).contains(d))
        })
    };
    dims.iter().copied().take_while(free).take(most.saturating_sub(2)).collect()
}

/// The dimensions along which a node joins or moves elements.
fn joined(f: &Function, node: &Node) -> Dims {
    let dims = |k: usize| &f.ty(node.inputs[k]).dims;
    let last = |n: usize| dims(0)[dims(0).len().saturating_sub(n)..].to_vec();
    if let Op::Reduce(Reduction { over, .. }) | Op::Contract(Contract { over }) = &node.op {
        over.clone()
    } else if let Op::Rms(Rms { inner, .. }) | Op::RmsGrad(RmsGrad { inner, .. }) = node.op {
        last(inner).into()
    } else if matches!(node.op, Op::Softmax | Op::SoftmaxGrad | Op::Split(_) | Op::Concat(_)) {
        last(1).into()
    } else if let Op::Reshape(_) = node.op {
        let (from, to) = (dims(0), &f.ty(node.first).dims);
        let same = from.iter().zip(to).take_while(|(a, b)| a == b).count();
        [&from[same..], &to[same..]].concat().into()
    } else {
        smallvec![]
    }
}

/// A value in the workspace.
#[derive(Clone, Debug)]
struct View {
    at: u64,
    /// Its dimensions, without those taken out, and their strides.
    axes: Vec<(Dim, u64)>,
}

impl View {
    fn stride(&self, d: Dim) -> u64 {
        self.axes.iter().find(|(x, _)| *x == d).map_or(0, |(_, stride)| *stride)
    }
}

struct Build<'a> {
    module: &'a Module,
    f: &'a Function,
    parallel: &'a [Dim],
    program: Program,
    views: HashMap<Value, View>,
    /// Products that a sum makes itself.
    products: HashMap<Value, (View, View)>,
}

impl<'a> Build<'a> {
    fn program(module: &Module, f: &Function, parallel: &[Dim]) -> Result<Program, String> {
        let program =
            Program { parallel: parallel.iter().map(|&d| module.size(d)).collect(), ..Program::default() };
        let mut build =
            Build { module, f, parallel, program, views: HashMap::new(), products: HashMap::new() };
        for i in 0..f.params.len() as u32 {
            let ty = f.ty(Value(i));
            let view = build.room(&build.own(&ty.dims));
            build.program.inputs.push(build.port(ty, view.at));
            build.views.insert(Value(i), view);
        }
        for node in &f.nodes {
            build.node(node)?;
        }
        for (_, v) in &f.results {
            // A parameter that leaves has a place of its own, as its old place may be written
            // first.
            let dims = build.own(&f.ty(*v).dims);
            let fresh = build.dense(*v) && v.index() >= f.params.len();
            let at = if fresh { build.view(*v)?.at } else { build.copied(*v, &dims)?.at };
            let port = build.port(f.ty(*v), at);
            build.program.outputs.push(port);
        }
        match build.program.size {
            n if n <= i32::MAX as u64 => Ok(build.program),
            n => Err(format!("a step would need {n} floats, more than devices count")),
        }
    }

    fn size(&self, d: Dim) -> u64 {
        self.module.size(d)
    }

    /// The dimensions along which a task has more than one element.
    fn own(&self, dims: &[Dim]) -> Dims {
        dims.iter().copied().filter(|d| !self.parallel.contains(d)).collect()
    }

    fn own_of(&self, v: Value) -> Dims {
        self.own(&self.f.ty(v).dims)
    }

    fn port(&self, ty: &Type, at: u64) -> Port {
        let stride = |d: Dim| {
            let place = ty.dims.iter().position(|x| *x == d);
            place.map_or(0, |place| self.module.elements(&ty.dims[place + 1..]))
        };
        Port {
            at,
            axes: self.own(&ty.dims).into_iter().map(|d| (self.size(d), stride(d))).collect(),
            parallel: self.parallel.iter().map(|&d| stride(d)).collect(),
            row: self.module.elements(&ty.dims),
        }
    }

    /// A new dense place.
    fn room(&mut self, dims: &[Dim]) -> View {
        let at = self.program.size;
        self.program.size = at.saturating_add(self.module.elements(dims).max(1));
        View { at, axes: self.strides(dims) }
    }

    fn strides(&self, dims: &[Dim]) -> Vec<(Dim, u64)> {
        (0..dims.len()).map(|k| (dims[k], self.module.elements(&dims[k + 1..]))).collect()
    }

    fn view(&self, v: Value) -> Result<View, String> {
        self.views.get(&v).cloned().ok_or_else(|| "a value is read before it is made".into())
    }

    fn dense(&self, v: Value) -> bool {
        let dims = self.own_of(v);
        self.views.get(&v).is_some_and(|view| view.axes == self.strides(&dims))
    }

    /// Adds loops over `loops`, those that the result lacks being joined.
    fn code(&mut self, how: How, loops: &[Dim], to: &View, a: Option<&View>, b: Option<&View>) {
        let axis = |&d: &Dim| Axis {
            size: self.size(d),
            to: to.stride(d),
            a: a.map_or(0, |a| a.stride(d)),
            b: b.map_or(0, |b| b.stride(d)),
        };
        let axes = loops.iter().map(axis).collect();
        let at = |view: Option<&View>| view.map_or(0, |view| view.at);
        self.program.codes.push(Code { axes: arranged(axes, how), how, to: to.at, a: at(a), b: at(b) });
    }

    fn unary(&mut self, how: How, dims: &[Dim], a: &View) -> View {
        let to = self.room(dims);
        self.code(how, dims, &to, Some(a), None);
        to
    }

    fn binary(&mut self, f: Binary, dims: &[Dim], a: &View, b: &View) -> View {
        let to = self.room(dims);
        self.code(How::Binary(f), dims, &to, Some(a), Some(b));
        to
    }

    fn number(&mut self, x: f64) -> View {
        let to = self.room(&[]);
        self.code(How::Fill(Bits(x)), &[], &to, None, None);
        to
    }

    /// The dimensions that are left of `dims` when those of `over` are joined.
    fn join(&mut self, how: How, dims: &[Dim], over: &[Dim], a: &View, b: Option<&View>) -> View {
        let left: Dims = dims.iter().copied().filter(|d| !over.contains(d)).collect();
        let to = self.room(&left);
        self.code(how, dims, &to, Some(a), b);
        to
    }

    fn copied(&mut self, v: Value, dims: &[Dim]) -> Result<View, String> {
        let view = self.view(v)?;
        Ok(self.unary(How::Copy, dims, &view))
    }

    /// The one node that reads a value, where nothing else does.
    fn reader(&self, v: Value) -> Option<&'a Node> {
        let f = self.f;
        let mut readers = f.nodes.iter().filter(|n| n.inputs.contains(&v));
        let reader = readers.next()?;
        let alone = readers.next().is_none() && f.results.iter().all(|(_, r)| *r != v);
        alone.then_some(reader)
    }

    /// The operand that a sum with zeros shows in more dimensions.
    fn spread(&self, node: &Node) -> Option<Value> {
        let zero = |v: Value| self.f.nodes.iter().any(|n| matches!(n.op, Op::Zeros(_)) && n.first == v);
        match (&node.op, &node.inputs[..]) {
            (Op::Binary(Binary::Add), &[zeros, x]) if zero(zeros) => Some(x),
            (Op::Binary(Binary::Add), &[x, zeros]) if zero(zeros) => Some(x),
            _ => None,
        }
    }

    fn node(&mut self, node: &Node) -> Result<(), String> {
        let (v, dims) = (node.first, self.own_of(node.first));
        if let Op::Binary(Binary::Mul) = node.op
            && let Some(Op::Reduce(Reduction { how: Reduce::Sum | Reduce::Mean, .. })) =
                self.reader(v).map(|n| &n.op)
        {
            let pair = (self.view(node.inputs[0])?, self.view(node.inputs[1])?);
            self.products.insert(v, pair);
            return Ok(());
        }
        let view = if let Some(x) = self.spread(node) {
            let view = self.view(x)?;
            View { at: view.at, axes: dims.iter().map(|&d| (d, view.stride(d))).collect() }
        } else if let Op::Constant(x) = node.op {
            self.number(x.0)
        } else if let Op::Zeros(_) = node.op {
            let zero = self.number(0.0);
            View { at: zero.at, axes: dims.iter().map(|&d| (d, 0)).collect() }
        } else if let Op::StopGradient = node.op {
            self.view(node.inputs[0])?
        } else if let Op::Unary(f) = node.op {
            let x = self.view(node.inputs[0])?;
            self.unary(How::Unary(f), &dims, &x)
        } else if let Op::Binary(f) = node.op {
            let (a, b) = (self.view(node.inputs[0])?, self.view(node.inputs[1])?);
            self.binary(f, &dims, &a, &b)
        } else if let Op::Reduce(reduction) = &node.op {
            self.reduce(node, reduction)?
        } else if let Op::Contract(Contract { over }) = &node.op {
            let (a, b) = (self.view(node.inputs[0])?, self.view(node.inputs[1])?);
            let loops = [&dims[..], over].concat();
            self.join(How::Product, &loops, over, &a, Some(&b))
        } else if let Op::Arrange(_) = node.op {
            let view = self.view(node.inputs[0])?;
            View { at: view.at, axes: dims.iter().map(|&d| (d, view.stride(d))).collect() }
        } else if let Op::Reshape(_) = node.op {
            let x = node.inputs[0];
            let from = self.own_of(x);
            let at = if self.dense(x) { self.view(x)?.at } else { self.copied(x, &from)?.at };
            View { at, axes: self.strides(&dims) }
        } else if let Op::Split(Split(parts)) = &node.op {
            return self.split(node, parts);
        } else if let Op::Concat(Concat(d)) = node.op {
            self.concat(node, &dims, d)?
        } else {
            self.row(node, &dims)?
        };
        self.views.insert(v, view);
        Ok(())
    }

    fn reduce(&mut self, node: &Node, reduction: &Reduction) -> Result<View, String> {
        let x = node.inputs[0];
        let (dims, over) = (self.own_of(x), &reduction.over);
        let sum = match (reduction.how, self.products.get(&x).cloned()) {
            (Reduce::Max, _) => {
                let a = self.view(x)?;
                return Ok(self.join(How::Max, &dims, over, &a, None));
            }
            (_, Some((a, b))) => self.join(How::Product, &dims, over, &a, Some(&b)),
            (_, None) => {
                let a = self.view(x)?;
                self.join(How::Sum, &dims, over, &a, None)
            }
        };
        if reduction.how == Reduce::Sum {
            return Ok(sum);
        }
        let share = self.number(1.0 / self.module.elements(over) as f64);
        let left = self.own_of(node.first);
        Ok(self.binary(Binary::Mul, &left, &sum, &share))
    }

    fn split(&mut self, node: &Node, parts: &[Dim]) -> Result<(), String> {
        let x = self.view(node.inputs[0])?;
        let Some((&(_, stride), rows)) = x.axes.split_last() else {
            return Err("a split of a number".into());
        };
        let mut at = x.at;
        for (v, &part) in node.results().zip(parts) {
            let axes = rows.iter().copied().chain([(part, stride)]).collect();
            self.views.insert(v, View { at, axes });
            at += stride * self.size(part);
        }
        Ok(())
    }

    fn concat(&mut self, node: &Node, dims: &[Dim], _: Dim) -> Result<View, String> {
        let to = self.room(dims);
        let mut at = to.at;
        for &x in &node.inputs {
            let (view, own) = (self.view(x)?, self.own_of(x));
            let Some(&last) = own.last() else { return Err("a number is joined".into()) };
            let rows = to.axes.iter().take(own.len() - 1).copied();
            let part = View { at, axes: rows.chain([(last, 1)]).collect() };
            self.code(How::Copy, &own, &part, Some(&view), None);
            at += self.size(last);
        }
        Ok(to)
    }

    /// Norms and softmax, as the loops that they are.
    fn row(&mut self, node: &Node, dims: &[Dim]) -> Result<View, String> {
        let inner = |n: usize| dims[dims.len().saturating_sub(n)..].to_vec();
        let view = |b: &Self, k: usize| b.view(node.inputs[k]);
        if let Op::Rms(Rms { inner: n, eps }) | Op::RmsGrad(RmsGrad { inner: n, eps }) = node.op {
            let (x, over) = (view(self, 0)?, inner(n));
            let rows: Dims = dims[..dims.len() - over.len()].into();
            let share = self.number(1.0 / self.module.elements(&over) as f64);
            let eps = self.number(eps);
            let square = self.join(How::Product, dims, &over, &x, Some(&x));
            let mean = self.binary(Binary::Mul, &rows, &square, &share);
            let mean = self.binary(Binary::Add, &rows, &mean, &eps);
            let root = self.unary(How::Unary(Unary::Rsqrt), &rows, &mean);
            if let Op::Rms(_) = node.op {
                return Ok(self.binary(Binary::Mul, dims, &x, &root));
            }
            let d = view(self, 1)?;
            let along = self.join(How::Product, dims, &over, &x, Some(&d));
            let along = self.binary(Binary::Mul, &rows, &along, &root);
            let along = self.binary(Binary::Mul, &rows, &along, &root);
            let along = self.binary(Binary::Mul, &rows, &along, &share);
            let back = self.binary(Binary::Mul, dims, &x, &along);
            let difference = self.binary(Binary::Sub, dims, &d, &back);
            return Ok(self.binary(Binary::Mul, dims, &difference, &root));
        }
        let over = inner(1);
        if let Op::Softmax = node.op {
            let x = view(self, 0)?;
            let most = self.join(How::Max, dims, &over, &x, None);
            let difference = self.binary(Binary::Sub, dims, &x, &most);
            let e = self.unary(How::Unary(Unary::Exp), dims, &difference);
            let sum = self.join(How::Sum, dims, &over, &e, None);
            return Ok(self.binary(Binary::Div, dims, &e, &sum));
        }
        if let Op::SoftmaxGrad = node.op {
            let (y, d) = (view(self, 0)?, view(self, 1)?);
            let mean = self.join(How::Product, dims, &over, &y, Some(&d));
            let difference = self.binary(Binary::Sub, dims, &d, &mean);
            return Ok(self.binary(Binary::Mul, dims, &y, &difference));
        }
        Err(format!(
            "a step has no `{}`: it takes element-wise functions, sums, products, norms, softmax and changes of shape and order",
            node.op.name()
        ))
    }
}

/// Loops in the order in which they run, neighbours that are one loop joined, the one last whose
/// elements are adjacent.
fn arranged(axes: Vec<Axis>, how: How) -> Vec<Axis> {
    let mut kept: Vec<Axis> = vec![];
    for axis in axes.into_iter().filter(|x| x.size != 1) {
        let follows = |a: u64, b: u64| a == b * axis.size;
        match kept.last_mut() {
            Some(x)
                if follows(x.to, axis.to)
                    && follows(x.a, axis.a)
                    && follows(x.b, axis.b)
                    && (x.to == 0) == (axis.to == 0) =>
            {
                *x = Axis { size: x.size * axis.size, ..axis };
            }
            _ => kept.push(axis),
        }
    }
    if !how.joins() {
        return kept;
    }
    // Of loops that join the inner one has adjacent elements, or else that of a result.
    let (results, joined): (Vec<Axis>, Vec<Axis>) = kept.into_iter().partition(|x| x.to > 0);
    let adjacent = |x: &Axis| x.a <= 1 && x.b <= 1;
    if joined.last().is_some_and(adjacent) || !results.last().is_some_and(|x| x.to == 1 && adjacent(x)) {
        return [results, joined].concat();
    }
    let (last, outer) =
        results.split_last().map_or((&[][..], &[][..]), |(l, o)| (std::slice::from_ref(l), o));
    [outer, &joined, last].concat()
}

/// The dimensions of a function's values, for tests of what it takes out.
#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Heads are taken out of a delta rule, whose rows have them all.
    #[test]
    fn heads_are_tasks() {
        let text = "dims { h 3  v 4  k 5 }
            func @step {
              state %S : f32[h, v, k]
              input %k : f32[h, k]
              input %v : f32[h, v]
              %0 = mul %S, %k : f32[h, v, k]
              %1 = sum %0 over [k] : f32[h, v]
              %2 = sub %v, %1 : f32[h, v]
              %3 = zeros [h, v, k] : f32[h, v, k]
              %4 = add %3, %2 : f32[h, v, k]
              %5 = mul %4, %k : f32[h, v, k]
              %6 = add %S, %5 : f32[h, v, k]
              return o = %1, S = %6
            }";
        let module = crate::ir::parse(text).unwrap_or_else(|e| panic!("{e}"));
        let step = Step::from(module.functions["step"].clone());
        step.check(&module).unwrap();
        let program = Program::forward(&module, &step).unwrap();
        assert_eq!(program.parallel, [3]);
        // The product is summed as it is made, and what is spread is not written down.
        let how: Vec<How> =
            program.codes.iter().map(|c| c.how).filter(|h| !matches!(h, How::Fill(_))).collect();
        assert_eq!(
            how,
            [How::Product, How::Binary(Binary::Sub), How::Binary(Binary::Mul), How::Binary(Binary::Add)]
        );
        let places: HashSet<u64> = program.codes.iter().map(|c| c.to).collect();
        assert_eq!(places.len(), program.codes.len());
        let adjoint = step.adjoint(&module).unwrap();
        let [states, back] = Program::backward(&module, &step, adjoint.function()).unwrap();
        assert_eq!((&states.parallel, &back.parallel), (&vec![3], &vec![3]));
    }
}
