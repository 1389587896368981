//! The best of each row.

use super::{Run, sizes};
use crate::backend::cpu::simd::{kernel_fn, largest};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored};
use dreamc_compiler::program::kernel::Route;

/// Choices up to which the best are looked for one after another; beyond, the row is sorted.
const SHORT: usize = 16;

impl Run for Route {
    fn scratch(&self) -> Scratch {
        let [experts, k] = sizes([self.experts, self.k]);
        Scratch::local(if k > SHORT { 2 * experts } else { room_of_few(experts) })
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [rows, experts, k] = sizes([self.rows, self.experts, self.k]);
        let (z, chosen) = (args.floats("z").rows_of(experts), args.ints("chosen").rows_of(k));
        // A score is looked at several times.
        cx.pieces(rows, 8 * experts, |range, scratch| {
            for row in range {
                if experts <= GROUP {
                    best_of_group(z.row(row), chosen.row_mut(row));
                } else if k > SHORT {
                    best_of_many(z.row(row), chosen.row_mut(row), scratch);
                } else {
                    best_of_few(z.row(row), chosen.row_mut(row), &mut scratch[..room_of_few(experts)]);
                }
            }
        });
    }
}

fn room_of_few(experts: usize) -> usize {
    experts.next_multiple_of(GROUP) + experts.div_ceil(GROUP)
}

/// NaN is never worth choosing.
#[inline(always)]
fn worth(z: f32) -> f32 {
    if z.is_nan() { f32::NEG_INFINITY } else { z }
}

/// Scores whose largest is known together.
const GROUP: usize = 16;

kernel_fn! {
    /// The best of at most [`GROUP`]: a score's rank is the number of scores that come before it.
    fn best_of_group(z: &[f32], chosen: &mut [i32]) {
        let mut scores = [f32::NEG_INFINITY; GROUP];
        for (score, z) in scores.iter_mut().zip(z) {
            *score = worth(*z);
        }
        let mut ranks = [0; GROUP];
        for (i, score) in scores[..z.len()].iter().enumerate() {
            for (j, (rank, other)) in ranks.iter_mut().zip(&scores).enumerate() {
                *rank += (*score > *other || *score == *other && i < j) as i32;
            }
        }
        for (i, rank) in ranks[..z.len()].iter().enumerate() {
            if let Some(chosen) = chosen.get_mut(*rank as usize) {
                *chosen = i as i32;
            }
        }
    }

    /// The best of a row, by the largest of each group of its scores: `left` is room for the
    /// scores, a multiple of [`GROUP`], and for the largest of each group.
    fn best_of_few(z: &[f32], chosen: &mut [i32], left: &mut [f32]) {
        let (left, most) = left.split_at_mut(z.len().next_multiple_of(GROUP));
        left[z.len()..].fill(f32::NEG_INFINITY);
        for (left, z) in left.iter_mut().zip(z) {
            *left = worth(*z);
        }
        for (most, group) in most.iter_mut().zip(left.chunks_exact(GROUP)) {
            *most = largest::<FMA>(group);
        }
        for i in 0..chosen.len() {
            let (mut at, mut high) = (0, f32::NEG_INFINITY);
            for (g, most) in most.iter().enumerate() {
                // Of equal ones the first.
                if *most > high {
                    (at, high) = (g, *most);
                }
            }
            if high == f32::NEG_INFINITY {
                // Nothing is left that is worth choosing: the first of the others.
                let (before, rest) = chosen.split_at_mut(i);
                let others = (0..z.len() as i32).filter(|e| !before.contains(e));
                rest.iter_mut().zip(others).for_each(|(c, e)| *c = e);
                return;
            }
            let group = &mut left[at * GROUP..][..GROUP];
            let place = group.iter().position(|z| *z == high).unwrap_or(0);
            group[place] = f32::NEG_INFINITY;
            most[at] = largest::<FMA>(group);
            chosen[i] = (at * GROUP + place) as i32;
        }
    }
}

pub(super) fn best_of_many(z: &[f32], chosen: &mut [i32], scratch: &mut [f32]) {
    let keys: &mut [u64] = bytemuck::cast_slice_mut(&mut scratch[..2 * z.len()]);
    for (i, (key, z)) in keys.iter_mut().zip(z).enumerate() {
        // Bits of floats in the order of their values, negated to put the largest first; zeros are
        // one.
        let bits = (worth(*z) + 0.0).to_bits();
        let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        *key = (!ordered as u64) << 32 | i as u64;
    }
    if chosen.len() < keys.len() {
        keys.select_nth_unstable(chosen.len());
    }
    let keys = &mut keys[..chosen.len()];
    keys.sort_unstable();
    for (chosen, key) in chosen.iter_mut().zip(keys) {
        *chosen = *key as u32 as i32;
    }
}
