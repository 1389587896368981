//! Observation of a trained model: where its depth attentions look, which experts it uses at which
//! depth (the paper's section 4.2).
//!
//! *In*: a model compiled with [`Options::observe`](dreamc_compiler::Options), and data. *Out*:
//! [`Observations`]; [`experts`] makes the paper's figures from them. [`skips`] observes decisions
//! to skip, [`routing`] analyses them. [`tokens`] observes a text, token by token. *Promise*:
//! routing indices are those the model used, read from the device and never computed again; only
//! tokens of documents with targets count, padding does not.

pub mod experts;
pub mod probe;
pub mod routing;
pub mod skips;
pub mod streams;
pub mod tokens;

use crate::evaluate::EvaluateError;
use crate::model::{Model, ModelError};
use crate::train::health::{Pass, Passes};
use dreamc_compiler::Compiled;
use dreamc_compiler::architecture::components;
use dreamc_compiler::compiled::{Application, Entry, Observation, Observed};
use dreamc_compiler::lower::attention;
use dreamc_data::{Batch, Batches};
use dreamc_dsl::spec::{Component, Spec};
use serde::Serialize;

/// Observations of a model over some data.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observations {
    /// Applications of layers.
    pub depth: u64,
    /// Rows that were read.
    pub sequences: u64,
    /// Tokens that were counted.
    pub tokens: u64,
    /// Choices of the routers.
    pub routers: Vec<Router>,
    /// Where depth attentions looked.
    pub depth_attention: Vec<DepthAttention>,
    /// The stream along depth.
    pub streams: streams::Streams,
    /// Losses of the passes of a loop with an exit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub passes: Vec<Pass>,
}

/// Choices of the routers of a component.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Router {
    /// The component.
    pub component: String,
    /// Whether it chooses projections of an attention rather than networks.
    pub projection: bool,
    /// Choices at each depth the component is applied at.
    pub depths: Vec<Choices>,
}

/// Choices of a router at one depth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choices {
    /// Depth, from 0.
    pub depth: u64,
    /// The set of weights that is applied there: `layers.{set}`.
    pub set: u64,
    /// How often each expert was chosen.
    pub counts: Vec<u64>,
    /// Mean entropy, in nats, of a token's scores as shares of their sum.
    pub token_entropy: f64,
}

/// Where a depth attention looked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DepthAttention {
    /// The component.
    pub component: String,
    /// The depths it is applied at.
    pub depths: Vec<u64>,
    /// For each of them the mean scores, over tokens and heads, of itself and those before it; they
    /// add up to 1.
    pub scores: Vec<Vec<f64>>,
}

/// Sums while observing.
struct Watched {
    observed: Observed,
    /// By application.
    counts: Vec<Vec<u64>>,
    entropy: Vec<f64>,
    scores: Vec<Vec<f64>>,
}

/// Runs a model over `sequences` rows and notes what its routers and depth attentions do.
pub fn observe(
    model: &mut Model,
    spec: &Spec,
    batches: &mut Batches,
    sequences: u64,
) -> Result<Observations, EvaluateError> {
    let compiled = model.compiled();
    let depth = compiled.depth;
    let mut watched: Vec<Watched> = vec![];
    for observed in &compiled.observed {
        let many = |a: &Application| vec![0; candidates(compiled, &observed.component, a.set)];
        watched.push(Watched {
            counts: observed.applications.iter().map(many).collect(),
            entropy: vec![0.0; observed.applications.len()],
            scores: observed.applications.iter().map(|a| vec![0.0; a.row as usize + 1]).collect(),
            observed: observed.clone(),
        });
    }
    let mut along = streams::Watched::new(&spec.model).map_err(ModelError::from)?;
    let mut passes = Passes::default();
    let (mut rows, mut tokens) = (0, 0);
    while rows < sequences {
        let Some(batch) = batches.take(model.batch())? else { break };
        let mut real = real(&batch);
        // No more rows than were asked for.
        let most = (sequences - rows).min(batch.rows() as u64) as usize;
        real[most * batch.sequence..].fill(false);
        rows += real.chunks(batch.sequence.max(1)).filter(|row| row.contains(&true)).count() as u64;
        let counted = real.iter().filter(|r| **r).count() as u64;
        if counted == 0 {
            break;
        }
        tokens += counted;
        let last = model.evaluate(&batch)?;
        passes.add(model, &batch, &real, &last)?;
        for w in &mut watched {
            w.add(model, spec, &real)?;
        }
        along.add(model, &real)?;
    }
    let compiled = model.compiled();
    let mut found = Observations {
        depth,
        sequences: rows,
        tokens,
        routers: vec![],
        depth_attention: vec![],
        streams: along.found(tokens),
        passes: passes.finish(),
    };
    let entropies = |component: &str| {
        watched.iter().find(|w| w.observed.component == component && w.observed.what == Observation::Entropy)
    };
    let known = components(&spec.model);
    for w in &watched {
        let component = w.observed.component.clone();
        let applications = w.observed.applications.iter().enumerate();
        match w.observed.what {
            Observation::Chosen => {
                let entropy = entropies(&component);
                let each = compiled.plan.buffer(w.observed.buffer).shape.last().map_or(1, |k| *k) as f64;
                // Tokens that skip the component choose nothing.
                let routed = |i: usize| (w.counts[i].iter().sum::<u64>() as f64 / each).max(1.0);
                let depths = applications.map(|(i, a)| Choices {
                    depth: a.depth,
                    set: a.set,
                    counts: w.counts[i].clone(),
                    token_entropy: entropy.map_or(0.0, |e| e.entropy[i] / routed(i)),
                });
                let projection = !matches!(known.get(&component), Some(Component::Experts(_)));
                found.routers.push(Router { projection, depths: depths.collect(), component });
            }
            Observation::Queries => found.depth_attention.push(DepthAttention {
                component,
                depths: w.observed.applications.iter().map(|a| a.depth).collect(),
                scores: w.scores.iter().map(|row| shares(row)).collect(),
            }),
            Observation::Entropy
            | Observation::Taking
            | Observation::Score
            | Observation::Norm
            | Observation::Loss
            | Observation::Share => {}
        }
    }
    Ok(found)
}

