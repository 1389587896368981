//! A device as far as choosing between equal programs goes: a roofline and the price of a launch.

use crate::count::device::{DEVICES, Device};
use crate::count::roofline::Rates;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A device by its roofline. Figures are what kernels reach, not data sheets, and only their ratios
/// decide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Its name, as `--target` takes it.
    pub name: &'static str,
    /// The rates of its roofline.
    pub rates: Rates,
    /// Seconds that a launch costs whatever it does.
    pub launch: f64,
    /// A value of more bytes should not be stored at all: it is charged [`Target::SPILL`] times, on
    /// top of what it costs.
    pub large: f64,
}

impl Target {
    /// Factor on the bytes of a value that should not be stored.
    pub const SPILL: f64 = 32.0;

    /// The CPU of a small machine.
    pub const CPU: Target = Target {
        name: "cpu",
        rates: Rates { e4m3: 6e10, bf16: 6e10, f32: 6e10, bandwidth: 1.2e10, elementwise: 4e9 },
        launch: 4e-6,
        large: 2.7e8,
    };

    /// `cpu`, or a device that [`count`](crate::count) knows.
    pub fn named(name: &str) -> Option<Target> {
        if name == Self::CPU.name { Some(Self::CPU) } else { Device::find(name).map(Target::of) }
    }

    /// A device by the name that it gives itself: that GPU, or one of the table's kind where it is
    /// not there, since GPUs differ less from one another than from a CPU.
    pub fn of_name(name: &str) -> Target {
        let name = name.replace(' ', "").to_lowercase();
        let known = DEVICES.iter().find(|d| name.contains(d.name)).or(DEVICES.first());
        match known {
            Some(device) if !name.starts_with(Self::CPU.name) => Target::of(device),
            _ => Self::CPU,
        }
    }

    /// A GPU: what generated kernels reach of its data sheet.
    pub fn of(device: &'static Device) -> Target {
        let rates = Rates {
            e4m3: 0.5 * device.e4m3(),
            bf16: 0.5 * device.bf16,
            f32: 0.5 * device.f32,
            bandwidth: 0.8 * device.bandwidth,
            elementwise: 0.25 * device.f32,
        };
        Target { name: device.name, rates, launch: 3e-6, large: device.memory as f64 / 64.0 }
    }

    /// The names known, for messages.
    pub fn names() -> String {
        format!("{}, {}", Self::CPU.name, Device::names())
    }
}

/// Its name.
impl Serialize for Target {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        let unknown = || D::Error::custom(format!("no target `{name}`; there are {}", Target::names()));
        Target::named(&name).ok_or_else(unknown)
    }
}

impl Default for Target {
    fn default() -> Self {
        Self::CPU
    }
}
