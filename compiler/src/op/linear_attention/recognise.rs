//! Which steps of a recurrence are linear attention, and what stands in the way of the others.
//!
//! *In*: a [`Step`]. *Out*: the operands of [`LinearAttention`](super::LinearAttention) as terms of
//! what the step reads, or an [`Obstacle`]. *Promise*: a step that is found computes what the
//! operation does, given that its state begins at zero and that its decays are not negative, which
//! the rewriting rule proves of the operands.
//!
//! The nodes of a step are read as functions of its state `S[.., e, d]`: a *matrix* is `a ⊙ S` and
//! products of a vector of values and one of keys, a *vector* is sums of `c ⊙ (S x)` and what does
//! not depend on the state.

use crate::ir::{Binary, Dim, Dims, Function, Node, Op, Reduce, Type, Unary, Value};
use crate::op::recurrence::Step;
use crate::op::{Contract, Reduction};
use smallvec::smallvec;
use std::collections::HashMap;

/// A value of a step that reads no state.
#[derive(Clone, Debug, PartialEq)]
pub enum Term {
    /// A value of the step.
    Own(Value),
    /// A number.
    Number(f64),
    /// A product; 1 where it is empty.
    Product(Vec<Term>),
    /// A sum; 0 where it is empty.
    Sum(Vec<Term>),
    /// One over it.
    Inverse(Box<Term>),
    /// Its sum over a dimension.
    Over(Box<Term>, Dim),
}

/// A step that is linear attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Dimensions of the state.
    pub state: Dims,
    /// That of keys.
    pub size: Dim,
    /// Queries.
    pub q: Term,
    /// Keys.
    pub k: Term,
    /// Values.
    pub v: Term,
    /// The vector with which a delta reads the state.
    pub u: Option<Term>,
    /// The vector with which it writes, where that is not `k`.
    pub w: Option<Term>,
    /// Factors of the decay; none where there is none.
    pub decay: Vec<Term>,
    /// Whether the output reads the state before the token.
    pub before: bool,
    /// The value of the step that is `S q`; its outputs are functions of it.
    pub read: Value,
}

/// Why a step is no linear attention.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Obstacle(pub String);

type Result<T> = std::result::Result<T, Obstacle>;

fn obstacle<T>(what: impl Into<String>) -> Result<T> {
    Err(Obstacle(what.into()))
}

/// `Σ c ⊙ (S x) + rest`.
#[derive(Clone, Debug, Default)]
struct Vector {
    seen: Vec<(Term, Term)>,
    rest: Vec<Term>,
}

/// `scale ⊙ S + Σ vector ⊗ key`; without a scale there is no `S`.
#[derive(Clone, Debug, Default)]
struct Matrix {
    scale: Option<Vec<Term>>,
    terms: Vec<(Vector, Term)>,
}

/// A value of a step as a function of its state.
#[derive(Clone, Debug)]
enum Kind {
    Constant,
    Matrix(Matrix),
    Vector(Vector),
    /// Another function, for this reason none of the above.
    Other(String),
}

fn product(a: &Term, b: &Term) -> Term {
    let factors = |t: &Term| match t {
        Term::Product(list) => list.clone(),
        Term::Number(1.0) => vec![],
        other => vec![other.clone()],
    };
    let mut list = [factors(a), factors(b)].concat();
    if list.len() == 1 { list.remove(0) } else { Term::Product(list) }
}

fn one() -> Term {
    Term::Product(vec![])
}

impl Vector {
    fn times(mut self, by: &Term) -> Vector {
        self.seen.iter_mut().for_each(|(c, _)| *c = product(c, by));
        self.rest.iter_mut().for_each(|t| *t = product(t, by));
        self
    }

    fn plus(mut self, other: Vector) -> Vector {
        self.seen.extend(other.seen);
        self.rest.extend(other.rest);
        self
    }
}

/// Reads the nodes of a step.
struct Reader<'a> {
    f: &'a Function,
    size: Dim,
    value: Dim,
    kinds: Vec<Kind>,
}

