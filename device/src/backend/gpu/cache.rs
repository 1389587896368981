//! Compiling generated texts, and keeping what comes out on disk.
//!
//! *In*: sources. *Out*: code for each, in order. *Promise*: a cached code is used only if it was
//! made from the same text, headers and options by the same version of NVRTC, and is whole (its own
//! hash is checked); files appear by renaming, so processes that compile the same kernels at once
//! do not disturb each other; a cache that cannot be read or written costs time and nothing else.
//! Choices between two ways of computing a product are kept with the code; the first that is kept
//! stays.
//!
//! The folder is `DREAMC_CACHE`, else `dreamc` in `XDG_CACHE_HOME` or `~/.cache`; an empty
//! `DREAMC_CACHE` means none.

use super::headers;
use super::library::geometry;
use crate::{Choice, DeviceError};
use dreamc_compiler::codegen::{Dialect, Limits, Source, Variant};
use dreamc_data::files;
use dreamc_nvrtc::{Nvrtc, NvrtcError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kind of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// PTX text.
    Ptx,
    /// Machine code.
    Cubin,
    /// Machine code of AMD's.
    Hip,
    /// The text itself, which the device compiles or runs.
    Text,
}

/// Code, or why there is none.
pub(crate) type Compiled = Result<Vec<u8>, NvrtcError>;

/// NVRTC, or hipRTC, with its options and its cache; none of them where the device takes texts.
pub(crate) struct Compiler {
    nvrtc: Option<&'static Nvrtc>,
    target: Target,
    /// The GPU that code is for, where no option says it.
    card: String,
    options: Vec<String>,
    folder: Option<PathBuf>,
    texts: Variant,
}

/// The texts that an architecture runs: on `sm_90a` those that use what Hopper alone has, unless
/// `DREAMC_HOPPER=0`; with `DREAMC_NAIVE=1` naive ones.
pub(super) fn texts(architecture: &str) -> Variant {
    let naive = std::env::var_os("DREAMC_NAIVE").is_some_and(|v| v != "0");
    let hopper = architecture.ends_with("90a") && std::env::var_os("DREAMC_HOPPER").is_none_or(|v| v != "0");
    Variant { hopper: hopper && !naive, naive, ..Variant::default() }
}

impl Compiler {
    /// `architecture`: `compute_80` for PTX, `sm_90a` for machine code.
    pub(crate) fn new(target: Target, architecture: &str) -> Result<Self, NvrtcError> {
        let nvrtc = Nvrtc::find()?;
        let mut options = vec![format!("--gpu-architecture={architecture}"), "-lineinfo".into()];
        // Without what kernels do not use (textures, launches from kernels): a quarter of what an
        // empty text takes.
        if nvrtc.version() >= (13, 0) {
            options.push("--minimal".into());
        }
        let folder = folder();
        if let Some(folder) = &folder {
            files::remove_abandoned(folder, None);
        }
        let nvrtc = Some(nvrtc);
        Ok(Compiler { nvrtc, target, card: String::new(), options, folder, texts: texts(architecture) })
    }

    /// None: the device takes naive texts in this dialect.
    pub(crate) fn text(dialect: Dialect) -> Self {
        let texts = Variant { naive: true, dialect, ..Variant::default() };
        let (card, options) = (String::new(), vec![]);
        Compiler { nvrtc: None, target: Target::Text, card, options, folder: None, texts }
    }

    /// hipRTC for the current GPU of AMD's, a `card` with its driver: naive texts, as no others are
    /// for it. Products and sums are joined where a text says so alone.
    #[cfg(feature = "rocm")]
    pub(crate) fn amd(card: &str) -> Result<Self, NvrtcError> {
        let options = ["-O3", "-ffp-contract=off"].map(String::from).to_vec();
        let texts = Variant { naive: true, dialect: Dialect::Hip, ..Variant::default() };
        let card = card.to_string();
        Ok(Compiler {
            nvrtc: Some(Nvrtc::find_amd()?),
            target: Target::Hip,
            card,
            options,
            folder: folder(),
            texts,
        })
    }

    /// Version of NVRTC; zeros without one.
    pub(crate) fn version(&self) -> (i32, i32) {
        self.nvrtc.map_or((0, 0), Nvrtc::version)
    }

    /// The same for a GPU with these limits; they are an H100's otherwise.
    pub(crate) fn with_limits(self, limits: Limits) -> Self {
        Compiler { texts: Variant { limits, ..self.texts }, ..self }
    }

