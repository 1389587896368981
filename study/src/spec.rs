//! Specifications that are named: read, checked, and made ready to train.

use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;
use dreamc_compiler::transfer;
use dreamc_data::files::cache_folder;
use dreamc_data::{Dataset, Settings};
use dreamc_dsl::spec::{self, Source, Spec, Tokenizer};
use dreamc_dsl::{Diagnostics, Severity, SourceMap, Spelling};
use dreamc_runtime::checkpoint::Checkpoints;
use dreamc_runtime::train::prepare;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A specification and changes to it.
#[derive(Clone, Debug)]
pub struct Named {
    /// The file, YAML or .dream, `-` for standard input; or the folder of a run or an imported
    /// model, for its spec.yaml.
    pub spec: PathBuf,
    /// Fields that are changed: `train.steps=100`.
    pub set: Vec<String>,
}

impl Named {
    /// The checked specification; warnings are printed.
    pub fn load(&self) -> Result<Spec, Failure> {
        let (spec, warnings) = dreamc_dsl::load(self.file(), &self.set)?;
        warn(&spec.sources, warnings);
        Ok(spec)
    }

    /// The folder of a model that stands in the specification's place: its weights and its
    /// tokenizer are to be trained further.
    fn begun(&self) -> Option<Begun> {
        let holds = |name: &str| self.spec.join(name).is_file();
        let import = holds("model.safetensors") && holds("checksums.txt");
        match () {
            _ if !holds("spec.yaml") => None,
            _ if import => Some(Begun::Import),
            _ if holds("ledger.json") || self.spec.join("checkpoints").is_dir() => Some(Begun::Run),
            _ => None,
        }
    }

    /// The checked specification to train, with absolute paths; on `data` in place of its own where
    /// that is given. Of the folder of a run or an import it begins from that model's weights, and
    /// reads text with its tokenizer.
    pub fn load_to_train(&self, data: Option<&Path>) -> Result<Spec, Failure> {
        let mut spec = self.load()?;
        make_absolute(&mut spec, &self.base());
        begins_elsewhere(&self.spec, &spec)?;
        let mut tokenizer = None;
        if let Some(begun) = self.begun() {
            let import = &*self.spec;
            let full = import.canonicalize().map_err(|e| dreamc_data::files::about(import, e))?;
            let beside = full.join("tokenizer.json");
            if begun == Begun::Run && Checkpoints::new(full.join("checkpoints")).steps().is_empty() {
                let run = import.display();
                return Err(Failure::Usage(format!(
                    "{run} has no checkpoint yet, whose weights training would begin from: `dreamc resume {run}` goes on with the run, \
                     `dreamc train {run}/spec.yaml` begins another from random weights"
                )));
            }
            // A transplant says itself which tokenizer its data have.
            if begun == Begun::Import && !beside.is_file() && spec.data.is_none() {
                return Err(Failure::Usage(format!(
                    "{} is an imported model without a tokenizer.json, so that it can read no text; import a folder that has one, or \
                     write a specification with `base: {}` and `data: {{tokenizer: FILE}}`",
                    import.display(),
                    import.display()
                )));
            }
            spec.weights = Some(full.to_string_lossy().into_owned());
            // The weights of a run are past its transplant and its teacher.
            if begun == Begun::Run {
                (spec.transplant, spec.heal) = (None, None);
            }
            tokenizer = Some(beside).filter(|file| file.is_file());
            // The copy in the folder, wherever the file went that the run was made with.
            if let (Some(file), Some(data)) = (&tokenizer, &mut spec.data)
                && let Tokenizer::File(path) = &mut data.tokenizer
            {
                *path = file.to_string_lossy().into_owned();
            }
        }
        if let Some(file) = data {
            replace_data(&mut spec, file, tokenizer.as_deref())?;
        }
        warn(&spec.sources, transfer::findings(&spec));
        Ok(spec)
    }

    /// The file of the specification.
    fn file(&self) -> PathBuf {
        if self.spec.is_dir() { self.spec.join("spec.yaml") } else { self.spec.clone() }
    }

    /// The folder that paths in the specification are relative to.
    pub fn base(&self) -> PathBuf {
        self.file().parent().map(Path::to_path_buf).unwrap_or_default()
    }
}

/// Refuses to train a specification of a transplant that names no donor.
pub fn begins_elsewhere(file: &Path, spec: &Spec) -> Result<(), Failure> {
    if spec.transplant.as_ref().is_none_or(|transplant| transplant.from.is_some()) {
        return Ok(());
    }
    let file = file.display();
    Err(Failure::Usage(format!(
        "{file} begins from a model of another architecture and does not say which: write `transplant: {{from: …}}`, or `dreamc transplant \
         {file} --from MODEL -o FOLDER` and train FOLDER"
    )))
}

/// A folder that training begins from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    Run,
    Import,
}

/// Prints warnings.
pub fn warn(sources: &SourceMap, list: Vec<dreamc_dsl::Diagnostic>) {
    if output::quiet() {
        return;
    }
    let color = output::Stream::Err.has_color();
    for d in list.iter().filter(|d| d.severity == Severity::Warning) {
        output::complain(&d.render(sources, color));
    }
}

/// The specification kept with a run or a checkpoint.
pub fn parse(name: &str, text: &str, set: &[String]) -> Result<Spec, Diagnostics> {
    dreamc_dsl::check(&dreamc_dsl::parse(name, text, Spelling::Yaml)?, set).map(|(spec, _)| spec)
}

/// The text kept with runs and checkpoints: every default filled in.
pub fn resolved(spec: &Spec) -> String {
    dreamc_dsl::show(spec, Spelling::Yaml)
}

