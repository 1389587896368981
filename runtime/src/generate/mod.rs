//! Generating text with a model.
//!
//! *In*: prompts and something that gives the logits of the next token ([`NextLogits`]). *Out*: the
//! text, as the model generates it. *Promise*: a text depends on its prompt, its number and the
//! seed, never on the other rows; temperature 0 is greedy, with ties to the lowest id.
//!
//! A prompt is read for the logits after it, so the head is computed for its last token alone, and
//! for every token where [`Next::every`] asks.
//!
//! A text takes a row, reads and writes, and leaves it; others may come and go meanwhile.
//! [`Uncached`] runs the whole text through the model for every token; [`Cached`] keeps keys and
//! values; [`Growing`] is one whose caches of skipped parts begin at about what capacities say;
//! [`Slots`] has as many rows as there are texts, and reads one text while others are written.
//! [`generate`] generates a list of texts, `dreamc serve` those of its clients; both sample and
//! stop by [`Writer`].

mod cached;
mod prefixes;
mod slots;
mod writer;

pub use cached::{Cached, Growing, Saved, Writing, compile_cached};
pub use slots::Slots;
pub use writer::Writer;

use crate::evaluate::argmax;
use crate::model::{Model, ModelError};
use dreamc_data::rng::Stream;
use dreamc_data::{Batch, NO_LOSS, Tokenizer};

/// Tokens that a row reads next.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// The row.
    pub row: usize,
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Whether they are of a prompt, which is read in chunks, or one that was written.
    pub prompt: bool,
    /// Whether the logits after every one of them are asked for, or those after the last. With
    /// caches, of a model that is compiled for it ([`Writing::every`]): the head is then computed
    /// for all of them.
    pub every: bool,
}

impl<'a> Next<'a> {
    /// Tokens of a prompt.
    pub fn prompt(row: usize, tokens: &'a [u32]) -> Self {
        Next { row, tokens, prompt: true, every: false }
    }

    /// A token that was written.
    pub fn written(row: usize, token: &'a u32) -> Self {
        Next { row, tokens: std::slice::from_ref(token), prompt: false, every: false }
    }

    /// Whether it takes the program that reads.
    fn reads(&self) -> bool {
        self.prompt || self.tokens.len() > 1
    }
}

/// Tokens that take memory in caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Those of texts that have a row.
    pub tokens: usize,
    /// Those of prompts whose texts have gone, kept for others that begin alike.
    pub kept: usize,
}

/// Something that says what may come next.
pub trait NextLogits {
    /// Texts it carries at once.
    fn rows(&self) -> usize;

    /// Longest text of a row, prompt included.
    fn context(&self) -> usize;

    /// Tokens of a prompt that are read in one launch, at most: others wait while more are read.
    fn chunk(&self) -> usize {
        usize::MAX
    }

    /// Takes a free row for a new text, the lowest; `None` where all are taken.
    fn admit(&mut self) -> Result<Option<usize>, ModelError>;

    /// Rows that were admitted read on, each at most once; the others stand still. Gives `[tokens
    /// or 1, vocab]` for each, nothing for a text that is as long as the context.
    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError>;

    /// Gives a row back.
    fn release(&mut self, row: usize) -> Result<(), ModelError>;

    /// Takes over, for a row that has read nothing, the beginning of its text from a row that has
    /// read the same; gives how many tokens, fewer than the text has.
    fn adopt(&mut self, row: usize, text: &[u32]) -> Result<usize, ModelError> {
        let _ = (row, text);
        Ok(0)
    }

    /// Tokens in the caches; none where there are no caches.
    fn held(&self) -> Held {
        Held::default()
    }

