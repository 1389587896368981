//! Writing files so that a kill at any moment leaves either the old content or the new.
//!
//! *Promise*: a name holds whole content or nothing. Content goes to a temporary name in the same folder, is synced,
//! takes its final name, and the folder is synced, so that it also outlives a power cut.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Beginning of the names of unfinished files and folders.
pub const TEMPORARY: &str = ".tmp-";

/// An error that names the file it is about.
pub fn about(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// A name beside `path` that no other process uses.
pub fn temporary(path: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{TEMPORARY}{}-{n}-{name}", std::process::id()))
}

/// Gives `path` the content that `write` writes, atomically.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path);
    let attempt = (|| {
        let mut out = BufWriter::new(File::create(&temporary)?);
        write(&mut out)?;
        out.into_inner().map_err(|e| e.into_error())?.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_parent(path)
    })();
    if attempt.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    attempt.map_err(|e| about(path, e))
}

/// Makes the folder's entries durable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes the entry of `path` in its folder durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => sync_folder(p),
        _ => sync_folder(Path::new(".")),
    }
}

/// The folder of caches: `$DREAMC_CACHE`, else `dreamc` under the user's cache folder, else under the system's
/// temporary one.
pub fn cache_folder() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("DREAMC_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|p| p.join("dreamc")))
        .or_else(|| set("HOME").map(|p| p.join(".cache/dreamc")))
        .unwrap_or_else(|| std::env::temp_dir().join("dreamc"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_content_and_no_rubbish() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let error = write_atomic(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert!(error.unwrap_err().to_string().contains("disk full"));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
