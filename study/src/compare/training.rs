//! Trains every arm of a suite with every seed.
//!
//! *Promise*: a run that came to its end is left as it is, one that was stopped goes on, and
//! neither is ever mixed up with a run of another specification. A run that fails does not keep the
//! others from being trained. Workers share a folder: each trains runs that no other has claimed
//! ([`super::claims`]), until all are at their end.

use super::arms::Arm;
use super::claims::{Answer, Claims, beat};
use super::study::{Manifest, ended, ledger, run_folder, spec_file};
use crate::device::{Kind, Where};
use crate::failure::{Done, Failure};
use crate::model::{beginning, latest, stored};
use crate::output::{Stream, complain};
use crate::progress::Progress;
use crate::rewriting::Choice;
use crate::spec::{open_data, parse, resolved};
use crate::transplant;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::train::folder::{Place, RunFolder};
use dreamc_runtime::train::ledger::Ledger;
use dreamc_runtime::train::{self, Setup, Stop, prepare, signal};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};

/// How to train.
pub struct Plan<'a> {
    /// The folder of the comparison.
    pub folder: &'a Path,
    /// Seeds.
    pub seeds: &'a [u64],
    /// Where.
    pub device: &'a Where,
    /// Which rewriting rules are used; a run that goes on keeps its own.
    pub rewriting: &'a Choice,
    /// How many at once.
    pub jobs: usize,
    /// The devices of those trained at once, where each has its own.
    pub devices: &'a [Kind],
    /// Whether other processes train runs of the same folder.
    pub worker: bool,
    /// Train anew what is there already.
    pub force: bool,
    /// How many runs of the whole comparison come before these, and how many there are.
    pub numbers: (usize, usize),
    /// How long those after them take, in the time of one of these.
    pub later: f64,
    /// The comparison whose runs these branch from, and after which step.
    pub trunk: Option<(&'a Path, u64)>,
}

/// Outcome of the runs.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Trained to the end now.
    pub trained: usize,
    /// At their end before.
    pub skipped: usize,
    /// Names of runs, and why they failed.
    pub failed: Vec<(String, String)>,
    /// The signal that stopped them all.
    pub stopped: Option<&'static str>,
}

impl Found {
    fn fail(&mut self, name: String, failure: &Failure) {
        complain(&format!("{name}  {failure}\n"));
        self.failed.push((name, failure.to_string()));
    }
}

/// Refuses what cannot go on or would overwrite something, before anything is written: a folder
/// that is not a comparison's, a specification that is not the comparison's own, a run of another
/// specification.
pub fn check(arms: &[Arm], plan: &Plan) -> Done {
    let begins =
        |arm: &&Arm| plan.seeds.iter().any(|seed| !run_folder(plan.folder, &arm.name, *seed).exists());
    arms.iter().filter(begins).try_for_each(|arm| transplant::check(&arm.spec))?;
    let Some(manifest) = Manifest::of(plan.folder)? else { return Ok(()) };
    for arm in arms {
        let path = spec_file(plan.folder, &arm.name);
        if path.exists() && !manifest.arms.contains(&arm.name) {
            let what = "is not of this comparison: it is left alone; choose another --out, or another name for the arm";
            return Err(Failure::Usage(format!("{} {what}", path.display())));
        }
        for &seed in plan.seeds {
            let path = run_folder(plan.folder, &arm.name, seed);
            if path.exists() && !manifest.seeds.contains(&seed) && !path.join("run.lock").is_file() {
                let what = "is not a run of this comparison: it is left alone; choose another --out";
                return Err(Failure::Usage(format!("{} {what}", path.display())));
            }
            if !plan.force {
                begun(arm, seed, plan)?;
            }
        }
    }
    Ok(())
}

