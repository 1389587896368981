//! Launches of a function: row kernels and anchors level by level, operands resolved to memory.

use super::need::Need;
use super::recompute::Placed;
use super::rows::RowBuilder;
use super::{Bind, Kind, LocalLaunch, LocalOperand, Place, Scheduled, Temp, View, row_dims};
use crate::CompileError;
use crate::ir::{DType, Dim, Function, Module, Node, Op, Type, Value};
use crate::op::kernel::Of;
use crate::op::{Class, Moved};
use crate::program::{
    Kernel, KernelKind, Layout, Role, RowInput, RowKernel, RowOp, RowOutput, RowStore, Slot, kernel,
};
use rustc_hash::FxHashMap;

/// State of emitting a function.
pub(super) struct Emit<'a> {
    pub module: &'a Module,
    pub f: &'a Function,
    pub kinds: &'a [Kind],
    pub levels: &'a [u32],
    needs: &'a [Need],
    pub defined: Vec<Option<usize>>,
    /// Nodes that read a value.
    readers: Vec<Vec<usize>>,
    /// Results that a value is.
    returns: Vec<Vec<usize>>,
    bind: &'a [Bind],
    /// Memory of values that have some.
    memory: FxHashMap<Value, View>,
    temps: Vec<Temp>,
    launches: Vec<LocalLaunch>,
    /// Results whose memory has been written.
    done: Vec<bool>,
}

pub(super) fn emit(module: &Module, placed: &Placed, bind: &[Bind]) -> Result<Scheduled, CompileError> {
    let Placed { f, needs, kinds, levels } = placed;
    let memory = (0..f.params.len() as u32).map(|i| (Value(i), View::whole(Place::Param(i)))).collect();
    let mut at_level = vec![vec![]; levels.iter().max().map_or(0, |&most| most as usize + 1)];
    levels.iter().enumerate().for_each(|(i, &level)| at_level[level as usize].push(i));
    let mut emit = Emit {
        module,
        f,
        kinds,
        levels,
        needs,
        defined: f.definitions(),
        readers: f.readers(),
        returns: f.returns(),
        bind,
        memory,
        temps: vec![],
        launches: vec![],
        done: vec![false; bind.len()],
    };
    for nodes in at_level {
        emit.row_kernels(&nodes)?;
        for i in nodes {
            if kinds[i] == Kind::Anchor {
                emit.anchor(i, &f.nodes[i])?;
            }
        }
    }
    emit.remaining_results()?;
    emit.lifetimes();
    Ok(Scheduled { launches: emit.launches, temps: emit.temps })
}

impl<'a> Emit<'a> {
    pub(super) fn size(&self, d: Dim) -> u64 {
        self.module.size(d)
    }

    pub(super) fn elements(&self, dims: &[Dim]) -> u64 {
        self.module.elements(dims)
    }

    fn node_of(&self, v: Value) -> Option<(usize, &'a Node)> {
        let f = self.f;
        self.defined[v.index()].map(|n| (n, &f.nodes[n]))
    }

    fn bug<T>(&self, what: impl Into<String>) -> Result<T, CompileError> {
        Err(CompileError::Schedule(format!("{}: {}", self.f.name, what.into())))
    }

    fn temp(&mut self, v: Value) -> View {
        let ty = self.f.ty(v);
        let bytes = ty.dtype.room(self.elements(&ty.dims));
        self.temps.push(Temp { bytes, dtype: ty.dtype, first: usize::MAX, last: 0 });
        View::whole(Place::Temp(self.temps.len() as u32 - 1))
    }

    /// The result that the new value `v` is written to, and whether it is added there. A value that
    /// is several results, as the gradient of two biases of one sum, is read for the others.
    fn result(&self, v: Value, may_add: bool) -> Option<(usize, bool)> {
        let results = &self.returns[v.index()];
        let used = results.len() > 1 || !self.readers[v.index()].is_empty();
        results.iter().filter(|&&i| !self.done[i]).find_map(|&i| match self.bind[i] {
            Bind::Store => Some((i, false)),
            Bind::Add if may_add && !used => Some((i, true)),
            Bind::Add | Bind::State(_) | Bind::Ignore => None,
        })
    }

    /// Where the new value `v` is written, and whether it is added there. A value that is a result
    /// and read inside the function too is written to the result's memory and read from there.
    pub(super) fn destination(&mut self, v: Value, may_add: bool) -> (View, bool) {
        match self.result(v, may_add) {
            Some((i, add)) => {
                self.done[i] = true;
                let view = View::whole(Place::Result(i as u32));
                if !add {
                    self.memory.insert(v, view);
                }
                (view, add)
            }
            None => {
                let view = self.temp(v);
                self.memory.insert(v, view);
                (view, false)
            }
        }
    }

