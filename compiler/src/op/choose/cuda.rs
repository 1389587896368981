//! The CUDA of choices of keys: scores of some tiles of queries, shares where they are of a
//! softmax, and the best of each list, tiles after tiles.

use super::Measure;
use super::kernel::ChooseKeys;
use crate::codegen::text::{Builder, Operands, Param, blocks, fits, float, per_thread, scratch, times};
use crate::codegen::{Argument, CodegenError, Source, Variant};
use crate::ir::Mask;
use crate::op::kernel::KernelKind;

type Result<T> = std::result::Result<T, CodegenError>;

/// Bytes of scores that exist at a time: those of enough queries to fill a GPU.
const SCORES: u64 = 128 << 20;
/// Queries of a tile, where there are as many, and keys.
const ROWS: u64 = 64;
const FEW: u64 = 16;
const ACROSS: u64 = 64;

pub(super) fn choose(kernel: &ChooseKeys, variant: Variant) -> Result<Option<Source>> {
    let (s, o) = (&kernel.shape, &Operands::of(kernel, variant));
    for (what, size) in [
        ("queries", times(&[s.batch, s.queries])),
        ("keys", times(&[s.batch, s.keys])),
        ("a row of queries", times(&[s.heads, s.size])),
        ("a list", kernel.count),
        ("the tokens of a block", kernel.block()),
    ] {
        fits(what, size)?;
    }
    let (positions, block) = (kernel.seen.mask == Mask::Positions, kernel.block());
    let (near, first) = (kernel.near.min(kernel.count), kernel.first.min(kernel.count));
    let softmax = kernel.measure == Measure::Softmax;
    let measure = kernel.measure.number();
    let rows = if s.queries > FEW { ROWS } else { FEW };
    let scored = if positions { s.keys } else { s.keys / block };
    let kinds = if softmax { s.heads } else { kernel.lists };
    let tiles = times(&[s.batch, s.queries.div_ceil(rows)]);
    let at_a_time = (SCORES / times(&[4, rows, kinds, scored.max(1)]).max(1)).clamp(1, tiles.max(1));

    let types = if o.narrow("q")? { "bf16" } else { "f32" };
    let name = format!("choose_{}_{types}", kernel.summary().replace(['×', ' ', '/', ':', ','], "_"));
    let mut builder = Builder::new(name, "choose.cuh");
    builder.line(&format!(
        "typedef Choice<{}, {}, {}, {}, {}, {}, {}, {}, {block}, {near}, {first}, {measure}, {}, {positions}, {}, {rows}> C;",
        s.batch,
        s.queries,
        s.keys,
        s.heads,
        s.kv_heads,
        s.size,
        kernel.lists,
        kernel.count,
        kernel.weighed,
        kernel.seen.segments,
    ));
    let places = if positions { ["query_positions", "key_positions"] } else { ["nullptr"; 2] };
    let segments = if kernel.seen.segments { "segments" } else { "nullptr" };
    let weights = if kernel.weighed { "weights" } else { "nullptr" };
    let pass = Pass { o, at_a_time, scale: kernel.seen.scale };
    let scores = builder.scratch(times(&[4, at_a_time, rows, kinds, scored]));
    let shares = builder.scratch(if softmax { times(&[8, at_a_time, rows, s.heads]) } else { 0 });
    builder.iterations(fits("turns of a choice", tiles.div_ceil(at_a_time))?);

    let names = ["q", "k", places[0], places[1], segments, weights];
    let mut list = pass.list(&names)?;
    list.push(scratch("float *", "scores", scores));
    let grid = blocks(times(&[at_a_time, scored.div_ceil(ACROSS)]))?;
    let operands =
        format!("q, q_stride, k, k_stride, {}, {}, {segments}, {weights}, scores", places[0], places[1]);
    pass.entry(&mut builder, "choose_scores", "C", (grid, 256, 0), list, &operands);
    if softmax {
        let list = vec![scratch("const float *", "scores", scores), scratch("float *", "shares", shares)];
        let geometry = per_thread(times(&[at_a_time, rows, s.heads]))?;
        pass.entry(&mut builder, "choose_softmax", "C", geometry, list, "scores, shares");
    }
    let bytes = |held: bool| times(&[4, kernel.count + if held { scored } else { 0 }]);
    let held = bytes(true) <= variant.shared() - 1024;
    let (bytes, limit) = (bytes(held), variant.shared() - 1024);
    if bytes > limit {
        return Err(CodegenError::Shared { bytes, limit });
    }
    let mut list = pass.list(&[weights, places[0], places[1], "chosen"])?;
    list.extend([scratch("float *", "scores", scores), scratch("const float *", "shares", shares)]);
    let grid = blocks(times(&[at_a_time, rows, kernel.lists]))?;
    let operands = format!("scores, shares, {weights}, {}, {}, chosen", places[0], places[1]);
    let constants = format!("C, {held}");
    pass.entry(&mut builder, "choose_best", &constants, (grid, 256, bytes as u32), list, &operands);
    Ok(builder.finish())
}

/// A pass over some tiles, in every turn over the next ones.
struct Pass<'a> {
    o: &'a Operands,
    at_a_time: u64,
    scale: f64,
}

impl Pass<'_> {
    /// These operands, those in rows with the distance of their rows.
    fn list(&self, names: &[&str]) -> Result<Vec<Param>> {
        let mut list = vec![];
        for name in names.iter().filter(|name| **name != "nullptr") {
            list.push(self.o.get(name)?);
            if matches!(*name, "q" | "k") {
                list.push(self.o.stride(name)?);
            }
        }
        Ok(list)
    }

    fn entry(
        &self,
        builder: &mut Builder,
        name: &str,
        constants: &str,
        geometry: (u32, u32, u32),
        mut list: Vec<Param>,
        operands: &str,
    ) {
        list.push(Param::new("int", "turn", Argument::Iteration));
        let (at_a_time, scale) = (self.at_a_time, float(self.scale));
        let body = format!("    {name}<{constants}>({operands}, turn * {at_a_time}, {scale});\n");
        builder.entry(&format!("{name}_of_tiles"), geometry, &list, &body);
    }
}
