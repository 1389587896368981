//! Machines by name, or from a file: cards, links, rates, failures.

use dreamc_compiler::count::device::Device;
use dreamc_compiler::count::roofline::Rates;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;

/// A link of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its kind.
    pub name: String,
    /// Seconds that a message takes however short it is.
    pub latency: f64,
    /// Bytes a second in one direction.
    pub bandwidth: f64,
}

/// The way of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Rings of NCCL.
    Rings,
    /// All through rank 0, over TCP.
    Star,
}

/// Rates of a card that is in no table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnRates {
    /// Peak FLOP/s of products of bf16.
    pub bf16: f64,
    /// Peak FLOP/s of products of f32.
    pub f32: f64,
    /// Bytes of memory a second.
    pub bandwidth: f64,
    /// Element-wise operations a second.
    pub elementwise: f64,
    /// Seconds of a launch that does nothing.
    pub launch: f64,
}

/// A machine: nodes of equal cards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its name, as `--machine` takes it.
    pub name: String,
    /// For people.
    pub title: String,
    /// A GPU of `dreamc count --target`, whose kernels are priced by their code, or `cpu`, whose
    /// kernels are priced by `rates` alone.
    pub card: String,
    /// Bytes of memory of a card.
    pub memory: u64,
    /// Cards of a node; of a `cpu`, the most ranks of one.
    pub cards: u64,
    /// Rates, in place of those of the card's data sheet. Those of a `cpu` are of the whole node,
    /// which its ranks share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<OwnRates>,
    /// Seconds of a measured step over those of its kernels' prices.
    pub kernels: f64,
    /// The way of sums.
    pub way: Way,
    /// Between the cards of a node.
    pub inside: Link,
    /// Between nodes, of each card.
    pub between: Link,
    /// Between the hosts of ranks, where they meet; `between` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Link>,
    /// Bytes a second from a card to its host.
    pub copy: f64,
    /// Bytes a second that rank 0 writes to storage.
    pub storage: f64,
    /// Hours of one card between two failures that end a job.
    pub failure_hours: f64,
    /// Seconds from a failure to the first step of the job that goes on.
    pub restart: f64,
    /// Where the figures are from, by field.
    pub sources: BTreeMap<String, String>,
}

/// A machine that cannot be had.
#[derive(Debug, Error)]
pub enum MachineError {
    /// No file has that name, and no machine.
    #[error("no machine `{name}`: there are {known}, and files of one's own (docs/plan.md)")]
    Unknown {
        /// The name.
        name: String,
        /// The machines known.
        known: String,
    },
    /// The file is not a machine.
    #[error("{path}: {problem}")]
    Bad {
        /// Which file.
        path: String,
        /// The mistake, with its place.
        problem: String,
    },
}

/// The table, as it is in the repository.
pub const TABLE: &str = include_str!("../machines.json");

/// The machines of the table.
pub fn table() -> Vec<Machine> {
    serde_json::from_str(TABLE).unwrap_or_default()
}

/// The machine of that name, or of that file.
pub fn find(name: &str) -> Result<Machine, MachineError> {
    let mut known = table();
    if let Some(at) = known.iter().position(|machine| machine.name == name) {
        return Ok(known.swap_remove(at));
    }
    let unknown = || MachineError::Unknown {
        name: name.into(),
        known: known.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", "),
    };
    let bad = |problem: String| MachineError::Bad { path: name.into(), problem };
    let text = match std::fs::read_to_string(name) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(unknown()),
        Err(error) => return Err(bad(error.to_string())),
    };
    let machine: Machine = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
    machine.check().map_err(bad)?;
    Ok(machine)
}

impl Machine {
    /// The link between hosts.
    pub fn host(&self) -> &Link {
        self.host.as_ref().unwrap_or(&self.between)
    }

