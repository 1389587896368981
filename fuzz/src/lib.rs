//! Fuzz targets: every way by which bytes from outside come into dreamc.
//!
//! *In*: any bytes. *Promise of a target*: it returns. A fault (a panic, a printed form that does
//! not read back, a value that was accepted and cannot be used) is a panic; the caller measures
//! time and memory: `tests/robustness/fuzz.rs` with a stable toolchain, or libFuzzer through the
//! binaries in `fuzz_targets`.
//!
//! Several files of a folder are one input: each is a line `@@ NAME` and its bytes up to the next
//! such line. The folder is made anew for each input.

use dreamc_compiler::count::{self, count};
use dreamc_compiler::{compile, ir};
use dreamc_data::parquet::ParquetRows;
use dreamc_data::rows::{Fields, Lines, Template, TextPieces};
use dreamc_data::shard::{self, Format, Shard};
use dreamc_data::sums::CHECKSUMS;
use dreamc_data::{Dataset, Settings, Tokenizer};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::spec::{BadRows, Spec};
use dreamc_dsl::{Spelling, check, check_suite, edit, format, parse, show};
use dreamc_hf::gguf::import::import;
use dreamc_hf::{config::Config, hugging_face};
use dreamc_ptx::{self as ptx, Arg, Launch, Memory, Module};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use dreamc_runtime::checkpoint::{Checkpoint, Weights};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::ledger::Ledger;
use dreamc_runtime::train::metrics::Metrics;
use dreamc_runtime::train::prepare;
use std::cell::{OnceCell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};

/// A way in.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, and that of its folder of the corpus.
    pub name: &'static str,
    /// Tries an input.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 17] = [
    Target { name: "yaml", run: yaml },
    Target { name: "dream", run: dream },
    Target { name: "suite", run: suite },
    Target { name: "model", run: model },
    Target { name: "ir", run: ir_text },
    Target { name: "safetensors", run: safetensors },
    Target { name: "checkpoint", run: checkpoint },
    Target { name: "tokenizer", run: tokenizer },
    Target { name: "hf_config", run: hf_config },
    Target { name: "hf_folder", run: hf_folder },
    Target { name: "gguf", run: gguf },
    Target { name: "rows", run: rows },
    Target { name: "parquet", run: parquet },
    Target { name: "shard", run: shard_files },
    Target { name: "ptx", run: ptx_text },
    Target { name: "metrics", run: metrics },
    Target { name: "ledger", run: ledger },
];

/// Tries an input on the target of this name.
#[allow(dead_code, reason = "one of two users goes through the list instead")]
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target of this name");
    (target.run)(data);
}

// --- the language ---

fn yaml(data: &[u8]) {
    specification(data, Spelling::Yaml);
}

fn dream(data: &[u8]) {
    specification(data, Spelling::Dream);
}

const OVERRIDES: [&str; 3] = ["ea.count=3", "model.body[0].layers[0]=sa", "train.evaluate.every=2"];

/// An accepted value can be printed in both spellings, and reads back as the same.
fn specification(data: &[u8], spelling: Spelling) -> Option<Spec> {
    let Ok(text) = std::str::from_utf8(data) else { return None };
    let ast = match parse("input", text, spelling) {
        Ok(ast) => ast,
        Err(diagnostics) => {
            let _ = diagnostics.render(false);
            return None;
        }
    };
    let checked = check(&ast, &[]);
    for other in [Spelling::Yaml, Spelling::Dream] {
        if let Ok(printed) = format(&ast, other) {
            let again = parse("printed", &printed, other)
                .unwrap_or_else(|error| panic!("does not read back:\n{printed}\n{error}"));
            if checked.is_ok() {
                assert_eq!(format(&again, other).ok().as_deref(), Some(&printed[..]), "printed again");
            }
        }
    }
    drop(check(&ast, &OVERRIDES.map(String::from)).map_err(|diagnostics| diagnostics.to_json()));
    let name = if spelling == Spelling::Yaml { "input.yaml" } else { "input.dream" };
    drop(edit(name, text, "ea.count", "4"));
    let (spec, warnings) = match checked {
        Ok(found) => found,
        Err(diagnostics) => {
            let _ = diagnostics.render(false);
            return None;
        }
    };
    for warning in warnings {
        let _ = warning.render(&spec.sources, false);
    }
    for other in [Spelling::Yaml, Spelling::Dream] {
        let resolved = show(&spec, other);
        let again = parse("resolved", &resolved, other).and_then(|ast| check(&ast, &[]));
        match again {
            Ok((again, _)) => assert_eq!(show(&again, other), resolved, "the resolved form is another one"),
            Err(error) => panic!("the resolved form has errors:\n{resolved}\n{error}"),
        }
    }
    Some(spec)
}

