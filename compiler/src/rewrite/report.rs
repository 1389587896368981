//! The report of rewriting: which rule fired where, what each saved, and why it stopped.

use super::Stage;
use super::extract::{Extractor, Selection};
use super::language::Graph;
use super::price::{Standing, Total};
use crate::ir::{Extents, Function, Module, cost};
use crate::op::{Class, Moved};
use egg::{Id, StopReason};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use std::fmt;

/// The fate of all functions of a model, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// One entry for each function and stage.
    pub functions: Vec<Rewritten>,
}

/// The fate of one function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rewritten {
    /// Its name.
    pub function: String,
    /// Where in the pipeline.
    pub stage: String,
    /// Firings, in order.
    pub firings: Vec<Firing>,
    /// Why no more rules were tried.
    pub stopped: String,
    /// E-nodes in the end.
    pub nodes: usize,
    /// Work of one call before.
    pub before: Work,
    /// Work of one call after; what is prepared once is in it where the function computes it.
    pub after: Work,
    /// Time taken, in microseconds.
    pub micros: u64,
}

/// One firing of a rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Firing {
    /// The rule.
    pub rule: String,
    /// The nodes it found an equal for, as printed.
    pub sites: Vec<String>,
    /// Whether the result was chosen; otherwise the original was cheaper, or another rule's result.
    pub used: bool,
    /// The predicted saving of one call, beyond that of the firings before it.
    pub saved: Saving,
    /// egg's explanation of the equality, where proofs are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
}

/// A predicted saving of one call. Work that is prepared once counts as its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Saving {
    /// Microseconds on the target.
    pub micros: f64,
    /// Multiplies and adds of products.
    pub flops: f64,
    /// Bytes moved.
    pub bytes: f64,
    /// Launches.
    pub launches: f64,
}

/// Work of one call by the cost of its nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Work {
    /// Multiplies and adds of products.
    pub flops: u128,
    /// Element-wise operations.
    pub elementwise: u128,
    /// Bytes that the nodes would move, each alone.
    pub bytes: u128,
    /// Nodes.
    pub nodes: usize,
}

impl Work {
    /// Of a function; what exceeds the range counts as the most there is.
    pub fn of(module: &Module, f: &Function) -> Work {
        let total = cost::total(module, f, |_| Extents::default());
        let nodes = f.nodes.len();
        match total {
            Ok(c) => Work {
                flops: c.flops,
                elementwise: c.elementwise,
                bytes: c.read.saturating_add(c.written),
                nodes,
            },
            Err(_) => Work { flops: u128::MAX, elementwise: u128::MAX, bytes: u128::MAX, nodes },
        }
    }
}

impl Report {
    /// Names of the rules that were used, with how often.
    pub fn used(&self) -> Vec<(String, usize)> {
        let mut counts: indexmap::IndexMap<String, usize> = Default::default();
        for firing in self.functions.iter().flat_map(|f| &f.firings).filter(|f| f.used) {
            *counts.entry(firing.rule.clone()).or_default() += 1;
        }
        counts.into_iter().collect()
    }

    /// Microseconds of all functions.
    pub fn micros(&self) -> u64 {
        self.functions.iter().map(|f| f.micros).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for r in &self.functions {
            writeln!(
                f,
                "{} ({}): {} → {} nodes; {}",
                r.function, r.stage, r.before.nodes, r.after.nodes, r.stopped
            )?;
            let idle: Vec<&str> = r.firings.iter().filter(|f| !f.used).map(|f| f.rule.as_str()).collect();
            for firing in r.firings.iter().filter(|f| f.used) {
                let s = &firing.saved;
                let (flops, bytes) = (scaled(s.flops), scaled(s.bytes));
                let saves = format!("{flops}FLOPs, {bytes}B, {:.1} launches, {:.1} µs", s.launches, s.micros);
                writeln!(f, "  {:16} saves {saves} a call", firing.rule)?;
                for site in &firing.sites {
                    writeln!(f, "    {site}")?;
                }
                for line in firing.proof.iter().flat_map(|p| p.lines()) {
                    writeln!(f, "      | {line}")?;
                }
            }
            if !idle.is_empty() {
                let mut counts: indexmap::IndexMap<&str, usize> = Default::default();
                idle.iter().for_each(|rule| *counts.entry(rule).or_default() += 1);
                let list: Vec<String> = counts.iter().map(|(rule, n)| format!("{rule} ({n})")).collect();
                writeln!(f, "  found, but not worth it here: {}", list.join(", "))?;
            }
        }
        Ok(())
    }
}

/// A number with the letter of its thousands.
pub fn scaled(x: f64) -> String {
    let (x, unit) = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
        .iter()
        .find(|(size, _)| x.abs() >= *size)
        .map_or((x, ""), |(size, unit)| (x / size, *unit));
    if unit.is_empty() && x.fract() == 0.0 { format!("{x} ") } else { format!("{x:.1} {unit}") }
}

/// egg's reason in words.
pub(super) fn stopped(reason: Option<&StopReason>) -> String {
    match reason {
        Some(StopReason::Saturated) => "no rule finds anything new".into(),
        Some(StopReason::IterationLimit(n)) => format!("limit of {n} iterations"),
        Some(StopReason::NodeLimit(n)) => format!("limit of {n} e-nodes"),
        Some(StopReason::TimeLimit(t)) => format!("limit of {t} seconds"),
        Some(StopReason::Other(what)) => what.clone(),
        None => "it did not run".into(),
    }
}

