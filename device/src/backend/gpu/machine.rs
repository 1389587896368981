//! How long a generated kernel should take, from counts of its code.
//!
//! *In*: a [`Source`], the multiply-adds of a launch and a [`Device`]. *Out*: [`Estimate`]s: the
//! seconds of each pass and [`Why`] it takes them. *Promise*: each number comes from the text (its
//! tile, its constants, the bounds of its loops, its barriers, the runs of loads between them) or
//! from a constant of this file, which says where it is from; nothing is fitted to a model.
//!
//! A block is a chain of steps ([`Block::alone`]) and a share of its processor ([`Block::busy`]).
//! As many blocks are resident as registers, shared memory and threads allow, and a wave of them
//! ends when the slowest chain or the last share does. A kernel takes its waves one after another.
//!
//! [`read`] finds the [`Code`] of a pass; [`Code::estimate`] prices it. They are apart so that code
//! that no longer exists (a review's, in `tests/gpu/machine.rs`) can be priced, too.

use dreamc_compiler::codegen::{Argument, Pass, Source, Turns};
use dreamc_compiler::count::device::Device;
use std::collections::HashMap;
use std::fmt;

/// Seconds of a memory round trip under load: an H100 takes some 480 cycles idle by microbenchmarks
/// (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024);
/// a queue of other blocks' requests is added.
const TRIP: f64 = 440e-9;
/// Share of the data sheet's products that a kernel without any other limit sustains: cuBLAS has
/// 769 to 798 of 989 TFLOP/s on such H200s.
const SUSTAINED: f64 = 0.79;
/// The same by `mma.sync`, whose operands pass through registers.
const BY_WARPS: f64 = 0.45;
/// The same on the ordinary cores, of the f32 peak: a tile of products, and a score of attention,
/// which reads five words of shared memory for four multiply-adds.
const ON_CORES: f64 = 0.5;
const SCORES_ON_CORES: f64 = 0.18;
/// Bytes of a cycle that the L2 cache feeds a processor: 8.1 TB/s to 132 of them, which a public
/// kernel of 192 x 192 tiles takes at 777 TFLOP/s (fast.cu, README).
const FED: f64 = 33.5;
/// Bytes of a cycle that a processor stores.
const STORED: f64 = 32.0;
/// Cycles of a barrier of a block with the shared memory around it, and of a reduction by a warp:
/// five shuffles, one after another, and what is made of their sum.
const BARRIER: f64 = 250.0;
const REDUCTION: f64 = 200.0;
/// Seconds of a launch in a recorded graph.
const NODE: f64 = 1.5e-6;
/// Registers, threads and blocks of a processor.
const REGISTERS: u32 = 65536;
const THREADS: u32 = 2048;
const BLOCKS: u32 = 32;
/// Registers of a thread where NVRTC was not asked: of a row kernel, and of one that moves rows.
/// Tiles and attention have all that their launch bound allows.
const OF_ROWS: u32 = 72;
const OF_ITEMS: u32 = 40;

/// The step that a kernel spends most of its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Products on the tensor cores.
    TensorCores,
    /// Products on the ordinary cores.
    Cores,
    /// Operands of tiles from the L2 cache.
    Cache,
    /// Gathered operands, brought by warps.
    Gather,
    /// Softmax and other arithmetic between products.
    Softmax,
    /// Memory round trips one after another.
    Trips,
    /// Barriers and reductions one after another.
    Barriers,
    /// Results that are stored while nothing is multiplied.
    Stores,
    /// Bytes of memory.
    Memory,
    /// Element-wise operations.
    Elementwise,
    /// A wave that does not fill the processors.
    Tail,
    /// Messages between GPUs.
    Network,
    /// The launch itself.
    Launch,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Why::TensorCores => "tensor cores",
            Why::Cores => "cores",
            Why::Cache => "L2 cache",
            Why::Gather => "gathering",
            Why::Softmax => "softmax",
            Why::Trips => "round trips",
            Why::Barriers => "barriers",
            Why::Stores => "stores",
            Why::Memory => "memory",
            Why::Elementwise => "elementwise",
            Why::Tail => "tail",
            Why::Network => "network",
            Why::Launch => "launch",
        })
    }
}

