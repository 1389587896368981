//! Values of a teacher that a disk keeps, by the content of rows.
//!
//! *Promise*: a file is whole or is not there, and one that does not have the hash of its content
//! is read as missing; no more bytes are kept than the recipe says.

use super::error::TrainError;
use dreamc_data::Batch;
use dreamc_data::files;
use std::io;
use std::path::PathBuf;

/// A folder of rows.
pub struct Store {
    folder: PathBuf,
    most: u64,
    kept: u64,
}

/// The key of a row: a hash of all that a teacher reads of it.
pub fn key(batch: &Batch, row: usize) -> String {
    let range = row * batch.sequence..(row + 1) * batch.sequence;
    let mut hasher = blake3::Hasher::new();
    for part in [&batch.ids, &batch.positions, &batch.segments] {
        hasher.update(bytemuck::cast_slice(part.get(range.clone()).unwrap_or_default()));
    }
    hasher.finalize().to_hex().to_string()
}

impl Store {
    /// The rows kept for a teacher that is described so.
    pub fn open(most: u64, of: &str) -> Result<Store, TrainError> {
        let name = blake3::hash(of.as_bytes()).to_hex().to_string();
        let folder = files::cache_folder().join("teacher").join(&name[..32]);
        let size = || -> io::Result<u64> {
            std::fs::create_dir_all(&folder)?;
            let mut kept = 0;
            for entry in std::fs::read_dir(&folder)? {
                kept += entry?.metadata().map_or(0, |data| data.len());
            }
            Ok(kept)
        };
        let kept = size().map_err(|error| TrainError::Io { path: folder.clone(), error })?;
        Ok(Store { folder, most, kept })
    }

    /// The values of a row, of these lengths.
    pub fn get(&self, key: &str, lengths: &[usize]) -> Option<Vec<Vec<f32>>> {
        let bytes = std::fs::read(self.folder.join(key)).ok()?;
        let (hash, content) = bytes.split_first_chunk::<32>()?;
        if content.len() != 4 * lengths.iter().sum::<usize>() || blake3::hash(content).as_bytes() != hash {
            return None;
        }
        let all: Vec<f32> = bytemuck::pod_collect_to_vec(content);
        let mut rest = &all[..];
        let mut values = vec![];
        for length in lengths {
            let (own, behind) = rest.split_at(*length);
            values.push(own.to_vec());
            rest = behind;
        }
        Some(values)
    }

    /// Keeps the values of a row, where there is room.
    pub fn put(&mut self, key: &str, values: &[Vec<f32>]) -> Result<(), TrainError> {
        let content: Vec<u8> = bytemuck::cast_slice(&values.concat()).to_vec();
        let bytes = content.len() as u64 + 32;
        let path = self.folder.join(key);
        if self.kept + bytes > self.most || path.exists() {
            return Ok(());
        }
        let written = files::write_atomic(&path, |out| {
            out.write_all(blake3::hash(&content).as_bytes())?;
            out.write_all(&content)
        });
        written.map_err(|error| TrainError::Io { path, error })?;
        self.kept += bytes;
        Ok(())
    }
}
