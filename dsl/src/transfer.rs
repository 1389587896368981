//! One rate at several sizes: the rule, the base, and the model at the base.
//!
//! *In*: a model and a [`Transfer`]. *Out*: the model whose rate it is ([`Transfer::base`]), and
//! the multipliers that the rule puts into the model itself ([`Spec::carry`]): the scale of
//! attentions, and of logits that read the embedding. Factors of weights are the compiler's.
//!
//! *Promise*: sizes of components that are not listed are in proportion to the hidden size; those
//! of definitions follow from it by their own arithmetic, or stay.

use crate::spec::{Component, Model, Spec};
use indexmap::IndexMap;
use serde::Serialize;

/// One rate at several sizes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfer {
    /// The rule.
    pub rule: TransferRule,
    /// Hidden size of the base.
    pub width: u64,
    /// Layer applications of the base.
    pub depth: u64,
    /// Passes of the base's loop; the same number as here where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passes: Option<u64>,
    /// Training tokens of the base, where the rule looks at them.
    pub tokens: Option<u64>,
    /// Sizes of components at the base, by path.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub sizes: IndexMap<String, u64>,
}

/// How a rate goes from size to size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferRule {
    /// Maximal Update Parametrization (2203.03466), with Depth-µP (2310.02244).
    Mup,
    /// The same with branches in proportion to one over the depth (2505.01618).
    Completep,
    /// The spectral condition (2310.17813) over the width.
    Spectral,
    /// No factor at all.
    Standard,
    /// Hypersphere Parameterization (2603.28743).
    Hyperp,
    /// Unit-scaled µP (2407.17465).
    Umup,
}

impl TransferRule {
    /// All of them, in the order of the language.
    pub const ALL: [TransferRule; 6] = [
        TransferRule::Mup,
        TransferRule::Completep,
        TransferRule::Spectral,
        TransferRule::Standard,
        TransferRule::Hyperp,
        TransferRule::Umup,
    ];

    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            TransferRule::Mup => "mup",
            TransferRule::Completep => "completep",
            TransferRule::Spectral => "spectral",
            TransferRule::Standard => "standard",
            TransferRule::Hyperp => "hyperp",
            TransferRule::Umup => "umup",
        }
    }
}

/// The model at the base.
#[derive(Clone, Debug, PartialEq)]
pub struct Base {
    /// It.
    pub model: Model,
    /// Sizes that would not be whole numbers in proportion to the hidden size, by path, with their
    /// values here; all sizes of their components stay.
    pub uneven: Vec<(String, u64)>,
    /// Listed sizes that the model does not have.
    pub unknown: Vec<String>,
}

/// A reason why a model has no such base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadBase {
    /// The field of `transfer` that says so.
    pub field: String,
    /// The mistake.
    pub message: String,
    /// A way out.
    pub help: String,
}

