//! Looking into a model and changing what it computes: captured values, patches, the logit lens,
//! ablations, linear probes.
//!
//! *In*: a model compiled with [`Options::probe`](dreamc_compiler::Options), a batch. *Out*: values
//! by name, and tables of them. *Promise*: every figure is of the program that evaluates the model;
//! nothing is computed a second way. A patch that does not fit changes nothing.

use crate::model::{Model, ModelError};
use dreamc_compiler::ir::DType;
use dreamc_compiler::probe::{Probed, nearest};
use dreamc_data::Batch;
use serde::Serialize;
use thiserror::Error;

/// Why a model cannot be looked into.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// The model or its device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A value of another shape.
    #[error("`{name}` is {expected:?} here, and {found:?} was given")]
    Shape {
        /// The value.
        name: String,
        /// Its shape.
        expected: Vec<u64>,
        /// The shape given.
        found: Vec<u64>,
    },
    /// A value that the program does not take or leave.
    #[error("nothing in the model is called `{name}`: {nearest}")]
    Unknown {
        /// The name.
        name: String,
        /// Names that it is near to.
        nearest: String,
    },
    /// A stream that no head reads.
    #[error(
        "under `stream attend` no sum passes from layer to layer that a head could read: such a model has no logit lens"
    )]
    NoLens,
}

/// A model that is looked into.
pub struct Probing {
    model: Model,
    points: Vec<Probed>,
}

impl Probing {
    /// Nothing is changed yet.
    pub fn new(model: Model) -> Result<Self, ModelError> {
        let points = model.compiled().probed.clone();
        let mut probing = Probing { model, points };
        probing.clear()?;
        Ok(probing)
    }

    /// The model, which computes with the changes there are.
    pub fn model(&mut self) -> &mut Model {
        &mut self.model
    }

    /// The values that it leaves or takes.
    pub fn points(&self) -> &[Probed] {
        &self.points
    }

    /// The points that are looked at.
    pub fn captured(&self) -> impl Iterator<Item = &Probed> {
        self.points.iter().filter(|probed| probed.value.is_some())
    }

    /// Names of those that can be changed.
    pub fn changeable(&self) -> impl Iterator<Item = &Probed> {
        self.points.iter().filter(|probed| probed.patch.is_some())
    }

    /// A value as the last evaluation left it; choices as numbers.
    pub fn value(&self, name: &str) -> Result<Vec<f32>, ProbeError> {
        let probed = self.captured().find(|probed| probed.point.name == name);
        let Some(Probed { value: Some(buffer), instance, point, .. }) = probed else {
            return Err(unknown(name, self.captured()));
        };
        let many = point.shape.iter().product::<u64>() as usize;
        let session = self.model.session();
        let read = |e| ProbeError::Model(ModelError::Device(e));
        Ok(match self.model.compiled().plan.buffer(*buffer).dtype {
            DType::F32 => {
                let mut values = vec![0f32; many];
                session.read_at(*buffer, *instance, 0, &mut values).map_err(read)?;
                values
            }
            DType::Bf16 => {
                let mut values = vec![half::bf16::ZERO; many];
                session.read_at(*buffer, *instance, 0, &mut values).map_err(read)?;
                values.into_iter().map(f32::from).collect()
            }
            DType::I32 => {
                let mut values = vec![0i32; many];
                session.read_at(*buffer, *instance, 0, &mut values).map_err(read)?;
                values.into_iter().map(|x| x as f32).collect()
            }
            // Weights alone are packed, and operands alone are codes: no value inside a model is
            // one.
            DType::E4m3 | DType::Packed(_) => return Err(unknown(name, self.captured())),
        })
    }

    /// Refuses values that do not fit.
    pub fn check(&self, name: &str, shape: &[u64]) -> Result<&Probed, ProbeError> {
        let found = self.changeable().find(|probed| probed.point.name == name);
        let Some(probed) = found else { return Err(unknown(name, self.changeable())) };
        if probed.point.shape != shape {
            let (expected, found) = (probed.point.shape.clone(), shape.to_vec());
            return Err(ProbeError::Shape { name: name.into(), expected, found });
        }
        Ok(probed)
    }

