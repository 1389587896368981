//! How long the runs of an exam take, and how many steps a time allows.
//!
//! *In*: specifications. *Out*: [`Cost`], [`Split`]. *Promise*: seconds are those of a whole short
//! run on this machine, compiled, trained and evaluated as the exam's own runs are.

use crate::device::Where;
use crate::failure::Failure;
use crate::model::{beginning, stored};
use crate::rewriting::Choice;
use crate::show::duration;
use crate::spec::{open_data, resolved};
use dreamc_data::files::cache_folder;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_runtime::train::event::Event;
use dreamc_runtime::train::folder::{Place, RunFolder};
use dreamc_runtime::train::{self, Setup, Stop, prepare};
use std::path::PathBuf;
use std::time::Instant;

/// Steps of a run that is measured; the first is not counted.
const MEASURED: u64 = 4;
/// Runs of fewer steps show nothing.
pub const FEWEST: u64 = 20;
/// Rates are tuned where every run still has this many steps.
pub const ENOUGH: u64 = 400;
/// Times are given in multiples of it.
const MINUTE: f64 = 60.0;

/// Seconds of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Of a step.
    pub step: f64,
    /// Of all else: compiling, evaluating.
    pub rest: f64,
}

impl Cost {
    /// Seconds of a run of `steps` steps.
    pub fn of(self, steps: u64) -> f64 {
        self.rest + self.step * steps as f64
    }
}

/// The folder of a run that is measured; it goes when the measurement does.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder of the cache that stays takes room and nothing else.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Trains for a few steps, leaves nothing, and says how long that took.
pub fn measure(spec: &Spec, device: &Where, rewriting: &Choice) -> Result<Cost, Failure> {
    let mut spec = spec.clone();
    (spec.train.steps, spec.train.warmup) = (MEASURED, 0);
    let begun = Instant::now();
    let device = device.open()?;
    let rewriting = rewriting.on(device.as_ref())?;
    let Some(data) = &spec.data else {
        return Err(Failure::Usage(format!("{} has no data", spec.model.name)));
    };
    let dataset = open_data(&spec, data, spec.eval.stride)?;
    let formats = stored(&spec, None, device.as_ref(), &Group::alone());
    let prepared = prepare(&spec, device.as_ref(), &rewriting, &Group::alone(), &formats)?;
    let scratch = Scratch(cache_folder().join(format!("exam-{}", std::process::id())));
    let folder = RunFolder::create(&Place::At { path: scratch.0.clone(), force: true })?;
    let text = resolved(&spec);
    folder.begin(&text, &dataset.tokenizer, &prepared.rewriting)?;
    let setup = Setup {
        spec: &spec,
        base: beginning(&spec, None, (folder.path(), device.as_ref()))?,
        text: &text,
        device: device.as_ref(),
        dataset: &dataset,
        group: Group::alone(),
        folder: Some(&folder),
        from: None,
        allow_changes: false,
        count: false,
    };
    let mut seconds = vec![];
    let mut watch = |event: &Event| {
        if let Event::Step { line, .. } = event {
            seconds.push(line.seconds);
        }
    };
    if let Stop::Interrupted(signal) = train::run(prepared, setup, &mut watch)?.stop {
        return Err(Failure::Stopped(signal));
    }
    let (first, last) = (seconds.first().copied().unwrap_or(0.0), seconds.last().copied().unwrap_or(0.0));
    let step = (last - first) / (seconds.len().saturating_sub(1).max(1)) as f64;
    Ok(Cost { step, rest: (begun.elapsed().as_secs_f64() - last).max(0.0) })
}

/// How an exam spends its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// Steps of the runs of each task.
    pub steps: Vec<u64>,
    /// Whether every arm tunes its rate.
    pub tuned: bool,
}

