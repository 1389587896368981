//! The CUDA of recurrences: a block for each task, its workspace in shared memory where that is
//! large enough. The naive text is the same with one thread for each task.
//!
//! Each loop of the step is shared out over the threads of the block, which wait for each other
//! after it. An element of a state is always moved by the same thread.

use super::kernel::{Recurrence, RecurrenceGrad};
use super::program::{Axis, Code, How, Port, Program};
use crate::codegen::text::{
    Builder, Geometry, Operands, Param, THREADS, blocks, float, per_thread, scratch, times,
};
use crate::codegen::{CodegenError, SHARED, Source, Turns, Variant};
use crate::op::Tokens;
use crate::op::kernel::KernelKind;
use std::fmt::Write;

type Result<T> = std::result::Result<T, CodegenError>;

/// The text of an entry.
struct Text {
    naive: bool,
    body: String,
    /// Barriers so far.
    waits: u64,
}

/// The offset of element `i` of a task's part of a row, as an expression.
fn offset(port: &Port) -> String {
    let mut terms: Vec<String> = vec![];
    for (d, stride) in port.parallel.iter().enumerate().filter(|(_, stride)| **stride > 0) {
        terms.push(format!("p{d} * {stride}ll"));
    }
    let mut after = port.elements();
    for (size, stride) in port.axes.iter().filter(|(size, _)| *size > 1) {
        after /= size;
        let index = if after == 1 { format!("i % {size}") } else { format!("i / {after} % {size}") };
        terms.push(if *stride == 1 { index } else { format!("{index} * {stride}ll") });
    }
    if terms.is_empty() { "0".into() } else { terms.join(" + ") }
}

impl Text {
    fn line(&mut self, line: impl AsRef<str>) {
        self.body.push_str("    ");
        self.body.push_str(line.as_ref());
        self.body.push('\n');
    }

    /// A statement for each of `n` elements `i`.
    fn each(&mut self, n: u64, statement: &str) {
        if n > 0 {
            let (first, step) = if self.naive { ("0", "1") } else { ("lane", "LANES") };
            self.line(format!("for (int i = {first}; i < {n}; i += {step}) {statement}"));
        }
    }

    fn wait(&mut self) {
        if !self.naive {
            self.waits += 1;
            self.line("__syncthreads();");
        }
    }

    /// Barriers of a task, all inside loops over tokens.
    fn turns(&self, tokens: u64) -> Turns {
        Turns { barriers: times(&[self.waits, tokens]), ..Turns::default() }
    }

    /// A task's numbers: its sequence `b`, and `p0`, `p1` … of the dimensions it has one element
    /// of.
    fn task(&mut self, program: &Program, batch: u64) {
        let tasks = program.tasks();
        if self.naive {
            self.line("i64 task = thread_number();");
            self.line(format!("if (task >= {}ll) return;", times(&[batch, tasks])));
        } else {
            self.line(format!("const int lane = int(threadIdx.x), LANES = {THREADS};"));
            self.line("i64 task = blockIdx.x;");
        }
        self.line(format!("i64 b = task / {tasks}ll;"));
        let mut after = tasks;
        for (d, size) in program.parallel.iter().enumerate() {
            after /= size;
            self.line(format!("i64 p{d} = task % {tasks}ll / {after}ll % {size}ll;"));
        }
    }

    /// `work` for the workspace of a task.
    fn workspace(&mut self, floats: u64, shared: bool) {
        match shared {
            true => self.line("extern __shared__ float work[];"),
            false => self.line(format!("float *work = spare + task * {floats}ll;")),
        }
    }

    /// A port's part of the row at `from` into the workspace `to`.
    fn load(&mut self, port: &Port, from: &str, to: &str) {
        let statement = format!("{to}[{} + i] = ({from})[{}];", port.at, offset(port));
        self.each(port.elements(), &statement);
    }

    fn store(&mut self, port: &Port, from: &str, to: &str) {
        let statement = format!("({to})[{}] = {from}[{} + i];", offset(port), port.at);
        self.each(port.elements(), &statement);
    }

