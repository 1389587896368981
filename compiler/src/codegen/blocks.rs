//! Weights in their blocks: a kernel for few rows, which reads them once, and for many rows a pass
//! that unpacks them before the kernel of plain ones.
//!
//! *In*: a kernel whose weight is packed, and its variant. *Out*: a [`Source`]. *Promise*: a number
//! of a block has the bits that [`Packed::unpack`] gives it; where results or rows are bf16 it is
//! rounded to bf16 for the tensor cores, as the weights of a plan in bf16 are.

use super::text::{Builder, Geometry, Operands, Param, fits, per_thread, scratch, size, times};
use super::{Argument, Base, CodegenError, Pass, Source, Variant, written};
use crate::format::Packed;
use crate::ir::DType;
use crate::op::kernel::{KernelKind, Slot, Storage};
use crate::program::Kernel;
use crate::program::{RowInput, RowKernel};

type Result<T> = std::result::Result<T, CodegenError>;

/// The file of the kernels here.
pub(crate) const HEADER: &str = "few.cuh";

/// The file of products of 2 to [`FEW`] rows, which has those of one.
const SEVERAL: &str = "several.cuh";

/// Rows up to which blocks are unpacked in registers: fewer bytes than a copy of the matrix in
/// bf16, written and read.
const FEW: u64 = 16;

/// Warps of a block: `few.cuh` has it, too.
const WARPS: u64 = 8;

/// Shared memory, at most, of the sums that warps join.
const SUMS: u64 = WARPS * FEW * 16 * 4;

/// The C++ type of a block.
pub(crate) fn block(packed: Packed) -> String {
    match packed {
        Packed::F16 => "F16".into(),
        Packed::Int8(row) => format!("Int8<{row}>"),
        Packed::Q8 => "Q8".into(),
        Packed::Q4 => "Q4".into(),
        Packed::Mxfp4 => "Mxfp4".into(),
        Packed::Nvfp4(row) => format!("Nvfp4<{row}>"),
        Packed::Q4K => "Q4K".into(),
        Packed::Q6K => "Q6K".into(),
    }
}

/// How rows of a packed matrix pass through a warp: the constants of `few.cuh` and `several.cuh`.
struct Chunks {
    /// Rows of the matrix.
    own: u64,
    /// Numbers of a chunk of a row.
    numbers: u64,
    /// Bytes of shared memory of a row's chunk.
    room: u64,
    /// Chunks of a row that are there at a time.
    stages: u64,
}

impl Chunks {
    /// For one row of `x`, which lanes multiply.
    fn of_one(packed: Packed) -> Self {
        let numbers = if packed == Packed::Q4K { 1024 } else { 512 };
        Chunks { own: 4, numbers, room: (bytes(packed, numbers) + 34) / 16 * 16, stages: 3 }
    }

    /// For 2 to [`FEW`] rows, which tensor cores multiply.
    fn of_several(packed: Packed) -> Self {
        let numbers = match packed {
            Packed::F16 => 128,
            Packed::Int8(_) | Packed::Q8 | Packed::Q6K => 256,
            Packed::Q4 | Packed::Mxfp4 | Packed::Nvfp4(_) | Packed::Q4K => 512,
        };
        // An odd number of pieces of 16 bytes.
        Chunks { own: 16, numbers, room: (((bytes(packed, numbers) + 34) / 16) | 1) * 16, stages: 2 }
    }

    fn shared(&self) -> u64 {
        WARPS * self.stages * self.own * self.room
    }
}

/// Bytes of `numbers` adjacent numbers of a row, less those at its beginning.
fn bytes(packed: Packed, numbers: u64) -> u64 {
    match packed {
        Packed::Int8(_) => numbers,
        Packed::Nvfp4(_) => numbers / 16 * 9,
        _ => numbers / packed.unit() as u64 * packed.bytes() as u64,
    }
}

/// How a product of few rows is cut.
pub(crate) struct Few {
    /// Constants of its template: the block, rows at a time, and warps that share rows.
    constants: String,
    /// Its blocks, threads and shared memory.
    geometry: Geometry,
    header: &'static str,
}

