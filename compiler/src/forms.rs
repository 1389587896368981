//! The functions of a model in the forms that programs need.
//!
//! *In*: lowered functions, and the weights of each that are trained. *Out*: [`ModelForms`]: of
//! each function the scheduled forms, and work on weights alone that was taken out of them.
//! *Promise*: the result is the same on any number of threads.
//!
//! A function goes three ways, and bodies go the first and the last side by side:
//!
//! 1. [`grow`]: it is rewritten, differentiated, rewritten with its derivative, and narrowed;
//! 2. [`hoist`]: work on weights alone leaves it, under names that are unique in the plan;
//! 3. [`cut`]: forward and backward are cut apart, and scheduled.

use crate::CompileError;
use crate::architecture::Architecture;
use crate::autodiff::{
    Seed, body_seeds, differentiate, has_derivative, head_seeds, partition, prune, without_training,
};
use crate::compiled::TensorKind;
use crate::ir::{Binding, DType, Function, Lifetime, Module, Of, Output, Port};
use crate::lower::{EMBED, HEAD, Lowered, POOL, Weight};
use crate::passes::{Pass, Passes};
use crate::pipeline::{ANSWER, Options};
use crate::precision::{self, Narrow};
use crate::rewrite::{self, Optimiser, Prepared, Stage};
use crate::schedule::{Bind, Scheduled, schedule};
use indexmap::IndexMap;
use rustc_hash::FxHashSet;

/// The type that a weight of a body, or of what is outside the layers, is stored in.
pub(crate) type StoredOf<'s> = &'s (dyn Fn(Option<usize>, &Port) -> DType + Sync);

/// Options, and storage of weights.
type With<'a> = (&'a Options, StoredOf<'a>);

/// A function in the forms that programs need.
pub(crate) struct Forms {
    pub forward: (Function, Scheduled),
    /// The forward that keeps nothing, where there are applications without a gradient.
    pub detached: Option<(Function, Scheduled)>,
    pub backward: Option<(Function, Scheduled)>,
    pub evaluate: (Function, Scheduled),
}

/// All functions of a model in the forms that programs need.
pub(crate) struct ModelForms {
    pub bodies: Vec<Forms>,
    pub embed: Forms,
    pub head: Forms,
    /// The penalty of pooled thresholds with its gradient, in training.
    pub pool: Option<(Function, Scheduled)>,
    /// Work before and after the calls of each body, and of the functions outside the layers.
    pub prepared: IndexMap<Option<usize>, Prepared>,
}

/// Nodes of all bodies from which on threads gain more than they cost.
const MANY: usize = 8192;

impl ModelForms {
    /// `trained` says for which weights gradients are wanted.
    pub fn new(
        architecture: &Architecture,
        lowered: &mut Lowered,
        trained: &dyn Fn(&Weight, Option<usize>) -> bool,
        with: With,
        optimiser: &mut Optimiser,
        passes: &Passes,
    ) -> Result<Self, CompileError> {
        let (options, _) = with;
        let mut tasks: Vec<Task> = vec![];
        for i in 0..architecture.bodies.len() {
            tasks.push(Task::body(architecture, lowered, i, trained, options));
        }
        let globals: FxHashSet<String> =
            lowered.globals.iter().filter(|w| trained(w, None)).map(|w| w.name.clone()).collect();
        let site = Site::new(architecture, None, options);
        let outside = |name: &str| Task {
            function: lowered.module.functions[name].clone(),
            weights: globals.clone(),
            routers: FxHashSet::default(),
            site: site.clone(),
        };
        let (embed, head) = (outside(EMBED), outside(HEAD));
        let module = &mut lowered.module;
        let nodes: usize = tasks.iter().map(|t| t.function.nodes.len()).sum();
        let parallel = nodes >= MANY;
        let mut grown = grow_all(module, &tasks, with, optimiser, passes, parallel)?;
        let mut prepared = IndexMap::new();
        for (i, (task, grown)) in tasks.iter().zip(&mut grown).enumerate() {
            let mut own = Prepared::default();
            hoist(module, task, options, grown, (&mut own, &mut *optimiser), passes)?;
            prepared.insert(Some(i), own);
        }
        let work = |passes: &Passes, (task, grown): (&Task, Grown)| cut(module, task, grown, passes);
        let bodies = passes.each(parallel, tasks.iter().zip(grown).collect(), work)?;
        let mut own = Prepared::default();
        let seeds = [("x", Seed::Param)];
        let mut grown = grow(module, &embed, &seeds, with, optimiser, passes)?;
        hoist(module, &embed, options, &mut grown, (&mut own, &mut *optimiser), passes)?;
        let embed = cut(module, &embed, grown, passes)?;
        let head = head_forms(module, &head, with, &mut own, optimiser, passes)?;
        prepared.insert(None, own);
        let pool = match module.functions.get(POOL).cloned() {
            Some(f) if options.train => {
                let means = |p: &Port| has_derivative(p, |_| false);
                let joint = passes.function(Pass::Differentiate, module, |module| {
                    differentiate(module, &f, &[(Output::Aux.name(), Seed::Param)], &means)
                })?;
                Some(scheduled(passes, module, joint)?)
            }
            _ => None,
        };
        Ok(ModelForms { bodies, embed, head, pool, prepared })
    }
}

