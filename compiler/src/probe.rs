//! Values inside a model, by name: left for the host, or taken from it.
//!
//! *In*: a lowered model, and patterns of names. *Out*: its functions with the values that are
//! looked at among their results, and in the place of those that may be changed what the host
//! gives, where it gives something; and [`Probed`], which says where each is. *Promise*: nothing is
//! known here of any component: a name is one that lowering gave a value ([`Builder::point`]), and
//! the program is compiled with these results and parameters as with any other, so that nothing
//! that is looked at is fused away. A value that the host leaves as it is keeps its bits.
//!
//! Names are `layers.{set}.{component}.{value}`, with `@{n}` after the set where it is applied more
//! than once; `layers.{set}.in` and `layers.{set}.out` are the stream; `embed.out`, `head.stream`,
//! `head.in`, `head.norm` and `head.logits` are outside the layers.

use crate::CompileError;
use crate::architecture::{Architecture, Work, for_each_application};
use crate::assemble::Assembly;
use crate::build::Builder;
use crate::ir::{Binary, Binding, DType, Function, Module, Port, Type, Value};
use crate::lower::{EMBED, HEAD, Lowered, Shape, lower, lower_evaluation};
use crate::memory::Slot;
use crate::pipeline::Options;
use crate::program::BufferId;
use dreamc_dsl::spec::Model;
use indexmap::{IndexMap, IndexSet};

/// Patterns of the values that are looked at and changed. In a pattern `*` stands for any letters,
/// and a set of weights without `@` for all of its applications.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// Values that are left for the host.
    pub captured: Vec<String>,
    /// Values that the host may change.
    pub patched: Vec<String>,
}

impl Probe {
    /// Whether it asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.captured.is_empty() && self.patched.is_empty()
    }

    /// Whether probabilities of attentions are made, which no attention keeps: where a pattern says
    /// so, or nearly, and for no `*` alone.
    pub(crate) fn scores(&self) -> bool {
        makes_scores(self.captured.iter().chain(&self.patched))
    }
}

/// Whether some pattern names probabilities of attentions.
pub(crate) fn makes_scores<'p>(mut patterns: impl Iterator<Item = &'p String>) -> bool {
    patterns.any(|pattern| pattern.contains(&SCORES[..3]))
}

/// The name of probabilities.
const SCORES: &str = "scores";

/// A value inside a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Its name.
    pub name: String,
    /// Names of its dimensions.
    pub dims: Vec<String>,
    /// Their sizes.
    pub shape: Vec<u64>,
    /// Its type.
    pub dtype: DType,
    /// The application it is of: layers applied before it. None outside the layers.
    pub depth: Option<u64>,
}

/// A value that a program leaves for the host or takes from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    /// Which.
    pub point: Point,
    /// Where the program leaves it, where it is looked at.
    pub value: Option<BufferId>,
    /// Where the host gives another, where it may.
    pub patch: Option<Patch>,
    /// Which instance of these buffers.
    pub instance: u64,
}

/// The place of what a host gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// The values.
    pub values: BufferId,
    /// As many numbers: 1 where the value is that of the host, 0 where it is the model's.
    pub given: BufferId,
}

/// A point, where it is in the functions, and what was made there.
pub(crate) struct Inserted {
    point: Point,
    port: String,
    captured: bool,
    patched: bool,
}

/// A point and its place: a function, and which of its points.
pub(crate) struct Placed {
    pub(crate) point: Point,
    pub(crate) function: String,
    pub(crate) number: usize,
}

/// Everything that can be looked at in a model, in the order of the text.
pub fn points(model: &Model, options: &Options) -> Result<Vec<Point>, CompileError> {
    let architecture = Architecture::new(model, options.depth)?;
    let (batch, sequence, segments, exit) = (options.batch, options.sequence, options.segments, options.exit);
    let shape = Shape { batch, sequence, segments, exit, scores: true, ..Shape::default() };
    let lowered = match architecture.evaluates_anew() && !options.as_trained {
        true => lower_evaluation(&architecture, shape)?,
        false => lower(&architecture, shape)?,
    };
    Ok(placed(&architecture, &lowered).into_iter().map(|placed| placed.point).collect())
}

/// Whether a pattern means a name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let is_scores = |segment: &str| segment == SCORES;
    if name.split('.').any(is_scores) && !pattern.contains(SCORES) {
        return false;
    }
    if pattern.contains('@') {
        return fits(pattern, name);
    }
    let plain: Vec<&str> =
        name.split('.').map(|segment| segment.split_once('@').map_or(segment, |(set, _)| set)).collect();
    fits(pattern, &plain.join("."))
}

