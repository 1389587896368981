//! The CUDA of grouped products: tiles whose group is found by bisection.

use super::kernel::{Grouped, GroupedOuter};
use crate::codegen::blocks::{Few, unpacked};
use crate::codegen::text::{Builder, Operands, Param, size, status, times};
use crate::codegen::tile::{Operand, Tile};
use crate::codegen::{CodegenError, Source, Variant};
use crate::format::Packed;
use crate::op::kernel::KernelKind;
use crate::program::Kernel;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn grouped(kernel: &Grouped, variant: Variant) -> Result<Option<Source>> {
    let &Grouped { slots, experts, out, inner, transposed, gather, stored } = kernel;
    if let (true, Some(packed)) = (stored, variant.packed) {
        return match few(kernel, variant, packed)? {
            Some(source) => Ok(Some(source)),
            None => unpacked(kernel, &Kernel::Grouped(Grouped { stored: false, ..*kernel }), variant),
        };
    }
    // Tiles have operands of one type.
    if stored {
        return kernel.naive(variant);
    }
    let o = Operands::of(kernel, variant);
    let (n, k) = if transposed { (inner, out) } else { (out, inner) };
    let kind = if transposed { "_transposed" } else { "" };
    let from = gather.map_or(String::new(), |per| format!("_gather{per}"));
    let name = format!("grouped_{slots}x{n}x{k}_of_{experts}{kind}{from}{}", variant.suffix());
    let from = if gather.is_some() { "_gather" } else { "" };
    let family = format!("grouped{kind}{from}{}", variant.suffix());
    let mut builder = Builder::of_family(name, &family, "grouped.cuh");
    let wide = variant.aligned && out.is_multiple_of(8) && inner.is_multiple_of(8);
    let tile = Tile::of(variant, wide, (slots / experts.max(1), n, k), experts).into(o.wide(&["y"])?);
    let tile = if gather.is_some() { tile.gathering() } else { tile };
    let gathered = gather.is_some();
    let x = Operand { fast: true, lines: slots, depth: k, far: k, count: 1, gathered };
    let x = tile.operand(tile.rows, o.get("x")?, x)?;
    let far = if transposed { n } else { k };
    let w = Operand { fast: !transposed, lines: n, depth: k, far, count: experts, gathered: false };
    let w = tile.operand(tile.columns, o.get("w")?, w)?;
    // The worst case: every group, and the rows in none, leave one tile unfilled.
    let tiles = (slots / tile.rows + experts + 1) * n.div_ceil(tile.columns);
    let mut list = vec![x, w, o.get("offsets")?];
    if gather.is_some() {
        list.push(o.get("order")?);
    }
    list.push(o.get("y")?);
    list.extend([
        size("slots", "slots", slots)?,
        size("experts", "experts", experts)?,
        size("n", "a matrix's rows", n)?,
        size("k", "a matrix's columns", k)?,
    ]);
    if let Some(per) = gather {
        list.push(size("per", "choices of a token", per)?);
    }
    list.extend(status());
    let (order, per) = if gather.is_some() { ("order", "per") } else { ("nullptr", "1") };
    let constants = format!("{}, {transposed}, {}", tile.text(wide), gather.is_some());
    let geometry = tile.streaming(&mut builder, if slots == 0 || n == 0 { 0 } else { tiles }, variant)?;
    let body = format!(
        "    grouped<{constants}>(x, w, offsets, {order}, y, slots, experts, n, k, {per}, status, launch);\n"
    );
    builder.entry("grouped_tiles", geometry, &list, &body);
    Ok(builder.finish())
}

/// Slots that have their matrix each: more of them share one, which is then read again for each.
const FEW_SLOTS: u64 = 64;

/// Few slots with packed matrices.
fn few(kernel: &Grouped, variant: Variant, packed: Packed) -> Result<Option<Source>> {
    let &Grouped { slots, experts, out, inner, transposed, gather, stored: _ } = kernel;
    let o = Operands::of(kernel, variant);
    let fit = !transposed && slots <= FEW_SLOTS && o.wide(&["x"])?;
    let Some(few) = Few::of(&variant, packed, (1, out, inner), slots, (true, fit))? else { return Ok(None) };
    let order = gather.map(|_| o.get("order")).transpose()?;
    let mut list = vec![o.get("x")?, o.get("w")?, o.get("offsets")?];
    list.extend(order.or(Some(Param { name: "order".into(), ..o.get("offsets")? })));
    list.push(o.get("y")?);
    list.extend([
        size("slots", "slots", slots)?,
        size("experts", "experts", experts)?,
        size("n", "a matrix's rows", out)?,
        size("k", "a matrix's columns", inner)?,
        size("per", "choices of a token", gather.unwrap_or(1))?,
    ]);
    list.extend(status());
    let name = format!("few_{slots}x{out}x{inner}_by_{experts}_of_{}", packed.name());
    Ok(few.source(name, &list, "few_grouped", &gather.is_some().to_string()))
}

pub(super) fn grouped_outer(kernel: &GroupedOuter, variant: Variant) -> Result<Option<Source>> {
    let &GroupedOuter { slots, experts, out, inner, gather, accumulate } = kernel;
    let o = Operands::of(kernel, variant);
    let from = gather.map_or(String::new(), |per| format!("_gather{per}"));
    let add = if accumulate { "_add" } else { "" };
    let name = format!("grouped_outer_{out}x{inner}x{slots}_of_{experts}{from}{add}{}", variant.suffix());
    let family = format!("grouped_outer{from}{add}{}", variant.suffix());
    let mut builder = Builder::of_family(name, &family, "grouped.cuh");
    let wide = variant.aligned && out.is_multiple_of(8) && inner.is_multiple_of(8);
    let sizes = (out, inner, slots / experts.max(1));
    let tile = Tile::of_slow_results(variant, wide, sizes, experts).into(o.wide(&["w"])?);
    let tile = if gather.is_some() { tile.gathering() } else { tile };
    let y = Operand { fast: false, lines: out, depth: slots, far: out, count: 1, gathered: false };
    let y = tile.operand(tile.rows, o.get("y")?, y)?;
    let gathered = gather.is_some();
    let x = Operand { fast: false, lines: inner, depth: slots, far: inner, count: 1, gathered };
    let x = tile.operand(tile.columns, o.get("x")?, x)?;
    let mut list = vec![y, x, o.get("offsets")?];
    if gather.is_some() {
        list.push(o.get("order")?);
    }
    list.push(o.get("w")?);
    list.extend([
        size("slots", "slots", slots)?,
        size("experts", "experts", experts)?,
        size("out", "a matrix's rows", out)?,
        size("inner", "a matrix's columns", inner)?,
    ]);
    list.extend(status());
    let order = if gather.is_some() { "order" } else { "nullptr" };
    let per = gather.unwrap_or(1);
    let constants = format!("{}, {}, {per}, {accumulate}", tile.text(wide), gather.is_some());
    let geometry = tile.geometry(&mut builder, times(&[tile.count(out, inner), experts]))?;
    let sizes = "slots, experts, out, inner";
    let body =
        format!("    grouped_outer<{constants}>(y, x, offsets, {order}, w, {sizes}, status, launch);\n");
    builder.entry("grouped_outer_tiles", geometry, &list, &body);
    Ok(builder.finish())
}
