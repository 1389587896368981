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
use dreamc_dsl::spec::{Component, Expr, Item, Model, Skip, SkipKv, SkipLevel, SkipRule, Statement, Stream};
use std::collections::HashMap;

/// A resolved model.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// The model it comes from.
    pub model: Model,
    /// The distinct layer bodies.
    pub bodies: Vec<Body>,
    /// Layers that are applied, in order.
    pub blocks: Vec<Block>,
    /// How many loop variables the blocks use.
    pub variables: u32,
    /// Total depth `L`: applications of layers.
    pub depth: u64,
    /// Streams there are: before each application of a layer or a statement, and behind the last.
    pub places: u64,
    /// For each set of weights of layers, `layers.{i}`: its body and which of the body's sets it
    /// is.
    pub sets: Vec<(usize, u64)>,
    /// The same of statements, `body.{k}`.
    pub statements: Vec<(usize, u64)>,
    /// For each set of weights of layers: units of the sets before it.
    pub units: Vec<u64>,
    /// Names of saved streams, in order of the body.
    pub saved: Vec<String>,
    /// For each component, then for each pool, then for each saved stream, how many applications
    /// contain it, or save it: rows of its cache; last, where the stream is one of sources,
    /// outputs.
    pub rows: Vec<u64>,
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
}

/// A distinct body of a layer or a statement.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Its name in the IR: `layer0`, …, and `statement0`, … beside them.
    pub name: String,
    /// The composition that it computes, or the statement.
    pub work: Work,
    /// Applications of each set of weights, where the layer is inside a `recur`: the size of
    /// projection mixtures.
    pub recurrent: Option<u64>,
    /// Whether the stream is normalised after each application.
    pub residual_norm: bool,
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
    /// Which stream it reads; it writes the next one.
    pub place: Affine,
    /// Depth `l` in the whole model: applications of layers before it.
    pub depth: Affine,
    /// For each component of the model, then for each pool, then for each saved stream, how many
    /// applications before this one contain it, or save it; last, where the stream is one of
    /// sources, outputs before it.
    pub rows: Vec<Affine>,
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
    /// Whether the walk is in passes through which no gradient flows.
    detached: bool,
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
    variables: u32,
    now: Counters,
    /// Factor between an override of the recurrent depth and the spec's count.
    depth_override: Option<u64>,
    pools: &'a [Pool],
    saved: &'a [String],
    /// Outputs of a source, where the stream is one of sources.
    block: Option<u64>,
}

impl Architecture {
    /// Resolves a model. `recurrence` replaces the count of the outermost `recur` (the projection
    /// mixtures keep the size they were trained with).
    pub fn new(model: &Model, recurrence: Option<u64>) -> Result<Self, CompileError> {
        if recurrence.is_some() && model.body.iter().filter(|i| matches!(i, Item::Recur { .. })).count() != 1
        {
            return Err(CompileError::Depth);
        }
        let mut pools: Vec<Pool> = vec![];
        for (capacity, penalty) in pooled_items(&model.body) {
            if !pools.iter().any(|p| (p.capacity, p.penalty) == (capacity, penalty)) {
                pools.push(Pool { capacity, penalty, parts: 0 });
            }
        }
        let saved = saved(&model.body);
        let block = match model.stream {
            Stream::Attend { block } => Some(block),
            Stream::Sum | Stream::Lanes { .. } => None,
        };
        let caches = model.components.len() + pools.len() + saved.len() + usize::from(block.is_some());
        let mut walk = Walk {
            model,
            bodies: vec![],
            known: HashMap::new(),
            variables: 0,
            now: Counters {
                depth: 0,
                places: 0,
                sets: vec![],
                applications: vec![],
                kept: vec![],
                rows: vec![0; caches],
                detached: false,
            },
            pools: &pools,
            saved: &saved,
            block,
            depth_override: recurrence,
        };
        let blocks = walk.items(&model.body, None, true)?;
        for (i, body) in walk.bodies.iter_mut().enumerate() {
            (body.sets, body.applications) = (walk.now.sets[i], walk.now.applications[i]);
            body.kept = walk.now.kept[i];
        }
        let last = last(&blocks, &walk.bodies).is_some_and(|a| walk.bodies[a.body].residual_norm);
        let final_norm = model.stream != Stream::Sum || !last;
        let (mut sets, mut statements) = (vec![], vec![]);
        let mut seen = std::collections::HashSet::new();
        for_each_application(&blocks, walk.variables, &mut |apply, variables| {
            let key = (apply.body, apply.set.at(variables));
            if seen.insert(key) {
                match walk.bodies[apply.body].work {
                    Work::Layer(_) => sets.push(key),
                    Work::Statement(_) => statements.push(key),
                }
            }
        });
        let units = sets.iter().scan(0, |sum, (body, _): &(usize, u64)| {
            let before = *sum;
            *sum += walk.bodies[*body].units().count() as u64;
            Some(before)
        });
        let units = units.collect();
        let uses_depth = walk
            .bodies
            .iter()
            .any(|b| b.names().iter().any(|c| matches!(model.components.get(*c), Some(Component::Depth(_)))));
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
            model: model.clone(),
            depth,
            rows,
            variables,
            bodies,
            pools,
            blocks,
            places: places + 1,
            sets,
            statements,
            units,
            saved,
            final_norm,
            attention_dimensions: if uses_depth { 3 } else { 2 },
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

    /// Parts with a cache row for each application: components, then pools, then saved streams.
    pub fn caches(&self) -> impl Iterator<Item = Owner> + use<> {
        let components = (0..self.model.components.len()).map(|i| Owner::Component(i as u32));
        let pools = (0..self.pools.len()).map(|i| Owner::Pool(i as u32));
        let saved = (0..self.saved.len()).map(|i| Owner::Saved(i as u32));
        let sources = matches!(self.model.stream, Stream::Attend { .. }).then_some(Owner::Sources);
        components.chain(pools).chain(saved).chain(sources)
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
        }
    }

