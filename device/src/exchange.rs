//! Exchanges of ranks: the collectives of a plan, and the thread that does them during launches.
//!
//! *In*: numbers and rows of the arena. *Out*: what the exchange leaves there. *Promise*: a [`Job`]
//! holds all that it needs, so that it runs on any thread; a [`Done`] is put into the arena where
//! the executor says. Sums are taken in the order of the ranks.

use super::backend::{Backend, Value};
use super::executor::AT_ONCE;
use super::rows::{self, Going, Moved};
use super::{DeviceError, Group};
use crate::group::GroupError;
use dreamc_compiler::program::kernel::{
    AllReduce, Gathered, Pooled, ReduceScatter, Returned, Scattered, Sent,
};
use dreamc_compiler::program::{Kernel, Owners, Parts};
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// Bytes of a number.
const NUMBER: u64 = size_of::<f32>() as u64;

fn other_numbers(rank: u64) -> GroupError {
    GroupError::Meeting(format!("rank {rank} brought other numbers than its part has"))
}

/// A collective of the group.
#[derive(Clone, Copy)]
pub(crate) enum Collective<'p> {
    Sum(&'p AllReduce),
    /// Of the numbers from this one on.
    Scatter(&'p ReduceScatter, u64),
    Gather(&'p Parts),
    /// Of numbers whose parts are elsewhere.
    Gathered(&'p Gathered, Away),
    Scattered(&'p Scattered, Away),
    /// Of rows that go to the owners of their experts, and back.
    Sent(&'p Sent, Moved),
    Returned(&'p Returned, Moved),
    /// Over the ranks that own the same experts.
    Pooled(&'p Pooled),
}

/// Where the part of a rank is, and the first of the numbers that take part.
#[derive(Clone, Copy, Default)]
pub(crate) struct Away {
    own: u64,
    first: u64,
}

impl Away {
    fn of(values: &[Value]) -> Self {
        Away { own: values.get(1).map_or(0, Value::at), first: values.get(2).map_or(0, Value::index) }
    }

    pub(crate) fn first(self) -> u64 {
        self.first
    }

    /// Where the numbers of a rank's part are that it has in this range: `parts` are all of them,
    /// `within` those of the range.
    pub(crate) fn place(self, parts: &Parts, within: &Parts, number: u64) -> u64 {
        // A rank may have none.
        let inside = (self.first + within.of(parts.rank).0 + number).saturating_sub(parts.of(parts.rank).0);
        self.own + inside * NUMBER
    }
}

impl<'p> Collective<'p> {
    /// The collective of a kernel; other kernels run on a device.
    pub(crate) fn of(kernel: &'p Kernel) -> Option<Self> {
        if let Kernel::AllReduce(sum) = kernel {
            Some(Collective::Sum(sum))
        } else if let Kernel::ReduceScatter(scatter) = kernel {
            Some(Collective::Scatter(scatter, 0))
        } else if let Kernel::AllGather(gather) = kernel {
            Some(Collective::Gather(&gather.parts))
        } else if let Kernel::Gathered(gathered) = kernel {
            Some(Collective::Gathered(gathered, Away::default()))
        } else if let Kernel::Scattered(scattered) = kernel {
            Some(Collective::Scattered(scattered, Away::default()))
        } else if let Kernel::Sent(sent) = kernel {
            Some(Collective::Sent(sent, Moved::default()))
        } else if let Kernel::Returned(returned) = kernel {
            Some(Collective::Returned(returned, Moved::default()))
        } else if let Kernel::Pooled(pooled) = kernel {
            Some(Collective::Pooled(pooled))
        } else {
            None
        }
    }

    /// That of a launch with these operands.
    pub(crate) fn with(self, values: &[Value]) -> Self {
        match self {
            Collective::Scatter(scatter, _) => {
                Collective::Scatter(scatter, values.get(1).map_or(0, Value::index))
            }
            Collective::Gathered(gathered, _) => Collective::Gathered(gathered, Away::of(values)),
            Collective::Scattered(scattered, _) => Collective::Scattered(scattered, Away::of(values)),
            Collective::Sent(sent, _) => Collective::Sent(sent, Moved::of(values)),
            Collective::Returned(returned, _) => Collective::Returned(returned, Moved::of(values)),
            Collective::Sum(_) | Collective::Gather(_) | Collective::Pooled(_) => self,
        }
    }

    /// Whether it may overlap with the launches after it.
    pub(crate) fn overlaps(self) -> bool {
        match self {
            Collective::Sum(sum) => sum.overlap,
            Collective::Scatter(..) => true,
            Collective::Gather(_)
            | Collective::Gathered(..)
            | Collective::Scattered(..)
            | Collective::Sent(..)
            | Collective::Returned(..)
            | Collective::Pooled(_) => false,
        }
    }

    /// Whether it is one of those that [`ahead`](dreamc_compiler::ahead) orders.
    pub(crate) fn goes_ahead(self) -> bool {
        match self {
            Collective::Gathered(..)
            | Collective::Scattered(..)
            | Collective::Sent(..)
            | Collective::Returned(..) => true,
            Collective::Sum(_) | Collective::Scatter(..) | Collective::Gather(_) | Collective::Pooled(_) => {
                false
            }
        }
    }

    /// Numbers that take part, at the most.
    pub(crate) fn elements(self) -> u64 {
        match self {
            Collective::Sum(sum) => sum.elements,
            Collective::Scatter(scatter, _) => scatter.elements,
            Collective::Gather(parts) => parts.elements(),
            Collective::Gathered(gathered, _) => gathered.elements,
            Collective::Scattered(scattered, _) => scattered.elements,
            Collective::Sent(Sent { slots, width, .. }, _)
            | Collective::Returned(Returned { slots, width, .. }, _) => slots * width,
            Collective::Pooled(pooled) => pooled.elements,
        }
    }

    /// The owners of experts, where some are asked.
    pub(crate) fn owners(self) -> Option<Owners> {
        match self {
            Collective::Sent(Sent { owners, .. }, _)
            | Collective::Returned(Returned { owners, .. }, _)
            | Collective::Pooled(Pooled { owners, .. }) => Some(*owners),
            Collective::Sum(_)
            | Collective::Scatter(..)
            | Collective::Gather(_)
            | Collective::Gathered(..)
            | Collective::Scattered(..) => None,
        }
    }

    /// The parts of all ranks.
    pub(crate) fn parts(self) -> Option<&'p Parts> {
        match self {
            Collective::Sum(_) | Collective::Sent(..) | Collective::Returned(..) | Collective::Pooled(_) => {
                None
            }
            Collective::Gather(parts)
            | Collective::Scatter(ReduceScatter { parts, .. }, _)
            | Collective::Gathered(Gathered { parts, .. }, _)
            | Collective::Scattered(Scattered { parts, .. }, _) => Some(parts),
        }
    }

    /// The parts of a sum that is cut.
    fn cut(self) -> Option<Parts> {
        match self {
            Collective::Scatter(scatter, first) => Some(scatter.parts.within(first, scatter.elements)),
            Collective::Scattered(scattered, away) => {
                Some(scattered.parts.within(away.first, scattered.elements))
            }
            Collective::Sum(_)
            | Collective::Gather(_)
            | Collective::Gathered(..)
            | Collective::Sent(..)
            | Collective::Returned(..)
            | Collective::Pooled(_) => None,
        }
    }

    /// Whether the group is the one that the plan was compiled for.
    pub(crate) fn check(self, group: &Group, origin: &str) -> Result<(), DeviceError> {
        let (ranks, rank) = match (self, self.owners(), self.parts()) {
            (Collective::Sum(sum), ..) => (sum.ranks, group.rank()),
            (_, Some(owners), _) => (owners.ranks, owners.rank),
            (_, None, parts) => parts.map_or((1, 0), |parts| (parts.ranks(), parts.rank)),
        };
        let origin = origin.to_string();
        if ranks != group.size() {
            return Err(DeviceError::OtherGroup { origin, ranks, size: group.size() });
        }
        if rank != group.rank() {
            return Err(DeviceError::OtherRank { origin, rank, own: group.rank() });
        }
        Ok(())
    }

    /// Numbers that go to the group at once, of each rank's part where parts are handed to all: the
    /// host has room for them meanwhile.
    pub(crate) fn at_once(self) -> u64 {
        match self {
            Collective::Sum(_) | Collective::Scatter(..) | Collective::Scattered(..) => {
                self.elements().min(AT_ONCE)
            }
            Collective::Gathered(gathered, _) => {
                gathered.elements.min((AT_ONCE / gathered.parts.ranks().max(1)).max(1))
            }
            Collective::Gather(parts) => {
                let longest = (0..parts.ranks()).map(|rank| parts.of(rank).1).max();
                longest.unwrap_or(0).min((AT_ONCE / parts.ranks().max(1)).max(1))
            }
            // They bring memory of their own.
            Collective::Sent(..) | Collective::Returned(..) | Collective::Pooled(_) => 0,
        }
    }

    /// Runs it on the numbers at a place of the arena, through the host. Sums and parts in place go
    /// in pieces: a sum goes number by number, so that pieces keep its bits.
    pub(crate) fn run<B: Backend>(
        self,
        backend: &mut B,
        group: &Group,
        numbers: &mut [f32],
        at: u64,
    ) -> Result<(), DeviceError> {
        let place = |number: u64| at + number * NUMBER;
        let each = self.at_once();
        match self {
            Collective::Sum(_) | Collective::Scatter(..) => {
                let cut = self.cut();
                for first in (0..self.elements()).step_by(each.max(1) as usize) {
                    let piece = &mut numbers[..(self.elements() - first).min(each) as usize];
                    backend.read(place(first), bytemuck::cast_slice_mut(piece))?;
                    let (to, own) = summed(group, cut.as_ref(), first, piece)?;
                    if !own.is_empty() {
                        backend.write(place(to), bytemuck::cast_slice(&own))?;
                    }
                }
            }
            Collective::Gather(parts) => {
                let from = place(parts.of(parts.rank).0);
                gather(backend, group, numbers, (parts, each), (from, at))?;
            }
            Collective::Gathered(..)
            | Collective::Scattered(..)
            | Collective::Sent(..)
            | Collective::Returned(..) => self.job(backend, at)?.run(group)?.apply(backend)?,
            Collective::Pooled(pooled) => rows::pool(pooled, at, backend, group)?,
        }
        Ok(())
    }

    /// Takes what it needs out of the arena, for the group to work on during later launches.
    pub(crate) fn job<B: Backend>(self, backend: &B, at: u64) -> Result<Job, DeviceError> {
        let read = |at: u64, count: u64| -> Result<Vec<f32>, DeviceError> {
            let mut numbers = vec![0.0f32; count as usize];
            if count > 0 {
                backend.read(at, bytemuck::cast_slice_mut(&mut numbers))?;
            }
            Ok(numbers)
        };
        Ok(match self {
            Collective::Sum(_) | Collective::Scatter(..) => {
                Job::Sum { numbers: read(at, self.elements())?, cut: self.cut(), to: To::Put(at) }
            }
            Collective::Scattered(scattered, away) => {
                let parts = scattered.parts.within(away.first, scattered.elements);
                let own = away.place(&scattered.parts, &parts, 0);
                Job::Sum { numbers: read(at, scattered.elements)?, cut: Some(parts), to: To::Add(own) }
            }
            Collective::Gather(parts) => {
                let (first, count) = parts.of(parts.rank);
                let own = read(at + first * NUMBER, count)?;
                Job::Gather { own, parts: parts.clone(), each: self.at_once(), to: at }
            }
            Collective::Gathered(gathered, away) => {
                let parts = gathered.parts.within(away.first, gathered.elements);
                let own = read(away.place(&gathered.parts, &parts, 0), parts.of(parts.rank).1)?;
                Job::Gather { own, parts, each: self.at_once(), to: at }
            }
            Collective::Sent(sent, moved) => Job::Rows(Going::away(sent, moved, backend)?),
            Collective::Returned(returned, moved) => Job::Rows(Going::back(returned, moved, backend)?),
            // Ranks that own the same experts sum where nothing overlaps.
            Collective::Pooled(_) => Job::Nothing,
        })
    }

    /// Does what is left where the device exchanged: the sum of a rank's part, which is in its
    /// place among the numbers, is added to the part.
    pub(crate) fn end<B: Backend>(self, backend: &mut B, at: u64) -> Result<(), DeviceError> {
        let Collective::Scattered(scattered, away) = self else { return Ok(()) };
        let parts = scattered.parts.within(away.first, scattered.elements);
        let (first, count) = parts.of(parts.rank);
        let mut numbers = vec![0.0f32; count as usize];
        if count > 0 {
            backend.read(at + first * NUMBER, bytemuck::cast_slice_mut(&mut numbers))?;
        }
        Done { adds: Some((away.place(&scattered.parts, &parts, 0), numbers)), ..Done::default() }
            .apply(backend)
    }
}

/// Brings parts together, `each` numbers of each at once: this rank's is read at `from`, and all
/// are written from `to` on.
fn gather<B: Backend>(
    backend: &mut B,
    group: &Group,
    numbers: &mut [f32],
    (parts, each): (&Parts, u64),
    (from, to): (u64, u64),
) -> Result<(), DeviceError> {
    let size = NUMBER;
    // The piece of a rank's part from a number on: where it begins, and its length.
    let piece = |rank: u64, first: u64| {
        let (begins, count) = parts.of(rank);
        (begins + first.min(count), count.saturating_sub(first).min(each) as usize)
    };
    let longest = (0..parts.ranks()).map(|rank| parts.of(rank).1).max().unwrap_or(0);
    for first in (0..longest).step_by(each.max(1) as usize) {
        let (begins, count) = piece(parts.rank, first);
        let (at, place) = (from + (begins - parts.of(parts.rank).0) * size, to + begins * size);
        let own: &mut [u8] = bytemuck::cast_slice_mut(&mut numbers[..count]);
        if count > 0 {
            backend.read(at, own)?;
        }
        for (rank, bytes) in (0..).zip(group.gather(own)?) {
            let (begins, count) = piece(rank, first);
            if bytes.len() != count * size as usize {
                return Err(other_numbers(rank).into());
            }
            if count > 0 && (rank != parts.rank || at != place) {
                backend.write(to + begins * size, &bytes)?;
            }
        }
    }
    Ok(())
}

/// The sum over the ranks of a piece of numbers, whole or this rank's part of it, and the number
/// that it begins with. `cut`: the parts of all numbers; `first`: the number of the piece's first.
fn summed<'n>(
    group: &Group,
    cut: Option<&Parts>,
    first: u64,
    piece: &'n mut [f32],
) -> Result<(u64, Cow<'n, [f32]>), GroupError> {
    let Some(parts) = cut else {
        group.all_reduce(piece)?;
        return Ok((first, Cow::Borrowed(piece)));
    };
    let parts = parts.within(first, piece.len() as u64);
    let lengths: Vec<u64> = (0..parts.ranks()).map(|rank| parts.of(rank).1).collect();
    let own = group.reduce_scatter(piece, &lengths)?;
    Ok((first + parts.of(parts.rank).0, Cow::Owned(own)))
}

/// Something for the group to do, with all that it needs.
pub(crate) enum Job {
    /// Numbers to be summed: the parts of the sum where it is cut.
    Sum {
        numbers: Vec<f32>,
        cut: Option<Parts>,
        to: To,
    },
    /// This rank's part of numbers that go to all, `each` of each part at once.
    Gather {
        own: Vec<f32>,
        parts: Parts,
        each: u64,
        to: u64,
    },
    Rows(Going),
    Nothing,
}

/// The fate of a sum.
#[derive(Clone, Copy)]
pub(crate) enum To {
    /// It is written to its place among numbers that begin here.
    Put(u64),
    /// It is added to this rank's part, which begins here.
    Add(u64),
}

impl Job {
    pub(crate) fn run(self, group: &Group) -> Result<Done, GroupError> {
        let mut done = Done::default();
        match self {
            Job::Sum { mut numbers, cut, to } => {
                let (mut begins, mut all) = (None, vec![]);
                let mut first = 0;
                for piece in numbers.chunks_mut(AT_ONCE as usize) {
                    let count = piece.len() as u64;
                    let (at, own) = summed(group, cut.as_ref(), first, piece)?;
                    if !own.is_empty() {
                        begins.get_or_insert(at);
                        all.extend_from_slice(&own);
                    }
                    first += count;
                }
                let begins = begins.unwrap_or(0);
                match to {
                    To::Put(at) => done.put(at + begins * NUMBER, bytemuck::cast_slice(&all).to_vec()),
                    To::Add(at) => {
                        let first = cut.as_ref().map_or(0, |parts| parts.of(parts.rank).0);
                        done.adds = Some((at + begins.saturating_sub(first) * NUMBER, all));
                    }
                }
            }
            Job::Gather { own, parts, each, to } => {
                let mut all = vec![0u8; (parts.elements() * NUMBER) as usize];
                let longest = (0..parts.ranks()).map(|rank| parts.of(rank).1).max().unwrap_or(0);
                for first in (0..longest).step_by(each.max(1) as usize) {
                    let piece = |rank: u64| {
                        let (begins, count) = parts.of(rank);
                        let from = first.min(count);
                        ((begins + from) as usize, count.saturating_sub(first).min(each) as usize)
                    };
                    let from = first.min(own.len() as u64) as usize;
                    let mine = &own[from..(from + piece(parts.rank).1).min(own.len())];
                    for (rank, bytes) in (0..).zip(group.gather(bytemuck::cast_slice(mine))?) {
                        let (begins, count) = piece(rank);
                        let size = NUMBER as usize;
                        match all.get_mut(begins * size..(begins + count) * size) {
                            Some(to) if to.len() == bytes.len() => to.copy_from_slice(&bytes),
                            Some(_) | None => return Err(other_numbers(rank)),
                        }
                    }
                }
                done.put(to, all);
            }
            Job::Rows(rows) => return rows.run(group),
            Job::Nothing => {}
        }
        Ok(done)
    }
}

/// Results of an exchange, for the arena.
#[derive(Default)]
pub(crate) struct Done {
    puts: Vec<(u64, Vec<u8>)>,
    adds: Option<(u64, Vec<f32>)>,
}

impl Done {
    pub(crate) fn put(&mut self, at: u64, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.puts.push((at, bytes));
        }
    }

    pub(crate) fn apply<B: Backend>(self, backend: &mut B) -> Result<(), DeviceError> {
        for (at, bytes) in self.puts {
            backend.write(at, &bytes)?;
        }
        if let Some((at, sum)) = self.adds.filter(|(_, sum)| !sum.is_empty()) {
            let mut own = vec![0.0f32; sum.len()];
            backend.read(at, bytemuck::cast_slice_mut(&mut own))?;
            own.iter_mut().zip(&sum).for_each(|(own, x)| *own += x);
            backend.write(at, bytemuck::cast_slice(&own))?;
        }
        Ok(())
    }
}

/// Results of an exchange, and the seconds that it took.
type Answer = Result<(Done, f64), GroupError>;

/// A thread that has the group while others compute. It does one job after another, in the order in
/// which they were begun, which is that of all ranks.
pub(crate) struct Overlap {
    /// Until the end.
    jobs: Option<Sender<Job>>,
    done: Receiver<Answer>,
    /// Of each job under way: whether its result is kept until it is asked for.
    kept: VecDeque<bool>,
    /// The number of the first of them.
    first: u64,
    /// Results that were kept, by the number of their job.
    results: HashMap<u64, Done>,
    /// Seconds of exchanges that are done, and those that were waited for.
    pub(crate) seconds: f64,
    pub(crate) waited: f64,
    thread: Option<JoinHandle<()>>,
}

/// MPI ends in the thread that began it: the thread here gives its group back before.
impl Drop for Overlap {
    fn drop(&mut self) {
        self.jobs = None;
        // A thread that panicked has its group no more, either.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Overlap {
    pub(crate) fn new(group: Group) -> Option<Self> {
        let (jobs, todo) = channel::<Job>();
        let (answers, done) = channel();
        let work = move || {
            while let Ok(job) = todo.recv() {
                let begun = Instant::now();
                let answer = job.run(&group).map(|done| (done, begun.elapsed().as_secs_f64()));
                let last = answer.is_err();
                if answers.send(answer).is_err() || last {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("exchanges of ranks".into()).spawn(work).ok()?;
        Some(Overlap {
            jobs: Some(jobs),
            done,
            kept: VecDeque::new(),
            first: 0,
            results: HashMap::new(),
            seconds: 0.0,
            waited: 0.0,
            thread: Some(thread),
        })
    }

    /// Begins a job; gives its number. Its result is kept until it is asked for, or left in the
    /// arena when a later one is.
    pub(crate) fn begin(&mut self, job: Job, kept: bool) -> u64 {
        // Where the thread has ended it left the reason.
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
        self.kept.push_back(kept);
        self.first + self.kept.len() as u64 - 1
    }

    /// Waits until a job is over, and all before it.
    pub(crate) fn until<B: Backend>(&mut self, number: u64, backend: &mut B) -> Result<(), DeviceError> {
        while self.first <= number
            && let Some(kept) = self.kept.pop_front()
        {
            let begun = Instant::now();
            let gone = || GroupError::Meeting("the thread that has the group ended".into());
            let answer = self.done.recv().unwrap_or_else(|_| Err(gone()));
            self.waited += begun.elapsed().as_secs_f64();
            let (done, seconds) = answer.inspect_err(|_| self.kept.clear())?;
            self.seconds += seconds;
            match kept {
                true => drop(self.results.insert(self.first, done)),
                false => done.apply(backend)?,
            }
            self.first += 1;
        }
        Ok(())
    }

    /// Waits for all.
    pub(crate) fn join<B: Backend>(&mut self, backend: &mut B) -> Result<(), DeviceError> {
        self.until(u64::MAX, backend)
    }

    /// Leaves the result of a job that was kept in the arena.
    pub(crate) fn take<B: Backend>(&mut self, number: u64, backend: &mut B) -> Result<(), DeviceError> {
        self.until(number, backend)?;
        self.results.remove(&number).map_or(Ok(()), |done| done.apply(backend))
    }

    /// Forgets results that nobody asked for, where a program ended early.
    pub(crate) fn forget(&mut self) {
        self.results.clear();
    }
}
