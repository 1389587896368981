//! The CUDA of attention over keys that many query heads share, or whose few queries leave a GPU
//! idle: keys are cut into parts, which a second pass joins. Of chosen keys a part reads those of
//! its own: tiles that no list has are passed over.

use super::cuda::{attention_name, attention_shape, scored, scores};
use super::kernel::{Attention, LONGEST_SHARED, X};
use super::listed;
use crate::codegen::text::{Builder, Operands, blocks, scratch, times};
use crate::codegen::{CodegenError, HOPPER_SHARED, Source, Variant};
use crate::ir::Mask;

type Result<T> = std::result::Result<T, CodegenError>;

/// The longest heads whose values are not their keys: a tile of each is in shared memory.
const LONGEST: u64 = 256;
/// The longest heads whose columns two warps have in their registers.
const LONGEST_OF_TWO: u64 = 640;
/// Rows from which on a block has 64 at once.
const MANY: u64 = 48;

/// How such an attention is cut.
pub(super) struct Parts {
    /// Times 16 rows of a block, and warps that share 16 rows.
    groups: u64,
    sharers: u64,
    /// Keys at a time, and of a part.
    tile: u64,
    part: u64,
    /// Parts of the keys, and blocks of each.
    parts: u64,
    each: u64,
    /// Shared memory of a block.
    shared: u64,
}

impl Parts {
    /// Where heads share their keys in bf16, or the heads of few tokens are the rows of one tile.
    pub(super) fn of(kernel: &Attention, variant: Variant) -> Option<Self> {
        let s = &kernel.shape;
        let fits = variant.is_narrow(0) && variant.aligned && s.size.is_multiple_of(32);
        let group = s.heads / s.kv_heads.max(1);
        // The heads of a tile's rows have one list or none.
        let one = |lists: u64| (s.heads / lists.max(1)).is_multiple_of(group.max(1));
        let fits = fits && kernel.attention.among.is_none_or(|among| one(among.heads));
        let rows = times(&[s.queries, group]);
        let few = kernel.attention.mask == Mask::Positions && rows <= 16 && s.size <= LONGEST;
        if !fits || rows == 0 || s.keys == 0 || !(kernel.shared && s.size <= LONGEST_SHARED || few) {
            return None;
        }
        let many = kernel.shared && rows >= MANY && s.size <= LONGEST_OF_TWO;
        let (groups, sharers) = if many { (4, 2) } else { (1, 4) };
        let tile = if !kernel.shared && s.size <= 128 { 64 } else { 32 };
        let own = 16 * groups;
        let passing = if kernel.shared { 2 * tile } else { 4 * tile };
        let shared = 2 * ((own + passing) * (s.size + 8) + own * (tile + 8)) + 4 * own * sharers;
        // Parts for the blocks that a GPU has at once, and no shorter than two tiles.
        let each = times(&[rows.div_ceil(own), s.kv_heads, s.batch]).max(1);
        let resident = (HOPPER_SHARED / shared).clamp(1, 2);
        let tiles = s.keys.div_ceil(tile);
        let wanted = (resident * variant.processors() / each).max(1);
        let part = tile * tiles.div_ceil(wanted).max(2);
        let parts = s.keys.div_ceil(part);
        (shared <= variant.shared()).then_some(Parts { groups, sharers, tile, part, parts, each, shared })
    }

    /// The passes: parts, and what joins them where there are several.
    pub(super) fn source(&self, kernel: &Attention, variant: Variant) -> Result<Option<Source>> {
        let (s, a, o) = (&kernel.shape, &kernel.attention, &Operands::of(kernel, variant));
        let (line, mask, mask_names) = attention_shape(s, a, o)?;
        let shared = if kernel.shared { "_shared" } else { "" };
        let name = format!("attention_parts_{}{shared}{}", attention_name(s, a), variant.suffix());
        let mut builder = Builder::new(name, "flash_parts.cuh");
        let reads = scored(&mut builder, s, a, &kernel.lengths);
        builder.line(&line);
        let (bits, of_bits) = listed::passes(&mut builder, s, a, o)?;
        let Parts { groups, sharers, tile, part, parts, .. } = *self;
        let same = kernel.shared;
        builder.line(&format!("typedef FlashParts<S, {same}, {groups}, {sharers}, {tile}, {part}> F;"));
        let rows = times(&[s.batch, s.queries, s.heads]);
        let sums = builder.scratch(if parts > 1 { times(&[4, parts, rows, s.size]) } else { 0 });
        let shares = builder.scratch(if parts > 1 { times(&[8, parts, rows]) } else { 0 });
        let mut list = vec![];
        for name in ["q", "k", "v"] {
            list.extend([o.get(name)?, o.stride(name)?]);
        }
        list.extend(mask);
        list.extend(o.list(["o", "lse"])?);
        list.extend([scratch("float *", "sums", sums), scratch("float *", "shares", shares)]);
        for name in &X[..a.read().len()] {
            list.push(o.get(name)?);
        }
        list.extend(bits);
        let body = format!(
            "    flash_parts<F>(q, q_stride, k, k_stride, v, v_stride, {mask_names}, o, lse, sums, shares, {}{reads}{of_bits});\n",
            scores(a)
        );
        let threads = (32 * groups * sharers) as u32;
        let grid = blocks(times(&[self.each, parts]))?;
        builder.entry("attention_parts", (grid, threads, self.shared as u32), &list, &body);
        if parts > 1 {
            let list = [
                scratch("const float *", "sums", sums),
                scratch("const float *", "shares", shares),
                o.get("o")?,
                o.get("lse")?,
            ];
            let grid = blocks(times(&[rows, s.size / 32]))?;
            builder.call("attention_join", (grid, 256, 0), &list, "flash_join", "S, F::PARTS");
        }
        Ok(builder.finish())
    }
}
