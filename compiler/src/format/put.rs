//! Single numbers of a block, under the scales that it has.
//!
//! *In*: a block, a place in it and a number. *Out*: the block with the code of the nearest number
//! there, and that number. *Promise*: no other number of the block changes.

use super::nvfp4::{self, NV, NV_HEAD};
use super::packed::{BLOCK, E2M1, Packed, eight_of, nearest_e2m1};
use super::super_block::six;
use half::f16;

/// Four bits of a byte, the upper ones where `high`.
fn nibble(byte: &mut u8, high: bool, code: u8) {
    *byte = if high { *byte & 15 | code << 4 } else { *byte & 0xf0 | code };
}

/// The whole number nearest to `x / by` between two; 0 where there is nothing to divide by.
fn nearest(x: f32, by: f32, least: f32, most: f32) -> f32 {
    let ratio = x / by;
    if ratio.is_finite() { ratio.round().clamp(least, most) } else { 0f32.clamp(least, most) }
}

impl Packed {
    /// Puts the number nearest to `x` that the scales of a block allow in place `at` of it, and
    /// returns that number. `x` is finite.
    pub fn put(self, block: &mut [u8], at: usize, x: f32) -> f32 {
        let scale = self.scale(block);
        match self {
            Packed::F16 => {
                let most = f16::MAX.to_f32();
                let near = f16::from_f32(x.clamp(-most, most));
                block.copy_from_slice(&near.to_le_bytes());
                near.to_f32()
            }
            Packed::Int8(_) | Packed::Q8 => {
                let head = self.bytes() - self.unit();
                let code = nearest(x, scale, -127.0, 127.0) as i8 as u8;
                block[head + at] = code;
                eight_of(code, scale)
            }
            Packed::Q4 => {
                let code = nearest(x, scale, -8.0, 7.0);
                nibble(&mut block[2 + at % (BLOCK / 2)], at >= BLOCK / 2, (code + 8.0) as u8);
                code * scale
            }
            Packed::Mxfp4 => {
                let code = nearest_e2m1(x, scale);
                nibble(&mut block[1 + at % (BLOCK / 2)], at >= BLOCK / 2, code);
                f32::from(E2M1[usize::from(code)]) * scale
            }
            Packed::Nvfp4(_) => {
                let own = &mut block[NV_HEAD + at / NV.0 * NV.2..][..NV.2];
                let (part, inside) = (at % NV.0 / NV.1, at % NV.1);
                let half = nvfp4::e4m3(own[part]) * scale * 0.5;
                let code = nearest_e2m1(x, half);
                nibble(&mut own[4 + 8 * part + inside % 8], inside >= 8, code);
                f32::from(E2M1[usize::from(code)]) * half
            }
            Packed::Q4K => {
                let (s, m) = six(&block[4..16], at / 32);
                let offset = f16::from_le_bytes([block[2], block[3]]).to_f32();
                let (s, m) = (scale * f32::from(s), offset * f32::from(m));
                let code = nearest(x + m, s, 0.0, 15.0);
                nibble(&mut block[16 + 32 * (at / 64) + at % 32], at % 64 >= 32, code as u8);
                s * code - m
            }
            Packed::Q6K => {
                let (half, quarter, i) = (at / 128, at % 128 / 32, at % 32);
                let s = scale * f32::from(block[192 + at / 16] as i8);
                let q = nearest(x, s, -32.0, 31.0);
                let code = (q as i32 + 32) as u8;
                nibble(&mut block[64 * half + 32 * (quarter % 2) + i], quarter >= 2, code & 15);
                let high = &mut block[128 + 32 * half + i];
                *high = *high & !(3 << (2 * quarter)) | code >> 4 << (2 * quarter);
                s * q
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that is put unpacks again, no number of the place is nearer, and no other
    /// changes.
    #[test]
    fn the_nearest_number_is_put_and_no_other_changes() {
        for name in Packed::NAMES {
            let packed = Packed::named(name, 128).unwrap();
            let unit = packed.unit();
            let own: Vec<f32> = (0..unit).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect();
            let mut block = vec![];
            packed.pack(&own, &mut block).unwrap();
            let (mut before, mut after) = (vec![0.0; unit], vec![0.0; unit]);
            for at in 0..unit {
                packed.unpack(&block, &mut before);
                for step in 0..23 {
                    let x = step as f32 / 10.0 - 1.1;
                    let found = packed.put(&mut block, at, x);
                    packed.unpack(&block, &mut after);
                    assert_eq!(after[at].to_bits(), found.to_bits(), "{name}: {x} at {at}");
                    let same = |i: &usize| before[*i].to_bits() == after[*i].to_bits();
                    assert!((0..unit).filter(|i| *i != at).all(|i| same(&i)), "{name}: {x} at {at}");
                }
                // Of all numbers that the place can hold.
                let mut all = vec![];
                for step in -400..400 {
                    all.push(packed.put(&mut block, at, step as f32 / 100.0));
                }
                for x in [-0.93f32, -0.31, 0.0, 0.07, 0.5, 1.2] {
                    let found = packed.put(&mut block, at, x);
                    let least = all.iter().map(|y| (x - y).abs()).fold(f32::INFINITY, f32::min);
                    assert!((x - found).abs() <= least * 1.0001, "{name}: {x} became {found}");
                }
            }
        }
    }
}
