//! A whole model evaluated by the f64 interpreter: the oracle that every device is compared with.
//!
//! *In*: a model and its tensors by checkpoint name. *Out*: logits, loss, every gradient, and how
//! often each router chose each expert; or the forward alone, with every stream and decision. It
//! walks the applications one by one and differentiates each by the joint function, keeping every
//! input: slow and obvious. It shares lowering and differentiation with the compiler, and nothing
//! after them.

use crate::CompileError;
use crate::Pass;
use crate::Watch;
use crate::architecture::{Apply, Architecture, for_each_application};
use crate::autodiff::{Seed, body_seeds, differentiate, has_derivative, head_seeds, without_training};
use crate::bind::Owner;
use crate::compiled::{Init, TensorKind};
use crate::ir::interpret::{self, Data, InterpretError, Tensor};
use crate::ir::{Binding, Function, Input, Lifetime, Module, Node, Of, Op, Output, Port, Unary};
use crate::lower::{
    EMBED, Form, HEAD, Lowered, POOL, Shape, Weight, lower, lower_declared_training, lower_evaluation,
    lower_inference, skip,
};
use crate::op::attention::drawn;
use crate::op::{Derivative, Ties, Work};
use crate::passes::Passes;
use crate::pipeline;
use crate::resolve;
use crate::rewrite::{Context, Optimiser, Rewriting, Rules, Stage, forget_stops};
use crate::wiring::attend;
use dreamc_dsl::spec::Model;
use indexmap::IndexMap;
use std::collections::HashMap;
use std::sync::OnceLock;
use thiserror::Error;

/// Why the oracle failed.
#[derive(Debug, Error)]
pub enum OracleError {
    /// The model does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The interpreter refused.
    #[error(transparent)]
    Interpret(#[from] InterpretError),
    /// A tensor is missing.
    #[error("no tensor `{0}`")]
    Missing(String),
}

/// A model ready to be evaluated.
pub struct Oracle {
    architecture: Architecture,
    lowered: Lowered,
    module: Module,
    /// Joint functions of the bodies, of `embed` and of `head`.
    joints: IndexMap<String, Function>,
    shape: Shape,
    /// Whether its functions can be evaluated: known since the first time.
    checked: OnceLock<()>,
}

/// A name, sizes, kind and beginning of a tensor, in checkpoint order.
pub type TensorSpec = (String, Vec<u64>, TensorKind, Init);

/// One batch: ids and targets of `batch · sequence` entries.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Input tokens.
    pub ids: Vec<i32>,
    /// Next tokens; negative where no loss is taken.
    pub targets: Vec<i32>,
    /// Position of each token in its document; its place in the sequence where there are none.
    pub positions: Vec<i32>,
    /// Document of each token; all are one where there are none.
    pub segments: Vec<i32>,
    /// Numbers that streams start with, a row for each token; zeros where there are none.
    pub noise: Vec<f64>,
    /// Random numbers of tokens, by which attentions drop weights; zeros where there are none.
    pub draws: Vec<i32>,
}

/// The share of the loss that passes leave, where it is read.
const LEFT: &str = "exit.left";

/// The binding of the cotangent of a saved stream.
const SAVED_COTANGENT: Binding = Binding::Cotangent(Of::State(Lifetime::Saved));

/// Input of an evaluation.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    /// Count of the outermost `recur` in place of the model's.
    pub recurrence: Option<u64>,
    /// How functions are rewritten, as compilation would.
    pub rewriting: &'a Rewriting,
    /// Form of the lowered model; only [`Form::Training`] has gradients.
    pub form: Form,
    /// Sees the functions between passes.
    pub watch: Watch<'a>,
}

/// Decisions of the forward, in order: everything that has no derivative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decisions(Vec<Tensor>);

/// A way forward.
#[derive(Clone, Debug)]
pub struct Forward {
    /// `[batch, seq, vocab]`
    pub logits: Tensor,
    /// Mean over the targets that there are.
    pub loss: f64,
    /// `[batch, seq, hidden]`: the stream before each application, and after the last.
    pub streams: Vec<Tensor>,
    /// Choices, and values whose gradient is stopped.
    pub decisions: Decisions,
    /// How far the closest decision was from another one: the difference of the last score that was
    /// chosen and the first that was not, of a score from 0, or of a share of tokens from the one
    /// that is penalised beyond. Infinite where nothing is decided; ties of equal numbers do not
    /// count.
    pub margin: f64,
    /// Whether equal scores were ordered by their places alone, as those of equal tokens are.
    pub tied: bool,
    /// The largest magnitude of a number that a norm reads.
    pub largest: f64,
    /// Multiply-adds of matrix products, counted one by one.
    pub multiply_adds: u64,
    /// Those of attention along the sequence; positions may decide how many they are.
    pub attended: u64,
}

