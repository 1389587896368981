//! Whole examples, loss on the answer: generated problems and documents with prompts, packed into
//! rows.
//!
//! *In*: examples by index. *Out*: rows that hold as many as fit. *Promise*: an example is never
//! cut unless it is longer than a row; the oldest example goes first, so none waits for ever; what
//! comes next is a function of the seed and of a [`Cursor`] of a few numbers.

use super::batch::{Batch, NO_LOSS};
use super::shard::Shard;
use super::task::{Problem, Problems};
use super::tokenizer::Measured;
use super::{DataError, Tokenizer};
use crate::rng::{Permutation, Philox};
use dreamc_dsl::spec::Task;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Examples looked at for one that fits the rest of a row.
const WAITING: usize = 16;

/// Tokens of one example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Its tokens, the end token last.
    pub tokens: Vec<i32>,
    /// Bytes of text that each of them stands for.
    pub bytes: Vec<u32>,
    /// The first that loss is taken on.
    pub learn: usize,
    /// The ranges of tokens that loss is taken on, where it is not on all from the first.
    pub asked: Vec<Range<usize>>,
    /// Of each token from [`Example::learn`] on, the others that are right after the same
    /// beginning; empty where one text is right.
    pub others: Vec<Vec<i32>>,
}

impl Example {
    /// The ranges of tokens that loss is taken on: each is an answer.
    pub fn answers(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let whole = self.asked.is_empty().then_some(self.learn..self.tokens.len());
        whole.into_iter().chain(self.asked.iter().cloned())
    }
}

/// Where examples come from.
#[derive(Clone)]
pub enum Examples {
    /// Documents of a shard.
    Documents {
        /// The shard.
        shard: Arc<Shard>,
        /// Which of its documents.
        part: Part,
        /// Shuffles them; without, they come in order.
        order: Option<Philox>,
        /// Two documents of the shard are the answers of a pair, which count as one here: the
        /// better, which comes first.
        pairs: bool,
    },
    /// Problems without end.
    Problems {
        /// The problems.
        problems: Problems,
        /// Their tokenizer.
        tokenizer: Arc<Tokenizer>,
    },
}

/// A share of the numbers `0..n`: one in every `period` is held out, at a place within the period
/// that is a hash of the period's number, so that a sorted file does not give a lopsided split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// All.
    n: u64,
    /// 0 where nothing is held out.
    period: u64,
    /// The held-out ones rather than the others.
    held_out: bool,
}

impl Part {
    /// Everything.
    pub fn all(n: u64) -> Self {
        Part { n, period: 0, held_out: false }
    }

    /// The parts to learn from and held out, for a share to hold out.
    pub fn split(n: u64, share: f64) -> (Self, Self) {
        if share <= 0.0 || n < 2 {
            return (Part::all(n), Part::all(0));
        }
        let period = ((1.0 / share).round() as u64).clamp(2, n);
        (Part { n, period, held_out: false }, Part { n, period, held_out: true })
    }

    fn held_out_of(&self, period: u64) -> u64 {
        Philox::new(0, "held out").bits(0, period) % self.period
    }

    /// How many there are. Only whole periods hold one out.
    pub fn count(&self) -> u64 {
        match (self.period, self.held_out) {
            (0, _) => self.n,
            (p, true) => self.n / p,
            (p, false) => self.n - self.n / p,
        }
    }

    /// The `i`th of them.
    pub fn at(&self, i: u64) -> u64 {
        if self.period == 0 {
            return i;
        }
        if self.held_out {
            return i * self.period + self.held_out_of(i);
        }
        let (period, k) = (i / (self.period - 1), i % (self.period - 1));
        let base = period * self.period;
        if base + self.period > self.n {
            // The incomplete period at the end is all learned from.
            return self.n / self.period * self.period + (i - self.n / self.period * (self.period - 1));
        }
        base + k + u64::from(k >= self.held_out_of(period))
    }
}

impl Examples {
    /// How many there are; `None` where there is no end.
    pub fn count(&self) -> Option<u64> {
        match self {
            Examples::Documents { part, .. } => Some(part.count()),
            Examples::Problems { .. } => None,
        }
    }

    /// The number in its file of example number `i` of an epoch.
    fn number(&self, epoch: u64, i: u64) -> u64 {
        match self {
            Examples::Documents { part, order, .. } => {
                part.at(order.map_or(i, |philox| Permutation::new(philox, epoch, part.count()).at(i)))
            }
            Examples::Problems { .. } => i,
        }
    }

    /// Example number `i` of an epoch.
    pub fn get(&self, epoch: u64, i: u64) -> Result<Example, DataError> {
        match self {
            Examples::Documents { shard, pairs, .. } => {
                let number = self.number(epoch, i);
                document(shard, if *pairs { 2 * number } else { number })
            }
            Examples::Problems { problems, tokenizer } => of_problem(tokenizer, &problems.at(i)?),
        }
    }
}

