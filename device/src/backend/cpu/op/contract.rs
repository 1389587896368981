//! Products.

use super::{Run, fp8, sizes};
use crate::backend::cpu::product::{self, Matrices, Widened};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::ir::TILE;
use dreamc_compiler::program::kernel::{Product, ProductE4m3};
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

impl Run for ProductE4m3 {
    fn scratch(&self) -> Scratch {
        let [m, n, k] = sizes([self.m, self.n, self.k]);
        Scratch { local: 0, shared: (m + n) * k }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        match args.narrow("c") {
            true => of_codes::<bf16>(self, cx, args),
            false => of_codes::<f32>(self, cx, args),
        }
    }
}

/// Numbers of both operands, then sums in order: products of two of them are exact.
fn of_codes<C: Stored>(kernel: &ProductE4m3, cx: &Context, args: &Arguments) {
    let [m, n, k] = sizes([kernel.m, kernel.n, kernel.k]);
    cx.count(|| kernel.m * kernel.n * kernel.k);
    let numbers: Vec<f32> = (0..=255u8).map(fp8::number).collect();
    let all = cx.shared();
    for (name, first, lines) in [("a", 0, m), ("b", m, n)] {
        let codes = args.view::<u8>(name).all();
        let (codes, exponents) = codes.split_at(lines * k);
        cx.pieces(lines, k, |range, _| {
            for line in range {
                let to = all.part_mut((first + line) * k, k);
                for (at, (x, &code)) in to.iter_mut().zip(&codes[line * k..][..k]).enumerate() {
                    let exponent = exponents[at / TILE as usize * lines + line];
                    *x = numbers[usize::from(code)] * f32::from_bits(u32::from(exponent) << 23);
                }
            }
        });
    }
    let c = args.view::<C>("c");
    cx.pieces(m, n * k, |range, _| {
        for i in range {
            let (a, c) = (all.part(i * k, k), c.part_mut(i * n, n));
            for (j, c) in c.iter_mut().enumerate() {
                let b = all.part((m + j) * k, k);
                let sum = a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b);
                let sum = if kernel.accumulate { c.widen() + sum } else { sum };
                C::store(&[sum], std::slice::from_mut(c));
            }
        }
    });
}
