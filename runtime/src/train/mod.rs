//! Training.

pub mod error;
pub mod event;
pub mod folder;
pub mod ledger;
pub mod metrics;
pub mod schedule;
pub mod signal;
pub mod tensorboard;
