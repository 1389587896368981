//! Failures as exceptions: `DreamcError`, and `SpecError` with `file`, `line`, `column` of the
//! first diagnostic and all `diagnostics`.

use dreamc_dsl::Diagnostics;
use dreamc_study::failure::Failure;
use pyo3::exceptions::{PyException, PyKeyboardInterrupt};
use pyo3::prelude::*;

pyo3::create_exception!(_dreamc, DreamcError, PyException, "Why dreamc did not do what was asked.");
pyo3::create_exception!(_dreamc, SpecError, DreamcError, "A specification has errors.");

/// A result that Python raises the error of.
pub trait IntoPython<T> {
    /// The value, or its error raised.
    fn python(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<Failure>> IntoPython<T> for Result<T, E> {
    fn python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, error.into()))
    }
}

fn raise(py: Python<'_>, failure: Failure) -> PyErr {
    match failure {
        Failure::Diagnostics(found) => spec_error(py, &found).unwrap_or_else(|error| error),
        Failure::Stopped(signal) => PyKeyboardInterrupt::new_err(signal),
        Failure::Usage(_) | Failure::Error(_) | Failure::Said | Failure::Unread => {
            DreamcError::new_err(failure.to_string())
        }
    }
}

/// An exception with the diagnostics of a file, as `dreamc check --json` has them.
fn spec_error(py: Python<'_>, found: &Diagnostics) -> PyResult<PyErr> {
    let error = SpecError::new_err(found.render(false));
    let list = py.import("json")?.call_method1("loads", (found.to_json().to_string(),))?;
    let value = error.value(py);
    let first = list.get_item(0).and_then(|d| d.get_item("at")).ok().filter(|at| !at.is_none());
    for name in ["file", "line", "column"] {
        let field = first.as_ref().and_then(|at| at.get_item(name).ok());
        value.setattr(name, field)?;
    }
    value.setattr("diagnostics", list)?;
    Ok(error)
}
