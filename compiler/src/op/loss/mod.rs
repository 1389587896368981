//! Cross-entropy, with and without the head in it.

pub(crate) mod cuda;
pub mod kernel;

use super::attention::visit_softcap;
use super::*;

/// `(x[.., h], w[V, h], targets[..]) -> nll[..], lse[..]`: head, soft-cap and cross-entropy; the
/// logits are never stored.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadLoss {
    /// `c·tanh(z/c)` on the logits.
    pub softcap: Option<f64>,
}

by_bits!(HeadLoss, HeadLoss { softcap } => softcap.map(Bits));

/// `(x, w, targets, lse, d[..]) -> dx, dw`.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeadLossGrad {
    /// As in [`HeadLoss`].
    pub softcap: Option<f64>,
}

by_bits!(HeadLossGrad, HeadLossGrad { softcap } => softcap.map(Bits));

/// `(logits[.., V], targets[..]) -> nll[..], lse[..]`: `lse - logits[target]`. A negative target is
/// no target: 0.
pub struct CrossEntropy;

/// `(logits, targets, lse, d[..]) -> dlogits`.
pub struct CrossEntropyGrad;

fn check_logits(x: &Operands) -> Result<(), TypeError> {
    let (logits, targets) = (&x[0], &x[1]);
    let fits = logits.dims.split_last().is_some_and(|(_, rows)| *rows == *targets.dims);
    let types = logits.dtype.is_float() && targets.dtype == DType::I32;
    x.check(types && fits, "takes logits[.., V], targets i32[..]")
}

fn check_head(x: &Operands) -> Result<(), TypeError> {
    let (rows, w, targets) = (&x[0], &x[1], &x[2]);
    let fits = rows.dims.split_last().is_some_and(|(h, r)| w.dims.last() == Some(h) && *r == *targets.dims);
    let types = rows.dtype.is_float() && targets.dtype == DType::I32;
    x.check(w.dims.len() == 2 && fits && types, "takes x[.., h], w[V, h] of x's dtype, targets i32[..]")?;
    match (rows.dtype, w.dtype) {
        (DType::Bf16, DType::Packed(_)) => Ok(()),
        _ => x.matmul(0, 1),
    }
}

/// Statistics and cotangents of a loss, operands `k` and the next: f32, one a row.
fn check_per_row(x: &Operands, k: usize, rows: &[Dim]) -> Result<(), TypeError> {
    let per_row = |t: &Type| t.dtype == DType::F32 && *t.dims == *rows;
    let fits = per_row(&x[k]) && per_row(&x[k + 1]);
    x.check(fits, "lse and d are f32 with the dimensions of targets")
}

/// A target, `None` where it is negative: there is none, and the loss is 0.
fn target(target: i32, vocab: usize) -> Result<Option<usize>, String> {
    if target < 0 { Ok(None) } else { checked(target, vocab, "target").map(Some) }
}

/// The loss of one row and its log-sum-exp.
fn row_loss(logits: &[f64], of: i32) -> Result<(f64, f64), String> {
    let sum = log_sum_exp(logits);
    Ok((target(of, logits.len())?.map_or(0.0, |t| sum - logits[t]), sum))
}

/// `d · (softmax - one_hot(target))` of one row.
fn row_grad(logits: &[f64], of: i32, lse: f64, d: f64) -> Result<Vec<f64>, String> {
    let Some(target) = target(of, logits.len())? else { return Ok(vec![0.0; logits.len()]) };
    let one = |i: usize| f64::from(u8::from(i == target));
    Ok(logits.iter().enumerate().map(|(i, z)| d * ((z - lse).exp() - one(i))).collect())
}

/// Capped logits of one row.
fn row_logits(e: &mut Evaluation, cap: Option<f64>, x: &[f64], w: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|w| softcap(cap, e.dot(x, w))).collect()
}

/// Targets, some of them missing.
fn random_targets(case: &mut Case, rows: &[Dim], vocab: Dim) -> Value {
    let vocab = case.module.size(vocab);
    case.ints_from("targets", rows, |rng| rng.below(vocab + 1) as i32 - 1)
}

/// The last results of `forward` and a cotangent, as operands of its gradient.
fn random_statistics(case: &mut Case, rows: &[Dim], forward: &Op, inputs: &[Value]) -> [Value; 2] {
    let lse = case.forward(forward, inputs).remove(1);
    [case.tensor("lse", Binding::Value, Type::f32(rows), lse), case.floats("d", rows)]
}

fn random_logits(case: &mut Case) -> (Dims, Vec<Value>) {
    let rows = case.rows();
    let vocab = case.dim("vocab");
    let inputs = vec![case.floats("logits", &with(&rows, vocab)), random_targets(case, &rows, vocab)];
    (rows, inputs)
}

fn random_head(case: &mut Case) -> (Dims, Option<f64>, Vec<Value>) {
    let rows = case.rows();
    let (vocab, h) = (case.dim("vocab"), case.dim("h"));
    let softcap = case.rng.once_in(2).then_some(1.5);
    let mut inputs = vec![case.floats("x", &with(&rows, h)), case.floats("w", &[vocab, h])];
    inputs.push(random_targets(case, &rows, vocab));
    (rows, softcap, inputs)
}

