//! Routers' health: what of the tokens each wrapped part processes, how evenly each mixture uses
//! its experts, and what the passes of a loop with an exit are worth.
//!
//! *In*: a model compiled with [`Options::observe`](dreamc_compiler::Options), held-out rows, and,
//! for the shares of generation, something that writes. *Out*: a [`Health`]. *Promise*: shares are
//! of decisions that were made, read from the device; those of generation are of tokens that the
//! model wrote and read again, never of a prompt; a token that never comes to a part, because it
//! skips what is around it, does not count there.

use crate::analysis::skips::{Wrapped, wrapped};
use crate::analysis::{candidates, real};
use crate::evaluate::EvaluateError;
use crate::generate::{NextLogits, Sampling, generate};
use crate::model::{Model, ModelError};
use dreamc_compiler::architecture::components;
use dreamc_compiler::bind::Owner;
use dreamc_compiler::compiled::Observation;
use dreamc_compiler::count::{PerToken, Shares, flops_at};
use dreamc_compiler::matching::TOKENS as TOKENS_OF_MEAN;
use dreamc_compiler::program::BufferId;
use dreamc_data::{Batch, Batches, NO_LOSS, Tokenizer};
use dreamc_dsl::spec::{Component, Model as Spec, SkipRule};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Tokens that are looked at.
pub const TOKENS: u64 = 1 << 13;

/// Tokens at once, or one row: observations take memory of every depth.
pub const AT_ONCE: u64 = 1 << 11;

/// Texts that are written for the shares of generation.
pub const TEXTS: u64 = 8;

/// Tokens of each at most.
const WRITTEN: usize = 64;

/// A target missed by this factor, or more, is worth a warning.
const MISSED: f64 = 2.0;

/// Figures of a model's routers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// Tokens that were looked at.
    pub tokens: u64,
    /// Tokens that the model wrote for the shares of generation; 0 where it wrote nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub written: u64,
    /// FLOPs of a generated token where wrapped parts and mixtures with no-op experts process what
    /// they were seen to process; the mean over a sequence of
    /// [`TOKENS`](dreamc_compiler::matching::TOKENS) or the context. Absent where every token takes
    /// the FLOPs that are declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops_per_token: Option<f64>,
    /// Every wrapped part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Every mixture.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixtures: Vec<Mixture>,
    /// Every pass of a loop whose loss sees all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passes: Vec<Pass>,
}

/// The stream after a pass of a loop with `exit mean` or `exit gate`, through the final norm and
/// the head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Mean loss in nats.
    pub loss: f64,
    /// Targets that this is the mean of.
    pub targets: u64,
    /// The share of tokens that leaves after it, by the gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

/// A part that is wrapped in `skip(…)`, over all depths its weights are applied at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Its name, as its tensors begin: `layers.3.skip.0`.
    pub name: String,
    /// Share of the held-out tokens that came to it.
    pub processed: f64,
    /// Share of the tokens that came to it of those that the model wrote after held-out prompts.
    /// Absent where nothing was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<f64>,
    /// The share that its `capacity` asks for; the mean over passes that have one each.
    pub asked: f64,
    /// The share that training computes: of top-k what it chooses, of a rule that each token
    /// follows by itself all, since its gradient asks for what is skipped. Absent in files of
    /// earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<f64>,
    /// Shares of all tokens that none, one, two … of its applications process: recursion depths.
    /// Empty where there is one application.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depths: Vec<f64>,
}

/// How the experts of a mixture are used, over all depths its weights are applied at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mixture {
    /// Its name, as its tensors begin: `layers.3.ea`.
    pub name: String,
    /// Choices of the busiest expert over the mean.
    pub busiest: f64,
    /// Experts that were never chosen.
    pub dead: u64,
    /// Experts there are.
    pub experts: u64,
}

/// Tokens that came to a wrapped part, and those that it processed.
#[derive(Default)]
struct Taken {
    came: u64,
    taken: u64,
    /// How many applications process each token of the batch.
    depths: Vec<usize>,
    /// Tokens by that number.
    by_depth: Vec<u64>,
}

