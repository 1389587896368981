//! The driver's state and rules, without its C interface.
//!
//! Documentation that the rules are from, in NVIDIA's *CUDA Driver API* (13.0): "API
//! synchronization behavior", "Stream synchronization behavior", and the pages of the calls named;
//! in the *CUDA Programming Guide*: "CUDA Graphs", "Lazy Loading", and the table of compute
//! capabilities. Where it leaves something open, what is worse for the caller was taken:
//!
//! - Asynchronous copies between a device and pageable memory "might be synchronous with respect to
//!   host": they are not. Host memory is read and written when the stream is waited for, and what
//!   changed in between is complained about.
//! - A kernel's first launch "may require context synchronization" (Lazy Loading): not inside a
//!   capture.
//! - Memory is handed out in pages of 2 MiB and holds what nobody wrote.
//! - An error of work comes out where something waits for it, and from every later call but those
//!   that let go of things.

use crate::cublaslt::{Description, EXECUTION_FAILED, Layout, Library, NOT_INITIALIZED, compute};
use crate::library::Status;
use crate::nccl::{self, Collective, Comm};
use crate::order::{Flight, Known, Range};
use crate::settings::Spoil;
use crate::{CUBIN, Settings};
use cudarc::driver::sys::CUresult;
use dreamc_ptx::{self as ptx, Arg, Checks, Kind, Launch, Memory, Module};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

/// The result of a call.
pub type Outcome<T> = Result<T, CUresult>;

/// Memory is given in such pieces.
const PAGE: u64 = 2 << 20;
/// Shared memory of a block that needs no leave, static and dynamic together.
const SHARED: u32 = 48 * 1024;
/// Microseconds that any kernel takes by the clock of events.
const KERNEL: u64 = 1000;
/// The legacy default stream.
const LEGACY: u64 = 0;

/// How a capture meets calls that it cannot see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They are forbidden to every thread.
    Global,
    /// They are forbidden to the thread that began it.
    ThreadLocal,
    /// They are allowed.
    Relaxed,
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes.
    pub shared: u32,
}

/// State of all contexts: settings, counts, and the log.
struct Shared {
    settings: Settings,
    counts: Mutex<BTreeMap<String, u64>>,
    log: Mutex<(Option<File>, Vec<String>)>,
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Shared {
    /// Counts something; the code that was ordered for it.
    fn count(&self, what: &str) -> Outcome<()> {
        self.ordered(what).map_err(result)
    }

    /// The same with a code of whatever library.
    fn ordered(&self, what: &str) -> Result<(), u32> {
        let number = {
            let mut counts = held(&self.counts);
            let count = counts.entry(what.into()).or_insert(0);
            *count += 1;
            *count
        };
        match self.settings.faults.iter().find(|f| f.call == what && f.number == number) {
            Some(fault) => {
                self.say(format!("fault: {what} {number} gives {}", fault.code));
                Err(fault.code)
            }
            None => Ok(()),
        }
    }

    fn say(&self, line: String) {
        let mut log = held(&self.log);
        if let Some(file) = &mut log.0 {
            // Whole lines, as processes share a log; one that cannot be written fails the test that
            // reads it.
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
        log.1.push(line);
    }

    /// A rule that the caller broke, or bad manners.
    fn complain(&self, what: String) {
        self.say(format!("complaint: {what}"));
    }
}

/// A code of `cuda.h`; an unknown one is `CUDA_ERROR_UNKNOWN`.
pub fn result(code: u32) -> CUresult {
    use CUresult::*;
    let known = [
        CUDA_SUCCESS,
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NOT_INITIALIZED,
        CUDA_ERROR_STUB_LIBRARY,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_INVALID_DEVICE,
        CUDA_ERROR_INVALID_IMAGE,
        CUDA_ERROR_INVALID_CONTEXT,
        CUDA_ERROR_NO_BINARY_FOR_GPU,
        CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_ILLEGAL_STATE,
        CUDA_ERROR_NOT_FOUND,
        CUDA_ERROR_NOT_READY,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_NOT_SUPPORTED,
        CUDA_ERROR_SYSTEM_NOT_READY,
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    ];
    known.into_iter().find(|&k| k as u32 == code).unwrap_or(CUDA_ERROR_UNKNOWN)
}

/// Errors that leave the context "in an inconsistent state", after which "any further CUDA work
/// will return the same error".
fn sticky(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_UNKNOWN
    )
}

/// The driver as a process has it.
pub struct Machine {
    shared: Arc<Shared>,
    initialised: bool,
    devices: Vec<Device>,
    current: HashMap<ThreadId, u64>,
    /// The part of cuBLASLt outside of contexts.
    pub(crate) library: Library,
    /// The part of NCCL outside of contexts.
    pub(crate) nccl: nccl::State,
}

/// A card: its primary context and how often that is retained.
#[derive(Default)]
struct Device {
    retained: u64,
    context: Option<Context>,
}

/// A primary context and everything in it.
pub struct Context {
    shared: Arc<Shared>,
    device: usize,
    memory: Memory,
    /// Bytes by address.
    allocations: BTreeMap<u64, u64>,
    used: u64,
    /// The most bytes that were asked for at a time, before they became pages.
    most: u64,
    streams: HashMap<u64, Stream>,
    modules: HashMap<u64, Arc<Module>>,
    functions: HashMap<u64, Function>,
    graphs: HashMap<u64, Arc<Vec<Work>>>,
    executables: HashMap<u64, Arc<Vec<Work>>>,
    /// The clock when each was reached.
    events: HashMap<u64, Option<u64>>,
    /// Events that were asked for, by the number of the work that reaches them.
    asked: HashSet<(u64, u64)>,
    /// By each event the work before its last record, and all that came before that.
    records: HashMap<u64, Known>,
    /// By each thread the work that it has seen done.
    seen: HashMap<ThreadId, Known>,
    /// Exchanges that some work may not come after, and of work that was given meanwhile what that
    /// comes after.
    flights: Vec<Flight>,
    orders: HashMap<u64, Known>,
    /// Waits of streams that compute.
    waits: u64,
    /// Of cuBLASLt.
    libraries: HashSet<u64>,
    dead: HashSet<u64>,
    handles: u64,
    /// Order in which work was given.
    given: u64,
    /// Microseconds of work done.
    clock: u64,
    broken: Option<CUresult>,
    /// A kernel runs that does not end.
    hung: bool,
}

#[derive(Default)]
struct Stream {
    blocking: bool,
    /// Whether kernels were given to it.
    computes: bool,
    /// The work on other streams that comes before all that is given to it now.
    known: Known,
    queue: VecDeque<(u64, Work)>,
    capture: Option<Capture>,
}

struct Capture {
    mode: Mode,
    thread: ThreadId,
    work: Vec<Work>,
    valid: bool,
}

struct Function {
    module: u64,
    kernel: String,
    /// Dynamic shared memory that it may have.
    allowed: u32,
    launched: bool,
}

/// Something to do later. Host memory is at an address of the caller's.
#[derive(Clone)]
enum Work {
    Launch {
        function: u64,
        launch: Launch,
    },
    Set {
        at: u64,
        value: u8,
        bytes: u64,
    },
    ToDevice {
        at: u64,
        from: usize,
        was: Arc<[u8]>,
    },
    ToHost {
        to: usize,
        at: u64,
        bytes: usize,
    },
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    Replay(Arc<Vec<Work>>),
    Record(u64),
    Product(Arc<Product>),
    /// Waits for the work of that number on another stream.
    Behind {
        stream: u64,
        given: u64,
    },
    Exchange(Arc<Collective>),
}

impl Work {
    /// A few words for the log.
    fn words(&self) -> String {
        match self {
            Work::Launch { launch, .. } => format!("kernel {}", launch.kernel),
            Work::Set { .. } => "set".into(),
            Work::ToDevice { .. } => "copy to the device".into(),
            Work::ToHost { .. } => "copy to the host".into(),
            Work::Copy { .. } => "copy".into(),
            Work::Replay(list) => format!("replay of {}", list.len()),
            Work::Record(event) => format!("record {event:#x}"),
            Work::Product(_) => "product".into(),
            Work::Behind { .. } => "behind".into(),
            Work::Exchange(_) => "exchange".into(),
        }
    }

