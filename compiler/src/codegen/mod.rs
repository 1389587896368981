//! CUDA C++ from the launch list.
//!
//! *In*: one [`Kernel`] and its [`Variant`]. *Out*: a [`Source`]: a text, the launches ([`Pass`]es)
//! that it takes, what their arguments are, and the scratch memory they share. *Promise*: the same
//! kernel gives the same text, on every machine and in every plan, so texts can be compared, cached
//! and shared; a text includes nothing but [`HEADERS`]; no kernel uses floating-point atomics, and
//! what order its sums take depends on shapes alone; no input panics.
//!
//! Everything heavy is a template of `kernels/`; the template, its constants and the number of
//! passes stand with each kernel in `op/NAME/cuda.rs`, and here the toolkit for it ([`text`],
//! [`tile`]). Row kernels are generated whole ([`rows`]). Every kernel reads and writes exactly the
//! operands of its signature, in the types that the plan gives them. Integers in memory are looked
//! at before they are believed: a kernel that meets one out of range skips it and reports the
//! number of its launch.
//!
//! ```text
//! let source = generate(&kernel, Variant::default())?;    // None: nothing to run
//! source.text                                              // for NVRTC, with HEADERS
//! source.passes[0].grid, .block, .arguments                // for the launch
//! ```

pub(crate) mod blocks;
pub(crate) mod naive;
pub(crate) mod rows;
pub(crate) mod text;
pub(crate) mod tile;

pub use crate::statement::print::Dialect;

use crate::count::device::Device;
use crate::format::Packed;
use crate::program::{Kernel, KernelKind};
use crate::statement::{self, Unit};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The files that generated texts include: name and text. One front page for all of them is
/// `kernels/README.md`.
pub const HEADERS: &[(&str, &str)] = &[
    ("prelude.cuh", include_str!("../../../kernels/prelude.cuh")),
    ("product.cuh", include_str!("../../../kernels/product.cuh")),
    ("grouped.cuh", include_str!("../../../kernels/grouped.cuh")),
    ("heads.cuh", include_str!("../../../kernels/heads.cuh")),
    ("attention.cuh", include_str!("../../../kernels/attention.cuh")),
    ("hopper.cuh", include_str!("../../../kernels/hopper.cuh")),
    ("e4m3.cuh", include_str!("../../../kernels/e4m3.cuh")),
    ("flash.cuh", include_str!("../../../kernels/flash.cuh")),
    ("flash_parts.cuh", include_str!("../../../kernels/flash_parts.cuh")),
    ("flash_hopper.cuh", include_str!("../../../kernels/flash_hopper.cuh")),
    ("depth.cuh", include_str!("../../../kernels/depth.cuh")),
    ("sources.cuh", include_str!("../../../kernels/sources.cuh")),
    ("conv.cuh", include_str!("../../../kernels/conv.cuh")),
    ("running.cuh", include_str!("../../../kernels/running.cuh")),
    ("fp8.cuh", include_str!("../../../kernels/fp8.cuh")),
    ("linear.cuh", include_str!("../../../kernels/linear.cuh")),
    ("route.cuh", include_str!("../../../kernels/route.cuh")),
    ("choose.cuh", include_str!("../../../kernels/choose.cuh")),
    ("move.cuh", include_str!("../../../kernels/move.cuh")),
    ("embed.cuh", include_str!("../../../kernels/embed.cuh")),
    ("tokens.cuh", include_str!("../../../kernels/tokens.cuh")),
    ("ends.cuh", include_str!("../../../kernels/ends.cuh")),
    ("update.cuh", include_str!("../../../kernels/update.cuh")),
    ("blocks.cuh", include_str!("../../../kernels/blocks.cuh")),
    ("few.cuh", include_str!("../../../kernels/few.cuh")),
    ("several.cuh", include_str!("../../../kernels/several.cuh")),
    ("rows.cuh", include_str!("../../../kernels/rows.cuh")),
    ("words.cuh", include_str!("../../../kernels/words.cuh")),
    ("library.cuh", include_str!("../../../kernels/library.cuh")),
    ("naive.cuh", include_str!("../../../kernels/naive.cuh")),
    ("apart.cuh", include_str!("../../../kernels/apart.cuh")),
];

