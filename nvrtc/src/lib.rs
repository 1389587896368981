//! CUDA C++ text in, PTX or cubin out: NVIDIA's run-time compiler, loaded where it is and missed
//! politely where it is not.
//!
//! NVRTC is a shared library that needs neither a GPU nor a driver. It is never linked:
//! [`Nvrtc::find`] looks for it once per process and every other function calls through the handle
//! that this opened, whatever else of that name the loader knows. A machine without it gets a
//! [`NvrtcError::NotFound`] that says what to install, and no call here panics.
//!
//! The search, first hit wins: `DREAMC_NVRTC` (a virtual environment, a folder or the library
//! itself; when it is set nothing else is tried), `VIRTUAL_ENV`, a `.venv` beside or above the
//! working directory, `CUDA_HOME` and `CUDA_PATH`, `/usr/local/cuda*`, Python packages of the
//! system and the user, and at last the loader's own paths.

use libloading::Library;
use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub mod search;

use search::{children, library_in, usual_places};

/// Beginning of the library's file name.
const LIBRARY: &str = "libnvrtc.so";

/// Names by which the loader may know it, where it is in no usual place.
const NAMES: [&str; 5] =
    [LIBRARY, "libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];

/// NVRTC as found on this machine.
pub struct Nvrtc {
    path: Option<PathBuf>,
    version: (i32, i32),
    api: Api,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Nvrtc").field("path", &self.path).field("version", &self.version).finish()
    }
}

/// An `nvrtcResult`.
type Code = c_int;
/// An `nvrtcProgram`.
type Handle = *mut c_void;
type Strings = *const *const c_char;

/// The functions in use, as `nvrtc.h` declares them.
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code,
    create: unsafe extern "C" fn(*mut Handle, *const c_char, *const c_char, c_int, Strings, Strings) -> Code,
    compile: unsafe extern "C" fn(Handle, c_int, Strings) -> Code,
    destroy: unsafe extern "C" fn(*mut Handle) -> Code,
    ptx: Pair,
    cubin: Pair,
    log: Pair,
    /// Holds the code; never unloaded.
    _library: Library,
}

/// One of NVRTC's pairs of functions: how many bytes, then the bytes.
#[derive(Clone, Copy)]
struct Pair {
    size: unsafe extern "C" fn(Handle, *mut usize) -> Code,
    get: unsafe extern "C" fn(Handle, *mut c_char) -> Code,
}

impl Api {
    fn of(library: Library) -> Result<Api, libloading::Error> {
        // SAFETY: each is of the type that `nvrtc.h` gives the function of that name, and stays
        // while the library does.
        unsafe {
            let pair = |size: &[u8], get: &[u8]| {
                Ok::<_, libloading::Error>(Pair { size: *library.get(size)?, get: *library.get(get)? })
            };
            Ok(Api {
                version: *library.get(b"nvrtcVersion\0")?,
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                ptx: pair(b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")?,
                cubin: pair(b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0")?,
                log: pair(b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?,
                _library: library,
            })
        }
    }
}

/// One text to compile.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The file name that diagnostics and line information carry.
    pub name: &'a str,
    /// CUDA C++.
    pub text: &'a str,
    /// Files that `#include` finds: name and text.
    pub headers: &'a [(&'a str, &'a str)],
}

/// Result of a compilation: the code, and the compiler's messages (warnings, or the registers and
/// spills that `--ptxas-options=-v` asks for).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled<T> {
    /// PTX text or cubin bytes.
    pub code: T,
    /// The compiler's log; empty when it had nothing to say.
    pub log: String,
}

/// Why there is no code.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum NvrtcError {
    /// No library anywhere.
    #[error(
        "NVRTC, the CUDA run-time compiler, was not found (looked in {searched}); install it with `pip install \
         nvidia-cuda-nvrtc==13.0.*` (for a driver of CUDA 12 `nvidia-cuda-nvrtc-cu12`) in a virtual environment and name that \
         in DREAMC_NVRTC, or install the CUDA toolkit"
    )]
    NotFound {
        /// The places that were tried.
        searched: String,
    },
    /// A library that does not load.
    #[error("NVRTC at {path} does not load: {reason}")]
    Load {
        /// The file.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// The text does not compile.
    #[error("NVRTC does not compile {name}:\n{log}")]
    Compile {
        /// The source's name.
        name: String,
        /// The compiler's words.
        log: String,
    },
    /// A call failed for another reason than the text.
    #[error("{call} failed: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// NVRTC's name for the failure.
        reason: String,
    },
    /// A text with a zero byte, which C cannot take.
    #[error("the {what} holds a zero byte")]
    ZeroByte {
        /// Which text.
        what: &'static str,
    },
}

