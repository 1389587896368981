//! Linear attention: chunks of tokens as products, a token alone as the step that it is.
//!
//! A task has one head of one sequence and goes through its chunks in order ([`chunk`]). In the
//! backward it goes forward once more, keeps the state before each chunk and what enters it, and
//! then goes back ([`back`]). Where several heads read an operand, each head stores its own
//! cotangent in scratch, and they are added in the order of heads; where they read the same queries
//! and keys and there is no delta, a task has a chunk of all of them ([`group`]). States and sums
//! are f32; where operands are bf16, so is what products read ([`operand`]).

mod back;
mod chunk;
mod decay;
mod group;
mod operand;
mod step;
#[cfg(test)]
mod tests;

use super::Run;
use crate::backend::cpu::simd::{add, exp, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use back::Backward;
use chunk::{CHUNK, Chunk, Sizes, take, widen};
use dreamc_compiler::op::linear_attention::Part;
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Decay, Sequence, Tokens};
use dreamc_compiler::program::KernelKind;
use dreamc_compiler::program::kernel::{LinearAttention, LinearAttentionGrad};
use group::{Together, task_floats, together, together_floats};
use std::ops::Range;
use step::Token;

/// Tokens of a text up to which it takes them one by one.
const FEW: usize = 4;

kernel_fn! {
    fn exponentials(x: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = exp::<FMA>(*x));
    }
}

