//! Hopper's asynchronous units: `mbarrier`, bulk and tensor copies (TMA), and `wgmma`.
//!
//! All of them take the worst timing that the rules allow. A bulk load fills its poisoned target
//! when nothing else in the block can run; a bulk store reads when its issuer waits for the reads
//! and writes when it waits for the writes, or at the end; a `wgmma` reads shared memory when the
//! first warp of its group waits for it. In between the memory belongs to the unit, and a thread
//! that touches it is found out.
//!
//! Accesses of a unit are charged to an *agent*, a party of the block's clocks that is no thread:
//! one for each `mbarrier` (its tick is the phase that the copies complete) and one for each
//! warpgroup (its tick counts its `wgmma`s). A thread has seen an agent's tick once it, or someone
//! it synchronised with, has waited.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use super::alu::{File, LANES};
use super::decode::Operands;
use super::exec::{Core, Wait, Warp, Worker, each, try_each};
use super::finding::{Kind, LoadError, Outcome, Trouble};
use super::memory::{PARAM_WINDOW, SHARED_WINDOW, WINDOW};
use super::parse::Operand;
use super::program::Address;
use super::race::{Access, Stamp, View};
use super::schedule::Chooser;
use super::tensor::{Element, whole_warp};
use super::tensor_map::{MapError, Swizzle, TensorMap};

/// `mbarrier`s that a block, or a cluster, may have; their agents come first.
pub(super) const MBARRIERS: usize = 64;

/// Agents of `blocks` blocks: one for each mbarrier and each warpgroup.
pub(super) fn agents(blocks: u32) -> usize {
    MBARRIERS + 8 * blocks as usize
}

/// An operation of this family.
#[derive(Debug)]
pub(super) enum Op {
    Init {
        at: Address,
        count: u16,
    },
    Invalidate {
        at: Address,
    },
    Arrive {
        at: Address,
        state: Option<u16>,
        count: Option<u16>,
        bytes: Option<u16>,
        /// Whether it may be at an mbarrier of another block of the cluster.
        remote: bool,
        /// Whether it gives away what a release fence before it covered, and nothing of its own.
        relaxed: bool,
    },
    Expect {
        at: Address,
        bytes: u16,
    },
    Test {
        at: Address,
        to: u16,
        phase: Phase,
        blocks: bool,
        /// Whether what other blocks of the cluster did before they arrived counts, too.
        cluster: bool,
        /// Whether nothing counts before the next acquire fence.
        relaxed: bool,
    },
    /// An arrival that the lane's copies so far make when they have ended.
    CopyArrive {
        at: Address,
        counted: bool,
    },
    /// A flat copy into shared memory, or out of it where there is no mbarrier.
    Bulk {
        to: Address,
        from: Address,
        bytes: u16,
        mbarrier: Option<Address>,
    },
    /// A box of a tensor into shared memory, or out of it where there is no mbarrier.
    Tensor {
        shared: Address,
        map: Address,
        coordinates: Vec<u16>,
        mbarrier: Option<Address>,
        /// The blocks of the cluster that it comes to, a bit each; its own where there is none.
        multicast: Option<u16>,
    },
    BulkCommit,
    BulkWait {
        groups: u32,
        reads: bool,
    },
    InitFence,
    /// `fence.release.sync_restrict::shared::cta.cluster`: what a thread has done goes out with its
    /// next relaxed arrival.
    ReleaseFence,
    /// `fence.acquire.sync_restrict::shared::cluster.cluster`: what relaxed waits of a thread saw
    /// counts.
    AcquireFence,
    WgFence,
    WgCommit,
    WgWait {
        groups: u32,
    },
    Wgmma(Wgmma),
    /// `mapa`: the same place in another block's shared memory.
    Map {
        to: u16,
        at: u16,
        rank: u16,
    },
    /// `barrier.cluster.arrive`, and `.wait`.
    ClusterArrive {
        releases: bool,
    },
    ClusterWait,
}

impl Op {
    /// Whether all lanes of a warp must execute it together.
    pub fn is_aligned(&self) -> bool {
        matches!(
            self,
            Op::WgFence
                | Op::WgCommit
                | Op::WgWait { .. }
                | Op::Wgmma(_)
                | Op::ClusterArrive { .. }
                | Op::ClusterWait
        )
    }
}

/// How a test names a phase.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// By what an arrival gave.
    State(u16),
    Parity(u16),
}

/// `wgmma.mma_async`: 64 rows, `columns` columns, 32 bytes deep, sums in f32.
#[derive(Debug)]
pub(super) struct Wgmma {
    element: Element,
    columns: usize,
    pub d: Vec<u16>,
    a: Factor,
    b: u16,
    /// Predicate: whether d is added to.
    accumulate: u16,
    negate: bool,
    a_transposed: bool,
    b_transposed: bool,
}

#[derive(Debug)]
enum Factor {
    Shared(u16),
    Registers(Vec<u16>),
}

impl Wgmma {
    /// Terms of a sum: those in 32 bytes.
    fn depth(&self) -> usize {
        32 / self.element.bytes()
    }

    /// The 32-bit registers that the unit works on while it is under way.
    pub fn registers(&self) -> impl Iterator<Item = u16> + '_ {
        let a = match &self.a {
            Factor::Shared(_) => &[][..],
            Factor::Registers(rows) => &rows[..],
        };
        self.d.iter().chain(a).copied()
    }

    /// The same, with what each is for.
    fn roles(&self) -> impl Iterator<Item = (u16, Role)> + '_ {
        let sums = self.d.len();
        self.registers().enumerate().map(move |(i, row)| match i.checked_sub(sums) {
            None => (row, Role::Sum(i, self.columns)),
            Some(i) => (row, Role::Factor(i)),
        })
    }
}

/// The operation that an opcode names, if it is one of this family.
pub(super) fn decode<'a>(
    decoder: &mut impl Operands<'a>,
    opcode: &str,
    operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    let parts: Vec<&str> = opcode.split('.').collect();
    match &parts[..] {
        ["mbarrier", rest @ ..] => decode_mbarrier(decoder, rest, operands),
        ["cp", "async", "mbarrier", "arrive", rest @ ..] => {
            let (counted, rest) = match rest {
                ["noinc", rest @ ..] => (true, rest),
                rest => (false, rest),
            };
            let (["shared" | "shared::cta", "b64"], [at]) = (rest, operands) else { return Ok(None) };
            Ok(Some(Op::CopyArrive { at: decoder.address_of(at)?, counted }))
        }
        ["cp", "async", "bulk", rest @ ..] => decode_bulk(decoder, rest, operands),
        ["fence", "mbarrier_init", ..] => Ok(Some(Op::InitFence)),
        ["fence", "release", ..] => Ok(Some(Op::ReleaseFence)),
        ["fence", "acquire", ..] => Ok(Some(Op::AcquireFence)),
        ["mapa", "shared::cluster", "u32"] => {
            let [to, at, rank] = operands else { return Ok(None) };
            let to = decoder.result(to, File::W)?;
            Ok(Some(Op::Map { to, at: decoder.row(at, File::W)?, rank: decoder.row(rank, File::W)? }))
        }
        ["barrier", "cluster", "arrive", order @ .., "aligned"] => Ok(match (order, operands) {
            ([] | ["release"], []) => Some(Op::ClusterArrive { releases: true }),
            (["relaxed"], []) => Some(Op::ClusterArrive { releases: false }),
            _ => None,
        }),
        ["barrier", "cluster", "wait", order @ .., "aligned"] => {
            Ok((matches!(order, [] | ["acquire"]) && operands.is_empty()).then_some(Op::ClusterWait))
        }
        ["wgmma", "fence", "sync", "aligned"] => Ok(operands.is_empty().then_some(Op::WgFence)),
        ["wgmma", "commit_group", "sync", "aligned"] => Ok(operands.is_empty().then_some(Op::WgCommit)),
        ["wgmma", "wait_group", "sync", "aligned"] => {
            let [groups] = operands else { return Ok(None) };
            Ok(Some(Op::WgWait { groups: groups_of(decoder, groups)? }))
        }
        ["wgmma", "mma_async", "sync", "aligned", shape, "f32", first, second] if first == second => {
            decode_wgmma(decoder, shape, first, operands)
        }
        _ => Ok(None),
    }
}

fn groups_of<'a>(decoder: &impl Operands<'a>, operand: &Operand<'a>) -> Result<u32, LoadError> {
    u32::try_from(decoder.number(operand)?).map_err(|_| decoder.fault("a negative number of groups"))
}

