//! The launch list: what a device runs.
//!
//! *In*: scheduled functions (from [`crate::schedule`]). *Out*: a [`Plan`] that any device executes
//! without knowing the model. *Promise*: every buffer has its place in one arena before anything is
//! allocated; the list has loops, so its length does not depend on depth; launches on the same plan
//! give the same bits every time.
//!
//! A plan holds several [`Program`]s over one set of buffers: `backward` (a micro-batch forward and
//! back, gradients added), `update` (clipping, the optimizer, balancing), `evaluate` (forward
//! alone), and so on. Within a program launches take place in order, and each sees what the ones
//! before it wrote.

use crate::ir::DType;
pub use crate::op::Kernel;
pub use crate::op::attention::kernel::AttentionShape;
pub use crate::op::collective::kernel::{Owners, Parts};
pub use crate::op::depth::kernel::DepthShape;
pub use crate::op::kernel::{KernelKind, Layout, Role, Slot, Storage, Touches, Work};
pub use crate::op::kernels as kernel;
pub use crate::op::rows::kernel::{Broadcast, RowInput, RowKernel, RowOp, RowOutput, RowStore, SUM_BLOCK};
pub use crate::op::sources::kernel::SourcesShape;
use indexmap::IndexMap;
use std::fmt;

/// Index into [`Plan::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Index into [`Plan::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelId(pub u32);

/// Use of a buffer; the memory report is by these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Space {
    /// Trained tensors and balancing biases.
    Weights,
    /// Weights that stay in their file ([`Residence::Mapped`](crate::format::Residence)): nothing
    /// of the arena, addresses from [`MAPPED`] on, never written.
    Mapped,
    /// Their gradients: one contiguous range, in the order of the weights.
    Gradients,
    /// States of the optimizer.
    Optimizer,
    /// Weights and gradients that are cut over ranks, as layers see them: nothing of the arena, and
    /// no operand of a launch. A buffer begins with as many bytes as there are before it among all
    /// that are cut.
    Spread,
    /// Selection counts, and caches that outlive a program.
    State,
    /// Values that the forward keeps for the backward, an instance per application; depth caches.
    Saved,
    /// Values that programs compute from weights alone before they use them.
    Prepared,
    /// Batch inputs, scalars of the step and results the host reads.
    Io,
    /// Values of one program; they share memory where their lifetimes do not overlap.
    Temporary,
    /// A range of other buffers under a name of its own; its bytes are counted there.
    Alias,
}

/// A range of the arena, of `instances` equal tensors one after another.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Its name: unique among buffers that outlive a program.
    pub name: String,
    /// Its use.
    pub space: Space,
    /// Element type.
    pub dtype: DType,
    /// Sizes of one instance, slowest first.
    pub shape: Vec<u64>,
    /// How many instances follow one another.
    pub instances: u64,
    /// First byte in the arena: a multiple of [`ALIGNMENT`], and of an element for
    /// [`Space::Alias`]; for [`Space::Mapped`] as many bytes after [`MAPPED`]; for
    /// [`Space::Spread`] a place among all numbers that are cut.
    pub offset: u64,
}

/// The address that weights in files begin at: beyond every arena.
pub const MAPPED: u64 = 1 << 62;

/// Every buffer begins at a multiple of this many bytes.
pub const ALIGNMENT: u64 = 256;

impl Buffer {
    /// Elements of one instance.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of all instances.
    pub fn bytes(&self) -> u64 {
        self.dtype.room(self.elements() * self.instances)
    }
}

/// `base + Σ stride · variable` over the loop variables of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Affine {
    /// Value where every variable is 0.
    pub base: u64,
    /// Variable and its factor; factors of 0 are left out.
    pub terms: Vec<(u32, u64)>,
}

impl Affine {
    /// A constant.
    pub fn constant(base: u64) -> Self {
        Affine { base, terms: vec![] }
    }

    /// `factor` times it.
    pub fn times(&self, factor: u64) -> Self {
        let terms = self.terms.iter().map(|&(v, step)| (v, step * factor)).collect();
        Affine { base: self.base * factor, terms }
    }

    /// The sum of both.
    pub fn plus(mut self, other: &Affine) -> Self {
        self.base += other.base;
        for &(variable, step) in &other.terms {
            match self.terms.iter_mut().find(|(v, _)| *v == variable) {
                Some((_, own)) => *own += step,
                None => self.terms.push((variable, step)),
            }
        }
        self
    }

