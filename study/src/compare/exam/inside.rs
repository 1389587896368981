//! The inside of the arms of an exam: which heads answer, and which passes of a loop.
//!
//! *In*: the trained runs of a task. *Out*: `{task}.inside.json`, once. *Promise*: a share is the
//! exact match of held-out problems as hard as those learned from, of the model that was trained,
//! with one head's output zero or with fewer passes of its loop, and nothing else changed.

use super::{Manifest, PROBLEMS, Sat};
use crate::compare::exam::Asked;
use crate::compare::study::{ended, ledger, run_folder};
use crate::failure::{Done, Failure};
use crate::model::Trained;
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::probe::{Probe, matches, points};
use dreamc_compiler::{Options, compile};
use dreamc_data::Tokenizer;
use dreamc_data::files;
use dreamc_device::Device;
use dreamc_dsl::spec::{Item, Source, Task};
use dreamc_runtime::analysis::probe::{Part, Probing, Without, heads, without_heads};
use dreamc_runtime::evaluate::{Difficulty, exact_match, share};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Heads of all layers and passes that are taken out one by one, at most.
const MOST_HEADS: usize = 96;
/// Passes that a model is asked with one after another, at most.
const MOST_PASSES: u64 = 16;
/// Rows at once.
const ROWS: u64 = 8;

/// An arm of a task from inside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inside {
    /// The arm.
    pub arm: String,
    /// The seed of the run that was looked into.
    pub seed: u64,
    /// Exact match of the whole model.
    pub exact: f64,
    /// The same without each head; empty where there is none, or too many.
    pub heads: Vec<Head>,
    /// How many heads there are.
    pub all_heads: u64,
    /// The same with fewer passes of the loop, the last of them with all.
    pub passes: Vec<Passes>,
}

/// A model without a head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// `layers.{set}.{component}`, with the pass where there are several.
    pub name: String,
    /// Its number.
    pub number: u64,
    /// Exact match without it.
    pub exact: f64,
}

/// A model with a number of passes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Passes {
    /// How many.
    pub count: u64,
    /// Exact match by difficulty.
    pub by: Vec<(u64, f64)>,
}

/// The file of a task.
fn file(exam: &Path, task: &Sat) -> PathBuf {
    exam.join(format!("{}.inside.json", task.name))
}

/// Findings of a task, where it was looked into.
pub fn read(exam: &Path, task: &Sat) -> Result<Vec<Inside>, Failure> {
    let path = file(exam, task);
    if !path.is_file() {
        return Ok(vec![]);
    }
    let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
    serde_json::from_str(&text).map_err(|e| Failure::Usage(format!("{}: {e}", path.display())))
}

/// Looks into the first seed of every arm of every task that has ended, where it was not done
/// before.
pub fn look(a: &Asked, exam: &Path, manifest: &Manifest) -> Done {
    let device = a.device.open()?;
    for task in manifest.tasks.iter().filter(|task| !file(exam, task).is_file()) {
        let Some(&seed) = manifest.seeds.first() else { continue };
        let mut found = vec![];
        for arm in &manifest.arms {
            let run = run_folder(&task.folder(exam), arm, seed);
            if !ledger(&run)?.is_some_and(|ledger| ended(&ledger)) {
                continue;
            }
            let rewriting = a.rewriting.on(device.as_ref())?;
            let trained = Trained::open(&run, None, &[], rewriting)?;
            found.extend(
                Looked::of(&trained, device.as_ref())?.map(|looked| looked.inside(arm, seed)).transpose()?,
            );
        }
        if found.len() < manifest.arms.len() {
            continue;
        }
        let text = serde_json::to_string_pretty(&found)? + "\n";
        files::write_atomic(&file(exam, task), |out| out.write_all(text.as_bytes()))?;
    }
    Ok(())
}

/// A trained model and the problems that it is asked.
struct Looked<'t> {
    trained: &'t Trained,
    device: &'t dyn Device,
    tokenizer: Tokenizer,
    /// The task with those difficulties alone that were learned from.
    task: Task,
    each: u64,
}

