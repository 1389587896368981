//! Scores and masks that are programs ([`formula`]): evaluated by tiles, a row at a time.
//!
//! *In*: a tile of products of queries and keys. *Out*: their scores, with `-inf` where the mask
//! hides a pair; backward, cotangents of the products, and sums of those of what the program reads.
//! *Promise*: a step is computed as rarely as what it depends on changes ([`Of`]); a mask is
//! evaluated in blocks alone that it leaves some pairs of; sums have one order, whatever the
//! threads.

use super::{BLOCK, Sizes, Visible};
use crate::backend::cpu::simd::{exp, fma, kernel_fn, log, sin_cos, sum, tanh};
use crate::backend::cpu::{Arguments, Context, View};
use dreamc_compiler::ir::Attention as Scoring;
use dreamc_compiler::op::attention::formula::{
    Binary, Block, Formula, Pair, Part, Partials, Place, Program, Range as Numbers, Read, Step, Unary, index,
};
use dreamc_compiler::op::attention::kernel::{DX, X};
use dreamc_compiler::op::attention::{kept, threshold};
use std::ops::Range;

/// Arguments that a step depends on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// The head alone.
    Head,
    /// The query, and perhaps the head.
    Query,
    /// The key, and perhaps the head.
    Key,
    /// Both.
    Pair,
}

impl Of {
    fn join(self, other: Of) -> Of {
        match (self, other) {
            (Of::Head, x) | (x, Of::Head) => x,
            (a, b) if a == b => a,
            _ => Of::Pair,
        }
    }
}

/// Rows of a tile that a step is computed for at once: choosing what a step does takes as long as a
/// row of it.
const ROWS: usize = 4;
/// Numbers of scratch that a step has.
const ROOM: usize = ROWS * BLOCK;

/// The steps of a formula. Each has [`ROOM`] numbers of scratch: a row of [`BLOCK`] for each row of
/// the tile, one number for each, or one row or number for all.
struct Steps {
    list: Vec<(Step, Of)>,
}

impl Steps {
    fn new(steps: &[Step], reads: &[Read]) -> Steps {
        let mut list: Vec<(Step, Of)> = vec![];
        for &step in steps {
            let own = match step {
                Step::Number(_) | Step::Head => Of::Head,
                Step::Score => Of::Pair,
                Step::Query => Of::Query,
                Step::Key => Of::Key,
                Step::Read(read) => match reads[read].place {
                    Place::Query => Of::Query,
                    Place::Key => Of::Key,
                    Place::All | Place::Table => Of::Head,
                },
                Step::Lookup(..) | Step::Unary(..) | Step::Binary(..) | Step::Where(..) => Of::Head,
            };
            list.push((step, step.operands().fold(own, |of, x| of.join(list[x].1))));
        }
        Steps { list }
    }

    fn room(&self) -> usize {
        self.list.len() * ROOM
    }
}

/// A value of a step in a row of a tile.
#[derive(Clone, Copy)]
enum Value<'v> {
    One(f32),
    Many(&'v [f32]),
}

impl Value<'_> {
    #[inline(always)]
    fn at(self, j: usize) -> f32 {
        match self {
            Value::One(x) => x,
            Value::Many(x) => x[j],
        }
    }
}

/// A program at work in a launch.
pub(super) struct Scored<'a> {
    program: &'a Program,
    sizes: Sizes,
    reads: Vec<&'a [f32]>,
    lengths: Vec<usize>,
    score: Option<Steps>,
    mask: Option<Steps>,
    partials: Option<(Steps, Partials)>,
    /// Operands that the score has derivatives by, and where the sums of each begin among a head's
    /// sums.
    moved: Vec<(usize, usize)>,
}

/// Dropout of a launch.
pub(super) struct Dropout<'a> {
    draws: View<'a, i32>,
    threshold: u32,
    factor: f32,
}

/// Where some rows of a tile are.
struct Rows<'r> {
    queries: Range<usize>,
    keys: Range<usize>,
    products: &'r [f32],
    scale: f32,
}