impl Transfer {
    /// The model whose rate it is. Layers are those here: the depth is a number of its own.
    pub fn base(&self, model: &Model) -> Base {
        let mut base = Base { model: model.clone(), uneven: vec![], unknown: vec![] };
        base.model.hidden = self.width;
        let at_base = |size: u64| {
            let all = u128::from(size) * u128::from(self.width);
            let even = all % u128::from(model.hidden.max(1)) == 0;
            even.then(|| (all / u128::from(model.hidden.max(1))) as u64).filter(|size| *size > 0)
        };
        for (name, component) in &mut base.model.components {
            let listed = |size: &str| self.sizes.contains_key(&format!("{name}.{size}"));
            let grow = |widths: &mut Vec<(&'static str, &mut u64)>| widths.retain(|(size, _)| !listed(size));
            let mut widths = component.widths();
            grow(&mut widths);
            let uneven = widths.iter().filter(|(_, size)| at_base(**size).is_none());
            let uneven: Vec<_> = uneven.map(|(size, here)| (format!("{name}.{size}"), **here)).collect();
            if uneven.is_empty() {
                for (_, size) in widths {
                    *size = at_base(*size).unwrap_or(*size);
                }
            }
            base.uneven.extend(uneven);
        }
        for (path, size) in &self.sizes {
            match size_of(&mut base.model, path) {
                Some(own) => *own = *size,
                None => base.unknown.push(path.clone()),
            }
        }
        base
    }

    /// The first reason why a model has no such base.
    pub fn bad(&self, model: &Model) -> Option<BadBase> {
        let base = self.base(model);
        if let Some(path) = base.unknown.first() {
            let known = known_sizes(model).join("`, `");
            let help = if known.is_empty() { "take it away".into() } else { format!("it has `{known}`") };
            let message = format!("the model has no size `{path}`");
            return Some(BadBase { field: format!("sizes.{path}"), message, help });
        }
        if let Some((path, here)) = base.uneven.first() {
            let message = format!(
                "`{path}` is {here} at a hidden size of {}: no whole number in proportion at {}",
                model.hidden, self.width
            );
            let help = format!("write the size of the base: `sizes: {{{path}: …}}`");
            return Some(BadBase { field: "width".into(), message, help });
        }
        let broken = base.model.components.iter();
        let broken = broken.filter_map(|(name, c)| Some((name, c.broken(&base.model)?))).next();
        if let Some((name, rule)) = broken {
            let listed = self.sizes.keys().find(|path| path.starts_with(&format!("{name}.")));
            let field = listed.map_or("width".into(), |path| format!("sizes.{path}"));
            let message = format!("the base breaks a rule of the language: `{name}`: {rule}");
            let help = "write sizes with which the base could be trained".into();
            return Some(BadBase { field, message, help });
        }
        None
    }
}

/// The size of a component that a path names.
fn size_of<'m>(model: &'m mut Model, path: &str) -> Option<&'m mut u64> {
    let (name, size) = path.split_once('.')?;
    let component = model.components.get_mut(name)?;
    // The two lists borrow alike: which has it is asked first.
    if component.widths().iter().any(|(own, _)| *own == size) {
        return component.widths().into_iter().find(|(own, _)| *own == size).map(|(_, value)| value);
    }
    component.sizes().into_iter().find(|(own, _)| *own == size)?.1
}

/// Paths of the sizes that a base may list.
fn known_sizes(model: &Model) -> Vec<String> {
    let mut found = vec![];
    for (name, component) in &mut model.components.clone() {
        let mut own: Vec<String> =
            component.widths().iter().map(|(size, _)| format!("{name}.{size}")).collect();
        let sizes = component.sizes().into_iter().filter(|(_, size)| size.is_some());
        own.extend(sizes.map(|(size, _)| format!("{name}.{size}")));
        own.sort();
        own.dedup();
        found.extend(own);
    }
    found
}

/// A multiplier that stands in the model, where every reader of it finds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Multiplier {
    /// Its name for people: `sa.scale`, `model.logit_scale`, `gd.y` for the attention that a
    /// definition calls so.
    pub field: String,
    /// The field of the specification that it is of, for its token.
    pub path: String,
    /// Its value here.
    pub here: f64,
    /// Whether the model says it, so that no rule changes it.
    written: bool,
    /// The value at the base.
    pub base: f64,
    /// The value that the rule gives it here.
    pub rule: f64,
    /// Which it is.
    of: Of,
}

/// The place of a multiplier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// Logits that read the embedding.
    Logits,
    /// A component that is an attention.
    Attention,
    /// The attention of that number in a definition.
    Defined(usize),
}

impl Multiplier {
    /// Whether the model has the value of the rule.
    pub fn fits(&self) -> bool {
        (self.here - self.rule).abs() <= 1e-12 * self.rule.abs()
    }

    /// Its reason.
    pub fn reason(&self) -> &'static str {
        match self.of {
            Of::Logits => "logits read the embedding, which has the rate of an input: one over the width",
            Of::Attention | Of::Defined(_) => "1/d for heads of another size than the base's",
        }
    }
}

