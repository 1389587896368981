//! The arena: which buffers there are, and where.
//!
//! *In*: the weights of a model and its recipe; then, as functions are assembled, what their ports
//! are bound to. *Out*: the buffers of a [`Plan`](crate::program::Plan). *Promise*: a buffer is
//! found by what it holds ([`Slot`]), never by its name; weights, gradients and optimizer state are
//! each one contiguous range in the same order; temporaries share memory where their lifetimes do
//! not overlap.

use crate::CompileError;
use crate::assemble::Assembly;
use crate::compiled::{End, Entry, Init, Tensor, TensorKind};
use crate::format::{Format, Residence, Stored};
use crate::ir::{Binding, DType, Input, Port};
use crate::lower::{Lowered, Weight};
use crate::optim::{Rule, optimizer, storage};
use crate::program::{ALIGNMENT, Buffer, BufferId, MAPPED, Space};
use crate::recipe::recipe;
use crate::resolve::{Passes, Wanted, WeightKey};
use crate::schedule::Scheduled;
use crate::transfer::{Rates, Share};
use dreamc_dsl::spec::Shard;
use indexmap::{IndexMap, IndexSet};

/// Selection counts, the bias that they move, and the law by which they do.
#[derive(Clone, Copy)]
pub(crate) struct Counted {
    pub(crate) counts: BufferId,
    pub(crate) bias: BufferId,
    pub(crate) law: dreamc_dsl::spec::Balance,
}

/// The content of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    /// The stream before every application, and after the last.
    Stream,
    /// The cotangent of the stream, and the next one.
    Cotangent,
    NextCotangent,
    /// Values that a body keeps.
    Saved(usize, String),
    /// Values prepared of the weights of a body, or of those outside.
    Prepared(Option<usize>, String),
    /// Observations for the host.
    Observed(String),
    /// Values of the host in the place of the model's.
    Patched(String),
    /// A state of a body.
    OfBody(usize, String),
    /// A state with an instance for each application of a component.
    OfComponent(String),
    /// A state that all bodies share, and its cotangent.
    State(String),
    StateCotangent(String),
    /// Values that host and programs exchange.
    End(End),
    /// Sums that a call made once more adds to, which nobody reads.
    Again(Option<usize>, String),
    /// All gradients.
    Gradients,
}

/// A buffer's meaning: what it holds, for which entry where each has one of its own, at which depth
/// where others differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) slot: Slot,
    /// The use; values made of weights alone belong to the first.
    pub(crate) scope: usize,
    pub(crate) entry: Option<Entry>,
    pub(crate) depth: Option<u64>,
}

/// The name of the gradient of a weight.
pub(crate) fn cotangent(weight: &str) -> String {
    Port::new(weight, Binding::Weight).cotangent().name
}

/// How a tensor moves, where it is trained.
pub(crate) type Recipe = Option<Rule>;

/// Adjacent weights of one recipe, with their gradients and states.
pub(crate) struct Range {
    pub(crate) weight: BufferId,
    pub(crate) gradient: BufferId,
    /// The optimizer's states, in its order.
    pub(crate) states: Vec<BufferId>,
    pub(crate) elements: u64,
    pub(crate) recipe: Recipe,
}

/// The weights of a model, and all that is as large as they are.
pub(crate) struct WeightSet {
    pub(crate) weights: IndexMap<WeightKey, BufferId>,
    pub(crate) gradients: IndexMap<WeightKey, BufferId>,
    pub(crate) trained: Vec<WeightKey>,
    pub(crate) passes: Passes,
    /// Of a state that counts choices, what is done with it.
    pub(crate) counts: IndexMap<WeightKey, Counted>,
    /// Ranges of the optimizer.
    pub(crate) ranges: Vec<Range>,
    /// Where the parts of the ranks begin among the trained numbers, and where the last ends.
    pub(crate) cuts: Vec<u64>,
    /// All trained weights as one range.
    pub(crate) trained_weights: Option<BufferId>,
    /// The gradients of experts that ranks share, as one range.
    pub(crate) stack_gradients: Option<BufferId>,
    /// The tensors, in the order of checkpoints.
    pub(crate) tensors: Vec<Tensor>,
    /// Factors of weights under the recipe's `transfer`.
    pub(crate) rates: Rates,
}

impl WeightSet {
    /// Nothing yet.
    pub(crate) fn new(rates: Rates) -> Self {
        WeightSet {
            weights: IndexMap::new(),
            gradients: IndexMap::new(),
            trained: vec![],
            passes: IndexMap::new(),
            counts: IndexMap::new(),
            ranges: vec![],
            cuts: vec![],
            trained_weights: None,
            stack_gradients: None,
            tensors: vec![],
            rates,
        }
    }
}

