//! Folders whose every byte is verified.
//!
//! *Promise*: a folder holds `checksums.txt` (BLAKE3 of its files, in the format of `b3sum`) only when the files are whole: it is
//! written last, synced, and a file that does not agree with it is refused.

use super::CheckpointError;
use crate::files;
use memmap2::Mmap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Name of the file of checksums.
pub const CHECKSUMS: &str = "checksums.txt";

/// Writes the content of a file.
pub type Fill<'a> = Box<dyn FnMut(&mut dyn Write) -> io::Result<()> + 'a>;

/// The checksums of a folder.
#[derive(Debug)]
pub struct Sums {
    folder: PathBuf,
    text: String,
}

impl Sums {
    /// Reads them.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(CHECKSUMS);
        let bytes = fs::read(&path).map_err(|error| CheckpointError::Io { path: path.clone(), error })?;
        let corrupt =
            |problem: &str| CheckpointError::Corrupt { path: path.clone(), problem: problem.into() };
        let text = String::from_utf8(bytes).map_err(|_| corrupt("is not text"))?;
        if !text.ends_with('\n') {
            return Err(corrupt("is cut short"));
        }
        Ok(Sums { folder: folder.to_path_buf(), text })
    }

    /// The checksum of a file, in hexadecimal.
    pub fn of(&self, name: &str) -> Result<&str, CheckpointError> {
        let sum = self.text.lines().find_map(|l| l.split_once("  ").filter(|(_, n)| *n == name));
        sum.map(|(sum, _)| sum).ok_or_else(|| CheckpointError::Corrupt {
            path: self.folder.join(CHECKSUMS),
            problem: format!("has no checksum of {name}"),
        })
    }

    /// Maps a file and verifies it.
    pub fn map(&self, name: &str) -> Result<Mmap, CheckpointError> {
        let path = self.folder.join(name);
        let file = File::open(&path).and_then(|f| {
            // SAFETY: as in `Tensors::open`.
            unsafe { Mmap::map(&f) }
        });
        let map = file.map_err(|error| CheckpointError::Io { path: path.clone(), error })?;
        if blake3::hash(&map).to_hex().as_str() == self.of(name)? {
            return Ok(map);
        }
        let problem = format!("its {} bytes are not those that were written (BLAKE3 differs)", map.len());
        Err(CheckpointError::Corrupt { path, problem })
    }
}

/// Fills an empty folder: files, then their checksums.
pub fn fill(folder: &Path, list: Vec<(&str, Fill)>) -> io::Result<()> {
    let mut sums = vec![];
    for (name, mut content) in list {
        let mut out = Hashed::create(&folder.join(name))?;
        content(&mut out)?;
        sums.push((name, out.finish()?));
    }
    seal(folder, &sums)
}

/// Writes the checksums of files that are on disk, by name.
pub fn seal(folder: &Path, sums: &[(&str, String)]) -> io::Result<()> {
    let sums: String = sums.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    let mut out = File::create(folder.join(CHECKSUMS))?;
    out.write_all(sums.as_bytes())?;
    out.sync_all()?;
    files::sync_folder(folder)
}

/// The files of a model's folder; nothing else is ever replaced.
const OURS: [&str; 4] = [CHECKSUMS, "model.safetensors", "spec.yaml", "tokenizer.json"];

/// Whether a model's folder may be written here: nothing is there, or with `force` a model's folder.
pub fn free(path: &Path, force: bool) -> Result<(), CheckpointError> {
    let path = path.to_path_buf();
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(CheckpointError::Io { path, error }),
        Ok(entries) => entries,
    };
    let names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let ours = |name: &String| OURS.contains(&name.as_str());
    match () {
        _ if names.is_empty() => Ok(()),
        _ if !names.iter().all(ours) => Err(CheckpointError::Foreign { path }),
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
            for name in OURS {
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

/// A file that is being written, and the checksum of what was.
pub struct Hashed {
    inner: BufWriter<File>,
    hasher: blake3::Hasher,
}

impl Hashed {
    /// An empty file.
    pub fn create(path: &Path) -> io::Result<Self> {
        let inner = BufWriter::with_capacity(1 << 18, File::create(path)?);
        Ok(Hashed { inner, hasher: blake3::Hasher::new() })
    }

    /// Makes the file durable; gives its checksum in hexadecimal.
    pub fn finish(self) -> io::Result<String> {
        self.inner.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        Ok(self.hasher.finalize().to_hex().to_string())
    }
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
