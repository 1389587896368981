//! NCCL as the stand-in's cards need it: the calls that dreamc makes, between processes that share
//! a folder of this machine.
//!
//! Documentation that the rules are from: `nccl.h` (2.27) and NVIDIA's *NCCL*, sections "Creating a
//! Communicator", "Group Calls", "Using NCCL with CUDA streams", "Thread safety" and "Fault
//! Tolerance". Where something is open, what is worse for the caller was taken:
//!
//! - A collective is done when all ranks have come to it and somebody looks, and not before; one
//!   whose peer is gone, or gives other numbers, never is. No call says so.
//! - `ncclCommInitRank` returns when all ranks have called it; two of them on one card are an
//!   invalid usage.
//! - Sums begin at another rank for each number, as in rings.
//! - Bytes from one rank to another are a matter of the two: a send is done when the other has
//!   asked for as many bytes, and not before. Of two between the same ranks the first asked for is
//!   the first.
//! - A group has collectives or such bytes, not both.
//! - An error comes out of `ncclCommGetAsyncError` alone, and nothing moves from then on.
//! - A communicator that was ended is not to be used; `ncclCommDestroy` is not for one with work
//!   under way, which `ncclCommAbort` ends.
//!
//! Faults of `STANDIN`: `ncclAsync:NUMBER:CODE` is an asynchronous error of that collective,
//! `ncclHang:NUMBER:1` has it never done.

use crate::Machine;
use crate::library::{self, Status, calls};
use crate::machine::Context;
use crate::order::Range;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

type Handle = *mut c_void;

/// `ncclUnhandledCudaError`
pub const UNHANDLED_CUDA: u32 = 1;
/// `ncclSystemError`
pub const SYSTEM: u32 = 2;
/// `ncclInternalError`
pub const INTERNAL: u32 = 3;
/// `ncclInvalidArgument`
pub const INVALID_ARGUMENT: u32 = 4;
/// `ncclInvalidUsage`
pub const INVALID_USAGE: u32 = 5;

/// `ncclFloat32`
const FLOAT: u32 = 7;
/// `ncclUint8`
const BYTE: u32 = 1;
/// `ncclSum`
const SUM: u32 = 0;

/// 2.27.0: major times 10000 and minor times 100.
const VERSION: c_int = 22_700;

/// Bytes of `ncclUniqueId`.
const ID: usize = 128;

/// Between two looks whether all ranks have come.
const LOOK: Duration = Duration::from_millis(2);

/// A communicator.
pub struct Comm {
    folder: PathBuf,
    rank: u32,
    ranks: u32,
    /// Its context.
    context: u64,
    /// `ncclResult_t` of what failed.
    error: AtomicU32,
    /// Nothing moves any more.
    hangs: AtomicBool,
    ended: AtomicBool,
    /// How often bytes were asked to go from one rank to another, by both.
    passed: Mutex<HashMap<(u32, u32), u64>>,
    /// How often it was split.
    splits: AtomicU32,
}

/// The use of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sum,
    SumOn(u32),
    From(u32),
    To(u32),
    Of(u32),
}

/// A call that was given.
#[derive(Clone, Copy, Debug)]
struct Given {
    kind: Kind,
    from: u64,
    to: u64,
    /// Numbers, or bytes from one rank to another.
    count: u64,
    /// Which of those between the same ranks.
    turn: u64,
}

impl Given {
    fn bytes(&self) -> u64 {
        match self.kind {
            Kind::Sum | Kind::SumOn(_) | Kind::From(_) => 4 * self.count,
            Kind::To(_) | Kind::Of(_) => self.count,
        }
    }

    fn passes(&self) -> bool {
        matches!(self.kind, Kind::To(_) | Kind::Of(_))
    }
}

/// The calls of a group, or one by itself, as a stream has them.
pub struct Collective {
    comm: Arc<Comm>,
    number: u64,
    calls: Vec<Given>,
    begun: AtomicBool,
}

/// Calls of a group that has not ended.
type Calls = Vec<(u64, u64, Given)>;

/// The library in a process.
#[derive(Default)]
pub struct State {
    next: u64,
    comms: HashMap<u64, (Arc<Comm>, u64)>,
    /// Threads with open groups: how many, and what was given in them.
    groups: HashMap<ThreadId, (u32, Calls)>,
}

impl State {
    /// Communicators that are not ended.
    pub fn left(&self) -> usize {
        self.comms.len()
    }
}

impl Machine {
    fn comm(&mut self, handle: u64) -> Status<Arc<Comm>> {
        match self.nccl.comms.get(&handle) {
            Some((comm, _)) => Ok(comm.clone()),
            None => {
                self.complain("NCCL: a communicator that is not, or is gone".into());
                Err(INVALID_ARGUMENT)
            }
        }
    }

