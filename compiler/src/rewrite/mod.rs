//! Rewriting with `egg`: equal functions that cost less.
//!
//! *In*: a function of the canonical IR, before or after differentiation. *Out*: an equal function,
//! and what happened to it ([`Report`]). *Promise*: the result is what the function was, up to
//! rounding (every rule is proved on random tensors in f64); dtypes, masks, state and routing are
//! as they were; the same function gives the same result every time; limits are hard, and meeting
//! one leaves a correct function and a reason.
//!
//! Each distinct body is rewritten once however deep the model is:
//!
//! 1. [`language`] puts a function into an e-graph, where equal subexpressions are one, with facts
//!    about each class;
//! 2. [`rules`] is the table of directed rules that add equal expressions;
//! 3. [`extract`] chooses, by [prices](price) from the roofline of a [`target`], with shared work
//!    counted once;
//! 4. [`hoist`] moves what needs no data before the calls, and sums of gradients after them.

pub mod extract;
pub mod hoist;
pub mod language;
pub mod price;
pub mod report;
pub mod rules;
pub mod target;
#[cfg(test)]
mod tests;

pub use hoist::Prepared;
pub use report::{Firing, Report, Rewritten, Work};
pub use rules::{RULES, Rule, Stage};
pub use target::Target;

use self::rules::ALL_EXPERTS;
use crate::CompileError;
use crate::ir::{Binding, Function, Module, Op, Port, verify_function};
use egg::{
    Applier, EClass, Id, Rewrite, Runner, SearchMatches, Searcher, SimpleScheduler, Subst, Symbol, Var,
};
use extract::Extractor;
use language::{Analyse, Converted, Facts, Graph, Term, convert, restore};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Which rules are used, and for which device. Kept with a run as
/// `{"rules": "all", "target": "cpu"}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rewriting {
    /// Which rules.
    pub rules: Rules,
    /// The device whose roofline chooses.
    pub target: Target,
    /// Whether reports carry egg's proofs; this takes more time.
    #[serde(skip)]
    pub proofs: bool,
}

/// A choice of rules. In text `all`, `none`, or names with commas between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum Rules {
    /// All of them.
    #[default]
    All,
    /// None: functions stay as they were lowered and differentiated.
    Off,
    /// Those of these names.
    Only(Vec<String>),
}

impl Rewriting {
    /// Nothing is rewritten.
    pub fn off() -> Self {
        Rewriting { rules: Rules::Off, ..Rewriting::default() }
    }

    /// Only the rules of these names.
    pub fn only(names: &[&str]) -> Self {
        Rewriting {
            rules: Rules::Only(names.iter().map(|n| n.to_string()).collect()),
            ..Rewriting::default()
        }
    }

    /// The same without a rule.
    fn without(&self, name: &str) -> Self {
        let rules = match &self.rules {
            Rules::All => RULES.iter().map(|rule| rule.name.to_string()).collect(),
            Rules::Off => return self.clone(),
            Rules::Only(names) => names.clone(),
        };
        let rules = Rules::Only(rules.into_iter().filter(|other| other != name).collect());
        Rewriting { rules, ..self.clone() }
    }

    fn uses(&self, rule: &Rule) -> bool {
        match &self.rules {
            Rules::All => true,
            Rules::Off => false,
            Rules::Only(names) => names.iter().any(|n| n == rule.name),
        }
    }

    /// An error that names the first rule that does not exist.
    fn check(&self) -> Result<(), CompileError> {
        let Rules::Only(names) = &self.rules else { return Ok(()) };
        match names.iter().find(|n| rules::find(n).is_none()) {
            Some(n) => {
                let known: Vec<&str> = RULES.iter().map(|r| r.name).collect();
                Err(CompileError::Rule { name: n.clone(), known: known.join(", ") })
            }
            None => Ok(()),
        }
    }
}

impl From<Rules> for String {
    fn from(rules: Rules) -> String {
        match rules {
            Rules::All => "all".into(),
            Rules::Off => "none".into(),
            Rules::Only(names) => names.join(","),
        }
    }
}

impl From<String> for Rules {
    fn from(text: String) -> Rules {
        match text.as_str() {
            "all" => Rules::All,
            "none" => Rules::Off,
            names => Rules::Only(names.split(',').filter(|n| !n.is_empty()).map(str::to_string).collect()),
        }
    }
}

/// For people: `all rewriting rules for cpu`.
impl fmt::Display for Rewriting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let target = self.target.name;
        match &self.rules {
            Rules::All => write!(f, "all rewriting rules for {target}"),
            Rules::Off => f.write_str("no rewriting"),
            Rules::Only(names) => write!(f, "the rewriting rules {} for {target}", names.join(", ")),
        }
    }
}