/// A function on its way to its forms.
struct Task {
    function: Function,
    /// Names of the weights whose gradients are wanted.
    weights: FxHashSet<String>,
    /// Names of the weights of its routers.
    routers: FxHashSet<String>,
    site: Site,
}

impl Task {
    fn body(
        architecture: &Architecture,
        lowered: &Lowered,
        i: usize,
        trained: &dyn Fn(&Weight, Option<usize>) -> bool,
        options: &Options,
    ) -> Task {
        let leader = architecture.leader(i);
        let all = || lowered.weights[leader].iter().chain(&lowered.foreign[i]);
        let routers = all().filter(|w| w.kind == TensorKind::Router).map(|w| w.name.clone()).collect();
        let own = lowered.weights[leader].iter().filter(|w| trained(w, Some(leader)));
        let others = lowered.foreign[i].iter().filter(|w| trained(w, None));
        Task {
            function: lowered.module.functions[&architecture.bodies[i].name].clone(),
            weights: own.chain(others).map(|w| w.name.clone()).collect(),
            routers,
            site: Site::new(architecture, Some(i), options),
        }
    }

    fn wants(&self, p: &Port) -> bool {
        has_derivative(p, |p| self.weights.contains(&p.name))
    }
}

/// The place of a function in its model, as far as rewriting asks.
#[derive(Clone)]
struct Site {
    /// The body, unless it is outside the layers.
    body: Option<usize>,
    /// Name of the body.
    scope: String,
    /// Calls that one preparation of a set of weights serves.
    uses: f64,
    /// Whether some of them have no gradient.
    detached: bool,
    indices: Vec<(String, u64)>,
}

impl Site {
    fn new(architecture: &Architecture, body: Option<usize>, options: &Options) -> Site {
        let applications = body.map_or(1.0, |b| {
            let body = &architecture.bodies[b];
            body.applications as f64 / body.sets.max(1) as f64
        });
        Site {
            body,
            scope: body.map_or("model".into(), |b| architecture.bodies[b].name.clone()),
            uses: applications * if options.cache.is_some() { ANSWER } else { 1.0 },
            detached: body.map(|b| &architecture.bodies[b]).is_some_and(|b| b.kept < b.applications),
            indices: body.map_or(vec![], |b| architecture.constant_rows(b)),
        }
    }

    /// The context of rewriting a function with these parameters.
    fn context(&self, stage: Stage, (options, stored): With, params: &[Port]) -> rewrite::Context {
        let narrow = options.narrow != Narrow::Nothing;
        let packed = |port: &&Port| matches!(stored(self.body, port), DType::Packed(_));
        let packed = params.iter().filter(packed).map(|port| port.name.clone()).collect();
        rewrite::Context { stage, uses: self.uses, indices: self.indices.clone(), packed, narrow }
    }
}

/// A function that is rewritten and narrowed, before weights leave it.
struct Grown {
    evaluate: Function,
    joint: Option<Joint>,
}

/// A function with its derivative.
struct Joint {
    /// Forward and backward together.
    whole: Function,
    /// The function that was differentiated.
    forward: Function,
}