    /// `ncclGetUniqueId`: the folder in which ranks meet.
    fn unique_id(&mut self) -> Status<[u8; ID]> {
        self.ask("ncclGetUniqueId")?;
        // In tests several machines are in one process.
        static IDS: AtomicU32 = AtomicU32::new(0);
        let name = format!("standin-nccl-{}-{}", std::process::id(), IDS.fetch_add(1, SeqCst));
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).map_err(|_| SYSTEM)?;
        let mut id = [0; ID];
        let bytes = folder.as_os_str().as_encoded_bytes();
        id.get_mut(..bytes.len()).ok_or(SYSTEM)?.copy_from_slice(bytes);
        Ok(id)
    }

    /// The beginning of `ncclCommInitRank`.
    fn arrive(&mut self, id: &[u8; ID], ranks: i32, rank: i32) -> Status<Comm> {
        self.ask("ncclCommInitRank")?;
        let context = self.current_context().ok_or(UNHANDLED_CUDA)?;
        let (Ok(ranks), Ok(rank)) = (u32::try_from(ranks), u32::try_from(rank)) else {
            return Err(INVALID_ARGUMENT);
        };
        let path = String::from_utf8_lossy(id).trim_end_matches('\0').to_string();
        let folder = PathBuf::from(path);
        if rank >= ranks || !folder.is_dir() {
            return Err(INVALID_ARGUMENT);
        }
        write(&folder, &format!("card.{rank}"), &(context >> 32).to_le_bytes())?;
        Ok(Comm::new(folder, (rank, ranks), context))
    }

    /// The beginning of `ncclCommSplit`: the communicator, and how often it was split before.
    fn parts(&mut self, handle: u64) -> Status<(Arc<Comm>, u32)> {
        self.ask("ncclCommSplit")?;
        let comm = self.comm(handle)?;
        if self.gave(&comm) {
            self.complain("ncclCommSplit of a communicator with work under way".into());
            return Err(INVALID_USAGE);
        }
        let number = comm.splits.fetch_add(1, SeqCst);
        Ok((comm, number))
    }

    fn arrived(&mut self, comm: Comm) -> u64 {
        self.nccl.next += 1;
        let handle = 0x20_0000 + (self.nccl.next << 4);
        self.nccl.comms.insert(handle, (Arc::new(comm), 0));
        handle
    }

    /// `ncclCommDestroy` and `ncclCommAbort`
    fn end_comm(&mut self, handle: u64, name: &str, abort: bool) -> Status<()> {
        self.ask(name)?;
        let comm = self.comm(handle)?;
        if !abort && self.gave(&comm) {
            self.complain("ncclCommDestroy of a communicator with work under way".into());
        }
        comm.ended.store(true, SeqCst);
        self.nccl.comms.remove(&handle);
        let _ = fs::remove_file(comm.folder.join(format!("card.{}", comm.rank)));
        // The last to go takes the folder along: others may still read what this one brought.
        let mut left = fs::read_dir(&comm.folder).into_iter().flatten().flatten();
        if !left.any(|file| file.file_name().to_string_lossy().starts_with("card")) {
            let _ = fs::remove_dir_all(&comm.folder);
        }
        Ok(())
    }

    /// `ncclCommGetAsyncError`
    fn async_error(&mut self, handle: u64) -> Status<u32> {
        Ok(self.comm(handle)?.error.load(SeqCst))
    }

    /// `ncclGroupStart`
    fn group_start(&mut self) -> Status<()> {
        self.ask("ncclGroupStart")?;
        self.nccl.groups.entry(thread::current().id()).or_default().0 += 1;
        Ok(())
    }

    /// `ncclGroupEnd`
    fn group_end(&mut self) -> Status<()> {
        self.ask("ncclGroupEnd")?;
        let thread = thread::current().id();
        let Some((open, _)) = self.nccl.groups.get_mut(&thread) else {
            self.complain("ncclGroupEnd without ncclGroupStart".into());
            return Err(INVALID_USAGE);
        };
        *open -= 1;
        if *open > 0 {
            return Ok(());
        }
        let calls = self.nccl.groups.remove(&thread).map_or(vec![], |(_, calls)| calls);
        let Some(&(comm, stream, _)) = calls.first() else { return Ok(()) };
        if calls.iter().any(|call| (call.0, call.1) != (comm, stream)) {
            self.complain("a group of several communicators or streams".into());
            return Err(INVALID_USAGE);
        }
        self.give_collective(comm, stream, calls.into_iter().map(|call| call.2).collect())
    }

    /// A collective.
    fn collect(
        &mut self,
        name: &str,
        given: Given,
        (dtype, op): (u32, u32),
        comm: Handle,
        stream: Handle,
    ) -> Status<()> {
        self.ask(name)?;
        let (comm, stream) = (comm as u64, stream as u64);
        let ranks = self.comm(comm)?.ranks;
        let root = match given.kind {
            Kind::Sum => 0,
            Kind::SumOn(root) | Kind::From(root) | Kind::To(root) | Kind::Of(root) => root,
        };
        let inside = |m: &mut Machine, at| m.holds(at, given.bytes());
        let reads = inside(self, given.from) && inside(self, given.to);
        let expected = if given.passes() { BYTE } else { FLOAT };
        if dtype != expected || op != SUM || root >= ranks || !reads {
            return Err(INVALID_ARGUMENT);
        }
        match self.nccl.groups.get_mut(&thread::current().id()) {
            Some((_, calls)) => {
                calls.push((comm, stream, given));
                Ok(())
            }
            None => self.give_collective(comm, stream, vec![given]),
        }
    }

    fn give_collective(&mut self, handle: u64, stream: u64, calls: Vec<Given>) -> Status<()> {
        let comm = self.comm(handle)?;
        if self.current_context() != Some(comm.context) {
            self.complain("NCCL: a communicator of another context".into());
            return Err(UNHANDLED_CUDA);
        }
        let passes = calls.iter().filter(|call| call.passes()).count();
        if passes > 0 && passes < calls.len() {
            self.complain("NCCL: collectives and sends in one group, which the stand-in has not".into());
            return Err(INVALID_USAGE);
        }
        let mut calls = calls;
        for call in &mut calls {
            call.turn = comm.turn(call.kind);
        }
        let number = self.nccl.comms.get_mut(&handle).map_or(0, |(_, number)| {
            *number += u64::from(passes == 0);
            *number
        });
        let collective = Collective { comm, number, calls, begun: AtomicBool::new(false) };
        self.give_exchange(stream, Arc::new(collective)).map_err(|_| UNHANDLED_CUDA)
    }
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Status<()> {
    let temporary = folder.join(format!("{name}.new"));
    fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, folder.join(name))).map_err(|_| SYSTEM)
}

