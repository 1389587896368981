//! Right operands that are packed: weights in the blocks of their file.
//!
//! *In*: the bytes of blocks ([`Packed`]). *Out*: numbers, or products of a left operand in f32.
//! *Promise*: numbers are those of [`Packed::unpack`] to the bit, products those of
//! [`super::block`] with the same numbers in f32. [`DEPTH`] steps of some lines are unpacked into
//! scratch at a time, where they stay in the caches for all rows of the left operand: each block is
//! read once for a tile, and nothing else is read from memory. For few rows the numbers of whole
//! blocks stay in registers ([`blocks`]).

use super::blocks::{self, Blocks};
use super::few::PANEL;
use super::{DEPTH, FEW, RightOf, Side, Stored, block, block_scratch};
use super::{TILE, product_scratch};
use crate::backend::cpu::Pointer;
use crate::cpu::simd::kernel_fn;
use dreamc_compiler::format::{BLOCK, NV, NV_HEAD, Packed, SUPER};
use dreamc_compiler::format::{unpack_nvfp4, unpack_q4_k, unpack_q6_k};
use std::sync::atomic::{AtomicBool, Ordering};

/// Lines that are unpacked at a time for few rows: those that [`few`] reads side by side.
const LINES: usize = 16;

/// A tensor of packed numbers.
#[derive(Clone, Copy)]
pub(crate) struct Numbers<'a> {
    format: Packed,
    start: Pointer<u8>,
    /// Set where a scale is NaN or infinite.
    bad: &'a AtomicBool,
}

impl<'a> Numbers<'a> {
    /// Numbers of this format at an address; `bad` is set where a scale of them is NaN or infinite.
    pub(crate) fn new(format: Packed, start: Pointer<u8>, bad: &'a AtomicBool) -> Self {
        Numbers { format, start, bad }
    }

    /// Numbers from `at` on.
    ///
    /// # Safety
    /// The tensor has them.
    pub(crate) unsafe fn unpack(&self, at: usize, to: &mut [f32]) {
        let (unit, bytes) = (self.format.unit(), self.format.bytes());
        // SAFETY: the caller's, of the blocks that such numbers are in.
        let blocks = |first: usize, count: usize| unsafe {
            std::slice::from_raw_parts(self.start.add(first * bytes).get(), count * bytes)
        };
        if let Packed::Int8(_) = self.format {
            let (mut at, mut to) = (at, to);
            while !to.is_empty() {
                let (row, inside) = (blocks(at / unit, 1), at % unit);
                let (scale, numbers) = row.split_at(4);
                let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
                self.see(!scale.is_finite());
                let (part, rest) = to.split_at_mut((unit - inside).min(to.len()));
                eights(&numbers[inside..][..part.len()], scale, part);
                (at, to) = (at + part.len(), rest);
            }
            return;
        }
        if let Packed::Nvfp4(_) = self.format {
            let (mut at, mut to) = (at, to);
            while !to.is_empty() {
                let (row, inside) = (blocks(at / unit, 1), at % unit);
                let (part, rest) = to.split_at_mut((unit - inside).min(to.len()));
                self.part_of_row(row, inside, part);
                (at, to) = (at + part.len(), rest);
            }
            return;
        }
        // The rest of a block that begins before.
        let head = (unit - at % unit).min(to.len()) % unit;
        let (first, to) = to.split_at_mut(head);
        let (whole, last) = to.split_at_mut(to.len() / unit * unit);
        let mut one = [0.0; SUPER];
        if !first.is_empty() {
            self.whole(blocks(at / unit, 1), &mut one[..unit]);
            first.copy_from_slice(&one[at % unit..][..first.len()]);
        }
        let next = at.div_ceil(unit);
        self.whole(blocks(next, whole.len() / unit), whole);
        if !last.is_empty() {
            self.whole(blocks(next + whole.len() / unit, 1), &mut one[..unit]);
            last.copy_from_slice(&one[..last.len()]);
        }
    }

