//! Values that a row kernel keeps, their memory, and the threads of a row.

use super::{Form, Generator, frequencies, reduces, sums};
use crate::codegen::Variant;
use crate::ir::{DType, Positions};
use crate::program::{RowInput, RowKernel, RowOp};
use std::collections::{BTreeSet, HashMap};

/// Memory of a value that was computed before it is asked for.
#[derive(Clone, Debug)]
pub(super) enum Kept {
    /// The same register in every thread of the row.
    Register(String),
    /// At this offset in floats in the shared memory of the row.
    Shared(u64),
    /// At this offset in floats in the shared memory of the block, which its rows share.
    Common(u64),
}

/// Values that an operation keeps.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// Whether anything asks for the array.
    pub(super) live: bool,
    /// The array itself.
    pub(super) own: Option<Kept>,
    /// Values that element-wise expressions of it need: statistics of groups, cosines and sines.
    pub(super) stats: Vec<Kept>,
}

/// Threads of a block.
pub(super) const BLOCK: u64 = 256;
/// Threads of a processor at once that registers are found for: 128 for each, or 64 where a block
/// has a row, so that a thread has little of it, and not eight numbers of each of its arrays.
pub(super) const RESIDENT: u64 = 512;
pub(super) const RESIDENT_OF_BLOCKS: u64 = 1024;
/// Rows of this length at most have a warp each, which needs no barrier, where there are enough of
/// them to fill a GPU.
pub(super) const WARP_ROW: u64 = 1024;
/// At most this many elements are summed by each warp of a row on its own, without a barrier.
pub(super) const ALONE: u64 = 256;
/// Words of 4 bytes that a thread should have under way at once: loops that load fewer are
/// unrolled.
pub(super) const LOADS: u64 = 8;
/// Static shared memory of a block.
pub(super) const STATIC_LIMIT: u64 = 48 * 1024;

/// Instructions of one element, roughly.
pub(super) fn own_cost(kernel: &RowKernel, op: &RowOp) -> u64 {
    match op {
        RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros | RowOp::Reduce { .. } => 1,
        RowOp::Load { .. } | RowOp::Slice { .. } | RowOp::Concat { .. } | RowOp::Pick { .. } => 2,
        RowOp::Unary(u, _) => u.price(),
        RowOp::Binary { op, .. } => op.price(),
        RowOp::Rms { .. } | RowOp::RmsGrad { .. } | RowOp::SoftmaxGrad { .. } => 3,
        RowOp::Rope { .. } => 6,
        RowOp::Softmax { .. } => 12,
        RowOp::PickGrad { chosen, .. } => match kernel.inputs.get(*chosen as usize) {
            Some(RowInput::RowInts { length }) => 3 * length,
            _ => 3,
        },
    }
}

/// Adjacent elements that a thread takes at a time: 1 where an operand that is read or written by
/// several is not aligned to 16 bytes, since single accesses of adjacent elements by one thread are
/// slower than those by adjacent threads.
pub(super) fn together(kernel: &RowKernel, variant: Variant) -> u64 {
    let inputs = kernel.inputs.iter().map(|input| match *input {
        RowInput::Row { length, dtype } => Some((length, dtype, true)),
        RowInput::Shared { length, dtype } => Some((length, dtype, false)),
        RowInput::RowInts { .. } | RowInput::Index => None,
    });
    let outputs = kernel.outputs.iter().map(|o| {
        let length = kernel.lengths[o.array as usize];
        (!sums(o.store)).then_some((length, o.dtype, true))
    });
    let long = inputs.chain(outputs).enumerate().filter_map(|(i, operand)| {
        operand.filter(|&(length, ..)| length > 0 && length.is_multiple_of(4)).map(|o| (i, o))
    });
    let long: Vec<_> = long.collect();
    if long.is_empty() || !long.iter().all(|&(i, _)| variant.is_wide(i)) {
        return 1;
    }
    // Vectors that all rows share stay in the cache.
    let mut rows = long.iter().filter(|&&(_, (_, _, row))| row);
    if rows.all(|&(_, (_, dtype, _))| dtype == DType::Bf16) { 8 } else { 4 }
}

