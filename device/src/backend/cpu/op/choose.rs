//! The blocks of keys that queries read.
//!
//! A task takes some queries of one list of one sequence: products of [`TOGETHER`] at a time with
//! the keys that have a score, whose rows it widens once, then the largest scores of each. Queries
//! whose list has room for all that they see need no score. A product has one order of its sums
//! however many there are, so that a token alone chooses as one among others.

use super::attention::listed::{Cut, Order, exponentials, widen_head};
use super::{Run, sizes};
use crate::backend::cpu::product::{Side, block, block_scratch};
use crate::backend::cpu::simd::{add_scaled, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Pointer, Stored, View};
use dreamc_compiler::op::Measure;
use dreamc_compiler::op::choose::{Rank, chosen_of};
use dreamc_compiler::program::kernel::ChooseKeys;
use std::ops::Range;

/// Queries whose products are made at once.
const TOGETHER: usize = 32;

kernel_fn! {
    /// `x = scale · x`; the largest.
    fn scaled(scale: f32, x: &mut [f32]) -> f32 {
        let mut most = f32::NEG_INFINITY;
        for x in x.iter_mut() {
            *x *= scale;
            most = if *x > most { *x } else { most };
        }
        most
    }
}

/// A list of the queries of a sequence at work.
struct List<'a, T> {
    of: &'a ChooseKeys,
    q: View<'a, T>,
    weights: Option<View<'a, f32>>,
    sequence: usize,
    heads: Range<usize>,
    order: Order<'a>,
    /// The keys of each head that the list's heads read, one head after another.
    wide: Vec<f32>,
    /// Scores of some queries, a row of the keys that any of them sees for each.
    scores: Vec<f32>,
    /// Products of one head, likewise; rows of queries; scratch of the product.
    room: [Vec<f32>; 3],
}

impl<'a, T: Stored> List<'a, T> {
    fn new(of: &'a ChooseKeys, args: &Arguments<'a>, sequence: usize, list: usize) -> Self {
        let s = &of.shape;
        let [queries, keys, heads, kv_heads] = sizes([s.queries, s.keys, s.heads, s.kv_heads]);
        let [size, each] = sizes([s.size, s.heads / of.lists]);
        let [q, k] = ["q", "k"].map(|name| args.view::<T>(name));
        let weights = of.weighed.then(|| args.floats("weights").rows_of(heads));
        let order = Order::new(&of.seen, [queries, keys], args, sequence);
        let (heads, group) = (list * each..(list + 1) * each, heads / kv_heads);
        let groups = heads.start / group..(heads.end - 1) / group + 1;
        let n = order.all().len();
        let mut wide = vec![0.0; groups.len() * n * size];
        for (g, wide) in groups.zip(wide.chunks_exact_mut((n * size).max(1))) {
            let rows = order.all().iter().map(|&(_, _, j)| sequence * keys + j as usize);
            widen_head(k, rows, g * size, size, wide);
        }
        let rows = TOGETHER.min(queries);
        let lengths = [rows * n, rows * size, block_scratch(rows, n, size)];
        let (scores, room) = (vec![0.0; rows * n], lengths.map(|n| vec![0.0; n]));
        List { of, q, weights, sequence, heads, order, wide, scores, room }
    }

    /// The places among all keys of those that a query sees.
    fn seen(&self, query: usize) -> Range<usize> {
        if self.order.query(query) < 0 { 0..0 } else { self.order.range(query, 0, i64::MAX) }
    }

    /// Whether scores decide what a query chooses of the keys that it sees: not where its list has
    /// room for all of them.
    fn decides(&self, seen: &Range<usize>) -> bool {
        seen.len() as u64 + self.of.near + self.of.first > self.of.count
    }