impl Taken {
    /// Counts the tokens of a batch, after all of them have been read.
    fn count(&mut self, real: &[bool]) {
        for (_, depth) in real.iter().zip(std::mem::take(&mut self.depths)).filter(|(r, _)| **r) {
            self.by_depth.resize(self.by_depth.len().max(depth + 1), 0);
            self.by_depth[depth] += 1;
        }
    }
}

impl Part {
    fn missed(&self) -> bool {
        self.processed >= MISSED * self.asked || self.processed * MISSED <= self.asked
    }
}

impl Health {
    /// Looks at the rows that these batches give; `None` where the model has neither wrapped parts
    /// nor mixtures, and no loop with an exit. `passes` are those that the model was compiled with,
    /// where they are not the specification's.
    pub fn look(
        model: &mut Model,
        spec: &Spec,
        passes: Option<u64>,
        mut batches: Batches,
    ) -> Result<Option<Self>, EvaluateError> {
        let wrapped = wrapped(spec, passes).map_err(ModelError::from)?;
        let mut parts: BTreeMap<(u64, u64), Taken> = BTreeMap::new();
        let mut mixtures: BTreeMap<(u64, String), Vec<u64>> = BTreeMap::new();
        let mut by_body: BTreeMap<(usize, u64), [u64; 2]> = BTreeMap::new();
        let count_passes = passes;
        let mut passes = Passes::default();
        let mut tokens = 0;
        while let Some(batch) = batches.take(model.batch())? {
            let last = model.evaluate(&batch)?;
            let real = real(&batch);
            passes.add(model, &batch, &real, &last)?;
            tokens += real.iter().filter(|r| **r).count() as u64;
            for observed in model.compiled().observed.clone() {
                let elements = model.compiled().plan.buffer(observed.buffer).elements() as usize;
                match observed.what {
                    Observation::Taking => {
                        for w in wrapped.iter().filter(|w| observed.owner == Owner::Skip(w.number as u32)) {
                            let taking = taking(model, observed.buffer, w.depth, elements)?;
                            let found = parts.entry((w.set, w.number)).or_default();
                            found.depths.resize(real.len(), 0);
                            let [came, taken] = by_body.entry((w.body, w.number)).or_default();
                            let tokens = real.iter().zip(&taking).zip(&mut found.depths);
                            for ((_, t), depth) in tokens.filter(|((r, _), _)| **r) {
                                found.came += u64::from(*t > CAME);
                                found.taken += u64::from(*t > TAKEN);
                                *came += u64::from(*t > CAME);
                                *taken += u64::from(*t > TAKEN);
                                *depth += usize::from(*t > TAKEN);
                            }
                        }
                    }
                    Observation::Chosen => {
                        let mut chosen = vec![0i32; elements];
                        let each = (elements / real.len().max(1)).max(1);
                        for a in &observed.applications {
                            model
                                .session()
                                .read_at(observed.buffer, a.depth, 0, &mut chosen)
                                .map_err(ModelError::from)?;
                            let many = candidates(model.compiled(), &observed.component, a.set);
                            let key = (a.set, observed.component.clone());
                            let counts = mixtures.entry(key).or_insert_with(|| vec![0; many]);
                            let of_real = real.iter().zip(chosen.chunks(each)).filter(|(r, _)| **r);
                            for expert in of_real.flat_map(|(_, experts)| experts) {
                                if let Some(n) = usize::try_from(*expert).ok().and_then(|e| counts.get_mut(e))
                                {
                                    *n += 1;
                                }
                            }
                        }
                    }
                    Observation::Entropy
                    | Observation::Queries
                    | Observation::Score
                    | Observation::Norm
                    | Observation::Loss
                    | Observation::Share => {}
                }
            }
            parts.values_mut().for_each(|found| found.count(&real));
        }
        let shares = Shares {
            parts: by_body.into_iter().map(|(part, [came, taken])| (part, share_of(taken, came))).collect(),
            experts: computing(spec, &mixtures),
        };
        let known = shares.parts.is_empty() && shares.experts.is_empty();
        let flops = match known {
            true => None,
            false => flops_at(spec, count_passes, TOKENS_OF_MEAN.min(spec.context), &shares).ok(),
        };
        let sequence = model.sequence() as u64;
        let part = |((set, number), found): ((u64, u64), Taken)| {
            let own: Vec<&Wrapped> = wrapped.iter().filter(|w| (w.set, w.number) == (set, number)).collect();
            let mean = |of: &dyn Fn(&Wrapped) -> f64| {
                own.iter().map(|w| of(w)).sum::<f64>() / own.len().max(1) as f64
            };
            let share = |depth| found.by_depth.get(depth).copied().unwrap_or(0) as f64 / tokens.max(1) as f64;
            Part {
                name: name(set, number),
                processed: share_of(found.taken, found.came),
                generation: None,
                asked: mean(&|w| w.asked),
                training: Some(mean(&|w| trained_share(&w.rule, sequence))),
                depths: if own.len() > 1 { (0..=own.len()).map(share).collect() } else { vec![] },
            }
        };
        let mixture = |((set, component), counts): ((u64, String), Vec<u64>)| {
            let (all, most) = (counts.iter().sum::<u64>(), counts.iter().copied().max().unwrap_or(0));
            Mixture {
                name: format!("layers.{set}.{component}"),
                busiest: most as f64 * counts.len() as f64 / all.max(1) as f64,
                dead: counts.iter().filter(|n| **n == 0).count() as u64,
                experts: counts.len() as u64,
            }
        };
        let health = Health {
            tokens,
            written: 0,
            flops_per_token: flops.map(PerToken::mean),
            parts: parts.into_iter().map(part).collect(),
            mixtures: mixtures.into_iter().map(mixture).collect(),
            passes: passes.finish(),
        };
        let nothing = health.parts.is_empty() && health.mixtures.is_empty() && health.passes.is_empty();
        Ok((!nothing).then_some(health))
    }