/// Operands of a kernel, one head of one sequence.
struct Source<'a, T> {
    sizes: Sizes,
    /// `q`, `k`, `v`, `u`, `w`, and where the head begins in their rows.
    parts: [Option<(View<'a, T>, usize)>; 5],
    decay: Option<(View<'a, f32>, usize)>,
    sequence: Sequence<'a>,
    /// Its number, and that of the head.
    at: [usize; 2],
}

impl<'a, T: Stored> Source<'a, T> {
    fn new(
        s: &LinearShape,
        sizes: Sizes,
        args: &Arguments<'a>,
        sequence: Sequence<'a>,
        at: [usize; 2],
    ) -> Self {
        let names = ["q", "k", "v", "u", "w"];
        let part = |k: usize| s.parts.get(k).map(|part| (args.view(names[k]), part.first(&s.heads, at[1])));
        let decay = s.decay.as_ref().map(|part| (args.floats("decay"), part.first(&s.heads, at[1])));
        Source { sizes, parts: std::array::from_fn(part), decay, sequence, at }
    }

    fn token(&self, i: usize) -> usize {
        self.at[0] * self.sizes.tokens + i
    }

    /// Operand `k` at a token.
    fn row(&self, k: usize, i: usize, width: usize) -> Option<&'a [T]> {
        let (view, first) = self.parts[k]?;
        Some(&view.row(self.token(i))[first..first + width])
    }

    /// The same as f32, in `room` where it is not; nothing where it is absent.
    fn wide<'r>(&self, k: usize, i: usize, width: usize, room: &'r mut [f32]) -> &'r [f32]
    where
        'a: 'r,
    {
        self.row(k, i, width).map_or(&[], |row| T::wide(row, room))
    }

    /// Brings the cotangents of outputs of a chunk into panels.
    fn cotangents(&self, first: usize, chunk: &Chunk, from: View<T>, to: &mut [f32]) {
        let s = &self.sizes;
        for i in 0..chunk.n {
            let row = &from.row(self.token(first + i))[self.at[1] * s.value..][..s.value];
            into_panels(s, chunk.n, i, if chunk.takes[i] { row } else { &[] }, to);
        }
    }

    /// The factors of a token: one, or one of each channel.
    fn factors(&self, i: usize, to: &mut [f32]) {
        match self.decay {
            None => to.fill(1.0),
            Some((view, first)) => exponentials(&view.row(self.token(i))[first..first + to.len()], to),
        }
    }

    /// Whether a token that takes part is the first of its document, but not of the sequence.
    fn begins(&self, i: usize) -> bool {
        let before = (0..i).rev().find(|&j| self.sequence.takes_part(j));
        before.is_some_and(|before| !self.sequence.continues(before, i))
    }

    /// The fault of a test.
    #[cfg(test)]
    fn mistake(&self, token: usize, i: usize, chunk: &mut Chunk) {
        let s = self.sizes;
        let factors = chunk.decays.factor_mut(&s, i);
        match s.fault {
            chunk::Fault::None
            | chunk::Fault::LostState
            | chunk::Fault::OpenTriangle
            | chunk::Fault::OtherHead
            | chunk::Fault::LostHead => {}
            chunk::Fault::LateDecay => {
                let key = chunk.rows[1][i * s.line..][..s.size].iter_mut().enumerate();
                key.for_each(|(c, k)| *k *= factors[if factors.len() == 1 { 0 } else { c }]);
            }
            chunk::Fault::OpenDocument => {
                if chunk.takes[i] {
                    self.factors(token, factors);
                }
                chunk.decays.begins[i] = false;
            }
        }
    }

    /// Brings the tokens of a chunk that begins at a token, with their decays.
    fn tokens(&self, first: usize, chunk: &mut Chunk) {
        let s = self.sizes;
        chunk.n = s.chunk.min(s.tokens - first);
        let one = s.decays() == 1;
        let mut logs = [0.0; CHUNK];
        for (i, log) in logs.iter_mut().enumerate().take(chunk.n) {
            let takes = self.sequence.takes_part(first + i);
            let begins = takes && self.begins(first + i);
            (chunk.takes[i], chunk.decays.begins[i]) = (takes, begins);
            let factors = chunk.decays.factor_mut(&s, i);
            match (takes, begins, self.decay) {
                (false, ..) => factors.fill(1.0),
                (true, true, _) if !one => factors.fill(0.0),
                (true, true, _) => *log = f32::NEG_INFINITY,
                (true, false, Some((view, at))) if one => *log = view.row(self.token(first + i))[at],
                (true, false, _) => self.factors(first + i, factors),
            }
        }
        if one {
            // One call for all of them: each is a number.
            exponentials(&logs[..chunk.n], &mut chunk.decays.factors[..chunk.n]);
        }
    }

    /// Brings the rows of keys of its tokens, and of queries where outputs are wanted.
    fn keys(&self, first: usize, chunk: &mut Chunk, queries: bool) {
        let s = self.sizes;
        for (to, k) in chunk.rows.iter_mut().zip([0, 1, 3, 4]).skip(usize::from(!queries)) {
            for i in 0..chunk.n {
                let Some(row) = self.row(k, first + i, s.size) else { break };
                let to = &mut to[i * s.line..][..s.size];
                if chunk.takes[i] { widen(row, to) } else { to.fill(0.0) }
            }
        }
    }

    /// Brings the values of its tokens.
    fn values(&self, first: usize, chunk: &mut Chunk) {
        let s = self.sizes;
        for i in 0..chunk.n {
            let row = self.row(2, first + i, s.value).filter(|_| chunk.takes[i]);
            into_panels(&s, chunk.n, i, row.unwrap_or(&[]), chunk.values[0]);
        }
    }

    /// Brings all of a chunk that begins at a token, queries where outputs are wanted.
    fn load(&self, first: usize, chunk: &mut Chunk, queries: bool) {
        self.tokens(first, chunk);
        self.keys(first, chunk, queries);
        self.values(first, chunk);
        #[cfg(test)]
        (0..chunk.n).for_each(|i| self.mistake(first + i, i, chunk));
    }
}

/// A row of values into panels of `n` rows; zeros follow it.
fn into_panels<T: Stored>(s: &Sizes, n: usize, i: usize, mut row: &[T], to: &mut [f32]) {
    for to in to.chunks_exact_mut(n * s.panel).take(s.wide / s.panel) {
        let (own, rest) = row.split_at(s.panel.min(row.len()));
        let (to, zeros) = to[i * s.panel..][..s.panel].split_at_mut(own.len());
        widen(own, to);
        zeros.fill(0.0);
        row = rest;
    }
}

