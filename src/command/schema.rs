//! `dreamc schema`: the JSON Schema of specifications, for editors.

use clap::Args;
use dreamc_dsl::FileKind;
use dreamc_study::failure::Done;
use dreamc_study::show;

/// Print the JSON Schema of specifications, for completion and checking in editors
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc schema > dreamc.schema.json
  # then, in the first line of a YAML file, for editors with a YAML language server:
  # yaml-language-server: $schema=dreamc.schema.json")]
pub struct Arguments {
    /// The schema of suites, which compare several models
    #[arg(long)]
    suite: bool,
}

pub fn run(a: Arguments) -> Done {
    let kind = if a.suite { FileKind::Suite } else { FileKind::Spec };
    Ok(show::json(&dreamc_dsl::schema(kind))?)
}
