//! The roofline: how long work takes at given rates, and which of them bounds it.
//!
//! *In*: [`Rates`], of a data sheet ([`Device::rates`](super::device::Device::rates)) or of what
//! kernels reach ([`Target`](crate::rewrite::Target)), and a [`Demand`]. *Out*: a [`Time`].
//! *Promise*: `count`, `explain` (the extraction of rewriting) and `compile --emit kernels` all ask
//! here, so that equal work takes equal time in each.

use serde::Serialize;
use std::fmt;

/// The work of a device in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Multiplies and adds of products of codes of e4m3.
    pub e4m3: f64,
    /// Multiplies and adds of products of bf16.
    pub bf16: f64,
    /// Those of products of f32.
    pub f32: f64,
    /// Bytes of memory read or written.
    pub bandwidth: f64,
    /// Element-wise operations.
    pub elementwise: f64,
}

/// Work of a kernel, of a token, or of anything else that runs by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Multiplies and adds of products.
    pub flops: f64,
    /// Whether these are of bf16.
    pub narrow: bool,
    /// Whether these are of codes of e4m3.
    pub codes: bool,
    /// Bytes read and written.
    pub bytes: f64,
    /// Element-wise operations.
    pub elementwise: f64,
}

/// The limit of a roofline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Bound {
    /// Products of bf16, on the tensor cores.
    #[serde(rename = "compute")]
    TensorCores,
    /// Products of codes of e4m3, there, too.
    #[serde(rename = "compute")]
    Codes,
    /// Products of f32.
    #[serde(rename = "compute")]
    F32,
    /// Bytes of memory.
    #[serde(rename = "bandwidth")]
    Memory,
    /// Element-wise operations.
    #[serde(rename = "elementwise")]
    Elementwise,
    /// Messages between GPUs, which no [`Rates`] give.
    #[serde(rename = "network")]
    Network,
}

/// The part of a [`Demand`] that takes longest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Time {
    /// How long.
    pub seconds: f64,
    /// Which part.
    pub bound: Bound,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Bound::TensorCores => "bf16",
            Bound::Codes => "e4m3",
            Bound::F32 => "f32",
            Bound::Memory => "memory",
            Bound::Elementwise => "elementwise",
            Bound::Network => "network",
        })
    }
}

impl Rates {
    /// Multiplies and adds of products in a second, and what makes them.
    fn products(&self, of: &Demand) -> (f64, Bound) {
        match (of.codes, of.narrow) {
            (true, _) => (self.e4m3, Bound::Codes),
            (false, true) => (self.bf16, Bound::TensorCores),
            (false, false) => (self.f32, Bound::F32),
        }
    }

    /// The longest of products, traffic and element-wise operations, which overlap; the first of
    /// them where they are equal.
    pub fn time(&self, of: Demand) -> Time {
        let (rate, unit) = self.products(&of);
        let products = Time { seconds: of.flops / rate, bound: unit };
        let others = [
            Time { seconds: of.bytes / self.bandwidth, bound: Bound::Memory },
            Time { seconds: of.elementwise / self.elementwise, bound: Bound::Elementwise },
        ];
        others.into_iter().fold(products, |longest, t| if t.seconds > longest.seconds { t } else { longest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_part_bounds() {
        let rates = Rates { e4m3: 16.0, bf16: 8.0, f32: 2.0, bandwidth: 4.0, elementwise: 1.0 };
        let of = |flops, narrow, bytes, elementwise| {
            let time = rates.time(Demand { flops, narrow, codes: false, bytes, elementwise });
            (time.seconds, time.bound)
        };
        assert_eq!(of(8.0, true, 4.0, 1.0), (1.0, Bound::TensorCores));
        assert_eq!(of(8.0, false, 4.0, 1.0), (4.0, Bound::F32));
        assert_eq!(of(8.0, true, 8.0, 1.0), (2.0, Bound::Memory));
        assert_eq!(of(0.0, true, 0.0, 3.0), (3.0, Bound::Elementwise));
        let codes = rates.time(Demand { flops: 8.0, codes: true, ..Demand::default() });
        assert_eq!((codes.seconds, codes.bound), (0.5, Bound::Codes));
    }
}
