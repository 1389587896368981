//! A model of a run, a checkpoint, an import or a specification, as arrays.

use crate::errors::{DreamcError, IntoPython};
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::probe::{self, Probe};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile};
use dreamc_data::{Batch, Tokenizer};
use dreamc_device::Device;
use dreamc_dsl::Spec;
use dreamc_runtime::analysis::probe::Probing;
use dreamc_runtime::generate::{Sampling, generate};
use dreamc_runtime::model::{self, Scale};
use dreamc_runtime::train::prepare;
use dreamc_study::device::Kind;
use dreamc_study::failure::Failure;
use dreamc_study::model::{Passes, Texts, Trained};
use dreamc_study::spec::{Named, is_specification, resolved};
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

/// Texts that are written at once, at most.
const TEXTS: usize = 64;

/// Token ids by row.
type Rows = Vec<Vec<u64>>;

/// Name, dimensions and sizes of a value inside.
type Listed = (String, Vec<String>, Vec<u64>);

/// The device of that name.
pub fn device(name: &str, threads: Option<usize>) -> Result<Box<dyn Device>, Failure> {
    let kind: Kind = name.parse().map_err(|known| Failure::Usage(format!("no device `{name}`; {known}")))?;
    kind.open(threads)
}

/// A shape of batches that a program was compiled for.
#[derive(Clone, Copy, PartialEq)]
struct Shape {
    rows: u64,
    sequence: u64,
    train: bool,
}

/// The parts of a model.
struct Inner {
    spec: Spec,
    device: Box<dyn Device>,
    depth: Option<u64>,
    /// The program used last.
    loaded: Option<(Shape, model::Model)>,
    /// The program that was looked into last.
    probing: Option<((Shape, Probe), Probing)>,
    /// Weights and tokenizer; a specification has none, and draws its weights.
    trained: Option<Trained>,
}

/// A model with weights, on a device.
#[pyclass(frozen, module = "dreamc._dreamc")]
pub struct Model(Mutex<Inner>);

fn lost<T>(_: T) -> PyErr {
    DreamcError::new_err("an earlier call on this model failed in a way that lost it; load it again")
}

impl Inner {
    /// Rows as inputs and next tokens.
    fn batch(&self, rows: &Rows, next: bool) -> Result<Batch, Failure> {
        let refuse = |what: String| Err(Failure::Usage(what));
        let (vocab, context) = (self.spec.model.vocab, self.spec.model.context);
        let length = rows.first().map_or(0, Vec::len);
        let sequence = length.saturating_sub(usize::from(next));
        if sequence == 0 {
            return refuse(format!("ids need a row of at least {} tokens", 1 + usize::from(next)));
        }
        if let Some(i) = rows.iter().position(|row| row.len() != length) {
            return refuse(format!(
                "row {i} of ids has {} tokens and row 0 has {length}; all must be equally long",
                rows[i].len()
            ));
        }
        if sequence as u64 > context {
            return refuse(format!("{sequence} positions exceed the model's context {context}"));
        }
        if let Some(id) = rows.iter().flatten().find(|id| **id >= vocab) {
            return refuse(format!("id {id} is not below the vocabulary of {vocab}"));
        }
        let mut batch = Batch::new(sequence);
        for row in rows {
            batch.ids.extend(row[..sequence].iter().map(|&id| id as i32));
            match next {
                true => batch.targets.extend(row[1..].iter().map(|&id| id as i32)),
                // Any target: the loss is not read.
                false => batch.targets.extend(row.iter().map(|&id| id as i32)),
            }
            batch.positions.extend(0..sequence as i32);
            batch.segments.extend(std::iter::repeat_n(0, sequence));
        }
        Ok(batch)
    }

    /// The model compiled for the shape of a batch, with its weights.
    fn model(&mut self, batch: &Batch, train: bool) -> Result<&mut model::Model, Failure> {
        let shape = Shape { rows: batch.rows() as u64, sequence: batch.sequence as u64, train };
        if self.loaded.as_ref().is_none_or(|(found, _)| *found != shape) {
            let forward = prepare::forward(shape.rows, shape.sequence);
            let options = Options { train, logits: true, depth: self.depth, ..forward };
            let mut spec = self.spec.clone();
            // Every gradient is wanted, whatever training would leave out.
            spec.train.only.clear();
            spec.train.freeze.clear();
            (self.loaded, self.probing) = (None, None);
            let mut model = model::Model::load(self.device.as_ref(), compile(&spec, &options)?)?;
            match &self.trained {
                Some(trained) => model.restore(&trained.tensors)?,
                None => model.initialise(spec.train.seed)?,
            }
            self.loaded = Some((shape, model));
        }
        match &mut self.loaded {
            Some((_, model)) => Ok(model),
            None => Err(Failure::Usage("no program was compiled".into())),
        }
    }

