//! The subject of every proof: a small specification with weights and a batch.
//!
//! *Promise*: weights are a function of seed, name and kind, so that models that share a tensor's
//! name share its values; they and the tokens are drawn again until no router decides by less than
//! [`MARGIN`], since rounding alone would change such a decision, and until rounding alone moves
//! nothing by much, and squares that norms take are numbers of f32. Where no draw is of that kind,
//! [`Subject::conditioned`] says so, and what would compare rounded results is not proved.
//! Tolerances follow what rounding does ([`Noise`]).

use super::{VerifyError, error, length, widen};
use dreamc_compiler::architecture::components;
use dreamc_compiler::compiled::{Entry, Init, TensorKind};
use dreamc_compiler::count::{self, CountError, Counts};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::{Form, Shape};
use dreamc_compiler::oracle::{self, Evaluation, Forward, Oracle, Setup};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, CompileError, Compiled, Options, looks_ahead};
use dreamc_data::Batch;
use dreamc_data::batch::NO_LOSS;
use dreamc_data::rng::Philox;
use dreamc_device::Device;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::group::Group;
use dreamc_device::poison::Poisoned;
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{
    Attention, Component, Item, Model as Architecture, QkNorm, Router, RouterForm, Stream,
};
use dreamc_runtime::adapt::{adapters, tensors};
use dreamc_runtime::generate::Cached;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare::masked;
use indexmap::IndexMap;
use std::cell::{OnceCell, RefCell};

/// Rows of a batch.
pub const ROWS: usize = 2;

/// Tokens that a `prefill` takes.
const CHUNK: u64 = 3;

/// Decisions closer than this are not looked at.
pub const MARGIN: f64 = 1e-4;

/// Models whose results move further where every weight moves by a bit are not looked at.
const NOISE: f64 = 1e-4;

/// A norm in f32 squares a value, and its derivative divides by its cube: one that is larger has no
/// cube.
const LARGEST: f64 = 1e12;

/// How often weights and tokens are drawn, at the most.
const DRAWS: u64 = 12;

/// Where the proofs get what they compare. The compiler is one; tests make others.
pub trait Pipeline: Sync {
    /// Compiles a specification.
    fn compile(&self, spec: &Spec, options: &Options) -> Result<Compiled, CompileError> {
        dreamc_compiler::compile(spec, options)
    }

    /// Makes a model that the interpreter evaluates.
    fn oracle(
        &self,
        model: &Architecture,
        shape: Shape,
        recurrence: Option<u64>,
        rewriting: &Rewriting,
        form: Form,
    ) -> Result<Oracle, CompileError> {
        Oracle::with(model, shape, Setup { recurrence, rewriting, form, watch: &|_, _, _| {} })
    }

    /// One rank's group, of those that train together.
    fn group(&self, group: Group) -> Group {
        group
    }

    /// Counts a specification.
    fn count(&self, spec: &Spec, options: &count::Options) -> Result<Counts, CountError> {
        count::count(spec, options)
    }
}

/// The compiler as it is.
pub struct Compiler;

impl Pipeline for Compiler {}

/// A small specification with weights and a batch.
pub struct Subject<'a> {
    /// The specification, shrunk.
    pub spec: Spec,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Devices to compare with the CPU.
    pub devices: &'a [(String, &'a dyn Device)],
    /// Where programs come from.
    pub pipeline: &'a dyn Pipeline,
    /// Ranks to compare with one; of one, nothing is compared.
    pub ranks: u64,
    /// By tensor name; f32 values.
    pub weights: IndexMap<String, Tensor>,
    /// Rows with documents where the specification masks them.
    pub batch: Batch,
    /// The same rows as one document each.
    pub plain: Batch,
    /// How many draws of weights and tokens were looked at.
    draws: u64,
    compiled: RefCell<Vec<(Options, Compiled)>>,
    noise: OnceCell<Noise>,
    decided: OnceCell<Decided>,
}

