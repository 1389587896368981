//! Threads that wait for work.
//!
//! *In*: a number of tasks and a function. *Out*: the function called once for each task number, on
//! any thread, in any order. *Promise*: [`Pool::run`] allocates nothing, returns when all calls
//! have returned, and does not wait for a worker that has not begun: on a machine that is busy
//! elsewhere the caller does the work alone.
//!
//! Tasks are claimed from a counter, so threads are busy as long as there is work. That makes which
//! thread does what a matter of chance; kernels therefore never let a result depend on it: a task's
//! result is a function of its number.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// How often a worker looks for work before it sleeps: some 100 µs, longer than a launch that one
/// thread does alone and than the caller takes from one launch to the next, short enough not to be
/// noticed when a program has ended.
const SPINS: u32 = 16_000;

/// Work on offer: `call(task, thread)` for `task` in `0..tasks`.
#[derive(Clone, Copy)]
struct Job {
    /// The lifetime is extended in [`Pool::run`] alone.
    call: &'static (dyn Fn(usize, usize) + Sync),
    tasks: usize,
}

/// The door is shut: no worker may enter the job any more.
const SHUT: u64 = 1 << 31;
/// Workers inside.
const INSIDE: u64 = SHUT - 1;
/// Added for each job, above the door and the count.
const EPOCH: u64 = 1 << 32;

struct Shared {
    /// `epoch · 2³² | shut · 2³¹ | workers inside`.
    state: AtomicU64,
    /// The job of this epoch. Written only while the door is shut and nobody is inside; read only
    /// inside.
    job: UnsafeCell<Option<Job>>,
    /// The next task to claim.
    next: AtomicUsize,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    quit: AtomicBool,
}

// SAFETY: `job` is the only field that is not `Sync` by itself, and its accesses are ordered by
// `state` as said there.
unsafe impl Sync for Shared {}

/// A fixed number of threads, the caller's among them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One caller at a time.
    caller: Mutex<()>,
}

impl Pool {
    /// A pool of `threads`, so `threads - 1` new ones. Threads that the system refuses are done
    /// without.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(SHUT),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            quit: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .map_while(|thread| {
                let shared = shared.clone();
                let builder = std::thread::Builder::new().name(format!("dreamc-{thread}"));
                builder.spawn(move || shared.work(thread)).ok()
            })
            .collect();
        Pool { shared, workers, caller: Mutex::new(()) }
    }

    /// How many threads there are; thread numbers are below.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `call(task, thread)` for every task below `tasks`. No two calls that run at the same
    /// time have the same thread number. Not to be called from within a call.
    ///
    /// Errs where a call panicked; the others may then have been left out.
    pub(crate) fn run(&self, tasks: usize, call: &(dyn Fn(usize, usize) + Sync)) -> Result<(), Panicked> {
        if tasks == 0 {
            return Ok(());
        }
        if tasks == 1 || self.workers.is_empty() {
            return caught(|| (0..tasks).for_each(|task| call(task, 0)));
        }
        let _caller = self.caller.lock().unwrap_or_else(|e| e.into_inner());
        let shared = &*self.shared;
        // SAFETY: the reference is used only by workers inside the job of this epoch, and this
        // function does not return before the door is shut and the last of them has left.
        let call = unsafe {
            std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static (dyn Fn(usize, usize) + Sync)>(
                call,
            )
        };
        let job = Job { call, tasks };
        // SAFETY: the door is shut and nobody is inside, as the previous call left it.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let epoch = shared.state.load(Ordering::Relaxed) / EPOCH;
        shared.state.store((epoch + 1) << 32, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _lock = shared.lock.lock().unwrap_or_else(|e| e.into_inner());
            shared.wake.notify_all();
        }
        let mine = caught(|| shared.claim(job, 0));
        shared.state.fetch_or(SHUT, Ordering::AcqRel);
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        match shared.panicked.load(Ordering::Relaxed) {
            true => Err(Panicked),
            false => mine,
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches what its tasks throw, so there is nothing to hear from it.
            let _ = worker.join();
        }
    }
}

/// A call panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panicked;

fn caught(work: impl FnOnce()) -> Result<(), Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_: Box<dyn Any + Send>| Panicked)
}

impl Shared {
    /// Does tasks until there are none left.
    fn claim(&self, job: Job, thread: usize) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= job.tasks {
                return;
            }
            (job.call)(task, thread);
        }
    }

    fn work(&self, thread: usize) {
        let mut last = 0;
        while let Some(epoch) = self.enter(last) {
            last = epoch;
            // SAFETY: this thread is inside, so the job is not written.
            if let Some(job) = unsafe { *self.job.get() }
                && caught(|| self.claim(job, thread)).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
                // Others need not begin what nobody will use.
                self.next.store(usize::MAX / 2, Ordering::Relaxed);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a job of another epoch than `last` and enters it; `None` where the pool is
    /// dropped.
    fn enter(&self, last: u64) -> Option<u64> {
        let mut spins = 0;
        loop {
            if self.quit.load(Ordering::Relaxed) {
                return None;
            }
            let state = self.state.load(Ordering::Acquire);
            if state & SHUT == 0 && state / EPOCH != last {
                let entered =
                    self.state.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
                if entered.is_ok() {
                    return Some(state / EPOCH);
                }
                continue;
            }
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                self.sleep(last);
                spins = 0;
            }
        }
    }

    /// Sleeps until a job is offered. The caller stores the state before it looks for sleepers, and
    /// a sleeper counts itself before it looks at the state: one of them sees the other.
    fn sleep(&self, last: u64) {
        let mut lock = self.lock.lock().unwrap_or_else(|e| e.into_inner());
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let state = self.state.load(Ordering::SeqCst);
            let offered = state & SHUT == 0 && state / EPOCH != last;
            if offered || self.quit.load(Ordering::SeqCst) {
                break;
            }
            lock = self.wake.wait(lock).unwrap_or_else(|e| e.into_inner());
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 100] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(tasks, &|task, thread| {
                        assert!(thread < threads);
                        counts[task].fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                }
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn a_panic_is_reported_and_survived() {
        let pool = Pool::new(3);
        let silent = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(pool.run(8, &|task, _| assert!(task != 5)), Err(Panicked));
        std::panic::set_hook(silent);
        assert_eq!(pool.run(8, &|_, _| ()), Ok(()));
    }
}
