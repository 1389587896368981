//! Sums of the slots of each row.

pub(crate) mod cuda;
pub mod kernel;

use super::group::routing;
use super::*;
use smallvec::smallvec;

/// `(y[slots, h], inverse[.., k]) -> [.., h]`, or with `gates[.., k]` as third operand:
/// `Σ_k gates · y[inverse]`. Slots in no group contribute nothing where `y`'s rows beyond the last
/// offset are zero.
pub struct Combine;

/// `(d[.., h], order[slots], gates[.., k]) -> [slots, h]`: the gradient of [`Combine`] for `y`,
/// `gates[order]·d[order/k]`.
pub struct CombineGrad;

/// `(d[.., h], y[slots, h], inverse[.., k]) -> [.., k]`: the gradient of [`Combine`] for the gates,
/// `d·y[inverse]`.
pub struct CombineGates;

impl Operation for Combine {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "combine",
            operands: &["y[slots, h]", "inverse i32[.., k]", "gates[.., k]?"],
            results: &["x[.., h]"],
            class: Class::anchored(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Reads(&[0]),
            work: Work::Counted(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.check(x[0].dims.len() == 2, "y is [slots, h]")?;
        x.last(1)?;
        let gates = x.len() == 2 || x[2].dtype.is_float() && x[2].dims == x[1].dims;
        x.check(gates, "gates are floats with the dimensions of inverse")?;
        let all = x.elements(&x[1].dims) == x.size(x[0].dims[0]);
        x.check(all, "inverse has one entry a slot")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: with(x.rows(1), x[0].dims[1]) }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (y, inverse) = (e.floats(0), e.ints(1));
        let (h, k) = (e.last(0), e.last(1));
        let gate = |s: usize| if e.operands.len() == 3 { e.floats(2)[s] } else { 1.0 };
        let mut out = vec![0.0; inverse.len() / k * h];
        for (slot, &at) in inverse.iter().enumerate() {
            let at = checked(at, inverse.len(), "place")?;
            for j in 0..h {
                out[slot / k * h + j] += gate(slot) * y[at * h + j];
            }
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let h = case.dim("h");
        let mut inputs = vec![case.floats("y", &[routing.slots_dim, h]), routing.inverse(&mut case)];
        if case.rng.once_in(2) {
            inputs.push(case.floats("gates", &routing.choices));
        }
        case.finish(Op::Combine, &inputs)
    }
}

impl Counted for Combine {
    /// Slots times `h`, gates multiplied.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let slots = s.operand(0);
        s.whole(if s.operands.len() == 3 { slots * 2 } else { slots })
    }
}

impl Reverse for Combine {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operands());
        let [order, _, inverse] = at.group(1)?;
        if at.is_active(0) {
            let dy = match x.get(2) {
                Some(&gates) => at.builder().op(Op::CombineGrad, &[d, order, gates]),
                None => at.builder().op(Op::Gather, &[d, order]),
            };
            at.add(0, dy);
        }
        if x.len() == 3 && at.is_active(2) {
            let dg = at.builder().op(Op::CombineGates, &[d, x[0], inverse]);
            at.add(2, dg);
        }
        Ok(())
    }
}

/// Gates are of the rows of the result.
fn rows(at: &Asked, k: usize) -> Need {
    if k == 2 { at.own } else { Need::All }
}

impl Operation for CombineGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "combine_grad",
            operands: &["d[.., h]", "order i32[slots]", "gates[.., k]"],
            results: &["dy[slots, h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0]),
            work: Work::Result(1),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        x.float(2)?;
        let h = x.last(0)?;
        x.last(2)?;
        x.check(x[1].dims.len() == 1, "order has one dimension")?;
        x.check(x.rows(0) == x.rows(2), "d and gates must have the same rows")?;
        x.check(x.elements(&x[2].dims) == x.size(x[1].dims[0]), "one gate a slot")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: smallvec![x[1].dims[0], h] }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (d, order, gates) = (e.floats(0), e.ints(1), e.floats(2));
        let (h, k) = (e.last(0), e.last(2));
        let mut out = vec![];
        for &slot in order {
            let slot = checked(slot, order.len(), "slot")?;
            out.extend(d[slot / k * h..(slot / k + 1) * h].iter().map(|d| gates[slot] * d));
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let h = case.dim("h");
        let d = case.floats("d", &routing.tokens(h));
        let order = routing.order(&mut case);
        let gates = case.floats("gates", &routing.choices);
        case.finish(Op::CombineGrad, &[d, order, gates])
    }
}

impl Operation for CombineGates {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "combine_gates",
            operands: &["d[.., h]", "y[slots, h]", "inverse i32[.., k]"],
            results: &["dgates[.., k]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Operand(1, 2),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.float(1)?;
        x.int(2)?;
        let h = x.last(0)?;
        x.last(2)?;
        x.check(x[1].dims.len() == 2 && x[1].dims[1] == h, "y is [slots, h], h that of d")?;
        x.check(x.rows(0) == x.rows(2), "d and inverse must have the same rows")?;
        let all = x.elements(&x[2].dims) == x.size(x[1].dims[0]);
        x.check(all, "inverse has one entry a slot")?;
        Ok(vec![Type::f32(&x[2].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (d, y, inverse) = (e.floats(0), e.floats(1), e.ints(2));
        let (h, k) = (e.last(0), e.last(2));
        let mut out = vec![];
        for (slot, &at) in inverse.iter().enumerate() {
            let at = checked(at, inverse.len(), "place")?;
            out.push(inner_product(&d[slot / k * h..(slot / k + 1) * h], &y[at * h..(at + 1) * h]));
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let h = case.dim("h");
        let d = case.floats("d", &routing.tokens(h));
        let y = case.floats("y", &[routing.slots_dim, h]);
        let inverse = routing.inverse(&mut case);
        case.finish(Op::CombineGates, &[d, y, inverse])
    }
}
