//! Trained models: opened, compiled and asked.

use crate::failure::Failure;
use crate::note;
use crate::number::many;
use crate::spec;
use crate::transplant;
use dreamc_compiler::format::Formats;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Compiled, looks_ahead};
use dreamc_data::Tokenizer;
use dreamc_data::dataset::begins;
use dreamc_device::Device;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Source;
use dreamc_runtime::checkpoint::{Binding, Checkpoint, Weights};
use dreamc_runtime::generate::{Cached, Growing, NextLogits, Slots, Uncached, Writing, compile_cached};
use dreamc_runtime::model::{Memory, Model, ModelError};
use dreamc_runtime::train::folder::RunFolder;
use dreamc_runtime::train::metrics::Metrics;
use dreamc_runtime::train::prepare::{self, Storing};
use std::path::{Path, PathBuf};

/// How the passes of a recurrent model are run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passes {
    /// The count of its outermost `recur`, in place of the specification's.
    pub depth: Option<u64>,
    /// A token leaves a loop with `exit gate` after the first pass by which more than this share
    /// of it has left, from 0 to below 1; all passes where none is named.
    pub exit: Option<f64>,
}

/// The weights that a run begins from, unless it goes on from a checkpoint: those the specification
/// names, or those of its transplant, which are made in the run's folder.
pub fn beginning(
    spec: &Spec,
    from: Option<&Checkpoint>,
    (run, device): (&Path, &dyn Device),
) -> Result<Option<Weights>, Failure> {
    match (from, &spec.weights) {
        (None, Some(path)) => Ok(Some(Weights::open(Path::new(path), None)?)),
        (None, None) => transplant::begin(spec, &run.join("begin"), device),
        (Some(_), _) => Ok(None),
    }
}

/// The storage of weights in the file of a run's base, where this device reads them there. Ranks
/// that train together have copies.
pub fn stored(spec: &Spec, from: Option<&Checkpoint>, device: &dyn Device, group: &Group) -> Formats {
    if group.size() > 1 {
        return Formats::default();
    }
    let base = match from {
        None => spec.weights.clone(),
        Some(from) => Binding::of(&from.model).map(|base| base.path),
    };
    // A base that does not open is refused where it is loaded.
    let weights = base.and_then(|base| Weights::open(Path::new(&base), None).ok());
    weights.map(|weights| weights.formats_on(device)).unwrap_or_default()
}

/// The newest good checkpoint of a run; `None` where the run was stopped before its first. Says
/// what was found; `steps` are all those that a run takes which goes on from it.
pub fn latest(
    folder: &RunFolder,
    steps_from: &dyn Fn(&Checkpoint) -> Option<u64>,
) -> Result<Option<Checkpoint>, Failure> {
    let checkpoints = folder.checkpoints();
    let metrics = Metrics::read(&folder.metrics())?;
    let came = metrics.steps.last().map_or(0, |s| s.step).max(metrics.skipped.last().map_or(0, |s| s.step));
    let steps = checkpoints.steps();
    if steps.is_empty() {
        let run = folder.path().display();
        if came > 0 {
            note!(
                "{run}: stopped after step {came}, before its first checkpoint (there is one every ten minutes, \
                 `train.checkpoint.minutes`): it begins anew"
            );
        } else {
            note!("{run}: stopped before its first step: it begins anew");
        }
        return Ok(None);
    }
    let (checkpoint, refused) = checkpoints.latest()?;
    for error in refused {
        note!("warning: {error}");
    }
    let step = checkpoint.state.step;
    let again = match came.saturating_sub(step) {
        0 => String::new(),
        1 => ", and takes one step again".into(),
        n => format!(", and takes {n} steps again"),
    };
    let of: Vec<String> = steps.iter().map(u64::to_string).collect();
    let found = match &of[..] {
        [one] => format!("found the checkpoint of step {one}"),
        several => format!("found checkpoints of steps {}", several.join(", ")),
    };
    match steps_from(&checkpoint) {
        Some(all) if step >= all => note!(
            "{found}: the run is at its end, after {}; `dreamc resume {} --set train.steps=N` trains it longer",
            many(step.into(), "step"),
            folder.path().display()
        ),
        _ => note!("{found}: going on after step {step}{again}"),
    }
    Ok(Some(checkpoint))
}

/// A checkpoint with the specification it was trained from.
pub struct Trained {
    /// The specification, with `--set` applied.
    pub spec: Spec,
    /// The weights.
    pub tensors: Weights,
    /// Which rewriting rules its programs are compiled with.
    pub rewriting: Rewriting,
}

/// Texts that are written.
#[derive(Clone, Copy)]
pub struct Texts {
    /// At once.
    pub rows: u64,
    /// Tokens of the longest prompt, where that is known.
    pub prompt: Option<u64>,
    /// Tokens of a text at most, where that is less than the model's context.
    pub context: Option<u64>,
}

