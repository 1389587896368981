//! Devices on the command line.

use crate::failure::Failure;
use crate::ranks;
use clap::{Args, ValueEnum};
use dreamc_runtime::device::Device;
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::device::cuda::CudaDevice;
use dreamc_runtime::device::poison::Poisoned;
use dreamc_runtime::device::ptx::{Options, PtxDevice, Schedule};
use std::fmt;
use std::str::FromStr;

/// Where to run.
#[derive(Args, Clone)]
pub struct DeviceArguments {
    /// Where to run: cpu, cuda (of several ranks each its own), cuda:1, …, rocm (a GPU of AMD's,
    /// by naive kernels, tried on none yet), metal (Apple's, likewise), or ptx (the GPU's kernels,
    /// interpreted and checked)
    #[arg(long, default_value_t = Kind::Cpu)]
    pub device: Kind,

    /// Threads of the CPU; all by default, shared by the ranks of a machine
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
}

/// The arithmetic of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arithmetic {
    /// Everywhere
    F32,
    /// Products and storage; sums, statistics and weights in f32
    Bf16,
}

/// The devices there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This machine's processor
    Cpu,
    /// An NVIDIA GPU by number
    Cuda(usize),
    /// An AMD GPU by number
    #[cfg(feature = "rocm")]
    Rocm(usize),
    /// A GPU of Apple's by number
    #[cfg(feature = "metal")]
    Metal(usize),
    /// The interpreter of generated kernels
    Ptx,
}

impl Kind {
    /// Opens the device, a processor with `threads` threads.
    pub fn open(self, threads: Option<usize>) -> Result<Box<dyn Device>, Failure> {
        Ok(match self {
            Kind::Cpu => Box::new(CpuDevice::new(CpuOptions { threads })),
            Kind::Cuda(number) => Box::new(CudaDevice::new(number)?),
            #[cfg(feature = "rocm")]
            Kind::Rocm(number) => Box::new(dreamc_runtime::device::rocm::RocmDevice::new(number)?),
            #[cfg(feature = "metal")]
            Kind::Metal(number) => Box::new(dreamc_runtime::device::metal::MetalDevice::new(number)?),
            Kind::Ptx => Box::new(PtxDevice::checked()?),
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Cpu => f.write_str("cpu"),
            Kind::Cuda(number) => write!(f, "cuda:{number}"),
            #[cfg(feature = "rocm")]
            Kind::Rocm(number) => write!(f, "rocm:{number}"),
            #[cfg(feature = "metal")]
            Kind::Metal(number) => write!(f, "metal:{number}"),
            Kind::Ptx => f.write_str("ptx"),
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let own = || ranks::here().map_or(0, |place| place.local_rank as usize);
        let (kind, number) = match text.split_once(':') {
            None => (text, None),
            Some((kind, number)) => (kind, Some(number.parse::<usize>())),
        };
        match (kind, number) {
            ("cpu", None) => Ok(Kind::Cpu),
            ("ptx", None) => Ok(Kind::Ptx),
            ("cuda", None) => Ok(Kind::Cuda(own())),
            ("cuda", Some(Ok(number))) => Ok(Kind::Cuda(number)),
            #[cfg(feature = "rocm")]
            ("rocm", None) => Ok(Kind::Rocm(own())),
            #[cfg(feature = "rocm")]
            ("rocm", Some(Ok(number))) => Ok(Kind::Rocm(number)),
            #[cfg(feature = "metal")]
            ("metal", None) => Ok(Kind::Metal(own())),
            #[cfg(feature = "metal")]
            ("metal", Some(Ok(number))) => Ok(Kind::Metal(number)),
            _ => {
                Err("there are cpu, cuda, cuda:NUMBER, rocm, rocm:NUMBER, metal, metal:NUMBER and ptx".into())
            }
        }
    }
}

/// Most threads: a machine has fewer, and of many more the system has no room for their stacks.
const MOST_THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    threads.ok_or_else(|| format!("a number of threads from 1 to {MOST_THREADS}"))
}

/// A device and its name.
pub type Named = (String, Box<dyn Device>);

impl DeviceArguments {
    /// Opens the device.
    pub fn open(&self) -> Result<Box<dyn Device>, Failure> {
        let device = self.device.open(self.threads.or_else(ranks::threads))?;
        match std::env::var("DREAMC_POISON") {
            Ok(value) if value == "1" => Ok(Box::new(Poisoned(device))),
            _ => Ok(device),
        }
    }

    /// The device alone, with its name.
    fn alone(&self) -> Result<Vec<Named>, Failure> {
        let device = self.open()?;
        Ok(vec![(device.name(), device)])
    }

    /// The devices to compare with the CPU, each with a name: nothing where the CPU is asked for;
    /// the interpreter of kernels under two schedules.
    pub fn compared(&self, seed: u64) -> Result<Vec<Named>, Failure> {
        match self.device {
            Kind::Cpu => Ok(vec![]),
            Kind::Cuda(_) => self.alone(),
            #[cfg(feature = "rocm")]
            Kind::Rocm(_) => self.alone(),
            #[cfg(feature = "metal")]
            Kind::Metal(_) => self.alone(),
            Kind::Ptx => {
                let schedules =
                    [("in order", Schedule::Forward), ("in random order", Schedule::Random(seed))];
                let under = |(name, schedule): (&str, Schedule)| -> Result<Named, Failure> {
                    let device = PtxDevice::new(Options { schedule, ..Options::default() })?;
                    Ok((format!("{} {name}", device.name()), Box::new(device)))
                };
                schedules.into_iter().map(under).collect()
            }
        }
    }
}
