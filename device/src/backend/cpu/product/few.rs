//! Products of few rows, such as one token of each text: bound by the memory that the right operand
//! is read from, which is read once for all rows and packed nowhere.
//!
//! *In*: a left operand of at most [`FEW`] lines and a right one whose steps are adjacent, as
//! weights are. *Out*: the bits of [`super::block`]. *Promise*: each line of the right operand is
//! read once, 32 bits or more at a time; where bf16 has no products, it is widened in registers.
//!
//! Lines of the right operand are columns of the result, and a vector of sums has one lane a
//! column, so four words of as many lines as lanes are transposed in registers at a time. Memory is
//! asked for [`AHEAD`] along each line, and from there in the line that follows the last of them: a
//! processor looks ahead by itself in fewer places than there are lines.

#[cfg(target_arch = "x86_64")]
use super::amx::Even;
use super::{DEPTH, Four, Level, Pointer, Side, Stored, VECTORS, Vector, level, shape};

/// Most rows of such a product. More are better multiplied from panels.
pub(crate) const FEW: usize = 16;
/// Most lines of a right panel.
pub(super) const PANEL: usize = VECTORS * 16;
/// Lines at once: more would be read from more places than the first cache has for memory that is
/// as far apart as lines of a power of two are. They are one vector or several.
const WIDTH: usize = 16;
/// The most vectors that they are.
const GROUP: usize = 4;
/// Words that are asked for ahead: fewer come too late, and more are gone again where lines are as
/// far apart as the cache's places repeat.
const AHEAD: usize = 256;
/// Words of a line of the cache.
const ASKED: usize = 16;

/// Whether a product with this scratch is one of few rows: steps are adjacent on both sides.
pub(super) fn suits<L: Stored, R: Stored>(
    m: usize,
    k: usize,
    a: Side<L>,
    b: Side<R>,
    scratch: usize,
) -> bool {
    let right = matches!(b, Side::Strided { step: 1, .. });
    (1..=FEW).contains(&m)
        && k > 0
        && a.steps_are_adjacent()
        && right
        && m * k.div_ceil(L::per_word()) <= scratch
}

/// Vectors that transpose words.
///
/// Code that works with them passes on no closure, slice or iterator: in a build that inlines
/// nothing across pieces of a crate they are calls, and vectors are in memory.
pub(super) trait Turn: Vector {
    /// Vectors of [`WIDTH`] lines.
    const GROUP: usize = WIDTH / Self::LANES;
    /// Words `at` to `at + 4` of `LANES` lines, a vector for each word.
    ///
    /// # Safety
    /// There are `LANES` lines, and they have the words.
    #[inline(always)]
    unsafe fn turn(lines: *const *const f32, at: usize) -> [Self; 4] {
        // SAFETY: the caller's.
        unsafe { Self::turn_bytes(lines, 4 * at) }
    }
    /// Four words from byte `at` of `LANES` lines on.
    ///
    /// # Safety
    /// There are `LANES` lines, and they have the words.
    unsafe fn turn_bytes(lines: *const *const f32, at: usize) -> [Self; 4];
    /// The first of two bf16 in a word, as f32.
    unsafe fn low(self) -> Self;
    /// The second.
    unsafe fn high(self) -> Self;
}

