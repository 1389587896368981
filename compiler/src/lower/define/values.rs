//! Functions of one token, on values whose dimensions have names.
//!
//! *In*: values of the IR and the dimensions that a result has. *Out*: the value in these
//! dimensions. *Promise*: every operation made has operands that row kernels take: the dimensions
//! of the smaller operand are adjacent in the larger one, and what is joined is last.

use super::MALFORMED;
use crate::CompileError;
use crate::build::Builder;
use crate::ir::{Binary, Dim, Dims, Op, Reduce, Type, Unary, Value};
use crate::op::{Concat, Decide, Rms, Route, Split};
use dreamc_dsl::define::graph::{self, DimId, Function as Of, Node, Norm, Region};
use smallvec::smallvec;

/// A builder of values with the dimensions of tokens before their own; of one step there are none.
pub(super) struct Values<'b, 'm> {
    pub(super) b: &'b mut Builder<'m>,
    /// The dimensions of tokens.
    pub(super) rows: Dims,
    /// Of a step the numbers 0, 1, … along dimensions, which it is given.
    pub(super) places: Vec<(Dim, Value)>,
}

impl Values<'_, '_> {
    /// The dimensions of a value without those of tokens.
    pub(super) fn own(&self, x: Value) -> Dims {
        let dims = self.b.dims(x);
        if !self.rows.is_empty() && dims.starts_with(&self.rows) {
            return dims[self.rows.len()..].into();
        }
        dims
    }

    /// Whether each token has its own; in a step every value is one.
    pub(super) fn per_token(&self, x: Value) -> bool {
        self.b.dims(x).starts_with(&self.rows)
    }

    /// These dimensions, after those of tokens where the value has them.
    fn like(&self, x: Value, own: &[Dim]) -> Dims {
        if self.per_token(x) { [&self.rows[..], own].concat().into() } else { own.into() }
    }

    /// The value with its own dimensions in this order, repeated along those that it lacks.
    pub(super) fn ordered(&mut self, x: Value, own: &[Dim]) -> Value {
        let dims = self.like(x, own);
        self.b.arrange(x, &dims)
    }

    /// Its own dimensions without some, then these.
    pub(super) fn last(&mut self, x: Value, dims: &[Dim]) -> Value {
        let own = self.own(x);
        let others: Dims = own.iter().copied().filter(|d| !dims.contains(d)).collect();
        self.ordered(x, &[&others[..], dims].concat())
    }

    /// The value with other dimensions of the same elements.
    pub(super) fn reshaped(&mut self, x: Value, own: &[Dim]) -> Value {
        let dims = self.like(x, own);
        self.b.reshape(x, &dims)
    }

    /// A smaller operand of an operation whose result has the dimensions `to`.
    fn fitted(&mut self, x: Value, to: &[Dim]) -> Value {
        let own = self.own(x);
        let ordered: Dims = to.iter().copied().filter(|d| own.contains(d)).collect();
        let x = self.ordered(x, &ordered);
        // A step takes any dimensions in order.
        // A row kernel takes those at an end, whose gradient is a sum over neighbours.
        if ordered.is_empty() || self.rows.is_empty() || to.starts_with(&ordered) || to.ends_with(&ordered) {
            return x;
        }
        self.ordered(x, to)
    }

    /// The value in all of these dimensions, those of tokens among them.
    pub(super) fn spread(&mut self, x: Value, own: &[Dim], per_token: bool) -> Value {
        let dims = if per_token { [&self.rows[..], own].concat() } else { own.to_vec() };
        if *self.b.dims(x) == *dims {
            return x;
        }
        let x = self.fitted(x, own);
        if *self.b.dims(x) == *dims {
            return x;
        }
        let zeros = self.b.zeros(&Type::f32(&dims));
        self.b.add(zeros, x)
    }

    /// A function of two values, with the dimensions of the result.
    pub(super) fn binary(&mut self, f: Binary, a: Value, b: Value, to: &[Dim]) -> Value {
        let per_token = self.per_token(a) || self.per_token(b);
        let all = if per_token { [&self.rows[..], to].concat() } else { to.to_vec() };
        let (mut a, b) = (self.fitted(a, to), self.fitted(b, to));
        if *self.b.dims(a) != *all && *self.b.dims(b) != *all {
            a = self.spread(a, to, per_token);
        }
        self.b.op(f, &[a, b])
    }

