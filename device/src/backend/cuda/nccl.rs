//! NCCL, NVIDIA's library of collectives, loaded where it is and missed politely where it is not.
//!
//! *In*: a [`Group`], by which ranks meet and hear of one another's failures, and a GPU of each.
//! *Out*: a [`Communicator`], which sums and hands on numbers of the GPUs' memories. *Promise*:
//! nothing panics where the library or one of its calls is missing; either all ranks of a group use
//! it or none; no call of it is waited for longer than the group's time-out, and a rank that fails,
//! ends or hangs ends the others with its number.
//!
//! Calls of the library may block where another rank is gone, so a thread of its own makes them, on
//! a stream of its own, after the work that was given before: an event of the session's stream says
//! so. It asks the library for asynchronous errors (`ncclCommGetAsyncError`) while it waits, and
//! ends the communicator (`ncclCommAbort`) when it is asked to; the session meanwhile listens to
//! the group.
//!
//! Exchanges go on while the session's stream computes. Work that it gives after
//! [`Communicator::after`] waits for an event that the exchange reaches, so that the host waits for
//! nothing; where the host itself needs the result, or waits for the stream, it listens meanwhile.
//!
//! Calls, codes and rules are those of `nccl.h` (2.27) and NVIDIA's *NCCL*, sections "Creating a
//! Communicator", "Group Calls", "In-place Operations", "Point-to-point communication" and "Fault
//! Tolerance".

use super::{Context, words};
use crate::DeviceError;
use crate::backend::foreign::{calls, first, version};
use crate::gpu::{Exchange, Exchanged};
use crate::group::{Group, patience};
use cudarc::driver::{DriverError, result, sys};
use dreamc_nvrtc::search::{library_in, usual_places};
use libloading::Library;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
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

/// Events of an exchange: the work before it is done, and it is.
#[derive(Clone, Copy)]
struct Events {
    begins: sys::CUevent,
    ends: sys::CUevent,
}

/// Exchanges to do together, after the work before an event.
struct Job {
    events: Shared<Events>,
    list: Vec<Exchange>,
}

/// Words of the thread about a job.
enum Answer {
    /// The library has it, and its end is an event of the stream.
    Given,
    /// It is done, and took this number of seconds.
    Done(f64),
}

