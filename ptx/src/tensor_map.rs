//! Tensor maps: what a bulk tensor copy copies, told by the host and passed to the kernel as 128
//! opaque bytes.
//!
//! On a GPU the driver encodes them (`cuTensorMapEncodeTiled`); here the bytes are our own. A
//! launch holds the [`TensorMap`] itself, so each device encodes it as it needs.

use std::fmt;

/// How the 16-byte pieces of a tile are permuted in shared memory, so that columns fall into
/// different banks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// As they come.
    None,
    /// Pairs of 16 bytes, by the row of 128 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Swizzle::None => f.write_str("no swizzle"),
            swizzle => write!(f, "a swizzle of {} bytes", swizzle.bytes()),
        }
    }
}

impl Swizzle {
    /// Bytes within which pieces are permuted; 16 where they are not.
    pub fn bytes(self) -> u64 {
        match self {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }

    /// Where in shared memory the byte at an address is.
    pub(super) fn apply(self, address: u64) -> u64 {
        address ^ (address >> 7 & (self.bytes() / 16 - 1)) << 4
    }
}

/// A tensor in global memory and the box of it that one copy moves. Dimensions are innermost first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMap {
    /// The first element.
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Elements along each dimension, one to five of them.
    pub extents: Vec<u64>,
    /// Bytes from one element to the next along each dimension but the innermost.
    pub strides: Vec<u64>,
    /// Elements of the box along each dimension.
    pub tile: Vec<u32>,
    /// The order of the box in shared memory.
    pub swizzle: Swizzle,
}

/// A fault of a tensor map.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MapError(String);

/// Bytes of shared memory that no block has more of.
const MOST: u64 = 228 << 10;

const MAGIC: &[u8; 8] = b"dreamcTM";

impl TensorMap {
    /// Bytes that a kernel takes it as.
    pub const BYTES: usize = 128;

    /// Holds the map against the rules that `cuTensorMapEncodeTiled` has.
    pub fn check(&self) -> Result<(), MapError> {
        let wrong = |message: String| Err(MapError(format!("a tensor map {message}")));
        let rank = self.extents.len();
        if !(1..=5).contains(&rank) || self.strides.len() + 1 != rank || self.tile.len() != rank {
            return wrong(format!(
                "of {rank} extents, {} strides and {} box sides",
                self.strides.len(),
                self.tile.len()
            ));
        }
        if !matches!(self.element_bytes, 1 | 2 | 4 | 8) {
            return wrong(format!("of elements of {} bytes", self.element_bytes));
        }
        if !self.address.is_multiple_of(16) {
            return wrong(format!("of a tensor at {:#x}, which is no multiple of 16", self.address));
        }
        if self.extents.iter().any(|&extent| extent == 0 || extent > 1 << 32) {
            return wrong(format!("with extents {:?}", self.extents));
        }
        if self.strides.iter().any(|&stride| stride % 16 != 0 || stride >= 1 << 40) {
            return wrong(format!("with strides {:?}, which must be multiples of 16", self.strides));
        }
        if self.strides.windows(2).any(|pair| pair[0] == 0 || pair[1] % pair[0] != 0) {
            let strides = &self.strides;
            return wrong(format!(
                "with strides {strides:?}, each of which must be a multiple of the one before"
            ));
        }
        if self.tile.iter().any(|&side| side == 0 || side > 256) {
            return wrong(format!("with a box of {:?}; sides are 1 to 256", self.tile));
        }
        if self.box_bytes() > MOST {
            return wrong(format!("with a box of {} bytes, more than shared memory has", self.box_bytes()));
        }
        let inner = u64::from(self.tile[0]) * u64::from(self.element_bytes);
        if inner % 16 != 0 {
            return wrong(format!("whose box is {inner} bytes wide, which is no multiple of 16"));
        }
        if self.swizzle != Swizzle::None && inner > self.swizzle.bytes() {
            return wrong(format!(
                "whose box is {inner} bytes wide, with a swizzle of {}",
                self.swizzle.bytes()
            ));
        }
        Ok(())
    }

    /// Bytes that a copy moves into or out of shared memory, those outside the tensor included.
    pub fn box_bytes(&self) -> u64 {
        self.tile.iter().map(|&side| u64::from(side)).product::<u64>() * u64::from(self.element_bytes)
    }

