//! Sweeps and ladders: arms tuned alike, then compared in cells of equal FLOPs.
//!
//! *In*: a suite with a `sweep` or a `ladder`. *Out*: a folder with a comparison for each cell, one
//! of the trials, and [`Manifest`]. *Promise*: every arm tries the same values at the smallest
//! cell; a best value at an end of its list is refused unless the suite allows it; a run that came
//! to its end is never trained again.
//!
//! | entry | content |
//! |---|---|
//! | `ladder.json` | [`Manifest`] |
//! | `sweep/` | the trials, a comparison whose arms are `{arm}.{field}-{value}` |
//! | `sweep.{cell}/` | those that go on to another cell by `halving` |
//! | `recheck.{cell}/` | half and twice of the carried rate, by `recheck` |
//! | `{size}-trunk/` | with a cooldown: runs of constant rate that the cells of a size branch from |
//! | `{size}-{budget}/` | a cell: a comparison, see [`super::study`] |
//! | `runs.csv` | a line for each run at its end, for `dreamc fit` |
//! | `report.html`, `report.md`, `figures/` | the report, see [`super::rungs`] |

use super::agreement;
use super::arms::{self, Arm, Matching};
use super::study::{self, Listed, ledger, run_folder, spec_file};
use super::{page, rungs, training};
use crate::compare::suite::{Asked, before, disagreements, remedies};
use crate::failure::{Done, Failure};
use crate::number::{grouped, many};
use crate::show::{duration, short, table};
use crate::spec::{Named, resolved, warn};
use crate::{note, say};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::count::{Options, count};
use dreamc_compiler::fields::{field, sizes};
use dreamc_compiler::transfer;
use dreamc_data::files;
use dreamc_dsl::spec::{Schedule, Transfer, TransferRule};
use dreamc_dsl::suite::{Ladder, Size, Suite};
use dreamc_runtime::bench;
use dreamc_runtime::statistics::{Summary, detectable, student_quantile};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const MANIFEST: &str = "ladder.json";
/// The folder of the trials.
pub const SWEEP: &str = "sweep";
/// A cell has at least this many steps: fewer have no schedule to speak of.
const FEWEST_STEPS: u64 = 10;

/// `ladder.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name of the suite.
    pub suite: String,
    /// Names of the arms, the baseline first.
    pub arms: Vec<String>,
    /// Every arm is trained once for each.
    pub seeds: Vec<u64>,
    /// The cells, least compute first.
    pub cells: Vec<Cell>,
    /// The trials of each arm: values of the fields, and the trial's name.
    pub trials: Vec<Vec<Trial>>,
    /// The trial that each arm goes on with, once all are at their end.
    pub chosen: Vec<Option<usize>>,
    /// Arms that the gate stopped.
    pub stopped: Vec<String>,
    /// The rule by which cells use the rate of the smallest; empty for none.
    #[serde(default)]
    pub transfer: String,
    /// Later cells that trials go on to, and which of each arm: its numbers in `trials`.
    #[serde(default)]
    pub halved: Vec<Halved>,
    /// The cell at which carried rates are tried again, once they are known.
    #[serde(default)]
    pub recheck: Option<Recheck>,
}

/// Trials that went on to a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Halved {
    /// The cell.
    pub cell: String,
    /// Of each arm, numbers of its trials.
    pub trials: Vec<Vec<usize>>,
}

impl Halved {
    /// Its folder in that of the ladder.
    pub fn folder(&self) -> String {
        format!("{SWEEP}.{}", self.cell)
    }
}

/// Carried rates that are tried again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recheck {
    /// The cell.
    pub cell: String,
    /// Of each arm the rate that it carries; trials have its half and its double.
    pub rates: Vec<f64>,
}

impl Recheck {
    /// Its folder in that of the ladder.
    pub fn folder(&self) -> String {
        format!("recheck.{}", self.cell)
    }

    /// The trials of an arm, each with its rate.
    pub fn trials(&self, arm: &str, rate: f64) -> [Trial; 2] {
        [0.5, 2.0].map(|by| {
            let values = vec![(RATE.to_string(), rate * by)];
            Trial { name: format!("{arm}.{}", label(&values)), values }
        })
    }
}

/// The field of the rate.
pub const RATE: &str = "train.learning_rate";

/// A cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Its name, and that of its folder.
    pub name: String,
    /// The size, where there is a ladder.
    pub size: Option<String>,
    /// FLOPs of training, where there is a ladder.
    pub budget: Option<f64>,
    /// Steps of every run.
    pub steps: u64,
    /// The trunk's folder and the step after which the runs branch from it.
    #[serde(default)]
    pub trunk: Option<(String, u64)>,
}

/// Values that an arm tries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Its name, and that of its arm in the comparison of the trials.
    pub name: String,
    /// Fields and their values.
    pub values: Vec<(String, f64)>,
}

impl Manifest {
    /// That of a folder, where it is a ladder's.
    pub fn of(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(MANIFEST);
        if !path.is_file() {
            return Ok(None);
        }
        let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
        let found: Manifest = serde_json::from_str(&text)
            .map_err(|e| Failure::Usage(format!("{}: not a ladder: {e}", path.display())))?;
        let names = found.arms.iter().chain(found.cells.iter().map(|c| &c.name));
        for name in names.chain(found.trials.iter().flatten().map(|t| &t.name)) {
            arms::check_name(name)?;
        }
        Ok(Some(found))
    }

    fn write(&self, folder: &Path) -> Done {
        let text = serde_json::to_string_pretty(self)? + "\n";
        Ok(files::write_atomic(&folder.join(MANIFEST), |out| out.write_all(text.as_bytes()))?)
    }