/// Floats of scratch that a program needs for itself.
pub(super) fn room(attention: &Scoring, backward: bool) -> usize {
    let Some(program) = attention.program.as_deref() else { return 0 };
    let steps = |f: &Option<Formula>| f.as_ref().map_or(0, |f| f.steps().len());
    let score = match (&program.score, backward) {
        (Some(score), true) => score.partials().steps.len() + 1,
        (score, _) => steps(score),
    };
    (score + steps(&program.mask)) * ROOM
}

/// How many sums a head of a sequence has of an operand: two for one number, with what rounding
/// took from it.
fn sums_of(read: Read, sizes: &Sizes, length: usize) -> usize {
    match read.place {
        Place::Query => sizes.queries,
        Place::Key => sizes.keys,
        Place::All => 2,
        Place::Table => length,
    }
}

/// Floats of scratch that all tasks of the backward share.
pub(super) fn shared(attention: &Scoring, sizes: &Sizes, lengths: &[u64]) -> usize {
    let of = |n: usize| sums_of(attention.read()[n], sizes, lengths[n] as usize);
    sizes.batch * sizes.heads * attention.moved().into_iter().map(of).sum::<usize>()
}

impl<'a> Scored<'a> {
    pub fn new(
        sizes: &Sizes,
        attention: &'a Scoring,
        lengths: &[u64],
        args: &Arguments<'a>,
        backward: bool,
    ) -> Option<Self> {
        let program = attention.program.as_deref()?;
        let read = |(&name, read, length): (&&'static str, &Read, usize)| {
            let heads = if read.heads { sizes.heads } else { 1 };
            let count = match read.place {
                Place::Query => sizes.batch * sizes.queries,
                Place::Key => sizes.batch * sizes.keys,
                Place::All => 1,
                Place::Table => length,
            };
            args.floats(name).part(0, count * heads)
        };
        let lengths: Vec<usize> = lengths.iter().map(|&n| n as usize).collect();
        let reads = X.iter().zip(&program.reads).zip(&lengths).map(|((name, r), &n)| read((name, r, n)));
        let steps = |f: &Formula| Steps::new(f.steps(), &program.reads);
        let partials = program.score.as_ref().filter(|_| backward).map(|score| {
            let partials = score.partials();
            (Steps::new(&partials.steps, &program.reads), partials)
        });
        let mut moved = vec![];
        if backward {
            let mut first = 0;
            for n in attention.moved() {
                moved.push((n, first));
                first += sums_of(program.reads[n], sizes, lengths[n]);
            }
        }
        Some(Scored {
            program,
            sizes: *sizes,
            reads: reads.collect(),
            score: program.score.as_ref().map(steps),
            mask: program.mask.as_ref().map(steps),
            partials,
            moved,
            lengths,
        })
    }

    /// Whether it has a score of its own.
    pub fn scores(&self) -> bool {
        self.score.is_some()
    }

    /// Where an operand's numbers for a sequence and a head begin, and how far apart they are.
    #[inline(always)]
    fn place(&self, read: usize, sequence: usize, head: usize) -> (usize, usize) {
        let of = self.program.reads[read];
        let (each, own) = if of.heads { (self.sizes.heads, head) } else { (1, 0) };
        match of.place {
            Place::Query => (sequence * self.sizes.queries * each + own, each),
            Place::Key => (sequence * self.sizes.keys * each + own, each),
            Place::All => (own, 0),
            Place::Table => (own * self.lengths[read], 1),
        }
    }