impl Texts {
    /// Texts that go on from these prompts, at most `rows` at once, with `max_tokens` tokens more.
    pub fn after(prompts: &[Vec<u32>], max_tokens: usize, rows: usize) -> Self {
        let prompt = prompts.iter().map(Vec::len).max().unwrap_or(0).max(1);
        Texts {
            rows: prompts.len().clamp(1, rows) as u64,
            prompt: Some(prompt as u64),
            context: Some(((prompt + max_tokens) as u64).next_multiple_of(64)),
        }
    }
}

impl Trained {
    /// Opens a run folder, a checkpoint folder, or a safetensors file that dreamc wrote.
    pub fn open(
        path: &Path,
        base: Option<&Path>,
        set: &[String],
        rewriting: Rewriting,
    ) -> Result<Self, Failure> {
        if spec::is_specification(path) {
            let path = path.display();
            return Err(Failure::Usage(format!(
                "{path} is a specification, and a trained model is needed: `dreamc train {path}` makes one; name the folder of its run"
            )));
        }
        let tensors = Weights::open(path, base)?;
        let name = tensors.path().display().to_string();
        for error in &tensors.refused {
            note!("warning: {error}; {name} is read instead");
        }
        let Some(text) = tensors.metadata("spec") else {
            return Err(Failure::Usage(format!(
                "{name} was not written by dreamc: it does not say which specification it belongs to"
            )));
        };
        let spec = spec::parse(&name, text, set)?;
        Ok(Trained { spec, tensors, rewriting })
    }

