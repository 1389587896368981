//! NVIDIA GPUs, through the driver, which is looked for when a device is asked for and not before.
//!
//! *In*: a plan. *Out*: a session on one GPU. *Promise*: where there is no driver or no such GPU,
//! [`CudaDevice::new`] says what to install or which numbers there are, and nothing panics; what a
//! session allocates is one arena, one scratch range and one word; launches go to one stream, in
//! the order of the list.
//!
//! It has run on an H200 (`docs/results/h200.md`). Its tests run it on a stand-in for the driver
//! (`driver/`, `tests/gpu/cuda.rs`). A GPU runs under the same executor, and the same texts, as the
//! `ptx` device runs.

mod cublaslt;
mod nccl;

use super::gpu::launch::{Arg, Launch, Swizzle, TensorMap, placed};
use super::gpu::proof::Trial;
use super::gpu::{self, Compiler, Dense, Exchange, Gpu, Library, Target, proof};
use crate::{Device, DeviceError, Group, Session};
use cublaslt::CublasLt;
use cudarc::driver::{DriverError, result, sys};
use dreamc_compiler::codegen::{Argument, Language, Limits, Pass, Source, Turns};
use dreamc_compiler::count::device::{self, DEVICES};
use dreamc_compiler::program::{Plan, ProgramKey};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A GPU.
pub struct CudaDevice {
    context: Arc<Context>,
    compiler: Compiler,
    title: String,
    library: Option<Library>,
    number: usize,
    capability: (i32, i32),
    /// The GPU and its driver, by which proofs of kernels are kept.
    identity: String,
    /// Whether it runs what NVRTC makes for it, and no PTX for calibration.
    proves: bool,
}

/// The driver's calls in use. The bindings panic where one is missing, so all are looked for
/// before the first call.
const CALLS: [&str; 38] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// A failure in the driver's words.
fn words(error: DriverError) -> String {
    let name = error.error_name().map_or(format!("error {}", error.0 as u32), |n| n.to_string_lossy().into());
    match error.error_string().map(|s| s.to_string_lossy().into_owned()) {
        Ok(said) if said != name => format!("{name}, {said}"),
        _ => name,
    }
}

/// Advice where the driver does not start.
fn advice(code: sys::CUresult) -> Option<&'static str> {
    use sys::CUresult::*;
    Some(match code {
        CUDA_ERROR_STUB_LIBRARY => {
            "this libcuda is the toolkit's stub: take its folder `stubs` out of LD_LIBRARY_PATH"
        }
        CUDA_ERROR_SYSTEM_NOT_READY => {
            "on machines whose GPUs are joined by NVSwitch start NVIDIA's fabric manager \
             (`systemctl start nvidia-fabricmanager`), of the driver's version"
        }
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda and the driver of the kernel are of two versions: restart the machine after an update, or give \
             the container the libcuda of its host"
        }
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "this libcuda is of the package cuda-compat, which this GPU does not take: take its folder out of \
             LD_LIBRARY_PATH"
        }
        _ => return None,
    })
}

/// The part that failed, where the driver gives nothing more to this process. Such an error may
/// come out of any later call.
fn lost(error: DriverError) -> Option<&'static str> {
    use sys::CUresult::*;
    match error.0 {
        CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_LAUNCH_FAILED => Some("a kernel failed"),
        CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_UNKNOWN => Some("the GPU failed"),
        _ => None,
    }
}

/// How long work on a GPU is waited for: `DREAMC_GPU_TIMEOUT` in seconds, else ten minutes.
fn patience() -> Result<Duration, String> {
    const USUAL: Duration = Duration::from_secs(600);
    let Some(asked) = std::env::var_os("DREAMC_GPU_TIMEOUT").filter(|v| !v.is_empty()) else {
        return Ok(USUAL);
    };
    let seconds = asked.to_str().and_then(|text| text.parse().ok()).filter(|&seconds| seconds > 0);
    let wrong = || format!("DREAMC_GPU_TIMEOUT is `{}`; it is a whole number of seconds", asked.display());
    Ok(Duration::from_secs(seconds.ok_or_else(wrong)?))
}

/// Memory that the driver takes for code and recorded launches, after the arena.
const RESERVE: u64 = 128 << 20;

/// Memory is handed out in pages of this size.
const PAGE: u64 = 2 << 20;

