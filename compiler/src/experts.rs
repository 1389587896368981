//! Experts over ranks: rows go to the owners of their experts, and come back.
//!
//! *In*: grouped matmuls of slots with the experts of a mixture; each rank of a team owns an equal
//! number of experts ([`Owners`]). *Out*: the same matmuls on a rank's own experts, of the slots of
//! all ranks of its team. *Promise*: a rank's arena has its own experts, their gradients and
//! states, and what is prepared of them; activations stay on the rank that has the tokens. Results
//! have the bits of whole experts. The gradient of an expert is added up over the ranks of a team
//! in their order, as sums over ranks are.
//!
//! **Turns.** A loop lets each member of a team have its turn: its rows are sent
//! ([`Sent`](kernel::Sent)), multiplied by their owners, and the results returned
//! ([`Returned`](kernel::Returned)). Slots of one rank alone come in a turn: as much room as
//! a rank's own slots take holds them, whatever routers choose. Matmuls that follow one another on
//! the same rows share a loop, and rows are sent once in it.
//!
//! **Prepared experts.** Casts, and sums with a shared expert, are made of a rank's own, by the
//! same function with fewer experts; where such a function cannot be of some experts alone, it is
//! made of all, gathered.
//!
//! Anything else that reads experts gathers them ([`crate::spread`]).

use crate::CompileError;
use crate::assemble::Assembly;
use crate::ir::{Binding, DType, Dim, Function, Module, Of, Port, Value, verify_function};
use crate::memory::Slot;
use crate::program::{Affine, BufferId, Kernel, KernelKind, Launch, Operand, Owners, Space, Step, kernel};
use crate::resolve;
use rustc_hash::{FxHashMap, FxHashSet};

/// The experts of a plan that ranks share.
#[derive(Default)]
pub(crate) struct Stacks {
    /// Buffers as layers see them.
    faces: FxHashMap<BufferId, Owners>,
    /// Values prepared of this rank's experts.
    prepared: FxHashSet<BufferId>,
    /// Whether launches are of this rank's experts alone.
    local: bool,
    /// The loop of turns that the last launch of the call is in.
    turns: Option<Turns>,
    /// The first thing that cannot be done.
    problem: Option<String>,
}

/// A loop of turns at the end of a list of steps.
struct Turns {
    place: usize,
    /// Rows that were sent in it, by what they are and their offsets: where they are, and where
    /// those of each expert begin.
    sent: Vec<((Operand, Operand), (BufferId, BufferId))>,
    /// Rows that were gathered before it, by what they are and their order.
    gathered: Vec<((Operand, Operand), BufferId)>,
    /// Operands that its products read and write, outside of windows.
    reads: Vec<Operand>,
    writes: Vec<Operand>,
}

/// A grouped product of experts that ranks share.
enum Product {
    Rows(kernel::Grouped),
    Outer(kernel::GroupedOuter),
}

impl Stacks {
    pub(crate) fn add(&mut self, face: BufferId, owners: Owners) {
        self.faces.insert(face, owners);
    }

    pub(crate) fn prepare(&mut self, buffer: BufferId) {
        self.prepared.insert(buffer);
    }

    pub(crate) fn begin_call(&mut self) {
        self.turns = None;
    }

    fn owners(&self) -> Option<Owners> {
        self.faces.values().next().copied()
    }
}

fn at(buffer: BufferId) -> Operand {
    Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 }
}

fn buffer_of(operand: &Operand) -> Option<BufferId> {
    match operand {
        Operand::Tensor { buffer, .. } => Some(*buffer),
        Operand::Index(_) => None,
    }
}

