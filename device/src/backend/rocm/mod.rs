//! AMD GPUs, through the HIP runtime of ROCm, which is looked for when a device is asked for and
//! not before.
//!
//! *In*: a plan. *Out*: a session on one GPU, at the naive rung: the texts of naive kernels are HIP
//! as they are CUDA. *Promise*: where there is no runtime or no such GPU, [`RocmDevice::new`] says
//! what to install or how many there are, and nothing panics; launches go to the default stream, in
//! the order of the list, and copies wait for them.
//!
//! No AMD GPU has run this. Its tests run it on the stand-in (`driver/src/hip.rs`), whose hipRTC is
//! NVRTC; they show that calls and texts fit each other, not that a card agrees.

use super::foreign::{calls, first};
use super::gpu::launch::{Arg, Launch, placed};
use super::gpu::{self, Compiler, Gpu};
use crate::{Device, DeviceError, Group, Session};
use dreamc_compiler::codegen::Source;
use dreamc_compiler::program::Plan;
use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::Arc;

type Handle = *mut c_void;

calls! {
    hipInit(c_uint) -> c_uint;
    hipRuntimeGetVersion(*mut c_int) -> c_uint;
    hipGetDeviceCount(*mut c_int) -> c_uint;
    hipDeviceGetName(*mut c_char, c_int, c_int) -> c_uint;
    hipSetDevice(c_int) -> c_uint;
    hipMalloc(*mut Handle, usize) -> c_uint;
    hipFree(Handle) -> c_uint;
    hipMemset(Handle, c_int, usize) -> c_uint;
    hipMemcpyHtoD(Handle, *const c_void, usize) -> c_uint;
    hipMemcpyDtoH(*mut c_void, Handle, usize) -> c_uint;
    hipMemGetInfo(*mut usize, *mut usize) -> c_uint;
    hipModuleLoadData(*mut Handle, *const c_void) -> c_uint;
    hipModuleUnload(Handle) -> c_uint;
    hipModuleGetFunction(*mut Handle, Handle, *const c_char) -> c_uint;
    hipModuleLaunchKernel(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    ) -> c_uint;
    hipDeviceSynchronize() -> c_uint;
    hipGetErrorName(c_uint) -> *const c_char;
    hipGetErrorString(c_uint) -> *const c_char;
}

/// `hipErrorOutOfMemory`
const OUT_OF_MEMORY: c_uint = 2;
/// `hipErrorNoDevice` and `hipErrorInvalidDevice`: a machine without an AMD GPU answers with
/// either.
const NO_DEVICE: [c_uint; 2] = [100, 101];

/// Files of the runtime, by the loader's paths and where ROCm puts it.
const NAMES: [&str; 5] = [
    "libamdhip64.so",
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "/opt/rocm/lib/libamdhip64.so",
];

/// Memory that the runtime takes for code, after the arena.
const RESERVE: u64 = 128 << 20;

/// Memory is handed out in pages of this size.
const PAGE: u64 = 2 << 20;

/// A GPU of AMD's.
pub struct RocmDevice {
    card: Arc<Card>,
    compiler: Compiler,
    title: String,
}

/// The runtime and a GPU's number in it.
struct Card {
    calls: Calls,
    number: c_int,
    name: String,
    /// Holds the code; never unloaded.
    _library: libloading::Library,
}

// SAFETY: HIP's calls may come from any thread; each makes its GPU the thread's own first.
unsafe impl Send for Card {}
// SAFETY: likewise.
unsafe impl Sync for Card {}

impl Card {
    /// The runtime's words for a code.
    fn words(&self, code: c_uint) -> String {
        // SAFETY: the functions' own types; both give strings that live as long as the process.
        let [name, text] = unsafe {
            [(self.calls.hipGetErrorName)(code), (self.calls.hipGetErrorString)(code)].map(|text| {
                if text.is_null() {
                    String::new()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            })
        };
        match (name.as_str(), text.as_str()) {
            ("", _) => format!("error {code}"),
            (_, "") => name,
            _ if name == text => name,
            _ => format!("{name}, {text}"),
        }
    }

    fn error(&self, message: String) -> DeviceError {
        DeviceError::Driver { device: self.name.clone(), message }
    }

    fn check(&self, call: &str, code: c_uint) -> Result<(), DeviceError> {
        if code == 0 { Ok(()) } else { Err(self.error(format!("{call}: {}", self.words(code)))) }
    }

    /// Makes the GPU this thread's; every use of the runtime begins so.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the function's own type.
        self.check("hipSetDevice", unsafe { (self.calls.hipSetDevice)(self.number) })
    }
}

