//! Measurements of a model: loss, answers, likelihoods.
//!
//! *In*: a model, held-out data. *Out*: loss, bits per byte, exact match by difficulty. *Promise*:
//! the figures do not depend on the size of the batch; what is counted is stated with the type that
//! holds it.

use crate::generate::{NextLogits, Sampling, Why, generate};
use crate::model::{Model, ModelError};
use dreamc_data::examples::{self, Example};
use dreamc_data::task::{Problems, Split};
use dreamc_data::{Batch, Batches, DataError, Dataset, NO_LOSS, Tokenizer};
use dreamc_device::group::{Group, GroupError};
use dreamc_dsl::spec::{Task, Train};
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
    /// Another rank of the group.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// Loss over targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Loss {
    /// Sum of the losses of all targets, in nats.
    pub nats: f64,
    /// Targets, end tokens included.
    pub targets: u64,
    /// Bytes of text the targets stand for; an end token stands for none, as long as its text has
    /// any other.
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
    pub fn add(&mut self, batch: &Batch, nll: &[f32]) {
        for (_, &nats) in batch.targets.iter().zip(nll).filter(|(target, _)| **target >= 0) {
            self.nats += f64::from(nats);
            self.targets += 1;
        }
        self.bytes += batch.bytes.iter().map(|&n| u64::from(n)).sum::<u64>();
    }
}

/// The loss over all rows that these batches give.
pub fn loss(model: &mut Model, mut batches: Batches) -> Result<Loss, EvaluateError> {
    let mut loss = Loss::default();
    while let Some(batch) = batches.take(model.batch())? {
        let nll = model.evaluate(&batch)?;
        loss.add(&batch, &nll);
    }
    Ok(loss)
}

/// Problems in memory at once.
const SCORED_AT_ONCE: usize = 4096;

/// The loss over what is held out, as a run's last evaluation, `dreamc eval`, comparisons and
/// analyses measure it: over all of it, or over the rows that [`Dataset::most_rows`] draws. Where a
/// task is among the sources it is over `evaluate.batches` batches.
pub fn held_out(model: &mut Model, dataset: &Dataset, train: &Train) -> Result<Option<Loss>, EvaluateError> {
    drawn(model, dataset, dataset.most_rows(asked_rows(train)))
}

/// The same over at most `rows` rows; `None` where nothing is held out.
pub fn drawn(model: &mut Model, dataset: &Dataset, rows: u64) -> Result<Option<Loss>, EvaluateError> {
    shared(model, dataset, rows, &Group::alone())
}

/// The same by the ranks of a group, which take batches in turn.
pub fn shared(
    model: &mut Model,
    dataset: &Dataset,
    rows: u64,
    group: &Group,
) -> Result<Option<Loss>, EvaluateError> {
    let Some(mut held) = dataset.drawn(rows)? else { return Ok(None) };
    let (mut own, mut number, mut shown) = (Loss::default(), 0, None);
    while let Some(batch) = held.take(model.batch())? {
        if number % group.size() == group.rank() {
            let nll = model.evaluate(&batch)?;
            own.add(&batch, &nll);
        }
        shown = Some(batch);
        number += 1;
    }
    // Where layers gather their weights all ranks run as often: those without a batch in the last
    // round run one of another rank.
    let (rest, rank) = (number % group.size(), group.rank());
    if let Some(batch) = shown.filter(|_| model.is_shared() && rest > 0 && rank >= rest) {
        model.evaluate(&batch)?;
    }
    let mut all = Loss::default();
    for part in group.gather(&[own.nats.to_bits(), own.targets, own.bytes].map(u64::to_le_bytes).concat())? {
        let part: Vec<u64> = bytemuck::pod_collect_to_vec(&part);
        if let [nats, targets, bytes] = part[..] {
            all.nats += f64::from_bits(nats);
            (all.targets, all.bytes) = (all.targets + targets, all.bytes + bytes);
        }
    }
    Ok(Some(all))
}

/// A model compared to the one that it was made of, over the same targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Against {
    /// Targets, end tokens included.
    pub targets: u64,
    /// Mean loss of the model, in nats.
    pub loss: f64,
    /// Mean loss of the other.
    pub other_loss: f64,
    /// Mean of `Σ p ln (p / q)`, `p` of the other model and `q` of this one, in nats.
    pub divergence: f64,
    /// Targets at which the likeliest token is another.
    pub flips: u64,
}

/// Compares two models on at most `rows` held-out rows; both keep logits, for batches of one
/// shape. `None` where nothing is held out.
pub fn against(
    model: &mut Model,
    other: &mut Model,
    dataset: &Dataset,
    rows: u64,
) -> Result<Option<Against>, EvaluateError> {
    let Some(mut held) = dataset.drawn(rows)? else { return Ok(None) };
    let mut sums = Against::default();
    while let Some(batch) = held.take(model.batch())? {
        let own = model.evaluate(&batch)?;
        let theirs = other.evaluate(&batch)?;
        let (q, p) = (model.all_logits()?, other.all_logits()?);
        let vocab = q.len() / batch.targets.len().max(1);
        for (i, _) in batch.targets.iter().enumerate().filter(|(_, target)| **target >= 0) {
            let (q, p) = (&q[i * vocab..][..vocab], &p[i * vocab..][..vocab]);
            sums.targets += 1;
            sums.loss += f64::from(own[i]);
            sums.other_loss += f64::from(theirs[i]);
            sums.divergence += divergence(p, q);
            sums.flips += u64::from(argmax(p) != argmax(q));
        }
    }
    let n = sums.targets.max(1) as f64;
    let (loss, other_loss) = (sums.loss / n, sums.other_loss / n);
    Ok(Some(Against { loss, other_loss, divergence: sums.divergence / n, ..sums }))
}

