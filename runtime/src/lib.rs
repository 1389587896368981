//! The runtime of dreamc: a compiled program and data become a trained model.
//!
//! *In*: a plan and a device that runs it (`dreamc-device`). *Out*: training, checkpoints,
//! generation, evaluation, analyses.
pub mod adapt;
pub mod analysis;
pub mod bench;
pub mod calibrate;
pub mod checkpoint;
pub mod evaluate;
pub mod generate;
pub mod init;
pub mod model;
pub mod noise;
pub mod quantise;
pub mod statistics;
pub mod train;
