//! Generated kernels: fused work on the rows of streams.

use crate::codegen::{CodegenError, Source, Variant, blocks, rows};
use crate::ir::{self, DType};
use crate::op::kernel::{KernelKind, Slot, Work, index, input, ints, need, result, times};
use crate::op::{Bits, Reduction};
use smallvec::smallvec;

/// A generated kernel: the same straight-line work on every row. Values are arrays of a fixed
/// length that belong to one row; operations follow one another, each array written once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowKernel {
    /// Rows.
    pub rows: u64,
    /// Inputs, in operand order.
    pub inputs: Vec<RowInput>,
    /// Operations in order; operation `i` defines array `i`.
    pub ops: Vec<RowOp>,
    /// Length of each array.
    pub lengths: Vec<u64>,
    /// Outputs, in operand order after the inputs.
    pub outputs: Vec<RowOutput>,
}

/// An input operand of a row kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowInput {
    /// `length` floats for each row, strided.
    Row {
        /// How many.
        length: u64,
        /// Storage.
        dtype: DType,
    },
    /// The same floats for every row.
    Shared {
        /// How many.
        length: u64,
        /// Storage.
        dtype: DType,
    },
    /// `length` integers for each row, strided.
    RowInts {
        /// How many.
        length: u64,
    },
    /// An [`Operand::Index`].
    Index,
}

/// An array that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowOutput {
    /// Which array.
    pub array: u32,
    /// Storage of the operand.
    pub dtype: DType,
    /// How it is stored.
    pub store: RowStore,
}

/// How an array of each row is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowStore {
    /// In the row of the operand, strided.
    Row,
    /// Added to the row of the operand, strided.
    AddRow,
    /// The sum over all rows. Rows are summed in blocks of [`SUM_BLOCK`] in order, then the blocks
    /// in order.
    Sum,
    /// The same, added to what the operand holds.
    AddSum,
}

/// Rows that are summed together first in [`RowStore::Sum`].
pub const SUM_BLOCK: u64 = 64;

/// Where the small operand of a binary operation is in the large one: the large one is
/// `[outer, size, inner]`, the small one `[size]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Broadcast {
    /// Repetitions before.
    pub outer: u64,
    /// Length of the small operand.
    pub size: u64,
    /// Repetitions of each element.
    pub inner: u64,
}

/// One operation of a row kernel; numbers are arrays, `input` numbers are inputs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RowOp {
    /// A float input (`Row` or `Shared`).
    Load {
        /// Which.
        input: u32,
    },
    /// One number.
    Constant(Bits),
    /// The number that an input is, an [`RowInput::Index`].
    Index {
        /// Which.
        input: u32,
    },
    /// Zeros.
    Zeros,
    /// Element-wise.
    Unary(ir::Unary, u32),
    /// Element-wise; the small operand is `b`, or `a` where `small_first`.
    Binary {
        /// The operation.
        op: ir::Binary,
        /// Left operand.
        a: u32,
        /// Right operand.
        b: u32,
        /// How the small operand spreads.
        broadcast: Broadcast,
        /// Whether the small operand is `a`.
        small_first: bool,
    },
    /// `[outer, size, inner] -> [outer, inner]`
    Reduce {
        /// The operation.
        op: ir::Reduce,
        /// Operand.
        x: u32,
        /// Where.
        over: Broadcast,
    },
    /// Each group of `size` normalised by itself.
    Rms {
        /// Operand.
        x: u32,
        /// Group length.
        size: u64,
        /// Added to the mean square.
        eps: Bits,
    },
    /// Gradient of `Rms`.
    RmsGrad {
        /// Operand of `Rms`.
        x: u32,
        /// Cotangent of its result.
        dy: u32,
        /// Group length.
        size: u64,
        /// Added to the mean square.
        eps: Bits,
    },
    /// Softmax of each group of `size`.
    Softmax {
        /// Operand.
        x: u32,
        /// Group length.
        size: u64,
    },
    /// Gradient of `Softmax`.
    SoftmaxGrad {
        /// Result of `Softmax`.
        y: u32,
        /// Its cotangent.
        dy: u32,
        /// Group length.
        size: u64,
    },
    /// Rotates each group of `size` by the token position in integer input `position` (one per row)
    /// or by depth.
    Rope {
        /// Operand.
        x: u32,
        /// Group length.
        size: u64,
        /// Frequencies and direction.
        rope: ir::Rope,
        /// `Tokens`: input with one integer per row. `Depth`: the `depth` index.
        position: u32,
        /// `Depth`: the `depths` index.
        depths: u32,
    },
    /// Elements `start .. start + length` of each group of `size`.
    Slice {
        /// Operand.
        x: u32,
        /// Group length.
        size: u64,
        /// First element taken.
        start: u64,
    },
    /// Groups joined: for each of `groups`, that group of every operand in turn.
    Concat {
        /// Operands.
        parts: Vec<u32>,
        /// How many groups each is cut into.
        groups: u64,
    },
    /// `table[chosen]` for integer input `chosen`.
    Pick {
        /// Operand.
        table: u32,
        /// Input of indices.
        chosen: u32,
    },
    /// `d` at the entries of integer input `chosen`, zero elsewhere.
    PickGrad {
        /// Operand.
        d: u32,
        /// Input of indices.
        chosen: u32,
    },
}

