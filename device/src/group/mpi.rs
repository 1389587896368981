//! A group of processes over Open MPI, for ranks that `mpirun` started.
//!
//! *In*: `libmpi`, loaded while the program runs. *Out*: a [`Group`]. *Promise*: sums are taken in
//! the order of the ranks, by dreamc and not by the library, whose order depends on its version and
//! on the network; so the bits are those of every other transport. Each rank of a sum adds an equal
//! part of the numbers and all gather the parts: `2 (n - 1) / n` times the bytes through each.
//!
//! A rank that fails says so in the next exchange. One that is killed is `mpirun`'s matter: it ends
//! all ranks, and names the one.
//!
//! The handles of MPI (`MPI_COMM_WORLD`, `MPI_BYTE`) are no functions, and differ by library: here
//! they are those of Open MPI from version 3 on, addresses of objects with names of their own
//! (`ompi_mpi_comm_world`). Another library is refused by their absence.

use super::place::Place;
use super::{Collective, FAILED, Group, GroupError, NUMBER, Transport, combine, lengths_of};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// Names of the library, where `DREAMC_MPI` names no other.
const NAMES: [&str; 2] = ["libmpi.so.40", "libmpi.so"];

/// `MPI_THREAD_SERIALIZED`: any thread, one at a time. A library that has less lets the first
/// alone.
const SERIALIZED: c_int = 2;

/// Bytes of the head of an exchange: tag, rank and length.
const HEAD: usize = 24;

type Handle = *mut c_void;
type Gather = unsafe extern "C" fn(*const c_void, c_int, Handle, *mut c_void, c_int, Handle, Handle) -> c_int;
type GatherParts = unsafe extern "C" fn(
    *const c_void,
    c_int,
    Handle,
    *mut c_void,
    *const c_int,
    *const c_int,
    Handle,
    Handle,
) -> c_int;

type ExchangeParts = unsafe extern "C" fn(
    *const c_void,
    *const c_int,
    *const c_int,
    Handle,
    *mut c_void,
    *const c_int,
    *const c_int,
    Handle,
    Handle,
) -> c_int;

/// The functions that are called, and the handles that they take.
struct Mpi {
    all_gather: Symbol<Gather>,
    all_gather_parts: Symbol<GatherParts>,
    all_to_all_parts: Symbol<ExchangeParts>,
    finalize: Symbol<unsafe extern "C" fn() -> c_int>,
    world: Handle,
    byte: Handle,
    rank: u64,
    size: usize,
    /// Whether a rank failed: nothing more is exchanged.
    failed: bool,
    any_thread: bool,
    _library: Library,
}

// SAFETY: the handles are addresses of objects of the library, which stays loaded; calls are made
// by one thread at a time, under a lock.
unsafe impl Send for Mpi {}

struct Ranks(Mutex<Mpi>);

fn bad(what: impl std::fmt::Display) -> GroupError {
    GroupError::Meeting(format!("Open MPI: {what}"))
}

/// The library, where there is one: `None` where `DREAMC_MPI` is 0, or nothing is installed.
fn library() -> Result<Option<Library>, GroupError> {
    let asked = std::env::var("DREAMC_MPI").ok().filter(|name| !name.is_empty());
    if asked.as_deref() == Some("0") {
        return Ok(None);
    }
    // SAFETY: loading runs the library's own initialisers, as linking to it would. Its plug-ins
    // look for its symbols among the global ones.
    let open = |name: &str| unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) };
    match asked {
        Some(name) => open(&name).map(Some).map_err(|error| bad(format!("DREAMC_MPI: {error}"))),
        None => Ok(NAMES.iter().find_map(|name| open(name).ok())),
    }
}

