//! `dreamc probe`: logits, loss and gradients for given tokens, to compare with another framework;
//! and what is inside a model, see [`inside`].

mod inside;

use crate::arguments::{Arithmetic, BaseArguments, DeviceArguments, RewriteArguments};
use clap::{Args, value_parser};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::format::Formats;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Options, compile};
use dreamc_data::Batch;
use dreamc_data::files::write_named;
use dreamc_device::Device;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Precision;
use dreamc_runtime::checkpoint::safetensors::{self, Entry};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::spec::Named;
use dreamc_study::spec::is_specification;
use std::path::{Path, PathBuf};

/// Write logits, loss and gradients for given tokens, or look into a model and change what it
/// computes
#[derive(Args)]
#[command(after_help = "\
The ids are a JSON list of equally long lists. A row of n+1 ids is n positions: the first n are the input, each next one
the target. The result holds `logits` [rows, n, vocab], `loss` [1], `gradients.NAME` and, with --weights,
`weights.NAME`, all f32. Where training measures otherwise than evaluation (top-k with `causal`, rounded experts, `exit`), `logits` and
`loss.evaluation` are those of evaluation, `logits.training`, `loss` and gradients those of training.

With --list, --capture, --patch, --lens, --linear or --ablate nothing is differentiated: values inside the model are listed, written,
changed, read by the head, read by a linear map, or taken out, by the names that --list has. In a pattern `*` stands for any letters.
`layers.1` without `@` is every pass of a loop, `layers.1@2` the third.

Examples:
  echo '[[1, 2, 3, 4], [5, 6, 7, 8]]' > ids.json
  dreamc probe model.yaml --ids ids.json -o probe.safetensors --seed 0 --weights
  dreamc probe runs/quickstart-001 --ids ids.json -o probe.safetensors
  dreamc probe runs/quickstart-001 --list
  dreamc probe runs/quickstart-001 --ids a.json --capture 'layers.*.out' --capture layers.0.sa.scores -o a.safetensors
  dreamc probe runs/quickstart-001 --ids b.json --patch layers.0@1.out=a.safetensors --tokens 5
  dreamc probe runs/quickstart-001 --ids ids.json --lens
  dreamc probe runs/quickstart-001 --ids ids.json --ablate heads")]
pub struct Arguments {
    /// A specification (weights are drawn from the seed), a run folder, a checkpoint or a
    /// .safetensors file
    #[arg(value_name = "SPEC|CHECKPOINT")]
    model: PathBuf,

    /// Token ids
    #[arg(long, value_name = "FILE.json", required_unless_present_any = ["list", "text"])]
    ids: Option<PathBuf>,

    /// A text in the place of ids, read whole; may be given several times, for rows of as
    /// many tokens
    #[arg(long, value_name = "TEXT", conflicts_with = "ids")]
    text: Vec<String>,

    /// Where the result goes
    #[arg(short, long, value_name = "OUT.safetensors",
        required_unless_present_any = ["list", "patch", "lens", "linear", "ablate"])]
    out: Option<PathBuf>,

    /// Seed of the weights of a specification; its own `train.seed` by default
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Write the weights, too
    #[arg(long)]
    weights: bool,

    /// Change a field: `--set ea.count=1024`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Leave the logits out, which are large where the vocabulary is
    #[arg(long)]
    no_logits: bool,

    /// The arithmetic; f32 by default, since another framework is compared with
    #[arg(long, value_name = "TYPE")]
    precision: Option<Arithmetic>,

    /// Run a recurrent model at this depth: the count of its outermost `recur`
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    depth: Option<u64>,

    #[command(flatten)]
    look: inside::Look,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

/// The model that is asked for.
struct Subject {
    spec: Spec,
    /// Its weights and tokenizer; a specification has none, and draws its weights.
    trained: Option<Trained>,
    rewrite: Rewriting,
    narrow: Narrow,
    /// Storage of weights that the device reads in their files.
    formats: Formats,
}

impl Subject {
    fn open(a: &Arguments, device: &dyn Device) -> Result<Self, Failure> {
        let rewrite = a.rewriting.on(device)?;
        let (spec, trained) = if is_specification(&a.model) {
            (Named { spec: a.model.clone(), set: a.set.clone() }.load()?, None)
        } else {
            let trained = Trained::open(&a.model, a.base.moved(), &a.set, rewrite.clone())?;
            (trained.spec.clone(), Some(trained))
        };
        let narrow = device.narrow(match a.precision {
            Some(Arithmetic::Bf16) => Precision::Bf16,
            Some(Arithmetic::F32) | None => Precision::F32,
        });
        let formats = trained.as_ref().map_or(Formats::default(), |trained| trained.storing(device).formats);
        Ok(Subject { spec, trained, rewrite, narrow, formats })
    }

