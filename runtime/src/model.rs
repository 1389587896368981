//! A compiled model on a device: the one place where names of tensors become buffers.
//!
//! *In*: a [`Compiled`] and a [`Device`]. *Out*: a [`Model`] that takes batches and gives losses,
//! gradients, logits. *Promise*: all memory is allocated by [`Model::load`]; a tensor is reached by
//! its name of `docs/dev/semantics.md` section 11, its moments by `{name}.m` and `{name}.v`, its
//! selection counts by `{name}.counts`, its gradient by [`Model::gradient`].

use crate::adapt;
use crate::checkpoint::safetensors::{Entry, Tensors, View};
use crate::checkpoint::{CheckpointError, Weights};
use crate::init;
use crate::noise;
use dreamc_compiler::Compiled;
use dreamc_compiler::bind::{Factor, Input, Output};
use dreamc_compiler::compiled::{Entry as Of, Tensor};
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::attention::drawn;
use dreamc_compiler::program::{BufferId, Plan, Space, Task};
use dreamc_data::Batch;
use dreamc_device::group::GroupError;
use dreamc_device::{Device, DeviceError, Element, Group, RunStats, Session};
use dreamc_dsl::spec::Shard;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Errors between a model and its device.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The device fails.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint does not fit, or cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The plan lacks what every plan has: a bug of the compiler.
    #[error("the compiled plan has no buffer `{0}`")]
    NoBuffer(String),
    /// It cannot be compiled.
    #[error(transparent)]
    Compile(#[from] dreamc_compiler::CompileError),
    /// A wrapped part processed more tokens than its cache was given room for.
    #[error("a cache of processed tokens has no room left: the router processes more than its capacity says")]
    CacheFull,
    /// The logits after every token of a prompt were asked for, without the program for them.
    #[error(
        "the model reads prompts for what follows them alone: load it with `Writing::every` for the logits after every token"
    )]
    LastLogits,
    /// A batch of another shape.
    #[error("a batch of {rows} rows of {sequence} tokens does not fit a model compiled for {expected}")]
    Shape {
        /// Rows given.
        rows: usize,
        /// Tokens of each.
        sequence: usize,
        /// The compiled batch shape.
        expected: String,
    },
}

/// A model in the memory of a device.
pub struct Model {
    compiled: Compiled,
    /// Shared by all uses of one plan.
    session: Arc<Mutex<Box<dyn Session>>>,
    /// Places of tensors, moments and counts by name.
    places: HashMap<String, Place>,
    batch: u64,
    sequence: u64,
    /// Counts the changes of weights, of all uses.
    weights: Arc<AtomicU64>,
    /// The count when this use last computed values of weights alone.
    prepared: u64,
    /// The step of the next micro-batch and its first row, see [`Model::at`].
    at: Option<(u64, u64)>,
    /// Whether the next micro-batch is the last of a step.
    last: bool,
    /// The ranks that are handed what is cut over them.
    hands: Option<Group>,
}

#[derive(Clone, Copy)]
struct Place {
    buffer: BufferId,
    instance: u64,
    first: u64,
    elements: u64,
}

/// The place of all numbers of a tensor.
fn whole(t: &Tensor, buffer: BufferId) -> Place {
    Place { buffer, instance: t.instance, first: 0, elements: t.elements() }
}

/// The place of those that are kept.
fn part(t: &Tensor, buffer: BufferId) -> Place {
    Place { buffer, instance: 0, first: t.first_kept, elements: t.kept.end - t.kept.start }
}

/// The place of a weight or a gradient.
fn place(t: &Tensor, buffer: BufferId) -> Place {
    if t.cut { part(t, buffer) } else { whole(t, buffer) }
}

/// Bytes of the device's memory by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// Weights.
    pub weights: u64,
    /// Weights as their files have them, not in the total where they are there, which other
    /// processes share; a GPU has a copy, which is.
    #[serde(skip_serializing_if = "nothing")]
    pub mapped: u64,
    /// Gradients.
    pub gradients: u64,
    /// States of the optimizer.
    pub optimizer: u64,
    /// Kept activations, depth caches, counts.
    pub activations: u64,
    /// Inputs, results and values of one program.
    pub temporary: u64,
    /// Memory of the device outside the plan.
    pub scratch: u64,
    /// All of it: known before the first allocation, and never exceeded.
    pub total: u64,
}

