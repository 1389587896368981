//! The spec resolved: distinct layer bodies, which weights each application uses, and its place in
//! depth.
//!
//! *In*: a checked [`Model`]. *Out*: an [`Architecture`], whose size follows the text of the spec
//! and not its depth: loops stay loops, and everything that changes from application to application
//! is [`Affine`] in the loop variables.

use crate::CompileError;
use crate::bind::{Owner, Part};
use crate::compiled::Init;
use crate::program::Affine;
use dreamc_dsl::define::graph::Function;
use dreamc_dsl::spec::{
    Component, Exit, Expr, Item, Looping, Model, PassKeys, Scorer, Skip, SkipKv, SkipLevel, SkipRule,
    Statement, Stream, depth_choice, has_passes, normalised,
};
use indexmap::IndexMap;
use std::collections::HashMap;

/// A resolved model.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// The model it comes from; components that its definitions apply come after its own.
    pub model: Model,
    /// The distinct layer bodies.
    pub bodies: Vec<Body>,
    /// Layers that are applied, in order.
    pub blocks: Vec<Block>,
    /// How many loop variables the blocks use.
    pub variables: u32,
    /// Total depth `L`: applications of layers.
    pub depth: u64,
    /// The number of streams: before each application of a layer or a statement, and after the
    /// last.
    pub places: u64,
    /// For each set of weights of layers, `layers.{i}`: its body and which of the body's sets it
    /// is.
    pub sets: Vec<(usize, u64)>,
    /// The same of statements, `body.{k}`.
    pub statements: Vec<(usize, u64)>,
    /// The same of what passes begin with, with the number of the loop: `loops.{l}`.
    pub loops: Vec<(u64, (usize, u64))>,
    /// For each set of weights of layers: units before its first application, and from there to
    /// its second.
    pub units: Vec<[u64; 2]>,
    /// The depth of the first application of each set of weights of layers.
    pub begins: Vec<u64>,
    /// Names of saved streams, in order of the body.
    pub saved: Vec<String>,
    /// The loop whose loss sees every pass.
    pub exit: Option<Leaving>,
    /// How many applications contain each part that has a cache, or save it, in the order of
    /// [`Architecture::caches`]; of sources, outputs.
    pub rows: Vec<u64>,
    caches: Caches,
    applied: Applied,
    /// Wrapped parts whose capacity penalty is of their common mean.
    pub pools: Vec<Pool>,
    /// Whether a final norm follows: the last application leaves the stream unnormalised, or what
    /// the head reads is made of several.
    pub final_norm: bool,
    /// Number of attention dimensions `n` of the initialisation: 3 with depth attention, else 2.
    pub attention_dimensions: u64,
}

/// The computation of a body.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A layer's composition.
    Layer(Expr),
    /// A statement on the stream.
    Statement(Statement),
    /// The vector that a pass of a loop adds to the stream where it begins.
    Embed,
    /// The place before a loop whose passes share out the loss: all of it is still there.
    Enter,
    /// The loss of a pass that is not the last.
    Exit(Leaving),
    /// The place before a loop where every token chooses how many of its passes it makes.
    Choose(Choosing),
    /// The place after such a loop, where the passes' result for a token is weighed.
    Chosen,
    /// Keeps the stream after this many layer applications for later statements.
    Remember(u64),
    /// The statement that mixes those streams, and the one that it reads: `body.{k}`.
    History(Vec<u64>),
}

impl Work {
    /// The composition of a layer; statements and the ends of passes have none.
    fn composition(&self) -> Option<&Expr> {
        match self {
            Work::Layer(expr) => Some(expr),
            Work::Statement(_)
            | Work::Embed
            | Work::Enter
            | Work::Exit(_)
            | Work::Choose(_)
            | Work::Chosen
            | Work::Remember(_)
            | Work::History(_) => None,
        }
    }
}

/// A loop whose loss sees every pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaving {
    /// Its number among all `recur`s.
    pub number: u64,
    /// Its passes, the last included.
    pub passes: u64,
    /// How.
    pub how: Exit,
    /// Whether a `norm` stands between the loop and the end: `body.{k}`.
    pub norm: Option<u64>,
}

/// A loop in which every token chooses how many passes it makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choosing {
    /// Its number among all `recur`s.
    pub number: u64,
    /// The numbers of passes there are to choose among.
    pub passes: u64,
    /// Step size of the bias that balances choices.
    pub balance: f64,
    /// How its router scores.
    pub scorer: Scorer,
}

/// A loop whose passes each have weights of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// Its number among all `recur`s.
    pub number: u64,
    /// Passes that have weights.
    pub count: u64,
    /// Rank of the matrix that each adds to every matrix of a component.
    pub lora: Option<u64>,
}

/// Keys and values of the sequence attentions of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Every application has its own.
    Own,
    /// It makes those of all passes: the first of a loop with `kv first`.
    Makes,
    /// It reads those of the first pass.
    Reads,
    /// It has its own, and leaves them to later passes: the first of a loop with `kv replaced`.
    Leaves,
    /// It has its own, and those of the first pass for tokens that skip it.
    Replaces,
}

/// A distinct body of a layer or a statement.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Its name in the IR: `layer0`, …, `statement0`, … or `pass0`, ….
    pub name: String,
    /// The composition that it computes, or the statement.
    pub work: Work,
    /// The body whose weights it reads: itself, or the one of a loop's first passes where passes
    /// differ.
    pub leader: usize,
    /// Whether its passes share keys and values of sequence attention.
    pub keys: Keys,
    /// Of a body that replaces keys of the first pass: rows that a pass writes of each cache.
    pub each_pass: Vec<u64>,
    /// Applications of each set of weights, where the layer is inside a `recur`: the size of
    /// projection mixtures.
    pub recurrent: Option<u64>,
    /// The outermost loop around it, where passes of that have weights of their own.
    pub passes: Option<Passes>,
    /// Whether tokens may leave the outermost loop around it.
    pub leaves: bool,
    /// In passes whose nested `skip`s choose among the tokens of the pass before: how many such
    /// choices a pass makes, all layers together.
    pub among: Option<u64>,
    /// Which pass it is of a loop whose tokens chose how many they make, and of how many.
    pub chosen: Option<[u64; 2]>,
    /// Whether the stream is normalised after each application.
    pub residual_norm: bool,
    /// The components of its composition, in order, each with those that it applies.
    pub components: Vec<String>,
    /// How many sets of weights it has.
    pub sets: u64,
    /// How often it is applied in all.
    pub applications: u64,
    /// How often with a gradient.
    pub kept: u64,
}

/// Threshold routers with one target: `penalty · ReLU(mean(mask) - capacity)`, the mean over all
/// their applications.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Target share `c*`.
    pub capacity: f64,
    /// Weight λ.
    pub penalty: f64,
    /// Applications of wrapped parts that belong to it.
    pub parts: u64,
}

/// Applications in order.
// A body has few blocks, and nearly all of them are applications.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// One application.
    Apply(Apply),
    /// Blocks repeated.
    Loop {
        /// The loop variable.
        variable: u32,
        /// How often.
        count: u64,
        /// Layers that are repeated.
        blocks: Vec<Block>,
        /// Whether no gradient flows through its passes: the first ones of a `recur` with
        /// `backprop`. Each pass has the streams of the one before it, and leaves its last in the
        /// place of the first.
        detached: bool,
    },
}