/// Makes every path of the specification independent of where it is read from.
pub fn make_absolute(spec: &mut Spec, base: &Path) {
    spec.paths().for_each(|path| absolute(path, base));
}

/// The same of a data section alone.
pub fn make_data_absolute(data: &mut spec::Data, base: &Path) {
    data.paths().for_each(|path| absolute(path, base));
}

fn absolute(path: &mut String, base: &Path) {
    let joined = base.join(&*path);
    let full = joined.canonicalize().or_else(|_| std::path::absolute(&joined)).unwrap_or(joined);
    *path = full.to_string_lossy().into_owned();
}

/// Whether a path names a specification, and not a trained model, whose folder may be called
/// anything.
pub fn is_specification(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|e| e == "yaml" || e == "yml" || e == "dream")
}

/// Replaces the sources of the specification by one file, read as the first source of its kind was,
/// or as its name says; one that has no data at all reads it with `tokenizer`.
pub fn replace_data(spec: &mut Spec, file: &Path, tokenizer: Option<&Path>) -> Result<(), Failure> {
    if !file.is_file() {
        let what = if file.exists() { "it is no file: name one" } else { "there is no such file" };
        return Err(Failure::Usage(format!("--data {}: {what}", file.display())));
    }
    let path =
        std::path::absolute(file).unwrap_or_else(|_| file.to_path_buf()).to_string_lossy().into_owned();
    let extension = file.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let old = spec.data.as_ref().map(|d| d.sources.as_slice()).unwrap_or_default();
    let fields = old.iter().find_map(|(s, _)| match s {
        Source::Jsonl { prompt, answer, rejected, template, .. }
        | Source::Parquet { prompt, answer, rejected, template, .. } => {
            Some((prompt.clone(), answer.clone(), rejected.clone(), template.clone()))
        }
        Source::Task(_) | Source::Text { .. } => None,
    });
    let source = match extension.as_str() {
        "jsonl" | "ndjson" => {
            let (prompt, answer, rejected, template) = match fields {
                Some(fields) => fields,
                None => {
                    let (prompt, answer, template) = guess_fields(file)?;
                    (prompt, answer, None, template)
                }
            };
            Source::Jsonl { path, prompt, answer, rejected, template }
        }
        "parquet" => {
            let (prompt, answer, rejected, template) =
                fields.unwrap_or_else(|| (None, "text".into(), None, "{answer}".into()));
            Source::Parquet { path, prompt, answer, rejected, template }
        }
        _ => Source::Text { path },
    };
    let sources = vec![(source, 1.0)];
    spec.data = Some(match spec.data.take() {
        Some(data) => {
            // Tasks hold out problems of their own; a file needs a share.
            let validation = if data.validation > 0.0 { data.validation } else { 0.05 };
            spec::Data { sources, validation, validation_file: None, ..data }
        }
        None => spec::Data {
            sources,
            tokenizer: tokenizer
                .map_or(Tokenizer::Bytes, |path| Tokenizer::File(path.to_string_lossy().into_owned())),
            validation: 0.05,
            validation_file: None,
            document_mask: false,
            begin: None,
            bad_rows: spec::BadRows::Stop,
        },
    });
    Ok(())
}

/// Fields of a JSONL file that the specification says nothing about, by the names its first row
/// has.
fn guess_fields(file: &Path) -> Result<(Option<String>, String, String), Failure> {
    let mut start = vec![];
    fs::File::open(file)?.take(1 << 20).read_to_end(&mut start)?;
    let line = start.split(|&b| b == b'\n').next().unwrap_or_default();
    let row: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(line).unwrap_or_default();
    let pairs =
        [("prompt", "answer"), ("question", "answer"), ("prompt", "completion"), ("prompt", "response")];
    let pairs = pairs.into_iter().chain([("instruction", "output"), ("input", "output")]);
    for (prompt, answer) in pairs {
        if row.contains_key(prompt) && row.contains_key(answer) {
            return Ok((Some(prompt.into()), answer.into(), "{prompt}\n{answer}".into()));
        }
    }
    if row.contains_key("text") {
        return Ok((None, "text".into(), "{answer}".into()));
    }
    let has = row.keys().map(|k| format!("{k:?}")).collect::<Vec<_>>().join(", ");
    Err(Failure::Usage(format!(
        "--data {}: its rows have the fields {has}; say which to learn in the specification, as \
         `data: {{jsonl: {}, prompt: …, answer: …}}`",
        file.display(),
        file.display()
    )))
}

/// Opens the data of a specification with absolute paths. Rows of running text advance by `stride`,
/// by a whole row where absent.
pub fn open_data(spec: &Spec, data: &spec::Data, stride: Option<u64>) -> Result<Dataset, Failure> {
    let settings = Settings {
        base: Path::new(""),
        cache: &cache_folder(),
        sequence: prepare::sequence(spec),
        vocab: spec.model.vocab,
        seed: spec.train.seed,
        stride,
    };
    let mut progress = Progress::default();
    let dataset = Dataset::open(data, &settings, &mut |n| progress.notice(&n));
    progress.clear();
    let dataset = dataset?;
    dataset.fits_context(spec.model.context, spec.train.seed)?;
    Ok(dataset)
}

/// Makes all of one file what is held out.
pub fn measure_on(spec: &mut Spec, file: &Path, tokenizer: Option<&Path>) -> Result<(), Failure> {
    replace_data(spec, file, tokenizer)?;
    if let Some(data) = &mut spec.data {
        data.validation_file = data.sources.first().and_then(|(s, _)| match s {
            Source::Text { path } | Source::Jsonl { path, .. } | Source::Parquet { path, .. } => {
                Some(path.clone())
            }
            Source::Task(_) => None,
        });
    }
    Ok(())
}
