//! Rearrangements of the inner dimensions: reshape, split, concat; and zeros of a shape.

use super::*;

/// `(x) -> x` with other dimensions of the same product, in row-major order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reshape(pub Dims);

/// `(x[.., n]) -> x[.., n1], x[.., n2], …` cutting the last dimension.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Split(pub Dims);

/// `(x[.., n1], x[.., n2], …) -> x[.., n]` joining the last dimension; the reverse of [`Split`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Concat(pub Dim);

/// `() -> f32` zeros of these dimensions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Zeros(pub Dims);

/// Rows, two or three parts, and their sum.
fn random_parts(case: &mut Case) -> (Dims, Dims, Dim) {
    let rows = case.rows();
    let n = 2 + case.rng.below(2) as usize;
    let parts: Dims = ["p", "q", "r"][..n].iter().map(|n| case.dim(n)).collect();
    let sum = parts.iter().map(|&d| case.module.size(d)).sum();
    (rows, parts, case.module.dim("sum", sum))
}

impl Payload for Reshape {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("to")?;
        a.dims(&mut self.0)
    }
}

impl Operation for Reshape {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "reshape",
            operands: &["x"],
            results: &["y"],
            class: Class::View { moved: Moved::Reshaped(&self.0), row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Nothing,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let same = x.elements(&self.0) == x.elements(&x[0].dims);
        x.check(same, "reshape keeps the number of elements")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: self.0.clone() }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![e.operands[0].data.clone()])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (a, b, c) = (case.dim("a"), case.dim("b"), case.dim("c"));
        let size = case.module.elements(&[b, c]);
        let joined = case.sized("joined", size);
        let (from, to) =
            if case.rng.once_in(2) { (vec![a, b, c], vec![a, joined]) } else { (vec![joined], vec![b, c]) };
        let x = case.floats("x", &from);
        case.finish(Reshape(to.into()), &[x])
    }
}

impl Reverse for Reshape {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (d, dims) = (at.d()?, &at.ty(0).dims);
        let dx = at.builder().reshape(d, dims);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for Reshape {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        Ok(Some(r.array(node.inputs[0])?))
    }
}

impl Payload for Split {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("into")?;
        a.dims(&mut self.0)
    }
}

impl Operation for Split {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "split",
            operands: &["x[.., n]"],
            results: &["y0[.., n0]", "…"],
            class: Class::View { moved: Moved::Cut(&self.0), row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let n = x.last(0)?;
        let sum = self.0.iter().fold(0u64, |sum, &d| sum.saturating_add(x.size(d)));
        x.check(sum == x.size(n), "the parts must add up to the last dimension")?;
        let part = |&d: &Dim| Type { dtype: x[0].dtype, dims: with(x.rows(0), d) };
        Ok(self.0.iter().map(part).collect())
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        fn part<T: Copy>(x: &[T], n: usize, begin: usize, end: usize) -> Vec<T> {
            x.chunks(n).flat_map(|row| &row[begin..end]).copied().collect()
        }
        let n = e.last(0);
        let mut begin = 0;
        let mut results = vec![];
        for &d in &self.0 {
            let end = begin + e.size(d);
            results.push(match &e.operands[0].data {
                Data::Float(x) => Data::Float(part(x, n, begin, end)),
                Data::Int(x) => Data::Int(part(x, n, begin, end)),
            });
            begin = end;
        }
        Ok(results)
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, parts, sum) = random_parts(&mut case);
        let x = case.floats("x", &with(&rows, sum));
        case.finish(Split(parts), &[x])
    }
}

impl Reverse for Split {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let mut parts = vec![];
        for k in 0..self.0.len() {
            parts.push(at.cotangent_or_zeros(k));
        }
        let Some(&last) = at.ty(0).dims.last() else { return at.missing("of a scalar") };
        let dx = at.builder().op(Concat(last), &parts);
        at.add(0, dx);
        Ok(())
    }
}

impl RowWork for Split {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let a = r.array(node.inputs[0])?;
        let size = r.last(node.inputs[0]);
        let mut start = 0;
        for (v, &part) in node.results().zip(&self.0) {
            let n = r.length_of(v)?;
            let piece = r.op(RowOp::Slice { x: a, size, start }, n);
            start += r.size(part);
            r.finish(v, piece);
        }
        Ok(None)
    }
}

impl Payload for Concat {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("to")?;
        a.dim(&mut self.0)
    }
}

impl Operation for Concat {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "concat",
            operands: &["x0[.., n0]", "…"],
            results: &["y[.., n]"],
            class: Class::Row { again: true, row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let mut sum = 0u64;
        for k in 0..x.len() {
            sum = sum.saturating_add(x.size(x.last(k)?));
            let alike = x[k].dtype == x[0].dtype && x.rows(k) == x.rows(0);
            x.check(alike, "operands differ before the last dimension")?;
        }
        x.check(sum == x.size(self.0), "the last dimensions must add up to the result's")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: with(x.rows(0), self.0) }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        fn join<T: Copy>(parts: &[(&[T], usize)]) -> Vec<T> {
            let rows = parts[0].0.len() / parts[0].1;
            let row = |r: usize| parts.iter().flat_map(move |(x, n)| &x[r * n..(r + 1) * n]);
            (0..rows).flat_map(row).copied().collect()
        }
        let operands = 0..e.operands.len();
        Ok(vec![match e.operands[0].data {
            Data::Float(_) => {
                Data::Float(join(&operands.map(|i| (e.floats(i), e.last(i))).collect::<Vec<_>>()))
            }
            Data::Int(_) => Data::Int(join(&operands.map(|i| (e.ints(i), e.last(i))).collect::<Vec<_>>())),
        }])
    }

    fn random(&self, mut case: Case) -> Instance {
        let (rows, parts, sum) = random_parts(&mut case);
        let names = ["x0", "x1", "x2"];
        let inputs: Vec<Value> =
            parts.iter().zip(names).map(|(&p, n)| case.floats(n, &with(&rows, p))).collect();
        case.finish(Concat(sum), &inputs)
    }
}

impl Reverse for Concat {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let d = at.d()?;
        let count = at.operands().len();
        let lasts = (0..count).filter_map(|k| at.ty(k).dims.last().copied()).collect();
        let parts = at.builder().ops(Split(lasts), &[d]);
        for (k, part) in parts.into_iter().enumerate().take(count) {
            at.add(k, part);
        }
        Ok(())
    }
}

impl RowWork for Concat {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let mut parts = vec![];
        for &v in &node.inputs {
            parts.push(r.array(v)?);
        }
        let n = r.length_of(node.first)?;
        let groups = n / r.last(node.first).max(1);
        Ok(Some(r.op(RowOp::Concat { parts, groups }, n)))
    }
}

impl Payload for Zeros {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.dims(&mut self.0)
    }
}

impl Operation for Zeros {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "zeros",
            operands: &[],
            results: &["y"],
            class: Class::Number(RowOp::Zeros),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Blocked("it has no operands"),
        }
    }

    fn infer(&self, _: &Operands) -> Result<Vec<Type>, TypeError> {
        Ok(vec![Type::f32(&self.0)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        Ok(vec![Tensor::zeros(e.module, &e.results[0]).data])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = case.rows();
        case.finish(Zeros(dims), &[])
    }
}
