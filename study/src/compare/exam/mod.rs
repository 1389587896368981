//! Exams: a comparison for each of several generated tasks, and one report of all.
//!
//! *In*: specifications and a time. *Out*: a folder with a suite and a comparison for each task,
//! and [`Manifest`]. *Promise*: a task is nothing but its suite, which `dreamc compare` runs as it
//! runs any other, so that an exam goes on where it was stopped; what a folder holds is never
//! mixed with another exam; nothing is written before every suite is checked and measured.
//!
//! | entry | content |
//! |---|---|
//! | `exam.json` | [`Manifest`] |
//! | `{task}.suite.yaml` | the suite of a task |
//! | `{task}/` | its comparison, see [`super::study`]; that of rates in [`super::ladder`] |
//! | `{task}.inside.json` | heads and passes of its arms, see [`inside`] |
//! | `report.html`, `report.md`, `figures/` | the report, see [`page`] |

pub mod battery;
pub mod cost;
pub mod inside;
pub mod page;

use super::arms::{self, Arm, Matching, check_name};
use super::made::Arms;
use super::study::{self, Listed, ended, ledger, run_folder};
use crate::compare::suite::{self, agree};
use crate::device::Where;
use crate::failure::{Done, Failure};
use crate::number::many;
use crate::rewriting::Choice;
use crate::say;
use crate::show::{duration, table};
use battery::Setting;
use cost::{Cost, Split};
use dreamc_data::files;
use dreamc_dsl::Spelling;
use dreamc_dsl::spec::TaskKind;
use dreamc_dsl::suite::Suite;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const MANIFEST: &str = "exam.json";
/// Rates that every arm tries where the time allows.
pub const RATES: [f64; 4] = [1e-3, 2e-3, 4e-3, 8e-3];
/// The rate of all where it does not.
const RATE: f64 = 4e-3;
/// Problems of all difficulties of a task together that a run is asked at its end, about.
const PROBLEMS: u64 = 256;
/// Rows of a step.
const BATCH: u64 = 16;

/// `exam.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The request, in words: another exam has others.
    pub asked: Vec<String>,
    /// Names of the arms, the baseline first.
    pub arms: Vec<String>,
    /// Every arm is trained once for each.
    pub seeds: Vec<u64>,
    /// The tasks, in their order.
    pub tasks: Vec<Sat>,
    /// Whether arms are trained that do not agree.
    pub unequal: bool,
}

/// A task of an exam.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sat {
    /// Its name, and that of its folder.
    pub name: String,
    /// The capability that it shows.
    pub capability: String,
    /// The noun of its steps.
    pub steps_are: String,
    /// The most steps that are learned.
    pub learned: u64,
    /// Whether every arm tunes its rate.
    pub tuned: bool,
    /// Steps of its runs.
    pub steps: u64,
    /// Seconds of all its runs, as they were foreseen.
    pub seconds: f64,
}

impl Manifest {
    /// That of a folder, where it is an exam's.
    pub fn of(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(MANIFEST);
        if !path.is_file() {
            return Ok(None);
        }
        let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
        let found: Manifest = serde_json::from_str(&text)
            .map_err(|e| Failure::Usage(format!("{}: not an exam: {e}", path.display())))?;
        found.arms.iter().chain(found.tasks.iter().map(|t| &t.name)).try_for_each(|n| check_name(n))?;
        if found.arms.is_empty() || found.tasks.is_empty() || found.seeds.is_empty() {
            return Err(Failure::Usage(format!("{}: names no arms, no tasks or no seeds", path.display())));
        }
        Ok(Some(found))
    }

    fn write(&self, folder: &Path) -> Done {
        let text = serde_json::to_string_pretty(self)? + "\n";
        Ok(files::write_atomic(&folder.join(MANIFEST), |out| out.write_all(text.as_bytes()))?)
    }

