//! Files of weights, mapped: read where they are touched, and shared by all processes that read
//! them.
//!
//! *In*: an open file. *Out*: its bytes. *Promise*: a file that another program cuts ends neither
//! the process nor its work: what is missing reads as zeros from then on, and
//! [`MappedFile::unchanged`], which a device asks after every program, says so, as it says of a
//! file that was written to. One that is replaced under its name stays as it was opened.
//!
//! A page beyond the end of a file is a `SIGBUS`. The handler here puts a page of zeros there where
//! the address belongs to a mapped file, and hands all others to the handler before it.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

/// A range of a mapped file.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// The file.
    pub file: Arc<MappedFile>,
    /// Name of the tensor that it holds.
    pub name: Arc<str>,
    /// First byte.
    pub start: u64,
    /// How many.
    pub bytes: u64,
}

impl Mapped {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // Ranges are made of what the file's header says, which was held against its length.
        self.file.map.get(self.start as usize..(self.start + self.bytes) as usize).unwrap_or(&[])
    }
}

/// A file that is mapped.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    file: File,
    path: PathBuf,
    /// Length and time of the last change when it was opened.
    state: (u64, i64, i64),
    /// Its line of [`MAPS`].
    line: usize,
}

/// A mapped range, as the handler sees it.
struct Line {
    start: AtomicUsize,
    end: AtomicUsize,
    /// Whether a page of it was missing.
    cut: AtomicBool,
}

/// Most files that are mapped at a time.
const MOST: usize = 256;

static MAPS: [Line; MOST] =
    [const { Line { start: AtomicUsize::new(0), end: AtomicUsize::new(0), cut: AtomicBool::new(false) } };
        MOST];
/// Held while a line is taken or given back.
static TAKING: Mutex<()> = Mutex::new(());
static PAGE: AtomicUsize = AtomicUsize::new(0);
/// The handler before this one.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

impl MappedFile {
    /// Maps a file that is open for reading.
    pub fn open(path: &Path, file: &File) -> io::Result<Self> {
        guard()?;
        let file = file.try_clone()?;
        let state = state(&file)?;
        // SAFETY: the map is read through shared references alone. Another program may write to the
        // file meanwhile: numbers then change, every bit pattern is one, and `unchanged` says so;
        // the handler makes zeros of what it cuts off.
        let map = unsafe { Mmap::map(&file)? };
        if map.len() as u64 != state.0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let line = take(map.as_ptr().addr(), map.len())?;
        Ok(MappedFile { map, file, path: path.to_path_buf(), state, line })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length when it was opened.
    pub fn length(&self) -> u64 {
        self.state.0
    }

    /// Whether what was read of it is what was there when it was opened; the difference in words.
    pub fn unchanged(&self) -> Result<(), String> {
        let now = state(&self.file).map_err(|error| error.to_string())?;
        let cut = MAPS[self.line].cut.load(Ordering::Relaxed);
        match (now.0 < self.state.0 || cut, now == self.state) {
            (true, _) => Err("was cut short while it was read".into()),
            (false, false) => Err("was written to while it was read".into()),
            (false, true) => Ok(()),
        }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        MAPS[self.line].end.store(0, Ordering::SeqCst);
        MAPS[self.line].start.store(0, Ordering::SeqCst);
    }
}

fn state(file: &File) -> io::Result<(u64, i64, i64)> {
    let m = file.metadata()?;
    Ok((m.len(), m.mtime(), m.mtime_nsec()))
}

/// Takes a free line.
fn take(start: usize, bytes: usize) -> io::Result<usize> {
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let free = MAPS.iter().position(|line| line.start.load(Ordering::SeqCst) == 0);
    let line = free.ok_or_else(|| io::Error::other(format!("more than {MOST} files are mapped")))?;
    MAPS[line].cut.store(false, Ordering::SeqCst);
    MAPS[line].end.store(start + bytes, Ordering::SeqCst);
    MAPS[line].start.store(start, Ordering::SeqCst);
    Ok(line)
}

/// Installs the handler, once.
fn guard() -> io::Result<()> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: it asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        PAGE.store(page, Ordering::SeqCst);
        // SAFETY: both structures are whole; the handler calls nothing but what signals may.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) != 0 {
                return;
            }
            let _ = BEFORE.set(before);
            let mut own: libc::sigaction = std::mem::zeroed();
            own.sa_sigaction = missing_page as *const () as usize;
            own.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut own.sa_mask);
            if libc::sigaction(libc::SIGBUS, &own, std::ptr::null_mut()) != 0 {
                PAGE.store(0, Ordering::SeqCst);
            }
        }
    });
    match PAGE.load(Ordering::SeqCst) {
        0 => Err(io::Error::other("the system gives no notice of missing pages")),
        _ => Ok(()),
    }
}

/// Puts a page of zeros where a mapped file has lost one.
extern "C" fn missing_page(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system hands over a whole structure, of a signal that has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let page = PAGE.load(Ordering::SeqCst).max(1);
    for line in &MAPS {
        let (start, end) = (line.start.load(Ordering::SeqCst), line.end.load(Ordering::SeqCst));
        if start == 0 || !(start..end.next_multiple_of(page)).contains(&address) {
            continue;
        }
        // SAFETY: the page is one of a map of this process, which nothing else replaces, and every
        // bit of it was lost; `mmap` is a system call alone.
        let made = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let at = (address / page * page) as *mut libc::c_void;
            libc::mmap(at, page, libc::PROT_READ, flags, -1, 0)
        };
        if made != libc::MAP_FAILED {
            line.cut.store(true, Ordering::SeqCst);
            return;
        }
    }
    // SAFETY: the handler before, or the system's own, which ends the process at the same
    // instruction.
    unsafe {
        match BEFORE.get() {
            Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
                let run: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(before.sa_sigaction);
                run(signal, info, context);
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(bytes: usize) -> (tempfile::TempDir, PathBuf, MappedFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, vec![7; bytes]).unwrap();
        let file = MappedFile::open(&path, &File::open(&path).unwrap()).unwrap();
        (folder, path, file)
    }

    #[test]
    fn a_file_that_is_cut_reads_as_zeros_and_says_so() {
        let (_folder, path, file) = mapped(1 << 16);
        assert_eq!(file.unchanged(), Ok(()));
        File::options().write(true).open(&path).unwrap().set_len(1 << 12).unwrap();
        assert_eq!((file.map[0], file.map[(1 << 16) - 1]), (7, 0));
        assert_eq!(file.unchanged(), Err("was cut short while it was read".into()));
    }

    #[test]
    fn a_file_that_is_written_to_says_so_and_one_that_is_replaced_stays() {
        let (folder, path, file) = mapped(100);
        let other = folder.path().join("other");
        std::fs::write(&other, vec![9; 100]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_eq!((file.map[50], file.unchanged()), (7, Ok(())));
        let (_folder, path, file) = mapped(100);
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&path, vec![8; 100]).unwrap();
        assert_eq!(file.unchanged(), Err("was written to while it was read".into()));
    }

    #[test]
    fn lines_are_given_back() {
        for _ in 0..2 * MOST {
            mapped(10);
        }
    }
}
