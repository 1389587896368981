//! Blocks, warps and lanes: what runs next, and what an instruction does.
//!
//! A warp keeps its lanes in *groups* that stand at the same instruction. The group at the smallest
//! address goes first, so that lanes that parted at a branch meet again where their paths do; where
//! a group comes to an instruction that needs lanes it has not, it waits for them there. A warp
//! runs until it can go no further or its turn is over; the block chooses the next warp as the
//! schedule says.

use std::collections::VecDeque;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use super::alu::{File, LANES, Registers};
use super::cluster::{self, STRIDE};
use super::finding::{Kind, Outcome, Trouble};
use super::hopper;
use super::memory::{Global, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW};
use super::program::{
    Address, AsyncCopy, Atomic, AtomicKind, Barrier, BarrierKind, Collective, CollectiveKind, Kernel,
    LaneMask, Op, Order, Reg, SHARED_BASE, Scope, Shuffle, Space, Special, Transfer, Value, Vote,
};
use super::race::{Access, Clocks, GlobalRaces, Location, Synchronise, View};
use super::schedule::{Chooser, Schedule};
use super::shared::{Shared, Who, misaligned};
use super::tensor::{Matrix, whole_warp};
use super::{Checks, Stats};

/// The part of a launch that all blocks have in common.
#[derive(Debug)]
pub(super) struct Launched<'a> {
    pub kernel: &'a Kernel,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub params: Vec<u8>,
    /// Addresses of the module's variables.
    pub variables: Vec<u64>,
    /// Dynamic shared memory.
    pub dynamic_bytes: u32,
    pub checks: Checks,
    pub schedule: Schedule,
    /// Registers of a warp before its own constants are put in.
    pub template: Registers,
}

/// State of a worker, for the blocks that it runs.
#[derive(Debug)]
pub(super) struct Worker<'a> {
    pub global: Global<'a>,
    pub races: Option<GlobalRaces>,
    /// Global addresses that threads synchronise through.
    pub locations: HashMap<(usize, u64), Location>,
    pub stats: Stats,
}

impl Launched<'_> {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// The registers that every warp starts with: garbage, and the constants that all warps share.
    pub fn fill_template(&mut self) {
        let [words, doubles, predicates] = self.kernel.rows;
        // Different in every lane, register and schedule, and a NaN: what depends on it does not go
        // unnoticed.
        let seed = self.schedule.seed();
        let garbage = |row: usize, lane: usize| {
            let mixed =
                ((row as u64 * 64 + lane as u64 + 1) ^ (seed << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            0x7fc0_0000 | (mixed >> 44) as u32
        };
        self.template.w = (0..words).map(|row| std::array::from_fn(|lane| garbage(row, lane))).collect();
        self.template.d = (0..doubles)
            .map(|row| {
                std::array::from_fn(|lane| {
                    u64::from(garbage(row, lane)) << 32 | u64::from(garbage(lane, row))
                })
            })
            .collect();
        self.template.p = (0..predicates).map(|row| garbage(row, 0).wrapping_mul(0x9e37_79b9)).collect();
        for &((file, row), value) in &self.kernel.constants {
            let bits = match value {
                Value::Bits(bits) => bits,
                Value::Special(_) => continue,
                // Of the first block of a cluster.
                Value::Shared(at) => at,
                Value::Variable { index, offset } => {
                    self.variables.get(index as usize).copied().unwrap_or(0).wrapping_add_signed(offset)
                }
                Value::Param { offset, bytes, signed } => {
                    let bytes = usize::from(bytes);
                    let mut word = [0; 8];
                    word[..bytes].copy_from_slice(&self.params[offset as usize..offset as usize + bytes]);
                    extend(u64::from_le_bytes(word), bytes, signed)
                }
            };
            fill(&mut self.template, (file, row), |_| bits);
        }
    }

    /// The registers of one warp of a block, which has that number in its cluster.
    fn registers(&self, block: [u32; 3], rank: u32, warp: u32) -> Registers {
        let mut registers = self.template.clone();
        let [x, y, _] = self.block;
        let warps = self.threads().div_ceil(LANES as u32);
        for &(reg, value) in &self.kernel.constants {
            if let Value::Shared(at) = value
                && rank > 0
            {
                fill(&mut registers, reg, |_| at + u64::from(rank) * STRIDE);
            }
            let Value::Special(special) = value else { continue };
            let cluster = self.kernel.cluster;
            fill(&mut registers, reg, |lane| {
                let thread = warp * LANES as u32 + lane;
                let bit = 1u32 << lane;
                u64::from(match special {
                    Special::Tid(0) => thread % x,
                    Special::Tid(1) => thread / x % y,
                    Special::Tid(_) => thread / (x * y),
                    Special::Ntid(axis) => self.block[usize::from(axis)],
                    Special::Ctaid(axis) => block[usize::from(axis)],
                    Special::Nctaid(axis) => self.grid[usize::from(axis)],
                    Special::Lane => lane,
                    Special::Warp => warp,
                    Special::Warps => warps,
                    Special::Mask(LaneMask::Equal) => bit,
                    Special::Mask(LaneMask::Less) => bit - 1,
                    Special::Mask(LaneMask::LessEqual) => bit | (bit - 1),
                    Special::Mask(LaneMask::Greater) => !(bit | (bit - 1)),
                    Special::Mask(LaneMask::GreaterEqual) => !(bit - 1),
                    Special::DynamicShared => self.dynamic_bytes,
                    Special::Rank => rank,
                    Special::Blocks => cluster,
                    Special::Cluster => block[0] / cluster,
                    Special::Clusters => self.grid[0] / cluster,
                })
            });
        }
        registers
    }
}

fn fill(registers: &mut Registers, (file, row): Reg, value: impl Fn(u32) -> u64) {
    let row = usize::from(row);
    for lane in 0..LANES {
        let value = value(lane as u32);
        match file {
            File::W => registers.w[row][lane] = value as u32,
            File::D => registers.d[row][lane] = value,
            File::P => registers.p[row] = registers.p[row] & !(1 << lane) | u32::from(value != 0) << lane,
        }
    }
}

/// A number of `bytes` bytes in a register: extended by zeros or by its sign.
#[inline]
fn extend(value: u64, bytes: usize, signed: bool) -> u64 {
    if !signed || bytes == 8 {
        return value;
    }
    let drop = 64 - 8 * bytes as u32;
    ((value << drop) as i64 >> drop) as u64
}

/// Lanes at one instruction.
#[derive(Debug, Clone, Copy)]
struct Group {
    pc: u32,
    mask: u32,
    wait: Wait,
}

/// The event that a group waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// It can run.
    Nothing,
    /// Lanes of its warp that an operation here needs: which, and what for.
    Lanes(u32, Meeting),
    /// `__syncwarp` of these lanes, wherever they come to one.
    Warp(u32),
    /// A barrier of the block, at which it has arrived.
    Barrier(u16),
    /// A phase of an `mbarrier`.
    Phase { offset: u32, parity: u32 },
    /// A `wgmma` that other warps of the group have not issued.
    Product { group: u32, number: u64 },
    /// A phase of the cluster's barrier.
    Cluster(u32),
}

/// Operations that lanes meet at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meeting {
    Collective,
    Barrier,
    /// An operation of whole warps, such as `mma`.
    Aligned,
}

/// A warp.
#[derive(Debug)]
pub(super) struct Warp {
    pub index: u32,
    pub registers: Registers,
    groups: Vec<Group>,
    /// Lanes that have not exited.
    live: u32,
    copies: VecDeque<PendingCopy>,
    /// How many groups of copies each lane has committed.
    committed: [u32; LANES],
    /// The instruction under way, for findings.
    pub pc: u32,
    /// Gave way on purpose: others first.
    pub yielded: bool,
    /// `cp.async` instructions so far.
    pub copied: u64,
    pub hopper: hopper::WarpState,
}

/// A `cp.async` of some lanes that has not been waited for.
#[derive(Debug)]
struct PendingCopy {
    number: u64,
    lanes: u32,
    pc: u32,
    bytes: usize,
    to: [u32; LANES],
    from: [Option<(usize, u64)>; LANES],
    source_bytes: [u8; LANES],
    group: [u32; LANES],
}