impl Assembly<'_> {
    /// The owners of the experts of a buffer, where ranks share them.
    pub(crate) fn own_stack(&self, id: BufferId) -> Option<Owners> {
        self.spread.as_ref()?.stacks.faces.get(&id).copied()
    }

    /// The owners of experts, where ranks share any.
    pub(crate) fn owners(&self) -> Option<Owners> {
        self.spread.as_ref()?.stacks.owners()
    }

    /// Whether the launches that follow are of this rank's experts alone; what it was before.
    pub(crate) fn whose(&mut self, local: bool) -> bool {
        self.spread.as_mut().is_some_and(|spread| std::mem::replace(&mut spread.stacks.local, local))
    }

    /// Refuses experts over ranks that there are not, or that are read otherwise than row by row.
    pub(crate) fn experts_problem(&self) -> Result<(), CompileError> {
        let stacks = self.spread.as_ref().map(|spread| &spread.stacks);
        match stacks.and_then(|stacks| stacks.problem.clone()) {
            Some(what) => Err(CompileError::ExpertsRead { what }),
            None if self.options.experts > 1 && stacks.is_none_or(|s| s.faces.is_empty()) => {
                Err(CompileError::NoExperts)
            }
            None => Ok(()),
        }
    }

    /// The buffer of a parameter, where it is of experts.
    fn stack_of(&self, body: Option<usize>, port: &Port) -> Option<BufferId> {
        let id = match port.binding {
            Binding::Weight | Binding::Buffer | Binding::PassWeight | Binding::TurnWeight => {
                self.weight_of(body, &port.name)
            }
            Binding::Cotangent(Of::Weight) => {
                let key = resolve::key(self.architecture, body, &port.name);
                self.set.gradients.get(&key).copied()
            }
            Binding::Prepared => return self.prepared_stack(body, port),
            _ => None,
        };
        id.filter(|id| self.own_stack(*id).is_some())
    }

    /// The buffer of what is prepared of this rank's experts.
    pub(crate) fn prepared_stack(&self, body: Option<usize>, port: &Port) -> Option<BufferId> {
        let made = self.bound(Slot::Prepared(body, port.name.clone()))?;
        self.spread.as_ref().is_some_and(|s| s.stacks.prepared.contains(&made)).then_some(made)
    }

    /// The sizes with which a function of weights is of this rank's experts alone; `None` where it
    /// reads none, or what it makes of some experts is not a part of what it makes of all.
    pub(crate) fn of_own(&self, module: &Module, body: Option<usize>, f: &Function) -> Option<Module> {
        let team = self.spread.as_ref()?.stacks.owners()?.team;
        let local = |port: &Port| {
            port.binding == Binding::Prepared && self.maker(body, port).is_some_and(|(_, local)| *local)
        };
        let (stacks, others): (Vec<_>, Vec<_>) = f
            .params
            .iter()
            .enumerate()
            .partition(|(_, port)| self.stack_of(body, port).is_some() || local(port));
        let dims: FxHashSet<Dim> =
            stacks.iter().filter_map(|(i, _)| f.types[*i].dims.first().copied()).collect();
        let mixes = others.iter().any(|(i, _)| f.types[*i].dims.iter().any(|d| dims.contains(d)));
        // A gradient that is a sum over experts is one over ranks, too.
        let sums = |(port, v): &(Port, Value)| {
            let first = f.ty(*v).dims.first();
            port.binding == Binding::Cotangent(Of::Weight) || first.is_some_and(|d| dims.contains(d))
        };
        if dims.is_empty() || mixes || !f.results.iter().all(sums) {
            return None;
        }
        let mut own = Module { dims: module.dims.clone(), functions: Default::default() };
        for (i, (_, size)) in std::sync::Arc::make_mut(&mut own.dims).iter_mut().enumerate() {
            if dims.contains(&Dim(i as u32)) {
                *size /= team;
            }
        }
        verify_function(&own, f).is_ok().then_some(own)
    }

    /// Calls a function of weights for every set of a body, of this rank's experts alone.
    pub(crate) fn for_own(
        &mut self,
        module: &Module,
        body: Option<usize>,
        f: &Function,
    ) -> Result<Option<Step>, CompileError> {
        let before = self.whose(true);
        let steps = self.for_each_set(module, body, vec![f]);
        self.whose(before);
        for (port, _) in f.results.iter().filter(|(port, _)| port.binding == Binding::Prepared) {
            let made = self.bound(Slot::Prepared(body, port.name.clone()));
            if let (Some(id), Some(spread)) = (made, &mut self.spread) {
                spread.stacks.prepare(id);
            }
        }
        steps
    }

    /// Puts what a launch asks of experts that ranks share into steps; false where it asks nothing
    /// of them row by row.
    pub(crate) fn over_owners(&mut self, launch: &mut Launch, steps: &mut Vec<Step>) -> bool {
        let Some(spread) = &self.spread else { return false };
        if spread.stacks.local {
            for operand in &mut launch.operands {
                if let Operand::Tensor { buffer, .. } = operand
                    && self.own_stack(*buffer).is_some()
                {
                    *buffer = self.own(*buffer);
                }
            }
            return false;
        }
        let kernel = self.plan.kernel(launch.kernel).clone();
        let (product, stack) = match &kernel {
            Kernel::Grouped(g) => (Some(Product::Rows(*g)), launch.operands.get(1)),
            Kernel::GroupedOuter(g) if g.accumulate => (Some(Product::Outer(*g)), launch.operands.last()),
            _ => (None, None),
        };
        let own = stack.and_then(|operand| self.own_of(operand));
        match (product, own) {
            (Some(product), Some((own, owners))) => {
                self.turn(launch, product, (own, owners), steps);
                true
            }
            _ => {
                self.look_at(launch);
                false
            }
        }
    }

    /// This rank's experts of an operand that has some.
    fn own_of(&self, operand: &Operand) -> Option<(Operand, Owners)> {
        let Operand::Tensor { buffer, instance, offset: 0, .. } = operand else { return None };
        let stacks = &self.spread.as_ref()?.stacks;
        let own = |buffer| Operand::Tensor { buffer, instance: instance.clone(), offset: 0, stride: 0 };
        match stacks.faces.get(buffer) {
            Some(owners) => Some((own(self.own(*buffer)), *owners)),
            None if stacks.prepared.contains(buffer) => Some((own(*buffer), stacks.owners()?)),
            None => None,
        }
    }

    /// Notes what a launch asks that can neither be sent nor gathered.
    fn look_at(&mut self, launch: &Launch) {
        let slots = self.plan.kernel(launch.kernel).signature();
        for (operand, slot) in launch.operands.iter().zip(&slots) {
            let Some(id) = buffer_of(operand) else { continue };
            let (face, b) = (self.own_stack(id).is_some(), self.plan.buffer(id));
            let Some(spread) = &mut self.spread else { return };
            let unknown =
                spread.stacks.prepared.contains(&id) || face && (slot.role.writes() || b.dtype != DType::F32);
            if unknown && spread.stacks.problem.is_none() {
                spread.stacks.problem = Some(format!("{} of `{}`", launch.origin, b.name));
            }
        }
    }

    /// Whether two operands share memory, as far as operands have memory now.
    fn meet(&self, one: &Operand, other: &Operand) -> bool {
        let (Some(one), Some(other)) = (buffer_of(one), buffer_of(other)) else { return false };
        let (a, b) = (self.plan.buffer(one), self.plan.buffer(other));
        let window = |id| self.spread.as_ref().is_some_and(|spread| spread.is_window(id));
        let temporary = (a.space == Space::Temporary, b.space == Space::Temporary);
        let apart = temporary.0 != temporary.1 || window(one) || window(other);
        let bytes = a.offset < b.offset + b.bytes() && b.offset < a.offset + a.bytes();
        one == other || !apart && bytes
    }

    /// One product in the turns of a team: in the loop that the list ends with, where nothing in it
    /// has to be done before, or in a loop of its own.
    fn turn(
        &mut self,
        launch: &Launch,
        product: Product,
        (own, owners): (Operand, Owners),
        steps: &mut Vec<Step>,
    ) {
        let origin = launch.origin.as_str();
        let last = launch.operands.len() - 1;
        let (slots, experts, order) = match &product {
            Product::Rows(g) => (g.slots, g.experts, g.gather),
            Product::Outer(g) => (g.slots, g.experts, g.gather),
        };
        let owners = Owners { experts, ..owners };
        let offsets = launch.operands[2].clone();
        let order = order.map(|per| (launch.operands[3].clone(), per));
        let (reads, writes) = match product {
            Product::Rows(_) => (vec![&launch.operands[0]], &launch.operands[last]),
            Product::Outer(_) => (vec![&launch.operands[0], &launch.operands[1]], &own),
        };
        let mut reads: Vec<Operand> = reads.into_iter().cloned().collect();
        reads.push(offsets.clone());
        reads.extend(order.as_ref().map(|(order, _)| order.clone()));
        let writes = writes.clone();
        let mut turns = self.open(steps, &reads, &writes, owners.team);
        let mut inner = vec![];
        match product {
            Product::Rows(g) => {
                let (k, n) = if g.transposed { (g.out, g.inner) } else { (g.inner, g.out) };
                let x = self.in_order(&mut turns, (&launch.operands[0], &order), (slots, k), steps);
                let of = (owners, slots, k);
                let (rows, begins) = self.sent(&mut turns, (&x, &offsets), of, origin, &mut inner);
                let dtype = self.dtype_of(&writes);
                let y = self.window(format!("{origin}.results"), dtype, vec![slots, n], 1);
                let local = kernel::Grouped { experts: owners.own(), gather: None, ..g };
                let operands = vec![at(rows), own, at(begins), at(y)];
                inner.push(self.launch(Kernel::Grouped(local), operands, origin));
                let returned = kernel::Returned { slots, width: n, owners };
                let operands = vec![at(y), offsets, at(begins), writes.clone(), self.source()];
                inner.push(self.launch(Kernel::Returned(returned), operands, origin));
            }
            Product::Outer(g) => {
                let (y, of) = (launch.operands[0].clone(), (owners, slots, g.out));
                let (left, begins) = self.sent(&mut turns, (&y, &offsets), of, origin, &mut inner);
                let x = self.in_order(&mut turns, (&launch.operands[1], &order), (slots, g.inner), steps);
                let of = (owners, slots, g.inner);
                let (right, _) = self.sent(&mut turns, (&x, &offsets), of, origin, &mut inner);
                let local = kernel::GroupedOuter { experts: owners.own(), gather: None, ..g };
                let operands = vec![at(left), at(right), at(begins), own];
                inner.push(self.launch(Kernel::GroupedOuter(local), operands, origin));
            }
        }
        if let Some(Step::Loop { steps: all, .. }) = steps.get_mut(turns.place) {
            all.extend(inner);
        }
        turns.reads.extend(reads);
        turns.writes.push(writes);
        if let Some(spread) = &mut self.spread {
            spread.stacks.turns = Some(turns);
        }
    }

    /// The loop of turns for a product that reads and writes this.
    fn open(&mut self, steps: &mut Vec<Step>, reads: &[Operand], writes: &Operand, team: u64) -> Turns {
        let before = self.spread.as_mut().and_then(|spread| spread.stacks.turns.take());
        let joins = |turns: &Turns| {
            turns.place + 1 == steps.len()
                && !turns.writes.iter().any(|w| reads.iter().any(|r| self.meet(w, r)) || self.meet(w, writes))
                && !turns.reads.iter().any(|r| self.meet(r, writes))
        };
        match before.filter(joins) {
            Some(turns) => turns,
            None => {
                let variable = self.architecture.variables;
                steps.push(Step::Loop { variable, count: team, reverse: false, steps: vec![] });
                let place = steps.len() - 1;
                Turns { place, sent: vec![], gathered: vec![], reads: vec![], writes: vec![] }
            }
        }
    }

    /// Whose turn it is.
    fn source(&self) -> Operand {
        Operand::Index(Affine { base: 0, terms: vec![(self.architecture.variables, 1)] })
    }

    fn dtype_of(&self, operand: &Operand) -> DType {
        buffer_of(operand).map_or(DType::F32, |id| self.plan.buffer(id).dtype)
    }

    /// Rows as slots, put in order before the turns where they are not.
    fn in_order(
        &mut self,
        turns: &mut Turns,
        (x, order): (&Operand, &Option<(Operand, u64)>),
        (slots, width): (u64, u64),
        steps: &mut Vec<Step>,
    ) -> Operand {
        let Some((order, k)) = order else { return x.clone() };
        let key = (x.clone(), order.clone());
        if let Some((_, window)) = turns.gathered.iter().find(|(known, _)| *known == key) {
            return at(*window);
        }
        let window = self.window("slots".into(), self.dtype_of(x), vec![slots, width], 1);
        let gather = Kernel::Gather(kernel::Gather { slots, k: *k, width });
        let step = self.launch(gather, vec![x.clone(), order.clone(), at(window)], "slots in order");
        steps.insert(turns.place, step);
        turns.place += 1;
        turns.gathered.push((key, window));
        at(window)
    }

    /// The rows of a turn on the owners of their experts, sent unless the loop has them.
    fn sent(
        &mut self,
        turns: &mut Turns,
        (x, offsets): (&Operand, &Operand),
        (owners, slots, width): (Owners, u64, u64),
        origin: &str,
        inner: &mut Vec<Step>,
    ) -> (BufferId, BufferId) {
        let key = (x.clone(), offsets.clone());
        if let Some((_, known)) = turns.sent.iter().find(|(known, _)| *known == key) {
            return *known;
        }
        let rows = self.window(format!("{origin}.rows"), self.dtype_of(x), vec![slots, width], 1);
        let begins = self.window(format!("{origin}.begins"), DType::I32, vec![owners.own() + 1], 1);
        let operands = vec![x.clone(), offsets.clone(), at(rows), at(begins), self.source()];
        inner.push(self.launch(Kernel::Sent(kernel::Sent { slots, width, owners }), operands, origin));
        turns.sent.push((key, (rows, begins)));
        (rows, begins)
    }
}
