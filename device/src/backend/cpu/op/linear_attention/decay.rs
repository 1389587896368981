//! Decays within a chunk.
//!
//! All are products of the factors of single tokens, none a quotient: nothing overflows, and a
//! factor of 0, as the first token of a document has one, hides what is before it. Of heads the
//! decays of all pairs of tokens are a matrix. Of channels they are factors of rows, to and from
//! the begins of parts of [`PART`] tokens, and within a part row after row.

use super::chunk::{CHUNK, Left, PART, Sizes, take};
use crate::backend::cpu::simd::{add, add_scaled, dot, fma, inner, kernel_fn, scale, sum};
use dreamc_compiler::op::Decay;
use std::ops::Range;

/// The decays of a chunk.
pub(super) struct Decays<'s> {
    /// Factors of tokens, of each channel where those differ.
    pub factors: &'s mut [f32],
    /// Tokens that begin a document: what reads the state before them reads zero.
    pub begins: [bool; CHUNK],
    /// Of all tokens so far; of heads.
    so_far: [f32; CHUNK],
    /// Of heads, decays of pairs of tokens. Of channels, rows of a right operand with the decays up
    /// to the begin of a part.
    near: &'s mut [f32],
    /// Of the whole chunk.
    total: &'s mut [f32],
    /// Rows of a part.
    room: &'s mut [f32],
}

kernel_fn! {
    /// `y = x ⊙ y`.
    fn times(x: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y *= *x);
    }

    /// `y += x ⊙ z`.
    fn add_product(x: &[f32], z: &[f32], y: &mut [f32]) {
        for ((y, x), z) in y.iter_mut().zip(x).zip(z) {
            *y = fma::<FMA>(*x, *z, *y);
        }
    }

    /// `z = x ⊙ y`.
    fn product(x: &[f32], y: &[f32], z: &mut [f32]) {
        for ((z, x), y) in z.iter_mut().zip(x).zip(y) {
            *z = *x * *y;
        }
    }

    /// Decays from each token to each later one. Decays too small for a normal number are 0:
    /// others are slow.
    fn pairs(factors: &[f32], stride: usize, to: &mut [f32]) {
        for (i, &a) in factors.iter().enumerate() {
            let (done, rest) = to.split_at_mut(i * stride);
            let row = &mut rest[..i + 1];
            if i > 0 {
                let before = &done[(i - 1) * stride..][..i];
                for (to, x) in row.iter_mut().zip(before) {
                    let x = a * *x;
                    *to = if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
                }
            }
            row[i] = 1.0;
        }
    }

    /// The gradient of the logarithm of each token's factor from pairs of tokens around it: `later`
    /// has scores that read the state of their token, `before` those that read the state before it,
    /// both with their cotangents.
    fn around(
        n: usize,
        stride: usize,
        later: [[&[f32]; 2]; 2],
        before: [[&[f32]; 2]; 2],
        to: &mut [f32],
    ) {
        let mut passing = [0.0; CHUNK];
        for i in (0..n).rev() {
            for [score, d] in later {
                if !score.is_empty() {
                    let row = i * stride..i * stride + i;
                    let pairs = passing.iter_mut().zip(&score[row.clone()]).zip(&d[row]);
                    pairs.for_each(|((sum, x), d)| *sum = fma::<FMA>(*x, *d, *sum));
                }
            }
            for [score, d] in before {
                if !score.is_empty() && i + 1 < n {
                    let row = (i + 1) * stride..(i + 1) * stride + i;
                    let pairs = passing.iter_mut().zip(&score[row.clone()]).zip(&d[row]);
                    pairs.for_each(|((sum, x), d)| *sum = fma::<FMA>(*x, *d, *sum));
                }
            }
            to[i] += sum::<FMA>(&passing[..i]);
        }
    }

    /// `diag(a) x` of the rows of a panel.
    fn scale_rows(a: &[f32], panel: usize, x: &mut [f32]) {
        for (a, x) in a.iter().zip(x.chunks_exact_mut(panel)) {
            x.iter_mut().for_each(|x| *x *= *a);
        }
    }

    /// Adds the inner products of the rows of two panels.
    fn inner_rows(x: &[f32], y: &[f32], panel: usize, to: &mut [f32]) {
        for ((to, x), y) in to.iter_mut().zip(x.chunks_exact(panel)).zip(y.chunks_exact(panel)) {
            *to += dot::<FMA>(x, y);
        }
    }
}

