//! `dreamc fit`: scaling laws from a table of runs.

use clap::{Args, ValueEnum, value_parser};
use dreamc_data::files::open;
use dreamc_fits::iso::{Frontier, frontier};
use dreamc_fits::{Constant, Fit, Law, Options, Run, Speedup, Table, fit, speedup};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::say;
use dreamc_study::show::{self, short, table};
use serde::Serialize;
use std::path::PathBuf;

/// Fit scaling laws to a table of runs, with intervals
///
/// For each arm: L = E + A·N^-alpha + B·D^-beta (with passes of a loop: N = N_once + r^phi·N_loop),
/// the optimum of each budget, and loss against compute. Losses are in nats a token; N counts
/// parameters, D tokens.
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc fit examples/scaling-synthetic.csv
  dreamc fit examples/scaling-synthetic.csv --baseline layered --json
  dreamc fit examples/scaling-synthetic.csv --law plain --resamples 200

The table has a line a run and a header: arm,params,tokens,flops,loss and, where they are known,
loop_params,passes,seed,seconds. `params` are applied once a token, `loop_params` in every pass.")]
pub struct Arguments {
    /// Comma-separated text, a line a run
    #[arg(value_name = "TABLE")]
    table: PathBuf,

    /// The law; by default that of a loop for arms with several numbers of passes
    #[arg(long, value_enum)]
    law: Option<LawName>,

    /// The arm against whose compute the others are measured
    #[arg(long, value_name = "ARM")]
    baseline: Option<String>,

    /// Resamples for each interval
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = value_parser!(u64).range(..=1_000_000))]
    resamples: u64,

    /// Seed of the resamples
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum LawName {
    Plain,
    Loop,
}

/// An arm as `--json` prints it; in place of a law that the runs do not determine stands the
/// reason.
#[derive(Serialize)]
struct Arm {
    arm: String,
    runs: usize,
    law: Result<Fit, String>,
    frontier: Result<Frontier, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    speedup: Vec<Speedup>,
}

pub fn run(a: Arguments) -> Done {
    let path = a.table.display();
    let file = open(&a.table).map_err(|e| Failure::Usage(format!("{path}: {e}")))?;
    let runs = Table::read(file).map_err(|e| Failure::Usage(format!("{path}, {e}")))?;
    let arms = runs.arms();
    if arms.is_empty() {
        return Err(Failure::Usage(format!("{path} has no runs: a line for each follows the header")));
    }
    if let Some(b) = a.baseline.as_ref().filter(|b| !arms.contains_key(b.as_str())) {
        let known = arms.keys().copied().collect::<Vec<_>>().join(", ");
        return Err(Failure::Usage(format!("{path} has no arm `{b}`; there are {known}")));
    }
    let options = Options { resamples: a.resamples as usize, seed: a.seed, ..Options::default() };
    let fitted = |(name, runs): (&&str, &Vec<&Run>)| Arm {
        arm: (*name).into(),
        runs: runs.len(),
        law: fit(law(a.law, runs), runs, &options).map_err(|e| e.to_string()),
        frontier: frontier(runs, &options).map_err(|e| e.to_string()),
        speedup: vec![],
    };
    let mut fits: Vec<Arm> = arms.iter().map(fitted).collect();
    let baseline = fits.iter().find(|f| Some(&f.arm) == a.baseline.as_ref()).map(|f| f.frontier.clone());
    if let (Some(name), Some(baseline)) = (&a.baseline, baseline) {
        let baseline = baseline.map_err(|e| Failure::Usage(format!("the baseline `{name}`: {e}")))?;
        for f in fits.iter_mut().filter(|f| f.arm != *name) {
            f.speedup = f.frontier.as_ref().map(|own| speedup(&baseline, own)).unwrap_or_default();
        }
    }
    if a.json {
        return Ok(show::json(&fits)?);
    }
    for f in &fits {
        print(f)?;
    }
    Ok(())
}

fn law(asked: Option<LawName>, runs: &[&Run]) -> Law {
    match asked {
        Some(LawName::Plain) => Law::Plain,
        Some(LawName::Loop) => Law::Loop,
        None if runs.iter().any(|r| r.loop_params > 0.0 && r.passes != runs[0].passes) => Law::Loop,
        None => Law::Plain,
    }
}

fn print(arm: &Arm) -> Done {
    say!("{}, {} runs", arm.arm, arm.runs)?;
    match &arm.law {
        Ok(fit) => {
            say!("  {}; intervals of {} resamples", fit.law.name(), fit.resamples)?;
            say!("{}", table(&constants(&fit.constants)).trim_end())?;
            let n = fit.residuals.len() as f64;
            let deviation = (fit.residuals.iter().map(|r| r * r).sum::<f64>() / n).sqrt();
            let largest = fit.residuals.iter().fold(0.0, |m: f64, r| m.max(r.abs()));
            say!(
                "  residuals of log loss: {deviation:.2e} root mean square, {largest:.2e} the largest; beyond \
                 {:.2e} they count linearly",
                fit.delta
            )?;
        }
        Err(reason) => say!("  no law: {reason}")?,
    }
    match &arm.frontier {
        Ok(frontier) => {
            say!("  L = E + K C^-gamma over the optima; intervals of {} resamples", frontier.resamples)?;
            say!("{}", table(&constants(&frontier.constants)).trim_end())?;
            let mut rows = vec![["budget, FLOPs", "parameters", "loss, nats", ""].map(String::from).to_vec()];
            rows.extend(frontier.optima.iter().map(|o| {
                let mark = if o.inside { "" } else { "at the edge of the sizes trained" };
                vec![format!("{:.3e}", o.flops), short(o.params), format!("{:.4}", o.loss), mark.into()]
            }));
            say!("{}", table(&rows).trim_end())?;
        }
        Err(reason) => say!("  no optimum of budgets: {reason}")?,
    }
    for s in &arm.speedup {
        let beyond = if s.extrapolated { ", beyond the baseline's budgets" } else { "" };
        match s.factor {
            Some(factor) => {
                let within =
                    s.interval.map_or(String::new(), |(low, high)| format!(" ({low:.2} to {high:.2})"));
                say!("  {:.3e} FLOPs: the baseline needs {factor:.2}{within} times as many{beyond}", s.flops)?
            }
            None => say!("  {:.3e} FLOPs: below the baseline's irreducible loss", s.flops)?,
        }
    }
    say!("")?;
    Ok(())
}

fn constants(all: &[Constant]) -> Vec<Vec<String>> {
    let number = |v: f64| {
        if v != 0.0 && !(0.01..1e4).contains(&v.abs()) { format!("{v:.3e}") } else { format!("{v:.4}") }
    };
    let mut rows = vec![["", "value", "95 % from", "to"].map(String::from).to_vec()];
    rows.extend(all.iter().map(|c| vec![c.name.into(), number(c.value), number(c.low), number(c.high)]));
    rows
}
