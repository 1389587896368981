//! Names are for people: a model whose components are called otherwise is the same model.

use super::subject::{Subject, backward};
use super::{Checks, Place, Proof, VerifyError};
use dreamc_compiler::Options;
use dreamc_compiler::architecture::components;
use dreamc_compiler::count::{self, Counts, counted_as};
use dreamc_compiler::ir::random::Rng;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Attention, Component, Expr, Item};
use dreamc_runtime::generate::NextLogits;
use dreamc_runtime::train::schedule;
use indexmap::IndexMap;

/// Words that the compiler, the plan and checkpoints have for things of their own.
const WORDS: [&str; 40] = [
    "saved",
    "observed",
    "prepared",
    "d",
    "head",
    "embedding",
    "embed",
    "stream",
    "predictor",
    "predictor8",
    "skip",
    "merged",
    "norm",
    "residual_norm",
    "x",
    "y",
    "m",
    "v",
    "aux",
    "loss",
    "nll",
    "logits",
    "ids",
    "prefill",
    "decode",
    "router",
    "routers",
    "experts",
    "counts",
    "bias",
    "keys",
    "values",
    "cached",
    "one",
    "hidden",
    "seq",
    "layer0",
    "layers",
    "weights",
    "gradients",
];

/// Names do not matter.
pub struct Names;

impl Proof for Names {
    fn name(&self) -> &'static str {
        "names"
    }

    fn claim(&self) -> &'static str {
        "names of components do not matter"
    }

    fn how(&self) -> &'static str {
        "every component renamed at random: bits of losses, logits, gradients, weights after a step and decoded logits; \
         declared counts"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        if components(&s.spec.model).values().any(|component| component.reads_by_name()) {
            return Ok(Some("a definition reads values of a component by its name".into()));
        }
        // Patterns are of names, and choose what is trained.
        let mut spec = s.spec.clone();
        (spec.train.only, spec.train.freeze, spec.train.groups) = (vec![], vec![], vec![]);
        let plain = s.with(spec)?;
        let mut rng = Rng::new(s.seed ^ 0x6e61_6d65);
        for round in 0..ROUNDS {
            let names = draw(&plain.spec, &mut rng);
            let mut renamed = plain.with(rename(&plain.spec, &names))?;
            let (from, to) =
                (plain.compile(&plain.options())?.tensors, renamed.compile(&renamed.options())?.tensors);
            for (a, b) in from.iter().zip(&to) {
                renamed.weights.insert(b.name.clone(), plain.weights[&a.name].clone());
            }
            let called = names.iter().map(|(a, b)| format!("{a} is {b}")).collect::<Vec<_>>().join(", ");
            checks.check(
                format!("tensors where {called}"),
                from.len().abs_diff(to.len()) as f64,
                0.0,
                Place::default(),
            );
            // Gradients and weights by their order: they have other names.
            let (a, b) = (results(&plain)?, results(&renamed)?);
            for ((what, a), (_, b)) in a.iter().zip(&b) {
                let bits = |x: &f32| x.to_bits();
                let other = a.iter().map(bits).zip(b.iter().map(bits)).filter(|(a, b)| a != b).count();
                let other = other + a.len().abs_diff(b.len());
                checks.check(format!("bits of {what} where {called}"), other as f64, 0.0, Place::default());
            }
            // The count of what is declared takes no time: once is enough.
            if round == 0 {
                let counts = |s: &Subject| -> Result<Counts, VerifyError> {
                    let options = count::Options { tokens: s.sequence() as u64, ..Default::default() };
                    Ok(s.pipeline.count(&s.spec, &options)?)
                };
                let expected = called_as(counts(&plain)?, &names);
                let off = if counts(&renamed)? == expected { 0.0 } else { 1.0 };
                checks.check(format!("counts where {called}"), off, 0.0, Place::default());
            }
        }
        Ok(None)
    }
}

/// How often all components are renamed.
const ROUNDS: u64 = 3;

/// A name for every component: a word of the compiler, or letters that mean nothing.
fn draw(spec: &Spec, rng: &mut Rng) -> IndexMap<String, String> {
    let mut names: IndexMap<String, String> = IndexMap::new();
    for component in spec.model.components.keys() {
        let name = loop {
            let name = match rng.below(4) {
                0 => (0..2 + rng.below(9)).map(|_| char::from(b'a' + rng.below(26) as u8)).collect(),
                _ => WORDS[rng.below(WORDS.len() as u64) as usize].to_string(),
            };
            if !names.values().any(|n| *n == name) {
                break name;
            }
        };
        names.insert(component.clone(), name);
    }
    names
}

