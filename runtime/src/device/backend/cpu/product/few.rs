//! Products of few rows, such as one token of each text: bound by the memory that the right operand
//! is read from, which is read once for all rows and packed nowhere.
//!
//! *In*: a left operand of at most [`FEW`] lines and a right one whose steps are adjacent, as
//! weights are. *Out*: the bits of [`super::block`]. *Promise*: each line of the right operand is
//! read once, 32 bits or more at a time; where bf16 has no products, it is widened in registers.
//!
//! Lines of the right operand are columns of the result, and a vector of sums has one lane a
//! column, so a square of words, as many lines as steps, is transposed in registers. While the
//! lines of one vector are multiplied, the next ones, which follow in memory, are on their way.

use super::{DEPTH, Four, Level, Pointer, Side, Stored, VECTORS, Vector, level, shape};
use half::bf16;

/// Most rows of such a product. More are better multiplied from panels.
pub(crate) const FEW: usize = 16;
/// Most lines of a vector, and most vectors of lines at once.
pub(super) const WIDTH: usize = VECTORS * 16;

/// Whether a product with so much scratch is one of few rows: steps are adjacent on both sides.
pub(super) fn suits<T: Stored>(m: usize, k: usize, a: Side<T>, b: Side<T>, scratch: usize) -> bool {
    let right = matches!(b, Side::Strided { step: 1, .. });
    let left = matches!(a, Side::Strided { step: 1, .. } | Side::GatheredLines { .. });
    (1..=FEW).contains(&m) && k > 0 && left && right && m * k.div_ceil(T::per_word()) <= scratch
}

/// Vectors that transpose squares of words.
///
/// Nothing here passes a closure on: one that is not inlined has no vector instructions.
pub(super) trait Turn: Vector {
    /// Words `at` to `at + LANES` of `LANES` lines, a vector for each word; the rest of the vectors
    /// is zero.
    ///
    /// # Safety
    /// The lines have the words.
    unsafe fn turn(lines: &[*const f32], at: usize) -> [Self; 16];
    /// The first of two bf16 in a word, as f32.
    unsafe fn low(self) -> Self;
    /// The second.
    unsafe fn high(self) -> Self;
}

impl Turn for Four {
    #[inline(always)]
    unsafe fn turn(lines: &[*const f32], at: usize) -> [Self; 16] {
        let mut square = [Four([0.0; 4]); 16];
        for (i, line) in lines.iter().enumerate().take(4) {
            // SAFETY: the caller's.
            let words = unsafe { Four::load(line.add(at)) };
            for (square, word) in square.iter_mut().zip(words.0) {
                square.0[i] = word;
            }
        }
        square
    }
    #[inline(always)]
    unsafe fn low(self) -> Self {
        Four(self.0.map(|x| f32::from_bits(x.to_bits() << 16)))
    }
    #[inline(always)]
    unsafe fn high(self) -> Self {
        Four(self.0.map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::x86::{Eight, Pairs, Sixteen};
    use super::Turn;
    use std::arch::x86_64::*;

    // Four by four words in each 128 bits of four vectors, transposed.
    macro_rules! fours {
        ($rows:expr, $low:ident, $high:ident, $low_pairs:ident, $high_pairs:ident, $double:ident, $single:ident) => {{
            let [a, b, c, d] = $rows;
            let (low, high) = ($double($low(a, b)), $double($high(a, b)));
            let (low_after, high_after) = ($double($low(c, d)), $double($high(c, d)));
            [
                $single($low_pairs(low, low_after)),
                $single($high_pairs(low, low_after)),
                $single($low_pairs(high, high_after)),
                $single($high_pairs(high, high_after)),
            ]
        }};
    }

    /// # Safety
    /// The processor has AVX-512; sixteen lines have the words.
    #[inline(always)]
    unsafe fn turn_sixteen(lines: &[*const f32], at: usize) -> [__m512; 16] {
        // SAFETY: the caller's.
        unsafe {
            let zero = _mm512_setzero_ps();
            // Lane `l` of `fours[4 g + j]`: words `4 l + j` of lines `4 g` to `4 g + 3`.
            let mut fours = [zero; 16];
            for (lines, fours) in lines.chunks_exact(4).zip(fours.chunks_exact_mut(4)) {
                let rows = [
                    _mm512_loadu_ps(lines[0].add(at)),
                    _mm512_loadu_ps(lines[1].add(at)),
                    _mm512_loadu_ps(lines[2].add(at)),
                    _mm512_loadu_ps(lines[3].add(at)),
                ];
                fours.copy_from_slice(&fours!(
                    rows,
                    _mm512_unpacklo_ps,
                    _mm512_unpackhi_ps,
                    _mm512_unpacklo_pd,
                    _mm512_unpackhi_pd,
                    _mm512_castps_pd,
                    _mm512_castpd_ps
                ));
            }
            let mut square = [zero; 16];
            for j in 0..4 {
                let (a, b, c, d) = (fours[j], fours[4 + j], fours[8 + j], fours[12 + j]);
                let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d)];
                let odd = [_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d)];
                square[j] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
                square[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
                square[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even[0], even[1]);
                square[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd[0], odd[1]);
            }
            square
        }
    }