    /// Every run in the order of training.
    pub fn runs(&self, folder: &Path) -> Vec<Listed> {
        let seed = self.seeds.first().copied().unwrap_or(0);
        // Of a branch the steps after its trunk are trained, of a trunk those before the last.
        let share = |cell: &Cell| {
            let before = cell.trunk.as_ref().map_or(0, |(_, at)| *at);
            (before as f64 / cell.steps.max(1) as f64, cell.budget.unwrap_or(1.0))
        };
        let trunk_of = |name: &String| {
            let branches = self.cells.iter().filter(|c| c.trunk.as_ref().is_some_and(|(t, _)| t == name));
            branches.map(|c| share(c).0 * share(c).1).fold(0.0, f64::max)
        };
        let trial = self.cells.first().map_or(1.0, |c| share(c).1);
        let mut all: Vec<Listed> = self
            .trials
            .iter()
            .flatten()
            .map(|t| Listed {
                name: format!("trial {}", t.name),
                path: run_folder(&folder.join(SWEEP), &t.name, seed),
                weight: trial,
            })
            .collect();
        let weight_of =
            |name: &String| self.cells.iter().find(|c| c.name == *name).map_or(1.0, |c| share(c).1);
        for halved in &self.halved {
            let own = self.trials.iter().zip(&halved.trials);
            all.extend(own.flat_map(|(of, left)| left.iter().filter_map(|k| of.get(*k))).map(|t| Listed {
                name: format!("trial {}, {}", t.name, halved.cell),
                path: run_folder(&folder.join(halved.folder()), &t.name, seed),
                weight: weight_of(&halved.cell),
            }));
        }
        let mut add = |at: &String, weight: f64| {
            for (arm, seed) in order(&self.arms, &self.seeds) {
                let path = run_folder(&folder.join(at), arm, seed);
                if !self.stopped.contains(arm) || path.exists() {
                    all.push(Listed { name: format!("{arm}, {at}, seed {seed}"), path, weight });
                }
            }
        };
        let mut trunks: Vec<&String> = vec![];
        for cell in &self.cells {
            if let Some((trunk, _)) = cell.trunk.as_ref().filter(|(t, _)| !trunks.contains(&t)) {
                trunks.push(trunk);
                add(trunk, trunk_of(trunk));
            }
            let (before, budget) = share(cell);
            add(&cell.name, (1.0 - before) * budget);
        }
        if let Some(recheck) = &self.recheck {
            let own = self.arms.iter().zip(&recheck.rates);
            let own = own.filter(|(arm, _)| !self.stopped.contains(arm));
            all.extend(own.flat_map(|(arm, rate)| recheck.trials(arm, *rate)).map(|t| Listed {
                name: format!("recheck {}", t.name),
                path: run_folder(&folder.join(recheck.folder()), &t.name, seed),
                weight: weight_of(&recheck.cell),
            }));
        }
        all
    }
}

/// Arms and seeds in the order of training: the baseline's seeds first, for they show the noise.
fn order<'a>(arms: &'a [String], seeds: &'a [u64]) -> impl Iterator<Item = (&'a String, u64)> {
    let baseline = arms.iter().take(1).flat_map(move |a| seeds.iter().map(move |s| (a, *s)));
    baseline.chain(seeds.iter().flat_map(move |s| arms.iter().skip(1).map(move |a| (a, *s))))
}

/// A cell with its arms.
struct Rung {
    cell: Cell,
    set: Vec<String>,
    suite: Suite,
    arms: Vec<Arm>,
    /// FLOPs of a training token of each arm.
    flops: Vec<f64>,
    branch: Option<Branch>,
}

/// Fields of each arm.
type Chosen = Vec<Vec<(String, f64)>>;

struct Way<'a> {
    a: &'a Asked,
    suite: Suite,
    folder: PathBuf,
    /// Steps of the cells by name: counted once.
    known: HashMap<String, Planned>,
    /// The rule of the ladder with the size of each arm at the smallest cell, once that is known.
    bases: Vec<Transfer>,
}

/// The length of a cell.
#[derive(Clone)]
struct Planned {
    steps: u64,
    /// Changes of the suite that follow from it.
    set: Vec<String>,
    branch: Option<Branch>,
}

/// Where a cell branches from its trunk.
#[derive(Clone, Copy)]
struct Branch {
    /// The step after which it does.
    at: u64,
    /// Steps of the trunk.
    trunk: u64,
    /// Every branch begins at a multiple of it.
    unit: u64,
}