/// Meets the other ranks that `mpirun` started; `None` where there is no library, so that the ranks
/// meet in another way.
pub fn meet(place: &Place) -> Result<Option<Group>, GroupError> {
    let Some(library) = library()? else { return Ok(None) };
    let mpi = Mpi::start(library)?;
    let (rank, size) = (mpi.rank, mpi.size as u64);
    if (rank, size) != (place.rank, place.size) {
        return Err(bad(format!(
            "it says rank {rank} of {size}, and mpirun rank {} of {}: the library is not mpirun's (DREAMC_MPI)",
            place.rank, place.size
        )));
    }
    Ok(Some(Group::over(rank, size, Arc::new(Ranks(Mutex::new(mpi))))))
}

impl Mpi {
    fn start(library: Library) -> Result<Self, GroupError> {
        /// A symbol of a library.
        ///
        /// # Safety
        /// `T` is the type of the symbol.
        unsafe fn find<T>(library: &Library, name: &str) -> Result<Symbol<T>, GroupError> {
            // SAFETY: as the caller promises.
            unsafe { library.get(name) }.map_err(|_| bad(format!("the library has no {name}")))
        }
        // SAFETY: the types are those of the MPI standard's C binding (MPI-3.1, A.3), and the
        // objects are what the macros of Open MPI's mpi.h take the addresses of.
        unsafe {
            let object = |name| find::<*mut c_void>(&library, name).map(Symbol::into_raw);
            let (world, byte) = (object("ompi_mpi_comm_world")?, object("ompi_mpi_byte")?);
            type Init = unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int;
            type Number = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
            let init = find::<Init>(&library, "MPI_Init_thread")?;
            let number = |name| -> Result<c_int, GroupError> {
                let (number, mut found) = (find::<Number>(&library, name)?, 0);
                match number(world, &mut found) {
                    0 => Ok(found),
                    code => Err(bad(format!("{name} gives {code}"))),
                }
            };
            let mut provided = 0;
            let code = init(std::ptr::null_mut(), std::ptr::null_mut(), SERIALIZED, &mut provided);
            if code != 0 {
                return Err(bad(format!("MPI_Init_thread gives {code}")));
            }
            Ok(Mpi {
                all_gather: find(&library, "MPI_Allgather")?,
                all_gather_parts: find(&library, "MPI_Allgatherv")?,
                all_to_all_parts: find(&library, "MPI_Alltoallv")?,
                finalize: find(&library, "MPI_Finalize")?,
                rank: number("MPI_Comm_rank")? as u64,
                size: number("MPI_Comm_size")? as usize,
                world,
                byte,
                failed: false,
                any_thread: provided >= SERIALIZED,
                _library: library,
            })
        }
    }