impl<'t> Looked<'t> {
    /// None where the model learned no task.
    fn of(trained: &'t Trained, device: &'t dyn Device) -> Result<Option<Self>, Failure> {
        let sources = trained.spec.data.iter().flat_map(|data| &data.sources);
        let mut tasks = sources.filter_map(|(source, _)| match source {
            Source::Task(task) => Some(task),
            Source::Text { .. } | Source::Jsonl { .. } | Source::Parquet { .. } => None,
        });
        let Some(task) = tasks.next() else { return Ok(None) };
        let task = Task { longer: vec![], ..task.clone() };
        let each = (PROBLEMS / (task.difficulties().count() as u64).max(1)).max(8);
        Ok(Some(Looked { trained, device, tokenizer: trained.tokenizer()?, task, each }))
    }

    fn options(&self) -> Options {
        let spec = &self.trained.spec;
        let sequence = spec.train.sequence.unwrap_or(spec.model.context);
        let (rewrite, segments) = (self.trained.rewriting.clone(), prepare::masked(spec));
        Options { logits: true, rewrite, segments, ..prepare::forward(ROWS, sequence) }
    }

    fn load(&self, options: &Options) -> Result<Model, Failure> {
        let mut model = Model::load(self.device, compile(&self.trained.spec, options)?)?;
        model.restore(&self.trained.tensors)?;
        Ok(model)
    }

    fn by_difficulty(&self, model: &mut Model) -> Result<Vec<(u64, f64)>, Failure> {
        let spec = &self.trained.spec;
        let mask = prepare::masked(spec);
        let found = exact_match(model, &self.tokenizer, &self.task, spec.train.seed, mask, self.each)?;
        let of = |d: &Difficulty| Some((d.steps, share(std::slice::from_ref(d))?));
        Ok(found.iter().filter_map(of).collect())
    }

    /// The mean over difficulties, as the score of an exam.
    fn exact(&self, model: &mut Model) -> Result<f64, Failure> {
        let all = self.by_difficulty(model)?;
        Ok(all.iter().map(|(_, share)| share).sum::<f64>() / all.len().max(1) as f64)
    }

    fn inside(&self, arm: &str, seed: u64) -> Result<Inside, Failure> {
        let mut options = self.options();
        let [_, mut changed] = Part::Heads.patterns();
        let all = points(&self.trained.spec.model, &options)?;
        changed.retain(|pattern| all.iter().any(|point| matches(pattern, &point.name)));
        options.probe = Probe { captured: vec![], patched: changed };
        let mut probing = Probing::new(self.load(&options)?)?;
        let exact = self.exact(probing.model())?;
        let all_heads: u64 = heads(&probing).iter().map(|(_, _, shape)| shape[2]).sum();
        let found = match all_heads as usize > MOST_HEADS {
            true => vec![],
            false => without_heads(&mut probing, &mut |model: &mut Model| self.exact(model))?,
        };
        let head = |w: Without| Head { name: w.name, number: w.number, exact: w.measure };
        let heads = found.into_iter().map(head).collect();
        Ok(Inside { arm: arm.into(), seed, exact, heads, all_heads, passes: self.passes()? })
    }

    /// Exact match with each number of passes of the only outermost loop; none where there is no
    /// such loop.
    fn passes(&self) -> Result<Vec<Passes>, Failure> {
        let model = &self.trained.spec.model;
        let most = model.body.iter().filter_map(|item| match item {
            Item::Recur { count, .. } => Some(*count),
            Item::Layer(_) | Item::Statement(_) | Item::Repeat { .. } => None,
        });
        let most: Vec<u64> = most.collect();
        let [most] = most[..] else { return Ok(vec![]) };
        if !(2..=MOST_PASSES).contains(&most) || Architecture::new(model, Some(1)).is_err() {
            return Ok(vec![]);
        }
        let mut found = vec![];
        for count in 1..=most {
            let options = Options { depth: Some(count), ..self.options() };
            let mut model = self.load(&options)?;
            found.push(Passes { count, by: self.by_difficulty(&mut model)? });
        }
        Ok(found)
    }
}