    /// The difference from `other`; nothing where some value of it would be below zero.
    pub fn minus(&self, other: &Affine) -> Option<Self> {
        let of = |variable: u32| other.terms.iter().filter(|(v, _)| *v == variable).map(|(_, s)| s).sum();
        let terms = self.terms.iter().map(|&(v, step)| Some((v, step.checked_sub(of(v))?)));
        let terms: Option<Vec<(u32, u64)>> = terms.collect();
        let known =
            |&(variable, step): &(u32, u64)| step == 0 || self.terms.iter().any(|(v, _)| *v == variable);
        let all = other.terms.iter().all(known);
        let base = self.base.checked_sub(other.base).filter(|_| all)?;
        Some(Affine { base, terms: terms?.into_iter().filter(|(_, step)| *step > 0).collect() })
    }

    /// The value for these loop variables.
    pub fn at(&self, variables: &[u64]) -> u64 {
        self.base + self.terms.iter().map(|&(v, s)| variables[v as usize] * s).sum::<u64>()
    }
}

/// An operand of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A tensor: `instance` of `buffer`, from element `offset` on. Rows are `stride` elements apart
    /// where the kernel says that it takes a strided operand, and adjacent otherwise (`stride` is
    /// then the row's length or 0).
    Tensor {
        /// Which buffer.
        buffer: BufferId,
        /// Which instance of it.
        instance: Affine,
        /// First element in the instance.
        offset: u64,
        /// Elements from row to row.
        stride: u64,
    },
    /// An integer that depends on the loops: a depth, a cache row.
    Index(Affine),
}

/// One launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: KernelId,
    /// On what, in the order of the kernel's [`signature`](KernelKind::signature).
    pub operands: Vec<Operand>,
    /// Where there is one, an `i32` for each row of a row kernel or each row of a product's result:
    /// nobody needs the rows of negative ones, and a device may leave them as they are.
    pub places: Option<Operand>,
    /// Which function and node it comes from, for messages and profiles: `layer0: contract %3`.
    pub origin: String,
}

/// One step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// A launch.
    Launch(Launch),
    /// Steps repeated for `variable` in `0..count`, or downwards where `reverse`.
    Loop {
        /// The loop variable's number.
        variable: u32,
        /// How often.
        count: u64,
        /// From `count - 1` down to 0.
        reverse: bool,
        /// The steps.
        steps: Vec<Step>,
    },
}

/// The launches of steps, in order; those of a loop once.
pub fn listed(steps: &[Step]) -> impl Iterator<Item = &Launch> {
    let mut open = vec![steps.iter()];
    std::iter::from_fn(move || {
        while let Some(steps) = open.last_mut() {
            match steps.next() {
                Some(Step::Launch(launch)) => return Some(launch),
                Some(Step::Loop { steps, .. }) => open.push(steps.iter()),
                None => drop(open.pop()),
            }
        }
        None
    })
}

/// A launch list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// Steps, in order.
    pub steps: Vec<Step>,
    /// How many loop variables there are.
    pub variables: u32,
}

/// Programs over one arena.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// All buffers.
    pub buffers: Vec<Buffer>,
    /// All distinct kernels.
    pub kernels: Vec<Kernel>,
    /// The programs.
    pub programs: IndexMap<ProgramKey, Program>,
    /// Size of the arena in bytes.
    pub arena: u64,
    /// Bytes of addresses from [`MAPPED`] on.
    pub mapped: u64,
}

/// A program of a plan: the use of the model that it belongs to, and its task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProgramKey {
    /// The name of the use; empty for the first.
    pub of: &'static str,
    /// The work that it does.
    pub task: Task,
}

/// Work of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Task {
    /// Forward and back over a micro-batch; gradients add up.
    Backward {
        /// The count of the outermost `recur` in place of the model's.
        depth: Option<u64>,
        /// Whether the micro-batch is the last of a step, where gradients are summed over ranks
        /// while it goes on.
        last: bool,
    },
    /// The norm of the gradients of a step.
    Norm,
    /// The optimizer step.
    Update,
    /// Makes of weights alone all that programs over caches read. Whoever gives a model weights
    /// runs it before the next of them; a plan whose weights are read as they are has none.
    Prepare,
    /// Forward over whole sequences.
    Evaluate,
    /// Reads texts into the caches; gives the logits after one token of each.
    Prefill,
    /// The same with the logits after every token.
    PrefillEvery,
    /// Adds a token to each text.
    Decode,
    /// Launches by themselves, by number: of a test, of a benchmark, or one of another program.
    Alone(u64),
}

