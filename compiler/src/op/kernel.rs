//! Kernels: operands, work and text, in one place for each.
//!
//! *In*: the numbers of a kernel, in a struct of its own. *Out*: by [`KernelKind`] its
//! [`signature`](KernelKind::signature), which the check of plans, the schedule, `--emit plan`,
//! counts, code generation and devices read. *Promise*: nobody lists the operands of a kernel a
//! second time.
//!
//! A kernel of an operation stands in `op/NAME/kernel.rs`, its CUDA text in `op/NAME/cuda.rs`. The
//! list of all kernels is that of [`Kernel`].

use super::Kernel;
use super::attention::kernel::visible;
use super::rows::kernel::RowKernel;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::{Attention, DType, Extents, Mask};
use crate::program::{AttentionShape, Matrix};

/// Use of an operand by a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Reads it.
    Input,
    /// Overwrites all of it.
    Result,
    /// Adds its result to it.
    Accumulated,
    /// Reads it and writes it, in its place.
    Updated,
}

impl Role {
    /// Whether it is written.
    pub fn writes(self) -> bool {
        self != Role::Input
    }

    /// Whether what it held before matters.
    pub fn reads(self) -> bool {
        self != Role::Result
    }
}

/// Which types an operand may be stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// This one.
    Is(DType),
    /// f32 or bf16, as the plan has it; all operands of a kernel with the same number are stored in
    /// the same type.
    Float(u8),
    /// A weight as it is stored: f32, bf16 or packed.
    Weight,
    /// Any; all such operands of a kernel have elements of the same size.
    Any,
}

/// Where the elements of an operand are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Adjacent, the last dimension fastest.
    Dense,
    /// This many leading dimensions count rows, which are [`Operand`](crate::program::Operand)'s
    /// stride apart; elements of a row are adjacent.
    Rows(usize),
    /// A matrix with strides of the kernel's own.
    Matrix(Matrix),
    /// The first rows of a cache, up to the value of another operand, an index; the shape is that
    /// of one row.
    UpTo(usize),
    /// No tensor but an [`Operand::Index`](crate::program::Operand::Index), below a bound where
    /// there is one.
    Index(Option<u64>),
}

/// How much of an operand a launch moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Touches {
    /// All of it.
    All,
    /// At most this many elements.
    AtMost(u64),
    /// The share of it that the launch's multiply-adds are of this number.
    Share(u128),
}

/// Which value of its operation an operand of a kernel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// The operand of that number.
    Operand(usize),
    /// The rows that the operand of that number is gathered from.
    Gathered(usize),
    /// The order by which it is gathered.
    Order(usize),
    /// The result of that number.
    Result(usize),
    /// A result that stays in the memory of an operand.
    State {
        /// Which operand.
        operand: usize,
        /// Which result.
        result: usize,
    },
}

/// One operand of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name, in messages and generated text.
    pub name: &'static str,
    /// Its use.
    pub role: Role,
    /// Its type.
    pub storage: Storage,
    /// Sizes, slowest first.
    pub shape: Vec<u64>,
    /// Where its elements are.
    pub layout: Layout,
    /// How much of it is moved.
    pub touches: Touches,
    /// Which value of the operation it is; `None` for the next operand or result.
    pub of: Option<Of>,
}

/// Product that does not wrap: a size that does not fit in 64 bits does not fit in a buffer either.
pub fn times(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |p, &f| p.saturating_mul(f))
}

impl Slot {
    /// An operand of floats.
    pub fn new(name: &'static str, role: Role, shape: &[u64]) -> Slot {
        Slot {
            name,
            role,
            storage: Storage::Is(DType::F32),
            shape: shape.to_vec(),
            layout: Layout::Dense,
            touches: Touches::All,
            of: None,
        }
    }

    /// Stored as integers.
    pub fn ints(self) -> Slot {
        self.stored(DType::I32)
    }

    /// Stored in this type.
    pub fn stored(self, dtype: DType) -> Slot {
        Slot { storage: Storage::Is(dtype), ..self }
    }

    /// Stored in the plan's float, as all of this group.
    pub fn float(self, group: u8) -> Slot {
        Slot { storage: Storage::Float(group), ..self }
    }