    /// How much of a block the mask leaves to a head.
    pub fn part(
        &self,
        visible: &Visible,
        [sequence, head]: [usize; 2],
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Part {
        let Some(mask) = &self.program.mask else { return Part::Full };
        let numbers = |list: &[i32]| Numbers::of(list.iter().map(|&x| f64::from(x)));
        let ends = |all: &Range<usize>| Numbers::new(all.start as f64, all.end as f64 - 1.0);
        let (query, key) = match visible.positions {
            None => (ends(queries), ends(keys)),
            Some((q, k)) => (numbers(&q[queries.clone()]), numbers(&k[keys.clone()])),
        };
        let read = |read: usize, at: Option<Numbers>| {
            let (first, step) = self.place(read, sequence, head);
            let all = match self.program.reads[read].place {
                Place::Query => queries.clone(),
                Place::Key => keys.clone(),
                Place::All => 0..1,
                Place::Table => {
                    let (length, at) = (self.lengths[read], at.unwrap_or(Numbers::ALL));
                    index(at.low, length)..index(at.high, length) + 1
                }
            };
            Numbers::of(all.map(|x| f64::from(self.reads[read][first + x * step])))
        };
        let head = Numbers::new(head as f64, head as f64);
        mask.part(&Block { query, key, head, read: &read })
    }

    /// Whether the mask leaves a pair.
    fn sees(&self, visible: &Visible, [sequence, head]: [usize; 2], query: usize, key: usize) -> bool {
        let Some(mask) = &self.program.mask else { return true };
        let read = |read: usize, at: Option<f64>| {
            let (first, step) = self.place(read, sequence, head);
            let x = match self.program.reads[read].place {
                Place::Query => query,
                Place::Key => key,
                Place::All => 0,
                Place::Table => index(at.unwrap_or(0.0), self.lengths[read]),
            };
            f64::from(self.reads[read][first + x * step])
        };
        let (q, k) = visible.positions.map_or((query as i32, key as i32), |(q, k)| (q[query], k[key]));
        let (query, key) = (f64::from(q), f64::from(k));
        mask.evaluate(&Pair { score: 0.0, query, key, head: head as f64, read: &read }) > 0.0
    }

    /// Pairs of a sequence that are seen, over all heads.
    pub fn pairs(&self, visible: &Visible, sequence: usize) -> u64 {
        let mut pairs = 0;
        for (head, query) in (0..self.sizes.heads).flat_map(|h| (0..self.sizes.queries).map(move |q| (h, q)))
        {
            let seen =
                |&key: &usize| visible.sees(query, key) && self.sees(visible, [sequence, head], query, key);
            pairs += (0..self.sizes.keys).filter(seen).count() as u64;
        }
        pairs
    }

    /// Computes what changes with the head and the block of keys; `values` are [`room`].
    pub fn block(&self, visible: &Visible, at: [usize; 2], keys: &Range<usize>, values: &mut [f32]) {
        let rows = Rows { queries: 0..0, keys: keys.clone(), products: &[], scale: 1.0 };
        let steps = self.partials.as_ref().map(|(steps, _)| steps).or(self.score.as_ref());
        let (of_score, of_mask) = values.split_at_mut(steps.map_or(0, |s| s.room() + self.spare()));
        if let Some(steps) = steps {
            evaluate(self, steps, visible, at, [Of::Head, Of::Key], &rows, of_score);
        }
        if let Some(steps) = &self.mask {
            evaluate(self, steps, visible, at, [Of::Head, Of::Key], &rows, of_mask);
        }
    }

    /// Room after the steps of a score in the backward.
    fn spare(&self) -> usize {
        if self.partials.is_some() { ROOM } else { 0 }
    }

    /// Turns products of some queries with the keys of the last [`Scored::block`] into scores; the
    /// mask is looked at where it leaves some of the pairs. Without a score products stay as they
    /// are.
    #[allow(clippy::too_many_arguments)]
    pub fn tile(
        &self,
        visible: &Visible,
        at: [usize; 2],
        queries: Range<usize>,
        keys: &Range<usize>,
        part: Part,
        scale: f32,
        values: &mut [f32],
        tile: &mut [f32],
    ) {
        let steps = self.score.as_ref();
        let (of_score, of_mask) = values.split_at_mut(steps.map_or(0, |s| s.room() + self.spare()));
        let n = keys.len();
        for (first, tile) in queries.clone().step_by(ROWS).zip(tile.chunks_mut(ROWS * n)) {
            let queries = first..(first + ROWS).min(queries.end);
            if let Some(steps) = steps {
                let rows = Rows { queries: queries.clone(), keys: keys.clone(), products: tile, scale };
                evaluate(self, steps, visible, at, [Of::Query, Of::Pair], &rows, of_score);
                tile.chunks_exact_mut(n)
                    .enumerate()
                    .for_each(|(row, tile)| result(steps, of_score, row, tile));
            }
            if let (Some(steps), Part::Mixed) = (&self.mask, part) {
                let rows = Rows { queries, keys: keys.clone(), products: &[], scale };
                evaluate(self, steps, visible, at, [Of::Query, Of::Pair], &rows, of_mask);
                tile.chunks_exact_mut(n).enumerate().for_each(|(row, tile)| hide(steps, of_mask, row, tile));
            }
        }
    }

    /// Turns products, and cotangents of weights, into weights and cotangents of the products, and
    /// adds to the sums of a head.
    #[allow(clippy::too_many_arguments)]
    pub fn harden(
        &self,
        visible: &Visible,
        at: [usize; 2],
        queries: Range<usize>,
        keys: &Range<usize>,
        part: Part,
        scale: f32,
        values: &mut [f32],
        [tile, dtile]: [&mut [f32]; 2],
        [lse, along]: [&[f32]; 2],
        sums: &mut [f32],
    ) {
        let Some((steps, partials)) = &self.partials else { return };
        let (of_score, of_mask) = values.split_at_mut(steps.room() + ROOM);
        let n = keys.len();
        let parts = tile.chunks_mut(ROWS * n).zip(dtile.chunks_mut(ROWS * n));
        for (first, (tile, dtile)) in queries.clone().step_by(ROWS).zip(parts) {
            let some = first..(first + ROWS).min(queries.end);
            let rows = Rows { queries: some.clone(), keys: keys.clone(), products: tile, scale };
            evaluate(self, steps, visible, at, [Of::Query, Of::Pair], &rows, of_score);
            let mask = self.mask.as_ref().filter(|_| part == Part::Mixed);
            if let Some(steps) = mask {
                let rows = Rows { queries: some.clone(), keys: keys.clone(), products: &[], scale };
                evaluate(self, steps, visible, at, [Of::Query, Of::Pair], &rows, of_mask);
            }
            let (values, spare) = of_score.split_at_mut(steps.room());
            for (row, query) in some.enumerate() {
                let (lse, along) = (lse[query - queries.start], along[query - queries.start]);
                let (x, d) = (&mut tile[row * n..][..n], &mut dtile[row * n..][..n]);
                if lse == f32::NEG_INFINITY {
                    x.fill(0.0);
                    d.fill(0.0);
                    continue;
                }
                let mask = mask.map(|steps| (steps, &*of_mask));
                weigh(
                    steps,
                    partials,
                    values,
                    mask,
                    visible,
                    [query, row],
                    keys,
                    [lse, along, scale],
                    x,
                    d,
                    spare,
                );
                self.gather(steps, partials, values, &spare[..n], [query, row], keys, sums);
            }
        }
    }

    /// Adds cotangents of what the score reads for one query; `ds` are those of scores.
    #[allow(clippy::too_many_arguments)]
    fn gather(
        &self,
        steps: &Steps,
        partials: &Partials,
        values: &[f32],
        ds: &[f32],
        [query, row]: [usize; 2],
        keys: &Range<usize>,
        sums: &mut [f32],
    ) {
        let n = keys.len();
        for partial in &partials.of {
            let Some(&(_, first)) = self.moved.iter().find(|(read, _)| *read == partial.read) else {
                continue;
            };
            match self.program.reads[partial.read].place {
                Place::Query => sums[first + query] += inner(value(steps, values, partial.by, row, n), ds),
                Place::All => {
                    let x = inner(value(steps, values, partial.by, row, n), ds);
                    // The exact sum of the two is `total + lost`.
                    let (sum, lost) = (sums[first], &mut 0.0);
                    let total = sum + x;
                    *lost = if sum.abs() >= x.abs() { (sum - total) + x } else { (x - total) + sum };
                    sums[first] = total;
                    sums[first + 1] += *lost;
                }
                Place::Key => {
                    let sums = &mut sums[first + keys.start..][..n];
                    add_products(value(steps, values, partial.by, row, n), ds, sums);
                }
                Place::Table => {
                    let Step::Lookup(read, at) = partials.steps[partial.leaf] else { continue };
                    let (by, at) =
                        (value(steps, values, partial.by, row, n), value(steps, values, at, row, n));
                    let length = self.lengths[read];
                    for (j, &ds) in ds.iter().enumerate() {
                        if ds != 0.0 {
                            sums[first + index(at.at(j).into(), length)] += ds * by.at(j);
                        }
                    }
                }
            }
        }
    }

    /// The sums of a head of a sequence among those of all.
    pub fn sums<'s>(&self, shared: View<'s, f32>, sequence: usize, head: usize) -> &'s mut [f32] {
        let each = self.each();
        shared.part_mut((sequence * self.sizes.heads + head) * each, each)
    }

    /// How many sums each head of a sequence has.
    fn each(&self) -> usize {
        let sums = |&(n, _): &(usize, usize)| sums_of(self.program.reads[n], &self.sizes, self.lengths[n]);
        self.moved.iter().map(sums).sum()
    }

    /// Adds the sums of heads and sequences up to the cotangents of operands.
    pub fn finish(&self, cx: &Context, args: &Arguments, shared: View<f32>) {
        let (s, each) = (&self.sizes, self.each());
        for &(n, first) in &self.moved {
            let read = self.program.reads[n];
            let to = args.floats(DX[n]);
            let heads = if read.heads { s.heads } else { 1 };
            let (count, by_sequence) = match read.place {
                Place::Query => (s.queries, true),
                Place::Key => (s.keys, true),
                Place::All => (1, false),
                Place::Table => (self.lengths[n], false),
            };
            let sequences = if by_sequence { s.batch } else { 1 };
            let summed = s.batch / sequences * (s.heads / heads);
            cx.pieces(sequences * heads, count * summed, |range, _| {
                for of in range {
                    let (sequence, head) = (of / heads, of % heads);
                    let sequences = if by_sequence { sequence..sequence + 1 } else { 0..s.batch };
                    let all = if read.heads { head..head + 1 } else { 0..s.heads };
                    for k in 0..count {
                        let mut total = 0.0f64;
                        for (b, h) in sequences.clone().flat_map(|b| all.clone().map(move |h| (b, h))) {
                            let sums =
                                shared.part((b * s.heads + h) * each + first, count.max(2).min(each - first));
                            total += f64::from(sums[k]);
                            if read.place == Place::All {
                                total += f64::from(sums[1]);
                            }
                        }
                        let at = match read.place {
                            Place::Query | Place::Key => (sequence * count + k) * heads + head,
                            Place::All => head,
                            Place::Table => head * count + k,
                        };
                        to.part_mut(at, 1)[0] = total as f32;
                    }
                }
            });
        }
    }
}