    /// The texts that it compiles, operands left open.
    pub(crate) fn texts(&self) -> Variant {
        self.texts
    }

    /// Whether its texts multiply e4m3 on tensor cores.
    pub(crate) fn multiplies_codes(&self) -> bool {
        self.texts.hopper
    }

    /// The same for texts at full speed, where the dialect has them.
    pub(crate) fn whole(self) -> Self {
        Compiler { texts: Variant { naive: false, ..self.texts }, ..self }
    }

    /// The same for naive texts.
    pub(crate) fn naive(self) -> Self {
        Compiler { texts: Variant { naive: true, hopper: false, ..self.texts }, ..self }
    }

    /// Compiles all sources, on all cores.
    pub(crate) fn compile(&self, sources: &[&Source]) -> Result<Vec<Vec<u8>>, DeviceError> {
        Ok(self.compile_each(sources).into_iter().collect::<Result<_, _>>()?)
    }

    /// The same; of each its code, or why it has none.
    pub(crate) fn compile_each(&self, sources: &[&Source]) -> Vec<Compiled> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(sources.len()).max(1);
        let next = AtomicUsize::new(0);
        let results: Mutex<Vec<Option<Compiled>>> = Mutex::new(sources.iter().map(|_| None).collect());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some(source) = sources.get(i) else { return };
                        let code = self.one(source);
                        let mut results = results.lock().unwrap_or_else(|e| e.into_inner());
                        results[i] = Some(code);
                    }
                });
            }
        });
        let results = results.into_inner().unwrap_or_else(|e| e.into_inner());
        let missing = || NvrtcError::Call { call: "nvrtcCompileProgram", reason: "no result".into() };
        results.into_iter().map(|result| result.unwrap_or_else(|| Err(missing()))).collect()
    }

    fn key(&self, source: &Source) -> String {
        let mut hash = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            // Lengths keep neighbours apart.
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        let (major, minor) = self.version();
        add(format!("{major}.{minor} {:?}{}", self.target, self.card).as_bytes());
        self.options.iter().for_each(|option| add(option.as_bytes()));
        for (name, text) in headers() {
            add(name.as_bytes());
            add(text.as_bytes());
        }
        add(file(source).as_bytes());
        add(source.text.as_bytes());
        hash.finalize().to_hex().to_string()
    }

    /// Whether anything is kept.
    pub(crate) fn keeps(&self) -> bool {
        self.folder.is_some()
    }

    /// Where the choice between the kernel of a source and a library's is kept; `against` says
    /// everything about the latter and the product.
    pub(super) fn choice(&self, against: &str, source: &Source) -> Option<KeptChoice> {
        let mut hash = blake3::Hasher::new();
        for part in [&self.key(source), &geometry(source), against] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        let name = format!("choice-{}", hash.finalize().to_hex());
        self.folder.as_ref().map(|folder| KeptChoice(folder.join(name)))
    }

    /// Where the outcome of a proof of a source is kept, on a device of this identity.
    pub(super) fn proof(&self, identity: &str, source: &Source) -> Option<PathBuf> {
        let mut hash = blake3::Hasher::new();
        for part in [&self.key(source), &geometry(source), identity] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        self.folder.as_ref().map(|folder| folder.join(format!("proof-{}", hash.finalize().to_hex())))
    }

    /// A text that is kept, if it is whole.
    pub(super) fn kept(&self, place: &Path) -> Option<String> {
        String::from_utf8(read(place)?).ok()
    }

    /// Keeps a text, if that works.
    pub(super) fn keep(&self, place: &Path, text: &str) {
        write(place, text.as_bytes());
    }

    /// Leaves a file for a person, next to the folder of kernels; gives its path.
    pub(super) fn report(&self, source: &Source, text: &str) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?.parent()?.join("reports");
        let path = folder.join(format!("{}-{}.txt", source.name.replace('/', "-"), &self.key(source)[..12]));
        std::fs::create_dir_all(&folder).ok()?;
        files::write_atomic(&path, |out| out.write_all(text.as_bytes())).ok()?;
        Some(path)
    }

    fn one(&self, source: &Source) -> Compiled {
        let Some(nvrtc) = self.nvrtc else { return Ok(source.text.clone().into_bytes()) };
        let path = self.folder.as_ref().map(|folder| folder.join(self.key(source)));
        if let Some(code) = path.as_deref().and_then(read) {
            return Ok(code);
        }
        let name = file(source);
        let text = dreamc_nvrtc::Source { name: &name, text: &source.text, headers: headers() };
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        let code = match self.target {
            Target::Ptx => nvrtc.ptx(text, &options)?.code.into_bytes(),
            Target::Cubin | Target::Hip | Target::Text => nvrtc.cubin(text, &options)?.code,
        };
        if let Some(path) = path {
            write(&path, &code);
        }
        Ok(code)
    }
}