/// Sensitivity of a model to rounding: how far its results move when every weight moves by a bit,
/// or every value is rounded to f32.
#[derive(Clone, Debug, Default)]
pub struct Noise {
    /// Relative to the largest logit.
    pub logits: f64,
    /// Of gradients, by tensor, as [`apart`] has it.
    pub gradients: IndexMap<String, f64>,
}

impl Noise {
    fn largest(&self) -> f64 {
        self.gradients.values().copied().fold(self.logits.max(1e-12), f64::max)
    }
}

/// The decisions of all forms of a subject.
#[derive(Clone, Copy)]
struct Decided {
    /// How far the closest one is from another one.
    margin: f64,
    /// Whether some were between equal scores.
    tied: bool,
    /// The largest magnitude of a number that a norm reads.
    largest: f64,
}

impl<'a> Subject<'a> {
    /// Draws tokens, and weights where none are `given`, until they are well conditioned.
    pub fn new(
        mut spec: Spec,
        seed: u64,
        given: Option<&IndexMap<String, Vec<f32>>>,
        devices: &'a [(String, &'a dyn Device)],
        pipeline: &'a dyn Pipeline,
    ) -> Result<Self, VerifyError> {
        // Proofs are of the model and of losses on tokens, over parts of a batch that are no pairs;
        // `tests/numerics/preferences.rs` proves the loss of pairs.
        spec.train.dpo = None;
        let given: IndexMap<String, Tensor> = given
            .into_iter()
            .flatten()
            .map(|(name, values)| (name.clone(), Tensor::float(&[values.len()], widen(values))))
            .collect();
        // Equal scores are equal in rounded numbers, too, where they are computed alike: better are
        // draws without.
        let look = |draw| -> Result<((bool, f64), Subject<'a>), VerifyError> {
            let subject = Subject::drawn(spec.clone(), seed, draw, &given, devices, pipeline)?;
            let Decided { margin, tied, largest } = *subject.decided()?;
            let good = (margin / MARGIN).min(NOISE / subject.noise()?.largest()).min(LARGEST / largest);
            Ok(((!tied && good >= 1.0, good), subject))
        };
        let mut best = look(0)?;
        for draw in 1..DRAWS {
            if best.0.0 {
                break;
            }
            let other = look(draw)?;
            if other.0 > best.0 {
                best = other;
            }
            best.1.draws = draw + 1;
        }
        Ok(best.1)
    }

    /// One draw, well conditioned or not.
    fn drawn(
        spec: Spec,
        seed: u64,
        draw: u64,
        given: &IndexMap<String, Tensor>,
        devices: &'a [(String, &'a dyn Device)],
        pipeline: &'a dyn Pipeline,
    ) -> Result<Self, VerifyError> {
        let mut subject = Subject {
            batch: Batch::default(),
            plain: Batch::default(),
            spec,
            seed,
            devices,
            pipeline,
            ranks: 1,
            weights: IndexMap::new(),
            draws: 1,
            compiled: RefCell::default(),
            noise: OnceCell::new(),
            decided: OnceCell::new(),
        };
        let seed = seed.wrapping_mul(DRAWS).wrapping_add(draw);
        subject.draw_batch(seed);
        let tensors = subject.oracle(None, &Rewriting::off(), Form::Training)?.tensors();
        for (name, dims, kind, init) in tensors {
            let size: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
            let values = match given.get(&name).map(Tensor::floats) {
                Some(values) if values.len() == size.iter().product::<usize>() => values.to_vec(),
                _ => subject.draw(seed, &name, &dims, kind, init),
            };
            subject.weights.insert(name, Tensor::float(&size, values));
        }
        subject.measure()?;
        Ok(subject)
    }

    /// Makes norms that adapters of DoRA keep those of their matrices.
    fn measure(&mut self) -> Result<(), VerifyError> {
        let model = &self.spec.model;
        if !model.adapt.as_ref().is_some_and(|adapt| adapt.dora) {
            return Ok(());
        }
        for adapter in adapters(&tensors(&self.spec)?)? {
            let (Some([_, name]), [.., high, wide]) = (&adapter.dora, &adapter.shape[..]) else { continue };
            let (high, wide) = (*high as usize, *wide as usize);
            let Some(w) = self.weights.get(&adapter.tensor) else { continue };
            let rows = w.floats().chunks_exact(wide).enumerate();
            let own = adapter.first as usize..(adapter.first + adapter.rows) as usize;
            let own = rows.filter(|(at, _)| own.contains(&(at % high)));
            let norms = own.map(|(_, row)| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect();
            let size = self.weights.get(name).map(|norm| norm.dims.clone()).unwrap_or_default();
            self.weights.insert(name.clone(), Tensor::float(&size, norms));
        }
        Ok(())
    }

    /// The same with another model and the same tokens; tensors of the same name and size keep
    /// their values.
    pub fn with(&self, spec: Spec) -> Result<Subject<'a>, VerifyError> {
        let other = Subject::drawn(spec, self.seed, 0, &self.weights, self.devices, self.pipeline)?;
        let (batch, plain) = (self.batch.clone(), self.plain.clone());
        Ok(Subject { batch, plain, ranks: self.ranks, ..other })
    }

    /// Whether rounding alone neither makes another decision nor moves a result by much; an error
    /// says what there is.
    pub fn conditioned(&self) -> Result<(), VerifyError> {
        let (Decided { margin, largest, .. }, noise) = (*self.decided()?, self.noise()?.largest());
        let why = if margin < MARGIN {
            format!("a router decides by {margin:.1e}, and rounding would decide otherwise")
        } else if noise > NOISE {
            format!("moving every weight by its last bit moves results by {noise:.1e}")
        } else if largest > LARGEST {
            format!("a norm reads {largest:.1e}, whose cube is no number of f32")
        } else {
            return Ok(());
        };
        Err(VerifyError::IllConditioned { draws: self.draws, why })
    }

    /// Tokens of a row.
    pub fn sequence(&self) -> usize {
        self.spec.train.sequence.unwrap_or(self.spec.model.context).min(self.spec.model.context) as usize
    }

    /// Applications of layers.
    pub fn depth(&self) -> u64 {
        dreamc_compiler::architecture::Architecture::new(&self.spec.model, None).map_or(0, |a| a.depth)
    }

    /// Numbers in all tensors.
    pub fn parameters(&self) -> u64 {
        self.weights.values().map(|t| t.floats().len() as u64).sum()
    }

    fn draw(&self, seed: u64, name: &str, dims: &[u64], kind: TensorKind, init: Init) -> Vec<f64> {
        let n = dims.iter().product::<u64>();
        let mut random = Philox::new(seed, name).stream(0);
        let inner = dims.last().copied().unwrap_or(1).max(1) as f64;
        let mut between = |wide: f64| (random.unit() * 2.0 - 1.0) * wide;
        let adapters = self.spec.model.adapt.as_ref().map_or(1.0, |adapt| adapt.scale());
        let each = |_| match (kind, init) {
            (_, Init::Constant(c)) if c != 0.0 => c + between(0.3),
            // An adapter adds little to its matrix, so that norms of rows stay far from zero,
            // whatever an error in them leaves out.
            _ if name.ends_with(".adapter_b") => between(0.3 / (inner.sqrt() * adapters)),
            (TensorKind::Gain, _) => between(0.3),
            (TensorKind::Balance, _) => between(0.2),
            (TensorKind::Embedding, _) => between(1.2),
            // A gain, or a scalar of a router.
            _ if dims.len() == 1 && inner == 1.0 => between(0.8),
            _ => between(1.7 / inner.sqrt()),
        };
        (0..n).map(each).map(|x| f64::from(x as f32)).collect()
    }

    fn draw_batch(&mut self, seed: u64) {
        let (t, vocab) = (self.sequence(), self.spec.model.vocab);
        let mut random = Philox::new(seed, "verify tokens").stream(0);
        let mut plain = Batch::new(t);
        for row in 0..ROWS {
            for i in 0..t {
                plain.ids.push(random.below(vocab) as i32);
                // Some places are not learned from.
                let learned = t * ROWS < 3 || (row + 2 * i) % 5 != 1;
                plain.targets.push(if learned { random.below(vocab) as i32 } else { NO_LOSS });
                plain.positions.push(i as i32);
                plain.segments.push(0);
            }
        }
        self.batch = plain.clone();
        if masked(&self.spec) {
            for (at, i) in (0..ROWS * t).map(|at| (at, at % t)) {
                // The first document of each row has another length.
                let cut = (t / 2 + at / t).min(t);
                self.batch.segments[at] = i32::from(i >= cut);
                self.batch.positions[at] = (if i >= cut { i - cut } else { i }) as i32;
            }
        }
        self.plain = plain;
    }

    /// The decisions of every form, exactly and with every value rounded. Scores that are equal in
    /// f64 by chance, and not because they are computed alike, are a last bit apart where every
    /// value is rounded.
    fn decided(&self) -> Result<&Decided, VerifyError> {
        if let Some(decided) = self.decided.get() {
            return Ok(decided);
        }
        let mut all = Decided { margin: f64::INFINITY, tied: false, largest: 0.0 };
        let mut see = |oracle: &Oracle, batch: &Batch| -> Result<(), VerifyError> {
            for forward in
                [self.forward(oracle, batch)?, oracle.forward_rounded(&self.weights, &of(self, batch))?]
            {
                all.margin = all.margin.min(forward.margin);
                all.tied |= forward.tied;
                all.largest = all.largest.max(forward.largest);
            }
            Ok(())
        };
        for depth in std::iter::once(None).chain(self.depths().into_iter().map(Some)) {
            see(&self.oracle(depth, &Rewriting::off(), Form::Training)?, &self.batch)?;
        }
        let inference = self.oracle(None, &Rewriting::off(), Form::Inference)?;
        let skips = inference.architecture().decides_anew();
        let masked = self.batch != self.plain;
        for (batch, decides_otherwise) in [(&self.batch, skips && masked), (&self.plain, skips || masked)] {
            if decides_otherwise {
                see(&inference, batch)?;
            }
        }
        Ok(self.decided.get_or_init(|| all))
    }

    /// Other depths that a recurrent model is looked at.
    pub fn depths(&self) -> Vec<u64> {
        let mut counts = self.spec.model.body.iter().filter_map(|i| match i {
            Item::Recur { count, .. } => Some((*count, self.spec.model.most_passes().is_some())),
            _ => None,
        });
        match (counts.next(), counts.next()) {
            // Passes with weights of their own are no more than are written.
            (Some((1, true)), None) => vec![],
            (Some((count, _)), None) if self.weights_are_few() => {
                vec![if count > 1 { count - 1 } else { 2 }]
            }
            _ => vec![],
        }
    }

    fn weights_are_few(&self) -> bool {
        self.weights.values().map(|t| t.floats().len()).sum::<usize>() < 50_000
    }

    /// Whether it looks at no later tokens, so that a model of it can be sampled from.
    pub fn causal(&self) -> bool {
        !looks_ahead(&self.spec.model)
    }

    /// Whether a model of it can be sampled from with caches.
    pub fn samples(&self) -> bool {
        self.causal() && !super::decoding::any_skip(self, &|skip, _| skip.merge)
    }

    // The interpreter -----------------------------------------------------------------------------

    /// The interpreter's model.
    pub fn oracle(
        &self,
        depth: Option<u64>,
        rewriting: &Rewriting,
        form: Form,
    ) -> Result<Oracle, VerifyError> {
        Ok(self.pipeline.oracle(&self.spec.model, self.shape(), depth, rewriting, form)?)
    }

    /// The interpreter's model, in which tokens leave their loop where more than a share of each
    /// has.
    pub fn leaving(&self, share: f64) -> Result<Oracle, VerifyError> {
        let shape = Shape { exit: Some(share), ..self.shape() };
        let (model, off) = (&self.spec.model, Rewriting::off());
        Ok(self.pipeline.oracle(model, shape, None, &off, Form::Inference)?)
    }

    fn shape(&self) -> Shape {
        let segments = masked(&self.spec);
        let (sequence, z_loss) = (self.sequence() as u64, self.spec.train.z_loss);
        Shape { batch: ROWS as u64, sequence, segments, z_loss, ..Shape::default() }
    }

    /// The interpreter's way forward.
    pub fn forward(&self, oracle: &Oracle, batch: &Batch) -> Result<Forward, VerifyError> {
        Ok(oracle.forward(&self.weights, &of(self, batch), None)?)
    }

    /// The interpreter's gradients.
    pub fn evaluation(&self, oracle: &Oracle, batch: &Batch) -> Result<Evaluation, VerifyError> {
        Ok(oracle.evaluate(&self.weights, &of(self, batch))?)
    }

    /// Sensitivity to rounding.
    pub fn noise(&self) -> Result<&Noise, VerifyError> {
        if let Some(noise) = self.noise.get() {
            return Ok(noise);
        }
        let mut moved = self.weights.clone();
        for (name, tensor) in &mut moved {
            let mut random = Philox::new(self.seed, name).stream(1);
            let values = tensor.floats().iter().map(|x| x * (1.0 + (random.unit() * 2.0 - 1.0) * 1.2e-7));
            *tensor = Tensor::float(&tensor.dims.clone(), values.collect());
        }
        let mut noise = Noise::default();
        for depth in std::iter::once(None).chain(self.depths().into_iter().map(Some)) {
            let oracle = self.oracle(depth, &Rewriting::off(), Form::Training)?;
            let base = self.evaluation(&oracle, &self.batch)?;
            let longest =
                base.gradients.values().map(|g| length(g.floats().iter().copied())).fold(0.0, f64::max);
            let moved = oracle.evaluate(&moved, &of(self, &self.batch))?;
            let rounded = oracle.evaluate_rounded(&self.weights, &of(self, &self.batch))?;
            for other in [moved, rounded] {
                noise.logits = noise.logits.max(error(other.logits.floats(), base.logits.floats()));
                for (name, g) in &base.gradients {
                    let e = other.gradients.get(name).map_or(0.0, |o| apart(o.floats(), g.floats(), longest));
                    let most = noise.gradients.entry(name.clone()).or_default();
                    *most = most.max(e);
                }
            }
        }
        // Where tokens skip or are rounded off, evaluation is another model: its tokens take part
        // by another rule.
        let inference = self.oracle(None, &Rewriting::off(), Form::Inference)?;
        let segments = if self.batch == self.plain { vec![] } else { vec![&self.plain] };
        for batch in
            [&self.batch].into_iter().chain(segments).filter(|_| inference.architecture().decides_anew())
        {
            let base = self.forward(&inference, batch)?;
            let moved = inference.forward(&moved, &of(self, batch), None)?;
            let rounded = inference.forward_rounded(&self.weights, &of(self, batch))?;
            for other in [moved, rounded] {
                noise.logits = noise.logits.max(error(other.logits.floats(), base.logits.floats()));
            }
        }
        Ok(self.noise.get_or_init(|| noise))
    }

    /// How far logits in f32 may be off, relative to the largest.
    pub fn logits_tolerance(&self) -> Result<f64, VerifyError> {
        Ok((30.0 * self.noise()?.logits).clamp(1e-5, 1e-2))
    }

    /// How far a gradient in f32 may be off, relative to its length.
    pub fn gradient_tolerance(&self, name: &str) -> Result<f64, VerifyError> {
        let noise: f64 = self.noise()?.gradients.get(name).copied().unwrap_or(0.0);
        // The derivative of a norm of one number is a difference of equal ones times the number's
        // reciprocal, and that of a softmax over one key a difference of equal ones: rounding
        // before does not show what is left of either.
        let of_one = if self.norms_of_one() || self.sequence() == 1 { 50.0 } else { 1.0 };
        // Lanes differ little, and so do sums of sources: the gradient of what weighs them is a
        // difference of nearly equal sums.
        let of_alike = match self.spec.model.stream {
            Stream::Lanes { .. } | Stream::Attend { .. } => 10.0,
            Stream::Sum => 1.0,
        };
        let least = 2e-5 * of_one * of_alike;
        Ok((30.0 * noise).clamp(least, 5e-2))
    }

    /// Whether some norm is of one number.
    fn norms_of_one(&self) -> bool {
        let router = |r: &Router| matches!(r.form, RouterForm::LowRank { query: 1, .. });
        let attention = |a: &Attention| {
            let head = a.qk_norm == QkNorm::Rms && a.head_size == 1;
            let all = a.qk_norm == QkNorm::RmsAll && a.kv_heads * a.head_size == 1;
            head || all
        };
        let component =
            |c: &Component| c.attention().is_some_and(attention) || c.router().is_some_and(router);
        self.spec.model.hidden == 1 || components(&self.spec.model).values().any(component)
    }

    // Devices -------------------------------------------------------------------------------------

    /// The CPU with unwritten memory poisoned: a launch that reads any makes a proof fail.
    pub fn cpu(&self, threads: usize) -> Poisoned<'static> {
        poisoned(threads)
    }

    /// Compiler options of training.
    pub fn options(&self) -> Options {
        Options {
            batch: ROWS as u64,
            sequence: self.sequence() as u64,
            train: true,
            logits: true,
            segments: masked(&self.spec),
            depths: self.depths(),
            ..Options::default()
        }
    }

    /// Compiler options of generation.
    pub fn cached_options(&self, rewrite: &Rewriting) -> Options {
        let cache = Cache {
            places: self.spec.model.context,
            chunk: CHUNK.min(self.spec.model.context),
            slack: f64::INFINITY,
            every: false,
        };
        Options {
            batch: ROWS as u64,
            sequence: cache.chunk,
            logits: true,
            cache: Some(cache),
            rewrite: rewrite.clone(),
            ..Options::default()
        }
    }

    /// Compiles, once for the same options.
    pub fn compile(&self, options: &Options) -> Result<Compiled, VerifyError> {
        if let Some((_, compiled)) = self.compiled.borrow().iter().find(|(o, _)| o == options) {
            return Ok(compiled.clone());
        }
        let compiled = self.pipeline.compile(&self.spec, options)?;
        self.compiled.borrow_mut().push((options.clone(), compiled.clone()));
        Ok(compiled)
    }

    /// Puts a compiled model with its weights on a device.
    pub fn load(&self, device: &dyn Device, options: &Options) -> Result<Model, VerifyError> {
        let mut model = Model::load(device, self.compile(options)?)?;
        self.fill(&mut model)?;
        Ok(model)
    }

    /// A model with caches, with its weights.
    pub fn cached(&self, device: &dyn Device, rewrite: &Rewriting) -> Result<Cached, VerifyError> {
        self.cached_by(device, &self.cached_options(rewrite))
    }

    /// The same by options of its own.
    pub fn cached_by(&self, device: &dyn Device, options: &Options) -> Result<Cached, VerifyError> {
        let mut cached = Cached::load(device, self.compile(options)?)?;
        self.fill(cached.model())?;
        Ok(cached)
    }

    /// Gives a model its weights.
    pub fn fill(&self, model: &mut Model) -> Result<(), VerifyError> {
        for (name, _) in model.entries() {
            if let Some(tensor) = self.weights.get(&name) {
                let values: Vec<f32> = tensor.floats().iter().map(|&x| x as f32).collect();
                model.set(&name, &values)?;
            }
        }
        Ok(())
    }
}

