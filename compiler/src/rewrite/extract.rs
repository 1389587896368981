//! Choosing one e-node a class so that the function as a whole costs least, shared values counted
//! once.
//!
//! egg's extractors charge a value for each of its users; in a deep graph that hides every gain
//! from sharing. Here a [`Selection`] is priced whole ([`price`](super::price)). The search begins
//! with the original function and takes what a rule made, or a single e-node, or gives it up again,
//! for as long as the price falls; it is a local search, measured against all selections on small
//! graphs in `tests.rs`. Nothing in it depends on hash order or time.

use super::language::{Graph, Source, Term};
use super::price::{Seen, Standing};
use super::target::Target;
use super::{Context, Stage};
use crate::ir::{Dim, Extents, Op, Type, cost};
use crate::op::{Class, Reduction, Work};
use crate::schedule::row_dims;
use egg::{Id, Language};
use indexmap::IndexSet;
use smallvec::SmallVec;

/// The kernel of an e-node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: parameters, numbers, views.
    Free,
    /// Part of a row kernel.
    Row,
    /// Rows that a grouped product reads through their order; a kernel where something else reads
    /// them.
    Gather,
    /// A kernel of its own.
    Anchor,
}

/// An e-node with its price.
pub(super) struct Choice<'g> {
    pub(super) term: &'g Term,
    pub(super) children: SmallVec<[usize; 4]>,
    pub(super) kind: Kind,
    /// Depends on no data, so that it can be prepared once.
    pub(super) still: bool,
    /// Is what the function returns.
    pub(super) returns: bool,
    /// Sums over one dimension.
    pub(super) sums: bool,
    /// The operand whose rows it may read through an order.
    pub(super) through: Option<usize>,
    /// Whether its element-wise operations are all it does, one token after another.
    pub(super) stepwise: bool,
    pub(super) flops: f64,
    pub(super) elementwise: f64,
    pub(super) moved: f64,
}

/// One e-node for every class.
pub type Selection = Vec<usize>;

/// Moves in the order of a sweep. One that stands there twice, as what a rule made and as a single
/// e-node, is one move: what a trial of it looked at holds for both.
struct Moves {
    distinct: IndexSet<Vec<(usize, usize)>>,
    order: Vec<usize>,
}

impl Moves {
    fn new(all: impl Iterator<Item = Vec<(usize, usize)>>) -> Self {
        let mut distinct = IndexSet::new();
        let order = all.map(|m| distinct.insert_full(m).0).collect();
        Moves { distinct, order }
    }

    /// No trial of any.
    fn unseen(&self) -> Vec<Option<Seen>> {
        self.distinct.iter().map(|_| None).collect()
    }
}

/// How long the search may go on: sweeps over all moves.
const SWEEPS: usize = 6;

/// How much the search may do in all: classes looked at while moves are priced. A move is priced by
/// what it changes, and all functions of all examples stay far below it. Work is counted, not time,
/// so that every machine finds the same.
const BUDGET: usize = 40_000_000;

/// The e-graph laid out for pricing.
pub struct Extractor<'g> {
    graph: &'g Graph,
    pub(super) target: Target,
    /// Whether products read bf16.
    pub(super) narrow: bool,
    /// Calls that one preparation serves.
    pub(super) uses: f64,
    /// Whether a derivative follows, which costs twice what a product does.
    differentiated: bool,
    pub(super) classes: Vec<Id>,
    /// The number of a class by its id.
    index: Vec<usize>,
    pub(super) choices: Vec<Vec<Choice<'g>>>,
    /// Bytes of the first result of a class.
    pub(super) bytes: Vec<f64>,
    /// Number of the row dimensions of a class, none where it has none.
    pub(super) rows: Vec<Option<usize>>,
    pub(super) root: usize,
}