    /// From now on gives a value these numbers, where `given` holds of the number's place;
    /// elsewhere it is the model's.
    pub fn change(
        &mut self,
        name: &str,
        (shape, values): (&[u64], &[f32]),
        given: impl Fn(usize) -> bool,
    ) -> Result<(), ProbeError> {
        let probed = self.check(name, shape)?;
        let (Some(patch), instance) = (probed.patch, probed.instance) else {
            return Err(unknown(name, self.changeable()));
        };
        let many = shape.iter().product::<u64>() as usize;
        if values.len() != many {
            let (expected, found) = (shape.to_vec(), vec![values.len() as u64]);
            return Err(ProbeError::Shape { name: name.into(), expected, found });
        }
        let mask: Vec<f32> = (0..many).map(|i| if given(i) { 1.0 } else { 0.0 }).collect();
        let mut session = self.model.session();
        let written = session.write_at(patch.values, instance, 0, values);
        written.and_then(|()| session.write_at(patch.given, instance, 0, &mask)).map_err(ModelError::from)?;
        Ok(())
    }

    /// Takes all changes back.
    pub fn clear(&mut self) -> Result<(), ModelError> {
        for probed in &self.points {
            let Some(patch) = probed.patch else { continue };
            let zeros = vec![0f32; probed.point.shape.iter().product::<u64>() as usize];
            let mut session = self.model.session();
            session.write_at(patch.values, probed.instance, 0, &zeros)?;
            session.write_at(patch.given, probed.instance, 0, &zeros)?;
        }
        Ok(())
    }

    /// Mean loss of a batch with the changes there are.
    pub fn loss(&mut self, batch: &Batch) -> Result<f64, ModelError> {
        let losses = self.model.evaluate(batch)?;
        Ok(mean(batch, &losses))
    }
}

fn unknown<'p>(name: &str, points: impl Iterator<Item = &'p Probed>) -> ProbeError {
    let nearest = nearest(name, points.map(|probed| probed.point.name.as_str()));
    ProbeError::Unknown { name: name.into(), nearest }
}

/// The mean over the targets there are.
fn mean(batch: &Batch, losses: &[f32]) -> f64 {
    let learned = batch.targets.iter().zip(losses).filter(|(target, _)| **target >= 0);
    learned.map(|(_, loss)| f64::from(*loss)).sum::<f64>() / batch.learned().max(1) as f64
}

/// Whether a name is that of the stream after a layer.
pub fn is_stream(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    matches!(parts[..], ["layers", _, "out"])
}

/// Patterns of what [`lens`] looks at, and changes.
pub const LENS: [&str; 2] = ["layers.*.out", "head.stream"];

/// The losses of the head on a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Look {
    /// The stream: `layers.{set}.out`.
    pub name: String,
    /// Mean loss, in nats.
    pub loss: f64,
    /// Share of the targets that are the likeliest token.
    pub right: f64,
    /// Share of the targets at which the likeliest token is that of the last stream.
    pub agrees: f64,
    /// The loss of every token.
    #[serde(skip)]
    pub losses: Vec<f32>,
}

/// The logit lens (nostalgebraist, 2020): the losses that the head has on the stream after every
/// application of a layer, in their order.
pub fn lens(probing: &mut Probing, batch: &Batch) -> Result<Vec<Look>, ProbeError> {
    probing.clear()?;
    probing.model.evaluate(batch)?;
    let last = likeliest(&probing.model)?;
    let names: Vec<(String, Vec<u64>)> = probing
        .captured()
        .filter(|probed| is_stream(&probed.point.name))
        .map(|probed| (probed.point.name.clone(), probed.point.shape.clone()))
        .collect();
    let streams = names.iter().map(|(name, _)| probing.value(name)).collect::<Result<Vec<_>, _>>()?;
    let mut found = vec![];
    for ((name, shape), stream) in names.into_iter().zip(streams) {
        probing.change(LENS[1], (&shape, &stream), |_| true)?;
        let losses = probing.model.evaluate(batch)?;
        let tokens = likeliest(&probing.model)?;
        let of = |holds: &dyn Fn(usize) -> bool| {
            let learned = batch.targets.iter().enumerate().filter(|(_, target)| **target >= 0);
            learned.filter(|(i, _)| holds(*i)).count() as f64 / batch.learned().max(1) as f64
        };
        found.push(Look {
            name,
            loss: mean(batch, &losses),
            right: of(&|i| tokens[i] as i32 == batch.targets[i]),
            agrees: of(&|i| tokens[i] == last[i]),
            losses,
        });
    }
    probing.clear()?;
    Ok(found)
}