/// One application of a layer; everything in it may depend on the loops around it.
#[derive(Clone, Debug, PartialEq)]
pub struct Apply {
    /// Which body.
    pub body: usize,
    /// Which set of the body's weights.
    pub set: Affine,
    /// Which application of the body it is.
    pub application: Affine,
    /// Which of those through which gradients flow; 0 where none does.
    pub kept: Affine,
    /// Whether no gradient flows through it.
    pub detached: bool,
    /// Which pass of the outermost loop it is in.
    pub pass: Affine,
    /// Applications of its set of weights before it.
    pub turn: Affine,
    /// How many there are of it in one pass of the loops around it so far.
    pub turns: u64,
    /// Which stream it reads; it writes the next one.
    pub place: Affine,
    /// Depth `l` in the whole model: applications of layers before it.
    pub depth: Affine,
    /// For each component of the model, then for each pool, then for each saved stream, how many
    /// applications before this one contain it, or save it; last, where the stream is one of
    /// sources, outputs before it.
    pub rows: Vec<Affine>,
}

/// Parts with a cache row for each application, in the order of their rows: components, then pools,
/// then saved streams, then the exit, then choices of nested `skip`s, then those of numbers of
/// passes, then the depth stream, then sources. Rows are found by it alone.
#[derive(Clone, Debug, PartialEq)]
struct Caches {
    order: Vec<Owner>,
    rows: HashMap<Owner, usize>,
}

impl Caches {
    /// Those of a model that pools `pools` means and saves `saved` streams.
    fn of(model: &Model, pools: usize, saved: usize) -> Self {
        let gated = model.body.iter().any(is_gated).then_some(Owner::Exit);
        let nested = layers_of(&model.body).into_iter().any(|expr| nested(expr).next().is_some());
        let chosen = model.body.iter().any(is_chosen).then_some(Owner::Choice);
        let depths = model.depth_reader().map(|_| Owner::Depths);
        let sources = matches!(model.stream, Stream::Attend { .. }).then_some(Owner::Sources);
        let mut order: Vec<Owner> = (0..model.components.len() as u32).map(Owner::Component).collect();
        order.extend((0..pools as u32).map(Owner::Pool));
        order.extend((0..saved as u32).map(Owner::Saved));
        let nested = nested.then_some(Owner::Members);
        order.extend([gated, nested, chosen, depths, sources].into_iter().flatten());
        let rows = order.iter().enumerate().map(|(row, owner)| (*owner, row)).collect();
        Caches { order, rows }
    }

    /// The row of a part; none where it has no cache.
    fn row(&self, owner: Owner) -> Option<usize> {
        self.rows.get(&owner).copied()
    }
}

/// Components that definitions apply. Each is a component of the model after its own. Its name is
/// that of the component that applies it, a dot, and the value that it gives; no component of a
/// text has a dot.
#[derive(Clone, Debug, Default, PartialEq)]
struct Applied {
    /// The component, by the number of the one that applies it and the name of the value.
    numbers: HashMap<(u32, String), u32>,
    /// The component of the text that each component stands in, itself if it is one.
    outermost: Vec<u32>,
}

impl Applied {
    /// Those of a model, which are added to it.
    fn of(model: &mut Model) -> Result<Self, CompileError> {
        let text = model.clone();
        let mut found =
            Applied { outermost: (0..model.components.len() as u32).collect(), ..Self::default() };
        let mut number = 0;
        while let Some((name, component)) = model.components.get_index(number) {
            let (name, component) = (name.clone(), component.clone());
            if let Component::Defined(defined) = &component {
                let graph = defined.graph(&text).map_err(|_| UNFIT)?;
                for node in graph.region.nodes {
                    let Function::Apply(applied) = node.function else { continue };
                    let own = (number as u32, applied.path.clone());
                    found.numbers.insert(own, model.components.len() as u32);
                    found.outermost.push(found.outermost[number]);
                    model.components.insert(format!("{name}.{}", applied.path), applied.component);
                }
            }
            number += 1;
        }
        Ok(found)
    }

    /// The components of a composition, in order, each with those that it applies.
    fn within<'m>(&self, model: &'m Model, expr: &Expr) -> Vec<&'m str> {
        let numbers = names(expr).into_iter().filter_map(|name| model.components.get_index_of(name));
        let with = numbers.flat_map(|number| {
            let own = self.outermost.iter().enumerate().filter(move |(_, of)| **of == number as u32);
            own.filter_map(|(i, _)| model.components.get_index(i).map(|(name, _)| name.as_str()))
        });
        with.collect()
    }
}

/// A definition that the checker refuses.
pub(crate) const UNFIT: CompileError =
    CompileError::Unsupported("a definition whose sizes do not fit: `dreamc check` says where");

/// The components of a model and those that its definitions apply, by name.
pub fn components(model: &Model) -> IndexMap<String, Component> {
    let mut all = model.clone();
    // Of one that does not fit nothing is compiled.
    let _ = Applied::of(&mut all);
    all.components
}

/// Running numbers of the walk over the body.
#[derive(Clone)]
struct Counters {
    depth: u64,
    places: u64,
    sets: Vec<u64>,
    applications: Vec<u64>,
    kept: Vec<u64>,
    rows: Vec<u64>,
    /// `recur`s so far.
    loops: u64,
    /// The first pass of the outermost loop that is being walked.
    pass: u64,
    /// Whether the walk is in passes through which no gradient flows.
    detached: bool,
    /// How passes that are being walked share keys of sequence attention.
    keys: Keys,
    /// Rows that a pass of the loop that is being walked writes of each cache, after its first.
    each_pass: Vec<u64>,
}

/// The `recur`s that an item is in.
#[derive(Clone, Copy, Debug)]
struct Around {
    /// How often each set of weights is applied.
    times: u64,
    /// Whether the innermost normalises the stream.
    norm: bool,
    /// Whether tokens may leave the outermost.
    leaves: bool,
    /// The outermost, where its passes have weights of their own.
    passes: Option<Passes>,
}

/// A loop that is being walked.
#[derive(Clone, Copy)]
struct Loop<'i> {
    /// Passes of a `recur` before these.
    first: u64,
    count: u64,
    items: &'i [Item],
    around: Option<Around>,
    iterations: Iterations,
    /// The settings of an outermost `recur`.
    looping: Option<&'i Looping>,
    /// The exit at the end of each pass.
    exit: Option<Leaving>,
}

/// How a loop gives weights and streams to its iterations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Iterations {
    /// Weights and streams of their own.
    Repeat,
    /// Streams of their own.
    Recur,
    /// Nothing of their own.
    Detached,
}

struct Walk<'a> {
    model: &'a Model,
    bodies: Vec<Body>,
    known: HashMap<String, usize>,
    /// The first body of each work, whose weights others of it read.
    leaders: HashMap<String, usize>,
    variables: u32,
    now: Counters,
    /// Factor between an override of the recurrent depth and the spec's count.
    depth_override: Option<u64>,
    pools: &'a [Pool],
    saved: &'a [String],
    caches: &'a Caches,
    applied: &'a Applied,
    /// Depths of streams that later statements read, and the depth of the last such statement.
    remembered: &'a [u64],
    remembers: u64,
}

