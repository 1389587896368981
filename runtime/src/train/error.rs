//! Why a run stops before its end.

use super::folder::FolderError;
use crate::checkpoint::CheckpointError;
use crate::evaluate::EvaluateError;
use crate::model::ModelError;
use dreamc_compiler::CompileError;
use dreamc_compiler::count::CountError;
use dreamc_compiler::program::ProgramKey;
use dreamc_data::DataError;
use dreamc_dsl::Diagnostics;
use std::path::PathBuf;
use thiserror::Error;

/// Why a run stops before its end.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model or its device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The run folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The architecture.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The work of a program.
    #[error(transparent)]
    Counting(#[from] CountError),
    /// The device did other work than its program has.
    #[error("step {step}: `{program}` executed {found} multiply-adds, not {expected}")]
    Count {
        /// The step.
        step: u64,
        /// Which program.
        program: ProgramKey,
        /// The device's counter.
        found: u128,
        /// The count of the launch list.
        expected: u128,
    },
    /// A file of the run cannot be written.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// Numbers left the range of floats.
    #[error(
        "step {step}: {what} is {value}{}; the last good checkpoint is kept. A lower learning_rate, a longer warmup or a \
         smaller clip usually helps",
        tensor.as_ref().map_or(String::new(), |t| format!(", first in {t}"))
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// `the loss` or `the gradient norm`.
        what: &'static str,
        /// Its kind.
        value: f32,
        /// The first tensor with such a number.
        tensor: Option<String>,
    },
    /// Another rank of the group, or the way to it.
    #[error(transparent)]
    Group(#[from] dreamc_device::group::GroupError),
    /// A field of the specification asks for what cannot be done.
    #[error(transparent)]
    Refused(Box<Diagnostics>),
    /// The recipe asks for what cannot be done.
    #[error("{0}")]
    Recipe(String),
    /// Training does not fit into `train.memory`, however much is computed again.
    #[error("{0}")]
    Memory(String),
    /// A run is to be continued with something else than it began with.
    #[error(
        "{what} changed since the checkpoint was written; `--allow-changes` goes on all the same:\n{difference}"
    )]
    Changed {
        /// `the specification` or `the data`.
        what: &'static str,
        /// How.
        difference: String,
    },
}

impl From<EvaluateError> for TrainError {
    fn from(error: EvaluateError) -> Self {
        match error {
            EvaluateError::Model(e) => e.into(),
            EvaluateError::Data(e) => e.into(),
            EvaluateError::Group(e) => e.into(),
        }
    }
}