impl ProgramKey {
    /// Forward and back over a micro-batch, at the depth of the model.
    pub const BACKWARD: Self = Self::first(Task::Backward { depth: None, last: false });
    /// The same over the last micro-batch of a step, where there is a program for it.
    pub const LAST: Self = Self::first(Task::Backward { depth: None, last: true });
    /// See [`Task::Norm`].
    pub const NORM: Self = Self::first(Task::Norm);
    /// See [`Task::Update`].
    pub const UPDATE: Self = Self::first(Task::Update);
    /// See [`Task::Prepare`].
    pub const PREPARE: Self = Self::first(Task::Prepare);
    /// See [`Task::Evaluate`].
    pub const EVALUATE: Self = Self::first(Task::Evaluate);
    /// See [`Task::Prefill`].
    pub const PREFILL: Self = Self::first(Task::Prefill);
    /// See [`Task::Decode`].
    pub const DECODE: Self = Self::first(Task::Decode);
    /// See [`Task::Alone`].
    pub const ALONE: Self = Self::first(Task::Alone(0));

    /// That of the first use.
    pub const fn first(task: Task) -> Self {
        ProgramKey { of: "", task }
    }

    /// Whether it goes forward and back, at any depth.
    pub fn is_backward(self) -> bool {
        matches!(self.task, Task::Backward { .. })
    }
}

/// As people read it: `evaluate`, `scorer.evaluate`, `backward.last@4`.
impl fmt::Display for ProgramKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let task = match self.task {
            Task::Backward { depth: None, last: false } => "backward".into(),
            Task::Backward { depth: None, last: true } => "backward.last".into(),
            Task::Backward { depth: Some(depth), last: false } => format!("backward@{depth}"),
            Task::Backward { depth: Some(depth), last: true } => format!("backward.last@{depth}"),
            Task::Norm => "norm".into(),
            Task::Update => "update".into(),
            Task::Prepare => "prepare".into(),
            Task::Evaluate => "evaluate".into(),
            Task::Prefill => "prefill".into(),
            Task::PrefillEvery => "prefill_every".into(),
            Task::Decode => "decode".into(),
            Task::Alone(number) => format!("launches {number}"),
        };
        if self.of.is_empty() { f.pad(&task) } else { f.pad(&format!("{}.{task}", self.of)) }
    }
}

impl Plan {
    /// The buffer of that name among those that outlive a program.
    pub fn find(&self, name: &str) -> Option<BufferId> {
        self.buffers
            .iter()
            .position(|b| b.space != Space::Temporary && b.name == name)
            .map(|i| BufferId(i as u32))
    }

    /// A buffer.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// A kernel.
    pub fn kernel(&self, id: KernelId) -> &Kernel {
        &self.kernels[id.0 as usize]
    }
}

/// A strided matrix: element `(i, j)` is at `i · row + j · column`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Elements from row to row.
    pub row: u64,
    /// Elements from column to column.
    pub column: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn affine(base: u64, terms: &[(u32, u64)]) -> Affine {
        Affine { base, terms: terms.to_vec() }
    }

    /// A difference has the difference of the values wherever there is one, and gives back the
    /// first with the second.
    #[test]
    fn a_difference_is_that_of_the_values() {
        let (a, b) = (affine(7, &[(0, 5), (2, 3)]), affine(2, &[(2, 3), (0, 1)]));
        let less = a.minus(&b).unwrap();
        assert_eq!(less, affine(5, &[(0, 4)]));
        assert_eq!(less.clone().plus(&b), a);
        for variables in [[0, 0, 0], [4, 1, 0], [2, 9, 3]] {
            assert_eq!(less.at(&variables), a.at(&variables) - b.at(&variables), "{variables:?}");
        }
        assert_eq!(a.minus(&Affine::default()), Some(a.clone()));
        assert_eq!(a.minus(&a), Some(Affine::default()));
        assert_eq!(a.times(3).minus(&a), Some(a.times(2)));
    }

    #[test]
    fn no_value_of_a_difference_is_below_zero() {
        let a = affine(7, &[(0, 5)]);
        for below in [affine(8, &[]), affine(0, &[(0, 6)]), affine(0, &[(1, 1)])] {
            assert_eq!(a.minus(&below), None, "{below:?}");
        }
        // A factor of zero is no term.
        assert_eq!(a.minus(&affine(0, &[(1, 0)])), Some(a.clone()));
    }
}
