//! Declared counts: what an architecture has and does, before anything is optimised.
//!
//! *In*: a spec. *Out*: [`Counts`]: parameters, FLOPs per token, bytes, and times predicted for a
//! device. *Promise*: every FLOP comes from [`cost`](crate::ir::cost()) on the lowered IR, walked
//! with its loops, so that counting takes the same time at every depth; sums are exact or an error,
//! never wrapped.
//!
//! Conventions, which `dreamc count` prints under its table:
//!
//! - The IR is the canonical inference form ([`lower_inference`]): the shared expert of a
//!   projection mixture is added to the routed ones, which saves its product and not its storage.
//!   Training is that form and its derivative.
//! - A FLOP is one multiply or one add of a matrix product, causal attention over the positions
//!   that exist, router products and head included, embedding look-up not. Element-wise work is
//!   reported separately.
//! - *Decode* is the mean over a generated sequence. Every product acts on each token by itself and
//!   token `i` attends to `min(i, window)` keys, so this is the forward over the whole sequence
//!   divided by its length: no second form of the IR is needed. *Prefill* is the same without the
//!   head of all tokens but the last. Generation reads a prompt in chunks, and computes the head
//!   for the last token of each.
//! - Latents of attention stand for keys and values where caches hold them: in bytes, not in FLOPs,
//!   which are those of the formulas, whether or not a program absorbs matrices.
//! - A balancing bias is no parameter: no gradient reaches it. It is reported separately from the
//!   total.
//! - *Active* parameters are those that one token can touch: of a mixture `k` matrices for each
//!   application of its weights, or all where that is more than there are.
//!
//! Look next at `walk` (sums over loops), [`device`] and [`roofline`] (times), [`executed`] (counts
//! of a compiled plan).

pub mod device;
pub mod executed;
pub mod network;
pub mod roofline;
#[cfg(test)]
mod tests;
mod walk;

use crate::CompileError;
use crate::architecture::{Architecture, Keys};
use crate::autodiff::{Seed, body_seeds, differentiate, has_derivative, head_seeds, partition, prune};
use crate::bind::{Counted, Owner};
use crate::compiled::TensorKind;
use crate::ir::{
    Binding, Cost, CostError, DType, Function, Lifetime, Module, Node, Op, Output, Port, Type, Value,
};
use crate::lower::{
    EMBED, HEAD, Lowered, Places, Shape, State, Weight, latent_place, lower, lower_declared_training,
    lower_inference,
};
use crate::op::{Attention, Work};
use crate::optim::{Rule, matrix, optimizer, storage};
use device::{Device, Predicted};
use dreamc_dsl::spec::{Kind, Model, Precision, Spec, Train};
use indexmap::IndexMap;
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, HashSet};
use thiserror::Error;

/// Why something could not be counted.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum CountError {
    /// The spec does not become IR.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A number exceeds what exact arithmetic holds.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// A sum exceeds 128 bits.
    #[error("the count of {0} exceeds 128 bits")]
    Overflow(&'static str),
}

/// Options of counting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Length of the generated sequence, and of the prompt.
    pub tokens: u64,
    /// The device to predict times for.
    pub device: Option<&'static Device>,
}

impl Default for Options {
    fn default() -> Self {
        Options { tokens: 1024, device: None }
    }
}

/// Everything that is counted of an architecture. Serialised, the keys are stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Counts {
    /// The model's name.
    pub model: String,
    /// Applications of layers.
    pub depth: u64,
    /// Length of the sequence that decoding is averaged over.
    pub tokens: u64,
    /// Tokens of a sequence in training.
    pub sequence: u64,
    /// Sequences of a micro-batch in training.
    pub micro_batch: u64,
    /// How weights and activations are stored.
    pub precision: Precision,
    /// Trained numbers.
    pub parameters: Parameters,
    /// Products.
    pub flops_per_token: Flops,
    /// Everything else, in operations.
    pub elementwise_per_token: Elementwise,
    /// Bytes.
    pub memory_bytes: Memory,
    /// Times, where a device was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Predicted>,
}

/// Numbers of parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Parameters {
    /// All trained tensors.
    pub total: u128,
    /// Those that one token can touch.
    pub active: u128,
    /// Those that the recipe trains, where some are frozen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trained: Option<u128>,
    /// By kind; they add up to the total.
    #[serde(flatten)]
    pub kinds: Kinds,
    /// Entries of balancing biases, which are not in the total.
    pub balance: u128,
    /// By component; they add up to the total.
    pub by_component: IndexMap<String, u128>,
}

/// Numbers of parameters by kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Kinds {
    /// The embedding table (and head, where they are one).
    pub embedding: u128,
    /// The output head.
    pub head: u128,
    /// Matrices that every token uses.
    pub dense: u128,
    /// Matrices that routers choose from.
    pub routed: u128,
    /// Shared experts of mixtures.
    pub shared: u128,
    /// Routers.
    pub router: u128,
    /// Gains of norms.
    pub gain: u128,
}

