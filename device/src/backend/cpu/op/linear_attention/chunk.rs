//! Some tokens of one head at a time, as products.
//!
//! With `x_j = v_j + S_{j-1} u_j` (of a delta rule; `v_j` where there is none), `D_{l→i}` the
//! decays of the tokens after `l` up to `i`, and `S` the state before the chunk:
//!
//! - `X = V + Ũ S + A X`, `A` below its diagonal `u_j · D_{l→j-1} k_l`: a triangle to solve (the WY
//!   form; Yang et al. 2406.06484, 2412.06464),
//! - `O = Q̃ S + B X`, `B` up to its diagonal `q_i · D_{l→i} k_l` (Dao and Gu 2405.21060),
//! - the next state is `D S + K̃ᵀ X`.
//!
//! A tilde is a row with the decays from the chunk's begin, or to its end. States are kept as
//! panels of their values, in which products read and write them.

use super::{decay, operand};
use crate::backend::cpu::Stored;
use crate::backend::cpu::product::{self, panels};
use crate::backend::cpu::simd::{fma, kernel_fn};
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Decay, Delta};
use half::bf16;

/// Most tokens of a chunk.
pub(super) const CHUNK: usize = 64;
/// Tokens of a part of it within which decays of channels are multiplied pair by pair, and
/// triangles solved row by row.
pub(super) const PART: usize = 16;

/// A fault that a test puts into chunks.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The product that a token adds decays with the state before it.
    LateDecay,
    /// The state before a chunk is zero.
    LostState,
    /// A document goes on after its end.
    OpenDocument,
    /// A triangle lacks its last row.
    OpenTriangle,
    /// Products of the first group of heads are taken for all.
    OtherHead,
    /// Heads that share queries and keys add nothing to their cotangents but the first.
    LostHead,
}

#[cfg(test)]
thread_local! {
    /// The fault of kernels that this thread launches.
    pub(super) static FAULT: std::cell::Cell<Fault> = const { std::cell::Cell::new(Fault::None) };
}

/// Sizes as indices.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    #[cfg(test)]
    pub fault: Fault,
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub size: usize,
    pub value: usize,
    /// Columns of a panel.
    pub panel: usize,
    /// Values, in whole panels.
    pub wide: usize,
    /// Floats from row to row of keys.
    pub line: usize,
    /// Most tokens of a chunk.
    pub chunk: usize,
    /// Floats from row to row of scores.
    pub stride: usize,
    pub delta: Delta,
    pub decay: Decay,
    /// Whether outputs read the state before the token.
    pub before: bool,
    /// Whether operands of products are rounded to bf16.
    pub rounds: bool,
}

/// Steps that do not compete for the same places of the cache.
pub(super) fn apart(floats: usize) -> usize {
    floats.next_multiple_of(16) | 16
}

impl Sizes {
    pub(super) fn new(s: &LinearShape, delta: Delta, before: bool) -> Self {
        let panel = product::shape().columns;
        let chunk = (s.tokens as usize).clamp(1, CHUNK);
        Sizes {
            #[cfg(test)]
            fault: FAULT.get(),
            batch: s.batch as usize,
            tokens: s.tokens as usize,
            heads: s.head_count() as usize,
            size: s.size as usize,
            value: s.value as usize,
            panel,
            wide: (s.value as usize).next_multiple_of(panel),
            line: apart(s.size as usize),
            chunk,
            stride: apart(chunk),
            delta,
            decay: s.decay_kind(),
            before,
            rounds: false,
        }
    }

    /// The same with operands that are `T`.
    pub(super) fn storing<T: Stored>(self) -> Self {
        Sizes { rounds: operand::rounds::<T>(), ..self }
    }

