//! Proofs about a specification, on a model small enough to be looked at in every way.
//!
//! *In*: a specification, or one with its weights; a seed; devices to compare. *Out*: a [`Report`]:
//! for each [`Proof`] whether it holds, by how much, and where it does not. *Promise*: which
//! components there are and how they are put together is never changed ([`shrink`] says what is); a
//! proof that finds nothing to prove says so; a failing one names the layer and the component where
//! it can.
//!
//! Everything is compared with something that was made in another way: programs with the f64
//! interpreter, its derivatives with differences, caches with none, rewritten functions with those
//! that were not. [`Pipeline`] is what the proofs get programs from; tests put faults in there.
//!
//! Look next at [`Subject`] (what every proof is about), [`PROOFS`], [`blame`] (how a failure gets
//! its place).

pub mod blame;
pub mod coordinates;
mod counts;
mod decoding;
mod devices;
mod equal;
mod formulas;
mod fp8;
mod gradients;
mod memory;
mod names;
mod ranks;
mod report;
mod resume;
pub mod shrink;
mod steps;
mod subject;
mod transfer;
mod trial;

pub use report::{Proved, Report, Verdict};
pub use shrink::{Shrunk, shrink};
pub use subject::{Compiler, Pipeline, Subject};

use dreamc_compiler::CompileError;
use dreamc_compiler::count::CountError;
use dreamc_compiler::oracle::OracleError;
use dreamc_data::DataError;
use dreamc_device::{Device, DeviceError};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Precision;
use dreamc_runtime::model::ModelError;
use dreamc_runtime::train::TrainError;
use indexmap::IndexMap;
use serde::Serialize;
use std::time::Instant;
use thiserror::Error;

/// Why a proof could not be tried.
#[derive(Debug, Error)]
pub enum VerifyError {
    /// The model does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A program fails.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A value inside the model.
    #[error(transparent)]
    Probe(#[from] dreamc_runtime::analysis::probe::ProbeError),
    /// The interpreter refuses.
    #[error(transparent)]
    Oracle(#[from] OracleError),
    /// It cannot be counted.
    #[error(transparent)]
    Count(#[from] CountError),
    /// Training fails.
    #[error(transparent)]
    Train(Box<TrainError>),
    /// The data of the trial run.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The folder of the trial run.
    #[error("the folder of the trial run: {0}")]
    Io(#[from] std::io::Error),
    /// Rounding moves results more than the tolerance, for all weights that were drawn.
    #[error("none of {draws} draws of weights and tokens is well conditioned: {why}")]
    IllConditioned {
        /// How many there were.
        draws: u64,
        /// The movement at the best draw.
        why: String,
    },
    /// No such proof.
    #[error("there is no proof `{name}`; there are {known}")]
    NoProof {
        /// The name asked for.
        name: String,
        /// All names.
        known: String,
    },
}

impl From<TrainError> for VerifyError {
    fn from(error: TrainError) -> Self {
        VerifyError::Train(Box::new(error))
    }
}

impl From<DeviceError> for VerifyError {
    fn from(error: DeviceError) -> Self {
        VerifyError::Model(error.into())
    }
}

/// Where something is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The set of weights, as in `layers.{i}`; also `embed` and `head`.
    pub layer: Option<String>,
    /// The component, or `skip.{j}`.
    pub component: Option<String>,
}

impl Place {
    /// The layer and component in the name of a tensor.
    pub fn of_tensor(name: &str) -> Self {
        let Some(rest) = name.strip_prefix("layers.") else {
            let part = name.split('.').next().unwrap_or_default();
            return Place {
                layer: Some(if part == "embed" { "embed" } else { "head" }.into()),
                component: None,
            };
        };
        let mut parts = rest.splitn(4, '.');
        let layer = parts.next().map(|i| format!("layers.{i}"));
        let component = match (parts.next(), parts.next()) {
            (Some("skip"), Some(j)) if j.parse::<u32>().is_ok() => Some(format!("skip.{j}")),
            (Some("residual_norm"), Some("weight")) | (None, _) => None,
            (Some(c), _) => Some(c.to_string()),
        };
        Place { layer, component }
    }
}

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The quantity compared.
    pub what: String,
    /// The difference.
    pub error: f64,
    /// The largest error that holds.
    pub tolerance: f64,
    /// Where it is.
    #[serde(flatten)]
    pub place: Place,
}

/// Comparisons of a proof.
#[derive(Clone, Debug, Default)]
pub struct Checks {
    /// How many comparisons there were.
    pub count: u64,
    /// The one closest to its tolerance.
    pub worst: Option<Check>,
    /// Those beyond, in the order they were made.
    pub failed: Vec<Check>,
}

impl Checks {
    /// Enters a comparison; says whether it holds.
    pub fn check(&mut self, what: impl Into<String>, error: f64, tolerance: f64, place: Place) -> bool {
        self.count += 1;
        let error = if error.is_nan() { f64::INFINITY } else { error };
        let share = |c: &Check| if c.error == 0.0 { 0.0 } else { c.error / c.tolerance };
        let check = Check { what: what.into(), error, tolerance, place };
        let good = error <= tolerance;
        if self.worst.as_ref().is_none_or(|w| share(&check) > share(w)) {
            self.worst = Some(check.clone());
        }
        if !good {
            self.failed.push(check);
        }
        good
    }
}

/// Something that holds of every specification.
pub trait Proof: Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// The statement it proves.
    fn claim(&self) -> &'static str;
    /// How.
    fn how(&self) -> &'static str;
    /// Tries it. A text says why there is nothing to prove.
    fn prove(&self, subject: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError>;
}

/// All proofs, in the order in which they are tried.
pub const PROOFS: [&dyn Proof; 16] = [
    &devices::Devices,
    &gradients::Gradients,
    &formulas::Meaning,
    &counts::Counts,
    &names::Names,
    &coordinates::Coordinates,
    &equal::Rewritten,
    &equal::Plain,
    &decoding::Cached,
    &decoding::Batches,
    &decoding::Causal,
    &devices::Threads,
    &resume::Resume,
    &memory::Memory,
    &fp8::Fp8,
    &ranks::Ranks,
];

/// Specification and selection of the proofs.
pub struct Task<'a> {
    /// The specification, as it is.
    pub spec: &'a Spec,
    /// Its weights, by tensor name; used where the model is small enough to be taken as it is.
    pub weights: Option<&'a IndexMap<String, Vec<f32>>>,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Names of the proofs to try; none for all.
    pub only: &'a [String],
    /// Devices to compare with the CPU, with what to call them.
    pub devices: &'a [(String, &'a dyn Device)],
    /// Where programs come from.
    pub pipeline: &'a dyn Pipeline,
    /// Ranks to compare with one, where more than one are asked for.
    pub ranks: u64,
}