/// The name under which a debugger or profiler knows the text. Sources of one text have one.
fn file(source: &Source) -> String {
    format!("{}.cu", source.passes.first().map_or("kernel", |pass| &pass.entry))
}

fn folder() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("DREAMC_CACHE") {
        return (!named.is_empty()).then(|| PathBuf::from(named).join("kernels"));
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    Some(cache.join("dreamc").join("kernels"))
}

const HASH: usize = 32;

/// A whole file's code.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let (hash, code) = bytes.split_at_checked(HASH)?;
    if blake3::hash(code).as_bytes() != hash {
        return None;
    }
    bytes.drain(..HASH);
    Some(bytes)
}

/// Best effort: a cache that cannot be written is no cache.
fn write(path: &Path, code: &[u8]) {
    let _ = std::fs::create_dir_all(files::parent(path))
        .and_then(|()| files::write_atomic(path, |out| hashed(out, code)));
}

/// Content after its own hash, as [`read`] wants it.
fn hashed(out: &mut dyn Write, content: &[u8]) -> io::Result<()> {
    out.write_all(blake3::hash(content).as_bytes())?;
    out.write_all(content)
}

/// A choice in the cache.
pub(super) struct KeptChoice(PathBuf);

impl KeptChoice {
    /// `None` where there is none, or one that is not whole.
    pub(super) fn read(&self) -> Option<Choice> {
        let text = String::from_utf8(read(&self.0)?).ok()?;
        let (who, reason) = text.split_once('\n')?;
        let library = match who {
            LIBRARY => true,
            GENERATED => false,
            _ => return None,
        };
        Some(Choice { library, reason: reason.into() })
    }

    /// Keeps a choice, unless another process was faster: the choice that is kept now. `None` where
    /// none could be.
    pub(super) fn keep(&self, choice: &Choice) -> Option<Choice> {
        if self.read().is_none() {
            // The file that is there is not whole.
            let _ = std::fs::remove_file(&self.0);
        }
        let text = format!("{}\n{}", if choice.library { LIBRARY } else { GENERATED }, choice.reason);
        let _ = std::fs::create_dir_all(files::parent(&self.0))
            .and_then(|()| files::write_new(&self.0, |out| hashed(out, text.as_bytes())));
        self.read()
    }
}

const LIBRARY: &str = "library";
const GENERATED: &str = "generated";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_choice_stays() {
        let folder = tempfile::tempdir().unwrap();
        let place = KeptChoice(folder.path().join("kernels/choice"));
        let choice = |library, reason: &str| Choice { library, reason: reason.into() };
        assert_eq!(place.read(), None);
        let first = choice(true, "1.0 µs,\ngenerated 2.0 µs");
        assert_eq!(place.keep(&first), Some(first.clone()));
        assert_eq!(place.keep(&choice(false, "another process")), Some(first.clone()));
        assert_eq!(place.read(), Some(first));
        // One that is not whole does not count.
        for broken in [&b"library\nbut no hash"[..], b"", b"generated"] {
            std::fs::write(&place.0, broken).unwrap();
            assert_eq!(place.read(), None);
            let second = choice(false, "again");
            assert_eq!(place.keep(&second), Some(second));
        }
        write(&place.0, b"perhaps\n");
        assert_eq!(place.read(), None);
        assert_eq!(std::fs::read_dir(folder.path().join("kernels")).unwrap().count(), 1);
        let nowhere = KeptChoice(folder.path().join("kernels/choice/inside-a-file"));
        assert_eq!(nowhere.keep(&choice(true, "")), None);
    }

    #[test]
    fn a_torn_file_is_no_code() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels").join("key");
        assert_eq!(read(&path), None);
        write(&path, b"code");
        assert_eq!(read(&path).as_deref(), Some(&b"code"[..]));
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
        write(&path, b"again");
        assert_eq!(read(&path).as_deref(), Some(&b"again"[..]));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