impl Architecture {
    /// Resolves a model. `recurrence` replaces the count of the outermost `recur` (the projection
    /// mixtures keep the size they were trained with).
    pub fn new(model: &Model, recurrence: Option<u64>) -> Result<Self, CompileError> {
        if recurrence.is_some() && model.body.iter().filter(|i| matches!(i, Item::Recur { .. })).count() != 1
        {
            return Err(CompileError::Depth);
        }
        let mut all = model.clone();
        let applied = Applied::of(&mut all)?;
        let model = &all;
        let mut pools: Vec<Pool> = vec![];
        for (capacity, penalty) in pooled_items(&model.body) {
            if !pools.iter().any(|p| (p.capacity, p.penalty) == (capacity, penalty)) {
                pools.push(Pool { capacity, penalty, parts: 0 });
            }
        }
        let (mut saved, mut remembered, mut depth) = (saved(&model.body), vec![], 0);
        let remembers = remember(&model.body, &mut depth, &mut remembered);
        saved.extend(remembered.iter().map(|depth| remembered_as(*depth)));
        let caches = Caches::of(model, pools.len(), saved.len());
        let mut walk = Walk {
            model,
            bodies: vec![],
            known: HashMap::new(),
            leaders: HashMap::new(),
            variables: 0,
            now: Counters {
                depth: 0,
                places: 0,
                sets: vec![],
                applications: vec![],
                kept: vec![],
                rows: vec![0; caches.order.len()],
                loops: 0,
                pass: 0,
                detached: false,
                keys: Keys::Own,
                each_pass: vec![],
            },
            pools: &pools,
            saved: &saved,
            caches: &caches,
            applied: &applied,
            remembered: &remembered,
            remembers,
            depth_override: recurrence,
        };
        let first = walk.remember();
        let blocks: Vec<Block> = first.into_iter().chain(walk.items(&model.body, None, true)?).collect();
        for (i, body) in walk.bodies.iter_mut().enumerate() {
            (body.sets, body.applications) = (walk.now.sets[body.leader], walk.now.applications[i]);
            body.kept = walk.now.kept[i];
            if matches!(body.work, Work::Exit(_)) {
                // Of a loop that is run once nothing leaves before its end.
                body.sets = 1;
            }
        }
        let final_norm = model.stream != Stream::Sum || !normalised(&model.body, false);
        let (mut sets, mut statements, mut loops) = (vec![], vec![], vec![]);
        let mut seen = std::collections::HashSet::new();
        // Units before the first application of a set, and before its second.
        let mut places: HashMap<(usize, u64), [u64; 2]> = HashMap::new();
        let (mut passed, mut layers) = (0, 0);
        let mut begins = vec![];
        for_each_application(&blocks, walk.variables, &mut |apply, variables| {
            let key = (walk.bodies[apply.body].leader, apply.set.at(variables));
            let own = places.entry(key).or_insert([passed, 0]);
            if own[1] == 0 && own[0] < passed {
                own[1] = passed;
            }
            passed += walk.bodies[apply.body].units().count() as u64;
            if seen.insert(key) {
                match walk.bodies[apply.body].work {
                    Work::Layer(_) => {
                        sets.push(key);
                        begins.push(layers);
                    }
                    Work::Statement(_) => statements.push(key),
                    Work::Embed => loops.push((walk.bodies[apply.body].passes.map_or(0, |p| p.number), key)),
                    Work::Exit(leaving) => loops.push((leaving.number, key)),
                    Work::Choose(choosing) => loops.push((choosing.number, key)),
                    Work::History(_) => statements.push(key),
                    Work::Enter | Work::Chosen | Work::Remember(_) => {}
                }
            }
            layers += u64::from(matches!(walk.bodies[apply.body].work, Work::Layer(_)));
        });
        let units = sets.iter().map(|set| {
            let [first, second] = places.get(set).copied().unwrap_or_default();
            [first, second.saturating_sub(first)]
        });
        let units = units.collect();
        let mut exit = None;
        for (i, body) in walk.bodies.iter().enumerate() {
            let Work::Exit(leaving) = body.work else { continue };
            exit = Some(leaving);
            if seen.insert((i, 0)) {
                loops.push((leaving.number, (i, 0)));
            }
        }
        let uses_depth = walk
            .bodies
            .iter()
            .any(|b| b.components.iter().any(|c| model.components.get(c).is_some_and(attends_depth)));
        let Walk { now: Counters { depth, places, rows, .. }, variables, bodies, .. } = walk;
        for pool in &mut pools {
            let of = |b: &Body| {
                let own = b.pooled().into_iter().filter(|p| *p == (pool.capacity, pool.penalty));
                (own.count() as u64).checked_mul(b.applications)
            };
            let parts = bodies.iter().try_fold(0u64, |sum, b| sum.checked_add(of(b)?));
            pool.parts = parts.ok_or(CompileError::Overflow("depth"))?;
        }
        Ok(Architecture {
            depth,
            rows,
            caches,
            applied,
            variables,
            bodies,
            pools,
            blocks,
            places: places + 1,
            sets,
            statements,
            loops,
            units,
            begins,
            saved,
            exit,
            final_norm,
            attention_dimensions: if uses_depth { 3 } else { 2 },
            model: all,
        })
    }

