//! Matmuls that read e4m3 read nothing finer.
//!
//! A number that is rounded before it is read may as well be rounded before it is stored: a weight
//! whose numbers are rounded already changes no bit of a step. And where a text has one token, the
//! gradient of a weight that is applied once is one product of two numbers of e4m3, whose eight
//! significant bits bf16 has; the product of two numbers of bf16 has sixteen.

use super::subject::{Subject, Trained, backward};
use super::{Checks, Place, Proof, VerifyError};
use dreamc_compiler::Options;
use dreamc_compiler::architecture::{Architecture, components};
use dreamc_compiler::compiled::{Tensor, TensorKind};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Batch;
use dreamc_dsl::spec::Component;
use dreamc_runtime::model::Model;
use half::bf16;

/// The proof's name: it is tried where the recipe asks for fp8.
pub const NAME: &str = "fp8";

/// Matmuls read e4m3.
pub struct Fp8;

/// Sides of a tile: a larger matrix has several scales.
const TILE: u64 = 128;

impl Proof for Fp8 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self) -> &'static str {
        "matmuls of layers read numbers of e4m3"
    }

    fn how(&self) -> &'static str {
        "a step with every matrix of a layer rounded by a second implementation before it is stored: logits, loss and gradients \
         have the bits of the step without; gradients of one token are products of two such numbers, which bf16 has"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        if s.spec.model.adapt.is_some() {
            return Ok(Some("adapters add to a matrix before it is rounded".into()));
        }
        let options = Options { narrow: Narrow::Fp8, rewrite: Rewriting::off(), ..s.options() };
        let device = s.cpu(1);
        let mut model = s.load(&device, &options)?;
        let tensors: Vec<Tensor> =
            model.compiled().tensors.iter().filter(|t| is_rounded(s, t)).cloned().collect();
        if tensors.is_empty() {
            return Ok(Some("no layer has a matrix of at most 128 by 128 that matmuls alone read".into()));
        }
        let expected = backward(&mut model, &s.batch, None)?;
        let mut moved = 0;
        for t in &tensors {
            let values = model.get(&t.name)?;
            let rounded = rounded(&values, matrices(t));
            moved += values.iter().zip(&rounded).filter(|(a, b)| a != b).count();
            model.set(&t.name, &rounded)?;
        }
        checks.check("matrices of e4m3", f64::from(u8::from(moved == 0)), 0.0, Place::default());
        same(checks, &backward(&mut model, &s.batch, None)?, &expected);
        one_token(s, &options, &tensors, checks)?;
        Ok(None)
    }
}

/// Whether a tensor is a matrix of a layer that matmuls alone read, and one tile or one of each
/// expert. Definitions may do anything with theirs, and projections of several matrices add one of
/// all experts to each.
fn is_rounded(s: &Subject, t: &Tensor) -> bool {
    let place = Place::of_tensor(&t.name);
    let all = components(&s.spec.model);
    let built_in = place.component.as_ref().and_then(|name| all.get(name.as_str()));
    let mixed = |c: &Component| c.attention().is_some_and(|a| a.projection.is_some());
    let built_in = built_in.is_some_and(|c| !matches!(c, Component::Defined(_)) && !mixed(c));
    let kind = matches!(t.kind, TensorKind::Matrix | TensorKind::Routed);
    let elements: u64 = t.shape.iter().product();
    kind && built_in && t.shape.len() >= 2 && elements / matrices(t).max(1) <= TILE
}

/// Matrices of a tensor: one of each expert.
fn matrices(t: &Tensor) -> u64 {
    if t.kind == TensorKind::Routed { t.shape.first().copied().unwrap_or(1) } else { 1 }
}

/// All numbers of e4m3 that are not negative.
fn numbers() -> Vec<f64> {
    let of = |exponent: i32, mantissa: i32| match exponent {
        0 => f64::from(mantissa) / 512.0,
        _ => (1.0 + f64::from(mantissa) / 8.0) * f64::from(exponent - 7).exp2(),
    };
    let all = (0..16).flat_map(|e| (0..8).map(move |m| (e, m)));
    all.map(|(e, m)| of(e, m)).take(127).collect()
}

/// Each matrix with its numbers rounded in units of one scale.
fn rounded(values: &[f32], matrices: u64) -> Vec<f32> {
    let numbers = numbers();
    let nearest = |x: f64| {
        let above = numbers.partition_point(|n| *n < x).min(numbers.len() - 1);
        let below = above.saturating_sub(1);
        let (low, high) = (x - numbers[below], numbers[above] - x);
        // Codes of even numbers are those of even mantissas.
        let up = high < low || (high == low && above % 2 == 0);
        if up { numbers[above] } else { numbers[below] }
    };
    let each = values.len() / matrices.max(1) as usize;
    let matrix = |values: &[f32]| {
        let largest = values.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
        let mut unit = (-100f64).exp2();
        while largest > 448.0 * unit {
            unit *= 2.0;
        }
        let round = |x: &f32| nearest(f64::from(x.abs()) / unit) * unit * f64::from(x.signum());
        values.iter().map(|x| round(x) as f32).collect::<Vec<f32>>()
    };
    values.chunks(each.max(1)).flat_map(matrix).collect()
}

fn same(checks: &mut Checks, found: &Trained, expected: &Trained) {
    let mut compare = |what: String, found: &[f64], expected: &[f64], place: Place| {
        let apart = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        checks.check(what, (apart + found.len().abs_diff(expected.len())) as f64, 0.0, place);
    };
    compare("bits of logits".into(), &found.logits, &expected.logits, Place::default());
    compare("bits of the loss".into(), &[found.loss], &[expected.loss], Place::default());
    for (name, expected) in expected.gradients.iter().rev() {
        let found = found.gradients.get(name).map_or(&[][..], Vec::as_slice);
        compare(format!("bits of the gradient of {name}"), found, expected, Place::of_tensor(name));
    }
}

/// Gradients of weights that are applied once to one token.
fn one_token(
    s: &Subject,
    options: &Options,
    tensors: &[Tensor],
    checks: &mut Checks,
) -> Result<(), VerifyError> {
    let once = |depth: Option<u64>| {
        let found = Architecture::new(&s.spec.model, depth).ok()?;
        found.bodies.iter().all(|b| b.applications == b.sets).then_some(depth)
    };
    let Some(depth) = once(None).or_else(|| once(Some(1)).filter(|_| !s.depths().is_empty())) else {
        return Ok(());
    };
    let options = Options { batch: 1, sequence: 1, depths: depth.into_iter().collect(), ..options.clone() };
    let compiled = s.compile(&options)?;
    let device = s.cpu(1);
    let mut model = Model::load(&device, compiled)?;
    s.fill(&mut model)?;
    let mut batch = Batch::new(1);
    batch.ids.push(s.batch.ids[0]);
    let learned = s.batch.targets.iter().copied().find(|&t| t >= 0);
    batch.targets.push(learned.unwrap_or(0));
    batch.positions.push(0);
    batch.segments.push(0);
    let found = backward(&mut model, &batch, depth)?;
    for t in tensors {
        let Some(gradient) = found.gradients.get(&t.name) else { continue };
        let finer = gradient.iter().filter(|x| f64::from(bf16::from_f64(**x)) != **x).count();
        let what = format!("numbers of the gradient of {} at one token that bf16 has not", t.name);
        checks.check(what, finer as f64, 0.0, Place::of_tensor(&t.name));
    }
    Ok(())
}
