//! The backward of heads that share queries and keys, as those of Mamba-2 do, without a delta.
//!
//! Little passes from chunk to chunk: a task goes through the chunks of a head forward, for the
//! states, and back, for their cotangents, and decays are those of values instead of keys. All else
//! is of one chunk: a task has the heads of a group one after another, adds their cotangents
//! of queries, keys and scores, and multiplies those of scores once. States and their cotangents
//! stay in shared scratch meanwhile, which holds no cotangents of single heads.

use super::back::Backward;
use super::chunk::{Chunk, Left, Lines, Sizes, take};
use super::decay::Decays;
use super::{Common, Give, Groups, Source, sequence};
use crate::backend::cpu::simd::{add, add_scaled};
use crate::backend::cpu::{Arguments, Context, Stored, View};
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Decay, Delta, Tokens};
use dreamc_compiler::program::kernel::LinearAttentionGrad;

/// The groups of heads whose backward is made together.
pub(super) fn together(shape: &LinearShape) -> Option<Groups> {
    let own = |part: &_| !shape.is_shared(part);
    let groups = Groups::of(shape).filter(|groups| groups.apart)?;
    (shape.parts.get(2).is_some_and(own) && shape.decay.as_ref().is_none_or(own)).then_some(groups)
}

/// Floats of the columns of queries and keys of a chunk, and of all chunks' states and their
/// cotangents.
fn lengths(groups: &Groups, s: &Sizes) -> [usize; 3] {
    let states = s.batch * s.heads * s.chunks() * s.state();
    [groups.tasks(s) * 2 * s.chunk * s.size, states, states]
}

/// Floats of a task of such a backward.
pub(super) fn task_floats(s: &Sizes) -> usize {
    let work = Backward::floats(s) + s.square() + s.rows() + s.wide.max(s.line);
    s.floats() + work.max(s.state() + s.values())
}

/// Floats of all that tasks of a backward share.
pub(super) fn together_floats(shape: &LinearShape, s: &Sizes) -> usize {
    together(shape).map_or(0, |groups| lengths(&groups, s).iter().sum())
}

/// Buffers that tasks share, by the chunks of groups and of heads.
struct Shared<'a> {
    /// Columns of queries, then of keys.
    columns: View<'a, f32>,
    /// The state before each chunk, and the cotangent of that after it.
    states: [View<'a, f32>; 2],
}

impl<'a> Shared<'a> {
    fn new(groups: &Groups, s: &Sizes, mut at: usize, cx: &Context<'a>) -> Self {
        let [columns, states, cotangents] = lengths(groups, s).map(|n| {
            at += n;
            cx.shared().part_of_flat(at - n, n)
        });
        let of_state = |view: View<'a, f32>| view.rows_of(s.state());
        Shared {
            columns: columns.rows_of(2 * s.chunk * s.size),
            states: [of_state(states), of_state(cotangents)],
        }
    }

    /// The left operand of queries, or of keys, for sums over the tokens of a chunk.
    fn columns(&self, s: &Sizes, task: usize, k: usize) -> Lines<'_> {
        Lines::Columns(&self.columns.row(task)[k * s.chunk * s.size..][..s.chunk * s.size], s.size)
    }
}

pub(super) trait Together {
    /// The backward of `groups`.
    fn run_together<T: Stored>(
        &self,
        s: &Sizes,
        how: (Groups, Tokens, Give<T>),
        cx: &Context,
        args: &Arguments,
    );
}

