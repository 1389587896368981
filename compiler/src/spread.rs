//! Weights and gradients that are cut over ranks (ZeRO-3: Rajbhandari et al., 2020, section 5.3).
//!
//! *In*: programs whose layers read whole weights and add to whole gradients, which are in no
//! memory ([`Space::Spread`]). *Out*: the same launches on windows. *Promise*: a rank's arena holds
//! its part of weights, gradients and the optimizer's states, and windows of what is in use; the
//! numbers that a launch reads, and what it adds to a gradient, have the bits of a plan with whole
//! weights, whose sums over ranks are taken in the same order.
//!
//! **Weights.** A call gathers each tensor before its first reader
//! ([`Gathered`](kernel::Gathered)); its window is free for others after its last. Values prepared
//! of weights are made from such a window in each call. Where all rounds of a loop read the same,
//! both are done once before it.
//!
//! **Gradients.** A window begins at zero. After the last launch that touches it, it is summed over
//! the ranks, and each rank adds its part of the sum to its own gradient
//! ([`Scattered`](kernel::Scattered)). Rounds of a loop that touch instances of their own have a
//! window each, in the same memory; where later rounds touch the same instances the window stays,
//! so that numbers are added up in the order of whole gradients.
//!
//! Windows of a program share memory where their lifetimes do not overlap.
//!
//! Experts that ranks share ([`crate::experts`]) are cut, too, each whole on its owner; what reads
//! them otherwise than row by row gathers all.

use crate::CompileError;
use crate::assemble::Assembly;
use crate::experts::Stacks;
use crate::ir::{Binding, DType, Function, Module, Port};
use crate::memory::share;
use crate::pipeline::Options;
use crate::program::{
    ALIGNMENT, Affine, Buffer, BufferId, Kernel, KernelKind, Launch, Operand, Owners, Parts, Program, Slot,
    Space, Step, kernel,
};
use crate::resolve::Site;
use crate::schedule::{Bind, schedule};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// Tensors of a plan that are cut over ranks.
#[derive(Default)]
pub(crate) struct Spread {
    /// Weights that are cut anywhere, over all ranks.
    flat: Option<Flat>,
    /// Experts that ranks share.
    pub(crate) stacks: Stacks,
    /// This rank's numbers of each buffer of [`Space::Spread`].
    own: FxHashMap<BufferId, BufferId>,
    /// Buffers of gradients that have windows.
    summed: Vec<BufferId>,
    /// Functions that make what is prepared of weights that are cut, by body and name, and whether
    /// of this rank's experts alone.
    makers: FxHashMap<(Option<usize>, String), (Function, bool)>,
    /// Windows on the weights that the call under way has gathered, and on what it has prepared.
    gathered: Vec<((BufferId, Affine), BufferId)>,
    prepared: Vec<(String, BufferId)>,
    /// All windows, whose offsets count from the end of the temporaries.
    windows: FxHashSet<BufferId>,
    /// Bytes of windows that programs share.
    bytes: u64,
}

impl Spread {
    /// Whether a buffer is a window, which gets its place last.
    pub(crate) fn is_window(&self, id: BufferId) -> bool {
        self.windows.contains(&id)
    }
}

/// Weights and gradients; the part of each rank begins anywhere.
struct Flat {
    /// Which numbers are this rank's, in the programs of all uses.
    parts: Parts,
    /// This rank's part of weights and of gradients.
    weights: BufferId,
    gradients: BufferId,
}

/// Instances that a step touches: the least, and the greatest, where variables of loops outside of
/// it are 0.
type Hull = (u64, u64);

/// A step to be put into a list before or after the step of that number.
enum Put {
    Before(usize, Step),
    After(usize, Step),
}

fn at(buffer: BufferId) -> Operand {
    Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 }
}