/// The steps of each task with which all runs take `budget` seconds, every task as long as any
/// other: `costs` are those of its arms. Each arm is trained `seeds` times, and `trials` times more
/// where there is time to tune its rate.
pub fn split(budget: f64, costs: &[Vec<Cost>], seeds: u64, trials: u64) -> Result<Split, Failure> {
    let each = budget / costs.len().max(1) as f64;
    let steps = |each: f64, runs: u64, arms: &[Cost]| {
        let rest: f64 = arms.iter().map(|c| c.rest).sum();
        let step: f64 = arms.iter().map(|c| c.step).sum::<f64>().max(1e-9);
        let most = ((each / runs as f64 - rest) / step).max(0.0) as u64;
        // Two digits say all that a measurement of a few steps knows.
        let unit = 10u64.pow(most.max(1).ilog10().saturating_sub(1));
        most / unit * unit
    };
    let all = |runs: u64| costs.iter().map(|arms| steps(each, runs, arms)).collect::<Vec<_>>();
    if trials > 1 {
        let found = all(seeds + trials);
        if found.iter().all(|steps| *steps >= ENOUGH) {
            return Ok(Split { steps: found, tuned: true });
        }
    }
    let found = all(seeds);
    if found.iter().any(|steps| *steps < FEWEST) {
        let of = |arms: &Vec<Cost>| arms.iter().map(|c| c.of(FEWEST + 1)).sum::<f64>() * seeds as f64;
        let needed = costs.iter().map(of).fold(0.0, f64::max) * costs.len() as f64;
        let minutes = (needed / MINUTE).ceil().max(1.0);
        let few = found.iter().min().copied().unwrap_or(0);
        return Err(Failure::Usage(format!(
            "{} leave a run {few} steps, and fewer than {FEWEST} show nothing: use --budget {minutes}m, fewer --tasks, or fewer --seeds",
            duration(budget)
        )));
    }
    Ok(Split { steps: found, tuned: false })
}

/// A time as `--budget` takes it: `90s`, `10m`, `1.5h`.
pub fn seconds(text: &str) -> Result<f64, String> {
    let unit = |(number, factor): (&str, f64)| {
        number.trim().parse::<f64>().ok().map(|n| n * factor).filter(|n| n.is_finite() && *n > 0.0)
    };
    let parts = [("s", 1.0), ("m", MINUTE), ("h", 60.0 * MINUTE)];
    let mut found = parts.iter().filter_map(|(ending, factor)| Some((text.strip_suffix(ending)?, *factor)));
    found.next().and_then(unit).ok_or_else(|| "write a time with its unit: `90s`, `10m`, `1.5h`".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_spent_and_not_more() {
        let arms = vec![Cost { step: 0.01, rest: 1.0 }, Cost { step: 0.03, rest: 2.0 }];
        let costs = vec![arms.clone(), arms];
        let spent = |split: &Split, runs: u64| -> f64 {
            let of = |(arms, steps): (&Vec<Cost>, &u64)| arms.iter().map(|c| c.of(*steps)).sum::<f64>();
            costs.iter().zip(&split.steps).map(of).sum::<f64>() * runs as f64
        };
        for (budget, runs, tuned) in [(120.0, 3, false), (600.0, 7, true), (3600.0, 7, true)] {
            let found = split(budget, &costs, 3, 4).unwrap();
            assert_eq!(found.tuned, tuned, "{budget}");
            let spent = spent(&found, runs);
            assert!(spent <= budget && spent > 0.85 * budget, "{budget}: {spent}");
        }
        assert!(!split(3600.0, &costs, 3, 1).unwrap().tuned);
    }

    #[test]
    fn a_budget_that_is_too_short_says_which_would_do() {
        let costs = vec![vec![Cost { step: 1.0, rest: 10.0 }]];
        let error = split(30.0, &costs, 3, 1).unwrap_err().to_string();
        assert!(error.contains("use --budget 2m"), "{error}");
        assert!(split(120.0, &costs, 3, 1).is_ok());
    }

    #[test]
    fn times_have_a_unit() {
        assert_eq!(["90s", "10m", "1.5h"].map(|t| seconds(t).unwrap()), [90.0, 600.0, 5400.0]);
        for bad in ["10", "m", "-1m", "1d", "infm", "0s", ""] {
            assert!(seconds(bad).unwrap_err().contains("10m"), "{bad}");
        }
    }
}
