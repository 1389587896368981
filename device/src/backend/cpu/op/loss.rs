//! Cross-entropy, and the head fused with it.

use super::{Run, sizes};
use crate::backend::cpu::product::{self, Matrices, RightOf as _, Side, Widened};
use crate::backend::cpu::simd::{self, exp, kernel_fn, largest, tanh};
use crate::backend::cpu::{Arguments, Context, Pointer, Scratch, Stored};
use dreamc_compiler::program::kernel::{CrossEntropy, CrossEntropyGrad, HeadLoss, HeadLossGrad};

kernel_fn! {
    /// `ln Σ e^x`
    fn log_sum_exp(x: &[f32]) -> f32 {
        let most = largest::<FMA>(x);
        if most == f32::NEG_INFINITY {
            return most;
        }
        most + simd::sum_with(x, x, |x, _, c| c + exp::<FMA>(x - most)).ln()
    }

    /// `d · softmax`, given the logarithm of its denominator.
    fn softmax_scaled(x: &[f32], lse: f32, d: f32, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = d * exp::<FMA>(*x - lse);
        }
    }

    /// Soft-caps logits.
    fn cap(x: &mut [f32], cap: f32) {
        let inverse = 1.0 / cap;
        for x in x {
            *x = cap * tanh::<FMA>(*x * inverse);
        }
    }

    /// Multiplies by the derivative of [`cap`], given its results.
    fn cap_grad(y: &[f32], d: &mut [f32], cap: f32) {
        let inverse = 1.0 / cap;
        for (d, y) in d.iter_mut().zip(y) {
            let t = *y * inverse;
            *d *= 1.0 - t * t;
        }
    }
}

/// Whether targets are below `vocab`; negative ones stand for no token.
fn targets_fit(cx: &Context, targets: &[i32], vocab: usize) -> bool {
    let fine = targets.iter().all(|&t| (t as i64) < vocab as i64);
    if !fine {
        cx.bad_index();
    }
    fine
}

impl Run for CrossEntropy {
    fn scratch(&self) -> Scratch {
        // A row of logits, where they are bf16.
        Scratch::local(self.vocab as usize)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, vocab] = sizes([self.rows, self.vocab]);
        let (logits, targets) = (args.view::<T>("logits").rows_of(vocab), args.ints("targets").all());
        let (nll, lse) = (args.floats("nll"), args.floats("lse"));
        if !targets_fit(cx, targets, vocab) {
            return;
        }
        cx.pieces(rows, vocab, |range, scratch| {
            let (nll, lse) = (nll.part_mut(range.start, range.len()), lse.part_mut(range.start, range.len()));
            for (i, row) in range.enumerate() {
                let logits = T::wide(logits.row(row), &mut scratch[..vocab]);
                lse[i] = log_sum_exp(logits);
                nll[i] = if targets[row] < 0 { 0.0 } else { lse[i] - logits[targets[row] as usize] };
            }
        });
    }
}

/// `d · (softmax - onehot)`, 0 for no target.
fn loss_grad(logits: &[f32], target: i32, lse: f32, d: f32, dlogits: &mut [f32]) {
    if target < 0 {
        dlogits.fill(0.0);
    } else {
        softmax_scaled(logits, lse, d, dlogits);
        dlogits[target as usize] -= d;
    }
}

impl Run for CrossEntropyGrad {
    fn scratch(&self) -> Scratch {
        // A row of logits, and one of their gradient, where they are bf16.
        Scratch::local(2 * self.vocab as usize)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, vocab] = sizes([self.rows, self.vocab]);
        let (logits, targets) = (args.view::<T>("logits").rows_of(vocab), args.ints("targets").all());
        let (lse, d, dlogits) =
            (args.floats("lse").all(), args.floats("d").all(), args.view::<T>("dlogits").rows_of(vocab));
        if !targets_fit(cx, targets, vocab) {
            return;
        }
        cx.pieces(rows, vocab, |range, scratch| {
            let (read, written) = scratch[..2 * vocab].split_at_mut(vocab);
            for row in range {
                let logits = T::wide(logits.row(row), read);
                T::written(dlogits.row_mut(row), written, |dlogits| {
                    loss_grad(logits, targets[row], lse[row], d[row], dlogits);
                });
            }
        });
    }
}

/// Rows of a task of [`HeadLoss`], and logits of each that exist at a time.
const HEAD: (usize, usize) = (96, 256);

