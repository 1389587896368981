//! Row kernels, generated whole.
//!
//! An array of a row is an *expression of an index*: asked for element `i`, an operation asks its
//! operands for theirs, so a chain of element-wise operations, slices, rotations and broadcasts
//! becomes one loop without anything in between. Values that no single element has are computed
//! before and kept: sums and maxima over groups (in a register where a row has one group, else in
//! shared memory), the sines of a rotation, and arrays that are dear and needed in several loops.
//!
//! Four shapes of kernel come of it:
//!
//! - *flat*: nothing is kept, so every element has a thread;
//! - *rows*: a few threads, a warp or a block have a row; several rows to a block where they are
//!   short;
//! - *sums*: blocks go through [`SUM_BLOCK`] rows, or as many as leave two blocks for every
//!   processor, and leave partial sums, which a second pass adds up in order;
//! - *long*: rows that are longer than a block can hold, or so long that few blocks would have all
//!   the work. Values kept of each row go to scratch memory first; then every element has a thread,
//!   which goes through all rows where they are summed. A row may be as long as 32 bits count.
//!
//! Where rows are aligned to 16 bytes a thread takes four adjacent elements at a time, or eight
//! where all rows are bf16, in one access of each operand: an index then stands for as many
//! elements ([`At`]), and a value for as many numbers. Other elements (slices and groups that begin
//! elsewhere, elements picked one by one) are asked for one after another.

use super::text::{Builder, Param, blocks, double, fits, float, places};
use super::{Argument, CodegenError, Source, Turns, Variant};
use crate::ir::{DType, Positions, Reduce, Rope};
use crate::program::{Broadcast, RowInput, RowKernel, RowOp, RowStore, SUM_BLOCK};
use std::collections::{BTreeSet, HashMap};

type Result<T> = std::result::Result<T, CodegenError>;

/// Memory of a value that was computed before it is asked for.
#[derive(Clone, Debug)]
enum Kept {
    /// The same register in every thread of the row.
    Register(String),
    /// At this offset in floats in the shared memory of the row.
    Shared(u64),
    /// At this offset in floats in the shared memory of the block, which its rows share.
    Common(u64),
}

/// Adjacent elements of an array: an expression that is the index of the first, a multiple of how
/// many there are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct At {
    index: String,
    width: u64,
}

impl At {
    /// One element.
    fn one(index: impl Into<String>) -> Self {
        At { index: index.into(), width: 1 }
    }
}

/// A variable or a short expression: `width` numbers, or one that all elements share.
#[derive(Clone, Debug)]
struct Value {
    text: String,
    width: u64,
}

impl Value {
    fn one(text: impl Into<String>) -> Self {
        Value { text: text.into(), width: 1 }
    }

    /// As many numbers as are wanted.
    fn spread(&self, width: u64) -> String {
        if self.width == width { self.text.clone() } else { format!("{}({})", numbers(width), self.text) }
    }
}

/// How a reduction joins numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Join {
    Sum,
    Largest,
}

impl Join {
    /// A number that changes nothing.
    fn nothing(self) -> &'static str {
        match self {
            Join::Sum => "0.0f",
            Join::Largest => "-infinity()",
        }
    }

    /// Two numbers joined; NaN is passed over by the larger.
    fn two(self, a: &str, b: &str) -> String {
        match self {
            Join::Sum => format!("{a} + {b}"),
            Join::Largest => format!("larger({a}, {b})"),
        }
    }

    /// The end of the names of functions that join.
    fn word(self) -> &'static str {
        match self {
            Join::Sum => "sum",
            Join::Largest => "largest",
        }
    }
}

/// The term of a sum: a factor or two.
type Term = (Value, Option<Value>);

/// The type of `width` numbers.
fn numbers(width: u64) -> String {
    if width == 1 { "float".into() } else { format!("floats{width}") }
}

/// `width` numbers from an address, the first of them at `index`.
fn load(from: &str, start: u64, at: &At) -> String {
    let index = match (start, at.index.as_str()) {
        (0, index) => index.to_string(),
        (_, "0") => start.to_string(),
        (_, index) => format!("{start} + {index}"),
    };
    match at.width {
        1 => format!("{from}[{index}]"),
        width => format!("load{width}({from} + {index})"),
    }
}

/// Values that an operation keeps.
#[derive(Clone, Debug, Default)]
struct Plan {
    /// Whether anything asks for the array.
    live: bool,
    /// The array itself.
    own: Option<Kept>,
    /// Values that element-wise expressions of it need: statistics of groups, cosines and sines.
    stats: Vec<Kept>,
}

/// Threads of a block.
const BLOCK: u64 = 256;
/// Threads of a processor at once that registers are found for: 128 for each, or 64 where a block
/// has a row, so that a thread has little of it, and not eight numbers of each of its arrays.
const RESIDENT: u64 = 512;
const RESIDENT_OF_BLOCKS: u64 = 1024;
/// Rows of this length at most have a warp each, which needs no barrier, where there are enough of
/// them to fill a GPU.
const WARP_ROW: u64 = 1024;
/// At most this many elements are summed by each warp of a row on its own, without a barrier.
const ALONE: u64 = 256;
/// Words of 4 bytes that a thread should have under way at once: loops that load fewer are
/// unrolled.
const LOADS: u64 = 8;
/// Static shared memory of a block.
const STATIC_LIMIT: u64 = 48 * 1024;

/// Whether an output is a sum over rows.
fn sums(store: RowStore) -> bool {
    matches!(store, RowStore::Sum | RowStore::AddSum)
}

/// Whether an operation joins elements: reductions of one each do not.
fn reduces(op: &RowOp) -> bool {
    matches!(op, RowOp::Reduce { over, .. } if over.size != 1)
}

/// Instructions of one element, roughly.
fn own_cost(kernel: &RowKernel, op: &RowOp) -> u64 {
    match op {
        RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros | RowOp::Reduce { .. } => 1,
        RowOp::Load { .. } | RowOp::Slice { .. } | RowOp::Concat { .. } | RowOp::Pick { .. } => 2,
        RowOp::Unary(u, _) => u.price(),
        RowOp::Binary { op, .. } => op.price(),
        RowOp::Rms { .. } | RowOp::RmsGrad { .. } | RowOp::SoftmaxGrad { .. } => 3,
        RowOp::Rope { .. } => 6,
        RowOp::Softmax { .. } => 12,
        RowOp::PickGrad { chosen, .. } => match kernel.inputs.get(*chosen as usize) {
            Some(RowInput::RowInts { length }) => 3 * length,
            _ => 3,
        },
    }
}

