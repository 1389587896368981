//! Decoding with caches: every token goes through the model once.
//!
//! *In*: a model compiled with a [`Cache`]. *Out*: a [`NextLogits`]. *Promise*: the same logits as
//! [`super::Uncached`] up to rounding; a token's keys and values are written once, at the place of
//! its position, and read by all later ones; what is kept of texts is overwritten by each of its
//! tokens, and by no padding. A part that tokens may skip has a cache of its own for each
//! application, of the tokens that it processed, side by side.

use super::{Held, Next, NextLogits};
use crate::model::{Model, ModelError};
use dreamc_compiler::bind::Input;
use dreamc_compiler::compiled::{Entry, Per, SequenceState};
use dreamc_compiler::format::Formats;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::BufferId;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, CompileError, Compiled, Options, compile};
use dreamc_device::Device;
use dreamc_dsl::Spec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens of a prompt that are read at once where nobody knows how long prompts are.
const CHUNK: u64 = 64;
/// Most tokens of all rows that are read at once, where chunks of [`CHUNK`] have fewer: matmuls of
/// this number of rows are about as fast as they get, since weights are packed once for all.
const AT_ONCE: u64 = 512;
/// Chunks are multiples of this number of tokens.
const UNIT: u64 = 16;

/// Snapshots of states per text that a row keeps, at most.
const SNAPSHOTS: usize = 16;

/// Tokens that are copied from row to row at once.
const COPIED: usize = 1024;

/// How a model is compiled to write with.
#[derive(Clone, Debug)]
pub struct Writing {
    /// Texts at once.
    pub rows: u64,
    /// Tokens of a text at most, where that is less than the model's context.
    pub context: Option<u64>,
    /// Tokens of the longest prompt, where that is known: prompts are read in as few chunks as
    /// memory allows, and as short ones as that takes.
    pub prompt: Option<u64>,
    /// Count of the outermost `recur` in place of the spec's.
    pub depth: Option<u64>,
    /// The share of a token that has to have left for it to leave its loop, see [`Options::exit`].
    pub exit: Option<f64>,
    /// Which rewriting rules are used.
    pub rewrite: Rewriting,
    /// Room in the caches of wrapped parts: this many times what their capacity says, and a chunk
    /// more. Infinite: for whole texts.
    pub slack: f64,
    /// Tensors in bf16: those of the recipe's precision that the device has, [`Device::narrow`].
    pub narrow: Narrow,
    /// Storage of weights that stay in their file.
    pub formats: Formats,
    /// Whether some [`Next`] asks for the logits after every token of a prompt: a program more.
    pub every: bool,
}

/// One text as long as the model's context, in f32, with room for all of it in every cache, whose
/// prompt is read for what follows it.
impl Default for Writing {
    fn default() -> Self {
        let (context, prompt, depth, exit) = (None, None, None, None);
        let (slack, narrow, every) = (f64::INFINITY, Narrow::Nothing, false);
        let (rewrite, formats) = (Rewriting::default(), Formats::default());
        Writing { rows: 1, context, prompt, depth, exit, rewrite, slack, narrow, formats, every }
    }
}

impl Writing {
    /// Options of [`compile`].
    pub fn options(&self, spec: &Spec) -> Options {
        let places = self.context.unwrap_or(spec.model.context).min(spec.model.context);
        let (chunk, slack, every) = (self.chunk().min(places), self.slack, self.every);
        let cache = Cache { places, chunk, slack, every };
        Options {
            depth: self.depth,
            exit: self.exit,
            cache: Some(cache),
            logits: true,
            rewrite: self.rewrite.clone(),
            narrow: self.narrow,
            formats: self.formats.clone(),
            ..crate::train::prepare::forward(self.rows, cache.chunk)
        }
    }

    /// Tokens of each row that are read at once: all of a row are computed, those without a token,
    /// too.
    fn chunk(&self) -> u64 {
        let Some(prompt) = self.prompt else { return CHUNK };
        let prompt = prompt.max(1);
        let most = (AT_ONCE / self.rows.max(1) / UNIT * UNIT).max(CHUNK);
        prompt.div_ceil(prompt.div_ceil(most)).next_multiple_of(UNIT)
    }
}

