//! Adapters: matrices of low rank added to those of components (LoRA, 2106.09685, section 4.1).
//!
//! `y = W x + s B (A x)`, `s = alpha / rank`, with a pair of factors for each matrix of a component
//! that the model adapts. Queries, keys and values come of one matrix `W` and have a pair each.
//!
//! Of DoRA (2402.09353, equation 5) row `i` of that sum is times `m_i / n_i`: a magnitude that is
//! learned, and the row's own, `n_i = |W_i + s (B A)_i|`, a constant to the gradient (section 4.3).
//! The sum is never made. `n² = |W|² + s Σ_r B (2 W Aᵀ + s B A Aᵀ)` of rows, and `|W|` is kept with
//! the adapter: only a matmul with `rank` tokens reads `W` once more.

use super::*;
use crate::bind::{Adapted, Factor};
use crate::op::{Binary, ByHead, Concat};

/// The factors of an adapter, and their rank.
struct Pair {
    a: Value,
    b: Value,
    rank: Dim,
    scale: f64,
    dora: bool,
}

/// The square of a row's norm is at least this much, so that a row of zeros stays one.
pub const LEAST_NORM: f64 = 1e-30;

impl Lower<'_> {
    /// The adapter of the model, where it reaches a matrix.
    fn reaching(&self, c: Owner, matrix: Adapted) -> Option<&spec::Adapt> {
        let adapt = self.architecture.model.adapt.as_ref()?;
        let outermost = self.architecture.outermost(c);
        let Owner::Component(_) = outermost else { return None };
        let (outer, own) = (self.architecture.label(outermost), self.architecture.label(c));
        let inner = own.strip_prefix(&outer).unwrap_or_default().trim_start_matches('.');
        let name = match inner {
            "" => matrix.name().into_owned(),
            inner => format!("{inner}.{}", matrix.name()),
        };
        adapt.reaches(&outer, &name).then_some(adapt)
    }

    /// The factors of a matrix `[many.., out, in]`.
    fn pair(&mut self, c: Owner, matrix: Adapted, many: &[Dim], [out, over]: [Dim; 2]) -> Option<Pair> {
        let adapt = self.reaching(c, matrix)?;
        let (size, scale, dora) = (adapt.rank, adapt.scale(), adapt.dora);
        let rank = self.dim_of(c, "adapter", size);
        let kind = if many.is_empty() { TensorKind::Matrix } else { TensorKind::Routed };
        // Kaiming's uniform numbers with a slope of √5, which `peft` draws.
        let bound = (self.b.module.size(over).max(1) as f64).sqrt().recip();
        let [first, second] = [[rank, over], [out, rank]].map(|ends| [many, &ends].concat());
        let (uniform, zero) = (Init::Uniform(-bound, bound), Init::Constant(0.0));
        let a = self.weight(c, matrix.adapter(Factor::A), &first, kind, Some(uniform));
        let b = self.weight(c, matrix.adapter(Factor::B), &second, kind, Some(zero));
        Some(Pair { a, b, rank, scale, dora })
    }

    /// `m / n` of every row of an adapted matrix, `[many.., out]`, where it is one of DoRA;
    /// `crossing` makes `A Wᵀ`, `[many.., rank, out]`, of `A`.
    fn direction(
        &mut self,
        c: Owner,
        matrix: Adapted,
        pair: &Pair,
        crossing: impl FnOnce(&mut Self, Value) -> Value,
        (many, [out, over]): (&[Dim], [Dim; 2]),
    ) -> Option<Value> {
        let Pair { a, b, rank, scale, dora: true } = *pair else { return None };
        let size = self.b.module.size(rank);
        let again = self.dim_of(c, "adapter_again", size);
        let with = |dims: &[Dim]| [many, dims].concat();
        let (rows, one) = (with(&[out]), Some(Init::Constant(1.0)));
        let mut vector = |factor| self.weight(c, matrix.adapter(factor), &rows, TensorKind::Steady, one);
        let (magnitude, own) = (vector(Factor::Magnitude), vector(Factor::Norm));
        // `A Wᵀ` and `B A Aᵀ`.
        let crossing = crossing(self, a);
        let crossing = self.b.arrange(crossing, &with(&[out, rank]));
        let second = self.b.reshape(a, &with(&[again, over]));
        let square = self.products(a, second, many, over);
        let square = self.b.arrange(square, &with(&[again, rank]));
        let square = self.products(b, square, many, rank);
        let square = self.b.reshape(square, &with(&[out, rank]));
        let (crossing, square) = (self.b.scale(crossing, 2.0), self.b.scale(square, scale));
        let sum = self.b.add(crossing, square);
        let each = self.b.mul(b, sum);
        let added = self.b.reduce(Reduce::Sum, each, &[rank]);
        let added = self.b.scale(added, scale);
        let own = self.b.unary(Unary::Square, own);
        let norm = self.b.add(own, added);
        let least = self.b.constant(LEAST_NORM);
        let norm = self.b.op(Binary::Max, &[norm, least]);
        let norm = self.b.unary(Unary::Rsqrt, norm);
        let norm = self.b.stop_gradient(norm);
        Some(self.b.mul(magnitude, norm))
    }

    /// `x Wᵀ` of each of `many` matrices:
    /// `(x[many.., n, over], w[many.., m, over]) -> [many.., n, m]`.
    fn products(&mut self, x: Value, w: Value, many: &[Dim], over: Dim) -> Value {
        let [each] = *many else { return self.b.contract(x, w, &[over]) };
        let (n, m) = (self.b.dims(x)[1], self.b.dims(w)[1]);
        let x = self.b.arrange(x, &[n, each, over]);
        let y = self.b.op(ByHead { over, part: m, first: 0 }, &[x, w]);
        self.b.arrange(y, &[each, n, m])
    }

    /// `y + s B (A x)`, each row with its direction, where `w` made `y` of `x`; parts of its rows
    /// have an adapter each, or none.
    pub(super) fn adapted(
        &mut self,
        c: Owner,
        own: &[(Adapted, Dim)],
        [x, y, w]: [Value; 3],
        [out, over]: [Dim; 2],
    ) -> Value {
        if !own.iter().any(|(matrix, _)| self.reaching(c, *matrix).is_some()) {
            return y;
        }
        let sizes: Dims = own.iter().map(|(_, size)| *size).collect();
        let cut = |lower: &mut Self, y| match own {
            [_] => vec![y],
            _ => lower.b.ops(Split(sizes.clone()), &[y]),
        };
        let mut parts = cut(self, y);
        for (at, (part, &(matrix, rows))) in parts.iter_mut().zip(own).enumerate() {
            let Some(pair) = self.pair(c, matrix, &[], [rows, over]) else { continue };
            let low = self.b.contract(x, pair.a, &[over]);
            let low = self.b.scale(low, pair.scale);
            let low = self.b.contract(low, pair.b, &[pair.rank]);
            *part = self.b.add(*part, low);
            let crossing = |lower: &mut Self, a| {
                let all = lower.b.contract(a, w, &[over]);
                cut(lower, all)[at]
            };
            if let Some(direction) = self.direction(c, matrix, &pair, crossing, (&[], [rows, over])) {
                *part = self.b.mul(*part, direction);
            }
        }
        match parts[..] {
            [y] => y,
            _ => self.b.op(Concat(out), &parts),
        }
    }

    /// The same of slots of a mixture, each with the factors of its matrix.
    pub(super) fn adapted_each(
        &mut self,
        c: Owner,
        part: Part,
        ([x, y, offsets], w): ([Value; 3], Value),
        [many, out, over]: [Dim; 3],
    ) -> Value {
        let Some(matrix) = part.adaptable() else { return y };
        let Some(pair) = self.pair(c, matrix, &[many], [out, over]) else { return y };
        let low = self.b.op(Grouped { over }, &[x, pair.a, offsets]);
        let low = self.b.scale(low, pair.scale);
        let low = self.b.op(Grouped { over: pair.rank }, &[low, pair.b, offsets]);
        let y = self.b.add(y, low);
        let crossing = |lower: &mut Self, a| lower.products(a, w, &[many], over);
        let direction = self.direction(c, matrix, &pair, crossing, (&[many], [out, over]));
        let Some(direction) = direction else { return y };
        let each = self.row_of_each(direction, y, offsets);
        self.b.mul(y, each)
    }

    /// `W + s B A`, each row with its direction, for what multiplies by the matrix itself.
    pub(super) fn adapted_whole(&mut self, c: Owner, matrix: Adapted, w: Value, ends: [Dim; 2]) -> Value {
        let Some(pair) = self.pair(c, matrix, &[], ends) else { return w };
        let b = self.b.scale(pair.b, pair.scale);
        let low = self.b.contract(b, pair.a, &[pair.rank]);
        let sum = self.b.add(w, low);
        let crossing = |lower: &mut Self, a| lower.products(a, w, &[], ends[1]);
        match self.direction(c, matrix, &pair, crossing, (&[], ends)) {
            Some(direction) => self.b.mul(sum, direction),
            None => sum,
        }
    }
}