    /// The states that a step leaves are those that the next reads.
    fn keep_states(&mut self, step: &Program, states: usize) {
        let outputs = step.outputs.len() - states;
        for (new, old) in step.outputs[outputs..].iter().zip(&step.inputs) {
            self.each(old.elements(), &format!("work[{} + i] = work[{} + i];", old.at, new.at));
        }
    }

    /// Loops on the workspace `of`.
    fn codes(&mut self, program: &Program, of: &str) {
        for code in &program.codes {
            self.code(code, of);
            self.wait();
        }
    }

    fn code(&mut self, code: &Code, of: &str) {
        let (kept, joined): (Vec<&Axis>, Vec<&Axis>) = code.axes.iter().partition(|x| x.to > 0);
        let mut lines = vec![];
        let mut at = [code.to, code.a, code.b].map(|at| at.to_string());
        let mut after = code.results();
        for axis in kept {
            after /= axis.size;
            let index = if after == 1 {
                format!("i % {}", axis.size)
            } else {
                format!("i / {after} % {}", axis.size)
            };
            for (at, stride) in at.iter_mut().zip([axis.to, axis.a, axis.b]).filter(|(_, s)| *s > 0) {
                let _ = write!(at, " + {index} * {stride}");
            }
        }
        let inner: Vec<(u64, u64, u64)> = joined.iter().map(|x| (x.size, x.a, x.b)).collect();
        let mut within = [at[1].clone(), at[2].clone()];
        let mut loops = String::new();
        for (n, (size, a, b)) in inner.iter().enumerate() {
            let _ = write!(loops, "for (int j{n} = 0; j{n} < {size}; ++j{n}) ");
            for (at, stride) in within.iter_mut().zip([a, b]).filter(|(_, s)| **s > 0) {
                let _ = write!(at, " + j{n} * {stride}");
            }
        }
        let [a, b] = within.map(|at| format!("{of}[{at}]"));
        let to = format!("{of}[{}]", at[0]);
        match code.how {
            How::Fill(x) => lines.push(format!("{to} = {};", float(x.0))),
            How::Copy => lines.push(format!("{to} = {a};")),
            How::Unary(f) => lines.push(format!("{to} = {};", f.statement(&format!("({a})")))),
            How::Binary(f) => lines.push(format!("{to} = {};", f.statement(&a, &b))),
            How::Sum => lines.extend([
                "float sum = 0.0f;".into(),
                format!("{loops}sum += {a};"),
                format!("{to} = sum;"),
            ]),
            How::Product => {
                let sum = format!("{loops}sum = fmaf({a}, {b}, sum);");
                lines.extend(["float sum = 0.0f;".into(), sum, format!("{to} = sum;")]);
            }
            How::Max => {
                let most = format!("{loops}most = larger(most, {a});");
                lines.extend(["float most = -infinity();".into(), most, format!("{to} = most;")]);
            }
        }
        self.each(code.results(), &format!("{{ {} }}", lines.join(" ")));
    }

    /// Whether token `t` takes part, or else `otherwise` and the next; and whether a document
    /// begins there.
    fn token(&mut self, segments: bool, tokens: u64, otherwise: &[String]) {
        self.line(format!("i64 token = b * {tokens}ll + t;"));
        if !segments {
            self.line("bool begins = t == 0;");
            return;
        }
        self.line("if (segments[token] < 0) {");
        otherwise.iter().for_each(|line| self.line(line));
        self.line("continue;");
        self.line("}");
        self.line("bool begins = true;");
        self.line("for (i64 j = t - 1; j >= 0; --j) {");
        self.line(format!("int other = segments[b * {tokens}ll + j];"));
        self.line("if (other < 0) continue;");
        self.line("begins = other != segments[token];");
        self.line("break;");
        self.line("}");
    }

