//! Packed numbers: the one home of their layouts.
//!
//! *In*: f32 numbers, or the bytes of blocks. *Out*: the other. *Promise*: the layouts are those of
//! llama.cpp (`ggml-common.h`), numbers are rounded to the nearest that a block has, and a block
//! unpacks to `scale · q` in f32, rounded once. A number that a block cannot hold is an error.
//!
//! | format | a block | bytes | numbers |
//! |---|---|---|---|
//! | `f16` | one number | 2 | IEEE binary16 |
//! | `int8` | a row | row + 4 | f32 scale, then `q` from -127 to 127 |
//! | `q8_0` | 32 | 34 | f16 scale, then `q` from -127 to 127 |
//! | `q4_0` | 32 | 18 | f16 scale, then `q + 8` in four bits, element `i` low and `i + 16` high |
//! | `mxfp4` | 32 | 17 | scale `2^(e - 127)`, then E2M1 in four bits, in the same order |
//! | `nvfp4` | a row | 4 + 9 row / 16 | [`nvfp4`]: E2M1, scales in E4M3 for 16, one in f32 |
//! | `q4_k` | 256 | 144 | [`super_block`]: parts of 32 with scales and offsets of six bits |
//! | `q6_k` | 256 | 210 | [`super_block`]: parts of 16 with scales of eight bits |

use super::nvfp4::{self, NV, NV_HEAD, bad_e4m3};
use super::super_block::{self, Q4K_BYTES, Q6K_BYTES, SUPER, unpack_q4_k, unpack_q6_k};
use half::f16;

/// Numbers that are stored in fewer bits, perhaps in blocks that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Packed {
    /// IEEE binary16.
    F16,
    /// Eight bits, a scale for each row of this many numbers.
    Int8(u32),
    /// Eight bits, a scale for 32 numbers.
    Q8,
    /// Four bits, a scale for 32 numbers.
    Q4,
    /// Four bits of floating point, a power of two for 32 numbers.
    Mxfp4,
    /// Four bits of floating point, a scale in eight bits for 16 numbers and one of the tensor, in
    /// rows of this many numbers.
    Nvfp4(u32),
    /// Four bits, scales and offsets for 32 numbers of 256.
    Q4K,
    /// Six bits, scales for 16 numbers of 256.
    Q6K,
}

/// Numbers of a block of several.
pub const BLOCK: usize = 32;

/// Twice the numbers of E2M1, by their codes.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A number that a block cannot hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unpackable {
    /// Its place.
    pub at: usize,
    /// It.
    pub value: f32,
}

