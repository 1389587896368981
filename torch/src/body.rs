//! A function of the IR, or a part of one, as a method.
//!
//! *In*: a [`Function`] and what lowering remembers of it. *Out*: a [`Method`]. Operations that no
//! result needs (counts of choices, observations) are left out.

use crate::TorchError;
use crate::ops;
use crate::scope::{Item, Made, Names, Writer, identifier};
use crate::shape::{Varies, listed};
use crate::tree::Expr;
use dreamc_compiler::build::Marks;
use dreamc_compiler::ir::{Dim, Dims, Function, Module, Op, Value};
use std::collections::HashSet;

/// A function whose statements are written.
pub struct Body<'a> {
    pub module: &'a Module,
    pub f: &'a Function,
    pub marks: &'a Marks,
    pub varies: Varies<'a>,
    /// The value whose device and type new zeros get, and its dimensions.
    pub like: (&'a str, &'a [Dim]),
    /// Shares of tokens that `skip`s take.
    pub capacities: &'a [f64],
    /// The function lowered for a batch of another size, and `like`'s dimensions there.
    pub other: Option<(&'a Module, &'a Function)>,
    pub like_there: &'a [Dim],
    /// Other arguments, which keep their names, and their dimensions.
    pub sized: &'a [(String, Dims)],
}

/// An operation in its function.
pub struct At<'a> {
    pub op: &'a Op,
    f: &'a Function,
    pub inputs: &'a [Value],
    pub first: Value,
    read: Vec<bool>,
}

impl At<'_> {
    /// Dimensions of an operand.
    pub fn input(&self, k: usize) -> &[Dim] {
        &self.f.ty(self.inputs[k]).dims
    }

    /// Dimensions of a result.
    pub fn result(&self, k: usize) -> &[Dim] {
        &self.f.types[self.first.index() + k].dims
    }

    /// Whether something reads a result.
    pub fn is_read(&self, k: usize) -> bool {
        self.read.get(k).copied().unwrap_or(false)
    }
}

/// The kinds of items: an operation, or a call of a part.
pub enum What {
    Node(usize),
    Call(Call),
}

/// A call of a method of a part.
pub struct Call {
    /// The attribute that has the part.
    pub part: String,
    /// The method; none is the call of the part itself.
    pub method: Option<String>,
}

/// Operations that results need, where one value is known, or none.
pub fn live(f: &Function, wanted: &[Value], known: Option<Value>) -> Vec<bool> {
    let defined = f.definitions();
    let mut live = vec![false; f.nodes.len()];
    let mut stack: Vec<Value> = wanted.to_vec();
    while let Some(v) = stack.pop() {
        if let Some(node) = defined[v.index()]
            && Some(v) != known
            && !live[node]
        {
            live[node] = true;
            stack.extend(&f.nodes[node].inputs);
        }
    }
    live
}

