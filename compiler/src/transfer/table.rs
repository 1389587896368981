//! The factors of every weight as people read them, each with its reason.

use super::place::Use;
use super::{Compared, Fan, Growth, Place, Seen, Share, begins, rule, weights};
use crate::CompileError;
use crate::architecture::Architecture;
use crate::bind::Owner;
use crate::compiled::Init;
use crate::lower::{Lowered, Shape, Weight, lower};
use crate::optim::optimizer;
use crate::recipe::recipe;
use dreamc_dsl::spec::{Component, Item, Stream, Transfer, TransferRule};
use dreamc_dsl::{Diagnostic, Spec};
use indexmap::IndexMap;
use serde::Serialize;

/// All factors of a specification.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// The rule's word.
    pub rule: &'static str,
    /// The model's hidden size here over that of the base.
    pub width: f64,
    /// Layer applications over those of the base.
    pub depth: f64,
    /// Passes of the loop over those of the base.
    pub passes: f64,
    /// Training tokens over those of the base.
    pub tokens: f64,
    /// The rate of the recipe, which factors multiply.
    pub learning_rate: f64,
    /// A line for each weight of a body, and for each outside.
    pub lines: Vec<Line>,
    /// Multipliers in the model.
    pub multipliers: Vec<Multiplier>,
    /// Where no rule is known.
    pub warnings: Vec<Warning>,
}

/// The factors of a weight.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// The tensor, of the first set of weights of its body.
    pub weight: String,
    /// Sets of weights that have one.
    pub sets: u64,
    /// Its role: `input`, `hidden`, `output`, `fixed`, `gain`, `bias`, `filter`.
    pub role: &'static str,
    /// Numbers that a sum of it is of: here, and at the base.
    pub fan_in: [u64; 2],
    /// Such sums: here, and at the base.
    pub fan_out: [u64; 2],
    /// The law that moves it; none where it is frozen.
    pub optimizer: Option<&'static str>,
    /// Deviation of its first values, of a weight that begins at random.
    pub deviation: Option<f64>,
    /// That over the default's.
    pub init: f64,
    /// Factor on the rate.
    pub rate: f64,
    /// Factor on the weight decay, whose product with the rate stays.
    pub decay: f64,
    /// Factor on AdamW's ε.
    pub eps: f64,
    /// How these follow.
    pub reason: String,
}

/// A multiplier that is a key of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Multiplier {
    /// The field.
    pub field: String,
    /// Its value here, and at the base.
    pub value: [f64; 2],
    /// How it follows.
    pub reason: String,
}

/// A weight or a component for which no rule is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warning {
    /// Its name.
    pub weight: String,
    /// The field of the specification that it is about, for its token.
    #[serde(skip)]
    pub field: String,
    /// Why.
    pub message: String,
}