/// The same letter by letter.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    // The first place of each part leaves the most for the others.
    let mut rest = rest;
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The points of a lowered model with their applications.
pub(crate) fn placed(architecture: &Architecture, lowered: &Lowered) -> Vec<Placed> {
    let mut all = vec![];
    let mut of = |function: &str, prefix: &str, depth: Option<u64>| {
        let (Some(f), Some(marks)) =
            (lowered.module.functions.get(function), lowered.facts.marks.get(function))
        else {
            return;
        };
        for (number, (name, value)) in marks.points.iter().enumerate() {
            let Type { dtype, dims } = f.ty(*value).clone();
            // Values of tokens: others are weights and what is made of them alone.
            if dims.len() < 2 || lowered.module.name(dims[0]) != "batch" {
                continue;
            }
            let shape = dims.iter().map(|&dim| lowered.module.size(dim)).collect();
            let dims = dims.iter().map(|&dim| short(lowered.module.name(dim)).to_string()).collect();
            let name = format!("{prefix}.{name}");
            let point = Point { name, dims, shape, dtype, depth };
            all.push(Placed { point, function: function.into(), number });
        }
    };
    of(EMBED, "embed", None);
    let mut applied: IndexMap<usize, Vec<(usize, u64)>> = IndexMap::new();
    for_each_application(&architecture.blocks, architecture.variables, &mut |apply, variables| {
        if matches!(architecture.bodies[apply.body].work, Work::Layer(_)) {
            let set = (architecture.leader(apply.body), apply.set.at(variables));
            let set = architecture.sets.iter().position(|s| *s == set).unwrap_or_default();
            applied.entry(set).or_default().push((apply.body, apply.depth.at(variables)));
        }
    });
    let mut applications: Vec<(usize, String, u64)> = vec![];
    for (set, times) in &applied {
        for (n, &(body, depth)) in times.iter().enumerate() {
            let at = if times.len() > 1 { format!("@{n}") } else { String::new() };
            applications.push((body, format!("layers.{set}{at}"), depth));
        }
    }
    applications.sort_by_key(|(_, _, depth)| *depth);
    for (body, prefix, depth) in &applications {
        of(&architecture.bodies[*body].name, prefix, Some(*depth));
    }
    of(HEAD, "head", None);
    all
}

/// The last word of a dimension's name.
fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Which points patterns mean; each must mean one.
pub(crate) fn chosen(placed: &[Placed], patterns: &[String]) -> Result<Vec<bool>, CompileError> {
    let mut chosen = vec![false; placed.len()];
    for pattern in patterns {
        let mut found = false;
        for (chosen, placed) in chosen.iter_mut().zip(placed) {
            let means = matches(pattern, &placed.point.name);
            *chosen |= means;
            found |= means;
        }
        if !found {
            let nearest = nearest(pattern, placed.iter().map(|placed| placed.point.name.as_str()));
            return Err(CompileError::Point { name: pattern.clone(), nearest });
        }
    }
    Ok(chosen)
}

/// The names that a wrong one is nearest to, as a sentence.
pub fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> String {
    let mut all: Vec<(usize, &str)> = names.map(|known| (distance(name, known), known)).collect();
    all.sort();
    match all[..] {
        [] => "there is nothing to look at".into(),
        [(_, one)] => format!("there is `{one}`"),
        [(_, one), (_, two)] => format!("nearest are `{one}` and `{two}`"),
        [(_, one), (_, two), (_, three), ..] => format!("nearest are `{one}`, `{two}` and `{three}`"),
    }
}

/// Letters to be put in, taken out or replaced.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Makes the values of a probe results and parameters of a model's functions.
pub(crate) fn insert(
    architecture: &Architecture,
    lowered: &mut Lowered,
    probe: &Probe,
) -> Result<Vec<Inserted>, CompileError> {
    if probe.is_empty() {
        return Ok(vec![]);
    }
    let placed = placed(architecture, lowered);
    let (captured, patched) = (chosen(&placed, &probe.captured)?, chosen(&placed, &probe.patched)?);
    let mut functions: IndexMap<String, [IndexSet<usize>; 2]> = IndexMap::new();
    let mut inserted = vec![];
    for ((placed, captured), patched) in placed.into_iter().zip(captured).zip(patched) {
        if patched {
            changeable(&placed.point)?;
        }
        let Placed { point, function, number } = placed;
        let port = format!("{function}.{number}");
        let wanted = functions.entry(function).or_default();
        for (wanted, asked) in wanted.iter_mut().zip([captured, patched]) {
            wanted.extend(asked.then_some(number));
        }
        if captured || patched {
            inserted.push(Inserted { point, port, captured, patched });
        }
    }
    for (name, wanted) in functions {
        let f = lowered.module.functions[&name].clone();
        let points = lowered.facts.marks.get(&name).map_or(&[][..], |marks| &marks.points);
        let changed = changed(&mut lowered.module, &f, points, &wanted)?;
        lowered.module.functions.insert(name, changed);
    }
    Ok(inserted)
}

