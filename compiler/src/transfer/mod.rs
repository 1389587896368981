//! One learning rate for models of several sizes, by the graph of the model here and at the base.
//!
//! *In*: a specification whose recipe has a `transfer`, and its lowered model. *Out*: for every
//! weight a [`Share`]: factors on the deviation of its first values, on its rate and on AdamW's ε.
//! *Promise*: a weight's fans are products of the sizes of named dimensions that it sums over and
//! that it makes, here and at the base ([`place`]); at the size of the base every factor is 1, so
//! that the base is trained bit for bit as without a rule; a rule is one file.
//!
//! Multipliers of branches and of the head are in first values and rates, so that no reader of a
//! model has to know them; those of attentions and of tied heads are keys of the model
//! ([`Spec::carry`]).

mod aligned;
mod completep;
mod ends;
mod hyperp;
mod mup;
mod place;
mod scales;
mod spectral;
mod standard;
mod table;
mod umup;

pub use table::{Line, Multiplier, Table, Warning, findings, table};

use crate::CompileError;
use crate::architecture::{Architecture, Work};
use crate::bind::Owner;
use crate::compiled::{Init, TensorKind};
use crate::ir::{Dim, Function, Module};
use crate::lower::{Lowered, Shape, Weight, lower};
use crate::optim::matrix;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Item, Model, OptimizerKind, Stream, Train, Transfer, TransferRule};
use place::Use;
use std::collections::{HashMap, HashSet};

/// The place of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Outside the layers' components.
    Stream,
    /// Inside a component.
    Branch,
    /// The last thing before the output of a component, whose first values shrink with the depth.
    End,
}

/// A size here and at the base.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fan {
    here: f64,
    base: f64,
}

impl Fan {
    fn ratio(self) -> f64 {
        self.here / self.base
    }
}

/// A tensor as rules look at it.
#[derive(Clone, Debug)]
struct Seen {
    of: Use,
    /// Numbers that a sum of it is of, and how many such sums there are.
    fan_in: Fan,
    fan_out: Fan,
    place: Place,
    /// Whether passes of a loop apply it.
    looped: bool,
    /// Whether what components add is averaged, and not summed.
    averaged: bool,
    /// Whether it makes logits.
    head: bool,
    /// Whether it begins as a constant.
    constant: bool,
    /// Deviation of its first values at the base, of one that is drawn; else 1.
    begins: f64,
    /// A number that brings what it multiplies to a deviation of 1, by a rule that asks, where one
    /// is known.
    reads: Option<f64>,
    /// Whether a step is in proportion to the gradient.
    gradient: bool,
    /// Where the optimizer moves its whole matrices, how much longer its step is for their shape.
    whole: Option<f64>,
}

/// How much larger than the base a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Growth {
    width: f64,
    /// Applications of layers; those with the passes of the base; passes.
    depth: f64,
    layers: f64,
    passes: f64,
    tokens: f64,
}

/// Factors of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    /// On the deviation of its first values at the base; absent where those of here stay.
    pub init: Option<f64>,
    /// On its learning rate. Weight decay keeps its product with the rate.
    pub rate: f64,
    /// On AdamW's ε.
    pub eps: f64,
}

impl Share {
    /// No factor.
    pub const NONE: Share = Share { init: None, rate: 1.0, eps: 1.0 };
}

/// A rule.
trait Rule {
    fn share(&self, seen: &Seen, growth: Growth) -> Share;
}

fn rule(rule: TransferRule) -> &'static dyn Rule {
    match rule {
        TransferRule::Mup => &mup::Mup,
        TransferRule::Completep => &completep::Completep,
        TransferRule::Spectral => &spectral::Spectral,
        TransferRule::Standard => &standard::Standard,
        TransferRule::Hyperp => &hyperp::Hyperp,
        TransferRule::Umup => &umup::Umup,
    }
}

/// The factors of the weights of a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rates {
    /// By body, none outside, and name.
    of: HashMap<(Option<usize>, String), (Share, Init, Place)>,
}

