//! `dreamc runs`: the runs below a folder, a line each.

use clap::Args;
use dreamc_data::files;
use dreamc_runtime::statistics::Summary;
use dreamc_runtime::train::ledger::Ledger;
use dreamc_study::compare::study::{self, Holds, ledger};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::show::{self, duration, short, table};
use dreamc_study::{note, say};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// List the runs below a folder; of runs that differ in their seed alone, also the mean
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc runs
  dreamc runs runs/reasoning --json")]
pub struct Arguments {
    /// The folder
    #[arg(value_name = "FOLDER", default_value = "runs")]
    folder: PathBuf,

    /// Print JSON with stable keys
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Run {
    folder: String,
    /// Hash of its specification without the seed; empty where that is not there.
    recipe: String,
    #[serde(flatten)]
    ledger: Ledger,
}

pub fn run(a: Arguments) -> Done {
    let mut found = collect(&a.folder)?;
    if found.is_empty() {
        return Err(Failure::Usage(format!("{} holds no run", a.folder.display())));
    }
    found.sort_by(|x, y| x.folder.cmp(&y.folder));
    if a.json {
        return Ok(show::json(&found)?);
    }
    let head = ["run", "model", "status", "steps", "tokens", "held-out loss, nats", "targets", "training"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(found.iter().map(|r| {
        let l = &r.ledger;
        vec![
            r.folder.clone(),
            l.model.clone(),
            l.status.clone(),
            l.steps.to_string(),
            short(l.tokens as f64),
            l.validation_loss.map_or("–".into(), |v| format!("{v:.4}")),
            l.validation_targets.map_or("–".into(), |n| n.to_string()),
            duration(l.train_seconds),
        ]
    }));
    say!("{}", table(&rows).trim_end())?;
    let groups = alike(&found);
    if !groups.is_empty() {
        say!("\n{}", over_seeds(&groups))?;
    }
    Ok(())
}

/// Runs that differ in their seed alone, where there are several, by the name of their model.
fn alike(found: &[Run]) -> Vec<(String, Vec<&Ledger>)> {
    let mut recipes: Vec<&str> = vec![];
    for run in found.iter().filter(|run| !run.recipe.is_empty()) {
        if !recipes.contains(&run.recipe.as_str()) {
            recipes.push(&run.recipe);
        }
    }
    let of = |recipe: &str| -> Vec<&Run> { found.iter().filter(|run| run.recipe == recipe).collect() };
    let several = |runs: &Vec<&Run>| runs.iter().any(|run| run.ledger.seed != runs[0].ledger.seed);
    let groups = recipes.into_iter().map(of).filter(several);
    groups
        .map(|runs| {
            let name = format!("{} ({} …)", runs[0].ledger.model, runs[0].folder);
            (name, runs.into_iter().map(|run| &run.ledger).collect())
        })
        .collect()
}

/// Means over the runs of each group that came to their end, one of each seed.
pub fn over_seeds(groups: &[(String, Vec<&Ledger>)]) -> String {
    let head = ["over seeds", "seeds", "held-out loss, nats", "bits per byte", "exact match, %", "training"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (name, runs) in groups {
        let mut ended: Vec<&Ledger> = vec![];
        for run in runs.iter().filter(|run| study::ended(run)) {
            // A run that was made again is the same to the bit.
            if !ended.iter().any(|e| e.seed == run.seed) {
                ended.push(run);
            }
        }
        let mean = |of: &dyn Fn(&Ledger) -> Option<f64>, digits: usize| {
            let values: Vec<f64> = ended.iter().filter_map(|l| of(l)).filter(|v| v.is_finite()).collect();
            Summary::of(&values).map_or("–".to_string(), |s| {
                let spread = s.deviation.map_or(String::new(), |d| format!(" ± {d:.digits$}"));
                format!("{:.digits$}{spread}", s.mean)
            })
        };
        rows.push(vec![
            name.clone(),
            format!("{} of {}", ended.len(), runs.len()),
            mean(&|l| l.validation_loss, 4),
            mean(&|l| l.bits_per_byte, 4),
            mean(&|l| Some(100.0 * l.exact_match?), 1),
            duration(ended.iter().map(|l| l.train_seconds).sum()),
        ]);
    }
    table(&rows).trim_end().to_string()
}

/// The hash of the specification of a run without its seed.
fn recipe(folder: &Path) -> String {
    let text = files::read_text(&folder.join("spec.yaml")).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("  seed:")).collect();
    if lines.is_empty() {
        String::new()
    } else {
        blake3::hash(lines.join("\n").as_bytes()).to_hex().to_string()
    }
}

/// The runs in a folder and below. One run that is damaged hides no other.
fn collect(folder: &Path) -> Result<Vec<Run>, Failure> {
    fs::read_dir(folder).map_err(|e| files::about(folder, e))?;
    let mut found = vec![];
    study::walk(folder, &mut |folder, holds| {
        if holds != Holds::Run {
            return;
        }
        match ledger(folder) {
            Ok(Some(ledger)) => {
                found.push(Run { folder: folder.display().to_string(), recipe: recipe(folder), ledger });
            }
            Ok(None) => {}
            Err(error) => note!("warning: {error}"),
        }
    });
    Ok(found)
}
