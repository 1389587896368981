//! Elements in another order.

use super::Run;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::Arrange;

impl Run for Arrange {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let (x, y) = (args.view::<T>("x"), args.view::<T>("y"));
        let [outer @ .., last] = self.sizes.map(|n| n as usize);
        let [steps @ .., step] = self.strides.map(|n| n as usize);
        let x = x.all();
        cx.pieces(outer.iter().product(), last, |range, _| {
            for row in range {
                let (mut left, mut from) = (row, 0);
                for (size, step) in outer.iter().zip(&steps).rev() {
                    from += left % size * step;
                    left /= size;
                }
                let y = y.part_mut(row * last, last);
                match step {
                    1 => y.copy_from_slice(&x[from..from + last]),
                    _ => y.iter_mut().enumerate().for_each(|(i, y)| *y = x[from + i * step]),
                }
            }
        });
    }
}