    /// Cache rows, as `{component}.row`, that are the same at every application of a body.
    pub fn constant_rows(&self, body: usize) -> Vec<(String, u64)> {
        fn applies<'a>(blocks: &'a [Block], body: usize, found: &mut Vec<&'a Apply>) {
            for block in blocks {
                match block {
                    Block::Apply(a) if a.body == body => found.push(a),
                    Block::Apply(_) => {}
                    Block::Loop { blocks, .. } => applies(blocks, body, found),
                }
            }
        }
        let mut found = vec![];
        applies(&self.blocks, body, &mut found);
        let Some(first) = found.first() else { return vec![] };
        let same =
            |i: usize| first.rows[i].terms.is_empty() && found.iter().all(|a| a.rows[i] == first.rows[i]);
        let caches = self.caches().enumerate().filter(|(i, _)| same(*i));
        caches.map(|(i, owner)| (format!("{}.row", self.label(owner)), first.rows[i].base)).collect()
    }

    /// Parts with a cache row for each application, in the order of [`Architecture::rows`].
    pub fn caches(&self) -> impl Iterator<Item = Owner> {
        self.caches.order.iter().copied()
    }

    /// Name of a part of the model: the first words of the names of its tensors.
    pub fn label(&self, owner: Owner) -> String {
        match owner {
            Owner::Embedding => "embed".into(),
            Owner::Head => "head".into(),
            Owner::Stream => "stream".into(),
            Owner::Component(i) => self.component(i).map_or(String::new(), |(name, _)| name.into()),
            Owner::Skip(j) => format!("skip.{j}"),
            Owner::Pool(i) => format!("skip.pooled{i}"),
            Owner::Saved(i) => self.saved.get(i as usize).map_or(String::new(), |s| format!("saved.{s}")),
            Owner::Norm(j) => format!("norm{j}"),
            Owner::Lanes(j) => format!("lanes{j}"),
            Owner::Output => "output".into(),
            Owner::Sources => "stream".into(),
            Owner::Loop => "loop".into(),
            Owner::Exit => "exit".into(),
            Owner::Members => "members".into(),
            Owner::Choice => "choice".into(),
            Owner::Depths => "layer.depths".into(),
        }
    }

    /// The name of a tensor or state inside its layer, or outside the layers its whole name.
    pub fn name_of(&self, owner: Owner, part: Part) -> String {
        match owner {
            Owner::Stream | Owner::Loop => part.path().into(),
            Owner::Pool(_) | Owner::Saved(_) => self.label(owner),
            Owner::Embedding
            | Owner::Head
            | Owner::Component(_)
            | Owner::Skip(_)
            | Owner::Norm(_)
            | Owner::Exit
            | Owner::Members
            | Owner::Choice
            | Owner::Depths
            | Owner::Lanes(_)
            | Owner::Output
            | Owner::Sources => format!("{}.{}", self.label(owner), part.path()),
        }
    }

    /// The component of that number.
    pub fn component(&self, number: u32) -> Option<(&str, &Component)> {
        self.model.components.get_index(number as usize).map(|(name, c)| (name.as_str(), c))
    }

    /// The component that a definition applies under this name.
    pub(crate) fn applied(&self, by: Owner, path: &str) -> Option<(Owner, &Component)> {
        let Owner::Component(by) = by else { return None };
        let number = *self.applied.numbers.get(&(by, path.to_string()))?;
        Some((Owner::Component(number), self.component(number)?.1))
    }

    /// The part of the text that a part stands in: itself, if no definition applies it.
    pub fn outermost(&self, owner: Owner) -> Owner {
        match owner {
            Owner::Component(i) => {
                Owner::Component(self.applied.outermost.get(i as usize).copied().unwrap_or(i))
            }
            owner => owner,
        }
    }

    /// The body whose weights a body reads.
    pub fn leader(&self, body: usize) -> usize {
        self.bodies[body].leader
    }

    /// Whether passes of some loop share the keys and values of a component.
    pub fn shares_keys(&self, component: Owner) -> bool {
        let component = self.label(component);
        self.bodies.iter().any(|b| b.keys == Keys::Makes && b.components.contains(&component))
    }

    /// Whether some tokens skip something.
    pub fn skips(&self) -> bool {
        self.bodies.iter().any(|b| !b.skips().is_empty())
    }

    /// Whether routers choose among experts, or among projections: attentions have those in loops
    /// alone.
    pub fn routes(&self) -> bool {
        let chooses = |body: &Body, name: &String| match self.model.components.get(name) {
            Some(Component::Experts(_)) => true,
            Some(component) => body.recurrent.is_some() && component.router().is_some(),
            None => false,
        };
        self.bodies.iter().any(|body| body.components.iter().any(|name| chooses(body, name)))
    }

    /// Whether evaluation decides by another rule than training: which tokens skip, which experts'
    /// numbers of tokens are rounded, which weights of attentions are dropped.
    pub fn decides_anew(&self) -> bool {
        let rounds = |c: &Component| matches!(c, Component::Experts(e) if e.round.is_some());
        self.skips() || self.drops() || self.model.components.values().any(rounds)
    }

    /// Whether evaluation is lowered apart from training: it decides by another rule, or its loss
    /// is that of the stream that leaves.
    pub(crate) fn evaluates_anew(&self) -> bool {
        self.decides_anew() || self.exit.is_some()
    }

    /// Whether an attention drops weights, which it does in training alone.
    fn drops(&self) -> bool {
        let drops = |function: &Function| matches!(function, Function::Attend(a) if a.dropout > 0.0);
        self.model.components.values().any(|component| {
            let Component::Defined(defined) = component else { return false };
            let Ok(graph) = defined.graph(&self.model) else { return false };
            graph.region.nodes.iter().any(|node| drops(&node.function))
        })
    }

    /// Whether the same weights give other losses in evaluation than in training: by another rule
    /// of a router, or because training takes the loss of every pass.
    pub fn measures_otherwise(&self) -> bool {
        let rounds = |c: &Component| matches!(c, Component::Experts(e) if e.round.is_some());
        let ruled = |(skip, _): (&Skip, &Expr)| match skip.rule {
            SkipRule::TopK { capacity, ref causal } => causal.is_some() && capacity < 1.0,
            SkipRule::Threshold { .. } | SkipRule::DepthChoice { .. } => false,
        };
        self.exit.is_some()
            || self.drops()
            || self.bodies.iter().flat_map(Body::skips).any(ruled)
            || self.model.components.values().any(rounds)
    }

    /// Whether tokens skip the component somewhere and leave no keys there.
    pub fn skipped(&self, component: Owner) -> bool {
        let component = self.label(component);
        let leaves_none = |(skip, inner): &(&Skip, &Expr)| {
            let all = matches!(skip.rule, SkipRule::Threshold { .. }) && skip.kv == SkipKv::All;
            !all && self.applied.within(&self.model, inner).contains(&component.as_str())
        };
        self.bodies.iter().any(|b| b.skips().iter().any(leaves_none))
    }

    /// Whether tokens can leave their loop where this share of them has left.
    pub fn leavable(&self, share: f64) -> Result<(), CompileError> {
        if !(0.0..1.0).contains(&share) {
            return Err(CompileError::Share(share));
        }
        if !self.model.body.iter().any(is_gated) {
            return Err(CompileError::NoGate);
        }
        if matches!(self.model.stream, Stream::Attend { .. }) {
            return Err(CompileError::LeavesSources);
        }
        match self.bodies.iter().any(|body| body.leaves && !body.skips().is_empty()) {
            true => Err(CompileError::LeavesSkip),
            false => Ok(()),
        }
    }

    /// How often a pass of the loop that tokens may leave applies a component.
    pub fn in_a_pass(&self, component: &str) -> u64 {
        let within = |expr: &Expr| self.applied.within(&self.model, expr);
        fn applied<'m>(items: &[Item], component: &str, within: &dyn Fn(&Expr) -> Vec<&'m str>) -> u64 {
            let each = items.iter().map(|item| match item {
                Item::Layer(expr) => within(expr).iter().filter(|name| **name == component).count() as u64,
                Item::Statement(_) => 0,
                Item::Repeat { count, items } | Item::Recur { count, items, .. } => {
                    count * applied(items, component, within)
                }
            });
            each.sum()
        }
        let inside = self.model.body.iter().find_map(|item| match item {
            Item::Recur { items, .. } if is_gated(item) => Some(items),
            _ => None,
        });
        inside.map_or(0, |items| applied(items, component, &within))
    }

    /// Which of [`Architecture::rows`] counts those of a component's or a pool's cache.
    pub fn cache_of(&self, owner: Owner) -> Option<usize> {
        self.caches.row(owner)
    }

    /// Row count of the cache of a component or a pool.
    pub fn rows_of(&self, owner: Owner) -> u64 {
        self.cache_of(owner).map_or(0, |i| self.rows[i])
    }

    /// The sets of weights in the order of checkpoints, each with the first words of the names of
    /// its tensors: layers, then statements, then loops.
    pub fn prefixes(&self) -> impl Iterator<Item = (String, (usize, u64))> {
        let layers = self.sets.iter().enumerate().map(|(i, set)| (format!("layers.{i}"), *set));
        let statements = self.statements.iter().enumerate().map(|(k, set)| (format!("body.{k}"), *set));
        let loops = self.loops.iter().map(|(l, set)| (format!("loops.{l}"), *set));
        layers.chain(statements).chain(loops)
    }

    /// How a tensor of this set of weights begins, of those that `prefixes` gives.
    pub fn init_of(&self, set: usize, init: Init) -> Init {
        match init {
            Init::Pick { place: unit, columns, .. } => {
                let [before, step] = self.units.get(set).copied().unwrap_or_default();
                Init::Pick { place: before + unit, step, columns }
            }
            Init::Ramp(first, last) => {
                let depth = self.begins.get(set).copied().unwrap_or_default() as f64;
                let all = self.depth.saturating_sub(1).max(1) as f64;
                Init::Constant(first + (last - first) * depth / all)
            }
            Init::Normal(_)
            | Init::Constant(_)
            | Init::Identity { .. }
            | Init::Uniform(..)
            | Init::LogUniform(..)
            | Init::InverseSoftplusUniform(..) => init,
        }
    }

    /// The pool that a wrapped part belongs to.
    pub fn pool_of(&self, skip: &Skip) -> Option<usize> {
        let own = pooled_of(skip)?;
        self.pools.iter().position(|p| (p.capacity, p.penalty) == own)
    }
}

/// Calls `f` for every application in order with the loop variables' values. Takes time in
/// proportion to depth.
pub fn for_each_application(blocks: &[Block], variables: u32, f: &mut dyn FnMut(&Apply, &[u64])) {
    fn walk(blocks: &[Block], values: &mut [u64], f: &mut dyn FnMut(&Apply, &[u64])) {
        for block in blocks {
            match block {
                Block::Apply(apply) => f(apply, values),
                Block::Loop { variable, count, blocks, .. } => {
                    for i in 0..*count {
                        values[*variable as usize] = i;
                        walk(blocks, values, f);
                    }
                }
            }
        }
    }
    walk(blocks, &mut vec![0; variables as usize], f);
}

