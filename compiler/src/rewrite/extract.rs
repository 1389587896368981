//! Choosing one e-node a class so that the function as a whole costs least, shared values counted
//! once.
//!
//! egg's extractors charge a value for each of its users; in a deep graph that hides every gain
//! from sharing. Here a [`Selection`] is priced whole: operands are walked once, element-wise
//! chains pay for what leaves their kernel, weights that are prepared once are charged to all calls
//! they serve. The search begins with the original function and takes what a rule made, or a single
//! e-node, or gives it up again, for as long as the price falls; it is a local search, measured
//! against all selections on small graphs in `tests.rs`. Nothing in it depends on hash order or
//! time.

use super::language::{Graph, Source, Term};
use super::target::Target;
use super::{Context, Stage};
use crate::count::roofline::Demand;
use crate::ir::{Dim, Extents, Op, Type, cost};
use crate::op::{Class, Reduction, Work};
use crate::schedule::{reader_level, row_dims};
use egg::{Id, Language};
use indexmap::IndexSet;
use std::cell::RefCell;
use std::collections::HashMap;

/// The kernel of an e-node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
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
struct Choice {
    term: Term,
    children: Vec<usize>,
    kind: Kind,
    /// Depends on no data, so that it can be prepared once.
    still: bool,
    /// Is what the function returns.
    returns: bool,
    /// Sums over one dimension.
    sums: bool,
    /// The operand whose rows it may read through an order.
    through: Option<usize>,
    /// Whether its element-wise operations are all it does, one token after another.
    stepwise: bool,
    flops: f64,
    elementwise: f64,
    moved: f64,
}

/// The cost of a selection in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Total {
    /// Predicted time.
    pub seconds: f64,
    /// Multiplies and adds of products.
    pub flops: f64,
    /// Bytes moved.
    pub bytes: f64,
    /// Launches.
    pub launches: f64,
}

/// One e-node for every class.
pub type Selection = Vec<usize>;

/// How long the search may go on: sweeps over all moves.
const SWEEPS: usize = 6;

/// How much the search may do in all: classes walked over while pricing. Each of many moves is
/// priced by a walk over the whole function, which is quadratic; functions of a thousand classes
/// are searched whole, and larger ones as far as a second or two goes. Work is counted, not time,
/// so that every machine finds the same.
const BUDGET: usize = 40_000_000;

/// The e-graph laid out for pricing.
pub struct Extractor<'g> {
    graph: &'g Graph,
    target: Target,
    /// Whether products read bf16.
    narrow: bool,
    /// Calls that one preparation serves.
    uses: f64,
    /// Whether a derivative follows, which costs twice what a product does.
    differentiated: bool,
    classes: Vec<Id>,
    index: HashMap<Id, usize>,
    choices: Vec<Vec<Choice>>,
    /// Bytes of the first result of a class.
    bytes: Vec<f64>,
    /// Number of the row dimensions of a class, none where it has none.
    rows: Vec<Option<usize>>,
    root: usize,
    /// The memory of pricing, kept so that thousands of prices ask for memory once.
    scratch: RefCell<Scratch>,
}

/// Results of pricing a selection, by class.
#[derive(Default)]
struct Scratch {
    walk: Walk,
    marks: Vec<Marks>,
    /// Level and row dimensions of the row kernels.
    groups: Vec<(u32, Option<usize>)>,
}

/// A walk over the classes that a selection reaches.
#[derive(Default)]
struct Walk {
    state: Vec<Visit>,
    stack: Vec<(usize, bool)>,
    /// Classes reached, operands first.
    order: Vec<usize>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Visit {
    #[default]
    New,
    Open,
    Done,
}

/// Marks of a class while a selection is priced.
#[derive(Clone, Copy, Default)]
struct Marks {
    /// Something reads it from memory.
    stored: bool,
    /// A row kernel reads it there.
    row_read: bool,
    /// The function returns it.
    returned: bool,
    /// Row kernels before its own.
    level: u32,
}

impl<'g> Extractor<'g> {
    /// Prices every e-node of a clean graph.
    pub fn new(graph: &'g Graph, root: Id, target: Target, context: &Context) -> Self {
        let mut classes: Vec<Id> = graph.classes().map(|c| c.id).collect();
        classes.sort();
        let index: HashMap<Id, usize> = classes.iter().enumerate().map(|(i, c)| (*c, i)).collect();
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
            scratch: RefCell::default(),
            classes,
        };
        let mut rows: IndexSet<&[Dim]> = IndexSet::new();
        for &class in &x.classes {
            let facts = &graph[class].data;
            let first = facts.types.first();
            let bytes = first.map_or(0.0, |t| module.elements(&t.dims) as f64 * t.dtype.bytes() as f64);
            x.bytes.push(bytes);
            let of = first.map(|t| row_dims(&t.dims)).filter(|d| !d.is_empty());
            x.rows.push(of.map(|d| rows.insert_full(d).0));
            // Order of e-nodes in a class is egg's sorted one: a function of the terms.
            let choices = graph[class].nodes.iter().map(|t| x.choice(class, t)).collect();
            x.choices.push(choices);
        }
        x.root = x.index[&graph.find(root)];
        x
    }