    /// The model compiled, with its weights.
    fn load(&self, a: &Arguments, device: &dyn Device, options: &Options) -> Result<Model, Failure> {
        let mut model = Model::load(device, compile(&self.spec, options).map_err(named)?)?;
        match &self.trained {
            Some(trained) => model.restore(&trained.tensors)?,
            None => model.initialise(a.seed.unwrap_or(self.spec.train.seed))?,
        }
        Ok(model)
    }

    /// The rows that are read.
    fn batch(&self, a: &Arguments) -> Result<Batch, Failure> {
        match &a.ids {
            Some(ids) => read_ids(ids, &self.spec),
            None => self.texts(&a.text),
        }
    }

    /// Texts as rows; the last token of each is followed by the end token, which is its target
    /// alone.
    fn texts(&self, texts: &[String]) -> Result<Batch, Failure> {
        let Some(trained) = &self.trained else {
            let what = "a specification has no tokenizer: give --ids, or a run, a checkpoint or an import";
            return Err(Failure::Usage(what.into()));
        };
        let tokenizer = trained.tokenizer()?;
        let mut rows: Vec<Vec<u64>> = vec![];
        for text in texts {
            let mut row: Vec<u64> = trained.prompt(&tokenizer, text)?.into_iter().map(u64::from).collect();
            row.push(tokenizer.end().into());
            rows.push(row);
        }
        if let Some((i, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != rows[0].len()) {
            return Err(Failure::Usage(format!(
                "--text {:?} has {} tokens and --text {:?} has {}: rows must be equally long",
                texts[i],
                row.len() - 1,
                texts[0],
                rows[0].len() - 1
            )));
        }
        batch_of(&rows, &self.spec).map_err(|what| Failure::Usage(format!("--text: {what}")))
    }
}

/// A wrong name is a mistake of the command line.
fn named(error: CompileError) -> Failure {
    match error {
        CompileError::Point { .. } | CompileError::Fixed { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    }
}

pub fn run(a: Arguments) -> Done {
    let device = a.device.open()?;
    let mut subject = Subject::open(&a, device.as_ref())?;
    if a.look.patch.is_empty() && (!a.look.tokens.is_empty() || a.look.difference.is_some()) {
        return Err(Failure::Usage("--tokens and --difference are of --patch".into()));
    }
    if a.look.looks() {
        return inside::run(&a, &subject, device.as_ref());
    }
    let Some(out) = &a.out else { return Err(Failure::Usage("name the file of the result: -o".into())) };
    let batch = subject.batch(&a)?;
    let (spec, narrow) = (&mut subject.spec, subject.narrow);
    // Every gradient is wanted, whatever training would leave out.
    spec.train.only.clear();
    spec.train.freeze.clear();
    let shape = prepare::forward(batch.rows() as u64, batch.sequence as u64);
    let (rewrite, formats) = (subject.rewrite.clone(), subject.formats.clone());
    let evaluating = Options { logits: !a.no_logits, depth: a.depth, rewrite, narrow, formats, ..shape };
    let load = |options: &Options| subject.load(&a, device.as_ref(), options);
    let mut model = load(&Options { train: true, steps: false, ..evaluating.clone() })?;
    let mut found = Found::default();
    let two_rules = Architecture::new(&subject.spec.model, a.depth)?.measures_otherwise();
    if two_rules || !a.no_logits {
        let losses = model.evaluate(&batch)?;
        if !a.no_logits {
            found.logits.push(("logits", model.all_logits()?));
        }
        if two_rules {
            let sum: f64 =
                losses.iter().zip(&batch.targets).filter(|l| *l.1 >= 0).map(|l| f64::from(*l.0)).sum();
            found.evaluated = Some((sum / batch.learned().max(1) as f64) as f32);
        }
    }
    if two_rules && !a.no_logits {
        let mut trained = load(&Options { as_trained: true, ..evaluating })?;
        trained.evaluate(&batch)?;
        found.logits.push(("logits.training", trained.all_logits()?));
    }
    model.begin_step()?;
    let scale = Scale { loss: 1.0 / batch.learned() as f32, auxiliary: 1.0 };
    model.backward(&batch, scale, None)?;
    write(&a, out, &model, &batch, &found, narrow)
}

/// Findings apart from loss and gradients.
#[derive(Default)]
struct Found {
    /// Logits by name.
    logits: Vec<(&'static str, Vec<f32>)>,
    /// The loss of evaluation, where it decides otherwise than training.
    evaluated: Option<f32>,
}

fn write(a: &Arguments, out: &Path, model: &Model, batch: &Batch, found: &Found, narrow: Narrow) -> Done {
    let (b, n) = (batch.rows() as u64, batch.sequence as u64);
    let mut entries: Vec<Entry> = vec![];
    let of = |logits: &[f32]| vec![b, n, logits.len() as u64 / (b * n)];
    entries.extend(found.logits.iter().map(|(name, logits)| (name.to_string(), of(logits))));
    entries.push(("loss".into(), vec![1]));
    entries.extend(found.evaluated.map(|_| ("loss.evaluation".into(), vec![1])));
    let tensors = &model.compiled().tensors;
    let with_gradient = tensors.iter().filter(|t| t.gradient.is_some());
    entries.extend(with_gradient.map(|t| (format!("gradients.{}", t.name), t.shape.clone())));
    if a.weights {
        entries.extend(tensors.iter().map(|t| (format!("weights.{}", t.name), t.shape.clone())));
    }
    let metadata = [("format", "dreamc probe")];
    write_named(out, |out| {
        safetensors::write(out, &metadata, &entries, |i| {
            let name = entries[i].0.as_str();
            if let Some(name) = name.strip_prefix("gradients.") {
                let tensor = tensors
                    .iter()
                    .find(|t| t.name == name)
                    .ok_or_else(|| std::io::Error::other("no such tensor"))?;
                Ok(model.gradient(tensor).map_err(std::io::Error::other)?.unwrap_or_default())
            } else if let Some(name) = name.strip_prefix("weights.") {
                model.get(name).map_err(std::io::Error::other)
            } else if name == "loss" {
                Ok(vec![model.loss().map_err(std::io::Error::other)?])
            } else if name == "loss.evaluation" {
                Ok(found.evaluated.into_iter().collect())
            } else {
                let own = found.logits.iter().find(|(own, _)| *own == name);
                Ok(own.map(|(_, logits)| logits.clone()).unwrap_or_default())
            }
        })
    })?;
    let precision = narrow.name();
    let also = found
        .evaluated
        .map_or(String::new(), |loss| format!(" by the rule of training, {loss:.6} by that of evaluation,"));
    dreamc_study::say!(
        "{}: {} tensors, loss {:.6}{also} in {precision}",
        out.display(),
        entries.len(),
        model.loss()?
    )?;
    Ok(())
}

/// The rows of a file of ids as inputs and targets.
fn read_ids(path: &Path, spec: &Spec) -> Result<Batch, Failure> {
    let refuse = |what: String| Failure::Usage(format!("{}: {what}", path.display()));
    let text = dreamc_data::files::read_text(path).map_err(|e| dreamc_data::files::about(path, e))?;
    let rows: Vec<Vec<u64>> = serde_json::from_str(&text)
        .map_err(|e| refuse(format!("not a JSON list of lists of ids, as [[1, 2, 3], [4, 5, 6]]: {e}")))?;
    batch_of(&rows, spec).map_err(refuse)
}

/// Rows as inputs and targets.
fn batch_of(rows: &[Vec<u64>], spec: &Spec) -> Result<Batch, String> {
    let length = rows.first().map_or(0, Vec::len);
    if length < 2 {
        return Err("needs at least one row of at least two ids: inputs, and the target of the last".into());
    }
    if let Some(i) = rows.iter().position(|r| r.len() != length) {
        return Err(format!(
            "row {} has {} ids and row 1 has {length}; all must be equally long",
            i + 1,
            rows[i].len()
        ));
    }
    if length as u64 - 1 > spec.model.context {
        return Err(format!("{} positions exceed the model's context {}", length - 1, spec.model.context));
    }
    let mut batch = Batch::new(length - 1);
    for (r, row) in rows.iter().enumerate() {
        if let Some(c) = row.iter().position(|&id| id >= spec.model.vocab) {
            return Err(format!(
                "id {} of row {}, place {} is not below vocab {}",
                row[c],
                r + 1,
                c + 1,
                spec.model.vocab
            ));
        }
        batch.ids.extend(row[..length - 1].iter().map(|&id| id as i32));
        batch.targets.extend(row[1..].iter().map(|&id| id as i32));
        batch.positions.extend(0..length as i32 - 1);
        batch.segments.extend(std::iter::repeat_n(0, length - 1));
    }
    Ok(batch)
}
