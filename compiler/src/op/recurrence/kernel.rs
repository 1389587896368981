//! Recurrences: a step for each token, a task for each sequence and each element of the dimensions
//! that the step does not join.

use super::program::Port;
use super::{Program, Step, before};
use crate::CompileError;
use crate::codegen::{CodegenError, Source, Variant};
use crate::ir::Module;
use crate::op::Tokens;
use crate::op::kernel::{KernelKind, Of, Slot, Work, input, ints, need, result, times, updated, wide};
use crate::program::Kernel;
use crate::schedule::{Choose, Select};

/// Most rows, constants and states of a step together, and most outputs.
pub const MOST: usize = 32;

const X: [&str; 2 * MOST] = [
    "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
    "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29", "x30",
    "x31", "x32", "x33", "x34", "x35", "x36", "x37", "x38", "x39", "x40", "x41", "x42", "x43", "x44", "x45",
    "x46", "x47", "x48", "x49", "x50", "x51", "x52", "x53", "x54", "x55", "x56", "x57", "x58", "x59", "x60",
    "x61", "x62", "x63",
];
const Y: [&str; MOST] = [
    "y0", "y1", "y2", "y3", "y4", "y5", "y6", "y7", "y8", "y9", "y10", "y11", "y12", "y13", "y14", "y15",
    "y16", "y17", "y18", "y19", "y20", "y21", "y22", "y23", "y24", "y25", "y26", "y27", "y28", "y29", "y30",
    "y31",
];

/// Sizes of a recurrence, and how many of each its step has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// States.
    pub states: usize,
    /// Rows.
    pub rows: usize,
    /// Constants.
    pub constants: usize,
    /// Outputs.
    pub outputs: usize,
}

/// A step run for the tokens of each sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Recurrence {
    /// Sizes.
    pub shape: Shape,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
    /// States, rows, constants -> outputs, states.
    pub step: Program,
    /// Element-wise operations of a step.
    pub work: u64,
}

/// The gradient of a [`Recurrence`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RecurrenceGrad {
    /// Sizes.
    pub shape: Shape,
    /// Whether there are segments.
    pub segments: bool,
    /// States, rows, constants -> states.
    pub step: Program,
    /// The origin of each input of `back`: a number of states, rows, constants, cotangents of
    /// outputs and cotangents of states in one row.
    pub feeds: Vec<usize>,
    /// Inputs by `feeds` -> cotangents of states, rows, constants.
    pub back: Program,
    /// Element-wise operations of two steps and of the adjoint of one.
    pub work: u64,
}

impl Shape {
    /// Rows, constants and initial states.
    pub fn operands(&self) -> usize {
        self.rows + self.constants + self.states
    }

    fn check(&self) -> Result<(), String> {
        need(self.operands() <= MOST && self.outputs <= MOST, "a step has at most 32 operands and 32 outputs")
    }

    fn tokens(&self) -> [u64; 2] {
        [self.batch, self.tokens]
    }

    /// A row of each token.
    fn row(&self, name: &'static str, port: &Port) -> Slot {
        input(name, &[self.batch, self.tokens, port.row])
    }

    /// Rows, constants and initial states; `inputs` are the step's, whose states come first.
    fn operand_slots(&self, inputs: &[Port], first: usize) -> Vec<Slot> {
        let (states, others) = inputs.split_at(self.states.min(inputs.len()));
        let slot = |(k, port): (usize, &Port)| match k < self.rows {
            true => self.row(X[k % MOST], port).rows(2),
            false => input(X[k % MOST], &[port.row]),
        };
        let all = others.iter().chain(states).enumerate();
        all.map(|(k, port)| slot((k, port)).of(Of::Operand(first + k))).collect()
    }

    /// Steps, in words.
    fn summary(&self, step: &Program) -> String {
        format!("{}×{} of {} codes on {}", self.batch, self.tokens, step.codes.len(), step.size)
    }
}

impl Recurrence {
    /// Floats of a text's state: the number of its tokens, and its states.
    pub fn kept(&self) -> u64 {
        1 + self.step.inputs.iter().take(self.shape.states).map(|p| p.row).sum::<u64>()
    }

    /// Names of rows, constants and initial states in order.
    pub fn operands(&self) -> &'static [&'static str] {
        &X[..self.shape.operands().min(MOST)]
    }

    /// Names of outputs in order.
    pub fn outputs(&self) -> &'static [&'static str] {
        &Y[..self.shape.outputs.min(MOST)]
    }
}

impl RecurrenceGrad {
    /// Names of rows, constants and initial states in order.
    pub fn operands(&self) -> &'static [&'static str] {
        &X[..self.shape.operands().min(MOST)]
    }

    /// Names of cotangents of outputs in order.
    pub fn cotangents(&self) -> &'static [&'static str] {
        let first = self.shape.operands().min(MOST);
        &X[first..first + self.shape.outputs.min(MOST)]
    }

    /// Names of cotangents of rows, constants and initial states in order.
    pub fn results(&self) -> &'static [&'static str] {
        &Y[..self.shape.operands().min(MOST)]
    }

    /// Tokens from one whose states are kept to the next: about as many as are kept.
    pub fn stretch(&self) -> u64 {
        self.shape.tokens.isqrt().max(1)
    }

    /// Floats of a task's states.
    pub fn state_elements(&self) -> u64 {
        self.step.inputs.iter().take(self.shape.states).map(Port::elements).sum()
    }

    /// The constants' and initial states' cotangents, sums over all tokens: ports of what is added
    /// to each, states last.
    pub fn sums(&self) -> impl Iterator<Item = &Port> + Clone {
        let (states, others) = self.back.outputs.split_at(self.shape.states.min(self.back.outputs.len()));
        others.iter().skip(self.shape.rows).chain(states)
    }

    /// The slot of the cotangent of an output: what `back` reads of it, or its size alone.
    fn cotangent(&self, k: usize) -> Option<&Port> {
        let wanted = self.shape.operands() + k;
        self.feeds.iter().position(|&feed| feed == wanted).and_then(|at| self.back.inputs.get(at))
    }
}

