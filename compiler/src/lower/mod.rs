//! An architecture as IR: the canonical form, written as the formulas of
//! `docs/dev/semantics.md` and `docs/dev/wiring.md` are.
//!
//! *In*: an [`Architecture`]. *Out*: a [`Lowered`]: a module with the functions `embed`, one per
//! distinct body of a layer or statement, and `head`, and a list of the weights each reads. Nothing
//! is optimised here; rewriting does that, and declared counts are taken from this form.
//!
//! Every term of a composition is a map from the stream that it reads to an output; a
//! [`wiring`](crate::wiring) says what a term reads and where its output goes. `a > b` are terms of
//! one wire, each reading the stream after the one before; in `a | b` both read the stream before
//! either.
//!
//! A `skip` has two forms ([`Form`]). In training a top-k router gathers its `k` tokens, the
//! wrapped part works on these alone, and its update is put back. Without looking ahead, how many
//! tokens take part depends on data: shapes keep all tokens, `places` says which take part, and the
//! schedule sees from it which rows nobody needs.

mod adapt;
pub mod attention;
pub mod choice;
mod define;
pub mod depths;
pub mod ends;
pub mod exit;
pub mod mixture;
mod observe;
pub mod pass;
mod points;
pub mod skip;
pub mod statement;
mod stream;
mod text;

pub use adapt::LEAST_NORM;
pub(crate) use attention::latent_place;

use crate::CompileError;
use crate::architecture::{Architecture, Body, Keys, Work, remembered_as};
use crate::bind::{Owner, Part};
use crate::build::{Builder, Marks};
use crate::compiled::{Init, Observation, TensorKind};
use crate::ir::{
    self, Binding, Dim, Dims, Function, Index, Input, Lifetime, Mask, Module, Op, Output, PerToken, Port,
    Positions, Reduce, Type, Unary, Value,
};
use crate::op::{
    Concat, Decide, DepthAttention, Group, Grouped, KeepInts, PutTokens, Rms, RoundGroups, Route, Runs,
    Split, TopTokens,
};
use crate::wiring::{Wire, wiring};
use dreamc_dsl::spec::{
    self, Activation, Beginning, CausalRule, EmbedScale, Exit, Expr, Item, Kind, Mixes, Mixing, NormGain,
    QkNorm, Router, RouterForm, Score, Scorer, Select, Skip, SkipGate, SkipInput, SkipKv, SkipLevel,
    SkipRule, Statement,
};
use dreamc_dsl::with_component;
use indexmap::IndexMap;
use std::collections::{HashMap, HashSet};

/// The norms around components.
pub mod part {
    use crate::bind::Part;

    const fn own(path: &'static str) -> Part {
        Part::new("layer", path)
    }

    /// The norm before a component.
    pub const NORM: Part = own("norm.weight");
    /// The norm after a component.
    pub const POST_NORM: Part = own("post_norm.weight");
    /// The norm of the stream after each application.
    pub const RESIDUAL_NORM: Part = own("residual_norm.weight");
}

/// Size of the batch a module is lowered for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub sequence: u64,
    /// Whether attention stops at document boundaries (`segments` input).
    pub segments: bool,
    /// Whether keys and values are appended to caches of this many places for each sequence, and
    /// attention reads those: `slots` says where, `key_positions` what is there.
    pub cache: Option<Places>,
    /// Whether layers return what routers choose and what depth attention asks for, see
    /// [`Observation`].
    pub observe: bool,
    /// Whether attentions make their probabilities, for [`crate::probe`].
    pub scores: bool,
    /// Weight of `mean(logsumexp(logits)²)` in the loss.
    pub z_loss: f64,
    /// The loss is of pairs of sequences: the first of each was preferred.
    pub dpo: Option<spec::Dpo>,
    /// A token leaves its loop where this share of it has, see [`Options`](crate::Options).
    pub exit: Option<f64>,
}

