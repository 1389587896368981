//! Rows of earlier tokens.

use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Shift, ShiftState};

impl Run for Shift {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [batch, tokens, width, by] = sizes([self.batch, self.tokens, self.width, self.by]);
        let (x, y) = (args.floats("x"), args.floats("y").rows_of(width));
        let places = self.places.then(|| args.ints("places").all());
        let segments = self.segments.then(|| args.ints("segments").all());
        let takes = |i: usize| places.is_none_or(|places| places[i] >= 0);
        let same = |i: usize, j: usize| segments.is_none_or(|segments| segments[i] == segments[j]);
        cx.pieces(batch * tokens, width, |range, _| {
            for i in range {
                let first = i / tokens * tokens;
                let near = |j: &usize| same(i, *j);
                let from = match (takes(i), self.ahead) {
                    (false, _) => None,
                    (true, true) => {
                        (i + 1..first + tokens).filter(|&j| takes(j)).take_while(near).nth(by - 1)
                    }
                    (true, false) => (first..i).rev().filter(|&j| takes(j)).take_while(near).nth(by - 1),
                };
                match from {
                    Some(from) => y.row_mut(i).copy_from_slice(x.row(from)),
                    None => y.row_mut(i).fill(0.0),
                }
            }
        });
    }
}

impl Run for ShiftState {
    /// A task has whole texts: their histories go on after their tokens.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [batch, tokens, width, by] = sizes([self.batch, self.tokens, self.width, self.by]);
        let (x, slots) = (args.floats("x"), args.ints("slots").all());
        let (history, y) = (args.floats("history").rows_of(width), args.floats("y").rows_of(width));
        cx.pieces(batch, tokens * width, |texts, _| {
            for text in texts {
                let all = text * tokens..(text + 1) * tokens;
                let taking = || all.clone().filter(|&i| slots[i] >= 0);
                let mut before = taking();
                let mut count = 0;
                for i in all.clone() {
                    match slots[i] >= 0 {
                        false => y.row_mut(i).fill(0.0),
                        true if count < by => {
                            y.row_mut(i).copy_from_slice(history.row(text * by + count));
                            count += 1;
                        }
                        true => {
                            // There are as many before it as are counted.
                            let from = before.next().unwrap_or(i);
                            y.row_mut(i).copy_from_slice(x.row(from));
                            count += 1;
                        }
                    }
                }
                // A text of no tokens keeps its history where it is.
                let moved = if count > 0 { by.saturating_sub(count) } else { 0 };
                for row in 0..moved {
                    history.row_mut(text * by + row).copy_from_slice(history.row(text * by + row + count));
                }
                for (k, i) in taking().enumerate().skip(count.saturating_sub(by)) {
                    history.row_mut(text * by + by + k - count).copy_from_slice(x.row(i));
                }
            }
        });
    }
}