fn decode_mbarrier<'a>(
    decoder: &mut impl Operands<'a>,
    parts: &[&str],
    operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    let [parts @ .., "b64"] = parts else { return Ok(None) };
    // The rest after the modifiers that say nothing new inside one block.
    let plain: Vec<&str> = parts
        .iter()
        .copied()
        .filter(|part| {
            let orders = matches!(*part, "release" | "acquire" | "relaxed" | "cta" | "cluster");
            !orders && !matches!(*part, "shared" | "shared::cta" | "shared::cluster")
        })
        .collect();
    if !parts.iter().any(|part| matches!(*part, "shared" | "shared::cta" | "shared::cluster")) {
        return Ok(None);
    }
    let cluster = parts.contains(&"cluster");
    let remote = parts.contains(&"shared::cluster");
    let relaxed = parts.contains(&"relaxed");
    if remote && !(cluster && matches!((&plain[..], operands), (["arrive"], [Operand::Sink, ..]))) {
        let right = "at another block's mbarrier there are arrivals of the cluster's scope alone, into `_`";
        return Err(decoder.fault(right));
    }
    let state = |decoder: &mut _, operand: &Operand<'a>| match operand {
        Operand::Sink => Ok(None),
        operand => Operands::result(decoder, operand, File::D).map(Some),
    };
    Ok(Some(match (&plain[..], operands) {
        (["init"], [at, count]) => {
            Op::Init { at: decoder.address_of(at)?, count: decoder.row(count, File::W)? }
        }
        (["inval"], [at]) => Op::Invalidate { at: decoder.address_of(at)? },
        (["arrive"], [to, at, count @ ..]) if count.len() <= 1 => {
            let state = state(decoder, to)?;
            let at = decoder.address_of(at)?;
            let count = count.first().map(|count| decoder.row(count, File::W)).transpose()?;
            Op::Arrive { at, state, count, bytes: None, remote, relaxed }
        }
        (["arrive", "expect_tx"], [to, at, bytes]) => {
            let state = state(decoder, to)?;
            let at = decoder.address_of(at)?;
            let bytes = Some(decoder.row(bytes, File::W)?);
            Op::Arrive { at, state, count: None, bytes, remote, relaxed }
        }
        (["expect_tx"], [at, bytes]) => {
            Op::Expect { at: decoder.address_of(at)?, bytes: decoder.row(bytes, File::W)? }
        }
        ([test @ ("test_wait" | "try_wait"), how @ ..], [to, at, phase, hint @ ..]) if hint.len() <= 1 => {
            let phase = match how {
                [] => Phase::State(decoder.row(phase, File::D)?),
                ["parity"] => Phase::Parity(decoder.row(phase, File::W)?),
                _ => return Ok(None),
            };
            let to = decoder.result(to, File::P)?;
            Op::Test { at: decoder.address_of(at)?, to, phase, blocks: *test == "try_wait", cluster, relaxed }
        }
        _ => return Ok(None),
    }))
}

fn decode_bulk<'a>(
    decoder: &mut impl Operands<'a>,
    parts: &[&str],
    operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    const COMPLETE: &str = "mbarrier::complete_tx::bytes";
    Ok(Some(match (parts, operands) {
        (["commit_group"], []) => Op::BulkCommit,
        (["wait_group"], [groups]) => Op::BulkWait { groups: groups_of(decoder, groups)?, reads: false },
        (["wait_group", "read"], [groups]) => {
            Op::BulkWait { groups: groups_of(decoder, groups)?, reads: true }
        }
        (["shared::cluster" | "shared::cta", "global", COMPLETE], [to, from, bytes, mbarrier]) => Op::Bulk {
            to: decoder.address_of(to)?,
            from: decoder.address_of(from)?,
            bytes: decoder.row(bytes, File::W)?,
            mbarrier: Some(decoder.address_of(mbarrier)?),
        },
        (["global", "shared::cta", "bulk_group"], [to, from, bytes]) => Op::Bulk {
            to: decoder.address_of(to)?,
            from: decoder.address_of(from)?,
            bytes: decoder.row(bytes, File::W)?,
            mbarrier: None,
        },
        (["tensor", rank, "shared::cluster" | "shared::cta", "global", COMPLETE], [to, from, mbarrier])
        | (
            ["tensor", rank, "shared::cluster" | "shared::cta", "global", "tile", COMPLETE],
            [to, from, mbarrier],
        ) => {
            let Some((map, coordinates)) = decode_box(decoder, rank, from)? else { return Ok(None) };
            let shared = decoder.address_of(to)?;
            let mbarrier = Some(decoder.address_of(mbarrier)?);
            Op::Tensor { shared, map, coordinates, mbarrier, multicast: None }
        }
        (
            ["tensor", rank, "shared::cluster", "global", COMPLETE, "multicast::cluster"],
            [to, from, mbarrier, blocks],
        ) => {
            let Some((map, coordinates)) = decode_box(decoder, rank, from)? else { return Ok(None) };
            let shared = decoder.address_of(to)?;
            let mbarrier = Some(decoder.address_of(mbarrier)?);
            let multicast = Some(decoder.row(blocks, File::W)?);
            Op::Tensor { shared, map, coordinates, mbarrier, multicast }
        }
        (["tensor", rank, "global", "shared::cta", "bulk_group"], [to, from])
        | (["tensor", rank, "global", "shared::cta", "tile", "bulk_group"], [to, from]) => {
            let Some((map, coordinates)) = decode_box(decoder, rank, to)? else { return Ok(None) };
            let shared = decoder.address_of(from)?;
            Op::Tensor { shared, map, coordinates, mbarrier: None, multicast: None }
        }
        _ => return Ok(None),
    }))
}

/// `[map, {coordinates}]`, as many as the rank says.
fn decode_box<'a>(
    decoder: &mut impl Operands<'a>,
    rank: &str,
    operand: &Operand<'a>,
) -> Result<Option<(Address, Vec<u16>)>, LoadError> {
    let Operand::Memory { base, coordinates } = operand else {
        return Err(decoder.fault("a tensor map with coordinates is needed"));
    };
    if rank.len() != 2 || !("1d"..="5d").contains(&rank) || rank != format!("{}d", coordinates.len()) {
        return Err(decoder.fault("as many coordinates as the tensor has dimensions are taken"));
    }
    let map = decoder.address_of(&Operand::Memory { base: base.clone(), coordinates: Vec::new() })?;
    let rows: Result<Vec<u16>, LoadError> =
        coordinates.iter().map(|coordinate| decoder.row(coordinate, File::W)).collect();
    Ok(Some((map, rows?)))
}

fn decode_wgmma<'a>(
    decoder: &mut impl Operands<'a>,
    shape: &str,
    kind: &str,
    operands: &[Operand<'a>],
) -> Result<Option<Op>, LoadError> {
    let element = match kind {
        "bf16" => Element::Brain,
        "f16" => Element::Half,
        "e4m3" => Element::Quarter,
        _ => return Ok(None),
    };
    let deep = if element == Element::Quarter { "k32" } else { "k16" };
    let columns = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix(deep));
    let columns = columns.and_then(|columns| columns.parse::<usize>().ok());
    let Some(columns) = columns.filter(|columns| columns % 8 == 0 && (8..=256).contains(columns)) else {
        return Ok(None);
    };
    let [d, a, b, accumulate, scales @ ..] = operands else {
        return Err(decoder.fault("at least four operands are taken"));
    };
    let in_registers = matches!(a, Operand::Vector(_));
    let numbers: Result<Vec<i64>, LoadError> = scales.iter().map(|scale| decoder.number(scale)).collect();
    let (sign, a_transposed, b_transposed) = match numbers?[..] {
        // Bytes are adjacent along the depth: nothing says otherwise.
        [scale_a @ (1 | -1), scale_b @ (1 | -1)] if element == Element::Quarter => (scale_a * scale_b, 0, 0),
        _ if element == Element::Quarter => return Err(decoder.fault("scales of 1 or -1 are taken")),
        [scale_a @ (1 | -1), scale_b @ (1 | -1), b @ (0 | 1)] if in_registers => (scale_a * scale_b, 0, b),
        [scale_a @ (1 | -1), scale_b @ (1 | -1), a @ (0 | 1), b @ (0 | 1)] if !in_registers => {
            (scale_a * scale_b, a, b)
        }
        _ => return Err(decoder.fault("scales of 1 or -1 and transpositions of 0 or 1 are taken")),
    };
    Ok(Some(Op::Wgmma(Wgmma {
        element,
        columns,
        d: decoder.words(d, columns / 2, true)?,
        a: match in_registers {
            true => Factor::Registers(decoder.words(a, 4, false)?),
            false => Factor::Shared(decoder.row(a, File::D)?),
        },
        b: decoder.row(b, File::D)?,
        accumulate: decoder.row(accumulate, File::P)?,
        negate: sign < 0,
        a_transposed: a_transposed == 1,
        b_transposed: b_transposed == 1,
    })))
}

/// An `mbarrier` object.
#[derive(Debug)]
struct Mbarrier {
    /// Arrivals that complete a phase, and those still missing in this one.
    expected: u32,
    pending: u32,
    /// Bytes still missing.
    bytes: i64,
    /// Phases completed.
    phase: u32,
    agent: u32,
    /// The party that made it, and whether a fence has shown it to the asynchronous units since.
    maker: u32,
    fenced: bool,
    /// The knowledge of those that arrived in this phase, and the same for completed phases, with
    /// the block of the cluster that each is of.
    arriving: Vec<(u32, Rc<View>)>,
    arrived: Vec<(u32, Rc<View>)>,
    /// By warp, the lanes that have looked at the last phase since it ended.
    looks: BTreeMap<u32, Look>,
}

