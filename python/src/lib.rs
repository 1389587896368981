//! The module `dreamc._dreamc`, which the package `python/dreamc` wraps.
//!
//! *In*: paths, lists of token ids, settings as Python has them. *Out*: NumPy arrays that own what
//! the device wrote, and JSON text. *Promise*: work is done with the interpreter's lock released; a
//! mistake is an exception of [`errors`], with file, line and column where there is a file; nothing
//! of the compiler or the runtime is done a second way here.

mod errors;
mod model;
mod training;

use dreamc_compiler::count;
use dreamc_compiler::matching::{self, Request};
use dreamc_dsl::Spelling;
use dreamc_study::spec::Named;
use errors::{IntoPython, SpecError};
use pyo3::prelude::*;
use std::path::PathBuf;

/// Runs a command line, without the program's name; gives its exit code.
#[pyfunction]
fn run(py: Python<'_>, arguments: Vec<String>) -> u8 {
    py.detach(|| dreamc::run(std::iter::once("dreamc".to_string()).chain(arguments)))
}

/// Checks a specification: its text with every default, and its warnings as JSON.
#[pyfunction]
fn check(py: Python<'_>, spec: PathBuf, set: Vec<String>) -> PyResult<(String, String)> {
    let (checked, warnings) = dreamc_dsl::load(&spec, &set).python(py)?;
    let warnings: serde_json::Value = warnings.iter().map(|w| w.to_json(&checked.sources)).collect();
    Ok((dreamc_dsl::show(&checked, Spelling::Yaml), warnings.to_string()))
}

/// Counts a specification: the JSON of `dreamc count --json`.
#[pyfunction]
fn count_spec(py: Python<'_>, spec: PathBuf, set: Vec<String>, tokens: Option<u64>) -> PyResult<String> {
    let named = Named { spec, set };
    py.detach(|| {
        let spec = named.load()?;
        let tokens = tokens.unwrap_or(matching::TOKENS.min(spec.model.context));
        let counts = count::count(&spec, &count::Options { tokens, device: None })?;
        Ok::<_, dreamc_study::failure::Failure>(serde_json::to_string(&counts)?)
    })
    .python(py)
}

/// Matches a specification to its baseline by its `match` section: the JSON of
/// `dreamc match --json`.
#[pyfunction]
fn match_spec(py: Python<'_>, spec: PathBuf, set: Vec<String>) -> PyResult<String> {
    let named = Named { spec, set };
    py.detach(|| {
        let spec = named.load()?;
        let Some(section) = &spec.matching else {
            let what = "the specification has no `match` section, which names its baseline";
            return Err(dreamc_study::failure::Failure::Usage(what.into()));
        };
        let baseline = Named { spec: named.base().join(&section.baseline), set: vec![] }.load()?;
        let mut request = Request::from(section);
        request.tokens = matching::TOKENS.min(spec.model.context).min(baseline.model.context);
        Ok(serde_json::to_string(&matching::find(&spec, &baseline, &request)?)?)
    })
    .python(py)
}

#[pymodule]
fn _dreamc(module: &Bound<'_, PyModule>) -> PyResult<()> {
    dreamc_runtime::train::signal::ignore_limits();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DreamcError", module.py().get_type::<errors::DreamcError>())?;
    module.add("SpecError", module.py().get_type::<SpecError>())?;
    module.add_class::<model::Model>()?;
    module.add_function(wrap_pyfunction!(run, module)?)?;
    module.add_function(wrap_pyfunction!(check, module)?)?;
    module.add_function(wrap_pyfunction!(count_spec, module)?)?;
    module.add_function(wrap_pyfunction!(match_spec, module)?)?;
    module.add_function(wrap_pyfunction!(training::train, module)?)?;
    Ok(())
}