    /// Every run in the order of training.
    pub fn runs(&self, folder: &Path) -> Result<Vec<Listed>, Failure> {
        let mut all = vec![];
        for task in &self.tasks {
            let at = folder.join(&task.name);
            let runs = match study::runs(&at)? {
                Some(runs) => runs,
                None => self.planned(&task.folder(folder)),
            };
            let weight = task.seconds / runs.iter().map(|run| run.weight).sum::<f64>();
            let name = |run: &Listed| format!("{}: {}", task.name, run.name);
            all.extend(runs.into_iter().map(|run| Listed {
                name: name(&run),
                weight: run.weight * weight,
                path: run.path,
            }));
        }
        Ok(all)
    }

    /// The runs of a task that has not begun.
    fn planned(&self, at: &Path) -> Vec<Listed> {
        let of = |arm: &String, seed: u64| Listed {
            name: format!("{arm}, seed {seed}"),
            path: run_folder(at, arm, seed),
            weight: 1.0,
        };
        self.seeds.iter().flat_map(|seed| self.arms.iter().map(move |arm| of(arm, *seed))).collect()
    }

    /// Seconds of the runs that are not at their end, as they were foreseen.
    fn left(&self, folder: &Path) -> Result<f64, Failure> {
        let mut left = 0.0;
        for run in self.runs(folder)? {
            let done = ledger(&run.path)?.is_some_and(|l| ended(&l));
            left += if done { 0.0 } else { run.weight };
        }
        Ok(left)
    }
}

impl Sat {
    /// The comparison that has its runs: those after the trials, where rates are tuned.
    pub fn folder(&self, exam: &Path) -> PathBuf {
        let folder = exam.join(&self.name);
        if self.tuned { folder.join("all") } else { folder }
    }

    fn suite(&self, exam: &Path) -> PathBuf {
        exam.join(format!("{}.suite.yaml", self.name))
    }
}

/// A task before it begins.
struct Planned {
    setting: Setting,
    /// The arms as its suite has them.
    arms: Vec<Arm>,
    costs: Vec<Cost>,
}

/// The exam that is asked for.
pub struct Asked {
    /// Specifications, the baseline first; or the folder of an exam, to go on with it.
    pub specs: Vec<PathBuf>,
    /// Seconds of all runs together, as measured on this machine.
    pub budget: f64,
    /// Steps of every run, in place of those that the time allows.
    pub steps: Option<u64>,
    /// Every arm trains with the seeds 0 to N - 1.
    pub seeds: u64,
    /// The tasks; the battery's where none are named.
    pub tasks: Vec<TaskKind>,
    /// The learning rates that every arm tries.
    pub rates: Vec<f64>,
    /// Folder of the exam and its report.
    pub out: Option<PathBuf>,
    /// Runs trained at once, which share the threads.
    pub jobs: usize,
    /// Do not match the arms, and train them though they do not agree.
    pub allow_unequal: bool,
    /// Match, check, measure and say how long all takes; train nothing.
    pub dry_run: bool,
    /// Where to run.
    pub device: Where,
    /// Which rewriting rules are used.
    pub rewriting: Choice,
}

impl Asked {
    /// The specifications, the baseline first, wherever the suites stand that name them.
    pub fn arms(&self) -> Result<Vec<PathBuf>, Failure> {
        Ok(self.specs.iter().map(std::path::absolute).collect::<Result<_, _>>()?)
    }

    /// The folder of an exam of these specifications.
    pub fn folder(&self, specs: &[PathBuf]) -> PathBuf {
        let stem = |path: &PathBuf| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let name: String = specs.iter().map(|path| format!("-{}", stem(path))).collect();
        let right = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
        let name: String = name.chars().map(right).take(120).collect();
        self.out.clone().unwrap_or_else(|| Path::new("runs").join(format!("exam{name}")))
    }
}

