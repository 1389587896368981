//! A GPU for machines without one: runs the PTX that NVRTC emitted for our kernels, and finds what
//! a GPU hides.
//!
//! *In* comes PTX text ([`Module::load`]), global memory ([`Memory`]) and a launch ([`Launch`]);
//! *out* come the bytes that the kernel wrote, or a [`Finding`]: a race, a missing barrier, a read
//! of shared memory that nothing wrote, an access out of bounds, a wait that never ends, with the
//! kernel, the block, the thread and the line of CUDA source.
//!
//! It promises:
//!
//! - An operation that is not interpreted exactly is refused by name when the text is loaded, never
//!   approximated. (`.approx` operations and `mma` are exact in what they promise; hardware differs
//!   within their tolerance.)
//! - No PTX text and no launch makes it panic or reach memory that is not its own.
//! - The same launch gives the same bytes on every run, schedule and number of threads, unless the
//!   kernel itself depends on order; what depends on order is a finding where it is a race, and
//!   shows as different bytes under different [`Schedule`]s where it is legal (slots taken from an
//!   atomic counter).
//! - Asynchronous copies take the worst timing that the rules allow: the target is poisoned when
//!   the copy is issued and filled when something waits for it.
//!
//! The README of this crate says what it checks, what it interprets, and what it cannot tell of a
//! GPU.
//!
//! In processing order: [`parse`] reads text to statements, [`decode`] resolves names and
//! operations to a [`program`] (with [`alu`] and [`float`] the table of arithmetic, [`tensor`] and
//! [`hopper`] the units for matrices and bulk copies), [`exec`] runs warps on registers, [`shared`]
//! and [`memory`], in the order that [`schedule`] chooses, while [`race`] watches; [`finding`] is
//! what goes wrong.

mod alu;
mod cluster;
mod decode;
mod exec;
mod finding;
mod float;
mod hopper;
mod launch;
mod memory;
mod parse;
mod program;
mod race;
mod schedule;
mod shared;
mod tensor;
mod tensor_map;

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use alu::Registers;
use exec::{At, Block, Launched, Turn, Worker};
use finding::Trouble;
use memory::Global;
use program::{Kernel, Program};
use race::{Conflict, GlobalRaces};

pub use finding::{Finding, Kind, LoadError, Site, SourceLine};
pub use launch::{Arg, Launch};
pub use memory::{Memory, MemoryError};
pub use schedule::Schedule;
pub use tensor_map::{MapError, Swizzle, TensorMap};

/// PTX text, decoded once and run any number of times.
#[derive(Debug)]
pub struct Module {
    id: u64,
    program: Program,
}

/// How to run, and what to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The order of what may happen in any order.
    pub schedule: Schedule,
    /// Checks in addition to those that always take place (bounds, alignment, masks, barriers,
    /// deadlock).
    pub checks: Checks,
    /// Lane-instructions after which the launch is given up.
    pub instruction_budget: u64,
    /// Blocks run on this many cores, where nothing in the kernel depends on their order.
    pub threads: usize,
}

impl Default for Options {
    /// Forward, everything checked, all cores, and a budget of some minutes.
    fn default() -> Options {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Options {
            schedule: Schedule::Forward,
            checks: Checks::ALL,
            instruction_budget: 20_000_000_000,
            threads,
        }
    }
}

/// The checks that cost time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checks {
    /// Races, and use of what an asynchronous operation still owns.
    pub races: bool,
    /// Reads of memory that nothing has written.
    pub uninitialised: bool,
}

impl Checks {
    /// All of them.
    pub const ALL: Checks = Checks { races: true, uninitialised: true };
    /// None of them: for speed.
    pub const NONE: Checks = Checks { races: false, uninitialised: false };
}

/// Work of a launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions, times the lanes that executed them.
    pub instructions: u64,
    /// Instructions that warps executed.
    pub warp_instructions: u64,
    /// Blocks that ran.
    pub blocks: u64,
}

/// A kernel as a launch sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Bytes of each parameter.
    pub params: Vec<u32>,
    /// Static shared memory in bytes.
    pub shared_bytes: u32,
    /// The most threads a block may have, where `__launch_bounds__` says.
    pub max_threads: Option<u32>,
    /// Bytes of local memory per thread: arrays and spills of the PTX, not of the machine code.
    pub local_bytes: u32,
}

