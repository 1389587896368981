//! All sources of a specification together.
//!
//! *In*: the `data` section, sequence length, seed. *Out*: endless training batches and finite
//! validation batches. *Promise*: rows come from the sources in the proportions of their weights,
//! by the least-served source first, so that the mixture, too, needs no random state.

use super::batch::Batch;
use super::examples::{self, Examples, Packer, Pairs, Part};
use super::rows::{Fields, Template};
use super::shard::{self, Format, Shard};
use super::stream::Stream;
use super::task::{self, Problems, Split};
use super::{DataError, Notice, Tokenizer};
use crate::rng::Philox;
use dreamc_dsl::spec::{self, Source, Task};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most held-out tokens that a run's last evaluation and `dreamc eval` read. Of more, this many are
/// drawn by row, the same for every model, seed and size of batch.
pub const MOST_MEASURED: u64 = 1 << 19;

/// How a dataset is opened.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Paths of the specification are relative to this.
    pub base: &'a Path,
    /// Folder of the shards.
    pub cache: &'a Path,
    /// Tokens in a row.
    pub sequence: u64,
    /// Vocabulary of the model; the tokenizer must not have more.
    pub vocab: u64,
    /// Seed of the order and of generated problems.
    pub seed: u64,
    /// Tokens a validation row advances by in running text; a whole row where absent.
    pub stride: Option<u64>,
}

/// Where rows come from, ready to be read.
#[derive(Clone)]
enum Rows {
    Stream(Stream),
    Examples(Examples),
}

impl Rows {
    /// Held-out rows in this order, or in the files'.
    fn ordered(&self, order: Option<Philox>) -> Rows {
        match self.clone() {
            Rows::Stream(stream) => Rows::Stream(Stream { order, shifts: false, ..stream }),
            Rows::Examples(Examples::Documents { shard, part, pairs, .. }) => {
                Rows::Examples(Examples::Documents { shard, part, order, pairs })
            }
            // Problems are drawn as they are.
            problems @ Rows::Examples(Examples::Problems { .. }) => problems,
        }
    }
}

/// One source.
struct Mixed {
    weight: f64,
    train: Rows,
    validation: Option<Rows>,
    /// The task, for exact match by difficulty.
    task: Option<Task>,
    /// Description for people.
    description: String,
    hash: String,
}

/// The data of a specification.
pub struct Dataset {
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    sources: Vec<Mixed>,
    sequence: usize,
    /// Tokens that a held-out row of running text advances by.
    stride: u64,
    mask: bool,
}

impl Dataset {
    /// Opens all sources; tokenises what is not in the cache yet.
    pub fn open(
        data: &spec::Data,
        settings: &Settings,
        notice: &mut dyn FnMut(Notice),
    ) -> Result<Self, DataError> {
        let tokenizer = Arc::new(Tokenizer::open(&data.tokenizer, settings.base)?);
        if tokenizer.vocab() as u64 > settings.vocab {
            let (has, model) = (tokenizer.vocab(), settings.vocab);
            return Err(DataError::Tokenizer(format!(
                "has {has} tokens, the model's vocab is {model}; set vocab to {has}"
            )));
        }
        if data.sources.is_empty() {
            return Err(DataError::Section("names no source".into()));
        }
        let opener = Opener { data, settings, tokenizer: &tokenizer };
        let mut sources = vec![];
        for (i, (source, weight)) in data.sources.iter().enumerate() {
            if !(weight.is_finite() && *weight > 0.0) {
                return Err(DataError::Section(format!(
                    "weight {weight} of source {} is not positive",
                    i + 1
                )));
            }
            sources.push(opener.source(source, *weight, i, notice)?);
        }
        if let (Some(path), Some(format)) =
            (&data.validation_file, data.sources.iter().find_map(|(s, _)| format(s).transpose()))
        {
            let shard = Arc::new(opener.shard(&settings.base.join(path), &format?, notice)?);
            sources[0].hash = hash(&[&sources[0].hash, &shard.meta.source]);
            let whole = Side::Whole { pairs: data.sources.iter().any(|(s, _)| s.rejected().is_some()) };
            sources[0].validation = Some(opener.rows(&shard, shard.len(), format_prompted(data)?, whole));
            for other in &mut sources[1..] {
                other.validation = None;
            }
        }
        let sequence = settings.sequence as usize;
        let stride = settings.stride.unwrap_or(settings.sequence).clamp(1, settings.sequence.max(1));
        Ok(Dataset { tokenizer, sources, sequence, stride, mask: data.document_mask })
    }

