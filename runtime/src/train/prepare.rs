//! Preparation before the first step: programs and memory.

use super::error::TrainError;
use crate::generate::Writing;
use crate::model::{Memory, parameters};
use crate::train::{health, sample, teacher};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::count::{self, Counts, count};
use dreamc_compiler::format::Formats;
use dreamc_compiler::matching::TOKENS;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{
    CompileError, Compiled, Options, compile, compile_together, compile_within, looks_ahead,
};
use dreamc_device::{Device, Group};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Shard, Source};

/// Logits kept at once by the model that scores answers.
const MOST_LOGITS: u64 = 64 << 20;

/// Rows scored at once, where memory allows.
const MOST_ROWS: u64 = 32;

/// A specification compiled for training.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Steps and evaluation.
    pub compiled: Compiled,
    /// Another use of its weights with logits, for exact match on tasks. Absent where there are no
    /// tasks, or where even one row of logits would take more memory than it is worth.
    pub scorer: Option<Compiled>,
    /// Another use of its weights with caches, for samples. Absent where it cannot be sampled from.
    pub writer: Option<Compiled>,
    /// Another use of its weights that is observed, for the health of its routers. Absent where it
    /// has none.
    pub observer: Option<Compiled>,
    /// The teacher. Absent where the specification has none.
    pub teacher: Option<teacher::Plan>,
    /// Tensors that steps store in bf16.
    pub narrow: Narrow,
    /// Ranks that share the micro-batches of a step.
    pub ranks: u64,
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Tokens of a row.
    pub sequence: u64,
    /// Which rewriting rules all of them were compiled with.
    pub rewriting: Rewriting,
    /// Counts of the specification; its means of generation are over [`TOKENS`] or the context.
    pub declared: Option<Counts>,
    /// Rewriting rules that were used, with how often.
    pub rewritten: Vec<(String, usize)>,
    /// Seconds it took to compile.
    pub seconds: f64,
}

impl Prepared {
    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        parameters(&self.compiled)
    }

    /// Number of parameters that steps move.
    pub fn trained(&self) -> u64 {
        let moved = self.compiled.tensors.iter().filter(|t| t.gradient.is_some());
        moved.map(|t| t.shape.iter().product::<u64>()).sum()
    }

    /// Memory of the teacher on a device, not counting the model's.
    pub fn teacher_memory(&self, device: &dyn Device) -> Result<Memory, TrainError> {
        self.teacher.as_ref().map_or(Ok(Memory::default()), |teacher| teacher.memory(device))
    }

    /// Memory on a device, and how much of it scoring and sampling take in addition to training.
    pub fn memory(&self, device: &dyn Device) -> Result<(Memory, u64), TrainError> {
        let plan = &self.compiled.plan;
        let scratch = device.scratch_bytes(plan).map_err(crate::model::ModelError::from)?;
        let beside = [&self.scorer, &self.writer, &self.observer].into_iter().flatten().map(|c| c.own).sum();
        Ok((Memory::of(plan, scratch, device.copies()), beside))
    }
}

/// Tokens of a row: the recipe's, else the model's context.
pub fn sequence(spec: &Spec) -> u64 {
    spec.train.sequence.unwrap_or(spec.model.context)
}

/// Compiles the forward alone; a place to begin from with `..`.
pub fn forward(batch: u64, sequence: u64) -> Options {
    Options { batch, sequence, ..Options::default() }
}

/// Whether attention stops at document boundaries.
pub fn masked(spec: &Spec) -> bool {
    spec.data.as_ref().is_some_and(|d| d.document_mask)
}

/// Storage of the numbers of a model that is measured: those it computes, and weights in a file.
#[derive(Clone, Debug, Default)]
pub struct Storing {
    /// Values in bf16.
    pub narrow: Narrow,
    /// Weights that stay in their file.
    pub formats: Formats,
}

impl From<Narrow> for Storing {
    fn from(narrow: Narrow) -> Self {
        Storing { narrow, formats: Formats::default() }
    }
}

