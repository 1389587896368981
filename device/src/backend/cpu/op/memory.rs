//! Moving memory as it is.

use super::Run;
use crate::backend::cpu::simd;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Copy, Zero};

impl Run for Zero {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let bytes = args.bytes("x");
        cx.pieces(bytes.length, 1, |range, _| bytes.part_mut(range.start, range.len()).fill(0));
    }
}

impl Run for Copy {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        if self.accumulate {
            let (x, y) = (args.floats("x"), args.floats("y"));
            cx.pieces(x.length, 1, |range, _| {
                simd::add(x.part(range.start, range.len()), y.part_mut(range.start, range.len()));
            });
            return;
        }
        let [x, y] = ["x", "y"].map(|name| args.bytes(name));
        cx.pieces(x.length, 1, |range, _| {
            y.part_mut(range.start, range.len()).copy_from_slice(x.part(range.start, range.len()));
        });
    }
}