fn suite(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for spelling in [Spelling::Yaml, Spelling::Dream] {
        match parse("input", text, spelling).and_then(|ast| check_suite(&ast, &[])) {
            Ok((suite, _)) => assert!(!suite.seeds.is_empty()),
            Err(diagnostics) => drop(diagnostics.render(false)),
        }
    }
}

/// A model that is accepted is counted and compiled, or refused with a reason.
fn model(data: &[u8]) {
    let Some(spec) = specification(data, Spelling::Yaml) else { return };
    let _ = count(&spec, &count::Options::default()).map_err(|error| error.to_string());
    let _ =
        compile(&spec, &prepare::forward(2, spec.model.context.min(8))).map_err(|error| error.to_string());
}

fn ir_text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let module = match ir::parse(text) {
        Ok(module) => module,
        Err(error) => return drop(error.to_string()),
    };
    let printed = module.to_string();
    match ir::parse(&printed) {
        Ok(again) => assert_eq!(again.to_string(), printed, "the printed form is another one"),
        Err(error) => panic!("the printed form has errors:\n{printed}\n{error}"),
    }
    if let Err(error) = ir::verify(&module) {
        return drop(error.to_string());
    }
    for function in module.functions.values() {
        let _ = ir::cost::total(&module, function, |_| ir::cost::Extents::default());
    }
}

// --- folders ---

thread_local! {
    static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

/// A folder of this thread.
fn scratch(name: &str) -> PathBuf {
    FOLDER.with(|folder| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        let folder = folder.get_or_init(|| tempfile::tempdir_in(parent).expect("a place to write"));
        folder.path().join(name)
    })
}

/// The files of an input, `@@ NAME` before each.
pub fn files(data: &[u8]) -> Vec<(&str, &[u8])> {
    let mut found = vec![];
    let mut rest = data;
    while let Some(after) = rest.strip_prefix(b"@@ ") {
        let end = after.iter().position(|&b| b == b'\n').unwrap_or(after.len());
        let name = std::str::from_utf8(&after[..end]).unwrap_or("");
        let content = after.get(end + 1..).unwrap_or_default();
        let next = content.windows(4).position(|w| w == b"\n@@ ");
        let length = next.unwrap_or(content.len());
        // Names of files of this folder, and no others.
        if Path::new(name).file_name().is_some_and(|n| n == name) && name.len() < 200 && !name.contains('\0')
        {
            found.push((name, &content[..length]));
        }
        rest = content.get(length + 1..).unwrap_or_default();
    }
    found
}

/// The reverse of [`files`].
pub fn join<'a>(list: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let mut out = vec![];
    for (name, content) in list {
        if !out.is_empty() {
            out.push(b'\n');
        }
        out.extend_from_slice(format!("@@ {name}\n").as_bytes());
        out.extend_from_slice(content);
    }
    out
}

/// A folder that holds these files and nothing else.
fn fill(folder: &Path, list: &[(&str, &[u8])]) {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).expect("a place to write");
    for (name, content) in list {
        fs::write(folder.join(name), content).expect("a place to write");
    }
}

fn file(name: &str, data: &[u8]) -> PathBuf {
    let path = scratch(name);
    fs::write(&path, data).expect("a place to write");
    path
}

// --- tensors and checkpoints ---

fn safetensors(data: &[u8]) {
    let path = file("t.safetensors", data);
    let Ok(tensors) = Tensors::open(&path) else { return };
    let entries: Vec<(String, Vec<u64>)> = tensors.entries().map(|(n, s)| (n.into(), s.to_vec())).collect();
    for (name, shape) in entries {
        if let Ok(Some((found, values))) = tensors.get(&name) {
            assert_eq!(found, shape);
            assert_eq!(values.len() as u64, shape.iter().product::<u64>());
        }
    }
    let _ = Weights::complete(tensors, None);
}