/// How many a router of a component chooses among.
pub(crate) fn candidates(compiled: &Compiled, component: &str, set: u64) -> usize {
    let name = |part: &str| format!("layers.{set}.{component}.router.{part}");
    let (keys, linear) = (name("keys.weight"), name("weight"));
    let tensor = compiled.tensors.iter().find(|t| t.name == keys || t.name == linear);
    tensor.and_then(|t| t.shape.first()).map_or(0, |n| *n as usize)
}

/// Numbers as shares of their sum.
fn shares(row: &[f64]) -> Vec<f64> {
    let all: f64 = row.iter().sum();
    row.iter().map(|s| s / all.max(f64::MIN_POSITIVE)).collect()
}

/// Which places belong to documents with targets; padding is a document without.
pub(crate) fn real(batch: &Batch) -> Vec<bool> {
    let mut real = vec![false; batch.ids.len()];
    for (row, at) in real.chunks_mut(batch.sequence.max(1)).zip((0..).step_by(batch.sequence.max(1))) {
        let segments = &batch.segments[at..at + row.len()];
        let mut from = 0;
        for document in segments.chunk_by(|a, b| a == b) {
            let range = from..from + document.len();
            let learned = batch.targets[at + range.start..at + range.end].iter().any(|t| *t >= 0);
            row[range].fill(learned);
            from += document.len();
        }
    }
    real
}

impl Watched {
    fn add(&mut self, model: &mut Model, spec: &Spec, real: &[bool]) -> Result<(), ModelError> {
        let plan = &model.compiled().plan;
        let buffer = plan.buffer(self.observed.buffer);
        let elements = buffer.elements() as usize;
        let each = elements / real.len().max(1);
        match self.observed.what {
            Observation::Chosen => {
                let mut chosen = vec![0i32; elements];
                for (a, counts) in self.observed.applications.iter().zip(&mut self.counts) {
                    model.session().read_at(self.observed.buffer, a.depth, 0, &mut chosen)?;
                    for (_, experts) in real.iter().zip(chosen.chunks(each.max(1))).filter(|(r, _)| **r) {
                        for e in experts {
                            if let Some(count) = usize::try_from(*e).ok().and_then(|e| counts.get_mut(e)) {
                                *count += 1;
                            }
                        }
                    }
                }
            }
            Observation::Entropy => {
                let mut entropy = vec![0f32; elements];
                for (a, sum) in self.observed.applications.iter().zip(&mut self.entropy) {
                    model.session().read_at(self.observed.buffer, a.depth, 0, &mut entropy)?;
                    let counted = real.iter().zip(&entropy).filter(|(r, _)| **r);
                    *sum += counted.map(|(_, e)| f64::from(*e)).sum::<f64>();
                }
            }
            Observation::Queries => {
                let (form, keys) = Form::of(model, spec, &self.observed)?;
                let mut queries = vec![0f32; elements];
                for (a, scores) in self.observed.applications.iter().zip(&mut self.scores) {
                    model.session().read_at(self.observed.buffer, a.depth, 0, &mut queries)?;
                    form.add(&queries, &keys, a.row as usize, real, scores);
                }
            }
            Observation::Taking
            | Observation::Score
            | Observation::Norm
            | Observation::Loss
            | Observation::Share => {}
        }
        Ok(())
    }
}