impl Few {
    /// For `m` rows by `n` rows of a packed matrix, sums of `k`, `copies` times; `one`: a row at a
    /// time. `None` where rows are many, or lines of `x` begin at no multiple of 16 bytes.
    pub(crate) fn of(
        variant: &Variant,
        packed: Packed,
        (m, n, k): (u64, u64, u64),
        copies: u64,
        (one, wide): (bool, bool),
    ) -> Result<Option<Few>> {
        if m == 0 || n == 0 || copies == 0 || m > FEW || !wide || !k.is_multiple_of(16) || !packed.fits(k) {
            return Ok(None);
        }
        let chunks = if m == 1 { Chunks::of_one(packed) } else { Chunks::of_several(packed) };
        let shared = chunks.shared();
        if shared + SUMS > variant.shared() {
            return Ok(None);
        }
        // Warps enough that bytes are under way on every processor, as long as they have chunks.
        let wanted = 64 / chunks.own * variant.processors();
        let split = [1u64, 2, 4, 8].into_iter().find(|split| {
            times(&[n.div_ceil(chunks.own), *split, copies]) >= wanted
                || k.div_ceil(chunks.numbers) < 2 * split
        });
        let split = split.unwrap_or(8);
        let tiles = n.div_ceil(WARPS / split * chunks.own);
        let blocks = fits("the number of blocks", times(&[tiles, copies]))?;
        let block = block(packed);
        let rows = match (one, m) {
            (true, _) => String::new(),
            (false, 1) => ", 1".into(),
            (false, _) => format!(", {}", m.next_multiple_of(8)),
        };
        let header = if one { HEADER } else { SEVERAL };
        let constants = format!("{block}{rows}, {split}");
        Ok(Some(Few { constants, geometry: (blocks, 32 * WARPS as u32, shared as u32), header }))
    }

    /// An entry of it.
    pub(crate) fn source(self, name: String, list: &[Param], template: &str, more: &str) -> Option<Source> {
        let mut builder = Builder::of_family(name, "few rows by packed ones", self.header);
        builder.resident(2);
        builder.call(template, self.geometry, list, template, &format!("{}, {more}", self.constants));
        builder.finish()
    }
}

/// A kernel whose weight is packed, by passes before the kernel of plain operands.
pub(crate) fn unpacked(of: &dyn KernelKind, plain: &Kernel, variant: Variant) -> Result<Option<Source>> {
    let slots = of.signature();
    let found = slots.iter().position(|slot| slot.storage == Storage::Weight).zip(variant.packed);
    let Some((weight, packed)) = found else { return of.naive(variant) };
    let result = |(i, slot): (usize, &Slot)| {
        slot.role.writes() && matches!(slot.storage, Storage::Float(_)) && variant.is_narrow(i)
    };
    let narrow = variant.is_narrow(0) || slots.iter().enumerate().any(result);
    // Operands here have the types of memory; after the passes below all are of one type.
    let both = if narrow { 1 | 1 << weight } else { 0 };
    let moves = narrow && !variant.is_narrow(0);
    let wide = variant.wide | 1 << weight | u64::from(moves);
    let bits = variant.narrow | both as u32;
    let aligned = bits != 0 && u64::from(bits) & !wide == 0;
    let Some(inner) = written(plain, Variant { packed: None, narrow: bits, wide, aligned, ..variant })?
    else {
        return Ok(None);
    };
    let own = Operands::of(of, variant);
    let mut builder = Builder::over(inner, HEADER);
    let first = builder.passes();
    let numbers = slots[weight].span(|_| 0).next_multiple_of(packed.unit() as u64);
    let (element, bytes) = if narrow { ("bf16", 2) } else { ("float", 4) };
    let to = builder.scratch(times(&[bytes, numbers]));
    let eights = numbers.div_ceil(8);
    let list = [
        Param { name: "from".into(), ..own.get(slots[weight].name)? },
        scratch(&format!("{element} *"), "to", to),
        size("eights", "a matrix's numbers", eights)?,
        size("tail", "a matrix's numbers", numbers - 8 * eights.saturating_sub(1))?,
    ];
    builder.call(
        "unpack_weight",
        per_thread(eights)?,
        &list,
        "unpack",
        &format!("{}, {element}", block(packed)),
    );
    let mut moved = vec![(weight, to, None)];
    if moves {
        let numbers = slots[0].span(|_| 0);
        let to = builder.scratch(times(&[2, numbers]));
        let list = [
            Param { name: "from".into(), ..own.get(slots[0].name)? },
            scratch("bf16 *", "to", to),
            size("count", "an operand's numbers", numbers)?,
        ];
        builder.entry("narrow_rows", per_thread(numbers)?, &list, "    narrow(from, to, count);\n");
        moved.push((0, to, None));
    }
    Ok(builder.finish().map(|mut source| {
        source.name = format!("{} of {}", source.name, packed.name());
        source.passes[..first].iter_mut().for_each(|pass| redirect(pass, &moved));
        source.passes.rotate_left(first);
        source
    }))
}