impl Module {
    /// Parses and decodes. `source` is the text of the CUDA file that the kernels are in, for
    /// findings to quote.
    pub fn load(ptx: &str, source: Option<&str>) -> Result<Module, LoadError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let program = decode::decode(&parse::parse(ptx)?, source)?;
        Ok(Module { id: NEXT.fetch_add(1, Relaxed), program })
    }

    /// The names of the kernels, in order.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.program.kernels.iter().map(|kernel| kernel.name.as_str())
    }

    /// Parameters and limits of a kernel.
    pub fn signature(&self, kernel: &str) -> Option<Signature> {
        let kernel = self.program.kernels.iter().find(|candidate| candidate.name == kernel)?;
        Some(Signature {
            params: kernel.params.iter().map(|param| param.bytes).collect(),
            shared_bytes: kernel.shared_bytes,
            max_threads: kernel.max_threads,
            local_bytes: kernel.local_bytes,
        })
    }
}

/// Lane-instructions after which a block pauses for others that it may be waiting for.
const BLOCK_TURN: u64 = 1 << 25;
/// Blocks that may have started and not ended at once, per worker.
const RESIDENT: usize = 256;

/// Runs a launch to its end, or to the first finding.
pub fn run(
    module: &Module,
    launch: &Launch,
    memory: &mut Memory,
    options: &Options,
) -> Result<Stats, Finding> {
    let kernel = module.program.kernels.iter().find(|kernel| kernel.name == launch.kernel);
    let kernel = kernel.ok_or_else(|| {
        let names: Vec<&str> = module.kernels().collect();
        let right = format!("one of {}", names.join(", "));
        refuse(launch, Kind::Arguments, "the module has no such kernel".into(), right)
    })?;
    check_shape(&module.program, kernel, launch)?;
    let params = marshal(kernel, launch)?;
    let variables = memory.module(module.id, |memory| {
        let make = |variable: &program::ModuleVariable| {
            let address = memory.alloc(variable.bytes);
            // Inside the allocation just made.
            let _ = memory.write(address, &variable.initial);
            let _ = memory.set_read_only(address, variable.constant);
            address
        };
        module.program.variables.iter().map(make).collect()
    });
    let mut launched = Launched {
        kernel,
        grid: launch.grid,
        block: launch.block,
        params,
        variables,
        dynamic_bytes: launch.shared_bytes,
        checks: options.checks,
        schedule: options.schedule,
        template: Registers::default(),
    };
    launched.fill_template();
    Grid::new(&launched, memory, options).run(&module.program)
}

/// A launch under way: blocks handed out to workers until none are left or one has a finding.
struct Grid<'a> {
    launched: &'a Launched<'a>,
    memory: &'a Memory,
    options: &'a Options,
    /// Clusters of blocks; most kernels have one block in each.
    clusters: u64,
    next: AtomicU64,
    spent: AtomicU64,
    stop: AtomicBool,
    /// The finding of the block that came first, and its place.
    found: Mutex<Option<(u64, At, Box<Trouble>)>>,
}

