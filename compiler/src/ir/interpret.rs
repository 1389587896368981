//! The meaning of every operation: slow, obvious, in f64.
//!
//! *In*: a function and a tensor for each parameter. *Out*: its results, and how many multiply-adds
//! each node's products really executed. *Promise*: this is the oracle. Every sum runs in
//! increasing index order, every value is f64 (a cast to bf16 rounds, nothing else does), every
//! index is checked, and work beyond [`MOST_ELEMENTS`] or [`MOST_WORK`] is refused before it
//! starts. No input panics.
//!
//! Multiply-adds are counted where they happen, one by one in the innermost loops
//! (`Evaluation::dot`, `Evaluation::add_scaled` and the loop of `contract`), so that
//! [`mod@super::cost`] has something independent to agree with. Only matrix products count; see
//! there.

use super::cost::{self, CostError, Extents};
use super::verify::VerifyError;
use super::{DType, Dim, Function, Module, Node, Op, Port, Type, TypeError, Value, infer, verify_function};
use indexmap::IndexMap;
use std::borrow::Cow;
use thiserror::Error;

/// Most elements that the values of one call may have together (1 GiB of f64).
pub const MOST_ELEMENTS: u64 = 1 << 27;

/// Most multiply-adds and element-wise operations of one call: a minute or so.
pub const MOST_WORK: u128 = 1 << 36;

/// Elements with the sizes of their dimensions, slowest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes.
    pub dims: Vec<usize>,
    /// Elements in row-major order.
    pub data: Data,
}

/// Elements of a tensor. Storage types differ in rounding alone, which is in the values.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Elements of `f32` and `bf16` values.
    Float(Vec<f64>),
    /// Elements of `i32` values.
    Int(Vec<i32>),
}

impl Tensor {
    /// A float tensor.
    pub fn float(dims: &[usize], data: Vec<f64>) -> Self {
        Tensor { dims: dims.to_vec(), data: Data::Float(data) }
    }

    /// An integer tensor.
    pub fn int(dims: &[usize], data: Vec<i32>) -> Self {
        Tensor { dims: dims.to_vec(), data: Data::Int(data) }
    }

    /// An integer scalar: a depth, a cache row.
    pub fn index(i: i32) -> Self {
        Tensor::int(&[], vec![i])
    }

    /// Zeros of a type.
    pub fn zeros(module: &Module, ty: &Type) -> Self {
        let dims = sizes(module, &ty.dims);
        let n = dims.iter().product();
        match ty.dtype {
            DType::I32 => Tensor::int(&dims, vec![0; n]),
            DType::F32 | DType::Bf16 | DType::E4m3 | DType::Packed(_) => Tensor::float(&dims, vec![0.0; n]),
        }
    }

    /// The elements of a float tensor; none of an integer one.
    pub fn floats(&self) -> &[f64] {
        match &self.data {
            Data::Float(data) => data,
            Data::Int(_) => &[],
        }
    }

    /// The elements of an integer tensor; none of a float one.
    pub fn ints(&self) -> &[i32] {
        match &self.data {
            Data::Int(data) => data,
            Data::Float(_) => &[],
        }
    }

    /// Whether it can be a value of this type: kind, sizes and number of elements.
    pub fn fits(&self, module: &Module, ty: &Type) -> bool {
        let (float, len) = match &self.data {
            Data::Float(data) => (true, data.len()),
            Data::Int(data) => (false, data.len()),
        };
        float == ty.dtype.is_float()
            && self.dims.len() == ty.dims.len()
            && self.dims.iter().zip(&ty.dims).all(|(&n, &d)| n as u64 == module.size(d))
            && len as u64 == module.elements(&ty.dims)
    }

    fn show(&self) -> String {
        let (kind, len) = match &self.data {
            Data::Float(data) => ("float", data.len()),
            Data::Int(data) => ("int", data.len()),
        };
        format!("{kind}{:?} with {len} elements", self.dims)
    }
}

