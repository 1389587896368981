//! Row kernels, generated whole.
//!
//! An array of a row is an *expression of an index*: asked for element `i`, an operation asks its operands for theirs, so
//! a chain of element-wise operations, slices, rotations and broadcasts becomes one loop without anything in between.
//! What cannot be asked for by element is computed before and kept: sums and maxima over groups (in a register where a
//! row has one group, else in shared memory), the sines of a rotation, and arrays that are dear and needed in
//! several loops.
//!
//! Four shapes of kernel come of it:
//!
//! - *flat*: nothing is kept, so every element has a thread;
//! - *rows*: a few threads, a warp or a block have a row; several rows to a block where they are short;
//! - *sums*: blocks go through [`SUM_BLOCK`] rows, or as many as leave two blocks for every processor, and leave partial sums,
//!   which a second pass adds up in order;
//! - *long*: rows that are longer than a block can hold, or so long that few blocks would have all the work. What is kept of
//!   each row goes to scratch memory first; then every element has a thread, which goes through all rows where they are
//!   summed. A row may be as long as 32 bits count.

use super::blocks::{PROCESSORS, SHARED_LIMIT, places};
use super::text::{Builder, Param, blocks, double, fits, float};
use super::{Argument, CodegenError, Source, Variant};
use crate::ir::{Binary, DType, Positions, Reduce, Rope, Unary};
use crate::program::{Broadcast, RowInput, RowKernel, RowOp, RowStore, SUM_BLOCK};
use std::collections::{BTreeSet, HashMap};

type Result<T> = std::result::Result<T, CodegenError>;

/// Where a value lies that was computed before it is asked for.
#[derive(Clone, Debug)]
enum Kept {
    /// The same register in every thread of the row.
    Register(String),
    /// So many floats into the shared memory of the row.
    Shared(u64),
    /// So many floats into the shared memory of the block, whose rows have it in common.
    Common(u64),
}

/// What an operation keeps.
#[derive(Clone, Debug, Default)]
struct Plan {
    /// Whether anything asks for the array.
    live: bool,
    /// The array itself.
    own: Option<Kept>,
    /// What element-wise expressions of it need: statistics of groups, cosines and sines.
    stats: Vec<Kept>,
}

/// Threads of a block.
const BLOCK: u64 = 256;
/// Rows of this length at most have a warp each, which needs no barrier, where there are enough of them to fill a GPU.
const WARP_ROW: u64 = 1024;
/// Loads that a thread should have under way at once: loops with fewer are unrolled.
const LOADS: u64 = 8;
/// Static shared memory of a block.
const STATIC_LIMIT: u64 = 48 * 1024;

/// Whether an output is a sum over rows.
fn sums(store: RowStore) -> bool {
    matches!(store, RowStore::Sum | RowStore::AddSum)
}

/// Instructions of one element, roughly.
fn own_cost(kernel: &RowKernel, op: &RowOp) -> u64 {
    match op {
        RowOp::Constant(_) | RowOp::Zeros | RowOp::Reduce { .. } => 1,
        RowOp::Load { .. } | RowOp::Slice { .. } | RowOp::Concat { .. } | RowOp::Pick { .. } => 2,
        RowOp::Unary(u, _) => match u {
            Unary::Neg | Unary::Relu | Unary::Square | Unary::Positive => 1,
            Unary::Rsqrt | Unary::Sqrt | Unary::Recip => 6,
            _ => 12,
        },
        RowOp::Binary { op: Binary::Div, .. } => 6,
        RowOp::Binary { .. } => 1,
        RowOp::Rms { .. } | RowOp::RmsGrad { .. } | RowOp::SoftmaxGrad { .. } => 3,
        RowOp::Rope { .. } => 6,
        RowOp::Softmax { .. } => 12,
        RowOp::PickGrad { chosen, .. } => match kernel.inputs.get(*chosen as usize) {
            Some(RowInput::RowInts { length }) => 3 * length,
            _ => 3,
        },
    }
}

pub(super) fn generate(kernel: &RowKernel, variant: Variant) -> Result<Option<Source>> {
    validate(kernel)?;
    let in_place = variant.in_place;
    // A sum over rows is over all of them.
    let some = variant.places && !kernel.outputs.iter().any(|o| sums(o.store));
    let empty = |array: u32| kernel.lengths[array as usize] == 0;
    let nothing = kernel.outputs.iter().all(|o| empty(o.array) || (!sums(o.store) && kernel.rows == 0));
    if nothing {
        return Ok(None);
    }
    // First as cheaply as can be; then without keeping what is merely dear, where shared memory does not suffice, and in the
    // end without shared memory; and with results staged, where a row that is written would be read after.
    let ordinary = [Form::Dear, Form::Plain, Form::Long];
    let forms = if mostly_columns(kernel) { &[Form::Long, Form::Dear, Form::Plain] } else { &ordinary };
    let mut failed = None;
    for &form in forms {
        let mut generator = Generator::new(kernel, form, false, some)?;
        match generator.source() {
            Ok(source) if !(in_place && generator.shifted) => return Ok(source),
            Ok(_) if form == Form::Long => {}
            Ok(_) => match Generator::new(kernel, form, true, some)?.source() {
                Ok(source) => return Ok(source),
                Err(error) => failed = Some(error),
            },
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or(CodegenError::Malformed("a row kernel without a form".into())))
}

/// Whether rows are summed that are few and long, so that a thread for each column makes more blocks than one for each
/// [`SUM_BLOCK`] rows.
fn mostly_columns(kernel: &RowKernel) -> bool {
    let summed = kernel.outputs.iter().filter(|o| sums(o.store)).map(|o| kernel.lengths[o.array as usize]);
    let longest = summed.max().unwrap_or(0);
    kernel.rows > 0 && longest >= 16 * BLOCK && longest / BLOCK > kernel.rows / SUM_BLOCK
}

/// What is kept of a row, and where.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Statistics, and arrays that are dear and needed several times, in shared memory.
    Dear,
    /// Statistics alone.
    Plain,
    /// Statistics alone, in scratch memory.
    Long,
}

