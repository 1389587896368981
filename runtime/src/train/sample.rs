//! Text that the model writes at evaluations, for people to look at.

use super::error::TrainError;
use crate::generate::{NextLogits, Sampling, generate};
use dreamc_data::Dataset;
use dreamc_data::task::{Problems, Split};
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
    /// The prompt.
    pub prompt: String,
    /// The continuation.
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

/// The specification's prompts; where it has none, held-out problems, or held-out text. Drawn as
/// the specification says, but for problems, which have one right answer: those are answered by the
/// likeliest tokens.
pub fn write(
    decoder: &mut dyn NextLogits,
    dataset: &Dataset,
    spec: &Spec,
) -> Result<Vec<Sample>, TrainError> {
    let own = |prompt: &String| Sample { prompt: prompt.clone(), text: String::new(), answer: None };
    let mut samples: Vec<Sample> = spec.eval.prompts.iter().map(own).collect();
    for task in dataset.tasks().filter(|_| spec.eval.prompts.is_empty()) {
        let problems = Problems::new(task, spec.train.seed, Split::Test)?;
        for i in 0..PROBLEMS {
            let (prompt, answer) = problems.at(i)?.last();
            samples.push(Sample { prompt, text: String::new(), answer: Some(answer) });
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
    let right = samples.iter().any(|sample| sample.answer.is_some());
    let sampling = Sampling {
        temperature: if right { 0.0 } else { spec.temperature() },
        top_p: spec.eval.top_p,
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
