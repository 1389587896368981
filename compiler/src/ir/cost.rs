//! The cost of every operation: the one place that counts.
//!
//! *In*: an operation, the types of its operands and results, and the [`Extents`] that types leave
//! open. *Out*: its [`Cost`]. *Promise*: arithmetic is exact or an error, never wrapped; and for
//! every operation `flops` is twice the multiply-adds that the interpreter executes one by one
//! (tested on random instances, given the extents observed).
//!
//! A *flop* is one multiply or one add of a matrix product: `contract`, `grouped`, `grouped_outer`,
//! the two products of attention over the (query, key) pairs that exist, the logits of `head_loss`,
//! and the products of their gradients as the gradient operations do them. Those that only repeat a
//! forward product are also in `recomputed`. Everything else is `elementwise`: one for each
//! addition, multiplication, comparison or special function ([`Unary`](super::Unary) ones count as
//! one each), close to what a fused kernel does and reported separately from flops. Moving elements
//! costs bytes only.
//!
//! Bytes are those of operands read once and results written once: what an operation that runs
//! alone moves.

use super::{Function, Module, Node, Op, Tensor, Type};
use crate::op::{Work, attention::Visible};
use std::iter::Sum;
use thiserror::Error;

/// A count that does not fit 128 bits, or depends on an extent that is out of range.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum CostError {
    /// Too large to count.
    #[error("the count of {0} exceeds 128 bits")]
    Overflow(&'static str),
}

/// Costs of an operation, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Multiplies and adds of matrix products.
    pub flops: u128,
    /// Those of `flops` that repeat a product of the forward operation.
    pub recomputed: u128,
    /// Element-wise operations.
    pub elementwise: u128,
    /// Bytes read.
    pub read: u128,
    /// Bytes written.
    pub written: u128,
}

impl Cost {
    /// The sum of two costs.
    pub fn plus(self, other: Cost) -> Result<Cost, CostError> {
        self.zip(other, u128::checked_add)
    }

    /// The cost of `n` times the work.
    pub fn times(self, n: u128) -> Result<Cost, CostError> {
        let all = Cost { flops: n, recomputed: n, elementwise: n, read: n, written: n };
        self.zip(all, u128::checked_mul)
    }

    fn zip(self, other: Cost, f: impl Fn(u128, u128) -> Option<u128>) -> Result<Cost, CostError> {
        let each = |a, b, what| f(a, b).ok_or(CostError::Overflow(what));
        Ok(Cost {
            flops: each(self.flops, other.flops, "flops")?,
            recomputed: each(self.recomputed, other.recomputed, "recomputed flops")?,
            elementwise: each(self.elementwise, other.elementwise, "element-wise operations")?,
            read: each(self.read, other.read, "bytes read")?,
            written: each(self.written, other.written, "bytes written")?,
        })
    }
}

/// Sums results of [`cost`](cost()), stopping at the first error.
impl Sum<Cost> for Result<Cost, CostError> {
    fn sum<I: Iterator<Item = Cost>>(mut costs: I) -> Self {
        costs.try_fold(Cost::default(), Cost::plus)
    }
}

/// Extents that types leave open because values decide them. An extent left out stands for the most
/// that the types allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    /// Depth attention: the last row of the cache that is seen (`0..=row`). Out: the last row.
    pub row: Option<u64>,
    /// Sequence attention whose operands decide: (query, key) pairs that exist, over the whole
    /// batch, for one head, or for all where a program hides other keys from some than from others.
    /// Out: what a causal mask and the window would leave, or all pairs within the window where
    /// only positions are known.
    pub pairs: Option<u64>,
    /// Grouped products: slots in some group, that is, the last offset. Out: all slots.
    pub slots: Option<u64>,
    /// Grouped products: groups that have a slot, whose matrices are read. Out: as many as there
    /// are slots or experts.
    pub groups: Option<u64>,
}

impl Extents {
    /// The extents that these operands (tensors that fit `op`) lead to.
    pub fn observe(op: &Op, operands: &[&Tensor]) -> Extents {
        let ints = |i: usize| operands.get(i).map_or(&[][..], |t| t.ints());
        let first = |i: usize| ints(i).first().map(|&n| n.max(0) as u64);
        let of = Extents::default();
        match op.signature().work {
            Work::Groups(_, offsets) => Extents {
                slots: ints(offsets).last().map(|&n| n.max(0) as u64),
                groups: Some(ints(offsets).windows(2).filter(|o| o[0] < o[1]).count() as u64),
                ..of
            },
            Work::Row(_, _, row) => Extents { row: first(row), ..of },
            Work::Pairs(_, a, mask) => {
                let size = |i: usize, axis: usize| operands[i].dims[axis] as u64;
                let shape = || [size(0, 0), size(0, 1), size(1, 1), size(0, 2)];
                let pairs = || {
                    let scoring = crate::op::attention::Scoring::new(a, operands, mask, a.reads_at(mask));
                    let chosen = a.among.map(|_| ints(mask + a.chosen()));
                    Visible::pairs_of_batch(a, shape(), |k| ints(mask + k), scoring.as_ref(), chosen)
                };
                Extents { pairs: a.by_operands().then(pairs), ..of }
            }
            Work::Nothing
            | Work::Moves
            | Work::Operand(..)
            | Work::Result(_)
            | Work::Counted(_)
            | Work::Dense(_) => of,
        }
    }
}

