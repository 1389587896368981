//! Ctrl-C and SIGTERM: a wish to stop, which the loop grants at the end of a step.
//!
//! SLURM sends SIGTERM twice within milliseconds where it takes a job's node back: its daemon does,
//! and so does `srun`. Signals of one second are one wish.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

static CAUGHT: AtomicI32 = AtomicI32::new(0);

/// When the first signal came, in milliseconds of a clock that only grows; 0 before.
static FIRST: AtomicU64 = AtomicU64::new(0);

/// Milliseconds in which signals are one wish.
const WISH: u64 = 1000;

extern "C" fn note(signal: libc::c_int) {
    let (now, first) = (now(), FIRST.load(Ordering::Relaxed));
    if first == 0 {
        FIRST.store(now.max(1), Ordering::Relaxed);
    } else if now.saturating_sub(first) >= WISH {
        // SAFETY: both calls are safe in a signal handler. The signal is held back while its
        // handler runs, and ends the process after.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    CAUGHT.store(signal, Ordering::Relaxed);
}

/// The clock of [`FIRST`], which a signal handler may read.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is whole, and the clock exists on every system with signals.
    unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
    }
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// From now on a write beyond the limit on the size of files is an error with the file's name: the
/// system's signal would end the process without a word.
pub fn ignore_limits() {
    // SAFETY: ignoring a signal runs no code of this process.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// From now on SIGINT and SIGTERM are noted; one that comes a second or more after the first ends
/// the process at once.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler calls nothing but what is safe in a signal handler; the structure is
        // zeroed, which is a valid value of all its fields.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Wishes to stop, as Ctrl-C does.
pub fn ask() {
    CAUGHT.store(libc::SIGINT, Ordering::Relaxed);
}

/// Forgets a wish to stop: a process that trains more than once begins each training without one.
pub fn forget() {
    CAUGHT.store(0, Ordering::Relaxed);
    FIRST.store(0, Ordering::Relaxed);
}

/// The signal that was caught, if any.
pub fn caught() -> Option<&'static str> {
    match CAUGHT.load(Ordering::Relaxed) {
        0 => None,
        libc::SIGTERM => Some("SIGTERM"),
        _ => Some("Ctrl-C"),
    }
}