impl Packed {
    /// The names of all formats.
    pub const NAMES: [&'static str; 8] = ["f16", "int8", "q8_0", "q4_0", "mxfp4", "nvfp4", "q4_k", "q6_k"];

    /// The format of that name, for rows of `row` numbers.
    pub fn named(name: &str, row: u64) -> Option<Self> {
        Some(match name {
            "f16" => Packed::F16,
            "int8" => Packed::Int8(u32::try_from(row).ok().filter(|row| *row > 0)?),
            "q8_0" => Packed::Q8,
            "q4_0" => Packed::Q4,
            "mxfp4" => Packed::Mxfp4,
            "nvfp4" => Packed::Nvfp4(u32::try_from(row).ok().filter(|row| *row > 0)?),
            "q4_k" => Packed::Q4K,
            "q6_k" => Packed::Q6K,
            _ => return None,
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Packed::F16 => "f16",
            Packed::Int8(_) => "int8",
            Packed::Q8 => "q8_0",
            Packed::Q4 => "q4_0",
            Packed::Mxfp4 => "mxfp4",
            Packed::Nvfp4(_) => "nvfp4",
            Packed::Q4K => "q4_k",
            Packed::Q6K => "q6_k",
        }
    }

    /// Numbers of a block.
    pub fn unit(self) -> usize {
        match self {
            Packed::F16 => 1,
            Packed::Int8(row) | Packed::Nvfp4(row) => row as usize,
            Packed::Q8 | Packed::Q4 | Packed::Mxfp4 => BLOCK,
            Packed::Q4K | Packed::Q6K => SUPER,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Packed::F16 => 2,
            Packed::Int8(row) => row as usize + 4,
            Packed::Q8 => 2 + BLOCK,
            Packed::Q4 => 2 + BLOCK / 2,
            Packed::Mxfp4 => 1 + BLOCK / 2,
            Packed::Nvfp4(row) => NV_HEAD + row as usize / NV.0 * NV.2,
            Packed::Q4K => Q4K_BYTES,
            Packed::Q6K => Q6K_BYTES,
        }
    }

    /// The format of that name whose rows have `bytes` bytes.
    pub fn of_bytes(name: &str, bytes: u64) -> Option<Self> {
        let row = match name {
            "int8" => bytes.checked_sub(4)?,
            "nvfp4" => bytes.checked_sub(NV_HEAD as u64)? / NV.2 as u64 * NV.0 as u64,
            _ => 0,
        };
        Packed::named(name, row)
    }

    /// Whether rows of `row` numbers are whole blocks.
    pub fn fits(self, row: u64) -> bool {
        let whole = match self {
            Packed::Nvfp4(_) => NV.0,
            _ => self.unit(),
        };
        row > 0 && row.is_multiple_of(self.unit() as u64) && row.is_multiple_of(whole as u64)
    }

    /// Whether blocks have a scale of their whole tensor.
    pub fn asks_largest(self) -> bool {
        matches!(self, Packed::Nvfp4(_))
    }

    /// Appends the blocks of the numbers of a tensor, which fill whole blocks.
    pub fn pack(self, values: &[f32], to: &mut Vec<u8>) -> Result<(), Unpackable> {
        let largest = match self.asks_largest() {
            true => values.iter().fold(0f32, |most, x| most.max(x.abs())),
            false => 0.0,
        };
        self.pack_some(values, largest, to)
    }

    /// Appends the blocks of some numbers of a tensor whose largest size this is, where the format
    /// [asks for it](Packed::asks_largest).
    pub fn pack_some(self, values: &[f32], of_tensor: f32, to: &mut Vec<u8>) -> Result<(), Unpackable> {
        self.pack_moved(values, of_tensor, 0, to)
    }

    /// The same, with scales of numbers in E2M1 `by` codes above those that the largest number of
    /// each asks for. Other formats have scales that a number may be fitted to instead.
    pub fn pack_moved(
        self,
        values: &[f32],
        of_tensor: f32,
        by: i32,
        to: &mut Vec<u8>,
    ) -> Result<(), Unpackable> {
        for (number, block) in values.chunks_exact(self.unit()).enumerate() {
            let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            let bad = block.iter().position(|x| !x.is_finite());
            let worst = || block.iter().position(|x| x.abs() == largest).unwrap_or(0);
            let fail = |at: usize| Unpackable { at: number * self.unit() + at, value: block[at] };
            if let Some(at) = bad {
                return Err(fail(at));
            }
            match self {
                Packed::F16 => {
                    let x = f16::from_f32(block[0]);
                    if !x.is_finite() {
                        return Err(fail(0));
                    }
                    to.extend(x.to_le_bytes());
                }
                Packed::Int8(_) => {
                    let scale = largest / 127.0;
                    to.extend(scale.to_le_bytes());
                    to.extend(eight(block, scale));
                }
                Packed::Q8 => {
                    let scale = largest / 127.0;
                    half_scale(scale, to).ok_or_else(|| fail(worst()))?;
                    to.extend(eight(block, scale));
                }
                Packed::Q4 => {
                    // The largest, with its sign, is -8.
                    let scale = block[worst()] / -8.0;
                    half_scale(scale, to).ok_or_else(|| fail(worst()))?;
                    let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                    let code = |x: f32| ((x * by + 8.5) as u8).min(15);
                    to.extend((0..BLOCK / 2).map(|i| code(block[i]) | code(block[i + BLOCK / 2]) << 4));
                }
                Packed::Mxfp4 => {
                    let power = if largest > 0.0 { largest.log2().floor() as i32 - 2 + 127 } else { 0 };
                    let power = (power + by).clamp(0, 254) as u8;
                    to.push(power);
                    let half = half_of_power(power);
                    let code = |x: f32| nearest_e2m1(x, half);
                    to.extend((0..BLOCK / 2).map(|i| code(block[i]) | code(block[i + BLOCK / 2]) << 4));
                }
                Packed::Nvfp4(_) => nvfp4::pack_nvfp4(block, of_tensor, by, to),
                Packed::Q4K => super_block::pack_q4_k(block, to).ok_or_else(|| fail(worst()))?,
                Packed::Q6K => super_block::pack_q6_k(block, to).ok_or_else(|| fail(worst()))?,
            }
        }
        Ok(())
    }

    /// The numbers of whole blocks.
    pub fn unpack(self, bytes: &[u8], to: &mut [f32]) {
        for (block, to) in bytes.chunks_exact(self.bytes()).zip(to.chunks_exact_mut(self.unit())) {
            let scale = self.scale(block);
            match self {
                Packed::F16 => to[0] = scale,
                Packed::Int8(_) => to.iter_mut().zip(&block[4..]).for_each(|(x, q)| *x = eight_of(*q, scale)),
                Packed::Q8 => to.iter_mut().zip(&block[2..]).for_each(|(x, q)| *x = eight_of(*q, scale)),
                Packed::Q4 => {
                    for (i, q) in block[2..].iter().enumerate() {
                        to[i] = (f32::from(q & 15) - 8.0) * scale;
                        to[i + BLOCK / 2] = (f32::from(q >> 4) - 8.0) * scale;
                    }
                }
                Packed::Mxfp4 => {
                    for (i, q) in block[1..].iter().enumerate() {
                        to[i] = f32::from(E2M1[usize::from(q & 15)]) * scale;
                        to[i + BLOCK / 2] = f32::from(E2M1[usize::from(q >> 4)]) * scale;
                    }
                }
                Packed::Nvfp4(_) => nvfp4::unpack_row(block, scale, to),
                Packed::Q4K => {
                    if let (Some(block), Some(to)) = (block.first_chunk(), to.first_chunk_mut()) {
                        unpack_q4_k(block, [scale, half_at(block, 2)], to);
                    }
                }
                Packed::Q6K => {
                    if let (Some(block), Some(to)) = (block.first_chunk(), to.first_chunk_mut()) {
                        unpack_q6_k(block, scale, to);
                    }
                }
            }
        }
    }

    /// The scale of a block, half of it for [`Packed::Mxfp4`], whose codes are doubled; the number
    /// itself where there is no scale.
    pub(super) fn scale(self, block: &[u8]) -> f32 {
        match self {
            Packed::F16 | Packed::Q8 | Packed::Q4 | Packed::Q4K => half_at(block, 0),
            Packed::Q6K => half_at(block, Q6K_BYTES - 2),
            Packed::Int8(_) | Packed::Nvfp4(_) => {
                f32::from_le_bytes([block[0], block[1], block[2], block[3]])
            }
            Packed::Mxfp4 => half_of_power(block[0]),
        }
    }

    /// The first of these blocks whose scale is NaN or infinite.
    pub fn bad(self, bytes: &[u8]) -> Option<usize> {
        let others = |block: &[u8]| match self {
            Packed::Q4K => !half_at(block, 2).is_finite(),
            Packed::Nvfp4(_) => {
                block[NV_HEAD..].chunks_exact(NV.2).any(|b| b[..4].iter().any(|s| bad_e4m3(*s)))
            }
            _ => false,
        };
        bytes.chunks_exact(self.bytes()).position(|block| !self.scale(block).is_finite() || others(block))
    }
}

/// The binary16 number at a place of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// `2^(e - 128)`; NaN for the code that means it.
pub fn half_of_power(e: u8) -> f32 {
    match e {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

/// The code of the number nearest to this, `half` being half the scale; the first of two.
pub(super) fn nearest_e2m1(x: f32, half: f32) -> u8 {
    let from = |i: &usize| (f32::from(E2M1[*i]) * half - x).abs();
    (0..16).min_by(|i, j| from(i).total_cmp(&from(j))).unwrap_or(0) as u8
}

pub(super) fn eight_of(q: u8, scale: f32) -> f32 {
    f32::from(q as i8) * scale
}

/// Numbers by a scale in eight bits.
fn eight(block: &[f32], scale: f32) -> impl Iterator<Item = u8> {
    let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    // A scale so small that it has no inverse leaves zeros.
    let by = if by.is_finite() { by } else { 0.0 };
    block.iter().map(move |x| (x * by).round().clamp(-127.0, 127.0) as i8 as u8)
}

/// Appends a scale in f16, where it is a number there.
pub(super) fn half_scale(scale: f32, to: &mut Vec<u8>) -> Option<()> {
    let scale = f16::from_f32(scale);
    to.extend(scale.to_le_bytes());
    scale.is_finite().then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Packed; 8] = [
        Packed::F16,
        Packed::Int8(64),
        Packed::Q8,
        Packed::Q4,
        Packed::Mxfp4,
        Packed::Nvfp4(64),
        Packed::Q4K,
        Packed::Q6K,
    ];

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + 11) % 1009) as f32 / 501.7 - 1.0).collect()
    }

    /// No number of a block is further from the original than neighbouring codes are apart.
    #[test]
    fn numbers_are_rounded_to_the_nearest() {
        for format in ALL {
            let from = values(256);
            let (mut bytes, mut to) = (vec![], vec![0.0; 256]);
            format.pack(&from, &mut bytes).unwrap();
            assert_eq!(bytes.len(), 256 / format.unit() * format.bytes(), "{format:?}");
            format.unpack(&bytes, &mut to);
            let bound = match format {
                Packed::F16 => 1.0 / 2048.0,
                // Half a step, and the scale's own rounding.
                Packed::Int8(_) | Packed::Q8 => 0.5 / 127.0 + 1.0 / 2048.0,
                Packed::Q4 => 1.0 / 7.5,
                Packed::Mxfp4 => 1.0 / 4.0,
                // Half the widest step, and its scale's own rounding.
                Packed::Nvfp4(_) => 1.0 / 6.0 + 1.0 / 16.0,
                // Half a step of a part, and those of its scale and offset.
                Packed::Q4K => 1.0 / 15.0 + 2.0 / 63.0,
                Packed::Q6K => 1.0 / 32.0 + 1.0 / 128.0,
            };
            for (x, y) in from.iter().zip(&to) {
                assert!((x - y).abs() <= bound, "{format:?}: {x} became {y}");
            }
            // Numbers that were unpacked are packed again to the same numbers.
            let (mut again, mut back) = (vec![], vec![0.0; 256]);
            format.pack(&to, &mut again).unwrap();
            format.unpack(&again, &mut back);
            let apart = to.iter().zip(&back).fold(0f32, |most, (x, y)| most.max((x - y).abs()));
            // Parts of `q4_k` are fitted anew.
            let near = if format == Packed::Q4K { 0.02 } else { 1e-3 };
            assert!(apart <= near, "{format:?}: {apart}");
        }
    }

    /// Bytes of a block by hand, from the layout's definition.
    #[test]
    fn layouts_are_those_of_llama_cpp() {
        let mut block = [0.0f32; 32];
        (block[0], block[1], block[16], block[31]) = (-8.0, 3.0, 7.0, -1.0);
        let mut bytes = vec![];
        Packed::Q4.pack(&block, &mut bytes).unwrap();
        let one = f16::from_f32(1.0).to_le_bytes();
        assert_eq!(bytes[..2], one);
        assert_eq!((bytes[2], bytes[3], bytes[17]), (0xf0, 0x8b, 0x78));
        bytes.clear();
        (block[0], block[1]) = (-127.0, 64.0);
        Packed::Q8.pack(&block, &mut bytes).unwrap();
        assert_eq!(bytes[..2], one);
        assert_eq!((bytes[2] as i8, bytes[3] as i8, bytes[18] as i8, bytes[33] as i8), (-127, 64, 7, -1));
        bytes.clear();
        (block[0], block[1]) = (6.0, -1.5);
        block[16] = 0.5;
        Packed::Mxfp4.pack(&block, &mut bytes).unwrap();
        // The largest is 6 · 2^0.
        assert_eq!((bytes[0], bytes[1], bytes[2]), (127, 0x17, 0x0b));
    }

    #[test]
    fn what_a_block_cannot_hold_is_an_error_at_its_place() {
        for format in ALL {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut from = values(256);
                from[77] = bad;
                let error = format.pack(&from, &mut vec![]).unwrap_err();
                assert_eq!(error.at, 77, "{format:?}");
            }
        }
        let mut from = values(64);
        from[40] = 1e30;
        for format in [Packed::F16, Packed::Q8, Packed::Q4] {
            assert_eq!(format.pack(&from, &mut vec![]), Err(Unpackable { at: 40, value: 1e30 }));
        }
        let zeros = [0.0; 256];
        for format in ALL {
            let (mut bytes, mut to) = (vec![], vec![1.0; 256]);
            format.pack(&zeros, &mut bytes).unwrap();
            format.unpack(&bytes, &mut to);
            assert!(to.iter().all(|x| *x == 0.0), "{format:?}");
        }
    }

    #[test]
    fn a_scale_that_is_no_number_is_found() {
        for (format, at) in [(Packed::Q8, 2 * 34), (Packed::Q4, 2 * 18), (Packed::Mxfp4, 2 * 17)] {
            let mut bytes = vec![];
            format.pack(&values(128), &mut bytes).unwrap();
            assert_eq!(format.bad(&bytes), None);
            bytes[at..at + 2].fill(255);
            assert_eq!(format.bad(&bytes), Some(2), "{format:?}");
        }
        let (row, nv) = (128, Packed::Nvfp4(128));
        for at in [4, 7, 4 + 36 + 1] {
            let mut bytes = vec![];
            nv.pack(&values(3 * row), &mut bytes).unwrap();
            assert_eq!(nv.bad(&bytes), None);
            bytes[2 * nv.bytes() + at] = 0x7f;
            assert_eq!(nv.bad(&bytes), Some(2), "{at}");
        }
        for (format, at) in [(Packed::Q4K, 144), (Packed::Q4K, 146), (Packed::Q6K, 210 + 208)] {
            let mut bytes = vec![];
            format.pack(&values(512), &mut bytes).unwrap();
            assert_eq!(format.bad(&bytes), None);
            bytes[at..at + 2].fill(255);
            assert_eq!(format.bad(&bytes), Some(1), "{format:?}");
        }
    }
}