/// A row kernel some of whose inputs are packed: they are unpacked into rows that follow one
/// another.
pub(crate) fn unpacked_rows(of: &RowKernel, variant: Variant) -> Result<Option<Source>> {
    let (mut plain, mut variant, mut packs) = (of.clone(), variant, vec![]);
    for (i, input) in plain.inputs.iter_mut().enumerate() {
        let (rows, length, dtype) = match input {
            RowInput::Row { length, dtype } => (of.rows, *length, dtype),
            RowInput::Shared { length, dtype } => (1, *length, dtype),
            RowInput::RowInts { .. } | RowInput::Index => continue,
        };
        if let DType::Packed(packed) = *dtype {
            *dtype = DType::F32;
            packs.push((i, packed, rows, length));
            let bit = if i < 64 { 1 << i } else { 0 };
            let wide = length.is_multiple_of(4);
            variant.wide = if wide { variant.wide | bit } else { variant.wide & !bit };
        }
    }
    let Some(inner) = written(&Kernel::Rows(plain), variant)? else { return Ok(None) };
    let mut builder = Builder::over(inner, "blocks.cuh");
    let (first, mut moved) = (builder.passes(), vec![]);
    for (number, (i, packed, rows, length)) in packs.into_iter().enumerate() {
        let to = builder.scratch(times(&[4, rows, length]));
        let block = block(packed);
        let stride = if rows > 1 || matches!(of.inputs[i], RowInput::Row { .. }) {
            Argument::Stride(i)
        } else {
            Argument::Distance(length)
        };
        let list = [
            Param::new(&format!("const {block} *"), "from", Argument::Operand(i)),
            Param::new("i64", "stride", stride),
            scratch("float *", "to", to),
            size("rows", "rows", rows)?,
            size("length", "a row's numbers", length)?,
        ];
        let geometry = per_thread(times(&[rows, length]))?;
        builder.call(&format!("unpack_rows{number}"), geometry, &list, "unpack_rows", &block);
        moved.push((i, to, Some(length)));
    }
    Ok(builder.finish().map(|mut source| {
        source.passes[..first].iter_mut().for_each(|pass| redirect(pass, &moved));
        source.passes.rotate_left(first);
        source
    }))
}

/// A pass that reads operands where they were put, and rows there, where it is in rows, as far
/// apart as they are long.
fn redirect(pass: &mut Pass, moved: &[(usize, u64, Option<u64>)]) {
    let found = |operand: usize| moved.iter().find(|(i, ..)| *i == operand);
    let place = |operand: usize| found(operand).map(|(_, at, _)| *at);
    for argument in &mut pass.arguments {
        match argument {
            Argument::Operand(i) => *argument = place(*i).map_or(*argument, Argument::Scratch),
            Argument::Stride(i) => {
                let length = found(*i).and_then(|(.., length)| *length);
                *argument = length.map_or(*argument, Argument::Distance);
            }
            Argument::Map(matrices) => {
                if let Base::Operand(i) = matrices.base
                    && let Some(at) = place(i)
                {
                    matrices.base = Base::Scratch(at);
                }
            }
            _ => {}
        }
    }
}
