//! Rows of caches written, appended and taken.

use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Append, CacheTake, CacheWrite};

impl Run for CacheWrite {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [width, parts] = sizes([self.width, self.parts]);
        let (x, row, cache) = (args.floats("x"), args.index("row"), args.floats("cache"));
        let length = width / parts;
        cx.pieces(parts, length, |range, _| {
            for part in range {
                cache.part_mut(row * width + part * length, length).copy_from_slice(x.row(part));
            }
        });
    }
}

impl Run for CacheTake {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [width, parts] = sizes([self.width, self.parts]);
        let (row, cache, x) = (args.index("row"), args.floats("cache"), args.floats("x"));
        let length = width / parts;
        cx.pieces(parts, length, |range, _| {
            for part in range {
                let cached = cache.part_mut(row * width + part * length, length);
                x.row_mut(part).copy_from_slice(cached);
                cached.fill(0.0);
            }
        });
    }
}

impl Run for Append {
    /// A task takes whole sequences, so of two rows for one place the later stays.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, tokens, places, width] = sizes([self.rows, self.tokens, self.places, self.width]);
        let (x, slots, cache) =
            (args.view::<T>("x"), args.ints("slots").all(), args.view::<T>("cache").rows_of(width));
        if slots.iter().any(|&slot| slot as i64 >= places as i64) {
            return cx.bad_index();
        }
        cx.pieces(rows / tokens, tokens * width, |sequences, _| {
            for sequence in sequences {
                for (i, &slot) in slots[sequence * tokens..][..tokens].iter().enumerate() {
                    if let Ok(place) = usize::try_from(slot) {
                        let to = cache.row_mut(sequence * places + place);
                        to.copy_from_slice(x.row(sequence * tokens + i));
                    }
                }
            }
        });
    }
}
