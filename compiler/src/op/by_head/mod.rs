//! Products of the vectors of heads with a matrix of each head.

pub(crate) mod cuda;
pub mod kernel;

use super::*;

/// `(x[.., h, i], w[h, e, i]) -> y[.., h, p]` where `over` is `i`, or
/// `(x[.., h, p], w[h, e, i]) -> y[.., h, i]` where it is `p`: the vector of each head times rows
/// `first..first + p` of the matrix of that head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByHead {
    /// The dimension summed over.
    pub over: Dim,
    /// The rows of each matrix that take part, as a dimension of vectors.
    pub part: Dim,
    /// The first of these rows.
    pub first: u64,
}

/// Whether a token is one row of the kernel.
fn one_row(at: &Asked) -> bool {
    at.ty(0).dims.len() == 4
}

impl Payload for ByHead {
    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.word("over")?;
        a.dim(&mut self.over)?;
        a.word("part")?;
        a.dim(&mut self.part)?;
        a.word("first")?;
        a.integer(&mut self.first)
    }
}

impl Operation for ByHead {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "by_head",
            operands: &["x[.., h, i]", "w[h, e, i]"],
            results: &["y[.., h, p]"],
            class: Class::Anchor(self, Anchor { casts: true, ..Anchor::default() }),
            rows: Rows::One(one_row),
            bf16: Bf16::Product,
            work: Work::Dense(self),
            derivative: Derivative::Missing(
                "here: weights are absorbed where caches are, and there nothing is trained",
            ),
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let (vectors, w) = (&x[0], &x[1]);
        x.float(0)?;
        x.matmul(0, 1)?;
        x.check(vectors.dims.len() >= 2 && w.dims.len() == 3, "takes x[.., heads, in], w[heads, out, in]")?;
        let (rows, ends) = vectors.dims.split_at(vectors.dims.len() - 1);
        x.check(rows.last() == w.dims.first(), "x and w must have the same heads")?;
        x.check(ends == [self.over], "x must end in the dimension summed over")?;
        x.check(self.part != w.dims[2], "the rows of a matrix and its columns must be two dimensions")?;
        let last = if self.over == self.part { w.dims[2] } else { self.part };
        x.check([self.part, w.dims[2]].contains(&self.over), "the sum must be over rows or columns of w")?;
        x.check(!rows.contains(&last), "x has the dimension of the result already")?;
        let end = self.first.checked_add(x.size(self.part));
        x.check(end.is_some_and(|end| end <= x.size(w.dims[1])), "w has not so many rows")?;
        Ok(vec![Type::f32(&with(rows, last))])
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let (x, w) = (e.floats(0), e.floats(1));
        let [heads, rows, columns] = e.sizes(1)[..] else { return Err("w has three dimensions".into()) };
        let (first, part, k) = (self.first as usize, e.size(self.part), e.last(0));
        let over_rows = self.over == self.part;
        let n = if over_rows { columns } else { part };
        let mut y = vec![0.0; x.len() / k * n];
        for (i, (x, y)) in x.chunks(k).zip(y.chunks_mut(n)).enumerate() {
            let matrix = &w[(i % heads * rows + first) * columns..][..part * columns];
            for (r, row) in matrix.chunks(columns).enumerate() {
                if over_rows {
                    e.add_scaled(y, x[r], row);
                } else {
                    y[r] = e.dot(x, row);
                }
            }
        }
        Ok(vec![Data::Float(y)])
    }

    fn random(&self, mut case: Case) -> Instance {
        let mut rows =
            ["b", "t"][..case.rng.below(3) as usize].iter().map(|n| case.dim(n)).collect::<Vec<_>>();
        let (heads, part, inner) = (case.dim("h"), case.dim("p"), case.dim("i"));
        let first = case.rng.below(3);
        let size = case.module.size(part) + first + case.rng.below(3);
        let each = case.sized("e", size);
        let over = if case.rng.once_in(2) { part } else { inner };
        rows.extend([heads, over]);
        let x = case.floats("x", &rows);
        let w = case.floats("w", &[heads, each, inner]);
        case.finish(ByHead { over, part, first }, &[x, w])
    }
}

impl Counted for ByHead {
    /// Of the matrices only the rows that take part are read.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let part = s.module.size(self.part);
        let w = Count::from(s.size(1, 0)) * part * s.size(1, 2);
        let read = s.operand_bytes(0, s.operand(0)) + s.operand_bytes(1, w);
        Counts { read, ..s.product(s.result(0) * s.module.size(self.over)) }
    }
}