impl Nvrtc {
    /// The NVRTC of this process: searched and loaded on the first call.
    pub fn find() -> Result<&'static Nvrtc, NvrtcError> {
        static FOUND: OnceLock<Result<Nvrtc, NvrtcError>> = OnceLock::new();
        FOUND.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    /// Major and minor version, as in (13, 0).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The file it was loaded from; `None` when the loader found it by itself.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Compiles to PTX. `options` as on nvcc's command line: `--gpu-architecture=compute_90a`,
    /// `-lineinfo`.
    pub fn ptx(&self, source: Source, options: &[&str]) -> Result<Compiled<String>, NvrtcError> {
        let program = Program::compile(&self.api, source, options)?;
        let mut code = program.fetch("nvrtcGetPTX", self.api.ptx)?;
        code.truncate(code.iter().position(|&byte| byte == 0).unwrap_or(code.len()));
        Ok(Compiled { code: String::from_utf8_lossy(&code).into_owned(), log: program.log() })
    }

    /// Compiles to a cubin: `options` must name a real architecture, `--gpu-architecture=sm_90a`.
    pub fn cubin(&self, source: Source, options: &[&str]) -> Result<Compiled<Vec<u8>>, NvrtcError> {
        let program = Program::compile(&self.api, source, options)?;
        let code = program.fetch("nvrtcGetCUBIN", self.api.cubin)?;
        if code.is_empty() {
            let reason = "no cubin; name a real architecture (sm_…), not a virtual one (compute_…)".into();
            return Err(NvrtcError::Call { call: "nvrtcGetCUBIN", reason });
        }
        Ok(Compiled { code, log: program.log() })
    }
}

