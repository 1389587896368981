//! Scales of whole tensors, as blocks of `nvfp4` have them.
//!
//! *In*: rows of ours, which begin with the scale of their tensor, or rows of llama.cpp, which has
//! it in a tensor of its own: one number, or one for each expert. *Out*: the other. *Promise*: a
//! scale keeps its bits, and one that a file cannot say is an error.

use super::file::{Gguf, Kind};
use dreamc_compiler::format::{NV, NV_HEAD, Packed, bad_e4m3};
use dreamc_runtime::checkpoint::safetensors::Dtype;
use std::io::{self, Write};

/// The tensor with the scales of a weight.
pub fn name(weight: &str) -> Option<String> {
    Some(format!("{}.scale", weight.strip_suffix(".weight")?))
}

/// The tensor with the scales that activations are rounded by before they meet a weight.
pub fn of_inputs(weight: &str) -> Option<String> {
    Some(format!("{}.input_scale", weight.strip_suffix(".weight")?))
}

/// How many scales a weight of this shape has: one for each of several matrices.
pub fn count(shape: &[u64]) -> u64 {
    if shape.len() > 2 { shape[0] } else { 1 }
}

/// The scales of a weight of a file; 1 where it has none.
pub fn of(file: &Gguf, weight: &str) -> Result<Vec<f32>, String> {
    let count = file.kinds.get(weight).map_or(1, |(_, shape)| count(shape));
    let name = name(weight).filter(|name| file.kinds.contains_key(name));
    let Some(name) = name else { return Ok(vec![1.0; count as usize]) };
    let found = file.kinds.get(&name).zip(file.tensors.stored(&name));
    let Some(((Kind::Plain(Dtype::F32), _), stored)) = found.filter(|((_, shape), _)| *shape == [count])
    else {
        let (kind, shape) = file.kinds.get(&name).ok_or("is gone")?;
        let kind = kind.name().unwrap_or_default();
        return Err(format!("tensor {name} is {kind} {shape:?}; the scales of {weight} are f32 [{count}]"));
    };
    let bytes = stored.bytes().map_err(|error| format!("tensor {name}: {error}"))?;
    let all: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    match all.iter().position(|scale| !scale.is_finite()) {
        Some(at) => Err(format!("tensor {name}: number {at} is {}, which is no scale", all[at])),
        None => Ok(all),
    }
}

/// The first of these blocks, which have no scale of their tensor, whose own scales are no numbers.
pub fn bad(blocks: &[u8]) -> Option<usize> {
    blocks.chunks_exact(NV.2).position(|block| block[..4].iter().any(|scale| bad_e4m3(*scale)))
}

/// Blocks of some numbers of a tensor whose largest size this is, without its scale.
pub fn pack(values: &[f32], largest: f32) -> Result<Vec<u8>, dreamc_compiler::format::Unpackable> {
    let (format, mut rows) = (Packed::Nvfp4(NV.0 as u32), vec![]);
    format.pack_some(values, largest, &mut rows)?;
    Ok(rows.chunks_exact(format.bytes()).flat_map(|row| &row[NV_HEAD..]).copied().collect())
}

/// The scale of a tensor whose largest size this is.
pub fn scale(largest: f32) -> f32 {
    let mut row = vec![];
    let packed = Packed::Nvfp4(NV.0 as u32).pack_some(&[0.0; NV.0], largest, &mut row);
    let head = row.first_chunk().filter(|_| packed.is_ok());
    head.map_or(0.0, |head| f32::from_le_bytes(*head))
}

/// Takes rows of llama.cpp and writes ours: the scale of its matrix before each.
pub struct Headed<'a> {
    scales: &'a [f32],
    /// Bytes of a row, and rows of each matrix.
    size: (u64, u64),
    /// Bytes that were taken.
    at: u64,
    out: &'a mut dyn Write,
}