impl<'a> Dropout<'a> {
    pub fn new(attention: &Scoring, args: &Arguments<'a>) -> Option<Self> {
        let p = attention.dropout?;
        Some(Dropout { draws: args.ints("draws"), threshold: threshold(p), factor: (1.0 / (1.0 - p)) as f32 })
    }

    /// Multiplies a tile of the rows of `queries` by what dropout leaves.
    pub fn apply(
        &self,
        s: &Sizes,
        [sequence, head]: [usize; 2],
        queries: Range<usize>,
        keys: &Range<usize>,
        tile: &mut [f32],
    ) {
        let draws = self.draws.part(sequence * s.queries + queries.start, queries.len());
        for (&draw, tile) in draws.iter().zip(tile.chunks_exact_mut(keys.len())) {
            drop_row(draw, head, keys.start, self.threshold, self.factor, tile);
        }
    }

    /// The same of a row of the batch and the keys of those numbers.
    pub fn apply_list(&self, [row, head]: [usize; 2], keys: &[u32], x: &mut [f32]) {
        let draw = self.draws.all()[row];
        for (x, &key) in x.iter_mut().zip(keys) {
            *x = if kept(draw, head, key as usize, self.threshold) { *x * self.factor } else { 0.0 };
        }
    }
}

/// The value of a step in the row `row` of those at work.
#[inline(always)]
fn value<'v>(steps: &Steps, values: &'v [f32], step: usize, row: usize, n: usize) -> Value<'v> {
    let own = &values[step * ROOM..][..ROOM];
    match steps.list[step].1 {
        Of::Head => Value::One(own[0]),
        Of::Query => Value::One(own[row]),
        Of::Key => Value::Many(&own[..n]),
        Of::Pair => Value::Many(&own[row * BLOCK..][..n]),
    }
}

