//! Recurrences: the loops of a step for each token.
//!
//! A task has a sequence and one element of each dimension that the step does not join, a head
//! mostly, and a workspace in its scratch. Backward it keeps the states before some tokens, makes
//! those between again, and goes back a stretch at a time.

use super::Run;
use super::rows::{Each, by_unary};
use crate::backend::cpu::simd::{dot, fma, kernel_fn, sum};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use dreamc_compiler::ir::Binary;
use dreamc_compiler::op::recurrence::{Axis, Code, How, Program, Slice};
use dreamc_compiler::op::{Sequence, Tokens};
use dreamc_compiler::program::kernel::{Recurrence, RecurrenceGrad};

/// Elements with the same distance from one to the next.
#[derive(Clone, Copy)]
struct Line<'a> {
    x: &'a [f32],
    stride: usize,
}

impl<'a> Line<'a> {
    /// `n` elements of a workspace; those of a stride 0 are one.
    #[inline(always)]
    fn new(from: &'a [f32], at: usize, stride: u64, n: usize) -> Self {
        let stride = stride as usize;
        Line { x: &from[at..at + (n - 1) * stride + 1], stride }
    }

    /// They are one number.
    #[inline(always)]
    fn one(self) -> Option<f32> {
        (self.stride == 0).then(|| self.x[0])
    }

    /// They are adjacent.
    #[inline(always)]
    fn adjacent(self, n: usize) -> Option<&'a [f32]> {
        (self.stride == 1).then(|| &self.x[..n])
    }

    #[inline(always)]
    fn at(self, i: usize) -> f32 {
        self.x[i * self.stride]
    }
}

/// A function of each element of a line.
struct Mapped<'a> {
    x: Line<'a>,
    y: &'a mut [f32],
    stride: usize,
    n: usize,
}

impl Each for Mapped<'_> {
    #[inline(always)]
    fn each(self, f: impl Fn(f32) -> f32) {
        match (self.x.adjacent(self.n), self.stride) {
            (Some(x), 1) => self.y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x)),
            _ => (0..self.n).for_each(|i| self.y[i * self.stride] = f(self.x.at(i))),
        }
    }
}

#[inline(always)]
fn zip(a: Line, b: Line, y: &mut [f32], stride: usize, n: usize, f: impl Fn(f32, f32) -> f32) {
    if stride == 1 {
        let y = &mut y[..n];
        match (a.adjacent(n), b.adjacent(n), a.one(), b.one()) {
            (Some(a), Some(b), ..) => {
                return y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = f(*a, *b));
            }
            (Some(a), _, _, Some(b)) => return y.iter_mut().zip(a).for_each(|(y, a)| *y = f(*a, b)),
            (_, Some(b), Some(a), _) => return y.iter_mut().zip(b).for_each(|(y, b)| *y = f(a, *b)),
            _ => {}
        }
    }
    for i in 0..n {
        y[i * stride] = f(a.at(i), b.at(i));
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
fn zip_by(op: Binary, a: Line, b: Line, y: &mut [f32], stride: usize, n: usize) {
    match op {
        Binary::Add => zip(a, b, y, stride, n, |a, b| a + b),
        Binary::Sub => zip(a, b, y, stride, n, |a, b| a - b),
        Binary::Mul => zip(a, b, y, stride, n, |a, b| a * b),
        Binary::Div => zip(a, b, y, stride, n, |a, b| a / b),
        Binary::Max => zip(a, b, y, stride, n, larger),
        Binary::Where => zip(a, b, y, stride, n, super::rows::kept),
    }
}

/// Adds `n` products of a line each to one number, or each to its own.
#[inline(always)]
fn products<const FMA: bool>(a: Line, b: Line, y: &mut [f32], stride: usize, n: usize) {
    match (stride, a.adjacent(n), b.adjacent(n), a.one(), b.one()) {
        (0, Some(a), Some(b), ..) => y[0] += dot::<FMA>(a, b),
        (1, Some(a), _, _, Some(b)) => {
            y[..n].iter_mut().zip(a).for_each(|(y, a)| *y = fma::<FMA>(*a, b, *y));
        }
        (1, _, Some(b), Some(a), _) => {
            y[..n].iter_mut().zip(b).for_each(|(y, b)| *y = fma::<FMA>(a, *b, *y));
        }
        (1, Some(a), Some(b), ..) => {
            y[..n].iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = fma::<FMA>(*a, *b, *y));
        }
        _ => (0..n).for_each(|i| y[i * stride] = fma::<FMA>(a.at(i), b.at(i), y[i * stride])),
    }
}