/// Limits of one function's rewriting. All functions of all examples stay far below them.
pub const ITERATIONS: usize = 16;
/// E-nodes.
pub const NODES: usize = 20_000;
/// Time, against the unforeseen; the other limits are met first, so that results do not depend on
/// it.
pub const TIME: Duration = Duration::from_secs(5);

/// The place where a function is used.
#[derive(Clone, Debug)]
pub struct Context {
    /// The stage of its use.
    pub stage: Stage,
    /// Calls that one preparation of weights serves.
    pub uses: f64,
    /// Index parameters that are the same number in every call.
    pub indices: Vec<(String, u64)>,
    /// Parameters whose numbers are packed in blocks, which products read as they are.
    pub packed: Vec<String>,
    /// Whether products will read bf16.
    pub narrow: bool,
}

/// Rewrites functions and keeps the books.
#[derive(Clone, Debug)]
pub struct Optimiser {
    rewriting: Rewriting,
    /// The fate of each function so far.
    pub report: Report,
    /// Numbers of what is prepared.
    pub names: hoist::Names,
}

impl Optimiser {
    /// An optimiser; an error where `rewriting` names a rule that does not exist.
    pub fn new(rewriting: &Rewriting, grouped: bool) -> Result<Self, CompileError> {
        rewriting.check()?;
        let rewriting = if grouped { rewriting.without(ALL_EXPERTS) } else { rewriting.clone() };
        Ok(Optimiser { rewriting, report: Report::default(), names: Default::default() })
    }

    /// An optimiser of the same rules with books of its own.
    pub fn apart(&self) -> Self {
        Optimiser { rewriting: self.rewriting.clone(), report: Report::default(), names: Default::default() }
    }

    /// Whether nothing is rewritten.
    pub fn is_off(&self) -> bool {
        self.rewriting.rules == Rules::Off
    }

    /// A function equal to `f`.
    pub fn rewrite(
        &mut self,
        module: &mut Module,
        f: &Function,
        context: &Context,
    ) -> Result<Function, CompileError> {
        if self.is_off() {
            return Ok(f.clone());
        }
        let (g, rewritten) = rewrite(module, f, context, &self.rewriting)?;
        self.report.functions.push(rewritten);
        Ok(g)
    }
}

/// A firing of a rule: pairs of an old e-node and the one made equal to it.
#[derive(Clone, Debug)]
pub struct Fired {
    /// Which rule.
    pub rule: &'static Rule,
    /// The classes it made equal.
    pub pairs: Vec<(Id, Id)>,
}

/// A rule of that number for egg: it looks at every class in a fixed order.
#[derive(Clone, Copy)]
struct Engine(usize, &'static Rule);

impl Engine {
    /// A match of a class that has an operation of the rule.
    fn matches<'a>(&self, class: &EClass<Term, Facts>) -> Option<SearchMatches<'a, Term>> {
        class.data.rules.has(self.0).then(|| SearchMatches {
            eclass: class.id,
            substs: vec![Subst::default()],
            ast: None,
        })
    }
}

impl Searcher<Term, Analyse> for Engine {
    fn search_eclass_with_limit(
        &self,
        graph: &Graph,
        class: Id,
        _: usize,
    ) -> Option<SearchMatches<'_, Term>> {
        self.matches(&graph[class])
    }

    fn search_with_limit(&self, graph: &Graph, _: usize) -> Vec<SearchMatches<'_, Term>> {
        let found = graph.classes().filter_map(|class| self.matches(class));
        let mut found: Vec<SearchMatches<'_, Term>> = found.collect();
        found.sort_unstable_by_key(|m| m.eclass);
        found
    }

    fn vars(&self) -> Vec<Var> {
        vec![]
    }
}

impl Applier<Term, Analyse> for Engine {
    fn apply_one(
        &self,
        graph: &mut Graph,
        class: Id,
        _: &Subst,
        _: Option<&egg::PatternAst<Term>>,
        name: Symbol,
    ) -> Vec<Id> {
        let mut changed = vec![];
        // Unions since the search may have renamed operands; rules compare canonical ones.
        let of = |term: &Term| match term {
            Term::Op(o, inputs) if (self.1.at)(o) => Some((o.clone(), inputs.clone())),
            _ => None,
        };
        for (o, inputs) in graph[class].nodes.iter().filter_map(of).collect::<Vec<_>>() {
            let inputs: Vec<Id> = inputs.iter().map(|&i| graph.find(i)).collect();
            let class = graph.find(class);
            let Some(pairs) = (self.1.apply)(graph, class, &o, &inputs) else { continue };
            let new: Vec<(Id, Id)> =
                pairs.into_iter().filter(|&(a, b)| graph.find(a) != graph.find(b)).collect();
            for &(a, b) in &new {
                graph.union_trusted(a, b, name);
                changed.push(a);
            }
            if !new.is_empty() {
                graph.analysis.fired.push(Fired { rule: self.1, pairs: new });
            }
        }
        changed
    }
}