/// Why a kernel has no text.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CodegenError {
    /// A size that a kernel counts in 32 bits.
    #[error("{what} is {size}; the kernel counts to 2^31 - 1")]
    TooLarge {
        /// Which size.
        what: &'static str,
        /// How large.
        size: u64,
    },
    /// More shared memory than a block may have.
    #[error(
        "a block would need {bytes} bytes of shared memory and this GPU has {limit}; GPUs of compute capability 8.0 and 9.0 have \
         more, and smaller heads and narrower layers need less"
    )]
    Shared {
        /// How much.
        bytes: u64,
        /// How much there is.
        limit: u64,
    },
    /// An operand that is packed and no weight.
    #[error("operand `{0}` is packed; kernels read weights so alone")]
    Packed(&'static str),
    /// A kernel whose text CUDA and HIP alone have.
    #[error(
        "{0} reads weights in few bits, which CUDA and HIP alone have kernels for; keep them in bf16 or in f32"
    )]
    Dialect(String),
    /// A kernel whose threads are a block together, which CUDA alone has the words for.
    #[error(
        "{0} is a row kernel whose threads work together, which CUDA alone has; its naive form is in every dialect"
    )]
    Together(String),
    /// A kernel that is not well formed; the check of the plan finds it first.
    #[error("{0}")]
    Malformed(String),
}

/// Properties of a GPU that texts depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Multiprocessors, to which a launch gives work.
    pub processors: u64,
    /// Bytes of shared memory that a block may have.
    pub shared: u64,
}

impl Limits {
    /// Those of a GPU of the table.
    pub const fn of(device: &Device) -> Self {
        Limits { processors: device.processors, shared: device.shared }
    }
}

/// Those of an H100.
impl Default for Limits {
    fn default() -> Self {
        Limits { processors: 132, shared: HOPPER_SHARED }
    }
}

/// Shared memory of a block on `sm_80`, and thus of any text that is not Hopper's own.
pub(crate) const SHARED: u64 = 163 * 1024;
/// Shared memory of a block on `sm_90`.
pub(crate) const HOPPER_SHARED: u64 = 227 * 1024;

/// Properties that a text depends on, apart from its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Bytes of an element of the operands that may have any type.
    pub element_bytes: u64,
    /// A row kernel that writes rows over the rows it reads.
    pub in_place: bool,
    /// Bit `i`: operand `i` is bf16. For kernels that do not name the types of their operands.
    pub narrow: u32,
    /// The blocks of the operand that is a weight in its own storage, where it is packed.
    pub packed: Option<Packed>,
    /// Whether operands in bf16 begin at multiples of 16 bytes, and strided ones have rows that do.
    pub aligned: bool,
    /// Bit `i`: operand `i` begins at a multiple of 16 bytes, and so do its rows where it is
    /// strided.
    pub wide: u64,
    /// Whether the launch says which rows are needed: [`crate::program::Launch::places`].
    pub places: bool,
    /// Whether the code is for `sm_90a` and may use what that has; else every architecture from
    /// `sm_80` on runs it.
    pub hopper: bool,
    /// The GPU.
    pub limits: Limits,
    /// Whether the naive kernel stands in for the fast one.
    pub naive: bool,
    /// The language of texts in kernel statements; all others are CUDA's.
    pub dialect: Dialect,
}

impl Variant {
    /// Multiprocessors of the GPU; each is to have work.
    pub(crate) fn processors(&self) -> u64 {
        self.limits.processors.max(1)
    }

    /// Shared memory that a block may have in a text that every architecture from `sm_80` on runs.
    pub(crate) fn shared(&self) -> u64 {
        self.limits.shared.min(SHARED)
    }

    /// Shared memory that a block may have in a text that is Hopper's own.
    pub(crate) fn hopper_shared(&self) -> u64 {
        self.limits.shared.min(HOPPER_SHARED)
    }

    /// Whether operand `i` is bf16.
    pub(crate) fn is_narrow(&self, i: usize) -> bool {
        self.narrow.checked_shr(i as u32).unwrap_or(0) & 1 != 0
    }

