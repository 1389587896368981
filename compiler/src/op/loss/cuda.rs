//! The CUDA of cross-entropy, and of the head fused with it.

use super::kernel::{CrossEntropy, CrossEntropyGrad, HeadLoss, HeadLossGrad};
use crate::codegen::blocks::unpacked;
use crate::codegen::text::{
    Builder, Operands, Param, THREADS, blocks, fits, float, one, per_thread, per_thread_of, scratch, status,
    times, with_status,
};
use crate::codegen::tile::{LARGE, MIDDLE, Operand, ROWS_BF16, Tile};
use crate::codegen::{Argument, CodegenError, Source, Variant};
use crate::op::Bits;
use crate::op::kernel::KernelKind;
use crate::program::Kernel;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn cross_entropy(kernel: &CrossEntropy, variant: Variant) -> Result<Option<Source>> {
    let &CrossEntropy { rows, vocab } = kernel;
    let o = Operands::of(kernel, variant);
    fits("rows", rows)?;
    let name = format!("cross_entropy_{rows}x{vocab}{}", variant.suffix());
    // A warp for each row where there are rows enough to fill a GPU, else a block.
    let each = o.numbers(u64::from(fits("the vocabulary", vocab)?), &["logits"])?;
    let threads = if rows >= 8 * variant.processors() || vocab <= 32 * each { 32 } else { THREADS };
    let grid = (blocks(rows.div_ceil(THREADS / threads))?, THREADS as u32, 0);
    let (list, constants) = (with_status(o.all()?), format!("{rows}, {vocab}, {threads}, {each}"));
    one(name, "ends.cuh", "cross_entropy_rows", grid, list, "cross_entropy", constants)
}

pub(super) fn cross_entropy_grad(kernel: &CrossEntropyGrad, variant: Variant) -> Result<Option<Source>> {
    let &CrossEntropyGrad { rows, vocab } = kernel;
    let o = Operands::of(kernel, variant);
    fits("rows", rows)?;
    let name = format!("cross_entropy_grad_{rows}x{vocab}{}", variant.suffix());
    let each = o.numbers(u64::from(fits("the vocabulary", vocab)?), &["logits", "dlogits"])?;
    let grid = per_thread_of(times(&[rows, vocab]), each)?;
    let (list, constants) = (with_status(o.all()?), format!("{rows}, {vocab}, {each}"));
    one(name, "ends.cuh", "cross_entropy_rows", grid, list, "cross_entropy_grad", constants)
}

fn capped(softcap: Option<Bits>) -> (bool, String) {
    (softcap.is_some(), float(softcap.map_or(1.0, |c| c.0)))
}

pub(super) fn head_loss(kernel: &HeadLoss, variant: Variant) -> Result<Option<Source>> {
    let &HeadLoss { rows, vocab, width, softcap, stored } = kernel;
    if stored && variant.packed.is_some() {
        return unpacked(kernel, &Kernel::HeadLoss(HeadLoss { stored: false, ..*kernel }), variant);
    }
    // Tiles have operands of one type.
    if stored {
        return kernel.naive(variant);
    }
    let o = Operands::of(kernel, variant);
    for (what, size) in [("rows", rows), ("the vocabulary", vocab), ("the width", width)] {
        fits(what, size)?;
    }
    let name = format!("head_loss_{rows}x{vocab}x{width}{}", variant.suffix());
    let mut builder = Builder::new(name, "ends.cuh");
    let wide = variant.aligned && width.is_multiple_of(8);
    let tile = match Tile::of_slow_results(variant, wide, (rows, vocab, width), 1) {
        tile if tile.shared > 0 => tile,
        tile if tile.narrow => ROWS_BF16,
        // A running sum for each row on top of the large tile's registers would spill.
        LARGE => MIDDLE,
        tile => tile,
    };
    let tiles = rows.div_ceil(tile.rows);
    // Parts of whole tiles, enough for every processor.
    let wanted = (2 * variant.processors()).div_ceil(tiles.max(1)).min(vocab.div_ceil(tile.columns)).max(1);
    let part = vocab.div_ceil(wanted).next_multiple_of(tile.columns);
    let parts = vocab.div_ceil(part);
    let at = builder.scratch(times(&[12, parts, rows]));
    let (is_capped, cap) = capped(softcap);
    let x = Operand { fast: true, lines: rows, depth: width, far: width, count: 1, gathered: false };
    let w = Operand { fast: true, lines: vocab, depth: width, far: width, count: 1, gathered: false };
    let mut list = vec![
        tile.operand(tile.rows, o.get("x")?, x)?,
        tile.operand(tile.columns, o.get("w")?, w)?,
        o.get("targets")?,
        scratch("float *", "parts", at),
    ];
    list.extend(status());
    let constants = format!("{}, {rows}, {vocab}, {width}, {part}, {is_capped}", tile.text(wide));
    let geometry = tile.geometry(&mut builder, tiles * parts)?;
    builder.entry(
        "head_loss_parts",
        geometry,
        &list,
        &format!("    head_loss<{constants}>(x, w, targets, parts, {cap}, status, launch);\n"),
    );
    builder.call(
        "head_loss_rows",
        per_thread(rows)?,
        &[scratch("const float *", "parts", at), o.get("targets")?, o.get("nll")?, o.get("lse")?],
        "head_loss_join",
        &format!("{rows}, {parts}"),
    );
    Ok(builder.finish())
}