    /// The name of a tensor or state inside its layer, or outside the layers its whole name.
    pub fn name_of(&self, owner: Owner, part: Part) -> String {
        match owner {
            Owner::Stream => part.path().into(),
            Owner::Pool(_) | Owner::Saved(_) => self.label(owner),
            Owner::Embedding
            | Owner::Head
            | Owner::Component(_)
            | Owner::Skip(_)
            | Owner::Norm(_)
            | Owner::Lanes(_)
            | Owner::Output
            | Owner::Sources => {
                format!("{}.{}", self.label(owner), part.path())
            }
        }
    }

    /// The component of that number.
    pub fn component(&self, number: u32) -> Option<(&str, &Component)> {
        self.model.components.get_index(number as usize).map(|(name, c)| (name.as_str(), c))
    }

    /// Whether some tokens skip something.
    pub fn skips(&self) -> bool {
        self.bodies.iter().any(|b| !b.skips().is_empty())
    }

    /// Whether tokens skip the component somewhere and leave no keys there.
    pub fn skipped(&self, component: Owner) -> bool {
        let component = self.label(component);
        let leaves_none = |(skip, inner): &(&Skip, &Expr)| {
            let all = matches!(skip.rule, SkipRule::Threshold { .. }) && skip.kv == SkipKv::All;
            !all && names(inner).contains(&component.as_str())
        };
        self.bodies.iter().any(|b| b.skips().iter().any(leaves_none))
    }

    /// Which of [`Architecture::rows`] counts those of a component's or a pool's cache.
    pub fn cache_of(&self, owner: Owner) -> Option<usize> {
        self.caches().position(|cache| cache == owner)
    }

    /// Row count of the cache of a component or a pool.
    pub fn rows_of(&self, owner: Owner) -> u64 {
        self.cache_of(owner).map_or(0, |i| self.rows[i])
    }

    /// The sets of weights in the order of checkpoints, each with the first words of the names of
    /// its tensors: layers, then statements.
    pub fn prefixes(&self) -> impl Iterator<Item = (String, (usize, u64))> {
        let layers = self.sets.iter().enumerate().map(|(i, set)| (format!("layers.{i}"), *set));
        let statements = self.statements.iter().enumerate().map(|(k, set)| (format!("body.{k}"), *set));
        layers.chain(statements)
    }

