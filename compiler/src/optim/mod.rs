//! The optimizer step, as IR: from a weight, its gradient and its states to the weight and states
//! after it.
//!
//! *In*: ranges of weights of one [`Rule`] each, and an [`Optimizer`]. *Out*: the programs `norm`
//! and `update`. *Promise*: an optimizer is one file that builds functions; the same scheduler and
//! generator make kernels of them as of every other function, on every device, so that no device
//! knows any optimizer.
//!
//! Ranges are cut into rows of [`WIDTH`] numbers for the part of a step that looks at one number at
//! a time; a part that looks at whole matrices is a loop over those of a range ([`Whole`]). The
//! gradient is clipped before an optimizer sees it, and zero after the step.
//!
//! Where the states are cut over ranks (ZeRO-1: Rajbhandari et al., 2020, section 5.1), each rank
//! gets its part of the sum of gradients, moves its part of the weights, and hands it to the
//! others. Where the weights are cut too (ZeRO-3, section 5.3), a rank has its part of them alone,
//! and programs gather what layers read ([`spread`](crate::spread)). In any plan of several ranks
//! the norm is that of the norms of such parts, one of each rank.

mod adamw;
mod lion;
mod muon;
mod sgd;

use adamw::AdamW;
use lion::Lion;
use muon::Muon;
use sgd::Sgd;

use crate::CompileError;
use crate::assemble::Assembly;
use crate::build::Builder;
use crate::compiled::{End, Init, TensorKind};
use crate::ir::{
    Binary, Binding, DType, Dim, Function, Input, Lifetime, Module, Of, Op, Output, Port, Type, Unary, Value,
};
use crate::lower::Weight;
use crate::memory::{Counted, Range, Slot};
use crate::op::{Bits, Cast};
use crate::pipeline::Options;
use crate::program::{Affine, BufferId, Kernel, Operand, Parts, Program, Space, Step, kernel};
use crate::schedule::{Bind, schedule};
use dreamc_dsl::spec::{Matrices, OptimizerKind, Pace, Precision, Train};

/// How a trained tensor moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    /// Weight decay.
    pub decay: f64,
    /// Factor on the learning rate.
    pub factor: f64,
    /// Factor on AdamW's ε.
    pub eps: f64,
    /// Rows and columns of its matrices, where the recipe moves whole ones.
    pub matrix: Option<[u64; 2]>,
}

/// The result of the part of a step that looks at one number at a time.
pub(crate) enum Moved {
    /// The weight after the step.
    Weight(Value),
    /// The value that takes the gradient's place for [`Whole`].
    Gradient(Value),
}

/// A law that moves weights.
pub(crate) trait Optimizer {
    /// Its name, for people.
    fn name(&self) -> &'static str;

    /// The states that it keeps of every weight, zero at first: their names in checkpoints.
    fn states(&self) -> &'static [&'static str];

    /// The part of a step that looks at one number at a time, of the clipped gradient and the
    /// states: what is moved, and the states after the step.
    fn step(&self, s: &mut Stepping, rule: &Rule, g: Value, states: &[Value]) -> (Moved, Vec<Value>);

    /// The part that looks at whole matrices, where there is one.
    fn whole(&self) -> Option<&dyn Whole>;
}

/// The part of a step that looks at whole matrices.
pub(crate) trait Whole {
    /// The weight after the step, from the weight and the value in the gradient's place.
    fn matrix(&self, s: &mut Stepping, rule: &Rule, of: (Value, Value), dims: [Dim; 2]) -> Value;
}

/// Whether the recipe moves whole matrices of a tensor: those of layers, and of every expert. A
/// sphere of radius 0 has no direction, so `muonh` needs a matrix that does not begin at zero.
pub(crate) fn matrix(train: &Train, w: &Weight, shape: &[u64]) -> Option<[u64; 2]> {
    let constant = matches!(w.init, Init::Constant(_) | Init::Ramp(..));
    let whole = match train.optimizer.pace() {
        Pace::Alike | Pace::Gradients => false,
        Pace::Matrices => true,
        Pace::Norms => !constant,
    };
    let kind = match w.kind {
        TensorKind::Matrix | TensorKind::Shared => shape.len() >= 2,
        // A dimension of experts comes first.
        TensorKind::Routed => shape.len() >= 3,
        TensorKind::Embedding
        | TensorKind::Head
        | TensorKind::Router
        | TensorKind::Gain
        | TensorKind::Steady
        | TensorKind::Balance => false,
    };
    match shape {
        [.., n, k] if whole && kind => Some([*n, *k]),
        _ => None,
    }
}

