//! The four shapes of a row kernel: its entries, their parameters and launches.

use super::plan::{BLOCK, Kept, RESIDENT, RESIDENT_OF_BLOCKS, STATIC_LIMIT};
use super::text::{At, Value, load, numbers};
use super::turns::{Step, turns};
use super::{Form, Generator, Result, sums};
use crate::codegen::text::{Builder, Param, blocks, places};
use crate::codegen::{Argument, CodegenError, Source};
use crate::ir::DType;
use crate::program::{RowInput, RowStore, SUM_BLOCK};
use std::collections::{BTreeSet, HashMap};

/// Shared memory of a block that has rows, and what it does with them.
struct Layout {
    /// Outputs of rows.
    stores: Vec<usize>,
    /// Sums over rows.
    totals: Vec<usize>,
    /// Results of a row that wait, by output: offsets in the row's shared memory.
    waiting: HashMap<usize, u64>,
    /// The same for sums over the rows that a block has one after another.
    running: HashMap<usize, u64>,
    /// Floats of a row.
    floats: u64,
    /// Rows that a block sums.
    share: u64,
    /// Bytes of all, and whether the launch gives them.
    bytes: u64,
    dynamic: bool,
    /// Threads of a block.
    block: u64,
}

impl Generator<'_> {
    pub(super) fn source(&mut self) -> Result<Option<Source>> {
        let kernel = self.kernel;
        let kept = self.plans.iter().any(|p| p.own.is_some() || !p.stats.is_empty());
        let live: Vec<usize> = (0..kernel.outputs.len())
            .filter(|&o| self.length(kernel.outputs[o].array as usize) > 0)
            .collect();
        let length = self.length(kernel.outputs[live[0]].array as usize);
        let same = live.iter().all(|&o| self.length(kernel.outputs[o].array as usize) == length);
        let summed = live.iter().any(|&o| sums(kernel.outputs[o].store));
        let some = if self.some { "_some" } else { "" };
        let name = format!("rows_{}x{length}{some}", kernel.rows);
        if self.form == Form::Long {
            return self.long(name, &live);
        }
        if !kept && !summed && same && !self.staged {
            let mut builder = Builder::statements(name, "rows.cuh");
            self.flat(&mut builder, "rows", &live, length, None)?;
            return Ok(builder.finish());
        }
        self.rows(name, &live, summed)
    }

    /// Parameters of the entry, and the lines that find the row in each.
    fn parameters(&self, live: &[usize]) -> (Vec<Param>, Vec<String>) {
        let kernel = self.kernel;
        let (mut list, mut lines) = (vec![], vec![]);
        if self.some {
            list.push(places());
            lines.push("if (places[row] < 0) return;".into());
        }
        let float_type = |dtype: DType| if dtype == DType::Bf16 { "bf16" } else { "float" };
        for (i, input) in kernel.inputs.iter().enumerate() {
            let (element, strided) = match *input {
                RowInput::Row { dtype, .. } => (float_type(dtype), true),
                RowInput::Shared { dtype, .. } => (float_type(dtype), false),
                RowInput::RowInts { .. } => ("int", true),
                RowInput::Index => {
                    list.push(Param::new("int", &format!("x{i}"), Argument::Index(i)));
                    continue;
                }
            };
            let pointer = format!("const {element} *");
            let operand = Argument::Operand(i);
            if strided {
                list.push(Param::new(&pointer, &format!("in{i}"), operand));
                list.push(Param::new("i64", &format!("in{i}_stride"), Argument::Stride(i)));
                lines.push(format!("{pointer}x{i} = in{i} + row * in{i}_stride;"));
            } else {
                list.push(Param::new(&pointer, &format!("x{i}"), operand));
            }
        }
        for &o in live {
            let output = kernel.outputs[o];
            let at = kernel.inputs.len() + o;
            let pointer = format!("{} *", float_type(output.dtype));
            if sums(output.store) {
                continue;
            }
            list.push(Param::new(&pointer, &format!("out{o}"), Argument::Operand(at)));
            list.push(Param::new("i64", &format!("out{o}_stride"), Argument::Stride(at)));
            lines.push(format!("{pointer}y{o} = out{o} + row * out{o}_stride;"));
        }
        (list, lines)
    }

    /// Adds what reports indices out of range, where there are any, and finishes the entry.
    fn entry(&mut self, builder: &mut Builder, name: &str, geometry: (u32, u32, u32), mut list: Vec<Param>) {
        if std::mem::take(&mut self.indices) {
            list.push(Param::new("int *", "status", Argument::Status));
            list.push(Param::new("int", "launch", Argument::Launch));
        }
        for table in std::mem::take(&mut self.tables) {
            builder.line("");
            builder.line(&table);
        }
        let body = std::mem::take(&mut self.text);
        builder.turns(turns(&std::mem::take(&mut self.steps)));
        builder.entry(name, geometry, &list, &body);
    }

    /// The lines that store elements.
    fn put(&mut self, o: usize, at: &At, value: &Value) {
        let add = self.kernel.outputs[o].store == RowStore::AddRow;
        if add {
            self.steps.push(Step::Load(self.kernel.inputs.len() + o));
        }
        self.steps.push(Step::Store);
        if at.width > 1 && self.variant.is_wide(self.kernel.inputs.len() + o) {
            let (to, value) = (format!("y{o} + {}", at.index), value.spread(at.width));
            let old = if add { format!("{} + ", load(&format!("y{o}"), 0, at)) } else { String::new() };
            return self.line(&format!("put({to}, {old}{value});"));
        }
        for lane in 0..at.width {
            let index = if lane == 0 { at.index.clone() } else { format!("{} + {lane}", at.index) };
            let value = if value.width == 1 { value.text.clone() } else { format!("{}[{lane}]", value.text) };
            let old = if add { format!("value(y{o}[{index}]) + ") } else { String::new() };
            self.line(&format!("put(y{o} + {index}, {old}{value});"));
        }
    }

    /// An entry with a thread for each element of outputs of one length, or for several. `stats`:
    /// the memory of values kept of the rows.
    fn flat(
        &mut self,
        builder: &mut Builder,
        entry: &str,
        outputs: &[usize],
        length: u64,
        stats: Option<u64>,
    ) -> Result<()> {
        let (mut list, lines) = self.parameters(outputs);
        let count = self.kernel.rows.saturating_mul(length);
        let width = self.width(length);
        self.scopes.push(HashMap::new());
        let times = if width == 1 { String::new() } else { format!(" * {width}") };
        // Numbers of 64 bits are slow to divide.
        match count <= (i32::MAX as u64) - 8 * BLOCK {
            true => self.line(&format!("const int at = (block() * {BLOCK} + thread()){times};")),
            false => self.line(&format!("const i64 at = (i64(block()) * {BLOCK} + thread()){times};")),
        }
        self.line(&format!("if (at >= {count}) return;"));
        self.line(&format!("const i64 row = at / {length};"));
        self.line(&format!("const int i = int(at % {length});"));
        lines.iter().for_each(|line| self.line(line));
        list.extend(self.kept_rows(stats, "const "));
        self.storing = true;
        // All is read before anything is written: an output may overlap an input.
        let at = if length == 1 { At::one("0") } else { At { index: "i".into(), width } };
        let mut values = vec![];
        for &o in outputs {
            values.push(self.value(self.kernel.outputs[o].array, &at));
        }
        for (&o, value) in outputs.iter().zip(values) {
            self.put(o, &at, &value);
        }
        self.storing = false;
        self.scopes.pop();
        let geometry = (blocks((count / width).div_ceil(BLOCK))?, BLOCK as u32, 0);
        self.entry(builder, entry, geometry, list);
        Ok(())
    }

    /// The line that finds what is kept of the row in scratch memory, and the parameter for it.
    fn kept_rows(&mut self, stats: Option<u64>, constant: &str) -> Option<Param> {
        let at = stats?;
        self.line(&format!("{constant}float *kept = stats + row * {};", self.stored));
        Some(Param::new(&format!("{constant}float *"), "stats", Argument::Scratch(at)))
    }

    /// Passes over rows of any length: what is kept of each row; sums, a thread for each column;
    /// results of each row. In this order, because results may overlap operands.
    fn long(&mut self, name: String, live: &[usize]) -> Result<Option<Source>> {
        let kernel = self.kernel;
        let mut builder = Builder::statements(name, "rows.cuh");
        let size = self.stored.saturating_mul(4).saturating_mul(kernel.rows);
        let stats = (size > 0).then(|| builder.scratch(size));
        if stats.is_some() {
            let (mut list, lines) = self.parameters(&[]);
            self.scopes.push(HashMap::new());
            let head = self.text.len();
            self.line("const int t = thread();");
            self.line("const i64 row = block();");
            lines.iter().for_each(|line| self.line(line));
            list.extend(self.kept_rows(stats, ""));
            for i in 0..kernel.ops.len() {
                self.keep(i)?;
            }
            self.meet();
            self.buffer(head);
            self.scopes.pop();
            let geometry = (blocks(kernel.rows)?, self.threads as u32, 0);
            self.entry(&mut builder, "rows_kept", geometry, list);
        }
        let lengths = |summed: bool| {
            let of = live.iter().filter(|&&o| sums(kernel.outputs[o].store) == summed);
            of.map(|&o| self.length(kernel.outputs[o].array as usize)).collect::<BTreeSet<u64>>()
        };
        let (summed, stored) = (lengths(true), lengths(false));
        let of = |length: u64, summed: bool| -> Vec<usize> {
            let fits = |o: &&usize| {
                let output = kernel.outputs[**o];
                kernel.lengths[output.array as usize] == length && sums(output.store) == summed
            };
            live.iter().filter(fits).copied().collect()
        };
        for length in summed {
            self.columns(&mut builder, &of(length, true), length, stats)?;
        }
        // The results of one length may overlap operands of the next.
        self.shifted |= stored.len() > 1;
        for length in stored {
            self.flat(&mut builder, &format!("rows_{length}"), &of(length, false), length, stats)?;
        }
        Ok(builder.finish())
    }

    /// An entry with a thread for each column of sums over rows of one length.
    fn columns(
        &mut self,
        builder: &mut Builder,
        outputs: &[usize],
        length: u64,
        stats: Option<u64>,
    ) -> Result<()> {
        let kernel = self.kernel;
        let (mut list, lines) = self.parameters(&[]);
        self.scopes.push(HashMap::new());
        // Several columns to a thread where that leaves blocks enough.
        let wide = self.width(length);
        let width = if length / (wide * BLOCK) >= 2 * self.variant.processors() { wide } else { 1 };
        let times = if width == 1 { String::new() } else { format!(" * {width}") };
        self.line(&format!("const int i = (block() * {BLOCK} + thread()){times};"));
        self.line(&format!("if (i >= {length}) return;"));
        let declare = |g: &mut Self, prefix: &str| {
            outputs.iter().for_each(|o| g.line(&format!("{} {prefix}{o} = 0.0f;", numbers(width))));
        };
        let at = if length == 1 { At::one("0") } else { At { index: "i".into(), width } };
        declare(self, "total");
        let several = kernel.rows > SUM_BLOCK;
        if several {
            self.open_rolled(
                &format!("for (i64 first = 0; first < {}; first += {SUM_BLOCK}) {{", kernel.rows),
                kernel.rows.div_ceil(SUM_BLOCK),
            );
            let end = format!("first + {SUM_BLOCK}");
            self.line(&format!("const i64 end = {end} < {0} ? {end} : {0};", kernel.rows));
            declare(self, "part");
            self.open_loop("for (i64 row = first; row < end; ++row) {", SUM_BLOCK);
        } else {
            self.open_loop(&format!("for (i64 row = 0; row < {}; ++row) {{", kernel.rows), kernel.rows);
        }
        lines.iter().for_each(|line| self.line(line));
        list.extend(self.kept_rows(stats, "const "));
        for &o in outputs {
            let value = self.value(kernel.outputs[o].array, &at);
            let to = format!("{}{o}", if several { "part" } else { "total" });
            self.line(&format!("{to} = {to} + {};", value.text));
        }
        self.close_loop();
        if several {
            outputs.iter().for_each(|o| self.line(&format!("total{o} = total{o} + part{o};")));
            self.close();
        }
        for &o in outputs {
            let output = kernel.outputs[o];
            let operand = Argument::Operand(kernel.inputs.len() + o);
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            list.push(Param::new(element, &format!("out{o}"), operand));
            let aligned = self.variant.is_wide(kernel.inputs.len() + o);
            for lane in 0..if aligned { 1 } else { width } {
                let (index, old, total) = match (width, aligned) {
                    (1, _) => ("i".into(), format!("value(out{o}[i])"), format!("total{o}")),
                    (_, true) => ("i".into(), load(&format!("out{o}"), 0, &at), format!("total{o}")),
                    _ => {
                        let index = format!("i + {lane}");
                        let old = format!("value(out{o}[{index}])");
                        (index, old, format!("total{o}[{lane}]"))
                    }
                };
                self.line(&match output.store {
                    RowStore::AddSum => format!("put(out{o} + {index}, {old} + {total});"),
                    _ => format!("put(out{o} + {index}, {total});"),
                });
            }
        }
        self.scopes.pop();
        let geometry = (blocks((length / width).div_ceil(BLOCK))?, BLOCK as u32, 0);
        self.entry(builder, &format!("rows_sum_{length}"), geometry, list);
        Ok(())
    }

    /// A kernel with a row for a few threads, a warp or a block.
    fn rows(&mut self, name: String, live: &[usize], summed: bool) -> Result<Option<Source>> {
        let kernel = self.kernel;
        let layout = self.layout(live, summed)?;
        let (mut list, lines) = self.parameters(live);
        self.scopes.push(HashMap::new());
        let head = self.begin_block(&layout);
        let grid = blocks(self.open_rows(&layout, summed))?;
        lines.iter().for_each(|line| self.line(line));
        for i in 0..kernel.ops.len() {
            self.keep(i)?;
        }
        self.meet();
        self.results(&layout, live);
        if self.staged {
            self.waited(&layout);
        }
        if summed {
            // Kept values are overwritten for the next row.
            self.sync();
            self.close();
        }
        let mut builder = Builder::statements(name, "rows.cuh");
        if !layout.totals.is_empty() && kernel.rows > 0 {
            self.wait_block();
        }
        let mut seconds = vec![];
        for &o in &layout.totals {
            if let Some(at) = self.total(&mut builder, &layout, grid, o, &mut list)? {
                seconds.push((o, at));
            }
        }
        if grid > 0 {
            self.buffer(head);
            // A quarter of the threads that a processor has at once at least, or half: a row waits
            // for memory and for its barriers most of the time. An H200 takes a quarter to a third
            // less time for rows of many operands with half. Elsewhere that would spill.
            let few = self.threads == BLOCK && (summed || self.width <= 4);
            let resident = if few { RESIDENT_OF_BLOCKS } else { RESIDENT };
            builder.resident((resident / layout.block).max(1) as u32);
            let shared = if layout.dynamic { layout.bytes as u32 } else { 0 };
            self.entry(&mut builder, "rows", (grid, layout.block as u32, shared), list);
        }
        for (o, at) in seconds {
            self.second(&mut builder, o, at, grid)?;
        }
        Ok(builder.finish())
    }

    /// Shared memory, and the rows that a block has at a time.
    fn layout(&mut self, live: &[usize], summed: bool) -> Result<Layout> {
        let kernel = self.kernel;
        let (totals, stores): (Vec<usize>, Vec<usize>) =
            live.iter().partition(|&&o| sums(kernel.outputs[o].store));
        let staged = self.staged;
        let mut places = |outputs: &[usize]| {
            let mut found = HashMap::new();
            for &o in outputs {
                if let Kept::Shared(start) = self.shared(kernel.lengths[kernel.outputs[o].array as usize]) {
                    found.insert(o, start);
                }
            }
            found
        };
        let waiting = if staged { places(&stores) } else { HashMap::new() };
        let running = places(&totals);
        let floats = self.stored;
        // Rows at a time: a block full, as far as shared memory goes.
        let mut slots = match self.threads > 32 {
            true => 1,
            false if summed => (BLOCK / self.threads).min(SUM_BLOCK),
            false => BLOCK / 2 / self.threads,
        };
        let memory = |slots: u64| slots.saturating_mul(floats).saturating_add(self.common).saturating_mul(4);
        while slots > 1 && memory(slots) > STATIC_LIMIT - 1024 {
            slots /= 2;
        }
        let bytes = memory(slots);
        let limit = self.variant.shared().saturating_sub(1024);
        if bytes > limit {
            return Err(CodegenError::Shared { bytes, limit });
        }
        self.slots = slots;
        // Rows that a block sums: few enough that there are two blocks for every processor.
        let share = (kernel.rows / (2 * self.variant.processors())).max(1);
        let share = (1 << share.ilog2()).min(SUM_BLOCK).max(slots);
        let dynamic = bytes > STATIC_LIMIT - 1024;
        Ok(Layout {
            stores,
            totals,
            waiting,
            running,
            floats,
            share,
            bytes,
            dynamic,
            block: self.threads * slots,
        })
    }

    /// The lines before rows: memory, a thread's place, angles that all rows share, sums at zero.
    /// Gives where the buffer of reductions is declared.
    fn begin_block(&mut self, layout: &Layout) -> usize {
        let (floats, slots) = (layout.floats, self.slots);
        if self.stored + self.common > 0 {
            match layout.dynamic {
                true => self.line("shared float memory[];"),
                false => self.line(&format!("shared float memory[{}];", slots * floats + self.common)),
            }
        }
        let head = self.text.len();
        match (self.threads, slots) {
            (_, 1) => {
                self.line("const int t = thread();");
                self.line("const int slot = 0;");
            }
            (threads, _) => {
                self.line(&format!("const int t = thread() % {threads};"));
                self.line(&format!("const int slot = thread() / {threads};"));
            }
        }
        if self.stored > 0 {
            self.line(&format!("shared float *kept = memory + slot * {floats};"));
        }
        if self.common > 0 {
            self.line(&format!("shared float *common = memory + {};", slots * floats));
            for i in self.angles.clone() {
                if matches!(self.plans[i].stats[0], Kept::Common(_)) {
                    self.angles(i, "thread()", layout.block);
                }
            }
            self.wait_block();
        }
        for o in &layout.totals {
            let at = self.open_elements(self.length_of(*o));
            self.set(&Kept::Shared(layout.running[o]), &at, &Value::one("0.0f"));
            self.close_elements(self.length_of(*o));
        }
        head
    }

    /// Finds the row of a thread; of sums, the next of a block's rows. Gives the number of blocks.
    fn open_rows(&mut self, layout: &Layout, summed: bool) -> u64 {
        let (rows, share, slots) = (self.kernel.rows, layout.share, self.slots);
        if !summed {
            self.line(&format!("const i64 row = i64(block()) * {slots} + slot;"));
            if !rows.is_multiple_of(slots) {
                self.line(&format!("if (row >= {rows}) return;"));
            }
            return rows.div_ceil(slots);
        }
        self.open_rolled(
            &format!("unroll(1) for (int turn = 0; turn < {share}; turn += {slots}) {{"),
            share.div_ceil(slots),
        );
        self.line(&format!("const i64 row = i64(block()) * {share} + turn + slot;"));
        // The rest of the block goes on to the barriers; rows end at the same turn for a whole
        // row's threads.
        if !rows.is_multiple_of(share) {
            self.line(&format!("if (row >= {rows}) break;"));
        }
        rows.div_ceil(share)
    }

    fn length_of(&self, output: usize) -> u64 {
        self.length(self.kernel.outputs[output].array as usize)
    }

    /// Stores, keeps and sums outputs, those of one length in one loop.
    fn results(&mut self, layout: &Layout, live: &[usize]) {
        let lengths: BTreeSet<u64> = live.iter().map(|&o| self.length_of(o)).collect();
        for &length in &lengths {
            let at = self.open_elements(length);
            self.storing = !self.staged;
            let of_length: Vec<usize> =
                live.iter().copied().filter(|&o| self.length_of(o) == length).collect();
            let mut values = vec![];
            for &o in &of_length {
                values.push(self.value(self.kernel.outputs[o].array, &at));
            }
            for (&o, value) in of_length.iter().zip(values) {
                if let Some(&start) = layout.running.get(&o) {
                    let kept = Kept::Shared(start);
                    let text = format!("{} + {}", Self::kept(&kept, &at), value.text);
                    self.set(&kept, &at, &Value { text, width: at.width });
                } else if let Some(&start) = layout.waiting.get(&o) {
                    self.set(&Kept::Shared(start), &at, &value);
                } else {
                    self.put(o, &at, &value);
                }
            }
            self.storing = false;
            self.close_elements(length);
        }
        // Several loops: the first may write what the next reads.
        self.shifted |= lengths.len() > 1 && !layout.stores.is_empty();
    }

    /// Stores results that waited until all inputs were read.
    fn waited(&mut self, layout: &Layout) {
        if layout.stores.is_empty() {
            return;
        }
        self.sync();
        for o in &layout.stores {
            let at = self.open_elements(self.length_of(*o));
            let kept = Self::kept(&Kept::Shared(layout.waiting[o]), &at);
            let value = self.define(&kept, at.width);
            self.put(*o, &at, &value);
            self.close_elements(self.length_of(*o));
        }
    }

    /// The address of an output that is summed, as a parameter, and the line that stores its sum.
    fn summed(&self, o: usize, sum: &str) -> (Param, String) {
        let output = self.kernel.outputs[o];
        let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
        let line = match output.store {
            RowStore::AddSum => format!("put(out{o} + i, value(out{o}[i]) + {sum});"),
            _ => format!("put(out{o} + i, {sum});"),
        };
        (Param::new(element, &format!("out{o}"), Argument::Operand(self.kernel.inputs.len() + o)), line)
    }

    /// The sum of a block's rows: stored where it is the only block, else left in scratch memory,
    /// whose place is given, for a second pass.
    fn total(
        &mut self,
        builder: &mut Builder,
        layout: &Layout,
        grid: u32,
        o: usize,
        list: &mut Vec<Param>,
    ) -> Result<Option<u64>> {
        let length = self.length_of(o);
        if self.kernel.rows == 0 {
            // The sum of no rows.
            let (param, line) = self.summed(o, "0.0f");
            if self.kernel.outputs[o].store != RowStore::AddSum {
                let body = format!(
                    "    const int i = block() * {BLOCK} + thread();\n    if (i < {length}) {line}\n"
                );
                let geometry = (blocks(length.div_ceil(BLOCK))?, BLOCK as u32, 0);
                builder.entry(&format!("rows_sum{o}"), geometry, &[param], &body);
            }
            return Ok(None);
        }
        let (first, floats, slots) = (layout.running[&o], layout.floats, self.slots);
        self.open_each("i", "thread()", length, layout.block, 1);
        self.line(&format!("float sum = memory[{first} + i];"));
        if slots > 1 {
            let part = format!("memory[s * {floats} + {first} + i]");
            self.line(&format!("for (int s = 1; s < {slots}; ++s) sum += {part};"));
        }
        let mut second = None;
        if grid == 1 {
            let (param, line) = self.summed(o, "sum");
            list.push(param);
            self.line(&line);
        } else {
            let at = builder.scratch(u64::from(grid).saturating_mul(length).saturating_mul(4));
            list.push(Param::new("float *", &format!("part{o}"), Argument::Scratch(at)));
            self.line(&format!("part{o}[i64(block()) * {length} + i] = sum;"));
            second = Some(at);
        }
        self.close_each(length, layout.block, 1);
        Ok(second)
    }

    /// The pass that adds up what blocks left, in order.
    fn second(&mut self, builder: &mut Builder, o: usize, at: u64, grid: u32) -> Result<()> {
        let length = self.length_of(o);
        let (param, line) = self.summed(o, "sum");
        let list = [param, Param::new("const float *", "part", Argument::Scratch(at))];
        let body = format!(
            "    const int i = block() * 32 + thread() % 32;\n    \
             const float sum = add_parts(part, {grid}, {length}, i);\n    \
             if (thread() < 32 && i < {length}) {line}\n"
        );
        let geometry = (blocks(length.div_ceil(32))?, BLOCK as u32, 0);
        builder.entry(&format!("rows_sum{o}"), geometry, &list, &body);
        Ok(())
    }
}
