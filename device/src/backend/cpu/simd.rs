//! Inner loops for the processor at hand.
//!
//! [`kernel_fn!`] compiles a function once for every instruction set worth having and picks one
//! when it runs, so one binary serves every machine of an architecture. Bodies are plain loops over
//! slices that LLVM vectorises; what it cannot vectorise, calls of the mathematical library and
//! reductions whose order it may not change, is written here so that it can: polynomials, and sums
//! over 16 interleaved accumulators.
//!
//! *Promise*: functions of one number are within 2 units in the last place of f32 (4 for `log` next
//! to 1); they give the same bits at every position of a slice.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;

use std::sync::LazyLock;

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The instructions that every processor of the architecture has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The AVX-512 of Skylake and later.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Level::Portable => "neon",
            #[cfg(not(target_arch = "aarch64"))]
            Level::Portable => "portable",
        }
    }
}

/// See [`level`].
pub(crate) const VARIABLE: &str = "DREAMC_CPU";

/// The best instruction set of this machine, or the one that the environment variable `DREAMC_CPU`
/// asks for (`portable`, `avx2`, `avx512`, and `bf16`, which is without tiles only), which is there
/// to test the others.
#[inline]
pub(crate) fn level() -> Level {
    static LEVEL: LazyLock<Level> = LazyLock::new(|| {
        let wanted = std::env::var(VARIABLE).unwrap_or_default();
        if wanted == "portable" {
            return Level::Portable;
        }
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2
                && wanted != "avx2"
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
            {
                return Level::Avx512;
            }
            if avx2 {
                return Level::Avx2;
            }
        }
        Level::Portable
    });
    *LEVEL
}

/// Whether the processor multiplies and adds pairs of bf16. `DREAMC_CPU=avx512` says that it does
/// not, and so does `portable`.
#[inline]
pub(crate) fn pairs() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        static PAIRS: LazyLock<bool> = LazyLock::new(|| {
            let wanted = std::env::var(VARIABLE).unwrap_or_default();
            #[cfg(target_arch = "x86_64")]
            return level() == Level::Avx512 && wanted != "avx512" && is_x86_feature_detected!("avx512bf16");
            #[cfg(target_arch = "aarch64")]
            return wanted != "portable" && std::arch::is_aarch64_feature_detected!("bf16");
        });
        *PAIRS
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

/// Whether the processor multiplies tiles of bf16. `DREAMC_CPU=bf16` says that it does not, and so
/// does all that says so of pairs. Tests may have it from an emulator, which `amx` asks for.
#[inline]
pub(crate) fn tile_registers() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static TILES: LazyLock<bool> = LazyLock::new(|| {
            let wanted = std::env::var(VARIABLE).unwrap_or_default();
            if !pairs() || wanted == "bf16" {
                return false;
            }
            #[cfg(all(test, target_os = "linux"))]
            if wanted == "amx" {
                return amx::available() || amx::emulated::install();
            }
            amx::available()
        });
        *TILES
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the portable code may use fused multiply-adds; where there is no instruction they are
/// slow calls.
pub(crate) const PORTABLE_FMA: bool = cfg!(target_arch = "aarch64");

/// Defines functions that are compiled for every [`Level`]. The body may use the constant `FMA`,
/// which says whether there is a fused multiply-add, and passes it on to the `#[inline(always)]`
/// functions it calls.
macro_rules! kernel_fn {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
            fn body<const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body::<true>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body::<true>($($arg),*)
            }

            match $crate::cpu::simd::level() {
                // SAFETY: the level is there only where the features are.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: likewise.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::cpu::simd::Level::Portable => {
                    body::<{ $crate::cpu::simd::PORTABLE_FMA }>($($arg),*)
                }
            }
        }
    )*};
}
pub(crate) use kernel_fn;

/// `a · b + c`.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `a · b + c`.
#[inline(always)]
fn fma64<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// A polynomial, highest coefficient first.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    for c in &coefficients[1..] {
        sum = fma::<FMA>(sum, x, *c);
    }
    sum
}

/// Added and subtracted, it rounds to the nearest integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;
/// `ln 2` in two parts; the product of the first and a small integer is exact.
const LN2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);

