//! Devices by name, and the time that the roofline of their data sheet predicts.

use super::roofline::{Bound, Demand, Rates};
use serde::Serialize;

/// Peak rates of a device, by its maker's data sheet (dense, not sparse).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Device {
    /// The name that `--target` takes.
    pub name: &'static str,
    /// Its kind.
    pub title: &'static str,
    /// Peak FLOP/s of bf16 products with f32 accumulation.
    pub bf16: f64,
    /// Peak FLOP/s of f32 products.
    pub f32: f64,
    /// Bytes of memory moved a second.
    pub bandwidth: f64,
    /// Bytes of memory.
    pub memory: u64,
    /// Multiprocessors, each with blocks of its own.
    pub processors: u64,
    /// Bytes of shared memory that a block may have.
    pub shared: u64,
    /// Cycles of a second at which the peaks of its products are given.
    pub clock: f64,
}

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;

/// The devices known.
pub static DEVICES: &[Device] = &[
    Device {
        name: "h100",
        title: "NVIDIA H100 SXM 80 GB",
        bf16: 989.4e12,
        f32: 66.9e12,
        bandwidth: 3.35e12,
        memory: 80 * GIB,
        processors: 132,
        shared: 227 * KIB,
        clock: 1.83e9,
    },
    Device {
        name: "h200",
        title: "NVIDIA H200 SXM 141 GB",
        bf16: 989.4e12,
        f32: 66.9e12,
        bandwidth: 4.8e12,
        memory: 141 * GIB,
        processors: 132,
        shared: 227 * KIB,
        clock: 1.83e9,
    },
    Device {
        name: "a100",
        title: "NVIDIA A100 SXM 80 GB",
        bf16: 312e12,
        f32: 19.5e12,
        bandwidth: 2.039e12,
        memory: 80 * GIB,
        processors: 108,
        shared: 163 * KIB,
        clock: 1.41e9,
    },
    Device {
        name: "l40s",
        title: "NVIDIA L40S 48 GB",
        bf16: 362e12,
        f32: 91.6e12,
        bandwidth: 0.864e12,
        memory: 48 * GIB,
        processors: 142,
        shared: 99 * KIB,
        clock: 2.49e9,
    },
    Device {
        name: "rtx4090",
        title: "NVIDIA GeForce RTX 4090 24 GB",
        bf16: 165.2e12,
        f32: 82.6e12,
        bandwidth: 1.008e12,
        memory: 24 * GIB,
        processors: 128,
        shared: 99 * KIB,
        clock: 2.52e9,
    },
];

impl Device {
    /// The device of that name.
    pub fn find(name: &str) -> Option<&'static Device> {
        DEVICES.iter().find(|d| d.name.eq_ignore_ascii_case(name))
    }

    /// The names known, for messages.
    pub fn names() -> String {
        DEVICES.iter().map(|d| d.name).collect::<Vec<_>>().join(", ")
    }

    /// Peak FLOP/s of products of e4m3: twice those of bf16, by the data sheet of each GPU that has
    /// them.
    pub fn e4m3(&self) -> f64 {
        2.0 * self.bf16
    }

    /// The rates of its data sheet; an element-wise operation is one of f32.
    pub fn rates(&self) -> Rates {
        let &Device { bf16, f32, bandwidth, .. } = self;
        Rates { e4m3: self.e4m3(), bf16, f32, bandwidth, elementwise: f32 }
    }

    /// Time of `flops` FLOPs and `bytes` bytes a token.
    pub(super) fn roofline(&self, narrow: bool, flops: f64, bytes: f64) -> Roofline {
        let time = self.rates().time(Demand { flops, narrow, bytes, ..Demand::default() });
        Roofline { seconds_per_token: time.seconds, bound: time.bound }
    }
}

/// The larger of the time for the products at peak and the time for the bytes at full bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofline {
    /// Seconds for each token.
    pub seconds_per_token: f64,
    /// Which of the two it is.
    pub bound: Bound,
}

/// Predicted times on a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Which device.
    pub device: &'static Device,
    /// A generated token, one sequence at a time.
    pub decode: Roofline,
    /// A token of a prompt.
    pub prefill: Roofline,
    /// A token of a training step, the optimizer's traffic included.
    pub training: Roofline,
}
