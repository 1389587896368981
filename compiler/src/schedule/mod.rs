//! From a function to launches: what is fused, what is a view, where values live.
//!
//! *In*: one verified function. *Out*: a [`Scheduled`] function: launches whose operands are
//! parameters, results and temporaries of the function, so that one schedule serves every
//! application of the body. *Promise*: launches are in an order in which every value is written
//! before it is read; fusion never changes what is computed.
//!
//! Operations are of three kinds. *Views* (`reshape`, and `split` of something in memory) cost
//! nothing. *Row* operations work on the inner dimensions of each row alone, or sum over all rows;
//! those that can run together become one [`RowKernel`]. Everything else is an *anchor*: one kernel
//! each. Levels decide what runs together: row operations of level `n` come before the anchors of
//! level `n`, and use the anchors of levels below. A value that a kernel can make of its operands
//! is made again there instead of being read (`recompute`).

mod launch;
pub(crate) mod need;
mod recompute;
pub(crate) mod rows;

use crate::CompileError;
use crate::ir::{Dim, Dims, Function, Module, Node, Op, Reduce, Value};
use crate::op::{Class, Moved, Reduction};
use crate::program::Kernel;
pub(crate) use launch::{Choose, Select};
use need::Need;
use recompute::{Placed, recompute};
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;

/// The place of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// In a parameter of the function.
    Param(u32),
    /// Where the caller wants a result.
    Result(u32),
    /// In a temporary.
    Temp(u32),
}

/// A value in memory: rows `stride` elements apart (0: adjacent), from element `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Where.
    pub place: Place,
    /// First element.
    pub offset: u64,
    /// Elements from row to row.
    pub stride: u64,
}

impl View {
    fn whole(place: Place) -> Self {
        View { place, offset: 0, stride: 0 }
    }
}

/// An operand of a scheduled launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalOperand {
    /// Memory.
    View(View),
    /// The index parameter of that number.
    Index(u32),
}

/// A launch of a scheduled function.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalLaunch {
    /// The kernel.
    pub kernel: Kernel,
    /// On what.
    pub operands: Vec<LocalOperand>,
    /// Which rows are needed, where not all are: [`crate::program::Launch::places`].
    pub places: Option<LocalOperand>,
    /// Which nodes it computes.
    pub origin: String,
}

/// A temporary: live from the launch that writes it first to the last that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Temp {
    /// Its size.
    pub bytes: u64,
    /// Element type.
    pub dtype: crate::ir::DType,
    /// First launch that touches it.
    pub first: usize,
    /// Last launch that touches it.
    pub last: usize,
}

/// The caller's use of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// It is written to memory of its own.
    Store,
    /// It is added to memory: a gradient.
    Add,
    /// It stays in the place of the state parameter of this number.
    State(u32),
    /// It is not wanted.
    Ignore,
}

/// A scheduled function.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduled {
    /// Launches in order.
    pub launches: Vec<LocalLaunch>,
    /// Temporaries.
    pub temps: Vec<Temp>,
}

/// Schedules a function. `bind` has an entry for each result.
pub fn schedule(module: &Module, f: &Function, bind: &[Bind]) -> Result<Scheduled, CompileError> {
    let (f, needs) = need::needs(f);
    let kinds = classify(&f, &needs)?;
    let levels = levels(&f, &kinds, &needs);
    let placed = recompute(module, Placed { f, needs, kinds, levels }, bind);
    launch::emit(module, &placed, bind)
}

/// The fate of a node.
#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// Nothing is computed.
    View,
    /// Part of a row kernel over these leading dimensions of its widest operand or result, for
    /// those of its rows that are needed.
    Row(Dims, Need),
    /// A kernel of its own.
    Anchor,
    /// Numbers that every kernel makes for itself.
    Free,
    /// Rows that the consumer gathers itself.
    Gathered,
    /// The type that a product is stored in.
    Stored,
}

/// The row dimensions of a shape: `[batch, seq]` of a stream, the slots of grouped rows, the first
/// of a matrix or mixture; a vector is one row.
pub(crate) fn row_dims(dims: &[Dim]) -> &[Dim] {
    const BATCH: Dim = Dim(0);
    match dims {
        [BATCH, _, ..] => &dims[..2],
        [_, _, ..] => &dims[..1],
        _ => &[],
    }
}