    /// # Safety
    /// The processor has AVX2; eight lines have the words.
    #[inline(always)]
    unsafe fn turn_eight(lines: &[*const f32], at: usize) -> [__m256; 16] {
        // SAFETY: the caller's.
        unsafe {
            let mut square = [_mm256_setzero_ps(); 16];
            for half in [0, 4] {
                let mut rows = [_mm256_setzero_ps(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    // Four words of line `i`, and of line `4 + i`.
                    let (low, high) = (lines[i].add(at + half), lines[4 + i].add(at + half));
                    *row = _mm256_set_m128(_mm_loadu_ps(high), _mm_loadu_ps(low));
                }
                square[half..half + 4].copy_from_slice(&fours!(
                    rows,
                    _mm256_unpacklo_ps,
                    _mm256_unpackhi_ps,
                    _mm256_unpacklo_pd,
                    _mm256_unpackhi_pd,
                    _mm256_castps_pd,
                    _mm256_castpd_ps
                ));
            }
            square
        }
    }

    macro_rules! turn {
        ($name:ident, $turn:ident, $low:ident, $high:ident) => {
            impl Turn for $name {
                #[inline(always)]
                unsafe fn turn(lines: &[*const f32], at: usize) -> [Self; 16] {
                    // SAFETY: the caller's; whoever has the vectors has the instructions.
                    unsafe {
                        let words = $turn(lines, at);
                        let mut square = [$name(words[0]); 16];
                        for (to, x) in square.iter_mut().zip(words) {
                            *to = $name(x);
                        }
                        square
                    }
                }
                #[inline(always)]
                unsafe fn low(self) -> Self {
                    // SAFETY: whoever has the vectors has the instructions.
                    unsafe { $name($low(self.0)) }
                }
                #[inline(always)]
                unsafe fn high(self) -> Self {
                    // SAFETY: likewise.
                    unsafe { $name($high(self.0)) }
                }
            }
        };
    }

    #[inline(always)]
    unsafe fn low_sixteen(x: __m512) -> __m512 {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(x))) }
    }

    #[inline(always)]
    unsafe fn high_sixteen(x: __m512) -> __m512 {
        // SAFETY: likewise.
        unsafe { _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-1 << 16))) }
    }

    #[inline(always)]
    unsafe fn low_eight(x: __m256) -> __m256 {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(x))) }
    }

    #[inline(always)]
    unsafe fn high_eight(x: __m256) -> __m256 {
        // SAFETY: likewise.
        unsafe { _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(-1 << 16))) }
    }

    turn!(Sixteen, turn_sixteen, low_sixteen, high_sixteen);
    turn!(Pairs, turn_sixteen, low_sixteen, high_sixteen);
    turn!(Eight, turn_eight, low_eight, high_eight);
}

