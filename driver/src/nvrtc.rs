//! NVRTC as the stand-in's cards need it: the real one, but machine code for a card is PTX under a
//! line that names the card.
//!
//! Options of dreamc stay as they are (`sm_90a`, `nvrtcGetCUBIN`); only a real GPU could run what
//! would come out.

use crate::settings::Spoil;
use crate::{CUBIN, Settings};
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, OnceLock};

/// A program of NVRTC's.
type Handle = *mut c_void;
type Fetch = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;

/// `NVRTC_ERROR_INTERNAL_ERROR`
const INTERNAL: c_int = 11;
/// `NVRTC_ERROR_COMPILATION`
const COMPILATION: c_int = 6;

/// Programs that do not compile.
static SPOILED: Mutex<Option<HashSet<usize>>> = Mutex::new(None);

fn spoiled<T>(with: impl FnOnce(&mut HashSet<usize>) -> T) -> T {
    let mut guard = SPOILED.lock().unwrap_or_else(|e| e.into_inner());
    with(guard.get_or_insert_with(HashSet::new))
}

/// Architectures that programs were compiled for as machine code, by handle.
static ARCHITECTURES: Mutex<Option<HashMap<usize, String>>> = Mutex::new(None);

fn architectures<T>(with: impl FnOnce(&mut HashMap<usize, String>) -> T) -> T {
    let mut guard = ARCHITECTURES.lock().unwrap_or_else(|e| e.into_inner());
    with(guard.get_or_insert_with(HashMap::new))
}

/// The real library; null where there is none.
fn library() -> Handle {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let Some(path) = Settings::of_environment().ok().and_then(|s| s.nvrtc) else { return 0 };
        let builtins = path.parent().and_then(|folder| {
            let mut files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
            files.find(|f| f.file_name().is_some_and(|n| n.as_bytes().starts_with(b"libnvrtc-builtins.so")))
        });
        let mut handle = 0;
        for file in builtins.iter().chain([&path]) {
            let Ok(name) = CString::new(file.as_os_str().as_bytes()) else { return 0 };
            // SAFETY: a C string; NVIDIA's libraries, never unloaded.
            handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) } as usize;
        }
        handle
    }) as Handle
}

/// A function of the real library.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
unsafe fn real<F: Copy>(name: &CStr) -> Option<F> {
    let library = library();
    if library.is_null() {
        return None;
    }
    // SAFETY: a live library and a C string.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: a pointer, as `F` is by the caller's promise.
    (!function.is_null()).then(|| unsafe { std::mem::transmute_copy(&function) })
}

/// Functions that go to the real library as they are.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// As NVRTC documents it.
        ///
        /// # Safety
        /// As NVRTC documents it.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            // SAFETY: the function's own type; arguments are the caller's.
            unsafe {
                match real::<unsafe extern "C" fn($($type),*) -> c_int>(
                    CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()),
                ) {
                    Some(function) => function($($argument),*),
                    None => INTERNAL,
                }
            }
        }
    )*};
}

forward! {
    nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    nvrtcGetPTXSize(program: Handle, size: *mut usize);
    nvrtcGetPTX(program: Handle, to: *mut c_char);
    nvrtcGetProgramLogSize(program: Handle, size: *mut usize);
    nvrtcGetProgramLog(program: Handle, to: *mut c_char);
}

/// Makes a program, and looks for kernels in its text that are to be spoiled: `name(` after a
/// space.
///
/// # Safety
/// As NVRTC documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut Handle,
    text: *const c_char,
    name: *const c_char,
    headers: c_int,
    texts: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    type Strings = *const *const c_char;
    type Create =
        unsafe extern "C" fn(*mut Handle, *const c_char, *const c_char, c_int, Strings, Strings) -> c_int;
    // SAFETY: the function's own type; arguments are the caller's, a C string among them.
    unsafe {
        let Some(create) = real::<Create>(c"nvrtcCreateProgram") else { return INTERNAL };
        let said = create(program, text, name, headers, texts, names);
        let settings = Settings::of_environment().unwrap_or_default();
        let text = CStr::from_ptr(text).to_string_lossy();
        let mut words = text.split([' ', '\n']).filter(|word| word.contains('('));
        if said == 0 && words.any(|word| settings.spoils(Spoil::Compile, word)) {
            spoiled(|all| all.insert(*program as usize));
        }
        said
    }
}

/// Compiles for `compute_…` where `sm_…` is asked for.
///
/// # Safety
/// As NVRTC documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: Handle,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    if spoiled(|all| all.contains(&(program as usize))) {
        return COMPILATION;
    }
    let mut own: Vec<CString> = vec![];
    for i in 0..count.max(0) as usize {
        // SAFETY: `count` C strings, by the caller's promise.
        let option = unsafe { CStr::from_ptr(*options.add(i)) };
        let text = option.to_string_lossy();
        own.push(match text.strip_prefix("--gpu-architecture=sm_") {
            Some(number) => {
                architectures(|all| all.insert(program as usize, format!("sm_{number}")));
                CString::new(format!("--gpu-architecture=compute_{number}")).unwrap_or_default()
            }
            None => option.into(),
        });
    }
    let pointers: Vec<*const c_char> = own.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the function's own type, a program of the caller's and as many C strings as are said.
    unsafe {
        let compile = real::<unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int>(
            c"nvrtcCompileProgram",
        );
        compile.map_or(INTERNAL, |compile| compile(program, count, pointers.as_ptr()))
    }
}

/// The stand-in's machine code; empty where PTX was asked for.
fn code(program: Handle) -> Result<Vec<u8>, c_int> {
    let Some(architecture) = architectures(|all| all.get(&(program as usize)).cloned()) else {
        return Ok(vec![]);
    };
    // SAFETY: the functions' own types; `text` has the size that the first gives.
    unsafe {
        let size = real::<Size>(c"nvrtcGetPTXSize").ok_or(INTERNAL)?;
        let get = real::<Fetch>(c"nvrtcGetPTX").ok_or(INTERNAL)?;
        let mut bytes = 0;
        let said = size(program, &mut bytes);
        let mut text = vec![0u8; bytes];
        let said = if said == 0 { get(program, text.as_mut_ptr().cast()) } else { said };
        if said != 0 {
            return Err(said);
        }
        text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(bytes));
        Ok([format!("{CUBIN}{architecture}\n").into_bytes(), text].concat())
    }
}

/// Size of what [`nvrtcGetCUBIN`] gives.
///
/// # Safety
/// As NVRTC documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: Handle, size: *mut usize) -> c_int {
    match code(program) {
        Ok(code) => {
            // SAFETY: a place for a size, by the caller's promise.
            unsafe { *size = code.len() };
            0
        }
        Err(said) => said,
    }
}

/// PTX under a line with the architecture.
///
/// # Safety
/// As NVRTC documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: Handle, to: *mut c_char) -> c_int {
    match code(program) {
        Ok(code) => {
            // SAFETY: room for as much as was said, by the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), to.cast(), code.len()) };
            0
        }
        Err(said) => said,
    }
}

/// Forgets the program.
///
/// # Safety
/// As NVRTC documents it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut Handle) -> c_int {
    // SAFETY: a place with a program; the function's own type.
    unsafe {
        architectures(|all| all.remove(&(*program as usize)));
        spoiled(|all| all.remove(&(*program as usize)));
        let destroy = real::<unsafe extern "C" fn(*mut Handle) -> c_int>(c"nvrtcDestroyProgram");
        destroy.map_or(INTERNAL, |destroy| destroy(program))
    }
}
