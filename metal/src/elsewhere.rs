//! Without Metal: the same types, which no code can construct.

use crate::Refused;
use std::convert::Infallible;
use std::sync::Arc;

/// A GPU of Apple's.
#[derive(Debug)]
pub struct Card(Infallible);

/// Compiled kernels.
#[derive(Debug)]
pub struct Code(Infallible);

/// A session's memory and launches.
#[derive(Debug)]
pub struct Memory(Infallible);

#[expect(missing_docs, reason = "as on a system of Apple's")]
impl Card {
    pub fn new(_number: usize) -> Result<Self, String> {
        Err("Metal is there on macOS alone; use `--device cpu`".into())
    }

    pub fn title(&self) -> &str {
        match self.0 {}
    }

    pub fn free(&self) -> u64 {
        match self.0 {}
    }
}

#[expect(missing_docs, reason = "as on a system of Apple's")]
impl Memory {
    pub fn new(card: Arc<Card>) -> Self {
        match card.0 {}
    }

    pub fn allocate(&mut self, _bytes: u64) -> Result<u64, Refused> {
        match self.0 {}
    }

    pub fn load(&mut self, _text: &str, _entries: &[&str]) -> Result<Code, String> {
        match self.0 {}
    }

    pub fn write(&mut self, _address: u64, _bytes: &[u8]) -> Result<(), String> {
        match self.0 {}
    }

    pub fn read(&self, _address: u64, _bytes: &mut [u8]) -> Result<(), String> {
        match self.0 {}
    }

    pub fn launch(
        &mut self,
        _code: &Code,
        _entry: &str,
        _grid: u32,
        _block: u32,
        _arguments: &[u8],
    ) -> Result<(), String> {
        match self.0 {}
    }

    pub fn finish(&mut self) -> Result<(), String> {
        match self.0 {}
    }
}
