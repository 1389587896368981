//! Ranks: the processes that train one model together.
//!
//! *In*: which of how many this process is, and a [`Transport`] to the others. *Out*: a [`Group`]
//! with the collectives that training needs. *Promise*: every rank gets the same bits, and the same
//! bits at every run of as many ranks: sums are taken in the order of the ranks, over every
//! transport. A rank that fails, ends or is silent beyond the time-out ends the collective of every
//! other rank with an error that has its number; ranks that ask for different things are refused.
//! In a group of one every collective is the identity.
//!
//! A transport brings the bytes of all ranks together ([`Transport::exchange`]), and [`combine`]
//! makes a rank's result of them: [`local`] for sessions in threads of one process, [`mpi`] and
//! [`tcp`] for processes. [`place`] reads from the environment which rank this process is.

pub mod local;
pub mod mpi;
pub mod place;
pub mod tcp;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use thiserror::Error;

/// Why ranks do not go on together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GroupError {
    /// Another rank failed, and said why.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// Which.
        rank: u64,
        /// In its words.
        reason: String,
    },
    /// Another rank ended without a word: it was killed, or its machine is gone.
    #[error("rank {rank} ended without a word (it was killed, or lost its connection)")]
    Ended {
        /// Which.
        rank: u64,
    },
    /// Another rank did not answer in time.
    #[error("rank {rank} has not answered for {seconds} s (DREAMC_RANK_TIMEOUT)")]
    Silent {
        /// Which.
        rank: u64,
        /// The time-out.
        seconds: u64,
    },
    /// Nothing comes from another rank any more, not even that it is there.
    #[error(
        "rank {rank} has given no sign of life for {seconds} s: its machine, its process or the network stands still"
    )]
    Lost {
        /// Which.
        rank: u64,
        /// Seconds of silence.
        seconds: u64,
    },
    /// Two ranks are at different places of their programs.
    #[error("rank {rank} asks for {theirs}, and rank 0 for {first}")]
    Apart {
        /// Which.
        rank: u64,
        /// Its collective.
        theirs: String,
        /// That of rank 0.
        first: String,
    },
    /// A rank was started with something else.
    #[error("rank {rank} has another {what} than rank 0 ({theirs}, not {first}): all ranks train one model")]
    Other {
        /// Which.
        rank: u64,
        /// The thing that differs.
        what: String,
        /// Its value there.
        theirs: String,
        /// Its value on rank 0.
        first: String,
    },
    /// Two ranks that have the same numbers have different ones.
    #[error("rank {rank} has other {what} than rank {like}, which has the same: all ranks train one model")]
    Unlike {
        /// Which.
        rank: u64,
        /// The other.
        like: u64,
        /// The name of these numbers.
        what: String,
    },
    /// The ranks do not find one another.
    #[error("{0}")]
    Meeting(String),
}

/// A thing that ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets the sum of all ranks' numbers (f32).
    AllReduce,
    /// Every rank gets its part of the sum of all ranks' numbers (f32), which stand after the
    /// lengths of the parts of all ranks (8 bytes each, little endian).
    ReduceScatter,
    /// Every rank gets the bytes of all ranks, each after its length (8 bytes, little endian).
    AllGather,
    /// Every rank gets the bytes of this rank.
    Broadcast(u64),
    /// Every rank gets what each rank has for it, each after its length, in the order of the
    /// ranks. A rank's bytes for all ranks stand after the lengths for each (8 bytes, little
    /// endian).
    AllToAll,
}

impl Collective {
    /// As it stands in the head of an exchange: a number, and the rank of a broadcast.
    fn tag(self) -> (u8, u64) {
        match self {
            Collective::AllReduce => (0, 0),
            Collective::ReduceScatter => (1, 0),
            Collective::AllGather => (2, 0),
            Collective::Broadcast(root) => (3, root),
            Collective::AllToAll => (4, 0),
        }
    }

    fn of_tag(tag: u8, root: u64) -> Option<Self> {
        let broadcast = Collective::Broadcast(root);
        let all = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            broadcast,
            Collective::AllToAll,
        ];
        all.into_iter().find(|what| what.tag().0 == tag)
    }
}

/// Bytes of a number.
pub(crate) const NUMBER: usize = size_of::<f32>();

/// The tag of a rank that fails.
const FAILED: u8 = 255;