/// A row of values from panels of `n` rows.
fn from_panels(s: &Sizes, n: usize, i: usize, from: &[f32], row: &mut [f32]) {
    for (row, from) in row.chunks_mut(s.panel).zip(from.chunks_exact(n * s.panel)) {
        row.copy_from_slice(&from[i * s.panel..][..row.len()]);
    }
}

/// The sequences of a kernel: by segments, by slots, or all tokens.
fn sequence<'a>(args: &Arguments<'a>, tokens: Tokens, b: usize, n: usize) -> Sequence<'a> {
    match tokens {
        Tokens::All => Sequence::default(),
        Tokens::Segments => Sequence::of_segments(Some(args.ints("segments").rows_of(n).row(b))),
        Tokens::Kept => Sequence::of_slots(args.ints("slots").rows_of(n).row(b)),
    }
}

/// Heads whose queries and keys are the same.
struct Groups {
    /// The first head of each.
    heads: Vec<usize>,
    /// The group of each head.
    groups: Vec<usize>,
    /// Whether no two groups share queries or keys.
    apart: bool,
}

impl Groups {
    /// Nothing where no two heads have the same or where their products have other uses.
    fn of(shape: &LinearShape) -> Option<Self> {
        let [q, k, _] = &shape.parts[..] else { return None };
        if !(shape.is_shared(q) && shape.is_shared(k)) || shape.decay_kind() == Decay::Channel {
            return None;
        }
        let (mut heads, mut groups) = (vec![], vec![]);
        let place = |h: usize| [q, k].map(|part| part.first(&shape.heads, h));
        for h in 0..shape.head_count() as usize {
            let group = heads.iter().position(|&first| place(first) == place(h));
            groups.push(group.unwrap_or(heads.len()));
            if group.is_none() {
                heads.push(h);
            }
        }
        let of = |part: &Part| {
            let mut places: Vec<usize> = heads.iter().map(|h| part.first(&shape.heads, *h)).collect();
            places.sort_unstable();
            places.dedup();
            places.len()
        };
        let apart = of(q) == heads.len() && of(k) == heads.len();
        (heads.len() < groups.len()).then_some(Groups { heads, groups, apart })
    }

    /// Tasks that each make what a group has of a chunk.
    fn tasks(&self, s: &Sizes) -> usize {
        s.batch * self.heads.len() * s.chunks()
    }
}

/// Products of queries and keys that several heads have, made once for each chunk.
struct Common<'a> {
    groups: Groups,
    chunks: usize,
    products: View<'a, f32>,
}

/// Floats of all products of [`Common`].
fn common_floats(shape: &LinearShape, s: &Sizes) -> usize {
    Groups::of(shape).map_or(0, |groups| groups.tasks(s) * s.square())
}

impl<'a> Common<'a> {
    /// Makes them, in shared floats from a place on. `more` is called with each chunk, whose keys
    /// have been brought, and the number of its task.
    fn new<T: Stored>(
        (shape, s): (&LinearShape, &Sizes),
        tokens: Tokens,
        at: usize,
        cx: &Context<'a>,
        args: &Arguments<'a>,
        more: impl Fn(usize, &Chunk) + Sync,
    ) -> Option<Self> {
        let groups = Groups::of(shape)?;
        let (tasks, heads) = (groups.tasks(s), &groups.heads);
        let products = cx.shared().part_of_flat(at, tasks * s.square()).rows_of(s.square());
        cx.parallel(tasks, |task, mut scratch| {
            let (c, of) = (task % s.chunks(), task / s.chunks());
            let place = [of / heads.len(), heads[of % heads.len()]];
            let sequence = sequence(args, tokens, place[0], s.tokens);
            let source = Source::<T>::new(shape, *s, args, sequence, place);
            let mut chunk = Chunk::new(*s, &mut scratch);
            source.load(c * s.chunk, &mut chunk, true);
            chunk.products(products.row_mut(task));
            more(task, &chunk);
        });
        #[cfg(test)]
        let groups = match s.fault {
            chunk::Fault::OtherHead => Groups { groups: vec![0; groups.groups.len()], ..groups },
            _ => groups,
        };
        Some(Common { groups, chunks: s.chunks(), products })
    }