    /// A weight whose storage is its own, where `own`; else stored in the plan's float, as all of
    /// this group.
    pub fn weight(self, own: bool, group: u8) -> Slot {
        if own { Slot { storage: Storage::Weight, ..self } } else { self.float(group) }
    }

    /// Stored in any type.
    pub fn any(self) -> Slot {
        Slot { storage: Storage::Any, ..self }
    }

    /// In rows a stride apart, counted by the first `dims` dimensions.
    pub fn rows(self, dims: usize) -> Slot {
        Slot { layout: Layout::Rows(dims), ..self }
    }

    /// As a matrix of this layout.
    pub fn matrix(self, matrix: Matrix) -> Slot {
        Slot { layout: Layout::Matrix(matrix), ..self }
    }

    /// Rows of a cache up to the one that operand `index` names.
    pub fn up_to(self, index: usize) -> Slot {
        Slot { layout: Layout::UpTo(index), ..self }
    }

    /// Overwritten.
    pub fn written(self) -> Slot {
        Slot { role: Role::Result, ..self }
    }

    /// Added to, where `accumulate`.
    pub fn adds(self, accumulate: bool) -> Slot {
        Slot { role: if accumulate { Role::Accumulated } else { self.role }, ..self }
    }

    /// Not all of it is moved.
    pub fn touches(self, touches: Touches) -> Slot {
        Slot { touches, ..self }
    }

    /// This value of the operation.
    pub fn of(self, of: Of) -> Slot {
        Slot { of: Some(of), ..self }
    }

    /// The result of an operation that stays in the memory of one of its operands.
    pub fn state(self, operand: usize, result: usize) -> Slot {
        self.of(Of::State { operand, result })
    }

    /// How many elements it has, gaps between rows left out; those of one row of [`Layout::UpTo`],
    /// none of an index.
    pub fn elements(&self) -> u64 {
        match self.layout {
            Layout::Index(_) => 0,
            Layout::Dense | Layout::Rows(_) | Layout::Matrix(_) | Layout::UpTo(_) => times(&self.shape),
        }
    }

    /// Rows, and the length of each, where it is in rows.
    pub fn in_rows(&self) -> Option<(u64, u64)> {
        match self.layout {
            Layout::Rows(dims) => {
                let (rows, row) = self.shape.split_at(dims.min(self.shape.len()));
                Some((times(rows), times(row)))
            }
            Layout::Dense | Layout::Matrix(_) | Layout::UpTo(_) | Layout::Index(_) => None,
        }
    }

    /// Elements from its first to its last, where it is not in rows; `index` gives the value of
    /// another operand.
    pub fn span(&self, index: impl FnOnce(usize) -> u64) -> u64 {
        match self.layout {
            Layout::Matrix(m) => match self.shape[..] {
                [rows, columns] if rows > 0 && columns > 0 => {
                    let last = times(&[rows - 1, m.row]).saturating_add(times(&[columns - 1, m.column]));
                    last.saturating_add(1)
                }
                _ => 0,
            },
            Layout::UpTo(of) => times(&[index(of).saturating_add(1), self.elements()]),
            Layout::Dense | Layout::Rows(_) | Layout::Index(_) => self.elements(),
        }
    }
}

/// Says in a summary that a weight's storage is its own.
pub fn storage(stored: bool) -> &'static str {
    if stored { " of stored weights" } else { "" }
}

/// An operand that is read.
pub fn input(name: &'static str, shape: &[u64]) -> Slot {
    Slot::new(name, Role::Input, shape)
}

/// Integers that are read.
pub fn ints(name: &'static str, shape: &[u64]) -> Slot {
    input(name, shape).ints()
}

/// An operand that is overwritten.
pub fn result(name: &'static str, shape: &[u64]) -> Slot {
    Slot::new(name, Role::Result, shape)
}

/// An operand that is read and written in its place.
pub fn updated(name: &'static str, shape: &[u64]) -> Slot {
    Slot::new(name, Role::Updated, shape)
}

/// An index, below a bound where there is one.
pub fn index(name: &'static str, below: Option<u64>) -> Slot {
    Slot { layout: Layout::Index(below), ..ints(name, &[]) }
}

/// Arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Multiply-adds of matrix products.
    pub multiply_adds: u128,
    /// Element-wise operations, counted as [`crate::ir::cost`](crate::ir::cost()) counts them.
    pub elementwise: u128,
}

