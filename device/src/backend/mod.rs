//! Backends: what a machine must do so that the [executor](super::executor) runs plans on it.
//!
//! *In*: launches with their operands' places in the arena. *Out*: memory changed by them, in
//! order. *Promise*: a backend knows nothing of programs and loops; it allocates all memory while
//! it is made, and makes every launch ready then.
//!
//! [`cpu`] runs native code. [`cuda`], [`ptx`], [`statements`], `rocm` and `metal` run generated
//! kernels and share all but the driver: see [`gpu`]. [`paper`] is for plans of machines that are
//! not here, and runs nothing.

pub mod cpu;
pub mod cuda;
mod foreign;
pub mod gpu;
#[cfg(feature = "metal")]
pub mod metal;
pub mod paper;
pub mod ptx;
#[cfg(feature = "rocm")]
pub mod rocm;
mod room;
pub mod statements;

use super::exchange::Collective;
use super::{Choice, DeviceError};
use crate::mapped::Mapped;
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{Kernel, KernelId};

/// An operand of a launch at the present values of the loop variables.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// A place in the arena.
    Tensor {
        /// Bytes from the arena's beginning, or an address of weights in a file, from
        /// [`MAPPED`](dreamc_compiler::program::MAPPED) on.
        at: u64,
        /// Elements from row to row, where the operand has rows.
        stride: u64,
        /// The type of its elements.
        dtype: DType,
    },
    /// An integer.
    Index(u64),
}

impl Value {
    /// Bytes from the arena's beginning; 0 for an integer.
    pub(crate) fn at(&self) -> u64 {
        match *self {
            Value::Tensor { at, .. } => at,
            Value::Index(_) => 0,
        }
    }

    /// Elements from row to row; 0 for an integer.
    pub(crate) fn stride(&self) -> u64 {
        match *self {
            Value::Tensor { stride, .. } => stride,
            Value::Index(_) => 0,
        }
    }

    /// The integer; 0 for a place.
    pub(crate) fn index(&self) -> u64 {
        match *self {
            Value::Tensor { .. } => 0,
            Value::Index(index) => index,
        }
    }
}

/// A launch with everything filled in.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    /// Its number in the program's list.
    pub(crate) number: usize,
    /// The plan's number of its kernel.
    pub(crate) id: KernelId,
    /// Its kernel.
    pub(crate) kernel: &'a Kernel,
    /// Its operands, in the kernel's order.
    pub(crate) values: &'a [Value],
    /// Where the integers are that say which rows are needed, in bytes from the arena's beginning.
    pub(crate) places: Option<u64>,
    /// A row kernel that writes rows over the rows it reads.
    pub(crate) in_place: bool,
    /// The layer and the operation, for messages.
    pub(crate) origin: &'a str,
    /// Whether its work is counted.
    pub(crate) counted: bool,
    /// Whether the launch is waited for, so that a failure has its name.
    pub(crate) waited: bool,
}

/// Work of a launch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    /// Multiply-adds of products.
    pub(crate) multiply_adds: u64,
    /// Instructions, times the threads that executed them; 0 where nobody counts them.
    pub(crate) instructions: u64,
}

/// Bytes of the arena that go to another rank, or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass {
    /// Which.
    pub(crate) rank: u64,
    /// Whether they come from it.
    pub(crate) comes: bool,
    /// Where they are, or go.
    pub(crate) at: u64,
    /// How many.
    pub(crate) bytes: u64,
}

impl Pass {
    pub(crate) fn to(rank: u64, at: u64, bytes: u64) -> Self {
        Pass { rank, comes: false, at, bytes }
    }

    pub(crate) fn of(rank: u64, at: u64, bytes: u64) -> Self {
        Pass { rank, comes: true, at, bytes }
    }
}

