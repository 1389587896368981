//! The whole pipeline: which passes run, in order, and how their results become one plan.
//!
//! *In*: a checked [`Spec`]. *Out*: a [`Compiled`] model. [`compile`] is the place to start reading
//! the compiler; the passes are listed in [`PASSES`](crate::passes::PASSES): spec →
//! [`Architecture`] → [`lower`](crate::lower) → [`differentiate`](crate::autodiff) →
//! [`rewrite`](crate::rewrite) → [`narrow`](crate::precision) → partition →
//! [`schedule`](crate::schedule) → [`Plan`](crate::program::Plan), by
//! [`assemble`](crate::assemble).

use crate::CompileError;
use crate::architecture::Architecture;
use crate::assemble::Assembly;
use crate::compiled::{Compiled, Entry};
use crate::format::Formats;
use crate::forms::{Forms, ModelForms, StoredOf};
use crate::ir::Port;
use crate::lower::{self, Lowered, Shape, Weight, lower, lower_evaluation};
use crate::passes::{Pass, Passes, Timing, Watch};
use crate::precision::Narrow;
use crate::probe::{self, Probe};
use crate::program::{Plan, Program, Task};
use crate::rewrite::{Optimiser, Report, Rewriting};
use crate::teach;
use dreamc_dsl::spec::{Shard, Spec};
use rustc_hash::FxHashSet;

/// A use to compile a spec for.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Sequences in a (micro-)batch.
    pub batch: u64,
    /// Tokens in a sequence.
    pub sequence: u64,
    /// Whether there are gradients (`backward`) and an optimizer (`update`), or only `evaluate`.
    pub train: bool,
    /// Whether the logits are kept for the host.
    pub logits: bool,
    /// Whether attention stops at document boundaries.
    pub segments: bool,
    /// Whether `evaluate` leaves [`Compiled::observed`] for the host. [`CompileError::Exclude`]
    /// with `train` or `cache`.
    pub observe: bool,
    /// Values that `evaluate` leaves for the host or takes from it. [`CompileError::Exclude`] with
    /// `train` or `cache`.
    pub probe: Probe,
    /// Values that training pulls towards those of a teacher, by patterns of names.
    /// [`CompileError::Exclude`] without `train`, and with `depths`.
    pub taught: Vec<String>,
    /// Count of the outermost `recur` in place of the spec's.
    pub depth: Option<u64>,
    /// Further counts of the outermost `recur`, each with a program `backward@{count}`: for
    /// training at random depths.
    pub depths: Vec<u64>,
    /// Programs `prefill` (and `prefill_every`) and `decode` over sequence caches, and
    /// [`Task::Prepare`].
    pub cache: Option<Cache>,
    /// A token leaves its loop after the first pass at which `Σ q` exceeds this, with the `q` of
    /// its `exit gate`; it runs all passes where absent. [`CompileError::Exclude`] with `train`.
    pub exit: Option<f64>,
    /// Whether `evaluate` decides as training does: top-k looks at the whole sequence, whatever
    /// rule its router names, and the loss is that of training. [`CompileError::Exclude`] with
    /// `cache` or `exit`.
    pub as_trained: bool,
    /// Which rewriting rules are used, and for which device.
    pub rewrite: Rewriting,
    /// Values stored in bf16.
    pub narrow: Narrow,
    /// Whether a plan that trains takes steps: it then has an optimizer, and owns all that it
    /// moves. Otherwise there are gradients alone.
    pub steps: bool,
    /// Storage of weights that are not owned f32, but for those that a plan moves.
    pub formats: Formats,
    /// Ranks whose gradients and counts are summed before a step; of one, nothing is.
    pub ranks: u64,
    /// Whose plan it is: ranks look at the norm of a part of the gradients each.
    pub rank: u64,
    /// Tensors that a rank keeps of its part alone. It moves that part alone, where any are cut.
    pub shard: Shard,
    /// Successive ranks that own the experts of each mixture together, as many each; of one, every
    /// rank has all.
    pub experts: u64,
    /// Of how many bodies, those that keep most first, the forward is computed again on the way
    /// back, so that one application's values are kept and not all.
    pub again: usize,
}

