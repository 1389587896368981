//! The common part of the `cuda` and `ptx` backends: from launches to generated kernels to a
//! driver.
//!
//! *In*: a plan's launches and a [`Gpu`], which can allocate, copy, load code and launch. *Out*: a
//! [`Backend`] that runs them. *Promise*: all memory (one arena, one scratch range, one status
//! word) is allocated by [`Generated::new`], all kernels are compiled by it, each distinct text
//! once.
//!
//! A launch is of the kernels that were generated for it, or, where it is a plain product, may be
//! of a library of products that the device has ([`library`]); which of them is settled when the
//! plan is loaded.
//!
//! A kernel that meets an index out of range in memory skips it and leaves the number of its launch
//! in the status word, which is looked at when the program ends (or after every launch, where a
//! launch is waited for anyway).

mod cache;
pub(crate) mod launch;
mod library;
pub mod machine;
pub mod proof;
mod table;
#[cfg(test)]
mod tests;

use super::{Backend, Call, Pass, Value, Work};
use crate::exchange::Collective;
use crate::executor::{self, Listed, Place, Program};
use crate::mapped::Mapped;
use crate::notice::notice;
use crate::staged::Room;
use crate::{Choice, DeviceError, Group, Session};
use dreamc_compiler::codegen::{Argument, Base, HEADERS, Limits, Matrices, Source, Variant, generate};
use dreamc_compiler::format::{Format, Packed};
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::kernel::Found;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Kernel, KernelId, KernelKind, MAPPED, Parts, Plan, Slot, Storage};
use dreamc_dsl::spec::Precision;
use dreamc_nvrtc::Nvrtc;
use launch::{Arg, Launch, Swizzle, TensorMap};
use std::collections::HashMap;

pub(crate) use cache::Compiler;
pub use cache::Target;
pub(crate) use library::{Dense, Library, Side};
use library::{DenseProduct, Products};
use proof::Rung;
pub(crate) use proof::Trust;
pub(crate) use table::scratch_on_paper;
pub use table::{KernelLine, Recode, Table, TableError, prices, prices_by_rates, table};

/// Bytes that a copy through the host has there at a time.
const PIECE: u64 = 1 << 22;