    /// Hash of all that decides what is read: contents, weights, tokenizer.
    pub fn hash(&self) -> String {
        let mut parts = vec![self.tokenizer.fingerprint().to_string(), format!("mask {}", self.mask)];
        if self.sources.iter().any(|s| matches!(&s.train, Rows::Stream(stream) if stream.begin.is_some())) {
            parts.push("begin".into());
        }
        for source in &self.sources {
            parts.push(format!("{} × {}", source.weight, source.hash));
        }
        hash(&parts)
    }

    /// Refuses tasks that ask longer problems than a context of `context` tokens has room for.
    pub fn fits_context(&self, context: u64, seed: u64) -> Result<(), DataError> {
        for task in self.tasks() {
            for &steps in &task.longer {
                fits(task, seed, &self.tokenizer, steps, ("the model's context has", "context", context))?;
            }
        }
        Ok(())
    }

    /// One line on each source.
    pub fn describe(&self) -> Vec<String> {
        self.sources.iter().map(|s| s.description.clone()).collect()
    }

    /// How often training with `tokens` tokens reads the source that it repeats most; `None` where
    /// no source has an end. Of rows packed with examples it is an estimate.
    pub fn epochs(&self, tokens: u64) -> Option<f64> {
        let all: f64 = self.sources.iter().map(|s| s.weight).sum();
        let of = |s: &Mixed| {
            let has = match &s.train {
                Rows::Stream(stream) => stream.range.end - stream.range.start,
                Rows::Examples(Examples::Documents { shard, part, .. }) => {
                    let share = part.count() as f64 / shard.meta.documents.max(1) as f64;
                    (shard.meta.tokens as f64 * share) as u64
                }
                Rows::Examples(Examples::Problems { .. }) => return None,
            };
            Some(tokens as f64 * s.weight / all / has.max(1) as f64)
        };
        self.sources.iter().filter_map(of).reduce(f64::max)
    }