/// The right operand: the first line, and elements from line to line.
#[derive(Clone, Copy)]
struct Lines<T> {
    start: Pointer<T>,
    stride: usize,
}

/// Where results go: rows `stride` apart.
#[derive(Clone, Copy)]
struct Rows<C> {
    start: Pointer<C>,
    stride: usize,
    accumulate: bool,
}

/// `c = a · b` or `c += a · b` where that [`suits`]; says whether it did.
///
/// # Safety
/// As for [`super::block`].
pub(super) unsafe fn few<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: Side<T>,
    b: Side<T>,
    c: (Pointer<C>, usize, bool),
    scratch: &mut [f32],
) -> bool {
    let (m, _, k) = size;
    let Side::Strided { start, line, step: 1 } = b else { return false };
    if !suits(m, k, a, b, scratch.len()) {
        return false;
    }
    let words = k.div_ceil(T::per_word());
    let mut left = [std::ptr::null(); FEW];
    for (i, left) in left.iter_mut().enumerate().take(m) {
        let from = match a {
            Side::Strided { start, line, .. } => start.add(i * line).get(),
            Side::GatheredLines { start, row, order, per } => {
                // SAFETY: whoever made the side vouches for its order.
                start.add(unsafe { *order.get().add(i) } as usize / per * row).get()
            }
            Side::GatheredSteps { .. } => return false,
        };
        // SAFETY: a line has `k` steps.
        let from = unsafe { std::slice::from_raw_parts(from, k) };
        *left = T::words(from, &mut scratch[i * words..][..words]).as_ptr();
    }
    let (lines, rows) = (Lines { start, stride: line }, Rows { start: c.0, stride: c.1, accumulate: c.2 });
    let run = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if T::per_word() == 2 => columns_pairs::<T, C>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => columns_avx512::<T, C>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => columns_avx2::<T, C>,
        Level::Portable => columns_portable::<T, C>,
    };
    // SAFETY: `left` has `m` lines of words; the rest is the caller's.
    unsafe { run(size, &left, lines, rows) };
    true
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx512bf16,avx2,fma")]
unsafe fn columns_pairs<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    // SAFETY: the caller's.
    unsafe { columns::<super::x86::Pairs, T, C, false>(size, a, b, c) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
unsafe fn columns_avx512<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    // SAFETY: the caller's.
    unsafe {
        match T::NARROW {
            false => columns::<super::x86::Sixteen, T, C, false>(size, a, b, c),
            true => columns::<super::x86::Sixteen, T, C, true>(size, a, b, c),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn columns_avx2<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    // SAFETY: the caller's.
    unsafe {
        match T::NARROW {
            false => columns::<super::x86::Eight, T, C, false>(size, a, b, c),
            true => columns::<super::x86::Eight, T, C, true>(size, a, b, c),
        }
    }
}

unsafe fn columns_portable<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    // SAFETY: the caller's.
    unsafe {
        match T::NARROW {
            false => columns::<Four, T, C, false>(size, a, b, c),
            true => columns::<Four, T, C, true>(size, a, b, c),
        }
    }
}

/// All columns. `WIDENED`: elements are bf16 and the sums' steps f32, two to 32 bits of a line.
///
/// # Safety
/// The processor has the vectors; `a` holds `m` lines of words, `b` `n` lines of `k` steps, `c` `m`
/// rows of `n`.
#[inline(always)]
unsafe fn columns<V: Turn, T: Stored, C: Stored, const WIDENED: bool>(
    (m, n, k): (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    let width = VECTORS * V::LANES;
    // Elements of 32 bits of a line, and steps of the sums for them.
    let per = 4 / size_of::<T>();
    let steps = if WIDENED { 2 } else { 1 };
    let whole = k / (per * V::LANES) * V::LANES;
    let bytes = if b.stride == k { width * k * size_of::<T>() } else { 0 };
    let (mut totals, mut sums) = ([0.0f32; FEW * WIDTH], [0.0f32; FEW * WIDTH]);
    let mut square = [0.0f32; 2 * 16 * WIDTH];
    for j in (0..n).step_by(width) {
        let count = width.min(n - j);
        let line = |i: usize| b.start.add((j + i.min(count - 1)) * b.stride).get().cast::<f32>();
        let lines: [*const f32; WIDTH] = std::array::from_fn(line);
        let next = b.start.add((j + width) * b.stride).get().cast::<u8>();
        let next = (count == width && j + width < n).then_some(next);
        let mut asked = 0;
        // Words of the left operand that are done, and those at which sums are visited.
        let (mut done, all) = (0, if WIDENED { k } else { k.div_ceil(per) });
        while done < all {
            let end = (done + DEPTH).min(all);
            sums[..m * width].fill(0.0);
            while done < end {
                let at = done / steps;
                if let Some(next) = next {
                    let until = (asked + width * V::LANES * 4).min(bytes);
                    while asked < until {
                        prefetch(next.wrapping_add(asked));
                        asked += 64;
                    }
                }
                if at < whole {
                    // SAFETY: lines have `whole` times 32 bits, `a` the words for them.
                    unsafe {
                        if m == 1 {
                            one::<V, WIDENED>(&lines, at, a[0].add(done), &mut sums);
                        } else {
                            turned::<V, WIDENED>(&lines, at, &mut square);
                            rows::<V>(m, V::LANES * steps, a, done, &square, &mut sums);
                        }
                    }
                    done += V::LANES * steps;
                    continue;
                }
                // Words behind the last square, one by one.
                let left = end - done;
                for (i, line) in lines.iter().enumerate().take(width) {
                    let from = line.cast::<T>();
                    let word = |s: usize| {
                        // SAFETY: a line has `k` steps, and `word` asks for no others.
                        super::word(|s| unsafe { *from.add(s) }, done + s, k)
                    };
                    (0..left).for_each(|s| square[s * width + i] = word(s));
                }
                // SAFETY: `a` has `all` words.
                unsafe { rows::<V>(m, left, a, done, &square, &mut sums) };
                done = end;
            }
            let first = end <= DEPTH;
            let totals = &mut totals[..m * width];
            if first && !c.accumulate {
                totals.copy_from_slice(&sums[..m * width]);
                continue;
            }
            if first {
                for (i, totals) in totals.chunks_exact_mut(width).enumerate() {
                    // SAFETY: row `i` of `c` has `count` elements from `j` on.
                    let before =
                        unsafe { std::slice::from_raw_parts(c.start.add(i * c.stride + j).get(), count) };
                    totals.iter_mut().zip(before).for_each(|(to, x)| *to = x.widen());
                }
            }
            totals.iter_mut().zip(&sums).for_each(|(to, x)| *to += x);
        }
        for (i, totals) in totals.chunks_exact(width).enumerate().take(m) {
            // SAFETY: as above.
            let to =
                unsafe { std::slice::from_raw_parts_mut(c.start.add(i * c.stride + j).get_mut(), count) };
            C::store(&totals[..count], to);
        }
    }
}

/// Packs as many lines of bf16 as there are in whole vectors, widened, where the steps of the sums
/// are f32.
///
/// # Safety
/// Lines have so many steps; `to` has room for `lines.len()` floats of each.
pub(super) unsafe fn pack_widened(lines: &[*const f32], steps: usize, to: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512(lines: &[*const f32], steps: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { widened::<super::x86::Sixteen>(lines, steps, to) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(lines: &[*const f32], steps: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { widened::<super::x86::Eight>(lines, steps, to) }
    }

    let run = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2,
        Level::Portable => widened::<Four>,
    };
    // SAFETY: the caller's; the processor has the instructions of its level.
    unsafe { run(lines, steps, to) }
}

/// # Safety
/// As for [`pack_widened`]; the processor has the vectors, and lines are whole vectors.
#[inline(always)]
unsafe fn widened<V: Turn>(lines: &[*const f32], steps: usize, to: *mut f32) {
    let (width, whole) = (lines.len(), steps / (2 * V::LANES) * V::LANES);
    for (group, lines) in lines.chunks_exact(V::LANES).enumerate() {
        let to = to.wrapping_add(group * V::LANES);
        for at in (0..whole).step_by(V::LANES) {
            // SAFETY: the caller's.
            unsafe {
                let square = V::turn(lines, at);
                for (s, &words) in square.iter().enumerate().take(V::LANES) {
                    let to = to.add(2 * (at + s) * width);
                    words.low().store(to);
                    words.high().store(to.add(width));
                }
            }
        }
        for (i, line) in lines.iter().enumerate() {
            for s in 2 * whole..steps {
                // SAFETY: the caller's.
                unsafe { *to.add(s * width + i) = line.cast::<bf16>().add(s).read().widen() };
            }
        }
    }
}

/// Asks for a line of the cache that will be read once, later than the first cache remembers.
#[inline(always)]
fn prefetch(_line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture, and the instruction reads nothing that a program
    // could see.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T1>(_line.cast());
    }
}

/// A square of words of [`VECTORS`] vectors of lines, step by step.
///
/// # Safety
/// Lines have the words.
#[inline(always)]
unsafe fn turned<V: Turn, const WIDENED: bool>(
    lines: &[*const f32; WIDTH],
    at: usize,
    to: &mut [f32; 2 * 16 * WIDTH],
) {
    let width = VECTORS * V::LANES;
    for (half, lines) in lines.chunks_exact(V::LANES).enumerate().take(VECTORS) {
        let to = to[half * V::LANES..].as_mut_ptr();
        // SAFETY: the caller's; `to` has two steps for each of `LANES` words.
        unsafe {
            let square = V::turn(lines, at);
            for (s, &words) in square.iter().enumerate().take(V::LANES) {
                match WIDENED {
                    false => words.store(to.add(s * width)),
                    true => {
                        words.low().store(to.add(2 * s * width));
                        words.high().store(to.add((2 * s + 1) * width));
                    }
                }
            }
        }
    }
}

/// One row, the squares in registers.
///
/// # Safety
/// Lines and `a` have the words.
#[inline(always)]
unsafe fn one<V: Turn, const WIDENED: bool>(
    lines: &[*const f32; WIDTH],
    at: usize,
    a: *const f32,
    sums: &mut [f32; FEW * WIDTH],
) {
    for (half, lines) in lines.chunks_exact(V::LANES).enumerate().take(VECTORS) {
        let to = sums[half * V::LANES..].as_mut_ptr();
        // SAFETY: the caller's; `to` has a vector.
        unsafe {
            let mut sum = V::load(to);
            let square = V::turn(lines, at);
            for (s, &words) in square.iter().enumerate().take(V::LANES) {
                sum = match WIDENED {
                    false => sum.fma(V::splat(*a.add(s)), words),
                    true => sum
                        .fma(V::splat(*a.add(2 * s)), words.low())
                        .fma(V::splat(*a.add(2 * s + 1)), words.high()),
                };
            }
            sum.store(to);
        }
    }
}

/// Adds the products of some steps to the sums of all rows.
///
/// # Safety
/// `a` has `m` lines with the words from `first` on; `m` is at most [`FEW`].
#[inline(always)]
unsafe fn rows<V: Vector>(
    m: usize,
    steps: usize,
    a: &[*const f32; FEW],
    first: usize,
    square: &[f32; 2 * 16 * WIDTH],
    sums: &mut [f32; FEW * WIDTH],
) {
    let width = VECTORS * V::LANES;
    let mut row = 0;
    macro_rules! of {
        ($($m:literal)*) => {$(
            while $m <= V::ROWS && m - row >= $m {
                let sums = sums[row * width..].as_mut_ptr();
                // SAFETY: the caller's: `$m` rows from `row` on.
                unsafe {
                    let mut left = [std::ptr::null::<f32>(); $m];
                    let mut all = [[V::splat(0.0); VECTORS]; $m];
                    for (i, (left, all)) in left.iter_mut().zip(&mut all).enumerate() {
                        *left = a[row + i].add(first);
                        for (j, sum) in all.iter_mut().enumerate() {
                            *sum = V::load(sums.add(i * width + j * V::LANES));
                        }
                    }
                    let mut right = square.as_ptr();
                    for s in 0..steps {
                        let mut vectors = [V::splat(0.0); VECTORS];
                        for (j, vector) in vectors.iter_mut().enumerate() {
                            *vector = V::load(right.add(j * V::LANES));
                        }
                        for (all, left) in all.iter_mut().zip(left) {
                            let left = V::splat(*left.add(s));
                            for (sum, right) in all.iter_mut().zip(vectors) {
                                *sum = sum.fma(left, right);
                            }
                        }
                        right = right.add(width);
                    }
                    for (i, all) in all.into_iter().enumerate() {
                        for (j, sum) in all.into_iter().enumerate() {
                            sum.store(sums.add(i * width + j * V::LANES));
                        }
                    }
                }
                row += $m;
            }
        )*};
    }
    of!(8 4 2 1);
}

/// Columns of a task: enough for the next lines to be worth asking for, and few enough that each
/// of so many threads has several tasks.
pub(super) fn columns_of_task(n: usize, threads: usize) -> usize {
    let unit = shape().columns;
    n.div_ceil(2 * threads).clamp(1, 32 * unit).next_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::product::{block, block_into, block_scratch};

    /// Few rows have the bits of many, whatever their number, the columns and the steps.
    #[test]
    fn few_rows_have_the_bits_of_many() {
        bits_of(|x| x);
        bits_of(bf16::from_f32);
    }

    fn bits_of<T: Stored>(stored: fn(f32) -> T) {
        let value = |i: usize| ((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0;
        for (m, n, k) in [(1, 70, 64), (2, 33, 301), (7, 32, 40), (16, 96, 700), (3, 5, 2), (8, 64, 1030)] {
            let mut a: Vec<T> = (0..m * k).map(|i| stored(value(i))).collect();
            let mut b: Vec<T> = (0..n * k).map(|i| stored(value(3 * i + 5))).collect();
            let mut order: Vec<i32> = (0..m as i32).rev().collect();
            let [sa, sb] =
                [&mut a, &mut b].map(|x| Side::Strided { start: Pointer::to(x), line: k, step: 1 });
            let Side::Strided { start, .. } = sa else { unreachable!() };
            let gathered = Side::GatheredLines { start, row: k, order: Pointer::to(&mut order), per: 1 };
            for (a, accumulate) in [(sa, false), (sa, true), (gathered, false)] {
                let mut scratch = vec![f32::NAN; block_scratch(m, n, k)];
                let mut found = vec![0.25f32; m * n];
                let c = Pointer::to(&mut found);
                // SAFETY: the operands and results are `m`, `n` and `k` of one another.
                assert!(unsafe { few((m, n, k), a, sb, (c, n, accumulate), &mut scratch) });
                let mut expected = vec![0.25f32; m * n];
                let sums = expected.as_mut_ptr();
                let c = super::super::Results { sums, stride: n, accumulate, rounded: None };
                // SAFETY: likewise.
                unsafe { block_into((m, n, k), a, sb, c, &mut scratch) };
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{m} {n} {k} {accumulate}");
                // Results in bf16 are those, rounded once.
                let mut rounded = vec![bf16::from_f32(0.25); m * n];
                let c = Pointer::to(&mut rounded);
                // SAFETY: likewise.
                unsafe { block((m, n, k), a, sb, c, n, accumulate, &mut scratch) };
                let mut narrow = vec![bf16::ZERO; m * n];
                super::super::narrow(&expected, &mut narrow);
                assert_eq!(rounded, narrow, "{m} {n} {k} {accumulate}");
            }
        }
    }
}
