//! The driver's C interface: the calls that dreamc makes, over one [`Machine`] for the process.

use crate::machine::{Mode, Outcome, Shape, result};
use crate::{CUBIN, Machine, Settings};
use cudarc::driver::sys::{CUresult, CUtensorMap};
use dreamc_ptx::{Swizzle, TensorMap};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock};

type Handle = *mut c_void;

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

/// Runs a call; one that panics is a bug of the stand-in, and fails.
pub(crate) fn call(what: impl FnOnce(&mut Machine) -> Outcome<()>) -> CUresult {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let mut machine = MACHINE.lock().unwrap_or_else(|e| e.into_inner());
        if machine.is_none() {
            let settings = Settings::of_environment().map_err(|wrong| {
                eprintln!("{wrong}");
                CUresult::CUDA_ERROR_INVALID_VALUE
            })?;
            *machine = Some(Machine::new(settings));
        }
        machine.as_mut().map_or(Ok(()), what)
    }));
    match done {
        Ok(Ok(())) => CUresult::CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

/// Calls as `cuda.h` declares them; `to` is where the caller wants the result, which is not null.
macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) => $body:expr;)*) => {$(
        /// As NVIDIA documents it.
        ///
        /// # Safety
        /// As NVIDIA documents it: pointers are to what is said there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            let body: fn(&mut Machine, $($type),*) -> Outcome<()> = $body;
            call(|machine| body(machine, $($argument),*))
        }
    )*};
}