/// Compiles a model to write with.
pub fn compile_cached(spec: &Spec, how: &Writing) -> Result<Compiled, CompileError> {
    compile(spec, &how.options(spec))
}

/// A cache's name and, for each of its instances, the tokens that each row holds there.
pub type Processed = (String, Vec<Vec<usize>>);

/// A state per token: in each instance of its buffer `[rows, entries, width]`.
struct State {
    buffer: BufferId,
    instances: u64,
    entries: usize,
    width: usize,
    /// Bytes of an element.
    bytes: usize,
    /// The states of positions that say whose entries they are, by their numbers.
    processed: Vec<usize>,
    /// Whether an entry is, in some instance, that of the token of this position.
    by_place: bool,
}

impl State {
    /// The element at which an entry of a row begins.
    fn at(&self, row: usize, entry: usize) -> u64 {
        ((row * self.entries + entry) * self.width) as u64
    }
}

/// The states that decoding keeps, as the compiler lists them: states of positions, states per
/// token, states per text.
struct Kept {
    /// Buffers of the positions of processed tokens, and for how many of each row they have room.
    processed: Vec<(BufferId, usize)>,
    states: Vec<State>,
    texts: Vec<SequenceState>,
}

impl Kept {
    fn of(compiled: &Compiled) -> Kept {
        let mut kept = Kept { processed: vec![], states: vec![], texts: vec![] };
        // The number among states of positions of each in the list.
        let mut numbers = vec![usize::MAX; compiled.sequence.len()];
        for (number, s) in numbers.iter_mut().zip(&compiled.sequence) {
            if let Per::Position { entries } = s.per {
                *number = kept.processed.len();
                kept.processed.push((s.buffer, entries as usize));
            }
        }
        for s in &compiled.sequence {
            match &s.per {
                Per::Position { .. } => {}
                &Per::Token { entries, ref positions, by_place } => kept.states.push(State {
                    buffer: s.buffer,
                    instances: s.instances,
                    entries: entries as usize,
                    width: s.width() as usize,
                    bytes: s.dtype.bytes() as usize,
                    processed: positions.iter().map(|&i| numbers[i]).collect(),
                    by_place,
                }),
                Per::Text => kept.texts.push(s.clone()),
            }
        }
        kept
    }
}

/// Where some tokens of a row are in the caches.
struct Span {
    /// For each cache of positions and each of its instances the first entry, and the positions.
    marks: Vec<Vec<(usize, Vec<i32>)>>,
    /// For each cache of keys or values the first entry and the one after the last; of instances
    /// that differ the lowest and the highest. More than the tokens' entries does no harm: they are
    /// of the same text, and those after them have no position.
    entries: Vec<(usize, usize)>,
}

/// The states of some tokens of a text: [`Cached::save`] makes it, [`Cached::load_saved`] takes it.
pub struct Saved {
    span: Span,
    /// States per token, one after the other, instance after instance.
    bytes: Vec<u8>,
    /// States per text after the last of the tokens, where they are known.
    texts: Option<Snapshot>,
}

impl Saved {
    /// Whether a text may go on after these tokens.
    pub(super) fn ends(&self) -> bool {
        self.texts.is_some()
    }
}

/// States per text, one after the other, instance after instance.
type Snapshot = Arc<[u8]>;

/// A model with sequence caches.
pub struct Cached {
    model: Model,
    rows: usize,
    chunk: usize,
    places: usize,
    /// Buffers of the positions of processed tokens, and for how many of each row they have room.
    processed: Vec<(BufferId, usize)>,
    /// States per token, of all applications.
    states: Vec<State>,
    /// States per text: zero in rows that are free.
    texts: Vec<SequenceState>,
    /// States per text of each row as they were after this number of tokens, in whole chunks.
    snapshots: Vec<BTreeMap<usize, Snapshot>>,
    /// Whether such snapshots are taken while a prompt is read.
    snaps: bool,
    /// Tokens of each row that are in the caches; none for a row that is free.
    lengths: Vec<Option<usize>>,
    /// Tokens that a row may yet have before a cache can be full.
    room: usize,
}

impl Cached {
    /// Puts a model compiled by [`compile_cached`] on a device; it has no weights yet.
    pub fn load(device: &dyn Device, compiled: Compiled) -> Result<Self, ModelError> {
        Cached::over(Model::load(device, compiled)?)
    }

