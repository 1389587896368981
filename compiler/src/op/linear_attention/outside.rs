//! Linear attention in the place of a step: its operands for all tokens, and the operations after
//! it.
//!
//! *In*: a step that [`recognise`](super::recognise) reads, and its rows and constants. *Out*:
//! operands of [`LinearAttention`](super::LinearAttention), and the step's outputs from what that
//! reads. *Promise*: decays are not negative, since each is of a kind whose logarithm is known.

use super::{Decay, Delta, Form, Found, Term};
use crate::ir::{Binary, Dim, Dims, Function, Op, Reduce, Unary, Value};
use crate::op::recurrence::Step;
use crate::op::{Arrange, Constant, Reduction, Tokens, Zeros};
use smallvec::smallvec;
use std::collections::HashMap;

/// Where values are made: a graph of equal ones, or a function while it is built.
pub trait Place {
    /// A value of it.
    type Value: Copy;

    /// An operation with one result, or the first of several, where it fits its operands.
    fn make(&mut self, op: Op, inputs: &[Self::Value]) -> Option<Self::Value>;

    /// Dimensions of a value.
    fn dims(&self, of: Self::Value) -> Option<Dims>;

    /// The number that all of a value is, where that is known.
    fn number(&self, of: Self::Value) -> Option<f64>;

    /// The operands of such an operation that makes the value.
    fn operands(&self, of: Self::Value, op: &Op) -> Option<Vec<Self::Value>>;
}

/// A step as linear attention, whose operands are made.
pub struct Moved<'f, P: Place> {
    /// The form.
    pub form: Form,
    /// Operands that are floats and no state.
    pub inputs: Vec<P::Value>,
    read: Value,
    outside: Outside<'f, P>,
}

/// The operands of a step's linear attention, from its rows and constants; nothing where they do
/// not fit, or where a decay may be negative.
pub fn operands<'f, P: Place>(
    p: &mut P,
    step: &'f Step,
    found: &Found,
    tokens: Tokens,
    given: &[P::Value],
) -> Option<Moved<'f, P>> {
    let f = step.function();
    let values = given.iter().enumerate().map(|(k, v)| (Value(k as u32 + 1), *v)).collect();
    let rows = p.dims(*given.first()?)?.get(..2)?.to_vec();
    let mut o = Outside::<P> { f, tokens: rows.into(), state: found.state.clone(), values };
    let size = Some(found.size);
    let value = found.state[found.state.len() - 2..].iter().copied().find(|d| *d != found.size);
    let mut inputs =
        vec![o.operand(p, &found.q, size)?, o.operand(p, &found.k, size)?, o.operand(p, &found.v, value)?];
    for term in found.u.iter().chain(&found.w) {
        inputs.push(o.operand(p, term, size)?);
    }
    let mut decay = Decay::None;
    let mut logs: Option<P::Value> = None;
    for term in &found.decay {
        let factor = o.term(p, term)?;
        let log = o.logarithm(p, factor)?;
        logs = Some(logs.map_or(Some(log), |sum| o.both(p, Binary::Add, sum, log))?);
    }
    if let Some(log) = logs {
        let of_channels = p.dims(log)?.contains(&found.size);
        decay = if of_channels { Decay::Channel } else { Decay::Head };
        inputs.push(o.as_operand(p, log, size.filter(|_| of_channels))?);
    }
    let delta = match (&found.u, &found.w) {
        (None, _) => Delta::None,
        (Some(_), None) => Delta::Key,
        (Some(_), Some(_)) => Delta::Pair,
    };
    let (state, size, before) = (found.state.clone(), found.size, found.before);
    let form = Form { state, size, decay, delta, before, tokens };
    Some(Moved { form, inputs, read: found.read, outside: o })
}

