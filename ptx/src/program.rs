//! A decoded kernel: rows of registers, operations, places. The result of
//! [`decode`](super::decode), which [`exec`](super::exec) runs.

use std::collections::HashMap;
use std::ops::Range;

use super::alu::{File, Run, Slots};
use super::finding::{Site, SourceLine};
use super::hopper;
use super::tensor;

/// Where shared memory starts in its own address space: the hardware keeps the first kilobyte.
pub(super) const SHARED_BASE: u32 = 1024;

/// A register: kind and row.
pub(super) type Reg = (File, u16);

/// A kernel ready to run.
#[derive(Debug)]
pub(super) struct Kernel {
    pub name: String,
    pub params: Vec<ParamSlot>,
    pub param_bytes: u32,
    pub max_threads: Option<u32>,
    /// Blocks of a processor at once that it was compiled for.
    pub resident: Option<u32>,
    pub required_block: Option<[u32; 3]>,
    /// Blocks of a cluster, which are adjacent along x.
    pub cluster: u32,
    pub code: Vec<Instr>,
    pub lines: Vec<Line>,
    /// Rows of each kind of register.
    pub rows: [usize; 3],
    pub constants: Vec<(Reg, Value)>,
    /// Bytes of static shared memory, from [`SHARED_BASE`].
    pub shared_bytes: u32,
    /// Where dynamic shared memory starts.
    pub dynamic_at: u32,
    pub local_bytes: u32,
    pub needs: Needs,
    /// Rows of registers of `wgmma`s that other instructions access, by instruction.
    pub touches: HashMap<u32, Vec<u16>>,
}

/// Features of a kernel that cost something to provide.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    /// Bytes of the narrowest access to shared and to global memory: the grain of race detection.
    pub shared_grain: u64,
    pub global_grain: u64,
    /// Blocks may order each other: atomics, fences or strong accesses to global memory.
    pub ordering: bool,
    /// Something that is one step only where one worker runs.
    pub alone: bool,
    /// Units that work asynchronously on shared memory: bulk copies, `wgmma`, `mbarrier`.
    pub asynchronous: bool,
    /// Whether a proxy fence shows those units what threads wrote to global memory.
    pub shows_global: bool,
}

/// A kernel parameter in the parameter space.
#[derive(Debug)]
pub(super) struct ParamSlot {
    pub name: String,
    pub offset: u32,
    pub bytes: u32,
}

/// The value of a constant row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Value {
    Bits(u64),
    /// An address of the block's shared memory.
    Shared(u64),
    Special(Special),
    /// Bytes of the parameters; sign-extended where asked.
    Param {
        offset: u32,
        bytes: u8,
        signed: bool,
    },
    /// The address of a module variable, plus a constant.
    Variable {
        index: u32,
        offset: i64,
    },
}