/// A document of a shard.
fn document(shard: &Shard, number: u64) -> Result<Example, DataError> {
    let place = shard.document(number)?;
    let tokens = shard.tokens(place.start..place.end)?;
    let bytes = shard.bytes(place.start..place.end)?;
    Ok(Example { tokens, bytes, learn: (place.learn - place.start) as usize, asked: vec![], others: vec![] })
}

/// The tokens of a prompt and its answer.
pub fn example(tokenizer: &Tokenizer, prompt: &str, answer: &str) -> Result<Example, DataError> {
    let (Measured { ids, mut bytes }, learn) = tokenizer.measure_pair(prompt, answer)?;
    bytes.push(0);
    let tokens = ids.into_iter().chain([tokenizer.end()]).map(|t| t as i32).collect();
    Ok(Example { tokens, bytes, learn, asked: vec![], others: vec![] })
}

/// The tokens of a problem. A token is learned where some of its bytes are asked.
pub fn of_problem(tokenizer: &Tokenizer, problem: &Problem) -> Result<Example, DataError> {
    let mut example = example(tokenizer, &problem.prompt, &problem.answer)?;
    let mut at = 0;
    let places: Vec<Range<usize>> = example
        .bytes
        .iter()
        .map(|&bytes| {
            let from = at;
            at += bytes as usize;
            from..at
        })
        .collect();
    for asked in &problem.asked {
        let asked = problem.prompt.len() + asked.start..problem.prompt.len() + asked.end;
        let of = |place: &Range<usize>| place.start < asked.end && asked.start < place.end;
        let first = places.iter().position(of);
        if let (Some(first), Some(last)) = (first, places.iter().rposition(of)) {
            example.asked.push(first..last + 1);
        }
    }
    example.learn = example.asked.first().map_or(example.learn, |first| first.start);
    Ok(example)
}

/// The tokens of a problem, with the others that are right in their place. A character that shares
/// a token with another, or takes several, has none.
pub fn judged(tokenizer: &Tokenizer, task: &Task, problem: &Problem) -> Result<Example, DataError> {
    let mut example = of_problem(tokenizer, problem)?;
    let others = problem.others(task);
    if others.is_empty() {
        return Ok(example);
    }
    let mut at = 0;
    for &bytes in &example.bytes[example.learn..] {
        let mut right = vec![];
        for other in others.get(at).filter(|_| bytes == 1).into_iter().flatten() {
            if let [token] = tokenizer.encode(&other.to_string())?[..] {
                right.push(token as i32);
            }
        }
        example.others.push(right);
        at += bytes as usize;
    }
    Ok(example)
}

/// Adds one example to the row begun last: the begin token and all tokens but the last are inputs.
pub fn add(example: &Example, begin: u32, mask: bool, space: usize, out: &mut Batch) {
    let used = out.ids.len() % out.sequence;
    let (segment, first) = match out.segments.last() {
        Some(segment) if used > 0 => (segment + 1, if mask { 0 } else { used as i32 }),
        _ => (0, 0),
    };
    let mut learned = vec![false; example.tokens.len()];
    for answer in example.answers() {
        learned[answer].fill(true);
    }
    for (i, &target) in example.tokens.iter().enumerate().take(space) {
        out.ids.push(if i == 0 { begin as i32 } else { example.tokens[i - 1] });
        out.targets.push(if learned[i] { target } else { NO_LOSS });
        out.bytes.push(if learned[i] { example.bytes[i] } else { 0 });
        out.positions.push(first + i as i32);
        out.segments.push(segment);
    }
}

/// Position in a source of examples.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Times the source has been gone through.
    pub epoch: u64,
    /// The next example of the epoch.
    pub next: u64,
    /// Examples taken out and not yet in a row, oldest first: epoch and number.
    pub waiting: Vec<(u64, u64)>,
}

/// Packs examples into rows.
pub struct Packer {
    examples: Examples,
    begin: u32,
    end: u32,
    mask: bool,
    repeat: bool,
    cursor: Cursor,
    waiting: Vec<Example>,
    /// Examples longer than a row so far: cut where some of the answer fits, else left out.
    pub too_long: u64,
}

impl Packer {
    /// Goes on at the cursor. Without `repeat` it ends after one epoch.
    pub fn new(
        examples: Examples,
        tokenizer: &Tokenizer,
        mask: bool,
        repeat: bool,
        cursor: Cursor,
    ) -> Result<Self, DataError> {
        let waiting = cursor.waiting.iter().map(|&(e, i)| examples.get(e, i)).collect::<Result<_, _>>()?;
        let (begin, end) = (tokenizer.begin(), tokenizer.end());
        Ok(Packer { examples, begin, end, mask, repeat, cursor, waiting, too_long: 0 })
    }

    /// How many examples an epoch has; `None` where there is no end.
    pub fn count(&self) -> Option<u64> {
        self.examples.count()
    }