    /// The number of the task of a head's chunk.
    fn task(&self, [b, h]: [usize; 2], chunk: usize) -> usize {
        (b * self.groups.heads.len() + self.groups.groups[h]) * self.chunks + chunk
    }

    fn of(&self, at: [usize; 2], chunk: usize) -> &[f32] {
        self.products.row(self.task(at, chunk))
    }
}

impl Run for LinearAttention {
    fn scratch(&self) -> Scratch {
        let s = Sizes::new(&self.shape, self.delta, self.before);
        let alone = 5 * s.line + 5 * s.wide;
        Scratch {
            local: (s.floats() + s.state() + s.values() + s.wide).max(alone),
            shared: common_floats(&self.shape, &s),
        }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sizes::new(&self.shape, self.delta, self.before).storing::<T>();
        cx.count(|| self.work().fixed.multiply_adds as u64);
        if self.tokens == Tokens::Kept && s.tokens <= FEW {
            self.steps::<T>(&s, cx, args);
        } else {
            self.chunks::<T>(&s, cx, args);
        }
        if self.tokens == Tokens::Kept {
            // After all tasks, which read it.
            for b in 0..s.batch {
                let sequence = sequence(args, self.tokens, b, s.tokens);
                let taken = (0..s.tokens).filter(|&i| sequence.takes_part(i)).count();
                args.floats("state").part_mut(b * self.kept() as usize, 1)[0] += taken as f32;
            }
        }
    }
}

trait Forward {
    fn chunks<T: Stored>(&self, s: &Sizes, cx: &Context, args: &Arguments);
    fn steps<T: Stored>(&self, s: &Sizes, cx: &Context, args: &Arguments);
    fn own<'a>(&self, s: &Sizes, args: &Arguments<'a>, at: [usize; 2]) -> (bool, &'a mut [f32]);
}