impl<'g> Extractor<'g> {
    /// Prices every e-node of a clean graph.
    pub fn new(graph: &'g Graph, root: Id, target: Target, context: &Context) -> Self {
        let mut classes: Vec<Id> = graph.classes().map(|c| c.id).collect();
        classes.sort();
        let mut index = vec![usize::MAX; classes.last().map_or(0, |&id| usize::from(id) + 1)];
        for (i, &class) in classes.iter().enumerate() {
            index[usize::from(class)] = i;
        }
        let module = &graph.analysis.module;
        let mut x = Extractor {
            graph,
            target,
            narrow: context.narrow,
            uses: context.uses.max(1.0),
            differentiated: context.stage == Stage::Differentiable,
            index,
            choices: vec![],
            bytes: vec![],
            rows: vec![],
            root: 0,
            classes,
        };
        let mut rows: IndexSet<&[Dim]> = IndexSet::new();
        for &class in &x.classes {
            let facts = &graph[class].data;
            let first = facts.types.first();
            let bytes = first.map_or(0.0, |t| t.dtype.room(module.elements(&t.dims)) as f64);
            x.bytes.push(bytes);
            let of = first.map(|t| row_dims(&t.dims)).filter(|d| !d.is_empty());
            x.rows.push(of.map(|d| rows.insert_full(d).0));
            // Order of e-nodes in a class is egg's sorted one: a function of the terms.
            let choices = graph[class].nodes.iter().map(|t| x.choice(class, t)).collect();
            x.choices.push(choices);
        }
        x.root = x.number(root);
        x
    }

    /// The number of the class of an e-node.
    fn number(&self, id: Id) -> usize {
        self.index[usize::from(self.graph.find(id))]
    }

