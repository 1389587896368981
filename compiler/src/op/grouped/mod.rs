//! Products of the rows of each group with a matrix of its own.

pub(crate) mod cuda;
pub mod kernel;

use super::group::routing;
use super::*;

/// `(x[s, i], w[e, o, i], offsets[e1]) -> y[s, o]` where `over` is `i`, or
/// `(x[s, o], w[e, o, i], offsets) -> y[s, i]` where it is `o`: rows `offsets[e]..offsets[e+1]` of
/// `x` times matrix `e`. Rows beyond the last offset are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grouped {
    /// The dimension summed over.
    pub over: Dim,
}

/// `(y[s, o], x[s, i], offsets[e1]) -> w[e, o, i]`: for each group the sum of outer products of its
/// rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupedOuter {
    /// The experts.
    pub experts: Dim,
}

/// Rows of some group times a matrix of its own. `matrices` is the number of elements of all of
/// them; where operand `weights` has them (not 0), only those of groups with rows are read.
fn cost(s: &Shapes, extents: &Extents, matrices: Count, weights: usize) -> Counts {
    let all = s.size(0, 0);
    let slots = extents.slots.map_or(all, |n| n.min(all));
    let experts = s.size(2, 0).saturating_sub(1).max(1);
    let groups = extents.groups.unwrap_or(experts).min(experts).min(slots);
    // Every matrix has the same size, and experts divide the whole.
    let matrix = Count(matrices.0.map(|n| n / u128::from(experts)));
    let rows = |i: usize| s.operand_bytes(i, Count::from(slots) * s.size(i, LAST));
    let offsets = s.operand_bytes(2, s.operand(2));
    let second = if weights == 1 { s.operand_bytes(1, matrix * groups) } else { rows(1) };
    Counts { multiply_adds: matrix * slots, read: rows(0) + second + offsets, ..s.whole(Count::ZERO) }
}

impl Payload for Grouped {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("over")?;
        a.dim(&mut self.over)
    }
}

impl Operation for Grouped {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "grouped",
            operands: &["x[s, i]", "w[e, o, i]", "offsets i32[e1]"],
            results: &["y[s, o]"],
            class: Class::Anchor(self, Anchor { through: Some(0), casts: true, again: false }),
            rows: Rows::All,
            bf16: Bf16::Slots,
            work: Work::Groups(self, 2),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (slots, w, offsets) = (&x[0], &x[1], &x[2]);
        x.float(0)?;
        x.int(2)?;
        let ranks = slots.dims.len() == 2 && w.dims.len() == 3 && offsets.dims.len() == 1;
        x.check(ranks, "takes x[slots, in], w[experts, out, in], offsets")?;
        x.matmul(0, 1)?;
        x.check(slots.dims[1] == self.over, "x must end in the dimension summed over")?;
        x.one_more(offsets.dims[0], w.dims[0])?;
        let (columns, rows) = (w.dims[2] == self.over, w.dims[1] == self.over);
        x.check(columns != rows, "w must have the dimension summed over once")?;
        Ok(vec![Type::f32(&[slots.dims[0], w.dims[if columns { 1 } else { 2 }]])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, w) = (e.floats(0), e.floats(1));
        let (slots, n) = (e.sizes(0)[0], e.last(0));
        let (o, i) = (e.sizes(1)[1], e.sizes(1)[2]);
        // One matrix is [o, i]; the sum is over its columns, or over its rows.
        let over_columns = e.types[1].dims[2] == self.over;
        let width = if over_columns { o } else { i };
        let mut y = vec![0.0; slots * width];
        for (expert, group) in e.groups(2, slots)?.into_iter().enumerate() {
            let matrix = &w[expert * o * i..(expert + 1) * o * i];
            for slot in group {
                let (from, to) = (&x[slot * n..(slot + 1) * n], &mut y[slot * width..(slot + 1) * width]);
                for (r, row) in matrix.chunks(i).enumerate() {
                    if over_columns {
                        to[r] = e.dot(from, row);
                    } else {
                        e.add_scaled(to, from[r], row);
                    }
                }
            }
        }
        Ok(vec![Data::Float(y)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let (o, i) = (case.dim("o"), case.dim("i"));
        let over = if case.rng.once_in(2) { i } else { o };
        let x = case.floats("x", &[routing.slots_dim, over]);
        let w = case.floats("w", &[routing.experts, o, i]);
        let offsets = routing.offsets(&mut case);
        case.finish(Grouped { over }, &[x, w, offsets])
    }
}

impl Counted for Grouped {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(s, extents, s.operand(1), 1)
    }
}

impl Reverse for Grouped {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        let w = &at.ty(1).dims;
        let forward = w[2] == self.over;
        let back = if forward { w[1] } else { w[2] };
        if at.is_active(0) {
            let dx = at.builder().op(Grouped { over: back }, &[d, x[1], x[2]]);
            at.add(0, dx);
        }
        if at.is_active(1) {
            let (out, inner) = if forward { (d, x[0]) } else { (x[0], d) };
            let dw = at.builder().op(GroupedOuter { experts: w[0] }, &[out, inner, x[2]]);
            at.add(1, dw);
        }
        Ok(())
    }
}

impl Payload for GroupedOuter {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("experts")?;
        a.dim(&mut self.experts)
    }
}

impl Operation for GroupedOuter {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "grouped_outer",
            operands: &["y[s, o]", "x[s, i]", "offsets i32[e1]"],
            results: &["w[e, o, i]"],
            class: Class::Anchor(self, Anchor { through: Some(1), ..Anchor::default() }),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Groups(self, 2),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (y, slots, offsets) = (&x[0], &x[1], &x[2]);
        x.float(0)?;
        x.same_dtype(0, 1)?;
        x.int(2)?;
        let ranks = y.dims.len() == 2 && slots.dims.len() == 2 && offsets.dims.len() == 1;
        x.check(ranks && y.dims[0] == slots.dims[0], "takes y[slots, out], x[slots, in], offsets")?;
        x.one_more(offsets.dims[0], self.experts)?;
        Ok(vec![Type::f32(&[self.experts, y.dims[1], slots.dims[1]])])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (y, x) = (e.floats(0), e.floats(1));
        let (slots, o, i) = (e.sizes(0)[0], e.last(0), e.last(1));
        let mut w = vec![0.0; e.size(self.experts) * o * i];
        for (expert, group) in e.groups(2, slots)?.into_iter().enumerate() {
            for slot in group {
                for r in 0..o {
                    let row = &mut w[(expert * o + r) * i..(expert * o + r + 1) * i];
                    e.add_scaled(row, y[slot * o + r], &x[slot * i..(slot + 1) * i]);
                }
            }
        }
        Ok(vec![Data::Float(w)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let (o, i) = (case.dim("o"), case.dim("i"));
        let y = case.floats("y", &[routing.slots_dim, o]);
        let x = case.floats("x", &[routing.slots_dim, i]);
        let offsets = routing.offsets(&mut case);
        case.finish(GroupedOuter { experts: routing.experts }, &[y, x, offsets])
    }
}

impl Counted for GroupedOuter {
    fn cost(&self, s: &Shapes, extents: &Extents) -> Counts {
        cost(s, extents, s.result(0), 0)
    }
}