impl Comm {
    fn new(folder: PathBuf, (rank, ranks): (u32, u32), context: u64) -> Self {
        let (error, hangs, ended) = (AtomicU32::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let (passed, splits) = (Mutex::default(), AtomicU32::new(0));
        Comm { folder, rank, ranks, context, error, hangs, ended, passed, splits }
    }

    /// Counts a call between two ranks.
    fn turn(&self, kind: Kind) -> u64 {
        // Both sides of bytes of a rank for itself are here: each counts its own.
        let key = match kind {
            Kind::To(rank) => (self.rank, rank),
            Kind::Of(rank) if rank == self.rank => (u32::MAX, rank),
            Kind::Of(rank) => (rank, self.rank),
            Kind::Sum | Kind::SumOn(_) | Kind::From(_) => return 0,
        };
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = passed.entry(key).or_default();
        *turn += 1;
        *turn
    }

    /// The file with the bytes of a call between two ranks, and the one that asks for them.
    fn files(&self, call: &Given) -> [PathBuf; 2] {
        let (from, to) = match call.kind {
            Kind::To(rank) => (self.rank, rank),
            Kind::Of(rank) => (rank, self.rank),
            Kind::Sum | Kind::SumOn(_) | Kind::From(_) => (self.rank, self.rank),
        };
        ["bytes", "asks"].map(|what| self.folder.join(format!("{what}.{from}.{to}.{}", call.turn)))
    }
}

impl Collective {
    /// Brings bytes to other ranks, or takes theirs, where all that it waits for has come; whether
    /// it is over.
    fn pass(&self, context: &mut Context) -> bool {
        let comm = &self.comm;
        let mut found = vec![];
        for call in &self.calls {
            let [bytes, asks] = comm.files(call);
            let theirs = if matches!(call.kind, Kind::To(_)) { &asks } else { &bytes };
            let Ok(theirs) = fs::read(theirs) else { return false };
            let count = match call.kind {
                Kind::To(_) => theirs.first_chunk().map_or(0, |count| u64::from_le_bytes(*count)),
                _ => theirs.len() as u64,
            };
            if count != call.count {
                let kind = call.kind;
                context.say(format!("complaint: NCCL: {count} bytes where {kind:?} has {}", call.count));
                comm.hangs.store(true, SeqCst);
                return false;
            }
            found.push((call, theirs));
        }
        for (call, theirs) in found {
            let [bytes, asks] = comm.files(call);
            if let Kind::Of(_) = call.kind {
                context.put(call.to, &theirs);
                let _ = fs::remove_file(bytes);
            } else {
                let _ = fs::remove_file(asks);
            }
        }
        true
    }