    /// As many bytes of every rank, in their order.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let mut all = vec![0; bytes.len() * self.size];
        self.each(&self.all_gather, "MPI_Allgather", bytes, &mut all, bytes.len())?;
        Ok(all)
    }

    /// A call that sends `each` bytes to every rank or to all, and receives as many from each.
    fn each(
        &self,
        call: &Symbol<Gather>,
        name: &str,
        from: &[u8],
        to: &mut [u8],
        each: usize,
    ) -> Result<(), GroupError> {
        let count = c_int::try_from(each).map_err(|_| bad("more than 2 GiB at once"))?;
        let (from, to, byte) = (from.as_ptr().cast(), to.as_mut_ptr().cast(), self.byte);
        // SAFETY: both ranges are as long as the counts say: `to` has `each` bytes for every rank.
        match unsafe { call(from, count, byte, to, count, byte, self.world) } {
            0 => Ok(()),
            code => Err(bad(format!("{name} gives {code}"))),
        }
    }

    /// The bytes of every rank, of these lengths.
    fn gather_parts(&self, bytes: &[u8], lengths: &[u64]) -> Result<Vec<Vec<u8>>, GroupError> {
        let long = |_| bad("more than 2 GiB at once");
        let counts: Vec<c_int> =
            lengths.iter().map(|&n| c_int::try_from(n)).collect::<Result<_, _>>().map_err(long)?;
        let (mut places, mut end) = (vec![], 0u64);
        for length in lengths {
            places.push(c_int::try_from(end).map_err(long)?);
            end += length;
        }
        if end == 0 {
            return Ok(vec![vec![]; self.size]);
        }
        let mut all = vec![0u8; end as usize];
        // The address of no bytes is 1, which is `MPI_IN_PLACE`.
        let sent: &[u8] = if bytes.is_empty() { &[0] } else { bytes };
        let own = c_int::try_from(bytes.len()).map_err(long)?;
        let (counted, placed) = (counts.as_ptr(), places.as_ptr());
        let (from, to) = (sent.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: `all` has room for the parts of all ranks, which begin at their places; every
        // rank has heard the lengths of all.
        let code = unsafe {
            (self.all_gather_parts)(from, own, self.byte, to, counted, placed, self.byte, self.world)
        };
        if code != 0 {
            return Err(bad(format!("MPI_Allgatherv gives {code}")));
        }
        let part = |(&at, &n): (&c_int, &c_int)| all[at as usize..at as usize + n as usize].to_vec();
        Ok(places.iter().zip(&counts).map(part).collect())
    }

    /// Exchanges heads: what every rank is about, and the lengths of their bytes.
    fn heads(&self, (tag, root): (u8, u64), length: usize) -> Result<Vec<[u64; 3]>, GroupError> {
        let head = [tag.into(), root, length as u64].map(u64::to_le_bytes).concat();
        let all = self.gather(&head)?;
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        Ok(all.chunks(HEAD).map(|h| [number(h), number(&h[8..]), number(&h[16..])]).collect())
    }

    fn exchange(&mut self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        if self.failed {
            return Err(bad("a rank failed before"));
        }
        let heads = self.heads(what.tag(), bytes.len())?;
        let failed = |h: &[u64; 3]| h[0] == u64::from(FAILED);
        if let Some(rank) = heads.iter().position(failed) {
            self.failed = true;
            let lengths: Vec<u64> = heads.iter().map(|h| if failed(h) { h[2] } else { 0 }).collect();
            let words = self.gather_parts(&[], &lengths)?;
            let reason = String::from_utf8_lossy(&words[rank]).into_owned();
            return Err(GroupError::Failed { rank: rank as u64, reason });
        }
        if let Some(rank) = heads.iter().position(|h| h[..2] != heads[0][..2]) {
            self.failed = true;
            let words = |h: &[u64; 3]| {
                Collective::of_tag(h[0] as u8, h[1]).map_or("nothing".into(), |what| what.to_string())
            };
            let (theirs, first) = (words(&heads[rank]), words(&heads[0]));
            return Err(GroupError::Apart { rank: rank as u64, theirs, first });
        }
        let lengths: Vec<u64> = heads.iter().map(|h| h[2]).collect();
        match what {
            Collective::AllReduce if lengths.iter().all(|n| n == &lengths[0]) => self.sum(bytes),
            Collective::ReduceScatter if lengths.iter().all(|n| n == &lengths[0]) => {
                let (parts, numbers) = lengths_of(bytes, self.size, NUMBER)?;
                self.own_sum(numbers, &parts)
            }
            Collective::AllToAll => self.to_all(bytes),
            Collective::AllReduce
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Broadcast(_) => combine(what, &self.gather_parts(bytes, &lengths)?, self.rank),
        }
    }

    /// This rank's part of the sum of as many numbers of every rank; parts have these lengths in
    /// bytes.
    fn own_sum(&self, bytes: &[u8], lengths: &[usize]) -> Result<Vec<u8>, GroupError> {
        let own = lengths.get(self.rank as usize).copied().unwrap_or(0);
        if bytes.len() != lengths.iter().sum::<usize>() || lengths.len() != self.size {
            return Err(bad("parts that are not those of a sum"));
        }
        if bytes.is_empty() {
            return Ok(vec![]);
        }
        let parts = self.parts_to_all(bytes, lengths, &vec![own; self.size])?;
        if own == 0 {
            return Ok(vec![]);
        }
        let parts: Vec<&[u8]> = parts.chunks(own).collect();
        combine(Collective::AllReduce, &parts, self.rank)
    }

    /// The bytes of each rank for this one, each after its length.
    fn to_all(&self, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let (lengths, parts) = lengths_of(bytes, self.size, 1)?;
        let table = self.gather(&bytes[..bytes.len() - parts.len()])?;
        let number = |at: usize| table[8 * at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        let come: Vec<usize> =
            (0..self.size).map(|rank| number(rank * self.size + self.rank as usize) as usize).collect();
        let come_bytes = self.parts_to_all(parts, &lengths, &come)?;
        let (mut all, mut rest) = (vec![], come_bytes.as_slice());
        for length in come {
            let (part, behind) =
                rest.split_at_checked(length).ok_or_else(|| bad("parts of other lengths"))?;
            all.extend((length as u64).to_le_bytes());
            all.extend(part);
            rest = behind;
        }
        Ok(all)
    }

    /// Sends each rank its part of these bytes, and gets these numbers of bytes of each, one after
    /// another.
    fn parts_to_all(&self, bytes: &[u8], lengths: &[usize], come: &[usize]) -> Result<Vec<u8>, GroupError> {
        let long = |_| bad("more than 2 GiB at once");
        let places = |lengths: &[usize]| -> Result<(Vec<c_int>, Vec<c_int>, usize), GroupError> {
            let (mut counts, mut places, mut end) = (vec![], vec![], 0usize);
            for &length in lengths {
                counts.push(c_int::try_from(length).map_err(long)?);
                places.push(c_int::try_from(end).map_err(long)?);
                end += length;
            }
            Ok((counts, places, end))
        };
        let ((counts, from_places, sent), (coming, to_places, got)) = (places(lengths)?, places(come)?);
        if [lengths.len(), come.len()] != [self.size; 2] || sent != bytes.len() {
            return Err(bad("parts of other ranks"));
        }
        let mut parts = vec![0u8; got];
        // The address of no bytes is 1, which is `MPI_IN_PLACE`.
        let (none, mut nothing) = ([0u8], [0u8]);
        let from: &[u8] = if bytes.is_empty() { &none } else { bytes };
        let to: &mut [u8] = if parts.is_empty() { &mut nothing } else { &mut parts };
        let (from, to) = (from.as_ptr().cast(), to.as_mut_ptr().cast());
        // SAFETY: the parts of `bytes` begin at their places and end with it; `to` has room for
        // what comes of each rank, one after another, as every rank has heard.
        let code = unsafe {
            (self.all_to_all_parts)(
                from,
                counts.as_ptr(),
                from_places.as_ptr(),
                self.byte,
                to,
                coming.as_ptr(),
                to_places.as_ptr(),
                self.byte,
                self.world,
            )
        };
        if code != 0 {
            return Err(bad(format!("MPI_Alltoallv gives {code}")));
        }
        Ok(parts)
    }

    /// The sum of as many numbers of every rank: each rank adds its part of them.
    fn sum(&self, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let part = (bytes.len() / size_of::<f32>()).div_ceil(self.size) * size_of::<f32>();
        let mut padded = bytes.to_vec();
        padded.resize(part * self.size, 0);
        let mut sum = self.gather(&self.own_sum(&padded, &vec![part; self.size])?)?;
        sum.truncate(bytes.len());
        Ok(sum)
    }
}

impl Transport for Ranks {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).exchange(what, bytes)
    }

    fn any_thread(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).any_thread
    }

    /// Nothing: a rank that dies ends all by `mpirun`, and words come with the next exchange.
    fn failed(&self) -> Option<GroupError> {
        None
    }

    fn fail(&self, reason: &str) {
        let mut mpi = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut mpi.failed, true) {
            return;
        }
        if let Ok(heads) = mpi.heads((FAILED, 0), reason.len()) {
            let lengths: Vec<u64> =
                heads.iter().map(|h| if h[0] == u64::from(FAILED) { h[2] } else { 0 }).collect();
            let _ = mpi.gather_parts(reason.as_bytes(), &lengths);
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // SAFETY: MPI was initialised, and is used no more.
        unsafe { (self.finalize)() };
    }
}
