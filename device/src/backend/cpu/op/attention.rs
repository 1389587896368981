//! Attention along the sequence.
//!
//! Forward, a task takes some queries of one key head (all query heads that read it, up to
//! [`HEADS`]) and goes through the keys a block at a time: a tile of scores by one product, its
//! softmax relative to a running maximum, and the values by another product. Backward, a task takes
//! one key head of one sequence and goes through pairs of blocks, recomputing the scores. Nothing
//! of size `queries · keys` exists, and blocks that the mask hides altogether are not computed, nor
//! half blocks along the diagonal of a causal one.
//!
//! Few queries over the places of a cache are another matter ([`few`]), and so are queries that
//! read few of many keys ([`listed`]); where they read enough of them, tiles hide the others
//! ([`picked`]).
//!
//! Operands are f32 or bf16 ([`Stored`]), results what operands are. Scores, probabilities and sums
//! are f32; where operands are bf16, what a product reads of them is rounded to bf16, as its other
//! operand is.

mod few;
pub(super) mod listed;
mod picked;
mod scored;

use super::Run;
use crate::backend::cpu::product::{self, Left, Lines, Right, Side, left, pack_columns, panels, tile};
use crate::backend::cpu::simd::{exp, fma, interleave_rows, kernel_fn, largest, narrow, sum, tanh};
use crate::backend::cpu::{Arguments, Context, Pointer, Scratch, Stored, View};
use dreamc_compiler::ir::{Attention as Scoring, Mask};
use dreamc_compiler::op::attention::formula::Part;
use dreamc_compiler::program::AttentionShape;
use dreamc_compiler::program::kernel::{Attention, AttentionGrad};
use half::bf16;
use picked::{Picked, pays};
use scored::{Dropout, Scored};
use std::ops::Range;

/// Queries, and keys, of a block.
const BLOCK: usize = 64;
/// Blocks of queries that a task of the forward takes together.
const QUERIES: usize = 2;
/// Query heads that a task of the forward takes together.
const HEADS: usize = 4;
/// Sums of each row of the forward: key `i` is added to number `i % SUMS`.
const SUMS: usize = 16;

/// Sizes as indices.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    /// Query heads of a key head.
    group: usize,
}

impl Sizes {
    fn new(s: &AttentionShape) -> Self {
        Sizes {
            batch: s.batch as usize,
            queries: s.queries as usize,
            keys: s.keys as usize,
            heads: s.heads as usize,
            kv_heads: s.kv_heads as usize,
            size: s.size as usize,
            group: (s.heads / s.kv_heads) as usize,
        }
    }
}

fn scratch(shape: &AttentionShape, backward: bool) -> Scratch {
    let Sizes { queries, size, group, .. } = Sizes::new(shape);
    let panel = product::shape();
    let square = BLOCK * BLOCK;
    let rows = panels(BLOCK, size.max(BLOCK), panel.rows);
    let keys_by_size = panels(BLOCK, size, panel.columns);
    let size_by_keys = panels(size, BLOCK, panel.columns);
    Scratch::local(match backward {
        true => {
            let blocks = queries.div_ceil(BLOCK);
            let head = 2 * blocks * size_by_keys + queries * (size + 2);
            group * head + 2 * keys_by_size + size_by_keys + rows + 3 * square + 2 * BLOCK * size
        }
        false => {
            let lines = group.min(HEADS) * BLOCK * QUERIES;
            lines * (size + 1 + SUMS) + rows + 2 * square + keys_by_size + size_by_keys
        }
    })
}

/// Scratch for lists, or for tiles where some type of operands is computed by those.
fn by_lists_or_tiles(s: &Sizes, attention: &Scoring, lists: Scratch, tiles: impl Fn() -> Scratch) -> Scratch {
    let tiled = [true, false].into_iter().any(|pairs| pays(s, attention, pairs));
    Scratch { local: if tiled { lists.local.max(tiles().local) } else { lists.local }, ..lists }
}

/// Keys that queries of one sequence see.
struct Visible<'a> {
    /// Whether what hides keys is in bits of tiles ([`picked`]).
    by_bits: bool,
    window: Option<usize>,
    /// Positions of the queries and keys, where they are not their numbers.
    positions: Option<(&'a [i32], &'a [i32])>,
    segments: Option<&'a [i32]>,
}