/// `e^x`; what is too small for a normal number is zero.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    let t = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = fma::<FMA>(n, -LN2.0, x);
    let r = fma::<FMA>(n, -LN2.1, r);
    let y = polynomial::<FMA, 7>(
        r,
        [1.381_459_9e-3, 8.368_717e-3, 4.166_839e-2, 1.666_652_1e-1, 0.499_999_94, 1.0, 1.0],
    );
    // The bits of `ROUND` that are kept are 0, so that this adds the power of 2 to the exponent.
    let y = f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23));
    let y = if x < 88.722_84 { y } else { x * f32::INFINITY };
    if x < -87.336_54 { 0.0 } else { y }
}

/// `ln x`.
#[inline(always)]
pub(crate) fn log<const FMA: bool>(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    // The mantissa between sqrt(1/2) and sqrt(2).
    let bits = (scaled.to_bits() as i32).wrapping_sub(0x3f35_04f3);
    let e = (bits >> 23) as f32 - if tiny { 23.0 } else { 0.0 };
    let m = f32::from_bits(((bits & 0x007f_ffff) + 0x3f35_04f3) as u32);
    let f = m - 1.0;
    let z = f * f;
    let p = polynomial::<FMA, 9>(
        f,
        [
            7.037_683_6e-2,
            -1.151_461e-1,
            1.167_699_9e-1,
            -1.242_014_1e-1,
            1.424_932_3e-1,
            -1.666_805_8e-1,
            2.000_071_5e-1,
            -2.499_999_4e-1,
            3.333_333e-1,
        ],
    );
    let y = fma::<FMA>(e, LN2.1, f * z * p);
    let y = fma::<FMA>(z, -0.5, y);
    let y = fma::<FMA>(e, LN2.0, f + y);
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x < 0.0 { f32::NAN } else { y };
    if x < f32::INFINITY { y } else { x }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// `tanh x`.
#[inline(always)]
pub(crate) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let z = x * x;
    let p = polynomial::<FMA, 5>(
        z,
        [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1],
    );
    let near = fma::<FMA>(p * z, x, x);
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * x.abs()) + 1.0);
    if x.abs() < 0.625 { near } else { far.copysign(x) }
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<const FMA: bool>(x: f32) -> f32 {
    x * sigmoid::<FMA>(x)
}

/// Derivative of [`silu`].
#[inline(always)]
pub(crate) fn silu_grad<const FMA: bool>(x: f32) -> f32 {
    let s = sigmoid::<FMA>(x);
    s * fma::<FMA>(x, 1.0 - s, 1.0)
}

const GELU: (f32, f32) = (0.797_884_6, 0.044_715);

/// `x/2 · (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`.
#[inline(always)]
pub(crate) fn gelu<const FMA: bool>(x: f32) -> f32 {
    // (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
    x * sigmoid::<FMA>(2.0 * GELU.0 * x * fma::<FMA>(GELU.1 * x, x, 1.0))
}