/// One token, evaluated.
impl Default for Options {
    fn default() -> Self {
        Options {
            batch: 1,
            sequence: 1,
            train: false,
            logits: false,
            segments: false,
            observe: false,
            probe: Probe::default(),
            taught: vec![],
            depth: None,
            depths: vec![],
            cache: None,
            exit: None,
            as_trained: false,
            rewrite: Rewriting::default(),
            narrow: Narrow::Nothing,
            steps: true,
            formats: Formats::default(),
            ranks: 1,
            rank: 0,
            shard: Shard::None,
            experts: 1,
            again: 0,
        }
    }
}

impl Options {
    /// Refuses options if one of them would be ignored.
    fn consistent(&self) -> Result<(), CompileError> {
        let (cached, leaves) = (self.cache.is_some(), self.exit.is_some());
        let pairs = [
            (self.train && cached, ("train", "cache")),
            (self.train && leaves, ("train", "exit")),
            (self.observe && self.train, ("observe", "train")),
            (self.observe && cached, ("observe", "cache")),
            (!self.probe.is_empty() && self.train, ("probe", "train")),
            (!self.probe.is_empty() && cached, ("probe", "cache")),
            (
                self.taught.iter().any(|name| name != teach::LOGITS) && !self.depths.is_empty(),
                ("a teacher of values inside the model", "random depths"),
            ),
            (self.as_trained && cached, ("as_trained", "cache")),
            (self.as_trained && leaves, ("as_trained", "exit")),
        ];
        let broken = pairs.into_iter().find(|(both, _)| *both);
        broken.map_or(Ok(()), |(_, (one, other))| Err(CompileError::Exclude(one, other)))?;
        let training = [
            (!self.depths.is_empty(), "depths"),
            (self.again > 0, "again"),
            (self.shard.states(), "shard"),
            (self.experts > 1, "experts over ranks"),
            (!self.steps, "steps: false"),
            (!self.taught.is_empty(), "a teacher"),
        ];
        match training.into_iter().find(|(asked, _)| *asked && !self.train) {
            Some((_, what)) => Err(CompileError::Exclude(what, "train: false")),
            None if self.experts == 0 || !self.ranks.is_multiple_of(self.experts) => {
                Err(CompileError::Unsupported("teams that the ranks do not fill"))
            }
            None => Ok(()),
        }
    }
}

/// Tokens that one preparation of weights serves, at the least: a short answer.
pub(crate) const ANSWER: f64 = 64.0;

/// Sequence caches for generation. A call of `prefill` takes `chunk` tokens of every sequence, one
/// of `decode` one token: ids, their positions, and the places (`slots`) their keys and values go
/// to. The head is most of a small model's work, so `prefill` computes it for the token of each
/// sequence that is `asked` for; `prefill_every` computes it for all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cache {
    /// Tokens each sequence has room for.
    pub places: u64,
    /// Tokens of a `prefill`.
    pub chunk: u64,
    /// Tokens that the cache of a wrapped part has room for, over those its capacity says, and a
    /// chunk more; never more than `places`. Infinite where room must not run out.
    pub slack: f64,
    /// Whether there is a program `prefill_every`, for those that ask for the logits after every
    /// token of a text.
    pub every: bool,
}

/// Compiles a spec.
pub fn compile(spec: &Spec, options: &Options) -> Result<Compiled, CompileError> {
    Ok(compile_with_report(spec, options)?.0)
}

/// Compiles a spec, and says what rewriting did.
pub fn compile_with_report(spec: &Spec, options: &Options) -> Result<(Compiled, Report), CompileError> {
    compiled(spec, options, &Passes::new(None))
}

/// Compiles a spec with its passes watched.
pub fn compile_watched(
    spec: &Spec,
    options: &Options,
    watch: Watch,
) -> Result<(Compiled, Report), CompileError> {
    compiled(spec, options, &Passes::new(Some(watch)))
}

