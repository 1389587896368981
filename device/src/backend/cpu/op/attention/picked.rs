//! Chosen keys as bits of a tile: for lists of such a share of the keys that tiles of all keys are
//! faster than rows one by one.
//!
//! *In*: the lists of some queries of a sequence. *Out*: for a tile of keys, how much of it a block
//! of queries reads, and `-inf` where they do not. *Promise*: bits have all that hides a key:
//! lists, positions, the window and segments; a tile that no query of a block reads is not
//! computed.

use super::{BLOCK, Sizes, Visible};
use crate::backend::cpu::Arguments;
use crate::backend::cpu::product::FEW;
use crate::backend::cpu::simd::kernel_fn;
use dreamc_compiler::ir::Attention as Scoring;
use dreamc_compiler::op::attention::Chosen;
use dreamc_compiler::op::attention::formula::Part;
use std::ops::Range;

/// Whether tiles take less time than [lists](super::listed), which few queries have anyway. Pairs
/// that are not read are computed, too: at most as many times those that are read as tiles are
/// faster, by `benches/cpu/choose.py`. `pairs`: products of two bf16 at a time.
pub(super) fn pays(s: &Sizes, attention: &Scoring, pairs: bool) -> bool {
    let Some(among) = attention.among else { return false };
    let plain = attention.program.is_none() && attention.softcap.is_none() && attention.every.is_none();
    let faster = match (pairs, among.block < SHORT) {
        (true, true) => 24,
        (true, false) => 8,
        (false, true) => 8,
        (false, false) => 2,
    };
    let most = attention.most_keys(s.keys as u64).saturating_mul(faster);
    // Queries of a whole text see half of the keys.
    let seen = if s.queries == s.keys { s.keys / 2 } else { s.keys };
    plain && among.count > 0 && s.queries > FEW && seen as u64 <= most
}

/// Tokens of a block from which on lists read rows that follow one another.
const SHORT: u64 = 16;

/// Keys of a tile with one segment and positions one after another.
struct Run {
    /// The first of them, in the tile and of the sequence.
    first: usize,
    key: usize,
    position: u64,
    length: u64,
}

/// Those of a tile; keys that are not there are in none.
fn runs(visible: &Visible, keys: &Range<usize>) -> Vec<Run> {
    let position = |key: usize| visible.positions.map_or(key as i64, |(_, k)| k[key].into());
    let mut runs: Vec<Run> = vec![];
    for key in keys.clone() {
        let Ok(at) = u64::try_from(position(key)) else { continue };
        match runs.last_mut() {
            Some(run)
                if run.key + run.length as usize == key
                    && run.position + run.length == at
                    && visible.segments.is_none_or(|s| s[run.key] == s[key]) =>
            {
                run.length += 1;
            }
            _ => runs.push(Run { first: key - keys.start, key, position: at, length: 1 }),
        }
    }
    runs
}

impl Run {
    /// The positions that a query sees of it, whatever its list.
    fn seen(&self, visible: &Visible, query: usize) -> Range<u64> {
        let at = visible.positions.map_or(query as i64, |(q, _)| q[query].into());
        let own = visible.segments.is_none_or(|s| s[query] == s[self.key]);
        let Some(end) = u64::try_from(at).ok().filter(|_| own).map(|at| at + 1) else { return 0..0 };
        let first = visible.window.map_or(0, |w| end.saturating_sub(w as u64)).max(self.position);
        first..end.min(self.position + self.length).max(first)
    }
}

/// The lists of a head's queries.
struct List {
    /// Blocks of each query, ascending.
    blocks: Vec<i32>,
    /// Keys of the tile that each query reads.
    bits: Vec<u64>,
}

/// The lists of some queries at a tile of keys.
pub(super) struct Picked {
    queries: Range<usize>,
    count: usize,
    block: u64,
    lists: Vec<List>,
    /// The list of each head.
    of: Vec<usize>,
}

