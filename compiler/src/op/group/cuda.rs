//! The CUDA of a stable counting sort of slots by expert, in chunks, and of groups cut to tiles: a
//! thread for each slot, which counts those of its group that come before it.

use super::kernel::{Group, RoundGroups};
use crate::codegen::text::{
    Builder, CHUNK, Operands, Param, blocks, fits, one, per_thread, per_warp, scratch, times, with_status,
};
use crate::codegen::{CodegenError, Source, Variant};

type Result<T> = std::result::Result<T, CodegenError>;

/// The result of an earlier pass, which this one reads.
fn read(p: Param) -> Param {
    Param { declaration: format!("const {}", p.declaration), ..p }
}

pub(super) fn group(kernel: &Group, variant: Variant) -> Result<Option<Source>> {
    let &Group { slots, experts } = kernel;
    let o = Operands::of(kernel, variant);
    let chunks = u64::from(fits("slots", slots)?).div_ceil(CHUNK);
    let groups = u64::from(fits("experts", experts)?) + 1;
    let mut builder = Builder::new(format!("group_{slots}_into_{experts}"), "route.cuh");
    let counts = builder.scratch(times(&[4, chunks, groups]));
    let totals = builder.scratch(times(&[4, groups]));
    builder.call(
        "group_counts",
        (blocks(chunks)?, 32, 0),
        &[o.get("chosen")?, scratch("int *", "counts", counts)],
        "group_count",
        &format!("{slots}, {experts}"),
    );
    builder.call(
        "group_sums",
        per_warp(groups)?,
        &[scratch("int *", "counts", counts), scratch("int *", "totals", totals)],
        "group_chunks",
        &format!("{chunks}, {experts}"),
    );
    builder.call(
        "group_starts",
        (1, 32, 0),
        &[scratch("const int *", "totals", totals), o.get("offsets")?],
        "group_offsets",
        &format!("{experts}"),
    );
    builder.call(
        "group_places",
        (blocks(chunks)?, 32, 0),
        &[
            o.get("chosen")?,
            scratch("int *", "counts", counts),
            read(o.get("offsets")?),
            o.get("order")?,
            o.get("inverse")?,
        ],
        "group_place",
        &format!("{slots}, {experts}"),
    );
    Ok(builder.finish())
}

pub(super) fn round_groups(kernel: &RoundGroups, variant: Variant) -> Result<Option<Source>> {
    let &RoundGroups { slots, experts, k, spare, tile, none } = kernel;
    for (what, n) in [("slots", slots), ("experts", experts), ("a tile", tile), ("the choice", k)] {
        fits(what, n)?;
    }
    let name = format!("round_{slots}_of_{experts}_by_{tile}_{spare}_of_{k}_{none}");
    let list = with_status(Operands::of(kernel, variant).all()?);
    let constants = format!("{slots}, {experts}, {k}, {}, {tile}, {none}", k - spare);
    one(name, "route.cuh", "round_groups_of", per_thread(slots)?, list, "round_groups", constants)
}
