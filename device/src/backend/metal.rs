//! Apple's GPUs, through Metal.
//!
//! *In*: a plan. *Out*: a session on one GPU, at the naive rung: kernel statements printed in
//! Metal's language, which the system compiles. *Promise*: where there is no such GPU,
//! [`MetalDevice::new`] says so, and nothing panics; launches run in the order of the list, and
//! copies wait for them.
//!
//! No GPU of Apple's has run this (`metal/src/lib.rs` says what holds it).

use super::gpu::launch::Launch;
use super::gpu::{self, Compiler, Gpu};
use crate::{Device, DeviceError, Group, Session};
use dreamc_compiler::codegen::{Dialect, Source};
use dreamc_compiler::program::Plan;
use dreamc_metal::{Card, Code, Memory, Refused, arguments};
use std::convert::Infallible;
use std::sync::Arc;

/// A GPU of Apple's.
pub struct MetalDevice {
    card: Arc<Card>,
    name: String,
    compiler: Compiler,
}

impl MetalDevice {
    /// GPU number `ordinal`.
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        let name = format!("metal:{ordinal}");
        let missing = |message| DeviceError::Driver { device: name.clone(), message };
        let card = Arc::new(Card::new(ordinal).map_err(missing)?);
        Ok(MetalDevice { card, name, compiler: Compiler::text(Dialect::Metal) })
    }
}

impl Device for MetalDevice {
    fn name(&self) -> String {
        format!("{} ({}, naive kernels, tried on no GPU of Apple's yet)", self.name, self.card.title())
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        gpu::scratch_bytes(&self.name, &self.compiler, None, plan)
    }

    gpu::answers!();

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        let (card, name) = (self.card.clone(), self.name.clone());
        let session = Apple { memory: Memory::new(card.clone()), card, name };
        gpu::load(session, &self.compiler, plan, group, &gpu::Trust::default())
    }
}

struct Apple {
    memory: Memory,
    card: Arc<Card>,
    name: String,
}

impl Apple {
    fn error(&self, message: String) -> DeviceError {
        DeviceError::Driver { device: self.name.clone(), message }
    }
}

impl Gpu for Apple {
    type Module = Code;
    type Graph = Infallible;
    type Product = Infallible;

    const SYNCHRONOUS: bool = false;
    const RECORDS: bool = false;

    fn name(&self) -> &str {
        &self.name
    }

    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError> {
        self.memory.allocate(bytes).map_err(|refused| match refused {
            Refused::Full => DeviceError::OutOfMemory { bytes, what },
            Refused::Failed(message) => self.error(message),
        })
    }

    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Code, DeviceError> {
        let entries: Vec<&str> = source.passes.iter().map(|pass| pass.entry.as_str()).collect();
        let text = std::str::from_utf8(code).map_err(|e| self.error(e.to_string()))?;
        let code = self.memory.load(text, &entries);
        code.map_err(|message| self.error(format!("kernel {}: {message}", source.name)))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.memory.write(address, bytes).map_err(|message| self.error(message))
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.memory.read(address, bytes).map_err(|message| self.error(message))
    }

    fn launch(&mut self, code: &Code, launch: &Launch, origin: &str) -> Result<(), DeviceError> {
        let parts: Vec<Vec<u8>> = launch.args.iter().map(|arg| arg.bytes()).collect();
        let given = arguments(parts.iter().map(Vec::as_slice));
        let done = self.memory.launch(code, &launch.kernel, launch.grid[0], launch.block[0], &given);
        done.map_err(|message| self.error(format!("{origin}, kernel {}: {message}", launch.kernel)))
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.memory.finish().map_err(|message| self.error(message))
    }

    fn free(&self) -> Result<Option<u64>, DeviceError> {
        Ok(Some(self.card.free()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_without_metal_is_an_error_that_says_what_would_serve() {
        let Err(error) = MetalDevice::new(0) else { return dreamc_skip::skip("there is a GPU of Apple's") };
        assert!(error.to_string().contains("--device cpu"), "{error}");
    }
}
