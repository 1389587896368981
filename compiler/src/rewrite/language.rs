//! The IR as an egg language, and functions into e-graphs and back.
//!
//! A [`Term`] is a parameter, an operation, one result of an operation that has several, or the
//! tuple of what a function returns. Operations keep their attributes; equal terms are one e-node,
//! so values computed twice are shared by conversion alone. [`Facts`] are what is proven of a
//! class; [`Analyse`] derives them and refuses to merge unequal ones.
//!
//! Operations with state (`cache_write`, `add_counts`, …) and routing (`route`, `group`) are
//! e-nodes like others, but no rule makes one, so that each stands in the extracted function at
//! most as often as it stood in the original.

use super::rules::Looks;
use crate::ir::{Function, Mask, Module, Op, Port, Type, Value, infer};
use crate::op::{Class, Constant, Moved, Work, elementwise};
use crate::program::RowOp;
use egg::{Analysis, DidMerge, EGraph, Id, Language};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;

/// Classes of operands; most operations have no more than four.
pub type Operands = SmallVec<[Id; 4]>;

/// An e-node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Term {
    /// The parameter of that number and name.
    Param(u32, Arc<str>),
    /// An operation on its operands. Its value is its result, or all its results where it has
    /// several.
    Op(Arc<Op>, Operands),
    /// One result of an operation with several.
    Result(u32, Id),
    /// The results of the function, in order.
    Return(Vec<Id>),
}

impl Term {
    /// The operation, unless it is something else.
    pub fn op(&self) -> Option<&Op> {
        match self {
            Term::Op(o, _) => Some(o),
            _ => None,
        }
    }
}

impl Language for Term {
    type Discriminant = std::mem::Discriminant<Term>;

    fn discriminant(&self) -> Self::Discriminant {
        std::mem::discriminant(self)
    }

    fn matches(&self, other: &Self) -> bool {
        match (self, other) {
            (Term::Param(a, _), Term::Param(b, _)) => a == b,
            (Term::Op(a, x), Term::Op(b, y)) => a == b && x.len() == y.len(),
            (Term::Result(a, _), Term::Result(b, _)) => a == b,
            (Term::Return(x), Term::Return(y)) => x.len() == y.len(),
            _ => false,
        }
    }

    fn children(&self) -> &[Id] {
        match self {
            Term::Param(..) => &[],
            Term::Op(_, x) => x,
            Term::Return(x) => x,
            Term::Result(_, x) => std::slice::from_ref(x),
        }
    }

    fn children_mut(&mut self) -> &mut [Id] {
        match self {
            Term::Param(..) => &mut [],
            Term::Op(_, x) => x,
            Term::Return(x) => x,
            Term::Result(_, x) => std::slice::from_mut(x),
        }
    }
}

/// The operator alone, for proofs.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Term::Param(_, name) => write!(f, "%{name}"),
            Term::Op(o, _) => match &**o {
                Op::Constant(Constant(c)) => write!(f, "{c:?}"),
                op => f.write_str(op.name()),
            },
            Term::Result(k, _) => write!(f, "result{k}"),
            Term::Return(_) => f.write_str("return"),
        }
    }
}

/// egg's proofs ask for it; terms are not read from text.
impl egg::FromOp for Term {
    type Error = String;

    fn from_op(op: &str, _: Vec<Id>) -> Result<Self, String> {
        Err(format!("`{op}` is printed, not read"))
    }
}

/// The source of a value; each kind includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Nothing: a number.
    Constant,
    /// Weights and buffers of the weight set.
    Weights,
    /// The data of the call.
    Data,
}

/// Facts proven of a class.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Type of each result.
    pub types: Vec<Type>,
    /// The number that every element is, where it is known.
    pub constant: Option<f64>,
    /// Its source.
    pub source: Source,
    /// The mask of the attention that computes it.
    pub mask: Option<(Mask, bool)>,
    /// Rules that look at one of its e-nodes.
    pub rules: Looks,
}