    /// Begins anew with these prompts, at most [`NextLogits::rows`] and none empty; gives the
    /// logits after each.
    fn start(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, ModelError> {
        for row in 0..self.rows() {
            self.release(row)?;
        }
        for _ in prompts {
            self.admit()?;
        }
        let prompts = prompts.iter().enumerate();
        self.step(&prompts.map(|(row, tokens)| Next::prompt(row, tokens)).collect::<Vec<_>>())
    }

    /// Adds one token to each row that was started; gives the logits after it.
    fn advance(&mut self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, ModelError> {
        let tokens = tokens.iter().enumerate();
        self.step(&tokens.map(|(row, token)| Next::written(row, token)).collect::<Vec<_>>())
    }
}

/// The slow and obvious way: every token runs the whole text through the model.
pub struct Uncached {
    model: Model,
    /// Tokens of each row; none for a row that is free.
    texts: Vec<Option<Vec<u32>>>,
}

impl Uncached {
    /// Uses a model that keeps its logits.
    pub fn new(model: Model) -> Self {
        let texts = vec![None; model.batch()];
        Uncached { model, texts }
    }
}

impl NextLogits for Uncached {
    fn rows(&self) -> usize {
        self.model.batch()
    }

    fn context(&self) -> usize {
        self.model.sequence()
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        let free = self.texts.iter().position(Option::is_none);
        if let Some(row) = free {
            self.texts[row] = Some(vec![]);
        }
        Ok(free)
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let sequence = self.model.sequence();
        let mut read = vec![];
        for n in next {
            let Some(text) = &mut self.texts[n.row] else { continue };
            let from = text.len();
            text.extend(&n.tokens[..n.tokens.len().min(sequence - from)]);
            let last = text.len().saturating_sub(1);
            read.push((n.row, if n.every || from == text.len() { from } else { last }..text.len()));
        }
        let mut batch = Batch::new(sequence);
        for (row, text) in self.texts.iter().enumerate() {
            let text = text.as_deref().unwrap_or_default();
            batch.ids.extend(text.iter().map(|&t| t as i32));
            batch.targets.extend(text.iter().map(|_| NO_LOSS));
            batch.positions.extend(0..text.len() as i32);
            batch.segments.extend(text.iter().map(|_| 0));
            batch.pad_row(0);
            // A row that is free has no token to fill up from.
            batch.pad_rows(row + 1, 0);
        }
        self.model.evaluate(&batch)?;
        let logits = |(row, places): (usize, std::ops::Range<usize>)| -> Result<Vec<f32>, ModelError> {
            Ok(places.map(|at| self.model.logits(row, at)).collect::<Result<Vec<_>, _>>()?.concat())
        };
        read.into_iter().map(logits).collect()
    }

    fn release(&mut self, row: usize) -> Result<(), ModelError> {
        self.texts[row] = None;
        Ok(())
    }
}

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest.
    pub temperature: f64,
    /// Only this number of likeliest tokens.
    pub top_k: Option<usize>,
    /// Only the fewest likeliest whose probabilities reach this.
    pub top_p: Option<f64>,
    /// Seed.
    pub seed: u64,
    /// Most tokens written.
    pub max_tokens: usize,
    /// Writing stops before any of these.
    pub stop: Vec<String>,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0, max_tokens: 128, stop: vec![] }
    }
}

impl Sampling {
    /// Draws a token.
    pub fn draw(&self, logits: &[f32], random: &mut Stream) -> u32 {
        if self.temperature <= 0.0 || self.top_k == Some(1) {
            return argmax(logits) as u32;
        }
        let order = likeliest(logits, self.top_k.map_or(usize::MAX, |k| k.max(1)));
        let Some(&first) = order.first() else { return argmax(logits) as u32 };
        let weight = |i: usize| ((f64::from(logits[i]) - f64::from(logits[first])) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(|&i| weight(i)).collect();
        if let Some(p) = self.top_p {
            let total: f64 = weights.iter().sum();
            let mut sum = 0.0;
            let enough = weights.iter().position(|w| {
                sum += w;
                sum >= p * total
            });
            weights.truncate(enough.map_or(weights.len(), |n| n + 1));
        }
        let mut left = random.unit() * weights.iter().sum::<f64>();
        let drawn = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        order[drawn.unwrap_or(weights.len() - 1)] as u32
    }
}

/// At most `most` tokens that are possible at all, the likeliest first and the lowest of equals.
pub fn likeliest(logits: &[f32], most: usize) -> Vec<usize> {
    // A number in the order of floats above the token: vocabularies are sorted at every step.
    let key = |(i, &logit): (usize, &f32)| {
        let bits = logit.to_bits();
        let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        (logit > f32::NEG_INFINITY).then_some(u64::from(!ascending) << 32 | i as u64)
    };
    let mut keys: Vec<u64> = logits.iter().enumerate().filter_map(key).collect();
    if most < keys.len() {
        keys.select_nth_unstable(most);
        keys.truncate(most);
    }
    keys.sort_unstable();
    keys.into_iter().map(|key| (key & u64::from(u32::MAX)) as usize).collect()
}

/// Why writing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The model wrote a token that ends texts.
    End,
    /// It wrote a stop string, or the special token that is written so.
    Stop,
    /// It wrote as many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

/// Text generated after a prompt.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Written {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it stopped.
    pub why: Why,
}

