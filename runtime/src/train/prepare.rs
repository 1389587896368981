//! What is known before the first step: programs and memory.

use super::error::TrainError;
use crate::device::Device;
use crate::generate::{Writing, compile_cached};
use crate::model::{Memory, parameters};
use crate::train::sample;
use dreamc_compiler::count::{self, Counts, count};
use dreamc_compiler::matching::TOKENS;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Compiled, Options, compile, compile_with_report, looks_ahead};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Source;

/// Logits kept at once by the model that scores answers.
const MOST_LOGITS: u64 = 64 << 20;

/// Rows scored at once, where memory allows.
const MOST_ROWS: u64 = 32;

/// A specification compiled for training.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Steps and evaluation.
    pub compiled: Compiled,
    /// The same model with logits, for exact match on tasks; it has weights of its own. Absent where there are no tasks, or where
    /// even one row of logits would take more memory than it is worth.
    pub scorer: Option<Compiled>,
    /// The same model with caches, for samples; it has weights of its own. Absent where it cannot be sampled from.
    pub writer: Option<Compiled>,
    /// What steps store in bf16.
    pub narrow: Narrow,
    /// Rows of a micro-batch.
    pub rows: u64,
    /// Tokens of a row.
    pub sequence: u64,
    /// Which rewriting rules all of them were compiled with.
    pub rewriting: Rewriting,
    /// What the specification counts; its means of generation are over [`TOKENS`] or the context.
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

    /// Memory on a device: of training, and of scoring and sampling beside it.
    pub fn memory(&self, device: &dyn Device) -> Result<(Memory, Memory), TrainError> {
        let of = |compiled: &Compiled| -> Result<Memory, TrainError> {
            let scratch = device.scratch_bytes(&compiled.plan).map_err(crate::model::ModelError::from)?;
            Ok(Memory::of(&compiled.plan, scratch))
        };
        let mut beside = Memory::default();
        for compiled in [&self.scorer, &self.writer].into_iter().flatten() {
            beside.add(of(compiled)?);
        }
        Ok((of(&self.compiled)?, beside))
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

/// Compiles a specification for scoring whole rows: forward alone, logits kept; `most` rows at once.
pub fn scorer(
    spec: &Spec,
    depth: Option<u64>,
    most: Option<u64>,
    rewrite: &Rewriting,
) -> Result<Option<Compiled>, TrainError> {
    let sequence = sequence(spec);
    let row = sequence.saturating_mul(spec.model.vocab).saturating_mul(4);
    let rows = (MOST_LOGITS / row.max(1)).clamp(1, most.unwrap_or(MOST_ROWS));
    if row.saturating_mul(rows) > 16 * MOST_LOGITS {
        return Ok(None);
    }
    let segments = masked(spec);
    let options =
        Options { logits: true, segments, depth, rewrite: rewrite.clone(), ..forward(rows, sequence) };
    Ok(Some(compile(spec, &options)?))
}

/// Tokens observed at once.
const OBSERVED_TOKENS: u64 = 1 << 15;

/// Compiles a specification for [`crate::analysis::observe`].
pub fn observer(spec: &Spec, rewriting: &Rewriting) -> Result<Compiled, TrainError> {
    let sequence = sequence(spec);
    let rows = (OBSERVED_TOKENS / sequence.max(1)).clamp(1, MOST_ROWS);
    let rewrite = rewriting.clone();
    let options = Options { observe: true, segments: masked(spec), rewrite, ..forward(rows, sequence) };
    Ok(compile(spec, &options)?)
}

/// Compiles a specification for training on a device, in the recipe's precision where the device has it. Scoring is f32.
pub fn prepare(spec: &Spec, device: &dyn Device, rewriting: &Rewriting) -> Result<Prepared, TrainError> {
    let begun = std::time::Instant::now();
    let train = &spec.train;
    let refuse = |what: String| Err(TrainError::Recipe(what));
    if train.accumulate == 0 || !train.batch.is_multiple_of(train.accumulate) {
        return refuse(format!(
            "train.batch {} is not a multiple of accumulate {}",
            train.batch, train.accumulate
        ));
    }
    let depths = train.random_depth.map_or(vec![], |(low, high)| (low..=high).collect());
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
    let options = Options { train: true, segments, depths, rewrite, narrow, ..forward(rows, sequence) };
    let (compiled, report) = compile_with_report(spec, &options)?;
    let tasks = spec.data.iter().flat_map(|d| &d.sources).any(|(s, _)| matches!(s, Source::Task(_)));
    // A model that looks ahead writes nothing, so there is nothing to score by exact match either.
    let ahead = looks_ahead(&spec.model);
    let scorer = if tasks && !ahead { scorer(spec, None, None, rewriting)? } else { None };
    let writing = Writing {
        rows: sample::ROWS,
        context: Some(sequence),
        rewrite: rewriting.clone(),
        narrow: device.narrow(train.precision),
        ..Writing::default()
    };
    let writer = match compile_cached(spec, &writing) {
        Ok(compiled) => Some(compiled),
        Err(CompileError::Unsupported(_) | CompileError::LooksAhead) => None,
        Err(error) => return Err(error.into()),
    };
    let seconds = begun.elapsed().as_secs_f64();
    let tokens = TOKENS.min(spec.model.context);
    let declared = count(spec, &count::Options { tokens, ..count::Options::default() }).ok();
    let rewriting = rewriting.clone();
    Ok(Prepared {
        compiled,
        narrow,
        scorer,
        writer,
        rows,
        sequence,
        rewriting,
        declared,
        rewritten: report.used(),
        seconds,
    })
}
