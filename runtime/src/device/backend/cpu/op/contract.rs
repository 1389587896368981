//! Products.

use super::{Run, sizes};
use crate::device::backend::cpu::product::{self, Matrices, Widened};
use crate::device::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::program::kernel::Product;
use half::bf16;

impl Run for Product {
    fn scratch(&self) -> Scratch {
        let [m, n, k] = sizes([self.m, self.n, self.k]);
        // The rows that are needed, where not all are.
        Scratch { local: product::scratch(self.stored, (m, n, k)), shared: m }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let same = || args.view::<T>("b").start;
        let widened = || args.view::<Widened>("b").start;
        match (self.stored, args.packed(cx, "b"), args.narrow("c")) {
            (_, Some(b), false) => product::<f32, f32>(self, cx, args, b),
            (_, Some(b), true) => product::<f32, bf16>(self, cx, args, b),
            (false, None, false) => product::<T, f32>(self, cx, args, same()),
            (false, None, true) => product::<T, bf16>(self, cx, args, same()),
            (true, None, false) => product::<f32, f32>(self, cx, args, widened()),
            (true, None, true) => product::<f32, bf16>(self, cx, args, widened()),
        }
    }
}

/// With a left operand of type `L` and a result of type `C`.
fn product<L: Stored, C: Stored>(kernel: &Product, cx: &Context, args: &Arguments, b_of: impl Matrices<L>) {
    let Product { m, n, k, a, b, accumulate, stored: _ } = kernel;
    let size = (*m as usize, *n as usize, *k as usize);
    let b = b_of.matrix(0, b.column as usize, b.row as usize);
    let c = args.view::<C>("c").start;
    let Some(places) = args.places(*m).filter(|_| kernel.leaves_rows_out()) else {
        cx.count(|| m * n * k);
        let (line, step) = (a.row as usize, a.column as usize);
        let a = product::Side::Strided { start: args.view::<L>("a").start, line, step };
        // SAFETY: the plan was checked: the operands hold these matrices, and nothing overlaps the
        // result.
        unsafe { product::product(cx, size, a, b, c, size.1, *accumulate) };
        return;
    };
    let order = cx.shared().integers();
    let (start, row) = (args.view::<L>("a").start, a.row as usize);
    let mut used = 0;
    for (i, _) in places.iter().enumerate().filter(|(_, p)| **p >= 0) {
        order.part_mut(used, 1)[0] = i as i32;
        used += 1;
    }
    cx.count(|| used as u64 * n * k);
    let a = product::Side::GatheredLines { start, row, order: order.start, per: 1 };
    // SAFETY: as above; `order` lists rows of `a` and of the result.
    unsafe { product::product_of_some(cx, (used, size.1, size.2), a, b, c, order.part(0, used)) };
}
