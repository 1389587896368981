//! Two ways to say one thing: rewritten and not, a wrapper around every token and none.

use super::subject::{Subject, apart, backward, streams};
use super::{Checks, Place, Proof, VerifyError, blame, error, length, widen};
use dreamc_compiler::Options;
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::{Form, skip};
use dreamc_compiler::oracle::Forward;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Expr, Item, Scorer, Skip, SkipGate, SkipInput, SkipRule, Stream};
use dreamc_runtime::generate::NextLogits;
use dreamc_runtime::model::Model;

/// How far what was rewritten may be off in f64.
const EXACT: f64 = 1e-9;

/// Rewritten equals unrewritten.
pub struct Rewritten;

impl Proof for Rewritten {
    fn name(&self) -> &'static str {
        "rewritten"
    }

    fn claim(&self) -> &'static str {
        "rewritten equals unrewritten"
    }

    fn how(&self) -> &'static str {
        "logits, loss and gradients in f64 and on the CPU; evaluation, prefill and decoding on the CPU"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        s.conditioned()?;
        let off = Rewriting::off();
        let (before, after) =
            (s.oracle(None, &off, Form::Training)?, s.oracle(None, &Rewriting::default(), Form::Training)?);
        let exact = EXACT.max(0.1 * s.noise()?.logits);
        let (a, b) = (s.forward(&before, &s.batch)?, s.forward(&after, &s.batch)?);
        let e = error(b.logits.floats(), a.logits.floats());
        let wide = |x: &Forward| x.streams.iter().map(|t| t.floats().to_vec()).collect::<Vec<_>>();
        let place =
            if e > exact { blame::first_stream(s, &wide(&b), &wide(&a), exact) } else { Place::default() };
        checks.check("logits in f64", e, exact, place);
        let (plain, rewritten) = (s.evaluation(&before, &s.batch)?, s.evaluation(&after, &s.batch)?);
        let longest =
            plain.gradients.values().map(|g| length(g.floats().iter().copied())).fold(0.0, f64::max);
        for (name, expected) in &plain.gradients {
            let e = rewritten
                .gradients
                .get(name)
                .map_or(f64::INFINITY, |g| apart(g.floats(), expected.floats(), longest));
            let tolerance = EXACT.max(0.05 * s.gradient_tolerance(name)? * 1e-3);
            checks.check(format!("gradient of {name} in f64"), e, tolerance, Place::of_tensor(name));
        }
        let device = s.cpu(1);
        let mut a = s.load(&device, &Options { rewrite: off.clone(), ..s.options() })?;
        let mut b = s.load(&device, &s.options())?;
        same(s, &mut b, &mut a, checks)?;
        if s.samples() {
            let written = |rewrite: &Rewriting| written(s, rewrite);
            let (a, b) = (written(&off)?, written(&Rewriting::default())?);
            let tolerance = s.logits_tolerance()?;
            for (i, (a, b)) in a.iter().zip(&b).enumerate() {
                let what = if i == 0 { "prefill".to_string() } else { format!("token {i} after it") };
                checks.check(format!("logits of {what}"), error(b, a), tolerance, Place::default());
            }
        }
        Ok(None)
    }
}

/// Logits of a prompt, and of some tokens after it.
fn written(s: &Subject, rewrite: &Rewriting) -> Result<Vec<Vec<f64>>, VerifyError> {
    let t = s.sequence();
    let n = 3.min(t);
    let mut cached = s.cached(&s.cpu(1), rewrite)?;
    let rows: Vec<Vec<u32>> = s.plain.ids.chunks(t).map(|r| r.iter().map(|&i| i as u32).collect()).collect();
    let prompts: Vec<Vec<u32>> = rows.iter().map(|r| r[..n].to_vec()).collect();
    let mut all = vec![cached.start(&prompts)?];
    for at in n..t {
        let next: Vec<u32> = rows.iter().map(|r| r[at]).collect();
        all.push(cached.advance(&next)?);
    }
    Ok(all.into_iter().map(|rows| rows.iter().flat_map(|r| widen(r)).collect()).collect())
}

/// Whether two models on a device evaluate and differentiate alike; `found` may have tensors more.
fn same(
    s: &Subject,
    found: &mut Model,
    expected: &mut Model,
    checks: &mut Checks,
) -> Result<(), VerifyError> {
    let tolerance = s.logits_tolerance()?;
    expected.evaluate(&s.batch)?;
    found.evaluate(&s.batch)?;
    let e = error(&widen(&found.all_logits()?), &widen(&expected.all_logits()?));
    let place = |found: &mut Model, expected: &mut Model| -> Result<Place, VerifyError> {
        let (a, b) = (streams(found, Entry::Whole)?, streams(expected, Entry::Whole)?);
        Ok(blame::first_stream(s, &a, &b, tolerance))
    };
    let at = if e > tolerance { place(found, expected)? } else { Place::default() };
    checks.check("logits of evaluation", e, tolerance, at);
    let a = backward(expected, &s.batch, None)?;
    let b = backward(found, &s.batch, None)?;
    let e = error(&b.logits, &a.logits);
    let at = if e > tolerance { place(found, expected)? } else { Place::default() };
    checks.check("logits of training", e, tolerance, at);
    let e = (b.loss - a.loss).abs() / a.loss.abs().max(1e-3);
    checks.check("loss", e, tolerance, Place::default());
    let longest = a.gradients.values().map(|g| length(g.iter().copied())).fold(0.0, f64::max);
    for (name, expected) in a.gradients.iter().rev() {
        let e = b.gradients.get(name).map_or(f64::INFINITY, |g| apart(g, expected, longest));
        checks.check(format!("gradient of {name}"), e, s.gradient_tolerance(name)?, Place::of_tensor(name));
    }
    Ok(())
}