/// The factors of a specification; all are 1 without a rule.
pub fn table(spec: &Spec) -> Result<Table, CompileError> {
    let a = Architecture::new(&spec.model, None)?;
    let own = Transfer {
        rule: TransferRule::Standard,
        width: a.model.hidden,
        depth: a.depth,
        passes: None,
        tokens: None,
        sizes: IndexMap::new(),
    };
    let transfer = spec.train.transfer.as_ref().unwrap_or(&own);
    let lowered = lower(&a, Shape::default())?;
    let compared = Compared::new(spec, transfer, &a, &lowered)?;
    let growth = compared.growth;
    let grows = growing(spec, &compared, &lowered)?;
    let mut table = Table {
        rule: transfer.rule.word(),
        width: growth.width,
        depth: growth.depth,
        passes: growth.passes,
        tokens: growth.tokens,
        learning_rate: spec.train.learning_rate,
        lines: vec![],
        multipliers: multipliers(spec, transfer),
        warnings: warnings(spec, transfer, &a, &lowered, &compared)?,
    };
    for (body, w) in weights(&lowered) {
        let (seen, base) = compared.seen(spec, &a, &lowered, body, w)?;
        let share = rule(transfer.rule).share(&seen, growth);
        let prefix = body.and_then(|b| a.prefixes().find(|(_, (of, _))| *of == b)).map(|(prefix, _)| prefix);
        let name = prefix.map_or(w.name.clone(), |prefix| format!("{prefix}.{}", w.name));
        if let (Use::Unknown(op), false) = (&seen.of, transfer.rule == TransferRule::Standard) {
            let message = format!("no rule is known of a weight that `{op}` reads: it has no factor");
            let field = field(&a, w);
            table.warnings.push(Warning { weight: name.clone(), field, message });
        }
        if let Err(op) = compared.reads(spec, &a, &lowered, body, w) {
            let message = format!(
                "no number is known that brings what it reads of `{op}` to a deviation of 1: it has none"
            );
            table.warnings.push(Warning { weight: name.clone(), field: field(&a, w), message });
        }
        let init = begins(w.init, (base, seen.place), w, a.model.norm.unit_offset, share);
        let shape: Vec<u64> = w.dims.iter().map(|&d| lowered.module.size(d)).collect();
        let moved = recipe((&spec.train, spec.model.adapt.is_some()), &name, w, &shape);
        let role = role(&seen, &grows, w, &lowered);
        let based = transfer.rule != TransferRule::Umup;
        let fan = |fan: Fan| [fan.here, if based { fan.base } else { fan.here }].map(|size| size as u64);
        table.lines.push(Line {
            sets: body.map_or(1, |b| a.bodies[b].sets),
            role,
            fan_in: fan(seen.fan_in),
            fan_out: fan(seen.fan_out),
            optimizer: moved.map(|rule| optimizer(&spec.train, &rule).name()),
            deviation: match init {
                Init::Normal(deviation) => Some(deviation),
                Init::Constant(_)
                | Init::Identity { .. }
                | Init::Pick { .. }
                | Init::Uniform(..)
                | Init::Ramp(..)
                | Init::LogUniform(..)
                | Init::InverseSoftplusUniform(..) => None,
            },
            init: match (init, w.init) {
                (Init::Normal(now), Init::Normal(default)) => now / default,
                (Init::Constant(now), Init::Constant(default)) if default != 0.0 => now / default,
                (Init::Uniform(_, now), Init::Uniform(_, default)) if default != 0.0 => now / default,
                _ => 1.0,
            },
            rate: share.rate,
            decay: 1.0 / share.rate,
            eps: share.eps,
            reason: reason(transfer.rule, &seen, growth, role, share),
            weight: name,
        });
    }
    Ok(table)
}

/// Names of the dimensions that grow: those that differ from the base, and at the base itself those
/// that a model of twice the width would have larger.
fn growing(spec: &Spec, compared: &Compared, here: &Lowered) -> Result<Vec<String>, CompileError> {
    let differ = |other: &Lowered| -> Vec<String> {
        let dims = here.module.dims.iter();
        let dims = dims.filter(|(name, size)| other.module.dims.get(*name).is_some_and(|own| own != *size));
        dims.map(|(name, _)| name.clone()).collect()
    };
    let found = differ(&compared.lowered);
    if !found.is_empty() {
        return Ok(found);
    }
    // A definition whose arithmetic does not fit twice the width says nothing of its own.
    let wide = super::twice(&spec.model);
    Ok(wide.map_or_else(|| vec!["hidden".into()], |(_, wide)| differ(&wide)))
}

fn role(seen: &Seen, grows: &[String], w: &Weight, lowered: &Lowered) -> &'static str {
    let any =
        |dims: &[crate::ir::Dim]| dims.iter().any(|d| grows.iter().any(|g| g == lowered.module.name(*d)));
    match &seen.of {
        Use::Lookup { .. } => "input",
        Use::Product { over, each, .. } => match (any(over), any(each)) {
            (true, true) => "hidden",
            (true, false) => "output",
            (false, true) => "input",
            (false, false) => "fixed",
        },
        Use::Factor if w.dims.iter().all(|d| lowered.module.size(*d) == 1) => "scale",
        Use::Factor => "gain",
        Use::Term => "bias",
        Use::Taps => "filter",
        Use::Unknown(_) | Use::Unread => "unknown",
    }
}