impl CudaDevice {
    /// GPU number `ordinal`, running machine code that NVRTC makes for it.
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        CudaDevice::with_target(ordinal, None)
    }

    /// The same running the very PTX that the `ptx` device interprets, translated by the driver:
    /// for calibration. `hopper`: that which [`PtxDevice::hopper`](super::ptx::PtxDevice::hopper)
    /// does.
    pub fn from_ptx(ordinal: usize, hopper: bool) -> Result<Self, DeviceError> {
        let architecture = if hopper { super::ptx::HOPPER } else { super::ptx::ARCHITECTURE };
        CudaDevice::with_target(ordinal, Some(architecture))
    }

    /// The version of CUDA that the driver is for.
    pub fn driver(&self) -> (i32, i32) {
        (self.context.versions.0, self.context.versions.1)
    }

    /// Compiles a kernel for it, loads and runs it: what versions promise, seen once.
    pub fn try_a_kernel(&self) -> Result<(), DeviceError> {
        const WORD: i32 = 0x600d;
        let entry = || "written".to_string();
        let pass = Pass {
            entry: entry(),
            grid: 1,
            block: 1,
            shared_bytes: 0,
            arguments: vec![Argument::Operand(0)],
            turns: Turns::default(),
        };
        let text = format!("extern \"C\" __global__ void written(int *word) {{ *word = {WORD}; }}\n");
        let source = Source {
            name: entry(),
            text,
            passes: vec![pass],
            iterations: 1,
            scratch: 0,
            language: Language::Portable,
        };
        let code = self.compiler.compile(&[&source])?;
        let mut stream = Stream::new(self.context.clone(), None)?;
        let address = stream.allocate(4, "word")?;
        let module = Gpu::load(&mut stream, &source, code.first().map_or(&[], Vec::as_slice))?;
        let args = vec![Arg::Pointer(address)];
        let launch = Launch { kernel: entry(), grid: [1; 3], block: [1; 3], shared_bytes: 0, args };
        stream.launch(&module, &launch, "a kernel that writes a word")?;
        let mut word = [0; 4];
        stream.read(address, &mut word)?;
        match i32::from_le_bytes(word) {
            WORD => Ok(()),
            other => Err(self.context.refuses(format!("a kernel that writes {WORD} wrote {other}"))),
        }
    }

    /// A remark on the kernels that a GPU of its compute capability runs, where there could be
    /// faster ones.
    pub fn remark(&self) -> Option<&'static str> {
        match self.capability.0 {
            ..8 => Some("naive kernels, which are right and slow: fast ones need compute capability 8.0"),
            10.. => Some("kernels of compute capability 8.0: it has none of its own yet"),
            _ => None,
        }
    }

    /// Version of NVRTC, which compiles for it.
    pub fn nvrtc(&self) -> (i32, i32) {
        self.compiler.version()
    }

    /// The GPU's data sheet, where it is in the table of devices.
    pub fn sheet(&self) -> Option<&'static device::Device> {
        let title = self.title.to_lowercase().replace(' ', "");
        DEVICES.iter().find(|device| title.contains(device.name))
    }

    /// A trial of some programs of a plan, for [`proof::watch`].
    pub fn trial(&self, plan: &Plan, programs: &[ProgramKey]) -> Result<Trial, DeviceError> {
        // A naive kernel of 4e12 multiply-adds takes some seconds.
        Trial::of(plan, programs, &self.compiler, (self.sheet(), 4e12))
    }

    /// Compiles the texts of trials into the cache, on all cores; those that do not compile are
    /// found again where they run.
    pub fn compile(&self, trials: &[&Trial]) {
        let all: Vec<Source> = trials.iter().flat_map(|trial| trial.sources()).cloned().collect();
        let (firsts, _) = gpu::distinct(&all);
        self.compiler.compile_each(&firsts.iter().map(|&i| &all[i]).collect::<Vec<_>>());
    }

    /// The work of a process that proves: reads a task, and says what it finds, a line each.
    pub fn prove(input: &[u8], say: &mut dyn FnMut(String)) -> Result<(), DeviceError> {
        let open = |ordinal| {
            let device = CudaDevice::new(ordinal)?;
            Ok((Stream::new(device.context.clone(), None)?, device.compiler))
        };
        proof::child(input, open, say)
    }

    fn with_target(ordinal: usize, ptx: Option<&str>) -> Result<Self, DeviceError> {
        let name = format!("cuda:{ordinal}");
        let missing = |message: String| DeviceError::Driver { device: name.clone(), message };
        // SAFETY: loads a shared library whose initialisers are NVIDIA's own.
        if !unsafe { sys::is_culib_present() } {
            let wsl = std::fs::read_to_string("/proc/version")
                .is_ok_and(|v| v.to_lowercase().contains("microsoft"));
            let install = match wsl {
                true => "install the driver of your GPU on Windows, which puts libcuda into /usr/lib/wsl/lib",
                false => "install the driver of your GPU",
            };
            return Err(missing(format!(
                "there is no NVIDIA driver (libcuda was not found); {install}, or use `--device cpu`"
            )));
        }
        // SAFETY: the library is there; what is looked up is not called.
        let absent: Vec<&str> = CALLS
            .into_iter()
            .filter(|name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err())
            .collect();
        if !absent.is_empty() {
            return Err(missing(format!(
                "the NVIDIA driver lacks {}; install a newer one (for CUDA 12 or later)",
                absent.join(", ")
            )));
        }
        let fail = |call: &str, error: DriverError| missing(format!("{call}: {}", words(error)));
        let mut driver = 0;
        // SAFETY: a place for the version.
        unsafe { sys::cuDriverGetVersion(&mut driver) }
            .result()
            .map_err(|e| fail("cuDriverGetVersion", e))?;
        result::init().map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => {
                missing("the driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)".into())
            }
            code => match advice(code) {
                Some(advice) => missing(format!("cuInit: {}; {advice}", words(e))),
                None => fail("cuInit", e),
            },
        })?;
        let count = result::device::get_count().map_err(|e| fail("cuDeviceGetCount", e))?;
        let number = i32::try_from(ordinal).ok().filter(|&n| n < count).ok_or_else(|| {
            let named = |n: i32| match result::device::get(n).and_then(result::device::get_name) {
                Ok(name) => format!("cuda:{n} ({name})"),
                Err(_) => format!("cuda:{n}"),
            };
            missing(match count {
                0 => "the driver sees no GPU (CUDA_VISIBLE_DEVICES may hide it)".into(),
                n => format!("no such GPU; there is {}", (0..n).map(named).collect::<Vec<_>>().join(", ")),
            })
        })?;
        let device = result::device::get(number).map_err(|e| fail("cuDeviceGet", e))?;
        let title = result::device::get_name(device).map_err(|e| fail("cuDeviceGetName", e))?;
        let attribute = |which| {
            // SAFETY: a device that the driver just gave.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(|e| fail("cuDeviceGetAttribute", e))
        };
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let shared =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared = u32::try_from(shared).unwrap_or(0);
        let processors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        if (major, minor) < (7, 5) {
            return Err(missing(format!(
                "{title} has compute capability {major}.{minor}; the kernels need 7.5 (Turing) or newer, fast ones 8.0"
            )));
        }
        let nvrtc = dreamc_nvrtc::Nvrtc::find()?.version();
        fits(nvrtc, driver, (major, minor), ptx.is_some()).map_err(&missing)?;
        let limits = Limits { processors: processors.unsigned_abs().into(), shared: shared.into() };
        // Hopper's own operations are in the `a` variant of its architecture.
        let suffix = if major == 9 { "a" } else { "" };
        let compiler = match ptx {
            None => Compiler::new(Target::Cubin, &format!("sm_{major}{minor}{suffix}"))?.with_limits(limits),
            Some(super::ptx::HOPPER) if major != 9 => {
                return Err(missing(format!(
                    "{title} has compute capability {major}.{minor}; Hopper's PTX is for 9.0 alone"
                )));
            }
            Some(architecture) => Compiler::new(Target::Ptx, architecture)?,
        };
        // Fast kernels copy asynchronously and multiply bf16, from 8.0 on.
        let compiler = if major < 8 { compiler.naive() } else { compiler };
        // SAFETY: a device that the driver just gave; released when the context is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|e| fail("cuDevicePrimaryCtxRetain", e))?;
        // Calibration is of the text and nothing else.
        let library = match ptx {
            Some(_) => None,
            // It has no bf16 there.
            None if major < 8 => None,
            None => {
                let card = format!("{title}, {processors} processors, driver {driver}");
                library(major, &card, &compiler).map_err(missing)?
            }
        };
        let versions = (driver / 1000, driver % 1000 / 10, compiler.version());
        let (patience, stuck) = (patience().map_err(missing)?, AtomicBool::new(false));
        let context = Context { device, context, name: name.clone(), versions, shared, patience, stuck };
        let context = Arc::new(context);
        let identity =
            format!("{title}, {major}.{minor}, {processors} processors, {shared} bytes, driver {driver}");
        let (number, proves, capability) = (ordinal, ptx.is_none(), (major, minor));
        Ok(CudaDevice { context, compiler, title, library, number, capability, identity, proves })
    }
}