/// Derives [`Facts`]. A contradiction is remembered, since egg has no way to return it.
#[derive(Clone, Debug)]
pub struct Analyse {
    /// The dimensions; rules add some.
    pub module: Module,
    /// Parameters and their types.
    pub params: Vec<(Port, Type)>,
    /// Parameters of role index that are known numbers: `da.row` where a body is applied once.
    pub indices: Vec<(String, u64)>,
    /// Parameters whose numbers are packed in blocks.
    pub packed: Vec<String>,
    /// Firings of rules, in order.
    pub fired: Vec<super::Fired>,
    /// The first contradiction.
    pub contradiction: Option<String>,
}

/// The e-graph of a function.
pub type Graph = EGraph<Term, Analyse>;

impl Analyse {
    fn refuse(&mut self, what: String) {
        self.contradiction.get_or_insert(what);
    }
}

impl Analysis<Term> for Analyse {
    type Data = Facts;

    fn make(graph: &mut Graph, term: &Term, _: Id) -> Facts {
        let of = |id: &Id| &graph[*id].data;
        let none = Facts {
            types: vec![],
            constant: None,
            source: Source::Constant,
            mask: None,
            rules: Looks::default(),
        };
        match term {
            Term::Param(i, _) => {
                let Some((p, ty)) = graph.analysis.params.get(*i as usize) else { return none };
                let source = if p.binding.is_weights() { Source::Weights } else { Source::Data };
                let constant =
                    graph.analysis.indices.iter().find(|(n, _)| *n == p.name).map(|(_, x)| *x as f64);
                Facts { types: vec![ty.clone()], source, constant, ..none }
            }
            Term::Return(_) => none,
            Term::Result(k, x) => {
                let x = of(x);
                let types = x.types.get(*k as usize).cloned().into_iter().collect();
                Facts { types, constant: None, rules: Looks::default(), ..x.clone() }
            }
            Term::Op(o, inputs) => {
                let operands: Vec<&Type> = inputs.iter().filter_map(|i| of(i).types.first()).collect();
                let source = inputs.iter().map(|i| of(i).source).max().unwrap_or(Source::Constant);
                let numbers: Option<Vec<f64>> = inputs.iter().map(|i| of(i).constant).collect();
                let constant = numbers.and_then(|n| fold(o, &n));
                let mask = match o.signature().work {
                    Work::Pairs(_, a, _) => Some((a.mask, a.segments)),
                    Work::Nothing
                    | Work::Moves
                    | Work::Operand(..)
                    | Work::Result(_)
                    | Work::Counted(_)
                    | Work::Dense(_)
                    | Work::Groups(..)
                    | Work::Row(..) => None,
                };
                match infer(&graph.analysis.module, o, &operands) {
                    Ok(types) => Facts { types, constant, source, mask, rules: Looks::at(o) },
                    Err(e) => {
                        graph.analysis.refuse(e.to_string());
                        none
                    }
                }
            }
        }
    }

    /// Equal values have equal types, numbers and masks; what one of them is not known to depend
    /// on, neither does.
    fn merge(&mut self, to: &mut Facts, from: Facts) -> DidMerge {
        let unequal = to.types != from.types
            || to.constant.zip(from.constant).is_some_and(|(a, b)| a != b)
            || to.mask.zip(from.mask).is_some_and(|(a, b)| a != b);
        if unequal {
            self.refuse(format!("{to:?} and {from:?} were made equal"));
            return DidMerge(false, false);
        }
        // Types and masks that both have are equal.
        let rest = |facts: &Facts| (facts.constant, facts.source, facts.mask);
        let before = rest(to);
        to.constant = to.constant.or(from.constant);
        to.source = to.source.min(from.source);
        to.mask = to.mask.or(from.mask);
        // No fact of a reader follows from these.
        to.rules = to.rules.or(from.rules);
        DidMerge(before != rest(to), rest(&from) != rest(to))
    }
}

/// The number that every element of a result is, where every element of each operand is one: the
/// few cases rules look at.
fn fold(op: &Op, x: &[f64]) -> Option<f64> {
    let folded = match op.class() {
        Class::Number(RowOp::Constant(c)) => c.0,
        Class::Number(_) => 0.0,
        Class::View { moved: Moved::Reshaped(_), .. } | Class::Identity => *x.first()?,
        Class::Element(_) => elementwise::fold(op, x)?,
        Class::View { moved: Moved::Cut(_), .. }
        | Class::Row { .. }
        | Class::Gather(_)
        | Class::Anchor(..) => {
            return None;
        }
    };
    // NaN equals nothing, itself included.
    (!folded.is_nan()).then_some(folded)
}