/// Whether a model can be trained and evaluated but not sampled: a `skip` of it decides by later
/// tokens and names no rule to do without.
pub fn looks_ahead(model: &Model) -> bool {
    fn ahead((skip, _): &(&Skip, &Expr)) -> bool {
        match &skip.rule {
            SkipRule::TopK { causal, capacity } => {
                causal.is_none() && skip.capacities.iter().copied().fold(*capacity, f64::min) < 1.0
            }
            SkipRule::Threshold { .. } => skip.level == SkipLevel::Sequence,
            SkipRule::DepthChoice { .. } => false,
        }
    }
    fn items(all: &[Item]) -> bool {
        all.iter().any(|item| match item {
            Item::Layer(e) => skips(e).iter().any(ahead),
            Item::Statement(_) => false,
            Item::Repeat { items: inner, .. } | Item::Recur { items: inner, .. } => items(inner),
        })
    }
    items(&model.body)
}

/// The wrapped parts of an expression in the order in which they are numbered, each with what it
/// wraps.
pub fn skips(expr: &Expr) -> Vec<(&Skip, &Expr)> {
    expr.skips()
}

/// Gives the wrapped parts of a composition other capacities, by the numbers that [`skips`] has
/// them under; those without stay as they are.
fn set_capacities(expr: &mut Expr, next: &mut u64, share: &dyn Fn(u64) -> Option<f64>) {
    match expr {
        Expr::Component(_) | Expr::Norm => {}
        Expr::Sequential(terms) | Expr::Parallel(terms) => {
            terms.iter_mut().for_each(|term| set_capacities(term, next, share));
        }
        Expr::Skip(skip, inner) => {
            if let Some(share) = share(*next) {
                skip.rule.set_capacity(share);
            }
            *next += 1;
            set_capacities(inner, next, share);
        }
    }
}

/// Numbers of the `skip`s that choose among the tokens of the pass before.
fn nested(expr: &Expr) -> impl Iterator<Item = u32> {
    let all = (0u32..).zip(skips(expr));
    all.filter(|(_, (skip, _))| skip.nested).map(|(number, _)| number)
}

/// A composition with the capacities that its `skip`s have in a pass.
fn in_pass(expr: &Expr, pass: u64) -> Expr {
    match expr {
        Expr::Component(_) | Expr::Norm => expr.clone(),
        Expr::Sequential(terms) => Expr::Sequential(terms.iter().map(|term| in_pass(term, pass)).collect()),
        Expr::Parallel(terms) => Expr::Parallel(terms.iter().map(|term| in_pass(term, pass)).collect()),
        Expr::Skip(skip, inner) => Expr::Skip(Box::new(skip.in_pass(pass)), Box::new(in_pass(inner, pass))),
    }
}

/// Marks that tell a pass of these items from others: capacities, and whether nested `skip`s have a
/// pass before theirs.
fn phase(items: &[Item], pass: u64) -> (Vec<Expr>, bool) {
    let layers = layers_of(items);
    let chooses = layers.iter().any(|expr| nested(expr).next().is_some());
    (layers.iter().map(|expr| in_pass(expr, pass)).collect(), chooses && pass > 0)
}

/// Capacity and penalty of a pooled threshold.
fn pooled_of(skip: &Skip) -> Option<(f64, f64)> {
    match skip.rule {
        SkipRule::Threshold { capacity, penalty, pooled: true } => Some((capacity, penalty)),
        _ => None,
    }
}

/// Those of the wrapped parts of a layer.
fn pooled(expr: &Expr) -> Vec<(f64, f64)> {
    skips(expr).into_iter().filter_map(|(skip, _)| pooled_of(skip)).collect()
}

fn pooled_items(items: &[Item]) -> Vec<(f64, f64)> {
    let each = items.iter().map(|item| match item {
        Item::Layer(expr) => pooled(expr),
        Item::Statement(_) => vec![],
        Item::Repeat { items, .. } | Item::Recur { items, .. } => pooled_items(items),
    });
    each.flatten().collect()
}

/// The units of a layer, which a wiring puts between what they read and the stream: the terms of
/// its sequence, but for norms, which are of the stream itself. Inside a unit outputs are summed.
pub fn units(expr: &Expr) -> &[Expr] {
    match expr {
        Expr::Sequential(terms) => terms,
        Expr::Component(_) | Expr::Norm | Expr::Parallel(_) | Expr::Skip(..) => std::slice::from_ref(expr),
    }
}

/// The terms of a unit that read, each with an output: those of a parallel group.
pub fn readers(unit: &Expr) -> &[Expr] {
    match unit {
        Expr::Parallel(terms) => terms,
        Expr::Component(_) | Expr::Norm | Expr::Sequential(_) | Expr::Skip(..) => std::slice::from_ref(unit),
    }
}

/// The names in an expression, in order.
pub fn names(expr: &Expr) -> Vec<&str> {
    match expr {
        Expr::Component(name) => vec![name],
        Expr::Norm => vec![],
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().flat_map(names).collect(),
        Expr::Skip(_, inner) => names(inner),
    }
}

/// Whether a component attends to earlier depths.
fn attends_depth(component: &Component) -> bool {
    matches!(component, Component::Depth(_))
}

/// Whether a component makes keys and values of the sequence.
fn makes_keys(component: &Component) -> bool {
    matches!(component, Component::Sequence(a) if a.kv_from.is_none())
}

/// The compositions of all layers of some items.
fn layers_of(items: &[Item]) -> Vec<&Expr> {
    let each = items.iter().flat_map(|item| match item {
        Item::Layer(expr) => vec![expr],
        Item::Statement(_) => vec![],
        Item::Repeat { items, .. } | Item::Recur { items, .. } => layers_of(items),
    });
    each.collect()
}

/// Whether passes of a loop share out the loss.
fn is_gated(item: &Item) -> bool {
    matches!(item, Item::Recur { looping, .. } if looping.exit.gate().is_some())
}

/// Whether its tokens choose how many passes of it they make.
fn is_chosen(item: &Item) -> bool {
    matches!(item, Item::Recur { items, .. } if depth_choice(items).is_some())
}

/// The name under which the stream after `depth` layer applications is saved. No stream of a
/// specification has a dot in its name.
pub(crate) fn remembered_as(depth: u64) -> String {
    format!("history.{depth}")
}

/// Adds the depths of streams that are read later; the depth of the last statement that reads any.
fn remember(items: &[Item], depth: &mut u64, found: &mut Vec<u64>) -> u64 {
    let mut last = 0;
    for item in items {
        match item {
            Item::Layer(_) => *depth += 1,
            Item::Statement(Statement::History(steps)) => {
                last = *depth;
                found.extend(steps.depths(*depth));
                found.sort_unstable();
                found.dedup();
            }
            Item::Statement(_) => {}
            Item::Repeat { count, items } => {
                for _ in 0..*count {
                    last = last.max(remember(items, depth, found));
                }
            }
            // No such statement is in it or after it.
            Item::Recur { .. } => {}
        }
    }
    last
}

/// Names of saved streams, each once.
fn saved(items: &[Item]) -> Vec<String> {
    let mut all: Vec<String> = vec![];
    for item in items {
        let found = match item {
            Item::Statement(Statement::Save(name)) => vec![name.clone()],
            Item::Statement(
                Statement::Norm(_)
                | Statement::Linear(_)
                | Statement::Mix { .. }
                | Statement::History(_)
                | Statement::StartZeros
                | Statement::StartNormal(_),
            ) => vec![],
            Item::Layer(_) => vec![],
            Item::Repeat { items, .. } | Item::Recur { items, .. } => saved(items),
        };
        for name in found {
            if !all.contains(&name) {
                all.push(name);
            }
        }
    }
    all
}

impl Body {
    /// The name under which it saves the stream.
    pub fn saves(&self) -> Option<String> {
        match &self.work {
            Work::Statement(Statement::Save(name)) => Some(name.clone()),
            Work::Remember(depth) => Some(remembered_as(*depth)),
            Work::Statement(_)
            | Work::Layer(_)
            | Work::Embed
            | Work::Enter
            | Work::Exit(_)
            | Work::Choose(_)
            | Work::Chosen
            | Work::History(_) => None,
        }
    }