/// Adds `n` elements to one number, or each to its own.
#[inline(always)]
fn sums<const FMA: bool>(a: Line, y: &mut [f32], stride: usize, n: usize) {
    match (stride, a.adjacent(n)) {
        (0, Some(a)) => y[0] += sum::<FMA>(a),
        (1, Some(a)) => y[..n].iter_mut().zip(a).for_each(|(y, a)| *y += *a),
        _ => (0..n).for_each(|i| y[i * stride] += a.at(i)),
    }
}

/// The innermost loop of a code.
#[inline(always)]
fn line<const FMA: bool>(how: How, axis: Axis, [a, b]: [usize; 2], before: &[f32], y: &mut [f32]) {
    let (n, stride) = (axis.size as usize, axis.to as usize);
    let first = |before| Line::new(before, a, axis.a, n);
    let second = |before| Line::new(before, b, axis.b, n);
    match how {
        How::Fill(x) => (0..n).for_each(|i| y[i * stride] = x.0 as f32),
        How::Copy => Mapped { x: first(before), y, stride, n }.each(|x| x),
        How::Unary(f) => by_unary::<FMA>(f, Mapped { x: first(before), y, stride, n }),
        How::Binary(f) => zip_by(f, first(before), second(before), y, stride, n),
        How::Sum => sums::<FMA>(first(before), y, stride, n),
        How::Product => products::<FMA>(first(before), second(before), y, stride, n),
        How::Max => {
            let a = first(before);
            (0..n).for_each(|i| y[i * stride] = larger(y[i * stride], a.at(i)));
        }
    }
}

/// Calls `run` with the offsets that the outer loops of a code have in result and operands.
#[inline(always)]
fn walk(outer: &[Axis], at: [usize; 3], run: &mut impl FnMut([usize; 3])) {
    match outer {
        [] => run(at),
        [axis, inner @ ..] => {
            let mut at = at;
            for _ in 0..axis.size {
                match inner {
                    [] => run(at),
                    [_, ..] => walk_inner(inner, at, run),
                }
                at = [at[0] + axis.to as usize, at[1] + axis.a as usize, at[2] + axis.b as usize];
            }
        }
    }
}

fn walk_inner(outer: &[Axis], at: [usize; 3], run: &mut dyn FnMut([usize; 3])) {
    let Some((axis, inner)) = outer.split_first() else { return run(at) };
    let mut at = at;
    for _ in 0..axis.size {
        walk_inner(inner, at, run);
        at = [at[0] + axis.to as usize, at[1] + axis.a as usize, at[2] + axis.b as usize];
    }
}

kernel_fn! {
    /// Runs one code on a workspace.
    fn run_code(code: &Code, work: &mut [f32]) {
        // Operands stand before the result.
        let (before, after) = work.split_at_mut(code.to as usize);
        if code.how.joins() {
            let nothing = if code.how == How::Max { f32::NEG_INFINITY } else { 0.0 };
            after[..code.results() as usize].fill(nothing);
        }
        const ONE: Axis = Axis { size: 1, to: 0, a: 0, b: 0 };
        let (axis, outer) = match code.axes.split_last() {
            Some((axis, outer)) => (*axis, outer),
            None => (ONE, &[][..]),
        };
        let before = &*before;
        walk(outer, [0, code.a as usize, code.b as usize], &mut |[to, a, b]| {
            line::<FMA>(code.how, axis, [a, b], before, &mut after[to..]);
        });
    }
}

fn run(program: &Program, work: &mut [f32]) {
    for code in &program.codes {
        run_code(code, work);
    }
}

/// A task's part of rows: where it begins, by the task's number among those of a sequence.
struct Part<'a> {
    slice: &'a Slice,
    first: usize,
}

