//! Products of few rows with packed weights, whose codes become numbers in registers.
//!
//! *In*: at most [`FEW`] lines of f32 and lines of blocks ([`Packed`]), whole blocks each. *Out*:
//! the bits of [`super::block`] with the numbers that the blocks stand for. *Promise*: a block is
//! read once for all rows, and nothing is unpacked into memory for one row.
//!
//! Lanes are lines, as in [`super::few`]: words of blocks are transposed, then each code of them is
//! looked up or converted, and multiplied by the scales of its lines. The numbers are exact, or
//! rounded once as [`Packed::unpack`] rounds them. Two vectors of lines go side by side, since a
//! sum waits four cycles for its last addition. On aarch64 the vectors are NEON's, which every
//! processor has.

use super::few::{FEW, PANEL, Turn};
use super::packed::{endless, half, number};
use super::{DEPTH, Four, Level, Vector, level};
use dreamc_compiler::format::{BLOCK, E2M1, NV, NV_HEAD, Packed, SUPER};
use dreamc_compiler::format::{bad_e4m3, e4m3, half_of_power};

/// Vectors side by side.
const TWO: usize = 2;
/// Steps that share a scale in most formats.
const PART: usize = 32;
/// The most scales of [`DEPTH`] steps.
const PARTS: usize = DEPTH / NV.1;
/// Bytes that are asked for ahead along each line.
const AHEAD: usize = 512;
/// Bytes of a line of the cache.
const CACHED: usize = 64;

/// Vectors that know the codes of blocks. Words are 32 bits of as many lines as lanes.
pub(super) trait Codes: Turn {
    /// A number for each code of four bits.
    type Table: Copy;
    /// The scale and the offset of numbers of [`Codes::signed`]: a byte is `scale · x + offset`.
    const SIGNED: (f32, f32);
    unsafe fn table(of: &[f32; 16]) -> Self::Table;
    /// The number of the four bits from bit `at` of each word on.
    unsafe fn looked(self, at: u32, table: Self::Table) -> Self;
    /// The signed byte of each word by its place.
    unsafe fn signed(self, byte: u32) -> Self;
    /// `count` bits of each word from bit `at` on, as a number.
    unsafe fn field(self, at: u32, count: u32) -> Self;
    /// The scale and the offset of numbers of [`Codes::byte`], as of [`Codes::SIGNED`].
    const BYTE: (f32, f32);
    /// The byte of each word by its place.
    unsafe fn byte(self, byte: u32) -> Self;
    /// Four codes of six bits, a byte each: four bits from bit `low` of each byte of these words
    /// on, and above them two from bit `high` of those.
    unsafe fn sixes(self, above: Self, low: u32, high: u32) -> Self;
    /// The first number in binary16 of each word.
    unsafe fn first_half(self) -> Self;
    /// The second.
    unsafe fn second_half(self) -> Self;
}

impl Codes for Four {
    type Table = [f32; 16];
    const SIGNED: (f32, f32) = (1.0, 0.0);
    #[inline(always)]
    unsafe fn table(of: &[f32; 16]) -> Self::Table {
        *of
    }
    #[inline(always)]
    unsafe fn looked(self, at: u32, table: Self::Table) -> Self {
        Four(self.0.map(|x| table[(x.to_bits() >> at & 15) as usize]))
    }
    #[inline(always)]
    unsafe fn signed(self, byte: u32) -> Self {
        Four(self.0.map(|x| f32::from((x.to_bits() >> (8 * byte)) as i8)))
    }
    #[inline(always)]
    unsafe fn field(self, at: u32, count: u32) -> Self {
        Four(self.0.map(|x| (x.to_bits() >> at & ((1 << count) - 1)) as f32))
    }
    const BYTE: (f32, f32) = (1.0, 0.0);
    #[inline(always)]
    unsafe fn byte(self, byte: u32) -> Self {
        // SAFETY: the caller's.
        unsafe { self.field(8 * byte, 8) }
    }
    #[inline(always)]
    unsafe fn sixes(self, above: Self, low: u32, high: u32) -> Self {
        let of = |i: usize| six(self.0[i].to_bits() >> low, above.0[i].to_bits() >> high);
        Four(std::array::from_fn(|i| f32::from_bits(of(i))))
    }
    #[inline(always)]
    unsafe fn first_half(self) -> Self {
        Four(self.0.map(|x| number(x.to_bits() as u16)))
    }
    #[inline(always)]
    unsafe fn second_half(self) -> Self {
        Four(self.0.map(|x| number((x.to_bits() >> 16) as u16)))
    }
}

/// Four bits of each byte of a word below two of each byte of another.
fn six(low: u32, high: u32) -> u32 {
    low & FOURS | (high & TWOS) << 4
}