impl RocmDevice {
    /// GPU number `ordinal`.
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        let name = format!("rocm:{ordinal}");
        let missing = |message: String| DeviceError::Driver { device: name.clone(), message };
        let files: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
        let (library, at) = first(&files).map_err(|_| {
            missing(
                "there is no HIP runtime (libamdhip64 was not found); install ROCm 5.7 or newer, or use `--device cpu`"
                    .into(),
            )
        })?;
        let calls = Calls::of(&library)
            .map_err(|e| missing(format!("{at} lacks a call: {e}; install ROCm 5.7 or newer")))?;
        let none = "the runtime sees no GPU (HIP_VISIBLE_DEVICES may hide it)";
        let mut card = Card { calls, number: 0, name: name.clone(), _library: library };
        // SAFETY: the functions' own types, places for results.
        let (begun, counted, count) = unsafe {
            let begun = (card.calls.hipInit)(0);
            let mut count = 0;
            let counted = if begun == 0 { (card.calls.hipGetDeviceCount)(&mut count) } else { 0 };
            (begun, counted, count)
        };
        if NO_DEVICE.contains(&begun)
            || NO_DEVICE.contains(&counted)
            || (begun == 0 && counted == 0 && count <= 0)
        {
            return Err(missing(none.into()));
        }
        card.check("hipInit", begun)?;
        card.check("hipGetDeviceCount", counted)?;
        let found = c_int::try_from(ordinal).ok().filter(|n| *n < count);
        card.number = found.ok_or_else(|| {
            missing(format!(
                "no such GPU; there {} (rocm:0 is the first)",
                if count == 1 { "is one".into() } else { format!("are {count}") }
            ))
        })?;
        card.enter()?;
        let (mut title, mut version) = ([0 as c_char; 256], 0);
        // SAFETY: as many bytes as are said, a place for the version.
        let (named, versioned) = unsafe {
            let named =
                (card.calls.hipDeviceGetName)(title.as_mut_ptr(), title.len() as c_int - 1, card.number);
            (named, (card.calls.hipRuntimeGetVersion)(&mut version))
        };
        card.check("hipDeviceGetName", named)?;
        card.check("hipRuntimeGetVersion", versioned)?;
        // SAFETY: the last byte is zero: the runtime has room for one less.
        let title = unsafe { CStr::from_ptr(title.as_ptr()) }.to_string_lossy().into_owned();
        let compiler = Compiler::amd(&format!("{title}, {version}"))?;
        Ok(RocmDevice { card: Arc::new(card), compiler, title })
    }
}

impl Device for RocmDevice {
    fn name(&self) -> String {
        format!("{} ({}, naive kernels, tried on no GPU of AMD's yet)", self.card.name, self.title)
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        gpu::scratch_bytes(&self.card.name, &self.compiler, None, plan)
    }

    gpu::answers!();

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        let memory = Memory { card: self.card.clone(), allocations: vec![], modules: vec![] };
        // Code is made for the GPU of the thread.
        self.card.enter()?;
        gpu::load(memory, &self.compiler, plan, group, &gpu::Trust::default())
    }
}

/// A session's memory and code.
struct Memory {
    card: Arc<Card>,
    allocations: Vec<Handle>,
    modules: Vec<Handle>,
}

// SAFETY: memory and modules may be used from any thread that has made the GPU its own, which every
// method sees to.
unsafe impl Send for Memory {}

/// The functions of a module by name.
struct Module(HashMap<String, Handle>);

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Module {}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.card.enter().is_err() {
            return;
        }
        let calls = &self.card.calls;
        // SAFETY: made by this session and freed once, after the stream has come to its end. There
        // is no one to tell of a failure.
        unsafe {
            let _ = (calls.hipDeviceSynchronize)();
            for &module in &self.modules {
                let _ = (calls.hipModuleUnload)(module);
            }
            for &address in &self.allocations {
                let _ = (calls.hipFree)(address);
            }
        }
    }
}

impl Gpu for Memory {
    type Module = Module;
    type Graph = Infallible;
    type Product = Infallible;

    const SYNCHRONOUS: bool = false;
    const RECORDS: bool = false;
    const PAGE: u64 = PAGE;
    const RESERVE: u64 = RESERVE;

    fn name(&self) -> &str {
        &self.card.name
    }

