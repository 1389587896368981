//! The compiler of dreamc: a checked specification becomes a program of launches.
pub mod architecture;
pub mod autodiff;
pub mod build;
pub mod compiled;
pub mod error;
pub mod ir;
pub mod lower;
pub mod program;

pub use error::CompileError;
