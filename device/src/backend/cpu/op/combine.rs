//! Sums of the slots of each row, and their gradients.

use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Combine, CombineGates, CombineGrad};

/// Elements that are added up at a time.
const PIECE: usize = 256;

impl Run for Combine {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, k, width] = sizes([self.rows, self.k, self.width]);
        let (y, inverse) = (args.view::<T>("y").rows_of(width), args.ints("inverse").all());
        let gates = self.gated.then(|| args.floats("gates").all());
        let x = args.view::<T>("x").rows_of(width);
        if !cx.indices_below(inverse, rows * k) {
            return;
        }
        cx.pieces(rows, width * k, |range, _| {
            for row in range {
                for (i, x) in x.row_mut(row).chunks_mut(PIECE).enumerate() {
                    let mut sums = [0.0; PIECE];
                    let sums = &mut sums[..x.len()];
                    for slot in row * k..(row + 1) * k {
                        let y = &y.row(inverse[slot] as usize)[i * PIECE..][..x.len()];
                        T::add_scaled(gates.map_or(1.0, |g| g[slot]), y, sums);
                    }
                    T::store(sums, x);
                }
            }
        });
    }
}

impl Run for CombineGrad {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [slots, k, width] = sizes([self.slots, self.k, self.width]);
        let (d, order, gates) =
            (args.view::<T>("d").rows_of(width), args.ints("order").all(), args.floats("gates").all());
        let y = args.view::<T>("y").rows_of(width);
        if !cx.indices_below(order, slots) {
            return;
        }
        cx.pieces(slots, width, |range, _| {
            for s in range {
                let slot = order[s] as usize;
                T::scale(gates[slot], d.row(slot / k), y.row_mut(s));
            }
        });
    }
}

impl Run for CombineGates {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, k, width] = sizes([self.rows, self.k, self.width]);
        let [d, y] = ["d", "y"].map(|name| args.view::<T>(name).rows_of(width));
        let inverse = args.ints("inverse").all();
        let gates = args.floats("gates").rows_of(k);
        if !cx.indices_below(inverse, rows * k) {
            return;
        }
        cx.pieces(rows, width * k, |range, _| {
            for row in range {
                for (gate, place) in gates.row_mut(row).iter_mut().zip(&inverse[row * k..]) {
                    *gate = T::inner(d.row(row), y.row(*place as usize));
                }
            }
        });
    }
}
