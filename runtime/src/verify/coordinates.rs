//! Sizes of activations do not follow the width: the coordinate check of muP (Yang et al.,
//! *Tensor Programs V*, 2203.03466, appendix D.1).
//!
//! *In*: a subject whose recipe has a `transfer`. The model is taken at four widths, with the least
//! as the base: hidden and intermediate sizes and numbers of heads grow together. Each takes five
//! steps from its own first values on the subject's batch. *Out*: for the stream at every depth
//! and for the logits, the slope of the logarithm of their size over that of the width.
//!
//! Choices of routers would jump: every expert is chosen, and nothing skips.

use super::steps::Law;
use super::subject::{self, Subject};
use super::{Checks, Place, Proof, VerifyError, transfer, widen};
use crate::model::{Model, Scale};
use crate::train::schedule;
use dreamc_compiler::compiled::{Entry, Init};
use dreamc_compiler::{Compiled, Options};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, Expr, Item, Precision, Router, Schedule};
use indexmap::IndexMap;

/// Sizes of streams and logits do not follow the width.
pub struct Coordinates;

/// Widths over that of the subject.
const WIDER: [u64; 4] = [2, 4, 8, 16];
/// The least hidden and intermediate sizes of a subject.
const LEAST: [u64; 2] = [8, 4];
/// Models of each width.
const SEEDS: u64 = 2;
/// Steps of each.
const STEPS: u64 = 5;
/// Small, so that what moves is in proportion to it.
const RATE: f64 = 1e-3;
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
        "slopes of streams and logits over four widths, at the start and in how far five steps move them, under the recipe's \
         `transfer`; of every tensor the deviation of its first values and its first move against the table of the rule"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let Some(base) = base(s) else { return Ok(Some("the recipe has no `transfer`".into())) };
        let mut sizes = vec![];
        for k in WIDER {
            sizes.push(measured(s, &widened(&base, k))?);
        }
        let mut first: IndexMap<String, f64> = IndexMap::new();
        for (i, k) in WIDER.into_iter().enumerate() {
            let spec = widened(&base, k);
            let compiled = s.pipeline.compile(&spec, &options(s))?;
            let m = k as f64 / WIDER[0] as f64;
            for t in &compiled.tensors {
                if let (Some(power), Init::Normal(deviation)) = (transfer::deviation(&spec, t), t.init) {
                    let at_base = *first.entry(t.name.clone()).or_insert(deviation);
                    let e = (deviation / (at_base * m.powf(power)) - 1.0).abs();
                    let what = format!("deviation of first values of {} at {m} times the width", t.name);
                    checks.check(what, e, 1e-9, Place::of_tensor(&t.name));
                }
            }
            if i < MOVED {
                moves(s, &spec, compiled, m, checks)?;
            }
        }
        let depths = sizes.iter().map(|(streams, _)| streams.len()).min().unwrap_or(0);
        let places = (0..depths).map(|l| (format!("the stream behind {l} layers"), 0.0, Some(l)));
        // First logits are sums of numbers whose deviation falls with the width.
        for (what, first, l) in places.chain([("the logits".to_string(), -0.5, None)]) {
            let at = |pick: fn(&Moved) -> f64| {
                sizes.iter().map(move |(streams, logits)| pick(l.map_or(logits, |l| &streams[l])))
            };
            let mut see = |what: String, expected: f64, sizes: Vec<f64>| {
                if let Some(slope) = slope(&sizes) {
                    checks.check(what, (slope - expected).abs(), SLOPE, Place::default());
                }
            };
            see(format!("slope of {what} at the start"), first, at(|m| m.first).collect());
            see(format!("slope of the movement of {what}"), 0.0, at(|m| m.by).collect());
        }
        Ok(None)
    }
}

/// Root mean squares of numbers at the start, and of how far they were moved.
#[derive(Clone, Copy, Default)]
struct Moved {
    first: f64,
    by: f64,
}