impl Assembly<'_> {
    /// Whether weights are cut over all ranks.
    pub(crate) fn is_spread(&self) -> bool {
        self.flat().is_some()
    }

    fn flat(&self) -> Option<&Flat> {
        self.spread.as_ref()?.flat.as_ref()
    }

    /// Whether a buffer is one of weights or gradients that are cut.
    pub(crate) fn is_cut(&self, id: BufferId) -> bool {
        self.plan.buffer(id).space == Space::Spread
    }

    /// This rank's numbers of a buffer.
    pub(crate) fn own(&self, id: BufferId) -> BufferId {
        self.spread.as_ref().and_then(|spread| spread.own.get(&id).copied()).unwrap_or(id)
    }

    /// A buffer of weights or gradients that are cut, after `flat` bytes of others.
    pub(crate) fn spread_buffer(
        &mut self,
        name: String,
        (shape, instances): (Vec<u64>, u64),
        alignment: u64,
        flat: &mut u64,
    ) -> Result<BufferId, CompileError> {
        let numbers = shape.iter().try_fold(instances, |n, &d| n.checked_mul(d));
        let end = numbers
            .and_then(|n| n.checked_mul(DType::F32.bytes()))
            .and_then(|n| n.checked_next_multiple_of(alignment))
            .and_then(|n| n.checked_add(*flat))
            .ok_or(CompileError::Overflow("a tensor"))?;
        let offset = std::mem::replace(flat, end);
        self.plan.buffers.push(Buffer {
            name,
            space: Space::Spread,
            dtype: DType::F32,
            shape,
            instances,
            offset,
        });
        Ok(BufferId(self.plan.buffers.len() as u32 - 1))
    }

    /// Gives this rank its part of the numbers that are cut: where it begins in the arena, of
    /// weights and of gradients.
    pub(crate) fn spread(&mut self, part: Range<u64>) -> Result<(u64, u64), CompileError> {
        let numbers = vec![part.end - part.start];
        let weights = self.buffer("weights.part".into(), Space::Weights, DType::F32, numbers.clone(), 1)?;
        let gradients = self.buffer("gradients.part".into(), Space::Gradients, DType::F32, numbers, 1)?;
        let starts = [weights, gradients].map(|id| self.plan.buffer(id).offset);
        let flat = |a: &Self, id: BufferId| a.is_cut(id) && a.own_stack(id).is_none();
        let gradients_of: Vec<BufferId> = self.set.gradients.values().copied().collect();
        let (summed, mut stacks): (Vec<_>, Vec<_>) = gradients_of.into_iter().partition(|id| flat(self, *id));
        let mut own = FxHashMap::default();
        let all = (0..self.plan.buffers.len() as u32).map(BufferId);
        for id in all.filter(|id| flat(self, *id)).collect::<Vec<_>>() {
            let b = self.plan.buffer(id);
            let (name, from) = (format!("{}.part", b.name), b.offset / DType::F32.bytes());
            let to = from + b.elements() * b.instances;
            let (from, to) = (from.clamp(part.start, part.end), to.clamp(part.start, part.end));
            let start = starts[usize::from(summed.contains(&id))];
            let alias = self.alias(name, start + (from - part.start) * DType::F32.bytes(), to - from);
            own.insert(id, alias);
        }
        // Gradients of experts are added to theirs where the others are summed.
        stacks.iter_mut().for_each(|id| *id = self.own(*id));
        let flat = Flat { parts: self.parts(&self.set.cuts), weights, gradients };
        let spread = self.spread.get_or_insert_default();
        spread.flat = Some(flat);
        spread.own.extend(own);
        spread.summed = [summed, stacks].concat();
        Ok((starts[0], starts[1]))
    }

    /// A buffer of the experts of a mixture that ranks share: as layers see it, in no memory, and
    /// this rank's experts.
    pub(crate) fn stack_buffer(
        &mut self,
        name: String,
        (space, dtype): (Space, DType),
        (shape, instances): (Vec<u64>, u64),
        alignment: u64,
    ) -> Result<BufferId, CompileError> {
        let mut own = shape.clone();
        own[0] /= self.options.experts;
        let own = self.buffer_at(format!("{name}.own"), space, dtype, (own, instances), alignment)?;
        let offset = self.plan.buffer(own).offset;
        self.plan.buffers.push(Buffer { name, space: Space::Spread, dtype, shape, instances, offset });
        let id = BufferId(self.plan.buffers.len() as u32 - 1);
        let Options { experts: team, ranks, rank, .. } = self.options;
        let spread = self.spread.get_or_insert_default();
        spread.own.insert(id, own);
        spread.stacks.add(id, Owners { experts: 0, team, ranks, rank });
        Ok(id)
    }

    /// A window of `instances` instances.
    pub(crate) fn window(&mut self, name: String, dtype: DType, shape: Vec<u64>, instances: u64) -> BufferId {
        self.plan.buffers.push(Buffer { name, space: Space::Temporary, dtype, shape, instances, offset: 0 });
        let id = BufferId(self.plan.buffers.len() as u32 - 1);
        if let Some(spread) = &mut self.spread {
            spread.windows.insert(id);
        }
        id
    }

    /// The place of an instance's first number among all numbers that are cut.
    fn first_of(&self, buffer: BufferId, instance: &Affine) -> Operand {
        let b = self.plan.buffer(buffer);
        let begins = Affine::constant(b.offset / DType::F32.bytes());
        Operand::Index(begins.plus(&instance.times(b.elements())))
    }

    /// Begins a call, which has gathered nothing.
    pub(crate) fn begin_call(&mut self) {
        if let Some(spread) = &mut self.spread {
            spread.gathered.clear();
            spread.prepared.clear();
            spread.stacks.begin_call();
        }
    }

    /// Puts windows in the place of the weights that a launch reads, gathered before it unless the
    /// call has them.
    pub(crate) fn gather(&mut self, launch: &mut Launch, steps: &mut Vec<Step>) {
        if self.spread.is_none() {
            return;
        }
        for operand in &mut launch.operands {
            let Operand::Tensor { buffer, instance, .. } = operand else { continue };
            let summed = self.spread.as_ref().is_some_and(|spread| spread.summed.contains(buffer));
            if !self.is_cut(*buffer) || summed {
                continue;
            }
            let key = (*buffer, instance.clone());
            let known = self.spread.as_ref().and_then(|s| s.gathered.iter().find(|(k, _)| *k == key));
            let window = match known {
                Some((_, window)) => *window,
                None => {
                    let Some((kernel, own, first)) = self.parts_of(*buffer, instance) else { continue };
                    let b = self.plan.buffer(*buffer);
                    let (name, shape, origin) =
                        (format!("{}.window", b.name), b.shape.clone(), b.name.clone());
                    let window = self.window(name, DType::F32, shape, 1);
                    let operands = vec![at(window), own, first];
                    steps.push(self.launch(Kernel::Gathered(kernel), operands, &origin));
                    if let Some(spread) = &mut self.spread {
                        spread.gathered.push((key, window));
                    }
                    window
                }
            };
            (*buffer, *instance) = (window, Affine::default());
        }
    }

    /// How an instance of weights that are cut is gathered: the kernel, this rank's part, and the
    /// place of the instance's first number.
    fn parts_of(&self, buffer: BufferId, instance: &Affine) -> Option<(kernel::Gathered, Operand, Operand)> {
        let elements = self.plan.buffer(buffer).elements();
        if let Some(owners) = self.own_stack(buffer) {
            // Those of the first team have all experts.
            let cut = |rank: u64| rank.min(owners.team) * (elements / owners.team);
            let parts = Parts { cuts: (0..=owners.ranks).map(cut).collect(), rank: owners.rank };
            let own = Operand::Tensor {
                buffer: self.own(buffer),
                instance: instance.clone(),
                offset: 0,
                stride: 0,
            };
            return Some((kernel::Gathered { parts, elements }, own, Operand::Index(Affine::default())));
        }
        let flat = self.flat()?;
        let kernel = kernel::Gathered { parts: flat.parts.clone(), elements };
        Some((kernel, at(flat.weights), self.first_of(buffer, instance)))
    }

    /// Whether something is prepared of weights that are cut: of experts that ranks share, unless
    /// it is of this rank's alone.
    pub(crate) fn reads_cut(&self, body: Option<usize>, f: &Function, local: bool) -> bool {
        let cut = |port: &Port| match port.binding {
            Binding::Weight | Binding::Buffer | Binding::PassWeight | Binding::TurnWeight => {
                let id = self.weight_of(body, &port.name);
                id.is_some_and(|id| self.is_cut(id) && !(local && self.own_stack(id).is_some()))
            }
            Binding::Prepared => self.maker(body, port).is_some(),
            _ => false,
        };
        self.spread.is_some() && f.params.iter().any(cut)
    }

    /// Records the function by which a call prepares values of weights that are cut, and whether it
    /// prepares them of this rank's experts alone.
    pub(crate) fn make_in_calls(&mut self, body: Option<usize>, f: &Function, local: bool) {
        let Some(spread) = &mut self.spread else { return };
        for (port, _) in &f.results {
            spread.makers.insert((body, port.name.clone()), (f.clone(), local));
        }
    }

    pub(crate) fn maker(&self, body: Option<usize>, port: &Port) -> Option<&(Function, bool)> {
        self.spread.as_ref()?.makers.get(&(body, port.name.clone()))
    }

    /// A value that a call reads of cut weights, made unless the call has it; `None` where it is
    /// not made in calls.
    pub(crate) fn make(
        &mut self,
        module: &Module,
        site: &Site,
        port: &Port,
        steps: &mut Vec<Step>,
    ) -> Result<Option<Operand>, CompileError> {
        let made = |a: &Self| {
            let of = a.spread.as_ref()?.prepared.iter().find(|(name, _)| *name == port.name);
            of.map(|(_, window)| at(*window))
        };
        let Some((f, local)) = self.maker(site.body, port).cloned() else { return Ok(None) };
        if let Some(made) = made(self) {
            return Ok(Some(made));
        }
        let of_own = if local { self.of_own(module, site.body, &f) } else { None };
        let module = of_own.as_ref().unwrap_or(module);
        let s = schedule(module, &f, &vec![Bind::Store; f.results.len()])?;
        let params = self.params(module, site, &f, steps)?;
        let mut results = vec![];
        for (port, v) in &f.results {
            let ty = f.ty(*v);
            let shape = ty.dims.iter().map(|&d| module.size(d)).collect();
            let window = self.window(format!("{}.window", port.name), ty.dtype, shape, 1);
            results.push(at(window));
            if let Some(spread) = &mut self.spread {
                spread.prepared.push((port.name.clone(), window));
                if local {
                    spread.stacks.prepare(window);
                }
            }
        }
        // Its temporaries live as windows do, so that all of it may be done before a loop.
        let own = s.temps.iter().enumerate().map(|(i, t)| {
            let elements = t.bytes / t.dtype.bytes();
            self.window(format!("{}.t{i}", f.name), t.dtype, vec![elements], 1)
        });
        let temps: Vec<BufferId> = own.collect();
        let before = self.whose(local);
        self.emit_with(&s, &temps, &params, &results, steps);
        self.whose(before);
        Ok(made(self))
    }

    /// Puts windows in the place of all that is cut in a program, and lays them out.
    pub(crate) fn spread_out(&mut self, program: Program) -> Program {
        let Program { mut steps, variables } = program;
        if self.spread.is_none() {
            return Program { steps, variables };
        }
        self.lift(&mut steps);
        for id in self.spread.as_ref().map_or(vec![], |spread| spread.summed.clone()) {
            self.sum_windows(&mut steps, id);
        }
        self.lay_out(&steps);
        Program { steps, variables }
    }

    /// Does what is the same in all rounds of a loop, of weights alone, once before it.
    fn lift(&self, steps: &mut Vec<Step>) {
        let mut i = 0;
        while i < steps.len() {
            if let Step::Loop { variable, steps: inner, .. } = &mut steps[i] {
                self.lift(inner);
                let lifted = self.take_steady(*variable, inner);
                let count = lifted.len();
                steps.splice(i..i, lifted);
                i += count;
            }
            i += 1;
        }
    }

    /// Takes the launches out of a loop that make windows of weights alone, the same in each round.
    fn take_steady(&self, variable: u32, inner: &mut Vec<Step>) -> Vec<Step> {
        let mut varies = FxHashSet::default();
        for step in inner.iter().filter(|step| matches!(step, Step::Loop { .. })) {
            self.written(step, &mut varies);
        }
        let mut lifted = vec![];
        let mut stay = vec![];
        for step in inner.drain(..) {
            match &step {
                Step::Launch(launch) if self.is_steady(launch, variable, &varies) => lifted.push(step),
                _ => {
                    self.written(&step, &mut varies);
                    stay.push(step);
                }
            }
        }
        *inner = stay;
        lifted
    }

    /// Whether a launch makes windows from weights alone, and from windows that do not vary with
    /// the rounds of a loop.
    fn is_steady(&self, launch: &Launch, variable: u32, varies: &FxHashSet<BufferId>) -> bool {
        let Some(spread) = &self.spread else { return false };
        let slots = self.plan.kernel(launch.kernel).signature();
        let fixed = |affine: &Affine| affine.terms.iter().all(|(v, _)| *v != variable);
        let mut makes = false;
        let steady = |(operand, slot): (&Operand, &Slot)| match operand {
            Operand::Index(affine) => fixed(affine),
            Operand::Tensor { buffer, instance, .. } => {
                let window = spread.windows.contains(buffer) && !varies.contains(buffer);
                makes |= slot.role.writes();
                let weights = matches!(
                    self.plan.buffer(*buffer).space,
                    Space::Weights | Space::Mapped | Space::Prepared
                );
                fixed(instance) && (window || weights && !slot.role.writes())
            }
        };
        launch.places.is_none() && launch.operands.iter().zip(&slots).all(steady) && makes
    }

    /// Adds the windows that a step writes.
    fn written(&self, step: &Step, all: &mut FxHashSet<BufferId>) {
        match step {
            Step::Loop { steps, .. } => steps.iter().for_each(|step| self.written(step, all)),
            Step::Launch(launch) => {
                let slots = self.plan.kernel(launch.kernel).signature();
                for (operand, slot) in launch.operands.iter().zip(&slots) {
                    if let Operand::Tensor { buffer, .. } = operand
                        && slot.role.writes()
                    {
                        all.insert(*buffer);
                    }
                }
            }
        }
    }

    /// Windows for the steps that touch a gradient: one for all that touch the same instances.
    fn sum_windows(&mut self, steps: &mut Vec<Step>, id: BufferId) {
        let hulls: Vec<(usize, Hull)> =
            steps.iter().enumerate().filter_map(|(i, step)| Some((i, hull_of(step, id)?))).collect();
        let mut groups: Vec<(Vec<usize>, Hull)> = vec![];
        for (i, hull) in hulls {
            let (apart, meets): (Vec<_>, Vec<_>) =
                groups.into_iter().partition(|(_, other)| hull.1 < other.0 || other.1 < hull.0);
            groups = apart;
            let mut all = (vec![i], hull);
            for (own, other) in meets {
                all.0.extend(own);
                all.1 = (all.1.0.min(other.0), all.1.1.max(other.1));
            }
            groups.push(all);
        }
        let mut puts = vec![];
        for (own, hull) in groups {
            if let [i] = own[..]
                && let Step::Loop { variable, count, steps: inner, .. } = &mut steps[i]
                && apart(inner, id, *variable, *count)
            {
                self.sum_windows(inner, id);
                continue;
            }
            let (Some(&first), Some(&last)) = (own.iter().min(), own.iter().max()) else { continue };
            let (zero, sum) = self.sum_window(steps, &own, (id, hull));
            puts.push(Put::Before(first, zero));
            puts.push(Put::After(last, sum));
        }
        put(steps, puts);
    }

    /// One window on instances of a gradient for steps that touch them: its first step and its
    /// last.
    fn sum_window(
        &mut self,
        steps: &mut [Step],
        own: &[usize],
        (id, hull): (BufferId, Hull),
    ) -> (Step, Step) {
        let b = self.plan.buffer(id);
        let (name, shape, each, instances) =
            (b.name.clone(), b.shape.clone(), b.elements(), hull.1 - hull.0 + 1);
        let window = self.window(format!("{name}.window"), DType::F32, shape, instances);
        let mut outside = Affine::constant(hull.0);
        for &i in own {
            move_to(&mut steps[i], (id, window, hull.0), &mut vec![], &mut outside);
        }
        let elements = each * instances;
        let zero = Kernel::Zero(kernel::Zero { elements });
        let zero = self.launch(zero, vec![at(window)], &name);
        let flat = self.flat().map(|flat| (flat.parts.clone(), flat.gradients));
        match flat.filter(|_| self.is_cut(id)) {
            Some((parts, part)) => {
                let kernel = kernel::Scattered { parts, elements };
                let operands = vec![at(window), at(part), self.first_of(id, &outside)];
                (zero, self.launch(Kernel::Scattered(kernel), operands, &name))
            }
            // The gradient of this rank's experts is whole.
            None => {
                let own = Operand::Tensor { buffer: id, instance: outside, offset: 0, stride: 0 };
                let add = Kernel::Copy(kernel::Copy { elements, accumulate: true });
                (zero, self.launch(add, vec![at(window), own], &name))
            }
        }
    }

    /// Places the windows of a program where their lifetimes do not overlap.
    fn lay_out(&mut self, steps: &[Step]) {
        let Some(spread) = &self.spread else { return };
        let (mut loops, mut lives) = (vec![], FxHashMap::default());
        live(steps, &spread.windows, &mut 0, &mut loops, &mut lives);
        let mut spans: Vec<(BufferId, Range<usize>)> = vec![];
        for (id, touched) in lives {
            let (Some(&first), Some(&last)) = (touched.first(), touched.last()) else { continue };
            let mut span = first..last + 1;
            // A window that is filled outside of a loop is there in all of its rounds.
            loop {
                let grown = loops.iter().fold(span.clone(), |span, l: &Range<usize>| {
                    let inside = l.start <= span.start && span.end <= l.end;
                    let meets = span.start < l.end && l.start < span.end;
                    if meets && !inside { span.start.min(l.start)..span.end.max(l.end) } else { span }
                });
                if grown == span {
                    break;
                }
                span = grown;
            }
            spans.push((id, span));
        }
        spans.sort_by_key(|(id, _)| *id);
        let size = |id: BufferId| self.plan.buffer(id).bytes().next_multiple_of(ALIGNMENT);
        let values = spans.iter().map(|(id, span)| (size(*id), span.clone()));
        let (offsets, end) = share(&values.collect::<Vec<_>>());
        for ((id, _), offset) in spans.into_iter().zip(offsets) {
            self.plan.buffers[id.0 as usize].offset = offset;
        }
        if let Some(spread) = &mut self.spread {
            spread.bytes = spread.bytes.max(end);
        }
    }

    /// Puts the windows after `base`, where temporaries end, and returns the end of the windows.
    pub(crate) fn end_windows(&mut self, base: u64) -> Option<u64> {
        let Some(spread) = &self.spread else { return Some(base) };
        for id in &spread.windows {
            self.plan.buffers[id.0 as usize].offset += base;
        }
        base.checked_add(spread.bytes)
    }
}

