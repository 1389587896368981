//! Writing files so that a kill at any moment leaves either the old content or the new.
//!
//! *Promise*: a name holds whole content or nothing. Content goes to a temporary name in the same
//! folder, is synced, takes its final name, and the folder is synced, so that it also outlives a
//! power cut. A file that a killed process leaves under a temporary name is removed by the next
//! writer of the same name: a writer holds a lock on it, and the remover takes that lock.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Beginning of the names of unfinished files and folders.
pub const TEMPORARY: &str = ".tmp-";

/// An error that names the file it is about.
pub fn about(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Opens a file to be read. A pipe or a device is refused: it would be waited for without an end,
/// and cannot be read twice.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_file() {
        return File::open(path);
    }
    let what = if kind.is_dir() { "is a folder; name a file" } else { "is a pipe or a device; name a file" };
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Reads a text file, and no pipe.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// A name next to `path` that no other process uses.
pub fn temporary(path: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!("{TEMPORARY}{}-{n}-{name}", std::process::id()))
}

/// Gives `path` the content that `write` writes, atomically.
pub fn write_atomic(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    write_then(path, write, |temporary| fs::rename(temporary, path))
}

/// The same where `path` does not exist yet; where it does, even by now, it stays as it is.
pub fn write_new(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    write_then(path, write, |temporary| match fs::hard_link(temporary, path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::remove_file(temporary),
    })
}

/// Gives a file that a user named the content that `write` writes. A file keeps its mode, a link
/// stays a link and what it points to is written, both atomically; a pipe or a device is written as
/// a stream. A pipe that nobody reads is an error, not a wait.
pub fn write_named(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // A link to nothing yet: what it names is made.
            let target = fs::read_link(path).map_or(path.to_path_buf(), |to| parent(path).join(to));
            return write_atomic(&target, write);
        }
        found => found.map_err(|e| about(path, e))?,
    };
    if found.is_dir() {
        return Err(about(path, io::Error::new(io::ErrorKind::IsADirectory, "is a folder; name a file")));
    }
    if !found.is_file() {
        return stream(path, write).map_err(|e| about(path, e));
    }
    let target = path.canonicalize().map_err(|e| about(path, e))?;
    let keep = |temporary: &Path| {
        fs::set_permissions(temporary, found.permissions())?;
        fs::rename(temporary, &target)
    };
    write_then(&target, write, keep)
}

/// Writes into a pipe or a device.
fn stream(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let open = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = open.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => io::Error::new(io::ErrorKind::BrokenPipe, "is a pipe that nobody reads"),
        _ => error,
    })?;
    // SAFETY: the descriptor is open; only its flags change. From here on writing waits for the
    // reader.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0) };
    let mut out = BufWriter::new(&file);
    write(&mut out)?;
    out.flush()
}

fn write_then(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    place: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    remove_abandoned(parent(path), path.file_name());
    let (temporary, file) = claim(path, &|name| File::create_new(name)).map_err(|e| about(path, e))?;
    let attempt = (|| {
        let mut out = BufWriter::new(&file);
        write(&mut out)?;
        out.flush()?;
        drop(out);
        file.sync_all()?;
        place(&temporary)?;
        sync_parent(path)
    })();
    if attempt.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    attempt.map_err(|e| about(path, e))
}

/// A new folder under a temporary name, to be renamed to `path` once it is whole. As long as the
/// lock that comes with it is held, nobody takes it for abandoned.
pub fn claim_folder(path: &Path) -> io::Result<(PathBuf, File)> {
    claim(path, &|name| fs::create_dir(name).and_then(|()| File::open(name)))
}

fn claim(path: &Path, make: &dyn Fn(&Path) -> io::Result<File>) -> io::Result<(PathBuf, File)> {
    loop {
        let temporary = temporary(path);
        let lock = match make(&temporary) {
            Ok(lock) => lock,
            // A process of the same number was killed.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            // Another process took it for abandoned before it was locked.
            Err(e) if e.kind() == io::ErrorKind::NotFound && parent(path).is_dir() => continue,
            Err(e) => return Err(e),
        };
        // A file system without locks has one process at a time.
        let taken = matches!(lock.try_lock(), Err(TryLockError::WouldBlock));
        let id = |m: &fs::Metadata| (m.dev(), m.ino());
        let same = matches!((fs::metadata(&temporary), lock.metadata()), (Ok(a), Ok(b)) if id(&a) == id(&b));
        if !taken && same {
            return Ok((temporary, lock));
        }
    }
}

