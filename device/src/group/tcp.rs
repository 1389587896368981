//! A group of processes over TCP: a star around rank 0.
//!
//! *In*: a [`Place`]. *Out*: a [`Group`]. *Promise*: rank 0 listens at the address it was given and
//! nowhere else, and drops a connection that does not greet it as a rank of this group; one that
//! closes is that rank's end, at once. Ranks say every few seconds that they are there, from a
//! thread that nothing else holds up: one that does not for half a minute is lost, whatever the
//! time-out for work, and so is one that takes no bytes.
//!
//! Rank 0 reads the bytes of every rank, combines them in the order of the ranks, and sends each
//! its result: 2·(n − 1) times the bytes go through it, which suits a few ranks on CPUs. It is also
//! how ranks meet, whatever moves their gradients. Frames are a tag (1 byte), a rank (8), a length
//! (8), and the bytes, little endian.

use super::place::Place;
use super::{
    ALIVE, Collective, FAILED, Group, GroupError, Meter, NUMBER, Traffic, Transport, combine, lengths_of,
    part_of,
};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The first bytes of a connection; rank and size follow.
const GREETING: &[u8; 16] = b"dreamc ranks 1\r\n";

/// Bytes before those of a frame.
const HEAD: usize = 17;

/// Between two tries to reach rank 0, which may be started later.
const AGAIN: Duration = Duration::from_millis(50);

/// A greeting takes no longer, on whatever machine.
const GREETED: Duration = Duration::from_secs(10);

/// Between two signs of life.
const BEAT: Duration = Duration::from_secs(5);

/// A rank that gives no sign of life for so long is lost.
const GONE: Duration = Duration::from_secs(30);

/// Bytes of one rank for a collective, or why it fails.
type Frame = Result<(Collective, Vec<u8>), GroupError>;

/// How long a connection may be still, where ranks have so much patience.
fn gone(patience: Duration) -> Duration {
    GONE.min(patience)
}

/// Says every few seconds that this rank is there, until it is dropped.
struct Beats {
    /// Until the end.
    _until: Sender<()>,
}

impl Beats {
    /// `all` sends a frame to every rank that this one is connected to.
    fn new(
        patience: Duration,
        mut all: impl FnMut(&dyn Fn(&mut TcpStream)) + Send + 'static,
        rank: u64,
    ) -> Result<Self, std::io::Error> {
        let (until, ended) = channel::<()>();
        let each = BEAT.min(gone(patience) / 4);
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(each) {
                // Whoever reads and writes otherwise hears of an error.
                all(&|stream| drop(send(stream, (ALIVE, rank), &[])));
            }
        };
        std::thread::Builder::new().name("signs of life".into()).spawn(beat)?;
        Ok(Beats { _until: until })
    }
}