/// What the text relies on; the check of the plan has looked at it before, with better words.
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
            RowOp::Load { input } => (Some(input), 1),
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

struct Generator<'k> {
    kernel: &'k RowKernel,
    form: Form,
    /// Results wait in shared memory until all inputs of the row have been read.
    staged: bool,
    /// Rows that nobody needs are passed over.
    some: bool,
    plans: Vec<Plan>,
    /// Threads of a row, and rows of a block at a time.
    threads: u64,
    slots: u64,
    /// Floats of shared memory of a row, and those of a block beside them.
    stored: u64,
    common: u64,
    text: String,
    indent: usize,
    /// Values already in variables, innermost block last.
    scopes: Vec<HashMap<(u32, String), String>>,
    /// Loops under way: where each begins in the text, how often a thread goes through it, and the loads in it so far.
    loops: Vec<(usize, u64, u64)>,
    next: usize,
    /// Whether the loop under way stores results, and whether such a loop read a row elsewhere than where it writes.
    storing: bool,
    shifted: bool,
    /// Rotations that keep cosines and sines; others have those of one of them.
    angles: Vec<usize>,
    /// Whether indices from memory are used.
    indices: bool,
    tables: Vec<String>,
}

impl<'k> Generator<'k> {
    fn new(kernel: &'k RowKernel, form: Form, staged: bool, some: bool) -> Result<Self> {
        let mut generator = Generator {
            kernel,
            form,
            staged,
            some,
            plans: vec![Plan::default(); kernel.ops.len()],
            threads: 1,
            slots: 1,
            stored: 0,
            common: 0,
            text: String::new(),
            indent: 1,
            scopes: vec![],
            loops: vec![],
            next: 0,
            storing: false,
            shifted: false,
            angles: vec![],
            indices: false,
            tables: vec![],
        };
        generator.plan(form == Form::Dear);
        Ok(generator)
    }

    fn length(&self, array: usize) -> u64 {
        self.kernel.lengths[array]
    }