/// A skip that every token takes part in changes nothing.
pub struct Plain;

impl Proof for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn claim(&self) -> &'static str {
        "a skip with C = 1 is the plain layer"
    }

    fn how(&self) -> &'static str {
        "every skip set to capacity 1 and score 1 against the model without: logits, loss, gradients, decoding"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        if s.spec.model.stream != Stream::Sum {
            return Ok(Some("a skip is one unit of such a wiring, and a sum inside".into()));
        }
        let (mut wrapped, mut plain) = (s.spec.clone(), s.spec.clone());
        let mut skips = 0;
        edit(&mut wrapped, &mut |skip, inner| match whole(skip) {
            Some(skip) => {
                skips += 1;
                Expr::Skip(Box::new(skip), Box::new(inner))
            }
            // The last update of a token has a factor below 1.
            None => inner,
        });
        if skips == 0 {
            return Ok(Some("no skip".into()));
        }
        edit(&mut plain, &mut |_, inner| inner);
        let plain = Subject::new(plain, s.seed, None, s.devices, s.pipeline)?;
        plain.conditioned()?;
        let mut wrapped = plain.with(wrapped)?;
        for t in &wrapped.compile(&Options { depths: vec![], ..wrapped.options() })?.tensors {
            let score = match t.part {
                skip::part::SCALE => 0.0,
                skip::part::OFFSET => 1.0,
                _ => continue,
            };
            wrapped.weights.insert(t.name.clone(), Tensor::float(&[1], vec![score]));
        }
        let device = s.cpu(1);
        let mut a = plain.load(&device, &Options { depths: vec![], ..plain.options() })?;
        let mut b = wrapped.load(&device, &Options { depths: vec![], ..wrapped.options() })?;
        same(&plain, &mut b, &mut a, checks)?;
        if wrapped.samples() {
            let off = Rewriting::default();
            let tolerance = plain.logits_tolerance()?;
            for (i, (b, a)) in written(&wrapped, &off)?.iter().zip(&written(&plain, &off)?).enumerate() {
                let what = if i == 0 { "prefill".to_string() } else { format!("token {i} after it") };
                checks.check(format!("logits of {what}"), error(b, a), tolerance, Place::default());
            }
        }
        Ok(None)
    }
}

/// A skip that takes every token, with a score of 1 where its router's scale is 0 and its offset 1;
/// `None` where no such score exists.
fn whole(skip: &Skip) -> Option<Skip> {
    let rule = match &skip.rule {
        SkipRule::TopK { .. } => SkipRule::TopK { capacity: 1.0, causal: None },
        SkipRule::Threshold { penalty, pooled, .. } => {
            SkipRule::Threshold { capacity: 1.0, penalty: *penalty, pooled: *pooled }
        }
        SkipRule::DepthChoice { .. } => return None,
    };
    let (each_pass, gate, nested) = (false, SkipGate::Score, false);
    let (gate_scale, whole, scorer) = (1.0, false, Scorer::PLAIN);
    let input = SkipInput::NormOnly;
    Some(Skip {
        rule,
        input,
        capacities: vec![],
        each_pass,
        gate,
        gate_scale,
        whole,
        nested,
        scorer,
        ..skip.clone()
    })
}

/// Replaces every `skip`, the inner ones first.
fn edit(spec: &mut Spec, with: &mut dyn FnMut(&Skip, Expr) -> Expr) {
    fn expr(e: &Expr, with: &mut dyn FnMut(&Skip, Expr) -> Expr) -> Expr {
        // A term that is now of the kind around it becomes several.
        let mut flat = |terms: &[Expr], sequential: bool| {
            let mut all = vec![];
            for term in terms {
                match expr(term, with) {
                    Expr::Sequential(inner) if sequential => all.extend(inner),
                    Expr::Parallel(inner) if !sequential => all.extend(inner),
                    term => all.push(term),
                }
            }
            all
        };
        match e {
            Expr::Component(_) | Expr::Norm => e.clone(),
            Expr::Sequential(terms) => Expr::Sequential(flat(terms, true)),
            Expr::Parallel(terms) => Expr::Parallel(flat(terms, false)),
            Expr::Skip(skip, inner) => {
                let inner = expr(inner, with);
                with(skip, inner)
            }
        }
    }
    fn items(all: &mut [Item], with: &mut dyn FnMut(&Skip, Expr) -> Expr) {
        for item in all {
            match item {
                Item::Layer(e) => *e = expr(e, with),
                Item::Statement(_) => {}
                Item::Repeat { items: inner, .. } | Item::Recur { items: inner, .. } => items(inner, with),
            }
        }
    }
    items(&mut spec.model.body, with);
}