fn send(stream: &mut TcpStream, (tag, rank): (u8, u64), bytes: &[u8]) -> std::io::Result<()> {
    let mut head = [0; HEAD];
    head[0] = tag;
    head[1..9].copy_from_slice(&rank.to_le_bytes());
    head[9..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

/// The next frame of rank `from` that is more than a sign of life.
fn receive(stream: &mut TcpStream, from: u64, patience: Duration) -> Frame {
    let begun = Instant::now();
    loop {
        if let Some(frame) = next(stream, from, patience).transpose() {
            return frame;
        }
        if begun.elapsed() > patience {
            return Err(GroupError::Silent { rank: from, seconds: patience.as_secs() });
        }
    }
}

/// The next frame of rank `from`; nothing for a sign of life.
fn next(
    stream: &mut TcpStream,
    from: u64,
    patience: Duration,
) -> Result<Option<(Collective, Vec<u8>)>, GroupError> {
    let lost = |error: std::io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            GroupError::Lost { rank: from, seconds: gone(patience).as_secs() }
        }
        _ => GroupError::Ended { rank: from },
    };
    let mut head = [0; HEAD];
    stream.read_exact(&mut head).map_err(lost)?;
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&head[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (rank, length) = (number(1), number(9));
    // No more is taken for granted than comes.
    let mut bytes = vec![];
    let taken = stream.take(length).read_to_end(&mut bytes).map_err(lost)?;
    if taken as u64 != length {
        return Err(GroupError::Ended { rank: from });
    }
    match Collective::of_tag(head[0], rank) {
        Some(what) => Ok(Some((what, bytes))),
        None if head[0] == ALIVE => Ok(None),
        None => Err(read_failure(rank, &bytes)),
    }
}

/// Whether a stream has something to read: bytes, its end, an error.
fn readable(stream: &TcpStream) -> bool {
    let mut byte = 0u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: one byte is read into `byte`, which lives through the call; the descriptor is the
    // stream's own, and its mode, which other threads rely on, stays as it is.
    let come = unsafe { libc::recv(stream.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
    come >= 0 || std::io::Error::last_os_error().kind() != ErrorKind::WouldBlock
}

/// How a failure is written into a frame, and read from one.
fn write_failure(error: &GroupError) -> (u64, String) {
    match error {
        GroupError::Failed { rank, reason } => (*rank, format!("f{reason}")),
        GroupError::Ended { rank } => (*rank, "e".into()),
        GroupError::Silent { rank, seconds } => (*rank, format!("s{seconds}")),
        GroupError::Lost { rank, seconds } => (*rank, format!("l{seconds}")),
        GroupError::Apart { rank, .. } | GroupError::Other { rank, .. } | GroupError::Unlike { rank, .. } => {
            (*rank, format!("f{error}"))
        }
        GroupError::Meeting(words) => (0, format!("f{words}")),
    }
}

fn read_failure(rank: u64, bytes: &[u8]) -> GroupError {
    let text = String::from_utf8_lossy(bytes);
    let number = |seconds: &str| seconds.parse().unwrap_or_default();
    match text.split_at_checked(1) {
        Some(("f", reason)) => GroupError::Failed { rank, reason: reason.into() },
        Some(("s", seconds)) => GroupError::Silent { rank, seconds: number(seconds) },
        Some(("l", seconds)) => GroupError::Lost { rank, seconds: number(seconds) },
        Some(_) | None => GroupError::Ended { rank },
    }
}

/// Rank 0's side.
struct Centre {
    /// To the other ranks, from rank 1 on; held by whoever sends.
    streams: Arc<Mutex<Vec<TcpStream>>>,
    _beats: Beats,
    /// Their frames, as they come, read by a thread each.
    frames: Mutex<Frames>,
    meter: Meter,
    patience: Duration,
}

/// Frames of the other ranks.
struct Frames {
    coming: Receiver<(u64, Frame)>,
    /// Those that came while rank 0 looked for failures.
    come: VecDeque<(u64, Frame)>,
}

impl Frames {
    fn next(&mut self, patience: Duration) -> Result<(u64, Frame), RecvTimeoutError> {
        self.come.pop_front().map_or_else(|| self.coming.recv_timeout(patience), Ok)
    }

    /// The first that is a failure, which stays.
    fn failed(&mut self) -> Option<GroupError> {
        self.come.extend(self.coming.try_iter());
        self.come.iter().find_map(|(_, frame)| frame.as_ref().err().cloned())
    }
}

impl Centre {
    fn all(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let mut frames = self.frames();
        let begun = Instant::now();
        let mut parts: Vec<Option<Vec<u8>>> = vec![None; self.streams().len() + 1];
        parts[0] = Some(bytes.to_vec());
        while let Some(missing) = parts.iter().position(Option::is_none) {
            let left = self.patience.saturating_sub(begun.elapsed());
            let (rank, frame) = frames.next(left).map_err(|error| match error {
                RecvTimeoutError::Timeout => {
                    GroupError::Silent { rank: missing as u64, seconds: self.patience.as_secs() }
                }
                RecvTimeoutError::Disconnected => GroupError::Ended { rank: missing as u64 },
            })?;
            let (theirs, bytes) = frame?;
            self.meter.received(HEAD + bytes.len());
            if theirs != what {
                let (theirs, first) = (theirs.to_string(), what.to_string());
                return Err(GroupError::Apart { rank, theirs, first });
            }
            parts[rank as usize] = Some(bytes);
        }
        let parts: Vec<Vec<u8>> = parts.into_iter().flatten().collect();
        // A result that all ranks get is made once, and so is a sum that is cut.
        let (all, lengths) = match what {
            Collective::ReduceScatter => {
                let numbers = parts.iter().map(|part| Ok(lengths_of(part, parts.len(), NUMBER)?.1));
                let numbers = numbers.collect::<Result<Vec<_>, GroupError>>()?;
                let lengths = lengths_of(bytes, parts.len(), NUMBER)?.0;
                (combine(Collective::AllReduce, &numbers, 0)?, lengths)
            }
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast(_) => {
                (combine(what, &parts, 0)?, vec![])
            }
            Collective::AllToAll => (vec![], vec![]),
        };
        let own = |rank| -> Result<Cow<[u8]>, GroupError> {
            Ok(match what {
                Collective::ReduceScatter => Cow::Borrowed(part_of(&all, rank, &lengths)?),
                Collective::AllReduce | Collective::AllGather | Collective::Broadcast(_) => {
                    Cow::Borrowed(&all[..])
                }
                Collective::AllToAll => Cow::Owned(combine(what, &parts, rank)?),
            })
        };
        for (stream, rank) in self.streams().iter_mut().zip(1..) {
            let own = own(rank)?;
            send(stream, what.tag(), &own).map_err(|error| unsent(&error, rank, self.patience))?;
            self.meter.sent(HEAD + own.len());
        }
        Ok(own(0)?.into_owned())
    }

    fn frames(&self) -> MutexGuard<'_, Frames> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn streams(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why bytes did not reach a rank.
fn unsent(error: &std::io::Error, rank: u64, patience: Duration) -> GroupError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            GroupError::Lost { rank, seconds: gone(patience).as_secs() }
        }
        _ => GroupError::Ended { rank },
    }
}

/// Tells all ranks of a failure; those that are gone need not hear it.
fn spread(streams: &mut [TcpStream], error: &GroupError) {
    let (rank, words) = write_failure(error);
    for stream in streams {
        let _ = send(stream, (FAILED, rank), words.as_bytes());
    }
}

impl Transport for Centre {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        self.all(what, bytes).inspect_err(|error| spread(&mut self.streams(), error))
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.meter.read())
    }

    fn failed(&self) -> Option<GroupError> {
        let failed = self.frames().failed();
        failed.inspect(|error| spread(&mut self.streams(), error))
    }

    fn fail(&self, reason: &str) {
        spread(&mut self.streams(), &GroupError::Failed { rank: 0, reason: reason.into() });
    }
}

