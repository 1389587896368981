//! The engine: one thread, one model, many texts.
//!
//! *In*: a queue of texts to generate ([`Ask`]). *Out*: their tokens and log-probabilities, each on
//! the channel of its request ([`Answer`]). *Promise*: texts take rows in order of arrival, and
//! prompts are read in that order, one chunk between two steps; a step adds a token to every text
//! that is read. So a text waits for at most those before it, each with one step a chunk of its
//! prompt and one a token, and no text waits for a later one. Tokens that texts under way have and
//! may yet generate are at most what the caches are to hold. A text whose client is gone leaves
//! before the next step.

use crate::metrics::Metrics;
use dreamc_data::Tokenizer;
use dreamc_runtime::generate::{Next, NextLogits, Sampling, Why, Writer, likeliest};
use dreamc_runtime::model::ModelError;
use std::time::Instant;
use tokio::sync::mpsc::{Receiver, UnboundedSender};

/// A text to write.
#[derive(Debug)]
pub struct Ask {
    /// Which of its request's texts it is.
    pub index: usize,
    /// Which of the texts with one prompt and one seed it is.
    pub number: u64,
    /// Tokens of the prompt, fewer than the context.
    pub prompt: Vec<u32>,
    /// How tokens are drawn, and when it ends.
    pub sampling: Sampling,
    /// Log-probabilities of each token and of this number of likeliest ones.
    pub logprobs: Option<usize>,
    /// Whether they are asked for of the prompt, too.
    pub prompt_logprobs: bool,
    /// The answers go there, with the index.
    pub answers: UnboundedSender<(usize, Answer)>,
    /// When it was asked for.
    pub asked: Instant,
}

/// A part of an answer.
#[derive(Debug)]
pub enum Answer {
    /// Tokens of the prompt, in order; the first token of a text has no probability.
    Read(Vec<Scored>),
    /// A token, and the text that is certain since.
    Wrote(Option<Scored>, String),
    /// The end of the text.
    Done(Why),
    /// The model failed.
    Failed(String),
}

/// A token with its log-probability, in nats, at temperature 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The token.
    pub token: u32,
    /// Its log-probability, and the likeliest tokens with theirs.
    pub scores: Option<(f64, Vec<(u32, f64)>)>,
}

impl Scored {
    fn of(token: u32, logits: &[f32], most: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
        let of = |i: usize| logits.get(i).map_or(f64::NEG_INFINITY, |&x| f64::from(x - largest) - sum.ln());
        let top = likeliest(logits, most).into_iter().map(|i| (i as u32, of(i))).collect();
        Scored { token, scores: Some((of(token as usize), top)) }
    }
}

/// A text that has a row.
struct Text {
    ask: Ask,
    row: usize,
    prompt: Vec<u32>,
    /// Tokens of the prompt that are read.
    read: usize,
    /// Tokens that it may have in the end.
    places: usize,
    /// The token that is read next, after the prompt.
    next: u32,
    /// Logits after the last token of a chunk, which score the next.
    before: Vec<f32>,
    writer: Writer,
    over: bool,
}

impl Text {
    fn say(&self, answer: Answer) {
        // Whoever is gone is noticed before the next step.
        let _ = self.ask.answers.send((self.ask.index, answer));
    }

    /// Takes the logits of tokens of the prompt: after each where they are scored, else after the
    /// last.
    fn reads(&mut self, tokens: usize, logits: Vec<f32>) -> Vec<f32> {
        let from = self.read;
        self.read += tokens;
        if !self.ask.prompt_logprobs {
            return logits;
        }
        let vocab = logits.len() / tokens.max(1);
        let most = self.ask.logprobs.unwrap_or(0);
        let mut scored = vec![];
        for (i, &token) in self.prompt[from..self.read].iter().enumerate() {
            let before = if i == 0 { &self.before } else { &logits[(i - 1) * vocab..i * vocab] };
            scored.push(match before.is_empty() {
                true => Scored { token, scores: None },
                false => Scored::of(token, before, most),
            });
        }
        self.say(Answer::Read(scored));
        self.before = logits[logits.len() - vocab..].to_vec();
        self.before.clone()
    }

    /// Takes the logits after all that is read, and writes a token.
    fn writes(&mut self, logits: &[f32], tokenizer: &Tokenizer, metrics: &Metrics) {
        let first = self.writer.drawn().is_none();
        let mut text = String::new();
        let next = self.writer.step(logits, tokenizer, &mut |piece| text += piece);
        if let Some(token) = self.writer.drawn() {
            if first {
                metrics.first_token.add(self.ask.asked.elapsed());
            }
            metrics.written_tokens.add(1);
            let scored = self.ask.logprobs.map(|most| Scored::of(token, logits, most));
            let scored = scored.or(Some(Scored { token, scores: None }));
            self.say(Answer::Wrote(scored, text));
        }
        match next {
            Some(token) => self.next = token,
            None => self.over = true,
        }
    }
}

/// Texts that wait.
struct Waiting {
    queue: Receiver<Ask>,
    /// The first of them, for which the caches have no room yet.
    first: Option<Ask>,
}

impl Waiting {
    fn next(&mut self, wait: bool) -> Option<Ask> {
        match self.first.take() {
            Some(ask) => Some(ask),
            None if wait => self.queue.blocking_recv(),
            None => self.queue.try_recv().ok(),
        }
    }
}

