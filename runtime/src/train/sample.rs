//! What the model writes at evaluations, for people to look at.

use super::error::TrainError;
use crate::data::Dataset;
use crate::data::task::{Problems, Split};
use crate::generate::{NextLogits, Sampling, generate};
use dreamc_dsl::Spec;
use serde::Serialize;

/// Most tokens written: a look, not a measurement.
const MOST_TOKENS: usize = 48;

/// Rows written at once.
pub const ROWS: u64 = 2;

/// Problems of each task that are shown.
const PROBLEMS: u64 = 2;

/// A prompt and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What the model was given.
    pub prompt: String,
    /// What it wrote.
    pub text: String,
    /// The right answer, where there is one.
    pub answer: Option<String>,
}

/// A sample as a line of `samples.jsonl`.
#[derive(Debug, Serialize)]
pub struct SampleLine<'a> {
    step: u64,
    prompt: &'a str,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<&'a str>,
}

impl Sample {
    /// The line of a step.
    pub fn line(&self, step: u64) -> SampleLine<'_> {
        SampleLine { step, prompt: &self.prompt, text: &self.text, answer: self.answer.as_deref() }
    }
}

/// Held-out problems and held-out text, each continued greedily.
pub fn write(
    decoder: &mut dyn NextLogits,
    dataset: &Dataset,
    spec: &Spec,
) -> Result<Vec<Sample>, TrainError> {
    let mut samples = vec![];
    for task in dataset.tasks() {
        let problems = Problems::new(task, spec.train.seed, Split::Test)?;
        for i in 0..PROBLEMS {
            let problem = problems.at(i)?;
            samples.push(Sample {
                prompt: problem.prompt,
                text: String::new(),
                answer: Some(problem.answer),
            });
        }
    }
    if samples.is_empty()
        && let Some(prompt) = dataset.opening(decoder.context() / 2)?
    {
        samples.push(Sample { prompt, text: String::new(), answer: None });
    }
    let tokenizer = &dataset.tokenizer;
    let mut prompts = vec![];
    for sample in &samples {
        let mut ids = if dataset.begins() { vec![tokenizer.begin()] } else { vec![] };
        ids.extend(tokenizer.encode(&sample.prompt)?);
        prompts.push(ids);
    }
    let sampling = Sampling {
        max_tokens: (spec.eval.max_tokens as usize).clamp(1, MOST_TOKENS),
        seed: spec.train.seed,
        ..Sampling::default()
    };
    let written = generate(decoder, tokenizer, &prompts, &sampling, &mut |_, _| {})?;
    for (sample, written) in samples.iter_mut().zip(written) {
        sample.text = written.text;
    }
    Ok(samples)
}
