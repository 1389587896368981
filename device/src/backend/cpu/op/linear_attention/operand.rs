//! Operands of products as the microkernel reads them: f32 in place where that does, or pairs of
//! numbers rounded to bf16, as those of attention are.
//!
//! *In*: rows of f32, or values in panels. *Out*: a left operand, or panels of a right one, in room
//! that the caller has. *Promise*: whoever keeps one has rounded it once, however many products
//! read it; an element of a product has the bits of its own row and column, whatever else is
//! multiplied.

use super::chunk::{CHUNK, Lines, Sizes, apart};
use crate::backend::cpu::product::{Left as Operand, Right, Side, pack_columns, tile};
use crate::backend::cpu::simd::{WIDEST, interleave, narrow};
use crate::backend::cpu::{Pointer, Stored};
use half::bf16;

/// Whether operands that are `T` are rounded: the processor multiplies pairs of bf16.
pub(super) fn rounds<T: Stored>() -> bool {
    T::per_word() == 2
}

/// The halves of words.
fn halves(words: &mut [f32]) -> &mut [bf16] {
    // SAFETY: a word is two bf16, which any bits are, and is aligned as they are.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}

/// Rounds a row; after the last of an odd number of steps there is a zero.
fn round_row(from: &[f32], to: &mut [f32]) {
    let to = halves(to);
    narrow(from, &mut to[..from.len()]);
    if from.len() % 2 == 1 {
        to[from.len()] = bf16::ZERO;
    }
}

/// Rounds `rows` rows of `width` floats, `line` from one to the next, two by two to rows of words,
/// `pitch` from one to the next. After the last of an odd number there are zeros.
fn round_pairs(x: &[f32], line: usize, [rows, width]: [usize; 2], to: &mut [f32], pitch: usize) {
    const NOTHING: [f32; WIDEST] = [0.0; WIDEST];
    for pair in 0..rows / 2 {
        let [low, high] = [0, 1].map(|k| &x[(2 * pair + k) * line..][..width]);
        interleave(low, high, &mut to[pair * pitch..][..width]);
    }
    if rows % 2 == 1 {
        let low = x[(rows - 1) * line..][..width].chunks(WIDEST);
        for (low, to) in low.zip(to[rows / 2 * pitch..][..width].chunks_mut(WIDEST)) {
            interleave(low, &NOTHING[..low.len()], to);
        }
    }
}

/// `c = a · b` or `c += a · b`: `m` lines of `a`, `k` steps, `n` columns; panels of `b` are `panel`
/// words apart, rows of `c` `stride` floats.
pub(super) fn multiply<T: Stored>(
    (m, n, k): (usize, usize, usize),
    a: Lines,
    (b, panel): (&[f32], usize),
    c: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    assert!(c.len() >= (m - 1) * stride + n);
    let (to, right, words) = (Pointer::to(c), Right::apart(b, panel), k.div_ceil(T::per_word()));
    match a {
        Lines::Rows(a, step) => {
            assert!(m <= CHUNK && a.len() >= (m - 1) * step + words);
            let start = Pointer(a.as_ptr().cast_mut());
            let lines: [Pointer<f32>; CHUNK] = std::array::from_fn(|i| start.add(i.min(m - 1) * step));
            // SAFETY: `m` lines of as many words are in `a`, and `c` has been measured.
            unsafe { tile::<T>((m, n, k), Operand::Lines(&lines[..m]), right, to, stride, accumulate) }
        }
        Lines::Columns(a, step) => {
            assert!(words == 0 || a.len() >= (words - 1) * step + m);
            let left = Operand::Steps(Pointer(a.as_ptr().cast_mut()), step);
            // SAFETY: likewise.
            unsafe { tile::<T>((m, n, k), left, right, to, stride, accumulate) }
        }
    }
}

impl Sizes {
    /// Words of steps.
    pub(super) fn words(&self, steps: usize) -> usize {
        if self.rounds { steps.div_ceil(2) } else { steps }
    }

    /// A left operand: `n` rows of `k` steps, `line` floats apart.
    pub(super) fn rows_of<'a>(
        &self,
        x: &'a [f32],
        line: usize,
        [n, k]: [usize; 2],
        room: &'a mut [f32],
    ) -> Lines<'a> {
        if !self.rounds {
            return Lines::Rows(x, line);
        }
        let pitch = apart(self.words(k));
        for (row, to) in x.chunks(line).take(n).zip(room.chunks_mut(pitch)) {
            round_row(&row[..k], to);
        }
        Lines::Rows(room, pitch)
    }

    /// The left operand that [`Sizes::rows_of`] has rounded.
    pub(super) fn kept_rows<'a>(&self, room: &'a [f32], k: usize) -> Lines<'a> {
        Lines::Rows(room, apart(self.words(k)))
    }

    /// A left operand: the `m` columns of `k` rows, `line` floats apart, which are its steps.
    pub(super) fn columns_of<'a>(
        &self,
        x: &'a [f32],
        line: usize,
        [m, k]: [usize; 2],
        room: &'a mut [f32],
    ) -> Lines<'a> {
        if !self.rounds {
            return Lines::Columns(x, line);
        }
        round_pairs(x, line, [k, m], room, m);
        Lines::Columns(room, m)
    }

    /// The same in `to` whether they are rounded or not, `m` words from step to step.
    pub(super) fn keep_columns(&self, x: &[f32], line: usize, [m, k]: [usize; 2], to: &mut [f32]) {
        if self.rounds {
            return round_pairs(x, line, [k, m], to, m);
        }
        x.chunks(line).take(k).zip(to.chunks_exact_mut(m)).for_each(|(x, to)| to.copy_from_slice(&x[..m]));
    }

    /// A right operand whose columns are `n` rows of `k` steps: products with them are inner
    /// products.
    pub(super) fn pack_lines(
        &self,
        x: &[f32],
        line: usize,
        [n, k]: [usize; 2],
        to: &mut [f32],
        room: &mut [f32],
    ) {
        self.turn(self.rows_of(x, line, [n, k], room), [n, k], to);
    }

    /// The rows of a left operand as the columns of a right one.
    pub(super) fn turn(&self, rows: Lines, [n, k]: [usize; 2], to: &mut [f32]) {
        let Lines::Rows(rows, line) = rows else { unreachable!("they are rows") };
        let words = self.words(k);
        assert!(n == 0 || rows.len() >= (n - 1) * line + words);
        pack_columns(Side::Strided { start: Pointer(rows.as_ptr().cast_mut()), line, step: 1 }, n, words, to);
    }

    /// A right operand whose steps are `k` rows of `n` columns: products with them are sums of
    /// rows.
    pub(super) fn pack_steps(&self, x: &[f32], line: usize, [n, k]: [usize; 2], to: &mut [f32]) {
        if !self.rounds {
            assert!(k == 0 || x.len() >= (k - 1) * line + n);
            let side = Side::Strided { start: Pointer(x.as_ptr().cast_mut()), line: 1, step: line };
            return pack_columns(side, n, k, to);
        }
        let panels = to.chunks_mut((self.words(k) * self.panel).max(1));
        for (first, to) in (0..n).step_by(self.panel).zip(panels) {
            round_pairs(&x[first..], line, [k, self.panel.min(n - first)], to, self.panel);
        }
    }

    /// A right operand whose steps are `k` rows of values in panels; as it is, or in `room`.
    pub(super) fn steps_of_panels<'a>(&self, x: &'a [f32], k: usize, room: &'a mut [f32]) -> &'a [f32] {
        self.round_panels(x, k, room);
        if self.rounds { room } else { x }
    }

    /// Makes of rows of values in panels what [`Sizes::steps_of_panels`] makes.
    pub(super) fn round_panels(&self, x: &[f32], k: usize, to: &mut [f32]) {
        if !self.rounds {
            return;
        }
        let panels = to.chunks_exact_mut(self.words(k) * self.panel).take(self.wide / self.panel);
        for (p, to) in panels.enumerate() {
            round_pairs(self.panel_of(x, k, p), self.panel, [k, self.panel], to, self.panel);
        }
    }

    /// A left operand: `n` rows of values, which stand in panels.
    pub(super) fn rows_of_panels<'a>(&self, x: &[f32], n: usize, room: &'a mut [f32]) -> Lines<'a> {
        let pitch = apart(self.words(self.wide));
        for p in 0..self.wide / self.panel {
            let rows = self.panel_of(x, n, p).chunks_exact(self.panel);
            let at = self.words(p * self.panel);
            for (row, to) in rows.zip(room.chunks_mut(pitch)) {
                let to = &mut to[at..][..self.words(self.panel)];
                if self.rounds { round_row(row, to) } else { to.copy_from_slice(row) }
            }
        }
        Lines::Rows(room, pitch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::simd::pairs;
    use dreamc_compiler::op::Delta;
    use dreamc_compiler::op::linear_attention::Part;
    use dreamc_compiler::op::linear_attention::kernel::LinearShape;

    fn sizes(tokens: u64, size: u64, value: u64) -> Sizes {
        let part = |width| Part { row: width, width, strides: vec![width] };
        let parts = vec![part(size), part(size), part(value)];
        let shape = LinearShape { batch: 1, tokens, heads: vec![1], size, value, parts, decay: None };
        Sizes { rounds: true, ..Sizes::new(&shape, Delta::None, false) }
    }

    fn value(i: usize, by: usize) -> f32 {
        ((i * by + 11) % 1009) as f32 / 501.7 - 1.0
    }

    fn rounded(x: f32) -> f64 {
        f64::from(bf16::from_f32(x))
    }

    /// Every operand, at edges of words and panels: products are those of rounded numbers.
    #[test]
    fn products_are_those_of_rounded_numbers() {
        if !pairs() {
            return dreamc_skip::skip("the processor multiplies no pairs of bf16");
        }
        for (m, n, k) in [(64, 70, 200), (64, 33, 63), (1, 1, 1), (5, 33, 2), (7, 129, 3)] {
            let s = sizes(64, 16, 16);
            let (line, across) = (k + 3, m + 5);
            let a: Vec<f32> = (0..m * line).map(|i| value(i, 37)).collect();
            let turned: Vec<f32> = (0..k * across).map(|i| value(i, 37)).collect();
            let b: Vec<f32> = (0..n * line).map(|i| value(i, 53)).collect();
            let below: Vec<f32> = (0..k * (n + 1)).map(|i| value(i, 53)).collect();
            for way in 0..4 {
                let (rows, lines) = (way & 1 == 0, way & 2 == 0);
                let mut room = vec![0.0; 2 * (m + k + 2) * (k + across + 64)];
                let mut to = vec![0.0; s.words(k) * n.next_multiple_of(s.panel)];
                match lines {
                    true => s.pack_lines(&b, line, [n, k], &mut to, &mut vec![0.0; n * apart(k)]),
                    false => s.pack_steps(&below, n + 1, [n, k], &mut to),
                }
                let left = match rows {
                    true => s.rows_of(&a, line, [m, k], &mut room),
                    false => s.columns_of(&turned, across, [m, k], &mut room),
                };
                let mut c = vec![0.25; m * (n + 2)];
                multiply::<bf16>((m, n, k), left, (&to, s.words(k) * s.panel), &mut c, n + 2, true);
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let of_a = |at: usize| if rows { a[i * line + at] } else { turned[at * across + i] };
                    let of_b = |at: usize| if lines { b[j * line + at] } else { below[at * (n + 1) + j] };
                    let right: f64 = (0..k).map(|at| rounded(of_a(at)) * rounded(of_b(at))).sum();
                    let found = f64::from(c[i * (n + 2) + j]);
                    assert!((found - right - 0.25).abs() < 1e-3, "{m} {n} {k} {way}: {found}, {right}");
                }
            }
        }
    }

    /// Values in panels, as steps and as rows.
    #[test]
    fn panels_are_rounded_where_they_are() {
        if !pairs() {
            return dreamc_skip::skip("the processor multiplies no pairs of bf16");
        }
        for (n, wide) in [(1, 5), (5, 40), (64, 96)] {
            let s = sizes(64, 8, wide);
            let x: Vec<f32> = (0..n * s.wide).map(|i| value(i, 71)).collect();
            let of = |i: usize, j: usize| rounded(x[(j / s.panel * n + i) * s.panel + j % s.panel]) as f32;
            let half = |words: &[f32], at: usize, second: bool| {
                let bits = words[at].to_bits();
                f32::from_bits(if second { bits & !0xffff } else { bits << 16 })
            };
            let mut room = vec![0.0; n * apart(s.wide)];
            let Lines::Rows(rows, pitch) = s.rows_of_panels(&x, n, &mut room) else { unreachable!() };
            let mut steps = vec![0.0; s.words(n) * s.wide];
            s.round_panels(&x, n, &mut steps);
            for (i, j) in (0..n).flat_map(|i| (0..s.wide).map(move |j| (i, j))) {
                assert_eq!(half(rows, i * pitch + j / 2, j % 2 == 1), of(i, j));
                let word = (j / s.panel * s.words(n) + i / 2) * s.panel + j % s.panel;
                assert_eq!(half(&steps, word, i % 2 == 1), of(i, j));
            }
        }
    }
}
