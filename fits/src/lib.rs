//! Scaling laws from tables of runs.
//!
//! *In*: a [`Table`] of finished runs: parameters, tokens, FLOPs, held-out loss, seed, by arm.
//! *Out*: for each arm a [`Fit`] of a [`Law`] with an interval for every constant, the loss at the
//! optimum of each budget ([`iso`]), and the [`speedup`] of one arm over another. *Promise*: equal
//! tables and seeds give equal bits; a table that cannot determine a law is refused with the number
//! of runs that would; every interval comes with its number of resamples.
//!
//! Losses are fitted as logarithms with the Huber loss (Hoffmann et al., *Training Compute-Optimal
//! Large Language Models*, 2203.15556, section 3.3 and appendix D.3). Starts come from a grid over
//! the exponents, for which the other constants are a linear problem (variable projection;
//! 2603.22339 shows that parabolas alone are biased).
//!
//! Look next at [`law`] (the formulas), [`solve`] (the minimiser), [`iso`] (budgets) and [`table`]
//! (the file).

pub mod iso;
pub mod law;
pub mod solve;
mod speedup;
pub mod table;

pub use law::{Constant, Fit, Law, Options, fit};
pub use speedup::{Speedup, speedup};
pub use table::{Run, Table, TableError};

use thiserror::Error;

/// Runs that determine no law.
#[derive(Debug, Error, PartialEq)]
pub enum FitError {
    /// Fewer runs than the constants need.
    #[error("{law} has {constants} constants: it needs at least {needed} runs, and there are {found}")]
    TooFew {
        /// The law.
        law: &'static str,
        /// Its constants.
        constants: usize,
        /// Runs that would do.
        needed: usize,
        /// Runs there are.
        found: usize,
    },
    /// A variable that hardly moves, so that its exponent could be anything.
    #[error("{variable} takes {found} different values: an exponent needs at least {needed}")]
    Constant {
        /// The variable.
        variable: &'static str,
        /// Different values found.
        found: usize,
        /// Different values that would do.
        needed: usize,
    },
    /// Runs that leave a constant open.
    #[error(
        "the runs do not determine {constant} of {law}: its best value is {value:.3e}, without an interval or against the law's meaning"
    )]
    Undetermined {
        /// The law.
        law: &'static str,
        /// The constant.
        constant: &'static str,
        /// Its estimate.
        value: f64,
    },
    /// No start of the minimiser ended at a finite loss.
    #[error("the fit of {law} did not converge from any of {starts} starts")]
    Diverged {
        /// The law.
        law: &'static str,
        /// How many starts were tried.
        starts: usize,
    },
}
