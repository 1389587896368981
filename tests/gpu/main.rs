//! CUDA without a GPU: generated kernels compiled, interpreted, and run through a stand-in for the
//! driver.

#[path = "../support/mod.rs"]
mod support;

mod blocks;
mod codegen;
mod cuda;
mod e4m3;
mod hazards;
mod keys;
mod linear;
mod machine;
mod naive;
mod ptx;
#[cfg(feature = "rocm")]
mod rocm;