/// A GPU's driver; addresses are its own.
pub(crate) trait Gpu: Send + 'static {
    /// Loaded code.
    type Module: Send;
    /// Recorded launches.
    type Graph: Send;

    /// Its name, for messages.
    fn name(&self) -> &str;

    /// Zeroed memory.
    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError>;

    /// Memory that holds anything.
    fn allocate_scratch(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        self.allocate(bytes, "scratch")
    }

    /// Code that [`Gpu::compiler`] made of a source.
    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Self::Module, DeviceError>;

    /// Copies to the device, after all launches before it.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies from the device, after all launches before it.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Launches; may return before it is done. `origin` is for messages.
    fn launch(&mut self, module: &Self::Module, launch: &Launch, origin: &str) -> Result<(), DeviceError>;

    /// Instructions executed so far, times the threads that executed them; 0 where nobody counts
    /// them.
    fn instructions(&self) -> u64 {
        0
    }

    /// Whether the device can record launches.
    const RECORDS: bool;

    /// From now on launches are recorded and nothing runs.
    fn record(&mut self) -> Result<(), DeviceError> {
        Err(super::records_nothing())
    }

    /// The launches since [`Gpu::record`], also where one of them failed; those that follow run
    /// again.
    fn recorded(&mut self) -> Result<Self::Graph, DeviceError> {
        Err(super::records_nothing())
    }

    /// Runs recorded launches; may return before they are done.
    fn replay(&mut self, graph: &Self::Graph) -> Result<(), DeviceError> {
        let _ = graph;
        Err(super::records_nothing())
    }

    /// Waits for everything.
    fn finish(&mut self) -> Result<(), DeviceError>;

    /// Bytes that can be allocated; `None` where nobody knows.
    fn free(&self) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    /// Whether launches are done when [`Gpu::launch`] returns.
    const SYNCHRONOUS: bool;

    /// Allocations take memory in multiples of this number of bytes.
    const PAGE: u64 = 1;

    /// Memory that is taken after all allocations, for code and recorded launches.
    const RESERVE: u64 = 0;

    /// A product of a library, ready to launch.
    type Product: Send;

    /// Meets the ranks of a group, to exchange with them by itself.
    fn join(&mut self, group: &Group) -> Result<(), DeviceError> {
        let _ = group;
        Ok(())
    }

    /// Begins to exchange numbers with the other ranks, after all launches so far; false where the
    /// host has to, also of an empty list.
    fn exchange(&mut self, list: Vec<Exchange>) -> Result<bool, DeviceError> {
        let _ = list;
        Ok(false)
    }

    /// Waits for all exchanges; gives the seconds that they took since the launches before them
    /// were done.
    fn exchanged(&mut self) -> Result<f64, DeviceError> {
        Ok(0.0)
    }

    /// The number of the exchange that was begun last.
    fn begun(&self) -> u64 {
        0
    }

    /// Work that is given from now on comes after the exchange of that number, and those before it;
    /// the host goes on.
    fn after(&mut self, number: u64) -> Result<(), DeviceError> {
        let _ = number;
        Ok(())
    }

    /// The host waits for the exchange of that number, and those before it.
    fn until(&mut self, number: u64) -> Result<(), DeviceError> {
        let _ = number;
        Ok(())
    }

    /// Copies inside the device's memory, after all launches before it; the two ranges are apart.
    /// Through the host where a device has no copies of its own.
    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        let mut piece = vec![0; bytes.min(PIECE) as usize];
        for done in (0..bytes).step_by(PIECE as usize) {
            let piece = &mut piece[..(bytes - done).min(PIECE) as usize];
            self.read(from + done, piece)?;
            self.write(to + done, piece)?;
        }
        Ok(())
    }

    /// Repeats the first `done` bytes at an address until there are `all`.
    fn repeat(&mut self, address: u64, mut done: u64, all: u64) -> Result<(), DeviceError> {
        while 0 < done && done < all {
            let part = done.min(all - done);
            self.copy(address, address + done, part)?;
            done += part;
        }
        Ok(())
    }

    /// The library of products that may be used. The methods that follow are called only where
    /// there is one.
    fn library(&self) -> Option<&Library> {
        None
    }

    /// Prepares a product of the library; the inner error says why it has none.
    fn product(&mut self, dense: &Dense) -> Result<Result<Self::Product, String>, DeviceError> {
        let _ = dense;
        Err(no_library(self))
    }

    /// Launches a product, with `a`, `b` and `c` at these addresses; may return before it is done.
    /// `origin` is for messages.
    fn multiply(
        &mut self,
        product: &Self::Product,
        operands: [u64; 3],
        scratch: u64,
        origin: &str,
    ) -> Result<(), DeviceError> {
        let _ = (product, operands, scratch, origin);
        Err(no_library(self))
    }

    /// Zeroes memory.
    fn zero(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        let _ = (address, bytes);
        Err(no_library(self))
    }

    /// Marks on the device's clock, by a number, that all launches so far have ended; `false` where
    /// it has no clock.
    fn mark(&mut self, number: usize) -> Result<bool, DeviceError> {
        let _ = number;
        Ok(false)
    }

    /// Seconds between two marks, after [`Gpu::finish`].
    fn between(&mut self, from: usize, to: usize) -> Result<f64, DeviceError> {
        let _ = (from, to);
        Ok(0.0)
    }
}

/// The answers of [`Device`](crate::Device) that are those of every GPU. A method may be
/// named that says whether its tensor cores multiply e4m3.
macro_rules! answers {
    ($($codes:ident)?) => {
        fn narrow(&self, asked: dreamc_dsl::spec::Precision) -> dreamc_compiler::precision::Narrow {
            let narrow = dreamc_compiler::precision::Narrow::from(asked);
            $(let narrow = if self.compiler.$codes() { narrow.on_cores() } else { narrow };)?
            narrow
        }

        fn maps(&self, format: dreamc_compiler::format::Format) -> bool {
            $crate::backend::gpu::maps(format)
        }

        fn copies(&self) -> bool {
            true
        }
    };
}
pub(crate) use answers;

/// The use of numbers that all ranks have at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchanged {
    /// Every rank gets their sum.
    Sum,
    /// This rank gets their sum.
    SumOn(u64),
    /// The ranks that are as far apart as a team's length get their sum.
    SumAmong(u64),
    /// Every rank gets those of this rank.
    From(u64),
    /// Bytes go to this rank.
    To(u64),
    /// Bytes come from this rank.
    Of(u64),
}

/// Numbers or bytes that ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) what: Exchanged,
    /// Where this rank has what it brings, and where what comes goes.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Numbers, or bytes where they go from one rank to another.
    pub(crate) count: u64,
}

fn no_library<G: Gpu + ?Sized>(gpu: &G) -> DeviceError {
    DeviceError::Driver { device: gpu.name().into(), message: "there is no library of products".into() }
}

