//! RMS norms.

use super::*;

/// `(x[.., d]) -> x · rsqrt(mean(x²) + eps)`; the mean is over the last dimension, or the last
/// `inner` ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rms {
    /// How many trailing dimensions one norm covers.
    pub inner: usize,
    /// Added to the mean square.
    pub eps: f64,
}

by_bits!(Rms, Rms { inner, eps } => (inner, Bits(eps)));

/// `(x, dy) -> dx` of [`Rms`].
#[derive(Clone, Copy, Debug, Default)]
pub struct RmsGrad {
    /// As in [`Rms`].
    pub inner: usize,
    /// As in [`Rms`].
    pub eps: f64,
}

by_bits!(RmsGrad, RmsGrad { inner, eps } => (inner, Bits(eps)));

fn attributes(inner: &mut usize, eps: &mut f64, a: &mut dyn Attributes) -> Parsed<()> {
    let mut n = *inner as u64;
    a.word("inner")?;
    a.integer(&mut n)?;
    *inner = usize::try_from(n).unwrap_or(usize::MAX);
    a.word("eps")?;
    a.float(eps)
}

fn check_inner(x: &Operands, inner: usize) -> Result<(), TypeError> {
    x.check(inner >= 1 && inner <= x[0].dims.len(), "normalises over more dimensions than there are")
}

/// Elements that one norm covers.
fn size(e: &Evaluation, inner: usize) -> usize {
    let dims = e.sizes(0);
    dims[dims.len() - inner..].iter().product()
}

fn random_dims(case: &mut Case) -> (Dims, usize, f64) {
    let mut dims = case.rows();
    dims.extend([case.dim("heads"), case.dim("d")]);
    (dims, 1 + case.rng.below(2) as usize, 1e-3)
}

impl Payload for Rms {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        attributes(&mut self.inner, &mut self.eps, a)
    }
}

impl Operation for Rms {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "rms",
            operands: &["x[.., d]"],
            results: &["y[.., d]"],
            class: Class::Row { again: true, row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            // Square and add; scale.
            work: Work::Operand(0, 3),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        check_inner(x, self.inner)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let n = size(e, self.inner);
        let mut out = vec![];
        for x in e.floats(0).chunks(n) {
            let r = 1.0 / (inner_product(x, x) / n as f64 + self.eps).sqrt();
            out.extend(x.iter().map(|x| x * r));
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (dims, inner, eps) = random_dims(&mut case);
        let x = case.floats("x", &dims);
        case.finish(Rms { inner, eps }, &[x])
    }
}

impl Reverse for Rms {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, x) = (at.d()?, at.operand(0));
        let dx = at.builder().op(RmsGrad { inner: self.inner, eps: self.eps }, &[x, d]);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for Rms {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let x = r.array(node.inputs[0])?;
        let size = r.group(node.inputs[0], self.inner);
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::Rms { x, size, eps: Bits(self.eps) }, n)))
    }
}

impl Payload for RmsGrad {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        attributes(&mut self.inner, &mut self.eps, a)
    }
}

impl Operation for RmsGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "rms_grad",
            operands: &["x[.., d]", "dy[.., d]"],
            results: &["dx[.., d]"],
            class: Class::Row { again: false, row: self },
            rows: Rows::All,
            bf16: Bf16::Own,
            // Two inner products; `r·(dy - x·c)`.
            work: Work::Operand(0, 7),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(x[0] == x[1], "x and dy must have one type")?;
        check_inner(x, self.inner)?;
        Ok(vec![x[0].clone()])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let n = size(e, self.inner);
        let mut out = vec![];
        for (x, dy) in e.floats(0).chunks(n).zip(e.floats(1).chunks(n)) {
            let r = 1.0 / (inner_product(x, x) / n as f64 + self.eps).sqrt();
            let along = inner_product(x, dy) * r * r / n as f64;
            out.extend(x.iter().zip(dy).map(|(x, dy)| r * (dy - x * along)));
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (dims, inner, eps) = random_dims(&mut case);
        let x = case.floats("x", &dims);
        let dy = case.floats("dy", &dims);
        case.finish(RmsGrad { inner, eps }, &[x, dy])
    }
}

impl RowWork for RmsGrad {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let (x, dy) = (r.array(node.inputs[0])?, r.array(node.inputs[1])?);
        let size = r.group(node.inputs[0], self.inner);
        let n = r.length_of(node.first)?;
        Ok(Some(r.op(RowOp::RmsGrad { x, dy, size, eps: Bits(self.eps) }, n)))
    }
}
