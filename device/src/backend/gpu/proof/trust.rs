//! Trust in kernels: proved where a device, its driver, NVRTC and a kernel meet for the first time,
//! and kept.
//!
//! *In*: a plan that is about to be loaded. *Out*: [`Trust`]: launches whose best text is not to
//! run, and the rung that stands in. *Promise*: an outcome is kept in the cache of kernels under
//! all four identities and asked for once; whatever goes wrong with a proof costs that rung or that
//! proof, never the run; each rung that is left is said in one line, with a file for a report.

use super::{Prover, Rung, Trial, Verdict, watch};
use crate::backend::gpu::{Compiler, headers};
use crate::notice::notice;
use dreamc_compiler::codegen::Source;
use dreamc_compiler::program::{Plan, ProgramKey};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Instant;

/// Launches that another rung stands in for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trust {
    lowered: HashMap<Source, Rung>,
}

static PROVER: OnceLock<Prover> = OnceLock::new();

/// Multiply-adds of a naive kernel that a run waits for: less than a second of a large GPU.
const MOST: f64 = 1e11;

/// Seconds of a proof from which on a person reads how long it took.
const LONG: u64 = 3;

/// From now on plans that are loaded on GPUs are proved first, by processes of this prover's.
pub fn prove_by(prover: Prover) {
    let _ = PROVER.set(prover);
}

/// The device on which trust is earned.
pub(crate) struct Meeting<'a> {
    /// Its name and number.
    pub(crate) name: &'a str,
    pub(crate) number: usize,
    /// The GPU and its driver.
    pub(crate) identity: &'a str,
    /// NVRTC, which knows the kernels.
    pub(crate) compiler: &'a Compiler,
}

/// An outcome that is kept.
enum Kept {
    Right,
    Wrong,
    /// There was nothing to hold it against.
    Open,
}

impl Trust {
    /// The rung that stands in for a text.
    pub(crate) fn lowered(&self, source: &Source) -> Option<Rung> {
        self.lowered.get(source).copied()
    }

    /// The trust that a plan has earned; proves what nobody has proved.
    pub(crate) fn earn(meeting: &Meeting, plan: &Plan) -> Trust {
        let wanted = std::env::var_os("DREAMC_PROVE").is_none_or(|v| v != "0");
        let (Some(prover), true) = (PROVER.get(), wanted && meeting.compiler.keeps()) else {
            return Trust::default();
        };
        let programs: Vec<ProgramKey> = plan.programs.keys().copied().collect();
        // A plan that has no texts is refused when it is loaded.
        let Ok(mut trial) = Trial::of(plan, &programs, meeting.compiler, (None, MOST)) else {
            return Trust::default();
        };
        if meeting.open(&mut trial) > 0 {
            meeting.prove(prover, &trial);
        }
        let mut lowered = HashMap::new();
        for distinct in &trial.distinct {
            let right = |&&(rung, source): &&(Rung, usize)| {
                rung == Rung::Naive || !matches!(meeting.kept(&trial.sources[source]), Some(Kept::Wrong))
            };
            if let (Some(&(best, source)), Some(&(rung, _))) =
                (distinct.rungs.first(), distinct.rungs.iter().find(right))
                && rung != best
            {
                lowered.insert(trial.sources[source].clone(), rung);
            }
        }
        Trust { lowered }
    }
}

impl Meeting<'_> {
    fn place(&self, source: &Source) -> Option<PathBuf> {
        self.compiler.proof(self.identity, source)
    }

    fn kept(&self, source: &Source) -> Option<Kept> {
        let text = self.compiler.kept(&self.place(source)?)?;
        match text.split('\n').next()? {
            "right" => Some(Kept::Right),
            "wrong" => Some(Kept::Wrong),
            "open" => Some(Kept::Open),
            _ => None,
        }
    }

    /// Leaves the launches of a trial that are not known, and says how many these are.
    fn open(&self, trial: &mut Trial) -> usize {
        let (mut known, mut without) = (vec![], vec![]);
        for (number, distinct) in trial.distinct.iter().enumerate() {
            let fast = distinct.rungs.iter().filter(|(rung, _)| *rung != Rung::Naive);
            let mut all = true;
            for &(rung, source) in fast {
                match self.kept(&trial.sources[source]) {
                    Some(Kept::Wrong) => without.push((number, rung)),
                    Some(Kept::Right | Kept::Open) => {}
                    None => all = false,
                }
            }
            if all {
                known.push(number);
            }
        }
        let open = trial.distinct.len() - known.len();
        (trial.known, trial.without) = (known, without);
        open
    }

    fn prove(&self, prover: &Prover, trial: &Trial) {
        let open = trial.distinct.len() - trial.known.len();
        let kernels = if open == 1 { "kernel" } else { "kernels" };
        notice(&format!("{}: proving {open} {kernels}, once for this GPU, driver and NVRTC", self.name));
        let begun = Instant::now();
        self.compiler.compile_each(&trial.texts());
        let verdicts = match watch(prover, self.number, trial, &mut |_| {}) {
            Ok(verdicts) => verdicts,
            Err(error) => return notice(&format!("{}: kernels run unproved: {error}", self.name)),
        };
        let seconds = begun.elapsed().as_secs();
        if seconds >= LONG {
            notice(&format!("{}: proved in {seconds} s", self.name));
        }
        for (number, distinct) in trial.distinct.iter().enumerate().filter(|(i, _)| !trial.known.contains(i))
        {
            let ran = |(rung, _): &&(Rung, usize)| {
                *rung != Rung::Naive && !trial.without.contains(&(number, *rung))
            };
            for &(rung, source) in distinct.rungs.iter().filter(ran) {
                let verdict = verdicts.iter().find(|v| (v.launch, v.rung) == (number, rung));
                let text = match verdict {
                    Some(verdict) if verdict.outcome.right() => "right\n".into(),
                    Some(verdict) => {
                        self.report(trial, verdict, &trial.sources[source]);
                        format!("wrong\n{}", verdict.outcome)
                    }
                    None => "open\n".into(),
                };
                if let Some(place) = self.place(&trial.sources[source]) {
                    self.compiler.keep(&place, &text);
                }
            }
        }
    }

    /// One line, and a file for a report.
    fn report(&self, trial: &Trial, verdict: &Verdict, source: &Source) {
        let kernel = trial.kernel(verdict.launch);
        let (major, minor) = self.compiler.version();
        let mut text = format!(
            "{}\nNVRTC {major}.{minor}\n{kernel}, {} ({})\n{}\n{:?}\n\n{}\n",
            self.identity,
            verdict.rung,
            trial.origin(verdict.launch),
            verdict.outcome,
            source.passes,
            source.text
        );
        for (name, header) in headers().iter().filter(|(name, _)| source.text.contains(name)) {
            text += &format!("\n// {name}\n{header}\n");
        }
        let place = self.compiler.report(source, &text);
        let place = place.map_or(String::new(), |path| format!("; for a report: {}", path.display()));
        notice(&format!(
            "{}: {kernel} ({}) is left for a slower kernel: {}{place}",
            self.name, verdict.rung, verdict.outcome
        ));
    }
}
