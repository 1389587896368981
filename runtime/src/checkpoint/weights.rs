//! Weights of a model in one file, or in a file of trained tensors and its base.
//!
//! *Promise*: a file that lacks tensors names its base by hash, and no other base is ever put under
//! it.

use super::safetensors::{Stored, Tensors, View};
use super::{CheckpointError, open_model};
use dreamc_compiler::format::{Format, Formats, Stored as Storage};
use dreamc_device::Device;
use dreamc_device::mapped::Mapped;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A base of a base of … may be so far down.
const DEEPEST: usize = 8;

/// The base of a checkpoint that holds only what was trained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Its file.
    pub path: String,
    /// BLAKE3 of that file, in hexadecimal.
    pub hash: String,
}

impl Binding {
    /// Entries of the metadata of a checkpoint.
    pub fn metadata(&self) -> [(&str, &str); 2] {
        [("base", &self.path), ("base_hash", &self.hash)]
    }

    /// The base that a file names.
    pub fn of(tensors: &Tensors) -> Option<Self> {
        let hash = tensors.metadata("base_hash")?.to_string();
        Some(Binding { path: tensors.metadata("base").unwrap_or_default().to_string(), hash })
    }
}

/// The weights of a model.
#[derive(Debug)]
pub struct Weights {
    /// The file, then its base, and so on.
    files: Vec<Tensors>,
    /// Newer checkpoints of the run that were passed over, and why.
    pub refused: Vec<CheckpointError>,
}

impl Weights {
    /// The weights at a path: see [`open_model`]. `base` is where its base is, where that is not
    /// where it was.
    pub fn open(path: &Path, base: Option<&Path>) -> Result<Self, CheckpointError> {
        let (tensors, refused) = open_model(path)?;
        Ok(Weights { refused, ..Self::complete(tensors, base)? })
    }

    /// A file with what it is bound to.
    pub fn complete(tensors: Tensors, base: Option<&Path>) -> Result<Self, CheckpointError> {
        let mut files = vec![tensors];
        let mut given = base;
        while let Some(last) = files.last()
            && let Some(Binding { path: recorded, hash: expected }) = Binding::of(last)
        {
            let path = last.path().to_path_buf();
            if files.len() > DEEPEST {
                let problem = format!("more than {DEEPEST} bases stand below it");
                return Err(CheckpointError::Corrupt { path, problem });
            }
            let base = given.take().map_or_else(|| PathBuf::from(recorded), Path::to_path_buf);
            let (next, _) = open_model(&base)
                .map_err(|error| CheckpointError::NoBase { path: path.clone(), error: Box::new(error) })?;
            let found = hash(&next)?;
            if found != expected {
                return Err(CheckpointError::OtherBase { path, base, expected, found });
            }
            files.push(next);
        }
        Ok(Weights { files, refused: vec![] })
    }

    /// The record of a checkpoint of other tensors that is bound to these.
    pub fn binding(&self) -> Result<Binding, CheckpointError> {
        let path = self.path();
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        Ok(Binding { path: path.to_string_lossy().into_owned(), hash: hash(&self.files[0])? })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Path of the file of its base, where it has one.
    pub fn base(&self) -> Option<&Path> {
        self.files.get(1).map(Tensors::path)
    }

    /// A text kept in the file.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files[0].metadata(key)
    }

    /// Names and shapes, each once.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &[u64])> {
        let mut seen = BTreeSet::new();
        self.files.iter().flat_map(Tensors::entries).filter(move |(name, _)| seen.insert(*name))
    }

    /// A tensor as it is stored.
    pub fn stored(&self, name: &str) -> Option<Stored<'_>> {
        self.files.iter().find_map(|file| file.stored(name))
    }

    /// The storage in which tensors can be read in their files.
    pub fn formats(&self) -> Formats {
        self.formats_where(|_| true)
    }

    /// The same of those tensors whose format a device takes so.
    pub fn formats_on(&self, device: &dyn Device) -> Formats {
        self.formats_where(|format| device.maps(format))
    }

    fn formats_where(&self, takes: impl Fn(Format) -> bool) -> Formats {
        let stored = |name: &str| self.storage(name).filter(|stored| takes(stored.format));
        let of = |(name, _): (&str, &[u64])| Some((name.to_string(), stored(name)?));
        self.entries().filter_map(of).collect()
    }

    /// The storage in which a tensor can be read in its file.
    pub fn storage(&self, name: &str) -> Option<Storage> {
        self.files.iter().find(|file| file.stored(name).is_some())?.storage(name)
    }

    /// A tensor's shape, and where it is in its file.
    pub fn mapped(&self, name: &str) -> Result<Option<(&[u64], Mapped)>, CheckpointError> {
        match self.files.iter().find(|file| file.stored(name).is_some()) {
            Some(file) => file.mapped(name),
            None => Ok(None),
        }
    }

    /// The file itself, without its base.
    pub fn own(&self) -> &Tensors {
        &self.files[0]
    }

    /// Shape and values of a tensor.
    pub fn get(&self, name: &str) -> Result<Option<View<'_>>, CheckpointError> {
        for file in &self.files {
            if let Some(found) = file.get(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

fn hash(tensors: &Tensors) -> Result<String, CheckpointError> {
    tensors.hash().map_err(|error| CheckpointError::Io { path: tensors.path().to_path_buf(), error })
}
