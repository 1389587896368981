//! Caches, batches, and what comes later: nothing but its own past changes a token's logits.

use super::formulas::share_to_leave;
use super::subject::{ROWS, Subject, add_backward, apart, backward, streams};
use super::{Checks, Place, Proof, VerifyError, blame, difference, error, largest, length, widen};
use dreamc_compiler::Options;
use dreamc_compiler::architecture::components;
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::lower::Form;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::define::graph::{Function, Node};
use dreamc_dsl::spec::{Component, Expr, Item, Skip, SkipLevel, SkipRule};
use dreamc_runtime::generate::{Next, NextLogits};
use dreamc_runtime::model::Scale;

const AHEAD: &str = "a `skip` looks at later tokens, and the model is never sampled";
const UNCACHED: &str =
    "a `skip` looks at later tokens or merges tokens: the model is never sampled with caches";

/// Cached decoding equals uncached.
pub struct Cached;

impl Proof for Cached {
    fn name(&self) -> &'static str {
        "cached"
    }

    fn claim(&self) -> &'static str {
        "cached decoding equals uncached"
    }

    fn how(&self) -> &'static str {
        "prefill of prompts of two lengths and decoding token by token, against the forward over the whole rows"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        if !s.samples() {
            return Ok(Some(UNCACHED.into()));
        }
        s.conditioned()?;
        self.compare(s, checks, None)?;
        if let Some(share) = share_to_leave(s) {
            self.compare(s, checks, Some(share))?;
        }
        Ok(None)
    }
}

impl Cached {
    /// Where `exit` is given, tokens leave their loop by it.
    fn compare(&self, s: &Subject, checks: &mut Checks, exit: Option<f64>) -> Result<(), VerifyError> {
        let device = s.cpu(1);
        let options = match exit {
            None => s.options(),
            Some(_) => Options { train: false, depths: vec![], exit, ..s.options() },
        };
        let mut whole = s.load(&device, &options)?;
        whole.evaluate(&s.plain)?;
        let t = s.sequence();
        // Tolerances are relative to the largest logit there is; those of a token may all be small.
        let (scale, tolerance) = (largest(&widen(&whole.all_logits()?)), s.logits_tolerance()?);
        let options = Options { exit, ..s.cached_options(&Rewriting::default()) };
        let mut cached = s.cached_by(&device, &options)?;
        let rows: Vec<Vec<u32>> =
            s.plain.ids.chunks(t).map(|r| r.iter().map(|&i| i as u32).collect()).collect();
        // The second prompt is shorter by a token, and both are read in pieces where there is room
        // for that.
        let mut lengths: Vec<usize> = (0..ROWS).map(|row| 4usize.saturating_sub(row).clamp(1, t)).collect();
        let prompts: Vec<Vec<u32>> = rows.iter().zip(&lengths).map(|(r, &n)| r[..n].to_vec()).collect();
        let mut logits = cached.start(&prompts)?;
        let mut program = "prefill";
        loop {
            for row in 0..ROWS {
                let at = lengths[row] - 1;
                let expected = widen(&whole.logits(row, at)?);
                let e = difference(&widen(&logits[row]), &expected) / scale;
                let place = if e <= tolerance || program == "prefill" {
                    Place::default()
                } else {
                    let hidden = s.spec.model.hidden as usize;
                    let part = |all: Vec<Vec<f64>>, from: usize| -> Vec<Vec<f64>> {
                        all.iter().map(|x| x[from * hidden..][..hidden].to_vec()).collect()
                    };
                    let a = part(streams(cached.model(), Entry::Decode)?, row);
                    let b = part(streams(&mut whole, Entry::Whole)?, row * t + at);
                    blame::first_stream(s, &a, &b, tolerance)
                };
                let leaving = if exit.is_some() { ", leaving early" } else { "" };
                let what = format!("logits of row {row}, token {at} ({program}{leaving})");
                checks.check(what, e, tolerance, place);
            }
            if lengths.iter().any(|&n| n >= t) || lengths.iter().any(|&n| n >= s.spec.model.context as usize)
            {
                return Ok(());
            }
            let next: Vec<u32> = rows.iter().zip(&lengths).map(|(r, &n)| r[n]).collect();
            lengths.iter_mut().for_each(|n| *n += 1);
            logits = cached.advance(&next)?;
            program = "decode";
        }
    }
}

/// Neither the number of rows nor what is in them changes a row.
pub struct Batches;

