//! Matrix products.
//!
//! *In*: two matrices of any layout, perhaps with gathered rows. *Out*: a row-major matrix,
//! overwritten or added to. *Promise*: an element of the result is the sum over `k` in increasing
//! order, in blocks of [`DEPTH`], whatever the shape of the rest: neither the number of threads nor
//! the other rows of a batch change its bits. Nothing is allocated.
//!
//! The method is the usual one: pieces of both operands are copied into *panels*, in which the
//! elements that the innermost loop needs together are together, and a *microkernel* multiplies a
//! panel of rows by a panel of columns with the whole result in registers. A panel of `lines`
//! holds, for each step along `k`, one element of each line; lines are rows of the left operand or
//! columns of the right one, so one function packs both.
//!
//! Operands are f32 or bf16 ([`Stored`]), both the same; or f32 on the left, and on the right bf16
//! that is widened as it is read ([`Widened`]: a weight as its file holds it), or packed
//! ([`mod@packed`]); results are f32 or bf16, sums f32. A panel is made of *words* of 32 bits: a
//! word is one step of f32, or two steps of bf16 where the processor multiplies and adds pairs
//! (AVX512-BF16: each product of a pair is exact, the sums are f32; on aarch64 FEAT_BF16, which
//! rounds to odd). Where it does not, bf16 is widened as it is packed.
//!
//! Where the processor has tile registers, products of bf16 are made in them ([`amx`]), whose sums
//! have an order of their own.
//!
//! Few rows, as decoding has them, are multiplied without packing ([`few`]).

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocks;
mod few;
pub(crate) mod packed;

pub(crate) use few::FEW;

use super::simd::{Level, PORTABLE_FMA, fma, from_bf16, level, pairs, tile_registers};
use super::simd::{add_scaled, add_scaled_narrow, inner, inner_narrow, narrow, scale, scale_narrow, widen};
use super::{Context, Pointer};
use half::bf16;

/// Words of the sums between two visits to the result.
pub(crate) const DEPTH: usize = 256;
/// Largest tile that one task computes.
pub(crate) const TILE: (usize, usize) = (384, 256);
/// Most rows of a tile whose sums are visited more than once: it stays in the second-level cache.
pub(crate) const ROWS_OF_LONG_SUMS: usize = 192;

/// Storage of operands.
pub(crate) trait Stored: Copy + Send + Sync + 'static {
    /// Whether it is bf16.
    const NARROW: bool;
    /// Nothing.
    const ZERO: Self;
    /// As f32.
    fn widen(self) -> f32;

    /// Stores what was computed in f32.
    fn store(from: &[f32], to: &mut [Self]);

    /// The slice as f32, `room` being as long: itself, or what it says in `room`.
    fn wide<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32];

    /// Stores what `f` writes in f32, `room` being as long.
    fn written(x: &mut [Self], room: &mut [f32], f: impl FnOnce(&mut [f32]));

    /// The slice as words, `room` being as long as there are: itself, or what it puts in `room`.
    fn words<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32];

    /// Inner product of two slices of equal length, in f32.
    fn inner(a: &[Self], b: &[Self]) -> f32;

    /// `y = factor · x`.
    fn scale(factor: f32, x: &[Self], y: &mut [Self]);

    /// `y += factor · x`.
    fn add_scaled(factor: f32, x: &[Self], y: &mut [f32]);

    /// The first step of a word of two.
    #[inline(always)]
    fn first_of_word(self) -> f32 {
        f32::from_bits(self.widen().to_bits() >> 16)
    }

    /// Steps of a word.
    #[inline(always)]
    fn per_word() -> usize {
        if Self::NARROW && pairs() { 2 } else { 1 }
    }

    /// Whether products are made in tile registers.
    #[inline(always)]
    fn in_tiles() -> bool {
        Self::NARROW && tile_registers()
    }
}

impl Stored for f32 {
    const NARROW: bool = false;
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    fn store(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn wide<'s>(x: &'s [Self], _: &'s mut [f32]) -> &'s [f32] {
        x
    }

    fn words<'s>(x: &'s [Self], _: &'s mut [f32]) -> &'s [f32] {
        x
    }

    fn written(x: &mut [Self], _: &mut [f32], f: impl FnOnce(&mut [f32])) {
        f(x);
    }

    fn inner(a: &[Self], b: &[Self]) -> f32 {
        inner(a, b)
    }

    fn scale(factor: f32, x: &[Self], y: &mut [Self]) {
        scale(factor, x, y);
    }

    fn add_scaled(factor: f32, x: &[Self], y: &mut [f32]) {
        add_scaled(factor, x, y);
    }
}

impl Stored for bf16 {
    const NARROW: bool = true;
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn widen(self) -> f32 {
        from_bf16(self)
    }

    fn store(from: &[f32], to: &mut [Self]) {
        narrow(from, to);
    }

    fn wide<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32] {
        widen(x, room);
        room
    }

    fn words<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32] {
        if Self::per_word() == 1 {
            return Self::wide(x, room);
        }
        // SAFETY: two bf16 in order are the halves of a word, and any bits are an f32.
        if let ([], words, []) = unsafe { x.align_to::<f32>() } {
            return words;
        }
        room.iter_mut().enumerate().for_each(|(w, to)| *to = word(|s| x[s], w, x.len()));
        room
    }

    fn written(x: &mut [Self], room: &mut [f32], f: impl FnOnce(&mut [f32])) {
        f(room);
        narrow(room, x);
    }

    fn inner(a: &[Self], b: &[Self]) -> f32 {
        inner_narrow(a, b)
    }

    fn scale(factor: f32, x: &[Self], y: &mut [Self]) {
        scale_narrow(factor, x, y);
    }

    fn add_scaled(factor: f32, x: &[Self], y: &mut [f32]) {
        add_scaled_narrow(factor, x, y);
    }
}

/// bf16 with f32 as the other operand: widened wherever it is read, so that a product has the bits
/// of one of f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Widened(bf16);

impl Stored for Widened {
    const NARROW: bool = true;
    const ZERO: Self = Widened(bf16::ZERO);
    #[inline(always)]
    fn widen(self) -> f32 {
        from_bf16(self.0)
    }

    fn store(from: &[f32], to: &mut [Self]) {
        from.iter().zip(to).for_each(|(x, to)| *to = Widened(bf16::from_f32(*x)));
    }

    fn wide<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32] {
        x.iter().zip(room.iter_mut()).for_each(|(x, to)| *to = x.widen());
        room
    }

    fn words<'s>(x: &'s [Self], room: &'s mut [f32]) -> &'s [f32] {
        Self::wide(x, room)
    }

    fn written(x: &mut [Self], room: &mut [f32], f: impl FnOnce(&mut [f32])) {
        f(room);
        Self::store(room, x);
    }

    fn inner(a: &[Self], b: &[Self]) -> f32 {
        a.iter().zip(b).map(|(a, b)| a.widen() * b.widen()).sum()
    }

    fn scale(factor: f32, x: &[Self], y: &mut [Self]) {
        x.iter().zip(y).for_each(|(x, y)| *y = Widened(bf16::from_f32(factor * x.widen())));
    }

    fn add_scaled(factor: f32, x: &[Self], y: &mut [f32]) {
        x.iter().zip(y).for_each(|(x, y)| *y += factor * x.widen());
    }

    #[inline(always)]
    fn per_word() -> usize {
        1
    }

    #[inline(always)]
    fn in_tiles() -> bool {
        false
    }
}

