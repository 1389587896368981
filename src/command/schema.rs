//! `dreamc schema`: the JSON Schema of specifications, for editors.

use crate::failure::Done;
use crate::show;
use clap::Args;

/// Print the JSON Schema of specifications, for completion and checking in editors
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc schema > dreamc.schema.json
  # then, in the first line of a YAML file, for editors with a YAML language server:
  # yaml-language-server: $schema=dreamc.schema.json")]
pub struct Arguments {}

pub fn run(_: Arguments) -> Done {
    Ok(show::json(&dreamc_dsl::schema())?)
}