    /// The position.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Adds a row; `false` at the end.
    pub fn row(&mut self, out: &mut Batch) -> Result<bool, DataError> {
        let mut space = out.sequence;
        loop {
            self.refill(out.sequence)?;
            let fits = |e: &Example| e.tokens.len() <= space;
            let first = space == out.sequence;
            let best = match self.waiting.iter().enumerate().filter(|(_, e)| fits(e)) {
                _ if first => (!self.waiting.is_empty()).then_some(0),
                // The longest that fits; the oldest of equals.
                fitting => fitting.max_by_key(|(i, e)| (e.tokens.len(), usize::MAX - i)).map(|(i, _)| i),
            };
            let Some(i) = best else { break };
            let example = self.waiting.remove(i);
            self.cursor.waiting.remove(i);
            add(&example, self.begin, self.mask, space, out);
            space -= example.tokens.len().min(space);
            if space == 0 {
                break;
            }
        }
        out.pad_row(self.end);
        Ok(space < out.sequence)
    }

    fn refill(&mut self, sequence: usize) -> Result<(), DataError> {
        let mut useless = 0;
        while self.waiting.len() < WAITING {
            match self.examples.count() {
                Some(0) => return Ok(()),
                Some(n) if self.cursor.next == n && !self.repeat => return Ok(()),
                Some(n) if self.cursor.next == n => {
                    if useless >= n {
                        return Err(DataError::Section(format!(
                            "no prompt of the {n} documents is shorter than the sequence of {sequence} tokens; \
                             use a longer sequence"
                        )));
                    }
                    (self.cursor.epoch, self.cursor.next) = (self.cursor.epoch + 1, 0);
                }
                _ => {}
            }
            let example = self.examples.get(self.cursor.epoch, self.cursor.next)?;
            self.cursor.next += 1;
            if example.tokens.len() > sequence {
                self.too_long += 1;
                if let Examples::Problems { .. } = self.examples {
                    let needed = example.tokens.len();
                    return Err(DataError::Section(format!(
                        "a problem of the task takes {needed} tokens, a sequence has {sequence}; use sequence {}, \
                         fewer steps or a smaller size",
                        needed.next_power_of_two()
                    )));
                }
                if example.learn >= sequence {
                    useless += 1;
                    continue;
                }
            }
            self.cursor.waiting.push((self.cursor.epoch, self.cursor.next - 1));
            self.waiting.push(example);
        }
        Ok(())
    }
}

/// Gives pairs of answers, each two rows, the better first.
pub struct Pairs {
    examples: Examples,
    shard: Arc<Shard>,
    begin: u32,
    end: u32,
    repeat: bool,
    cursor: Cursor,
    /// Pairs longer than a row so far: cut where some of both answers fits, else left out.
    pub too_long: u64,
}

impl Pairs {
    /// Goes on at the cursor. Without `repeat` it ends after one epoch. `None` where the examples
    /// are no pairs.
    pub fn new(examples: &Examples, tokenizer: &Tokenizer, repeat: bool, cursor: Cursor) -> Option<Self> {
        let Examples::Documents { shard, pairs: true, .. } = examples else { return None };
        let (begin, end, shard) = (tokenizer.begin(), tokenizer.end(), shard.clone());
        Some(Pairs { examples: examples.clone(), shard, begin, end, repeat, cursor, too_long: 0 })
    }

    /// How many pairs an epoch has.
    pub fn count(&self) -> u64 {
        self.examples.count().unwrap_or(0)
    }

    /// The position.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Adds the two rows of a pair; `false` at the end.
    pub fn rows(&mut self, out: &mut Batch) -> Result<bool, DataError> {
        let mut useless = 0;
        loop {
            let count = self.count();
            if self.cursor.next == count && (!self.repeat || count == 0) {
                return Ok(false);
            }
            if self.cursor.next == count {
                (self.cursor.epoch, self.cursor.next) = (self.cursor.epoch + 1, 0);
            }
            let first = 2 * self.examples.number(self.cursor.epoch, self.cursor.next);
            self.cursor.next += 1;
            let answers = [document(&self.shard, first)?, document(&self.shard, first + 1)?];
            self.too_long += u64::from(answers.iter().any(|e| e.tokens.len() > out.sequence));
            if answers.iter().any(|e| e.learn >= out.sequence) {
                useless += 1;
                if self.repeat && useless >= count {
                    let sequence = out.sequence;
                    return Err(DataError::Section(format!(
                        "no prompt of the {count} pairs is shorter than the sequence of {sequence} tokens; use a longer \
                         sequence"
                    )));
                }
                continue;
            }
            for (number, answer) in (first..).zip(&answers) {
                add(answer, self.begin, true, out.sequence, out);
                out.pad_row(self.end);
                out.documents.push(number);
            }
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_complete() {
        for (n, share) in [(2, 0.5), (7, 0.5), (10, 0.1), (103, 0.05), (5, 0.001), (1, 0.5), (9, 0.0)] {
            let (learned, held) = Part::split(n, share);
            let mut all: Vec<u64> = (0..learned.count()).map(|i| learned.at(i)).collect();
            all.extend((0..held.count()).map(|i| held.at(i)));
            all.sort_unstable();
            assert_eq!(all, (0..n).collect::<Vec<_>>(), "{n} {share}");
            assert!(n < 2 || share == 0.0 || held.count() > 0);
        }
    }
}
