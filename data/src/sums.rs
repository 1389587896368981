//! Folders whose every byte is verified.
//!
//! *In*: files. *Out*: the same with `checksums.txt` next to them (BLAKE3, in the format of
//! `b3sum`). *Promise*: a folder holds that file only when the others are whole: it is written last
//! and synced, and a file that does not agree with it is refused.

use crate::{files, stamp};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A folder that is not as it was sealed.
#[derive(Debug, Error)]
pub enum SumsError {
    /// The system refuses a file.
    #[error("{}: {error}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// A file differs from the one that was sealed.
    #[error("{}: {problem}", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// How it differs.
        problem: String,
    },
}

/// Name of the file of checksums.
pub const CHECKSUMS: &str = "checksums.txt";

/// Writes the content of a file.
pub type Fill<'a> = Box<dyn FnMut(&mut dyn Write) -> io::Result<()> + 'a>;

/// The checksums of a folder.
#[derive(Clone, Debug)]
pub struct Sums {
    folder: PathBuf,
    text: String,
}

impl Sums {
    /// Reads them.
    pub fn open(folder: &Path) -> Result<Self, SumsError> {
        let path = folder.join(CHECKSUMS);
        let bytes = fs::read(&path).map_err(|error| SumsError::Io { path: path.clone(), error })?;
        let corrupt = |problem: &str| SumsError::Corrupt { path: path.clone(), problem: problem.into() };
        let text = String::from_utf8(bytes).map_err(|_| corrupt("is not text"))?;
        if !text.ends_with('\n') {
            return Err(corrupt("is cut short"));
        }
        Ok(Sums { folder: folder.to_path_buf(), text })
    }

    /// Which folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The checksum of a file, in hexadecimal.
    pub fn of(&self, name: &str) -> Result<&str, SumsError> {
        let sum = self.text.lines().find_map(|l| l.split_once("  ").filter(|(_, n)| *n == name));
        sum.map(|(sum, _)| sum).ok_or_else(|| SumsError::Corrupt {
            path: self.folder.join(CHECKSUMS),
            problem: format!("has no checksum of {name}"),
        })
    }

    /// Opens a file and verifies every byte of it.
    pub fn verify(&self, name: &str) -> Result<File, SumsError> {
        let path = self.folder.join(name);
        let io = |error| SumsError::Io { path: path.clone(), error };
        let file = files::open(&path).map_err(io)?;
        let (hash, bytes) = hash(&file).map_err(io)?;
        if hash == self.of(name)? {
            return Ok(file);
        }
        let problem = format!("its {bytes} bytes are not those that were written (BLAKE3 differs)");
        Err(SumsError::Corrupt { path, problem })
    }

    /// Verifies every byte of a file; one that was verified and has not been touched since is not
    /// read again.
    pub fn verify_once(&self, name: &str, cache: &Path) -> Result<(), SumsError> {
        let path = self.folder.join(name);
        let io = |error| SumsError::Io { path: path.clone(), error };
        let file = files::open(&path).map_err(io)?;
        let hash = stamp::hash(&path, &file, cache, &mut |_, _| {}).map_err(io)?;
        if hash == self.of(name)? {
            return Ok(());
        }
        let bytes = file.metadata().map_err(io)?.len();
        let problem = format!("its {bytes} bytes are not those that were written (BLAKE3 differs)");
        Err(SumsError::Corrupt { path, problem })
    }

    /// A small file, verified.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, SumsError> {
        let path = self.folder.join(name);
        let bytes = fs::read(&path).map_err(|error| SumsError::Io { path: path.clone(), error })?;
        if blake3::hash(&bytes).to_hex().as_str() == self.of(name)? {
            return Ok(bytes);
        }
        let problem = format!("its {} bytes are not those that were written (BLAKE3 differs)", bytes.len());
        Err(SumsError::Corrupt { path, problem })
    }
}

/// BLAKE3 of all bytes of a file, in hexadecimal, and how many there are. The file's own place is
/// not moved.
pub fn hash(file: &File) -> io::Result<(String, u64)> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let n = file.read_at(&mut buffer, at)?;
        if n == 0 {
            return Ok((hasher.finalize().to_hex().to_string(), at));
        }
        hasher.update(&buffer[..n]);
        at += n as u64;
    }
}

/// A reader with the checksum of all that was read of it.
pub struct HashedRead<R> {
    inner: R,
    hasher: blake3::Hasher,
}

impl<R: Read> HashedRead<R> {
    /// Of this reader.
    pub fn new(inner: R) -> Self {
        HashedRead { inner, hasher: blake3::Hasher::new() }
    }

    /// The checksum of what was read, in hexadecimal.
    pub fn sum(&self) -> String {
        self.hasher.finalize().to_hex().to_string()
    }
}

impl<R: Read> Read for HashedRead<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n]);
        Ok(n)
    }
}

/// Fills an empty folder: files, then their checksums.
pub fn fill(folder: &Path, list: Vec<(&str, Fill)>) -> io::Result<()> {
    let mut sums = vec![];
    for (name, content) in list {
        sums.push((name, put(folder, name, content)?));
    }
    seal(folder, &sums)
}

/// Writes a file of a folder and makes it durable; gives its checksum.
pub fn put(folder: &Path, name: &str, mut content: Fill) -> io::Result<String> {
    let mut out = Hashed::create(&folder.join(name))?;
    content(&mut out)?;
    out.finish()
}

/// Writes the checksums of files that are on disk, by name.
pub fn seal(folder: &Path, sums: &[(&str, String)]) -> io::Result<()> {
    let sums: String = sums.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    let mut out = File::create(folder.join(CHECKSUMS))?;
    out.write_all(sums.as_bytes())?;
    out.sync_all()?;
    files::sync_folder(folder)
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