pub(crate) fn generate(kernel: &RowKernel, variant: Variant) -> Result<Option<Source>> {
    validate(kernel)?;
    let in_place = variant.in_place;
    let empty = |array: u32| kernel.lengths[array as usize] == 0;
    let nothing = kernel.outputs.iter().all(|o| empty(o.array) || (!sums(o.store) && kernel.rows == 0));
    if nothing {
        return Ok(None);
    }
    // First as cheaply as can be; then without keeping what is merely dear, where shared memory
    // does not suffice, and in the end without shared memory; and with results staged, where a row
    // that is written would be read after.
    let ordinary = [Form::Dear, Form::Plain, Form::Long];
    let forms = if mostly_columns(kernel) || few_and_long(kernel, variant) {
        &[Form::Long, Form::Dear, Form::Plain]
    } else {
        &ordinary
    };
    let mut failed = None;
    for &form in forms {
        let mut generator = Generator::new(kernel, form, false, variant)?;
        match generator.source() {
            Ok(source) if !(in_place && generator.shifted) => return Ok(source),
            Ok(_) if form == Form::Long => {}
            Ok(_) => match Generator::new(kernel, form, true, variant)?.source() {
                Ok(source) => return Ok(source),
                Err(error) => failed = Some(error),
            },
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or(CodegenError::Malformed("a row kernel without a form".into())))
}

/// Whether rows are summed that are few and long, so that a thread for each column makes more
/// blocks than one for each [`SUM_BLOCK`] rows.
fn mostly_columns(kernel: &RowKernel) -> bool {
    let summed = kernel.outputs.iter().filter(|o| sums(o.store)).map(|o| kernel.lengths[o.array as usize]);
    let longest = summed.max().unwrap_or(0);
    kernel.rows > 0 && longest >= 16 * BLOCK && longest / BLOCK > kernel.rows / SUM_BLOCK
}

/// Whether rows are few for the processors, and so long that a launch more for what is kept of them
/// costs less than one block for each: a thread of it has 256 elements.
fn few_and_long(kernel: &RowKernel, variant: Variant) -> bool {
    let longest = kernel.outputs.iter().map(|o| kernel.lengths[o.array as usize]).max().unwrap_or(0);
    kernel.rows < 8 * variant.processors() && longest >= 256 * BLOCK
}

/// Values kept of a row, and their memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Statistics, and arrays that are dear and needed several times, in shared memory.
    Dear,
    /// Statistics alone.
    Plain,
    /// Statistics alone, in scratch memory.
    Long,
}

/// Conditions of the text; the check of the plan has looked at them before, with better words.
fn validate(kernel: &RowKernel) -> Result<()> {
    let wrong = |what: &str| Err(CodegenError::Malformed(format!("row kernel: {what}")));
    fits("rows", kernel.rows)?;
    if kernel.lengths.len() != kernel.ops.len() {
        return wrong("operations and lengths differ in number");
    }
    for (i, op) in kernel.ops.iter().enumerate() {
        fits("a row", kernel.lengths[i])?;
        if op.operands().iter().any(|&x| x >= i) {
            return wrong("an array is read before it is written");
        }
        let (input, group) = match *op {
            RowOp::Load { input } | RowOp::Index { input } => (Some(input), 1),
            RowOp::Pick { chosen, .. } | RowOp::PickGrad { chosen, .. } => (Some(chosen), 1),
            RowOp::Rope { position, size, .. } => (Some(position), size),
            RowOp::Rms { size, .. }
            | RowOp::RmsGrad { size, .. }
            | RowOp::Softmax { size, .. }
            | RowOp::SoftmaxGrad { size, .. }
            | RowOp::Slice { size, .. } => (None, size),
            RowOp::Concat { groups, .. } => (None, groups),
            RowOp::Reduce { over, .. } => (None, over.outer.min(over.inner)),
            _ => (None, 1),
        };
        if input.is_some_and(|input| input as usize >= kernel.inputs.len()) {
            return wrong("there is no such input");
        }
        if group == 0 && kernel.lengths[i] > 0 {
            return wrong("groups of nothing");
        }
    }
    match kernel.outputs.iter().all(|o| (o.array as usize) < kernel.ops.len()) {
        true => Ok(()),
        false => wrong("there is no array to store"),
    }
}

/// Frequencies of the pairs of a head of `size`.
fn frequencies(rope: &Rope, size: u64) -> Vec<f64> {
    (0..size / 2).map(|pair| rope.frequency(pair, size / 2)).collect()
}

/// Adjacent elements that a thread takes at a time: 1 where an operand that is read or written by
/// several is not aligned to 16 bytes, since single accesses of adjacent elements by one thread are
/// slower than those by adjacent threads.
fn together(kernel: &RowKernel, variant: Variant) -> u64 {
    let inputs = kernel.inputs.iter().map(|input| match *input {
        RowInput::Row { length, dtype } => Some((length, dtype, true)),
        RowInput::Shared { length, dtype } => Some((length, dtype, false)),
        RowInput::RowInts { .. } | RowInput::Index => None,
    });
    let outputs = kernel.outputs.iter().map(|o| {
        let length = kernel.lengths[o.array as usize];
        (!sums(o.store)).then_some((length, o.dtype, true))
    });
    let long = inputs.chain(outputs).enumerate().filter_map(|(i, operand)| {
        operand.filter(|&(length, ..)| length > 0 && length.is_multiple_of(4)).map(|o| (i, o))
    });
    let long: Vec<_> = long.collect();
    if long.is_empty() || !long.iter().all(|&(i, _)| variant.is_wide(i)) {
        return 1;
    }
    // Vectors that all rows share stay in the cache.
    let mut rows = long.iter().filter(|&&(_, (_, _, row))| row);
    if rows.all(|&(_, (_, dtype, _))| dtype == DType::Bf16) { 8 } else { 4 }
}

/// A step of a thread, for what a launch costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A loop that is gone through so often begins, or a branch.
    Open { turns: u64, of_loop: bool },
    /// The innermost of them ends.
    Close,
    /// The row's threads wait for each other; whether they are a block.
    Wait { block: bool },
    /// Threads join their parts by shuffles.
    Join,
    /// Numbers of the row of an operand are loaded.
    Load(usize),
    /// Numbers of the row of an output are stored.
    Store,
}

/// Steps joined: loops multiply what they hold, and a barrier, a store to memory or an end of a
/// loop ends a run of loads, over which none of the next is moved. Rows that were read before come
/// from the cache of the processor.
fn turns(steps: &[Step]) -> Turns {
    let mut of = Turns::default();
    let (mut open, mut now): (Vec<(u64, bool)>, u64) = (vec![], 1);
    let (mut loading, mut seen) = (false, BTreeSet::new());
    for step in steps {
        match *step {
            Step::Open { turns, of_loop } => {
                open.push((now, of_loop));
                now = now.saturating_mul(turns.max(1));
                loading &= !of_loop;
            }
            Step::Close => {
                let (before, of_loop) = open.pop().unwrap_or((1, false));
                now = before;
                loading &= !of_loop;
            }
            Step::Wait { block } => {
                of.barriers = of.barriers.saturating_add(if block { now } else { 0 });
                loading = false;
            }
            Step::Join => of.reductions = of.reductions.saturating_add(now),
            Step::Load(operand) if seen.insert(operand) => {
                of.trips = of.trips.saturating_add(if loading { 0 } else { now });
                loading = true;
            }
            Step::Load(_) => {}
            Step::Store => loading = false,
        }
    }
    of
}

struct Generator<'k> {
    kernel: &'k RowKernel,
    form: Form,
    /// Results wait in shared memory until all inputs of the row have been read.
    staged: bool,
    /// Rows that nobody needs are passed over.
    some: bool,
    /// Adjacent elements that a thread takes at a time at most.
    width: u64,
    variant: Variant,
    plans: Vec<Plan>,
    /// Threads of a row, and rows of a block at a time.
    threads: u64,
    slots: u64,
    /// Floats of shared memory of a row; `common`, those of the block as well.
    stored: u64,
    common: u64,
    text: String,
    /// The same as its price has it.
    steps: Vec<Step>,
    indent: usize,
    /// Values already in variables, innermost block last.
    scopes: Vec<HashMap<(u32, At), Value>>,
    /// Loops under way: where each begins in the text and in the steps, how often a thread goes
    /// through it, and the words loaded in it so far.
    loops: Vec<(usize, usize, u64, u64)>,
    next: usize,
    /// Whether the loop under way stores results, and whether such a loop read a row elsewhere than
    /// where it writes.
    storing: bool,
    shifted: bool,
    /// Rotations that keep cosines and sines; others have those of one of them.
    angles: Vec<usize>,
    /// Whether indices from memory are used.
    indices: bool,
    tables: Vec<String>,
    /// Operations whose kept values may be read after the next barrier of the row's threads, and
    /// the lines that come after it: independent ones share the barrier.
    waiting: BTreeSet<usize>,
    deferred: Vec<String>,
    /// Whether those lines write shared memory.
    deferred_writes: bool,
    /// Floats of the buffer in which warps leave their parts of reductions.
    parts: u64,
}