/// The distinct sources of a plan and which of them each kernel of each launch is.
pub(crate) struct Sources {
    pub(crate) list: Vec<Source>,
    by_kernel: HashMap<(KernelId, Variant), Option<usize>>,
}

impl Sources {
    /// Generates the texts of all launches of a plan that the check has passed.
    fn new(device: &str, launches: &[PlanLaunch], trust: &Trust) -> Result<Self, DeviceError> {
        let mut sources = Sources { list: vec![], by_kernel: HashMap::new() };
        let mut known: HashMap<Source, usize> = HashMap::new();
        for launch in launches {
            let key = (launch.id, launch.variant);
            if sources.by_kernel.contains_key(&key) {
                continue;
            }
            let of = |variant: Variant| {
                generate(launch.kernel, variant).map_err(|error| DeviceError::Unsupported {
                    device: device.into(),
                    kernel: launch.id,
                    reason: error.to_string(),
                })
            };
            let mut source = of(launch.variant)?;
            if let Some(rung) = source.as_ref().and_then(|best| trust.lowered(best)) {
                source = of(Variant { hopper: false, naive: rung == Rung::Naive, ..launch.variant })?;
            }
            let number = source.map(|source| {
                *known.entry(source.clone()).or_insert_with(|| {
                    sources.list.push(source);
                    sources.list.len() - 1
                })
            });
            sources.by_kernel.insert(key, number);
        }
        Ok(sources)
    }

    /// Scratch memory of all launches, with that of the library where it could compute one of them.
    fn scratch(&self, launches: &[PlanLaunch], library: Option<&Library>) -> u64 {
        let able = |launch: &PlanLaunch| Dense::of(launch.kernel, &launch.variant).is_some();
        let workspace = library.filter(|_| launches.iter().any(able)).map_or(0, |l| l.workspace);
        self.list.iter().map(|s| s.scratch).chain([workspace]).max().unwrap_or(0)
    }
}

/// A launch of the list with what its text depends on.
struct PlanLaunch<'p> {
    id: KernelId,
    kernel: &'p Kernel,
    variant: Variant,
}

/// Which operands are bf16, which begin on 16 bytes for all values of the loop variables and have
/// rows that do, and the blocks of a weight.
fn types_and_alignment(slots: &[Slot], launch: &Listed) -> (u32, u64, Option<Packed>) {
    let (mut narrow, mut wide, mut packed) = (0, 0, None);
    for (i, (place, slot)) in launch.operands.iter().zip(slots).enumerate() {
        let Place::Tensor { base, instance, instance_bytes, stride, dtype } = place else { continue };
        // Kernels whose operands are of fixed types name them themselves.
        if matches!(slot.storage, Storage::Float(_) | Storage::Weight) && *dtype == DType::Bf16 && i < 32 {
            narrow |= 1 << i;
        }
        if let (Storage::Weight, DType::Packed(found)) = (slot.storage, *dtype) {
            packed = Some(found);
        }
        let factors = instance.terms.iter().map(|&(_, factor)| factor).chain([instance.base]);
        let mut starts = factors.map(|factor| factor * instance_bytes).chain([*base]);
        let row = slot.in_rows().map_or(0, |_| stride * dtype.bytes());
        if i < 64 && starts.all(|start| start.is_multiple_of(16)) && row.is_multiple_of(16) {
            wide |= 1 << i;
        }
    }
    (narrow, wide, packed)
}

/// The launches of all programs, in order, loops ignored.
fn launches<'p>(plan: &'p Plan, programs: &[Program], texts: Variant) -> Vec<PlanLaunch<'p>> {
    let all = programs.iter().flat_map(|program| &program.launches);
    let planned = all.map(|launch| {
        let kernel = plan.kernel(launch.kernel);
        let slots = kernel.signature();
        let (narrow, wide, packed) = types_and_alignment(&slots, launch);
        let any = slots.iter().position(|slot| slot.storage == Storage::Any);
        let element_bytes = match any.and_then(|i| launch.operands.get(i)) {
            Some(Place::Tensor { dtype, .. }) => dtype.bytes(),
            Some(Place::Index(_)) | None => 4,
        };
        PlanLaunch {
            id: launch.kernel,
            kernel,
            variant: Variant {
                element_bytes,
                in_place: launch.in_place,
                narrow,
                packed,
                aligned: narrow != 0 && u64::from(narrow) & !wide == 0,
                wide,
                places: launch.places.is_some(),
                ..texts
            },
        }
    });
    planned.collect()
}