/// Whether NVRTC compiles for a GPU of a compute capability, and its driver takes what comes out:
/// machine code of the driver's own major version or an older one, PTX of its own version or an
/// older one.
fn fits(nvrtc: (i32, i32), driver: i32, capability: (i32, i32), ptx: bool) -> Result<(), String> {
    let own = (driver / 1000, driver % 1000 / 10);
    let package = |(major, minor): (i32, i32)| match major {
        ..=12 => format!("`pip install nvidia-cuda-nvrtc-cu12=={major}.{minor}.*`"),
        _ => format!("`pip install nvidia-cuda-nvrtc=={major}.{minor}.*`"),
    };
    let newer = if ptx { nvrtc > own } else { nvrtc.0 > own.0 };
    if newer {
        return Err(format!(
            "the driver is for CUDA {}.{}, and NVRTC, which compiles the kernels, is {}.{}: NVRTC must not be the newer \
             one; install a newer driver, or {}",
            own.0,
            own.1,
            nvrtc.0,
            nvrtc.1,
            package(own)
        ));
    }
    // As `nvrtcGetSupportedArchs` of these versions answers.
    let least = match capability {
        (..=8, ..=8) => (11, 8),
        (8, _) | (9, _) => (12, 0),
        (10, 0..=1) | (12, 0) => (12, 8),
        (10, _) | (12, _) => (12, 9),
        _ => (13, 0),
    };
    if nvrtc < least {
        let (major, minor) = capability;
        return Err(format!(
            "NVRTC {}.{} does not compile for compute capability {major}.{minor}; {} does",
            nvrtc.0,
            nvrtc.1,
            package(least)
        ));
    }
    Ok(())
}

