//! Losses of the first steps of a model on two devices.

use dreamc_compiler::Options;
use dreamc_compiler::precision::Narrow;
use dreamc_dsl::Spec;

use dreamc_data::Batch;
use dreamc_device::Device;
use dreamc_runtime::model::{Model, ModelError, Scale};
use dreamc_runtime::train::schedule;
use dreamc_verify::{Compiler, Subject, shrink};

/// Trains an example, made small as `dreamc verify` makes it, for `steps` steps on two devices,
/// each in its precision. Weights and tokens are drawn so that no decision is close at first; four
/// batches take turns, and a depth that is drawn by step is. Gives the largest difference of two
/// losses, relative to the first.
pub fn losses_apart(spec: &Spec, steps: u64, rate: f64, on: [(&dyn Device, Narrow); 2]) -> f64 {
    let mut spec = shrink(spec, false).spec;
    (spec.train.steps, spec.train.learning_rate) = (steps, rate);
    let name = spec.model.name.clone();
    let subject = Subject::new(spec, 1, None, &[], &Compiler).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (spec, vocab) = (&subject.spec, subject.spec.model.vocab);
    let depths = schedule::possible_depths(spec);
    let [first, second]: [Vec<f64>; 2] = on.map(|(device, narrow)| {
        let options = Options { narrow, depths: depths.clone(), logits: false, ..subject.options() };
        let mut model = subject.load(device, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
        let step = |step| {
            take(&mut model, &turn(&subject.batch, step, vocab), spec, step)
                .unwrap_or_else(|e| panic!("{name}: step {step}: {e}"))
        };
        (1..=steps).map(step).collect()
    });
    let apart = first.iter().zip(&second).map(|(a, b)| (a - b).abs() / a.abs());
    apart.fold(0.0, |most, e| if e.is_nan() { f64::INFINITY } else { most.max(e) })
}

/// The batch with other tokens.
fn turn(batch: &Batch, step: u64, vocab: u64) -> Batch {
    let turned = |id: &i32| if *id < 0 { *id } else { ((*id as u64 + 5 * (step % 4)) % vocab) as i32 };
    let (ids, targets) = (batch.ids.iter().map(turned).collect(), batch.targets.iter().map(turned).collect());
    Batch { ids, targets, ..batch.clone() }
}

/// A step; gives its loss, of routers too.
fn take(model: &mut Model, batch: &Batch, spec: &Spec, step: u64) -> Result<f64, ModelError> {
    model.begin_step()?;
    let scale = Scale { loss: 1.0 / batch.learned().max(1) as f32, auxiliary: 1.0 };
    model.backward(batch, scale, schedule::depth(spec, step))?;
    let loss = f64::from(model.loss()?) + f64::from(model.auxiliary()?.unwrap_or(0.0));
    model.norm()?;
    model.update(&schedule::scalars(&spec.train, step))?;
    Ok(loss)
}