impl Way<'_> {
    /// The sizes of the ladder at its budgets, least compute first.
    fn cells(&self) -> Vec<(Option<Size>, Option<f64>)> {
        let Some(ladder) = &self.suite.ladder else { return vec![(None, None)] };
        let at = |b: &f64| ladder.sizes.iter().map(move |s| (Some(s.clone()), Some(*b))).collect::<Vec<_>>();
        ladder.budgets.iter().flat_map(at).collect()
    }

    /// The arms of a cell, each with its own fields besides.
    fn rung(
        &mut self,
        (size, budget): &(Option<Size>, Option<f64>),
        own: &dyn Fn(usize) -> Vec<(String, f64)>,
    ) -> Result<Rung, Failure> {
        let name = match (size, budget) {
            (Some(size), Some(budget)) => format!("{}-{budget:e}", size.name),
            _ => "all".into(),
        };
        let sized = |arm: usize| -> Vec<(String, f64)> {
            size.iter().flat_map(|s| s.values.clone()).chain(own(arm)).collect()
        };
        let arguments = |set| Named { spec: self.a.suite.clone(), set };
        let load =
            |set: Vec<String>| arms::load(&arguments(set), Matching::default(), &sized, &mut |_| Ok(()));
        if !self.known.contains_key(&name) {
            let planned = match budget {
                None => Planned { steps: self.steps(), set: self.a.set.clone(), branch: None },
                Some(budget) => {
                    let (_, arms) = load(self.a.set.clone())?;
                    let t = &arms[0].spec.train;
                    let tokens = t.batch * t.sequence.unwrap_or(arms[0].spec.model.context);
                    let each = trained(&arms[0])? * tokens as f64;
                    let of = |budget: f64| (budget / each).round() as u64;
                    let steps = of(*budget);
                    if steps < FEWEST_STEPS {
                        return Err(Failure::Usage(format!(
                            "the cell {name} has {steps} steps of {tokens} tokens; a cell needs at least {FEWEST_STEPS}: give it a \
                             larger budget, a smaller batch, or a smaller model"
                        )));
                    }
                    match self.suite.ladder.as_ref().and_then(|l| Some((l, l.cooldown?))) {
                        None => Planned { steps, set: self.set_of(steps, &arms[0]), branch: None },
                        Some((ladder, share)) => {
                            let start = |b: f64| ((1.0 - share) * of(b) as f64).round().max(1.0);
                            let (first, last) = (ladder.budgets[0], ladder.budgets[ladder.budgets.len() - 1]);
                            let unit = start(first);
                            let at = |b: f64| (unit * (start(b) / unit).round().max(1.0)) as u64;
                            let branch = Branch { at: at(*budget), trunk: at(last), unit: unit as u64 };
                            let steps =
                                (branch.at as f64 / (1.0 - share)).round().max(branch.at as f64 + 1.0);
                            // All cells of a size begin as their trunk does.
                            let mut set = self.set_of(of(first), &arms[0]);
                            set.push(format!("train.steps={}", branch.trunk));
                            Planned { steps: steps as u64, set, branch: Some(branch) }
                        }
                    }
                }
            };
            self.known.insert(name.clone(), planned);
        }
        let Planned { steps, set, branch } = self.known[&name].clone();
        let (suite, mut arms) = load(set.clone())?;
        for (arm, base) in arms.iter_mut().zip(&self.bases) {
            arm.spec.train.transfer = Some(base.clone());
            arm.spec.carry();
        }
        let flops = arms.iter().map(trained).collect::<Result<_, _>>()?;
        let size = size.as_ref().map(|s| s.name.clone());
        let mut trunk = None;
        if let (Some(branch), Some(size)) = (branch, &size) {
            trunk = Some((format!("{size}-trunk"), branch.at));
            for arm in &mut arms {
                arm.spec.train.steps = steps;
                arm.spec.train.schedule = Schedule::Wsd { decay: steps - branch.at, floor: 0.0 };
            }
        }
        let cell = Cell { name, size, budget: *budget, steps, trunk };
        Ok(Rung { cell, set, suite, arms, flops, branch })
    }

    /// The arms of the trunk that a cell branches from.
    fn trunk(mut rung: Rung) -> Option<Rung> {
        let (branch, (name, _)) = (rung.branch?, rung.cell.trunk.take()?);
        for arm in &mut rung.arms {
            let train = &mut arm.spec.train;
            (train.steps, train.schedule) = (branch.trunk, Schedule::Constant);
            (train.checkpoint.every, train.checkpoint.keep_every) = (branch.unit, branch.unit);
        }
        (rung.cell.name, rung.cell.steps) = (name, branch.trunk);
        Some(rung)
    }

    fn steps(&self) -> u64 {
        self.suite.train.as_ref().map_or(0, |t| t.steps)
    }

    /// Changes of the suite's recipe for a number of steps: lengths scale with it.
    fn set_of(&self, steps: u64, arm: &Arm) -> Vec<String> {
        let t = &arm.spec.train;
        let scaled = |n: u64| (n as f64 * steps as f64 / t.steps as f64).round() as u64;
        let mut set = self.a.set.clone();
        set.push(format!("train.steps={steps}"));
        if let Schedule::Points(points) = &t.schedule {
            // Points of a short cell stay one after another.
            let mut next = 0;
            let each = points.iter().map(|(step, factor)| {
                let at = scaled(*step).max(next);
                next = at + 1;
                format!("[{at}, {factor}]")
            });
            set.push(format!("train.schedule=[{}]", each.collect::<Vec<_>>().join(", ")));
        }
        set.push(format!("train.warmup={}", scaled(t.warmup)));
        if t.evaluate.every > 0 {
            set.push(format!("train.evaluate.every={}", scaled(t.evaluate.every).max(1)));
        }
        if let Schedule::Wsd { decay, .. } = t.schedule {
            set.push(format!("train.schedule.decay={}", scaled(decay).max(1)));
        }
        set
    }

    /// The cells at which values of the sweep are tried, by number, each with how many.
    fn trials(&self, values: usize) -> Vec<(usize, usize)> {
        let mut found = vec![(0, values)];
        let Some((ladder, halving)) = self.suite.ladder.as_ref().and_then(|l| Some((l, l.halving?))) else {
            return found;
        };
        let cells = self.cells();
        let first = cells.first().and_then(|(size, _)| size.clone());
        let alike = |(_, (size, _)): &(usize, &(Option<Size>, Option<f64>))| {
            ladder.transfer.is_some() || *size == first
        };
        let mut left = values;
        for (at, _) in cells.iter().enumerate().filter(alike).skip(1) {
            left = left.div_ceil(halving.max(2) as usize);
            if left < 2 {
                break;
            }
            found.push((at, left));
        }
        found
    }

    /// How many trials each arm has at each cell, the carried rate's included.
    fn tries(&self, rungs: &[Rung], values: usize) -> HashMap<String, usize> {
        let cells = self.cells();
        let again = self.rechecks(&cells).map(|at| (at, 2));
        let all = self.trials(values).into_iter().chain(again);
        // Rungs of trunks stand between those of cells.
        let mut names =
            rungs.iter().map(|rung| &rung.cell.name).filter(|name| self.known.contains_key(*name));
        let names: Vec<&String> = names.by_ref().collect();
        let mut found = HashMap::new();
        for (at, n) in all {
            if let Some(name) = names.get(at) {
                *found.entry((*name).clone()).or_insert(0) += n;
            }
        }
        found
    }

    /// The number of the cell at which carried rates are tried again.
    fn rechecks(&self, cells: &[(Option<Size>, Option<f64>)]) -> Option<usize> {
        let asked = self.suite.ladder.as_ref().is_some_and(|ladder| ladder.recheck);
        cells.iter().position(|(size, _)| asked && *size != cells[0].0)
    }

    /// The points of the sweep's grid.
    fn grid(&self) -> Vec<Vec<(String, f64)>> {
        let mut grid = vec![vec![]];
        for (field, values) in &self.suite.sweep {
            let with = |point: &Vec<(String, f64)>, v: f64| {
                point.iter().cloned().chain([(field.clone(), v)]).collect::<Vec<_>>()
            };
            grid = grid.iter().flat_map(|p| values.iter().map(move |v| with(p, *v))).collect();
        }
        grid.retain(|point| !point.is_empty());
        grid
    }
}