/// Why a function cannot be evaluated.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum InterpretError {
    /// The function is not well formed.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The operands do not fit the operation.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// There is not one argument a parameter.
    #[error("@{function} takes {expected} arguments, not {found}")]
    Arguments {
        /// The function.
        function: String,
        /// Its number of parameters.
        expected: usize,
        /// The number of arguments.
        found: usize,
    },
    /// An argument is not of its parameter's type.
    #[error("@{function}, %{param} is {expected}, the argument {found}")]
    Argument {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
        /// Its type.
        expected: String,
        /// The tensor given.
        found: String,
    },
    /// No argument has the parameter's name.
    #[error("@{function} has no argument for %{param}")]
    Missing {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
    },
    /// An index, offset or target is out of range.
    #[error("@{function}, `{node}`: {problem}")]
    Index {
        /// The function.
        function: String,
        /// The node as printed.
        node: String,
        /// The index and its range.
        problem: String,
    },
    /// Too large for the interpreter.
    #[error("@{function} has {elements} elements; the interpreter takes {MOST_ELEMENTS}")]
    Elements {
        /// The function.
        function: String,
        /// Elements of all values.
        elements: u64,
    },
    /// Too much for the interpreter.
    #[error("@{function} takes {work} operations; the interpreter does {MOST_WORK}")]
    Work {
        /// The function.
        function: String,
        /// Multiply-adds and element-wise operations.
        work: u128,
    },
    /// Too much to count.
    #[error(transparent)]
    Cost(#[from] CostError),
}

/// The values and the work of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    /// Every value of the function, parameters first.
    pub values: Vec<Tensor>,
    /// Multiply-adds of matrix products executed by each node.
    pub multiply_adds: Vec<u64>,
}

/// Evaluates a function on one tensor a parameter, in order; its results by name.
pub fn interpret(
    module: &Module,
    function: &Function,
    args: &[Tensor],
) -> Result<Vec<(String, Tensor)>, InterpretError> {
    check(module, function)?;
    let args: Vec<&Tensor> = args.iter().collect();
    Ok(run(module, function, &args, &mut |_, _, _| {})?.0)
}

/// An observer of every node after its evaluation, with its operands and results; results may be
/// changed.
pub type Observe<'a> = &'a mut dyn FnMut(&Node, &[&Tensor], &mut [Tensor]);

/// As [`interpret`](interpret()), with every value and count.
pub fn execute(module: &Module, function: &Function, args: &[Tensor]) -> Result<Execution, InterpretError> {
    check(module, function)?;
    let args: Vec<&Tensor> = args.iter().collect();
    let (values, multiply_adds) = walk_nodes(module, function, &args, &mut |_, _, _| {})?;
    Ok(Execution { values: values.into_iter().map(Cow::into_owned).collect(), multiply_adds })
}

/// Whether a function can be evaluated at all: it is well formed, and small enough.
pub fn check(module: &Module, function: &Function) -> Result<(), InterpretError> {
    verify_function(module, function)?;
    check_work(module, function)
}

/// Results by name, and the multiply-adds of each node.
pub type Ran = (Vec<(String, Tensor)>, Vec<u64>);

/// As [`interpret`](interpret()), of a function that was [checked](check()) once and is evaluated
/// often; observed. Also gives the multiply-adds of each of its nodes.
pub fn run(
    module: &Module,
    function: &Function,
    args: &[&Tensor],
    observe: Observe,
) -> Result<Ran, InterpretError> {
    let (values, multiply_adds) = walk_nodes(module, function, args, observe)?;
    let result = |(port, v): &(Port, Value)| (port.name.clone(), Tensor::clone(&values[v.index()]));
    Ok((function.results.iter().map(result).collect(), multiply_adds))
}

/// Every value of a function, and the multiply-adds of each node.
type Walked<'a> = (Vec<Cow<'a, Tensor>>, Vec<u64>);

fn walk_nodes<'a>(
    module: &Module,
    function: &Function,
    args: &[&'a Tensor],
    observe: Observe,
) -> Result<Walked<'a>, InterpretError> {
    check_args(module, function, args)?;
    let mut values: Vec<Cow<'a, Tensor>> = args.iter().map(|x| Cow::Borrowed(*x)).collect();
    let mut multiply_adds = vec![];
    for node in &function.nodes {
        let types: Vec<&Type> = node.inputs.iter().map(|&v| function.ty(v)).collect();
        let operands: Vec<&Tensor> = node.inputs.iter().map(|v| &*values[v.index()]).collect();
        let results = &function.types[node.first.index()..node.first.index() + node.count as usize];
        let mut evaluation =
            Evaluation { module, types: &types, operands: &operands, results, multiply_adds: 0 };
        let mut tensors = evaluation.run(&node.op).map_err(|problem| InterpretError::Index {
            function: function.name.clone(),
            node: module.show_node(function, node),
            problem,
        })?;
        multiply_adds.push(evaluation.multiply_adds);
        observe(node, &operands, &mut tensors);
        values.extend(tensors.into_iter().map(Cow::Owned));
    }
    Ok((values, multiply_adds))
}