    /// 1 where `x > 0`, else 0.
    fn positive(&mut self, x: Value) -> Value {
        self.b.unary(Unary::Positive, x)
    }

    /// `1 - x`
    fn rest(&mut self, x: Value) -> Value {
        let one = self.b.constant(1.0);
        self.b.sub(one, x)
    }

    /// 1 where `a < b`, else 0.
    fn less(&mut self, a: Value, b: Value, to: &[Dim]) -> Value {
        let above = self.binary(Binary::Sub, b, a, to);
        self.positive(above)
    }

    /// 1 where it is not 0, else 0.
    fn truth(&mut self, x: Value) -> Value {
        let other = self.b.unary(Unary::Neg, x);
        let size = self.b.op(Binary::Max, &[x, other]);
        self.positive(size)
    }

    /// A function of one number.
    pub(super) fn unary(&mut self, f: graph::Unary, x: Value) -> Value {
        use graph::Unary as Of;
        let b = &mut *self.b;
        match f {
            Of::Neg => b.unary(Unary::Neg, x),
            Of::Not => {
                let on = self.truth(x);
                self.rest(on)
            }
            Of::Exp => b.unary(Unary::Exp, x),
            Of::Log => b.unary(Unary::Log, x),
            Of::Sqrt => b.unary(Unary::Sqrt, x),
            Of::Rsqrt => b.unary(Unary::Rsqrt, x),
            Of::Abs => {
                let other = b.unary(Unary::Neg, x);
                b.op(Binary::Max, &[x, other])
            }
            Of::Square => b.unary(Unary::Square, x),
            Of::Sin => b.unary(Unary::Sin, x),
            Of::Cos => b.unary(Unary::Cos, x),
            Of::Tanh => b.unary(Unary::Tanh, x),
            Of::Sigmoid => b.unary(Unary::Sigmoid, x),
            Of::Silu => b.unary(Unary::Silu, x),
            Of::Gelu => b.unary(Unary::Gelu, x),
            Of::Relu => b.unary(Unary::Relu, x),
            Of::Relu2 => {
                let above = b.unary(Unary::Relu, x);
                b.unary(Unary::Square, above)
            }
            Of::Softplus => b.unary(Unary::Softplus, x),
            Of::LogSigmoid => {
                let other = b.unary(Unary::Neg, x);
                let below = b.unary(Unary::Softplus, other);
                b.unary(Unary::Neg, below)
            }
            Of::Floor => b.unary(Unary::Floor, x),
        }
    }

    /// A function of two numbers.
    pub(super) fn of_two(&mut self, f: graph::Binary, x: Value, y: Value, to: &[Dim]) -> Value {
        use graph::Binary as Of;
        match f {
            Of::Add => self.binary(Binary::Add, x, y, to),
            Of::Sub => self.binary(Binary::Sub, x, y, to),
            Of::Mul => self.binary(Binary::Mul, x, y, to),
            Of::Div => self.binary(Binary::Div, x, y, to),
            Of::Max => self.binary(Binary::Max, x, y, to),
            Of::Min => {
                let (x, y) = (self.b.unary(Unary::Neg, x), self.b.unary(Unary::Neg, y));
                let most = self.binary(Binary::Max, x, y, to);
                self.b.unary(Unary::Neg, most)
            }
            Of::Less => self.less(x, y, to),
            Of::Greater => self.less(y, x, to),
            Of::LessEqual => {
                let above = self.less(y, x, to);
                self.rest(above)
            }
            Of::GreaterEqual => {
                let below = self.less(x, y, to);
                self.rest(below)
            }
            Of::Equal | Of::NotEqual => {
                // Never both.
                let (below, above) = (self.less(x, y, to), self.less(y, x, to));
                let differ = self.b.add(below, above);
                if f == Of::Equal { self.rest(differ) } else { differ }
            }
            Of::And => {
                let (x, y) = (self.truth(x), self.truth(y));
                self.binary(Binary::Mul, x, y, to)
            }
            Of::Or => {
                let (x, y) = (self.truth(x), self.truth(y));
                self.binary(Binary::Max, x, y, to)
            }
            Of::Mod => {
                let quotient = self.binary(Binary::Div, x, y, to);
                let whole = self.b.unary(Unary::Floor, quotient);
                let taken = self.binary(Binary::Mul, whole, y, to);
                self.binary(Binary::Sub, x, taken, to)
            }
        }
    }