fn rename(spec: &Spec, names: &IndexMap<String, String>) -> Spec {
    fn expr(e: &mut Expr, names: &IndexMap<String, String>) {
        match e {
            Expr::Component(name) => name.clone_from(&names[name.as_str()]),
            Expr::Norm => {}
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter_mut().for_each(|t| expr(t, names)),
            Expr::Skip(_, inner) => expr(inner, names),
        }
    }
    fn items(all: &mut [Item], names: &IndexMap<String, String>) {
        for item in all {
            match item {
                Item::Layer(e) => expr(e, names),
                Item::Statement(_) => {}
                Item::Repeat { items: inner, .. } | Item::Recur { items: inner, .. } => items(inner, names),
            }
        }
    }
    let mut spec = spec.clone();
    let components = std::mem::take(&mut spec.model.components);
    spec.model.components = components.into_iter().map(|(name, c)| (names[&name].clone(), c)).collect();
    for component in spec.model.components.values_mut() {
        if let Component::Sequence(Attention { kv_from: Some(source), .. }) = component {
            source.clone_from(&names[source.as_str()]);
        }
    }
    if let Some(adapt) = &mut spec.model.adapt {
        adapt.components.iter_mut().for_each(|name| name.clone_from(&names[name.as_str()]));
    }
    items(&mut spec.model.body, names);
    spec
}

/// The counts as they would be called under other names.
fn called_as(mut counts: Counts, names: &IndexMap<String, String>) -> Counts {
    let names: IndexMap<String, String> = names.iter().map(|(a, b)| (counted_as(a), counted_as(b))).collect();
    let call = |key: String| names.get(&key).cloned().unwrap_or(key);
    let memory = &mut counts.memory_bytes;
    let parameters = &mut counts.parameters.by_component;
    for table in [parameters, &mut memory.activations_by_component, &mut memory.caches_by_component] {
        *table = std::mem::take(table).into_iter().map(|(k, v)| (call(k), v)).collect();
    }
    let flops = &mut counts.flops_per_token.decode_by_component;
    *flops = std::mem::take(flops).into_iter().map(|(k, v)| (call(k), v)).collect();
    counts
}

/// All that a model computes, in an order in which names play no part.
fn results(s: &Subject) -> Result<Vec<(String, Vec<f32>)>, VerifyError> {
    let device = s.cpu(1);
    let mut model = s.load(&device, &Options { depths: vec![], ..s.options() })?;
    let mut all = vec![("losses of tokens".to_string(), model.evaluate(&s.batch)?)];
    all.push(("logits of evaluation".into(), model.all_logits()?));
    let trained = backward(&mut model, &s.batch, None)?;
    all.push(("the loss".into(), vec![trained.loss as f32]));
    all.push(("logits of training".into(), model.all_logits()?));
    for tensor in model.compiled().tensors.clone() {
        if let Some(gradient) = model.gradient(&tensor)? {
            all.push((format!("the gradient of {}", tensor.name), gradient));
        }
    }
    model.norm()?;
    model.update(&schedule::scalars(&s.spec.train, 1))?;
    for (name, _) in model.entries() {
        let values = model.get(&name)?;
        all.push((format!("{name} after a step"), values));
    }
    if s.samples() {
        all.push(("decoded logits".into(), decoded(s)?));
    }
    Ok(all)
}

fn decoded(s: &Subject) -> Result<Vec<f32>, VerifyError> {
    let mut cached = s.cached(&s.cpu(1), &Rewriting::default())?;
    let t = s.sequence();
    let n = 3.min(t);
    let row = |r: &[i32], n: usize| r[..n].iter().map(|&i| i as u32).collect::<Vec<u32>>();
    let mut logits = cached.start(&s.plain.ids.chunks(t).map(|r| row(r, n)).collect::<Vec<_>>())?;
    if t > n {
        let next: Vec<u32> = s.plain.ids.chunks(t).map(|r| r[n] as u32).collect();
        logits.extend(cached.advance(&next)?);
    }
    Ok(logits.concat())
}