/// The likeliest token after every token of the last evaluation; of equal ones the first.
fn likeliest(model: &Model) -> Result<Vec<usize>, ModelError> {
    let logits = model.all_logits()?;
    let tokens = (model.batch() * model.sequence()).max(1);
    Ok(logits.chunks((logits.len() / tokens).max(1)).map(largest).collect())
}

/// The place of the largest number; of equal ones the first.
pub fn largest(values: &[f32]) -> usize {
    let better = |best: usize, i: usize| if values[i] > values[best] { i } else { best };
    (1..values.len()).fold(0, better)
}

/// Which parts are taken out, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Heads of attentions: their output is zero.
    Heads,
    /// Experts: their gate is zero.
    Experts,
}

impl Part {
    /// The values that are looked at and changed.
    pub fn patterns(self) -> [Vec<String>; 2] {
        let all = |names: &[&str]| names.iter().map(|name| format!("layers.*.{name}")).collect();
        match self {
            Part::Heads => [vec![], all(&["heads", "heads.*"])],
            Part::Experts => [all(&["chosen", "gates"]), all(&["gates"])],
        }
    }
}

/// A measure of a model without a part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Without {
    /// The component in its layer: `layers.{set}.{component}`.
    pub name: String,
    /// Which head or expert of it.
    pub number: u64,
    /// The measure without it.
    pub measure: f64,
}

/// Where the heads of attentions are: the component, the name of the value, its shape.
pub fn heads(probing: &Probing) -> Vec<(String, String, Vec<u64>)> {
    let of = |probed: &Probed| {
        let (name, shape) = (probed.point.name.clone(), probed.point.shape.clone());
        let component = name.strip_suffix(".heads").map(String::from);
        let numbered = || {
            let (before, number) = name.rsplit_once('.')?;
            Some(format!("{}.{number}", before.strip_suffix(".heads")?))
        };
        let component = component.or_else(numbered)?;
        (shape.len() == 4).then_some((component, name, shape))
    };
    probing.changeable().filter_map(of).collect()
}

/// Measures a model without each head of its attentions.
pub fn without_heads<E: From<ProbeError>>(
    probing: &mut Probing,
    measure: &mut dyn FnMut(&mut Model) -> Result<f64, E>,
) -> Result<Vec<Without>, E> {
    let mut found = vec![];
    for (component, name, shape) in heads(probing) {
        let each = shape[3] as usize;
        let zeros = vec![0f32; shape.iter().product::<u64>() as usize];
        for head in 0..shape[2] {
            let of = |i: usize| (i / each) as u64 % shape[2] == head;
            probing.change(&name, (&shape, &zeros), of)?;
            let measure = measure(&mut probing.model)?;
            found.push(Without { name: component.clone(), number: head, measure });
        }
        probing.clear().map_err(ProbeError::from)?;
    }
    Ok(found)
}