/// The account of a run: `None` where it has not begun. A run of another specification is
/// refused.
fn begun(arm: &Arm, seed: u64, plan: &Plan) -> Result<Option<Ledger>, Failure> {
    let path = run_folder(plan.folder, &arm.name, seed);
    if plan.force || !path.join("spec.yaml").is_file() {
        return Ok(None);
    }
    let ledger = ledger(&path)?.unwrap_or_default();
    let text = resolved(&seeded(arm, seed));
    let is_of = |text: &str| ledger.spec_hash == blake3::hash(text.as_bytes()).to_hex().as_str();
    // An older dreamc wrote fewer keys: its text says the same where it reads as the same.
    let reads_alike = || {
        let file = path.join("spec.yaml");
        let kept = std::fs::read_to_string(&file).ok().filter(|kept| is_of(kept))?;
        let read = parse(&file.display().to_string(), &kept, &[]).ok()?;
        Some(resolved(&read) == text)
    };
    if !ledger.spec_hash.is_empty() && !is_of(&text) && reads_alike() != Some(true) {
        let what = "was trained from another specification; choose another --out, or train everything anew with --force";
        return Err(Failure::Usage(format!("{} {what}", path.display())));
    }
    Ok(Some(ledger))
}

fn seeded(arm: &Arm, seed: u64) -> Spec {
    let mut spec = arm.spec.clone();
    spec.train.seed = seed;
    spec
}

