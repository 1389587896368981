//! `dreamc report`: the report of a comparison, made anew from what its runs left.

use crate::compare::ladder::Manifest;
use crate::compare::study::Study;
use crate::compare::{page, rungs};
use crate::failure::Done;
use crate::say;
use clap::Args;
use std::path::PathBuf;

/// Make the report of a comparison anew, from the ledgers and metrics of its runs
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc report runs/reasoning
  dreamc report runs/reasoning --markdown > docs/results/reasoning.md")]
pub struct Arguments {
    /// The folder that `dreamc compare` made
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// Print the report as Markdown, and write nothing
    #[arg(long)]
    markdown: bool,
}

pub fn run(a: Arguments) -> Done {
    let climb = match Manifest::of(&a.folder)? {
        Some(_) => Some(rungs::Climb::read(&a.folder)?),
        None => None,
    };
    let report = match &climb {
        Some(climb) => rungs::page(climb),
        None => page::page(&Study::read(&a.folder)?),
    };
    if a.markdown {
        return Ok(say!("{}", report.markdown().trim_end())?);
    }
    match &climb {
        Some(climb) => rungs::write(climb, &a.folder)?,
        None => report.write(&a.folder, "report")?,
    }
    Ok(say!("{}", a.folder.join("report.html").display())?)
}
