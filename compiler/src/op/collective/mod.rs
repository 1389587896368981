//! Sums over the ranks of a group.

pub mod kernel;