/// Room in the caches of each sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Places {
    /// Tokens.
    pub tokens: u64,
    /// Room of a part that tokens skip: this many times its capacity.
    pub slack: f64,
    /// And this many tokens more.
    pub more: u64,
    /// Whether there are logits after every token, or only after the one of each sequence that is
    /// asked for.
    pub every: bool,
}

impl Places {
    /// Entries of a cache of processed tokens, which should be this share of all.
    fn entries(self, share: f64) -> u64 {
        // A float beyond the integers becomes the largest of them.
        let expected = (self.slack * share * self.tokens as f64).ceil() as u64;
        expected.saturating_add(self.more).clamp(1, self.tokens.max(1))
    }
}

/// One token without caches.
impl Default for Shape {
    fn default() -> Self {
        Shape {
            batch: 1,
            sequence: 1,
            segments: false,
            cache: None,
            observe: false,
            scores: false,
            z_loss: 0.0,
            dpo: None,
            exit: None,
        }
    }
}

/// A model as IR.
#[derive(Clone, Debug, PartialEq)]
pub struct Lowered {
    /// The functions and dimensions.
    pub module: Module,
    /// Weights of each body, by parameter name, in order of definition. Bodies of passes that
    /// differ have those of their leader; a function may read only their first rows.
    pub weights: Vec<Vec<Weight>>,
    /// Weights that each body reads and others have, by full tensor name.
    pub foreign: Vec<Vec<Weight>>,
    /// Weights outside the layers, by full tensor name.
    pub globals: Vec<Weight>,
    /// Owners of dimensions, states and observations.
    pub facts: Facts,
}

/// Facts of lowering about dimensions, states and observations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Which part of the model a dimension is of.
    pub owners: HashMap<Dim, Owner>,
    /// Dimensions of the products of routers.
    pub routing: HashSet<Dim>,
    /// How many of how many slots are of an expert, where not all are, by the dimension of experts:
    /// routing is taken to be even.
    pub taken: HashMap<Dim, (u64, u64)>,
    /// The states of layers, by name.
    pub states: IndexMap<String, State>,
    /// Observations for the host, by name.
    pub observed: IndexMap<String, (Owner, Observation)>,
    /// The text that nodes and values of each function come from.
    pub marks: IndexMap<String, Marks>,
}

/// A state of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Of what.
    pub owner: Owner,
    /// Which of its states.
    pub part: Part,
}

impl Facts {
    fn extend(&mut self, more: Facts) {
        self.owners.extend(more.owners);
        self.routing.extend(more.routing);
        self.taken.extend(more.taken);
        self.states.extend(more.states);
        self.observed.extend(more.observed);
        self.marks.extend(more.marks);
    }
}

/// A tensor that a function reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Its name inside the layer, or its full name.
    pub name: String,
    /// Its dimensions.
    pub dims: Dims,
    /// Its kind.
    pub kind: TensorKind,
    /// How it begins.
    pub init: Init,
    /// How many there are of it, where every pass of a loop has one: a first dimension in
    /// checkpoints.
    pub passes: Option<u64>,
    /// Which part of the model it belongs to.
    pub owner: Owner,
    /// Which of its tensors it is.
    pub part: Part,
    /// For a balancing bias: the state that counts choices, and the law that moves the bias.
    pub balancing: Option<Balancing>,
}

impl Weight {
    /// Its shape in checkpoints.
    pub fn shape(&self, module: &Module) -> Vec<u64> {
        self.passes.into_iter().chain(self.dims.iter().map(|&d| module.size(d))).collect()
    }

    /// How many there are of it in each set of weights.
    pub fn instances(&self) -> u64 {
        self.passes.unwrap_or(1)
    }
}

/// How a bias is balanced.
#[derive(Clone, Debug, PartialEq)]
pub struct Balancing {
    /// Name of the state that counts how often each candidate was chosen.
    pub counts: String,
    /// The law that moves the bias.
    pub law: spec::Balance,
}