/// A number of operations for some tokens, given as their mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerToken {
    /// Operations for all of them.
    pub total: u128,
    /// How many tokens.
    pub tokens: u128,
}

impl PerToken {
    /// The mean.
    pub fn mean(self) -> f64 {
        self.total as f64 / self.tokens.max(1) as f64
    }
}

impl Serialize for PerToken {
    /// The mean, as an integer where it is one.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match u64::try_from(self.total / self.tokens.max(1)) {
            Ok(mean) if self.total.is_multiple_of(self.tokens.max(1)) => serializer.serialize_u64(mean),
            _ => serializer.serialize_f64(self.mean()),
        }
    }
}

/// FLOPs per token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flops {
    /// A generated token, averaged over the sequence.
    pub decode: PerToken,
    /// A token of a prompt, the head at its end included.
    pub prefill: PerToken,
    /// A token of a training step: the sum of the next three.
    pub training: PerToken,
    /// Its way forward.
    pub training_forward: PerToken,
    /// Its way back, without what is done a second time.
    pub training_backward: PerToken,
    /// Products that the way back repeats: the scores of attention.
    pub training_recomputation: PerToken,
    /// Decoding by component; they add up.
    pub decode_by_component: IndexMap<String, PerToken>,
    /// Decoding by kind of product; they add up.
    pub decode_by_kind: IndexMap<&'static str, PerToken>,
}

/// Element-wise operations per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Elementwise {
    /// A generated token.
    pub decode: PerToken,
    /// A token of a prompt.
    pub prefill: PerToken,
    /// A token of a training step.
    pub training: PerToken,
}

/// Bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Parameters as they are stored for products, and balancing biases in f32.
    pub weights: u128,
    /// Gradients, in f32.
    pub gradients: u128,
    /// The optimizer's states in f32, and f32 master weights where products use bf16.
    pub optimizer: u128,
    /// The optimizer's states alone, which ranks may cut.
    #[serde(skip)]
    pub states: u128,
    /// Memory that the backward reads of a micro-batch: streams, saved values, depth caches and
    /// their gradients, logits.
    pub activations: u128,
    /// Keys and values of one sequence, the mean over a generated sequence.
    pub sequence_cache: u128,
    /// The same at the end of the model's context.
    pub sequence_cache_context: u128,
    /// States of one text that do not grow with it: states of recurrences, the last tokens of
    /// convolutions.
    #[serde(skip_serializing_if = "is_zero")]
    pub text_state: u128,
    /// Keys and values along depth of one token.
    pub depth_cache: u128,
    /// Weights and caches while a sequence is generated.
    pub generation: u128,
    /// Weights, gradients, optimizer and activations.
    pub training: u128,
    /// Activations by component; they add up.
    pub activations_by_component: IndexMap<String, u128>,
    /// Caches of one text of the model's whole context by component: keys and values of the
    /// sequence, states of the text, keys and values along depth. They add up to
    /// `sequence_cache_context`, `text_state` and `depth_cache`.
    pub caches_by_component: IndexMap<String, u128>,
}

fn is_zero(bytes: &u128) -> bool {
    *bytes == 0
}

/// Quantities that `dreamc match` compares: exact, and quick to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// Parameters in total.
    pub parameters: u128,
    /// Decoding FLOPs per token.
    pub flops_per_token: PerToken,
    /// Bytes while generating: weights and mean caches.
    pub memory_bytes: u128,
    /// FLOPs of a trained token, where they were asked for: they take a derivative of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training_flops_per_token: Option<PerToken>,
}