    /// The generated tasks among the sources.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.sources.iter().filter_map(|s| s.task.as_ref())
    }

    /// Whether documents begin with the begin token, so that prompts must too.
    pub fn begins(&self) -> bool {
        self.sources.iter().any(|s| match &s.train {
            Rows::Examples(_) => true,
            Rows::Stream(stream) => stream.begin.is_some(),
        })
    }

    /// At most `most` held-out documents with prompts, in the order of the file.
    pub fn held_out(&self, most: u64) -> Result<Vec<examples::Example>, DataError> {
        let mut found = vec![];
        for source in &self.sources {
            if let (Some(Rows::Examples(held)), None) = (&source.validation, &source.task) {
                for i in 0..held.count().unwrap_or(0).min(most - found.len() as u64) {
                    found.push(held.get(0, i)?);
                }
            }
        }
        Ok(found)
    }

    /// The beginning of the first validation row, as a prompt to look at; up to the first answer
    /// where there is one.
    pub fn opening(&self, most: usize) -> Result<Option<String>, DataError> {
        let Some(batch) = self.validation()?.map(|mut v| v.take(1)).transpose()?.flatten() else {
            return Ok(None);
        };
        let learned = batch.targets.iter().position(|&t| t >= 0).unwrap_or(0);
        let prompted = self.sources.iter().any(|s| matches!(s.train, Rows::Examples(_)));
        let ids = if prompted { &batch.ids[..learned + 1] } else { &batch.ids[..most.min(batch.ids.len())] };
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        Ok(Some(self.tokenizer.decode(&ids)))
    }

    /// Training batches from a cursor on, without end.
    pub fn train(&self, cursor: Cursor) -> Result<Batches, DataError> {
        let sources = self.sources.iter().map(|s| (s.weight, s.train.clone()));
        self.batches(sources.collect(), cursor, (true, true))
    }

    /// Rows to learn from in the order of training, of pairs the better answers alone: something to
    /// look at.
    pub fn shown(&self) -> Result<Batches, DataError> {
        let sources = self.sources.iter().map(|s| (s.weight, s.train.clone()));
        self.batches(sources.collect(), Cursor::default(), (true, false))
    }

    /// Held-out rows in the order of the files, always the same; `None` where nothing is held out.
    /// Tasks have no end.
    pub fn validation(&self) -> Result<Option<Batches>, DataError> {
        self.held(None)
    }

    /// Pairs of answers one after another, the held-out ones or those to learn from, once each in
    /// the order of the file; `None` where there are none.
    pub fn pairs(&self, held_out: bool) -> Result<Option<Batches>, DataError> {
        let of = |s: &Mixed| {
            let rows = if held_out { s.validation.as_ref() } else { Some(&s.train) };
            match rows?.ordered(None) {
                Rows::Examples(examples) => {
                    Pairs::new(&examples, &self.tokenizer, false, examples::Cursor::default())
                }
                Rows::Stream(_) => None,
            }
        };
        let Some(pairs) = self.sources.first().and_then(of) else { return Ok(None) };
        let reader = Reader { weight: 1.0, served: 0, from: Supply::Pairs(pairs), done: false };
        let (sequence, filler) = (self.sequence, self.tokenizer.end());
        Ok(Some(Batches { readers: vec![reader], sequence, repeat: false, left: u64::MAX, filler }))
    }

    /// Documents of the source of pairs, and of the file they are held out in.
    pub fn pair_documents(&self) -> (u64, u64) {
        let of = |rows: &Rows| match rows {
            Rows::Examples(Examples::Documents { shard, pairs: true, .. }) => shard.meta.documents,
            Rows::Examples(_) | Rows::Stream(_) => 0,
        };
        let Some(source) = self.sources.first() else { return (0, 0) };
        (of(&source.train), source.validation.as_ref().map_or(0, of))
    }

    /// `rows` held-out rows to measure on, drawn from all of them by a seed that no specification
    /// changes, or all where there are no more; `None` where nothing is held out.
    pub fn drawn(&self, rows: u64) -> Result<Option<Batches>, DataError> {
        let held = self.held(Some(Philox::new(0, "held-out rows")))?;
        Ok(held.map(|batches| Batches { left: rows, ..batches }))
    }

    /// Rows that a measurement of everything held out takes of [`Dataset::drawn`]: those of
    /// [`MOST_MEASURED`] tokens, or `endless` where a task, which has no end, is among the sources.
    pub fn most_rows(&self, endless: u64) -> u64 {
        match self.tasks().next() {
            Some(_) => endless,
            None => (MOST_MEASURED / self.stride).max(1),
        }
    }

    fn held(&self, order: Option<Philox>) -> Result<Option<Batches>, DataError> {
        let held = |s: &Mixed| s.validation.as_ref().map(|v| (s.weight, v.ordered(order)));
        let sources: Vec<_> = self.sources.iter().filter_map(held).collect();
        if sources.is_empty() {
            Ok(None)
        } else {
            self.batches(sources, Cursor::default(), (false, false)).map(Some)
        }
    }

    /// Rows of sources, again and again with `repeat`, both answers of pairs with `both`.
    fn batches(
        &self,
        sources: Vec<(f64, Rows)>,
        cursor: Cursor,
        (repeat, both): (bool, bool),
    ) -> Result<Batches, DataError> {
        let mut cursors = cursor.sources;
        if !cursors.is_empty() && cursors.len() != sources.len() {
            return Err(DataError::Section(format!(
                "the checkpoint was reading {} sources, the specification has {}",
                cursors.len(),
                sources.len()
            )));
        }
        cursors.resize(sources.len(), SourceCursor::default());
        let readers = sources
            .into_iter()
            .zip(cursors)
            .map(|((weight, rows), cursor)| {
                let from = match rows {
                    Rows::Stream(stream) => Supply::Stream(stream, cursor.examples),
                    Rows::Examples(e) => {
                        let pairs = Pairs::new(&e, &self.tokenizer, repeat, cursor.examples.clone());
                        match pairs.filter(|_| both) {
                            Some(pairs) => Supply::Pairs(pairs),
                            None => {
                                let packer =
                                    Packer::new(e, &self.tokenizer, self.mask, repeat, cursor.examples)?;
                                Supply::Packer(packer)
                            }
                        }
                    }
                };
                Ok(Reader { weight, served: cursor.served, from, done: false })
            })
            .collect::<Result<Vec<_>, DataError>>()?;
        let filler = self.tokenizer.end();
        Ok(Batches { readers, sequence: self.sequence, repeat, left: u64::MAX, filler })
    }
}