/// Integers of tokens that layers ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ints {
    /// Inputs of the host.
    Given(Input),
    /// Places of tokens in their sequence.
    Places,
    /// Random numbers of queries, of the attention of that number here.
    Draws(u32),
}

/// Name of the function that embeds tokens: `(ids) -> x`.
pub const EMBED: &str = "embed";
/// Name of the function from the means of pooled thresholds to their penalty:
/// `(skip.pooled0, …) -> aux`. Only where there are any.
pub const POOL: &str = "pool";
/// Name of the function from the last stream to the loss: `(x, targets, loss_scale) -> nll, loss,
/// logits`; of a program that reads texts for what follows them `(x, asked) -> logits`.
pub const HEAD: &str = "head";

/// The purpose of a module. Only projection mixtures and tokens that skip differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Differentiation: top-k routers look at the whole sequence.
    Training,
    /// Evaluation and sampling: each token decides by itself, by the rule that its
    /// router names. A top-k router that names none looks at the whole sequence.
    Inference,
    /// The canonical inference form, from which declared counts are taken: every `skip` processes
    /// its share of the tokens, and the matrices of a projection mixture stand for their sums with
    /// the shared expert.
    Declared,
    /// The same of training, where a threshold skips nothing: its straight-through gradient asks
    /// what every token would get.
    DeclaredTraining,
}

impl Form {
    fn trains(self) -> bool {
        matches!(self, Form::Training | Form::DeclaredTraining)
    }

    fn is_declared(self) -> bool {
        matches!(self, Form::Declared | Form::DeclaredTraining)
    }
}

/// Lowers an architecture for a batch shape, to be differentiated; with caches, to be sampled from.
pub fn lower(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, if shape.cache.is_some() { Form::Inference } else { Form::Training })
}

/// Lowers an architecture to be evaluated: as [`lower`] where nothing looks ahead.
pub fn lower_evaluation(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, Form::Inference)
}

/// The canonical inference form, from which declared counts are taken: as [`lower`], but the
/// matrices of a projection mixture stand for their sums with the shared expert (Equation 8), which
/// is listed and not read.
pub fn lower_inference(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, Form::Declared)
}

/// The same of training.
pub fn lower_declared_training(architecture: &Architecture, shape: Shape) -> Result<Lowered, CompileError> {
    lower_as(architecture, shape, Form::DeclaredTraining)
}