/// Lanes of a warp that have found a phase over. A thread waits by a parity, which comes again with
/// the next phase but one: the next phase may end only when the thread has looked, by whatever
/// orders its look before the arrivals.
#[derive(Debug)]
struct Look {
    /// Phases completed then.
    phase: u32,
    /// Ticks of the lanes at their looks; 0 of those that did not look.
    ticks: [u32; LANES],
    /// Whether all lanes of the warp have executed an operation together since.
    together: bool,
    /// Warps and ticks of their lanes: all that one of them does from its tick on is ordered after
    /// these looks, without any knowledge of memory.
    behind: Vec<(u32, [u32; LANES])>,
}

impl Look {
    /// A lane whose look is before nothing that those who arrived know of.
    fn missed(&self, warp: u32, known: &dyn Fn(u32, u32) -> bool) -> Option<u32> {
        let party = |warp: u32, lane: usize| warp * LANES as u32 + lane as u32;
        let knows = |(warp, ticks): &(u32, [u32; LANES])| {
            ticks.iter().enumerate().any(|(lane, &tick)| known(party(*warp, lane), tick))
        };
        if self.behind.iter().any(knows) {
            return None;
        }
        (0..LANES).find(|&lane| !known(party(warp, lane), self.ticks[lane])).map(|lane| party(warp, lane))
    }
}

/// A bulk load under way, or an arrival that waits for copies.
#[derive(Debug)]
struct Coming {
    warp: u32,
    lane: u32,
    pc: u32,
    mbarrier: u32,
    what: What,
}

#[derive(Debug)]
enum What {
    /// Pieces of shared memory and where they come from; zeros where from nowhere.
    Data { pieces: Vec<Piece>, bytes: i64, swizzle: Option<Swizzle> },
    /// The copies of the lane up to a number.
    Copies { until: u64 },
}

/// A piece by its address in shared memory, in global memory (none outside a tensor), and its
/// bytes.
type Listed = (u64, Option<u64>, u64);

/// Bytes of shared memory and their place in global memory; none outside a tensor.
#[derive(Debug, Clone, Copy)]
struct Piece {
    offset: usize,
    place: Option<(usize, u64)>,
    bytes: usize,
}

/// A bulk store under way.
#[derive(Debug)]
struct Going {
    lane: u32,
    group: u32,
    pc: u32,
    /// Pieces of shared memory and where they go; nowhere outside the tensor.
    pieces: Vec<Piece>,
    /// The bytes read, once they were.
    data: Option<Vec<Vec<u8>>>,
}

/// The units' state for a block.
#[derive(Debug, Default)]
pub(super) struct State {
    mbarriers: BTreeMap<u32, Mbarrier>,
    agents: BTreeSet<u32>,
    coming: VecDeque<Coming>,
    groups: HashMap<u32, Warpgroup>,
    /// Where mbarriers are: from the first to the end of the last.
    span: (usize, usize),
    /// For each [`CHUNK`] of shared memory that a tensor copy has filled, the copy's instruction
    /// and swizzle. It holds while that instruction is the last to have written there.
    laid: Vec<Option<(u32, Swizzle)>>,
}

/// The units' state for a warp.
#[derive(Debug, Default)]
pub(super) struct WarpState {
    going: Vec<Going>,
    committed: HashMap<u32, u32>,
    /// `wgmma`s issued, waited for, and at the end of each committed group.
    issued: u64,
    done: u64,
    commits: Vec<u64>,
    /// Registers that a `wgmma` under way owns.
    owned: HashMap<u16, Owner>,
    /// Registers of `wgmma`s that were accessed since the last `wgmma.fence`, by the instruction
    /// that did.
    accessed: HashMap<u16, u32>,
    fenced: bool,
}

/// The `wgmma`s under way that work on a register, all as the first of them does.
#[derive(Debug)]
struct Owner {
    count: u32,
    pc: u32,
    role: Role,
}

/// A register's part in a `wgmma`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// One of the factors, by its place among the registers.
    Factor(usize),
    /// One of the sums, by its place; then the number of columns of the product.
    Sum(usize, usize),
}

/// Four warps that multiply together.
#[derive(Debug, Default)]
struct Warpgroup {
    /// The number of the first `wgmma` in the queue.
    first: u64,
    queue: VecDeque<Product>,
}

/// A `wgmma` of a warpgroup.
#[derive(Debug)]
struct Product {
    pc: u32,
    a: Option<u64>,
    b: u64,
    /// The warps that have issued it, and that have their result.
    issued: u8,
    taken: u8,
    /// The fragments and the predicate, by warp.
    parts: [Option<Part>; 4],
    /// Pieces of shared memory that it reads.
    reads: Vec<usize>,
    /// The factors, once read.
    read: Option<(Vec<f32>, Vec<f32>)>,
}

#[derive(Debug, Clone)]
struct Part {
    a: Vec<[u32; LANES]>,
    accumulate: bool,
}

/// Bytes that one descriptor step covers: the unit in which shared memory is read.
const CHUNK: usize = 16;

/// A matrix in shared memory, as a descriptor tells it.
#[derive(Debug, Clone, Copy)]
struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
}