/// Which side of a split.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Learned(u64),
    HeldOut,
    Whole { pairs: bool },
}

struct Opener<'a> {
    data: &'a spec::Data,
    settings: &'a Settings<'a>,
    tokenizer: &'a Arc<Tokenizer>,
}

impl Opener<'_> {
    fn shard(
        &self,
        path: &Path,
        format: &Format,
        notice: &mut dyn FnMut(Notice),
    ) -> Result<Shard, DataError> {
        shard::open(path, format, self.tokenizer, self.data.bad_rows, self.settings.cache, notice)
    }

    fn source(
        &self,
        source: &Source,
        weight: f64,
        number: usize,
        notice: &mut dyn FnMut(Notice),
    ) -> Result<Mixed, DataError> {
        if let Source::Task(task) = source {
            return self.task(task, weight);
        }
        let Some(format) = format(source)? else {
            return Err(DataError::Section("names a source that has no reader".into()));
        };
        let path = self.settings.base.join(path(source).unwrap_or_default());
        let shard = Arc::new(self.shard(&path, &format, notice)?);
        let meta = &shard.meta;
        let mut description = format!(
            "{}: {}, {}",
            path.display(),
            many(meta.documents, "document"),
            many(meta.tokens, "token")
        );
        if meta.skipped > 0 {
            let first = meta.first_skipped.as_deref().unwrap_or_default();
            description += &format!(", {} left out ({first})", many(meta.skipped, "bad row"));
        }
        let hash = hash(&[meta.source.clone(), format!("{format:?}"), self.data.validation.to_string()]);
        let own = self.data.validation_file.is_none() && self.data.validation > 0.0;
        let (train, validation) = if format.prompted() {
            let pairs = format.pairs();
            let all = if pairs { meta.documents / 2 } else { meta.documents };
            let (learned, held) = Part::split(all, if own { self.data.validation } else { 0.0 });
            let documents = |part: Part, order: Option<Philox>| {
                Rows::Examples(Examples::Documents { shard: shard.clone(), part, order, pairs })
            };
            let validation = (held.count() > 0).then(|| documents(held, None));
            (documents(learned, Some(self.order(number))), validation)
        } else {
            let mut cut = shard.len();
            if own {
                cut -= (shard.len() as f64 * self.data.validation) as u64;
                // Running text of several documents is cut between two of them.
                if meta.documents > 1 {
                    cut = shard.document(shard.document_of(cut.min(shard.len() - 1))?)?.start;
                }
            }
            let validation = (cut + 1 < shard.len()).then(|| self.rows(&shard, cut, false, Side::HeldOut));
            (self.rows(&shard, cut, false, Side::Learned(number as u64)), validation)
        };
        let empty = match &train {
            Rows::Stream(s) => s.rows(0) == 0,
            Rows::Examples(e) => e.count() == Some(0),
        };
        if empty {
            return Err(DataError::file(&path, "holds too little to learn from once validation is held out"));
        }
        Ok(Mixed { weight, train, validation, task: None, description, hash })
    }

    /// Rows of a shard: up to token `cut`, from it on, or all.
    fn rows(&self, shard: &Arc<Shard>, cut: u64, prompted: bool, side: Side) -> Rows {
        if prompted {
            let pairs = matches!(side, Side::Whole { pairs: true });
            let part = Part::all(if pairs { shard.meta.documents / 2 } else { shard.meta.documents });
            return Rows::Examples(Examples::Documents { shard: shard.clone(), part, order: None, pairs });
        }
        let (range, order) = match side {
            Side::Learned(number) => (0..cut, Some(self.order(number as usize))),
            Side::HeldOut => (cut..shard.len(), None),
            Side::Whole { .. } => (0..shard.len(), None),
        };
        Rows::Stream(Stream {
            shard: shard.clone(),
            range,
            sequence: self.settings.sequence,
            stride: match (order, self.settings.stride) {
                (None, Some(stride)) => stride.clamp(1, self.settings.sequence),
                _ => self.settings.sequence,
            },
            shifts: order.is_some(),
            order,
            mask: self.data.document_mask,
            end: self.tokenizer.end(),
            begin: begins(self.data, self.tokenizer).then(|| self.tokenizer.begin()),
        })
    }

    fn order(&self, number: usize) -> Philox {
        Philox::new(self.settings.seed, &format!("order of source {number}"))
    }

    fn task(&self, task: &Task, weight: f64) -> Result<Mixed, DataError> {
        let side = |split| -> Result<Rows, DataError> {
            let problems = Problems::new(task, self.settings.seed, split)?;
            Ok(Rows::Examples(Examples::Problems { problems, tokenizer: self.tokenizer.clone() }))
        };
        // The longest problems must fit a row: better said now than at some later step.
        let most = ("a sequence has", "sequence", self.settings.sequence);
        fits(task, self.settings.seed, self.tokenizer, task.max_steps, most)?;
        let description = format!(
            "task {}: size {}, {}, problems without end, one in {} held out",
            task::name(task.kind),
            task.size,
            task::steps(task),
            task::HELD_OUT
        );
        Ok(Mixed {
            weight,
            train: side(Split::Train)?,
            validation: Some(side(Split::Test)?),
            task: Some(task.clone()),
            // Longer problems, asked alone, are no part of the data that is read.
            hash: hash(&[learned(task), self.settings.seed.to_string()]),
            description,
        })
    }
}

