//! The interpreter as a [`Device`]: plans run on the PTX that NVRTC makes of their generated
//! kernels.
//!
//! *In*: a plan. *Out*: a session on interpreted kernels. *Promise*: what runs is the text that the
//! `cuda` device compiles, at the floor architecture unless Hopper's is asked for; a defect that
//! the interpreter finds ends the run with the launch's origin, the kernel and the line of CUDA
//! source.

use super::gpu::launch::Launch;
use super::gpu::{self, Compiler, Gpu, Target};
use crate::{Device, DeviceError, Group, Session};
use dreamc_compiler::codegen::{Limits, Source};
use dreamc_compiler::program::Plan;
use dreamc_ptx::{Memory, Module, run};
use std::convert::Infallible;

pub use dreamc_ptx::{Checks, Options, Schedule};

/// The architecture whose PTX is interpreted: what every supported GPU can run.
pub(crate) const ARCHITECTURE: &str = "compute_80";

/// The architecture whose PTX has Hopper's own operations.
pub(crate) const HOPPER: &str = "compute_90a";

/// The device.
pub struct PtxDevice {
    compiler: Compiler,
    options: Options,
    architecture: &'static str,
}

impl PtxDevice {
    /// Finds NVRTC; `options` say how the interpreter runs and what it looks for.
    pub fn new(options: Options) -> Result<Self, DeviceError> {
        PtxDevice::of(ARCHITECTURE, options)
    }

    /// The same running the texts that a Hopper GPU runs.
    pub fn hopper(options: Options) -> Result<Self, DeviceError> {
        PtxDevice::of(HOPPER, options)
    }

    /// The same running naive texts.
    pub fn naive(options: Options) -> Result<Self, DeviceError> {
        let device = PtxDevice::new(options)?;
        Ok(PtxDevice { compiler: device.compiler.naive(), ..device })
    }

    /// The same running texts for a GPU with these limits; they are an H100's otherwise.
    pub fn with_limits(self, limits: Limits) -> Self {
        PtxDevice { compiler: self.compiler.with_limits(limits), ..self }
    }

    fn of(architecture: &'static str, options: Options) -> Result<Self, DeviceError> {
        Ok(PtxDevice { compiler: Compiler::new(Target::Ptx, architecture)?, options, architecture })
    }

    /// Everything looked for.
    pub fn checked() -> Result<Self, DeviceError> {
        PtxDevice::new(Options::default())
    }

    /// As fast as it goes: bounds, masks, barriers and deadlocks are looked at, races and
    /// uninitialised reads are not.
    pub fn fast() -> Result<Self, DeviceError> {
        PtxDevice::new(Options { checks: Checks::NONE, ..Options::default() })
    }
}

impl Device for PtxDevice {
    fn name(&self) -> String {
        let (major, minor) = self.compiler.version();
        format!("ptx ({} interpreted, NVRTC {major}.{minor})", self.architecture)
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        gpu::scratch_bytes("ptx", &self.compiler, None, plan)
    }

    gpu::answers!(multiplies_codes);

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        gpu::load(
            Interpreter { memory: Memory::new(), options: self.options, instructions: 0 },
            &self.compiler,
            plan,
            group,
            &gpu::Trust::default(),
        )
    }
}

pub(crate) struct Interpreter {
    memory: Memory,
    options: Options,
    instructions: u64,
}

impl Interpreter {
    /// Memory of nothing, and everything looked for.
    #[cfg(test)]
    pub(crate) fn checked() -> Self {
        Interpreter { memory: Memory::new(), options: Options::default(), instructions: 0 }
    }

    fn error(&self, message: impl ToString) -> DeviceError {
        DeviceError::Driver { device: "ptx".into(), message: message.to_string() }
    }
}

/// More than this is not worth interpreting, and an allocation of it may not return.
const MOST: u64 = 1 << 40;

impl Gpu for Interpreter {
    type Module = Module;
    type Graph = Infallible;
    type Product = Infallible;

    const SYNCHRONOUS: bool = true;
    const RECORDS: bool = false;

    fn name(&self) -> &str {
        "ptx"
    }

    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError> {
        if bytes > MOST {
            return Err(DeviceError::OutOfMemory { bytes, what });
        }
        Ok(self.memory.alloc(bytes))
    }

    fn allocate_scratch(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        if bytes > MOST {
            return Err(DeviceError::OutOfMemory { bytes, what: "scratch" });
        }
        Ok(self.memory.alloc_uninitialised(bytes))
    }

    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Module, DeviceError> {
        let text = std::str::from_utf8(code).map_err(|e| self.error(e))?;
        Module::load(text, Some(&source.text)).map_err(|e| self.error(format!("kernel {}: {e}", source.name)))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.memory.write(address, bytes).map_err(|e| self.error(e))
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let found = self.memory.read(address, bytes.len() as u64).map_err(|e| self.error(e))?;
        bytes.copy_from_slice(&found);
        Ok(())
    }

    fn launch(&mut self, module: &Module, launch: &Launch, origin: &str) -> Result<(), DeviceError> {
        match run(module, launch, &mut self.memory, &self.options) {
            Ok(stats) => {
                self.instructions += stats.instructions;
                Ok(())
            }
            Err(finding) => Err(self.error(format!("{origin}: {finding}"))),
        }
    }

    fn instructions(&self) -> u64 {
        self.instructions
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
