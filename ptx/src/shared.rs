//! The shared memory of a block: its bytes, which of them anyone has written, and which an
//! asynchronous operation owns.

use super::cluster::STRIDE;
use super::finding::{Kind, Outcome, Trouble};
use super::program::SHARED_BASE;
use super::race::{Access, Clocks, SharedRaces, Stamp};

/// A thread of the block wrote it, or a copy did.
const WRITTEN: u8 = 1;
/// A copy is under way that will write it.
const COMING: u8 = 2;

/// Shared memory of one block, or of the blocks of a cluster, one after another.
#[derive(Debug)]
pub(super) struct Shared {
    /// Bytes of a block, and from one block's to the next one's.
    length: u64,
    apart: u64,
    blocks: u64,
    bytes: Vec<u8>,
    state: Vec<u8>,
    /// How many asynchronous reads of a byte are under way; empty until there is one.
    lent: Vec<u16>,
    races: Option<SharedRaces>,
    initialised: bool,
}

/// The party of an access, for the race detector and for findings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Who<'a> {
    pub clocks: Option<&'a Clocks>,
    pub block: u32,
    pub threads: u32,
    pub warp: u32,
    pub lane: u32,
    pub pc: u32,
}

impl Who<'_> {
    /// The thread's number in the block.
    pub fn thread(&self) -> u32 {
        self.warp * 32 + self.lane
    }

    /// The access for the race detector.
    pub fn stamp(&self, clocks: &Clocks) -> Stamp {
        let party = self.thread();
        Stamp { block: self.block, party, tick: clocks.tick(party), pc: self.pc }
    }
}

impl Shared {
    /// Memory up to address `end` of `blocks` blocks, with race detection in grains of `grain`
    /// bytes if asked.
    pub fn new(end: u32, blocks: u32, grain: Option<u64>, initialised: bool) -> Shared {
        let length = u64::from(end.saturating_sub(SHARED_BASE));
        // No grain is of two blocks.
        let apart = if blocks > 1 { length.next_multiple_of(16) } else { length };
        let bytes = (apart * u64::from(blocks)) as usize;
        Shared {
            length,
            apart,
            blocks: blocks.into(),
            // Not a number in any float format.
            bytes: vec![0xff; bytes],
            state: vec![0; bytes],
            lent: Vec::new(),
            races: grain.map(|grain| SharedRaces::new(bytes as u64, grain)),
            initialised,
        }
    }

    /// The offset of an access that is inside; the address must be a multiple of `align`.
    #[inline]
    pub fn locate(&self, address: u64, bytes: u64, align: u64, write: bool) -> Outcome<usize> {
        let (block, within) =
            if self.blocks == 1 { (0, address) } else { (address / STRIDE, address % STRIDE) };
        let offset = within.wrapping_sub(u64::from(SHARED_BASE));
        if offset > self.length || bytes > self.length - offset || block >= self.blocks {
            return Err(self.outside(within, bytes, write));
        }
        if !address.is_multiple_of(align) {
            return Err(misaligned("shared", address, align));
        }
        Ok((block * self.apart + offset) as usize)
    }

    #[cold]
    fn outside(&self, address: u64, bytes: u64, write: bool) -> Box<Trouble> {
        let what = if write { "write" } else { "read" };
        let length = self.length as i64;
        let offset = address.wrapping_sub(u64::from(SHARED_BASE)) as i64;
        Trouble::new(
            Kind::OutOfBounds,
            format!(
                "a {what} of {bytes} bytes at offset {offset} of shared memory, which has {length} bytes"
            ),
            "an index inside the array, or a launch with more shared memory",
        )
    }

    /// The block of a cluster that an offset is of.
    pub fn block_of(&self, offset: usize) -> u32 {
        (offset as u64).checked_div(self.apart).unwrap_or(0) as u32
    }

    /// Checks and enters a read by a thread.
    #[inline]
    pub fn note_read(&mut self, offset: usize, bytes: usize, who: &Who) -> Outcome<()> {
        if self.initialised {
            self.check_written(offset, bytes, who)?;
        }
        self.enter(offset, bytes, Access::Read, who)
    }

    #[inline]
    fn check_written(&self, offset: usize, bytes: usize, who: &Who) -> Outcome<()> {
        let states = &self.state[offset..offset + bytes];
        if states.iter().all(|&state| state & WRITTEN != 0) {
            return Ok(());
        }
        Err(if states.iter().any(|&state| state & COMING != 0) {
            in_flight(offset, "read", who)
        } else {
            let what = format!(
                "a read of {bytes} bytes at offset {offset} of shared memory that nothing has written"
            );
            let right = "writing it first, and a barrier between the write and this read";
            Trouble::new(Kind::Uninitialised, what, right).lane(who.lane)
        })
    }

    /// Checks and enters a write (or atomic) by a thread.
    #[inline]
    pub fn note_write(&mut self, offset: usize, bytes: usize, access: Access, who: &Who) -> Outcome<()> {
        self.enter(offset, bytes, access, who)?;
        self.state[offset..offset + bytes].fill(WRITTEN);
        Ok(())
    }

