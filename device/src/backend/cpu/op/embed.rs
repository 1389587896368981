//! Rows of a table by number.

use super::{Run, sizes};
use crate::backend::cpu::simd;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Embed, EmbedGrad};

impl Run for Embed {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, vocab, width] = sizes([self.rows, self.vocab, self.width]);
        let (ids, x) = (args.ints("ids").all(), args.floats("x").rows_of(width));
        if !cx.indices_below(ids, vocab) {
            return;
        }
        if let Some(table) = args.packed(cx, "table") {
            return cx.pieces(rows, width, |range, _| {
                for row in range {
                    // SAFETY: ids are below the number of rows.
                    unsafe { table.unpack(ids[row] as usize * width, x.row_mut(row)) };
                }
            });
        }
        let table = args.view::<T>("table").rows_of(width);
        cx.pieces(rows, width, |range, _| {
            for row in range {
                let (from, to) = (table.row(ids[row] as usize), x.row_mut(row));
                from.iter().zip(to).for_each(|(from, to)| *to = from.widen());
            }
        });
    }
}

impl Run for EmbedGrad {
    /// A task owns a range of ids, so rows of an id are added in their order.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, vocab, width] = sizes([self.rows, self.vocab, self.width]);
        let (d, ids, table) =
            (args.floats("d").rows_of(width), args.ints("ids").all(), args.floats("table").rows_of(width));
        if !cx.indices_below(ids, vocab) {
            return;
        }
        // Reading all ids is the price of every task, so there are few.
        let size = vocab.div_ceil(16).max(1);
        cx.parallel(vocab.div_ceil(size), |task, _| {
            let range = task * size..((task + 1) * size).min(vocab);
            if !self.accumulate {
                range.clone().for_each(|id| table.row_mut(id).fill(0.0));
            }
            for (row, &id) in ids.iter().enumerate().take(rows) {
                if range.contains(&(id as usize)) {
                    simd::add(d.row(row), table.row_mut(id as usize));
                }
            }
        });
    }
}