    /// `x` where `c` is not 0, else `y`.
    pub(super) fn choice(&mut self, c: Value, x: Value, y: Value, to: &[Dim]) -> Value {
        let not = self.truth(c);
        let not = self.rest(not);
        let x = self.binary(Binary::Where, x, c, to);
        let y = self.binary(Binary::Where, y, not, to);
        self.binary(Binary::Add, x, y, to)
    }

    /// A reduction over dimensions.
    pub(super) fn reduce(&mut self, how: graph::Reduce, x: Value, over: &[Dim]) -> Value {
        match how {
            graph::Reduce::Sum => self.joined(Reduce::Sum, x, over),
            graph::Reduce::Mean => self.joined(Reduce::Mean, x, over),
            graph::Reduce::Maximum => self.largest(x, over),
        }
    }

    /// The same, of neighbours at a time.
    fn joined(&mut self, how: Reduce, mut x: Value, over: &[Dim]) -> Value {
        if self.rows.is_empty() {
            return self.b.reduce(how, x, over);
        }
        loop {
            let own = self.own(x);
            let Some(first) = own.iter().position(|d| over.contains(d)) else { return x };
            let run: Dims = own[first..].iter().copied().take_while(|d| over.contains(d)).collect();
            // Its gradient is repeated along them, which a row kernel does at an end.
            if first > 0 && !own.ends_with(&run) {
                x = self.last(x, &run);
            }
            x = self.b.reduce(how, x, &run);
        }
    }

    /// The largest over dimensions, with the gradient of the element that it is; of equal ones each
    /// has its share.
    fn largest(&mut self, x: Value, over: &[Dim]) -> Value {
        let own = self.own(x);
        let still = self.b.stop_gradient(x);
        let most = self.joined(Reduce::Max, still, over);
        let below = self.less(still, most, &own);
        let here = self.rest(below);
        let found = self.b.op(Binary::Where, &[x, here]);
        let (sum, count) = (self.joined(Reduce::Sum, found, over), self.joined(Reduce::Sum, here, over));
        self.b.div(sum, count)
    }

    /// The softmax over a dimension.
    pub(super) fn softmax(&mut self, x: Value, over: Dim) -> Value {
        let own = self.own(x);
        let x = self.last(x, &[over]);
        let y = self.b.op(Op::Softmax, &[x]);
        self.ordered(y, &own)
    }

    /// A norm over dimensions, without its gain.
    pub(super) fn norm(&mut self, how: Norm, x: Value, over: &[Dim], eps: f64) -> Value {
        let own = self.own(x);
        let mut x = self.last(x, over);
        let inner = over.len();
        let n = self.b.module.elements(over) as f64;
        let y = match how {
            Norm::Rms => self.b.op(Rms { inner, eps }, &[x]),
            // `x / sqrt(n · (mean + eps / n))`
            Norm::L2 => {
                let y = self.b.op(Rms { inner, eps: eps / n }, &[x]);
                self.b.scale(y, n.sqrt().recip())
            }
            Norm::Layer => {
                let dims = self.own(x);
                let mean = self.joined(Reduce::Mean, x, over);
                x = self.binary(Binary::Sub, x, mean, &dims);
                self.b.op(Rms { inner, eps }, &[x])
            }
        };
        self.ordered(y, &own)
    }