/// Results of an evaluation.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// `[batch, seq, vocab]`
    pub logits: Tensor,
    /// Mean over the targets that there are.
    pub loss: f64,
    /// By tensor name.
    pub gradients: IndexMap<String, Tensor>,
    /// Choices of each expert since the batch began, by the name of the router's bias.
    pub counts: IndexMap<String, Vec<f64>>,
}

impl Oracle {
    /// Lowers and differentiates a model.
    pub fn new(model: &Model, shape: Shape, recurrence: Option<u64>) -> Result<Self, CompileError> {
        Self::rewritten(model, shape, recurrence, &Rewriting::off())
    }

    /// The same with every function rewritten as compilation would, which must not change what it
    /// computes.
    pub fn rewritten(
        model: &Model,
        shape: Shape,
        recurrence: Option<u64>,
        rewriting: &Rewriting,
    ) -> Result<Self, CompileError> {
        Self::with(model, shape, Setup { recurrence, rewriting, form: Form::Training, watch: &|_, _, _| {} })
    }

    /// Lowers a model in some form, and differentiates it where that is for training.
    pub fn with(model: &Model, shape: Shape, setup: Setup) -> Result<Self, CompileError> {
        let Setup { recurrence, rewriting, form, watch } = setup;
        let architecture = Architecture::new(model, recurrence)?;
        let mut lowered = pipeline::lowered(&Passes::new(Some(watch)), || match form {
            Form::Training => lower(&architecture, shape),
            Form::Inference => lower_evaluation(&architecture, shape),
            Form::Declared => lower_inference(&architecture, shape),
            Form::DeclaredTraining => lower_declared_training(&architecture, shape),
        })?;
        let mut optimiser = Optimiser::new(rewriting, false)?;
        let mut module = lowered.module.clone();
        let mut joints = IndexMap::new();
        for (name, f) in lowered.module.functions.iter_mut() {
            let body = architecture.bodies.iter().position(|b| b.name == *name);
            let indices = body.map_or(vec![], |b| architecture.constant_rows(b));
            let mut rewrite = |module: &mut Module, f: &Function, stage| {
                let context =
                    Context { stage, uses: 16.0, indices: indices.clone(), packed: vec![], narrow: false };
                optimiser.rewrite(module, f, &context)
            };
            if form == Form::Training {
                let seeds: Vec<(&str, Seed)> = match name.as_str() {
                    EMBED => vec![("x", Seed::Param)],
                    HEAD => head_seeds(f),
                    POOL => vec![("aux", Seed::One)],
                    _ => body_seeds(f, Seed::One),
                };
                let wanted = |p: &Port| has_derivative(p, |_| true);
                let once = rewrite(&mut module, f, Stage::Differentiable)?;
                let mut joint = differentiate(&mut module, &once, &seeds, &wanted)?;
                watch(Pass::Differentiate, &mut module, &mut joint);
                if rewriting.rules != Rules::Off {
                    forget_stops(&mut joint);
                }
                let mut joint = rewrite(&mut module, &joint, Stage::Final)?;
                watch(Pass::Rewrite, &mut module, &mut joint);
                joints.insert(name.clone(), joint);
            }
            if form != Form::Training && body.is_some() {
                *f = without_training(f);
            }
            *f = rewrite(&mut module, f, Stage::Inference)?;
            watch(Pass::Rewrite, &mut module, f);
        }
        Ok(Oracle { architecture, lowered, module, joints, shape, checked: OnceLock::new() })
    }

