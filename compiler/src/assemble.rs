//! Programs: the calls of scheduled functions, in loops, on the buffers that their ports are bound
//! to.
//!
//! *In*: the functions of a model, scheduled. *Out*: the programs of a [`Plan`]. *Promise*: which
//! buffer an operand is in follows from the [`Binding`] of its port alone; which instance, from the
//! application and its loops.

use crate::CompileError;
use crate::architecture::{Apply, Architecture, Block, Leaving, Work};
use crate::bind::{Owner, Rows};
use crate::compiled::{
    Compiled, Entry, Kept, Observation, Observed, Per, SequenceState, StateBuffer, Tensor,
};
use crate::forms::{Forms, ModelForms};
use crate::ir::{Binding, DType, Function, Input, Lifetime, Module, Output, Port};
use crate::lower::{Lowered, State, attention, choice};
use crate::memory::{Key, Slot, Temporaries, WeightSet, cotangent};
use crate::pipeline::Options;
use crate::probe::{Inserted, Probed};
use crate::program::{
    Affine, BufferId, Kernel, KernelId, Launch, Operand, Plan, Program, ProgramKey, Space, Step, Task, kernel,
};
use crate::resolve::{self, Asked, Held, Resolver, Site, Wanted, WeightKey};
use crate::schedule::{Bind, LocalOperand, Place, Scheduled, schedule};
use crate::spread::Spread;
use crate::teach::{Lesson, Taught};
use crate::transfer::Rates;
use dreamc_dsl::spec::{Exit, Shard, Spec};
use indexmap::IndexMap;
use rustc_hash::FxHashSet;

/// Puts programs and buffers together.
pub(crate) struct Assembly<'a> {
    pub(crate) options: Options,
    pub(crate) architecture: &'a Architecture,
    pub(crate) plan: Plan,
    /// Kernels already in the plan.
    pub(crate) kernels: std::collections::HashMap<Kernel, KernelId>,
    pub(crate) spec: &'a Spec,
    /// The weights, and all that is as large as they are.
    pub(crate) set: WeightSet,
    /// Buffers that are made when something is first bound to them.
    pub(crate) bound: IndexMap<Key, BufferId>,
    /// Buffers of what decoding keeps of sequences.
    pub(crate) sequence: IndexMap<BufferId, Lifetime>,
    pub(crate) temporaries: Temporaries,
    /// The states of layers, and what layers leave for the host, by name.
    pub(crate) states: IndexMap<String, State>,
    pub(crate) left: IndexMap<String, (Owner, Observation)>,
    /// Attentions of an application that drop weights, at the most.
    pub(crate) draws: u64,
    /// The use whose programs are put together.
    pub(crate) now: UseUnderWay,
    /// The uses assembled so far.
    pub(crate) uses: Vec<Use>,
    /// Weights that are cut over the ranks.
    pub(crate) spread: Option<Spread>,
}

/// The use of the model whose programs are put together.
#[derive(Default)]
pub(crate) struct UseUnderWay {
    /// Which one, and its name, with which those of its buffers begin.
    pub(crate) number: usize,
    pub(crate) name: &'static str,
    /// The program over caches, where there are several.
    pub(crate) entry: Entry,
    /// Bytes of buffers that it has alone.
    pub(crate) own: u64,
    /// Values that its bodies keep, with the bodies' numbers.
    pub(crate) kept: Vec<(usize, Kept)>,
    /// Values that it looks at or changes.
    pub(crate) inserted: Vec<Inserted>,
    /// Values that a teacher teaches.
    pub(crate) lessons: Vec<Lesson>,
}

/// A use of the model that has been put together.
pub(crate) struct Use {
    of: &'static str,
    trains: bool,
    observed: Vec<Observed>,
    probed: Vec<Probed>,
    taught: Vec<Taught>,
    sequence: Vec<SequenceState>,
    places: Option<u64>,
    own: u64,
    kept: Vec<Kept>,
}

/// The work for each application.
pub(crate) type Call<'c, 'a> =
    &'c mut dyn FnMut(&mut Assembly<'a>, &Apply, &mut Vec<Step>) -> Result<(), CompileError>;