impl Proof for Batches {
    fn name(&self) -> &'static str {
        "batch"
    }

    fn claim(&self) -> &'static str {
        "batch size does not change a row"
    }

    fn how(&self) -> &'static str {
        "rows together against rows alone; decoding with the rows in another order, and after tokens that were kept, to the bit; gradients of \
         rows added up"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        s.conditioned()?;
        let device = s.cpu(1);
        let mut together = s.load(&device, &s.options())?;
        let mut alone = s.load(&device, &Options { batch: 1, ..s.options() })?;
        let t = s.sequence();
        let vocab = s.spec.model.vocab as usize;
        let tolerance = s.logits_tolerance()?;
        together.evaluate(&s.batch)?;
        let all = widen(&together.all_logits()?);
        let all_streams = streams(&mut together, Entry::Whole)?;
        for row in 0..ROWS {
            alone.evaluate(&s.batch.slice(row, 1))?;
            let found = widen(&alone.all_logits()?);
            let e = error(&found, &all[row * t * vocab..][..t * vocab]);
            let mut place = Place::default();
            if e > tolerance {
                let one = streams(&mut alone, Entry::Whole)?;
                let n = one.first().map_or(0, Vec::len);
                let there: Vec<Vec<f64>> = all_streams.iter().map(|x| x[row * n..][..n].to_vec()).collect();
                place = blame::first_stream(s, &one, &there, tolerance);
            }
            checks.check(format!("logits of row {row}"), e, tolerance, place);
        }

        if s.samples() {
            let mut cached = s.cached(&device, &Rewriting::default())?;
            // A text of one token shows what a row has left of the text before.
            for n in [4.min(t - 1).max(1), 1] {
                turned(s, checks, &mut cached, n)?;
            }
            if t > 1 {
                goes_on(s, checks, &mut cached, 4.min(t - 1))?;
            }
        }

        if means_of_routers(s) {
            return Ok(None);
        }
        // Losses of routers are means over a micro-batch, of tokens that are as many in every row.
        let sum = backward(&mut together, &s.batch, None)?;
        alone.drop_step()?;
        let scale = Scale { loss: 1.0 / s.batch.learned().max(1) as f32, auxiliary: 1.0 / ROWS as f32 };
        let mut parts = None;
        for row in 0..ROWS {
            parts = Some(add_backward(&mut alone, &s.batch.slice(row, 1), scale, None, row == 0)?);
        }
        let Some(parts) = parts else { return Ok(None) };
        let longest = sum.gradients.values().map(|g| length(g.iter().copied())).fold(0.0, f64::max);
        for (name, expected) in &sum.gradients {
            let e = parts.gradients.get(name).map_or(f64::INFINITY, |g| apart(g, expected, longest));
            checks.check(
                format!("gradient of {name}, added up"),
                e,
                s.gradient_tolerance(name)?,
                Place::of_tensor(name),
            );
        }
        Ok(None)
    }
}

/// The first `n` tokens of every row.
fn prompts(s: &Subject, n: usize) -> Vec<Vec<u32>> {
    s.plain.ids.chunks(s.sequence()).map(|r| r[..n].iter().map(|&i| i as u32).collect()).collect()
}

/// The tokens after them.
fn behind(s: &Subject, n: usize) -> Vec<u32> {
    s.plain.ids.chunks(s.sequence()).map(|r| r[n] as u32).collect()
}

/// How many bits of logits are others.
fn other_bits(a: &[f32], b: &[f32]) -> f64 {
    let other = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    (other + a.len().abs_diff(b.len())) as f64
}

/// Texts that begin with `n` tokens are written the same in one order of rows as in another,
/// whatever was in the rows.
fn turned(
    s: &Subject,
    checks: &mut Checks,
    cached: &mut dyn NextLogits,
    n: usize,
) -> Result<(), VerifyError> {
    let mut seen = vec![];
    let mut prompts = prompts(s, n);
    for turn in 0..2 {
        let mut logits = cached.start(&prompts)?;
        if s.sequence() > n {
            let mut next = behind(s, n);
            next.rotate_left(turn);
            logits.extend(cached.advance(&next)?);
        }
        logits.chunks_mut(ROWS).for_each(|l| l.rotate_right(turn));
        seen.push(logits.into_iter().flatten().collect::<Vec<f32>>());
        prompts.rotate_left(1);
    }
    let what = format!("bits of decoded logits with the rows turned, after {n} tokens");
    checks.check(what, other_bits(&seen[0], &seen[1]), 0.0, Place::default());
    Ok(())
}

/// A text whose first tokens were kept, and put into a row that another text had, goes on as it
/// does where it is: all that decoding reads of them is kept.
fn goes_on(
    s: &Subject,
    checks: &mut Checks,
    cached: &mut dreamc_runtime::generate::Cached,
    n: usize,
) -> Result<(), VerifyError> {
    cached.start(&prompts(s, n))?;
    let (saved, next) = (cached.save(0, 0, n)?, behind(s, n)[0]);
    let here = cached.step(&[Next::written(0, &next)])?.concat();
    cached.release(1)?;
    let Some(row) = cached.admit()? else { return Ok(()) };
    cached.load_saved(row, &saved)?;
    cached.take(row, n);
    let there = cached.step(&[Next::written(row, &next)])?.concat();
    let what = "bits of logits after tokens that were kept and put elsewhere";
    checks.check(what, other_bits(&here, &there), 0.0, Place::default());
    Ok(())
}

/// Whether training chooses an expert's tokens among those of all rows.
fn rounds(s: &Subject) -> bool {
    let component = |c: &Component| matches!(c, Component::Experts(e) if e.round.is_some());
    components(&s.spec.model).values().any(component)
}

