//! Devices on the command line.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use dreamc_runtime::device::Device;
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};

/// Where to run.
#[derive(Args)]
pub struct DeviceArguments {
    /// Where to run
    #[arg(long, value_enum, default_value_t = Kind::Cpu)]
    pub device: Kind,

    /// Threads of the CPU; all by default
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// The devices there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// This machine's processor
    Cpu,
}

impl DeviceArguments {
    /// Opens the device.
    pub fn open(&self) -> Result<Box<dyn Device>, Failure> {
        if self.threads == Some(0) {
            return Err(Failure::Usage("--threads 0: at least one thread is needed".into()));
        }
        match self.device {
            Kind::Cpu => Ok(Box::new(CpuDevice::new(CpuOptions { threads: self.threads }))),
        }
    }
}