/// Temporaries, whose offsets count from the end of everything else.
#[derive(Default)]
pub(crate) struct Temporaries {
    pub(crate) all: Vec<BufferId>,
    /// Bytes that programs share.
    pub(crate) bytes: u64,
}

/// The buffers of an optimizer's state, by the state's name.
pub(crate) struct Kept {
    name: &'static str,
    of: IndexMap<WeightKey, BufferId>,
}

/// A weight of all sets, and how it moves in each.
struct Placed {
    key: WeightKey,
    shape: Vec<u64>,
    instances: u64,
    recipes: Vec<Recipe>,
    stored: Stored,
    /// Whether ranks share its experts.
    stack: bool,
}

/// Where trained numbers begin.
struct Begins<'s> {
    /// Weights and gradients.
    bases: (u64, u64),
    /// The optimizer's states, by name.
    states: &'s [(&'static str, u64)],
    /// The bytes of runs that are at the bases, and at those of states.
    origins: (u64, u64),
}

/// Trained numbers of one recipe, from byte to byte among the gradients.
type Run = (Recipe, u64, u64);

/// Numbers that the parts of ranks are multiples of, where no matrix has to stay whole: as many as
/// devices compute alike wherever a row begins.
const GRAIN: u64 = 64;

/// Where the parts of the ranks begin among the trained numbers, and where the last ends: each rank
/// has as many states as the others, as nearly as whole matrices allow.
fn cuts(runs: &[Run], states: &dyn Fn(&Rule) -> u64, ranks: u64) -> Vec<u64> {
    let numbers = |(_, from, to): &Run| (to - from) / DType::F32.bytes();
    let of = |run: &Run| run.0.map_or(0, |rule| states(&rule));
    let all: u128 = runs.iter().map(|run| u128::from(numbers(run)) * u128::from(of(run))).sum();
    let end = runs.last().map_or(0, |run| run.2 / DType::F32.bytes());
    let cut = |rank: u64| {
        let mut left = all * u128::from(rank) / u128::from(ranks.max(1));
        for run in runs {
            let own = u128::from(numbers(run)) * u128::from(of(run));
            if left < own {
                let inside = (left / u128::from(of(run).max(1))) as u64;
                let inside = match run.0.and_then(|rule| rule.matrix) {
                    Some([n, k]) => (inside + n * k / 2) / (n * k) * (n * k),
                    None => inside / GRAIN * GRAIN,
                };
                return run.1 / DType::F32.bytes() + inside;
            }
            left -= own;
        }
        end
    };
    (0..ranks).map(|rank| if rank == 0 { 0 } else { cut(rank) }).chain([end]).collect()
}

