//! The machines that programs run on.

pub mod ptx;