impl<'a> Headed<'a> {
    /// For rows of `bytes` bytes.
    pub fn new(scales: &'a [f32], rows: u64, bytes: u64, out: &'a mut dyn Write) -> Self {
        let each = rows / (scales.len() as u64).max(1);
        Headed { scales, size: (bytes.max(1), each.max(1)), at: 0, out }
    }
}

impl Write for Headed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (row, place) = (self.at / self.size.0, self.at % self.size.0);
        if place == 0 {
            let scale = self.scales.get((row / self.size.1) as usize).copied().unwrap_or(1.0);
            self.out.write_all(&scale.to_le_bytes())?;
        }
        let count = (bytes.len() as u64).min(self.size.0 - place);
        self.out.write_all(&bytes[..count as usize])?;
        self.at += count;
        Ok(count as usize)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Takes rows of ours and writes llama.cpp's: without their heads, which it keeps.
pub struct Bare<'a> {
    /// Bytes of a row.
    size: u64,
    at: u64,
    /// The first bytes of all rows.
    heads: Vec<u8>,
    out: &'a mut dyn Write,
}

impl<'a> Bare<'a> {
    /// For rows of `bytes` bytes.
    pub fn new(bytes: u64, out: &'a mut dyn Write) -> Self {
        Bare { size: bytes.max(1), at: 0, heads: vec![], out }
    }

    /// The scale of each of `count` matrices; nothing where rows of one have several.
    pub fn scales(&self, count: u64) -> Option<Vec<f32>> {
        let heads = self.heads.as_chunks::<NV_HEAD>().0;
        let each = (heads.len() as u64 / count.max(1)).max(1) as usize;
        let one = |rows: &[[u8; NV_HEAD]]| {
            let first = rows.first()?;
            rows.iter().all(|row| row == first).then(|| f32::from_le_bytes(*first))
        };
        heads.chunks(each).map(one).collect()
    }
}

impl Write for Bare<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (place, head) = (self.at % self.size, NV_HEAD as u64);
        let end = if place < head { head } else { self.size };
        let part = &bytes[..(bytes.len() as u64).min(end - place) as usize];
        match place < head {
            true => self.heads.extend(part),
            false => self.out.write_all(part)?,
        }
        self.at += part.len() as u64;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of two matrices get their scales and give them back, however they are cut into writes.
    #[test]
    fn scales_come_and_go() {
        let rows: Vec<u8> = (0..4 * 36).map(|i| i as u8).collect();
        for cut in [1, 5, 36, 37, 200] {
            let (mut ours, scales) = (vec![], [0.25, -3.0]);
            let mut headed = Headed::new(&scales, 4, 36, &mut ours);
            rows.chunks(cut).for_each(|part| headed.write_all(part).unwrap());
            assert_eq!(ours.len(), 4 * 40);
            assert_eq!(ours[40..44], 0.25f32.to_le_bytes());
            assert_eq!(ours[80..84], (-3.0f32).to_le_bytes());
            let mut theirs = vec![];
            let mut bare = Bare::new(40, &mut theirs);
            ours.chunks(cut).for_each(|part| bare.write_all(part).unwrap());
            assert_eq!(bare.scales(2).unwrap(), scales);
            assert_eq!(bare.scales(1), None);
            assert_eq!(bare.scales(4).unwrap(), [0.25, 0.25, -3.0, -3.0]);
            assert_eq!(theirs, rows);
        }
    }

    /// Blocks and a scale are those of a row that is packed as a whole.
    #[test]
    fn blocks_are_those_of_rows() {
        let values: Vec<f32> = (0..128).map(|i| (i as f32 - 60.0) / 50.0).collect();
        let largest = 1.5;
        let mut row = vec![];
        Packed::Nvfp4(128).pack_some(&values, largest, &mut row).unwrap();
        assert_eq!(row[..4], scale(largest).to_le_bytes());
        assert_eq!(row[4..], pack(&values, largest).unwrap());
    }
}