    /// Its architecture.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The tensors of the model.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let global = |embedding: bool| {
            self.lowered
                .globals
                .iter()
                .filter(move |w| (w.kind == TensorKind::Embedding) == embedding)
                .map(move |w| (w.name.clone(), w.shape(&self.module), w.kind, w.init))
        };
        let mut all: Vec<TensorSpec> = global(true).collect();
        for (i, (prefix, (body, _))) in self.architecture.prefixes().enumerate() {
            all.extend(self.lowered.weights[body].iter().map(|w| {
                let init = self.architecture.init_of(i, w.init);
                (format!("{prefix}.{}", w.name), w.shape(&self.module), w.kind, init)
            }));
        }
        all.extend(global(false));
        all
    }

    /// Evaluates a batch forward. Where `held` is given, everything is decided as it was then, and
    /// values whose gradient is stopped are what they were: the derivative of that is what
    /// [`Oracle::evaluate`] gives.
    pub fn forward(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
        held: Option<&Decisions>,
    ) -> Result<Forward, OracleError> {
        self.forward_by(weights, batch, Decider { held, ..Decider::default() })
    }

    /// The same, deciding for itself, with every value rounded to f32.
    pub fn forward_rounded(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
    ) -> Result<Forward, OracleError> {
        self.forward_by(weights, batch, Decider { rounds: true, ..Decider::default() })
    }

    fn forward_by(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
        mut watcher: Decider,
    ) -> Result<Forward, OracleError> {
        let walked = self.walk(weights, batch, &mut watcher)?;
        let mut here = walked.context;
        here.insert("x".into(), walked.x.clone());
        here.extend(self.sources(&walked.state));
        here.extend(self.left(&walked.state));
        self.indices(None, &[], &mut here);
        let out = self.call(HEAD, None, &here, weights, &mut watcher)?;
        let mut streams: Vec<Tensor> = walked.inputs.iter().map(|called| called.here["x"].clone()).collect();
        streams.push(walked.x);
        Ok(Forward {
            logits: take(&out, "logits")?,
            loss: walked.evaluation.loss + take(&out, "loss")?.floats()[0],
            streams,
            decisions: Decisions(watcher.made),
            margin: watcher.margin,
            tied: watcher.tied,
            largest: watcher.largest,
            multiply_adds: watcher.multiply_adds,
            attended: watcher.attended,
        })
    }

    /// Values of a batch before the head.
    fn walk(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
        watcher: &mut Decider,
    ) -> Result<Walked, OracleError> {
        self.check()?;
        let (b, t) = (self.shape.batch as usize, self.shape.sequence as usize);
        let mut context: IndexMap<String, Tensor> = IndexMap::new();
        let given = |values: &Vec<i32>, each: &dyn Fn(usize) -> i32| match values.is_empty() {
            true => Tensor::int(&[b, t], (0..b * t).map(each).collect()),
            false => Tensor::int(&[b, t], values.clone()),
        };
        context.insert("positions".into(), given(&batch.positions, &|i| (i % t) as i32));
        context.insert("segments".into(), given(&batch.segments, &|_| 0));
        let hidden = self.architecture.model.hidden as usize;
        let noise = match batch.noise.is_empty() {
            true => vec![0.0; b * t * hidden],
            false => batch.noise.clone(),
        };
        context.insert("noise".into(), Tensor::float(&[b, t, hidden], noise));
        context.insert("ids".into(), Tensor::int(&[b, t], batch.ids.clone()));
        context.insert("targets".into(), Tensor::int(&[b, t], batch.targets.clone()));
        let targets = batch.targets.iter().filter(|&&x| x >= 0).count().max(1);
        context.insert("loss_scale".into(), Tensor::float(&[], vec![1.0 / targets as f64]));

        let mut applications: Vec<(Apply, Vec<u64>)> = vec![];
        for_each_application(&self.architecture.blocks, self.architecture.variables, &mut |a, v| {
            applications.push((a.clone(), v.to_vec()))
        });
        let mut evaluation = Evaluation {
            logits: Tensor::float(&[0], vec![]),
            loss: 0.0,
            gradients: IndexMap::new(),
            counts: IndexMap::new(),
        };

        let embedded = self.call(EMBED, None, &context, weights, watcher)?;
        let mut x = take(&embedded, "x")?;
        let mut inputs = vec![];
        let mut state: IndexMap<String, Tensor> = IndexMap::new();
        for (apply, variables) in &applications {
            let body = &self.architecture.bodies[apply.body];
            let layer = self.layer(apply, variables);
            let mut here = context.clone();
            here.insert("x".into(), x.clone());
            for p in self.lowered.module.functions[&body.name].params.iter().filter(|p| p.binding.is_state())
            {
                let zeros = || self.zeros(&body.name, &p.name);
                // Choices are counted by application, and added up below.
                let value = match p.binding {
                    Binding::State(Lifetime::Set) => zeros()?,
                    _ => state.get(&self.handed(&p.name, &layer)).cloned().map_or_else(zeros, Ok)?,
                };
                here.insert(p.name.clone(), value);
            }
            self.indices(Some(apply), variables, &mut here);
            self.draws(&body.name, apply.depth.at(variables), batch, &mut here);
            let pass = [&apply.pass, &apply.turn].map(|which| which.at(variables) as usize);
            self.of_pass(apply.body, &layer, pass, weights, &mut here)?;
            self.first_rows(apply.body, &layer, weights, &mut here)?;
            let out = self.call(&body.name, Some(&layer), &here, weights, watcher)?;
            x = take(&out, "y")?;
            if let Some(aux) = out.get("aux") {
                evaluation.loss += aux.floats()[0];
            }
            for (port, _) in &self.lowered.module.functions[&body.name].results {
                let Some(value) = out.get(&port.name) else { continue };
                match port.binding {
                    Binding::State(Lifetime::Set) => {
                        let counted =
                            |w: &&Weight| w.balancing.as_ref().is_some_and(|b| b.counts == port.name);
                        let Some(bias) = self.lowered.weights[body.leader].iter().find(counted) else {
                            continue;
                        };
                        let key = format!("{layer}.{}", bias.name);
                        let sum = evaluation.counts.entry(key);
                        let sum = sum.or_insert_with(|| vec![0.0; value.floats().len()]);
                        sum.iter_mut().zip(value.floats()).for_each(|(s, c)| *s += c);
                    }
                    Binding::State(_) => {
                        state.insert(self.handed(&port.name, &layer), value.clone());
                    }
                    Binding::Output(Output::Loss) => evaluation.loss += value.floats()[0],
                    _ => {}
                }
            }
            // No gradient flows through what it leaves.
            if apply.detached {
                x = watcher.hold(x);
                for (port, _) in &self.lowered.module.functions[&body.name].results {
                    let (Binding::State(_), Some(value)) = (port.binding, state.get_mut(&port.name)) else {
                        continue;
                    };
                    if self.ends_whole(port) {
                        *value = watcher.hold(value.clone());
                        continue;
                    }
                    // Of a cache, the rows that it wrote.
                    let state = self.lowered.facts.states.get(&port.name);
                    let cache = state.and_then(|state| self.architecture.cache_of(state.owner));
                    let before = state.map_or(0, |state| state.part.rows_before()) as usize;
                    let (Some(cache), Data::Float(values)) = (cache, &mut value.data) else { continue };
                    let each = value.dims[1..].iter().product::<usize>();
                    let at = (apply.rows[cache].at(variables) as usize + before) * each;
                    let rows = match state.map(|state| state.owner) {
                        Some(Owner::Depths) => body.depths(&self.architecture.model) as usize,
                        _ => 1,
                    };
                    // A component that reads the rows of another writes none.
                    let Some(written) = values.get_mut(at..at + rows * each) else { continue };
                    for written in written.chunks_mut(each.max(1)) {
                        let row = Tensor::float(&value.dims[1..], written.to_vec());
                        written.copy_from_slice(watcher.hold(row).floats());
                    }
                }
                if let Some(aux) = out.get("aux") {
                    let held = watcher.hold(aux.clone()).floats()[0];
                    evaluation.loss += held - aux.floats()[0];
                }
            }
            inputs.push(Called { layer, body: body.name.clone(), pass, detached: apply.detached, here });
        }
        if self.lowered.module.functions.contains_key(POOL) {
            let out = self.call(POOL, None, &state, weights, watcher)?;
            evaluation.loss += take(&out, "aux")?.floats()[0];
        }
        Ok(Walked { context, inputs, state, x, evaluation })
    }

    /// Evaluates a batch, forward and back.
    pub fn evaluate(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
    ) -> Result<Evaluation, OracleError> {
        self.evaluate_by(weights, batch, &mut Decider::default())
    }

    /// The same with every value rounded to f32: what that changes is the least that computing in
    /// f32 does.
    pub fn evaluate_rounded(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
    ) -> Result<Evaluation, OracleError> {
        self.evaluate_by(weights, batch, &mut Decider { rounds: true, ..Decider::default() })
    }

    fn evaluate_by(
        &self,
        weights: &IndexMap<String, Tensor>,
        batch: &Batch,
        watcher: &mut Decider,
    ) -> Result<Evaluation, OracleError> {
        let Walked { context, inputs, state, x, mut evaluation } = self.walk(weights, batch, watcher)?;
        let mut here = context.clone();
        here.insert("x".into(), x);
        here.extend(self.sources(&state));
        here.extend(self.left(&state));
        self.indices(None, &[], &mut here);
        self.cotangents(HEAD, &IndexMap::new(), &mut here);
        let out = self.joint(HEAD, None, &here, weights, watcher)?;
        evaluation.loss += take(&out, "loss")?.floats()[0];
        evaluation.logits = take(&out, "logits")?;
        self.collect(HEAD, None, &out, &mut evaluation.gradients);
        let mut dx = take(&out, "d.x")?;
        let mut dstate: IndexMap<String, Tensor> = IndexMap::new();
        if self.joints.contains_key(POOL) {
            dstate = self.joint(POOL, None, &state, weights, watcher)?;
        }
        self.state_cotangents(HEAD, &out, &mut dstate);
        for Called { layer, body, pass, detached, mut here } in inputs.into_iter().rev() {
            if detached {
                // Rows of caches that it wrote are read no more.
                dx.data = Data::Float(vec![0.0; dx.floats().len()]);
                for (p, _) in &self.lowered.module.functions[&body].results {
                    if self.ends_whole(p) {
                        dstate.shift_remove(&p.cotangent().name);
                    }
                }
                continue;
            }
            here.insert("d.y".into(), dx.clone());
            self.cotangents(&body, &dstate, &mut here);
            let out = self.joint(&body, Some(&layer), &here, weights, watcher)?;
            dx = take(&out, "d.x")?;
            // In the backward, after the `save`, the cotangent is that of the stream saved before.
            for p in self.joints[&body].params.iter().filter(|p| p.binding == SAVED_COTANGENT) {
                dstate.shift_remove(&self.handed(&p.name, ""));
            }
            self.state_cotangents(&body, &out, &mut dstate);
            self.collect(&body, Some((&layer, pass)), &out, &mut evaluation.gradients);
        }
        let mut here = context;
        here.insert("d.x".into(), dx);
        let out = self.joint(EMBED, None, &here, weights, watcher)?;
        self.collect(EMBED, None, &out, &mut evaluation.gradients);
        Ok(evaluation)
    }

    /// The cotangents of state that a function is handed; zeros where there are none yet.
    fn cotangents(
        &self,
        function: &str,
        so_far: &IndexMap<String, Tensor>,
        here: &mut IndexMap<String, Tensor>,
    ) {
        let joint = &self.joints[function];
        for (p, ty) in joint.params.iter().zip(&joint.types) {
            if matches!(p.binding, Binding::Cotangent(Of::State(_))) {
                let value = so_far.get(&self.handed(&p.name, "")).cloned();
                here.insert(p.name.clone(), value.unwrap_or_else(|| Tensor::zeros(&self.module, ty)));
            }
        }
    }

    /// Takes those that it leaves.
    fn state_cotangents(
        &self,
        function: &str,
        out: &IndexMap<String, Tensor>,
        so_far: &mut IndexMap<String, Tensor>,
    ) {
        for (p, _) in &self.joints[function].results {
            let (Binding::Cotangent(Of::State(lifetime)), Some(value)) = (p.binding, out.get(&p.name)) else {
                continue;
            };
            let mut value = value.clone();
            // All that read a saved stream add to its cotangent.
            if let (Lifetime::Saved, Some(before), Data::Float(sum)) =
                (lifetime, so_far.get(&p.name), &mut value.data)
            {
                sum.iter_mut().zip(before.floats()).for_each(|(s, d)| *s += d);
            }
            so_far.insert(p.name.clone(), value);
        }
    }

    /// Whether a detached pass ends the cotangents of all instances of a state: of a saved stream,
    /// and of sources, which hold outputs of it and of everything before.
    fn ends_whole(&self, port: &Port) -> bool {
        let sources =
            self.lowered.facts.states.get(&port.name).is_some_and(|s| s.part == attend::part::SOURCES);
        sources || port.binding == Binding::State(Lifetime::Saved)
    }

    /// The first words of the names of the tensors of an application.
    fn layer(&self, apply: &Apply, variables: &[u64]) -> String {
        let key = (self.architecture.leader(apply.body), apply.set.at(variables));
        self.architecture.prefixes().find(|(_, set)| *set == key).map_or(String::new(), |(prefix, _)| prefix)
    }

    /// The name under which a state is handed on: what a pass leaves is what the next one reads.
    /// Tokens that a `skip` processed are those of its layer.
    fn handed(&self, name: &str, layer: &str) -> String {
        match name {
            "exit.next" => LEFT.into(),
            "d.exit.next" => "d.exit.left".into(),
            name => {
                match self.lowered.facts.states.get(name).filter(|state| state.part == skip::part::MEMBERS) {
                    Some(state) => format!("{layer}.{}.members", self.architecture.label(state.owner)),
                    None => name.into(),
                }
            }
        }
    }

    /// Outputs of all applications, for the head, where the stream is one of sources.
    fn sources(&self, state: &IndexMap<String, Tensor>) -> Option<(String, Tensor)> {
        let sources = |name: &&String| {
            self.lowered.facts.states.get(*name).is_some_and(|state| state.part == attend::part::SOURCES)
        };
        state.keys().find(sources).map(|name| (name.clone(), state[name].clone()))
    }

    /// The share of the loss that all passes but the last leave, for the head.
    fn left(&self, state: &IndexMap<String, Tensor>) -> Option<(String, Tensor)> {
        state.get(LEFT).map(|left| (LEFT.into(), left.clone()))
    }

    /// Whether a body reads a tensor that another has.
    fn foreign(&self, function: &str, weight: &str) -> bool {
        let body = self.architecture.bodies.iter().position(|b| b.name == function);
        body.is_some_and(|body| self.lowered.foreign[body].iter().any(|w| w.name == weight))
    }

    /// How many passes have a tensor of their own under a name.
    fn passes(&self, function: &str, weight: &str) -> Option<usize> {
        let body = self.architecture.bodies.iter().position(|b| b.name == function)?;
        let own = self.lowered.weights[self.architecture.leader(body)].iter().find(|w| w.name == weight)?;
        own.passes.map(|passes| passes as usize)
    }

    /// The tensors of a pass, and those that others have: under its own first words a name may be
    /// another tensor's.
    fn of_pass(
        &self,
        body: usize,
        layer: &str,
        pass: [usize; 2],
        weights: &IndexMap<String, Tensor>,
        here: &mut IndexMap<String, Tensor>,
    ) -> Result<(), OracleError> {
        let f = &self.lowered.module.functions[&self.architecture.bodies[body].name];
        let leader = self.architecture.leader(body);
        for w in self.lowered.weights[leader].iter().filter(|w| w.passes.is_some()) {
            let name = format!("{layer}.{}", w.name);
            let all = weights.get(&name).ok_or(OracleError::Missing(name))?;
            let each = all.dims[1..].iter().product::<usize>();
            let Some(p) = f.params.iter().find(|p| p.name == w.name) else { continue };
            let pass = number_of(p.binding, pass);
            let own = all.floats().get(pass * each..(pass + 1) * each);
            let own =
                own.ok_or_else(|| OracleError::Missing(format!("{layer}.{} of pass {pass}", w.name)))?;
            here.insert(w.name.clone(), Tensor::float(&all.dims[1..], own.to_vec()));
        }
        for w in &self.lowered.foreign[body] {
            let whole = weights.get(&w.name).ok_or_else(|| OracleError::Missing(w.name.clone()))?;
            here.insert(w.name.clone(), whole.clone());
        }
        Ok(())
    }

    /// The first rows of tensors, where a pass that differs from the first reads no more of them.
    fn first_rows(
        &self,
        body: usize,
        layer: &str,
        weights: &IndexMap<String, Tensor>,
        here: &mut IndexMap<String, Tensor>,
    ) -> Result<(), OracleError> {
        let leader = self.architecture.leader(body);
        if leader == body {
            return Ok(());
        }
        let f = &self.lowered.module.functions[&self.architecture.bodies[body].name];
        for (p, ty) in f.params.iter().zip(&f.types) {
            let Some(w) = self.lowered.weights[leader].iter().find(|w| w.name == p.name) else { continue };
            if w.dims == ty.dims {
                continue;
            }
            let name = format!("{layer}.{}", w.name);
            let whole = here.get(&w.name).or_else(|| weights.get(&name));
            let whole = whole.ok_or(OracleError::Missing(name))?.floats();
            let dims: Vec<usize> = ty.dims.iter().map(|&d| self.module.size(d) as usize).collect();
            let rows = whole[..dims.iter().product::<usize>().min(whole.len())].to_vec();
            here.insert(p.name.clone(), Tensor::float(&dims, rows));
        }
        Ok(())
    }

    /// The sizes of a tensor of a body, of one pass where each has its own.
    fn sizes(&self, function: &str, weight: &str) -> Option<Vec<usize>> {
        let body = self.architecture.bodies.iter().position(|b| b.name == function)?;
        let all = &self.lowered.weights[self.architecture.leader(body)];
        let w = all.iter().find(|w| w.name == weight)?;
        Some(w.dims.iter().map(|&d| self.module.size(d) as usize).collect())
    }

    fn indices(&self, apply: Option<&Apply>, variables: &[u64], here: &mut IndexMap<String, Tensor>) {
        let body = apply.map_or(HEAD, |apply| &self.architecture.bodies[apply.body].name);
        let joint = self.joints.get(body);
        let functions = [Some(&self.lowered.module.functions[body]), joint];
        for p in functions.into_iter().flatten().flat_map(|f| &f.params) {
            let Binding::Index(index) = p.binding else { continue };
            let Some(value) = resolve::index(&self.architecture, apply, index) else { continue };
            let value = value.at(variables);
            here.insert(p.name.clone(), Tensor::index(value as i32));
        }
    }

    /// Random numbers of the queries of an application's attentions.
    fn draws(&self, body: &str, application: u64, batch: &Batch, here: &mut IndexMap<String, Tensor>) {
        let dims = [self.shape.batch as usize, self.shape.sequence as usize];
        for p in &self.lowered.module.functions[body].params {
            let (Binding::Batch(Input::Draws), Some(number)) = (p.binding, Input::drawn(&p.name)) else {
                continue;
            };
            let of = |i: usize| drawn(batch.draws.get(i).copied().unwrap_or(0), application, number);
            here.insert(p.name.clone(), Tensor::int(&dims, (0..dims[0] * dims[1]).map(of).collect()));
        }
    }

    fn zeros(&self, function: &str, param: &str) -> Result<Tensor, OracleError> {
        let f = &self.lowered.module.functions[function];
        let v = f.find_param(param).ok_or_else(|| OracleError::Missing(param.into()))?;
        Ok(Tensor::zeros(&self.module, f.ty(v)))
    }

    /// Every function is applied at every depth, for every derivative: it is looked at once.
    fn check(&self) -> Result<(), InterpretError> {
        if self.checked.get().is_none() {
            let functions = self.lowered.module.functions.values().chain(self.joints.values());
            functions.into_iter().try_for_each(|f| interpret::check(&self.module, f))?;
            self.checked.get_or_init(|| ());
        }
        Ok(())
    }

    fn call(
        &self,
        name: &str,
        layer: Option<&str>,
        values: &IndexMap<String, Tensor>,
        weights: &IndexMap<String, Tensor>,
        watcher: &mut Decider,
    ) -> Result<IndexMap<String, Tensor>, OracleError> {
        run(&self.module, &self.lowered.module.functions[name], layer, values, weights, watcher)
    }

    fn joint(
        &self,
        name: &str,
        layer: Option<&str>,
        values: &IndexMap<String, Tensor>,
        weights: &IndexMap<String, Tensor>,
        watcher: &mut Decider,
    ) -> Result<IndexMap<String, Tensor>, OracleError> {
        let f =
            self.joints.get(name).ok_or_else(|| OracleError::Missing(format!("the derivative of {name}")))?;
        run(&self.module, f, layer, values, weights, watcher)
    }

    /// Adds the results of a joint function that are gradients of tensors.
    fn collect(
        &self,
        function: &str,
        layer: Option<(&str, [usize; 2])>,
        out: &IndexMap<String, Tensor>,
        gradients: &mut IndexMap<String, Tensor>,
    ) {
        let joint = &self.joints[function];
        let is_weight =
            |p: &&Port| matches!(p.binding, Binding::Weight | Binding::PassWeight | Binding::TurnWeight);
        for weight in joint.params.iter().filter(is_weight) {
            let Some(value) = out.get(&weight.cotangent().name) else { continue };
            let foreign = self.foreign(function, &weight.name);
            let own = layer.filter(|_| !foreign);
            let name = own.map_or(weight.name.clone(), |(layer, _)| format!("{layer}.{weight}"));
            let passes = self.passes(function, &weight.name);
            // A pass may have read the first rows alone.
            let one = self.sizes(function, &weight.name).unwrap_or_else(|| value.dims.clone());
            let each = one.iter().product::<usize>();
            if let (Some(passes), Some((_, pass))) = (passes, layer) {
                let all = gradients.entry(name).or_insert_with(|| {
                    let dims = [&[passes], &one[..]].concat();
                    Tensor::float(&dims, vec![0.0; dims.iter().product()])
                });
                let Data::Float(all) = &mut all.data else { continue };
                let own = &mut all[number_of(weight.binding, pass) * each..][..each];
                own.iter_mut().zip(value.floats()).for_each(|(s, d)| *s += d);
                continue;
            }
            let sum = gradients.entry(name).or_insert_with(|| Tensor::float(&one, vec![0.0; each]));
            if let Data::Float(sum) = &mut sum.data {
                sum.iter_mut().zip(value.floats()).for_each(|(s, d)| *s += d);
            }
        }
    }
}