    /// Writes what this rank has for others, and what it asks of them.
    fn asks(&self, context: &mut Context) -> Status<()> {
        for call in &self.calls {
            let [bytes, asks] = self.comm.files(call);
            let (file, content) = match call.kind {
                Kind::To(_) => (bytes, context.bytes(call.from, call.count).unwrap_or_default()),
                _ => (asks, call.count.to_le_bytes().to_vec()),
            };
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            write(&self.comm.folder, &name, &content)?;
        }
        Ok(())
    }

    /// Memory of this rank that it reads, and that it writes.
    pub(crate) fn ranges(&self) -> (Vec<Range>, Vec<Range>) {
        let (mut reads, mut writes) = (vec![], vec![]);
        for call in &self.calls {
            let gives = match call.kind {
                Kind::To(_) => true,
                Kind::Sum | Kind::SumOn(_) | Kind::From(_) | Kind::Of(_) => self.brings(call, self.comm.rank),
            };
            let takes = match call.kind {
                Kind::SumOn(root) => root == self.comm.rank,
                Kind::Sum | Kind::From(_) | Kind::Of(_) => true,
                Kind::To(_) => false,
            };
            reads.extend(gives.then_some((call.from, call.bytes())));
            writes.extend(takes.then_some((call.to, call.bytes())));
        }
        (reads, writes)
    }

    /// Whether it is of a communicator.
    pub(crate) fn is_of(&self, comm: &Arc<Comm>) -> bool {
        Arc::ptr_eq(&self.comm, comm)
    }

    /// The first words of what a rank brings.
    fn words(&self) -> String {
        let of = |call: &Given| format!("{:?} {}", call.kind, call.count);
        self.calls.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    fn brings(&self, call: &Given, rank: u32) -> bool {
        match call.kind {
            Kind::Sum | Kind::SumOn(_) => true,
            Kind::From(root) => root == rank,
            Kind::To(_) | Kind::Of(_) => false,
        }
    }

    /// Does it, where all ranks have come; whether it is over.
    pub(crate) fn progress(&self, context: &mut Context) -> bool {
        let comm = &self.comm;
        if comm.ended.load(SeqCst) {
            return true;
        }
        if comm.hangs.load(SeqCst) {
            return false;
        }
        if !self.begun.swap(true, SeqCst) {
            if let Err(code) = context.ordered("ncclAsync") {
                comm.error.store(code, SeqCst);
                comm.hangs.store(true, SeqCst);
                return false;
            }
            if context.ordered("ncclHang").is_err() {
                comm.hangs.store(true, SeqCst);
                return false;
            }
            if self.calls.iter().any(Given::passes) {
                if self.asks(context).is_err() {
                    comm.error.store(SYSTEM, SeqCst);
                    comm.hangs.store(true, SeqCst);
                }
                return false;
            }
            let mut bytes = format!("{}\n", self.words()).into_bytes();
            for call in self.calls.iter().filter(|call| self.brings(call, comm.rank)) {
                match context.bytes(call.from, 4 * call.count) {
                    Some(found) => bytes.extend(found),
                    None => return true,
                }
            }
            if write(&comm.folder, &format!("{}.{}", self.number, comm.rank), &bytes).is_err() {
                comm.error.store(SYSTEM, SeqCst);
                comm.hangs.store(true, SeqCst);
                return false;
            }
        }
        if self.calls.iter().any(Given::passes) {
            return self.pass(context);
        }
        let read = |rank| fs::read(comm.folder.join(format!("{}.{rank}", self.number))).ok();
        let Some(all) = (0..comm.ranks).map(read).collect::<Option<Vec<_>>>() else { return false };
        let words = format!("{}\n", self.words());
        if let Some(rank) = all.iter().position(|bytes| !bytes.starts_with(words.as_bytes())) {
            context.say(format!("complaint: NCCL: rank {rank} gives another collective than {words:?}"));
            comm.hangs.store(true, SeqCst);
            return false;
        }
        let mut places = vec![words.len(); all.len()];
        for call in &self.calls {
            let mut values: Vec<Vec<f32>> = vec![];
            for (rank, (bytes, place)) in (0..).zip(all.iter().zip(&mut places)) {
                if self.brings(call, rank) {
                    let end = *place + 4 * call.count as usize;
                    let own = bytes.get(*place..end).unwrap_or_default().chunks_exact(4);
                    values.push(own.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect());
                    *place = end;
                }
            }
            let takes = !matches!(call.kind, Kind::SumOn(root) if root != comm.rank);
            if takes {
                context.put(call.to, &summed(&values));
            }
        }
        // Whoever has come to this one is past the one before.
        if self.number > 1 {
            let _ = fs::remove_file(comm.folder.join(format!("{}.{}", self.number - 1, comm.rank)));
        }
        true
    }
}

/// Bytes of sums that begin at another rank for each number.
fn summed(values: &[Vec<f32>]) -> Vec<u8> {
    let (ranks, count) = (values.len(), values.first().map_or(0, Vec::len));
    let of = |i: usize| (0..ranks).map(|r| values[(i + r) % ranks][i]).reduce(|a, b| a + b).unwrap_or(0.0);
    (0..count).flat_map(|i| of(i).to_le_bytes()).collect()
}

/// Writes a result.
fn give<T>(to: *mut T, value: Status<T>) -> Status<()> {
    library::give(INVALID_ARGUMENT, to, value)
}

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; ID]);

