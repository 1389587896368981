//! Products of two operands, summed over shared dimensions.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(a, b) -> Σ_over a·b`; result dimensions are those of `a` without `over`, then those of `b`
/// without `over`. The operands share exactly the dimensions `over`. All products take operands of
/// one float type, or an `a` in f32 and a weight `b` stored in bf16, and give f32. Those in e4m3
/// end in `over`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Contract {
    /// The dimensions summed over.
    pub over: Dims,
}

/// Whether a token is one row of the product, and not one of each lane.
fn one_row(at: &Asked) -> bool {
    let Op::Contract(contract) = &at.node.op else { return false };
    at.ty(0).without(&contract.over).len() <= 2
}

impl Payload for Contract {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("over")?;
        a.dims(&mut self.over)
    }
}

impl Operation for Contract {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "contract",
            operands: &["a", "b"],
            results: &["y"],
            class: Class::Anchor(self, Anchor { casts: true, ..Anchor::default() }),
            rows: Rows::One(one_row),
            bf16: Bf16::Product,
            work: Work::Dense(self),
            derivative: Derivative::Rule(self),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (a, b) = (&x[0], &x[1]);
        x.float(0)?;
        if (a.dtype, b.dtype) == (DType::E4m3, DType::E4m3) {
            let rows = a.dims.ends_with(&self.over) && b.dims.ends_with(&self.over);
            x.check(rows, "operands in e4m3 are summed along their rows")?;
        } else {
            x.matmul(0, 1)?;
        }
        let there = !self.over.is_empty() && self.over.iter().all(|d| a.has(*d) && b.has(*d));
        x.check(there, "both operands must have every dimension summed over")?;
        x.check(repeated(&self.over).is_none(), "a dimension is summed over twice")?;
        let mut dims = a.without(&self.over);
        for d in b.without(&self.over) {
            x.check(!dims.contains(&d), "the operands share a dimension that is not summed over")?;
            dims.push(d);
        }
        Ok(vec![Type::f32(&dims)])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (a, b, result) = (e.floats(0), e.floats(1), &e.results[0].dims);
        let loops = [result, &self.over[..]].concat();
        let along = |dims: &[Dim]| strides(e.module, dims, &loops);
        let mut out = vec![0.0; e.module.elements(result) as usize];
        let mut count = 0;
        let all = [along(result), along(&e.types[0].dims), along(&e.types[1].dims)];
        walk(&e.sizes_of(&loops), all, |[o, i, j]| {
            out[o] += a[i] * b[j];
            count += 1;
        });
        e.multiply_adds += count;
        Ok(vec![Data::Float(out)])
    }

    fn random(&self, mut case: Case) -> Instance {
        // Dimensions of either operand in any order.
        let over: Dims = ["i", "j"][..1 + case.rng.below(2) as usize].iter().map(|n| case.dim(n)).collect();
        let free = |case: &mut Case, names: [&str; 2]| -> Dims {
            names[..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect()
        };
        let mut a = [free(&mut case, ["b", "t"]), over.clone()].concat();
        let mut b = [free(&mut case, ["o", "p"]), over.clone()].concat();
        for dims in [&mut a, &mut b] {
            let turn = case.rng.below(dims.len() as u64) as usize;
            dims.rotate_left(turn);
        }
        let a = case.floats("a", &a);
        let b = case.floats("b", &b);
        case.finish(Contract { over }, &[a, b])
    }
}

impl Counted for Contract {
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        s.product(self.over.iter().fold(s.result(0), |n, &d| n * s.module.size(d)))
    }
}

impl Reverse for Contract {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let d = at.d()?;
        for (k, other) in [(0, at.operand(1)), (1, at.operand(0))] {
            if at.is_active(k) {
                let dx = at.contract_like(d, other, k)?;
                at.add(k, dx);
            }
        }
        Ok(())
    }
}