/// Tries the proofs one by one, telling `progress` of each that is begun.
pub fn verify(task: &Task, progress: &mut dyn FnMut(&'static str)) -> Result<Report, VerifyError> {
    let begun = Instant::now();
    for name in task.only {
        if !PROOFS.iter().any(|p| p.name() == name) {
            let known = PROOFS.iter().map(|p| p.name()).collect::<Vec<_>>().join(", ");
            return Err(VerifyError::NoProof { name: name.clone(), known });
        }
    }
    let shrunk = shrink(task.spec, task.weights.is_some());
    let given = task.weights.filter(|_| shrunk.whole);
    let mut subject = Subject::new(shrunk.spec.clone(), task.seed, given, task.devices, task.pipeline)?;
    subject.ranks = task.ranks;
    let mut proofs = vec![];
    for proof in PROOFS {
        let named = task.only.iter().any(|n| n == proof.name());
        let asked = match proof.name() {
            ranks::NAME => task.ranks >= 2,
            fp8::NAME => task.spec.train.precision == Precision::Fp8,
            _ => true,
        };
        if !named && (!task.only.is_empty() || !asked) {
            continue;
        }
        progress(proof.name());
        let begun = Instant::now();
        let mut checks = Checks::default();
        let result = proof.prove(&subject, &mut checks);
        let verdict = match result {
            Err(error @ VerifyError::IllConditioned { .. }) if checks.failed.is_empty() => {
                Verdict::Unproved { why: error.to_string() }
            }
            Err(ref error) if !matches!(error, VerifyError::IllConditioned { .. }) => {
                Verdict::Failed { why: error.to_string(), place: blame::of_error(proof, &subject, error) }
            }
            _ if !checks.failed.is_empty() => {
                let place = blame::place(proof, &subject, &checks);
                let first = &checks.failed[0];
                Verdict::Failed {
                    why: format!(
                        "{} differs by {:.1e}, more than {:.0e}",
                        first.what, first.error, first.tolerance
                    ),
                    place,
                }
            }
            Ok(Some(why)) if checks.count == 0 => Verdict::Nothing { why },
            _ => Verdict::Proved,
        };
        proofs.push(Proved {
            proof: proof.name(),
            claim: proof.claim(),
            how: proof.how(),
            verdict,
            checks: checks.count,
            worst: checks.worst,
            failed: checks.failed,
            seconds: begun.elapsed().as_secs_f64(),
        });
    }
    Ok(Report {
        model: task.spec.model.name.clone(),
        shrunk: shrunk.changes,
        depth: subject.depth(),
        parameters: subject.parameters(),
        weights: if given.is_some() { "its own" } else { "random" },
        seed: task.seed,
        devices: task.devices.iter().map(|(name, _)| name.clone()).collect(),
        proofs,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Largest difference, relative to the largest expected value.
pub fn error(found: &[f64], expected: &[f64]) -> f64 {
    difference(found, expected) / largest(expected)
}

/// Largest difference.
pub fn difference(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    apart.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
}

/// The largest magnitude, and never 0.
pub fn largest(x: &[f64]) -> f64 {
    x.iter().fold(1e-30, |m, x| m.max(x.abs()))
}

/// Length of the difference, relative to the length of the expected vector.
pub fn distance(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let e =
        length(found.iter().zip(expected).map(|(a, b)| a - b)) / length(expected.iter().copied()).max(1e-30);
    if e.is_nan() { f64::INFINITY } else { e }
}

/// Length of a vector.
pub fn length(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// As f64.
pub fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}