    /// Whole blocks of a fixed size.
    fn whole(&self, from: &[u8], to: &mut [f32]) {
        self.see(match self.format {
            Packed::F16 => {
                halves(from, to);
                false
            }
            Packed::Q8 => blocks_of_eight(from, to),
            Packed::Q4 => blocks_of_four(from, to),
            Packed::Mxfp4 => blocks_of_e2m1(from, to),
            Packed::Q4K => super_blocks_of_four(from, to),
            Packed::Q6K => super_blocks_of_six(from, to),
            // Their blocks are rows.
            Packed::Int8(_) | Packed::Nvfp4(_) => false,
        });
    }

    /// Numbers of a row of nvfp4 from one on.
    fn part_of_row(&self, row: &[u8], inside: usize, to: &mut [f32]) {
        let scale = f32::from_le_bytes([row[0], row[1], row[2], row[3]]);
        self.see(!scale.is_finite());
        let (unit, _, bytes) = NV;
        let blocks = |first: usize, count: usize| &row[NV_HEAD + first * bytes..][..count * bytes];
        let (first, to) = to.split_at_mut((unit - inside % unit).min(to.len()) % unit);
        let (whole, last) = to.split_at_mut(to.len() / unit * unit);
        let mut one = [0.0; NV.0];
        if !first.is_empty() {
            self.see(blocks_of_nv(blocks(inside / unit, 1), scale, &mut one));
            first.copy_from_slice(&one[inside % unit..][..first.len()]);
        }
        let next = inside.div_ceil(unit);
        self.see(blocks_of_nv(blocks(next, whole.len() / unit), scale, whole));
        if !last.is_empty() {
            self.see(blocks_of_nv(blocks(next + whole.len() / unit, 1), scale, &mut one));
            last.copy_from_slice(&one[..last.len()]);
        }
    }

    fn see(&self, bad: bool) {
        if bad {
            self.bad.store(true, Ordering::Relaxed);
        }
    }
}

/// Lines of packed numbers: the number at `(line, step)` stands `at + line · self.line + step ·
/// self.step` in the tensor.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    pub(super) numbers: Numbers<'a>,
    pub(super) at: usize,
    pub(super) line: usize,
    pub(super) step: usize,
}

impl Lines<'_> {
    /// Some steps of some lines as f32, in `room`.
    ///
    /// # Safety
    /// The tensor has them.
    unsafe fn unpacked(&self, lines: usize, first: usize, steps: usize, room: &mut [f32]) -> Side<f32> {
        let room = &mut room[..lines * steps];
        let start = Pointer::to(room);
        let by_lines = self.step == 1;
        let (length, apart) = if by_lines { (steps, self.line) } else { (lines, self.step) };
        for (i, room) in room.chunks_exact_mut(length.max(1)).enumerate() {
            let at = match by_lines {
                true => self.at + i * apart + first,
                false => self.at + (first + i) * apart,
            };
            match by_lines || self.line == 1 {
                // SAFETY: the caller's.
                true => unsafe { self.numbers.unpack(at, room) },
                false => {
                    for (j, to) in room.iter_mut().enumerate() {
                        // SAFETY: likewise.
                        unsafe { self.numbers.unpack(at + j * self.line, std::slice::from_mut(to)) };
                    }
                }
            }
        }
        match by_lines {
            true => Side::Strided { start, line: steps, step: 1 },
            false => Side::Strided { start, line: 1, step: lines },
        }
    }

    /// A product of few rows whose numbers stay in registers; says whether there is one for it.
    ///
    /// # Safety
    /// As for [`RightOf::block`].
    unsafe fn few<C: Stored>(
        self,
        (m, n, k): (usize, usize, usize),
        a: Side<f32>,
        (c, stride, accumulate): (Pointer<C>, usize, bool),
    ) -> bool {
        let Numbers { format, start, .. } = self.numbers;
        let (unit, bytes) = (format.unit(), format.bytes());
        let run = blocks::run(format);
        let whole = [self.at, self.line].iter().all(|numbers| numbers.is_multiple_of(unit));
        if self.step != 1 || !whole || !k.is_multiple_of(run.unit) || k > unit.max(self.line) {
            return false;
        }
        if !self.suits_few(m, k, a, 0) {
            return false;
        }
        let mut left = [std::ptr::null(); FEW];
        for (i, left) in left.iter_mut().enumerate().take(m) {
            *left = match a {
                Side::Strided { start, line, .. } => start.add(i * line).get(),
                Side::GatheredLines { start, row, order, per } => {
                    // SAFETY: whoever made the side vouches for its order.
                    start.add(unsafe { *order.get().add(i) } as usize / per * row).get()
                }
                Side::GatheredSteps { .. } => return false,
            };
        }
        let mut totals = [0.0; FEW * PANEL];
        for j in (0..n).step_by(run.width) {
            let columns = run.width.min(n - j);
            let line = |i: usize| {
                let at = self.at + (j + i.min(columns - 1)) * self.line;
                start.add(at / unit * bytes).get()
            };
            let lines = std::array::from_fn(line);
            let blocks = Blocks { lines, next: run.width * self.line / unit * bytes };
            let row = |i: usize| c.add(i * stride + j).get_mut();
            // SAFETY: the caller's: rows of `c` have `columns` elements from `j` on.
            unsafe {
                if accumulate {
                    for (i, totals) in totals.chunks_exact_mut(PANEL).enumerate().take(m) {
                        let before = std::slice::from_raw_parts(row(i), columns);
                        totals.iter_mut().zip(before).for_each(|(to, x)| *to = x.widen());
                    }
                }
                self.numbers.see((run.sums)((m, k), &left, &blocks, !accumulate, &mut totals));
                for (i, totals) in totals.chunks_exact(PANEL).enumerate().take(m) {
                    C::store(&totals[..columns], std::slice::from_raw_parts_mut(row(i), columns));
                }
            }
        }
        true
    }
}