impl Run for HeadLoss {
    fn scratch(&self) -> Scratch {
        let [rows, vocab, width] = sizes([self.rows, self.vocab, self.width]);
        let (rows, vocab) = (rows.min(HEAD.0), vocab.min(HEAD.1));
        let product = product::scratch(self.stored, (rows, vocab, width));
        // Rows in bf16 are widened where weights are packed.
        let wide = if self.stored { rows * width } else { 0 };
        Scratch::local(rows * vocab + 2 * rows + wide + product)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let width = self.width as usize;
        match (self.stored, args.packed(cx, "w")) {
            (_, Some(w)) if T::NARROW => {
                let x = args.view::<T>("x").rows_of(width);
                let widened = |first: usize, count: usize, room: &mut [f32]| {
                    for (i, room) in room.chunks_exact_mut(width.max(1)).enumerate().take(count) {
                        T::wide(x.row(first + i), room);
                    }
                    Side::Strided { start: Pointer::to(room), line: width, step: 1 }
                };
                head_loss::<f32>(self, cx, args, (width, widened), w);
            }
            (_, Some(w)) => head_loss::<f32>(self, cx, args, (0, rows_in_memory(args, width)), w),
            (false, None) => {
                head_loss::<T>(self, cx, args, (0, rows_in_memory(args, width)), args.view::<T>("w").start)
            }
            (true, None) => {
                let w = args.view::<Widened>("w").start;
                head_loss::<f32>(self, cx, args, (0, rows_in_memory(args, width)), w);
            }
        }
    }
}

/// Rows of `x` as they are.
fn rows_in_memory<L: Stored>(
    args: &Arguments,
    width: usize,
) -> impl Fn(usize, usize, &mut [f32]) -> Side<L> + Send + Sync {
    let x = args.view::<L>("x").start;
    move |first, _, _| Side::Strided { start: x.add(first * width), line: width, step: 1 }
}

/// A tile of logits at a time, with a running maximum and sum for each row. `rows_of` gives a
/// number of rows from one on as `L`: as they are in memory, or in scratch, `room` numbers each.
fn head_loss<L: Stored>(
    kernel: &HeadLoss,
    cx: &Context,
    args: &Arguments,
    (room, rows_of): (usize, impl Fn(usize, usize, &mut [f32]) -> Side<L> + Send + Sync),
    w: impl Matrices<L>,
) {
    let [rows, vocab, width] = sizes([kernel.rows, kernel.vocab, kernel.width]);
    let targets = args.ints("targets").all();
    let (nll, lse) = (args.floats("nll"), args.floats("lse"));
    if !targets_fit(cx, targets, vocab) {
        return;
    }
    cx.count(|| (rows * vocab * width) as u64);
    let size = product::piece(rows, HEAD.0, 1).min(HEAD.0);
    cx.parallel(rows.div_ceil(size), |task, scratch| {
        let first = task * size;
        let count = size.min(rows - first);
        let (nll, lse) = (nll.part_mut(first, count), lse.part_mut(first, count));
        let (tile, scratch) = scratch.split_at_mut(count * HEAD.1.min(vocab));
        let (most, scratch) = scratch.split_at_mut(count);
        let (sums, scratch) = scratch.split_at_mut(count);
        let (room, scratch) = scratch.split_at_mut(count * room);
        let a = rows_of(first, count, room);
        most.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
        nll.fill(0.0);
        for class in (0..vocab).step_by(HEAD.1) {
            let classes = HEAD.1.min(vocab - class);
            let b = w.matrix(class * width, width, 1);
            let logits = Pointer::to(tile);
            // SAFETY: the tile is this task's.
            unsafe { b.block((count, classes, width), a, (logits, classes, false), scratch) };
            for (i, logits) in tile.chunks_exact_mut(classes).take(count).enumerate() {
                if let Some(c) = kernel.softcap {
                    cap(logits, c.0 as f32);
                }
                let target = targets[first + i] as i64 - class as i64;
                if (0..classes as i64).contains(&target) {
                    nll[i] = -logits[target as usize];
                }
                running_sum(logits, &mut most[i], &mut sums[i]);
            }
        }
        for i in 0..count {
            lse[i] = most[i] + sums[i].ln();
            nll[i] = if targets[first + i] < 0 { 0.0 } else { lse[i] + nll[i] };
        }
    });
}

kernel_fn! {
    /// Adds `Σ e^x` to a sum kept relative to its largest exponent.
    fn running_sum(x: &[f32], most: &mut f32, sum: &mut f32) {
        let high = largest::<FMA>(x);
        if high > *most {
            *sum *= exp::<FMA>(*most - high);
            *most = high;
        }
        let most = *most;
        if most > f32::NEG_INFINITY {
            *sum += simd::sum_with(x, x, |x, _, c| c + exp::<FMA>(x - most));
        }
    }
}