/// A function of one value, at each key.
#[inline(always)]
fn each(x: Value, out: &mut [f32], f: impl Fn(f32) -> f32) {
    match x {
        Value::One(x) => out.fill(f(x)),
        Value::Many(x) => out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x)),
    }
}

/// A function of two values.
#[inline(always)]
fn both(a: Value, b: Value, out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    match (a, b) {
        (Value::Many(a), Value::Many(b)) => {
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, &b))| *o = f(a, b));
        }
        (Value::Many(a), Value::One(b)) => out.iter_mut().zip(a).for_each(|(o, &a)| *o = f(a, b)),
        (Value::One(a), Value::Many(b)) => out.iter_mut().zip(b).for_each(|(o, &b)| *o = f(a, b)),
        (Value::One(a), Value::One(b)) => out.fill(f(a, b)),
    }
}

/// The second where the first is above zero, else the third.
#[inline(always)]
fn choose(c: Value, a: Value, b: Value, out: &mut [f32]) {
    match (c, a, b) {
        (Value::Many(c), Value::Many(a), Value::Many(b)) => {
            for (o, (&c, (&a, &b))) in out.iter_mut().zip(c.iter().zip(a.iter().zip(b))) {
                *o = if c > 0.0 { a } else { b };
            }
        }
        (Value::One(c), a, b) => each(if c > 0.0 { a } else { b }, out, |x| x),
        (c, a, b) => {
            for (j, o) in out.iter_mut().enumerate() {
                *o = if c.at(j) > 0.0 { a.at(j) } else { b.at(j) };
            }
        }
    }
}