/// Runs until the queue is closed and empty and all texts are written. The caches are to hold
/// `most` tokens; a text that could have more alone is not asked for.
pub fn run(
    mut decoder: Box<dyn NextLogits + Send>,
    tokenizer: &Tokenizer,
    queue: Receiver<Ask>,
    most: usize,
    metrics: &Metrics,
) {
    let mut texts: Vec<Text> = vec![];
    let mut waiting = Waiting { queue, first: None };
    loop {
        if !admit(&mut texts, decoder.as_mut(), tokenizer, &mut waiting, most, metrics) {
            return;
        }
        said(&texts, decoder.as_ref(), &waiting, metrics);
        let begun = Instant::now();
        if let Err(error) = step(&mut texts, decoder.as_mut(), tokenizer, metrics) {
            let message = error.to_string();
            for text in &mut texts {
                text.say(Answer::Failed(message.clone()));
                text.over = true;
            }
        } else if !texts.is_empty() {
            metrics.steps.add(begun.elapsed());
        }
        for Text { ask, row, writer, .. } in texts.extract_if(.., |text| text.over) {
            // A row that cannot be given back is one less; the next admission says so.
            let _ = decoder.release(row);
            metrics.whole.add(ask.asked.elapsed());
            metrics.texts.add(1);
            let _ = ask.answers.send((ask.index, Answer::Done(writer.finish(tokenizer).why)));
        }
    }
}

/// Tells the gauges how things are.
fn said(texts: &[Text], decoder: &dyn NextLogits, waiting: &Waiting, metrics: &Metrics) {
    metrics.running.set(texts.len() as u64);
    metrics.waiting.set((waiting.queue.len() + usize::from(waiting.first.is_some())) as u64);
    metrics.reserved_tokens.set(texts.iter().map(|text| text.places as u64).sum());
    let held = decoder.held();
    metrics.cache_tokens.set(held.tokens as u64);
    metrics.kept_tokens.set(held.kept as u64);
}

/// Gives rows to the texts that wait, as far as there are rows and room in the caches; waits where
/// there is no text at all. Gives `false` when there will be none.
fn admit(
    texts: &mut Vec<Text>,
    decoder: &mut dyn NextLogits,
    tokenizer: &Tokenizer,
    waiting: &mut Waiting,
    most: usize,
    metrics: &Metrics,
) -> bool {
    while texts.len() < decoder.rows() {
        said(texts, decoder, waiting, metrics);
        let Some(ask) = waiting.next(texts.is_empty()) else { return !texts.is_empty() };
        if ask.answers.is_closed() {
            metrics.gone.add(1);
            continue;
        }
        let places = ask.prompt.len().saturating_add(ask.sampling.max_tokens);
        let taken: usize = texts.iter().map(|text| text.places).sum();
        if !texts.is_empty() && taken.saturating_add(places) > most {
            waiting.first = Some(ask);
            break;
        }
        let (prompt, writer) =
            Writer::new(&ask.prompt, ask.number, decoder.context(), tokenizer, ask.sampling.clone());
        metrics.prompt_tokens.add(prompt.len() as u64);
        let (read, next, before, over) = (0, 0, vec![], false);
        match decoder.admit() {
            Ok(Some(row)) => {
                texts.push(Text { ask, row, prompt, read, places, next, before, writer, over });
            }
            found => {
                let message = found.err().map_or("no row is free".into(), |error| error.to_string());
                let _ = ask.answers.send((ask.index, Answer::Failed(message)));
            }
        }
    }
    true
}

/// A chunk of the first prompt that is not read, and a token of every text that is.
fn step(
    texts: &mut Vec<Text>,
    decoder: &mut dyn NextLogits,
    tokenizer: &Tokenizer,
    metrics: &Metrics,
) -> Result<(), ModelError> {
    for text in texts.extract_if(.., |text| text.ask.answers.is_closed()) {
        decoder.release(text.row)?;
        metrics.gone.add(1);
    }
    let reading = texts.iter().position(|text| text.read < text.prompt.len());
    if let Some(text) = reading.map(|i| &mut texts[i])
        && text.read == 0
        && !text.ask.prompt_logprobs
    {
        text.read = decoder.adopt(text.row, &text.prompt)?;
        metrics.shared_tokens.add(text.read as u64);
    }
    let chunk = decoder.chunk();
    let next = |(i, text): (usize, &Text)| -> Option<usize> {
        (text.read == text.prompt.len() || reading == Some(i)).then_some(i)
    };
    let which: Vec<usize> = texts.iter().enumerate().filter_map(next).collect();
    let of = |&i: &usize| {
        let text = &texts[i];
        if reading == Some(i) {
            let tokens = &text.prompt[text.read..];
            let tokens = &tokens[..tokens.len().min(chunk)];
            Next { every: text.ask.prompt_logprobs, ..Next::prompt(text.row, tokens) }
        } else {
            Next::written(text.row, &text.next)
        }
    };
    let next: Vec<Next> = which.iter().map(of).collect();
    if next.is_empty() {
        return Ok(());
    }
    let tokens: Vec<usize> = next.iter().map(|n| n.tokens.len()).collect();
    let logits = decoder.step(&next)?;
    for ((i, tokens), logits) in which.into_iter().zip(tokens).zip(logits) {
        let text = &mut texts[i];
        let logits = if reading == Some(i) { text.reads(tokens, logits) } else { logits };
        if text.read == text.prompt.len() {
            text.writes(&logits, tokenizer, metrics);
        }
    }
    Ok(())
}
