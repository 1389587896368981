//! The runtime of dreamc: a compiled program and data become a trained model.
pub mod adapt;
pub mod analysis;
pub mod bench;
pub mod calibrate;
pub mod checkpoint;
pub mod device;
pub mod evaluate;
pub mod generate;
pub mod gguf;
pub mod group;
pub mod hf;
pub mod init;
pub mod mapped;
pub mod model;
pub mod noise;
pub mod notice;
pub mod quantise;
pub mod statistics;
pub mod train;
pub mod verify;

pub use dreamc_data::{self as data, files, rng};
pub use dreamc_nvrtc as nvrtc;
