//! Cotangents of a chunk.

use super::chunk::{Chunk, Lines, Sizes, take};
use super::decay::{Back, Decays};
use dreamc_compiler::op::{Decay, Delta};

/// Buffers of a chunk backward.
pub(super) struct Backward<'s> {
    pub parts: Back<'s>,
    /// Cotangents of outputs, in panels.
    pub out: &'s mut [f32],
    /// Of values, and of the products of states with `u`, in panels.
    pub values: [&'s mut [f32]; 2],
    /// Of the state after the chunk, in panels.
    pub state: &'s mut [f32],
}

impl Backward<'_> {
    /// Lengths of the buffers in order.
    fn lengths(s: &Sizes) -> [usize; 21] {
        let of = |there: bool, n: usize| if there { n } else { 0 };
        let [u, w] = [of(s.with_u(), s.rows()), of(s.with_w(), s.rows())];
        let [a, aw] = [of(s.with_u(), s.square()), of(s.with_w(), s.square())];
        let across = of(s.decay == Decay::Channel, s.rows());
        let values = s.values();
        [
            s.rows(),
            s.rows(),
            u,
            w,
            s.rows(),
            s.rows(),
            u,
            w,
            a,
            aw,
            s.square(),
            aw,
            s.chunk * s.decays(),
            s.size,
            across,
            across,
            across,
            values,
            values,
            of(s.with_w(), values),
            s.state(),
        ]
    }

    /// Floats of it.
    pub(super) fn floats(s: &Sizes) -> usize {
        Self::lengths(s).iter().sum()
    }
}

impl<'s> Backward<'s> {
    pub(super) fn new(s: &Sizes, scratch: &mut &'s mut [f32]) -> Self {
        let mut lengths = Self::lengths(s).into_iter();
        let mut next = || take(scratch, lengths.next().unwrap_or_default());
        let [rows, decayed, scores] = [(); 3].map(|()| [(); 4].map(|()| next()));
        let (decay, flow) = (next(), next());
        let parts = Back { rows, decayed, scores, decay, flow, across: [(); 3].map(|()| next()) };
        Backward { parts, out: next(), values: [(); 2].map(|()| next()), state: next() }
    }

    /// The backward of a chunk that is prepared and whose values have entered, from the states
    /// `before` and `behind`: before and after it.
    pub(super) fn run(&mut self, chunk: &mut Chunk, before: &[f32], behind: &[f32]) {
        let (s, n) = (&chunk.sizes, chunk.n);
        let [dx, dp] = &mut self.values;
        let (out, state) = (&*self.out, &mut *self.state);
        let [qs, ks, us, ws] = chunk.decayed.each_ref().map(|x| &**x);
        let [a, aw, b, bw] = chunk.scores.each_ref().map(|x| &**x);
        let [x, p] = chunk.values.each_ref().map(|x| &**x);
        s.multiply_lower_panels(n, Lines::Columns(b, s.stride), out, dx, false);
        s.multiply_panels((n, s.size), Lines::Rows(ks, s.line), state, dx, true);
        match s.delta {
            Delta::None => {}
            Delta::Key => s.solve_back(n, a, dx),
            Delta::Pair => {
                s.multiply_lower_panels(n, Lines::Columns(bw, s.stride), out, dp, false);
                s.multiply_panels((n, s.size), Lines::Rows(ws, s.line), state, dp, true);
                s.solve_back(n, aw, dp);
                s.multiply_lower_panels(n, Lines::Columns(a, s.stride), dp, dx, true);
            }
        }
        // The cotangent of the triangle's right side.
        let side: &[f32] = if s.with_w() { dp } else { dx };
        let (packed, parts) = (&mut *chunk.packed, &mut self.parts);
        let [da, daw, db, dbw] = &mut parts.scores;
        match s.delta {
            Delta::None => s.multiply_values_lower(n, x, &mut [(out, db)], packed),
            Delta::Key => s.multiply_values_lower(n, x, &mut [(out, db), (side, da)], packed),
            Delta::Pair => {
                s.multiply_values_lower(n, x, &mut [(out, db), (side, da)], packed);
                s.multiply_values_lower(n, p, &mut [(out, dbw), (side, daw)], packed);
            }
        }
        let [dqs, dks, dus, dws] = &mut parts.decayed;
        match s.with_u() {
            false => s.multiply_values(s.size, before, &mut [(n, out, dqs, s.line)], packed),
            true => {
                let mut both = [(n, out, &mut **dqs, s.line), (n, side, &mut **dus, s.line)];
                s.multiply_values(s.size, before, &mut both, packed);
            }
        }
        match s.with_w() {
            false => s.multiply_values(s.size, state, &mut [(n, x, dks, s.line)], packed),
            true => {
                let mut both = [(n, x, &mut **dks, s.line), (n, p, &mut **dws, s.line)];
                s.multiply_values(s.size, state, &mut both, packed);
            }
        }
        match s.decay {
            Decay::None => {}
            Decay::Head => Decays::flow(s, before, state, parts.flow),
            Decay::Channel => Decays::flow(s, behind, state, parts.flow),
        }
        chunk.decays.whole(s, state);
        s.multiply_panels((s.size, n), Lines::Columns(qs, s.line), out, state, true);
        if s.with_u() {
            s.multiply_panels((s.size, n), Lines::Columns(us, s.line), side, state, true);
        }
        let rows = chunk.rows.each_ref().map(|x| &**x);
        chunk.decays.back(s, n, (rows, [qs, ks, us, ws], [a, aw, b, bw]), parts, packed);
    }
}
