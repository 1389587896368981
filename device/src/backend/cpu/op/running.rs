//! Sums over the tokens so far.
//!
//! A task takes some channels of a sequence and goes through its tokens in order.

use super::{Run, sizes};
use crate::backend::cpu::simd;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::op::{Sequence, Tokens};
use dreamc_compiler::program::kernel::Running;

/// Channels of a task.
const PIECE: usize = 256;

impl Run for Running {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [batch, tokens, channels] = sizes([self.batch, self.tokens, self.channels]);
        let (x, y) = (args.floats("x"), args.floats("y"));
        let marks = match self.of {
            Tokens::All => None,
            Tokens::Segments => Some(args.ints("segments").rows_of(tokens)),
            Tokens::Kept => Some(args.ints("slots").rows_of(tokens)),
        };
        let state = (self.of == Tokens::Kept).then(|| args.floats("sum"));
        let blocks = self.block.map(|block| (block, args.ints("positions").rows_of(tokens)));
        let row = channels * (1 + usize::from(blocks.is_some()));
        let pieces = channels.div_ceil(PIECE);
        cx.parallel(batch * pieces, |task, _| {
            let (b, first) = (task / pieces, task % pieces * PIECE);
            let length = PIECE.min(channels - first);
            let sequence = match (self.of, marks) {
                (Tokens::Kept, Some(slots)) => Sequence::of_slots(slots.row(b)),
                (_, segments) => Sequence::of_segments(segments.map(|s| s.row(b))),
            };
            let mut sums = [0.0; PIECE];
            let sum = match state {
                Some(state) => state.part_mut(b * row + first, length),
                None => &mut sums[..length],
            };
            // The number of each sum's block and one.
            let mut numbers = [0.0; PIECE];
            let before = match state.filter(|_| blocks.is_some()) {
                Some(state) => state.part_mut(b * row + channels + first, length),
                None => &mut numbers[..length],
            };
            let mut last = None;
            for n in 0..tokens {
                let i = if self.reverse { tokens - 1 - n } else { n };
                let y = y.part_mut((b * tokens + i) * channels + first, length);
                if !sequence.takes_part(i) {
                    y.fill(0.0);
                    continue;
                }
                let goes_on = match last {
                    Some(last) if self.reverse => sequence.continues(i, last),
                    Some(last) => sequence.continues(last, i),
                    None => true,
                };
                if !goes_on {
                    sum.fill(0.0);
                }
                if let Some((block, positions)) = blocks {
                    let number = (positions.row(b)[i].max(0) as u64 / block + 1) as f32;
                    for (sum, before) in sum.iter_mut().zip(before.iter_mut()) {
                        if *before != number {
                            (*sum, *before) = (0.0, number);
                        }
                    }
                }
                simd::add(&x.row(b * tokens + i)[first..first + length], sum);
                y.copy_from_slice(sum);
                last = Some(i);
            }
        });
    }
}