    /// The tokenizer next to the weights: an imported model's; or the copy of a run, some folders
    /// above.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        let levels = if self.spec.data.is_some() { 4 } else { 1 };
        let folders = self.tensors.path().ancestors().skip(1).take(levels);
        folders.map(|p| p.join("tokenizer.json")).find(|p| p.is_file())
    }

    /// The tokenizer: the one next to the weights, else the one the specification names.
    pub fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        use dreamc_dsl::spec::Tokenizer as Named;
        let named = self.spec.data.as_ref().map(|d| &d.tokenizer);
        Ok(match (named, self.tokenizer_file()) {
            (Some(Named::Bytes), _) => Tokenizer::bytes(),
            (None, None) => {
                return Err(Failure::Usage(format!(
                    "{} has no tokenizer.json next to it: text cannot be read or written; `dreamc probe` takes token ids, and an \
                     import of a folder with a tokenizer.json reads text",
                    self.tensors.path().display()
                )));
            }
            (_, Some(path)) => Tokenizer::from_file(&path)?,
            (Some(named), None) => Tokenizer::open(named, Path::new(""))?,
        })
    }

    /// Whether texts begin with the begin token.
    pub fn begins(&self, tokenizer: &Tokenizer) -> bool {
        let Some(data) = &self.spec.data else { return tokenizer.begins() };
        let prompted = data.sources.iter().any(|(source, _)| match source {
            Source::Task(_) => true,
            Source::Text { .. } => false,
            Source::Jsonl { prompt, .. } | Source::Parquet { prompt, .. } => prompt.is_some(),
        });
        prompted || begins(data, tokenizer)
    }

    /// Something to write such texts with: with caches, or without where those are not wanted or
    /// the model has none.
    pub fn decoder<'a>(
        &'a self,
        device: &'a dyn Device,
        Texts { rows, prompt, context }: Texts,
        passes: Passes,
        cache: bool,
    ) -> Result<Box<dyn NextLogits + 'a>, Failure> {
        if cache {
            let make = move |slack: f64| {
                let narrow = device.writes(self.spec.train.precision);
                let rewrite = self.rewriting.clone();
                let Passes { depth, exit } = passes;
                let (formats, every) = (self.formats(device), false);
                let writing =
                    Writing { rows, context, prompt, depth, exit, rewrite, slack, narrow, formats, every };
                let compiled = compile_cached(&self.spec, &writing)?;
                let mut cached = Cached::load(device, compiled)?;
                cached.model().restore(&self.tensors)?;
                Ok(cached)
            };
            match Growing::new(make) {
                Err(ModelError::Compile(CompileError::Unsupported(_))) => {}
                result => return Ok(Box::new(result?)),
            }
        }
        if looks_ahead(&self.spec.model) {
            return Err(CompileError::LooksAhead.into());
        }
        Ok(Box::new(Uncached::new(self.uncached(device, passes, rows, context)?)))
    }

    /// Rows for texts that come and go, and their memory: with caches, which keep `keep` tokens of
    /// prompts, or without where the model has none.
    pub fn slots(
        &self,
        device: &dyn Device,
        rows: u64,
        context: Option<u64>,
        keep: usize,
        passes: Passes,
    ) -> Result<(Box<dyn NextLogits + Send>, Memory), Failure> {
        let (rewrite, narrow) = (self.rewriting.clone(), device.writes(self.spec.train.precision));
        let Passes { depth, exit } = passes;
        // A request may ask for the scores of its prompt.
        let (prompt, slack, every) = (None, f64::INFINITY, true);
        let formats = self.formats(device);
        let writing = Writing { rows, context, prompt, depth, exit, rewrite, slack, narrow, formats, every };
        match Slots::load(device, &self.spec, &writing, &self.tensors) {
            Err(ModelError::Compile(CompileError::Unsupported(_))) => {}
            result => {
                let mut slots = result?;
                slots.keep(keep);
                let memory = slots.memory();
                return Ok((Box::new(slots), memory));
            }
        }
        if looks_ahead(&self.spec.model) {
            return Err(CompileError::LooksAhead.into());
        }
        let model = self.uncached(device, passes, rows, context)?;
        let memory = model.memory();
        Ok((Box::new(Uncached::new(model)), memory))
    }

    /// Loaded to write without caches: texts are as long as with them, whatever the rows were that
    /// it was trained on.
    fn uncached(
        &self,
        device: &dyn Device,
        Passes { depth, exit }: Passes,
        rows: u64,
        context: Option<u64>,
    ) -> Result<Model, Failure> {
        let mut spec = self.spec.clone();
        let most = spec.model.context;
        spec.train.sequence = Some(context.unwrap_or(most).min(most));
        let storing = self.storing(device);
        let compiled = prepare::scorer(&spec, (depth, exit), Some(rows), &self.rewriting, storing)?;
        let compiled = compiled.ok_or_else(|| {
            Failure::Usage(
                "without caches a text takes logits of all its tokens, and vocabulary × tokens is too large for that: ask for \
                 fewer tokens (`--max-tokens`, `--context`)"
                    .into(),
            )
        })?;
        let mut model = Model::load(device, compiled)?;
        model.restore(&self.tensors)?;
        Ok(model)
    }

    /// Storage of weights that a device reads in their files.
    fn formats(&self, device: &dyn Device) -> Formats {
        self.tensors.formats_on(device)
    }

    /// Storage of all numbers, on a device.
    pub fn storing(&self, device: &dyn Device) -> Storing {
        Storing { narrow: self.narrow(device), formats: self.formats(device) }
    }

    /// Storage in bf16 by the recipe, on a device.
    pub fn narrow(&self, device: &dyn Device) -> Narrow {
        device.narrow(self.spec.train.precision)
    }

    /// Loaded to measure losses of whole rows, in the precision and by the program of the run.
    pub fn measurer(&self, device: &dyn Device, depth: Option<u64>) -> Result<Model, Failure> {
        let compiled = prepare::measurer(&self.spec, depth, &self.rewriting, self.storing(device))?;
        let mut model = Model::load(device, compiled)?;
        model.restore(&self.tensors)?;
        Ok(model)
    }

    /// Loaded to compare its losses and logits with another's.
    pub fn comparer(&self, device: &dyn Device, depth: Option<u64>) -> Result<Model, Failure> {
        let compiled = prepare::comparer(&self.spec, depth, &self.rewriting, self.storing(device))?;
        let mut model = Model::load(device, compiled)?;
        model.restore(&self.tensors)?;
        Ok(model)
    }

    /// Loaded to score whole rows by their logits.
    pub fn scoring(&self, device: &dyn Device, depth: Option<u64>) -> Result<Model, Failure> {
        let compiled = self.scorer(device, Passes { depth, exit: None }, None)?;
        let mut model = Model::load(device, compiled)?;
        model.restore(&self.tensors)?;
        Ok(model)
    }

    /// Compiled to score whole rows, as the run itself does.
    pub fn scorer(
        &self,
        device: &dyn Device,
        Passes { depth, exit }: Passes,
        most: Option<u64>,
    ) -> Result<Compiled, Failure> {
        let storing = self.storing(device);
        prepare::scorer(&self.spec, (depth, exit), most, &self.rewriting, storing)?.ok_or_else(|| {
            Failure::Usage(
                "vocabulary × sequence is too large to keep logits of; use a smaller train.sequence".into(),
            )
        })
    }

    /// Compiled to look at its routers; none where it has no routers.
    pub fn health_observer(
        &self,
        device: &dyn Device,
        depth: Option<u64>,
    ) -> Result<Option<Compiled>, Failure> {
        Ok(prepare::health_observer(&self.spec, depth, &self.rewriting, self.storing(device))?)
    }

    /// The tokens of a prompt.
    pub fn prompt(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Failure> {
        let mut ids = if self.begins(tokenizer) { vec![tokenizer.begin()] } else { vec![] };
        ids.extend(tokenizer.encode(text)?);
        Ok(ids)
    }
}