fn reason(rule: TransferRule, seen: &Seen, growth: Growth, role: &str, share: Share) -> String {
    if rule == TransferRule::Standard {
        return "one rate for all".into();
    }
    let mut parts = vec![];
    if rule == TransferRule::Umup {
        return of_units(seen, growth, role);
    }
    let (m, n) = (seen.fan_in.ratio(), seen.fan_out.ratio());
    let times = |x: f64| format!("×{}", (x * 1000.0).round() / 1000.0);
    parts.push(match (&seen.of, seen.whole.is_some()) {
        (Use::Unknown(_) | Use::Unread, _) => "no rule is known".into(),
        (_, true) if rule == TransferRule::Hyperp => "an angle on its sphere".to_string(),
        (Use::Product { .. }, true) => format!("orthogonal steps: fan in {}, fan out {}", times(m), times(n)),
        (Use::Product { normed: true, .. }, _) => format!("a norm follows; fan in {}", times(m)),
        (Use::Product { .. }, _) if role == "output" => format!("to a size that stays; fan in {}", times(m)),
        (Use::Product { .. }, _) => format!("fan in {}", times(m)),
        (Use::Lookup { .. }, _) => "a row is looked up".into(),
        (Use::Factor | Use::Term | Use::Taps, _) => "one number for each of a width".into(),
    });
    let deep = matches!(rule, TransferRule::Mup | TransferRule::Completep) || rule == TransferRule::Hyperp;
    match seen.place {
        Place::Stream => {}
        Place::Branch | Place::End if !deep => {}
        Place::Branch | Place::End if seen.averaged => {
            parts.push(format!("in a mean of sources: layers {}", times(growth.layers)));
        }
        Place::Branch | Place::End => {
            let what = if seen.place == Place::End { "ends a branch" } else { "in a branch" };
            let passes = if seen.looped && growth.passes != 1.0 {
                format!(", passes {}", times(growth.passes))
            } else {
                String::new()
            };
            parts.push(format!("{what}: layers {}{passes}", times(growth.layers)));
        }
    }
    if growth.tokens != 1.0 {
        parts.push(format!("tokens {}", times(growth.tokens)));
    }
    if share.eps != 1.0 {
        parts.push("ε by the size of gradients".into());
    }
    parts.join("; ")
}

/// The reason of factors by the sizes themselves.
fn of_units(seen: &Seen, growth: Growth, role: &str) -> String {
    let number = |x: f64| (x * 1000.0).round() / 1000.0;
    let mut parts = vec![match &seen.of {
        Use::Unknown(_) | Use::Unread | Use::Taps => "no rule is known".into(),
        Use::Product { .. } if role == "output" => {
            format!("to a size that stays; fan in {}", seen.fan_in.here)
        }
        Use::Product { .. } => format!("fan in {}", seen.fan_in.here),
        Use::Lookup { .. } => format!("a row of {} is looked up", seen.fan_out.here),
        Use::Factor | Use::Term => "one number for each of a width".into(),
    }];
    if let Some(unit) = seen.reads.filter(|unit| *unit != 1.0) {
        parts.push(format!("what it reads is brought to 1 by {}", number(unit)));
    }
    if seen.place != Place::Stream {
        let what = if seen.place == Place::End { "ends a branch" } else { "in a branch" };
        parts.push(format!("{what}: {} layers", number(growth.layers)));
    }
    parts.join("; ")
}

fn multipliers(spec: &Spec, transfer: &Transfer) -> Vec<Multiplier> {
    let all = transfer.multipliers(&spec.model).into_iter();
    let line = |m: dreamc_dsl::spec::Multiplier| Multiplier {
        value: [m.here, m.base],
        reason: if m.here == m.base { "as at the base".into() } else { m.reason().into() },
        field: m.field,
    };
    all.map(line).collect()
}

/// The field that a weight's component is written in.
fn field(a: &Architecture, w: &Weight) -> String {
    let Owner::Component(number) = w.owner else { return "train.transfer".into() };
    component(a.model.components.get_index(number as usize).map_or("", |(name, _)| name))
}

/// The field of a component, of one that a definition applies that of the definition.
fn component(name: &str) -> String {
    format!("model.components.{}", name.split('.').next().unwrap_or(name))
}

/// Parts of the model about which the rule says nothing.
fn warnings(
    spec: &Spec,
    transfer: &Transfer,
    a: &Architecture,
    lowered: &Lowered,
    base: &Compared,
) -> Result<Vec<Warning>, CompileError> {
    if transfer.rule == TransferRule::Standard {
        return Ok(vec![]);
    }
    let mut found = unended(a, lowered, base);
    found.extend(averaged(transfer, a, base));
    found.extend(written(spec, transfer));
    // Without a base nothing differs from it.
    if transfer.rule != TransferRule::Umup {
        found.extend(mixtures(a, base));
        let known = found.iter().map(|w| w.field.clone()).collect::<Vec<_>>();
        found.extend(scores(spec, lowered, base, &known));
        found.extend(shape(spec, transfer, lowered));
    }
    Ok(found)
}