    /// Lets the model write after prompts of the rows that these batches give, and looks at what it
    /// processed of the tokens that it wrote. The last token of a text is not among them: nothing
    /// was read after it. The observer reads the texts that the decoder wrote: both have the same
    /// weights, and a token's decision is a function of the text before it.
    pub fn write(
        &mut self,
        model: &mut Model,
        spec: &Spec,
        passes: Option<u64>,
        (decoder, tokenizer): (&mut dyn NextLogits, &Tokenizer),
        (mut batches, sampling): (Batches, Sampling),
    ) -> Result<(), EvaluateError> {
        let wrapped = wrapped(spec, passes).map_err(ModelError::from)?;
        let Some(held) = batches.take(TEXTS as usize)? else { return Ok(()) };
        let prompts = prompts(&held, decoder.context());
        if wrapped.is_empty() || prompts.is_empty() {
            return Ok(());
        }
        let room = held.sequence.min(decoder.context());
        let texts = generate(decoder, tokenizer, &prompts, &sampling, &mut |_, _| {})?;
        let texts: Vec<(&Vec<u32>, Vec<u32>)> =
            prompts.iter().zip(texts.into_iter().map(|t| t.tokens)).collect();
        let mut sums: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for texts in texts.chunks(model.batch().max(1)) {
            let (batch, written) =
                read_again(texts, model.sequence().min(room), model.sequence(), model.batch());
            model.evaluate(&batch)?;
            self.written += written.iter().filter(|w| **w).count() as u64;
            for observed in model.compiled().observed.clone() {
                if observed.what != Observation::Taking {
                    continue;
                }
                let elements = model.compiled().plan.buffer(observed.buffer).elements() as usize;
                for w in wrapped.iter().filter(|w| observed.owner == Owner::Skip(w.number as u32)) {
                    let taking = taking(model, observed.buffer, w.depth, elements)?;
                    let [came, taken] = sums.entry(name(w.set, w.number)).or_default();
                    for (_, t) in written.iter().zip(&taking).filter(|(w, _)| **w) {
                        *came += u64::from(*t > CAME);
                        *taken += u64::from(*t > TAKEN);
                    }
                }
            }
        }
        for part in &mut self.parts {
            part.generation =
                sums.get(&part.name).filter(|s| s[0] > 0).map(|&[came, taken]| share_of(taken, came));
        }
        Ok(())
    }

