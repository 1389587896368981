//! The runtime of dreamc: a compiled program and data become a trained model.
pub mod checkpoint;
pub mod data;
pub mod device;
pub mod files;
pub mod init;
pub mod nvrtc;
pub mod rng;