    /// The lines that set a task's part of a row to zero.
    fn zeros(&self, port: &Port, to: &str) -> String {
        let mut text = Text { naive: self.naive, body: String::new(), waits: 0 };
        text.each(port.elements(), &format!("({to})[{}] = 0.0f;", offset(port)));
        text.body.trim().into()
    }
}

/// How a block of a task is launched: its geometry, and whether its workspace of `floats` floats is
/// in shared memory.
fn geometry(program: &Program, batch: u64, floats: u64, naive: bool) -> Result<(Geometry, bool)> {
    let tasks = times(&[batch, program.tasks()]);
    let bytes = times(&[4, floats]);
    let shared = !naive && bytes <= SHARED;
    Ok(match naive {
        true => (per_thread(tasks)?, false),
        false => ((blocks(tasks)?, THREADS as u32, if shared { bytes as u32 } else { 0 }), shared),
    })
}

fn builder(kernel: &dyn KernelKind, naive: bool) -> Builder {
    match naive {
        true => Builder::statements(format!("naive {}", kernel.summary()), "naive.cuh"),
        false => Builder::new(kernel.summary(), "prelude.cuh"),
    }
}

/// The number of a thread of [`per_thread`].
fn thread(naive: bool) -> &'static str {
    if naive { "thread_number()" } else { "i64(blockIdx.x) * blockDim.x + threadIdx.x" }
}

/// Where the row of an operand at a token begins.
fn row_of(name: &str) -> String {
    format!("{name} + token * {name}_stride")
}

pub(super) fn forward(kernel: &Recurrence, variant: Variant, naive: bool) -> Result<Option<Source>> {
    let (s, step) = (&kernel.shape, &kernel.step);
    let mut builder = builder(kernel, naive);
    let mut list = Operands::of(kernel, variant).all()?;
    let (geometry, shared) = geometry(step, s.batch, step.size, naive)?;
    if !shared {
        let at = builder.scratch(times(&[4, s.batch, step.tasks(), step.size]));
        list.push(scratch("float *", "spare", at));
    }
    let mut text = Text { naive, body: String::new(), waits: 0 };
    text.task(step, s.batch);
    text.workspace(step.size, shared);
    let (states, others) = step.inputs.split_at(s.states);
    let (rows, constants) = others.split_at(s.rows);
    let names = kernel.operands();
    for (port, name) in constants.iter().zip(&names[s.rows..]) {
        text.load(port, name, "work");
    }
    let initial = &names[s.rows + s.constants..];
    let kept = kernel.tokens == Tokens::Kept;
    if kept {
        text.line(format!("float *own = state + b * {}ll;", kernel.kept()));
        text.line("bool begun = own[0] > 0.0f;");
        let mut first = 1;
        for (port, name) in states.iter().zip(initial) {
            text.load(port, &format!("begun ? own + {first} : {name}"), "work");
            first += port.row;
        }
        text.line("int taken = 0;");
    }
    text.line(format!("for (i64 t = 0; t < {}ll; ++t) {{", s.tokens));
    let outputs: Vec<(&Port, String)> = step
        .outputs
        .iter()
        .zip(kernel.outputs())
        .map(|(port, name)| (port, format!("{name} + token * {}ll", port.row)))
        .collect();
    let zeros: Vec<String> = outputs.iter().map(|(port, to)| text.zeros(port, to)).collect();
    if kept {
        text.line(format!("i64 token = b * {}ll + t;", s.tokens));
        text.line("if (slots[token] < 0) {");
        zeros.iter().for_each(|line| text.line(line));
        text.line("continue;");
        text.line("}");
        text.line("++taken;");
    } else {
        text.token(kernel.tokens == Tokens::Segments, s.tokens, &zeros);
        text.line("if (begins) {");
        for (port, name) in states.iter().zip(initial) {
            text.load(port, name, "work");
        }
        text.line("}");
    }
    for (port, name) in rows.iter().zip(names) {
        text.load(port, &row_of(name), "work");
    }
    text.wait();
    text.codes(step, "work");
    for (port, to) in &outputs {
        text.store(port, "work", to);
    }
    text.keep_states(step, s.states);
    text.line("}");
    if kept {
        let mut first = 1;
        text.line("if (taken > 0) {");
        for port in states {
            text.store(port, "work", &format!("own + {first}"));
            first += port.row;
        }
        text.line("}");
    }
    builder.turns(text.turns(s.tokens));
    builder.entry("recurrence_steps", geometry, &list, &text.body);
    if kept {
        // After all blocks, because they read the count.
        let body = format!(
            "    i64 b = {};\n    if (b >= {}ll) return;\n    float count = \
             state[b * {}ll];\n    for (i64 t = 0; t < {tokens}ll; ++t) count += slots[b * {tokens}ll + t] < 0 ? 0.0f : \
             1.0f;\n    state[b * {}ll] = count;\n",
            thread(naive),
            s.batch,
            kernel.kept(),
            kernel.kept(),
            tokens = s.tokens,
        );
        let list = Operands::of(kernel, variant).list(["slots", "state"])?;
        builder.entry("recurrence_counts", per_thread(s.batch)?, &list, &body);
    }
    Ok(builder.finish())
}