/// Refuses to change what follows from a decision, and what is made only to be looked at.
fn changeable(point: &Point) -> Result<(), CompileError> {
    let name = || point.name.clone();
    if point.dtype == DType::I32 {
        let reason = "it is a choice, by which tokens are moved already; change `gates`";
        return Err(CompileError::Fixed { name: name(), reason });
    }
    if point.name.split('.').any(|segment| segment == SCORES) {
        let reason = "no attention reads probabilities that it has not made; change `q`, `k`, `v` or `heads`";
        return Err(CompileError::Fixed { name: name(), reason });
    }
    Ok(())
}

/// A function that returns some of its points, and in the place of others reads what it is given.
fn changed(
    module: &mut Module,
    f: &Function,
    points: &[(String, Value)],
    [captured, patched]: &[IndexSet<usize>; 2],
) -> Result<Function, CompileError> {
    let mut b = Builder::new(module, &f.name);
    let mut values: Vec<Value> = vec![];
    // Of a value that has two names each may be changed; the later name has the last word.
    let of = |v: Value| patched.iter().copied().filter(move |&number| points[number].1 == v);
    let instead = |b: &mut Builder, own: Value, number: usize| {
        let ty = b.ty(own).clone();
        let value = b.param(&format!("patch.{}.{number}", f.name), Binding::Patched, ty.clone());
        let given = b.param(&format!("given.{}.{number}", f.name), Binding::Patched, ty);
        let one = b.constant(1.0);
        let kept = b.sub(one, given);
        let kept = b.op(Binary::Where, &[own, kept]);
        let value = b.op(Binary::Where, &[value, given]);
        b.add(kept, value)
    };
    for (i, port) in f.params.iter().enumerate() {
        values.push(b.param(&port.name, port.binding, f.types[i].clone()));
    }
    for (i, value) in values.iter_mut().enumerate() {
        for number in of(Value(i as u32)) {
            *value = instead(&mut b, *value, number);
        }
    }
    for node in &f.nodes {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| values[v.index()]).collect();
        let made = b.ops(node.op.clone(), &inputs);
        for (mut value, old) in made.into_iter().zip(node.results()) {
            for number in of(old) {
                value = instead(&mut b, value, number);
            }
            values.push(value);
        }
    }
    for (port, v) in &f.results {
        b.result(port.clone(), values[v.index()]);
    }
    for &number in captured {
        let port = Port::new(format!("probe.{}.{number}", f.name), Binding::Observed);
        b.result(port, values[points[number].1.index()]);
    }
    Ok(b.finish()?)
}

impl Assembly<'_> {
    /// The buffers of the values that this use looks at or changes.
    pub(crate) fn probed(&self) -> Vec<Probed> {
        let of = |inserted: &Inserted| {
            let patch = |word: &str| self.bound(Slot::Patched(format!("{word}.{}", inserted.port)));
            let value = self.bound(Slot::Observed(format!("probe.{}", inserted.port)));
            let patch = match (patch("patch"), patch("given")) {
                (Some(values), Some(given)) if inserted.patched => Some(Patch { values, given }),
                _ => None,
            };
            let instance = inserted.point.depth.unwrap_or(0);
            let value = value.filter(|_| inserted.captured);
            Probed { point: inserted.point.clone(), value, patch, instance }
        };
        self.now.inserted.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_names() {
        for (pattern, name, means) in [
            ("layers.3.sa.q", "layers.3.sa.q", true),
            ("layers.3.sa.q", "layers.13.sa.q", false),
            ("layers.*.out", "layers.3.out", true),
            ("*.out", "layers.3.sa.out", true),
            ("layers.3", "layers.3.out", false),
            ("layers.3.out", "layers.3@2.out", true),
            ("layers.3@2.out", "layers.3@2.out", true),
            ("layers.3@1.out", "layers.3@2.out", false),
            ("layers.3@*.out", "layers.3.out", false),
            ("*", "layers.3.sa.scores", false),
            ("*scores", "layers.3.sa.scores", true),
            ("*.scores*", "layers.3.sa.scores.2", true),
            ("*a*a*", "aa", true),
            ("*a*a*a", "aa", false),
            ("", "aa", false),
        ] {
            assert_eq!(matches(pattern, name), means, "{pattern} {name}");
        }
    }

    #[test]
    fn a_wrong_name_has_near_ones() {
        let names = ["layers.0.sa.q", "layers.0.sa.k", "embed.out", "layers.0.sa.scores"];
        let said = nearest("layers.0.sa.score", names.into_iter());
        assert!(said.starts_with("nearest are `layers.0.sa.scores`, "), "{said}");
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
