//! Storage of weights: the type of their numbers, and where these are.
//!
//! *In*: what a file says of its tensors. *Out*: for each buffer of weights its [`Format`] and its
//! [`Residence`], which memory, the functions' types, matmuls, embeddings, checkpoints and reports
//! read. *Promise*: results do not depend on it: a matmul widens a stored number to f32, which is
//! exact, where the weight would have been an f32 of the same value; bits are equal.
//!
//! A plan that trains owns f32 weights. A plan that reads weights alone may leave matrices in their
//! file, mapped; and so may one that trains, those that it does not move. Matrices in a file may be
//! packed ([`Packed`]): matmuls and embeddings unpack them as they read them.

mod nvfp4;
mod packed;
mod put;
mod super_block;

pub use nvfp4::{NV, NV_HEAD, bad_e4m3, e4m3, unpack_nvfp4};
pub use packed::{BLOCK, E2M1, Packed, Unpackable, half_of_power};
pub use super_block::{SUPER, unpack_q4_k, unpack_q6_k};

use crate::ir::DType;
use std::collections::BTreeMap;

/// The numbers of a weight in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Format {
    /// Type of each number.
    pub dtype: DType,
}

impl Format {
    /// f32, which is trained.
    pub const F32: Format = Format { dtype: DType::F32 };
    /// bf16.
    pub const BF16: Format = Format { dtype: DType::Bf16 };

    /// Packed numbers.
    pub fn packed(packed: Packed) -> Self {
        Format { dtype: DType::Packed(packed) }
    }

    /// Bytes of `numbers` numbers; `None` beyond 64 bits.
    pub fn bytes(self, numbers: u64) -> Option<u64> {
        numbers.div_ceil(self.dtype.unit()).checked_mul(self.dtype.bytes())
    }

    /// A multiple that a number's address is of.
    pub fn alignment(self) -> u64 {
        match self.dtype {
            DType::F32 | DType::Bf16 | DType::I32 => self.dtype.bytes(),
            // Read byte by byte.
            DType::E4m3 | DType::Packed(_) => 1,
        }
    }
}

/// Whose memory a weight is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Residence {
    /// The plan's arena.
    #[default]
    Owned,
    /// Its file, mapped: never written.
    Mapped,
}

/// Storage of a weight. By default it is trained: f32 in the arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stored {
    /// Its numbers.
    pub format: Format,
    /// Their place.
    pub residence: Residence,
}

impl Stored {
    /// In its file.
    pub fn mapped(format: Format) -> Self {
        Stored { format, residence: Residence::Mapped }
    }
}

/// Storage of tensors by their names in checkpoints; those without a name here are owned f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Formats(BTreeMap<String, Stored>);

impl Formats {
    /// The storage that all of these tensors have, which share a buffer; owned f32 where they
    /// differ.
    pub fn of<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Stored {
        let mut all = names.into_iter().map(|name| self.0.get(name).copied().unwrap_or_default());
        let first = all.next().unwrap_or_default();
        if all.all(|stored| stored == first) { first } else { Stored::default() }
    }
}

impl FromIterator<(String, Stored)> for Formats {
    fn from_iter<I: IntoIterator<Item = (String, Stored)>>(all: I) -> Self {
        Formats(all.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_one_buffer_have_one_storage() {
        let (wide, narrow) = (Stored::mapped(Format::F32), Stored::mapped(Format::BF16));
        let all = [("a", narrow), ("b", narrow), ("c", wide)].map(|(name, of)| (name.to_string(), of));
        let formats: Formats = all.into_iter().collect();
        assert_eq!(formats.of(["a", "b"]), narrow);
        assert_eq!(formats.of(["a", "c"]), Stored::default());
        assert_eq!(formats.of(["a", "d"]), Stored::default());
        assert_eq!(formats.of([]), Stored::default());
    }
}