impl Rates {
    /// Those of a specification; none without a rule, and none at the base.
    pub fn of(spec: &Spec, a: &Architecture, lowered: &Lowered) -> Result<Rates, CompileError> {
        let Some(transfer) = &spec.train.transfer else { return Ok(Rates::default()) };
        let compared = Compared::new(spec, transfer, a, lowered)?;
        let based = transfer.rule != TransferRule::Umup;
        if based && compared.growth == Growth::NONE && compared.model == spec.model {
            return Ok(Rates::default());
        }
        let mut rates = Rates::default();
        for (body, w) in weights(lowered) {
            let (seen, init) = compared.seen(spec, a, lowered, body, w)?;
            let share = rule(transfer.rule).share(&seen, compared.growth);
            rates.of.insert((body, w.name.clone()), (share, init, seen.place));
        }
        Ok(rates)
    }

    /// The factors of a weight.
    pub fn share(&self, body: Option<usize>, name: &str) -> Share {
        self.of.get(&(body, name.to_string())).map_or(Share::NONE, |(share, ..)| *share)
    }

    /// How a tensor begins that would begin so.
    pub fn begins(&self, body: Option<usize>, w: &Weight, unit_offset: bool, init: Init) -> Init {
        let Some((share, base, place)) = self.of.get(&(body, w.name.clone())) else { return init };
        begins(init, (*base, *place), w, unit_offset, *share)
    }
}

/// First values by the factor on those of the base. Constants and numbers that are uniform are
/// multiplied where they end a component: elsewhere their factor is 1.
fn begins(init: Init, at: (Init, Place), w: &Weight, unit_offset: bool, share: Share) -> Init {
    let Some(by) = share.init else { return init };
    match (init, at) {
        (Init::Normal(_), (Init::Normal(deviation), _)) => Init::Normal(deviation * by),
        (Init::Constant(gain), (_, Place::End)) => {
            let one = if unit_offset && w.part == crate::lower::part::POST_NORM { 1.0 } else { 0.0 };
            Init::Constant((gain + one) * by - one)
        }
        (Init::Uniform(low, high), (_, Place::End)) => Init::Uniform(low * by, high * by),
        (
            Init::Normal(_)
            | Init::Constant(_)
            | Init::Identity { .. }
            | Init::Pick { .. }
            | Init::Uniform(..)
            | Init::Ramp(..)
            | Init::LogUniform(..)
            | Init::InverseSoftplusUniform(..),
            _,
        ) => init,
    }
}

/// All weights that are trained or could be, with their body.
fn weights(lowered: &Lowered) -> impl Iterator<Item = (Option<usize>, &Weight)> {
    let bodies = lowered.weights.iter().enumerate();
    let bodies = bodies.flat_map(|(b, all)| all.iter().map(move |w| (Some(b), w)));
    let globals = lowered.globals.iter().map(|w| (None, w));
    globals.chain(bodies).filter(|(_, w)| w.kind != TensorKind::Balance)
}

impl Growth {
    const NONE: Growth = Growth { width: 1.0, depth: 1.0, layers: 1.0, passes: 1.0, tokens: 1.0 };

    fn of(spec: &Spec, transfer: &Transfer, a: &Architecture) -> Growth {
        let over = |here: u64, base: u64| here as f64 / base.max(1) as f64;
        let train: &Train = &spec.train;
        let tokens = train.steps * train.batch * train.sequence.unwrap_or(a.model.context);
        // A rule without a base has the sizes themselves.
        let unit = transfer.rule == TransferRule::Umup;
        let depth = if unit { 1 } else { transfer.depth };
        let base_passes = if unit { Some(1) } else { transfer.passes };
        let passes = base_passes.map_or(1.0, |base| over(passes(&spec.model.body), base));
        let looped = a.bodies.iter().filter(|b| matches!(b.work, Work::Layer(_)) && b.recurrent.is_some());
        let looped: u64 = looped.map(|b| b.applications).sum();
        let without = (a.depth - looped.min(a.depth)) as f64 + looped as f64 / passes;
        Growth {
            width: over(a.model.hidden, transfer.width),
            depth: over(a.depth, depth),
            layers: without / depth.max(1) as f64,
            passes,
            tokens: transfer.tokens.map_or(1.0, |base| over(tokens, base)),
        }
    }
}

