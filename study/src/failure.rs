//! How a command fails.

use dreamc_dsl::Diagnostics;
use std::error::Error;
use std::fmt;
use std::io;

use crate::output::{Stream, complain};
use dreamc_data::DataError;
use dreamc_hf::HfError;
use dreamc_runtime::checkpoint::CheckpointError;
use dreamc_runtime::train::TrainError;
use dreamc_runtime::train::folder::FolderError;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub enum Failure {
    /// A specification has errors.
    Diagnostics(Box<Diagnostics>),
    /// The command line asks for something that does not exist.
    Usage(String),
    /// Anything else; printed with its causes.
    Error(Box<dyn Error + Send + Sync>),
    /// All is said already.
    Said,
    /// All is said already: something that the command line names cannot be read.
    Unread,
    /// A signal ended the work, by its name.
    Stopped(&'static str),
}

/// The result of a command.
pub type Done = Result<(), Failure>;

impl Failure {
    /// Says what is wrong, on the error stream; gives the exit code that `dreamc --help` documents.
    pub fn report(self) -> u8 {
        match &self {
            Failure::Diagnostics(d) => complain(&d.render(Stream::Err.has_color())),
            Failure::Usage(_) | Failure::Error(_) => complain(&format!("error: {self}\n")),
            Failure::Said | Failure::Unread | Failure::Stopped(_) => {}
        }
        self.code()
    }

    fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) | Failure::Unread => 2,
            Failure::Diagnostics(d) if d.list.iter().any(|d| misplaced(d.code)) => 2,
            Failure::Diagnostics(_) | Failure::Said => 1,
            Failure::Error(error) if names_the_wrong_thing(error.as_ref()) => 2,
            Failure::Error(_) => 1,
            Failure::Stopped("SIGTERM") => 128 + 15,
            Failure::Stopped(_) => 128 + 2,
        }
    }
}

/// Whether a diagnostic is about the name of the file rather than its content.
fn misplaced(code: &str) -> bool {
    ["unreadable", "wrong-file"].contains(&code)
}

/// Whether an error says that the command line names something that is not there or of another
/// kind.
fn names_the_wrong_thing(error: &(dyn Error + 'static)) -> bool {
    let folder = |e: &FolderError| match e {
        FolderError::Exists { .. }
        | FolderError::Foreign { .. }
        | FolderError::Remains { .. }
        | FolderError::NoRun { .. } => true,
        FolderError::Io { error, .. } => misnamed(error),
        FolderError::Locked { .. } | FolderError::Gone { .. } => false,
    };
    let checkpoint = |e: &CheckpointError| match e {
        CheckpointError::Missing { .. }
        | CheckpointError::Exists { .. }
        | CheckpointError::Foreign { .. }
        | CheckpointError::Edited { .. } => true,
        CheckpointError::Io { error, .. } => misnamed(error),
        _ => false,
    };
    let data = |e: &DataError| matches!(e, DataError::Io { error, .. } if misnamed(error));
    let hf = |e: &HfError| match e {
        HfError::Exists { .. } => true,
        HfError::Io { error, .. } => misnamed(error),
        HfError::Checkpoint(e) => checkpoint(e),
        HfError::Tokenizer(e) => data(e),
        _ => false,
    };
    error.downcast_ref().is_some_and(folder)
        || error.downcast_ref().is_some_and(checkpoint)
        || error.downcast_ref().is_some_and(data)
        || error.downcast_ref().is_some_and(hf)
        || error.downcast_ref().is_some_and(misnamed)
}

/// Whether the system says that a file is not there, or not of the kind that is needed.
fn misnamed(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, IsADirectory, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | IsADirectory | InvalidInput)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Diagnostics(d) => f.write_str(&d.render(false)),
            Failure::Usage(what) => f.write_str(what),
            Failure::Error(error) => {
                let mut text = error.to_string();
                let mut cause = error.source();
                while let Some(c) = cause {
                    // Transparent wrappers say the same again.
                    if !text.contains(&c.to_string()) {
                        text += &format!(": {c}");
                    }
                    cause = c.source();
                }
                f.write_str(&text)
            }
            Failure::Said | Failure::Unread => Ok(()),
            Failure::Stopped(signal) => f.write_str(signal),
        }
    }
}

impl From<Diagnostics> for Failure {
    fn from(d: Diagnostics) -> Self {
        Failure::Diagnostics(Box::new(d))
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        match error {
            TrainError::Refused(diagnostics) => Failure::Diagnostics(diagnostics),
            error => Failure::Error(Box::new(error)),
        }
    }
}

/// Errors that are printed as they are.
macro_rules! errors {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::Error(Box::new(error))
            }
        })*
    };
}

errors! {
    io::Error,
    serde_json::Error,
    dreamc_compiler::CompileError,
    dreamc_compiler::count::CountError,
    dreamc_compiler::matching::MatchError,
    dreamc_runtime::analysis::probe::ProbeError,
    dreamc_runtime::bench::BenchError,
    dreamc_runtime::checkpoint::CheckpointError,
    dreamc_data::DataError,
    dreamc_device::DeviceError,
    dreamc_device::gpu::TableError,
    dreamc_device::gpu::proof::ProofError,
    dreamc_runtime::evaluate::EvaluateError,
    dreamc_device::group::GroupError,
    dreamc_hf::HfError,
    dreamc_runtime::model::ModelError,
    dreamc_verify::VerifyError,
    dreamc_runtime::train::folder::FolderError,
}
