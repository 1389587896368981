//! `dreamc probe`: logits, loss and gradients for given tokens, to compare with another framework.

use crate::device::{Arithmetic, DeviceArguments};
use crate::failure::{Done, Failure};
use crate::model::{BaseArguments, Trained};
use crate::rewriting::RewriteArguments;
use crate::spec::{SpecArguments, is_specification};
use clap::{Args, value_parser};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::format::Formats;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::{Options, compile};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Precision;
use dreamc_runtime::checkpoint::safetensors::{self, Entry};
use dreamc_runtime::data::Batch;
use dreamc_runtime::files::write_named;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare;
use std::path::{Path, PathBuf};

/// Write logits, loss and gradients for given token ids, under the names every checkpoint has
#[derive(Args)]
#[command(after_help = "\
The ids are a JSON list of equally long lists. A row of n+1 ids is n positions: the first n are the input, each next one
the target. The result holds `logits` [rows, n, vocab], `loss` [1], `gradients.NAME` and, with --weights,
`weights.NAME`, all f32. Where training measures otherwise than evaluation (top-k with `causal`, rounded experts, `exit`), `logits` and
`loss.evaluation` are those of evaluation, `logits.training`, `loss` and gradients those of training.

Examples:
  echo '[[1, 2, 3, 4], [5, 6, 7, 8]]' > ids.json
  dreamc probe model.yaml --ids ids.json -o probe.safetensors --seed 0 --weights
  dreamc probe runs/quickstart-001 --ids ids.json -o probe.safetensors")]
pub struct Arguments {
    /// A specification (weights are drawn from the seed), a run folder, a checkpoint or a
    /// .safetensors file
    #[arg(value_name = "SPEC|CHECKPOINT")]
    model: PathBuf,

    /// Token ids
    #[arg(long, value_name = "FILE.json")]
    ids: PathBuf,

    /// Where the result goes
    #[arg(short, long, value_name = "OUT.safetensors")]
    out: PathBuf,

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
    base: BaseArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(a: Arguments) -> Done {
    let device = a.device.open()?;
    let rewrite = a.rewriting.on(device.as_ref())?;
    let specification = is_specification(&a.model);
    let (mut spec, tensors) = if specification {
        (SpecArguments { spec: a.model.clone(), set: a.set.clone() }.load()?, None)
    } else {
        let trained = Trained::open(&a.model, &a.base, &a.set, rewrite.clone())?;
        (trained.spec, Some(trained.tensors))
    };
    let batch = read_ids(&a.ids, &spec)?;
    // Every gradient is wanted, whatever training would leave out.
    spec.train.only.clear();
    spec.train.freeze.clear();
    let shape = prepare::forward(batch.rows() as u64, batch.sequence as u64);
    let narrow = device.narrow(match a.precision {
        Some(Arithmetic::Bf16) => Precision::Bf16,
        Some(Arithmetic::F32) | None => Precision::F32,
    });
    let formats = match &tensors {
        Some(tensors) if device.maps() => tensors.formats(),
        Some(_) | None => Formats::default(),
    };
    let evaluating = Options { logits: !a.no_logits, depth: a.depth, rewrite, narrow, formats, ..shape };
    let load = |options: &Options| -> Result<Model, Failure> {
        let mut model = Model::load(device.as_ref(), compile(&spec, options)?)?;
        match &tensors {
            Some(tensors) => model.restore(tensors)?,
            None => model.initialise(a.seed.unwrap_or(spec.train.seed))?,
        }
        Ok(model)
    };
    let mut model = load(&Options { train: true, steps: false, ..evaluating.clone() })?;
    let mut found = Found::default();
    let two_rules = Architecture::new(&spec.model, a.depth)?.measures_otherwise();
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
    write(&a, &model, &batch, &found, narrow)
}

/// Findings beside loss and gradients.
#[derive(Default)]
struct Found {
    /// Logits by name.
    logits: Vec<(&'static str, Vec<f32>)>,
    /// The loss of evaluation, where it decides otherwise than training.
    evaluated: Option<f32>,
}

fn write(a: &Arguments, model: &Model, batch: &Batch, found: &Found, narrow: Narrow) -> Done {
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
    write_named(&a.out, |out| {
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
    crate::say!(
        "{}: {} tensors, loss {:.6}{also} in {precision}",
        a.out.display(),
        entries.len(),
        model.loss()?
    )?;
    Ok(())
}

/// The rows of a file of ids as inputs and targets.
fn read_ids(path: &Path, spec: &Spec) -> Result<Batch, Failure> {
    let refuse = |what: String| Err(Failure::Usage(format!("{}: {what}", path.display())));
    let text = dreamc_runtime::files::read_text(path).map_err(|e| dreamc_runtime::files::about(path, e))?;
    let rows: Vec<Vec<u64>> = match serde_json::from_str(&text) {
        Ok(rows) => rows,
        Err(e) => return refuse(format!("not a JSON list of lists of ids, as [[1, 2, 3], [4, 5, 6]]: {e}")),
    };
    let length = rows.first().map_or(0, Vec::len);
    if length < 2 {
        return refuse(
            "needs at least one row of at least two ids: inputs, and the target of the last".into(),
        );
    }
    if let Some(i) = rows.iter().position(|r| r.len() != length) {
        return refuse(format!(
            "row {} has {} ids and row 1 has {length}; all must be equally long",
            i + 1,
            rows[i].len()
        ));
    }
    if length as u64 - 1 > spec.model.context {
        return refuse(format!("{} positions exceed the model's context {}", length - 1, spec.model.context));
    }
    let mut batch = Batch::new(length - 1);
    for (r, row) in rows.iter().enumerate() {
        if let Some(c) = row.iter().position(|&id| id >= spec.model.vocab) {
            return refuse(format!(
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
