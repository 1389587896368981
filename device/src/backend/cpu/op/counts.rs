//! How many slots each expert had.

use super::Run;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::AddCounts;

impl Run for AddCounts {
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let (offsets, counts) = (args.ints("offsets").all(), args.floats("counts").all_mut());
        for (count, pair) in counts.iter_mut().zip(offsets.windows(2)) {
            *count += pair[1].wrapping_sub(pair[0]) as f32;
        }
    }
}