    /// The components of its composition, in order.
    pub fn names(&self) -> Vec<&str> {
        self.work.composition().map_or(vec![], names)
    }

    /// Keys that an application leaves in the depth stream of the model.
    pub fn depths(&self, model: &Model) -> u64 {
        let within = self.components.iter().filter_map(|name| model.components.get(name));
        within.filter(|component| component.leaves_depth()).count() as u64
    }

    /// The wrapped parts of its composition, as [`skips`] gives them.
    pub fn skips(&self) -> Vec<(&Skip, &Expr)> {
        self.work.composition().map_or(vec![], skips)
    }

    /// Gives its wrapped parts other capacities, by number.
    pub(crate) fn set_capacities(&mut self, share: &dyn Fn(u64) -> Option<f64>) {
        if let Work::Layer(expr) = &mut self.work {
            set_capacities(expr, &mut 0, share);
        }
    }

    /// The units of its composition.
    fn units(&self) -> impl Iterator<Item = &Expr> {
        let all = self.work.composition().map_or(&[][..], units);
        all.iter().filter(|unit| **unit != Expr::Norm)
    }

    /// How many outputs it makes.
    fn outputs(&self) -> u64 {
        self.units().map(|unit| readers(unit).len() as u64).sum()
    }

    /// Numbers of its `skip`s that choose among the tokens of the pass before.
    pub fn nested(&self) -> impl Iterator<Item = u32> {
        self.work.composition().into_iter().flat_map(nested)
    }

    fn pooled(&self) -> Vec<(f64, f64)> {
        self.skips().into_iter().filter_map(|(skip, _)| pooled_of(skip)).collect()
    }
}

