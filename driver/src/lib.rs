//! A stand-in for the CUDA driver: a `libcuda.so.1` that runs kernels on the PTX interpreter, so
//! that everything which the `cuda` device asks of a driver happens in tests, on machines without a
//! GPU.
//!
//! *In*: the calls of the driver's C interface that dreamc makes, and `STANDIN` ([`Settings`]).
//! *Out*: what a driver would give, a fault where one is asked for, and a log of what was done and
//! what broke a rule. *Promise*: of all that NVIDIA documents as possible, what hurts a careless
//! caller most. Work on a stream is done when something waits for it and not before; copies read
//! and write host memory then; an access outside allocations is an error of a later call, and of
//! every call from then on; what a capture forbids ends the capture.
//!
//! [`machine`] has the rules, each with the place of NVIDIA's documentation that it is from;
//! [`api`] is the C interface over it, [`hip`] that of AMD's runtime and compiler over the same;
//! [`nvrtc`] wraps NVRTC, so that what it gives as machine code is PTX under a line that names the
//! card; [`cublaslt`] is what of cuBLASLt dreamc calls, [`nccl`] what of NCCL, and [`library`] the
//! form of their calls. [`order`] knows which work of several streams comes after which.

pub mod api;
pub mod cublaslt;
pub mod hip;
pub mod library;
pub mod machine;
pub mod nccl;
pub mod nvrtc;
pub mod order;
pub mod settings;

pub use machine::Machine;
pub use settings::Settings;

/// The first words of what [`nvrtc`] gives as machine code; the architecture and a new line follow,
/// then PTX.
pub const CUBIN: &str = "stand-in machine code for ";
