//! Weights in their blocks: a kernel for few rows, which reads them once, and for many rows a pass
//! that unpacks them before the kernel of plain ones.
//!
//! *In*: a kernel whose weight is packed, and its variant. *Out*: a [`Source`]. *Promise*: a number
//! of a block has the bits that [`Packed::unpack`] gives it; where results or rows are bf16 it is
//! rounded to bf16 for the tensor cores, as the weights of a plan in bf16 are.

use super::text::{Builder, Geometry, Operands, Param, fits, per_thread, scratch, size, times};
use super::{Argument, Base, CodegenError, Pass, Source, Variant, generate};
use crate::format::Packed;
use crate::ir::DType;
use crate::op::kernel::{KernelKind, Slot, Storage};
use crate::program::Kernel;
use crate::program::{RowInput, RowKernel};

type Result<T> = std::result::Result<T, CodegenError>;

/// The file of the kernels here.
pub(crate) const HEADER: &str = "few.cuh";

/// Rows up to which blocks are unpacked again for every eight: fewer bytes than a copy of the
/// matrix in bf16, written and read.
const FEW: u64 = 16;

/// Warps of a block, and chunks of each row in shared memory: `few.cuh` has them, too.
const WARPS: u64 = 8;
const STAGES: u64 = 3;

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

/// Numbers of a chunk of a row, and its bytes.
fn chunk(packed: Packed) -> (u64, u64) {
    let numbers = if packed == Packed::Q4K { 1024 } else { 512 };
    let bytes = match packed {
        Packed::Int8(_) => 512,
        Packed::Nvfp4(_) => 288,
        _ => numbers / packed.unit() as u64 * packed.bytes() as u64,
    };
    (numbers, bytes)
}

/// How a product of few rows is cut.
pub(crate) struct Few {
    /// Constants of its template: the block, rows at a time, and warps that share rows.
    pub(crate) constants: String,
    /// Its blocks, threads and shared memory.
    pub(crate) geometry: Geometry,
    /// Whether sums of eight rows take registers that two blocks do not have.
    many: bool,
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
        let rows = if one { 1 } else { m.next_power_of_two().min(8) };
        let own: u64 = if rows > 2 { 2 } else { 4 };
        let (numbers, bytes) = chunk(packed);
        // Warps enough that bytes are under way on every processor, as long as they have chunks.
        let wanted = 16 * variant.processors();
        let split = [1u64, 2, 4, 8].into_iter().find(|split| {
            times(&[n.div_ceil(own), *split, copies, m.div_ceil(rows)]) >= wanted
                || k.div_ceil(numbers) < 2 * split
        });
        let split = split.unwrap_or(8);
        let tiles = n.div_ceil(WARPS / split * own);
        let blocks = fits("the number of blocks", times(&[tiles, copies, m.div_ceil(rows)]))?;
        let shared = WARPS * STAGES * own * ((bytes + 34) / 16 * 16);
        let block = block(packed);
        let rows = if one { String::new() } else { format!(", {rows}") };
        let constants = format!("{block}{rows}, {split}");
        Ok(Some(Few { constants, geometry: (blocks, 32 * WARPS as u32, shared as u32), many: m > 4 && !one }))
    }

    /// An entry of it.
    pub(crate) fn source(self, name: String, list: &[Param], template: &str, more: &str) -> Option<Source> {
        let mut builder = Builder::of_family(name, "few rows by packed ones", HEADER);
        builder.resident(if self.many { 1 } else { 2 });
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
    // Operands here are as they are in memory, and behind the passes all are of one type.
    let both = if narrow { 1 | 1 << weight } else { 0 };
    let moves = narrow && !variant.is_narrow(0);
    let wide = variant.wide | 1 << weight | u64::from(moves);
    let bits = variant.narrow | both as u32;
    let aligned = bits != 0 && u64::from(bits) & !wide == 0;
    let Some(inner) = generate(plain, Variant { packed: None, narrow: bits, wide, aligned, ..variant })?
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
    let Some(inner) = generate(&Kernel::Rows(plain), variant)? else { return Ok(None) };
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