/// Sits an exam: plans it where it has not begun, trains what is not trained yet, and writes the
/// report.
pub fn run(mut a: Asked) -> Done {
    let mut seen = vec![];
    for kind in &a.tasks {
        if seen.contains(kind) {
            return Err(Failure::Usage(format!("--tasks names {} twice", kind.facts().name)));
        }
        seen.push(*kind);
    }
    a.rates.sort_by(f64::total_cmp);
    a.rates.dedup();
    sit_or_go_on(&a)
}

fn sit_or_go_on(a: &Asked) -> Done {
    let specs = a.arms()?;
    if let Some((folder, manifest)) = begun(a, &specs)? {
        if a.dry_run {
            return Ok(say!("{}: {} left", folder.display(), duration(manifest.left(&folder)?))?);
        }
        return sit(a, &folder, &manifest);
    }
    let arms = Arms::read(&specs, !a.allow_unequal)?;
    let folder = a.folder(&specs);
    let tasks = plan(a, &arms)?;
    let split = share(a, &tasks)?;
    let manifest = manifest(a, &specs, &tasks, &split);
    say!("{}", foreseen(&manifest, &tasks)?)?;
    if a.dry_run {
        return Ok(());
    }
    fs::create_dir_all(&folder).map_err(|e| files::about(&folder, e))?;
    for (task, of) in tasks.iter().zip(&manifest.tasks) {
        let text = text(a, &arms, &task.setting, (of.steps, of.tuned))?;
        files::write_atomic(&of.suite(&folder), |out| out.write_all(text.as_bytes()))?;
    }
    // The manifest goes last: by it the folder is known as a whole exam.
    manifest.write(&folder)?;
    sit(a, &folder, &manifest)
}

/// The exam that the command goes on with; another one in its folder is refused.
fn begun(a: &Asked, specs: &[PathBuf]) -> Result<Option<(PathBuf, Manifest)>, Failure> {
    if let [folder] = specs
        && let Some(found) = Manifest::of(folder)?
    {
        return Ok(Some((folder.clone(), found)));
    }
    let folder = a.folder(specs);
    let Some(found) = Manifest::of(&folder)? else {
        let used = fs::read_dir(&folder).ok().and_then(|entries| {
            let mut names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
            // Suites alone are what an exam leaves that was stopped while it was planned.
            names.find(|name| !name.ends_with(".suite.yaml") && !name.starts_with(files::TEMPORARY))
        });
        return match used {
            None => Ok(None),
            Some(entry) => Err(Failure::Usage(format!(
                "{} holds {entry} and is not the folder of an exam: it is left alone; choose another --out",
                folder.display()
            ))),
        };
    };
    let asked = asked(a, specs);
    let differ = |one: &[String], other: &[String]| one.iter().find(|w| !other.contains(w)).cloned();
    match (differ(&found.asked, &asked), differ(&asked, &found.asked)) {
        (None, None) => Ok(Some((folder, found))),
        (theirs, ours) => Err(Failure::Usage(format!(
            "{} is an exam of {}, and this one of {}: choose another --out",
            folder.display(),
            theirs.unwrap_or("fewer".into()),
            ours.unwrap_or("fewer".into())
        ))),
    }
}

/// All that an exam is asked for, in words.
fn asked(a: &Asked, specs: &[PathBuf]) -> Vec<String> {
    let full = |path: &PathBuf| path.canonicalize().unwrap_or(path.clone()).display().to_string();
    let mut words: Vec<String> = specs.iter().map(full).collect();
    words.extend(a.tasks.iter().map(|kind| kind.facts().name.to_string()));
    words.push(many(a.seeds.into(), "seed"));
    words.push(match a.steps {
        Some(steps) => many(steps.into(), "step"),
        None => duration(a.budget),
    });
    words.push(match a.rates.as_slice() {
        [] => "the rates of exams".into(),
        rates => format!("the rates {rates:?}"),
    });
    words.extend(a.allow_unequal.then(|| "arms that do not agree".into()));
    words
}

