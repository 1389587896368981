//! Blocks of 256 numbers, whose parts have small scales of one large one: `q4_k` and `q6_k`.
//!
//! | format | parts | a part | bytes |
//! |---|---|---|---|
//! | `q4_k` | 8 of 32 | `d · s · q - e · m`, `s` and `m` in six bits, `q` in four | f16 `d`, f16 `e`, 12, 128 |
//! | `q6_k` | 16 of 16 | `d · s · q`, `s` in eight bits, `q` in six, less 32 | 128, 64, 16, f16 `d` |
//!
//! Numbers are rounded to the nearest of their part; the scale and the offset of a part are chosen
//! among the obvious ones and some near them, for the least squared error.

use super::packed::half_scale;
use half::f16;

/// Numbers of a block.
pub const SUPER: usize = 256;
/// Bytes of a block of `q4_k`.
pub(super) const Q4K_BYTES: usize = 4 + 12 + 128;
/// Bytes of a block of `q6_k`.
pub(super) const Q6K_BYTES: usize = 128 + 64 + 16 + 2;

/// Numbers of a part of `q4_k`, and of `q6_k`.
const PARTS: (usize, usize) = (32, 16);

/// The scale and the offset of a part of `q4_k`, in six bits each.
#[inline(always)]
pub(super) fn six(bits: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (bits[part] & 63, bits[part + 4] & 63);
    }
    let (low, scale, offset) = (bits[part + 4], bits[part - 4] >> 6, bits[part] >> 6);
    (low & 15 | scale << 4, low >> 4 | offset << 4)
}

/// The numbers of a block of `q4_k`, whose two scales these are.
#[inline(always)]
pub fn unpack_q4_k(block: &[u8; Q4K_BYTES], [scale, offset]: [f32; 2], to: &mut [f32; SUPER]) {
    let bits = &block[4..16];
    for pair in 0..4 {
        let codes = &block[16 + 32 * pair..][..32];
        for (high, shift) in [(0, 0), (1, 4)] {
            let (s, m) = six(bits, 2 * pair + high);
            let (s, m) = (scale * f32::from(s), offset * f32::from(m));
            let to = &mut to[64 * pair + 32 * high..][..32];
            for (to, code) in to.iter_mut().zip(codes) {
                *to = s * f32::from(code >> shift & 15) - m;
            }
        }
    }
}

/// The numbers of a block of `q6_k`, whose scale this is.
#[inline(always)]
pub fn unpack_q6_k(block: &[u8; Q6K_BYTES], scale: f32, to: &mut [f32; SUPER]) {
    for half in 0..2 {
        let (low, high) = (&block[64 * half..][..64], &block[128 + 32 * half..][..32]);
        let scales = &block[192 + 8 * half..][..8];
        for quarter in 0..4 {
            let (low, to) = (&low[32 * (quarter % 2)..][..32], &mut to[128 * half + 32 * quarter..][..32]);
            let (four, two) = (4 * (quarter / 2), 2 * quarter);
            for part in 0..2 {
                let s = scale * f32::from(scales[2 * quarter + part] as i8);
                for i in 16 * part..16 * part + 16 {
                    let code = low[i] >> four & 15 | (high[i] >> two & 3) << 4;
                    to[i] = s * (i32::from(code) - 32) as f32;
                }
            }
        }
    }
}

/// A binary16 number rounded from this.
fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// `x / by`, 0 where there is nothing to divide by.
fn ratio(x: f32, by: f32) -> f32 {
    let found = x / by;
    if found.is_finite() { found } else { 0.0 }
}