/// The model that the checkpoints of the corpus are of.
pub const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 32
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    ea: {experts: {count: 2, active: 1, intermediate: 4, query: 4}}
  body: [\"sa > ea\"]
data: {task: permutation, size: 3, max_steps: 1}
train: {steps: 2, batch: 2, sequence: 16, precision: f32, checkpoint: {every: 1, keep: 1}, evaluate: {every: 0}}
";

/// The model of [`TINY`], ready to train, and its data.
struct Tiny {
    model: Model,
    dataset: Dataset,
}

impl Tiny {
    fn new() -> Self {
        let spec = specification(TINY.as_bytes(), Spelling::Yaml).expect("a good specification");
        let options = compiler_options();
        let compiled = compile(&spec, &options).expect("a small model");
        let model =
            Model::load(&CpuDevice::new(CpuOptions { threads: Some(1) }), compiled).expect("a small model");
        let settings = Settings {
            base: Path::new(""),
            cache: &scratch("cache"),
            sequence: 16,
            vocab: 256,
            seed: 1,
            stride: None,
        };
        let data = spec.data.as_ref().expect("it has data");
        let dataset = Dataset::open(data, &settings, &mut |_| {}).expect("a task");
        Tiny { model, dataset }
    }
}

fn compiler_options() -> dreamc_compiler::Options {
    dreamc_compiler::Options { train: true, ..prepare::forward(2, 16) }
}

thread_local! {
    static MODEL: RefCell<Option<Tiny>> = const { RefCell::new(None) };
}

/// As it is, and as if it had been written so: with checksums that agree.
fn checkpoint(data: &[u8]) {
    let list = files(data);
    let path = scratch("step-00000001");
    fill(&path, &list);
    if Checkpoint::open(&path).is_ok() {
        resume(&path);
    }
    let sums: String = list
        .iter()
        .filter(|(name, _)| *name != CHECKSUMS)
        .map(|(name, content)| format!("{}  {name}\n", blake3(content)))
        .collect();
    fs::write(path.join(CHECKSUMS), sums).expect("a place to write");
    resume(&path);
}

fn blake3(content: &[u8]) -> String {
    blake3::hash(content).to_hex().to_string()
}

/// Goes on from a checkpoint, as `dreamc resume` does: the state is taken over, and the data goes
/// on.
fn resume(path: &Path) {
    let Ok(found) = Checkpoint::open(path) else { return };
    MODEL.with(|tiny| {
        let mut tiny = tiny.borrow_mut();
        let Tiny { model, dataset } = tiny.get_or_insert_with(Tiny::new);
        if let Some(spec) = found.model.metadata("spec") {
            specification(spec.as_bytes(), Spelling::Yaml);
        }
        let _ = model.restore_optimizer(&found.optimizer);
        let _ = Weights::complete(found.model, None).map(|weights| model.restore(&weights));
        if let Ok(mut batches) = dataset.train(found.state.cursor) {
            let _ = batches.take(2);
            let _ = batches.take(2);
            let _ = batches.cursor();
        }
    });
}

// --- data ---

/// Texts that tokenizers are tried with.
const TEXTS: [&str; 4] = ["the cat sat", "  naïve 🦀\u{7}\r\n\t", "<s>[INST] 12 </s>", ""];

fn tokenizer(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(tokenizer) = Tokenizer::from_json(text.into(), &[]) else { return };
    let vocab = tokenizer.vocab() as u64;
    assert!(u64::from(tokenizer.end()) < vocab && u64::from(tokenizer.begin()) < vocab);
    for text in TEXTS {
        if let Ok(ids) = tokenizer.encode(text) {
            assert!(ids.iter().all(|&id| u64::from(id) < vocab), "an id beyond the vocabulary");
            let _ = tokenizer.decode(&ids);
            if let Ok((whole, _)) = tokenizer.measure_pair("", text) {
                let bytes: u64 = whole.bytes.iter().map(|&n| u64::from(n)).sum();
                let all = tokenizer.told().is_some() || ids.is_empty() || bytes == text.len() as u64;
                assert!(all, "tokens stand for {bytes} bytes of {text:?}");
            }
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX]);
}

/// A template, then rows: as JSONL, as text.
fn rows(data: &[u8]) {
    let at = data.iter().position(|&b| b == b'\n').unwrap_or(0);
    let template = String::from_utf8_lossy(&data[..at]).into_owned();
    let template = Template::new(&template, true).or_else(|_| Template::new("{prompt} {answer}", true));
    let template = template.expect("a good template");
    let fields = Fields { prompt: Some("q".into()), answer: "a".into(), rejected: None, template };
    let rest = &data[at..];
    let mut lines = Lines::new(rest);
    while let Ok(Some((_, row))) = lines.read_line() {
        let _ = row.map(|line| fields.documents(line));
    }
    assert_eq!(lines.bytes, rest.len() as u64);
    let mut pieces = TextPieces::new(Lines::new(rest));
    let mut text = String::new();
    while let Ok(Some(piece)) = pieces.read_piece() {
        text.extend(piece);
    }
    if let Ok(whole) = std::str::from_utf8(rest)
        && !whole.contains('\0')
    {
        assert!(text == whole, "pieces do not join to the text");
    }
}

fn parquet(data: &[u8]) {
    let path = file("rows.parquet", data);
    let template = Template::new("{prompt} {answer}", true).expect("a good template");
    let fields = Fields { prompt: Some("q".into()), answer: "a".into(), rejected: None, template };
    let Ok(mut rows) = ParquetRows::open(&path, &fields) else { return };
    // A small file may say that one value comes a thousand million times.
    for _ in 0..10_000 {
        let Ok(Some(_)) = rows.read_row() else { return };
    }
}

/// Files of a shard in the cache: refused and built anew, or good to read from.
fn shard_files(data: &[u8]) {
    let (text, cache) = (scratch("text.txt"), scratch("shards"));
    let open = || {
        let tokenizer = Tokenizer::bytes();
        shard::open(&text, &Format::Text, &tokenizer, BadRows::Stop, &cache, &mut |_| {})
    };
    if !text.exists() {
        fs::write(&text, "a text\n").expect("a place to write");
        drop(open());
    }
    let entries: Vec<_> = fs::read_dir(cache.join("shards")).expect("a shard").flatten().collect();
    let folder = entries.first().expect("a shard").path();
    let list = files(data);
    fill(&folder, &list);
    let sums: String = list
        .iter()
        .filter(|(name, _)| *name != CHECKSUMS)
        .map(|(name, content)| format!("{}  {name}\n", blake3(content)))
        .collect();
    if list.iter().all(|(name, _)| *name != CHECKSUMS) {
        fs::write(folder.join(CHECKSUMS), sums).expect("a place to write");
    }
    let shard = open().expect("a shard that is damaged is built anew");
    read(&shard);
}

fn read(shard: &Shard) {
    let (tokens, documents) = (shard.len(), shard.meta.documents);
    let mut start = 0;
    for i in 0..documents {
        let place = shard.document(i).expect("a document");
        assert!(place.start == start && place.start <= place.learn && place.learn <= place.end, "{place:?}");
        start = place.end;
    }
    assert_eq!(start, tokens);
    for i in 0..tokens {
        let token = shard.tokens(i..i + 1).expect("a token")[0];
        assert!((0..256).contains(&token), "a token beyond the vocabulary");
        shard.document_of(i).expect("its document");
    }
}

// --- models of others ---

fn hf_config(data: &[u8]) {
    let Ok(map) = serde_json::from_slice(data) else { return };
    let Ok(config) = Config::read(Path::new("config.json"), map, &[]) else { return };
    let Ok((spec, text)) = config.specification("model", None) else { return };
    // Text that an import writes reads back as the same.
    let (again, _) =
        parse("config.json", &text, Spelling::Yaml).and_then(|ast| check(&ast, &[])).expect("its own text");
    assert_eq!(again.model, spec.model);
    let _ = compile(&spec, &prepare::forward(1, 1));
}

fn hf_folder(data: &[u8]) {
    let (from, to) = (scratch("hf"), scratch("imported"));
    fill(&from, &files(data));
    if hugging_face(&from, &to, "model", true, &[]).is_ok() {
        let weights = Weights::open(&to, None).expect("what was imported opens");
        assert!(weights.entries().count() > 0);
    }
    let _ = fs::remove_dir_all(to);
}

fn gguf(data: &[u8]) {
    let (from, to) = (file("model.gguf", data), scratch("imported"));
    if import(&from, &to, "model", true).is_ok() {
        let weights = Weights::open(&to, None).expect("what was imported opens");
        assert!(weights.entries().count() > 0);
    }
    let _ = fs::remove_dir_all(to);
}

// --- code ---

/// Loaded, and each kernel run for a moment with arguments of zeros.
fn ptx_text(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let module = match Module::load(text, None) {
        Ok(module) => module,
        Err(error) => return drop(error.to_string()),
    };
    let names: Vec<String> = module.kernels().map(String::from).collect();
    for name in names {
        let Some(signature) = module.signature(&name) else { continue };
        let bytes: u64 = signature.params.iter().map(|&n| u64::from(n)).sum();
        if bytes > 1 << 16 {
            continue;
        }
        let launch = Launch {
            kernel: name,
            grid: [1, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 256,
            args: signature.params.iter().map(|&n| Arg::Bytes(vec![0; n as usize])).collect(),
        };
        let options = ptx::Options { instruction_budget: 20_000, threads: 1, ..ptx::Options::default() };
        if let Err(finding) = ptx::run(&module, &launch, &mut Memory::new(), &options) {
            let _ = finding.to_string();
        }
    }
}

// --- what runs left ---

fn metrics(data: &[u8]) {
    let path = file("metrics.jsonl", data);
    let _ = Metrics::read(&path);
}

fn ledger(data: &[u8]) {
    if let Ok(ledger) = serde_json::from_slice::<Ledger>(data) {
        let text = serde_json::to_string(&ledger).expect("plain data");
        assert!(serde_json::from_str::<Ledger>(&text).is_ok(), "does not read back: {text}");
    }
}