/// The state of one of the block's barriers.
#[derive(Debug, Default, Clone)]
struct BarrierState {
    /// Threads counted so far.
    arrived: u32,
    /// Threads that take part, where the instructions say.
    count: Option<u32>,
    /// The waiting warp, its lanes and instruction.
    waiting: Vec<(u32, u32, u32)>,
    /// The knowledge of those that only arrived.
    views: Vec<Rc<View>>,
    /// True predicates, and whether all and any were.
    trues: u32,
}

/// A block under way, or the blocks of a cluster: warps of the first, then those of the next.
#[derive(Debug)]
pub(super) struct Block<'a> {
    warps: Vec<Warp>,
    core: Core<'a>,
    chooser: Chooser,
}

/// State that the warps of a block share.
#[derive(Debug)]
pub(super) struct Core<'a> {
    pub launch: &'a Launched<'a>,
    /// The block's number, or that of a cluster's first.
    pub index: u32,
    /// Threads of all blocks, and of each; warps of each, and how many blocks there are.
    pub threads: u32,
    pub each: u32,
    pub warps: u32,
    pub blocks: u32,
    pub shared: Shared,
    local: Vec<u8>,
    pub clocks: Option<Clocks>,
    /// Shared addresses that threads synchronise through.
    locations: HashMap<u64, Location>,
    barriers: Vec<BarrierState>,
    /// The part of the block's turn that polling has used up.
    polled: u64,
    /// Registers of a thread by warp, where `setmaxnreg` changed them, and the instruction that
    /// did.
    budgets: BTreeMap<u32, (u32, u32)>,
    pub hopper: hopper::State,
    pub hopper_cluster: cluster::State,
}

/// Barriers of a block.
const BARRIERS: usize = 16;
/// Registers of a processor.
const REGISTERS: u32 = 1 << 16;

/// How a block's turn ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// All its threads have exited.
    Done,
    /// Its instructions for this turn are used up.
    Paused,
}

/// Where a trouble happened.
#[derive(Debug)]
pub(super) struct At {
    pub block: u32,
    pub warp: u32,
    pub pc: u32,
}

/// The cost of a strong read in a block's turn, so that blocks that wait for others give
/// way soon.
const POLL: u64 = 1 << 14;

impl<'a> Block<'a> {
    pub fn new(launch: &'a Launched<'a>, index: u32) -> Block<'a> {
        let (kernel, each) = (launch.kernel, launch.threads());
        let (blocks, warps_each) = (kernel.cluster, each.div_ceil(LANES as u32));
        let threads = each * blocks;
        let [gx, gy, _] = launch.grid;
        let warps = (0..warps_each * blocks).map(|at| {
            let (rank, warp) = (at / warps_each, at % warps_each);
            let block = index + rank;
            let coordinates = [block % gx, block / gx % gy, block / gx / gy];
            let lanes = (each - warp * LANES as u32).min(LANES as u32);
            let mask = u32::MAX >> (LANES as u32 - lanes);
            Warp {
                index: at,
                registers: launch.registers(coordinates, rank, warp),
                groups: vec![Group { pc: 0, mask, wait: Wait::Nothing }],
                live: mask,
                copies: VecDeque::new(),
                committed: [0; LANES],
                pc: 0,
                yielded: false,
                copied: 0,
                hopper: hopper::WarpState::default(),
            }
        });
        let races = launch.checks.races;
        let end = match launch.dynamic_bytes {
            0 => SHARED_BASE + kernel.shared_bytes,
            bytes => kernel.dynamic_at + bytes,
        };
        let agents = if kernel.needs.asynchronous { hopper::agents(blocks) } else { 0 };
        Block {
            warps: warps.collect(),
            chooser: Chooser::new(launch.schedule, index),
            core: Core {
                launch,
                index,
                threads,
                each,
                warps: warps_each,
                blocks,
                shared: Shared::new(
                    end,
                    blocks,
                    races.then_some(kernel.needs.shared_grain),
                    launch.checks.uninitialised,
                ),
                local: vec![0xff; threads as usize * kernel.local_bytes as usize],
                clocks: races.then(|| {
                    Clocks::new(
                        index,
                        threads as usize,
                        agents,
                        (kernel.needs.asynchronous, kernel.needs.shows_global),
                    )
                }),
                locations: HashMap::new(),
                barriers: vec![BarrierState::default(); BARRIERS * blocks as usize],
                polled: 0,
                budgets: BTreeMap::new(),
                hopper: hopper::State::default(),
                hopper_cluster: cluster::State::new(if blocks > 1 { threads } else { 0 }),
            },
        }
    }

    /// Runs until all threads have exited or `fuel` lane-instructions are used up.
    pub fn run(&mut self, worker: &mut Worker, fuel: &mut u64) -> Result<Turn, (At, Box<Trouble>)> {
        loop {
            let ready = |warp: &Warp| warp.groups.iter().any(|group| group.wait == Wait::Nothing);
            let Some((at, turn)) = self.chooser.warp(self.warps.len(), |warp| ready(&self.warps[warp]))
            else {
                if self.warps.iter().all(|warp| warp.groups.is_empty()) {
                    self.core.check_budgets().map_err(|trouble| (self.at(0), trouble))?;
                    self.core.finish(&mut self.warps, worker).map_err(|trouble| (self.at(0), trouble))?;
                    return Ok(Turn::Done);
                }
                // Nothing can run: now, and no sooner, the slowest asynchronous operation ends.
                let ended = self.core.complete_one(&mut self.warps, &mut self.chooser, worker);
                if !ended.map_err(|trouble| (self.at(0), trouble))? {
                    return Err(self.stuck());
                }
                self.wake_phases();
                continue;
            };
            if self.chooser.whim() {
                let ended = self.core.complete_one(&mut self.warps, &mut self.chooser, worker);
                ended.map_err(|trouble| (self.at(0), trouble))?;
            }
            let mut left = turn;
            let before = worker.stats.instructions;
            let result = self.core.run_warp(&mut self.warps[at], worker, &mut self.chooser, &mut left);
            result.map_err(|trouble| (self.at(at), trouble))?;
            if left == 0 || self.warps[at].yielded {
                self.warps[at].yielded = false;
                self.chooser.tire(at);
            }
            self.release_barriers().map_err(|trouble| (self.at(at), trouble))?;
            self.wake_phases();
            let used = worker.stats.instructions - before + std::mem::take(&mut self.core.polled);
            *fuel = fuel.saturating_sub(used);
            if *fuel == 0 {
                return Ok(Turn::Paused);
            }
        }
    }

    fn at(&self, warp: usize) -> At {
        At { block: self.core.index, warp: warp as u32, pc: self.warps.get(warp).map_or(0, |warp| warp.pc) }
    }

    /// Lets the threads go whose barrier is complete.
    fn release_barriers(&mut self) -> Outcome<()> {
        if self.core.blocks > 1 {
            self.meet_cluster()?;
        }
        for id in 0..self.core.barriers.len() {
            if self.core.barriers[id].arrived == 0 {
                continue;
            }
            let live = self.live(id / BARRIERS);
            let state = &self.core.barriers[id];
            if state.arrived == 0 || state.arrived < state.count.unwrap_or(live) {
                continue;
            }
            let state = std::mem::take(&mut self.core.barriers[id]);
            let parties: Vec<(u32, u32)> =
                state.waiting.iter().map(|&(warp, lanes, _)| (warp, lanes)).collect();
            if let Some(clocks) = &mut self.core.clocks {
                clocks.meet(&parties, &state.views);
            }
            for (at, lanes, pc) in state.waiting {
                let warp = &mut self.warps[at as usize];
                if let Op::Barrier(barrier) = &self.core.launch.kernel.code[pc as usize].op {
                    barrier_result(&mut warp.registers, barrier.kind, lanes, state.trues, state.arrived);
                }
                for group in &mut warp.groups {
                    if group.wait == Wait::Barrier(id as u16) && group.pc == pc {
                        *group = Group { pc: pc + 1, mask: group.mask, wait: Wait::Nothing };
                    }
                }
            }
        }
        Ok(())
    }

    /// Threads of a block that have not exited.
    fn live(&self, rank: usize) -> u32 {
        let each = self.core.warps as usize;
        self.warps[rank * each..(rank + 1) * each].iter().map(|warp| warp.live.count_ones()).sum()
    }

    /// Counts the threads at the cluster's barrier, and holds the blocks that have exited to what
    /// is still on its way to them.
    fn meet_cluster(&mut self) -> Outcome<()> {
        let mut all = 0;
        for rank in 0..self.core.blocks {
            let live = self.live(rank as usize);
            all += live;
            if live == 0 && self.core.hopper_cluster.left >> rank & 1 == 0 {
                self.core.hopper_cluster.left |= 1 << rank;
                self.core.check_left(rank)?;
            }
        }
        self.core.hopper_cluster.complete(all);
        Ok(())
    }

    /// Lets the groups go whose phase of an `mbarrier` has ended: they test it again.
    fn wake_phases(&mut self) {
        for warp in &mut self.warps {
            for group in &mut warp.groups {
                let over = match group.wait {
                    Wait::Phase { offset, parity } => self.core.hopper.passed(offset, parity),
                    Wait::Product { group, number } => self.core.hopper.issued(group, number),
                    Wait::Cluster(phase) => self.core.hopper_cluster.passed(phase),
                    _ => false,
                };
                if over {
                    group.wait = Wait::Nothing;
                }
            }
        }
    }

    /// Nothing can run and nothing is under way: names each waiting warp and its event.
    fn stuck(&self) -> (At, Box<Trouble>) {
        let mut best: Option<(u8, At, Box<Trouble>)> = None;
        for warp in &self.warps {
            for group in &warp.groups {
                let (rank, trouble) = self.why_stuck(warp, group);
                if best.as_ref().is_none_or(|(other, ..)| rank < *other) {
                    let at = At { block: self.core.index, warp: warp.index, pc: group.pc };
                    best = Some((rank, at, trouble.lane(group.mask.trailing_zeros() % 32)));
                }
            }
        }
        match best {
            Some((_, at, trouble)) => (at, trouble),
            None => (self.at(0), Trouble::new(Kind::Deadlock, "nothing can run", "threads that end")),
        }
    }

    fn why_stuck(&self, warp: &Warp, group: &Group) -> (u8, Box<Trouble>) {
        let elsewhere = warp.groups.iter().find(|other| other.pc != group.pc).map(|other| other.pc);
        let with_other = |trouble: Box<Trouble>| match elsewhere {
            Some(pc) => trouble.other(pc),
            None => trouble,
        };
        match group.wait {
            Wait::Lanes(needed, Meeting::Collective) => {
                let missing = needed & !group.mask;
                let what = format!(
                    "lanes {:#010x} wait in a warp operation whose mask also names lanes {missing:#010x}, which never come",
                    group.mask
                );
                let right = "a mask of exactly the lanes that execute the operation, or the operation outside the branch";
                (0, with_other(Trouble::new(Kind::Mask, what, right)))
            }
            Wait::Warp(needed) => {
                let there = warp.groups.iter().filter(|other| other.wait == group.wait);
                let missing = needed & !there.fold(0, |lanes, group| lanes | group.mask);
                let what = format!(
                    "__syncwarp({needed:#010x}) waits for lanes {missing:#010x}, which never come to one"
                );
                let right = "a __syncwarp that every lane in its mask reaches";
                (0, with_other(Trouble::new(Kind::Mask, what, right)))
            }
            Wait::Lanes(_, Meeting::Aligned) => {
                let what = format!(
                    "only lanes {:#010x} of the warp's {:#010x} reach an operation of whole warps",
                    group.mask, warp.live
                );
                let right = "all 32 lanes executing it together: outside divergent code";
                (1, with_other(Trouble::new(Kind::Mask, what, right)))
            }
            Wait::Lanes(_, Meeting::Barrier) => {
                let what = format!(
                    "only lanes {:#010x} of the warp's {:#010x} reach this barrier; the others wait elsewhere",
                    group.mask, warp.live
                );
                (1, with_other(Trouble::new(Kind::DivergentBarrier, what, BARRIER_RIGHT)))
            }
            Wait::Barrier(id) => {
                let state = &self.core.barriers[usize::from(id)];
                let others =
                    self.warps.iter().flat_map(|warp| &warp.groups).find(|other| other.wait != group.wait);
                let expected = state.count.unwrap_or(self.live(usize::from(id) / BARRIERS));
                let id = usize::from(id) % BARRIERS;
                let what = format!(
                    "barrier {id} has {} of {expected} threads and the others never come to it",
                    state.arrived
                );
                let trouble = match others {
                    Some(other) if matches!(other.wait, Wait::Barrier(_)) => {
                        Trouble::new(Kind::DivergentBarrier, what, BARRIER_RIGHT).other(other.pc)
                    }
                    Some(other) => Trouble::new(Kind::Deadlock, what, BARRIER_RIGHT).other(other.pc),
                    None => Trouble::new(Kind::Deadlock, what, BARRIER_RIGHT),
                };
                (3, trouble)
            }
            Wait::Phase { offset, parity } => (2, self.core.hopper.why_stuck(offset, parity)),
            Wait::Product { group, number } => (4, self.core.hopper.why_unissued(group, number)),
            Wait::Cluster(_) => (5, self.core.hopper_cluster.why_stuck()),
            Wait::Nothing => {
                (9, Trouble::new(Kind::Deadlock, "a warp never got its turn", "threads that end"))
            }
        }
    }
}