fn lower_as(architecture: &Architecture, shape: Shape, form: Form) -> Result<Lowered, CompileError> {
    check_sizes(architecture, shape)?;
    let mut module = Module::default();
    module.dim("batch", shape.batch);
    module.dim("seq", shape.sequence);
    module.dim("hidden", architecture.model.hidden);
    module.dim("vocab", architecture.model.vocab);
    let mut functions = vec![];
    let (mut weights, mut foreign) = (vec![], vec![]);
    let (mut globals, mut facts) = (vec![], Facts::default());
    let (embed, known) = ends::embed(architecture, &mut module, &mut globals)?;
    functions.push(embed);
    facts.extend(known);
    for body in &architecture.bodies {
        let mut lower = Lower::new(architecture, Some(body), shape, &mut module, &body.name);
        lower.form = form;
        match &body.work {
            Work::Layer(expr) => lower.layer(body, expr)?,
            Work::Statement(statement) => lower.statement(statement),
            Work::Embed => lower.begin_pass(),
            Work::Enter => lower.begin_exits(),
            Work::Exit(leaving) => lower.exit(leaving),
            Work::Choose(choosing) => lower.choose(choosing),
            Work::Chosen => lower.weigh(),
            Work::Remember(depth) => lower.remember(*depth),
            Work::History(depths) => lower.history(depths),
        }
        let (function, read, known) = lower.finish()?;
        functions.push(function);
        // An exit reads weights of the head's, and of the norm before it; a norm of a named gain
        // one that is the model's.
        let (own, others): (Vec<Weight>, Vec<Weight>) = read.into_iter().partition(|w| match body.work {
            Work::Exit(_) => w.owner == Owner::Exit,
            Work::Statement(Statement::Norm(NormGain::Named(_))) => false,
            Work::Layer(_)
            | Work::Statement(_)
            | Work::Embed
            | Work::Enter
            | Work::Choose(_)
            | Work::Chosen
            | Work::Remember(_)
            | Work::History(_) => true,
        });
        // Bodies of one set of weights share the first one's list; a later pass may read more, as
        // the predictor of a part that no token skips in the first.
        weights.push(vec![]);
        let set: &mut Vec<Weight> = &mut weights[architecture.leader(foreign.len())];
        for weight in own {
            if set.iter().all(|w| w.name != weight.name) {
                set.push(weight);
            }
        }
        for weight in others.iter().filter(|w| w.part == exit::part::NAMED_NORM) {
            if globals.iter().all(|w: &Weight| w.name != weight.name) {
                globals.push(weight.clone());
            }
        }
        foreign.push(others);
        facts.extend(known);
    }
    if form.trains() && !architecture.pools.is_empty() {
        functions.push(ends::pool(architecture, &mut module)?);
    }
    let (head, known) = ends::head(architecture, (shape, form), &mut module, &mut globals)?;
    functions.push(head);
    facts.extend(known);
    module.functions = functions.into_iter().map(|f| (f.name.clone(), f)).collect();
    Ok(Lowered { module, weights, foreign, globals, facts })
}

/// Whether the sizes that lowering multiplies or adds fit into 64 bits.
fn check_sizes(architecture: &Architecture, shape: Shape) -> Result<(), CompileError> {
    let tokens = fits("a batch", &[shape.batch, shape.sequence])?;
    for component in architecture.model.components.values() {
        with_component!(component, c => c.fits(tokens))?;
    }
    Ok(())
}

/// A product of sizes, where its bytes fit into 64 bits.
fn fits(of: &'static str, factors: &[u64]) -> Result<u64, CompileError> {
    let product = factors.iter().try_fold(1u64, |n, &f| n.checked_mul(f));
    product.filter(|n| n.checked_mul(4).is_some()).ok_or(CompileError::Overflow(of))
}

/// A kind of component as a function.
trait Lowering {
    /// Whether the sizes that lowering multiplies or adds fit into 64 bits.
    fn fits(&self, tokens: u64) -> Result<(), CompileError>;

    /// Its output for what it reads.
    fn lower(&self, l: &mut Lower, c: Owner, kind: Kind, n: Value) -> Result<Value, CompileError>;
}

pub(crate) struct Lower<'a> {
    architecture: &'a Architecture,
    body: Option<&'a Body>,
    shape: Shape,
    pub(crate) b: Builder<'a>,
    form: Form,
    weights: Vec<Weight>,
    facts: Facts,
    /// Auxiliary losses of routers.
    auxiliary: Vec<Value>,
    /// Skips so far: they are numbered in the order of the layer's text.
    skips: u32,
    /// Attentions so far that drop weights.
    dropping: u32,
    /// The `skip` whose part is being lowered, and those around it.
    inside: Vec<Inside>,
    /// The queries, while an attention is lowered whose keys are all tokens.
    asking: Option<Value>,
    /// Whether an attention of the wrapped part has keys that follow from what is being lowered.
    ahead: bool,
    /// Means of masks, by pool.
    pooled: Vec<(usize, Value)>,
    /// States that are handed from application to application, as they are by now.
    handed: IndexMap<String, (Port, Value)>,
    /// Values of definitions in this layer, by component and name.
    named: HashMap<(String, String), Value>,
    /// Keys and values that components made in this layer, for others to read.
    made: HashMap<String, (Value, Value)>,
    /// Keys that were left in the depth stream in this layer.
    left: u32,
    /// Which tokens run this pass, where some have left the loop.
    staying: Option<Staying>,
}