impl KernelKind for Recurrence {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => list.push(ints("segments", &s.tokens()).of(Of::Operand(0))),
            Tokens::Kept => list.push(ints("slots", &s.tokens()).of(Of::Operand(1))),
        }
        list.extend(s.operand_slots(&self.step.inputs, before(self.tokens)));
        let first = usize::from(self.tokens == Tokens::Kept);
        for (k, port) in self.step.outputs.iter().take(s.outputs).enumerate() {
            list.push(s.row(Y[k % MOST], port).written().of(Of::Result(first + k)));
        }
        if self.tokens == Tokens::Kept {
            list.push(updated("state", &[s.batch, self.kept()]).state(0, 0));
        }
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check()
    }

    fn summary(&self) -> String {
        format!("recurrence {}", self.shape.summary(&self.step))
    }

    fn work(&self) -> Work {
        Work::elementwise(wide(&[self.shape.batch, self.shape.tokens, self.work]))
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::forward(self, variant, false)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::forward(self, variant, true)
    }
}

impl KernelKind for RecurrenceGrad {
    fn signature(&self) -> Vec<Slot> {
        let s = &self.shape;
        let mut list = vec![];
        list.extend(self.segments.then(|| ints("segments", &s.tokens()).of(Of::Operand(0))));
        let first = usize::from(self.segments);
        list.extend(s.operand_slots(&self.step.inputs, first));
        for k in 0..s.outputs {
            let row = self.cotangent(k).map_or(0, |port| port.row);
            let slot = input(self.cotangents()[k], &[s.batch, s.tokens, row]).rows(2);
            list.push(slot.of(Of::Operand(first + s.operands() + k)));
        }
        let others = self.back.outputs.iter().skip(s.states).take(s.rows);
        for (k, port) in others.enumerate() {
            list.push(s.row(Y[k % MOST], port).written().of(Of::Result(k)));
        }
        for (k, port) in self.sums().enumerate() {
            list.push(result(Y[(s.rows + k) % MOST], &[port.row]).of(Of::Result(s.rows + k)));
        }
        list
    }

    fn check(&self) -> Result<(), String> {
        self.shape.check()
    }

    fn summary(&self) -> String {
        format!("recurrence_grad {}", self.shape.summary(&self.back))
    }

    fn work(&self) -> Work {
        Work::elementwise(wide(&[self.shape.batch, self.shape.tokens, self.work]))
    }

    fn cuda(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::backward(self, variant, false)
    }

    fn naive(&self, variant: Variant) -> Result<Option<Source>, CodegenError> {
        super::cuda::backward(self, variant, true)
    }
}

fn shape(s: &Select, step: &Step, first: usize) -> Shape {
    let row = s.dims(first);
    Shape {
        batch: s.size(row[0]),
        tokens: s.size(row[1]),
        states: step.states().count(),
        rows: step.row_count(),
        constants: step.constants().count(),
        outputs: step.outputs().count(),
    }
}

/// A count that a kernel has room for.
fn count(count: crate::ir::cost::Count) -> Result<u64, String> {
    count.0.and_then(|n| n.try_into().ok()).ok_or_else(|| "the step has too many operations to count".into())
}

impl super::Recurrence {
    fn kernel(&self, module: &Module, shape: Shape) -> Result<Recurrence, String> {
        let (step, work) = (Program::forward(module, &self.step)?, count(self.step.cost(module))?);
        let kernel = Recurrence { shape, tokens: self.tokens, step, work };
        kernel.check().map(|()| kernel)
    }
}

impl super::RecurrenceGrad {
    fn kernel(&self, module: &Module, shape: Shape) -> Result<RecurrenceGrad, String> {
        let adjoint = self.step.adjoint(module).map_err(|e| e.to_string())?;
        let [step, back] = Program::backward(module, &self.step, adjoint.function())?;
        let f = self.step.function();
        let params = f.params.iter().map(|p| p.name.clone());
        let names: Vec<String> = params.chain(f.results.iter().map(|(p, _)| p.cotangent().name)).collect();
        let number = |name: &String| names.iter().position(|n| n == name).ok_or("an operand of no step");
        let feeds = adjoint.function().params.iter().map(|p| number(&p.name)).collect::<Result<_, _>>()?;
        let forward = count(self.step.cost(module))?;
        let work = times(&[2, forward]).saturating_add(count(adjoint.cost(module))?);
        let kernel = RecurrenceGrad { shape, segments: self.segments, step, feeds, back, work };
        kernel.check().map(|()| kernel)
    }
}

impl Choose for super::Recurrence {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let shape = shape(s, &self.step, before(self.tokens));
        self.kernel(s.module(), shape).map(Kernel::Recurrence).or_else(|problem| s.bug(problem))
    }
}

impl Choose for super::RecurrenceGrad {
    fn choose(&self, s: &mut Select) -> Result<Kernel, CompileError> {
        let shape = shape(s, &self.step, usize::from(self.segments));
        self.kernel(s.module(), shape).map(Kernel::RecurrenceGrad).or_else(|problem| s.bug(problem))
    }
}
