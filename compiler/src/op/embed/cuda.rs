//! The CUDA of embeddings; for the gradient rows are sorted by id, so that each sum has one owner.

use super::kernel::{Embed, EmbedGrad};
use crate::codegen::text::{
    Builder, CHUNK, Operands, THREADS, blocks, fits, one, per_thread, per_thread_of, per_warp, scratch,
    status, times, with_status, words,
};
use crate::codegen::{CodegenError, Source, Variant};
use crate::op::kernel::KernelKind;

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn embed(kernel: &Embed, variant: Variant) -> Result<Option<Source>> {
    let &Embed { rows, vocab, width } = kernel;
    let o = Operands::of(kernel, variant);
    // Rows are copied word by word.
    if o.narrow("table")? || variant.packed.is_some() {
        return kernel.naive(variant);
    }
    fits("rows", rows)?;
    let name = format!("embed_{rows}x{width}_of_{vocab}");
    let (word, width) = words("float", 4, width, o.wide(&["table", "x"])?);
    let list = with_status(vec![o.words("table", &word)?, o.get("ids")?, o.words("x", &word)?]);
    let grid = per_thread(times(&[rows, width]))?;
    one(name, "move.cuh", "embed_rows", grid, list, "embed", format!("{rows}, {vocab}, {width}"))
}

/// Bits of an id that rows are sorted by at a time, at most.
const DIGIT: u32 = 9;

pub(super) fn embed_grad(kernel: &EmbedGrad, variant: Variant) -> Result<Option<Source>> {
    let &EmbedGrad { rows, vocab, width, accumulate } = kernel;
    let o = Operands::of(kernel, variant);
    fits("rows", rows)?;
    fits("the width", width)?;
    let keys = u64::from(fits("the vocabulary", vocab)?) + 1;
    let mut builder = Builder::new(format!("embed_grad_{rows}x{width}_of_{vocab}"), "embed.cuh");
    if !accumulate {
        let count = times(&[vocab, width]);
        let list = [o.words("table", "u32")?];
        let each = o.numbers(4, &["table"])?;
        builder.call(
            "embed_zero",
            per_thread_of(count, each)?,
            &list,
            "zero",
            &format!("u32, {count}, {each}"),
        );
    }
    if rows == 0 || width == 0 || vocab == 0 {
        return Ok(builder.finish());
    }
    // As few digits as hold a key, of equal length.
    let bits = (64 - (keys - 1).leading_zeros()).max(1);
    let count = bits.div_ceil(DIGIT);
    let length = bits.div_ceil(count);
    let (digits, chunks) = (1u64 << length, rows.div_ceil(CHUNK));
    let counts = builder.scratch(times(&[4, chunks, digits]));
    let totals = builder.scratch(4 * digits);
    let offsets = builder.scratch(4 * digits);
    let orders = [builder.scratch(4 * rows), builder.scratch(4 * rows)];
    let sorted = builder.scratch(4 * rows);
    for digit in 0..count {
        let (from, to) = (orders[digit as usize % 2], orders[(digit as usize + 1) % 2]);
        let constants = format!("{rows}, {vocab}, {}, {digits}", digit * length);
        let mut list =
            vec![o.get("ids")?, scratch("const int *", "order", from), scratch("int *", "counts", counts)];
        list.extend(status());
        builder.call(
            &format!("digit{digit}_counts"),
            (blocks(chunks)?, 32, 0),
            &list,
            "digit_count",
            &constants,
        );
        builder.call(
            &format!("digit{digit}_sums"),
            per_warp(digits)?,
            &[scratch("int *", "counts", counts), scratch("int *", "totals", totals)],
            "group_chunks",
            &format!("{chunks}, {}", digits - 1),
        );
        builder.call(
            &format!("digit{digit}_starts"),
            (1, 32, 0),
            &[scratch("const int *", "totals", totals), scratch("int *", "offsets", offsets)],
            "group_offsets",
            &format!("{}", digits - 1),
        );
        let list = [
            o.get("ids")?,
            scratch("const int *", "order", from),
            scratch("int *", "counts", counts),
            scratch("const int *", "offsets", offsets),
            scratch("int *", "next", to),
            scratch("int *", "keys", sorted),
        ];
        builder.call(
            &format!("digit{digit}_places"),
            (blocks(chunks)?, 32, 0),
            &list,
            "digit_place",
            &constants,
        );
    }
    // Places of a block: few enough that there are two blocks for every processor.
    let part = 1u64 << (rows / (2 * variant.processors())).clamp(8, 64).ilog2();
    let parts = rows.div_ceil(part);
    let (heads, tails) =
        (builder.scratch(times(&[4, parts, width])), builder.scratch(times(&[4, parts, width])));
    let each = o.numbers(width, &["d", "table"])?;
    let threads = width.div_ceil(each).next_power_of_two().clamp(32, THREADS);
    let grid = blocks(times(&[parts, width.div_ceil(threads * each)]))?;
    let constants = format!("{rows}, {vocab}, {width}, {part}, {accumulate}, {each}, {threads}");
    let list = [
        o.get("d")?,
        scratch("const int *", "order", orders[count as usize % 2]),
        scratch("const int *", "keys", sorted),
        o.get("table")?,
        scratch("float *", "heads", heads),
        scratch("float *", "tails", tails),
    ];
    builder.call("embed_rows", (grid, threads as u32, 0), &list, "embed_parts", &constants);
    let list = [
        scratch("const int *", "keys", sorted),
        scratch("const float *", "heads", heads),
        scratch("const float *", "tails", tails),
        o.get("table")?,
    ];
    if parts > 1 {
        builder.call("embed_joins", (grid, threads as u32, 0), &list, "embed_join", &constants);
    }
    Ok(builder.finish())
}