/// The operations that can stand before or after a recurrence as well as in its step.
fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Constant(_)
            | Op::Zeros(_)
            | Op::Reduce(_)
            | Op::Rms(_)
            | Op::Softmax
    )
}

/// The node that makes a value.
fn node(f: &Function, v: Value) -> Option<&Node> {
    f.nodes.iter().find(|n| n.results().any(|r| r == v))
}

/// Whether a value is zeros, in which another is shown in more dimensions.
fn is_zeros(f: &Function, v: Value) -> bool {
    node(f, v).is_some_and(|n| matches!(n.op, Op::Zeros(_)))
}

/// The value that another shows in more dimensions.
fn peeled(f: &Function, v: Value) -> Value {
    match node(f, v) {
        Some(Node { op: Op::Binary(Binary::Add), inputs, .. }) if is_zeros(f, inputs[0]) => {
            peeled(f, inputs[1])
        }
        Some(Node { op: Op::Binary(Binary::Add), inputs, .. }) if is_zeros(f, inputs[1]) => {
            peeled(f, inputs[0])
        }
        _ => v,
    }
}

/// The factors of a value that reads no state.
fn factors(f: &Function, v: Value) -> Vec<Term> {
    let v = peeled(f, v);
    match node(f, v) {
        Some(Node { op: Op::Binary(Binary::Mul), inputs, .. }) => {
            [factors(f, inputs[0]), factors(f, inputs[1])].concat()
        }
        Some(Node { op: Op::Unary(Unary::Neg), inputs, .. }) => {
            [vec![Term::Number(-1.0)], factors(f, inputs[0])].concat()
        }
        _ => vec![Term::Own(v)],
    }
}

impl Term {
    /// Whether it has a dimension.
    fn has(&self, f: &Function, d: Dim) -> bool {
        match self {
            Term::Own(v) => f.ty(*v).has(d),
            Term::Number(_) => false,
            Term::Product(list) | Term::Sum(list) => list.iter().any(|t| t.has(f, d)),
            Term::Inverse(t) => t.has(f, d),
            Term::Over(t, over) => d != *over && t.has(f, d),
        }
    }

    /// The values of the step in it.
    fn values(&self) -> Vec<Value> {
        match self {
            Term::Own(v) => vec![*v],
            Term::Number(_) => vec![],
            Term::Product(list) | Term::Sum(list) => list.iter().flat_map(Term::values).collect(),
            Term::Inverse(t) | Term::Over(t, _) => t.values(),
        }
    }
}