impl<'a> Part<'a> {
    fn new(slice: &'a Slice, program: &Program, task: usize) -> Self {
        let (mut rest, mut first) = (task, 0);
        for (size, stride) in program.parallel.iter().zip(&slice.parallel).rev() {
            first += rest % *size as usize * *stride as usize;
            rest /= *size as usize;
        }
        Part { slice, first }
    }

    fn elements(&self) -> usize {
        self.slice.elements() as usize
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.slice.at as usize..self.slice.at as usize + self.elements()
    }

    /// Calls `move_piece(in the row, in the dense part, length)` for adjacent pieces.
    fn pieces(&self, mut piece: impl FnMut(usize, usize, usize)) {
        let axes = &self.slice.axes;
        // Trailing dimensions that are adjacent in the row, too.
        let mut length = 1;
        let mut outer = axes.len();
        while let Some(&(size, stride)) = outer.checked_sub(1).map(|k| &axes[k])
            && (stride as usize == length || size == 1)
        {
            length *= size as usize;
            outer -= 1;
        }
        let count: usize = axes[..outer].iter().map(|(size, _)| *size as usize).product();
        for n in 0..count {
            let (mut rest, mut at) = (n, self.first);
            for (size, stride) in axes[..outer].iter().rev() {
                at += rest % *size as usize * *stride as usize;
                rest /= *size as usize;
            }
            piece(at, n * length, length);
        }
    }

    fn load(&self, row: &[f32], dense: &mut [f32]) {
        self.pieces(|at, to, n| dense[to..to + n].copy_from_slice(&row[at..at + n]));
    }
}

/// A task's part of what is read and written at tokens: pieces of rows that other tasks leave
/// alone.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: View<'a, f32>,
    /// Elements of a row, where rows are adjacent.
    row: usize,
}

impl Rows<'_> {
    fn store(&self, token: usize, part: &Part, dense: &[f32]) {
        part.pieces(|at, from, n| {
            self.x.part_mut(token * self.row + at, n).copy_from_slice(&dense[from..from + n]);
        });
    }

    fn zero(&self, token: usize, part: &Part) {
        part.pieces(|at, _, n| self.x.part_mut(token * self.row + at, n).fill(0.0));
    }
}

/// Parts of the operands that a task reads.
struct Read<'a> {
    part: Part<'a>,
    x: View<'a, f32>,
}

fn reads<'a>(
    slices: &'a [Slice],
    names: &[&str],
    args: &Arguments<'a>,
    program: &Program,
    task: usize,
) -> Vec<Read<'a>> {
    let read = |(slice, name): (&'a Slice, &&str)| Read {
        part: Part::new(slice, program, task),
        x: args.floats(*name),
    };
    slices.iter().zip(names).map(read).collect()
}

impl Read<'_> {
    /// Loads a row into its place in the workspace.
    fn load(&self, row: usize, work: &mut [f32]) {
        self.part.load(self.x.row(row), &mut work[self.part.range()]);
    }
}

/// Moves what a step left of its states to where the next reads them.
fn keep_states(step: &Program, states: usize, work: &mut [f32]) {
    let first = step.outputs.len() - states;
    for (new, old) in step.outputs[first..].iter().zip(&step.inputs) {
        let from = new.at as usize;
        work.copy_within(from..from + new.elements() as usize, old.at as usize);
    }
}

/// Whether a document, or the sequence, begins at a token that takes part.
fn begins(sequence: &Sequence, token: usize) -> bool {
    sequence.before(token).is_none()
}

impl Run for Recurrence {
    fn scratch(&self) -> Scratch {
        Scratch::local(self.step.size as usize)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let (batch, tasks) = (s.batch as usize, self.step.tasks() as usize);
        cx.parallel(batch * tasks, |n, scratch| self.task(args, n / tasks, n % tasks, scratch));
        if self.tokens == Tokens::Kept {
            let state = args.floats("state").rows_of(self.kept() as usize);
            let slots = args.ints("slots").rows_of(s.tokens as usize);
            for b in 0..batch {
                state.row_mut(b)[0] += slots.row(b).iter().filter(|slot| **slot >= 0).count() as f32;
            }
        }
    }
}

/// One task of a kernel.
trait Task {
    fn task(&self, args: &Arguments, b: usize, task: usize, scratch: &mut [f32]);
}

