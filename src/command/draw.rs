//! `dreamc draw`: the wiring of a specification as a picture.

use crate::failure::{Done, Failure};
use crate::output;
use crate::report::{draw, page};
use crate::spec::SpecArguments;
use clap::Args;
use dreamc_runtime::files;
use std::path::PathBuf;

/// Draw the wiring of a specification as SVG
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc draw model.yaml -o model.svg
  dreamc draw examples/mod.dream > mod.svg")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// The file to write; standard output by default
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn run(a: Arguments) -> Done {
    if let Some(path) = &a.output
        && let Some(other) = path.extension().filter(|e| !e.eq_ignore_ascii_case("svg"))
    {
        return Err(Failure::Usage(format!(
            "-o {}: a drawing is SVG, and there is no other format: name a file that ends in .svg, not .{}",
            path.display(),
            other.display()
        )));
    }
    let picture = page::alone(&draw::svg(&a.spec.load()?.model));
    match a.output {
        None => Ok(output::write(picture.as_bytes())?),
        Some(path) => {
            files::write_named(&path, |out| out.write_all(picture.as_bytes())).map_err(Failure::from)
        }
    }
}