impl Reader<'_> {
    fn term(&self, v: Value) -> Term {
        let mut list = factors(self.f, v);
        if list.len() == 1 { list.remove(0) } else { Term::Product(list) }
    }

    fn kind(&self, v: Value) -> &Kind {
        &self.kinds[v.index()]
    }

    /// A value that reads no state as a product of a vector of values and one of keys.
    fn outer(&self, v: Value) -> Result<(Vector, Term)> {
        let (mut left, mut right) = (one(), one());
        for factor in factors(self.f, v) {
            match (factor.has(self.f, self.value), factor.has(self.f, self.size)) {
                (true, true) => {
                    return obstacle(
                        "what is added to the state is no product of a vector of values and one of keys",
                    );
                }
                (_, false) => left = product(&left, &factor),
                (false, true) => right = product(&right, &factor),
            }
        }
        Ok((Vector { seen: vec![], rest: vec![left] }, right))
    }

    fn times(&self, x: &Kind, by: &Term) -> Result<Kind> {
        let (value, size) = (by.has(self.f, self.value), by.has(self.f, self.size));
        Ok(match x {
            Kind::Matrix(_) if value => return obstacle("a factor of the state differs from value to value"),
            Kind::Matrix(m) => Kind::Matrix(Matrix {
                scale: m.scale.as_ref().map(|s| [&s[..], std::slice::from_ref(by)].concat()),
                terms: m.terms.iter().map(|(v, k)| (v.clone(), product(k, by))).collect(),
            }),
            Kind::Vector(_) if size && value => {
                return obstacle("a product of the state and a key is multiplied by a matrix");
            }
            Kind::Vector(v) if size => {
                Kind::Matrix(Matrix { scale: None, terms: vec![(v.clone(), by.clone())] })
            }
            Kind::Vector(v) => Kind::Vector(v.clone().times(by)),
            Kind::Constant => Kind::Constant,
            Kind::Other(why) => Kind::Other(why.clone()),
        })
    }

    fn plus(&self, [a, b]: [Value; 2]) -> Result<Kind> {
        for (x, y) in [(a, b), (b, a)] {
            if is_zeros(self.f, x) {
                return Ok(self.kind(y).clone());
            }
        }
        let spread = |v: &Vector| Matrix { scale: None, terms: vec![(v.clone(), one())] };
        let join = |x: Matrix, y: Matrix| match (&x.scale, &y.scale) {
            (Some(_), Some(_)) => obstacle("the state is added to itself"),
            _ => Ok(Kind::Matrix(Matrix { scale: x.scale.or(y.scale), terms: [x.terms, y.terms].concat() })),
        };
        match (self.kind(a), self.kind(b)) {
            (Kind::Matrix(x), Kind::Matrix(y)) => join(x.clone(), y.clone()),
            (Kind::Matrix(x), Kind::Vector(y)) | (Kind::Vector(y), Kind::Matrix(x)) => {
                join(x.clone(), spread(y))
            }
            (Kind::Matrix(x), Kind::Constant) => {
                join(x.clone(), Matrix { scale: None, terms: vec![self.outer(b)?] })
            }
            (Kind::Constant, Kind::Matrix(x)) => {
                join(x.clone(), Matrix { scale: None, terms: vec![self.outer(a)?] })
            }
            (Kind::Vector(x), Kind::Vector(y)) => Ok(Kind::Vector(x.clone().plus(y.clone()))),
            (Kind::Vector(x), Kind::Constant) => self.plus_constant(x, b),
            (Kind::Constant, Kind::Vector(x)) => self.plus_constant(x, a),
            (Kind::Other(why), _) | (_, Kind::Other(why)) => Ok(Kind::Other(why.clone())),
            (Kind::Constant, Kind::Constant) => Ok(Kind::Constant),
        }
    }

    fn plus_constant(&self, x: &Vector, v: Value) -> Result<Kind> {
        let term = self.term(v);
        if term.has(self.f, self.size) {
            return obstacle("keys are added to a product of the state and a key");
        }
        Ok(Kind::Vector(x.clone().plus(Vector { seen: vec![], rest: vec![term] })))
    }

    fn sum(&self, x: &Kind, over: &[Dim]) -> Result<Kind> {
        match x {
            Kind::Matrix(m) if over == [self.size] => {
                let mut sum = Vector::default();
                if let Some(scale) = &m.scale {
                    sum.seen.push((one(), scale.iter().fold(one(), |a, b| product(&a, b))));
                }
                for (v, k) in &m.terms {
                    sum = sum.plus(v.clone().times(&Term::Over(Box::new(k.clone()), self.size)));
                }
                Ok(Kind::Vector(sum))
            }
            Kind::Matrix(_) => obstacle("the state is summed over something else than keys"),
            Kind::Vector(_) => obstacle("products of the state and keys are summed"),
            Kind::Constant => Ok(Kind::Constant),
            Kind::Other(why) => Ok(Kind::Other(why.clone())),
        }
    }

    fn read(&mut self, node: &Node) {
        let constant = node.inputs.iter().all(|v| matches!(self.kind(*v), Kind::Constant));
        let found = if constant { Ok(Kind::Constant) } else { self.dependent(node) };
        let kind = found.unwrap_or_else(|Obstacle(why)| Kind::Other(why));
        node.results().for_each(|_| self.kinds.push(kind.clone()));
    }

    /// The kind of a node that depends on the state.
    fn dependent(&self, node: &Node) -> Result<Kind> {
        let named = || format!("the state goes through `{}`", node.op.name());
        let both = |why: &str| match (&node.inputs[..], node.inputs.len()) {
            (&[a, b], 2) => Ok([a, b]),
            _ => obstacle(why),
        };
        // Of a product one side must not depend on the state.
        let sides = || {
            let [a, b] = both("a product of two values")?;
            match (self.kind(a), self.kind(b)) {
                (x, Kind::Constant) => Ok((x, self.term(b))),
                (Kind::Constant, x) => Ok((x, self.term(a))),
                _ => obstacle("two functions of the state are multiplied"),
            }
        };
        if let Op::Binary(Binary::Mul) = node.op {
            let (x, by) = sides()?;
            return self.times(x, &by);
        }
        if let Op::Contract(Contract { over }) = &node.op {
            let (x, by) = sides()?;
            return self.sum(&self.times(x, &by)?, over);
        }
        if let Op::Binary(Binary::Add) = node.op {
            return self.plus(both("a sum of two values")?);
        }
        if let Op::Reduce(Reduction { how: Reduce::Sum, over }) = &node.op {
            return self.sum(self.kind(node.inputs[0]), over);
        }
        if let Op::Unary(Unary::Neg) = node.op {
            return self.times(self.kind(node.inputs[0]), &Term::Number(-1.0));
        }
        if let Op::Binary(Binary::Div) = node.op {
            let [a, b] = both("a quotient of two values")?;
            return match self.kind(b) {
                Kind::Constant => self.times(self.kind(a), &Term::Inverse(Box::new(self.term(b)))),
                _ => obstacle(named()),
            };
        }
        if let Op::Binary(Binary::Sub) = node.op {
            return self.minus(both("a difference of two values")?);
        }
        obstacle(named())
    }

    fn minus(&self, [a, b]: [Value; 2]) -> Result<Kind> {
        let less = Term::Number(-1.0);
        if is_zeros(self.f, a) {
            return self.times(self.kind(b), &less);
        }
        // A difference is a sum with the second side times -1.
        let second = match self.kind(b) {
            Kind::Constant => match self.kind(a) {
                Kind::Matrix(_) => {
                    let (v, k) = self.outer(b)?;
                    Kind::Matrix(Matrix { scale: None, terms: vec![(v.times(&less), k)] })
                }
                _ => Kind::Vector(Vector { seen: vec![], rest: vec![product(&less, &self.term(b))] }),
            },
            x => self.times(x, &less)?,
        };
        let mut own = Reader { f: self.f, size: self.size, value: self.value, kinds: self.kinds.clone() };
        own.kinds[b.index()] = second;
        own.plus([a, b])
    }
}