calls! {
    INTERNAL;
    ncclGetVersion(to: *mut c_int) => |_, to| give(to, Ok(VERSION));
    ncclGetUniqueId(to: *mut UniqueId) => |m, to| give(to, m.unique_id().map(UniqueId));
    ncclCommDestroy(comm: Handle) => |m, comm| m.end_comm(comm as u64, "ncclCommDestroy", false);
    ncclCommAbort(comm: Handle) => |m, comm| m.end_comm(comm as u64, "ncclCommAbort", true);
    ncclCommGetAsyncError(comm: Handle, to: *mut u32) => |m, comm, to| give(to, m.async_error(comm as u64));
    ncclGroupStart() => |m| m.group_start();
    ncclGroupEnd() => |m| m.group_end();
    ncclAllReduce(from: u64, to: u64, count: usize, dtype: u32, op: u32, comm: Handle, stream: Handle) =>
        |m, from, to, count, dtype, op, comm, stream| {
            let given = Given { kind: Kind::Sum, from, to, count: count as u64, turn: 0 };
            m.collect("ncclAllReduce", given, (dtype, op), comm, stream)
        };
    ncclReduce(from: u64, to: u64, count: usize, dtype: u32, op: u32, root: c_int, comm: Handle, stream: Handle) =>
        |m, from, to, count, dtype, op, root, comm, stream| {
            let given = Given { kind: Kind::SumOn(root as u32), from, to, count: count as u64, turn: 0 };
            m.collect("ncclReduce", given, (dtype, op), comm, stream)
        };
    ncclBroadcast(from: u64, to: u64, count: usize, dtype: u32, root: c_int, comm: Handle, stream: Handle) =>
        |m, from, to, count, dtype, root, comm, stream| {
            let given = Given { kind: Kind::From(root as u32), from, to, count: count as u64, turn: 0 };
            m.collect("ncclBroadcast", given, (dtype, SUM), comm, stream)
        };
    ncclSend(from: u64, count: usize, dtype: u32, peer: c_int, comm: Handle, stream: Handle) =>
        |m, from, count, dtype, peer, comm, stream| {
            let given = Given { kind: Kind::To(peer as u32), from, to: from, count: count as u64, turn: 0 };
            m.collect("ncclSend", given, (dtype, SUM), comm, stream)
        };
    ncclRecv(to: u64, count: usize, dtype: u32, peer: c_int, comm: Handle, stream: Handle) =>
        |m, to, count, dtype, peer, comm, stream| {
            let given = Given { kind: Kind::Of(peer as u32), from: to, to, count: count as u64, turn: 0 };
            m.collect("ncclRecv", given, (dtype, SUM), comm, stream)
        };
}

/// As NVIDIA documents it: it returns when all ranks have called it.
///
/// # Safety
/// `to` is a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(to: *mut Handle, ranks: c_int, id: UniqueId, rank: c_int) -> u32 {
    let mut comm = None;
    let status = library::call(INTERNAL, |machine| {
        comm = Some(machine.arrive(&id.0, ranks, rank)?);
        Ok(())
    });
    let Some(comm) = comm else { return status };
    let cards = loop {
        let read = |rank| fs::read(comm.folder.join(format!("card.{rank}"))).ok();
        if let Some(cards) = (0..comm.ranks).map(read).collect::<Option<Vec<_>>>() {
            break cards;
        }
        thread::sleep(LOOK);
    };
    let doubled = cards.iter().enumerate().any(|(i, card)| cards[..i].contains(card));
    if doubled {
        return INVALID_USAGE;
    }
    library::call(INTERNAL, |machine| {
        let handle = machine.arrived(comm);
        give(to, Ok(handle as Handle))
    })
}

