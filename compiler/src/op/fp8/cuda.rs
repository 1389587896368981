//! The CUDA of rounding to e4m3: a warp has a tile of one row, a block tiles of several. Codes are
//! stored several at a time, of rows and columns that are multiples of 16.

use super::kernel::Fp8;
use crate::codegen::text::{
    Builder, Operands, THREADS, blocks, fits, one, per_warp, size, times, with_status,
};
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::TILE;

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
    if kernel.e4m3 {
        return codes(kernel, variant);
    }
    if !suits(kernel) {
        return crate::op::kernel::KernelKind::naive(kernel, variant);
    }
    let &Fp8 { matrices, rows, columns, tile: [high, wide], groups, e4m3: _, turned: _ } = kernel;
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

/// The same to codes. Sizes are arguments.
fn codes(kernel: &Fp8, variant: Variant) -> Result<Option<Source>, CodegenError> {
    let &Fp8 { rows, columns, tile, turned, .. } = kernel;
    let o = Operands::of(kernel, variant);
    let (template, constants) = match (tile, turned) {
        _ if !o.wide(&["x"])? => return crate::op::kernel::KernelKind::naive(kernel, variant),
        ([1, TILE], false) => ("e4m3_rows", String::new()),
        ([TILE, TILE], _) => ("e4m3_tiles", format!("{turned}, true, ")),
        ([TILE, 1], true) => ("e4m3_tiles", format!("{turned}, false, ")),
        _ => return crate::op::kernel::KernelKind::naive(kernel, variant),
    };
    let (narrow, element) = if o.narrow("x")? { ("_bf16", "bf16") } else { ("", "float") };
    let tiles = match template {
        // Eight rows of four tiles each.
        "e4m3_rows" => times(&[rows / 8, columns.div_ceil(4 * TILE)]),
        _ => times(&[rows.div_ceil(TILE), columns.div_ceil(TILE)]),
    };
    let family = format!("{template}_{}{}{narrow}", tile[1], if turned { "_turned" } else { "" });
    let mut builder = Builder::of_family(format!("{family}_{rows}x{columns}"), &family, "fp8.cuh");
    let mut list = o.all()?;
    list.extend([size("rows", "rows", rows)?, size("columns", "columns", columns)?]);
    let geometry = (blocks(tiles)?, THREADS as u32, 0);
    // Numbers of a tile stay in registers; those of lines spill at half of all registers.
    builder.resident(if turned { 2 } else { 1 });
    builder.call(&format!("{template}_of_x"), geometry, &list, template, &format!("{constants}{element}"));
    Ok(builder.finish())
}
