//! Gradients are derivatives: of the interpreter by differences, of the device by the interpreter.

use super::subject::{self, Subject, apart, backward, of};
use super::{Checks, Place, Proof, VerifyError, blame, error, length};
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::Form;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::rng::Philox;

/// Differences smaller than this, relative to the loss, are rounding.
const SMALLEST: f64 = 1e-4;

/// How far a derivative in f64 may be off.
const DIFFERENCES: f64 = 1e-5;

/// How far a slope is from the differences of a loss `along` a direction, relative to the larger of
/// the two, and how far it may be.
pub fn slope_error(
    along: &mut dyn FnMut(f64) -> Result<f64, VerifyError>,
    slope: f64,
    loss: f64,
) -> Result<(f64, f64), VerifyError> {
    let mut best = f64::INFINITY;
    // Some models curve sharply: then fourth order, and the best of some steps.
    for (h, fourth) in [(1e-5, false), (1e-4, true), (1e-5, true), (1e-6, true)] {
        let near = along(h)? - along(-h)?;
        let numeric = if fourth {
            (8.0 * near - (along(2.0 * h)? - along(-2.0 * h)?)) / (12.0 * h)
        } else {
            near / (2.0 * h)
        };
        let scale = slope.abs().max(numeric.abs()).max(SMALLEST * loss.abs().max(1.0));
        best = best.min((numeric - slope).abs() / scale);
        if best < 0.1 * DIFFERENCES {
            break;
        }
    }
    Ok((best, DIFFERENCES))
}

/// Gradients equal finite differences.
pub struct Gradients;

impl Proof for Gradients {
    fn name(&self) -> &'static str {
        "gradients"
    }

    fn claim(&self) -> &'static str {
        "gradients equal finite differences"
    }

    fn how(&self) -> &'static str {
        "every tensor moved along a random direction in f64, with decisions and stopped values held; then those of the CPU \
         against those in f64"
    }

    fn prove(&self, s: &Subject, checks: &mut Checks) -> Result<Option<String>, VerifyError> {
        s.conditioned()?;
        let oracle = s.oracle(None, &Rewriting::off(), Form::Training)?;
        let base = s.evaluation(&oracle, &s.batch)?;
        let batch = of(s, &s.batch);
        let held = oracle.forward(&s.weights, &batch, None)?.decisions;
        let mut weights = s.weights.clone();
        // In the order of the way back, so that the first that is wrong is where something is.
        for (name, gradient) in &base.gradients {
            let mut random = Philox::new(s.seed, name).stream(2);
            let direction: Vec<f64> = gradient.floats().iter().map(|_| random.unit() * 2.0 - 1.0).collect();
            let slope: f64 = gradient.floats().iter().zip(&direction).map(|(a, b)| a * b).sum();
            let before = weights[name].clone();
            let mut along = |h: f64| -> Result<f64, VerifyError> {
                let moved = before.floats().iter().zip(&direction).map(|(x, d)| x + h * d).collect();
                weights[name] = Tensor::float(&before.dims, moved);
                Ok(oracle.forward(&weights, &batch, Some(&held))?.loss)
            };
            let (e, tolerance) = slope_error(&mut along, slope, base.loss)?;
            weights[name] = before;
            checks.check(format!("derivative by {name}"), e, tolerance, Place::of_tensor(name));
        }

        let device = s.cpu(1);
        let mut model = s.load(&device, &s.options())?;
        let depths: Vec<Option<u64>> =
            std::iter::once(None).chain(s.depths().into_iter().map(Some)).collect();
        for depth in depths {
            let oracle = s.oracle(depth, &Rewriting::off(), Form::Training)?;
            let expected = if depth.is_none() { base.clone() } else { s.evaluation(&oracle, &s.batch)? };
            let found = backward(&mut model, &s.batch, depth)?;
            let at = depth.map_or(String::new(), |d| format!(" at depth {d}"));
            // Where the way there differs, the way back does.
            let (e, tolerance) = (error(&found.logits, expected.logits.floats()), s.logits_tolerance()?);
            let mut place = Place::default();
            if e > tolerance {
                let streams = s.forward(&oracle, &s.batch)?.streams;
                let streams: Vec<Vec<f64>> = streams.iter().map(|x| x.floats().to_vec()).collect();
                place =
                    blame::first_stream(s, &subject::streams(&mut model, Entry::Whole)?, &streams, tolerance);
            }
            checks.check(format!("logits{at}"), e, tolerance, place);
            let longest =
                expected.gradients.values().map(|g| length(g.floats().iter().copied())).fold(0.0, f64::max);
            for tensor in model.compiled().tensors.iter().rev() {
                let (Some(found), Some(expected)) =
                    (found.gradients.get(&tensor.name), expected.gradients.get(&tensor.name))
                else {
                    continue;
                };
                let e = apart(found, expected.floats(), longest);
                let name = &tensor.name;
                checks.check(
                    format!("gradient of {name}{at}"),
                    e,
                    s.gradient_tolerance(name)?,
                    Place::of_tensor(name),
                );
            }
            let e = (found.loss - expected.loss).abs() / expected.loss.abs().max(1e-3);
            checks.check(format!("loss{at}"), e, s.logits_tolerance()?, Place::default());
        }
        Ok(None)
    }
}
