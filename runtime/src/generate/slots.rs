//! Rows for texts that come and go.
//!
//! *In*: a specification, its weights, and how many texts there may be at once. *Out*: a
//! [`NextLogits`]. *Promise*: the bits of a text are those of [`super::Cached`] with one row and
//! without rewriting, however many others there are, and wherever it was moved meanwhile.
//!
//! All are uses of one plan. Prompts are read in a use of one row, a chunk at a time, so that
//! reading costs what one text costs; tokens are written in a use of as few rows as hold the texts,
//! because every row of a launch is computed, whoever has it. A text moves with its caches: from
//! the reader to a row behind its prompt, and to another use when many come or go. A prompt that
//! begins as one that a row has read takes that beginning over, in whole chunks, if caches hold
//! every token: of those that hold what a part processed no beginning can be taken.

use super::{Cached, Next, NextLogits, Writing};
use crate::checkpoint::Weights;
use crate::device::Device;
use crate::model::{Memory, ModelError};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, CompileError, Options, compile_together};
use dreamc_dsl::Spec;

/// Names of the uses that write, and their rows where more are wanted.
const WIDTHS: [(&str, u64); 4] = [("one.", 1), ("few.", 4), ("many.", 16), ("most.", u64::MAX)];

/// Rows for texts that come and go.
pub struct Slots {
    reader: Cached,
    /// The text whose caches the reader has, while it is read.
    reading: Option<usize>,
    /// The prompt that the reader has read, also behind its time.
    read: Vec<u32>,
    /// Uses of one row, of more, and of the most.
    tables: Vec<Cached>,
    table: usize,
    /// Rows of the table in use.
    rows: Vec<Row>,
    /// For each text that may be, the row it has; none while it is read, and before.
    slots: Vec<Option<Slot>>,
    /// Counts the rows that were taken.
    clock: u64,
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
    /// The prompt that was read into it.
    read: Vec<u32>,
    taken: u64,
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
            options.cache = options.cache.map(|cache| Cache { chunk: 1, ..cache });
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
        Ok(Slots {
            reader,
            reading: None,
            read: vec![],
            rows: vec![Row::default(); tables[0].rows()],
            tables,
            table: 0,
            slots: vec![None; how.rows as usize],
            clock: 0,
        })
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
        self.clock += 1;
        self.rows[row] = Row { slot: Some(slot), read: self.read.clone(), taken: self.clock };
        self.slots[slot] = Some(Slot { row: Some(row) });
        Ok(())
    }

    /// A row that no text has, the one that is longest out of use; of a wider table where there is
    /// none.
    fn free_row(&mut self) -> Result<usize, ModelError> {
        loop {
            let free = self.rows.iter().enumerate().filter(|(_, row)| row.slot.is_none());
            match free.min_by_key(|(_, row)| (row.taken, !row.read.is_empty())) {
                Some((row, _)) => return Ok(row),
                None if self.table + 1 < self.tables.len() => self.move_to(self.table + 1)?,
                None => return Err(ModelError::NoBuffer("for another row".into())),
            }
        }
    }

    /// Moves all texts to another table; prompts that nobody has any more come along where there is
    /// room.
    fn move_to(&mut self, table: usize) -> Result<(), ModelError> {
        let mut order: Vec<usize> = (0..self.rows.len())
            .filter(|&i| self.rows[i].slot.is_some() || !self.rows[i].read.is_empty())
            .collect();
        order.sort_by_key(|&i| (self.rows[i].slot.is_none(), std::cmp::Reverse(self.rows[i].taken)));
        let mut rows = vec![Row::default(); self.tables[table].rows()];
        // The lower of two, and the higher.
        let (low, high) = self.tables.split_at_mut(self.table.max(table));
        let (from, to) = match self.table < table {
            true => (&mut low[self.table], &mut high[0]),
            false => (&mut high[0], &mut low[table]),
        };
        for (there, &row) in order.iter().take(rows.len()).enumerate() {
            let held = std::mem::take(&mut self.rows[row]);
            match held.slot {
                Some(slot) => {
                    from.copy(row, from.length(row), to, there)?;
                    self.slots[slot] = Some(Slot { row: Some(there) });
                    from.release(row)?;
                }
                None => {
                    from.copy(row, held.read.len(), to, there)?;
                    to.release(there)?;
                }
            }
            rows[there] = held;
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
                table.release(row)?;
                self.read = std::mem::take(&mut self.rows[row].read);
                self.rows[row].slot = None;
            }
            None => {
                self.reader.release(0)?;
                self.reader.take(0, 0);
                self.read.clear();
            }
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
        }
        if let Some(row) = self.slots[slot].take().and_then(|s| s.row) {
            self.tables[self.table].release(row)?;
            self.rows[row].slot = None;
            if !self.reader.divides() {
                self.rows[row].read.clear();
            }
        }
        Ok(())
    }

    fn adopt(&mut self, slot: usize, text: &[u32]) -> Result<usize, ModelError> {
        if !self.reader.divides() {
            return Ok(0);
        }
        let of = |read: &[u32]| shared(text, read, self.reader.chunk());
        let rows = self.rows.iter().enumerate().map(|(i, row)| (of(&row.read), Some(i)));
        let (length, row) =
            rows.fold((of(&self.read), None), |best, row| if row.0 > best.0 { row } else { best });
        if length == 0 {
            return Ok(0);
        }
        // Where a wider table is needed for what is in the reader, rows move.
        if self.reading.is_some() {
            self.put_down()?;
            return self.adopt(slot, text);
        }
        match row {
            Some(row) => self.tables[self.table].copy(row, length, &mut self.reader, 0)?,
            None => self.reader.take(0, length),
        }
        self.read = text[..length].to_vec();
        self.reading = Some(slot);
        Ok(length)
    }
}