/// Components of whose output no weight has the size.
fn unended(a: &Architecture, lowered: &Lowered, base: &Compared) -> Vec<Warning> {
    let mut found = vec![];
    if base.growth.depth == 1.0 || matches!(a.model.stream, Stream::Attend { .. }) {
        return found;
    }
    for (number, (name, _)) in a.model.components.iter().enumerate().filter(|(_, (n, _))| !n.contains('.')) {
        let own = |w: &Weight| a.outermost(w.owner) == Owner::Component(number as u32);
        let own: Vec<_> = weights(lowered).filter(|(_, w)| own(w)).collect();
        let ended = own.iter().any(|(body, w)| base.place(*body, w) == Place::End);
        let (Some((_, last)), false) = (own.last(), ended) else { continue };
        let message = format!(
            "no weight is in proportion to what `{name}` adds ({}: it is the last): it has no factor of depth",
            last.name
        );
        found.push(Warning { weight: name.clone(), field: component(name), message });
    }
    found
}

/// A stream that is a mean of sources, under a rule that says nothing of how they move together.
fn averaged(transfer: &Transfer, a: &Architecture, base: &Compared) -> Option<Warning> {
    let known = match transfer.rule {
        TransferRule::Mup | TransferRule::Hyperp | TransferRule::Umup | TransferRule::Standard => true,
        TransferRule::Completep | TransferRule::Spectral => false,
    };
    if known || base.growth.layers == 1.0 || !matches!(a.model.stream, Stream::Attend { .. }) {
        return None;
    }
    let message = format!(
        "the stream is a mean of sources, and no rule is known for how {} times as many move together: components' rates have no factor",
        base.growth.layers
    );
    Some(Warning { weight: "model.stream".into(), field: "model.stream".into(), message })
}

/// Mixtures whose experts change in number.
fn mixtures(a: &Architecture, base: &Compared) -> Vec<Warning> {
    let mut found = vec![];
    for (name, c) in &a.model.components {
        let (Component::Experts(here), Some(Component::Experts(there))) =
            (c, base.model.components.get(name))
        else {
            continue;
        };
        if here.active != there.active && !here.router.normalise {
            let message = format!(
                "{} active experts and {} at the base, whose gates are not divided by their sum: no rule is known for the sum",
                here.active, there.active
            );
            let field = format!("{}.active", component(name));
            found.push(Warning { weight: format!("{name}.active"), field, message });
        }
        if here.count != there.count {
            let message = format!(
                "{} experts and {} at the base: no rule is known for how many share the tokens",
                here.count, there.count
            );
            let field = format!("{}.count", component(name));
            found.push(Warning { weight: format!("{name}.count"), field, message });
        }
    }
    found
}

/// Multipliers that are written otherwise.
fn written(spec: &Spec, transfer: &Transfer) -> Vec<Warning> {
    let written = transfer.multipliers(&spec.model).into_iter().filter(|m| !m.fits());
    let number = |x: f64| (x * 1e6).round() / 1e6;
    written
        .map(|m| Warning {
            message: format!(
                "it is written as {}, and is {} by the rule ({})",
                number(m.here),
                number(m.rule),
                m.reason()
            ),
            field: m.path,
            weight: m.field,
        })
        .collect()
}

/// Sums of products of tokens that have no multiplier; `known` are fields with a warning already.
fn scores(spec: &Spec, lowered: &Lowered, base: &Compared, known: &[String]) -> Vec<Warning> {
    let mut found = vec![];
    for (name, [d, b]) in super::scales::scales(lowered, &base.lowered) {
        let field = component(&name);
        if !known.iter().any(|known| known.starts_with(&field)) {
            let message =
                format!("heads are of {d} and not {b}, and their scale is not that of the rule, 1/d");
            found.push(Warning { weight: name, field, message });
        }
    }
    for (name, own) in &spec.model.components {
        let (Component::Defined(here), Some(Component::Defined(there))) =
            (own, base.model.components.get(name))
        else {
            continue;
        };
        let (Ok(here), Ok(there)) = (here.graph(&spec.model), there.graph(&base.model)) else { continue };
        found.extend(super::aligned::grown(&here, &there).into_iter().map(|grown| Warning {
            weight: grown.value.as_ref().map_or(name.clone(), |value| format!("{name}.{value}")),
            message: by_its_own_scale(&grown),
            field: component(name),
        }));
    }
    found
}