    #[inline]
    fn enter(&mut self, offset: usize, bytes: usize, access: Access, who: &Who) -> Outcome<()> {
        if self.races.is_none() {
            return Ok(());
        }
        let Some(clocks) = who.clocks else { return Ok(()) };
        let reads = matches!(access, Access::Read | Access::Strong);
        if self.coming(offset, bytes) {
            return Err(in_flight(offset, if reads { "read" } else { "write" }, who));
        }
        if !reads && self.lent.get(offset..offset + bytes).is_some_and(|lent| lent.iter().any(|&n| n > 0)) {
            return Err(Trouble::new(
                Kind::InFlight,
                format!("a write at offset {offset} of shared memory while an asynchronous operation still reads it"),
                "waiting for that operation (wgmma.wait_group, cp.async.bulk.wait_group) before the memory is used again",
            )
            .lane(who.lane));
        }
        let Some(races) = &mut self.races else { return Ok(()) };
        let stamp = who.stamp(clocks);
        races
            .access(offset as u64, bytes as u64, stamp, access, clocks)
            .map_err(|conflict| conflict.trouble(access, "shared memory", who.block, who.threads, who.lane))
    }

    /// Whether a copy that will write here is under way.
    #[inline]
    fn coming(&self, offset: usize, bytes: usize) -> bool {
        self.state[offset..offset + bytes].iter().any(|&state| state & COMING != 0)
    }

    /// Refuses a copy into memory that another one will write.
    pub fn check_idle(&self, offset: usize, bytes: usize, who: &Who) -> Outcome<()> {
        let taken = who.clocks.is_some() && self.coming(offset, bytes);
        if taken { Err(in_flight(offset, "copy that begins", who)) } else { Ok(()) }
    }

    /// A copy begins that will write here: it must be ordered like a write now, and the bytes are
    /// nobody's until [`Shared::arrive`].
    pub fn expect(&mut self, offset: usize, bytes: usize, who: &Who) -> Outcome<()> {
        self.enter(offset, bytes, Access::Write, who)?;
        self.state[offset..offset + bytes].fill(COMING);
        self.bytes[offset..offset + bytes].fill(0xff);
        Ok(())
    }

    /// A copy ends as a write of the thread that waited for it.
    pub fn arrive(&mut self, offset: usize, data: &[u8], who: &Who) -> Outcome<()> {
        self.state[offset..offset + data.len()].fill(WRITTEN);
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        self.enter(offset, data.len(), Access::Write, who)
    }

    /// A copy ends as a write of an asynchronous agent.
    pub fn arrive_by_agent(&mut self, offset: usize, data: &[u8], by: Stamp) {
        self.state[offset..offset + data.len()].fill(WRITTEN);
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        if let Some(races) = &mut self.races {
            races.agent_write(offset as u64, data.len() as u64, by);
        }
    }

    /// An asynchronous read begins (`true`) or ends.
    pub fn lend(&mut self, offset: usize, bytes: usize, begins: bool) {
        if self.races.is_none() {
            return;
        }
        if self.lent.is_empty() {
            self.lent = vec![0; self.bytes.len()];
        }
        for lent in &mut self.lent[offset..offset + bytes] {
            *lent = if begins { lent.saturating_add(1) } else { lent.saturating_sub(1) };
        }
    }

    /// Checks a read that an asynchronous unit will do, without entering it.
    pub fn check_read(&self, offset: usize, bytes: usize, who: &Who) -> Outcome<()> {
        if self.initialised {
            self.check_written(offset, bytes, who)?;
        }
        let (Some(races), Some(clocks)) = (&self.races, who.clocks) else { return Ok(()) };
        let stamp = who.stamp(clocks);
        races.check_read(offset as u64, bytes as u64, stamp, clocks).map_err(|conflict| {
            conflict.trouble(Access::Read, "shared memory", who.block, who.threads, who.lane)
        })
    }

    /// The first write to a range that is as asked, as far as races are looked for.
    #[inline]
    pub fn find_write(&self, offset: usize, bytes: usize, is: impl FnMut(&Stamp) -> bool) -> Option<Stamp> {
        self.races.as_ref()?.find_write(offset as u64, bytes as u64, is)
    }

    /// Enters a read by an asynchronous agent, which was checked when it began.
    pub fn read_by_agent(&mut self, offset: usize, bytes: usize, by: Stamp) {
        if let Some(races) = &mut self.races {
            races.agent_read(offset as u64, bytes as u64, by);
        }
    }

    /// The bytes at an offset, as they are.
    #[inline]
    pub fn get(&self, offset: usize, bytes: usize) -> &[u8] {
        &self.bytes[offset..offset + bytes]
    }

    /// Up to eight bytes as a number.
    #[inline]
    pub fn load(&self, offset: usize, bytes: usize) -> u64 {
        match self.bytes[offset..offset + bytes] {
            [a] => u64::from(a),
            [a, b] => u64::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => 0,
        }
    }

    /// Up to eight bytes of a number.
    #[inline]
    pub fn store(&mut self, offset: usize, bytes: usize, value: u64) {
        self.bytes[offset..offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    }
}

/// The finding for memory that a copy has not filled yet.
#[cold]
fn in_flight(offset: usize, verb: &str, who: &Who) -> Box<Trouble> {
    let what = format!(
        "a {verb} at offset {offset} of shared memory while an asynchronous copy into it is under way"
    );
    let right =
        "waiting for the copy (cp.async.wait_group, or the mbarrier's phase), then a barrier for the others";
    Trouble::new(Kind::InFlight, what, right).lane(who.lane)
}

/// The finding for an address that is no multiple of what it must be.
#[cold]
pub(super) fn misaligned(space: &str, address: u64, align: u64) -> Box<Trouble> {
    Trouble::new(
        Kind::Misaligned,
        format!("an access to {space} memory at {address:#x}, which is no multiple of {align}"),
        format!("an address aligned to {align} bytes: align the array, or use a narrower access"),
    )
}