/// Counts a spec.
pub fn count(spec: &Spec, options: &Options) -> Result<Counts, CountError> {
    let (model, train) = (&spec.model, &spec.train);
    let bytes = Bytes(train.precision);
    let architecture = Architecture::new(model, None)?;
    let forward = Form::new(&architecture, 1, options.tokens)?;
    let mut parameters = forward.parameters()?;
    let decode = forward.forward()?;
    let decoded = sum(decode.iter().map(|p| p.cost))?;
    let one = Form::new(&architecture, 1, 1)?;
    let single = one.forward()?;
    let head = |pieces: &[Piece]| sum(pieces.iter().filter(|p| p.owner == "head").map(|p| p.cost));
    let mut prefill = sum(decode.iter().filter(|p| p.owner != "head").map(|p| p.cost))?;
    prefill = prefill.plus(head(&single)?)?;

    let (micro_batch, sequence) = micro_batch(model, train);
    let training = Form::of_training(&architecture, train, micro_batch, sequence)?.training(train, bytes)?;
    let trained = checked("training tokens", [micro_batch.into(), sequence.into()])?;

    let mut memory = forward.generation(&parameters, bytes)?;
    let all = training.trained;
    parameters.trained = (all < parameters.total).then_some(all);
    memory.gradients = checked("gradients", [training.trained, 4])?;
    let master = if train.precision == Precision::F32 { 0 } else { training.trained };
    let master = checked("optimizer state", [master, 4])?;
    let states = checked("optimizer state", [training.states, storage(train).bytes().into()])?;
    memory.states = states;
    memory.optimizer = total("optimizer state", [states, master])?;
    memory.activations = sum_of("activations", &training.activations)?;
    memory.activations_by_component = training.activations;
    memory.training =
        total("bytes", [memory.weights, memory.gradients, memory.optimizer, memory.activations])?;

    let tokens = u128::from(options.tokens.max(1));
    let per = |total: u128| PerToken { total, tokens };
    let per_trained = |total: u128| PerToken { total, tokens: trained };
    let forth = training.forward.flops;
    let again = training.backward.recomputed;
    let back = training.backward.flops - again;
    let flops = Flops {
        decode: per(decoded.flops),
        prefill: per(prefill.flops),
        training: per_trained(total("training FLOPs", [forth, back, again])?),
        training_forward: per_trained(forth),
        training_backward: per_trained(back),
        training_recomputation: per_trained(again),
        decode_by_component: by(&decode, |p| Some(p.owner.clone()))?
            .into_iter()
            .map(|(k, v)| (k, per(v)))
            .collect(),
        decode_by_kind: by(&decode, |p| p.kind)?.into_iter().map(|(k, v)| (k, per(v))).collect(),
    };
    let elementwise = Elementwise {
        decode: per(decoded.elementwise),
        prefill: per(prefill.elementwise),
        training: per_trained(total(
            "element-wise operations",
            [training.forward.elementwise, training.backward.elementwise],
        )?),
    };
    let predicted = options.device.map(|device| {
        // Kernels read what is rounded to e4m3 as bf16.
        let bf16 = train.precision != Precision::F32;
        // Products were lowered in f32.
        let stored = |moved: u128| moved as f64 * bytes.float() as f64 / DType::F32.bytes() as f64;
        let moved = |c: &Cost| c.read as f64 + c.written as f64;
        let step = train.batch as f64 * sequence as f64;
        let one_token: u128 = single.iter().filter(|p| p.kind.is_some()).map(|p| p.cost.read).sum();
        let prompt: u128 =
            decode.iter().filter(|p| p.kind.is_some()).map(|p| p.cost.read + p.cost.written).sum();
        let decode_bytes = stored(one_token) + (memory.sequence_cache + memory.depth_cache) as f64;
        // AdamW reads weight, gradient and moments, and writes all but the gradient.
        let update = 28.0 * all as f64 / step;
        let products =
            (moved(&training.products.0) + moved(&training.products.1)) * bytes.float() as f64 / 4.0;
        Predicted {
            device,
            decode: device.roofline(bf16, flops.decode.mean(), decode_bytes),
            prefill: device.roofline(bf16, flops.prefill.mean(), stored(prompt) / tokens as f64),
            training: device.roofline(bf16, flops.training.mean(), products / trained as f64 + update),
        }
    });
    Ok(Counts {
        model: model.name.clone(),
        depth: architecture.depth,
        tokens: options.tokens,
        sequence,
        micro_batch,
        precision: train.precision,
        parameters,
        flops_per_token: flops,
        elementwise_per_token: elementwise,
        memory_bytes: memory,
        predicted,
    })
}

/// Sequences of a micro-batch of training, and their tokens.
fn micro_batch(model: &Model, train: &Train) -> (u64, u64) {
    let sequence = train.sequence.unwrap_or(model.context);
    ((train.batch / train.accumulate.max(1)).max(1), sequence)
}

/// FLOPs of a trained token, forward and backward.
pub fn training_flops(model: &Model, train: &Train) -> Result<PerToken, CountError> {
    let architecture = Architecture::new(model, None)?;
    let (rows, sequence) = micro_batch(model, train);
    let form = Form::of_training(&architecture, train, rows, sequence)?;
    let counted = form.training(train, Bytes(train.precision))?;
    Ok(PerToken {
        total: total("training FLOPs", [counted.forward.flops, counted.backward.flops])?,
        tokens: checked("training tokens", [rows.into(), sequence.into()])?,
    })
}

/// The figures that matching compares, without those of training.
pub fn figures(model: &Model, precision: Precision, tokens: u64) -> Result<Figures, CountError> {
    let architecture = Architecture::new(model, None)?;
    let form = Form::new(&architecture, 1, tokens)?;
    let parameters = form.parameters()?;
    let flops = sum(form.forward()?.iter().map(|p| p.cost))?.flops;
    Ok(Figures {
        parameters: parameters.total,
        flops_per_token: PerToken { total: flops, tokens: tokens.max(1).into() },
        memory_bytes: form.generation(&parameters, Bytes(precision))?.generation,
        training_flops_per_token: None,
    })
}

/// Shares that a model was seen to compute where its routers decide.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    /// Of the tokens that come to a wrapped part, the share that it processes: by body and by the
    /// number of the part in it.
    pub parts: BTreeMap<(usize, u64), f64>,
    /// Of the choices of a mixture with no-op experts, the share that falls on the others.
    pub experts: BTreeMap<String, f64>,
}