impl<'a> Grid<'a> {
    fn new(launched: &'a Launched<'a>, memory: &'a Memory, options: &'a Options) -> Grid<'a> {
        Grid {
            launched,
            memory,
            options,
            clusters: launched.grid.iter().map(|&extent| u64::from(extent)).product::<u64>()
                / u64::from(launched.kernel.cluster),
            next: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            found: Mutex::new(None),
        }
    }

    fn run(self, program: &Program) -> Result<Stats, Finding> {
        let needs = self.launched.kernel.needs;
        // Blocks that order each other need one clock for all, so one worker.
        let alone = needs.alone || needs.ordering && self.options.checks.races;
        let workers = if alone { 1 } else { (self.options.threads.max(1) as u64).min(self.clusters) };
        let results: Vec<(Stats, Option<GlobalRaces>)> = if workers == 1 {
            vec![self.work(false)]
        } else {
            std::thread::scope(|scope| {
                let handles: Vec<_> = (0..workers).map(|_| scope.spawn(|| self.work(true))).collect();
                // A worker that panics is a bug here; its panic goes on.
                handles
                    .into_iter()
                    .map(|handle| handle.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
                    .collect()
            })
        };
        let found = self.found.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((_, at, trouble)) = found {
            return Err(describe(program, self.launched, &at, *trouble));
        }
        let mut total = Stats::default();
        let mut races = Vec::new();
        for (stats, worker_races) in results {
            total.instructions += stats.instructions;
            total.warp_instructions += stats.warp_instructions;
            total.blocks += stats.blocks;
            races.extend(worker_races);
        }
        if let Some((first, second)) = GlobalRaces::across(&mut races) {
            return Err(race_between_blocks(program, self.launched, first, second));
        }
        Ok(total)
    }

    fn work(&self, shared: bool) -> (Stats, Option<GlobalRaces>) {
        let needs = self.launched.kernel.needs;
        let races = self.options.checks.races.then(|| {
            let lengths = (0..self.memory.count()).map(|allocation| self.memory.length(allocation));
            GlobalRaces::new(lengths, needs.global_grain, !needs.ordering)
        });
        let global = Global::new(self.memory, shared, self.options.checks.uninitialised);
        let mut worker = Worker { global, races, locations: HashMap::new(), stats: Stats::default() };
        let mut resident: VecDeque<(u64, Block)> = VecDeque::new();
        while !self.stop.load(Relaxed) {
            // A paused block may wait for one that has not started: new ones go first, as long as
            // there is room.
            let fresh = if resident.len() < RESIDENT { self.take_block() } else { None };
            let Some((position, mut block)) = fresh.or_else(|| resident.pop_front()) else { break };
            let before = worker.stats.instructions;
            let mut fuel = BLOCK_TURN;
            let turn = block.run(&mut worker, &mut fuel);
            let used = worker.stats.instructions - before;
            let spent = self.spent.fetch_add(used, Relaxed) + used;
            match turn {
                Err((at, trouble)) => self.report(position, at, trouble),
                Ok(_) if spent > self.options.instruction_budget => {
                    let what = format!("more than {} instructions", self.options.instruction_budget);
                    let right = "a loop that ends; or a larger budget, if the launch is as large as that";
                    let at = At { block: self.block_at(position), warp: 0, pc: 0 };
                    self.report(position, at, Trouble::new(Kind::Budget, what, right));
                }
                Ok(Turn::Done) => worker.stats.blocks += u64::from(self.launched.kernel.cluster),
                Ok(Turn::Paused) => resident.push_back((position, block)),
            }
        }
        (worker.stats, worker.races)
    }

    fn take_block(&self) -> Option<(u64, Block<'a>)> {
        let position = self.next.fetch_add(1, Relaxed);
        (position < self.clusters).then(|| (position, Block::new(self.launched, self.block_at(position))))
    }

    /// The first block of a cluster.
    fn block_at(&self, position: u64) -> u32 {
        self.options.schedule.block(position, self.clusters) as u32 * self.launched.kernel.cluster
    }

    fn report(&self, position: u64, at: At, trouble: Box<Trouble>) {
        self.stop.store(true, Relaxed);
        let mut found = self.found.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if found.as_ref().is_none_or(|(other, ..)| position < *other) {
            *found = Some((position, at, trouble));
        }
    }
}

fn refuse(launch: &Launch, kind: Kind, what: String, right: String) -> Finding {
    let kernel = launch.kernel.as_str().into();
    Finding {
        kind,
        kernel,
        block: None,
        thread: None,
        site: None,
        what: what.into(),
        other: None,
        right: right.into(),
    }
}