/// Writes a result.
pub(crate) fn put<T>(to: *mut T, value: Outcome<T>) -> Outcome<()> {
    let value = value?;
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: a place for the result, by the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a handle.
fn put_handle(to: *mut Handle, value: Outcome<u64>) -> Outcome<()> {
    put(to, value.map(|handle| handle as Handle))
}

/// A C string.
fn text(from: *const c_char) -> Outcome<String> {
    if from.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: a C string, by the caller's promise.
    Ok(unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

calls! {
    cuInit(flags: c_uint) => |m, flags| m.init(flags);
    cuDriverGetVersion(to: *mut c_int) => |m, to| put(to, Ok(m.version()));
    cuDeviceGetCount(to: *mut c_int) => |m, to| put(to, m.count());
    cuDeviceGet(to: *mut c_int, ordinal: c_int) => |m, to, ordinal| put(to, m.get(ordinal));
    cuDeviceGetName(to: *mut c_char, room: c_int, device: c_int) => |m, to, room, device| {
        let name = CString::new(m.name(device)?).unwrap_or_default();
        let bytes = name.as_bytes_with_nul();
        if to.is_null() || bytes.len() > room.max(0) as usize {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: `room` bytes, by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
        Ok(())
    };
    cuDeviceGetAttribute(to: *mut c_int, attribute: c_uint, device: c_int) =>
        |m, to, attribute, device| put(to, m.attribute(attribute, device));
    cuDevicePrimaryCtxRetain(to: *mut Handle, device: c_int) => |m, to, device| put_handle(to, m.retain(device));
    cuDevicePrimaryCtxRelease_v2(device: c_int) => |m, device| m.release(device);
    cuCtxSetCurrent(context: Handle) => |m, context| m.set_current(context as u64);
    cuMemGetInfo_v2(free: *mut usize, all: *mut usize) => |m, free, all| {
        let (f, a) = m.info()?;
        put(free, Ok(f as usize))?;
        put(all, Ok(a as usize))
    };
    cuMemAlloc_v2(to: *mut u64, bytes: usize) => |m, to, bytes| put(to, m.alloc(bytes as u64));
    cuMemFree_v2(address: u64) => |m, address| m.free(address);
    cuMemsetD8Async(at: u64, value: c_uchar, bytes: usize, stream: Handle) =>
        |m, at, value, bytes, stream| m.set(at, value, bytes as u64, stream as u64);
    cuMemcpyHtoDAsync_v2(at: u64, from: *const c_void, bytes: usize, stream: Handle) =>
        // SAFETY: host memory that stays as it is until the stream is waited for, by the caller's
        // promise.
        |m, at, from, bytes, stream| unsafe { m.to_device(at, from.cast(), bytes, stream as u64) };
    cuMemcpyDtoHAsync_v2(to: *mut c_void, at: u64, bytes: usize, stream: Handle) =>
        // SAFETY: likewise.
        |m, to, at, bytes, stream| unsafe { m.to_host(to.cast(), at, bytes, stream as u64) };
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) =>
        |m, to, from, bytes, stream| m.copy(to, from, bytes as u64, stream as u64);
    cuStreamCreate(to: *mut Handle, flags: c_uint) => |m, to, flags| put_handle(to, m.stream(flags));
    cuStreamSynchronize(stream: Handle) => |m, stream| m.wait(stream as u64);
    cuStreamDestroy_v2(stream: Handle) => |m, stream| m.destroy_stream(stream as u64);
    cuStreamBeginCapture_v2(stream: Handle, mode: c_uint) => |m, stream, mode| {
        let modes = [Mode::Global, Mode::ThreadLocal, Mode::Relaxed];
        let mode = modes.get(mode as usize).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        m.begin(stream as u64, *mode)
    };
    cuStreamEndCapture(stream: Handle, to: *mut Handle) => |m, stream, to| {
        let graph = m.end(stream as u64);
        put_handle(to, Ok(graph.unwrap_or(0)))?;
        graph.map(|_| ())
    };
    cuGraphInstantiateWithFlags(to: *mut Handle, graph: Handle, flags: c_ulonglong) =>
        |m, to, graph, flags| put_handle(to, m.instantiate(graph as u64, flags));
    cuGraphLaunch(executable: Handle, stream: Handle) =>
        |m, executable, stream| m.replay(executable as u64, stream as u64);
    cuGraphDestroy(graph: Handle) => |m, graph| m.destroy_graph(graph as u64);
    cuGraphExecDestroy(executable: Handle) => |m, executable| m.destroy_executable(executable as u64);
    cuEventCreate(to: *mut Handle, flags: c_uint) => |m, to, flags| put_handle(to, m.event(flags));
    cuEventRecord(event: Handle, stream: Handle) => |m, event, stream| m.record_event(event as u64, stream as u64);
    cuEventQuery(event: Handle) => |m, event| m.query_event(event as u64);
    cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) =>
        |m, stream, event, flags| m.wait_event(stream as u64, event as u64, flags);
    cuEventElapsedTime(to: *mut f32, begin: Handle, end: Handle) =>
        |m, to, begin, end| put(to, m.elapsed(begin as u64, end as u64));
    cuEventDestroy_v2(event: Handle) => |m, event| m.destroy_event(event as u64);
    cuModuleLoadData(to: *mut Handle, image: *const c_void) => |m, to, image| {
        if image.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: four bytes at least, of either kind of image.
        if unsafe { image.cast::<[u8; 4]>().read_unaligned() } == *b"\x7fELF" {
            eprintln!("stand-in: machine code of a real card; DREAMC_NVRTC must be the stand-in, too ({CUBIN}...)");
            return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        }
        let image = text(image.cast())?;
        put_handle(to, m.load(image.as_bytes()))
    };
    cuModuleUnload(module: Handle) => |m, module| m.unload(module as u64);
    cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) =>
        |m, to, module, name| put_handle(to, m.function(module as u64, &text(name)?));
    cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int) =>
        |m, function, attribute, value| m.allow_shared(function as u64, attribute, value);
}