    /// Memory that it reads, and that it writes, where that is known.
    fn ranges(&self) -> Option<(Vec<Range>, Vec<Range>)> {
        match self {
            Work::Set { at, bytes, .. } => Some((vec![], vec![(*at, *bytes)])),
            Work::ToDevice { at, was, .. } => Some((vec![], vec![(*at, was.len() as u64)])),
            Work::ToHost { at, bytes, .. } => Some((vec![(*at, *bytes as u64)], vec![])),
            Work::Copy { to, from, bytes } => Some((vec![(*from, *bytes)], vec![(*to, *bytes)])),
            Work::Launch { .. }
            | Work::Replay(_)
            | Work::Record(_)
            | Work::Product(_)
            | Work::Behind { .. }
            | Work::Exchange(_) => None,
        }
    }
}

/// A product of cuBLASLt's, `D = alpha · op(A) · op(B) + beta · C`.
pub struct Product {
    /// The computation.
    pub description: Description,
    /// A, B, C and D.
    pub layouts: [Layout; 4],
    /// Of the same.
    pub addresses: [u64; 4],
    /// The factor of the product.
    pub alpha: f32,
    /// The factor of what is added to.
    pub beta: f32,
    /// Address and bytes of what the algorithm needs.
    pub workspace: (u64, u64),
    /// Whether parts of sums may be added up in the result's type.
    pub coarse: bool,
}

impl Machine {
    /// One with these settings.
    pub fn new(settings: Settings) -> Self {
        let file = settings
            .log
            .as_ref()
            .and_then(|path| std::fs::OpenOptions::new().create(true).append(true).open(path).ok());
        let devices = (0..settings.cards).map(|_| Device::default()).collect();
        let shared = Shared { settings, counts: Mutex::default(), log: Mutex::new((file, vec![])) };
        let library = Library::default();
        let nccl = nccl::State::default();
        Machine {
            shared: Arc::new(shared),
            initialised: false,
            devices,
            current: HashMap::new(),
            library,
            nccl,
        }
    }

    /// The log so far.
    pub fn log(&self) -> Vec<String> {
        held(&self.shared.log).1.clone()
    }

    fn call(&mut self, name: &str) -> Outcome<()> {
        if !self.initialised && name != "cuInit" {
            self.shared.complain(format!("{name} before cuInit"));
            return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
        }
        let done = self.shared.count(name);
        if let Err(code) = done
            && sticky(code)
            && let Ok(context) = self.current()
        {
            context.broken = Some(code);
        }
        done
    }

    fn current(&mut self) -> Outcome<&mut Context> {
        let handle = self.current.get(&thread::current().id()).copied();
        let handle = handle.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        let device = (handle >> 32) as usize;
        let context = self.devices.get_mut(device).and_then(|d| d.context.as_mut());
        context.filter(|c| c.handle() == handle).ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)
    }

    /// The context of this thread, for a call that fails where the context is broken.
    fn context(&mut self, name: &str) -> Outcome<&mut Context> {
        self.call(name)?;
        let shared = self.shared.clone();
        let context = self.current().inspect_err(|_| {
            shared.complain(format!("{name} on a thread without a current context"));
        })?;
        context.broken.map_or(Ok(()), Err)?;
        Ok(context)
    }

    /// `cuTensorMapEncodeTiled`, whose arguments the caller looks at: the host's work alone, which
    /// a capture does not mind.
    pub fn encode(&mut self) -> Outcome<()> {
        self.context("cuTensorMapEncodeTiled").map(|_| ())
    }