impl RightOf<f32> for Lines<'_> {
    fn skip_lines(self, first: usize) -> Self {
        Lines { at: self.at + first * self.line, ..self }
    }

    fn is(&self, _: &Side<f32>) -> bool {
        false
    }

    fn suits_few(&self, m: usize, k: usize, a: Side<f32>, _: usize) -> bool {
        (1..=FEW).contains(&m) && k > 0 && a.steps_are_adjacent()
    }

    unsafe fn block<C: Stored>(
        self,
        (m, n, k): (usize, usize, usize),
        a: Side<f32>,
        (c, stride, accumulate): (Pointer<C>, usize, bool),
        scratch: &mut [f32],
    ) {
        // SAFETY: the caller's.
        if unsafe { self.few((m, n, k), a, (c, stride, accumulate)) } {
            return;
        }
        let width = if m <= FEW { LINES.min(n) } else { n };
        // Sums that are rounded stand here until they are complete.
        let (sums, scratch) = scratch.split_at_mut(if C::NARROW { m * width } else { 0 });
        let (room, scratch) = scratch.split_at_mut(width * DEPTH.min(k));
        for j in (0..n).step_by(width.max(1)) {
            let columns = width.min(n - j);
            let row = |i: usize| c.add(i * stride + j).get_mut();
            let (to, apart) = match C::NARROW {
                true => (Pointer::to(sums), columns),
                false => (Pointer(row(0).cast::<f32>()), stride),
            };
            if C::NARROW && accumulate {
                for (i, sums) in sums.chunks_exact_mut(columns).enumerate().take(m) {
                    // SAFETY: row `i` of `c` has `columns` elements from `j` on.
                    C::wide(unsafe { std::slice::from_raw_parts(row(i), columns) }, sums);
                }
            }
            let lines = self.skip_lines(j);
            for first in (0..k.max(1)).step_by(DEPTH) {
                let steps = DEPTH.min(k - first);
                // SAFETY: the caller's; `to` has `m` rows of `columns`.
                unsafe {
                    let b = lines.unpacked(columns, first, steps, room);
                    let size = (m, columns, steps);
                    block(size, a.skip_steps(first), b, to, apart, accumulate || first > 0, scratch);
                }
            }
            if C::NARROW {
                for (i, sums) in sums.chunks_exact(columns).enumerate().take(m) {
                    // SAFETY: as above.
                    C::store(sums, unsafe { std::slice::from_raw_parts_mut(row(i), columns) });
                }
            }
        }
    }
}