/// Whether there are no bytes.
fn nothing(bytes: &u64) -> bool {
    *bytes == 0
}

/// Factors of the losses of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// One over the targets of the whole step.
    pub loss: f32,
    /// One over the micro-batches of the step: losses of routers are means over a micro-batch.
    pub auxiliary: f32,
}

impl Memory {
    /// Memory of a plan and of `scratch` bytes outside it, on a device that has copies of mapped
    /// weights or reads their files.
    pub fn of(plan: &Plan, scratch: u64, copies: bool) -> Self {
        let of = |spaces: &[Space]| {
            plan.buffers.iter().filter(|b| spaces.contains(&b.space)).map(|b| b.bytes()).sum::<u64>()
        };
        let (weights, mapped) = (of(&[Space::Weights]), of(&[Space::Mapped]));
        let gradients = of(&[Space::Gradients]);
        let (optimizer, activations) = (of(&[Space::Optimizer]), of(&[Space::State, Space::Saved]));
        // Values of one program share memory, so what is left of the arena is theirs.
        let temporary = plan.arena.saturating_sub(weights + gradients + optimizer + activations);
        let total = plan.arena + scratch + if copies { plan.mapped } else { 0 };
        Memory { weights, mapped, gradients, optimizer, activations, temporary, scratch, total }
    }
}

impl Model {
    /// Puts a model into the memory of a device; all values are zero.
    pub fn load(device: &dyn Device, compiled: Compiled) -> Result<Self, ModelError> {
        Model::of_rank(device, compiled, &Group::alone())
    }

    /// The same on one rank of a group, for as many ranks as which it was compiled.
    pub fn of_rank(device: &dyn Device, compiled: Compiled, group: &Group) -> Result<Self, ModelError> {
        let session = Arc::new(Mutex::new(device.load(&compiled.plan, group)?));
        Model::over(compiled, session, Arc::new(AtomicU64::new(1)))
    }

    /// Another use of the same weights, of the plan that this model is a use of:
    /// [`dreamc_compiler::compile_together`].
    pub fn beside(&self, compiled: Compiled) -> Result<Self, ModelError> {
        if self.session().plan() != &compiled.plan {
            return Err(ModelError::NoBuffer("of another plan".into()));
        }
        Model::over(compiled, self.session.clone(), self.weights.clone())
    }

    fn over(
        compiled: Compiled,
        session: Arc<Mutex<Box<dyn Session>>>,
        weights: Arc<AtomicU64>,
    ) -> Result<Self, ModelError> {
        let ids = [Of::Whole, Of::Prefill].iter().find_map(|&of| compiled.input(of, Input::Ids));
        let ids = ids.ok_or_else(|| ModelError::NoBuffer("ids".into()))?;
        let (batch, sequence) = match compiled.plan.buffer(ids).shape[..] {
            [batch, sequence] => (batch, sequence),
            _ => return Err(ModelError::NoBuffer("ids [batch, sequence]".into())),
        };
        let mut places = HashMap::new();
        for t in &compiled.tensors {
            places.insert(t.name.clone(), place(t, t.weight));
            if let Some(counts) = t.counts {
                places.insert(format!("{}.counts", t.name), whole(t, counts));
            }
            for &(state, buffer) in &t.states {
                places.insert(format!("{}.{state}", t.name), part(t, buffer));
            }
        }
        let (prepared, at, last, hands) = (0, None, false, None);
        Ok(Model { compiled, session, places, batch, sequence, weights, prepared, at, last, hands })
    }

    /// Tensors that are cut over the ranks of a group.
    pub fn shard(&self) -> Shard {
        self.compiled.cut
    }

    /// Whether programs exchange numbers wherever they read weights, so that all ranks run them
    /// together.
    pub fn is_shared(&self) -> bool {
        self.compiled.tensors.iter().any(|tensor| tensor.cut)
    }

    /// All numbers of a tensor. Each rank has brought its own: those that it keeps, where they are
    /// cut over ranks.
    pub fn together(tensor: &Tensor, group: &Group, own: &[f32]) -> Result<Vec<f32>, GroupError> {
        // Of ranks that own the same experts the first brings them.
        let brings = tensor.owners == 1 || group.rank() < tensor.owners;
        let own = if brings { own } else { &[] };
        let bytes = group.gather(bytemuck::cast_slice(own))?.concat();
        match bytes.len() as u64 == tensor.elements() * size_of::<f32>() as u64 {
            true => Ok(bytemuck::pod_collect_to_vec(&bytes)),
            false => {
                Err(GroupError::Meeting(format!("the ranks have other numbers of {} together", tensor.name)))
            }
        }
    }