    /// Writes with a model that has caches.
    pub fn over(model: Model) -> Result<Self, ModelError> {
        let compiled = model.compiled();
        let shape = |id: BufferId| {
            let buffer = compiled.plan.buffer(id);
            match buffer.shape[..] {
                [rows, n] => Ok((rows as usize, n as usize)),
                _ => Err(ModelError::NoBuffer(format!("{} [rows, n]", buffer.name))),
            }
        };
        let ids = compiled.input(Entry::Prefill, Input::Ids);
        let (rows, chunk) = shape(ids.ok_or_else(|| ModelError::NoBuffer("prefill.ids".into()))?)?;
        // A model that keeps nothing of tokens has texts of any length.
        let Kept { processed, states, texts } = Kept::of(compiled);
        let endless = processed.is_empty() && compiled.input(Entry::Prefill, Input::KeyPositions).is_none();
        let places = compiled.places.filter(|_| !endless).map_or(usize::MAX / 2, |places| places as usize);
        let (lengths, snapshots) = (vec![None; rows], vec![BTreeMap::new(); rows]);
        let (room, snaps) = (0, false);
        let mut cached =
            Cached { model, rows, chunk, places, processed, states, texts, snapshots, snaps, lengths, room };
        for i in 0..cached.processed.len() {
            cached.model.fill_ints(cached.processed[i].0, -1)?;
        }
        (0..rows).try_for_each(|row| cached.begin_text(row))?;
        Ok(cached)
    }