/// The loss of a batch without each expert that a token of it chose.
pub fn without_experts(probing: &mut Probing, batch: &Batch) -> Result<Vec<Without>, ProbeError> {
    probing.clear()?;
    probing.model.evaluate(batch)?;
    let mut all = vec![];
    for probed in probing.changeable() {
        let Some(component) = probed.point.name.strip_suffix(".gates") else { continue };
        let (name, shape) = (probed.point.name.clone(), probed.point.shape.clone());
        let chosen = probing.value(&format!("{component}.chosen"))?;
        let gates = probing.value(&name)?;
        all.push((component.to_string(), name, shape, chosen, gates));
    }
    let mut found = vec![];
    for (component, name, shape, chosen, gates) in all {
        let mut experts: Vec<u64> = chosen.iter().map(|e| *e as u64).collect();
        experts.sort_unstable();
        experts.dedup();
        for expert in experts {
            let without: Vec<f32> =
                gates.iter().zip(&chosen).map(|(g, e)| if *e as u64 == expert { 0.0 } else { *g }).collect();
            probing.change(&name, (&shape, &without), |_| true)?;
            let measure = probing.loss(batch)?;
            found.push(Without { name: component.clone(), number: expert, measure });
        }
        probing.clear()?;
    }
    Ok(found)
}

/// How well a linear map of a value says what a token is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Linear {
    /// Classes among the labels that were learned from.
    pub classes: u64,
    /// Tokens that were learned from.
    pub learned: u64,
    /// Tokens of the rows that were held out.
    pub held: u64,
    /// Share of those that it says right.
    pub right: f64,
    /// Share of the class that is the most frequent among those learned from.
    pub commonest: f64,
}

/// Why there is no linear probe.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LinearError {
    /// Nothing to learn from, or to try it on.
    #[error(
        "a linear probe learns from the labels of every other row and is tried on those of the rest: each needs some, at 0 or above"
    )]
    Labels,
    /// Values so long that the normal equations take too much memory.
    #[error("a linear probe takes values of at most {MOST} numbers, and these have {0}")]
    Long(usize),
}

/// Numbers of a value of a token, at most.
const MOST: usize = 4096;

/// A ridge regression (with one for its penalty, on standardised numbers) from the numbers of each
/// token to the classes of `labels`, -1 for none: from rows 0, 2, … and tried on the others.
pub fn linear(values: &[f32], labels: &[i32], sequence: usize) -> Result<Linear, LinearError> {
    let width = values.len() / labels.len().max(1);
    if width > MOST {
        return Err(LinearError::Long(width));
    }
    let rows = |odd: usize| {
        let of = move |i: &usize| labels[*i] >= 0 && i / sequence.max(1) % 2 == odd;
        (0..labels.len()).filter(of).collect::<Vec<usize>>()
    };
    let (learned, held) = (rows(0), rows(1));
    if learned.is_empty() || held.is_empty() || width == 0 {
        return Err(LinearError::Labels);
    }
    let mut classes: Vec<i32> = learned.iter().map(|i| labels[*i]).collect();
    classes.sort_unstable();
    let times = |class: &i32| classes.iter().filter(|c| *c == class).count();
    let mut distinct = classes.clone();
    distinct.dedup();
    let commonest = distinct.iter().copied().max_by_key(|class| times(class)).unwrap_or(0);
    let (means, scales) = standard(values, &learned, width);
    let features = |i: usize| -> Vec<f64> {
        let own = &values[i * width..(i + 1) * width];
        let scaled = own.iter().zip(&means).zip(&scales).map(|((x, m), s)| (f64::from(*x) - m) * s);
        scaled.chain([1.0]).collect()
    };
    let n = width + 1;
    let (mut normal, mut right) = (vec![0f64; n * n], vec![0f64; n * distinct.len()]);
    for &i in &learned {
        let x = features(i);
        let class = distinct.binary_search(&labels[i]).unwrap_or(0);
        for (a, xa) in x.iter().enumerate() {
            for (b, xb) in x[..=a].iter().enumerate() {
                normal[a * n + b] += xa * xb;
            }
            right[a * distinct.len() + class] += xa;
        }
    }
    (0..n).for_each(|a| normal[a * n + a] += 1.0);
    solve(&mut normal, &mut right, n, distinct.len());
    let said = |i: &usize| {
        let x = features(*i);
        let score =
            |c: usize| -> f64 { x.iter().enumerate().map(|(a, x)| x * right[a * distinct.len() + c]).sum() };
        let best = (0..distinct.len()).fold(0, |best, c| if score(c) > score(best) { c } else { best });
        distinct[best]
    };
    let share =
        |holds: &dyn Fn(&usize) -> bool| held.iter().filter(|i| holds(i)).count() as f64 / held.len() as f64;
    Ok(Linear {
        classes: distinct.len() as u64,
        learned: learned.len() as u64,
        held: held.len() as u64,
        right: share(&|i| said(i) == labels[*i]),
        commonest: share(&|i| labels[*i] == commonest),
    })
}

