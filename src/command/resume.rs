//! `dreamc resume`: go on with a run.

use crate::command::train::Job;
use crate::device::DeviceArguments;
use crate::failure::{Done, Failure};
use crate::model::stored;
use crate::number::many;
use crate::rewriting::RewriteArguments;
use crate::{note, ranks, spec};
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::train::folder::RunFolder;
use dreamc_runtime::train::metrics::Metrics;
use dreamc_runtime::train::schedule::learning_rate;
use std::path::PathBuf;

/// Go on with a run, from its last good checkpoint, to the same bits
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc resume runs/quickstart-001
  dreamc resume runs/quickstart-001 --set train.steps=4000     train longer than was planned

A changed recipe holds from the next step on: `changes` of ledger.json says what changed after which step, earlier/ has the
specifications of the steps before.")]
pub struct Arguments {
    /// The folder of the run
    #[arg(value_name = "RUN")]
    run: PathBuf,

    /// Change a field of the run's specification: `--set train.steps=4000`; may be given several
    /// times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Go on even though the data or the rewriting rules have changed
    #[arg(long)]
    allow_changes: bool,

    /// Print the final ledger as JSON on standard output, everything else on the error stream
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(a: Arguments) -> Done {
    ranks::together(|group| resume(&a, group))
}

fn resume(a: &Arguments, group: &Group) -> Done {
    let mut begun = None;
    // The other ranks need not see the folder.
    let begins = ranks::from_first(group, || {
        let folder = RunFolder::open(&a.run)?;
        let (text, from) = text(&folder, &a.set)?;
        let rewriting = a.rewriting.continued(&folder, a.allow_changes)?;
        begun = Some((folder, from));
        Ok(serde_json::to_string(&(text, rewriting))?)
    })?;
    let (text, rewriting): (String, Rewriting) = serde_json::from_str(&begins)?;
    let spec = spec::parse(&a.run.join("spec.yaml").display().to_string(), &text, &a.set)?;
    if let Some((_, Some(from))) = &begun {
        tell_of_changes(a, &text, &spec, from)?;
    }
    let allow_changes = a.allow_changes || !a.set.is_empty();
    let device = a.device.open()?;
    let job = Job { spec: &spec, device: device.as_ref(), group, json: a.json, count: false };
    let (folder, from) = begun.unzip();
    let from = from.flatten();
    let formats = stored(&spec, from.as_ref(), device.as_ref(), group);
    let prepared = job.prepare(&rewriting, &formats)?;
    let dataset = job.dataset()?;
    job.agree(&dataset, &rewriting)?;
    job.train(prepared, &dataset, folder.as_ref(), from, allow_changes)
}

/// Says what goes on with another recipe, and from which step; refuses fewer steps than were taken.
fn tell_of_changes(a: &Arguments, was: &str, spec: &Spec, from: &Checkpoint) -> Done {
    let step = from.state.step;
    if spec.train.steps < step {
        return Err(Failure::Usage(format!(
            "the run has taken {step} steps, more than train.steps={}: a shorter run begins anew, `dreamc train {} --set train.steps={}`",
            spec.train.steps,
            a.run.join("spec.yaml").display(),
            spec.train.steps
        )));
    }
    if a.set.is_empty() {
        return Ok(());
    }
    let earlier = spec::parse("spec.yaml", was, &[])?;
    let rate = |spec: &Spec| learning_rate(&spec.train, step + 1);
    let (before, now) = (rate(&earlier), rate(spec));
    let rates = match (before - now).abs() > 1e-6 * before.abs() {
        true => format!("; the learning rate of step {} is {now:.3e}, and was to be {before:.3e}", step + 1),
        false => String::new(),
    };
    note!(
        "from step {} on the run has another recipe ({}){rates}; ledger.json and earlier/ keep what the steps before were trained with",
        step + 1,
        a.set.join(", ")
    );
    Ok(())
}

/// The specification that a run was trained with, and its newest good checkpoint.
fn text(folder: &RunFolder, set: &[String]) -> Result<(String, Option<Checkpoint>), Failure> {
    let path = folder.spec();
    let written = std::fs::read_to_string(&path).map_err(|e| dreamc_data::files::about(&path, e))?;
    let steps = |from: &Checkpoint| {
        let text = from.model.metadata("spec").unwrap_or(&written);
        spec::parse("spec.yaml", text, set).ok().map(|spec| spec.train.steps)
    };
    let from = latest(folder, &steps)?;
    // The checkpoint knows what it was trained with, even where a run with changes was killed
    // between its checkpoint and this file.
    let text = match from.as_ref().and_then(|c| c.model.metadata("spec")) {
        Some(text) => {
            if text != written {
                note!("warning: {} is not what the run was trained with, which is used", path.display());
            }
            text.to_string()
        }
        None => written,
    };
    Ok((text, from))
}

/// The newest good checkpoint of a run; `None` where the run was stopped before its first. Says
/// what was found; `steps` are all those that a run takes which goes on from it.
pub fn latest(
    folder: &RunFolder,
    steps_from: &dyn Fn(&Checkpoint) -> Option<u64>,
) -> Result<Option<Checkpoint>, Failure> {
    let checkpoints = folder.checkpoints();
    let metrics = Metrics::read(&folder.metrics())?;
    let came = metrics.steps.last().map_or(0, |s| s.step).max(metrics.skipped.last().map_or(0, |s| s.step));
    let steps = checkpoints.steps();
    if steps.is_empty() {
        let run = folder.path().display();
        if came > 0 {
            note!(
                "{run}: stopped after step {came}, before its first checkpoint (there is one every ten minutes, \
                 `train.checkpoint.minutes`): it begins anew"
            );
        } else {
            note!("{run}: stopped before its first step: it begins anew");
        }
        return Ok(None);
    }
    let (checkpoint, refused) = checkpoints.latest()?;
    for error in refused {
        note!("warning: {error}");
    }
    let step = checkpoint.state.step;
    let again = match came.saturating_sub(step) {
        0 => String::new(),
        1 => ", and takes one step again".into(),
        n => format!(", and takes {n} steps again"),
    };
    let of: Vec<String> = steps.iter().map(u64::to_string).collect();
    let found = match &of[..] {
        [one] => format!("found the checkpoint of step {one}"),
        several => format!("found checkpoints of steps {}", several.join(", ")),
    };
    match steps_from(&checkpoint) {
        Some(all) if step >= all => note!(
            "{found}: the run is at its end, after {}; `dreamc resume {} --set train.steps=N` trains it longer",
            many(step.into(), "step"),
            folder.path().display()
        ),
        _ => note!("{found}: going on after step {step}{again}"),
    }
    Ok(Some(checkpoint))
}
