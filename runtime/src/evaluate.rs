//! What a model is worth.
//!
//! *In*: a model, held-out data. *Out*: loss, bits per byte, exact match by difficulty. *Promise*: the figures do not depend on the
//! size of the batch; what is counted is stated with the type that holds it.

use crate::data::examples::{self, Example};
use crate::data::task::{Problems, Split};
use crate::data::{Batch, Batches, DataError, Tokenizer};
use crate::model::{Model, ModelError};
use dreamc_dsl::spec::Task;
use serde::Serialize;
use thiserror::Error;

/// Why something cannot be measured.
#[derive(Debug, Error)]
pub enum EvaluateError {
    /// The model or its device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
}

/// Loss over targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Loss {
    /// Sum of the losses of all targets, in nats.
    pub nats: f64,
    /// Targets, end tokens included.
    pub targets: u64,
    /// Bytes of text the targets stand for; an end token stands for none.
    pub bytes: u64,
}

impl Loss {
    /// Nats per target.
    pub fn mean(&self) -> f64 {
        self.nats / self.targets.max(1) as f64
    }

    /// Exponential of the mean.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// Bits per byte of text; `None` where the targets stand for no text.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.bytes as f64)
    }

    /// Adds the losses of a batch.
    pub fn add(&mut self, batch: &Batch, nll: &[f32], tokenizer: &Tokenizer) {
        for (&target, &nats) in batch.targets.iter().zip(nll) {
            if let Ok(id) = u32::try_from(target) {
                self.nats += f64::from(nats);
                self.targets += 1;
                self.bytes += tokenizer.byte_length(id);
            }
        }
    }
}

/// The loss over at most so many batches.
pub fn loss(
    model: &mut Model,
    tokenizer: &Tokenizer,
    batches: &mut Batches,
    most: u64,
) -> Result<Loss, EvaluateError> {
    let mut loss = Loss::default();
    for _ in 0..most {
        let Some(batch) = batches.take(model.batch())? else { break };
        let nll = model.evaluate(&batch)?;
        loss.add(&batch, &nll, tokenizer);
    }
    Ok(loss)
}

/// Exact match on problems of one difficulty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Difficulty {
    /// Composed steps.
    pub steps: u64,
    /// Problems answered exactly.
    pub right: u64,
    /// Problems asked.
    pub asked: u64,
}

/// Share of right answers over all difficulties, each problem counting once.
pub fn share(difficulties: &[Difficulty]) -> Option<f64> {
    let asked: u64 = difficulties.iter().map(|d| d.asked).sum();
    let right: u64 = difficulties.iter().map(|d| d.right).sum();
    (asked > 0).then(|| right as f64 / asked as f64)
}

/// Exact match of greedy decoding on held-out problems, so many of each difficulty.
///
/// Greedy decoding writes the right answer exactly when, the right answer being fed, every one of its tokens and the end token are
/// the likeliest: up to the first wrong token both see the same text. So one forward pass scores a problem.
pub fn exact_match(
    model: &mut Model,
    tokenizer: &Tokenizer,
    task: &Task,
    seed: u64,
    mask: bool,
    each: u64,
) -> Result<Vec<Difficulty>, EvaluateError> {
    let problems = Problems::new(task, seed, Split::Test)?;
    let mut found = vec![];
    for steps in task.min_steps..=task.max_steps {
        let mut asked = vec![];
        for problem in (0..each).map_while(|i| problems.of_steps(steps, i)) {
            asked.push(examples::example(tokenizer, &problem.prompt, &problem.answer)?);
        }
        let right = greedy_matches(model, tokenizer, mask, &asked)?;
        let right = right.iter().filter(|&&r| r).count() as u64;
        found.push(Difficulty { steps, right, asked: asked.len() as u64 });
    }
    Ok(found)
}

/// For each example, whether greedy decoding writes its answer. Examples longer than a row count as wrong. With document masks a row
/// holds as many as fit; without, each has a row for itself.
pub fn greedy_matches(
    model: &mut Model,
    tokenizer: &Tokenizer,
    mask: bool,
    asked: &[Example],
) -> Result<Vec<bool>, EvaluateError> {
    let (rows, sequence) = (model.batch(), model.sequence());
    let mut right = vec![false; asked.len()];
    let mut next = 0;
    while next < asked.len() {
        let mut batch = Batch::new(sequence);
        // Which example lies where: its number and first place.
        let mut placed = vec![];
        while batch.rows() < rows && next < asked.len() {
            let mut space = sequence;
            while next < asked.len() && (mask || space == sequence) {
                let length = asked[next].tokens.len();
                if length <= space {
                    placed.push((next, batch.ids.len()));
                    examples::add(&asked[next], tokenizer.begin(), mask, space, &mut batch);
                    space -= length;
                } else if length <= sequence {
                    break;
                }
                next += 1;
            }
            batch.pad_row(tokenizer.end());
        }
        if placed.is_empty() {
            continue;
        }
        batch.pad_rows(rows, tokenizer.end());
        model.evaluate(&batch)?;
        let logits = model.all_logits()?;
        let vocab = logits.len() / (rows * sequence);
        for (number, first) in placed {
            let example = &asked[number];
            right[number] = (example.learn..example.tokens.len()).all(|i| {
                let at = (first + i) * vocab;
                argmax(&logits[at..at + vocab]) == example.tokens[i] as usize
            });
        }
    }
    Ok(right)
}

/// The largest; the lowest of equals. Not-a-number is never the largest.
pub fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] || logits[best].is_nan() {
            best = i;
        }
    }
    best
}
