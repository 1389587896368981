//! Rows for texts that come and go.
//!
//! *In*: a specification, its weights, and how many texts there may be at once. *Out*: a
//! [`NextLogits`]. *Promise*: the bits of a text are those of [`super::Cached`] with one row and
//! without rewriting, however many others there are, and wherever it was moved meanwhile.
//!
//! Bits are those of the same request: the logits after a prompt whose scores are asked for come
//! from a head of all its tokens, and may be rounded otherwise than those of one token.
//!
//! All are uses of one plan. Prompts are read in a use of one row, a chunk at a time, so that
//! reading costs what one text costs; tokens are generated in a use of as few rows as hold the
//! texts, because every row of a launch is computed, whoever has it. A text moves with its caches:
//! from the reader to a row after its prompt, and to another use when many come or go.
//!
//! A row that a text has left gives its memory back, so that memory follows the tokens of the texts
//! there are. A prompt copies the beginning that it shares with the prompt of another text here, in
//! whole chunks, or with one whose pages are kept after its text left ([`Slots::keep`]). Another
//! text never copies generated tokens: programs that generate round otherwise than the one that
//! reads.

use super::prefixes::Prefixes;
use super::{Cached, Held, Next, NextLogits, Writing};
use crate::checkpoint::Weights;
use crate::model::{Memory, ModelError};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, CompileError, Options, compile_together};
use dreamc_device::Device;
use dreamc_dsl::Spec;

/// Names of the uses that write, and their rows where more are wanted.
const WIDTHS: [(&str, u64); 4] = [("one.", 1), ("few.", 4), ("many.", 16), ("most.", u64::MAX)];

/// Rows for texts that come and go.
pub struct Slots {
    reader: Cached,
    /// The text whose caches the reader has, while it is read.
    reading: Option<usize>,
    /// The part of its prompt that the reader has read.
    read: Vec<u32>,
    /// Uses of one row, of more, and of the most.
    tables: Vec<Cached>,
    table: usize,
    /// Rows of the table in use.
    rows: Vec<Row>,
    /// For each text that may be, the row it has; none while it is read, and before.
    slots: Vec<Option<Slot>>,
    prefixes: Prefixes,
}

/// A text that was admitted.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    row: Option<usize>,
}

/// A row of a table.
#[derive(Clone, Debug, Default)]
struct Row {
    /// The text that has it.
    slot: Option<usize>,
    /// Its prompt.
    read: Vec<u32>,
}

impl Slots {
    /// Compiles a model for `how.rows` texts at once, and gives it its weights. Nothing is
    /// rewritten, whatever `how.rewrite` is: the rules that pay depend on the number of rows, and
    /// other rules round differently.
    pub fn load(
        device: &dyn Device,
        spec: &Spec,
        how: &Writing,
        weights: &Weights,
    ) -> Result<Self, ModelError> {
        let mut slots = Slots::compile(device, spec, how)?;
        slots.reader.model().restore(weights)?;
        Ok(slots)
    }