/// cuBLASLt, where it is there and wanted: `DREAMC_CUBLASLT=0` never, `DREAMC_CUBLASLT=1` wherever
/// it can, else where it is faster, which takes a place to keep what was measured. `card` is what
/// speed depends on apart from the library.
fn library(major: i32, card: &str, compiler: &Compiler) -> Result<Option<Library>, String> {
    let asked = std::env::var_os("DREAMC_CUBLASLT").unwrap_or_default();
    let always = match asked.to_str() {
        Some("0") => return Ok(None),
        Some("1") => true,
        Some("") => false,
        _ => {
            let asked = asked.display();
            return Err(format!(
                "DREAMC_CUBLASLT is `{asked}`; it is 0 (never), 1 (wherever it can) or not set (where it is faster)"
            ));
        }
    };
    let found = match CublasLt::find() {
        Ok(found) => found,
        Err(why) if always => return Err(format!("DREAMC_CUBLASLT=1, and {why}")),
        Err(_) => return Ok(None),
    };
    if !always && !compiler.keeps() {
        return Ok(None);
    }
    // As *cuBLAS* recommends for `cublasSetWorkspace`.
    let workspace = if major >= 9 { 32 << 20 } else { 4 << 20 };
    let name = found.name();
    let key = format!("{name}, {workspace} bytes, {card}");
    Ok(Some(Library { name, always, workspace, key }))
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        format!("{} ({})", self.context.name, self.title)
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        gpu::scratch_bytes(&self.context.name, &self.compiler, self.library.as_ref(), plan)
    }

    gpu::answers!(multiplies_codes);

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        let meeting = proof::Meeting {
            name: &self.context.name,
            number: self.number,
            identity: &self.identity,
            compiler: &self.compiler,
        };
        let trust = if self.proves { gpu::Trust::earn(&meeting, plan) } else { gpu::Trust::default() };
        let stream = Stream::new(self.context.clone(), self.library.clone())?;
        gpu::load(stream, &self.compiler, plan, group, &trust)
    }
}

/// A GPU's primary context, which all sessions share.
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    /// The CUDA that the driver is for, major and minor, and the version of NVRTC.
    versions: (i32, i32, (i32, i32)),
    /// Shared memory that a block may have.
    shared: u32,
    /// How long work is waited for.
    patience: Duration,
    /// Work is under way that does not end, so nothing can be waited for any more.
    stuck: AtomicBool,
}

// SAFETY: contexts may be used from any thread; every call makes its own current first.
unsafe impl Send for Context {}
// SAFETY: likewise.
unsafe impl Sync for Context {}

impl Context {
    fn error(&self, call: &str, error: DriverError) -> DeviceError {
        use sys::CUresult::*;
        let device = self.name.clone();
        if let Some(what) = lost(error) {
            return DeviceError::Lost { device, what, words: words(error), launch: None };
        }
        let (major, minor, nvrtc) = self.versions;
        let advice = match error.0 {
            CUDA_ERROR_OUT_OF_MEMORY => "; the memory of the GPU is full: is another process on it?".into(),
            CUDA_ERROR_INVALID_IMAGE
            | CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUDA_ERROR_INVALID_PTX
            | CUDA_ERROR_UNSUPPORTED_PTX_VERSION => format!(
                "; the driver is for CUDA {major}.{minor}, and NVRTC, which compiled it, is {}.{}: NVRTC must not be the newer one",
                nvrtc.0, nvrtc.1
            ),
            _ => String::new(),
        };
        DeviceError::Driver { device, message: format!("{call}: {}{advice}", words(error)) }
    }

