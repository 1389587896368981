//! Devices: where a launch list becomes numbers.
//!
//! *In*: a [`Plan`]. *Out*: a [`Session`], which holds the plan's arena and runs its programs.
//! *Promise*: a plan is checked once, when it is loaded ([`check`]); a plan that loads never reads
//! or writes outside the buffers it names, whatever the values in them, and nothing panics on one
//! that does not load. All memory is allocated by [`Device::load`], none by [`Session::run`]. The
//! same writes followed by the same runs give the same bits.
//!
//! ```text
//! let mut session = CpuDevice::new(CpuOptions::default()).load(&plan, &Group::alone())?;
//! session.write_at(plan.find("ids").unwrap(), 0, 0, &ids)?;       // [i32]
//! session.run(ProgramKey::EVALUATE)?;
//! session.read_at(plan.find("loss").unwrap(), 0, 0, &mut loss)?;     // [f32]
//! ```
//!
//! One executor walks the launch lists of all devices; each device is a backend under it:
//! `backend/{cpu,cuda,ptx}`. Look next at [`check`] (what every kernel's operands must be) and
//! [`cpu`] (the embedded device).

pub mod agree;
mod backend;
pub mod check;
mod exchange;
mod executor;
pub mod group;
pub mod machine;
pub mod mapped;
pub mod notice;
pub mod poison;
mod rows;
mod staged;

pub use crate::group::Group;
pub use backend::*;
pub use check::PlanError;
pub use executor::AT_ONCE;

use crate::mapped::Mapped;
use bytemuck::Pod;
use dreamc_compiler::format::Format;
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{BufferId, KernelId, Plan, ProgramKey};
use dreamc_dsl::spec::Precision;
use thiserror::Error;

/// A failure of a device.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The plan does not fit together.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device does not run such a kernel.
    #[error("device {device} cannot run kernel {}: {reason}", kernel.0)]
    Unsupported {
        /// Name of the device.
        device: String,
        /// Which kernel.
        kernel: KernelId,
        /// Why.
        reason: String,
    },
    /// There is too little memory.
    #[error("cannot allocate {bytes} bytes for the {what}")]
    OutOfMemory {
        /// How much was asked for.
        bytes: u64,
        /// Their use.
        what: &'static str,
    },
    /// A plan is larger than the device, which is known before anything is allocated or compiled.
    #[error(
        "{device} has room for {free} bytes and the plan needs {needed}; most of it, {bytes} bytes, is {category}: {advice}"
    )]
    DoesNotFit {
        /// Name of the device.
        device: String,
        /// All of it.
        needed: u64,
        /// Bytes that there is room for.
        free: u64,
        /// The largest part.
        category: &'static str,
        /// How much of it.
        bytes: u64,
        /// The change that helps.
        advice: &'static str,
    },
    /// The plan has no such program.
    #[error("no program `{program}`; there are {known}")]
    NoProgram {
        /// The program asked for.
        program: ProgramKey,
        /// The programs of the plan.
        known: String,
    },
    /// A read or write outside a buffer.
    #[error("{elements} elements at instance {instance}, element {element} do not fit in buffer `{buffer}`")]
    OutOfBounds {
        /// Name of the buffer.
        buffer: String,
        /// First instance.
        instance: u64,
        /// First element in it.
        element: u64,
        /// How many elements.
        elements: u64,
    },
    /// A typed read or write of a buffer of another type.
    #[error("buffer `{buffer}` holds {actual:?}, not {asked:?}")]
    WrongType {
        /// Name of the buffer.
        buffer: String,
        /// Its type.
        actual: DType,
        /// The type asked for.
        asked: DType,
    },
    /// The plan has no buffer of that number.
    #[error("no buffer {}", .0.0)]
    NoBuffer(BufferId),
    /// A plan that sums over a group, loaded for another.
    #[error("{origin} are summed over {ranks} ranks, and the group has {size}: compile the plan for as many")]
    OtherGroup {
        /// The values that are summed.
        origin: String,
        /// Ranks that the plan sums over.
        ranks: u64,
        /// Ranks of the group.
        size: u64,
    },
    /// A plan for a rank's part of the optimizer's states, loaded by another rank.
    #[error("{origin}: the plan is for the part of rank {rank}, and this is rank {own}")]
    OtherRank {
        /// The values that are cut.
        origin: String,
        /// Rank that the plan was compiled for.
        rank: u64,
        /// This rank.
        own: u64,
    },
    /// A collective of the group.
    #[error(transparent)]
    Group(#[from] crate::group::GroupError),
    /// An integer in memory (a token, a target, a choice, an offset) points outside what it
    /// indexes. The launch skipped it, so memory is intact, but results are meaningless.
    #[error("{origin}: an index in its operands is out of range")]
    BadIndex {
        /// Origin of the launch.
        origin: String,
    },
    /// Weights of a file were not given before a program that reads them.
    #[error("{origin}: reads weights in a file, and none was given")]
    NoFile {
        /// Origin of the launch.
        origin: String,
    },
    /// A scale of packed weights in a file is NaN or infinite.
    #[error("{}: tensor {tensor}: the scale of block {block} is not a finite number", path.display())]
    BadScale {
        /// Which file.
        path: std::path::PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Number of the block in it.
        block: usize,
    },
    /// Weights in a file are read alone.
    #[error("buffer `{buffer}` holds weights in their file, which are not written")]
    ReadOnly {
        /// Name of the buffer.
        buffer: String,
    },
    /// A file of weights changed under the program that reads it; what it computed meanwhile is
    /// lost.
    #[error("{}: {problem}; results of this run were dropped, run it again on a file that stays", path.display())]
    FileChanged {
        /// Which file.
        path: std::path::PathBuf,
        /// The change.
        problem: String,
    },
    /// A worker thread panicked: a bug of this crate.
    #[error("{origin}: the kernel panicked")]
    Panicked {
        /// Origin of the launch.
        origin: String,
    },
    /// Generated kernels could not be compiled.
    #[error(transparent)]
    Nvrtc(#[from] dreamc_nvrtc::NvrtcError),
    /// Ways of computing a product differ, and the naive kernel agrees with none.
    #[error(
        "{device}: {kernel} each compute something else; `dreamc doctor --gpu` proves all kernels, DREAMC_NAIVE=1 runs naive ones"
    )]
    Disagree {
        /// Name of the device.
        device: String,
        /// The product, and the names of both ways.
        kernel: String,
    },
    /// A launch or the device itself failed so that this process can do nothing more on it.
    #[error(
        "{device}: {}{what} ({words}); the GPU is lost to this process{}",
        launch.as_ref().map(|l| format!("{l}: ")).unwrap_or_default(),
        if launch.is_none() { "; DREAMC_SYNCHRONOUS=1 names the launch" } else { "" }
    )]
    Lost {
        /// Name of the device.
        device: String,
        /// The part that failed.
        what: &'static str,
        /// The driver's words.
        words: String,
        /// The launch, where it is known: its layer, its operation and its kernel.
        launch: Option<String>,
    },
    /// A failure of the machine below, in its words.
    #[error("{device}: {message}")]
    Driver {
        /// Name of the device.
        device: String,
        /// Its words.
        message: String,
    },
}

