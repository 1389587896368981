//! The runtime of dreamc: a compiled program and data become a trained model.
pub mod analysis;
pub mod bench;
pub mod checkpoint;
pub mod data;
pub mod device;
pub mod evaluate;
pub mod files;
mod foreign;
pub mod generate;
pub mod import;
pub mod init;
pub mod machine;
pub mod model;
pub mod nvrtc;
pub mod rng;
pub mod statistics;
pub mod train;
pub mod verify;
