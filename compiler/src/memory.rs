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
use crate::ir::{Binding, DType, Input, Port};
use crate::lower::{Lowered, Weight};
use crate::optim::{Rule, optimizer, storage};
use crate::program::{ALIGNMENT, Buffer, BufferId, Space};
use crate::recipe::recipe;
use crate::schedule::Scheduled;
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
    /// The stream before every application, and behind the last.
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
    /// A state of a body.
    OfBody(usize, String),
    /// A state with an instance for each application of a component.
    OfComponent(String),
    /// A state that all bodies share, and its cotangent.
    State(String),
    StateCotangent(String),
    /// Values that host and programs exchange.
    End(End),
    /// All gradients.
    Gradients,
}

/// A buffer's meaning: what it holds, for which entry where each has one of its own, at which depth
/// where others differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) slot: Slot,
    /// Of which use; what is made of weights alone is the first one's.
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

/// The buffers of the optimizer's states, by the state's name.
type States = Vec<(&'static str, IndexMap<(Option<usize>, String), BufferId>)>;

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

    /// A buffer whose size is a multiple of so many bytes.
    fn buffer_at(
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
            .and_then(|n| n.checked_mul(dtype.bytes()))
            .and_then(|n| n.checked_next_multiple_of(alignment))
            .ok_or(CompileError::Overflow("a tensor"))?;
        let offset = self.plan.arena.checked_next_multiple_of(alignment);
        let offset = offset.ok_or(CompileError::Overflow("the memory"))?;
        self.plan.arena = offset.checked_add(bytes).ok_or(CompileError::Overflow("the memory"))?;
        self.plan.buffers.push(Buffer { name, space, dtype, shape, instances, offset });
        Ok(BufferId(self.plan.buffers.len() as u32 - 1))
    }

    /// Weights, gradients and the optimizer's states, each kind one contiguous range in the same
    /// order; then the list of tensors.
    pub(crate) fn parameters(&mut self, lowered: &Lowered) -> Result<(), CompileError> {
        struct Entry {
            key: (Option<usize>, String),
            shape: Vec<u64>,
            instances: u64,
            recipes: Vec<Recipe>,
        }
        let architecture = self.architecture;
        let size = |w: &Weight| w.dims.iter().map(|&d| lowered.module.size(d)).collect::<Vec<u64>>();
        let mut entries = vec![];
        for w in &lowered.globals {
            let shape = size(w);
            let recipes = vec![recipe(&self.spec.train, &w.name, w, &shape)];
            entries.push(Entry { key: (None, w.name.clone()), shape, instances: 1, recipes });
        }
        for (b, body) in architecture.bodies.iter().enumerate() {
            for w in &lowered.weights[b] {
                let shape = size(w);
                let (sets, passes) = (body.sets as usize, w.instances() as usize);
                let mut recipes = vec![None; sets * passes];
                for (prefix, (owner, set)) in architecture.prefixes() {
                    if owner == b {
                        let name = format!("{prefix}.{}", w.name);
                        let own = recipe(&self.spec.train, &name, w, &shape);
                        recipes[set as usize * passes..][..passes].fill(own);
                    }
                }
                let (key, instances) = ((Some(b), w.name.clone()), recipes.len() as u64);
                entries.push(Entry { key, shape, instances, recipes });
            }
        }
        // Equal recipes side by side make few and large optimizer launches. Whole matrices come
        // behind what moves number by number, which has more states, so that every state begins
        // with the first tensor; untrained tensors come last.
        let rank = |e: &Entry| match e.recipes.iter().flatten().next() {
            Some(rule) => (u8::from(rule.matrix.is_some()), rule.matrix, -rule.decay, rule.factor),
            None => (2, None, 0.0, 0.0),
        };
        entries.sort_by(|x, y| rank(x).partial_cmp(&rank(y)).unwrap_or(std::cmp::Ordering::Equal));
        let name = |key: &(Option<usize>, String)| match key.0 {
            Some(b) => format!("{}.{}", architecture.bodies[b].name, key.1),
            None => key.1.clone(),
        };
        let stored = storage(&self.spec.train);
        // Offsets of states are in proportion to those of weights and gradients, and aligned.
        let wide = ALIGNMENT * DType::F32.bytes() / stored.bytes();
        for e in &entries {
            let dims = (e.shape.clone(), e.instances);
            let id = self.buffer_at(name(&e.key), Space::Weights, DType::F32, dims, wide)?;
            self.weights.insert(e.key.clone(), id);
        }
        let mut states: States = vec![];
        if self.options.train {
            let trained: Vec<&Entry> =
                entries.iter().filter(|e| e.recipes.iter().any(Option::is_some)).collect();
            self.trained = trained.iter().map(|e| e.key.clone()).collect();
            for e in &trained {
                let (name, dims) = (format!("d.{}", name(&e.key)), (e.shape.clone(), e.instances));
                let id = self.buffer_at(name, Space::Gradients, DType::F32, dims, wide)?;
                self.gradients.insert((e.key.0, cotangent(&e.key.1)), id);
            }
            let states_of = |e: &Entry| {
                let rule = e.recipes.iter().flatten().next();
                rule.map_or(&[][..], |rule| optimizer(&self.spec.train, rule).states())
            };
            let prefixes: IndexSet<&'static str> =
                trained.iter().flat_map(|e| states_of(e)).copied().collect();
            for prefix in prefixes {
                let mut of = IndexMap::new();
                for e in trained.iter().filter(|e| states_of(e).contains(&prefix)) {
                    let id = self.buffer(
                        format!("{prefix}.{}", name(&e.key)),
                        Space::Optimizer,
                        stored,
                        e.shape.clone(),
                        e.instances,
                    )?;
                    of.insert(e.key.clone(), id);
                }
                states.push((prefix, of));
            }
            // Runs of equal recipes over instances and buffers.
            let mut runs: Vec<(Recipe, u64, u64)> = vec![];
            let Some(base) = self.gradients.values().next().map(|id| self.plan.buffer(*id).offset) else {
                return self.list(lowered, &states);
            };
            for e in &trained {
                let start = self.plan.buffer(self.gradients[&(e.key.0, cotangent(&e.key.1))]).offset - base;
                let one = e.shape.iter().product::<u64>() * DType::F32.bytes();
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
            let first = |map: &IndexMap<(Option<usize>, String), BufferId>| {
                map.get(&trained[0].key).map(|id| self.plan.buffer(*id).offset).unwrap_or(0)
            };
            let weights = first(&self.weights);
            let bases: Vec<(&str, u64)> = states.iter().map(|(name, of)| (*name, first(of))).collect();
            let total = runs.last().map_or(0, |r| r.2);
            let all = self.alias("gradients".into(), base, total / 4);
            self.bound.insert(Key { slot: Slot::Gradients, scope: 0, entry: None, depth: None }, all);
            for (k, (recipe, from, to)) in runs.into_iter().enumerate() {
                let elements = (to - from) / 4;
                let kept = recipe.map_or(&[][..], |rule| optimizer(&self.spec.train, &rule).states());
                let mut range = |name: &str, base, dtype: DType| {
                    let at = base + from / DType::F32.bytes() * dtype.bytes();
                    let id = self.alias(format!("{name}.range{k}"), at, elements);
                    self.plan.buffers[id.0 as usize].dtype = dtype;
                    id
                };
                let weight = range("weights", weights, DType::F32);
                let gradient = range("gradients", base, DType::F32);
                let states = bases.iter().filter(|(name, _)| kept.contains(name));
                let states = states.map(|&(name, base)| range(name, base, stored)).collect();
                self.ranges.push(Range { weight, gradient, states, elements, recipe });
            }
        }
        self.list(lowered, &states)
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
    pub(crate) fn list(&mut self, lowered: &Lowered, states: &States) -> Result<(), CompileError> {
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
            let key = (body, w.name.clone());
            let counts = match &w.balancing {
                Some(balancing) if self.options.train => {
                    let bias = self.weights[&key];
                    let key = (body, balancing.counts.clone());
                    if !self.counts.contains_key(&key) {
                        let (prefix, sets) = body.map_or((String::new(), 1), |b| {
                            let b = &self.architecture.bodies[b];
                            (format!("{}.", b.name), b.sets)
                        });
                        let name = format!("{prefix}{}", balancing.counts);
                        let counts = self.buffer(name, Space::State, DType::F32, size(w), sets)?;
                        self.counts.insert(key.clone(), Counted { counts, bias, law: balancing.law });
                    }
                    Some(self.counts[&key].counts)
                }
                _ => None,
            };
            let trained = recipe(&self.spec.train, &name, w, &size(w)).is_some();
            let states_of = |key: &(Option<usize>, String), trained: bool| {
                let of = states.iter().filter(|_| trained);
                of.filter_map(|(name, of)| Some((*name, *of.get(key)?))).collect()
            };
            self.tensors.push(Tensor {
                shape: size(w),
                kind: w.kind,
                init,
                weight: self.weights[&key],
                gradient: self.gradients.get(&(key.0, cotangent(&key.1))).copied().filter(|_| trained),
                states: states_of(&key, trained),
                counts,
                instance: instance * w.instances(),
                name,
                owner: w.owner,
                part: w.part,
            });
        }
        Ok(())
    }

    /// The buffer that holds something, made where it is new.
    pub(crate) fn bind(
        &mut self,
        slot: Slot,
        (name, space, dtype): (String, Space, DType),
        shape: Vec<u64>,
        instances: u64,
    ) -> Result<BufferId, CompileError> {
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
            | Slot::OfBody(..)
            | Slot::OfComponent(_)
            | Slot::StateCotangent(_)
            | Slot::Gradients => false,
        };
        let scope = self.scope_of(&slot);
        let name = if own { format!("{}{name}", self.entry.prefix()) } else { name };
        let name = if scope > 0 { format!("{}{name}", self.scope.1) } else { name };
        let key = |depth| Key { slot: slot.clone(), scope, entry: own.then_some(self.entry), depth };
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
        self.own += self.plan.buffer(id).bytes();
        self.bound.insert(key, id);
        Ok(id)
    }

    /// Whose a buffer is: what is made of weights alone serves all uses.
    fn scope_of(&self, slot: &Slot) -> usize {
        if matches!(slot, Slot::Prepared(..) | Slot::Gradients) { 0 } else { self.scope.0 }
    }

    /// A buffer that is bound already.
    pub(crate) fn bound(&self, slot: Slot) -> Option<BufferId> {
        let key = Key { scope: self.scope_of(&slot), slot, entry: None, depth: None };
        self.bound.get(&key).copied()
    }

    /// A buffer of what host and programs exchange.
    pub(crate) fn end(&mut self, end: End, dtype: DType, shape: Vec<u64>) -> Result<BufferId, CompileError> {
        let shape = if shape.is_empty() { vec![1] } else { shape };
        self.bind(Slot::End(end), (end.name().into(), Space::Io, dtype), shape, 1)
    }

    /// Temporaries of a scheduled function, placed where their lifetimes do not overlap.
    pub(crate) fn place_temps(&mut self, name: &str, s: &Scheduled) -> Vec<BufferId> {
        let mut order: Vec<usize> = (0..s.temps.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(s.temps[i].bytes), i));
        let mut offsets = vec![0u64; s.temps.len()];
        let mut placed: Vec<usize> = vec![];
        for &i in &order {
            let t = s.temps[i];
            let size = t.bytes.next_multiple_of(ALIGNMENT);
            let mut taken: Vec<(u64, u64)> = placed
                .iter()
                .filter(|&&j| s.temps[j].first <= t.last && t.first <= s.temps[j].last)
                .map(|&j| (offsets[j], offsets[j] + s.temps[j].bytes.next_multiple_of(ALIGNMENT)))
                .collect();
            taken.sort();
            let mut at = 0;
            for (from, to) in taken {
                if at + size <= from {
                    break;
                }
                at = at.max(to);
            }
            offsets[i] = at;
            self.temporary = self.temporary.max(at + size);
            placed.push(i);
        }
        s.temps
            .iter()
            .enumerate()
            .map(|(i, t)| {
                self.plan.buffers.push(Buffer {
                    name: format!("{name}.t{i}"),
                    space: Space::Temporary,
                    dtype: t.dtype,
                    shape: vec![t.bytes / t.dtype.bytes()],
                    instances: 1,
                    offset: offsets[i],
                });
                let id = BufferId(self.plan.buffers.len() as u32 - 1);
                self.temporaries.push(id);
                id
            })
            .collect()
    }
}