impl Picked {
    /// Those of some heads; nothing where keys are not chosen.
    pub fn new(
        s: &Sizes,
        attention: &Scoring,
        args: &Arguments,
        sequence: usize,
        heads: Range<usize>,
        queries: Range<usize>,
    ) -> Option<Self> {
        let among = attention.among?;
        let chosen = Chosen::of_sequence(among, [sequence, s.queries], s.heads, args.ints("chosen").all());
        let count = among.count as usize;
        let mut all = Picked { queries, count, block: among.block.max(1), lists: vec![], of: vec![] };
        let mut last = None;
        for head in heads {
            if last.replace(chosen.number(head)) != Some(chosen.number(head)) {
                let mut blocks = Vec::with_capacity(all.queries.len() * count);
                for query in all.queries.clone() {
                    let first = blocks.len();
                    blocks.extend_from_slice(chosen.list(query, head));
                    blocks.resize(first + count, -1);
                    blocks[first..].sort_unstable();
                }
                all.lists.push(List { blocks, bits: vec![0; all.queries.len()] });
            }
            all.of.push(all.lists.len() - 1);
        }
        Some(all)
    }

    /// Goes on to a tile of keys, which are seen as `visible` has it.
    pub fn turn(&mut self, visible: &Visible, keys: &Range<usize>) {
        let runs = runs(visible, keys);
        let block = self.block;
        let begin = |number: i32| u64::try_from(number).map_or(0, |n| n.saturating_mul(block));
        let end = |number: i32| u64::try_from(number).map_or(0, |n| (n + 1).saturating_mul(block));
        for List { blocks, bits } in &mut self.lists {
            let of_queries = self.queries.clone().zip(blocks.chunks_exact(self.count)).zip(bits);
            for ((query, blocks), bits) in of_queries {
                *bits = 0;
                for run in &runs {
                    let seen = run.seen(visible, query);
                    if seen.is_empty() {
                        continue;
                    }
                    let first = blocks.partition_point(|number| end(*number) <= seen.start);
                    for &number in &blocks[first..] {
                        let (low, high) = (begin(number).max(seen.start), end(number).min(seen.end));
                        if low >= high {
                            break;
                        }
                        let at = low - run.position + run.first as u64;
                        *bits |= (u64::MAX >> (BLOCK as u64 - (high - low))) << at;
                    }
                }
            }
        }
    }

    /// The bits of some queries of the `i`th head.
    fn bits(&self, i: usize, queries: &Range<usize>) -> &[u64] {
        &self.lists[self.of[i]].bits[queries.start - self.queries.start..][..queries.len()]
    }

    /// How much of the last tile, which has `n` keys, some queries of the `i`th head read.
    pub fn part(&self, i: usize, queries: &Range<usize>, n: usize) -> Part {
        let all = u64::MAX >> (BLOCK - n);
        let (any, each) =
            self.bits(i, queries).iter().fold((0, all), |(any, each), bits| (any | bits, each & bits));
        match (any, each == all) {
            (0, _) => Part::Empty,
            (_, true) => Part::Full,
            (_, false) => Part::Mixed,
        }
    }

    /// `-inf` where some queries of the `i`th head do not read a key of the tile.
    pub fn hide(&self, i: usize, queries: &Range<usize>, n: usize, tile: &mut [f32]) {
        hide(self.bits(i, queries), n, tile);
    }
}

/// Numbers whose bits are looked at together.
const TOGETHER: usize = 16;

kernel_fn! {
    fn hide(bits: &[u64], n: usize, tile: &mut [f32]) {
        for (bits, row) in bits.iter().zip(tile.chunks_exact_mut(n)) {
            for (part, row) in row.chunks_mut(TOGETHER).enumerate() {
                let bits = (bits >> (TOGETHER * part)) as u32;
                for (j, x) in row.iter_mut().enumerate() {
                    *x = if bits & (1 << j) != 0 { *x } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}
