//! A teacher in training: another model, whose values a step is pulled towards.
//!
//! *In*: the `heal` section of a specification. *Out*: [`Plan`], the teacher compiled and for each
//! stage which of its values are matched with which of the model's; [`Teacher`], which runs it on
//! the rows of a micro-batch and gives the model what a step matches. *Promise*: the teacher's
//! weights are never written, and stay in their file in its format where the device reads them
//! there; what is given is a function of the teacher, the row and the number of the step, so that
//! a run that goes on has the same bits. Values that a disk keeps are those that were computed.

use super::error::TrainError;
use super::prepare::{forward, masked, sequence};
use super::schedule::possible_depths;
use super::stored::{Store, key};
use crate::analysis::probe::{Probing, is_stream};
use crate::checkpoint::Weights;
use crate::model::{Memory, Model};
use dreamc_compiler::bind::Output;
use dreamc_compiler::compiled::Entry as Of;
use dreamc_compiler::count::{self, count};
use dreamc_compiler::probe::{Point, Probe, matches, nearest, points};
use dreamc_compiler::program::Plan as Program;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::teach::{LOGITS, Taught};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_data::{Batch, Tokenizer};
use dreamc_device::{Device, Instrument};
use dreamc_dsl::spec::{Heal, Lesson, Stage};
use dreamc_dsl::{Diagnostic, Diagnostics, Spec, Spelling};
use indexmap::{IndexMap, IndexSet};
use std::path::{Path, PathBuf};

/// A teacher that is compiled, and what is matched.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where it is.
    pub path: PathBuf,
    /// Its specification.
    spec: Spec,
    /// Its forward over a micro-batch of the model's.
    compiled: Compiled,
    /// Values that each stage matches.
    pub stages: Vec<Vec<Pair>>,
    /// Likeliest tokens that are kept of its logits; all where absent.
    top: Option<usize>,
    /// Its values but for the logits, with the numbers of a row.
    captured: IndexMap<String, usize>,
    /// FLOPs of its forward, a token.
    pub flops_per_token: Option<f64>,
}

/// A value of the model, and the teacher's that it is matched with.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The model's.
    pub to: String,
    /// The teacher's.
    pub from: String,
    /// Its weight.
    pub weight: f64,
}

/// An error at a field of the specification.
fn refused(spec: &Spec, field: &str, code: &'static str, message: String, help: String) -> TrainError {
    let error = Diagnostic::error(code, message).help(help).at(&spec.sources, field);
    TrainError::Refused(Box::new(Diagnostics::new(spec.sources.clone(), vec![error])))
}