impl Task for Recurrence {
    fn task(&self, args: &Arguments, b: usize, task: usize, scratch: &mut [f32]) {
        let (s, step) = (&self.shape, &self.step);
        let tokens = s.tokens as usize;
        let work = &mut scratch[..step.size as usize];
        let (states, others) = step.inputs.split_at(s.states);
        let names = self.operands();
        let reads = |slices, names| reads(slices, names, args, step, task);
        let rows = reads(&others[..s.rows], &names[..s.rows]);
        reads(&others[s.rows..], &names[s.rows..]).iter().for_each(|read| read.load(0, work));
        let initial = reads(states, &names[s.rows + s.constants..]);
        let outputs: Vec<(Rows, Part)> = step
            .outputs
            .iter()
            .zip(self.outputs())
            .map(|(slice, name)| {
                (Rows { x: args.floats(*name), row: slice.row as usize }, Part::new(slice, step, task))
            })
            .collect();
        let marks = match self.tokens {
            Tokens::All => None,
            Tokens::Segments => Some(args.ints("segments").rows_of(tokens)),
            Tokens::Kept => Some(args.ints("slots").rows_of(tokens)),
        };
        let sequence = match (self.tokens, marks) {
            (Tokens::Kept, Some(slots)) => Sequence::of_slots(slots.row(b)),
            (_, segments) => Sequence::of_segments(segments.map(|s| s.row(b))),
        };
        let kept = (self.tokens == Tokens::Kept)
            .then(|| Rows { x: args.floats("state"), row: self.kept() as usize });
        let begun = kept.is_some_and(|kept| kept.x.part(b * kept.row, 1)[0] > 0.0);
        let mut taken = false;
        for t in 0..tokens {
            let token = b * tokens + t;
            if !sequence.takes_part(t) {
                outputs.iter().for_each(|(rows, part)| rows.zero(token, part));
                continue;
            }
            match kept.filter(|_| begun && !taken) {
                Some(kept) => load_kept(&kept, b, &initial, work),
                None if begins(&sequence, t) => initial.iter().for_each(|read| read.load(0, work)),
                None => {}
            }
            taken = true;
            rows.iter().for_each(|read| read.load(token, work));
            run(step, work);
            for (rows, part) in &outputs {
                rows.store(token, part, &work[part.range()]);
            }
            keep_states(step, s.states, work);
        }
        if let Some(kept) = kept.filter(|_| taken) {
            let mut first = 1;
            for Read { part, .. } in &initial {
                part.pieces(|at, from, n| {
                    let from = part.slice.at as usize + from;
                    kept.x.part_mut(b * kept.row + first + at, n).copy_from_slice(&work[from..from + n]);
                });
                first += part.slice.row as usize;
            }
        }
    }
}

/// The states of a text that has begun.
fn load_kept(kept: &Rows, b: usize, states: &[Read], work: &mut [f32]) {
    let mut first = 1;
    for Read { part, .. } in states {
        part.pieces(|at, to, n| {
            let to = part.slice.at as usize + to;
            work[to..to + n].copy_from_slice(kept.x.part(b * kept.row + first + at, n));
        });
        first += part.slice.row as usize;
    }
}

/// Places in the scratch of a task of a gradient.
struct Places<'s> {
    work: &'s mut [f32],
    back: &'s mut [f32],
    /// States before the first token of each stretch.
    kept: &'s mut [f32],
    /// States before each token of a stretch.
    near: &'s mut [f32],
    cotangents: &'s mut [f32],
    /// Cotangents of constants and initial states so far.
    sums: &'s mut [f32],
}

/// Floats of each place.
fn lengths(k: &RecurrenceGrad) -> [usize; 6] {
    let (states, stretch) = (k.state_elements() as usize, k.stretch() as usize);
    let stretches = (k.shape.tokens as usize).div_ceil(stretch);
    let sums: u64 = k.sums().map(|slice| slice.elements()).sum();
    [k.step.size as usize, k.back.size as usize, states * stretches, states * stretch, states, sums as usize]
}