impl DeviceError {
    /// A plan has no such program.
    fn no_program(plan: &Plan, program: ProgramKey) -> Self {
        let known: Vec<String> = plan.programs.keys().map(|k| format!("`{k}`")).collect();
        DeviceError::NoProgram { program, known: known.join(", ") }
    }
}

/// Something that runs plans.
pub trait Device: Send + Sync {
    /// Its name, for people: `cpu (8 threads, avx512)`.
    fn name(&self) -> String;

    /// Bytes that a session of this plan allocates outside the plan's arena.
    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError>;

    /// The values to store in bf16 where a recipe asks for `asked`. A device without bf16 computes
    /// in f32.
    fn narrow(&self, asked: Precision) -> Narrow {
        let _ = asked;
        Narrow::Nothing
    }

    /// The same to write with: reading weights takes most of the time, so bf16 may pay where
    /// training does without.
    fn writes(&self, asked: Precision) -> Narrow {
        self.narrow(asked).outside()
    }

    /// Whether sessions take weights of this format as their file has them, [`Session::map`].
    fn maps(&self, format: Format) -> bool {
        let _ = format;
        false
    }

    /// Whether what a session maps is a copy in its own memory, rather than the file's pages.
    fn copies(&self) -> bool {
        false
    }

    /// Checks the plan, allocates everything it needs, and sets the arena to zero. `group`: the
    /// ranks whose gradients are summed, as many as the plan was compiled for.
    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError>;
}

impl<D: Device + ?Sized> Device for &D {
    fn name(&self) -> String {
        (**self).name()
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        (**self).scratch_bytes(plan)
    }

    fn narrow(&self, asked: Precision) -> Narrow {
        (**self).narrow(asked)
    }

    fn writes(&self, asked: Precision) -> Narrow {
        (**self).writes(asked)
    }

    fn maps(&self, format: Format) -> bool {
        (**self).maps(format)
    }

    fn copies(&self) -> bool {
        (**self).copies()
    }

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        (**self).load(plan, group)
    }
}

/// A loaded plan and its memory.
pub trait Session: Send {
    /// The plan.
    fn plan(&self) -> &Plan;

    /// Bytes allocated outside the plan's arena.
    fn scratch_bytes(&self) -> u64;

    /// As [`Device::copies`].
    fn copies(&self) -> bool {
        false
    }