    /// What is kept where, and how many threads have a row.
    fn plan(&mut self, dear: bool) {
        let kernel = self.kernel;
        let count = kernel.ops.len();
        let mut cost = vec![0u64; count];
        for (i, op) in kernel.ops.iter().enumerate() {
            let below = if matches!(op, RowOp::Reduce { .. }) { 0 } else { 1 };
            let inputs: u64 = op.operands().iter().map(|&x| cost[x]).fold(0, u64::saturating_add);
            cost[i] = own_cost(kernel, op).saturating_add(below * inputs);
        }
        // The loops that ask for an array. Numbers: the operation whose statistic it is, or a loop of outputs of one length.
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
            let reduces = matches!(op, RowOp::Reduce { .. });
            let cheap = matches!(op, RowOp::Load { .. } | RowOp::Constant(_) | RowOp::Zeros);
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
        let warps = widest <= WARP_ROW && kernel.rows >= 8 * PROCESSORS;
        let most = if warps { 32 } else { BLOCK };
        self.threads = widest.div_ceil(4).next_power_of_two().clamp(1, most);
        let mut ropes: HashMap<String, Vec<Kept>> = HashMap::new();
        for (i, &keep) in keep.iter().enumerate() {
            if !self.plans[i].live {
                continue;
            }
            let length = self.length(i);
            if keep {
                let register = matches!(kernel.ops[i], RowOp::Reduce { .. }) && length == 1;
                self.plans[i].own = Some(if register { self.register() } else { self.shared(length) });
            }
            let (stats, groups) = match kernel.ops[i] {
                RowOp::Rms { size, .. } | RowOp::SoftmaxGrad { size, .. } => (1, length / size),
                RowOp::RmsGrad { size, .. } | RowOp::Softmax { size, .. } => (2, length / size),
                // Cosines and sines of the pairs: never in a register, and once for all rotations by the same angles, and for all
                // rows at a position along depth.
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

    fn shared(&mut self, floats: u64) -> Kept {
        self.stored += floats;
        Kept::Shared(self.stored - floats)
    }

    fn common(&mut self, floats: u64) -> Kept {
        self.common += floats;
        Kept::Common(self.common - floats)
    }

    // --- text ---------------------------------------------------------------------------------------------------------

    fn line(&mut self, line: &str) {
        for _ in 0..self.indent {
            self.text.push_str("    ");
        }
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn open(&mut self, line: &str) {
        self.line(line);
        self.indent += 1;
        self.scopes.push(HashMap::new());
    }

    fn close(&mut self) {
        self.scopes.pop();
        self.indent -= 1;
        self.line("}");
    }

    /// A loop that a thread goes through `trips` times at most, to be ended by [`Self::close_loop`].
    fn open_loop(&mut self, line: &str, trips: u64) {
        self.loops.push((self.text.len(), trips, 0));
        self.open(line);
    }

    /// Ends a loop, and says how far it is unrolled: as far as loads of several elements should be under way, and no further, for
    /// most of what a row takes to compile is loops unrolled.
    fn close_loop(&mut self) {
        self.close();
        if let Some((begin, trips, loads)) = self.loops.pop() {
            let times = (LOADS / loads.max(1)).clamp(1, 4).min(trips);
            self.text.insert_str(begin, &format!("#pragma unroll {times}\n"));
        }
    }

    /// What a row's threads do for elements `variable` = `first`, `first + step` and so on, below `length`; ended by
    /// [`Self::close_each`].
    fn open_each(&mut self, variable: &str, first: &str, length: u64, step: u64) {
        if step >= length {
            self.open(&format!("if ({first} < {length}) {{"));
            self.line(&format!("const int {variable} = {first};"));
        } else {
            let line =
                format!("for (int {variable} = {first}; {variable} < {length}; {variable} += {step}) {{");
            self.open_loop(&line, length.div_ceil(step));
        }
    }

    fn close_each(&mut self, length: u64, step: u64) {
        if step >= length { self.close() } else { self.close_loop() }
    }

    fn fresh(&mut self, prefix: &str) -> String {
        self.next += 1;
        format!("{prefix}{}", self.next)
    }

    fn known(&self, key: &(u32, String)) -> Option<String> {
        self.scopes.iter().rev().find_map(|scope| scope.get(key).cloned())
    }

    fn remember(&mut self, key: (u32, String), value: &str) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(key, value.into());
        }
    }

    /// An index in a variable, unless it is one or a number already.
    fn index(&mut self, expression: String) -> String {
        if expression.chars().all(|c| c.is_ascii_alphanumeric()) {
            return expression;
        }
        let key = (u32::MAX, expression);
        if let Some(name) = self.known(&key) {
            return name;
        }
        let name = self.fresh("i");
        self.line(&format!("const int {name} = {};", key.1));
        self.remember(key, &name);
        name
    }

    /// Element of the small operand of a broadcast for an element of the large one.
    fn small(&mut self, at: &str, b: Broadcast) -> String {
        let quotient = if b.inner == 1 { at.to_string() } else { format!("{at} / {}", b.inner) };
        match (b.size, b.outer) {
            (0 | 1, _) => "0".into(),
            (_, 0 | 1) => self.index(quotient),
            (size, _) => self.index(format!("{quotient} % {size}")),
        }
    }

    fn group(&mut self, at: &str, array: usize, size: u64) -> String {
        if self.length(array) == size { "0".into() } else { self.index(format!("{at} / {size}")) }
    }

    fn within(&mut self, at: &str, array: usize, size: u64) -> String {
        if self.length(array) == size { at.into() } else { self.index(format!("{at} % {size}")) }
    }

    fn kept(kept: &Kept, at: &str) -> String {
        match kept {
            Kept::Register(name) => name.clone(),
            Kept::Shared(0) => format!("kept[{at}]"),
            Kept::Shared(start) if at == "0" => format!("kept[{start}]"),
            Kept::Shared(start) => format!("kept[{start} + {at}]"),
            Kept::Common(0) => format!("common[{at}]"),
            Kept::Common(start) => format!("common[{start} + {at}]"),
        }
    }

    fn stat(&self, array: usize, number: usize, at: &str) -> String {
        self.plans[array].stats.get(number).map_or(String::new(), |s| Self::kept(s, at))
    }

    // --- expressions --------------------------------------------------------------------------------------------------

    /// Element `at` of an array, as a variable or a short expression.
    fn value(&mut self, array: u32, at: &str) -> String {
        let i = array as usize;
        // All elements of an array of one are the same.
        let at = if self.length(i) == 1 { "0" } else { at };
        if let Some(kept) = &self.plans[i].own {
            return Self::kept(kept, at);
        }
        if let RowOp::Constant(c) = self.kernel.ops[i] {
            return float(c);
        }
        if let RowOp::Zeros = self.kernel.ops[i] {
            return "0.0f".into();
        }
        let key = (array, at.to_string());
        if let Some(name) = self.known(&key) {
            return name;
        }
        let name = self.compute(i, at);
        self.remember(key, &name);
        name
    }

    fn define(&mut self, expression: &str) -> String {
        let name = self.fresh("v");
        self.line(&format!("const float {name} = {expression};"));
        name
    }

    fn compute(&mut self, i: usize, at: &str) -> String {
        let expression = match self.kernel.ops[i].clone() {
            RowOp::Load { input } => {
                if self.storing
                    && at != "i"
                    && matches!(self.kernel.inputs[input as usize], RowInput::Row { .. })
                {
                    self.shifted = true;
                }
                if let Some((_, _, loads)) = self.loops.last_mut() {
                    *loads += 1;
                }
                format!("to_float(x{input}[{at}])")
            }
            RowOp::Constant(c) => float(c),
            RowOp::Zeros | RowOp::Reduce { .. } => "0.0f".into(),
            RowOp::Unary(op, x) => unary(op, &self.value(x, at)),
            RowOp::Binary { op, a, b, broadcast, small_first } => {
                let small = self.small(at, broadcast);
                let (a_at, b_at) = if small_first { (small.as_str(), at) } else { (at, small.as_str()) };
                let a = self.value(a, a_at);
                binary(op, &a, &self.value(b, b_at))
            }
            RowOp::Rms { x, size, .. } => {
                let group = self.group(at, i, size);
                let x = self.value(x, at);
                format!("{x} * {}", self.stat(i, 0, &group))
            }
            RowOp::RmsGrad { x, dy, size, .. } => {
                let group = self.group(at, i, size);
                let (x, dy) = (self.value(x, at), self.value(dy, at));
                format!("fmaf(-{}, {x}, {dy} * {})", self.stat(i, 1, &group), self.stat(i, 0, &group))
            }
            RowOp::Softmax { x, size } => {
                let group = self.group(at, i, size);
                let x = self.value(x, at);
                format!("expf({x} - {}) * {}", self.stat(i, 0, &group), self.stat(i, 1, &group))
            }
            RowOp::SoftmaxGrad { y, dy, size } => {
                let group = self.group(at, i, size);
                let (y, dy) = (self.value(y, at), self.value(dy, at));
                format!("{y} * ({dy} - {})", self.stat(i, 0, &group))
            }
            RowOp::Rope { x, size, rope, .. } => {
                // An odd last element stays as it is; sizes are even.
                let half = size / 2;
                let within = self.within(at, i, size);
                let pair = self.index(format!("{within} < {half} ? {within} : {within} - {half}"));
                let other = self.index(format!("{within} < {half} ? {at} + {half} : {at} - {half}"));
                let (mine, other) = (self.value(x, at), self.value(x, &other));
                let (cosine, sine) = (self.stat(i, 0, &pair), self.stat(i, 1, &pair));
                let (low, high) = if rope.inverse { ("", "-") } else { ("-", "") };
                format!("fmaf({mine}, {cosine}, ({within} < {half} ? {low}{sine} : {high}{sine}) * {other})")
            }
            RowOp::Slice { x, size, start } => {
                let (groups, taken) = {
                    let groups = (self.length(x as usize) / size.max(1)).max(1);
                    (groups, self.length(i) / groups)
                };
                let from = match (groups, start) {
                    (1, 0) => at.to_string(),
                    (1, _) => format!("{at} + {start}"),
                    _ => format!("{at} / {taken} * {size} + {at} % {taken} + {start}"),
                };
                let from = self.index(from);
                return self.value(x, &from);
            }
            RowOp::Concat { parts, groups } => return self.concat(i, &parts, groups, at),
            RowOp::Pick { table, chosen } => {
                self.indices = true;
                let length = self.length(table as usize);
                let raw = self.fresh("i");
                self.line(&format!("const int {raw} = x{chosen}[{at}];"));
                self.line(&format!("if (u32({raw}) >= {length}u) report(status, launch);"));
                let place = self.index(format!("u32({raw}) < {length}u ? {raw} : 0"));
                return self.value(table, &place);
            }
            RowOp::PickGrad { d, chosen } => {
                self.indices = true;
                let (name, k, c) = (self.fresh("v"), self.fresh("k"), self.fresh("i"));
                let count = match self.kernel.inputs[chosen as usize] {
                    RowInput::RowInts { length } => length,
                    _ => 0,
                };
                self.line(&format!("float {name} = 0.0f;"));
                self.open_loop(&format!("for (int {k} = 0; {k} < {count}; ++{k}) {{"), count);
                self.line(&format!("const int {c} = x{chosen}[{k}];"));
                self.line(&format!("if (u32({c}) >= {}u) report(status, launch);", self.length(i)));
                self.open(&format!("if ({c} == {at}) {{"));
                let d = self.value(d, &k);
                self.line(&format!("{name} = {d};"));
                self.close();
                self.close_loop();
                return name;
            }
        };
        self.define(&expression)
    }

    fn concat(&mut self, i: usize, parts: &[u32], groups: u64, at: &str) -> String {
        let total = self.length(i) / groups;
        let within = self.within(at, i, total);
        let group = self.group(at, i, total);
        let name = self.fresh("v");
        self.line(&format!("float {name} = 0.0f;"));
        let mut first = 0;
        for &part in parts {
            let size = self.length(part as usize) / groups;
            let end = first + size;
            self.open(&format!("if ({within} >= {first} && {within} < {end}) {{"));
            let mut from = if group == "0" { within.clone() } else { format!("{group} * {size} + {within}") };
            if first > 0 {
                from += &format!(" - {first}");
            }
            let from = self.index(from);
            let value = self.value(part, &from);
            self.line(&format!("{name} = {value};"));
            self.close();
            first = end;
        }
        name
    }

    // --- what is kept -------------------------------------------------------------------------------------------------

    fn sync(&mut self) {
        if self.threads > 1 {
            self.line(&format!("join_threads<{}>();", self.threads));
        }
    }

    /// A loop of the row's threads over the elements of an array.
    fn open_elements(&mut self, length: u64) {
        if self.threads >= length && length == 1 {
            self.open("if (t == 0) {");
            self.line("const int i = 0;");
        } else {
            self.open_each("i", "t", length, self.threads);
        }
    }

    fn close_elements(&mut self, length: u64) {
        self.close_each(length, self.threads);
    }

    /// For every group the result of a reduction of `terms(element)`, turned by `finish` into what is kept.
    ///
    /// `joins` are the operations of the accumulators, `terms` gives what to join for an element, `finish` the values to
    /// keep from the accumulators' names.
    #[allow(clippy::too_many_arguments)]
    fn reduce(
        &mut self,
        groups: u64,
        size: u64,
        element: &dyn Fn(&str, &str) -> String,
        joins: &[&str],
        terms: &dyn Fn(&mut Self, &str, &str) -> Vec<String>,
        finish: &dyn Fn(&[String]) -> Vec<String>,
        kept: &[Kept],
    ) {
        let names: Vec<String> = joins.iter().map(|_| self.fresh("s")).collect();
        let accumulate = |g: &mut Self, group: &str, first: &str, step: u64| {
            g.open_each("j", first, size, step);
            let at = g.index(element(group, "j"));
            let terms = terms(g, &at, group);
            for ((name, join), term) in names.iter().zip(joins).zip(terms) {
                let line = match (join, term.split_once(" * ")) {
                    (&"Sum", Some((a, b))) => format!("{name} = fmaf({a}, {b}, {name});"),
                    _ => format!("{name} = {join}::join({name}, {term});"),
                };
                g.line(&line);
            }
            g.close_each(size, step);
        };
        if groups == 1 {
            for (name, join) in names.iter().zip(joins) {
                self.line(&format!("float {name} = {join}::identity();"));
            }
            accumulate(self, "0", "t", self.threads);
            let buffer = if self.threads > 32 { "buffer" } else { "nullptr" };
            for (name, join) in names.iter().zip(joins) {
                if self.threads > 1 {
                    self.line(&format!("{name} = threads<{join}, {}>({name}, {buffer});", self.threads));
                }
            }
            for (kept, value) in kept.iter().zip(finish(&names)) {
                match kept {
                    Kept::Register(register) => self.line(&format!("const float {register} = {value};")),
                    Kept::Shared(_) | Kept::Common(_) => {
                        self.line(&format!("if (t == 0) {} = {value};", Self::kept(kept, "0")));
                    }
                }
            }
            if kept.iter().any(|k| !matches!(k, Kept::Register(_))) {
                self.sync();
            }
            return;
        }
        // Lanes for each group: as many as it has elements, within a warp.
        let lanes = (1u64 << size.max(1).ilog2()).min(32).min(self.threads);
        let step = self.threads / lanes;
        // A group or several at a time; all lanes stay together.
        self.line("#pragma unroll 1");
        self.open(&format!("for (int first = 0; first < {groups}; first += {step}) {{"));
        self.line(&format!("const int g = first + t / {lanes};"));
        for (name, join) in names.iter().zip(joins) {
            self.line(&format!("float {name} = {join}::identity();"));
        }
        self.open(&format!("if (g < {groups}) {{"));
        accumulate(self, "g", &format!("t % {lanes}"), lanes);
        self.close();
        for (name, join) in names.iter().zip(joins) {
            if lanes > 1 {
                let line = format!(
                    "{name} = lanes<{join}, {lanes}>({name}, group_mask<{}>());",
                    self.threads.min(32)
                );
                self.line(&line);
            }
        }
        self.open(&format!("if (g < {groups} && t % {lanes} == 0) {{"));
        for (kept, value) in kept.iter().zip(finish(&names)) {
            self.line(&format!("{} = {value};", Self::kept(kept, "g")));
        }
        self.close();
        self.close();
        self.sync();
    }

    /// Everything an operation keeps.
    fn keep(&mut self, i: usize) -> Result<()> {
        if !self.plans[i].live {
            return Ok(());
        }
        let stats = self.plans[i].stats.clone();
        let length = self.length(i);
        let grouped = |size: u64| {
            move |g: &str, j: &str| {
                if g == "0" { j.to_string() } else { format!("{g} * {size} + {j}") }
            }
        };
        match self.kernel.ops[i].clone() {
            RowOp::Rms { x, size, eps } => self.reduce(
                length / size,
                size,
                &grouped(size),
                &["Sum"],
                &|g, at, _| {
                    let x = g.value(x, at);
                    vec![format!("{x} * {x}")]
                },
                &|s| vec![format!("1.0f / sqrtf({} / {} + {})", s[0], float(size as f64), float(eps))],
                &stats,
            ),
            RowOp::RmsGrad { x, dy, size, eps } => self.reduce(
                length / size,
                size,
                &grouped(size),
                &["Sum", "Sum"],
                &|g, at, _| {
                    let (x, dy) = (g.value(x, at), g.value(dy, at));
                    vec![format!("{x} * {x}"), format!("{x} * {dy}")]
                },
                &|s| {
                    let n = float(size as f64);
                    let r = format!("(1.0f / sqrtf({} / {n} + {}))", s[0], float(eps));
                    vec![r.clone(), format!("{} / {n} * ({r} * {r} * {r})", s[1])]
                },
                &stats,
            ),
            RowOp::Softmax { x, size } => {
                self.reduce(
                    length / size,
                    size,
                    &grouped(size),
                    &["Largest"],
                    &|g, at, _| vec![g.value(x, at)],
                    &|s| vec![s[0].clone()],
                    &stats[..1],
                );
                let most = stats[0].clone();
                self.reduce(
                    length / size,
                    size,
                    &grouped(size),
                    &["Sum"],
                    &|g, at, group| {
                        let x = g.value(x, at);
                        vec![format!("expf({x} - {})", Self::kept(&most, group))]
                    },
                    &|s| vec![format!("1.0f / {}", s[0])],
                    &stats[1..],
                );
            }
            RowOp::SoftmaxGrad { y, dy, size } => self.reduce(
                length / size,
                size,
                &grouped(size),
                &["Sum"],
                &|g, at, _| {
                    let (y, dy) = (g.value(y, at), g.value(dy, at));
                    vec![format!("{y} * {dy}")]
                },
                &|s| vec![s[0].clone()],
                &stats,
            ),
            RowOp::Rope { .. } if matches!(stats[0], Kept::Shared(_)) && self.angles.contains(&i) => {
                self.angles(i, "t", self.threads);
                self.sync();
            }
            RowOp::Reduce { op, x, over } => {
                let (size, inner) = (over.size, over.inner);
                let join = if op == Reduce::Max { "Largest" } else { "Sum" };
                let own: Vec<Kept> = self.plans[i].own.clone().into_iter().collect();
                let element = move |g: &str, j: &str| match (g, inner) {
                    ("0", 1) => j.to_string(),
                    (_, 1) => format!("{g} * {size} + {j}"),
                    ("0", _) => format!("{j} * {inner}"),
                    _ => format!("{g} / {inner} * {} + {j} * {inner} + {g} % {inner}", size * inner),
                };
                self.reduce(
                    over.outer * inner,
                    size,
                    &element,
                    &[join],
                    &|g, at, _| vec![g.value(x, at)],
                    &|s| {
                        vec![match op {
                            Reduce::Mean => format!("{} / {}", s[0], float(size as f64)),
                            _ => s[0].clone(),
                        }]
                    },
                    &own,
                );
                return Ok(());
            }
            _ => {}
        }
        if let Some(own) = self.plans[i].own.take() {
            // Not known while it is computed: the expression is what is wanted.
            self.open_elements(length);
            let value = self.compute(i, if length == 1 { "0" } else { "i" });
            self.line(&format!("{} = {value};", Self::kept(&own, "i")));
            self.close_elements(length);
            self.plans[i].own = Some(own);
            self.sync();
        }
        Ok(())
    }

    /// Cosines and sines of a rotation, by `step` threads of which this is number `first`.
    fn angles(&mut self, i: usize, first: &str, step: u64) {
        let RowOp::Rope { size, rope, position, depths, .. } = self.kernel.ops[i] else { return };
        let half = size / 2;
        let table = format!("FREQUENCIES_{i}");
        let mut text = format!("__device__ const double {table}[{}] = {{", half.max(1));
        for (pair, frequency) in frequencies(&rope, size).into_iter().enumerate() {
            text.push_str(if pair % 4 == 0 { "\n    " } else { " " });
            text.push_str(&double(frequency));
            text.push(',');
        }
        text.push_str("\n};");
        self.tables.push(text);
        let stats = self.plans[i].stats.clone();
        self.open_each("i", first, half, step);
        let position = match rope.positions {
            Positions::Tokens => format!("double(x{position}[0])"),
            Positions::Depth { half_reversed: false } => format!("double(x{position})"),
            Positions::Depth { half_reversed: true } => {
                format!("double(i % 2 == 0 ? x{position} : x{depths} - 1 - x{position})")
            }
        };
        self.line("float sine, cosine;");
        self.line(&format!("sine_cosine({position} * {table}[i], sine, cosine);"));
        self.line(&format!("{} = cosine;", Self::kept(&stats[0], "i")));
        self.line(&format!("{} = sine;", Self::kept(&stats[1], "i")));
        self.close_each(half, step);
    }

    // --- the kernel ---------------------------------------------------------------------------------------------------

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
            let mut builder = Builder::new(name, "prelude.cuh");
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
        builder.entry(name, geometry, &list, &body);
    }

    /// The line that stores an element.
    fn put(&mut self, o: usize, at: &str, value: &str) {
        let line = match self.kernel.outputs[o].store {
            RowStore::AddRow => format!("store(y{o}[{at}], to_float(y{o}[{at}]) + {value});"),
            _ => format!("store(y{o}[{at}], {value});"),
        };
        self.line(&line);
    }

    /// An entry with a thread for each element of outputs of one length. `stats`: where what is kept of the rows lies.
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
        self.scopes.push(HashMap::new());
        self.line("i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;");
        self.line(&format!("if (at >= {count}) return;"));
        self.line(&format!("i64 row = at / {length};"));
        self.line(&format!("const int i = int(at % {length});"));
        lines.iter().for_each(|line| self.line(line));
        list.extend(self.kept_rows(stats, "const "));
        self.storing = true;
        // All is read before anything is written: an output may lie over an input.
        let mut values = vec![];
        for &o in outputs {
            values.push(self.value(self.kernel.outputs[o].array, if length == 1 { "0" } else { "i" }));
        }
        for (&o, value) in outputs.iter().zip(values) {
            self.put(o, "i", &value);
        }
        self.storing = false;
        self.scopes.pop();
        let geometry = (blocks(count.div_ceil(BLOCK))?, BLOCK as u32, 0);
        self.entry(builder, entry, geometry, list);
        Ok(())
    }

