//! `dreamc compare`: the arms of a suite, trained alike and reported together.

use crate::arguments::{DeviceArguments, RewriteArguments};
use clap::Args;
use dreamc_study::compare::suite;
use dreamc_study::device::Kind;
use dreamc_study::failure::Done;
use std::path::PathBuf;

/// Train the arms of a suite alike, and report how they compare
#[derive(Args)]
#[command(after_help = "\
Matches the variants, checks that all arms agree in what the suite says must be equal, trains every arm with every seed, and
writes report.html and report.md. Run it again to go on: what is trained already is left as it is.
Of specifications, the first is the baseline; the suite that compares the others with it is made, and left beside you as
A-against-B.suite.yaml.

Examples:
  dreamc compare examples/reasoning.suite.yaml
  dreamc compare la.yaml dr.yaml --seeds 3                               make the suite, and run it
  dreamc compare my.suite.yaml --out runs/mine --jobs 2
  dreamc compare my.suite.yaml --dry-run                                 match and check, train nothing
  dreamc compare examples/ladder-task.suite.yaml --dry-run --rate 1e12   what cells and tuning cost
  dreamc compare my.suite.yaml --worker                                  one of several, on any machines
  dreamc compare my.suite.yaml --slurm 16 --device cuda > suite.sbatch   a job array of 16 workers
  dreamc compare my.suite.yaml --set train.steps=100 --out runs/short    a short one first")]
pub struct Arguments {
    /// The suite, YAML or .dream; or specifications, the baseline first
    #[arg(value_name = "SUITE", required = true)]
    files: Vec<PathBuf>,

    /// Of specifications: train every arm with the seeds 0 to N - 1; 1 by default
    #[arg(long, value_name = "N", value_parser = jobs)]
    seeds: Option<usize>,

    /// Change a field of the suite: `--set train.steps=100`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Folder of the comparison; `runs/NAME` by default
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Runs trained at once; they share the threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = jobs)]
    jobs: usize,

    /// Train one run on each of these at once: `cuda:0-7`, `cuda:0,cuda:2`
    #[arg(long, value_name = "DEVICES", value_parser = devices, conflicts_with_all = ["jobs", "device"], default_value = "", hide_default_value = true)]
    devices: Devices,

    /// Share --out with other processes, on any machines that see the folder: each trains runs that
    /// no other has, and takes over those of one that died
    #[arg(long, conflicts_with_all = ["force", "dry_run"])]
    worker: bool,

    /// Print a job script for SLURM with this many workers, and stop
    #[arg(long, value_name = "WORKERS", value_parser = jobs, conflicts_with = "dry_run")]
    slurm: Option<usize>,

    /// Train arms that do not agree, too; they are marked in every table
    #[arg(long)]
    allow_unequal: bool,

    /// Train anew what is there already; files that are not the comparison's own stay
    #[arg(long)]
    force: bool,

    /// Match, check, and stop; of a sweep or a ladder, print every cell and each arm's tuning with
    /// their costs
    #[arg(long, visible_alias = "plan")]
    dry_run: bool,

    /// FLOPs a second that the hours of --dry-run are for, in place of measuring them here
    #[arg(long, value_name = "FLOPS", requires = "dry_run")]
    rate: Option<f64>,

    #[command(flatten)]
    device: DeviceArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,
}

/// Devices that each train a run.
#[derive(Clone, Debug, Default)]
struct Devices(Vec<Kind>);

fn devices(text: &str) -> Result<Devices, String> {
    let mut all = vec![];
    for part in text.split(',').filter(|part| !part.is_empty()) {
        match part.strip_prefix("cuda:").and_then(|range| range.split_once('-')) {
            None => all.push(part.parse()?),
            Some((first, last)) => match (first.parse(), last.parse()) {
                (Ok(first), Ok(last)) if first <= last && last - first < 64 => {
                    all.extend((first..=last).map(Kind::Cuda));
                }
                (Ok(_) | Err(_), Ok(_) | Err(_)) => return Err("write a range as `cuda:0-7`".into()),
            },
        }
    }
    Ok(Devices(all))
}

pub fn jobs(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (1..=1024).contains(n)).ok_or_else(|| "write a number from 1 to 1024".into())
}

pub fn run(a: Arguments) -> Done {
    suite::run(suite::Asked {
        files: a.files,
        suite: PathBuf::new(),
        seeds: a.seeds,
        set: a.set,
        out: a.out,
        jobs: a.jobs,
        devices: a.devices.0,
        worker: a.worker,
        slurm: a.slurm,
        allow_unequal: a.allow_unequal,
        force: a.force,
        dry_run: a.dry_run,
        rate: a.rate,
        device: a.device.clone(),
        rewriting: a.rewriting.clone(),
    })
}