/// As NVIDIA documents it, for what dreamc asks for: tensors in their order in memory, zeros beyond
/// them, every element of a box.
///
/// # Safety
/// As NVIDIA documents it: pointers are to as many numbers as the rank asks for.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's")]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    to: *mut CUtensorMap,
    element: c_uint,
    rank: c_uint,
    address: *mut c_void,
    extents: *const u64,
    strides: *const u64,
    sides: *const c_uint,
    steps: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
) -> CUresult {
    call(|machine| {
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        machine.encode()?;
        let lists_missing =
            extents.is_null() || sides.is_null() || steps.is_null() || (strides.is_null() && rank > 1);
        if to.is_null() || !(to as usize).is_multiple_of(64) || !(1..=5).contains(&rank) || lists_missing {
            return Err(invalid);
        }
        let rank = rank as usize;
        // SAFETY: as many as the rank says, and one stride less, by the caller's promise.
        let (extents, strides, sides, steps) = unsafe {
            let strides = if rank > 1 { std::slice::from_raw_parts(strides, rank - 1) } else { &[] };
            (
                std::slice::from_raw_parts(extents, rank),
                strides,
                std::slice::from_raw_parts(sides, rank),
                std::slice::from_raw_parts(steps, rank),
            )
        };
        let element_bytes = match element {
            6 | 9 => 2,
            7 => 4,
            _ => return Err(invalid),
        };
        let swizzle = match swizzle {
            0 => Swizzle::None,
            1 => Swizzle::Bytes32,
            2 => Swizzle::Bytes64,
            3 => Swizzle::Bytes128,
            _ => return Err(invalid),
        };
        if steps.iter().any(|&step| step != 1) || interleave != 0 || promotion > 3 || fill != 0 {
            return Err(invalid);
        }
        let map = TensorMap {
            address: address as u64,
            element_bytes,
            extents: extents.to_vec(),
            strides: strides.to_vec(),
            tile: sides.to_vec(),
            swizzle,
        };
        map.check().map_err(|_| invalid)?;
        let mut opaque = [0; 16];
        for (word, bytes) in opaque.iter_mut().zip(map.to_bytes().chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().map_err(|_| invalid)?);
        }
        // SAFETY: a place for the map, by the caller's promise.
        unsafe { to.write(CUtensorMap { opaque }) };
        Ok(())
    })
}

/// As NVIDIA documents it; arguments are copied.
///
/// # Safety
/// As NVIDIA documents it: `parameters` has a pointer to each argument, of the size that the kernel
/// declares.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Handle,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    call(|machine| {
        let sizes = machine.parameters(function as u64)?;
        if !extra.is_null() || (parameters.is_null() && !sizes.is_empty()) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut args = vec![];
        for (i, &size) in sizes.iter().enumerate() {
            // SAFETY: as many pointers as parameters, each to as many bytes as declared, by the
            // caller's promise.
            let from = unsafe { *parameters.add(i) }.cast::<u8>();
            if from.is_null() {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            // SAFETY: likewise.
            args.push(unsafe { std::slice::from_raw_parts(from, size as usize) }.to_vec());
        }
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared };
        machine.launch(function as u64, shape, stream as u64, args)
    })
}

/// Private tables of functions; there are none. NVRTC asks for one where it finds a driver, and
/// reads it where the call is missing.
///
/// # Safety
/// None of the pointers is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetExportTable(_to: *mut *const c_void, _id: *const c_void) -> CUresult {
    CUresult::CUDA_ERROR_NOT_FOUND
}

/// Names of codes, which live as long as the process.
pub(crate) fn name(code: u32) -> *const c_char {
    static NAMES: OnceLock<Mutex<HashMap<u32, CString>>> = OnceLock::new();
    let names = NAMES.get_or_init(Mutex::default);
    let mut names = names.lock().unwrap_or_else(|e| e.into_inner());
    let new = || CString::new(format!("{:?}", result(code))).unwrap_or_default();
    names.entry(code).or_insert_with(new).as_ptr()
}

/// As NVIDIA documents it.
///
/// # Safety
/// `to` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_uint, to: *mut *const c_char) -> CUresult {
    match put(to, Ok(name(code))) {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(code) => code,
    }
}

/// As NVIDIA documents it; the words are the name.
///
/// # Safety
/// `to` is a place for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_uint, to: *mut *const c_char) -> CUresult {
    // SAFETY: by the caller's promise.
    unsafe { cuGetErrorName(code, to) }
}