/// Means, and one over the standard deviations, of the numbers of some tokens.
fn standard(values: &[f32], of: &[usize], width: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut means, mut squares) = (vec![0f64; width], vec![0f64; width]);
    for &i in of {
        for (a, x) in values[i * width..(i + 1) * width].iter().enumerate() {
            means[a] += f64::from(*x) / of.len() as f64;
        }
    }
    for &i in of {
        for (a, x) in values[i * width..(i + 1) * width].iter().enumerate() {
            squares[a] += (f64::from(*x) - means[a]).powi(2) / of.len() as f64;
        }
    }
    let scales = squares.iter().map(|s| if *s > 0.0 { 1.0 / s.sqrt() } else { 0.0 }).collect();
    (means, scales)
}

/// Solves `A X = B` in place of `B`, of whose `A`, symmetric and positive, the lower half is given.
fn solve(a: &mut [f64], b: &mut [f64], n: usize, columns: usize) {
    for j in 0..n {
        for k in 0..j {
            let factor = a[j * n + k];
            for i in j..n {
                a[i * n + j] -= a[i * n + k] * factor;
            }
        }
        let root = a[j * n + j].max(f64::MIN_POSITIVE).sqrt();
        (j..n).for_each(|i| a[i * n + j] /= root);
    }
    for c in 0..columns {
        for i in 0..n {
            let done: f64 = (0..i).map(|k| a[i * n + k] * b[k * columns + c]).sum();
            b[i * columns + c] = (b[i * columns + c] - done) / a[i * n + i];
        }
        for i in (0..n).rev() {
            let done: f64 = (i + 1..n).map(|k| a[k * n + i] * b[k * columns + c]).sum();
            b[i * columns + c] = (b[i * columns + c] - done) / a[i * n + i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_is_solved() {
        let mut a = vec![4.0, 0.0, 2.0, 3.0];
        let mut b = vec![8.0, 7.0];
        solve(&mut a, &mut b, 2, 1);
        assert!((b[0] - 1.25).abs() < 1e-12 && (b[1] - 1.5).abs() < 1e-12, "{b:?}");
    }

    /// The class is the sign of the second number: the map is found, and a label of noise is not.
    #[test]
    fn a_linear_probe_finds_what_is_there_and_nothing_else() {
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as f32 / (1u64 << 31) as f32 - 0.5
        };
        let values: Vec<f32> = (0..8 * 16 * 3).map(|_| random()).collect();
        let signs: Vec<i32> = values.chunks(3).map(|v| i32::from(v[1] > 0.0)).collect();
        let found = linear(&values, &signs, 16).unwrap();
        assert!(found.right > 0.9, "{found:?}");
        assert_eq!((found.classes, found.learned, found.held), (2, 64, 64));
        let noise: Vec<i32> = (0..8 * 16).map(|_| i32::from(random() > 0.0)).collect();
        let found = linear(&values, &noise, 16).unwrap();
        assert!(found.right < 0.7, "{found:?}");
        assert_eq!(linear(&values, &[-1; 128], 16), Err(LinearError::Labels));
        assert_eq!(linear(&values[..48], &signs[..16], 16), Err(LinearError::Labels));
    }

    #[test]
    fn streams_are_known_by_their_names() {
        assert!(is_stream("layers.3.out") && is_stream("layers.3@1.out"));
        assert!(!is_stream("layers.3.sa.out") && !is_stream("embed.out"));
    }
}