/// Addresses of the elements of an operand, by line and by step along `k`. Its constructor's caller
/// vouches for all lines and steps that it is asked for.
#[derive(Clone, Copy)]
pub(crate) enum Side<T = f32> {
    /// `line · line_stride + step · step_stride`.
    Strided { start: Pointer<T>, line: usize, step: usize },
    /// Line `i` is row `order[i] / per`, its steps adjacent.
    GatheredLines { start: Pointer<T>, row: usize, order: Pointer<i32>, per: usize },
    /// Step `i` is in row `order[i] / per`, lines adjacent.
    GatheredSteps { start: Pointer<T>, row: usize, order: Pointer<i32>, per: usize },
}

impl<T: Stored> Side<T> {
    /// Whether lines are adjacent, step by step.
    fn by_steps(&self) -> bool {
        matches!(self, Side::Strided { line: 1, .. } | Side::GatheredSteps { .. })
    }

    /// Whether steps are adjacent, line by line.
    fn steps_are_adjacent(&self) -> bool {
        matches!(self, Side::Strided { step: 1, .. } | Side::GatheredLines { .. })
    }

    /// Whether it is the same operand as another, line by line.
    fn is<U: Stored>(&self, other: &Side<U>) -> bool {
        match (*self, *other) {
            (Side::Strided { start, line, step }, Side::Strided { start: s, line: l, step: t }) => {
                size_of::<T>() == size_of::<U>() && (start.get().addr(), line, step) == (s.get().addr(), l, t)
            }
            _ => false,
        }
    }

    /// The same operand from another line on.
    pub(crate) fn skip_lines(self, first: usize) -> Self {
        self.skip(first, 0)
    }

    /// The same operand from another step on.
    pub(crate) fn skip_steps(self, first: usize) -> Self {
        self.skip(0, first)
    }

    fn skip(self, lines: usize, steps: usize) -> Self {
        match self {
            Side::Strided { start, line, step } => {
                Side::Strided { start: start.add(lines * line + steps * step), line, step }
            }
            Side::GatheredLines { start, row, order, per } => {
                Side::GatheredLines { start: start.add(steps), row, order: order.add(lines), per }
            }
            Side::GatheredSteps { start, row, order, per } => {
                Side::GatheredSteps { start: start.add(lines), row, order: order.add(steps), per }
            }
        }
    }
}

/// A right operand of products whose left one is of type `L`.
pub(crate) trait RightOf<L: Stored>: Copy + Send + Sync {
    /// The same operand from another line on.
    fn skip_lines(self, first: usize) -> Self;

    /// Whether it is the same operand as a left one, line by line.
    fn is(&self, left: &Side<L>) -> bool;

    /// Whether a product with `scratch` floats of scratch is one of few rows.
    fn suits_few(&self, m: usize, k: usize, a: Side<L>, scratch: usize) -> bool;

    /// A whole product on the calling thread, see [`block`]; `c` is the result, how far its rows
    /// are apart, and whether it is added to.
    ///
    /// # Safety
    /// As for [`block`].
    unsafe fn block<C: Stored>(
        self,
        size: (usize, usize, usize),
        a: Side<L>,
        c: (Pointer<C>, usize, bool),
        scratch: &mut [f32],
    );
}

impl<L: Stored, R: Stored> RightOf<L> for Side<R> {
    fn skip_lines(self, first: usize) -> Self {
        self.skip(first, 0)
    }

    fn is(&self, left: &Side<L>) -> bool {
        left.is(self)
    }

    fn suits_few(&self, m: usize, k: usize, a: Side<L>, scratch: usize) -> bool {
        few::suits(m, k, a, *self, scratch)
    }

    unsafe fn block<C: Stored>(
        self,
        size: (usize, usize, usize),
        a: Side<L>,
        (c, stride, accumulate): (Pointer<C>, usize, bool),
        scratch: &mut [f32],
    ) {
        // SAFETY: the caller's.
        unsafe { block(size, a, self, c, stride, accumulate, scratch) }
    }
}

/// Matrices in one tensor, right operands of products whose left one is of type `L`.
pub(crate) trait Matrices<L: Stored>: Copy + Send + Sync {
    /// One of them.
    type Right: RightOf<L>;

    /// The matrix whose first element is number `at` of the tensor, with `line` numbers from line
    /// to line and `step` from step to step.
    fn matrix(self, at: usize, line: usize, step: usize) -> Self::Right;
}

impl<L: Stored, R: Stored> Matrices<L> for Pointer<R> {
    type Right = Side<R>;

    fn matrix(self, at: usize, line: usize, step: usize) -> Side<R> {
        Side::Strided { start: self.add(at), line, step }
    }
}

impl<'a> Matrices<f32> for packed::Numbers<'a> {
    type Right = packed::Lines<'a>;

    fn matrix(self, at: usize, line: usize, step: usize) -> packed::Lines<'a> {
        packed::Lines { numbers: self, at, line, step }
    }
}

/// Vectors of one instruction set, and the microkernel's height that suits its number of registers.
trait Vector: Copy {
    /// Whether [`Vector::store_narrow`] stores.
    const ROUNDS: bool = false;
    const LANES: usize;
    const ROWS: usize;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn fma(self, a: Self, b: Self) -> Self;
    unsafe fn plus(self, other: Self) -> Self;
    /// Rounds to bf16, where there is one instruction for it ([`rounds`]): more would cost the
    /// microkernel its registers.
    unsafe fn store_narrow(self, _: *mut bf16) {}
    /// The microkernel, where there is a better one than [`micro`] with the same bits.
    #[inline(always)]
    unsafe fn micro<A: LeftRows, const M: usize, const N: usize>(k: usize, a: A, b: *const f32, c: Results) {
        // SAFETY: the caller's.
        unsafe { micro::<Self, A, M, N>(k, a, b, c) }
    }
}

/// Whether the microkernel for such operands stores results that are rounded.
fn rounds<T: Stored>() -> bool {
    T::per_word() == 2
}

/// Four floats, for LLVM to make a vector of.
#[derive(Clone, Copy)]
struct Four([f32; 4]);

impl Vector for Four {
    const LANES: usize = 4;
    const ROWS: usize = 6;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Four(from.cast::<[f32; 4]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Four([x; 4])
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        Four(std::array::from_fn(|i| fma::<PORTABLE_FMA>(a.0[i], b.0[i], self.0[i])))
    }
    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        Four(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Vector;
    use half::bf16;
    use std::arch::x86_64::*;

    macro_rules! vector {
        ($name:ident, $ty:ty, $lanes:literal, $rows:literal, $load:ident, $store:ident, $splat:ident, $fma:ident, $add:ident) => {
            #[derive(Clone, Copy)]
            pub(super) struct $name(pub(super) $ty);

            impl Vector for $name {
                const LANES: usize = $lanes;
                const ROWS: usize = $rows;
                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    unsafe { $name($load(from)) }
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    unsafe { $store(to, self.0) }
                }
                #[inline(always)]
                unsafe fn splat(x: f32) -> Self {
                    unsafe { $name($splat(x)) }
                }
                #[inline(always)]
                unsafe fn fma(self, a: Self, b: Self) -> Self {
                    unsafe { $name($fma(a.0, b.0, self.0)) }
                }
                #[inline(always)]
                unsafe fn plus(self, other: Self) -> Self {
                    unsafe { $name($add(self.0, other.0)) }
                }
            }
        };
    }

