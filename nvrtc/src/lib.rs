//! CUDA C++ text in, PTX or cubin out: NVIDIA's run-time compiler, loaded where it is and missed
//! politely where it is not. AMD's hipRTC has the same calls under names of its own, so
//! [`Nvrtc::find_amd`] gives the same type.
//!
//! NVRTC is a shared library that needs neither a GPU nor a driver. It is never linked:
//! [`Nvrtc::find`] looks for it once per process and every other function calls through the handle
//! that this opened, whatever else of that name the loader knows. A machine without it gets a
//! [`NvrtcError::NotFound`] that says what to install, and no call here panics.
//!
//! The search, first hit wins: `DREAMC_NVRTC` (a virtual environment, a folder or the library
//! itself; when it is set nothing else is tried), `VIRTUAL_ENV`, a `.venv` in or above the working
//! directory, `CUDA_HOME` and `CUDA_PATH`, `/usr/local/cuda*`, Python packages of the system and
//! the user, and at last the loader's own paths. hipRTC is looked for in `DREAMC_HIPRTC` alone
//! where that is set, else in `ROCM_PATH`, `HIP_PATH`, `/opt/rocm*` and the loader's paths.

use libloading::Library;
use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub mod search;

use search::{children, library_in, usual_places};

/// The maker of a run-time compiler, whose library and calls have its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// NVRTC.
    Nvidia,
    /// hipRTC.
    Amd,
}

/// Names of a maker's library and calls.
struct Names {
    library: &'static str,
    /// By which the loader may know it, where it is in no usual place.
    loader: &'static [&'static str],
    variable: &'static str,
    version: &'static str,
    create: &'static str,
    compile: &'static str,
    destroy: &'static str,
    code: [&'static str; 2],
    log: [&'static str; 2],
    /// Before the name of a result.
    result: &'static str,
}

const NVIDIA: Names = Names {
    library: "libnvrtc.so",
    loader: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
    variable: "DREAMC_NVRTC",
    version: "nvrtcVersion",
    create: "nvrtcCreateProgram",
    compile: "nvrtcCompileProgram",
    destroy: "nvrtcDestroyProgram",
    code: ["nvrtcGetCUBINSize", "nvrtcGetCUBIN"],
    log: ["nvrtcGetProgramLogSize", "nvrtcGetProgramLog"],
    result: "NVRTC",
};

const AMD: Names = Names {
    library: "libhiprtc.so",
    // Older runtimes have it in themselves.
    loader: &["libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libamdhip64.so.6", "libamdhip64.so.5"],
    variable: "DREAMC_HIPRTC",
    version: "hiprtcVersion",
    create: "hiprtcCreateProgram",
    compile: "hiprtcCompileProgram",
    destroy: "hiprtcDestroyProgram",
    code: ["hiprtcGetCodeSize", "hiprtcGetCode"],
    log: ["hiprtcGetProgramLogSize", "hiprtcGetProgramLog"],
    result: "HIPRTC",
};

impl Maker {
    fn names(self) -> &'static Names {
        match self {
            Maker::Nvidia => &NVIDIA,
            Maker::Amd => &AMD,
        }
    }

    /// Its compiler's name.
    pub fn compiler(self) -> &'static str {
        match self {
            Maker::Nvidia => "NVRTC",
            Maker::Amd => "hipRTC",
        }
    }

    /// Folders that its library usually is in.
    fn places(self) -> Vec<PathBuf> {
        match self {
            Maker::Nvidia => usual_places(),
            Maker::Amd => {
                let named = ["ROCM_PATH", "HIP_PATH"].into_iter().filter_map(std::env::var_os);
                named.map(PathBuf::from).chain(children(Path::new("/opt"), "rocm")).collect()
            }
        }
    }

    /// No library anywhere.
    fn missing(self, searched: String) -> NvrtcError {
        match self {
            Maker::Nvidia => NvrtcError::NotFound { searched },
            Maker::Amd => NvrtcError::NoHip { searched },
        }
    }
}