    pub(super) fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk)
    }

    /// Floats of a state in panels.
    pub(super) fn state(&self) -> usize {
        self.size * self.wide
    }

    /// Floats of the values of a chunk in panels.
    pub(super) fn values(&self) -> usize {
        self.chunk * self.wide
    }

    pub(super) fn rows(&self) -> usize {
        self.chunk * self.line
    }

    pub(super) fn square(&self) -> usize {
        self.chunk * self.stride
    }

    /// Floats of a right operand of keys, scores or values.
    fn packed(&self) -> usize {
        let lines = self.size.max(self.chunk);
        panels(lines, lines.max(self.wide), self.panel)
    }

    /// Floats of a left operand of keys, scores or values.
    fn room(&self) -> usize {
        let lines = self.size.max(self.chunk);
        lines * apart(lines.max(self.wide))
    }

    /// Floats of rows of values.
    pub(super) fn rows_of_values(&self) -> usize {
        self.chunk * apart(self.wide)
    }

    /// Floats of the decays of a token.
    pub(super) fn decays(&self) -> usize {
        if self.decay == Decay::Channel { self.line } else { 1 }
    }

    /// Whether there is a delta.
    pub(super) fn with_u(&self) -> bool {
        self.delta != Delta::None
    }

    /// Whether `w` is not `k`.
    pub(super) fn with_w(&self) -> bool {
        self.delta == Delta::Pair
    }

    /// Floats of the buffers of a [`Chunk`], in order.
    fn lengths(&self) -> [usize; 21] {
        let (rows, square) = (self.rows(), self.square());
        let of = |there: bool, n: usize| if there { n } else { 0 };
        let (u, w) = (self.with_u(), self.with_w());
        let near = if self.decay == Decay::Channel { rows } else { square };
        let [us, ws] = [of(u, rows), of(w, rows)];
        let [a, aw] = [of(u, square), of(w, square)];
        [
            rows,
            rows,
            us,
            ws,
            rows,
            rows,
            us,
            ws,
            a,
            aw,
            square,
            of(w, square),
            self.values(),
            of(w, self.values()),
            near,
            self.chunk * self.decays() + self.line + PART * self.line,
            self.packed(),
            self.room(),
            self.state(),
            self.values(),
            of(w, self.values()),
        ]
    }

    /// Floats of a [`Chunk`].
    pub(super) fn floats(&self) -> usize {
        self.lengths().iter().sum()
    }
}

/// Takes the first floats of scratch.
pub(super) fn take<'s>(scratch: &mut &'s mut [f32], floats: usize) -> &'s mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(floats);
    *scratch = rest;
    taken
}