/// Where the first launches of a loop and the last are, and which windows a launch touches: by the
/// number of launches before it, in the order of the list.
fn live(
    steps: &[Step],
    windows: &FxHashSet<BufferId>,
    place: &mut usize,
    loops: &mut Vec<Range<usize>>,
    lives: &mut FxHashMap<BufferId, Vec<usize>>,
) {
    for step in steps {
        match step {
            Step::Loop { steps, .. } => {
                let first = *place;
                live(steps, windows, place, loops, lives);
                loops.push(first..*place);
            }
            Step::Launch(launch) => {
                for operand in launch.operands.iter().chain(&launch.places) {
                    if let Operand::Tensor { buffer, .. } = operand
                        && windows.contains(buffer)
                    {
                        lives.entry(*buffer).or_default().push(*place);
                    }
                }
                *place += 1;
            }
        }
    }
}

/// An operand's instance, with the loops inside the step that it is in and how often they run.
type Touch<'p> = (&'p Affine, Vec<(u32, u64)>);

/// The operands of a step that are in a buffer.
fn touches<'p>(step: &'p Step, id: BufferId, inside: &mut Vec<(u32, u64)>, all: &mut Vec<Touch<'p>>) {
    match step {
        Step::Launch(launch) => {
            for operand in launch.operands.iter().chain(&launch.places) {
                if let Operand::Tensor { buffer, instance, .. } = operand
                    && *buffer == id
                {
                    all.push((instance, inside.clone()));
                }
            }
        }
        Step::Loop { count: 0, .. } => {}
        Step::Loop { variable, count, steps, .. } => {
            inside.push((*variable, *count));
            steps.iter().for_each(|step| touches(step, id, inside, all));
            inside.pop();
        }
    }
}

