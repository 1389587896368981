//! Attention along the sequence.
//!
//! Forward, a task takes some queries of one key head (all query heads that read it, up to [`HEADS`]) and goes through
//! the keys a block at a time: a tile of scores by one product, its softmax relative to a running maximum, and the values
//! by another product. Backward, a task takes one key head of one sequence and goes through pairs of blocks, recomputing
//! the scores. Nothing of size `queries · keys` exists, and blocks that the mask hides altogether are not computed.

use super::product::{self, Left, Side, left, pack_columns, panels, tile};
use super::simd::{dot, exp, kernel_fn, largest, sum, tanh};
use super::{Arguments, Context, Pointer, Scratch, View};
use dreamc_compiler::ir::{Attention, Mask};
use dreamc_compiler::program::AttentionShape;
use std::ops::Range;

/// Queries, and keys, of a block.
const BLOCK: usize = 64;
/// Query heads that a task of the forward takes together.
const HEADS: usize = 4;

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

pub(super) fn scratch(shape: &AttentionShape, backward: bool) -> Scratch {
    let Sizes { batch, queries, heads, size, group, .. } = Sizes::new(shape);
    let panel = product::shape();
    let square = BLOCK * BLOCK;
    let rows = panels(BLOCK, size.max(BLOCK), panel.rows);
    let keys_by_size = panels(BLOCK, size, panel.columns);
    let size_by_keys = panels(size, BLOCK, panel.columns);
    if backward {
        let local = 2 * keys_by_size + 3 * size_by_keys + rows + 2 * square;
        Scratch { local, shared: batch * queries * heads }
    } else {
        let heads = group.min(HEADS);
        Scratch::local(heads * (BLOCK * size + 2 * BLOCK) + rows + square + keys_by_size + size_by_keys)
    }
}

/// What queries of one sequence see.
struct Visible<'a> {
    window: Option<usize>,
    /// Positions of the queries and keys, where they are not their numbers.
    positions: Option<(&'a [i32], &'a [i32])>,
    segments: Option<&'a [i32]>,
}

impl<'a> Visible<'a> {
    /// `at` is the first of the mask operands.
    fn new(s: &Sizes, attention: &Attention, args: &Arguments<'a>, at: usize, sequence: usize) -> Self {
        let ints = |i: usize, n: usize| args.ints(i).part(sequence * n, n);
        let positioned = attention.mask == Mask::Positions;
        Visible {
            window: attention.window.map(|w| w as usize),
            positions: positioned.then(|| (ints(at, s.queries), ints(at + 1, s.keys))),
            segments: attention.segments.then(|| ints(at + 2 * positioned as usize, s.queries)),
        }
    }