/// A left operand of words: rows some words apart, or columns.
#[derive(Clone, Copy)]
pub(super) enum Lines<'a> {
    Rows(&'a [f32], usize),
    Columns(&'a [f32], usize),
}

/// `c += a · b` of single panels, in f32 throughout: errors of a triangle grow with its length.
fn add_wide((m, panel, k): (usize, usize, usize), a: Lines, b: &[f32], c: &mut [f32]) {
    if m > 0 && k > 0 {
        operand::multiply::<f32>((m, panel, k), a, (b, k * panel), c, panel, true);
    }
}

impl Sizes {
    /// `c = a · b` or `c += a · b`: `m` lines of `a`, `k` steps, `b` panels of as many steps, `n`
    /// columns.
    pub(super) fn multiply(
        &self,
        (m, n, k): (usize, usize, usize),
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        self.multiply_by((m, n, k), a, (b, self.words(k) * self.panel), c, stride, accumulate);
    }

    /// The same of panels that are `panel` words apart.
    fn multiply_by(
        &self,
        (m, n, k): (usize, usize, usize),
        a: Lines,
        (b, panel): (&[f32], usize),
        c: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        if m == 0 || n == 0 || (k == 0 && accumulate) {
            return;
        }
        let b = (b, panel.max(self.panel));
        match self.rounds {
            true => operand::multiply::<bf16>((m, n, k), a, b, c, stride, accumulate),
            false => operand::multiply::<f32>((m, n, k), a, b, c, stride, accumulate),
        }
    }

    /// `c = a · b` or `c += a · b` of an `a` of `n` lines with nothing above its diagonal, or of
    /// its transpose, its columns as lines: bands of rows, each with the steps that it has. `b` is
    /// panels of `n` steps.
    pub(super) fn multiply_lower(
        &self,
        (n, columns): (usize, usize),
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let panel = self.words(n) * self.panel;
        // Bands begin with a word.
        let band = 2 * product::shape().rows;
        for first in (0..n).step_by(band) {
            let end = (first + band).min(n);
            let (rows, to) = (end - first, &mut c[first * stride..]);
            match a {
                Lines::Rows(a, step) => {
                    let a = Lines::Rows(&a[first * step..], step);
                    self.multiply_by((rows, columns, end), a, (b, panel), to, stride, accumulate);
                }
                Lines::Columns(a, step) => {
                    let a = Lines::Columns(&a[self.words(first) * step + first..], step);
                    let b = &b[self.words(first) * self.panel..];
                    self.multiply_by((rows, columns, n - first), a, (b, panel), to, stride, accumulate);
                }
            }
        }
    }

    /// Panel `p` of a matrix of `rows` rows.
    pub(super) fn panel_of<'a>(&self, x: &'a [f32], rows: usize, p: usize) -> &'a [f32] {
        &x[p * rows * self.panel..][..rows * self.panel]
    }

    pub(super) fn panel_mut<'a>(&self, x: &'a mut [f32], rows: usize, p: usize) -> &'a mut [f32] {
        &mut x[p * rows * self.panel..][..rows * self.panel]
    }

    /// `c = a · b` or `c += a · b`, `b` of `k` steps and `c` of `m` rows of values in panels.
    pub(super) fn multiply_panels(
        &self,
        (m, k): (usize, usize),
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        accumulate: bool,
    ) {
        for p in 0..self.wide / self.panel {
            let (b, c) = (self.panel_of(b, self.words(k), p), self.panel_mut(c, m, p));
            self.multiply((m, self.panel, k), a, b, c, self.panel, accumulate);
        }
    }

    /// `c = a · b` or `c += a · b` of values in panels, with nothing of `a` above its diagonal.
    pub(super) fn multiply_lower_panels(
        &self,
        n: usize,
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        accumulate: bool,
    ) {
        for p in 0..self.wide / self.panel {
            let (b, c) = (self.panel_of(b, self.words(n), p), self.panel_mut(c, n, p));
            #[cfg(test)]
            let n = n - usize::from(self.fault == Fault::OpenTriangle);
            self.multiply_lower((n, self.panel), a, b, c, self.panel, accumulate);
        }
    }

    /// Products of the first `n` rows of an operand with `n` columns, up to the diagonal and, of
    /// whole panels, somewhat above it.
    pub(super) fn multiply_below(&self, [n, k]: [usize; 2], a: Lines, b: &[f32], c: &mut [f32]) {
        let Lines::Rows(a, step) = a else { unreachable!("they are rows") };
        for (first, b) in (0..n).step_by(self.panel).zip(b.chunks(self.words(k) * self.panel)) {
            let (rows, size) =
                (Lines::Rows(&a[first * step..], step), (n - first, self.panel.min(n - first), k));
            self.multiply(size, rows, b, &mut c[first * self.stride + first..], self.stride, false);
        }
    }

    /// Solves `x = r + a · x` in the place of `r`, `a` below its diagonal.
    pub(super) fn solve(&self, n: usize, a: &[f32], x: &mut [f32]) {
        for p in 0..self.wide / self.panel {
            let x = self.panel_mut(x, n, p);
            for first in (0..n).step_by(PART) {
                let end = (first + PART).min(n);
                let (done, rest) = x.split_at_mut(first * self.panel);
                let rest = &mut rest[..(end - first) * self.panel];
                let left = Lines::Rows(&a[first * self.stride..], self.stride);
                add_wide((end - first, self.panel, first), left, done, rest);
                substitute(&a[first * self.stride + first..], self.stride, self.panel, rest);
            }
        }
    }

    /// Solves `x = r + aᵀ · x` in the place of `r`.
    pub(super) fn solve_back(&self, n: usize, a: &[f32], x: &mut [f32]) {
        for p in 0..self.wide / self.panel {
            let x = self.panel_mut(x, n, p);
            for first in (0..n).step_by(PART).rev() {
                let end = (first + PART).min(n);
                let (before, rest) = x.split_at_mut(first * self.panel);
                let rest = &mut rest[..(end - first) * self.panel];
                substitute_back(&a[first * self.stride + first..], self.stride, self.panel, rest);
                let left = Lines::Columns(&a[first * self.stride..], self.stride);
                add_wide((first, self.panel, end - first), left, rest, before);
            }
        }
    }
}

/// Sums that a row of a triangle is made of at a time: each waits for its own last step alone.
const SUMS: usize = 4;