impl<'k> Generator<'k> {
    fn new(kernel: &'k RowKernel, form: Form, staged: bool, variant: Variant) -> Result<Self> {
        let mut generator = Generator {
            kernel,
            form,
            staged,
            // A sum over rows is over all of them.
            some: variant.places && !kernel.outputs.iter().any(|o| sums(o.store)),
            width: together(kernel, variant),
            variant,
            plans: vec![Plan::default(); kernel.ops.len()],
            threads: 1,
            slots: 1,
            stored: 0,
            common: 0,
            text: String::new(),
            steps: vec![],
            indent: 1,
            scopes: vec![],
            loops: vec![],
            next: 0,
            storing: false,
            shifted: false,
            angles: vec![],
            indices: false,
            tables: vec![],
            waiting: BTreeSet::new(),
            deferred: vec![],
            deferred_writes: false,
            parts: 0,
        };
        generator.plan(form == Form::Dear);
        Ok(generator)
    }

    fn length(&self, array: usize) -> u64 {
        self.kernel.lengths[array]
    }

    /// Memory of kept values, and how many threads have a row.
    fn plan(&mut self, dear: bool) {
        let kernel = self.kernel;
        let count = kernel.ops.len();
        let mut cost = vec![0u64; count];
        for (i, op) in kernel.ops.iter().enumerate() {
            let below = if reduces(op) { 0 } else { 1 };
            let inputs: u64 = op.operands().iter().map(|&x| cost[x]).fold(0, u64::saturating_add);
            cost[i] = own_cost(kernel, op).saturating_add(below * inputs);
        }
        // The loops that ask for an array. Numbers: the operation whose statistic it is, or a loop
        // of outputs of one length.
        let (output_loop, twice) = (count as u64, u64::MAX / 2);
        let mut loops: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); count];
        for output in &kernel.outputs {
            loops[output.array as usize].insert(output_loop + self.length(output.array as usize));
        }
        let mut keep = vec![false; count];
        for (i, op) in kernel.ops.iter().enumerate().rev() {
            if loops[i].is_empty() || self.length(i) == 0 {
                continue;
            }
            self.plans[i].live = true;
            let reduces = reduces(op);
            let cheap =
                matches!(op, RowOp::Load { .. } | RowOp::Constant(_) | RowOp::Index { .. } | RowOp::Zeros);
            keep[i] = reduces || (dear && !cheap && cost[i] >= 12 && loops[i].len() >= 2);
            let asking = if keep[i] { BTreeSet::from([i as u64]) } else { loops[i].clone() };
            let statistics = matches!(
                op,
                RowOp::Rms { .. } | RowOp::RmsGrad { .. } | RowOp::Softmax { .. } | RowOp::SoftmaxGrad { .. }
            );
            let again = matches!(op, RowOp::Rope { .. } | RowOp::PickGrad { .. });
            for x in op.operands() {
                loops[x].extend(&asking);
                if statistics {
                    loops[x].insert(i as u64);
                }
                if again {
                    loops[x].insert(twice + i as u64);
                }
            }
        }
        let widest = (0..count).filter(|&i| self.plans[i].live).map(|i| self.length(i)).max().unwrap_or(1);
        let warps = widest <= WARP_ROW && kernel.rows >= 8 * self.variant.processors();
        let most = if warps { 32 } else { BLOCK };
        self.threads = widest.div_ceil(self.width.max(4)).next_power_of_two().clamp(1, most);
        let mut ropes: HashMap<String, Vec<Kept>> = HashMap::new();
        for (i, &keep) in keep.iter().enumerate() {
            if !self.plans[i].live {
                continue;
            }
            let length = self.length(i);
            if keep {
                let register = reduces(&kernel.ops[i]) && length == 1;
                self.plans[i].own = Some(if register { self.register() } else { self.shared(length) });
            }
            let (stats, groups) = match kernel.ops[i] {
                RowOp::Rms { size, .. } | RowOp::SoftmaxGrad { size, .. } => (1, length / size),
                RowOp::RmsGrad { size, .. } | RowOp::Softmax { size, .. } => (2, length / size),
                // Cosines and sines of the pairs: never in a register, and once for all rotations
                // by the same angles, and for all rows at a position along depth.
                RowOp::Rope { size, rope, position, depths, .. } => {
                    let angles = format!(
                        "{size} {position} {depths} {:?} {:?}",
                        rope.positions,
                        frequencies(&rope, size)
                    );
                    let common = rope.positions != Positions::Tokens && self.form != Form::Long;
                    let stats = match ropes.get(&angles) {
                        Some(stats) => stats.clone(),
                        None => {
                            self.angles.push(i);
                            let mut keep =
                                || if common { self.common(size / 2) } else { self.shared(size / 2) };
                            vec![keep(), keep()]
                        }
                    };
                    ropes.insert(angles, stats.clone());
                    self.plans[i].stats = stats;
                    (0, 0)
                }
                _ => (0, 0),
            };
            for _ in 0..stats {
                let kept = if groups == 1 { self.register() } else { self.shared(groups) };
                self.plans[i].stats.push(kept);
            }
        }
    }

    fn register(&mut self) -> Kept {
        if self.form == Form::Long {
            return self.shared(1);
        }
        self.next += 1;
        Kept::Register(format!("r{}", self.next))
    }

    /// All that is kept begins on 16 bytes.
    fn shared(&mut self, floats: u64) -> Kept {
        let start = self.stored;
        self.stored = start.saturating_add(floats).next_multiple_of(4);
        Kept::Shared(start)
    }

    fn common(&mut self, floats: u64) -> Kept {
        let start = self.common;
        self.common = start.saturating_add(floats).next_multiple_of(4);
        Kept::Common(start)
    }

    /// Elements of a loop over `length` that a thread takes at a time.
    fn width(&self, length: u64) -> u64 {
        let fits = |width: &u64| *width <= self.width && length > 0 && length.is_multiple_of(*width);
        [8, 4].into_iter().find(fits).unwrap_or(1)
    }

    // --- text ------------------------------------------------------------------------------------

    fn line(&mut self, line: &str) {
        for _ in 0..self.indent {
            self.text.push_str("    ");
        }
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// A branch, to be ended by [`Self::close`].
    fn open(&mut self, line: &str) {
        self.begin(line, Step::Open { turns: 1, of_loop: false });
    }

    /// A loop that is never unrolled, to be ended by [`Self::close`].
    fn open_rolled(&mut self, line: &str, turns: u64) {
        self.begin(line, Step::Open { turns, of_loop: true });
    }

    fn begin(&mut self, line: &str, step: Step) {
        self.steps.push(step);
        self.line(line);
        self.indent += 1;
        self.scopes.push(HashMap::new());
    }

    fn close(&mut self) {
        self.scopes.pop();
        self.indent -= 1;
        self.steps.push(Step::Close);
        self.line("}");
    }

    /// A loop that a thread goes through `trips` times at most, to be ended by
    /// [`Self::close_loop`].
    fn open_loop(&mut self, line: &str, trips: u64) {
        self.loops.push((self.text.len(), self.steps.len(), trips, 0));
        self.open_rolled(line, trips);
    }

    /// Ends a loop, and says how far it is unrolled: as far as loads of several elements should be
    /// under way, and no further, for most of what a row takes to compile is loops unrolled.
    fn close_loop(&mut self) {
        self.close();
        if let Some((begin, step, trips, loads)) = self.loops.pop() {
            let times = (LOADS / loads.max(1)).clamp(1, 4).min(trips);
            self.text.insert_str(begin + 4 * self.indent, &format!("unroll({times}) "));
            if let Some(Step::Open { turns, .. }) = self.steps.get_mut(step) {
                *turns = turns.div_ceil(times.max(1));
            }
        }
    }

    /// The loop of a row's threads over elements `variable` = `first`, `first + step` and so on,
    /// below `length`, or for `width` at a time from each of `width` times as much; ended by
    /// [`Self::close_each`].
    fn open_each(&mut self, variable: &str, first: &str, length: u64, step: u64, width: u64) {
        let (mut begin, step) = (first.to_string(), step.saturating_mul(width));
        if width > 1 {
            begin = if first.contains(' ') {
                format!("({first}) * {width}")
            } else {
                format!("{first} * {width}")
            };
        }
        if step >= length {
            self.open(&format!("if ({begin} < {length}) {{"));
            self.line(&format!("const int {variable} = {begin};"));
        } else {
            let line =
                format!("for (int {variable} = {begin}; {variable} < {length}; {variable} += {step}) {{");
            self.open_loop(&line, length.div_ceil(step));
        }
    }

    fn close_each(&mut self, length: u64, step: u64, width: u64) {
        if step.saturating_mul(width) >= length { self.close() } else { self.close_loop() }
    }

    fn fresh(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    fn known(&self, key: &(u32, At)) -> Option<Value> {
        self.scopes.iter().rev().find_map(|scope| scope.get(key).cloned())
    }

    fn remember(&mut self, key: (u32, At), value: &Value) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(key, value.clone());
        }
    }

    /// An index in a variable, unless it is one or a number already.
    fn index(&mut self, expression: String) -> String {
        if expression.chars().all(|c| c.is_ascii_alphanumeric()) {
            return expression;
        }
        let key = (u32::MAX, At::one(expression));
        if let Some(name) = self.known(&key) {
            return name.text;
        }
        let name = self.fresh("i");
        self.line(&format!("const int {name} = {};", key.1.index));
        self.remember(key, &Value::one(name.as_str()));
        name
    }

    /// Elements of the small operand of a broadcast for those of the large one.
    fn small(&mut self, at: &At, b: Broadcast) -> At {
        let index = &at.index;
        let quotient = if b.inner == 1 { index.clone() } else { format!("{index} / {}", b.inner) };
        let index = match (b.size, b.outer) {
            (0 | 1, _) => return At::one("0"),
            (_, 0 | 1) => self.index(quotient),
            (size, _) => self.index(format!("{quotient} % {size}")),
        };
        At { index, width: if b.inner == 1 { at.width } else { 1 } }
    }

    fn group(&mut self, at: &At, array: usize, size: u64) -> String {
        if self.length(array) == size { "0".into() } else { self.index(format!("{} / {size}", at.index)) }
    }

    fn within(&mut self, at: &At, array: usize, size: u64) -> String {
        if self.length(array) == size {
            at.index.clone()
        } else {
            self.index(format!("{} % {size}", at.index))
        }
    }

    fn kept(kept: &Kept, at: &At) -> String {
        match kept {
            Kept::Register(name) => name.clone(),
            Kept::Shared(start) => load("kept", *start, at),
            Kept::Common(start) => load("common", *start, at),
        }
    }

    fn stat(&self, array: usize, number: usize, at: &At) -> String {
        self.plans[array].stats.get(number).map_or(String::new(), |s| Self::kept(s, at))
    }

    // --- expressions -----------------------------------------------------------------------------

    /// Elements of an array, as a variable or a short expression.
    fn value(&mut self, array: u32, at: &At) -> Value {
        let i = array as usize;
        // All elements of an array of one are the same.
        let one = At::one("0");
        let at = if self.length(i) == 1 { &one } else { at };
        if let Some(kept) = &self.plans[i].own
            && at.width == 1
        {
            return Value::one(Self::kept(kept, at));
        }
        if let RowOp::Constant(c) = self.kernel.ops[i] {
            return Value::one(float(c.0));
        }
        if let RowOp::Index { input } = self.kernel.ops[i] {
            return Value::one(format!("float(x{input})"));
        }
        if let RowOp::Zeros = self.kernel.ops[i] {
            return Value::one("0.0f");
        }
        let key = (array, at.clone());
        if let Some(value) = self.known(&key) {
            return value;
        }
        let value = match self.plans[i].own.clone() {
            Some(kept) => self.define(&Self::kept(&kept, at), at.width),
            None => self.compute(i, at),
        };
        self.remember(key, &value);
        value
    }

    fn define(&mut self, expression: &str, width: u64) -> Value {
        let name = self.fresh("v");
        self.line(&format!("const {} {name} = {expression};", numbers(width)));
        Value { text: name, width }
    }

    /// Cosines (0) or sines (1) of a rotation, which several rotations may have in common.
    fn angle(&mut self, i: usize, number: usize, at: &At) -> String {
        let text = self.stat(i, number, at);
        if at.width == 1 {
            return text;
        }
        let key = (u32::MAX, At { index: text, width: at.width });
        if let Some(value) = self.known(&key) {
            return value.text;
        }
        let value = self.define(&key.1.index, at.width);
        self.remember(key, &value);
        value.text
    }

    /// Elements one after another.
    fn one_by_one(&mut self, at: &At, value: &dyn Fn(&mut Self, &At) -> Value) -> Value {
        let parts: Vec<String> = (0..at.width)
            .map(|lane| {
                let index = if lane == 0 { at.index.clone() } else { format!("{} + {lane}", at.index) };
                let at = At::one(self.index(index));
                value(self, &at).text
            })
            .collect();
        self.define(&format!("{}({})", numbers(at.width), parts.join(", ")), at.width)
    }

    /// Whether adjacent elements of the result come of adjacent or equal elements of the operands.
    fn adjacent(&self, i: usize, width: u64) -> bool {
        let fits = |size: u64| size.is_multiple_of(width);
        let operand = |x: u32| self.length(x as usize);
        match &self.kernel.ops[i] {
            RowOp::Binary { broadcast: b, .. } => {
                b.size <= 1 || fits(b.inner) || (b.inner == 1 && (b.outer <= 1 || fits(b.size)))
            }
            RowOp::Rms { size, .. }
            | RowOp::RmsGrad { size, .. }
            | RowOp::Softmax { size, .. }
            | RowOp::SoftmaxGrad { size, .. } => self.length(i) == *size || fits(*size),
            RowOp::Rope { size, .. } => fits(size / 2),
            RowOp::Slice { x, size, start } => {
                let groups = (operand(*x) / size.max(&1)).max(1);
                fits(*start) && (groups == 1 || (fits(*size) && fits(self.length(i) / groups)))
            }
            RowOp::Concat { parts, groups } => parts.iter().all(|&part| fits(operand(part) / groups)),
            RowOp::Pick { .. } => false,
            _ => true,
        }
    }

    fn compute(&mut self, i: usize, at: &At) -> Value {
        if at.width > 1 && !self.adjacent(i, at.width) {
            return self.one_by_one(at, &|g, at| g.value(i as u32, at));
        }
        let mut width = at.width;
        let expression = match self.kernel.ops[i].clone() {
            RowOp::Load { input } => {
                let (dtype, row) = match self.kernel.inputs[input as usize] {
                    RowInput::Row { dtype, .. } => (dtype, true),
                    RowInput::Shared { dtype, .. } => (dtype, false),
                    _ => (DType::F32, false),
                };
                if self.storing && at.index != "i" && row {
                    self.shifted = true;
                }
                let aligned = width > 1 && self.variant.is_wide(input as usize);
                if row {
                    self.steps.push(Step::Load(input as usize));
                }
                if let Some((_, _, _, words)) = self.loops.last_mut() {
                    *words += if aligned { (width * dtype.bytes()).div_ceil(4) } else { width };
                }
                match width {
                    1 => format!("value(x{input}[{}])", at.index),
                    _ if aligned => load(&format!("x{input}"), 0, at),
                    _ => {
                        let element = |lane| format!("value(x{input}[{} + {lane}])", at.index);
                        format!(
                            "{}({})",
                            numbers(width),
                            (0..width).map(element).collect::<Vec<_>>().join(", ")
                        )
                    }
                }
            }
            RowOp::Constant(c) => return Value::one(float(c.0)),
            RowOp::Index { input } => return Value::one(format!("float(x{input})")),
            RowOp::Zeros => return Value::one("0.0f"),
            // Of one element each; others are kept.
            RowOp::Reduce { x, .. } => return self.value(x, at),
            RowOp::Unary(op, x) => {
                let x = self.value(x, at);
                width = x.width;
                op.statement(&x.text)
            }
            RowOp::Binary { op, a, b, broadcast, small_first } => {
                let small = self.small(at, broadcast);
                let (a_at, b_at) = if small_first { (&small, at) } else { (at, &small) };
                let (a, b) = (self.value(a, a_at), self.value(b, b_at));
                width = a.width.max(b.width);
                op.statement(&a.text, &b.text)
            }
            RowOp::Rms { x, size, .. } => {
                let group = At::one(self.group(at, i, size));
                let x = self.value(x, at);
                width = x.width;
                format!("{} * {}", x.text, self.stat(i, 0, &group))
            }
            RowOp::RmsGrad { x, dy, size, .. } => {
                let group = At::one(self.group(at, i, size));
                let (x, dy) = (self.value(x, at), self.value(dy, at));
                width = x.width.max(dy.width);
                let (first, second) = (self.stat(i, 0, &group), self.stat(i, 1, &group));
                format!("fmaf(-{second}, {}, {} * {first})", x.text, dy.text)
            }
            RowOp::Softmax { x, size } => {
                let group = At::one(self.group(at, i, size));
                let x = self.value(x, at);
                width = x.width;
                format!("expf({} - {}) * {}", x.text, self.stat(i, 0, &group), self.stat(i, 1, &group))
            }
            RowOp::SoftmaxGrad { y, dy, size } => {
                let group = At::one(self.group(at, i, size));
                let (y, dy) = (self.value(y, at), self.value(dy, at));
                width = y.width.max(dy.width);
                format!("{} * ({} - {})", y.text, dy.text, self.stat(i, 0, &group))
            }
            RowOp::Rope { x, size, rope, .. } => {
                // An odd last element stays as it is; sizes are even.
                let half = size / 2;
                let within = self.within(at, i, size);
                let first = &at.index;
                let pair = self.index(format!("{within} < {half} ? {within} : {within} - {half}"));
                let other = self.index(format!("{within} < {half} ? {first} + {half} : {first} - {half}"));
                let (pair, other) = (At { index: pair, width }, At { index: other, width });
                let (mine, other) = (self.value(x, at), self.value(x, &other));
                let (cosine, sine) = (self.angle(i, 0, &pair), self.angle(i, 1, &pair));
                let (low, high) = if rope.inverse { ("", "-") } else { ("-", "") };
                let (mine, other) = (mine.text, other.text);
                format!("fmaf({mine}, {cosine}, ({within} < {half} ? {low}{sine} : {high}{sine}) * {other})")
            }
            RowOp::Slice { x, size, start } => {
                let (groups, taken) = {
                    let groups = (self.length(x as usize) / size.max(1)).max(1);
                    (groups, self.length(i) / groups)
                };
                let first = &at.index;
                let from = match (groups, start) {
                    (1, 0) => first.clone(),
                    (1, _) => format!("{first} + {start}"),
                    _ => format!("{first} / {taken} * {size} + {first} % {taken} + {start}"),
                };
                let index = self.index(from);
                return self.value(x, &At { index, width });
            }
            RowOp::Concat { parts, groups } => return self.concat(i, &parts, groups, at),
            RowOp::Pick { table, chosen } => {
                self.indices = true;
                let length = self.length(table as usize);
                let raw = self.fresh("i");
                self.line(&format!("const int {raw} = x{chosen}[{}];", at.index));
                self.line(&format!("if (u32({raw}) >= {length}u) report(status, launch);"));
                let place = self.index(format!("u32({raw}) < {length}u ? {raw} : 0"));
                return self.value(table, &At::one(place));
            }
            RowOp::PickGrad { d, chosen } => {
                self.indices = true;
                let (name, k, c) = (self.fresh("v"), self.fresh("k"), self.fresh("i"));
                let count = match self.kernel.inputs[chosen as usize] {
                    RowInput::RowInts { length } => length,
                    _ => 0,
                };
                let first = &at.index;
                self.line(&format!("{} {name} = 0.0f;", numbers(width)));
                self.open_loop(&format!("for (int {k} = 0; {k} < {count}; ++{k}) {{"), count);
                self.line(&format!("const int {c} = x{chosen}[{k}];"));
                self.line(&format!("if (u32({c}) >= {}u) report(status, launch);", self.length(i)));
                self.open(&match width {
                    1 => format!("if ({c} == {first}) {{"),
                    _ => format!("if (u32({c} - {first}) < {width}u) {{"),
                });
                let d = self.value(d, &At::one(k)).text;
                match width {
                    1 => self.line(&format!("{name} = {d};")),
                    _ => self.line(&format!("{name} = with_lane({name}, {c} - {first}, {d});")),
                }
                self.close();
                self.close_loop();
                return Value { text: name, width };
            }
        };
        self.define(&expression, width)
    }

    fn concat(&mut self, i: usize, parts: &[u32], groups: u64, at: &At) -> Value {
        let total = self.length(i) / groups;
        let within = self.within(at, i, total);
        let group = self.group(at, i, total);
        let name = self.fresh("v");
        self.line(&format!("{} {name} = 0.0f;", numbers(at.width)));
        let mut first = 0;
        for &part in parts {
            let size = self.length(part as usize) / groups;
            let end = first + size;
            self.open(&format!("if ({within} >= {first} && {within} < {end}) {{"));
            let mut from = if group == "0" { within.clone() } else { format!("{group} * {size} + {within}") };
            if first > 0 {
                from += &format!(" - {first}");
            }
            let index = self.index(from);
            let value = self.value(part, &At { index, width: at.width });
            self.line(&format!("{name} = {};", value.text));
            self.close();
            first = end;
        }
        Value { text: name, width: at.width }
    }

    // --- what is kept ----------------------------------------------------------------------------

    fn sync(&mut self) {
        if self.threads > 1 {
            self.steps.push(Step::Wait { block: self.threads > 32 });
            self.line(&format!("wait_row({});", self.threads));
        }
    }

    /// The barrier of the block.
    fn wait_block(&mut self) {
        self.steps.push(Step::Wait { block: true });
        self.line("wait_block();");
    }

    /// Declares the buffer of reductions where the text was so long.
    fn buffer(&mut self, at: usize) {
        let parts = std::mem::take(&mut self.parts);
        if parts > 0 {
            self.text.insert_str(at, &format!("    shared float buffer[{parts}];\n"));
        }
    }

    /// Whether what an operation reads is kept by one that waits for a barrier.
    fn waits(&self, i: usize) -> bool {
        let (mut next, mut seen) = (self.kernel.ops[i].operands(), BTreeSet::new());
        while let Some(x) = next.pop() {
            if self.waiting.contains(&x) {
                return true;
            }
            if self.plans[x].own.is_none() && seen.insert(x) {
                next.extend(self.kernel.ops[x].operands());
            }
        }
        false
    }

    /// The barrier after which everything kept so far may be read.
    fn meet(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        self.sync();
        for line in std::mem::take(&mut self.deferred) {
            self.line(&line);
        }
        if std::mem::take(&mut self.deferred_writes) {
            self.sync();
        }
        self.waiting.clear();
    }

    /// A loop of the row's threads over the elements of an array.
    fn open_elements(&mut self, length: u64) -> At {
        if self.threads >= length && length == 1 {
            self.open("if (t == 0) {");
            self.line("const int i = 0;");
            return At::one("0");
        }
        let width = self.width(length);
        self.open_each("i", "t", length, self.threads, width);
        At { index: "i".into(), width }
    }

    fn close_elements(&mut self, length: u64) {
        self.close_each(length, self.threads, self.width(length));
    }

    /// For every group the result of a reduction of `terms(element)`, turned by `finish` into what
    /// is kept.
    ///
    /// Elements of a group are `inner` apart. `joins` are the operations of the accumulators,
    /// `terms` gives what to join for an element, a factor or two, `finish` the values to keep from
    /// the accumulators' names. Says whether the kept values may be read only after a barrier.
    #[allow(clippy::too_many_arguments)]
    fn reduce(
        &mut self,
        groups: u64,
        size: u64,
        inner: u64,
        joins: &[Join],
        terms: &dyn Fn(&mut Self, &At, &At) -> Vec<Term>,
        finish: &dyn Fn(&[String]) -> Vec<String>,
        kept: &[Kept],
    ) -> bool {
        let names: Vec<String> = joins.iter().map(|_| self.fresh("s")).collect();
        let width = if inner == 1 { self.width(size) } else { 1 };
        let accumulate = |g: &mut Self, group: &str, first: &str, step: u64| {
            g.open_each("j", first, size, step, width);
            let index = g.index(match (group, inner) {
                ("0", 1) => "j".to_string(),
                (_, 1) => format!("{group} * {size} + j"),
                ("0", _) => format!("j * {inner}"),
                _ => format!("{group} / {inner} * {} + j * {inner} + {group} % {inner}", size * inner),
            });
            let terms = terms(g, &At { index, width }, &At::one(group));
            for ((name, join), (a, b)) in names.iter().zip(joins).zip(terms) {
                let a = a.spread(width);
                g.line(&match b.map(|b| b.spread(width)) {
                    Some(b) => format!("{name} = fmaf({a}, {b}, {name});"),
                    None => format!("{name} = {};", join.two(name, &a)),
                });
            }
            g.close_each(size, step, width);
        };
        // A thread's own, one for each of the elements that it takes at a time.
        let declare = |g: &mut Self| {
            for (name, join) in names.iter().zip(joins) {
                g.line(&format!("{} {name} = {};", numbers(width), join.nothing()));
            }
        };
        let own = |name: &str, join: Join| match width {
            1 => name.to_string(),
            _ => format!("all_{}({name})", join.word()),
        };
        if groups == 1 {
            declare(self);
            let alone = self.threads > 32 && size <= ALONE;
            match alone {
                true => accumulate(self, "0", "t % 32", 32),
                false => accumulate(self, "0", "t", self.threads),
            }
            let apart = self.threads > 32 && !alone;
            let mut joined = vec![];
            for (name, &join) in names.iter().zip(joins) {
                let own = own(name, join);
                joined.push(match self.threads {
                    _ if apart => {
                        let (warps, part, sum) = (self.threads / 32, self.parts, self.fresh("v"));
                        self.parts += warps;
                        self.line(&format!("leave_{}({own}, buffer + {part});", join.word()));
                        let words = if join == Join::Sum { "join_sums" } else { "join_largest" };
                        let parts = format!("{words}(buffer + {part}, {})", self.threads);
                        self.deferred.push(format!("const float {sum} = {parts};"));
                        sum
                    }
                    1 if own == *name => own,
                    1 => self.define(&own, 1).text,
                    threads => {
                        self.steps.push(Step::Join);
                        let lanes = threads.min(32);
                        self.define(&format!("lanes_{}({own}, {lanes}, {lanes})", join.word()), 1).text
                    }
                });
            }
            let writes = kept.iter().any(|k| !matches!(k, Kept::Register(_)));
            for (kept, value) in kept.iter().zip(finish(&joined)) {
                let line = match kept {
                    Kept::Register(register) => format!("const float {register} = {value};"),
                    Kept::Shared(_) | Kept::Common(_) => {
                        format!("if (t == 0) {} = {value};", Self::kept(kept, &At::one("0")))
                    }
                };
                match apart {
                    true => self.deferred.push(line),
                    false => self.line(&line),
                }
            }
            self.deferred_writes |= apart && writes;
            return apart || writes;
        }
        // Lanes for each group: as many as it has elements, or several, within a warp.
        let lanes = (1u64 << (size / width).max(1).ilog2()).min(32).min(self.threads);
        let step = self.threads / lanes;
        // A group or several at a time; all lanes stay together.
        self.open_rolled(
            &format!("unroll(1) for (int first = 0; first < {groups}; first += {step}) {{"),
            groups.div_ceil(step),
        );
        self.line(&format!("const int g = first + t / {lanes};"));
        declare(self);
        self.open(&format!("if (g < {groups}) {{"));
        accumulate(self, "g", &format!("t % {lanes}"), lanes);
        self.close();
        let mut joined = vec![];
        for (name, &join) in names.iter().zip(joins) {
            let mut sum = own(name, join);
            if lanes > 1 {
                self.steps.push(Step::Join);
                sum = format!("lanes_{}({sum}, {lanes}, {})", join.word(), self.threads.min(32));
            }
            joined.push(if sum == *name { sum } else { self.define(&sum, 1).text });
        }
        self.open(&format!("if (g < {groups} && t % {lanes} == 0) {{"));
        for (kept, value) in kept.iter().zip(finish(&joined)) {
            self.line(&format!("{} = {value};", Self::kept(kept, &At::one("g"))));
        }
        self.close();
        self.close();
        true
    }

    /// Everything an operation keeps.
    fn keep(&mut self, i: usize) -> Result<()> {
        if !self.plans[i].live {
            return Ok(());
        }
        let keeps = self.plans[i].own.is_some() || !self.plans[i].stats.is_empty();
        if keeps && self.waits(i) {
            self.meet();
        }
        let stats = self.plans[i].stats.clone();
        let length = self.length(i);
        let waits = match self.kernel.ops[i].clone() {
            RowOp::Rms { x, size, eps } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum],
                &|g, at, _| {
                    let x = g.value(x, at);
                    vec![(x.clone(), Some(x))]
                },
                &|s| vec![format!("1.0f / sqrtf({} / {} + {})", s[0], float(size as f64), float(eps.0))],
                &stats,
            ),
            RowOp::RmsGrad { x, dy, size, eps } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum, Join::Sum],
                &|g, at, _| {
                    let (x, dy) = (g.value(x, at), g.value(dy, at));
                    vec![(x.clone(), Some(x.clone())), (x, Some(dy))]
                },
                &|s| {
                    let n = float(size as f64);
                    let r = format!("(1.0f / sqrtf({} / {n} + {}))", s[0], float(eps.0));
                    vec![r.clone(), format!("{} / {n} * ({r} * {r} * {r})", s[1])]
                },
                &stats,
            ),
            RowOp::Softmax { x, size } => {
                let waits = self.reduce(
                    length / size,
                    size,
                    1,
                    &[Join::Largest],
                    &|g, at, _| vec![(g.value(x, at), None)],
                    &|s| vec![s[0].clone()],
                    &stats[..1],
                );
                if waits {
                    self.waiting.insert(i);
                    self.meet();
                }
                let most = stats[0].clone();
                self.reduce(
                    length / size,
                    size,
                    1,
                    &[Join::Sum],
                    &|g, at, group| {
                        let x = g.value(x, at);
                        let text = format!("expf({} - {})", x.text, Self::kept(&most, group));
                        vec![(Value { text, width: x.width }, None)]
                    },
                    &|s| vec![format!("1.0f / {}", s[0])],
                    &stats[1..],
                )
            }
            RowOp::SoftmaxGrad { y, dy, size } => self.reduce(
                length / size,
                size,
                1,
                &[Join::Sum],
                &|g, at, _| {
                    let (y, dy) = (g.value(y, at), g.value(dy, at));
                    vec![(y, Some(dy))]
                },
                &|s| vec![s[0].clone()],
                &stats,
            ),
            RowOp::Rope { .. } if matches!(stats[0], Kept::Shared(_)) && self.angles.contains(&i) => {
                self.angles(i, "t", self.threads);
                // Other rotations read them as well.
                self.waiting.insert(i);
                self.meet();
                false
            }
            RowOp::Reduce { op, x, over } if over.size != 1 => {
                let (size, inner) = (over.size, over.inner);
                let join = if op == Reduce::Max { Join::Largest } else { Join::Sum };
                let own: Vec<Kept> = self.plans[i].own.clone().into_iter().collect();
                let waits = self.reduce(
                    over.outer * inner,
                    size,
                    inner,
                    &[join],
                    &|g, at, _| vec![(g.value(x, at), None)],
                    &|s| {
                        vec![match op {
                            Reduce::Mean => format!("{} / {}", s[0], float(size as f64)),
                            _ => s[0].clone(),
                        }]
                    },
                    &own,
                );
                if waits {
                    self.waiting.insert(i);
                }
                return Ok(());
            }
            _ => false,
        };
        if waits {
            self.waiting.insert(i);
        }
        if let Some(own) = self.plans[i].own.take() {
            if waits {
                self.meet();
            }
            // Not known while it is computed: the expression is what is wanted.
            let at = self.open_elements(length);
            let value = self.compute(i, &at);
            self.set(&own, &at, &value);
            self.close_elements(length);
            self.plans[i].own = Some(own);
            self.waiting.insert(i);
        }
        Ok(())
    }

    /// Keeps elements.
    fn set(&mut self, kept: &Kept, at: &At, value: &Value) {
        let line = match (kept, at.width) {
            (_, 1) => format!("{} = {};", Self::kept(kept, at), value.text),
            (Kept::Shared(start), width) => {
                format!("put(kept + {start} + {}, {});", at.index, value.spread(width))
            }
            _ => return,
        };
        self.line(&line);
    }

    /// Cosines and sines of a rotation, by `step` threads; this one is number `first`.
    fn angles(&mut self, i: usize, first: &str, step: u64) {
        let RowOp::Rope { size, rope, position, depths, .. } = self.kernel.ops[i] else { return };
        let half = size / 2;
        let table = format!("FREQUENCIES_{i}");
        let mut text = format!("TABLE Wide {table}[] = {{");
        for (pair, frequency) in frequencies(&rope, size).into_iter().enumerate() {
            text.push_str(if pair % 4 == 0 { "\n    " } else { " " });
            text.push_str(&double(frequency));
            text.push(',');
        }
        text.push_str("\n};");
        self.tables.push(text);
        let stats = self.plans[i].stats.clone();
        self.open_each("i", first, half, step, 1);
        let position = match rope.positions {
            Positions::Tokens => format!("Wide(x{position}[0])"),
            Positions::Depth { half_reversed: false } => format!("Wide(x{position})"),
            Positions::Depth { half_reversed: true } => {
                format!("Wide(i % 2 == 0 ? x{position} : x{depths} - 1 - x{position})")
            }
        };
        self.line(&format!("const Angle angle = sine_cosine({position} * {table}[i]);"));
        self.line(&format!("{} = angle.cosine;", Self::kept(&stats[0], &At::one("i"))));
        self.line(&format!("{} = angle.sine;", Self::kept(&stats[1], &At::one("i"))));
        self.close_each(half, step, 1);
    }

    // --- the kernel ------------------------------------------------------------------------------

    fn source(&mut self) -> Result<Option<Source>> {
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

    fn rows(&mut self, name: String, live: &[usize], summed: bool) -> Result<Option<Source>> {
        let kernel = self.kernel;
        let stores: Vec<usize> = live.iter().copied().filter(|&o| !sums(kernel.outputs[o].store)).collect();
        let totals: Vec<usize> = live.iter().copied().filter(|&o| sums(kernel.outputs[o].store)).collect();
        // Results that wait.
        let mut waiting: HashMap<usize, u64> = HashMap::new();
        if self.staged {
            for &o in &stores {
                let length = self.length(kernel.outputs[o].array as usize);
                if let Kept::Shared(start) = self.shared(length) {
                    waiting.insert(o, start);
                }
            }
        }
        // Sums of a block's rows, for each of the rows that it has at a time.
        let mut running: HashMap<usize, u64> = HashMap::new();
        for &o in &totals {
            let length = self.length(kernel.outputs[o].array as usize);
            if let Kept::Shared(start) = self.shared(length) {
                running.insert(o, start);
            }
        }
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
        self.slots = slots;
        // Rows that a block sums: few enough that there are two blocks for every processor.
        let share = (kernel.rows / (2 * self.variant.processors())).max(1);
        let share = (1 << share.ilog2()).min(SUM_BLOCK).max(slots);
        let bytes = memory(slots);
        let dynamic = bytes > STATIC_LIMIT - 1024;
        let limit = self.variant.shared().saturating_sub(1024);
        if bytes > limit {
            return Err(CodegenError::Shared { bytes, limit });
        }
        let block = self.threads * slots;

        let (mut list, lines) = self.parameters(live);
        self.scopes.push(HashMap::new());
        if self.stored + self.common > 0 {
            match dynamic {
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
                    self.angles(i, "thread()", block);
                }
            }
            self.wait_block();
        }
        for &o in &totals {
            let length = self.length(kernel.outputs[o].array as usize);
            let at = self.open_elements(length);
            self.set(&Kept::Shared(running[&o]), &at, &Value::one("0.0f"));
            self.close_elements(length);
        }
        let grid = if summed {
            self.open_rolled(
                &format!("unroll(1) for (int turn = 0; turn < {share}; turn += {slots}) {{"),
                share.div_ceil(slots),
            );
            self.line(&format!("const i64 row = i64(block()) * {share} + turn + slot;"));
            let whole = kernel.rows.is_multiple_of(share);
            // The rest of the block goes on to the barriers; rows end at the same turn for a whole
            // row's threads.
            if !whole {
                self.line(&format!("if (row >= {}) break;", kernel.rows));
            }
            kernel.rows.div_ceil(share)
        } else {
            self.line(&format!("const i64 row = i64(block()) * {slots} + slot;"));
            if !kernel.rows.is_multiple_of(slots) {
                self.line(&format!("if (row >= {}) return;", kernel.rows));
            }
            kernel.rows.div_ceil(slots)
        };
        lines.iter().for_each(|line| self.line(line));
        for i in 0..kernel.ops.len() {
            self.keep(i)?;
        }
        self.meet();
        // Outputs of one length are one loop.
        let mut lengths: Vec<u64> =
            live.iter().map(|&o| self.length(kernel.outputs[o].array as usize)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let several =
            stores.iter().map(|&o| self.length(kernel.outputs[o].array as usize)).collect::<BTreeSet<_>>();
        for &length in &lengths {
            let at = self.open_elements(length);
            self.storing = !self.staged;
            let of_length = |o: &usize| self.length(kernel.outputs[*o].array as usize) == length;
            let of_length: Vec<usize> = live.iter().copied().filter(of_length).collect();
            let mut values = vec![];
            for &o in &of_length {
                values.push(self.value(kernel.outputs[o].array, &at));
            }
            for (&o, value) in of_length.iter().zip(values) {
                if let Some(&start) = running.get(&o) {
                    let kept = Kept::Shared(start);
                    let text = format!("{} + {}", Self::kept(&kept, &at), value.text);
                    self.set(&kept, &at, &Value { text, width: at.width });
                } else if let Some(&start) = waiting.get(&o) {
                    self.set(&Kept::Shared(start), &at, &value);
                } else {
                    self.put(o, &at, &value);
                }
            }
            self.storing = false;
            self.close_elements(length);
        }
        // Several loops: the first may write what the next reads.
        if lengths.len() > 1 && !several.is_empty() {
            self.shifted = true;
        }
        if self.staged && !stores.is_empty() {
            self.sync();
            for &o in &stores {
                let length = self.length(kernel.outputs[o].array as usize);
                let at = self.open_elements(length);
                let kept = Self::kept(&Kept::Shared(waiting[&o]), &at);
                let value = self.define(&kept, at.width);
                self.put(o, &at, &value);
                self.close_elements(length);
            }
        }
        if summed {
            // Kept values are overwritten for the next row.
            self.sync();
            self.close();
        }
        let mut builder = Builder::statements(name, "rows.cuh");
        let grid = blocks(grid)?;
        let shared = if dynamic { bytes as u32 } else { 0 };
        if !totals.is_empty() && kernel.rows > 0 {
            self.wait_block();
        }
        let mut seconds = vec![];
        for &o in &totals {
            let output = kernel.outputs[o];
            let length = self.length(output.array as usize);
            let operand = Argument::Operand(kernel.inputs.len() + o);
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            let add = output.store == RowStore::AddSum;
            let finish = |value: &str| match add {
                true => format!("put(out{o} + i, value(out{o}[i]) + {value});"),
                false => format!("put(out{o} + i, {value});"),
            };
            if kernel.rows > 0 {
                self.open_each("i", "thread()", length, block, 1);
                self.line(&format!("float sum = memory[{} + i];", running[&o]));
                if slots > 1 {
                    self.line(&format!(
                        "for (int s = 1; s < {slots}; ++s) sum += memory[s * {floats} + {} + i];",
                        running[&o]
                    ));
                }
            }
            if grid == 1 {
                list.push(Param::new(element, &format!("out{o}"), operand));
                self.line(&finish("sum"));
            } else if grid > 1 {
                let at = builder.scratch((grid as u64).saturating_mul(length).saturating_mul(4));
                list.push(Param::new("float *", &format!("part{o}"), Argument::Scratch(at)));
                self.line(&format!("part{o}[i64(block()) * {length} + i] = sum;"));
                seconds.push((o, at));
            }
            if kernel.rows > 0 {
                self.close_each(length, block, 1);
            }
            let params = |at: Option<u64>| {
                let mut list = vec![Param::new(element, &format!("out{o}"), operand)];
                let part = |at| Param::new("const float *", "part", Argument::Scratch(at));
                list.extend(at.map(part));
                list
            };
            if grid == 0 && !add {
                // The sum of no rows.
                let body = format!(
                    "    const int i = block() * {BLOCK} + thread();\n    if (i < {length}) {}\n",
                    finish("0.0f")
                );
                let geometry = (blocks(length.div_ceil(BLOCK))?, BLOCK as u32, 0);
                builder.entry(&format!("rows_sum{o}"), geometry, &params(None), &body);
            }
        }
        if grid > 0 {
            self.buffer(head);
            // A quarter of the threads that a processor has at once at least, or half: a row waits
            // for memory and for its barriers most of the time. An H200 takes a quarter to a third
            // less time for rows of many operands with half. Elsewhere that would spill.
            let few = self.threads == BLOCK && (summed || self.width <= 4);
            let resident = if few { RESIDENT_OF_BLOCKS } else { RESIDENT };
            builder.resident((resident / block).max(1) as u32);
            self.entry(&mut builder, "rows", (grid, block as u32, shared), list);
        }
        for (o, at) in seconds {
            let output = kernel.outputs[o];
            let length = self.length(output.array as usize);
            let add = output.store == RowStore::AddSum;
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            let finish = match add {
                true => format!("put(out{o} + i, value(out{o}[i]) + sum);"),
                false => format!("put(out{o} + i, sum);"),
            };
            let list = [
                Param::new(element, &format!("out{o}"), Argument::Operand(kernel.inputs.len() + o)),
                Param::new("const float *", "part", Argument::Scratch(at)),
            ];
            let body = format!(
                "    const int i = block() * 32 + thread() % 32;\n    \
                 const float sum = add_parts(part, {grid}, {length}, i);\n    \
                 if (thread() < 32 && i < {length}) {finish}\n"
            );
            let geometry = (blocks(length.div_ceil(32))?, BLOCK as u32, 0);
            builder.entry(&format!("rows_sum{o}"), geometry, &list, &body);
        }
        Ok(builder.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rows of 2048 are read by 256 threads in eight accesses each, and four are under way at
    /// once; a norm waits for all of them, and what is read a second time comes from the cache.
    #[test]
    fn round_trips_barriers_and_reductions_of_a_row_are_counted() {
        use Step::*;
        let open = |turns| Open { turns, of_loop: true };
        let steps = [
            open(3),
            open(2),
            Load(0),
            Close,
            Join,
            Wait { block: true },
            open(2),
            Load(0),
            Load(1),
            Store,
            Close,
            Wait { block: false },
            Wait { block: true },
            Close,
        ];
        // Each of three turns: two runs of four loads; then two of row 1, as row 0 is known.
        assert_eq!(turns(&steps), Turns { trips: 3 * (2 + 2), barriers: 6, reductions: 3 });
        // Loads of a branch and those after it are under way at once.
        let branch = [Open { turns: 1, of_loop: false }, Load(0), Close, Load(1), Store, Load(2)];
        assert_eq!(turns(&branch), Turns { trips: 2, barriers: 0, reductions: 0 });
    }
}
