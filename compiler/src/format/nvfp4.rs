//! Rows of `nvfp4`: numbers in E2M1, a scale in E4M3 for 16 of them, and one in f32 for the tensor.
//!
//! | bytes of a row | |
//! |---|---|
//! | 4 | the tensor's scale `t`, in f32: all rows of a tensor repeat it |
//! | 36 for 64 numbers | four scales `s` in E4M3, then 32 bytes of codes: for each scale 8, element `i` low and `i + 8` high |
//!
//! A number is `e · s · t`, as in NVIDIA's Model Optimizer: `t` is the largest number of the tensor
//! by `6 · 448`, so that the largest scale is the largest of E4M3. The 36 bytes are those of
//! llama.cpp (`block_nvfp4`), which has `t` elsewhere. With `t` in the row, whoever has a row has
//! all that it needs.

use super::packed::{E2M1, nearest_e2m1};

/// Numbers of a block, of a scale in it, and bytes of it.
pub const NV: (usize, usize, usize) = (64, 16, 36);
/// Bytes of the tensor's scale.
pub const NV_HEAD: usize = 4;
/// The largest number of E2M1, and of E4M3.
const LARGEST: (f32, f32) = (6.0, 448.0);

/// Whether a scale is NaN, or below zero, which no scale is.
#[inline(always)]
pub fn bad_e4m3(code: u8) -> bool {
    code >= 0x7f
}

/// The number of a scale: seven bits, a sign is not read.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    let code = u32::from(code & 0x7f);
    // Of numbers below the normal ones, too: a product with a power of two is exact.
    f32::from_bits(code << 20) * f32::from_bits(247 << 23)
}

/// The code of the scale nearest to a number that is not below zero; to even between two.
fn nearest_e4m3(x: f32) -> u8 {
    let x = x.min(LARGEST.1);
    if x < 1.0 / 64.0 {
        return (x * 512.0).round_ties_even() as u8;
    }
    let bits = x.to_bits() - (120 << 23);
    ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) as u8
}

/// The numbers of blocks, the tensor's scale being this; says whether one of theirs is no number.
#[inline(always)]
pub fn unpack_nvfp4(blocks: &[u8], scale: f32, to: &mut [f32], number: impl Fn(u8) -> f32) -> bool {
    let mut bad = false;
    for (block, to) in blocks.as_chunks::<{ NV.2 }>().0.iter().zip(to.as_chunks_mut::<{ NV.0 }>().0) {
        for part in 0..4 {
            bad |= bad_e4m3(block[part]);
            // Codes are doubled.
            let scale = e4m3(block[part]) * scale * 0.5;
            let (codes, to) = (&block[4 + 8 * part..][..8], &mut to[NV.1 * part..][..NV.1]);
            for i in 0..8 {
                to[i] = number(codes[i] & 15) * scale;
                to[i + 8] = number(codes[i] >> 4) * scale;
            }
        }
    }
    bad
}

/// Appends a row whose scales are `by` codes above the nearest; `largest` is the largest size of a
/// number of its tensor.
pub(super) fn pack_nvfp4(row: &[f32], largest: f32, by: i32, to: &mut Vec<u8>) {
    let of_tensor = largest / (LARGEST.0 * LARGEST.1);
    to.extend(of_tensor.to_le_bytes());
    for block in row.chunks_exact(NV.0) {
        let parts = block.chunks_exact(NV.1);
        let own = |part: &[f32]| {
            let most = part.iter().fold(0f32, |most, x| most.max(x.abs()));
            let scale = most / LARGEST.0 / of_tensor;
            let code = if scale.is_finite() { nearest_e4m3(scale) } else { 0 };
            (i32::from(code) + by).clamp(0, 0x7e) as u8
        };
        let scales: Vec<u8> = parts.clone().map(own).collect();
        to.extend(&scales);
        for (part, scale) in parts.zip(scales) {
            let scale = e4m3(scale) * of_tensor * 0.5;
            let code = |x: f32| nearest_e2m1(x, scale);
            to.extend((0..8).map(|i| code(part[i]) | code(part[i + 8]) << 4));
        }
    }
}

/// The numbers of a row by the table.
pub(super) fn unpack_row(row: &[u8], scale: f32, to: &mut [f32]) {
    unpack_nvfp4(&row[NV_HEAD..], scale, to, |code| f32::from(E2M1[usize::from(code)]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Packed;

    /// Rows are those of `tests/reference/nvfp4.py`, which tries every code in exact fractions.
    #[test]
    fn rows_are_those_of_the_reference() {
        let golden = include_str!("../../../tests/goldens/formats/nvfp4.txt");
        let bytes = |digits: &str| -> Vec<u8> {
            let pair = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
            (0..digits.len()).step_by(2).map(pair).collect()
        };
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let (mut numbers, mut packed, mut back) = (vec![], vec![], vec![]);
        for line in golden.lines() {
            let parts: Vec<Vec<u8>> = line.split(' ').map(bytes).collect();
            numbers.extend(words(&parts[0]).into_iter().map(f32::from_bits));
            packed.extend(parts[1].clone());
            back.extend(words(&parts[2]));
        }
        let row = numbers.len() / golden.lines().count();
        let format = Packed::named("nvfp4", row as u64).unwrap();
        let (mut found, mut unpacked) = (vec![], vec![0.0; numbers.len()]);
        format.pack(&numbers, &mut found).unwrap();
        assert_eq!(found, packed);
        format.unpack(&found, &mut unpacked);
        let bits: Vec<u32> = unpacked.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, back);
        assert_eq!(Packed::of_bytes("nvfp4", format.bytes() as u64), Some(format));
    }

    /// Every code is the number nearest to itself, numbers grow with codes, and between two of them
    /// the nearer is found, the even one in the middle.
    #[test]
    fn scales_are_rounded_to_the_nearest() {
        for code in 0..0x7fu8 {
            let x = e4m3(code);
            assert_eq!(nearest_e4m3(x), code, "{code:#x}");
            if code < 0x7e {
                let next = e4m3(code + 1);
                assert!(x < next);
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(nearest_e4m3((x + next) / 2.0), even, "after {code:#x}");
                assert_eq!(nearest_e4m3(x + (next - x) * 0.4), code, "after {code:#x}");
                assert_eq!(nearest_e4m3(x + (next - x) * 0.6), code + 1, "after {code:#x}");
            }
        }
        assert_eq!((e4m3(0x7e), e4m3(0x38), e4m3(1)), (448.0, 1.0, 1.0 / 512.0));
        assert!(bad_e4m3(0x7f) && bad_e4m3(0xff) && bad_e4m3(0x80) && !bad_e4m3(0x7e));
        assert_eq!(nearest_e4m3(1e9), 0x7e);
    }
}
