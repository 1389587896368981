//! Attention of queries that see few of the keys, each its own: those of chosen blocks, or those at
//! ends of blocks.
//!
//! *Promise*: work is in proportion to the keys that are seen. A task widens the keys and values of
//! one key head once for many queries; few queries read the rows that they see as they are stored.
//! A query's keys are in the order of their positions, so that no choice of threads changes a bit.

use super::{Dropout, Sizes, take};
use crate::backend::cpu::product::FEW;
use crate::backend::cpu::simd::{dot, exp, fma, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use dreamc_compiler::ir::{Attention as Scoring, Mask};
use dreamc_compiler::op::attention::Chosen;
use std::ops::Range;

/// Elements of a row whose sums are in registers at once.
const WIDE: usize = 64;

/// The queries of a sequence, cut for threads: into as many parts on every machine, so that sums of
/// parts have the same bits.
#[derive(Clone, Copy)]
pub(in crate::backend::cpu::op) struct Cut {
    queries: usize,
    each: usize,
}

impl Cut {
    /// Fewest queries of a part, where there are that many.
    const FEWEST: usize = 256;
    /// Parts at most.
    const MOST: usize = 4;

    pub fn new(queries: usize) -> Self {
        Cut { queries, each: Cut::FEWEST.max(queries.div_ceil(Cut::MOST)) }
    }

    pub fn parts(&self) -> usize {
        self.queries.div_ceil(self.each)
    }

    /// The queries of a part.
    pub fn queries(&self, part: usize) -> Range<usize> {
        part * self.each..((part + 1) * self.each).min(self.queries)
    }
}

/// The keys of one sequence in the order of segments and positions; of a mask of `every` those at
/// ends of blocks alone.
pub(in crate::backend::cpu::op) struct Order<'a> {
    entries: Vec<(i32, i32, u32)>,
    window: Option<u64>,
    positions: Option<&'a [i32]>,
    segments: Option<&'a [i32]>,
}

impl<'a> Order<'a> {
    pub fn new(
        attention: &Scoring,
        [queries, keys]: [usize; 2],
        args: &Arguments<'a>,
        sequence: usize,
    ) -> Self {
        let ints = |name, n: usize| args.ints(name).part(sequence * n, n);
        let positioned = attention.mask == Mask::Positions;
        let of_keys = positioned.then(|| ints("key_positions", keys));
        let segments = attention.segments.then(|| ints("segments", queries));
        let entry = |j: usize| {
            let position = of_keys.map_or(j as i32, |p| p[j]);
            (segments.map_or(0, |s| s[j]), position, j as u32)
        };
        let every = attention.every.unwrap_or(1).max(1);
        let there = |&(_, p, _): &(i32, i32, u32)| p >= 0 && (p as u64 + 1).is_multiple_of(every);
        let mut entries: Vec<_> = (0..keys).map(entry).filter(there).collect();
        if !entries.is_sorted() {
            entries.sort_unstable();
        }
        let positions = positioned.then(|| ints("query_positions", queries));
        Order { entries, window: attention.window, positions, segments }
    }

    /// The position of a query, negative where it takes no part.
    pub fn query(&self, query: usize) -> i64 {
        self.positions.map_or(query as i64, |p| p[query].into())
    }

    /// All keys: segment, position, number.
    pub fn all(&self) -> &[(i32, i32, u32)] {
        &self.entries
    }

    /// Keys that a query sees of positions from `from` on and below `to`.
    pub fn seen(&self, query: usize, from: i64, to: i64) -> &[(i32, i32, u32)] {
        self.entries.get(self.range(query, from, to)).unwrap_or_default()
    }

    /// Their places among all.
    pub fn range(&self, query: usize, from: i64, to: i64) -> Range<usize> {
        let (at, segment) = (self.query(query), self.segments.map_or(0, |s| s[query]));
        let first = self.window.map_or(0, |w| (at + 1).saturating_sub_unsigned(w)).max(from).max(0);
        let last = (at + 1).min(to);
        let below = |position: i64| {
            self.entries.partition_point(|&(s, p, _)| (s, i64::from(p)) < (segment, position))
        };
        let first = below(first);
        first..below(last).max(first)
    }
}