    /// How many ranks own experts together, where they do.
    pub fn team(&self) -> Option<u64> {
        self.compiled.tensors.iter().map(|tensor| tensor.owners).find(|owners| *owners > 1)
    }

    /// The tensor of a name, or of the name of one of its states.
    pub fn tensor_of(&self, name: &str) -> Option<&Tensor> {
        let of = |t: &&Tensor| {
            let state = name.strip_prefix(&t.name).and_then(|rest| rest.strip_prefix('.'));
            t.name == name || t.states.iter().any(|(own, _)| Some(*own) == state)
        };
        self.compiled.tensors.iter().find(of)
    }

    /// From now on [`Model::set_whole`] hands the numbers of tensors that are cut to the other
    /// ranks of a group, which [take](Model::take_handed) them.
    pub fn hand_to(&mut self, group: &Group) {
        self.hands = Some(group.clone());
    }

    /// Ends what [`Model::hand_to`] began.
    pub fn handed(&mut self) -> Result<(), ModelError> {
        match self.hands.take() {
            Some(group) => Ok(group.broadcast(0, &[]).map(drop).map_err(DeviceError::from)?),
            None => Ok(()),
        }
    }

    /// Takes what rank 0 hands, until it [ends](Model::handed).
    pub fn take_handed(&mut self, group: &Group) -> Result<(), ModelError> {
        loop {
            let name = group.broadcast(0, &[]).map_err(DeviceError::from)?;
            if name.is_empty() {
                return Ok(());
            }
            let values = group.broadcast(0, &[]).map_err(DeviceError::from)?;
            let name = String::from_utf8_lossy(&name).into_owned();
            self.set_whole(&name, &bytemuck::pod_collect_to_vec::<u8, f32>(&values))?;
        }
    }

    /// The compiled program.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// Rows of a batch.
    pub fn batch(&self) -> usize {
        self.batch as usize
    }

    /// Tokens of a row.
    pub fn sequence(&self) -> usize {
        self.sequence as usize
    }

    /// Number of parameters; balancing biases are state, not parameters, and are not counted.
    pub fn parameters(&self) -> u64 {
        parameters(&self.compiled)
    }

    /// Memory of the model on its device.
    pub fn memory(&self) -> Memory {
        let session = self.session();
        Memory::of(&self.compiled.plan, session.scratch_bytes(), session.copies())
    }

    /// The device's side, for what has no method here.
    pub fn session(&self) -> MutexGuard<'_, Box<dyn Session>> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a program of this use.
    fn run(&self, task: Task) -> Result<RunStats, ModelError> {
        Ok(self.session().run(self.compiled.program(task))?)
    }

    /// Gives all tensors their first values, but those that stay in a file.
    pub fn initialise(&mut self, seed: u64) -> Result<(), ModelError> {
        for i in 0..self.compiled.tensors.len() {
            let t = &self.compiled.tensors[i];
            if self.compiled.plan.buffer(t.weight).space == Space::Mapped {
                continue;
            }
            let elements = t.shape.iter().product::<u64>() as usize;
            let values = init::values(seed, &t.name, t.init, elements);
            let name = t.name.clone();
            self.set_whole(&name, &values)?;
        }
        self.measure(false, |_| true)
    }

    /// Gives those adapters of DoRA whose tensors are `new` the norms of their matrices' rows:
    /// magnitudes begin as these. Matrices of a file count once it is `mapped`.
    fn measure(&mut self, mapped: bool, new: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        for i in 0..self.compiled.tensors.len() {
            let t = &self.compiled.tensors[i];
            let Some((matrix, Factor::Norm)) = t.part.adapter() else { continue };
            let stem = t.name.strip_suffix(t.part.path()).unwrap_or_default();
            let magnitude = format!("{stem}{}", matrix.adapter(Factor::Magnitude).path());
            let names: Vec<String> = [t.name.clone(), magnitude].into_iter().filter(|n| new(n)).collect();
            let beside = format!("{stem}{}", matrix.path());
            let Some(w) = self.compiled.tensors.iter().find(|t| t.name == beside) else {
                return Err(ModelError::NoBuffer(beside));
            };
            let ([.., high, wide], Some(&rows)) = (&w.shape[..], t.shape.last()) else { continue };
            let later = !mapped && self.compiled.plan.buffer(w.weight).space == Space::Mapped;
            if later || names.is_empty() {
                continue;
            }
            let place = [adapt::first(matrix, *high, rows), rows];
            let norms = adapt::norms(&self.get(&w.name)?, [*high, *wide], place);
            names.iter().try_for_each(|name| self.set_whole(name, &norms))?;
        }
        Ok(())
    }

