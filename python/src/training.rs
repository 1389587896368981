//! Training from Python.

use crate::errors::IntoPython;
use crate::model::device;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_device::group::Group;
use dreamc_runtime::train::event::Event;
use dreamc_runtime::train::folder::{Place, RunFolder};
use dreamc_runtime::train::{Setup, Stop, prepare, run, signal};
use dreamc_study::failure::Failure;
use dreamc_study::model::{beginning, stored};
use dreamc_study::spec::{Named, open_data, resolved};
use dreamc_study::transplant;
use pyo3::prelude::*;
use std::path::PathBuf;

/// Trains a specification: the folder of the run and its ledger as JSON. `on_step` gets a dict for
/// every step and every evaluation; an exception of its ends the run at the end of the step, with a
/// checkpoint.
#[pyfunction]
#[pyo3(signature = (spec, data=None, out=None, set=vec![], device_name="cpu", threads=None, on_step=None))]
#[allow(clippy::too_many_arguments, reason = "the keywords of a Python function")]
pub fn train(
    py: Python<'_>,
    spec: PathBuf,
    data: Option<PathBuf>,
    out: Option<PathBuf>,
    set: Vec<String>,
    device_name: &str,
    threads: Option<usize>,
    on_step: Option<Py<PyAny>>,
) -> PyResult<(PathBuf, String)> {
    let mut raised: Option<PyErr> = None;
    let heard = &mut raised;
    signal::forget();
    let result = py.detach(move || {
        let spec = Named { spec, set }.load_to_train(data.as_deref())?;
        let Some(section) = &spec.data else {
            return Err(Failure::Usage("the specification has no data; name a file with `data`".into()));
        };
        let device = device(device_name, threads)?;
        transplant::check(&spec)?;
        let formats = stored(&spec, None, device.as_ref(), &Group::alone());
        let rewriting = Rewriting::default();
        let prepared = prepare::prepare(&spec, device.as_ref(), &rewriting, &Group::alone(), &formats)?;
        let dataset = open_data(&spec, section, spec.eval.stride)?;
        let place = match out {
            Some(path) => Place::At { path, force: false },
            None => Place::Numbered { runs: "runs".into(), name: spec.model.name.clone() },
        };
        let folder = RunFolder::create(&place)?;
        let text = resolved(&spec);
        folder.begin(&text, &dataset.tokenizer, &prepared.rewriting)?;
        let base = beginning(&spec, None, (folder.path(), device.as_ref()))?;
        let mut watch = |event: &Event| {
            let line = match event {
                Event::Step { line, .. } => serde_json::to_string(line),
                Event::Evaluated(line) => serde_json::to_string(line),
                Event::Busy(_) | Event::Sample { .. } | Event::Saved { .. } | Event::Note(_) => return,
            };
            let (Some(call), Ok(line), true) = (&on_step, line, heard.is_none()) else { return };
            *heard = Python::attach(|py| {
                py.check_signals()?;
                let line = py.import("json")?.call_method1("loads", (line,))?;
                call.call1(py, (line,)).map(drop)
            })
            .err();
            if heard.is_some() {
                signal::ask();
            }
        };
        let setup = Setup {
            spec: &spec,
            base,
            text: &text,
            device: device.as_ref(),
            dataset: &dataset,
            group: Group::alone(),
            folder: Some(&folder),
            from: None,
            allow_changes: false,
            count: false,
        };
        let outcome = run(prepared, setup, &mut watch)?;
        let ledger = serde_json::to_string(&outcome.ledger)?;
        Ok((folder.path().to_path_buf(), ledger, outcome.stop))
    });
    if let Some(error) = raised {
        return Err(error);
    }
    match result.python(py)? {
        (folder, ledger, Stop::Finished | Stop::Early) => Ok((folder, ledger)),
        (_, _, Stop::Interrupted(signal)) => Err(Failure::Stopped(signal)).python(py),
    }
}
