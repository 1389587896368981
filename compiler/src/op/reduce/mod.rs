//! Reductions over named dimensions.

use super::*;
use smallvec::smallvec;

/// How a reduction joins elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduce {
    /// Sum.
    #[default]
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Largest; no gradient.
    Max,
}

impl Reduce {
    /// All of them.
    pub const ALL: [Reduce; 3] = [Reduce::Sum, Reduce::Mean, Reduce::Max];

    /// Its word in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Mean => "mean",
            Reduce::Max => "largest",
        }
    }
}

/// `(x) -> x` without the dimensions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reduction {
    /// How elements are joined.
    pub how: Reduce,
    /// The dimensions joined over.
    pub over: Dims,
}

impl Payload for Reduction {
    fn blanks() -> Vec<Self> {
        Reduce::ALL.map(|how| Reduction { how, over: smallvec![] }).into()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("over")?;
        a.dims(&mut self.over)
    }
}

impl Operation for Reduction {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: self.how.name(),
            operands: &["x"],
            results: &["y"],
            class: Class::Row { again: true, row: self },
            rows: Rows::Same,
            bf16: Bf16::Own,
            work: Work::Operand(0, 1),
            derivative: match self.how {
                Reduce::Sum | Reduce::Mean => Derivative::Rule(self),
                Reduce::Max => Derivative::Missing("here; stop it"),
            },
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        let there = !self.over.is_empty() && self.over.iter().all(|d| x[0].has(*d));
        x.check(there, "the operand lacks a dimension to reduce")?;
        x.check(repeated(&self.over).is_none(), "a dimension is reduced twice")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: x[0].without(&self.over) }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, result) = (e.floats(0), &e.results[0].dims);
        // The order of the operand, so that sums run in increasing index order whatever the order
        // of the list.
        let over: Dims = e.types[0].dims.iter().copied().filter(|d| self.over.contains(d)).collect();
        let loops = [result, &over[..]].concat();
        let along = |dims: &[Dim]| strides(e.module, dims, &loops);
        let start = if self.how == Reduce::Max { f64::NEG_INFINITY } else { 0.0 };
        let mut out = vec![start; e.module.elements(result) as usize];
        walk(&e.sizes_of(&loops), [along(result), along(&e.types[0].dims)], |[o, i]| match self.how {
            Reduce::Sum | Reduce::Mean => out[o] += x[i],
            Reduce::Max => out[o] = out[o].max(x[i]),
        });
        if self.how == Reduce::Mean {
            let n = e.module.elements(&over) as f64;
            out.iter_mut().for_each(|x| *x /= n);
        }
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let dims = [case.dim("b"), case.dim("t"), case.dim("h")];
        let mut over: Dims = dims.into_iter().filter(|_| case.rng.once_in(2)).collect();
        if over.is_empty() {
            over.push(dims[case.rng.below(3) as usize]);
        }
        if case.rng.once_in(2) {
            over.reverse();
        }
        let x = case.floats("x", &dims);
        case.finish(Reduction { how: self.how, over }, &[x])
    }
}

impl Reverse for Reduction {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (mut d, ty) = (at.d()?, at.ty(0));
        let b = at.builder();
        if self.how == Reduce::Mean {
            d = b.scale(d, 1.0 / b.module.elements(&self.over) as f64);
        }
        let zeros = b.zeros(ty);
        let spread = b.add(zeros, d);
        at.add(0, spread);
        Ok(())
    }
}

impl RowWork for Reduction {
    fn row(&self, r: &mut RowBuilder, node: &Node) -> Result<Option<u32>, CompileError> {
        let x = node.inputs[0];
        let mut a = r.array(x)?;
        let (inner, summed) = r.inner_reduction(x, self.how, &self.over)?;
        let mut left = r.length_of(x)?;
        if !inner.is_empty() {
            let kept: Dims = r.ty(x).dims.iter().copied().filter(|d| !r.rows().contains(d)).collect();
            let over = r.broadcast(&kept, &inner)?;
            left = over.outer * over.inner;
            a = r.op(RowOp::Reduce { op: self.how, x: a, over }, left);
        }
        if !summed {
            return Ok(Some(a));
        }
        if self.how == Reduce::Mean {
            let b = r.op(RowOp::Constant(Bits(1.0 / r.row_count() as f64)), 1);
            let broadcast = Broadcast { outer: 1, size: 1, inner: left };
            a = r.op(RowOp::Binary { op: Binary::Mul, a, b, broadcast, small_first: false }, left);
        }
        let (view, add) = r.destination(node.first);
        r.store(a, if add { RowStore::AddSum } else { RowStore::Sum }, view, DType::F32);
        Ok(None)
    }
}
