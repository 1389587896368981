//! `dreamc show`: a specification with every default filled in.

use crate::failure::{Done, Failure};
use crate::spec::SpecArguments;
use crate::{output, show};
use clap::{Args, ValueEnum};
use dreamc_dsl::Spelling;
use dreamc_dsl::define::library::LIBRARY;

/// Print a specification with every default filled in
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc show model.yaml
  dreamc show model.yaml --to dream
  dreamc show model.yaml --set train.steps=100 --json
  dreamc show std                     the library of definitions
  dreamc show std/gated_delta         one of them, as it is written")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Spelling to print in
    #[arg(long, value_enum, default_value_t = To::Yaml)]
    to: To,

    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    Yaml,
    Dream,
}

pub fn run(a: Arguments) -> Done {
    let library = (!a.spec.spec.exists()).then(|| a.spec.spec.to_str().and_then(std_name)).flatten();
    if let Some(name) = library {
        return show_library(name);
    }
    let spec = a.spec.load()?;
    if a.json {
        show::json(&spec)?;
    } else {
        let to = if a.to == To::Yaml { Spelling::Yaml } else { Spelling::Dream };
        output::write(dreamc_dsl::show(&spec, to).as_bytes())?;
    }
    Ok(())
}

/// The name in the library that a path means; none for the library itself.
fn std_name(path: &str) -> Option<Option<&str>> {
    let path = path.trim_end_matches('/');
    if path == "std" {
        Some(None)
    } else {
        path.strip_prefix("std/").map(|name| Some(name.trim_end_matches(".dream")))
    }
}

/// Prints the definition of that name; without one all names, each with its first line.
fn show_library(name: Option<&str>) -> Done {
    if let Some(name) = name {
        let Some((_, text)) = LIBRARY.iter().find(|(own, _)| *own == name) else {
            let names: Vec<&str> = LIBRARY.iter().map(|(name, _)| *name).collect();
            return Err(Failure::Usage(format!("std has no `{name}`; it has {}", names.join(", "))));
        };
        output::write(text.as_bytes())?;
        return Ok(());
    }
    let width = LIBRARY.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, text) in LIBRARY {
        let about = text.lines().next().unwrap_or("").trim_start_matches("// ");
        output::write(format!("{name:width$}  {about}\n").as_bytes())?;
    }
    Ok(())
}