/// The tag of a rank that says that it is there.
const ALIVE: u8 = 254;

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Collective::AllReduce => f.write_str("an all-reduce"),
            Collective::ReduceScatter => f.write_str("a reduce-scatter"),
            Collective::AllGather => f.write_str("an all-gather"),
            Collective::Broadcast(rank) => write!(f, "a broadcast of rank {rank}"),
            Collective::AllToAll => f.write_str("an all-to-all"),
        }
    }
}

/// Bytes that passed one rank's links, frames included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From this rank to others.
    pub sent: u64,
    /// From others to this rank.
    pub received: u64,
}

/// Counts [`Traffic`] while it passes.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Meter {
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn read(&self) -> Traffic {
        Traffic { sent: self.sent.load(Relaxed), received: self.received.load(Relaxed) }
    }
}

/// A way for bytes between the ranks of a group.
pub trait Transport: Send + Sync {
    /// Brings the bytes of all ranks together: this rank's part of the collective.
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError>;

    /// Whether a thread that did not begin it may exchange.
    fn any_thread(&self) -> bool {
        true
    }

    /// The bytes of all exchanges so far; nothing where a library moves them by ways of its own.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// A failure of another rank that this one has heard of. Asks nobody and does not wait, and is
    /// not called during an exchange.
    fn failed(&self) -> Option<GroupError>;

    /// Tells the other ranks that this one fails, and why. The transport is of no more use.
    fn fail(&self, reason: &str);
}

/// One rank among those that share a model's gradients.
#[derive(Clone)]
pub struct Group {
    rank: u64,
    size: u64,
    /// Absent in a group of one.
    transport: Option<Arc<dyn Transport>>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl Group {
    /// A process on its own.
    pub const fn alone() -> Self {
        Group { rank: 0, size: 1, transport: None }
    }

    /// Rank `rank` of `size`, over a transport.
    pub fn over(rank: u64, size: u64, transport: Arc<dyn Transport>) -> Self {
        Group { rank, size, transport: (size > 1).then_some(transport) }
    }

    /// Rank `rank` of `size` that are not here: plans are made for it, and every exchange fails.
    pub fn on_paper(rank: u64, size: u64) -> Self {
        Group::over(rank, size, Arc::new(Paper))
    }

    /// Number of this rank, from 0.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Ranks in all.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether this rank writes the run's folder and speaks.
    pub fn leads(&self) -> bool {
        self.rank == 0
    }

    /// The units, out of `count`, that are this rank's: those of all ranks, in order, are all of
    /// them. `None` where they cannot be shared equally.
    pub fn share(&self, units: usize) -> Option<std::ops::Range<usize>> {
        let (rank, size) = (self.rank as usize, self.size as usize);
        units.is_multiple_of(size).then(|| rank * (units / size)..(rank + 1) * (units / size))
    }

    /// Sums over all ranks.
    pub fn all_reduce(&self, values: &mut [f32]) -> Result<(), GroupError> {
        let Some(transport) = &self.transport else { return Ok(()) };
        let sum = transport.exchange(Collective::AllReduce, bytemuck::cast_slice(values))?;
        fill(values, &sum)
    }

    /// Sums over all ranks; this rank gets its part: `lengths` are those of all parts,
    /// which follow one another.
    pub fn reduce_scatter(&self, values: &[f32], lengths: &[u64]) -> Result<Vec<f32>, GroupError> {
        let lengths: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        let bytes = [&lengths, bytemuck::cast_slice(values)].concat();
        let own = self.exchange(Collective::ReduceScatter, &bytes)?;
        Ok(bytemuck::pod_collect_to_vec(own.as_slice()))
    }

    /// The bytes of all ranks, in their order.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let Some(transport) = &self.transport else { return Ok(vec![bytes.to_vec()]) };
        self.parted(&transport.exchange(Collective::AllGather, bytes)?)
    }

