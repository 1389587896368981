//! Sizes of activations do not follow the size of the model: the coordinate check of muP (Yang et
//! al., *Tensor Programs V*, 2203.03466, appendix D.1), over the width and over the depth.
//!
//! *In*: a subject whose recipe has a `transfer`. The model is taken at four widths, with the least
//! as the base: hidden and intermediate sizes and numbers of heads grow together, those of
//! definitions too; and at four depths. Each takes five steps from its own first values on the
//! subject's batch. *Out*: for what every component gives, for the stream and for the logits, the
//! slope of the logarithm of their size over that of the model's ([`Slope`]), and of a component
//! that is off the weight whose move makes it so. The proof `coordinates` looks at widths alone,
//! and at the moves of every tensor.
//!
//! Choices of routers would jump: every expert is chosen, and nothing skips.

use super::steps::Law;
use super::subject::Subject;
use super::{Checks, Place, Proof, VerifyError, transfer, widen};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::compiled::{Init, TensorKind};
use dreamc_compiler::probe::Probe;
use dreamc_compiler::{Compiled, Options};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, Expr, Item, Pace, Precision, Schedule, Setting, Stream, TransferRule};
use dreamc_runtime::analysis::probe::Probing;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::statistics::student_quantile;
use dreamc_runtime::train::schedule;
use indexmap::IndexMap;
use serde::Serialize;

/// Sizes of streams and logits do not follow the width.
pub struct Coordinates;

/// Widths over that of the subject.
const WIDER: [u64; 4] = [2, 4, 8, 16];
/// Depths over that of the subject.
const DEEPER: [u64; 4] = [1, 2, 4, 8];
/// The least hidden and intermediate sizes of a subject.
const LEAST: [u64; 2] = [8, 4];
/// Models of each width.
const SEEDS: u64 = 2;
/// Steps of each.
const STEPS: u64 = 5;
/// Small, so that what moves is in proportion to it.
const RATE: f64 = 1e-3;
/// The same of steps that are in proportion to gradients.
const RATE_OF_GRADIENTS: f64 = 0.1;
/// A rule that is broken has a slope that is off by a half or more.
const SLOPE: f64 = 0.4;
/// Widths whose first moves are looked at: that of the base, and twice that, where any factor is
/// off by a root of two or more.
const MOVED: usize = 2;
/// How far a move may be off, relative to that of the table: products of orthogonal steps may read
/// bf16.
const MOVE: f64 = 0.05;

impl Proof for Coordinates {
    fn name(&self) -> &'static str {
        "coordinates"
    }

    fn claim(&self) -> &'static str {
        "sizes of activations do not follow the width"
    }

    fn how(&self) -> &'static str {
        "slopes of components, streams and logits over four widths, at the start and in how far five steps move them, under the \
         recipe's `transfer`; of every tensor the deviation of its first values and its first move against the table of the rule"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let Some(base) = base(s) else { return Ok(Some("the recipe has no `transfer`".into())) };
        let shapes = transfer::shapes(&widened(&base, WIDER[0]), &options(s), s.pipeline)?;
        let mut first: IndexMap<String, f64> = IndexMap::new();
        for (i, k) in WIDER.into_iter().enumerate() {
            let spec = widened(&base, k);
            let compiled = s.pipeline.compile(&spec, &options(s))?;
            let m = k as f64 / WIDER[0] as f64;
            for t in &compiled.tensors {
                if let (Some(by), Init::Normal(deviation)) = (transfer::deviation(&spec, &shapes, t), t.init)
                {
                    let at_base = *first.entry(t.name.clone()).or_insert(deviation);
                    let e = (deviation / (at_base * by) - 1.0).abs();
                    let what = format!("deviation of first values of {} at {m} times the width", t.name);
                    checks.check(what, e, 1e-9, Place::of_tensor(&t.name));
                }
            }
            if i < MOVED {
                moves(s, &spec, &shapes, compiled, m, checks)?;
            }
        }
        // No factor is no promise.
        if matches!(base.train.transfer.as_ref().map(|t| t.rule), Some(TransferRule::Standard)) {
            return Ok(None);
        }
        for axis in axes(&base).into_iter().filter(|axis| *axis != Axis::Depth) {
            for line in over(s, &base, axis)? {
                let what = format!("slope of {} {}, {}", line.of, line.when(), axis.title());
                checks.check(what, (line.slope.slope - line.expected).abs(), SLOPE, Place::default());
            }
        }
        Ok(None)
    }
}