    /// Takes all tensors from a checkpoint; every tensor must be there, of the right shape. Of what
    /// is cut over ranks each reads its own part, [`Model::restore_part`].
    pub fn restore(&mut self, from: &Weights) -> Result<(), ModelError> {
        let new = self.fill(from, true)?;
        match new.first() {
            None => Ok(()),
            Some(name) => Err(mismatch(from.path(), format!("it lacks the tensor {name}"))),
        }
    }

    /// Takes the tensors that a checkpoint has, and gives the names of those it has not. It must
    /// have none that the model has not.
    pub fn begin_from(&mut self, from: &Weights) -> Result<Vec<String>, ModelError> {
        self.fill(from, false)
    }

    /// Takes of a file, of tensors or of states, the numbers of this rank where they are cut over
    /// ranks.
    pub fn restore_part(&mut self, from: &Tensors) -> Result<(), ModelError> {
        let entries = [self.entries(), self.optimizer_entries()].concat();
        entries
            .iter()
            .filter(|entry| from.stored(&entry.0).is_some())
            .try_for_each(|entry| self.take_part(from, entry).map(drop))
    }

    /// Takes this rank's numbers of a tensor that is cut over ranks; says whether it is.
    fn take_part(&mut self, from: &Tensors, (name, shape): &Entry) -> Result<bool, ModelError> {
        let Some(part) = self.part(name) else { return Ok(false) };
        if let Some(stored) = from.stored(name).filter(|stored| stored.shape != shape) {
            return Err(other_shape(from.path(), name, stored.shape, shape));
        }
        if !part.is_empty()
            && let Some((_, values)) = from.range(name, part.start as u64..part.end as u64)?
        {
            self.set(name, &values)?;
        }
        Ok(true)
    }

    fn fill(&mut self, from: &Weights, parts: bool) -> Result<Vec<String>, ModelError> {
        let entries = self.entries();
        let unknown = from.entries().find(|(name, _)| !entries.iter().any(|(n, _)| n == name));
        if let Some((name, _)) = unknown {
            return Err(mismatch(from.path(), format!("it has a tensor {name}, which the model has not")));
        }
        let mut new = vec![];
        for entry in &entries {
            if self.map(from, entry)? {
                continue;
            }
            let own = from.own();
            if parts && own.stored(&entry.0).is_some() && self.take_part(own, entry)? {
                continue;
            }
            match from.get(&entry.0)? {
                Some(view) => self.take(from.path(), entry, view)?,
                None => new.push(entry.0.clone()),
            }
        }
        self.measure(true, |name| new.iter().any(|new| new == name))?;
        Ok(new)
    }

    /// Takes moments and selection counts from a file.
    pub fn restore_optimizer(&mut self, from: &Tensors) -> Result<(), ModelError> {
        for entry in &self.optimizer_entries() {
            if from.stored(&entry.0).is_some() && self.take_part(from, entry)? {
                continue;
            }
            let found = from.get(&entry.0)?;
            let view =
                found.ok_or_else(|| mismatch(from.path(), format!("it lacks the tensor {}", entry.0)))?;
            self.take(from.path(), entry, view)?;
        }
        Ok(())
    }

    /// Refuses a file that [`Model::restore_optimizer`] would not take.
    pub fn check_optimizer(&self, from: &Tensors) -> Result<(), ModelError> {
        for (name, shape) in &self.optimizer_entries() {
            match from.stored(name) {
                Some(found) if found.shape == shape => {}
                Some(found) => return Err(other_shape(from.path(), name, found.shape, shape)),
                None => return Err(mismatch(from.path(), format!("it lacks the tensor {name}"))),
            }
        }
        Ok(())
    }

