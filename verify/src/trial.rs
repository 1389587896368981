//! A short run of the subject on a generated task, for proofs about the loop.

use super::VerifyError;
use super::subject::Subject;
use crate::{Checks, Place as At};
use dreamc_compiler::Options;
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::{Dataset, Settings};
use dreamc_device::Device;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_dsl::component::Component;
use dreamc_dsl::spec::{BadRows, Data, Item, Shard, Source, Task, TaskKind, Tokenizer};
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::checkpoint::safetensors::Tensors;
use dreamc_runtime::train::folder::{Place, RunFolder};
use dreamc_runtime::train::{Outcome, Prepared, Setup, TrainError, run};
use std::path::Path;
use tempfile::TempDir;

/// Steps of the run.
pub const STEPS: u64 = 6;
/// After which it has a checkpoint.
pub const CUT: u64 = 3;
/// Tokens of a row.
const SEQUENCE: u64 = 32;
/// Rows of a micro-batch.
pub const ROWS: u64 = 2;

/// The run.
pub struct Trial {
    pub spec: Spec,
    text: String,
    pub dataset: Dataset,
    home: TempDir,
}

impl Trial {
    /// Six steps of `parts` micro-batches, at random depths where the model recurs.
    pub fn new(s: &Subject, parts: u64) -> Result<Self, VerifyError> {
        Trial::of(s.spec.clone(), parts)
    }

    /// The same for a model whose mixtures have enough experts for all ranks to share; `None` for a
    /// model without mixtures.
    pub fn sharing_experts(s: &Subject, parts: u64) -> Result<Option<Self>, VerifyError> {
        let mut spec = s.spec.clone();
        let mut any = false;
        for component in spec.model.components.values_mut() {
            any |= widen(component, s.ranks);
        }
        // Attentions have mixtures in layers that recur, which compiling finds.
        let trial = Trial::of(spec, parts)?;
        if any {
            let one = trial.compiled(s, Options::default())?;
            // A definition has as many as it says.
            let mut experts = one.compiled.tensors.iter().filter_map(Tensor::experts).peekable();
            any = experts.peek().is_some() && experts.all(|n| n.is_multiple_of(s.ranks));
        }
        Ok(any.then_some(trial))
    }

    fn of(mut spec: Spec, parts: u64) -> Result<Self, VerifyError> {
        // The shortest problem of the byte level needs some room.
        spec.model.vocab = spec.model.vocab.max(256);
        spec.model.context = spec.model.context.max(SEQUENCE);
        let task = Task { size: 4, ..Task::new(TaskKind::Permutation, 1, 2) };
        let data = Data {
            sources: vec![(Source::Task(task), 1.0)],
            tokenizer: Tokenizer::Bytes,
            validation: 0.0,
            validation_file: None,
            document_mask: spec.data.as_ref().is_some_and(|d| d.document_mask),
            begin: None,
            bad_rows: BadRows::Stop,
        };
        let counts = spec.model.body.iter().filter_map(|i| match i {
            Item::Recur { count, .. } => Some(*count),
            _ => None,
        });
        let counts: Vec<u64> = counts.collect();
        let drawn = dreamc_runtime::train::schedule::depths(&spec).is_some();
        let train = &mut spec.train;
        (train.steps, train.batch, train.accumulate) = (STEPS, ROWS * parts, parts);
        (train.checkpoint.every, train.checkpoint.keep, train.sequence) = (CUT, 4, Some(SEQUENCE));
        // Squares that are forgotten let one small gradient move a weight by any amount: a run that
        // diverges has no bits to compare.
        train.betas.1 = train.betas.1.max(0.9);
        if let ([count], false) = (counts.as_slice(), drawn) {
            train.random_depth = Some((1, *count));
        }
        let home = tempfile::tempdir()?;
        let cache = home.path().join("cache");
        let settings = Settings {
            base: Path::new(""),
            cache: &cache,
            sequence: SEQUENCE,
            vocab: spec.model.vocab,
            seed: spec.train.seed,
            stride: None,
        };
        let dataset = Dataset::open(&data, &settings, &mut |_| {})?;
        spec.data = Some(data);
        let text = dreamc_dsl::show(&spec, dreamc_dsl::Spelling::Yaml);
        Ok(Trial { spec, text, dataset, home })
    }

    /// Its programs for each of `ranks` ranks, with this cut over them.
    pub fn team(&self, s: &Subject, ranks: u64, shard: Shard) -> Result<Vec<Prepared>, VerifyError> {
        self.sharing(s, ranks, (shard, 1))
    }

    /// The same where `experts` of them own the experts of each mixture together.
    pub fn sharing(
        &self,
        s: &Subject,
        ranks: u64,
        (shard, experts): (Shard, u64),
    ) -> Result<Vec<Prepared>, VerifyError> {
        let one = |rank| self.compiled(s, Options { ranks, rank, shard, experts, ..Options::default() });
        (0..ranks).map(one).collect()
    }

