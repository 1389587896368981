//! The tokens that there are inside a layer, and what the host gives for each of them.

use super::*;
use crate::wiring::lane_type;
use smallvec::smallvec;

impl Lower<'_> {
    pub(super) fn stream_rows(&mut self) -> Dims {
        smallvec![Dim(0), Dim(1)]
    }

    pub(super) fn stream_type(&mut self) -> Type {
        let rows = self.stream_rows();
        match self.architecture.model.stream {
            spec::Stream::Sum | spec::Stream::Attend { .. } => {
                Type::f32(&[&rows[..], &[self.hidden()]].concat())
            }
            spec::Stream::Lanes { count, .. } => lane_type(self, &rows, count),
        }
    }

    pub(super) fn stream(&mut self) -> Value {
        let ty = self.stream_type();
        self.b.param("x", Binding::Stream, ty)
    }

    /// Rows of the tokens here as rows of every token of the stream; -0 for those that take no
    /// part.
    pub(super) fn every_token(&mut self, x: Value) -> Value {
        self.every(x, Row::Token)
    }

    pub(super) fn every(&mut self, x: Value, what: Row) -> Value {
        let mut x = x;
        for i in (0..self.inside.len()).rev() {
            x = match self.inside[i] {
                Inside::Gathered { index, of, .. } => self.b.op(PutTokens { tokens: of }, &[x, index]),
                Inside::Masked { keys: None, .. } if what == Row::Key => x,
                Inside::Masked { keys: Some((keys, _)), .. } if what == Row::Key => {
                    self.b.op(Op::Keep, &[x, keys])
                }
                Inside::Masked { .. } if what == Row::Query && self.form.trains() => x,
                // Updates that keys follow from are of the tokens that have keys.
                Inside::Masked { keys, .. } if what == Row::Query && self.ahead => match keys {
                    Some((keys, _)) => self.b.op(Op::Keep, &[x, keys]),
                    None => x,
                },
                Inside::Masked { places, .. } => self.b.op(Op::Keep, &[x, places]),
            };
        }
        x
    }

    /// Places in the sequence of queries and keys, where a causal mask over the rows there are
    /// would not do.
    pub(super) fn tokens_seen(&mut self, rows: &[Dim], windowed: bool) -> Option<(Value, Value)> {
        let Some(inside) = self.inside.last() else {
            let (asked, all) = (self.asked()?, self.all_places(rows));
            return Some((asked, all));
        };
        match inside {
            // Gathered tokens are in order, but further apart than they look.
            Inside::Gathered { .. } => windowed.then(|| {
                let places = self.token_ints(Ints::Places);
                (places, places)
            }),
            &Inside::Masked { keys, .. } => {
                let (asked, keys) = (self.asked(), keys.map(|(keys, _)| keys));
                if asked.is_none() && keys.is_none() && !(windowed && self.gathered()) {
                    return None;
                }
                match (asked, keys) {
                    (Some(asked), Some(keys)) => Some((asked, keys)),
                    _ => {
                        let all = self.all_places(rows);
                        Some((asked.unwrap_or(all), keys.unwrap_or(all)))
                    }
                }
            }
        }
    }

    /// Integers that the host gives for every token, for the tokens there are here.
    pub(super) fn given(&mut self, input: Input) -> Value {
        self.token_ints(Ints::Given(input))
    }

    /// Integers of the tokens there are here.
    pub(super) fn token_ints(&mut self, ints: Ints) -> Value {
        self.token_ints_at(ints, self.inside.len())
    }

    pub(super) fn token_ints_at(&mut self, which: Ints, depth: usize) -> Value {
        let Some(outside) = depth.checked_sub(1) else {
            let rows = self.stream_rows();
            return match which {
                Ints::Given(input) => self.b.param(input.name(), Binding::Batch(input), Type::i32(&rows)),
                Ints::Places => self.places_in_order(&rows),
                Ints::Draws(number) => {
                    let binding = Binding::Batch(Input::Draws);
                    self.b.param(&Input::draws(number), binding, Type::i32(&rows))
                }
            };
        };
        let Inside::Gathered { index, ints, .. } = &self.inside[outside] else {
            return self.token_ints_at(which, outside);
        };
        if let Some((_, v)) = ints.iter().find(|(n, _)| *n == which) {
            return *v;
        }
        let index = *index;
        let further = self.inside[..outside].iter().any(|i| matches!(i, Inside::Gathered { .. }));
        let v = if which == Ints::Places && !further {
            index
        } else {
            let all = self.token_ints_at(which, outside);
            self.b.op(Op::TakeTokens, &[all, index])
        };
        if let Inside::Gathered { ints, .. } = &mut self.inside[outside] {
            ints.push((which, v));
        }
        v
    }

    /// The suffix of dimensions whose sizes depend on how many tokens there are here.
    pub(super) fn here(&self, rows: &[Dim]) -> String {
        if self.gathered() { format!("_of{}", self.b.module.elements(rows)) } else { String::new() }
    }

    /// Places of the tokens whose updates anybody reads; none where those of all rows are: in
    /// training, where the straight-through gradient asks what a token would have got, and where
    /// keys of all tokens follow from them.
    pub(super) fn asked(&self) -> Option<Value> {
        match self.inside.last() {
            Some(&Inside::Masked { keys, .. }) if self.ahead && !self.form.trains() => {
                keys.map(|(keys, _)| keys)
            }
            Some(&Inside::Masked { places, .. }) if !self.form.trains() => Some(places),
            Some(_) => None,
            None => self.staying.map(|staying| staying.running),
        }
    }

    pub(super) fn gathered(&self) -> bool {
        self.inside.iter().any(|i| matches!(i, Inside::Gathered { .. }))
    }

    /// The place of every token that there is here.
    pub(super) fn all_places(&mut self, rows: &[Dim]) -> Value {
        if self.gathered() {
            return self.token_ints(Ints::Places);
        }
        self.places_in_order(rows)
    }

    /// The number of each row in its sequence.
    pub(super) fn places_in_order(&mut self, rows: &[Dim]) -> Value {
        let zeros = self.b.zeros(&Type::f32(rows));
        self.b.op(Decide { inclusive: true }, &[zeros])
    }
}
