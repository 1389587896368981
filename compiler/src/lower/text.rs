//! Mixers of the sequence that keep something of each text, and what they keep while it is
//! generated.
//!
//! Without caches a mixer sees whole rows of tokens. With caches a call has some tokens of each
//! text, and what came before them is in a state of lifetime [`Lifetime::Text`]: zero where the
//! text begins, and left as it was by tokens of negative slot.

use super::*;
use crate::op::Shift;

impl Lower<'_> {
    /// A number for each token, negative for those that a mixer of the sequence passes over:
    /// padding, and tokens that take no part in the `skip` around. `None` where it sees all rows:
    /// tokens that left their loop are seen as their last pass was ([`Lower::of_last`]).
    pub(super) fn mixed(&mut self) -> Option<Value> {
        let masked = match self.inside.last() {
            Some(&Inside::Masked { keys, .. }) => keys.map(|(keys, _)| keys),
            Some(Inside::Gathered { .. }) | None => None,
        };
        masked.or_else(|| self.shape.cache.map(|_| self.given(Input::Slots)))
    }

    /// The state of that part that a component keeps of each text, before this call:
    /// `f32[batch, ..]`. The function returns its new value under the same port.
    pub(super) fn text_state(&mut self, c: Owner, part: Part, dims: &[Dim]) -> (Port, Value) {
        let batch = self.stream_rows()[0];
        let ty = Type::f32(&[&[batch], dims].concat());
        self.state(c, part, Lifetime::Text, ty)
    }

    /// The value `by` tokens before, zero where the text or its document has none. Its state is
    /// that part.
    pub(super) fn shifted(&mut self, c: Owner, part: Part, v: Value, by: u64) -> Value {
        let mixed = self.mixed();
        if self.shape.cache.is_none() {
            let segments = self.shape.segments.then(|| self.given(Input::Segments));
            let shift = Shift { by, ahead: false, places: mixed.is_some(), segments: segments.is_some() };
            let operands: Vec<Value> = [Some(v), mixed, segments].into_iter().flatten().collect();
            return self.b.op(shift, &operands);
        }
        let slots = mixed.unwrap_or_else(|| self.given(Input::Slots));
        let rows = self.dim_of(c, &format!("before{by}"), by);
        let (port, history) = self.text_state(c, part, &[&[rows], &self.b.dims(v)[2..]].concat());
        let shifted = self.b.ops(Op::ShiftState, &[v, history, slots]);
        self.b.result(port, shifted[1]);
        shifted[0]
    }
}