/// FLOPs of a generated token where wrapped parts and mixtures process these shares in place of
/// those that are declared; `passes` replaces the count of the outermost `recur`.
pub fn flops_at(
    model: &Model,
    passes: Option<u64>,
    tokens: u64,
    shares: &Shares,
) -> Result<PerToken, CountError> {
    let mut architecture = Architecture::new(model, passes)?;
    for (i, body) in architecture.bodies.iter_mut().enumerate() {
        body.set_capacities(&|part| shares.parts.get(&(i, part)).copied());
    }
    let mut form = Form::new(&architecture, 1, tokens)?;
    form.route(&shares.experts);
    let flops = sum(form.forward()?.iter().map(|p| p.cost))?.flops;
    Ok(PerToken { total: flops, tokens: tokens.max(1).into() })
}

/// How values are stored.
#[derive(Clone, Copy)]
struct Bytes(Precision);

impl Bytes {
    fn float(self) -> u128 {
        match self.0 {
            Precision::F32 => 4,
            Precision::Bf16 | Precision::Fp8 => 2,
        }
    }

    /// Bytes of a value.
    fn of(self, module: &Module, ty: &Type) -> Result<u128, CountError> {
        let element = if ty.dtype.is_float() { self.float() } else { ty.dtype.bytes().into() };
        checked("bytes", [elements(module, ty)?, element])
    }
}

/// An architecture lowered for a batch.
struct Form<'a> {
    architecture: &'a Architecture,
    lowered: Lowered,
    sites: Vec<Vec<walk::Site<'a>>>,
    batch: u64,
    sequence: u64,
}

/// Costs of one node over all its applications.
struct Piece {
    /// Component, or `embedding`, `head` or `stream`.
    owner: String,
    /// Kind of product; element-wise work and movements have none.
    kind: Option<&'static str>,
    cost: Cost,
}

/// Costs of a micro-batch.
struct Training {
    forward: Cost,
    backward: Cost,
    /// Products alone.
    products: (Cost, Cost),
    /// Bytes, by component.
    activations: IndexMap<String, u128>,
    /// Parameters that have gradients.
    trained: u128,
    /// Numbers that the optimizer keeps of them.
    states: u128,
}

impl<'a> Form<'a> {
    fn new(architecture: &'a Architecture, batch: u64, sequence: u64) -> Result<Self, CountError> {
        let (batch, sequence) = (batch.max(1), sequence.max(1));
        let lowered = lower_inference(architecture, Shape { batch, sequence, ..Shape::default() })?;
        Ok(Form { architecture, lowered, sites: walk::sites(architecture), batch, sequence })
    }

    fn of_training(
        architecture: &'a Architecture,
        train: &Train,
        batch: u64,
        sequence: u64,
    ) -> Result<Self, CountError> {
        let (batch, sequence) = (batch.max(1), sequence.max(1));
        let shape = Shape { batch, sequence, z_loss: train.z_loss, dpo: train.dpo, ..Shape::default() };
        let lowered = lower_declared_training(architecture, shape)?;
        Ok(Form { lowered, ..Form::new(architecture, batch, sequence)? })
    }

    fn function(&self, name: &str) -> &Function {
        &self.lowered.module.functions[name]
    }

    /// Routes these shares of the choices of mixtures to experts that compute.
    fn route(&mut self, shares: &BTreeMap<String, f64>) {
        /// Shares are counted in parts of this.
        const ALL: u64 = 1 << 32;
        let facts = &mut self.lowered.facts;
        for (dim, taken) in &mut facts.taken {
            let Some(Owner::Component(i)) = facts.owners.get(dim) else { continue };
            let Some((name, _)) = self.architecture.component(*i) else { continue };
            if let Some(share) = shares.get(name) {
                *taken = ((share.clamp(0.0, 1.0) * ALL as f64).round() as u64, ALL);
            }
        }
    }

    /// Weights with the body they belong to and the number of sets there are of them.
    fn weights(&self) -> impl Iterator<Item = (Option<usize>, u64, &Weight)> {
        let bodies = self.architecture.bodies.iter().enumerate();
        let layers =
            bodies.flat_map(|(i, b)| self.lowered.weights[i].iter().map(move |w| (Some(i), b.sets, w)));
        self.lowered.globals.iter().map(|w| (None, 1, w)).chain(layers)
    }

