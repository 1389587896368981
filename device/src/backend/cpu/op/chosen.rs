//! Chosen keys as losses read them.
//!
//! A task takes some queries of a sequence, and widens the keys of a head once for all of them.
//! *Promise*: work is in proportion to the keys of lists, and no choice of threads changes a bit:
//! parts of queries are as many on every machine, and their sums are added in order.

use super::attention::listed::{Cut, Order, add_to_rows, exponentials, products, sum_rows, widen_head};
use super::{Run, sizes};
use crate::backend::cpu::simd::add_scaled;
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::ir::Attention;
use dreamc_compiler::op::attention::{Among, Chosen};
use dreamc_compiler::op::chosen::ABSENT;
use dreamc_compiler::program::AttentionShape;
use dreamc_compiler::program::kernel::{KeyMass, KeyScores, KeyScoresGrad};
use std::ops::Range;
use std::sync::OnceLock;

/// Sizes of a launch.
#[derive(Clone, Copy)]
struct Of<'a> {
    seen: &'a Attention,
    among: Among,
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    lists: usize,
    count: usize,
    cut: Cut,
}

impl<'a> Of<'a> {
    fn new(s: &AttentionShape, seen: &'a Attention) -> Of<'a> {
        let among = seen.among.unwrap_or_default();
        let [batch, queries, keys] = sizes([s.batch, s.queries, s.keys]);
        let [heads, kv_heads, size] = sizes([s.heads, s.kv_heads, s.size]);
        let [lists, count] = sizes([among.heads, among.count]);
        let cut = Cut::new(queries);
        Of { seen, among, batch, queries, keys, heads, kv_heads, size, lists, count, cut }
    }

    /// The list of a head, and its head of keys.
    fn list(&self, head: usize) -> usize {
        head / (self.heads / self.lists)
    }

    fn group(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// The keys of some queries of a list.
    fn read(&self, args: &Arguments<'a>, sequence: usize, list: usize, queries: Range<usize>) -> Keys {
        let order = Order::new(self.seen, [self.queries, self.keys], args, sequence);
        let all = args.ints("chosen").all();
        let chosen = Chosen::of_sequence(self.among, [sequence, self.queries], self.heads, all);
        let block = self.among.block as i64;
        let mut keys = Keys { ends: vec![], rows: vec![], places: vec![] };
        for query in queries {
            let list = chosen.list(query, list * (self.heads / self.lists));
            for (place, &number) in list.iter().enumerate().filter(|(_, number)| **number >= 0) {
                let from = i64::from(number).saturating_mul(block);
                for &(_, _, row) in order.seen(query, from, from.saturating_add(block)) {
                    keys.rows.push(row);
                    keys.places.push(place as u32);
                }
            }
            keys.ends.push(keys.rows.len());
        }
        keys
    }

    /// Pairs of queries and keys that they read, over all heads.
    fn pairs(&self, args: &Arguments<'a>) -> u64 {
        let of = |b: usize, c: usize| self.read(args, b, c, 0..self.queries).rows.len() as u64;
        let lists: u64 =
            (0..self.batch).flat_map(|b| (0..self.lists).map(move |c| (b, c))).map(|(b, c)| of(b, c)).sum();
        lists * (self.heads / self.lists) as u64
    }

    /// A number for each block of each list: `term` turns the scaled products of a head of a query
    /// into what it adds to those of its keys. A block without keys has `absent`.
    fn sum<T: Stored>(
        &self,
        cx: &Context,
        args: &Arguments<'a>,
        (name, absent): (&'static str, f32),
        term: impl Fn(usize, usize, &mut [f32]) + Sync,
    ) {
        let [q, k] = ["q", "k"].map(|name| args.view::<T>(name));
        let out = args.floats(name).rows_of(self.lists * self.count);
        let (size, parts, each) = (self.size, self.cut.parts(), self.heads / self.lists);
        cx.parallel(self.batch * self.lists * parts, |task, _| {
            let (part, list, b) = (task % parts, task / parts % self.lists, task / parts / self.lists);
            let queries = self.cut.queries(part);
            let read = self.read(args, b, list, queries.clone());
            let (mut wide, mut of_group) = (vec![0.0; self.keys * size], None);
            let (mut room, mut terms) = (vec![0.0; size], vec![0.0; read.most()]);
            let blocks = |query: usize| {
                let row = out.row_mut(b * self.queries + query);
                &mut row[list * self.count..(list + 1) * self.count]
            };
            for (n, query) in queries.clone().enumerate() {
                let blocks = blocks(query);
                blocks.fill(absent);
                read.of(n).1.iter().for_each(|place| blocks[*place as usize] = 0.0);
            }
            for head in list * each..(list + 1) * each {
                let group = self.group(head);
                if of_group.replace(group) != Some(group) {
                    let rows = (0..self.keys).map(|j| b * self.keys + j);
                    widen_head(k, rows, group * size, size, &mut wide);
                }
                for (n, query) in queries.clone().enumerate() {
                    let ((rows, places), row) = (read.of(n), b * self.queries + query);
                    let terms = &mut terms[..rows.len()];
                    let q = T::wide(&q.row(row)[head * size..][..size], &mut room);
                    products(self.seen.scale as f32, q, &wide, rows, terms);
                    term(row, head, terms);
                    let blocks = blocks(query);
                    terms.iter().zip(places).for_each(|(term, place)| blocks[*place as usize] += term);
                }
            }
        });
    }
}

/// The keys of some queries of a list.
struct Keys {
    /// Where those of each query end.
    ends: Vec<usize>,
    /// Their rows, and their places in the list.
    rows: Vec<u32>,
    places: Vec<u32>,
}

impl Keys {
    /// Rows and places of the keys of the `n`th query.
    fn of(&self, n: usize) -> (&[u32], &[u32]) {
        let own = n.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[n];
        (&self.rows[own.clone()], &self.places[own])
    }

    /// The most keys of a query.
    fn most(&self) -> usize {
        (0..self.ends.len()).map(|n| self.of(n).0.len()).max().unwrap_or(0)
    }
}

impl Run for KeyMass {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let of = Of::new(&self.shape, &self.seen);
        let lse = args.floats("lse").rows_of(of.heads);
        cx.count(|| of.pairs(args) * self.shape.size);
        of.sum::<T>(cx, args, ("mass", 0.0), |row, head, terms| match lse.row(row)[head] {
            f32::NEG_INFINITY => terms.fill(0.0),
            less => {
                exponentials(terms, less);
            }
        });
    }
}

impl Run for KeyScores {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let of = Of::new(&self.shape, &self.seen);
        let weights = self.weighed.then(|| args.floats("weights").rows_of(of.heads));
        cx.count(|| of.pairs(args) * self.shape.size);
        of.sum::<T>(cx, args, ("scores", ABSENT as f32), |row, head, terms| {
            let weight = weights.as_ref().map_or(1.0, |w| w.row(row)[head]);
            for term in terms.iter_mut() {
                *term = weight * if self.relu { term.max(0.0) } else { *term };
            }
        });
    }
}

impl Run for KeyScoresGrad {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let (scores, of) = (&self.scores, Of::new(&self.scores.shape, &self.scores.seen));
        let [q, k, dq, dk] = ["q", "k", "dq", "dk"].map(|name| args.view::<T>(name));
        let d = args.floats("d").rows_of(of.lists * of.count);
        let of_heads = |name| scores.weighed.then(|| args.floats(name).rows_of(of.heads));
        let (weights, dweights) = (of_heads("weights"), of_heads("dweights"));
        let (size, scale, parts) = (of.size, scores.seen.scale as f32, of.cut.parts());
        let each = of.heads / of.kv_heads;
        cx.count(|| 3 * of.pairs(args) * scores.shape.size);
        // Sums of what each part of the queries adds to the keys of a head.
        let sums: Vec<OnceLock<Vec<f32>>> =
            (0..of.batch * of.kv_heads * parts).map(|_| OnceLock::new()).collect();
        cx.parallel(sums.len(), |task, _| {
            let (part, group, b) = (task % parts, task / parts % of.kv_heads, task / parts / of.kv_heads);
            let queries = of.cut.queries(part);
            let (mut wide, mut of_keys) = (vec![0.0; of.keys * size], vec![0.0; of.keys * size]);
            widen_head(k, (0..of.keys).map(|j| b * of.keys + j), group * size, size, &mut wide);
            let (mut read, mut of_list) = (of.read(args, b, 0, 0..0), None);
            let [mut room, mut sum] = [(); 2].map(|()| vec![0.0; size]);
            let mut terms = vec![];
            for head in group * each..(group + 1) * each {
                let list = of.list(head);
                if of_list.replace(list) != Some(list) {
                    read = of.read(args, b, list, queries.clone());
                    terms.resize(read.most(), 0.0);
                }
                for (n, query) in queries.clone().enumerate() {
                    let ((rows, places), row) = (read.of(n), b * of.queries + query);
                    let (terms, own) = (&mut terms[..rows.len()], head * size..(head + 1) * size);
                    let q = T::wide(&q.row(row)[own.clone()], &mut room);
                    products(scale, q, &wide, rows, terms);
                    let d = &d.row(row)[list * of.count..(list + 1) * of.count];
                    let weight = weights.as_ref().map_or(1.0, |w| w.row(row)[head]);
                    let mut of_weight = 0.0;
                    for (term, place) in terms.iter_mut().zip(places) {
                        let (s, d) = (*term, d[*place as usize]);
                        let below = scores.relu && s <= 0.0;
                        of_weight += if below { 0.0 } else { d * s };
                        *term = if below { 0.0 } else { d * weight * scale };
                    }
                    sum.fill(0.0);
                    sum_rows(terms, &wide, rows, &mut sum);
                    add_to_rows(terms, q, rows, &mut of_keys);
                    T::store(&sum, &mut dq.row_mut(row)[own]);
                    if let Some(dweights) = &dweights {
                        dweights.row_mut(row)[head] = of_weight;
                    }
                }
            }
            let _ = sums[task].set(of_keys);
        });
        cx.parallel(of.batch * of.kv_heads, |task, _| {
            let (group, b) = (task % of.kv_heads, task / of.kv_heads);
            let mut all = vec![0.0; of.keys * size];
            for part in sums[task * parts..(task + 1) * parts].iter().filter_map(OnceLock::get) {
                add_scaled(1.0, part, &mut all);
            }
            for (j, all) in all.chunks_exact(size).enumerate() {
                T::store(all, &mut dk.row_mut(b * of.keys + j)[group * size..(group + 1) * size]);
            }
        });
    }
}
