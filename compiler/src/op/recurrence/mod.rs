//! Recurrences over the sequence: a function of one step, run once a token.

pub(crate) mod cuda;
pub mod kernel;
mod program;
mod step;

pub use program::{Axis, Code, How, Port as Slice, Program};
pub use step::Step;

use super::conv::{SEGMENTS, SLOTS, check_marks, marks, random_segments, random_slots};
use super::*;
use crate::ir::{self, Module};
use std::collections::HashMap;

/// `(rows x[b, t, ..]…, constants…, initial states…) -> outputs y[b, t, ..]…`: the [`Step`] run for
/// the tokens of each sequence in order, each on the states that the last one left, the first on
/// the initial ones. All are f32.
///
/// With segments, which are the first operand, the initial states stand before each document, as
/// [`Sequence`] says; the outputs of tokens that take no part are zero, and states pass them by.
///
/// With states of texts:
/// `(state[b, n], slots i32[b, t], rows…, constants…, initial…) -> state, outputs…`. The state of a
/// text is the number of its tokens so far and then all states one after another; where that number
/// is zero the text begins, on the initial states.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Recurrence {
    /// The step that runs.
    pub step: Step,
    /// Which tokens are of one sequence.
    pub tokens: Tokens,
}

/// `(operands of the recurrence…, cotangents of its outputs…) -> cotangents of rows, constants and
/// initial states…`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecurrenceGrad {
    /// The step that ran.
    pub step: Step,
    /// Whether the first operand is segments.
    pub segments: bool,
}

/// Operands before the rows.
fn before(tokens: Tokens) -> usize {
    match tokens {
        Tokens::All => 0,
        Tokens::Segments => 1,
        Tokens::Kept => 2,
    }
}

/// That operands from `first` on are rows, constants and initial states of a step; the dimensions
/// of a token.
fn check_operands<'a>(
    x: &'a Operands,
    step: &Step,
    first: usize,
    more: usize,
) -> Result<&'a [Dim], TypeError> {
    step.check(x.module).or_else(|problem| x.fail(problem))?;
    let wanted = first + step.operands() + more;
    if x.len() != wanted {
        return x.fail(format!("the step takes {wanted} operands, there are {}", x.len()));
    }
    let tokens = x[first].dims.get(..2).unwrap_or_default();
    x.check(tokens.len() == 2, "rows are [b, t, ..]")?;
    for (k, ty) in step.rows().enumerate() {
        let dims = [tokens, &ty.dims].concat();
        x.check(x[first + k] == Type::f32(&dims), "each row is f32[b, t, ..] with the step's dimensions")?;
    }
    for (k, ty) in step.constants().chain(step.states()).enumerate() {
        let at = first + step.row_count() + k;
        x.check(x[at] == *ty, "constants and initial states have the types of the step's")?;
    }
    Ok(tokens)
}

impl Recurrence {
    /// The order of the tokens of one sequence.
    fn sequence<'a>(&self, e: &Evaluation<'a>, b: usize, tokens: usize) -> Sequence<'a> {
        match self.tokens {
            Tokens::All => Sequence::default(),
            Tokens::Segments => Sequence::of_segments(Some(marks(e, 0, b, tokens))),
            Tokens::Kept => Sequence::of_slots(marks(e, 1, b, tokens)),
        }
    }
}

/// The values of a sequence in f64: what a step reads that is no state.
struct Reading<'a, 'e> {
    e: &'a Evaluation<'e>,
    step: &'a Step,
    first: usize,
}

impl Reading<'_, '_> {
    fn tensor(&self, ty: &Type, data: Vec<f64>) -> Tensor {
        Tensor::float(&self.e.sizes_of(&ty.dims), data)
    }

    /// The row of operand `k` at a token.
    fn row(&self, k: usize, ty: &Type, token: usize) -> Tensor {
        let n = self.e.module.elements(&ty.dims) as usize;
        self.tensor(ty, self.e.floats(k)[token * n..(token + 1) * n].to_vec())
    }

    fn initial(&self) -> Vec<Tensor> {
        let first = self.first + self.step.row_count() + self.step.constants().count();
        (0..self.step.states().count()).map(|k| self.e.operands[first + k].clone()).collect()
    }