impl Forward for LinearAttention {
    /// Whether the text of a state has begun, and a head's part of it.
    fn own<'a>(&self, s: &Sizes, args: &Arguments<'a>, [b, h]: [usize; 2]) -> (bool, &'a mut [f32]) {
        let (state, first, each) = (args.floats("state"), b * self.kept() as usize, s.size * s.value);
        (state.part(first, 1)[0] > 0.0, state.part_mut(first + 1 + h * each, each))
    }

    fn chunks<T: Stored>(&self, s: &Sizes, cx: &Context, args: &Arguments) {
        let o = args.view::<T>("o").rows_of(s.value);
        let common = Common::new::<T>((&self.shape, s), self.tokens, 0, cx, args, |_, _| {});
        cx.parallel(s.batch * s.heads, |task, mut scratch| {
            let at = [task / s.heads, task % s.heads];
            let sequence = sequence(args, self.tokens, at[0], s.tokens);
            let source = Source::<T>::new(&self.shape, *s, args, sequence, at);
            let mut chunk = Chunk::new(*s, &mut scratch);
            let (state, out) = (take(&mut scratch, s.state()), take(&mut scratch, s.values()));
            let row = &mut take(&mut scratch, s.wide)[..s.value];
            state.fill(0.0);
            let kept = (self.tokens == Tokens::Kept).then(|| self.own(s, args, at));
            let place = |c: usize, i: usize| if self.size_first { c * s.value + i } else { i * s.size + c };
            let panel = |c: usize, i: usize| i / s.panel * s.size * s.panel + c * s.panel + i % s.panel;
            let places = || (0..s.size).flat_map(|c| (0..s.value).map(move |i| (c, i)));
            if let Some((true, own)) = &kept {
                places().for_each(|(c, i)| state[panel(c, i)] = own[place(c, i)]);
            }
            for first in (0..s.tokens).step_by(s.chunk) {
                source.load(first, &mut chunk, true);
                #[cfg(test)]
                if s.fault == chunk::Fault::LostState {
                    state.fill(0.0);
                }
                chunk.prepare(true, common.as_ref().map(|common| common.of(at, first / s.chunk)));
                chunk.enter(state, true);
                chunk.read(state, out);
                chunk.leave(state);
                for i in 0..chunk.n {
                    from_panels(s, chunk.n, i, out, row);
                    if !chunk.takes[i] {
                        row.fill(0.0);
                    }
                    T::store(row, o.row_mut(source.token(first + i) * s.heads + at[1]));
                }
            }
            if let Some((_, own)) = kept
                && (0..s.tokens).any(|i| sequence.takes_part(i))
            {
                places().for_each(|(c, i)| own[place(c, i)] = state[panel(c, i)]);
            }
        });
    }

    /// A task takes a head of a text.
    fn steps<T: Stored>(&self, s: &Sizes, cx: &Context, args: &Arguments) {
        let o = args.view::<T>("o").rows_of(s.value);
        cx.parallel(s.batch * s.heads, |task, mut scratch| {
            let at = [task / s.heads, task % s.heads];
            let source =
                Source::<T>::new(&self.shape, *s, args, sequence(args, self.tokens, at[0], s.tokens), at);
            let [row_q, row_k, row_u, row_w] = [(); 4].map(|()| &mut take(&mut scratch, s.line)[..s.size]);
            let decay = &mut take(&mut scratch, s.line)[..if s.decays() == 1 { 1 } else { s.size }];
            let [row_v, out, x, p] = [(); 4].map(|()| &mut take(&mut scratch, s.wide)[..s.value]);
            let (mut begun, state) = self.own(s, args, at);
            for i in 0..s.tokens {
                out.fill(0.0);
                if source.sequence.takes_part(i) {
                    if !begun {
                        state.fill(0.0);
                    }
                    begun = true;
                    source.factors(i, decay);
                    let q = source.wide(0, i, s.size, row_q);
                    let k = source.wide(1, i, s.size, row_k);
                    let u = source.wide(3, i, s.size, row_u);
                    let w = source.wide(4, i, s.size, row_w);
                    let v = source.wide(2, i, s.value, row_v);
                    let token = Token { q, k, u, w, decay, v, before: s.before };
                    match self.size_first {
                        false => step::by_values(&token, state, out),
                        true => step::by_keys(&token, state, out, x, p),
                    }
                }
                T::store(out, o.row_mut(source.token(i) * s.heads + at[1]));
            }
        });
    }
}

/// Floats of a head's way forward and back besides buffers of chunks: its states and what enters
/// them, and a row.
fn kept_floats(s: &Sizes) -> [usize; 3] {
    let values = if s.with_u() { s.chunks() * s.values() } else { 0 };
    [(s.chunks() + 1) * s.state(), values, s.wide.max(s.line)]
}