/// Four bits of each byte of a word.
const FOURS: u32 = 0x0f0f_0f0f;
/// Two bits of each.
const TWOS: u32 = 0x0303_0303;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::x86::{Eight, Sixteen};
    use super::{Codes, FOURS, TWOS};
    use std::arch::x86_64::*;

    impl Codes for Sixteen {
        type Table = __m512;
        // The byte, 128 added, is in the second byte of the fraction of 1.
        const SIGNED: (f32, f32) = (32768.0, -32896.0);
        #[inline(always)]
        unsafe fn table(of: &[f32; 16]) -> __m512 {
            // SAFETY: the caller has AVX-512.
            unsafe { _mm512_loadu_ps(of.as_ptr()) }
        }
        #[inline(always)]
        unsafe fn looked(self, at: u32, table: __m512) -> Self {
            // SAFETY: whoever has the vectors has the instructions. Four bits of an index count.
            unsafe {
                let codes = _mm512_srlv_epi32(_mm512_castps_si512(self.0), _mm512_set1_epi32(at as i32));
                Sixteen(_mm512_permutexvar_ps(codes, table))
            }
        }
        #[inline(always)]
        unsafe fn signed(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let words = _mm512_castps_si512(self.0);
                let above = _mm512_xor_si512(words, _mm512_set1_epi32(i32::from_ne_bytes([0x80; 4])));
                Sixteen(within_one(above, byte))
            }
        }
        #[inline(always)]
        unsafe fn field(self, at: u32, count: u32) -> Self {
            // SAFETY: likewise.
            unsafe { Sixteen(_mm512_cvtepi32_ps(bits_of_sixteen(self.0, at, (1 << count) - 1))) }
        }
        // The byte is in the second byte of the fraction of 1.
        const BYTE: (f32, f32) = (32768.0, -32768.0);
        #[inline(always)]
        unsafe fn byte(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe { Sixteen(within_one(_mm512_castps_si512(self.0), byte)) }
        }
        #[inline(always)]
        unsafe fn sixes(self, above: Self, low: u32, high: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let low = bits_of_sixteen(self.0, low, FOURS);
                let high = bits_of_sixteen(above.0, high, TWOS);
                Sixteen(_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<4>(high))))
            }
        }
        #[inline(always)]
        unsafe fn first_half(self) -> Self {
            // SAFETY: likewise.
            unsafe { Sixteen(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(self.0)))) }
        }
        #[inline(always)]
        unsafe fn second_half(self) -> Self {
            // SAFETY: likewise.
            unsafe {
                let words = _mm512_srli_epi32::<16>(_mm512_castps_si512(self.0));
                Sixteen(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)))
            }
        }
    }

    /// Bits of each word from bit `at` on, those of a mask.
    #[inline(always)]
    unsafe fn bits_of_sixteen(x: __m512, at: u32, mask: u32) -> __m512i {
        // SAFETY: the caller has AVX-512.
        unsafe {
            let words = _mm512_srlv_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(at as i32));
            _mm512_and_si512(words, _mm512_set1_epi32(mask as i32))
        }
    }

    /// A byte of each word by its place, in the second byte of the fraction of 1.
    #[inline(always)]
    unsafe fn within_one(words: __m512i, byte: u32) -> __m512 {
        // SAFETY: the caller has AVX-512.
        unsafe {
            // The byte of four words goes to the second of each.
            let from = |word: u32| (4 * word + byte) << 8;
            let [a, b, c, d] = [0, 1, 2, 3].map(|word| from(word) as i32);
            let place = _mm512_set4_epi32(d, c, b, a);
            let one = _mm512_castps_si512(_mm512_set1_ps(1.0));
            _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(one, 0x2222_2222_2222_2222, words, place))
        }
    }

    impl Codes for Eight {
        type Table = [__m256; 2];
        const SIGNED: (f32, f32) = (1.0, 0.0);
        #[inline(always)]
        unsafe fn table(of: &[f32; 16]) -> [__m256; 2] {
            // SAFETY: the caller has AVX2.
            unsafe { [_mm256_loadu_ps(of.as_ptr()), _mm256_loadu_ps(of.as_ptr().add(8))] }
        }
        #[inline(always)]
        unsafe fn looked(self, at: u32, [low, high]: [__m256; 2]) -> Self {
            // SAFETY: whoever has the vectors has the instructions. Three bits of an index count.
            unsafe {
                let words = _mm256_castps_si256(self.0);
                let codes = _mm256_srlv_epi32(words, _mm256_set1_epi32(at as i32));
                let (low, high) =
                    (_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes));
                Eight(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes))))
            }
        }
        #[inline(always)]
        unsafe fn signed(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let words = _mm256_castps_si256(self.0);
                let high = _mm256_sllv_epi32(words, _mm256_set1_epi32(24 - 8 * byte as i32));
                Eight(_mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(high)))
            }
        }
        #[inline(always)]
        unsafe fn field(self, at: u32, count: u32) -> Self {
            // SAFETY: likewise.
            unsafe { Eight(_mm256_cvtepi32_ps(bits_of_eight(self.0, at, (1 << count) - 1))) }
        }
        const BYTE: (f32, f32) = (1.0, 0.0);
        #[inline(always)]
        unsafe fn byte(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe { self.field(8 * byte, 8) }
        }
        #[inline(always)]
        unsafe fn sixes(self, above: Self, low: u32, high: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let low = bits_of_eight(self.0, low, FOURS);
                let high = bits_of_eight(above.0, high, TWOS);
                Eight(_mm256_castsi256_ps(_mm256_or_si256(low, _mm256_slli_epi32::<4>(high))))
            }
        }
        #[inline(always)]
        unsafe fn first_half(self) -> Self {
            // SAFETY: likewise.
            unsafe { Eight(numbers(_mm256_slli_epi32::<16>(_mm256_castps_si256(self.0)))) }
        }
        #[inline(always)]
        unsafe fn second_half(self) -> Self {
            // SAFETY: likewise.
            unsafe { Eight(numbers(_mm256_castps_si256(self.0))) }
        }
    }

    /// Bits of each word from bit `at` on, those of a mask.
    #[inline(always)]
    unsafe fn bits_of_eight(x: __m256, at: u32, mask: u32) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe {
            let words = _mm256_srlv_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(at as i32));
            _mm256_and_si256(words, _mm256_set1_epi32(mask as i32))
        }
    }

    /// Numbers in binary16 in the upper halves of words, as [`super::number`] has them.
    #[inline(always)]
    unsafe fn numbers(words: __m256i) -> __m256 {
        // SAFETY: the caller has AVX2.
        unsafe {
            let size = _mm256_and_si256(_mm256_srli_epi32::<3>(words), _mm256_set1_epi32(0x7fff << 13));
            let ends = _mm256_cmpgt_epi32(size, _mm256_set1_epi32((0x7c00 << 13) - 1));
            let ends = _mm256_and_si256(ends, _mm256_set1_epi32(0x7f80_0000));
            let sign = _mm256_and_si256(words, _mm256_set1_epi32(i32::MIN));
            // A product with a power of two is exact.
            let by = _mm256_castsi256_ps(_mm256_set1_epi32(239 << 23));
            let number = _mm256_mul_ps(_mm256_castsi256_ps(size), by);
            _mm256_or_ps(number, _mm256_castsi256_ps(_mm256_or_si256(ends, sign)))
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::super::neon::Quad;
    use super::{Codes, FOURS, TWOS};
    use std::arch::aarch64::*;

    impl Codes for Quad {
        type Table = uint8x16x4_t;
        const SIGNED: (f32, f32) = (1.0, 0.0);
        #[inline(always)]
        unsafe fn table(of: &[f32; 16]) -> uint8x16x4_t {
            let from = of.as_ptr().cast::<u8>();
            // SAFETY: the instructions are part of the architecture; sixteen numbers are 64 bytes.
            unsafe {
                let [a, b, c, d] = [0, 16, 32, 48].map(|at| vld1q_u8(from.add(at)));
                uint8x16x4_t(a, b, c, d)
            }
        }
        #[inline(always)]
        unsafe fn looked(self, at: u32, table: uint8x16x4_t) -> Self {
            // SAFETY: likewise.
            unsafe {
                // The four bytes of a number by its code.
                let codes = bits_of(self.0, at, 15);
                let places = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), codes, 0x0404_0404);
                Quad(vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places))))
            }
        }
        #[inline(always)]
        unsafe fn signed(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let words = vreinterpretq_s32_f32(self.0);
                let high = vshlq_s32(words, vdupq_n_s32(24 - 8 * byte as i32));
                Quad(vcvtq_f32_s32(vshrq_n_s32::<24>(high)))
            }
        }
        #[inline(always)]
        unsafe fn field(self, at: u32, count: u32) -> Self {
            // SAFETY: likewise.
            unsafe { Quad(vcvtq_f32_u32(bits_of(self.0, at, (1 << count) - 1))) }
        }
        const BYTE: (f32, f32) = (1.0, 0.0);
        #[inline(always)]
        unsafe fn byte(self, byte: u32) -> Self {
            // SAFETY: likewise.
            unsafe { self.field(8 * byte, 8) }
        }
        #[inline(always)]
        unsafe fn sixes(self, above: Self, low: u32, high: u32) -> Self {
            // SAFETY: likewise.
            unsafe {
                let (low, high) = (bits_of(self.0, low, FOURS), bits_of(above.0, high, TWOS));
                Quad(vreinterpretq_f32_u32(vorrq_u32(low, vshlq_n_u32::<4>(high))))
            }
        }
        #[inline(always)]
        unsafe fn first_half(self) -> Self {
            // SAFETY: likewise.
            unsafe { Quad(numbers(vshlq_n_u32::<16>(vreinterpretq_u32_f32(self.0)))) }
        }
        #[inline(always)]
        unsafe fn second_half(self) -> Self {
            // SAFETY: likewise.
            unsafe { Quad(numbers(vreinterpretq_u32_f32(self.0))) }
        }
    }

    /// Bits of each word from bit `at` on, those of a mask.
    #[inline(always)]
    unsafe fn bits_of(x: float32x4_t, at: u32, mask: u32) -> uint32x4_t {
        // SAFETY: the instructions are part of the architecture.
        unsafe {
            let words = vshlq_u32(vreinterpretq_u32_f32(x), vdupq_n_s32(-(at as i32)));
            vandq_u32(words, vdupq_n_u32(mask))
        }
    }

    /// Numbers in binary16 in the upper halves of words, as [`super::number`] has them.
    #[inline(always)]
    unsafe fn numbers(words: uint32x4_t) -> float32x4_t {
        // SAFETY: likewise.
        unsafe {
            let size = vandq_u32(vshrq_n_u32::<3>(words), vdupq_n_u32(0x7fff << 13));
            let ends = vandq_u32(vcgeq_u32(size, vdupq_n_u32(0x7c00 << 13)), vdupq_n_u32(0x7f80_0000));
            let sign = vandq_u32(words, vdupq_n_u32(1 << 31));
            // A product with a power of two is exact.
            let by = vreinterpretq_f32_u32(vdupq_n_u32(239 << 23));
            let number = vmulq_f32(vreinterpretq_f32_u32(size), by);
            vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(number), vorrq_u32(ends, sign)))
        }
    }
}