    /// Rows and constants at a token.
    fn at(&self, token: usize) -> Vec<Tensor> {
        let rows = self.step.rows().enumerate().map(|(k, ty)| self.row(self.first + k, ty, token));
        let first = self.first + self.step.row_count();
        let constants = (0..self.step.constants().count()).map(|k| self.e.operands[first + k].clone());
        rows.chain(constants).collect()
    }

    /// Outputs and states of a step.
    fn run(&self, token: usize, states: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>), String> {
        let args = [states, &self.at(token)].concat();
        let args: Vec<&Tensor> = args.iter().collect();
        let f = self.step.function();
        let run = ir::interpret::run(self.e.module, f, &args, &mut |_, _, _| {});
        let results = run.map_err(|e| e.to_string())?.0;
        let mut outputs: Vec<Tensor> = results.into_iter().map(|(_, t)| t).collect();
        let states = outputs.split_off(self.step.outputs().count());
        Ok((outputs, states))
    }
}

impl Payload for Recurrence {
    fn blanks() -> Vec<Self> {
        Tokens::ALL.map(|tokens| Recurrence { step: Step::default(), tokens }).into()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        self.tokens.attribute(a)?;
        a.word("step")?;
        self.step.attribute(a)
    }
}

impl Operation for Recurrence {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "recurrence",
            operands: match self.tokens {
                Tokens::All => &["x0[b, t, ..]", "…"],
                Tokens::Segments => &[SEGMENTS, "x0[b, t, ..]", "…"],
                Tokens::Kept => &["state[b, n]", SLOTS, "x0[b, t, ..]", "…"],
            },
            results: match self.tokens {
                Tokens::All | Tokens::Segments => &["y0[b, t, ..]", "…"],
                Tokens::Kept => &["state[b, n]", "y0[b, t, ..]", "…"],
            },
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: match self.tokens {
                Tokens::Kept => Derivative::Missing("here: nothing is trained through a state of decoding"),
                Tokens::All | Tokens::Segments => Derivative::Rule(self),
            },
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let first = before(self.tokens);
        x.check(x.len() > first, "takes at least one row")?;
        let tokens = check_operands(x, &self.step, first, 0)?;
        let outputs = self.step.outputs().map(|ty| Type::f32(&[tokens, &ty.dims].concat()));
        self.tokens.check(x, usize::from(self.tokens == Tokens::Kept), tokens, false)?;
        match self.tokens {
            Tokens::All | Tokens::Segments => Ok(outputs.collect()),
            Tokens::Kept => {
                let state = &x[0];
                let fits = state.dtype == DType::F32
                    && state.dims.len() == 2
                    && state.dims[0] == tokens[0]
                    && x.size(state.dims[1]) == self.step.state_elements(x.module).saturating_add(1);
                x.check(fits, "the state is f32[b, n], n one more than the elements of all states")?;
                Ok([state.clone()].into_iter().chain(outputs).collect())
            }
        }
    }

    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let first = before(self.tokens);
        let (batch, tokens) = (e.sizes(first)[0], e.sizes(first)[1]);
        let sizes: Vec<usize> = self.step.outputs().map(|ty| e.module.elements(&ty.dims) as usize).collect();
        let mut outputs: Vec<Vec<f64>> = sizes.iter().map(|n| vec![0.0; batch * tokens * n]).collect();
        let mut kept = if self.tokens == Tokens::Kept { e.floats(0).to_vec() } else { vec![] };
        let reading = Reading { e, step: &self.step, first };
        for b in 0..batch {
            let sequence = self.sequence(e, b, tokens);
            let mut states = reading.initial();
            let own = kept.len() / batch * b..kept.len() / batch * (b + 1);
            if let [count, numbers @ ..] = &kept[own.clone()]
                && *count > 0.0
            {
                let mut numbers = numbers.iter().copied();
                for data in states.iter_mut().map(|t| &mut t.data) {
                    if let Data::Float(data) = data {
                        data.iter_mut().for_each(|x| *x = numbers.next().unwrap_or_default());
                    }
                }
            }
            let mut last = None;
            for i in (0..tokens).filter(|&i| sequence.takes_part(i)) {
                if last.is_some_and(|last| !sequence.continues(last, i)) {
                    states = reading.initial();
                }
                let (results, left) = reading.run(b * tokens + i, &states)?;
                states = left;
                for ((to, n), y) in outputs.iter_mut().zip(&sizes).zip(&results) {
                    to[(b * tokens + i) * n..][..*n].copy_from_slice(y.floats());
                }
                last = Some(i);
            }
            if let [count, numbers @ ..] = &mut kept[own] {
                *count += (0..tokens).filter(|&i| sequence.takes_part(i)).count() as f64;
                let left = states.iter().flat_map(|t| t.floats());
                // A text none of whose tokens took part has not begun.
                if *count > 0.0 {
                    numbers.iter_mut().zip(left).for_each(|(to, x)| *to = *x);
                }
            }
        }
        let kept = (self.tokens == Tokens::Kept).then_some(Data::Float(kept));
        Ok(kept.into_iter().chain(outputs.into_iter().map(Data::Float)).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let step = Step::random(&mut case);
        let mut inputs = vec![];
        match self.tokens {
            Tokens::All => {}
            Tokens::Segments => inputs.push(random_segments(&mut case, b, t)),
            Tokens::Kept => {
                let elements = step.state_elements(&case.module) + 1;
                let n = case.sized("n", elements);
                let (mut at, begins) = (0, case.rng.once_in(2));
                let state = case.floats_from("state", &[b, n], |rng| {
                    at += 1;
                    match (at - 1) % elements == 0 {
                        true => {
                            if begins {
                                0.0
                            } else {
                                3.0
                            }
                        }
                        false => rng.between(-1.5, 1.5),
                    }
                });
                case.function.params[state.index()].binding = Binding::State(Lifetime::Depth);
                inputs.push(state);
                inputs.push(random_slots(&mut case, b, t));
            }
        }
        inputs.extend(random_operands(&mut case, &step, b, t));
        case.finish(Recurrence { step, tokens: self.tokens }, &inputs)
    }
}