    /// The bytes of each rank for this one, in their order: `parts` are those of this rank for
    /// each.
    pub fn all_to_all(&self, parts: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, GroupError> {
        if parts.len() as u64 != self.size {
            return Err(garbled());
        }
        let Some(transport) = &self.transport else { return Ok(parts.to_vec()) };
        let lengths = parts.iter().flat_map(|part| (part.len() as u64).to_le_bytes());
        let bytes = [lengths.collect(), parts.concat()].concat();
        self.parted(&transport.exchange(Collective::AllToAll, &bytes)?)
    }

    /// The bytes of each rank, each after its length.
    fn parted(&self, all: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let (mut rest, mut parts) = (all, vec![]);
        while let Some((length, behind)) = rest.split_first_chunk::<8>() {
            let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
            let Some((part, behind)) = behind.split_at_checked(length) else { break };
            parts.push(part.to_vec());
            rest = behind;
        }
        if parts.len() as u64 == self.size { Ok(parts) } else { Err(garbled()) }
    }

    /// The bytes of rank `root`; those given on other ranks do not count.
    pub fn broadcast(&self, root: u64, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let Some(transport) = &self.transport else { return Ok(bytes.to_vec()) };
        let own: &[u8] = if self.rank == root { bytes } else { &[] };
        transport.exchange(Collective::Broadcast(root), own)
    }

    /// Waits for all ranks.
    pub fn barrier(&self) -> Result<(), GroupError> {
        self.gather(&[]).map(drop)
    }

    /// Refuses where a rank was started with something else than rank 0: `facts` are what must be
    /// equal, each with its name.
    pub fn agree(&self, facts: &[(&str, String)]) -> Result<(), GroupError> {
        let own: Vec<&str> = facts.iter().map(|(_, fact)| fact.as_str()).collect();
        let all = self.gather(own.join("\n").as_bytes())?;
        let all: Vec<String> = all.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
        for (rank, other) in all.iter().enumerate() {
            for ((what, _), (theirs, first)) in facts.iter().zip(other.lines().zip(all[0].lines())) {
                if theirs != first {
                    let (what, theirs, first) = (what.to_string(), theirs.to_string(), first.to_string());
                    return Err(GroupError::Other { rank: rank as u64, what, theirs, first });
                }
            }
        }
        Ok(())
    }

    /// Refuses where ranks that are as far apart as a team's length have different things: `digest`
    /// is short, and equal where the things are.
    pub fn agree_apart(&self, team: u64, what: &str, digest: &[u8]) -> Result<(), GroupError> {
        let all = self.gather(digest)?;
        for (rank, theirs) in (0..).zip(&all) {
            let like = rank % team.max(1);
            if all.get(like as usize) != Some(theirs) {
                return Err(GroupError::Unlike { rank, like, what: what.into() });
            }
        }
        Ok(())
    }

    /// The bytes of all exchanges so far, where the transport counts them; none pass in a group of
    /// one.
    pub fn traffic(&self) -> Option<Traffic> {
        self.transport.as_ref().map_or(Some(Traffic::default()), |transport| transport.traffic())
    }

    /// Whether any thread may use it, one at a time.
    pub fn any_thread(&self) -> bool {
        self.transport.as_ref().is_none_or(|transport| transport.any_thread())
    }

    /// A failure of another rank that this one has heard of, for work that takes place without the
    /// group. Does not wait.
    pub fn failed(&self) -> Option<GroupError> {
        self.transport.as_ref()?.failed()
    }

    /// Tells the other ranks that this one fails, and why: they end with it.
    pub fn fail(&self, reason: &str) {
        if let Some(transport) = &self.transport {
            transport.fail(reason);
        }
    }
}

/// A group is a transport, so that another can be put around it.
impl Transport for Group {
    fn any_thread(&self) -> bool {
        Group::any_thread(self)
    }

    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        match &self.transport {
            Some(transport) => transport.exchange(what, bytes),
            None => combine(what, &[bytes], 0),
        }
    }

    fn traffic(&self) -> Option<Traffic> {
        Group::traffic(self)
    }

    fn failed(&self) -> Option<GroupError> {
        Group::failed(self)
    }

    fn fail(&self, reason: &str) {
        Group::fail(self, reason);
    }
}

/// The ranks of a machine that is not here.
struct Paper;

impl Transport for Paper {
    fn exchange(&self, what: Collective, _: &[u8]) -> Result<Vec<u8>, GroupError> {
        Err(GroupError::Meeting(format!("{what} of ranks on paper")))
    }

    fn failed(&self) -> Option<GroupError> {
        None
    }

    fn fail(&self, _: &str) {}
}

