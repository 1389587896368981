//! Rows in the order of slots.

use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::Gather;

impl Run for Gather {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [slots, k, width] = sizes([self.slots, self.k, self.width]);
        let (x, y) = (args.view::<T>("x").rows_of(width), args.view::<T>("y").rows_of(width));
        let order = args.ints("order").all();
        if !cx.indices_below(order, slots) {
            return;
        }
        cx.pieces(slots, width, |range, _| {
            for s in range {
                y.row_mut(s).copy_from_slice(x.row(order[s] as usize / k));
            }
        });
    }
}