/// Which tensor of those of passes, or of applications, a function reads.
fn number_of(binding: Binding, [pass, turn]: [usize; 2]) -> usize {
    if binding == Binding::TurnWeight { turn } else { pass }
}

fn take(out: &IndexMap<String, Tensor>, name: &str) -> Result<Tensor, OracleError> {
    out.get(name).cloned().ok_or_else(|| OracleError::Missing(name.into()))
}

fn run(
    module: &Module,
    f: &Function,
    layer: Option<&str>,
    values: &IndexMap<String, Tensor>,
    weights: &IndexMap<String, Tensor>,
    watcher: &mut Decider,
) -> Result<IndexMap<String, Tensor>, OracleError> {
    let mut args = vec![];
    for p in &f.params {
        let value = match p.binding {
            binding if binding.is_weights() => {
                let name = layer.map_or(p.name.clone(), |layer| format!("{layer}.{}", p.name));
                let found = values.get(&p.name).or_else(|| weights.get(&name));
                found.or_else(|| weights.get(&p.name)).ok_or(OracleError::Missing(name))?
            }
            _ => values.get(&p.name).ok_or_else(|| OracleError::Missing(p.name.clone()))?,
        };
        args.push(value);
    }
    let mut see = |node: &Node, operands: &[&Tensor], results: &mut [Tensor]| {
        watcher.see(node, operands, results);
    };
    let (results, multiply_adds) = interpret::run(module, f, &args, &mut see)?;
    watcher.multiply_adds += multiply_adds.iter().sum::<u64>();
    let pairs = |node: &Node| matches!(node.op.signature().work, Work::Pairs(..));
    let attended = f.nodes.iter().zip(&multiply_adds).filter(|(node, _)| pairs(node));
    watcher.attended += attended.map(|(_, n)| n).sum::<u64>();
    Ok(results.into_iter().collect())
}