impl<'a> Visible<'a> {
    fn new(s: &Sizes, attention: &Scoring, args: &Arguments<'a>, sequence: usize) -> Self {
        let ints = |name, n: usize| args.ints(name).part(sequence * n, n);
        let positioned = attention.mask == Mask::Positions;
        Visible {
            by_bits: attention.among.is_some(),
            window: attention.window.map(|w| w as usize),
            positions: positioned
                .then(|| (ints("query_positions", s.queries), ints("key_positions", s.keys))),
            segments: attention.segments.then(|| ints("segments", s.queries)),
        }
    }

    /// Whether each pair must be looked at.
    #[inline(always)]
    fn by_pair(&self) -> bool {
        !self.by_bits && (self.positions.is_some() || self.segments.is_some())
    }

    #[inline(always)]
    fn sees(&self, query: usize, key: usize) -> bool {
        let near = match self.positions {
            None => key <= query && self.window.is_none_or(|w| query - key < w),
            Some((q, k)) => {
                let (q, k) = (q[query] as i64, k[key] as i64);
                k >= 0 && k <= q && self.window.is_none_or(|w| q - k < w as i64)
            }
        };
        near && self.segments.is_none_or(|s| s[query] == s[key])
    }

    /// The part of `keys` that has all of those that a query sees.
    #[inline(always)]
    fn part(&self, query: usize, keys: &Range<usize>) -> Range<usize> {
        if self.positions.is_some() || self.by_bits {
            return 0..keys.len();
        }
        let first = self.window.map_or(0, |w| (query + 1).saturating_sub(w));
        let start = first.clamp(keys.start, keys.end);
        let end = (query + 1).clamp(start, keys.end);
        start - keys.start..end - keys.start
    }

    /// Whether some queries see a triangle of some keys: the `i`th query no key after the `i`th, by
    /// their numbers.
    fn triangle(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        self.positions.is_none() && !self.by_bits && queries.start == keys.start
    }

    /// Whether any of some queries may see any of some keys.
    fn any(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        // Two blocks have no document in common where all numbers of one are above the other's.
        let ends = |s: &[i32]| s.iter().fold((i32::MAX, i32::MIN), |(l, h), &s| (l.min(s), h.max(s)));
        let apart = |s: &[i32]| {
            let (of_queries, of_keys) = (ends(&s[queries.clone()]), ends(&s[keys.clone()]));
            of_keys.1 < of_queries.0 || of_queries.1 < of_keys.0
        };
        if self.segments.is_some_and(apart) {
            return false;
        }
        match self.positions {
            None => keys.start < queries.end && self.window.is_none_or(|w| queries.start < keys.end - 1 + w),
            Some((q, k)) => {
                let (q, k) = (&q[queries.clone()], &k[keys.clone()]);
                let (low, high) = ends(q);
                let window = self.window.map_or(i64::MAX, |w| w as i64);
                k.iter().any(|&k| k >= 0 && k <= high && ((low as i64) - (k as i64)) < window)
            }
        }
    }

    /// Pairs of queries and keys that see each other.
    fn pairs(&self, s: &Sizes) -> u64 {
        if !self.by_pair() {
            return (0..s.queries).map(|i| self.window.map_or(i + 1, |w| w.min(i + 1)) as u64).sum();
        }
        (0..s.queries).map(|i| (0..s.keys).filter(|&j| self.sees(i, j)).count() as u64).sum()
    }
}

/// Pairs of queries and keys of a launch that see each other, over all heads.
fn pairs(s: &Sizes, attention: &Scoring, args: &Arguments, scored: Option<&Scored>) -> u64 {
    if attention.listed() {
        return listed::pairs(s, attention, args);
    }
    let of = |sequence: usize| {
        let visible = Visible::new(s, attention, args, sequence);
        match scored {
            Some(scored) => scored.pairs(&visible, sequence),
            None => visible.pairs(s) * s.heads as u64,
        }
    };
    (0..s.batch).map(of).sum()
}

/// How scores become probabilities.
struct Scores {
    scale: f32,
    softcap: Option<f32>,
}

impl Scores {
    fn new(attention: &Scoring) -> Self {
        Scores { scale: attention.scale as f32, softcap: attention.softcap.map(|c| c as f32) }
    }

    /// Of tiles that a program has made scores of, where it has a score.
    fn of(attention: &Scoring, scored: Option<&Scored>) -> Self {
        match scored {
            Some(scored) if scored.scores() => Scores { scale: 1.0, softcap: None },
            _ => Scores::new(attention),
        }
    }

