//! Rows in the order of slots.

pub(crate) mod cuda;
pub mod kernel;

use super::group::routing;
use super::*;
use smallvec::smallvec;

/// `(x[.., h], order[slots]) -> [slots, h]`: row `order[s] / k` for slot `s`, `k` being slots per
/// row.
pub struct Gather;

impl Operation for Gather {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "gather",
            operands: &["x[.., h]", "order i32[slots]"],
            results: &["y[slots, h]"],
            class: Class::Gather(self),
            rows: Rows::Of(rows),
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.int(1)?;
        let h = x.last(0)?;
        x.check(x[1].dims.len() == 1, "order has one dimension")?;
        let n = x.elements(x.rows(0));
        let whole = n > 0 && x.size(x[1].dims[0]).is_multiple_of(n);
        x.check(whole, "slots must be a multiple of the rows")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: smallvec![x[1].dims[0], h] }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, order) = (e.floats(0), e.ints(1));
        let h = e.last(0);
        let k = order.len() / (x.len() / h);
        let mut out = vec![];
        for &slot in order {
            let row = checked(slot, order.len(), "slot")? / k;
            out.extend(&x[row * h..(row + 1) * h]);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let routing = routing(&mut case);
        let h = case.dim("h");
        let x = case.floats("x", &routing.tokens(h));
        let order = routing.order(&mut case);
        case.finish(Op::Gather, &[x, order])
    }
}

impl Reverse for Gather {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let d = at.d()?;
        let [_, _, inverse] = at.group(1)?;
        let dx = at.builder().op(Op::Combine, &[d, inverse]);
        at.add(0, dx);
        Ok(())
    }
}

/// Slots in no group are not read: those of choices that tokens without a place made.
fn rows(at: &Asked, k: usize) -> Need {
    let group = at.maker(at.node.inputs[1]).filter(|n| matches!(n.op, Op::Group(_)));
    match group.and_then(|n| at.kept(n.inputs[0])) {
        Some(kept) if k == 0 => kept,
        _ => Need::All,
    }
}
