//! The CUDA of lists of keys: bits that the kernels of attention look at, which every pass of the
//! gradient reads, too.

use super::kernel::AttentionShape;
use crate::codegen::text::{Builder, Operands, Param, blocks, fits, per_warp, scratch, times};
use crate::codegen::{CodegenError, Variant};
use crate::ir::{Attention, Mask};

type Result<T> = std::result::Result<T, CodegenError>;

/// Bytes of bits that exist at a time, at most; beyond, the naive kernels go through lists.
const MOST: u64 = 1 << 30;

/// Bits of all lists, and of their tiles of 32 queries and 32 keys.
struct Sizes {
    lists: u64,
    words: u64,
    bits: u64,
    tiles: u64,
}

impl Sizes {
    fn of(s: &AttentionShape, lists: u64) -> Self {
        let words = s.keys.div_ceil(32);
        Sizes {
            lists,
            words,
            bits: times(&[4, s.batch, lists, s.queries, words]),
            tiles: times(&[s.batch, lists, s.queries.div_ceil(32), words.div_ceil(32)]),
        }
    }
}

/// Whether keys are not chosen, or there is room for a bit of each.
pub(super) fn fits_bits(s: &AttentionShape, a: &Attention, variant: Variant) -> bool {
    let Some(among) = a.among else { return true };
    let sizes = Sizes::of(s, among.heads);
    let marks = times(&[among.count, among.block]);
    sizes.bits <= MOST && times(&[4, sizes.words]) <= variant.shared() && marks <= i32::MAX as u64
}

/// The line that names what hides keys besides order, window and segments, and its name.
pub(super) fn program(s: &AttentionShape, a: &Attention) -> (String, String) {
    match (&a.program, a.among, a.every) {
        (Some(_), ..) => (String::new(), ", Scored".into()),
        (None, Some(among), _) => {
            let line =
                format!("typedef Listed<{}, {}, {}, {}> L;\n", s.queries, s.keys, s.heads, among.heads);
            (line, ", L".into())
        }
        (None, None, Some(every)) => (String::new(), format!(", Ends<{every}>")),
        (None, None, None) => Default::default(),
    }
}

/// The passes that make bits of lists, where keys are chosen; what entries that read them take, and
/// how it is passed on.
pub(super) fn passes(
    builder: &mut Builder,
    s: &AttentionShape,
    a: &Attention,
    o: &Operands,
) -> Result<(Vec<Param>, String)> {
    let Some(among) = a.among else { return Ok(Default::default()) };
    let Sizes { lists, words, bits, tiles } = Sizes::of(s, among.heads);
    let (at, tiles_at) = (builder.scratch(bits), builder.scratch(times(&[4, tiles])));
    let positions = a.mask == Mask::Positions;
    let places = if positions { ["query_positions", "key_positions"] } else { ["nullptr"; 2] };
    let mut list = vec![o.get("chosen")?];
    if positions {
        list.extend(o.list(places)?);
    }
    list.push(scratch("u32 *", "bits", at));
    let (queries, keys) = (s.queries, s.keys);
    let (count, block, every) = (among.count, among.block, a.every.unwrap_or(1));
    fits("the tokens of a block", block.max(every))?;
    let body = format!(
        "    attention_bits<L, {queries}, {keys}, {lists}, {count}, {block}, {every}, {positions}>(chosen, {}, {}, bits);\n",
        places[0], places[1]
    );
    let geometry = (blocks(times(&[s.batch, queries, lists]))?, 128, fits("bits of a row", 4 * words)?);
    builder.entry("attention_bits_of_lists", geometry, &list, &body);
    let list = [scratch("const u32 *", "bits", at), scratch("u32 *", "tiles", tiles_at)];
    let body = format!("    attention_tiles<L, {queries}, {lists}>(bits, tiles, {tiles});\n");
    builder.entry("attention_tiles_of_lists", per_warp(tiles)?, &list, &body);
    let read = vec![scratch("const u32 *", "bits", at), scratch("const u32 *", "tiles", tiles_at)];
    Ok((read, ", S::Reads{bits, tiles}".into()))
}