/// The rule with the sizes of an arm at the smallest cell.
fn base(rule: TransferRule, arm: &Arm) -> Result<Transfer, Failure> {
    let (mut model, t) = (arm.spec.model.clone(), &arm.spec.train);
    let depth = Architecture::new(&model, None).map_err(|e| Failure::Error(e.to_string().into()))?.depth;
    let tokens = t.steps * t.batch * t.sequence.unwrap_or(model.context);
    let tokens = (rule == TransferRule::Hyperp).then_some(tokens);
    let passes = transfer::passes(&model.body);
    let mut listed = vec![];
    for (name, component) in &mut model.components {
        listed.extend(component.widths().iter().map(|(size, value)| (format!("{name}.{size}"), **value)));
    }
    for path in sizes(&mut model) {
        if let Ok(value) = field(&mut model, &path) {
            listed.push((path, *value));
        }
    }
    listed.retain(|(path, _)| path != "hidden");
    let (width, passes) = (model.hidden, (passes > 1).then_some(passes));
    Ok(Transfer { rule, width, depth, passes, tokens, sizes: listed.into_iter().collect() })
}

/// FLOPs of a training token.
fn trained(arm: &Arm) -> Result<f64, Failure> {
    let counts = count(&arm.spec, &Options::default())
        .map_err(|e| Failure::Error(format!("{}: {e}", arm.name).into()))?;
    Ok(counts.flops_per_token.training.mean())
}

fn label(values: &[(String, f64)]) -> String {
    let short =
        |(field, value): &(String, f64)| format!("{}-{value:e}", field.rsplit('.').next().unwrap_or(field));
    values.iter().map(short).collect::<Vec<_>>().join("-")
}

/// Whether a suite goes this way.
pub fn climbs(suite: &Suite) -> bool {
    !suite.sweep.is_empty() || suite.ladder.is_some()
}

