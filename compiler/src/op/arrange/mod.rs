//! Elements in another order of dimensions, repeated along new ones.

pub mod kernel;

use super::*;

/// `(x) -> y` with the dimensions `to`, among which are all those of `x` in any order: `y` is
/// repeated along those that `x` lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arrange {
    /// The dimensions of the result.
    pub to: Dims,
}

impl Payload for Arrange {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("to")?;
        a.dims(&mut self.to)
    }
}

impl Operation for Arrange {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "arrange",
            operands: &["x"],
            results: &["y"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Moves,
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        x.float(0)?;
        x.check(repeated(&self.to).is_none(), "a dimension stands twice in the result")?;
        x.check(x[0].dims.iter().all(|d| self.to.contains(d)), "the result lacks a dimension")?;
        Ok(vec![Type { dtype: x[0].dtype, dims: self.to.clone() }])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, along) = (e.floats(0), strides(e.module, &e.types[0].dims, &self.to));
        let mut out = vec![];
        walk(&e.sizes_of(&self.to), [along], |[i]| out.push(x[i]));
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let all: Dims = ["b", "t", "h", "d"].map(|name| case.dim(name)).into();
        let mut dims: Dims = all.iter().copied().filter(|_| !case.rng.once_in(4)).collect();
        let mut to = all;
        for order in [&mut dims, &mut to] {
            for i in (1..order.len()).rev() {
                let other = case.rng.below(i as u64 + 1) as usize;
                order.swap(i, other);
            }
        }
        let x = case.floats("x", &dims);
        case.finish(Arrange { to }, &[x])
    }
}

impl Reverse for Arrange {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let (mut d, dims) = (at.d()?, at.ty(0).dims.clone());
        let new: Dims = self.to.iter().copied().filter(|x| !dims.contains(x)).collect();
        let b = at.builder();
        if !new.is_empty() {
            // Those that stay before those that are summed, so that a row kernel can do it.
            let kept: Dims = self.to.iter().copied().filter(|x| dims.contains(x)).collect();
            d = b.arrange(d, &[&kept[..], &new].concat());
            d = b.reduce(crate::ir::Reduce::Sum, d, &new);
        }
        let dx = b.arrange(d, &dims);
        at.add(0, dx);
        Ok(())
    }
}