/// The optimizer of a recipe for tensors of a rule.
pub(crate) fn optimizer(train: &Train, rule: &Rule) -> Box<dyn Optimizer> {
    let products = stored(train.precision);
    let whole = |m: Matrices, sphere| Box::new(Muon { momentum: m.momentum, rate: m.rate, products, sphere });
    match (train.optimizer, rule.matrix) {
        (OptimizerKind::Lion, _) => Box::new(Lion { betas: train.betas }),
        (OptimizerKind::Sgd(momentum), _) => Box::new(Sgd { momentum }),
        (OptimizerKind::Muon(m), Some(_)) => whole(m, false),
        (OptimizerKind::MuonH(m), Some(_)) => whole(m, true),
        (OptimizerKind::AdamW | OptimizerKind::Muon(_) | OptimizerKind::MuonH(_), _) => {
            Box::new(AdamW { betas: train.betas, eps: train.eps })
        }
    }
}

/// Storage of the optimizer's states.
pub(crate) fn storage(train: &Train) -> DType {
    stored(train.moments)
}

fn stored(precision: Precision) -> DType {
    match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 | Precision::Fp8 => DType::Bf16,
    }
}

/// A step under way.
pub(crate) struct Stepping<'m> {
    pub b: Builder<'m>,
    ty: Type,
}

impl Stepping<'_> {
    /// A number that the host gives for the step.
    pub fn given(&mut self, input: Input) -> Value {
        self.b.param(input.name(), Binding::Batch(input), Type::f32(&[]))
    }

    /// The weight before the step.
    pub fn weight(&mut self) -> Value {
        self.b.param("w", Binding::Weight, self.ty.clone())
    }

    fn gradient(&mut self) -> Value {
        let port = Port::new("w", Binding::Weight).cotangent();
        self.b.param(&port.name, port.binding, self.ty.clone())
    }

    fn as_stored(&mut self, v: Value, to: DType) -> Value {
        if self.b.ty(v).dtype == to { v } else { self.b.op(Op::Cast(Cast(to)), &[v]) }
    }

    /// The learning rate of a rule.
    pub fn rate(&mut self, rule: &Rule) -> Value {
        let rate = self.given(Input::LearningRate);
        self.b.scale(rate, rule.factor)
    }

    /// `beta · before + (1 - beta) · now`
    pub fn mean(&mut self, before: Value, beta: f64, now: Value) -> Value {
        let before = self.b.scale(before, beta);
        let now = self.b.scale(now, 1.0 - beta);
        self.b.add(before, now)
    }

    /// `w · (1 - rate · decay)`
    pub fn decayed(&mut self, rule: &Rule, w: Value, rate: Value) -> Value {
        if rule.decay == 0.0 {
            return w;
        }
        let one = self.b.constant(1.0);
        let less = self.b.scale(rate, rule.decay);
        let kept = self.b.sub(one, less);
        self.b.mul(w, kept)
    }

    /// `min(1, clip / norm)`; 1 where that is no number, as where nothing is clipped and the norm
    /// is infinite.
    fn clip(&mut self) -> Value {
        let norm = self.b.param(Output::Norm.name(), Binding::Output(Output::Norm), Type::f32(&[]));
        let clip = self.given(Input::Clip);
        let share = self.b.div(clip, norm);
        let less = self.b.unary(Unary::Neg, share);
        let one = self.b.constant(-1.0);
        // The number comes first: a comparison with NaN keeps it.
        let most = self.b.op(Op::Binary(Binary::Max), &[one, less]);
        self.b.unary(Unary::Neg, most)
    }
}

/// Numbers of a row.
const WIDTH: u64 = 1024;