/// The size of the model that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// All widths together, heads in number.
    Width,
    /// All widths together, heads in size.
    Heads,
    /// Applications of layers; of a model that has all of them in a loop, its passes.
    Depth,
}

impl Axis {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Axis::Width => "width",
            Axis::Heads => "heads",
            Axis::Depth => "depth",
        }
    }

    /// Its heading.
    pub fn title(self) -> &'static str {
        match self {
            Axis::Width => "over widths",
            Axis::Heads => "over widths, by the size of heads",
            Axis::Depth => "over depths",
        }
    }

    /// Sizes over the subject's.
    fn scales(self) -> [u64; 4] {
        match self {
            Axis::Width | Axis::Heads => WIDER,
            Axis::Depth => DEEPER,
        }
    }

    /// The subject at one of them.
    fn sized(self, base: &Spec, k: u64) -> Spec {
        match self {
            Axis::Width => widened(base, k),
            Axis::Heads => larger_heads(base, k),
            Axis::Depth => deepened(&widened(base, WIDER[0]), k),
        }
    }
}

/// A slope with its interval of 95 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Slope {
    /// Of the logarithm of sizes over that of the model's size.
    pub slope: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper.
    pub high: f64,
}

/// How what a part gives follows the size of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// The part: `sa.out`, over all layers; `layers.1.out`, a stream; `logits`.
    pub of: String,
    /// The size that grows.
    pub over: Axis,
    /// How far it was moved, or its size at the start.
    pub moved: bool,
    /// Root mean squares at the four sizes, means over seeds.
    pub sizes: Vec<f64>,
    /// Their slope.
    pub slope: Slope,
    /// The slope that the rule gives it.
    pub expected: f64,
    /// Whether it has that slope.
    pub flat: bool,
    /// Where it has not: the weight whose move has the slope that is furthest off.
    pub weight: Option<String>,
}

impl Line {
    /// The time of it, for people.
    pub fn when(&self) -> &'static str {
        if self.moved { "in how far it moves" } else { "at the start" }
    }
}

/// The check of a specification.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The rule's word.
    pub rule: &'static str,
    /// Hidden sizes.
    pub widths: Vec<u64>,
    /// Layer applications.
    pub depths: Vec<u64>,
    /// How far a slope may be off.
    pub tolerance: f64,
    /// The slopes.
    pub lines: Vec<Line>,
}

impl Report {
    /// Whether all slopes are those of the rule.
    pub fn holds(&self) -> bool {
        self.lines.iter().all(|line| line.flat)
    }
}

/// Measures a subject over widths and depths; `None` without a `transfer`. A part that is off is
/// looked into for the weight.
pub fn check(s: &Subject, tell: &mut dyn FnMut(&str)) -> Result<Option<Report>, VerifyError> {
    let Some(base) = base(s) else { return Ok(None) };
    let mut lines = vec![];
    for axis in axes(&base) {
        tell(axis.word());
        let mut found = over(s, &base, axis)?;
        for line in found.iter_mut().filter(|line| !line.flat) {
            tell(&line.of);
            line.weight = blamed(s, &base, line)?;
        }
        lines.extend(found);
    }
    let rule = base.train.transfer.as_ref().map_or("", |t| t.rule.word());
    let hidden = |k: &u64| Axis::Width.sized(&base, *k).model.hidden;
    let depth = |k: &u64| Architecture::new(&Axis::Depth.sized(&base, *k).model, None).map_or(0, |a| a.depth);
    let (widths, depths) = (WIDER.iter().map(hidden).collect(), DEEPER.iter().map(depth).collect());
    Ok(Some(Report { rule, widths, depths, tolerance: SLOPE, lines }))
}