/// An application that has been evaluated.
struct Called {
    /// The first words of the names of its tensors.
    layer: String,
    body: String,
    /// Which pass of the outermost loop it is in, and which application of its set it is.
    pass: [usize; 2],
    /// Whether no gradient flows through it.
    detached: bool,
    /// Its arguments.
    here: IndexMap<String, Tensor>,
}

/// Results of a walk over all applications.
struct Walked {
    context: IndexMap<String, Tensor>,
    inputs: Vec<Called>,
    /// Caches as the last application left them.
    state: IndexMap<String, Tensor>,
    /// Input of the head.
    x: Tensor,
    evaluation: Evaluation,
}

/// Records decisions, or makes them as they were.
struct Decider<'a> {
    held: Option<&'a Decisions>,
    /// Whether every value is rounded to f32.
    rounds: bool,
    made: Vec<Tensor>,
    margin: f64,
    tied: bool,
    largest: f64,
    multiply_adds: u64,
    attended: u64,
}

impl Default for Decider<'_> {
    fn default() -> Self {
        Decider {
            held: None,
            rounds: false,
            made: vec![],
            margin: f64::INFINITY,
            tied: false,
            largest: 0.0,
            multiply_adds: 0,
            attended: 0,
        }
    }
}

/// Rounds every value to f32. Two queries of an attention `sum` over different numbers of keys, and
/// results that are equal in f64 are not in f32: those of odd tokens move by a last bit.
fn round(result: &mut Tensor, sum: bool) {
    let row = result.dims.iter().skip(2).product::<usize>().max(1);
    let tokens = result.dims.get(1).copied().unwrap_or(1).max(1);
    let Data::Float(values) = &mut result.data else { return };
    for (i, x) in values.iter_mut().enumerate() {
        let odd = sum && x.is_finite() && i / row % tokens % 2 == 1;
        *x = f64::from(if odd { (*x as f32).next_up() } else { *x as f32 });
    }
}

