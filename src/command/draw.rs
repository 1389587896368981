//! `dreamc draw`: the wiring of a specification as a picture.

use crate::arguments::SpecArguments;
use clap::Args;
use dreamc_data::files;
use dreamc_dsl::spec::Model;
use dreamc_dsl::{Diagnostics, SourceMap};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::output;
use dreamc_study::report::draw::Loops;
use dreamc_study::report::{draw, page};
use std::path::PathBuf;

/// Draw the wiring of a specification as SVG
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc draw model.yaml -o model.svg
  dreamc draw examples/mod.dream > mod.svg
  dreamc draw looped.dream --passes -o looped.svg    pass by pass
  dreamc draw model.dream --open gdn -o gdn.svg      a component from inside")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Draw this component from inside: the formulas of its definition, or its steps
    #[arg(long, value_name = "NAME")]
    open: Option<String>,

    /// Draw the passes of a loop one after the other
    #[arg(long, conflicts_with = "open")]
    passes: bool,

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
    let model = a.spec.load()?.model;
    let picture = match &a.open {
        None => draw::svg(&model, if a.passes { Loops::Unrolled } else { Loops::Folded }),
        Some(name) => inside(&model, name)?,
    };
    let picture = page::alone(&picture);
    match a.output {
        None => Ok(output::write(picture.as_bytes())?),
        Some(path) => {
            files::write_named(&path, |out| out.write_all(picture.as_bytes())).map_err(Failure::from)
        }
    }
}

/// The inside of a component.
fn inside(model: &Model, name: &str) -> Result<String, Failure> {
    let failed = |found| Failure::from(Diagnostics::new(SourceMap::default(), found));
    draw::inside(name, model).map_err(failed)?.ok_or_else(|| {
        let names: Vec<&str> = model.components.keys().map(String::as_str).collect();
        Failure::Usage(format!("--open {name}: the model has no such component; it has {}", names.join(", ")))
    })
}