/// The keys of queries.
struct Lists<'a> {
    order: Order<'a>,
    chosen: Option<Chosen<'a>>,
    block: u64,
    blocks: Vec<i32>,
    /// Keys of the query that was asked last, and its choice.
    rows: Vec<u32>,
    last: Option<(usize, Option<&'a [i32]>)>,
}

impl<'a> Lists<'a> {
    fn new(s: &Sizes, attention: &Scoring, args: &Arguments<'a>, sequence: usize) -> Self {
        let order = Order::new(attention, [s.queries, s.keys], args, sequence);
        let chosen = attention
            .among
            .map(|a| Chosen::of_sequence(a, [sequence, s.queries], s.heads, args.ints("chosen").all()));
        let block = attention.among.map_or(1, |a| a.block.max(1));
        Lists { order, chosen, block, blocks: vec![], rows: vec![], last: None }
    }

    /// The keys of a head of a query; heads that share a choice have the same.
    fn rows(&mut self, query: usize, head: usize) -> &[u32] {
        let list = self.chosen.as_ref().map(|chosen| chosen.list(query, head));
        if self.last != Some((query, list)) {
            self.find(query, list);
            self.last = Some((query, list));
        }
        &self.rows
    }

    fn find(&mut self, query: usize, list: Option<&[i32]>) {
        let Lists { order, block: size, blocks, rows, .. } = self;
        rows.clear();
        let Some(list) = list else {
            rows.extend(order.seen(query, 0, i64::MAX).iter().map(|(_, _, j)| *j));
            return;
        };
        blocks.clear();
        blocks.extend(list.iter().filter(|block| **block >= 0));
        blocks.sort_unstable();
        blocks.dedup();
        for &block in blocks.iter() {
            let from = i64::try_from((block as u64).saturating_mul(*size)).unwrap_or(i64::MAX);
            let to = from.saturating_add_unsigned(*size);
            rows.extend(order.seen(query, from, to).iter().map(|(_, _, j)| *j));
        }
    }
}

/// Pairs of queries and keys of a launch that see each other, over all heads.
pub(super) fn pairs(s: &Sizes, attention: &Scoring, args: &Arguments) -> u64 {
    let mut all = 0;
    for sequence in 0..s.batch {
        let mut lists = Lists::new(s, attention, args, sequence);
        for (query, head) in (0..s.queries).flat_map(|i| (0..s.heads).map(move |h| (i, h))) {
            all += lists.rows(query, head).len() as u64;
        }
    }
    all
}

fn few(s: &Sizes) -> bool {
    s.queries <= FEW
}

/// Keys that a query sees at most. Positions are data: some keys may share one, so that neither a
/// window nor blocks bound their number.
fn most(s: &Sizes, attention: &Scoring) -> usize {
    match attention.mask {
        Mask::Positions => s.keys,
        _ => attention.most_keys(s.keys as u64).min(s.keys as u64) as usize,
    }
}

pub(super) fn scratch(s: &Sizes, attention: &Scoring, backward: bool) -> Scratch {
    let held = if few(s) && !backward { 0 } else { s.keys };
    let tensors = if backward { 4 } else { 2 };
    Scratch::local(tensors * held * s.size + 2 * most(s, attention) + 4 * s.size)
}

