//! Tokens taken from their sequence and put back.

use super::route::best_of_many;
use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::kernel::{PutTokens, TakeTokens, TopTokens};

impl Run for TopTokens {
    fn scratch(&self) -> Scratch {
        Scratch::local(2 * self.tokens as usize)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [tokens, k] = sizes([self.tokens, self.k]);
        if k == 0 {
            return;
        }
        let (r, index) = (args.floats("r").rows_of(tokens), args.ints("index").rows_of(k));
        cx.parallel(r.rows, |sequence, scratch| {
            let index = index.row_mut(sequence);
            best_of_many(r.row(sequence), index, scratch);
            index.sort_unstable();
        });
    }
}

impl Run for TakeTokens {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [tokens, k, width] = sizes([self.tokens, self.k, self.width]);
        let index = args.ints("index").all();
        if !cx.indices_below(index, tokens) {
            return;
        }
        match self.dtype {
            DType::F32 => take_rows::<f32>(cx, [tokens, k, width], index, args),
            DType::I32 => take_rows::<i32>(cx, [tokens, k, width], index, args),
            DType::Bf16 => take_rows::<half::bf16>(cx, [tokens, k, width], index, args),
            // Refused by the check of the plan.
            DType::E4m3 | DType::Packed(_) => {}
        }
    }
}

fn take_rows<T: Copy + Sync>(cx: &Context, [tokens, k, width]: [usize; 3], index: &[i32], args: &Arguments) {
    let (x, y) = (args.view::<T>("x").rows_of(width), args.view::<T>("y").rows_of(width));
    cx.pieces(index.len(), width, |range, _| {
        for i in range {
            y.row_mut(i).copy_from_slice(x.row(i / k * tokens + index[i] as usize));
        }
    });
}

impl Run for PutTokens {
    /// A task has whole sequences, whose rows it first makes those of no place.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [tokens, k, width] = sizes([self.tokens, self.k, self.width]);
        let index = args.ints("index").all();
        if k == 0 || !cx.indices_below(index, tokens) {
            return;
        }
        match self.dtype {
            DType::F32 => put_rows::<f32>(cx, [tokens, k, width], index, -0.0, args),
            DType::I32 => put_rows::<i32>(cx, [tokens, k, width], index, -1, args),
            DType::Bf16 => put_rows(cx, [tokens, k, width], index, half::bf16::NEG_ZERO, args),
            // Refused by the check of the plan.
            DType::E4m3 | DType::Packed(_) => {}
        }
    }
}

fn put_rows<T: Copy + Sync>(
    cx: &Context,
    [tokens, k, width]: [usize; 3],
    index: &[i32],
    none: T,
    args: &Arguments,
) {
    let (x, y) = (args.view::<T>("x").rows_of(width), args.view::<T>("y").rows_of(width));
    cx.pieces(index.len() / k, tokens * width, |range, _| {
        for sequence in range {
            for row in 0..tokens {
                y.row_mut(sequence * tokens + row).fill(none);
            }
            for (i, &place) in index[sequence * k..][..k].iter().enumerate() {
                y.row_mut(sequence * tokens + place as usize).copy_from_slice(x.row(sequence * k + i));
            }
        }
    });
}