/// A place of a definition that reads numbers which grow, in words.
fn by_its_own_scale(grown: &super::aligned::Grown) -> String {
    const SUMS: &str =
        "it sums products of what tokens give over a size that grows, by a scale that it writes itself";
    let number = |x: f64| (x * 1e4).round() / 1e4;
    match grown.ratio {
        Some(ratio) => format!(
            "{SUMS}: `{}` reads what training makes {} times as large as at the base; times {} it would be as large",
            grown.by,
            number(ratio),
            number(1.0 / ratio)
        ),
        None => format!("{SUMS}: `{}` is of numbers that grow and of others that do not", grown.by),
    }
}

/// A base that is no smaller model of the same parts.
fn shape(spec: &Spec, transfer: &Transfer, lowered: &Lowered) -> Option<Warning> {
    let (fixed, each) = applications(&spec.model.body, transfer.passes);
    let more = transfer.depth.checked_sub(fixed);
    if more.is_some_and(|more| reaches(more, &each)) {
        return None;
    }
    let first = weights(lowered).find(|(body, _)| body.is_some()).map(|(_, w)| w.name.clone());
    let steps = each.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ");
    let message = format!(
        "the base has another topology: the body has {fixed} applications{}, and none makes {} of it; components' factors (`{}` and after) are by the ratio alone",
        if steps.is_empty() { String::new() } else { format!(" and {steps} for each turn of a `repeat`") },
        transfer.depth,
        first.unwrap_or_default()
    );
    Some(Warning { weight: "train.transfer.depth".into(), field: "train.transfer.depth".into(), message })
}

/// Applications of a body: those of layers outside repeats, with the passes of loops, and what one
/// more turn of each repeat adds.
fn applications(body: &[Item], passes: Option<u64>) -> (u64, Vec<u64>) {
    let (mut fixed, mut each) = (0, vec![]);
    for item in body {
        match item {
            Item::Layer(_) => fixed += 1,
            Item::Statement(_) => {}
            Item::Repeat { items, .. } => {
                let (inner, deeper) = applications(items, passes);
                each.push(inner.saturating_add(deeper.iter().sum()));
            }
            Item::Recur { items, count, .. } => {
                let (inner, deeper) = applications(items, passes);
                let times = passes.unwrap_or(*count);
                fixed += inner.saturating_mul(times);
                each.extend(deeper.into_iter().map(|n| n.saturating_mul(times)));
            }
        }
    }
    (fixed, each)
}

/// Whether turns of all repeats, one or more of each, can make `depth` applications.
fn reaches(depth: u64, each: &[u64]) -> bool {
    let least = each.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
    let Some(more) = depth.checked_sub(least) else { return false };
    if more == 0 {
        return true;
    }
    // Beyond this every sum of coprime turns is made, and a base has few layers.
    let most = more.min(4096) as usize;
    let mut made = vec![true];
    for at in 1..=most {
        made.push(each.iter().any(|n| (*n as usize) <= at && *n > 0 && made[at - *n as usize]));
    }
    more > 4096 || made[most]
}

/// Findings of a recipe's `transfer` as diagnostics, each at its token: a base that does not go
/// with the model is an error, and a part without a known rule a warning.
pub fn findings(spec: &Spec) -> Vec<Diagnostic> {
    if spec.train.transfer.is_none() {
        return vec![];
    }
    let table = match table(spec) {
        Ok(table) => table,
        // A model that does not compile is said so by those who compile it.
        Err(CompileError::Base(weight)) => {
            let error = Diagnostic::error("bad-base", CompileError::Base(weight).to_string());
            return vec![
                error.at(&spec.sources, "train.transfer").help("write the sizes of a smaller model"),
            ];
        }
        Err(_) => return vec![],
    };
    let rule = table.rule;
    let warning = |w: Warning| {
        let message = format!("`transfer` by `{rule}`, `{}`: {}", w.weight, w.message);
        let help = "tune it at this size, or `dreamc check-transfer` shows how far it is off";
        Diagnostic::warning("no-rule", message).at(&spec.sources, &w.field).help(help)
    };
    table.warnings.into_iter().map(warning).collect()
}