/// Registers that the hardware provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Lane,
    Warp,
    Warps,
    Mask(LaneMask),
    DynamicShared,
    /// The block's number in its cluster, and how many there are; along all of x, the same of
    /// clusters.
    Rank,
    Blocks,
    Cluster,
    Clusters,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum LaneMask {
    Equal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// An instruction: an operation for the active lanes whose guard allows it.
#[derive(Debug)]
pub(super) struct Instr {
    /// Row of the guard, if it has one.
    pub guard: Option<u16>,
    /// Whether the guard must be false.
    pub negated: bool,
    /// Whether it accesses registers that a `wgmma` uses; which, [`Kernel::touches`] says.
    pub touches: bool,
    pub op: Op,
}

#[derive(Debug)]
pub(super) enum Op {
    /// Arithmetic and moves.
    Alu(Run, Slots),
    Jump(u32),
    Exit,
    Trap,
    /// Nothing to do here: hints, and what has no effect on one device.
    Nothing,
    /// Takes registers up to `count` a thread, or gives them up down to `count`.
    Registers {
        count: u32,
        takes: bool,
    },
    /// Lets others run first.
    Yield,
    Load(Box<Transfer>),
    Store(Box<Transfer>),
    Atomic(Box<Atomic>),
    FloatAtomic(Box<str>),
    Fence {
        scope: Scope,
    },
    /// `fence.proxy.async`, by the memory that it is for.
    ProxyFence {
        shared: bool,
        global: bool,
    },
    Barrier(Box<Barrier>),
    WarpSync {
        mask: u16,
    },
    Collective(Box<Collective>),
    ActiveMask {
        to: u16,
    },
    Copy(Box<AsyncCopy>),
    CopyCommit,
    /// Groups that may stay under way.
    CopyWait(u32),
    Matrix(Box<tensor::Matrix>),
    Multiply(Box<tensor::Multiply>),
    Hopper(Box<hopper::Op>),
}

impl Op {
    /// Whether all lanes of a warp must execute it together (`.aligned`), apart from barriers.
    pub fn is_aligned(&self) -> bool {
        match self {
            Op::Matrix(_) | Op::Multiply(_) | Op::Registers { .. } => true,
            Op::Hopper(op) => op.is_aligned(),
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// How far an ordering reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    Block,
    Device,
}

/// The ordering of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Weak,
    /// Volatile and relaxed: no race with its like, but no order either.
    Relaxed,
    Acquire,
    Release,
    Both,
}

/// A load or a store.
#[derive(Debug)]
pub(super) struct Transfer {
    pub space: Space,
    pub order: Order,
    pub scope: Scope,
    /// Bytes of one element, and whether it is extended by its sign.
    pub bytes: u8,
    pub signed: bool,
    /// `.nc`: the memory must not be written while the kernel runs.
    pub constant: bool,
    pub base: Reg,
    pub offset: i64,
    /// One register an element; `None` for `_`.
    pub regs: Vec<Option<Reg>>,
    /// The bytes that a load uses; others are read, and nobody looks at them.
    pub used: Range<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AtomicKind {
    Add,
    Min,
    Max,
    MinSigned,
    MaxSigned,
    Increment,
    Decrement,
    And,
    Or,
    Xor,
    Exchange,
    CompareExchange,
}

/// `atom` and `red` on integers.
#[derive(Debug)]
pub(super) struct Atomic {
    pub kind: AtomicKind,
    pub space: Space,
    pub order: Order,
    pub scope: Scope,
    pub bytes: u8,
    pub base: Reg,
    pub offset: i64,
    pub to: Option<Reg>,
    pub value: Reg,
    pub new: Reg,
}

/// `bar` and `barrier`.
#[derive(Debug)]
pub(super) struct Barrier {
    /// Rows of its number and of the threads that take part; `None` for the whole block.
    pub id: u16,
    pub count: Option<u16>,
    pub kind: BarrierKind,
    /// Whether whole warps must execute it together.
    pub aligned: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BarrierKind {
    Wait,
    Arrive,
    /// Count, conjunction, disjunction of a predicate.
    Count {
        to: u16,
        of: u16,
    },
    All {
        to: u16,
        of: u16,
    },
    Any {
        to: u16,
        of: u16,
    },
}

/// Operations that lanes of a warp do together, each naming all of them in its mask.
#[derive(Debug)]
pub(super) struct Collective {
    pub kind: CollectiveKind,
    pub mask: u16,
}

#[derive(Debug)]
pub(super) enum CollectiveKind {
    Shuffle { mode: Shuffle, to: u16, valid: Option<u16>, from: u16, lane: u16, bounds: u16 },
    Vote { vote: Vote, to: u16, of: u16 },
    MatchAny { to: u16, of: Reg },
    MatchAll { to: u16, all: Option<u16>, of: Reg },
    Reduce { how: AtomicKind, to: u16, of: u16 },
    Elect { to: Option<u16>, chosen: u16 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

/// `cp.async`
#[derive(Debug)]
pub(super) struct AsyncCopy {
    pub to: Address,
    pub from: Address,
    pub bytes: u32,
    /// How many bytes are read; the rest is zeros.
    pub source_bytes: Option<u16>,
    /// Where true, nothing is read.
    pub ignore: Option<u16>,
}

/// A register plus a constant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub base: Reg,
    pub offset: i64,
}

/// Where an instruction comes from.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    pub ptx: u32,
    /// (file, line), innermost first.
    pub source: Vec<(u32, u32)>,
}

/// A module variable in global or constant memory.
#[derive(Debug)]
pub(super) struct ModuleVariable {
    pub bytes: u64,
    pub initial: Vec<u8>,
    pub constant: bool,
}

/// A decoded file.
#[derive(Debug)]
pub(super) struct Program {
    pub kernels: Vec<Kernel>,
    pub variables: Vec<ModuleVariable>,
    /// The most shared memory that a block may have, static and dynamic together.
    pub shared_limit: u32,
    pub files: HashMap<u32, String>,
    /// The file that the kernels are written in, and its lines, where they were given.
    pub source: Option<(u32, Vec<String>)>,
}

impl Program {
    /// Where the instruction at `pc` comes from.
    pub fn site(&self, kernel: &Kernel, pc: u32) -> Site {
        let line = kernel.lines.get(pc as usize).cloned().unwrap_or_default();
        let source = line.source.iter().map(|&(file, number)| {
            let text = self.source.as_ref().filter(|(main, _)| *main == file);
            let text = text.and_then(|(_, lines)| lines.get((number as usize).checked_sub(1)?)).cloned();
            let file =
                self.files.get(&file).map_or("?", |name| name.rsplit(['/', '\\']).next().unwrap_or(name));
            SourceLine { file: file.to_owned(), line: number, text }
        });
        Site { ptx_line: line.ptx, source: source.collect() }
    }
}