/// A rank's result of a collective, of the bytes of all ranks in their order.
pub(crate) fn combine<B: AsRef<[u8]>>(
    what: Collective,
    parts: &[B],
    rank: u64,
) -> Result<Vec<u8>, GroupError> {
    let sum = || -> Result<Vec<f32>, GroupError> {
        let mut sum: Vec<f32> = parts.first().map_or(vec![], |p| bytemuck::pod_collect_to_vec(p.as_ref()));
        for (other, part) in parts.iter().enumerate().skip(1) {
            let part: Vec<f32> = bytemuck::pod_collect_to_vec(part.as_ref());
            if part.len() != sum.len() {
                let of = |n: usize| format!("{what} of {n} numbers");
                let (theirs, first) = (of(part.len()), of(sum.len()));
                return Err(GroupError::Apart { rank: other as u64, theirs, first });
            }
            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        Ok(sum)
    };
    Ok(match what {
        Collective::AllReduce => bytemuck::cast_slice(&sum()?).to_vec(),
        Collective::ReduceScatter => {
            let own = parts.get(rank as usize).ok_or_else(garbled)?;
            let (lengths, _) = lengths_of(own.as_ref(), parts.len(), NUMBER)?;
            let own = parts
                .iter()
                .map(|of| part_of(lengths_of(of.as_ref(), parts.len(), NUMBER)?.1, rank, &lengths));
            combine(Collective::AllReduce, &own.collect::<Result<Vec<_>, GroupError>>()?, rank)?
        }
        Collective::AllGather => {
            let behind_length = |p: &B| [&(p.as_ref().len() as u64).to_le_bytes(), p.as_ref()].concat();
            parts.iter().flat_map(behind_length).collect()
        }
        Collective::Broadcast(root) => parts.get(root as usize).ok_or_else(garbled)?.as_ref().to_vec(),
        Collective::AllToAll => {
            let mut all = vec![];
            for part in parts {
                let (lengths, bytes) = lengths_of(part.as_ref(), parts.len(), 1)?;
                let own = part_of(bytes, rank, &lengths)?;
                all.extend((own.len() as u64).to_le_bytes());
                all.extend(own);
            }
            all
        }
    })
}

/// The lengths of the parts of all ranks, in bytes, and what is after them, in `unit`s of so
/// many bytes: what a rank brings to [`Collective::ReduceScatter`] and [`Collective::AllToAll`].
pub(crate) fn lengths_of(bytes: &[u8], ranks: usize, unit: usize) -> Result<(Vec<usize>, &[u8]), GroupError> {
    let (head, numbers) = bytes.split_at_checked(8 * ranks).ok_or_else(garbled)?;
    let length = |bytes: &[u8]| {
        let numbers = bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        usize::try_from(numbers).ok()?.checked_mul(unit)
    };
    let lengths: Option<Vec<usize>> = head.chunks(8).map(length).collect();
    let all = |lengths: &Vec<usize>| lengths.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    match lengths {
        Some(lengths) if all(&lengths) == Some(numbers.len()) => Ok((lengths, numbers)),
        Some(_) | None => Err(garbled()),
    }
}

/// The part of a sum's bytes that a rank gets, of parts of these lengths in bytes.
pub(crate) fn part_of<'a>(sum: &'a [u8], rank: u64, lengths: &[usize]) -> Result<&'a [u8], GroupError> {
    let (before, own) = lengths.split_at_checked(rank as usize).ok_or_else(garbled)?;
    let first: usize = before.iter().sum();
    sum.get(first..first + own.first().ok_or_else(garbled)?).ok_or_else(garbled)
}

fn fill(values: &mut [f32], bytes: &[u8]) -> Result<(), GroupError> {
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(bytes);
    if found.len() != values.len() {
        return Err(garbled());
    }
    values.copy_from_slice(&found);
    Ok(())
}

fn garbled() -> GroupError {
    GroupError::Meeting("the ranks exchanged another number of values than they asked for".into())
}

/// How long a rank waits for another: `DREAMC_RANK_TIMEOUT` in seconds, half an hour by default. A
/// rank that ends is noticed at once; this is for one that hangs, or whose machine is gone.
pub fn patience() -> Duration {
    let asked = std::env::var("DREAMC_RANK_TIMEOUT").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(asked.filter(|&s| s > 0).unwrap_or(30 * 60))
}

#[cfg(test)]
mod tests;
