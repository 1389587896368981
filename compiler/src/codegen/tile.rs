//! Tiles of products: which tile a product is cut into, and what brings its operands.

use super::text::{Builder, Param, THREADS, blocks, fits, times};
use super::{Argument, Base, CodegenError, Matrices, Variant};
use crate::program::Matrix;

type Result<T> = std::result::Result<T, CodegenError>;

/// A tile of a product: what a block computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    /// Sums at a time.
    pub(crate) depth: u64,
    name: &'static str,
    /// Whether its operands are bf16.
    pub(crate) narrow: bool,
    /// Blocks of a processor at once: where two are, one copies while the other multiplies.
    resident: u32,
    /// Dynamic shared memory; 0 where what it needs is static.
    pub(crate) shared: u32,
    /// Warps that bring the operands of Hopper's tiles, in addition to those that multiply;
    /// `gatherers` where lines are gathered.
    bringers: u32,
    gatherers: u32,
    /// Whether results are stored two at a time.
    pairs: bool,
    /// Blocks of a cluster, whose tiles have the same columns: each brings a part of the right
    /// operand to all of them.
    blocks: u64,
}

const fn tile(rows: u64, columns: u64, depth: u64, name: &'static str, narrow: bool) -> Tile {
    let resident = if narrow { 2 } else { 1 };
    Tile {
        rows,
        columns,
        depth,
        name,
        narrow,
        resident,
        shared: 0,
        bringers: 0,
        gatherers: 0,
        pairs: false,
        blocks: 1,
    }
}

/// A tile of Hopper's warpgroups with `stages` stages, and room to align them to 1024 bytes.
const fn warpgroups(columns: u64, stages: u32, resident: u32, name: &'static str) -> Tile {
    let shared = stages * 128 * (128 + columns as u32) + 1024;
    Tile {
        rows: 128,
        columns,
        depth: 64,
        name,
        narrow: true,
        resident,
        shared,
        bringers: 1,
        gatherers: 4 / resident,
        pairs: false,
        blocks: 1,
    }
}

/// On the ordinary cores, from f32.
pub(crate) const LARGE: Tile = tile(128, 128, 8, "Tile<128, 128, 8, 8, 8>", false);
pub(crate) const MIDDLE: Tile = tile(64, 64, 16, "Tile<64, 64, 16, 4, 4>", false);
const FLAT: Tile = tile(16, 64, 16, "Tile<16, 64, 16, 1, 4>", false);
const SMALL: Tile = tile(16, 16, 16, "Tile<16, 16, 16, 1, 1>", false);

/// On the tensor cores, from bf16.
const LARGE_BF16: Tile = tile(128, 128, 32, "Matrices<128, 128, 2, 4", true);
const MIDDLE_BF16: Tile = tile(64, 64, 32, "Matrices<64, 64, 2, 4", true);
const FLAT_BF16: Tile = tile(16, 128, 32, "Matrices<16, 128, 1, 8", true);
const TALL_BF16: Tile = tile(128, 16, 32, "Matrices<128, 16, 8, 1", true);
/// From bf16 whose rows begin at multiples of 16 bytes, on `sm_90a`.
const WIDE_HOPPER: Tile = warpgroups(256, 4, 1, "Warpgroups<256, 4");
const LARGE_HOPPER: Tile = warpgroups(128, 3, 2, "Warpgroups<128, 3");
/// From e4m3, on `sm_90a`: 128 terms of a sum at a time, and their scales.
const CODES: Tile =
    Tile { shared: 6 * (128 * 256 + 2048) + 1024, depth: 128, name: "Codes<6", ..warpgroups(128, 4, 1, "") };
/// Each row within a warp, for softmax over columns.
pub(crate) const ROWS_BF16: Tile = tile(128, 64, 32, "Matrices<128, 64, 8, 1", true);

impl Tile {
    /// For `copies` matrices of `m` by `n`, sums of `k`, where `wide` says whether operands in bf16
    /// can be copied eight elements at a time.
    pub(crate) fn of(variant: Variant, wide: bool, (m, n, k): (u64, u64, u64), copies: u64) -> Tile {
        let tile = Tile::shape(variant, wide, (m, n, k), copies, 512);
        Tile { pairs: tile.narrow && n.is_multiple_of(2), ..tile }
    }

    /// The same where results take long: they are added to memory, or go through a softmax. Another
    /// block of the processor should multiply meanwhile, unless sums are longer still.
    pub(crate) fn of_slow_results(
        variant: Variant,
        wide: bool,
        (m, n, k): (u64, u64, u64),
        copies: u64,
    ) -> Tile {
        let tile = Tile::shape(variant, wide, (m, n, k), copies, 1024);
        Tile { pairs: tile.narrow && n.is_multiple_of(2), ..tile }
    }

    /// The same with results in an operand, whether that begins at a multiple of 16 bytes (`wide`);
    /// scratch memory begins at a multiple of 256.
    pub(crate) fn into(self, wide: bool) -> Tile {
        Tile { pairs: self.pairs && wide, ..self }
    }

    /// For matrices of codes of e4m3.
    pub(crate) fn of_codes(n: u64) -> Tile {
        Tile { pairs: n.is_multiple_of(2), ..CODES }
    }

