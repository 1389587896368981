//! The folder of a comparison, read.
//!
//! | entry | content |
//! |---|---|
//! | `compare.json` | the suite, its arms, and where their runs are |
//! | `{arm}.yaml` | the specification of an arm, every default and matched value filled in |
//! | `{arm}-seed{n}/` | a run folder, see [`dreamc_runtime::train::folder`] |
//! | `report.html`, `report.md`, `figures/` | the report |

use super::agreement::{Comparison, Facts, compare};
use super::arms::check_name;
use crate::failure::{Done, Failure};
use crate::spec;
use dreamc_data::files;
use dreamc_dsl::suite::Suite;
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::train::ledger::Ledger;
use dreamc_runtime::train::metrics::Metrics;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

const MANIFEST: &str = "compare.json";

/// `compare.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name of the suite.
    pub suite: String,
    /// Its file's name and text, and what `--set` changed.
    pub file: String,
    /// Its text.
    pub text: String,
    /// Changes to it.
    pub set: Vec<String>,
    /// Every arm is trained once for each.
    pub seeds: Vec<u64>,
    /// Names of the arms, the baseline first.
    pub arms: Vec<String>,
}

impl Manifest {
    /// Of a suite that was read from a file.
    pub fn new(suite: &Suite, file: &Path, set: &[String], arms: Vec<String>) -> Result<Self, Failure> {
        let ast = dreamc_dsl::parse_file(file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        Ok(Manifest {
            suite: suite.name.clone(),
            // Its ending is all that says how the text is spelled.
            file: match ast.spelling {
                Spelling::Dream if !name.ends_with(".dream") => "standard-input.dream".into(),
                _ => name.into_owned(),
            },
            text: ast.source.text,
            set: set.to_vec(),
            seeds: suite.seeds.clone(),
            arms,
        })
    }

    /// That of a folder; `None` where the folder is free: not there, or empty.
    pub fn of(folder: &Path) -> Result<Option<Self>, Failure> {
        let entries = match fs::read_dir(folder) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(|e| files::about(folder, e))?,
        };
        // Another worker may be about to write its manifest.
        let unfinished = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with(files::TEMPORARY);
        let used = entries.flatten().find(|e| !unfinished(e));
        // Looked for after the listing: it is written first, so it is there where anything else is.
        let path = folder.join(MANIFEST);
        if path.is_file() {
            return Ok(Some(Self::read(&path)?));
        }
        match used {
            None => Ok(None),
            Some(entry) => Err(Failure::Usage(format!(
                "{} holds {} and is not the folder of a comparison: it is left alone; choose another --out",
                folder.display(),
                entry.file_name().display()
            ))),
        }
    }

    fn read(path: &Path) -> Result<Self, Failure> {
        let text = files::read_text(path).map_err(|e| files::about(path, e))?;
        serde_json::from_str(&text)
            .map_err(|e| Failure::Usage(format!("{}: not a comparison: {e}", path.display())))
    }

    /// Writes it.
    pub fn write(&self, folder: &Path) -> Done {
        let text = serde_json::to_string_pretty(self)? + "\n";
        Ok(files::write_atomic(&folder.join(MANIFEST), |out| out.write_all(text.as_bytes()))?)
    }
}

/// Kinds of folders that hold runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// A run itself.
    Run,
    /// The runs of a suite.
    Comparison,
    /// The runs of a ladder.
    Ladder,
    /// The runs of an exam.
    Exam,
}

impl Holds {
    /// That of a folder; nothing where the folder is no such one.
    pub fn of(folder: &Path) -> Option<Holds> {
        let has = |name: &str| folder.join(name).is_file();
        match () {
            () if has("ledger.json") || has("metrics.jsonl") => Some(Holds::Run),
            () if has(super::exam::MANIFEST) => Some(Holds::Exam),
            () if has(super::ladder::MANIFEST) => Some(Holds::Ladder),
            () if has(MANIFEST) => Some(Holds::Comparison),
            () => None,
        }
    }

    /// A word for it.
    pub fn word(self) -> &'static str {
        match self {
            Holds::Run => "run",
            Holds::Comparison => "comparison",
            Holds::Ladder => "ladder",
            Holds::Exam => "exam",
        }
    }
}