impl Decider<'_> {
    fn see(&mut self, node: &Node, operands: &[&Tensor], results: &mut [Tensor]) {
        for result in results.iter_mut().filter(|_| self.rounds) {
            round(result, matches!(node.op, Op::Attention(_)));
        }
        if matches!(node.op, Op::Rms(_)) {
            let read = operands[0].floats().iter();
            self.largest = read.fold(self.largest, |largest, x| largest.max(x.abs()));
        }
        let relu = matches!(node.op, Op::Unary(Unary::Relu));
        let ties = match node.op.signature().derivative {
            Derivative::Held(ties) => Some(ties),
            Derivative::Rule(_) if relu => None,
            Derivative::Rule(_) | Derivative::Blocked(_) | Derivative::Missing(_) => return,
        };
        let row = operands[0].dims.last().copied().unwrap_or(1).max(1);
        match ties {
            Some(Ties::Copies) => {}
            Some(Ties::Scores) => {
                let k = results[0].dims.last().copied().unwrap_or(0);
                for scores in operands[0].floats().chunks(row) {
                    let mut sorted = scores.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    if let (Some(last), Some(next)) = (k.checked_sub(1).map(|k| sorted[k]), sorted.get(k)) {
                        self.near(last - next);
                    }
                }
            }
            Some(Ties::Keys) => {
                let Op::ChooseKeys(of) = &node.op else { return };
                of.margins(operands, &results[0].dims).into_iter().for_each(|margin| self.near(margin));
            }
            // Scores of the choices of one expert that were kept and let go, the spare ones apart.
            Some(Ties::Tiles) => {
                let Op::RoundGroups(of) = &node.op else { return };
                let (score, chosen) = (operands[0].floats(), operands[1].ints());
                let mut margins = HashMap::new();
                for (slot, (&expert, &kept)) in chosen.iter().zip(results[0].ints()).enumerate() {
                    let spare = slot % row + of.spare as usize >= row;
                    let (least, most) =
                        margins.entry((expert, spare)).or_insert((f64::INFINITY, f64::NEG_INFINITY));
                    match kept == expert {
                        true => *least = score[slot].min(*least),
                        false => *most = score[slot].max(*most),
                    }
                }
                margins.into_values().for_each(|(least, most)| self.near(least - most));
            }
            Some(Ties::Zero) => operands[0].floats().iter().for_each(|z| self.near(*z)),
            // A penalty on a share of tokens, which may be just what is allowed.
            None if operands[0].dims.is_empty() => {
                self.margin = self.margin.min(operands[0].floats()[0].abs());
            }
            None => {}
        }
        let before = self.held.and_then(|held| held.0.get(self.made.len()));
        if let Some(before) = before {
            match (&mut results[0].data, &before.data) {
                // Where the slope changes is decided too, not the value.
                (Data::Float(now), Data::Float(then)) if relu => {
                    let values = operands[0].floats().iter().zip(then);
                    now.iter_mut().zip(values).for_each(|(n, (x, t))| *n = if *t > 0.0 { *x } else { 0.0 });
                }
                (now, then) => *now = then.clone(),
            }
        }
        self.made.push(results[0].clone());
    }

    /// A value through which no gradient flows: it is what it was.
    fn hold(&mut self, value: Tensor) -> Tensor {
        let before = self.held.and_then(|held| held.0.get(self.made.len())).cloned();
        let value = before.unwrap_or(value);
        self.made.push(value.clone());
        value
    }

    fn near(&mut self, difference: f64) {
        if difference == 0.0 {
            self.tied = true;
        } else {
            self.margin = self.margin.min(difference.abs());
        }
    }
}
