//! `dreamc check`: every error of a file, each at its place.

use crate::failure::{Done, Failure};
use crate::{say, show};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

/// Check specifications: every error of a file at once, each at its place, with what would be right
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc check model.yaml
  dreamc check examples/*.yaml --json
  dreamc check model.yaml --set ea.count=1024

Exit code 1 when a file has errors.")]
pub struct Arguments {
    /// Specifications or suites, YAML or .dream
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Change a field first: `--set ea.count=1024`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Print diagnostics as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: Arguments) -> Done {
    let mut good = true;
    let mut reports = vec![];
    for path in &a.files {
        let found = match dreamc_dsl::load(path, &a.set) {
            Ok((spec, warnings)) => dreamc_dsl::Diagnostics::new(spec.sources, warnings),
            Err(diagnostics) => diagnostics,
        };
        let failed = found.has_errors();
        good &= !failed;
        if a.json {
            let file = path.display().to_string();
            reports.push(json!({"file": file, "ok": !failed, "diagnostics": found.to_json()}));
        } else if found.list.is_empty() {
            say!("{}: no errors", path.display())?;
        } else {
            say!("{}", found.render(std::io::IsTerminal::is_terminal(&std::io::stdout())).trim_end())?;
        }
    }
    if a.json {
        show::json(&reports)?;
    }
    if good { Ok(()) } else { Err(Failure::Silent) }
}