impl Walk<'_> {
    fn items(
        &mut self,
        items: &[Item],
        around: Option<Around>,
        outermost: bool,
    ) -> Result<Vec<Block>, CompileError> {
        let mut blocks = vec![];
        for item in items {
            match item {
                Item::Layer(expr) => {
                    blocks.push(Block::Apply(self.apply(Work::Layer(expr.clone()), around)));
                    blocks.extend(self.remember());
                }
                Item::Statement(s) => {
                    let work = match s {
                        Statement::History(steps) => Work::History(steps.depths(self.now.depth)),
                        s => Work::Statement(s.clone()),
                    };
                    blocks.push(Block::Apply(self.apply(work, around)));
                }
                // Every copy has streams that are remembered, or reads another number of them.
                Item::Repeat { count, items } if self.now.depth < self.remembers => {
                    for _ in 0..*count {
                        blocks.extend(self.items(items, around, false)?);
                    }
                }
                Item::Repeat { count, items } => {
                    let (count, iterations) = (*count, Iterations::Repeat);
                    blocks.extend(self.repeated(Loop {
                        first: 0,
                        count,
                        items,
                        around,
                        iterations,
                        looping: None,
                        exit: None,
                    })?);
                }
                Item::Recur { count, residual_norm, items, looping } => {
                    let times = count
                        .checked_mul(around.map_or(1, |a| a.times))
                        .ok_or(CompileError::Overflow("depth"))?;
                    let now = if outermost { self.depth_override.unwrap_or(*count) } else { *count };
                    let own_weights = looping.has_passes() || has_passes(items);
                    if (own_weights || self.model.has_turns()) && now > *count {
                        return Err(CompileError::Passes { most: *count });
                    }
                    let own = Passes { number: self.now.loops, count: *count, lora: looping.lora };
                    self.now.loops += 1;
                    let passes = match outermost {
                        true => own_weights.then_some(own),
                        false => around.and_then(|a| a.passes),
                    };
                    let leaves = is_gated(item) || around.is_some_and(|a| a.leaves);
                    let around = Some(Around { times, norm: *residual_norm, leaves, passes });
                    let looping = outermost.then_some(looping);
                    let iterations = Iterations::Recur;
                    let passes =
                        Loop { first: 0, count: now, items, around, iterations, looping, exit: None };
                    blocks.extend(self.passes(passes, own)?);
                }
            }
        }
        Ok(blocks)
    }

    /// The passes of a `recur`, in runs of those that are alike: with a gradient or without, with
    /// an exit or without, and by what they do about keys and tokens. All have the same weights.
    fn passes(&mut self, all: Loop, own: Passes) -> Result<Vec<Block>, CompileError> {
        let Loop { count, looping: Some(looping), .. } = all else { return self.repeated(all) };
        let mut blocks = vec![];
        if looping.exit.gate().is_some() {
            blocks.push(Block::Apply(self.apply(Work::Enter, None)));
        }
        if let Some((skip, balance)) = depth_choice(all.items) {
            let choosing = Choosing { number: own.number, passes: own.count, balance, scorer: skip.scorer };
            blocks.push(Block::Apply(self.apply(Work::Choose(choosing), None)));
        }
        let keys = |pass| match (looping.kv, pass) {
            (PassKeys::Own, _) => Keys::Own,
            (PassKeys::First, 0) => Keys::Makes,
            (PassKeys::First, _) => Keys::Reads,
            (PassKeys::Replaced, 0) => Keys::Leaves,
            (PassKeys::Replaced, _) => Keys::Replaces,
        };
        // Models of every depth have the same bodies: those of a second pass, and of all that have
        // capacities of their own.
        let own_phase = |(skip, _): &(&Skip, &Expr)| skip.nested || !skip.capacities.is_empty();
        let phases = layers_of(all.items).into_iter().any(|expr| skips(expr).iter().any(own_phase));
        let differing = |pass: u64| {
            keys(pass) != keys(pass - 1) || phases && phase(all.items, pass) != phase(all.items, pass - 1)
        };
        let most = if has_passes(all.items) { own.count } else { 2 };
        let mut tried: Vec<u64> = (1..most).filter(|pass| differing(*pass)).collect();
        if !tried.is_empty() {
            tried.insert(0, 0);
        }
        let first = self.now.clone();
        for pass in tried {
            (self.now.keys, self.now.pass) = (keys(pass), pass);
            let found = self.tried(all)?;
            if pass == 0 {
                self.now.each_pass = found.rows.iter().zip(&first.rows).map(|(a, b)| a - b).collect();
            }
        }
        (self.now.keys, self.now.pass) = (keys(0), 0);
        let leaving = if looping.exit.is_last() { None } else { Some(self.leaving(all, own.number)?) };
        let kept = looping.backprop.unwrap_or(count).min(count);
        let differs =
            |pass: u64| pass == count - kept || leaving.is_some() && pass + 1 == count || differing(pass);
        let mut starts: Vec<u64> = vec![0];
        starts.extend((1..count).filter(|pass| differs(*pass)));
        let ends: Vec<u64> = starts.iter().skip(1).copied().chain([count]).collect();
        let before = self.now.clone();
        for (first, end) in starts.into_iter().zip(ends) {
            // Each run begins with the weights that the first one began with.
            for (i, sets) in self.now.sets.iter_mut().enumerate() {
                *sets = before.sets.get(i).copied().unwrap_or(0);
            }
            self.now.loops = before.loops;
            let (keys, detached) = (keys(first), first + kept < count);
            if keys == Keys::Reads {
                for i in self.shared_rows(all.items) {
                    self.now.rows[i] = before.rows[i];
                }
            }
            let places = self.now.places;
            (self.now.pass, self.now.detached, self.now.keys) = (first, detached, keys);
            let iterations = if detached { Iterations::Detached } else { Iterations::Recur };
            let exit = leaving.filter(|_| end < count);
            blocks.extend(self.repeated(Loop { first, count: end - first, iterations, exit, ..all })?);
            if detached {
                self.now.places = places;
            }
        }
        (self.now.pass, self.now.detached, self.now.keys) = (before.pass, before.detached, Keys::Own);
        self.now.each_pass.clear();
        if depth_choice(all.items).is_some() {
            blocks.push(Block::Apply(self.apply(Work::Chosen, None)));
        }
        Ok(blocks)
    }

    /// Caches of the components whose keys and values all passes of a loop share.
    fn shared_rows(&self, items: &[Item]) -> Vec<usize> {
        let layers = layers_of(items).into_iter();
        let inside: Vec<&str> = layers.flat_map(|expr| self.applied.within(self.model, expr)).collect();
        let components = self.model.components.iter().enumerate();
        let own = components.filter(|(_, (name, c))| makes_keys(c) && inside.contains(&name.as_str()));
        own.map(|(i, _)| i).collect()
    }

    /// How the passes of a loop leave whose loss sees all of them: the last one leaves to the head.
    fn leaving(&mut self, passes: Loop, number: u64) -> Result<Leaving, CompileError> {
        // A `norm` after the loop is the next statement.
        let norm = matches!(self.model.body.last(), Some(Item::Statement(Statement::Norm(_))));
        let statements = |now: &Counters, bodies: &[Body]| {
            let own = bodies
                .iter()
                .zip(&now.sets)
                .filter(|(b, _)| matches!(b.work, Work::Statement(_) | Work::History(_)));
            own.map(|(_, sets)| *sets).sum::<u64>()
        };
        let found = self.tried(passes)?;
        let norm = norm.then(|| statements(&found, &self.bodies));
        let how = passes.looping.map_or(Exit::Last, |looping| looping.exit);
        let leaving = Leaving { number, passes: passes.count, how, norm };
        let now = self.now.clone();
        self.apply(Work::Exit(leaving), None);
        self.back_to(now);
        Ok(leaving)
    }

    /// Finds the bodies of a pass in a walk that is not kept; gives the numbers after it.
    fn tried(&mut self, passes: Loop) -> Result<Counters, CompileError> {
        let (now, variables) = (self.now.clone(), self.variables);
        self.repeated(Loop { count: 1, ..passes })?;
        self.variables = variables;
        Ok(self.back_to(now))
    }

    /// Goes back to these numbers, of bodies that are known by now; those that there were.
    fn back_to(&mut self, before: Counters) -> Counters {
        let found = std::mem::replace(&mut self.now, before);
        let bodies = self.bodies.len();
        for counted in [&mut self.now.sets, &mut self.now.applications, &mut self.now.kept] {
            counted.resize(bodies, 0);
        }
        found
    }

    fn repeated(&mut self, passes: Loop) -> Result<Vec<Block>, CompileError> {
        let Loop { first, count, items, around, iterations, looping, exit } = passes;
        let variable = self.variables;
        self.variables += 1;
        let before = self.now.clone();
        let mut blocks = vec![];
        if looping.is_some_and(|l| l.embed) {
            blocks.push(Block::Apply(self.apply(Work::Embed, around)));
        }
        blocks.extend(self.items(items, around, false)?);
        if let Some(leaving) = exit {
            blocks.push(Block::Apply(self.apply(Work::Exit(leaving), None)));
        }
        if iterations != Iterations::Repeat {
            take_turns(&mut blocks, variable, first, count);
        }
        // Advances of one iteration; bodies first met inside began at zero.
        let bodies = self.bodies.len();
        let start = |v: &[u64], i: usize| v.get(i).copied().unwrap_or(0);
        // All passes read the rows of the first.
        let reads = looping.is_some() && self.now.keys == Keys::Reads;
        let shared = if reads { self.shared_rows(items) } else { vec![] };
        let step = Counters {
            depth: self.now.depth - before.depth,
            places: match iterations {
                Iterations::Repeat | Iterations::Recur => self.now.places - before.places,
                Iterations::Detached => 0,
            },
            kept: (0..bodies).map(|i| self.now.kept[i] - start(&before.kept, i)).collect(),
            detached: false,
            keys: Keys::Own,
            each_pass: vec![],
            sets: (0..bodies)
                .map(|i| match iterations {
                    // Sets are those of the body whose weights it reads.
                    Iterations::Repeat => {
                        let leader = self.bodies[i].leader;
                        self.now.sets[leader] - start(&before.sets, leader)
                    }
                    Iterations::Recur | Iterations::Detached => 0,
                })
                .collect(),
            applications: (0..bodies)
                .map(|i| self.now.applications[i] - start(&before.applications, i))
                .collect(),
            rows: (0..self.now.rows.len())
                .map(|i| if shared.contains(&i) { 0 } else { self.now.rows[i] - before.rows[i] })
                .collect(),
            loops: match iterations {
                Iterations::Repeat => self.now.loops - before.loops,
                Iterations::Recur | Iterations::Detached => 0,
            },
            pass: u64::from(looping.is_some()),
        };
        advance(&mut blocks, variable, &step);
        let more = count - 1;
        let grow = |now: &mut u64, step: u64| -> Result<(), CompileError> {
            *now = step
                .checked_mul(more)
                .and_then(|s| now.checked_add(s))
                .ok_or(CompileError::Overflow("depth"))?;
            Ok(())
        };
        grow(&mut self.now.depth, step.depth)?;
        grow(&mut self.now.places, step.places)?;
        grow(&mut self.now.loops, step.loops)?;
        for i in 0..bodies {
            grow(&mut self.now.sets[i], step.sets[i])?;
            grow(&mut self.now.applications[i], step.applications[i])?;
            grow(&mut self.now.kept[i], step.kept[i])?;
        }
        for (now, &s) in self.now.rows.iter_mut().zip(&step.rows) {
            grow(now, s)?;
        }
        // Where runs of outputs do not end with iterations, as many iterations stand side by side
        // as begin at different places of a run: everything stays affine.
        let outputs = self.caches.row(Owner::Sources).map_or(0, |row| step.rows[row]);
        let period = match self.model.stream {
            Stream::Attend { block } => block / gcd(block, outputs),
            Stream::Sum | Stream::Lanes { .. } => 1,
        };
        let period = period.min(count);
        let detached = iterations == Iterations::Detached;
        if period <= 1 {
            return Ok(vec![Block::Loop { variable, count, blocks, detached }]);
        }
        let mut copies = |from: u64, to: u64, factor: u64| {
            let mut all = vec![];
            for offset in from..to {
                let mut copy = substituted(&blocks, variable, factor, offset);
                if detached {
                    // Each leaves its stream in the place of the first.
                    let variable = self.variables;
                    self.variables += 1;
                    advance(&mut copy, variable, &step);
                    copy = vec![Block::Loop { variable, count: 1, blocks: copy, detached }];
                }
                all.extend(copy);
            }
            all
        };
        let (times, whole) = (count / period, count - count % period);
        let mut all =
            vec![Block::Loop { variable, count: times, blocks: copies(0, period, period), detached }];
        all.extend(copies(whole, count, 0));
        Ok(all)
    }

    /// Whether a sequence attention of it makes keys and values.
    fn makes_keys(&self, work: &Work) -> bool {
        let Work::Layer(expr) = work else { return false };
        let mut all = self.applied.within(self.model, expr).into_iter();
        all.any(|name| self.model.components.get(name).is_some_and(makes_keys))
    }

    /// Keeps the stream here, where a later statement reads it.
    fn remember(&mut self) -> Option<Block> {
        let depth = self.now.depth;
        let read = self.remembered.contains(&depth);
        read.then(|| Block::Apply(self.apply(Work::Remember(depth), None)))
    }

    fn apply(&mut self, work: Work, around: Option<Around>) -> Apply {
        let keys = if self.makes_keys(&work) { self.now.keys } else { Keys::Own };
        let shared = format!("{work:?} {around:?}");
        let (work, chooses) = match work {
            Work::Layer(expr) => {
                let chooses = nested(&expr).next().is_some() && self.now.pass > 0;
                (Work::Layer(in_pass(&expr, self.now.pass)), chooses)
            }
            work => (work, false),
        };
        let each = |row: Option<usize>| row.and_then(|row| self.now.each_pass.get(row)).copied().unwrap_or(0);
        let among = chooses.then(|| each(self.caches.row(Owner::Members)));
        let each_pass = if keys == Keys::Replaces { self.now.each_pass.clone() } else { vec![] };
        let chosen = match &work {
            Work::Layer(Expr::Skip(skip, _)) if skip.rule.chosen() => {
                around.and_then(|a| a.passes).map(|passes| [self.now.pass, passes.count])
            }
            _ => None,
        };
        let next = self.bodies.len();
        let body = *self
            .known
            .entry(format!("{keys:?} {each_pass:?} {among:?} {chosen:?} {work:?} {shared}"))
            .or_insert_with(|| {
                let alike = |b: &&Body| std::mem::discriminant(&b.work) == std::mem::discriminant(&work);
                let number = self.bodies.iter().filter(alike).count();
                let (name, norm) = match work {
                    Work::Layer(_) => (format!("layer{number}"), around.is_some_and(|a| a.norm)),
                    Work::Statement(_) => (format!("statement{number}"), false),
                    Work::Embed => (format!("pass{number}"), false),
                    Work::Enter => (format!("enter{number}"), false),
                    Work::Exit(_) => (format!("exit{number}"), false),
                    Work::Choose(_) => (format!("choose{number}"), false),
                    Work::Chosen => (format!("chosen{number}"), false),
                    Work::Remember(_) => (format!("remember{number}"), false),
                    Work::History(_) => (format!("history{number}"), false),
                };
                self.bodies.push(Body {
                    name,
                    work: work.clone(),
                    leader: *self.leaders.entry(shared).or_insert(next),
                    keys,
                    each_pass,
                    recurrent: around.map(|a| a.times),
                    passes: around.and_then(|a| a.passes),
                    leaves: around.is_some_and(|a| a.leaves),
                    among,
                    chosen,
                    residual_norm: norm,
                    components: work.composition().map_or(vec![], |expr| {
                        let all = self.applied.within(self.model, expr);
                        all.into_iter().map(String::from).collect()
                    }),
                    sets: 0,
                    applications: 0,
                    kept: 0,
                });
                self.now.sets.push(0);
                self.now.applications.push(0);
                self.now.kept.push(0);
                self.bodies.len() - 1
            });
        let (now, leader) = (&mut self.now, self.bodies[body].leader);
        let apply = Apply {
            body,
            set: Affine::constant(now.sets[leader]),
            application: Affine::constant(now.applications[body]),
            kept: Affine::constant(if now.detached { 0 } else { now.kept[body] }),
            detached: now.detached,
            pass: Affine::constant(now.pass),
            turn: Affine::default(),
            turns: 1,
            place: Affine::constant(now.places),
            depth: Affine::constant(now.depth),
            rows: now.rows.iter().map(|&r| Affine::constant(r)).collect(),
        };
        now.sets[leader] += 1;
        now.applications[body] += 1;
        now.kept[body] += u64::from(!now.detached);
        now.places += 1;
        now.depth += u64::from(matches!(work, Work::Layer(_)));
        let body = &self.bodies[body];
        let caches = self.caches;
        let mut more = |owner, rows| {
            if let Some(row) = caches.row(owner) {
                now.rows[row] += rows;
            }
        };
        for i in body.components.iter().filter_map(|name| self.model.components.get_index_of(name)) {
            more(Owner::Component(i as u32), 1);
        }
        if let Some(i) = body.saves().and_then(|name| self.saved.iter().position(|s| *s == name)) {
            more(Owner::Saved(i as u32), 1);
        }
        let gated = match body.work {
            Work::Exit(leaving) => leaving.how.gate().is_some(),
            ref work => *work == Work::Enter,
        };
        more(Owner::Exit, u64::from(gated));
        if let Work::Choose(_) = body.work {
            more(Owner::Choice, 1);
        }
        more(Owner::Members, body.nested().count() as u64);
        let own = body.pooled();
        for (i, pool) in self.pools.iter().enumerate() {
            more(Owner::Pool(i as u32), u64::from(own.contains(&(pool.capacity, pool.penalty))));
        }
        more(Owner::Depths, body.depths(self.model));
        more(Owner::Sources, body.outputs());
        apply
    }
}

