//! Clusters: blocks that run at once, and reach into one another's shared memory.
//!
//! A cluster runs as one block with the warps of all its blocks. Their shared memories stand
//! [`STRIDE`] apart in one address space, as the hardware's do, so that an address says whose
//! memory it is of: `mapa` gives that of the same place in another block. Instructions without
//! `shared::cluster` reach their own block's memory alone.
//!
//! `barrier.cluster` is for all threads of all blocks; those that have exited count as there. A
//! block must not exit while its memory is still written to, by a copy or an arrival.

use std::rc::Rc;

use super::alu::File;
use super::exec::{Core, Wait, Warp, each, try_each};
use super::finding::{Kind, Outcome, Trouble};
use super::race::View;

/// Between the shared memories of adjacent blocks of a cluster.
pub(super) const STRIDE: u64 = 1 << 24;

/// The barrier of a cluster, at which threads arrive and for which they wait later.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Times that all threads have arrived.
    phase: u32,
    /// Threads that have arrived since.
    arrived: u32,
    /// The phase in which each thread arrived that has not waited since.
    awaited: Vec<Option<u32>>,
    /// Knowledge of the threads that arrived in this phase, and in the last.
    arriving: Vec<Rc<View>>,
    views: Vec<Rc<View>>,
    /// Blocks whose threads have all exited, a bit each.
    pub left: u32,
}

impl State {
    pub fn new(threads: u32) -> State {
        State { awaited: vec![None; threads as usize], ..State::default() }
    }

    /// Whether a phase of the barrier is over.
    pub fn passed(&self, phase: u32) -> bool {
        self.phase != phase
    }

    /// All threads that live have arrived, where any has.
    pub fn complete(&mut self, live: u32) {
        if self.arrived > 0 && self.arrived >= live {
            self.phase += 1;
            self.arrived = 0;
            self.views = std::mem::take(&mut self.arriving);
        }
    }

    /// Why a wait for the barrier does not end.
    pub fn why_stuck(&self) -> Box<Trouble> {
        let what =
            format!("a cluster's barrier has {} threads and the others never come to it", self.arrived);
        let right = "barrier.cluster.arrive by all threads of all blocks of the cluster";
        Trouble::new(Kind::Deadlock, what, right)
    }
}

impl Core<'_> {
    /// The block of the cluster that a warp is of.
    pub fn rank(&self, warp: u32) -> u32 {
        warp / self.warps
    }

    /// The warpgroup that a warp is of, its number in it, and whether it has four warps.
    pub fn warpgroup(&self, warp: u32) -> (u32, u32, bool) {
        let own = warp % self.warps;
        let group = self.rank(warp) * self.warps.div_ceil(4) + own / 4;
        (group, own % 4, (own / 4 + 1) * 128 <= self.each)
    }

    /// The warps of the warpgroup that a warp is of.
    pub fn comrades(&self, warp: u32) -> std::ops::Range<u32> {
        let first = warp - warp % self.warps % 4;
        let end = (self.rank(warp) + 1) * self.warps;
        first..(first + 4).min(end)
    }

    /// The same place in the shared memory of a block of the cluster.
    pub fn place_in(&self, address: u64, rank: u32) -> u64 {
        address % STRIDE + u64::from(rank) * STRIDE
    }

    /// The address in the cluster of one in a block.
    pub fn in_block(&self, address: u64, rank: u32) -> u64 {
        address + u64::from(rank) * STRIDE
    }

    /// An address of shared memory that an instruction takes for its own block's.
    #[inline]
    pub fn own(&self, warp: &Warp, address: u64) -> Outcome<u64> {
        if self.blocks == 1 || address / STRIDE == u64::from(self.rank(warp.index)) {
            return Ok(address);
        }
        let what = format!("shared memory of block {} of the cluster", address / STRIDE);
        let right = "an instruction with shared::cluster, which reaches it";
        Err(Trouble::new(Kind::OutOfBounds, what, right))
    }

    /// The offset of an access to the own block's shared memory.
    #[inline]
    pub fn locate_own(
        &self,
        warp: &Warp,
        address: u64,
        bytes: u64,
        align: u64,
        write: bool,
    ) -> Outcome<usize> {
        self.shared.locate(self.own(warp, address)?, bytes, align, write)
    }

    /// A block whose threads have all exited takes nothing any more.
    pub fn check_there(&self, rank: u32, what: &str) -> Outcome<()> {
        if self.hopper_cluster.left >> rank & 1 == 0 {
            return Ok(());
        }
        let what = format!("{what} block {rank} of the cluster, whose threads have all exited");
        let right = "barrier.cluster.arrive and barrier.cluster.wait before the end of every block";
        Err(Trouble::new(Kind::InFlight, what, right))
    }

    /// `mapa`
    pub fn map_address(&self, warp: &mut Warp, active: u32, to: u16, at: u16, rank: u16) -> Outcome<()> {
        try_each(active, |lane| {
            let word = |row: u16| warp.registers.w[usize::from(row)][lane];
            let (address, rank) = (word(at), word(rank));
            if rank >= self.blocks {
                let what = format!("block {rank} of a cluster of {}", self.blocks);
                let right = "a rank below %cluster_nctarank";
                return Err(Trouble::new(Kind::OutOfBounds, what, right).lane(lane as u32));
            }
            let mapped = self.place_in(address.into(), rank);
            warp.set((File::W, to), lane, mapped);
            Ok(())
        })
    }

    /// `barrier.cluster.arrive`
    pub fn arrive_cluster(&mut self, warp: &Warp, active: u32, releases: bool) -> Outcome<()> {
        let phase = self.hopper_cluster.phase;
        let state = &mut self.hopper_cluster;
        let mut twice = None;
        each(active, |lane| {
            let awaited = &mut state.awaited[warp.index as usize * 32 + lane];
            if awaited.replace(phase).is_some() {
                twice = Some(lane);
            }
        });
        if let Some(lane) = twice {
            let what = "a thread that arrives at the cluster's barrier and has not waited since it did";
            let right = "barrier.cluster.wait after every barrier.cluster.arrive";
            return Err(Trouble::new(Kind::Barrier, what, right).lane(lane as u32));
        }
        state.arrived += active.count_ones();
        if let Some(clocks) = self.clocks.as_mut().filter(|_| releases) {
            state.arriving.extend(clocks.release(&[(warp.index, active)]));
        }
        Ok(())
    }

    /// `barrier.cluster.wait`; gives what the lanes wait for.
    pub fn wait_cluster(&mut self, warp: &Warp, active: u32) -> Outcome<Option<Wait>> {
        let state = &mut self.hopper_cluster;
        let (mut never, mut open) = (None, false);
        each(active, |lane| match state.awaited[warp.index as usize * 32 + lane] {
            None => never = Some(lane),
            Some(phase) => open |= phase == state.phase,
        });
        if let Some(lane) = never {
            let what = "a thread waits for the cluster's barrier and has not arrived at it";
            let right = "barrier.cluster.arrive before barrier.cluster.wait";
            return Err(Trouble::new(Kind::Barrier, what, right).lane(lane as u32));
        }
        if open {
            return Ok(Some(Wait::Cluster(state.phase)));
        }
        each(active, |lane| state.awaited[warp.index as usize * 32 + lane] = None);
        if let Some(clocks) = &mut self.clocks {
            for view in &self.hopper_cluster.views {
                clocks.acquire(warp.index, active, view);
            }
        }
        Ok(None)
    }
}
