//! `dreamc resume`: go on with a run.

use crate::arguments::{DeviceArguments, RewriteArguments};
use crate::command::train::Job;
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::group::Group;
use dreamc_dsl::Spec;
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::train::folder::RunFolder;
use dreamc_runtime::train::schedule::learning_rate;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::{latest, stored};
use dreamc_study::{note, ranks, spec};
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