/// Lines of blocks: as many as two vectors have lanes, the last again in the place of those that
/// are not there.
type Lines = [*const u8; PANEL];
/// Lines of the left operand.
type Left = [*const f32; FEW];
/// Sums of all rows, [`PANEL`] apart.
pub(super) type Totals = [f32; FEW * PANEL];

/// Scales and offsets of the parts of [`DEPTH`] steps: a number is `scale · code + offset`.
struct Scales {
    scale: [[f32; PANEL]; PARTS],
    offset: [[f32; PANEL]; PARTS],
}

impl Scales {
    const NONE: Scales = Scales { scale: [[0.0; PANEL]; PARTS], offset: [[0.0; PANEL]; PARTS] };

    /// Scales in the first two bytes of blocks of one part, in binary16; says whether one is no
    /// number.
    ///
    /// # Safety
    /// There are `width` lines, each with `parts` blocks of `bytes` bytes.
    #[inline(always)]
    unsafe fn halves(&mut self, lines: &Lines, width: usize, bytes: usize, parts: usize) -> bool {
        let mut bits = [[0u16; PANEL]; PARTS];
        for (i, line) in lines.iter().enumerate().take(width) {
            for (part, bits) in bits.iter_mut().enumerate().take(parts) {
                // SAFETY: the caller's.
                bits[i] = unsafe { line.add(part * bytes).cast::<u16>().read_unaligned() };
            }
        }
        let mut bad = false;
        for (bits, to) in bits.iter().zip(&mut self.scale).take(parts) {
            for (bits, to) in bits.iter().zip(to) {
                *to = half(u16::from_le(*bits));
                bad |= endless(u16::from_le(*bits));
            }
        }
        bad
    }
}

