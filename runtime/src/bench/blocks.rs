//! Packed weights that no file holds, so that a format has a speed before a model is quantised.
//!
//! *In*: a compiled model, or sizes of a matrix. *Out*: storage for [`compile`], contents for a
//! session, and [`Reading`]s. Numbers are random ones, packed; the same rows come again and again.

use super::{BenchError, once};
use crate::model::Model;
use dreamc_compiler::Compiled;
use dreamc_compiler::compiled::TensorKind;
use dreamc_compiler::format::{Format, Formats, Packed, Stored};
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{
    Affine, Buffer, BufferId, Kernel, KernelId, Launch, Matrix, Operand, Plan, Program, ProgramKey, Space,
    Step, kernel,
};
use dreamc_device::mapped::{Mapped, MappedFile};
use dreamc_device::{Device, DeviceError, Group, Session};
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Rows of a matrix by few rows of activations: how fast its bytes are read.
#[derive(Clone, Debug, Serialize)]
pub struct Reading {
    /// Format of the matrix.
    pub format: &'static str,
    /// Rows of activations.
    pub rows: u64,
    /// Bytes of the matrix.
    pub bytes: u64,
    /// Seconds of the product.
    pub seconds: f64,
    /// Bytes of the matrix in a second.
    pub bytes_per_second: f64,
}

/// Numbers that are packed once, and again and again in memory.
const SOME: u64 = 1 << 16;

/// The storage of a model that `quantize` packs in this format: matrices but those of routers.
pub(super) fn formats(compiled: &Compiled, format: &str) -> Formats {
    let of = |t: &dreamc_compiler::compiled::Tensor| {
        let row = *t.shape.last().filter(|_| t.shape.len() > 1)?;
        let packed = Packed::named(format, row).filter(|packed| packed.fits(row))?;
        let kept = t.kind == TensorKind::Router;
        (!kept).then(|| (t.name.clone(), Stored::mapped(Format::packed(packed))))
    };
    compiled.tensors.iter().filter_map(of).collect()
}

/// Blocks of random numbers, to the power of two that a row's length wants.
fn some(packed: Packed, row: u64) -> Vec<u8> {
    let count = (SOME / row.max(1)).max(1) * row;
    let bits = |j: u64| (2 * j).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let values: Vec<f32> = (0..count).map(|j| bits(j) as f32 / (1 << 24) as f32 - 0.5).collect();
    let mut bytes = vec![];
    // Numbers below a half have a place in every format.
    let _ = packed.pack(&values, &mut bytes);
    bytes
}

/// Gives packed weights of a session numbers, from a file that is removed at once.
pub(super) fn fill(model: &Model) -> Result<(), BenchError> {
    let mut session = model.session();
    let buffers: Vec<(BufferId, Buffer)> = (0..).map(BufferId).zip(session.plan().buffers.clone()).collect();
    for (id, buffer) in buffers {
        let (DType::Packed(packed), Space::Mapped) = (buffer.dtype, buffer.space) else { continue };
        let bytes = buffer.dtype.room(buffer.elements());
        let row = buffer.shape.last().copied().unwrap_or(1);
        let file = temporary(&some(packed, row), bytes)?;
        for instance in 0..buffer.instances {
            let numbers = Mapped { file: file.clone(), name: buffer.name.as_str().into(), start: 0, bytes };
            session.map(id, instance, numbers)?;
        }
    }
    Ok(())
}

/// A mapped file without a name, of these bytes again and again.
fn temporary(part: &[u8], bytes: u64) -> Result<Arc<MappedFile>, BenchError> {
    let path: PathBuf = std::env::temp_dir().join(format!("dreamc-bench-{}", std::process::id()));
    let made = || -> std::io::Result<MappedFile> {
        let mut file = File::create(&path)?;
        let mut left = bytes as usize;
        while left > 0 && !part.is_empty() {
            let now = part.len().min(left);
            file.write_all(&part[..now])?;
            left -= now;
        }
        MappedFile::open(&path, &File::open(&path)?)
    };
    let found = made();
    let _ = std::fs::remove_file(&path);
    found.map(Arc::new).map_err(|error| BenchError::Temporary { path, error })
}