#[inline(always)]
fn truth(x: bool) -> f32 {
    if x { 1.0 } else { 0.0 }
}

kernel_fn! {
    /// Computes steps of two kinds.
    fn evaluate(
        of: &Scored,
        steps: &Steps,
        visible: &Visible,
        at: [usize; 2],
        kinds: [Of; 2],
        rows: &Rows,
        values: &mut [f32],
    ) {
        let [sequence, head] = at;
        let n = rows.keys.len();
        for (k, &(step, kind)) in steps.list.iter().enumerate() {
            if !kinds.contains(&kind) {
                continue;
            }
            let (before, own) = values.split_at_mut(k * ROOM);
            let operand = |x: usize, row: usize| value(steps, before, x, row, n);
            let rows_of = rows.queries.len();
            // The function of a step is chosen once for all rows.
            macro_rules! rows {
                (|$row:ident, $out:ident| $does:expr) => {
                    match kind {
                        Of::Head => { let ($row, $out) = (0, &mut own[..1]); let _ = $row; $does; }
                        Of::Key => { let ($row, $out) = (0, &mut own[..n]); let _ = $row; $does; }
                        Of::Query => for $row in 0..rows_of { let _ = $row; let $out = &mut own[$row..$row + 1]; $does; },
                        Of::Pair => for $row in 0..rows_of { let _ = $row; let $out = &mut own[$row * BLOCK..][..n]; $does; },
                    }
                };
            }
            match step {
                Step::Number(x) => rows!(|row, out| out.fill(x.0 as f32)),
                Step::Score => rows!(|row, out| {
                    each(Value::Many(&rows.products[row * n..][..n]), out, |x| x * rows.scale)
                }),
                Step::Query => rows!(|row, out| out.fill({
                    let query = rows.queries.start + row;
                    visible.positions.map_or(query as f32, |(q, _)| q[query] as f32)
                })),
                Step::Key => match visible.positions {
                    None => rows!(|row, out| out.iter_mut().zip(rows.keys.clone()).for_each(|(o, j)| *o = j as f32)),
                    Some((_, k)) => {
                        let k = &k[rows.keys.clone()];
                        rows!(|row, out| out.iter_mut().zip(k).for_each(|(o, &j)| *o = j as f32));
                    }
                },
                Step::Head => rows!(|row, out| out.fill(head as f32)),
                Step::Read(read) => {
                    let (first, step) = of.place(read, sequence, head);
                    let list = of.reads[read];
                    match of.program.reads[read].place {
                        Place::Query => rows!(|row, out| out.fill(list[first + (rows.queries.start + row) * step])),
                        Place::Key => {
                            let list = &list[first + rows.keys.start * step..];
                            rows!(|row, out| out.iter_mut().zip(list.iter().step_by(step)).for_each(|(o, &x)| *o = x));
                        }
                        Place::All | Place::Table => rows!(|row, out| out.fill(list[first])),
                    }
                }
                Step::Lookup(read, x) => {
                    let (first, length) = (of.place(read, sequence, head).0, of.lengths[read]);
                    let table = &of.reads[read][first..first + length];
                    let last = (length - 1) as f32;
                    rows!(|row, out| each(operand(x, row), out, |x| {
                        // NaN is 0, as everywhere.
                        let x = if x > 0.0 { if x < last { x } else { last } } else { 0.0 };
                        table[(x as i32 as usize).min(length - 1)]
                    }));
                }
                Step::Unary(f, x) => match f {
                    Unary::Neg => rows!(|row, out| each(operand(x, row), out, |x| -x)),
                    Unary::Exp => rows!(|row, out| each(operand(x, row), out, exp::<FMA>)),
                    Unary::Log => rows!(|row, out| each(operand(x, row), out, log::<FMA>)),
                    Unary::Sqrt => rows!(|row, out| each(operand(x, row), out, f32::sqrt)),
                    Unary::Abs => rows!(|row, out| each(operand(x, row), out, f32::abs)),
                    Unary::Tanh => rows!(|row, out| each(operand(x, row), out, tanh::<FMA>)),
                    Unary::Sin => rows!(|row, out| each(operand(x, row), out, |x| sin_cos::<FMA>(x.into()).0)),
                    Unary::Cos => rows!(|row, out| each(operand(x, row), out, |x| sin_cos::<FMA>(x.into()).1)),
                    Unary::Floor => rows!(|row, out| each(operand(x, row), out, f32::floor)),
                    Unary::Stop => rows!(|row, out| each(operand(x, row), out, |x| x)),
                },
                Step::Binary(f, a, b) => {
                    macro_rules! both {
                        ($f:expr) => { rows!(|row, out| both(operand(a, row), operand(b, row), out, $f)) };
                    }
                    match f {
                        Binary::Add => both!(|a, b| a + b),
                        Binary::Sub => both!(|a, b| a - b),
                        Binary::Mul => both!(|a, b| a * b),
                        Binary::Div => both!(|a, b| a / b),
                        Binary::Min => both!(|a, b| if b < a { b } else { a }),
                        Binary::Max => both!(|a, b| if b > a { b } else { a }),
                        Binary::Less => both!(|a, b| truth(a < b)),
                        Binary::AtMost => both!(|a, b| truth(a <= b)),
                        Binary::Equal => both!(|a, b| truth(a == b)),
                    }
                }
                Step::Where(c, a, b) => rows!(|row, out| choose(operand(c, row), operand(a, row), operand(b, row), out)),
            }
        }
    }

    /// The value of the last step.
    fn result(steps: &Steps, values: &[f32], row: usize, out: &mut [f32]) {
        let n = out.len();
        each(value(steps, values, steps.list.len() - 1, row, n), out, |x| x);
    }

    /// `-inf` where the last step is not above zero.
    fn hide(steps: &Steps, values: &[f32], row: usize, out: &mut [f32]) {
        match value(steps, values, steps.list.len() - 1, row, out.len()) {
            Value::One(x) if x > 0.0 => {}
            Value::One(_) => out.fill(f32::NEG_INFINITY),
            Value::Many(x) => out.iter_mut().zip(x).for_each(|(o, &x)| *o = if x > 0.0 { *o } else { f32::NEG_INFINITY }),
        }
    }

    /// One row of [`Scored::harden`]: weights, cotangents of products, and in `ds` cotangents of
    /// scores.
    fn weigh(
        steps: &Steps,
        partials: &Partials,
        values: &[f32],
        mask: Option<(&Steps, &[f32])>,
        visible: &Visible,
        at: [usize; 2],
        keys: &Range<usize>,
        numbers: [f32; 3],
        x: &mut [f32],
        d: &mut [f32],
        ds: &mut [f32],
    ) {
        let ([lse, along, scale], [query, row]) = (numbers, at);
        let n = keys.len();
        each(value(steps, values, partials.value, row, n), x, |x| x);
        if let Some((steps, values)) = mask {
            match value(steps, values, steps.list.len() - 1, row, n) {
                Value::One(m) if m > 0.0 => {}
                Value::One(_) => x.fill(f32::NEG_INFINITY),
                Value::Many(m) => {
                    x.iter_mut().zip(m).for_each(|(x, &m)| *x = if m > 0.0 { *x } else { f32::NEG_INFINITY });
                }
            }
        }
        if visible.by_pair() {
            for (j, x) in x.iter_mut().enumerate() {
                if !visible.sees(query, keys.start + j) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        let part = visible.part(query, keys);
        for outside in [0..part.start, part.end..n] {
            x[outside.clone()].fill(f32::NEG_INFINITY);
            d[outside].fill(0.0);
        }
        let ds = &mut ds[..n];
        for ((x, d), ds) in x.iter_mut().zip(&*d).zip(&mut *ds) {
            *x = exp::<FMA>(*x - lse);
            *ds = *x * (*d - along);
        }
        // A pair of no weight gives nothing, whatever the slope is there.
        match value(steps, values, partials.by_score, row, n) {
            Value::One(by) => {
                let by = by * scale;
                d.iter_mut().zip(&*ds).for_each(|(d, &ds)| *d = if ds == 0.0 { 0.0 } else { ds * by });
            }
            Value::Many(by) => {
                for ((d, &ds), &by) in d.iter_mut().zip(&*ds).zip(by) {
                    *d = if ds == 0.0 { 0.0 } else { ds * (by * scale) };
                }
            }
        }
    }

    /// `Σ by · ds`; where the second is zero the first is not looked at.
    fn inner(by: Value, ds: &[f32]) -> f32 {
        let mut products = [0.0; BLOCK];
        let products = &mut products[..ds.len()];
        both(by, Value::Many(ds), products, |by, ds| if ds == 0.0 { 0.0 } else { by * ds });
        sum::<FMA>(products)
    }

    /// `sums += by · ds`, likewise.
    fn add_products(by: Value, ds: &[f32], sums: &mut [f32]) {
        match by {
            Value::One(by) => sums.iter_mut().zip(ds).for_each(|(s, &ds)| *s = fma::<FMA>(by, ds, *s)),
            Value::Many(by) => {
                for ((s, &ds), &by) in sums.iter_mut().zip(ds).zip(by) {
                    *s = if ds == 0.0 { *s } else { fma::<FMA>(by, ds, *s) };
                }
            }
        }
    }

    fn drop_row(draw: i32, head: usize, first: usize, threshold: u32, factor: f32, row: &mut [f32]) {
        for (j, x) in row.iter_mut().enumerate() {
            *x = if kept(draw, head, first + j, threshold) { *x * factor } else { 0.0 };
        }
    }
}