impl Together for LinearAttentionGrad {
    fn run_together<T: Stored>(
        &self,
        s: &Sizes,
        (groups, tokens, give): (Groups, Tokens, Give<T>),
        cx: &Context,
        args: &Arguments,
    ) {
        let shape = (&self.shape, s);
        let shared = Shared::new(&groups, s, groups.tasks(s) * s.square(), cx);
        let columns = |task: usize, chunk: &Chunk| {
            for (k, to) in shared.columns.row_mut(task).chunks_exact_mut(s.chunk * s.size).enumerate() {
                s.keep_columns(chunk.rows[k], s.line, [s.size, chunk.n], to);
            }
        };
        let Some(common) = Common::new::<T>(shape, tokens, 0, cx, args, columns) else { return };
        let source = |at: [usize; 2]| {
            Source::<T>::new(&self.shape, *s, args, sequence(args, tokens, at[0], s.tokens), at)
        };
        cx.parallel(s.batch * s.heads, |task, mut scratch| {
            let at = [task / s.heads, task % s.heads];
            let of = |c: usize, k: usize| shared.columns(s, common.task(at, c), k);
            pass(
                s,
                &source(at),
                of,
                shared.states.map(|all| all.rows_from(task * s.chunks(), s.chunks())),
                args,
                &mut scratch,
            );
        });
        cx.parallel(groups.tasks(s), |task, mut scratch| {
            let (c, of) = (task % s.chunks(), task / s.chunks());
            let (b, group) = (of / groups.heads.len(), of % groups.heads.len());
            let mut work = Work::new(s, &mut scratch);
            let first = groups.heads[group];
            let own = source([b, first]);
            work.begin(&own, c);
            let row = take(&mut scratch, s.wide.max(s.line));
            for h in (first..s.heads).filter(|&h| groups.groups[h] == group) {
                let source = source([b, h]);
                let place = (b * s.heads + h) * s.chunks() + c;
                work.head(
                    &source,
                    c,
                    (common.products.row(task), shared.states.map(|all| all.row(place))),
                    args,
                );
                work.give(&give, &source, h, (c, 2..6), row);
                #[cfg(test)]
                if s.fault == super::chunk::Fault::LostHead {
                    break;
                }
            }
            work.end();
            work.give(&give, &own, first, (c, 0..2), row);
        });
        give.join(cx);
    }
}

/// Goes through the chunks of a head: leaves the state before each, and the cotangent of that after
/// it. `columns` are those of a chunk's queries, and of its keys.
fn pass<'a, T: Stored>(
    s: &Sizes,
    source: &Source<T>,
    columns: impl Fn(usize, usize) -> Lines<'a>,
    [states, cotangents]: [View<f32>; 2],
    args: &Arguments,
    scratch: &mut &mut [f32],
) {
    let mut chunk = Chunk::new(*s, scratch);
    let (state, out) = (take(scratch, s.state()), take(scratch, s.values()));
    let mut step = |c: usize, k: usize, to: &mut [f32], state: &mut [f32]| {
        let first = c * s.chunk;
        source.tokens(first, &mut chunk);
        chunk.decays.prepare(s, chunk.n);
        to.copy_from_slice(state);
        match k {
            0 => source.cotangents(first, &chunk, args.view("do"), out),
            _ => source.values(first, &mut chunk),
        }
        let rows = if k == 0 { &mut *out } else { &mut *chunk.values[0] };
        chunk.decays.scale_values(s, chunk.n, k, rows);
        let steps = s.steps_of_panels(rows, chunk.n, chunk.room);
        chunk.decays.whole(s, state);
        s.multiply_panels((s.size, chunk.n), columns(c, k), steps, state, true);
    };
    state.fill(0.0);
    (0..s.chunks()).for_each(|c| step(c, 1, states.row_mut(c), state));
    state.fill(0.0);
    (0..s.chunks()).rev().for_each(|c| step(c, 0, cotangents.row_mut(c), state));
}

/// A chunk of a group of heads.
struct Work<'s> {
    chunk: Chunk<'s>,
    back: Backward<'s>,
    /// Cotangents of products without decays, of all heads so far.
    products: &'s mut [f32],
    /// Keys as a left operand, where those are rounded.
    keys: &'s mut [f32],
}

impl<'s> Work<'s> {
    fn new(s: &Sizes, scratch: &mut &'s mut [f32]) -> Self {
        let (chunk, back) = (Chunk::new(*s, scratch), Backward::new(s, scratch));
        Work { chunk, back, products: take(scratch, s.square()), keys: take(scratch, s.rows()) }
    }

    /// Brings the queries and keys of a chunk.
    fn begin<T: Stored>(&mut self, source: &Source<T>, c: usize) {
        let s = source.sizes;
        source.tokens(c * s.chunk, &mut self.chunk);
        source.keys(c * s.chunk, &mut self.chunk, true);
        s.rows_of(self.chunk.rows[1], s.line, [self.chunk.n, s.size], self.keys);
        self.back.parts.rows.iter_mut().take(2).for_each(|rows| rows.fill(0.0));
        self.products.fill(0.0);
    }

