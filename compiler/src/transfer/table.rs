//! The factors of every weight as people read them, each with its reason.

use super::place::Use;
use super::{Compared, Growth, Place, Seen, Share, begins, rule, weights};
use crate::CompileError;
use crate::architecture::Architecture;
use crate::compiled::Init;
use crate::lower::{Lowered, Shape, Weight, lower};
use crate::optim::optimizer;
use crate::recipe::recipe;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, Transfer, TransferRule};
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

/// A weight or a component of which no rule is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warning {
    /// Its name.
    pub weight: String,
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
    let compared = Compared::new(spec, transfer, &a)?;
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
        multipliers: multipliers(spec, &compared),
        warnings: warnings(spec, transfer, &a, &lowered, &compared),
    };
    for (body, w) in weights(&lowered) {
        let (seen, base) = compared.seen(spec, &a, &lowered, body, w)?;
        let share = rule(transfer.rule).share(&seen, growth);
        let prefix = body.and_then(|b| a.prefixes().find(|(_, (of, _))| *of == b)).map(|(prefix, _)| prefix);
        let name = prefix.map_or(w.name.clone(), |prefix| format!("{prefix}.{}", w.name));
        if let (Use::Unknown(op), false) = (&seen.of, transfer.rule == TransferRule::Standard) {
            let message = format!("no rule is known of a weight that `{op}` reads: it has no factor");
            table.warnings.push(Warning { weight: name.clone(), message });
        }
        let init = begins(w.init, base, w, a.model.norm.unit_offset, share);
        let shape: Vec<u64> = w.dims.iter().map(|&d| lowered.module.size(d)).collect();
        let moved = recipe((&spec.train, spec.model.adapt.is_some()), &name, w, &shape);
        let role = role(&seen, &grows, w, &lowered);
        let size = |fan: f64| fan as u64;
        table.lines.push(Line {
            sets: body.map_or(1, |b| a.bodies[b].sets),
            role,
            fan_in: [size(seen.fan_in.here), size(seen.fan_in.base)],
            fan_out: [size(seen.fan_out.here), size(seen.fan_out.base)],
            optimizer: moved.map(|rule| optimizer(&spec.train, &rule).name()),
            deviation: match init {
                Init::Normal(deviation) => Some(deviation),
                Init::Constant(_)
                | Init::Identity { .. }
                | Init::Pick { .. }
                | Init::Uniform(..)
                | Init::LogUniform(..)
                | Init::InverseSoftplusUniform(..) => None,
            },
            init: match (init, w.init) {
                (Init::Normal(now), Init::Normal(default)) => now / default,
                (Init::Constant(now), Init::Constant(default)) if default != 0.0 => now / default,
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
    let mut wide = spec.model.clone();
    wide.hidden = wide.hidden.saturating_mul(2);
    for component in wide.components.values_mut() {
        component.widths().into_iter().for_each(|(_, size)| *size = size.saturating_mul(2));
    }
    // A definition whose arithmetic does not fit twice the width says nothing of its own.
    let wide = Architecture::new(&wide, None).and_then(|a| lower(&a, Shape::default()));
    Ok(wide.map(|wide| differ(&wide)).unwrap_or_else(|_| vec!["hidden".into()]))
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
        Place::Branch | Place::End if seen.averaged => parts.push("sources are averaged".into()),
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

fn multipliers(spec: &Spec, compared: &Compared) -> Vec<Multiplier> {
    let mut found = vec![];
    for (name, component) in &spec.model.components {
        let (Component::Sequence(here) | Component::Depth(here)) = component else { continue };
        let Some(there) = compared.model.components.get(name).and_then(|c| c.attention()) else { continue };
        let of = |a: &dreamc_dsl::spec::Attention| 1.0 / (a.head_size as f64).sqrt();
        let value = [here.scale.unwrap_or(of(here)), of(there)];
        let reason = if here.head_size == there.head_size {
            "heads keep their size".to_string()
        } else {
            format!("1/d for heads of {} and not {}", here.head_size, there.head_size)
        };
        found.push(Multiplier { field: format!("{name}.scale"), value, reason });
    }
    if spec.model.tie {
        let value = [spec.model.logit_scale.unwrap_or(1.0), 1.0];
        let reason = "logits read the embedding, which has the rate of an input".into();
        found.push(Multiplier { field: "model.logit_scale".into(), value, reason });
    }
    found
}

/// Parts of the model of which the rule says nothing.
fn warnings(
    spec: &Spec,
    transfer: &Transfer,
    a: &Architecture,
    lowered: &Lowered,
    base: &Compared,
) -> Vec<Warning> {
    let mut found = vec![];
    if transfer.rule == TransferRule::Standard {
        return found;
    }
    for (number, (name, component)) in a.model.components.iter().enumerate() {
        let own = |w: &Weight| w.owner == crate::bind::Owner::Component(number as u32);
        let any = weights(lowered).any(|(_, w)| own(w));
        let ended = weights(lowered).any(|(_, w)| own(w) && super::place(a, w) == Place::End);
        // Components that a definition applies end where it ends.
        if any && !ended && !name.contains('.') {
            let message = "no matrix ends it: what it adds has no factor of depth".into();
            found.push(Warning { weight: name.clone(), message });
        }
        let (Component::Experts(here), Some(Component::Experts(there))) =
            (component, base.model.components.get(name))
        else {
            continue;
        };
        if here.active != there.active && !here.router.normalise {
            let message = format!(
                "{} active experts and {} at the base, whose gates are not divided by their sum: no rule is known for the sum",
                here.active, there.active
            );
            found.push(Warning { weight: format!("{name}.active"), message });
        }
        if here.count != there.count {
            let message = format!(
                "{} experts and {} at the base: no rule is known for how many share the tokens",
                here.count, there.count
            );
            found.push(Warning { weight: format!("{name}.count"), message });
        }
    }
    for (name, component) in &spec.model.components {
        let attention =
            component.attention().zip(base.model.components.get(name).and_then(|c| c.attention()));
        if let Some((here, there)) = attention
            && here.head_size != there.head_size
            && here.scale != Some((there.head_size as f64).sqrt() / here.head_size as f64)
        {
            let message =
                "its scale is written, and heads are of another size than the base's: the rule has 1/d"
                    .into();
            found.push(Warning { weight: format!("{name}.scale"), message });
        }
    }
    let tied = spec.model.tie && growth_of_logits(spec, base);
    if tied {
        let message = "it is written, and the head is the embedding: the rule has one over the width".into();
        found.push(Warning { weight: "model.logit_scale".into(), message });
    }
    found
}

fn growth_of_logits(spec: &Spec, base: &Compared) -> bool {
    let by = base.model.hidden as f64 / spec.model.hidden as f64;
    by != 1.0 && spec.model.logit_scale != Some(by)
}
