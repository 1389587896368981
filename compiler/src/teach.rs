//! Losses of a teacher: values inside a model that training pulls towards those of another.
//!
//! *In*: a lowered model, and patterns of names as [`crate::probe`] has them. *Out*: its functions
//! with a further result, [`Output::Taught`], which they add to; and [`Taught`], which says where
//! the host puts the teacher's values and weights. *Promise*: nothing here knows a component.
//! Values of the host have no gradient; a value of weight 0 moves nothing; evaluation, generation
//! and counts of the model are what they are without a teacher.
//!
//! The loss of `head.logits` is `w Σ (ln Σ_v e^{z_v s} - Σ_v p_v z_v s)` over tokens with a target,
//! for the teacher's probabilities `p` and `s = 1 / temperature`: the divergence of the two but for
//! the entropy of `p`, which has no gradient. That of any other value is `w Σ mean (y - t)²`, the
//! mean over the numbers of a token.

use crate::CompileError;
use crate::architecture::{Architecture, for_each_application};
use crate::assemble::Assembly;
use crate::build::Builder;
use crate::ir::{Binding, DType, Dim, Dims, Function, Input, Module, Op, Output, Reduce, Type, Unary, Value};
use crate::lower::Lowered;
use crate::memory::Slot;
use crate::probe::{Placed, Point, chosen, placed};
use crate::program::BufferId;
use indexmap::{IndexMap, IndexSet};

/// The value that is taught by its divergence.
pub const LOGITS: &str = "head.logits";

/// A value that a teacher teaches, and where the host puts what it gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Taught {
    /// Which.
    pub point: Point,
    /// The teacher's values; of logits its probabilities.
    pub values: BufferId,
    /// The weight of a token.
    pub weight: BufferId,
    /// One over the temperature; of logits alone.
    pub sharpness: Option<BufferId>,
    /// Which instance of these buffers.
    pub instance: u64,
}

/// A value that is taught, and the names of its ports.
pub(crate) struct Lesson {
    point: Point,
    port: String,
}

/// Adds the losses of a teacher to a model's functions.
pub(crate) fn insert(
    architecture: &Architecture,
    lowered: &mut Lowered,
    patterns: &[String],
) -> Result<Vec<Lesson>, CompileError> {
    if patterns.is_empty() {
        return Ok(vec![]);
    }
    let mut still = IndexSet::new();
    for_each_application(&architecture.blocks, architecture.variables, &mut |apply, variables| {
        if apply.detached {
            still.insert(apply.depth.at(variables));
        }
    });
    let all = placed(architecture, lowered);
    let wanted = chosen(&all, patterns)?;
    let mut functions: IndexMap<String, IndexSet<usize>> = IndexMap::new();
    let mut lessons = vec![];
    for (Placed { point, function, number }, _) in all.into_iter().zip(wanted).filter(|(_, wanted)| *wanted) {
        let moves = point.depth.is_none_or(|depth| !still.contains(&depth));
        if point.dtype == DType::I32 || !moves {
            let reason = match moves {
                true => "it is a choice, which has no gradient",
                false => "no gradient goes through this pass",
            };
            return Err(CompileError::Untaught { name: point.name, reason });
        }
        let port = format!("{function}.{number}");
        functions.entry(function).or_default().insert(number);
        lessons.push(Lesson { point, port });
    }
    for (name, numbers) in functions {
        let f = lowered.module.functions[&name].clone();
        let points = lowered.facts.marks.get(&name).map_or(&[][..], |marks| &marks.points);
        let taught = taught(&mut lowered.module, &f, points, &numbers)?;
        lowered.module.functions.insert(name, taught);
    }
    Ok(lessons)
}