impl Turn for Four {
    #[inline(always)]
    unsafe fn turn_bytes(lines: *const *const f32, at: usize) -> [Self; 4] {
        let mut turned = [Four([0.0; 4]); 4];
        for i in 0..4 {
            // SAFETY: the caller's.
            let words = unsafe { Four::load((*lines.add(i)).byte_add(at)) };
            for (turned, word) in turned.iter_mut().zip(words.0) {
                turned.0[i] = word;
            }
        }
        turned
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
    /// The processor has AVX-512; there are sixteen lines, and they have the words.
    #[inline(always)]
    unsafe fn turn_sixteen(lines: *const *const f32, at: usize) -> [__m512; 4] {
        // Words of lines `j`, `4 + j`, `8 + j` and `12 + j`, 128 bits of each.
        macro_rules! lines {
            ($j:literal) => {{
                let x = _mm512_castps128_ps512(_mm_loadu_ps((*lines.add($j)).byte_add(at)));
                let x = _mm512_insertf32x4::<1>(x, _mm_loadu_ps((*lines.add(4 + $j)).byte_add(at)));
                let x = _mm512_insertf32x4::<2>(x, _mm_loadu_ps((*lines.add(8 + $j)).byte_add(at)));
                _mm512_insertf32x4::<3>(x, _mm_loadu_ps((*lines.add(12 + $j)).byte_add(at)))
            }};
        }
        // SAFETY: the caller's.
        unsafe {
            fours!(
                [lines!(0), lines!(1), lines!(2), lines!(3)],
                _mm512_unpacklo_ps,
                _mm512_unpackhi_ps,
                _mm512_unpacklo_pd,
                _mm512_unpackhi_pd,
                _mm512_castps_pd,
                _mm512_castpd_ps
            )
        }
    }

    /// # Safety
    /// The processor has AVX2; there are eight lines, and they have the words.
    #[inline(always)]
    unsafe fn turn_eight(lines: *const *const f32, at: usize) -> [__m256; 4] {
        macro_rules! lines {
            ($j:literal) => {
                _mm256_set_m128(
                    _mm_loadu_ps((*lines.add(4 + $j)).byte_add(at)),
                    _mm_loadu_ps((*lines.add($j)).byte_add(at)),
                )
            };
        }
        // SAFETY: the caller's.
        unsafe {
            fours!(
                [lines!(0), lines!(1), lines!(2), lines!(3)],
                _mm256_unpacklo_ps,
                _mm256_unpackhi_ps,
                _mm256_unpacklo_pd,
                _mm256_unpackhi_pd,
                _mm256_castps_pd,
                _mm256_castpd_ps
            )
        }
    }

    macro_rules! turn {
        ($name:ident, $turn:ident, $low:ident, $high:ident) => {
            impl Turn for $name {
                #[inline(always)]
                unsafe fn turn_bytes(lines: *const *const f32, at: usize) -> [Self; 4] {
                    // SAFETY: the caller's; whoever has the vectors has the instructions.
                    let [a, b, c, d] = unsafe { $turn(lines, at) };
                    [$name(a), $name(b), $name(c), $name(d)]
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

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::super::neon::{Pairs, Quad};
    use super::Turn;
    use std::arch::aarch64::*;

    /// # Safety
    /// There are four lines, and they have the words.
    #[inline(always)]
    unsafe fn turn_four(lines: *const *const f32, at: usize) -> [float32x4_t; 4] {
        macro_rules! line {
            ($j:literal) => {
                vld1q_f32((*lines.add($j)).byte_add(at))
            };
        }
        // Two by two words, and then two by two of those.
        macro_rules! pairs {
            ($zip:ident $a:ident $b:ident) => {
                vreinterpretq_f32_f64($zip(vreinterpretq_f64_f32($a), vreinterpretq_f64_f32($b)))
            };
        }
        // SAFETY: the caller's; the instructions are part of the architecture.
        unsafe {
            let (a, b, c, d) = (line!(0), line!(1), line!(2), line!(3));
            let (even, odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
            let (even_after, odd_after) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
            [
                pairs!(vzip1q_f64 even even_after),
                pairs!(vzip1q_f64 odd odd_after),
                pairs!(vzip2q_f64 even even_after),
                pairs!(vzip2q_f64 odd odd_after),
            ]
        }
    }

    macro_rules! turn {
        ($name:ident) => {
            impl Turn for $name {
                #[inline(always)]
                unsafe fn turn_bytes(lines: *const *const f32, at: usize) -> [Self; 4] {
                    // SAFETY: the caller's.
                    let [a, b, c, d] = unsafe { turn_four(lines, at) };
                    [$name(a), $name(b), $name(c), $name(d)]
                }
                #[inline(always)]
                unsafe fn low(self) -> Self {
                    // SAFETY: the instructions are part of the architecture.
                    unsafe {
                        let words = vreinterpretq_u32_f32(self.0);
                        $name(vreinterpretq_f32_u32(vshlq_n_u32::<16>(words)))
                    }
                }
                #[inline(always)]
                unsafe fn high(self) -> Self {
                    // SAFETY: likewise.
                    unsafe {
                        let mask = vdupq_n_u32(0xffff_0000);
                        $name(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(self.0), mask)))
                    }
                }
            }
        };
    }

    turn!(Pairs);
    turn!(Quad);
}

/// The right operand: the first line, and elements from line to line.
#[derive(Clone, Copy)]
struct Lines<T> {
    start: Pointer<T>,
    stride: usize,
}

impl<T> Lines<T> {
    /// Lines from `j` on, below `n`: how many, where they begin (the last again in the place of
    /// missing ones), and the bytes to as many lines after them.
    #[inline(always)]
    fn some(&self, j: usize, n: usize) -> (usize, [*const f32; WIDTH], usize) {
        let count = WIDTH.min(n - j);
        let line = |i: usize| self.start.add((j + i.min(count - 1)) * self.stride).get().cast::<f32>();
        (count, std::array::from_fn(line), WIDTH * self.stride * size_of::<T>())
    }
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
pub(super) unsafe fn few<L: Stored, R: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: Side<L>,
    b: Side<R>,
    c: (Pointer<C>, usize, bool),
    scratch: &mut [f32],
) -> bool {
    let (m, _, k) = size;
    let Side::Strided { start, line, step: 1 } = b else { return false };
    if !suits(m, k, a, b, scratch.len()) {
        return false;
    }
    let words = k.div_ceil(L::per_word());
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
        *left = L::words(from, &mut scratch[i * words..][..words]).as_ptr();
    }
    #[cfg(target_arch = "x86_64")]
    if R::in_tiles() && Even::of(m, |i| left[i]).is_none() {
        for (i, left) in left.iter_mut().enumerate().take(m) {
            let to = scratch[i * words..][..words].as_mut_ptr();
            // SAFETY: a line has `words` words, elsewhere or there already.
            unsafe { std::ptr::copy(*left, to, words) };
            *left = to;
        }
    }
    let (lines, rows) = (Lines { start, stride: line }, Rows { start: c.0, stride: c.1, accumulate: c.2 });
    let run = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if R::in_tiles() => columns_tiles::<R, C>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if R::per_word() == 2 => columns_pairs::<R, C>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => columns_avx512::<R, C>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => columns_avx2::<R, C>,
        #[cfg(target_arch = "aarch64")]
        Level::Portable if R::per_word() == 2 => columns_pairs::<R, C>,
        Level::Portable => columns_portable::<R, C>,
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

/// In tile registers, in the order of sums of [`super::amx`]: sixteen words of as many lines,
/// transposed, are a right tile, and all rows a left one. The last words have tiles of their own.
/// A tile of one row takes as long as the latency of its sums, 1 KB of weights in 52 cycles, which
/// memory does not keep up with.
///
/// # Safety
/// As for [`columns`]; lines of `a` are evenly apart, and the processor has tiles.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
unsafe fn columns_tiles<T: Stored, C: Stored>(
    (m, n, k): (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    use super::x86::Sixteen;
    use crate::cpu::simd::amx::{SIDE, configure, load, multiply, release, store, zero};
    const { assert!(WIDTH == SIDE && FEW == SIDE) };
    let Steps { whole, all, .. } = Steps::new::<T, false>(k);
    let Some(left) = Even::of(m, |i| a[i]) else { return };
    let none = (0, 0);
    let last = all % SIDE;
    let tiles = [(m, SIDE), (m, SIDE), (SIDE, SIDE), (m, last), (last, SIDE), none, none, none];
    // SAFETY: the caller's.
    unsafe { configure(tiles) };
    let mut totals = [0.0f32; FEW * WIDTH];
    let mut square = [0.0f32; 2 * 16 * WIDTH];
    for j in (0..n).step_by(WIDTH) {
        let (count, lines, next) = b.some(j, n);
        // SAFETY: rows of `c` have `count` elements from `j` on; tiles have their shapes; lines
        // have `whole` words and those that `last_word` asks for, `a` all.
        unsafe {
            if c.accumulate {
                for (i, totals) in totals.chunks_exact_mut(WIDTH).enumerate().take(m) {
                    c.begun(i, j, &mut totals[..count]);
                }
                load::<0>(totals.as_ptr(), 4 * WIDTH);
            } else {
                zero::<0>();
            }
            for at in (0..all).step_by(SIDE) {
                let words = SIDE.min(all - at);
                let fours = words.min(whole.saturating_sub(at));
                if fours > 0 {
                    ask(&lines, at, whole, next);
                    turned::<Sixteen, false>(&lines, at, fours, &mut square);
                }
                for w in fours..words {
                    for (i, line) in lines.iter().enumerate() {
                        square[w * WIDTH + i] = last_word::<T>(*line, at + w, k);
                    }
                }
                let (left, apart, right) = (left.start.add(at), left.apart, square.as_ptr());
                if words == SIDE {
                    load::<1>(left, apart);
                    load::<2>(right, 4 * WIDTH);
                    multiply::<0, 1, 2>();
                } else {
                    load::<3>(left, apart);
                    load::<4>(right, 4 * WIDTH);
                    multiply::<0, 3, 4>();
                }
            }
            store::<0>(totals.as_mut_ptr(), 4 * WIDTH);
            for (i, totals) in totals.chunks_exact(WIDTH).enumerate().take(m) {
                c.store(i, j, &totals[..count]);
            }
        }
    }
    // SAFETY: the caller's.
    unsafe { release() };
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

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
unsafe fn columns_pairs<T: Stored, C: Stored>(
    size: (usize, usize, usize),
    a: &[*const f32; FEW],
    b: Lines<T>,
    c: Rows<C>,
) {
    // SAFETY: the caller's.
    unsafe { columns::<super::neon::Pairs, T, C, false>(size, a, b, c) }
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

/// Steps that all columns have. `WIDENED`: elements are bf16 and the sums' steps f32, two to 32
/// bits of a line.
#[derive(Clone, Copy)]
struct Steps {
    /// Steps of the sums for 32 bits of a line.
    per: usize,
    /// Words that are transposed; those after them go one by one.
    whole: usize,
    /// Steps of the sums, which are as many words of the left operand.
    all: usize,
}

impl Steps {
    fn new<T: Stored, const WIDENED: bool>(k: usize) -> Self {
        let elements = 4 / size_of::<T>();
        Steps {
            per: if WIDENED { 2 } else { 1 },
            whole: k / (4 * elements) * 4,
            all: if WIDENED { k } else { k.div_ceil(elements) },
        }
    }
}

/// All columns.
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
    if m == 1 {
        // SAFETY: the caller's.
        return unsafe { columns_of_one::<V, T, C, WIDENED>((n, k), a[0], b, c) };
    }
    let Steps { per, whole, all } = Steps::new::<T, WIDENED>(k);
    let (mut totals, mut sums) = ([0.0f32; FEW * WIDTH], [0.0f32; FEW * WIDTH]);
    let mut square = [0.0f32; 2 * 16 * WIDTH];
    for j in (0..n).step_by(WIDTH) {
        let (count, lines, next) = b.some(j, n);
        // Words of the left operand that are done, and those at which sums are visited.
        let mut done = 0;
        while done < all {
            let end = (done + DEPTH).min(all);
            sums[..m * WIDTH].fill(0.0);
            while done < end {
                let at = done / per;
                if at < whole {
                    let words = V::LANES.min(whole - at).min((end - done) / per);
                    ask(&lines, at, whole, next);
                    // SAFETY: lines have `whole` times 32 bits, `a` the words for them.
                    unsafe {
                        turned::<V, WIDENED>(&lines, at, words, &mut square);
                        rows::<V>(m, words * per, a, done, &square, &mut sums);
                    }
                    done += words * per;
                    continue;
                }
                let left = end - done;
                for (i, line) in lines.iter().enumerate() {
                    // SAFETY: a line has `k` steps, and `last_word` asks for no others.
                    let word = |s: usize| unsafe { last_word::<T>(*line, done + s, k) };
                    (0..left).for_each(|s| square[s * WIDTH + i] = word(s));
                }
                // SAFETY: `a` has `all` words.
                unsafe { rows::<V>(m, left, a, done, &square, &mut sums) };
                done = end;
            }
            let first = end <= DEPTH;
            let totals = &mut totals[..m * WIDTH];
            if first && !c.accumulate {
                totals.copy_from_slice(&sums[..m * WIDTH]);
                continue;
            }
            if first {
                for (i, totals) in totals.chunks_exact_mut(WIDTH).enumerate() {
                    // SAFETY: row `i` of `c` has `count` elements from `j` on.
                    unsafe { c.begun(i, j, &mut totals[..count]) };
                }
            }
            totals.iter_mut().zip(&sums).for_each(|(to, x)| *to += x);
        }
        for (i, totals) in totals.chunks_exact(WIDTH).enumerate().take(m) {
            // SAFETY: as above.
            unsafe { c.store(i, j, &totals[..count]) };
        }
    }
}

/// All columns of one row, whose sums stay in a register.
///
/// # Safety
/// As for [`columns`].
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn columns_of_one<V: Turn, T: Stored, C: Stored, const WIDENED: bool>(
    (n, k): (usize, usize),
    a: *const f32,
    b: Lines<T>,
    c: Rows<C>,
) {
    let Steps { per, whole, all } = Steps::new::<T, WIDENED>(k);
    let mut totals = [0.0f32; WIDTH];
    for j in (0..n).step_by(WIDTH) {
        let (count, lines, next) = b.some(j, n);
        let mut done = 0;
        while done < all {
            let end = (done + DEPTH).min(all);
            let first = end <= DEPTH;
            // SAFETY: lines have `whole` times 32 bits, `a` the words for them; `totals` and `word`
            // have all vectors.
            unsafe {
                let mut sums = [V::splat(0.0); GROUP];
                while done / per < whole && done < end {
                    let at = done / per;
                    ask(&lines, at, whole, next);
                    let left = a.add(done);
                    for g in 0..V::GROUP {
                        let [w, x, y, z] = V::turn(lines.as_ptr().add(g * V::LANES), at);
                        macro_rules! add {
                            ($($i:literal $word:ident)*) => {$(
                                sums[g] = match WIDENED {
                                    false => sums[g].fma(V::splat(*left.add($i)), $word),
                                    true => sums[g]
                                        .fma(V::splat(*left.add(2 * $i)), $word.low())
                                        .fma(V::splat(*left.add(2 * $i + 1)), $word.high()),
                                };
                            )*};
                        }
                        add!(0 w 1 x 2 y 3 z);
                    }
                    done += 4 * per;
                }
                while done < end {
                    let mut word = [0.0f32; WIDTH];
                    for (word, line) in word.iter_mut().zip(lines) {
                        *word = last_word::<T>(line, done, k);
                    }
                    for g in 0..V::GROUP {
                        let word = V::load(word.as_ptr().add(g * V::LANES));
                        sums[g] = sums[g].fma(V::splat(*a.add(done)), word);
                    }
                    done += 1;
                }
                if first && c.accumulate {
                    c.begun(0, j, &mut totals[..count]);
                }
                for g in 0..V::GROUP {
                    let sum = sums[g];
                    let to = totals.as_mut_ptr().add(g * V::LANES);
                    let sum = if first && !c.accumulate { sum } else { V::load(to).plus(sum) };
                    sum.store(to);
                }
            }
        }
        // SAFETY: the row of `c` has `count` elements from `j` on.
        unsafe { c.store(0, j, &totals[..count]) };
    }
}

impl<C: Stored> Rows<C> {
    /// Elements as they are before a product is added to them.
    ///
    /// # Safety
    /// Row `i` has as many as `totals` from `j` on.
    #[inline(always)]
    unsafe fn begun(&self, i: usize, j: usize, totals: &mut [f32]) {
        let from = self.start.add(i * self.stride + j).get();
        // SAFETY: the caller's.
        let before = unsafe { std::slice::from_raw_parts(from, totals.len()) };
        totals.iter_mut().zip(before).for_each(|(to, x)| *to = x.widen());
    }

    /// # Safety
    /// Row `i` has as many elements as `totals` from `j` on.
    #[inline(always)]
    unsafe fn store(&self, i: usize, j: usize, totals: &[f32]) {
        let to = self.start.add(i * self.stride + j).get_mut();
        // SAFETY: the caller's.
        C::store(totals, unsafe { std::slice::from_raw_parts_mut(to, totals.len()) });
    }
}

/// A word after the last that is transposed.
///
/// # Safety
/// The line has `k` steps.
#[inline(always)]
unsafe fn last_word<T: Stored>(line: *const f32, word: usize, k: usize) -> f32 {
    // SAFETY: the caller's: `word` asks for no other steps.
    super::word(|s| unsafe { *line.cast::<T>().add(s) }, word, k)
}

/// Packs as many lines as there are in whole vectors: words of steps, or bf16 widened where the
/// steps of the sums are f32.
///
/// # Safety
/// Lines have `steps` steps; `to` has room for `lines.len()` words of each.
pub(super) unsafe fn panel<T: Stored>(lines: &[*const f32], steps: usize, to: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512<T: Stored, const WIDENED: bool>(lines: &[*const f32], steps: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { panel_of::<super::x86::Sixteen, T, WIDENED>(lines, steps, to) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<T: Stored, const WIDENED: bool>(lines: &[*const f32], steps: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { panel_of::<super::x86::Eight, T, WIDENED>(lines, steps, to) }
    }

    let widened = T::NARROW && T::per_word() == 1;
    let run = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if widened => avx512::<T, true>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::<T, false>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 if widened => avx2::<T, true>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::<T, false>,
        Level::Portable if widened => panel_of::<Four, T, true>,
        Level::Portable => panel_of::<Four, T, false>,
    };
    // SAFETY: the caller's; the processor has the instructions of its level.
    unsafe { run(lines, steps, to) }
}

/// # Safety
/// As for [`panel`]; the processor has the vectors, and lines are whole vectors.
#[inline(always)]
unsafe fn panel_of<V: Turn, T: Stored, const WIDENED: bool>(
    lines: &[*const f32],
    steps: usize,
    to: *mut f32,
) {
    let Steps { per, whole, all } = Steps::new::<T, WIDENED>(steps);
    let width = lines.len();
    for (group, lines) in lines.chunks_exact(V::LANES).enumerate() {
        let to = to.wrapping_add(group * V::LANES);
        for at in (0..whole).step_by(4) {
            // SAFETY: the caller's.
            unsafe {
                for (s, words) in V::turn(lines.as_ptr(), at).into_iter().enumerate() {
                    let to = to.add(per * (at + s) * width);
                    if WIDENED {
                        words.low().store(to);
                        words.high().store(to.add(width));
                    } else {
                        words.store(to);
                    }
                }
            }
        }
        for (i, line) in lines.iter().enumerate() {
            for s in per * whole..all {
                // SAFETY: the caller's.
                unsafe { *to.add(s * width + i) = last_word::<T>(*line, s, steps) };
            }
        }
    }
}

/// Asks for what is [`AHEAD`] of word `at` of lines of `whole` words, or as far into the lines that
/// are `next` bytes after them; once for each line of the cache.
#[inline(always)]
fn ask(_lines: &[*const f32], at: usize, whole: usize, next: usize) {
    if !at.is_multiple_of(ASKED) {
        return;
    }
    let ahead = at + AHEAD;
    let _from = if ahead < whole { 4 * ahead } else { next + 4 * (ahead - whole) };
    #[cfg(target_arch = "x86_64")]
    for line in _lines {
        // SAFETY: SSE is part of the architecture, and the instruction reads nothing that a program
        // could see.
        unsafe {
            use std::arch::x86_64::*;
            _mm_prefetch::<_MM_HINT_T1>(line.cast::<i8>().wrapping_add(_from));
        }
    }
}

/// Some words, at most a vector's lanes and whole fours, of all lines, step by step.
///
/// # Safety
/// Lines have the words.
#[inline(always)]
unsafe fn turned<V: Turn, const WIDENED: bool>(
    lines: &[*const f32; WIDTH],
    at: usize,
    words: usize,
    to: &mut [f32; 2 * 16 * WIDTH],
) {
    for vector in 0..V::GROUP {
        let mut to = to[vector * V::LANES..].as_mut_ptr();
        for four in 0..words / 4 {
            // SAFETY: the caller's; `to` has two steps for each of `LANES` words.
            unsafe {
                let [w, x, y, z] = V::turn(lines.as_ptr().add(vector * V::LANES), at + 4 * four);
                macro_rules! store {
                    ($($word:ident)*) => {$(
                        if WIDENED {
                            $word.low().store(to);
                            to = to.add(WIDTH);
                            $word.high().store(to);
                        } else {
                            $word.store(to);
                        }
                        to = to.wrapping_add(WIDTH);
                    )*};
                }
                store!(w x y z);
            }
        }
    }
}

/// Adds the products of some steps to the sums of all rows.
///
/// # Safety
/// `a` has `m` lines with the words from `first` on; `m` is at most [`FEW`].
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn rows<V: Turn>(
    m: usize,
    steps: usize,
    a: &[*const f32; FEW],
    first: usize,
    square: &[f32; 2 * 16 * WIDTH],
    sums: &mut [f32; FEW * WIDTH],
) {
    let mut row = 0;
    macro_rules! of {
        ($($m:literal)*) => {$(
            while $m <= V::ROWS && m - row >= $m {
                let sums = sums[row * WIDTH..].as_mut_ptr();
                // SAFETY: the caller's: `$m` rows from `row` on.
                unsafe {
                    let mut all = [[V::splat(0.0); GROUP]; $m];
                    for i in 0..$m {
                        for j in 0..V::GROUP {
                            all[i][j] = V::load(sums.add(i * WIDTH + j * V::LANES));
                        }
                    }
                    let (a, mut right) = (a.as_ptr().add(row), square.as_ptr());
                    for s in first..first + steps {
                        let mut vectors = [V::splat(0.0); GROUP];
                        for j in 0..V::GROUP {
                            vectors[j] = V::load(right.add(j * V::LANES));
                        }
                        for i in 0..$m {
                            let left = V::splat(*(*a.add(i)).add(s));
                            for j in 0..V::GROUP {
                                all[i][j] = all[i][j].fma(left, vectors[j]);
                            }
                        }
                        right = right.add(WIDTH);
                    }
                    for i in 0..$m {
                        for j in 0..V::GROUP {
                            all[i][j].store(sums.add(i * WIDTH + j * V::LANES));
                        }
                    }
                }
                row += $m;
            }
        )*};
    }
    of!(8 4 2 1);
}

/// Columns of a task: enough for the next lines to be worth asking for, and few enough that each of
/// `threads` threads has several tasks.
pub(super) fn columns_of_task(n: usize, threads: usize) -> usize {
    let unit = shape().columns;
    n.div_ceil(2 * threads).clamp(1, 32 * unit).next_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::product::{Widened, block, block_into, block_scratch};
    use half::bf16;

    /// Few rows have the bits of many, whatever their number, the columns and the steps.
    #[test]
    fn few_rows_have_the_bits_of_many() {
        // Products and sums of small numbers are at the edge of those that some instructions make
        // zero of.
        for scale in [1.0, 1.1e-19] {
            bits_of(|x| x, |x| x, scale);
            bits_of(bf16::from_f32, bf16::from_f32, scale);
            bits_of(|x| x, |x| Widened(bf16::from_f32(x)), scale);
        }
    }

    fn bits_of<L: Stored, R: Stored>(left: fn(f32) -> L, right: fn(f32) -> R, scale: f32) {
        let value = |i: usize| (((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0) * scale;
        for (m, n, k) in [(1, 70, 64), (2, 33, 301), (7, 32, 40), (16, 96, 700), (3, 5, 2), (8, 64, 1030)] {
            let mut a: Vec<L> = (0..m * k).map(|i| left(value(i))).collect();
            let mut b: Vec<R> = (0..n * k).map(|i| right(value(3 * i + 5))).collect();
            let mut order: Vec<i32> = (0..m as i32).rev().collect();
            let sa = Side::Strided { start: Pointer::to(&mut a), line: k, step: 1 };
            let sb = Side::Strided { start: Pointer::to(&mut b), line: k, step: 1 };
            let Side::Strided { start, .. } = sa else { unreachable!() };
            let gathered = Side::GatheredLines { start, row: k, order: Pointer::to(&mut order), per: 1 };
            for (a, accumulate) in [(sa, false), (sa, true), (gathered, false)] {
                let mut scratch = vec![f32::NAN; block_scratch(m, n, k)];
                let old = bf16::from_f32(0.25 * scale * scale);
                let mut found = vec![old.to_f32(); m * n];
                let c = Pointer::to(&mut found);
                // SAFETY: the operands and results are `m`, `n` and `k` of one another.
                assert!(unsafe { few((m, n, k), a, sb, (c, n, accumulate), &mut scratch) });
                let mut expected = vec![old.to_f32(); m * n];
                let sums = expected.as_mut_ptr();
                let c = super::super::Results { sums, stride: n, accumulate, rounded: None };
                // SAFETY: likewise.
                unsafe { block_into((m, n, k), a, sb, c, &mut scratch) };
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{m} {n} {k} {accumulate}");
                // Results in bf16 are those, rounded once.
                let mut rounded = vec![old; m * n];
                let c = Pointer::to(&mut rounded);
                // SAFETY: likewise.
                unsafe { block((m, n, k), a, sb, c, n, accumulate, &mut scratch) };
                let mut narrow = vec![bf16::ZERO; m * n];
                super::super::narrow(&expected, &mut narrow);
                assert_eq!(rounded, narrow, "{m} {n} {k} {accumulate}");
            }
        }
    }

    /// Weights in bf16, multiplied with f32, have the bits of the same weights in f32, few rows and
    /// many.
    #[test]
    fn weights_in_bf16_have_the_bits_of_f32() {
        let value = |i: usize| ((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0;
        for (m, n, k) in [(1, 70, 64), (3, 33, 301), (16, 48, 700), (40, 70, 515), (100, 33, 64)] {
            let mut a: Vec<f32> = (0..m * k).map(value).collect();
            let mut narrow: Vec<Widened> =
                (0..n * k).map(|i| Widened(bf16::from_f32(value(3 * i + 5)))).collect();
            let mut wide: Vec<f32> = narrow.iter().map(|x| x.widen()).collect();
            let a = Side::Strided { start: Pointer::to(&mut a), line: k, step: 1 };
            let (b, w) = (Pointer::to(&mut narrow), Pointer::to(&mut wide));
            for (line, step) in [(k, 1), (1, n)] {
                let mut scratch = vec![0.0; block_scratch(m, n, k)];
                let (mut found, mut expected) = (vec![0.0f32; m * n], vec![0.0f32; m * n]);
                let (c, d) = (Pointer::to(&mut found), Pointer::to(&mut expected));
                let (b, w) = (Side::Strided { start: b, line, step }, Side::Strided { start: w, line, step });
                // SAFETY: the operands and results are `m`, `n` and `k` of one another.
                unsafe {
                    block((m, n, k), a, b, c, n, false, &mut scratch);
                    block((m, n, k), a, w, d, n, false, &mut scratch);
                }
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{m} {n} {k}, lines {line} apart");
            }
        }
    }
}