impl<'a> Assembly<'a> {
    pub(crate) fn new(
        spec: &'a Spec,
        options: &Options,
        architecture: &'a Architecture,
        lowered: &Lowered,
    ) -> Result<Self, CompileError> {
        let mut a = Assembly {
            options: options.clone(),
            architecture,
            plan: Plan::default(),
            kernels: std::collections::HashMap::new(),
            spec,
            set: WeightSet::new(Rates::of(spec, architecture, lowered)?),
            bound: IndexMap::new(),
            sequence: IndexMap::new(),
            temporaries: Temporaries::default(),
            states: IndexMap::new(),
            left: IndexMap::new(),
            draws: draws(lowered),
            now: UseUnderWay::default(),
            uses: vec![],
            spread: None,
        };
        a.know(lowered);
        for (body, w) in
            lowered.weights.iter().enumerate().flat_map(|(b, all)| all.iter().map(move |w| (b, w)))
        {
            if let Some(passes) = w.passes {
                let f = &lowered.module.functions[&architecture.bodies[body].name];
                let bound = f.params.iter().find(|p| p.name == w.name);
                let bound = bound.map_or(Binding::PassWeight, |p| p.binding);
                a.set.passes.insert((body, w.name.clone()), (passes, bound));
                a.set.passes.insert((body, cotangent(&w.name)), (passes, bound));
            }
        }
        a.parameters(lowered)?;
        Ok(a)
    }

    /// Learns the meaning of the names that a module uses.
    pub(crate) fn know(&mut self, lowered: &Lowered) {
        self.states.extend(lowered.facts.states.clone());
        self.left.extend(lowered.facts.observed.clone());
    }

    pub(crate) fn kernel(&mut self, kernel: &Kernel) -> KernelId {
        let next = KernelId(self.plan.kernels.len() as u32);
        let id = *self.kernels.entry(kernel.clone()).or_insert(next);
        if id == next {
            self.plan.kernels.push(kernel.clone());
        }
        id
    }

    pub(crate) fn launch(&mut self, kernel: Kernel, operands: Vec<Operand>, origin: &str) -> Step {
        let kernel = self.kernel(&kernel);
        Step::Launch(Launch { kernel, operands, places: None, origin: origin.into() })
    }

