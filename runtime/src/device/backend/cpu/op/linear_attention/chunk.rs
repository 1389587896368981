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

use super::{decay, narrow};
use crate::device::backend::cpu::product::{self, Left as Operand, Right, Side, pack_columns, panels, tile};
use crate::device::backend::cpu::simd::{fma, kernel_fn};
use crate::device::backend::cpu::{Pointer, Stored};
use dreamc_compiler::op::linear_attention::kernel::LinearShape;
use dreamc_compiler::op::{Decay, Delta};

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
fn apart(floats: usize) -> usize {
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
        Sizes { rounds: narrow::rounds::<T>(), ..self }
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

    /// Floats of a right operand.
    fn packed(&self) -> usize {
        let (size, chunk) = (self.size, self.chunk);
        panels(chunk, size.max(self.panel), self.panel).max(panels(size, chunk.max(self.panel), self.panel))
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
    fn lengths(&self) -> [usize; 17] {
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

/// A left operand: rows some floats apart, or columns.
#[derive(Clone, Copy)]
pub(super) enum Lines<'a> {
    Rows(&'a [f32], usize),
    Columns(&'a [f32], usize),
}

/// `c = a · b` or `c += a · b`: `m` lines of `a`, `k` steps, `b` panels of as many steps, `n`
/// columns; in f32 throughout.
fn multiply_wide(
    (m, n, k): (usize, usize, usize),
    a: Lines,
    (b, panel): (&[f32], usize),
    c: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    assert!(c.len() >= (m - 1) * stride + n);
    let (to, right) = (Pointer::to(c), Right::apart(b, panel));
    match a {
        Lines::Rows(a, step) => {
            assert!(m <= CHUNK && a.len() >= (m - 1) * step + k);
            let start = Pointer(a.as_ptr().cast_mut());
            let lines: [Pointer<f32>; CHUNK] = std::array::from_fn(|i| start.add(i.min(m - 1) * step));
            // SAFETY: `m` lines of `k` steps are in `a`, and `c` has been measured.
            unsafe { tile::<f32>((m, n, k), Operand::Lines(&lines[..m]), right, to, stride, accumulate) }
        }
        Lines::Columns(a, step) => {
            assert!(k == 0 || a.len() >= (k - 1) * step + m);
            let left = Operand::Steps(Pointer(a.as_ptr().cast_mut()), step);
            // SAFETY: likewise.
            unsafe { tile::<f32>((m, n, k), left, right, to, stride, accumulate) }
        }
    }
}

/// `c += a · b` of single panels, in f32 throughout: errors of a triangle grow with its length.
fn add_wide((m, panel, k): (usize, usize, usize), a: Lines, b: &[f32], c: &mut [f32]) {
    if m > 0 && k > 0 {
        multiply_wide((m, panel, k), a, (b, k * panel), c, panel, true);
    }
}

/// Packs rows as the columns of a right operand: products with them are inner products.
pub(super) fn pack_lines(rows: &[f32], step: usize, lines: usize, size: usize, to: &mut [f32]) {
    assert!(lines == 0 || rows.len() >= (lines - 1) * step + size);
    let side = Side::Strided { start: Pointer(rows.as_ptr().cast_mut()), line: step, step: 1 };
    pack_columns(side, lines, size, to);
}

/// Packs rows as the steps of a right operand: products with them are sums of rows.
pub(super) fn pack_steps(rows: &[f32], step: usize, steps: usize, size: usize, to: &mut [f32]) {
    assert!(steps == 0 || rows.len() >= (steps - 1) * step + size);
    let side = Side::Strided { start: Pointer(rows.as_ptr().cast_mut()), line: 1, step };
    pack_columns(side, size, steps, to);
}

impl Sizes {
    /// `c = a · b` or `c += a · b`: `m` lines of `a`, `k` steps, `b` panels of as many steps, `n`
    /// columns. Operands are rounded where those of the kernel are bf16.
    pub(super) fn multiply(
        &self,
        (m, n, k): (usize, usize, usize),
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        self.multiply_by((m, n, k), a, (b, k * self.panel), c, stride, accumulate);
    }

    /// The same of panels that are `panel` floats apart.
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
            true => narrow::multiply((m, n, k), a, b, (c, stride, self.panel), accumulate),
            false => multiply_wide((m, n, k), a, b, c, stride, accumulate),
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
        // A rounded right operand is rounded again for every band.
        let band = if self.rounds { CHUNK / 2 } else { 2 * product::shape().rows };
        let panel = n * self.panel;
        for first in (0..n).step_by(band) {
            let end = (first + band).min(n);
            let (rows, to) = (end - first, &mut c[first * stride..]);
            match a {
                Lines::Rows(a, step) => {
                    let a = Lines::Rows(&a[first * step..], step);
                    self.multiply_by((rows, columns, end), a, (b, panel), to, stride, accumulate);
                }
                Lines::Columns(a, step) => {
                    let a = Lines::Columns(&a[first * step + first..], step);
                    let b = &b[first * self.panel..];
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

    /// `c = a · b` or `c += a · b`, `b` of `k` rows and `c` of `m` rows of values in panels.
    pub(super) fn multiply_panels(
        &self,
        (m, k): (usize, usize),
        a: Lines,
        b: &[f32],
        c: &mut [f32],
        accumulate: bool,
    ) {
        if self.rounds && m > 0 && k > 0 {
            let c = (c, self.panel, m * self.panel);
            return narrow::multiply((m, self.wide, k), a, (b, k * self.panel), c, accumulate);
        }
        for p in 0..self.wide / self.panel {
            let to = self.panel_mut(c, m, p);
            self.multiply((m, self.panel, k), a, self.panel_of(b, k, p), to, self.panel, accumulate);
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
            let (b, c) = (self.panel_of(b, n, p), self.panel_mut(c, n, p));
            #[cfg(test)]
            let n = n - usize::from(self.fault == Fault::OpenTriangle);
            self.multiply_lower((n, self.panel), a, b, c, self.panel, accumulate);
        }
    }

    /// Products over values: of `n` rows of each left operand with `n` rows `b`, up to the diagonal
    /// and, of whole panels, somewhat above it.
    pub(super) fn multiply_values_lower(
        &self,
        n: usize,
        b: &[f32],
        results: &mut [(&[f32], &mut [f32])],
        packed: &mut [f32],
    ) {
        for p in 0..self.wide / self.panel {
            pack_lines(self.panel_of(b, n, p), self.panel, n, self.panel, packed);
            for (a, c) in results.iter_mut() {
                let a = self.panel_of(a, n, p);
                let columns = (0..n).step_by(self.panel);
                for (first, right) in columns.zip(packed.chunks_exact(self.panel * self.panel)) {
                    let rows = Lines::Rows(&a[first * self.panel..], self.panel);
                    let size = (n - first, self.panel.min(n - first), self.panel);
                    self.multiply(
                        size,
                        rows,
                        right,
                        &mut c[first * self.stride + first..],
                        self.stride,
                        p > 0,
                    );
                }
            }
        }
    }

    /// Products over values: of rows of each left operand with `n` rows `b`.
    pub(super) fn multiply_values(
        &self,
        n: usize,
        b: &[f32],
        results: &mut [(usize, &[f32], &mut [f32], usize)],
        packed: &mut [f32],
    ) {
        for p in 0..self.wide / self.panel {
            pack_lines(self.panel_of(b, n, p), self.panel, n, self.panel, packed);
            for (m, a, c, stride) in results.iter_mut() {
                let a = Lines::Rows(self.panel_of(a, *m, p), self.panel);
                self.multiply((*m, n, self.panel), a, packed, c, *stride, p > 0);
            }
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

#[inline(always)]
fn add_row<const FMA: bool>(factor: f32, x: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = fma::<FMA>(factor, *x, *y));
}

kernel_fn! {
    /// Rows of a panel, each with multiples of those before it.
    fn substitute(a: &[f32], stride: usize, panel: usize, x: &mut [f32]) {
        for i in 1..x.len() / panel {
            let (done, rest) = x.split_at_mut(i * panel);
            for (a, done) in a[i * stride..].iter().zip(done.chunks_exact(panel)) {
                add_row::<FMA>(*a, done, &mut rest[..panel]);
            }
        }
    }

    /// Rows of a panel, each with multiples of those after it.
    fn substitute_back(a: &[f32], stride: usize, panel: usize, x: &mut [f32]) {
        for i in (1..x.len() / panel).rev() {
            let (before, own) = x.split_at_mut(i * panel);
            for (a, before) in a[i * stride..].iter().zip(before.chunks_exact_mut(panel)) {
                add_row::<FMA>(*a, &own[..panel], before);
            }
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
    pub packed: &'s mut [f32],
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
        Chunk { sizes, n: 0, rows, decayed, scores, values, decays, packed: next(), takes: [false; CHUNK] }
    }

    /// Products of queries and keys without decays, up to the diagonal.
    pub(super) fn products(&mut self, to: &mut [f32]) {
        let (s, n) = (&self.sizes, self.n);
        pack_lines(self.rows[1], s.line, n, s.size, self.packed);
        decay::products(s, n, self.rows[0], self.packed, to);
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
        d.scores(s, n, k, [of_u(&mut **a), of_q(&mut **b)], self.packed);
        if s.with_w() {
            d.scores(s, n, w, [of_u(&mut **aw), of_q(&mut **bw)], self.packed);
        }
    }

    /// Brings what enters the state, from `v`.
    pub(super) fn enter(&mut self, state: &[f32]) {
        let (s, n) = (&self.sizes, self.n);
        let (us, [a, aw, ..]) = (&self.decayed[2], &self.scores);
        let [x, p] = &mut self.values;
        match s.delta {
            Delta::None => {}
            Delta::Key => {
                s.multiply_panels((n, s.size), Lines::Rows(us, s.line), state, x, true);
                s.solve(n, a, x);
            }
            Delta::Pair => {
                s.multiply_panels((n, s.size), Lines::Rows(us, s.line), state, p, false);
                s.multiply_lower_panels(n, Lines::Rows(a, s.stride), x, p, true);
                s.solve(n, aw, p);
            }
        }
    }

    /// Outputs, in panels.
    pub(super) fn read(&self, state: &[f32], o: &mut [f32]) {
        let (s, n) = (&self.sizes, self.n);
        s.multiply_panels((n, s.size), Lines::Rows(self.decayed[0], s.line), state, o, false);
        s.multiply_lower_panels(n, Lines::Rows(self.scores[2], s.stride), self.values[0], o, true);
        if s.with_w() {
            s.multiply_lower_panels(n, Lines::Rows(self.scores[3], s.stride), self.values[1], o, true);
        }
    }

    /// The state after the chunk.
    pub(super) fn leave(&self, state: &mut [f32]) {
        let (s, n) = (&self.sizes, self.n);
        self.decays.whole(s, state);
        s.multiply_panels((s.size, n), Lines::Columns(self.decayed[1], s.line), self.values[0], state, true);
        if s.with_w() {
            s.multiply_panels(
                (s.size, n),
                Lines::Columns(self.decayed[3], s.line),
                self.values[1],
                state,
                true,
            );
        }
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