/// Places of tokens in a loop that they may leave, -1 for the others.
#[derive(Clone, Copy)]
struct Staying {
    /// Those that run this pass.
    running: Value,
    /// Those that left before.
    left: Value,
}

/// A `skip` from within.
enum Inside {
    /// The rows are those at `index` of the rows outside.
    Gathered {
        index: Value,
        /// The tokens of a sequence outside.
        of: Dim,
        /// Integers of the tokens outside, gathered already.
        ints: Vec<(Ints, Value)>,
    },
    /// The rows are those outside; tokens of negative place take no part.
    Masked {
        places: Value,
        /// Share of all tokens that should take part.
        share: f64,
        /// Places of those that are keys and values, and their share; none where all rows are.
        keys: Option<(Value, f64)>,
    },
}

/// The meaning of a value's rows; only rows of tokens that take part are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Row {
    Token,
    Query,
    Key,
}

/// A routing decision and what follows from it.
struct Routing {
    order: Value,
    offsets: Value,
    inverse: Value,
    /// Gates `[.., k]`.
    gates: Value,
}

impl<'a> Lower<'a> {
    fn new(
        architecture: &'a Architecture,
        body: Option<&'a Body>,
        shape: Shape,
        module: &'a mut Module,
        name: &str,
    ) -> Self {
        let b = Builder::new(module, name);
        Lower {
            architecture,
            body,
            shape,
            b,
            form: Form::Training,
            weights: vec![],
            facts: Facts::default(),
            auxiliary: vec![],
            skips: 0,
            dropping: 0,
            inside: vec![],
            asking: None,
            ahead: false,
            pooled: vec![],
            handed: IndexMap::new(),
            named: HashMap::new(),
            made: HashMap::new(),
            left: 0,
            staying: None,
        }
    }

    fn finish(mut self) -> Result<(Function, Vec<Weight>, Facts), CompileError> {
        let marks = self.b.marks();
        let function = self.b.finish()?;
        self.facts.marks.insert(function.name.clone(), marks);
        Ok((function, self.weights, self.facts))
    }

    pub(crate) fn dim(&mut self, name: &str, size: u64) -> Dim {
        self.b.module.dim(name, size)
    }

    pub(crate) fn hidden(&mut self) -> Dim {
        self.dim("hidden", self.architecture.model.hidden)
    }

    /// A dimension of a component.
    fn dim_of(&mut self, owner: Owner, name: &str, size: u64) -> Dim {
        let dim = self.dim(&format!("{}.{name}", self.architecture.label(owner)), size);
        self.facts.owners.insert(dim, owner);
        dim
    }

    /// A dimension that routers' products have.
    fn routing(&mut self, dim: Dim) -> Dim {
        self.facts.routing.insert(dim);
        dim
    }

    /// A dimension of size one.
    pub(crate) fn one(&mut self) -> Dim {
        self.dim("one", 1)
    }

    /// A weight of those dimensions; `None` is the default beginning.
    pub(crate) fn weight(
        &mut self,
        owner: Owner,
        part: Part,
        dims: &[Dim],
        kind: TensorKind,
        init: Option<Init>,
    ) -> Value {
        let binding = if kind == TensorKind::Balance { Binding::Buffer } else { Binding::Weight };
        self.bound_weight(owner, part, dims, kind, init, (binding, None))
    }

    /// The same, bound as `binding`; one for each of `passes` passes.
    fn bound_weight(
        &mut self,
        owner: Owner,
        part: Part,
        dims: &[Dim],
        kind: TensorKind,
        init: Option<Init>,
        (binding, passes): (Binding, Option<u64>),
    ) -> Value {
        let init = init.unwrap_or(Init::Normal((1.0 / (5.0 * self.architecture.model.hidden as f64)).sqrt()));
        let name = self.architecture.name_of(owner, part);
        if !self.weights.iter().any(|w| w.name == name) {
            let (name, dims) = (name.clone(), dims.to_vec());
            self.weights.push(Weight {
                name,
                dims: dims.into(),
                kind,
                init,
                passes,
                owner,
                part,
                balancing: None,
            });
        }
        self.b.param(&name, binding, Type::f32(dims))
    }