    fn choice(&self, class: Id, term: &'g Term) -> Choice<'g> {
        let graph = self.graph;
        let children = term.children().iter().map(|&c| self.number(c)).collect();
        let still = graph[class].data.source != Source::Data;
        let free = |kind| Choice {
            term,
            children,
            kind,
            still,
            returns: matches!(term, Term::Return(_)),
            sums: term.op().is_some_and(sums),
            through: term.op().and_then(|op| op.class().anchor()).and_then(|anchor| anchor.through),
            stepwise: term.op().is_some_and(|op| matches!(op, Op::Recurrence(_) | Op::RecurrenceGrad(_))),
            flops: 0.0,
            elementwise: 0.0,
            moved: 0.0,
        };
        let Term::Op(o, inputs) = term else { return free(Kind::Free) };
        let operands: Vec<&Type> = inputs.iter().filter_map(|&i| graph[i].data.types.first()).collect();
        let results: Vec<&Type> = graph[class].data.types.iter().collect();
        // An operation that cannot be counted is too large to be chosen.
        let cost = cost::cost(&graph.analysis.module, o, &operands, &results, &Extents::default());
        let Ok(cost) = cost else { return Choice { flops: f64::MAX, ..free(Kind::Anchor) } };
        // With its derivative a product is three, and a head that does not store its logits
        // computes them again.
        let times = match self.differentiated {
            false => 1.0,
            true if matches!(**o, Op::HeadLoss(_)) => 4.0,
            true => 3.0,
        };
        Choice {
            flops: times * cost.flops as f64,
            elementwise: times * (cost.elementwise as f64 + scores(o, &operands, graph)),
            moved: times * (cost.read + cost.written) as f64,
            ..free(kind(o))
        }
    }

    /// The original function: for each class its first original e-node, for others one of least
    /// height.
    pub fn original(&self, order: &[Id]) -> Selection {
        let mut selection: Vec<Option<usize>> = vec![None; self.classes.len()];
        for &id in order {
            let (class, node) = self.locate(id, id);
            selection[class] = selection[class].or(node);
        }
        // Heights settle in as many rounds as the graph is high.
        loop {
            let mut changed = false;
            for (class, choices) in self.choices.iter().enumerate() {
                if selection[class].is_none() {
                    selection[class] =
                        choices.iter().position(|c| c.children.iter().all(|&c| selection[c].is_some()));
                    changed |= selection[class].is_some();
                }
            }
            if !changed {
                break;
            }
        }
        selection.into_iter().map(|s| s.unwrap_or(0)).collect()
    }

    /// The class of `old`, and in it the e-node that `new` was added as.
    pub fn locate(&self, old: Id, new: Id) -> (usize, Option<usize>) {
        let class = self.number(old);
        let term = self.graph.id_to_node(new).clone().map_children(|c| self.graph.find(c));
        (class, self.choices[class].iter().position(|c| *c.term == term))
    }

    /// The cheapest selection that the search finds from `start`. A move sets several classes at
    /// once.
    pub fn search(&self, start: &Selection, moves: &[Vec<(usize, usize)>]) -> Selection {
        let back = |m: &Vec<(usize, usize)>| m.iter().map(|&(c, _)| (c, start[c])).collect();
        let singles = self.singles().map(|one| vec![one]);
        let all = Moves::new(moves.iter().cloned().chain(moves.iter().map(back)).chain(singles));
        let mut left = BUDGET;
        let Some(mut found) = Standing::new(self, start.clone()) else { return start.clone() };
        let mut seen = all.unseen();
        self.descend(&mut found, &all, &mut seen, &mut left);
        // Once more with all that rules made: what pays only with another move is there now, and
        // trials of moves that stand apart from it hold.
        let mut eager = found.settled(moves, &mut left);
        self.descend(&mut eager, &all, &mut seen, &mut left);
        if eager.total().seconds < found.total().seconds { eager } else { found }.into_selection()
    }

    /// Every e-node of every class that has several.
    pub fn singles(&self) -> impl Iterator<Item = (usize, usize)> {
        let several = self.choices.iter().enumerate().filter(|(_, c)| c.len() > 1);
        several.flat_map(|(class, choices)| (0..choices.len()).map(move |k| (class, k)))
    }

    /// Takes moves for as long as the price falls.
    fn descend(&self, now: &mut Standing, all: &Moves, seen: &mut [Option<Seen>], left: &mut usize) {
        for _ in 0..SWEEPS {
            let mut fell = false;
            for &m in &all.order {
                if *left == 0 {
                    return;
                }
                fell |= now.improve(&all.distinct[m], &mut seen[m], left);
            }
            if !fell {
                return;
            }
        }
    }

    /// The cheapest of all selections, by trying every one; `None` where there are more than
    /// `limit`.
    pub fn exact(&self, start: &Selection, limit: u64) -> Option<Selection> {
        let open: Vec<usize> = (0..self.choices.len()).filter(|&c| self.choices[c].len() > 1).collect();
        let count = open.iter().try_fold(1u64, |n, &c| n.checked_mul(self.choices[c].len() as u64))?;
        if count > limit {
            return None;
        }
        let mut best: Option<(f64, Selection)> = None;
        for number in 0..count {
            let (mut rest, mut now) = (number, start.clone());
            for &c in &open {
                let choices = self.choices[c].len() as u64;
                now[c] = (rest % choices) as usize;
                rest /= choices;
            }
            let price = self.price(&now).map(|t| t.seconds);
            if let Some(p) = price.filter(|p| best.as_ref().is_none_or(|(least, _)| p < least)) {
                best = Some((p, now));
            }
        }
        best.map(|(_, s)| s)
    }

    /// The chosen term of a class.
    pub fn term(&self, selection: &Selection, class: Id) -> Option<Term> {
        let class = *self.index.get(usize::from(self.graph.find(class)))?;
        Some(self.choices.get(class)?[selection[class]].term.clone())
    }

    /// The classes that a selection reaches.
    pub fn reached(&self, selection: &Selection) -> Option<Vec<Id>> {
        Some(self.live(selection)?.into_iter().map(|c| self.classes[c]).collect())
    }
}

fn sums(op: &Op) -> bool {
    matches!(op, Op::Reduce(Reduction { how: crate::ir::Reduce::Sum, over }) if over.len() == 1)
}

fn kind(op: &Op) -> Kind {
    match op.class() {
        Class::Number(_) | Class::View { .. } | Class::Identity => Kind::Free,
        Class::Element(_) | Class::Row { .. } => Kind::Row,
        Class::Gather(_) => Kind::Gather,
        Class::Anchor(..) => Kind::Anchor,
    }
}

/// Work of attention on scores beyond the count of [`cost`]: one multiplies by no scale of 1, and
/// compares with no window where there is none.
fn scores(op: &Op, operands: &[&Type], graph: &Graph) -> f64 {
    match op.signature().work {
        Work::Pairs(_, a, _) | Work::Row(_, a, _) => {
            let each = f64::from(u8::from(a.scale != 1.0) + u8::from(a.window.is_some()));
            each * operands.first().map_or(0.0, |t| graph.analysis.module.elements(&t.dims) as f64)
        }
        Work::Nothing
        | Work::Moves
        | Work::Operand(..)
        | Work::Result(_)
        | Work::Counted(_)
        | Work::Dense(_)
        | Work::Groups(..) => 0.0,
    }
}
