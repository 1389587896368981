//! How much every layer turns the stream: block influence (ShortGPT, 2403.03853).
//!
//! *In*: a trained model and what its data hold out. *Out*: `1 - cos(x, y)` of the stream before
//! and behind each application of a layer, the mean over tokens whose loss is taken, by depth.

use crate::failure::Failure;
use crate::model::Trained;
use dreamc_compiler::architecture::{Architecture, Work, for_each_application};
use dreamc_compiler::compiled::Entry;
use dreamc_runtime::data::Dataset;
use dreamc_runtime::device::Device;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;

/// The influence of each application, over so many rows. Empty where no data are held out.
pub fn of(trained: &Trained, device: &dyn Device, dataset: &Dataset, rows: u64) -> Result<Vec<f64>, Failure> {
    let spec = &trained.spec;
    let Some(mut held) = dataset.validation()? else { return Ok(vec![]) };
    let mut model =
        Model::load(device, prepare::observer(spec, &trained.rewriting, trained.storing(device))?)?;
    model.restore(&trained.tensors)?;
    let places = places(spec)?;
    let (mut turns, mut tokens, mut seen) = (vec![0.0; places.len()], 0u64, 0u64);
    while seen < rows {
        let Some(batch) = held.take(model.batch())? else { break };
        let most = (rows - seen).min(batch.rows() as u64) as usize * batch.sequence;
        let taken: Vec<bool> = (0..batch.ids.len()).map(|i| i < most && batch.targets[i] >= 0).collect();
        let counted = taken.iter().filter(|taken| **taken).count() as u64;
        seen += model.batch() as u64;
        if counted == 0 {
            continue;
        }
        tokens += counted;
        model.evaluate(&batch)?;
        for (place, sum) in places.iter().zip(&mut turns) {
            let (before, behind) = (stream(&model, *place)?, stream(&model, place + 1)?);
            *sum += turned(&before, &behind, &taken);
        }
    }
    Ok(turns.into_iter().map(|sum| sum / tokens.max(1) as f64).collect())
}

/// The place of the stream before each application of a layer. Passes through which no gradient
/// flows keep one stream, and are not listed.
fn places(spec: &dreamc_dsl::Spec) -> Result<Vec<u64>, Failure> {
    let a = Architecture::new(&spec.model, None)?;
    let mut found = vec![];
    for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
        if matches!(a.bodies[apply.body].work, Work::Layer(_)) && !apply.detached {
            found.push(apply.place.at(variables));
        }
    });
    Ok(found)
}

/// The stream in a place.
fn stream(model: &Model, place: u64) -> Result<Vec<f32>, Failure> {
    let Some(buffer) = model.compiled().stream(Entry::Whole) else { return Ok(vec![]) };
    let mut values = vec![0.0; model.compiled().plan.buffer(buffer).elements() as usize];
    model.session().read_at(buffer, place, 0, &mut values)?;
    Ok(values)
}

/// The sum of `1 - cos` over tokens that are taken.
fn turned(before: &[f32], behind: &[f32], taken: &[bool]) -> f64 {
    let wide = (before.len() / taken.len().max(1)).max(1);
    let dot =
        |x: &[f32], y: &[f32]| -> f64 { x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum() };
    let rows = before.chunks(wide).zip(behind.chunks(wide)).zip(taken);
    let each = rows
        .filter(|(_, taken)| **taken)
        .map(|((x, y), _)| 1.0 - dot(x, y) / (dot(x, x) * dot(y, y)).sqrt().max(f64::MIN_POSITIVE));
    each.sum()
}