/// The scale and the offset, neither below zero, of codes from 0 to 15 for a part of `q4_k`.
fn fit(part: &[f32]) -> (f32, f32) {
    let low = part.iter().fold(0f32, |least, x| least.min(*x));
    let high = part.iter().fold(low, |most, x| most.max(*x));
    let mut best = (f64::INFINITY, (high - low) / 15.0, -low);
    for step in 0..20 {
        let by = ratio(14.5 + 0.1 * step as f32, high - low);
        let codes = part.iter().map(|x| f64::from(((x - low) * by).round().clamp(0.0, 15.0)));
        // Least squares of `scale · code - offset`.
        let (mut n, mut c, mut cc, mut x, mut cx) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (code, value) in codes.clone().zip(part.iter().map(|x| f64::from(*x))) {
            (n, c, cc, x, cx) = (n + 1.0, c + code, cc + code * code, x + value, cx + code * value);
        }
        let det = n * cc - c * c;
        let (scale, offset) = match det > 0.0 {
            true => ((n * cx - c * x) / det, (c * cx - cc * x) / det),
            false => continue,
        };
        // An offset below zero has no code: the least squares without one.
        let (scale, offset) = if offset < 0.0 { (cx / cc, 0.0) } else { (scale, offset) };
        let error: f64 = codes.zip(part).map(|(q, x)| (scale * q - offset - f64::from(*x)).powi(2)).sum();
        if scale >= 0.0 && error < best.0 {
            best = (error, scale as f32, offset as f32);
        }
    }
    (best.1, best.2)
}

/// Appends a block of `q4_k`; `None` where a scale has no binary16.
pub(super) fn pack_q4_k(block: &[f32], to: &mut Vec<u8>) -> Option<()> {
    let fits: Vec<(f32, f32)> = block.chunks_exact(PARTS.0).map(fit).collect();
    let most = |of: fn(&(f32, f32)) -> f32| fits.iter().map(of).fold(0f32, f32::max) / 63.0;
    let (scale, offset) = (most(|fit| fit.0), most(|fit| fit.1));
    half_scale(scale, to)?;
    half_scale(offset, to)?;
    let (scale, offset) = (rounded(scale), rounded(offset));
    let mut bits = [0u8; 12];
    let mut codes = [0u8; SUPER];
    for (part, (own, low)) in fits.iter().enumerate() {
        let s = ratio(*own, scale).round().clamp(0.0, 63.0) as u8;
        let m = ratio(*low, offset).round().clamp(0.0, 63.0) as u8;
        if part < 4 {
            bits[part] |= s;
            bits[part + 4] |= m;
        } else {
            bits[part + 4] = s & 15 | (m & 15) << 4;
            bits[part - 4] |= s >> 4 << 6;
            bits[part] |= m >> 4 << 6;
        }
        let (step, low) = (scale * f32::from(s), offset * f32::from(m));
        let range = PARTS.0 * part..PARTS.0 * (part + 1);
        for (code, x) in codes[range.clone()].iter_mut().zip(&block[range]) {
            *code = ratio(x + low, step).round().clamp(0.0, 15.0) as u8;
        }
    }
    to.extend(bits);
    for pair in codes.chunks_exact(64) {
        to.extend((0..32).map(|i| pair[i] | pair[i + 32] << 4));
    }
    Some(())
}

/// Appends a block of `q6_k`; `None` where its scale has no binary16.
pub(super) fn pack_q6_k(block: &[f32], to: &mut Vec<u8>) -> Option<()> {
    let own = |part: &[f32]| {
        // The largest, with its sign, is -32.
        let worst = part.iter().fold(0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
        worst / -32.0
    };
    let scales: Vec<f32> = block.chunks_exact(PARTS.1).map(own).collect();
    let largest = scales.iter().fold(0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    let mut half = vec![];
    half_scale(largest / -128.0, &mut half)?;
    let scale = rounded(largest / -128.0);
    let (mut codes, mut small) = ([32u8; SUPER], [0u8; 16]);
    for (part, own) in scales.iter().enumerate() {
        let s = ratio(*own, scale).round().clamp(-128.0, 127.0) as i8;
        small[part] = s as u8;
        let range = PARTS.1 * part..PARTS.1 * (part + 1);
        for (code, x) in codes[range.clone()].iter_mut().zip(&block[range]) {
            let q = ratio(*x, scale * f32::from(s)).round().clamp(-32.0, 31.0);
            *code = (q as i32 + 32) as u8;
        }
    }
    for half in codes.chunks_exact(128) {
        to.extend((0..64).map(|i| half[i] & 15 | (half[i + 64] & 15) << 4));
    }
    for half in codes.chunks_exact(128) {
        to.extend((0..32).map(|i| (0..4).fold(0, |bits, q| bits | half[i + 32 * q] >> 4 << (2 * q))));
    }
    to.extend(small);
    to.extend(half);
    Some(())
}