/// The instances of a buffer that a step touches, if any.
fn hull_of(step: &Step, id: BufferId) -> Option<Hull> {
    let mut all = vec![];
    touches(step, id, &mut vec![], &mut all);
    let hull = |(instance, inside): &Touch| {
        let count = |v: u32| inside.iter().find(|(inner, _)| *inner == v).map_or(1, |(_, count)| *count);
        let grows = instance.terms.iter().map(|&(v, f)| f * (count(v) - 1));
        (instance.base, instance.base + grows.sum::<u64>())
    };
    let hulls = all.iter().map(hull);
    hulls.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
}

/// Whether each round of a loop touches instances of a buffer that no other round touches.
fn apart(inner: &[Step], id: BufferId, variable: u32, count: u64) -> bool {
    let mut all = vec![];
    inner.iter().for_each(|step| touches(step, id, &mut vec![], &mut all));
    let stride = |instance: &Affine| instance.terms.iter().filter(|(v, _)| *v == variable).map(|t| t.1).sum();
    let strides: FxHashSet<u64> = all.iter().map(|(instance, _)| stride(instance)).collect();
    let hulls = inner.iter().filter_map(|step| hull_of(step, id));
    let hull = hulls.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
    match (strides.len(), strides.iter().next(), hull) {
        _ if count < 2 => true,
        (1, Some(stride), Some((low, high))) => high - low < *stride,
        _ => false,
    }
}