    /// How texts are written for the shares of generation.
    pub fn sampling(spec: &dreamc_dsl::Spec) -> Sampling {
        Sampling {
            temperature: spec.temperature(),
            top_p: spec.eval.top_p,
            seed: spec.train.seed,
            max_tokens: WRITTEN,
            ..Sampling::default()
        }
    }

    /// Names and figures, as TensorBoard and tables have them.
    pub fn figures(&self) -> Vec<(String, f64)> {
        let parts = self.parts.iter().flat_map(|p| {
            let depths = p.depths.iter().enumerate();
            let depths = depths.map(|(depth, share)| (format!("{}/depth.{depth}", p.name), *share));
            let generation = p.generation.map(|share| (format!("{}/generation", p.name), share));
            std::iter::once((format!("{}/processed", p.name), p.processed)).chain(generation).chain(depths)
        });
        let mixtures = self.mixtures.iter().flat_map(|m| {
            let dead = m.dead as f64 / m.experts.max(1) as f64;
            [(format!("{}/busiest", m.name), m.busiest), (format!("{}/dead", m.name), dead)]
        });
        let passes = self.passes.iter().enumerate().flat_map(|(i, p)| {
            let share = p.share.map(|share| (format!("pass.{}/leaves", i + 1), share));
            std::iter::once((format!("pass.{}/loss", i + 1), p.loss)).chain(share)
        });
        parts.chain(mixtures).chain(passes).collect()
    }

    /// The same in words, a line each.
    pub fn words(&self) -> Vec<(String, String)> {
        let part = |p: &Part| {
            let mut shares = format!("{:.1} % of {:.1} % asked for", 100.0 * p.processed, 100.0 * p.asked);
            if let Some(share) = p.generation {
                shares += &format!(", {:.1} % of {} tokens written", 100.0 * share, self.written);
            }
            if !p.depths.is_empty() {
                let each: Vec<String> =
                    p.depths.iter().map(|share| format!("{:.1}", 100.0 * share)).collect();
                shares +=
                    &format!("; {} % of tokens in 0 to {} applications", each.join(", "), p.depths.len() - 1);
            }
            (format!("{} processes", p.name), shares)
        };
        let mixture = |m: &Mixture| {
            let words = format!("{:.2} × the mean, {} of {} experts dead", m.busiest, m.dead, m.experts);
            (format!("{} busiest", m.name), words)
        };
        let pass = |(i, p): (usize, &Pass)| {
            let share = p.share.map_or(String::new(), |q| format!(", {:.1} % of a token leaves", 100.0 * q));
            let words = format!("{:.4} nats over {} targets{share}", p.loss, p.targets);
            (format!("loss after pass {}", i + 1), words)
        };
        let routers = self.parts.iter().map(part).chain(self.mixtures.iter().map(mixture));
        let flops = self.flops_per_token.map(|flops| {
            ("FLOPs processed per token".into(), format!("{:.4} M at these shares", flops / 1e6))
        });
        routers.chain(flops).chain(self.passes.iter().enumerate().map(pass)).collect()
    }

    /// Warnings of targets that are missed by a factor of two or more.
    pub fn warnings(&self) -> Vec<String> {
        let parts = self.parts.iter().filter(|p| p.missed()).map(|p| {
            format!(
                "{} processes {:.1} % of its tokens in evaluation, and {:.1} %, its capacity, in training",
                p.name,
                100.0 * p.processed,
                100.0 * p.asked
            )
        });
        let mixtures = self.mixtures.iter().filter(|m| m.busiest >= MISSED).map(|m| {
            let never = match m.dead {
                0 => String::new(),
                dead => format!(", and {dead} of {} experts are never chosen", m.experts),
            };
            format!(
                "the busiest expert of {} takes {:.1} × the mean{never}: a larger `balance` or `load_balance_loss` evens them out",
                m.name, m.busiest
            )
        });
        parts.chain(mixtures).collect()
    }
}