/// Bytes of the cotangents of logits that exist at a time: classes enough that each of the three
/// products fills a GPU, and that the gradients of the rows are not added to too often.
const LOGITS: u64 = 512 << 20;

pub(super) fn head_loss_grad(kernel: &HeadLossGrad, variant: Variant) -> Result<Option<Source>> {
    let &HeadLossGrad { rows, vocab, width, softcap, accumulate } = kernel;
    let o = Operands::of(kernel, variant);
    for (what, size) in [("rows", rows), ("the vocabulary", vocab), ("the width", width)] {
        fits(what, size)?;
    }
    let name = format!("head_loss_grad_{rows}x{vocab}x{width}{}", variant.suffix());
    let mut builder = Builder::new(name, "ends.cuh");
    // Without rows there are no gradients, but there are the weights' zeros.
    if rows == 0 {
        let count = if accumulate { 0 } else { times(&[vocab, width]) };
        builder.line("#include \"move.cuh\"");
        let list = [o.words("dw", "u32")?];
        builder.call("head_zero", per_thread(count)?, &list, "zero", &format!("u32, {count}"));
        return Ok(builder.finish());
    }
    // Classes at a time: whole tiles, or all of them.
    let (element, bytes) = if o.narrow("x")? { ("bf16", 2) } else { ("float", 4) };
    let part = (LOGITS / bytes / rows / 128 * 128).max(128).min(vocab.next_multiple_of(16));
    let part = if part >= vocab { vocab } else { part };
    let iterations = vocab.div_ceil(part);
    builder.iterations(fits("parts of the vocabulary", iterations)?);
    let logits = builder.scratch(times(&[bytes, rows, part]));
    // Cotangents of logits are of the type of the operands.
    let (written, read) = (format!("{element} *"), format!("const {element} *"));
    let wide = variant.aligned && width.is_multiple_of(8);
    let wide_part = wide && part.is_multiple_of(8);
    let (is_capped, cap) = capped(softcap);
    let iteration = || Param::new("int", "iteration", Argument::Iteration);

    // Rows and weights with the width along the depth of the sums, or along the lines.
    let x = |fast, lines, depth| Operand { fast, lines, depth, far: width, count: 1, gathered: false };
    let logit = |fast, lines, depth| Operand { fast, lines, depth, far: part, count: 1, gathered: false };
    let tile = Tile::of_slow_results(variant, wide, (rows, part, width), 1);
    let mut list = vec![
        tile.operand(tile.rows, o.get("x")?, x(true, rows, width))?,
        tile.operand(tile.columns, o.get("w")?, x(true, vocab, width))?,
        o.get("targets")?,
        o.get("lse")?,
        o.get("d")?,
        scratch(&written, "dlogits", logits),
        iteration(),
    ];
    list.extend(status());
    let constants = format!("{}, {rows}, {vocab}, {width}, {part}, {is_capped}", tile.text(wide));
    let body = format!(
        "    head_grad_logits<{constants}>(x, w, targets, lse, d, dlogits, {cap}, iteration, status, launch);\n"
    );
    let geometry = tile.geometry(&mut builder, tile.count(rows, part))?;
    builder.entry("head_logits", geometry, &list, &body);

    let tile = Tile::of_slow_results(variant, wide_part, (rows, width, part), 1).into(o.wide(&["dx"])?);
    let geometry = tile.geometry(&mut builder, tile.count(rows, width))?;
    builder.call(
        "head_x",
        geometry,
        &[
            tile.operand(tile.rows, scratch(&read, "dlogits", logits), logit(true, rows, part))?,
            tile.operand(tile.columns, o.get("w")?, x(false, width, vocab))?,
            o.get("dx")?,
            iteration(),
        ],
        "head_grad_x",
        &format!("{}, {rows}, {vocab}, {width}, {part}", tile.text(wide_part)),
    );
    let tile = Tile::of_slow_results(variant, wide_part, (part, width, rows), 1).into(o.wide(&["dw"])?);
    let geometry = tile.geometry(&mut builder, tile.count(part, width))?;
    builder.call(
        "head_w",
        geometry,
        &[
            tile.operand(tile.rows, scratch(&read, "dlogits", logits), logit(false, part, rows))?,
            tile.operand(tile.columns, o.get("x")?, x(false, width, rows))?,
            o.get("dw")?,
            iteration(),
        ],
        "head_grad_w",
        &format!("{}, {rows}, {vocab}, {width}, {part}, {accumulate}", tile.text(wide_part)),
    );
    Ok(builder.finish())
}