/// Rows, constants and initial states of a step, called `x0` and so on.
fn random_operands(case: &mut Case, step: &Step, b: Dim, t: Dim) -> Vec<Value> {
    let rows = step.rows().map(|ty| [&[b, t], &ty.dims[..]].concat().into());
    let others = step.constants().chain(step.states()).map(|ty| ty.dims.clone());
    let dims: Vec<Dims> = rows.chain(others).collect();
    dims.iter().enumerate().map(|(k, dims)| case.floats(&format!("x{k}"), dims)).collect()
}

impl Counted for Recurrence {
    /// A step for each token.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let first = before(self.tokens);
        let tokens = Count::from(s.size(first, 0)) * s.size(first, 1);
        s.whole(tokens * self.step.cost(s.module))
    }
}

impl Reverse for Recurrence {
    fn reverse(&self, at: &mut Adjoint) -> Result<(), CompileError> {
        let mut operands = at.operands();
        for k in 0..self.step.outputs().count() {
            operands.push(at.cotangent_or_zeros(k));
        }
        let segments = self.tokens == Tokens::Segments;
        let grad = RecurrenceGrad { step: self.step.clone(), segments };
        let found = at.builder().ops(grad, &operands);
        for (k, d) in found.into_iter().enumerate() {
            at.add(before(self.tokens) + k, d);
        }
        Ok(())
    }
}

impl Payload for RecurrenceGrad {
    fn blanks() -> Vec<Self> {
        [false, true].map(|segments| RecurrenceGrad { step: Step::default(), segments }).into()
    }

    fn attributes(&mut self, a: &mut dyn Attributes) -> Parsed<()> {
        a.flag("segments", &mut self.segments)?;
        a.word("step")?;
        self.step.attribute(a)
    }
}