impl Plan {
    /// The teacher of a specification, for micro-batches of `rows` rows; `None` where it names no
    /// teacher.
    pub fn of(
        spec: &Spec,
        rows: u64,
        device: &dyn Device,
        rewriting: &Rewriting,
    ) -> Result<Option<Plan>, TrainError> {
        let Some(heal) = &spec.heal else { return Ok(None) };
        let refuse = |field: &str, code, message: String, help: &str| {
            Err(refused(spec, field, code, message, help.into()))
        };
        let donor = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
        let Some(path) = heal.teacher.as_ref().or(donor) else {
            let help = "write `teacher`: a run, a checkpoint or an imported model";
            return refuse("heal", "missing-key", "there is no teacher".into(), help);
        };
        let weights = Weights::open(Path::new(path), None).map_err(|e| {
            refused(
                spec,
                "heal.teacher",
                "no-teacher",
                e.to_string(),
                "name a run, a checkpoint or an imported model".into(),
            )
        })?;
        let theirs = specification(spec, &weights)?;
        let (tokens, most) = (sequence(spec), theirs.model.context);
        if theirs.model.vocab != spec.model.vocab {
            let message = format!(
                "the teacher's vocabulary has {} tokens, and the model's {}",
                theirs.model.vocab, spec.model.vocab
            );
            let help = "a teacher reads the model's tokens: take one of its vocabulary; `dreamc transplant` maps a donor's by their texts";
            return refuse("heal.teacher", "other-vocabulary", message, help);
        }
        if tokens > most {
            let message = format!("rows have {tokens} tokens, and the teacher's context is {most}");
            let help =
                format!("set `train.sequence` to {most} or less, or take a teacher of a longer context");
            return refuse("heal.teacher", "short-context", message, &help);
        }
        if !possible_depths(spec).is_empty() {
            let inside = |stage: &Stage| stage.matches.iter().position(|lesson| lesson.to != "logits");
            let found =
                heal.stages.iter().enumerate().find_map(|(i, stage)| Some((i, stage, inside(stage)?)));
            if let Some((i, stage, place)) = found {
                let listed = if stage.matches.len() > 1 { format!("[{place}]") } else { String::new() };
                let message = format!(
                    "`{}` is inside the model, whose depth is drawn anew each step",
                    stage.matches[place].to
                );
                let help =
                    "match `logits`, which every depth has, or train at one depth until this stage is over";
                return refuse(&format!("heal.stages[{i}].match{listed}"), "random-depth", message, help);
            }
        }
        let looking = |spec: &Spec| Options { segments: masked(spec), ..forward(rows, tokens) };
        let own = points(&spec.model, &looking(spec))?;
        let other = points(&theirs.model, &looking(spec))?;
        let pairs = heal.stages.iter().enumerate().map(|(i, stage)| paired(spec, (i, stage), &own, &other));
        let stages = pairs.collect::<Result<Vec<_>, _>>()?;
        let names: IndexSet<&str> = stages.iter().flatten().map(|pair| pair.from.as_str()).collect();
        let inside: Vec<String> =
            names.iter().filter(|name| **name != LOGITS).map(|n| n.to_string()).collect();
        let numbers = |name: &String| {
            let found = other.iter().find(|point| point.name == *name);
            found.map_or(0, |point| point.shape[1..].iter().product::<u64>() as usize)
        };
        let captured = inside.iter().map(|name| (name.clone(), numbers(name))).collect();
        let narrow = device.narrow(theirs.train.precision);
        let formats = weights.formats_on(device);
        let probe = Probe { captured: inside, patched: vec![] };
        let with = Options { probe, narrow, formats, rewrite: rewriting.clone(), ..looking(spec) };
        let compiled = compile(&theirs, &Options { logits: names.contains(LOGITS), ..with })?;
        let flops = count(&theirs, &count::Options { tokens, ..count::Options::default() }).ok();
        Ok(Some(Plan {
            path: PathBuf::from(path),
            compiled,
            stages,
            top: most_kept(heal, spec.model.vocab),
            captured,
            flops_per_token: flops.map(|counts| counts.flops_per_token.training_forward.mean()),
            spec: theirs,
        }))
    }

    /// The values of the model that some stage matches.
    pub fn taught(&self) -> Vec<String> {
        let names: IndexSet<&String> = self.stages.iter().flatten().map(|pair| &pair.to).collect();
        names.into_iter().cloned().collect()
    }

    /// The programs of its forward.
    pub fn programs(&self) -> &Program {
        &self.compiled.plan
    }

    /// Its memory on a device: weights that are not mapped, and the forward of a micro-batch.
    pub fn memory(&self, device: &dyn Device) -> Result<Memory, TrainError> {
        let scratch = device.scratch_bytes(&self.compiled.plan).map_err(crate::model::ModelError::from)?;
        Ok(Memory::of(&self.compiled.plan, scratch, device.copies()))
    }

    /// Whether some stage matches logits.
    fn keeps_logits(&self) -> bool {
        self.compiled.output(Of::Whole, Output::Logits).is_some()
    }

    /// FLOPs of a teacher's forward, a token of all steps; `each` are those of a token that it
    /// reads.
    pub fn flops_over(heal: &Heal, each: f64, all: u64) -> f64 {
        each * Plan::steps(heal, all) as f64 / all.max(1) as f64
    }