impl RowOp {
    /// Numbers of the arrays it reads.
    pub fn operands(&self) -> Vec<usize> {
        let list: &[u32] = match self {
            RowOp::Load { .. } | RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros => &[],
            RowOp::Unary(_, x)
            | RowOp::Reduce { x, .. }
            | RowOp::Rms { x, .. }
            | RowOp::Softmax { x, .. }
            | RowOp::Rope { x, .. }
            | RowOp::Slice { x, .. }
            | RowOp::Pick { table: x, .. }
            | RowOp::PickGrad { d: x, .. } => &[*x],
            RowOp::Binary { a, b, .. }
            | RowOp::RmsGrad { x: a, dy: b, .. }
            | RowOp::SoftmaxGrad { y: a, dy: b, .. } => &[*a, *b],
            RowOp::Concat { parts, .. } => parts,
        };
        list.iter().map(|&a| a as usize).collect()
    }

    /// Whether it only moves elements.
    fn moves(&self) -> bool {
        matches!(
            self,
            RowOp::Load { .. }
                | RowOp::Constant(_)
                | RowOp::Index { .. }
                | RowOp::Zeros
                | RowOp::Slice { .. }
                | RowOp::Concat { .. }
                | RowOp::Pick { .. }
        )
    }

    /// The word of an operation that computes something.
    fn word(&self) -> Option<&'static str> {
        use crate::ir::Op;
        Some(match self {
            RowOp::Load { .. } | RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros => return None,
            RowOp::Unary(u, _) => Op::Unary(*u).name(),
            RowOp::Binary { op, .. } => Op::Binary(*op).name(),
            RowOp::Reduce { op, .. } => Op::Reduce(Reduction { how: *op, over: smallvec![] }).name(),
            RowOp::Rms { .. } => "rms",
            RowOp::RmsGrad { .. } => "rms_grad",
            RowOp::Softmax { .. } => "softmax",
            RowOp::SoftmaxGrad { .. } => "softmax_grad",
            RowOp::Rope { .. } => "rope",
            RowOp::Slice { .. } => "slice",
            RowOp::Concat { .. } => "concat",
            RowOp::Pick { .. } => "pick",
            RowOp::PickGrad { .. } => "pick_grad",
        })
    }
}

impl KernelKind for RowKernel {
    fn signature(&self) -> Vec<Slot> {
        let inputs = self.inputs.iter().map(|input_| match *input_ {
            RowInput::Row { length, dtype } => input("row", &[self.rows, length]).stored(dtype).rows(1),
            RowInput::Shared { length, dtype } => input("shared", &[length]).stored(dtype),
            RowInput::RowInts { length } => ints("ints", &[self.rows, length]).rows(1),
            RowInput::Index => index("index", None),
        });
        let outputs = self.outputs.iter().map(|output| {
            let length = self.lengths.get(output.array as usize).copied().unwrap_or(u64::MAX);
            let slot = match output.store {
                RowStore::Row | RowStore::AddRow => result("output", &[self.rows, length]).rows(1),
                RowStore::Sum | RowStore::AddSum => result("output", &[length]),
            };
            slot.stored(output.dtype).adds(matches!(output.store, RowStore::AddRow | RowStore::AddSum))
        });
        inputs.chain(outputs).collect()
    }

    fn check(&self) -> Result<(), String> {
        check_rows(self)
    }

    fn summary(&self) -> String {
        let ops: Vec<&str> = self.ops.iter().filter_map(RowOp::word).collect();
        let sums = self.outputs.iter().any(|o| matches!(o.store, RowStore::Sum | RowStore::AddSum));
        format!("rows {}{} {{{}}}", self.rows, if sums { " sum" } else { "" }, ops.join(" "))
    }

    /// One operation for each element of what is computed.
    fn work(&self) -> Work {
        let computed = self.ops.iter().zip(&self.lengths).filter(|(op, _)| !op.moves());
        // A reduction joins the elements of what it reads.
        let of = computed.map(|(op, &length)| match op {
            RowOp::Reduce { x, .. } => self.lengths.get(*x as usize).copied().unwrap_or(length),
            _ => length,
        });
        Work::elementwise(of.map(u128::from).sum::<u128>().saturating_mul(self.rows.into()))
    }

    fn rows(&self) -> Option<u64> {
        Some(self.rows)
    }

    fn in_place(&self) -> bool {
        true
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        match packed(self) {
            true => blocks::unpacked_rows(self, variant),
            false => rows::generate(self, variant),
        }
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        match packed(self) {
            true => blocks::unpacked_rows(self, variant),
            false => super::naive::generate(self, variant),
        }
    }
}