impl Generator<'_> {
    /// Memory of kept values, and how many threads have a row.
    pub(super) fn plan(&mut self, dear: bool) {
        let kernel = self.kernel;
        let count = kernel.ops.len();
        let mut cost = vec![0u64; count];
        for (i, op) in kernel.ops.iter().enumerate() {
            let below = if reduces(op) { 0 } else { 1 };
            let inputs: u64 = op.operands().iter().map(|&x| cost[x]).fold(0, u64::saturating_add);
            cost[i] = own_cost(kernel, op).saturating_add(below * inputs);
        }
        // The loops that ask for an array. Numbers: the operation whose statistic it is, or a loop
        // of outputs of one length.
        let (output_loop, twice) = (count as u64, u64::MAX / 2);
        let mut loops: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); count];
        for output in &kernel.outputs {
            loops[output.array as usize].insert(output_loop + self.length(output.array as usize));
        }
        let mut keep = vec![false; count];
        for (i, op) in kernel.ops.iter().enumerate().rev() {
            if loops[i].is_empty() || self.length(i) == 0 {
                continue;
            }
            self.plans[i].live = true;
            let reduces = reduces(op);
            let cheap =
                matches!(op, RowOp::Load { .. } | RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros);
            keep[i] = reduces || (dear && !cheap && cost[i] >= 12 && loops[i].len() >= 2);
            let asking = if keep[i] { BTreeSet::from([i as u64]) } else { loops[i].clone() };
            let statistics = matches!(
                op,
                RowOp::Rms { .. } | RowOp::RmsGrad { .. } | RowOp::Softmax { .. } | RowOp::SoftmaxGrad { .. }
            );
            let again = matches!(op, RowOp::Rope { .. } | RowOp::PickGrad { .. });
            for x in op.operands() {
                loops[x].extend(&asking);
                if statistics {
                    loops[x].insert(i as u64);
                }
                if again {
                    loops[x].insert(twice + i as u64);
                }
            }
        }
        let widest = (0..count).filter(|&i| self.plans[i].live).map(|i| self.length(i)).max().unwrap_or(1);
        let warps = widest <= WARP_ROW && kernel.rows >= 8 * self.variant.processors();
        let most = if warps { 32 } else { BLOCK };
        self.threads = widest.div_ceil(self.width.max(4)).next_power_of_two().clamp(1, most);
        let mut ropes: HashMap<String, Vec<Kept>> = HashMap::new();
        for (i, &keep) in keep.iter().enumerate() {
            if !self.plans[i].live {
                continue;
            }
            let length = self.length(i);
            if keep {
                let register = reduces(&kernel.ops[i]) && length == 1;
                self.plans[i].own = Some(if register { self.register() } else { self.shared(length) });
            }
            let (stats, groups) = match kernel.ops[i] {
                RowOp::Rms { size, .. } | RowOp::SoftmaxGrad { size, .. } => (1, length / size),
                RowOp::RmsGrad { size, .. } | RowOp::Softmax { size, .. } => (2, length / size),
                // Cosines and sines of the pairs: never in a register, and once for all rotations
                // by the same angles, and for all rows at a position along depth.
                RowOp::Rope { size, rope, position, depths, .. } => {
                    let angles = format!(
                        "{size} {position} {depths} {:?} {:?}",
                        rope.positions,
                        frequencies(&rope, size)
                    );
                    let common = rope.positions != Positions::Tokens && self.form != Form::Long;
                    let stats = match ropes.get(&angles) {
                        Some(stats) => stats.clone(),
                        None => {
                            self.angles.push(i);
                            let mut keep =
                                || if common { self.common(size / 2) } else { self.shared(size / 2) };
                            vec![keep(), keep()]
                        }
                    };
                    ropes.insert(angles, stats.clone());
                    self.plans[i].stats = stats;
                    (0, 0)
                }
                _ => (0, 0),
            };
            for _ in 0..stats {
                let kept = if groups == 1 { self.register() } else { self.shared(groups) };
                self.plans[i].stats.push(kept);
            }
        }
    }

    pub(super) fn register(&mut self) -> Kept {
        if self.form == Form::Long {
            return self.shared(1);
        }
        self.next += 1;
        Kept::Register(format!("r{}", self.next))
    }

    /// All that is kept begins on 16 bytes.
    pub(super) fn shared(&mut self, floats: u64) -> Kept {
        let start = self.stored;
        self.stored = start.saturating_add(floats).next_multiple_of(4);
        Kept::Shared(start)
    }

    pub(super) fn common(&mut self, floats: u64) -> Kept {
        let start = self.common;
        self.common = start.saturating_add(floats).next_multiple_of(4);
        Kept::Common(start)
    }

    /// Elements of a loop over `length` that a thread takes at a time.
    pub(super) fn width(&self, length: u64) -> u64 {
        let fits = |width: &u64| *width <= self.width && length > 0 && length.is_multiple_of(*width);
        [8, 4].into_iter().find(fits).unwrap_or(1)
    }
}