/// The sizes of a model that grow.
fn axes(base: &Spec) -> Vec<Axis> {
    let heads = base.model.components.values().any(|c| c.attends(&base.model));
    let axes = [Some(Axis::Width), heads.then_some(Axis::Heads), Some(Axis::Depth)];
    axes.into_iter().flatten().collect()
}

/// Slopes of all that is measured.
fn over(s: &Subject, base: &Spec, axis: Axis) -> Result<Vec<Line>, VerifyError> {
    let mut all = vec![];
    for k in axis.scales() {
        all.push(measured(s, &axis.sized(base, k), axis, None)?);
    }
    let mut lines = vec![];
    for of in all[0].keys().filter(|of| all.iter().all(|at| at.contains_key(*of))) {
        // Other layers stand at the same number of a deeper model.
        if axis == Axis::Depth && of.starts_with("layers.") {
            continue;
        }
        for moved in [false, true] {
            let each = |m: &Moved| if moved { m.by } else { m.first };
            let values: Vec<Vec<f64>> = all.iter().map(|at| at[of].iter().map(each).collect()).collect();
            let Some(slope) = slope(&axis.scales(), &values) else { continue };
            let expected = expected(base, axis, of, moved);
            let sizes = values.iter().map(|v| v.iter().sum::<f64>() / v.len().max(1) as f64).collect();
            let flat = (slope.slope - expected).abs() <= SLOPE;
            lines.push(Line {
                of: of.clone(),
                over: axis,
                moved,
                sizes,
                slope,
                expected,
                flat,
                weight: None,
            });
        }
    }
    Ok(lines)
}

/// The slope that a rule gives: first logits are sums of numbers whose deviation falls with the
/// width; what a component adds falls with the depth, and with the number of passes, which add
/// alike.
fn expected(base: &Spec, axis: Axis, of: &str, moved: bool) -> f64 {
    let rule = base.train.transfer.as_ref().map(|t| t.rule);
    let component = of.strip_suffix(".out").and_then(|name| base.model.components.get(name));
    let averaged = matches!(base.model.stream, Stream::Attend { .. });
    let carried = rule.is_some_and(|rule| rule != TransferRule::Standard);
    if axis == Axis::Heads && moved && carried && of.ends_with(".scores") {
        return SCORES_MOVE;
    }
    match (axis, rule, component) {
        (
            Axis::Width | Axis::Heads,
            Some(TransferRule::Mup | TransferRule::Completep | TransferRule::Hyperp | TransferRule::Umup),
            _,
        ) => {
            // By `umup` rows of the embedding have a rate that falls with the width.
            let rows = rule == Some(TransferRule::Umup) && of == "embed.out";
            if (of == "logits" && !moved) || (rows && moved) { -0.5 } else { 0.0 }
        }
        // Its deviations follow the sizes themselves: a head that is narrower than the vocabulary
        // is long has no factor.
        (Axis::Width | Axis::Heads, Some(TransferRule::Spectral), _) if of == "logits" && !moved => {
            let size = |k: u64| (base.model.vocab as f64 / (base.model.hidden * k) as f64).sqrt().min(1.0);
            let sizes: Vec<Vec<f64>> = axis.scales().iter().map(|k| vec![size(*k)]).collect();
            slope(&axis.scales(), &sizes).map_or(0.0, |slope| slope.slope)
        }
        (Axis::Width | Axis::Heads, Some(TransferRule::Spectral | TransferRule::Standard) | None, _) => 0.0,
        (Axis::Depth, _, None) => 0.0,
        (Axis::Depth, ..) if averaged => 0.0,
        (Axis::Depth, Some(TransferRule::Completep), Some(_)) => -1.0,
        (Axis::Depth, Some(TransferRule::Mup | TransferRule::Hyperp | TransferRule::Umup), Some(_))
            if !layered(base) =>
        {
            -1.0
        }
        (Axis::Depth, Some(TransferRule::Spectral | TransferRule::Standard), Some(c)) if c.norms().1 => 0.0,
        (Axis::Depth, ..) => -0.5,
    }
}