/// The memory that a task of a gradient reads and writes.
struct Gradient<'a> {
    kernel: &'a RecurrenceGrad,
    first: usize,
    tokens: usize,
    sequence: Sequence<'a>,
    rows: Vec<Read<'a>>,
    initial: Vec<Read<'a>>,
    /// For each input of the adjoint what it reads; nothing for states and their cotangents.
    feeds: Vec<Option<Read<'a>>>,
    results: Vec<(Rows<'a>, Part<'a>)>,
}

impl<'a> Gradient<'a> {
    fn new(kernel: &'a RecurrenceGrad, args: &Arguments<'a>, b: usize, task: usize) -> Self {
        let (s, step) = (&kernel.shape, &kernel.step);
        let tokens = s.tokens as usize;
        let (states, others) = step.inputs.split_at(s.states);
        let names = kernel.operands();
        let segments = kernel.segments.then(|| args.ints("segments").rows_of(tokens).row(b));
        let feed = |(slice, &feed): (&'a Slice, &usize)| {
            let operand = feed.checked_sub(s.states)?;
            let name = names[..s.rows + s.constants].get(operand).or_else(|| {
                operand.checked_sub(s.rows + s.constants).and_then(|k| kernel.cotangents().get(k))
            })?;
            Some(Read { part: Part::new(slice, step, task), x: args.floats(*name) })
        };
        let results = kernel.back.outputs[s.states..].iter().take(s.rows).zip(kernel.results());
        Gradient {
            kernel,
            first: b * tokens,
            tokens,
            sequence: Sequence::of_segments(segments),
            rows: reads(&others[..s.rows], &names[..s.rows], args, step, task),
            initial: reads(states, &names[s.rows + s.constants..], args, step, task),
            feeds: kernel.back.inputs.iter().zip(&kernel.feeds).map(feed).collect(),
            results: results
                .map(|(slice, name)| {
                    (Rows { x: args.floats(*name), row: slice.row as usize }, Part::new(slice, step, task))
                })
                .collect(),
        }
    }

    /// Calls `move_state(in the workspace, in adjacent memory)` for each state.
    fn states(&self, mut move_state: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>)) {
        let mut at = 0;
        for read in &self.initial {
            let n = read.part.elements();
            move_state(read.part.range(), at..at + n);
            at += n;
        }
    }

    fn restart(&self, t: usize, work: &mut [f32]) {
        if begins(&self.sequence, t) {
            self.initial.iter().for_each(|read| read.load(0, work));
        }
    }

    fn step(&self, t: usize, work: &mut [f32]) {
        self.rows.iter().for_each(|read| read.load(self.first + t, work));
        run(&self.kernel.step, work);
        keep_states(&self.kernel.step, self.kernel.shape.states, work);
    }

    /// Keeps the states before the first token of each stretch.
    fn forward(&self, stretch: usize, p: &mut Places) {
        let states = p.cotangents.len();
        self.initial.iter().for_each(|read| read.load(0, p.work));
        let last = (self.tokens - 1) / stretch * stretch;
        for t in 0..=last {
            if t.is_multiple_of(stretch) {
                let kept = &mut p.kept[t / stretch * states..][..states];
                self.states(|from, to| kept[to].copy_from_slice(&p.work[from]));
            }
            if t < last && self.sequence.takes_part(t) {
                self.restart(t, p.work);
                self.step(t, p.work);
            }
        }
    }

    /// The tokens of a stretch, forward and back.
    fn stretch(&self, range: std::ops::Range<usize>, stretch: usize, p: &mut Places) {
        let states = p.cotangents.len();
        let kept = &p.kept[range.start / stretch * states..][..states];
        self.states(|to, from| p.work[to].copy_from_slice(&kept[from]));
        for t in range.clone().filter(|&t| self.sequence.takes_part(t)) {
            self.restart(t, p.work);
            let near = &mut p.near[(t - range.start) * states..][..states];
            self.states(|from, to| near[to].copy_from_slice(&p.work[from]));
            if t + 1 < range.end {
                self.step(t, p.work);
            }
        }
        for t in range.clone().rev() {
            match self.sequence.takes_part(t) {
                true => self.back(t, t - range.start, p),
                false => self.results.iter().for_each(|(rows, part)| rows.zero(self.first + t, part)),
            }
        }
    }

    /// The adjoint at a token, the states before which are number `near`.
    fn back(&self, t: usize, near: usize, p: &mut Places) {
        let (k, s, token) = (self.kernel, &self.kernel.shape, self.first + t);
        let states = p.cotangents.len();
        let near = &p.near[near * states..][..states];
        let mut offsets = vec![];
        self.states(|_, at| offsets.push(at));
        for ((slice, &feed), read) in k.back.inputs.iter().zip(&k.feeds).zip(&self.feeds) {
            let to = slice.at as usize..(slice.at + slice.elements()) as usize;
            match read {
                Some(read) if feed >= s.states + s.rows && feed < s.operands() => read.load(0, p.back),
                Some(read) => read.load(token, p.back),
                None if feed < s.states => p.back[to].copy_from_slice(&near[offsets[feed].clone()]),
                None => {
                    let from = offsets[feed - s.operands() - s.outputs].clone();
                    p.back[to].copy_from_slice(&p.cotangents[from]);
                }
            }
        }
        run(&k.back, p.back);
        for (rows, part) in &self.results {
            rows.store(token, part, &p.back[part.range()]);
        }
        let mut at = 0;
        let mut add = |from: &[f32]| {
            let to = &mut p.sums[at..at + from.len()];
            to.iter_mut().zip(from).for_each(|(to, d)| *to += *d);
            at += from.len();
        };
        let dense = |slice: &Slice| slice.at as usize..(slice.at + slice.elements()) as usize;
        k.back.outputs[s.states + s.rows..].iter().for_each(|slice| add(&p.back[dense(slice)]));
        let begins = begins(&self.sequence, t);
        for (slice, at) in k.back.outputs.iter().zip(offsets) {
            let d = &p.back[dense(slice)];
            if begins {
                add(d);
                p.cotangents[at].fill(0.0);
            } else {
                p.cotangents[at].copy_from_slice(d);
            }
        }
    }
}