    /// Memory of a value, looking through views; zeros and numbers are written on
    /// demand.
    pub(super) fn in_memory(&mut self, v: Value) -> Result<View, CompileError> {
        if let Some(view) = self.memory.get(&v) {
            return Ok(*view);
        }
        let Some((n, node)) = self.node_of(v) else { return self.bug("a parameter without memory") };
        match node.op.class() {
            Class::View { moved: Moved::Reshaped(to), .. } => {
                let base = self.in_memory(node.inputs[0])?;
                let from = &self.f.ty(node.inputs[0]).dims;
                if base.stride != 0 && self.elements(row_dims(from)) != self.elements(row_dims(to)) {
                    return self.adjacent(node.inputs[0]);
                }
                Ok(base)
            }
            Class::View { moved: Moved::Cut(parts), .. } if self.kinds[n] == Kind::View => {
                let base = self.in_memory(node.inputs[0])?;
                let dims = &self.f.ty(node.inputs[0]).dims;
                if row_dims(dims).len() + 1 != dims.len() {
                    return self.bug("a split of several groups in a row");
                }
                let width = dims.last().map_or(0, |&d| self.size(d));
                let index = (v.0 - node.first.0) as usize;
                let start: u64 = parts[..index].iter().map(|&d| self.size(d)).sum();
                // The parts of a single row are adjacent.
                let stride = match (self.elements(row_dims(dims)), base.stride) {
                    (1, _) => 0,
                    (_, 0) => width,
                    (_, stride) => stride,
                };
                Ok(View { place: base.place, offset: base.offset + start, stride })
            }
            Class::Number(RowOp::Zeros) => {
                let elements = self.elements(&self.f.ty(v).dims);
                let view = self.temp(v);
                self.memory.insert(v, view);
                self.launch(kernel::Zero { elements }.into(), vec![LocalOperand::View(view)], n);
                Ok(view)
            }
            Class::View { .. }
            | Class::Number(_)
            | Class::Identity
            | Class::Element(_)
            | Class::Row { .. }
            | Class::Gather(_)
            | Class::Anchor(..) => self.bug(format!("`{}` is read before it is computed", node.op.name())),
        }
    }

    fn contiguous(&mut self, v: Value) -> Result<LocalOperand, CompileError> {
        Ok(LocalOperand::View(self.adjacent(v)?))
    }

    /// Memory of a value with its rows adjacent: strided rows are copied.
    fn adjacent(&mut self, v: Value) -> Result<View, CompileError> {
        let view = self.in_memory(v)?;
        let ty = self.f.ty(v);
        let rows = self.elements(row_dims(&ty.dims));
        let length = self.elements(&ty.dims[row_dims(&ty.dims).len()..]);
        if view.stride == 0 || view.stride == length {
            return Ok(View { stride: 0, ..view });
        }
        if !ty.dtype.is_float() {
            return self.bug("strided integers");
        }
        let copy = self.temp(v);
        let kernel = RowKernel {
            rows,
            inputs: vec![RowInput::Row { length, dtype: ty.dtype }],
            ops: vec![RowOp::Load { input: 0 }],
            lengths: vec![length],
            outputs: vec![RowOutput { array: 0, dtype: ty.dtype, store: RowStore::Row }],
        };
        let operands = vec![LocalOperand::View(view), LocalOperand::View(View { stride: length, ..copy })];
        let origin = format!("{}: adjacent rows", self.f.name);
        self.launches.push(LocalLaunch { kernel: Kernel::Rows(kernel), operands, places: None, origin });
        self.memory.insert(v, copy);
        Ok(copy)
    }

    fn index(&self, v: Value) -> Result<LocalOperand, CompileError> {
        match self.f.params.get(v.index()) {
            Some(p) if p.binding.is_index() => Ok(LocalOperand::Index(v.0)),
            _ => self.bug("an index that is no parameter"),
        }
    }

    pub(super) fn launch(&mut self, kernel: Kernel, operands: Vec<LocalOperand>, node: usize) {
        let origin = format!("{}: {} %{}", self.f.name, self.f.nodes[node].op.name(), node);
        self.launches.push(LocalLaunch { kernel, operands, places: None, origin });
    }

    /// As [`Emit::launch`], where only some rows are needed.
    pub(super) fn launch_some(
        &mut self,
        kernel: Kernel,
        operands: Vec<LocalOperand>,
        node: usize,
        need: Need,
    ) -> Result<(), CompileError> {
        let places = need.places().map(|v| self.contiguous(v)).transpose()?;
        self.launch(kernel, operands, node);
        if let Some(launch) = self.launches.last_mut() {
            launch.places = places;
        }
        Ok(())
    }

