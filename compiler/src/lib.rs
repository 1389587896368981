//! The compiler of dreamc: a checked specification becomes a program of launches.
pub mod compiled;
pub mod ir;
pub mod program;