/// `Σ p ln (p / q)` of the distributions of two rows of logits, in f64.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |x: &[f32]| {
        let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        most + x.iter().map(|x| (f64::from(*x) - most).exp()).sum::<f64>().ln()
    };
    let (all_p, all_q) = (log_sum(p), log_sum(q));
    let each = p.iter().zip(q).map(|(p, q)| {
        let (p, q) = (f64::from(*p) - all_p, f64::from(*q) - all_q);
        p.exp() * (p - q)
    });
    each.sum()
}

/// Held-out rows of an evaluation during training.
pub fn asked_rows(train: &Train) -> u64 {
    train.evaluate.batches.saturating_mul(train.batch)
}

/// Exact match on problems of one difficulty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Difficulty {
    /// Steps.
    pub steps: u64,
    /// Answers that are exact.
    pub right: u64,
    /// Answers asked: one a problem, or those in its text.
    pub asked: u64,
}

/// Share of right answers over all difficulties, each problem counting once.
pub fn share(difficulties: &[Difficulty]) -> Option<f64> {
    let asked: u64 = difficulties.iter().map(|d| d.asked).sum();
    let right: u64 = difficulties.iter().map(|d| d.right).sum();
    (asked > 0).then(|| right as f64 / asked as f64)
}

/// Exact match of greedy decoding on held-out problems, `each` of each difficulty.
///
/// Greedy decoding writes the right answer exactly when, the right answer being fed, every one of
/// its tokens and the end token are the likeliest: up to the first wrong token both see the same
/// text. So one forward pass scores a problem. Where several texts are right, a token is judged
/// after the text that was drawn.
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
    for steps in task.difficulties() {
        let mut of = Difficulty { steps, ..Difficulty::default() };
        let mut left = (0..each).map_while(|i| problems.of_steps(steps, i)).peekable();
        // At most `SCORED_AT_ONCE` are in memory, however many are asked for.
        while left.peek().is_some() {
            let asked = left.by_ref().take(SCORED_AT_ONCE);
            let asked = asked.map(|p| examples::judged(tokenizer, task, &p));
            let asked = asked.collect::<Result<Vec<_>, _>>()?;
            of.right += greedy_matches(model, tokenizer, mask, &asked)?.iter().sum::<u64>();
            of.asked += asked.iter().map(|e| e.answers().count() as u64).sum::<u64>();
        }
        found.push(of);
    }
    Ok(found)
}

/// For each example, how many of its answers greedy decoding writes. Examples longer than a row
/// count as wrong. With document masks a row holds as many as fit; without, each has a row for
/// itself.
pub fn greedy_matches(
    model: &mut Model,
    tokenizer: &Tokenizer,
    mask: bool,
    asked: &[Example],
) -> Result<Vec<u64>, EvaluateError> {
    let (rows, sequence) = (model.batch(), model.sequence());
    let mut right = vec![0; asked.len()];
    let mut next = 0;
    while next < asked.len() {
        let mut batch = Batch::new(sequence);
        // Examples of the batch: number and first token.
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
            let likeliest = |i: usize| {
                let at = (first + i) * vocab;
                argmax(&logits[at..at + vocab]) as i32
            };
            right[number] = right_answers(example, &likeliest);
        }
    }
    Ok(right)
}

/// How many answers of an example are right, where `likeliest` is the token found at each place.
fn right_answers(example: &Example, likeliest: &dyn Fn(usize) -> i32) -> u64 {
    let is_right = |i: usize| {
        let found = likeliest(i);
        let others = example.others.get(i - example.learn);
        found == example.tokens[i] || others.is_some_and(|others| others.contains(&found))
    };
    example.answers().filter(|answer| answer.clone().all(is_right)).count() as u64
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

/// The answer a text ends in: what follows the last `####` of GSM8K, without separators of
/// thousands, units of money and a full stop; the whole text where there is none.
pub fn final_answer(text: &str) -> String {
    let text = text.rsplit_once("####").map_or(text, |(_, answer)| answer);
    let line = text.trim().lines().next().unwrap_or_default();
    line.trim().trim_start_matches('$').trim_end_matches('.').replace(',', "").trim().to_string()
}

/// Answers written after prompts, against the right ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answers {
    /// Final answers that are right.
    pub right: u64,
    /// Prompts asked.
    pub asked: u64,
    /// Texts that came to an end of their own.
    pub ended: u64,
}

