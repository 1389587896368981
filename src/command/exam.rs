//! `dreamc exam`: what architectures can do, by generated tasks.

use crate::command::compare::jobs;
use crate::compare::exam;
use crate::compare::exam::cost;
use crate::device::DeviceArguments;
use crate::failure::{Done, Failure};
use crate::rewriting::RewriteArguments;
use clap::{Args, value_parser};
use dreamc_dsl::spec::TaskKind;
use std::path::{Path, PathBuf};

/// Train specifications on a battery of generated tasks, and report what each can do
#[derive(Args)]
#[command(after_help = "\
Matches the other specifications to the baseline in FLOPs and parameters, measures a few steps of each task, says how long all
will take, and trains every arm on every task with every seed. A task is a suite in the folder of the exam, which `dreamc
compare` runs, too. Give the command again to go on: what is trained already is left as it is.

Examples:
  dreamc exam la.yaml dr.yaml                                 six tasks, three seeds, ten minutes
  dreamc exam dr.yaml --baseline la.yaml --budget 2h          with two hours every arm tunes its rate
  dreamc exam la.yaml dr.yaml --tasks mqar,symmetric --dry-run
  dreamc data show mqar                                       a task and its problems")]
pub struct Arguments {
    /// Specifications, the baseline first; or the folder of an exam, to go on with it
    #[arg(value_name = "SPEC", required = true)]
    specs: Vec<PathBuf>,

    /// The specification that the others are matched to; the first by default
    #[arg(long, value_name = "SPEC")]
    baseline: Option<PathBuf>,

    /// Time of all runs together, as measured on this machine: `90s`, `10m`, `1.5h`
    #[arg(long, value_name = "TIME", value_parser = cost::seconds, default_value = "10m")]
    pub budget: f64,

    /// Steps of every run, in place of those that the time allows
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(cost::FEWEST..=1_000_000_000), conflicts_with = "budget")]
    pub steps: Option<u64>,

    /// Train every arm with the seeds 0 to N - 1
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u64).range(1..=1024))]
    pub seeds: u64,

    /// The tasks, as `data: {task: …}` names them; six that differ in what they ask by default
    #[arg(long, value_name = "TASK,…", value_delimiter = ',', value_parser = task)]
    pub tasks: Vec<TaskKind>,

    /// The learning rates that every arm tries, least first; with one, all train at that
    #[arg(long, value_name = "RATE,…", value_delimiter = ',', value_parser = rate)]
    pub rates: Vec<f64>,

    /// Folder of the exam and its report; `runs/exam-NAMES` by default
    #[arg(short, long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Runs trained at once; they share the threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = jobs)]
    pub jobs: usize,

    /// Do not match the arms, and train them though they do not agree; they are marked in every
    /// table
    #[arg(long)]
    pub allow_unequal: bool,

    /// Match, check, measure and say how long all takes; train nothing
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub device: DeviceArguments,

    #[command(flatten)]
    pub rewriting: RewriteArguments,
}

impl Arguments {
    /// The specifications, the baseline first, wherever the suites stand that name them.
    pub fn arms(&self) -> Result<Vec<PathBuf>, Failure> {
        let all = self.baseline.iter().chain(&self.specs);
        Ok(all.map(std::path::absolute).collect::<Result<_, _>>()?)
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

fn task(text: &str) -> Result<TaskKind, String> {
    let named = |kind: &&TaskKind| kind.facts().name == text;
    TaskKind::ALL.iter().find(named).copied().ok_or_else(|| {
        let names: Vec<&str> = TaskKind::ALL.iter().map(|kind| kind.facts().name).collect();
        format!("there is no such task; there are {}", names.join(", "))
    })
}

fn rate(text: &str) -> Result<f64, String> {
    let found = text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
    found.ok_or_else(|| "write a rate above 0, as 4e-3".into())
}

pub fn run(mut a: Arguments) -> Done {
    let mut seen = vec![];
    for kind in &a.tasks {
        if seen.contains(kind) {
            return Err(Failure::Usage(format!("--tasks names {} twice", kind.facts().name)));
        }
        seen.push(*kind);
    }
    a.rates.sort_by(f64::total_cmp);
    a.rates.dedup();
    exam::run(&a)
}
