//! The CUDA of reading sources: a warp for each token.

use super::kernel::{ReadSources, ReadSourcesGrad, SourcesShape};
use crate::codegen::text::{Builder, Operands, fits, float, per_warp, times};
use crate::codegen::{CodegenError, Source, Variant};

type Result<T> = std::result::Result<T, CodegenError>;

pub(super) fn forward(kernel: &ReadSources, variant: Variant) -> Result<Option<Source>> {
    sources(&Operands::of(kernel, variant), &kernel.0, false)
}

pub(super) fn backward(kernel: &ReadSourcesGrad, variant: Variant) -> Result<Option<Source>> {
    sources(&Operands::of(kernel, variant), &kernel.0, true)
}

fn sources(o: &Operands, s: &SourcesShape, gradient: bool) -> Result<Option<Source>> {
    fits("tokens", s.rows)?;
    fits("a source", times(&[s.width]))?;
    let kind = if gradient { "read_sources_grad" } else { "read_sources" };
    let mut builder = Builder::new(format!("{kind}_t{}_h{}", s.rows, s.width), "sources.cuh");
    builder.line(&format!("typedef Sources<{}, {}> S;", s.rows, s.width));
    let names = if gradient { "du, dx, dq, dsources" } else { "u" };
    let eps = float(s.eps.0);
    let body = format!("    {kind}<S>(sources, x, x_stride, q, row, {names}, {eps});\n");
    builder.entry(&format!("{kind}_tokens"), per_warp(s.rows)?, &o.all()?, &body);
    Ok(builder.finish())
}