/// Every distinct source of a plan for a GPU of an architecture, in the order of its launches.
/// [`distinct`] gives the texts; one may serve several sources.
pub fn sources(plan: &Plan, architecture: &str, limits: Limits) -> Result<Vec<Source>, DeviceError> {
    let of = Variant { limits, ..cache::texts(architecture) };
    let launches = launches(plan, &executor::list(plan)?, of);
    Ok(Sources::new("cuda", &launches, &Trust::default())?.list)
}

/// Numbers of the first sources of each text, and for each source which of these it shares its text
/// with. The texts are what `dreamc compile --emit cuda` prints and what a device compiles.
pub fn distinct(sources: &[Source]) -> (Vec<usize>, Vec<usize>) {
    let mut by_text: HashMap<&str, usize> = HashMap::new();
    let mut firsts = vec![];
    let texts = sources.iter().enumerate().map(|(i, source)| {
        *by_text.entry(&source.text).or_insert_with(|| {
            firsts.push(i);
            firsts.len() - 1
        })
    });
    let texts = texts.collect();
    (firsts, texts)
}

/// How a plan for a GPU of an architecture stores values where a recipe asks for `asked`.
pub fn narrow(asked: Precision, architecture: &str) -> Narrow {
    let narrow = Narrow::from(asked);
    if cache::texts(architecture).hopper { narrow.on_cores() } else { narrow }
}

/// Code of sources for an architecture (`compute_80` for PTX, `sm_90a` for machine code), from the
/// cache or into it.
pub fn codes(sources: &[&Source], target: Target, architecture: &str) -> Result<Vec<Vec<u8>>, DeviceError> {
    Compiler::new(target, architecture)?.compile(sources)
}

/// Registers of a thread of each entry of a source, by NVRTC for an architecture.
pub fn registers(source: &Source, architecture: &str) -> Result<HashMap<String, u32>, DeviceError> {
    let text = dreamc_nvrtc::Source { name: "kernel.cu", text: &source.text, headers: headers() };
    let architecture = format!("--gpu-architecture={architecture}");
    let compiled = Nvrtc::find()?.cubin(text, &[&architecture, "--ptxas-options=-v"])?;
    Ok(usage(&compiled.log).into_iter().map(|u| (u.entry, u.registers)).collect())
}

/// Use of registers of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Its name.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that it spills, stored and loaded.
    pub spilled: u32,
}

/// Registers and spilled bytes of each entry, from what `ptxas -v` says.
pub fn usage(log: &str) -> Vec<Usage> {
    let mut list: Vec<Usage> = vec![];
    let number = |text: &str| text.split_whitespace().next_back().and_then(|n| n.parse().ok()).unwrap_or(0);
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            let entry = name.split('\'').next().unwrap_or_default().into();
            list.push(Usage { entry, registers: 0, spilled: 0 });
        } else if let Some(entry) = list.last_mut() {
            for text in [" bytes spill stores", " bytes spill loads"] {
                entry.spilled += line.split_once(text).map_or(0, |(before, _)| number(before));
            }
            entry.registers = line.split_once(" registers").map_or(entry.registers, |(n, _)| number(n));
        }
    }
    list
}

/// Bytes outside the arena: scratch, and the status word.
pub(crate) fn scratch_bytes(
    device: &str,
    compiler: &Compiler,
    library: Option<&Library>,
    plan: &Plan,
) -> Result<u64, DeviceError> {
    let launches = launches(plan, &executor::list(plan)?, compiler.texts());
    let sources = Sources::new(device, &launches, &Trust::default())?;
    Ok(sources.scratch(&launches, library) + STATUS_BYTES + Room::of(plan).bytes())
}

/// The room after an arena begins at a multiple of this number of bytes, as tensors do.
const ALIGN: u64 = 256;

/// The status word's allocation, and what it holds where nothing was reported.
const STATUS_BYTES: u64 = 4;
const NOTHING: i32 = i32::MAX;

/// Loads a plan onto a GPU.
pub(crate) fn load<G: Gpu>(
    gpu: G,
    compiler: &Compiler,
    plan: &Plan,
    group: &Group,
    trust: &Trust,
) -> Result<Box<dyn Session>, DeviceError> {
    executor::load(plan, group, |programs| {
        let mut gpu = gpu;
        if programs.iter().any(|program| program.collective) {
            gpu.join(group)?;
        }
        let compile = |sources: &[&Source]| compiler.compile(sources);
        let (mut made, codes) = Generated::new(gpu, (compiler.texts(), trust), plan, programs, &compile)?;
        made.choose(compiler, plan, programs)?;
        Ok((made, codes))
    })
}