impl TransferRule {
    /// The factor of scores of heads of size `here`: proportional to 1/d, `default` at the base,
    /// except for the rule that has no base.
    fn of_scores(self, base: u64, here: u64, default: f64) -> f64 {
        match self {
            TransferRule::Standard => default,
            TransferRule::Umup => 1.0 / here as f64,
            TransferRule::Mup | TransferRule::Completep | TransferRule::Spectral | TransferRule::Hyperp => {
                if base == here {
                    default
                } else {
                    (base as f64).sqrt() / here as f64
                }
            }
        }
    }

    /// The factor of logits that read the embedding, of a hidden size and that of the base.
    fn of_logits(self, base: u64, here: u64) -> f64 {
        match self {
            TransferRule::Standard => 1.0,
            TransferRule::Umup => 1.0 / here as f64,
            TransferRule::Mup | TransferRule::Completep | TransferRule::Spectral | TransferRule::Hyperp => {
                base as f64 / here as f64
            }
        }
    }
}

impl Transfer {
    /// The multipliers that the rule has in a model, with what the model says: the one place that
    /// knows their values.
    pub fn multipliers(&self, model: &Model) -> Vec<Multiplier> {
        let base = self.base(model).model;
        let mut found = vec![];
        if model.tie {
            found.push(Multiplier {
                field: "model.logit_scale".into(),
                path: "model.logit_scale".into(),
                here: model.logit_scale.unwrap_or(1.0),
                written: model.logit_scale.is_some(),
                base: 1.0,
                rule: self.rule.of_logits(base.hidden, model.hidden),
                of: Of::Logits,
            });
        }
        let default = |size: u64| (size as f64).sqrt().recip();
        for (name, component) in &model.components {
            let Some(there) = base.components.get(name) else { continue };
            let path = format!("model.components.{name}");
            if let (Some(here), Some(there)) = (component.attention(), there.attention()) {
                let (b, d) = (there.head_size, here.head_size);
                found.push(Multiplier {
                    field: format!("{name}.scale"),
                    path: format!("{path}.scale"),
                    here: here.scale.unwrap_or(default(d)),
                    written: here.scale.is_some(),
                    base: default(b),
                    rule: self.rule.of_scores(b, d, here.scale.unwrap_or(default(d))),
                    of: Of::Attention,
                });
            }
            let (Component::Defined(here), Component::Defined(there)) = (component, there) else { continue };
            let (Ok(of_here), Ok(of_base)) = (here.graph(model), there.graph(&base)) else { continue };
            let pairs = of_here.attentions().into_iter().zip(of_base.attentions());
            for (number, (a, at_base)) in pairs.enumerate() {
                let (b, d) = (at_base.size, a.size);
                found.push(Multiplier {
                    field: format!("{name}.{}", a.name.unwrap_or_else(|| format!("attend {}", number + 1))),
                    path: path.clone(),
                    here: a.scale,
                    written: a.written,
                    base: if a.written { at_base.scale } else { default(b) },
                    rule: self.rule.of_scores(b, d, a.scale),
                    of: Of::Defined(number),
                });
            }
        }
        found
    }
}

impl Spec {
    /// Puts the multipliers that the recipe's rule has into the model, where it says none.
    pub fn carry(&mut self) {
        let Some(transfer) = &self.train.transfer else { return };
        if transfer.rule == TransferRule::Standard {
            return;
        }
        for multiplier in transfer.multipliers(&self.model) {
            if multiplier.written || multiplier.fits() {
                continue;
            }
            let component = multiplier.path.strip_prefix("model.components.");
            let component = component.map(|rest| rest.strip_suffix(".scale").unwrap_or(rest));
            let component = component.and_then(|name| self.model.components.get_mut(name));
            match (multiplier.of, component) {
                (Of::Logits, _) => self.model.logit_scale = Some(multiplier.rule),
                (Of::Attention, Some(Component::Sequence(a) | Component::Depth(a))) => {
                    a.scale = Some(multiplier.rule);
                }
                (Of::Defined(number), Some(Component::Defined(own))) => {
                    own.scores.resize(own.scores.len().max(number + 1), None);
                    own.scores[number] = Some(multiplier.rule);
                }
                (Of::Attention | Of::Defined(_), _) => {}
            }
        }
    }
}