    /// Factor that makes a product a score; capped ones are scores already: a multiplication that
    /// is left to the exponential.
    fn factor(&self) -> f32 {
        if self.softcap.is_some() { 1.0 } else { self.scale }
    }

    /// Caps products, where scores are capped.
    #[inline(always)]
    fn cap<const FMA: bool>(&self, x: &mut [f32]) {
        if let Some(c) = self.softcap {
            let factor = self.scale / c;
            for x in x.iter_mut() {
                *x = c * tanh::<FMA>(*x * factor);
            }
        }
    }
}

kernel_fn! {
    /// Turns a tile of products into numerators of the softmax relative to the running maxima, and
    /// brings the sums and the results so far to the same scale. Sums are [`SUMS`] for each row, to
    /// be added up at the end.
    fn soften(
        scores: &Scores,
        visible: &Visible,
        queries: Range<usize>,
        keys: Range<usize>,
        tile: &mut [f32],
        most: &mut [f32],
        sums: &mut [f32],
        results: &mut [f32],
    ) {
        let (n, size) = (keys.len(), results.len() / most.len());
        let factor = scores.factor();
        let (mut high, mut change) = ([0.0; BLOCK], [0.0; BLOCK]);
        let (high, change) = (&mut high[..most.len()], &mut change[..most.len()]);
        for ((query, tile), high) in queries.zip(tile.chunks_exact_mut(n)).zip(high.iter_mut()) {
            let part = visible.part(query, &keys);
            tile[..part.start].fill(f32::NEG_INFINITY);
            tile[part.end..].fill(f32::NEG_INFINITY);
            scores.cap::<FMA>(&mut tile[part.clone()]);
            if visible.by_pair() {
                for (j, x) in tile[part.clone()].iter_mut().enumerate() {
                    if !visible.sees(query, keys.start + part.start + j) {
                        *x = f32::NEG_INFINITY;
                    }
                }
            }
            // The scale is positive: the largest product is the largest score.
            *high = largest::<FMA>(tile) * factor;
        }
        for ((most, high), change) in most.iter_mut().zip(high.iter_mut()).zip(change.iter_mut()) {
            let new = if *high > *most { *high } else { *most };
            // Of a row that has seen nothing all exponentials are zero.
            *high = if new == f32::NEG_INFINITY { 0.0 } else { new };
            *change = exp::<FMA>(*most - *high);
            *most = new;
        }
        let rows = tile.chunks_exact_mut(n).zip(sums.chunks_exact_mut(SUMS)).zip(results.chunks_exact_mut(size));
        for (((tile, sums), result), (high, change)) in rows.zip(high.iter().zip(change.iter())) {
            for x in tile.iter_mut() {
                *x = exp::<FMA>(fma::<FMA>(*x, factor, -*high));
            }
            if *change != 1.0 {
                sums.iter_mut().for_each(|s| *s *= *change);
                result.iter_mut().for_each(|r| *r *= *change);
            }
            let mut chunks = tile.chunks_exact(SUMS);
            for x in &mut chunks {
                sums.iter_mut().zip(x).for_each(|(s, x)| *s += x);
            }
            sums.iter_mut().zip(chunks.remainder()).for_each(|(s, x)| *s += x);
        }
    }

    /// Divides by the sum; a row that saw nothing is zero. Returns the logarithm of the sum of all
    /// exponentials.
    fn finish(result: &mut [f32], most: f32, sums: &[f32]) -> f32 {
        let sum = sum::<FMA>(sums);
        if sum == 0.0 {
            result.fill(0.0);
            return f32::NEG_INFINITY;
        }
        let factor = 1.0 / sum;
        for r in result.iter_mut() {
            *r *= factor;
        }
        most + sum.ln()
    }

    /// Turns a tile of products into probabilities, and a tile of their cotangents into cotangents
    /// of the products.
    fn harden(
        scores: &Scores,
        visible: &Visible,
        queries: Range<usize>,
        keys: Range<usize>,
        tile: &mut [f32],
        dtile: &mut [f32],
        lse: &[f32],
        along: &[f32],
    ) {
        let rows = tile.chunks_exact_mut(keys.len()).zip(dtile.chunks_exact_mut(keys.len()));
        for (i, (query, (tile, dtile))) in queries.zip(rows).enumerate() {
            let part = visible.part(query, &keys);
            let (lse, along) = (lse[i], along[i]);
            tile[..part.start].fill(0.0);
            tile[part.end..].fill(0.0);
            dtile[..part.start].fill(0.0);
            dtile[part.end..].fill(0.0);
            let (x, d) = (&mut tile[part.clone()], &mut dtile[part.clone()]);
            if lse == f32::NEG_INFINITY {
                x.fill(0.0);
                d.fill(0.0);
                continue;
            }
            scores.cap::<FMA>(x);
            if visible.by_pair() {
                for (j, x) in x.iter_mut().enumerate() {
                    if !visible.sees(query, keys.start + part.start + j) {
                        *x = f32::NEG_INFINITY;
                    }
                }
            }
            match scores.softcap {
                None => {
                    for (x, d) in x.iter_mut().zip(d) {
                        *x = exp::<FMA>(fma::<FMA>(*x, scores.scale, -lse));
                        *d = *x * (*d - along) * scores.scale;
                    }
                }
                Some(c) => {
                    for (x, d) in x.iter_mut().zip(d) {
                        let t = if *x == f32::NEG_INFINITY { 0.0 } else { *x / c };
                        *x = exp::<FMA>(*x - lse);
                        *d = *x * (*d - along) * (scores.scale * (1.0 - t * t));
                    }
                }
            }
        }
    }
}