    /// Steps that have a teacher.
    pub fn steps(heal: &Heal, all: u64) -> u64 {
        let each = heal.stages.iter().map(|stage| stage.steps.unwrap_or(all));
        each.fold(0, u64::saturating_add).min(all)
    }
}

/// The specification that weights belong to.
fn specification(spec: &Spec, weights: &Weights) -> Result<Spec, TrainError> {
    let name = weights.path().display().to_string();
    let Some(text) = weights.metadata("spec") else {
        let message = format!("{name} does not say which specification it belongs to");
        let help = "name a run, a checkpoint or an imported model".into();
        return Err(refused(spec, "heal.teacher", "no-teacher", message, help));
    };
    let read = dreamc_dsl::parse(&name, text, Spelling::Yaml).and_then(|ast| dreamc_dsl::check(&ast, &[]));
    read.map(|(spec, _)| spec).map_err(|diagnostics| TrainError::Refused(Box::new(diagnostics)))
}

/// Likeliest tokens that are kept for all stages.
fn most_kept(heal: &Heal, vocab: u64) -> Option<usize> {
    let logits = heal.stages.iter().filter(|stage| stage.matches.iter().any(|lesson| lesson.to == "logits"));
    let tops: Option<Vec<u64>> = logits.map(|stage| stage.top).collect();
    tops?.into_iter().max().filter(|top| *top < vocab).map(|top| top as usize)
}

/// The values that a stage matches.
fn paired(
    spec: &Spec,
    (number, stage): (usize, &Stage),
    own: &[Point],
    other: &[Point],
) -> Result<Vec<Pair>, TrainError> {
    let mut found: Vec<Pair> = vec![];
    for (place, lesson) in stage.matches.iter().enumerate() {
        let field = |key: &str, listed: bool| match listed {
            true => format!("heal.stages[{number}].{key}[{place}]"),
            false => format!("heal.stages[{number}].{key}"),
        };
        let several = stage.matches.len() > 1;
        let refuse = |key: &str, code, message: String, help: String| {
            Err(refused(spec, &field(key, several), code, message, help))
        };
        let (ours, theirs) = match lesson.to.as_str() {
            "logits" => {
                found.push(Pair { to: LOGITS.into(), from: LOGITS.into(), weight: lesson.weight });
                continue;
            }
            "layers" => spread(own, other),
            name => {
                let from = lesson.from.as_deref().unwrap_or(name);
                let all = |points: &[Point], pattern: &str| -> Vec<Point> {
                    points.iter().filter(|point| matches(pattern, &point.name)).cloned().collect()
                };
                let (ours, theirs) = (all(own, name), all(other, from));
                let key = if lesson.from.is_some() { "from" } else { "match" };
                for (side, found, key, pattern, points) in
                    [("model", &ours, "match", name, own), ("teacher", &theirs, key, from, other)]
                {
                    if found.is_empty() {
                        let near = nearest(pattern, points.iter().map(|point| point.name.as_str()));
                        let message = format!("`{pattern}` names no value of the {side}");
                        return refuse(key, "unknown-name", message, near);
                    }
                }
                (ours, theirs)
            }
        };
        if ours.len() != theirs.len() {
            let message = format!(
                "`{}` are {} values of the model and {} of the teacher",
                lesson.to,
                ours.len(),
                theirs.len()
            );
            let help = "name them one by one, as many in `from` as in `match`".into();
            return refuse("match", "wrong-length", message, help);
        }
        for (to, from) in ours.iter().zip(&theirs) {
            if to.shape != from.shape {
                let message = format!(
                    "`{}` is {:?} and the teacher's `{}` {:?}",
                    to.name, to.shape, from.name, from.shape
                );
                let help =
                    "values of one shape are matched; `logits` are of any two models of one vocabulary"
                        .into();
                return refuse("match", "shape", message, help);
            }
            if found.iter().any(|pair| pair.to == to.name) {
                let message = format!("`{}` is matched twice in this stage", to.name);
                return refuse("match", "claimed-twice", message, "name each value once".into());
            }
            found.push(Pair { to: to.name.clone(), from: from.name.clone(), weight: lesson.weight });
        }
    }
    Ok(found)
}

