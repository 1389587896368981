//! Proofs of kernels on the GPU that runs them: each against its naive kernel, on the same memory.
//!
//! *In*: a plan and a device. *Out*: a [`Verdict`] for each distinct launch and [`Rung`].
//! *Promise*: code that nobody trusts yet runs in a process of its own, which ends where it faults
//! or does not end ([`watch`]); the numbers that launches read are those of a step, so integers are
//! what earlier launches left; whatever a rung did to memory is undone before the next one runs.
//!
//! [`Trial`] is what a process is given: texts, the order of launches, what memory holds at the
//! beginning. [`child`] runs it and says [`Event`]s; [`held`] keeps what rungs left, and compares
//! it on the device; [`watch`] starts processes, listens, and goes on without what ended one.
//! [`trust`] does so for a plan that is loaded, and keeps what was found; [`cases`] are the models
//! of `dreamc doctor --gpu`.

pub mod cases;
mod child;
mod held;
mod trial;
mod trust;
mod watch;

pub use trial::{Number, Trial};
pub use trust::prove_by;
pub use watch::{Prover, watch};

pub(crate) use child::child;
pub(crate) use trust::{Meeting, Trust};

use crate::DeviceError;
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;

/// Which of the texts that a kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// For Hopper alone: `wgmma` and the copy engine.
    Hopper,
    /// For every GPU from compute capability 8.0 on.
    Common,
    /// A thread for each element of a result: the arbiter.
    Naive,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Rung::Hopper => "hopper",
            Rung::Common => "common",
            Rung::Naive => "naive",
        })
    }
}

/// How a rung did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "outcome")]
pub enum Outcome {
    /// It ran, and what it left is so far from what the naive kernel left.
    Ran {
        /// The largest difference of two numbers, relative to the largest number of the buffer;
        /// [`f64::MAX`] where integers differ or a NaN meets a number.
        error: f64,
        /// The difference that rounding may make.
        bound: f64,
        /// The buffer with the largest difference.
        buffer: String,
        /// Seconds of a launch; 0 where the device has no clock.
        seconds: f64,
    },
    /// It has no code, for this reason.
    Uncompiled {
        /// The compiler's or the driver's words.
        why: String,
    },
    /// The device reported a failure.
    Faults {
        /// Its words.
        why: String,
    },
    /// It reported nothing for too long.
    Hangs {
        /// How many.
        seconds: u64,
    },
}

impl Outcome {
    /// Whether the rung may be used.
    pub fn right(&self) -> bool {
        matches!(self, Outcome::Ran { error, bound, .. } if error <= bound)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Outcome::Ran { error, bound, .. } if error <= bound => {
                write!(f, "{error:.1e} from the naive kernel's, rounding may make {bound:.0e}")
            }
            Outcome::Ran { error, bound, buffer, .. } if *error == f64::MAX => {
                write!(
                    f,
                    "{buffer} holds other integers than the naive kernel's, or no numbers (bound {bound:.0e})"
                )
            }
            Outcome::Ran { error, bound, buffer, .. } => write!(
                f,
                "{buffer} is {error:.1e} of its largest number from the naive kernel's; rounding may make {bound:.0e}"
            ),
            Outcome::Uncompiled { why } => write!(f, "there is no code for it: {why}"),
            Outcome::Faults { why } => write!(f, "it failed: {why}"),
            Outcome::Hangs { seconds } => write!(f, "it did not end in {seconds} s"),
        }
    }
}

/// The outcome of a proof of one rung of a launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Number of the launch in its trial.
    pub launch: usize,
    /// Which text.
    pub rung: Rung,
    /// How it did.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Lines of a process that proves, JSON each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Event {
    /// It is at work, with what is not a launch.
    Busy,
    /// A rung of a launch begins.
    Begun(usize, Rung),
    /// A rung is done.
    Proved(Verdict),
    /// All launches are done.
    Ended,
}

/// Why a trial came to no end.
#[derive(Debug, Error)]
pub enum ProofError {
    /// The device, before any launch.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The process that proves did not start or ended before any launch.
    #[error("the process that proves kernels {0}")]
    Process(String),
    /// A model of the doctor's has no plan: a bug.
    #[error("{case}: {why}")]
    Case {
        /// Which.
        case: &'static str,
        /// The compiler's words.
        why: String,
    },
}