impl Amount {
    /// `self + n · other`; `None` where that does not fit in 128 bits.
    fn plus(self, n: u128, other: Amount) -> Option<Amount> {
        let add = |a: u128, b: u128| a.checked_add(n.checked_mul(b)?);
        Some(Amount {
            multiply_adds: add(self.multiply_adds, other.multiply_adds)?,
            elementwise: add(self.elementwise, other.elementwise)?,
        })
    }
}

/// Work of a launch: something in any case, and as much again for each unit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// In any case.
    pub fixed: Amount,
    /// For each unit.
    pub each: Amount,
    /// The units.
    pub units: Units,
}

/// A number that the work of a launch is proportional to; numbers of operands are those of the
/// kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Units {
    /// Nothing.
    #[default]
    None,
    /// Rows of a result.
    Rows {
        /// All of them.
        rows: u64,
        /// Whether rows that nobody needs are left out.
        some: bool,
    },
    /// Slots in some group: the last entry of an operand.
    Slots {
        /// The operand of offsets.
        offsets: usize,
        /// How many entries it has.
        entries: u64,
        /// All slots.
        slots: u64,
    },
    /// Queries and keys that they see, one head of all sequences.
    Pairs {
        /// Sizes.
        shape: AttentionShape,
        /// The mask.
        attention: Attention,
        /// The first operand of the mask.
        masks: usize,
    },
    /// Rows of a depth cache that each token sees.
    Depth {
        /// The operand that gives the last of them.
        row: usize,
        /// Rows of the cache.
        depths: u64,
        /// Rows seen at most.
        window: Option<u64>,
        /// Tokens.
        rows: u64,
        /// Whether tokens that nobody needs are left out.
        some: bool,
    },
}

/// Contents of memory when a launch runs, for [`Units::found`].
pub struct Found<'a, E> {
    /// The first integers of an operand; the number says how many.
    pub integers: &'a dyn Fn(usize, u64) -> Result<Vec<i32>, E>,
    /// The value of an operand that is an index.
    pub index: &'a dyn Fn(usize) -> u64,
    /// How many of this number of rows are needed.
    pub needed: &'a dyn Fn(u64) -> Result<u64, E>,
}

impl Work {
    /// Element-wise operations alone.
    pub fn elementwise(elementwise: u128) -> Work {
        Work { fixed: Amount { multiply_adds: 0, elementwise }, ..Work::default() }
    }

    /// Products alone.
    pub fn product(factors: &[u64]) -> Work {
        Work { fixed: Amount { multiply_adds: wide(factors), elementwise: 0 }, ..Work::default() }
    }

    /// So much for each unit.
    pub fn per(units: Units, multiply_adds: &[u64]) -> Work {
        let each = Amount { multiply_adds: wide(multiply_adds), elementwise: 0 };
        Work { each, units, ..Work::default() }
    }

    /// Whether it has matrix products.
    pub fn multiplies(&self) -> bool {
        self.units != Units::None || self.fixed.multiply_adds > 0
    }

    /// All of `times` launches with `units` units in all; `None` where that does not fit in 128
    /// bits.
    pub fn of(&self, times: u128, units: u128) -> Option<Amount> {
        Amount::default().plus(times, self.fixed)?.plus(units, self.each)
    }

    /// The multiply-adds of a launch whose memory is at hand; they wrap where they do not fit in 64
    /// bits.
    pub fn found<E>(&self, found: &Found<E>) -> Result<u64, E> {
        let units = u128::from(self.units.found(found)?);
        Ok(self.fixed.multiply_adds.wrapping_add(self.each.multiply_adds.wrapping_mul(units)) as u64)
    }
}

/// A product in 128 bits; the most there is where that does not fit, which is reported when it is
/// multiplied.
pub fn wide(factors: &[u64]) -> u128 {
    factors.iter().fold(1u128, |p, &f| p.saturating_mul(f.into()))
}

impl Units {
    /// How many there are, as far as `extents` says; where it says nothing the most that shapes
    /// allow. `None` where that does not fit in 128 bits.
    pub fn known(&self, extents: &Extents) -> Option<u128> {
        Some(match *self {
            Units::None => 0,
            Units::Rows { rows, .. } => rows.into(),
            Units::Slots { slots, .. } => extents.slots.map_or(slots, |n| n.min(slots)).into(),
            Units::Pairs { shape, ref attention, .. } => match extents.pairs {
                Some(pairs) => pairs.into(),
                None => shape.most_pairs(attention)?,
            },
            Units::Depth { depths, window, rows, .. } => {
                let seen = extents.row.map_or(depths, |r| r.saturating_add(1).min(depths));
                u128::from(seen.min(window.unwrap_or(seen))).checked_mul(rows.into())?
            }
        })
    }