/// The weight of a component, or of the model, whose own part of the movement has the slope that is
/// furthest off.
fn blamed(s: &Subject, base: &Spec, line: &Line) -> Result<Option<String>, VerifyError> {
    let component = line.of.split_once('.').map(|(name, _)| name);
    let component = component.filter(|name| base.model.components.contains_key(*name));
    let mut all: Vec<IndexMap<String, f64>> = vec![];
    for k in line.over.scales() {
        let mut own = IndexMap::new();
        measured(s, &line.over.sized(base, k), line.over, Some((&line.of, &mut own)))?;
        all.push(own);
    }
    let inside = |name: &str| component.is_none_or(|c| name.contains(&format!(".{c}.")));
    let mut worst: Option<(String, f64)> = None;
    for name in all[0].keys().filter(|name| inside(name) && all.iter().all(|at| at.contains_key(*name))) {
        let values: Vec<Vec<f64>> = all.iter().map(|at| vec![at[name]]).collect();
        let Some(slope) = slope(&line.over.scales(), &values) else { continue };
        let off = (slope.slope - line.expected).abs();
        if worst.as_ref().is_none_or(|(_, most)| off > *most) {
            worst = Some((name.clone(), off));
        }
    }
    Ok(worst.map(|(name, _)| name))
}

/// Root mean squares of numbers at the start, and of how far they were moved.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    first: f64,
    by: f64,
}

/// The subject at its least width, where nothing is chosen; `None` without a rule.
fn base(s: &Subject) -> Option<Spec> {
    let mut spec = s.spec.clone();
    let mut transfer = spec.train.transfer.take()?;
    let model = &mut spec.model;
    if model.tie && model.hidden == transfer.width {
        model.logit_scale.get_or_insert(1.0);
    }
    model.hidden = model.hidden.max(LEAST[0]);
    for component in model.components.values_mut() {
        component.settle(LEAST[1]);
    }
    plain(&mut model.body);
    let t = &mut spec.train;
    (t.learning_rate, t.warmup, t.schedule, t.eps) = (RATE, 0, Schedule::Constant, 1e-12);
    (t.clip, t.moments, t.random_depth, t.groups) = (None, Precision::F32, None, vec![]);
    if t.optimizer.pace() == Pace::Gradients {
        t.learning_rate = RATE_OF_GRADIENTS;
    }
    t.weight_decay = 0.0;
    for component in model.components.values_mut() {
        if let Component::Defined(own) = component {
            own.scores.clear();
        }
    }
    transfer.width = spec.model.hidden * WIDER[0];
    transfer.depth = s.depth();
    (transfer.sizes, transfer.passes) = (IndexMap::new(), None);
    let sequence = t.sequence.unwrap_or(spec.model.context);
    transfer.tokens = transfer.tokens.map(|_| t.steps * t.batch * sequence);
    t.transfer = Some(transfer);
    Some(spec)
}

/// Without skips and without drawn depths.
fn plain(items: &mut [Item]) {
    fn expr(e: &mut Expr) {
        match e {
            Expr::Component(_) | Expr::Norm => {}
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter_mut().for_each(expr),
            Expr::Skip(_, inner) => {
                *e = (**inner).clone();
                expr(e);
            }
        }
    }
    for item in items {
        match item {
            Item::Layer(e) => expr(e),
            Item::Statement(_) => {}
            Item::Repeat { items, .. } => plain(items),
            Item::Recur { items, looping, .. } => {
                looping.depth = None;
                plain(items);
            }
        }
    }
}

fn widened(base: &Spec, k: u64) -> Spec {
    let mut spec = base.clone();
    spec.model.hidden *= k;
    for component in spec.model.components.values_mut() {
        component.widths().into_iter().for_each(|(_, size)| *size *= k);
    }
    counted(base, &mut spec, k, &|_| true);
    tied(&mut spec, k);
    carried(&mut spec);
    spec
}