    /// As this device passes it to kernels.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16] = self.element_bytes as u8;
        bytes[17] = self.extents.len() as u8;
        bytes[18] = self.swizzle.bytes() as u8;
        for (i, extent) in self.extents.iter().take(5).enumerate() {
            // Extents reach 2^32, so one less is kept.
            bytes[20 + 4 * i..][..4].copy_from_slice(&(extent.wrapping_sub(1) as u32).to_le_bytes());
        }
        for (i, side) in self.tile.iter().take(5).enumerate() {
            bytes[40 + 4 * i..][..4].copy_from_slice(&side.to_le_bytes());
        }
        for (i, stride) in self.strides.iter().take(4).enumerate() {
            bytes[64 + 8 * i..][..8].copy_from_slice(&stride.to_le_bytes());
        }
        bytes
    }

    /// The map that [`TensorMap::to_bytes`] wrote.
    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<TensorMap, MapError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let rank = usize::from(bytes[17]);
        let swizzle = match bytes[18] {
            16 => Swizzle::None,
            32 => Swizzle::Bytes32,
            64 => Swizzle::Bytes64,
            _ => Swizzle::Bytes128,
        };
        if &bytes[..8] != MAGIC || !(1..=5).contains(&rank) {
            return Err(MapError("128 bytes that are no tensor map".into()));
        }
        let map = TensorMap {
            address: long(8),
            element_bytes: u32::from(bytes[16]),
            extents: (0..rank).map(|i| u64::from(word(20 + 4 * i)) + 1).collect(),
            strides: (0..rank - 1).map(|i| long(64 + 8 * i)).collect(),
            tile: (0..rank).map(|i| word(40 + 4 * i)).collect(),
            swizzle,
        };
        map.check()?;
        Ok(map)
    }

    /// The pieces of one copy, at most 16 bytes each: where in shared memory, where in global
    /// memory (nowhere outside the tensor), how many bytes.
    pub(super) fn pieces(&self, shared: u64, at: &[i32]) -> Result<Vec<(u64, Option<u64>, u64)>, MapError> {
        if at.len() != self.extents.len() {
            let (given, rank) = (at.len(), self.extents.len());
            return Err(MapError(format!("{given} coordinates for a tensor map of {rank} dimensions")));
        }
        let element = u64::from(self.element_bytes);
        let inner = u64::from(self.tile[0]) * element;
        let lines: u64 = self.tile[1..].iter().map(|&side| u64::from(side)).product();
        let mut pieces = Vec::new();
        for line in 0..lines {
            let mut rest = line;
            let mut start = Some(self.address);
            for (i, &side) in self.tile.iter().enumerate().skip(1) {
                let place = i64::from(at[i]) + (rest % u64::from(side)) as i64;
                rest /= u64::from(side);
                let inside = place >= 0 && (place as u64) < self.extents[i];
                let offset = (place as u64).wrapping_mul(self.strides[i - 1]);
                start = start.filter(|_| inside).map(|start| start.wrapping_add(offset));
            }
            for offset in (0..inner).step_by(16) {
                let to = self.swizzle.apply(shared + line * inner + offset);
                let first = i64::from(at[0]) + (offset / element) as i64;
                let last = first + (16 / element) as i64;
                let extent = self.extents[0] as i64;
                match start {
                    Some(start) if first >= 0 && last <= extent => {
                        pieces.push((to, Some(start.wrapping_add(first as u64 * element)), 16));
                    }
                    Some(start) if last > 0 && first < extent => {
                        // Across an edge of the tensor: element by element.
                        for i in 0..16 / element {
                            let place = first + i as i64;
                            let inside = place >= 0 && place < extent;
                            let from = inside.then(|| start.wrapping_add(place as u64 * element));
                            pieces.push((to + i * element, from, element));
                        }
                    }
                    _ => pieces.push((to, None, 16)),
                }
            }
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap {
            address: 0x7000_0000_0000,
            element_bytes: 2,
            extents: vec![70, 10],
            strides: vec![144],
            tile: vec![64, 4],
            swizzle: Swizzle::Bytes128,
        }
    }

    #[test]
    fn passes_through_its_bytes() {
        assert_eq!(TensorMap::from_bytes(&map().to_bytes()), Ok(map()));
        assert!(TensorMap::from_bytes(&[0; 128]).is_err());
        let most = TensorMap { extents: vec![1 << 32], strides: vec![], tile: vec![8], ..map() };
        assert_eq!(TensorMap::from_bytes(&most.to_bytes()), Ok(most));
    }

    #[test]
    fn breaks_no_rule_of_the_driver() {
        assert_eq!(map().check(), Ok(()));
        for wrong in [
            TensorMap { address: 8, ..map() },
            TensorMap { strides: vec![140], ..map() },
            TensorMap { strides: vec![], ..map() },
            TensorMap { tile: vec![64, 257], ..map() },
            TensorMap { tile: vec![4, 4], ..map() },
            TensorMap { tile: vec![128, 4], ..map() },
            TensorMap { element_bytes: 3, ..map() },
            TensorMap { extents: vec![0, 10], ..map() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_box_over_the_edge_is_filled_with_nothing() {
        let pieces = map().pieces(2048, &[64, -1]).unwrap();
        let bytes: u64 = pieces.iter().map(|piece| piece.2).sum();
        assert_eq!(bytes, map().box_bytes());
        // The first line is above the tensor; of the others six elements are left.
        let inside: Vec<_> = pieces.iter().filter(|piece| piece.1.is_some()).collect();
        assert_eq!(inside.len(), 3 * 6);
        // The second line of 128 bytes has its pieces exchanged in pairs.
        assert_eq!(*inside[0], (2048 + 128 + 16, Some(0x7000_0000_0000 + 128), 2));
    }
}