/// Refuses a task whose problems of `steps` steps take more tokens than there is room for, and says
/// how many steps would fit. `room` is its name in a sentence, the key that has it, and its tokens.
fn fits(
    task: &Task,
    seed: u64,
    tokenizer: &Tokenizer,
    steps: u64,
    (name, key, room): (&str, &str, u64),
) -> Result<(), DataError> {
    let problems = Problems::new(task, seed, Split::Train)?;
    let tokens = |steps: u64| -> Result<u64, DataError> {
        let mut most = 0;
        for problem in (0..16).filter_map(|i| problems.of_steps(steps, i)) {
            most = most.max(examples::of_problem(tokenizer, &problem)?.tokens.len() as u64);
        }
        Ok(most)
    };
    let needed = tokens(steps)?;
    if needed <= room {
        return Ok(());
    }
    // The least that does not fit.
    let (mut low, mut high) = (task.kind.facts().steps.least, steps);
    while low < high {
        let middle = (low + high) / 2;
        match tokens(middle)? <= room {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    let fewer = match low > task.kind.facts().steps.least {
        true => format!("at most {}", many(low - 1, "step")),
        false => "a smaller size".into(),
    };
    let problem = format!(
        "a problem of {} takes {needed} tokens, {name} {room}; use {key} {}, or {fewer}",
        many(steps, "step"),
        needed.next_power_of_two()
    );
    Err(DataError::Task { task: task::name(task.kind), problem })
}

/// All that decides the problems to learn from, as runs of earlier versions have it in their
/// hashes.
fn learned(task: &Task) -> String {
    let Task { kind, min_steps, max_steps, size, length, longer: _ } = task;
    let length = length.map_or(String::new(), |length| format!(", length: {length}"));
    format!("Task {{ kind: {kind:?}, min_steps: {min_steps}, max_steps: {max_steps}, size: {size}{length} }}")
}

/// Whether rows of running text begin with the begin token.
pub fn begins(data: &spec::Data, tokenizer: &Tokenizer) -> bool {
    data.begin.unwrap_or(tokenizer.begins())
}

fn hash(parts: &[impl AsRef<str>]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part.as_ref().as_bytes()).update(&[0]);
    }
    hasher.finalize().to_hex().to_string()
}

/// The format of a source that is a file.
fn format(source: &Source) -> Result<Option<Format>, DataError> {
    let fields = |prompt: &Option<String>, answer: &String, template: &String| -> Result<Fields, DataError> {
        let template = Template::new(template, prompt.is_some())?;
        let rejected = source.rejected().map(String::from);
        Ok(Fields { prompt: prompt.clone(), answer: answer.clone(), rejected, template })
    };
    Ok(match source {
        Source::Text { .. } => Some(Format::Text),
        Source::Jsonl { prompt, answer, template, .. } => {
            Some(Format::Jsonl(fields(prompt, answer, template)?))
        }
        Source::Parquet { prompt, answer, template, .. } => {
            Some(Format::Parquet(fields(prompt, answer, template)?))
        }
        Source::Task(_) => None,
    })
}

fn format_prompted(data: &spec::Data) -> Result<bool, DataError> {
    for (source, _) in &data.sources {
        if let Some(format) = format(source)? {
            return Ok(format.prompted());
        }
    }
    Ok(false)
}