/// How a specification is compiled for scoring whole rows: forward alone, logits kept; `most` rows
/// at once. None where even one row of logits would take more memory than it is worth.
fn scoring(
    spec: &Spec,
    (depth, exit): (Option<u64>, Option<f64>),
    most: Option<u64>,
    rewrite: &Rewriting,
    narrow: Narrow,
) -> Option<Options> {
    let sequence = asked(spec);
    let row = sequence.saturating_mul(spec.model.vocab).saturating_mul(4);
    let rows = (MOST_LOGITS / row.max(1)).clamp(1, most.unwrap_or(MOST_ROWS));
    if row.saturating_mul(rows) > 16 * MOST_LOGITS {
        return None;
    }
    let (segments, rewrite) = (masked(spec), rewrite.clone());
    Some(Options { logits: true, segments, depth, exit, rewrite, narrow, ..forward(rows, sequence) })
}

/// Tokens of a row of problems that are asked: those of training, or the context where some are
/// longer than what is trained on.
fn asked(spec: &Spec) -> u64 {
    let sources = spec.data.iter().flat_map(|d| &d.sources);
    let longer =
        |(source, _): &(Source, f64)| matches!(source, Source::Task(task) if !task.longer.is_empty());
    if sources.into_iter().any(longer) { spec.model.context } else { sequence(spec) }
}

/// Compiles a specification for scoring whole rows: forward alone, logits kept; `most` rows at
/// once. Losses are [`measurer`]'s. `passes` are [`Options::depth`] and [`Options::exit`].
pub fn scorer(
    spec: &Spec,
    passes: (Option<u64>, Option<f64>),
    most: Option<u64>,
    rewrite: &Rewriting,
    storing: impl Into<Storing>,
) -> Result<Option<Compiled>, TrainError> {
    let Storing { narrow, formats } = storing.into();
    let options = scoring(spec, passes, most, rewrite, narrow);
    Ok(options.map(|options| compile(spec, &Options { formats, ..options })).transpose()?)
}

/// Compiles a specification for the losses of whole rows, as the evaluations of its run measure
/// them: forward alone, a micro-batch of the recipe at once. The compiler chooses by the size of a
/// batch whether logits are stored, and in bf16 those that are stored are rounded before the loss
/// is taken: another size would be another loss.
pub fn measurer(
    spec: &Spec,
    depth: Option<u64>,
    rewrite: &Rewriting,
    storing: impl Into<Storing>,
) -> Result<Compiled, TrainError> {
    let Storing { narrow, formats } = storing.into();
    let rows = (spec.train.batch / spec.train.accumulate.max(1)).max(1);
    let (segments, rewrite) = (masked(spec), rewrite.clone());
    let with = forward(rows, sequence(spec));
    Ok(compile(spec, &Options { segments, depth, rewrite, narrow, formats, ..with })?)
}

/// Compiles a specification for the losses and the logits of whole rows, as many at once as
/// [`MOST_LOGITS`] allows.
pub fn comparer(
    spec: &Spec,
    depth: Option<u64>,
    rewrite: &Rewriting,
    storing: impl Into<Storing>,
) -> Result<Compiled, TrainError> {
    let Storing { narrow, formats } = storing.into();
    let row = sequence(spec).saturating_mul(spec.model.vocab).max(1);
    let rows = (MOST_LOGITS / row).clamp(1, MOST_ROWS);
    let (segments, rewrite) = (masked(spec), rewrite.clone());
    let with = forward(rows, sequence(spec));
    Ok(compile(spec, &Options { logits: true, segments, depth, rewrite, narrow, formats, ..with })?)
}

/// Tokens observed at once.
const OBSERVED_TOKENS: u64 = 1 << 15;

/// Compiles a specification for [`crate::analysis::observe`].
pub fn observer(
    spec: &Spec,
    rewriting: &Rewriting,
    storing: impl Into<Storing>,
) -> Result<Compiled, TrainError> {
    Ok(compile(spec, &observing(spec, rewriting, storing.into(), OBSERVED_TOKENS))?)
}

/// Compiles a model, at another depth where one is given, for
/// [`Health::look`](crate::train::health::Health::look); none where it has no routers and no loop
/// with an exit.
pub fn health_observer(
    spec: &Spec,
    depth: Option<u64>,
    rewriting: &Rewriting,
    storing: impl Into<Storing>,
) -> Result<Option<Compiled>, TrainError> {
    if !looked_at(spec) {
        return Ok(None);
    }
    let options = observing(spec, rewriting, storing.into(), health::AT_ONCE);
    Ok(Some(compile(spec, &Options { depth, ..options })?))
}