/// Floats that a task needs for a tile of a product of such sizes.
pub(crate) fn scratch(m: usize, n: usize, k: usize) -> usize {
    let (rows, columns) = (m.min(TILE.0 + 12), n.min(TILE.1 + 32));
    let wide = columns * (rows + DEPTH.min(k));
    wide + product_scratch(m, n, k).max(block_scratch(rows, columns, k))
}

/// The number of a scale in binary16, where it is one.
#[inline(always)]
pub(super) fn half(bits: u16) -> f32 {
    // Of subnormal numbers, too: a product with a power of two is exact.
    let size = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(239 << 23);
    f32::from_bits(size.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// The number in binary16, whatever it is.
#[inline(always)]
pub(super) fn number(bits: u16) -> f32 {
    let ends = if endless(bits) { 0x7f80_0000 } else { 0 };
    f32::from_bits(half(bits).to_bits() | ends)
}

/// Whether bits are those of an infinity or of NaN.
#[inline(always)]
pub(super) fn endless(bits: u16) -> bool {
    bits & 0x7c00 == 0x7c00
}

kernel_fn! {
    /// Numbers in binary16.
    fn halves(from: &[u8], to: &mut [f32]) {
        for (from, to) in from.chunks_exact(2).zip(to) {
            *to = number(u16::from_le_bytes([from[0], from[1]]));
        }
    }

    /// Numbers in eight bits of one scale.
    fn eights(from: &[u8], scale: f32, to: &mut [f32]) {
        from.iter().zip(to).for_each(|(q, to)| *to = f32::from(*q as i8) * scale);
    }

    /// Blocks of q8_0; says whether a scale is no number.
    #[allow(clippy::needless_range_loop)]
    fn blocks_of_eight(from: &[u8], to: &mut [f32]) -> bool {
        let mut bad = false;
        for (from, to) in from.as_chunks::<34>().0.iter().zip(to.as_chunks_mut::<32>().0) {
            let scale = u16::from_le_bytes([from[0], from[1]]);
            bad |= endless(scale);
            let scale = half(scale);
            for i in 0..BLOCK {
                to[i] = f32::from(from[2 + i] as i8) * scale;
            }
        }
        bad
    }

    /// Blocks of q4_0; says whether a scale is no number.
    #[allow(clippy::needless_range_loop)]
    fn blocks_of_four(from: &[u8], to: &mut [f32]) -> bool {
        let mut bad = false;
        for (from, to) in from.as_chunks::<18>().0.iter().zip(to.as_chunks_mut::<32>().0) {
            let scale = u16::from_le_bytes([from[0], from[1]]);
            bad |= endless(scale);
            let scale = half(scale);
            for i in 0..BLOCK / 2 {
                to[i] = (i32::from(from[2 + i] & 15) - 8) as f32 * scale;
                to[i + BLOCK / 2] = (i32::from(from[2 + i] >> 4) - 8) as f32 * scale;
            }
        }
        bad
    }

    /// Blocks of mxfp4; says whether a scale is no number.
    #[allow(clippy::needless_range_loop)]
    fn blocks_of_e2m1(from: &[u8], to: &mut [f32]) -> bool {
        let mut bad = false;
        for (from, to) in from.as_chunks::<17>().0.iter().zip(to.as_chunks_mut::<32>().0) {
            bad |= from[0] == 255;
            let scale = dreamc_compiler::format::half_of_power(from[0]);
            for i in 0..BLOCK / 2 {
                to[i] = e2m1(from[1 + i] & 15) as f32 * scale;
                to[i + BLOCK / 2] = e2m1(from[1 + i] >> 4) as f32 * scale;
            }
        }
        bad
    }

    /// Blocks of nvfp4 under the scale of their tensor; says whether a scale is no number.
    fn blocks_of_nv(from: &[u8], scale: f32, to: &mut [f32]) -> bool {
        unpack_nvfp4(from, scale, to, |code| e2m1(code) as f32)
    }

    /// Blocks of q4_k; says whether a scale is no number.
    fn super_blocks_of_four(from: &[u8], to: &mut [f32]) -> bool {
        let mut bad = false;
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            let scales = [0, 2].map(|at| u16::from_le_bytes([from[at], from[at + 1]]));
            bad |= endless(scales[0]) | endless(scales[1]);
            unpack_q4_k(from, scales.map(half), to);
        }
        bad
    }

    /// Blocks of q6_k; says whether a scale is no number.
    fn super_blocks_of_six(from: &[u8], to: &mut [f32]) -> bool {
        let mut bad = false;
        for (from, to) in from.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
            let scale = u16::from_le_bytes([from[208], from[209]]);
            bad |= endless(scale);
            unpack_q6_k(from, half(scale), to);
        }
        bad
    }
}