    /// Whether operand `i` and its rows begin at multiples of 16 bytes.
    pub(crate) fn is_wide(&self, i: usize) -> bool {
        self.wide.checked_shr(i as u32).unwrap_or(0) & 1 != 0
    }
}

impl Variant {
    /// The C++ type of an element of operand `i`, which may be f32 or bf16.
    fn element(&self, operand: usize) -> &'static str {
        if self.is_narrow(operand) { "bf16" } else { "float" }
    }

    /// The part of a text's name for its types, and of rows that nobody needs.
    pub(crate) fn suffix(&self) -> &'static str {
        match (self.narrow == 0, self.places) {
            (true, false) => "",
            (true, true) => "_some",
            (false, false) => "_bf16",
            (false, true) => "_bf16_some",
        }
    }

    /// The integers that say which rows are needed.
    pub(crate) fn needed(&self) -> Option<text::Param> {
        self.places.then(text::places)
    }
}

impl Default for Variant {
    fn default() -> Self {
        Variant {
            element_bytes: 4,
            in_place: false,
            narrow: 0,
            packed: None,
            aligned: false,
            wide: 0,
            places: false,
            hopper: false,
            limits: Limits::default(),
            naive: false,
            dialect: Dialect::Cuda,
        }
    }
}

/// A kernel as CUDA C++. Sources of one text differ in names, grids, arguments and scratch alone,
/// so they are compiled once.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Source {
    /// A name for people: the kind and the sizes.
    pub name: String,
    /// The text.
    pub text: String,
    /// Launches, in order; each sees what the ones before it wrote.
    pub passes: Vec<Pass>,
    /// How often the passes run; [`Argument::Iteration`] counts.
    pub iterations: u32,
    /// Bytes of scratch memory that the passes share. Its content before does not matter.
    pub scratch: u64,
    /// The text's language.
    pub language: Language,
}

/// The language of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Language {
    /// That of a GPU; every architecture from `sm_80` on runs it.
    #[default]
    Portable,
    /// CUDA that uses what `sm_90a` has.
    Hopper,
    /// Kernel statements, not yet in a GPU's language.
    Statements,
}

/// One launch of a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pass {
    /// The `extern "C"` name.
    pub entry: String,
    /// Blocks, along x.
    pub grid: u32,
    /// Threads of a block, along x.
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// Arguments in order.
    pub arguments: Vec<Argument>,
    /// Steps of a thread, where the text is generated whole.
    pub turns: Turns,
}

/// Steps of a thread one after another, for what a launch costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Turns {
    /// Runs of loads of rows that were not read before.
    pub trips: u64,
    /// Barriers of the block.
    pub barriers: u64,
    /// Reductions by shuffles.
    pub reductions: u64,
}

/// An argument of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Argument {
    /// Address of the operand of that number.
    Operand(usize),
    /// Elements from row to row of that operand, as a 64-bit integer.
    Stride(usize),
    /// Value of that operand, an index, as a 32-bit integer.
    Index(usize),
    /// Address of the integers that say which rows are needed.
    Places,
    /// A size or a distance that the text leaves open, as a 32-bit integer.
    Size(u32),
    /// A distance that the text leaves open, as a 64-bit integer.
    Distance(u64),
    /// Address in scratch memory: bytes from its start.
    Scratch(u64),
    /// Matrices of bf16 for the copy engine, passed by value.
    Map(Matrices),
    /// Address of the word that takes the smallest number of a launch that reported an index out of
    /// range.
    Status,
    /// Number of the launch, as a 32-bit integer.
    Launch,
    /// How many times the passes ran before.
    Iteration,
}

/// Matrices for the copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Base {
    /// At the address of the operand of that number.
    Operand(usize),
    /// The same, this number of bytes after its address.
    Within(usize, u64),
    /// In scratch memory: bytes from its start.
    Scratch(u64),
}

/// Matrices of bf16, one after another; or of bytes, two to an element. A copy brings a box of
/// [`Matrices::ROW`] elements of some rows into the swizzle of 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Matrices {
    /// Where the first begins.
    pub base: Base,
    /// Adjacent elements of a row.
    pub row: u64,
    /// Rows of a matrix.
    pub rows: u64,
    /// Elements from row to row, a multiple of 8; `None`: as far as those of the operand.
    pub stride: Option<u64>,
    /// How many matrices.
    pub count: u64,
    /// Rows of a box, at most 256.
    pub box_rows: u32,
}

