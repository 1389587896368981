//! The HIP runtime and hipRTC as far as dreamc calls them, over the same machine: a
//! `libamdhip64.so` and a `libhiprtc.so`.
//!
//! Codes of HIP are those of CUDA where both have one. Its streams are not used but for the default
//! one, and copies return when they are done. hipRTC is NVRTC, which takes the texts of naive
//! kernels as they are: what comes out is the stand-in's machine code for its card.

use crate::api::{cuDeviceGetName, cuLaunchKernel, cuModuleGetFunction, cuModuleLoadData, put};
use crate::machine::{Outcome, result};
use crate::nvrtc::{
    nvrtcCompileProgram, nvrtcCreateProgram, nvrtcDestroyProgram, nvrtcGetCUBIN, nvrtcGetCUBINSize,
    nvrtcGetProgramLog, nvrtcGetProgramLogSize,
};
use crate::{Machine, Settings, api};
use cudarc::driver::sys::CUresult;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

type Handle = *mut c_void;
type Strings = *const *const c_char;

/// The legacy default stream.
const DEFAULT: u64 = 0;

/// Runs a call.
fn call(what: impl FnOnce(&mut Machine) -> Outcome<()>) -> c_uint {
    api::call(what) as c_uint
}

/// Calls as `hip_runtime_api.h` declares them.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) => $body:expr;)*) => {$(
        /// As AMD documents it.
        ///
        /// # Safety
        /// As AMD documents it: pointers are to what is said there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_uint {
            let body: fn(&mut Machine, $($type),*) -> Outcome<()> = $body;
            call(|machine| body(machine, $($argument),*))
        }
    )*};
}

calls! {
    hipInit(flags: c_uint) => |m, flags| m.init(flags);
    hipRuntimeGetVersion(to: *mut c_int) => |_, to| put(to, Ok(60_200_000));
    hipGetDeviceCount(to: *mut c_int) => |m, to| put(to, m.count());
    hipSetDevice(device: c_int) => |m, device| {
        if m.current_context().is_some() {
            return Ok(());
        }
        let context = m.retain(device)?;
        m.set_current(context)
    };
    hipMalloc(to: *mut Handle, bytes: usize) =>
        |m, to, bytes| put(to, m.alloc(bytes as u64).map(|address| address as Handle));
    hipFree(address: Handle) => |m, address| m.free(address as u64);
    hipMemset(at: Handle, value: c_int, bytes: usize) => |m, at, value, bytes| {
        m.set(at as u64, value as u8, bytes as u64, DEFAULT)?;
        m.wait(DEFAULT)
    };
    hipMemcpyHtoD(at: Handle, from: *const c_void, bytes: usize) => |m, at, from, bytes| {
        // SAFETY: host memory that stays as it is until the call returns.
        unsafe { m.to_device(at as u64, from.cast(), bytes, DEFAULT) }?;
        m.wait(DEFAULT)
    };
    hipMemcpyDtoH(to: *mut c_void, at: Handle, bytes: usize) => |m, to, at, bytes| {
        // SAFETY: likewise.
        unsafe { m.to_host(to.cast(), at as u64, bytes, DEFAULT) }?;
        m.wait(DEFAULT)
    };
    hipMemGetInfo(free: *mut usize, all: *mut usize) => |m, free, all| {
        let (f, a) = m.info()?;
        put(free, Ok(f as usize))?;
        put(all, Ok(a as usize))
    };
    hipModuleUnload(module: Handle) => |m, module| m.unload(module as u64);
    hipDeviceSynchronize() => |m| m.wait(DEFAULT);
}

/// Calls that are the driver's under another name.
macro_rules! renamed {
    ($($name:ident = $own:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// As AMD documents it.
        ///
        /// # Safety
        /// As AMD documents it: pointers are to what is said there.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the runtime's")]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_uint {
            // SAFETY: by the caller's promise.
            (unsafe { $own($($argument),*) }) as c_uint
        }
    )*};
}

renamed! {
    hipDeviceGetName = cuDeviceGetName(to: *mut c_char, room: c_int, device: c_int);
    hipModuleLoadData = cuModuleLoadData(to: *mut Handle, image: *const c_void);
    hipModuleGetFunction = cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char);
    hipModuleLaunchKernel = cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
    hiprtcCreateProgram = nvrtcCreateProgram(
        program: *mut Handle, text: *const c_char, name: *const c_char, headers: c_int, texts: Strings, names: Strings
    );
    hiprtcGetCodeSize = nvrtcGetCUBINSize(program: Handle, size: *mut usize);
    hiprtcGetCode = nvrtcGetCUBIN(program: Handle, to: *mut c_char);
    hiprtcGetProgramLogSize = nvrtcGetProgramLogSize(program: Handle, size: *mut usize);
    hiprtcGetProgramLog = nvrtcGetProgramLog(program: Handle, to: *mut c_char);
    hiprtcDestroyProgram = nvrtcDestroyProgram(program: *mut Handle);
}

/// As AMD documents it; the words are the name.
///
/// # Safety
/// Nothing is asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetErrorName(code: c_uint) -> *const c_char {
    api::name(result(code) as u32)
}

/// As AMD documents it; the words are the name.
///
/// # Safety
/// Nothing is asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetErrorString(code: c_uint) -> *const c_char {
    api::name(result(code) as u32)
}

/// As AMD documents it.
///
/// # Safety
/// Two places for numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_uint {
    let done = put(major, Ok(6)).and_then(|()| put(minor, Ok(2)));
    done.err().unwrap_or(CUresult::CUDA_SUCCESS) as c_uint
}

/// Compiles for the stand-in's card. NVRTC lacks the options of clang, and gets its own for what
/// they say.
///
/// # Safety
/// As AMD documents it: `count` C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCompileProgram(program: Handle, count: c_int, options: Strings) -> c_uint {
    const KNOWN: [&str; 2] = ["-O3", "-ffp-contract=off"];
    /// `HIPRTC_ERROR_INVALID_OPTION`
    const INVALID_OPTION: c_uint = 5;
    for i in 0..count.max(0) as usize {
        // SAFETY: by the caller's promise.
        let option = unsafe { std::ffi::CStr::from_ptr(*options.add(i)) };
        if !KNOWN.contains(&option.to_string_lossy().as_ref()) {
            return INVALID_OPTION;
        }
    }
    let (major, minor) = Settings::of_environment().unwrap_or_default().card;
    let own = [format!("--gpu-architecture=sm_{major}{minor}"), "--fmad=false".into()];
    let own = own.map(|option| CString::new(option).unwrap_or_default());
    let pointers = [own[0].as_ptr(), own[1].as_ptr()];
    // SAFETY: a program of the caller's and two C strings.
    (unsafe { nvrtcCompileProgram(program, 2, pointers.as_ptr()) }) as c_uint
}
