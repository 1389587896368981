//! The CUDA of convolutions: neighbouring threads have neighbouring channels.

use super::Tokens;
use super::kernel::{Conv, ConvGrad, ConvShape};
use crate::codegen::text::{
    Builder, Operands, Param, THREADS, blocks, fits, one, per_thread, per_thread_of, scratch, size, times,
};
use crate::codegen::{CodegenError, Source, Variant};

type Result<T> = std::result::Result<T, CodegenError>;

/// Channels of a block that sums the gradient of filters.
const LINE: u64 = 32;
/// Tokens that it goes through; more are in slices, whose sums are added up after.
const SLICE: u64 = 512;

fn constants(s: &ConvShape) -> Result<String> {
    let [tokens, channels, width] = [("tokens", s.tokens), ("channels", s.channels), ("a filter", s.width)]
        .map(|(n, size)| fits(n, size));
    Ok(format!("{}, {}, {}", tokens?, channels?, width?))
}

pub(super) fn conv(kernel: &Conv, variant: Variant) -> Result<Option<Source>> {
    let s = &kernel.shape;
    let operands = Operands::of(kernel, variant);
    let list = operands.all()?;
    let shape = constants(s)?;
    let name = |kind: &str| format!("{kind}_{}x{}x{}_{}", s.batch, s.tokens, s.channels, s.width);
    let later = kernel.reverse;
    match kernel.tokens {
        Tokens::All | Tokens::Segments => {
            let marked = kernel.tokens == Tokens::Segments;
            let kind = match (marked, later) {
                (false, false) => "conv",
                (false, true) => "conv_reverse",
                (true, false) => "conv_segments",
                (true, true) => "conv_segments_reverse",
            };
            let each = operands.numbers(s.channels, &["x", "w", "y"])?;
            let grid = per_thread_of(times(&[s.batch, s.tokens, s.channels]), each)?;
            let template = if marked { "conv_documents" } else { "conv_rows" };
            let constants = format!("{}, {shape}, {later}, {each}", fits("sequences", s.batch)?);
            one(name(kind), "conv.cuh", "conv_tokens", grid, list, template, constants)
        }
        Tokens::Kept => {
            let grid = per_thread(times(&[s.batch, s.channels]))?;
            let constants = format!("{}, {shape}", fits("sequences", s.batch)?);
            one(name("conv_kept"), "conv.cuh", "conv_channels", grid, list, "conv_continue", constants)
        }
    }
}

pub(super) fn grad(kernel: &ConvGrad, variant: Variant) -> Result<Option<Source>> {
    let s = &kernel.shape;
    let operands = Operands::of(kernel, variant);
    let mut list = operands.all()?;
    let kind = if kernel.segments { "conv_grad_segments" } else { "conv_grad" };
    let name = format!("{kind}_{}x{}x{}_{}", s.batch, s.tokens, s.channels, s.width);
    let slices = times(&[s.batch, s.tokens]).div_ceil(SLICE);
    // Entries of a filter of a block, which has their sums in registers.
    let entries = if s.width <= 8 { s.width.max(1) } else { 1 };
    let grid = blocks(times(&[s.channels.div_ceil(LINE), s.width / entries, slices.max(1)]))?;
    let template = if kernel.segments { "conv_filters_of_documents" } else { "conv_filters" };
    let constants = format!("{}, {}, {entries}, {SLICE}", fits("sequences", s.batch)?, constants(s)?);
    let mut builder = Builder::new(name, "conv.cuh");
    let count = times(&[s.channels, s.width]);
    let parts = (slices > 1).then(|| builder.scratch(times(&[slices, count, 4])));
    let result = operands.get("dw")?;
    if let (Some(at), Some(dw)) = (parts, list.iter_mut().find(|p| p.name == result.name)) {
        *dw = scratch("float *", "dw", at);
    }
    builder.call("conv_filter_sums", (grid, THREADS as u32, 0), &list, template, &constants);
    if let Some(at) = parts {
        let list: [Param; 3] =
            [scratch("const float *", "parts", at), result, size("slices", "slices of tokens", slices)?];
        builder.call("conv_filter_slices", per_thread(count)?, &list, "conv_slices", &count.to_string());
    }
    Ok(builder.finish())
}