    /// Gives up on work that does not end.
    fn stuck(&self) -> DeviceError {
        self.stuck.store(true, Ordering::Relaxed);
        let seconds = self.patience.as_secs();
        let words = format!("waited for {seconds} s; DREAMC_GPU_TIMEOUT has more patience");
        DeviceError::Lost { device: self.name.clone(), what: "a kernel does not end", words, launch: None }
    }

    /// A failure in words.
    fn refuses(&self, message: String) -> DeviceError {
        DeviceError::Driver { device: self.name.clone(), message }
    }

    /// Makes the context current on this thread; every use of the driver begins so.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: retained in `CudaDevice::new`, released in `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| self.error("cuCtxSetCurrent", e))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // It would wait; the end of the process does not.
        if self.stuck.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once; sessions hold the context, so none is left. There is no one to
        // tell of a failure.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A session's stream, memory and code. Everything goes through the stream: it does not wait for
/// the default one, in which a plain `cuMemsetD8` or the last part of a `cuMemcpyHtoD` may still be
/// under way when the call returns.
struct Stream {
    context: Arc<Context>,
    stream: sys::CUstream,
    allocations: Vec<sys::CUdeviceptr>,
    modules: Vec<sys::CUmodule>,
    library: Option<Library>,
    /// The library at work, from the first product on.
    products: Option<cublaslt::Handle>,
    /// Marks of the clock, made when they are first asked for.
    events: Vec<sys::CUevent>,
    /// NCCL, where all ranks of the group have it.
    ranks: RefCell<Option<nccl::Communicator>>,
    recording: bool,
    /// Recorded after the work that is waited for.
    end: sys::CUevent,
}

// SAFETY: streams, memory and modules may be used from any thread whose current context is theirs,
// which every method sees to.
unsafe impl Send for Stream {}

impl Stream {
    fn new(context: Arc<Context>, library: Option<Library>) -> Result<Self, DeviceError> {
        context.enter()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| context.error("cuStreamCreate", e))?;
        let end = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map_err(|e| context.error("cuEventCreate", e))?;
        Ok(Stream {
            context,
            stream,
            allocations: vec![],
            modules: vec![],
            library,
            products: None,
            events: vec![],
            ranks: RefCell::new(None),
            recording: false,
            end,
        })
    }

    fn fill_zero(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: inside an allocation of this session's, before anything else of this stream uses
        // it.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream) }
            .map_err(|e| self.context.error("cuMemsetD8Async", e))
    }

    /// The event of that number, made when it is first asked for.
    fn event(&mut self, number: usize) -> Result<sys::CUevent, DeviceError> {
        while self.events.len() <= number {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
                .map_err(|e| self.context.error("cuEventCreate", e))?;
            self.events.push(event);
        }
        Ok(self.events[number])
    }

    fn record_event(&self, event: sys::CUevent) -> Result<(), DeviceError> {
        // SAFETY: a live event and a live stream of the current context.
        unsafe { result::event::record(event, self.stream) }
            .map_err(|e| self.context.error("cuEventRecord", e))
    }

    /// Waits for exchanges that the stream's work comes after, by the communicator, which listens
    /// to the other ranks.
    ///
    /// A copy to or from the host is put on the stream after this. On the stream it would wait for
    /// an exchange, and when that failed it would touch memory that the host has let go of.
    fn settle(&self) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.ranks.borrow_mut().as_mut().map_or(Ok(()), nccl::Communicator::settle)
    }

    /// Waits for the stream, and no longer than a person would.
    fn wait(&self) -> Result<(), DeviceError> {
        self.settle()?;
        self.record_event(self.end)?;
        let begun = Instant::now();
        // SAFETY: a live event that was recorded.
        while let Err(error) = unsafe { result::event::query(self.end) } {
            if error.0 != sys::CUresult::CUDA_ERROR_NOT_READY {
                return Err(self.context.error("cuEventQuery", error));
            }
            let waited = begun.elapsed();
            if waited > self.context.patience {
                return Err(self.context.stuck());
            }
            // Short work is looked at all the time; of long work a fiftieth is lost at most.
            match waited.as_micros() {
                0..2000 => std::thread::yield_now(),
                micros => std::thread::sleep(Duration::from_micros((micros as u64 / 50).min(1000))),
            }
        }
        // SAFETY: a live stream of the current context.
        unsafe { result::stream::synchronize(self.stream) }
            .map_err(|e| self.context.error("cuStreamSynchronize", e))
    }
}