/// Evaluates one operation on operands of these types: its results and the multiply-adds executed.
pub fn evaluate(
    module: &Module,
    op: &Op,
    types: &[&Type],
    operands: &[Tensor],
) -> Result<(Vec<Tensor>, u64), InterpretError> {
    let mut function = Function::new(op.name());
    let mut inputs = vec![];
    for (i, &ty) in types.iter().enumerate() {
        inputs.push(function.param(format!("operand{i}"), super::Binding::Value, ty.clone()));
    }
    let results = infer(module, op, types)?;
    function.push(op.clone(), inputs, results);
    let Execution { mut values, multiply_adds } = execute(module, &function, operands)?;
    Ok((values.split_off(types.len()), multiply_adds.iter().sum()))
}

/// Orders tensors by the parameters of a function.
pub fn bind(function: &Function, tensors: &IndexMap<String, Tensor>) -> Result<Vec<Tensor>, InterpretError> {
    let missing =
        |param: &str| InterpretError::Missing { function: function.name.clone(), param: param.into() };
    function.params.iter().map(|p| tensors.get(&p.name).cloned().ok_or_else(|| missing(&p.name))).collect()
}

fn check_work(module: &Module, function: &Function) -> Result<(), InterpretError> {
    let name = || function.name.clone();
    let elements = function.types.iter().fold(0u64, |sum, ty| sum.saturating_add(module.elements(&ty.dims)));
    if elements > MOST_ELEMENTS {
        return Err(InterpretError::Elements { function: name(), elements });
    }
    let cost = cost::total(module, function, |_| Extents::default())?;
    let work = (cost.flops / 2).saturating_add(cost.elementwise);
    if work > MOST_WORK {
        return Err(InterpretError::Work { function: name(), work });
    }
    Ok(())
}

fn check_args(module: &Module, function: &Function, args: &[&Tensor]) -> Result<(), InterpretError> {
    if args.len() != function.params.len() {
        return Err(InterpretError::Arguments {
            function: function.name.clone(),
            expected: function.params.len(),
            found: args.len(),
        });
    }
    for ((arg, param), ty) in args.iter().zip(&function.params).zip(&function.types) {
        if !arg.fits(module, ty) {
            return Err(InterpretError::Argument {
                function: function.name.clone(),
                param: param.name.clone(),
                expected: module.show(ty),
                found: arg.show(),
            });
        }
    }
    Ok(())
}

// --- indices -------------------------------------------------------------------------------------

fn sizes(module: &Module, dims: &[Dim]) -> Vec<usize> {
    dims.iter().map(|&d| module.size(d) as usize).collect()
}

/// Elements between neighbours along each of `loops` in a tensor of these dimensions; 0 where it
/// lacks the dimension, which is all that broadcasting is.
pub(crate) fn strides(module: &Module, dims: &[Dim], loops: &[Dim]) -> Vec<usize> {
    let stride = |d: &Dim| match dims.iter().position(|x| x == d) {
        Some(axis) => sizes(module, &dims[axis + 1..]).iter().product(),
        None => 0,
    };
    loops.iter().map(stride).collect()
}

/// Visits every index of nested loops, the last innermost, with the offset it has in each of `N`
/// tensors.
pub(crate) fn walk<const N: usize>(
    sizes: &[usize],
    strides: [Vec<usize>; N],
    mut visit: impl FnMut([usize; N]),
) {
    if sizes.contains(&0) {
        return;
    }
    let mut index = vec![0; sizes.len()];
    let mut at = [0; N];
    loop {
        visit(at);
        let mut axis = sizes.len();
        loop {
            let Some(next) = axis.checked_sub(1) else { return };
            axis = next;
            index[axis] += 1;
            for (at, strides) in at.iter_mut().zip(&strides) {
                *at += strides[axis];
            }
            if index[axis] < sizes[axis] {
                break;
            }
            for (at, strides) in at.iter_mut().zip(&strides) {
                *at -= strides[axis] * sizes[axis];
            }
            index[axis] = 0;
        }
    }
}