/// Bounds that a decision is above where its token came to the part, and where the part processes
/// it.
const CAME: f32 = 0.5;
const TAKEN: f32 = 1.5;

/// The decisions of an application of a wrapped part about the tokens of a batch.
fn taking(model: &Model, buffer: BufferId, depth: u64, elements: usize) -> Result<Vec<f32>, ModelError> {
    let mut taking = vec![0f32; elements];
    model.session().read_at(buffer, depth, 0, &mut taking)?;
    Ok(taking)
}

/// How the tensors of a wrapped part begin.
fn name(set: u64, number: u64) -> String {
    format!("layers.{set}.skip.{number}")
}

/// The first half of the document that each row begins with, where some of it is learned.
fn prompts(held: &Batch, context: usize) -> Vec<Vec<u32>> {
    let real = real(held);
    let prompt = |row: usize| -> Option<Vec<u32>> {
        let at = row * held.sequence;
        let segments = &held.segments[at..at + held.sequence];
        let document = segments.iter().take_while(|s| **s == segments[0]).count().min(context);
        let half = document.div_ceil(2);
        let ids = held.ids[at..at + half].iter().map(|id| *id as u32).collect();
        (half > 0 && half < context && real[at]).then_some(ids)
    };
    (0..held.rows()).filter_map(prompt).collect()
}

/// Texts as rows of a batch, and the places of the tokens that the model wrote and read.
fn read_again(
    texts: &[(&Vec<u32>, Vec<u32>)],
    room: usize,
    sequence: usize,
    rows: usize,
) -> (Batch, Vec<bool>) {
    let mut batch = Batch::new(sequence);
    let mut written = vec![];
    for (row, (prompt, text)) in texts.iter().enumerate() {
        let read = text.len().saturating_sub(1);
        let ids: Vec<i32> = prompt.iter().chain(&text[..read]).take(room).map(|id| *id as i32).collect();
        batch.positions.extend(0..ids.len() as i32);
        batch.segments.extend(ids.iter().map(|_| 0));
        batch.targets.extend(ids.iter().map(|_| NO_LOSS));
        batch.bytes.extend(ids.iter().map(|_| 0));
        written.extend((0..ids.len()).map(|at| at >= prompt.len()));
        batch.ids.extend(ids);
        batch.pad_row(0);
        batch.pad_rows(row + 1, 0);
        written.resize(batch.ids.len(), false);
    }
    batch.pad_rows(rows, 0);
    written.resize(batch.ids.len(), false);
    (batch, written)
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

fn share_of(some: u64, all: u64) -> f64 {
    some as f64 / all.max(1) as f64
}

/// The share of the tokens of a sequence that training computes.
fn trained_share(rule: &SkipRule, sequence: u64) -> f64 {
    match rule {
        // Rounding errors of the product are below this.
        SkipRule::TopK { capacity, .. } => {
            let chosen = (capacity * sequence as f64 + 1e-9).floor() as u64;
            share_of(chosen.clamp(1, sequence.max(1)), sequence)
        }
        SkipRule::Threshold { .. } | SkipRule::DepthChoice { .. } => 1.0,
    }
}

/// Of each mixture with no-op experts, the share of its choices that falls on the others, which
/// come first.
fn computing(spec: &Spec, mixtures: &BTreeMap<(u64, String), Vec<u64>>) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, [u64; 2]> = BTreeMap::new();
    let known = components(spec);
    for ((_, component), counts) in mixtures {
        let Some(Component::Experts(experts)) = known.get(component) else { continue };
        if experts.noop == 0 {
            continue;
        }
        let [some, all] = sums.entry(component.clone()).or_default();
        *some += counts.iter().take(experts.count as usize).sum::<u64>();
        *all += counts.iter().sum::<u64>();
    }
    sums.into_iter().map(|(component, [some, all])| (component, share_of(some, all))).collect()
}