/// The CPU with unwritten memory poisoned.
pub fn poisoned(threads: usize) -> Poisoned<'static> {
    Poisoned(Box::new(CpuDevice::new(CpuOptions { threads: Some(threads) })))
}

/// A batch as the interpreter takes it.
pub fn of(s: &Subject, batch: &Batch) -> oracle::Batch {
    oracle::Batch {
        noise: noise(&s.spec, batch),
        draws: draws(&s.spec, batch),
        ids: batch.ids.clone(),
        targets: batch.targets.clone(),
        positions: batch.positions.clone(),
        segments: batch.segments.clone(),
    }
}

/// The noise that streams start with, a row for each token.
pub fn noise(spec: &Spec, batch: &Batch) -> Vec<f64> {
    widen(&dreamc_runtime::noise::of_positions(spec.train.seed, &batch.positions, spec.model.hidden as usize))
}

/// Numbers by which attentions drop weights, one of each token.
pub fn draws(spec: &Spec, batch: &Batch) -> Vec<i32> {
    dreamc_runtime::noise::draws_of_positions(spec.train.seed, &batch.positions)
}

/// Results of a micro-batch on a device.
pub struct Trained {
    /// `[batch, seq, vocab]` of the form that is differentiated.
    pub logits: Vec<f64>,
    /// The loss, of routers too.
    pub loss: f64,
    /// By tensor name.
    pub gradients: IndexMap<String, Vec<f64>>,
}