/// Trains everything that is not trained yet.
pub fn train(arms: &[Arm], plan: &Plan) -> Found {
    // Seed by seed, so that what there is can be compared early.
    let queue: Vec<(&Arm, u64)> =
        plan.seeds.iter().flat_map(|&seed| arms.iter().map(move |a| (a, seed))).collect();
    let (first, all) = plan.numbers;
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Found::default());
    let jobs = plan.jobs.clamp(1, queue.len().max(1));
    thread::scope(|scope| {
        for job in 0..jobs {
            let (queue, next, found) = (&queue, &next, &found);
            scope.spawn(move || {
                let mut claims = plan.worker.then(|| Shared::new(plan, queue));
                while signal::caught().is_none() {
                    let (number, claim) = match &mut claims {
                        None => (next.fetch_add(1, Ordering::Relaxed), None),
                        Some(shared) => match shared.next() {
                            Ok(Some((number, claim))) => (number, claim),
                            Ok(None) => break,
                            Err(failure) => {
                                let mut found = found.lock().unwrap_or_else(|e| e.into_inner());
                                found.fail("the claims of workers".into(), &failure);
                                break;
                            }
                        },
                    };
                    let Some(&(arm, seed)) = queue.get(number) else { break };
                    let label = format!("run {} of {all}: {}, seed {seed}", first + number + 1, arm.name);
                    let mut progress = Progress::labelled(&label, jobs == 1, Stream::Out);
                    let rest = (queue.len().saturating_sub(number + 1)) as f64;
                    progress.after = (rest + plan.later) / jobs as f64;
                    let result = match claim {
                        Some(Answer::Failed(reason)) => Err(Failure::Error(reason.into())),
                        Some(Answer::Ours(claim)) => {
                            let result = one(arm, seed, plan, (job, jobs), &mut progress);
                            match &result {
                                Err(failure) => {
                                    let _ = claim.failed(&failure.to_string());
                                }
                                Ok(_) => drop(claim),
                            }
                            result
                        }
                        Some(Answer::Others) | None => one(arm, seed, plan, (job, jobs), &mut progress),
                    };
                    let mut found = found.lock().unwrap_or_else(|e| e.into_inner());
                    match result {
                        Ok(None) => found.skipped += 1,
                        Ok(Some(Stop::Finished | Stop::Early)) => found.trained += 1,
                        Ok(Some(Stop::Interrupted(signal))) => found.stopped = Some(signal),
                        Err(failure) => {
                            found.fail(format!("{}, seed {seed}", arm.name), &failure);
                        }
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(|e| e.into_inner());
    found.stopped = found.stopped.or(signal::caught());
    found
}

/// The runs that workers share, as one of them sees them.
struct Shared {
    claims: Claims,
    folders: Vec<PathBuf>,
    /// Numbers of runs that are not known to be at their end.
    open: Vec<usize>,
}

impl Shared {
    fn new(plan: &Plan, queue: &[(&Arm, u64)]) -> Self {
        let folders = queue.iter().map(|(arm, seed)| run_folder(plan.folder, &arm.name, *seed)).collect();
        Shared { claims: Claims::default(), folders, open: (0..queue.len()).collect() }
    }

    /// The next run that is this worker's, that failed, or that is at its end (without a claim);
    /// waits while others train all that is open. `None` at the end of all.
    fn next(&mut self) -> Result<Option<(usize, Option<Answer>)>, Failure> {
        while signal::caught().is_none() {
            for (at, &number) in self.open.iter().enumerate() {
                let folder = &self.folders[number];
                let answer = match ledger(folder)? {
                    Some(ledger) if ended(&ledger) => None,
                    _ => Some(self.claims.take(folder)?),
                };
                if !matches!(answer, Some(Answer::Others)) {
                    self.open.remove(at);
                    return Ok(Some((number, answer)));
                }
            }
            if self.open.is_empty() {
                break;
            }
            thread::sleep(beat() / 4);
        }
        Ok(None)
    }
}

/// One run; `None` where it was at its end before.
fn one(
    arm: &Arm,
    seed: u64,
    plan: &Plan,
    (job, jobs): (usize, usize),
    progress: &mut Progress,
) -> Result<Option<Stop>, Failure> {
    let spec = seeded(arm, seed);
    let text = resolved(&spec);
    let path = run_folder(plan.folder, &arm.name, seed);
    let begun = begun(arm, seed, plan)?;
    if begun.as_ref().is_some_and(ended) {
        return Ok(None);
    }
    let all = plan.device.threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
    let threads = Some((all / jobs).max(1));
    let device =
        Where { device: plan.devices.get(job).copied().unwrap_or(plan.device.device), threads }.open()?;
    let Some(data) = &spec.data else {
        return Err(Failure::Usage(format!("{} has no data; give the suite a `data` section", arm.name)));
    };
    let dataset = open_data(&spec, data, spec.eval.stride)?;
    let (folder, own, rewriting) = if begun.is_some() {
        let folder = RunFolder::open(&path)?;
        let (from, rewriting) =
            (latest(&folder, &|_| Some(spec.train.steps))?, plan.rewriting.continued(&folder, false)?);
        (folder, from, rewriting)
    } else {
        (RunFolder::create(&Place::At { path, force: true })?, None, plan.rewriting.on(device.as_ref())?)
    };
    // A branch takes the schedule of its own from the trunk's step on.
    let (begins, branches) = (own.is_none(), own.is_none() && plan.trunk.is_some());
    let from = match (own, plan.trunk) {
        (None, Some((trunk, step))) => Some(branch(&run_folder(trunk, &arm.name, seed), step)?),
        (own, _) => own,
    };
    let formats = stored(&spec, from.as_ref(), device.as_ref(), &Group::alone());
    let prepared = prepare(&spec, device.as_ref(), &rewriting, &Group::alone(), &formats)?;
    if begins {
        folder.begin(&text, &dataset.tokenizer, &prepared.rewriting)?;
    }
    let base = beginning(&spec, from.as_ref(), (folder.path(), device.as_ref()))?;
    let setup = Setup {
        spec: &spec,
        base,
        text: &text,
        device: device.as_ref(),
        dataset: &dataset,
        group: Group::alone(),
        folder: Some(&folder),
        from,
        allow_changes: branches,
        count: false,
    };
    let outcome = train::run(prepared, setup, progress);
    progress.clear();
    Ok(Some(outcome?.stop))
}

/// The checkpoint of a trunk after a step, for a run that writes files of its own.
fn branch(trunk: &Path, step: u64) -> Result<Checkpoint, Failure> {
    let checkpoint = Checkpoint::open(&RunFolder::open(trunk)?.checkpoints().at(step));
    let mut checkpoint = checkpoint.map_err(|e| Failure::Error(e.to_string().into()))?;
    let state = &mut checkpoint.state;
    (state.metrics_bytes, state.events_bytes, state.samples_bytes) = (0, 0, 0);
    (state.best, state.stale, state.concluded) = (None, 0, None);
    Ok(checkpoint)
}