/// Sums over targets of what passes are worth: losses, then shares.
#[derive(Default)]
pub(crate) struct Passes {
    sums: Vec<[f64; 2]>,
    gated: bool,
    targets: u64,
}

impl Passes {
    /// Adds the targets at `real` places of a batch that was evaluated; `last` are the losses after
    /// the last pass.
    pub(crate) fn add(
        &mut self,
        model: &Model,
        batch: &Batch,
        real: &[bool],
        last: &[f32],
    ) -> Result<(), ModelError> {
        let of = |what| model.compiled().observed.iter().find(|o| (o.owner, o.what) == (Owner::Exit, what));
        let Some(losses) = of(Observation::Loss) else { return Ok(()) };
        let shares = of(Observation::Share);
        let count = losses.applications.len();
        self.sums.resize(count + 1, [0.0; 2]);
        self.gated = shares.is_some();
        let target: Vec<bool> = batch.targets.iter().zip(real).map(|(t, real)| *t >= 0 && *real).collect();
        self.targets += target.iter().filter(|t| **t).count() as u64;
        let sum = |values: &[f32]| {
            let own = target.iter().zip(values).filter(|(t, _)| **t);
            own.map(|(_, x)| f64::from(*x)).sum::<f64>()
        };
        for (which, observed) in [(0, Some(losses)), (1, shares)] {
            let Some(observed) = observed else { continue };
            let mut values = vec![0f32; model.compiled().plan.buffer(observed.buffer).elements() as usize];
            for (pass, a) in observed.applications.iter().enumerate() {
                model.session().read_at(observed.buffer, a.depth, 0, &mut values)?;
                self.sums[pass][which] += sum(&values);
            }
        }
        self.sums[count][0] += sum(last);
        Ok(())
    }

    /// Means over all targets; the last pass has what others leave.
    pub(crate) fn finish(self) -> Vec<Pass> {
        let targets = self.targets.max(1) as f64;
        let mut rest = 1.0;
        let all = self.sums.len();
        let mean = |(pass, [loss, share]): (usize, [f64; 2])| {
            let share = if pass + 1 == all { rest } else { share / targets };
            rest -= share;
            Pass { loss: loss / targets, targets: self.targets, share: self.gated.then_some(share) }
        };
        self.sums.into_iter().enumerate().map(mean).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_misses_its_target_by_half_is_warned_of() {
        let part = |processed: f64, asked: f64| {
            let depths = if asked == 0.5 { vec![] } else { vec![0.25, 0.5, 0.25] };
            let (name, training) = ("layers.1.skip.0".into(), Some(asked));
            Part { name, processed, generation: None, asked, training, depths }
        };
        let mixture = |busiest: f64| Mixture { name: "layers.0.ea".into(), busiest, dead: 1, experts: 8 };
        let health = Health {
            tokens: 100,
            written: 0,
            flops_per_token: None,
            parts: vec![part(0.015, 0.5), part(0.3, 0.5), part(0.25, 0.5), part(1.0, 0.5), part(0.9, 0.5)],
            mixtures: vec![mixture(1.9), mixture(2.0)],
            passes: [(2.0, 0.25), (1.0, 0.75)]
                .map(|(loss, share)| Pass { loss, targets: 90, share: Some(share) })
                .to_vec(),
        };
        let warnings = health.warnings();
        assert_eq!(warnings.len(), 4, "{warnings:?}");
        let said = "layers.1.skip.0 processes 1.5 % of its tokens in evaluation, and 50.0 %, its capacity, in training";
        assert_eq!(warnings[0], said);
        assert!(
            warnings[3].contains("2.0 × the mean, and 1 of 8 experts are never chosen: a larger"),
            "{warnings:?}"
        );
        let even =
            Health { mixtures: vec![Mixture { dead: 0, ..mixture(2.5) }], parts: vec![], ..health.clone() };
        assert!(
            even.warnings()[0].contains("takes 2.5 × the mean: a larger `balance`"),
            "{:?}",
            even.warnings()
        );
        assert_eq!(health.words().len(), 9);
        assert_eq!(health.figures().len(), 13);
    }
}