/// Generates after each prompt. `heard` gets text as soon as it is certain: number of the prompt,
/// piece of text.
pub fn generate(
    decoder: &mut dyn NextLogits,
    tokenizer: &Tokenizer,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    heard: &mut dyn FnMut(usize, &str),
) -> Result<Vec<Written>, ModelError> {
    struct Row {
        row: usize,
        number: usize,
        reads: Vec<u32>,
        writer: Writer,
    }
    for row in 0..decoder.rows() {
        decoder.release(row)?;
    }
    let mut waiting = prompts.iter().enumerate().peekable();
    let mut written: Vec<Option<Written>> = vec![None; prompts.len()];
    let mut rows: Vec<Row> = vec![];
    loop {
        // A launch that reads takes as long for one row as for all: they come in together.
        let together = rows.is_empty();
        while together
            && let Some(&(number, prompt)) = waiting.peek()
            && let Some(row) = decoder.admit()?
        {
            let (reads, writer) =
                Writer::new(prompt, number as u64, decoder.context(), tokenizer, sampling.clone());
            rows.push(Row { row, number, reads, writer });
            waiting.next();
        }
        if rows.is_empty() {
            break;
        }
        let next: Vec<Next> = rows
            .iter()
            .map(|r| Next { prompt: r.writer.tokens().is_empty(), ..Next::prompt(r.row, &r.reads) })
            .collect();
        let logits = decoder.step(&next)?;
        for (row, logits) in rows.iter_mut().zip(&logits) {
            let mut heard = |piece: &str| heard(row.number, piece);
            row.reads = row.writer.step(logits, tokenizer, &mut heard).into_iter().collect();
        }
        for row in rows.extract_if(.., |r| r.reads.is_empty()) {
            decoder.release(row.row)?;
            written[row.number] = Some(row.writer.finish(tokenizer));
        }
    }
    Ok(written.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_data::rng::Philox;

    /// Says the bytes of a script, whatever it is given; rows begin at different places of it.
    struct Script(&'static [u8], [usize; 2]);

    const FREE: usize = usize::MAX;

    impl Script {
        fn logits(&self, at: usize) -> Vec<f32> {
            let mut logits = vec![0.0; 256];
            logits[usize::from(self.0.get(at).copied().unwrap_or(0))] = 9.0;
            logits
        }
    }

    impl NextLogits for Script {
        fn rows(&self) -> usize {
            2
        }
        fn context(&self) -> usize {
            24
        }
        fn admit(&mut self) -> Result<Option<usize>, ModelError> {
            let free = self.1.iter().position(|at| *at == FREE);
            free.iter().for_each(|&row| self.1[row] = 0);
            Ok(free)
        }
        fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
            for n in next {
                let at = &mut self.1[n.row];
                *at = if *at == 0 { n.tokens[0] as usize } else { *at + 1 };
            }
            Ok(next.iter().map(|n| self.logits(self.1[n.row])).collect())
        }
        fn release(&mut self, row: usize) -> Result<(), ModelError> {
            self.1[row] = FREE;
            Ok(())
        }
    }

    fn write(sampling: &Sampling) -> (Vec<Written>, Vec<String>) {
        let mut heard = vec![String::new(); 3];
        let prompts = [vec![1], vec![5], vec![1, 0, 0]];
        let mut script = Script("zhéllo world".as_bytes(), [FREE; 2]);
        let tokenizer = Tokenizer::bytes();
        let written = generate(&mut script, &tokenizer, &prompts, sampling, &mut |row, piece| {
            assert!(!piece.contains('\u{FFFD}'));
            heard[row] += piece;
        });
        (written.unwrap(), heard)
    }

    #[test]
    fn what_is_heard_is_what_is_written() {
        let (written, heard) = write(&Sampling::default());
        let texts: Vec<&str> = written.iter().map(|w| w.text.as_str()).collect();
        assert_eq!(texts, ["héllo world", "lo world", "héllo world"]);
        assert_eq!(heard, texts);
        assert!(written.iter().all(|w| w.why == Why::End));
    }

    #[test]
    fn stop_strings_are_neither_written_nor_heard() {
        let (written, heard) =
            write(&Sampling { stop: vec!["o w".into(), "rld".into()], ..Default::default() });
        assert_eq!((written[0].text.as_str(), written[0].why), ("héll", Why::Stop));
        assert_eq!(heard, ["héll", "l", "héll"]);
    }

    #[test]
    fn length_and_context_end_it() {
        let (written, _) = write(&Sampling { max_tokens: 3, ..Default::default() });
        assert_eq!((written[0].text.as_str(), written[0].why), ("hé", Why::Length));
        let mut script = Script(&[b'x'; 99], [FREE; 2]);
        let tokenizer = Tokenizer::bytes();
        let long: Vec<u32> = vec![1; 100];
        let written =
            generate(&mut script, &tokenizer, &[long], &Sampling::default(), &mut |_, _| {}).unwrap();
        assert_eq!((written[0].text.as_str(), written[0].why), ("x", Why::Context));
    }

    #[test]
    fn sampling_keeps_to_what_is_allowed_and_follows_the_odds() {
        let logits = [0.0f32, 2.0, 1.0, f32::NEG_INFINITY, 2.0];
        let draws = |sampling: Sampling| {
            let mut random = Philox::new(1, "t").stream(0);
            let mut seen = [0; 5];
            (0..2000).for_each(|_| seen[sampling.draw(&logits, &mut random) as usize] += 1);
            seen
        };
        let hot = Sampling { temperature: 1.0, ..Default::default() };
        assert_eq!(draws(Sampling::default()), [0, 2000, 0, 0, 0]);
        let all = draws(hot.clone());
        assert!(all[3] == 0 && all[0] > 50 && all[1] > 700 && all[4] > 700, "{all:?}");
        let two = draws(Sampling { top_k: Some(2), ..hot.clone() });
        assert!(two[0] + two[2] == 0 && two[1] > 800 && two[4] > 800, "{two:?}");
        assert_eq!(draws(Sampling { top_p: Some(0.1), ..hot }), [0, 2000, 0, 0, 0]);
    }
}