/// As NVIDIA documents it: it returns when all ranks of the communicator have called it. Those of a
/// color are in the order of their keys.
///
/// # Safety
/// `to` is a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: Handle,
    color: c_int,
    key: c_int,
    to: *mut Handle,
    _config: *mut c_void,
) -> u32 {
    let mut found = None;
    let status = library::call(INTERNAL, |machine| {
        let (comm, number) = machine.parts(comm as u64)?;
        let own = [color.to_le_bytes(), key.to_le_bytes()].concat();
        write(&comm.folder, &format!("split.{number}.{}", comm.rank), &own)?;
        found = Some((comm, number));
        Ok(())
    });
    let Some((comm, number)) = found else { return status };
    let all = loop {
        let read = |rank| fs::read(comm.folder.join(format!("split.{number}.{rank}"))).ok();
        if let Some(all) = (0..comm.ranks).map(read).collect::<Option<Vec<_>>>() {
            break all;
        }
        if comm.ended.load(SeqCst) {
            return INVALID_ARGUMENT;
        }
        thread::sleep(LOOK);
    };
    let of = |bytes: &[u8], at: usize| {
        bytes.get(at..at + 4).and_then(|b| b.first_chunk()).map_or(0, |b| c_int::from_le_bytes(*b))
    };
    let mut same: Vec<(c_int, u32)> =
        (0..).zip(&all).filter(|(_, b)| of(b, 0) == color).map(|(rank, b)| (of(b, 4), rank)).collect();
    same.sort_unstable();
    let rank = same.iter().position(|(_, rank)| *rank == comm.rank).unwrap_or(0) as u32;
    let folder = comm.folder.with_extension(format!("{number}-{color}"));
    library::call(INTERNAL, |machine| {
        fs::create_dir_all(&folder).map_err(|_| SYSTEM)?;
        write(&folder, &format!("card.{rank}"), &(comm.context >> 32).to_le_bytes())?;
        let made = Comm::new(folder.clone(), (rank, same.len() as u32), comm.context);
        give(to, Ok(machine.arrived(made) as Handle))
    })
}

