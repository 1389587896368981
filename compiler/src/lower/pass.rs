//! Weights that every pass of a loop has for itself, or every application of a layer inside.
//!
//! They are bound as [`Binding::PassWeight`] and [`Binding::TurnWeight`]: a function reads those of
//! its pass, or application, and checkpoints hold all of them as one tensor.

use super::*;
use crate::architecture::Passes;
use crate::bind::{Adapted, Factor};

/// Tensors of the passes of a loop.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("pass", path)
    }

    /// The vector that a pass adds to the stream where it begins.
    pub const EMBEDDING: Part = own("embed.weight");
}

impl Lower<'_> {
    fn passes(&self) -> Option<Passes> {
        self.body.and_then(|body| body.passes)
    }

    /// `x + E_p`: where pass `p` begins.
    pub(super) fn begin_pass(&mut self) {
        let x = self.stream();
        let (hidden, passes) = (self.hidden(), self.passes().map(|passes| passes.count));
        let bound = (Binding::PassWeight, passes);
        let (zero, kind) = (Some(Init::Constant(0.0)), TensorKind::Steady);
        let e = self.bound_weight(Owner::Loop, part::EMBEDDING, &[hidden], kind, zero, bound);
        let y = self.b.add(x, e);
        let y = self.of_staying(x, y);
        self.b.result(Port::new("y", Binding::Stream), y);
    }

    /// A weight, one for every pass where `each` says so.
    pub(super) fn weight_of_pass(
        &mut self,
        owner: Owner,
        part: Part,
        dims: &[Dim],
        (kind, init): (TensorKind, Option<Init>),
        each: bool,
    ) -> Value {
        match self.passes().filter(|_| each) {
            Some(passes) => {
                let bound = (Binding::PassWeight, Some(passes.count));
                self.bound_weight(owner, part, dims, kind, init, bound)
            }
            None => self.weight(owner, part, dims, kind, init),
        }
    }

    /// A weight that every application has for itself, inside loops, too.
    pub(crate) fn weight_each(
        &mut self,
        owner: Owner,
        part: Part,
        dims: &[Dim],
        kind: TensorKind,
        init: Init,
    ) -> Value {
        match self.body.and_then(|body| body.recurrent) {
            None => self.weight(owner, part, dims, kind, Some(init)),
            Some(times) => {
                let bound = (Binding::TurnWeight, Some(times));
                self.bound_weight(owner, part, dims, kind, Some(init), bound)
            }
        }
    }

    /// `W x` with a matrix of a component, `[out, in]`: `(W + B_p A_p) x` where passes add to it,
    /// and what an adapter adds.
    pub(super) fn matrix(
        &mut self,
        c: Owner,
        part: Part,
        x: Value,
        [out, over]: [Dim; 2],
        init: Option<Init>,
    ) -> Value {
        let own = part.adaptable().map(|matrix| (matrix, out));
        self.matrix_of(c, (part, own.as_slice()), x, [out, over], init)
    }

    /// The same with an adapter for each of these parts of its rows.
    pub(super) fn matrix_of(
        &mut self,
        c: Owner,
        (part, own): (Part, &[(Adapted, Dim)]),
        x: Value,
        [out, over]: [Dim; 2],
        init: Option<Init>,
    ) -> Value {
        let w = self.weight(c, part, &[out, over], TensorKind::Matrix, init);
        let y = self.b.contract(x, w, &[over]);
        let y = self.adapted(c, own, [x, y, w], [out, over]);
        let Some((a, b, rank)) = self.factors(c, part, [out, over]) else { return y };
        let low = self.b.contract(x, a, &[over]);
        let low = self.b.contract(low, b, &[rank]);
        self.b.add(y, low)
    }

    /// `W + B_p A_p`, with what an adapter adds: the matrix itself, for what multiplies by it
    /// elsewhere.
    pub(super) fn whole_matrix(&mut self, c: Owner, part: Part, ends: [Dim; 2], init: Option<Init>) -> Value {
        let w = self.weight(c, part, &ends, TensorKind::Matrix, init);
        let w = match part.adaptable() {
            Some(matrix) => self.adapted_whole(c, matrix, w, ends),
            None => w,
        };
        let Some((a, b, rank)) = self.factors(c, part, ends) else { return w };
        let low = self.b.contract(b, a, &[rank]);
        self.b.add(w, low)
    }

    /// `A_p`, `B_p` and their rank, where passes add to a matrix.
    fn factors(&mut self, c: Owner, part: Part, [out, over]: [Dim; 2]) -> Option<(Value, Value, Dim)> {
        let (passes, rank) = self.passes().and_then(|passes| Some((passes.count, passes.lora?)))?;
        let adapted = part.adapted()?;
        // A component may stand in two loops with adapters of two ranks.
        let rank = self.dim_of(c, &format!("rank{rank}"), rank);
        let bound = (Binding::PassWeight, Some(passes));
        let kind = TensorKind::Matrix;
        let a = self.bound_weight(c, adapted.low(Factor::A), &[rank, over], kind, None, bound);
        let zero = Some(Init::Constant(0.0));
        let b = self.bound_weight(c, adapted.low(Factor::B), &[out, rank], kind, zero, bound);
        Some((a, b, rank))
    }
}