impl Run for LinearAttentionGrad {
    fn scratch(&self) -> Scratch {
        let s = Sizes::new(&self.shape, self.delta, self.before);
        let row = self.operands().map(|(_, _, part)| part.row as usize).max().unwrap_or(0);
        let local = match together(&self.shape) {
            Some(_) => task_floats(&s),
            None => s.floats() + Backward::floats(&s) + kept_floats(&s).iter().sum::<usize>(),
        };
        let local = local.max(row);
        let together = together_floats(&self.shape, &s);
        Scratch { local, shared: self.beside(&s) + common_floats(&self.shape, &s) + together }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sizes::new(&self.shape, self.delta, self.before).storing::<T>();
        cx.count(|| self.work().fixed.multiply_adds as u64);
        let give = Give::<T>::new(self, &s, cx, args);
        let tokens = if self.segments { Tokens::Segments } else { Tokens::All };
        if let Some(groups) = together(&self.shape) {
            self.run_together(&s, (groups, tokens, give), cx, args);
            return;
        }
        let at = self.beside(&s);
        let common = Common::new::<T>((&self.shape, &s), tokens, at, cx, args, |_, _| {});
        cx.parallel(s.batch * s.heads, |task, mut scratch| {
            let at = [task / s.heads, task % s.heads];
            let sequence = sequence(args, tokens, at[0], s.tokens);
            let source = Source::<T>::new(&self.shape, s, args, sequence, at);
            let mut chunk = Chunk::new(s, &mut scratch);
            let mut back = Backward::new(&s, &mut scratch);
            let [states, values, row] = kept_floats(&s).map(|n| take(&mut scratch, n));
            let firsts = give.firsts(at[1]);
            let (entered, each) = (usize::from(s.with_w()), s.values());
            states[..s.state()].fill(0.0);
            for c in 0..s.chunks() {
                source.load(c * s.chunk, &mut chunk, false);
                chunk.prepare(false, None);
                let (before, behind) = states[c * s.state()..][..2 * s.state()].split_at_mut(s.state());
                chunk.enter(before, false);
                if s.with_u() {
                    values[c * each..][..each].copy_from_slice(chunk.values[entered]);
                }
                behind.copy_from_slice(before);
                chunk.leave(behind);
            }
            back.state.fill(0.0);
            for c in (0..s.chunks()).rev() {
                source.load(c * s.chunk, &mut chunk, true);
                chunk.prepare(true, common.as_ref().map(|common| common.of(at, c)));
                if s.with_u() {
                    chunk.values[entered].copy_from_slice(&values[c * each..][..each]);
                }
                source.cotangents(c * s.chunk, &chunk, args.view("do"), back.out);
                let (before, behind) = states[c * s.state()..][..2 * s.state()].split_at(s.state());
                back.run(&mut chunk, before, behind);
                for i in 0..chunk.n {
                    let token = source.token(c * s.chunk + i);
                    let takes = (chunk.takes[i], 0..6);
                    give.token(token, (at[1], &firsts), [i, chunk.n], takes, &back, row);
                }
            }
        });
        give.join(cx);
    }
}

trait Shared {
    /// For each operand, decay last, the floats that a head leaves of its cotangent, where several
    /// read it, and where they begin among those of all heads.
    fn shared(&self) -> [Option<(usize, usize)>; 6];
    /// Floats of all of them.
    fn beside(&self, s: &Sizes) -> usize;
}

impl Shared for LinearAttentionGrad {
    fn beside(&self, s: &Sizes) -> usize {
        self.shared().iter().flatten().map(|(_, width)| width * s.batch * s.tokens * s.heads).sum()
    }

    fn shared(&self) -> [Option<(usize, usize)>; 6] {
        let s = &self.shape;
        let all = (s.batch * s.tokens * s.head_count()) as usize;
        let mut at = 0;
        let keys = together(s).is_some();
        std::array::from_fn(|k| {
            let part = if k == 5 { s.decay.as_ref() } else { s.parts.get(k) };
            part.filter(|part| s.is_shared(part) && !(keys && k < 2)).map(|part| {
                let first = at;
                at += all * part.width as usize;
                (first, part.width as usize)
            })
        })
    }
}