/// Where numbers of consecutive steps go, two vectors a step.
trait Sink<V> {
    unsafe fn take(&mut self, numbers: [V; TWO]);
}

/// Into the sums of one row.
struct One<V> {
    left: *const f32,
    sums: [V; TWO],
}

impl<V: Codes> Sink<V> for One<V> {
    #[inline(always)]
    unsafe fn take(&mut self, [a, b]: [V; TWO]) {
        // SAFETY: the left line has as many steps as are taken.
        unsafe {
            let left = V::splat(*self.left);
            self.left = self.left.add(1);
            self.sums = [self.sums[0].fma(left, a), self.sums[1].fma(left, b)];
        }
    }
}

/// Into memory, for several rows.
struct Square(*mut f32);

impl<V: Codes> Sink<V> for Square {
    #[inline(always)]
    unsafe fn take(&mut self, [a, b]: [V; TWO]) {
        // SAFETY: there is room for as many steps as are taken.
        unsafe {
            a.store(self.0);
            b.store(self.0.add(V::LANES));
            self.0 = self.0.add(TWO * V::LANES);
        }
    }
}

/// Scales and offsets of two vectors of lines.
#[derive(Clone, Copy)]
struct Of<V> {
    scale: [V; TWO],
    offset: [V; TWO],
}

impl<V: Codes> Of<V> {
    #[inline(always)]
    unsafe fn part(scales: &Scales, part: usize) -> Self {
        let (scale, offset) = (scales.scale[part].as_ptr(), scales.offset[part].as_ptr());
        // SAFETY: a part has numbers for all lanes.
        unsafe {
            Of {
                scale: [V::load(scale), V::load(scale.add(V::LANES))],
                offset: [V::load(offset), V::load(offset.add(V::LANES))],
            }
        }
    }

    /// The scales of codes that are not the numbers, which have no offset.
    #[inline(always)]
    unsafe fn of_signed(self) -> Self {
        // SAFETY: the caller has the instructions; products are exact.
        unsafe {
            let (by, less) = (V::splat(V::SIGNED.0), V::splat(V::SIGNED.1));
            let zero = V::splat(0.0);
            Of { scale: self.scale.map(|x| zero.fma(x, by)), offset: self.scale.map(|x| zero.fma(x, less)) }
        }
    }

    /// The scales times whole numbers `x`; arguments are `(x - offset) / scale`: rounded once,
    /// where a product with the offset would be rounded, too.
    #[inline(always)]
    unsafe fn whole(self, [a, b]: [V; TWO], (by, less): (f32, f32)) -> [V; TWO] {
        // SAFETY: the caller has the instructions; whole numbers are exact.
        unsafe {
            let (by, less, zero) = (V::splat(by), V::splat(less), V::splat(0.0));
            [zero.fma(less.fma(a, by), self.scale[0]), zero.fma(less.fma(b, by), self.scale[1])]
        }
    }

    #[inline(always)]
    unsafe fn number(self, [a, b]: [V; TWO]) -> [V; TWO] {
        // SAFETY: the caller has the instructions.
        unsafe { [self.offset[0].fma(a, self.scale[0]), self.offset[1].fma(b, self.scale[1])] }
    }
}

/// Words of two vectors of lines, four from byte `at` of each.
///
/// # Safety
/// Lines have them.
#[inline(always)]
unsafe fn words<V: Codes>(lines: &Lines, at: usize) -> [[V; 4]; TWO] {
    let lines = lines.as_ptr().cast::<*const f32>();
    // SAFETY: the caller's.
    unsafe { [V::turn_bytes(lines, at), V::turn_bytes(lines.add(V::LANES), at)] }
}

/// Where numbers are in a block.
trait Layout {
    /// Numbers of a block.
    const UNIT: usize;
    /// Its bytes.
    const BYTES: usize;
    /// Steps that are taken at once.
    const GROUP: usize = PART;
    /// Bytes of a row before its blocks.
    const HEAD: usize = 0;
    /// Scales of `steps` steps, from the block where lines begin, of rows that begin there; says
    /// whether one is no number.
    ///
    /// # Safety
    /// Lines have the blocks.
    unsafe fn scales<V: Codes>(rows: &Lines, lines: &Lines, steps: usize, to: &mut Scales) -> bool;
    /// The numbers of a group, step by step.
    ///
    /// # Safety
    /// Lines have its blocks, and the sink has room.
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>);
}

/// Takes the codes of four bits of some words, those from bit `$high` of each byte on.
macro_rules! nibbles {
    ($to:ident, $of:ident, $table:ident, $high:literal, $words:expr) => {
        for w in 0..4 {
            for byte in 0..4 {
                let code = |words: &[V; 4]| words[w].looked(8 * byte + $high, $table);
                let [a, b] = &$words;
                $to.take($of.number([code(a), code(b)]));
            }
        }
    };
}