    /// How a tensor of this set of weights begins, of those that `prefixes` gives.
    pub fn init_of(&self, set: usize, init: Init) -> Init {
        match init {
            Init::Pick(unit) => Init::Pick(self.units.get(set).copied().unwrap_or(0) + unit),
            Init::Normal(_) | Init::Constant(_) | Init::Identity { .. } => init,
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
            SkipRule::TopK { causal, capacity } => causal.is_none() && *capacity < 1.0,
            SkipRule::Threshold { .. } => skip.level == SkipLevel::Sequence,
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
    match expr {
        Expr::Component(_) | Expr::Norm => vec![],
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().flat_map(skips).collect(),
        Expr::Skip(skip, inner) => [vec![(&**skip, &**inner)], skips(inner)].concat(),
    }
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

/// The last application of a layer.
fn last<'a>(blocks: &'a [Block], bodies: &[Body]) -> Option<&'a Apply> {
    blocks.iter().rev().find_map(|b| match b {
        Block::Apply(a) => matches!(bodies[a.body].work, Work::Layer(_)).then_some(a),
        Block::Loop { blocks, .. } => last(blocks, bodies),
    })
}

/// Names of saved streams, each once.
fn saved(items: &[Item]) -> Vec<String> {
    let mut all: Vec<String> = vec![];
    for item in items {
        let found = match item {
            Item::Statement(Statement::Save(name)) => vec![name.clone()],
            Item::Statement(
                Statement::Norm
                | Statement::Linear(_)
                | Statement::Mix { .. }
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
    /// The components of its composition, in order.
    pub fn names(&self) -> Vec<&str> {
        match &self.work {
            Work::Layer(expr) => names(expr),
            Work::Statement(_) => vec![],
        }
    }

    /// The wrapped parts of its composition, as [`skips`] gives them.
    pub fn skips(&self) -> Vec<(&Skip, &Expr)> {
        match &self.work {
            Work::Layer(expr) => skips(expr),
            Work::Statement(_) => vec![],
        }
    }

    /// The units of its composition.
    fn units(&self) -> impl Iterator<Item = &Expr> {
        let all = match &self.work {
            Work::Layer(expr) => units(expr),
            Work::Statement(_) => &[],
        };
        all.iter().filter(|unit| **unit != Expr::Norm)
    }

    /// How many outputs it makes.
    fn outputs(&self) -> u64 {
        self.units().map(|unit| readers(unit).len() as u64).sum()
    }

    fn pooled(&self) -> Vec<(f64, f64)> {
        self.skips().into_iter().filter_map(|(skip, _)| pooled_of(skip)).collect()
    }
}

impl Walk<'_> {
    /// `shared` is how often each set of weights inside is applied, and whether the stream is
    /// normalised.
    fn items(
        &mut self,
        items: &[Item],
        shared: Option<(u64, bool)>,
        outermost: bool,
    ) -> Result<Vec<Block>, CompileError> {
        let mut blocks = vec![];
        for item in items {
            match item {
                Item::Layer(expr) => {
                    blocks.push(Block::Apply(self.apply(Work::Layer(expr.clone()), shared)));
                }
                Item::Statement(s) => {
                    blocks.push(Block::Apply(self.apply(Work::Statement(s.clone()), shared)));
                }
                Item::Repeat { count, items } => {
                    blocks.extend(self.repeated(*count, items, shared, Iterations::Repeat)?);
                }
                Item::Recur { count, residual_norm, items, looping } => {
                    let trained = count
                        .checked_mul(shared.map_or(1, |s| s.0))
                        .ok_or(CompileError::Overflow("depth"))?;
                    let now = if outermost { self.depth_override.unwrap_or(*count) } else { *count };
                    let shared = Some((trained, *residual_norm));
                    let kept = looping.backprop.unwrap_or(now).min(now);
                    if kept < now {
                        blocks.extend(self.detached(now - kept, items, shared)?);
                    }
                    blocks.extend(self.repeated(kept, items, shared, Iterations::Recur)?);
                }
            }
        }
        Ok(blocks)
    }

    /// The passes of a `recur` through which no gradient flows. Those behind them have the same
    /// weights and streams.
    fn detached(
        &mut self,
        count: u64,
        items: &[Item],
        shared: Option<(u64, bool)>,
    ) -> Result<Vec<Block>, CompileError> {
        let before = self.now.clone();
        self.now.detached = true;
        let blocks = self.repeated(count, items, shared, Iterations::Detached)?;
        (self.now.detached, self.now.places) = (before.detached, before.places);
        for (i, sets) in self.now.sets.iter_mut().enumerate() {
            *sets = before.sets.get(i).copied().unwrap_or(0);
        }
        Ok(blocks)
    }

    fn repeated(
        &mut self,
        count: u64,
        items: &[Item],
        shared: Option<(u64, bool)>,
        iterations: Iterations,
    ) -> Result<Vec<Block>, CompileError> {
        let variable = self.variables;
        self.variables += 1;
        let before = self.now.clone();
        let mut blocks = self.items(items, shared, false)?;
        // Advances of one iteration; bodies first met inside began at zero.
        let bodies = self.bodies.len();
        let start = |v: &[u64], i: usize| v.get(i).copied().unwrap_or(0);
        let step = Counters {
            depth: self.now.depth - before.depth,
            places: match iterations {
                Iterations::Repeat | Iterations::Recur => self.now.places - before.places,
                Iterations::Detached => 0,
            },
            kept: (0..bodies).map(|i| self.now.kept[i] - start(&before.kept, i)).collect(),
            detached: false,
            sets: (0..bodies)
                .map(|i| match iterations {
                    Iterations::Repeat => self.now.sets[i] - start(&before.sets, i),
                    Iterations::Recur | Iterations::Detached => 0,
                })
                .collect(),
            applications: (0..bodies)
                .map(|i| self.now.applications[i] - start(&before.applications, i))
                .collect(),
            rows: self.now.rows.iter().zip(&before.rows).map(|(a, b)| a - b).collect(),
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
        let outputs = if self.block.is_some() { step.rows.last().copied().unwrap_or(0) } else { 0 };
        let period = self.block.map_or(1, |block| block / gcd(block, outputs)).min(count);
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

    fn apply(&mut self, work: Work, shared: Option<(u64, bool)>) -> Apply {
        let key = format!("{work:?} {shared:?}");
        let body = *self.known.entry(key).or_insert_with(|| {
            let alike = |b: &&Body| std::mem::discriminant(&b.work) == std::mem::discriminant(&work);
            let number = self.bodies.iter().filter(alike).count();
            let (name, norm) = match work {
                Work::Layer(_) => (format!("layer{number}"), shared.is_some_and(|s| s.1)),
                Work::Statement(_) => (format!("statement{number}"), false),
            };
            self.bodies.push(Body {
                name,
                work: work.clone(),
                recurrent: shared.map(|s| s.0),
                residual_norm: norm,
                sets: 0,
                applications: 0,
                kept: 0,
            });
            self.now.sets.push(0);
            self.now.applications.push(0);
            self.now.kept.push(0);
            self.bodies.len() - 1
        });
        let now = &mut self.now;
        let apply = Apply {
            body,
            set: Affine::constant(now.sets[body]),
            application: Affine::constant(now.applications[body]),
            kept: Affine::constant(if now.detached { 0 } else { now.kept[body] }),
            detached: now.detached,
            place: Affine::constant(now.places),
            depth: Affine::constant(now.depth),
            rows: now.rows.iter().map(|&r| Affine::constant(r)).collect(),
        };
        now.sets[body] += 1;
        now.applications[body] += 1;
        now.kept[body] += u64::from(!now.detached);
        now.places += 1;
        now.depth += u64::from(matches!(work, Work::Layer(_)));
        let body = &self.bodies[body];
        for name in body.names() {
            if let Some(i) = self.model.components.get_index_of(name) {
                now.rows[i] += 1;
            }
        }
        if let Work::Statement(Statement::Save(name)) = &body.work
            && let Some(i) = self.saved.iter().position(|s| s == name)
        {
            now.rows[self.model.components.len() + self.pools.len() + i] += 1;
        }
        let own = body.pooled();
        for (i, pool) in self.pools.iter().enumerate() {
            let contains = own.contains(&(pool.capacity, pool.penalty));
            now.rows[self.model.components.len() + i] += u64::from(contains);
        }
        if self.block.is_some() {
            *now.rows.last_mut().unwrap_or(&mut 0) += body.outputs();
        }
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

/// Complete runs before an output, of so many outputs before its application: the embedding, and
/// one for every `block` outputs. Loops end with runs.
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
                add(&mut apply.place, step.places);
                add(&mut apply.depth, step.depth);
                for (row, &s) in apply.rows.iter_mut().zip(&step.rows) {
                    add(row, s);
                }
            }
        }
    }
}