    /// The line that finds what is kept of the row in scratch memory, and the parameter for it.
    fn kept_rows(&mut self, stats: Option<u64>, constant: &str) -> Option<Param> {
        let at = stats?;
        self.line(&format!("{constant}float *kept = stats + row * {};", self.stored));
        Some(Param::new(&format!("{constant}float *"), "stats", Argument::Scratch(at)))
    }

    /// Passes over rows of any length: what is kept of each row; sums, a thread for each column; results of each row. In this
    /// order, because results may lie over what is read.
    fn long(&mut self, name: String, live: &[usize]) -> Result<Option<Source>> {
        let kernel = self.kernel;
        let mut builder = Builder::new(name, "prelude.cuh");
        let size = self.stored.saturating_mul(4).saturating_mul(kernel.rows);
        let stats = (size > 0).then(|| builder.scratch(size));
        if stats.is_some() {
            let (mut list, lines) = self.parameters(&[]);
            self.scopes.push(HashMap::new());
            if self.threads > 32 {
                self.line(&format!("__shared__ float buffer[{}];", self.threads / 32));
            }
            self.line("const int t = int(threadIdx.x);");
            self.line("const i64 row = blockIdx.x;");
            lines.iter().for_each(|line| self.line(line));
            list.extend(self.kept_rows(stats, ""));
            for i in 0..kernel.ops.len() {
                self.keep(i)?;
            }
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
        // The results of one length may lie over what those of the next read.
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
        self.line("const int i = int(blockIdx.x * blockDim.x + threadIdx.x);");
        self.line(&format!("if (i >= {length}) return;"));
        let declare = |g: &mut Self, prefix: &str| {
            outputs.iter().for_each(|o| g.line(&format!("float {prefix}{o} = 0.0f;")));
        };
        declare(self, "total");
        let several = kernel.rows > SUM_BLOCK;
        if several {
            self.open(&format!("for (i64 first = 0; first < {}; first += {SUM_BLOCK}) {{", kernel.rows));
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
            let value = self.value(kernel.outputs[o].array, if length == 1 { "0" } else { "i" });
            self.line(&format!("{}{o} += {value};", if several { "part" } else { "total" }));
        }
        self.close_loop();
        if several {
            outputs.iter().for_each(|o| self.line(&format!("total{o} += part{o};")));
            self.close();
        }
        for &o in outputs {
            let output = kernel.outputs[o];
            let operand = Argument::Operand(kernel.inputs.len() + o);
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            list.push(Param::new(element, &format!("out{o}"), operand));
            self.line(&match output.store {
                RowStore::AddSum => format!("store(out{o}[i], to_float(out{o}[i]) + total{o});"),
                _ => format!("store(out{o}[i], total{o});"),
            });
        }
        self.scopes.pop();
        let geometry = (blocks(length.div_ceil(BLOCK))?, BLOCK as u32, 0);
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
        let floats = self.stored.max(1);
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
        let share = (kernel.rows / (2 * PROCESSORS)).max(1);
        let share = (1 << share.ilog2()).min(SUM_BLOCK).max(slots);
        let bytes = memory(slots);
        let dynamic = bytes > STATIC_LIMIT - 1024;
        if bytes > SHARED_LIMIT - 1024 {
            return Err(CodegenError::Shared { bytes, limit: SHARED_LIMIT - 1024 });
        }
        let block = self.threads * slots;

        let (mut list, lines) = self.parameters(live);
        self.scopes.push(HashMap::new());
        if self.stored + self.common > 0 {
            match dynamic {
                true => self.line("extern __shared__ __align__(16) float memory[];"),
                false => self.line(&format!("__shared__ float memory[{}];", slots * floats + self.common)),
            }
        }
        if self.threads > 32 {
            self.line(&format!("__shared__ float buffer[{}];", self.threads / 32));
        }
        match (self.threads, slots) {
            (_, 1) => {
                self.line("const int t = int(threadIdx.x);");
                self.line("const int slot = 0;");
            }
            (threads, _) => {
                self.line(&format!("const int t = int(threadIdx.x) % {threads};"));
                self.line(&format!("const int slot = int(threadIdx.x) / {threads};"));
            }
        }
        if self.stored > 0 {
            self.line(&format!("float *kept = memory + slot * {floats};"));
        }
        if self.common > 0 {
            self.line(&format!("float *common = memory + {};", slots * floats));
            for i in self.angles.clone() {
                if matches!(self.plans[i].stats[0], Kept::Common(_)) {
                    self.angles(i, "int(threadIdx.x)", block);
                }
            }
            self.line("__syncthreads();");
        }
        for &o in &totals {
            let length = self.length(kernel.outputs[o].array as usize);
            self.open_each("i", "t", length, self.threads);
            self.line(&format!("kept[{} + i] = 0.0f;", running[&o]));
            self.close_each(length, self.threads);
        }
        let grid = if summed {
            self.line("#pragma unroll 1");
            self.open(&format!("for (int turn = 0; turn < {share}; turn += {slots}) {{"));
            self.line(&format!("const i64 row = i64(blockIdx.x) * {share} + turn + slot;"));
            let whole = kernel.rows.is_multiple_of(share);
            // The rest of the block goes on to the barriers; rows end at the same turn for a whole row's threads.
            if !whole {
                self.line(&format!("if (row >= {}) break;", kernel.rows));
            }
            kernel.rows.div_ceil(share)
        } else {
            self.line(&format!("const i64 row = i64(blockIdx.x) * {slots} + slot;"));
            if !kernel.rows.is_multiple_of(slots) {
                self.line(&format!("if (row >= {}) return;", kernel.rows));
            }
            kernel.rows.div_ceil(slots)
        };
        lines.iter().for_each(|line| self.line(line));
        for i in 0..kernel.ops.len() {
            self.keep(i)?;
        }
        // Outputs of one length are one loop.
        let mut lengths: Vec<u64> =
            live.iter().map(|&o| self.length(kernel.outputs[o].array as usize)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let several =
            stores.iter().map(|&o| self.length(kernel.outputs[o].array as usize)).collect::<BTreeSet<_>>();
        for &length in &lengths {
            self.open_elements(length);
            self.storing = !self.staged;
            let of_length = |o: &usize| self.length(kernel.outputs[*o].array as usize) == length;
            let of_length: Vec<usize> = live.iter().copied().filter(of_length).collect();
            let mut values = vec![];
            for &o in &of_length {
                values.push(self.value(kernel.outputs[o].array, if length == 1 { "0" } else { "i" }));
            }
            for (&o, value) in of_length.iter().zip(values) {
                if let Some(start) = running.get(&o) {
                    self.line(&format!("kept[{start} + i] += {value};"));
                } else if let Some(start) = waiting.get(&o) {
                    self.line(&format!("kept[{start} + i] = {value};"));
                } else {
                    self.put(o, "i", &value);
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
                self.open_elements(length);
                let value = format!("kept[{} + i]", waiting[&o]);
                self.put(o, "i", &value);
                self.close_elements(length);
            }
        }
        if summed {
            // What is kept is written again for the next row.
            self.sync();
            self.close();
        }
        let mut builder = Builder::new(name, "prelude.cuh");
        let grid = blocks(grid)?;
        let shared = if dynamic { bytes as u32 } else { 0 };
        if !totals.is_empty() && kernel.rows > 0 {
            self.line("__syncthreads();");
        }
        let mut seconds = vec![];
        for &o in &totals {
            let output = kernel.outputs[o];
            let length = self.length(output.array as usize);
            let operand = Argument::Operand(kernel.inputs.len() + o);
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            let add = output.store == RowStore::AddSum;
            let finish = |value: &str| match add {
                true => format!("store(out{o}[i], to_float(out{o}[i]) + {value});"),
                false => format!("store(out{o}[i], {value});"),
            };
            if kernel.rows > 0 {
                self.open_each("i", "int(threadIdx.x)", length, block);
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
                self.line(&format!("part{o}[i64(blockIdx.x) * {length} + i] = sum;"));
                seconds.push((o, at));
            }
            if kernel.rows > 0 {
                self.close_each(length, block);
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
                    "    int i = int(blockIdx.x * blockDim.x + threadIdx.x);\n    if (i < {length}) {}\n",
                    finish("0.0f")
                );
                let geometry = (blocks(length.div_ceil(BLOCK))?, BLOCK as u32, 0);
                builder.entry(&format!("rows_sum{o}"), geometry, &params(None), &body);
            }
        }
        if grid > 0 {
            self.entry(&mut builder, "rows", (grid, block as u32, shared), list);
        }
        for (o, at) in seconds {
            let output = kernel.outputs[o];
            let length = self.length(output.array as usize);
            let add = output.store == RowStore::AddSum;
            let element = if output.dtype == DType::Bf16 { "bf16 *" } else { "float *" };
            let finish = match add {
                true => format!("store(out{o}[i], to_float(out{o}[i]) + sum);"),
                false => format!("store(out{o}[i], sum);"),
            };
            let list = [
                Param::new(element, &format!("out{o}"), Argument::Operand(kernel.inputs.len() + o)),
                Param::new("const float *", "part", Argument::Scratch(at)),
            ];
            let body = format!(
                "    const int i = int(blockIdx.x * 32 + threadIdx.x % 32);\n    \
                 const float sum = add_parts<{BLOCK}>(part, {grid}, {length}, i);\n    \
                 if (threadIdx.x < 32 && i < {length}) {finish}\n"
            );
            let geometry = (blocks(length.div_ceil(32))?, BLOCK as u32, 0);
            builder.entry(&format!("rows_sum{o}"), geometry, &list, &body);
        }
        Ok(builder.finish())
    }
}

fn unary(op: Unary, x: &str) -> String {
    match op {
        Unary::Neg => format!("-{x}"),
        Unary::Exp => format!("expf({x})"),
        Unary::Log => format!("logf({x})"),
        Unary::Sigmoid => format!("sigmoid({x})"),
        Unary::Tanh => format!("tanhf({x})"),
        Unary::Silu => format!("silu({x})"),
        Unary::SiluGrad => format!("silu_grad({x})"),
        Unary::Gelu => format!("gelu({x})"),
        Unary::GeluGrad => format!("gelu_grad({x})"),
        Unary::Relu => format!("relu({x})"),
        Unary::Softplus => format!("softplus({x})"),
        Unary::Rsqrt => format!("1.0f / sqrtf({x})"),
        Unary::Sqrt => format!("sqrtf({x})"),
        Unary::Recip => format!("1.0f / {x}"),
        Unary::Square => format!("square({x})"),
        Unary::Positive => format!("positive({x})"),
    }
}

fn binary(op: Binary, a: &str, b: &str) -> String {
    match op {
        Binary::Add => format!("{a} + {b}"),
        Binary::Sub => format!("{a} - {b}"),
        Binary::Mul => format!("{a} * {b}"),
        Binary::Div => format!("{a} / {b}"),
        Binary::Max => format!("larger({a}, {b})"),
    }
}
