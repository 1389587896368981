//! Products of f32 whose operands are rounded to bf16, as those of attention are.
//!
//! *In*: a left operand of f32 and panels of f32. *Out*: the product, its sums in f32. *Promise*:
//! an element has the bits of its own row and column, whatever else is multiplied.

use super::chunk::{CHUNK, Lines};
use crate::device::backend::cpu::product::{self, Left as Operand, Right, tile};
use crate::device::backend::cpu::simd::{WIDEST, interleave_rows, narrow};
use crate::device::backend::cpu::{Pointer, Stored};
use half::bf16;
use std::cell::RefCell;

/// Most steps that are rounded at a time.
const STEPS: usize = 256;
/// Most lines of columns that are rounded at a time; rows are at most those of a chunk.
const LINES: usize = WIDEST;
/// Steps from row to row: rows begin in different places of the first cache.
const PITCH: usize = STEPS + 32;
/// Most columns of a panel.
const COLUMNS: usize = 64;

/// Rounded operands.
#[repr(C, align(64))]
struct Room {
    rows: [bf16; CHUNK * PITCH],
    columns: [f32; STEPS / 2 * LINES],
    right: [f32; STEPS / 2 * COLUMNS],
}

thread_local! {
    static ROOM: RefCell<Room> = const {
        RefCell::new(Room {
            rows: [bf16::ZERO; CHUNK * PITCH],
            columns: [0.0; STEPS / 2 * LINES],
            right: [0.0; STEPS / 2 * COLUMNS],
        })
    };
}

/// Whether operands that are `T` are rounded: the processor multiplies pairs of bf16.
pub(super) fn rounds<T: Stored>() -> bool {
    T::per_word() == 2
}

/// Rounds a row; after the last of an odd number of steps there is a zero.
fn round_row(from: &[f32], to: &mut [bf16]) {
    narrow(from, &mut to[..from.len()]);
    if from.len() % 2 == 1 {
        to[from.len()] = bf16::ZERO;
    }
}

/// `c = a · b` or `c += a · b`: `m` lines of `a`, `k` steps, `n` columns. Panels of `b` are `panel`
/// floats apart, rows of `c` `stride`, and its pieces of a panel's columns `next`.
pub(super) fn multiply(
    (m, n, k): (usize, usize, usize),
    a: Lines,
    (b, panel): (&[f32], usize),
    (c, stride, next): (&mut [f32], usize, usize),
    accumulate: bool,
) {
    let width = product::shape().columns;
    let last = n.saturating_sub(1) / width;
    assert!(width <= COLUMNS && m > 0 && n > 0);
    assert!(c.len() >= last * next + (m - 1) * stride + n - last * width);
    if k == 0 {
        for j in (0..n).step_by(width) {
            let rows = c[j / width * next..].chunks_mut(stride).take(m);
            rows.for_each(|row| row[..width.min(n - j)].fill(0.0));
        }
        return;
    }
    ROOM.with_borrow_mut(|room| {
        for first in (0..k).step_by(STEPS) {
            let steps = (k - first).min(STEPS);
            let accumulate = accumulate || first > 0;
            for line in (0..m).step_by(LINES) {
                let lines = (m - line).min(LINES);
                let rows: [Pointer<f32>; CHUNK];
                let left = match a {
                    Lines::Rows(a, apart) => {
                        assert!(m <= CHUNK);
                        let from = a.chunks(apart).take(m);
                        for (row, to) in from.zip(room.rows.chunks_exact_mut(PITCH)) {
                            round_row(&row[first..first + steps], to);
                        }
                        let start = Pointer(room.rows.as_mut_ptr().cast::<f32>());
                        rows = std::array::from_fn(|i| start.add(i * PITCH / 2));
                        Operand::Lines(&rows[..m])
                    }
                    Lines::Columns(a, apart) => {
                        interleave_rows(&a[first * apart + line..], apart, steps, lines, &mut room.columns);
                        Operand::Steps(Pointer::to(&mut room.columns), lines)
                    }
                };
                for (j, b) in (0..n).step_by(width).zip(b.chunks(panel)) {
                    interleave_rows(&b[first * width..], width, steps, width, &mut room.right);
                    let size = (lines, width.min(n - j), steps);
                    let right = Right::new::<bf16>(&room.right, steps);
                    let to = Pointer::to(&mut c[line * stride + j / width * next..]);
                    // SAFETY: lines of `steps` are in the room, and `c` has been measured.
                    unsafe { tile::<bf16>(size, left, right, to, stride, accumulate) }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::backend::cpu::simd::pairs;

    /// More lines, steps and columns than are rounded at a time, rows and columns, overwritten and
    /// added to, results in rows and in panels.
    #[test]
    fn products_are_those_of_rounded_numbers() {
        if !pairs() {
            return dreamc_skip::skip("the processor multiplies no pairs of bf16");
        }
        let width = product::shape().columns;
        let value = |i: usize, by: usize| ((i * by + 11) % 1009) as f32 / 501.7 - 1.0;
        let rounded = |x: f32| f64::from(bf16::from_f32(x));
        for (m, n, k, rows) in
            [(64usize, 70usize, 601usize, true), (300, 70, 601, false), (1, 1, 1, true), (5, 33, 2, false)]
        {
            let apart = if rows { k + 3 } else { m + 3 };
            let a: Vec<f32> = (0..apart * if rows { m } else { k }).map(|i| value(i, 37)).collect();
            let of_a = |i: usize, s: usize| if rows { a[i * apart + s] } else { a[s * apart + i] };
            let panel = k * width;
            let b: Vec<f32> = (0..n.div_ceil(width) * panel).map(|i| value(i, 53)).collect();
            let of_b = |s: usize, j: usize| b[j / width * panel + s * width + j % width];
            for (accumulate, panels) in [(false, false), (true, false), (false, true), (true, true)] {
                let (stride, next) = if panels { (width, m * width) } else { (n + 2, width) };
                let mut c = vec![0.25; if panels { n.div_ceil(width) * next } else { m * stride }];
                let left = if rows { Lines::Rows(&a, apart) } else { Lines::Columns(&a, apart) };
                multiply((m, n, k), left, (&b, panel), (&mut c, stride, next), accumulate);
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let sum: f64 = (0..k).map(|s| rounded(of_a(i, s)) * rounded(of_b(s, j))).sum();
                    let right = sum + if accumulate { 0.25 } else { 0.0 };
                    let found = f64::from(c[j / width * next + i * stride + j % width]);
                    assert!((found - right).abs() < 1e-3, "{m} {n} {k} {rows} at {i} {j}: {found}, {right}");
                }
            }
        }
    }
}