/// Moves the operands of a step from a buffer to a window that begins with its instance `low`, of
/// the loops outside of the step; `outside` gets what is added to that by those.
fn move_to(
    step: &mut Step,
    (id, window, low): (BufferId, BufferId, u64),
    inside: &mut Vec<u32>,
    outside: &mut Affine,
) {
    match step {
        Step::Launch(launch) => {
            for operand in launch.operands.iter_mut().chain(&mut launch.places) {
                if let Operand::Tensor { buffer, instance, .. } = operand
                    && *buffer == id
                {
                    let (own, others) = instance.terms.iter().partition(|(v, _)| inside.contains(v));
                    outside.terms = others;
                    (*buffer, *instance) = (window, Affine { base: instance.base - low, terms: own });
                }
            }
        }
        Step::Loop { variable, steps, .. } => {
            inside.push(*variable);
            steps.iter_mut().for_each(|step| move_to(step, (id, window, low), inside, outside));
            inside.pop();
        }
    }
}

/// Puts steps into a list.
fn put(steps: &mut Vec<Step>, puts: Vec<Put>) {
    let (mut before, mut after) = (FxHashMap::default(), FxHashMap::default());
    for put in puts {
        match put {
            Put::Before(i, step) => before.entry(i).or_insert_with(Vec::new).push(step),
            Put::After(i, step) => after.entry(i).or_insert_with(Vec::new).push(step),
        }
    }
    let own = std::mem::take(steps);
    for (i, step) in own.into_iter().enumerate() {
        steps.extend(before.remove(&i).unwrap_or_default());
        steps.push(step);
        steps.extend(after.remove(&i).unwrap_or_default());
    }
}