impl Operation for CrossEntropy {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "cross_entropy",
            operands: &["logits[.., V]", "targets i32[..]"],
            results: &["nll[..]", "lse[..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Follows(&[0]),
            // Maximum, difference, exponential, sum.
            work: Work::Operand(0, 4),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_logits(x)?;
        Ok(vec![Type::f32(&x[1].dims), Type::f32(&x[1].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (mut nll, mut lse) = (vec![], vec![]);
        for (logits, &target) in e.floats(0).chunks(e.last(0)).zip(e.ints(1)) {
            let (loss, sum) = row_loss(logits, target)?;
            nll.push(loss);
            lse.push(sum);
        }
        Ok(vec![Data::Float(nll), Data::Float(lse)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (_, inputs) = random_logits(&mut case);
        case.finish(Op::CrossEntropy, &inputs)
    }
}

impl Reverse for CrossEntropy {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x, lse) = (at.d()?, at.operands(), at.result(1));
        let dx = at.builder().op(Op::CrossEntropyGrad, &[x[0], x[1], lse, d]);
        at.add(0, dx);
        Ok(())
    }
}

impl Operation for CrossEntropyGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "cross_entropy_grad",
            operands: &["logits[.., V]", "targets i32[..]", "lse[..]", "d[..]"],
            results: &["dlogits[.., V]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Follows(&[0]),
            // Difference, exponential, scale.
            work: Work::Operand(0, 3),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_logits(x)?;
        check_per_row(x, 2, &x[1].dims)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (targets, lse, d) = (e.ints(1), e.floats(2), e.floats(3));
        let mut out = vec![];
        for (row, logits) in e.floats(0).chunks(e.last(0)).enumerate() {
            out.extend(row_grad(logits, targets[row], lse[row], d[row])?);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, mut inputs) = random_logits(&mut case);
        let kept = random_statistics(&mut case, &rows, &Op::CrossEntropy, &inputs);
        inputs.extend(kept);
        case.finish(Op::CrossEntropyGrad, &inputs)
    }
}

impl Payload for HeadLoss {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        visit_softcap(&mut self.softcap, a)
    }
}

impl Operation for HeadLoss {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "head_loss",
            operands: &["x[.., h]", "w[V, h]", "targets i32[..]"],
            results: &["nll[..]", "lse[..]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Head,
            work: Work::Dense(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_head(x)?;
        Ok(vec![Type::f32(&x[2].dims), Type::f32(&x[2].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, w, h) = (e.floats(0), e.floats(1), e.last(0));
        let (mut nll, mut lse) = (vec![], vec![]);
        for (x, &target) in x.chunks(h).zip(e.ints(2)) {
            let logits = row_logits(e, self.softcap, x, w);
            let (loss, sum) = row_loss(&logits, target)?;
            nll.push(loss);
            lse.push(sum);
        }
        Ok(vec![Data::Float(nll), Data::Float(lse)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (_, softcap, inputs) = random_head(&mut case);
        case.finish(HeadLoss { softcap }, &inputs)
    }
}

impl Counted for HeadLoss {
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let logits = s.operand(2) * s.size(1, 0);
        let work = s.whole(logits * (4 + 3 * u64::from(self.softcap.is_some())));
        Counts { multiply_adds: s.operand(0) * s.size(1, 0), ..work }
    }
}

impl Reverse for HeadLoss {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x, lse) = (at.d()?, at.operands(), at.result(1));
        let operands = [x[0], x[1], x[2], lse, d];
        let grads = at.builder().ops(HeadLossGrad { softcap: self.softcap }, &operands);
        at.add(0, grads[0]);
        at.add(1, grads[1]);
        Ok(())
    }
}

impl Payload for HeadLossGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        visit_softcap(&mut self.softcap, a)
    }
}

impl Operation for HeadLossGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "head_loss_grad",
            operands: &["x[.., h]", "w[V, h]", "targets i32[..]", "lse[..]", "d[..]"],
            results: &["dx[.., h]", "dw[V, h]"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Reads(&[0, 1]),
            work: Work::Dense(self),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        check_head(x)?;
        x.same_dtype(0, 1)?;
        check_per_row(x, 3, &x[2].dims)?;
        Ok(vec![Type::f32(&x[0].dims), Type::f32(&x[1].dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, w, h) = (e.floats(0), e.floats(1), e.last(0));
        let (targets, lse, d) = (e.ints(2), e.floats(3), e.floats(4));
        let mut dx = vec![0.0; x.len()];
        let mut dw = vec![0.0; w.len()];
        for (row, (x, dx)) in x.chunks(h).zip(dx.chunks_mut(h)).enumerate() {
            let logits = row_logits(e, self.softcap, x, w);
            let dlogits = row_grad(&logits, targets[row], lse[row], d[row])?;
            for (j, (z, dz)) in logits.iter().zip(&dlogits).enumerate() {
                let dz = dz * softcap_slope(self.softcap, *z);
                e.add_scaled(dx, dz, &w[j * h..(j + 1) * h]);
                e.add_scaled(&mut dw[j * h..(j + 1) * h], dz, x);
            }
        }
        Ok(vec![Data::Float(dx), Data::Float(dw)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, softcap, mut inputs) = random_head(&mut case);
        let kept = random_statistics(&mut case, &rows, &HeadLoss { softcap }.into(), &inputs);
        inputs.extend(kept);
        case.finish(HeadLossGrad { softcap }, &inputs)
    }
}

impl Counted for HeadLossGrad {
    /// The logits again, then both gradients; every row, whether it has a target or not.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let logits = s.operand(2) * s.size(1, 0);
        let product = s.operand(0) * s.size(1, 0);
        let work = s.whole(logits * (3 + 6 * u64::from(self.softcap.is_some())));
        Counts { multiply_adds: product * 3, repeated: product, ..work }
    }
}