impl Stream {
    /// A tensor map in the driver's form.
    fn encode(&self, map: &TensorMap) -> Result<sys::CUtensorMap, DeviceError> {
        let wrong = |what: String| DeviceError::Driver { device: self.context.name.clone(), message: what };
        map.check().map_err(|e| wrong(format!("a bug in dreamc: {e}")))?;
        let element = match map.element_bytes {
            2 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            bytes => {
                return Err(wrong(format!("a bug in dreamc: a tensor map of elements of {bytes} bytes")));
            }
        };
        let swizzle = match map.swizzle {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let steps = vec![1; map.extents.len()];
        let mut encoded = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: as many extents, sides and steps as dimensions and one stride less, which the
        // check has seen to; the call reads them and writes the map, and looks at no memory of the
        // device.
        let done = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut encoded,
                element,
                map.extents.len() as u32,
                map.address as *mut c_void,
                map.extents.as_ptr(),
                map.strides.as_ptr(),
                map.tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        done.result().map_err(|e| self.context.error("cuTensorMapEncodeTiled", e))?;
        Ok(encoded)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.stuck.load(Ordering::Relaxed) || self.context.enter().is_err() {
            return;
        }
        // SAFETY: made by this session in this context and freed once, after the stream has come to
        // its end. There is no one to tell of a failure.
        unsafe {
            *self.ranks.get_mut() = None;
            let _ = result::stream::synchronize(self.stream);
            self.products = None;
            for &event in self.events.iter().chain([&self.end]) {
                let _ = result::event::destroy(event);
            }
            for &module in &self.modules {
                let _ = result::module::unload(module);
            }
            for &address in &self.allocations {
                let _ = result::free_sync(address);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// The functions of a module by name.
struct Module {
    functions: HashMap<String, sys::CUfunction>,
}

/// Recorded launches, ready to run.
struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread whose current context is theirs.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.context.stuck.load(Ordering::Relaxed) && self.context.enter().is_ok() {
            // SAFETY: instantiated once and destroyed once; the driver keeps what is still running.
            // There is no one to tell of a failure.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

// SAFETY: functions belong to a module of a context and may be launched from any thread.
unsafe impl Send for Module {}

impl Gpu for Stream {
    type Module = Module;
    type Graph = Graph;
    type Product = cublaslt::Product;

    const SYNCHRONOUS: bool = false;
    const RECORDS: bool = true;
    const PAGE: u64 = PAGE;
    const RESERVE: u64 = RESERVE;

    fn name(&self) -> &str {
        &self.context.name
    }

    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError> {
        self.context.enter()?;
        let size = usize::try_from(bytes.max(4)).map_err(|_| DeviceError::OutOfMemory { bytes, what })?;
        // SAFETY: the current context; the address is kept and freed in `drop`.
        let address = match unsafe { result::malloc_sync(size) } {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                return Err(DeviceError::OutOfMemory { bytes, what });
            }
            Err(error) => return Err(self.context.error("cuMemAlloc", error)),
        };
        self.allocations.push(address);
        self.fill_zero(address, size)?;
        Ok(address)
    }

    fn zero(&mut self, address: u64, bytes: u64) -> Result<(), DeviceError> {
        self.context.enter()?;
        self.fill_zero(address, bytes as usize)
    }

    fn library(&self) -> Option<&Library> {
        self.library.as_ref()
    }

    fn product(&mut self, dense: &Dense) -> Result<Result<cublaslt::Product, String>, DeviceError> {
        self.context.enter()?;
        let Some(library) = &self.library else { return Ok(Err("there is no library".into())) };
        let failed = |why: String| DeviceError::Driver {
            device: self.context.name.clone(),
            message: format!("{}: {why}; DREAMC_CUBLASLT=0 does without", library.name),
        };
        let handle = match &mut self.products {
            Some(handle) => handle,
            none => {
                let found = CublasLt::find().map_err(|why| failed(why.into()))?;
                none.insert(cublaslt::Handle::new(found).map_err(|refusal| failed(refusal.to_string()))?)
            }
        };
        Ok(handle.product(dense, library.workspace).map_err(|refusal| refusal.to_string()))
    }

    fn multiply(
        &mut self,
        product: &cublaslt::Product,
        operands: [u64; 3],
        scratch: u64,
        origin: &str,
    ) -> Result<(), DeviceError> {
        self.context.enter()?;
        let (Some(handle), Some(library)) = (&self.products, &self.library) else {
            let message = format!("{origin}: a product of a library that is not at work");
            return Err(DeviceError::Driver { device: self.context.name.clone(), message });
        };
        let workspace = (scratch, library.workspace);
        // SAFETY: addresses are of this session's memory, which the check of the plan keeps every
        // access inside; scratch memory has room for the workspace; the stream is waited for before
        // memory is freed.
        let Err(refusal) = (unsafe { handle.multiply(product, operands, workspace, self.stream.cast()) })
        else {
            return Ok(());
        };
        // The library says that something failed; what, the driver knows.
        if !self.recording {
            self.wait()?;
        }
        let message = format!("{origin}, {}: {refusal}; DREAMC_CUBLASLT=0 does without", library.name);
        Err(DeviceError::Driver { device: self.context.name.clone(), message })
    }

    fn join(&mut self, group: &Group) -> Result<(), DeviceError> {
        *self.ranks.get_mut() = nccl::Communicator::meet(&self.context, group)?;
        Ok(())
    }

    fn exchange(&mut self, list: Vec<Exchange>) -> Result<bool, DeviceError> {
        let Some(ranks) = self.ranks.get_mut() else { return Ok(false) };
        if !list.is_empty() {
            self.context.enter()?;
            ranks.begin(self.stream, list)?;
        }
        Ok(true)
    }

    fn begun(&self) -> u64 {
        self.ranks.borrow().as_ref().map_or(0, nccl::Communicator::begun)
    }

    fn after(&mut self, number: u64) -> Result<(), DeviceError> {
        let Some(ranks) = self.ranks.get_mut() else { return Ok(()) };
        self.context.enter()?;
        ranks.after(number, self.stream)
    }

    fn until(&mut self, number: u64) -> Result<(), DeviceError> {
        let Some(ranks) = self.ranks.get_mut() else { return Ok(()) };
        self.context.enter()?;
        ranks.until(number, self.stream)
    }

    fn exchanged(&mut self) -> Result<f64, DeviceError> {
        let Some(ranks) = self.ranks.get_mut() else { return Ok(0.0) };
        self.context.enter()?;
        ranks.wait(self.stream)
    }

    fn copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), DeviceError> {
        self.context.enter()?;
        // SAFETY: both ranges are inside the session's memory, by the check of the plan and the
        // slots of exchanges, and apart.
        unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.stream) }
            .map_err(|e| self.context.error("cuMemcpyDtoDAsync", e))
    }

    fn mark(&mut self, number: usize) -> Result<bool, DeviceError> {
        self.context.enter()?;
        let event = self.event(number)?;
        self.record_event(event).map(|()| true)
    }

    fn between(&mut self, from: usize, to: usize) -> Result<f64, DeviceError> {
        self.context.enter()?;
        let (begin, end) = (self.event(from)?, self.event(to)?);
        // The bindings have the call's second version, which drivers before CUDA 12.8 lack.
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        let mut milliseconds = 0.0;
        // SAFETY: looked for in `CudaDevice::new`; live events that were recorded and waited for.
        let elapsed = unsafe {
            match sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0") {
                Ok(elapsed) => elapsed(&mut milliseconds, begin, end).result(),
                Err(_) => Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND)),
            }
        };
        elapsed.map_err(|e| self.context.error("cuEventElapsedTime", e))?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Module, DeviceError> {
        self.context.enter()?;
        let named = |call: &str| format!("kernel {}: {call}", source.name);
        // The driver takes PTX as text that ends in a zero.
        let code = [code, &[0]].concat();
        // SAFETY: what NVRTC made for this architecture, whole by the cache's promise; the driver
        // copies it.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) }
            .map_err(|e| self.context.error(&named("cuModuleLoadData"), e))?;
        self.modules.push(module);
        let mut functions = HashMap::new();
        for pass in &source.passes {
            let Ok(name) = CString::new(pass.entry.as_str()) else { continue };
            // SAFETY: a live module and a C string.
            let function = unsafe { result::module::get_function(module, name) }
                .map_err(|e| self.context.error(&named("cuModuleGetFunction"), e))?;
            if pass.shared_bytes > self.context.shared {
                let (needed, there) = (pass.shared_bytes, self.context.shared);
                return Err(DeviceError::Driver {
                    device: self.context.name.clone(),
                    message: format!(
                        "kernel {} needs {needed} bytes of shared memory for a block, where this GPU has {there}; those of \
                         compute capability 8.0 and 9.0 have more, and smaller heads and narrower layers need less",
                        source.name
                    ),
                });
            }
            // Static and dynamic shared memory together may be 48 KiB without it.
            if pass.shared_bytes > 0 {
                let attribute =
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: a live function.
                unsafe {
                    result::function::set_function_attribute(function, attribute, pass.shared_bytes as i32)
                }
                .map_err(|e| self.context.error(&named("cuFuncSetAttribute"), e))?;
            }
            functions.insert(pass.entry.clone(), function);
        }
        Ok(Module { functions })
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.settle()?;
        // SAFETY: the session keeps to its own allocations; `bytes` is borrowed until the copy is
        // done.
        unsafe { result::memcpy_htod_async(address, bytes, self.stream) }
            .map_err(|e| self.context.error("cuMemcpyHtoDAsync", e))?;
        self.wait()
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.settle()?;
        // SAFETY: likewise.
        unsafe { result::memcpy_dtoh_async(bytes, address, self.stream) }
            .map_err(|e| self.context.error("cuMemcpyDtoHAsync", e))?;
        self.wait()
    }