/// `y += Σ a_j x_j`, for each row of `x` a number of `a`, `line` from one to the next.
#[inline(always)]
fn add_rows<const FMA: bool, const W: usize>(a: &[f32], line: usize, x: &[f32], y: &mut [f32]) {
    let (x, _) = x.as_chunks::<W>();
    let (fours, rest) = x.as_chunks::<SUMS>();
    let mut sums = [[0.0; W]; SUMS];
    for (k, four) in fours.iter().enumerate() {
        for (j, (sum, x)) in sums.iter_mut().zip(four).enumerate() {
            let a = a[(SUMS * k + j) * line];
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum = fma::<FMA>(a, *x, *sum));
        }
    }
    for (j, x) in rest.iter().enumerate() {
        let a = a[(SUMS * fours.len() + j) * line];
        sums[0].iter_mut().zip(x).for_each(|(sum, x)| *sum = fma::<FMA>(a, *x, *sum));
    }
    for (i, y) in y.iter_mut().enumerate() {
        *y += (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
}

/// Rows of a panel of `W` columns, each with multiples of those before it.
#[inline(always)]
fn down<const FMA: bool, const W: usize>(a: &[f32], stride: usize, x: &mut [f32]) {
    for i in 1..x.len() / W {
        let (done, rest) = x.split_at_mut(i * W);
        add_rows::<FMA, W>(&a[i * stride..], 1, done, &mut rest[..W]);
    }
}

/// The same with multiples of those after it, by the columns of `a`.
#[inline(always)]
fn up<const FMA: bool, const W: usize>(a: &[f32], stride: usize, x: &mut [f32]) {
    for j in (0..(x.len() / W).saturating_sub(1)).rev() {
        let (own, done) = x[j * W..].split_at_mut(W);
        add_rows::<FMA, W>(&a[(j + 1) * stride + j..], stride, done, own);
    }
}

kernel_fn! {
    /// Rows of a panel, each with multiples of those before it.
    fn substitute(a: &[f32], stride: usize, panel: usize, x: &mut [f32]) {
        match panel {
            32 => down::<FMA, 32>(a, stride, x),
            16 => down::<FMA, 16>(a, stride, x),
            _ => down::<FMA, 8>(a, stride, x),
        }
    }

    /// Rows of a panel, each with multiples of those after it.
    fn substitute_back(a: &[f32], stride: usize, panel: usize, x: &mut [f32]) {
        match panel {
            32 => up::<FMA, 32>(a, stride, x),
            16 => up::<FMA, 16>(a, stride, x),
            _ => up::<FMA, 8>(a, stride, x),
        }
    }
}

/// A chunk at work.
pub(super) struct Chunk<'s> {
    pub sizes: Sizes,
    /// Tokens of it.
    pub n: usize,
    /// `q`, `k`, `u`, `w`.
    pub rows: [&'s mut [f32]; 4],
    /// The same with the decays from the begin, or to the end.
    pub decayed: [&'s mut [f32]; 4],
    /// Products with decays: of `u` with `k` and `w`, of `q` with `k` and `w`.
    pub scores: [&'s mut [f32]; 4],
    /// Values that enter the state with `k`, and with `w`, in panels.
    pub values: [&'s mut [f32]; 2],
    pub decays: decay::Decays<'s>,
    /// Panels of a right operand.
    pub packed: &'s mut [f32],
    /// A left operand.
    pub room: &'s mut [f32],
    /// The state before the chunk, and what enters it, as right operands where those are rounded.
    state: &'s mut [f32],
    entered: [&'s mut [f32]; 2],
    /// Tokens that take part.
    pub takes: [bool; CHUNK],
}

impl<'s> Chunk<'s> {
    pub(super) fn new(sizes: Sizes, scratch: &mut &'s mut [f32]) -> Self {
        let mut lengths = sizes.lengths().into_iter();
        let mut next = || take(scratch, lengths.next().unwrap_or_default());
        let [rows, decayed, scores] = [(); 3].map(|()| [(); 4].map(|()| next()));
        let values = [(); 2].map(|()| next());
        let (near, factors) = (next(), next());
        let decays = decay::Decays::new(&sizes, near, factors);
        let (packed, room, state, entered) = (next(), next(), next(), [(); 2].map(|()| next()));
        let takes = [false; CHUNK];
        Chunk { sizes, n: 0, rows, decayed, scores, values, decays, packed, room, state, entered, takes }
    }

    /// Products of queries and keys without decays, up to the diagonal.
    pub(super) fn products(&mut self, to: &mut [f32]) {
        let (s, n) = (&self.sizes, self.n);
        s.pack_lines(self.rows[1], s.line, [n, s.size], self.packed, self.room);
        let rows = s.rows_of(self.rows[0], s.line, [n, s.size], self.room);
        s.multiply_below([n, s.size], rows, self.packed, to);
    }

    /// Decayed rows and scores; without those of queries where outputs are not wanted. Products of
    /// queries and keys that several heads have are given.
    pub(super) fn prepare(&mut self, queries: bool, products: Option<&[f32]>) {
        let (s, n) = (&self.sizes, self.n);
        let [q, k, u, w] = &self.rows;
        let [qs, ks, us, ws] = &mut self.decayed;
        let [a, aw, b, bw] = &mut self.scores;
        let d = &mut self.decays;
        d.prepare(s, n);
        if queries {
            d.scaled_since_begin(s, n, q, qs, s.before);
        }
        d.scaled_until_end(s, n, k, ks);
        if s.with_u() {
            d.scaled_since_begin(s, n, u, us, true);
        }
        if s.with_w() {
            d.scaled_until_end(s, n, w, ws);
        }
        let of_u = |to| s.with_u().then_some(Left { rows: u, before: true, to });
        let of_q = |to| queries.then_some(Left { rows: q, before: s.before, to });
        if let (Some(products), Delta::None) = (products, s.delta) {
            if let Some(left) = of_q(&mut **b) {
                d.scores_of(s, n, products, left);
            }
            return;
        }
        let mut room = [&mut *self.packed, &mut *self.room];
        d.scores(s, n, k, [of_u(&mut **a), of_q(&mut **b)], &mut room);
        if s.with_w() {
            d.scores(s, n, w, [of_u(&mut **aw), of_q(&mut **bw)], &mut room);
        }
    }

    /// The state before the chunk as a right operand.
    fn before<'a>(&'a self, state: &'a [f32]) -> &'a [f32] {
        if self.sizes.rounds { self.state } else { state }
    }

    /// The values that enter the state as a right operand: with keys, or with `w`.
    fn entered(&self, k: usize) -> &[f32] {
        if self.sizes.rounds { self.entered[k] } else { self.values[k] }
    }

    /// Brings what enters the state, from `v`; `reads` says whether the state is read for outputs.
    pub(super) fn enter(&mut self, state: &[f32], reads: bool) {
        let (s, n) = (&self.sizes, self.n);
        if reads || s.with_u() {
            s.round_panels(state, s.size, self.state);
        }
        let before = if s.rounds { &*self.state } else { state };
        let (us, [a, aw, ..]) = (&self.decayed[2], &self.scores);
        let ([x, p], [entered, other]) = (&mut self.values, &mut self.entered);
        match s.delta {
            Delta::None => {}
            Delta::Key => {
                let u = s.rows_of(us, s.line, [n, s.size], self.room);
                s.multiply_panels((n, s.size), u, before, x, true);
                s.solve(n, a, x);
            }
            Delta::Pair => {
                let u = s.rows_of(us, s.line, [n, s.size], self.room);
                s.multiply_panels((n, s.size), u, before, p, false);
                let a = s.rows_of(a, s.stride, [n, n], self.room);
                s.multiply_lower_panels(n, a, s.steps_of_panels(x, n, entered), p, true);
                s.solve(n, aw, p);
                s.round_panels(p, n, other);
            }
        }
        if s.delta != Delta::Pair {
            s.round_panels(x, n, entered);
        }
    }

    /// Outputs, in panels.
    pub(super) fn read(&mut self, state: &[f32], o: &mut [f32]) {
        let (s, n) = (self.sizes, self.n);
        let room = std::mem::take(&mut self.room);
        let q = s.rows_of(self.decayed[0], s.line, [n, s.size], room);
        s.multiply_panels((n, s.size), q, self.before(state), o, false);
        for k in 0..1 + usize::from(s.with_w()) {
            let scores = s.rows_of(self.scores[2 + k], s.stride, [n, n], room);
            s.multiply_lower_panels(n, scores, self.entered(k), o, true);
        }
        self.room = room;
    }

    /// The state after the chunk.
    pub(super) fn leave(&mut self, state: &mut [f32]) {
        let (s, n) = (self.sizes, self.n);
        let room = std::mem::take(&mut self.room);
        self.decays.whole(&s, state);
        for k in 0..1 + usize::from(s.with_w()) {
            let keys = s.columns_of(self.decayed[1 + 2 * k], s.line, [s.size, n], room);
            s.multiply_panels((s.size, n), keys, self.entered(k), state, true);
        }
        self.room = room;
    }
}

/// A left operand of scores.
pub(super) struct Left<'a> {
    pub rows: &'a [f32],
    /// Whether it reads the state before its token.
    pub before: bool,
    /// Where its scores go.
    pub to: &'a mut [f32],
}

/// Copies numbers as f32.
pub(super) fn widen<T: Stored>(from: &[T], to: &mut [f32]) {
    if T::NARROW {
        T::wide(from, to);
    } else {
        to.copy_from_slice(T::wide(from, &mut []));
    }
}