    /// The backward of a head, whose products, state before the chunk and cotangent of that after
    /// it are given.
    fn head<T: Stored>(
        &mut self,
        source: &Source<T>,
        c: usize,
        (products, [before, state]): (&[f32], [&[f32]; 2]),
        args: &Arguments,
    ) {
        let s = source.sizes;
        let (chunk, back) = (&mut self.chunk, &mut self.back);
        source.tokens(c * s.chunk, chunk);
        source.values(c * s.chunk, chunk);
        source.cotangents(c * s.chunk, chunk, args.view("do"), back.out);
        let (n, d, parts) = (chunk.n, &mut chunk.decays, &mut back.parts);
        d.prepare(&s, n);
        let [_, _, scores, _] = &mut chunk.scores;
        d.scores_of(&s, n, products, Left { rows: &[], before: s.before, to: scores });
        let (packed, room) = (&mut *chunk.packed, &mut *chunk.room);
        let (x, dx) = (&*chunk.values[0], &mut *back.values[0]);
        let [of_out, _, of_state] = &mut back.steps;
        let keys = if s.rounds { s.kept_rows(self.keys, s.size) } else { Lines::Rows(chunk.rows[1], s.line) };
        s.multiply_panels((n, s.size), keys, s.steps_of_panels(state, s.size, of_state), dx, false);
        d.scale_values(&s, n, 1, dx);
        let of_out = s.steps_of_panels(back.out, n, of_out);
        s.multiply_lower_panels(n, s.columns_of(scores, s.stride, [n, n], room), of_out, dx, true);
        let [lines, others] = &mut back.lines;
        let (out, x) = (s.rows_of_panels(back.out, n, lines), s.rows_of_panels(x, n, others));
        s.turn(x, [n, s.wide], packed);
        let [_, _, of_scores, _] = &mut parts.scores;
        s.multiply_below([n, s.wide], out, packed, of_scores);
        for (k, left, state) in [(0, out, before), (1, x, state)] {
            s.turn(s.rows_of_panels(state, s.size, room), [s.size, s.wide], packed);
            s.multiply((n, s.size, s.wide), left, packed, parts.decayed[k], s.line, false);
            for i in 0..n {
                let range = i * s.line..i * s.line + s.size;
                let (from, to) = (&parts.decayed[k][range.clone()], &mut parts.rows[k][range]);
                add_scaled(d.of_row(&s, n, k, i), from, to);
            }
        }
        if s.decay != Decay::None {
            Decays::flow(&s, before, state, parts.flow);
            let rows = chunk.rows.each_ref().map(|x| &**x);
            d.back_factors(&s, n, (rows, chunk.scores.each_ref().map(|x| &**x)), parts);
        }
        d.weigh(&s, n, parts.scores[2], s.before);
        for (i, to) in self.products.chunks_mut(s.stride).enumerate().take(n) {
            add(&parts.scores[2][i * s.stride..][..i + 1], &mut to[..i + 1]);
        }
    }

    /// Adds what products without decays give to queries and keys.
    fn end(&mut self) {
        let (s, n) = (self.chunk.sizes, self.chunk.n);
        debug_assert_eq!(s.delta, Delta::None);
        let (packed, room) = (&mut *self.chunk.packed, &mut *self.chunk.room);
        let [q, k, ..] = &self.chunk.rows;
        let [dq, dk, ..] = &mut self.back.parts.rows;
        s.pack_steps(k, s.line, [s.size, n], packed);
        let lines = s.rows_of(self.products, s.stride, [n, n], room);
        s.multiply_lower((n, s.size), lines, packed, dq, s.line, true);
        s.pack_steps(q, s.line, [s.size, n], packed);
        let lines = s.columns_of(self.products, s.stride, [n, n], room);
        s.multiply_lower((n, s.size), lines, packed, dk, s.line, true);
    }

    /// Stores cotangents of a head.
    fn give<T: Stored>(
        &self,
        give: &Give<T>,
        source: &Source<T>,
        head: usize,
        (c, kinds): (usize, std::ops::Range<usize>),
        row: &mut [f32],
    ) {
        let firsts = give.firsts(head);
        for i in 0..self.chunk.n {
            let token = source.token(c * self.chunk.sizes.chunk + i);
            let takes = (self.chunk.takes[i], kinds.clone());
            give.token(token, (head, &firsts), [i, self.chunk.n], takes, &self.back, row);
        }
    }
}