/// Takes the first floats of scratch.
fn take<'s>(scratch: &mut &'s mut [f32], floats: usize) -> &'s mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(floats);
    *scratch = rest;
    taken
}

/// Ranges of at most [`BLOCK`].
fn blocks(all: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = all.end;
    all.step_by(BLOCK).map(move |first| first..(first + BLOCK).min(end))
}

/// Rows of a strided operand as lines of a product, one head of each.
fn head_rows<T>(x: View<T>, row: usize, element: usize) -> Side<T> {
    Side::Strided { start: x.start.add(row * x.stride + element), line: x.stride, step: 1 }
}

/// The same with the elements of the head as lines.
fn head_columns<T>(x: View<T>, row: usize, element: usize) -> Side<T> {
    Side::Strided { start: x.start.add(row * x.stride + element), line: 1, step: x.stride }
}

/// A tile as products with operands of some type read it, its rows as lines.
enum Rows {
    Wide(Side),
    Narrow(Side<bf16>),
}

impl Rows {
    /// `words` are room for the tile in bf16.
    fn new<T: Stored>(tile: &mut [f32], columns: usize, words: &mut [f32]) -> Self {
        if T::per_word() == 1 {
            return Rows::Wide(Side::Strided { start: Pointer::to(tile), line: columns, step: 1 });
        }
        let start = words.as_mut_ptr().cast::<bf16>();
        // SAFETY: as many floats are twice as many halves; `words` is borrowed as long.
        let halves = unsafe { std::slice::from_raw_parts_mut(start, 2 * words.len()) };
        let line = columns.next_multiple_of(2);
        if line == columns {
            narrow(tile, &mut halves[..tile.len()]);
        } else {
            for (row, halves) in tile.chunks_exact(columns).zip(halves.chunks_exact_mut(line)) {
                narrow(row, &mut halves[..columns]);
                halves[columns] = bf16::ZERO;
            }
        }
        Rows::Narrow(Side::Strided { start: Pointer(start), line, step: 1 })
    }

    /// Some of the rows, their first steps.
    fn left<'s>(
        &self,
        lines: &'s mut Lines,
        rows: &Range<usize>,
        steps: usize,
        scratch: &'s mut [f32],
    ) -> Left<'s> {
        match self {
            Rows::Wide(side) => left(lines, side.skip_lines(rows.start), rows.len(), steps, scratch),
            Rows::Narrow(side) => {
                // After the last of an odd number of steps is a zero, or a step where the other
                // operand has zeros.
                let steps = steps.next_multiple_of(2);
                left(lines, side.skip_lines(rows.start), rows.len(), steps, scratch)
            }
        }
    }
}

/// A tile as products with operands that are `T` read it, its rows as steps.
fn by_steps<T: Stored>(tile: &mut [f32], columns: usize, words: &mut [f32]) -> Pointer<f32> {
    if T::per_word() == 1 {
        return Pointer::to(tile);
    }
    interleave_rows(tile, columns, tile.len() / columns, columns, words);
    Pointer::to(words)
}