impl Run for RecurrenceGrad {
    fn scratch(&self) -> Scratch {
        let row: u64 = self.sums().map(|slice| slice.row).sum();
        Scratch { local: lengths(self).iter().sum(), shared: (self.shape.batch * row) as usize }
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = &self.shape;
        let (batch, tasks) = (s.batch as usize, self.step.tasks() as usize);
        let row: usize = self.sums().map(|slice| slice.row as usize).sum();
        let parts = Rows { x: cx.shared(), row };
        let stretch = self.stretch() as usize;
        cx.parallel(batch * tasks, |n, scratch| {
            let (b, task) = (n / tasks, n % tasks);
            let places = lengths(self);
            let mut rest = scratch;
            let [work, back, kept, near, cotangents, sums] = places.map(|n| {
                let (place, more) = std::mem::take(&mut rest).split_at_mut(n);
                rest = more;
                place
            });
            let mut p = Places { work, back, kept, near, cotangents, sums };
            let gradient = Gradient::new(self, args, b, task);
            let constants = &self.step.inputs[s.states + s.rows..];
            let names = &self.operands()[s.rows..];
            reads(constants, names, args, &self.step, task).iter().for_each(|read| read.load(0, p.work));
            p.cotangents.fill(0.0);
            p.sums.fill(0.0);
            gradient.forward(stretch, &mut p);
            for n in (0..gradient.tokens.div_ceil(stretch)).rev() {
                let range = n * stretch..((n + 1) * stretch).min(gradient.tokens);
                gradient.stretch(range, stretch, &mut p);
            }
            let (mut from, mut to) = (0, 0);
            for slice in self.sums() {
                let part = Part::new(slice, &self.step, task);
                let dense = &p.sums[from..from + part.elements()];
                part.pieces(|at, own, n| {
                    parts.x.part_mut(b * row + to + at, n).copy_from_slice(&dense[own..own + n]);
                });
                (from, to) = (from + part.elements(), to + slice.row as usize);
            }
        });
        let mut first = 0;
        for (slice, name) in self.sums().zip(&self.results()[s.rows..]) {
            let n = slice.row as usize;
            let sum = args.floats(*name).all_mut();
            sum.fill(0.0);
            for b in 0..batch {
                sum.iter_mut().zip(parts.x.part(b * row + first, n)).for_each(|(sum, x)| *sum += *x);
            }
            first += n;
        }
    }
}
