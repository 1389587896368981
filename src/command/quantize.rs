//! `dreamc quantize`: models in fewer bits.

use crate::arguments::BaseArguments;
use crate::command::import::name;
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::files;
use dreamc_runtime::calibrate::{self, CalibrateError, Importance};
use dreamc_runtime::checkpoint::folder;
use dreamc_runtime::quantise::{self, Choice, quantise};
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::number::grouped;
use dreamc_study::say;
use dreamc_study::show::bytes;
use dreamc_study::spec::{measure_on, open_data};
use std::path::{Path, PathBuf};

/// Store the matrices of a model in fewer bits
#[derive(Args)]
#[command(after_help = "\
Numbers are rounded to the nearest, in the block formats of the field: q8_0, q4_0 and mxfp4 have a scale for 32 numbers, q4_k and
q6_k small ones of a large one for 256, nvfp4 small ones for 16 and one for the tensor, int8 one for a row; f16 has none. Vectors and routers stay as they are, and so do matrices whose rows are no whole blocks. OUT is a model like an
import: `generate`, `eval`, `serve` and `probe` read the blocks in their file. PART is a component by its name, or embedding, head,
experts, shared, router; `keep` leaves a part as it is.

Examples:
  dreamc quantize imports/smollm2 --format int8
  dreamc quantize runs/quickstart-001 --format q8_0 --parts 'experts: q4_0, head: keep' -o quick-q4
  dreamc quantize runs/quickstart-001 --format q4_0 --data book.txt -o quick-fitted
  dreamc eval quick-q4 --against runs/quickstart-001")]
pub struct Arguments {
    /// A run folder, a checkpoint, an import or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Format of all matrices but those of routers: f16, int8, q8_0, q4_0, q4_k,
    /// q6_k, mxfp4, nvfp4, or keep
    #[arg(long, value_name = "FORMAT")]
    format: String,

    /// Other formats for parts of the model: `experts: q4_0, head: q8_0`
    #[arg(long, value_name = "PART: FORMAT, …")]
    parts: Option<String>,

    /// Round by what it costs on this text, .jsonl or .parquet: gradients of up to 64 rows of it
    /// fit scales, and later numbers of a row make good for earlier ones
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Where it goes; `imports/MODEL-FORMAT` by default
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,

    /// Replace the model that is in OUT
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    base: BaseArguments,
}

pub fn run(a: Arguments) -> Done {
    let mut choice = Choice::new(&a.format, a.parts.as_deref()).map_err(|e| Failure::Usage(e.to_string()))?;
    let trained = Trained::open(&a.model, a.base.moved(), &[], Rewriting::off())?;
    let out = match &a.out {
        Some(out) => out.clone(),
        None => Path::new("imports").join(format!("{}-{}", name(&a.model)?, a.format)),
    };
    let beside = beside(&trained)?;
    if let Some(file) = &a.data {
        folder::free(&out, a.force).map_err(|error| Failure::Error(Box::new(error)))?;
        choice.importance = Some(importance(&trained, file)?);
    }
    let done = quantise(&trained.spec, &trained.tensors, &choice, &out, (&beside, a.force))
        .map_err(|error| Failure::Error(Box::new(error)))?;
    let numbers: u64 = done.by_format.values().map(|(_, numbers)| numbers).sum();
    let (before, after) = (bytes(done.bytes.0), bytes(done.bytes.1));
    let each = done.bytes.1 as f64 * 8.0 / numbers.max(1) as f64;
    say!("{}: {before} are {after}, {each:.2} bits a number", trained.spec.model.name)?;
    for (format, (tensors, numbers)) in &done.by_format {
        say!("  {format:<6} {} numbers in {tensors} tensors", grouped(u128::from(*numbers)))?;
    }
    if let Some((name, count)) = &done.unfit {
        say!("  note  {count} matrices stay as they are: rows of {name} are no whole blocks")?;
    }
    let (out, model) = (out.display(), a.model.display());
    say!("left in {out}; next:\n  dreamc eval {out} --against {model}")?;
    Ok(())
}

/// The cost of rounding on a text.
fn importance(trained: &Trained, file: &Path) -> Result<Importance, Failure> {
    let mut spec = trained.spec.clone();
    let sequence = prepare::sequence(&spec).min(calibrate::SEQUENCE);
    spec.train.sequence = Some(sequence);
    measure_on(&mut spec, file, trained.tokenizer_file().as_deref())?;
    let dataset = match &spec.data {
        Some(data) => open_data(&spec, data, None)?,
        None => return Err(Failure::Usage(format!("--data {}: nothing is read of it", file.display()))),
    };
    let short = CalibrateError::Short { tokens: 0, row: sequence };
    let rows = dataset.drawn(calibrate::ROWS)?.ok_or_else(|| Failure::Error(Box::new(short)))?;
    Importance::measure(&spec, &trained.tensors, rows, quantise::is_matrix)
        .map_err(|error| Failure::Error(Box::new(error)))
}

/// Files of the model's folder that belong to it, its tokenizer wherever that is.
pub fn beside(trained: &Trained) -> Result<Vec<(&'static str, Vec<u8>)>, Failure> {
    let folder = files::parent(trained.tensors.path());
    let mut found = vec![];
    for name in folder::KEPT {
        let own = Some(folder.join(name)).filter(|path| path.is_file());
        let path = if name == "tokenizer.json" { trained.tokenizer_file() } else { own };
        if let Some(path) = path {
            found.push((name, std::fs::read(&path).map_err(|error| files::about(&path, error))?));
        }
    }
    Ok(found)
}