/// A model of twice the width, lowered; none where a definition's arithmetic does not fit it.
fn twice(model: &Model) -> Option<(Model, Lowered)> {
    let mut wide = model.clone();
    wide.hidden = wide.hidden.saturating_mul(2);
    for component in wide.components.values_mut() {
        component.widths().into_iter().for_each(|(_, size)| *size = size.saturating_mul(2));
    }
    let lowered = Architecture::new(&wide, None).and_then(|a| lower(&a, Shape::default())).ok()?;
    Some((wide, lowered))
}

/// Passes of the outermost loop; 1 where there is none.
pub fn passes(body: &[Item]) -> u64 {
    let each = body.iter().map(|item| match item {
        Item::Recur { count, .. } => *count,
        Item::Repeat { items, .. } => passes(items),
        Item::Layer(_) | Item::Statement(_) => 1,
    });
    each.max().unwrap_or(1)
}

/// The model at the base.
struct Compared {
    model: Model,
    lowered: Lowered,
    growth: Growth,
    /// Weights that end components here, by the leader of their body and name.
    ends: HashSet<(usize, String)>,
}

impl Compared {
    fn new(
        spec: &Spec,
        transfer: &Transfer,
        a: &Architecture,
        here: &Lowered,
    ) -> Result<Compared, CompileError> {
        let base = transfer.base(&spec.model).model;
        let (model, lowered) = match transfer.rule {
            // Sizes that stay are those of a model of twice the width, too.
            TransferRule::Umup => match twice(&spec.model) {
                Some(wide) => wide,
                None => (spec.model.clone(), here.clone()),
            },
            TransferRule::Mup
            | TransferRule::Completep
            | TransferRule::Spectral
            | TransferRule::Standard
            | TransferRule::Hyperp => {
                let mut at_base = Architecture::new(&base, None)?;
                at_base.depth = transfer.depth;
                let lowered = lower(&at_base, Shape::default())?;
                (base, lowered)
            }
        };
        let (growth, ends) = (Growth::of(spec, transfer, a), ended(a, here));
        Ok(Compared { model, lowered, growth, ends })
    }

    /// A weight at the base.
    fn at_base(&self, body: Option<usize>, w: &Weight) -> Result<&Weight, CompileError> {
        let all = match body {
            Some(b) => self.lowered.weights.get(b).map_or(&[][..], |all| &all[..]),
            None => &self.lowered.globals[..],
        };
        let found = all.iter().find(|own| own.name == w.name && own.dims.len() == w.dims.len());
        found.ok_or_else(|| CompileError::Base(w.name.clone()))
    }

    /// A weight as rules look at it, and how it begins at the base.
    fn seen(
        &self,
        spec: &Spec,
        a: &Architecture,
        lowered: &Lowered,
        body: Option<usize>,
        w: &Weight,
    ) -> Result<(Seen, Init), CompileError> {
        let base = self.at_base(body, w)?;
        let of = used(a, lowered, body, w);
        let here = &lowered.module;
        let fan = |dims: &[Dim]| Fan {
            here: elements(here, dims),
            base: dims.iter().map(|d| self.size(here, *d)).product(),
        };
        let (fan_in, fan_out) = match &of {
            Use::Product { over, each, .. } => (fan(over), fan(each)),
            Use::Lookup { each } => (fan(&[]), fan(each)),
            Use::Factor | Use::Term | Use::Taps | Use::Unknown(_) | Use::Unread => (fan(&[]), fan(&w.dims)),
        };
        let shape = |w: &Weight, m: &Module| w.dims.iter().map(|&d| m.size(d)).collect::<Vec<u64>>();
        let tall = |size: [u64; 2]| (size[0] as f64 / size[1].max(1) as f64).max(1.0).sqrt();
        let whole = matrix(&spec.train, w, &shape(w, here));
        let of_base = matrix(&spec.train, w, &shape(base, &self.lowered.module));
        let whole = whole.map(|size| tall(size) / of_base.map_or(1.0, tall));
        let looped = body.is_some_and(|b| a.bodies[b].recurrent.is_some());
        let seen = Seen {
            of,
            fan_in,
            fan_out,
            place: self.place(body, w),
            looped,
            averaged: matches!(a.model.stream, Stream::Attend { .. }),
            head: w.kind == TensorKind::Head,
            constant: !matches!(w.init, Init::Normal(_)),
            begins: if let Init::Normal(deviation) = base.init { deviation } else { 1.0 },
            reads: self.reads(spec, a, lowered, body, w).ok(),
            gradient: matches!(spec.train.optimizer, OptimizerKind::Sgd(_)),
            whole,
        };
        Ok((seen, base.init))
    }