/// Removes files and folders that killed processes left unfinished in a folder: those that were to
/// become `name`, or all. Files that another process is writing are locked, and stay.
pub fn remove_abandoned(folder: &Path, name: Option<&OsStr>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let of = entry.file_name();
        // `.tmp-PROCESS-NUMBER-NAME`
        let mut parts =
            of.to_str().and_then(|n| n.strip_prefix(TEMPORARY)).into_iter().flat_map(|n| n.splitn(3, '-'));
        let (Some(_), Some(_), Some(of)) = (parts.next(), parts.next(), parts.next()) else { continue };
        if name.is_some_and(|name| name != of) {
            continue;
        }
        let path = entry.path();
        let Ok(lock) = File::open(&path) else { continue };
        if lock.try_lock().is_ok() {
            let _ = match lock.metadata() {
                Ok(m) if m.is_dir() => fs::remove_dir_all(&path),
                _ => fs::remove_file(&path),
            };
        }
    }
}

/// The folder that a file or folder is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the folder's entries durable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes the entry of `path` in its folder durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    sync_folder(parent(path))
}

/// The folder of caches: `$DREAMC_CACHE`, else `dreamc` under the user's cache folder, else under
/// the system's temporary one.
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

    #[test]
    fn files_of_users_keep_mode_and_links_and_pipes_are_streams() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("real"), "old").unwrap();
        fs::set_permissions(at("real"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink("real", at("link")).unwrap();
        write_named(&at("link"), |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(at("real")).unwrap(), "new");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        assert_eq!(fs::metadata(at("real")).unwrap().permissions().mode() & 0o777, 0o600);
        symlink("later", at("dangling")).unwrap();
        write_named(&at("dangling"), |out| out.write_all(b"made")).unwrap();
        assert_eq!(fs::read_to_string(at("later")).unwrap(), "made");
        write_named(Path::new("/dev/null"), |out| out.write_all(b"gone")).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        let pipe = std::ffi::CString::new(at("pipe").to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let error = write_named(&at("pipe"), |out| out.write_all(b"x")).unwrap_err().to_string();
        assert!(error.contains("nobody reads"), "{error}");
        let error = read_text(&at("pipe")).unwrap_err().to_string();
        assert!(error.contains("is a pipe"), "{error}");
        let reader = std::thread::spawn({
            let pipe = at("pipe");
            move || fs::read_to_string(pipe).unwrap()
        });
        while let Err(error) = write_named(&at("pipe"), |out| out.write_all(b"heard")) {
            assert!(error.to_string().contains("nobody reads"), "{error}");
        }
        assert_eq!(reader.join().unwrap(), "heard");
        let error = write_named(folder.path(), |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }

    #[test]
    fn what_is_new_does_not_replace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for text in ["first", "second"] {
            write_new(&path, |out| out.write_all(text.as_bytes())).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"first");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_process_left_goes_and_what_another_writes_stays() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        // As killed processes leave them: nobody holds their locks.
        fs::write(at(".tmp-1-0-a"), b"half").unwrap();
        fs::write(at(".tmp-1-0-b"), b"half").unwrap();
        fs::create_dir(at(".tmp-1-1-a")).unwrap();
        fs::write(at(".tmp-1-1-a/part"), b"half").unwrap();
        // As one that is still there has it, and names of others.
        let (written, lock) = claim_folder(&at("a")).unwrap();
        fs::write(at(".tmp-mine"), b"no name of ours").unwrap();
        write_atomic(&at("a"), |out| out.write_all(b"whole")).unwrap();
        let names = || {
            let mut names: Vec<String> = fs::read_dir(folder.path())
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let mine = written.file_name().unwrap().to_str().unwrap().to_string();
        let mut expected = vec![".tmp-1-0-b".to_string(), mine, ".tmp-mine".into(), "a".into()];
        expected.sort();
        assert_eq!(names(), expected);
        drop(lock);
        remove_abandoned(folder.path(), None);
        assert_eq!(names(), [".tmp-mine", "a"]);
    }
}