/// Places in the memory of a task of a gradient, in floats.
struct Places {
    /// The workspace of the adjoint, after the workspace of the step.
    back: u64,
    /// Cotangents of states.
    cotangents: u64,
    /// Cotangents of constants and initial states so far.
    sums: u64,
    /// All of it.
    size: u64,
}

impl Places {
    fn of(kernel: &RecurrenceGrad) -> Places {
        let back = kernel.step.size;
        let cotangents = back + kernel.back.size;
        let sums = cotangents + kernel.state_elements();
        Places { back, cotangents, sums, size: sums + kernel.sums().map(Port::elements).sum::<u64>() }
    }
}

pub(super) fn backward(kernel: &RecurrenceGrad, variant: Variant, naive: bool) -> Result<Option<Source>> {
    let (s, step) = (&kernel.shape, &kernel.step);
    let places = Places::of(kernel);
    let mut builder = builder(kernel, naive);
    let mut list = Operands::of(kernel, variant).all()?;
    let (geometry, shared) = geometry(step, s.batch, places.size, naive)?;
    let tasks = times(&[s.batch, step.tasks()]);
    if !shared {
        let at = builder.scratch(times(&[4, tasks, places.size]));
        list.push(scratch("float *", "spare", at));
    }
    let (stretch, states) = (kernel.stretch(), kernel.state_elements());
    let stretches = s.tokens.div_ceil(stretch);
    let held = times(&[states, stretches + stretch]);
    list.push(scratch("float *", "held", builder.scratch(times(&[4, tasks, held]))));
    let row: u64 = kernel.sums().map(|p| p.row).sum();
    let parts = builder.scratch(times(&[4, s.batch, row]));
    list.push(scratch("float *", "parts", parts));
    let mut text = Text { naive, body: String::new(), waits: 0 };
    text.task(step, s.batch);
    text.workspace(places.size, shared);
    text.line(format!("float *back = work + {};", places.back));
    text.line(format!(
        "float *kept = held + task * {held}ll, *near = kept + {}ll;",
        times(&[states, stretches])
    ));
    text.begin(kernel, &places);
    text.keep_stretches(kernel, stretch, stretches);
    text.line(format!("for (i64 n = {}; n >= 0; --n) {{", stretches as i64 - 1));
    text.states_from(kernel, &format!("kept + n * {states}ll"));
    text.stretch_again(kernel, stretch);
    text.stretch_back(kernel, &places, stretch);
    text.line("}");
    let mut at = [places.sums, 0];
    for port in kernel.sums() {
        let from = Port { at: at[0], ..port.clone() };
        text.store(&from, "work", &format!("parts + b * {row}ll + {}", at[1]));
        at = [at[0] + port.elements(), at[1] + port.row];
    }
    builder.turns(text.turns(s.tokens));
    builder.entry("recurrence_back", geometry, &list, &text.body);
    joins(kernel, variant, &mut builder, parts, row, naive)?;
    Ok(builder.finish())
}

