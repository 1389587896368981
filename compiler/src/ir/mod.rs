//! The tensor graph: what an architecture computes, one function per distinct layer body.
//!
//! *In*: functions built by [`crate::lower`] or read back from text. *Out*: the same, rewritten,
//! differentiated and scheduled. *Promise*: between passes every function satisfies
//! [`verify`](verify()); [`interpret`](interpret()) is the meaning of every operation, in f64.
//!
//! Shapes are lists of **named dimensions**. A dimension is a name with a size in the module's
//! table, so the graph is independent of batch and sequence length and prints as people write it.
//! Dimensions' names decide everything that axis numbers decide elsewhere: a [`Op::Contract`] sums
//! over a name, a [`Op::Binary`] broadcasts the operand that lacks a name. No value has the same
//! dimension twice.
//!
//! Look next at [`crate::op`] (the operations), [`text`] (the printed form and its parser),
//! [`mod@verify`], [`mod@interpret`].

pub mod cost;
pub mod infer;
pub mod interpret;
pub mod random;
pub mod text;
pub mod verify;

pub use crate::op::{
    ABSENT, Attention, Binary, Chosen, Mask, Op, Positions, Reduce, Rope, RopeScaling, Unary,
};
pub use cost::{Cost, CostError, Extents, cost};
pub use infer::{TypeError, infer};
pub use interpret::{InterpretError, Tensor, interpret};
pub use text::{ParseError, parse};
pub use verify::{VerifyError, verify, verify_function};

pub use crate::bind::{Binding, Index, Input, Lifetime, Of, Output, PerToken, Port};

use crate::format::Packed;
use indexmap::IndexMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// A named dimension: an index into [`Module::dims`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dim(pub u32);

/// Storage of an element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit float.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// 32-bit integer: token ids, positions, expert indices, offsets.
    I32,
    /// A matrix of e4m3, by rows of whole tiles of 128 numbers: a byte for each number, and after
    /// all of them the exponent of each tile's scale, plus 127, in a byte. Those of the first tile
    /// of every row come first, then those of the second.
    E4m3,
    /// Numbers of a weight as its file packs them.
    Packed(Packed),
}

/// Numbers of a row of [`DType::E4m3`] that share a scale.
pub const TILE: u64 = 128;

impl DType {
    /// Elements that are stored together: one, or those of a block.
    pub fn unit(self) -> u64 {
        match self {
            DType::F32 | DType::I32 | DType::Bf16 => 1,
            DType::E4m3 => TILE,
            DType::Packed(packed) => packed.unit() as u64,
        }
    }

    /// Bytes of a unit.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 => 2,
            DType::E4m3 => TILE + 1,
            DType::Packed(packed) => packed.bytes() as u64,
        }
    }

    /// Bytes of `elements` elements, in whole units.
    pub fn room(self, elements: u64) -> u64 {
        elements.div_ceil(self.unit()).saturating_mul(self.bytes())
    }

    /// Whether gradients exist.
    pub fn is_float(self) -> bool {
        self != DType::I32
    }
}

/// Dimensions of a shape, slowest first; most shapes have no more than four.
pub type Dims = SmallVec<[Dim; 4]>;

/// Element type and shape of a value; no dimension is a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Type {
    /// Storage.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub dims: Dims,
}

impl Type {
    /// A float type.
    pub fn f32(dims: &[Dim]) -> Self {
        Type { dtype: DType::F32, dims: dims.into() }
    }

    /// An integer type.
    pub fn i32(dims: &[Dim]) -> Self {
        Type { dtype: DType::I32, dims: dims.into() }
    }

    /// Whether the type has the dimension.
    pub fn has(&self, dim: Dim) -> bool {
        self.dims.contains(&dim)
    }

    /// The dimensions of `self` that are not in `over`, in order.
    pub fn without(&self, over: &[Dim]) -> Dims {
        self.dims.iter().copied().filter(|d| !over.contains(d)).collect()
    }
}

/// A value of a function: first its parameters, then the results of its nodes, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

impl Value {
    /// As an index into [`Function::types`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// The operation.
    pub op: Op,
    /// Its operands, all defined earlier.
    pub inputs: Vec<Value>,
    /// Its first result; the others follow.
    pub first: Value,
    /// How many results it has.
    pub count: u32,
}

impl Node {
    /// Its results.
    pub fn results(&self) -> impl Iterator<Item = Value> + use<> {
        (self.first.0..self.first.0.saturating_add(self.count)).map(Value)
    }
}

/// A function in SSA form.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Parameters; the first `params.len()` values.
    pub params: Vec<Port>,
    /// Type of every value.
    pub types: Vec<Type>,
    /// Operations in order of definition.
    pub nodes: Vec<Node>,
    /// Results.
    pub results: Vec<(Port, Value)>,
}