/// `index` as an offset into `bound` things called `what`.
pub(crate) fn checked(index: i32, bound: usize, what: &str) -> Result<usize, String> {
    usize::try_from(index)
        .ok()
        .filter(|&i| i < bound)
        .ok_or_else(|| format!("{what} {index} is not among 0..{bound}"))
}

// --- scalars -------------------------------------------------------------------------------------

/// The nearest bfloat16, ties to even.
pub fn round_bf16(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // bf16 has 8 significant bits and exponents from -126; below, the spacing stays that of the
    // smallest normal.
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(-126);
    let spacing = 2f64.powi(exponent - 7);
    let rounded = (x / spacing).round_ties_even() * spacing;
    if rounded.abs() >= 2f64.powi(128) { f64::INFINITY.copysign(x) } else { rounded }
}

/// `c·tanh(x/c)`; `x` without a cap.
pub(crate) fn softcap(cap: Option<f64>, x: f64) -> f64 {
    cap.map_or(x, |c| c * (x / c).tanh())
}

/// Derivative of [`softcap`] where its value is `y`.
pub(crate) fn softcap_slope(cap: Option<f64>, y: f64) -> f64 {
    cap.map_or(1.0, |c| 1.0 - (y / c) * (y / c))
}

/// `ln Σ e^x`; -inf of nothing.
pub(crate) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// `Σ a·b` that is no matrix product's.
pub(crate) fn inner_product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

// --- operations ----------------------------------------------------------------------------------

/// One operation at work. Operands fit their types and the types fit the operation:
/// [`check`](check()) has said so.
pub(crate) struct Evaluation<'a> {
    pub module: &'a Module,
    pub types: &'a [&'a Type],
    pub operands: &'a [&'a Tensor],
    /// Types of the results.
    pub results: &'a [Type],
    /// Multiply-adds of matrix products executed so far.
    pub multiply_adds: u64,
}

impl<'a> Evaluation<'a> {
    /// The results.
    fn run(&mut self, op: &Op) -> Result<Vec<Tensor>, String> {
        let data = op.operation().interpret(self)?;
        let tensor = |(data, ty): (Data, &Type)| Tensor { dims: self.sizes_of(&ty.dims), data };
        Ok(data.into_iter().zip(self.results).map(tensor).collect())
    }

    pub fn floats(&self, i: usize) -> &'a [f64] {
        self.operands[i].floats()
    }

    pub fn ints(&self, i: usize) -> &'a [i32] {
        self.operands[i].ints()
    }

    /// Sizes of an operand.
    pub fn sizes(&self, i: usize) -> &'a [usize] {
        &self.operands[i].dims
    }

    /// Sizes of dimensions.
    pub fn sizes_of(&self, dims: &[Dim]) -> Vec<usize> {
        sizes(self.module, dims)
    }

    /// Size of an operand's last dimension.
    pub fn last(&self, i: usize) -> usize {
        self.sizes(i).last().copied().unwrap_or(1)
    }

    pub fn size(&self, dim: Dim) -> usize {
        self.module.size(dim) as usize
    }

    /// `a · b` of a matrix product.
    pub fn dot(&mut self, a: &[f64], b: &[f64]) -> f64 {
        let mut sum = 0.0;
        for (a, b) in a.iter().zip(b) {
            sum += a * b;
            self.multiply_adds += 1;
        }
        sum
    }

    /// `to += factor · x` of a matrix product.
    pub fn add_scaled(&mut self, to: &mut [f64], factor: f64, x: &[f64]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to += factor * x;
            self.multiply_adds += 1;
        }
    }

    /// A function of each element of a float operand.
    pub fn map(&self, i: usize, f: impl Fn(f64) -> f64) -> Vec<Data> {
        vec![Data::Float(self.floats(i).iter().map(|&x| f(x)).collect())]
    }

    /// The rows of each group by the offsets in an operand, checked against `slots`.
    pub fn groups(&self, operand: usize, slots: usize) -> Result<Vec<std::ops::Range<usize>>, String> {
        let offsets = self.ints(operand);
        let mut groups = vec![];
        for pair in offsets.windows(2) {
            let begin = checked(pair[0], slots + 1, "offset")?;
            let end = checked(pair[1], slots + 1, "offset")?;
            if begin > end {
                return Err(format!("offset {end} follows offset {begin}: they must not fall"));
            }
            groups.push(begin..end);
        }
        if offsets.first() != Some(&0) {
            return Err(format!("offsets begin with {}, not with 0", offsets[0]));
        }
        Ok(groups)
    }
}
