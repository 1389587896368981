//! Ctrl-C and SIGTERM: a wish to stop, which the loop grants at the end of a step.

use std::sync::atomic::{AtomicI32, Ordering};

static CAUGHT: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    CAUGHT.store(signal, Ordering::Relaxed);
}

/// From now on a write beyond the limit on the size of files is an error with the file's name: the
/// system's signal would end the process without a word.
pub fn ignore_limits() {
    // SAFETY: ignoring a signal runs no code of this process.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// From now on the first SIGINT and the first SIGTERM are noted; a second one ends the process at
/// once.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is safe in a signal handler; the
        // structure is zeroed, which is a valid value of all its fields.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
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
}

/// The signal that was caught, if any.
pub fn caught() -> Option<&'static str> {
    match CAUGHT.load(Ordering::Relaxed) {
        0 => None,
        libc::SIGTERM => Some("SIGTERM"),
        _ => Some("Ctrl-C"),
    }
}