impl Assembly<'_> {
    pub(crate) fn buffer(
        &mut self,
        name: String,
        space: Space,
        dtype: DType,
        shape: Vec<u64>,
        instances: u64,
    ) -> Result<BufferId, CompileError> {
        self.buffer_at(name, space, dtype, (shape, instances), ALIGNMENT)
    }

    /// A buffer whose size is a multiple of `alignment` bytes.
    pub(crate) fn buffer_at(
        &mut self,
        name: String,
        space: Space,
        dtype: DType,
        (shape, instances): (Vec<u64>, u64),
        alignment: u64,
    ) -> Result<BufferId, CompileError> {
        let bytes = shape
            .iter()
            .try_fold(instances, |n, &d| n.checked_mul(d))
            .and_then(|n| Format { dtype }.bytes(n))
            .and_then(|n| n.checked_next_multiple_of(alignment))
            .ok_or(CompileError::Overflow("a tensor"))?;
        let offset = self.plan.arena.checked_next_multiple_of(alignment);
        let offset = offset.ok_or(CompileError::Overflow("the memory"))?;
        let end = offset.checked_add(bytes).filter(|end| *end <= MAPPED);
        self.plan.arena = end.ok_or(CompileError::Overflow("the memory"))?;
        self.plan.buffers.push(Buffer { name, space, dtype, shape, instances, offset });
        Ok(BufferId(self.plan.buffers.len() as u32 - 1))
    }

    /// Weights that stay in their file.
    fn mapped(
        &mut self,
        name: String,
        format: Format,
        (shape, instances): (Vec<u64>, u64),
    ) -> Result<BufferId, CompileError> {
        let bytes = shape
            .iter()
            .try_fold(instances, |n, &d| n.checked_mul(d))
            .and_then(|n| format.bytes(n))
            .and_then(|n| n.checked_next_multiple_of(ALIGNMENT))
            .ok_or(CompileError::Overflow("a tensor"))?;
        let offset = MAPPED + self.plan.mapped;
        let end = offset.checked_add(bytes).filter(|end| *end <= i64::MAX as u64);
        self.plan.mapped = end.ok_or(CompileError::Overflow("the memory"))? - MAPPED;
        let (space, dtype) = (Space::Mapped, format.dtype);
        self.plan.buffers.push(Buffer { name, space, dtype, shape, instances, offset });
        Ok(BufferId(self.plan.buffers.len() as u32 - 1))
    }

    /// Storage of the weights of a buffer, by the names of its tensors and how they move. Matrices
    /// alone stay in files, where no step moves them: all else is small, and read by row kernels.
    fn storage(&self, shape: &[u64], names: &[String], recipes: &[Recipe]) -> Stored {
        let moves = self.options.train && self.options.steps && recipes.iter().any(Option::is_some);
        match shape.len() {
            0 | 1 => Stored::default(),
            _ if moves => Stored::default(),
            _ => self.options.formats.of(names.iter().map(String::as_str)),
        }
    }

    /// The type that a weight is stored in, where a port is bound to one.
    pub(crate) fn stored(&self, body: Option<usize>, port: &Port) -> DType {
        let is_weight = matches!(
            port.binding,
            Binding::Weight | Binding::PassWeight | Binding::TurnWeight | Binding::Buffer
        );
        if !is_weight {
            return DType::F32;
        }
        self.weight_of(body, &port.name).map_or(DType::F32, |id| self.plan.buffer(id).dtype)
    }

    /// The recipe, and whether adapters alone are trained.
    fn trains(&self) -> (&dreamc_dsl::spec::Train, bool) {
        (&self.spec.train, self.spec.model.adapt.is_some())
    }

    /// Whether biases of choices move by their counts. Those of a base under adapters stay, so that
    /// it is what its file says.
    pub(crate) fn balances(&self) -> bool {
        self.spec.model.adapt.is_none()
    }

    /// How a tensor moves, where it is trained.
    fn rule(&self, body: Option<usize>, name: &str, w: &Weight, shape: &[u64]) -> Recipe {
        let rule = recipe(self.trains(), name, w, shape)?;
        let Share { rate, eps, .. } = self.set.rates.share(body, &w.name);
        Some(Rule { decay: rule.decay / rate, factor: rule.factor * rate, eps, ..rule })
    }

    /// Weights, gradients and the optimizer's states, each kind one contiguous range in the same
    /// order; then the list of tensors. Stacks of experts that ranks share come after all else.
    pub(crate) fn parameters(&mut self, lowered: &Lowered) -> Result<(), CompileError> {
        let entries = self.entries(lowered)?;
        self.place_weights(&entries)?;
        let mut states: Vec<Kept> = vec![];
        if self.options.train {
            let trained: Vec<&Placed> =
                entries.iter().filter(|e| e.recipes.iter().any(Option::is_some)).collect();
            self.set.trained = trained.iter().map(|e| e.key.clone()).collect();
            self.place_gradients(&trained)?;
            if self.options.steps && !trained.is_empty() {
                let (stacks, others): (Vec<&Placed>, Vec<&Placed>) =
                    trained.into_iter().partition(|e| e.stack);
                self.moved(&others, &mut states)?;
                if !stacks.is_empty() {
                    self.moved_stacks(&stacks, &mut states)?;
                }
            }
        }
        self.list(lowered, &states)
    }

    /// All weights, in the order of their buffers.
    fn entries(&self, lowered: &Lowered) -> Result<Vec<Placed>, CompileError> {
        let architecture = self.architecture;
        let size = |w: &Weight| w.dims.iter().map(|&d| lowered.module.size(d)).collect::<Vec<u64>>();
        let mut entries = vec![];
        for w in &lowered.globals {
            let shape = size(w);
            let recipes = vec![self.rule(None, &w.name, w, &shape)];
            let stored = self.storage(&shape, std::slice::from_ref(&w.name), &recipes);
            let key = (None, w.name.clone());
            entries.push(Placed { key, shape, instances: 1, recipes, stored, stack: false });
        }
        let mut sets_of = vec![vec![]; architecture.bodies.len()];
        for (prefix, (b, set)) in architecture.prefixes() {
            sets_of[b].push((prefix, set as usize));
        }
        for (b, body) in architecture.bodies.iter().enumerate() {
            for w in &lowered.weights[b] {
                let shape = size(w);
                let (sets, passes) = (body.sets as usize, w.instances() as usize);
                let mut recipes = vec![None; sets * passes];
                for (prefix, set) in &sets_of[b] {
                    let own = self.rule(Some(b), &format!("{prefix}.{}", w.name), w, &shape);
                    recipes[set * passes..][..passes].fill(own);
                }
                let names: Vec<String> =
                    sets_of[b].iter().map(|(prefix, _)| format!("{prefix}.{}", w.name)).collect();
                let stored = self.storage(&shape, &names, &recipes);
                let (key, instances) = ((Some(b), w.name.clone()), recipes.len() as u64);
                let stack = self.is_stack(w) && stored.residence == Residence::Owned;
                entries.push(Placed { key, shape, instances, recipes, stored, stack });
            }
        }
        let team = self.options.experts;
        if let Some(e) = entries.iter().find(|e| e.stack && !e.shape[0].is_multiple_of(team)) {
            return Err(CompileError::Experts { tensor: e.key.1.clone(), experts: e.shape[0], team });
        }
        // Stacks come after all else that moves, and tensors that do not move come last. Equal
        // recipes side by side make few and large optimizer launches. Tensors moved as whole
        // matrices come after those moved number by number, which have more states, so that every
        // state begins with the first tensor.
        let rank = |e: &Placed| match e.recipes.iter().flatten().next() {
            Some(rule) => {
                let whole = u8::from(rule.matrix.is_some());
                (u8::from(e.stack), whole, rule.matrix, -rule.decay, rule.factor, rule.eps)
            }
            None => (2, 0, None, 0.0, 0.0, 1.0),
        };
        entries.sort_by(|x, y| rank(x).partial_cmp(&rank(y)).unwrap_or(std::cmp::Ordering::Equal));
        Ok(entries)
    }

    /// Whether ranks share the experts of a weight.
    fn is_stack(&self, w: &Weight) -> bool {
        let factor = w.part.adapter().is_some();
        self.options.experts > 1 && w.kind == TensorKind::Routed && w.dims.len() == 3 && !factor
    }

    /// Whether a weight is cut over all ranks.
    fn spreads(&self) -> bool {
        self.options.train && self.options.steps && self.options.shard.weights()
    }

    fn buffer_name(&self, (body, name): &WeightKey) -> String {
        match body {
            Some(b) => format!("{}.{name}", self.architecture.bodies[*b].name),
            None => name.clone(),
        }
    }

    /// Bytes that buffers of weights and gradients are multiples of: offsets of states are in
    /// proportion to theirs, and aligned.
    fn wide(&self) -> u64 {
        ALIGNMENT * DType::F32.bytes() / storage(&self.spec.train).bytes()
    }

    fn place_weights(&mut self, entries: &[Placed]) -> Result<(), CompileError> {
        let (spreads, wide) = (self.spreads(), self.wide());
        let mut flat = 0;
        for e in entries {
            let (name, dims) = (self.buffer_name(&e.key), (e.shape.clone(), e.instances));
            let cut = spreads && e.recipes.iter().any(Option::is_some);
            let dtype = e.stored.format.dtype;
            let id = match e.stored.residence {
                Residence::Owned if e.stack => {
                    self.stack_buffer(name, (Space::Weights, dtype), dims, wide)?
                }
                Residence::Owned if cut => self.spread_buffer(name, dims, wide, &mut flat)?,
                Residence::Owned => self.buffer_at(name, Space::Weights, dtype, dims, wide)?,
                Residence::Mapped => self.mapped(name, e.stored.format, dims)?,
            };
            self.set.weights.insert(e.key.clone(), id);
        }
        Ok(())
    }

    fn place_gradients(&mut self, trained: &[&Placed]) -> Result<(), CompileError> {
        let (spreads, wide) = (self.spreads(), self.wide());
        let mut flat = 0;
        for e in trained {
            let (name, dims) = (format!("d.{}", self.buffer_name(&e.key)), (e.shape.clone(), e.instances));
            let id = match (e.stack, spreads) {
                (true, _) => self.stack_buffer(name, (Space::Gradients, DType::F32), dims, wide)?,
                (false, true) => self.spread_buffer(name, dims, wide, &mut flat)?,
                (false, false) => self.buffer_at(name, Space::Gradients, DType::F32, dims, wide)?,
            };
            self.set.gradients.insert((e.key.0, cotangent(&e.key.1)), id);
        }
        Ok(())
    }

    /// The shape that a rank has of an entry: its experts, of a stack.
    fn own_shape(&self, e: &Placed) -> Vec<u64> {
        let mut shape = e.shape.clone();
        if e.stack {
            shape[0] /= self.options.experts;
        }
        shape
    }

    /// The first byte of the gradient of an entry, of what this rank has.
    fn gradient_of(&self, e: &Placed) -> u64 {
        let id = self.own(self.set.gradients[&(e.key.0, cotangent(&e.key.1))]);
        self.plan.buffer(id).offset
    }

    /// Runs of equal recipes over instances and buffers, in bytes from the first gradient on.
    fn runs(&self, trained: &[&Placed]) -> Vec<Run> {
        let base = trained.first().map_or(0, |e| self.gradient_of(e));
        let mut runs: Vec<Run> = vec![];
        for e in trained {
            let start = self.gradient_of(e) - base;
            let one = self.own_shape(e).iter().product::<u64>() * DType::F32.bytes();
            for (i, r) in e.recipes.iter().enumerate() {
                let (from, to) = (start + i as u64 * one, start + (i as u64 + 1) * one);
                match runs.last_mut() {
                    // Numbers may have room between them, matrices not.
                    Some((last, _, end))
                        if last == r && (*end == from || r.is_none_or(|r| r.matrix.is_none())) =>
                    {
                        *end = to;
                    }
                    _ => runs.push((*r, from, to)),
                }
            }
        }
        runs
    }

    /// The optimizer's states of weights that are no stacks, and the ranges in which they move.
    fn moved(&mut self, trained: &[&Placed], states: &mut Vec<Kept>) -> Result<(), CompileError> {
        let (spreads, cuts_states) = (self.spreads(), self.options.shard.states());
        let runs = self.runs(trained);
        let train = &self.spec.train;
        let number = |rule: &Rule| optimizer(train, rule).states().len() as u64;
        self.set.cuts = cuts(&runs, &number, self.options.ranks);
        let total = runs.last().map_or(0, |r| r.2);
        let kept = match self.part() {
            _ if !cuts_states => 0..total,
            Some(part) => part.start * DType::F32.bytes()..part.end * DType::F32.bytes(),
            None => return Err(CompileError::Unsupported("a part for a rank that there is not")),
        };
        let own = if cuts_states { Some(kept.clone()) } else { None };
        let places = self.states_of(trained, own, states)?;
        let first = trained.first();
        let weight = first.and_then(|e| self.set.weights.get(&e.key));
        let mut weights = weight.map_or(self.plan.arena, |id| self.plan.buffer(*id).offset);
        let mut base = first.map_or(self.plan.arena, |e| self.gradient_of(e));
        let mut elements = total / DType::F32.bytes();
        if spreads {
            (weights, base) = self.spread(kept.start / 4..kept.end / 4)?;
            elements = (kept.end - kept.start) / DType::F32.bytes();
        }
        let all = self.alias("gradients".into(), base, elements);
        self.bound.insert(Key { slot: Slot::Gradients, scope: 0, entry: None, depth: None }, all);
        if self.options.shard == Shard::Optimizer {
            self.set.trained_weights = Some(self.alias("weights.trained".into(), weights, elements));
        }
        // Of weights that are cut a rank has its part alone, and of states.
        let origins = (if spreads { kept.start } else { 0 }, kept.start);
        // Frozen gradients are zeroed on every rank, so that no norm has them.
        let moved = |recipe: &Recipe, at: u64| match recipe.is_some() || spreads {
            true => at.clamp(kept.start, kept.end),
            false => at,
        };
        let runs =
            runs.into_iter().map(|(recipe, from, to)| (recipe, moved(&recipe, from), moved(&recipe, to)));
        self.ranges(runs.collect(), Begins { bases: (weights, base), states: &places, origins }, "");
        Ok(())
    }

    /// The same of stacks; a rank has only its own experts of them.
    fn moved_stacks(&mut self, trained: &[&Placed], states: &mut Vec<Kept>) -> Result<(), CompileError> {
        let runs = self.runs(trained);
        let places = self.states_of(trained, None, states)?;
        let (weight, base) = (self.set.weights[&trained[0].key], self.gradient_of(trained[0]));
        let weights = self.plan.buffer(self.own(weight)).offset;
        let elements = runs.last().map_or(0, |r| r.2) / DType::F32.bytes();
        self.set.stack_gradients = Some(self.alias("gradients.experts".into(), base, elements));
        self.ranges(runs, Begins { bases: (weights, base), states: &places, origins: (0, 0) }, "experts.");
        Ok(())
    }

    /// Buffers of the optimizer's states of entries, of a rank's part alone where there is one:
    /// where each state begins, by its name.
    fn states_of(
        &mut self,
        trained: &[&Placed],
        part: Option<std::ops::Range<u64>>,
        states: &mut Vec<Kept>,
    ) -> Result<Vec<(&'static str, u64)>, CompileError> {
        let stored = storage(&self.spec.train);
        let train = &self.spec.train;
        let names_of = |e: &Placed| {
            let rule = e.recipes.iter().flatten().next();
            rule.map_or(&[][..], |rule| optimizer(train, rule).states())
        };
        let base = trained.first().map_or(0, |e| self.gradient_of(e));
        let prefixes: IndexSet<&'static str> = trained.iter().flat_map(|e| names_of(e)).copied().collect();
        let mut places = vec![];
        for prefix in prefixes {
            let with: Vec<&Placed> =
                trained.iter().filter(|e| names_of(e).contains(&prefix)).copied().collect();
            let mut of = IndexMap::new();
            let Some(part) = &part else {
                for e in with {
                    let named = format!("{prefix}.{}", self.buffer_name(&e.key));
                    let dims = (self.own_shape(e), e.instances);
                    let id = self.buffer_at(named, Space::Optimizer, stored, dims, ALIGNMENT)?;
                    of.insert(e.key.clone(), id);
                }
                places.push((prefix, of.values().next().map_or(0, |id| self.plan.buffer(*id).offset)));
                states.push(Kept { name: prefix, of });
                continue;
            };
            let spans = with.iter().map(|e| {
                let start = self.gradient_of(e) - base;
                let bytes = e.shape.iter().product::<u64>() * e.instances * DType::F32.bytes();
                let within = |at: u64| at.clamp(part.start, part.end) / DType::F32.bytes();
                (within(start), within(start + bytes))
            });
            let spans: Vec<(u64, u64)> = spans.collect();
            // The part of a rank is one buffer, in which tensors begin anywhere.
            let first = part.start / DType::F32.bytes();
            let numbers = spans.last().map_or(0, |span| span.1.saturating_sub(first));
            let all = self.buffer(format!("{prefix}.part"), Space::Optimizer, stored, vec![numbers], 1)?;
            let place = self.plan.buffer(all).offset;
            for (e, (from, to)) in with.iter().zip(spans) {
                let at = place + (from - first) * stored.bytes();
                let named = format!("{prefix}.{}", self.buffer_name(&e.key));
                let id = self.alias(named, at, to - from);
                self.plan.buffers[id.0 as usize].dtype = stored;
                of.insert(e.key.clone(), id);
            }
            places.push((prefix, place));
            states.push(Kept { name: prefix, of });
        }
        Ok(places)
    }

    /// Ranges of the optimizer, of runs in bytes.
    fn ranges(&mut self, runs: Vec<Run>, Begins { bases, states, origins }: Begins, of: &str) {
        let (train, stored) = (&self.spec.train, storage(&self.spec.train));
        for (k, (recipe, from, to)) in runs.into_iter().enumerate() {
            if from == to {
                continue;
            }
            let elements = (to - from) / DType::F32.bytes();
            let has = recipe.map_or(&[][..], |rule| optimizer(train, &rule).states());
            let mut range = |name: &str, base, from: u64, dtype: DType| {
                let at = base + from / DType::F32.bytes() * dtype.bytes();
                let id = self.alias(format!("{name}.{of}range{k}"), at, elements);
                self.plan.buffers[id.0 as usize].dtype = dtype;
                id
            };
            let weight = range("weights", bases.0, from - origins.0, DType::F32);
            let gradient = range("gradients", bases.1, from - origins.0, DType::F32);
            let inside = from.saturating_sub(origins.1);
            let own = states.iter().filter(|(name, _)| has.contains(name));
            let states = own.map(|&(name, base)| range(name, base, inside, stored)).collect();
            self.set.ranges.push(Range { weight, gradient, states, elements, recipe });
        }
    }

    /// The part of the trained numbers that is this rank's.
    pub(crate) fn part(&self) -> Option<std::ops::Range<u64>> {
        match self.set.cuts.get(self.options.rank as usize..) {
            Some([from, to, ..]) => Some(*from..*to),
            Some(_) | None => None,
        }
    }

    /// Which numbers of a tensor have states in this plan, and where in the states' buffers the
    /// first of them is.
    fn kept(
        &self,
        tensor: BufferId,
        gradient: Option<BufferId>,
        instance: u64,
        elements: u64,
    ) -> (std::ops::Range<u64>, u64) {
        let base = self.set.gradients.values().next().map(|id| self.plan.buffer(*id).offset);
        if let Some(own) = self.own_stack(tensor) {
            let each = elements / self.options.experts;
            let member = own.member();
            return (member * each..(member + 1) * each, instance * each);
        }
        let (Some(gradient), Some(base)) = (gradient.map(|id| self.plan.buffer(id)), base) else {
            return (0..elements, 0);
        };
        let begins = (gradient.offset - base) / DType::F32.bytes();
        let own = begins + instance * gradient.elements();
        let all = self.part().filter(|_| self.options.shard.states()).unwrap_or(0..u64::MAX);
        let (from, to) = (all.start.clamp(own, own + elements), all.end.clamp(own, own + elements));
        let first = if from < to { from - begins.max(all.start) } else { 0 };
        (from - own..to - own, first)
    }

    pub(crate) fn alias(&mut self, name: String, offset: u64, elements: u64) -> BufferId {
        self.plan.buffers.push(Buffer {
            name,
            space: Space::Alias,
            dtype: DType::F32,
            shape: vec![elements],
            instances: 1,
            offset,
        });
        BufferId(self.plan.buffers.len() as u32 - 1)
    }

    /// The tensors in checkpoint order: embedding, layers, final norm and head.
    pub(crate) fn list(&mut self, lowered: &Lowered, states: &[Kept]) -> Result<(), CompileError> {
        let size = |w: &Weight| w.shape(&lowered.module);
        let mut order: Vec<(Option<usize>, u64, String, &Weight, Init)> = vec![];
        let (first, rest): (Vec<_>, Vec<_>) =
            lowered.globals.iter().partition(|w| w.kind == TensorKind::Embedding);
        order.extend(first.iter().map(|w| (None, 0, w.name.clone(), *w, w.init)));
        for (i, (prefix, (b, set))) in self.architecture.prefixes().enumerate() {
            order.extend(lowered.weights[b].iter().map(|w| {
                let init = self.architecture.init_of(i, w.init);
                (Some(b), set, format!("{prefix}.{}", w.name), w, init)
            }));
        }
        order.extend(rest.iter().map(|w| (None, 0, w.name.clone(), *w, w.init)));
        for (body, instance, name, w, init) in order {
            let init = self.set.rates.begins(body, w, self.spec.model.norm.unit_offset, init);
            let key = (body, w.name.clone());
            let counts = match &w.balancing {
                Some(balancing) if self.options.train => {
                    let bias = self.set.weights[&key];
                    let key = (body, balancing.counts.clone());
                    if !self.set.counts.contains_key(&key) {
                        let (prefix, sets) = body.map_or((String::new(), 1), |b| {
                            let b = &self.architecture.bodies[b];
                            (format!("{}.", b.name), b.sets)
                        });
                        let name = format!("{prefix}{}", balancing.counts);
                        let counts = self.buffer(name, Space::State, DType::F32, size(w), sets)?;
                        self.set.counts.insert(key.clone(), Counted { counts, bias, law: balancing.law });
                    }
                    self.balances().then_some(self.set.counts[&key].counts)
                }
                _ => None,
            };
            let trained = recipe(self.trains(), &name, w, &size(w)).is_some();
            let states_of = |key: &WeightKey, trained: bool| {
                let of = states.iter().filter(|_| trained);
                of.filter_map(|kept| Some((kept.name, *kept.of.get(key)?))).collect()
            };
            let all = self.set.gradients.get(&(key.0, cotangent(&key.1))).copied();
            let gradient = all.filter(|_| trained);
            let instance = instance * w.instances();
            // Frozen tensors among trained ones are cut with them.
            let cut = self.is_cut(self.set.weights[&key]);
            let place = if cut { all } else { gradient };
            let weight = self.set.weights[&key];
            let (kept, first_kept) = self.kept(weight, place, instance, size(w).iter().product());
            self.set.tensors.push(Tensor {
                shape: size(w),
                kind: w.kind,
                init,
                weight,
                gradient,
                states: states_of(&key, trained),
                counts,
                instance,
                kept,
                first_kept,
                cut,
                owners: self.own_stack(weight).map_or(1, |owners| owners.team),
                name,
                owner: w.owner,
                part: w.part,
            });
        }
        Ok(())
    }

    /// The buffer that holds something, made where it is new.
    pub(crate) fn bind(&mut self, wanted: Wanted) -> Result<BufferId, CompileError> {
        let Wanted { slot, name, space, dtype, shape, instances } = wanted;
        let own = match slot {
            // The places of the caches are the same for all programs, and so is what is prepared
            // and kept.
            Slot::End(End::Input(Input::KeyPositions)) => false,
            Slot::Stream | Slot::State(_) | Slot::End(_) => true,
            Slot::Cotangent
            | Slot::NextCotangent
            | Slot::Saved(..)
            | Slot::Prepared(..)
            | Slot::Observed(_)
            | Slot::Patched(_)
            | Slot::OfBody(..)
            | Slot::OfComponent(_)
            | Slot::StateCotangent(_)
            | Slot::Again(..)
            | Slot::Gradients => false,
        };
        let scope = self.scope_of(&slot);
        let name = if own { format!("{}{name}", self.now.entry.prefix()) } else { name };
        let name = if scope > 0 { format!("{}.{name}", self.now.name) } else { name };
        let key = |depth| Key { slot: slot.clone(), scope, entry: own.then_some(self.now.entry), depth };
        let fits = |b: &Buffer| b.shape == shape && b.dtype == dtype && b.instances >= instances;
        let (mut key, mut name) = (key(None), name);
        if let Some(&id) = self.bound.get(&key) {
            if fits(self.plan.buffer(id)) {
                return Ok(id);
            }
            // A program of another depth may keep other values under the same number.
            let depth = self.architecture.depth;
            (key.depth, name) = (Some(depth), format!("{name}@{depth}"));
            if let Some(&id) = self.bound.get(&key) {
                if fits(self.plan.buffer(id)) {
                    return Ok(id);
                }
                return Err(CompileError::Schedule(format!("two values of different sizes in `{name}`")));
            }
        }
        let id = self.buffer(name, space, dtype, shape, instances)?;
        self.now.own += self.plan.buffer(id).bytes();
        self.bound.insert(key, id);
        Ok(id)
    }

    /// Whose a buffer is: what is made of weights alone serves all uses.
    fn scope_of(&self, slot: &Slot) -> usize {
        if matches!(slot, Slot::Prepared(..) | Slot::Gradients) { 0 } else { self.now.number }
    }

    /// A buffer that is bound already.
    pub(crate) fn bound(&self, slot: Slot) -> Option<BufferId> {
        let key = Key { scope: self.scope_of(&slot), slot, entry: None, depth: None };
        self.bound.get(&key).copied()
    }

    /// A buffer of what host and programs exchange.
    pub(crate) fn end(&mut self, end: End, dtype: DType, shape: Vec<u64>) -> Result<BufferId, CompileError> {
        self.bind(Wanted::end(end, dtype, &shape))
    }

    /// Temporaries of a scheduled function, placed where their lifetimes do not overlap.
    pub(crate) fn place_temps(&mut self, name: &str, s: &Scheduled) -> Vec<BufferId> {
        let values = s.temps.iter().map(|t| (t.bytes, t.first..t.last + 1));
        let (offsets, end) = share(&values.collect::<Vec<_>>());
        self.temporaries.bytes = self.temporaries.bytes.max(end);
        s.temps
            .iter()
            .enumerate()
            .map(|(i, t)| {
                self.plan.buffers.push(Buffer {
                    name: format!("{name}.t{i}"),
                    space: Space::Temporary,
                    dtype: t.dtype,
                    shape: vec![t.bytes / t.dtype.bytes() * t.dtype.unit()],
                    instances: 1,
                    offset: offsets[i],
                });
                let id = BufferId(self.plan.buffers.len() as u32 - 1);
                self.temporaries.all.push(id);
                id
            })
            .collect()
    }
}