    /// The state of that part, before this call.
    pub(crate) fn state(&mut self, owner: Owner, part: Part, lifetime: Lifetime, ty: Type) -> (Port, Value) {
        let port = Port::new(self.architecture.name_of(owner, part), Binding::State(lifetime));
        self.facts.states.insert(port.name.clone(), State { owner, part });
        let value = self.b.param(&port.name, port.binding, ty);
        (port, value)
    }

    /// The row of a cache that this application writes.
    fn row(&mut self, owner: Owner) -> Value {
        let name = format!("{}.row", self.architecture.label(owner));
        self.b.index(&name, Index::Row(self.cache_number(owner)))
    }

    /// Initialisation of output projections and expert down-projections.
    fn output_init(&self) -> Option<Init> {
        let a = self.architecture;
        let n = a.attention_dimensions as f64;
        Some(Init::Normal((1.0 / (2.5 * a.model.hidden as f64 * a.depth as f64 * n)).sqrt()))
    }

    /// A gain of the shape of the last `inner` dimensions of `x`.
    pub(crate) fn gain(
        &mut self,
        owner: Owner,
        part: Part,
        x: Value,
        inner: usize,
        kind: TensorKind,
    ) -> Value {
        let all = self.b.dims(x);
        let offset = self.architecture.model.norm.unit_offset;
        let init = Init::Constant(if offset { 0.0 } else { 1.0 });
        let w = self.weight(owner, part, &all[all.len() - inner..], kind, Some(init));
        if !offset {
            return w;
        }
        let one = self.b.constant(1.0);
        self.b.add(w, one)
    }

    fn norm_as(&mut self, x: Value, owner: Owner, part: Part, inner: usize, kind: TensorKind) -> Value {
        let n = self.b.op(Rms { inner, eps: self.eps() }, &[x]);
        let g = self.gain(owner, part, x, inner, kind);
        self.b.mul(n, g)
    }

    /// The norm of a vector that latent attention makes others of.
    pub(crate) fn norm_of_latents(&mut self, x: Value, owner: Owner, part: Part, eps: Option<f64>) -> Value {
        let n = self.b.op(Rms { inner: 1, eps: eps.unwrap_or(self.eps()) }, &[x]);
        let g = self.gain(owner, part, x, 1, TensorKind::Gain);
        self.b.mul(n, g)
    }

    /// Whose weights a term reads by.
    pub(crate) fn reader(&self, term: &Expr) -> Result<Owner, CompileError> {
        let missing = CompileError::Unsupported("a composition that reads as one");
        match term {
            Expr::Component(name) => {
                let number = self.architecture.model.components.get_index_of(name);
                number.map(|number| Owner::Component(number as u32)).ok_or(missing)
            }
            Expr::Skip(..) => Ok(Owner::Skip(self.skips)),
            Expr::Norm | Expr::Sequential(_) | Expr::Parallel(_) => Err(missing),
        }
    }

    /// Outputs of all applications, where the stream is one of sources.
    pub(crate) fn outputs(&self) -> u64 {
        self.architecture.rows_of(Owner::Sources)
    }

    /// The number of a cache.
    pub(crate) fn cache_number(&self, owner: Owner) -> u32 {
        self.architecture.cache_of(owner).unwrap_or(0) as u32
    }

    /// The number that norms add to the mean square.
    pub(crate) fn eps(&self) -> f64 {
        self.architecture.model.norm.eps
    }

