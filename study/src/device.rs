//! Devices by their names.

use crate::failure::Failure;
use crate::ranks;
use dreamc_device::Device;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::cuda::CudaDevice;
use dreamc_device::poison::Poisoned;
use dreamc_device::ptx::{Options, PtxDevice, Schedule};
use std::fmt;
use std::str::FromStr;

/// Where to run.
#[derive(Clone, Debug)]
pub struct Where {
    /// The device.
    pub device: Kind,
    /// Threads of the CPU; all where none are named, shared by the ranks of a machine.
    pub threads: Option<usize>,
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
            Kind::Rocm(number) => Box::new(dreamc_device::rocm::RocmDevice::new(number)?),
            #[cfg(feature = "metal")]
            Kind::Metal(number) => Box::new(dreamc_device::metal::MetalDevice::new(number)?),
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

/// Names the GPUs that a process sees, where they are not all of them.
const CUDA_SHOWS: [&str; 1] = ["CUDA_VISIBLE_DEVICES"];

/// The GPU of a local rank: that of its number, or the only one where whoever started the process
/// shows it one alone, as `srun --gpus-per-task=1` does.
fn own_of(rank: usize, variable: &dyn Fn(&str) -> Option<String>, names: &[&str]) -> usize {
    let shows = |name: &&str| variable(name).filter(|list| !list.trim().is_empty());
    let one = names.iter().find_map(shows).is_some_and(|list| !list.trim().contains(','));
    if one { 0 } else { rank }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let own = |names: &[&str]| {
            let rank = ranks::here().map_or(0, |place| place.local_rank as usize);
            own_of(rank, &|name| std::env::var(name).ok(), names)
        };
        let (kind, number) = match text.split_once(':') {
            None => (text, None),
            Some((kind, number)) => (kind, Some(number.parse::<usize>())),
        };
        match (kind, number) {
            ("cpu", None) => Ok(Kind::Cpu),
            ("ptx", None) => Ok(Kind::Ptx),
            ("cuda", None) => Ok(Kind::Cuda(own(&CUDA_SHOWS))),
            ("cuda", Some(Ok(number))) => Ok(Kind::Cuda(number)),
            #[cfg(feature = "rocm")]
            ("rocm", None) => Ok(Kind::Rocm(own(&["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]))),
            #[cfg(feature = "rocm")]
            ("rocm", Some(Ok(number))) => Ok(Kind::Rocm(number)),
            #[cfg(feature = "metal")]
            ("metal", None) => Ok(Kind::Metal(own(&[]))),
            #[cfg(feature = "metal")]
            ("metal", Some(Ok(number))) => Ok(Kind::Metal(number)),
            _ => {
                Err("there are cpu, cuda, cuda:NUMBER, rocm, rocm:NUMBER, metal, metal:NUMBER and ptx".into())
            }
        }
    }
}

/// A device and its name.
pub type Named = (String, Box<dyn Device>);

impl Where {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_is_shown() {
        let of = |rank, list: Option<&str>| {
            own_of(
                rank,
                &|name| list.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(String::from),
                &CUDA_SHOWS,
            )
        };
        for (rank, list, expected) in [
            (0, None, 0),
            (3, None, 3),
            // As `srun --gpus-per-task=1` starts the fourth task, with and without a cgroup of its
            // own.
            (3, Some("0"), 0),
            (3, Some("3"), 0),
            (3, Some("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"), 0),
            // All tasks see the four of the step.
            (3, Some("0,1,2,3"), 3),
            (1, Some("4, 5"), 1),
            (1, Some(""), 1),
        ] {
            assert_eq!(of(rank, list), expected, "local rank {rank}, {list:?}");
        }
    }
}