impl Function {
    /// An empty function.
    pub fn new(name: impl Into<String>) -> Self {
        Function { name: name.into(), params: vec![], types: vec![], nodes: vec![], results: vec![] }
    }

    /// Adds a parameter. All parameters come before all nodes.
    pub fn param(&mut self, name: impl Into<String>, binding: Binding, ty: Type) -> Value {
        debug_assert!(self.nodes.is_empty(), "parameters come first");
        self.params.push(Port::new(name, binding));
        self.types.push(ty);
        Value(self.types.len() as u32 - 1)
    }

    /// Type of a value.
    pub fn ty(&self, value: Value) -> &Type {
        &self.types[value.index()]
    }

    /// Adds a node whose result types are `types`; [`crate::build::Builder`] infers them.
    pub fn push(&mut self, op: Op, inputs: Vec<Value>, types: Vec<Type>) -> Value {
        let first = Value(self.types.len() as u32);
        self.nodes.push(Node { op, inputs, first, count: types.len() as u32 });
        self.types.extend(types);
        first
    }

    /// The value of a parameter by name.
    pub fn find_param(&self, name: &str) -> Option<Value> {
        self.params.iter().position(|p| p.name == name).map(|i| Value(i as u32))
    }

    /// The value of a result by name.
    pub fn find_result(&self, name: &str) -> Option<Value> {
        self.results.iter().find(|(p, _)| p.name == name).map(|(_, v)| *v)
    }

    /// The parameter of that binding.
    pub fn param_of(&self, binding: Binding) -> Option<Value> {
        self.params.iter().position(|p| p.binding == binding).map(|i| Value(i as u32))
    }

    /// The state parameter that the result of that port updates.
    pub fn state_of(&self, port: &Port) -> Option<Value> {
        if port.binding.is_state() { self.find_param(&port.name) } else { None }
    }

    /// Index of the node that defines each value; `None` for parameters.
    pub fn definitions(&self) -> Vec<Option<usize>> {
        let mut defined = vec![None; self.types.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for r in node.results() {
                defined[r.index()] = Some(i);
            }
        }
        defined
    }

    /// The results that each value is, by their numbers.
    pub fn returns(&self) -> Vec<Vec<usize>> {
        let mut returns = vec![vec![]; self.types.len()];
        for (k, (_, v)) in self.results.iter().enumerate() {
            returns[v.index()].push(k);
        }
        returns
    }

    /// Indices of the nodes that read each value, each once, in order.
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut readers: Vec<Vec<usize>> = vec![vec![]; self.types.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            for v in &node.inputs {
                if readers[v.index()].last() != Some(&i) {
                    readers[v.index()].push(i);
                }
            }
        }
        readers
    }
}

/// Functions over one table of dimensions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Module {
    /// Dimension names and sizes, shared by copies: rewriting copies the table for every function.
    pub dims: Arc<IndexMap<String, u64>>,
    /// Functions by name.
    pub functions: IndexMap<String, Function>,
}

impl Module {
    /// The dimension of that name, made with `size` where it is new.
    ///
    /// # Panics
    /// Where the name exists with another size: a bug of the caller, which chooses names.
    pub fn dim(&mut self, name: impl Into<String>, size: u64) -> Dim {
        let name = name.into();
        let index = match self.dims.get_index_of(&name) {
            Some(index) => index,
            None => Arc::make_mut(&mut self.dims).insert_full(name, size).0,
        };
        assert_eq!(self.dims[index], size, "dimension {index} made twice with different sizes");
        Dim(index as u32)
    }

    /// Takes in the dimensions of `own`, which began as a copy of this module: those that both made
    /// are one, and `functions` over `own` are renumbered.
    pub fn adopt<'f>(&mut self, own: &Module, functions: impl Iterator<Item = &'f mut Function>) {
        if Arc::ptr_eq(&self.dims, &own.dims) {
            return;
        }
        let map: Dims = own.dims.iter().map(|(name, &size)| self.dim(name.as_str(), size)).collect();
        if map.iter().enumerate().all(|(i, d)| d.0 as usize == i) {
            return;
        }
        for f in functions {
            text::each_dim_of(f, &mut |d| *d = map[d.0 as usize]);
        }
    }

    /// Size of a dimension.
    pub fn size(&self, dim: Dim) -> u64 {
        self.dims[dim.0 as usize]
    }

    /// Name of a dimension.
    pub fn name(&self, dim: Dim) -> &str {
        self.dims.get_index(dim.0 as usize).map(|(n, _)| n.as_str()).unwrap_or("?")
    }

    /// Product of the sizes of dimensions; `u64::MAX` where it is larger, which
    /// [`verify`](verify()) refuses in any value.
    pub fn elements(&self, dims: &[Dim]) -> u64 {
        dims.iter().fold(1, |product: u64, &d| product.saturating_mul(self.size(d)))
    }
}