/// Queries of a pair of blocks, and the first keys that they may see: all at once, or in halves
/// along the diagonal.
fn parts(queries: usize, keys: usize, triangle: bool) -> impl Iterator<Item = (Range<usize>, usize)> {
    let half = if triangle { BLOCK / 2 } else { BLOCK };
    (0..queries).step_by(half).map(move |first| {
        let end = (first + half).min(queries);
        (first..end, if triangle { end.min(keys) } else { keys })
    })
}

impl Run for Attention {
    fn scratch(&self) -> Scratch {
        let s = Sizes::new(&self.shape);
        if self.attention.listed() {
            let lists = listed::scratch(&s, &self.attention, false);
            return by_lists_or_tiles(&s, &self.attention, lists, || scratch(&self.shape, false));
        }
        let few = few::suits(&s, &self.attention);
        let scratch = if few { few::scratch(&s) } else { scratch(&self.shape, false) };
        Scratch { local: scratch.local + scored::room(&self.attention, false), ..scratch }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sizes::new(&self.shape);
        let dropout = Dropout::new(&self.attention, args);
        let scored = Scored::new(&s, &self.attention, &self.lengths, args, false);
        cx.count(|| 2 * pairs(&s, &self.attention, args, scored.as_ref()) * s.size as u64);
        if self.attention.listed() && !pays(&s, &self.attention, T::per_word() == 2) {
            return listed::forward::<T>(&s, &self.attention, dropout, cx, args);
        }
        if few::suits(&s, &self.attention) {
            return few::run::<T>(&s, &self.attention, (scored, dropout), cx, args);
        }
        let [q, k, v] = ["q", "k", "v"].map(|name| args.view::<T>(name));
        let o = args.view::<T>("o").rows_of(s.heads * s.size);
        let lse = args.floats("lse").rows_of(s.heads);
        let scores = Scores::of(&self.attention, scored.as_ref());
        let (chunks, query_blocks) = (s.group.div_ceil(HEADS), s.queries.div_ceil(QUERIES * BLOCK));
        cx.parallel(s.batch * s.kv_heads * chunks * query_blocks, |task, mut scratch| {
            // The last queries of a causal sequence see most: they come first.
            let block = query_blocks - 1 - task % query_blocks;
            let chunk = task / query_blocks % chunks;
            let kv_head = task / query_blocks / chunks % s.kv_heads;
            let sequence = task / query_blocks / chunks / s.kv_heads;
            let heads =
                kv_head * s.group + chunk * HEADS..kv_head * s.group + ((chunk + 1) * HEADS).min(s.group);
            let first = block * QUERIES * BLOCK;
            let (count, size) = ((s.queries - first).min(QUERIES * BLOCK), s.size);
            let visible = Visible::new(&s, &self.attention, args, sequence);

            let panel = product::shape();
            let rows = take(&mut scratch, panels(BLOCK, size.max(BLOCK), panel.rows));
            let mut lines = Lines::room();
            let (tiles, words) = (take(&mut scratch, BLOCK * BLOCK), take(&mut scratch, BLOCK * BLOCK));
            let results = take(&mut scratch, heads.len() * count * size);
            let most = take(&mut scratch, heads.len() * count);
            let sums = take(&mut scratch, heads.len() * count * SUMS);
            let right = take(&mut scratch, panels(BLOCK, size, panel.columns));
            let values = take(&mut scratch, panels(size, BLOCK, panel.columns));
            let steps = take(&mut scratch, scored::room(&self.attention, false));
            results.fill(0.0);
            most.fill(f32::NEG_INFINITY);
            sums.fill(0.0);
            let mut picked =
                Picked::new(&s, &self.attention, args, sequence, heads.clone(), first..first + count);
            for keys in blocks(0..s.keys) {
                let (row, n) = (sequence * s.keys + keys.start, keys.len());
                let mut packed = false;
                if let Some(picked) = &mut picked {
                    picked.turn(&visible, &keys);
                }
                for queries in blocks(first..first + count).filter(|queries| visible.any(queries, &keys)) {
                    if !std::mem::replace(&mut packed, true) {
                        pack_columns(head_rows(k, row, kv_head * size), n, size, right);
                        pack_columns(head_columns(v, row, kv_head * size), size, n, values);
                    }
                    let (right, values) = (Right::new::<T>(right, size), Right::new::<T>(values, n));
                    let triangle = visible.triangle(&queries, &keys);
                    for (i, head) in heads.clone().enumerate() {
                        let pair = [sequence, head];
                        let part_of = match (&scored, &picked) {
                            (Some(scored), _) => scored.part(&visible, pair, &queries, &keys),
                            (None, Some(picked)) => picked.part(i, &queries, n),
                            (None, None) => Part::Full,
                        };
                        if part_of == Part::Empty {
                            continue;
                        }
                        let at = i * count + queries.start - first;
                        let tile_of = &mut tiles[..queries.len() * n];
                        let result = &mut results[at * size..][..queries.len() * size];
                        let range = at..at + queries.len();
                        let side = head_rows(q, sequence * s.queries + queries.start, head * size);
                        for (part, n_seen) in parts(queries.len(), n, triangle) {
                            let query = left(&mut lines, side.skip_lines(part.start), part.len(), size, rows);
                            let c = Pointer::to(tile_of).add(part.start * n);
                            // SAFETY: `tile_of` is `queries` by `n`, and this task's.
                            unsafe { tile::<T>((part.len(), n_seen, size), query, right, c, n, false) };
                        }
                        if let Some(scored) = &scored {
                            let scale = self.attention.scale as f32;
                            scored.block(&visible, pair, &keys, steps);
                            scored.tile(
                                &visible,
                                pair,
                                queries.clone(),
                                &keys,
                                part_of,
                                scale,
                                steps,
                                tile_of,
                            );
                        }
                        if let (Some(picked), Part::Mixed) = (&picked, part_of) {
                            picked.hide(i, &queries, n, tile_of);
                        }
                        soften(
                            &scores,
                            &visible,
                            queries.clone(),
                            keys.clone(),
                            tile_of,
                            &mut most[range.clone()],
                            &mut sums[range.start * SUMS..range.end * SUMS],
                            result,
                        );
                        if let Some(dropout) = &dropout {
                            dropout.apply(&s, pair, queries.clone(), &keys, tile_of);
                        }
                        let p = Rows::new::<T>(tile_of, n, words);
                        for (part, n_seen) in parts(queries.len(), n, triangle) {
                            let p = p.left(&mut lines, &part, n_seen, rows);
                            let c = Pointer::to(result).add(part.start * size);
                            // SAFETY: `result` is `queries` by `size`, and this task's.
                            unsafe { tile::<T>((part.len(), size, n_seen), p, values, c, size, true) };
                        }
                    }
                }
            }
            for (i, head) in heads.enumerate() {
                for j in 0..count {
                    let (row, at) = (sequence * s.queries + first + j, i * count + j);
                    let result = &mut results[at * size..][..size];
                    lse.row_mut(row)[head] = finish(result, most[at], &sums[at * SUMS..][..SUMS]);
                    T::store(result, &mut o.row_mut(row)[head * size..][..size]);
                }
            }
        });
    }
}