/// A function with the losses of some of its points.
fn taught(
    module: &mut Module,
    f: &Function,
    points: &[(String, Value)],
    numbers: &IndexSet<usize>,
) -> Result<Function, CompileError> {
    let mut b = Builder::new(module, &f.name);
    let mut values: Vec<Value> = vec![];
    for (i, port) in f.params.iter().enumerate() {
        values.push(b.param(&port.name, port.binding, f.types[i].clone()));
    }
    for node in &f.nodes {
        let inputs: Vec<Value> = node.inputs.iter().map(|v| values[v.index()]).collect();
        values.extend(b.ops(node.op.clone(), &inputs));
    }
    let stream = f.params.iter().position(|port| port.binding == Binding::Stream);
    let stream = stream.map(|i| b.dims(values[i]));
    let targets = f.params.iter().position(|port| port.binding == Binding::Batch(Input::Targets));
    let mut targets = targets.map(|i| values[i]);
    let mut sum: Option<Value> = None;
    for &number in numbers {
        let (name, own) = &points[number];
        let own = values[own.index()];
        let dims = b.dims(own);
        let untaught = |reason| CompileError::Untaught { name: format!("{}.{name}", f.name), reason };
        let rows = match (&stream, &dims[..]) {
            (Some(stream), [batch, tokens, ..]) if stream[..2] == [*batch, *tokens] => [*batch, *tokens],
            _ => return Err(untaught("it is not of every token")),
        };
        let targets = *targets.get_or_insert_with(|| {
            b.param(Input::Targets.name(), Binding::Batch(Input::Targets), Type::i32(&rows))
        });
        let port = format!("{}.{number}", f.name);
        let each = if f.name == crate::lower::HEAD && format!("head.{name}") == LOGITS {
            divergence(&mut b, own, &port)
        } else {
            distance(&mut b, own, &port, &rows)
        };
        let each = b.op(Op::Keep, &[each, targets]);
        let all = b.reduce(Reduce::Sum, each, &rows);
        let weight = scalar(&mut b, &format!("weight.{port}"));
        let loss = b.mul(all, weight);
        sum = Some(sum.map_or(loss, |sum| b.add(sum, loss)));
    }
    for (port, v) in &f.results {
        b.result(port.clone(), values[v.index()]);
    }
    if let Some(sum) = sum {
        b.result(Output::Taught, sum);
    }
    Ok(b.finish()?)
}

/// A number of the host.
fn scalar(b: &mut Builder, name: &str) -> Value {
    let one = b.module.dim("one", 1);
    let given = b.param(name, Binding::Patched, Type::f32(&[one]));
    b.reshape(given, &[])
}

/// `ln Σ e^{z s} - Σ p z s` of every token.
fn divergence(b: &mut Builder, logits: Value, port: &str) -> Value {
    let dims = b.dims(logits);
    let vocab: &[Dim] = &dims[2..];
    let p = b.param(&format!("taught.{port}"), Binding::Patched, Type::f32(&dims));
    let sharpness = scalar(b, &format!("sharpness.{port}"));
    let z = b.mul(logits, sharpness);
    let largest = b.reduce(Reduce::Max, z, vocab);
    let largest = b.stop_gradient(largest);
    let shifted = b.sub(z, largest);
    let exp = b.unary(Unary::Exp, shifted);
    let all = b.reduce(Reduce::Sum, exp, vocab);
    let log = b.unary(Unary::Log, all);
    // Of shifted logits both terms stay small.
    let expected = b.mul(p, shifted);
    let expected = b.reduce(Reduce::Sum, expected, vocab);
    b.sub(log, expected)
}

/// The mean of the squares of the differences of every token's numbers.
fn distance(b: &mut Builder, own: Value, port: &str, rows: &[Dim; 2]) -> Value {
    let dims = b.dims(own);
    let given = b.param(&format!("taught.{port}"), Binding::Patched, Type::f32(&dims));
    let apart = b.sub(own, given);
    let square = b.unary(Unary::Square, apart);
    let over: Dims = dims.iter().copied().filter(|dim| !rows.contains(dim)).collect();
    if over.is_empty() {
        return square;
    }
    let numbers: u64 = over.iter().map(|dim| b.module.size(*dim)).product();
    let sum = b.reduce(Reduce::Sum, square, &over);
    b.scale(sum, 1.0 / numbers.max(1) as f64)
}

impl Assembly<'_> {
    /// The buffers of what a teacher gives this use.
    pub(crate) fn taught(&self) -> Vec<Taught> {
        let of = |lesson: &Lesson| {
            let bound = |word: &str| self.bound(Slot::Patched(format!("{word}.{}", lesson.port)));
            Some(Taught {
                point: lesson.point.clone(),
                values: bound("taught")?,
                weight: bound("weight")?,
                sharpness: bound("sharpness"),
                instance: lesson.point.depth.unwrap_or(0),
            })
        };
        self.now.lessons.iter().filter_map(of).collect()
    }
}