    /// The model, to give it weights.
    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }

    /// The model.
    pub fn loaded(&self) -> &Model {
        &self.model
    }

    /// Runs a program on the next tokens of some rows; gives the logits after the last of each, or
    /// after every one.
    fn run(&mut self, program: Entry, width: usize, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.make_sure_of_room(next.iter().map(|n| n.tokens.len()).max().unwrap_or(0))?;
        let cells = self.rows * width;
        let (mut ids, mut positions, mut slots) = (vec![0; cells], vec![0; cells], vec![-1; cells]);
        let mut asked = vec![0; self.rows];
        for &Next { row, tokens, .. } in next {
            let length = self.lengths[row].unwrap_or(0);
            for (i, &token) in tokens.iter().enumerate() {
                let (cell, at) = (row * width + i, length + i);
                ids[cell] = token as i32;
                positions[cell] = at as i32;
                slots[cell] = at as i32;
            }
            self.lengths[row] = Some(length + tokens.len());
            asked[row] = tokens.len().saturating_sub(1) as i32;
        }
        for (input, values) in [(Input::Ids, &ids), (Input::Slots, &slots), (Input::Asked, &asked)] {
            self.model.give(program, input, values)?;
        }
        self.model.give_positions(program, &positions)?;
        if self.loaded().compiled().input(program, Input::KeyPositions).is_some() {
            let mut keys = vec![-1; self.rows * self.places];
            for (row, length) in self.lengths.iter().enumerate() {
                let held = &mut keys[row * self.places..][..length.unwrap_or(0)];
                held.iter_mut().enumerate().for_each(|(at, key)| *key = at as i32);
            }
            self.model.give(program, Input::KeyPositions, &keys)?;
        }
        self.model.run_cached(program)?;
        for n in next.iter().filter(|n| n.reads()) {
            let length = self.length(n.row);
            if self.snaps
                && length.is_multiple_of(self.chunk)
                && let Some(text) = self.text_at(n.row, length)?
            {
                self.insert_snapshot(n.row, length, text);
            }
        }
        let logits = |n: &Next| -> Result<Vec<f32>, ModelError> {
            let from = if n.every { 0 } else { n.tokens.len().saturating_sub(1) };
            // Of a row that is read for what follows it there are those of one token.
            let each = if program == Entry::Prefill { 1 } else { width };
            let cell = |i: usize| self.model.logits_of(program, (n.row * each + i.min(each - 1)) as u64);
            Ok((from..n.tokens.len()).map(cell).collect::<Result<Vec<_>, _>>()?.concat())
        };
        next.iter().map(logits).collect()
    }

    /// Takes snapshots of states per text while prompts are read, at the ends of chunks.
    pub(super) fn snap(&mut self) {
        self.snaps = !self.texts.is_empty();
    }

    /// Keeps a snapshot, and of many every second one: a long prompt has few, further apart.
    fn insert_snapshot(&mut self, row: usize, length: usize, text: Snapshot) {
        let kept = &mut self.snapshots[row];
        if kept.len() >= SNAPSHOTS {
            let mut number = 0;
            kept.retain(|_, _| {
                number += 1;
                number % 2 == 0
            });
        }
        kept.insert(length, text);
    }

    /// States per text of a row after `length` tokens, where they are known.
    fn text_at(&self, row: usize, length: usize) -> Result<Option<Snapshot>, ModelError> {
        if self.texts.is_empty() {
            return Ok(Some(Snapshot::default()));
        }
        if self.length(row) != length {
            return Ok(self.snapshots[row].get(&length).cloned());
        }
        let session = self.model.session();
        let mut bytes = vec![];
        for state in &self.texts {
            for instance in 0..state.instances {
                let begun = bytes.len();
                bytes.resize(begun + (state.width() * state.dtype.bytes()) as usize, 0);
                session.read(state.buffer, instance, row as u64 * state.width(), &mut bytes[begun..])?;
            }
        }
        Ok(Some(bytes.into()))
    }

    /// Makes states per text of a row those of a snapshot.
    fn set_text(&mut self, row: usize, snapshot: &Snapshot) -> Result<(), ModelError> {
        let mut session = self.model.session();
        let mut bytes = &snapshot[..];
        for state in &self.texts {
            for instance in 0..state.instances {
                let parts = bytes.split_at_checked((state.width() * state.dtype.bytes()) as usize);
                let (these, rest) =
                    parts.ok_or_else(|| ModelError::NoBuffer("of states of one shape".into()))?;
                session.write(state.buffer, instance, row as u64 * state.width(), these)?;
                bytes = rest;
            }
        }
        Ok(())
    }

    /// The most tokens of a row, in whole chunks and at most `most`, after which another text may
    /// go on.
    pub(super) fn shareable(&self, row: usize, most: usize) -> usize {
        let most = most.min(self.length(row)) / self.chunk * self.chunk;
        if self.texts.is_empty() || most == self.length(row) {
            return most;
        }
        self.snapshots[row].range(..=most).next_back().map_or(0, |(length, _)| *length)
    }

    /// Makes what is kept of the text of a row that of a text that begins.
    fn begin_text(&mut self, row: usize) -> Result<(), ModelError> {
        self.snapshots[row].clear();
        let mut session = self.model.session();
        for state in &self.texts {
            let zeros = vec![0; (state.width() * state.dtype.bytes()) as usize];
            for instance in 0..state.instances {
                session.write(state.buffer, instance, row as u64 * state.width(), &zeros)?;
            }
        }
        Ok(())
    }

    /// Tokens of a row that are in the caches.
    pub(super) fn length(&self, row: usize) -> usize {
        self.lengths[row].unwrap_or(0)
    }

    /// Takes the tokens from a position on out of the caches of processed tokens, of every row: a
    /// program that is run once more with the inputs it has finds there what its first run found.
    /// States per text go on.
    pub(crate) fn forget_from(&self, from: usize) -> Result<(), ModelError> {
        let mut session = self.model.session();
        for &(buffer, _) in &self.processed {
            let plan = session.plan().buffer(buffer);
            let (instances, elements) = (plan.instances, plan.elements() as usize);
            for instance in 0..instances {
                let mut positions = vec![0i32; elements];
                session.read_at(buffer, instance, 0, &mut positions)?;
                let later = |position: &&mut i32| usize::try_from(**position).is_ok_and(|p| p >= from);
                positions.iter_mut().filter(later).for_each(|position| *position = -1);
                session.write_at(buffer, instance, 0, &positions)?;
            }
        }
        Ok(())
    }

    /// Where the tokens of a row from `from` to `to` are in the caches.
    fn span(&self, row: usize, from: usize, to: usize) -> Result<Span, ModelError> {
        let session = self.model.session();
        let mut marks = vec![];
        let mut entries = vec![];
        for &(buffer, each) in &self.processed {
            let (mut held, mut lowest, mut highest) = (vec![], usize::MAX, 0);
            for instance in 0..session.plan().buffer(buffer).instances {
                let mut positions = vec![0i32; each];
                session.read_at(buffer, instance, (row * each) as u64, &mut positions)?;
                // Positions ascend, and what follows them is -1: a cache is only appended to.
                let before =
                    |at: usize| positions.iter().take_while(|p| **p >= 0 && (**p as usize) < at).count();
                let (first, end) = (before(from), before(to));
                (lowest, highest) = (lowest.min(first), highest.max(end));
                held.push((first, positions[first..end].to_vec()));
            }
            marks.push(held);
            entries.push((lowest.min(highest), highest));
        }
        let of = |state: &State| {
            let place = state.by_place.then_some((from.min(state.entries), to.min(state.entries)));
            let all = state.processed.iter().map(|&i| entries[i]).chain(place);
            all.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0, 0))
        };
        Ok(Span { marks, entries: self.states.iter().map(of).collect() })
    }

    /// Reads from the caches what they hold of the tokens of a row from `from` to `to`.
    pub fn save(&self, row: usize, from: usize, to: usize) -> Result<Saved, ModelError> {
        let span = self.span(row, from, to)?;
        let session = self.model.session();
        let mut bytes = vec![];
        for (state, &(first, end)) in self.states.iter().zip(&span.entries) {
            for instance in 0..state.instances {
                let begun = bytes.len();
                bytes.resize(begun + (end - first) * state.width * state.bytes, 0);
                session.read(state.buffer, instance, state.at(row, first), &mut bytes[begun..])?;
            }
        }
        drop(session);
        Ok(Saved { span, bytes, texts: self.text_at(row, to)? })
    }

    /// Writes what was saved, of a use of the same plan, into a row that has the tokens before.
    pub fn load_saved(&mut self, row: usize, saved: &Saved) -> Result<(), ModelError> {
        let mut session = self.model.session();
        for (&(buffer, each), held) in self.processed.iter().zip(&saved.span.marks) {
            for (instance, (first, positions)) in (0..).zip(held) {
                session.write_at(buffer, instance, (row * each + first) as u64, positions)?;
            }
        }
        let mut bytes = saved.bytes.as_slice();
        for (state, &(first, end)) in self.states.iter().zip(&saved.span.entries) {
            for instance in 0..state.instances {
                let length = (end - first) * state.width * state.bytes;
                let parts = bytes.split_at_checked(length);
                let (these, rest) =
                    parts.ok_or_else(|| ModelError::NoBuffer("of caches of one shape".into()))?;
                session.write(state.buffer, instance, state.at(row, first), these)?;
                bytes = rest;
            }
        }
        drop(session);
        match &saved.texts {
            Some(texts) => self.set_text(row, texts),
            None => Ok(()),
        }
    }

    /// Copies the first tokens of a row to a free row of another use of the same plan, which is
    /// that text's from then on.
    pub(super) fn copy(
        &self,
        row: usize,
        length: usize,
        to: &mut Cached,
        there: usize,
    ) -> Result<(), ModelError> {
        // A chunk at a time: a text may be long.
        for from in (0..length).step_by(COPIED) {
            to.load_saved(there, &self.save(row, from, length.min(from + COPIED))?)?;
        }
        to.snapshots[there] =
            self.snapshots[row].range(..=length).map(|(at, text)| (*at, text.clone())).collect();
        to.take(there, length);
        Ok(())
    }

    /// Takes a row, whatever it held, as one with a text of `length` tokens.
    pub fn take(&mut self, row: usize, length: usize) {
        self.lengths[row] = Some(length);
        // How much its caches of processed tokens hold is not known.
        self.room = 0;
    }

    /// Gives a row back, and its memory.
    pub(super) fn leave(&mut self, row: usize) -> Result<(), ModelError> {
        self.release(row)?;
        let mut session = self.model.session();
        for state in &self.states {
            for instance in 0..state.instances {
                let elements = state.entries * state.width;
                session.forget(state.buffer, instance, state.at(row, 0), elements as u64)?;
            }
        }
        Ok(())
    }
}