/// A function in an e-graph in which rules find nothing new, or have met a limit.
struct Explored {
    graph: Graph,
    root: Id,
    values: Vec<Id>,
    order: Vec<Id>,
    shared: Vec<usize>,
    fired: Vec<Fired>,
    stopped: String,
}

fn explore(
    module: &Module,
    f: &Function,
    context: &Context,
    rewriting: &Rewriting,
) -> Result<Explored, CompileError> {
    let Converted { graph, root, values, order, shared } = convert(module, f, context, rewriting.proofs);
    let mut active: Vec<Rewrite<Term, Analyse>> = vec![];
    let used = RULES.iter().enumerate().filter(|(_, r)| r.stage <= context.stage && rewriting.uses(r));
    for (n, rule) in used {
        let engine = Engine(n, rule);
        active.push(Rewrite::new(rule.name, engine, engine).map_err(CompileError::Rewrite)?);
    }
    let runner = Runner::<Term, Analyse>::new(graph.analysis.clone())
        .with_egraph(graph)
        .with_iter_limit(ITERATIONS)
        .with_node_limit(NODES)
        .with_time_limit(TIME)
        .with_scheduler(SimpleScheduler)
        .run(&active);
    let stopped = report::stopped(runner.stop_reason.as_ref());
    let mut graph = runner.egraph;
    if let Some(what) = graph.analysis.contradiction.take() {
        return Err(CompileError::Rewrite(format!("{}: {what}", f.name)));
    }
    let fired = std::mem::take(&mut graph.analysis.fired);
    Ok(Explored { graph, root, values, order, shared, fired, stopped })
}

impl Explored {
    /// The setting of each firing: classes to e-nodes.
    fn moves(&self, extractor: &Extractor) -> Vec<Vec<(usize, usize)>> {
        let set = |fired: &Fired| {
            let of = fired.pairs.iter().map(|&(old, new)| extractor.locate(old, new));
            of.filter_map(|(class, node)| Some((class, node?))).collect()
        };
        self.fired.iter().map(set).collect()
    }

    fn extract(
        &self,
        f: &Function,
        extractor: &Extractor,
        chosen: &extract::Selection,
    ) -> Result<Function, CompileError> {
        let lost = || CompileError::Rewrite(format!("{}: nothing could be extracted", f.name));
        let live: rustc_hash::FxHashSet<Id> =
            extractor.reached(chosen).ok_or_else(lost)?.into_iter().collect();
        let term = |id| extractor.term(chosen, id);
        restore(&self.graph, f, &self.order, self.root, &term, &|id| live.contains(&id)).ok_or_else(lost)
    }
}

/// Rewrites one function.
pub fn rewrite(
    module: &mut Module,
    f: &Function,
    context: &Context,
    rewriting: &Rewriting,
) -> Result<(Function, Rewritten), CompileError> {
    let start = std::time::Instant::now();
    let explored = explore(module, f, context, rewriting)?;
    let extractor = Extractor::new(&explored.graph, explored.root, rewriting.target, context);
    let original = extractor.original(&explored.order);
    let moves = explored.moves(&extractor);
    let chosen = extractor.search(&original, &moves);
    let g = explored.extract(f, &extractor, &chosen)?;
    let used = report::used(&extractor, &original, &chosen, &explored.fired, &moves);
    let Explored { mut graph, values, shared, fired, stopped, .. } = explored;
    module.dims = graph.analysis.module.dims.clone();
    verify_function(module, &g).map_err(|e| CompileError::Rewrite(e.to_string()))?;
    let mut firings = report::sharing(module, f, &shared);
    let of = report::Sites::new(module, f, &graph, &values);
    for (fired, (used, saved)) in fired.iter().zip(used) {
        let sites = of.of(&graph, &fired.pairs);
        firings.push(Firing { rule: fired.rule.name.into(), sites, used, saved, proof: None });
    }
    if rewriting.proofs {
        report::prove(&mut graph, &fired.iter().map(|f| f.pairs.clone()).collect::<Vec<_>>(), &mut firings);
    }
    let rewritten = Rewritten {
        function: f.name.clone(),
        stage: context.stage.to_string(),
        firings,
        stopped,
        nodes: graph.total_size(),
        before: Work::of(module, f),
        after: Work::of(module, &g),
        micros: start.elapsed().as_micros() as u64,
    };
    Ok((g, rewritten))
}