    /// `cuInit`
    pub fn init(&mut self, flags: u32) -> Outcome<()> {
        self.call("cuInit")?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if self.devices.is_empty() {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        self.initialised = true;
        Ok(())
    }

    /// `cuDriverGetVersion`, which may come before everything.
    pub fn version(&self) -> i32 {
        self.shared.settings.version
    }

    /// `cuDeviceGetCount`
    pub fn count(&mut self) -> Outcome<i32> {
        self.call("cuDeviceGetCount")?;
        Ok(self.devices.len() as i32)
    }

    /// A device's number, where there is such a device.
    fn device(&mut self, name: &str, number: i32) -> Outcome<usize> {
        self.call(name)?;
        let device = usize::try_from(number).ok().filter(|&n| n < self.devices.len());
        device.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
    }

    /// `cuDeviceGet`
    pub fn get(&mut self, number: i32) -> Outcome<i32> {
        self.device("cuDeviceGet", number).map(|n| n as i32)
    }

    /// `cuDeviceGetName`
    pub fn name(&mut self, device: i32) -> Outcome<String> {
        self.device("cuDeviceGetName", device)?;
        let (major, minor) = self.shared.settings.card;
        Ok(format!("stand-in for sm_{major}{minor}"))
    }

    /// `cuDeviceGetAttribute`, of those that anyone asked for so far.
    pub fn attribute(&mut self, attribute: u32, device: i32) -> Outcome<i32> {
        self.device("cuDeviceGetAttribute", device)?;
        let (major, minor) = self.shared.settings.card;
        match attribute {
            16 => Ok(self.shared.settings.processors as i32),
            75 => Ok(major as i32),
            76 => Ok(minor as i32),
            97 => Ok(self.shared.settings.shared_limit() as i32),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// `cuDevicePrimaryCtxRetain`
    pub fn retain(&mut self, device: i32) -> Outcome<u64> {
        let number = self.device("cuDevicePrimaryCtxRetain", device)?;
        let device = &mut self.devices[number];
        device.retained += 1;
        let new = || Context {
            shared: self.shared.clone(),
            device: number,
            memory: Memory::new(),
            allocations: BTreeMap::new(),
            used: 0,
            most: 0,
            streams: HashMap::from([(LEGACY, Stream { blocking: true, ..Stream::default() })]),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            events: HashMap::new(),
            asked: HashSet::new(),
            records: HashMap::new(),
            seen: HashMap::new(),
            flights: vec![],
            orders: HashMap::new(),
            waits: 0,
            libraries: HashSet::new(),
            dead: HashSet::new(),
            handles: 0,
            given: 0,
            clock: 0,
            broken: None,
            hung: false,
        };
        Ok(device.context.get_or_insert_with(new).handle())
    }

    /// `cuDevicePrimaryCtxRelease`: the last one ends the context, and says what was left in it.
    pub fn release(&mut self, device: i32) -> Outcome<()> {
        let number = self.device("cuDevicePrimaryCtxRelease", device)?;
        let device = &mut self.devices[number];
        if device.retained == 0 {
            self.shared.complain("a primary context is released more often than retained".into());
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        device.retained -= 1;
        if device.retained == 0
            && let Some(context) = device.context.take()
        {
            let described = self.library.left();
            if described > 0 && context.broken.is_none() {
                self.shared.complain(format!("left of cuBLASLt's descriptions: {described}"));
            }
            let communicators = self.nccl.left();
            if communicators > 0 && context.broken.is_none() {
                self.shared.complain(format!("left of NCCL's communicators: {communicators}"));
            }
            context.end();
        }
        Ok(())
    }

    /// The context of this thread, where it has one.
    pub(crate) fn current_context(&mut self) -> Option<u64> {
        self.current().ok().map(|context| context.handle())
    }

    /// Whether a range is inside an allocation of this thread's context.
    pub(crate) fn holds(&mut self, at: u64, bytes: u64) -> bool {
        self.current().is_ok_and(|context| context.inside(at, bytes).is_ok())
    }

    /// Whether work of a communicator is under way.
    pub(crate) fn gave(&mut self, comm: &Arc<Comm>) -> bool {
        let of = |work: &Work| matches!(work, Work::Exchange(collective) if collective.is_of(comm));
        self.current()
            .is_ok_and(|context| context.streams.values().flat_map(|s| &s.queue).any(|(_, work)| of(work)))
    }

    /// Puts a collective of NCCL's on a stream.
    pub(crate) fn give_exchange(&mut self, stream: u64, collective: Arc<Collective>) -> Outcome<()> {
        let context = self.current()?;
        context.broken.map_or(Ok(()), Err)?;
        context.give_exchange(stream, collective)
    }

    /// `cuCtxSetCurrent`; 0 is no context.
    pub fn set_current(&mut self, context: u64) -> Outcome<()> {
        self.call("cuCtxSetCurrent")?;
        let thread = thread::current().id();
        if context == 0 {
            self.current.remove(&thread);
            return Ok(());
        }
        let live = self.devices.iter().flat_map(|d| &d.context).any(|c| c.handle() == context);
        if !live {
            self.shared.complain("cuCtxSetCurrent of a context that is not".into());
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        self.current.insert(thread, context);
        Ok(())
    }

    /// `cuMemGetInfo`: free and all.
    pub fn info(&mut self) -> Outcome<(u64, u64)> {
        let all = self.shared.settings.memory;
        Ok((all - self.context("cuMemGetInfo")?.used, all))
    }

    /// `cuMemAlloc`
    pub fn alloc(&mut self, bytes: u64) -> Outcome<u64> {
        self.context("cuMemAlloc")?.alloc(bytes)
    }

    /// `cuMemFree`
    pub fn free(&mut self, address: u64) -> Outcome<()> {
        self.context("cuMemFree")?.free(address)
    }

    /// `cuMemsetD8Async`
    pub fn set(&mut self, at: u64, value: u8, bytes: u64, stream: u64) -> Outcome<()> {
        let context = self.context("cuMemsetD8Async")?;
        context.inside(at, bytes)?;
        context.give(stream, Work::Set { at, value, bytes })
    }

    /// `cuMemcpyHtoDAsync`
    ///
    /// # Safety
    /// `bytes` bytes at `from` can be read until something has waited for the stream.
    pub unsafe fn to_device(&mut self, at: u64, from: *const u8, bytes: usize, stream: u64) -> Outcome<()> {
        let context = self.context("cuMemcpyHtoDAsync")?;
        context.inside(at, bytes as u64)?;
        context.waits_for_no_exchange("cuMemcpyHtoDAsync", stream);
        // SAFETY: by the caller's promise.
        let was = unsafe { std::slice::from_raw_parts(from, bytes) }.into();
        context.give(stream, Work::ToDevice { at, from: from as usize, was })
    }

    /// `cuMemcpyDtoHAsync`
    ///
    /// # Safety
    /// `bytes` bytes at `to` can be written until something has waited for the stream.
    pub unsafe fn to_host(&mut self, to: *mut u8, at: u64, bytes: usize, stream: u64) -> Outcome<()> {
        let context = self.context("cuMemcpyDtoHAsync")?;
        context.inside(at, bytes as u64)?;
        context.waits_for_no_exchange("cuMemcpyDtoHAsync", stream);
        context.give(stream, Work::ToHost { to: to as usize, at, bytes })
    }

    /// `cuMemcpyDtoDAsync`
    pub fn copy(&mut self, to: u64, from: u64, bytes: u64, stream: u64) -> Outcome<()> {
        let context = self.context("cuMemcpyDtoDAsync")?;
        context.inside(to, bytes)?;
        context.inside(from, bytes)?;
        context.give(stream, Work::Copy { to, from, bytes })
    }

    /// `cuStreamCreate`
    pub fn stream(&mut self, flags: u32) -> Outcome<u64> {
        let context = self.context("cuStreamCreate")?;
        if flags > 1 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = context.new_handle();
        context.streams.insert(handle, Stream { blocking: flags == 0, ..Stream::default() });
        Ok(handle)
    }

    /// `cuStreamSynchronize`
    pub fn wait(&mut self, stream: u64) -> Outcome<()> {
        self.context("cuStreamSynchronize")?.wait(stream)
    }

    /// `cuStreamDestroy`
    pub fn destroy_stream(&mut self, stream: u64) -> Outcome<()> {
        self.context("cuStreamDestroy")?.destroy_stream(stream)
    }

    /// `cuStreamBeginCapture`
    pub fn begin(&mut self, stream: u64, mode: Mode) -> Outcome<()> {
        self.context("cuStreamBeginCapture")?.begin(stream, mode)
    }

    /// `cuStreamEndCapture`
    pub fn end(&mut self, stream: u64) -> Outcome<u64> {
        match self.context("cuStreamEndCapture") {
            Ok(context) => context.end_capture(stream),
            Err(code) => {
                // A capture that cannot become a graph is over all the same.
                if let Some(s) = self.current().ok().and_then(|context| context.streams.get_mut(&stream)) {
                    s.capture = None;
                }
                Err(code)
            }
        }
    }

    /// `cuGraphInstantiate`
    pub fn instantiate(&mut self, graph: u64, flags: u64) -> Outcome<u64> {
        let context = self.context("cuGraphInstantiate")?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let work = context.find(&context.graphs, graph, "graph")?.clone();
        let handle = context.new_handle();
        context.executables.insert(handle, work);
        Ok(handle)
    }

    /// `cuGraphLaunch`
    pub fn replay(&mut self, executable: u64, stream: u64) -> Outcome<()> {
        let context = self.context("cuGraphLaunch")?;
        let work = context.find(&context.executables, executable, "executable graph")?.clone();
        context.give(stream, Work::Replay(work))
    }

    /// `cuGraphDestroy`
    pub fn destroy_graph(&mut self, graph: u64) -> Outcome<()> {
        let context = self.context("cuGraphDestroy")?;
        context.find(&context.graphs, graph, "graph")?;
        context.graphs.remove(&graph);
        context.dead.insert(graph);
        Ok(())
    }

    /// `cuGraphExecDestroy`
    pub fn destroy_executable(&mut self, executable: u64) -> Outcome<()> {
        let context = self.context("cuGraphExecDestroy")?;
        context.find(&context.executables, executable, "executable graph")?;
        context.executables.remove(&executable);
        context.dead.insert(executable);
        Ok(())
    }

    /// `cuModuleLoadData`
    pub fn load(&mut self, image: &[u8]) -> Outcome<u64> {
        self.context("cuModuleLoadData")?.load(image)
    }

    /// `cuModuleUnload`
    pub fn unload(&mut self, module: u64) -> Outcome<()> {
        let context = self.context("cuModuleUnload")?;
        context.unseen("cuModuleUnload")?;
        context.find(&context.modules, module, "module")?;
        context.modules.remove(&module);
        context.dead.insert(module);
        let (gone, rest) =
            std::mem::take(&mut context.functions).into_iter().partition(|f| f.1.module == module);
        context.functions = rest;
        context.dead.extend::<Vec<u64>>(HashMap::<u64, Function>::into_keys(gone).collect());
        Ok(())
    }

    /// `cuModuleGetFunction`
    pub fn function(&mut self, module: u64, kernel: &str) -> Outcome<u64> {
        let context = self.context("cuModuleGetFunction")?;
        let signature = context.find(&context.modules, module, "module")?.signature(kernel);
        let fixed = signature.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?.shared_bytes;
        let handle = context.new_handle();
        let allowed = SHARED.saturating_sub(fixed);
        context
            .functions
            .insert(handle, Function { module, kernel: kernel.into(), allowed, launched: false });
        Ok(handle)
    }

    /// `cuFuncSetAttribute` of the dynamic shared memory that a kernel may have.
    pub fn allow_shared(&mut self, function: u64, attribute: u32, bytes: i32) -> Outcome<()> {
        let limit = self.shared.settings.shared_limit();
        let context = self.context("cuFuncSetAttribute")?;
        let (module, kernel) = {
            let f = context.find(&context.functions, function, "function")?;
            (f.module, f.kernel.clone())
        };
        let fixed =
            context.modules.get(&module).and_then(|m| m.signature(&kernel)).map_or(0, |s| s.shared_bytes);
        let bytes = u32::try_from(bytes).ok().filter(|b| attribute == 8 && b.saturating_add(fixed) <= limit);
        let bytes = bytes.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if let Some(function) = context.functions.get_mut(&function) {
            function.allowed = bytes;
        }
        Ok(())
    }

    /// Sizes of a kernel's parameters: what [`Machine::launch`] takes as many arguments of.
    pub fn parameters(&mut self, function: u64) -> Outcome<Vec<u32>> {
        let context = self.current()?;
        let f = context.find(&context.functions, function, "function")?;
        let signature = context.modules.get(&f.module).and_then(|m| m.signature(&f.kernel));
        signature.map(|s| s.params).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)
    }

    /// `cuEventCreate`
    pub fn event(&mut self, flags: u32) -> Outcome<u64> {
        let context = self.context("cuEventCreate")?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = context.new_handle();
        context.events.insert(handle, None);
        Ok(handle)
    }

    /// `cuEventRecord`
    pub fn record_event(&mut self, event: u64, stream: u64) -> Outcome<()> {
        let context = self.context("cuEventRecord")?;
        context.find(&context.events, event, "event")?;
        context.give(stream, Work::Record(event))?;
        context.records_event(event, stream);
        Ok(())
    }

    /// `cuStreamWaitEvent`: later work waits for the work before the event's last record.
    pub fn wait_event(&mut self, stream: u64, event: u64, flags: u32) -> Outcome<()> {
        let context = self.context("cuStreamWaitEvent")?;
        context.find(&context.events, event, "event")?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if context.waits_for(event, stream) {
            return Ok(());
        }
        match context.recorded(event) {
            Some((of, given)) => context.give(stream, Work::Behind { stream: of, given }),
            None => Ok(()),
        }
    }

    /// `cuEventQuery`: an event that is to come is not there at the first look.
    pub fn query_event(&mut self, event: u64) -> Outcome<()> {
        let context = self.context("cuEventQuery")?;
        context.find(&context.events, event, "event")?;
        context.unseen("cuEventQuery")?;
        let Some((stream, given)) = context.recorded(event) else {
            context.sees(event);
            return Ok(());
        };
        if !context.asked.insert((event, given)) {
            context.drain(stream, given);
            context.broken.map_or(Ok(()), Err)?;
        }
        match context.recorded(event) {
            Some(_) => Err(CUresult::CUDA_ERROR_NOT_READY),
            None => {
                context.sees(event);
                Ok(())
            }
        }
    }

    /// `cuEventElapsedTime`, in milliseconds: "CUDA_ERROR_NOT_READY" where the work before one of
    /// them is not done.
    pub fn elapsed(&mut self, begin: u64, end: u64) -> Outcome<f32> {
        let context = self.context("cuEventElapsedTime")?;
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([begin, end]) {
            let reached = *context.find(&context.events, event, "event")?;
            let waiting = |w: &(u64, Work)| matches!(w.1, Work::Record(e) if e == event);
            if context.streams.values().flat_map(|s| &s.queue).any(waiting) {
                context.shared.complain("the time of an event that nobody waited for".into());
                return Err(CUresult::CUDA_ERROR_NOT_READY);
            }
            *time = reached.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        }
        Ok((times[1] as f32 - times[0] as f32) / 1e3)
    }

    /// `cuEventDestroy`
    pub fn destroy_event(&mut self, event: u64) -> Outcome<()> {
        let context = self.context("cuEventDestroy")?;
        context.find(&context.events, event, "event")?;
        context.events.remove(&event);
        context.dead.insert(event);
        Ok(())
    }

    /// Counts a call of cuBLASLt's.
    pub(crate) fn ask(&mut self, name: &str) -> Status<()> {
        self.shared.ordered(name)
    }

    pub(crate) fn complain(&self, what: String) {
        self.shared.complain(what);
    }

    /// `cublasLtCreate`: in the context of this thread.
    pub fn create_library(&mut self) -> Status<u64> {
        self.ask("cublasLtCreate")?;
        let shared = self.shared.clone();
        let Ok(context) = self.current() else {
            shared.complain("cublasLtCreate on a thread without a current context".into());
            return Err(NOT_INITIALIZED);
        };
        context.unseen("cublasLtCreate").map_err(|_| NOT_INITIALIZED)?;
        let handle = context.new_handle();
        context.libraries.insert(handle);
        Ok(handle)
    }

    /// `cublasLtDestroy`
    pub fn destroy_library(&mut self, handle: u64) -> Status<()> {
        self.ask("cublasLtDestroy")?;
        self.of_this_context(handle)?;
        if let Ok(context) = self.current() {
            context.libraries.remove(&handle);
            context.dead.insert(handle);
        }
        Ok(())
    }

    /// Whether a handle of cuBLASLt's is alive and of this thread's context.
    pub(crate) fn of_this_context(&mut self, handle: u64) -> Status<()> {
        if self.current().is_ok_and(|context| context.libraries.contains(&handle)) {
            return Ok(());
        }
        self.complain("cuBLASLt: a handle that is not of this context, or gone".into());
        Err(NOT_INITIALIZED)
    }

    /// Puts a product on a stream.
    pub(crate) fn give_product(&mut self, stream: u64, algorithm: [u64; 8], product: Product) -> Status<()> {
        let first = self.library.loaded.insert(algorithm);
        let context = self.current().map_err(|_| NOT_INITIALIZED)?;
        if context.broken.is_some() {
            return Err(EXECUTION_FAILED);
        }
        let capture = context.streams.get_mut(&stream).and_then(|s| s.capture.as_mut());
        if let Some(capture) = capture.filter(|c| first && c.valid) {
            capture.valid = false;
            context.shared.complain("a product is launched for the first time inside a capture".into());
            return Err(EXECUTION_FAILED);
        }
        context.give(stream, Work::Product(Arc::new(product))).map_err(|_| EXECUTION_FAILED)
    }

    /// `cuLaunchKernel`
    pub fn launch(&mut self, function: u64, shape: Shape, stream: u64, args: Vec<Vec<u8>>) -> Outcome<()> {
        self.context("cuLaunchKernel")?.launch(function, shape, stream, args)
    }
}

impl Settings {
    /// Shared memory that a block may have at most: 163 KiB on 8.0 and 8.7, 99 on other 8.x and
    /// 12.x, 227 on 9.0 and 10.x.
    fn shared_limit(&self) -> u32 {
        1024 * match self.card {
            (8, 0 | 7) => 163,
            (8 | 12, _) => 99,
            _ => 227,
        }
    }
}

impl Context {
    fn handle(&self) -> u64 {
        ((self.device as u64) << 32) | 0xc0de
    }

    fn new_handle(&mut self) -> u64 {
        self.handles += 1;
        self.handles << 4
    }

    fn find<'a, T>(&self, all: &'a HashMap<u64, T>, handle: u64, what: &str) -> Outcome<&'a T> {
        all.get(&handle).ok_or_else(|| {
            let state = if self.dead.contains(&handle) { "is gone" } else { "never was" };
            self.shared.complain(format!("use of a {what} that {state}"));
            CUresult::CUDA_ERROR_INVALID_HANDLE
        })
    }

    fn inside(&self, at: u64, bytes: u64) -> Outcome<()> {
        let holds = self
            .allocations
            .range(..=at)
            .next_back()
            .is_some_and(|(&base, &size)| at.checked_add(bytes).is_some_and(|end| end <= base + size));
        if holds { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
    }

    /// For a call that captures do not see: `cuThreadExchangeStreamCaptureMode`.
    fn unseen(&mut self, name: &str) -> Outcome<()> {
        let thread = thread::current().id();
        let forbids = |c: &Capture| match c.mode {
            Mode::Global => true,
            Mode::ThreadLocal => c.thread == thread,
            Mode::Relaxed => false,
        };
        let mut forbidden = false;
        for capture in self.streams.values_mut().flat_map(|s| &mut s.capture).filter(|c| forbids(c)) {
            capture.valid = false;
            forbidden = true;
        }
        if forbidden {
            self.shared.complain(format!("{name} while a capture is under way"));
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    fn alloc(&mut self, bytes: u64) -> Outcome<u64> {
        self.unseen("cuMemAlloc")?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let used = bytes.checked_next_multiple_of(PAGE).and_then(|b| b.checked_add(self.used));
        let used = used.filter(|&used| used <= self.shared.settings.memory);
        self.used = used.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let address = self.memory.alloc_uninitialised(bytes);
        self.allocations.insert(address, bytes);
        self.most = self.most.max(self.allocations.values().sum());
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Outcome<()> {
        self.unseen("cuMemFree")?;
        let Some(bytes) = self.allocations.remove(&address) else {
            self.shared.complain(format!("{address:#x} is freed, which is no allocation"));
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        self.used -= bytes.next_multiple_of(PAGE);
        // Every allocation is one of the memory's.
        let _ = self.memory.free(address);
        Ok(())
    }

    /// Puts work on a stream, or into its capture.
    fn give(&mut self, stream: u64, work: Work) -> Outcome<()> {
        self.find(&self.streams, stream, "stream")?;
        if stream == LEGACY {
            // "a disallowed implicit dependency on a current capture sequence"
            let mut implied = false;
            for s in self.streams.values_mut().filter(|s| s.blocking) {
                if let Some(capture) = &mut s.capture {
                    capture.valid = false;
                    implied = true;
                }
            }
            if implied {
                self.shared.complain("work on the legacy stream while a blocking stream is captured".into());
                return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            }
        }
        self.given += 1;
        let (given, early) = (self.given, self.shared.settings.early);
        let seen = self.seen.get(&thread::current().id());
        let Some(s) = self.streams.get_mut(&stream) else { return Ok(()) };
        s.computes |= matches!(work, Work::Launch { .. } | Work::Replay(_));
        if s.capture.is_none() {
            if self.shared.settings.given {
                self.shared.say(format!("given: cuda:{} {stream:#x} {}", self.device, work.words()));
            }
            seen.into_iter().for_each(|seen| s.known.learn(seen));
            if !self.flights.is_empty() {
                self.orders.insert(given, s.known.clone());
            }
        }
        match &mut s.capture {
            Some(capture) if !capture.valid => Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            Some(capture) => {
                capture.work.push(work);
                Ok(())
            }
            None => {
                s.queue.push_back((given, work));
                if early {
                    self.drain(stream, given);
                }
                Ok(())
            }
        }
    }

    /// Complains of a copy with host memory on a stream that waits for an exchange. Where the
    /// exchange fails, the host hears of it and lets go of the memory, which the copy then touches.
    fn waits_for_no_exchange(&self, name: &str, stream: u64) {
        let exchanges = |of: u64, upto: u64| {
            let queue = self.streams.get(&of).into_iter().flat_map(|s| &s.queue);
            queue.into_iter().any(|(given, work)| *given <= upto && matches!(work, Work::Exchange(_)))
        };
        let mut queue = self.streams.get(&stream).into_iter().flat_map(|s| &s.queue);
        let waits = queue.any(|(_, work)| match work {
            Work::Behind { stream: of, given } => exchanges(*of, *given),
            work => matches!(work, Work::Exchange(_)),
        });
        if waits {
            self.shared
                .complain(format!("{name} with memory of the host, on a stream that waits for an exchange"));
        }
    }

    /// Puts an exchange on a stream, and remembers what it touches.
    fn give_exchange(&mut self, stream: u64, collective: Arc<Collective>) -> Outcome<()> {
        let (reads, writes) = collective.ranges();
        self.forget_flights();
        self.give(stream, Work::Exchange(collective))?;
        let known = self.streams.get(&stream).map(|s| s.known.clone()).unwrap_or_default();
        self.flights.push(Flight { stream, given: self.given, known, reads, writes });
        Ok(())
    }

    /// Forgets exchanges that all work on other streams comes after.
    fn forget_flights(&mut self) {
        let (streams, orders) = (&self.streams, &self.orders);
        self.flights.retain(|flight| {
            streams.iter().filter(|(number, s)| **number != flight.stream && s.computes).any(|(_, s)| {
                let none = Known::default();
                let next = s.queue.front().map(|(given, _)| orders.get(given).unwrap_or(&none));
                !next.unwrap_or(&s.known).has(flight.stream, flight.given)
            })
        });
    }

    /// An event is recorded after all that was given to a stream.
    fn records_event(&mut self, event: u64, stream: u64) {
        let Some(s) = self.streams.get(&stream).filter(|s| s.capture.is_none()) else { return };
        let mut known = s.known.clone();
        known.reach(stream, self.given);
        self.records.insert(event, known);
    }

    /// Work that is given to a stream from now on comes after an event; whether the wait is one to
    /// be left out.
    fn waits_for(&mut self, event: u64, stream: u64) -> bool {
        let Some(s) = self.streams.get_mut(&stream) else { return false };
        if s.computes {
            self.waits += 1;
            if self.shared.settings.lost.is_some_and(|lost| lost == 0 || lost == self.waits) {
                self.shared.say(format!("fault: wait {} is left out", self.waits));
                return true;
            }
        }
        if self.shared.settings.given {
            self.shared.say(format!("given: cuda:{} {stream:#x} wait {event:#x}", self.device));
        }
        self.records.get(&event).into_iter().for_each(|known| s.known.learn(known));
        false
    }

    /// This thread has seen that an event was reached.
    fn sees(&mut self, event: u64) {
        let Some(known) = self.records.get(&event) else { return };
        self.seen.entry(thread::current().id()).or_default().learn(known);
    }

    /// Does a stream's work up to some number, and what that has to wait for: the legacy stream and
    /// blocking ones wait for each other.
    fn drain(&mut self, stream: u64, upto: u64) {
        loop {
            let Some(s) = self.streams.get_mut(&stream) else { return };
            let blocking = s.blocking;
            if s.queue.front().is_none_or(|(given, _)| *given > upto) {
                return;
            }
            let Some((given, work)) = s.queue.pop_front() else { return };
            if !self.ready(&work) {
                if let Some(s) = self.streams.get_mut(&stream) {
                    s.queue.push_front((given, work));
                }
                return;
            }
            if stream == LEGACY {
                let others = self.streams.iter().filter(|(n, s)| **n != LEGACY && s.blocking);
                let others: Vec<u64> = others.map(|(n, _)| *n).collect();
                others.into_iter().for_each(|other| self.drain(other, given));
            } else if blocking {
                self.drain(LEGACY, given);
            }
            let known = self.orders.remove(&given).unwrap_or_default();
            let flights = self.flights.iter().filter(|f| !f.in_order((stream, given), &known));
            let flights: Vec<Flight> = flights.cloned().collect();
            self.execute(&work, &flights);
        }
    }

    /// Whether work that waits for others is done, or waits no more; other work always is.
    fn ready(&mut self, work: &Work) -> bool {
        match work {
            Work::Behind { stream, given } => {
                self.drain(*stream, *given);
                let first = self.streams.get(stream).and_then(|s| s.queue.front());
                first.is_none_or(|(number, _)| number > given)
            }
            Work::Exchange(collective) => self.broken.is_some() || collective.progress(self),
            Work::Launch { launch, .. } => {
                let settings = &self.shared.settings;
                self.hung |= self.broken.is_none() && settings.spoils(Spoil::Hang, &launch.kernel);
                !self.hung
            }
            Work::Set { .. }
            | Work::ToDevice { .. }
            | Work::ToHost { .. }
            | Work::Copy { .. }
            | Work::Replay(_)
            | Work::Record(_)
            | Work::Product(_) => true,
        }
    }

    /// Stream and number of the last work that reaches an event.
    fn recorded(&self, event: u64) -> Option<(u64, u64)> {
        let all = self.streams.iter().flat_map(|(stream, s)| s.queue.iter().map(move |w| (*stream, w)));
        let own = all.filter(|(_, w)| matches!(w.1, Work::Record(e) if e == event));
        own.map(|(stream, w)| (stream, w.0)).max_by_key(|(_, given)| *given)
    }

    /// Counts something of NCCL's; the code that was ordered for it.
    pub(crate) fn ordered(&self, what: &str) -> Result<(), u32> {
        self.shared.ordered(what)
    }

    pub(crate) fn say(&self, line: String) {
        self.shared.say(line);
    }

    /// Numbers of a collective, as they are now.
    pub(crate) fn bytes(&mut self, at: u64, bytes: u64) -> Option<Vec<u8>> {
        let found = self.memory.read(at, bytes);
        if found.is_err() {
            self.shared.complain("a collective reads outside memory".into());
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        found.ok().map(|found| found.to_vec())
    }

    /// Numbers that a collective leaves.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        if self.memory.write(at, bytes).is_err() {
            self.shared.complain("a collective writes outside memory".into());
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }

    fn wait(&mut self, stream: u64) -> Outcome<()> {
        let captured = self.find(&self.streams, stream, "stream")?.capture.is_some();
        if captured {
            if let Some(capture) = self.streams.get_mut(&stream).and_then(|s| s.capture.as_mut()) {
                capture.valid = false;
            }
            self.shared.complain("a stream is waited for while it is captured".into());
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        self.unseen("cuStreamSynchronize")?;
        self.drain(stream, u64::MAX);
        if self.hung {
            // As the real one: for ever.
            loop {
                thread::park();
            }
        }
        if self.streams.get(&stream).is_some_and(|s| !s.queue.is_empty()) {
            // The real one hangs, and a test with it.
            self.shared.complain("a stream is waited for whose collective waits for another rank".into());
            self.broken = Some(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
        }
        self.broken.map_or(Ok(()), Err)?;
        let (given, known) = (self.given, self.streams.get(&stream).map(|s| s.known.clone()));
        let seen = self.seen.entry(thread::current().id()).or_default();
        known.iter().for_each(|known| seen.learn(known));
        seen.reach(stream, given);
        Ok(())
    }

    /// "the function will return immediately and the resources associated with hStream will be
    /// released automatically once the device has completed all work"
    fn destroy_stream(&mut self, stream: u64) -> Outcome<()> {
        let s = self.find(&self.streams, stream, "stream")?;
        if stream == LEGACY {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        if s.capture.is_some() {
            self.shared.complain("a stream is destroyed while it is captured".into());
        }
        if !s.queue.is_empty() {
            self.shared.complain("a stream is destroyed whose work nobody waited for".into());
        }
        self.drain(stream, u64::MAX);
        self.streams.remove(&stream);
        self.dead.insert(stream);
        Ok(())
    }

    fn begin(&mut self, stream: u64, mode: Mode) -> Outcome<()> {
        let s = self.find(&self.streams, stream, "stream")?;
        if stream == LEGACY {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if s.capture.is_some() {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        let thread = thread::current().id();
        if let Some(s) = self.streams.get_mut(&stream) {
            s.capture = Some(Capture { mode, thread, work: vec![], valid: true });
        }
        Ok(())
    }

    fn end_capture(&mut self, stream: u64) -> Outcome<u64> {
        let thread = thread::current().id();
        let capture = self.find(&self.streams, stream, "stream")?.capture.as_ref();
        let capture = capture.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        if capture.mode != Mode::Relaxed && capture.thread != thread {
            self.shared.complain("a capture is ended by another thread than began it".into());
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let capture = self.streams.get_mut(&stream).and_then(|s| s.capture.take()).filter(|c| c.valid);
        let capture = capture.ok_or(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)?;
        let handle = self.new_handle();
        self.graphs.insert(handle, Arc::new(capture.work));
        Ok(handle)
    }

    /// PTX, or what [`crate::nvrtc`] gives as machine code.
    fn load(&mut self, image: &[u8]) -> Outcome<u64> {
        self.unseen("cuModuleLoadData")?;
        let card = self.shared.settings.card;
        let text = std::str::from_utf8(image).map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
        let (compiled, text) = match text.strip_prefix(CUBIN).and_then(|rest| rest.split_once('\n')) {
            Some((architecture, text)) => (Some(architecture), text),
            None => (None, text),
        };
        let word = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().split(',').next().unwrap_or_default().trim())
        };
        let (Some(version), Some(target)) = (word(".version"), word(".target")) else {
            self.shared.complain("an image that is neither PTX nor of the stand-in's NVRTC".into());
            return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
        };
        if number(version) > newest_ptx(self.shared.settings.version) {
            return Err(match compiled {
                Some(_) => CUresult::CUDA_ERROR_INVALID_IMAGE,
                None => CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
            });
        }
        if !runs_on(compiled.unwrap_or(target), compiled.is_some(), card) {
            return Err(match compiled {
                Some(_) => CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
                None => CUresult::CUDA_ERROR_INVALID_PTX,
            });
        }
        let module = Module::load(text, None).map_err(|error| {
            self.shared.complain(format!("the interpreter does not take a module: {error}"));
            CUresult::CUDA_ERROR_INVALID_PTX
        })?;
        let handle = self.new_handle();
        self.modules.insert(handle, Arc::new(module));
        Ok(handle)
    }

    fn launch(&mut self, function: u64, shape: Shape, stream: u64, args: Vec<Vec<u8>>) -> Outcome<()> {
        let f = self.find(&self.functions, function, "function")?;
        let (kernel, allowed, first) = (f.kernel.clone(), f.allowed, !f.launched);
        let module = self.find(&self.modules, f.module, "module")?;
        let signature = module.signature(&kernel).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let Shape { grid, block, shared } = shape;
        let threads: u64 = block.iter().map(|&n| u64::from(n)).product();
        let most = u64::from(signature.max_threads.unwrap_or(1024)).min(1024);
        let refused = if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1].max(grid[2]) > 65535 {
            Some(format!("a grid of {grid:?}"))
        } else if block.contains(&0) || threads > most || block[2] > 64 {
            Some(format!("blocks of {block:?}"))
        } else if shared > allowed {
            Some(format!("{shared} bytes of dynamic shared memory, where {allowed} are allowed"))
        } else {
            None
        };
        if let Some(what) = refused {
            self.shared.complain(format!("{kernel} is launched with {what}"));
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let capture = self.find(&self.streams, stream, "stream")?.capture.as_ref();
        if first && capture.is_some_and(|c| c.valid) {
            if let Some(capture) = self.streams.get_mut(&stream).and_then(|s| s.capture.as_mut()) {
                capture.valid = false;
            }
            self.shared.complain(format!("{kernel} is launched for the first time inside a capture"));
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if let Some(f) = self.functions.get_mut(&function) {
            f.launched = true;
        }
        if self.shared.settings.spoils(Spoil::Launch, &kernel) {
            return Err(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        }
        let args = args.into_iter().map(Arg::Bytes).collect();
        let launch = Launch { kernel, grid, block, shared_bytes: shared, args };
        self.give(stream, Work::Launch { function, launch })
    }

    /// Does work that is out of order with some exchanges.
    fn execute(&mut self, work: &Work, flights: &[Flight]) {
        if self.broken.is_some() {
            return;
        }
        if let Some((reads, writes)) = work.ranges() {
            let problem = flights.iter().find_map(|flight| flight.problem(&reads, &writes));
            if let Some(problem) = problem {
                self.shared.complain(format!("{} {problem}", work.words()));
            }
        }
        let moved = match work {
            Work::Launch { function, launch } => return self.execute_among(*function, launch, flights),
            Work::Replay(list) => return list.iter().for_each(|work| self.execute(work, flights)),
            Work::Product(product) => return self.execute_product(product),
            // Done when it was ready.
            Work::Behind { .. } | Work::Exchange(_) => return,
            Work::Record(event) => {
                // One that is gone has no time.
                if let Some(time) = self.events.get_mut(event) {
                    *time = Some(self.clock);
                }
                return;
            }
            Work::Set { at, value, bytes } => self.memory.write(*at, &vec![*value; *bytes as usize]),
            Work::ToDevice { at, from, was } => {
                // SAFETY: the caller of `to_device` promised that it can be read until now.
                let now = unsafe { std::slice::from_raw_parts(*from as *const u8, was.len()) };
                if now != &was[..] {
                    self.shared.complain("host memory changed before a copy of it was waited for".into());
                }
                self.memory.write(*at, now)
            }
            Work::Copy { to, from, bytes } => {
                self.memory.read(*from, *bytes).and_then(|data| self.memory.write(*to, &data))
            }
            Work::ToHost { to, at, bytes } => self.memory.read(*at, *bytes as u64).map(|data| {
                // SAFETY: the caller of `to_host` promised that it can be written until now.
                unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), *to as *mut u8, *bytes) }
            }),
        };
        if let Err(error) = moved {
            self.shared.complain(format!("a copy after its memory was freed: {error}"));
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }

    fn execute_product(&mut self, product: &Product) {
        if let Err(code) = self.shared.count("product") {
            self.broken = Some(code);
            return;
        }
        self.clock += self.shared.settings.product;
        if let Err(error) = compute(product, &mut self.memory, self.shared.settings.wrong) {
            self.shared.complain(format!("a product outside memory: {error}"));
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
    }

    /// Runs a kernel that is out of order with some exchanges: what they write counts as written by
    /// nobody, and what they have must be as it was.
    fn execute_among(&mut self, function: u64, launch: &Launch, flights: &[Flight]) {
        let (mut hidden, mut kept) = (vec![], vec![]);
        for flight in flights {
            for &(at, bytes) in &flight.writes {
                hidden.extend(self.memory.hide(at, bytes).ok().map(|was| (at, was)));
            }
            for &(at, bytes) in &flight.reads {
                kept.extend(self.memory.read(at, bytes).ok().map(|was| (at, was)));
            }
        }
        self.execute_launch(function, launch);
        let mut touched =
            kept.iter().any(|(at, was)| self.memory.read(*at, was.len() as u64).as_ref() != Ok(was));
        for (at, was) in hidden.iter().rev() {
            touched |= self.memory.show(*at, was).unwrap_or(false);
        }
        if self.broken.is_some() && !flights.is_empty() {
            self.shared.complain(format!("{} is out of order with an exchange", launch.kernel));
        } else if touched {
            self.shared.complain(format!("{} writes what an exchange still has", launch.kernel));
        }
    }

    fn execute_launch(&mut self, function: u64, launch: &Launch) {
        self.clock += KERNEL;
        if let Err(code) = self.shared.count("kernel") {
            self.broken = Some(code);
            return;
        }
        let module = self.functions.get(&function).and_then(|f| self.modules.get(&f.module)).cloned();
        let Some(module) = module else {
            self.shared.complain(format!("{} runs after its module was unloaded", launch.kernel));
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION);
            return;
        };
        if self.shared.settings.spoils(Spoil::Wrong, &launch.kernel) {
            return;
        }
        if self.shared.settings.spoils(Spoil::Fault, &launch.kernel) {
            self.broken = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            return;
        }
        let checks = Checks { races: self.shared.settings.races, uninitialised: true };
        let options = ptx::Options { checks, ..ptx::Options::default() };
        if let Err(finding) = ptx::run(&module, launch, &mut self.memory, &options) {
            self.shared.complain(finding.to_string());
            self.broken = Some(match finding.kind {
                Kind::OutOfBounds | Kind::ReadOnly => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
                Kind::Misaligned => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
                Kind::Budget | Kind::Deadlock => CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
                _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
            });
        }
    }

    /// Says what is left. Nothing can be let go of in a broken context.
    fn end(self) {
        let broken = self.broken.map_or(0, |code| code as u32);
        let left = [
            ("allocation", self.allocations.len()),
            ("module", self.modules.len()),
            ("stream", self.streams.len() - 1),
            ("graph", self.graphs.len()),
            ("executable graph", self.executables.len()),
            ("event", self.events.len()),
            ("handle of cuBLASLt", self.libraries.len()),
            ("piece of work nobody waited for", self.streams.values().map(|s| s.queue.len()).sum()),
        ];
        for (what, number) in left.into_iter().filter(|(_, number)| *number > 0 && broken == 0) {
            self.shared.complain(format!("left in the context of cuda:{}: {what}, {number}", self.device));
        }
        let counts: Vec<String> =
            held(&self.shared.counts).iter().map(|(name, count)| format!("{name}={count}")).collect();
        let (device, most) = (self.device, self.most);
        self.shared.say(format!("released: cuda:{device} broken={broken} most={most} {}", counts.join(" ")));
    }
}

/// `8.4` as (8, 4).
fn number(version: &str) -> (u32, u32) {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(u32::MAX));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// The newest PTX that a driver knows, from the release notes of the instruction set.
fn newest_ptx(driver: i32) -> (u32, u32) {
    match driver {
        13000.. => (9, (driver as u32 - 13000) / 10),
        12090.. => (8, 8),
        12080.. => (8, 7),
        12050.. => (8, 5),
        12000.. => (8, (driver as u32 - 12000) / 10),
        _ => (7, 8),
    }
}

/// PTX for an architecture runs on it and on newer ones, machine code on the same major version's;
/// what has an `a` on that one alone.
fn runs_on(architecture: &str, compiled: bool, card: (u32, u32)) -> bool {
    let name = architecture.trim_start_matches("sm_");
    let (digits, alone) = (name.trim_end_matches('a'), name.ends_with('a'));
    let Ok(number) = digits.parse::<u32>() else { return false };
    let of = (number / 10, number % 10);
    if alone { of == card } else { of <= card && (!compiled || of.0 == card.0) }
}