const BARRIER_RIGHT: &str =
    "the same barrier reached by every thread: no __syncthreads inside a condition that some fail";

/// The result of `bar.red`.
fn barrier_result(registers: &mut Registers, kind: BarrierKind, lanes: u32, trues: u32, arrived: u32) {
    match kind {
        BarrierKind::Wait | BarrierKind::Arrive => {}
        BarrierKind::Count { to, .. } => {
            each(lanes, |lane| registers.w[usize::from(to)][lane] = trues);
        }
        BarrierKind::All { to, .. } => {
            let row = &mut registers.p[usize::from(to)];
            *row = if trues == arrived { *row | lanes } else { *row & !lanes };
        }
        BarrierKind::Any { to, .. } => {
            let row = &mut registers.p[usize::from(to)];
            *row = if trues > 0 { *row | lanes } else { *row & !lanes };
        }
    }
}

/// Calls for each lane of a mask.
#[inline]
pub(super) fn each(mut lanes: u32, mut call: impl FnMut(usize)) {
    while lanes != 0 {
        call(lanes.trailing_zeros() as usize);
        lanes &= lanes - 1;
    }
}

/// Calls for each lane of a mask until one fails.
#[inline]
pub(super) fn try_each(mut lanes: u32, mut call: impl FnMut(usize) -> Outcome<()>) -> Outcome<()> {
    while lanes != 0 {
        call(lanes.trailing_zeros() as usize)?;
        lanes &= lanes - 1;
    }
    Ok(())
}

/// The next act of a group after an instruction.
enum Next {
    /// The next instruction.
    Step,
    /// Another one.
    Goto(u32),
    /// Some lanes go elsewhere, or stop, or wait; the warp's groups were updated.
    Regroup,
}

impl Warp {
    /// The value of a register in a lane.
    #[inline]
    pub fn value(&self, (file, row): Reg, lane: usize) -> u64 {
        match file {
            File::W => u64::from(self.registers.w[usize::from(row)][lane]),
            File::D => self.registers.d[usize::from(row)][lane],
            File::P => u64::from(self.registers.p[usize::from(row)] >> lane & 1),
        }
    }

    /// An address in a lane.
    #[inline]
    pub fn address(&self, address: Address, lane: usize) -> u64 {
        self.value(address.base, lane).wrapping_add_signed(address.offset)
    }

    #[inline]
    pub fn set(&mut self, (file, row): Reg, lane: usize, value: u64) {
        match file {
            File::W => self.registers.w[usize::from(row)][lane] = value as u32,
            File::D => self.registers.d[usize::from(row)][lane] = value,
            File::P => {
                let row = &mut self.registers.p[usize::from(row)];
                *row = *row & !(1 << lane) | u32::from(value != 0) << lane;
            }
        }
    }

    /// Brings groups together that stand at the same instruction and are free to, in order of
    /// address.
    fn merge(&mut self) {
        self.groups.sort_by_key(|group| group.pc);
        self.groups.dedup_by(|later, earlier| {
            let free = |group: &Group| matches!(group.wait, Wait::Nothing | Wait::Lanes(..));
            let together = later.pc == earlier.pc && free(later) && free(earlier);
            if together {
                earlier.mask |= later.mask;
                earlier.wait = Wait::Nothing;
            }
            together
        });
    }