    /// Sixteen sums of products of pairs of bf16.
    #[derive(Clone, Copy)]
    pub(super) struct Pairs(pub(super) __m512);

    impl Vector for Pairs {
        const ROUNDS: bool = true;
        const LANES: usize = 16;
        const ROWS: usize = 12;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Pairs(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { Pairs(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: all are 512 bits.
            unsafe {
                let pairs = |x: __m512| std::mem::transmute::<__m512, __m512bh>(x);
                Pairs(_mm512_dpbf16_ps(self.0, pairs(a.0), pairs(b.0)))
            }
        }
        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { Pairs(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn store_narrow(self, to: *mut bf16) {
            // SAFETY: `to` has room for 256 bits.
            unsafe {
                let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0));
                _mm256_storeu_si256(to.cast(), halves)
            }
        }
    }

    /// Packs lines that are adjacent into words of two steps, the first in the low half; what
    /// follows an odd last one is 0.
    ///
    /// # Safety
    /// The processor has AVX512-BF16; `step(s)` points to `count` elements for `s` below `steps`;
    /// `to` has `width` words for each two.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw")]
    pub(super) unsafe fn pack_steps(
        step: impl Fn(usize) -> *const bf16,
        count: usize,
        steps: usize,
        width: usize,
        to: *mut f32,
    ) {
        // Of the words of 32 lines, the first and the last 16; numbers from 32 on are of the second
        // operand.
        let first: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 32) as u16);
        let last = first.map(|i| i + 16);
        // SAFETY: masks leave only elements below `count`.
        unsafe {
            let [first, last] = [first, last].map(|order| _mm512_loadu_si512(order.as_ptr().cast()));
            for at in (0..count).step_by(32) {
                let mask = u32::MAX >> (32 - (count - at).min(32));
                for w in 0..steps.div_ceil(2) {
                    let half = |s: usize| _mm512_maskz_loadu_epi16(mask, step(s).add(at).cast());
                    let low = half(2 * w);
                    let high = if 2 * w + 1 < steps { half(2 * w + 1) } else { _mm512_setzero_si512() };
                    let to = to.add(w * width + at).cast();
                    _mm512_mask_storeu_epi32(to, mask as u16, _mm512_permutex2var_epi16(low, first, high));
                    if mask >> 16 != 0 {
                        let words = _mm512_permutex2var_epi16(low, last, high);
                        _mm512_mask_storeu_epi32(to.add(16), (mask >> 16) as u16, words);
                    }
                }
            }
        }
    }

    vector!(
        Eight,
        __m256,
        8,
        6,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_fmadd_ps,
        _mm256_add_ps
    );
    vector!(
        Sixteen,
        __m512,
        16,
        12,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_fmadd_ps,
        _mm512_add_ps
    );
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{LeftRows, Results, VECTORS, Vector, store};
    use crate::cpu::simd::neon::{dot, rounded, square};
    use half::bf16;
    use std::arch::aarch64::*;

    /// Four sums of products of pairs of bf16.
    #[derive(Clone, Copy)]
    pub(super) struct Pairs(pub(super) float32x4_t);