/// The dimension over which the state is summed first.
fn keys(f: &Function, state: Value) -> Result<Dim> {
    let dims = &f.ty(state).dims;
    let mut depends = vec![false; f.types.len()];
    depends[state.index()] = true;
    for node in &f.nodes {
        let own = node.inputs.iter().any(|v| depends[v.index()]);
        node.results().for_each(|r| depends[r.index()] = own);
        let over = match &node.op {
            Op::Reduce(Reduction { how: Reduce::Sum, over }) | Op::Contract(Contract { over }) => over,
            _ => continue,
        };
        if let (true, &[d]) = (own, &over[..])
            && dims.contains(&d)
        {
            return Ok(d);
        }
    }
    obstacle("no output is a sum of the state over one dimension")
}

/// The form of a step, or the operation that stands in the way.
pub fn recognise(step: &Step) -> Result<Found> {
    let f = step.function();
    let states: Vec<&Type> = step.states().collect();
    let [ty] = states[..] else {
        return obstacle(format!("the step has {} states", states.len()));
    };
    let (state, dims) = (Value(0), ty.dims.clone());
    let size = keys(f, state)?;
    let last = &dims[dims.len().saturating_sub(2)..];
    let value = match *last {
        [a, b] if a == size => b,
        [a, b] if b == size => a,
        _ => return obstacle("the state is summed over another dimension than one of its last two"),
    };
    let mut kinds = vec![Kind::Constant; f.params.len()];
    kinds[0] = Kind::Matrix(Matrix { scale: Some(vec![]), terms: vec![] });
    let mut reader = Reader { f, size, value, kinds };
    f.nodes.iter().for_each(|node| reader.read(node));
    let Some((_, left)) = f.results.last() else { return obstacle("the step has no state") };
    let next = match reader.kind(*left) {
        Kind::Matrix(m) => m.clone(),
        Kind::Other(why) => return obstacle(why.clone()),
        Kind::Constant | Kind::Vector(_) => return obstacle("the state does not depend on itself"),
    };
    let Some(decay) = next.scale.clone() else { return obstacle("the state does not depend on itself") };
    let entering = entering(f, value, next)?;
    let (read, q, before) = output(&reader, *left)?;
    let found = Found { state: dims, size, decay, before, read, q, ..entering };
    let all = [&found.q, &found.k, &found.v].into_iter().chain(&found.u).chain(&found.w).chain(&found.decay);
    for v in all.flat_map(Term::values) {
        can_move(f, v, None)?;
    }
    for (_, v) in f.results.iter().filter(|(p, _)| !p.binding.is_state()) {
        can_move(f, *v, Some(read))?;
    }
    Ok(found)
}