/// Sizes and scores of a depth attention.
struct Form {
    heads: usize,
    kv_heads: usize,
    size: usize,
    scale: f64,
    softcap: Option<f64>,
    window: usize,
    /// Whether the last number of a key says that its token skips that application.
    marked: bool,
}

impl Form {
    /// That of a depth attention whose queries are observed, and the keys of its cache.
    fn of(model: &Model, spec: &Spec, observed: &Observed) -> Result<(Form, Vec<f32>), ModelError> {
        let missing = || ModelError::NoBuffer(format!("{}.keys", observed.component));
        let caches = model.compiled().caches(Entry::Whole, attention::part::KEYS);
        let own = caches.filter(|cache| cache.owner == observed.owner).map(|cache| cache.buffer).next();
        let keys = own.ok_or_else(missing)?;
        let [_, _, _, kv_heads, size] = model.compiled().plan.buffer(keys).shape[..] else {
            return Err(missing());
        };
        let Some(Component::Depth(attention)) = components(&spec.model).swap_remove(&observed.component)
        else {
            return Err(missing());
        };
        let form = Form {
            heads: attention.heads as usize,
            kv_heads: kv_heads as usize,
            size: size as usize,
            // The sign is in the queries.
            scale: attention.scale.unwrap_or(1.0 / (attention.head_size as f64).sqrt()).abs(),
            marked: size > attention.head_size,
            softcap: attention.softcap,
            window: attention.window.map_or(usize::MAX, |w| w as usize),
        };
        Ok((form, model.session().read_all(keys)?))
    }

    /// Adds the probabilities that the queries of one row of the cache give to it and the rows
    /// before, means over heads.
    fn add(&self, queries: &[f32], keys: &[f32], row: usize, real: &[bool], scores: &mut [f64]) {
        let (tokens, wide) = (real.len(), self.kv_heads * self.size);
        let first = (row + 1).saturating_sub(self.window);
        let mut weights = vec![0.0; row + 1];
        let skips = |t: usize| self.marked && keys[(row * tokens + t) * wide + self.size - 1] < 0.0;
        for token in (0..tokens).filter(|t| real[*t] && !skips(*t)) {
            for head in 0..self.heads {
                let from = (token * self.heads + head) * self.size;
                let query = &queries[from..from + self.size];
                let mut most = f64::NEG_INFINITY;
                for (seen, weight) in weights.iter_mut().enumerate().skip(first) {
                    let from = (seen * tokens + token) * wide
                        + head / (self.heads / self.kv_heads).max(1) * self.size;
                    let key = &keys[from..from + self.size];
                    let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let score = self.scale * dot;
                    *weight = self.softcap.map_or(score, |c| c * (score / c).tanh());
                    most = most.max(*weight);
                }
                let total: f64 = weights[first..].iter().map(|w| (w - most).exp()).sum();
                for (score, weight) in scores.iter_mut().zip(&weights).skip(first) {
                    *score += (weight - most).exp() / total / self.heads as f64;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_does_not_count() {
        let batch = Batch {
            sequence: 4,
            ids: vec![0; 8],
            targets: vec![-1, 5, -1, -1, -1, -1, -1, -1],
            positions: vec![0; 8],
            segments: vec![0, 0, 1, 1, 0, 0, 0, 0],
            bytes: vec![0; 8],
            ..Batch::default()
        };
        assert_eq!(real(&batch), [true, true, false, false, false, false, false, false]);
    }

    #[test]
    fn depth_scores_are_softmax_means() {
        let form = Form {
            heads: 2,
            kv_heads: 1,
            size: 2,
            scale: 1.0,
            softcap: None,
            window: usize::MAX,
            marked: false,
        };
        // Two rows of the cache, one token: keys (1, 0) and (0, 1).
        let keys = [1.0, 0.0, 0.0, 1.0];
        let mut scores = [0.0; 2];
        form.add(&[2.0, 0.0, 0.0, 0.0], &keys, 1, &[true], &mut scores);
        let first = (2f64.exp() / (2f64.exp() + 1.0) + 0.5) / 2.0;
        assert!((scores[0] - first).abs() < 1e-12 && (scores[0] + scores[1] - 1.0).abs() < 1e-12);
        let near = Form { window: 1, ..form };
        let mut scores = [0.0; 2];
        near.add(&[2.0, 0.0, 0.0, 0.0], &keys, 1, &[true], &mut scores);
        assert_eq!(scores, [0.0, 1.0]);
    }
}
