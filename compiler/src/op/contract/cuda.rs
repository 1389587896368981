//! The CUDA of a product: tiles of the result, cut along the sums where these are long and tiles
//! few.

use super::kernel::{Product, ProductE4m3};
use crate::codegen::blocks::{Few, unpacked};
use crate::codegen::text::{Builder, Operands, Param, fits, per_thread, scratch, size, stride_of, times};
use crate::codegen::tile::{Operand, Tile, lines};
use crate::codegen::{Argument, Base, CodegenError, Matrices, Source, Variant};
use crate::format::Packed;
use crate::ir::TILE;
use crate::op::kernel::KernelKind;
use crate::program::Kernel;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn product(kernel: &Product, variant: Variant) -> Result<Option<Source>> {
    let &Product { m, n, k, a, b, accumulate, stored } = kernel;
    if let (true, Some(packed)) = (stored, variant.packed) {
        return match few(kernel, variant, packed)? {
            Some(source) => Ok(Some(source)),
            None => unpacked(kernel, &Kernel::Product(Product { stored: false, ..*kernel }), variant),
        };
    }
    // Tiles have operands of one type.
    if stored {
        return kernel.naive(variant);
    }
    let variant = Variant { places: variant.places && kernel.leaves_rows_out(), ..variant };
    let o = Operands::of(kernel, variant);
    let add = if accumulate { "_add" } else { "" };
    let name = format!("product_{m}x{n}x{k}{add}{}", variant.suffix());
    let family = format!("product{add}{}", variant.suffix());
    let mut builder = Builder::of_family(name, &family, "product.cuh");
    // Rows that are picked are copied in whole pieces of eight.
    let pieces = !variant.places || (a.column == 1 && k.is_multiple_of(8));
    let wide = variant.aligned && lines(a) && lines(b) && pieces;
    let of = if accumulate { Tile::of_slow_results } else { Tile::of };
    let tile = of(variant, wide, (m, n, k), 1).into(o.wide(&["c"])?);
    let tile = if variant.places { tile.gathering() } else { tile };
    let tiles = tile.count(m, n);
    // A result too small to keep the processors busy is cut along the sums, if they are long.
    let slices = slices_of(variant, tiles, k, 512);
    // Slices have a block for each tile.
    let tile = if variant.places || slices > 1 { tile } else { tile.paired(m) };
    // Lines of `a` are its rows, and of `b` its columns; fast ones have their elements side by
    // side.
    let (a_fast, b_fast) = (variant.places || a.column <= a.row, b.row <= b.column);
    let (a_near, a_far) = if a_fast { (a.column, a.row) } else { (a.row, a.column) };
    let (b_near, b_far) = if b_fast { (b.row, b.column) } else { (b.column, b.row) };
    let near = match (fits("a product's stride", a_near)?, fits("a product's stride", b_near)?) {
        (1, 1) => String::new(),
        (a, b) => format!(", {a}, {b}"),
    };
    let some = match (variant.places, near.is_empty()) {
        (true, _) => ", true",
        (false, false) => ", false",
        (false, true) => "",
    };
    let mut sizes = vec![
        size("m", "a product's rows", m)?,
        size("n", "a product's columns", n)?,
        size("k", "a product's depth", k)?,
        stride_of("a_far", a_far)?,
        stride_of("b_far", b_far)?,
    ];
    let layout = format!("{}, {a_fast}, {b_fast}", tile.text(wide));
    let gathered = variant.places;
    let left = Operand { fast: a_fast, lines: m, depth: k, far: a_far, count: 1, gathered };
    let left = tile.operand(tile.rows, o.get("a")?, left)?;
    let right = Operand { fast: b_fast, lines: n, depth: k, far: b_far, count: 1, gathered: false };
    let right = tile.operand(tile.part(), o.get("b")?, right)?;
    if slices == 1 {
        let mut list = vec![left, right, o.get("c")?];
        list.append(&mut sizes);
        list.extend(variant.needed());
        let geometry = tile.streaming(&mut builder, tiles, variant)?;
        let constants = format!("{layout}, {accumulate}{some}{near}");
        builder.call("product_tiles", geometry, &list, "product", &constants);
        return Ok(builder.finish());
    }
    // Whole slices of the depth of a tile.
    let slice = k.div_ceil(slices).next_multiple_of(tile.depth.max(16));
    let slices = k.div_ceil(slice);
    let parts = builder.scratch(times(&[4, slices, m, n]));
    let mut list = vec![left, right, scratch("float *", "parts", parts)];
    list.append(&mut sizes);
    list.push(size("depth", "a slice", slice)?);
    list.extend(variant.needed());
    let geometry = tile.geometry(&mut builder, tiles * slices)?;
    builder.call("product_slices", geometry, &list, "product_slice", &format!("{layout}{some}{near}"));
    let mut list = vec![scratch("const float *", "parts", parts), o.get("c")?];
    list.extend([size("m", "rows", m)?, size("n", "columns", n)?, size("slices", "slices", slices)?]);
    list.extend(variant.needed());
    let some = if variant.places { ", true" } else { "" };
    let constants = format!("{accumulate}{some}");
    builder.call("product_join", per_thread(times(&[m, n]))?, &list, "add_slices", &constants);
    Ok(builder.finish())
}

