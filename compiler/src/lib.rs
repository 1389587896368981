//! The compiler of dreamc: a checked specification becomes a program of launches.
//!
//! [`compile()`] names the passes in order; each is a module whose front page says what comes in
//! and what goes out.

pub mod ahead;
pub mod architecture;
mod assemble;
pub mod autodiff;
pub mod bind;
pub mod build;
pub mod codegen;
pub mod compiled;
pub mod count;
pub mod error;
mod experts;
pub mod fields;
pub mod format;
mod forms;
pub mod ir;
pub mod lower;
pub mod matching;
mod memory;
mod observe;
pub mod op;
mod optim;
pub mod oracle;
mod overlap;
mod passes;
mod pipeline;
mod plan_text;
pub mod precision;
pub mod probe;
pub mod program;
pub mod random;
mod recipe;
mod resolve;
pub mod rewrite;
pub mod schedule;
mod spread;
pub mod statement;
pub mod teach;
pub mod transfer;
pub mod wiring;

pub use architecture::looks_ahead;
pub use compiled::Compiled;
pub use error::CompileError;
pub use passes::{PASSES, Pass, Timing, Watch};
pub use pipeline::{
    Cache, Options, compile, compile_timed, compile_together, compile_watched, compile_with_report,
    compile_within,
};
pub use recipe::matches;
