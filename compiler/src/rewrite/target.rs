//! What a device is, as far as choosing between equal programs goes: a roofline and the price of a launch.

/// A device by its roofline. Figures are what generated kernels reach, not data sheets, and only their ratios decide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Its name, as `--target` takes it.
    pub name: &'static str,
    /// Multiplies and adds of products in a second.
    pub flops: f64,
    /// Bytes of memory read or written in a second.
    pub bandwidth: f64,
    /// Element-wise operations in a second.
    pub elementwise: f64,
    /// Seconds that a launch costs whatever it does.
    pub launch: f64,
    /// A value of more bytes should not be stored at all: it is charged [`Target::SPILL`] times.
    pub large: f64,
}

impl Target {
    /// Factor on the bytes of a value that should not be stored.
    pub const SPILL: f64 = 32.0;

    /// All targets. The first is the default.
    pub const ALL: [Target; 5] = [
        Target { name: "cpu", flops: 6e10, bandwidth: 1.2e10, elementwise: 4e9, launch: 4e-6, large: 2.7e8 },
        Target { name: "a100", flops: 1.2e14, bandwidth: 1.4e12, elementwise: 8e12, launch: 3e-6, large: 2.1e9 },
        Target { name: "h100", flops: 3.5e14, bandwidth: 2.6e12, elementwise: 2e13, launch: 3e-6, large: 4.2e9 },
        Target { name: "h200", flops: 3.5e14, bandwidth: 3.8e12, elementwise: 2e13, launch: 3e-6, large: 4.2e9 },
        Target { name: "rtx4090", flops: 1.2e14, bandwidth: 8e11, elementwise: 2e13, launch: 3e-6, large: 1.1e9 },
    ];

    /// The target of that name.
    pub fn named(name: &str) -> Option<Target> {
        Self::ALL.into_iter().find(|t| t.name == name)
    }
}

impl Default for Target {
    fn default() -> Self {
        Self::ALL[0]
    }
}
