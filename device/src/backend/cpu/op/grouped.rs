//! Products of the rows of each group with a matrix of its own.
//!
//! Work follows the offsets: an expert that nobody chose costs nothing.

use super::{Run, sizes};
use crate::backend::cpu::product::{self, Matrices, RightOf as _, Side, Widened};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::program::kernel::{Grouped, GroupedOuter};
use half::bf16;

/// Whether offsets are increasing, from 0 to at most `slots`.
pub(super) fn offsets_fit(cx: &Context, offsets: &[i32], slots: usize) -> bool {
    let fine = offsets[0] == 0 && offsets.is_sorted() && offsets[offsets.len() - 1] as usize <= slots;
    if !fine {
        cx.bad_index();
    }
    fine
}

/// Pieces that groups of `slots` rows in all are cut into, at most.
fn most_pieces(slots: usize, experts: usize) -> usize {
    experts + slots.div_ceil(product::ROWS_OF_LONG_SUMS / 2) + 1
}

impl Run for Grouped {
    fn scratch(&self) -> Scratch {
        let [slots, experts, out, inner] = sizes([self.slots, self.experts, self.out, self.inner]);
        let (n, k) = if self.transposed { (inner, out) } else { (out, inner) };
        let local = product::scratch(self.stored, (slots, n, k));
        Scratch { local, shared: 3 * most_pieces(slots, experts) }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let same = || args.view::<T>("w").start;
        let widened = || args.view::<Widened>("w").start;
        match (self.stored, args.packed(cx, "w"), args.narrow("y")) {
            (_, Some(w), false) => grouped::<f32, f32>(self, cx, args, w),
            (_, Some(w), true) => grouped::<f32, bf16>(self, cx, args, w),
            (false, None, false) => grouped::<T, f32>(self, cx, args, same()),
            (false, None, true) => grouped::<T, bf16>(self, cx, args, same()),
            (true, None, false) => grouped::<f32, f32>(self, cx, args, widened()),
            (true, None, true) => grouped::<f32, bf16>(self, cx, args, widened()),
        }
    }
}

/// With rows of type `L` and results of type `C`.
fn grouped<L: Stored, C: Stored>(kernel: &Grouped, cx: &Context, args: &Arguments, w: impl Matrices<L>) {
    let &Grouped { transposed, gather, .. } = kernel;
    let [slots, experts, out, inner] = sizes([kernel.slots, kernel.experts, kernel.out, kernel.inner]);
    let (n, k) = if transposed { (inner, out) } else { (out, inner) };
    let (x, offsets) = (args.view::<L>("x").start, args.ints("offsets").all());
    let order = gather.map(|per| (args.ints("order"), per as usize));
    let y = args.view::<C>("y").rows_of(n);
    if !offsets_fit(cx, offsets, slots) || order.is_some_and(|(o, _)| !cx.indices_below(o.all(), slots)) {
        return;
    }
    let used = offsets[experts] as usize;
    cx.count(|| (used * out * inner) as u64);
    cx.pieces(slots - used, n, |range, _| range.for_each(|row| y.row_mut(used + row).fill(C::ZERO)));

    // Every piece of rows of one expert, and every range of columns, is a task.
    let (unit, rows) = (product::unit_of_rows::<L>(), product::most_rows::<L>(used, k));
    let list = cx.shared().integers().rows_of_part(3, most_pieces(slots, experts));
    let mut count = 0;
    for e in 0..experts {
        let (first, end) = (offsets[e] as usize, offsets[e + 1] as usize);
        let size = product::piece(end - first, rows, unit);
        for start in (first..end).step_by(size) {
            list.row_mut(count).copy_from_slice(&[e as i32, start as i32, (start + size).min(end) as i32]);
            count += 1;
        }
    }
    let columns = product::tiles::<L>((used, n, k), 1).1;
    let across = n.div_ceil(columns);
    cx.parallel(count * across, |task, scratch| {
        let &[expert, start, end] = list.row(task / across) else { return };
        let (expert, start, end) = (expert as usize, start as usize, end as usize);
        let column = task % across * columns;
        let a = match order {
            None => Side::Strided { start: x.add(start * k), line: k, step: 1 },
            Some((order, per)) => {
                Side::GatheredLines { start: x, row: k, order: order.start.add(start), per }
            }
        };
        let (line, step) = if transposed { (1, inner) } else { (inner, 1) };
        let b = w.matrix(expert * out * inner, line, step);
        let size = (end - start, columns.min(n - column), k);
        let c = y.start.add(start * n + column);
        // SAFETY: pieces are disjoint rows of `y` below `used`, column ranges are disjoint; `order`
        // was looked at.
        unsafe { b.skip_lines(column).block(size, a, (c, n, false), scratch) };
    });
}

impl Run for GroupedOuter {
    fn scratch(&self) -> Scratch {
        let [slots, out, inner] = sizes([self.slots, self.out, self.inner]);
        Scratch::local(product::product_scratch(out, inner, slots))
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [slots, experts, out, inner] = sizes([self.slots, self.experts, self.out, self.inner]);
        let (y, x, offsets) =
            (args.view::<T>("y").start, args.view::<T>("x").start, args.ints("offsets").all());
        let order = self.gather.map(|per| (args.ints("order"), per as usize));
        let w = args.floats("w").start;
        if !offsets_fit(cx, offsets, slots) || order.is_some_and(|(o, _)| !cx.indices_below(o.all(), slots)) {
            return;
        }
        cx.count(|| (offsets[experts] as usize * out * inner) as u64);
        let (rows, columns) = product::tiles::<T>((out, inner, slots / experts), experts);
        let (down, across) = (out.div_ceil(rows), inner.div_ceil(columns));
        cx.parallel(experts * down * across, |task, scratch| {
            let expert = task / (down * across);
            let (row, column) = (task / across % down * rows, task % across * columns);
            let (start, end) = (offsets[expert] as usize, offsets[expert + 1] as usize);
            if start == end && self.accumulate {
                return;
            }
            let a = Side::Strided { start: y.add(start * out), line: 1, step: out };
            let b = match order {
                None => Side::Strided { start: x.add(start * inner), line: 1, step: inner },
                Some((order, per)) => {
                    Side::GatheredSteps { start: x, row: inner, order: order.start.add(start), per }
                }
            };
            let size = (rows.min(out - row), columns.min(inner - column), end - start);
            let c = w.add((expert * out + row) * inner + column);
            // SAFETY: tasks have disjoint tiles of `w`; `order` was looked at.
            unsafe {
                product::block(
                    size,
                    a.skip_lines(row),
                    b.skip_lines(column),
                    c,
                    inner,
                    self.accumulate,
                    scratch,
                )
            };
        });
    }
}