/// Entries that add what each sequence gave to the cotangents of constants and initial states.
fn joins(
    kernel: &RecurrenceGrad,
    variant: Variant,
    builder: &mut Builder,
    parts: u64,
    row: u64,
    naive: bool,
) -> Result<()> {
    let names = kernel.results();
    let mut first = 0;
    for (port, name) in kernel.sums().zip(&names[kernel.shape.rows..]) {
        let body = format!(
            "    i64 at = {};\n    if (at >= {}ll) return;\n    float sum = \
             0.0f;\n    for (i64 b = 0; b < {}ll; ++b) sum += parts[b * {row}ll + {first} + at];\n    {name}[at] = sum;\n",
            thread(naive),
            port.row,
            kernel.shape.batch,
        );
        let mut list = Operands::of(kernel, variant).list([name])?;
        list.push(Param { declaration: "const float *".into(), ..scratch("", "parts", parts) });
        builder.entry(&format!("recurrence_sum_{name}"), per_thread(port.row)?, &list, &body);
        first += port.row;
    }
    Ok(())
}

/// Parts of the gradient.
impl Text {
    /// Constants, states before the first token, and sums of nothing.
    fn begin(&mut self, kernel: &RecurrenceGrad, places: &Places) {
        let s = &kernel.shape;
        let names = kernel.operands();
        let constants = &kernel.step.inputs[s.states + s.rows..];
        for (port, name) in constants.iter().zip(&names[s.rows..]) {
            self.load(port, name, "work");
        }
        for (port, &feed) in kernel.back.inputs.iter().zip(&kernel.feeds) {
            if let Some(name) =
                feed.checked_sub(s.states + s.rows).and_then(|k| names[s.rows..][..s.constants].get(k))
            {
                self.load(port, name, "back");
            }
        }
        self.initial_states(kernel);
        self.each(places.size - places.cotangents, &format!("work[{} + i] = 0.0f;", places.cotangents));
    }

    fn initial_states(&mut self, kernel: &RecurrenceGrad) {
        let s = &kernel.shape;
        for (port, name) in kernel.step.inputs.iter().zip(&kernel.operands()[s.rows + s.constants..]) {
            self.load(port, name, "work");
        }
    }

    /// States of the step to or from adjacent memory.
    fn states_to(&mut self, kernel: &RecurrenceGrad, to: &str) {
        let mut at = 0;
        for port in kernel.step.inputs.iter().take(kernel.shape.states) {
            self.each(port.elements(), &format!("({to})[{at} + i] = work[{} + i];", port.at));
            at += port.elements();
        }
    }

    fn states_from(&mut self, kernel: &RecurrenceGrad, from: &str) {
        let mut at = 0;
        for port in kernel.step.inputs.iter().take(kernel.shape.states) {
            self.each(port.elements(), &format!("work[{} + i] = ({from})[{at} + i];", port.at));
            at += port.elements();
        }
    }

    /// The step at a token, on states that are there.
    fn step(&mut self, kernel: &RecurrenceGrad) {
        let s = &kernel.shape;
        for (port, name) in kernel.step.inputs[s.states..].iter().take(s.rows).zip(kernel.operands()) {
            self.load(port, &row_of(name), "work");
        }
        self.wait();
        self.codes(&kernel.step, "work");
        self.keep_states(&kernel.step, s.states);
    }

    fn restart(&mut self, kernel: &RecurrenceGrad) {
        self.line("if (begins) {");
        self.initial_states(kernel);
        self.line("}");
    }