/// Folders of folders are looked into to this depth: from the folder that has `runs`, the runs of
/// an exam stand four below it.
const DEPTH: usize = 5;

/// Shows every run, comparison, ladder and exam in a folder and below, but for comparisons in those
/// of others. Hidden folders, links and folders that cannot be read are left out.
pub fn walk(folder: &Path, seen: &mut dyn FnMut(&Path, Holds)) {
    below(folder, DEPTH, false, seen);
}

fn below(folder: &Path, depth: usize, held: bool, seen: &mut dyn FnMut(&Path, Holds)) {
    let holds = Holds::of(folder);
    if let Some(holds) = holds.filter(|holds| *holds == Holds::Run || !held) {
        seen(folder, holds);
    }
    if holds == Some(Holds::Run) || depth == 0 {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            below(&entry.path(), depth - 1, held || holds.is_some(), seen);
        }
    }
}

/// A run of a comparison, begun or not.
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its training FLOPs over those of the others.
    pub weight: f64,
}

/// The runs of a comparison in the order they are trained; `None` where the folder is not a
/// comparison's.
pub fn runs(folder: &Path) -> Result<Option<Vec<Listed>>, Failure> {
    if let Some(exam) = super::exam::Manifest::of(folder)? {
        return Ok(Some(exam.runs(folder)?));
    }
    if let Some(ladder) = super::ladder::Manifest::of(folder)? {
        return Ok(Some(ladder.runs(folder)));
    }
    if !folder.join(MANIFEST).is_file() {
        return Ok(None);
    }
    let manifest = Manifest::read(&folder.join(MANIFEST))?;
    let mut all = vec![];
    let (first, rest) = manifest.arms.split_at(manifest.arms.len().min(1));
    for arms in [first, rest] {
        for seed in &manifest.seeds {
            for arm in arms {
                check_name(arm)?;
                let (name, path) = (format!("{arm}, seed {seed}"), run_folder(folder, arm, *seed));
                all.push(Listed { name, path, weight: 1.0 });
            }
        }
    }
    Ok(Some(all))
}

/// The folder of a run.
pub fn run_folder(study: &Path, arm: &str, seed: u64) -> PathBuf {
    study.join(format!("{arm}-seed{seed}"))
}

/// The specification of an arm.
pub fn spec_file(study: &Path, arm: &str) -> PathBuf {
    study.join(format!("{arm}.yaml"))
}

/// The account of a run, where there is one.
pub fn ledger(folder: &Path) -> Result<Option<Ledger>, Failure> {
    let path = folder.join("ledger.json");
    if !path.is_file() {
        return Ok(None);
    }
    let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
    let ledger = serde_json::from_str(&text)
        .map_err(|e| Failure::Error(format!("{}: not a ledger: {e}", path.display()).into()))?;
    Ok(Some(ledger))
}

/// Whether all steps of a run were taken.
pub fn ended(ledger: &Ledger) -> bool {
    matches!(ledger.status.as_str(), "finished" | "stopped early")
}

/// A comparison as it stands.
pub struct Study {
    /// Name of the suite.
    pub name: String,
    /// Seeds.
    pub seeds: Vec<u64>,
    /// The arms, the baseline first.
    pub arms: Vec<Arm>,
}

/// An arm and its runs.
pub struct Arm {
    /// Its name.
    pub name: String,
    /// Its specification.
    pub spec: Spec,
    /// Its runs by seed; `None` where one has not begun.
    pub runs: Vec<Option<Run>>,
    /// How it compares with the baseline in what must be equal; empty for the baseline.
    pub agreement: Vec<Comparison>,
}

/// A run.
pub struct Run {
    /// Its account.
    pub ledger: Ledger,
    /// Its measurements.
    pub metrics: Metrics,
}

impl Run {
    /// Whether all its steps were taken.
    pub fn ended(&self) -> bool {
        ended(&self.ledger)
    }
}

impl Arm {
    /// Runs that came to their end.
    pub fn ended(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().flatten().filter(|r| r.ended())
    }