/// Blocks of 32 codes of four bits, after `at` bytes of a line.
///
/// # Safety
/// As for [`Layout::group`].
#[inline(always)]
unsafe fn fours<V: Codes>(lines: &Lines, at: usize, table: &[f32; 16], of: Of<V>, to: &mut impl Sink<V>) {
    // SAFETY: the caller's.
    unsafe {
        let table = V::table(table);
        let words = words::<V>(lines, at);
        nibbles!(to, of, table, 0, words);
        nibbles!(to, of, table, 4, words);
    }
}

/// `q8_0`.
struct Q8;

impl Layout for Q8 {
    const UNIT: usize = BLOCK;
    const BYTES: usize = 2 + BLOCK;
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, lines: &Lines, steps: usize, to: &mut Scales) -> bool {
        // SAFETY: the caller's.
        unsafe { to.halves(lines, TWO * V::LANES, Self::BYTES, steps / PART) }
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        // SAFETY: the caller's.
        unsafe {
            let of = Of::<V>::part(scales, group).of_signed();
            for half in 0..2 {
                let [a, b] = words::<V>(lines, group * Self::BYTES + 2 + 16 * half);
                for w in 0..4 {
                    for byte in 0..4 {
                        to.take(of.number([a[w].signed(byte), b[w].signed(byte)]));
                    }
                }
            }
        }
    }
}

/// `q4_0`.
struct Q4;

impl Layout for Q4 {
    const UNIT: usize = BLOCK;
    const BYTES: usize = 2 + BLOCK / 2;
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, lines: &Lines, steps: usize, to: &mut Scales) -> bool {
        // SAFETY: the caller's.
        unsafe { to.halves(lines, TWO * V::LANES, Self::BYTES, steps / PART) }
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        const NUMBERS: [f32; 16] =
            [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        // SAFETY: the caller's.
        unsafe { fours(lines, group * Self::BYTES + 2, &NUMBERS, Of::part(scales, group), to) }
    }
}

/// `mxfp4`.
struct Mxfp4;

impl Layout for Mxfp4 {
    const UNIT: usize = BLOCK;
    const BYTES: usize = 1 + BLOCK / 2;
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, lines: &Lines, steps: usize, to: &mut Scales) -> bool {
        let mut bad = false;
        for (i, line) in lines.iter().enumerate().take(TWO * V::LANES) {
            for (part, to) in to.scale.iter_mut().enumerate().take(steps / PART) {
                // SAFETY: the caller's.
                let power = unsafe { *line.add(part * Self::BYTES) };
                bad |= power == 255;
                to[i] = half_of_power(power);
            }
        }
        bad
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        // SAFETY: the caller's.
        unsafe { fours(lines, group * Self::BYTES + 1, &E2M1_NUMBERS, Of::part(scales, group), to) }
    }
}

/// `nvfp4`.
struct Nvfp4;