    /// `long`: sums for which the wide tile is worth its lonely block.
    fn shape(variant: Variant, wide: bool, (m, n, k): (u64, u64, u64), copies: u64, long: u64) -> Tile {
        if variant.is_narrow(0) {
            // Operands that fill its tiles and stages, and tiles that fill the GPU.
            if variant.hopper && wide && m > 64 && n > 64 && k >= 128 {
                let fills = |tile: &Tile| tile.count(m, n).saturating_mul(copies) >= variant.processors();
                // A processor has one block of the wide tile, which multiplies nothing while it
                // stores its results: sums must be long, and no more columns left over than of the
                // other. It reads a quarter less from the cache.
                let whole = n.div_ceil(256) * 2 == n.div_ceil(128);
                if k >= long && whole && fills(&WIDE_HOPPER) {
                    return WIDE_HOPPER;
                }
                if fills(&LARGE_HOPPER) {
                    return LARGE_HOPPER;
                }
            }
            return if m <= 16 {
                FLAT_BF16
            } else if n <= 16 {
                TALL_BF16
            } else if LARGE_BF16.count(m, n).saturating_mul(copies) >= variant.processors() {
                LARGE_BF16
            } else {
                MIDDLE_BF16
            };
        }
        if m <= 32 && n >= 128 {
            FLAT
        } else if m <= 32 || n <= 32 {
            SMALL
        } else if LARGE.count(m, n).saturating_mul(copies) >= variant.processors() {
            LARGE
        } else {
            MIDDLE
        }
    }

    pub(crate) fn count(&self, m: u64, n: u64) -> u64 {
        m.div_ceil(self.rows) * n.div_ceil(self.columns)
    }

    /// Blocks, threads and shared memory of a launch of `tiles` tiles, whose entry follows: a block
    /// for each tile.
    pub(crate) fn geometry(&self, builder: &mut Builder, tiles: u64) -> Result<(u32, u32, u32)> {
        if self.shared > 0 {
            builder.hopper();
        }
        builder.resident(self.resident);
        Ok((blocks(tiles)?, THREADS as u32 + 32 * self.bringers, self.shared))
    }

    /// The same where blocks go from tile to tile if the template's do (`STREAMS`): the copy engine
    /// brings the next one's operands while results are stored.
    pub(crate) fn streaming(
        &self,
        builder: &mut Builder,
        tiles: u64,
        variant: Variant,
    ) -> Result<(u32, u32, u32)> {
        let streams = self.shared > 0 && self.resident == 1 && self.bringers == 1;
        let most = if streams { variant.processors() / self.blocks * self.blocks } else { u64::MAX };
        builder.cluster(self.blocks);
        self.geometry(builder, tiles.min(most))
    }

    /// The same in clusters of two blocks, where tiles follow one another and come in pairs of
    /// rows: the cache is asked for each tile of the right operand once for both.
    pub(crate) fn paired(self, m: u64) -> Tile {
        let streams = self.shared > 0 && self.resident == 1 && self.bringers == 1;
        let pairs = m.div_ceil(self.rows).is_multiple_of(2);
        Tile { blocks: if streams && pairs { 2 } else { 1 }, ..self }
    }

    /// Lines of the right operand that a block brings at a time.
    pub(crate) fn part(&self) -> u64 {
        self.columns / self.blocks
    }

    /// The C++ type. `wide`: operands in bf16 can be copied eight elements at a time.
    pub(crate) fn text(&self, wide: bool) -> String {
        match (self.narrow, self.shared > 0) {
            (_, true) if *self == (Tile { pairs: self.pairs, blocks: self.blocks, ..CODES }) => {
                format!("{}, {}, {}>", self.name, self.pairs, self.blocks)
            }
            (_, true) if self.blocks > 1 => {
                format!("{}, {}, {}, {}>", self.name, self.bringers, self.pairs, self.blocks)
            }
            (_, true) => format!("{}, {}, {}>", self.name, self.bringers, self.pairs),
            (true, false) => format!("{}, {wide}, {}>", self.name, self.pairs),
            (false, false) => self.name.into(),
        }
    }

    /// The same for a matmul with one operand whose lines are gathered.
    pub(crate) fn gathering(self) -> Tile {
        Tile { bringers: self.gatherers, ..self }
    }

    /// An operand: its tensor map where the copy engine brings it (its lines are adjacent), else
    /// its address. `across`: lines of it that the tile has.
    pub(crate) fn operand(&self, across: u64, address: Param, matrix: Operand) -> Result<Param> {
        if self.shared == 0 || matrix.gathered {
            return Ok(address);
        }
        let base = match address.argument {
            Argument::Operand(i) => Base::Operand(i),
            Argument::Scratch(at) => Base::Scratch(at),
            _ => return Err(CodegenError::Malformed(format!("{} is no address", address.name))),
        };
        let Operand { fast, lines, depth, far, count, .. } = matrix;
        let (row, rows, box_rows) = if fast { (depth, lines, across) } else { (lines, depth, 64) };
        for size in [row, rows, count, times(&[2, far, rows]) >> 8] {
            fits("a matrix for the copy engine", size)?;
        }
        let map = Matrices {
            base,
            row,
            rows,
            stride: Some(far),
            count,
            box_rows: fits("rows of a box", box_rows)?,
        };
        Ok(Param::new("const __grid_constant__ TensorMap", &address.name, Argument::Map(map)))
    }
}

/// `count` matrices that a matmul reads, one after another.
pub(crate) struct Operand {
    /// Whether elements are adjacent along the depth of the sums, else along the lines.
    pub(crate) fast: bool,
    pub(crate) lines: u64,
    pub(crate) depth: u64,
    /// Elements between those that are not adjacent.
    pub(crate) far: u64,
    pub(crate) count: u64,
    /// Whether its lines or its depths are taken from anywhere.
    pub(crate) gathered: bool,
}

/// Whether lines of a matrix begin at multiples of 16 bytes in bf16, and their elements are
/// adjacent.
pub(crate) fn lines(matrix: Matrix) -> bool {
    let (near, far) = (matrix.row.min(matrix.column), matrix.row.max(matrix.column));
    near == 1 && far.is_multiple_of(8)
}