/// The function of the part of a step that looks at one number at a time, on rows of numbers, or on
/// one row where `shape` has one size. States are rounded as they are stored; the weight moves by
/// what they are before that.
fn step(
    optimizer: &dyn Optimizer,
    rule: &Rule,
    stored: DType,
    shape: &[u64],
) -> Result<(Module, Function), CompileError> {
    let mut module = Module::default();
    // The first dimension of a module is that of a batch, whose rows have two.
    module.dim("batch", 1);
    let names = ["rows", "width"];
    let dims: Vec<_> = shape
        .iter()
        .zip(&names[names.len() - shape.len()..])
        .map(|(&n, name)| module.dim(*name, n))
        .collect();
    let ty = Type::f32(&dims);
    let mut s = Stepping { b: Builder::new(&mut module, optimizer.name()), ty: ty.clone() };
    if optimizer.whole().is_none() {
        s.weight();
    }
    let g = s.gradient();
    let state = |name: &&str| Port::new(*name, Binding::State(Lifetime::Set));
    let states: Vec<Port> = optimizer.states().iter().map(state).collect();
    let kept = Type { dtype: stored, ..ty };
    let before: Vec<Value> = states.iter().map(|p| s.b.param(&p.name, p.binding, kept.clone())).collect();
    let before: Vec<Value> = before.into_iter().map(|v| s.as_stored(v, DType::F32)).collect();
    let clip = s.clip();
    let clipped = s.b.mul(g, clip);
    let (moved, after) = optimizer.step(&mut s, rule, clipped, &before);
    let weight = Port::new("w", Binding::Weight);
    match moved {
        Moved::Weight(w) => s.b.result(weight, w),
        Moved::Gradient(u) => s.b.result(weight.cotangent(), u),
    }
    for (port, state) in states.into_iter().zip(after) {
        let state = s.as_stored(state, stored);
        s.b.result(port, state);
    }
    let f = s.b.finish()?;
    Ok((module, f))
}

/// The function of the part of a step that looks at a whole matrix.
fn whole(
    optimizer: &dyn Optimizer,
    part: &dyn Whole,
    rule: &Rule,
    [n, k]: [u64; 2],
) -> Result<(Module, Function), CompileError> {
    let mut module = Module::default();
    module.dim("batch", 1);
    let dims = [module.dim("rows", n), module.dim("columns", k)];
    let mut s = Stepping { b: Builder::new(&mut module, optimizer.name()), ty: Type::f32(&dims) };
    let (w, u) = (s.weight(), s.gradient());
    let w = part.matrix(&mut s, rule, (w, u), dims);
    s.b.result(Port::new("w", Binding::Weight), w);
    let f = s.b.finish()?;
    Ok((module, f))
}

/// Where in a range a part of a step works: on which instance, from which element on.
struct Place {
    instance: Affine,
    first: u64,
}

fn at(buffer: BufferId) -> Operand {
    Operand::Tensor { buffer, instance: Affine::default(), offset: 0, stride: 0 }
}