/// NVRTC, or hipRTC, as found on this machine.
pub struct Nvrtc {
    maker: Maker,
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
    /// Of NVRTC alone.
    ptx: Option<Pair>,
    code: Pair,
    log: Pair,
    names: &'static Names,
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
    fn of(library: Library, maker: Maker) -> Result<Api, libloading::Error> {
        let names = maker.names();
        // SAFETY: each is of the type that `nvrtc.h` and `hiprtc.h` give the function of that name,
        // and stays while the library does.
        unsafe {
            let pair = |[size, get]: [&str; 2]| {
                Ok::<_, libloading::Error>(Pair { size: *library.get(size)?, get: *library.get(get)? })
            };
            Ok(Api {
                version: *library.get(names.version)?,
                create: *library.get(names.create)?,
                compile: *library.get(names.compile)?,
                destroy: *library.get(names.destroy)?,
                ptx: match maker {
                    Maker::Nvidia => Some(pair(["nvrtcGetPTXSize", "nvrtcGetPTX"])?),
                    Maker::Amd => None,
                },
                code: pair(names.code)?,
                log: pair(names.log)?,
                names,
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
    /// No hipRTC anywhere.
    #[error(
        "hipRTC, ROCm's run-time compiler, was not found (looked in {searched}); install ROCm 5.7 or newer, and name its \
         folder in DREAMC_HIPRTC where it is not in /opt"
    )]
    NoHip {
        /// The places that were tried.
        searched: String,
    },
    /// A library that does not load.
    #[error("the run-time compiler at {path} does not load: {reason}")]
    Load {
        /// The file.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// The text does not compile.
    #[error("{} does not compile {name}:\n{log}", maker.compiler())]
    Compile {
        /// Whose compiler.
        maker: Maker,
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
        FOUND.get_or_init(|| load(Maker::Nvidia)).as_ref().map_err(Clone::clone)
    }

    /// The hipRTC of this process, likewise.
    pub fn find_amd() -> Result<&'static Nvrtc, NvrtcError> {
        static FOUND: OnceLock<Result<Nvrtc, NvrtcError>> = OnceLock::new();
        FOUND.get_or_init(|| load(Maker::Amd)).as_ref().map_err(Clone::clone)
    }

    /// Whose it is.
    pub fn maker(&self) -> Maker {
        self.maker
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
        let Some(ptx) = self.api.ptx else {
            let reason = "hipRTC gives machine code alone".into();
            return Err(NvrtcError::Call { call: "hiprtcGetCode", reason });
        };
        let program = Program::compile(self, source, options)?;
        let mut code = program.fetch("nvrtcGetPTX", ptx)?;
        code.truncate(code.iter().position(|&byte| byte == 0).unwrap_or(code.len()));
        Ok(Compiled { code: String::from_utf8_lossy(&code).into_owned(), log: program.log() })
    }

    /// Compiles to machine code. NVRTC's `options` must name a real architecture,
    /// `--gpu-architecture=sm_90a`; hipRTC takes that of the current GPU.
    pub fn cubin(&self, source: Source, options: &[&str]) -> Result<Compiled<Vec<u8>>, NvrtcError> {
        let program = Program::compile(self, source, options)?;
        let call = self.api.names.code[1];
        let code = program.fetch(call, self.api.code)?;
        if code.is_empty() {
            let reason = match self.maker {
                Maker::Nvidia => "no cubin; name a real architecture (sm_…), not a virtual one (compute_…)",
                Maker::Amd => "no code came out",
            };
            return Err(NvrtcError::Call { call, reason: reason.into() });
        }
        Ok(Compiled { code, log: program.log() })
    }
}

/// A program handle that is destroyed whatever happens in between.
struct Program<'a> {
    api: &'a Api,
    maker: Maker,
    handle: Handle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from nvrtcCreateProgram and is destroyed once.
        unsafe { (self.api.destroy)(&mut self.handle) };
    }
}