/// How long a pass takes, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds of all its blocks.
    pub seconds: f64,
    /// The step that most of them go to.
    pub why: Why,
    /// Blocks of a processor at once.
    pub resident: u32,
}

/// The unit that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Warpgroups, by `wgmma`.
    Warpgroups,
    /// The same, of codes of e4m3.
    Codes,
    /// Warps, by `mma.sync`.
    Warps,
    /// Threads, by `fma`.
    Threads,
}

/// A product cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiles {
    /// The unit that multiplies them.
    pub unit: Unit,
    /// Rows of a tile.
    pub rows: f64,
    /// Columns of a tile.
    pub columns: f64,
    /// Tiles of a launch; of those of a group the last is half full.
    pub count: f64,
    /// Terms of a sum.
    pub depth: f64,
    /// Bytes of a result.
    pub result: f64,
    /// Results that a thread adds to memory between two round trips.
    pub adds: Option<f64>,
    /// Pieces of 16 bytes that a gathering thread brings for 64 terms, and cycles of each.
    pub gathers: Option<(f64, f64)>,
    /// Instructions of a result before it is stored.
    pub instructions: f64,
    /// Blocks go from tile to tile.
    pub streams: bool,
    /// Blocks of a cluster, to which an operand of the columns is brought at once.
    pub cluster: f64,
}

/// An attention: tiles of one side pass by rows of the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passing {
    /// The unit that multiplies.
    pub unit: Unit,
    /// Rows that stay, and rows that pass by at a time.
    pub own: f64,
    /// See `own`.
    pub tile: f64,
    /// Elements of a head.
    pub size: f64,
    /// Warpgroups that have the same rows, and all their scores.
    pub sharers: f64,
    /// Products executed for each pair of a query and a key, each of `size` terms.
    pub products: f64,
    /// Products that are counted for a pair.
    pub counted: f64,
    /// Queries of all heads.
    pub queries: f64,
    /// Instructions of a score apart from its products.
    pub instructions: f64,
}

/// The kind of code of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Body {
    /// A product.
    Tiles(Tiles),
    /// Attention along the sequence.
    Attention(Passing),
    /// A generated row kernel.
    Rows(Turns),
    /// A thread, a warp or a block for each of many items: an index, then what it names.
    Items,
}

/// The code of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Code {
    /// Blocks.
    pub grid: f64,
    /// Threads of a block.
    pub block: u32,
    /// Shared memory of a block.
    pub shared: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// The rest.
    pub body: Body,
}

// --- reading -------------------------------------------------------------------------------------

/// The part of a text for an entry: its launch bound, its parameters and its body.
fn entry<'t>(text: &'t str, name: &str) -> Option<(u32, Vec<&'t str>, &'t str)> {
    let at = text.find(&format!(") {name}("))?;
    let bound = text[..at].rsplit_once(", ")?.1.trim().parse().ok()?;
    let (parameters, rest) = text[at..].split_once('(')?.1.split_once(") {\n")?;
    let body = rest.split("\nKERNEL ").next()?;
    let names = parameters.split(',').filter_map(|p| p.split([' ', '*']).next_back());
    Some((bound, names.collect(), body))
}