    /// Lets lanes exit; what waited for lanes looks again.
    fn exit(&mut self, lanes: u32) {
        self.live &= !lanes;
        for group in &mut self.groups {
            if matches!(group.wait, Wait::Lanes(..)) {
                group.wait = Wait::Nothing;
            }
        }
    }
}

impl Core<'_> {
    /// Registers of a thread that a block begins with, by the bounds that the kernel was compiled
    /// for; none where these are not said, and then `setmaxnreg` does nothing.
    fn budget(&self) -> Option<u32> {
        let kernel = self.launch.kernel;
        let threads = kernel.max_threads?.saturating_mul(kernel.resident?).max(1);
        Some((REGISTERS / threads / 8 * 8).min(256))
    }

    fn set_registers(&mut self, warp: &Warp, active: u32, count: u32, takes: bool) -> Outcome<()> {
        whole_warp(active, "setmaxnreg")?;
        let Some(budget) = self.budget() else {
            let what = "setmaxnreg in a kernel of no bound, where it is ignored";
            return Err(Trouble::new(Kind::Shape, what, "__launch_bounds__(threads, blocks)").lane(0));
        };
        let now = self.budgets.get(&warp.index).map_or(budget, |(now, _)| *now);
        if (takes && count < now) || (!takes && count > now) {
            let (what, right) = match takes {
                true => ("takes", "setmaxnreg.dec to give some up"),
                false => ("gives up", "setmaxnreg.inc to take more"),
            };
            let what = format!("setmaxnreg {what} registers to {count} from {now}");
            return Err(Trouble::new(Kind::Shape, what, right).lane(0));
        }
        self.budgets.insert(warp.index, (count, warp.pc));
        Ok(())
    }

    /// Warps take no more registers than the block has, which would be waited for until the end of
    /// time, and the four of a warpgroup as many.
    fn check_budgets(&self) -> Outcome<()> {
        let Some((&last, &(_, pc))) = self.budgets.iter().max_by_key(|&(_, &(count, _))| count) else {
            return Ok(());
        };
        let (warps, budget) = (self.warps * self.blocks, self.budget().unwrap_or_default());
        let of = |warp: u32| self.budgets.get(&warp).map_or(budget, |(count, _)| *count);
        let taken: u32 = (0..warps).map(of).sum();
        if taken > warps * budget {
            let what = format!(
                "warps take {} registers of the block's {}",
                taken * LANES as u32,
                warps * budget * LANES as u32
            );
            let right = "setmaxnreg.dec by other warps, by as many as are taken";
            return Err(Trouble::new(Kind::Shape, what, right).lane(0).at(last, pc));
        }
        for (&warp, &(mine, pc)) in &self.budgets {
            if self.comrades(warp).any(|other| of(other) != mine) {
                let what = format!("setmaxnreg {mine} by some warps of a warpgroup");
                let right = "the same by all four";
                return Err(Trouble::new(Kind::Shape, what, right).lane(0).at(warp, pc));
            }
        }
        Ok(())
    }

    /// Splits into the shared memory and the party of a lane that accesses it.
    #[inline]
    pub fn shared_by(&mut self, warp: &Warp, lane: usize) -> (&mut Shared, Who<'_>) {
        let Core { shared, clocks, index, threads, .. } = self;
        let clocks = clocks.as_ref();
        (
            shared,
            Who {
                clocks,
                block: *index,
                threads: *threads,
                warp: warp.index,
                lane: lane as u32,
                pc: warp.pc,
            },
        )
    }

    fn run_warp(
        &mut self,
        warp: &mut Warp,
        worker: &mut Worker,
        chooser: &mut Chooser,
        left: &mut u32,
    ) -> Outcome<()> {
        while *left > 0 && !warp.yielded {
            warp.merge();
            self.release_syncwarps(warp);
            let groups = &warp.groups;
            let Some(at) = chooser.group(groups.len(), |group| groups[group].wait == Wait::Nothing) else {
                return Ok(());
            };
            self.run_group(warp, at, worker, left)?;
        }
        // Preempted at the very __syncwarp or warp operation that completes it, the warp must be
        // seen to be able to run.
        warp.merge();
        self.release_syncwarps(warp);
        Ok(())
    }

    /// Runs one group until it parts, meets another, waits or has used its turn.
    fn run_group(&mut self, warp: &mut Warp, at: usize, worker: &mut Worker, left: &mut u32) -> Outcome<()> {
        let code = &self.launch.kernel.code;
        let Group { mut pc, mask, .. } = warp.groups[at];
        let meets =
            warp.groups.iter().map(|group| group.pc).filter(|&other| other > pc).min().unwrap_or(u32::MAX);
        let lanes = u64::from(mask.count_ones());
        let mut steps = 0;
        let result = loop {
            if pc >= meets || steps >= *left {
                break Ok(());
            }
            let instr = &code[pc as usize];
            let active = match instr.guard {
                None => mask,
                Some(row) => {
                    let guard = warp.registers.p[usize::from(row)];
                    mask & if instr.negated { !guard } else { guard }
                }
            };
            steps += 1;
            if instr.touches {
                let rows = self.launch.kernel.touches.get(&pc).map_or(&[][..], |rows| &rows[..]);
                warp.pc = pc;
                if let Err(trouble) = self.touch(warp, active, pc, rows) {
                    break Err(trouble);
                }
            }
            if let Op::Alu(run, slots) = &instr.op {
                // SAFETY: the table gave it because this processor has what it needs.
                unsafe { run(&mut warp.registers, slots, active) };
                pc += 1;
                continue;
            }
            warp.pc = pc;
            warp.groups[at].pc = pc;
            match self.step(warp, at, active, &instr.op, worker) {
                Ok(Next::Step) => pc += 1,
                Ok(Next::Goto(target)) => pc = target,
                Ok(Next::Regroup) => {
                    *left -= steps;
                    worker.stats.warp_instructions += u64::from(steps);
                    worker.stats.instructions += u64::from(steps) * lanes;
                    return Ok(());
                }
                Err(trouble) => break Err(trouble),
            }
            if warp.yielded {
                break Ok(());
            }
        };
        warp.groups[at].pc = pc;
        *left -= steps;
        worker.stats.warp_instructions += u64::from(steps);
        worker.stats.instructions += u64::from(steps) * lanes;
        result
    }

    /// One instruction that is more than arithmetic, for the lanes of `active`.
    fn step(
        &mut self,
        warp: &mut Warp,
        at: usize,
        active: u32,
        op: &Op,
        worker: &mut Worker,
    ) -> Outcome<Next> {
        let Group { pc, mask, .. } = warp.groups[at];
        match op {
            Op::Jump(target) => {
                if active == mask {
                    // Going back lets others have their turn if they wait at smaller addresses.
                    return Ok(Next::Goto(*target));
                }
                if active != 0 {
                    warp.groups[at].mask = mask & !active;
                    warp.groups[at].pc = pc + 1;
                    warp.groups.push(Group { pc: *target, mask: active, wait: Wait::Nothing });
                    return Ok(Next::Regroup);
                }
            }
            Op::Exit => {
                if active != 0 {
                    warp.groups[at].mask &= !active;
                    warp.groups[at].pc = pc + 1;
                    if warp.groups[at].mask == 0 {
                        warp.groups.remove(at);
                    }
                    warp.exit(active);
                    return Ok(Next::Regroup);
                }
            }
            Op::Barrier(barrier) => return self.barrier(warp, at, active, barrier),
            Op::Collective(collective) => return self.collective(warp, at, active, collective),
            Op::WarpSync { mask: row } => return self.sync_warp(warp, at, active, *row),
            _ if active == 0 => {}
            op if active == mask && active != warp.live && op.is_aligned() => {
                warp.groups[at].wait = Wait::Lanes(warp.live, Meeting::Aligned);
                return Ok(Next::Regroup);
            }
            Op::Alu(..) | Op::Nothing => {}
            Op::Trap => {
                let right = "an input that the kernel's own check accepts";
                return Err(Trouble::new(Kind::Trap, "trap", right).lane(active.trailing_zeros()));
            }
            Op::Registers { count, takes } => self.set_registers(warp, active, *count, *takes)?,
            Op::Yield => warp.yielded = true,
            Op::Load(transfer) => self.load(warp, active, transfer, worker)?,
            Op::Store(transfer) => self.store(warp, active, transfer, worker)?,
            Op::Atomic(atomic) => self.atomic(warp, active, atomic, worker)?,
            Op::FloatAtomic(name) => {
                return Err(Trouble::new(
                    Kind::FloatAtomic,
                    format!("`{name}`: a sum that depends on the order in which threads come"),
                    "a reduction in a fixed order, or integer atomics",
                )
                .lane(active.trailing_zeros()));
            }
            Op::Fence { scope } => {
                if let Some(clocks) = &mut self.clocks {
                    each(active, |lane| clocks.fence(warp.index * LANES as u32 + lane as u32, *scope));
                }
            }
            Op::ProxyFence { shared, global } => {
                if *shared {
                    self.show_mbarriers(warp, active);
                }
                if let Some(clocks) = &mut self.clocks {
                    clocks.proxy_fence(warp.index, active, (*shared, *global));
                }
            }
            Op::ActiveMask { to } => {
                each(active, |lane| warp.registers.w[usize::from(*to)][lane] = active);
            }
            Op::Copy(copy) => self.begin_copy(warp, active, copy, worker)?,
            Op::CopyCommit => each(active, |lane| warp.committed[lane] += 1),
            Op::CopyWait(groups) => self.wait_copies(warp, active, *groups, worker)?,
            Op::Matrix(matrix) => self.matrix(warp, active, matrix)?,
            Op::Multiply(multiply) => {
                whole_warp(active, "mma")?;
                multiply.run(&mut warp.registers);
            }
            Op::Hopper(op) => {
                if let Some(wait) = self.hopper(warp, active, op, worker)? {
                    warp.groups[at].wait = wait;
                    return Ok(Next::Regroup);
                }
            }
        }
        Ok(Next::Step)
    }

    // Loads and stores

    /// Where a generic address points, and the address there.
    #[inline]
    fn resolve(space: Space, address: u64) -> (Space, u64) {
        if space != Space::Generic {
            return (space, address);
        }
        match address.wrapping_sub(SHARED_WINDOW) / WINDOW {
            0 => (Space::Shared, address - SHARED_WINDOW),
            1 => (Space::Local, address - LOCAL_WINDOW),
            2 => (Space::Param, address - PARAM_WINDOW),
            _ => (Space::Global, address),
        }
    }

    fn load(
        &mut self,
        warp: &mut Warp,
        active: u32,
        transfer: &Transfer,
        worker: &mut Worker,
    ) -> Outcome<()> {
        let bytes = u64::from(transfer.bytes);
        let all = bytes * transfer.regs.len() as u64;
        let base = Address { base: transfer.base, offset: transfer.offset };
        let (from, used) = (transfer.used.start, transfer.used.len() as u64);
        try_each(active, |lane| {
            let (space, address) = Self::resolve(transfer.space, warp.address(base, lane));
            let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
            match space {
                Space::Shared => {
                    let offset = self.locate_own(warp, address, all, all, false).map_err(on_lane)?;
                    let at = offset + usize::from(from);
                    self.note_shared(warp, lane, at, used, Access::Read, transfer.order)?;
                    for (i, reg) in transfer.regs.iter().enumerate() {
                        let Some(reg) = *reg else { continue };
                        let value = self.shared.load(offset + i * bytes as usize, bytes as usize);
                        warp.set(reg, lane, extend(value, bytes as usize, transfer.signed));
                    }
                }
                Space::Local => {
                    let offset = self.locate_local(warp, lane, address, all).map_err(on_lane)?;
                    for (i, reg) in transfer.regs.iter().enumerate() {
                        let Some(reg) = *reg else { continue };
                        let at = offset + i * bytes as usize;
                        let value = number(&self.local[at..at + bytes as usize]);
                        warp.set(reg, lane, extend(value, bytes as usize, transfer.signed));
                    }
                }
                Space::Param => {
                    let params = &self.launch.params;
                    let end = address.checked_add(all).filter(|&end| end <= params.len() as u64);
                    let Some(end) = end else {
                        let what = format!("a read of {all} bytes at offset {address} of the parameters");
                        return Err(on_lane(Trouble::new(
                            Kind::OutOfBounds,
                            what,
                            "an index inside the parameter",
                        )));
                    };
                    if address % all != 0 {
                        return Err(on_lane(misaligned("parameter", address, all)));
                    }
                    for (reg, part) in transfer
                        .regs
                        .iter()
                        .zip(params[address as usize..end as usize].chunks(bytes as usize))
                    {
                        let Some(reg) = *reg else { continue };
                        warp.set(reg, lane, extend(number(part), bytes as usize, transfer.signed));
                    }
                }
                Space::Global | Space::Const | Space::Generic => {
                    let place = aligned(worker, address, all, false).map_err(on_lane)?;
                    if transfer.constant
                        && let Some(races) = &worker.races
                        && let Some(writer) = races.writer(place)
                    {
                        let right = "a plain load, or a buffer that the kernel does not write (no `const __restrict__`)";
                        let what = "a read through the read-only cache of memory that this launch writes";
                        return Err(on_lane(Trouble::new(Kind::Race, what, right)).other(writer.pc));
                    }
                    self.note_global(
                        warp,
                        lane,
                        (place.0, place.1 + u64::from(from)),
                        used,
                        Access::Read,
                        (transfer.order, transfer.scope),
                        worker,
                    )?;
                    for (i, reg) in transfer.regs.iter().enumerate() {
                        let Some(reg) = *reg else { continue };
                        let value = worker
                            .global
                            .load((place.0, place.1 + i as u64 * bytes), bytes)
                            .map_err(on_lane)?;
                        warp.set(reg, lane, extend(value, bytes as usize, transfer.signed));
                    }
                }
            }
            Ok(())
        })
    }

    fn store(
        &mut self,
        warp: &mut Warp,
        active: u32,
        transfer: &Transfer,
        worker: &mut Worker,
    ) -> Outcome<()> {
        let bytes = u64::from(transfer.bytes);
        let all = bytes * transfer.regs.len() as u64;
        let base = Address { base: transfer.base, offset: transfer.offset };
        try_each(active, |lane| {
            let (space, address) = Self::resolve(transfer.space, warp.address(base, lane));
            let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
            match space {
                Space::Shared => {
                    let offset = self.locate_own(warp, address, all, all, true).map_err(on_lane)?;
                    self.note_shared(warp, lane, offset, all, Access::Write, transfer.order)?;
                    for (i, reg) in transfer.regs.iter().flatten().enumerate() {
                        let value = warp.value(*reg, lane);
                        self.shared.store(offset + i * bytes as usize, bytes as usize, value);
                    }
                }
                Space::Local => {
                    let offset = self.locate_local(warp, lane, address, all).map_err(on_lane)?;
                    for (i, reg) in transfer.regs.iter().flatten().enumerate() {
                        let at = offset + i * bytes as usize;
                        let value = warp.value(*reg, lane).to_le_bytes();
                        self.local[at..at + bytes as usize].copy_from_slice(&value[..bytes as usize]);
                    }
                }
                Space::Param | Space::Const => {
                    let right = "a kernel that leaves its parameters alone";
                    return Err(on_lane(Trouble::new(Kind::ReadOnly, "a write to the parameters", right)));
                }
                Space::Global | Space::Generic => {
                    let place = aligned(worker, address, all, true).map_err(on_lane)?;
                    self.note_global(
                        warp,
                        lane,
                        place,
                        all,
                        Access::Write,
                        (transfer.order, transfer.scope),
                        worker,
                    )?;
                    for (i, reg) in transfer.regs.iter().flatten().enumerate() {
                        let value = warp.value(*reg, lane);
                        worker.global.store((place.0, place.1 + i as u64 * bytes), bytes, value);
                    }
                }
            }
            Ok(())
        })
    }

    /// The place of a thread's own memory in the block's.
    fn locate_local(&self, warp: &Warp, lane: usize, address: u64, bytes: u64) -> Outcome<usize> {
        let each = u64::from(self.launch.kernel.local_bytes);
        if address > each || bytes > each - address {
            let what = format!(
                "an access of {bytes} bytes at offset {address} of a thread's {each} bytes of local memory"
            );
            return Err(Trouble::new(Kind::OutOfBounds, what, "an index inside the array"));
        }
        if !address.is_multiple_of(bytes) {
            return Err(misaligned("local", address, bytes));
        }
        let thread = u64::from(warp.index) * LANES as u64 + lane as u64;
        Ok((thread * each + address) as usize)
    }

    /// Enters an access to shared memory.
    #[inline]
    fn note_shared(
        &mut self,
        warp: &Warp,
        lane: usize,
        offset: usize,
        bytes: u64,
        access: Access,
        order: Order,
    ) -> Outcome<()> {
        if access != Access::Read {
            self.hopper
                .keep_mbarriers(offset, bytes as usize)
                .map_err(|trouble| trouble.lane(lane as u32))?;
        }
        let (shared, who) = self.shared_by(warp, lane);
        match access {
            Access::Read if order == Order::Weak => shared.note_read(offset, bytes as usize, &who)?,
            Access::Read => {
                // A strong read races with plain writes only, but needs a written value like any.
                shared.note_read(offset, bytes as usize, &Who { clocks: None, ..who })?;
                shared.note_write(offset, bytes as usize, Access::Strong, &who)?;
            }
            Access::Write if order == Order::Weak => {
                shared.note_write(offset, bytes as usize, access, &who)?
            }
            _ => shared.note_write(offset, bytes as usize, Access::Atomic, &who)?,
        }
        if order != Order::Weak {
            let thread = who.thread();
            let how = synchronise(access, order, Scope::Device);
            if let Some(clocks) = &mut self.clocks {
                clocks.synchronise(thread, self.locations.entry(offset as u64).or_default(), how);
            }
        }
        Ok(())
    }

    /// Enters an access to global memory.
    #[inline]
    #[expect(clippy::too_many_arguments, reason = "an access has that many parts")]
    fn note_global(
        &mut self,
        warp: &Warp,
        lane: usize,
        place: (usize, u64),
        bytes: u64,
        access: Access,
        (order, scope): (Order, Scope),
        worker: &mut Worker,
    ) -> Outcome<()> {
        if order != Order::Weak && access != Access::Write {
            self.polled += POLL;
        }
        let (Some(races), Some(clocks)) = (&mut worker.races, &mut self.clocks) else { return Ok(()) };
        let party = warp.index * LANES as u32 + lane as u32;
        let stamp = super::race::Stamp { block: self.index, party, tick: clocks.tick(party), pc: warp.pc };
        let kind = match access {
            _ if order == Order::Weak => access,
            Access::Read => Access::Strong,
            Access::Write | Access::Atomic | Access::Strong => Access::Atomic,
        };
        races.access(place, bytes, stamp, kind, clocks).map_err(|conflict| {
            conflict.trouble(kind, "global memory", self.index, self.threads, lane as u32)
        })?;
        if order != Order::Weak {
            let location = worker.locations.entry(place).or_default();
            clocks.synchronise(party, location, synchronise(access, order, scope));
        }
        Ok(())
    }

    /// An access to global memory by an asynchronous copy that a lane started.
    pub fn note_global_copy(
        &mut self,
        warp: &Warp,
        lane: usize,
        place: (usize, u64),
        bytes: u64,
        access: Access,
        worker: &mut Worker,
    ) -> Outcome<()> {
        self.note_global(warp, lane, place, bytes, access, (Order::Weak, Scope::Device), worker)
    }

    fn atomic(&mut self, warp: &mut Warp, active: u32, atomic: &Atomic, worker: &mut Worker) -> Outcome<()> {
        let bytes = u64::from(atomic.bytes);
        let base = Address { base: atomic.base, offset: atomic.offset };
        try_each(active, |lane| {
            let (space, address) = Self::resolve(atomic.space, warp.address(base, lane));
            let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
            let value = warp.value(atomic.value, lane);
            let new = warp.value(atomic.new, lane);
            let update = |old: u64| combine(atomic.kind, bytes, old, value, new);
            let old = match space {
                Space::Shared => {
                    let offset = self.locate_own(warp, address, bytes, bytes, true).map_err(on_lane)?;
                    if atomic.kind != AtomicKind::Exchange {
                        let (shared, who) = self.shared_by(warp, lane);
                        shared.note_read(offset, bytes as usize, &Who { clocks: None, ..who })?;
                    }
                    self.note_shared(warp, lane, offset, bytes, Access::Atomic, atomic.order)?;
                    let old = self.shared.load(offset, bytes as usize);
                    self.shared.store(offset, bytes as usize, update(old));
                    old
                }
                Space::Local | Space::Param | Space::Const => {
                    let what = "an atomic on memory that no one shares";
                    return Err(on_lane(Trouble::new(Kind::OutOfBounds, what, "a plain read and write")));
                }
                Space::Global | Space::Generic => {
                    let place = aligned(worker, address, bytes, true).map_err(on_lane)?;
                    let order = (atomic.order, atomic.scope);
                    self.note_global(warp, lane, place, bytes, Access::Atomic, order, worker)?;
                    worker.global.update(place, bytes, update).map_err(on_lane)?
                }
            };
            if let Some(to) = atomic.to {
                warp.set(to, lane, old);
            }
            Ok(())
        })
    }

    // Barriers and warp operations

    fn barrier(&mut self, warp: &mut Warp, at: usize, active: u32, barrier: &Barrier) -> Outcome<Next> {
        let Group { pc, mask, .. } = warp.groups[at];
        if active == 0 {
            return Ok(Next::Step);
        }
        let uniform = |row: u16| {
            let values = &warp.registers.w[usize::from(row)];
            let value = values[active.trailing_zeros() as usize];
            (lanes_where(active, |lane| values[lane] == value) == active).then_some(value)
        };
        let (Some(id), Some(count)) = (uniform(barrier.id), barrier.count.map_or(Some(0), uniform)) else {
            let what = "lanes of a warp at different barriers";
            return Err(
                Trouble::new(Kind::DivergentBarrier, what, BARRIER_RIGHT).lane(active.trailing_zeros())
            );
        };
        if id > 15 || barrier.count.is_some() && (count == 0 || count % LANES as u32 != 0) {
            let what = format!("barrier {id} of {count} threads");
            let right = "barriers 0 to 15, of a multiple of 32 threads";
            return Err(Trouble::new(Kind::Barrier, what, right).lane(active.trailing_zeros()));
        }
        let count = barrier.count.map(|_| count);
        if active != mask && barrier.aligned {
            let what = format!("a barrier under a condition that lanes {:#010x} fail", mask & !active);
            return Err(
                Trouble::new(Kind::DivergentBarrier, what, BARRIER_RIGHT).lane(active.trailing_zeros())
            );
        }
        if barrier.aligned && active != warp.live {
            warp.groups[at].wait = Wait::Lanes(warp.live, Meeting::Barrier);
            return Ok(Next::Regroup);
        }
        if active != mask {
            // The lanes whose guard is false go on.
            warp.groups[at].mask = active;
            warp.groups.push(Group { pc: pc + 1, mask: mask & !active, wait: Wait::Nothing });
        }
        let at_block = self.rank(warp.index) * BARRIERS as u32 + id;
        let state = &mut self.barriers[at_block as usize];
        // Counts are in whole warps, lanes that have exited or never were included.
        let arriving = match barrier.count {
            Some(_) if barrier.aligned => LANES as u32,
            _ => active.count_ones(),
        };
        if state.arrived > 0 && state.count != count {
            let say = |count: Option<u32>| {
                count.map_or("the whole block".to_owned(), |count| format!("{count} threads"))
            };
            let what = format!("barrier {id} for {}, where others wait for {}", say(count), say(state.count));
            return Err(Trouble::new(Kind::Barrier, what, "one count for all that use a barrier together")
                .lane(active.trailing_zeros()));
        }
        if let Some(count) = count
            && (state.arrived + arriving > count || count > self.each.next_multiple_of(LANES as u32))
        {
            let what = format!("barrier {id} of {count} threads, reached by {}", state.arrived + arriving);
            let right =
                "a count that is the number of threads that use the barrier, and no one arriving twice";
            return Err(Trouble::new(Kind::Barrier, what, right).lane(active.trailing_zeros()));
        }
        state.arrived += arriving;
        state.count = count;
        match barrier.kind {
            BarrierKind::Arrive => {
                if let Some(clocks) = &mut self.clocks {
                    state.views.extend(clocks.release(&[(warp.index, active)]));
                }
                warp.groups[at].pc = pc + 1;
                warp.yielded = true;
                return Ok(Next::Regroup);
            }
            BarrierKind::Wait => {}
            BarrierKind::Count { of, .. } | BarrierKind::All { of, .. } | BarrierKind::Any { of, .. } => {
                state.trues += (warp.registers.p[usize::from(of)] & active).count_ones();
            }
        }
        state.waiting.push((warp.index, active, pc));
        warp.groups[at].wait = Wait::Barrier(at_block as u16);
        Ok(Next::Regroup)
    }

    fn sync_warp(&mut self, warp: &mut Warp, at: usize, active: u32, row: u16) -> Outcome<Next> {
        let Group { pc, mask, .. } = warp.groups[at];
        if active == 0 {
            return Ok(Next::Step);
        }
        let masks = warp.registers.w[usize::from(row)];
        let named = masks[active.trailing_zeros() as usize];
        let same = lanes_where(active, |lane| masks[lane] == named);
        check_named(same, named)?;
        if same == active && active == mask && named & warp.live == active {
            if let Some(clocks) = &mut self.clocks {
                clocks.meet(&[(warp.index, active)], &[]);
            }
            return Ok(Next::Step);
        }
        // The lanes with this mask wait here, in a group of their own; the others look again.
        warp.groups[at] = Group { pc, mask: same, wait: Wait::Warp(named) };
        if active != same {
            warp.groups.push(Group { pc, mask: active & !same, wait: Wait::Nothing });
        }
        if active != mask {
            warp.groups.push(Group { pc: pc + 1, mask: mask & !active, wait: Wait::Nothing });
        }
        Ok(Next::Regroup)
    }

    /// Lets the lanes of a `__syncwarp` go once all of them wait, at whatever instruction.
    fn release_syncwarps(&mut self, warp: &mut Warp) {
        let Some(named) = warp.groups.iter().find_map(|group| match group.wait {
            Wait::Warp(named) => {
                let there = warp.groups.iter().filter(|other| other.wait == group.wait);
                let there = there.fold(0, |lanes, group| lanes | group.mask);
                (named & warp.live & !there == 0).then_some(named)
            }
            _ => None,
        }) else {
            return;
        };
        for group in &mut warp.groups {
            if group.wait == Wait::Warp(named) {
                *group = Group { pc: group.pc + 1, mask: group.mask, wait: Wait::Nothing };
            }
        }
        if let Some(clocks) = &mut self.clocks {
            clocks.meet(&[(warp.index, named & warp.live)], &[]);
        }
        warp.merge();
        self.release_syncwarps(warp);
    }

    fn collective(
        &mut self,
        warp: &mut Warp,
        at: usize,
        active: u32,
        collective: &Collective,
    ) -> Outcome<Next> {
        let Group { pc, mask, .. } = warp.groups[at];
        if active == 0 {
            return Ok(Next::Step);
        }
        let masks = warp.registers.w[usize::from(collective.mask)];
        let mut done = 0;
        let mut rest = active;
        let mut waits = 0;
        while rest != 0 {
            let named = masks[rest.trailing_zeros() as usize];
            let lanes = lanes_where(rest, |lane| masks[lane] == named);
            rest &= !lanes;
            check_named(lanes, named)?;
            if named & warp.live & !lanes != 0 {
                let other = active & named & !lanes;
                if other != 0 {
                    let what = format!(
                        "lanes {lanes:#010x} name the mask {named:#010x}, lanes {other:#010x} another"
                    );
                    let right = "one mask, the same in every lane it names";
                    return Err(Trouble::new(Kind::Mask, what, right).lane(lanes.trailing_zeros()));
                }
                waits |= named & warp.live;
                continue;
            }
            collect(&mut warp.registers, collective, lanes)?;
            done |= lanes;
        }
        if waits == 0 {
            return Ok(Next::Step);
        }
        let waiting = active & !done;
        warp.groups[at] = Group { pc, mask: waiting, wait: Wait::Lanes(waits, Meeting::Collective) };
        if mask != waiting {
            warp.groups.push(Group { pc: pc + 1, mask: mask & !waiting, wait: Wait::Nothing });
        }
        Ok(Next::Regroup)
    }

    // Asynchronous copies

    fn begin_copy(
        &mut self,
        warp: &mut Warp,
        active: u32,
        copy: &AsyncCopy,
        worker: &mut Worker,
    ) -> Outcome<()> {
        let bytes = copy.bytes as usize;
        let mut pending = PendingCopy {
            number: warp.copied,
            lanes: active,
            pc: warp.pc,
            bytes,
            to: [0; LANES],
            from: [None; LANES],
            source_bytes: [0; LANES],
            group: warp.committed,
        };
        try_each(active, |lane| {
            let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
            let to = warp.address(copy.to, lane);
            let offset = self.locate_own(warp, to, bytes as u64, bytes as u64, true).map_err(on_lane)?;
            let from = warp.address(copy.from, lane);
            if !from.is_multiple_of(bytes as u64) {
                return Err(on_lane(misaligned("global", from, bytes as u64)));
            }
            let read = match (copy.source_bytes, copy.ignore) {
                (Some(row), _) => warp.registers.w[usize::from(row)][lane] as usize,
                (_, Some(row)) if warp.registers.p[usize::from(row)] >> lane & 1 != 0 => 0,
                _ => bytes,
            };
            if read > bytes {
                let what = format!("cp.async of {bytes} bytes told to read {read}");
                return Err(on_lane(Trouble::new(
                    Kind::Trap,
                    what,
                    "a source size of at most the copy's size",
                )));
            }
            // Hardware may translate the address whatever the size: it must point to memory even to
            // read nothing.
            let place = worker.global.locate(from, read.max(1) as u64, false).map_err(|mut trouble| {
                if read == 0 {
                    trouble.right =
                        "a source pointer that stays inside a buffer, even where 0 bytes are read".into();
                }
                on_lane(trouble)
            })?;
            if read > 0 {
                self.note_global_copy(warp, lane, place, read as u64, Access::Read, worker)?;
            }
            self.hopper.keep_mbarriers(offset, bytes).map_err(on_lane)?;
            let (shared, who) = self.shared_by(warp, lane);
            shared.expect(offset, bytes, &who)?;
            pending.to[lane] = offset as u32;
            pending.from[lane] = Some(place);
            pending.source_bytes[lane] = read as u8;
            Ok(())
        })?;
        warp.copies.push_back(pending);
        warp.copied += 1;
        Ok(())
    }

    /// Ends the copies of all but each lane's last `groups` groups.
    fn wait_copies(&mut self, warp: &mut Warp, active: u32, groups: u32, worker: &mut Worker) -> Outcome<()> {
        let committed = warp.committed;
        // A copy is waited for if its group is committed and is not among the last ones.
        self.end_copies(warp, worker, |lane, group, _| {
            active >> lane & 1 != 0 && group < committed[lane].saturating_sub(groups)
        })
    }

    /// Ends the copies that are chosen by lane, group and number: the data is there, as if the lane
    /// had just written it.
    pub fn end_copies(
        &mut self,
        warp: &mut Warp,
        worker: &mut Worker,
        chosen: impl Fn(usize, u32, u64) -> bool,
    ) -> Outcome<()> {
        let mut copies = std::mem::take(&mut warp.copies);
        for copy in &mut copies {
            let lanes = lanes_where(copy.lanes, |lane| chosen(lane, copy.group[lane], copy.number));
            copy.lanes &= !lanes;
            try_each(lanes, |lane| {
                let read = usize::from(copy.source_bytes[lane]);
                let mut data = [0; 16];
                if let Some(from) = copy.from[lane].filter(|_| read > 0) {
                    for (i, chunk) in data[..read].chunks_mut(4).enumerate() {
                        let bytes = chunk.len();
                        let word = if bytes == 4 {
                            worker.global.load((from.0, from.1 + 4 * i as u64), 4)
                        } else {
                            let mut word = [0; 4];
                            worker.global.read((from.0, from.1 + 4 * i as u64), &mut word[..bytes]);
                            Ok(u64::from(u32::from_le_bytes(word)))
                        };
                        let word =
                            word.map_err(|trouble| trouble.lane(lane as u32).at(warp.index, copy.pc))?;
                        chunk.copy_from_slice(&(word as u32).to_le_bytes()[..bytes]);
                    }
                }
                let (shared, who) = self.shared_by(warp, lane);
                shared.arrive(copy.to[lane] as usize, &data[..copy.bytes], &Who { pc: copy.pc, ..who })
            })?;
        }
        copies.retain(|copy| copy.lanes != 0);
        warp.copies = copies;
        Ok(())
    }

    // Matrices

    fn matrix(&mut self, warp: &mut Warp, active: u32, matrix: &Matrix) -> Outcome<()> {
        whole_warp(active, if matrix.load { "ldmatrix" } else { "stmatrix" })?;
        for (i, &row) in matrix.regs.iter().enumerate() {
            let mut rows = [0; 8];
            for (j, offset) in rows.iter_mut().enumerate() {
                let lane = i * 8 + j;
                let address = match Self::resolve(Space::Generic, warp.address(matrix.address, lane)) {
                    (Space::Shared, address) => address,
                    _ => warp.address(matrix.address, lane),
                };
                let located = self.locate_own(warp, address, 16, 16, !matrix.load);
                *offset = located.map_err(|trouble| trouble.lane(lane as u32))?;
            }
            // Each lane is charged with the four bytes it gets, or would get if it were not
            // transposed.
            for lane in 0..LANES {
                let at = rows[lane / 4] + lane % 4 * 4;
                let access = if matrix.load { Access::Read } else { Access::Write };
                self.note_shared(warp, lane, at, 4, access, Order::Weak)?;
            }
            for lane in 0..LANES {
                let (t, g) = (lane % 4 * 2, lane / 4);
                let places = if matrix.transposed {
                    [rows[t] + g * 2, rows[t + 1] + g * 2]
                } else {
                    [rows[g] + t * 2, rows[g] + t * 2 + 2]
                };
                let word = &mut warp.registers.w[usize::from(row)][lane];
                if matrix.load {
                    *word =
                        self.shared.load(places[0], 2) as u32 | (self.shared.load(places[1], 2) as u32) << 16;
                } else {
                    self.shared.store(places[0], 2, u64::from(*word & 0xffff));
                    self.shared.store(places[1], 2, u64::from(*word >> 16));
                }
            }
        }
        Ok(())
    }
}