    /// Leaves a tensor in its file, where it was compiled for that; says whether it was.
    fn map(&mut self, from: &Weights, (name, shape): &Entry) -> Result<bool, ModelError> {
        let place = *self.places.get(name).ok_or_else(|| ModelError::NoBuffer(name.clone()))?;
        if self.compiled.plan.buffer(place.buffer).space != Space::Mapped {
            return Ok(false);
        }
        let lacking = || mismatch(from.path(), format!("it lacks the tensor {name}"));
        let (found, numbers) = from.mapped(name)?.ok_or_else(lacking)?;
        if found != shape {
            return Err(other_shape(from.path(), name, found, shape));
        }
        let dtype = self.compiled.plan.buffer(place.buffer).dtype;
        if from.storage(name).is_none_or(|stored| stored.format.dtype != dtype) {
            let problem = format!("{name} is not {} there, for which the model was compiled", dtype.name());
            return Err(mismatch(from.path(), problem));
        }
        self.weights.fetch_add(1, Relaxed);
        self.session().map(place.buffer, place.instance, numbers)?;
        Ok(true)
    }

    fn take(&mut self, path: &Path, (name, shape): &Entry, (found, values): View) -> Result<(), ModelError> {
        if found != shape {
            return Err(other_shape(path, name, found, shape));
        }
        self.set_whole(name, &values)
    }

    /// Whether training changes a tensor.
    pub fn trains(&self, name: &str) -> bool {
        let tensor = self.compiled.tensors.iter().find(|t| t.name == name);
        tensor.is_some_and(|t| !t.states.is_empty() || t.counts.is_some())
    }

    /// Whether a tensor is one of an adapter.
    pub fn adapts(&self, name: &str) -> bool {
        let tensor = self.compiled.tensors.iter().find(|t| t.name == name);
        tensor.is_some_and(|t| t.part.adapter().is_some())
    }

    /// Names and shapes of the tensors.
    pub fn entries(&self) -> Vec<Entry> {
        self.compiled.tensors.iter().map(|t| (t.name.clone(), t.shape.clone())).collect()
    }

    /// Which numbers of a tensor or a state are here, where it is cut over ranks; nothing for all
    /// else.
    pub fn part(&self, name: &str) -> Option<std::ops::Range<usize>> {
        let of = |t: &Tensor| {
            let is = |state: &str| {
                name.strip_prefix(&t.name).and_then(|rest| rest.strip_prefix('.')) == Some(state)
            };
            let state = t.states.iter().any(|(state, _)| is(state));
            let own = state && (t.cut || self.compiled.cut.states()) || t.cut && name == t.name;
            own.then_some(t.kept.start as usize..t.kept.end as usize)
        };
        self.compiled.tensors.iter().find_map(of)
    }

    /// Names and shapes of moments and selection counts.
    pub fn optimizer_entries(&self) -> Vec<Entry> {
        let of = |t: &Tensor| {
            let states = t.states.iter().map(|(name, _)| *name);
            states
                .chain(t.counts.map(|_| "counts"))
                .map(|kind| (format!("{}.{kind}", t.name), t.shape.clone()))
                .collect::<Vec<_>>()
        };
        self.compiled.tensors.iter().flat_map(of).collect()
    }

    /// Values of a tensor, its moments or counts; of what is cut over ranks, this rank's.
    pub fn get(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let place = *self.places.get(name).ok_or_else(|| ModelError::NoBuffer(name.into()))?;
        self.read(place)
    }

    /// Sets a tensor, its moments or counts; all numbers are given; of what is cut over
    /// ranks, this rank takes its own.
    pub fn set_whole(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        let Some(part) = self.part(name) else { return self.set(name, values) };
        if let Some(group) = &self.hands {
            let bytes: [&[u8]; 2] = [name.as_bytes(), bytemuck::cast_slice(values)];
            bytes
                .iter()
                .try_for_each(|bytes| group.broadcast(0, bytes).map(drop))
                .map_err(DeviceError::from)?;
        }
        match values.get(part) {
            Some([]) => Ok(()),
            Some(own) => self.set(name, own),
            None => {
                let problem = format!("rank 0 has {name} of another length");
                Err(DeviceError::from(GroupError::Meeting(problem)).into())
            }
        }
    }