/// That a value can be computed outside the step, from another.
fn can_move(f: &Function, v: Value, from: Option<Value>) -> Result<()> {
    if from == Some(v) {
        return Ok(());
    }
    match node(f, v) {
        None => match f.params.get(v.index()).is_some_and(|p| p.binding.is_state()) {
            true => obstacle("an output reads the state by other ways than a sum over keys"),
            false => Ok(()),
        },
        Some(n) if moves(&n.op) => n.inputs.iter().try_for_each(|v| can_move(f, *v, from)),
        Some(n) => obstacle(format!("`{}` stands in the step", n.op.name())),
    }
}

/// `k`, `v`, `u`, `w` of what enters the state.
fn entering(f: &Function, value: Dim, next: Matrix) -> Result<Found> {
    let mut terms: Vec<(Vector, Term)> = vec![];
    for (v, k) in next.terms {
        match terms.iter_mut().find(|(_, key)| *key == k) {
            Some((own, _)) => *own = std::mem::take(own).plus(v),
            None => terms.push((v, k)),
        }
    }
    let sum = |mut list: Vec<Term>| if list.len() == 1 { list.remove(0) } else { Term::Sum(list) };
    let u = |v: &Vector| {
        let varies = v.seen.iter().any(|(c, _)| c.has(f, value));
        match varies {
            true => {
                obstacle("a product of the state and a key has a factor that differs from value to value")
            }
            false => Ok(sum(v.seen.iter().map(|(c, x)| product(c, x)).collect())),
        }
    };
    let blank = |k: &Term, v: Term| Found {
        state: smallvec![],
        size: value,
        q: one(),
        k: k.clone(),
        v,
        u: None,
        w: None,
        decay: vec![],
        before: false,
        read: Value(0),
    };
    match &terms[..] {
        [(v, k)] if v.seen.is_empty() => Ok(blank(k, sum(v.rest.clone()))),
        [(v, k)] => Ok(Found { u: Some(u(v)?), ..blank(k, sum(v.rest.clone())) }),
        [(a, k), (b, w)] | [(b, w), (a, k)] if a.seen.is_empty() && b.rest.is_empty() => {
            Ok(Found { u: Some(u(b)?), w: Some(w.clone()), ..blank(k, sum(a.rest.clone())) })
        }
        [] => obstacle("nothing enters the state"),
        _ => obstacle("more than a product of values and keys and one of the state enter the state"),
    }
}

/// The one value by which outputs read the state, its queries, and whether it is the state before
/// the token.
fn output(reader: &Reader, left: Value) -> Result<(Value, Term, bool)> {
    let f = reader.f;
    let mut found: HashMap<Value, (Term, bool)> = HashMap::new();
    let mut queue: Vec<Value> =
        f.results.iter().filter(|(p, _)| !p.binding.is_state()).map(|(_, v)| *v).collect();
    while let Some(v) = queue.pop() {
        if matches!(reader.kind(v), Kind::Constant) || found.contains_key(&v) {
            continue;
        }
        match read_of(reader, v, left) {
            Some(read) => drop(found.insert(v, read)),
            None => match node(f, v) {
                Some(n) => queue.extend(&n.inputs),
                None => return obstacle("an output reads the state by other ways than a sum over keys"),
            },
        }
    }
    let mut all = found.into_iter();
    match (all.next(), all.next()) {
        (Some((v, (q, before))), None) => Ok((v, q, before)),
        (None, _) => obstacle("no output reads the state"),
        (Some(_), Some(_)) => obstacle("the state is read more than once"),
    }
}