    /// Compiles a model for `how.rows` texts at once; it has no weights yet.
    pub fn compile(device: &dyn Device, spec: &Spec, how: &Writing) -> Result<Self, ModelError> {
        let of = |rows: u64| Writing { rows, rewrite: Rewriting::off(), ..how.clone() }.options(spec);
        let mut uses: Vec<(&'static str, Options)> = vec![("", of(1))];
        for (i, &(name, width)) in WIDTHS.iter().enumerate() {
            let rows = width.min(how.rows);
            // A use that writes reads no prompts.
            let mut options = of(rows);
            options.cache = options.cache.map(|cache| Cache { chunk: 1, every: false, ..cache });
            options.sequence = 1;
            uses.push((name, options));
            if WIDTHS.get(i + 1).is_none() || rows == how.rows {
                break;
            }
        }
        let mut all = compile_together(spec, &uses)?.0.into_iter();
        let first = all.next().ok_or(CompileError::Unsupported("a model for no use"))?;
        let reader = Cached::load(device, first)?;
        let beside = |compiled| Cached::over(reader.loaded().beside(compiled)?);
        let tables = all.map(beside).collect::<Result<Vec<_>, _>>()?;
        let mut slots = Slots {
            prefixes: Prefixes::new(reader.chunk()),
            reader,
            reading: None,
            read: vec![],
            rows: vec![Row::default(); tables[0].rows()],
            tables,
            table: 0,
            slots: vec![None; how.rows as usize],
        };
        for cached in std::iter::once(&mut slots.reader).chain(&mut slots.tables) {
            (0..cached.rows()).try_for_each(|row| cached.leave(row))?;
        }
        Ok(slots)
    }

    /// Keeps the beginnings of prompts, at most `tokens` tokens of them, when their texts leave;
    /// none unless asked. They are outside the caches, in the memory of the host.
    pub fn keep(&mut self, tokens: usize) {
        self.prefixes.keep(tokens);
        self.reader.snap();
    }

    /// The use that reads, to give it weights.
    pub fn reader(&mut self) -> &mut Cached {
        &mut self.reader
    }

    /// Memory of all uses.
    pub fn memory(&self) -> Memory {
        self.reader.loaded().memory()
    }

    /// Gives the text that is in the reader a row, so that the reader is free.
    fn put_down(&mut self) -> Result<(), ModelError> {
        let Some(slot) = self.reading.take() else { return Ok(()) };
        let row = self.free_row()?;
        self.reader.copy(0, self.reader.length(0), &mut self.tables[self.table], row)?;
        self.reader.leave(0)?;
        self.rows[row] = Row { slot: Some(slot), read: std::mem::take(&mut self.read) };
        self.slots[slot] = Some(Slot { row: Some(row) });
        Ok(())
    }

    /// A row that no text has, the lowest; of a wider table where there is none.
    fn free_row(&mut self) -> Result<usize, ModelError> {
        loop {
            match self.rows.iter().position(|row| row.slot.is_none()) {
                Some(row) => return Ok(row),
                None if self.table + 1 < self.tables.len() => self.move_to(self.table + 1)?,
                None => return Err(ModelError::NoBuffer("for another row".into())),
            }
        }
    }

    /// Moves all texts to another table, which none is in.
    fn move_to(&mut self, table: usize) -> Result<(), ModelError> {
        let mut rows = vec![Row::default(); self.tables[table].rows()];
        // The lower of two, and the higher.
        let (low, high) = self.tables.split_at_mut(self.table.max(table));
        let (from, to) = match self.table < table {
            true => (&mut low[self.table], &mut high[0]),
            false => (&mut high[0], &mut low[table]),
        };
        let texts = self.rows.iter_mut().enumerate().filter(|(_, row)| row.slot.is_some());
        for (there, (row, held)) in texts.enumerate() {
            from.copy(row, from.length(row), to, there)?;
            from.leave(row)?;
            rows[there] = std::mem::take(held);
            if let Some(slot) = rows[there].slot {
                self.slots[slot] = Some(Slot { row: Some(there) });
            }
        }
        (self.rows, self.table) = (rows, table);
        Ok(())
    }

    /// A table of fewer rows, where texts have become so few that they would not soon be too many.
    fn shrink(&mut self) -> Result<(), ModelError> {
        while let Some(below) = self.table.checked_sub(1) {
            let texts = self.rows.iter().filter(|row| row.slot.is_some()).count();
            let enough = self.tables[below].rows();
            if texts > enough || texts > 1 && 2 * texts > enough {
                break;
            }
            self.move_to(below)?;
        }
        Ok(())
    }

    /// Brings a text to the reader.
    fn take_up(&mut self, slot: usize) -> Result<(), ModelError> {
        if self.reading == Some(slot) {
            return Ok(());
        }
        self.put_down()?;
        match self.slots[slot].and_then(|s| s.row) {
            Some(row) => {
                let table = &mut self.tables[self.table];
                table.copy(row, table.length(row), &mut self.reader, 0)?;
                table.leave(row)?;
                self.read = std::mem::take(&mut self.rows[row]).read;
            }
            None => self.reader.take(0, 0),
        }
        self.slots[slot] = Some(Slot::default());
        self.reading = Some(slot);
        Ok(())
    }
}

/// How much of a text another begins with, in whole chunks, so that something of it is left.
fn shared(text: &[u32], read: &[u32], chunk: usize) -> usize {
    let alike = text.iter().zip(read).take_while(|(a, b)| a == b).count();
    alike.min(text.len().saturating_sub(1)) / chunk * chunk
}

impl NextLogits for Slots {
    fn rows(&self) -> usize {
        self.slots.len()
    }