/// Parts of definitions in proportion, where their arithmetic counts them, and not larger ones.
fn counted(base: &Spec, spec: &mut Spec, k: u64, grows: &dyn Fn(&Component) -> bool) {
    for (name, component) in &base.model.components {
        let Component::Defined(own) = component else { continue };
        if !grows(component) {
            continue;
        }
        for setting in own.counts(&base.model) {
            let Some(Setting::Size(size)) = own.settings.get(&setting).copied() else { continue };
            if let Some(Component::Defined(wide)) = spec.model.components.get_mut(name) {
                wide.settings.insert(setting.clone(), Setting::Size(size * k));
            }
            if let Some(transfer) = &mut spec.train.transfer {
                transfer.sizes.insert(format!("{name}.{setting}"), size * WIDER[0]);
            }
        }
    }
}

/// Gives attentions the scale of the rule. That of logits is [`tied`]'s.
fn carried(spec: &mut Spec) {
    let logits = spec.model.logit_scale;
    spec.carry();
    spec.model.logit_scale = logits;
}

/// Logits of a head that is the embedding carry their scale to a width. One that is missing, where
/// the subject is no base, stays missing.
fn tied(spec: &mut Spec, k: u64) {
    let rule = spec.train.transfer.as_ref().map(|t| t.rule);
    if spec.model.tie && rule != Some(TransferRule::Standard) {
        spec.model.logit_scale.iter_mut().for_each(|scale| *scale *= WIDER[0] as f64 / k as f64);
    }
}

/// As wide, with larger heads and not more.
fn larger_heads(base: &Spec, k: u64) -> Spec {
    let mut spec = base.clone();
    spec.model.hidden *= k;
    let mut sizes = IndexMap::new();
    for (name, component) in &mut spec.model.components {
        if component.attention().is_some() {
            let kept = component.widths().into_iter().map(|(size, value)| (format!("{name}.{size}"), *value));
            sizes.extend(kept.collect::<Vec<_>>());
        }
        if let Component::Sequence(a) | Component::Depth(a) = component {
            sizes.insert(format!("{name}.head_size"), a.head_size * WIDER[0]);
            (a.head_size, a.scale) = (a.head_size * k, None);
            if let Some(latent) = &mut a.latent {
                for (size, of) in [("turned", &mut latent.turned), ("value", &mut latent.value)] {
                    sizes.insert(format!("{name}.latent.{size}"), *of * WIDER[0]);
                    *of *= k;
                }
            }
            continue;
        }
        component.widths().into_iter().for_each(|(_, size)| *size *= k);
    }
    if let Some(transfer) = &mut spec.train.transfer {
        transfer.sizes = sizes;
    }
    counted(base, &mut spec, k, &|component| !component.attends(&base.model));
    tied(&mut spec, k);
    carried(&mut spec);
    spec
}

/// Whether a layer stands outside loops, so that layers grow in number and not passes.
fn layered(base: &Spec) -> bool {
    base.model.body.iter().any(|item| matches!(item, Item::Layer(_) | Item::Repeat { .. }))
}

/// With `k` times the layers; of a model that has all of them in loops, passes.
fn deepened(base: &Spec, k: u64) -> Spec {
    let (mut spec, layered) = (base.clone(), layered(base));
    for item in &mut spec.model.body {
        match item {
            Item::Layer(_) if k > 1 => *item = Item::Repeat { count: k, items: vec![item.clone()] },
            Item::Repeat { count, .. } => *count *= k,
            Item::Recur { count, .. } if !layered => {
                if let Some(transfer) = &mut spec.train.transfer {
                    transfer.passes = Some(*count);
                }
                *count *= k;
            }
            Item::Layer(_) | Item::Recur { .. } | Item::Statement(_) => {}
        }
    }
    spec
}

fn options(s: &Subject) -> Options {
    Options { depths: vec![], ..s.options() }
}