    /// Copies bytes into a buffer, from `element` of `instance` on; the range may span instances.
    fn write(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError>;

    /// Copies bytes out of a buffer, from `element` of `instance` on; the range may span instances.
    fn read(
        &self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError>;

    /// Puts numbers of a file, as they are stored there, in the place of instances of a buffer of
    /// [`Space::Mapped`](dreamc_compiler::program::Space::Mapped), from `instance` on.
    fn map(&mut self, buffer: BufferId, instance: u64, numbers: Mapped) -> Result<(), DeviceError> {
        let _ = (instance, numbers);
        Err(DeviceError::NoBuffer(buffer))
    }

    /// Gives the memory of a range back to the machine, where it takes some: until it is written
    /// again its elements may be any finite numbers, zeros or as they were. From then on the buffer
    /// has memory page by page.
    fn forget(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        elements: u64,
    ) -> Result<(), DeviceError>;

    /// Runs a program to its end.
    fn run(&mut self, program: ProgramKey) -> Result<RunStats, DeviceError>;

    /// Sets what later runs measure.
    fn instrument(&mut self, instrument: Instrument);

    /// The choice between kernel and library for the launch of that number in a program's list,
    /// where it is a plain product that the GPU maker's library could compute as well; `None` for
    /// all other launches and where there is no such library.
    fn choice(&self, program: ProgramKey, launch: usize) -> Option<&Choice> {
        let _ = (program, launch);
        None
    }
}

/// The choice between kernel and library for a product.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    /// The GPU maker's library rather than the generated kernel.
    pub library: bool,
    /// In a few words: what was measured, or why nothing was.
    pub reason: String,
}

/// Measurements of a run apart from its duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instrument {
    /// Multiply-adds of products, dynamic extents included. A device that replays recorded launches
    /// counts one run of 64 and repeats it for the others.
    pub count: bool,
    /// Duration of every launch.
    pub time: bool,
}

/// A run that took place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunStats {
    /// Wall-clock duration.
    pub seconds: f64,
    /// How many launches took place.
    pub launches: u64,
    /// Whether they were replayed from a recording: a CUDA graph.
    pub replayed: bool,
    /// Seconds of exchanges with other ranks.
    pub exchanged: f64,
    /// Seconds of them for which nothing else was left to do.
    pub waited: f64,
    /// Measurements by launch of the list (loops added up), in the order of the list; empty unless
    /// instrumented.
    pub by_launch: Vec<LaunchStats>,
}

impl RunStats {
    /// Multiply-adds of all launches; 0 unless they were counted.
    pub fn multiply_adds(&self) -> u64 {
        self.by_launch.iter().map(|l| l.multiply_adds).sum()
    }
}

/// Measurements of one launch of the list.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchStats {
    /// Its [`origin`](dreamc_compiler::program::Launch::origin).
    pub origin: String,
    /// Its kernel.
    pub kernel: KernelId,
    /// How often it took place.
    pub count: u64,
    /// How long in all; 0 unless timed.
    pub seconds: f64,
    /// Multiply-adds in all; 0 unless counted.
    pub multiply_adds: u64,
    /// Instructions in all, times the threads that executed them; 0 unless counted on the `ptx`
    /// device.
    pub instructions: u64,
}

impl LaunchStats {
    /// A launch that has not taken place.
    fn of(origin: &str, kernel: KernelId) -> Self {
        LaunchStats {
            origin: origin.into(),
            kernel,
            count: 0,
            seconds: 0.0,
            multiply_adds: 0,
            instructions: 0,
        }
    }
}

/// A Rust type with the layout of a [`DType`].
pub trait Element: Pod {
    /// Which.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
}

impl dyn Session + '_ {
    /// [`Session::write`] of elements of the buffer's type.
    pub fn write_at<T: Element>(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        values: &[T],
    ) -> Result<(), DeviceError> {
        self.expect::<T>(buffer)?;
        self.write(buffer, instance, element, bytemuck::cast_slice(values))
    }

    /// [`Session::read`] of elements of the buffer's type.
    pub fn read_at<T: Element>(
        &self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        values: &mut [T],
    ) -> Result<(), DeviceError> {
        self.expect::<T>(buffer)?;
        self.read(buffer, instance, element, bytemuck::cast_slice_mut(values))
    }

    /// All instances of a buffer.
    pub fn read_all<T: Element>(&self, buffer: BufferId) -> Result<Vec<T>, DeviceError> {
        self.expect::<T>(buffer)?;
        let b = self.plan().buffer(buffer);
        let mut values = vec![T::zeroed(); (b.elements() * b.instances) as usize];
        self.read(buffer, 0, 0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn expect<T: Element>(&self, buffer: BufferId) -> Result<(), DeviceError> {
        match self.plan().buffers.get(buffer.0 as usize) {
            None => Err(DeviceError::NoBuffer(buffer)),
            Some(b) if b.dtype != T::DTYPE => {
                Err(DeviceError::WrongType { buffer: b.name.clone(), actual: b.dtype, asked: T::DTYPE })
            }
            Some(_) => Ok(()),
        }
    }
}