/// Whether rows have a part in one another's losses, by means or by experts' numbers of tokens.
fn means_of_routers(s: &Subject) -> bool {
    let averages = |c: &Component| {
        let Component::Defined(defined) = c else { return false };
        let all = |node: &Node| matches!(node.function, Function::Average { all: true });
        defined.graph(&s.spec.model).is_ok_and(|graph| graph.region.nodes.iter().any(all))
    };
    let balanced = |c: &Component| c.router().is_some_and(|r| r.load_balance_loss != 0.0);
    let component = |c: &Component| balanced(c) || averages(c);
    rounds(s)
        || any_skip(s, &|skip, _| matches!(skip.rule, SkipRule::Threshold { .. }))
        || components(&s.spec.model).values().any(component)
}

/// No later token changes a logit.
pub struct Causal;

impl Proof for Causal {
    fn name(&self) -> &'static str {
        "causal"
    }

    fn claim(&self) -> &'static str {
        "a later token changes no logit"
    }

    fn how(&self) -> &'static str {
        "evaluation with one token replaced, on the CPU and in f64; training too, where no router chooses among later tokens"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        let vocab = s.spec.model.vocab;
        let t = s.sequence();
        if vocab < 2 || t < 2 {
            return Ok(Some("there is one token to choose or to read".into()));
        }
        let ahead = rounds(s)
            || any_skip(s, &|skip, _| match skip.rule {
                SkipRule::TopK { capacity, .. } => {
                    skip.capacities.iter().copied().fold(capacity, f64::min) < 1.0
                }
                SkipRule::Threshold { .. } => skip.level == SkipLevel::Sequence,
                SkipRule::DepthChoice { .. } => false,
            });
        if !s.causal() {
            return Ok(Some(AHEAD.into()));
        }
        s.conditioned()?;
        let device = s.cpu(1);
        let mut model = s.load(&device, &s.options())?;
        let inference = s.oracle(None, &Rewriting::off(), Form::Inference)?;
        let training = if ahead { None } else { Some(s.oracle(None, &Rewriting::off(), Form::Training)?) };
        model.evaluate(&s.batch)?;
        let evaluated = widen(&model.all_logits()?);
        let exact = s.forward(&inference, &s.batch)?;
        let trained = training.as_ref().map(|o| s.forward(o, &s.batch)).transpose()?;
        let tolerance = s.logits_tolerance()?;
        for at in [1, t / 2, t - 1] {
            let mut other = s.batch.clone();
            for row in 0..ROWS {
                let id = &mut other.ids[row * t + at];
                *id = (*id + 1 + row as i32) % vocab as i32;
            }
            let v = vocab as usize;
            let before = |x: &[f64]| -> Vec<f64> {
                (0..ROWS).flat_map(|row| x[row * t * v..][..at * v].to_vec()).collect()
            };
            let mut compare =
                |what: &str, found: &[f64], expected: &[f64], tolerance: f64, place: &dyn Fn() -> Place| {
                    let e = error(&before(found), &before(expected));
                    let place = if e > tolerance { place() } else { Place::default() };
                    checks.check(format!("{what} before token {at}"), e, tolerance, place);
                };
            let other_exact = s.forward(&inference, &other)?;
            let hidden = s.spec.model.hidden as usize;
            let earlier = |streams: &[dreamc_compiler::ir::interpret::Tensor]| -> Vec<Vec<f64>> {
                let rows = |x: &[f64]| -> Vec<f64> {
                    (0..ROWS).flat_map(|row| x[row * t * hidden..][..at * hidden].to_vec()).collect()
                };
                streams.iter().map(|x| rows(x.floats())).collect()
            };
            compare("logits in f64", other_exact.logits.floats(), exact.logits.floats(), 1e-12, &|| {
                blame::first_stream(s, &earlier(&other_exact.streams), &earlier(&exact.streams), 1e-12)
            });
            if let (Some(oracle), Some(trained)) = (&training, &trained) {
                let found = s.forward(oracle, &other)?;
                compare("logits in training", found.logits.floats(), trained.logits.floats(), 1e-12, &|| {
                    blame::first_stream(s, &earlier(&found.streams), &earlier(&trained.streams), 1e-12)
                });
            }
            model.evaluate(&other)?;
            let found = widen(&model.all_logits()?);
            compare("logits", &found, &evaluated, tolerance, &Place::default);
        }
        Ok(None)
    }
}

/// Whether some `skip` of the model is of a kind.
pub(super) fn any_skip(s: &Subject, is: &dyn Fn(&Skip, &Expr) -> bool) -> bool {
    fn expr(e: &Expr, is: &dyn Fn(&Skip, &Expr) -> bool) -> bool {
        match e {
            Expr::Component(_) | Expr::Norm => false,
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().any(|t| expr(t, is)),
            Expr::Skip(skip, inner) => is(skip, inner) || expr(inner, is),
        }
    }
    fn any(items: &[Item], is: &dyn Fn(&Skip, &Expr) -> bool) -> bool {
        items.iter().any(|item| match item {
            Item::Layer(e) => expr(e, is),
            Item::Statement(_) => false,
            Item::Repeat { items, .. } | Item::Recur { items, .. } => any(items, is),
        })
    }
    any(&s.spec.model.body, is)
}