/// A function in an e-graph.
pub struct Converted {
    /// The graph.
    pub graph: Graph,
    /// The class of what is returned.
    pub root: Id,
    /// The class of each value.
    pub values: Vec<Id>,
    /// Original terms, operands before users.
    pub order: Vec<Id>,
    /// Nodes that were equal to an earlier one.
    pub shared: Vec<usize>,
}

/// Puts a function into an e-graph.
pub fn convert(module: &Module, f: &Function, context: &super::Context, explain: bool) -> Converted {
    let dims = Module { dims: module.dims.clone(), functions: Default::default() };
    let params = f.params.iter().cloned().zip(f.types.iter().cloned()).collect();
    let mut graph = Graph::new(Analyse {
        module: dims,
        params,
        indices: context.indices.clone(),
        packed: context.packed.clone(),
        fired: vec![],
        contradiction: None,
    });
    if explain {
        graph = graph.with_explanations_enabled();
    }
    let mut values: Vec<Id> = vec![];
    for (i, p) in f.params.iter().enumerate() {
        values.push(graph.add(Term::Param(i as u32, p.name.as_str().into())));
    }
    let mut order = values.clone();
    let mut shared = vec![];
    for (n, node) in f.nodes.iter().enumerate() {
        let inputs = node.inputs.iter().map(|v| values[v.index()]).collect();
        let before = graph.total_size();
        let id = graph.add(Term::Op(Arc::new(node.op.clone()), inputs));
        if graph.total_size() == before {
            shared.push(n);
        }
        order.push(id);
        if node.count == 1 {
            values.push(id);
            continue;
        }
        for k in 0..node.count {
            let result = graph.add(Term::Result(k, id));
            values.push(result);
            order.push(result);
        }
    }
    let returned = f.results.iter().map(|(_, v)| values[v.index()]).collect();
    let root = graph.add(Term::Return(returned));
    order.push(root);
    graph.rebuild();
    Converted { graph, root, values, order, shared }
}

/// The function of the chosen e-nodes: parameters as they were, nodes in an order close to the
/// original's. `chosen` gives the e-node of a class.
pub fn restore(
    graph: &Graph,
    original: &Function,
    order: &[Id],
    root: Id,
    chosen: &dyn Fn(Id) -> Option<Term>,
    live: &dyn Fn(Id) -> bool,
) -> Option<Function> {
    let mut f = Function::new(original.name.clone());
    for (p, ty) in original.params.iter().zip(&original.types) {
        f.param(p.name.clone(), p.binding, ty.clone());
    }
    // First values of classes already placed.
    let mut placed: Vec<Option<Value>> = vec![None; graph.total_size()];
    for start in order.iter().chain([&root]).map(|id| graph.find(*id)).filter(|id| live(*id)) {
        let mut stack = vec![(start, false)];
        while let Some((id, ready)) = stack.pop() {
            if placed[usize::from(id)].is_some() {
                continue;
            }
            let term = chosen(id)?;
            if !ready {
                stack.push((id, true));
                stack.extend(term.children().iter().rev().map(|c| (graph.find(*c), false)));
                continue;
            }
            let at = |c: &Id| placed[usize::from(graph.find(*c))];
            let value = match &term {
                Term::Param(i, _) => Value(*i),
                Term::Result(k, x) => Value(at(x)?.0 + k),
                Term::Op(o, inputs) => {
                    let inputs = inputs.iter().map(at).collect::<Option<Vec<_>>>()?;
                    f.push(Op::clone(o), inputs, graph[id].data.types.clone())
                }
                Term::Return(results) => {
                    for ((name, _), r) in original.results.iter().zip(results) {
                        f.results.push((name.clone(), at(r)?));
                    }
                    Value(0)
                }
            };
            placed[usize::from(id)] = Some(value);
        }
    }
    Some(f)
}
