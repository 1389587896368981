//! The CUDA of rounding to e4m3: a warp has a tile of one row, a block tiles of several.

use super::kernel::Fp8;
use crate::codegen::text::{Operands, THREADS, blocks, fits, one, per_warp, times, with_status};
use crate::codegen::{CodegenError, Source, Variant};

/// Columns of a block whose tiles are a column wide.
const COLUMNS: u64 = 32;
/// Most columns of a tile that a warp or a row of threads has.
const WIDEST: u64 = 256;

/// Other tiles than these are for the naive kernel.
fn suits(kernel: &Fp8) -> bool {
    let [high, wide] = kernel.tile;
    let span = if wide == 1 { COLUMNS } else { wide };
    wide <= WIDEST && (high == 1 && kernel.groups.is_none() || THREADS.is_multiple_of(span))
}

pub(super) fn fp8(kernel: &Fp8, variant: Variant) -> Result<Option<Source>, CodegenError> {
    if !suits(kernel) {
        return crate::op::kernel::KernelKind::naive(kernel, variant);
    }
    let &Fp8 { matrices, rows, columns, tile: [high, wide], groups } = kernel;
    let o = Operands::of(kernel, variant);
    let narrow = if o.narrow("x")? { "_bf16" } else { "" };
    let name = |kind: &str| format!("fp8_{kind}_{matrices}x{rows}x{columns}_{high}x{wide}{narrow}");
    let [r, c] = [fits("rows", times(&[matrices, rows]))?, fits("columns", columns)?];
    if high == 1 && groups.is_none() {
        let tiles = times(&[matrices, rows, kernel.tiles_across()]);
        let constants = format!("{r}, {c}, {wide}");
        return one(
            name("rows"),
            "fp8.cuh",
            "fp8_of_rows",
            per_warp(tiles)?,
            o.all()?,
            "fp8_rows",
            constants,
        );
    }
    let span = if wide == 1 { COLUMNS } else { wide };
    let count = times(&[matrices, kernel.tiles_down(), columns.div_ceil(span)]);
    let geometry = (blocks(count)?, THREADS as u32, 0);
    let constants = format!("{}, {c}, {high}, {wide}, {span}, {THREADS}", fits("rows", rows)?);
    match groups {
        None => one(name("tiles"), "fp8.cuh", "fp8_of_tiles", geometry, o.all()?, "fp8_tiles", constants),
        Some(groups) => {
            let constants = format!("{constants}, {}", fits("groups", groups)?);
            let name = name(&format!("groups{groups}"));
            one(name, "fp8.cuh", "fp8_of_groups", geometry, with_status(o.all()?), "fp8_groups", constants)
        }
    }
}
