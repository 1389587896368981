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
//!
//! ```text
//! RowKernel ── plan ──> what is kept, threads of a row
//!                         │ kernel: flat, rows, sums or long
//!                         ├── elements: an expression of an index
//!                         ├── kept: reductions, sines, arrays
//!                         └── text: lines of kernel statements, and turns: their price
//! ```

mod elements;
mod kept;
mod kernel;
mod plan;
mod text;
mod turns;

use super::text::fits;
use super::{CodegenError, Source, Variant};
use crate::ir::Rope;
use crate::program::{RowKernel, RowOp, RowStore, SUM_BLOCK};
use plan::{BLOCK, Plan, together};
use std::collections::{BTreeSet, HashMap};
use text::{At, Value};
use turns::Step;

type Result<T> = std::result::Result<T, CodegenError>;

/// Whether an output is a sum over rows.
fn sums(store: RowStore) -> bool {
    matches!(store, RowStore::Sum | RowStore::AddSum)
}

/// Whether an operation joins elements: reductions of one each do not.
fn reduces(op: &RowOp) -> bool {
    matches!(op, RowOp::Reduce { over, .. } if over.size != 1)
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
}