/// Where values begin that share memory, in bytes, and where it ends: each has a size and a
/// lifetime, and those that live together do not overlap. The largest find their places first.
pub(crate) fn share(values: &[(u64, std::ops::Range<usize>)]) -> (Vec<u64>, u64) {
    let size = |i: usize| values[i].0.next_multiple_of(ALIGNMENT);
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(values[i].0), i));
    let (mut offsets, mut end) = (vec![0u64; values.len()], 0);
    for (placed, &i) in order.iter().enumerate() {
        let own = &values[i].1;
        let mut taken: Vec<(u64, u64)> = order[..placed]
            .iter()
            .filter(|&&j| values[j].1.start < own.end && own.start < values[j].1.end)
            .map(|&j| (offsets[j], offsets[j] + size(j)))
            .collect();
        taken.sort();
        let mut at = 0;
        for (from, to) in taken {
            if at + size(i) <= from {
                break;
            }
            at = at.max(to);
        }
        offsets[i] = at;
        end = end.max(at + size(i));
    }
    (offsets, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_as_many_states_and_whole_matrices() {
        let numbers = Rule { decay: 0.0, factor: 1.0, eps: 1.0, matrix: None };
        let matrices = Rule { matrix: Some([5, 7]), ..numbers };
        let states = |rule: &Rule| if rule.matrix.is_some() { 1 } else { 2 };
        // 1000 numbers with two states, 100 that are frozen, 60 matrices of 35 with one.
        let runs = [(Some(numbers), 0, 4000), (None, 4000, 4400), (Some(matrices), 4400, 4400 + 60 * 35 * 4)];
        let of = |ranks| cuts(&runs, &states, ranks);
        assert_eq!(of(1), [0, 3200]);
        // Half of 4100 states are 1000 numbers and 50 of the matrices' states: one matrix, nearly.
        assert_eq!(of(2), [0, 1100 + 35, 3200]);
        let four = of(4);
        assert_eq!(four[1], 512 / GRAIN * GRAIN);
        assert!(four[2..4].iter().all(|cut| (cut - 1100) % 35 == 0), "{four:?}");
        // More ranks than there is to cut: some have nothing.
        let many = of(10_000);
        assert!(many.is_sorted() && many.len() == 10_001 && many[10_000] == 3200);
    }
}