impl<'a> Body<'a> {
    fn at(&self, node: usize, gives: &[Option<Value>]) -> At<'a> {
        let n = &self.f.nodes[node];
        let read = n.results().map(|v| gives.contains(&Some(v))).collect();
        At { op: &n.op, f: self.f, inputs: &n.inputs, first: n.first, read }
    }

    /// The items of nodes; others read or return those of `read`.
    pub fn items(&self, nodes: impl Iterator<Item = usize>, read: &HashSet<Value>) -> Vec<Item<What>> {
        let item = |n: usize| {
            let node = &self.f.nodes[n];
            let mut gives: Vec<Option<Value>> =
                node.results().map(|v| read.contains(&v).then_some(v)).collect();
            // Their text is that of the one result that something reads.
            let one = matches!(node.op, Op::Split(_) | Op::Attention(_) | Op::CrossEntropy | Op::CacheTake);
            if one && gives.iter().flatten().count() == 1 {
                gives.retain(Option::is_some);
            }
            Item { reads: self.reads(n), gives, what: What::Node(n) }
        };
        nodes.map(item).collect()
    }

    /// The operands of a node that its text mentions.
    fn reads(&self, node: usize) -> Vec<Value> {
        self.f.nodes[node].inputs.clone()
    }

    /// The share of tokens that the operation takes.
    pub fn capacity(&self, at: &At) -> Result<f64, TorchError> {
        let (k, n) = (self.module.size(at.result(0)[1]), self.module.size(at.input(0)[1]));
        self.share(k, n).ok_or(TorchError::Unsupported("a number of tokens"))
    }

    /// The size of a dimension.
    pub fn size_of(&self, dim: Dim) -> String {
        let (own, like) = (self.module.size(dim), self.like.0);
        if !(self.varies)(dim) {
            return own.to_string();
        }
        if let Some(k) = self.like.1.iter().position(|d| *d == dim) {
            return format!("{like}.shape[{k}]");
        }
        let sized =
            self.sized.iter().find_map(|(name, dims)| Some((name, dims.iter().position(|d| *d == dim)?)));
        if let Some((name, k)) = sized {
            return format!("{name}.shape[{k}]");
        }
        // A share of the tokens that a `skip` takes.
        let takes = |n: &dreamc_compiler::ir::Node| matches!(&n.op, Op::TopTokens(top) if top.k == dim);
        if let Some(top) = self.f.nodes.iter().find(|n| takes(n)) {
            let of = self.f.ty(top.inputs[0]).dims[1];
            let share = self.share(own, self.module.size(of));
            return format!("share({:?}, {})", share.unwrap_or(1.0), self.size_of(of));
        }
        // A number of slots for each token.
        let all: Vec<(usize, u64)> =
            self.like.1.iter().enumerate().take(2).map(|(k, d)| (k, self.module.size(*d))).collect();
        let each = own / all.iter().map(|(_, n)| n).product::<u64>().max(1);
        let mut factors: Vec<String> = all.iter().map(|(k, _)| format!("{like}.shape[{k}]")).collect();
        factors.extend((each > 1).then(|| each.to_string()));
        factors.join(" * ")
    }

    /// A number, which may be in proportion to the tokens of the batch, or to one over them.
    pub fn number(&self, at: &At, own: f64) -> Result<Expr, TorchError> {
        let Some((module, f)) = self.other else { return Ok(Expr::number(own)) };
        let same = f.types.len() == self.f.types.len();
        let other = f.nodes.iter().find(|n| same && n.first == at.first).map(|n| &n.op);
        let Some(Op::Constant(other)) = other else { return Ok(Expr::number(own)) };
        if other.0 == own {
            return Ok(Expr::number(own));
        }
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs();
        // Tokens of the batch, and those of a sequence.
        for first in 0..2 {
            let rows = |module: &Module, dims: &[Dim]| {
                let sizes = dims.iter().take(2).skip(first).map(|d| module.size(*d) as f64);
                sizes.product::<f64>()
            };
            let (here, there) = (rows(self.module, self.like.1), rows(module, self.like_there));
            let names = (first..2).map(|k| Expr::name(format!("{}.shape[{k}]", self.like.0)));
            let Some(tokens) = names.reduce(|a, b| Expr::infix("*", a, b)) else { continue };
            if near(own * here, other.0 * there) {
                return Ok(Expr::infix("/", Expr::number(own * here), tokens));
            }
            if near(own / here, other.0 / there) {
                return Ok(Expr::infix("*", Expr::number(own / here), tokens));
            }
        }
        Err(TorchError::Unsupported("a number that depends on the size of the batch"))
    }

    /// The share that makes `k` of `n` tokens.
    fn share(&self, k: u64, n: u64) -> Option<f64> {
        let takes = |c: &&f64| ((**c * n as f64 + 1e-9).floor() as u64).clamp(1, n.max(1)) == k;
        self.capacities.iter().find(takes).copied()
    }

    fn maker(&self, v: Value) -> Option<&Op> {
        self.f.nodes.iter().find(|n| n.results().any(|r| r == v)).map(|n| &n.op)
    }

    /// The value that an addition to zeros repeats along their shape.
    fn repeated(&self, v: Value) -> Option<Value> {
        let node = self.f.nodes.iter().find(|n| n.first == v)?;
        let [zeros, x] = node.inputs[..] else { return None };
        let adds = matches!(node.op, Op::Binary(dreamc_compiler::ir::Binary::Add));
        (adds && matches!(self.maker(zeros), Some(Op::Zeros(_)))).then_some(x)
    }

    /// Whether the operation repeats a value, and all that read it do by themselves.
    pub fn spreads(&self, at: &At) -> bool {
        let Some(x) = self.repeated(at.first) else { return false };
        if self.f.ty(x).dims.is_empty() {
            return matches!(self.maker(x), Some(Op::Constant(c)) if c.0 == 0.0);
        }
        let dims = |v: Value| self.repeated(v).map_or(&self.f.ty(v).dims, |x| &self.f.ty(x).dims);
        let returned = self.f.results.iter().any(|(_, v)| *v == at.first);
        !returned
            && self.f.nodes.iter().filter(|n| n.inputs.contains(&at.first)).all(|n| {
                let all: Dims = n.inputs.iter().flat_map(|v| dims(*v)).copied().collect();
                matches!(n.op, Op::Binary(_)) && self.f.ty(n.first).dims.iter().all(|d| all.contains(d))
            })
    }
}

