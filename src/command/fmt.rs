//! `dreamc fmt`: one way to write a file, in either spelling.

use clap::{Args, ValueEnum};
use dreamc_dsl::Spelling;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::{output, say};
use std::path::PathBuf;

/// Format specifications, or convert them between YAML and .dream without loss
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc fmt model.yaml                  rewrite the file in place
  dreamc fmt model.yaml --to dream       print it in the other spelling
  dreamc fmt --check examples/*.yaml     exit code 1 where a file is not formatted")]
pub struct Arguments {
    /// Files to format
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Print in this spelling, leaving the file as it is
    #[arg(long, value_enum, conflicts_with = "check")]
    to: Option<To>,

    /// Change nothing, name the files that are not formatted
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum To {
    Yaml,
    Dream,
}

pub fn run(a: Arguments) -> Done {
    let mut good = true;
    for path in &a.files {
        let ast = dreamc_dsl::parse_file(path)?;
        if let Some(to) = a.to {
            let to = match to {
                To::Yaml => Spelling::Yaml,
                To::Dream => Spelling::Dream,
            };
            output::write(dreamc_dsl::format(&ast, to)?.as_bytes())?;
            continue;
        }
        let text = dreamc_dsl::format(&ast, ast.spelling)?;
        if text == ast.source.text {
            continue;
        }
        if a.check {
            good = false;
            say!("{}: not formatted", path.display())?;
        } else {
            dreamc_data::files::write_named(path, |out| out.write_all(text.as_bytes()))?;
            say!("{}: formatted", path.display())?;
        }
    }
    if good { Ok(()) } else { Err(Failure::Said) }
}