    fn launch(&mut self, module: &Module, launch: &Launch, origin: &str) -> Result<(), DeviceError> {
        self.context.enter()?;
        let function = module.functions.get(&launch.kernel).ok_or_else(|| DeviceError::Driver {
            device: self.context.name.clone(),
            message: format!("{origin}: no function {}", launch.kernel),
        })?;
        let places = launch.args.iter().map(|arg| match arg {
            Arg::TensorMap(map) => self.encode(map),
            plain => Ok(sys::CUtensorMap { opaque: placed(plain) }),
        });
        let mut places = places.collect::<Result<Vec<_>, _>>()?;
        let mut pointers: Vec<*mut c_void> =
            places.iter_mut().map(|p| std::ptr::from_mut(p).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the arguments are those that the generated entry declares, in its order, and
        // outlive the call; addresses are of this session's memory, which the check of the plan
        // keeps every access inside.
        unsafe {
            result::launch_kernel(
                *function,
                (gx, gy, gz),
                (bx, by, bz),
                launch.shared_bytes,
                self.stream,
                &mut pointers,
            )
        }
        .map_err(|e| self.context.error(&format!("{origin}, kernel {}: cuLaunchKernel", launch.kernel), e))
    }

    fn record(&mut self) -> Result<(), DeviceError> {
        self.context.enter()?;
        // Calls of other threads meanwhile are their own affair.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream of the current context.
        unsafe { result::stream::begin_capture(self.stream, mode) }
            .map_err(|e| self.context.error("cuStreamBeginCapture", e))?;
        self.recording = true;
        Ok(())
    }

    fn recorded(&mut self) -> Result<Graph, DeviceError> {
        self.recording = false;
        self.context.enter()?;
        // SAFETY: a live stream of the current context.
        let graph = unsafe { result::stream::end_capture(self.stream) }
            .map_err(|e| self.context.error("cuStreamEndCapture", e))?;
        // SAFETY: the graph that the capture gave, destroyed once and after it was instantiated;
        // null is no graph.
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            executable
        };
        let executable = executable.map_err(|e| self.context.error("cuGraphInstantiate", e))?;
        Ok(Graph { context: self.context.clone(), executable })
    }

