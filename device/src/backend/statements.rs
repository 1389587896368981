//! Kernel statements as a [`Device`]: plans run on the text that CUDA, HIP and Metal are printed
//! from, an operation at a time.
//!
//! *In*: a plan. *Out*: a session on its naive kernels, or on row kernels as GPUs run them.
//! *Promise*: no compiler and no driver is needed; an access outside memory, and one of a block's
//! memory that a barrier is missing for, ends the run with the launch's origin and the kernel. It
//! is slow: it says whether a kernel is right, and nothing of time.

use super::gpu::launch::{Arg, Launch};
use super::gpu::{self, Compiler, Gpu};
use crate::{Device, DeviceError, Group, Session};
use dreamc_compiler::codegen::{Dialect, Source};
use dreamc_compiler::program::Plan;
use dreamc_compiler::statement::Unit;
use dreamc_compiler::statement::run::{self, Grid, Value};
use std::convert::Infallible;

/// The device.
pub struct StatementDevice(Compiler);

impl StatementDevice {
    /// It needs nothing.
    pub fn new() -> Self {
        StatementDevice(Compiler::text(Dialect::Plain))
    }

    /// Row kernels run as blocks of threads that work together; all others are naive.
    pub fn of_blocks() -> Self {
        StatementDevice(Compiler::text(Dialect::Plain).whole())
    }
}

impl Default for StatementDevice {
    fn default() -> Self {
        StatementDevice::new()
    }
}

impl Device for StatementDevice {
    fn name(&self) -> String {
        "statements (kernels, interpreted)".into()
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        gpu::scratch_bytes("statements", &self.0, None, plan)
    }

    gpu::answers!();

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        gpu::load(Interpreter(Memory(vec![])), &self.0, plan, group, &gpu::Trust::default())
    }
}

/// Allocations, each at a multiple of [`APART`].
struct Memory(Vec<Vec<u8>>);

/// Addresses from one allocation to the next, more than one has: what runs over the end of one is
/// in none.
const APART: u64 = 1 << 40;

impl Memory {
    /// The allocation of an address, and the place of `bytes` bytes in it.
    fn place(&self, address: u64, bytes: u64) -> Result<(usize, std::ops::Range<usize>), String> {
        let outside = || format!("{bytes} bytes at {address:#x} are in no memory");
        let number = (address / APART).checked_sub(1).ok_or_else(outside)? as usize;
        let at = (address % APART) as usize;
        let place = at..at.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX));
        match self.0.get(number) {
            Some(memory) if place.end <= memory.len() => Ok((number, place)),
            _ => Err(outside()),
        }
    }
}

impl run::Memory for Memory {
    fn load(&self, address: u64, bytes: u64) -> Result<u64, String> {
        let (number, place) = self.place(address, bytes)?;
        let mut whole = [0; 8];
        whole[..place.len()].copy_from_slice(&self.0[number][place]);
        Ok(u64::from_le_bytes(whole))
    }

    fn store(&mut self, address: u64, bytes: u64, value: u64) -> Result<(), String> {
        let (number, place) = self.place(address, bytes)?;
        let length = place.len();
        self.0[number][place].copy_from_slice(&value.to_le_bytes()[..length]);
        Ok(())
    }
}

struct Interpreter(Memory);

fn error(message: impl ToString) -> DeviceError {
    DeviceError::Driver { device: "statements".into(), message: message.to_string() }
}

impl Gpu for Interpreter {
    type Module = Unit;
    type Graph = Infallible;
    type Product = Infallible;

    const SYNCHRONOUS: bool = true;
    const RECORDS: bool = false;

    fn name(&self) -> &str {
        "statements"
    }

    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError> {
        let full = || DeviceError::OutOfMemory { bytes, what };
        let length = usize::try_from(bytes).ok().filter(|_| bytes < APART).ok_or_else(full)?;
        let mut memory = vec![];
        memory.try_reserve_exact(length).map_err(|_| full())?;
        memory.resize(length, 0);
        self.0.0.push(memory);
        Ok(self.0.0.len() as u64 * APART)
    }

    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Unit, DeviceError> {
        let text = std::str::from_utf8(code).map_err(error)?;
        Unit::parse(text).map_err(|e| error(format!("kernel {}: {e}", source.name)))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let (number, place) = self.0.place(address, bytes.len() as u64).map_err(error)?;
        self.0.0[number][place].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let (number, place) = self.0.place(address, bytes.len() as u64).map_err(error)?;
        bytes.copy_from_slice(&self.0.0[number][place]);
        Ok(())
    }

    fn launch(&mut self, unit: &Unit, launch: &Launch, origin: &str) -> Result<(), DeviceError> {
        let failed = |message: String| error(format!("{origin}, kernel {}: {message}", launch.kernel));
        let entry = unit.entries.iter().find(|entry| entry.function.name == launch.kernel);
        let entry = entry.ok_or_else(|| failed("there is none of this name".into()))?;
        let mut arguments = vec![];
        for arg in &launch.args {
            arguments.push(match arg {
                Arg::Pointer(address) => Value::Address(*address),
                Arg::I32(n) => Value::Int(i64::from(*n)),
                Arg::U32(n) => Value::Int(i64::from(*n)),
                Arg::I64(n) => Value::Int(*n),
                Arg::U64(n) => Value::Int(*n as i64),
                Arg::F32(x) => Value::Float(f64::from(*x)),
                Arg::Bytes(_) | Arg::TensorMap(_) => {
                    return Err(failed("an argument that no statement has".into()));
                }
            });
        }
        let threads = |sizes: [u32; 3]| sizes.into_iter().map(u64::from).product::<u64>();
        let grid = Grid {
            blocks: threads(launch.grid),
            threads: threads(launch.block),
            shared: u64::from(launch.shared_bytes),
        };
        run::run(unit, entry, grid, &arguments, &mut self.0).map_err(failed)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
