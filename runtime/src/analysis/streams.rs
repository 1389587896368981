//! The stream along depth: its norm after every layer, how much each layer turns it (block
//! influence, ShortGPT, 2403.03853), how alike what layers add is, and how far each pass of a loop
//! moves it.
//!
//! *In*: a model that has evaluated a batch. *Out*: sums that [`Watched::found`] makes means of.
//! *Promise*: streams are those of the evaluation, read from the device. Passes without a gradient
//! share one place for their streams, which keeps only the last: they are not listed.

use crate::model::{Model, ModelError};
use dreamc_compiler::CompileError;
use dreamc_compiler::architecture::{Architecture, Work, for_each_application};
use dreamc_compiler::compiled::Entry;
use dreamc_dsl::spec;
use serde::Serialize;

/// Tokens of a batch by which layers are compared with each other, at most: it takes memory for all
/// layers, and time for each two.
const ALIKE: usize = 256;

/// The stream along depth.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Streams {
    /// Mean Euclidean norm of a token's stream: of the embedding, and after each layer.
    pub norms: Vec<Norm>,
    /// Of each layer, by depth, the mean of `1 - cos` of the stream before and after it.
    pub influence: Vec<f64>,
    /// Of each two layers, by depth, the mean cosine of what they add to the stream, over some
    /// tokens of each batch.
    pub similarity: Vec<Vec<f64>>,
    /// How far passes move it.
    pub passes: Vec<Movement>,
}

/// The stream in one place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// Layers before it.
    pub depth: u64,
    /// Mean norm.
    pub norm: f64,
}

/// A pass of a `recur` that is an item of the body.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Movement {
    /// Which of its passes, from 0.
    pub pass: u64,
    /// Layers before its end.
    pub depth: u64,
    /// Mean of `‖x_p - x_{p-1}‖ / ‖x_p‖` over tokens.
    pub movement: f64,
}

/// A pass: the places before and after it.
struct Pass {
    number: u64,
    depth: u64,
    from: u64,
    to: u64,
}

/// Sums while observing.
pub(super) struct Watched {
    /// Layers before a place, and the place.
    places: Vec<(u64, u64)>,
    passes: Vec<Pass>,
    norms: Vec<f64>,
    /// The place before each layer.
    layers: Vec<u64>,
    turns: Vec<f64>,
    /// Sums of cosines, a row for each layer, and the tokens that they are of.
    alike: Vec<f64>,
    compared: u64,
    movements: Vec<f64>,
}

impl Watched {
    pub(super) fn new(model: &spec::Model) -> Result<Self, CompileError> {
        let a = Architecture::new(model, None)?;
        let (mut places, mut passes, mut layers) = (vec![(0, 0)], Vec::<Pass>::new(), vec![]);
        for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
            let (from, depth) = (apply.place.at(variables), apply.depth.at(variables));
            let layer = matches!(a.bodies[apply.body].work, Work::Layer(_));
            let depth = depth + u64::from(layer);
            if apply.detached {
                return;
            }
            if layer {
                places.push((depth, from + 1));
                layers.push(from);
            }
            if apply.pass.terms.is_empty() {
                return;
            }
            let number = apply.pass.at(variables);
            match passes.last_mut().filter(|pass| pass.number == number && pass.to == from) {
                Some(pass) => (pass.depth, pass.to) = (depth, from + 1),
                None => passes.push(Pass { number, depth, from, to: from + 1 }),
            }
        });
        let (norms, movements) = (vec![0.0; places.len()], vec![0.0; passes.len()]);
        let (turns, alike) = (vec![0.0; layers.len()], vec![0.0; layers.len() * layers.len()]);
        Ok(Watched { places, passes, norms, layers, turns, alike, compared: 0, movements })
    }

    /// Adds the streams of the batch that was evaluated last.
    pub(super) fn add(&mut self, model: &Model, real: &[bool]) -> Result<(), ModelError> {
        let Some(buffer) = model.compiled().stream(Entry::Whole) else { return Ok(()) };
        let elements = model.compiled().plan.buffer(buffer).elements() as usize;
        let wide = (elements / real.len().max(1)).max(1);
        let at = |place: u64| -> Result<Vec<f32>, ModelError> {
            let mut values = vec![0.0; elements];
            model.session().read_at(buffer, place, 0, &mut values)?;
            Ok(values)
        };
        let length =
            |row: &mut dyn Iterator<Item = f32>| row.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        for ((_, place), sum) in self.places.iter().zip(&mut self.norms) {
            let stream = at(*place)?;
            let rows = stream.chunks(wide).zip(real).filter(|(_, real)| **real);
            *sum += rows.map(|(row, _)| length(&mut row.iter().copied())).sum::<f64>();
        }
        let all = self.layers.len();
        let mut added = Vec::with_capacity(all);
        for (place, sum) in self.layers.iter().zip(&mut self.turns) {
            let (before, mut behind) = (at(*place)?, at(place + 1)?);
            let rows = before.chunks(wide).zip(behind.chunks(wide)).zip(real);
            *sum += rows.filter(|(_, real)| **real).map(|((x, y), _)| 1.0 - cosine(x, y)).sum::<f64>();
            behind.iter_mut().zip(&before).for_each(|(y, x)| *y -= x);
            let rows = behind.chunks(wide).zip(real).filter(|(_, real)| **real).take(ALIKE);
            added.push(rows.flat_map(|(row, _)| row.iter().copied()).collect::<Vec<f32>>());
        }
        self.compared += added.first().map_or(0, |rows| (rows.len() / wide) as u64);
        for (i, a) in added.iter().enumerate() {
            for (j, b) in added[..i].iter().enumerate() {
                let rows = a.chunks(wide).zip(b.chunks(wide));
                self.alike[i * all + j] += rows.map(|(x, y)| cosine(x, y)).sum::<f64>();
            }
        }
        for (pass, sum) in self.passes.iter().zip(&mut self.movements) {
            let (before, behind) = (at(pass.from)?, at(pass.to)?);
            let rows = before.chunks(wide).zip(behind.chunks(wide)).zip(real);
            for ((x, y), _) in rows.filter(|(_, real)| **real) {
                let moved = length(&mut x.iter().zip(y).map(|(x, y)| y - x));
                *sum += moved / length(&mut y.iter().copied()).max(f64::MIN_POSITIVE);
            }
        }
        Ok(())
    }

    /// Means over `tokens` tokens.
    pub(super) fn found(self, tokens: u64) -> Streams {
        let tokens = tokens.max(1) as f64;
        let norms = self.places.iter().zip(&self.norms);
        let passes = self.passes.iter().zip(&self.movements);
        let all = self.layers.len();
        let cosine = |i: usize, j: usize| match i == j {
            true => 1.0,
            false => self.alike[i.max(j) * all + i.min(j)] / self.compared.max(1) as f64,
        };
        Streams {
            influence: self.turns.iter().map(|sum| sum / tokens).collect(),
            similarity: (0..all).map(|i| (0..all).map(|j| cosine(i, j)).collect()).collect(),
            norms: norms.map(|((depth, _), sum)| Norm { depth: *depth, norm: sum / tokens }).collect(),
            passes: passes
                .map(|(p, sum)| Movement { pass: p.number, depth: p.depth, movement: sum / tokens })
                .collect(),
        }
    }
}

/// The cosine of two rows; 0 where one of them is zero.
fn cosine(x: &[f32], y: &[f32]) -> f64 {
    let dot =
        |x: &[f32], y: &[f32]| -> f64 { x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum() };
    dot(x, y) / (dot(x, x) * dot(y, y)).sqrt().max(f64::MIN_POSITIVE)
}
