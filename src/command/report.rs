//! `dreamc report`: the report of a comparison or an exam, made anew from what its runs left.

use clap::Args;
use dreamc_study::compare::ladder::Manifest;
use dreamc_study::compare::study::Study;
use dreamc_study::compare::{exam, page, rungs};
use dreamc_study::failure::Done;
use dreamc_study::report::page::Page;
use dreamc_study::say;
use std::path::PathBuf;

/// Make the report of a comparison anew, from the ledgers and metrics of its runs
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc report runs/reasoning
  dreamc report runs/reasoning --markdown > docs/results/reasoning.md")]
pub struct Arguments {
    /// The folder that `dreamc compare` or `dreamc exam` made
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// Print the report as Markdown, and write nothing
    #[arg(long)]
    markdown: bool,
}

pub fn run(a: Arguments) -> Done {
    if exam::Manifest::of(&a.folder)?.is_some() {
        let report = exam::page::page(&exam::page::Exam::read(&a.folder)?);
        return written(&a, &report, || Ok(report.write(&a.folder, "report")?));
    }
    let climb = match Manifest::of(&a.folder)? {
        Some(_) => Some(rungs::Climb::read(&a.folder)?),
        None => None,
    };
    let report = match &climb {
        Some(climb) => rungs::page(climb),
        None => page::page(&Study::read(&a.folder)?),
    };
    match &climb {
        Some(climb) => written(&a, &report, || rungs::write(climb, &a.folder)),
        None => written(&a, &report, || Ok(report.write(&a.folder, "report")?)),
    }
}

/// Prints a report, or writes it and says where it is.
fn written(a: &Arguments, report: &Page, write: impl FnOnce() -> Done) -> Done {
    if a.markdown {
        return Ok(say!("{}", report.markdown().trim_end())?);
    }
    write()?;
    Ok(say!("{}", a.folder.join("report.html").display())?)
}