/// Whether an input is packed.
fn packed(kernel: &RowKernel) -> bool {
    let is = |input: &RowInput| {
        matches!(
            input,
            RowInput::Row { dtype: DType::Packed(_), .. } | RowInput::Shared { dtype: DType::Packed(_), .. }
        )
    };
    kernel.inputs.iter().any(is)
}

/// Whether the arrays of a row kernel have the lengths its operations give them.
fn check_rows(kernel: &RowKernel) -> Result<(), String> {
    if kernel.lengths.len() != kernel.ops.len() {
        return Err(format!("{} operations but {} lengths", kernel.ops.len(), kernel.lengths.len()));
    }
    for (i, op) in kernel.ops.iter().enumerate() {
        check_row_op(kernel, i, op).map_err(|problem| format!("operation {i}: {problem}"))?;
    }
    for output in &kernel.outputs {
        if output.array as usize >= kernel.ops.len() {
            return Err(format!("there is no array {} to store", output.array));
        }
        if !output.dtype.is_float() {
            return Err("arrays are floats".into());
        }
    }
    Ok(())
}

fn check_row_op(kernel: &RowKernel, i: usize, op: &RowOp) -> Result<(), String> {
    let result = kernel.lengths[i];
    let length = |array: u32| match (array as usize) < i {
        true => Ok(kernel.lengths[array as usize]),
        false => Err(format!("array {array} is not defined before it")),
    };
    let is = |actual: u64, expected: u64| match actual == expected {
        true => Ok(()),
        false => Err(format!("length {actual} where {expected} is right")),
    };
    let groups = |x: u64, size: u64| match size > 0 && x.is_multiple_of(size) {
        true => Ok(x / size),
        false => Err(format!("length {x} is not a multiple of {size}")),
    };
    let input = |input: u32| {
        kernel.inputs.get(input as usize).copied().ok_or_else(|| format!("there is no input {input}"))
    };
    let ints = |number: u32| match input(number)? {
        RowInput::RowInts { length } => Ok(length),
        _ => Err(format!("input {number} is not integers")),
    };
    match *op {
        RowOp::Load { input: number } => match input(number)? {
            RowInput::Row { length, dtype } | RowInput::Shared { length, dtype } => {
                need(dtype.is_float(), "loads floats")?;
                is(result, length)
            }
            _ => Err(format!("input {number} is not floats")),
        },
        RowOp::Constant(_) | RowOp::Zeros => Ok(()),
        RowOp::Index { input: number } => match input(number)? {
            RowInput::Index => is(result, 1),
            _ => Err(format!("input {number} is no index")),
        },
        RowOp::Unary(_, x) => is(length(x)?, result),
        RowOp::Binary { a, b, broadcast, small_first, .. } => {
            let (large, small) = if small_first { (b, a) } else { (a, b) };
            is(result, times(&[broadcast.outer, broadcast.size, broadcast.inner]))?;
            is(length(large)?, result)?;
            is(length(small)?, broadcast.size)
        }
        RowOp::Reduce { x, over, .. } => {
            is(length(x)?, times(&[over.outer, over.size, over.inner]))?;
            is(result, times(&[over.outer, over.inner]))
        }
        RowOp::Rms { x, size, .. } | RowOp::Softmax { x, size } => {
            groups(length(x)?, size)?;
            is(length(x)?, result)
        }
        RowOp::RmsGrad { x, dy, size, .. } | RowOp::SoftmaxGrad { y: x, dy, size } => {
            groups(length(x)?, size)?;
            is(length(x)?, result)?;
            is(length(dy)?, result)
        }
        RowOp::Rope { x, size, rope, position, depths } => {
            groups(length(x)?, size)?;
            need(size.is_multiple_of(2), "rotates pairs")?;
            is(length(x)?, result)?;
            match rope.positions {
                ir::Positions::Tokens => is(ints(position)?, 1),
                ir::Positions::Depth { half_reversed } => {
                    need(input(position)? == RowInput::Index, "the depth must be an index")?;
                    let reversed = !half_reversed || input(depths)? == RowInput::Index;
                    need(reversed, "the number of depths must be an index")
                }
            }
        }
        RowOp::Slice { x, size, start } => {
            let count = groups(length(x)?, size)?;
            let taken = if count == 0 { result } else { groups(result, count)? };
            need(start.saturating_add(taken) <= size, "takes more than there is")
        }
        RowOp::Concat { ref parts, groups: count } => {
            let mut total = 0u64;
            for &part in parts {
                groups(length(part)?, count)?;
                total = total.saturating_add(length(part)?);
            }
            is(result, total)
        }
        RowOp::Pick { table, chosen } => {
            length(table)?;
            is(result, ints(chosen)?)
        }
        RowOp::PickGrad { d, chosen } => is(length(d)?, ints(chosen)?),
    }
}