impl Cached {
    /// How many tokens of each row every application of each skipped part has processed since the
    /// last start, by the name of its cache: `[application][row]`.
    pub fn processed(&self) -> Result<Vec<Processed>, ModelError> {
        let mut found = vec![];
        for &(buffer, entries) in &self.processed {
            let positions = self.model.read_ints(buffer)?;
            let of_row = |row: &[i32]| row.iter().filter(|p| **p >= 0).count();
            let application = |a: &[i32]| a.chunks(entries).map(of_row).collect();
            let all = positions.chunks(self.rows * entries).map(application).collect();
            found.push((self.loaded().compiled().plan.buffer(buffer).name.clone(), all));
        }
        Ok(found)
    }

    /// Refuses tokens that a cache of processed tokens might have no room for. The number of
    /// entries is read from the device only when the cache may be full.
    fn make_sure_of_room(&mut self, tokens: usize) -> Result<(), ModelError> {
        if self.room < tokens && !self.processed.is_empty() {
            let held = |all: &Processed| all.1.iter().flatten().copied().max().unwrap_or(0);
            let held: Vec<usize> = self.processed()?.iter().map(held).collect();
            let room = self.processed.iter().zip(held).map(|((_, entries), held)| {
                if *entries >= self.places { usize::MAX } else { entries - held }
            });
            self.room = room.min().unwrap_or(usize::MAX);
            if self.room < tokens {
                return Err(ModelError::CacheFull);
            }
        }
        self.room = self.room.saturating_sub(tokens);
        Ok(())
    }
}