/// The stream after every layer of the model, and the teacher's at the same depth, the last with
/// the last.
fn spread(own: &[Point], other: &[Point]) -> (Vec<Point>, Vec<Point>) {
    let streams = |points: &[Point]| -> Vec<Point> {
        points.iter().filter(|point| is_stream(&point.name)).cloned().collect()
    };
    let (ours, theirs) = (streams(own), streams(other));
    let (n, m) = (ours.len().max(1), theirs.len());
    let of = (0..ours.len()).filter_map(|i| theirs.get(((i + 1) * m).div_ceil(n).max(1) - 1).cloned());
    let of = of.collect();
    (ours, of)
}

/// A teacher at work.
pub struct Teacher {
    probing: Probing,
    plan: Plan,
    heal: Heal,
    store: Option<Store>,
    /// Whether the model's weights of lessons are zero.
    still: bool,
}

/// Account of what a teacher gave a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Given {
    /// A term that the divergence lacks in the program: the teacher's own entropy, weighted.
    pub constant: f64,
    /// Multiply-adds of its forward; none where its values were kept.
    pub multiply_adds: u64,
}

/// The values of a row, in the order of [`Plan::captured`], then of the logits.
type Rows = Vec<Vec<f32>>;

impl Teacher {
    /// Loads it. Its tokens must be those of the data.
    pub fn load(
        plan: Plan,
        spec: &Spec,
        device: &dyn Device,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TrainError> {
        let heal = spec.heal.clone().unwrap_or(Heal { teacher: None, cache: None, stages: vec![] });
        let weights = Weights::open(&plan.path, None)?;
        if let Some(own) = its_tokenizer(&plan, &weights)?
            && own.fingerprint() != tokenizer.fingerprint()
        {
            let message = "the teacher reads other tokens: its tokenizer is not that of the data".to_string();
            let help = "train with the teacher's tokenizer, or take a teacher of this one".to_string();
            return Err(refused(spec, "heal.teacher", "other-vocabulary", message, help));
        }
        let mut model = Model::load(device, plan.compiled.clone())?;
        model.session().instrument(Instrument { count: true, time: false });
        model.restore(&weights)?;
        let store = match heal.cache {
            Some(most) => {
                let names: Vec<&str> = plan.captured.keys().map(String::as_str).collect();
                let of = (weights.binding()?.hash, names, plan.top, plan.keeps_logits());
                Some(Store::open(most, &format!("{of:?} {}", device.name()))?)
            }
            None => None,
        };
        Ok(Teacher { probing: Probing::new(model)?, plan, heal, store, still: true })
    }

    /// Its memory.
    pub fn memory(&mut self) -> Memory {
        self.probing.model().memory()
    }

    /// Gives the model what a step matches on a micro-batch; `targets` are those of the whole step.
    pub fn give(
        &mut self,
        model: &mut Model,
        batch: &Batch,
        (step, targets): (u64, u64),
    ) -> Result<Given, TrainError> {
        let lessons = model.compiled().taught.clone();
        let Some((number, stage)) = self.stage(step) else {
            if !self.still {
                for lesson in &lessons {
                    write(model, lesson, &[], 0.0, None)?;
                }
                self.still = true;
            }
            return Ok(Given::default());
        };
        self.still = false;
        let (rows, multiply_adds) = self.rows(batch)?;
        let mut given = Given { constant: 0.0, multiply_adds };
        for lesson in &lessons {
            let pair = self.plan.stages[number].iter().find(|pair| pair.to == lesson.point.name);
            let Some(pair) = pair.filter(|pair| pair.weight > 0.0) else {
                write(model, lesson, &[], 0.0, None)?;
                continue;
            };
            let mut weight = pair.weight / targets.max(1) as f64;
            if pair.from == LOGITS {
                // Gradients of a softened softmax are smaller by the temperature's square.
                weight *= stage.temperature.powi(2);
                let logits = rows.iter().filter_map(|row| row.last());
                let vocab = lesson.point.shape.last().copied().unwrap_or(1) as usize;
                let (shares, entropy) = shares(logits, (vocab, self.plan.top), &stage, batch);
                given.constant -= weight * entropy;
                write(model, lesson, &shares, weight as f32, Some(1.0 / stage.temperature as f32))?;
                continue;
            }
            let Some(place) = self.plan.captured.get_index_of(&pair.from) else { continue };
            let values: Vec<f32> = rows.iter().flat_map(|row| row[place].iter().copied()).collect();
            write(model, lesson, &values, weight as f32, None)?;
        }
        Ok(given)
    }

    fn stage(&self, step: u64) -> Option<(usize, Stage)> {
        let found = self.heal.stage(step)?;
        let number = self.heal.stages.iter().position(|stage| std::ptr::eq(stage, found))?;
        Some((number, found.clone()))
    }

    /// The values of every row of a micro-batch, kept or computed.
    fn rows(&mut self, batch: &Batch) -> Result<(Vec<Rows>, u64), TrainError> {
        let keys: Vec<String> = (0..batch.rows()).map(|row| key(batch, row)).collect();
        let lengths = self.lengths(batch.sequence);
        if let Some(store) = &self.store {
            let kept: Option<Vec<Rows>> = keys.iter().map(|key| store.get(key, &lengths)).collect();
            if let Some(kept) = kept {
                return Ok((kept, 0));
            }
        }
        let multiply_adds = self.probing.model().forward(batch)?.multiply_adds();
        let mut rows = vec![vec![]; batch.rows()];
        let mut deal = |values: Vec<f32>| {
            let each = (values.len() / batch.rows().max(1)).max(1);
            rows.iter_mut().zip(values.chunks(each)).for_each(|(row, part)| row.push(part.to_vec()));
        };
        for name in self.plan.captured.keys() {
            deal(self.probing.value(name).map_err(|e| TrainError::Recipe(e.to_string()))?);
        }
        if self.plan.keeps_logits() {
            let all = self.probing.model().all_logits()?;
            let vocab = self.plan.spec.model.vocab as usize;
            deal(match self.plan.top {
                Some(top) => all.chunks(vocab).flat_map(|logits| likeliest(logits, top)).collect(),
                None => all,
            });
        }
        if let Some(store) = &mut self.store {
            for (key, row) in keys.iter().zip(&rows) {
                store.put(key, row)?;
            }
        }
        Ok((rows, multiply_adds))
    }

    /// Numbers of each value of a row.
    fn lengths(&self, tokens: usize) -> Vec<usize> {
        let vocab = self.plan.spec.model.vocab as usize;
        let logits = self.plan.top.map_or(vocab, |top| 2 * top);
        let keeps = self.plan.keeps_logits().then_some(tokens * logits);
        self.plan.captured.values().copied().chain(keeps).collect()
    }
}

/// The tokenizer in the folder of the weights, or bytes where its specification says so.
fn its_tokenizer(plan: &Plan, weights: &Weights) -> Result<Option<Tokenizer>, TrainError> {
    let levels = if plan.spec.data.is_some() { 4 } else { 1 };
    let folders = weights.path().ancestors().skip(1).take(levels);
    let beside = folders.map(|folder| folder.join("tokenizer.json")).find(|file| file.is_file());
    let bytes =
        plan.spec.data.as_ref().is_some_and(|d| matches!(d.tokenizer, dreamc_dsl::spec::Tokenizer::Bytes));
    Ok(match beside {
        _ if bytes => Some(Tokenizer::bytes()),
        Some(file) => Some(Tokenizer::from_file(&file)?),
        None => None,
    })
}

/// Writes what is given for a value; without values they stay.
fn write(
    model: &Model,
    lesson: &Taught,
    values: &[f32],
    weight: f32,
    sharpness: Option<f32>,
) -> Result<(), TrainError> {
    let mut session = model.session();
    let device = crate::model::ModelError::from;
    if !values.is_empty() {
        session.write_at(lesson.values, lesson.instance, 0, values).map_err(device)?;
    }
    if let (Some(buffer), Some(sharpness)) = (lesson.sharpness, sharpness) {
        session.write_at(buffer, lesson.instance, 0, &[sharpness]).map_err(device)?;
    }
    Ok(session.write_at(lesson.weight, lesson.instance, 0, &[weight]).map_err(device)?)
}

/// The largest logits with their tokens, as pairs, the largest first; of equal ones the first
/// token.
fn likeliest(logits: &[f32], top: usize) -> Vec<f32> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let larger = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if top < order.len() {
        order.select_nth_unstable_by(top, larger);
        order.truncate(top);
    }
    order.sort_unstable_by(larger);
    order.into_iter().flat_map(|token| [token as f32, logits[token]]).collect()
}

