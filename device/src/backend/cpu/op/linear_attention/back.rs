//! Cotangents of a chunk.

use super::chunk::{Chunk, Sizes, take};
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
    /// Left operands: cotangents of outputs and of the triangle's right side.
    pub lines: [&'s mut [f32]; 2],
    /// The same as right operands, and the cotangent of the state, where those are rounded.
    pub steps: [&'s mut [f32]; 3],
}

impl Backward<'_> {
    /// Lengths of the buffers in order.
    fn lengths(s: &Sizes) -> [usize; 26] {
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
            s.rows_of_values(),
            s.rows_of_values(),
            values,
            of(s.with_u(), values),
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
        let (out, values, state) = (next(), [(); 2].map(|()| next()), next());
        let (lines, steps) = ([(); 2].map(|()| next()), [(); 3].map(|()| next()));
        Backward { parts, out, values, state, lines, steps }
    }

    /// The backward of a chunk that is prepared and whose values have entered, from the states
    /// `before` and `behind`: before and after it.
    pub(super) fn run(&mut self, chunk: &mut Chunk, before: &[f32], behind: &[f32]) {
        let (s, n) = (chunk.sizes, chunk.n);
        let [dx, dp] = &mut self.values;
        let (out, state) = (&*self.out, &mut *self.state);
        let [qs, ks, us, ws] = chunk.decayed.each_ref().map(|x| &**x);
        let [a, aw, b, bw] = chunk.scores.each_ref().map(|x| &**x);
        let [x, p] = chunk.values.each_ref().map(|x| &**x);
        let (packed, room) = (&mut *chunk.packed, &mut *chunk.room);
        let [of_out, of_side, of_state] = &mut self.steps;
        let of_out = s.steps_of_panels(out, n, of_out);
        let after = s.steps_of_panels(state, s.size, of_state);
        s.multiply_lower_panels(n, s.columns_of(b, s.stride, [n, n], room), of_out, dx, false);
        s.multiply_panels((n, s.size), s.rows_of(ks, s.line, [n, s.size], room), after, dx, true);
        match s.delta {
            Delta::None => {}
            Delta::Key => {
                s.solve_back(n, a, dx);
                s.round_panels(dx, n, of_side);
            }
            Delta::Pair => {
                s.multiply_lower_panels(n, s.columns_of(bw, s.stride, [n, n], room), of_out, dp, false);
                s.multiply_panels((n, s.size), s.rows_of(ws, s.line, [n, s.size], room), after, dp, true);
                s.solve_back(n, aw, dp);
                let side = s.steps_of_panels(dp, n, of_side);
                s.multiply_lower_panels(n, s.columns_of(a, s.stride, [n, n], room), side, dx, true);
            }
        }
        // The cotangent of the triangle's right side.
        let side: &[f32] = if s.with_w() { dp } else { dx };
        let of_side = if s.rounds { &**of_side } else { side };
        let parts = &mut self.parts;
        let [lines, others] = &mut self.lines;
        let rows_of_out = s.rows_of_panels(out, n, lines);
        let rows_of_side = s.with_u().then(|| s.rows_of_panels(side, n, others));
        // Of values that entered with keys, and with `w`.
        let [da, daw, db, dbw] = &mut parts.scores;
        let [dqs, dks, dus, dws] = &mut parts.decayed;
        let entered = [Some((x, db, da, dks)), s.with_w().then_some((p, dbw, daw, dws))];
        for (x, of_q, of_u, to) in entered.into_iter().flatten() {
            s.turn(s.rows_of_panels(state, s.size, room), [s.size, s.wide], packed);
            let rows = s.rows_of_panels(x, n, room);
            s.multiply((n, s.size, s.wide), rows, packed, to, s.line, false);
            s.turn(rows, [n, s.wide], packed);
            s.multiply_below([n, s.wide], rows_of_out, packed, of_q);
            if let Some(side) = rows_of_side {
                s.multiply_below([n, s.wide], side, packed, of_u);
            }
        }
        s.turn(s.rows_of_panels(before, s.size, room), [s.size, s.wide], packed);
        s.multiply((n, s.size, s.wide), rows_of_out, packed, dqs, s.line, false);
        if let Some(side) = rows_of_side {
            s.multiply((n, s.size, s.wide), side, packed, dus, s.line, false);
        }
        match s.decay {
            Decay::None => {}
            Decay::Head => Decays::flow(&s, before, state, parts.flow),
            Decay::Channel => Decays::flow(&s, behind, state, parts.flow),
        }
        chunk.decays.whole(&s, state);
        s.multiply_panels((s.size, n), s.columns_of(qs, s.line, [s.size, n], room), of_out, state, true);
        if s.with_u() {
            s.multiply_panels((s.size, n), s.columns_of(us, s.line, [s.size, n], room), of_side, state, true);
        }
        let rows = chunk.rows.each_ref().map(|x| &**x);
        chunk.decays.back(&s, n, (rows, [a, aw, b, bw]), parts, [packed, room]);
    }
}