/// The text and the product of a launch.
pub(crate) struct Code {
    /// Which source; `None` where there is nothing to run.
    source: Option<usize>,
    /// Which product, where a library could compute it.
    product: Option<usize>,
}

/// Whether weights of a format stay as their file has them: packed ones, which kernels unpack.
/// Those in f32 or bf16 are taken as the plan has them.
pub(crate) fn maps(format: Format) -> bool {
    matches!(format.dtype, DType::Packed(_))
}

/// A plan's memory and kernels on a GPU.
pub(crate) struct Generated<G: Gpu> {
    products: Vec<DenseProduct<G>>,
    loaded: Loaded<G>,
    /// Instructions executed before the last launch.
    executed: u64,
}

/// Memory and code.
struct Loaded<G: Gpu> {
    gpu: G,
    /// One for each text, and which of them each source has.
    modules: Vec<G::Module>,
    texts: Vec<usize>,
    sources: Vec<Source>,
    memory: Memory,
    scratch_bytes: u64,
    /// Where numbers of exchanges under way are, after the arena.
    room: std::ops::Range<u64>,
}

/// Addresses of what a session has on a GPU.
#[derive(Clone, Copy)]
struct Memory {
    arena: u64,
    /// Weights as their file has them.
    mapped: u64,
    scratch: u64,
    status: u64,
}

/// A launch as its kernels see it.
#[derive(Clone, Copy)]
struct Given<'a> {
    /// Its number in the program's list.
    number: usize,
    values: &'a [Value],
    /// See [`Call::places`].
    places: Option<u64>,
    origin: &'a str,
    waited: bool,
}

impl<'a> From<&Call<'a>> for Given<'a> {
    fn from(call: &Call<'a>) -> Self {
        let Call { number, values, places, origin, waited, .. } = *call;
        Given { number, values, places, origin, waited }
    }
}

/// Compiles texts: the code of each.
type Compile<'a> = dyn Fn(&[&Source]) -> Result<Vec<Vec<u8>>, DeviceError> + 'a;

impl<G: Gpu> Generated<G> {
    /// Allocates and compiles; `compile` makes machine code, one for each text.
    fn new(
        mut gpu: G,
        (variant, trust): (Variant, &Trust),
        plan: &Plan,
        programs: &[Program],
        compile: &Compile,
    ) -> Result<(Self, Vec<Vec<Code>>), DeviceError> {
        let launches = launches(plan, programs, variant);
        let sources = Sources::new(gpu.name(), &launches, trust)?;
        let scratch_bytes = sources.scratch(&launches, gpu.library());
        // Where GPUs exchange, what is under way is in their memory.
        let first = plan.arena.next_multiple_of(ALIGN);
        let room = first..first + if gpu.exchange(vec![])? { Room::of(plan).bytes() } else { 0 };
        let arena = if room.is_empty() { plan.arena } else { room.end };
        // Memory first: what does not fit is known before anything is compiled.
        if let Some(free) = gpu.free()? {
            let pages =
                [arena, plan.mapped, scratch_bytes, STATUS_BYTES].map(|b| b.max(1).next_multiple_of(G::PAGE));
            let needed = pages.iter().sum::<u64>() + G::RESERVE;
            let beside = (scratch_bytes + STATUS_BYTES + room.end - room.start, plan.mapped);
            super::room::check(gpu.name(), plan, beside, needed, free)?;
        }
        let arena = gpu.allocate(arena, "arena")?;
        let mapped = if plan.mapped > 0 { gpu.allocate(plan.mapped, "packed weights")? } else { 0 };
        let scratch = gpu.allocate_scratch(scratch_bytes)?;
        let status = gpu.allocate(STATUS_BYTES, "status word")?;
        gpu.write(status, &NOTHING.to_le_bytes())?;
        let (firsts, texts) = distinct(&sources.list);
        let codes = compile(&firsts.iter().map(|&i| &sources.list[i]).collect::<Vec<_>>())?;
        let modules = firsts.iter().zip(&codes);
        let modules = modules.map(|(&i, c)| gpu.load(&sources.list[i], c)).collect::<Result<Vec<_>, _>>()?;
        let mut products = gpu.library().map(|_| Products::default());
        let mut planned = launches.iter();
        let mut codes = vec![];
        for (program, number) in programs.iter().zip(0..) {
            let ready =
                program.launches.iter().zip(&mut planned).enumerate().map(|(i, (launch, planned))| {
                    let source = sources.by_kernel.get(&(planned.id, planned.variant)).copied().flatten();
                    let dense = Dense::of(planned.kernel, &planned.variant).map(|d| d.at(&launch.operands));
                    let product = match (products.as_mut(), dense, source) {
                        (Some(products), Some(dense), Some(source)) => {
                            Some(products.number(dense, source, (number, i)))
                        }
                        _ => None,
                    };
                    Code { source, product }
                });
            codes.push(ready.collect());
        }
        let sources = sources.list;
        let memory = Memory { arena, mapped, scratch, status };
        let loaded = Loaded { gpu, modules, texts, sources, memory, scratch_bytes, room };
        Ok((Generated { products: products.map_or(vec![], |p| p.list), loaded, executed: 0 }, codes))
    }
}