/// As NVIDIA documents it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: u32) -> *const c_char {
    static WORDS: OnceLock<Vec<CString>> = OnceLock::new();
    let all = [
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "operation in progress",
        "unknown result code",
    ];
    let words = WORDS.get_or_init(|| all.iter().filter_map(|text| CString::new(*text).ok()).collect());
    words.get(code as usize).or(words.last()).map_or(std::ptr::null(), |text| text.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::machine::Outcome;
    use cudarc::driver::sys::CUresult;

    const NOT_READY: Outcome<()> = Err(CUresult::CUDA_ERROR_NOT_READY);

    /// A process with a card, four numbers and a stream.
    struct Rank {
        machine: Machine,
        memory: u64,
        stream: u64,
        event: u64,
        comm: u64,
    }

    impl Rank {
        fn new(settings: &str, card: i32, values: [f32; 4]) -> Self {
            let mut machine = Machine::new(Settings::parse(&format!("cards=2 {settings}")).unwrap());
            machine.init(0).unwrap();
            let context = machine.retain(card).unwrap();
            machine.set_current(context).unwrap();
            let (stream, memory) = (machine.stream(1).unwrap(), machine.alloc(16).unwrap());
            let event = machine.event(0).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            // SAFETY: waited for while the bytes are there.
            unsafe { machine.to_device(memory, bytes.as_ptr(), 16, stream) }.unwrap();
            machine.wait(stream).unwrap();
            Rank { machine, memory, stream, event, comm: 0 }
        }

        fn collect(&mut self, kind: Kind, first: u64, count: u64) -> Status<()> {
            let at = self.memory + 4 * first;
            let given = Given { kind, from: at, to: at, count, turn: 0 };
            let (comm, stream) = (self.comm as Handle, self.stream as Handle);
            self.machine.collect("a collective", given, (FLOAT, SUM), comm, stream)
        }

        fn record(&mut self) {
            self.machine.record_event(self.event, self.stream).unwrap();
        }

        fn done(&mut self) -> Outcome<()> {
            self.machine.query_event(self.event)
        }

        fn values(&mut self) -> [f32; 4] {
            let mut bytes = [0u8; 16];
            // SAFETY: waited for while the bytes are there.
            unsafe { self.machine.to_host(bytes.as_mut_ptr(), self.memory, 16, self.stream) }.unwrap();
            self.machine.wait(self.stream).unwrap();
            std::array::from_fn(|i| f32::from_le_bytes(std::array::from_fn(|k| bytes[4 * i + k])))
        }
    }

    /// Two ranks that met.
    fn pair(settings: &str) -> [Rank; 2] {
        let mut all =
            [Rank::new("", 0, [1.0, 2.0, 3.0, 4.0]), Rank::new(settings, 1, [10.0, 20.0, 30.0, 40.0])];
        let id = all[0].machine.unique_id().unwrap();
        for (number, rank) in (0..).zip(&mut all) {
            let comm = rank.machine.arrive(&id, 2, number).unwrap();
            rank.comm = rank.machine.arrived(comm);
        }
        all
    }

    fn end(ranks: [Rank; 2]) {
        for mut rank in ranks {
            rank.machine.end_comm(rank.comm, "ncclCommAbort", true).unwrap();
        }
    }

    #[test]
    fn a_sum_is_done_when_all_have_come_and_somebody_looks() {
        let [mut a, mut b] = pair("");
        a.collect(Kind::Sum, 0, 4).unwrap();
        a.record();
        for _ in 0..3 {
            assert_eq!(a.done(), NOT_READY, "the other has not come");
        }
        b.collect(Kind::Sum, 0, 4).unwrap();
        b.record();
        assert_eq!(b.done(), NOT_READY, "nobody has looked");
        assert_eq!(b.done(), Ok(()));
        assert_eq!(a.done(), Ok(()));
        assert_eq!((a.values(), b.values()), ([11.0, 22.0, 33.0, 44.0], [11.0, 22.0, 33.0, 44.0]));
        end([a, b]);
    }

    #[test]
    fn a_group_gives_each_rank_its_part_and_all_of_them_those_of_others() {
        let [mut a, mut b] = pair("");
        for kinds in [[Kind::SumOn(0), Kind::SumOn(1)], [Kind::From(0), Kind::From(1)]] {
            for rank in [&mut a, &mut b] {
                rank.machine.group_start().unwrap();
                rank.collect(kinds[0], 0, 1).unwrap();
                rank.collect(kinds[1], 1, 3).unwrap();
                rank.machine.group_end().unwrap();
                rank.record();
            }
            while a.done().is_err() | b.done().is_err() {}
        }
        assert_eq!((a.values(), b.values()), ([11.0, 22.0, 33.0, 44.0], [11.0, 22.0, 33.0, 44.0]));
        end([a, b]);
    }

    #[test]
    fn bytes_go_from_one_rank_to_another_when_both_have_asked() {
        let [mut a, mut b] = pair("");
        let pass = |rank: &mut Rank, kind, first: u64, count| {
            let at = rank.memory + 4 * first;
            let given = Given { kind, from: at, to: at, count, turn: 0 };
            let (comm, stream) = (rank.comm as Handle, rank.stream as Handle);
            rank.machine.collect("bytes", given, (BYTE, SUM), comm, stream)
        };
        // Rank 0 sends its first number, and hands its second to itself.
        a.machine.group_start().unwrap();
        for (kind, first) in [(Kind::To(1), 0), (Kind::To(0), 1), (Kind::Of(0), 3)] {
            pass(&mut a, kind, first, 4).unwrap();
        }
        a.machine.group_end().unwrap();
        a.record();
        for _ in 0..3 {
            assert_eq!(a.done(), NOT_READY, "the other has not asked");
        }
        pass(&mut b, Kind::Of(0), 2, 4).unwrap();
        b.record();
        while a.done().is_err() | b.done().is_err() {}
        assert_eq!((a.values(), b.values()), ([1.0, 2.0, 3.0, 2.0], [10.0, 20.0, 1.0, 40.0]));
        // Another number of bytes is never done.
        pass(&mut a, Kind::To(1), 0, 8).unwrap();
        pass(&mut b, Kind::Of(0), 0, 4).unwrap();
        a.record();
        b.record();
        for _ in 0..3 {
            assert_eq!((a.done(), b.done()), (NOT_READY, NOT_READY));
        }
        assert!(b.machine.log().iter().any(|line| line.contains("bytes where")));
        end([a, b]);
    }

    /// `bump` adds one to each of a warp's words.
    const PTX: &[u8] = b"\
.version 8.0
.target sm_80
.address_size 64
.visible .entry bump(.param .u64 at)
{
.reg .b32 %r<3>;
.reg .b64 %rd<4>;
ld.param.u64 %rd1, [at];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.u32 %r2, [%rd3];
add.s32 %r2, %r2, 1;
st.global.u32 [%rd3], %r2;
ret;
}
";

    #[test]
    fn work_that_does_not_wait_for_an_exchange_is_noticed_whenever_it_runs() {
        // Another stream has the second half of numbers: by a kernel or a copy, while all are
        // summed or the first half, with a wait before or none, during the exchange or after it.
        for (kernel, all, waits, over) in (0..16).map(|i| (i & 1 > 0, i & 2 > 0, i & 4 > 0, i & 8 > 0)) {
            let [mut a, mut b] = pair("");
            let compute = a.machine.stream(1).unwrap();
            let module = a.machine.load(PTX).unwrap();
            let bump = a.machine.function(module, "bump").unwrap();
            let shape = |threads| crate::machine::Shape { grid: [1; 3], block: [threads, 1, 1], shared: 0 };
            let half = (a.memory + 8).to_le_bytes().to_vec();
            // A stream that computes.
            a.machine.launch(bump, shape(2), compute, vec![half.clone()]).unwrap();
            a.machine.wait(compute).unwrap();
            a.collect(Kind::Sum, 0, if all { 4 } else { 2 }).unwrap();
            a.record();
            b.collect(Kind::Sum, 0, if all { 4 } else { 2 }).unwrap();
            b.record();
            while over && (a.done().is_err() | b.done().is_err()) {}
            if waits {
                a.machine.wait_event(compute, a.event, 0).unwrap();
            }
            let given = match kernel {
                true => a.machine.launch(bump, shape(2), compute, vec![half]),
                false => a.machine.copy(a.memory + 8, a.memory + 12, 4, compute),
            };
            given.unwrap();
            while a.done().is_err() | b.done().is_err() {}
            let _ = a.machine.wait(compute);
            let log = a.machine.log().join("\n");
            // A thread that looked and saw it done knows as much as a stream that waits.
            let bad = all && !waits && !over;
            assert_eq!(log.contains("exchange"), bad, "{kernel} {all} {waits} {over}: {log}");
            end([a, b]);
        }
    }

    #[test]
    fn a_copy_with_the_host_that_waits_for_an_exchange_is_noticed() {
        for (waits, over) in [(false, false), (true, false), (true, true)] {
            let [mut a, mut b] = pair("");
            let (compute, other) = (a.machine.stream(1).unwrap(), a.machine.alloc(16).unwrap());
            for rank in [&mut a, &mut b] {
                rank.collect(Kind::Sum, 0, 4).unwrap();
                rank.record();
            }
            while over && (a.done().is_err() | b.done().is_err()) {}
            if waits {
                a.machine.wait_event(compute, a.event, 0).unwrap();
            }
            let mut bytes = [0u8; 16];
            // SAFETY: waited for while the bytes are there.
            unsafe { a.machine.to_host(bytes.as_mut_ptr(), other, 16, compute) }.unwrap();
            while a.done().is_err() | b.done().is_err() {}
            a.machine.wait(compute).unwrap();
            let log = a.machine.log().join("\n");
            assert_eq!(log.contains("a stream that waits for an exchange"), waits && !over, "{log}");
            end([a, b]);
        }
    }

    #[test]
    fn an_error_comes_out_where_it_is_asked_for_and_nothing_moves() {
        for (settings, code) in [("fault=ncclAsync:1:6", 6), ("fault=ncclHang:1:1", 0)] {
            let [mut a, mut b] = pair(settings);
            for rank in [&mut a, &mut b] {
                rank.collect(Kind::Sum, 0, 4).unwrap();
                rank.record();
            }
            for _ in 0..3 {
                assert_eq!((a.done(), b.done()), (NOT_READY, NOT_READY));
            }
            assert_eq!(b.machine.async_error(b.comm), Ok(code));
            assert_eq!(a.machine.async_error(a.comm), Ok(0), "nobody tells the other");
            end([a, b]);
        }
    }

    #[test]
    fn rules_are_kept() {
        let [mut a, mut b] = pair("");
        assert_eq!(a.machine.group_end(), Err(INVALID_USAGE));
        assert_eq!(a.collect(Kind::SumOn(2), 0, 4), Err(INVALID_ARGUMENT), "there is no such rank");
        assert_eq!(a.collect(Kind::Sum, 1, 4), Err(INVALID_ARGUMENT), "beyond memory");
        a.collect(Kind::Sum, 0, 4).unwrap();
        b.collect(Kind::Sum, 0, 3).unwrap();
        a.record();
        b.record();
        for _ in 0..3 {
            assert_eq!((a.done(), b.done()), (NOT_READY, NOT_READY));
        }
        assert!(b.machine.log().iter().any(|line| line.contains("gives another collective")));
        b.machine.end_comm(b.comm, "ncclCommDestroy", false).unwrap();
        assert!(b.machine.log().iter().any(|line| line.contains("with work under way")));
        assert_eq!(b.machine.end_comm(b.comm, "ncclCommAbort", true), Err(INVALID_ARGUMENT));
        a.machine.end_comm(a.comm, "ncclCommAbort", true).unwrap();
    }
}
