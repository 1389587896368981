//! `dreamc runs`: the runs below a folder, a line each.

use crate::compare::study::ledger;
use crate::failure::{Done, Failure};
use crate::show::{self, duration, short, table};
use crate::{note, say};
use clap::Args;
use dreamc_runtime::files;
use dreamc_runtime::train::ledger::Ledger;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// List the runs below a folder
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
    #[serde(flatten)]
    ledger: Ledger,
}

/// Folders of folders are looked into so deep: a ladder's runs stand two below it.
const DEPTH: usize = 4;

pub fn run(a: Arguments) -> Done {
    let mut found = vec![];
    collect(&a.folder, DEPTH, &mut found)?;
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
    Ok(say!("{}", table(&rows).trim_end())?)
}

/// The runs in a folder and below; those of links are left out.
fn collect(folder: &Path, depth: usize, found: &mut Vec<Run>) -> Done {
    match ledger(folder) {
        Ok(Some(ledger)) => {
            found.push(Run { folder: folder.display().to_string(), ledger });
            return Ok(());
        }
        Ok(None) => {}
        // One run that is damaged hides no other.
        Err(error) => {
            note!("warning: {error}");
            return Ok(());
        }
    }
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(|e| files::about(folder, e))? {
        let entry = entry.map_err(|e| files::about(folder, e))?;
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}
