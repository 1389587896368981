//! `dreamc exam`: what architectures can do, by generated tasks.

use crate::arguments::{DeviceArguments, RewriteArguments};
use crate::command::compare::jobs;
use clap::{Args, value_parser};
use dreamc_dsl::spec::TaskKind;
use dreamc_study::compare::exam;
use dreamc_study::compare::exam::cost;
use dreamc_study::failure::Done;
use std::path::PathBuf;

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
    budget: f64,

    /// Steps of every run, in place of those that the time allows
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(cost::FEWEST..=1_000_000_000), conflicts_with = "budget")]
    steps: Option<u64>,

    /// Train every arm with the seeds 0 to N - 1
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u64).range(1..=1024))]
    seeds: u64,

    /// The tasks, as `data: {task: …}` names them; six that differ in what they ask by default
    #[arg(long, value_name = "TASK,…", value_delimiter = ',', value_parser = task)]
    tasks: Vec<TaskKind>,

    /// The learning rates that every arm tries, least first; with one, all train at that
    #[arg(long, value_name = "RATE,…", value_delimiter = ',', value_parser = rate)]
    rates: Vec<f64>,

    /// Folder of the exam and its report; `runs/exam-NAMES` by default
    #[arg(short, long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Runs trained at once; they share the threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = jobs)]
    jobs: usize,

    /// Do not match the arms, and train them though they do not agree; they are marked in every
    /// table
    #[arg(long)]
    allow_unequal: bool,

    /// Match, check, measure and say how long all takes; train nothing
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,
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

pub fn run(a: Arguments) -> Done {
    exam::run(exam::Asked {
        specs: a.baseline.into_iter().chain(a.specs).collect(),
        budget: a.budget,
        steps: a.steps,
        seeds: a.seeds,
        tasks: a.tasks,
        rates: a.rates,
        out: a.out,
        jobs: a.jobs,
        allow_unequal: a.allow_unequal,
        dry_run: a.dry_run,
        device: a.device.clone(),
        rewriting: a.rewriting.clone(),
    })
}