    /// Makes the scores of at most [`TOGETHER`] queries; the keys that their rows are of.
    fn score(&mut self, some: Range<usize>) -> Range<usize> {
        let s = &self.of.shape;
        let [queries, size, group] = sizes([s.queries, s.size, s.heads / s.kv_heads]);
        let scored = |seen: Range<usize>| if self.decides(&seen) { seen } else { 0..0 };
        let seen: Vec<_> = some.clone().map(|i| scored(self.seen(i))).collect();
        let there = || seen.iter().filter(|range| !range.is_empty());
        let first = there().map(|range| range.start).min().unwrap_or(0);
        let n = there().map(|range| range.end).max().unwrap_or(first) - first;
        self.scores[..some.len() * n].fill(0.0);
        let (all, [terms, rows, scratch]) = (self.order.all().len(), &mut self.room);
        for h in self.heads.clone().filter(|_| n > 0) {
            let numbers = some.clone().map(|i| self.sequence * queries + i);
            widen_head(self.q, numbers.clone(), h * size, size, rows);
            let of_head = (h / group - self.heads.start / group) * all + first;
            let keys = &mut self.wide[of_head * size..][..n * size];
            let side = |start| Side::Strided { start, line: size, step: 1 };
            let (left, right, to) = (side(Pointer::to(rows)), side(Pointer::to(keys)), Pointer::to(terms));
            // SAFETY: rows are `size` long, and the terms of each query `n`.
            unsafe { block((some.len(), n, size), left, right, to, n, false, scratch) };
            for ((row, number), seen) in numbers.enumerate().zip(&seen).filter(|(_, seen)| !seen.is_empty()) {
                let own = row * n + seen.start - first..row * n + seen.end - first;
                let (terms, scores) = (&mut terms[own.clone()], &mut self.scores[own]);
                let most = scaled(self.of.seen.scale as f32, terms);
                let mut weight = self.weights.as_ref().map_or(1.0, |w| w.row(number)[h]);
                match self.of.measure {
                    Measure::Products => {}
                    Measure::Relu => terms.iter_mut().for_each(|x| *x = x.max(0.0)),
                    Measure::Softmax => weight /= exponentials(terms, most),
                }
                add_scaled(weight, terms, scores);
            }
        }
        first..first + n
    }

    /// The choice of a query, whose scores are row `row` of those of `keys`; `blocks` is room.
    fn choose(&self, query: usize, row: usize, keys: &Range<usize>, blocks: &mut Vec<Rank>) -> Vec<i32> {
        let position = self.order.query(query);
        if position < 0 {
            return vec![];
        }
        let (block, seen) = (self.of.block() as i64, self.seen(query));
        blocks.clear();
        if !seen.is_empty() {
            let scores = match self.decides(&seen) {
                true => &self.scores[row * keys.len() + seen.start - keys.start..][..seen.len()],
                false => &[],
            };
            let number = |&(_, p, _): &(i32, i32, u32)| (i64::from(p) / block) as i32;
            let numbers = self.order.all()[seen].iter().map(number);
            let scores = scores.iter().copied().chain(std::iter::repeat(0.0));
            blocks.extend(numbers.zip(scores).map(|(number, score)| Rank::new(number, score)));
        }
        let own = (position / block) as i32;
        chosen_of(own, self.of.near, self.of.first, self.of.count as usize, blocks)
    }
}

impl Run for ChooseKeys {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let [batch, queries, keys] = sizes([s.batch, s.queries, s.keys]);
        let [lists, count] = sizes([self.lists, self.count]);
        let chosen = args.ints("chosen").rows_of(lists * count);
        cx.count(|| {
            let of = |b: usize| {
                let order = Order::new(&self.seen, [queries, keys], args, b);
                (0..queries).map(|i| order.seen(i, 0, i64::MAX).len() as u64).sum::<u64>()
            };
            (0..batch).map(of).sum::<u64>() * s.heads * s.size
        });
        let cut = Cut::new(queries);
        let parts = cut.parts();
        cx.parallel(batch * lists * parts, |task, _| {
            let (part, list, b) = (task % parts, task / parts % lists, task / parts / lists);
            let mut of = List::<T>::new(self, args, b, list);
            let (mut blocks, all) = (vec![], cut.queries(part));
            for first in all.clone().step_by(TOGETHER) {
                let some = first..(first + TOGETHER).min(all.end);
                let keys = of.score(some.clone());
                for (row, i) in some.enumerate() {
                    let out = &mut chosen.row_mut(b * queries + i)[list * count..(list + 1) * count];
                    let found = of.choose(i, row, &keys, &mut blocks);
                    out.fill(-1);
                    out[..found.len()].copy_from_slice(&found);
                }
            }
        });
    }
}