impl Operation for RecurrenceGrad {
    fn signature(&self) -> Signature<'_> {
        Signature {
            name: "recurrence_grad",
            operands: if self.segments {
                &[SEGMENTS, "x0[b, t, ..]", "…"]
            } else {
                &["x0[b, t, ..]", "…"]
            },
            results: &["dx0[b, t, ..]", "…"],
            class: Class::anchored(self),
            rows: Rows::All,
            bf16: Bf16::Own,
            work: Work::Counted(self),
            derivative: Derivative::SECOND_ORDER,
        }
    }

    fn infer(&self, x: &Operands) -> Result<Vec<Type>, TypeError> {
        let first = usize::from(self.segments);
        x.check(x.len() > first, "takes at least one row")?;
        let outputs = self.step.outputs().count();
        let tokens = check_operands(x, &self.step, first, outputs)?;
        if self.segments {
            check_marks(x, 0, tokens)?;
        }
        self.step.adjoint(x.module).or_else(|e| x.fail(e.to_string()))?;
        let last = first + self.step.operands();
        for (k, ty) in self.step.outputs().enumerate() {
            let expected = Type::f32(&[tokens, &ty.dims].concat());
            x.check(x[last + k] == expected, "there is a cotangent of each output, of its type")?;
        }
        Ok((first..last).map(|k| x[k].clone()).collect())
    }

    /// States of all tokens are kept, and the adjoint of the step runs on them from the last.
    fn interpret(&self, e: &mut Evaluation) -> Result<Vec<Data>, String> {
        let first = usize::from(self.segments);
        let (batch, tokens) = (e.sizes(first)[0], e.sizes(first)[1]);
        let adjoint = self.step.adjoint(e.module).map_err(|e| e.to_string())?;
        let last = first + self.step.operands();
        let mut found: Vec<Vec<f64>> = (first..last).map(|k| vec![0.0; e.floats(k).len()]).collect();
        let reading = Reading { e, step: &self.step, first };
        let initial = reading.initial();
        let zeros = |t: &Tensor| Tensor::float(&t.dims, vec![0.0; t.floats().len()]);
        for b in 0..batch {
            let sequence = Sequence::of_segments(self.segments.then(|| marks(e, 0, b, tokens)));
            let taking: Vec<usize> = (0..tokens).filter(|&i| sequence.takes_part(i)).collect();
            let mut held: Vec<Vec<Tensor>> = vec![];
            let mut states = initial.clone();
            for (n, &i) in taking.iter().enumerate() {
                if n > 0 && !sequence.continues(taking[n - 1], i) {
                    states = initial.clone();
                }
                let (_, left) = reading.run(b * tokens + i, &states)?;
                held.push(std::mem::replace(&mut states, left));
            }
            let mut d_states: Vec<Tensor> = initial.iter().map(zeros).collect();
            for (n, &i) in taking.iter().enumerate().rev() {
                let token = b * tokens + i;
                let outputs = self.step.outputs().enumerate();
                let d_outputs = outputs.map(|(k, ty)| reading.row(last + k, ty, token)).collect();
                let given = [held[n].clone(), reading.at(token), d_outputs, d_states].concat();
                let d = adjoint.evaluate(e.module, &self.step, &given)?;
                d_states = d[..initial.len()].to_vec();
                let (rows, constants) = d[initial.len()..].split_at(self.step.row_count());
                for (to, d) in found.iter_mut().zip(rows) {
                    let n = d.floats().len();
                    to[token * n..(token + 1) * n].copy_from_slice(d.floats());
                }
                let sums = found[rows.len()..].iter_mut();
                for (to, d) in sums.zip(constants) {
                    to.iter_mut().zip(d.floats()).for_each(|(to, d)| *to += d);
                }
                if n == 0 || !sequence.continues(taking[n - 1], i) {
                    let sums = found[rows.len() + constants.len()..].iter_mut();
                    for (to, d) in sums.zip(&d_states) {
                        to.iter_mut().zip(d.floats()).for_each(|(to, d)| *to += d);
                    }
                    d_states = initial.iter().map(zeros).collect();
                }
            }
        }
        Ok(found.into_iter().map(Data::Float).collect())
    }

    fn random(&self, mut case: Case) -> Instance {
        let (b, t) = (case.dim("b"), case.dim("t"));
        let step = Step::random(&mut case);
        let mut inputs = vec![];
        if self.segments {
            inputs.push(random_segments(&mut case, b, t));
        }
        let operands = random_operands(&mut case, &step, b, t);
        inputs.extend(&operands);
        let outputs: Vec<Dims> =
            step.outputs().map(|ty| [b, t].into_iter().chain(ty.dims.iter().copied()).collect()).collect();
        for (k, dims) in outputs.iter().enumerate() {
            inputs.push(case.floats(&format!("x{}", operands.len() + k), dims));
        }
        case.finish(RecurrenceGrad { step, segments: self.segments }, &inputs)
    }
}

impl Counted for RecurrenceGrad {
    /// Two steps for each token, since states between those kept are made again, and the adjoint of
    /// one.
    fn cost(&self, s: &Shapes, _: &Extents) -> Counts {
        let first = usize::from(self.segments);
        let tokens = Count::from(s.size(first, 0)) * s.size(first, 1);
        let adjoint = self.step.adjoint(s.module).map_or(Count(None), |a| a.cost(s.module));
        s.whole(tokens * self.step.cost(s.module) * 2 + tokens * adjoint)
    }
}
