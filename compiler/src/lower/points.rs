//! Values that can be looked at and changed from outside, and the probabilities of attentions.

use super::*;

/// The output of an attention for these values in the place of its own.
type Attend<'f> = &'f dyn Fn(&mut Lower, Value) -> Value;

impl Lower<'_> {
    /// Names a value of a component for [`crate::probe`].
    pub(super) fn point(&mut self, owner: Owner, name: &str, value: Value) {
        let name = format!("{}.{name}", self.architecture.label(owner));
        self.b.point(name, value);
    }

    /// Probabilities `[b, t, heads, keys]` of an attention along the sequence, before a sink takes
    /// its share.
    pub(super) fn scores(&mut self, op: &ir::Attention, operands: &[Value]) -> Value {
        let values = self.b.dims(operands[2]);
        self.mixed_units(values[1], &values, &|lower, units| {
            let mut operands = operands.to_vec();
            operands[2] = units;
            lower.b.ops(Op::Attention(op.clone()), &operands)[0]
        })
    }

    /// Probabilities `[b, t, heads, depths]` of an attention over depth, 0 of depths to come.
    pub(super) fn depth_scores(&mut self, c: Owner, op: &ir::Attention, [q, k, v, row]: [Value; 4]) {
        let values = self.b.dims(v);
        let scores = self.mixed_units(values[0], &values, &|lower, units| {
            lower.b.op(DepthAttention(op.clone()), &[q, k, units, row])
        });
        let scores = self.here_again(scores);
        self.point(c, "scores", scores);
    }

    /// The probabilities with which an attention mixes its values `[.., keys, .., size]`: its
    /// output where the values are unit vectors, as many keys at once as a value is long. Masks,
    /// windows, caps and programs of the score are those of the attention, by construction.
    fn mixed_units(&mut self, keys: Dim, values: &[Dim], attend: Attend) -> Value {
        let Some(&size) = values.last() else { return Value(0) };
        let [all, each] = [keys, size].map(|dim| self.b.module.size(dim));
        let name = format!("{}.keys", self.b.module.name(keys));
        let mut parts = vec![];
        for first in (0..all).step_by(each.max(1) as usize) {
            let units = self.units(keys, size, first);
            let units = self.b.arrange(units, values);
            let mut part = attend(self, units);
            let left = all - first;
            if left < each {
                let some = [left, each - left].map(|n| self.dim(&format!("{name}{n}"), n));
                part = self.b.ops(Split(some[..].into()), &[part])[0];
            }
            parts.push(part);
        }
        let keys = self.dim(&name, all);
        match parts[..] {
            [part] => {
                let rows = self.b.rows(part);
                self.b.reshape(part, &[&rows[..], &[keys]].concat())
            }
            _ => self.b.op(Concat(keys), &parts),
        }
    }

    /// `[keys, size]`: row `j` has 1 in place `j - first`, where it has that place, else zeros.
    fn units(&mut self, keys: Dim, size: Dim, first: u64) -> Value {
        let one = self.one();
        let mut numbers = |of: Dim| {
            let zeros = self.b.zeros(&Type::f32(&[one, of]));
            let places = self.b.op(Decide { inclusive: true }, &[zeros]);
            let numbers = self.b.op(Op::Numbers, &[places]);
            self.b.reshape(numbers, &[of])
        };
        let (row, column) = (numbers(keys), numbers(size));
        let first = self.b.constant(first as f64);
        let column = self.b.add(column, first);
        let zeros = self.b.zeros(&Type::f32(&[keys, size]));
        let column = self.b.add(zeros, column);
        let apart = self.b.sub(column, row);
        let apart = self.b.unary(Unary::Square, apart);
        let apart = self.b.unary(Unary::Positive, apart);
        let one = self.b.constant(1.0);
        self.b.sub(one, apart)
    }
}