/// The limits of the hardware, and those that the kernel was compiled with.
fn check_shape(program: &Program, kernel: &Kernel, launch: &Launch) -> Result<(), Finding> {
    let wrong = |what: String, right: &str| Err(refuse(launch, Kind::Shape, what, right.into()));
    let Launch { grid, block, .. } = launch;
    if grid.contains(&0) || block.contains(&0) {
        return wrong(format!("grid {grid:?} of blocks {block:?}"), "at least one thread");
    }
    if grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 {
        return wrong(format!("grid {grid:?}"), "at most 2147483647 x 65535 x 65535 blocks");
    }
    if grid.iter().map(|&extent| u64::from(extent)).product::<u64>() > u64::from(u32::MAX) {
        return wrong(format!("grid {grid:?}"), "fewer blocks: no interpreter gets to the end of that");
    }
    let threads = block.iter().map(|&extent| u64::from(extent)).product::<u64>();
    if threads > 1024 || block[2] > 64 {
        return wrong(format!("blocks {block:?} of {threads} threads"), "at most 1024 threads, 64 in z");
    }
    if let Some(most) = kernel.max_threads
        && threads > u64::from(most)
    {
        return wrong(
            format!("blocks of {threads} threads; the kernel allows {most}"),
            "the block of __launch_bounds__",
        );
    }
    if let Some(required) = kernel.required_block
        && required != *block
    {
        return wrong(
            format!("blocks {block:?}; the kernel requires {required:?}"),
            "the block the kernel was compiled for",
        );
    }
    let cluster = kernel.cluster;
    if !grid[0].is_multiple_of(cluster) {
        return wrong(
            format!("{} blocks along x in clusters of {cluster}", grid[0]),
            "a multiple of the blocks of a cluster",
        );
    }
    if cluster > 1 && (threads % 32 != 0 || threads * u64::from(cluster) > 2048) {
        let what = format!("clusters of {cluster} blocks of {threads} threads");
        return wrong(what, "whole warps, and 2048 threads of a cluster: no more are interpreted");
    }
    let shared = u64::from(kernel.shared_bytes) + u64::from(launch.shared_bytes);
    if shared > u64::from(program.shared_limit) {
        let limit = program.shared_limit;
        return wrong(
            format!("{shared} bytes of shared memory, where a block may have {limit}"),
            "smaller tiles or fewer stages",
        );
    }
    Ok(())
}

/// The parameter space: the arguments where the kernel expects them.
fn marshal(kernel: &Kernel, launch: &Launch) -> Result<Vec<u8>, Finding> {
    let wrong = |what: String, right: String| Err(refuse(launch, Kind::Arguments, what, right));
    if kernel.params.len() != launch.args.len() {
        let (given, taken) = (launch.args.len(), kernel.params.len());
        return wrong(format!("{given} arguments"), format!("the {taken} that the kernel declares"));
    }
    let mut params = vec![0; kernel.param_bytes as usize];
    for (i, (param, arg)) in kernel.params.iter().zip(&launch.args).enumerate() {
        let bytes = arg.bytes();
        if bytes.len() != param.bytes as usize {
            let what = format!("argument {i} ({}) of {} bytes", param.name, bytes.len());
            return wrong(what, format!("{} bytes, as the kernel declares", param.bytes));
        }
        params[param.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    Ok(params)
}

/// A trouble with its place.
fn describe(program: &Program, launched: &Launched, at: &At, trouble: Trouble) -> Finding {
    // Warps of a cluster are numbered through its blocks.
    let warp = trouble.warp.unwrap_or(at.warp);
    let each = launched.threads().div_ceil(32).max(1);
    let (block, warp) = (at.block + warp / each, warp % each);
    let thread = trouble.lane.map(|lane| position(warp * 32 + lane, launched.block));
    let pc = trouble.pc.unwrap_or(at.pc);
    let placed = !matches!(trouble.kind, Kind::Budget);
    Finding {
        kind: trouble.kind,
        kernel: launched.kernel.name.as_str().into(),
        block: Some(position(block, launched.grid)),
        thread,
        site: placed.then(|| Box::new(program.site(launched.kernel, pc))),
        what: trouble.what.into(),
        other: trouble.other.map(|pc| Box::new(program.site(launched.kernel, pc))),
        right: trouble.right.into(),
    }
}

fn race_between_blocks(program: &Program, launched: &Launched, first: Conflict, second: Conflict) -> Finding {
    let threads = launched.threads();
    // Told from the write's side, or from the first's where neither or both are.
    let (one, other) = if first.earlier == race::Access::Write { (first, second) } else { (second, first) };
    let lane = one.by.party % 32;
    let trouble = other.trouble(one.earlier, "global memory", one.by.block, threads, lane);
    let at = At { block: one.by.block, warp: one.by.party / 32, pc: one.by.pc };
    describe(program, launched, &at, *trouble)
}

/// The coordinates of a number, x running fastest.
fn position(index: u32, [x, y, _]: [u32; 3]) -> [u32; 3] {
    [index % x, index / x % y, index / x / y]
}