    /// Its programs for one process.
    pub fn prepared(&self, s: &Subject) -> Result<Prepared, VerifyError> {
        self.compiled(s, Options::default())
    }

    /// Its programs with values in bf16, where `again` layers recompute what they keep.
    pub fn within(&self, s: &Subject, narrow: Narrow, again: usize) -> Result<Prepared, VerifyError> {
        self.compiled(s, Options { narrow, again, ..Options::default() })
    }

    fn compiled(&self, s: &Subject, options: Options) -> Result<Prepared, VerifyError> {
        let (narrow, ranks) = (options.narrow, options.ranks);
        let options = Options {
            batch: ROWS,
            sequence: SEQUENCE,
            train: true,
            segments: dreamc_runtime::train::prepare::masked(&self.spec),
            depths: dreamc_runtime::train::schedule::possible_depths(&self.spec),
            ..options
        };
        Ok(Prepared {
            teacher: None,
            compiled: s.pipeline.compile(&self.spec, &options)?,
            scorer: None,
            writer: None,
            observer: None,
            narrow,
            ranks,
            rows: ROWS,
            sequence: SEQUENCE,
            rewriting: Rewriting::default(),
            declared: None,
            rewritten: vec![],
            seconds: 0.0,
        })
    }

    /// A folder for it.
    pub fn folder(&self, name: &str) -> Result<RunFolder, VerifyError> {
        let place = Place::At { path: self.home.path().join(name), force: false };
        Ok(RunFolder::create(&place).map_err(TrainError::from)?)
    }

    /// Runs one rank of it to its end.
    pub fn run(
        &self,
        prepared: &Prepared,
        device: &dyn Device,
        group: Group,
        folder: Option<&RunFolder>,
        from: Option<Checkpoint>,
    ) -> Result<Outcome, TrainError> {
        let setup = Setup {
            spec: &self.spec,
            text: &self.text,
            device,
            dataset: &self.dataset,
            group,
            folder,
            base: None,
            from,
            allow_changes: false,
            count: false,
        };
        run(prepared.clone(), setup, &mut |_: &dreamc_runtime::train::event::Event| {})
    }
}

/// Gives a mixture enough experts for ranks to share; false without a mixture.
fn widen(component: &mut Component, ranks: u64) -> bool {
    match component {
        Component::Experts(e) => {
            let all = e.active >= e.count + e.noop;
            let unit =
                (1..=ranks).map(|i| i * e.router.groups.max(1)).find(|unit| unit.is_multiple_of(ranks));
            e.count = e.count.next_multiple_of(unit.unwrap_or(ranks));
            if all {
                e.active = e.count + e.noop;
            }
            true
        }
        Component::Sequence(a) | Component::Depth(a) => {
            let count = a.projection.as_mut().map(|p| &mut p.count);
            count.map(|count| *count = Some(count.unwrap_or(1).next_multiple_of(ranks))).is_some()
        }
        _ => false,
    }
}

/// The checkpoint of a folder after a step.
pub fn checkpoint(folder: &RunFolder, step: u64) -> Result<Checkpoint, VerifyError> {
    Ok(Checkpoint::open(&folder.checkpoints().at(step)).map_err(TrainError::from)?)
}

/// The lines of metrics of a folder.
pub fn lines(folder: &RunFolder) -> Result<Vec<serde_json::Value>, VerifyError> {
    let text = std::fs::read_to_string(folder.metrics())?;
    Ok(text.lines().map(|line| serde_json::from_str(line).unwrap_or_default()).collect())
}

/// Compares the bits of all tensors of two checkpoints, and their places in the data.
pub fn same_bits(checks: &mut Checks, a: &Checkpoint, b: &Checkpoint) -> Result<(), VerifyError> {
    for (of, a, b) in [("", &a.model, &b.model), ("optimizer's ", &a.optimizer, &b.optimizer)] {
        for (name, _) in a.entries() {
            let (x, y) = (values(a, name)?, values(b, name)?);
            let bits = x.iter().zip(&y).filter(|(a, b)| a.to_bits() != b.to_bits());
            let other = bits.count() + x.len().abs_diff(y.len());
            let tensor = name.trim_end_matches(".m").trim_end_matches(".v").trim_end_matches(".counts");
            checks.check(format!("bits of {of}{name}"), other as f64, 0.0, At::of_tensor(tensor));
        }
    }
    let cursor = f64::from(u8::from(a.state.cursor != b.state.cursor));
    checks.check("place in the data", cursor, 0.0, At::default());
    Ok(())
}

fn values(file: &Tensors, name: &str) -> Result<Vec<f32>, VerifyError> {
    let found = file.get(name).map_err(TrainError::from)?;
    Ok(found.map(|view| view.1.to_vec()).unwrap_or_default())
}
