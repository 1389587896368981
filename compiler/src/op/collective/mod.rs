//! Exchanges of the ranks of a group: sums, and parts handed to all.

pub mod kernel;