/// Twice the number of a code, computed, since a processor looks up one by one.
#[inline(always)]
fn e2m1(code: u8) -> i32 {
    let x = i32::from(code & 7);
    let size = x + (x - 4).max(0) + 2 * i32::from(x == 7);
    if code & 8 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::product::Matrices;
    use half::bf16;

    /// Each with what its rows are multiples of, by those of the smallest.
    const FORMATS: [(&str, usize); 8] = [
        ("f16", 1),
        ("int8", 1),
        ("q8_0", 1),
        ("q4_0", 1),
        ("mxfp4", 1),
        ("nvfp4", 2),
        ("q4_k", 8),
        ("q6_k", 8),
    ];

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + seed) % 1009) as f32 / 501.7 - 1.0).collect()
    }

    /// Rows packed in a format, and what they unpack to.
    fn packed(name: &str, rows: usize, row: usize) -> (Packed, Vec<u8>, Vec<f32>) {
        let format = Packed::named(name, row as u64).unwrap();
        let (mut bytes, mut wide) = (vec![], vec![0.0; rows * row]);
        format.pack(&values(rows * row, 11), &mut bytes).unwrap();
        format.unpack(&bytes, &mut wide);
        (format, bytes, wide)
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// Wherever a part begins and ends.
    #[test]
    fn numbers_are_those_of_the_format() {
        let bad = AtomicBool::new(false);
        for (name, times) in FORMATS {
            let (format, mut bytes, wide) = packed(name, 3, 96 * times);
            let numbers = Numbers::new(format, Pointer::to(&mut bytes), &bad);
            for at in [0, 1, 31, 32, 95, 96, 100].map(|at| at * times) {
                for length in [0, 1, 5, 31, 32, 33, 64, 96, 130, 188].map(|n| n * times) {
                    let mut found = vec![f32::NAN; length];
                    // SAFETY: there are 288 numbers, or as many times more.
                    unsafe { numbers.unpack(at, &mut found) };
                    assert_eq!(bits(&found), bits(&wide[at..at + length]), "{name}: {length} from {at}");
                }
            }
        }
        assert!(!bad.load(Ordering::Relaxed));
        // Every code of four bits, and every number of sixteen.
        for code in 0..16u8 {
            assert_eq!(e2m1(code), i32::from(dreamc_compiler::format::E2M1[usize::from(code)]));
        }
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut found = vec![0.0; 1 << 16];
        halves(&all, &mut found);
        for (i, x) in found.iter().enumerate() {
            let right = half::f16::from_bits(i as u16).to_f32();
            assert!(x.to_bits() == right.to_bits() || x.is_nan() && right.is_nan(), "{i:#x}");
        }
    }

    /// Products read from blocks have the bits of those of the unpacked numbers, few rows and many,
    /// along rows and across them.
    #[test]
    fn products_have_the_bits_of_f32() {
        let bad = AtomicBool::new(false);
        for (name, times) in FORMATS {
            for (m, n, k) in
                [(1, 70usize, 64usize), (3, 33, 320), (16, 48, 704), (40, 70, 544), (100, 33, 64)]
            {
                for turned in [false, true] {
                    let k = k.next_multiple_of(32 * times);
                    // Rows of weights are as long as sums, or sums go over rows.
                    let (rows, row) = if turned { (k, n.next_multiple_of(32 * times)) } else { (n, k) };
                    let n = if turned { row } else { n };
                    let (format, mut bytes, mut wide) = packed(name, rows, row);
                    let mut a = values(m * k, 5);
                    let a = Side::Strided { start: Pointer::to(&mut a), line: k, step: 1 };
                    let (line, step) = if turned { (1, row) } else { (row, 1) };
                    let b = Numbers::new(format, Pointer::to(&mut bytes), &bad).matrix(0, line, step);
                    let w = Side::Strided { start: Pointer::to(&mut wide), line, step };
                    let mut room = vec![f32::NAN; scratch(m, n, k)];
                    for accumulate in [false, true] {
                        let (mut found, mut right) = (vec![0.25f32; m * n], vec![0.25f32; m * n]);
                        let (c, d) = (Pointer::to(&mut found), Pointer::to(&mut right));
                        // SAFETY: operands and results are `m`, `n` and `k` of one another.
                        unsafe {
                            b.block((m, n, k), a, (c, n, accumulate), &mut room);
                            block((m, n, k), a, w, d, n, accumulate, &mut room);
                        }
                        let what = format!("{name}: {m} {n} {k}, turned {turned}, adding {accumulate}");
                        assert_eq!(bits(&found), bits(&right), "{what}");
                        let mut narrow = vec![bf16::from_f32(0.25); m * n];
                        let c = Pointer::to(&mut narrow);
                        // SAFETY: likewise.
                        unsafe { b.block((m, n, k), a, (c, n, accumulate), &mut room) };
                        let rounded: Vec<bf16> = right.iter().map(|x| bf16::from_f32(*x)).collect();
                        assert_eq!(narrow, rounded, "{what}");
                    }
                }
            }
        }
        assert!(!bad.load(Ordering::Relaxed));
    }

    /// The sums of products in f64 of the blocks' numbers are near.
    #[test]
    fn products_are_near_those_in_f64() {
        let bad = AtomicBool::new(false);
        for (name, _) in FORMATS {
            let (m, n, k) = (2, 5, 512);
            let (format, mut bytes, wide) = packed(name, n, k);
            let mut a = values(m * k, 5);
            let left = Side::Strided { start: Pointer::to(&mut a), line: k, step: 1 };
            let b = Numbers::new(format, Pointer::to(&mut bytes), &bad).matrix(0, k, 1);
            let mut found = vec![0.0f32; m * n];
            let mut room = vec![0.0; scratch(m, n, k)];
            let c = Pointer::to(&mut found);
            // SAFETY: operands and results are `m`, `n` and `k` of one another.
            unsafe { b.block((m, n, k), left, (c, n, false), &mut room) };
            for i in 0..m {
                for j in 0..n {
                    let each = (0..k).map(|s| f64::from(a[i * k + s]) * f64::from(wide[j * k + s]));
                    let right: f64 = each.sum();
                    assert!((f64::from(found[i * n + j]) - right).abs() < 1e-4, "{name} at {i} {j}");
                }
            }
        }
    }

    #[test]
    fn a_scale_that_is_no_number_is_seen() {
        let places = [
            ("q8_0", 96, 34),
            ("q4_0", 96, 18),
            ("mxfp4", 96, 17),
            ("int8", 96, 96 + 4),
            ("nvfp4", 128, 76 + 40),
            ("q4_k", 512, 146),
            ("q6_k", 512, 208),
        ];
        for (name, row, at) in places {
            let bad = AtomicBool::new(false);
            let (format, mut bytes, _) = packed(name, 2, row);
            bytes[at..at + 2].fill(255);
            if name == "int8" {
                bytes[at..at + 4].fill(255);
            }
            let mut to = vec![0.0; row];
            let numbers = Numbers::new(format, Pointer::to(&mut bytes), &bad);
            let first = if matches!(name, "int8" | "nvfp4") { row } else { 0 };
            // SAFETY: there are two rows.
            unsafe { numbers.unpack(first, &mut to) };
            assert!(bad.load(Ordering::Relaxed), "{name}");
        }
    }
}