impl Layout for Nvfp4 {
    const UNIT: usize = NV.0;
    const BYTES: usize = NV.2;
    const HEAD: usize = NV_HEAD;
    const GROUP: usize = NV.0;
    #[inline(always)]
    unsafe fn scales<V: Codes>(rows: &Lines, lines: &Lines, steps: usize, to: &mut Scales) -> bool {
        let mut bad = false;
        for (i, (row, line)) in rows.iter().zip(lines).enumerate().take(TWO * V::LANES) {
            // SAFETY: the caller's: a row begins with its tensor's scale.
            let of_tensor = unsafe { row.cast::<[u8; 4]>().read_unaligned() };
            let of_tensor = f32::from_le_bytes(of_tensor);
            bad |= !of_tensor.is_finite();
            for (part, to) in to.scale.iter_mut().enumerate().take(steps / NV.1) {
                // SAFETY: the caller's.
                let code = unsafe { *line.add(part / 4 * NV.2 + part % 4) };
                bad |= bad_e4m3(code);
                to[i] = e4m3(code) * of_tensor * 0.5;
            }
        }
        bad
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        // SAFETY: the caller's.
        unsafe {
            let table = V::table(&E2M1_NUMBERS);
            for pair in 0..2 {
                let [a, b] = words::<V>(lines, group * NV.2 + 4 + 16 * pair);
                for part in 0..2 {
                    let of = Of::<V>::part(scales, 4 * group + 2 * pair + part);
                    for high in [0, 4] {
                        for w in 2 * part..2 * part + 2 {
                            for byte in 0..4 {
                                let at = 8 * byte + high;
                                to.take(of.number([a[w].looked(at, table), b[w].looked(at, table)]));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The numbers of E2M1, doubled.
const E2M1_NUMBERS: [f32; 16] = {
    let (mut numbers, mut i) = ([0.0; 16], 0);
    while i < 16 {
        numbers[i] = E2M1[i] as f32;
        i += 1;
    }
    numbers
};

/// `q4_k`.
struct Q4K;

impl Layout for Q4K {
    const UNIT: usize = SUPER;
    const BYTES: usize = 4 + 12 + SUPER / 2;
    const GROUP: usize = 2 * PART;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, lines: &Lines, _: usize, to: &mut Scales) -> bool {
        let mut both = Scales::NONE;
        let mut bits = [[0u16; PANEL]; 2];
        for (i, line) in lines.iter().enumerate().take(TWO * V::LANES) {
            // SAFETY: the caller's: a block begins with two scales.
            let read = |at: usize| unsafe { line.add(at).cast::<u16>().read_unaligned() };
            (bits[0][i], bits[1][i]) = (u16::from_le(read(0)), u16::from_le(read(2)));
        }
        let mut bad = false;
        for i in 0..PANEL {
            bad |= endless(bits[0][i]) | endless(bits[1][i]);
            (both.scale[0][i], both.offset[0][i]) = (half(bits[0][i]), -half(bits[1][i]));
        }
        // SAFETY: the caller's; products are exact.
        unsafe {
            let Of { scale, offset } = Of::<V>::part(&both, 0);
            let (zero, sixteen) = (V::splat(0.0), V::splat(16.0));
            for (g, words) in words::<V>(lines, 0).into_iter().enumerate() {
                let [_, low, middle, high] = words;
                for part in 0..4 {
                    let at = 8 * part as u32;
                    let top = |word: V| word.field(at + 6, 2);
                    let fields = [
                        (part, low.field(at, 6), middle.field(at, 6)),
                        (
                            4 + part,
                            high.field(at, 4).fma(sixteen, top(low)),
                            high.field(at + 4, 4).fma(sixteen, top(middle)),
                        ),
                    ];
                    for (part, s, m) in fields {
                        zero.fma(scale[g], s).store(to.scale[part].as_mut_ptr().add(g * V::LANES));
                        zero.fma(offset[g], m).store(to.offset[part].as_mut_ptr().add(g * V::LANES));
                    }
                }
            }
        }
        bad
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        const NUMBERS: [f32; 16] =
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
        let per = SUPER / Self::GROUP;
        let at = group / per * Self::BYTES + 16 + group % per * 32;
        // SAFETY: the caller's.
        unsafe {
            let table = V::table(&NUMBERS);
            let (first, last) = (words::<V>(lines, at), words::<V>(lines, at + 16));
            let of = Of::<V>::part(scales, 2 * group);
            nibbles!(to, of, table, 0, first);
            nibbles!(to, of, table, 0, last);
            let of = Of::<V>::part(scales, 2 * group + 1);
            nibbles!(to, of, table, 4, first);
            nibbles!(to, of, table, 4, last);
        }
    }
}

/// `f16`.
struct F16;

impl Layout for F16 {
    const UNIT: usize = PART;
    const BYTES: usize = 2 * PART;
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, _: &Lines, _: usize, _: &mut Scales) -> bool {
        false
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, _: &Scales, to: &mut impl Sink<V>) {
        // SAFETY: the caller's.
        unsafe {
            for quarter in 0..4 {
                let [a, b] = words::<V>(lines, group * Self::BYTES + 16 * quarter);
                for w in 0..4 {
                    to.take([a[w].first_half(), b[w].first_half()]);
                    to.take([a[w].second_half(), b[w].second_half()]);
                }
            }
        }
    }
}

/// `int8`, 32 numbers of a row at a time.
struct Int8;

impl Layout for Int8 {
    const UNIT: usize = PART;
    const BYTES: usize = PART;
    const HEAD: usize = 4;
    #[inline(always)]
    unsafe fn scales<V: Codes>(rows: &Lines, _: &Lines, _: usize, to: &mut Scales) -> bool {
        let mut bad = false;
        for (i, row) in rows.iter().enumerate().take(TWO * V::LANES) {
            // SAFETY: the caller's: a row begins with its scale.
            let scale = f32::from_le_bytes(unsafe { row.cast::<[u8; 4]>().read_unaligned() });
            bad |= !scale.is_finite();
            to.scale[0][i] = scale;
        }
        bad
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        // SAFETY: the caller's.
        unsafe {
            let of = Of::<V>::part(scales, 0);
            for half in 0..2 {
                let [a, b] = words::<V>(lines, group * Self::BYTES + 16 * half);
                for w in 0..4 {
                    for byte in 0..4 {
                        to.take(of.whole([a[w].signed(byte), b[w].signed(byte)], V::SIGNED));
                    }
                }
            }
        }
    }
}

/// `q6_k`.
struct Q6K;

impl Layout for Q6K {
    const UNIT: usize = SUPER;
    const BYTES: usize = 128 + 64 + 16 + 2;
    const GROUP: usize = 2 * PART;
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn scales<V: Codes>(_: &Lines, lines: &Lines, _: usize, to: &mut Scales) -> bool {
        let (mut bad, mut of_block) = (false, [0.0f32; PANEL]);
        for (i, line) in lines.iter().enumerate().take(TWO * V::LANES) {
            // SAFETY: the caller's: a block ends with its scale.
            let bits = u16::from_le(unsafe { line.add(Self::BYTES - 2).cast::<u16>().read_unaligned() });
            bad |= endless(bits);
            of_block[i] = half(bits);
        }
        // SAFETY: the caller's; products of eleven bits and eight are exact.
        unsafe {
            let (by, less) = (V::splat(V::SIGNED.0), V::splat(V::SIGNED.1));
            for (g, words) in words::<V>(lines, 128 + 64).into_iter().enumerate() {
                let own = V::load(of_block.as_ptr().add(g * V::LANES));
                for part in 0..PARTS {
                    let small = less.fma(words[part / 4].signed(part as u32 % 4), by);
                    let scale = V::splat(0.0).fma(own, small);
                    scale.store(to.scale[part].as_mut_ptr().add(g * V::LANES));
                }
            }
        }
        bad
    }
    #[inline(always)]
    unsafe fn group<V: Codes>(lines: &Lines, group: usize, scales: &Scales, to: &mut impl Sink<V>) {
        let per = SUPER / Self::GROUP;
        let (block, half, pair) = (group / per * Self::BYTES, group % per / 2, group % 2);
        // SAFETY: the caller's.
        unsafe {
            let above = [0, 1].map(|part| words::<V>(lines, block + 128 + 32 * half + 16 * part));
            for turn in 0..2 {
                let quarter = 2 * pair + turn;
                for (part, [c, d]) in above.into_iter().enumerate() {
                    let [a, b] = words::<V>(lines, block + 64 * half + 32 * turn + 16 * part);
                    let of = Of::<V>::part(scales, 8 * half + 2 * quarter + part);
                    for w in 0..4 {
                        let at = (4 * pair as u32, 2 * quarter as u32);
                        let (a, b) = (a[w].sixes(c[w], at.0, at.1), b[w].sixes(d[w], at.0, at.1));
                        for byte in 0..4 {
                            let (by, less) = V::BYTE;
                            to.take(of.whole([a.byte(byte), b.byte(byte)], (by, less - 32.0)));
                        }
                    }
                }
            }
        }
    }
}

/// Lines of blocks of a product.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// As many lines as [`Run::width`].
    pub(super) lines: Lines,
    /// Bytes to as many lines after them.
    pub(super) next: usize,
}

/// Products of `m` rows with lines of `k` steps: into totals, or added to them; says whether a
/// scale is no number.
///
/// # Safety
/// `m` is at most [`FEW`], and that many left lines have `k` steps; lines have whole blocks for
/// them.
type Sums = unsafe fn((usize, usize), &Left, &Blocks, bool, &mut Totals) -> bool;

/// The products of a format on this processor.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// Lines at once.
    pub(super) width: usize,
    /// Steps are multiples of this.
    pub(super) unit: usize,
    pub(super) sums: Sums,
}

/// The products of a format, whose codes become numbers in registers.
pub(super) fn run(format: Packed) -> Run {
    match format {
        Packed::F16 => of::<F16>(),
        Packed::Int8(_) => of::<Int8>(),
        Packed::Q6K => of::<Q6K>(),
        Packed::Q8 => of::<Q8>(),
        Packed::Q4 => of::<Q4>(),
        Packed::Mxfp4 => of::<Mxfp4>(),
        Packed::Nvfp4(_) => of::<Nvfp4>(),
        Packed::Q4K => of::<Q4K>(),
    }
}

fn of<F: Layout>() -> Run {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
    unsafe fn avx512<F: Layout>(
        size: (usize, usize),
        a: &Left,
        b: &Blocks,
        fresh: bool,
        to: &mut Totals,
    ) -> bool {
        // SAFETY: the caller's.
        unsafe { sums::<super::x86::Sixteen, F>(size, a, b, fresh, to) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<F: Layout>(
        size: (usize, usize),
        a: &Left,
        b: &Blocks,
        fresh: bool,
        to: &mut Totals,
    ) -> bool {
        // SAFETY: the caller's.
        unsafe { sums::<super::x86::Eight, F>(size, a, b, fresh, to) }
    }

    let (lanes, sums): (usize, Sums) = match level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => (super::x86::Sixteen::LANES, avx512::<F>),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => (super::x86::Eight::LANES, avx2::<F>),
        #[cfg(target_arch = "aarch64")]
        Level::Portable => (super::neon::Quad::LANES, sums::<super::neon::Quad, F>),
        #[cfg(not(target_arch = "aarch64"))]
        Level::Portable => (Four::LANES, sums::<Four, F>),
    };
    Run { width: TWO * lanes, unit: F::UNIT, sums }
}

/// # Safety
/// As for [`Sums`]; the processor has the vectors.
#[inline(always)]
unsafe fn sums<V: Codes, F: Layout>(
    (m, k): (usize, usize),
    a: &Left,
    b: &Blocks,
    fresh: bool,
    to: &mut Totals,
) -> bool {
    let width = TWO * V::LANES;
    let mut scales = Scales::NONE;
    let mut square = [0.0f32; 2 * PART * PANEL];
    let (mut several, mut bad) = ([0.0f32; FEW * PANEL], false);
    let (row, chunk) = (F::HEAD + k / F::UNIT * F::BYTES, DEPTH / F::UNIT * F::BYTES);
    for done in (0..k).step_by(DEPTH) {
        let steps = DEPTH.min(k - done);
        let at = F::HEAD + done / F::UNIT * F::BYTES;
        ask(&b.lines[..width], at + AHEAD, chunk, row, b.next);
        let lines = b.lines.map(|line| line.wrapping_add(at));
        let add = !fresh || done > 0;
        // SAFETY: the caller's: lines have the blocks of these steps; `square` has room for a
        // group; rows of `to` and of `several` are `PANEL` apart.
        unsafe {
            bad |= F::scales::<V>(&b.lines, &lines, steps, &mut scales);
            if m == 1 {
                let mut one = One { left: a[0].add(done), sums: [V::splat(0.0); TWO] };
                for group in 0..steps / F::GROUP {
                    F::group::<V>(&lines, group, &scales, &mut one);
                }
                for (g, sum) in one.sums.into_iter().enumerate() {
                    let to = to.as_mut_ptr().add(g * V::LANES);
                    let sum = if add { V::load(to).plus(sum) } else { sum };
                    sum.store(to);
                }
                continue;
            }
            several[..m * PANEL].fill(0.0);
            for group in 0..steps / F::GROUP {
                F::group::<V>(&lines, group, &scales, &mut Square(square.as_mut_ptr()));
                rows::<V>(m, F::GROUP, a, done + group * F::GROUP, &square, &mut several);
            }
        }
        for (to, sum) in to.iter_mut().zip(&several).take(m * PANEL) {
            *to = if add { *to + sum } else { *sum };
        }
    }
    bad
}

/// Adds the products of some steps to the sums of all rows.
///
/// # Safety
/// `a` has `m` lines with the steps from `first` on, and `square` has `steps`.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn rows<V: Codes>(
    m: usize,
    steps: usize,
    a: &Left,
    first: usize,
    square: &[f32],
    sums: &mut [f32; FEW * PANEL],
) {
    let mut row = 0;
    macro_rules! of {
        ($($m:literal)*) => {$(
            while m - row >= $m {
                let sums = sums[row * PANEL..].as_mut_ptr();
                // SAFETY: the caller's: `$m` rows from `row` on.
                unsafe {
                    let at = |i: usize, g: usize| sums.add(i * PANEL + g * V::LANES);
                    let mut all = [[V::splat(0.0); TWO]; $m];
                    for i in 0..$m {
                        all[i] = [V::load(at(i, 0)), V::load(at(i, 1))];
                    }
                    let mut right = square.as_ptr();
                    for s in first..first + steps {
                        let (x, y) = (V::load(right), V::load(right.add(V::LANES)));
                        for i in 0..$m {
                            let left = V::splat(*a[row + i].add(s));
                            all[i] = [all[i][0].fma(left, x), all[i][1].fma(left, y)];
                        }
                        right = right.add(TWO * V::LANES);
                    }
                    for i in 0..$m {
                        all[i][0].store(at(i, 0));
                        all[i][1].store(at(i, 1));
                    }
                }
                row += $m;
            }
        )*};
    }
    of!(4 2 1);
}

/// Asks for `bytes` bytes of all lines of `row` bytes, from byte `at` on, or as far into the lines
/// that are `next` bytes after them.
#[inline(always)]
fn ask(_lines: &[*const u8], at: usize, bytes: usize, row: usize, next: usize) {
    for at in (at..at + bytes).step_by(CACHED) {
        let _from = if at < row { at } else { next + (at - row) };
        #[cfg(target_arch = "x86_64")]
        for line in _lines {
            // SAFETY: SSE is part of the architecture, and the instruction reads nothing that a
            // program could see.
            unsafe {
                use std::arch::x86_64::*;
                _mm_prefetch::<_MM_HINT_T0>(line.cast::<i8>().wrapping_add(_from));
            }
        }
    }
}

#[cfg(all(test, target_arch = "aarch64"))]
mod tests {
    use super::*;

    /// Sums of a format by vectors, their bits, and whether a scale is no number.
    fn bits<V: Codes, F: Layout>(format: Packed, m: usize, k: usize, bytes: &[u8]) -> (Vec<u32>, bool) {
        let values: Vec<f32> = (0..m * k).map(|i| ((i * 37 + 11) % 509) as f32 / 251.7 - 1.0).collect();
        let mut left = [std::ptr::null(); FEW];
        left.iter_mut().zip(values.chunks(k)).for_each(|(left, row)| *left = row.as_ptr());
        let row = k / format.unit() * format.bytes();
        let width = TWO * V::LANES;
        let line = |i: usize| bytes[i.min(width - 1) * row..].as_ptr();
        let blocks = Blocks { lines: std::array::from_fn(line), next: 0 };
        let mut totals = [0.0; FEW * PANEL];
        // SAFETY: left lines have `k` steps, and so have as many lines of blocks as two vectors.
        let bad = unsafe { sums::<V, F>((m, k), &left, &blocks, true, &mut totals) };
        let of = |row: &[f32]| row[..width].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        (totals.chunks(PANEL).take(m).flat_map(of).collect(), bad)
    }

    fn agrees<F: Layout>(name: &str, k: usize) {
        let format = Packed::named(name, k as u64).unwrap();
        let values: Vec<f32> = (0..8 * k).map(|i| ((i * 97 + 5) % 1013) as f32 / 501.7 - 1.0).collect();
        let (mut bytes, mut seen) = (vec![], 0);
        format.pack(&values, &mut bytes).unwrap();
        for m in [1, 3, 8] {
            let (found, bad) = bits::<super::super::neon::Quad, F>(format, m, k, &bytes);
            assert_eq!((&found, bad), (&bits::<Four, F>(format, m, k, &bytes).0, false), "{name}, {m} rows");
            seen += found.iter().filter(|x| f32::from_bits(**x) != 0.0).count();
        }
        assert!(seen > 50, "{name}: most sums are zero");
    }

    /// Vectors of NEON have the bits of the portable ones, in every format.
    #[test]
    fn vectors_of_neon_have_the_portable_bits() {
        agrees::<F16>("f16", 288);
        agrees::<Int8>("int8", 288);
        agrees::<Q8>("q8_0", 544);
        agrees::<Q4>("q4_0", 544);
        agrees::<Mxfp4>("mxfp4", 544);
        agrees::<Nvfp4>("nvfp4", 320);
        agrees::<Q4K>("q4_k", 512);
        agrees::<Q6K>("q6_k", 512);
    }

    /// Every half and every signed byte, at every place of a word, is the number that it stands
    /// for.
    #[test]
    fn words_are_their_numbers() {
        use super::super::neon::Quad;
        for bits in 0..=u16::MAX {
            let word = f32::from_bits(u32::from(bits) << 16 | u32::from(bits ^ 0x5a5a));
            // SAFETY: NEON is part of the architecture.
            unsafe {
                let both = |x: Quad, y: Four| {
                    let (mut a, mut b) = ([0.0f32; 4], [0.0f32; 4]);
                    x.store(a.as_mut_ptr());
                    y.store(b.as_mut_ptr());
                    assert_eq!(a.map(f32::to_bits), b.map(f32::to_bits), "{bits:#x}");
                };
                let (x, y) = (Quad::splat(word), Four::splat(word));
                both(x.first_half(), y.first_half());
                both(x.second_half(), y.second_half());
                for byte in 0..4 {
                    both(x.signed(byte), y.signed(byte));
                    both(x.byte(byte), y.byte(byte));
                }
            }
        }
    }
}