impl Memory {
    fn address(&self, value: &Value) -> u64 {
        match value {
            Value::Tensor { at, .. } => self.place(*at),
            Value::Index(_) => 0,
        }
    }

    /// An address of the plan on the GPU.
    fn place(&self, at: u64) -> u64 {
        match at.checked_sub(MAPPED) {
            Some(at) => self.mapped + at,
            None => self.arena + at,
        }
    }

    fn argument(&self, given: &Given, iteration: u32, argument: Argument) -> Arg {
        let value = |i: usize| given.values.get(i);
        match argument {
            Argument::Operand(i) => Arg::Pointer(value(i).map_or(0, |v| self.address(v))),
            Argument::Stride(i) => Arg::I64(value(i).map_or(0, Value::stride) as i64),
            // The check has made sure that it fits.
            Argument::Index(i) => Arg::I32(value(i).map_or(0, Value::index) as i32),
            Argument::Places => Arg::Pointer(given.places.map_or(0, |at| self.arena + at)),
            Argument::Size(size) => Arg::I32(size as i32),
            Argument::Distance(distance) => Arg::I64(distance as i64),
            Argument::Scratch(at) => Arg::Pointer(self.scratch + at),
            Argument::Map(matrices) => {
                let (address, stride) = match matrices.base {
                    Base::Operand(i) => value(i).map_or((0, 0), |v| (self.address(v), v.stride())),
                    Base::Within(i, bytes) => {
                        value(i).map_or((0, 0), |v| (self.address(v) + bytes, v.stride()))
                    }
                    Base::Scratch(at) => (self.scratch + at, 0),
                };
                Arg::TensorMap(Box::new(tensor_map(address, matrices.stride.unwrap_or(stride), matrices)))
            }
            Argument::Status => Arg::Pointer(self.status),
            Argument::Launch => Arg::I32(given.number as i32),
            Argument::Iteration => Arg::I32(iteration as i32),
        }
    }

    /// The kernels of a source for a launch.
    fn launch<G: Gpu>(
        &self,
        gpu: &mut G,
        module: &G::Module,
        source: &Source,
        given: &Given,
    ) -> Result<(), DeviceError> {
        for iteration in 0..source.iterations {
            for pass in &source.passes {
                let args = pass.arguments.iter().map(|&a| self.argument(given, iteration, a)).collect();
                let launch = Launch {
                    kernel: pass.entry.clone(),
                    grid: [pass.grid, 1, 1],
                    block: [pass.block, 1, 1],
                    shared_bytes: pass.shared_bytes,
                    args,
                };
                let launched = gpu.launch(module, &launch, given.origin);
                let by = || format!("kernel {} ({})", source.name, pass.entry);
                waited(gpu, launched, given, by)?;
            }
        }
        Ok(())
    }
}

impl<G: Gpu> Loaded<G> {
    /// The kernels that were generated for a launch.
    fn generated(&mut self, source: usize, call: &Call) -> Result<(), DeviceError> {
        let module = &self.modules[self.texts[source]];
        self.memory.launch(&mut self.gpu, module, &self.sources[source], &call.into())
    }

    /// The same by the library.
    fn multiply(&mut self, product: &G::Product, call: &Call) -> Result<(), DeviceError> {
        let at = |i: usize| call.values.get(i).map_or(0, |value| self.memory.address(value));
        let operands = [at(0), at(1), at(2)];
        let launched = self.gpu.multiply(product, operands, self.memory.scratch, call.origin);
        let name = self.gpu.library().map_or_else(String::new, |library| library.name.clone());
        waited(&mut self.gpu, launched, &call.into(), || name)
    }
}

/// Where launches are waited for: whatever fails is of this one, as all before it were.
fn waited<G: Gpu>(
    gpu: &mut G,
    launched: Result<(), DeviceError>,
    given: &Given,
    by: impl FnOnce() -> String,
) -> Result<(), DeviceError> {
    if !given.waited {
        return launched;
    }
    launched.and_then(|()| gpu.finish()).map_err(|error| match error {
        DeviceError::Lost { device, what, words, .. } => {
            let launch = Some(format!("{}, {}", given.origin, by()));
            DeviceError::Lost { device, what, words, launch }
        }
        other => other,
    })
}

