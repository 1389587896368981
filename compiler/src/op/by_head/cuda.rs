//! The CUDA of products by head: tiles of each head's rows and columns.

use super::kernel::ByHead;
use crate::codegen::blocks::{Few, unpacked};
use crate::codegen::text::{Builder, Operands, fits, size, times};
use crate::codegen::tile::Tile;
use crate::codegen::{CodegenError, Source, Variant};
use crate::format::Packed;
use crate::op::kernel::KernelKind;
use crate::program::Kernel;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn by_head(kernel: &ByHead, variant: Variant) -> Result<Option<Source>> {
    let &ByHead { rows, heads, out, inner, first, part, transposed, stored } = kernel;
    if let (true, Some(packed)) = (stored, variant.packed) {
        return match few(kernel, variant, packed)? {
            Some(source) => Ok(Some(source)),
            None => unpacked(kernel, &Kernel::ByHead(ByHead { stored: false, ..*kernel }), variant),
        };
    }
    // Tiles have operands of one type.
    if stored {
        return kernel.naive(variant);
    }
    // A box of the copy engine would reach into the vector of the next head.
    let variant = Variant { hopper: false, ..variant };
    let (n, k) = kernel.sizes();
    let o = Operands::of(kernel, variant);
    let kind = if transposed { "_transposed" } else { "" };
    let name = format!("by_head_{rows}x{n}x{k}_of_{heads}_from_{first}_of_{out}{kind}{}", variant.suffix());
    let family = format!("by_head{kind}{}", variant.suffix());
    let mut builder = Builder::of_family(name, &family, "heads.cuh");
    let wide = variant.aligned && part.is_multiple_of(8) && inner.is_multiple_of(8);
    let tile = Tile::of(variant, wide, (rows, n, k), heads).into(o.wide(&["y"])?);
    for (what, size) in [("vectors of heads", times(&[heads, k])), ("rows of matrices", times(&[heads, out]))]
    {
        fits(what, size)?;
    }
    let mut list = o.list(["x", "w", "y"])?;
    list.extend([
        size("rows", "rows", rows)?,
        size("heads", "heads", heads)?,
        size("out", "a matrix's rows", out)?,
        size("first", "a matrix's first row", first)?,
        size("n", "elements of a result", n)?,
        size("k", "elements of a vector", k)?,
    ]);
    list.extend(variant.needed());
    let geometry = tile.geometry(&mut builder, times(&[tile.count(rows, n), heads]))?;
    let constants = format!("{}, {transposed}, {}", tile.text(wide), variant.places);
    builder.call("by_head_tiles", geometry, &list, "by_head", &constants);
    Ok(builder.finish())
}

/// The vectors of few rows with rows of packed matrices.
fn few(kernel: &ByHead, variant: Variant, packed: Packed) -> Result<Option<Source>> {
    let &ByHead { rows, heads, out, inner, first, part, transposed, stored: _ } = kernel;
    let o = Operands::of(kernel, variant);
    let fit = (false, !transposed && o.wide(&["x"])?);
    let Some(few) = Few::of(&variant, packed, (rows, part, inner), heads, fit)? else { return Ok(None) };
    let mut list = o.list(["x", "w", "y"])?;
    list.extend([
        size("rows", "rows", rows)?,
        size("heads", "heads", heads)?,
        size("out", "a matrix's rows", out)?,
        size("from", "a matrix's first row", first)?,
        size("n", "elements of a result", part)?,
        size("k", "elements of a vector", inner)?,
    ]);
    list.extend(variant.needed());
    let name = format!("few_{rows}x{part}x{inner}_of_{heads}_of_{}", packed.name());
    Ok(few.source(name, &list, "few_by_head", &variant.places.to_string()))
}