    /// A number that brings what a weight multiplies to a deviation of 1, by a rule that asks; the
    /// error is the operation for which no number is known.
    fn reads(
        &self,
        spec: &Spec,
        a: &Architecture,
        lowered: &Lowered,
        body: Option<usize>,
        w: &Weight,
    ) -> Result<f64, &'static str> {
        let (Some(leader), true) =
            (body, spec.train.transfer.as_ref().is_some_and(|t| t.rule == TransferRule::Umup))
        else {
            return Ok(1.0);
        };
        let tokens = spec.train.sequence.unwrap_or(a.model.context);
        let own = |f: &&Function| {
            let of = a.bodies.iter().any(|b| b.name == f.name && b.leader == leader);
            of && f.params.iter().any(|p| p.name == w.name)
        };
        let function = lowered.module.functions.values().find(own);
        function.map_or(Ok(1.0), |f| umup::unit(&lowered.module, f, &w.name, tokens))
    }

    /// The size of a dimension at the base, by its name.
    fn size(&self, here: &Module, dim: Dim) -> f64 {
        self.lowered.module.dims.get(here.name(dim)).copied().unwrap_or(here.size(dim)) as f64
    }
}

fn elements(m: &Module, dims: &[Dim]) -> f64 {
    dims.iter().map(|&d| m.size(d) as f64).product()
}

/// The use of a weight, in the functions that read it.
fn used(a: &Architecture, lowered: &Lowered, body: Option<usize>, w: &Weight) -> Use {
    let functions = lowered.module.functions.values();
    let one = matches!(w.init, Init::Constant(x) | Init::Ramp(x, _) if x != 0.0);
    match body {
        None => place::of(functions, &w.name, one),
        Some(leader) => {
            let own = |name: &str| a.bodies.iter().any(|b| b.name == name && b.leader == leader);
            place::of(functions.filter(|f| own(&f.name)), &w.name, one)
        }
    }
}

/// The weights that end the components of a model's bodies: what these give is what is added, those
/// that a definition applies are inside.
fn ended(a: &Architecture, lowered: &Lowered) -> HashSet<(usize, String)> {
    let mut found = HashSet::new();
    for body in &a.bodies {
        let function = lowered.module.functions.get(&body.name).zip(lowered.facts.marks.get(&body.name));
        let Some((f, marks)) = function else { continue };
        let still = place::still(f);
        for name in a.model.components.keys().filter(|name| !name.contains('.')) {
            let own = ends::ends(f, marks, name, &still).into_iter();
            found.extend(own.map(|weight| (body.leader, weight)));
        }
    }
    found
}

impl Compared {
    fn place(&self, body: Option<usize>, w: &Weight) -> Place {
        let inside = match w.owner {
            Owner::Component(_) | Owner::Skip(_) => true,
            Owner::Embedding
            | Owner::Head
            | Owner::Stream
            | Owner::Pool(_)
            | Owner::Saved(_)
            | Owner::Norm(_)
            | Owner::Lanes(_)
            | Owner::Output
            | Owner::Sources
            | Owner::Loop
            | Owner::Exit
            | Owner::Members
            | Owner::Choice
            | Owner::Depths => false,
        };
        let ends = |b: usize| self.ends.contains(&(b, w.name.clone()));
        match (inside, body.is_some_and(ends)) {
            (false, _) => Place::Stream,
            (true, true) => Place::End,
            (true, false) => Place::Branch,
        }
    }
}