fn classify(f: &Function, needs: &[Need]) -> Result<Vec<Kind>, CompileError> {
    let (defined, readers) = (f.definitions(), f.readers());
    let returned: FxHashSet<Value> = f.results.iter().map(|(_, v)| *v).collect();
    let mut kinds: Vec<Kind> = Vec::with_capacity(f.nodes.len());
    // A product that only a cast reads is stored as what it is cast to.
    let stored = |product: Value| {
        let made = defined[product.index()].and_then(|n| f.nodes[n].op.class().anchor());
        made.is_some_and(|anchor| anchor.casts)
            && readers[product.index()].len() == 1
            && !returned.contains(&product)
    };
    for node in &f.nodes {
        // All results of an operation on rows have the same rows.
        let need = needs[node.first.index()];
        let kind = match node.op.class() {
            Class::Number(_) => Kind::Free,
            Class::View { moved, .. } => {
                let (from, to) = (&f.ty(node.inputs[0]).dims, &f.ty(node.first).dims);
                let computed = defined[node.inputs[0].index()]
                    .is_some_and(|n| matches!(kinds[n], Kind::Row(..) | Kind::Free));
                let same_rows = row_dims(from) == row_dims(to);
                // Parts of several groups in a row are no rows of their own.
                let groups = matches!(moved, Moved::Cut(_)) && row_dims(from).len() + 1 != from.len();
                if (computed || groups) && same_rows {
                    Kind::Row(row_dims(from).into(), need)
                } else {
                    Kind::View
                }
            }
            Class::Element(_) if matches!(node.op, Op::Cast(_)) && stored(node.inputs[0]) => Kind::Stored,
            Class::Identity | Class::Element(_) | Class::Row { .. } => {
                let (from, to) = (&f.ty(node.inputs[0]).dims, &f.ty(node.first).dims);
                Kind::Row(row_dims(if from.len() > to.len() { from } else { to }).into(), need)
            }
            Class::Gather(_) | Class::Anchor(..) => Kind::Anchor,
        };
        kinds.push(kind);
    }
    // Gathers that all readers can do for themselves are left to them.
    for (i, node) in f.nodes.iter().enumerate() {
        if !matches!(node.op.class(), Class::Gather(_)) {
            continue;
        }
        let wanted = |&reader: &usize| {
            let n = &f.nodes[reader];
            let through = n.op.class().anchor().and_then(|anchor| anchor.through);
            n.inputs.iter().enumerate().all(|(k, &v)| (v == node.first) == (Some(k) == through))
        };
        let readers = &readers[node.first.index()];
        if !returned.contains(&node.first) && !readers.is_empty() && readers.iter().all(wanted) {
            kinds[i] = Kind::Gathered;
        }
    }
    Ok(kinds)
}

/// Whether a row node sums over all rows, so that its result exists only after the kernel.
fn sums_rows(f: &Function, node: &Node) -> bool {
    let Op::Reduce(Reduction { over, .. }) = &node.op else { return false };
    let rows = row_dims(&f.ty(node.inputs[0]).dims);
    !rows.is_empty() && rows.iter().any(|d| over.contains(d))
}

/// The level that a value of level `there` puts its reader on: one more where the reader is row
/// work of another kernel.
pub(crate) fn reader_level(there: u32, row: bool, same_kernel: bool) -> u32 {
    there + u32::from(row && !same_kernel)
}

/// Level of every node.
fn levels(f: &Function, kinds: &[Kind], needs: &[Need]) -> Vec<u32> {
    let defined = f.definitions();
    let mut levels = vec![0u32; f.nodes.len()];
    for (i, node) in f.nodes.iter().enumerate() {
        let mut level = 0;
        let places = needs[node.first.index()].places();
        for input in node.inputs.iter().chain(&places) {
            let Some(n) = defined[input.index()] else { continue };
            let there = levels[n];
            // Numbers are made where they are read; a view of a row value is of the row's level, of
            // an anchor of its.
            let same = kinds[i] == kinds[n] && !sums_rows(f, &f.nodes[n]);
            let above = reader_level(there, matches!(kinds[i], Kind::Row(..)), same);
            level = level.max(if kinds[n] == Kind::Free { 0 } else { above });
        }
        levels[i] = level;
    }
    sink(f, kinds, &mut levels, &defined);
    levels
}

/// Moves row nodes down to the first level that reads them, where only one kernel does: their
/// operands are read there instead of their result being stored.
fn sink(f: &Function, kinds: &[Kind], levels: &mut [u32], defined: &[Option<usize>]) {
    let mut readers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, node) in f.nodes.iter().enumerate() {
        for input in &node.inputs {
            if let Some(n) = defined[input.index()] {
                readers.entry(n).or_default().push(i);
            }
        }
    }
    let returns = f.returns();
    for i in (0..f.nodes.len()).rev() {
        if !matches!(kinds[i], Kind::Row(..)) {
            continue;
        }
        if sums_rows(f, &f.nodes[i]) || f.nodes[i].results().any(|r| !returns[r.index()].is_empty()) {
            continue;
        }
        let Some(users) = readers.get(&i) else { continue };
        let first = users.iter().map(|&u| levels[u]).min().unwrap_or(0);
        if first > levels[i] && users.iter().all(|&u| kinds[u] == kinds[i] && levels[u] == first) {
            levels[i] = first;
        }
    }
}

/// Whether a reduction is one that a row kernel can do, and over which inner dimensions.
fn inner_reduction(f: &Function, x: Value, how: Reduce, over: &[Dim]) -> Result<(Dims, bool), CompileError> {
    let dims = &f.ty(x).dims;
    let rows = row_dims(dims);
    let inner: Dims = over.iter().copied().filter(|d| !rows.contains(d)).collect();
    let summed = rows.iter().filter(|d| over.contains(d)).count();
    if summed != 0 && (summed != rows.len() || how == Reduce::Max) {
        return Err(CompileError::Schedule("a reduction over some of the row dimensions".into()));
    }
    Ok((inner, summed != 0))
}
