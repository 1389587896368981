//! Adapters: matrices of low rank beside those of components (LoRA, 2106.09685, section 4.1).
//!
//! `y = W x + s B (A x)`, `s = alpha / rank`, with a pair of factors for each matrix of a component
//! that the model adapts. Queries, keys and values come of one matrix `W` and have a pair each.

use super::*;
use crate::bind::{Adapted, Factor};

/// The factors of an adapter, and their rank.
struct Pair {
    a: Value,
    b: Value,
    rank: Dim,
    scale: f64,
}

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
        let (size, scale) = (adapt.rank, adapt.scale());
        let rank = self.dim_of(c, "adapter", size);
        let kind = if many.is_empty() { TensorKind::Matrix } else { TensorKind::Routed };
        // Kaiming's uniform numbers with a slope of √5, which `peft` draws.
        let bound = (self.b.module.size(over).max(1) as f64).sqrt().recip();
        let [first, second] = [[rank, over], [out, rank]].map(|ends| [many, &ends].concat());
        let (uniform, zero) = (Init::Uniform(-bound, bound), Init::Constant(0.0));
        let a = self.weight(c, Part::Adapter(matrix, Factor::A), &first, kind, Some(uniform));
        let b = self.weight(c, Part::Adapter(matrix, Factor::B), &second, kind, Some(zero));
        Some(Pair { a, b, rank, scale })
    }

    /// `y + s B (A x)`; `y` where nothing adapts the matrix that made it of `x`.
    pub(super) fn adapted(
        &mut self,
        c: Owner,
        matrix: Adapted,
        [x, y]: [Value; 2],
        [out, over]: [Dim; 2],
    ) -> Value {
        let Some(Pair { a, b, rank, scale }) = self.pair(c, matrix, &[], [out, over]) else { return y };
        let low = self.b.contract(x, a, &[over]);
        let low = self.b.scale(low, scale);
        let low = self.b.contract(low, b, &[rank]);
        self.b.add(y, low)
    }

    /// The same of slots of a mixture, each with the factors of its matrix.
    pub(super) fn adapted_each(
        &mut self,
        c: Owner,
        matrix: Adapted,
        [x, y, offsets]: [Value; 3],
        [many, out, over]: [Dim; 3],
    ) -> Value {
        let Some(Pair { a, b, rank, scale }) = self.pair(c, matrix, &[many], [out, over]) else { return y };
        let low = self.b.op(Grouped { over }, &[x, a, offsets]);
        let low = self.b.scale(low, scale);
        let low = self.b.op(Grouped { over: rank }, &[low, b, offsets]);
        self.b.add(y, low)
    }

    /// `W + s B A`, for what multiplies by the matrix itself.
    pub(super) fn adapted_whole(&mut self, c: Owner, matrix: Adapted, w: Value, ends: [Dim; 2]) -> Value {
        let Some(Pair { a, b, rank, scale }) = self.pair(c, matrix, &[], ends) else { return w };
        let b = self.b.scale(b, scale);
        let low = self.b.contract(b, a, &[rank]);
        self.b.add(w, low)
    }
}