impl NextLogits for Cached {
    fn rows(&self) -> usize {
        self.rows
    }

    fn held(&self) -> Held {
        Held { tokens: self.lengths.iter().flatten().sum(), kept: 0 }
    }

    fn context(&self) -> usize {
        self.places
    }

    fn chunk(&self) -> usize {
        self.chunk
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        let free = self.lengths.iter().position(Option::is_none);
        if let Some(row) = free {
            self.lengths[row] = Some(0);
        }
        Ok(free)
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let every = |n: &Next| n.every && n.reads();
        if next.iter().any(every) && !self.loaded().compiled().has(Entry::Every.task()) {
            return Err(ModelError::LastLogits);
        }
        // A row that is full is done; what it is given goes nowhere.
        let fits = |n: &Next| n.tokens.len().min(self.places - self.length(n.row).min(self.places));
        let (reading, writing): (Vec<usize>, Vec<usize>) = (0..next.len()).partition(|&i| next[i].reads());
        let fitting: Vec<usize> = next.iter().map(fits).collect();
        let mut found = vec![vec![]; next.len()];
        let (all, last): (Vec<usize>, Vec<usize>) = reading.into_iter().partition(|&i| every(&next[i]));
        let longest = |rows: &[usize]| rows.iter().map(|&i| fitting[i]).max().unwrap_or(0);
        let chunk = self.chunk;
        let reading = [(Entry::Prefill, &last), (Entry::Every, &all)];
        let parts = reading.into_iter().flat_map(|(program, rows)| {
            (0..longest(rows)).step_by(chunk).map(move |from| (program, from, chunk, rows))
        });
        for (program, from, width, rows) in parts.chain([(Entry::Decode, 0, 1, &writing)]) {
            let part = |&i: &usize| {
                let tokens = &next[i].tokens[from.min(fitting[i])..(from + width).min(fitting[i])];
                (!tokens.is_empty()).then_some((i, Next { tokens, ..next[i] }))
            };
            let (which, part): (Vec<usize>, Vec<Next>) = rows.iter().filter_map(part).unzip();
            if part.is_empty() {
                continue;
            }
            for (i, logits) in which.into_iter().zip(self.run(program, width, &part)?) {
                if next[i].every {
                    found[i].extend(logits);
                } else {
                    found[i] = logits;
                }
            }
        }
        Ok(found)
    }

    fn release(&mut self, row: usize) -> Result<(), ModelError> {
        self.lengths[row] = None;
        self.begin_text(row)?;
        for i in 0..self.processed.len() {
            let (buffer, entries) = self.processed[i];
            let instances = self.loaded().compiled().plan.buffer(buffer).instances;
            for instance in 0..instances {
                let at = (row * entries) as u64;
                self.model.session().write_at(buffer, instance, at, &vec![-1; entries])?;
            }
        }
        self.room = 0;
        Ok(())
    }
}

/// Room for processed tokens at first, over what capacities say: routers keep to them on average.
const SLACK: f64 = 1.25;