    /// `Σ x y` over dimensions.
    pub(super) fn dot(&mut self, x: Value, y: Value, over: &[Dim], to: &[Dim]) -> Value {
        let (a, b) = (self.own(x), self.own(y));
        let shared = a.iter().filter(|d| b.contains(d)).count();
        let constant = self.per_token(x) != self.per_token(y);
        let all_summed = if self.per_token(x) { b.len() } else { a.len() } == over.len();
        if !self.rows.is_empty() && constant && shared == over.len() && !all_summed {
            // A product of matrices; that of a vector would have a gradient that sums nothing.
            let (x, y) = if self.per_token(x) { (x, y) } else { (y, x) };
            let (x, y) = (self.last(x, over), self.last(y, over));
            let z = self.b.contract(x, y, over);
            return self.ordered(z, to);
        }
        let larger = if b.len() > a.len() { &b } else { &a };
        let smaller = if b.len() > a.len() { &a } else { &b };
        let all: Dims =
            larger.iter().chain(smaller.iter().filter(|d| !larger.contains(d))).copied().collect();
        let product = self.binary(Binary::Mul, x, y, &all);
        let z = self.joined(Reduce::Sum, product, over);
        self.ordered(z, to)
    }

    /// Places of the largest elements along a dimension, in falling order, the first of equal ones.
    fn top(&mut self, x: Value, over: Dim, choices: Dim) -> Value {
        let x = self.last(x, &[over]);
        let x = self.b.stop_gradient(x);
        if self.rows.is_empty() {
            return self.ranked(x, over, choices);
        }
        let chosen = self.b.op(Route { k: choices }, &[x]);
        self.b.op(Op::Numbers, &[chosen])
    }

    /// The same in a step, which has no sort: an element's rank is the number of those before it,
    /// and the place of a rank is the sum of places times 1 where it is.
    fn ranked(&mut self, x: Value, over: Dim, choices: Dim) -> Value {
        let others: Dims = self.own(x).into_iter().filter(|d| *d != over).collect();
        let size = self.b.module.size(over);
        let other = self.b.module.dim(format!("others{size}"), size);
        let y = self.reshaped(x, &[&others[..], &[other]].concat());
        let (here, place) = (self.places(over), self.places(choices));
        let there = self.reshaped(here, &[other]);
        let pairs = [&others[..], &[over, other]].concat();
        let (above, below) = (self.less(x, y, &pairs), self.less(y, x, &pairs));
        let differ = self.b.add(above, below);
        let (equal, before) = (self.rest(differ), self.less(there, here, &[over, other]));
        let first = self.binary(Binary::Mul, equal, before, &pairs);
        let before = self.b.add(above, first);
        let rank = self.b.reduce(Reduce::Sum, before, &[other]);
        let pairs = [&others[..], &[choices, over]].concat();
        let (below, above) = (self.less(rank, place, &pairs), self.less(place, rank, &pairs));
        let differ = self.b.add(below, above);
        let chosen = self.rest(differ);
        let found = self.binary(Binary::Mul, chosen, here, &pairs);
        self.b.reduce(Reduce::Sum, found, &[over])
    }

    /// The elements of `x` along a dimension at places: a sum of products with 1 there and 0
    /// elsewhere, which has a gradient for any dimensions of either.
    fn pick(&mut self, x: Value, places: Value, of: Dim, to: &[Dim]) -> Value {
        let all = [self.own(places), smallvec![of]].concat();
        let here = self.places(of);
        let (below, above) = (self.less(places, here, &all), self.less(here, places, &all));
        let differ = self.b.add(below, above);
        let chosen = self.rest(differ);
        self.dot(chosen, x, &[of], to)
    }

    /// The numbers 0, 1, … along a dimension.
    pub(super) fn places(&mut self, of: Dim) -> Value {
        if let Some((_, given)) = self.places.iter().find(|(dim, _)| *dim == of) {
            return *given;
        }
        let one = self.b.module.dim("one", 1);
        let zeros = self.b.zeros(&Type::f32(&[one, of]));
        let places = self.b.op(Decide { inclusive: true }, &[zeros]);
        let numbers = self.b.op(Op::Numbers, &[places]);
        self.b.reshape(numbers, &[of])
    }

    /// One dimension as several.
    pub(super) fn split(&mut self, x: Value, of: Dim, into: &[Dim], to: &[Dim]) -> Value {
        let own = self.own(x);
        let dims: Dims = own.iter().flat_map(|d| if *d == of { into.to_vec() } else { vec![*d] }).collect();
        let y = self.reshaped(x, &dims);
        self.ordered(y, to)
    }

