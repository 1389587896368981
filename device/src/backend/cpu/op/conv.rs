//! Causal convolutions over the sequence.
//!
//! Little arithmetic for each number: a task takes some tokens, whose rows and those before them
//! are near, and goes through all channels of a row for each entry of the filters. The gradient of
//! filters sums over all tokens: a task takes some channels.

use super::{Run, sizes};
use crate::backend::cpu::simd::{fma, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Stored, View};
use dreamc_compiler::op::{Sequence, Tokens};
use dreamc_compiler::program::kernel::{Conv, ConvGrad};

/// Channels of a task.
const PIECE: usize = 128;

kernel_fn! {
    /// `y += w ⊙ x`.
    fn add_product(w: &[f32], x: &[f32], y: &mut [f32]) {
        for ((y, w), x) in y.iter_mut().zip(w).zip(x) {
            *y = fma::<FMA>(*w, *x, *y);
        }
    }

    /// `y = w[0] ⊙ x[0] + w[1] ⊙ x[1] + …`, of up to four.
    fn products(w: [&[f32]; 4], x: [&[f32]; 4], y: &mut [f32]) {
        let n = y.len();
        let (w, x) = (w.map(|w| &w[..n]), x.map(|x| &x[..n]));
        for c in 0..n {
            let near = fma::<FMA>(w[1][c], x[1][c], w[0][c] * x[0][c]);
            y[c] = fma::<FMA>(w[3][c], x[3][c], fma::<FMA>(w[2][c], x[2][c], near));
        }
    }
}

/// Rows of one sequence.
struct Rows<'a> {
    x: View<'a, f32>,
    w: View<'a, f32>,
    first: usize,
    tokens: usize,
    width: usize,
}

impl Rows<'_> {
    /// A row of the result, at a token that takes part.
    fn token(&self, sequence: &Sequence, i: usize, reverse: bool, y: &mut [f32]) {
        // The filter that most have, where each of its entries meets a token.
        if self.width == 4 && !reverse && i >= 3 && !sequence.is_marked() {
            let at = self.first + i;
            let x = [0, 1, 2, 3].map(|k| self.x.row(at - k));
            return products([0, 1, 2, 3].map(|k| self.w.row(k)), x, y);
        }
        y.fill(0.0);
        let mut at = Some(i);
        for k in 0..self.width {
            let Some(j) = at else { break };
            add_product(self.w.row(k), self.x.row(self.first + j), y);
            at = if k + 1 < self.width { sequence.next(j, self.tokens, reverse) } else { None };
        }
    }
}

impl Run for Conv {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let [batch, tokens, channels, width] = sizes([s.batch, s.tokens, s.channels, s.width]);
        let (x, w, y) =
            (args.floats("x"), args.floats("w").rows_of(channels), args.floats("y").rows_of(channels));
        if self.tokens == Tokens::Kept {
            return self.continued(cx, args);
        }
        let segments = (self.tokens == Tokens::Segments).then(|| args.ints("segments").rows_of(tokens));
        cx.pieces(batch * tokens, channels * width, |range, _| {
            for at in range {
                let (b, i) = (at / tokens, at % tokens);
                let sequence = Sequence::of_segments(segments.map(|s| s.row(b)));
                let y = y.row_mut(at);
                match sequence.takes_part(i) {
                    true => {
                        Rows { x, w, first: b * tokens, tokens, width }.token(&sequence, i, self.reverse, y)
                    }
                    false => y.fill(0.0),
                }
            }
        });
    }
}

trait Continue {
    fn continued(&self, cx: &Context, args: &Arguments);
}

impl Continue for Conv {
    /// A task takes a text.
    fn continued(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let [batch, tokens, channels, width] = sizes([s.batch, s.tokens, s.channels, s.width]);
        let (x, w, y) =
            (args.floats("x"), args.floats("w").rows_of(channels), args.floats("y").rows_of(channels));
        let (slots, history) = (args.ints("slots").rows_of(tokens), args.floats("history"));
        let kept = (width - 1) * channels;
        cx.parallel(batch, |b, _| {
            let history = history.part_mut(b * kept, kept);
            for (i, &slot) in slots.row(b).iter().enumerate() {
                let y = y.row_mut(b * tokens + i);
                y.fill(0.0);
                if slot < 0 {
                    continue;
                }
                let x = x.row(b * tokens + i);
                add_product(w.row(0), x, y);
                for k in 1..width {
                    add_product(w.row(k), &history[(width - 1 - k) * channels..][..channels], y);
                }
                if width > 1 {
                    history.copy_within(channels.., 0);
                    history[kept - channels..].copy_from_slice(x);
                }
            }
        });
    }
}

impl Run for ConvGrad {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let [batch, tokens, channels, width] = sizes([s.batch, s.tokens, s.channels, s.width]);
        let (x, dy, dw) = (args.floats("x"), args.floats("dy"), args.floats("dw"));
        let segments = self.segments.then(|| args.ints("segments").rows_of(tokens));
        cx.parallel(channels.div_ceil(PIECE), |task, _| {
            let range = task * PIECE..((task + 1) * PIECE).min(channels);
            let row = |k: usize| dw.part_mut(k * channels + range.start, range.len());
            (0..width).for_each(|k| row(k).fill(0.0));
            for b in 0..batch {
                let sequence = Sequence::of_segments(segments.map(|s| s.row(b)));
                for i in (0..tokens).filter(|&i| sequence.takes_part(i)) {
                    let d = &dy.row(b * tokens + i)[range.clone()];
                    let mut at = Some(i);
                    for k in 0..width {
                        let Some(j) = at else { break };
                        add_product(d, &x.row(b * tokens + j)[range.clone()], row(k));
                        at = if k + 1 < width { sequence.before(j) } else { None };
                    }
                }
            }
        });
    }
}