    /// The row kernels of a level, whose nodes these are.
    fn row_kernels(&mut self, nodes: &[usize]) -> Result<(), CompileError> {
        let kinds = self.kinds;
        let mut domains: Vec<(&Kind, Vec<usize>)> = vec![];
        for &i in nodes {
            match domains.iter_mut().find(|(kind, _)| **kind == kinds[i]) {
                Some((_, nodes)) => nodes.push(i),
                None => domains.push((&kinds[i], vec![i])),
            }
        }
        for (kind, nodes) in domains {
            let Kind::Row(rows, need) = kind else { continue };
            RowBuilder::new(self, rows, &nodes).build(*need)?;
        }
        Ok(())
    }

    /// Whether anything but the row nodes of the same kernel reads the value.
    pub(super) fn leaves_kernel(&self, v: Value, node: usize) -> bool {
        let inside = |i: usize| self.levels[i] == self.levels[node] && self.kinds[i] == self.kinds[node];
        self.readers[v.index()].iter().any(|&i| !inside(i))
            || self.returns[v.index()].iter().any(|&i| self.bind[i] != Bind::Ignore)
    }

    /// The value that a product is stored as: itself, or what it is cast to.
    fn stored(&self, v: Value) -> Value {
        let cast = |&&i: &&usize| self.kinds[i] == Kind::Stored && self.f.nodes[i].inputs[0] == v;
        self.readers[v.index()].iter().find(cast).map_or(v, |&i| self.f.nodes[i].first)
    }

    /// The result stays in the memory of an operand.
    fn in_place(&mut self, i: usize, v: Value, operand: Value) -> Result<View, CompileError> {
        let view = self.in_memory(operand)?;
        if self.readers[operand.index()].iter().any(|&reader| reader > i) {
            return self.bug("a state is read after it was updated in place");
        }
        self.memory.insert(v, view);
        Ok(view)
    }

    /// The kernel of a node, and its operands as its signature lists them.
    fn anchor(&mut self, i: usize, node: &'a Node) -> Result<(), CompileError> {
        let class = node.op.class();
        let (Class::Anchor(choice, _) | Class::Gather(choice)) = class else {
            return self.bug(format!("`{}` has no kernel of its own", node.op.name()));
        };
        let kernel = choice.choose(&mut Select { emit: self, node })?;
        // The next operand and result of the operation, for slots that name none.
        let (mut operand, mut result) = (0, 0);
        let next = |n: &mut usize| std::mem::replace(n, *n + 1);
        let mut operands = vec![];
        for slot in kernel.signature() {
            let of = slot.of.unwrap_or_else(|| match slot.role {
                Role::Input => Of::Operand(next(&mut operand)),
                Role::Result | Role::Accumulated | Role::Updated => Of::Result(next(&mut result)),
            });
            operands.push(self.place(i, node, &slot, of)?);
        }
        let need = if kernel.rows().is_some() { self.needs[node.first.index()] } else { Need::All };
        self.launch_some(kernel, operands, i, need)
    }

    /// The memory of one operand of a kernel.
    fn place(&mut self, i: usize, node: &Node, slot: &Slot, of: Of) -> Result<LocalOperand, CompileError> {
        let result = |k: usize| Value(node.first.0 + k as u32);
        let view = match of {
            Of::Operand(k) => match slot.layout {
                Layout::Index(_) => return self.index(node.inputs[k]),
                Layout::Rows(_) => self.in_memory(node.inputs[k])?,
                // The kernel has the strides.
                Layout::Matrix(_) => View { stride: 0, ..self.in_memory(node.inputs[k])? },
                Layout::Dense | Layout::UpTo(_) => self.adjacent(node.inputs[k])?,
            },
            Of::Gathered(k) => self.adjacent(self.gather(node.inputs[k])?.inputs[0])?,
            Of::Order(k) => self.adjacent(self.gather(node.inputs[k])?.inputs[1])?,
            Of::Result(k) => self.destination(self.stored(result(k)), slot.role == Role::Accumulated).0,
            Of::State { operand, result: k } => self.in_place(i, result(k), node.inputs[operand])?,
        };
        Ok(LocalOperand::View(view))
    }