/// Cost of each node of a function; `extents` gives what is known of a node's.
pub fn nodes(
    module: &Module,
    function: &Function,
    extents: impl Fn(&Node) -> Extents,
) -> Result<Vec<Cost>, CostError> {
    let of = |node: &Node| {
        let operands: Vec<&Type> = node.inputs.iter().map(|&v| function.ty(v)).collect();
        let results: Vec<&Type> = node.results().map(|v| function.ty(v)).collect();
        cost(module, &node.op, &operands, &results, &extents(node))
    };
    function.nodes.iter().map(of).collect()
}

/// Cost of one call of a function.
pub fn total(
    module: &Module,
    function: &Function,
    extents: impl Fn(&Node) -> Extents,
) -> Result<Cost, CostError> {
    nodes(module, function, extents)?.into_iter().sum()
}

/// A count that remembers whether it left the range, so that formulas read as formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count(pub Option<u128>);

impl std::ops::Add for Count {
    type Output = Count;
    fn add(self, other: Count) -> Count {
        Count(self.0.zip(other.0).and_then(|(a, b)| a.checked_add(b)))
    }
}

impl<T: Into<Count>> std::ops::Mul<T> for Count {
    type Output = Count;
    fn mul(self, other: T) -> Count {
        Count(self.0.zip(other.into().0).and_then(|(a, b)| a.checked_mul(b)))
    }
}

impl From<u64> for Count {
    fn from(n: u64) -> Count {
        Count(Some(u128::from(n)))
    }
}

impl Count {
    pub const ZERO: Count = Count(Some(0));

    pub fn min(self, other: Count) -> Count {
        match (self.0, other.0) {
            (Some(a), Some(b)) => Count(Some(a.min(b))),
            // A count beyond the range is the larger one.
            (a, b) => Count(a.or(b)),
        }
    }

    fn get(self, what: &'static str) -> Result<u128, CostError> {
        self.0.ok_or(CostError::Overflow(what))
    }
}

/// Costs before they are known to fit.
pub(crate) struct Counts {
    pub multiply_adds: Count,
    /// Those that repeat the forward operation.
    pub repeated: Count,
    pub elementwise: Count,
    pub read: Count,
    pub written: Count,
}

/// Types of an operation, and sizes in them.
pub(crate) struct Shapes<'a> {
    pub module: &'a Module,
    pub operands: &'a [&'a Type],
    pub results: &'a [&'a Type],
}

impl Shapes<'_> {
    fn count(&self, ty: &Type) -> Count {
        ty.dims.iter().fold(Count::from(1), |n, &d| n * self.module.size(d))
    }

    /// Elements of an operand; none where it is absent.
    pub fn operand(&self, i: usize) -> Count {
        self.operands.get(i).map_or(Count::ZERO, |t| self.count(t))
    }

    /// Elements of a result.
    pub fn result(&self, i: usize) -> Count {
        self.results.get(i).map_or(Count::ZERO, |t| self.count(t))
    }

    /// Size of an operand's dimension; of the last with [`LAST`].
    pub fn size(&self, i: usize, axis: usize) -> u64 {
        let dims = self.operands.get(i).map_or(&[][..], |t| &t.dims);
        let axis = axis.min(dims.len().saturating_sub(1));
        dims.get(axis).map_or(1, |&d| self.module.size(d))
    }

    /// Bytes of `elements` elements of an operand.
    pub fn operand_bytes(&self, i: usize, elements: Count) -> Count {
        elements * self.operands.get(i).map_or(0, |t| t.dtype.bytes())
    }

    fn bytes_of(&self, types: &[&Type]) -> Count {
        types.iter().fold(Count::ZERO, |sum, t| sum + self.count(t) * t.dtype.bytes())
    }

    /// So much element-wise work, on operands and results read and written whole.
    pub fn whole(&self, elementwise: Count) -> Counts {
        Counts {
            multiply_adds: Count::ZERO,
            repeated: Count::ZERO,
            elementwise,
            read: self.bytes_of(self.operands),
            written: self.bytes_of(self.results),
        }
    }

    /// The multiply-adds of a product, on operands and results read and written whole.
    pub fn product(&self, multiply_adds: Count) -> Counts {
        Counts { multiply_adds, ..self.whole(Count::ZERO) }
    }

    /// No work and nothing moved: views and facts, for which no kernel runs.
    pub fn nothing(&self) -> Counts {
        Counts { read: Count::ZERO, written: Count::ZERO, ..self.whole(Count::ZERO) }
    }
}