impl Descriptor {
    fn new(bits: u64) -> Outcome<Descriptor> {
        let field = |from: u32| (bits >> from & 0x3fff) << 4;
        if bits >> 49 & 7 != 0 {
            let right = "tiles that start where their swizzle pattern does, and a base offset of 0";
            return Err(Trouble::new(Kind::Descriptor, "a matrix descriptor with a base offset", right));
        }
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        if swizzle != Swizzle::None && field(0) >> 7 & (swizzle.bytes() / 16 - 1) != 0 {
            let repeats = swizzle.bytes() * 8;
            let what =
                format!("a matrix at {:#x}, whose swizzle pattern repeats every {repeats} bytes", field(0));
            let right =
                format!("shared memory declared with __align__({repeats}), and whole groups of eight rows");
            return Err(Trouble::new(Kind::Descriptor, what, right));
        }
        Ok(Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// The address of the 16 bytes that hold element (`outer`, `depth`), of `each` bytes, and its
    /// neighbours: along the depth where the matrix is stored by rows of it, along the outer
    /// dimension where it is transposed.
    fn chunk(&self, outer: u64, depth: u64, each: u64, transposed: bool) -> u64 {
        let span = self.swizzle.bytes();
        let within = depth * each / 16;
        let linear = match (transposed, self.swizzle) {
            (false, Swizzle::None) => outer % 8 * 16 + outer / 8 * self.stride + within * self.leading,
            (false, _) => outer % 8 * span + outer / 8 * self.stride + within * 16,
            (true, Swizzle::None) => depth % 8 * 16 + outer / 8 * self.stride + depth / 8 * self.leading,
            (true, _) => {
                let wide = span / 16;
                depth % 8 * span
                    + depth / 8 * self.stride
                    + outer / 8 % wide * 16
                    + outer / 8 / wide * self.leading
            }
        };
        self.swizzle.apply(self.start + linear)
    }
}

impl State {
    /// Whether the phase of that parity is over.
    pub fn passed(&self, offset: u32, parity: u32) -> bool {
        self.mbarriers.get(&offset).is_none_or(|mbarrier| mbarrier.phase & 1 != parity)
    }

    /// Whether all warps of a warpgroup have issued a `wgmma`.
    pub fn issued(&self, group: u32, number: u64) -> bool {
        let Some(group) = self.groups.get(&group) else { return true };
        let at = number.checked_sub(group.first);
        at.is_none_or(|at| group.queue.get(at as usize).is_none_or(|product| product.issued == 15))
    }

    /// Why a wait for a phase does not end.
    pub fn why_stuck(&self, offset: u32, parity: u32) -> Box<Trouble> {
        let state = match self.mbarriers.get(&offset) {
            Some(Mbarrier { expected, pending, bytes, .. }) => {
                let arrived = expected - pending;
                format!("{arrived} of {expected} arrivals have come and {bytes} bytes are missing")
            }
            None => "it is not there any more".into(),
        };
        Trouble::new(
            Kind::Deadlock,
            format!("a wait for the phase of parity {parity} of an mbarrier never ends: {state}"),
            "as many arrivals as mbarrier.init was told, as many bytes as expect_tx was told, and the right parity",
        )
    }

    /// Why a wait for a `wgmma` does not end.
    pub fn why_unissued(&self, group: u32, number: u64) -> Box<Trouble> {
        let issued = self.groups.get(&group).and_then(|group| {
            group.queue.get((number - group.first.min(number)) as usize).map(|product| product.issued)
        });
        let issued = issued.unwrap_or(0).count_ones();
        let what = format!("a wgmma that {issued} of the 4 warps of its warpgroup have issued");
        Trouble::new(Kind::Deadlock, what, "all four warps of a warpgroup executing every wgmma")
    }

    /// Refuses a write of data over an mbarrier in use.
    pub fn keep_mbarriers(&self, offset: usize, bytes: usize) -> Outcome<()> {
        let (first, end) = self.span;
        if offset >= end || offset + bytes <= first {
            return Ok(());
        }
        let hit = |at: &u32| (*at as usize) < offset + bytes && offset < *at as usize + 8;
        let Some(at) = self.mbarriers.keys().find(|at| hit(at)) else { return Ok(()) };
        let what = format!("a write at offset {offset} of shared memory over an mbarrier in use at {at}");
        let right = "mbarrier.inval before its memory holds anything else, or other memory for the data";
        Err(Trouble::new(Kind::Mbarrier, what, right))
    }

    /// The tensor copy that filled a chunk with another swizzle than `swizzle`, if it was filled by
    /// one.
    fn laid_otherwise(&self, offset: usize, swizzle: Swizzle) -> Option<(u32, Swizzle)> {
        self.laid.get(offset / CHUNK).copied().flatten().filter(|(_, of)| *of != swizzle)
    }

    fn mbarrier(&mut self, offset: usize) -> Outcome<&mut Mbarrier> {
        self.mbarriers.get_mut(&(offset as u32)).ok_or_else(|| {
            let what = "an operation on memory that holds no mbarrier";
            Trouble::new(Kind::Mbarrier, what, "mbarrier.init first, and a barrier so that others see it")
        })
    }
}

impl Mbarrier {
    /// Counts arrivals and bytes; gives whether that completed the phase.
    fn count(&mut self, arrivals: u32, bytes: i64) -> Outcome<bool> {
        if arrivals > self.pending {
            let what = format!("{arrivals} arrivals at an mbarrier where {} are missing", self.pending);
            let right = "as many arrivals in a phase as mbarrier.init was told";
            return Err(Trouble::new(Kind::Mbarrier, what, right));
        }
        self.pending -= arrivals;
        self.bytes += bytes;
        if self.bytes.abs() >= 1 << 20 {
            let what = format!("an mbarrier that expects {} bytes", self.bytes);
            return Err(Trouble::new(Kind::Mbarrier, what, "less than a megabyte in one phase"));
        }
        let complete = self.pending == 0 && self.bytes == 0;
        if complete {
            let views = || self.arriving.iter().chain(&self.arrived);
            let known =
                |party: u32, tick: u32| tick == 0 || views().any(|(_, view)| view.has_seen(party, tick));
            let now = self.looks.iter().filter(|(_, look)| look.phase == self.phase);
            if let Some(thread) = now.filter_map(|(&warp, look)| look.missed(warp, &known)).next() {
                let what = format!(
                    "a phase of an mbarrier ends, and nothing orders that after thread {thread}'s wait for the one \
                     before: a thread that lags so far waits for a parity that has come again"
                );
                let right = "__syncwarp, or an arrival of that thread's own, between its wait and the arrivals that \
                             let the next phase end";
                return Err(Trouble::new(Kind::Mbarrier, what, right));
            }
            self.pending = self.expected;
            self.phase += 1;
            // Knowledge of earlier phases stays; one copy of equal knowledge is enough.
            for (rank, view) in std::mem::take(&mut self.arriving) {
                if !self.arrived.iter().any(|(of, known)| *of == rank && Rc::ptr_eq(known, &view)) {
                    self.arrived.push((rank, view));
                }
            }
        }
        Ok(complete)
    }
}

impl Core<'_> {
    /// Executes an operation; gives what the group waits for if it cannot go on.
    pub fn hopper(
        &mut self,
        warp: &mut Warp,
        active: u32,
        op: &Op,
        worker: &mut Worker,
    ) -> Outcome<Option<Wait>> {
        match op {
            Op::Init { at, count } => try_each(active, |lane| {
                let count = warp.registers.w[usize::from(*count)][lane];
                self.init(warp, lane, *at, count).map_err(|trouble| trouble.lane(lane as u32))
            })?,
            Op::Invalidate { at } => try_each(active, |lane| {
                let offset = self.locate_mbarrier(warp, lane, *at)?;
                self.hopper.mbarrier(offset).map_err(|trouble| trouble.lane(lane as u32))?;
                self.hopper.mbarriers.remove(&(offset as u32));
                Ok(())
            })?,
            Op::Arrive { at, state, count, bytes, remote, relaxed } => try_each(active, |lane| {
                let word = |row: Option<u16>| row.map(|row| warp.registers.w[usize::from(row)][lane]);
                let (arrivals, bytes) = (word(*count).unwrap_or(1), i64::from(word(*bytes).unwrap_or(0)));
                let phase = self.arrive(warp, lane, *at, (arrivals, bytes), (*remote, *relaxed))?;
                if let Some(state) = *state {
                    warp.set((File::D, state), lane, u64::from(phase));
                }
                Ok(())
            })?,
            Op::Expect { at, bytes } => try_each(active, |lane| {
                let bytes = i64::from(warp.registers.w[usize::from(*bytes)][lane]);
                self.arrive(warp, lane, *at, (0, bytes), (false, false)).map(|_| ())
            })?,
            Op::Test { at, to, phase, blocks, cluster, relaxed } => {
                return self.test(warp, active, *at, *to, *phase, (*blocks, *cluster, *relaxed));
            }
            Op::Map { to, at, rank } => self.map_address(warp, active, *to, *at, *rank)?,
            Op::ClusterArrive { releases } => {
                whole_warp(active, "barrier.cluster.arrive")?;
                self.arrive_cluster(warp, active, *releases)?;
            }
            Op::ClusterWait => {
                whole_warp(active, "barrier.cluster.wait")?;
                return self.wait_cluster(warp, active);
            }
            Op::CopyArrive { at, counted } => try_each(active, |lane| {
                let offset = self.locate_mbarrier(warp, lane, *at)?;
                let mbarrier = self.hopper.mbarrier(offset).map_err(|trouble| trouble.lane(lane as u32))?;
                if !counted {
                    mbarrier.pending += 1;
                }
                let what = What::Copies { until: warp.copied };
                let (warp, lane, pc) = (warp.index, lane as u32, warp.pc);
                self.hopper.coming.push_back(Coming { warp, lane, pc, mbarrier: offset as u32, what });
                Ok(())
            })?,
            Op::Bulk { to, from, bytes, mbarrier } => try_each(active, |lane| {
                let bytes = u64::from(warp.registers.w[usize::from(*bytes)][lane]);
                if bytes == 0 || !bytes.is_multiple_of(16) {
                    let what = format!("a bulk copy of {bytes} bytes");
                    let right = "a multiple of 16 bytes";
                    return Err(Trouble::new(Kind::Descriptor, what, right).lane(lane as u32));
                }
                let (shared, global) = if mbarrier.is_some() { (to, from) } else { (from, to) };
                let shared = shared_address(warp.address(*shared, lane));
                let global = warp.address(*global, lane);
                // Before the pieces are listed, so that there are no more of them than shared
                // memory has.
                self.locate_own(warp, shared, bytes, 16, mbarrier.is_some())
                    .map_err(|trouble| trouble.lane(lane as u32))?;
                let mbarrier = mbarrier.map(|at| shared_address(warp.address(at, lane)));
                let piece = |i: u64| (shared + 16 * i, Some(global.wrapping_add(16 * i)), 16);
                let pieces: Vec<_> = (0..bytes / 16).map(piece).collect();
                self.begin_bulk(warp, lane, (shared, bytes, 16), (&pieces, None), mbarrier, worker)
                    .map_err(|trouble| trouble.lane(lane as u32))
            })?,
            Op::Tensor { shared, map, coordinates, mbarrier, multicast } => try_each(active, |lane| {
                let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
                let at = coordinates.iter().map(|row| warp.registers.w[usize::from(*row)][lane] as i32);
                let at: Vec<i32> = at.collect();
                let map = self.tensor_map(warp.address(*map, lane), worker).map_err(on_lane)?;
                let shared = shared_address(warp.address(*shared, lane));
                let shared = self.own(warp, shared).map_err(on_lane)?;
                let mbarrier = mbarrier.map(|at| shared_address(warp.address(at, lane)));
                let own = self.rank(warp.index);
                let ranks = match multicast {
                    None => 1 << own,
                    Some(row) => warp.registers.w[usize::from(*row)][lane] & 0xffff,
                };
                if ranks == 0 || ranks >> self.blocks != 0 {
                    let what = format!("a copy to blocks {ranks:#b} of a cluster of {}", self.blocks);
                    let right = "a bit for each block that it comes to";
                    return Err(on_lane(Trouble::new(Kind::Descriptor, what, right)));
                }
                for rank in (0..self.blocks).filter(|rank| ranks >> rank & 1 != 0) {
                    if rank != own {
                        self.check_there(rank, "a copy to").map_err(on_lane)?;
                    }
                    let shared = if self.blocks > 1 { self.place_in(shared, rank) } else { shared };
                    let mbarrier = mbarrier.map(|at| if rank == own { at } else { self.place_in(at, rank) });
                    let pieces = map.pieces(shared, &at).map_err(|error| on_lane(descriptor(&error)))?;
                    let pieces = (&pieces[..], Some(map.swizzle));
                    self.begin_bulk(warp, lane, (shared, map.box_bytes(), 128), pieces, mbarrier, worker)
                        .map_err(on_lane)?;
                }
                Ok(())
            })?,
            Op::BulkCommit => {
                each(active, |lane| *warp.hopper.committed.entry(lane as u32).or_default() += 1)
            }
            Op::BulkWait { groups, reads } => self.wait_bulk(warp, active, *groups, *reads, worker)?,
            Op::InitFence => self.show_mbarriers(warp, active),
            Op::ReleaseFence => {
                if let Some(clocks) = &mut self.clocks {
                    each(active, |lane| clocks.release_fence(warp.index, lane as u32));
                }
            }
            Op::AcquireFence => {
                if let Some(clocks) = &mut self.clocks {
                    each(active, |lane| clocks.acquire_fence(warp.index, lane as u32));
                }
            }
            Op::WgFence => {
                whole_warp(active, "wgmma.fence")?;
                self.executed_together(warp.index);
                warp.hopper.accessed.clear();
                warp.hopper.fenced = true;
            }
            Op::WgCommit => {
                whole_warp(active, "wgmma.commit_group")?;
                warp.hopper.commits.push(warp.hopper.issued);
            }
            Op::WgWait { groups } => return self.wait_products(warp, active, *groups),
            Op::Wgmma(wgmma) => self.issue(warp, active, wgmma)?,
        }
        Ok(None)
    }

    // mbarriers

    fn locate_mbarrier(&self, warp: &Warp, lane: usize, at: Address) -> Outcome<usize> {
        let address = shared_address(warp.address(at, lane));
        self.locate_own(warp, address, 8, 8, true).map_err(|trouble| trouble.lane(lane as u32))
    }

    fn init(&mut self, warp: &Warp, lane: usize, at: Address, count: u32) -> Outcome<()> {
        let offset = self.locate_mbarrier(warp, lane, at)?;
        if count == 0 || count >= 1 << 20 {
            let what = format!("an mbarrier for {count} arrivals");
            return Err(Trouble::new(Kind::Mbarrier, what, "from 1 to 1048575"));
        }
        if self.hopper.mbarriers.contains_key(&(offset as u32)) {
            let what = "mbarrier.init where an mbarrier is in use";
            return Err(Trouble::new(Kind::Mbarrier, what, "mbarrier.inval first"));
        }
        let free = (0..MBARRIERS as u32).find(|agent| !self.hopper.agents.contains(agent));
        let Some(agent) = free else {
            let what = format!("more than {MBARRIERS} mbarriers in a block");
            return Err(Trouble::new(Kind::Mbarrier, what, "fewer: no more are interpreted"));
        };
        // An agent is never used again, so that its ticks mean one mbarrier.
        self.hopper.agents.insert(agent);
        let (shared, who) = self.shared_by(warp, lane);
        shared.note_write(offset, 8, Access::Write, &who)?;
        let maker = who.thread();
        let mbarrier = Mbarrier {
            expected: count,
            pending: count,
            bytes: 0,
            phase: 0,
            agent,
            maker,
            fenced: false,
            arriving: Vec::new(),
            arrived: Vec::new(),
            looks: BTreeMap::new(),
        };
        self.hopper.mbarriers.insert(offset as u32, mbarrier);
        let (first, end) = self.hopper.span;
        self.hopper.span = (if end == 0 { offset } else { first.min(offset) }, end.max(offset + 8));
        Ok(())
    }

    /// `fence.mbarrier_init`, or a proxy fence: the units see the mbarriers that these lanes made.
    pub fn show_mbarriers(&mut self, warp: &Warp, active: u32) {
        for mbarrier in self.hopper.mbarriers.values_mut() {
            if mbarrier.maker / LANES as u32 == warp.index
                && active >> (mbarrier.maker % LANES as u32) & 1 != 0
            {
                mbarrier.fenced = true;
            }
        }
    }

    /// The ticks of a warp's lanes.
    fn ticks(&self, warp: u32) -> Option<[u32; LANES]> {
        let clocks = self.clocks.as_ref()?;
        Some(std::array::from_fn(|lane| clocks.tick(warp * LANES as u32 + lane as u32)))
    }

    /// All lanes of a warp have executed an operation that they execute together only: what any of
    /// them does from here on is ordered after all their looks.
    fn executed_together(&mut self, warp: u32) {
        let Some(ticks) = self.ticks(warp) else { return };
        for mbarrier in self.hopper.mbarriers.values_mut() {
            let Some(look) = mbarrier.looks.get_mut(&warp).filter(|look| !look.together) else { continue };
            look.together = true;
            look.behind.push((warp, ticks));
        }
    }

    /// A warp has waited for products that all warps of its warpgroup have issued: it is ordered
    /// after the looks that they had before.
    fn waited_for_products(&mut self, warp: u32) {
        let Some(ticks) = self.ticks(warp) else { return };
        let comrades = self.comrades(warp);
        for mbarrier in self.hopper.mbarriers.values_mut() {
            for (&other, look) in mbarrier.looks.range_mut(comrades.clone()) {
                if other != warp && look.together && look.behind.iter().all(|(known, _)| *known != warp) {
                    look.behind.push((warp, ticks));
                }
            }
        }
    }

    /// The use of an mbarrier by a thread: it must have seen the initialisation.
    fn use_mbarrier(&mut self, warp: &Warp, lane: usize, at: Address) -> Outcome<usize> {
        let offset = self.locate_mbarrier(warp, lane, at)?;
        self.use_mbarrier_at(warp, lane, offset)
    }

    fn use_mbarrier_at(&mut self, warp: &Warp, lane: usize, offset: usize) -> Outcome<usize> {
        self.hopper.mbarrier(offset).map_err(|trouble| trouble.lane(lane as u32))?;
        let (shared, who) = self.shared_by(warp, lane);
        shared.note_write(offset, 8, Access::Atomic, &who)?;
        Ok(offset)
    }

    fn arrive(
        &mut self,
        warp: &Warp,
        lane: usize,
        at: Address,
        (arrivals, bytes): (u32, i64),
        (remote, relaxed): (bool, bool),
    ) -> Outcome<u32> {
        let offset = if remote {
            let on_lane = |trouble: Box<Trouble>| trouble.lane(lane as u32);
            let address = shared_address(warp.address(at, lane));
            let offset = self.shared.locate(address, 8, 8, true).map_err(on_lane)?;
            self.check_there(self.shared.block_of(offset), "an arrival at").map_err(on_lane)?;
            self.use_mbarrier_at(warp, lane, offset)?
        } else {
            self.use_mbarrier(warp, lane, at)?
        };
        let rank = self.rank(warp.index);
        let view = match &mut self.clocks {
            Some(clocks) if arrivals > 0 && relaxed => clocks.released(warp.index, lane as u32),
            Some(clocks) if arrivals > 0 => clocks.release(&[(warp.index, 1 << lane)]),
            _ => None,
        };
        let mbarrier = self.hopper.mbarrier(offset)?;
        let phase = mbarrier.phase;
        mbarrier.arriving.extend(view.map(|view| (rank, view)));
        // The bytes are expected before the arrival counts, as one operation.
        mbarrier.bytes += bytes;
        mbarrier.count(arrivals, 0).map_err(|trouble| trouble.lane(lane as u32))?;
        Ok(phase)
    }

    fn test(
        &mut self,
        warp: &mut Warp,
        active: u32,
        at: Address,
        to: u16,
        phase: Phase,
        (blocks, cluster, relaxed): (bool, bool, bool),
    ) -> Outcome<Option<Wait>> {
        let rank = self.rank(warp.index);
        let (mut wait, mut some_passed) = (None, false);
        try_each(active, |lane| {
            let offset = self.use_mbarrier(warp, lane, at)? as u32;
            let parity = match phase {
                Phase::State(row) => warp.registers.d[usize::from(row)][lane] as u32 & 1,
                Phase::Parity(row) => warp.registers.w[usize::from(row)][lane],
            };
            if parity > 1 {
                let what = format!("a wait for a phase of parity {parity}");
                return Err(Trouble::new(Kind::Mbarrier, what, "0 or 1").lane(lane as u32));
            }
            let passed = self.hopper.passed(offset, parity);
            some_passed |= passed;
            if !passed {
                wait = Some(Wait::Phase { offset, parity });
            }
            warp.set((File::P, to), lane, u64::from(passed));
            Ok(())
        })?;
        // Lanes may wait for different phases: those whose phase is over must not wait for the
        // others'.
        if wait.is_some() && blocks && !some_passed {
            return Ok(wait);
        }
        warp.yielded |= wait.is_some();
        // A thread that passes has seen all that came before the phase ended.
        try_each(active & warp.registers.p[usize::from(to)], |lane| {
            let offset = self.locate_mbarrier(warp, lane, at)?;
            let mbarrier = self.hopper.mbarrier(offset)?;
            if let Some(clocks) = &mut self.clocks {
                for (_, view) in mbarrier.arrived.iter().filter(|(of, _)| cluster || *of == rank) {
                    clocks.see(warp.index, lane as u32, view, relaxed);
                }
                let copies = clocks.of_agent(mbarrier.agent, mbarrier.phase);
                clocks.see(warp.index, lane as u32, &copies, relaxed);
                let phase = mbarrier.phase;
                let new = || Look { phase, ticks: [0; LANES], together: false, behind: vec![] };
                let look = mbarrier.looks.entry(warp.index).or_insert_with(new);
                if look.phase != phase {
                    *look = new();
                }
                look.ticks[lane] = clocks.tick(warp.index * LANES as u32 + lane as u32);
            }
            Ok(())
        })?;
        Ok(None)
    }

    // Bulk copies

    fn tensor_map(&self, address: u64, worker: &mut Worker) -> Outcome<TensorMap> {
        let mut bytes = [0; TensorMap::BYTES];
        if !address.is_multiple_of(64) {
            let what = format!("a tensor map at {address:#x}");
            return Err(Trouble::new(Kind::Descriptor, what, "a tensor map aligned to 64 bytes"));
        }
        let param = address.wrapping_sub(PARAM_WINDOW);
        if param < WINDOW {
            let params =
                self.launch.params.get(param as usize..).and_then(|rest| rest.get(..TensorMap::BYTES));
            let Some(params) = params else {
                let what = "a tensor map outside the parameters";
                return Err(Trouble::new(
                    Kind::OutOfBounds,
                    what,
                    "a const __grid_constant__ parameter of 128 bytes",
                ));
            };
            bytes.copy_from_slice(params);
        } else {
            let place = worker.global.locate(address, TensorMap::BYTES as u64, false)?;
            worker.global.read(place, &mut bytes);
        }
        TensorMap::from_bytes(&bytes).map_err(|error| descriptor(&error))
    }

    /// Begins a bulk copy: into shared memory where an mbarrier counts its bytes, out of it
    /// otherwise. A box of a tensor has a swizzle.
    fn begin_bulk(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        (start, bytes, align): (u64, u64, u64),
        (pieces, swizzle): (&[Listed], Option<Swizzle>),
        mbarrier: Option<u64>,
        worker: &mut Worker,
    ) -> Outcome<()> {
        let load = mbarrier.is_some();
        self.shared.locate(start, bytes, align, load)?;
        let mut located = Vec::with_capacity(pieces.len());
        for &(shared, global, bytes) in pieces {
            let offset = self.shared.locate(shared, bytes, 1, load)?;
            let place = match global {
                Some(address) => {
                    let place = worker.global.locate(address, bytes, !load)?;
                    if align == 16 && address % 16 != 0 {
                        return Err(super::shared::misaligned("global", address, 16));
                    }
                    if load {
                        self.note_global_copy(warp, lane, place, bytes, Access::Read, worker)?;
                        self.check_global_shown(warp, lane, place, bytes, worker)?;
                    }
                    Some(place)
                }
                None => None,
            };
            located.push(Piece { offset, place, bytes: bytes as usize });
        }
        let Some(at) = mbarrier else {
            for &Piece { offset, bytes, .. } in &located {
                self.check_visible(warp, lane, offset, bytes, "a bulk store reads")?;
                if let Some(swizzle) = swizzle {
                    self.check_laid(lane, offset, swizzle, "a tensor copy stores")?;
                }
                self.shared.lend(offset, bytes, true);
            }
            let lane = lane as u32;
            let group = warp.hopper.committed.get(&lane).copied().unwrap_or(0);
            warp.hopper.going.push(Going { lane, group, pc: warp.pc, pieces: located, data: None });
            return Ok(());
        };
        let offset = self.shared.locate(at, 8, 8, true).map_err(|trouble| trouble.lane(lane as u32))?;
        let offset = self.use_mbarrier_at(warp, lane, offset)?;
        if !self.hopper.mbarrier(offset)?.fenced && self.clocks.is_some() {
            let what = "a bulk copy told of an mbarrier that the asynchronous units may not see yet";
            let right = "fence.mbarrier_init.release.cluster or fence.proxy.async after mbarrier.init";
            return Err(Trouble::new(Kind::MissingFence, what, right));
        }
        for &Piece { offset, bytes, .. } in &located {
            self.hopper.keep_mbarriers(offset, bytes)?;
            let (shared, who) = self.shared_by(warp, lane);
            shared.check_idle(offset, bytes, &who)?;
            self.check_shown(warp, lane, offset, bytes, "a bulk load overwrites")?;
            let (shared, who) = self.shared_by(warp, lane);
            shared.expect(offset, bytes, &who)?;
        }
        let what = What::Data { pieces: located, bytes: bytes as i64, swizzle };
        let (warp, lane, pc) = (warp.index, lane as u32, warp.pc);
        self.hopper.coming.push_back(Coming { warp, lane, pc, mbarrier: offset as u32, what });
        Ok(())
    }

    /// Ends one asynchronous load of the block; gives false where none is under way.
    pub fn complete_one(
        &mut self,
        warps: &mut [Warp],
        chooser: &mut Chooser,
        worker: &mut Worker,
    ) -> Outcome<bool> {
        let Some(at) = chooser.among(self.hopper.coming.len()) else { return Ok(false) };
        let Some(coming) = self.hopper.coming.remove(at) else { return Ok(false) };
        let place = |trouble: Box<Trouble>| match trouble.lane {
            None => trouble.lane(coming.lane).at(coming.warp, coming.pc),
            Some(_) => trouble.at(coming.warp, coming.pc),
        };
        match coming.what {
            What::Data { pieces, bytes, swizzle } => {
                let mbarrier = self.hopper.mbarrier(coming.mbarrier as usize).map_err(place)?;
                let (agent, tick) = (mbarrier.agent, mbarrier.phase + 1);
                let party = self.clocks.as_ref().map_or(0, |clocks| clocks.agent(agent));
                let by = Stamp { block: self.index, party, tick, pc: coming.pc };
                for Piece { offset, place: from, bytes } in pieces {
                    let mut data = vec![0; bytes];
                    if let Some(from) = from {
                        worker.global.read(from, &mut data);
                    }
                    self.shared.arrive_by_agent(offset, &data, by);
                    if self.clocks.is_some() {
                        let at = offset / CHUNK;
                        if at >= self.hopper.laid.len() {
                            self.hopper.laid.resize(at + 1, None);
                        }
                        self.hopper.laid[at] = swizzle.map(|swizzle| (coming.pc, swizzle));
                    }
                }
                self.hopper
                    .mbarrier(coming.mbarrier as usize)
                    .and_then(|m| m.count(0, -bytes))
                    .map_err(place)?;
            }
            What::Copies { until } => {
                let warp = &mut warps[coming.warp as usize];
                let lane = coming.lane as usize;
                self.end_copies(warp, worker, |other, _, number| other == lane && number < until)?;
                let view =
                    self.clocks.as_mut().and_then(|clocks| clocks.release(&[(coming.warp, 1 << lane)]));
                let rank = self.rank(coming.warp);
                let mbarrier = self.hopper.mbarrier(coming.mbarrier as usize).map_err(place)?;
                mbarrier.arriving.extend(view.map(|view| (rank, view)));
                mbarrier.count(1, 0).map_err(place)?;
            }
        }
        Ok(true)
    }

    fn wait_bulk(
        &mut self,
        warp: &mut Warp,
        active: u32,
        groups: u32,
        reads: bool,
        worker: &mut Worker,
    ) -> Outcome<()> {
        let mut going = std::mem::take(&mut warp.hopper.going);
        for store in &mut going {
            let committed = warp.hopper.committed.get(&store.lane).copied().unwrap_or(0);
            if active >> store.lane & 1 == 0 || store.group >= committed.saturating_sub(groups) {
                continue;
            }
            if store.data.is_none() {
                let mut data = Vec::new();
                for &Piece { offset, bytes, .. } in &store.pieces {
                    self.shared.lend(offset, bytes, false);
                    data.push(self.shared.get(offset, bytes).to_vec());
                    let (shared, who) = self.shared_by(warp, store.lane as usize);
                    shared.note_read(offset, bytes, &who)?;
                }
                store.data = Some(data);
            }
            if !reads {
                self.write_out(warp, store, worker)?;
            }
        }
        going.retain(|store| store.data.is_none() || !store.pieces.is_empty());
        warp.hopper.going = going;
        Ok(())
    }

    /// The writes of a bulk store, whose pieces are then gone.
    fn write_out(&mut self, warp: &Warp, store: &mut Going, worker: &mut Worker) -> Outcome<()> {
        let pieces = std::mem::take(&mut store.pieces);
        for (&Piece { place, bytes, .. }, data) in pieces.iter().zip(store.data.iter().flatten()) {
            if let Some(place) = place {
                let (lane, bytes) = (store.lane as usize, bytes as u64);
                let noted = self.note_global_copy(warp, lane, place, bytes, Access::Write, worker);
                noted.map_err(|trouble| trouble.at(warp.index, store.pc))?;
                worker.global.write(place, data);
            }
        }
        Ok(())
    }

    /// The end of the block: stores that were read but not waited for arrive; one that was not read
    /// is lost.
    pub fn finish(&mut self, warps: &mut [Warp], worker: &mut Worker) -> Outcome<()> {
        for warp in warps {
            for mut store in std::mem::take(&mut warp.hopper.going) {
                if store.data.is_none() {
                    let what = "the block ends while a bulk store still reads its shared memory";
                    let right =
                        "cp.async.bulk.commit_group and cp.async.bulk.wait_group.read 0 before the end";
                    let trouble = Trouble::new(Kind::InFlight, what, right).lane(store.lane);
                    return Err(trouble.at(warp.index, store.pc));
                }
                self.write_out(warp, &mut store, worker)?;
            }
        }
        let first = |(group, state): (&u32, &Warpgroup)| Some((4 * group, state.queue.front()?.pc));
        if let (Some((warp, pc)), true) = (self.hopper.groups.iter().find_map(first), self.clocks.is_some()) {
            let what = "the block ends while a wgmma still reads its shared memory";
            let right = "wgmma.commit_group and wgmma.wait_group 0 before the end";
            return Err(Trouble::new(Kind::InFlight, what, right).lane(0).at(warp, pc));
        }
        if let Some(coming) = self.hopper.coming.front() {
            let what = "the block ends while a bulk copy still writes to its shared memory";
            let right = "waiting for the mbarrier's phase before the end";
            let trouble = Trouble::new(Kind::InFlight, what, right).lane(coming.lane);
            return Err(trouble.at(coming.warp, coming.pc));
        }
        Ok(())
    }

    /// A block of a cluster has exited: nothing may be on its way to its shared memory.
    pub fn check_left(&self, rank: u32) -> Outcome<()> {
        let to = |coming: &&Coming| match &coming.what {
            What::Data { pieces, .. } => {
                pieces.first().is_some_and(|piece| self.shared.block_of(piece.offset) == rank)
            }
            What::Copies { .. } => false,
        };
        let Some(coming) = self.hopper.coming.iter().find(to) else { return Ok(()) };
        let what =
            format!("block {rank} of the cluster ends while a bulk copy still writes to its shared memory");
        let right = "barrier.cluster.arrive and barrier.cluster.wait before the end of every block";
        let trouble = Trouble::new(Kind::InFlight, what, right).lane(coming.lane);
        Err(trouble.at(coming.warp, coming.pc))
    }

    /// Shared memory that a unit is about to read must be written, ordered before the thread that
    /// starts it, and shown to the units by a proxy fence if threads wrote it.
    fn check_visible(
        &mut self,
        warp: &Warp,
        lane: usize,
        offset: usize,
        bytes: usize,
        what: &str,
    ) -> Outcome<()> {
        let (shared, who) = self.shared_by(warp, lane);
        shared.check_read(offset, bytes, &who)?;
        self.check_shown(warp, lane, offset, bytes, what)
    }

    /// Writes of threads to shared memory that a unit is about to read or write must be shown to
    /// the units by a proxy fence. `what` says what the unit does.
    fn check_shown(
        &mut self,
        warp: &Warp,
        lane: usize,
        offset: usize,
        bytes: usize,
        what: &str,
    ) -> Outcome<()> {
        let (shared, who) = self.shared_by(warp, lane);
        let Some(clocks) = who.clocks else { return Ok(()) };
        let hidden = |write: &Stamp| {
            write.party < who.threads && !clocks.proxied(who.thread(), write.party, write.tick)
        };
        let Some(write) = shared.find_write(offset, bytes, hidden) else { return Ok(()) };
        let what = format!("{what} shared memory that thread {} wrote", write.party);
        let what = format!("{what}, with no proxy fence in between");
        let right = "fence.proxy.async after the writes, before the barrier that hands them over";
        Err(Trouble::new(Kind::MissingFence, what, right).lane(who.lane).other(write.pc))
    }

    /// Memory that a tensor copy filled must be read by its swizzle. `what` says what reads.
    fn check_laid(&self, lane: usize, offset: usize, swizzle: Swizzle, what: &str) -> Outcome<()> {
        let Some((pc, of)) = self.hopper.laid_otherwise(offset, swizzle) else { return Ok(()) };
        // Whoever has written there since has laid the data in another way.
        if self
            .shared
            .find_write(offset, CHUNK, |write| write.party < self.threads || write.pc != pc)
            .is_some()
        {
            return Ok(());
        }
        let what = format!("{what} with {swizzle} what a tensor copy brought with {of}");
        let right = "the same swizzle in the tensor map and in the matrix descriptor";
        Err(Trouble::new(Kind::Descriptor, what, right).lane(lane as u32).other(pc))
    }

    /// Writes of this launch's threads to global memory that a bulk load is about to read must be
    /// shown to the units by a proxy fence.
    fn check_global_shown(
        &self,
        warp: &Warp,
        lane: usize,
        place: (usize, u64),
        bytes: u64,
        worker: &Worker,
    ) -> Outcome<()> {
        let (Some(races), Some(clocks)) = (&worker.races, &self.clocks) else { return Ok(()) };
        let thread = warp.index * LANES as u32 + lane as u32;
        let hidden = |by: &Stamp| by.party < self.threads && !clocks.proxied_far(thread, by);
        let Some(write) = races.find_write(place, bytes, hidden) else { return Ok(()) };
        let (writer, block) = (write.party, write.block);
        let what = format!(
            "a bulk load reads global memory that thread {writer} of block {block} wrote in this launch, with no \
             proxy fence for global memory in between"
        );
        let right = "fence.proxy.async (or .global) after the writes, before what hands them over; or a launch of its \
                     own for the load";
        Err(Trouble::new(Kind::MissingFence, what, right).lane(lane as u32).other(write.pc))
    }

    // wgmma

    /// An instruction accesses registers that `wgmma`s of the kernel use.
    pub fn touch(&mut self, warp: &mut Warp, active: u32, pc: u32, rows: &[u16]) -> Outcome<()> {
        for &row in rows {
            if self.clocks.is_some() && warp.hopper.owned.contains_key(&row) {
                let what = "a register is accessed while a wgmma still works on it";
                let right =
                    "wgmma.commit_group and wgmma.wait_group before results are read or factors are changed";
                return Err(Trouble::new(Kind::InFlight, what, right).lane(active.trailing_zeros() % 32));
            }
            warp.hopper.accessed.insert(row, pc);
        }
        Ok(())
    }

    fn issue(&mut self, warp: &mut Warp, active: u32, wgmma: &Wgmma) -> Outcome<()> {
        whole_warp(active, "wgmma")?;
        let (group, member, whole) = self.warpgroup(warp.index);
        if !whole {
            let what = "wgmma in a warpgroup of fewer than four warps";
            return Err(Trouble::new(Kind::Mask, what, "a block of a multiple of 128 threads").lane(0));
        }
        if self.clocks.is_some() {
            let accessed = wgmma.registers().find_map(|row| warp.hopper.accessed.get(&row).copied());
            if accessed.is_some() || !warp.hopper.fenced {
                let what = "wgmma on registers that were accessed after the last wgmma.fence";
                let right =
                    "wgmma.fence.sync.aligned before the first wgmma and after every access to its registers";
                let trouble = Trouble::new(Kind::MissingFence, what, right).lane(0);
                return Err(match accessed {
                    Some(pc) => trouble.other(pc),
                    None => trouble,
                });
            }
        }
        let uniform = |row: u16| -> Outcome<u64> {
            let values = &warp.registers.d[usize::from(row)];
            if values.iter().any(|value| *value != values[0]) {
                let what = "lanes with different matrix descriptors";
                return Err(
                    Trouble::new(Kind::Descriptor, what, "one descriptor for the whole warpgroup").lane(0)
                );
            }
            Ok(values[0])
        };
        let a = match wgmma.a {
            Factor::Shared(row) => Some(uniform(row)?),
            Factor::Registers(_) => None,
        };
        let b = uniform(wgmma.b)?;
        let predicate = warp.registers.p[usize::from(wgmma.accumulate)];
        if predicate != 0 && predicate != u32::MAX {
            let what = "lanes with different scale-d predicates";
            return Err(Trouble::new(Kind::Descriptor, what, "one predicate for the whole warpgroup").lane(0));
        }
        let part = Part {
            a: match &wgmma.a {
                Factor::Shared(_) => Vec::new(),
                Factor::Registers(rows) => {
                    rows.iter().map(|row| warp.registers.w[usize::from(*row)]).collect()
                }
            },
            accumulate: predicate != 0,
        };
        let number = warp.hopper.issued;
        warp.hopper.issued += 1;
        self.own_registers(warp, wgmma)?;
        let chunks = self.chunks_read(wgmma, a, b, self.rank(warp.index))?;
        for &(offset, swizzle) in &chunks {
            self.check_visible(warp, 0, offset, CHUNK, "wgmma reads")?;
            self.check_laid(0, offset, swizzle, "wgmma reads")?;
        }
        let reads: Vec<usize> = chunks.into_iter().map(|(offset, _)| offset).collect();
        let state = self.hopper.groups.entry(group).or_default();
        let at = (number - state.first) as usize;
        if at == state.queue.len() {
            for &offset in &reads {
                self.shared.lend(offset, CHUNK, true);
            }
            let (pc, parts) = (warp.pc, [const { None }; 4]);
            state.queue.push_back(Product { pc, a, b, issued: 0, taken: 0, parts, reads, read: None });
        }
        let Some(product) = state.queue.get_mut(at) else { return Ok(()) };
        if product.pc != warp.pc || product.a != a || product.b != b {
            let what = "warps of a warpgroup issue different wgmmas";
            let right = "the same wgmma with the same descriptors in all four warps";
            return Err(Trouble::new(Kind::Descriptor, what, right).lane(0).other(product.pc));
        }
        product.issued |= 1 << member;
        product.parts[member as usize] = Some(part);
        Ok(())
    }

    /// The registers of a `wgmma` are its own until its wait. One under way may own them too where
    /// the hardware keeps the two in order: sums of one shape in the same places, and factors,
    /// which both read.
    fn own_registers(&self, warp: &mut Warp, wgmma: &Wgmma) -> Outcome<()> {
        for (row, role) in wgmma.roles() {
            let new = Owner { count: 0, pc: warp.pc, role };
            let owner = warp.hopper.owned.entry(row).or_insert(new);
            let passed_on = match (owner.role, role) {
                (Role::Factor(_), Role::Factor(_)) => true,
                (was, is) => was == is,
            };
            if self.clocks.is_some() && !passed_on {
                let what = match (owner.role, role) {
                    (Role::Factor(_), _) => {
                        "a wgmma adds to a register that is a factor of a wgmma under way"
                    }
                    (_, Role::Factor(_)) => {
                        "a wgmma takes as a factor a register that a wgmma under way adds to"
                    }
                    _ => {
                        "a wgmma adds to a register that a wgmma under way of another shape or order adds to"
                    }
                };
                let right = "wgmma.commit_group and wgmma.wait_group between the two";
                return Err(Trouble::new(Kind::InFlight, what, right).lane(0).other(owner.pc));
            }
            owner.count += 1;
        }
        Ok(())
    }

    /// Offsets of all 16-byte pieces of shared memory that a product reads, with the swizzle of the
    /// matrix that each is of.
    fn chunks_read(
        &self,
        wgmma: &Wgmma,
        a: Option<u64>,
        b: u64,
        rank: u32,
    ) -> Outcome<Vec<(usize, Swizzle)>> {
        let mut chunks = Vec::new();
        let each = wgmma.element.bytes();
        let mut add = |bits: u64, outer: u64, transposed: bool| -> Outcome<()> {
            let descriptor = Descriptor::new(bits)?;
            let step = |dimension: bool| if dimension { CHUNK / each } else { 1 };
            for row in (0..outer).step_by(step(transposed)) {
                for depth in (0..wgmma.depth() as u64).step_by(step(!transposed)) {
                    let place = descriptor.chunk(row, depth, each as u64, transposed);
                    let address = self.in_block(place, rank);
                    let offset = self.shared.locate(address, CHUNK as u64, CHUNK as u64, false)?;
                    chunks.push((offset, descriptor.swizzle));
                }
            }
            Ok(())
        };
        if let Some(a) = a {
            add(a, 64, wgmma.a_transposed)?;
        }
        add(b, wgmma.columns as u64, wgmma.b_transposed)?;
        Ok(chunks)
    }

    /// Waits for all but the last `groups` groups: reads the factors, which are then free, and
    /// writes the results.
    fn wait_products(&mut self, warp: &mut Warp, active: u32, groups: u32) -> Outcome<Option<Wait>> {
        whole_warp(active, "wgmma.wait_group")?;
        let (group, member, _) = self.warpgroup(warp.index);
        let member = member as usize;
        let commits = &warp.hopper.commits;
        let Some(last) = commits.len().checked_sub(1 + groups as usize) else { return Ok(None) };
        let until = commits[last];
        let kernel = self.launch.kernel;
        let base = self.in_block(0, self.rank(warp.index));
        while warp.hopper.done < until {
            let number = warp.hopper.done;
            if !self.hopper.issued(group, number) {
                return Ok(Some(Wait::Product { group, number }));
            }
            let Some(state) = self.hopper.groups.get_mut(&group) else { return Ok(None) };
            let Some(product) = state.queue.get_mut((number - state.first) as usize) else { return Ok(None) };
            let super::program::Op::Hopper(op) = &kernel.code[product.pc as usize].op else {
                return Ok(None);
            };
            let Op::Wgmma(wgmma) = &**op else { return Ok(None) };
            if product.read.is_none() {
                let party = self.clocks.as_ref().map_or(0, |clocks| clocks.agent(MBARRIERS as u32 + group));
                let by = Stamp { block: self.index, party, tick: number as u32 + 1, pc: product.pc };
                for &offset in &product.reads {
                    self.shared.lend(offset, CHUNK, false);
                    self.shared.read_by_agent(offset, CHUNK, by);
                }
                let (each, deep) = (wgmma.element.bytes(), wgmma.depth());
                let element = |bits: u64, outer: usize, depth: usize, transposed: bool| -> Outcome<f32> {
                    let descriptor = Descriptor::new(bits)?;
                    let address =
                        descriptor.chunk(outer as u64, depth as u64, each as u64, transposed) + base;
                    let offset = self.shared.locate(address, CHUNK as u64, CHUNK as u64, false)?;
                    let within = each * (if transposed { outer } else { depth } % (CHUNK / each));
                    Ok(wgmma.element.value(self.shared.load(offset + within, each) as u32, 0))
                };
                let mut a = Vec::new();
                if let Some(bits) = product.a {
                    for row in 0..64 {
                        for depth in 0..deep {
                            a.push(element(bits, row, depth, wgmma.a_transposed)?);
                        }
                    }
                }
                let mut b = Vec::with_capacity(deep * wgmma.columns);
                for depth in 0..deep {
                    for column in 0..wgmma.columns {
                        b.push(element(product.b, column, depth, wgmma.b_transposed)?);
                    }
                }
                product.read = Some((a, b));
            }
            product.multiply(wgmma, warp, member);
            product.taken |= 1 << member;
            for row in wgmma.registers() {
                if let Some(owner) = warp.hopper.owned.get_mut(&row) {
                    owner.count -= 1;
                    if owner.count == 0 {
                        warp.hopper.owned.remove(&row);
                    }
                }
            }
            while state.queue.front().is_some_and(|product| product.taken == 15) {
                state.queue.pop_front();
                state.first += 1;
            }
            warp.hopper.done += 1;
        }
        if let Some(clocks) = &mut self.clocks {
            clocks.acquire_agent(warp.index, active, MBARRIERS as u32 + group, until as u32);
        }
        self.waited_for_products(warp.index);
        Ok(None)
    }
}

impl Product {
    /// The 16 rows of one warp: d = a b + d or a b, summed in order of depth.
    fn multiply(&self, wgmma: &Wgmma, warp: &mut Warp, member: usize) {
        let (Some((a, b)), Some(part)) = (&self.read, &self.parts[member]) else { return };
        let (columns, deep) = (wgmma.columns, wgmma.depth());
        // Of a register's factors, which are adjacent along the depth.
        let each = deep / 8;
        let mut rows = vec![0f32; 16 * deep];
        for (row, factors) in rows.chunks_mut(deep).enumerate() {
            for (depth, factor) in factors.iter_mut().enumerate() {
                *factor = if part.a.is_empty() {
                    a[(member * 16 + row) * deep + depth]
                } else {
                    let at = depth % (4 * each) / each;
                    let word = part.a[row / 8 + depth / (4 * each) * 2][row % 8 * 4 + at];
                    wgmma.element.value(word, depth % each)
                };
                if wgmma.negate {
                    *factor = -*factor;
                }
            }
        }
        let place = |lane: usize, i: usize| (lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
        let mut sums = vec![0f32; 16 * columns];
        if part.accumulate {
            for (i, &reg) in wgmma.d.iter().enumerate() {
                for (lane, &word) in warp.registers.w[usize::from(reg)].iter().enumerate() {
                    let (row, column) = place(lane, i);
                    sums[row * columns + column] = f32::from_bits(word);
                }
            }
        }
        for (row, sums) in rows.chunks(deep).zip(sums.chunks_mut(columns)) {
            for (factor, b) in row.iter().zip(b.chunks(columns)) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += factor * b;
                }
            }
        }
        for (i, &reg) in wgmma.d.iter().enumerate() {
            for (lane, word) in warp.registers.w[usize::from(reg)].iter_mut().enumerate() {
                let (row, column) = place(lane, i);
                *word = sums[row * columns + column].to_bits();
            }
        }
    }
}

/// Addresses given to the units may be generic.
fn shared_address(address: u64) -> u64 {
    let offset = address.wrapping_sub(SHARED_WINDOW);
    if offset < WINDOW { offset } else { address }
}

fn descriptor(error: &MapError) -> Box<Trouble> {
    Trouble::new(
        Kind::Descriptor,
        error.to_string(),
        "a tensor map within the rules of cuTensorMapEncodeTiled",
    )
}
