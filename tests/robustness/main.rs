//! Bad inputs and killed runs: each is an error or goes on, and nothing is lost. `faults`, a
//! program of its own, puts faults into the compiler.

#[path = "../support/mod.rs"]
mod support;

mod fuzz;
mod survive;