/// Options of an observation of `tokens` tokens at once.
fn observing(spec: &Spec, rewriting: &Rewriting, storing: Storing, tokens: u64) -> Options {
    let Storing { narrow, formats } = storing;
    let sequence = sequence(spec);
    let rows = (tokens / sequence.max(1)).clamp(1, MOST_ROWS);
    let (segments, rewrite) = (masked(spec), rewriting.clone());
    Options { observe: true, segments, rewrite, narrow, formats, ..forward(rows, sequence) }
}

/// Whether a model has routers (of experts, of projections, of tokens that skip), or a loop whose
/// loss sees every pass.
fn looked_at(spec: &Spec) -> bool {
    Architecture::new(&spec.model, None).is_ok_and(|a| a.routes() || a.skips() || a.exit.is_some())
}

/// Compiles a specification for training on a device, in the recipe's precision where the device
/// has it, by this rank of a group.
///
/// Weights that it does not move stay in their file, in these `formats`.
///
/// Ranks share the micro-batches of a step, so the model that a specification trains does not
/// depend on their number: losses of routers are means over a micro-batch.
pub fn prepare(
    spec: &Spec,
    device: &dyn Device,
    rewriting: &Rewriting,
    group: &Group,
    formats: &Formats,
) -> Result<Prepared, TrainError> {
    let ranks = group.size();
    let begun = std::time::Instant::now();
    let train = &spec.train;
    let refuse = |what: String| Err(TrainError::Recipe(what));
    if train.accumulate == 0 || !train.batch.is_multiple_of(train.accumulate) {
        return refuse(format!(
            "train.batch {} is not a multiple of accumulate {}",
            train.batch, train.accumulate
        ));
    }
    if let Some(data) = train.parallel.data.filter(|&data| data != ranks) {
        return refuse(format!(
            "train.parallel.data is {data}, and there are {ranks} ranks: start as many, or leave `data` out for any number"
        ));
    }
    if !train.accumulate.is_multiple_of(ranks) {
        let fits = |n: &u64| n.is_multiple_of(ranks) && train.batch.is_multiple_of(*n);
        let advice = match (train.accumulate..=train.batch).find(fits) {
            Some(n) => format!("set train.accumulate={n}"),
            None => format!("train.batch {} has no such parts", train.batch),
        };
        return refuse(format!(
            "{ranks} ranks share the micro-batches of a step equally, and train.accumulate is {}: {advice}",
            train.accumulate
        ));
    }
    let experts = if ranks > 1 { train.parallel.experts } else { 1 };
    if !ranks.is_multiple_of(experts.max(1)) {
        return refuse(format!(
            "train.parallel.experts is {experts}, and {ranks} ranks are no multiple of it: start {}, or set it to a number that divides {ranks}",
            experts * ranks.div_ceil(experts)
        ));
    }
    let depths = super::schedule::possible_depths(spec);
    let (rows, sequence) = (train.batch / train.accumulate, sequence(spec));
    if sequence > spec.model.context {
        return refuse(format!(
            "train.sequence {sequence} exceeds the model's context {}",
            spec.model.context
        ));
    }
    let segments = masked(spec);
    let narrow = device.narrow(train.precision);
    let rewrite = rewriting.clone();
    let storing = || Storing { narrow, formats: formats.clone() };
    let shard = if ranks > 1 { train.parallel.shard } else { Shard::None };
    let rank = group.rank();
    let teacher = teacher::Plan::of(spec, rows, device, rewriting)?;
    let taught = teacher.as_ref().map_or(vec![], teacher::Plan::taught);
    let with = Options { ranks, rank, shard, experts, taught, ..forward(rows, sequence) };
    let options =
        Options { train: true, segments, depths, rewrite, narrow, formats: formats.clone(), ..with };
    let tasks = spec.data.iter().flat_map(|d| &d.sources).any(|(s, _)| matches!(s, Source::Task(_)));
    // A model that looks ahead writes nothing, so there is nothing to score by exact match either.
    let ahead = looks_ahead(&spec.model);
    let mut uses = vec![("", options)];
    let scoring = if tasks && !ahead {
        scoring(spec, (None, None), None, rewriting, narrow)
            .map(|o| Options { formats: formats.clone(), ..o })
    } else {
        None
    };
    let scores = scoring.is_some();
    uses.extend(scoring.map(|options| ("score", options)));
    let observing = looked_at(spec).then(|| observing(spec, rewriting, storing(), health::AT_ONCE));
    let observes = observing.is_some();
    uses.extend(observing.map(|options| ("observe", options)));
    let writing = Writing {
        rows: sample::ROWS,
        context: Some(sequence),
        rewrite: rewriting.clone(),
        narrow,
        formats: formats.clone(),
        ..Writing::default()
    };
    let with = [&uses[..], &[("write", writing.options(spec))]].concat();
    // The model may not take the part of a teacher.
    let beside =
        teacher.as_ref().map_or(Ok(0), |teacher| teacher.memory(device).map(|memory| memory.total))?;
    let compiled =
        |uses: &[(&'static str, Options)]| match train.memory.map(|most| most.saturating_sub(beside)) {
            None => compile_together(spec, uses),
            // A plan that does not load has no scratch, and says so later.
            Some(most) => compile_within(spec, uses, most, |plan| device.scratch_bytes(plan).unwrap_or(0)),
        };
    // Some models can be trained and not sampled from.
    let mut list = with;
    let mut made = compiled(&list);
    let writes = !matches!(made, Err(CompileError::Unsupported(_) | CompileError::LooksAhead));
    if !writes {
        list = uses;
        made = compiled(&list);
    }
    let (all, report) = match made {
        Err(CompileError::Memory { most, least }) => {
            return Err(TrainError::Memory(too_large(spec, device, (most, least, beside), &list, ranks)));
        }
        made => made?,
    };
    let mut all = all.into_iter();
    let Some(compiled) = all.next() else { return refuse("nothing was compiled".into()) };
    let scorer = if scores { all.next() } else { None };
    let observer = if observes { all.next() } else { None };
    let writer = if writes { all.next() } else { None };
    let seconds = begun.elapsed().as_secs_f64();
    let tokens = TOKENS.min(spec.model.context);
    let declared = count(spec, &count::Options { tokens, ..count::Options::default() }).ok();
    let rewriting = rewriting.clone();
    Ok(Prepared {
        compiled,
        teacher,
        narrow,
        scorer,
        writer,
        observer,
        ranks,
        rows,
        sequence,
        rewriting,
        declared,
        rewritten: report.used(),
        seconds,
    })
}

/// Why training does not fit, and the smallest number of parts of a step with which it does.
fn too_large(
    spec: &Spec,
    device: &dyn Device,
    (most, least, beside): (u64, u64, u64),
    uses: &[(&'static str, Options)],
    ranks: u64,
) -> String {
    let train = &spec.train;
    let parts = (train.accumulate + 1..=train.batch)
        .filter(|n| train.batch.is_multiple_of(*n) && n.is_multiple_of(ranks));
    let fits = |n: &u64| {
        let mut uses = uses.to_vec();
        uses[0].1.batch = train.batch / n;
        compile_within(spec, &uses, most, |plan| device.scratch_bytes(plan).unwrap_or(0)).is_ok()
    };
    let advice = match parts.into_iter().find(fits) {
        Some(n) => format!("set train.accumulate={n}"),
        None if most == 0 => "the teacher alone is larger: take a smaller one, or more memory".into(),
        None => "even single sequences are too large: shorten train.sequence, take a smaller model, or set \
             train.moments=bf16 and train.betas=[0.9, 0.95]"
            .into(),
    };
    let short = |bytes: u64| match bytes {
        1_000_000_000.. => format!("{:.2} GB", bytes as f64 / 1e9),
        _ => format!("{:.2} MB", bytes as f64 / 1e6),
    };
    let taken = match beside {
        0 => String::new(),
        _ => format!(", of which the teacher takes {},", short(beside)),
    };
    format!(
        "train.memory is {}{taken} and training takes {} with every layer computed once more that can be: {advice}",
        short(most + beside),
        short(least)
    )
}