    /// Sets a tensor, its moments or counts; of what is cut over ranks, this rank's.
    pub fn set(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        let place = *self.places.get(name).ok_or_else(|| ModelError::NoBuffer(name.into()))?;
        let b = self.compiled.plan.buffer(place.buffer);
        if b.space == Space::Mapped {
            return Err(DeviceError::ReadOnly { buffer: b.name.clone() }.into());
        }
        let dtype = b.dtype;
        self.weights.fetch_add(1, Relaxed);
        if dtype == DType::Bf16 {
            let values: Vec<half::bf16> = values.iter().map(|&v| half::bf16::from_f32(v)).collect();
            Ok(self.session().write_at(place.buffer, place.instance, place.first, &values)?)
        } else {
            Ok(self.session().write_at(place.buffer, place.instance, place.first, values)?)
        }
    }

    /// Gradient of a tensor, where one is computed; where it is cut over ranks, this rank's part.
    pub fn gradient(&self, tensor: &Tensor) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(buffer) = tensor.gradient else { return Ok(None) };
        self.read(place(tensor, buffer)).map(Some)
    }

    fn read(&self, place: Place) -> Result<Vec<f32>, ModelError> {
        let n = place.elements as usize;
        if let DType::Packed(packed) = self.compiled.plan.buffer(place.buffer).dtype {
            let mut bytes = vec![0u8; DType::Packed(packed).room(place.elements) as usize];
            self.session().read(place.buffer, place.instance, place.first, &mut bytes)?;
            let mut values = vec![0.0; n];
            packed.unpack(&bytes, &mut values);
            return Ok(values);
        }
        if self.compiled.plan.buffer(place.buffer).dtype == DType::Bf16 {
            let mut values = vec![half::bf16::ZERO; n];
            self.session().read_at(place.buffer, place.instance, place.first, &mut values)?;
            return Ok(values.into_iter().map(half::bf16::to_f32).collect());
        }
        let mut values = vec![0.0; n];
        self.session().read_at(place.buffer, place.instance, place.first, &mut values)?;
        Ok(values)
    }

    fn output(&self, of: Of, output: Output) -> Result<BufferId, ModelError> {
        let missing = || ModelError::NoBuffer(output.name().into());
        self.compiled.output(of, output).ok_or_else(missing)
    }

    fn scalar(&self, output: Output) -> Result<f32, ModelError> {
        let mut value = [0.0f32];
        self.session().read_at(self.output(Of::Whole, output)?, 0, 0, &mut value)?;
        Ok(value[0])
    }

    fn put(&mut self, batch: &Batch) -> Result<(), ModelError> {
        if batch.rows() as u64 != self.batch || batch.sequence as u64 != self.sequence {
            let expected = format!("{} rows of {}", self.batch, self.sequence);
            return Err(ModelError::Shape { rows: batch.rows(), sequence: batch.sequence, expected });
        }
        let parts =
            [(Input::Ids, &batch.ids), (Input::Targets, &batch.targets), (Input::Segments, &batch.segments)];
        for (input, values) in parts {
            self.give(Of::Whole, input, values)?;
        }
        if let Some(buffer) = self.compiled.input(Of::Whole, Input::Reference) {
            // Without any the loss is that of a model that found both answers as likely.
            let mut reference = batch.reference.clone();
            reference.resize(self.batch as usize / 2, 0.0);
            self.session().write_at(buffer, 0, 0, &reference)?;
        }
        self.give_positions(Of::Whole, &batch.positions)
    }

    /// Gives programs the positions of tokens, the noise that streams start with there, and the
    /// numbers by which attentions drop weights.
    pub fn give_positions(&mut self, of: Of, positions: &[i32]) -> Result<(), ModelError> {
        self.give(of, Input::Positions, positions)?;
        self.give_noise(of, |seed, hidden| noise::of_positions(seed, positions, hidden))?;
        self.give_draws(of, |seed| noise::draws_of_positions(seed, positions))
    }

    fn give_noise(&mut self, of: Of, make: impl Fn(u64, usize) -> Vec<f32>) -> Result<(), ModelError> {
        let Some(buffer) = self.compiled.input(of, Input::Noise) else { return Ok(()) };
        let hidden = self.compiled.plan.buffer(buffer).shape.last().copied().unwrap_or(0);
        let values = make(self.compiled.seed, hidden as usize);
        Ok(self.session().write_at(buffer, 0, 0, &values)?)
    }

    /// Gives every attention of every application that drops weights its numbers of these tokens.
    fn give_draws(&mut self, of: Of, make: impl Fn(u64) -> Vec<i32>) -> Result<(), ModelError> {
        let Some(buffer) = self.compiled.input(of, Input::Draws) else { return Ok(()) };
        let tokens = make(self.compiled.seed);
        let (each, all) = (self.compiled.draws.max(1), self.compiled.plan.buffer(buffer).instances);
        for instance in 0..all {
            let (application, number) = (instance / each, instance % each);
            let values: Vec<i32> = tokens.iter().map(|&x| drawn(x, application, number)).collect();
            self.session().write_at(buffer, instance, 0, &values)?;
        }
        Ok(())
    }

    /// Says which step the next micro-batch belongs to, and which row of the step is its first:
    /// noise that streams start with, and weights that attentions drop, are then drawn by step, row
    /// and token; without, by position.
    pub fn at(&mut self, step: u64, row: u64) {
        self.at = Some((step, row));
    }

    /// Says that the next micro-batch is the last of this rank's in a step: its gradients are
    /// summed over the ranks while they are computed.
    pub fn last(&mut self) {
        self.last = true;
    }

    /// Begins a step: no loss yet, of routers neither.
    pub fn begin_step(&mut self) -> Result<(), ModelError> {
        if let Some(auxiliary) = self.compiled.output(Of::Whole, Output::Aux) {
            self.session().write_at(auxiliary, 0, 0, &[0.0f32])?;
        }
        if let Some(taught) = self.compiled.output(Of::Whole, Output::Taught) {
            self.session().write_at(taught, 0, 0, &[0.0f32])?;
        }
        let loss = self.output(Of::Whole, Output::Loss)?;
        Ok(self.session().write_at(loss, 0, 0, &[0.0f32])?)
    }

    /// Forward and back over one micro-batch; gradients and loss add up. `depth` is another count
    /// of the outermost `recur`, of those compiled for.
    pub fn backward(
        &mut self,
        batch: &Batch,
        scale: Scale,
        depth: Option<u64>,
    ) -> Result<RunStats, ModelError> {
        self.put(batch)?;
        if let Some((step, row)) = self.at.take() {
            let (first, tokens) = (row * self.sequence, batch.ids.len());
            self.give_noise(Of::Whole, |seed, hidden| noise::of_step(seed, step, first, tokens, hidden))?;
            self.give_draws(Of::Whole, |seed| noise::draws_of_step(seed, step, first, tokens))?;
        }
        self.give(Of::Whole, Input::LossScale, &[scale.loss])?;
        self.give(Of::Whole, Input::AuxScale, &[scale.auxiliary])?;
        let last = std::mem::take(&mut self.last);
        let sends = last && self.compiled.has(Task::Backward { depth, last });
        self.run(Task::Backward { depth, last: sends })
    }

    /// The loss of the step so far.
    pub fn loss(&self) -> Result<f32, ModelError> {
        self.scalar(Output::Loss)
    }

    /// The losses of a teacher in the step so far; `None` where the model has none.
    pub fn taught(&self) -> Result<Option<f32>, ModelError> {
        let taught = self.compiled.output(Of::Whole, Output::Taught);
        taught.map(|_| self.scalar(Output::Taught)).transpose()
    }

    /// The losses of routers in the step so far, added up over its micro-batches; `None` where the
    /// model has none.
    pub fn auxiliary(&self) -> Result<Option<f32>, ModelError> {
        let auxiliary = self.compiled.output(Of::Whole, Output::Aux);
        auxiliary.map(|_| self.scalar(Output::Aux)).transpose()
    }

    /// The norm of the gradients of the step. Nothing is changed yet.
    pub fn norm(&mut self) -> Result<f32, ModelError> {
        self.run(Task::Norm)?;
        self.scalar(Output::Norm)
    }

    /// The optimizer step; [`Model::norm`] comes before it.
    pub fn update(&mut self, scalars: &[(Input, f32)]) -> Result<RunStats, ModelError> {
        for &(input, value) in scalars {
            self.give(Of::Whole, input, &[value])?;
        }
        self.weights.fetch_add(1, Relaxed);
        self.run(Task::Update)
    }

    /// Forgets the gradients and counts of a step that is not to be taken.
    pub fn drop_step(&mut self) -> Result<(), ModelError> {
        let mut places = vec![];
        for t in &self.compiled.tensors {
            places.extend(t.gradient.map(|buffer| place(t, buffer)));
            places.extend(t.counts.map(|buffer| whole(t, buffer)));
        }
        for Place { buffer, instance, first, elements } in places {
            let b = self.compiled.plan.buffer(buffer);
            let zeros = vec![0u8; b.dtype.room(elements) as usize];
            self.session().write(buffer, instance, first, &zeros)?;
        }
        Ok(())
    }

    /// Forward alone.
    pub fn forward(&mut self, batch: &Batch) -> Result<RunStats, ModelError> {
        self.put(batch)?;
        self.run(Task::Evaluate)
    }

    /// Forward alone; gives the loss of every token.
    pub fn evaluate(&mut self, batch: &Batch) -> Result<Vec<f32>, ModelError> {
        self.forward(batch)?;
        Ok(self.session().read_all(self.output(Of::Whole, Output::Nll)?)?)
    }

    /// Runs a program over caches, after [`Task::Prepare`] where weights were set since that ran.
    pub fn run_cached(&mut self, entry: Of) -> Result<RunStats, ModelError> {
        let weights = self.weights.load(Relaxed);
        if self.prepared != weights && self.compiled.has(Task::Prepare) {
            self.run(Task::Prepare)?;
        }
        self.prepared = weights;
        self.run(entry.task())
    }

    /// Gives programs an input. They have only those that they use: others go nowhere.
    pub fn give<T: Element>(&mut self, of: Of, input: Input, values: &[T]) -> Result<(), ModelError> {
        match self.compiled.input(of, input) {
            Some(buffer) => Ok(self.session().write_at(buffer, 0, 0, values)?),
            None => Ok(()),
        }
    }

    /// Fills all instances of a buffer of integers with one number.
    pub fn fill_ints(&mut self, buffer: BufferId, value: i32) -> Result<(), ModelError> {
        let b = self.compiled.plan.buffer(buffer);
        let values = vec![value; (b.elements() * b.instances) as usize];
        Ok(self.session().write_at(buffer, 0, 0, &values)?)
    }

    /// All instances of a buffer of integers.
    pub fn read_ints(&self, buffer: BufferId) -> Result<Vec<i32>, ModelError> {
        Ok(self.session().read_all(buffer)?)
    }

    /// The row `cell` of the logits of an entry.
    pub fn logits_of(&self, of: Of, cell: u64) -> Result<Vec<f32>, ModelError> {
        let buffer = self.output(of, Output::Logits)?;
        let vocab = self.compiled.plan.buffer(buffer).shape.last().copied().unwrap_or(0);
        let mut values = vec![0.0; vocab as usize];
        self.session().read_at(buffer, 0, cell * vocab, &mut values)?;
        Ok(values)
    }

    /// Logits of the token after place `column` of row `row`, of the last evaluation.
    pub fn logits(&self, row: usize, column: usize) -> Result<Vec<f32>, ModelError> {
        self.logits_of(Of::Whole, row as u64 * self.sequence + column as u64)
    }

    /// All logits of the last evaluation, `[batch, sequence, vocab]`.
    pub fn all_logits(&self) -> Result<Vec<f32>, ModelError> {
        let id = self.output(Of::Whole, Output::Logits)?;
        Ok(match self.compiled().plan.buffer(id).dtype {
            DType::Bf16 => self.session().read_all::<half::bf16>(id)?.into_iter().map(f32::from).collect(),
            DType::F32 | DType::I32 | DType::E4m3 | DType::Packed(_) => self.session().read_all(id)?,
        })
    }
}

fn other_shape(path: &Path, name: &str, found: &[u64], shape: &[u64]) -> ModelError {
    mismatch(path, format!("{name} is {found:?} there and {shape:?} in the model"))
}

fn mismatch(path: &Path, problem: String) -> ModelError {
    CheckpointError::Mismatch { path: path.to_path_buf(), problem }.into()
}

/// Number of parameters of a compiled model.
pub fn parameters(compiled: &Compiled) -> u64 {
    use dreamc_compiler::compiled::TensorKind;
    let counted = compiled.tensors.iter().filter(|t| t.kind != TensorKind::Balance);
    counted.map(|t| t.shape.iter().product::<u64>()).sum()
}