/// Forward and back; gradients begin at zero.
pub fn backward(model: &mut Model, batch: &Batch, depth: Option<u64>) -> Result<Trained, VerifyError> {
    model.drop_step()?;
    let scale = Scale { loss: 1.0 / batch.learned().max(1) as f32, auxiliary: 1.0 };
    add_backward(model, batch, scale, depth, true)
}

/// The same, added to what is there unless a step is to `begin`.
pub fn add_backward(
    model: &mut Model,
    batch: &Batch,
    scale: Scale,
    depth: Option<u64>,
    begin: bool,
) -> Result<Trained, VerifyError> {
    if begin {
        model.begin_step()?;
    }
    model.backward(batch, scale, depth)?;
    let loss = f64::from(model.loss()?) + f64::from(model.auxiliary()?.unwrap_or(0.0));
    let mut gradients = IndexMap::new();
    for tensor in model.compiled().tensors.clone() {
        if let Some(gradient) = model.gradient(&tensor)? {
            gradients.insert(tensor.name, widen(&gradient));
        }
    }
    Ok(Trained { logits: widen(&model.all_logits()?), loss, gradients })
}

/// The streams of the last program, `[depth + 1]` of `[batch, seq, hidden]`; none where the plan
/// keeps none.
pub fn streams(model: &mut Model, entry: Entry) -> Result<Vec<Vec<f64>>, VerifyError> {
    let Some(buffer) = model.compiled().stream(entry) else { return Ok(vec![]) };
    let elements = model.compiled().plan.buffer(buffer).elements() as usize;
    let all = model.session().read_all::<f32>(buffer)?;
    Ok(all.chunks(elements.max(1)).map(widen).collect())
}

/// How far gradients are apart, relative to their length. Rounding in the backward is that of the
/// `longest` gradient of the model, so that a gradient which is small next to it is compared less
/// closely: where a norm is of one number, its derivative is a difference of equal numbers, and all
/// before it are zero but for rounding.
pub fn apart(found: &[f64], expected: &[f64], longest: f64) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let difference = length(found.iter().zip(expected).map(|(a, b)| a - b));
    let e = difference / (length(expected.iter().copied()) + SMALL * longest).max(1e-12);
    if e.is_nan() { f64::INFINITY } else { e }
}

/// Share of the longest gradient that is added to the length of each.
const SMALL: f64 = 0.015;