    /// Whether each pair must be looked at.
    #[inline(always)]
    fn by_pair(&self) -> bool {
        self.positions.is_some() || self.segments.is_some()
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

    /// The part of some keys outside of which a query sees nothing.
    #[inline(always)]
    fn part(&self, query: usize, keys: &Range<usize>) -> Range<usize> {
        if self.positions.is_some() {
            return 0..keys.len();
        }
        let first = self.window.map_or(0, |w| (query + 1).saturating_sub(w));
        let start = first.clamp(keys.start, keys.end);
        let end = (query + 1).clamp(start, keys.end);
        start - keys.start..end - keys.start
    }

    /// Whether any of some queries may see any of some keys.
    fn any(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        match self.positions {
            None => keys.start < queries.end && self.window.is_none_or(|w| queries.start < keys.end - 1 + w),
            Some((q, k)) => {
                let (q, k) = (&q[queries.clone()], &k[keys.clone()]);
                let (low, high) = q.iter().fold((i32::MAX, i32::MIN), |(l, h), &q| (l.min(q), h.max(q)));
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

/// How scores become probabilities.
struct Scores {
    scale: f32,
    softcap: Option<f32>,
}

impl Scores {
    fn new(attention: &Attention) -> Self {
        Scores { scale: attention.scale as f32, softcap: attention.softcap.map(|c| c as f32) }
    }

    #[inline(always)]
    fn apply<const FMA: bool>(&self, x: &mut [f32]) {
        match self.softcap {
            None => {
                for x in x.iter_mut() {
                    *x *= self.scale;
                }
            }
            Some(c) => {
                let factor = self.scale / c;
                for x in x.iter_mut() {
                    *x = c * tanh::<FMA>(*x * factor);
                }
            }
        }
    }
}

kernel_fn! {
    /// Turns a tile of products into numerators of the softmax relative to the running maxima, and brings the sums and the
    /// results so far to the same scale.
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
        let size = results.len() / most.len();
        let rows = tile.chunks_exact_mut(keys.len()).zip(results.chunks_exact_mut(size));
        for (i, (query, (tile, result))) in queries.zip(rows).enumerate() {
            let part = visible.part(query, &keys);
            let (before, rest) = tile.split_at_mut(part.start);
            let (x, after) = rest.split_at_mut(part.len());
            before.fill(0.0);
            after.fill(0.0);
            scores.apply::<FMA>(x);
            if visible.by_pair() {
                for (j, x) in x.iter_mut().enumerate() {
                    if !visible.sees(query, keys.start + part.start + j) {
                        *x = f32::NEG_INFINITY;
                    }
                }
            }
            let high = largest(x);
            let high = if high > most[i] { high } else { most[i] };
            if high == f32::NEG_INFINITY {
                x.fill(0.0);
                continue;
            }
            for x in x.iter_mut() {
                *x = exp::<FMA>(*x - high);
            }
            if high > most[i] {
                let factor = exp::<FMA>(most[i] - high);
                sums[i] *= factor;
                for r in result.iter_mut() {
                    *r *= factor;
                }
                most[i] = high;
            }
            sums[i] += sum::<FMA>(x);
        }
    }

    /// Divides by the sums; rows that saw nothing are zero.
    fn finish(results: &[f32], most: f32, sum: f32, o: &mut [f32], lse: &mut f32) {
        if sum == 0.0 {
            o.fill(0.0);
            *lse = f32::NEG_INFINITY;
            return;
        }
        let factor = 1.0 / sum;
        for (o, r) in o.iter_mut().zip(results) {
            *o = *r * factor;
        }
        *lse = most + sum.ln();
    }

    /// Turns a tile of products into probabilities, and a tile of their cotangents into cotangents of the products.
    fn harden(
        scores: &Scores,
        visible: &Visible,
        queries: Range<usize>,
        keys: Range<usize>,
        tile: &mut [f32],
        dtile: &mut [f32],
        lse: &dyn Fn(usize) -> f32,
        along: &dyn Fn(usize) -> f32,
    ) {
        let rows = tile.chunks_exact_mut(keys.len()).zip(dtile.chunks_exact_mut(keys.len()));
        for (query, (tile, dtile)) in queries.zip(rows) {
            let part = visible.part(query, &keys);
            let (lse, along) = (lse(query), along(query));
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
            scores.apply::<FMA>(x);
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
                        *x = exp::<FMA>(*x - lse);
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
fn blocks(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(BLOCK).map(move |first| first..(first + BLOCK).min(n))
}

/// Rows of a strided operand as lines of a product, one head of each.
fn head_rows(x: View<f32>, row: usize, element: usize) -> Side {
    Side::Strided { start: x.start.add(row * x.stride + element), line: x.stride, step: 1 }
}

/// The same with the elements of the head as lines.
fn head_columns(x: View<f32>, row: usize, element: usize) -> Side {
    Side::Strided { start: x.start.add(row * x.stride + element), line: 1, step: x.stride }
}

/// `(q, k, v, mask operands, o, lse)`
pub(super) fn forward(cx: &Context, shape: &AttentionShape, attention: &Attention, args: &Arguments) {
    let s = Sizes::new(shape);
    let [q, k, v] = [0, 1, 2].map(|i| args.floats(i));
    let last = args.list.len();
    let o = args.floats(last - 2).rows_of(s.heads * s.size);
    let lse = args.floats(last - 1).rows_of(s.heads);
    let scores = Scores::new(attention);
    cx.count(|| {
        let pairs: u64 = (0..s.batch).map(|b| Visible::new(&s, attention, args, 3, b).pairs(&s)).sum();
        2 * pairs * (s.heads * s.size) as u64
    });
    let (chunks, query_blocks) = (s.group.div_ceil(HEADS), s.queries.div_ceil(BLOCK));
    cx.parallel(s.batch * s.kv_heads * chunks * query_blocks, |task, mut scratch| {
        // The last queries of a causal sequence see most: they come first.
        let block = query_blocks - 1 - task % query_blocks;
        let chunk = task / query_blocks % chunks;
        let kv_head = task / query_blocks / chunks % s.kv_heads;
        let sequence = task / query_blocks / chunks / s.kv_heads;
        let heads = kv_head * s.group + chunk * HEADS..kv_head * s.group + ((chunk + 1) * HEADS).min(s.group);
        let queries = block * BLOCK..((block + 1) * BLOCK).min(s.queries);
        let (count, size) = (queries.len(), s.size);
        let visible = Visible::new(&s, attention, args, 3, sequence);

        let panel = product::shape();
        let rows = take(&mut scratch, panels(BLOCK, size.max(BLOCK), panel.rows));
        let tiles = take(&mut scratch, count * BLOCK);
        let results = take(&mut scratch, heads.len() * count * size);
        let most = take(&mut scratch, heads.len() * count);
        let sums = take(&mut scratch, heads.len() * count);
        let right = take(&mut scratch, panels(BLOCK, size, panel.columns));
        let values = take(&mut scratch, panels(size, BLOCK, panel.columns));
        results.fill(0.0);
        most.fill(f32::NEG_INFINITY);
        sums.fill(0.0);
        for keys in blocks(s.keys).filter(|keys| visible.any(&queries, keys)) {
            let (row, n) = (sequence * s.keys + keys.start, keys.len());
            pack_columns(head_rows(k, row, kv_head * size), n, size, right);
            pack_columns(head_columns(v, row, kv_head * size), size, n, values);
            for (i, head) in heads.clone().enumerate() {
                let tile_of = &mut tiles[..count * n];
                let result = &mut results[i * count * size..][..count * size];
                let range = i * count..(i + 1) * count;
                let (mut lines, c) = (None, Pointer::to(tile_of));
                let side = head_rows(q, sequence * s.queries + queries.start, head * size);
                let query = left(&mut lines, side, count, size, rows);
                // SAFETY: `tile_of` is `count` by `n`, and this task's.
                unsafe { tile((count, n, size), query, right, c, n, false) };
                soften(
                    &scores,
                    &visible,
                    queries.clone(),
                    keys.clone(),
                    tile_of,
                    &mut most[range.clone()],
                    &mut sums[range],
                    result,
                );
                let p = Side::Strided { start: Pointer::to(tile_of), line: n, step: 1 };
                let (p, c) = (left(&mut lines, p, count, n, rows), Pointer::to(result));
                // SAFETY: `result` is `count` by `size`, and this task's.
                unsafe { tile((count, size, n), p, values, c, size, true) };
            }
        }
        for (i, head) in heads.enumerate() {
            for (j, query) in queries.clone().enumerate() {
                let (row, at) = (sequence * s.queries + query, i * count + j);
                finish(
                    &results[at * size..][..size],
                    most[at],
                    sums[at],
                    &mut o.row_mut(row)[head * size..][..size],
                    &mut lse.row_mut(row)[head],
                );
            }
        }
    });
}

kernel_fn! {
    /// `Σ o · do` of each head.
    fn inner_products(o: &[f32], d: &[f32], size: usize, along: &mut [f32]) {
        for ((along, o), d) in along.iter_mut().zip(o.chunks_exact(size)).zip(d.chunks_exact(size)) {
            *along = dot::<FMA>(o, d);
        }
    }
}

/// `(q, k, v, o, lse, do, mask operands, dq, dk, dv)`
pub(super) fn backward(cx: &Context, shape: &AttentionShape, attention: &Attention, args: &Arguments) {
    let s = Sizes::new(shape);
    let [q, k, v, o, d] = [0, 1, 2, 3, 5].map(|i| args.floats(i));
    let lse = args.floats(4).rows_of(s.heads);
    let last = args.list.len();
    let [dq, dk, dv] = [last - 3, last - 2, last - 1].map(|i| args.floats(i));
    let scores = Scores::new(attention);
    cx.count(|| {
        let pairs: u64 = (0..s.batch).map(|b| Visible::new(&s, attention, args, 6, b).pairs(&s)).sum();
        5 * pairs * (s.heads * s.size) as u64
    });
    let along = cx.shared().rows_of_part(s.heads, s.batch * s.queries);
    cx.pieces(s.batch * s.queries, s.heads * s.size, |range| {
        for row in range {
            inner_products(o.row(row), d.row(row), s.size, along.row_mut(row));
            dq.row_mut(row).fill(0.0);
        }
    });
    cx.parallel(s.batch * s.kv_heads, |task, mut scratch| {
        let (sequence, kv_head) = (task / s.kv_heads, task % s.kv_heads);
        let visible = Visible::new(&s, attention, args, 6, sequence);
        let (size, kv) = (s.size, kv_head * s.size);
        let panel = product::shape();
        let key_panels = take(&mut scratch, panels(BLOCK, size, panel.columns));
        let value_panels = take(&mut scratch, panels(BLOCK, size, panel.columns));
        let key_columns = take(&mut scratch, panels(size, BLOCK, panel.columns));
        let query_columns = take(&mut scratch, panels(size, BLOCK, panel.columns));
        let d_columns = take(&mut scratch, panels(size, BLOCK, panel.columns));
        let rows = take(&mut scratch, panels(BLOCK, size.max(BLOCK), panel.rows));
        let (p, dp) = (take(&mut scratch, BLOCK * BLOCK), take(&mut scratch, BLOCK * BLOCK));
        for keys in blocks(s.keys) {
            let (key_row, n) = (sequence * s.keys + keys.start, keys.len());
            pack_columns(head_rows(k, key_row, kv), n, size, key_panels);
            pack_columns(head_rows(v, key_row, kv), n, size, value_panels);
            pack_columns(head_columns(k, key_row, kv), size, n, key_columns);
            let mut begun = false;
            for queries in blocks(s.queries).filter(|queries| visible.any(queries, &keys)) {
                for head in kv_head * s.group..(kv_head + 1) * s.group {
                    let (row, count) = (sequence * s.queries + queries.start, queries.len());
                    pack_columns(head_columns(q, row, head * size), size, count, query_columns);
                    pack_columns(head_columns(d, row, head * size), size, count, d_columns);
                    let (p, dp) = (&mut p[..count * n], &mut dp[..count * n]);
                    let mut lines = None;
                    // SAFETY: both tiles are `count` by `n`, and this task's.
                    unsafe {
                        let side = head_rows(q, row, head * size);
                        let query = left(&mut lines, side, count, size, rows);
                        tile((count, n, size), query, key_panels, Pointer::to(p), n, false);
                        let side = head_rows(d, row, head * size);
                        let cotangent = left(&mut lines, side, count, size, rows);
                        tile((count, n, size), cotangent, value_panels, Pointer::to(dp), n, false);
                    }
                    let of_sequence = sequence * s.queries;
                    harden(
                        &scores,
                        &visible,
                        queries.clone(),
                        keys.clone(),
                        p,
                        dp,
                        &|query| lse.row(of_sequence + query)[head],
                        &|query| along.row(of_sequence + query)[head],
                    );
                    let (p, dp) = (Pointer::to(p), Pointer::to(dp));
                    // SAFETY: heads of rows of this sequence, which are this task's: it alone has this key head.
                    unsafe {
                        let to = dv.start.add(key_row * dv.stride + kv);
                        tile((n, size, count), Left::Steps(p, n), d_columns, to, dv.stride, begun);
                        let to = dk.start.add(key_row * dk.stride + kv);
                        tile((n, size, count), Left::Steps(dp, n), query_columns, to, dk.stride, begun);
                        let to = dq.start.add(row * dq.stride + head * size);
                        let side = Side::Strided { start: dp, line: n, step: 1 };
                        let dp = left(&mut lines, side, count, n, rows);
                        tile((count, size, n), dp, key_columns, to, dq.stride, true);
                    }
                    begun = true;
                }
            }
            if !begun {
                for key in 0..n {
                    dk.row_mut(key_row + key)[kv..kv + size].fill(0.0);
                    dv.row_mut(key_row + key)[kv..kv + size].fill(0.0);
                }
            }
        }
    });
}