    fn parameters(&self) -> Result<Parameters, CountError> {
        let mut p = Parameters::default();
        let module = &self.lowered.module;
        for (body, sets, w) in self.weights() {
            let one = elements(module, &Type::f32(&w.dims))?;
            let all = checked("parameters", [one, sets.into(), w.instances().into()])?;
            let kind = match w.kind {
                TensorKind::Embedding => &mut p.kinds.embedding,
                TensorKind::Head => &mut p.kinds.head,
                TensorKind::Matrix | TensorKind::Steady => &mut p.kinds.dense,
                TensorKind::Routed => &mut p.kinds.routed,
                TensorKind::Shared => &mut p.kinds.shared,
                TensorKind::Router => &mut p.kinds.router,
                TensorKind::Gain => &mut p.kinds.gain,
                TensorKind::Balance => {
                    p.balance = total("parameters", [p.balance, all])?;
                    continue;
                }
            };
            *kind = total("parameters", [*kind, all])?;
            p.total = total("parameters", [p.total, all])?;
            let touched = match (body, w.kind) {
                (Some(b), TensorKind::Routed) => {
                    let (experts, chosen) = self.chosen(b, w);
                    let readers = self.architecture.bodies.iter().filter(|body| body.leader == b);
                    let applications = readers.map(|body| body.applications).sum::<u64>() / sets.max(1);
                    let chosen = checked("active parameters", [chosen, applications.into()])?.min(experts);
                    checked("active parameters", [one / experts.max(1), chosen, sets.into()])?
                }
                _ => all,
            };
            p.active = total("active parameters", [p.active, touched])?;
            let sum = p.by_component.entry(self.counted_as(w.owner)).or_default();
            *sum = total("parameters", [*sum, all])?;
        }
        Ok(p)
    }

    /// The number of matrices of a mixture, and how many of them a token uses in one application.
    fn chosen(&self, body: usize, w: &Weight) -> (u128, u128) {
        let (module, f) = (&self.lowered.module, self.function(&self.architecture.bodies[body].name));
        let size = |d| u128::from(module.size(d));
        let reader = f.find_param(&w.name).and_then(|v| {
            f.nodes.iter().find(|n| matches!(n.op, Op::Grouped(_)) && n.inputs.get(1) == Some(&v))
        });
        let slots = reader.map_or(0, |n| size(f.ty(n.inputs[0]).dims[0]));
        (
            w.dims.first().map_or(1, |&d| size(d)),
            slots.div_ceil(u128::from(self.batch) * u128::from(self.sequence)),
        )
    }

    /// The name under which something is counted.
    fn counted_as(&self, owner: Owner) -> String {
        match owner {
            Owner::Embedding => PARTS[0].into(),
            Owner::Head => PARTS[1].into(),
            Owner::Stream
            | Owner::Skip(_)
            | Owner::Pool(_)
            | Owner::Saved(_)
            | Owner::Norm(_)
            | Owner::Loop
            | Owner::Exit
            | Owner::Members
            | Owner::Choice
            | Owner::Depths
            | Owner::Lanes(_)
            | Owner::Output
            | Owner::Sources => PARTS[2].into(),
            Owner::Component(_) => {
                let outermost = self.architecture.outermost(owner);
                counted_as(&self.architecture.label(outermost))
            }
        }
    }

    /// Costs of the forward, node by node, without what only training needs.
    fn forward(&self) -> Result<Vec<Piece>, CountError> {
        let module = &self.lowered.module;
        let inference = |name: &str| {
            prune(self.function(name), &|p| {
                let outputs = [Output::Aux, Output::Taught, Output::Loss, Output::Nll].map(Binding::Output);
                p.binding != Binding::State(Lifetime::Set) && !outputs.contains(&p.binding)
            })
        };
        let mut pieces = vec![];
        for (body, sites) in self.architecture.bodies.iter().zip(&self.sites) {
            let f = &inference(&body.name);
            let sites: Vec<&walk::Site> = sites.iter().collect();
            let costs = walk::applied(&self.lowered.facts, module, f, &sites)?;
            pieces.extend(f.nodes.iter().zip(costs).map(|(n, cost)| self.piece(f, n, cost)));
        }
        for (name, owner) in [(EMBED, Owner::Embedding), (HEAD, Owner::Head)] {
            let f = &inference(name);
            let costs = walk::once(&self.lowered.facts, module, f)?;
            pieces.extend(f.nodes.iter().zip(costs).map(|(n, cost)| Piece {
                owner: self.counted_as(owner),
                kind: self.product_kind(f, n).map(|_| "head"),
                cost,
            }));
        }
        Ok(pieces)
    }

    /// The part of the model that a value is of, by its dimensions.
    fn owner(&self, ty: &Type) -> Owner {
        let owners = &self.lowered.facts.owners;
        ty.dims.iter().find_map(|d| owners.get(d)).copied().unwrap_or(Owner::Stream)
    }

    /// Adds bytes to those of a part of the model.
    fn add_to(&self, map: &mut IndexMap<String, u128>, owner: Owner, bytes: u128) -> Result<(), CountError> {
        if bytes > 0 {
            let sum = map.entry(self.counted_as(owner)).or_default();
            *sum = total("bytes", [*sum, bytes])?;
        }
        Ok(())
    }

    fn piece(&self, f: &Function, node: &Node, cost: Cost) -> Piece {
        let values = node.inputs.iter().copied().chain(node.results());
        let owner = values.flat_map(|v| &f.ty(v).dims).find_map(|d| self.lowered.facts.owners.get(d));
        let owner = self.counted_as(owner.copied().unwrap_or(Owner::Stream));
        Piece { owner, kind: self.product_kind(f, node), cost }
    }