/// The first move of every tensor of a model of `m` times the width, along that of its law at the
/// rate of the table.
fn moves(
    s: &Subject,
    spec: &Spec,
    shapes: &transfer::Shapes,
    compiled: Compiled,
    m: f64,
    checks: &mut Checks,
) -> Result<(), VerifyError> {
    let device = s.cpu(1);
    let mut model = Model::load(&device, compiled)?;
    model.initialise(s.seed)?;
    model.begin_step()?;
    let scale = Scale { loss: 1.0 / s.batch.learned().max(1) as f32, auxiliary: 1.0 };
    model.backward(&s.batch, scale, None)?;
    let mut before = vec![];
    for t in model.compiled().tensors.clone() {
        if let Some(g) = model.gradient(&t)? {
            let w = widen(&model.get(&t.name)?);
            before.push((t, widen(&g), w));
        }
    }
    model.norm()?;
    model.update(&schedule::scalars(&spec.train, 1))?;
    let rate = schedule::learning_rate(&spec.train, 1);
    for (t, g, w) in before {
        let Some([by, eps]) = transfer::factors(spec, s.depth(), shapes, &t) else { continue };
        let rate = rate * by;
        let mut states = [w.clone(), vec![0.0; w.len()], vec![0.0; w.len()]];
        Law { train: &spec.train, step: 1, rate, decay: 0.0, eps }.apply(&t, &g, &mut states);
        let found = widen(&model.get(&t.name)?);
        let (mut along, mut length) = (0.0, 0.0);
        for ((found, expected), w) in found.iter().zip(&states[0]).zip(&w) {
            along += (found - w) * (expected - w);
            length += (expected - w) * (expected - w);
        }
        if length > 0.0 {
            let what = format!("first move of {} at {m} times the width", t.name);
            checks.check(what, (along / length - 1.0).abs(), MOVE, Place::of_tensor(&t.name));
        }
    }
    Ok(())
}

/// The parts that are measured.
const LOOKED: [&str; 5] = ["layers.*.*.out", "layers.*.out", "embed.out", "head.stream", "head.logits"];
/// The slope of how far probabilities move. By 1/d first scores fall with the root of the size of
/// heads, and what training adds to them stays: small models are between.
const SCORES_MOVE: f64 = -0.25;
/// Probabilities of attentions, where heads grow.
const SCORES: &str = "layers.*.*.scores";

/// The name of a part over all layers: `sa.out`; that of a stream keeps its layer.
fn part(name: &str) -> String {
    let name = if name == "head.logits" { "logits" } else { name };
    let inner = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).map(|(_, inner)| inner);
    inner.filter(|inner| *inner != "out").unwrap_or(name).to_string()
}

/// The values of all parts now.
fn seen(look: &mut Probing, s: &Subject) -> Result<IndexMap<String, Vec<f64>>, VerifyError> {
    look.model().evaluate(&s.batch)?;
    let names: Vec<String> = look.captured().map(|probed| probed.point.name.clone()).collect();
    let mut all: IndexMap<String, Vec<f64>> = IndexMap::new();
    for name in names {
        let values = look.value(&name)?;
        all.entry(part(&name)).or_default().extend(widen(&values));
    }
    Ok(all)
}

/// Which part is looked at, and the share of every weight in its movement.
type Blame<'a> = Option<(&'a str, &'a mut IndexMap<String, f64>)>;