/// The greatest common divisor; the first number where the second is 0.
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The blocks with `factor · variable + offset` in the place of a variable.
fn substituted(blocks: &[Block], variable: u32, factor: u64, offset: u64) -> Vec<Block> {
    let of = |a: &Affine| {
        let mut found = Affine { base: a.base, terms: vec![] };
        for &(v, s) in &a.terms {
            match v == variable {
                true => {
                    found.base += s * offset;
                    found.terms.extend((factor > 0).then_some((v, s * factor)));
                }
                false => found.terms.push((v, s)),
            }
        }
        found
    };
    let one = |block: &Block| match block {
        Block::Apply(a) => Block::Apply(Apply {
            body: a.body,
            set: of(&a.set),
            application: of(&a.application),
            kept: of(&a.kept),
            detached: a.detached,
            place: of(&a.place),
            depth: of(&a.depth),
            pass: of(&a.pass),
            turn: of(&a.turn),
            turns: a.turns,
            rows: a.rows.iter().map(of).collect(),
        }),
        Block::Loop { variable: inner, count, blocks, detached } => Block::Loop {
            variable: *inner,
            count: *count,
            detached: *detached,
            blocks: substituted(blocks, variable, factor, offset),
        },
    };
    blocks.iter().map(one).collect()
}

/// The number of complete runs before output `offset` of an application, with `row` outputs before
/// the application: the embedding, and one for every `block` outputs. Loops end with runs.
pub fn run_of(row: &Affine, offset: u32, block: u32) -> Affine {
    let block = u64::from(block.max(1));
    let terms = row.terms.iter().map(|&(v, s)| (v, s / block)).collect();
    Affine { base: (row.base + u64::from(offset)).div_ceil(block), terms }
}

/// 1 where that output continues a run, 0 where it begins one.
pub fn continues(row: &Affine, offset: u32, block: u32) -> Affine {
    let begins = (row.base + u64::from(offset)).is_multiple_of(block.max(1).into());
    Affine::constant(u64::from(!begins))
}

/// Counts `count` passes of a `recur`, with `first` passes before them, as turns of the weights
/// inside.
fn take_turns(blocks: &mut [Block], variable: u32, first: u64, count: u64) {
    for block in blocks {
        match block {
            Block::Loop { blocks, .. } => take_turns(blocks, variable, first, count),
            Block::Apply(apply) => {
                apply.turn.base += first * apply.turns;
                apply.turn.terms.push((variable, apply.turns));
                apply.turns *= count;
            }
        }
    }
}

/// Adds a loop's variable to everything inside it.
fn advance(blocks: &mut [Block], variable: u32, step: &Counters) {
    let add = |a: &mut Affine, s: u64| {
        if s != 0 {
            a.terms.push((variable, s));
        }
    };
    for block in blocks {
        match block {
            Block::Loop { blocks, .. } => advance(blocks, variable, step),
            Block::Apply(apply) => {
                add(&mut apply.set, step.sets[apply.body]);
                add(&mut apply.application, step.applications[apply.body]);
                add(&mut apply.kept, step.kept[apply.body]);
                add(&mut apply.pass, step.pass);
                add(&mut apply.place, step.places);
                add(&mut apply.depth, step.depth);
                for (row, &s) in apply.rows.iter_mut().zip(&step.rows) {
                    add(row, s);
                }
            }
        }
    }
}