    fn replay(&mut self, graph: &Graph) -> Result<(), DeviceError> {
        self.context.enter()?;
        // SAFETY: made by this session, of launches whose memory and code it still holds.
        unsafe { result::graph::launch(graph.executable, self.stream) }
            .map_err(|e| self.context.error("cuGraphLaunch", e))
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.wait()
    }

    fn free(&self) -> Result<Option<u64>, DeviceError> {
        self.context.enter()?;
        let (free, _) = result::mem_get_info().map_err(|e| self.context.error("cuMemGetInfo", e))?;
        Ok(Some(free as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_do_not_go_together_are_told() {
        let of =
            |nvrtc, driver, capability, ptx| fits(nvrtc, driver, capability, ptx).err().unwrap_or_default();
        assert_eq!(of((13, 0), 13000, (9, 0), false), "");
        assert_eq!(of((12, 8), 13000, (12, 0), false), "");
        // Machine code runs on drivers of its major version, PTX does not.
        assert_eq!(of((13, 5), 13000, (9, 0), false), "");
        assert!(of((13, 5), 13000, (9, 0), true).contains("`pip install nvidia-cuda-nvrtc==13.0.*`"));
        let old = of((13, 0), 12040, (9, 0), false);
        assert!(
            old.contains("for CUDA 12.4") && old.contains("`pip install nvidia-cuda-nvrtc-cu12==12.4.*`"),
            "{old}"
        );
        let new = of((12, 4), 12080, (12, 0), false);
        assert!(
            new.contains("NVRTC 12.4") && new.contains("12.0; `pip install nvidia-cuda-nvrtc-cu12==12.8.*`"),
            "{new}"
        );
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_what_is_missing() {
        // SAFETY: as in `CudaDevice::new`.
        if unsafe { sys::is_culib_present() } {
            return dreamc_skip::skip("there is a driver");
        }
        let Err(error) = CudaDevice::new(0) else { panic!("a device without a driver") };
        assert!(error.to_string().contains("install the driver"), "{error}");
    }
}
