//! Tokens that decide for themselves: places, -1 where a token takes no part.

use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Admit, Decide, Keep, KeepInts, Numbers, Runs};

impl Run for Decide {
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let tokens = self.tokens as usize;
        let (z, places) = (args.floats("z").all(), args.ints("places").all_mut());
        for (i, (place, &z)) in places.iter_mut().zip(z).enumerate() {
            *place = if z > 0.0 || (self.inclusive && z == 0.0) { (i % tokens) as i32 } else { -1 };
        }
    }
}

impl Run for Keep {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, width] = sizes([self.rows, self.width]);
        let (x, places, y) =
            (args.floats("x").rows_of(width), args.ints("places").all(), args.floats("y").rows_of(width));
        cx.pieces(rows, width, |range, _| {
            for row in range {
                match places[row] >= 0 {
                    true => y.row_mut(row).copy_from_slice(x.row(row)),
                    false => y.row_mut(row).fill(-0.0),
                }
            }
        });
    }
}

impl Run for Numbers {
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let (x, y) = (args.ints("x").all(), args.floats("y").all_mut());
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = x as f32);
    }
}

impl Run for KeepInts {
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let width = self.width as usize;
        let (x, places, y) = (args.ints("x").all(), args.ints("places").all(), args.ints("y").all_mut());
        for (i, (y, &x)) in y.iter_mut().zip(x).enumerate() {
            *y = if places[i / width] >= 0 { x } else { self.otherwise };
        }
    }
}

impl Run for Runs {
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let tokens = self.tokens as usize;
        let (places, documents, runs) =
            (args.ints("places").all(), args.ints("documents").all(), args.ints("runs").all_mut());
        let sequences = places.chunks(tokens.max(1)).zip(documents.chunks(tokens.max(1)));
        for ((places, documents), runs) in sequences.zip(runs.chunks_mut(tokens.max(1))) {
            let mut run = 0;
            for i in 0..runs.len() {
                if i > 0 {
                    let taking = if self.begins { places[i] } else { places[i - 1] };
                    run += i32::from(taking >= 0 || documents[i] != documents[i - 1]);
                }
                runs[i] = run;
            }
        }
    }
}

impl Run for Admit {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [tokens, entries] = sizes([self.tokens, self.entries]);
        let (positions, places) = (args.ints("positions").all(), args.ints("places").all());
        let (cached, slots) = (args.ints("cached").all_mut(), args.ints("slots").all_mut());
        for b in 0..slots.len() / tokens.max(1) {
            let cached = &mut cached[b * entries..(b + 1) * entries];
            let mut next = cached.iter().take_while(|p| **p >= 0).count();
            for i in b * tokens..(b + 1) * tokens {
                slots[i] = -1;
                if places[i] < 0 {
                    continue;
                }
                let Some(entry) = cached.get_mut(next) else {
                    cx.bad_index();
                    continue;
                };
                *entry = positions[i];
                slots[i] = next as i32;
                next += 1;
            }
        }
    }
}