    fn allocate(&mut self, bytes: u64, what: &'static str) -> Result<u64, DeviceError> {
        self.card.enter()?;
        let full = || DeviceError::OutOfMemory { bytes, what };
        let size = usize::try_from(bytes.max(4)).map_err(|_| full())?;
        let mut address: Handle = std::ptr::null_mut();
        // SAFETY: a place for the address, which is kept and freed in `drop`.
        match unsafe { (self.card.calls.hipMalloc)(&mut address, size) } {
            OUT_OF_MEMORY => return Err(full()),
            code => self.card.check("hipMalloc", code)?,
        }
        self.allocations.push(address);
        // SAFETY: the allocation just made.
        self.card.check("hipMemset", unsafe { (self.card.calls.hipMemset)(address, 0, size) })?;
        Ok(address as u64)
    }

    fn load(&mut self, source: &Source, code: &[u8]) -> Result<Module, DeviceError> {
        self.card.enter()?;
        let named = |call: &str| format!("kernel {}: {call}", source.name);
        let code = [code, &[0]].concat();
        let mut module: Handle = std::ptr::null_mut();
        // SAFETY: what hipRTC made for this GPU, whole by the cache's promise; the runtime copies
        // it.
        let loaded = unsafe { (self.card.calls.hipModuleLoadData)(&mut module, code.as_ptr().cast()) };
        self.card.check(&named("hipModuleLoadData"), loaded)?;
        self.modules.push(module);
        let mut functions = HashMap::new();
        for pass in &source.passes {
            let Ok(name) = CString::new(pass.entry.as_str()) else { continue };
            let mut function: Handle = std::ptr::null_mut();
            // SAFETY: a live module and a C string.
            let found =
                unsafe { (self.card.calls.hipModuleGetFunction)(&mut function, module, name.as_ptr()) };
            self.card.check(&named("hipModuleGetFunction"), found)?;
            functions.insert(pass.entry.clone(), function);
        }
        Ok(Module(functions))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.card.enter()?;
        // SAFETY: the session keeps to its own allocations; the call returns when it is done.
        let done =
            unsafe { (self.card.calls.hipMemcpyHtoD)(address as Handle, bytes.as_ptr().cast(), bytes.len()) };
        self.card.check("hipMemcpyHtoD", done)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.card.enter()?;
        // SAFETY: likewise.
        let done = unsafe {
            (self.card.calls.hipMemcpyDtoH)(bytes.as_mut_ptr().cast(), address as Handle, bytes.len())
        };
        self.card.check("hipMemcpyDtoH", done)
    }

    fn launch(&mut self, module: &Module, launch: &Launch, origin: &str) -> Result<(), DeviceError> {
        self.card.enter()?;
        let function = module.0.get(&launch.kernel).copied();
        let function =
            function.ok_or_else(|| self.card.error(format!("{origin}: no function {}", launch.kernel)))?;
        if launch.args.iter().any(|arg| matches!(arg, Arg::TensorMap(_))) {
            return Err(self
                .card
                .error(format!("{origin}: a bug in dreamc: a naive kernel with a tensor map")));
        }
        let mut places: Vec<[u64; 16]> = launch.args.iter().map(placed).collect();
        let mut pointers: Vec<*mut c_void> =
            places.iter_mut().map(|p| std::ptr::from_mut(p).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the arguments are those that the generated entry declares, in its order, and
        // outlive the call; addresses are of this session's memory, which the check of the plan
        // keeps every access inside.
        let done = unsafe {
            let (stream, extra) = (std::ptr::null_mut(), std::ptr::null_mut());
            let shared = launch.shared_bytes;
            (self.card.calls.hipModuleLaunchKernel)(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shared,
                stream,
                pointers.as_mut_ptr(),
                extra,
            )
        };
        self.card.check(&format!("{origin}, kernel {}: hipModuleLaunchKernel", launch.kernel), done)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.card.enter()?;
        // SAFETY: the function's own type.
        self.card.check("hipDeviceSynchronize", unsafe { (self.card.calls.hipDeviceSynchronize)() })
    }

    fn free(&self) -> Result<Option<u64>, DeviceError> {
        self.card.enter()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: places for two numbers.
        self.card.check("hipMemGetInfo", unsafe { (self.card.calls.hipMemGetInfo)(&mut free, &mut all) })?;
        Ok(Some(free as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rocm_is_told_what_is_missing() {
        let Err(error) = RocmDevice::new(0) else { return dreamc_skip::skip("there is a GPU of AMD's") };
        assert!(error.to_string().contains("ROCm") || error.to_string().contains("no GPU"), "{error}");
    }
}