    /// The kind of matmul of a node, if it is one.
    fn product_kind(&self, f: &Function, node: &Node) -> Option<&'static str> {
        let routing = |v: &Value| f.ty(*v).dims.iter().any(|d| self.lowered.facts.routing.contains(d));
        match node.op.signature().work {
            Work::Counted(_) if matches!(node.op, Op::LinearAttention(_) | Op::LinearAttentionGrad(_)) => {
                Some("linear_attention")
            }
            Work::Nothing | Work::Moves | Work::Operand(..) | Work::Result(_) | Work::Counted(_) => None,
            Work::Dense(_) if matches!(node.op, Op::Contract(_)) && node.inputs.iter().any(routing) => {
                Some("router")
            }
            Work::Dense(_) => Some("dense"),
            Work::Groups(..) => Some("routed"),
            Work::Pairs(..) => Some("sequence_attention"),
            Work::Row(..) => Some("depth_attention"),
        }
    }

    /// Costs of a micro-batch, forward and back, and what it keeps in between.
    fn training(&self, train: &Train, bytes: Bytes) -> Result<Training, CountError> {
        let mut module = self.lowered.module.clone();
        let mut result = Training {
            forward: Cost::default(),
            backward: Cost::default(),
            products: (Cost::default(), Cost::default()),
            activations: IndexMap::new(),
            trained: 0,
            states: 0,
        };
        let mut trained: HashSet<(Option<usize>, String)> = HashSet::new();
        for (body, sets, w) in self.weights() {
            let of = self.trained_sets(train, body, sets, w);
            if of > 0 {
                trained.insert((body, w.name.clone()));
                let one = elements(&module, &Type::f32(&w.dims))?;
                let all = checked("parameters", [one, of.into(), w.instances().into()])?;
                result.trained = total("parameters", [result.trained, all])?;
                let states = checked("optimizer state", [all, self.states(train, w)])?;
                result.states = total("optimizer state", [result.states, states])?;
            }
        }
        let bodies = self.architecture.bodies.iter().enumerate().map(|(i, b)| (Some(i), b.name.as_str()));
        let all: Vec<(Option<usize>, &str)> =
            [(None, EMBED)].into_iter().chain(bodies).chain([(None, HEAD)]).collect();
        for (body, name) in all {
            let f = self.function(name).clone();
            let foreign = body.map_or(&[][..], |b| self.lowered.foreign[b].as_slice());
            let others = |p: &Port| foreign.iter().any(|w| w.name == p.name && self.trains(train, w));
            let leader = body.map(|b| self.architecture.leader(b));
            let trains = |p: &Port| trained.contains(&(leader, p.name.clone())) || others(p);
            let wanted = |p: &Port| has_derivative(p, trains);
            let seeds: Vec<(&str, Seed)> = match (body, name) {
                (None, HEAD) => head_seeds(&f),
                (None, _) => vec![("x", Seed::Param)],
                _ => body_seeds(&f, Seed::Param),
            };
            let joint = differentiate(&mut module, &f, &seeds, &wanted)?;
            let (front, back) = partition(&module, &joint, &f);
            // Passes through which no gradient flows are on the way forward alone.
            let costs = |f: &Function, back: bool| match body {
                Some(b) => {
                    let sites = self.sites[b].iter().filter(|site| !(back && site.apply.detached));
                    let sites: Vec<&walk::Site> = sites.collect();
                    walk::applied(&self.lowered.facts, &module, f, &sites)
                }
                None => walk::once(&self.lowered.facts, &module, f),
            };
            for (f, is_back, all, products) in [
                (&front, false, &mut result.forward, &mut result.products.0),
                (&back, true, &mut result.backward, &mut result.products.1),
            ] {
                for (node, cost) in f.nodes.iter().zip(costs(f, is_back)?) {
                    *all = all.plus(cost)?;
                    if self.product_kind(f, node).is_some() {
                        *products = products.plus(cost)?;
                    }
                }
            }
            let applications = body.map_or(1, |b| self.architecture.bodies[b].kept);
            let saved = front.results.iter().filter(|(p, _)| p.binding == Binding::Saved);
            for (_, v) in saved {
                let one = bytes.of(&module, front.ty(*v))?;
                let all = checked("activations", [one, applications.into()])?;
                let owner = match body {
                    Some(_) => self.owner(front.ty(*v)),
                    None if name == HEAD => Owner::Head,
                    None => Owner::Embedding,
                };
                self.add_to(&mut result.activations, owner, all)?;
            }
        }
        // The stream before and after each application, the depth caches with their gradients, and
        // saved streams with one for each name.
        let head = self.function(HEAD);
        let x = head.param_of(Binding::Stream).map_or(Ok(0), |x| bytes.of(&module, head.ty(x)))?;
        let streams = checked("activations", [x, self.streams()])?;
        self.add_to(&mut result.activations, Owner::Stream, streams)?;
        for (owner, cache) in self.depth_caches(bytes, true)? {
            self.add_to(&mut result.activations, owner, checked("activations", [cache, 2])?)?;
        }
        Ok(result)
    }

    /// Whether adapters alone are trained.
    fn adapts(&self) -> bool {
        self.architecture.model.adapt.is_some()
    }

    /// Whether the recipe trains a tensor by its name in checkpoints.
    fn trains(&self, train: &Train, w: &Weight) -> bool {
        let shape: Vec<u64> = w.dims.iter().map(|&d| self.lowered.module.size(d)).collect();
        crate::recipe::recipe((train, self.adapts()), &w.name, w, &shape).is_some()
    }

    /// Numbers that the optimizer keeps of each number of a weight.
    fn states(&self, train: &Train, w: &Weight) -> u128 {
        let shape: Vec<u64> = w.dims.iter().map(|&d| self.lowered.module.size(d)).collect();
        let rule = Rule { decay: 0.0, factor: 1.0, eps: 1.0, matrix: matrix(train, w, &shape) };
        optimizer(train, &rule).states().len() as u128
    }

    /// Streams that the backward reads: before and after each application, saved ones, and the
    /// cotangent of each name.
    fn streams(&self) -> u128 {
        let a = self.architecture;
        let names = (0..a.saved.len()).map(|i| a.rows_of(Owner::Saved(i as u32)));
        u128::from(a.places) + names.map(|saved| u128::from(saved) + 1).sum::<u128>()
    }

    /// How many sets of a weight the recipe trains.
    fn trained_sets(&self, train: &Train, body: Option<usize>, sets: u64, w: &Weight) -> u64 {
        let shape: Vec<u64> = w.dims.iter().map(|&d| self.lowered.module.size(d)).collect();
        let trains = |name: &str| crate::recipe::recipe((train, self.adapts()), name, w, &shape).is_some();
        match body {
            None => u64::from(trains(&w.name)),
            // Without patterns every set is treated alike.
            Some(_) if train.only.is_empty() && train.freeze.is_empty() => {
                sets * u64::from(trains(&format!("layers.0.{}", w.name)))
            }
            Some(b) => {
                let of_body = self.architecture.prefixes().filter(|(_, set)| set.0 == b);
                of_body.filter(|(prefix, _)| trains(&format!("{prefix}.{}", w.name))).count() as u64
            }
        }
    }

    /// Bytes while generating one sequence.
    fn generation(&self, parameters: &Parameters, bytes: Bytes) -> Result<Memory, CountError> {
        let weights = checked("bytes", [parameters.total, bytes.float()])?;
        let biases = checked("bytes", [parameters.balance, 4])?;
        let mut memory = Memory { weights: total("bytes", [weights, biases])?, ..Memory::default() };
        let tokens = u128::from(self.sequence);
        for (body, sites) in self.architecture.bodies.iter().zip(&self.sites) {
            if sites.is_empty() {
                continue;
            }
            let f = self.function(&body.name);
            for node in &f.nodes {
                // A choice of blocks caches keys alone.
                let (a, cached) = match &node.op {
                    Op::Attention(a) => (a, &node.inputs[1..3]),
                    Op::ChooseKeys(c) => (&c.seen, &node.inputs[1..2]),
                    _ => continue,
                };
                // Keys of other components, and of earlier passes, are cached where they are made.
                let heads = f.ty(node.inputs[0]).dims.get(2);
                let component = heads.and_then(|d| self.lowered.facts.owners.get(d)).and_then(|owner| {
                    let Owner::Component(i) = owner else { return None };
                    self.architecture.component(*i)
                });
                let attention = component.and_then(|(_, component)| component.attention());
                if attention.is_some_and(|a| a.kv_from.is_some() || body.keys == Keys::Reads) {
                    continue;
                }
                let mut one = 0;
                for &v in cached {
                    one = total("bytes", [one, bytes.of(&self.lowered.module, f.ty(v))?])?;
                }
                if let Some(place) = attention.and_then(latent_place) {
                    let keys = Type::f32(f.ty(node.inputs[1]).dims.get(..2).unwrap_or_default());
                    one = checked("bytes", [bytes.of(&self.lowered.module, &keys)?, place.into()])?;
                }
                // Keys and values of all sequences at every application: of their tokens, or of
                // those that a `skip` processes. Divided last, as they may be less than one for
                // each token.
                let all = checked("the sequence cache", [one, body.applications.into()])?;
                let of_token = tokens * u128::from(self.batch);
                let kept = Attention::causal_pairs(self.sequence, a.window);
                let mean = checked("the sequence cache", [all, kept])? / of_token / tokens;
                memory.sequence_cache = total("bytes", [memory.sequence_cache, mean])?;
                let context = self.architecture.model.context;
                let most = context.min(a.window.unwrap_or(context));
                let full = checked("the sequence cache", [all, most.into()])? / of_token;
                memory.sequence_cache_context = total("bytes", [memory.sequence_cache_context, full])?;
                let owner = heads.and_then(|d| self.lowered.facts.owners.get(d)).copied();
                self.add_to(&mut memory.caches_by_component, owner.unwrap_or(Owner::Stream), full)?;
            }
        }
        for (owner, all) in self.text_states()? {
            memory.text_state = total("bytes", [memory.text_state, all])?;
            self.add_to(&mut memory.caches_by_component, owner, all)?;
        }
        for (owner, all) in self.depth_caches(bytes, false)? {
            let one = all / (tokens * u128::from(self.batch));
            memory.depth_cache = total("bytes", [memory.depth_cache, one])?;
            self.add_to(&mut memory.caches_by_component, owner, one)?;
        }
        memory.generation =
            total("bytes", [memory.weights, memory.sequence_cache, memory.text_state, memory.depth_cache])?;
        Ok(memory)
    }

    /// Bytes of the states of one text, as the form with caches has them, in f32.
    fn text_states(&self) -> Result<Vec<(Owner, u128)>, CountError> {
        // Built-in components keep entries of tokens alone.
        if !self.architecture.model.components.values().any(|c| c.kind() == Kind::Defined) {
            return Ok(vec![]);
        }
        let tokens = self.architecture.model.context;
        let cache = Some(Places { tokens, slack: f64::INFINITY, more: 0, every: false });
        let lowered = lower(self.architecture, Shape { cache, ..Shape::default() })?;
        let mut all = vec![];
        for body in &self.architecture.bodies {
            for (port, v) in &lowered.module.functions[&body.name].results {
                if port.binding == Binding::State(Lifetime::Text) {
                    let ty = lowered.module.functions[&body.name].ty(*v);
                    let elements = u128::from(lowered.module.elements(&ty.dims));
                    let one = checked("text states", [elements, u128::from(ty.dtype.bytes())])?;
                    let each = checked("text states", [one, body.applications.into()])?;
                    let owner =
                        lowered.facts.states.get(&port.name).map_or(Owner::Stream, |state| state.owner);
                    all.push((owner, each));
                }
            }
        }
        Ok(all)
    }

    /// Bytes of states that are handed from application to application, of the whole batch. Bodies
    /// that share a component share its cache. Where there are sequence caches, keys that
    /// components read of others stand there.
    fn depth_caches(&self, bytes: Bytes, training: bool) -> Result<Vec<(Owner, u128)>, CountError> {
        let mut caches: IndexMap<&Port, (Owner, &Type)> = IndexMap::new();
        let states = &self.lowered.facts.states;
        for body in &self.architecture.bodies {
            let f = self.function(&body.name);
            for (port, v) in &f.results {
                let Some(&State { owner, part }) = states.get(&port.name) else { continue };
                let counted = match part.when_counted() {
                    Counted::Always => true,
                    Counted::Handed => training || body.keys == Keys::Leaves,
                    Counted::Never => false,
                };
                if counted && port.binding == Binding::State(Lifetime::Depth) {
                    caches.insert(port, (owner, f.ty(*v)));
                }
            }
        }
        let one = |(owner, ty): &(Owner, &Type)| Ok((*owner, bytes.of(&self.lowered.module, ty)?));
        caches.values().map(one).collect()
    }
}

