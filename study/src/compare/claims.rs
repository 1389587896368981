//! Claims of workers on the runs of a comparison: which process trains which.
//!
//! *In*: a folder that all workers see. *Out*: a [`Claim`] on a run, for one worker at a time.
//! *Promise*: a run is trained by one worker; a worker that dies leaves its claim without a
//! heartbeat, and another takes the run over from its last checkpoint; nothing that is at its end
//! is trained again.
//!
//! The claim of number `n` on a run is the file `RUN.claim-n`, made where there is none: a file
//! system makes it for one of them alone. Its holder writes to it every [`beat`]. A worker that has
//! seen no change for [`BEATS`] of them makes the claim of number `n + 1`, which is the one that
//! holds. A holder that finds a later claim, because its machine slept, ends without writing any
//! more. Clocks of machines are not compared: each worker measures with its own.

use crate::failure::Failure;
use crate::output::complain;
use dreamc_data::files::{about, open};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Heartbeats that a claim may miss.
const BEATS: u32 = 12;

/// Between two heartbeats: `DREAMC_HEARTBEAT` in milliseconds, five seconds by default.
pub fn beat() -> Duration {
    let asked = std::env::var("DREAMC_HEARTBEAT").ok().and_then(|ms| ms.parse().ok());
    Duration::from_millis(asked.filter(|&ms| ms > 0).unwrap_or(5000))
}

/// The claims that a worker has seen.
#[derive(Default)]
pub struct Claims {
    /// The last content of each claim, and since when it is so.
    seen: Mutex<HashMap<PathBuf, (String, Instant)>>,
}

/// The answer to a wish for a run.
pub enum Answer {
    /// It is this worker's.
    Ours(Claim),
    /// Another trains it.
    Others,
    /// It failed with another, for this reason.
    Failed(String),
}

/// A run that is this worker's until this is dropped.
pub struct Claim {
    run: PathBuf,
    path: PathBuf,
    ends: Arc<AtomicBool>,
    heart: Option<JoinHandle<()>>,
}

const FAILED: &str = "failed: ";

/// Claims on a run have numbers below this.
const MOST: u64 = 1 << 32;

/// Bytes of a claim that are read: a heartbeat is a line.
const LINE: u64 = 4096;

/// The content of a claim; none where it is gone by now.
fn content(held: &Path) -> Result<Option<String>, Failure> {
    let mut bytes = vec![];
    let read = open(held).and_then(|file| file.take(LINE).read_to_end(&mut bytes));
    match read {
        // A link to nothing is there, and would be waited for without an end.
        Err(e) if e.kind() == ErrorKind::NotFound && fs::symlink_metadata(held).is_err() => Ok(None),
        Err(e) => Err(about(held, e).into()),
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
    }
}

/// The claims on a run, by number.
fn of(run: &Path) -> Result<Vec<u64>, Failure> {
    let folder = run.parent().unwrap_or(Path::new("."));
    let name_of = format!("{}.claim-", run.file_name().unwrap_or_default().display());
    let entries = fs::read_dir(folder).map_err(|e| about(folder, e))?;
    // A number that a worker would not write is no claim, nor one that none can follow.
    let number = |e: fs::DirEntry| -> Option<u64> {
        let name = e.file_name();
        let text = name.to_str()?.strip_prefix(&name_of)?;
        text.parse().ok().filter(|n: &u64| n.to_string() == text && *n < MOST)
    };
    let mut found: Vec<u64> = entries.flatten().filter_map(number).collect();
    found.sort_unstable();
    Ok(found)
}

fn path(run: &Path, number: u64) -> PathBuf {
    run.with_file_name(format!("{}.claim-{number}", run.file_name().unwrap_or_default().display()))
}

impl Claims {
    /// Asks for a run.
    pub fn take(&self, run: &Path) -> Result<Answer, Failure> {
        let Some(&last) = of(run)?.last() else { return claim(run, 1) };
        let held = path(run, last);
        let Some(text) = content(&held)? else { return Ok(Answer::Others) };
        if let Some(reason) = text.strip_prefix(FAILED) {
            return Ok(Answer::Failed(reason.trim().into()));
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, since) = seen.entry(held).or_insert_with(|| (text.clone(), Instant::now()));
        if *before != text {
            (*before, *since) = (text, Instant::now());
        }
        if since.elapsed() < beat() * BEATS { Ok(Answer::Others) } else { claim(run, last + 1) }
    }
}

/// Makes a claim, unless another is faster.
fn claim(run: &Path, number: u64) -> Result<Answer, Failure> {
    let path = path(run, number);
    let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(Answer::Others),
        file => file.map_err(|e| about(&path, e))?,
    };
    let ends = Arc::new(AtomicBool::new(false));
    let (ended, later) = (ends.clone(), self::path(run, number + 1));
    let heart = thread::Builder::new().name("heartbeat".into()).spawn(move || live(file, &later, &ended))?;
    Ok(Answer::Ours(Claim { run: run.into(), path, ends, heart: Some(heart) }))
}

/// Writes heartbeats.
fn live(mut file: File, later: &Path, ended: &AtomicBool) {
    let holder = format!("process {} on {}", std::process::id(), host());
    for count in 0u64.. {
        if ended.load(Ordering::Relaxed) {
            return;
        }
        if later.exists() {
            complain(&format!("error: {} was made while this process slept: it ends\n", later.display()));
            std::process::exit(1);
        }
        // A beat that is lost is followed by another.
        let _ = file.rewind().and_then(|()| file.write_all(format!("{holder}: {count:012}\n").as_bytes()));
        thread::park_timeout(beat());
    }
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map_or("a machine".into(), |name| name.trim().into())
}

impl Claim {
    /// Keeps others from a run that failed, with the reason.
    pub fn failed(mut self, reason: &str) -> Result<(), Failure> {
        self.stop();
        let line = format!("{FAILED}{}\n", reason.replace('\n', " "));
        fs::write(&self.path, line).map_err(|e| about(&self.path, e))?;
        self.path = PathBuf::new();
        Ok(())
    }

    fn stop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(heart) = self.heart.take() {
            heart.thread().unpark();
            let _ = heart.join();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.stop();
        if self.path.as_os_str().is_empty() {
            return;
        }
        // The own one last: until then the run is this worker's.
        for number in of(&self.run).unwrap_or_default() {
            let _ = fs::remove_file(path(&self.run, number));
        }
    }
}