impl Run for AttentionGrad {
    fn scratch(&self) -> Scratch {
        if self.attention.listed() {
            let s = Sizes::new(&self.shape);
            let lists = listed::scratch(&s, &self.attention, true);
            return by_lists_or_tiles(&s, &self.attention, lists, || scratch(&self.shape, true));
        }
        let local = scratch(&self.shape, true).local + scored::room(&self.attention, true);
        let shared = scored::shared(&self.attention, &Sizes::new(&self.shape), &self.lengths);
        Scratch { local, shared }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sizes::new(&self.shape);
        if self.attention.listed() && !pays(&s, &self.attention, T::per_word() == 2) {
            let dropout = Dropout::new(&self.attention, args);
            cx.count(|| 5 * pairs(&s, &self.attention, args, None) * s.size as u64);
            return listed::backward::<T>(&s, &self.attention, (dropout, self.log), cx, args);
        }
        let [q, k, v, o, d] = ["q", "k", "v", "o", "do"].map(|name| args.view::<T>(name));
        let lse = args.floats("lse").rows_of(s.heads);
        let dlse = self.log.then(|| args.floats("dlse").rows_of(s.heads));
        let [dq, dk, dv] = ["dq", "dk", "dv"].map(|name| args.view::<T>(name));
        let scored = Scored::new(&s, &self.attention, &self.lengths, args, true);
        let dropout = Dropout::new(&self.attention, args);
        let scores = Scores::of(&self.attention, None);
        let shared = cx.shared();
        cx.count(|| 5 * pairs(&s, &self.attention, args, scored.as_ref()) * s.size as u64);
        cx.parallel(s.batch * s.kv_heads, |task, mut scratch| {
            let (sequence, kv_head) = (task / s.kv_heads, task % s.kv_heads);
            let visible = Visible::new(&s, &self.attention, args, sequence);
            let (size, kv) = (s.size, kv_head * s.size);
            let heads = kv_head * s.group..(kv_head + 1) * s.group;
            let first_row = sequence * s.queries;
            let panel = product::shape();
            let columns = panels(size, BLOCK, panel.columns);
            let query_blocks = s.queries.div_ceil(BLOCK);
            // Of each head of the group.
            let query_columns = take(&mut scratch, s.group * query_blocks * columns);
            let d_columns = take(&mut scratch, s.group * query_blocks * columns);
            let dq_sums = take(&mut scratch, s.group * s.queries * size);
            let lse_of = take(&mut scratch, s.group * s.queries);
            let along = take(&mut scratch, s.group * s.queries);

            let key_panels = take(&mut scratch, panels(BLOCK, size, panel.columns));
            let value_panels = take(&mut scratch, panels(BLOCK, size, panel.columns));
            let key_columns = take(&mut scratch, columns);
            let rows = take(&mut scratch, panels(BLOCK, size.max(BLOCK), panel.rows));
            let mut lines = Lines::room();
            let [p, dp, words] = std::array::from_fn(|_| take(&mut scratch, BLOCK * BLOCK));
            let (dk_sums, dv_sums) = (take(&mut scratch, BLOCK * size), take(&mut scratch, BLOCK * size));
            let steps = take(&mut scratch, scored::room(&self.attention, true));
            if let Some(scored) = &scored {
                heads.clone().for_each(|head| scored.sums(shared, sequence, head).fill(0.0));
            }

            for (i, head) in heads.clone().enumerate() {
                for (b, queries) in blocks(0..s.queries).enumerate() {
                    let (row, at, count) = (first_row + queries.start, i * query_blocks + b, queries.len());
                    pack_columns(
                        head_columns(q, row, head * size),
                        size,
                        count,
                        &mut query_columns[at * columns..],
                    );
                    pack_columns(
                        head_columns(d, row, head * size),
                        size,
                        count,
                        &mut d_columns[at * columns..],
                    );
                }
                for query in 0..s.queries {
                    let (row, at) = (first_row + query, i * s.queries + query);
                    let [o, d] = [o, d].map(|x| &x.row(row)[head * size..][..size]);
                    lse_of[at] = lse.row(row)[head];
                    along[at] = T::inner(o, d) - dlse.as_ref().map_or(0.0, |dlse| dlse.row(row)[head]);
                }
            }
            dq_sums.fill(0.0);
            let mut picked = Picked::new(&s, &self.attention, args, sequence, heads.clone(), 0..s.queries);
            for keys in blocks(0..s.keys) {
                let (key_row, n) = (sequence * s.keys + keys.start, keys.len());
                if let Some(picked) = &mut picked {
                    picked.turn(&visible, &keys);
                }
                pack_columns(head_rows(k, key_row, kv), n, size, key_panels);
                pack_columns(head_rows(v, key_row, kv), n, size, value_panels);
                pack_columns(head_columns(k, key_row, kv), size, n, key_columns);
                let (keys_by_size, values_by_size) =
                    (Right::new::<T>(key_panels, size), Right::new::<T>(value_panels, size));
                let size_by_keys = Right::new::<T>(key_columns, n);
                dk_sums[..n * size].fill(0.0);
                dv_sums[..n * size].fill(0.0);
                for (b, queries) in blocks(0..s.queries).enumerate() {
                    if !visible.any(&queries, &keys) {
                        continue;
                    }
                    let triangle = visible.triangle(&queries, &keys);
                    for (i, head) in heads.clone().enumerate() {
                        let pair = [sequence, head];
                        let part_of = match (&scored, &picked) {
                            (Some(scored), _) => scored.part(&visible, pair, &queries, &keys),
                            (None, Some(picked)) => picked.part(i, &queries, n),
                            (None, None) => Part::Full,
                        };
                        if part_of == Part::Empty {
                            continue;
                        }
                        let (row, count) = (first_row + queries.start, queries.len());
                        let (p, dp) = (&mut p[..count * n], &mut dp[..count * n]);
                        let (query, cotangent) =
                            (head_rows(q, row, head * size), head_rows(d, row, head * size));
                        for (part, n_seen) in parts(count, n, triangle) {
                            let (shape, from) = ((part.len(), n_seen, size), part.start * n);
                            // SAFETY: both tiles are `count` by `n`, and this task's.
                            unsafe {
                                let x =
                                    left(&mut lines, query.skip_lines(part.start), part.len(), size, rows);
                                tile::<T>(shape, x, keys_by_size, Pointer::to(p).add(from), n, false);
                                let x = left(
                                    &mut lines,
                                    cotangent.skip_lines(part.start),
                                    part.len(),
                                    size,
                                    rows,
                                );
                                tile::<T>(shape, x, values_by_size, Pointer::to(dp).add(from), n, false);
                            }
                        }
                        let at = i * s.queries + queries.start;
                        let (lse, along) = (&lse_of[at..][..count], &along[at..][..count]);
                        if let Some(dropout) = &dropout {
                            dropout.apply(&s, pair, queries.clone(), &keys, dp);
                        }
                        if let Some(scored) = &scored {
                            scored.block(&visible, pair, &keys, steps);
                        }
                        match &scored {
                            Some(scored) if scored.scores() => scored.harden(
                                &visible,
                                pair,
                                queries.clone(),
                                &keys,
                                part_of,
                                self.attention.scale as f32,
                                steps,
                                [&mut *p, &mut *dp],
                                [lse, along],
                                scored.sums(shared, sequence, head),
                            ),
                            masked => {
                                if let Some(scored) = masked {
                                    scored.tile(
                                        &visible,
                                        pair,
                                        queries.clone(),
                                        &keys,
                                        part_of,
                                        1.0,
                                        steps,
                                        p,
                                    );
                                }
                                if let (Some(picked), Part::Mixed) = (&picked, part_of) {
                                    picked.hide(i, &queries, n, p);
                                }
                                harden(&scores, &visible, queries.clone(), keys.clone(), p, dp, lse, along);
                            }
                        }
                        if let Some(dropout) = &dropout {
                            dropout.apply(&s, pair, queries.clone(), &keys, p);
                        }

                        let panels = (i * query_blocks + b) * columns;
                        for (tile_of, right, sums) in
                            [(p, &*d_columns, &mut *dv_sums), (&mut *dp, &*query_columns, &mut *dk_sums)]
                        {
                            let left = by_steps::<T>(tile_of, n, words);
                            let right = Right::new::<T>(&right[panels..], count);
                            // A key of a triangle is seen from its own number on.
                            let half = if triangle { BLOCK / 2 } else { BLOCK };
                            for key in (0..n).step_by(half) {
                                let first = if triangle { key.min(count) } else { 0 };
                                let left = Left::Steps(left.add(first / T::per_word() * n + key), n);
                                let shape = (half.min(n - key), size, count - first);
                                let to = Pointer::to(sums).add(key * size);
                                // SAFETY: the sums are `n` by `size`, and this task's.
                                unsafe { tile::<T>(shape, left, right.from::<T>(first), to, size, true) };
                            }
                        }
                        let dp = Rows::new::<T>(dp, n, words);
                        for (part, n_seen) in parts(count, n, triangle) {
                            let x = dp.left(&mut lines, &part, n_seen, rows);
                            let to = Pointer::to(dq_sums).add((at + part.start) * size);
                            // SAFETY: the sums are rows of `size`, and this task's.
                            unsafe { tile::<T>((part.len(), size, n_seen), x, size_by_keys, to, size, true) };
                        }
                    }
                }
                for key in 0..n {
                    let part = key * size..(key + 1) * size;
                    T::store(&dk_sums[part.clone()], &mut dk.row_mut(key_row + key)[kv..kv + size]);
                    T::store(&dv_sums[part], &mut dv.row_mut(key_row + key)[kv..kv + size]);
                }
            }
            for (i, head) in heads.enumerate() {
                for query in 0..s.queries {
                    let sums = &dq_sums[(i * s.queries + query) * size..][..size];
                    T::store(sums, &mut dq.row_mut(first_row + query)[head * size..][..size]);
                }
            }
        });
        if let Some(scored) = &scored {
            scored.finish(cx, args, shared);
        }
    }
}