    /// Whether it agrees with the baseline.
    pub fn agrees(&self) -> bool {
        self.agreement.iter().all(|c| c.agrees)
    }

    /// FLOPs of a generated token at the shares of tokens that its routers let through: the mean
    /// over the runs that came to their end.
    pub fn flops_processed(&self) -> Option<f64> {
        let all: Option<Vec<f64>> = self.ended().map(|r| r.ledger.processed_flops_per_token).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum::<f64>() / all.len() as f64)
    }

    /// Quantities that must be equal, from the ledgers of the runs with these numbers.
    fn facts(&self, runs: &[usize]) -> Facts {
        let t = &self.spec.train;
        let planned = t.steps * t.batch * t.sequence.unwrap_or(self.spec.model.context);
        let runs: Vec<&Run> = runs.iter().filter_map(|&i| self.runs[i].as_ref()).collect();
        let first = runs.first().map(|r| &r.ledger);
        Facts {
            flops: first.and_then(|l| l.decode_flops_per_token),
            flops_processed: self.flops_processed(),
            ended: !runs.is_empty() && runs.iter().all(|r| r.ended()),
            training: first.and_then(|l| l.training_flops_per_token()),
            budget: first.and_then(|l| Some(l.training_flops_per_token()? * planned as f64)),
            donor: first.and_then(|l| l.donor_flops.map(|flops| flops as f64)),
            parameters: first.map(|l| l.parameters as f64),
            memory: first.and_then(|l| l.generation_memory.map(|m| m as f64)),
            // A run that is not at its end has yet to read the rest.
            tokens: runs.iter().map(|r| if r.ended() { r.ledger.tokens } else { planned }).collect(),
            data: runs.iter().map(|r| r.ledger.data_hash.clone()).collect(),
            tokenizer: runs.iter().map(|r| r.ledger.tokenizer_hash.clone()).collect(),
            seeds: runs.iter().map(|r| r.ledger.seed).collect(),
        }
    }
}

impl Study {
    /// Reads the folder of a comparison.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let path = folder.join(MANIFEST);
        if !path.is_file() {
            return Err(Failure::Usage(format!(
                "{} is not the folder of a comparison: it has no {MANIFEST}; `dreamc compare SUITE --out FOLDER` makes one",
                folder.display()
            )));
        }
        let manifest = Manifest::read(&path)?;
        let ast = dreamc_dsl::parse(&manifest.file, &manifest.text, Spelling::of(&manifest.file))?;
        let (suite, _) = dreamc_dsl::check_suite(&ast, &manifest.set)?;
        let mut arms = vec![];
        for name in &manifest.arms {
            check_name(name)?;
            let path = spec_file(folder, name);
            let text = files::read_text(&path).map_err(|e| files::about(&path, e))?;
            let spec = spec::parse(&path.display().to_string(), &text, &[])?;
            let mut runs = vec![];
            for &seed in &manifest.seeds {
                let folder = run_folder(folder, name, seed);
                runs.push(match ledger(&folder)? {
                    None => None,
                    Some(ledger) => {
                        // A run that was killed before its first step has measured nothing.
                        let path = folder.join("metrics.jsonl");
                        let metrics = if path.is_file() { Metrics::read(&path)? } else { Metrics::default() };
                        Some(Run { ledger, metrics })
                    }
                });
            }
            arms.push(Arm { name: name.clone(), spec, runs, agreement: vec![] });
        }
        if arms.is_empty() {
            return Err(Failure::Error(format!("{}: names no arms", path.display()).into()));
        }
        for i in 1..arms.len() {
            // Nothing is known of what has not begun.
            let begun = |s: &usize| arms[0].runs[*s].is_some() && arms[i].runs[*s].is_some();
            let both: Vec<usize> = (0..manifest.seeds.len()).filter(begun).collect();
            if !both.is_empty() {
                let (baseline, arm) = (arms[0].facts(&both), arms[i].facts(&both));
                arms[i].agreement = compare(&suite.equal, (&arms[0].spec, &baseline), (&arms[i].spec, &arm));
            }
        }
        Ok(Study { name: manifest.suite, seeds: manifest.seeds, arms })
    }
}
