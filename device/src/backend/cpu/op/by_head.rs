//! Products of the vectors of heads with a matrix of each head.

use super::{Run, sizes};
use crate::backend::cpu::product::{self, Matrices, RightOf as _, Side, Widened};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::program::kernel::ByHead;
use half::bf16;

impl Run for ByHead {
    fn scratch(&self) -> Scratch {
        let (n, k) = self.sizes();
        let [rows, n, k] = sizes([self.rows, n, k]);
        Scratch::local(product::scratch(self.stored, (rows, n, k)))
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let same = || args.view::<T>("w").start;
        let widened = || args.view::<Widened>("w").start;
        match (self.stored, args.packed(cx, "w"), args.narrow("y")) {
            (_, Some(w), false) => by_head::<f32, f32>(self, cx, args, w),
            (_, Some(w), true) => by_head::<f32, bf16>(self, cx, args, w),
            (false, None, false) => by_head::<T, f32>(self, cx, args, same()),
            (false, None, true) => by_head::<T, bf16>(self, cx, args, same()),
            (true, None, false) => by_head::<f32, f32>(self, cx, args, widened()),
            (true, None, true) => by_head::<f32, bf16>(self, cx, args, widened()),
        }
    }
}

/// With vectors of type `L` and results of type `C`. Runs of rows that are needed, a range of
/// columns of one head, are a task.
fn by_head<L: Stored, C: Stored>(kernel: &ByHead, cx: &Context, args: &Arguments, w: impl Matrices<L>) {
    let [rows, heads, out, inner, first] =
        sizes([kernel.rows, kernel.heads, kernel.out, kernel.inner, kernel.first]);
    let (n, k) = kernel.sizes();
    let [n, k] = sizes([n, k]);
    let (x, y) = (args.view::<L>("x").start, args.view::<C>("y").start);
    let (down, columns) = product::tiles::<L>((rows, n, k), heads);
    let across = n.div_ceil(columns);
    let places = args.places(kernel.rows);
    let needed = |row: usize| places.is_none_or(|places| places[row] >= 0);
    cx.count(|| ((0..rows).filter(|row| needed(*row)).count() * heads * n * k) as u64);
    cx.parallel(rows.div_ceil(down) * heads * across, |task, scratch| {
        let (head, column) = (task / across % heads, task % across * columns);
        let (mut row, end) = (task / across / heads * down, (task / across / heads + 1) * down);
        let end = end.min(rows);
        let (line, step) = if kernel.transposed { (1, inner) } else { (inner, 1) };
        let b = w.matrix((head * out + first) * inner, line, step);
        while row < end {
            let run = (row..end).take_while(|row| needed(*row)).count();
            if run > 0 {
                let a = Side::Strided { start: x.add((row * heads + head) * k), line: heads * k, step: 1 };
                let c = y.add((row * heads + head) * n + column);
                let size = (run, columns.min(n - column), k);
                // SAFETY: the plan was checked: the operands hold these matrices; tasks have
                // disjoint rows, heads and columns of `y`.
                unsafe { b.skip_lines(column).block(size, a, (c, heads * n, false), scratch) };
            }
            row += run.max(1);
        }
    });
}