    /// Several dimensions as one.
    pub(super) fn merge(&mut self, x: Value, of: &[Dim], into: Dim, to: &[Dim]) -> Value {
        let own = self.own(x);
        let first = own.iter().position(|d| of.contains(d)).unwrap_or(0);
        let (before, after) = own.split_at(first);
        let after: Dims = after.iter().copied().filter(|d| !of.contains(d)).collect();
        let x = self.ordered(x, &[before, of, &after].concat());
        let y = self.reshaped(x, &[before, &[into], &after].concat());
        self.ordered(y, to)
    }

    /// Values one after the other along a dimension.
    pub(super) fn join(&mut self, parts: &[(Value, Dim)], along: Dim, to: &[Dim]) -> Value {
        let others: Dims = to.iter().copied().filter(|d| *d != along).collect();
        let per_token = parts.iter().any(|(x, _)| self.per_token(*x));
        let parts: Vec<Value> = parts
            .iter()
            .map(|&(x, part)| self.spread(x, &[&others[..], &[part]].concat(), per_token))
            .collect();
        let y = self.b.op(Concat(along), &parts);
        self.ordered(y, to)
    }

    /// Parts of a dimension, which they are made of in order.
    pub(super) fn cut(&mut self, x: Value, of: Dim, parts: &[Dim]) -> Vec<Value> {
        let x = self.last(x, &[of]);
        self.b.ops(Split(parts.into()), &[x])
    }
}

impl Values<'_, '_> {
    /// The dimensions `over` last, as the one dimension `sum`.
    pub(super) fn summed_last(&mut self, x: Value, over: &[Dim], sum: Dim) -> Value {
        let own = self.own(x);
        let others: Dims = own.iter().copied().filter(|d| !over.contains(d)).collect();
        let x = self.last(x, over);
        self.reshaped(x, &[&others[..], &[sum]].concat())
    }

    /// The product of `x` with a matrix `[out, in]`, as a sum of products of elements: a step has
    /// no rows that a matmul would be of. The dimensions `over` of `x` are those of the input,
    /// `outs` those of the result, which has all of `to`.
    pub(super) fn product(
        &mut self,
        x: Value,
        w: Value,
        over: &[Dim],
        (outs, to): (&[Dim], &[Dim]),
    ) -> Value {
        let [out, sum] = self.b.dims(w)[..] else { return x };
        // A dimension that the result has, too, is there under another name.
        let sum = if outs.contains(&sum) { out } else { sum };
        let w = self.b.reshape(w, &[outs, &[sum]].concat());
        let x = self.summed_last(x, over, sum);
        let y = self.binary(Binary::Mul, x, w, &[to, &[sum]].concat());
        let y = self.b.reduce(Reduce::Sum, y, &[sum]);
        self.ordered(y, to)
    }

    /// The product of `x[.., in]` with a matrix `[out, in]` of every place of the dimensions
    /// `each`, which `x` has and `out` is made of.
    pub(super) fn product_each(&mut self, x: Value, w: Value, each: &[Dim], outs: &[Dim]) -> Value {
        let sum = self.b.dims(w)[1];
        let own = self.own(x);
        let left: Dims = own.iter().copied().filter(|d| !each.contains(d) && *d != sum).collect();
        let rest: Dims = outs.iter().copied().filter(|d| !each.contains(d)).collect();
        let count = self.b.module.elements(each);
        let size = |v: &Self, dims: &[Dim]| v.b.module.elements(dims);
        // Places of `x` are adjacent in its rows; the matrices of places follow one another.
        let x = self.ordered(x, &[&left[..], each, &[sum]].concat());
        let wide = size(self, &[sum]).saturating_mul(count);
        let wide = self.b.module.dim(format!("wide{wide}"), wide);
        let x = self.reshaped(x, &[&left[..], &[wide]].concat());
        let of_one = size(self, &rest).saturating_mul(size(self, &[sum]));
        let [all, part] =
            [of_one.saturating_mul(count), of_one].map(|n| self.b.module.dim(format!("wide{n}"), n));
        let w = self.b.reshape(w, &[outs, &[sum]].concat());
        let w = self.b.arrange(w, &[each, &rest[..], &[sum]].concat());
        let w = self.b.reshape(w, &[all]);
        let xs = self.b.ops(Split(smallvec![sum; count as usize]), &[x]);
        let ws = self.b.ops(Split(smallvec![part; count as usize]), &[w]);
        let high = size(self, &rest);
        let high = self.b.module.dim(format!("high{high}"), high);
        let mut parts = vec![];
        for (x, w) in xs.into_iter().zip(ws) {
            let w = self.b.reshape(w, &[high, sum]);
            parts.push(self.b.contract(x, w, &[sum]));
        }
        let joined = size(self, outs);
        let joined = self.b.module.dim(format!("wide{joined}"), joined);
        let y = if parts.len() == 1 {
            self.reshaped(parts[0], &[&left[..], &[joined]].concat())
        } else {
            self.b.op(Concat(joined), &parts)
        };
        self.reshaped(y, &[&left[..], each, &rest].concat())
    }