/// The product of few rows with a packed matrix, whose rows are those of `b`'s columns.
fn few(kernel: &Product, variant: Variant, packed: Packed) -> Result<Option<Source>> {
    let &Product { m, n, k, a, b, accumulate, stored: _ } = kernel;
    let o = Operands::of(kernel, variant);
    let lines = a.column == 1 && a.row.is_multiple_of(4) && o.wide(&["a"])?;
    let whole = b.row == 1 && b.column.is_multiple_of(packed.unit() as u64);
    let Some(few) = Few::of(&variant, packed, (m, n, k), 1, (false, lines && whole))? else {
        return Ok(None);
    };
    let mut list = o.list(["a", "b", "c"])?;
    list.extend([
        size("m", "a product's rows", m)?,
        size("n", "a product's columns", n)?,
        size("k", "a product's depth", k)?,
        stride_of("a_far", a.row)?,
        stride_of("b_far", b.column)?,
    ]);
    let some = variant.places && kernel.leaves_rows_out();
    list.extend(variant.needed().filter(|_| some));
    let name = format!("few_{m}x{n}x{k}_of_{}", packed.name());
    Ok(few.source(name, &list, "few_product", &format!("{accumulate}, {some}")))
}

/// Slices of a product whose tiles are too few to keep the processors busy, none shorter than
/// `least`.
fn slices_of(variant: Variant, tiles: u64, k: u64, least: u64) -> u64 {
    (2 * variant.processors()).checked_div(tiles).map_or(1, |wanted| wanted.min(k / least).max(1))
}

/// The product of matrices in e4m3; on GPUs whose tensor cores do not multiply it so, naive.
pub(super) fn product_e4m3(kernel: &ProductE4m3, variant: Variant) -> Result<Option<Source>> {
    let &ProductE4m3 { m, n, k, accumulate } = kernel;
    let o = Operands::of(kernel, variant);
    // The copy engine begins at multiples of 16 bytes.
    if !variant.hopper || !o.wide(&["a", "b"])? {
        return kernel.naive(variant);
    }
    let tile = Tile::of_codes(n).into(o.wide(&["c"])?);
    let tiles = tile.count(m, n);
    let slices = slices_of(variant, tiles, k, 1024);
    let tile = if slices > 1 { tile } else { tile.paired(m) };
    let (add, narrow) = (if accumulate { "_add" } else { "" }, if o.narrow("c")? { "_bf16" } else { "" });
    let name = format!("product_e4m3_{m}x{n}x{k}{add}{narrow}");
    let mut builder = Builder::of_family(name, &format!("product_e4m3{add}{narrow}"), "e4m3.cuh");
    let mut list = vec![];
    for (name, lines, across) in [("a", m, tile.rows), ("b", n, tile.part())] {
        list.extend(coded(o.at(name)?, name, lines, k, across)?);
    }
    let sizes = [
        size("m", "a product's rows", m)?,
        size("n", "a product's columns", n)?,
        size("k", "a product's depth", k)?,
    ];
    let layout = tile.text(true);
    if slices == 1 {
        list.push(o.get("c")?);
        list.extend(sizes);
        let geometry = tile.streaming(&mut builder, tiles, variant)?;
        builder.call("product_tiles", geometry, &list, "product_e4m3", &format!("{layout}, {accumulate}"));
        return Ok(builder.finish());
    }
    let slice = k.div_ceil(slices).next_multiple_of(TILE);
    let slices = k.div_ceil(slice);
    let parts = builder.scratch(times(&[4, slices, m, n]));
    list.push(scratch("float *", "parts", parts));
    list.extend(sizes);
    list.push(size("depth", "a slice", slice)?);
    let geometry = tile.geometry(&mut builder, tiles * slices)?;
    builder.call("product_slices", geometry, &list, "product_slice_e4m3", &layout);
    let mut list = vec![scratch("const float *", "parts", parts), o.get("c")?];
    list.extend([size("m", "rows", m)?, size("n", "columns", n)?, size("slices", "slices", slices)?]);
    builder.call("product_join", per_thread(times(&[m, n]))?, &list, "add_slices", &accumulate.to_string());
    Ok(builder.finish())
}

/// The maps of an operand in e4m3: of its codes, `across` lines at a time, and of the exponents
/// after them. Two bytes are an element of either.
fn coded(operand: usize, name: &str, lines: u64, depth: u64, across: u64) -> Result<[Param; 2]> {
    let map = |name: &str, base: Base, [row, rows]: [u64; 2], box_rows: u64| -> Result<Param> {
        for size in [row, rows, times(&[row, rows]) >> 8] {
            fits("a matrix for the copy engine", size)?;
        }
        let box_rows = fits("rows of a box", box_rows)?;
        let map = Matrices { base, row: row / 2, rows, stride: Some(row / 2), count: 1, box_rows };
        Ok(Param::new("const __grid_constant__ TensorMap", name, Argument::Map(map)))
    };
    let exponents = Base::Within(operand, times(&[lines, depth]));
    Ok([
        map(name, Base::Operand(operand), [depth, lines], across)?,
        map(&format!("{name}_exponents"), exponents, [lines, depth / TILE], 1)?,
    ])
}