/// Tunes and trains everything that is not trained yet, and writes the report.
pub fn run(a: &Asked, suite: Suite) -> Done {
    let folder = a.out.clone().unwrap_or_else(|| Path::new("runs").join(&suite.name));
    if Manifest::of(&folder)?.is_none() && study::Manifest::of(&folder)?.is_some() {
        return Err(Failure::Usage(format!(
            "{} is the folder of a comparison without sweep and ladder: it is left alone; choose another --out",
            folder.display()
        )));
    }
    let mut way = Way { a, suite, folder, known: HashMap::new(), bases: vec![] };
    let cells = way.cells();
    let first = way.rung(&cells[0], &|_| vec![])?;
    let rule = way.suite.ladder.as_ref().and_then(|ladder| ladder.transfer);
    if let Some(rule) = rule {
        way.bases = first.arms.iter().map(|arm| base(rule, arm)).collect::<Result<_, _>>()?;
    }
    let names: Vec<String> = first.arms.iter().map(|arm| arm.name.clone()).collect();
    let (seeds, grid) = (way.suite.seeds.clone(), way.grid());
    let trial = |arm: &String, values: &Vec<(String, f64)>| Trial {
        name: format!("{arm}.{}", label(values)),
        values: values.clone(),
    };
    let mut manifest = Manifest {
        suite: way.suite.name.clone(),
        arms: names.clone(),
        seeds: seeds.clone(),
        cells: vec![],
        trials: names.iter().map(|arm| grid.iter().map(|v| trial(arm, v)).collect()).collect(),
        chosen: vec![None; names.len()],
        stopped: vec![],
        transfer: match rule {
            None => "",
            Some(rule) => rule.word(),
        }
        .into(),
        halved: vec![],
        recheck: None,
    };
    let mut rungs = vec![];
    for cell in &cells {
        let rung = way.rung(cell, &|_| vec![])?;
        let known = |name: &String| rungs.iter().any(|r: &Rung| r.cell.name == *name);
        if rung.cell.trunk.as_ref().is_some_and(|(name, _)| !known(name)) {
            rungs.extend(Way::trunk(way.rung(cell, &|_| vec![])?));
        }
        manifest.cells.push(rung.cell.clone());
        rungs.push(rung);
    }
    let (arms, all) = (many(names.len() as u128, "arm"), many(cells.len() as u128, "cell"));
    say!("{}: {arms}, {all}, seeds {seeds:?}", manifest.suite)?;
    say!("{}", costs(&way, &rungs, grid.len())?)?;
    for rung in &rungs {
        agree(a, rung)?;
    }
    // A field that no arm has, or a value that none takes, is refused before anything is written.
    grid.iter().try_for_each(|values| way.rung(&cells[0], &|_| values.clone()).map(drop))?;
    warn_of(&rungs);
    if a.dry_run {
        return Ok(());
    }
    fs::create_dir_all(&way.folder).map_err(|e| files::about(&way.folder, e))?;
    manifest.write(&way.folder)?;
    let mut count = Count { done: 0, weights: weights(&manifest, &way.folder) };
    let mut chosen: Chosen = vec![vec![]; names.len()];
    if !grid.is_empty() {
        chosen = tune(&mut way, &mut manifest, &mut count)?;
    }
    let mut trunks = HashSet::new();
    for (i, cell) in cells.iter().enumerate() {
        let mut rung = way.rung(cell, &|arm| chosen[arm].clone())?;
        rung.arms.retain(|arm| !manifest.stopped.contains(&arm.name));
        let path = way.folder.join(&rung.cell.name);
        leave(a, &path, &rung)?;
        let trunk = rung.cell.trunk.as_ref().map(|(name, at)| (way.folder.join(name), *at));
        if let Some((path, _)) = &trunk
            && let Some(mut long) = Way::trunk(way.rung(cell, &|arm| chosen[arm].clone())?)
        {
            long.arms.retain(|arm| !manifest.stopped.contains(&arm.name));
            leave(a, path, &long)?;
            if trunks.insert(path.clone()) {
                train(a, path, &long.arms, &seeds, &mut count, None)?;
            }
        }
        let trunk = trunk.as_ref().map(|(path, at)| (path.as_path(), *at));
        train(a, &path, &rung.arms[..1], &seeds, &mut count, trunk)?;
        let losses = losses(&path, &names[0], &seeds)?;
        if let Some(least) = noise(&losses, names.len() - 1) {
            say!("{}: {least}", rung.cell.name)?;
        }
        train(a, &path, &rung.arms[1..], &seeds, &mut count, trunk)?;
        if way.rechecks(&cells) == Some(i) {
            recheck(&mut way, cell, &chosen, &mut manifest, &mut count)?;
        }
        page::page(&study::Study::read(&path)?).write(&path, "report")?;
        if i == 1 && way.suite.ladder.as_ref().is_some_and(|l| l.gate) {
            let two = [&manifest.cells[0].name, &manifest.cells[1].name].map(|c| way.folder.join(c));
            for arm in &names[1..] {
                if behind(&two[0], &names[0], arm, &seeds)? && behind(&two[1], &names[0], arm, &seeds)? {
                    note!(
                        "{arm} is worse than the baseline by more than the noise at both of the smallest cells: it stops here"
                    );
                    manifest.stopped.push(arm.clone());
                }
            }
            manifest.write(&way.folder)?;
            count.weights = weights(&manifest, &way.folder);
        }
    }
    let climb = rungs::Climb::read(&way.folder)?;
    rungs::write(&climb, &way.folder)?;
    say!("\n{}\n", rungs::summary(&climb))?;
    Ok(say!("the report is {}", way.folder.join("report.html").display())?)
}

/// Says once what the rule of a `transfer` does not know of the arms.
fn warn_of(rungs: &[Rung]) {
    let mut said = HashSet::new();
    for arm in rungs.iter().flat_map(|rung| &rung.arms) {
        let mut found = transfer::findings(&arm.spec);
        found.retain(|d| said.insert((arm.name.clone(), d.message.clone())));
        warn(&arm.spec.sources, found);
    }
}

/// Trains the trials of the sweep and chooses one for each arm: at the smallest cell all of them,
/// at later ones those that are left by `halving`.
fn tune(way: &mut Way, manifest: &mut Manifest, count: &mut Count) -> Result<Chosen, Failure> {
    let (cells, grid) = (way.cells(), way.grid());
    let (names, seed) = (manifest.arms.clone(), manifest.seeds[..1].to_vec());
    let mut left: Vec<Vec<usize>> = vec![(0..grid.len()).collect(); names.len()];
    let mut folder = way.folder.join(SWEEP);
    for (k, (at, _)) in way.trials(grid.len()).into_iter().enumerate() {
        if k > 0 {
            let halved = Halved { cell: manifest.cells[at].name.clone(), trials: left.clone() };
            folder = way.folder.join(halved.folder());
            manifest.halved.push(halved);
            manifest.write(&way.folder)?;
            count.weights = weights(manifest, &way.folder);
        }
        let mut trials = way.rung(&cells[at], &|_| vec![])?;
        trials.arms.clear();
        for (number, values) in grid.iter().enumerate() {
            for (i, mut arm) in way.rung(&cells[at], &|_| values.clone())?.arms.into_iter().enumerate() {
                if left[i].contains(&number) {
                    arm.name.clone_from(&manifest.trials[i][number].name);
                    trials.arms.push(arm);
                }
            }
        }
        leave(way.a, &folder, &trials)?;
        train(way.a, &folder, &trials.arms, &seed, count, None)?;
        let Some((_, next)) = way.trials(grid.len()).get(k + 1).copied() else { break };
        for (i, own) in left.iter_mut().enumerate() {
            *own = ranked(&folder, &manifest.trials[i], own, seed[0])?;
            own.truncate(next);
            own.sort_unstable();
        }
    }
    let mut chosen = vec![];
    for (i, name) in names.iter().enumerate() {
        let best = choose(&way.suite, &folder, name, (&manifest.trials[i], &left[i]), seed[0])?;
        chosen.push(manifest.trials[i][best].values.clone());
        manifest.chosen[i] = Some(best);
        say!("{name} goes on with {}", label(&chosen[i]))?;
    }
    manifest.write(&way.folder)?;
    Ok(chosen)
}