    /// A function of one token of a region; `dims` are those of the graph.
    pub(super) fn node(
        &mut self,
        node: &Node,
        args: &[Value],
        region: &Region,
        dims: &[Dim],
    ) -> Result<Value, CompileError> {
        let dim = |d: &DimId| dims[d.0 as usize];
        let all = |list: &[DimId]| list.iter().map(dim).collect::<Dims>();
        let own = all(&node.ty.dims);
        let arg = |k: usize| args.get(k).copied().ok_or(MALFORMED);
        Ok(match &node.function {
            Of::Number(number) => self.b.constant(*number),
            Of::Unary(f) => self.unary(*f, arg(0)?),
            Of::Binary(f) => self.of_two(*f, arg(0)?, arg(1)?, &own),
            Of::Where => self.choice(arg(0)?, arg(1)?, arg(2)?, &own),
            Of::Outer => self.binary(Binary::Mul, arg(0)?, arg(1)?, &own),
            Of::Reduce(how, over) => {
                let y = self.reduce(*how, arg(0)?, &all(over));
                self.ordered(y, &own)
            }
            Of::Softmax(over) => self.softmax(arg(0)?, dim(over)),
            Of::Norm { how, over, eps } => {
                let y = self.norm(*how, arg(0)?, &all(over), *eps);
                match args.get(1) {
                    Some(&gain) => self.binary(Binary::Mul, y, gain, &own),
                    None => y,
                }
            }
            Of::Dot(over) => self.dot(arg(0)?, arg(1)?, &all(over), &own),
            Of::Split(of, into) => self.split(arg(0)?, dim(of), &all(into), &own),
            Of::Merge(of, into) => self.merge(arg(0)?, &all(of), dim(into), &own),
            Of::Join(along, parts) => {
                let parts: Vec<(Value, Dim)> = args.iter().copied().zip(all(parts)).collect();
                self.join(&parts, dim(along), &own)
            }
            Of::Top { over, choices } => {
                let y = self.top(arg(0)?, dim(over), dim(choices));
                self.ordered(y, &own)
            }
            Of::Pick => {
                let places = node.args.get(1).map(|&places| &region.node(places).ty);
                let of = places.and_then(|ty| ty.places_of).ok_or(MALFORMED)?;
                self.pick(arg(0)?, arg(1)?, dim(&of), &own)
            }
            Of::Stop => self.b.stop_gradient(arg(0)?),
            // Others are lowered, or refused, by the place that formulas stand in.
            Of::Input
            | Of::Fact(_)
            | Of::Noise(_)
            | Of::Weight(_)
            | Of::Embedding
            | Of::Linear(_)
            | Of::Slice { .. }
            | Of::Rope { .. }
            | Of::Shift(_)
            | Of::Conv(_)
            | Of::Running(_)
            | Of::Average { .. }
            | Of::Choose(_)
            | Of::Scores
            | Of::Mass
            | Of::Attend(_)
            | Of::Recurrence(_)
            | Of::Emitted(_)
            | Of::DepthAttend { .. }
            | Of::Earlier(_)
            | Of::ValueOf(..)
            | Of::Apply(_)
            | Of::Read(_)
            | Of::State(_)
            | Of::Score
            | Of::QueryPlace
            | Of::KeyPlace
            | Of::Head(_)
            | Of::AtQuery(_)
            | Of::AtKey(_)
            | Of::Look(_) => return Err(MALFORMED),
        })
    }
}
