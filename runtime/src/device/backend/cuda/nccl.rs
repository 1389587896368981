//! NCCL, NVIDIA's library of collectives, loaded where it is and missed politely where it is not.
//!
//! *In*: a [`Group`], by which ranks meet and hear of one another's failures, and a GPU of each.
//! *Out*: a [`Communicator`], which sums and hands on numbers of the GPUs' memories. *Promise*:
//! nothing panics where the library or one of its calls is missing; either all ranks of a group use
//! it or none; no call of it is waited for longer than the group's time-out, and a rank that fails,
//! ends or hangs ends the others with its number.
//!
//! Calls of the library may block where another rank is gone, so a thread of its own makes them, on
//! a stream of its own, after the work that was given before. It asks the library for asynchronous
//! errors (`ncclCommGetAsyncError`) while it waits, and ends the communicator (`ncclCommAbort`)
//! when it is asked to; the session meanwhile listens to the group.
//!
//! Calls, codes and rules are those of `nccl.h` (2.27) and NVIDIA's *NCCL*, sections "Creating a
//! Communicator", "Group Calls", "In-place Operations", "Point-to-point communication" and "Fault
//! Tolerance".

use super::{Context, words};
use crate::device::DeviceError;
use crate::device::backend::foreign::{calls, first, version};
use crate::device::gpu::{Exchange, Exchanged};
use crate::group::{Group, patience};
use crate::nvrtc::search::{library_in, usual_places};
use cudarc::driver::{DriverError, result, sys};
use libloading::Library;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

type Raw = *mut c_void;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

calls! {
    ncclGetVersion(*mut i32) -> u32;
    ncclGetUniqueId(*mut UniqueId) -> u32;
    ncclGetErrorString(u32) -> *const c_char;
    ncclCommInitRank(*mut Raw, i32, UniqueId, i32) -> u32;
    ncclCommDestroy(Raw) -> u32;
    ncclCommAbort(Raw) -> u32;
    ncclCommGetAsyncError(Raw, *mut u32) -> u32;
    ncclGroupStart() -> u32;
    ncclGroupEnd() -> u32;
    ncclAllReduce(u64, u64, usize, u32, u32, Raw, Raw) -> u32;
    ncclReduce(u64, u64, usize, u32, u32, i32, Raw, Raw) -> u32;
    ncclBroadcast(u64, u64, usize, u32, i32, Raw, Raw) -> u32;
    ncclSend(u64, usize, u32, i32, Raw, Raw) -> u32;
    ncclRecv(u64, usize, u32, i32, Raw, Raw) -> u32;
    ncclCommSplit(Raw, i32, i32, *mut Raw, *mut c_void) -> u32;
}

/// `ncclUint8`
const BYTE: u32 = 1;
/// `ncclInProgress`
const IN_PROGRESS: u32 = 7;
/// `ncclFloat32`
const FLOAT: u32 = 7;
/// `ncclSum`
const SUM: u32 = 0;

/// Between two looks at work that is under way.
const LOOK: Duration = Duration::from_micros(200);

/// Between two looks whether another rank failed.
const LISTEN: Duration = Duration::from_millis(50);

/// How long a rank whose library reports an error waits for word of the one that failed.
const WORD: Duration = Duration::from_secs(5);

/// The library as found on this machine.
struct Nccl {
    calls: Calls,
    /// Major, minor, patch.
    version: [usize; 3],
    _library: Library,
}

/// The value of `DREAMC_NCCL`.
fn asked() -> String {
    std::env::var("DREAMC_NCCL").unwrap_or_default()
}