impl Assembly<'_> {
    /// The gradient norm of the step, which is a program of its own so that the host can look at it
    /// before anything is changed by it. Gradients and selection counts of several ranks are summed
    /// first: what follows is the same on all of them.
    pub(crate) fn norm(&mut self) -> Result<Program, CompileError> {
        let (mut steps, mut variables) = (vec![], 0);
        let norm = self.end(End::Output(Output::Norm), DType::F32, vec![1])?;
        let Some(gradients) = self.bound(Slot::Gradients) else { return Ok(Program::default()) };
        let elements = self.plan.buffer(gradients).elements();
        let ranks = self.options.ranks;
        // Gradients were summed while the way back went on, but for those of experts.
        if let Some((experts, owners)) = self.set.stack_gradients.zip(self.owners())
            && owners.ranks > owners.team
        {
            let elements = self.plan.buffer(experts).elements();
            let sum = Kernel::Pooled(kernel::Pooled { elements, owners });
            steps.push(self.launch(sum, vec![at(experts)], "gradients of experts"));
        }
        if ranks > 1 {
            for Counted { counts, .. } in self.set.counts.values().copied().collect::<Vec<_>>() {
                let (elements, sets) =
                    (self.plan.buffer(counts).elements(), self.plan.buffer(counts).instances);
                let instance = Affine { base: 0, terms: vec![(variables, 1)] };
                let of = Operand::Tensor { buffer: counts, instance, offset: 0, stride: 0 };
                let sum = Kernel::AllReduce(kernel::AllReduce { elements, ranks, overlap: false });
                let steps_of = vec![self.launch(sum, vec![of], "selection counts")];
                steps.push(Step::Loop { variable: variables, count: sets, reverse: false, steps: steps_of });
                variables += 1;
            }
        }
        let frozen = self.set.ranges.iter().filter(|r| r.recipe.is_none()).map(|r| (r.gradient, r.elements));
        for (range, elements) in frozen.collect::<Vec<_>>() {
            steps.push(self.launch(
                Kernel::Zero(kernel::Zero { elements }),
                vec![at(range)],
                "frozen gradients",
            ));
        }
        if ranks > 1 {
            self.norms(gradients, norm, &mut steps)?;
        } else {
            steps.push(self.launch(
                Kernel::Norm(kernel::Norm { elements }),
                vec![at(gradients), at(norm)],
                "gradient norm",
            ));
        }
        Ok(Program { steps, variables })
    }

    /// The norm of the norms of all ranks' parts, each computed by its rank: so its bits do not
    /// depend on whether states are cut over the ranks. Ranks that own the same experts each take a
    /// part of them.
    fn norms(
        &mut self,
        gradients: BufferId,
        norm: BufferId,
        steps: &mut Vec<Step>,
    ) -> Result<(), CompileError> {
        let Options { ranks, rank, .. } = self.options;
        let part = self.part().unwrap_or(0..0);
        let first = if self.is_spread() { 0 } else { part.start };
        let mut looks = vec![(gradients, first, part.end - part.start)];
        if let Some((experts, owners)) = self.set.stack_gradients.zip(self.owners()) {
            let (all, alike) = (self.plan.buffer(experts).elements(), ranks / owners.team);
            let cut = |number: u64| (u128::from(all) * u128::from(number) / u128::from(alike)) as u64;
            let number = rank / owners.team;
            looks.push((experts, cut(number), cut(number + 1) - cut(number)));
        }
        let each = looks.len() as u64;
        let norms = self.buffer("norms".into(), Space::Io, DType::F32, vec![ranks * each], 1)?;
        let zero = Kernel::Zero(kernel::Zero { elements: ranks * each });
        steps.push(self.launch(zero, vec![at(norms)], "gradient norms"));
        let from =
            |buffer, offset| Operand::Tensor { buffer, instance: Affine::default(), offset, stride: 0 };
        for ((buffer, first, elements), place) in looks.into_iter().zip(rank * each..) {
            if elements > 0 {
                let own = Kernel::Norm(kernel::Norm { elements });
                let operands = vec![from(buffer, first), from(norms, place)];
                steps.push(self.launch(own, operands, "norm of a part"));
            }
        }
        let parts = self.parts(&(0..=ranks).map(|rank| rank * each).collect::<Vec<_>>());
        let gather = Kernel::AllGather(kernel::AllGather { parts });
        steps.push(self.launch(gather, vec![at(norms)], "gradient norms"));
        let root = Kernel::Norm(kernel::Norm { elements: ranks * each });
        steps.push(self.launch(root, vec![at(norms), at(norm)], "gradient norm"));
        Ok(())
    }

    /// Numbers cut over the ranks so.
    pub(crate) fn parts(&self, cuts: &[u64]) -> Parts {
        Parts { cuts: cuts.to_vec(), rank: self.options.rank }
    }

    /// One optimizer step. Its loops run over the sets of weights, so its length does not depend on
    /// depth.
    pub(crate) fn update(&mut self) -> Result<Program, CompileError> {
        let Some(gradients) = self.bound(Slot::Gradients) else { return Ok(Program::default()) };
        let mut steps = vec![];
        let mut variables = 0;
        for range in std::mem::take(&mut self.set.ranges) {
            let Some(rule) = range.recipe else { continue };
            let optimizer = optimizer(&self.spec.train, &rule);
            let optimizer = optimizer.as_ref();
            let rows = range.elements / WIDTH;
            let pieces = [(0, vec![rows, WIDTH]), (rows * WIDTH, vec![range.elements % WIDTH])];
            for (first, shape) in pieces.into_iter().filter(|(_, shape)| !shape.contains(&0)) {
                let (module, f) = step(optimizer, &rule, storage(&self.spec.train), &shape)?;
                let at = Place { instance: Affine::default(), first };
                self.step_of(&range, &at, &module, f, &mut steps)?;
            }
            if let (Some(part), Some(size)) = (optimizer.whole(), rule.matrix) {
                let (module, f) = whole(optimizer, part, &rule, size)?;
                let count = range.elements / (size[0] * size[1]);
                let matrices = Range {
                    weight: self.matrices(range.weight, size, count),
                    gradient: self.matrices(range.gradient, size, count),
                    ..range
                };
                let at = Place { instance: Affine { base: 0, terms: vec![(variables, 1)] }, first: 0 };
                let mut inner = vec![];
                self.step_of(&matrices, &at, &module, f, &mut inner)?;
                steps.push(Step::Loop { variable: variables, count, reverse: false, steps: inner });
                variables += 1;
            }
        }
        let cuts = self.set.cuts.clone();
        if let Some(weights) = self.set.trained_weights.filter(|_| cuts.last() > Some(&0)) {
            let parts = self.parts(&cuts);
            let gather = Kernel::AllGather(kernel::AllGather { parts });
            steps.push(self.launch(gather, vec![at(weights)], "weights"));
        }
        for gradients in [Some(gradients), self.set.stack_gradients].into_iter().flatten() {
            let elements = self.plan.buffer(gradients).elements();
            if elements > 0 {
                let zero = Kernel::Zero(kernel::Zero { elements });
                steps.push(self.launch(zero, vec![at(gradients)], "gradients"));
            }
        }
        let balanced = if self.balances() { self.set.counts.values().copied().collect() } else { vec![] };
        for Counted { counts, bias, law } in balanced {
            let sets = self.plan.buffer(counts).instances;
            let experts = self.plan.buffer(counts).elements();
            let instance = Affine { base: 0, terms: vec![(variables, 1)] };
            let set = |buffer| Operand::Tensor { buffer, instance: instance.clone(), offset: 0, stride: 0 };
            let step = self.launch(
                Kernel::Balance(kernel::Balance {
                    experts,
                    rate: Bits(law.rate),
                    target: law.target,
                    law: law.law,
                }),
                vec![set(bias), set(counts)],
                "balancing",
            );
            steps.push(Step::Loop { variable: variables, count: sets, reverse: false, steps: vec![step] });
            variables += 1;
        }
        Ok(Program { steps, variables })
    }

    /// A range once more, as its matrices.
    fn matrices(&mut self, range: BufferId, size: [u64; 2], count: u64) -> BufferId {
        let b = self.plan.buffer(range);
        let (name, offset) = (format!("{}.matrices", b.name), b.offset);
        let id = self.alias(name, offset, size[0] * size[1]);
        let b = &mut self.plan.buffers[id.0 as usize];
        (b.shape, b.instances) = (size.to_vec(), count);
        id
    }

    /// The launches of a part of a step on a range.
    fn step_of(
        &mut self,
        range: &Range,
        at: &Place,
        module: &Module,
        f: Function,
        steps: &mut Vec<Step>,
    ) -> Result<(), CompileError> {
        let scheduled = schedule(module, &f, &vec![Bind::Store; f.results.len()])?;
        let mut states = range.states.iter();
        let mut operands = vec![];
        for port in &f.params {
            let scalar = (Affine::default(), 0);
            let place = || (at.instance.clone(), at.first);
            let (buffer, (instance, offset)) = match port.binding {
                Binding::Weight => (range.weight, place()),
                Binding::Cotangent(Of::Weight) => (range.gradient, place()),
                Binding::Batch(input) => (self.end(End::Input(input), DType::F32, vec![1])?, scalar),
                Binding::Output(output) => (self.end(End::Output(output), DType::F32, vec![1])?, scalar),
                _ => match states.next() {
                    Some(&state) => (state, place()),
                    None => {
                        return Err(CompileError::Schedule(format!("nothing supplies `{port}` of a step")));
                    }
                },
            };
            operands.push(Operand::Tensor { buffer, instance, offset, stride: 0 });
        }
        // Results are written where they were read, by the last kernel that reads them.
        let results = f.results.iter().map(|(port, _)| f.find_param(&port.name));
        let results: Option<Vec<Operand>> = results.map(|p| Some(operands[p?.index()].clone())).collect();
        let lost = || CompileError::Schedule("a step returns what it was not given".into());
        self.emit(&f.name, &scheduled, &operands, &results.ok_or_else(lost)?, steps);
        Ok(())
    }
}
