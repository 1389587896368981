//! The blocks of keys that queries read.
//!
//! A task takes some queries of one list of one sequence: products with the keys that have a score,
//! whose rows it widens once, then the largest scores.

use super::attention::listed::{Order, exponentials, products, widen_head};
use super::{Run, sizes};
use crate::device::backend::cpu::simd::add_scaled;
use crate::device::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::op::Measure;
use dreamc_compiler::op::choose::chosen_of;
use dreamc_compiler::program::kernel::ChooseKeys;

/// Queries of a task at least, where there are so many.
const QUERIES: usize = 256;
/// Parts of the queries of a sequence at most.
const PARTS: usize = 4;

impl Run for ChooseKeys {
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let [batch, queries, keys, heads] = sizes([s.batch, s.queries, s.keys, s.heads]);
        let [kv_heads, size, lists, count] = sizes([s.kv_heads, s.size, self.lists, self.count]);
        let [q, k] = ["q", "k"].map(|name| args.view::<T>(name));
        let weights = self.weighed.then(|| args.floats("weights").rows_of(heads));
        let chosen = args.ints("chosen").rows_of(lists * count);
        let (each, group, scale) = (heads / lists, heads / kv_heads, self.seen.scale as f32);
        cx.count(|| {
            let of = |b: usize| {
                let order = Order::new(&self.seen, [queries, keys], args, b);
                (0..queries).map(|i| order.seen(i, 0, i64::MAX).len() as u64).sum::<u64>()
            };
            (0..batch).map(of).sum::<u64>() * (heads * size) as u64
        });
        let part = QUERIES.max(queries.div_ceil(PARTS));
        let parts = queries.div_ceil(part);
        cx.parallel(batch * lists * parts, |task, _| {
            let (part_of, list, b) = (task % parts, task / parts % lists, task / parts / lists);
            let order = Order::new(&self.seen, [queries, keys], args, b);
            let all = order.all();
            let of_list = list * each..(list + 1) * each;
            // The rows of each head of keys that the list's heads read.
            let groups = of_list.start / group..(of_list.end - 1) / group + 1;
            let mut wide = vec![0.0; groups.len() * all.len() * size];
            for (g, wide) in groups.clone().zip(wide.chunks_exact_mut((all.len() * size).max(1))) {
                let rows = all.iter().map(|&(_, _, j)| b * keys + j as usize);
                widen_head(k, rows, g * size, size, wide);
            }
            let numbers: Vec<u32> = (0..all.len() as u32).collect();
            let (mut scores, mut terms) = (vec![0.0; all.len()], vec![0.0; all.len()]);
            let mut room = vec![0.0; size];
            let mut blocks = vec![];
            for i in part_of * part..((part_of + 1) * part).min(queries) {
                let out = &mut chosen.row_mut(b * queries + i)[list * count..(list + 1) * count];
                out.fill(-1);
                let position = order.query(i);
                if position < 0 {
                    continue;
                }
                let seen = order.range(i, 0, i64::MAX);
                let (scores, terms) = (&mut scores[..seen.len()], &mut terms[..seen.len()]);
                scores.fill(0.0);
                for h in of_list.clone() {
                    let q = T::wide(&q.row(b * queries + i)[h * size..][..size], &mut room);
                    let of_head = &wide[(h / group - groups.start) * all.len() * size..];
                    let most = products(scale, q, of_head, &numbers[seen.clone()], terms);
                    let mut weight = weights.as_ref().map_or(1.0, |w| w.row(b * queries + i)[h]);
                    match self.measure {
                        Measure::Products => {}
                        Measure::Relu => terms.iter_mut().for_each(|x| *x = x.max(0.0)),
                        Measure::Softmax => weight /= exponentials(terms, most),
                    }
                    add_scaled(weight, terms, scores);
                }
                let block = self.block() as i64;
                blocks.clear();
                let number = |&(_, p, _): &(i32, i32, u32)| (i64::from(p) / block) as i32;
                blocks.extend(all[seen].iter().map(number).zip(scores.iter().map(|s| f64::from(*s))));
                let own = (position / block) as i32;
                let found = chosen_of(own, self.near, self.first, count, &blocks);
                out[..found.len()].copy_from_slice(&found);
            }
        });
    }
}