/// For each firing whether its result was chosen, and what that saves: the step in price when the
/// firings chosen are taken one after another, so that savings add up.
pub(super) fn used(
    extractor: &Extractor,
    original: &Selection,
    chosen: &Selection,
    fired: &[super::Fired],
    moves: &[Vec<(usize, usize)>],
) -> Vec<(bool, Saving)> {
    let live: FxHashSet<usize> = extractor.live(chosen).unwrap_or_default().into_iter().collect();
    let mut now = Standing::new(extractor, original.clone());
    // Firings that turn in a circle until a later one is taken, too.
    let mut waiting = vec![];
    let step = |(fired, to): (&super::Fired, &Vec<(usize, usize)>)| {
        if !to.iter().any(|&(class, node)| chosen[class] == node && live.contains(&class)) {
            return (false, Saving::default());
        }
        if to.iter().all(|&(class, node)| original[class] == node) {
            // Both are one class now: what is saved is the e-node that is not there any more.
            let gone = fired.pairs.iter().map(|&(old, _)| extractor.alone(old));
            return (true, gone.fold(Saving::default(), more));
        }
        waiting.extend(to.iter().filter(|&&(class, node)| chosen[class] == node));
        let change = now.as_mut().and_then(|now| now.step(&waiting));
        if change.is_some() {
            waiting.clear();
        }
        (true, change.map_or(Saving::default(), saved))
    };
    fired.iter().zip(moves).map(step).collect()
}

fn saved(change: Total) -> Saving {
    Saving {
        micros: (0.0 - change.seconds) * 1e6,
        flops: 0.0 - change.flops,
        bytes: 0.0 - change.bytes,
        launches: 0.0 - change.launches,
    }
}

fn more(a: Saving, b: Total) -> Saving {
    Saving {
        micros: a.micros + b.seconds * 1e6,
        flops: a.flops + b.flops,
        bytes: a.bytes + b.bytes,
        launches: a.launches + b.launches,
    }
}

/// A firing of the sharing that conversion does, where there is any.
pub(super) fn sharing(module: &Module, f: &Function, shared: &[usize]) -> Vec<Firing> {
    let worth = |n: &&usize| {
        !matches!(f.nodes[**n].op.class(), Class::Number(_) | Class::View { moved: Moved::Reshaped(_), .. })
    };
    let nodes: Vec<&usize> = shared.iter().filter(worth).collect();
    if nodes.is_empty() {
        return vec![];
    }
    let mut saved = Saving::default();
    for &&n in &nodes {
        let node = &f.nodes[n];
        let operands: Vec<_> = node.inputs.iter().map(|&v| f.ty(v)).collect();
        let results: Vec<_> = node.results().map(|v| f.ty(v)).collect();
        if let Ok(c) = cost::cost(module, &node.op, &operands, &results, &Extents::default()) {
            saved.flops += c.flops as f64;
            saved.bytes += (c.read + c.written) as f64;
        }
    }
    let sites = nodes.iter().map(|&&n| module.show_node(f, &f.nodes[n])).collect();
    vec![Firing { rule: super::rules::SHARE.into(), sites, used: true, saved, proof: None }]
}

/// The original node of each class: the last of those whose values it holds, and the one with
/// several results whose tuple it is.
pub(super) struct Sites<'f> {
    module: &'f Module,
    function: &'f Function,
    last: FxHashMap<Id, usize>,
    tuples: FxHashMap<Id, usize>,
}

impl<'f> Sites<'f> {
    /// Of a function whose values stand in the classes `values`.
    pub(super) fn new(module: &'f Module, function: &'f Function, graph: &Graph, values: &[Id]) -> Self {
        let (mut last, mut tuples) = (FxHashMap::default(), FxHashMap::default());
        for (id, node) in values.iter().zip(function.definitions()) {
            let Some(node) = node else { continue };
            // The last value of a class is the one that was computed from the others.
            last.insert(graph.find(*id), node);
            if let super::language::Term::Result(_, x) = graph.id_to_node(*id) {
                tuples.entry(graph.find(*x)).or_insert(node);
            }
        }
        Sites { module, function, last, tuples }
    }

    /// The original nodes that a firing found an equal for; a firing on what another made has none.
    pub(super) fn of(&self, graph: &Graph, pairs: &[(Id, Id)]) -> Vec<String> {
        let classes = pairs.iter().map(|(old, _)| graph.find(*old));
        let mut found: Vec<usize> =
            classes.flat_map(|c| [self.last.get(&c), self.tuples.get(&c)]).flatten().copied().collect();
        found.sort();
        found.dedup();
        found.into_iter().map(|n| self.module.show_node(self.function, &self.function.nodes[n])).collect()
    }
}

/// Explains each used firing.
pub(super) fn prove(graph: &mut Graph, pairs: &[Vec<(Id, Id)>], firings: &mut [Firing]) {
    let offset = firings.len() - pairs.len();
    for (pairs, firing) in pairs.iter().zip(&mut firings[offset..]) {
        let Some(&(old, new)) = pairs.first() else { continue };
        firing.proof = Some(graph.explain_id_equivalence(old, new).get_string_with_let());
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Differentiable => "before differentiation",
            Stage::Final => "with its derivative",
            Stage::Inference => "inference",
        })
    }
}
