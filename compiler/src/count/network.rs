//! The time of a training step on many GPUs: the α–β model of collectives.
//!
//! *In*: a device, a number of GPUs, bytes of gradients, the time of one GPU for all tokens of a
//! step. *Out*: a [`Scaling`]. *Promise*: a bound on paper by the makers' data sheets, of
//! collectives as NCCL has them; dreamc's own ranks do not reach it.
//!
//! A message of `b` bytes over a link takes `α + b / β` (Hockney, 1994). Gradients are summed as
//! NCCL does on nodes with fast links inside: a ring reduce-scatter inside each node, a ring
//! all-reduce of each part between the nodes, and a ring all-gather inside. A ring of `p` takes
//! `p - 1` messages of `1 / p` of the bytes for each of reduce-scatter and all-gather (Thakur,
//! Rabenseifner, Gropp, 2005, section 4).

use super::device::Device;
use serde::Serialize;

/// A link of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Its kind.
    pub name: &'static str,
    /// Seconds that a message takes however short it is: NCCL's own figures for rings of its
    /// protocol for long messages (`hwLat` in its `tuning.cc`).
    pub latency: f64,
    /// Bytes a second in one direction.
    pub bandwidth: f64,
}

/// The links of a device in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Network {
    /// GPUs of a node.
    pub node: u64,
    /// Between the GPUs of a node.
    pub inside: Link,
    /// Between nodes, of each GPU.
    pub between: Link,
}

const fn inside(name: &'static str, latency: f64, bandwidth: f64) -> Link {
    Link { name, latency, bandwidth }
}

const fn between(name: &'static str, bandwidth: f64) -> Link {
    Link { name, latency: 14e-6, bandwidth }
}

impl Network {
    /// That of a device as its maker builds nodes of it: an adapter for each GPU.
    pub fn of(device: &Device) -> Self {
        let (inside, between) = match device.name {
            "h100" | "h200" => (inside("NVLink 4", 3.4e-6, 450e9), between("InfiniBand NDR, 400 Gb/s", 50e9)),
            "a100" => (inside("NVLink 3", 3.4e-6, 300e9), between("InfiniBand HDR, 200 Gb/s", 25e9)),
            _ => (inside("PCIe 4.0 x16", 5.7e-6, 31.5e9), between("Ethernet, 100 Gb/s", 12.5e9)),
        };
        Network { node: 8, inside, between }
    }

    /// Seconds for the sum of `bytes` bytes over all GPUs, left on all.
    pub fn all_reduce(&self, gpus: u64, bytes: f64) -> f64 {
        2.0 * self.half(gpus, bytes)
    }

    /// Seconds for the sum of `bytes` bytes when each GPU gets its part, or for such parts to be
    /// handed to all.
    pub fn half(&self, gpus: u64, bytes: f64) -> f64 {
        let (inside, nodes) = (gpus.clamp(1, self.node), gpus.div_ceil(self.node).max(1));
        // One pass of a ring: each message is a part of the bytes.
        let pass = |ranks: u64, bytes: f64, link: &Link| {
            (ranks - 1) as f64 * (link.latency + bytes / ranks as f64 / link.bandwidth)
        };
        pass(inside, bytes, &self.inside) + pass(nodes, bytes / inside as f64, &self.between)
    }
}

/// A step on many GPUs, each with an equal part of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scaling {
    /// How many.
    pub gpus: u64,
    /// Rows of the batch; each GPU has the same number.
    pub rows: u64,
    /// Their links.
    pub network: Network,
    /// Seconds of each GPU for its tokens.
    pub compute: f64,
    /// Seconds of the sum of gradients.
    pub communication: f64,
    /// Seconds of a step where the sum overlaps the backward as far as it can.
    pub hidden: f64,
    /// Seconds of a step where the sum comes after the backward.
    pub exposed: f64,
    /// Speed over `gpus` times the speed of one GPU, where the sum comes after the backward.
    pub efficiency: f64,
}

impl Scaling {
    /// Of a step of `rows` rows that takes one GPU `seconds`, with `gradients` bytes of gradients.
    pub fn new(device: &Device, gpus: u64, rows: u64, seconds: f64, gradients: f64) -> Self {
        let network = Network::of(device);
        let gpus = gpus.max(1);
        let (compute, communication) = (seconds / gpus as f64, network.all_reduce(gpus, gradients));
        // The backward is two thirds of the matmuls of a step.
        let hidden = compute + (communication - compute * 2.0 / 3.0).max(0.0);
        let exposed = compute + communication;
        Scaling {
            gpus,
            rows,
            network,
            compute,
            communication,
            hidden,
            exposed,
            efficiency: compute / exposed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{found}, not {expected}");
    }

    #[test]
    fn collectives_take_what_rings_take() {
        let network = Network::of(Device::find("h100").unwrap());
        assert_eq!(network.all_reduce(1, 1e9), 0.0);
        // Two GPUs: two messages of half the bytes.
        close(network.all_reduce(2, 1e9), 2.0 * (3.4e-6 + 0.5e9 / 450e9));
        // Two nodes: an eighth of the bytes goes between them, in two messages of half of it.
        let inside = 2.0 * 7.0 * (3.4e-6 + 0.125e9 / 450e9);
        close(network.all_reduce(16, 1e9), inside + 2.0 * (14e-6 + 0.0625e9 / 50e9));
    }

    #[test]
    fn more_gpus_are_faster_and_less_efficient() {
        let device = Device::find("h200").unwrap();
        let of = |gpus| Scaling::new(device, gpus, 1024, 1.0, 4e9);
        let one = of(1);
        assert_eq!((one.hidden, one.exposed, one.efficiency), (1.0, 1.0, 1.0));
        for gpus in [1, 2, 8, 64, 512] {
            let (few, many) = (of(gpus), of(2 * gpus));
            assert!(many.compute < few.compute && many.efficiency < few.efficiency, "{gpus}");
            assert!(many.hidden <= many.exposed && many.hidden >= many.compute, "{gpus}");
        }
    }
}