/// The subject at its least width, where nothing is chosen; `None` without a rule.
fn base(s: &Subject) -> Option<Spec> {
    let mut spec = s.spec.clone();
    let mut transfer = spec.train.transfer?;
    let model = &mut spec.model;
    model.hidden = model.hidden.max(LEAST[0]);
    for component in model.components.values_mut() {
        match component {
            Component::Sequence(a) | Component::Depth(a) => {
                if let Some(p) = &mut a.projection {
                    p.count = Some(1);
                    unbalanced(&mut p.router);
                }
            }
            Component::Experts(e) => {
                e.intermediate = e.intermediate.max(LEAST[1]);
                e.active = e.count + e.noop;
                (e.router.groups, e.router.topk_groups) = (1, 1);
                e.round = None;
                unbalanced(&mut e.router);
            }
            Component::Mlp(m) => m.intermediate = m.intermediate.max(LEAST[1]),
        }
    }
    plain(&mut model.body);
    let t = &mut spec.train;
    (t.learning_rate, t.warmup, t.schedule, t.eps) = (RATE, 0, Schedule::Constant, 1e-12);
    (t.clip, t.moments, t.random_depth, t.groups) = (None, Precision::F32, None, vec![]);
    t.weight_decay = 0.0;
    transfer.width = spec.model.hidden * WIDER[0];
    transfer.depth = s.depth();
    let sequence = t.sequence.unwrap_or(spec.model.context);
    transfer.tokens = transfer.tokens.map(|_| t.steps * t.batch * sequence);
    t.transfer = Some(transfer);
    Some(spec)
}

fn unbalanced(router: &mut Router) {
    (router.balance, router.load_balance_loss, router.z_loss) = (None, 0.0, 0.0);
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
        match component {
            Component::Sequence(a) | Component::Depth(a) => {
                a.heads *= k;
                a.kv_heads *= k;
                if let Some(latent) = &mut a.latent {
                    latent.query = latent.query.map(|n| n * k);
                    latent.kv *= k;
                }
            }
            Component::Experts(e) => e.intermediate *= k,
            Component::Mlp(m) => m.intermediate *= k,
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
        let rate = rate * transfer::rate(spec, s.depth(), &t);
        let mut states = [w.clone(), vec![0.0; w.len()], vec![0.0; w.len()]];
        Law { train: &spec.train, step: 1, rate, decay: 0.0 }.apply(&t, &g, &mut states);
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

/// Streams and logits of a model, over seeds and steps.
fn measured(s: &Subject, spec: &Spec) -> Result<(Vec<Moved>, Moved), VerifyError> {
    let compiled = s.pipeline.compile(spec, &options(s))?;
    let device = s.cpu(1);
    let (mut streams, mut logits): (Vec<Moved>, Moved) = Default::default();
    for seed in 0..SEEDS {
        let mut model = Model::load(&device, compiled.clone())?;
        model.initialise(s.seed.wrapping_add(seed))?;
        let mut before: Vec<Vec<f64>> = vec![];
        for step in 0..=STEPS {
            model.begin_step()?;
            let scale = Scale { loss: 1.0 / s.batch.learned().max(1) as f32, auxiliary: 1.0 };
            model.backward(&s.batch, scale, None)?;
            let mut now = subject::streams(&mut model, Entry::Whole)?;
            now.push(widen(&model.all_logits()?));
            if step == 0 {
                streams.resize(now.len() - 1, Moved::default());
                before.clone_from(&now);
            }
            for (i, (now, before)) in now.iter().zip(&before).enumerate() {
                let of = streams.get_mut(i).unwrap_or(&mut logits);
                if step == 0 {
                    of.first += rms(now.iter().copied()) / SEEDS as f64;
                } else {
                    let moved = now.iter().zip(before).map(|(a, b)| a - b);
                    of.by += rms(moved) / (SEEDS * STEPS) as f64;
                }
            }
            model.norm()?;
            model.update(&schedule::scalars(&spec.train, step + 1))?;
        }
    }
    Ok((streams, logits))
}

fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = x.fold((0.0, 0.0), |(n, sum), x| (n + 1.0, sum + x * x));
    (sum / f64::max(n, 1.0)).sqrt()
}

/// Of the logarithm of sizes over that of widths; `None` where there is nothing.
fn slope(sizes: &[f64]) -> Option<f64> {
    if sizes.iter().any(|size| *size < 1e-9) {
        return None;
    }
    let n = sizes.len() as f64;
    let x: Vec<f64> = WIDER.iter().map(|&k| (k as f64).ln()).collect();
    let (mx, my) = (x.iter().sum::<f64>() / n, sizes.iter().map(|s| s.ln()).sum::<f64>() / n);
    let (top, bottom) = x.iter().zip(sizes).fold((0.0, 0.0), |(top, bottom), (x, size)| {
        (top + (x - mx) * (size.ln() - my), bottom + (x - mx) * (x - mx))
    });
    Some(top / bottom)
}