impl Matrices {
    /// Elements of a row of a box: 128 bytes.
    pub const ROW: u32 = 64;
}

/// The text of a kernel; `None` where there is nothing to run: no elements, or a sum over a group
/// of one device.
pub fn generate(kernel: &Kernel, variant: Variant) -> Result<Option<Source>, CodegenError> {
    written(kernel, variant)?.map(|source| printed(source, variant.dialect)).transpose()
}

/// The same before statements are printed.
pub(crate) fn written(kernel: &Kernel, variant: Variant) -> Result<Option<Source>, CodegenError> {
    // Statements alone say what other kernels do: row kernels are written in them at full speed.
    let plain = variant.dialect == Dialect::Plain && !matches!(kernel, Kernel::Rows(_));
    if variant.naive || plain { kernel.naive(variant) } else { kernel.cuda(variant) }
}

/// Kernel statements in a dialect; other texts are CUDA's, which AMD's compiler takes where nothing
/// in them is NVIDIA's.
fn printed(source: Source, dialect: Dialect) -> Result<Source, CodegenError> {
    match (source.language == Language::Statements, dialect) {
        (false, Dialect::Cuda | Dialect::Hip) | (true, Dialect::Plain) => return Ok(source),
        (false, Dialect::Metal | Dialect::Plain) => return Err(CodegenError::Dialect(source.name)),
        (true, Dialect::Cuda | Dialect::Hip | Dialect::Metal) => {}
    }
    let unit = Unit::parse(&source.text).map_err(|e| CodegenError::Malformed(e.to_string()))?;
    if dialect != Dialect::Cuda && unit.of_blocks() {
        return Err(CodegenError::Together(source.name));
    }
    let title = source.text.lines().next().unwrap_or_default().trim_start_matches("// ");
    let text = statement::print::print(&unit, title, dialect);
    Ok(Source { text, language: Language::Portable, ..source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::count::device::DEVICES;
    use crate::program::Matrix;

    /// A product of 64 by 64 with sums of 8192, of a weight in its own storage or not.
    fn product(stored: bool) -> Kernel {
        let matrix = |row| Matrix { row, column: 1 };
        let (a, b) = (matrix(8192), matrix(64));
        Kernel::Product(crate::program::kernel::Product {
            m: 64,
            n: 64,
            k: 8192,
            a,
            b,
            accumulate: false,
            stored,
        })
    }

    #[test]
    fn weights_in_few_bits_are_refused_by_name_where_no_kernel_reads_them() {
        for (dialect, reads) in
            [(Dialect::Cuda, true), (Dialect::Hip, true), (Dialect::Metal, false), (Dialect::Plain, false)]
        {
            let variant = Variant { naive: true, dialect, ..Variant::default() };
            assert!(generate(&product(true), variant).unwrap().is_some(), "{dialect:?}");
            let packed = generate(&product(true), Variant { packed: Some(Packed::Q8), ..variant });
            match packed {
                Ok(source) => assert!(reads && source.is_some(), "{dialect:?}"),
                Err(error) => {
                    let words = error.to_string();
                    assert!(
                        !reads && words.contains("product") && words.contains("bf16"),
                        "{dialect:?}: {words}"
                    );
                }
            }
        }
    }

    #[test]
    fn grids_are_cut_for_the_processors_that_there_are() {
        let kernel = product(false);
        let blocks = |processors| {
            let limits = Limits { processors, ..Limits::default() };
            let source = generate(&kernel, Variant { limits, ..Variant::default() }).unwrap().unwrap();
            source.passes[0].grid
        };
        // One tile: its sums are cut for two blocks a processor, and no shorter than 512 terms.
        assert_eq!((blocks(132), blocks(4), blocks(1), blocks(0)), (16, 8, 2, 2));
        let table: Vec<Limits> = DEVICES.iter().map(Limits::of).collect();
        assert_eq!(table[0], Limits::default());
        assert!(table.iter().all(|l| l.processors > 100 && l.shared >= 99 << 10));
    }
}