impl<G: Gpu> Backend for Generated<G> {
    type Code = Code;
    type Recording = G::Graph;

    const RECORDS: bool = G::RECORDS;
    const SYNCHRONOUS: bool = G::SYNCHRONOUS;
    const COPIES: bool = true;

    fn scratch_bytes(&self) -> u64 {
        let room = &self.loaded.room;
        self.loaded.scratch_bytes + STATUS_BYTES + room.end - room.start
    }

    fn room(&self) -> u64 {
        self.loaded.room.start
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.loaded.gpu.write(self.loaded.memory.arena + at, bytes)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.loaded.gpu.read(self.loaded.memory.place(at), bytes)
    }

    fn map(&mut self, at: u64, numbers: Mapped, dtype: DType) -> Result<(), DeviceError> {
        let bytes = numbers.bytes();
        // Kernels take scales as they are: what is no number is refused here.
        if let DType::Packed(packed) = dtype
            && let Some(block) = packed.bad(bytes)
        {
            let path = numbers.file.path().into();
            return Err(DeviceError::BadScale { path, tensor: numbers.name.to_string(), block });
        }
        self.loaded.gpu.write(self.loaded.memory.place(at), bytes)?;
        let changed = |problem| DeviceError::FileChanged { path: numbers.file.path().into(), problem };
        numbers.file.unchanged().map_err(changed)
    }

    fn launch(&mut self, code: &Code, call: &Call) -> Result<(), DeviceError> {
        self.executed = self.loaded.gpu.instructions();
        match (code.product.and_then(|i| self.products[i].product.as_ref()), code.source) {
            (Some(product), _) => self.loaded.multiply(product, call),
            (None, Some(source)) => self.loaded.generated(source, call),
            (None, None) => Ok(()),
        }
    }

    fn collective(&mut self, what: Collective, at: u64) -> Result<bool, DeviceError> {
        let arena = self.loaded.memory.arena;
        let address = |number: u64| arena + at + number * DType::F32.bytes();
        // Parts in their places, but for where this rank has its own.
        let of = |parts: &Parts, what: fn(u64) -> Exchanged, own: Option<u64>| {
            let each = (0..parts.ranks()).map(|rank| (rank, parts.of(rank)));
            let some = each.filter(|(_, (_, count))| *count > 0);
            some.map(|(rank, (first, count))| {
                let to = address(first);
                let from = own.filter(|_| rank == parts.rank).map_or(to, |own| arena + own);
                Exchange { what: what(rank), from, to, count }
            })
            .collect()
        };
        let whole = |what, count| vec![Exchange { what, from: address(0), to: address(0), count }];
        let list = match what {
            Collective::Sum(sum) => whole(Exchanged::Sum, sum.elements),
            Collective::Pooled(pooled) => whole(Exchanged::SumAmong(pooled.owners.team), pooled.elements),
            Collective::Scatter(scatter, first) => {
                of(&scatter.parts.within(first, scatter.elements), Exchanged::SumOn, None)
            }
            Collective::Gather(parts) => of(parts, Exchanged::From, None),
            Collective::Gathered(gathered, away) => {
                let parts = gathered.parts.within(away.first(), gathered.elements);
                let own = away.place(&gathered.parts, &parts, 0);
                of(&parts, Exchanged::From, Some(own))
            }
            // The sum of this rank's part is left in the window, which is read no more.
            Collective::Scattered(scattered, away) => {
                of(&scattered.parts.within(away.first(), scattered.elements), Exchanged::SumOn, None)
            }
            // How many rows go where is in memory.
            Collective::Sent(..) | Collective::Returned(..) => return Ok(false),
        };
        self.loaded.gpu.exchange(list)
    }

    fn pass(&mut self, list: &[Pass]) -> Result<bool, DeviceError> {
        let arena = self.loaded.memory.arena;
        let of = |pass: &Pass| {
            let what = if pass.comes { Exchanged::Of(pass.rank) } else { Exchanged::To(pass.rank) };
            Exchange { what, from: arena + pass.at, to: arena + pass.at, count: pass.bytes }
        };
        self.loaded.gpu.exchange(list.iter().map(of).collect())
    }

    fn joined(&mut self) -> Result<f64, DeviceError> {
        self.loaded.gpu.exchanged()
    }

    fn begun(&self) -> u64 {
        self.loaded.gpu.begun()
    }