/// A program handle that is destroyed whatever happens in between.
struct Program<'a> {
    api: &'a Api,
    handle: Handle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from nvrtcCreateProgram and is destroyed once.
        unsafe { (self.api.destroy)(&mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn compile(api: &'a Api, source: Source, options: &[&str]) -> Result<Self, NvrtcError> {
        let text = c_string(source.text, "source")?;
        let name = c_string(source.name, "source's name")?;
        let options = c_strings(options.iter().copied(), "compiler option")?;
        let header_names = c_strings(source.headers.iter().map(|header| header.0), "header's name")?;
        let header_texts = c_strings(source.headers.iter().map(|header| header.1), "header")?;
        let [options_at, names_at, texts_at] =
            [&options, &header_names, &header_texts].map(|strings| pointers(strings));

        let mut handle = std::ptr::null_mut();
        // SAFETY: every pointer is to a C string or an array of them that outlives the call; NVRTC
        // copies what it keeps.
        let created = unsafe {
            (api.create)(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                header_names.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", created)?;
        let program = Program { api, handle };
        // SAFETY: a live handle and `options.len()` C strings.
        let compiled = unsafe { (api.compile)(program.handle, options.len() as c_int, options_at.as_ptr()) };
        match compiled {
            0 => Ok(program),
            INVALID_OPTION | COMPILATION => {
                Err(NvrtcError::Compile { name: source.name.into(), log: program.log() })
            }
            other => check("nvrtcCompileProgram", other).map(|()| program),
        }
    }

    fn log(&self) -> String {
        let log = self.fetch("nvrtcGetProgramLog", self.api.log).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).into()
    }

    fn fetch(&self, call: &'static str, pair: Pair) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: a live handle and a place for the size.
        check(call, unsafe { (pair.size)(self.handle, &mut bytes) })?;
        let mut data = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: `data` has the size NVRTC just asked for.
            check(call, unsafe { (pair.get)(self.handle, data.as_mut_ptr().cast()) })?;
        }
        Ok(data)
    }
}

const INVALID_OPTION: Code = 5;
const COMPILATION: Code = 6;

/// NVRTC's names of its results, from 0 on.
const RESULTS: [&str; 13] = [
    "NVRTC_SUCCESS",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    "NVRTC_ERROR_INVALID_INPUT",
    "NVRTC_ERROR_INVALID_PROGRAM",
    "NVRTC_ERROR_INVALID_OPTION",
    "NVRTC_ERROR_COMPILATION",
    "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    "NVRTC_ERROR_INTERNAL_ERROR",
    "NVRTC_ERROR_TIME_FILE_WRITE_FAILED",
];

fn check(call: &'static str, result: Code) -> Result<(), NvrtcError> {
    if result == 0 {
        return Ok(());
    }
    let name = usize::try_from(result).ok().and_then(|i| RESULTS.get(i));
    let reason = name.map_or(format!("nvrtcResult {result}"), |name| name.to_string());
    Err(NvrtcError::Call { call, reason })
}

fn c_string(text: &str, what: &'static str) -> Result<CString, NvrtcError> {
    CString::new(text).map_err(|_| NvrtcError::ZeroByte { what })
}

fn c_strings<'a>(
    texts: impl Iterator<Item = &'a str>,
    what: &'static str,
) -> Result<Vec<CString>, NvrtcError> {
    texts.map(|text| c_string(text, what)).collect()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

/// Finds and loads the library.
fn load() -> Result<Nvrtc, NvrtcError> {
    let named = std::env::var_os("DREAMC_NVRTC").filter(|value| !value.is_empty()).map(PathBuf::from);
    let asked = named.is_some();
    let places = named.map_or_else(usual_places, |place| vec![place]);
    let path = places.iter().find_map(|place| library_in(place, LIBRARY));
    let library = match &path {
        Some(path) => open_with_builtins(path)?,
        // The loader's own is not the one that was asked for.
        None if asked => return Err(not_found(&places)),
        None => {
            NAMES.iter().find_map(|name| open(OsStr::new(name)).ok()).ok_or_else(|| not_found(&places))?
        }
    };
    let shown = path.as_deref().unwrap_or(Path::new(LIBRARY)).display().to_string();
    let lacks = |error: libloading::Error| NvrtcError::Load { path: shown, reason: error.to_string() };
    let api = Api::of(library).map_err(lacks)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function's own type; two places to write to.
    check("nvrtcVersion", unsafe { (api.version)(&mut major, &mut minor) })?;
    Ok(Nvrtc { path, version: (major, minor), api })
}

fn not_found(places: &[PathBuf]) -> NvrtcError {
    let mut searched: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    searched.push("the loader's paths".into());
    NvrtcError::NotFound { searched: searched.join(", ") }
}

/// Loads NVRTC from its file; its builtins first, which it looks for by name alone and would find
/// on the loader's paths only, for the life of the process.
fn open_with_builtins(path: &Path) -> Result<Library, NvrtcError> {
    let load = |file: &Path| {
        let failed = |error: libloading::Error| NvrtcError::Load {
            path: file.display().to_string(),
            reason: error.to_string(),
        };
        open(file.as_os_str()).map_err(failed)
    };
    if let Some(folder) = path.parent()
        && let Some(builtins) = children(folder, "libnvrtc-builtins.so").pop()
    {
        std::mem::forget(load(&builtins)?);
    }
    load(path)
}

/// Loads a shared library; nothing else finds its symbols.
fn open(name: &OsStr) -> Result<Library, libloading::Error> {
    // SAFETY: NVIDIA's own library, by its name, whose initialisers are NVIDIA's.
    unsafe { Library::new(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvrtc() -> Option<&'static Nvrtc> {
        dreamc_skip::need(Nvrtc::find())
    }

    #[test]
    fn compiles_to_ptx_and_cubin() {
        let Some(nvrtc) = nvrtc() else { return };
        let text = "#include \"one.h\"\nextern \"C\" __global__ void set(int *p) { *p = ONE; }";
        let source = Source { name: "set.cu", text, headers: &[("one.h", "#define ONE 1")] };
        let ptx = nvrtc.ptx(source, &["--gpu-architecture=compute_80"]).unwrap();
        assert!(ptx.code.contains(".entry set("), "{}", ptx.code);
        assert_eq!(ptx.log, "");
        let cubin = nvrtc.cubin(source, &["--gpu-architecture=sm_80"]).unwrap();
        assert_eq!(&cubin.code[..4], b"\x7fELF");
    }

    #[test]
    fn a_wrong_text_comes_back_with_the_log() {
        let Some(nvrtc) = nvrtc() else { return };
        let source = Source { name: "wrong.cu", text: "__global__ void f() { nothing(); }", headers: &[] };
        let error = nvrtc.ptx(source, &[]).unwrap_err();
        assert!(matches!(&error, NvrtcError::Compile { log, .. } if log.contains("wrong.cu(1)")), "{error}");
        assert!(nvrtc.ptx(source, &["--no-such-option"]).is_err());
        let zero = Source { name: "zero.cu", text: "\0", headers: &[] };
        assert!(matches!(nvrtc.ptx(zero, &[]), Err(NvrtcError::ZeroByte { .. })));
    }

    #[test]
    fn a_virtual_architecture_gives_no_cubin() {
        let Some(nvrtc) = nvrtc() else { return };
        let source = Source { name: "f.cu", text: "extern \"C\" __global__ void f() {}", headers: &[] };
        assert!(nvrtc.cubin(source, &["--gpu-architecture=compute_80"]).is_err());
    }
}