/// How fast a device reads a matrix of `n` rows of `k` numbers in every format, for each number of
/// rows of activations, in f32 or, where the format is `bf16`, in bf16. Matrices of `all` bytes
/// together are read in turns, which is to be more than caches hold.
pub fn readings(
    device: &dyn Device,
    (n, k): (u64, u64),
    rows: &[u64],
    all: u64,
) -> Result<Vec<Reading>, BenchError> {
    let mut found = vec![];
    for format in ["f32", "bf16"].into_iter().chain(Packed::NAMES) {
        let dtype = match format {
            "f32" => DType::F32,
            "bf16" => DType::Bf16,
            name => match Packed::named(name, k).filter(|packed| packed.fits(k)) {
                Some(packed) => DType::Packed(packed),
                None => continue,
            },
        };
        for &rows in rows {
            let bytes = dtype.room(n * k);
            let turns = all.div_ceil(bytes).max(1);
            let mut session = product(device, dtype, (rows, n, k), turns)?;
            let seconds = (0..3).map(|_| once(session.as_mut())).collect::<Result<Vec<_>, _>>()?;
            let seconds = seconds.into_iter().fold(f64::INFINITY, f64::min) / turns as f64;
            let rate = bytes as f64 / seconds;
            found.push(Reading { format, rows, bytes, seconds, bytes_per_second: rate });
        }
    }
    Ok(found)
}

/// A session that multiplies by one matrix after another.
fn product(
    device: &dyn Device,
    dtype: DType,
    (m, n, k): (u64, u64, u64),
    turns: u64,
) -> Result<Box<dyn Session>, DeviceError> {
    let (a, b) = (Matrix { row: k, column: 1 }, Matrix { row: 1, column: k });
    let packed = matches!(dtype, DType::Packed(_));
    let beside = if packed { DType::F32 } else { dtype };
    let kernel = kernel::Product { m, n, k, a, b, accumulate: false, stored: packed };
    let (mut arena, mut buffers) = (0, vec![]);
    let all =
        [("a", beside, vec![m, k], 1), ("b", dtype, vec![n, k], turns), ("c", DType::F32, vec![m, n], 1)];
    for (name, dtype, shape, instances) in all {
        buffers.push(Buffer { name: name.into(), space: Space::Io, dtype, shape, instances, offset: arena });
        arena += buffers[buffers.len() - 1].bytes().next_multiple_of(256);
    }
    let operand = |i: u32| Operand::Tensor {
        buffer: BufferId(i),
        instance: if i == 1 {
            Affine { base: 0, terms: [(0, 1)].into_iter().collect() }
        } else {
            Affine::default()
        },
        offset: 0,
        stride: 0,
    };
    let operands = (0..3).map(operand).collect();
    let launch = Launch { kernel: KernelId(0), operands, places: None, origin: "bench".into() };
    let steps = vec![Step::Launch(launch)];
    let program = Program {
        steps: vec![Step::Loop { variable: 0, count: turns, reverse: false, steps }],
        variables: 1,
    };
    let programs = [(ProgramKey::ALONE, program)].into_iter().collect();
    let plan = Plan { buffers, kernels: vec![Kernel::Product(kernel)], programs, arena, mapped: 0 };
    let mut session = device.load(&plan, &Group::alone())?;
    let values: Vec<f32> = (0..k).map(|j| ((j * 37 + 11) % 101) as f32 / 101.0 - 0.5).collect();
    let plain = |dtype: DType, values: &[f32]| -> Vec<u8> {
        match dtype {
            DType::Bf16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    };
    for row in 0..m {
        session.write(BufferId(0), 0, row * k, &plain(beside, &values))?;
    }
    let part = match dtype {
        DType::Packed(packed) => some(packed, k),
        dtype => plain(dtype, &values.repeat((SOME / k).max(1) as usize)),
    };
    let whole: Vec<u8> = part.iter().copied().cycle().take(dtype.room(n * k) as usize).collect();
    (0..turns).try_for_each(|turn| session.write(BufferId(1), turn, 0, &whole))?;
    Ok(session)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_device::cpu::CpuDevice;

    #[test]
    fn every_format_has_a_speed() {
        let found = readings(&CpuDevice::default(), (64, 512), &[1], 1 << 16).unwrap();
        assert_eq!(found.len(), 2 + Packed::NAMES.len());
        assert!(found.iter().all(|r| r.bytes_per_second > 0.0 && r.bytes > 0), "{found:?}");
    }
}
