//! Training: from a compiled model and data to a run folder that can be taken up again at any
//! moment.
//!
//! The way of a run: [`prepare`] compiles and says what it will take, [`folder`] makes or takes
//! over a folder and locks it, [`run`] is the loop. It leaves [`metrics`] (with routers'
//! [`health`]) and [`tensorboard`] files, checkpoints, [`sample`]s and a [`ledger`], and tells a
//! [`event::Watcher`] what happens. [`schedule`] gives the learning rate of a step, [`changes`]
//! refuses to continue with something else, [`preferences`] keeps what pairs were worth before,
//! `writing` writes checkpoints while it goes on, `pace` names a rank that is slow, [`teacher`]
//! runs a teacher with it (`stored` keeps its values), [`signal`] turns Ctrl-C into a checkpoint.

pub mod changes;
pub mod error;
pub mod event;
pub mod folder;
pub mod guard;
pub mod health;
pub mod ledger;
pub mod metrics;
mod pace;
pub mod preferences;
pub mod prepare;
pub mod run;
pub mod sample;
pub mod schedule;
pub mod signal;
mod stored;
pub mod teacher;
pub mod tensorboard;
mod writing;

pub use error::TrainError;
pub use prepare::{Prepared, prepare};
pub use run::{Outcome, Setup, Stop, run};
