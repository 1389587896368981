//! The folder of a model: weights, specification, tokenizer, checksums.
//!
//! *In*: files to be written. *Out*: a sealed folder ([`sums`](dreamc_data::sums)). *Promise*: it
//! appears whole or not at all, and replaces nothing but a model's folder, and that only where it
//! is asked to.

use super::CheckpointError;
use dreamc_data::files;
use dreamc_data::sums::{CHECKSUMS, Fill, Sums, fill};
use std::fs;
use std::io;
use std::path::Path;

/// The files of a model's folder that are dreamc's own; nothing but these and [`KEPT`] is ever
/// replaced.
const OURS: [&str; 3] = [CHECKSUMS, "model.safetensors", SPEC];

const SPEC: &str = "spec.yaml";

/// The files of a folder of `transformers` that are kept as they were.
pub const KEPT: [&str; 11] = [
    "tokenizer.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// Whether a model's folder may be written here: nothing is there, or with `force` a model's folder
/// whose specification nobody has changed.
pub fn free(path: &Path, force: bool) -> Result<(), CheckpointError> {
    let path = path.to_path_buf();
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CheckpointError::Io { path, error }),
        Ok(entries) => entries,
    };
    let names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let ours = |name: &String| OURS.contains(&name.as_str()) || KEPT.contains(&name.as_str());
    let as_written = || -> Option<bool> {
        let spec = fs::read(path.join(SPEC)).ok()?;
        Some(Sums::open(&path).ok()?.of(SPEC).ok()? == blake3::hash(&spec).to_hex().as_str())
    };
    match () {
        _ if names.is_empty() => Ok(()),
        _ if !names.iter().all(ours) => Err(CheckpointError::Foreign { path }),
        _ if names.iter().any(|n| n == SPEC) && as_written() != Some(true) => {
            Err(CheckpointError::Edited { path: path.join(SPEC) })
        }
        _ if force => Ok(()),
        _ => Err(CheckpointError::Exists { path }),
    }
}

/// Writes a model's folder at a place that is [`free`], under a temporary name first.
pub fn write(path: &Path, list: Vec<(&str, Fill)>) -> Result<(), CheckpointError> {
    let about = |error| CheckpointError::Io { path: path.to_path_buf(), error };
    fs::create_dir_all(files::parent(path)).map_err(about)?;
    files::remove_abandoned(files::parent(path), path.file_name());
    let (temporary, _lock) = files::claim_folder(path).map_err(about)?;
    let attempt = fill(&temporary, list).and_then(|()| {
        if path.exists() {
            // The checksums go first: without them the folder is no model.
            for name in OURS.into_iter().chain(KEPT) {
                match fs::remove_file(path.join(name)) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                    _ => {}
                }
            }
            fs::remove_dir(path)?;
        }
        fs::rename(&temporary, path)?;
        files::sync_parent(path)
    });
    if attempt.is_err() {
        let _ = fs::remove_dir_all(&temporary);
    }
    attempt.map_err(about)
}