/// Parts of a model, for each seed: at the start, and the mean over steps of how far they moved.
fn measured(
    s: &Subject,
    spec: &Spec,
    over: Axis,
    mut blame: Blame,
) -> Result<IndexMap<String, Vec<Moved>>, VerifyError> {
    let training = options(s);
    let mut captured = LOOKED.map(str::to_string).to_vec();
    if over == Axis::Heads {
        captured.push(SCORES.into());
    }
    let probe = Probe { captured, patched: vec![] };
    let looking = Options { train: false, as_trained: true, probe, ..training.clone() };
    let train = s.pipeline.compile(spec, &training)?;
    let look = s.pipeline.compile(spec, &looking)?;
    let device = s.cpu(1);
    let mut found: IndexMap<String, Vec<Moved>> = IndexMap::new();
    let seeds = if blame.is_some() { 1 } else { SEEDS };
    for seed in 0..seeds {
        let mut model = Model::load(&device, train.clone())?;
        model.initialise(s.seed.wrapping_add(seed))?;
        let mut look = Probing::new(Model::load(&device, look.clone())?)?;
        copy(&model, &mut look)?;
        let before = seen(&mut look, s)?;
        let began = if blame.is_some() { trained(&model)? } else { vec![] };
        let sizes = before.iter().map(|(name, x)| (name, rms(x.iter().copied())));
        let mut moved: IndexMap<&String, Moved> =
            sizes.map(|(name, first)| (name, Moved { first, by: 0.0 })).collect();
        for step in 0..STEPS {
            model.begin_step()?;
            let scale = Scale { loss: 1.0 / s.batch.learned().max(1) as f32, auxiliary: 1.0 };
            model.backward(&s.batch, scale, None)?;
            model.norm()?;
            model.update(&schedule::scalars(&spec.train, step + 1))?;
            copy(&model, &mut look)?;
            for (name, now) in seen(&mut look, s)? {
                if let (Some(moved), Some(before)) = (moved.get_mut(&name), before.get(&name)) {
                    moved.by += rms(now.iter().zip(before).map(|(a, b)| a - b)) / STEPS as f64;
                }
            }
        }
        for (name, moved) in moved {
            found.entry(name.clone()).or_default().push(moved);
        }
        if let Some((of, shares)) = &mut blame {
            let now = seen(&mut look, s)?;
            for (name, values) in began {
                look.model().set(&name, &values)?;
                let without = seen(&mut look, s)?;
                let own = model.get(&name)?;
                look.model().set(&name, &own)?;
                if let (Some(a), Some(b)) = (now.get(*of), without.get(*of)) {
                    shares.insert(name, rms(a.iter().zip(b).map(|(a, b)| a - b)));
                }
            }
        }
    }
    Ok(found)
}

/// Gives a model that is looked into the weights of one that trains.
fn copy(model: &Model, look: &mut Probing) -> Result<(), VerifyError> {
    for t in &model.compiled().tensors {
        look.model().set(&t.name, &model.get(&t.name)?)?;
    }
    Ok(())
}

/// Tensors that are trained, as they are.
fn trained(model: &Model) -> Result<Vec<(String, Vec<f32>)>, VerifyError> {
    let tensors = model.compiled().tensors.iter();
    let trained = tensors.filter(|t| t.gradient.is_some() && t.kind != TensorKind::Balance);
    trained.map(|t| Ok((t.name.clone(), model.get(&t.name)?))).collect()
}

fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = x.fold((0.0, 0.0), |(n, sum), x| (n + 1.0, sum + x * x));
    (sum / f64::max(n, 1.0)).sqrt()
}

/// Of the logarithm of sizes, some for each scale, over that of scales; `None` where there is
/// nothing.
fn slope(scales: &[u64; 4], values: &[Vec<f64>]) -> Option<Slope> {
    if values.iter().flatten().any(|size| *size < 1e-9 || !size.is_finite()) {
        return None;
    }
    let each = |(k, each): (&u64, &Vec<f64>)| {
        let x = (*k as f64).ln();
        each.iter().map(|v| (x, v.ln())).collect::<Vec<_>>()
    };
    let pairs: Vec<(f64, f64)> = scales.iter().zip(values).flat_map(each).collect();
    let n = pairs.len() as f64;
    let (mx, my) = (pairs.iter().map(|p| p.0).sum::<f64>() / n, pairs.iter().map(|p| p.1).sum::<f64>() / n);
    let across = pairs.iter().map(|(x, _)| (x - mx) * (x - mx)).sum::<f64>();
    let slope = pairs.iter().map(|(x, y)| (x - mx) * (y - my)).sum::<f64>() / across;
    let left = pairs.iter().map(|(x, y)| (y - my - slope * (x - mx)).powi(2)).sum::<f64>();
    let half = student_quantile(0.975, n - 2.0) * (left / (n - 2.0) / across).sqrt();
    Some(Slope { slope, low: slope - half, high: slope + half })
}