/// Reads, matches, checks and measures the arms of every task; nothing is written.
fn plan(a: &Asked, arms: &Arms) -> Result<Vec<Planned>, Failure> {
    let kinds: &[TaskKind] = if a.tasks.is_empty() { &battery::BATTERY } else { &a.tasks };
    let mut all = vec![];
    for (i, &kind) in kinds.iter().enumerate() {
        let setting = battery::setting(kind);
        let text = text(a, arms, &setting, (cost::FEWEST, false))?;
        let (suite, arms) = load(kind, &text)?;
        let costs = agree(a.allow_unequal, &suite, &arms).map_err(|e| of_task(kind, e))?;
        // Arms are the same in every task, and so is what they cost.
        if i == 0 {
            say!("{costs}")?;
        }
        let measure = |arm: &Arm| cost::measure(&arm.spec, &a.device, &a.rewriting);
        let costs = arms.iter().map(measure).collect::<Result<_, _>>().map_err(|e| of_task(kind, e))?;
        all.push(Planned { setting, arms, costs });
    }
    Ok(all)
}

/// The arms of a suite that stands in no file.
fn load(kind: TaskKind, text: &str) -> Result<(Suite, Vec<Arm>), Failure> {
    let name = format!("{}.suite.yaml", kind.facts().name);
    let ast = dreamc_dsl::parse(&name, text, Spelling::Yaml)?;
    let none: &arms::Fields = &|_| vec![];
    arms::load_tree(&ast, Path::new(""), &[], (Matching::default(), none), &mut |_| Ok(()))
}

/// A failure with the task that it is about, and how to do without.
fn of_task(kind: TaskKind, failure: Failure) -> Failure {
    let name = kind.facts().name;
    match failure {
        Failure::Error(error) => {
            Failure::Usage(format!("{name}: {error}\n--tasks names others, where it does without"))
        }
        Failure::Usage(what) => Failure::Usage(format!("{name}: {what}")),
        other @ (Failure::Diagnostics(_) | Failure::Said | Failure::Unread | Failure::Stopped(_)) => other,
    }
}

/// The steps of every task, and whether rates are tuned.
fn share(a: &Asked, tasks: &[Planned]) -> Result<Split, Failure> {
    let trials = if a.rates.is_empty() { RATES.len() } else { a.rates.len() } as u64;
    match a.steps {
        Some(steps) => Ok(Split { steps: vec![steps; tasks.len()], tuned: a.rates.len() > 1 }),
        None => {
            let costs: Vec<Vec<Cost>> = tasks.iter().map(|t| t.costs.clone()).collect();
            cost::split(a.budget, &costs, a.seeds, trials)
        }
    }
}

/// The suite of a task.
fn text(a: &Asked, arms: &Arms, setting: &Setting, (steps, tuned): (u64, bool)) -> Result<String, Failure> {
    let facts = setting.task.kind.facts();
    let sequence = setting.tokens()?.next_multiple_of(16);
    let difficulties = setting.task.difficulties().count() as u64;
    let rates = if a.rates.is_empty() { RATES.to_vec() } else { a.rates.clone() };
    let rate = match a.rates.as_slice() {
        [rate] => *rate,
        _ => RATE,
    };
    let sweep = match tuned {
        true => format!("sweep: {{train.learning_rate: {rates:?}}}\nsweep_edge: allow\n"),
        false => String::new(),
    };
    let sections = format!(
        "{}train: {{steps: {steps}, batch: {BATCH}, sequence: {sequence}, learning_rate: {rate:?}, warmup: {}, schedule: cosine, \
         betas: [0.9, 0.95], clip: 1, precision: f32, evaluate: {{every: 0, batches: 8}}, checkpoint: {{minutes: 1, keep: 1}}}}\n\
         eval: {{examples: {}, max_tokens: 8}}\n{sweep}",
        setting.data(),
        steps / 10,
        (PROBLEMS / difficulties).max(8)
    );
    let paper = if facts.paper.is_empty() { String::new() } else { format!(" (arXiv {})", facts.paper) };
    Ok(format!(
        "# Made by `dreamc exam`: {}{paper}\n{}",
        facts.about.replace('\n', " "),
        arms.suite(facts.name, &sections, a.seeds)
    ))
}