/// The last dimension, of [`Shapes::size`].
pub(crate) const LAST: usize = usize::MAX;

/// Cost of one operation on operands and results of these types, which fit it.
pub fn cost(
    module: &Module,
    op: &Op,
    operands: &[&Type],
    results: &[&Type],
    extents: &Extents,
) -> Result<Cost, CostError> {
    let s = Shapes { module, operands, results };
    let counts = match op.signature().work {
        Work::Nothing => s.nothing(),
        Work::Moves => s.whole(Count::ZERO),
        Work::Operand(k, each) => s.whole(s.operand(k) * each),
        Work::Result(each) => s.whole(s.result(0) * each),
        Work::Counted(op)
        | Work::Dense(op)
        | Work::Groups(op, _)
        | Work::Row(op, ..)
        | Work::Pairs(op, ..) => op.cost(&s, extents),
    };
    let flops = |n: Count, what| (n * 2).get(what);
    Ok(Cost {
        flops: flops(counts.multiply_adds, "flops")?,
        recomputed: flops(counts.repeated, "recomputed flops")?,
        elementwise: counts.elementwise.get("element-wise operations")?,
        read: counts.read.get("bytes read")?,
        written: counts.written.get("bytes written")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::interpret::execute;
    use crate::ir::random::table;
    use crate::ir::{Attention, Binding, Dim, Function, Mask, infer};
    use crate::op::{Contract, DepthAttention};
    use smallvec::smallvec;

    /// The interpreter counts every multiply-add where it happens; the formulas here must say the
    /// same.
    #[test]
    fn flops_are_twice_the_multiply_adds_executed() {
        for entry in table() {
            let mut most = 0;
            for seed in 0..300 {
                let i = entry.instance(seed);
                let operands: Vec<&Tensor> = i.node().inputs.iter().map(|v| &i.args[v.index()]).collect();
                let extents = Extents::observe(i.op(), &operands);
                let cost = total(&i.module, &i.function, |_| extents).expect("small");
                let executed = execute(&i.module, &i.function, &i.args).expect("valid").multiply_adds[0];
                assert_eq!(cost.flops, 2 * u128::from(executed), "seed {seed}: {extents:?}\n{}", i.module);
                let bound = total(&i.module, &i.function, |_| Extents::default()).expect("small");
                for (exact, bound) in [
                    (cost.flops, bound.flops),
                    (cost.read, bound.read),
                    (cost.written, bound.written),
                    (cost.elementwise, bound.elementwise),
                ] {
                    assert!(exact <= bound, "extents left out are the largest: {extents:?}\n{}", i.module);
                }
                assert!(cost.recomputed <= cost.flops);
                most = most.max(cost.flops);
            }
            let instance = entry.instance(0);
            let work = instance.op().signature().work;
            let product = matches!(work, Work::Dense(_) | Work::Groups(..) | Work::Row(..) | Work::Pairs(..));
            // Its work says no more than that it counts for itself.
            let product = product || entry.name.starts_with("linear_attention");
            assert_eq!(most > 0, product, "{} has flops", entry.name);
        }
    }

    fn dims<const N: usize>(module: &mut Module, sizes: [(&str, u64); N]) -> [Dim; N] {
        sizes.map(|(name, size)| module.dim(name, size))
    }

    fn of(module: &Module, op: &Op, operands: &[&Type], extents: Extents) -> Result<Cost, CostError> {
        let results = infer(module, op, operands).expect("fits");
        cost(module, op, operands, &results.iter().collect::<Vec<_>>(), &extents)
    }

    #[test]
    fn figures_worked_out_by_hand() {
        let mut m = Module::default();
        let [b, t, h, g, d, r] =
            dims(&mut m, [("b", 2), ("t", 10), ("h", 4), ("g", 2), ("d", 8), ("rows", 16)]);
        let (q, k) = (Type::f32(&[b, t, h, d]), Type::f32(&[b, t, g, d]));
        let mut a = Attention { scale: 1.0, ..Attention::default() };
        // 2 sequences of 55 pairs, 4 heads, 2 products of size 8.
        let full = of(&m, &Op::Attention(a.clone()), &[&q, &k, &k], Extents::default()).unwrap();
        assert_eq!(full.flops, 2 * 2 * 55 * 4 * 2 * 8);
        assert_eq!(full.read, 4 * (2 * 10 * 4 * 8 + 2 * (2 * 10 * 2 * 8)));
        assert_eq!(full.written, 4 * (2 * 10 * 4 * 8 + 2 * 10 * 4));
        a.window = Some(3);
        let windowed = of(&m, &Op::Attention(a.clone()), &[&q, &k, &k], Extents::default()).unwrap();
        assert_eq!(windowed.flops, 2 * 2 * (1 + 2 + 3 * 8) * 4 * 2 * 8);
        a.window = None;
        // Depth attention at row 5: 6 keys for each of 20 positions and 4 heads.
        let (dq, dk) = (Type::f32(&[b, t, h, d]), Type::f32(&[r, b, t, g, d]));
        let row = Type::i32(&[]);
        let at = Extents { row: Some(5), ..Extents::default() };
        let depth = of(&m, &Op::DepthAttention(DepthAttention(a)), &[&dq, &dk, &dk, &row], at).unwrap();
        assert_eq!(depth.flops, 2 * 20 * 4 * 6 * 2 * 8);
        assert_eq!(depth.read, 4 * (20 * 4 * 8 + 2 * 6 * 20 * 2 * 8) + 4);
        // A product of 20 rows of 8 with a matrix of 4 rows of 8.
        let (x, w) = (Type::f32(&[b, t, d]), Type { dtype: crate::ir::DType::Bf16, dims: smallvec![h, d] });
        let x16 = Type { dtype: w.dtype, ..x };
        let contract =
            of(&m, &Op::Contract(Contract { over: smallvec![d] }), &[&x16, &w], Extents::default()).unwrap();
        assert_eq!(contract.flops, 2 * 20 * 8 * 4);
        assert_eq!((contract.read, contract.written), (2 * (20 * 8 + 4 * 8), 4 * 20 * 4));
    }

    /// Decoding: one query, a cache with a key in few rows. Only those are read.
    #[test]
    fn keys_that_do_not_exist_cost_nothing() {
        let mut m = Module::default();
        let [b, one, s, h, d] = dims(&mut m, [("b", 1), ("one", 1), ("s", 1024), ("h", 2), ("d", 4)]);
        let (q, k) = (Type::f32(&[b, one, h, d]), Type::f32(&[b, s, h, d]));
        let (query, keys) = (Type::i32(&[b, one]), Type::i32(&[b, s]));
        let op = Op::Attention(Attention { scale: 1.0, mask: Mask::Positions, ..Attention::default() });
        let operands = [&q, &k, &k, &query, &keys];
        let some = Extents { pairs: Some(7), ..Extents::default() };
        let seven = of(&m, &op, &operands, some).unwrap();
        assert_eq!(seven.flops, 2 * 7 * 2 * 2 * 4);
        assert_eq!(seven.read, 4 * (2 * 4 + 2 * 7 * 2 * 4 + 1 + 1024));
        let all = of(&m, &op, &operands, Extents::default()).unwrap();
        assert_eq!(all.flops, 2 * 1024 * 2 * 2 * 4);
    }

    #[test]
    fn overflow_is_an_error() {
        let mut m = Module::default();
        let names = ["a", "b", "c", "d"];
        let [a, b, c, d] = names.map(|n| m.dim(n, 1 << 48));
        let (x, y) = (Type::f32(&[a, b]), Type::f32(&[b, c, d]));
        let overflow = of(&m, &Op::Contract(Contract { over: smallvec![b] }), &[&x, &y], Extents::default());
        assert_eq!(overflow, Err(CostError::Overflow("flops")));
        let one = Cost { flops: u128::MAX, ..Cost::default() };
        assert!(one.plus(Cost { flops: 1, ..Cost::default() }).is_err());
        assert!(one.times(2).is_err());
        assert_eq!(one.times(1), Ok(one));
        assert_eq!(one.times(0), Ok(Cost::default()));
    }

    #[test]
    fn a_call_costs_the_sum_of_its_nodes() {
        let mut m = Module::default();
        let [b, h] = dims(&mut m, [("b", 3), ("h", 5)]);
        let mut f = Function::new("f");
        let x = f.param("x", Binding::Value, Type::f32(&[b, h]));
        let y = f.add(&m, Op::Softmax, &[x]).unwrap()[0];
        f.add(&m, Op::Contract(Contract { over: smallvec![b] }), &[y, x]).unwrap_err();
        f.add(&m, Op::Contract(Contract { over: smallvec![b, h] }), &[y, x]).unwrap();
        let each = nodes(&m, &f, |_| Extents::default()).unwrap();
        assert_eq!(each.len(), 2);
        assert_eq!(total(&m, &f, |_| Extents::default()), each[0].plus(each[1]));
        assert_eq!(each[1].flops, 30);
        assert_eq!(each[0].elementwise, 75);
    }
}