    /// The gather that is left to the kernel that reads `v`.
    fn gather(&self, v: Value) -> Result<&'a Node, CompileError> {
        match self.node_of(v) {
            Some((n, node)) if self.kinds[n] == Kind::Gathered => Ok(node),
            _ => self.bug("rows that no gather gives"),
        }
    }

    /// Results that no kernel has written where they belong: parameters, views, values returned
    /// twice or added.
    fn remaining_results(&mut self) -> Result<(), CompileError> {
        for i in 0..self.bind.len() {
            let v = self.f.results[i].1;
            let node = self.defined[v.index()];
            match self.bind[i] {
                Bind::Ignore => {}
                Bind::State(p) => {
                    if self.in_memory(v)? != View::whole(Place::Param(p)) {
                        return self
                            .bug(format!("state `{}` is not updated in its place", self.f.results[i].0));
                    }
                }
                _ if self.done[i] => {}
                Bind::Add if node.is_some_and(|n| matches!(self.f.nodes[n].op, Op::Zeros(_))) => {}
                Bind::Store | Bind::Add => {
                    let accumulate = self.bind[i] == Bind::Add;
                    if accumulate && self.f.ty(v).dtype != DType::F32 {
                        return self.bug("only f32 can be added in place");
                    }
                    let source = self.contiguous(v)?;
                    let elements = self.elements(&self.f.ty(v).dims);
                    let operands = vec![source, LocalOperand::View(View::whole(Place::Result(i as u32)))];
                    let origin = format!("{}: result {}", self.f.name, self.f.results[i].0);
                    self.launches.push(LocalLaunch {
                        kernel: kernel::Copy { elements, accumulate }.into(),
                        operands,
                        places: None,
                        origin,
                    });
                }
            }
        }
        Ok(())
    }

    fn lifetimes(&mut self) {
        for (i, launch) in self.launches.iter().enumerate() {
            for operand in launch.operands.iter().chain(&launch.places) {
                if let LocalOperand::View(View { place: Place::Temp(t), .. }) = operand {
                    let temp = &mut self.temps[*t as usize];
                    temp.first = temp.first.min(i);
                    temp.last = temp.last.max(i);
                }
            }
        }
    }
}

/// How an operation gets its kernel.
pub(crate) trait Choose {
    /// The kernel of a node of this operation.
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError>;
}

/// A node for which a kernel is chosen, and its types.
pub(crate) struct Select<'e, 'a> {
    emit: &'e mut Emit<'a>,
    node: &'a Node,
}

impl<'a> Select<'_, 'a> {
    pub(crate) fn bug<T>(&self, what: impl Into<String>) -> Result<T, CompileError> {
        self.emit.bug(what)
    }

    pub(crate) fn module(&self) -> &'a Module {
        self.emit.module
    }

    pub(crate) fn size(&self, d: Dim) -> u64 {
        self.emit.size(d)
    }

    pub(crate) fn elements(&self, dims: &[Dim]) -> u64 {
        self.emit.elements(dims)
    }

    /// How many operands the operation has.
    pub(crate) fn operands(&self) -> usize {
        self.node.inputs.len()
    }

    /// Whether two operands are one value.
    pub(crate) fn same(&self, a: usize, b: usize) -> bool {
        self.node.inputs[a] == self.node.inputs[b]
    }

    /// Dimensions of an operand.
    pub(crate) fn dims(&self, operand: usize) -> &'a [Dim] {
        &self.emit.f.ty(self.node.inputs[operand]).dims
    }

    /// Storage of an operand.
    pub(crate) fn dtype(&self, operand: usize) -> DType {
        self.emit.f.ty(self.node.inputs[operand]).dtype
    }

    /// The type of a result.
    pub(crate) fn result(&self, k: usize) -> &'a Type {
        self.emit.f.ty(Value(self.node.first.0 + k as u32))
    }

    /// Elements of all dimensions of an operand but the last, and its size.
    pub(crate) fn rows_and_last(&self, operand: usize) -> (u64, u64) {
        match self.dims(operand) {
            [rows @ .., last] => (self.elements(rows), self.size(*last)),
            [] => (1, 1),
        }
    }

    /// How many rows the schedule sees in an operand.
    pub(crate) fn rows(&self, operand: usize) -> u64 {
        self.elements(row_dims(self.dims(operand)))
    }

    /// Elements from row to row of an operand in memory; 0 where rows are adjacent.
    pub(crate) fn stride(&mut self, operand: usize) -> Result<u64, CompileError> {
        Ok(self.emit.in_memory(self.node.inputs[operand])?.stride)
    }

    /// Copies the rows of an operand where they are not adjacent.
    pub(crate) fn make_adjacent(&mut self, operand: usize) -> Result<(), CompileError> {
        self.emit.adjacent(self.node.inputs[operand]).map(|_| ())
    }

    /// Whether a result is added to memory rather than stored there.
    pub(crate) fn adds(&self, k: usize) -> bool {
        let v = self.emit.stored(Value(self.node.first.0 + k as u32));
        self.emit.result(v, true).is_some_and(|(_, add)| add)
    }

    /// Slots per row, where an operand is rows whose gather is left to this kernel.
    pub(crate) fn gathered(&self, operand: usize) -> Option<u64> {
        let gather = self.emit.gather(self.node.inputs[operand]).ok()?;
        let [x, order] = [0, 1].map(|k| &self.emit.f.ty(gather.inputs[k]).dims);
        let rows = self.elements(&x[..x.len() - 1]);
        Some(self.size(order[0]) / rows.max(1))
    }
}