    fn after(&mut self, number: u64) -> Result<(), DeviceError> {
        self.loaded.gpu.after(number)
    }

    fn until(&mut self, number: u64) -> Result<(), DeviceError> {
        self.loaded.gpu.until(number)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        let arena = self.loaded.memory.arena;
        if bytes == 0 { Ok(()) } else { self.loaded.gpu.copy(arena + from, arena + to, bytes) }
    }

    fn zero(&mut self, at: u64, bytes: u64) -> Result<(), DeviceError> {
        if bytes == 0 { Ok(()) } else { self.loaded.gpu.zero(self.loaded.memory.arena + at, bytes) }
    }

    fn work(&mut self, call: &Call) -> Result<Work, DeviceError> {
        let read = |at: u64, count: u64| -> Result<Vec<i32>, DeviceError> {
            let mut bytes = vec![0; 4 * count as usize];
            self.read(at, &mut bytes)?;
            Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let integers =
            |operand: usize, count: u64| read(call.values.get(operand).map_or(0, Value::at), count);
        let needed = |rows: u64| match call.places {
            Some(places) => Ok(read(places, rows)?.iter().filter(|p| **p >= 0).count() as u64),
            None => Ok(rows),
        };
        let index = |operand: usize| call.values.get(operand).map_or(0, Value::index);
        Ok(Work {
            multiply_adds: call.kernel.work().found(&Found {
                integers: &integers,
                index: &index,
                needed: &needed,
            })?,
            instructions: self.loaded.gpu.instructions() - self.executed,
        })
    }

    fn bad_index(&mut self) -> Result<Option<usize>, DeviceError> {
        let (gpu, status) = (&mut self.loaded.gpu, self.loaded.memory.status);
        let mut word = [0; 4];
        gpu.read(status, &mut word)?;
        let number = i32::from_le_bytes(word);
        if number == NOTHING {
            return Ok(None);
        }
        gpu.write(status, &NOTHING.to_le_bytes())?;
        Ok(Some(usize::try_from(number).unwrap_or(usize::MAX)))
    }

    fn mark(&mut self, number: usize) -> Result<bool, DeviceError> {
        self.loaded.gpu.mark(number)
    }

    fn between(&mut self, from: usize, to: usize) -> Result<f64, DeviceError> {
        self.loaded.gpu.between(from, to)
    }

    fn record(&mut self) -> Result<(), DeviceError> {
        self.loaded.gpu.record()
    }

    fn recorded(&mut self) -> Result<G::Graph, DeviceError> {
        self.loaded.gpu.recorded()
    }

    fn replay(&mut self, graph: &G::Graph) -> Result<(), DeviceError> {
        self.loaded.gpu.replay(graph)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.loaded.gpu.finish()
    }

    fn choice(&self, code: &Code) -> Option<&Choice> {
        self.products.get(code.product?).map(|p| &p.choice)
    }
}

/// Matrices of bf16 in the form of the copy engine.
fn tensor_map(address: u64, stride: u64, m: Matrices) -> TensorMap {
    TensorMap {
        address,
        element_bytes: 2,
        extents: vec![m.row, m.rows, m.count],
        strides: vec![2 * stride, 2 * stride * m.rows],
        tile: vec![Matrices::ROW, m.box_rows, 1],
        swizzle: Swizzle::Bytes128,
    }
}

/// The blocks that texts include: the program's, or files of their names in the folder that
/// `DREAMC_KERNELS` names, which try a change of a kernel without a build.
pub(super) fn headers() -> &'static [(&'static str, &'static str)] {
    static FOUND: std::sync::OnceLock<Vec<(&'static str, &'static str)>> = std::sync::OnceLock::new();
    FOUND.get_or_init(|| {
        let Some(folder) = std::env::var_os("DREAMC_KERNELS").map(std::path::PathBuf::from) else {
            return HEADERS.to_vec();
        };
        let mut taken = vec![];
        let block = |&(name, text): &(&'static str, &'static str)| match std::fs::read_to_string(folder.join(name)) {
            Ok(other) => {
                taken.push(name);
                (name, &*other.leak())
            }
            Err(_) => (name, text),
        };
        let all: Vec<(&'static str, &'static str)> = HEADERS.iter().map(block).collect();
        let place = folder.display();
        match taken.is_empty() {
            true => notice(&format!(
                "DREAMC_KERNELS: {place} has no block of a kernel that can be read, such as {}; the program's own are used",
                HEADERS.first().map_or("product.cuh", |(name, _)| name)
            )),
            false => notice(&format!("kernels are made of {} of {place}", taken.join(", "))),
        }
        all
    })
}