    fn choice(&self, class: Id, term: &Term) -> Choice {
        let graph = self.graph;
        let children = term.children().iter().map(|c| self.index[&graph.find(*c)]).collect();
        let still = graph[class].data.source != Source::Data;
        let free = |kind| Choice {
            term: term.clone(),
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
        let class = self.index[&self.graph.find(old)];
        let term = self.graph.id_to_node(new).clone().map_children(|c| self.graph.find(c));
        (class, self.choices[class].iter().position(|c| c.term == term))
    }

    /// Walks over what a selection reaches, operands first; `false` where it turns in a circle.
    fn walk(&self, selection: &Selection, walk: &mut Walk) -> bool {
        let Walk { state, stack, order } = walk;
        state.clear();
        state.resize(self.classes.len(), Visit::New);
        stack.clear();
        order.clear();
        stack.push((self.root, false));
        while let Some((class, ready)) = stack.pop() {
            match (state[class], ready) {
                (_, true) => {
                    state[class] = Visit::Done;
                    order.push(class);
                }
                (Visit::New, _) => {
                    state[class] = Visit::Open;
                    stack.push((class, true));
                    for &c in &self.choices[class][selection[class]].children {
                        match state[c] {
                            Visit::Open => return false,
                            Visit::New => stack.push((c, false)),
                            Visit::Done => {}
                        }
                    }
                }
                _ => {}
            }
        }
        true
    }

    /// Classes that a selection reaches, operands first; `None` where it turns in a circle.
    pub fn live(&self, selection: &Selection) -> Option<Vec<usize>> {
        let walk = &mut self.scratch.borrow_mut().walk;
        self.walk(selection, walk).then(|| walk.order.clone())
    }

    /// Whether a selection turns in no circle.
    pub fn is_sound(&self, selection: &Selection) -> bool {
        self.walk(selection, &mut self.scratch.borrow_mut().walk)
    }

    /// The cost of a selection; `None` where it turns in a circle.
    pub fn price(&self, selection: &Selection) -> Option<Total> {
        let Scratch { walk, marks, groups } = &mut *self.scratch.borrow_mut();
        if !self.walk(selection, walk) {
            return None;
        }
        let live = &walk.order;
        let (t, rates) = (&self.target, &self.target.rates);
        marks.clear();
        marks.resize(self.classes.len(), Marks::default());
        groups.clear();
        for &class in live.iter().rev() {
            let c = &self.choices[class][selection[class]];
            let chosen = |i: usize| &self.choices[i][selection[i]];
            let of = marks[class];
            for (k, &child) in c.children.iter().enumerate() {
                let mark = &mut marks[child];
                match c.kind {
                    Kind::Free if c.returns => {
                        mark.stored = true;
                        mark.returned = true;
                    }
                    Kind::Free => {
                        mark.stored |= of.stored;
                        mark.row_read |= of.row_read;
                    }
                    Kind::Row => {
                        mark.row_read = true;
                        mark.stored |= self.rows[child] != self.rows[class] && self.rows[child].is_some();
                    }
                    // Only what reads a gather through its order reads no copy of it.
                    Kind::Anchor if chosen(child).kind == Kind::Gather && c.through == Some(k) => {}
                    Kind::Anchor | Kind::Gather => mark.stored = true,
                }
            }
        }
        let mut total = Total::default();
        let mut once = Total::default();
        for &class in live {
            let c = &self.choices[class][selection[class]];
            for &child in &c.children {
                let below = self.choices[child][selection[child]].kind;
                let same = self.rows[child] == self.rows[class];
                let above = reader_level(
                    marks[child].level,
                    c.kind == Kind::Row && !c.still,
                    below == Kind::Row && same,
                );
                marks[class].level = marks[class].level.max(above);
            }
            // The gradient of a shared expert is summed after all calls.
            let later = c.sums && c.children.iter().all(|&x| marks[x].returned);
            let into = if later || c.still { &mut once } else { &mut total };
            let Marks { stored, row_read, level, .. } = marks[class];
            let kind = c.kind;
            let work = match kind {
                Kind::Free => continue,
                Kind::Gather if !stored => continue,
                // Weights are prepared by kernels of their own.
                _ if c.still => c.moved.max(c.elementwise * rates.bandwidth / rates.elementwise),
                Kind::Row => {
                    if !c.still {
                        groups.push((level, self.rows[class]));
                    }
                    into.seconds += c.elementwise / rates.elementwise;
                    if stored { self.bytes[class] } else { 0.0 }
                }
                Kind::Gather | Kind::Anchor => c.moved,
            };
            if c.stepwise {
                into.seconds += c.elementwise / rates.elementwise;
            }
            if stored && !c.still && self.bytes[class] > t.large {
                // Added to everything: memory costs the same however long its computation is.
                into.seconds += work * Target::SPILL / rates.bandwidth;
            }
            into.flops += c.flops;
            into.bytes += work;
            into.seconds += rates.time(self.demand(c.flops, work)).seconds;
            if kind != Kind::Row || c.still {
                into.launches += 1.0;
                into.seconds += t.launch;
            }
            // A row kernel reads each operand once.
            if row_read && !matches!(kind, Kind::Row) {
                total.bytes += self.bytes[class];
                total.seconds += self.bytes[class] / rates.bandwidth;
            }
        }
        groups.sort_unstable();
        groups.dedup();
        total.launches += groups.len() as f64;
        total.seconds += groups.len() as f64 * t.launch;
        let share = |all: f64, once: f64| all + once / self.uses;
        Some(Total {
            seconds: share(total.seconds, once.seconds),
            flops: share(total.flops, once.flops),
            bytes: share(total.bytes, once.bytes),
            launches: share(total.launches, once.launches),
        })
    }

    /// The cheapest selection that the search finds from `start`. A move sets several classes at
    /// once.
    pub fn search(&self, start: &Selection, moves: &[Vec<(usize, usize)>]) -> Selection {
        let mut all: Vec<Vec<(usize, usize)>> = moves.to_vec();
        all.extend(moves.iter().map(|m| m.iter().map(|&(c, _)| (c, start[c])).collect()));
        for (class, choices) in self.choices.iter().enumerate().filter(|(_, c)| c.len() > 1) {
            all.extend((0..choices.len()).map(|k| vec![(class, k)]));
        }
        let mut best: Option<(f64, Selection)> = None;
        let mut left = BUDGET / self.classes.len().max(1);
        for eager in [false, true] {
            let mut now = start.clone();
            if eager {
                for m in moves {
                    left = left.saturating_sub(1);
                    let undo = set(&mut now, m);
                    if left == 0 || !self.is_sound(&now) {
                        set(&mut now, &undo);
                    }
                }
            }
            let Some(mut price) = self.price(&now).map(|t| t.seconds) else { continue };
            let mut live = self.is_live(&now);
            for _ in 0..SWEEPS {
                let before = price;
                for m in &all {
                    // A class that is not reached has no price.
                    if m.iter().all(|&(c, k)| now[c] == k || !live[c]) {
                        continue;
                    }
                    if left == 0 {
                        break;
                    }
                    left -= 1;
                    let undo = set(&mut now, m);
                    match self.price(&now) {
                        // A gain in the last bits is noise.
                        Some(t) if t.seconds < price * (1.0 - 1e-12) => {
                            price = t.seconds;
                            live = self.is_live(&now);
                        }
                        _ => {
                            set(&mut now, &undo);
                        }
                    }
                }
                if price == before {
                    break;
                }
            }
            if best.as_ref().is_none_or(|(p, _)| price < *p) {
                best = Some((price, now));
            }
        }
        best.map_or_else(|| start.clone(), |(_, s)| s)
    }

    fn is_live(&self, selection: &Selection) -> Vec<bool> {
        let mut live = vec![false; self.classes.len()];
        for class in self.live(selection).unwrap_or_default() {
            live[class] = true;
        }
        live
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

    /// Products and traffic of a kernel; element-wise work is charged beside them.
    fn demand(&self, flops: f64, bytes: f64) -> Demand {
        Demand { flops, narrow: self.narrow, bytes, elementwise: 0.0 }
    }

    /// The cost of an e-node by itself.
    pub fn alone(&self, node: Id) -> Total {
        let (class, k) = self.locate(node, node);
        let Some(c) = k.map(|k| &self.choices[class][k]) else { return Total::default() };
        let launches = if matches!(c.kind, Kind::Anchor) { 1.0 } else { 0.0 };
        let (flops, bytes) = (c.flops, if launches > 0.0 { c.moved } else { 0.0 });
        let rates = &self.target.rates;
        let seconds = rates.time(self.demand(flops, bytes)).seconds
            + c.elementwise / rates.elementwise
            + launches * self.target.launch;
        Total { seconds, flops, bytes, launches }
    }

    /// The chosen term of a class.
    pub fn term(&self, selection: &Selection, class: Id) -> Option<Term> {
        let class = *self.index.get(&self.graph.find(class))?;
        Some(self.choices[class][selection[class]].term.clone())
    }

    /// The classes that a selection reaches.
    pub fn reached(&self, selection: &Selection) -> Option<Vec<Id>> {
        Some(self.live(selection)?.into_iter().map(|c| self.classes[c]).collect())
    }
}

/// Sets classes; what to set them back to.
fn set(selection: &mut Selection, to: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let undo = to.iter().map(|&(c, _)| (c, selection[c])).collect();
    for &(c, k) in to {
        selection[c] = k;
    }
    undo
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
