//! Components that a specification defines: their typed graph as IR.
//!
//! A value of the graph is a value of the IR with its dimensions in the order of the graph; one of
//! each token has the dimensions of tokens before them. Weights are named by the value that they
//! are written in.

// What lowers `attend` reads it.
#[allow(dead_code)]
mod attend;

use super::*;
use dreamc_dsl::define::graph::{DimId, Function as Of, Graph, Node, Region, ValueId};

impl Lowering for spec::Defined {
    fn fits(&self, _: u64) -> Result<(), CompileError> {
        Ok(())
    }

    fn lower(&self, l: &mut Lower, c: Owner, _: Kind, n: Value) -> Result<Value, CompileError> {
        let graph = self.graph(&l.architecture.model).map_err(|_| {
            CompileError::Unsupported("a definition whose sizes do not fit: `dreamc check` says where")
        })?;
        let rows = l.b.rows(n);
        let dims = graph.dims.iter().map(|dim| l.own_dim(c, &dim.name, dim.size)).collect();
        let mut defined = Defining { graph: &graph, owner: c, input: n, rows, dims, values: vec![] };
        l.region(&mut defined, &graph.region)
    }
}

/// A definition while it is lowered.
pub(super) struct Defining<'g> {
    graph: &'g Graph,
    owner: Owner,
    /// The row of each token.
    input: Value,
    /// Dimensions of tokens.
    rows: Vec<Dim>,
    /// The dimensions of the graph.
    dims: Vec<Dim>,
    /// The values so far.
    values: Vec<Value>,
}

impl Defining<'_> {
    /// The value of the IR.
    pub(super) fn value(&self, value: ValueId) -> Value {
        self.values[value.0 as usize]
    }

    /// The dimension of the IR.
    pub(super) fn dim(&self, dim: DimId) -> Dim {
        self.dims[dim.0 as usize]
    }
}

impl Lower<'_> {
    /// A dimension of a definition; `hidden` is the stream's.
    fn own_dim(&mut self, c: Owner, name: &str, size: u64) -> Dim {
        if name == "hidden" { self.hidden() } else { self.dim_of(c, name, size) }
    }

    /// The value that a definition returns.
    fn region(&mut self, d: &mut Defining, region: &Region) -> Result<Value, CompileError> {
        for node in &region.nodes {
            let value = self.defined_node(d, node)?;
            d.values.push(value);
        }
        let result = region.results.first().ok_or(CompileError::Unsupported("a definition of nothing"))?;
        Ok(d.value(*result))
    }

    /// One value of a definition.
    fn defined_node(&mut self, d: &mut Defining, node: &Node) -> Result<Value, CompileError> {
        match &node.function {
            Of::Input => Ok(d.input),
            Of::Number(number) => Ok(self.b.constant(*number)),
            Of::Fact(_)
            | Of::Noise(_)
            | Of::Weight(_)
            | Of::Unary(_)
            | Of::Binary(_)
            | Of::Where
            | Of::Outer
            | Of::Reduce(..)
            | Of::Softmax(_)
            | Of::Norm { .. }
            | Of::Dot(_)
            | Of::Linear(_)
            | Of::Split(..)
            | Of::Merge(..)
            | Of::Join(..)
            | Of::Slice { .. }
            | Of::Top { .. }
            | Of::Pick
            | Of::Rope { .. }
            | Of::Stop => Err(CompileError::Unsupported("this function of a definition")),
            Of::Shift(_) => Err(CompileError::Unsupported("`shift` in a definition")),
            Of::Conv(_) => Err(CompileError::Unsupported("`conv` in a definition")),
            Of::Running => Err(CompileError::Unsupported("`running` in a definition")),
            Of::Attend(_) => Err(CompileError::Unsupported("`attend` in a definition")),
            Of::Recurrence(_) | Of::Emitted(_) => {
                Err(CompileError::Unsupported("`recurrence` in a definition"))
            }
            Of::DepthAttend { .. } => Err(CompileError::Unsupported("`depth_attend` in a definition")),
            Of::Earlier(_) => Err(CompileError::Unsupported("`earlier` in a definition")),
            Of::ValueOf(..) => Err(CompileError::Unsupported("a value of another component")),
            Of::Apply(_) => Err(CompileError::Unsupported("a component in a definition")),
            Of::Read(_)
            | Of::State(_)
            | Of::Score
            | Of::QueryPlace
            | Of::KeyPlace
            | Of::Head(_)
            | Of::AtQuery(_)
            | Of::AtKey(_)
            | Of::Look(_) => Err(CompileError::Unsupported("a value of a region outside it")),
        }
    }
}