/// Trials that came to an end, the best first.
fn ranked(folder: &Path, trials: &[Trial], left: &[usize], seed: u64) -> Result<Vec<usize>, Failure> {
    let mut found: Vec<(usize, f64)> = vec![];
    for &k in left {
        found.extend(losses(folder, &trials[k].name, &[seed])?.first().map(|loss| (k, *loss)));
    }
    found.sort_by(|a, b| a.1.total_cmp(&b.1));
    Ok(found.into_iter().map(|(k, _)| k).collect())
}

/// Tries half and twice of the rate that each arm carries to a cell, and says what it lost.
fn recheck(
    way: &mut Way,
    cell: &(Option<Size>, Option<f64>),
    chosen: &Chosen,
    manifest: &mut Manifest,
    count: &mut Count,
) -> Done {
    let mut rung = way.rung(cell, &|arm| chosen[arm].clone())?;
    let rates: Vec<f64> = rung.arms.iter().map(|arm| arm.spec.train.learning_rate).collect();
    let found = Recheck { cell: rung.cell.name.clone(), rates };
    let mut trials = vec![];
    for by in 0..2 {
        let other = |arm: usize| {
            let [trial, twice] = found.trials("", found.rates[arm]);
            let own = if by == 0 { trial } else { twice };
            let kept = chosen[arm].iter().filter(|(field, _)| field != RATE).cloned();
            kept.chain(own.values).collect()
        };
        for (i, mut arm) in way.rung(cell, &other)?.arms.into_iter().enumerate() {
            if !manifest.stopped.contains(&arm.name) {
                arm.name = found.trials(&arm.name, found.rates[i])[by].name.clone();
                trials.push(arm);
            }
        }
    }
    rung.arms = trials;
    let folder = way.folder.join(found.folder());
    manifest.recheck = Some(found);
    manifest.write(&way.folder)?;
    count.weights = weights(manifest, &way.folder);
    leave(way.a, &folder, &rung)?;
    train(way.a, &folder, &rung.arms, &manifest.seeds[..1], count, None)?;
    for line in lost(manifest, &way.folder)? {
        say!("{}", line.said())?;
    }
    Ok(())
}

/// A carried rate against its half and its double.
pub struct Lost {
    /// The arm.
    pub arm: String,
    /// The rate that it carries.
    pub rate: f64,
    /// Held-out losses at half of it, at it, and at twice of it; none of a run that has none.
    pub losses: [Option<f64>; 3],
}

impl Lost {
    /// By how much the best of the three is better than the carried rate.
    pub fn nats(&self) -> Option<f64> {
        let best = self.losses.iter().flatten().copied().fold(f64::INFINITY, f64::min);
        self.losses[1].map(|own| own - best)
    }

    /// In words.
    pub fn said(&self) -> String {
        match self.nats() {
            Some(0.0) => format!(
                "{}: the carried rate {:e} is the best of three: nothing was lost",
                self.arm, self.rate
            ),
            Some(lost) => {
                let half = self.losses[0]
                    .is_some_and(|own| self.losses[1].is_some_and(|carried| carried - own == lost));
                let better = if half { "half of it" } else { "twice of it" };
                format!("{}: the carried rate {:e} loses {lost:.4} nats to {better}", self.arm, self.rate)
            }
            None => format!("{}: the carried rate {:e} came to no finite loss", self.arm, self.rate),
        }
    }
}

/// Losses of carried rates that were tried again.
pub fn lost(manifest: &Manifest, folder: &Path) -> Result<Vec<Lost>, Failure> {
    let (Some(recheck), Some(&seed)) = (&manifest.recheck, manifest.seeds.first()) else { return Ok(vec![]) };
    let mut found = vec![];
    for (arm, &rate) in manifest.arms.iter().zip(&recheck.rates) {
        let own = |at: &str, name: &str| -> Result<Option<f64>, Failure> {
            Ok(losses(&folder.join(at), name, &[seed])?.first().copied())
        };
        let [half, twice] = recheck.trials(arm, rate);
        let losses = [
            own(&recheck.folder(), &half.name)?,
            own(&recheck.cell, arm)?,
            own(&recheck.folder(), &twice.name)?,
        ];
        if losses.iter().any(Option::is_some) {
            found.push(Lost { arm: arm.clone(), rate, losses });
        }
    }
    Ok(found)
}

struct Count {
    done: usize,
    /// Of all runs, in the order of training.
    weights: Vec<f64>,
}

impl Count {
    /// How long the runs after the next `next` take, in the time of the first of these.
    fn later(&self, next: usize) -> f64 {
        let own = self.weights.get(self.done).copied().unwrap_or(1.0);
        self.weights.iter().skip(self.done + next).sum::<f64>() / own
    }
}

fn weights(manifest: &Manifest, folder: &Path) -> Vec<f64> {
    manifest.runs(folder).into_iter().map(|run| run.weight).collect()
}