    /// A weight that is one number.
    pub(crate) fn number(&mut self, owner: Owner, part: Part, init: Init) -> Value {
        let one = self.one();
        let w = self.weight(owner, part, &[one], TensorKind::Gain, Some(init));
        self.b.reshape(w, &[])
    }

    pub(crate) fn norm(&mut self, x: Value, owner: Owner, part: Part, inner: usize) -> Value {
        self.norm_as(x, owner, part, inner, TensorKind::Gain)
    }

    fn layer(&mut self, body: &Body, expr: &Expr) -> Result<(), CompileError> {
        let x = self.stream();
        self.b.point("in".into(), x);
        self.staying = self.tokens_staying();
        let wiring = wiring(&self.architecture.model);
        let mut y = wiring.layer(self, x, expr)?;
        if body.residual_norm {
            y = self.norm(y, Owner::Stream, part::RESIDUAL_NORM, 1);
        }
        let y = self.of_staying(x, y);
        self.b.point("out".into(), y);
        self.b.result(Port::new("y", Binding::Stream), y);
        self.leave_auxiliary();
        self.keep_pooled();
        for (_, (port, value)) in std::mem::take(&mut self.handed) {
            self.b.result(port, value);
        }
        Ok(())
    }

    /// Leaves the sum of the losses of routers.
    fn leave_auxiliary(&mut self) {
        let sum = self.auxiliary.drain(..).collect::<Vec<_>>().into_iter().reduce(|a, c| self.b.add(a, c));
        if let Some(sum) = sum {
            self.b.result(Output::Aux, sum);
        }
    }

    fn leave(&mut self, wire: Wire) -> Result<Value, CompileError> {
        wire.leave().ok_or(CompileError::Unsupported("a composition of nothing"))
    }

    /// The output of a composition on the stream `x`.
    pub(crate) fn expr(&mut self, expr: &Expr, x: Value) -> Result<Value, CompileError> {
        match expr {
            Expr::Component(name) => self.component(name, x),
            Expr::Norm => Err(CompileError::Unsupported("a norm of an update")),
            Expr::Parallel(terms) => {
                // All terms read the stream before any of them writes.
                let mut wire = Wire::enter(x);
                let read = wire.read(&mut self.b);
                for term in terms {
                    let output = self.expr(term, read)?;
                    wire.write(&mut self.b, output);
                }
                self.leave(wire)
            }
            Expr::Sequential(terms) => {
                let behind = self.ahead;
                let mut wire = Wire::enter(x);
                for (i, term) in terms.iter().enumerate() {
                    self.ahead = behind || terms[i + 1..].iter().any(|term| self.attends(term));
                    let read = wire.read(&mut self.b);
                    let output = self.expr(term, read)?;
                    wire.write(&mut self.b, output);
                }
                self.ahead = behind;
                self.leave(wire)
            }
            Expr::Skip(skip, inner) => self.skip(skip, inner, x),
        }
    }

    fn component(&mut self, name: &str, x: Value) -> Result<Value, CompileError> {
        let architecture = self.architecture;
        let (number, _, component) = architecture
            .model
            .components
            .get_full(name)
            .ok_or(CompileError::Unsupported("a component without definition"))?;
        let from = self.b.place();
        let y = self.output_of(Owner::Component(number as u32), component, x)?;
        self.b.part(from, name);
        Ok(y)
    }

    /// The output of a component of what it is given.
    fn output_of(&mut self, c: Owner, component: &spec::Component, x: Value) -> Result<Value, CompileError> {
        let (pre_norm, post_norm) = component.norms();
        let n = if pre_norm { self.norm(x, c, part::NORM, 1) } else { x };
        self.point(c, "in", n);
        let y = with_component!(component, keys => keys.lower(self, c, component.kind(), n))?;
        let y = if post_norm { self.norm(y, c, part::POST_NORM, 1) } else { y };
        let y = self.b.scaled(y, self.architecture.model.output_scale);
        self.point(c, "out", y);
        Ok(y)
    }
}