/// Lets the model answer prompts greedily and compares final answers. `asked` are whole documents.
pub fn answers(
    decoder: &mut dyn NextLogits,
    tokenizer: &Tokenizer,
    asked: &[Example],
    max_tokens: usize,
) -> Result<Answers, EvaluateError> {
    let ids = |tokens: &[i32]| tokens.iter().map(|&t| t as u32).collect::<Vec<u32>>();
    let prompt = |e: &Example| [&[tokenizer.begin()], &ids(&e.tokens[..e.learn])[..]].concat();
    let prompts: Vec<Vec<u32>> = asked.iter().map(prompt).collect();
    let sampling = Sampling { max_tokens, ..Sampling::default() };
    let written = generate(decoder, tokenizer, &prompts, &sampling, &mut |_, _| {})?;
    let mut found = Answers { asked: asked.len() as u64, ..Answers::default() };
    for (example, written) in asked.iter().zip(written) {
        let right = tokenizer.decode(&ids(&example.tokens[example.learn..]));
        found.right += u64::from(final_answer(&written.text) == final_answer(&right));
        found.ended += u64::from(written.why == Why::End);
    }
    Ok(found)
}

/// The log-probability of each continuation of its prompt, in nats, and its length in tokens. A
/// text longer than a row is read from as far back as fits.
pub fn likelihoods(
    model: &mut Model,
    continuations: &[(Vec<u32>, Vec<u32>)],
) -> Result<Vec<(f64, u64)>, EvaluateError> {
    let (rows, sequence) = (model.batch(), model.sequence());
    let mut found = vec![];
    for chunk in continuations.chunks(rows) {
        let mut batch = Batch::new(sequence);
        for (prompt, continuation) in chunk {
            let text: Vec<i32> = prompt.iter().chain(continuation).map(|&t| t as i32).collect();
            let text = &text[text.len().saturating_sub(sequence + 1)..];
            let places = text.len() - 1;
            let learn = places - continuation.len().min(places);
            batch.ids.extend(&text[..places]);
            batch
                .targets
                .extend(text[1..].iter().enumerate().map(|(i, &t)| if i >= learn { t } else { NO_LOSS }));
            batch.positions.extend(0..places as i32);
            batch.segments.extend(std::iter::repeat_n(0, places));
            batch.pad_row(0);
        }
        batch.pad_rows(rows, 0);
        let nll = model.evaluate(&batch)?;
        for (row, _) in chunk.iter().enumerate() {
            let range = row * sequence..(row + 1) * sequence;
            let taken = batch.targets[range.clone()].iter().zip(&nll[range]).filter(|(t, _)| **t >= 0);
            let (mut sum, mut tokens) = (0.0, 0);
            for (_, &nats) in taken {
                sum -= f64::from(nats);
                tokens += 1;
            }
            found.push((sum, tokens));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn final_answers_follow_the_rule_of_gsm8k() {
        assert_eq!(final_answer("She has 48/2 = 24.\n#### 1,024"), "1024");
        assert_eq!(final_answer("x #### 3\n#### $5.\nmore"), "5");
        assert_eq!(final_answer(" seven \n"), "seven");
        assert_eq!(final_answer(""), "");
    }

    #[test]
    fn loss_counts_bytes_of_text_alone() {
        let batch = Batch { targets: vec![97, 0, -1], bytes: vec![1, 0, 0], ..Batch::new(3) };
        let mut loss = Loss::default();
        loss.add(&batch, &[1.0, 2.0, 9.0]);
        assert_eq!((loss.nats, loss.targets, loss.bytes), (3.0, 2, 1));
        assert!((loss.bits_per_byte().unwrap() - 3.0 / std::f64::consts::LN_2).abs() < 1e-12);
        assert_eq!(Loss::default().bits_per_byte(), None);
    }

    #[test]
    fn divergence_is_that_of_the_definition() {
        let (p, q) = ([0.0, 3f32.ln()], [1.0, 1.0]);
        // p is a quarter and three quarters, q a half and a half.
        let right = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((divergence(&p, &q) - right).abs() < 1e-7);
        assert_eq!(divergence(&p, &p), 0.0);
    }

    #[test]
    fn an_answer_is_right_where_another_token_is_right_in_its_place() {
        let others = vec![vec![7], vec![]];
        let asked = std::iter::once(1..3).collect();
        let one = Example { tokens: vec![1, 2, 3, 4], bytes: vec![1; 4], learn: 1, asked, others };
        let found = |tokens: [i32; 4]| right_answers(&one, &|i| tokens[i]);
        assert_eq!([found([0, 2, 3, 0]), found([0, 7, 3, 0]), found([0, 2, 7, 0])], [1, 1, 0]);
        let plain = Example { asked: vec![], others: vec![], ..one.clone() };
        let found = |tokens: [i32; 4]| right_answers(&plain, &|i| tokens[i]);
        assert_eq!([found([0, 2, 3, 4]), found([0, 2, 3, 0]), found([0, 7, 3, 4])], [1, 0, 0]);
    }

    #[test]
    fn the_largest_is_the_lowest_of_equals() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(argmax(&[f32::NAN, 1.0, f32::NAN]), 1);
        assert_eq!(argmax(&[]), 0);
    }
}