    /// How many there are, by the values in memory.
    pub fn found<E>(&self, found: &Found<E>) -> Result<u64, E> {
        let needed = |rows: u64, some: bool| if some { (found.needed)(rows) } else { Ok(rows) };
        Ok(match *self {
            Units::None => 0,
            Units::Rows { rows, some } => needed(rows, some)?,
            Units::Slots { offsets, entries, .. } => {
                let used = (found.integers)(offsets, entries)?.last().copied().unwrap_or(0);
                used.max(0) as u64
            }
            Units::Pairs { shape: s, ref attention, masks } => {
                let mut at = masks;
                let mut read = |wanted: bool, each: u64| match wanted {
                    true => {
                        at += 1;
                        (found.integers)(at - 1, s.batch * each)
                    }
                    false => Ok(vec![]),
                };
                let positions = attention.mask == Mask::Positions;
                let (queries, keys) = (read(positions, s.queries)?, read(positions, s.keys)?);
                let segments = read(attention.segments, s.queries)?;
                let chosen = match attention.among {
                    Some(among) => {
                        let all = s.batch * s.queries * among.heads * among.count;
                        (found.integers)(masks + attention.chosen(), all)?
                    }
                    None => vec![],
                };
                visible(&s, attention, &queries, &keys, &segments, &chosen).unwrap_or(0)
            }
            Units::Depth { row, window, rows, some, .. } => {
                let seen = (found.index)(row) + 1;
                window.map_or(seen, |w| w.min(seen)) * needed(rows, some)?
            }
        })
    }
}

/// Facts of a kernel that follow from its numbers. [`Kernel`](crate::program::Kernel) passes each
/// to the struct of its variant.
pub trait KernelKind {
    /// Its operands in order, results last.
    fn signature(&self) -> Vec<Slot>;

    /// Why its numbers do not fit together.
    fn check(&self) -> Result<(), String>;

    /// The kind and the sizes, as `--emit plan` has them.
    fn summary(&self) -> String;

    /// Its arithmetic.
    fn work(&self) -> Work;

    /// Its rows, where [`Launch::places`](crate::program::Launch::places) may say that nobody needs
    /// some.
    fn rows(&self) -> Option<u64> {
        None
    }

    /// Whether it may write rows over the very rows that it reads.
    fn in_place(&self) -> bool {
        false
    }

    /// Its CUDA text; `None` where there is nothing to run: no elements, or a sum over a group of
    /// one device.
    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError>;

    /// The naive text for the same: a thread for each element of a result.
    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError>;
}

/// An error where a number of a kernel is not as it must be.
pub fn need(ok: bool, what: &str) -> Result<(), String> {
    if ok { Ok(()) } else { Err(what.into()) }
}

/// Whether a number is counted in 31 bits.
pub fn small(n: u64, what: &str) -> Result<(), String> {
    need(n <= i32::MAX as u64, what)
}

/// Whether one number divides another.
pub fn divides(k: u64, n: u64, what: &str) -> Result<(), String> {
    need(k > 0 && n.is_multiple_of(k), what)
}

/// ` +=` where a result is added.
pub fn adding(accumulate: bool) -> &'static str {
    if accumulate { " +=" } else { "" }
}

impl From<RowKernel> for Kernel {
    fn from(k: RowKernel) -> Kernel {
        Kernel::Rows(k)
    }
}

impl KernelKind for Kernel {
    fn signature(&self) -> Vec<Slot> {
        self.kind().signature()
    }

    fn check(&self) -> Result<(), String> {
        self.kind().check()
    }

    fn summary(&self) -> String {
        self.kind().summary()
    }

    fn work(&self) -> Work {
        self.kind().work()
    }

    fn rows(&self) -> Option<u64> {
        self.kind().rows()
    }

    fn in_place(&self) -> bool {
        self.kind().in_place()
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.kind().cuda(variant)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        self.kind().naive(variant)
    }
}