/// Values that nodes of a range read, and those wanted.
pub fn read_in(f: &Function, nodes: impl Iterator<Item = usize>, wanted: &[Value]) -> HashSet<Value> {
    nodes.flat_map(|n| f.nodes[n].inputs.clone()).chain(wanted.iter().copied()).collect()
}

/// Writes the items of a body.
pub struct Method<'a, 'b> {
    pub body: &'b Body<'a>,
}

impl Writer<What> for Method<'_, '_> {
    fn write(&mut self, item: &Item<What>, args: &[Expr], names: &Names) -> Result<Made, TorchError> {
        match &item.what {
            What::Node(n) => ops::written(self.body, &self.body.at(*n, &item.gives), args, names),
            What::Call(call) => {
                let part = Expr::name("self").attribute(&call.part);
                Ok(Made::Expr(match &call.method {
                    None => Expr::Call(Box::new(part), args.to_vec()),
                    Some(method) => part.method(method, args.to_vec()),
                }))
            }
        }
    }

    fn hint(&self, item: &Item<What>, value: Value, args: &[Expr]) -> (String, bool) {
        if let Some(name) = self.body.marks.names.get(&value) {
            return (identifier(name), true);
        }
        let returned = self.body.f.results.iter().find(|(p, v)| *v == value && p.binding.is_state());
        if let Some((port, _)) = returned {
            return (state_name(&port.name), true);
        }
        match &item.what {
            What::Node(n) => {
                let at = self.body.at(*n, &item.gives);
                let k = (value.0 - at.first.0) as usize;
                let known = args.len() == item.reads.len() && !matches!(at.op, Op::Recurrence(_));
                let written = match known.then(|| ops::written(self.body, &at, args, &Names::default())) {
                    Some(Ok(Made::Expr(e))) => Some(e),
                    _ => None,
                };
                (ops::hint(self.body, &at, k, written.as_ref()), false)
            }
            What::Call(call) => (call.part.clone(), false),
        }
    }

    fn comment(&self, item: &Item<What>) -> String {
        let What::Node(n) = &item.what else { return String::new() };
        let node = &self.body.f.nodes[*n];
        match node.op {
            Op::Reshape(_) => {
                let from = &self.body.f.ty(node.inputs[0]).dims;
                listed(&self.body.f.ty(node.first).without(from), self.body.module)
            }
            Op::Zeros(_) => listed(&self.body.f.ty(node.first).dims, self.body.module),
            _ => String::new(),
        }
    }

    fn wants_names(&self, item: &Item<What>) -> bool {
        match &item.what {
            What::Node(n) => {
                let node = &self.body.f.nodes[*n];
                matches!(node.op, Op::Recurrence(_) | Op::Attention(_) | Op::PutTokens(_))
                    || matches!(&node.op, Op::Reshape(to) if to.0.iter().filter(|d| (self.body.varies)(**d)).count() > 1 && {
                        let from = &self.body.f.ty(node.inputs[0]).dims;
                        from.first() != to.0.first()
                    })
            }
            What::Call(_) => false,
        }
    }
}

/// A name for a state among the values of a model.
pub fn state_name(port: &str) -> String {
    identifier(&port.replace(['.', '-'], "_"))
}