impl Drop for Centre {
    fn drop(&mut self) {
        // Otherwise the threads that read hold the connections open.
        for stream in self.streams().iter() {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
    }
}

/// Every other rank's side.
struct Ray {
    rank: u64,
    /// Two ends of one connection: signs of life go out while an exchange waits.
    reads: Mutex<Reads>,
    writes: Arc<Mutex<TcpStream>>,
    _beats: Beats,
    meter: Meter,
    patience: Duration,
}

/// Frames of rank 0.
struct Reads {
    stream: TcpStream,
    /// When the last came, which is the first at the earliest: rank 0 says nothing until all ranks
    /// are there.
    heard: Option<Instant>,
}

impl Ray {
    fn new(rank: u64, stream: TcpStream, patience: Duration) -> Result<Self, std::io::Error> {
        let writes = Arc::new(Mutex::new(stream.try_clone()?));
        let own = writes.clone();
        let all = move |each: &dyn Fn(&mut TcpStream)| {
            each(&mut own.lock().unwrap_or_else(PoisonError::into_inner));
        };
        let beats = Beats::new(patience, all, rank)?;
        let reads = Mutex::new(Reads { stream, heard: None });
        Ok(Ray { rank, reads, writes, _beats: beats, meter: Meter::default(), patience })
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, tag: (u8, u64), bytes: &[u8]) -> std::io::Result<()> {
        send(&mut self.writes.lock().unwrap_or_else(PoisonError::into_inner), tag, bytes)
    }
}

impl Reads {
    /// Notes that something came: from now on the connection is never still for long.
    fn hear(&mut self, patience: Duration) {
        if self.heard.replace(Instant::now()).is_none() {
            let _ = self.stream.set_read_timeout(Some(gone(patience)));
        }
    }
}

impl Drop for Ray {
    fn drop(&mut self) {
        // Otherwise the thread that gives signs of life holds the connection open.
        let _ = self.reads().stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Transport for Ray {
    fn exchange(&self, what: Collective, bytes: &[u8]) -> Result<Vec<u8>, GroupError> {
        let mut reads = self.reads();
        // Words of rank 0 before its end are better than that it ended.
        let sent = self.send(what.tag(), bytes);
        if reads.heard.is_none() {
            let silent = |error| match error {
                GroupError::Lost { rank, .. } => {
                    GroupError::Silent { rank, seconds: self.patience.as_secs() }
                }
                other => other,
            };
            // Rank 0 may wait for ranks that start late.
            let first = next(&mut reads.stream, 0, self.patience).map_err(silent)?;
            reads.hear(self.patience);
            if let Some(frame) = first {
                return self.come(what, bytes.len(), frame);
            }
        }
        let frame = receive(&mut reads.stream, 0, self.patience)?;
        reads.hear(self.patience);
        sent.map_err(|error| unsent(&error, 0, self.patience))?;
        self.come(what, bytes.len(), frame)
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.meter.read())
    }

    /// Rank 0 says nothing outside an exchange but failures, and that it is there.
    fn failed(&self) -> Option<GroupError> {
        let mut reads = self.reads();
        while readable(&reads.stream) {
            match next(&mut reads.stream, 0, self.patience) {
                Ok(None) => reads.hear(self.patience),
                Ok(Some(_)) => return None,
                Err(error) => return Some(error),
            }
        }
        let gone = gone(self.patience);
        let lost = reads.heard.is_some_and(|heard| heard.elapsed() > gone);
        lost.then_some(GroupError::Lost { rank: 0, seconds: gone.as_secs() })
    }

    fn fail(&self, reason: &str) {
        let _ = self.send((FAILED, self.rank), format!("f{reason}").as_bytes());
    }
}

impl Ray {
    /// A result of rank 0, for what this rank asked with these bytes.
    fn come(
        &self,
        what: Collective,
        sent: usize,
        (theirs, come): (Collective, Vec<u8>),
    ) -> Result<Vec<u8>, GroupError> {
        self.meter.sent(HEAD + sent);
        self.meter.received(HEAD + come.len());
        if theirs != what {
            let (theirs, first) = (what.to_string(), theirs.to_string());
            return Err(GroupError::Apart { rank: self.rank, theirs, first });
        }
        Ok(come)
    }
}

/// Meets the other ranks.
pub fn meet(place: &Place, patience: Duration) -> Result<Group, GroupError> {
    let Place { rank, size, .. } = *place;
    if place.address.is_empty() {
        let why = "ranks on several machines meet at MASTER_ADDR, which is not set";
        return Err(GroupError::Meeting(why.into()));
    }
    let transport: Arc<dyn Transport> = match rank {
        0 => Arc::new(listen(place, patience)?),
        _ => {
            let stream = reach(place, patience)?;
            let broken = |error| GroupError::Meeting(format!("the connection to rank 0: {error}"));
            Arc::new(Ray::new(rank, stream, patience).map_err(broken)?)
        }
    };
    Ok(Group::over(rank, size, transport))
}

/// Waits for all ranks.
fn listen(place: &Place, patience: Duration) -> Result<Centre, GroupError> {
    let at = (place.address.as_str(), place.port);
    let refused = |what: std::io::Error| {
        GroupError::Meeting(format!(
            "rank 0 cannot listen at {}:{}: {what}; set MASTER_ADDR and MASTER_PORT",
            at.0, at.1
        ))
    };
    let listener = TcpListener::bind(at).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let begun = Instant::now();
    let mut streams: Vec<Option<TcpStream>> = (1..place.size).map(|_| None).collect();
    while let Some(missing) = streams.iter().position(Option::is_none) {
        match listener.accept() {
            Ok((stream, _)) => {
                let Some((rank, size, stream)) = greeted(stream) else { continue };
                if size != place.size {
                    let (theirs, first) = (size.to_string(), place.size.to_string());
                    return Err(GroupError::Other { rank, what: "number of ranks".into(), theirs, first });
                }
                match streams.get_mut(rank.wrapping_sub(1) as usize) {
                    Some(free @ None) => *free = Some(stream),
                    Some(Some(_)) | None => {
                        return Err(GroupError::Meeting(format!(
                            "two processes say that they are rank {rank}"
                        )));
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if begun.elapsed() > patience {
                    let rank = missing as u64 + 1;
                    return Err(GroupError::Silent { rank, seconds: patience.as_secs() });
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
    let streams: Vec<TcpStream> = streams.into_iter().flatten().collect();
    let (sender, frames) = channel();
    for (stream, rank) in streams.iter().zip(1..) {
        stream.set_read_timeout(Some(gone(patience))).map_err(refused)?;
        stream.set_write_timeout(Some(gone(patience))).map_err(refused)?;
        let stream = stream.try_clone().map_err(refused)?;
        let sender = sender.clone();
        let read = move || forward(stream, rank, &sender, patience);
        std::thread::Builder::new().name(format!("rank {rank}")).spawn(read).map_err(refused)?;
    }
    let frames = Frames { coming: frames, come: VecDeque::new() };
    let (streams, frames) = (Arc::new(Mutex::new(streams)), Mutex::new(frames));
    let own = streams.clone();
    let all = move |each: &dyn Fn(&mut TcpStream)| {
        own.lock().unwrap_or_else(PoisonError::into_inner).iter_mut().for_each(each);
    };
    let beats = Beats::new(patience, all, 0).map_err(refused)?;
    Ok(Centre { streams, _beats: beats, frames, meter: Meter::default(), patience })
}

/// Hands on the frames of a rank until its end; the time-out for its work is that of an exchange.
fn forward(mut stream: TcpStream, rank: u64, to: &Sender<(u64, Frame)>, patience: Duration) {
    loop {
        let Some(frame) = next(&mut stream, rank, patience).transpose() else { continue };
        let last = frame.is_err();
        if to.send((rank, frame)).is_err() || last {
            return;
        }
    }
}

/// Rank and size at the other end of a connection, where it is a rank.
fn greeted(mut stream: TcpStream) -> Option<(u64, u64, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(GREETED)).ok()?;
    let mut greeting = [0; 32];
    stream.read_exact(&mut greeting).ok()?;
    let number = |at: usize| Some(u64::from_le_bytes(greeting.get(at..at + 8)?.try_into().ok()?));
    if &greeting[..16] != GREETING {
        return None;
    }
    stream.set_read_timeout(None).ok()?;
    stream.set_nodelay(true).ok()?;
    Some((number(16)?, number(24)?, stream))
}

/// Connects to rank 0, which may be started later.
fn reach(place: &Place, patience: Duration) -> Result<TcpStream, GroupError> {
    let at = (place.address.as_str(), place.port);
    let begun = Instant::now();
    loop {
        let addresses = at.to_socket_addrs().into_iter().flatten();
        let attempt = addresses.map(|a| TcpStream::connect_timeout(&a, GREETED)).find_map(Result::ok);
        let stream = attempt.and_then(|mut stream| {
            let greeting = [&GREETING[..], &place.rank.to_le_bytes(), &place.size.to_le_bytes()].concat();
            stream.write_all(&greeting).ok()?;
            stream.set_nodelay(true).ok()?;
            stream.set_read_timeout(Some(patience)).ok()?;
            stream.set_write_timeout(Some(gone(patience))).ok()?;
            Some(stream)
        });
        match stream {
            Some(stream) => return Ok(stream),
            None if begun.elapsed() > patience => {
                return Err(GroupError::Meeting(format!(
                    "rank 0 does not answer at {}:{} for {} s (MASTER_ADDR, MASTER_PORT)",
                    at.0,
                    at.1,
                    patience.as_secs()
                )));
            }
            None => std::thread::sleep(AGAIN),
        }
    }
}