    /// All that bindings are resolved by.
    fn resolver(&self) -> Resolver<'_> {
        Resolver {
            architecture: self.architecture,
            states: &self.states,
            passes: &self.set.passes,
            draws: self.draws,
            kept: &self.now.kept,
        }
    }

    /// Buffer and instance of a parameter or a result.
    pub(crate) fn place(
        &mut self,
        module: &Module,
        site: &Site,
        f: &Function,
        port: &Port,
        v: crate::ir::Value,
        result: bool,
    ) -> Result<Operand, CompileError> {
        let ty = f.ty(v);
        let shape = ty.dims.iter().map(|&d| module.size(d)).collect();
        let asked = Asked { port, dtype: ty.dtype, shape, result };
        let bug = |what: &str| {
            CompileError::Schedule(format!("{}: {what} `{} {port}`", f.name, port.binding.words()))
        };
        let (held, instance) = self.resolver().resolve(site, asked).map_err(bug)?;
        let (id, instance) = match held {
            Held::Weight(key) => self.weight(&key, instance).ok_or_else(|| bug("no tensor"))?,
            Held::Gradient(key) => self.gradient(&key, instance).ok_or_else(|| bug("no gradient"))?,
            Held::Counts(key) => {
                let counted = self.set.counts.get(&key).ok_or_else(|| bug("no counts"))?;
                (counted.counts, instance)
            }
            Held::Buffer(wanted) => {
                let prepared = port.binding == Binding::Prepared;
                let own = if prepared { self.prepared_stack(site.body, port) } else { None };
                (own.map_or_else(|| self.bind(wanted), Ok)?, instance)
            }
        };
        if let Binding::State(lifetime @ (Lifetime::Token(_) | Lifetime::Text)) = port.binding {
            self.sequence.insert(id, lifetime);
        }
        Ok(Operand::Tensor { buffer: id, instance, offset: 0, stride: 0 })
    }

    /// A weight and which of its instances: its own, or the one of another body that is called so.
    fn weight(&self, key: &WeightKey, instance: Affine) -> Option<(BufferId, Affine)> {
        let other = || self.called(&key.1).map(|t| (t.weight, Affine::constant(t.instance)));
        self.set.weights.get(key).map(|&id| (id, instance)).or_else(other)
    }

    /// The gradient of one.
    fn gradient(&self, key: &WeightKey, instance: Affine) -> Option<(BufferId, Affine)> {
        let named = |t: &&Tensor| cotangent(&t.name) == key.1;
        let other = || {
            let t = self.set.tensors.iter().find(named)?;
            Some((t.gradient?, Affine::constant(t.instance)))
        };
        self.set.gradients.get(key).map(|&id| (id, instance)).or_else(other)
    }

    /// The weight that a port of a body is bound to.
    pub(crate) fn weight_of(&self, body: Option<usize>, name: &str) -> Option<BufferId> {
        let key = resolve::key(self.architecture, body, name);
        self.weight(&key, Affine::default()).map(|(id, _)| id)
    }

    /// The states of sequences that the programs of this use keep.
    fn sequence(&self) -> Result<Vec<SequenceState>, CompileError> {
        let places = self.options.cache.map_or(0, |cache| cache.places);
        let own = self.bound.iter().filter(|(key, _)| key.scope == self.now.number);
        let found = own.filter_map(|(key, &buffer)| {
            let lifetime = *self.sequence.get(&buffer)?;
            match &key.slot {
                Slot::OfBody(body, name) => Some((Some(*body), name, buffer, lifetime)),
                Slot::OfComponent(name) => Some((None, name, buffer, lifetime)),
                _ => None,
            }
        });
        let found: Vec<_> = found.collect();
        let state = |name: &str| self.states.get(name);
        let marks = |name: &str| state(name).is_some_and(|state| state.part == attention::part::CACHED);
        let of = |&(body, name, buffer, lifetime): &(Option<usize>, &String, BufferId, Lifetime)| {
            let b = self.plan.buffer(buffer);
            let wrong = |what| CompileError::Schedule(format!("a state `{}` that is not {what}", b.name));
            let [rows, row @ ..] = &b.shape[..] else { return Err(wrong("[batch, ..]")) };
            let (per, shape) = match (lifetime, row) {
                (Lifetime::Text, _) => (Per::Text, row),
                (_, &[entries]) if marks(name) => (Per::Position { entries }, &[][..]),
                (_, [entries, shape @ ..]) => {
                    // Where bodies share keys each may have positions of its own, or none.
                    let owner = state(name).map(|state| state.owner);
                    let own = |other: &(usize, &(Option<usize>, &String, BufferId, Lifetime))| {
                        let (_, (of, named, ..)) = other;
                        marks(named)
                            && state(named).map(|state| state.owner) == owner
                            && (body.is_none() || *of == body)
                    };
                    let positions: Vec<usize> =
                        found.iter().enumerate().filter(own).map(|(i, _)| i).collect();
                    let by_place = positions.is_empty() || body.is_none();
                    if positions.is_empty() && *entries != places {
                        return Err(wrong("[batch, places, ..]"));
                    }
                    (Per::Token { entries: *entries, positions, by_place }, shape)
                }
                (_, []) => return Err(wrong("[batch, entries, ..]")),
            };
            let (name, shape, rows) = (name.clone(), shape.to_vec(), *rows);
            Ok(SequenceState { name, buffer, instances: b.instances, rows, dtype: b.dtype, per, shape })
        };
        found.iter().map(of).collect()
    }

    /// A tensor by its name in checkpoints.
    pub(crate) fn called(&self, name: &str) -> Option<&Tensor> {
        self.set.tensors.iter().find(|t| t.name == name)
    }

    /// The launches of one call.
    pub(crate) fn call(
        &mut self,
        module: &Module,
        site: &Site,
        (f, s): &(Function, Scheduled),
        steps: &mut Vec<Step>,
    ) -> Result<(), CompileError> {
        self.begin_call();
        let params = self.params(module, site, f, steps)?;
        let mut results = vec![];
        for (port, v) in &f.results {
            results.push(self.place(module, site, f, port, *v, true)?);
        }
        self.emit(&f.name, s, &params, &results, steps);
        Ok(())
    }

    /// Where the parameters of a call are. Values that the call itself prepares of weights come
    /// first.
    pub(crate) fn params(
        &mut self,
        module: &Module,
        site: &Site,
        f: &Function,
        steps: &mut Vec<Step>,
    ) -> Result<Vec<Operand>, CompileError> {
        let mut params = vec![];
        for (i, p) in f.params.iter().enumerate() {
            let made = match p.binding {
                Binding::Prepared => self.make(module, site, p, steps)?,
                _ => None,
            };
            params.push(match (made, p.binding) {
                (Some(made), _) => made,
                (None, Binding::Index(index)) => {
                    let value = resolve::index(self.architecture, site.apply, index);
                    let unknown = || CompileError::Schedule(format!("an index `{p}` that no loop supplies"));
                    Operand::Index(value.ok_or_else(unknown)?)
                }
                (None, _) => self.place(module, site, f, p, crate::ir::Value(i as u32), false)?,
            });
        }
        Ok(params)
    }

    /// The launches of a scheduled function on these parameters and results.
    pub(crate) fn emit(
        &mut self,
        name: &str,
        s: &Scheduled,
        params: &[Operand],
        results: &[Operand],
        steps: &mut Vec<Step>,
    ) {
        let temps = self.place_temps(name, s);
        self.emit_with(s, &temps, params, results, steps);
    }

    /// The same with these temporaries.
    pub(crate) fn emit_with(
        &mut self,
        s: &Scheduled,
        temps: &[BufferId],
        params: &[Operand],
        results: &[Operand],
        steps: &mut Vec<Step>,
    ) {
        let operand = |o: &LocalOperand| match o {
            LocalOperand::Index(p) => params[*p as usize].clone(),
            LocalOperand::View(view) => {
                let base = match view.place {
                    Place::Param(p) => params[p as usize].clone(),
                    Place::Result(r) => results[r as usize].clone(),
                    Place::Temp(t) => Operand::Tensor {
                        buffer: temps[t as usize],
                        instance: Affine::default(),
                        offset: 0,
                        stride: 0,
                    },
                };
                match base {
                    Operand::Tensor { buffer, instance, offset, .. } => {
                        let (offset, stride) = (offset + view.offset, view.stride);
                        Operand::Tensor { buffer, instance, offset, stride }
                    }
                    index => index,
                }
            }
        };
        for launch in &s.launches {
            let mut launch = Launch {
                kernel: self.kernel(&launch.kernel),
                operands: launch.operands.iter().map(operand).collect(),
                places: launch.places.as_ref().map(operand),
                origin: launch.origin.clone(),
            };
            if !self.over_owners(&mut launch, steps) {
                self.gather(&mut launch, steps);
                steps.push(Step::Launch(launch));
            }
        }
    }

    /// The calls of all applications, first to last or last to first.
    pub(crate) fn blocks(
        &mut self,
        blocks: &[Block],
        reverse: bool,
        call: Call<'_, 'a>,
    ) -> Result<Vec<Step>, CompileError> {
        let mut steps = vec![];
        let mut order: Vec<&Block> = blocks.iter().collect();
        if reverse {
            order.reverse();
        }
        for block in order {
            match block {
                Block::Apply(apply) => call(self, apply, &mut steps)?,
                // On the way back nothing goes on.
                Block::Loop { detached: true, variable, count, blocks } if reverse => {
                    self.detach(*variable, *count, blocks, &mut steps)?;
                }
                Block::Loop { variable, count, blocks, detached } => {
                    let mut inner = self.blocks(blocks, reverse, call)?;
                    if *detached {
                        inner.push(self.again(blocks)?);
                    }
                    steps.push(Step::Loop { variable: *variable, count: *count, reverse, steps: inner });
                }
            }
        }
        Ok(steps)
    }

    /// Copies the stream after a pass to the place of the stream before it, where the next pass
    /// reads.
    fn again(&mut self, blocks: &[Block]) -> Result<Step, CompileError> {
        let mut ends = vec![];
        each_apply(blocks, &mut |apply| ends.push(apply.place.clone()));
        let (Some(first), Some(last), Some(buffer)) = (ends.first(), ends.last(), self.stream_buffer())
        else {
            return Err(CompileError::Schedule("a pass without a stream".into()));
        };
        // Loops inside a pass end with their last iteration.
        let loops = loops(blocks);
        let count = |variable: u32| loops.iter().find(|l| l.0 == variable).map_or(1, |l| l.1);
        let behind = last.base + 1 + last.terms.iter().map(|&(v, step)| step * (count(v) - 1)).sum::<u64>();
        let at = |instance| Operand::Tensor { buffer, instance, offset: 0, stride: 0 };
        let elements = self.plan.buffer(buffer).elements();
        let copy = Kernel::Copy(kernel::Copy { elements, accumulate: false });
        let operands = vec![at(Affine::constant(behind)), at(Affine::constant(first.base))];
        Ok(self.launch(copy, operands, "the stream of the next pass"))
    }

    /// Ends the backward before passes through which no gradient flows: the stream after them has
    /// no cotangent, nor do the states that they left for later passes.
    fn detach(
        &mut self,
        variable: u32,
        count: u64,
        blocks: &[Block],
        steps: &mut Vec<Step>,
    ) -> Result<(), CompileError> {
        let Some(stream) = self.bound(Slot::Cotangent) else {
            return Err(CompileError::Schedule("no cotangent of the stream to end".into()));
        };
        let mut applies = vec![];
        each_apply(blocks, &mut |apply| applies.push(apply.clone()));
        let mut ended = vec![(stream, 0, self.plan.buffer(stream).elements())];
        for (name, state) in self.states.clone() {
            let slot = Slot::StateCotangent(format!("d.{name}"));
            let (Some(cache), Some(buffer)) =
                (self.architecture.cache_of(state.owner), self.bound_here(slot))
            else {
                continue;
            };
            let elements = self.plan.buffer(buffer).elements();
            let steps_of = |a: &Affine| a.terms.iter().find(|t| t.0 == variable).map_or(0, |t| t.1);
            let rows = applies.iter().map(|a| steps_of(&a.rows[cache])).max().unwrap_or(0);
            let first = applies.first().map_or(0, |a| a.rows[cache].base);
            let all = self.architecture.rows[cache];
            match state.part.rows() {
                // A source is a sum of outputs before a pass and in it: all before its end are.
                Some(Rows::Whole { every: true }) => ended.push((buffer, 0, elements)),
                Some(Rows::Whole { every: false }) if rows > 0 => ended.push((buffer, 0, elements)),
                Some(Rows::Each { before }) if rows > 0 => {
                    let each = all + before;
                    if each == 0 || !elements.is_multiple_of(each) {
                        let what = format!("{elements} elements of `{name}` are not {each} rows");
                        return Err(CompileError::Schedule(what));
                    }
                    let row = elements / each;
                    ended.push((buffer, (first + before) * row, rows * count * row));
                }
                // No application of the passes writes it.
                Some(Rows::Whole { .. } | Rows::Each { .. }) => {}
                None => {
                    let what =
                        format!("the gradient of `{name}` ends at detached passes, in no known layout");
                    return Err(CompileError::Schedule(what));
                }
            }
        }
        for (buffer, offset, elements) in ended {
            let operand = Operand::Tensor { buffer, instance: Affine::default(), offset, stride: 0 };
            let step = self.launch(Kernel::Zero(kernel::Zero { elements }), vec![operand], "detached passes");
            steps.push(step);
        }
        Ok(())
    }

    /// Decides which bodies recompute their forward in the backward: `count` of those that can,
    /// those that keep most first.
    ///
    /// The same launches on the same operands give the same bits. The stream before an application
    /// is kept, and what it writes to the stream and to depth caches is what is there; only sums
    /// over applications must not grow.
    pub(crate) fn keep(&mut self, module: &Module, forms: &ModelForms, count: usize) {
        let architecture = self.architecture;
        for (number, (body, forms)) in architecture.bodies.iter().zip(&forms.bodies).enumerate() {
            let f = &forms.forward.0;
            let saved = f.results.iter().filter(|(port, _)| port.binding == Binding::Saved);
            let one: u64 = saved
                .map(|(_, v)| f.ty(*v).dtype.room(module.elements(&f.ty(*v).dims)))
                .fold(0, u64::saturating_add);
            let bytes = one.saturating_mul(body.kept.saturating_sub(1));
            let mut ports = f.params.iter().chain(f.results.iter().map(|(port, _)| port));
            let repeats = ports.all(|port| self.repeats(port));
            if bytes > 0 && body.kept == body.applications && repeats {
                self.now.kept.push((number, Kept { body: body.name.clone(), bytes, again: false }));
            }
        }
        self.now.kept.sort_by_key(|(_, kept)| std::cmp::Reverse(kept.bytes));
        self.now.kept.iter_mut().take(count).for_each(|(_, kept)| kept.again = true);
    }

    /// Whether the forward of a body with such a port finds on the way back what it found before,
    /// and leaves everything as it is.
    fn repeats(&self, port: &Port) -> bool {
        match port.binding {
            Binding::Stream
            | Binding::Weight
            | Binding::PassWeight
            | Binding::TurnWeight
            | Binding::Buffer
            | Binding::Prepared
            | Binding::Saved
            | Binding::Batch(_)
            | Binding::Index(_)
            | Binding::State(Lifetime::Set)
            | Binding::Output(Output::Aux) => true,
            Binding::State(Lifetime::Depth) => {
                self.states.get(&port.name).is_some_and(|state| state.part.repeats())
            }
            Binding::State(Lifetime::Token(_) | Lifetime::Text | Lifetime::Saved)
            | Binding::Output(_)
            | Binding::Value
            | Binding::Observed
            | Binding::Patched
            | Binding::Cotangent(_) => false,
        }
    }

    /// Whether the forward of a body is computed again on the way back.
    fn is_again(&self, body: usize) -> bool {
        resolve::is_again(&self.now.kept, body)
    }

    pub(crate) fn backward(&mut self, module: &Module, forms: &ModelForms) -> Result<Program, CompileError> {
        let ModelForms { bodies, embed, head, pool, .. } = forms;
        let architecture = self.architecture;
        let outside = Site::OUTSIDE;
        let made = &mut FxHashSet::default();
        let mut steps = self.prepare(
            module,
            forms,
            &|f| std::iter::once(&f.forward).chain(&f.backward).map(|(f, _)| f.clone()).collect(),
            made,
        )?;
        self.call(module, &outside, &embed.forward, &mut steps)?;
        steps.extend(self.blocks(&architecture.blocks, false, &mut |a, apply, steps| {
            a.call(
                module,
                &Site::of(apply),
                match (&bodies[apply.body].detached, apply.detached) {
                    (Some(detached), true) => detached,
                    _ => &bodies[apply.body].forward,
                },
                steps,
            )
        })?);
        if let Some(pool) = pool {
            self.call(module, &outside, pool, &mut steps)?;
        }
        if architecture.cache_of(Owner::Exit).is_some() {
            let Some(ids) = self.stream_buffer() else { return Ok(Program::default()) };
            let mut shape = self.plan.buffer(ids).shape[..2].to_vec();
            // Sums of what the head reads follow the shares.
            if let Some(Leaving { how: Exit::Expected(_), .. }) = architecture.exit {
                shape.push(architecture.model.hidden + 1);
            }
            let left = self.resolver().left_cotangent(shape);
            let buffer = self.bind(left)?;
            let (b, variable) = (self.plan.buffer(buffer), architecture.variables);
            let (elements, count) = (b.elements(), b.instances);
            let instance = Affine { base: 0, terms: vec![(variable, 1)] };
            let operand = Operand::Tensor { buffer, instance, offset: 0, stride: 0 };
            let zero = Kernel::Zero(kernel::Zero { elements });
            let zero = self.launch(zero, vec![operand], "what passes leave of the loss");
            steps.push(Step::Loop { variable, count, reverse: false, steps: vec![zero] });
        }
        self.call(module, &outside, &head.forward, &mut steps)?;
        for number in 0..architecture.saved.len() {
            self.begin_saved(number, &mut steps)?;
        }
        if architecture.cache_of(Owner::Choice).is_some() {
            self.begin_choice(&mut steps)?;
        }
        steps.extend(self.blocks(&architecture.blocks, true, &mut |a, apply, steps| {
            let Some(backward) = &bodies[apply.body].backward else { return Ok(()) };
            let site = |again| Site { again, ..Site::of(apply) };
            if a.is_again(apply.body) {
                a.call(module, &site(true), &bodies[apply.body].forward, steps)?;
            }
            a.call(module, &site(false), backward, steps)?;
            if let Some(name) = architecture.bodies[apply.body].saves()
                && let Some(number) = architecture.saved.iter().position(|s| *s == name)
            {
                a.begin_saved(number, steps)?;
            }
            if matches!(architecture.bodies[apply.body].work, Work::Choose(_)) {
                a.begin_choice(steps)?;
            }
            a.advance(steps)
        })?);
        if let Some(backward) = &embed.backward {
            // The cotangent of the first stream is where the last application of the way back left
            // it.
            self.call(module, &outside, backward, &mut steps)?;
        }
        steps.extend(self.complete(module, forms)?);
        Ok(Program { steps, variables: architecture.variables + 1 })
    }

    /// The cotangent of a saved stream begins at zero: before the backward, and in it after each of
    /// its `save`s, where the stream saved before follows.
    fn begin_saved(&mut self, number: usize, steps: &mut Vec<Step>) -> Result<(), CompileError> {
        let Some(stream) = self.stream_buffer() else { return Ok(()) };
        let shape = self.plan.buffer(stream).shape.clone();
        self.begin_cotangent(self.architecture.label(Owner::Saved(number as u32)), shape, steps)
    }

    /// The same after the choice, for the states kept for the end of a loop whose tokens choose
    /// their passes.
    fn begin_choice(&mut self, steps: &mut Vec<Step>) -> Result<(), CompileError> {
        let Some(stream) = self.stream_buffer() else { return Ok(()) };
        let stream = self.plan.buffer(stream).shape.clone();
        let gate = [&stream[..2], &[1]].concat();
        for (part, shape) in [(choice::part::GATE, gate), (choice::part::START, stream)] {
            self.begin_cotangent(self.architecture.name_of(Owner::Choice, part), shape, steps)?;
        }
        Ok(())
    }

    fn begin_cotangent(
        &mut self,
        state: String,
        shape: Vec<u64>,
        steps: &mut Vec<Step>,
    ) -> Result<(), CompileError> {
        let name = Port::new(state, Binding::State(Lifetime::Saved)).cotangent().name;
        let wanted = Wanted {
            slot: Slot::StateCotangent(name.clone()),
            name: name.clone(),
            space: Space::Saved,
            dtype: DType::F32,
            shape,
            instances: 1,
        };
        let buffer = self.bind(wanted)?;
        let elements = self.plan.buffer(buffer).elements();
        let operand = Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 };
        let step = self.launch(Kernel::Zero(kernel::Zero { elements }), vec![operand], &name);
        steps.push(step);
        Ok(())
    }

    /// The buffer of something that programs of several depths may each have their own of.
    fn bound_here(&self, slot: Slot) -> Option<BufferId> {
        let depth = Some(self.architecture.depth);
        let key = Key { slot: slot.clone(), scope: self.now.number, entry: None, depth };
        self.bound.get(&key).copied().or_else(|| self.bound(slot))
    }

    /// The streams of the programs that are put together.
    fn stream_buffer(&self) -> Option<BufferId> {
        let key =
            |depth| Key { slot: Slot::Stream, scope: self.now.number, entry: Some(self.now.entry), depth };
        let own = self.bound.get(&key(Some(self.architecture.depth)));
        own.or_else(|| self.bound.get(&key(None))).copied()
    }

    /// Makes the cotangent that one application left the one that the next reads.
    pub(crate) fn advance(&mut self, steps: &mut Vec<Step>) -> Result<(), CompileError> {
        let (Some(x), Some(y)) = (self.bound(Slot::NextCotangent), self.bound(Slot::Cotangent)) else {
            return Err(CompileError::Schedule("no cotangent of the stream to pass on".into()));
        };
        let elements = self.plan.buffer(x).elements();
        let at = |buffer| Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 };
        let step = self.launch(
            Kernel::Copy(kernel::Copy { elements, accumulate: false }),
            vec![at(x), at(y)],
            "d.next -> d.stream",
        );
        steps.push(step);
        Ok(())
    }

    /// The forward alone, after `steps`.
    pub(crate) fn evaluate(
        &mut self,
        module: &Module,
        forms: &ModelForms,
        mut steps: Vec<Step>,
    ) -> Result<Program, CompileError> {
        let ModelForms { bodies, embed, head, .. } = forms;
        let architecture = self.architecture;
        let outside = Site::OUTSIDE;
        self.call(module, &outside, &embed.evaluate, &mut steps)?;
        steps.extend(self.blocks(&architecture.blocks, false, &mut |a, apply, steps| {
            a.call(module, &Site::of(apply), &bodies[apply.body].evaluate, steps)
        })?);
        self.call(module, &outside, &head.evaluate, &mut steps)?;
        Ok(Program { steps, variables: architecture.variables + 1 })
    }

    /// Prepared weights that the functions of a program read, for every set of weights,
    /// unless it is `made` already.
    pub(crate) fn prepare(
        &mut self,
        module: &Module,
        forms: &ModelForms,
        used: &dyn Fn(&Forms) -> Vec<Function>,
        made: &mut FxHashSet<String>,
    ) -> Result<Vec<Step>, CompileError> {
        let mut steps = vec![];
        for (&body, prepared) in &forms.prepared {
            let of = match body {
                Some(b) => used(&forms.bodies[b]),
                None => [used(&forms.embed), used(&forms.head)].concat(),
            };
            let users: Vec<&Function> = of.iter().collect();
            let mut functions = vec![];
            for f in prepared.before(&users) {
                let of_own = self.of_own(module, body, f);
                if self.reads_cut(body, f, of_own.is_some()) {
                    self.make_in_calls(body, f, of_own.is_some());
                } else if made.insert(f.name.clone()) {
                    match of_own {
                        Some(own) => steps.extend(self.for_own(&own, body, f)?),
                        None => functions.push(f),
                    }
                }
            }
            steps.extend(self.for_each_set(module, body, functions)?);
        }
        Ok(steps)
    }

    /// Gradients that are sums of other gradients.
    pub(crate) fn complete(
        &mut self,
        module: &Module,
        forms: &ModelForms,
    ) -> Result<Vec<Step>, CompileError> {
        let mut steps = vec![];
        for (&body, prepared) in &forms.prepared {
            let (mut whole, mut own) = (vec![], vec![]);
            for f in prepared.after() {
                match self.of_own(module, body, f) {
                    Some(module) => own.push((f, module)),
                    None => whole.push(f),
                }
            }
            steps.extend(self.for_each_set(module, body, whole)?);
            for (f, module) in own {
                steps.extend(self.for_own(&module, body, f)?);
            }
        }
        Ok(steps)
    }

    /// Calls functions from weights to weights, or gradients to gradients, for every set of a body.
    /// They overwrite.
    pub(crate) fn for_each_set(
        &mut self,
        module: &Module,
        body: Option<usize>,
        functions: Vec<&Function>,
    ) -> Result<Option<Step>, CompileError> {
        if functions.is_empty() {
            return Ok(None);
        }
        // One variable more than the loops over depth have.
        let variable = self.architecture.variables;
        let set = Affine { base: 0, terms: vec![(variable, 1)] };
        let apply = Apply {
            body: body.unwrap_or(0),
            set,
            application: Affine::default(),
            kept: Affine::default(),
            detached: false,
            pass: Affine::default(),
            turn: Affine::default(),
            turns: 1,
            place: Affine::default(),
            depth: Affine::default(),
            rows: vec![],
        };
        let site = Site { body, apply: body.map(|_| &apply), again: false };
        let mut steps = vec![];
        for f in functions {
            let s = schedule(module, f, &vec![Bind::Store; f.results.len()])?;
            self.call(module, &site, &(f.clone(), s), &mut steps)?;
        }
        let count = body.map_or(1, |b| self.architecture.bodies[b].sets);
        Ok(Some(Step::Loop { variable, count, reverse: false, steps }))
    }

    /// Begins a use.
    pub(crate) fn begin(&mut self, number: usize, name: &'static str, options: &Options) {
        self.options = options.clone();
        self.now = UseUnderWay { number, name, ..UseUnderWay::default() };
    }

    /// Adds a program of the use.
    pub(crate) fn add(&mut self, task: Task, program: Program) {
        let program = self.spread_out(program);
        self.plan.programs.insert(ProgramKey { of: self.now.name, task }, program);
    }

    /// Ends a use.
    pub(crate) fn end_use(&mut self) -> Result<(), CompileError> {
        let sequence = self.sequence()?;
        self.uses.push(Use {
            of: self.now.name,
            trains: self.options.train,
            observed: self.observed(),
            probed: self.probed(),
            taught: self.taught(),
            sequence,
            places: self.options.cache.map(|c| c.places),
            own: self.now.own,
            kept: self.now.kept.drain(..).map(|(_, kept)| kept).collect(),
        });
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<Vec<Compiled>, CompileError> {
        self.experts_problem()?;
        let base = self.plan.arena;
        for id in &self.temporaries.all {
            self.plan.buffers[id.0 as usize].offset += base;
        }
        let end = base.checked_add(self.temporaries.bytes).and_then(|end| self.end_windows(end));
        self.plan.arena = end.ok_or(CompileError::Overflow("the memory"))?;
        let uses = std::mem::take(&mut self.uses);
        Ok(uses.into_iter().enumerate().map(|(number, u)| self.compiled(number, u)).collect())
    }

    fn compiled(&self, number: usize, u: Use) -> Compiled {
        let (mut ends, mut streams, mut caches) = (vec![], vec![], vec![]);
        for (key, &buffer) in self.bound.iter().filter(|(key, _)| key.scope == number) {
            let entries: &[Entry] = match &key.entry {
                Some(entry) => std::slice::from_ref(entry),
                None => &Entry::ALL,
            };
            match &key.slot {
                Slot::End(end) => ends.extend(entries.iter().map(|&entry| (entry, *end, buffer))),
                Slot::Stream => streams.extend(entries.iter().map(|&entry| (entry, buffer))),
                Slot::State(name) | Slot::OfBody(_, name) | Slot::OfComponent(name) => {
                    let Some(&State { owner, part }) = self.states.get(name) else { continue };
                    let body = if let Slot::OfBody(body, _) = key.slot { Some(body) } else { None };
                    let state = |&entry: &Entry| StateBuffer { entry, owner, part, body, buffer };
                    caches.extend(entries.iter().map(state));
                }
                Slot::Cotangent
                | Slot::NextCotangent
                | Slot::Saved(..)
                | Slot::Prepared(..)
                | Slot::Observed(_)
                | Slot::Patched(_)
                | Slot::StateCotangent(_)
                | Slot::Again(..)
                | Slot::Gradients => {}
            }
        }
        // Gradients, states and counts are the first use's, which trains.
        let tensor = |t: &Tensor| {
            let (weight, gradient) = (self.own(t.weight), t.gradient.map(|gradient| self.own(gradient)));
            match u.trains {
                true => Tensor { weight, gradient, ..t.clone() },
                false => Tensor { weight, gradient: None, states: vec![], counts: None, ..t.clone() },
            }
        };
        let cut = match self.set.trained_weights {
            _ if self.is_spread() => Shard::Weights,
            Some(_) if u.trains => Shard::Optimizer,
            Some(_) | None => Shard::None,
        };
        Compiled {
            plan: self.plan.clone(),
            of: u.of,
            tensors: self.set.tensors.iter().map(tensor).collect(),
            depth: self.architecture.depth,
            ends,
            streams,
            caches,
            sequence: u.sequence,
            observed: u.observed,
            probed: u.probed,
            taught: u.taught,
            cut,
            seed: self.spec.train.seed,
            draws: self.draws,
            places: u.places,
            own: u.own,
            kept: u.kept,
        }
    }
}

/// How many attentions of an application drop weights, at the most.
fn draws(lowered: &Lowered) -> u64 {
    let read = |f: &Function| f.params.iter().filter_map(|p| Some(Input::drawn(&p.name)? + 1)).max();
    lowered.module.functions.values().filter_map(read).max().unwrap_or(0)
}

/// Calls `f` for every application in the text of blocks.
fn each_apply(blocks: &[Block], f: &mut dyn FnMut(&Apply)) {
    for block in blocks {
        match block {
            Block::Apply(apply) => f(apply),
            Block::Loop { blocks, .. } => each_apply(blocks, f),
        }
    }
}

/// Variable and count of every loop inside blocks.
fn loops(blocks: &[Block]) -> Vec<(u32, u64)> {
    let inside = blocks.iter().filter_map(|block| match block {
        Block::Apply(_) => None,
        Block::Loop { variable, count, blocks, .. } => Some((*variable, *count, blocks)),
    });
    inside.flat_map(|(variable, count, blocks)| [vec![(variable, count)], loops(blocks)].concat()).collect()
}