    fn options(&self, shape: Shape) -> Options {
        Options { logits: true, depth: self.depth, ..prepare::forward(shape.rows, shape.sequence) }
    }

    /// The model compiled to be looked into, with its weights.
    fn probing(&mut self, batch: &Batch, probe: Probe) -> Result<&mut Probing, Failure> {
        let shape = Shape { rows: batch.rows() as u64, sequence: batch.sequence as u64, train: false };
        let wanted = (shape, probe);
        if self.probing.as_ref().is_none_or(|(found, _)| *found != wanted) {
            let options = Options { probe: wanted.1.clone(), ..self.options(shape) };
            (self.loaded, self.probing) = (None, None);
            let mut model = model::Model::load(self.device.as_ref(), compile(&self.spec, &options)?)?;
            match &self.trained {
                Some(trained) => model.restore(&trained.tensors)?,
                None => model.initialise(self.spec.train.seed)?,
            }
            self.probing = Some((wanted, Probing::new(model)?));
        }
        match &mut self.probing {
            Some((_, probing)) => Ok(probing),
            None => Err(Failure::Usage("no program was compiled".into())),
        }
    }

    fn trained(&self) -> Result<&Trained, Failure> {
        self.trained.as_ref().ok_or_else(|| {
            Failure::Usage(
                "text needs a tokenizer: load a run, a checkpoint or an import, not a specification".into(),
            )
        })
    }

    fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        self.trained()?.tokenizer()
    }
}

impl Model {
    fn lock(&self) -> PyResult<MutexGuard<'_, Inner>> {
        self.0.lock().map_err(lost)
    }

    /// Works on the model with the interpreter's lock released.
    fn work<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.0.lock().map_err(lost).map(|mut inner| work(&mut inner)))?.python(py)
    }
}

/// An array of this shape over the values, which it owns.
fn array<'py>(py: Python<'py>, values: Vec<f32>, shape: &[u64]) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
    let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
    PyArray1::from_vec(py, values).reshape(shape)
}

/// Arrays by their names, each of a shape and its values.
fn arrays<'py>(py: Python<'py>, all: Vec<(String, Vec<u64>, Vec<f32>)>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, shape, values) in all {
        dict.set_item(name, array(py, values, &shape)?)?;
    }
    Ok(dict)
}

