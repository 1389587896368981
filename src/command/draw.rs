//! `dreamc draw`: the wiring of a specification as a picture.

use crate::failure::{Done, Failure};
use crate::output;
use crate::report::{draw, formulas, page};
use crate::spec::SpecArguments;
use clap::Args;
use dreamc_dsl::spec::{Component, Model};
use dreamc_dsl::{Diagnostics, SourceMap};
use dreamc_runtime::files;
use std::path::PathBuf;

/// Draw the wiring of a specification as SVG
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc draw model.yaml -o model.svg
  dreamc draw examples/mod.dream > mod.svg
  dreamc draw model.dream --open gdn -o gdn.svg      the formulas of a component")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    /// Draw the formulas of this component, which a definition makes
    #[arg(long, value_name = "NAME")]
    open: Option<String>,

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
        None => draw::svg(&model),
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

/// The formulas of a component.
fn inside(model: &Model, name: &str) -> Result<String, Failure> {
    let Some(Component::Defined(defined)) = model.components.get(name) else {
        let own = |(name, component): (&String, &Component)| {
            matches!(component, Component::Defined(_)).then(|| name.clone())
        };
        let names: Vec<String> = model.components.iter().filter_map(own).collect();
        let help = match names.is_empty() {
            true => "no component of this model is".to_string(),
            false => format!("those that are: {}", names.join(", ")),
        };
        return Err(Failure::Usage(format!(
            "--open {name}: this is no component that a definition makes; {help}"
        )));
    };
    let graph = defined.graph(model).map_err(|found| {
        let source = SourceMap::default();
        Failure::from(Diagnostics::new(source, found))
    })?;
    Ok(formulas::svg(name, &graph))
}