impl<P: Place> Moved<'_, P> {
    /// The outputs of the step, from what the operation reads of its states.
    pub fn outputs(mut self, p: &mut P, read: P::Value) -> Option<Vec<P::Value>> {
        let o = &mut self.outside;
        o.values.insert(self.read, read);
        let results = o.f.results.iter().filter(|(port, _)| !port.binding.is_state());
        let outputs: Vec<Value> = results.map(|(_, v)| *v).collect();
        let mut all = vec![];
        for v in outputs {
            let own = o.value(p, v)?;
            let wanted = [&o.tokens[..], &o.f.ty(v).dims].concat();
            all.push(o.spread(p, own, &wanted)?);
        }
        Some(all)
    }
}

/// A step's values outside of it, for all tokens.
struct Outside<'f, P: Place> {
    f: &'f Function,
    /// Batch and sequence.
    tokens: Dims,
    /// Dimensions of the state.
    state: Dims,
    values: HashMap<Value, P::Value>,
}

impl<P: Place> Outside<'_, P> {
    fn value(&mut self, p: &mut P, v: Value) -> Option<P::Value> {
        if let Some(&id) = self.values.get(&v) {
            return Some(id);
        }
        let node = self.f.nodes.iter().find(|n| n.first == v)?;
        let inputs: Option<Vec<P::Value>> = node.inputs.iter().map(|v| self.value(p, *v)).collect();
        let id = p.make(node.op.clone(), &inputs?)?;
        self.values.insert(v, id);
        Some(id)
    }

    /// Dimensions of the tokens and then of the state, of those that any has.
    fn joined(&self, p: &P, ids: &[P::Value]) -> Option<Dims> {
        let all: Vec<Dims> = ids.iter().map(|id| p.dims(*id)).collect::<Option<_>>()?;
        let order = self.tokens.iter().chain(&self.state);
        let joined: Dims = order.filter(|d| all.iter().any(|dims| dims.contains(d))).copied().collect();
        all.iter().flatten().all(|d| joined.contains(d)).then_some(joined)
    }

    /// An operand of an operation with these dimensions: row kernels take a smaller one whose
    /// dimensions stand at an end of them, and of others one with all of them.
    fn fitted(&self, p: &mut P, id: P::Value, wanted: &[Dim]) -> Option<P::Value> {
        let own = p.dims(id)?;
        let of_tokens = own.starts_with(&self.tokens);
        let strip =
            |dims: &[Dim]| -> Dims { dims.iter().copied().filter(|d| !self.tokens.contains(d)).collect() };
        let (small, large) = (strip(&own), strip(wanted));
        if small.is_empty() || large.starts_with(&small) || large.ends_with(&small) {
            return Some(id);
        }
        let to = if of_tokens { wanted.into() } else { large };
        p.make(Arrange { to }.into(), &[id])
    }

    /// A value with at least these dimensions.
    fn spread(&self, p: &mut P, id: P::Value, wanted: &[Dim]) -> Option<P::Value> {
        if *p.dims(id)? == *wanted {
            return Some(id);
        }
        let id = self.fitted(p, id, wanted)?;
        if *p.dims(id)? == *wanted {
            return Some(id);
        }
        let zeros = p.make(Zeros(wanted.into()).into(), &[])?;
        p.make(Op::Binary(Binary::Add), &[zeros, id])
    }

    fn both(&mut self, p: &mut P, op: Binary, a: P::Value, b: P::Value) -> Option<P::Value> {
        let (of_a, of_b) = (p.dims(a)?, p.dims(b)?);
        let has = |large: &[Dim], small: &[Dim]| small.iter().all(|d| large.contains(d));
        let wanted = match (has(&of_a, &of_b), has(&of_b, &of_a)) {
            (true, _) => of_a,
            (false, true) => of_b,
            (false, false) => self.joined(p, &[a, b])?,
        };
        let (mut a, b) = (self.fitted(p, a, &wanted)?, self.fitted(p, b, &wanted)?);
        if p.dims(a)? != wanted && p.dims(b)? != wanted {
            a = self.spread(p, a, &wanted)?;
        }
        p.make(Op::Binary(op), &[a, b])
    }

    fn term(&mut self, p: &mut P, term: &Term) -> Option<P::Value> {
        let (list, op) = match term {
            Term::Own(v) => return self.value(p, *v),
            Term::Number(x) => return p.make(Constant(*x).into(), &[]),
            Term::Inverse(x) => {
                let x = self.term(p, x)?;
                return p.make(Op::Unary(Unary::Recip), &[x]);
            }
            Term::Over(x, d) => {
                let x = self.term(p, x)?;
                let wanted = with_dim(self.joined(p, &[x])?, *d, &self.tokens, &self.state);
                let x = self.spread(p, x, &wanted)?;
                return p.make(Reduction { how: Reduce::Sum, over: smallvec![*d] }.into(), &[x]);
            }
            Term::Product(list) => (list, Binary::Mul),
            Term::Sum(list) => (list, Binary::Add),
        };
        let Some((first, rest)) = list.split_first() else {
            return p.make(Constant(if op == Binary::Mul { 1.0 } else { 0.0 }).into(), &[]);
        };
        let mut sum = self.term(p, first)?;
        for term in rest {
            let next = self.term(p, term)?;
            sum = self.both(p, op, sum, next)?;
        }
        Some(sum)
    }

    /// A term as an operand of linear attention, whose last dimension is `last`.
    fn operand(&mut self, p: &mut P, term: &Term, last: Option<Dim>) -> Option<P::Value> {
        let id = self.term(p, term)?;
        self.as_operand(p, id, last)
    }

    fn as_operand(&self, p: &mut P, id: P::Value, last: Option<Dim>) -> Option<P::Value> {
        let own = p.dims(id)?;
        let heads = &self.state[..self.state.len() - 2];
        let heads = heads.iter().filter(|d| own.contains(d));
        let wanted: Dims = self.tokens.iter().chain(heads).copied().chain(last).collect();
        own.iter().all(|d| wanted.contains(d)).then_some(())?;
        self.spread(p, id, &wanted)
    }

    /// The logarithm of a value that is not negative by what it is: an exponential, a sigmoid, a
    /// number, a product of those, or one of them in more dimensions.
    fn logarithm(&mut self, p: &mut P, id: P::Value) -> Option<P::Value> {
        if let Some(x) = p.operands(id, &Op::Unary(Unary::Exp)) {
            return x.first().copied();
        }
        if let Some(x) = p.operands(id, &Op::Unary(Unary::Sigmoid)) {
            let x = p.make(Op::Unary(Unary::Neg), &x)?;
            let x = p.make(Op::Unary(Unary::Softplus), &[x])?;
            return p.make(Op::Unary(Unary::Neg), &[x]);
        }
        if let Some(x) = p.number(id) {
            return if x > 0.0 { p.make(Constant(x.ln()).into(), &[]) } else { None };
        }
        if let Some(&[a, b]) = p.operands(id, &Op::Binary(Binary::Add)).as_deref()
            && let Some((zeros, shown)) =
                [(a, b), (b, a)].into_iter().find(|(zeros, _)| p.number(*zeros) == Some(0.0))
        {
            let log = self.logarithm(p, shown)?;
            return p.make(Op::Binary(Binary::Add), &[zeros, log]);
        }
        let x = p.operands(id, &Op::Binary(Binary::Mul))?;
        let (a, b) = (self.logarithm(p, *x.first()?)?, self.logarithm(p, *x.get(1)?)?);
        self.both(p, Binary::Add, a, b)
    }
}

/// Dimensions with one more in its place.
fn with_dim(dims: Dims, d: Dim, tokens: &[Dim], state: &[Dim]) -> Dims {
    tokens.iter().chain(state).copied().filter(|x| *x == d || dims.contains(x)).collect()
}