/// The template that a body calls and its arguments, those of a template among them in one piece.
fn template(body: &str) -> Option<(&str, Vec<&str>)> {
    let (name, rest) = body.trim_start().split_once('<')?;
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return None;
    }
    let (mut depth, mut start, mut list) = (0, 0, vec![]);
    for (i, c) in rest.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if depth == 0 => {
                list.push(rest[start..i].trim());
                return Some((name, list));
            }
            '>' => depth -= 1,
            ',' if depth == 0 => {
                list.push(rest[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    None
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

/// The code of a pass of a source, with its registers where they are known.
pub fn read(source: &Source, pass: &Pass, registers: Option<u32>) -> Code {
    read_part(source, pass, registers, 1.0)
}

/// The same of a launch that has this share of its slots, where it has slots.
pub(super) fn read_part(source: &Source, pass: &Pass, registers: Option<u32>, share: f64) -> Code {
    let mut code = Code {
        grid: pass.grid.into(),
        block: pass.block,
        shared: pass.shared_bytes,
        registers: OF_ITEMS,
        body: Body::Items,
    };
    let Some((bound, names, body)) = entry(&source.text, &pass.entry) else { return code };
    let mut sizes: HashMap<&str, f64> = names
        .iter()
        .zip(&pass.arguments)
        .filter_map(|(&name, argument)| match argument {
            Argument::Size(n) => Some((name, f64::from(*n))),
            Argument::Distance(n) => Some((name, *n as f64)),
            _ => None,
        })
        .collect();
    if let Some(slots) = sizes.get_mut("slots") {
        *slots *= share;
    }
    let most = (REGISTERS / (pass.block * bound).max(1) / 8 * 8).min(255);
    let called = template(body);
    let found = called.as_ref().and_then(|(name, list)| {
        let product = || tiles(name, list, &sizes, pass, &source.text).map(Body::Tiles);
        passing(&source.text, name, list).map(Body::Attention).or_else(product)
    });
    code.body = match found {
        Some(body) => body,
        None if called.is_none() => Body::Rows(pass.turns),
        None => Body::Items,
    };
    code.shared += static_shared(body);
    code.registers = registers.unwrap_or(match code.body {
        Body::Tiles(_) | Body::Attention(_) => most,
        Body::Rows(_) => most.min(OF_ROWS),
        Body::Items => most.min(OF_ITEMS),
    });
    code
}

/// Bytes of the shared memory that a row kernel declares.
fn static_shared(body: &str) -> u32 {
    let floats = body.split_once("float memory[").and_then(|(_, rest)| rest.split(']').next());
    floats.and_then(|n| n.parse::<u32>().ok()).map_or(0, |n| 4 * n)
}

/// A product by tiles.
fn tiles(name: &str, list: &[&str], sizes: &HashMap<&str, f64>, pass: &Pass, text: &str) -> Option<Tiles> {
    let (kind, parts) = template(list.first()?)?;
    let part = |i: usize| parts.get(i).and_then(|p| number(p));
    let (unit, rows, columns) = match kind {
        "Warpgroups" => (Unit::Warpgroups, 128.0, part(0)?),
        "Codes" => (Unit::Codes, 128.0, 128.0),
        "Matrices" => (Unit::Warps, part(0)?, part(1)?),
        "Tile" => (Unit::Threads, part(0)?, part(1)?),
        _ => return None,
    };
    let size = |name: &str| sizes.get(name).copied();
    let constant = |i: usize| list.get(i).and_then(|p| number(p));
    let is = |i: usize| list.get(i) == Some(&"true");
    let over = |extent: f64, each: f64| (extent / each).ceil();
    let all = |m: f64, n: f64| over(m, rows) * over(n, columns);
    let grid = f64::from(pass.grid);
    // Instructions of a softmax: an exponential, a maximum or a sum, and a comparison.
    let (mut count, mut adds, mut gathers, mut instructions) = (grid, false, None, 0.0);
    let mut narrow_result = false;
    let depth = match name {
        "product_e4m3" => {
            (count, adds) = (all(size("m")?, size("n")?), is(1));
            narrow_result = text.contains("bf16 *c");
            size("k")?
        }
        "product_slice_e4m3" => size("depth")?,
        "product" => {
            (count, adds) = (all(size("m")?, size("n")?), is(3));
            narrow_result = text.contains("bf16 *c");
            size("k")?
        }
        "product_slice" => size("depth")?,
        "grouped" => {
            let groups = size("slots")? / rows + size("experts")? / 2.0;
            count = groups.min(over(size("slots")?, rows) * size("experts")?) * over(size("n")?, columns);
            gathers = is(2).then_some(rows);
            narrow_result = text.contains("bf16 *y");
            size("k")?
        }
        "grouped_outer" => {
            let experts = size("experts")?;
            (count, adds) = (all(size("out")?, size("inner")?) * experts, is(3));
            gathers = is(1).then_some(columns);
            size("slots")? / experts.max(1.0)
        }
        "head_loss" => {
            (count, instructions) = (all(constant(1)?, constant(2)?), 10.0);
            constant(3)?
        }
        "head_grad_logits" => {
            (instructions, narrow_result) = (10.0, true);
            constant(3)?
        }
        "head_grad_x" => {
            adds = true;
            constant(4)?
        }
        "head_grad_w" => {
            adds = is(5);
            constant(1)?
        }
        _ => return None,
    };
    // Three or four instructions and the copy itself, which passes 512 bytes of a warp.
    let piece = 12.0;
    let bringers = if unit == Unit::Warpgroups { part(2)? } else { f64::from(pass.block / 32) };
    Some(Tiles {
        unit,
        rows,
        columns,
        count,
        depth,
        result: if narrow_result { 2.0 } else { 4.0 },
        adds: adds.then_some(8.0),
        gathers: gathers.map(|lines| (lines * 8.0 / (32.0 * bringers), piece)),
        instructions,
        streams: match unit {
            Unit::Warpgroups => part(1)? >= 4.0 && grid < count,
            Unit::Codes => grid < count,
            Unit::Warps | Unit::Threads => false,
        },
        cluster: match unit {
            Unit::Warpgroups => part(4).unwrap_or(1.0),
            Unit::Codes => part(2).unwrap_or(1.0),
            Unit::Warps | Unit::Threads => 1.0,
        },
    })
}

/// Attention along the sequence. Instructions of a score by the machine code of heads of 128
/// (`benches/gpu/machine.py`): 849 for 64 scores forward, 501 and 649 for 32 back.
fn passing(text: &str, name: &str, list: &[&str]) -> Option<Passing> {
    let (shape, _) = text.split_once("typedef Shape<")?.1.split_once('>')?;
    let shape: Vec<f64> = shape.split(',').map_while(number).collect();
    let &[batch, queries, _, heads, _, size] = shape.get(..6)? else { return None };
    let (entry, products, instructions) = match name.split_once('_').map_or(("", name), |(_, of)| (name, of))
    {
        (_, "grad_queries") => ("back", 3.0, 16.0),
        (_, "grad_keys") => ("back", 4.0, 20.0),
        ("", "flash" | "attention") => ("forward", 2.0, 13.0),
        _ => return None,
    };
    let (unit, own, tile, sharers) = match list.first().and_then(|f| template(f)) {
        Some(("FlashWarpgroups", parts)) => {
            let sharers = parts.get(3).and_then(|p| number(p)).unwrap_or(1.0);
            (Unit::Warpgroups, 128.0 / sharers, number(parts.get(1)?)?, sharers)
        }
        Some(("FlashWarps", _)) => (Unit::Warps, 64.0, 32.0, 1.0),
        Some(_) => return None,
        None => (Unit::Threads, 16.0, 32.0, 1.0),
    };
    // Each sharer computes all products of scores, and a part of those of sums.
    let scores = if entry == "back" { 2.0 } else { 1.0 };
    let products = products + (sharers - 1.0) * scores;
    Some(Passing {
        unit,
        own,
        tile,
        size,
        sharers,
        products,
        counted: if entry == "back" { 5.0 } else { 2.0 },
        queries: batch * queries * heads,
        instructions,
    })
}

// --- pricing -------------------------------------------------------------------------------------

/// The work of a block, in cycles.
struct Block {
    /// Its share of the processor, and which part of it is busy.
    busy: (f64, Why),
    /// Its steps, one after another, where it is alone.
    alone: Vec<(f64, Why)>,
}

impl Block {
    fn chain(&self) -> f64 {
        self.alone.iter().map(|s| s.0).sum()
    }

    /// A wave of `resident` of them on a processor, and what it waits for.
    fn wave(&self, resident: f64) -> (f64, Why) {
        let (shared, chain) = (resident * self.busy.0, self.chain());
        let longest = self.alone.iter().max_by(|a, b| a.0.total_cmp(&b.0));
        match longest {
            Some(&(_, why)) if chain > shared => (chain, why),
            _ => (shared, self.busy.1),
        }
    }
}

impl Code {
    /// Threads of a launch.
    pub(super) fn threads(&self) -> f64 {
        self.grid * f64::from(self.block)
    }

    /// Blocks of a processor at once.
    pub fn resident(&self, device: &Device) -> u32 {
        let registers = self.registers.max(16).next_multiple_of(8) * self.block.next_multiple_of(32);
        let shared = u64::from(self.shared) + 1024;
        let by_shared = (device.shared + 1024) / shared;
        let by_threads = (THREADS / self.block.max(1)).min(REGISTERS / registers.max(1));
        by_threads.min(by_shared.try_into().unwrap_or(BLOCKS)).clamp(1, BLOCKS)
    }

    /// How long a launch of `multiply_adds` multiply-adds takes, memory's own rate aside.
    pub fn estimate(&self, multiply_adds: f64, device: &Device) -> Estimate {
        let resident = self.resident(device);
        let (block, blocks) = self.block_of(multiply_adds, device);
        let (cycles, why) = waves(&block, blocks, f64::from(resident), device.processors as f64);
        let seconds = cycles / device.clock;
        let (seconds, why) = if seconds < NODE { (NODE, Why::Launch) } else { (seconds + NODE, why) };
        Estimate { seconds, why, resident }
    }

    /// A block, and how many there are to go through.
    fn block_of(&self, multiply_adds: f64, device: &Device) -> (Block, f64) {
        let trip = TRIP * device.clock;
        match self.body {
            Body::Items => {
                (Block { busy: (0.0, Why::Trips), alone: vec![(2.0 * trip, Why::Trips)] }, self.grid)
            }
            Body::Rows(t) => {
                let waits = t.barriers as f64 * BARRIER + t.reductions as f64 * REDUCTION;
                let alone = vec![(t.trips.max(1) as f64 * trip, Why::Trips), (waits, Why::Barriers)];
                (Block { busy: (0.0, Why::Trips), alone }, self.grid)
            }
            Body::Tiles(t) => t.block(self, device, trip),
            Body::Attention(a) => (a.block(self, multiply_adds, device, trip), self.grid),
        }
    }
}

/// Waves of blocks: full ones, and the last.
fn waves(block: &Block, blocks: f64, resident: f64, processors: f64) -> (f64, Why) {
    let full = (blocks / (resident * processors)).floor();
    let rest = ((blocks - full * resident * processors) / processors).ceil().max(0.0);
    let ((each, why), (last, _)) = (block.wave(resident), block.wave(rest));
    let last = if rest > 0.0 { last } else { 0.0 };
    let cycles = full * each + last;
    // The share of the processors that the last wave leaves idle.
    let needed = blocks / (resident * processors) * each;
    (cycles, if cycles > 1.5 * needed && full < 1.0 { Why::Tail } else { why })
}

/// Multiply-adds of a cycle of a processor, and where they are made.
fn rate(unit: Unit, cores: f64, device: &Device) -> (f64, Why) {
    let of = |peak: f64| peak / (2.0 * device.processors as f64 * device.clock);
    match unit {
        Unit::Warpgroups => (SUSTAINED * of(device.bf16), Why::TensorCores),
        Unit::Codes => (SUSTAINED * of(device.e4m3()), Why::TensorCores),
        Unit::Warps => (BY_WARPS * of(device.bf16), Why::TensorCores),
        Unit::Threads => (cores * of(device.f32), Why::Cores),
    }
}

impl Tiles {
    fn block(&self, code: &Code, device: &Device, trip: f64) -> (Block, f64) {
        let Tiles { rows, columns, .. } = *self;
        let (rate, unit) = rate(self.unit, ON_CORES, device);
        let slices = (self.depth / 64.0).ceil().max(1.0);
        let multiply = slices * rows * columns * 64.0 / rate;
        let bytes = match self.unit {
            Unit::Threads => 256.0,
            Unit::Warpgroups | Unit::Warps => 128.0,
            Unit::Codes => 64.0,
        };
        // The cache gives what several blocks of a cluster take once.
        let feed = slices * (rows + columns / self.cluster) * bytes / FED;
        let brought = self.gathers.map_or(0.0, |(pieces, cycles)| slices * pieces * cycles);
        // Eight warps, two to a scheduler.
        let each = rows * columns / 256.0;
        let arithmetic = each * self.instructions * 2.0;
        let stores = rows * columns * self.result / STORED;
        let trips = self.adds.map_or(0.0, |batch| (each / 2.0 / batch).ceil());
        let slowest = [(multiply, unit), (brought, Why::Gather)];
        let slowest = slowest.into_iter().fold((0.0, unit), |a, b| if b.0 > a.0 { b } else { a });
        let busy = if feed > multiply { (feed, Why::Cache) } else { (multiply, unit) };
        let alone =
            vec![slowest, (arithmetic, Why::Softmax), (stores, Why::Stores), (trips * trip, Why::Trips)];
        if self.streams {
            // One block of a processor, whose tiles follow one another; the next one's operands
            // come while results are stored.
            let turns = (self.count / code.grid).ceil();
            let slowest = if busy.0 > slowest.0 { busy } else { slowest };
            let alone = alone.into_iter().skip(1).chain([slowest]).map(|(c, why)| (turns * c, why));
            let alone = alone.chain([(2.0 * trip, Why::Trips)]).collect();
            return (Block { busy: (turns * busy.0, busy.1), alone }, code.grid);
        }
        let alone = alone.into_iter().chain([(2.0 * trip, Why::Trips)]).collect();
        let busy = (busy.0 + arithmetic, busy.1);
        // A block of the head goes through several tiles.
        let blocks = self.count.max(1.0);
        (Block { busy, alone }, blocks)
    }
}

impl Passing {
    /// A block with the mean of tiles.
    fn block(&self, code: &Code, multiply_adds: f64, device: &Device, trip: f64) -> Block {
        let (rate, unit) = rate(self.unit, SCORES_ON_CORES, device);
        let pairs = multiply_adds / (self.counted * self.size);
        // Tiles that the mask cuts are computed whole.
        let seen = (pairs / self.queries).max(1.0);
        let whole = 1.0 + (self.own + self.tile) / 2.0 / seen;
        let visits = whole * pairs / (self.own * self.tile) / code.grid.max(1.0);
        let multiply = visits * self.products * self.own * self.tile * self.size / rate;
        // Two warpgroups take turns at the tensor cores: each has half of the rows, and 128
        // threads.
        let instructions = visits * self.sharers * self.own * self.tile / 256.0 * self.instructions;
        let ends = vec![(2.0 * trip, Why::Trips), (self.own * self.size * 2.0 / STORED, Why::Stores)];
        let alone = match self.unit {
            Unit::Warpgroups if multiply / 2.0 > instructions => vec![(multiply, unit)],
            Unit::Warpgroups => vec![(multiply / 2.0, unit), (instructions, Why::Softmax)],
            Unit::Codes | Unit::Warps | Unit::Threads => vec![(multiply, unit)],
        };
        Block { busy: (multiply, unit), alone: alone.into_iter().chain(ends).collect() }
    }
}
