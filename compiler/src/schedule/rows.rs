//! One row kernel from the row nodes of a level.

use super::launch::Emit;
use super::need::Need;
use super::{Kind, LocalOperand, Place, View, inner_reduction, row_dims};
use crate::CompileError;
use crate::ir::{DType, Dim, Dims, Node, Reduce, Type, Value};
use crate::op::Class;
use crate::program::{Broadcast, Kernel, RowInput, RowKernel, RowOp, RowOutput, RowStore};
use rustc_hash::FxHashMap;

/// Form of an operation in a row kernel.
pub(crate) trait RowWork {
    /// Adds the node's work; the array of its result, unless its results are finished.
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError>;
}

/// A row kernel under construction.
pub(crate) struct RowBuilder<'e, 'a> {
    emit: &'e mut Emit<'a>,
    rows: &'e [Dim],
    nodes: &'e [usize],
    /// The node at work.
    node: usize,
    kernel: RowKernel,
    operands: Vec<LocalOperand>,
    outputs: Vec<LocalOperand>,
    /// Arrays of the values of this kernel.
    arrays: FxHashMap<Value, u32>,
    /// Inputs already loaded, by value.
    inputs: FxHashMap<Value, u32>,
}

impl<'e, 'a> RowBuilder<'e, 'a> {
    pub(super) fn new(emit: &'e mut Emit<'a>, rows: &'e [Dim], nodes: &'e [usize]) -> Self {
        let count = emit.elements(rows);
        let kernel = RowKernel { rows: count, inputs: vec![], ops: vec![], lengths: vec![], outputs: vec![] };
        RowBuilder {
            emit,
            rows,
            nodes,
            node: 0,
            kernel,
            operands: vec![],
            outputs: vec![],
            arrays: FxHashMap::default(),
            inputs: FxHashMap::default(),
        }
    }

    pub(super) fn build(mut self, need: Need) -> Result<(), CompileError> {
        for &i in self.nodes {
            self.node(i)?;
        }
        if self.kernel.outputs.is_empty() {
            return Ok(());
        }
        let first = self.nodes[0];
        let operands = [self.operands, self.outputs].concat();
        self.emit.launch_some(Kernel::Rows(self.kernel), operands, first, need)
    }

    fn bug<T>(&self, what: &str) -> Result<T, CompileError> {
        Err(CompileError::Schedule(format!("{}: row kernel: {what}", self.emit.f.name)))
    }