/// In a function just differentiated, the operands of `stop_gradient` in its place: it has done its
/// work. Nodes keep their numbers.
pub fn forget_stops(f: &mut Function) {
    let mut map: Vec<crate::ir::Value> = (0..f.types.len() as u32).map(crate::ir::Value).collect();
    for node in &mut f.nodes {
        for v in &mut node.inputs {
            *v = map[v.index()];
        }
        if node.op == Op::StopGradient {
            map[node.first.index()] = node.inputs[0];
        }
    }
}

/// Cuts a rewritten joint function: the forward function `f` became its first nodes, those that the
/// results named in `f` need; then come the rest. Gives the joint function in that order, and the
/// forward one, for [`partition`](crate::autodiff::partition).
pub fn rejoin(joint: &Function, f: &Function) -> (Function, Function) {
    let mut forward = Function::new(f.name.clone());
    let front = crate::autodiff::needed(joint, &|p| f.find_result(&p.name).is_some());
    let mut whole = Function::new(joint.name.clone());
    let mut map: Vec<crate::ir::Value> = vec![];
    for (p, ty) in joint.params.iter().zip(&joint.types) {
        map.push(whole.param(p.name.clone(), p.binding, ty.clone()));
    }
    map.resize(joint.types.len(), crate::ir::Value(0));
    for part in [true, false] {
        for (node, _) in joint.nodes.iter().zip(&front).filter(|(_, first)| **first == part) {
            let inputs = node.inputs.iter().map(|v| map[v.index()]).collect();
            let first =
                whole.push(node.op.clone(), inputs, node.results().map(|r| joint.ty(r).clone()).collect());
            for (k, r) in node.results().enumerate() {
                map[r.index()] = crate::ir::Value(first.0 + k as u32);
            }
        }
        if part {
            // The forward function has all parameters that are not cotangents, so that both number
            // them alike.
            let own = |p: &Port| f.find_param(&p.name).is_some() || p.binding == Binding::Prepared;
            let kept = joint.params.iter().take_while(|p| own(p)).count();
            let shift = joint.params.len() - kept;
            forward.params = joint.params[..kept].to_vec();
            forward.types = [&whole.types[..kept], &whole.types[joint.params.len()..]].concat();
            let number = |v: crate::ir::Value| {
                if v.index() < kept { v } else { crate::ir::Value(v.0 - shift as u32) }
            };
            forward.nodes = whole
                .nodes
                .iter()
                .map(|n| crate::ir::Node {
                    op: n.op.clone(),
                    inputs: n.inputs.iter().map(|&v| number(v)).collect(),
                    first: number(n.first),
                    count: n.count,
                })
                .collect();
            forward.results = joint
                .results
                .iter()
                .filter(|(p, _)| f.find_result(&p.name).is_some())
                .map(|(n, v)| (n.clone(), number(map[v.index()])))
                .collect();
        }
    }
    whole.results = joint.results.iter().map(|(n, v)| (n.clone(), map[v.index()])).collect();
    (whole, forward)
}

/// The function that a rule leads to, priced or not, with all that fired before it; and whether it
/// fired. For tests.
#[cfg(test)]
fn rewrite_eagerly(
    module: &mut Module,
    f: &Function,
    context: &Context,
    rewriting: &Rewriting,
    rule: &str,
) -> Result<(Function, bool), CompileError> {
    let explored = explore(module, f, context, rewriting)?;
    let extractor = Extractor::new(&explored.graph, explored.root, rewriting.target, context);
    let mut now = extractor.original(&explored.order);
    for m in explored.moves(&extractor) {
        let before = now.clone();
        m.iter().for_each(|&(class, node)| now[class] = node);
        if extractor.live(&now).is_none() {
            now = before;
        }
    }
    let g = explored.extract(f, &extractor, &now)?;
    module.dims = explored.graph.analysis.module.dims.clone();
    verify_function(module, &g).map_err(|e| CompileError::Rewrite(e.to_string()))?;
    Ok((g, explored.fired.iter().any(|f| f.rule.name == rule)))
}

/// Predicted time of what the search finds, and of the best there is. For tests.
#[cfg(test)]
fn against_exact(
    module: &mut Module,
    f: &Function,
    context: &Context,
    rewriting: &Rewriting,
) -> Option<(f64, f64)> {
    let explored = explore(module, f, context, rewriting).ok()?;
    let extractor = Extractor::new(&explored.graph, explored.root, rewriting.target, context);
    let original = extractor.original(&explored.order);
    let found = extractor.search(&original, &explored.moves(&extractor));
    let best = extractor.exact(&original, 1 << 14)?;
    Some((extractor.price(&found)?.seconds, extractor.price(&best)?.seconds))
}