/// Trains the runs of a comparison; a run that fails is an error once all others are trained.
fn train(
    a: &Asked,
    folder: &Path,
    arms: &[Arm],
    seeds: &[u64],
    count: &mut Count,
    trunk: Option<(&Path, u64)>,
) -> Done {
    let plan = training::Plan {
        folder,
        seeds,
        device: &a.device,
        rewriting: &a.rewriting,
        jobs: a.at_once(),
        devices: &a.devices,
        worker: a.worker,
        force: a.force,
        numbers: (count.done, count.weights.len()),
        later: count.later(arms.len() * seeds.len()),
        trunk,
    };
    training::check(arms, &plan)?;
    let found = training::train(arms, &plan);
    count.done += arms.len() * seeds.len();
    if let Some(signal) = found.stopped {
        say!("{signal}: stopped; the same command goes on")?;
        return Err(Failure::Stopped(signal));
    }
    // A trial at too high a rate may fail: it is the worst of its arm.
    let tries = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let tries = tries == SWEEP || tries.starts_with("sweep.") || tries.starts_with("recheck.");
    if !found.failed.is_empty() && !tries {
        let names: Vec<&str> = found.failed.iter().map(|(name, _)| name.as_str()).collect();
        return Err(Failure::Error(
            format!("{} failed: {}", many(names.len() as u128, "run"), names.join("; ")).into(),
        ));
    }
    Ok(())
}

/// Leaves the manifest of a comparison and the specifications of its arms.
fn leave(a: &Asked, folder: &Path, rung: &Rung) -> Done {
    fs::create_dir_all(folder).map_err(|e| files::about(folder, e))?;
    let names = rung.arms.iter().map(|arm| arm.name.clone()).collect();
    study::Manifest::new(&rung.suite, &a.suite, &rung.set, names)?.write(folder)?;
    for arm in &rung.arms {
        let text = resolved(&arm.spec);
        files::write_atomic(&spec_file(folder, &arm.name), |out| out.write_all(text.as_bytes()))?;
    }
    Ok(())
}

/// Refuses a cell whose arms do not agree.
fn agree(a: &Asked, rung: &Rung) -> Done {
    let mut facts = vec![];
    for arm in &rung.arms {
        facts.push(before(arm, &rung.arms[0].spec, &rung.suite.seeds)?);
    }
    let mut broken = vec![];
    for (arm, of) in rung.arms.iter().zip(&facts).skip(1) {
        let base = (&rung.arms[0].spec, &facts[0]);
        let found = agreement::compare(&rung.suite.equal, base, (&arm.spec, of));
        broken.extend(found.into_iter().filter(|c| !c.agrees).map(|c| (arm.name.as_str(), c)));
    }
    // The report of a ladder marks no arm, so that losses of other questions are never in it.
    let advice = agreement::advice(broken.iter().map(|(_, c)| c));
    if broken.is_empty() || (a.allow_unequal && advice.is_empty()) {
        return Ok(());
    }
    let text = disagreements(&broken);
    Err(Failure::Error(
        format!(
            "in the cell {} the arms do not agree in what the suite says must be equal; nothing was trained\n\n{text}{}",
            rung.cell.name,
            remedies(&broken)
        )
        .into(),
    ))
}