/// Derivative of [`gelu`].
#[inline(always)]
pub(crate) fn gelu_grad<const FMA: bool>(x: f32) -> f32 {
    let s = sigmoid::<FMA>(2.0 * GELU.0 * x * fma::<FMA>(GELU.1 * x, x, 1.0));
    let inner = 2.0 * GELU.0 * fma::<FMA>(3.0 * GELU.1 * x, x, 1.0);
    s * fma::<FMA>(x * (1.0 - s), inner, 1.0)
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus<const FMA: bool>(x: f32) -> f32 {
    let u = exp::<FMA>(-x.abs());
    let w = 1.0 + u;
    // ln w is off by the rounding of w; the factor u / (w - 1) undoes it.
    let ratio = if w == 1.0 { 1.0 } else { u / (w - 1.0) };
    let log1p = if w == 1.0 { u } else { log::<FMA>(w) * ratio };
    (if x > 0.0 { x } else { 0.0 }) + if x.is_nan() { x } else { log1p }
}

/// Sine and cosine of an angle that may be large.
#[inline(always)]
pub(crate) fn sin_cos<const FMA: bool>(angle: f64) -> (f32, f32) {
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let t = fma64::<FMA>(angle, std::f64::consts::FRAC_2_PI, ROUND);
    let n = t - ROUND;
    let r = fma64::<FMA>(n, -std::f64::consts::FRAC_PI_2, angle);
    let r = fma64::<FMA>(n, -6.123_233_995_736_766e-17, r) as f32;
    let z = r * r;
    let sin = fma::<FMA>(polynomial::<FMA, 3>(z, [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1]) * z, r, r);
    let cos = fma::<FMA>(
        polynomial::<FMA, 3>(z, [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2]) * z,
        z,
        fma::<FMA>(z, -0.5, 1.0),
    );
    let quadrant = t.to_bits() as u32;
    let (a, b) = if quadrant & 1 == 0 { (sin, cos) } else { (cos, sin) };
    let sign = |negative: u32| negative << 31;
    (
        f32::from_bits(a.to_bits() ^ sign((quadrant >> 1) & 1)),
        f32::from_bits(b.to_bits() ^ sign((quadrant.wrapping_add(1) >> 1) & 1)),
    )
}

/// Exactly.
#[inline(always)]
pub(crate) fn from_bf16(x: half::bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// The nearest bf16, ties to even; NaN stays one.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> half::bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    half::bf16::from_bits(if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded })
}

/// Rounds to bf16. AVX512-BF16 makes zero of a number that is too small for a normal one.
pub(crate) fn narrow(x: &[f32], y: &mut [half::bf16]) {
    assert_eq!(x.len(), y.len());
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if pairs() {
        // SAFETY: the processor has the instructions; both are of one length.
        return unsafe { own::narrow(x.as_ptr(), y.as_mut_ptr(), x.len()) };
    }
    narrow_portably(x, y);
}

/// Inner product of bf16, in f32.
pub(crate) fn inner_narrow(a: &[half::bf16], b: &[half::bf16]) -> f32 {
    assert_eq!(a.len(), b.len());
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if pairs() {
        // SAFETY: the processor has the instructions; both are of one length.
        return unsafe { own::inner(a.as_ptr(), b.as_ptr(), a.len()) };
    }
    inner_widened(a, b)
}

/// Rounds two slices to bf16, the halves of one word together, those of `low` in its low half.
pub(crate) fn interleave(low: &[f32], high: &[f32], words: &mut [f32]) {
    assert!(low.len() == words.len() && high.len() == words.len());
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if pairs() {
        // SAFETY: the processor has the instructions; all are of one length.
        return unsafe { own::interleave(low.as_ptr(), high.as_ptr(), words.as_mut_ptr(), words.len()) };
    }
    interleave_portably(low, high, words);
}

/// Most floats of a row of [`interleave_rows`].
pub(crate) const WIDEST: usize = 128;

/// Rounds `rows` rows of `width` floats, `apart` from one another, two by two to rows of words: as
/// products read steps. After the last of an odd number there are zeros.
pub(crate) fn interleave_rows(from: &[f32], apart: usize, rows: usize, width: usize, words: &mut [f32]) {
    const NOTHING: [f32; WIDEST] = [0.0; WIDEST];
    for (pair, words) in words.chunks_exact_mut(width).enumerate().take(rows.div_ceil(2)) {
        let row = |row: usize| &from[row * apart..][..width];
        let high = if 2 * pair + 1 < rows { row(2 * pair + 1) } else { &NOTHING[..width] };
        interleave(row(2 * pair), high, words);
    }
}

kernel_fn! {
    fn narrow_portably(x: &[f32], y: &mut [half::bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = to_bf16(*x);
        }
    }

    fn interleave_portably(low: &[f32], high: &[f32], words: &mut [f32]) {
        let bits = |x: f32| to_bf16(x).to_bits() as u32;
        for ((word, low), high) in words.iter_mut().zip(low).zip(high) {
            *word = f32::from_bits(bits(*low) | bits(*high) << 16);
        }
    }
}

/// The instructions of this architecture.
#[cfg(target_arch = "aarch64")]
use neon as own;
#[cfg(target_arch = "x86_64")]
use x86 as own;

/// Interleaved accumulators of a reduction.
const LANES: usize = 16;

#[inline(always)]
fn fold(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of `f` over the pairs of two slices of equal length.
#[inline(always)]
pub(crate) fn sum_with(a: &[f32], b: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let mut lanes = [0.0; LANES];
    let (a16, b16) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (ra, rb) = (a16.remainder(), b16.remainder());
    for (a, b) in a16.zip(b16) {
        for i in 0..LANES {
            lanes[i] = f(a[i], b[i], lanes[i]);
        }
    }
    for i in 0..ra.len() {
        lanes[i] = f(ra[i], rb[i], lanes[i]);
    }
    fold(lanes, |a, b| a + b)
}

/// Inner product.
#[inline(always)]
pub(crate) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if FMA {
        // SAFETY: whoever has fused multiply-adds here has AVX2.
        return unsafe { x86::reduce::<true>(a, b) };
    }
    sum_with(a, b, fma::<FMA>)
}

/// Sum.
#[inline(always)]
pub(crate) fn sum<const FMA: bool>(x: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if FMA {
        // SAFETY: likewise.
        return unsafe { x86::reduce::<false>(x, x) };
    }
    sum_with(x, x, |x, _, c| c + x)
}

/// Reductions of short slices, whose lanes LLVM makes no vectors of once it has unrolled them.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{LANES, fold};
    use std::arch::x86_64::*;

    /// # Safety
    /// The processor has AVX512-BF16; there are `n` elements.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
    pub(super) unsafe fn narrow(x: *const f32, y: *mut half::bf16, n: usize) {
        let mut i = 0;
        // SAFETY: all elements are below `n`.
        unsafe {
            while i + 32 <= n {
                let (low, high) = (_mm512_loadu_ps(x.add(i)), _mm512_loadu_ps(x.add(i + 16)));
                let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_si512(y.add(i).cast(), both);
                i += 32;
            }
            while i < n {
                let mask = (1u32 << (n - i).min(16)).wrapping_sub(1) as u16;
                let half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x.add(i)));
                _mm256_mask_storeu_epi16(
                    y.add(i).cast(),
                    mask,
                    std::mem::transmute::<__m256bh, __m256i>(half),
                );
                i += 16;
            }
        }
    }

    /// # Safety
    /// The processor has AVX512-BF16; there are `n` elements of each.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
    pub(super) unsafe fn inner(a: *const half::bf16, b: *const half::bf16, n: usize) -> f32 {
        let mut sums = _mm512_setzero_ps();
        // SAFETY: all elements are below `n`; all are 512 bits.
        unsafe {
            for i in (0..n).step_by(32) {
                let mask = u32::MAX >> (32 - (n - i).min(32));
                let pairs = |x: *const half::bf16| {
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_maskz_loadu_epi16(mask, x.add(i).cast()))
                };
                sums = _mm512_dpbf16_ps(sums, pairs(a), pairs(b));
            }
        }
        _mm512_reduce_add_ps(sums)
    }

    /// # Safety
    /// The processor has AVX512-BF16; there are `n` elements of each.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16")]
    pub(super) unsafe fn interleave(low: *const f32, high: *const f32, words: *mut f32, n: usize) {
        // SAFETY: all elements are below `n`.
        unsafe {
            for i in (0..n).step_by(16) {
                let mask = (1u32 << (n - i).min(16)).wrapping_sub(1) as u16;
                let half = |x: *const f32| {
                    let half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x.add(i)));
                    _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(half))
                };
                let word = _mm512_or_si512(half(low), _mm512_slli_epi32::<16>(half(high)));
                _mm512_mask_storeu_epi32(words.add(i).cast(), mask, word);
            }
        }
    }

    /// The largest of whole groups of lanes.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    pub(super) unsafe fn largest(x: &[f32]) -> f32 {
        // SAFETY: the processor is the caller's, all elements are below the length.
        unsafe {
            let mut lanes = [_mm256_set1_ps(f32::NEG_INFINITY); 2];
            for at in (0..x.len()).step_by(LANES) {
                for (i, lane) in lanes.iter_mut().enumerate() {
                    // Of a number and NaN the instruction gives the second operand.
                    *lane = _mm256_max_ps(_mm256_loadu_ps(x.as_ptr().add(at + 8 * i)), *lane);
                }
            }
            let eight = _mm256_max_ps(lanes[0], lanes[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    /// `Σ a·b`, or `Σ a`: the bits of [`super::sum_with`].
    ///
    /// # Safety
    /// The processor has AVX2 and FMA.
    #[inline(always)]
    pub(super) unsafe fn reduce<const PRODUCTS: bool>(a: &[f32], b: &[f32]) -> f32 {
        let n = a.len().min(b.len());
        let whole = n / LANES * LANES;
        // SAFETY: the processor is the caller's, all elements are below `n`.
        unsafe {
            let mut lanes = [_mm256_setzero_ps(); 2];
            for at in (0..whole).step_by(LANES) {
                for (i, lane) in lanes.iter_mut().enumerate() {
                    let x = _mm256_loadu_ps(a.as_ptr().add(at + 8 * i));
                    *lane = match PRODUCTS {
                        true => _mm256_fmadd_ps(x, _mm256_loadu_ps(b.as_ptr().add(at + 8 * i)), *lane),
                        false => _mm256_add_ps(*lane, x),
                    };
                }
            }
            if whole < n {
                let mut all = [0.0; LANES];
                _mm256_storeu_ps(all.as_mut_ptr(), lanes[0]);
                _mm256_storeu_ps(all.as_mut_ptr().add(8), lanes[1]);
                for (lane, (a, b)) in all.iter_mut().zip(a[whole..n].iter().zip(&b[whole..n])) {
                    *lane = if PRODUCTS { a.mul_add(*b, *lane) } else { *lane + a };
                }
                return fold(all, |a, b| a + b);
            }
            let eight = _mm256_add_ps(lanes[0], lanes[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

/// The instructions for bf16, for which the standard library has no functions. Their control
/// register is as the system sets it: sums of pairs round to odd, step by step, and numbers too
/// small for a normal one are zero in them.
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon {
    use super::to_bf16;
    use half::bf16;
    use std::arch::aarch64::*;
    use std::arch::asm;

    /// Adds to each of four sums the two products of its pairs: `BFDOT`.
    ///
    /// # Safety
    /// The processor has FEAT_BF16, as have the functions below.
    #[inline(always)]
    pub(crate) unsafe fn dot(mut sums: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: the caller's; the instruction changes one register.
        unsafe {
            asm!("bfdot {s:v}.4s, {a:v}.8h, {b:v}.8h", s = inout(vreg) sums, a = in(vreg) a,
                b = in(vreg) b, options(pure, nomem, nostack, preserves_flags));
        }
        sums
    }

    /// Adds to the sums of two rows and two columns the products of two pairs of each: `BFMMLA`,
    /// which has the bits of two [`dot`] in order.
    ///
    /// # Safety
    /// As for [`dot`].
    #[inline(always)]
    pub(crate) unsafe fn square(
        mut sums: float32x4_t,
        rows: float32x4_t,
        columns: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: the caller's; the instruction changes one register.
        unsafe {
            asm!("bfmmla {s:v}.4s, {a:v}.8h, {b:v}.8h", s = inout(vreg) sums, a = in(vreg) rows,
                b = in(vreg) columns, options(pure, nomem, nostack, preserves_flags));
        }
        sums
    }

    /// Rounds to bf16, with the bits of [`to_bf16`]: `BFCVTN`.
    ///
    /// # Safety
    /// As for [`dot`].
    #[inline(always)]
    pub(crate) unsafe fn rounded(x: float32x4_t) -> uint16x4_t {
        let y: uint16x4_t;
        // SAFETY: the caller's; the instruction changes one register.
        unsafe {
            asm!("bfcvtn {y:v}.4h, {x:v}.4s", y = out(vreg) y, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags));
        }
        y
    }

    /// # Safety
    /// As for [`dot`]; there are `n` elements.
    #[target_feature(enable = "neon,bf16")]
    pub(super) unsafe fn narrow(x: *const f32, y: *mut bf16, n: usize) {
        let whole = n / 4 * 4;
        // SAFETY: all elements are below `n`.
        unsafe {
            for i in (0..whole).step_by(4) {
                vst1_u16(y.add(i).cast(), rounded(vld1q_f32(x.add(i))));
            }
            for i in whole..n {
                *y.add(i) = to_bf16(*x.add(i));
            }
        }
    }

    /// # Safety
    /// As for [`dot`]; there are `n` elements of each.
    #[target_feature(enable = "neon,bf16")]
    pub(super) unsafe fn inner(a: *const bf16, b: *const bf16, n: usize) -> f32 {
        const STEP: usize = 32;
        let mut sums = [vdupq_n_f32(0.0); STEP / 8];
        // SAFETY: all elements are below `n`; the rest is copied to where there are zeros.
        unsafe {
            let mut add = |a: *const bf16, b: *const bf16| {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = dot(*sum, vld1q_f32(a.add(8 * i).cast()), vld1q_f32(b.add(8 * i).cast()));
                }
            };
            let whole = n / STEP * STEP;
            for i in (0..whole).step_by(STEP) {
                add(a.add(i), b.add(i));
            }
            if whole < n {
                let mut rest = [[bf16::ZERO; STEP]; 2];
                for (rest, x) in rest.iter_mut().zip([a, b]) {
                    std::ptr::copy_nonoverlapping(x.add(whole), rest.as_mut_ptr(), n - whole);
                }
                add(rest[0].as_ptr(), rest[1].as_ptr());
            }
        }
        vaddvq_f32(vaddq_f32(vaddq_f32(sums[0], sums[1]), vaddq_f32(sums[2], sums[3])))
    }

    /// # Safety
    /// As for [`dot`]; there are `n` elements of each.
    #[target_feature(enable = "neon,bf16")]
    pub(super) unsafe fn interleave(low: *const f32, high: *const f32, words: *mut f32, n: usize) {
        let whole = n / 4 * 4;
        // SAFETY: all elements are below `n`.
        unsafe {
            for i in (0..whole).step_by(4) {
                let [low, high] = [low, high].map(|x| rounded(vld1q_f32(x.add(i))));
                let both = vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
                vst1q_u16(words.add(i).cast(), both);
            }
            for i in whole..n {
                let bits = |x: *const f32| u32::from(to_bf16(*x.add(i)).to_bits());
                *words.add(i) = f32::from_bits(bits(low) | bits(high) << 16);
            }
        }
    }
}

/// Largest; NaN is passed over.
#[inline(always)]
pub(crate) fn largest<const FMA: bool>(x: &[f32]) -> f32 {
    let max = |a: f32, b: f32| if b > a { b } else { a };
    let chunks = x.chunks_exact(LANES);
    let most = chunks.remainder().iter().fold(f32::NEG_INFINITY, |m, x| max(m, *x));
    #[cfg(target_arch = "x86_64")]
    if FMA {
        // SAFETY: whoever has fused multiply-adds here has AVX2.
        return max(most, unsafe { x86::largest(&x[..x.len() / LANES * LANES]) });
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for x in chunks {
        for i in 0..LANES {
            lanes[i] = max(lanes[i], x[i]);
        }
    }
    max(most, fold(lanes, max))
}

kernel_fn! {
    /// `y += x`.
    pub(crate) fn add(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += *x;
        }
    }

    /// `y += factor · x`.
    pub(crate) fn add_scaled(factor: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<FMA>(factor, *x, *y);
        }
    }

    /// `y = factor · x`.
    pub(crate) fn scale(factor: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = factor * *x;
        }
    }

    /// Exactly.
    pub(crate) fn widen(x: &[half::bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = from_bf16(*x);
        }
    }

    /// `y += factor · x`.
    pub(crate) fn add_scaled_narrow(factor: f32, x: &[half::bf16], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = fma::<FMA>(factor, from_bf16(*x), *y);
        }
    }

    /// `y = factor · x`.
    pub(crate) fn scale_narrow(factor: f32, x: &[half::bf16], y: &mut [half::bf16]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = to_bf16(factor * from_bf16(*x));
        }
    }

    /// Inner product.
    pub(crate) fn inner(a: &[f32], b: &[f32]) -> f32 {
        dot::<FMA>(a, b)
    }

    fn inner_widened(a: &[half::bf16], b: &[half::bf16]) -> f32 {
        const PIECE: usize = 64;
        let (mut wide_a, mut wide_b) = ([0.0; PIECE], [0.0; PIECE]);
        let mut total = 0.0;
        for (a, b) in a.chunks(PIECE).zip(b.chunks(PIECE)) {
            wide_a.iter_mut().zip(a).for_each(|(to, x)| *to = from_bf16(*x));
            wide_b.iter_mut().zip(b).for_each(|(to, x)| *to = from_bf16(*x));
            total += dot::<FMA>(&wide_a[..a.len()], &wide_b[..b.len()]);
        }
        total
    }

    /// Whether all integers are in `0..bound`.
    pub(crate) fn all_below(x: &[i32], bound: u32) -> bool {
        x.iter().fold(true, |ok, &i| ok & ((i as u32) < bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error in units of the last place, over many numbers of either sign.
    fn error(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, low: f32, high: f32) -> f64 {
        let mut worst: f64 = 0.0;
        for i in 0..200_000 {
            let x = low + (high - low) * (i as f32 / 200_000.0);
            let (y, e) = (f(x) as f64, exact(x as f64));
            let unit = (e.abs() as f32).to_bits();
            let unit = f32::from_bits(unit + 1) as f64 - f32::from_bits(unit) as f64;
            worst = worst.max((y - e).abs() / unit);
        }
        worst
    }

    #[test]
    fn functions_are_accurate() {
        fn check<const FMA: bool>() {
            assert!(error(exp::<FMA>, f64::exp, -87.33, 88.72) < 2.0);
            assert!(error(log::<FMA>, f64::ln, 1e-3, 0.9) < 3.0);
            assert!(error(log::<FMA>, f64::ln, 1.1, 1e6) < 2.0);
            assert!(error(tanh::<FMA>, f64::tanh, -9.0, 9.0) < 3.0);
            assert!(error(sigmoid::<FMA>, |x| 1.0 / (1.0 + (-x).exp()), -80.0, 80.0) < 3.0);
            assert!(error(silu::<FMA>, |x| x / (1.0 + (-x).exp()), -80.0, 80.0) < 3.0);
            assert!(error(softplus::<FMA>, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), -80.0, 80.0) < 4.0);
            let mut worst: f64 = 0.0;
            for i in 0..100_000 {
                let angle = i as f64 * 1.31 - 1000.0;
                let (s, c) = sin_cos::<FMA>(angle);
                worst = worst.max((s as f64 - angle.sin()).abs()).max((c as f64 - angle.cos()).abs());
            }
            assert!(worst < 2e-7, "{worst}");
        }
        check::<true>();
        check::<false>();
    }

    #[test]
    fn functions_at_the_ends() {
        fn check<const FMA: bool>() {
            assert_eq!(exp::<FMA>(0.0), 1.0);
            assert_eq!(exp::<FMA>(f32::NEG_INFINITY), 0.0);
            assert_eq!(exp::<FMA>(f32::INFINITY), f32::INFINITY);
            assert_eq!(exp::<FMA>(88.8), f32::INFINITY);
            assert!(exp::<FMA>(88.722) < f32::INFINITY && exp::<FMA>(88.73) == f32::INFINITY);
            assert!(exp::<FMA>(-87.336) > f32::MIN_POSITIVE && exp::<FMA>(-87.34) == 0.0);
            assert!(exp::<FMA>(f32::NAN).is_nan());
            assert_eq!(log::<FMA>(0.0), f32::NEG_INFINITY);
            assert_eq!(log::<FMA>(f32::INFINITY), f32::INFINITY);
            assert!(log::<FMA>(-1.0).is_nan() && log::<FMA>(f32::NAN).is_nan());
            assert!((log::<FMA>(1e-40) as f64 - (1e-40f32 as f64).ln()).abs() < 1e-4);
            assert_eq!(tanh::<FMA>(100.0), 1.0);
            assert_eq!(tanh::<FMA>(-100.0), -1.0);
            assert!(tanh::<FMA>(f32::NAN).is_nan() && softplus::<FMA>(f32::NAN).is_nan());
            assert_eq!(sigmoid::<FMA>(-200.0), 0.0);
            assert_eq!(softplus::<FMA>(200.0), 200.0);
        }
        check::<true>();
        check::<false>();
    }

    /// Functions for bf16 give the results of the portable form, at all lengths.
    #[test]
    fn bf16_of_any_length() {
        let value = |i: usize| ((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0;
        for n in [0, 1, 3, 4, 5, 31, 32, 33, 100] {
            let [x, y] = [0, 500].map(|from| (from..from + n).map(value).collect::<Vec<_>>());
            let [mut a, mut b] = [(); 2].map(|_| vec![half::bf16::ZERO; n]);
            narrow(&x, &mut a);
            narrow_portably(&y, &mut b);
            assert_eq!(a, x.iter().map(|x| to_bf16(*x)).collect::<Vec<_>>());
            let [mut words, mut expected] = [(); 2].map(|_| vec![0.0; n]);
            interleave(&x, &y, &mut words);
            interleave_portably(&x, &y, &mut expected);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&words), bits(&expected));
            let exact: f64 = a.iter().zip(&b).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
            assert!((f64::from(inner_narrow(&a, &b)) - exact).abs() < 1e-5, "{n}");
        }
    }

    /// Two rows and two columns at once have the bits of pair after pair; rounding has those of
    /// [`to_bf16`], of numbers too small to be normal, of infinities and NaN, too.
    #[cfg(target_arch = "aarch64")]
    #[test]
    fn instructions_for_bf16() {
        use std::arch::aarch64::*;

        #[target_feature(enable = "neon,bf16")]
        unsafe fn check(number: impl Fn(u32) -> f32) {
            for seed in 0..1000 {
                let at =
                    |from: u32| std::array::from_fn::<f32, 4, _>(|i| number(seed * 16 + from + i as u32));
                let [rows, columns] = [at(0), at(4)];
                let sums = at(8).map(|x| x * 1e-3);
                let [mut squares, mut dots, mut single] = [[0f32; 4]; 3];
                // SAFETY: the caller's; arrays are as long as vectors.
                unsafe {
                    let of = |x: [f32; 4]| vld1q_f32(x.as_ptr());
                    vst1q_f32(squares.as_mut_ptr(), neon::square(of(sums), of(rows), of(columns)));
                    // Words of the first and the second step, in the order of the four sums.
                    let word = |x: [f32; 4], step: usize, line: fn(usize) -> usize| {
                        of(std::array::from_fn(|i| x[2 * line(i) + step]))
                    };
                    let mut all = of(sums);
                    for step in 0..2 {
                        all = neon::dot(all, word(rows, step, |i| i / 2), word(columns, step, |i| i % 2));
                    }
                    vst1q_f32(dots.as_mut_ptr(), all);
                    // These products and their sum have fewer bits than an f32.
                    let low = |x: f32| f64::from(f32::from_bits(x.to_bits() << 16));
                    let high = |x: f32| f64::from(f32::from_bits(x.to_bits() & 0xffff_0000));
                    vst1q_f32(single.as_mut_ptr(), neon::dot(of([0.0; 4]), of(rows), of(columns)));
                    for (i, found) in single.into_iter().enumerate() {
                        let [a, b] = [rows[i], columns[i]];
                        let exact = low(a) * low(b) + high(a) * high(b);
                        assert_eq!(f64::from(found), exact, "{a} {b}");
                    }
                }
                assert_eq!(squares.map(f32::to_bits), dots.map(f32::to_bits), "{rows:?} {columns:?}");
            }
        }

        if !pairs() {
            return dreamc_skip::skip("the processor has no instructions for bf16");
        }
        // Both halves of a word are numbers near 1.
        let number = |i: u32| {
            let bits = i.wrapping_mul(2_654_435_761).rotate_left(7).wrapping_mul(0x9e37_79b1);
            f32::from_bits(bits & 0x80ff_80ff | 0x3f00_3f00)
        };
        // SAFETY: the processor has the instructions.
        unsafe { check(number) };
        let mut x: Vec<f32> =
            (0..1 << 16).map(|i: u32| f32::from_bits(i << 16 | i.reverse_bits() >> 16)).collect();
        x.extend([0x8000u32, 0x18000, 0x7fff, 0x7f7f_ffff, 0x7f80_0001, 0xffff_ffff].map(f32::from_bits));
        let mut y = vec![half::bf16::ZERO; x.len()];
        narrow(&x, &mut y);
        for (x, y) in x.iter().zip(y) {
            assert_eq!(y.to_bits(), to_bf16(*x).to_bits(), "{:x}", x.to_bits());
        }
    }

    #[test]
    fn reductions_of_any_length() {
        for n in [0, 1, 15, 16, 17, 100] {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 3.0).collect();
            assert_eq!(sum::<true>(&x), x.iter().sum::<f32>());
            assert_eq!(dot::<true>(&x, &x), x.iter().map(|x| x * x).sum::<f32>());
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!((largest::<true>(&x), largest::<false>(&x)), (most, most));
        }
    }
}