impl Nccl {
    /// Looks for it, once per process; an error says what is missing.
    fn find() -> Result<&'static Nccl, &'static str> {
        static FOUND: OnceLock<Result<Nccl, String>> = OnceLock::new();
        FOUND.get_or_init(Nccl::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Nccl, String> {
        const INSTALL: &str =
            "install it (`libnccl2`, or `pip install nvidia-nccl-cu13`), or name the file by DREAMC_NCCL";
        let mut names: Vec<PathBuf> = vec![];
        match asked().as_str() {
            "0" => return Err("DREAMC_NCCL is 0".into()),
            "" | "1" => {
                names.extend(usual_places().iter().filter_map(|place| library_in(place, "libnccl.so")));
                names.extend(["libnccl.so.2", "libnccl.so"].map(PathBuf::from));
            }
            file => names.push(file.into()),
        }
        let (library, at) =
            first(&names).map_err(|reason| format!("NCCL was not found ({reason}); {INSTALL}"))?;
        let calls =
            Calls::of(&library).map_err(|error| format!("NCCL at {at} lacks a call ({error}); {INSTALL}"))?;
        let mut number = 0;
        // SAFETY: a place for the version.
        let code = unsafe { (calls.ncclGetVersion)(&mut number) };
        if code != 0 {
            return Err(format!("NCCL at {at}: ncclGetVersion gives {code}; {INSTALL}"));
        }
        Ok(Nccl { calls, version: version(number.max(0) as usize), _library: library })
    }

    fn name(&self) -> String {
        format!("NCCL {}", self.version.map(|n| n.to_string()).join("."))
    }

    /// Whether a call did what it was asked for.
    fn check(&self, call: &str, code: u32) -> Result<(), String> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: it gives a string that lives as long as the library.
        let text = unsafe {
            let text = (self.calls.ncclGetErrorString)(code);
            if text.is_null() { "no words".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        Err(format!("{}: {call}: {text} ({code})", self.name()))
    }
}

/// A handle of the library, of the driver, or of a stream.
#[derive(Clone, Copy)]
struct Shared<T>(T);

// SAFETY: handles of NCCL and of the driver may be used from any thread, one at a time.
unsafe impl<T> Send for Shared<T> {}

/// Exchanges to do together, after the work before an event.
struct Job {
    behind: Shared<sys::CUevent>,
    list: Vec<Exchange>,
}

/// A rank's way to the others.
pub(super) struct Communicator {
    context: Arc<Context>,
    group: Group,
    patience: Duration,
    jobs: Option<Sender<Job>>,
    /// The seconds of each.
    done: Receiver<Result<f64, String>>,
    /// Jobs that are not done.
    pending: usize,
    /// Asks the thread to end the communicator.
    abort: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Communicator {
    /// Meets the other ranks of a group; nothing where one of them has no NCCL, or several share a
    /// GPU, so that numbers go through the host.
    pub(super) fn meet(context: &Arc<Context>, group: &Group) -> Result<Option<Self>, DeviceError> {
        if group.size() == 1 {
            return Ok(None);
        }
        let found = Nccl::find();
        let must = !matches!(asked().as_str(), "" | "0");
        let own = found.err().unwrap_or_default();
        for (rank, why) in group.gather(own.as_bytes())?.iter().enumerate() {
            if !why.is_empty() && must {
                let why = String::from_utf8_lossy(why);
                return Err(context.refuses(format!("DREAMC_NCCL asks for NCCL, and rank {rank}: {why}")));
            }
            if !why.is_empty() {
                return Ok(None);
            }
        }
        let Ok(nccl) = found else { return Ok(None) };
        let mut id = UniqueId([0; 128]);
        let made = match group.leads() {
            // SAFETY: a place for the number.
            true => nccl.check("ncclGetUniqueId", unsafe { (nccl.calls.ncclGetUniqueId)(&mut id) }),
            false => Ok(()),
        };
        // The others hear of a failure by an empty number.
        let bytes = if made.is_ok() { &id.0[..] } else { &[] };
        let bytes = group.broadcast(0, bytes)?;
        made.map_err(|why| context.refuses(why))?;
        let Ok(bytes) = <[u8; 128]>::try_from(bytes) else { return Ok(None) };
        let mut made = Communicator::start(nccl, context.clone(), group.clone(), UniqueId(bytes));
        let began = made.wait();
        // Ranks that share a GPU are no group of NCCL's.
        let refused = matches!(began, Err(DeviceError::Driver { .. }));
        let all = group.gather(&[u8::from(refused)])?;
        match began {
            Ok(_) if all.iter().all(|r| r == &[0]) => Ok(Some(made)),
            Err(error) if must || !refused => Err(error),
            Ok(_) | Err(_) => Ok(None),
        }
    }

    fn start(nccl: &'static Nccl, context: Arc<Context>, group: Group, id: UniqueId) -> Self {
        let (jobs, todo) = channel();
        let (answers, done) = channel();
        let abort = Arc::new(AtomicBool::new(false));
        let place = (group.size() as i32, group.rank() as i32);
        let (own, asked) = (context.clone(), abort.clone());
        let work = move || {
            let began = At::begin(nccl, own, id, place, asked);
            let at = match began {
                Ok(at) => at,
                Err(why) => return drop(answers.send(Err(why))),
            };
            if answers.send(Ok(0.0)).is_err() {
                return;
            }
            while let Ok(job) = todo.recv() {
                let done = at.run(&job);
                let last = done.is_err();
                if answers.send(done).is_err() || last {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("nccl".into()).spawn(work).ok();
        let patience = patience();
        // The first answer is that of the beginning.
        Communicator { context, group, patience, jobs: Some(jobs), done, pending: 1, abort, thread }
    }

    /// Jobs that are not done.
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    /// Begins to exchange, after the work before an event.
    pub(super) fn begin(&mut self, behind: sys::CUevent, list: Vec<Exchange>) -> Result<(), DeviceError> {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(Job { behind: Shared(behind), list }));
        if !matches!(sent, Some(Ok(()))) {
            // The thread ended with its reason among the answers.
            let why = self.done.try_iter().find_map(Result::err);
            return Err(self.failed(why.unwrap_or_else(|| "its thread ended".into())));
        }
        self.pending += 1;
        Ok(())
    }

    /// Waits until everything that was begun is done; gives the seconds of it.
    pub(super) fn wait(&mut self) -> Result<f64, DeviceError> {
        let (begun, mut all) = (Instant::now(), 0.0);
        while self.pending > 0 {
            match self.done.recv_timeout(LISTEN) {
                Ok(Ok(seconds)) => {
                    self.pending -= 1;
                    all += seconds;
                }
                Ok(Err(why)) => return Err(self.failed(why)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failed("its thread ended".into())),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = self.group.failed() {
                        self.end();
                        return Err(error.into());
                    }
                    if begun.elapsed() > self.patience {
                        return Err(self.roll_call());
                    }
                }
            }
        }
        Ok(all)
    }

    /// The library failed: another rank may be the reason, and say so.
    fn failed(&mut self, why: String) -> DeviceError {
        self.end();
        let begun = Instant::now();
        while begun.elapsed() < WORD {
            if let Some(error) = self.group.failed() {
                return error.into();
            }
            thread::sleep(LISTEN);
        }
        self.context.refuses(why)
    }

    /// Nothing moves: the ranks that still answer find the one that does not.
    fn roll_call(&mut self) -> DeviceError {
        self.end();
        match self.group.barrier() {
            Err(error) => error.into(),
            Ok(()) => {
                let seconds = self.patience.as_secs();
                self.context.refuses(format!("NCCL has not moved for {seconds} s, and all ranks answer"))
            }
        }
    }

    /// Ends the communicator whatever is under way.
    fn end(&mut self) {
        self.abort.store(true, SeqCst);
        self.jobs = None;
        let begun = Instant::now();
        // A call that blocks for good is left to the end of the process.
        while let Some(thread) = &self.thread {
            if thread.is_finished() {
                let _ = self.thread.take().map(thread::JoinHandle::join);
            } else if begun.elapsed() > WORD {
                self.thread = None;
            } else {
                thread::sleep(LOOK);
            }
        }
        self.pending = 0;
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.pending > 0 {
            self.abort.store(true, SeqCst);
        }
        self.end_softly();
    }
}

impl Communicator {
    /// Lets the thread come to its end: of a communicator without work, by `ncclCommDestroy`.
    fn end_softly(&mut self) {
        self.jobs = None;
        let begun = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if begun.elapsed() > WORD {
                return;
            }
            thread::sleep(LOOK);
        }
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// The thread's side.
struct At {
    nccl: &'static Nccl,
    _context: Arc<Context>,
    raw: Raw,
    rank: i32,
    /// Communicators of ranks that are as far apart as a team's length, by that.
    apart: RefCell<BTreeMap<u64, Raw>>,
    stream: sys::CUstream,
    /// After the work that was given last.
    reached: sys::CUevent,
    abort: Arc<AtomicBool>,
}

impl At {
    fn begin(
        nccl: &'static Nccl,
        context: Arc<Context>,
        id: UniqueId,
        (ranks, rank): (i32, i32),
        abort: Arc<AtomicBool>,
    ) -> Result<Self, String> {
        context.enter().map_err(|error| error.to_string())?;
        let mut raw = null_mut();
        // SAFETY: a place for the handle; the number is rank 0's.
        let code = unsafe { (nccl.calls.ncclCommInitRank)(&mut raw, ranks, id, rank) };
        nccl.check("ncclCommInitRank", code)?;
        let driver = |call: &str, error: DriverError| format!("{call}: {}", words(error));
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| driver("cuStreamCreate", error))?;
        let reached = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|error| driver("cuEventCreate", error))?;
        Ok(At { nccl, _context: context, raw, rank, apart: RefCell::default(), stream, reached, abort })
    }

    /// Does a job to its end, or to the end of the communicator; gives its seconds since the work
    /// before it was done.
    fn run(&self, job: &Job) -> Result<f64, String> {
        let driver = |call: &str, error: DriverError| format!("{call}: {}", words(error));
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: a live stream, and an event that the session keeps until this is done.
        unsafe { result::stream::wait_event(self.stream, job.behind.0, flags) }
            .map_err(|error| driver("cuStreamWaitEvent", error))?;
        self.give(&job.list)?;
        // SAFETY: a live event and a live stream of the context of this thread.
        unsafe { result::event::record(self.reached, self.stream) }
            .map_err(|error| driver("cuEventRecord", error))?;
        let mut since = None;
        loop {
            if self.abort.load(SeqCst) {
                return Err("another rank failed".into());
            }
            // SAFETY: a live event.
            if since.is_none() && unsafe { result::event::query(job.behind.0) }.is_ok() {
                since = Some(Instant::now());
            }
            for comm in self.all() {
                let mut code = 0;
                // SAFETY: a live communicator, and a place for the code.
                let asked = unsafe { (self.nccl.calls.ncclCommGetAsyncError)(comm, &mut code) };
                self.nccl.check("ncclCommGetAsyncError", asked)?;
                self.nccl.check("a collective", code)?;
            }
            // SAFETY: a live event.
            match unsafe { result::event::query(self.reached) } {
                Ok(()) => return Ok(since.map_or(0.0, |since| since.elapsed().as_secs_f64())),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => thread::sleep(LOOK),
                Err(error) => return Err(driver("cuEventQuery", error)),
            }
        }
    }

    /// The communicators, that of all ranks last.
    fn all(&self) -> Vec<Raw> {
        self.apart.borrow().values().copied().chain([self.raw]).collect()
    }

    /// The communicator of the ranks that are so far apart, which all ranks make when they first
    /// need it; no other work of theirs is under way then.
    fn among(&self, team: u64) -> Result<Raw, String> {
        if let Some(comm) = self.apart.borrow().get(&team) {
            return Ok(*comm);
        }
        let mut comm = null_mut();
        let color = self.rank % team.max(1) as i32;
        // SAFETY: a live communicator, and a place for the handle; no settings are given.
        let code =
            unsafe { (self.nccl.calls.ncclCommSplit)(self.raw, color, self.rank, &mut comm, null_mut()) };
        self.nccl.check("ncclCommSplit", code)?;
        self.apart.borrow_mut().insert(team, comm);
        Ok(comm)
    }

    /// Gives a list to the stream, as one group: parts of ranks are of any length.
    fn give(&self, list: &[Exchange]) -> Result<(), String> {
        let (calls, raw, stream) = (&self.nccl.calls, self.raw, self.stream.cast());
        let mut among = BTreeMap::new();
        for exchange in list {
            if let Exchanged::SumAmong(team) = exchange.what {
                among.insert(team, self.among(team)?);
            }
        }
        // SAFETY, of this and what follows: numbers of the session's memory, which the check of the
        // plan keeps inside it and which nothing else writes before the job is done.
        self.nccl.check("ncclGroupStart", unsafe { (calls.ncclGroupStart)() })?;
        let mut given = Ok(());
        for &Exchange { what, from, to, count } in list {
            let count = count as usize;
            let (call, code) = match what {
                Exchanged::Sum => ("ncclAllReduce", unsafe {
                    (calls.ncclAllReduce)(from, to, count, FLOAT, SUM, raw, stream)
                }),
                Exchanged::SumAmong(team) => ("ncclAllReduce", unsafe {
                    let comm = among.get(&team).copied().unwrap_or(raw);
                    (calls.ncclAllReduce)(from, to, count, FLOAT, SUM, comm, stream)
                }),
                Exchanged::SumOn(rank) => ("ncclReduce", unsafe {
                    (calls.ncclReduce)(from, to, count, FLOAT, SUM, rank as i32, raw, stream)
                }),
                Exchanged::From(rank) => ("ncclBroadcast", unsafe {
                    (calls.ncclBroadcast)(from, to, count, FLOAT, rank as i32, raw, stream)
                }),
                Exchanged::To(rank) => {
                    ("ncclSend", unsafe { (calls.ncclSend)(from, count, BYTE, rank as i32, raw, stream) })
                }
                Exchanged::Of(rank) => {
                    ("ncclRecv", unsafe { (calls.ncclRecv)(to, count, BYTE, rank as i32, raw, stream) })
                }
            };
            given = given.and(self.nccl.check(call, code));
        }
        let ended = self.nccl.check("ncclGroupEnd", unsafe { (calls.ncclGroupEnd)() });
        given.and(ended)
    }
}

impl Drop for At {
    fn drop(&mut self) {
        // SAFETY: made by this thread and let go of once. There is no one to tell of a failure.
        unsafe {
            let ready = result::event::query(self.reached).is_ok();
            for comm in self.all() {
                let mut code = 0;
                let asked = (self.nccl.calls.ncclCommGetAsyncError)(comm, &mut code);
                if asked == 0 && code == 0 && ready && !self.abort.load(SeqCst) {
                    (self.nccl.calls.ncclCommDestroy)(comm);
                } else {
                    (self.nccl.calls.ncclCommAbort)(comm);
                }
            }
            let _ = result::stream::synchronize(self.stream);
            let _ = result::event::destroy(self.reached);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_nccl_is_told_what_is_missing() {
        match Nccl::find() {
            Ok(_) => dreamc_skip::skip("NCCL is installed"),
            Err(why) => assert!(why.contains("install it"), "{why}"),
        }
    }
}