/// Row `i`.
fn at(x: &[f32], i: usize, line: usize, size: usize) -> &[f32] {
    &x[i * line..][..size]
}

fn at_mut(x: &mut [f32], i: usize, line: usize, size: usize) -> &mut [f32] {
    &mut x[i * line..][..size]
}

/// Parts of `n` tokens.
fn parts(n: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    (0..n.div_ceil(PART)).map(move |p| p * PART..((p + 1) * PART).min(n))
}

/// Cotangents of a chunk: of `q`, `k`, `u`, `w` and of the same with their decays, of scores, and
/// of the logarithms of factors.
pub(super) struct Back<'s> {
    pub rows: [&'s mut [f32]; 4],
    pub decayed: [&'s mut [f32]; 4],
    pub scores: [&'s mut [f32]; 4],
    pub decay: &'s mut [f32],
    /// Of channels, the inner products of the state after the chunk and its cotangent; of heads, of
    /// the state before the chunk and its cotangent from the tokens after.
    pub flow: &'s mut [f32],
    /// Of channels: cotangents that cross begins of parts, those that read the state of their
    /// token, those that read the state before it, and those of what enters it.
    pub across: [&'s mut [f32]; 3],
}

/// A chunk's numbers of `q`, `k`, `u` and `w`.
type Rows<'a> = [&'a [f32]; 4];

impl<'s> Decays<'s> {
    pub(super) fn new(s: &Sizes, near: &'s mut [f32], mut factors: &'s mut [f32]) -> Self {
        Decays {
            begins: [false; CHUNK],
            so_far: [1.0; CHUNK],
            near,
            total: take(&mut factors, s.line),
            room: take(&mut factors, PART * s.line),
            factors,
        }
    }

    fn by_channel(s: &Sizes) -> bool {
        s.decay == Decay::Channel
    }

    /// The factors of a token.
    pub(super) fn factor_mut(&mut self, s: &Sizes, i: usize) -> &mut [f32] {
        match Self::by_channel(s) {
            true => at_mut(self.factors, i, s.line, s.size),
            false => &mut self.factors[i..i + 1],
        }
    }

    fn factor(&self, s: &Sizes, i: usize) -> &[f32] {
        at(self.factors, i, s.line, s.size)
    }

    /// Follows from the factors: decays of the chunk and, of a head, of pairs of tokens.
    pub(super) fn prepare(&mut self, s: &Sizes, n: usize) {
        if Self::by_channel(s) {
            let total = &mut self.total[..s.size];
            total.fill(1.0);
            (0..n).for_each(|i| times(at(self.factors, i, s.line, s.size), total));
            return;
        }
        let mut product = 1.0;
        for (to, a) in self.so_far.iter_mut().zip(&self.factors[..n]) {
            product *= a;
            *to = product;
        }
        self.total[0] = product;
        pairs(&self.factors[..n], s.stride, self.near);
    }

    /// The decay from the begin of the chunk, of a head.
    fn since_begin(&self, i: usize, before: bool) -> f32 {
        match (before, i) {
            (false, _) => self.so_far[i],
            (true, _) if self.begins[i] => 0.0,
            (true, 0) => 1.0,
            (true, _) => self.so_far[i - 1],
        }
    }

    /// The decay of a row of operand `k` (`q`, `k`, `u`, `w`) from the begin of the chunk or to its
    /// end, of a head.
    pub(super) fn of_row(&self, s: &Sizes, n: usize, k: usize, i: usize) -> f32 {
        match k {
            0 => self.since_begin(i, s.before),
            2 => self.since_begin(i, true),
            _ => self.near[(n - 1) * s.stride + i],
        }
    }

    /// Rows of values in panels with the decays of the rows of operand `k`.
    pub(super) fn scale_values(&self, s: &Sizes, n: usize, k: usize, x: &mut [f32]) {
        let factors: [f32; CHUNK] =
            std::array::from_fn(|i| if i < n { self.of_row(s, n, k, i) } else { 0.0 });
        for panel in x.chunks_exact_mut(n * s.panel).take(s.wide / s.panel) {
            scale_rows(&factors[..n], s.panel, panel);
        }
    }

    /// Rows with the decays from the begin of the chunk.
    pub(super) fn scaled_since_begin(
        &mut self,
        s: &Sizes,
        n: usize,
        x: &[f32],
        to: &mut [f32],
        before: bool,
    ) {
        if Self::by_channel(s) {
            return self.since_begin_of(s, 0..n, x, to, before);
        }
        for i in 0..n {
            let from = at(x, i, s.line, s.size);
            scale(self.since_begin(i, before), from, at_mut(to, i, s.line, s.size));
        }
    }

    /// Rows of a part with the decays of channels since its begin.
    fn since_begin_of(&mut self, s: &Sizes, part: Range<usize>, x: &[f32], to: &mut [f32], before: bool) {
        // The product so far stands in the first row of the room.
        let room = &mut self.room[..s.size];
        room.fill(1.0);
        for i in part {
            let (own, factor) = (at_mut(to, i, s.line, s.size), at(self.factors, i, s.line, s.size));
            if before {
                match self.begins[i] {
                    true => own.fill(0.0),
                    false => product(room, at(x, i, s.line, s.size), own),
                }
                times(factor, room);
            } else {
                times(factor, room);
                product(room, at(x, i, s.line, s.size), own);
            }
        }
    }

    /// Rows of a part with the decays of channels to its end; the decay of the whole part is left
    /// in the first row of the room.
    fn until_end_of(&mut self, s: &Sizes, part: Range<usize>, x: &[f32], to: &mut [f32]) {
        let room = &mut self.room[..s.size];
        room.fill(1.0);
        for i in part.rev() {
            product(room, at(x, i, s.line, s.size), at_mut(to, i, s.line, s.size));
            times(at(self.factors, i, s.line, s.size), room);
        }
    }

    /// Rows with the decays to the end of the chunk.
    pub(super) fn scaled_until_end(&mut self, s: &Sizes, n: usize, x: &[f32], to: &mut [f32]) {
        if Self::by_channel(s) {
            return self.until_end_of(s, 0..n, x, to);
        }
        for i in 0..n {
            let decay = self.near[(n - 1) * s.stride + i];
            let from = at(x, i, s.line, s.size);
            scale(decay, from, at_mut(to, i, s.line, s.size));
        }
    }

    /// A state with the decay of the whole chunk.
    pub(super) fn whole(&self, s: &Sizes, state: &mut [f32]) {
        if !Self::by_channel(s) {
            if self.total[0] != 1.0 {
                state.iter_mut().for_each(|x| *x *= self.total[0]);
            }
            return;
        }
        for state in state.chunks_exact_mut(s.size * s.panel) {
            scale_rows(&self.total[..s.size], s.panel, state);
        }
    }

    /// Scores of one left operand, from its products without decays, up to the diagonal.
    pub(super) fn scores_of(&self, s: &Sizes, n: usize, products: &[f32], left: Left) {
        for i in 0..n {
            at_mut(left.to, i, s.stride, i + 1).copy_from_slice(at(products, i, s.stride, i + 1));
        }
        self.weigh(s, n, left.to, left.before);
    }

    /// Scores of left operands with a right one, with their decays.
    pub(super) fn scores(
        &mut self,
        s: &Sizes,
        n: usize,
        right: &[f32],
        mut lefts: [Option<Left>; 2],
        [packed, room]: &mut [&mut [f32]; 2],
    ) {
        if Self::by_channel(s) {
            return self.scores_by_channel(s, n, right, &mut lefts, [packed, room]);
        }
        s.pack_lines(right, s.line, [n, s.size], packed, room);
        for left in lefts.iter_mut().flatten() {
            let rows = s.rows_of(left.rows, s.line, [n, s.size], room);
            s.multiply_below([n, s.size], rows, packed, left.to);
            self.weigh(s, n, left.to, left.before);
        }
    }

    /// Scores with their decays; those of later tokens are 0.
    pub(super) fn weigh(&self, s: &Sizes, n: usize, scores: &mut [f32], before: bool) {
        for i in 0..n {
            let row = at_mut(scores, i, s.stride, n);
            let seen = match before {
                true if self.begins[i] => 0,
                true => i,
                false => i + 1,
            };
            let decays = if before { i.saturating_sub(1) } else { i };
            row[seen..].fill(0.0);
            times(&self.near[decays * s.stride..][..seen], &mut row[..seen]);
        }
    }

    /// Brings the rows of a right operand before a part to its begin.
    fn approach(&mut self, s: &Sizes, part: &Range<usize>, right: &[f32]) {
        let near = std::mem::take(&mut self.near);
        let last = part.start - PART..part.start;
        self.until_end_of(s, last.clone(), right, near);
        (0..last.start).for_each(|l| times(&self.room[..s.size], at_mut(near, l, s.line, s.size)));
        self.near = near;
    }

    fn scores_by_channel(
        &mut self,
        s: &Sizes,
        n: usize,
        right: &[f32],
        lefts: &mut [Option<Left>; 2],
        [packed, room]: [&mut [f32]; 2],
    ) {
        for part in parts(n) {
            if part.start > 0 {
                self.approach(s, &part, right);
                s.pack_lines(self.near, s.line, [part.start, s.size], packed, room);
            }
            for left in lefts.iter_mut().flatten() {
                let rows = &mut left.to[part.start * s.stride..];
                if part.start > 0 {
                    self.rows_of_part(s, &part, left.rows, left.before);
                    let own = &self.near[part.start * s.line..];
                    let own = s.rows_of(own, s.line, [part.len(), s.size], room);
                    s.multiply((part.len(), part.start, s.size), own, packed, rows, s.stride, false);
                }
                for row in rows.chunks_mut(s.stride).take(part.len()) {
                    row[part.start..n].fill(0.0);
                }
            }
            for l in part.clone() {
                self.column(s, l..part.end, right, lefts);
            }
        }
    }

    /// Rows of a part with the decays since its beginning, after those of the right operand.
    fn rows_of_part(&mut self, s: &Sizes, part: &Range<usize>, rows: &[f32], before: bool) {
        let near = std::mem::take(&mut self.near);
        self.since_begin_of(s, part.clone(), rows, near, before);
        self.near = near;
    }

    /// Scores of one row of the right operand with the rows from it to the end of its part.
    fn column(&mut self, s: &Sizes, rows: Range<usize>, right: &[f32], lefts: &mut [Option<Left>; 2]) {
        let (l, key) = (rows.start, &mut self.room[..s.size]);
        key.copy_from_slice(at(right, l, s.line, s.size));
        for i in rows {
            let mut give = |key: &[f32], before: bool| {
                for left in lefts.iter_mut().flatten().filter(|left| left.before == before) {
                    left.to[i * s.stride + l] = inner(at(left.rows, i, s.line, s.size), key);
                }
            };
            if i > l {
                if !self.begins[i] {
                    give(key, true);
                }
                times(at(self.factors, i, s.line, s.size), key);
            }
            give(key, false);
        }
    }
}

/// Backward.
impl Decays<'_> {
    /// Cotangents of rows and factors from those of decayed rows and of scores. `rows` and `scores`
    /// are the chunk's.
    pub(super) fn back(
        &mut self,
        s: &Sizes,
        n: usize,
        (rows, scores): (Rows, Rows),
        d: &mut Back,
        rooms: [&mut [f32]; 2],
    ) {
        match Self::by_channel(s) {
            true => self.back_by_channel(s, n, rows, d, rooms),
            false => self.back_by_head(s, n, (rows, scores), d, rooms),
        }
    }

    fn back_by_head(
        &mut self,
        s: &Sizes,
        n: usize,
        (rows, scores): (Rows, Rows),
        d: &mut Back,
        [packed, room]: [&mut [f32]; 2],
    ) {
        let there = [true, true, s.with_u(), s.with_w()];
        let before = |k: usize| k == 2 || s.before;
        if s.decay != Decay::None {
            self.back_factors(s, n, (rows, scores), d);
        }
        for k in (0..4).filter(|k| there[*k]) {
            for i in 0..n {
                let decay = self.of_row(s, n, k, i);
                let from = at(d.decayed[k], i, s.line, s.size);
                scale(decay, from, at_mut(d.rows[k], i, s.line, s.size));
            }
        }
        // Of `u` with `k` and `w`, of `q` with `k` and `w`.
        for (score, [left, right]) in [[2, 1], [2, 3], [0, 1], [0, 3]].into_iter().enumerate() {
            if !(there[left] && there[right]) {
                continue;
            }
            self.weigh(s, n, d.scores[score], before(left));
            let of = &d.scores[score];
            s.pack_steps(rows[right], s.line, [s.size, n], packed);
            let lines = s.rows_of(of, s.stride, [n, n], room);
            s.multiply_lower((n, s.size), lines, packed, d.rows[left], s.line, true);
            s.pack_steps(rows[left], s.line, [s.size, n], packed);
            let lines = s.columns_of(of, s.stride, [n, n], room);
            s.multiply_lower((n, s.size), lines, packed, d.rows[right], s.line, true);
        }
    }

    /// Cotangents of the logarithms of the factors of a head: what passes each token, from tokens
    /// before it, or the state before the chunk, to tokens after it, or the state after the chunk.
    pub(super) fn back_factors(&self, s: &Sizes, n: usize, (rows, scores): (Rows, Rows), d: &mut Back) {
        let of = |k: usize, i: usize| {
            let both = inner(at(rows[k], i, s.line, s.size), at(d.decayed[k], i, s.line, s.size));
            self.of_row(s, n, k, i) * both
        };
        let whole = self.total[0] * d.flow.iter().sum::<f32>();
        let mut since_begin = 0.0;
        for i in (0..n).rev() {
            if !s.before {
                since_begin += of(0, i);
            }
            d.decay[i] = whole + since_begin;
            if s.before {
                since_begin += of(0, i);
            }
            if s.with_u() {
                since_begin += of(2, i);
            }
        }
        let mut until_end = 0.0;
        for i in 0..n {
            d.decay[i] += until_end;
            until_end += of(1, i);
            if s.with_w() {
                until_end += of(3, i);
            }
        }
        let pair = |k: usize, there: bool| -> [&[f32]; 2] {
            if there { [scores[k], d.scores[k]] } else { [&[], &[]] }
        };
        let of_u = [pair(0, s.with_u()), pair(1, s.with_w())];
        let of_q = [pair(2, true), pair(3, s.with_w())];
        let none = [pair(0, false), pair(1, false)];
        match s.before {
            false => around(n, s.stride, of_q, of_u, d.decay),
            true => {
                around(n, s.stride, none, of_u, d.decay);
                around(n, s.stride, none, of_q, d.decay);
            }
        }
    }

    fn back_by_channel(
        &mut self,
        s: &Sizes,
        n: usize,
        rows: [&[f32]; 4],
        d: &mut Back,
        [packed, room]: [&mut [f32]; 2],
    ) {
        let there = [true, true, s.with_u(), s.with_w()];
        let before = [s.before, false, true, false];
        // From the state before the chunk, and from rows before each part.
        for left in [0, 2].into_iter().filter(|k| there[*k]) {
            self.scaled_since_begin(s, n, d.decayed[left], d.rows[left], before[left]);
        }
        for right in [1, 3].into_iter().filter(|k| there[*k]) {
            self.back_to_lefts(s, n, rows[right], right, d, [packed, room]);
            self.back_to_right(s, n, rows, right, d, [packed, room]);
        }
        for across in &mut d.across {
            across[..n * s.line].fill(0.0);
        }
        for k in (0..4).filter(|k| there[*k]) {
            let place = if k % 2 == 1 { 2 } else { usize::from(before[k]) };
            for i in 0..n {
                let to = at_mut(d.across[place], i, s.line, s.size);
                add_product(at(rows[k], i, s.line, s.size), at(d.rows[k], i, s.line, s.size), to);
            }
        }
        self.back_flows(s, n, d);
        for right in [1, 3].into_iter().filter(|k| there[*k]) {
            for part in parts(n) {
                for l in part.clone() {
                    self.back_column(s, l..part.end, rows, right, d);
                }
            }
        }
    }

    /// The score of a left and a right operand.
    fn score(left: usize, right: usize) -> usize {
        usize::from(left == 0) * 2 + usize::from(right == 3)
    }

    /// Adds to the cotangents of left operands what rows of a right one before their part give.
    fn back_to_lefts(
        &mut self,
        s: &Sizes,
        n: usize,
        rows: &[f32],
        right: usize,
        d: &mut Back,
        [packed, room]: [&mut [f32]; 2],
    ) {
        for part in parts(n).skip(1) {
            self.approach(s, &part, rows);
            s.pack_steps(self.near, s.line, [s.size, part.start], packed);
            for (left, before) in [(0, s.before), (2, true)] {
                if left == 2 && !s.with_u() {
                    continue;
                }
                let near = std::mem::take(&mut self.near);
                let (_, own) = near.split_at_mut(part.start * s.line);
                let score = &d.scores[Self::score(left, right)][part.start * s.stride..];
                let score = s.rows_of(score, s.stride, [part.len(), part.start], room);
                s.multiply((part.len(), s.size, part.start), score, packed, own, s.line, false);
                // With the decays since the part's begin.
                let room = &mut self.room[..s.size];
                room.fill(1.0);
                for (i, own) in part.clone().zip(own.chunks_mut(s.line)) {
                    let (own, factor) = (&own[..s.size], at(self.factors, i, s.line, s.size));
                    let to = at_mut(d.rows[left], i, s.line, s.size);
                    if !before {
                        times(factor, room);
                    }
                    if !(before && self.begins[i]) {
                        add_product(room, own, to);
                    }
                    if before {
                        times(factor, room);
                    }
                }
                self.near = near;
            }
        }
    }

    /// The cotangent of a right operand from the state after the chunk and from rows after each
    /// part.
    fn back_to_right(
        &mut self,
        s: &Sizes,
        n: usize,
        rows: [&[f32]; 4],
        right: usize,
        d: &mut Back,
        [packed, room]: [&mut [f32]; 2],
    ) {
        let own = std::mem::take(&mut d.decayed[right]);
        for part in parts(n).rev() {
            self.until_end_of(s, part.clone(), own, d.rows[right]);
            (0..part.start).for_each(|l| times(&self.room[..s.size], at_mut(own, l, s.line, s.size)));
            for (left, before) in [(0, s.before), (2, true)] {
                if part.start == 0 || (left == 2 && !s.with_u()) {
                    continue;
                }
                self.rows_of_part(s, &part, rows[left], before);
                s.pack_steps(&self.near[part.start * s.line..], s.line, [s.size, part.len()], packed);
                let score = &d.scores[Self::score(left, right)][part.start * s.stride..];
                let score = s.columns_of(score, s.stride, [part.start, part.len()], room);
                s.multiply((part.start, s.size, part.len()), score, packed, own, s.line, true);
            }
        }
        d.decayed[right] = own;
    }

    /// Cotangents of the logarithms of the factors of channels from what crosses begins of parts.
    fn back_flows(&mut self, s: &Sizes, n: usize, d: &mut Back) {
        let [later, before, right] = &d.across;
        let flow = &mut d.flow[..s.size];
        for part in parts(n).rev() {
            // The flow that passes the whole part.
            for l in part.clone() {
                add_scaled(-1.0, at(right, l, s.line, s.size), flow);
            }
            let sum = &mut self.room[..s.size];
            sum.copy_from_slice(flow);
            for i in part.clone().rev() {
                add(at(later, i, s.line, s.size), sum);
                at_mut(d.decay, i, s.line, s.size).copy_from_slice(sum);
                add(at(before, i, s.line, s.size), sum);
            }
            flow.copy_from_slice(sum);
            let sum = &mut self.room[..s.size];
            sum.fill(0.0);
            for l in part {
                add(sum, at_mut(d.decay, l, s.line, s.size));
                add(at(right, l, s.line, s.size), sum);
            }
        }
    }

    /// The cotangents of one row of the right operand and of the rows from it to the end of its
    /// part, from their scores.
    fn back_column(
        &mut self,
        s: &Sizes,
        column: Range<usize>,
        rows: [&[f32]; 4],
        right: usize,
        d: &mut Back,
    ) {
        let l = column.start;
        // The row at each token.
        for (m, i) in column.clone().enumerate() {
            let (done, rest) = self.room.split_at_mut(m * s.line);
            let to = &mut rest[..s.size];
            match m {
                0 => to.copy_from_slice(at(rows[right], l, s.line, s.size)),
                _ => product(at(done, m - 1, s.line, s.size), at(self.factors, i, s.line, s.size), to),
            }
        }
        let near = std::mem::take(&mut self.near);
        let dkey = &mut near[..s.size];
        dkey.fill(0.0);
        for (m, i) in column.enumerate().rev() {
            let mut give = |left: usize, key: &[f32], dkey: &mut [f32]| {
                let score = d.scores[Self::score(left, right)][i * s.stride + l];
                add_scaled(score, key, at_mut(d.rows[left], i, s.line, s.size));
                add_scaled(score, at(rows[left], i, s.line, s.size), dkey);
            };
            if !s.before {
                give(0, at(self.room, m, s.line, s.size), dkey);
            }
            if m == 0 {
                break;
            }
            add_product(at(self.room, m, s.line, s.size), dkey, at_mut(d.decay, i, s.line, s.size));
            times(self.factor(s, i), dkey);
            if !self.begins[i] {
                let key = at(self.room, m - 1, s.line, s.size);
                if s.before {
                    give(0, key, dkey);
                }
                if s.with_u() {
                    give(2, key, dkey);
                }
            }
        }
        add(dkey, at_mut(d.rows[right], l, s.line, s.size));
        self.near = near;
    }

    /// Inner products of a state and its cotangent, by channels.
    pub(super) fn flow(s: &Sizes, state: &[f32], cotangent: &[f32], to: &mut [f32]) {
        let to = &mut to[..s.size];
        to.fill(0.0);
        let panels = state.chunks_exact(s.size * s.panel).zip(cotangent.chunks_exact(s.size * s.panel));
        for (state, cotangent) in panels {
            inner_rows(state, cotangent, s.panel, to);
        }
    }
}