    /// The GPU whose kernels are priced; nothing for a CPU.
    pub fn device(&self) -> Option<&'static Device> {
        let device = Device::find(&self.card)?;
        let own = match self.rates {
            None => *device,
            Some(r) => Device { bf16: r.bf16, f32: r.f32, bandwidth: r.bandwidth, ..*device },
        };
        let own = Device { memory: self.memory, ..own };
        // A process plans for one machine: its device is as static as those of the table.
        if own == *device { Some(device) } else { Some(Box::leak(Box::new(own))) }
    }

    /// Rates of a rank of a CPU, one of `ranks` on its node, and seconds of a launch.
    pub fn shared_rates(&self, ranks: u64) -> Option<(Rates, f64)> {
        let r = self.rates?;
        let own = |rate: f64| rate / ranks.clamp(1, self.cards) as f64;
        let rates = Rates {
            // Rounded to bf16, and multiplied so.
            e4m3: own(r.bf16),
            bf16: own(r.bf16),
            f32: own(r.f32),
            bandwidth: own(r.bandwidth),
            elementwise: own(r.elementwise),
        };
        Some((rates, r.launch))
    }

    /// Refuses figures that no machine has.
    pub fn check(&self) -> Result<(), String> {
        let positive = [
            ("kernels", self.kernels),
            ("inside.bandwidth", self.inside.bandwidth),
            ("between.bandwidth", self.between.bandwidth),
            ("host.bandwidth", self.host().bandwidth),
            ("copy", self.copy),
            ("storage", self.storage),
            ("failure_hours", self.failure_hours),
        ];
        let rates = self.rates.iter().flat_map(|r| {
            [
                ("rates.bf16", r.bf16),
                ("rates.f32", r.f32),
                ("rates.bandwidth", r.bandwidth),
                ("rates.elementwise", r.elementwise),
            ]
        });
        if let Some((name, value)) =
            positive.into_iter().chain(rates).find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            return Err(format!("`{name}` is {value}, and must be above 0"));
        }
        let launch = self.rates.map_or(0.0, |r| r.launch);
        let least = [
            ("inside.latency", self.inside.latency),
            ("between.latency", self.between.latency),
            ("host.latency", self.host().latency),
            ("restart", self.restart),
            ("rates.launch", launch),
        ];
        if let Some((name, value)) =
            least.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0))
        {
            return Err(format!("`{name}` is {value}, and must be 0 or more"));
        }
        if self.cards == 0 || self.memory == 0 {
            return Err("`cards` and `memory` must be above 0".into());
        }
        match (self.card.as_str(), self.rates) {
            ("cpu", None) => Err("`rates` of a `cpu` are missing: `dreamc bench` measures them".into()),
            ("cpu", Some(_)) => Ok(()),
            (card, _) if Device::find(card).is_some() => Ok(()),
            (card, _) => Err(format!("`card` is `{card}`; there are {}, and cpu", Device::names())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dreamc_compiler::count::network::Network;

    #[test]
    fn the_table_is_of_machines_and_names_its_sources() {
        let all: Vec<Machine> = serde_json::from_str(TABLE).unwrap();
        assert_eq!(
            all.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(),
            ["h100x8", "h200x8", "a100x8", "cpu"]
        );
        for machine in &all {
            machine.check().unwrap();
            for field in
                ["memory", "kernels", "inside", "between", "copy", "storage", "failure_hours", "restart"]
            {
                assert!(machine.sources.contains_key(field), "{}: no source of {field}", machine.name);
            }
        }
    }

    #[test]
    fn links_are_those_of_count() {
        for machine in table() {
            let Some(device) = machine.device() else { continue };
            let network = Network::of(device);
            assert_eq!(machine.memory, device.memory);
            assert_eq!(
                (network.inside.latency, network.inside.bandwidth),
                (machine.inside.latency, machine.inside.bandwidth)
            );
            assert_eq!(
                (network.between.latency, network.between.bandwidth),
                (machine.between.latency, machine.between.bandwidth)
            );
        }
    }

    #[test]
    fn a_machine_that_is_wrong_is_refused_with_the_field() {
        let good = serde_json::to_value(&table()[0]).unwrap();
        let of = |field: &str, value: serde_json::Value| {
            let mut own = good.clone();
            own[field] = value;
            match serde_json::from_value::<Machine>(own) {
                Ok(machine) => machine.check().unwrap_err(),
                Err(error) => error.to_string(),
            }
        };
        assert!(of("card", "h300".into()).contains("`card` is `h300`; there are h100, "));
        assert!(of("card", "cpu".into()).contains("`rates` of a `cpu` are missing"));
        assert!(of("storage", 0.into()).contains("`storage` is 0"));
        assert!(of("cards", 0.into()).contains("`cards` and `memory`"));
        assert!(of("price", 2.into()).contains("unknown field `price`"));
        assert!(find("h100x9").unwrap_err().to_string().contains("there are h100x8, h200x8"));
    }
}