    pub(crate) fn ty(&self, v: Value) -> &'a Type {
        self.emit.f.ty(v)
    }

    /// Elements of one row of a value; a value without the row dimensions is the same for every
    /// row.
    fn length(&self, v: Value) -> Result<(u64, bool), CompileError> {
        let dims = &self.ty(v).dims;
        if dims.starts_with(self.rows) {
            // A kernel of one row holds whole vectors.
            return Ok((self.emit.elements(&dims[self.rows.len()..]), !self.rows.is_empty()));
        }
        if dims.iter().any(|d| self.rows.contains(d)) {
            return self.bug("an operand has some of the row dimensions");
        }
        Ok((self.emit.elements(dims), false))
    }

    pub(crate) fn op(&mut self, op: RowOp, length: u64) -> u32 {
        self.kernel.ops.push(op);
        self.kernel.lengths.push(length);
        self.kernel.ops.len() as u32 - 1
    }

    fn input(&mut self, v: Value, kind: RowInput, operand: LocalOperand) -> u32 {
        if let Some(&i) = self.inputs.get(&v) {
            return i;
        }
        self.kernel.inputs.push(kind);
        self.operands.push(operand);
        let i = self.kernel.inputs.len() as u32 - 1;
        self.inputs.insert(v, i);
        i
    }

    fn view(&mut self, v: Value, length: u64) -> Result<LocalOperand, CompileError> {
        let view = self.emit.in_memory(v)?;
        let dims = &self.ty(v).dims;
        // A view strided by the rows of its own shape must be read by those rows.
        if view.stride != 0 && (row_dims(dims) != self.rows || !dims.starts_with(self.rows)) {
            return self.bug("strided rows read by other rows");
        }
        Ok(LocalOperand::View(View { stride: if view.stride == 0 { length } else { view.stride }, ..view }))
    }

    /// The array of a value: computed here, loaded, or a number.
    pub(crate) fn array(&mut self, v: Value) -> Result<u32, CompileError> {
        if let Some(&a) = self.arrays.get(&v) {
            return Ok(a);
        }
        let (length, per_row) = self.length(v)?;
        let node = self.emit.defined[v.index()].map(|n| (n, self.emit.f.nodes[n].op.class()));
        let a = match node {
            Some((n, Class::Number(number))) if self.emit.kinds[n] == Kind::Free => self.op(number, length),
            _ => {
                let dtype = self.ty(v).dtype;
                let kind = if per_row {
                    RowInput::Row { length, dtype }
                } else {
                    RowInput::Shared { length, dtype }
                };
                let operand = self.view(v, length)?;
                let input = self.input(v, kind, operand);
                self.op(RowOp::Load { input }, length)
            }
        };
        self.arrays.insert(v, a);
        Ok(a)
    }

    pub(crate) fn ints(&mut self, v: Value) -> Result<u32, CompileError> {
        let (length, per_row) = self.length(v)?;
        if !per_row {
            return self.bug("integers that are the same for every row");
        }
        let operand = self.view(v, length)?;
        Ok(self.input(v, RowInput::RowInts { length }, operand))
    }

    pub(crate) fn index(&mut self, v: Value) -> Result<u32, CompileError> {
        match self.emit.f.params.get(v.index()) {
            Some(p) if p.binding.is_index() => Ok(self.input(v, RowInput::Index, LocalOperand::Index(v.0))),
            _ => self.bug("an index that is no parameter"),
        }
    }

    /// Position of the small one of two shapes in the large one.
    pub(crate) fn broadcast(&self, large: &[Dim], small: &[Dim]) -> Result<Broadcast, CompileError> {
        let strip =
            |dims: &[Dim]| dims.iter().copied().filter(|d| !self.rows.contains(d)).collect::<Vec<_>>();
        let (large, small) = (strip(large), strip(small));
        if small.is_empty() {
            return Ok(Broadcast { outer: 1, size: 1, inner: self.emit.elements(&large) });
        }
        let Some(at) = large.windows(small.len()).position(|w| w == small) else {
            return self.bug("a small operand whose dimensions are not adjacent in the large one");
        };
        Ok(Broadcast {
            outer: self.emit.elements(&large[..at]),
            size: self.emit.elements(&small),
            inner: self.emit.elements(&large[at + small.len()..]),
        })
    }

    pub(crate) fn last(&self, v: Value) -> u64 {
        self.ty(v).dims.last().map_or(1, |&d| self.emit.size(d))
    }

    fn node(&mut self, i: usize) -> Result<(), CompileError> {
        self.node = i;
        let node = &self.emit.f.nodes[i];
        let array = match node.op.class() {
            Class::View { row, .. } | Class::Element(row) | Class::Row { row, .. } => row.row(self, node)?,
            Class::Identity => Some(self.array(node.inputs[0])?),
            Class::Number(_) | Class::Gather(_) | Class::Anchor(..) => {
                return self.bug("a node that is no row operation");
            }
        };
        if let Some(array) = array {
            self.finish(node.first, array);
        }
        Ok(())
    }

    /// Elements of one row of a value.
    pub(crate) fn length_of(&self, v: Value) -> Result<u64, CompileError> {
        Ok(self.length(v)?.0)
    }

    /// The dimensions of the rows.
    pub(crate) fn rows(&self) -> &'e [Dim] {
        self.rows
    }

    /// Their number.
    pub(crate) fn row_count(&self) -> u64 {
        self.kernel.rows
    }

    /// Size of a dimension.
    pub(crate) fn size(&self, d: Dim) -> u64 {
        self.emit.size(d)
    }

    /// Which inner dimensions a reduction joins over, and whether it joins all rows too.
    pub(crate) fn inner_reduction(
        &self,
        x: Value,
        how: Reduce,
        over: &[Dim],
    ) -> Result<(Dims, bool), CompileError> {
        inner_reduction(self.emit.f, x, how, over)
    }

    /// Where the new value `v` is written, and whether it is added there.
    pub(crate) fn destination(&mut self, v: Value) -> (View, bool) {
        self.emit.destination(v, true)
    }

    /// Length of what one norm covers.
    pub(crate) fn group(&self, v: Value, inner: usize) -> u64 {
        let dims = &self.ty(v).dims;
        self.emit.elements(&dims[dims.len() - inner..])
    }

    /// Makes the array known, and stores it where something else reads it.
    pub(crate) fn finish(&mut self, v: Value, array: u32) {
        self.arrays.insert(v, array);
        if !self.emit.leaves_kernel(v, self.node) {
            return;
        }
        let (view, add) = self.destination(v);
        let dtype = self.ty(v).dtype;
        self.store(array, if add { RowStore::AddRow } else { RowStore::Row }, view, dtype);
    }

    pub(crate) fn store(&mut self, array: u32, store: RowStore, view: View, dtype: DType) {
        let stride = match store {
            RowStore::Row | RowStore::AddRow => self.kernel.lengths[array as usize],
            RowStore::Sum | RowStore::AddSum => 0,
        };
        debug_assert!(!matches!(view.place, Place::Param(_)));
        self.kernel.outputs.push(RowOutput { array, dtype, store });
        self.outputs.push(LocalOperand::View(View { stride, ..view }));
    }
}
