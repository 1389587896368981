//! A clock that other work on the machine does not move.

use std::time::Duration;

/// Time that this thread was running.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a timespec to the address that it gets.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "no clock of the thread");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