/// The path of a source that is a file.
pub fn path(source: &Source) -> Option<PathBuf> {
    match source {
        Source::Text { path } | Source::Jsonl { path, .. } | Source::Parquet { path, .. } => {
            Some(path.into())
        }
        Source::Task(_) => None,
    }
}

/// Position in every source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// By source; empty at the beginning.
    pub sources: Vec<SourceCursor>,
}

/// Position in one source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceCursor {
    /// Rows it has given.
    pub served: u64,
    /// Where it goes on.
    #[serde(flatten)]
    pub examples: examples::Cursor,
}

enum Supply {
    Stream(Stream, examples::Cursor),
    Packer(Packer),
    Pairs(Pairs),
}

struct Reader {
    weight: f64,
    served: u64,
    from: Supply,
    done: bool,
}

/// Batches one after another.
pub struct Batches {
    readers: Vec<Reader>,
    sequence: usize,
    repeat: bool,
    /// Rows that may still be taken.
    left: u64,
    filler: u32,
}

impl Batches {
    /// These, and at most `rows` rows.
    pub fn at_most(self, rows: u64) -> Self {
        Batches { left: rows, ..self }
    }

    /// The next rows. Validation may end with a batch filled up with empty rows, and then gives
    /// `None`.
    pub fn take(&mut self, rows: usize) -> Result<Option<Batch>, DataError> {
        let mut batch = Batch::new(self.sequence);
        while batch.rows() < rows && self.left > 0 {
            let owed = |r: &Reader| (r.served + 1) as f64 / r.weight;
            let Some(reader) =
                self.readers.iter_mut().filter(|r| !r.done).min_by(|a, b| owed(a).total_cmp(&owed(b)))
            else {
                break;
            };
            let repeat = self.repeat;
            let more = match &mut reader.from {
                Supply::Packer(packer) => packer.row(&mut batch)?,
                Supply::Pairs(pairs) => pairs.rows(&mut batch)?,
                Supply::Stream(stream, cursor) => {
                    if repeat && cursor.next >= stream.rows(cursor.epoch) {
                        (cursor.epoch, cursor.next) = (cursor.epoch + 1, 0);
                    }
                    let more = cursor.next < stream.rows(cursor.epoch);
                    if more {
                        stream.row(cursor.epoch, cursor.next, &mut batch)?;
                        cursor.next += 1;
                    }
                    more
                }
            };
            reader.served += u64::from(more);
            self.left -= u64::from(more);
            reader.done = !more;
        }
        if batch.rows() == 0 && rows > 0 {
            return Ok(None);
        }
        batch.pad_rows(rows, self.filler);
        Ok(Some(batch))
    }

    /// Where to go on.
    pub fn cursor(&self) -> Cursor {
        let sources = self.readers.iter().map(|r| SourceCursor {
            served: r.served,
            examples: match &r.from {
                Supply::Stream(_, cursor) => cursor.clone(),
                Supply::Packer(packer) => packer.cursor().clone(),
                Supply::Pairs(pairs) => pairs.cursor().clone(),
            },
        });
        Cursor { sources: sources.collect() }
    }

    /// How often the source was read that was read most, the part of the last time included; `None`
    /// where no source has an end.
    pub fn epochs(&self) -> Option<f64> {
        let of = |r: &Reader| {
            let (epoch, next, all) = match &r.from {
                Supply::Stream(stream, c) => (c.epoch, c.next as f64, stream.rows(c.epoch)),
                // Those that wait for a row are not read yet.
                Supply::Packer(packer) => {
                    let c = packer.cursor();
                    (c.epoch, c.next as f64 - c.waiting.len() as f64, packer.count()?)
                }
                Supply::Pairs(pairs) => (pairs.cursor().epoch, pairs.cursor().next as f64, pairs.count()),
            };
            Some(epoch as f64 + next / all.max(1) as f64)
        };
        self.readers.iter().filter_map(of).reduce(f64::max)
    }

    /// Examples longer than a row so far.
    pub fn too_long(&self) -> u64 {
        let count = |r: &Reader| match &r.from {
            Supply::Stream(..) => 0,
            Supply::Packer(packer) => packer.too_long,
            Supply::Pairs(pairs) => pairs.too_long,
        };
        self.readers.iter().map(count).sum()
    }
}

/// A number of things by the name of one.
fn many(n: u64, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}