/// The lanes of a mask for which a test holds.
pub(super) fn lanes_where(lanes: u32, test: impl Fn(usize) -> bool) -> u32 {
    let mut found = 0;
    each(lanes, |lane| found |= u32::from(test(lane)) << lane);
    found
}

/// A lane must be in the mask it names.
fn check_named(lanes: u32, named: u32) -> Outcome<()> {
    let outside = lanes & !named;
    if outside == 0 {
        return Ok(());
    }
    let what =
        format!("lanes {outside:#010x} execute a warp operation whose mask {named:#010x} does not name them");
    let right = "a mask that names exactly the lanes that get here";
    Err(Trouble::new(Kind::Mask, what, right).lane(outside.trailing_zeros()))
}

/// How an access synchronises.
fn synchronise(access: Access, order: Order, scope: Scope) -> Synchronise {
    Synchronise {
        reads: access != Access::Write,
        writes: access != Access::Read,
        acquires: matches!(order, Order::Acquire | Order::Both),
        releases: matches!(order, Order::Release | Order::Both),
        scope,
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// The place of an access to global memory, whose address is a multiple of its size.
fn aligned(worker: &mut Worker, address: u64, bytes: u64, write: bool) -> Outcome<(usize, u64)> {
    let place = worker.global.locate(address, bytes, write)?;
    if address.is_multiple_of(bytes) { Ok(place) } else { Err(misaligned("global", address, bytes)) }
}

/// The value that an atomic writes.
fn combine(kind: AtomicKind, bytes: u64, old: u64, value: u64, new: u64) -> u64 {
    let signed = |x: u64| extend(x, bytes as usize, true) as i64;
    match kind {
        AtomicKind::Add => old.wrapping_add(value),
        AtomicKind::Min => old.min(value),
        AtomicKind::Max => old.max(value),
        AtomicKind::MinSigned => signed(old).min(signed(value)) as u64,
        AtomicKind::MaxSigned => signed(old).max(signed(value)) as u64,
        AtomicKind::Increment => {
            if old >= value {
                0
            } else {
                old + 1
            }
        }
        AtomicKind::Decrement => {
            if old == 0 || old > value {
                value
            } else {
                old - 1
            }
        }
        AtomicKind::And => old & value,
        AtomicKind::Or => old | value,
        AtomicKind::Xor => old ^ value,
        AtomicKind::Exchange => value,
        AtomicKind::CompareExchange => {
            if old == value {
                new
            } else {
                old
            }
        }
    }
}

/// A warp operation among the lanes of one mask; all of them are here.
fn collect(registers: &mut Registers, collective: &Collective, lanes: u32) -> Outcome<()> {
    let values = |registers: &Registers, (file, row): Reg| -> [u64; LANES] {
        match file {
            File::D => registers.d[usize::from(row)],
            _ => registers.w[usize::from(row)].map(u64::from),
        }
    };
    match collective.kind {
        CollectiveKind::Shuffle { mode, to, valid, from, lane: selector, bounds } => {
            let from = registers.w[usize::from(from)];
            let selector = registers.w[usize::from(selector)];
            let bounds = registers.w[usize::from(bounds)];
            let mut trouble = None;
            each(lanes, |lane| {
                let (segment, clamp) = (bounds[lane] >> 8 & 31, bounds[lane] & 31);
                let here = lane as u32;
                let b = selector[lane] & 31;
                let highest = here & segment | clamp & !segment;
                let lowest = here & segment;
                let (source, inside) = match mode {
                    Shuffle::Up => (here.wrapping_sub(b), here as i32 - b as i32 >= highest as i32),
                    Shuffle::Down => (here + b, here + b <= highest),
                    Shuffle::Butterfly => (here ^ b, here ^ b <= highest),
                    Shuffle::Index => (lowest | b & !segment, (lowest | b & !segment) <= highest),
                };
                let source = if inside { source } else { here };
                if lanes >> source & 1 == 0 {
                    trouble = Some((here, source));
                    return;
                }
                registers.w[usize::from(to)][lane] = from[source as usize];
                if let Some(valid) = valid {
                    let row = &mut registers.p[usize::from(valid)];
                    *row = *row & !(1 << here) | u32::from(inside) << here;
                }
            });
            if let Some((lane, source)) = trouble {
                let what = format!(
                    "a shuffle reads lane {source}, which is not in the mask {lanes:#010x} or has exited"
                );
                return Err(
                    Trouble::new(Kind::Mask, what, "a mask that names every lane read from").lane(lane)
                );
            }
        }
        CollectiveKind::Vote { vote, to, of } => {
            let ballot = registers.p[usize::from(of)] & lanes;
            let result = match vote {
                Vote::All => ballot == lanes,
                Vote::Any => ballot != 0,
                Vote::Uniform => ballot == lanes || ballot == 0,
                Vote::Ballot => {
                    each(lanes, |lane| registers.w[usize::from(to)][lane] = ballot);
                    return Ok(());
                }
            };
            let row = &mut registers.p[usize::from(to)];
            *row = if result { *row | lanes } else { *row & !lanes };
        }
        CollectiveKind::MatchAny { to, of } => {
            let of = values(registers, of);
            each(lanes, |lane| {
                registers.w[usize::from(to)][lane] = lanes_where(lanes, |other| of[other] == of[lane]);
            });
        }
        CollectiveKind::MatchAll { to, all, of } => {
            let of = values(registers, of);
            let first = of[lanes.trailing_zeros() as usize % LANES];
            let same = lanes_where(lanes, |lane| of[lane] == first) == lanes;
            each(lanes, |lane| registers.w[usize::from(to)][lane] = if same { lanes } else { 0 });
            if let Some(all) = all {
                let row = &mut registers.p[usize::from(all)];
                *row = if same { *row | lanes } else { *row & !lanes };
            }
        }
        CollectiveKind::Reduce { how, to, of } => {
            let of = registers.w[usize::from(of)];
            let mut result = None;
            each(lanes, |lane| {
                let value = u64::from(of[lane]);
                result = Some(result.map_or(value, |so_far| combine(how, 4, so_far, value, 0)));
            });
            each(lanes, |lane| registers.w[usize::from(to)][lane] = result.unwrap_or(0) as u32);
        }
        CollectiveKind::Elect { to, chosen } => {
            let leader = lanes.trailing_zeros();
            let row = &mut registers.p[usize::from(chosen)];
            *row = *row & !lanes | 1 << (leader % 32);
            if let Some(to) = to {
                each(lanes, |lane| registers.w[usize::from(to)][lane] = leader);
            }
        }
    }
    Ok(())
}