/// Where cotangents go.
struct Give<'a, T> {
    sizes: Sizes,
    shape: &'a LinearShape,
    /// Of `q`, `k`, `v`, `u`, `w`.
    to: [Option<View<'a, T>>; 5],
    decay: Option<View<'a, f32>>,
    /// Of heads that share an operand, a row of each token and head.
    beside: [Option<View<'a, f32>>; 6],
}

impl<'a, T: Stored> Give<'a, T> {
    fn new(kernel: &'a LinearAttentionGrad, s: &Sizes, cx: &Context<'a>, args: &Arguments<'a>) -> Self {
        let shape = &kernel.shape;
        let names = ["dq", "dk", "dv", "du", "dw"];
        let to = |k: usize| shape.parts.get(k).map(|part| args.view(names[k]).rows_of(part.row as usize));
        let decay = shape.decay.as_ref().map(|part| args.floats("ddecay").rows_of(part.row as usize));
        let beside = kernel.shared().map(|place| {
            let (first, width) = place?;
            let rows = s.batch * s.tokens * s.heads;
            Some(cx.shared().part_of_flat(first, rows * width).rows_of(width))
        });
        Give { sizes: *s, shape, to: std::array::from_fn(to), decay, beside }
    }

    /// Where a head begins in the rows of each operand, decay last.
    fn firsts(&self, head: usize) -> [usize; 6] {
        std::array::from_fn(|k| {
            let part = if k == 5 { self.shape.decay.as_ref() } else { self.shape.parts.get(k) };
            part.map_or(0, |part| part.first(&self.shape.heads, head))
        })
    }

    /// Stores the cotangents of token `i` of a chunk of `n`, those of `kinds` among `q`, `k`, `v`,
    /// `u`, `w` and the decay.
    fn token(
        &self,
        token: usize,
        (head, firsts): (usize, &[usize; 6]),
        [i, n]: [usize; 2],
        (takes, kinds): (bool, Range<usize>),
        back: &Backward,
        row: &mut [f32],
    ) {
        let s = &self.sizes;
        for k in kinds.clone() {
            let of = [Some(0), Some(1), None, Some(2), Some(3), None][k];
            let to = self.to.get(k).copied().flatten();
            let (Some(to), Some(part)) = (to, self.shape.parts.get(k)) else { continue };
            let width = part.width as usize;
            let room = &mut row[..width];
            let from = match of {
                Some(of) if takes => &back.parts.rows[of][i * s.line..][..width],
                _ => {
                    if takes {
                        from_panels(s, n, i, back.values[0], room)
                    } else {
                        room.fill(0.0)
                    }
                    room
                }
            };
            match self.beside[k] {
                Some(beside) => beside.row_mut(token * s.heads + head).copy_from_slice(from),
                None => {
                    let first = token * part.row as usize + firsts[k];
                    T::store(from, to.part_of_flat(first, width).all_mut());
                }
            }
        }
        let decay = self.decay.filter(|_| kinds.contains(&5));
        let (Some(to), Some(part)) = (decay, &self.shape.decay) else { return };
        let width = part.width as usize;
        let from = &back.parts.decay[i * s.decays()..][..width];
        let to = match self.beside[5] {
            Some(beside) => beside.row_mut(token * s.heads + head),
            None => to.part_of_flat(token * part.row as usize + firsts[5], width).all_mut(),
        };
        if takes { to.copy_from_slice(from) } else { to.fill(0.0) }
    }

    /// Adds the cotangents that heads stored in scratch.
    fn join(&self, cx: &Context) {
        let s = &self.sizes;
        let (parts, heads) = (&self.shape.parts, &self.shape.heads);
        for (k, beside) in self.beside.iter().enumerate() {
            let part = if k == 5 { self.shape.decay.as_ref() } else { parts.get(k) };
            let (Some(beside), Some(part)) = (beside, part) else { continue };
            let (row, width) = (part.row as usize, part.width as usize);
            cx.pieces(s.batch * s.tokens, s.heads * width, |tokens, scratch| {
                let sum = &mut scratch[..row];
                for token in tokens {
                    sum.fill(0.0);
                    for h in 0..s.heads {
                        add(beside.row(token * s.heads + h), &mut sum[part.first(heads, h)..][..width]);
                    }
                    match (k, self.to.get(k).copied().flatten(), self.decay) {
                        (5, _, Some(to)) => to.row_mut(token).copy_from_slice(sum),
                        (_, Some(to), _) => T::store(sum, to.row_mut(token)),
                        _ => {}
                    }
                }
            });
        }
    }
}