/// [`grow`] of each body, the dimensions that rules made in `module`, reports in order.
fn grow_all(
    module: &mut Module,
    tasks: &[Task],
    with: With,
    optimiser: &mut Optimiser,
    passes: &Passes,
    parallel: bool,
) -> Result<Vec<Grown>, CompileError> {
    let base = Module { dims: module.dims.clone(), functions: Default::default() };
    let apart = optimiser.apart();
    let work = |passes: &Passes, task: &Task| {
        let (mut own, mut optimiser) = (base.clone(), apart.clone());
        let seeds = body_seeds(&task.function, Seed::Param);
        let grown = grow(&mut own, task, &seeds, with, &mut optimiser, passes)?;
        Ok((grown, own, optimiser))
    };
    let mut all = vec![];
    for (mut grown, own, theirs) in passes.each(parallel, tasks.iter().collect(), work)? {
        let joint = grown.joint.iter_mut().flat_map(|j| [&mut j.whole, &mut j.forward]);
        module.adopt(&own, std::iter::once(&mut grown.evaluate).chain(joint));
        optimiser.report.functions.extend(theirs.report.functions);
        all.push(grown);
    }
    Ok(all)
}

fn rewritten(
    module: &mut Module,
    f: &Function,
    context: &rewrite::Context,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<Function, CompileError> {
    passes.function(Pass::Rewrite, module, |module| optimiser.rewrite(module, f, context))
}

fn narrowed(
    module: &mut Module,
    task: &Task,
    f: Function,
    (options, stored): With,
    passes: &Passes,
) -> Result<Function, CompileError> {
    let stored = |port: &Port| stored(task.site.body, port);
    let outside = task.site.body.is_none() || options.cache.is_some();
    let narrow = if outside { options.narrow.outside() } else { options.narrow };
    let mut f = passes.function(Pass::Narrow, module, |m| {
        precision::narrow(m, &f, narrow, &stored, &|port| task.routers.contains(&port.name))
    })?;
    passes.watch(Pass::Narrow, module, &mut f);
    Ok(f)
}

/// Rewrites, differentiates and narrows a function.
fn grow(
    module: &mut Module,
    task: &Task,
    seeds: &[(&str, Seed)],
    with: With,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<Grown, CompileError> {
    let evaluate = inference(module, task, &without_training(&task.function), with, optimiser, passes)?;
    let joint = match with.0.train {
        true => Some(joint(module, task, &task.function, seeds, with, optimiser, passes)?),
        false => None,
    };
    Ok(Grown { evaluate, joint })
}

fn inference(
    module: &mut Module,
    task: &Task,
    f: &Function,
    with: With,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<Function, CompileError> {
    let context = task.site.context(Stage::Inference, with, &f.params);
    let mut f = rewritten(module, f, &context, optimiser, passes)?;
    passes.watch(Pass::Rewrite, module, &mut f);
    narrowed(module, task, f, with, passes)
}

/// `f` and its derivative in one function.
fn joint(
    module: &mut Module,
    task: &Task,
    f: &Function,
    seeds: &[(&str, Seed)],
    with: With,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<Joint, CompileError> {
    let context = task.site.context(Stage::Differentiable, with, &f.params);
    let forward = rewritten(module, f, &context, optimiser, passes)?;
    let mut whole = passes.function(Pass::Differentiate, module, |module| {
        differentiate(module, &forward, seeds, &|p| task.wants(p))
    })?;
    passes.watch(Pass::Differentiate, module, &mut whole);
    if !optimiser.is_off() {
        rewrite::forget_stops(&mut whole);
        let context = task.site.context(Stage::Final, with, &whole.params);
        whole = rewritten(module, &whole, &context, optimiser, passes)?;
    }
    passes.watch(Pass::Rewrite, module, &mut whole);
    if optimiser.is_off() && with.0.narrow == Narrow::Nothing {
        return Ok(Joint { whole, forward });
    }
    Ok(Joint { whole: narrowed(module, task, whole, with, passes)?, forward })
}

/// Takes work on weights alone out of a function, and finds its forward part again.
fn hoist(
    module: &mut Module,
    task: &Task,
    options: &Options,
    grown: &mut Grown,
    (prepared, optimiser): (&mut Prepared, &mut Optimiser),
    passes: &Passes,
) -> Result<(), CompileError> {
    // Not for a single use; but ranks that share experts prepare only their own, and sum gradients
    // over experts after all calls.
    let prepares = !optimiser.is_off() && (task.site.uses > 1.0 || options.experts > 1);
    let (names, scope) = (&mut optimiser.names, &task.site.scope);
    if prepares {
        let f = &grown.evaluate;
        let f = passes.function(Pass::Hoist, module, |module| {
            Ok(prepared.hoist(names, module, scope, f, f.params.len()))
        })?;
        grown.evaluate = prune(&f, &|_| true);
    }
    let Some(joint) = &mut grown.joint else { return Ok(()) };
    if prepares {
        let (sunk, at) = (prepared.sink(&joint.whole), joint.forward.params.len());
        joint.whole = passes
            .function(Pass::Hoist, module, |module| Ok(prepared.hoist(names, module, scope, &sunk, at)))?;
    }
    if !optimiser.is_off() || options.narrow != Narrow::Nothing {
        (joint.whole, joint.forward) = rewrite::rejoin(&joint.whole, &joint.forward);
    }
    Ok(())
}

/// Cuts forward and backward apart, and schedules all forms.
fn cut(module: &Module, task: &Task, grown: Grown, passes: &Passes) -> Result<Forms, CompileError> {
    let evaluate = scheduled(passes, module, grown.evaluate)?;
    let Some(Joint { whole, forward }) = grown.joint else {
        return Ok(Forms { forward: evaluate.clone(), detached: None, backward: None, evaluate });
    };
    let (front, back) = passes.run(Pass::Partition, || partition(module, &whole, &forward));
    passes.verify(Pass::Partition, module, &front)?;
    passes.verify(Pass::Partition, module, &back)?;
    // A cotangent of state with no use inside leaves the state's cotangent as it is. That of a
    // saved stream is of another instance.
    let back = prune(&back, &|p| match p.binding {
        Binding::Cotangent(Of::State(Lifetime::Saved)) => true,
        Binding::Cotangent(Of::State(_)) => back.find_param(&p.name).is_some(),
        _ => true,
    });
    let backward = Some(scheduled(passes, module, back)?);
    let detached = match task.site.detached {
        true => Some(scheduled(passes, module, prune(&front, &|p| p.binding != Binding::Saved))?),
        false => None,
    };
    Ok(Forms { forward: scheduled(passes, module, front)?, detached, backward, evaluate })
}

/// The head goes forward and back in one function: nothing needs to be kept.
fn head_forms(
    module: &mut Module,
    task: &Task,
    with: With,
    prepared: &mut Prepared,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<Forms, CompileError> {
    let (options, _) = with;
    let (generating, logits) = (options.cache.is_some(), options.logits);
    let keep = |p: &Port| match p.binding {
        Binding::Output(Output::Nll) => !generating,
        Binding::Output(Output::Logits) => logits,
        Binding::Observed => true,
        _ => false,
    };
    let evaluate = inference(module, task, &prune(&task.function, &keep), with, optimiser, passes)?;
    let trained = if options.train {
        let f = prune(&task.function, &|p| p.binding != Binding::Output(Output::Logits) || logits);
        Some(joint(module, task, &f, &head_seeds(&f), with, optimiser, passes)?)
    } else {
        None
    };
    let mut grown = Grown { evaluate, joint: trained };
    hoist(module, task, options, &mut grown, (prepared, optimiser), passes)?;
    let evaluate = scheduled(passes, module, grown.evaluate)?;
    let forward = match grown.joint {
        Some(joint) => scheduled(passes, module, joint.whole)?,
        None => evaluate.clone(),
    };
    Ok(Forms { forward, detached: None, backward: None, evaluate })
}

/// How the results of a function are bound.
fn binds(f: &Function) -> Vec<Bind> {
    f.results
        .iter()
        .map(|(port, _)| match (f.state_of(port), port.binding) {
            (Some(p), _) => Bind::State(p.0),
            // Every call adds to gradients, to losses, and to cotangents of state that it was not
            // handed.
            (None, Binding::Output(Output::Loss | Output::Aux | Output::Taught))
            | (None, Binding::Cotangent(Of::Weight | Of::State(_))) => Bind::Add,
            (None, _) => Bind::Store,
        })
        .collect()
}

fn scheduled(passes: &Passes, module: &Module, f: Function) -> Result<(Function, Scheduled), CompileError> {
    let s = passes.run(Pass::Schedule, || schedule(module, &f, &binds(&f)))?;
    Ok((f, s))
}