    /// The states before the first token of each stretch.
    fn keep_stretches(&mut self, kernel: &RecurrenceGrad, stretch: u64, stretches: u64) {
        let (tokens, states) = (kernel.shape.tokens, kernel.state_elements());
        self.line(format!("for (i64 t = 0; t < {}ll; ++t) {{", (stretches - 1) * stretch));
        self.line(format!("if (t % {stretch} == 0) {{"));
        self.states_to(kernel, &format!("kept + t / {stretch} * {states}ll"));
        self.line("}");
        self.token(kernel.segments, tokens, &[]);
        self.restart(kernel);
        self.step(kernel);
        self.line("}");
        self.states_to(kernel, &format!("kept + {}ll", times(&[stretches - 1, states])));
    }

    /// The states before each token of stretch `n`.
    fn stretch_again(&mut self, kernel: &RecurrenceGrad, stretch: u64) {
        let (tokens, states) = (kernel.shape.tokens, kernel.state_elements());
        self.line(format!("i64 last = (n + 1) * {stretch} < {tokens}ll ? (n + 1) * {stretch} : {tokens}ll;"));
        self.line(format!("for (i64 t = n * {stretch}; t < last; ++t) {{"));
        self.token(kernel.segments, tokens, &[]);
        self.restart(kernel);
        self.states_to(kernel, &format!("near + (t - n * {stretch}) * {states}ll"));
        self.line("if (t + 1 == last) continue;");
        self.step(kernel);
        self.line("}");
    }

    /// The adjoint at each token of stretch `n`, from the last.
    fn stretch_back(&mut self, kernel: &RecurrenceGrad, places: &Places, stretch: u64) {
        let s = &kernel.shape;
        let results: Vec<(&Port, String)> = kernel.back.outputs[s.states..]
            .iter()
            .take(s.rows)
            .zip(kernel.results())
            .map(|(port, name)| (port, format!("{name} + token * {}ll", port.row)))
            .collect();
        let zeros: Vec<String> = results.iter().map(|(port, to)| self.zeros(port, to)).collect();
        self.line(format!("for (i64 t = last - 1; t >= n * {stretch}; --t) {{"));
        self.token(kernel.segments, s.tokens, &zeros);
        self.feed(kernel, places, stretch);
        self.wait();
        self.codes(&kernel.back, "back");
        for (port, to) in &results {
            self.store(port, "back", to);
        }
        let mut at = places.sums;
        for port in kernel.back.outputs[s.states + s.rows..].iter() {
            self.each(port.elements(), &format!("work[{at} + i] += back[{} + i];", port.at));
            at += port.elements();
        }
        let mut own = places.cotangents;
        for port in kernel.back.outputs.iter().take(s.states) {
            let n = port.elements();
            let statement = format!(
                "{{ float d = back[{} + i]; if (begins) {{ work[{at} + i] += d; d = 0.0f; }} work[{own} + i] = d; }}",
                port.at
            );
            self.each(n, &statement);
            (at, own) = (at + n, own + n);
        }
        self.line("}");
    }

    /// The rows that the adjoint reads at a token.
    fn feed(&mut self, kernel: &RecurrenceGrad, places: &Places, stretch: u64) {
        let s = &kernel.shape;
        let states = kernel.state_elements();
        let before: Vec<u64> = kernel
            .step
            .inputs
            .iter()
            .take(s.states)
            .scan(0, |at, port| Some(std::mem::replace(at, *at + port.elements())))
            .collect();
        let first = s.operands();
        for (port, &feed) in kernel.back.inputs.iter().zip(&kernel.feeds) {
            if feed < s.states {
                let from = format!("near[(t - n * {stretch}) * {states}ll + {} + i]", before[feed]);
                self.each(port.elements(), &format!("back[{} + i] = {from};", port.at));
            } else if feed < s.states + s.rows {
                self.load(port, &row_of(kernel.operands()[feed - s.states]), "back");
            } else if feed >= first + s.outputs {
                let from = places.cotangents + before[feed - first - s.outputs];
                self.each(port.elements(), &format!("back[{} + i] = work[{from} + i];", port.at));
            } else if feed >= first {
                self.load(port, &row_of(kernel.cotangents()[feed - first]), "back");
            }
        }
    }
}