kernel_fn! {
    /// Scaled products of a query with some rows; the largest.
    pub(in crate::backend::cpu::op) fn products(scale: f32, q: &[f32], keys: &[f32], rows: &[u32], out: &mut [f32]) -> f32 {
        let mut most = f32::NEG_INFINITY;
        for (out, &row) in out.iter_mut().zip(rows) {
            *out = scale * dot::<FMA>(q, &keys[row as usize * q.len()..][..q.len()]);
            most = if *out > most { *out } else { most };
        }
        most
    }

    /// `x = e^(x - less)`; the sum.
    pub(in crate::backend::cpu::op) fn exponentials(x: &mut [f32], less: f32) -> f32 {
        for x in x.iter_mut() {
            *x = exp::<FMA>(*x - less);
        }
        crate::backend::cpu::simd::sum::<FMA>(x)
    }

    /// `to += Σ weights[i] · rows[i]`.
    pub(in crate::backend::cpu::op) fn sum_rows(weights: &[f32], of: &[f32], rows: &[u32], to: &mut [f32]) {
        let size = to.len();
        for (piece, to) in to.chunks_mut(WIDE).enumerate() {
            let mut sums = [0.0; WIDE];
            let first = piece * WIDE;
            if let Ok(whole) = <&mut [f32; WIDE]>::try_from(&mut *to) {
                for (weight, &row) in weights.iter().zip(rows) {
                    let of = &of[row as usize * size + first..][..WIDE];
                    for e in 0..WIDE {
                        sums[e] = fma::<FMA>(*weight, of[e], sums[e]);
                    }
                }
                for e in 0..WIDE {
                    whole[e] += sums[e];
                }
            } else {
                for (weight, &row) in weights.iter().zip(rows) {
                    let of = &of[row as usize * size + first..][..to.len()];
                    for (to, x) in to.iter_mut().zip(of) {
                        *to = fma::<FMA>(*weight, *x, *to);
                    }
                }
            }
        }
    }

    /// `rows[i] += weights[i] · x`.
    pub(in crate::backend::cpu::op) fn add_to_rows(weights: &[f32], x: &[f32], rows: &[u32], to: &mut [f32]) {
        for (weight, &row) in weights.iter().zip(rows) {
            let to = &mut to[row as usize * x.len()..][..x.len()];
            for (to, x) in to.iter_mut().zip(x) {
                *to = fma::<FMA>(*weight, *x, *to);
            }
        }
    }

    /// Turns cotangents of weights into those of scaled products.
    fn slopes(p: &[f32], d: &mut [f32], along: f32, scale: f32) {
        for (d, p) in d.iter_mut().zip(p) {
            *d = *p * (*d - along) * scale;
        }
    }
}

/// The rows of one key head of a sequence in f32.
pub(in crate::backend::cpu::op) fn widen_head<T: Stored>(
    x: View<T>,
    rows: impl Iterator<Item = usize>,
    element: usize,
    size: usize,
    to: &mut [f32],
) {
    for (row, to) in rows.zip(to.chunks_exact_mut(size)) {
        let from = &x.row(row)[element..element + size];
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }
}

pub(super) fn forward<T: Stored>(
    s: &Sizes,
    attention: &Scoring,
    dropout: Option<Dropout>,
    cx: &Context,
    args: &Arguments,
) {
    let [q, k, v] = ["q", "k", "v"].map(|name| args.view::<T>(name));
    let o = args.view::<T>("o").rows_of(s.heads * s.size);
    let lse = args.floats("lse").rows_of(s.heads);
    let (size, scale, few) = (s.size, attention.scale as f32, few(s));
    let cut = Cut::new(s.queries);
    let parts = cut.parts();
    cx.parallel(s.batch * s.kv_heads * parts, |task, mut scratch| {
        let (part, kv_head, sequence) = (task % parts, task / parts % s.kv_heads, task / parts / s.kv_heads);
        let held = if few { 0 } else { s.keys };
        let [keys, values] = [(); 2].map(|()| take(&mut scratch, held * size));
        let weights = take(&mut scratch, most(s, attention));
        let [room, result] = [(); 2].map(|()| take(&mut scratch, size));
        let all = |row: usize| sequence * s.keys + row;
        let of_kv = kv_head * size..(kv_head + 1) * size;
        widen_head(k, (0..s.keys).map(all), of_kv.start, size, keys);
        widen_head(v, (0..s.keys).map(all), of_kv.start, size, values);
        let mut lists = Lists::new(s, attention, args, sequence);
        for query in cut.queries(part) {
            let row = sequence * s.queries + query;
            for head in kv_head * s.group..(kv_head + 1) * s.group {
                let rows = lists.rows(query, head);
                let weights = &mut weights[..rows.len()];
                let q = &q.row(row)[head * size..][..size];
                let most = match few {
                    false => products(scale, T::wide(q, room), keys, rows, weights),
                    true => {
                        for (weight, &row) in weights.iter_mut().zip(rows) {
                            *weight = scale * T::inner(q, &k.row(all(row as usize))[of_kv.clone()]);
                        }
                        weights.iter().fold(f32::NEG_INFINITY, |most, &x| if x > most { x } else { most })
                    }
                };
                result.fill(0.0);
                let mut of_row = f32::NEG_INFINITY;
                if most > f32::NEG_INFINITY {
                    let sum = exponentials(weights, most);
                    if let Some(dropout) = &dropout {
                        dropout.apply_list([row, head], rows, weights);
                    }
                    match few {
                        false => sum_rows(weights, values, rows, result),
                        true => {
                            for (weight, &row) in weights.iter().zip(rows) {
                                T::add_scaled(*weight, &v.row(all(row as usize))[of_kv.clone()], result);
                            }
                        }
                    }
                    let factor = 1.0 / sum;
                    result.iter_mut().for_each(|x| *x *= factor);
                    of_row = most + sum.ln();
                }
                lse.row_mut(row)[head] = of_row;
                T::store(result, &mut o.row_mut(row)[head * size..][..size]);
            }
        }
    });
}