fn manifest(a: &Asked, specs: &[PathBuf], tasks: &[Planned], split: &Split) -> Manifest {
    let trials = match (split.tuned, a.rates.len()) {
        (false, _) => 0,
        (true, 0) => RATES.len(),
        (true, n) => n,
    } as u64;
    let sat = |(task, &steps): (&Planned, &u64)| {
        let facts = task.setting.task.kind.facts();
        Sat {
            name: facts.name.into(),
            capability: task.setting.capability.into(),
            steps_are: facts.steps.about.into(),
            learned: task.setting.task.max_steps,
            tuned: split.tuned,
            steps,
            seconds: (a.seeds + trials) as f64 * task.costs.iter().map(|c| c.of(steps)).sum::<f64>(),
        }
    };
    Manifest {
        asked: asked(a, specs),
        arms: tasks.iter().take(1).flat_map(|t| t.arms.iter().map(|arm| arm.name.clone())).collect(),
        seeds: (0..a.seeds).collect(),
        tasks: tasks.iter().zip(&split.steps).map(sat).collect(),
        unequal: a.allow_unequal,
    }
}

/// Costs of an exam, before it begins.
fn foreseen(manifest: &Manifest, tasks: &[Planned]) -> Result<String, Failure> {
    let mut rows =
        vec![["task", "shows", "learned", "asked", "steps", "a step", "in all"].map(String::from).to_vec()];
    for (of, task) in manifest.tasks.iter().zip(tasks) {
        let t = &task.setting.task;
        let most = t.longer.last().copied().unwrap_or(t.max_steps);
        let step = task.costs.iter().map(|c| c.step).sum::<f64>() / task.costs.len().max(1) as f64;
        rows.push(vec![
            of.name.clone(),
            of.capability.clone(),
            format!("{} to {} {}", t.min_steps, t.max_steps, of.steps_are),
            format!("to {most}"),
            of.steps.to_string(),
            format!("{:.1} ms", 1e3 * step),
            duration(of.seconds),
        ]);
    }
    let all = manifest.tasks.iter().map(|t| t.seconds).sum::<f64>();
    let tuned = match manifest.tasks.iter().any(|t| t.tuned) {
        true => "every arm tunes its rate",
        false => "one rate for all: the time allows no tuning",
    };
    Ok(format!(
        "{}\n{}, {}, {}; {tuned}; {} as measured here",
        table(&rows),
        many(manifest.tasks.len() as u128, "task"),
        many(manifest.arms.len() as u128, "arm"),
        many(manifest.seeds.len() as u128, "seed"),
        duration(all)
    ))
}

/// Runs the suites of an exam, each as `dreamc compare` runs it, and writes the report.
fn sit(a: &Asked, folder: &Path, manifest: &Manifest) -> Done {
    let mut failed = vec![];
    for (i, task) in manifest.tasks.iter().enumerate() {
        let left = duration(manifest.left(folder)?);
        say!("\ntask {} of {}: {}, {left} left of all", i + 1, manifest.tasks.len(), task.name)?;
        let suite = suite::Asked::of_suite(task.suite(folder), folder.join(&task.name), manifest.unequal, a);
        match suite::run(suite) {
            Ok(()) => {}
            Err(Failure::Stopped(signal)) => return Err(Failure::Stopped(signal)),
            // A suite that cannot be read is an error of all; runs that fail are of their task.
            Err(Failure::Error(error)) => failed.push(format!("{}: {error}", task.name)),
            Err(other) => return Err(other),
        }
    }
    inside::look(a, folder, manifest)?;
    let exam = page::Exam::read(folder)?;
    page::page(&exam).write(folder, "report")?;
    say!("\n{}\n", page::summary(&exam))?;
    say!("the report is {}", folder.join("report.html").display())?;
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::Error(failed.join("; ").into())),
    }
}