/// The grid with its cost: FLOPs as counted, hours at the rate of three steps of each arm at each
/// size here, or at the one given.
fn costs(way: &Way, rungs: &[Rung], trials: usize) -> Result<String, Failure> {
    let device = way.a.device.open()?;
    let rewriting = way.a.rewriting.on(device.as_ref())?;
    let head =
        ["cell", "arm", "parameters", "steps", "tokens", "FLOPs a run", "runs", "hours a run", "trained"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let (mut flops, mut hours, mut runs) = (0.0, 0.0, 0);
    let tries = way.tries(rungs, trials);
    let mut tuning: IndexMap<String, Tuning> = IndexMap::new();
    let mut rates: HashMap<(Option<String>, String), f64> = HashMap::new();
    for rung in rungs {
        for (arm, each) in rung.arms.iter().zip(&rung.flops) {
            let t = &arm.spec.train;
            let sequence = t.sequence.unwrap_or(arm.spec.model.context);
            // A branch trains the steps after its trunk; a trial is a whole run.
            let own = rung.cell.steps - rung.cell.trunk.as_ref().map_or(0, |(_, at)| *at);
            let tokens = own * t.batch * sequence;
            let whole = rung.cell.steps as f64 / own as f64;
            let key = (rung.cell.size.clone(), arm.name.clone());
            let rate = match (rates.get(&key), way.a.rate) {
                (Some(rate), _) => *rate,
                (None, Some(rate)) => rate / each,
                (None, None) => {
                    let batch = (t.batch / t.accumulate, sequence);
                    let found = bench::training(&arm.spec, device.as_ref(), batch, 3, &rewriting)
                        .map_err(|e| Failure::Error(e.to_string().into()))?;
                    rates.insert(key, found.tokens_per_second);
                    found.tokens_per_second
                }
            };
            let tried = tries.get(&rung.cell.name).copied().unwrap_or(0);
            let many = way.suite.seeds.len() + tried;
            let weight = way.suite.seeds.len() as f64 + whole * tried as f64;
            let (cost, time) = (each * tokens as f64, tokens as f64 / rate / 3600.0);
            let path = way.folder.join(&rung.cell.name);
            let done = losses(&path, &arm.name, &way.suite.seeds)?.len();
            let parameters = dreamc_compiler::count::figures(&arm.spec.model, t.precision, 1)
                .map_err(|e| Failure::Error(e.to_string().into()))?
                .parameters;
            (flops, hours, runs) = (flops + weight * cost, hours + weight * time, runs + many);
            // Costs of a trunk are in its branches' trials, which are whole runs.
            if way.known.contains_key(&rung.cell.name) {
                let own = tuning.entry(arm.name.clone()).or_default();
                own.add(whole * cost, whole * time, tried);
            }
            rows.push(vec![
                rung.cell.name.clone(),
                arm.name.clone(),
                short(parameters as f64),
                own.to_string(),
                grouped(tokens.into()),
                format!("{cost:.3e}"),
                many.to_string(),
                format!("{time:.3}"),
                done.to_string(),
            ]);
        }
    }
    let total = format!(
        "{}\n{}, {flops:.3e} FLOPs, {} at the rate{} ({} an arm in the first cell)",
        table(&rows),
        many(runs as u128, "run"),
        duration(3600.0 * hours),
        if way.a.rate.is_some() { " given" } else { "s measured here" },
        many(trials as u128, "trial")
    );
    if trials == 0 {
        return Ok(total);
    }
    Ok(format!("{total}\n\n{}", tuned(&tuning, trials, way.suite.ladder.as_ref())))
}

/// Costs of tuning an arm.
#[derive(Clone, Default)]
struct Tuning {
    /// Trials at each cell that has any.
    trials: Vec<usize>,
    /// FLOPs and hours of all of them.
    planned: (f64, f64),
    /// Those of one trial at every cell.
    every: (f64, f64),
}

impl Tuning {
    fn add(&mut self, flops: f64, hours: f64, trials: usize) {
        self.every = (self.every.0 + flops, self.every.1 + hours);
        let n = trials as f64;
        self.planned = (self.planned.0 + n * flops, self.planned.1 + n * hours);
        self.trials.extend((trials > 0).then_some(trials));
    }
}

/// The tuning of each arm as it is planned, and as it would be at every cell.
fn tuned(tuning: &IndexMap<String, Tuning>, trials: usize, ladder: Option<&Ladder>) -> String {
    let head = ["tuning of", "trials", "FLOPs", "hours", "FLOPs at every cell", "hours", "less by"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let n = trials as f64;
    for (arm, own) in tuning {
        rows.push(vec![
            arm.clone(),
            own.trials.iter().map(usize::to_string).collect::<Vec<_>>().join(" + "),
            format!("{:.3e}", own.planned.0),
            format!("{:.3}", own.planned.1),
            format!("{:.3e}", n * own.every.0),
            format!("{:.3}", n * own.every.1),
            format!("{:.1}", n * own.every.0 / own.planned.0),
        ]);
    }
    let mut how = match ladder.and_then(|l| l.transfer) {
        Some(rule) => format!("tuned at the first cell and carried by `{}`", rule.word()),
        None => "tuned at the first cell; no rule carries the rate to the others".into(),
    };
    if let Some(halving) = ladder.and_then(|l| l.halving) {
        how += &format!("; one trial in {halving} goes on to the next cell");
    }
    if ladder.is_some_and(|l| l.recheck) {
        how += "; two more try the carried rate at another size";
    }
    format!("{}\n{how}", table(&rows))
}

/// Held-out losses of an arm at the ends of its runs.
pub fn losses(folder: &Path, arm: &str, seeds: &[u64]) -> Result<Vec<f64>, Failure> {
    let mut found = vec![];
    for &seed in seeds {
        let run = ledger(&run_folder(folder, arm, seed))?.filter(study::ended);
        found.extend(run.and_then(|l| l.validation_loss).filter(|l| l.is_finite()));
    }
    Ok(found)
}

/// The difference that the noise of the baseline lets one detect, in words.
pub fn noise(losses: &[f64], arms: usize) -> Option<String> {
    let s = Summary::of(losses)?;
    let Some(deviation) = s.deviation else {
        return Some("one seed of the baseline shows no noise: no difference can be told from it".into());
    };
    let least = detectable(deviation, s.n, arms.max(1))?;
    let over = if arms > 1 { format!(" over {arms} arms") } else { String::new() };
    Some(format!(
        "the losses of the baseline's {} seeds have a standard deviation of {deviation:.4} nats: a test at 5 %{over} detects a difference of \
         {least:.4} nats with probability 0.8",
        s.n
    ))
}

/// Whether an arm is worse than the baseline by more than the noise of the baseline.
fn behind(folder: &Path, baseline: &str, arm: &str, seeds: &[u64]) -> Result<bool, Failure> {
    let (base, own) = (losses(folder, baseline, seeds)?, losses(folder, arm, seeds)?);
    let (Some(b), Some(o)) = (Summary::of(&base), Summary::of(&own)) else { return Ok(false) };
    let Some(deviation) = b.deviation else { return Ok(false) };
    let half = student_quantile(0.975, b.n as f64 - 1.0) * deviation * (2.0 / b.n as f64).sqrt();
    Ok(o.mean - b.mean > half)
}

/// The best trial of an arm, of those that are left.
fn choose(
    suite: &Suite,
    sweep: &Path,
    arm: &str,
    (trials, left): (&[Trial], &[usize]),
    seed: u64,
) -> Result<usize, Failure> {
    let Some(&best) = ranked(sweep, trials, left, seed)?.first() else {
        return Err(Failure::Error(format!("{arm}: no trial came to a finite held-out loss").into()));
    };
    for ((field, values), (_, value)) in suite.sweep.iter().zip(&trials[best].values) {
        let (first, last) = (values.first(), values.last());
        if suite.sweep_edge || !(first == Some(value) || last == Some(value)) {
            continue;
        }
        // One step further on a scale of ratios.
        let next = match values[..] {
            [low, second, ..] if first == Some(value) => low * low / second,
            [.., second, high] => high * high / second,
            _ => 2.0 * value,
        };
        return Err(Failure::Error(
            format!(
                "{arm}: the best `{field}` of the sweep is {value}, {} of its values: a better one may stand outside. Add {next:.3e} to \
                 the sweep (trials that are trained stay), or write `sweep_edge: allow`",
                if first == Some(value) { "the least" } else { "the largest" }
            )
            .into(),
        ));
    }
    Ok(best)
}
