//! A device that is not here: what a plan would take on it.
//!
//! *In*: a GPU by its data sheet, or a CPU by its threads. *Out*: a [`Device`] that answers what
//! preparation asks, as the real one does, and runs nothing. *Promise*: scratch and types of values
//! are those of the real device with as many processors; only cuBLASLt's workspace, which depends
//! on a library, is not in it.

use super::cpu::{CpuDevice, CpuOptions};
use super::gpu;
use crate::{Device, DeviceError, Group, Session};
use dreamc_compiler::count;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::Plan;
use dreamc_dsl::spec::Precision;

/// The device.
pub enum PaperDevice {
    /// A GPU.
    Gpu(&'static count::device::Device),
    /// A CPU of the kind that this program runs on, with other threads.
    Cpu(CpuDevice),
}

impl PaperDevice {
    /// The CPU with `threads` threads.
    pub fn cpu(threads: usize) -> Self {
        PaperDevice::Cpu(CpuDevice::new(CpuOptions { threads: Some(threads) }))
    }

    /// The architecture that texts of kernels are for.
    pub fn architecture(device: &count::device::Device) -> &'static str {
        match device.name {
            "h100" | "h200" => "sm_90a",
            "l40s" | "rtx4090" => "sm_89",
            _ => "sm_80",
        }
    }
}

impl Device for PaperDevice {
    fn name(&self) -> String {
        match self {
            PaperDevice::Gpu(device) => format!("{}, on paper", device.title),
            PaperDevice::Cpu(device) => format!("{}, on paper", device.name()),
        }
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        match self {
            PaperDevice::Gpu(device) => gpu::scratch_on_paper(plan, Self::architecture(device), device),
            PaperDevice::Cpu(device) => device.scratch_bytes(plan),
        }
    }

    fn narrow(&self, asked: Precision) -> Narrow {
        match (self, asked) {
            (PaperDevice::Cpu(device), _) => device.narrow(asked),
            (PaperDevice::Gpu(device), _) => gpu::narrow(asked, Self::architecture(device)),
        }
    }

    fn load(&self, _: &Plan, _: &Group) -> Result<Box<dyn Session>, DeviceError> {
        let message = "a device on paper runs nothing".into();
        Err(DeviceError::Driver { device: self.name(), message })
    }
}