/// A machine with the memory and the code of one plan.
pub(crate) trait Backend: Send + 'static {
    /// A launch made ready.
    type Code: Send;
    /// Recorded launches.
    type Recording: Send;

    /// Whether launches can be recorded.
    const RECORDS: bool;

    /// Whether a launch is done when [`Backend::launch`] returns.
    const SYNCHRONOUS: bool;

    /// Whether what is mapped is copied.
    const COPIES: bool = false;

    /// Bytes allocated next to the arena, mapped weights left out.
    fn scratch_bytes(&self) -> u64;

    /// Copies into the arena, after all launches before it.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies out of the arena, after all launches before it.
    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Puts numbers of a file, of this type, at an address from
    /// [`MAPPED`](dreamc_compiler::program::MAPPED) on.
    fn map(&mut self, at: u64, numbers: Mapped, dtype: DType) -> Result<(), DeviceError> {
        let _ = (at, numbers, dtype);
        Err(DeviceError::Driver { device: "this device".into(), message: "it maps no files".into() })
    }

    /// Gives memory of the arena back, where the machine takes some: zeros are there until it is
    /// written again, or it is as it was.
    fn forget(&mut self, at: u64, bytes: u64) -> Result<(), DeviceError> {
        let _ = (at, bytes);
        Ok(())
    }

    /// Launches; may return before it is done.
    fn launch(&mut self, code: &Self::Code, call: &Call) -> Result<(), DeviceError>;

    /// Begins to exchange numbers at a place of the arena with the other ranks by itself, after all
    /// launches before it; false where the host has to.
    fn collective(&mut self, what: Collective, at: u64) -> Result<bool, DeviceError> {
        let _ = (what, at);
        Ok(false)
    }

    /// Begins to pass bytes to and from other ranks by itself, all at once, after all launches
    /// before it; false where the host has to, on all ranks alike. An empty list asks which it is.
    fn pass(&mut self, list: &[Pass]) -> Result<bool, DeviceError> {
        let _ = list;
        Ok(false)
    }

    /// Waits for what [`Backend::collective`] or [`Backend::pass`] began; gives the seconds that it
    /// took since the launches before it were done.
    fn joined(&mut self) -> Result<f64, DeviceError> {
        Ok(0.0)
    }

    /// Where the [room](crate::staged::Room) of exchanges under way begins, in bytes from
    /// the arena's beginning; asked for, as what follows, only where a device exchanges by itself.
    fn room(&self) -> u64 {
        0
    }

    /// The number of the exchange that was begun last.
    fn begun(&self) -> u64 {
        0
    }

    /// Launches and copies from now on come after the exchange of that number, and those before it;
    /// the host goes on.
    fn after(&mut self, number: u64) -> Result<(), DeviceError> {
        let _ = number;
        Ok(())
    }

    /// The host waits for the exchange of that number, and those before it.
    fn until(&mut self, number: u64) -> Result<(), DeviceError> {
        let _ = number;
        Ok(())
    }

    /// Copies inside the memory of the arena and the room, after all launches before it.
    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        let _ = (from, to, bytes);
        Err(exchanges_nothing())
    }

    /// Zeroes memory of the arena, after all launches before it.
    fn zero(&mut self, at: u64, bytes: u64) -> Result<(), DeviceError> {
        let _ = (at, bytes);
        Err(exchanges_nothing())
    }

    /// The work of the launch before, which was counted.
    fn work(&mut self, call: &Call) -> Result<Work, DeviceError>;

    /// The number of a launch that met an index out of range since this was asked last.
    fn bad_index(&mut self) -> Result<Option<usize>, DeviceError>;

    /// Marks on the device's own clock, by a number, that all launches so far have ended; `false`
    /// where it has none.
    fn mark(&mut self, number: usize) -> Result<bool, DeviceError> {
        let _ = number;
        Ok(false)
    }

    /// Seconds between two marks, after [`Backend::finish`].
    fn between(&mut self, from: usize, to: usize) -> Result<f64, DeviceError> {
        let _ = (from, to);
        Ok(0.0)
    }

    /// From now on launches are recorded and nothing runs. Asked for only where a backend
    /// [records](Backend::RECORDS), as the two that follow.
    fn record(&mut self) -> Result<(), DeviceError> {
        Err(records_nothing())
    }

    /// The launches since [`Backend::record`], also where one of them failed; those that follow run
    /// again.
    fn recorded(&mut self) -> Result<Self::Recording, DeviceError> {
        Err(records_nothing())
    }

    /// Runs recorded launches; may return before they are done.
    fn replay(&mut self, recording: &Self::Recording) -> Result<(), DeviceError> {
        let _ = recording;
        Err(records_nothing())
    }

    /// Waits for everything.
    fn finish(&mut self) -> Result<(), DeviceError>;

    /// Between which two the computation of a launch was chosen, and how.
    fn choice(&self, code: &Self::Code) -> Option<&Choice> {
        let _ = code;
        None
    }
}

fn exchanges_nothing() -> DeviceError {
    DeviceError::Driver { device: "this device".into(), message: "it exchanges nothing by itself".into() }
}

fn records_nothing() -> DeviceError {
    DeviceError::Driver { device: "this device".into(), message: "it records no launches".into() }
}