/// Rows whose logits exist at a time in [`HeadLossGrad`]: some four million floats.
fn head_chunk(rows: usize, vocab: usize) -> usize {
    ((1 << 22) / vocab).clamp(32, 2048).min(rows)
}

impl Run for HeadLossGrad {
    fn scratch(&self) -> Scratch {
        let [rows, vocab, width] = sizes([self.rows, self.vocab, self.width]);
        let chunk = head_chunk(rows, vocab);
        let sizes = [(chunk, vocab, width), (chunk, width, vocab), (vocab, width, chunk)];
        let local = sizes.map(|(m, n, k)| product::product_scratch(m, n, k)).into_iter().max().unwrap_or(0);
        // Logits, and their gradient where it is not stored over them; rows of it begin at whole
        // words.
        Scratch { local: local + vocab, shared: chunk * (vocab + vocab.div_ceil(2)) }
    }

    /// For some rows at a time, the logits and their gradient, then both products of it.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, vocab, width] = sizes([self.rows, self.vocab, self.width]);
        let (x, w, targets) =
            (args.view::<T>("x").start, args.view::<T>("w").start, args.ints("targets").all());
        let (lse, d) = (args.floats("lse").all(), args.floats("d").all());
        let (dx, dw) = (args.floats("dx").start, args.floats("dw"));
        if !targets_fit(cx, targets, vocab) {
            return;
        }
        cx.count(|| 3 * (rows * vocab * width) as u64);
        if rows == 0 && !self.accumulate {
            dw.all_mut().fill(0.0);
        }
        let chunk = head_chunk(rows, vocab).max(1);
        let logits = cx.shared().rows_of_part(vocab, chunk.min(rows));
        // Operands of the two products: the gradient as f32, stored over the logits, or as bf16
        // after them.
        let line = vocab.next_multiple_of(2);
        let gradient = match T::NARROW {
            false => Pointer(logits.start.get_mut().cast::<T>()),
            true => Pointer(logits.start.add(chunk.min(rows) * vocab).get_mut().cast::<T>()),
        };
        let line = if T::NARROW { line } else { vocab };
        let rows_of = |start: Pointer<T>, row: usize| Side::Strided {
            start: start.add(row * width),
            line: width,
            step: 1,
        };
        let columns_of = |start: Pointer<T>, row: usize| Side::Strided {
            start: start.add(row * width),
            line: 1,
            step: width,
        };
        for first in (0..rows).step_by(chunk) {
            let count = chunk.min(rows - first);
            // SAFETY: the logits are this launch's, `dx` has the rows, `dw` is `vocab` by `width`;
            // the products follow one another.
            unsafe {
                let size = (count, vocab, width);
                product::product(cx, size, rows_of(x, first), rows_of(w, 0), logits.start, vocab, false);
                cx.parallel(count.div_ceil(16), |task, scratch| {
                    for row in task * 16..(task * 16 + 16).min(count) {
                        let logits = logits.row_mut(row);
                        let (target, i) = (targets[first + row], first + row);
                        match self.softcap {
                            None => {
                                let capped = &mut scratch[..vocab];
                                capped.copy_from_slice(logits);
                                loss_grad(capped, target, lse[i], d[i], logits);
                            }
                            Some(c) => {
                                let capped = &mut scratch[..vocab];
                                capped.copy_from_slice(logits);
                                cap(capped, c.0 as f32);
                                loss_grad(capped, target, lse[i], d[i], logits);
                                cap_grad(capped, logits, c.0 as f32);
                            }
                        }
                        if T::NARROW {
                            // Row `row` of the gradient, `vocab` of `line` elements, which is this
                            // task's.
                            let to =
                                std::slice::from_raw_parts_mut(gradient.add(row * line).get_mut(), vocab);
                            T::store(logits, to);
                        }
                    }
                });
                let dlogits = Side::Strided { start: gradient, line, step: 1 };
                let dx = dx.add(first * width);
                product::product(cx, (count, width, vocab), dlogits, columns_of(w, 0), dx, width, false);
                let dlogits = Side::Strided { start: gradient, line: 1, step: line };
                let adds = self.accumulate || first > 0;
                product::product(
                    cx,
                    (vocab, width, count),
                    dlogits,
                    columns_of(x, first),
                    dw.start,
                    width,
                    adds,
                );
            }
        }
    }
}
