//! Slots sorted by expert, and as many of each as fill tiles.

use super::grouped::offsets_fit;
use super::{Run, sizes};
use crate::backend::cpu::{Arguments, Context, Stored};
use dreamc_compiler::program::kernel::{Group, RoundGroups};
use std::cmp::Ordering::Equal;

impl Run for Group {
    /// A stable counting sort. On one thread: it reads each choice twice and is done.
    fn run<T: Stored>(&self, _: &Context, args: &Arguments) {
        let [slots, experts] = sizes([self.slots, self.experts]);
        let chosen = args.ints("chosen").all();
        let [order, offsets, inverse] = ["order", "offsets", "inverse"].map(|name| args.ints(name).all_mut());
        // No-ops are one more group, after the others. `offsets[e + 1]` counts group `e`, then
        // says where its next slot goes, and so ends up where group `e + 1` begins: no further
        // array is needed.
        offsets.fill(0);
        let group_of = |c: i32| (c as u32 as usize).min(experts);
        for &c in chosen {
            if group_of(c) < experts {
                offsets[group_of(c) + 1] += 1;
            }
        }
        let mut start = 0;
        for offset in &mut offsets[1..] {
            let count = *offset;
            *offset = start;
            start += count;
        }
        let mut last = start;
        for (slot, &c) in chosen.iter().enumerate().take(slots) {
            let next = match group_of(c) {
                e if e < experts => &mut offsets[e + 1],
                _ => &mut last,
            };
            order[*next as usize] = slot as i32;
            inverse[slot] = *next;
            *next += 1;
        }
    }
}

impl Run for RoundGroups {
    /// Each group is sorted by score, the best first. On one thread, as the sort by expert.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let [experts, k, spare, tile] = sizes([self.experts, self.k, self.spare, self.tile]);
        let score = args.floats("score").all();
        let [chosen, order, offsets] = ["chosen", "order", "offsets"].map(|name| args.ints(name).all());
        let kept = args.ints("kept").all_mut();
        if !offsets_fit(cx, offsets, order.len()) || !cx.indices_below(order, kept.len()) {
            return;
        }
        kept.copy_from_slice(chosen);
        let worth = |&slot: &i32| match score[slot as usize] {
            x if x.is_nan() => f32::NEG_INFINITY,
            x => x,
        };
        for bounds in offsets.windows(2).take(experts) {
            let of = &order[bounds[0] as usize..bounds[1] as usize];
            let (mut own, mut others): (Vec<i32>, Vec<i32>) =
                of.iter().partition(|&&slot| slot as usize % k + spare < k);
            for slots in [&mut own, &mut others] {
                slots.sort_by(|a, b| worth(b).partial_cmp(&worth(a)).unwrap_or(Equal).then(a.cmp(b)));
            }
            let over = own.len() % tile;
            let missing = tile - over;
            let filled = over > 0 && missing <= over && missing <= others.len();
            let (of_own, of_others) = if filled { (own.len(), missing) } else { (own.len() - over, 0) };
            for &slot in own[of_own..].iter().chain(&others[of_others..]) {
                kept[slot as usize] = self.none as i32;
            }
        }
    }
}