/// The queries of a value that is a sum over keys of a state and queries, and whether it is the
/// state before the token.
fn read_of(reader: &Reader, v: Value, left: Value) -> Option<(Term, bool)> {
    let (f, n) = (reader.f, node(reader.f, v)?);
    let (over, pair) = match &n.op {
        Op::Contract(Contract { over }) => (over, n),
        Op::Reduce(Reduction { how: Reduce::Sum, over }) => (over, node(f, n.inputs[0])?),
        _ => return None,
    };
    if over[..] != [reader.size] {
        return None;
    }
    let product = matches!(pair.op, Op::Binary(Binary::Mul) | Op::Contract(_));
    if let (true, &[a, b]) = (product, &pair.inputs[..]) {
        for (x, q) in [(a, b), (b, a)] {
            let q_is_free = matches!(reader.kind(q), Kind::Constant) && !reader.term(q).has(f, reader.value);
            if x == left && q_is_free {
                return Some((reader.term(q), false));
            }
        }
    }
    match reader.kind(v) {
        Kind::Vector(Vector { seen, rest }) if rest.is_empty() => match &seen[..] {
            [(c, x)] if *c == one() => Some((x.clone(), true)),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::parse;

    /// The form of a step with these last lines, `%0` being the state with its decay.
    fn found(lines: &str) -> Result<Found> {
        let text = format!(
            "dims {{ h 2  v 3  k 4 }}
            func @step {{
              state %S : f32[h, v, k]
              input %q : f32[h, k]
              input %key : f32[h, k]
              input %val : f32[h, v]
              input %a : f32[h]
              %0 = mul %S, %a : f32[h, v, k]
              %1 = zeros [h, v, k] : f32[h, v, k]
              %2 = add %1, %val : f32[h, v, k]
              %3 = mul %2, %key : f32[h, v, k]
              {lines}
            }}"
        );
        let module = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        recognise(&Step::from(module.functions["step"].clone()))
    }

    const READ: &str = "%5 = mul %4, %q : f32[h, v, k] %6 = sum %5 over [k] : f32[h, v]";

    #[test]
    fn a_decay_and_a_product() {
        let found = found(&format!("%4 = add %0, %3 : f32[h, v, k] {READ} return o = %6, S = %4")).unwrap();
        let own = |k: u32| Term::Own(Value(k));
        assert_eq!((found.q, found.k, found.v), (own(1), own(2), own(3)));
        assert_eq!((found.u, found.w, found.decay, found.before), (None, None, vec![own(4)], false));
    }

    #[test]
    fn obstacles_say_what_is_in_the_way() {
        let cases = [
            ("%4 = tanh %0 : f32[h, v, k]", "the state goes through `tanh`"),
            ("%4 = mul %0, %3 : f32[h, v, k]", "a factor of the state differs from value to value"),
            ("%4 = mul %0, %S : f32[h, v, k]", "two functions of the state are multiplied"),
            ("%4 = add %0, %S : f32[h, v, k]", "the state is added to itself"),
        ];
        for (lines, wanted) in cases {
            let Err(Obstacle(why)) = found(&format!("{lines} {READ} return o = %6, S = %4")) else {
                panic!("{lines}: a form is found");
            };
            assert_eq!(why, wanted, "{lines}");
        }
        let twice = "%4 = add %0, %3 : f32[h, v, k] %5 = mul %4, %q : f32[h, v, k] %6 = sum %5 over [k] : f32[h, v]
            %7 = mul %4, %key : f32[h, v, k] %8 = sum %7 over [k] : f32[h, v] %9 = mul %6, %8 : f32[h, v] return o = %9, S = %4";
        assert_eq!(found(twice), Err(Obstacle("the state is read more than once".into())));
    }
}