impl<'a> Program<'a> {
    fn compile(compiler: &'a Nvrtc, source: Source, options: &[&str]) -> Result<Self, NvrtcError> {
        let (api, maker) = (&compiler.api, compiler.maker);
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
        check(maker, api.names.create, created)?;
        let program = Program { api, maker, handle };
        // SAFETY: a live handle and `options.len()` C strings.
        let compiled = unsafe { (api.compile)(program.handle, options.len() as c_int, options_at.as_ptr()) };
        match compiled {
            0 => Ok(program),
            INVALID_OPTION | COMPILATION => {
                Err(NvrtcError::Compile { maker, name: source.name.into(), log: program.log() })
            }
            other => check(maker, api.names.compile, other).map(|()| program),
        }
    }

    fn log(&self) -> String {
        let log = self.fetch(self.api.names.log[1], self.api.log).unwrap_or_default();
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).into()
    }

    fn fetch(&self, call: &'static str, pair: Pair) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: a live handle and a place for the size.
        check(self.maker, call, unsafe { (pair.size)(self.handle, &mut bytes) })?;
        let mut data = vec![0u8; bytes];
        if bytes > 0 {
            // SAFETY: `data` has the size NVRTC just asked for.
            check(self.maker, call, unsafe { (pair.get)(self.handle, data.as_mut_ptr().cast()) })?;
        }
        Ok(data)
    }
}

const INVALID_OPTION: Code = 5;
const COMPILATION: Code = 6;

/// Names of results, from 0 on, after the library's own; hipRTC has the first twelve.
const RESULTS: [&str; 13] = [
    "SUCCESS",
    "ERROR_OUT_OF_MEMORY",
    "ERROR_PROGRAM_CREATION_FAILURE",
    "ERROR_INVALID_INPUT",
    "ERROR_INVALID_PROGRAM",
    "ERROR_INVALID_OPTION",
    "ERROR_COMPILATION",
    "ERROR_BUILTIN_OPERATION_FAILURE",
    "ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    "ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    "ERROR_NAME_EXPRESSION_NOT_VALID",
    "ERROR_INTERNAL_ERROR",
    "ERROR_TIME_FILE_WRITE_FAILED",
];

fn check(maker: Maker, call: &'static str, result: Code) -> Result<(), NvrtcError> {
    if result == 0 {
        return Ok(());
    }
    let (name, own) = (usize::try_from(result).ok().and_then(|i| RESULTS.get(i)), maker.names().result);
    let reason =
        name.map_or(format!("{}'s result {result}", maker.compiler()), |name| format!("{own}_{name}"));
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
fn load(maker: Maker) -> Result<Nvrtc, NvrtcError> {
    let names = maker.names();
    let named = std::env::var_os(names.variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let asked = named.is_some();
    let places = named.map_or_else(|| maker.places(), |place| vec![place]);
    let path = places.iter().find_map(|place| library_in(place, names.library));
    let not_found = || not_found(maker, &places);
    let library = match &path {
        Some(path) => open_with_builtins(path)?,
        // The loader's own is not the one that was asked for.
        None if asked => return Err(not_found()),
        None => names.loader.iter().find_map(|name| open(OsStr::new(name)).ok()).ok_or_else(not_found)?,
    };
    let shown = path.as_deref().unwrap_or(Path::new(names.library)).display().to_string();
    let lacks = |error: libloading::Error| NvrtcError::Load { path: shown, reason: error.to_string() };
    let api = Api::of(library, maker).map_err(lacks)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function's own type; two places to write to.
    check(maker, names.version, unsafe { (api.version)(&mut major, &mut minor) })?;
    Ok(Nvrtc { maker, path, version: (major, minor), api })
}

fn not_found(maker: Maker, places: &[PathBuf]) -> NvrtcError {
    let mut searched: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
    searched.push("the loader's paths".into());
    maker.missing(searched.join(", "))
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