#[pymethods]
impl Model {
    /// Opens a run, a checkpoint, an import, or a specification, whose weights its seed draws.
    #[new]
    #[pyo3(signature = (path, device="cpu", threads=None, depth=None, set=vec![]))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        device: &str,
        threads: Option<usize>,
        depth: Option<u64>,
        set: Vec<String>,
    ) -> PyResult<Self> {
        py.detach(|| {
            let device = self::device(device, threads)?;
            let (spec, trained) = if is_specification(&path) {
                (Named { spec: path, set }.load()?, None)
            } else {
                let trained = Trained::open(&path, None, &set, Rewriting::default())?;
                (trained.spec.clone(), Some(trained))
            };
            Ok::<_, Failure>(Model(Mutex::new(Inner {
                spec,
                device,
                depth,
                loaded: None,
                probing: None,
                trained,
            })))
        })
        .python(py)
    }

    /// The specification with every default, as YAML.
    #[getter]
    fn spec(&self) -> PyResult<String> {
        Ok(resolved(&self.lock()?.spec))
    }

    /// The model's name.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.lock()?.spec.model.name.clone())
    }

    /// Size of the vocabulary.
    #[getter]
    fn vocab(&self) -> PyResult<u64> {
        Ok(self.lock()?.spec.model.vocab)
    }

    /// Longest sequence in tokens.
    #[getter]
    fn context(&self) -> PyResult<u64> {
        Ok(self.lock()?.spec.model.context)
    }

    /// Logits after every token, `[rows, tokens, vocab]`.
    fn logits<'py>(&self, py: Python<'py>, ids: Rows) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let shape = [ids.len() as u64, ids.first().map_or(0, Vec::len) as u64, self.vocab()?];
        let values = self.work(py, move |inner| {
            let batch = inner.batch(&ids, false)?;
            let model = inner.model(&batch, false)?;
            model.evaluate(&batch)?;
            Ok(model.all_logits()?)
        })?;
        array(py, values, &shape)
    }

    /// Mean loss in nats of the tokens after the first.
    fn loss(&self, py: Python<'_>, ids: Rows) -> PyResult<f64> {
        self.work(py, move |inner| {
            let batch = inner.batch(&ids, true)?;
            let nll = inner.model(&batch, false)?.evaluate(&batch)?;
            Ok(nll.iter().map(|&x| f64::from(x)).sum::<f64>() / nll.len().max(1) as f64)
        })
    }

    /// The loss, and the gradient of every tensor by name.
    fn gradients<'py>(&self, py: Python<'py>, ids: Rows) -> PyResult<(f64, Bound<'py, PyDict>)> {
        let (loss, found) = self.work(py, move |inner| {
            let batch = inner.batch(&ids, true)?;
            let model = inner.model(&batch, true)?;
            model.begin_step()?;
            let scale = Scale { loss: 1.0 / batch.learned() as f32, auxiliary: 1.0 };
            model.backward(&batch, scale, None)?;
            let mut found = vec![];
            for tensor in model.compiled().tensors.iter().filter(|t| t.gradient.is_some()) {
                let values = model.gradient(tensor)?.unwrap_or_default();
                found.push((tensor.name.clone(), tensor.shape.clone(), values));
            }
            Ok((f64::from(model.loss()?), found))
        })?;
        Ok((loss, arrays(py, found)?))
    }

    /// The stream before each layer and after the last, `[depth + 1, rows, tokens, hidden]`.
    fn hidden<'py>(&self, py: Python<'py>, ids: Rows) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let (values, shape) = self.work(py, move |inner| {
            let batch = inner.batch(&ids, false)?;
            let model = inner.model(&batch, true)?;
            model.begin_step()?;
            model.backward(&batch, Scale { loss: 0.0, auxiliary: 0.0 }, None)?;
            let buffer = model
                .compiled()
                .stream(Entry::Whole)
                .ok_or_else(|| Failure::Usage("the plan of this model keeps no streams".into()))?;
            let b = model.compiled().plan.buffer(buffer);
            let (instances, each) = (b.instances, b.elements());
            let rows = [batch.rows() as u64, batch.sequence as u64];
            let shape = [instances, rows[0], rows[1], each / (rows[0] * rows[1]).max(1)];
            Ok((model.session().read_all::<f32>(buffer).map_err(model::ModelError::from)?, shape))
        })?;
        array(py, values, &shape)
    }

    /// Logits and captured values by name, with other values patched at some tokens or at all.
    #[pyo3(signature = (ids, capture, patch, tokens=None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        ids: Rows,
        capture: Vec<String>,
        patch: Vec<(String, PyReadonlyArrayDyn<'py, f32>)>,
        tokens: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut given = vec![];
        for (name, array) in &patch {
            let shape: Vec<u64> = array.shape().iter().map(|&n| n as u64).collect();
            // In the order of rows, whatever the array's own is.
            let values: Vec<f32> = array.as_array().iter().copied().collect();
            given.push((name.clone(), shape, values));
        }
        let vocab = self.vocab()?;
        let found = self.work(py, move |inner| {
            let batch = inner.batch(&ids, false)?;
            let shape = [batch.rows() as u64, batch.sequence as u64, vocab];
            let past = tokens.iter().flatten().find(|at| **at >= batch.sequence);
            if let Some(at) = past {
                let last = batch.sequence - 1;
                return Err(Failure::Usage(format!("tokens: there is no token {at}, the last is {last}")));
            }
            let patched = given.iter().map(|(name, ..)| name.clone()).collect();
            let probing = inner.probing(&batch, Probe { captured: capture, patched })?;
            probing.clear()?;
            for (name, shape, _) in &given {
                probing.check(name, shape)?;
            }
            for (name, shape, values) in &given {
                let each = shape[2..].iter().product::<u64>().max(1) as usize;
                let along = shape[1].max(1) as usize;
                let here = |i: usize| tokens.as_ref().is_none_or(|all| all.contains(&(i / each % along)));
                probing.change(name, (shape, values), here)?;
            }
            probing.model().evaluate(&batch)?;
            let mut found = vec![("logits".to_string(), shape.to_vec(), probing.model().all_logits()?)];
            let captured: Vec<_> = probing.captured().map(|probed| probed.point.clone()).collect();
            for point in captured {
                let values = probing.value(&point.name)?;
                found.push((point.name, point.shape, values));
            }
            Ok(found)
        })?;
        arrays(py, found)
    }

    /// Names, dimensions and sizes of what can be captured.
    fn points(&self, py: Python<'_>, rows: u64, tokens: u64) -> PyResult<Vec<Listed>> {
        self.work(py, move |inner| {
            let options = inner.options(Shape { rows, sequence: tokens, train: false });
            let all = probe::points(&inner.spec.model, &options)?;
            Ok(all.into_iter().map(|point| (point.name, point.dims, point.shape)).collect())
        })
    }

    /// Every tensor by name.
    fn weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.work(py, |inner| {
            if inner.loaded.is_none() {
                let batch = inner.batch(&vec![vec![0]], false)?;
                inner.model(&batch, false)?;
            }
            let Some((_, model)) = &inner.loaded else { return Ok(vec![]) };
            let mut found = vec![];
            for tensor in &model.compiled().tensors {
                found.push((tensor.name.clone(), tensor.shape.clone(), model.get(&tensor.name)?));
            }
            Ok(found)
        })?;
        arrays(py, found)
    }

    /// Token ids of a text, with the begin token where the model was trained with one.
    #[pyo3(signature = (text, begin=true))]
    fn tokenize(&self, py: Python<'_>, text: String, begin: bool) -> PyResult<Vec<u32>> {
        self.work(py, move |inner| {
            let tokenizer = inner.tokenizer()?;
            match begin {
                true => inner.trained()?.prompt(&tokenizer, &text),
                false => Ok(tokenizer.encode(&text)?),
            }
        })
    }

    /// The text of token ids.
    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>) -> PyResult<String> {
        self.work(py, move |inner| Ok(inner.tokenizer()?.decode(&ids)))
    }

    /// The token that ends a text.
    #[getter]
    fn end_token(&self, py: Python<'_>) -> PyResult<u32> {
        self.work(py, |inner| Ok(inner.tokenizer()?.end()))
    }

    /// Continues texts: the text and the ids that were written after each.
    #[pyo3(signature = (prompts, max_tokens=128, temperature=0.0, top_p=None, top_k=None, seed=0, stop=vec![], cache=true))]
    #[allow(clippy::too_many_arguments, reason = "the keywords of a Python function")]
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<String>,
        max_tokens: usize,
        temperature: f64,
        top_p: Option<f64>,
        top_k: Option<usize>,
        seed: u64,
        stop: Vec<String>,
        cache: bool,
    ) -> PyResult<Vec<(String, Vec<u32>)>> {
        if !(temperature >= 0.0 && temperature.is_finite()) || top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
            return Err(DreamcError::new_err("temperature must be 0 or larger, top_p above 0 and at most 1"));
        }
        if max_tokens == 0 || top_k == Some(0) {
            return Err(DreamcError::new_err("max_tokens and top_k must be at least 1"));
        }
        self.work(py, move |inner| {
            let trained = inner.trained()?;
            let tokenizer = trained.tokenizer()?;
            let ids = prompts.iter().map(|p| trained.prompt(&tokenizer, p)).collect::<Result<Vec<_>, _>>()?;
            let texts = Texts::after(&ids, max_tokens, TEXTS);
            let passes = Passes { depth: inner.depth, exit: None };
            let mut decoder = trained.decoder(inner.device.as_ref(), texts, passes, cache)?;
            let sampling = Sampling { temperature, top_k, top_p, seed, max_tokens, stop };
            let written = generate(decoder.as_mut(), &tokenizer, &ids, &sampling, &mut |_, _| {})?;
            Ok(written.into_iter().map(|w| (w.text, w.tokens)).collect())
        })
    }
}