/// The teacher's probabilities of every token, and the sum of `Σ p ln p` over tokens that have a
/// target, negated.
fn shares<'r>(
    rows: impl Iterator<Item = &'r Vec<f32>>,
    (vocab, kept): (usize, Option<usize>),
    stage: &Stage,
    batch: &Batch,
) -> (Vec<f32>, f64) {
    let mut all = vec![0f32; batch.ids.len() * vocab];
    let (mut entropy, mut token) = (0.0, 0);
    let width = kept.map_or(vocab, |kept| 2 * kept);
    let mut wanted = vec![];
    for logits in rows.flat_map(|row| row.chunks(width)) {
        wanted.clear();
        match (kept, stage.top) {
            (Some(_), _) => wanted.extend(logits.chunks(2).map(|pair| (pair[0] as usize, pair[1]))),
            (None, Some(top)) if (top as usize) < vocab => {
                let pairs = likeliest(logits, top as usize);
                wanted.extend(pairs.chunks(2).map(|pair| (pair[0] as usize, pair[1])));
            }
            (None, _) => wanted.extend(logits.iter().copied().enumerate()),
        }
        if let Some(top) = stage.top {
            wanted.truncate(top as usize);
        }
        let sharp = |z: f32| f64::from(z) / stage.temperature;
        let largest = wanted.iter().map(|(_, z)| sharp(*z)).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = wanted.iter().map(|(_, z)| (sharp(*z) - largest).exp()).sum();
        let out = &mut all[token * vocab..(token + 1) * vocab];
        let learned = batch.targets.get(token).is_some_and(|target| *target >= 0);
        for (id, z) in &wanted {
            let log = sharp(*z) - largest - sum.ln();
            out[*id] = log.exp() as f32;
            entropy -= if learned { log.exp() * log } else { 0.0 };
        }
        token += 1;
    }
    (all, entropy)
}

/// Weights of the losses of a step: of the data's own, where there is a stage.
pub fn own_loss(spec: &Spec, step: u64) -> f32 {
    let stage = spec.heal.as_ref().and_then(|heal| heal.stage(step));
    stage.map_or(1.0, |stage| stage.loss as f32)
}

/// The words of a lesson, for the header of a run.
pub fn words(stage: &Stage) -> String {
    let one = |lesson: &Lesson| match lesson.weight == 1.0 {
        true => lesson.to.clone(),
        false => format!("{} × {}", lesson.weight, lesson.to),
    };
    let mut words = vec![stage.matches.iter().map(one).collect::<Vec<_>>().join(" + ")];
    if stage.temperature != 1.0 {
        words.push(format!("temperature {}", stage.temperature));
    }
    words.extend(stage.top.map(|top| format!("of the {top} likeliest tokens")));
    if stage.loss > 0.0 {
        words.push(format!("{} × the data's loss", stage.loss));
    }
    words.push(stage.steps.map_or("to the end".into(), |steps| format!("{steps} steps")));
    words.join(", ")
}