/// Parts that are counted in addition to components.
const PARTS: [&str; 3] = ["embedding", "head", "stream"];

/// The name under which a component is counted: its own, unless another part of the model is called
/// so.
pub fn counted_as(component: &str) -> String {
    if PARTS.contains(&component) { format!("component {component}") } else { component.into() }
}

/// FLOPs of the pieces, added up by a key.
fn by<K: std::hash::Hash + Eq>(
    pieces: &[Piece],
    key: impl Fn(&Piece) -> Option<K>,
) -> Result<IndexMap<K, u128>, CountError> {
    let mut sums: IndexMap<K, u128> = IndexMap::new();
    for piece in pieces.iter().filter(|p| p.cost.flops > 0) {
        if let Some(key) = key(piece) {
            let sum = sums.entry(key).or_default();
            *sum = total("FLOPs", [*sum, piece.cost.flops])?;
        }
    }
    Ok(sums)
}

fn sum(mut costs: impl Iterator<Item = Cost>) -> Result<Cost, CostError> {
    costs.try_fold(Cost::default(), Cost::plus)
}

fn elements(module: &Module, ty: &Type) -> Result<u128, CountError> {
    ty.dims
        .iter()
        .try_fold(1u128, |n, &d| n.checked_mul(module.size(d).into()))
        .ok_or(CountError::Overflow("elements"))
}

/// The sum of a map, or an error that says of what.
fn sum_of(what: &'static str, map: &IndexMap<String, u128>) -> Result<u128, CountError> {
    map.values().try_fold(0, |sum, n| total(what, [sum, *n]))
}

/// The product, or an error that says of what.
fn checked<const N: usize>(what: &'static str, factors: [u128; N]) -> Result<u128, CountError> {
    factors.into_iter().try_fold(1, u128::checked_mul).ok_or(CountError::Overflow(what))
}

/// The sum, or an error that says of what.
fn total<const N: usize>(what: &'static str, terms: [u128; N]) -> Result<u128, CountError> {
    terms.into_iter().try_fold(0, u128::checked_add).ok_or(CountError::Overflow(what))
}