fn compiled(spec: &Spec, options: &Options, passes: &Passes) -> Result<(Compiled, Report), CompileError> {
    let (all, report) = run(spec, &[("", options.clone())], passes)?;
    Ok((only(all)?, report))
}

/// [`compile_together`] with at most `most` bytes in all, `beside` of them outside the arena: as
/// few bodies as that takes, those that keep most first, recompute their values in the backward.
pub fn compile_within(
    spec: &Spec,
    uses: &[(&'static str, Options)],
    most: u64,
    beside: impl Fn(&Plan) -> u64,
) -> Result<(Vec<Compiled>, Report), CompileError> {
    let mut uses = uses.to_vec();
    loop {
        let (all, report) = compile_together(spec, &uses)?;
        let bytes = all.first().map_or(0, |first| first.plan.arena.saturating_add(beside(&first.plan)));
        let more = all.first().is_some_and(|first| first.kept.iter().any(|kept| !kept.again));
        match uses.first_mut() {
            _ if bytes <= most => return Ok((all, report)),
            Some((_, first)) if more => first.again += 1,
            _ => return Err(CompileError::Memory { most, least: bytes }),
        }
    }
}

/// Compiles a spec for several uses of one set of weights: one plan, in which every use has its own
/// programs and buffers that they exchange with the host. Names of programs and buffers begin with
/// the name of the use, which is empty for the first. Only the first may train; recurrent depth and
/// rewriting are the same for all.
pub fn compile_together(
    spec: &Spec,
    uses: &[(&'static str, Options)],
) -> Result<(Vec<Compiled>, Report), CompileError> {
    run(spec, uses, &Passes::new(None))
}

fn only(all: Vec<Compiled>) -> Result<Compiled, CompileError> {
    all.into_iter().next().ok_or(CompileError::Unsupported("a model for no use"))
}

/// Compiles a spec, and says what each pass took.
pub fn compile_timed(spec: &Spec, options: &Options) -> Result<(Compiled, Vec<Timing>), CompileError> {
    let passes = Passes::new(None);
    let (all, _) = run(spec, &[("", options.clone())], &passes)?;
    Ok((only(all)?, passes.timings()))
}

/// Verifies the functions of a lowered model, and shows them to whoever watches.
pub(crate) fn lowered(
    passes: &Passes,
    make: impl FnOnce() -> Result<Lowered, CompileError>,
) -> Result<Lowered, CompileError> {
    let mut lowered = passes.run(Pass::Lower, make)?;
    let names: Vec<String> = lowered.module.functions.keys().cloned().collect();
    for name in names {
        let mut f = lowered.module.functions[&name].clone();
        passes.verify(Pass::Lower, &lowered.module, &f)?;
        passes.watch(Pass::Lower, &mut lowered.module, &mut f);
        lowered.module.functions[&name] = f;
    }
    Ok(lowered)
}

/// All uses of a model, on one plan.
fn run(
    spec: &Spec,
    uses: &[(&'static str, Options)],
    passes: &Passes,
) -> Result<(Vec<Compiled>, Report), CompileError> {
    let Some((_, first)) = uses.first() else { return Err(CompileError::Unsupported("a model for no use")) };
    let alike = |o: &Options| o.depth == first.depth && o.rewrite == first.rewrite && !o.train;
    if !uses.iter().skip(1).all(|(_, options)| alike(options)) {
        return Err(CompileError::Unsupported("a model of several depths, rewritings or trainings"));
    }
    uses.iter().try_for_each(|(_, options)| options.consistent())?;
    let resolve = |depth| passes.run(Pass::Resolve, || Architecture::new(&spec.model, depth));
    let architecture = resolve(first.depth)?;
    uses.iter().filter_map(|(_, options)| options.exit).try_for_each(|share| architecture.leavable(share))?;
    // Deepest first: what others keep then fits into the same buffers.
    let mut others = first.depths.clone();
    others.sort_by_key(|&d| std::cmp::Reverse(d));
    others.dedup();
    let others = others.into_iter().map(|d| Ok((d, resolve(Some(d))?)));
    let others = others.collect::<Result<Vec<_>, CompileError>>()?;
    let mut optimiser = Optimiser::new(&first.rewrite, first.experts > 1)?;
    let whole = lowered(passes, || lower(&architecture, trained(first, spec)))?;
    let mut assembly = Assembly::new(spec, first, &architecture, &whole)?;
    let (mut whole, mut report) = (Some(whole), Report::default());
    for (scope, (name, options)) in uses.iter().enumerate() {
        assembly.begin(scope, name, options);
        if options.cache.is_some() {
            cached(options, &architecture, &mut assembly, &mut optimiser, passes)?;
        } else {
            let lowered = match whole.take() {
                Some(whole) if scope == 0 => whole,
                _ => lowered(passes, || lower(&architecture, shape(options, options.sequence, None)))?,
            };
            assembly.know(&lowered);
            let others = (spec, &others[..]);
            rows(options, &architecture, others, lowered, &mut assembly, &mut optimiser, passes)?;
        }
        assembly.end_use()?;
        if scope == 0 {
            report = optimiser.report.clone();
        }
    }
    Ok((assembly.finish()?, report))
}

/// The shape of training, whose loss has all its terms.
fn trained(options: &Options, spec: &Spec) -> Shape {
    let (z_loss, dpo) = if options.train { (spec.train.z_loss, spec.train.dpo) } else { (0.0, None) };
    Shape { z_loss, dpo, ..shape(options, options.sequence, None) }
}

fn shape(options: &Options, sequence: u64, cache: Option<lower::Places>) -> Shape {
    let Options { batch, segments, exit, .. } = *options;
    let scores = options.probe.scores() || probe::makes_scores(options.taught.iter());
    let observe = options.observe;
    Shape { batch, sequence, segments, cache, observe, scores, exit, ..Shape::default() }
}

/// The programs over caches.
fn cached(
    options: &Options,
    architecture: &Architecture,
    assembly: &mut Assembly,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<(), CompileError> {
    let Some(cache) = options.cache else { return Ok(()) };
    let (tokens, slack, more) = (cache.places, cache.slack, cache.chunk);
    let mut preparing = Program { variables: architecture.variables + 1, ..Program::default() };
    let mut made = FxHashSet::default();
    let all = cache.every.then_some((Entry::Every, cache.chunk, true));
    let entries = [Some((Entry::Prefill, cache.chunk, false)), all, Some((Entry::Decode, 1, true))];
    for (entry, sequence, every) in entries.into_iter().flatten() {
        let room = lower::Places { tokens, slack, more, every };
        let mut part = lowered(passes, || lower(architecture, shape(options, sequence, Some(room))))?;
        let inference = Options { train: false, logits: true, ..options.clone() };
        let forms = {
            let stored = |body: Option<usize>, port: &Port| assembly.stored(body, port);
            let with = (&inference, &stored as StoredOf);
            ModelForms::new(architecture, &mut part, &|_, _| false, with, optimiser, passes)?
        };
        let program = passes.run(Pass::Assemble, || {
            let used = |f: &Forms| vec![f.evaluate.0.clone()];
            preparing.steps.extend(assembly.prepare(&part.module, &forms, &used, &mut made)?);
            assembly.now.entry = entry;
            assembly.know(&part);
            assembly.evaluate(&part.module, &forms, vec![])
        })?;
        assembly.add(entry.task(), program);
    }
    if !preparing.steps.is_empty() {
        assembly.add(Task::Prepare, preparing);
    }
    Ok(())
}

/// The programs over whole rows.
fn rows<'a>(
    options: &Options,
    architecture: &'a Architecture,
    (spec, others): (&Spec, &'a [(u64, Architecture)]),
    mut whole: Lowered,
    assembly: &mut Assembly<'a>,
    optimiser: &mut Optimiser,
    passes: &Passes,
) -> Result<(), CompileError> {
    let learned: FxHashSet<(Option<usize>, String)> = match options.train {
        true => assembly.set.trained.iter().cloned().collect(),
        false => FxHashSet::default(),
    };
    // Of a body that reads weights of others, by the names of checkpoints.
    let named: FxHashSet<String> = match options.train {
        true => {
            assembly.set.tensors.iter().filter(|t| t.gradient.is_some()).map(|t| t.name.clone()).collect()
        }
        false => FxHashSet::default(),
    };
    let has_gradient = |w: &Weight, body: Option<usize>| {
        learned.contains(&(body, w.name.clone())) || body.is_none() && named.contains(&w.name)
    };
    // Routers that look ahead in training decide without in evaluation, whose loss is that of the
    // stream that leaves; unless the rule of training was asked for.
    let anew = architecture.evaluates_anew() && !options.as_trained;
    if !anew {
        assembly.now.inserted = probe::insert(architecture, &mut whole, &options.probe)?;
    }
    assembly.now.lessons = teach::insert(architecture, &mut whole, &options.taught)?;
    let forms = {
        let stored = |body: Option<usize>, port: &Port| assembly.stored(body, port);
        let with = (options, &stored as StoredOf);
        ModelForms::new(architecture, &mut whole, &has_gradient, with, optimiser, passes)?
    };
    if options.train {
        assembly.keep(&whole.module, &forms, options.again);
        let mut programs = others.iter().map(|(d, a)| (a, Some(*d))).collect::<Vec<_>>();
        programs.push((architecture, None));
        programs.sort_by_key(|(a, _)| std::cmp::Reverse(a.depth));
        for (deep, depth) in programs {
            assembly.architecture = deep;
            let program = if deep.depth == architecture.depth {
                passes.run(Pass::Assemble, || assembly.backward(&whole.module, &forms))?
            } else {
                let mut other = lowered(passes, || lower(deep, trained(options, spec)))?;
                // The host gives logits once, whatever the depth: their ports are the same.
                teach::insert(deep, &mut other, &options.taught)?;
                let forms = {
                    let stored = |body: Option<usize>, port: &Port| assembly.stored(body, port);
                    let with = (options, &stored as StoredOf);
                    ModelForms::new(deep, &mut other, &has_gradient, with, optimiser, passes)?
                };
                passes.run(Pass::Assemble, || assembly.backward(&other.module, &forms))?
            };
            // Of weights that are cut, gradients are summed as soon as they are whole.
            if options.ranks > 1 && !assembly.is_spread() {
                let sending = passes.run(Pass::Assemble, || assembly.sending(&program));
                assembly.add(Task::Backward { depth, last: true }, sending);
            }
            assembly.add(Task::Backward { depth, last: false }, program);
        }
        assembly.architecture = architecture;
        if options.steps {
            let program = passes.run(Pass::Assemble, || assembly.norm())?;
            assembly.add(Task::Norm, program);
            let program = passes.run(Pass::Assemble, || assembly.update())?;
            assembly.add(Task::Update, program);
        }
    }
    let deciding = if anew {
        let make = || lower_evaluation(architecture, shape(options, options.sequence, None));
        let mut deciding = lowered(passes, make)?;
        assembly.know(&deciding);
        assembly.now.inserted = probe::insert(architecture, &mut deciding, &options.probe)?;
        let inference = Options { train: false, ..options.clone() };
        let none = |_: &Weight, _: Option<usize>| false;
        let stored = |body: Option<usize>, port: &Port| assembly.stored(body, port);
        let with = (&inference, &stored as StoredOf);
        let forms = ModelForms::new(architecture, &mut deciding, &none, with, optimiser, passes)?;
        Some((deciding, forms))
    } else {
        None
    };
    let (whole, forms) = deciding.as_ref().map_or((&whole, &forms), |(l, f)| (l, f));
    let program = passes.run(Pass::Assemble, || {
        let used = |f: &Forms| vec![f.evaluate.0.clone()];
        let steps = assembly.prepare(&whole.module, forms, &used, &mut FxHashSet::default())?;
        assembly.evaluate(&whole.module, forms, steps)
    })?;
    assembly.add(Task::Evaluate, program);
    Ok(())
}