pub(super) fn backward<T: Stored>(
    s: &Sizes,
    attention: &Scoring,
    (dropout, log): (Option<Dropout>, bool),
    cx: &Context,
    args: &Arguments,
) {
    let [q, k, v, o, d] = ["q", "k", "v", "o", "do"].map(|name| args.view::<T>(name));
    let lse = args.floats("lse").rows_of(s.heads);
    let dlse = log.then(|| args.floats("dlse").rows_of(s.heads));
    let [dq, dk, dv] = ["dq", "dk", "dv"].map(|name| args.view::<T>(name));
    let (size, scale) = (s.size, attention.scale as f32);
    cx.parallel(s.batch * s.kv_heads, |task, mut scratch| {
        let (sequence, kv_head) = (task / s.kv_heads, task % s.kv_heads);
        let [keys, values, of_keys, of_values] = [(); 4].map(|()| take(&mut scratch, s.keys * size));
        let (p, dp) = take(&mut scratch, 2 * most(s, attention)).split_at_mut(most(s, attention));
        let [room_q, room_d, sums] = [(); 3].map(|()| take(&mut scratch, size));
        let all = |row: usize| sequence * s.keys + row;
        widen_head(k, (0..s.keys).map(all), kv_head * size, size, keys);
        widen_head(v, (0..s.keys).map(all), kv_head * size, size, values);
        of_keys.fill(0.0);
        of_values.fill(0.0);
        let mut lists = Lists::new(s, attention, args, sequence);
        for query in 0..s.queries {
            let row = sequence * s.queries + query;
            for head in kv_head * s.group..(kv_head + 1) * s.group {
                let rows = lists.rows(query, head);
                let own = head * size..(head + 1) * size;
                let of = lse.row(row)[head];
                sums.fill(0.0);
                if of > f32::NEG_INFINITY {
                    let (p, dp) = (&mut p[..rows.len()], &mut dp[..rows.len()]);
                    let along = T::inner(&o.row(row)[own.clone()], &d.row(row)[own.clone()])
                        - dlse.as_ref().map_or(0.0, |dlse| dlse.row(row)[head]);
                    let q = T::wide(&q.row(row)[own.clone()], room_q);
                    let d = T::wide(&d.row(row)[own.clone()], room_d);
                    products(scale, q, keys, rows, p);
                    exponentials(p, of);
                    products(1.0, d, values, rows, dp);
                    if let Some(dropout) = &dropout {
                        dropout.apply_list([row, head], rows, dp);
                    }
                    slopes(p, dp, along, scale);
                    if let Some(dropout) = &dropout {
                        dropout.apply_list([row, head], rows, p);
                    }
                    sum_rows(dp, keys, rows, sums);
                    add_to_rows(dp, q, rows, of_keys);
                    add_to_rows(p, d, rows, of_values);
                }
                T::store(sums, &mut dq.row_mut(row)[own]);
            }
        }
        let kv = kv_head * size..(kv_head + 1) * size;
        for key in 0..s.keys {
            let part = key * size..(key + 1) * size;
            T::store(&of_keys[part.clone()], &mut dk.row_mut(all(key))[kv.clone()]);
            T::store(&of_values[part], &mut dv.row_mut(all(key))[kv.clone()]);
        }
    });
}
