//! Models of `transformers`, both ways.
//!
//! *In*: a folder as Hugging Face's `transformers` writes it ([`import`]), or weights of dreamc
//! ([`export`]). *Out*: the other. *Promise*: what comes out computes what went in, or nothing
//! comes out: a field, block, tensor or shape that is not known is refused by its name. Numbers are
//! copied bit for bit in the type they are stored in, unless another is asked for, from files that
//! are never in memory as a whole.
//!
//! [`family`] has one table a family, read both ways; [`config`] is `config.json` and
//! specification, [`tensors`] are the tensors. A model of no family leaves as a [`package`] with
//! code of its own.

pub mod config;
pub mod export;
pub mod family;
mod fields;
mod fold;
pub mod gguf;
pub mod import;
mod package;
pub mod peft;
mod pickled;
pub mod tensors;

pub use import::{Imported, hugging_face};

use dreamc_compiler::CompileError;
use dreamc_data::DataError;
use dreamc_data::files;
use dreamc_dsl::spec::Expr;
use dreamc_runtime::checkpoint::CheckpointError;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a model with adapters does not leave as one of `transformers`.
const MERGE_FIRST: &str = "the model has adapters, which no class of transformers has: `dreamc merge` makes one model of both, `dreamc \
                           export peft` leaves the adapters alone";

/// Largest `config.json`, index or file of a tokenizer that is read.
const LARGEST_FILE: u64 = 256 << 20;

/// Why a model cannot be imported or exported.
#[derive(Debug, Error)]
pub enum HfError {
    /// The system says no.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// It is not what it should be, or says what dreamc does not know.
    #[error("{}: {problem}", path.display())]
    Refused {
        /// Which file.
        path: PathBuf,
        /// The setting, and the values that would be right.
        problem: String,
    },
    /// A file of tensors.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] DataError),
    /// The specification that the configuration becomes has errors: a size that is out of range.
    #[error("{}: as a specification it has errors:\n{problem}", path.display())]
    Specification {
        /// The configuration.
        path: PathBuf,
        /// The diagnostics.
        problem: String,
    },
    /// It is too large.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// An export replaces nothing.
    #[error("{} exists already; choose another -o", path.display())]
    Exists {
        /// The file or folder in the way.
        path: PathBuf,
    },
    /// It is no model that can be exported so.
    #[error("{0}")]
    Export(String),
}

impl HfError {
    pub(crate) fn refused(path: &Path, problem: impl Into<String>) -> Self {
        HfError::Refused { path: path.to_path_buf(), problem: problem.into() }
    }
}

/// Reads a JSON object.
pub(crate) fn json(path: &Path) -> Result<serde_json::Map<String, serde_json::Value>, HfError> {
    serde_json::from_slice(&finite(&bytes(path)?))
        .map_err(|e| HfError::refused(path, format!("is not a JSON object: {e}")))
}

/// Infinity, which Python writes as a bare word and JSON lacks, as later versions of `transformers`
/// write it: Mamba-2's steps are limited by it in published files.
fn finite(text: &[u8]) -> Vec<u8> {
    const WORD: &[u8] = b"Infinity";
    let (mut out, mut at) = (Vec::with_capacity(text.len()), 0);
    let (mut quoted, mut escaped) = (false, false);
    while at < text.len() {
        if !quoted && text[at..].starts_with(WORD) {
            out.extend_from_slice(br#"{"__float__": "Infinity"}"#);
            at += WORD.len();
            continue;
        }
        let byte = text[at];
        quoted ^= byte == b'"' && !escaped;
        escaped = quoted && byte == b'\\' && !escaped;
        out.push(byte);
        at += 1;
    }
    out
}

/// Reads a file of settings.
pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>, HfError> {
    let io = |error| HfError::Io { path: path.to_path_buf(), error };
    let mut file = files::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    if size > LARGEST_FILE {
        return Err(HfError::refused(path, format!("{size} bytes are too many for a file of settings")));
    }
    let mut bytes = vec![];
    file.read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// A composition as `.dream` spells it.
pub(crate) fn composition(expr: &Expr) -> String {
    let join = |terms: &[Expr], sign: &str| {
        let term = |e: &Expr| match e {
            Expr::Sequential(_) | Expr::Parallel(_) => format!("({})", composition(e)),
            Expr::Component(_) | Expr::Norm | Expr::Skip(..) => composition(e),
        };
        terms.iter().map(term).collect::<Vec<_>>().join(sign)
    };
    match expr {
        Expr::Component(name) => name.clone(),
        Expr::Norm => "norm".into(),
        Expr::Sequential(terms) => join(terms, " > "),
        Expr::Parallel(terms) => join(terms, " | "),
        Expr::Skip(_, inner) => format!("skip {{ {} }}", composition(inner)),
    }
}