/// A rank's way to the others.
pub(super) struct Communicator {
    context: Arc<Context>,
    group: Group,
    patience: Duration,
    jobs: Option<Sender<Job>>,
    answers: Receiver<Result<Answer, String>>,
    /// Jobs that were begun, that the library has, that are done, and that the session's stream
    /// comes after; the first is the beginning of the communicator.
    begun: u64,
    given: u64,
    done: u64,
    passed: u64,
    /// Seconds of jobs that are done, since they were asked for last.
    seconds: f64,
    /// Events of the last jobs, those that are done and passed left out, and events for others.
    events: VecDeque<Events>,
    free: Vec<Events>,
    /// Asks the thread to end the communicator.
    abort: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

// SAFETY: events may be used from any thread whose current context is theirs.
unsafe impl Send for Communicator {}

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
        let began = made.hear(|made| made.done > 0);
        made.passed = 1;
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
        let (answers, heard) = channel();
        let abort = Arc::new(AtomicBool::new(false));
        let place = (group.size() as i32, group.rank() as i32);
        let (own, asked) = (context.clone(), abort.clone());
        let work = move || {
            let began = At::begin(nccl, own, id, place, asked);
            let at = match began {
                Ok(at) => at,
                Err(why) => return drop(answers.send(Err(why))),
            };
            let begun = answers.send(Ok(Answer::Given)).and_then(|()| answers.send(Ok(Answer::Done(0.0))));
            if begun.is_ok()
                && let Err(why) = at.serve(&todo, &answers)
            {
                let _ = answers.send(Err(why));
            }
        };
        let thread = thread::Builder::new().name("nccl".into()).spawn(work).ok();
        Communicator {
            context,
            group,
            patience: patience(),
            jobs: Some(jobs),
            answers: heard,
            begun: 1,
            given: 0,
            done: 0,
            passed: 0,
            seconds: 0.0,
            events: VecDeque::new(),
            free: vec![],
            abort,
            thread,
        }
    }

    /// The number of the exchange that was begun last.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Begins to exchange, after the work of a stream so far.
    pub(super) fn begin(&mut self, stream: sys::CUstream, list: Vec<Exchange>) -> Result<(), DeviceError> {
        self.hear(|_| true)?;
        let events = match self.free.pop() {
            Some(events) => events,
            None => Events { begins: self.event()?, ends: self.event()? },
        };
        self.events.push_back(events);
        self.begun += 1;
        // SAFETY: a live event and a live stream of the current context.
        unsafe { result::event::record(events.begins, stream) }
            .map_err(|e| self.context.error("cuEventRecord", e))?;
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(Job { events: Shared(events), list }));
        if !matches!(sent, Some(Ok(()))) {
            // The thread ended with its reason among the answers.
            let why = self.answers.try_iter().find_map(Result::err);
            return Err(self.failed(why.unwrap_or_else(|| "its thread ended".into())));
        }
        Ok(())
    }

    fn event(&self) -> Result<sys::CUevent, DeviceError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| self.context.error("cuEventCreate", e))
    }

    /// Work that is given to a stream from now on comes after that exchange, and those before it.
    pub(super) fn after(&mut self, number: u64, stream: sys::CUstream) -> Result<(), DeviceError> {
        if number <= self.passed {
            return Ok(());
        }
        self.hear(|own| own.given >= number)?;
        let first = self.begun - self.events.len() as u64 + 1;
        if let Some(events) = self.events.get(number.saturating_sub(first) as usize) {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: a live stream, and a live event of the same context.
            unsafe { result::stream::wait_event(stream, events.ends, flags) }
                .map_err(|e| self.context.error("cuStreamWaitEvent", e))?;
        }
        self.passed = number;
        self.reuse();
        Ok(())
    }

    /// The host waits until that exchange is done, and those before it; the stream comes after it.
    pub(super) fn until(&mut self, number: u64, stream: sys::CUstream) -> Result<(), DeviceError> {
        self.hear(|own| own.done >= number)?;
        self.after(number, stream)
    }

    /// Waits for all that the stream comes after: whoever waits for the stream then waits for no
    /// other rank.
    pub(super) fn settle(&mut self) -> Result<(), DeviceError> {
        let passed = self.passed;
        self.hear(|own| own.done >= passed)
    }

    /// Waits until everything that was begun is done; gives the seconds of it.
    pub(super) fn wait(&mut self, stream: sys::CUstream) -> Result<f64, DeviceError> {
        self.until(self.begun, stream)?;
        Ok(std::mem::take(&mut self.seconds))
    }

    /// Events of jobs that are done and passed are for others.
    fn reuse(&mut self) {
        let (kept, last) = (self.begun - self.done.min(self.passed), self.events.len());
        self.free.extend(self.events.drain(..last - last.min(kept as usize)));
    }

    /// Hears the thread, until that is enough.
    fn hear(&mut self, enough: impl Fn(&Self) -> bool) -> Result<(), DeviceError> {
        let begun = Instant::now();
        loop {
            while let Ok(answer) = self.answers.try_recv() {
                self.heard(answer)?;
            }
            if enough(self) {
                return Ok(());
            }
            match self.answers.recv_timeout(LISTEN) {
                Ok(answer) => self.heard(answer)?,
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
    }

    fn heard(&mut self, answer: Result<Answer, String>) -> Result<(), DeviceError> {
        match answer {
            Ok(Answer::Given) => self.given += 1,
            Ok(Answer::Done(seconds)) => {
                self.done += 1;
                self.seconds += seconds;
                self.reuse();
            }
            Err(why) => return Err(self.failed(why)),
        }
        Ok(())
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
        self.done = self.begun;
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let done = self.answers.try_iter().filter(|answer| matches!(answer, Ok(Answer::Done(_)))).count();
        if self.done + (done as u64) < self.begun {
            self.abort.store(true, SeqCst);
        }
        self.end_softly();
        // A thread that a call holds for good may still look at them.
        if self.thread.is_none() && self.context.enter().is_ok() {
            for events in self.events.iter().chain(&self.free) {
                for event in [events.begins, events.ends] {
                    // SAFETY: made by this communicator and let go of once, after its stream has
                    // come to its end.
                    let _ = unsafe { result::event::destroy(event) };
                }
            }
        }
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
    /// Whether all jobs are done.
    ready: Cell<bool>,
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
        Ok(At {
            nccl,
            _context: context,
            raw,
            rank,
            apart: RefCell::default(),
            stream,
            ready: Cell::new(true),
            abort,
        })
    }

    /// Gives jobs to the library as they come, and says when each is done.
    fn serve(&self, todo: &Receiver<Job>, answers: &Sender<Result<Answer, String>>) -> Result<(), String> {
        let mut under_way: VecDeque<Shared<Events>> = VecDeque::new();
        // When the work before the first of them was done.
        let mut since = None;
        let mut open = true;
        while open || !under_way.is_empty() {
            let job = match under_way.is_empty() {
                true => todo.recv().map_err(|_| TryRecvError::Disconnected),
                false => todo.try_recv(),
            };
            match job {
                Ok(job) => {
                    // No work is under way where ranks make a communicator.
                    while self.splits(&job.list) && !under_way.is_empty() {
                        self.look(&mut under_way, &mut since, answers)?;
                    }
                    self.begin_job(&job)?;
                    under_way.push_back(job.events);
                    if answers.send(Ok(Answer::Given)).is_err() {
                        return Ok(());
                    }
                }
                Err(TryRecvError::Empty) => self.look(&mut under_way, &mut since, answers)?,
                Err(TryRecvError::Disconnected) => {
                    open = false;
                    self.look(&mut under_way, &mut since, answers)?;
                }
            }
        }
        Ok(())
    }

    /// Gives a job to the stream, between its events.
    fn begin_job(&self, job: &Job) -> Result<(), String> {
        let driver = |call: &str, error: DriverError| format!("{call}: {}", words(error));
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let Shared(events) = job.events;
        self.ready.set(false);
        // SAFETY: a live stream, and an event that the session keeps until this is done.
        unsafe { result::stream::wait_event(self.stream, events.begins, flags) }
            .map_err(|error| driver("cuStreamWaitEvent", error))?;
        self.give(&job.list)?;
        // SAFETY: a live event and a live stream of the context of this thread.
        unsafe { result::event::record(events.ends, self.stream) }
            .map_err(|error| driver("cuEventRecord", error))
    }

    /// Looks after the jobs under way: says of the first that it is done, or rests.
    fn look(
        &self,
        under_way: &mut VecDeque<Shared<Events>>,
        since: &mut Option<Instant>,
        answers: &Sender<Result<Answer, String>>,
    ) -> Result<(), String> {
        if self.abort.load(SeqCst) {
            return Err("another rank failed".into());
        }
        let Some(&Shared(first)) = under_way.front() else { return Ok(()) };
        // SAFETY: a live event.
        if since.is_none() && unsafe { result::event::query(first.begins) }.is_ok() {
            *since = Some(Instant::now());
        }
        for comm in self.all() {
            let mut code = 0;
            // SAFETY: a live communicator, and a place for the code.
            let asked = unsafe { (self.nccl.calls.ncclCommGetAsyncError)(comm, &mut code) };
            self.nccl.check("ncclCommGetAsyncError", asked)?;
            self.nccl.check("a collective", code)?;
        }
        // SAFETY: a live event.
        match unsafe { result::event::query(first.ends) } {
            Ok(()) => {
                under_way.pop_front();
                self.ready.set(under_way.is_empty());
                let seconds = since.take().map_or(0.0, |since| since.elapsed().as_secs_f64());
                // A session that is gone hears nothing.
                let _ = answers.send(Ok(Answer::Done(seconds)));
            }
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => thread::sleep(LOOK),
            Err(error) => return Err(format!("cuEventQuery: {}", words(error))),
        }
        Ok(())
    }

    /// Whether a list needs a communicator that is not made yet.
    fn splits(&self, list: &[Exchange]) -> bool {
        let apart = self.apart.borrow();
        list.iter()
            .any(|exchange| matches!(exchange.what, Exchanged::SumAmong(team) if !apart.contains_key(&team)))
    }

    /// The communicators, that of all ranks last.
    fn all(&self) -> Vec<Raw> {
        self.apart.borrow().values().copied().chain([self.raw]).collect()
    }

    /// The communicator of the ranks that are so far apart, which all ranks make when they first
    /// need it; no other work of theirs is under way then ([`At::splits`]).
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
            let ready = self.ready.get();
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