    impl Vector for Pairs {
        const ROUNDS: bool = true;
        const LANES: usize = 4;
        const ROWS: usize = 6;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Pairs(vld1q_f32(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { vst1q_f32(to, self.0) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { Pairs(vdupq_n_f32(x)) }
        }
        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            unsafe { Pairs(dot(self.0, a.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { Pairs(vaddq_f32(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn store_narrow(self, to: *mut bf16) {
            unsafe { vst1_u16(to.cast(), rounded(self.0)) }
        }
        #[inline(always)]
        unsafe fn micro<A: LeftRows, const M: usize, const N: usize>(
            k: usize,
            a: A,
            b: *const f32,
            c: Results,
        ) {
            // SAFETY: the caller's.
            unsafe {
                match M % 2 {
                    0 => squares::<A, M, N>(k, a, b, c),
                    _ => super::micro::<Self, A, M, N>(k, a, b, c),
                }
            }
        }
    }

    /// Four floats.
    #[derive(Clone, Copy)]
    pub(super) struct Quad(pub(super) float32x4_t);

    impl Vector for Quad {
        const LANES: usize = 4;
        const ROWS: usize = 6;
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { Quad(vld1q_f32(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { vst1q_f32(to, self.0) }
        }
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            unsafe { Quad(vdupq_n_f32(x)) }
        }
        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            unsafe { Quad(vfmaq_f32(self.0, a.0, b.0)) }
        }
        #[inline(always)]
        unsafe fn plus(self, other: Self) -> Self {
            unsafe { Quad(vaddq_f32(self.0, other.0)) }
        }
    }

    /// The microkernel with sums of two rows and two columns in a register, two words a step. One
    /// instruction does as much as two of [`dot`].
    ///
    /// # Safety
    /// As for [`super::micro`]; `M` is even.
    #[inline(always)]
    unsafe fn squares<A: LeftRows, const M: usize, const N: usize>(
        k: usize,
        a: A,
        mut b: *const f32,
        c: Results,
    ) {
        const LANES: usize = 4;
        // SAFETY: the caller's.
        unsafe {
            let zero = vdupq_n_f32(0.0);
            let mut sums = [[zero; 2 * VECTORS]; Pairs::ROWS / 2];
            macro_rules! add {
                ($step:expr, $second:expr, $left:ident) => {{
                    let mut right = [zero; 2 * VECTORS];
                    for j in 0..N {
                        let first = vld1q_f32(b.add(j * LANES));
                        let second = $second(j);
                        right[2 * j] = vzip1q_f32(first, second);
                        right[2 * j + 1] = vzip2q_f32(first, second);
                    }
                    for (i, sums) in sums.iter_mut().enumerate().take(M / 2) {
                        let left = a.$left(2 * i, $step);
                        for (sum, right) in sums.iter_mut().zip(right).take(2 * N) {
                            *sum = square(*sum, left, right);
                        }
                    }
                }};
            }
            for step in (0..k / 2 * 2).step_by(2) {
                add!(step, |j| vld1q_f32(b.add((VECTORS + j) * LANES)), square);
                b = b.add(2 * VECTORS * LANES);
            }
            if k % 2 == 1 {
                add!(k - 1, |_| zero, half_square);
            }
            let mut rows = [[Pairs(zero); N]; M];
            for (i, sums) in sums.iter().enumerate().take(M / 2) {
                for j in 0..N {
                    let [x, y] = [sums[2 * j], sums[2 * j + 1]].map(|x| vreinterpretq_f64_f32(x));
                    rows[2 * i][j] = Pairs(vreinterpretq_f32_f64(vzip1q_f64(x, y)));
                    rows[2 * i + 1][j] = Pairs(vreinterpretq_f32_f64(vzip2q_f64(x, y)));
                }
            }
            store(&rows, c);
        }
    }
}

/// Vectors side by side in the microkernel.
const VECTORS: usize = 2;
/// The largest microkernel of any instruction set, in floats.
const LARGEST: usize = 12 * 32;

/// Lines of a left and of a right panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// The shape of panels on this machine.
pub(crate) fn shape() -> Shape {
    fn of<V: Vector>() -> Shape {
        Shape { rows: V::ROWS, columns: VECTORS * V::LANES }
    }
    match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => of::<x86::Sixteen>(),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => of::<x86::Eight>(),
        Level::Portable => of::<Four>(),
    }
}

/// Floats of the panels of `lines` lines of `words` words.
pub(crate) fn panels(lines: usize, words: usize, width: usize) -> usize {
    lines.next_multiple_of(width) * words
}

/// Floats that a task of [`product`] or [`block`] needs for a tile of at most `rows` by `columns`.
pub(crate) fn block_scratch(rows: usize, columns: usize, steps: usize) -> usize {
    let s = shape();
    // Few rows are words from the first step to the last.
    let few = if rows <= FEW { rows * steps } else { 0 };
    let steps = steps.min(DEPTH);
    // The tile itself is there once more where it is stored as something else than f32.
    (rows * columns + left_words(rows, steps) + panels(columns, steps, s.columns)).max(few)
}

/// Floats of a left operand in panels or, lines next to one another, in one.
fn left_words(rows: usize, words: usize) -> usize {
    panels(rows, words, shape().rows).max(words * one_panel(rows))
}

/// The width of a panel of all lines: steps do not compete for the same places of the cache.
fn one_panel(lines: usize) -> usize {
    lines.next_multiple_of(16) | 16
}

/// Floats that a task of a product needs; weights whose storage is their own may be packed.
pub(crate) fn scratch(stored: bool, (m, n, k): (usize, usize, usize)) -> usize {
    if stored { packed::scratch(m, n, k) } else { product_scratch(m, n, k) }
}

/// Floats that a task of [`product`] needs.
pub(crate) fn product_scratch(m: usize, n: usize, k: usize) -> usize {
    block_scratch(m.min(TILE.0 + 12), n.min(TILE.1 + 32), k)
}

/// Copies lines into left panels.
pub(crate) fn pack_rows<T: Stored>(side: Side<T>, lines: usize, steps: usize, to: &mut [f32]) {
    pack(side, lines, steps, shape().rows, to);
}

/// Copies lines into right panels.
pub(crate) fn pack_columns<T: Stored>(side: Side<T>, lines: usize, steps: usize, to: &mut [f32]) {
    pack(side, lines, steps, shape().columns, to);
}

fn pack<T: Stored>(side: Side<T>, lines: usize, steps: usize, width: usize, to: &mut [f32]) {
    let words = steps.div_ceil(T::per_word());
    let to = &mut to[..panels(lines, words, width)];
    for (panel, to) in to.chunks_exact_mut((width * words).max(1)).enumerate() {
        let first = panel * width;
        let count = width.min(lines - first);
        // SAFETY: whoever made the side vouches for all lines below `lines` and steps below
        // `steps`; `to` has room for `width` lines of `words`.
        unsafe {
            match side {
                Side::Strided { start, line, step: 1 } => {
                    pack_lines(|i| start.get().add((first + i) * line), count, steps, width, to)
                }
                Side::Strided { start, line: 1, step } => {
                    pack_steps(|s| start.get().add(s * step + first), count, steps, width, to)
                }
                Side::Strided { start, line, step } => {
                    let at = |i: usize, s: usize| *start.get().add((first + i) * line + s * step);
                    for w in 0..words {
                        for i in 0..count {
                            to[w * width + i] = word(|s| at(i, s), w, steps);
                        }
                    }
                }
                Side::GatheredLines { start, row, order, per } => pack_lines(
                    |i| start.get().add(*order.get().add(first + i) as usize / per * row),
                    count,
                    steps,
                    width,
                    to,
                ),
                Side::GatheredSteps { start, row, order, per } => pack_steps(
                    |s| start.get().add(*order.get().add(s) as usize / per * row + first),
                    count,
                    steps,
                    width,
                    to,
                ),
            }
        }
    }
}

/// A word of a line; steps after the last are 0.
#[inline(always)]
fn word<T: Stored>(at: impl Fn(usize) -> T, word: usize, steps: usize) -> f32 {
    match T::per_word() {
        1 => at(word).widen(),
        _ => {
            let low = at(2 * word).first_of_word().to_bits();
            let high = if 2 * word + 1 < steps { at(2 * word + 1).widen().to_bits() } else { 0 };
            f32::from_bits(low | high)
        }
    }
}

/// Packs lines whose steps are adjacent: a transposition, four by four.
///
/// # Safety
/// `line(i)` points to `steps` elements for `i` below `count`; `to` has `width` words for each,
/// `count <= width`.
#[inline(always)]
unsafe fn pack_lines<T: Stored>(
    line: impl Fn(usize) -> *const T,
    count: usize,
    steps: usize,
    width: usize,
    to: &mut [f32],
) {
    let words = steps.div_ceil(T::per_word());
    debug_assert!(count <= width && to.len() >= width * words);
    if count == width && width == shape().columns {
        let mut lines = [std::ptr::null(); few::PANEL];
        lines.iter_mut().enumerate().take(width).for_each(|(i, to)| *to = line(i).cast());
        // SAFETY: the caller's; a panel of columns is whole vectors wide.
        return unsafe { few::panel::<T>(&lines[..width], steps, to.as_mut_ptr()) };
    }
    // Words in the layout of panels already.
    let whole = match (T::NARROW, T::per_word()) {
        (false, _) => steps,
        (true, 2) => steps / 2,
        (true, _) => 0,
    };
    let to = to.as_mut_ptr();
    let mut i = 0;
    while i + 4 <= count {
        let from = [line(i), line(i + 1), line(i + 2), line(i + 3)].map(|f| f.cast::<f32>());
        let mut s = 0;
        while s + 4 <= whole {
            // SAFETY: four lines from `i`, four words from `s`, as the conditions of the loops say.
            unsafe { transpose(from.map(|f| f.add(s)), to.add(s * width + i), width) };
            s += 4;
        }
        while s < whole {
            for (j, from) in from.iter().enumerate() {
                // SAFETY: likewise. A word of bf16 may be at any even address.
                unsafe { *to.add(s * width + i + j) = from.add(s).read_unaligned() };
            }
            s += 1;
        }
        i += 4;
    }
    for i in 0..count {
        let from = line(i);
        let first = if i < count / 4 * 4 { whole } else { 0 };
        for w in first..words {
            // SAFETY: `i < count`, and `word` asks for steps below `steps`.
            unsafe { *to.add(w * width + i) = word(|s| *from.add(s), w, steps) };
        }
    }
}

/// Four lines of four become four steps of four, `width` apart.
///
/// # Safety
/// All are in bounds.
#[inline(always)]
unsafe fn transpose(from: [*const f32; 4], to: *mut f32, width: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture; bounds are the caller's.
    unsafe {
        use std::arch::x86_64::*;
        let [mut a, mut b, mut c, mut d] = from.map(|f| _mm_loadu_ps(f));
        _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
        for (i, row) in [a, b, c, d].into_iter().enumerate() {
            _mm_storeu_ps(to.add(i * width), row);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: bounds are the caller's.
    unsafe {
        let rows = from.map(|f| f.cast::<[f32; 4]>().read_unaligned());
        for i in 0..4 {
            to.add(i * width).cast::<[f32; 4]>().write_unaligned(rows.map(|r| r[i]));
        }
    }
}

/// Packs lines that are adjacent: copies, or pairs of two steps.
///
/// # Safety
/// `step(s)` points to `count` elements for `s` below `steps`; `to` has `width` words for each,
/// `count <= width`.
#[inline(always)]
unsafe fn pack_steps<T: Stored>(
    step: impl Fn(usize) -> *const T,
    count: usize,
    steps: usize,
    width: usize,
    to: &mut [f32],
) {
    #[inline(always)]
    unsafe fn copy<T: Stored>(
        step: impl Fn(usize) -> *const T,
        count: usize,
        steps: usize,
        width: usize,
        to: *mut f32,
    ) {
        if !T::NARROW {
            for s in 0..steps {
                // SAFETY: the caller's; elements are f32.
                unsafe { std::ptr::copy_nonoverlapping(step(s).cast(), to.add(s * width), count) };
            }
            return;
        }
        for s in 0..steps {
            // SAFETY: the caller's; `to` has `width` floats from here on.
            unsafe {
                let to = std::slice::from_raw_parts_mut(to.add(s * width), count);
                let from = std::slice::from_raw_parts(step(s), count);
                to.iter_mut().zip(from).for_each(|(to, x)| *to = x.widen());
            }
        }
    }
    debug_assert!(count <= width && to.len() >= width * steps.div_ceil(T::per_word()));
    let to = to.as_mut_ptr();
    #[cfg(target_arch = "x86_64")]
    if T::per_word() == 2 {
        // SAFETY: the caller's; elements are bf16, and the processor multiplies pairs of them.
        return unsafe { x86::pack_steps(|s| step(s).cast(), count, steps, width, to) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    if T::per_word() == 2 {
        for w in 0..steps.div_ceil(2) {
            // SAFETY: the caller's; `to` has `width` words from here on.
            let (to, low) = unsafe {
                (
                    std::slice::from_raw_parts_mut(to.add(w * width), count),
                    std::slice::from_raw_parts(step(2 * w), count),
                )
            };
            if 2 * w + 1 == steps {
                to.iter_mut().zip(low).for_each(|(to, low)| *to = low.first_of_word());
                continue;
            }
            // SAFETY: likewise.
            let high = unsafe { std::slice::from_raw_parts(step(2 * w + 1), count) };
            for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
                *to = f32::from_bits(low.first_of_word().to_bits() | high.widen().to_bits());
            }
        }
        return;
    }
    // SAFETY: the caller's. Copies of a constant size need no call.
    unsafe {
        match count {
            6 => copy(step, 6, steps, width, to),
            8 => copy(step, 8, steps, width, to),
            12 => copy(step, 12, steps, width, to),
            16 => copy(step, 16, steps, width, to),
            32 => copy(step, 32, steps, width, to),
            _ => copy(step, count, steps, width, to),
        }
    }
}

/// The left operand of a tile: panels, or lines read in place. The microkernel broadcasts its
/// elements one by one, so lines whose steps are adjacent need no packing.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    Panels(&'a [f32]),
    /// The first step of each line, its steps adjacent.
    Lines(&'a [Pointer<f32>]),
    /// The first line, lines adjacent, and the floats from step to step.
    Steps(Pointer<f32>, usize),
}

/// Most lines of [`Lines`]: those of the largest tile.
const MOST_LINES: usize = TILE.0 + 12;

/// Room for where the words of lines begin, on the stack.
pub(crate) struct Lines([Pointer<f32>; MOST_LINES]);

impl Lines {
    pub(crate) fn room() -> Self {
        Lines([Pointer::to(&mut []); MOST_LINES])
    }

    /// Takes the lines of an operand whose steps are adjacent, so that their words can be read in
    /// place; not where they are better packed: they are no words, too many lines, or lines so far
    /// apart that all of a panel compete for the same few places of the cache (tiles copy what they
    /// need of these). Says whether it did.
    fn fill<T: Stored>(&mut self, side: Side<T>, count: usize, steps: usize) -> bool {
        let per_word = T::per_word();
        if count > MOST_LINES || (T::NARROW && per_word == 1) || !steps.is_multiple_of(per_word) {
            return false;
        }
        let words = |start: Pointer<T>, line: usize| {
            let aligned = start.get().cast::<f32>().is_aligned() && line.is_multiple_of(per_word);
            (aligned && (T::in_tiles() || !(line / per_word).is_multiple_of(1024)))
                .then(|| Pointer::<f32>(start.get_mut().cast()))
        };
        let lines = self.0[..count].iter_mut().enumerate();
        match side {
            Side::Strided { start, line, step: 1 } => {
                let Some(start) = words(start, line) else { return false };
                lines.for_each(|(i, to)| *to = start.add(i * (line / per_word)));
            }
            Side::GatheredLines { start, row, order, per } => {
                let Some(start) = words(start, row) else { return false };
                for (i, to) in lines {
                    // SAFETY: whoever made the side vouches for its order.
                    *to = start.add(unsafe { *order.get().add(i) } as usize / per * (row / per_word));
                }
            }
            _ => return false,
        }
        true
    }

    /// Moves on along the first lines.
    fn advance(&mut self, words: usize, count: usize) {
        self.0[..count].iter_mut().for_each(|line| *line = line.add(words));
    }

    fn left(&self, count: usize) -> Left<'_> {
        Left::Lines(&self.0[..count])
    }
}

/// Rows of the left operand of one microkernel.
trait LeftRows: Copy {
    /// Element of a row at a step.
    unsafe fn at(&self, row: usize, step: usize) -> f32;
    /// Two steps of each of two rows, row by row.
    #[cfg(target_arch = "aarch64")]
    unsafe fn square(&self, row: usize, step: usize) -> std::arch::aarch64::float32x4_t;
    /// The same with zeros for the second step.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn half_square(&self, row: usize, step: usize) -> std::arch::aarch64::float32x4_t {
        // SAFETY: the caller's.
        unsafe {
            let both = [self.at(row, step), 0.0, self.at(row + 1, step), 0.0];
            std::arch::aarch64::vld1q_f32(both.as_ptr())
        }
    }
}

/// The left operand of a tile, read in place where that is as good as packing it.
pub(crate) fn left<'s, T: Stored>(
    lines: &'s mut Lines,
    side: Side<T>,
    count: usize,
    steps: usize,
    scratch: &'s mut [f32],
) -> Left<'s> {
    if lines.fill(side, count, steps) {
        return lines.left(count);
    }
    pack_rows(side, count, steps, scratch);
    Left::Panels(scratch)
}

/// Rows that are adjacent.
#[derive(Clone, Copy)]
struct AdjacentRows {
    start: *const f32,
    step: usize,
}

impl LeftRows for AdjacentRows {
    #[inline(always)]
    unsafe fn at(&self, row: usize, step: usize) -> f32 {
        // SAFETY: the operand has the row and the step, says the caller.
        unsafe { *self.start.add(step * self.step + row) }
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn square(&self, row: usize, step: usize) -> std::arch::aarch64::float32x4_t {
        use std::arch::aarch64::*;
        // SAFETY: likewise of two rows and two steps.
        unsafe {
            let [first, second] = [step, step + 1].map(|s| vld1_f32(self.start.add(s * self.step + row)));
            vcombine_f32(vzip1_f32(first, second), vzip2_f32(first, second))
        }
    }
}

impl<const M: usize> LeftRows for [*const f32; M] {
    #[inline(always)]
    unsafe fn at(&self, row: usize, step: usize) -> f32 {
        // SAFETY: likewise.
        unsafe { *self[row].add(step) }
    }
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn square(&self, row: usize, step: usize) -> std::arch::aarch64::float32x4_t {
        use std::arch::aarch64::*;
        // SAFETY: likewise of two rows and two steps.
        unsafe { vcombine_f32(vld1_f32(self[row].add(step)), vld1_f32(self[row + 1].add(step))) }
    }
}

/// The right operand of a tile: packed panels, or some of the steps of each.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    panels: &'a [f32],
    /// Words from panel to panel.
    stride: usize,
}

impl<'a> Right<'a> {
    /// Panels of `steps` steps.
    pub(crate) fn new<T: Stored>(panels: &'a [f32], steps: usize) -> Self {
        Right { panels, stride: steps.div_ceil(T::per_word()) * shape().columns }
    }

    /// Panels `stride` words apart.
    pub(crate) fn apart(panels: &'a [f32], stride: usize) -> Self {
        Right { panels, stride }
    }

    /// The same from a step on, the first of a word.
    pub(crate) fn from<T: Stored>(self, step: usize) -> Self {
        debug_assert!(step.is_multiple_of(T::per_word()));
        Right { panels: &self.panels[step / T::per_word() * shape().columns..], ..self }
    }
}

/// Where the results of a tile go.
#[derive(Clone, Copy)]
struct Results {
    /// Sums, rows `stride` apart.
    sums: *mut f32,
    stride: usize,
    /// Whether there are sums already, to be added to.
    accumulate: bool,
    /// Where the sums, once complete, go instead, rounded, and how far rows are apart; only where
    /// the microkernel [`rounds`].
    rounded: Option<(*mut bf16, usize)>,
}

impl Results {
    /// The same from an element on.
    ///
    /// # Safety
    /// There is such an element.
    #[inline(always)]
    unsafe fn at(self, row: usize, column: usize) -> Self {
        // SAFETY: the caller's; without sums to begin with, `sums` is not looked at.
        let rounded = self.rounded.map(|(to, stride)| (unsafe { to.add(row * stride + column) }, stride));
        Results { sums: self.sums.wrapping_add(row * self.stride + column), rounded, ..self }
    }
}

/// `c[m, n] = a · b` for `k` steps, or `c += a · b`. Rows of `c` are `stride` apart.
///
/// # Safety
/// `c` is `m` rows of `n` floats that nothing else refers to; lines of `a` have `k` steps.
pub(crate) unsafe fn tile<T: Stored>(
    size: (usize, usize, usize),
    a: Left,
    b: Right,
    c: Pointer<f32>,
    stride: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's.
    unsafe { tile_into::<T>(size, a, b, Results { sums: c.get_mut(), stride, accumulate, rounded: None }) }
}

/// The same with results that may be rounded.
///
/// # Safety
/// As for [`tile`], of what of the results is written and read.
unsafe fn tile_into<T: Stored>((m, n, k): (usize, usize, usize), a: Left, b: Right, c: Results) {
    let s = shape();
    let k = k.div_ceil(T::per_word());
    let enough = match a {
        Left::Panels(a) => a.len() >= panels(m, k, s.rows),
        Left::Lines(a) => a.len() >= m,
        Left::Steps(..) => true,
    };
    let last = (n.div_ceil(s.columns).max(1) - 1) * b.stride;
    assert!(enough && b.panels.len() >= last + if n > 0 { k * s.columns } else { 0 });
    let run = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if T::in_tiles() => amx::tile,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 if T::per_word() == 2 => tile_pairs,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => tile_avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => tile_avx2,
        #[cfg(target_arch = "aarch64")]
        Level::Portable if T::per_word() == 2 => tile_pairs,
        Level::Portable => tile_of::<Four, 6>,
    };
    // SAFETY: the operands were measured above, `c` and the lines are the caller's.
    unsafe { run((m, n, k), a, (b.panels.as_ptr(), b.stride), c) }
}

type Size = (usize, usize, usize);
/// The first panel, and the words from panel to panel.
type Panels = (*const f32, usize);

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
unsafe fn tile_avx512(size: Size, a: Left, b: Panels, c: Results) {
    // SAFETY: the caller's.
    unsafe { tile_of::<x86::Sixteen, 12>(size, a, b, c) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx512bf16,avx2,fma")]
unsafe fn tile_pairs(size: Size, a: Left, b: Panels, c: Results) {
    // SAFETY: the caller's.
    unsafe { tile_of::<x86::Pairs, 12>(size, a, b, c) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2(size: Size, a: Left, b: Panels, c: Results) {
    // SAFETY: the caller's.
    unsafe { tile_of::<x86::Eight, 6>(size, a, b, c) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,bf16")]
unsafe fn tile_pairs(size: Size, a: Left, b: Panels, c: Results) {
    // SAFETY: the caller's.
    unsafe { tile_of::<neon::Pairs, 6>(size, a, b, c) }
}

/// # Safety
/// `a` and `b` have `m` and `n` lines, `c` is `m` rows of `n` floats, the processor has the
/// vectors, and `ROWS` is theirs.
#[inline(always)]
unsafe fn tile_of<V: Vector, const ROWS: usize>((m, n, k): Size, a: Left, (b, panel): Panels, c: Results) {
    let width = VECTORS * V::LANES;
    // A panel of columns stays in the first-level cache while the panels of rows pass by.
    for j in (0..n).step_by(width) {
        let columns = width.min(n - j);
        for i in (0..m).step_by(ROWS) {
            let rows = ROWS.min(m - i);
            // SAFETY: panels are in order, left ones `ROWS · k` long; the tile of `c` is `rows` by
            // `columns`.
            unsafe {
                let (b, c) = (b.add(j / width * panel), c.at(i, j));
                if columns == width {
                    micro_rows::<V, ROWS, VECTORS>(rows, k, a, i, b, c);
                    continue;
                }
                // The microkernel knows whole vectors only, so the last columns take a detour.
                let mut edge = [0.0; LARGEST];
                let sums = edge.as_mut_ptr();
                let detour = Results { sums, stride: width, accumulate: false, rounded: None };
                if columns <= V::LANES {
                    micro_rows::<V, ROWS, 1>(rows, k, a, i, b, detour);
                } else {
                    micro_rows::<V, ROWS, VECTORS>(rows, k, a, i, b, detour);
                }
                for (r, edge) in edge.chunks_exact_mut(width).enumerate().take(rows) {
                    let (edge, c) = (&mut edge[..columns], c.at(r, 0));
                    if c.accumulate {
                        edge.iter_mut().enumerate().for_each(|(j, x)| *x += *c.sums.add(j));
                    }
                    match c.rounded {
                        Some((to, _)) => narrow(edge, std::slice::from_raw_parts_mut(to, columns)),
                        None => std::ptr::copy_nonoverlapping(edge.as_ptr(), c.sums, columns),
                    }
                }
            }
        }
    }
}

/// Microkernels for some rows, at most `ROWS`: one of the full height, or a few lower ones. There
/// are few heights, because each is code for every instruction set.
///
/// # Safety
/// As for [`micro`], from row `first` of the left operand on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn micro_rows<V: Vector, const ROWS: usize, const N: usize>(
    rows: usize,
    k: usize,
    a: Left,
    first: usize,
    b: *const f32,
    c: Results,
) {
    let mut row = 0;
    macro_rules! of {
        ($($m:literal)*) => {$(
            while ($m == ROWS || ($m < ROWS && $m != 6)) && rows - row >= $m {
                // SAFETY: the caller's: `$m` rows from `first + row` on.
                unsafe {
                    let c = c.at(row, 0);
                    let adjacent = match a {
                        Left::Lines(a) => {
                            let at = |i: usize| a.get_unchecked(first + row + i).get();
                            let a: [*const f32; $m] = std::array::from_fn(at);
                            V::micro::<_, $m, N>(k, a, b, c);
                            row += $m;
                            continue;
                        }
                        Left::Panels(a) => AdjacentRows { start: a.as_ptr().add(first * k + row), step: ROWS },
                        Left::Steps(start, step) => AdjacentRows { start: start.add(first + row).get(), step },
                    };
                    V::micro::<_, $m, N>(k, adjacent, b, c);
                }
                row += $m;
            }
        )*};
    }
    of!(12 8 6 4 2 1);
}

/// Asks for a line of the cache that will be read and written.
#[inline(always)]
fn prefetch(_line: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture, and the instruction reads nothing that a program
    // could see.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T0>(_line.cast());
    }
}

/// `M` rows of `N` vectors of the result.
///
/// # Safety
/// `a` holds `M` rows of `k` steps, `b` `k` steps of `VECTORS` vectors, `c` `M` rows of `N`
/// vectors.
#[inline(always)]
unsafe fn micro<V: Vector, A: LeftRows, const M: usize, const N: usize>(
    k: usize,
    a: A,
    mut b: *const f32,
    c: Results,
) {
    // SAFETY: the caller's.
    unsafe {
        if c.accumulate {
            // Sums of gradients come from far away: they are on their way while the products are
            // made.
            for i in 0..M {
                for j in 0..N {
                    prefetch(c.sums.wrapping_add(i * c.stride + j * V::LANES));
                }
            }
        }
        let mut sums = [[V::splat(0.0); N]; M];
        for step in 0..k {
            let mut right = [V::splat(0.0); N];
            for (j, right) in right.iter_mut().enumerate() {
                *right = V::load(b.add(j * V::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let left = V::splat(a.at(i, step));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = sum.fma(left, right);
                }
            }
            b = b.add(VECTORS * V::LANES);
        }
        store(&sums, c);
    }
}

/// Stores what a microkernel computed, or adds it to what is there.
///
/// # Safety
/// `c` holds `M` rows of `N` vectors.
#[inline(always)]
unsafe fn store<V: Vector, const M: usize, const N: usize>(sums: &[[V; N]; M], c: Results) {
    // SAFETY: the caller's.
    unsafe {
        macro_rules! each {
            (|$i:ident, $j:ident, $sum:ident| $body:expr) => {
                for ($i, sums) in sums.iter().enumerate() {
                    for (j, $sum) in sums.iter().enumerate() {
                        let $j = j * V::LANES;
                        $body
                    }
                }
            };
        }
        // Conditions that all sums share are tested once: they stay in registers.
        let Results { sums: wide, stride, accumulate, rounded } = c;
        match (rounded.filter(|_| V::ROUNDS), accumulate) {
            (None, false) => each!(|i, j, sum| sum.store(wide.add(i * stride + j))),
            (None, true) => each!(|i, j, sum| {
                let to = wide.add(i * stride + j);
                V::load(to).plus(*sum).store(to)
            }),
            (Some((to, line)), false) => each!(|i, j, sum| sum.store_narrow(to.add(i * line + j))),
            (Some((to, line)), true) => each!(|i, j, sum| {
                V::load(wide.add(i * stride + j)).plus(*sum).store_narrow(to.add(i * line + j))
            }),
        }
    }
}

/// A whole product on the calling thread, `scratch` as [`block_scratch`] says.
///
/// # Safety
/// `c` is `m` rows of `n` elements that nothing else refers to.
pub(crate) unsafe fn block<L: Stored, R: Stored, C: Stored>(
    (m, n, k): (usize, usize, usize),
    a: Side<L>,
    b: Side<R>,
    c: Pointer<C>,
    stride: usize,
    accumulate: bool,
    scratch: &mut [f32],
) {
    // SAFETY: the caller's.
    if unsafe { few::few((m, n, k), a, b, (c, stride, accumulate), scratch) } {
        return;
    }
    let to = c.get_mut();
    if !C::NARROW {
        let c = Results { sums: to.cast(), stride, accumulate, rounded: None };
        // SAFETY: the caller's; `C` is f32.
        return unsafe { block_into((m, n, k), a, b, c, scratch) };
    }
    let (wide, scratch) = scratch.split_at_mut(m * n);
    if accumulate {
        for (i, wide) in wide.chunks_exact_mut(n.max(1)).enumerate() {
            // SAFETY: row `i` of `c`.
            C::wide(unsafe { std::slice::from_raw_parts(to.add(i * stride), n) }, wide);
        }
    }
    let rounded = rounds::<L>().then_some((to.cast(), stride));
    let sums = Results { sums: wide.as_mut_ptr(), stride: n, accumulate, rounded };
    // SAFETY: the caller's; `C` is bf16, and `wide` has `m` rows of `n` floats.
    unsafe { block_into((m, n, k), a, b, sums, scratch) };
    if rounded.is_none() {
        for (i, wide) in wide.chunks_exact(n.max(1)).enumerate() {
            // SAFETY: row `i` of `c`.
            C::store(wide, unsafe { std::slice::from_raw_parts_mut(to.add(i * stride), n) });
        }
    }
}

/// The same, results rounded after the last step.
///
/// # Safety
/// As for [`block`].
unsafe fn block_into<L: Stored, R: Stored>(
    (m, n, k): (usize, usize, usize),
    a: Side<L>,
    b: Side<R>,
    c: Results,
    scratch: &mut [f32],
) {
    let per_word = L::per_word();
    debug_assert_eq!(per_word, R::per_word(), "steps of both sides are words alike");
    let (left, right) = scratch.split_at_mut(left_words(m, k.div_ceil(per_word).min(DEPTH)));
    let mut lines = Lines::room();
    let in_place = lines.fill(a, m, k);
    let most = DEPTH * per_word;
    // Without a single step the sums are 0, or what they were.
    for first in (0..k.max(1)).step_by(most) {
        let steps = most.min(k - first);
        pack_columns(b.skip_steps(first), n, steps, right);
        let left = if in_place {
            if first > 0 {
                lines.advance(DEPTH, m);
            }
            lines.left(m)
        } else if a.by_steps() {
            pack(a.skip_steps(first), m, steps, one_panel(m), left);
            Left::Steps(Pointer::to(left), one_panel(m))
        } else {
            pack_rows(a.skip_steps(first), m, steps, left);
            Left::Panels(left)
        };
        let rounded = c.rounded.filter(|_| first + steps == k);
        let c = Results { accumulate: c.accumulate || first > 0, rounded, ..c };
        // SAFETY: the caller's.
        unsafe { tile_into::<L>((m, n, steps), left, Right::new::<L>(right, steps), c) };
    }
}

/// Cuts `n` into equal pieces of at most `most`, multiples of `unit`; returns their length.
pub(crate) fn piece(n: usize, most: usize, unit: usize) -> usize {
    let pieces = n.div_ceil(most).max(1);
    n.div_ceil(pieces).next_multiple_of(unit).max(unit)
}

/// Most rows of a tile of a product with `m` rows and sums over `k`: the right operand is packed
/// once for a tile.
pub(crate) fn most_rows<T: Stored>(m: usize, k: usize) -> usize {
    if k > DEPTH * T::per_word() { ROWS_OF_LONG_SUMS } else { (m / 8).clamp(ROWS_OF_LONG_SUMS, TILE.0) }
}

/// The number whose multiples are best for the rows of a task.
pub(crate) fn unit_of_rows<T: Stored>() -> usize {
    #[cfg(target_arch = "x86_64")]
    if T::in_tiles() {
        return amx::SQUARE;
    }
    shape().rows
}

/// The tiles that `copies` results of `m` by `n` are cut into: as large as they may be, but small
/// results with long sums are cut finer, to have something for every thread.
pub(crate) fn tiles<T: Stored>((m, n, k): (usize, usize, usize), copies: usize) -> (usize, usize) {
    let s = Shape { rows: unit_of_rows::<T>(), ..shape() };
    let (mut rows, mut columns) = (piece(m, most_rows::<T>(m, k), s.rows), piece(n, TILE.1, s.columns));
    while copies * m.div_ceil(rows) * n.div_ceil(columns) < 8 && rows * columns * k > 1 << 20 {
        if rows > columns && rows > 4 * s.rows {
            rows = piece(rows, rows / 2, s.rows);
        } else if columns > 2 * s.columns {
            columns = piece(columns, columns / 2, s.columns);
        } else {
            break;
        }
    }
    (rows, columns)
}

/// `c = a · b` or `c += a · b` on all threads.
///
/// # Safety
/// `c` is `m` rows of `n` elements, `stride` apart, that nothing else refers to.
pub(crate) unsafe fn product<L: Stored, R: RightOf<L>, C: Stored>(
    cx: &Context,
    (m, n, k): (usize, usize, usize),
    a: Side<L>,
    b: R,
    c: Pointer<C>,
    stride: usize,
    accumulate: bool,
) {
    let few = b.suits_few(m, k, a, cx.local_len);
    if !few && !accumulate && m == n && b.is(&a) {
        // SAFETY: the caller's.
        return unsafe { square(cx, n, k, a, c, stride) };
    }
    let (rows, columns) = match few {
        true => (FEW, few::columns_of_task(n, cx.pool.threads())),
        false => tiles::<L>((m, n, k), 1),
    };
    let across = n.div_ceil(columns);
    cx.parallel(m.div_ceil(rows) * across, |task, scratch| {
        let (i, j) = (task / across * rows, task % across * columns);
        let size = (rows.min(m - i), columns.min(n - j), k);
        // SAFETY: tasks have disjoint tiles of `c`.
        unsafe {
            let c = (c.add(i * stride + j), stride, accumulate);
            b.skip_lines(j).block(size, a.skip_lines(i), c, scratch)
        };
    });
}

/// Most rows of a task of [`square`].
const ROWS_OF_SQUARE: usize = 96;

/// `c = a · aᵀ` on all threads: what is right of a diagonal of squares, and those, is computed, and
/// has the bits of what it is mirrored to, since factors may change places and sums keep their
/// order.
///
/// # Safety
/// `c` is `n` rows of `n` elements, `stride` apart, that nothing else refers to.
unsafe fn square<T: Stored, C: Stored>(
    cx: &Context,
    n: usize,
    k: usize,
    a: Side<T>,
    c: Pointer<C>,
    stride: usize,
) {
    let rows = piece(n, (n / 4).min(ROWS_OF_SQUARE), unit_of_rows::<T>());
    cx.parallel(n.div_ceil(rows), |task, scratch| {
        let (first, end) = (task * rows, ((task + 1) * rows).min(n));
        let (from, at) = (a.skip_lines(first), |i: usize, j: usize| c.add(i * stride + j));
        // SAFETY: tasks have disjoint rows of `c` from the diagonal on, and write below it only to
        // columns that are their rows.
        unsafe {
            let columns = piece(n - first, TILE.1, shape().columns);
            for j in (first..n).step_by(columns) {
                let size = (end - first, columns.min(n - j), k);
                block(size, from, a.skip_lines(j), at(first, j), stride, false, scratch);
            }
            for i in (end..n).step_by(MIRRORED) {
                for j in first..end {
                    for i in i..(i + MIRRORED).min(n) {
                        *at(i, j).get_mut() = *at(j, i).get();
                    }
                }
            }
        }
    });
}

/// Rows of a result that are mirrored together: their lines stay in the first cache.
const MIRRORED: usize = 16;

/// `c = a · b` for some of the rows of `c`, whose numbers `order` lists in increasing order; `a`
/// has as many lines.
///
/// # Safety
/// `c` is rows of `n` floats that nothing else refers to, one of each number.
pub(crate) unsafe fn product_of_some<L: Stored, R: RightOf<L>, C: Stored>(
    cx: &Context,
    (m, n, k): (usize, usize, usize),
    a: Side<L>,
    b: R,
    c: Pointer<C>,
    order: &[i32],
) {
    // SAFETY: the first `m` rows of `c`.
    unsafe { product(cx, (m, n, k), a, b, c, n, false) };
    // Rows move to where they belong, the last first: each is at or after its place among those
    // that are needed.
    for (i, &row) in order.iter().enumerate().rev().filter(|(i, row)| *i != **row as usize) {
        // SAFETY: both are rows of `c`, and not the same one.
        unsafe { std::ptr::copy_nonoverlapping(c.add(i * n).get(), c.add(row as usize * n).get_mut(), n) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Pointer;

    /// All layouts and all edges of the microkernel. Sums of small integers are exact.
    #[test]
    fn tiles_of_every_size() {
        tiles_of(|x| x, |x| x);
    }

    #[test]
    fn tiles_of_bf16() {
        tiles_of(bf16::from_f32, bf16::from_f32);
    }

    #[test]
    fn tiles_of_weights_in_bf16() {
        tiles_of(|x| x, |x| Widened(bf16::from_f32(x)));
    }

    fn tiles_of<L: Stored, R: Stored>(left: fn(f32) -> L, right: fn(f32) -> R) {
        let value = |i: usize| ((i * 37 + 11) % 23) as f32 - 11.0;
        for (m, n, k) in [
            (1, 1, 1),
            (12, 32, 5),
            (13, 33, 7),
            (25, 70, 4),
            (5, 16, 301),
            (30, 17, 3),
            (7, 100, 0),
            (9, 40, 600),
        ] {
            let mut a: Vec<L> = (0..m * k).map(|i| left(value(i))).collect();
            let mut b: Vec<R> = (0..k * n).map(|i| right(value(i + 5))).collect();
            for transposed in [false, true] {
                let ways = |lines: usize, adjacent: bool| if adjacent { (k, 1) } else { (1, lines) };
                let ((line, step), start) = (ways(m, !transposed), Pointer::to(&mut a));
                let sa = Side::Strided { start, line, step };
                let ((line, step), start) = (ways(n, transposed), Pointer::to(&mut b));
                let sb = Side::Strided { start, line, step };
                let mut c = vec![1.0f32; m * (n + 3)];
                let mut scratch = vec![0.0; block_scratch(m, n, k)];
                let pointer = Pointer::to(&mut c);
                unsafe { block((m, n, k), sa, sb, pointer, n + 3, true, &mut scratch) };
                for i in 0..m {
                    for j in 0..n {
                        let a =
                            |s: usize| if transposed { a[s * m + i].widen() } else { a[i * k + s].widen() };
                        let b =
                            |s: usize| if transposed { b[j * k + s].widen() } else { b[s * n + j].widen() };
                        let sum: f32 = 1.0 + (0..k).map(|s| a(s) * b(s)).sum::<f32>();
                        assert_eq!(c[i * (n + 3) + j], sum, "{m} {n} {k} at {i} {j}");
                    }
                    assert!(c[i * (n + 3) + n..(i + 1) * (n + 3)].iter().all(|&x| x == 1.0));
                }
            }
        }
    }
}