/// A [`Cached`] whose caches of wrapped parts have room for about what their capacity says. Where
/// routers process more, it is compiled again with twice the room, and reads what there was once
/// more.
pub struct Growing<'a> {
    make: Box<dyn Fn(f64) -> Result<Cached, ModelError> + 'a>,
    cached: Cached,
    slack: f64,
    /// Tokens that each row has read; none for a row that is free.
    texts: Vec<Option<Vec<u32>>>,
}

impl<'a> Growing<'a> {
    /// `make` gives a model with a given slack, by [`compile_cached`], with its weights.
    pub fn new(make: impl Fn(f64) -> Result<Cached, ModelError> + 'a) -> Result<Self, ModelError> {
        let cached = make(SLACK)?;
        let texts = vec![None; cached.rows];
        Ok(Growing { make: Box::new(make), cached, slack: SLACK, texts })
    }

    /// The model as it is now.
    pub fn cached(&self) -> &Cached {
        &self.cached
    }

    /// A model with twice the room, in which all rows are as they were and none has been read.
    fn grow(&mut self) -> Result<(), ModelError> {
        self.slack *= 2.0;
        self.cached = (self.make)(self.slack)?;
        for (row, _) in self.texts.iter().enumerate().filter(|(_, text)| text.is_some()) {
            self.cached.take(row, 0);
        }
        Ok(())
    }

    /// Reads all texts anew, with more room until there is enough; gives what `next` asks for,
    /// which is in the texts already.
    fn again(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        loop {
            self.grow()?;
            let whole = |(row, text): (usize, &Option<Vec<u32>>)| {
                let every = next.iter().any(|n| n.row == row && n.every);
                Some((row, text.clone().filter(|t| !t.is_empty())?, every))
            };
            let texts: Vec<_> = self.texts.iter().enumerate().filter_map(whole).collect();
            let all: Vec<Next> = texts
                .iter()
                .map(|(row, tokens, every)| Next { every: *every, ..Next::prompt(*row, tokens) })
                .collect();
            let mut logits = match self.cached.step(&all) {
                Err(ModelError::CacheFull) => continue,
                result => result?,
            };
            let of = |n: &Next| {
                let Some(at) = all.iter().position(|other| other.row == n.row) else { return vec![] };
                let found = std::mem::take(&mut logits[at]);
                let vocab = if n.every { found.len() / all[at].tokens.len() } else { found.len() };
                let asked = if n.every { n.tokens.len().min(all[at].tokens.len()) } else { 1 };
                found[found.len() - vocab * asked..].to_vec()
            };
            return Ok(next.iter().map(of).collect());
        }
    }
}

impl NextLogits for Growing<'_> {
    fn rows(&self) -> usize {
        self.cached.rows()
    }

    fn context(&self) -> usize {
        self.cached.context()
    }

    fn chunk(&self) -> usize {
        self.cached.chunk()
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        let row = self.cached.admit()?;
        if let Some(row) = row {
            self.texts[row] = Some(vec![]);
        }
        Ok(row)
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let most = self.cached.context();
        for n in next {
            if let Some(text) = &mut self.texts[n.row] {
                let room = most.saturating_sub(text.len());
                text.extend(&n.tokens[..n.tokens.len().min(room)]);
            }
        }
        match self.cached.step(next) {
            Err(ModelError::CacheFull) => self.again(next),
            result => result,
        }
    }

    fn release(&mut self, row: usize) -> Result<(), ModelError> {
        self.texts[row] = None;
        self.cached.release(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_as_long_as_prompts() {
        let chunk = |rows, prompt| Writing { rows, prompt, ..Writing::default() }.chunk();
        assert_eq!((chunk(1, None), chunk(8, None)), (64, 64));
        // Few tokens are not padded to many, and equal parts are.
        assert_eq!([1, 16, 17, 100].map(|n| chunk(1, Some(n))), [16, 16, 32, 112]);
        assert_eq!([512, 513, 4096].map(|n| chunk(1, Some(n))), [512, 272, 512]);
        // Several rows share what is read at once.
        assert_eq!([2, 3, 8, 100].map(|rows| chunk(rows, Some(4096))), [256, 160, 64, 64]);
        assert_eq!([100, 0].map(|n| chunk(8, Some(n))), [64, 16]);
    }
}