    fn context(&self) -> usize {
        self.reader.context()
    }

    fn chunk(&self) -> usize {
        self.reader.chunk()
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        let free = self.slots.iter().position(Option::is_none);
        if let Some(slot) = free {
            self.slots[slot] = Some(Slot::default());
        }
        Ok(free)
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut found = vec![vec![]; next.len()];
        let (reading, writing): (Vec<usize>, Vec<usize>) = (0..next.len()).partition(|&i| next[i].reads());
        for &i in &reading {
            self.take_up(next[i].row)?;
            let logits = self.reader.step(&[Next { row: 0, ..next[i] }])?;
            self.read.extend(next[i].tokens);
            found[i] = logits.into_iter().next().unwrap_or_default();
        }
        // A text that writes has been read.
        if let Some(slot) = self.reading
            && writing.iter().any(|&i| next[i].row == slot)
        {
            self.put_down()?;
        }
        if writing.is_empty() {
            return Ok(found);
        }
        self.shrink()?;
        let at = |i: &usize| {
            let row = self.slots[next[*i].row].and_then(|slot| slot.row);
            let row = row.ok_or_else(|| ModelError::NoBuffer("of a text that has not been read".into()))?;
            Ok(Next { row, ..next[*i] })
        };
        let there = writing.iter().map(at).collect::<Result<Vec<Next>, ModelError>>()?;
        for (i, logits) in writing.iter().zip(self.tables[self.table].step(&there)?) {
            found[*i] = logits;
        }
        Ok(found)
    }

    fn release(&mut self, slot: usize) -> Result<(), ModelError> {
        if self.reading == Some(slot) {
            self.reading = None;
            let read = std::mem::take(&mut self.read);
            self.prefixes.save(&read, &self.reader, 0)?;
            self.reader.leave(0)?;
        }
        if let Some(row) = self.slots[slot].take().and_then(|s| s.row) {
            let read = std::mem::take(&mut self.rows[row]).read;
            let table = &mut self.tables[self.table];
            self.prefixes.save(&read, table, row)?;
            table.leave(row)?;
        }
        Ok(())
    }

    fn adopt(&mut self, slot: usize, text: &[u32]) -> Result<usize, ModelError> {
        self.put_down()?;
        let chunk = self.reader.chunk();
        let table = &self.tables[self.table];
        let rows = self.rows.iter().enumerate();
        let rows = rows.map(|(i, row)| (table.shareable(i, shared(text, &row.read, chunk)), i));
        let (of_row, row) = rows.max().unwrap_or((0, 0));
        // Something of the text is left to read.
        let kept = self.prefixes.find(&text[..text.len().saturating_sub(1)]);
        let length = of_row.max(kept);
        if length == 0 {
            return Ok(0);
        }
        if of_row >= kept {
            self.tables[self.table].copy(row, length, &mut self.reader, 0)?;
        } else {
            self.prefixes.restore(&text[..length], &mut self.reader, 0)?;
            self.reader.take(0, length);
        }
        self.read = text[..length].to_vec();
        self.reading = Some(slot);
        Ok(length)
    }

    fn held(&self) -> Held {
        let tokens = self.reader.held().tokens + self.tables[self.table].held().tokens;
        Held { tokens, kept: self.prefixes.tokens() }
    }
}
