//! Preferences: the loss of pairs and its gradients are those of the formula in PyTorch, of
//! adapters and of whole weights.

use crate::export::python;
use crate::import::{good, spec_of};
use crate::support::read;
use dreamc_compiler::format::Formats;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::spec::Dpo;
use dreamc_hf::hugging_face;
use dreamc_runtime::adapt::{Adapter, adapters, tensors};
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare::forward;
use std::collections::BTreeMap;
use std::path::Path;

/// Of `tests/hf/preferences.py`.
const DPO: Dpo = Dpo { beta: 0.3, smoothing: 0.1 };

/// The loss of the pairs, and gradients by name.
fn found(folder: &Path, batch: &Batch) -> (f64, BTreeMap<String, Vec<f32>>) {
    let weights = Weights::open(folder, None).unwrap();
    let mut spec = spec_of(&weights);
    spec.train.dpo = Some(DPO);
    let formats = if spec.model.adapt.is_some() { weights.formats() } else { Formats::default() };
    let with = forward(batch.rows() as u64, batch.sequence as u64);
    let compiled = compile(&spec, &Options { train: true, formats, ..with }).unwrap();
    let mut model = Model::load(&CpuDevice::new(CpuOptions { threads: Some(2) }), compiled).unwrap();
    model.restore(&weights).unwrap();
    model.begin_step().unwrap();
    let scale = Scale { loss: 2.0 / batch.rows() as f32, auxiliary: 0.0 };
    model.backward(batch, scale, None).unwrap();
    let mut all = BTreeMap::new();
    for tensor in model.compiled().tensors.clone() {
        if let Some(gradient) = model.gradient(&tensor).unwrap() {
            all.insert(tensor.name, gradient);
        }
    }
    (model.loss().unwrap().into(), all)
}

fn close(name: &str, own: &[f32], theirs: &[f64], largest: f64) {
    assert_eq!(own.len(), theirs.len(), "{name}");
    let apart = own.iter().zip(theirs).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-5 * largest, "the gradient of {name} differs by {apart:e} of {largest:e}");
}

#[test]
fn pairs_have_the_loss_and_the_gradients_of_the_formula() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    if python("preferences.py", &["make", at.to_str().unwrap()]).is_none() {
        return;
    }
    hugging_face(&at.join("base"), &at.join("ours"), "llama", false, &[]).unwrap();
    good(at, &["import", "peft", "lora", "--base", "ours", "-o", "tuned"]);
    let expected = read(at.join("lora/expected.safetensors").to_str().unwrap());
    let n = expected["ids"].dims[1];
    let mut batch = Batch::new(n);
    (batch.ids, batch.targets) = (expected["ids"].ints().to_vec(), expected["targets"].ints().to_vec());
    batch.positions = (0..batch.rows()).flat_map(|_| 0..n as i32).collect();
    batch.segments = vec![0; batch.ids.len()];
    batch.reference = expected["reference"].floats().iter().map(|x| *x as f32).collect();

    let (loss, gradients) = found(&at.join("tuned"), &batch);
    let theirs = expected["loss"].floats()[0];
    assert!((loss - theirs).abs() < 1e-5, "{loss} and {theirs}");
    let spec = spec_of(&Weights::open(&at.join("tuned"), None).unwrap());
    let of = expected.iter().filter(|(key, _)| key.contains("lora_")).flat_map(|(_, g)| g.floats());
    let largest = of.fold(0f64, |most, x| most.max(x.abs()));
    let pairs = adapters(&tensors(&spec).unwrap()).unwrap();
    assert_eq!(gradients.len(), 2 * pairs.len());
    for Adapter { a, b, tensor, .. } in &pairs {
        let layer = tensor.split('.').nth(1).unwrap();
        let module = a.split('.').rev().nth(1).unwrap().replace("out", "o");
        for (factor, own) in [("lora_A", a), ("lora_B", b)] {
            let is = |key: &&String| {
                key.contains(&format!(".layers.{layer}."))
                    && key.contains(&format!(".{module}_proj.{factor}."))
            };
            let key = expected.keys().find(is).unwrap();
            close(own, &gradients[own], expected[key.as_str()].floats(), largest);
        }
    }

    // Whole weights, from another reference.
    batch.reference.iter_mut().for_each(|x| *x += 0.5);
    let expected = read(at.join("base/expected.safetensors").to_str().unwrap());
    let (loss, gradients) = found(&at.join("ours"), &batch);
    let theirs = expected["loss"].floats()[0];
    assert!((loss - theirs).abs() < 1e-5, "{loss} and {theirs}");
    let all = expected.iter().filter(|(key, _)| *key != "loss").flat_map(|(_, g)| g.floats());
    let largest = all.fold(0f64, |most, x| most.max(x.abs()));
    let mut compared = 0;
    for layer in 0..2 {
        let same = [
            ("out.weight", "self_attn.o_proj"),
            ("gate.weight", "mlp.gate_proj"),
            ("up.weight", "mlp.up_proj"),
            ("down.weight", "mlp.down_proj"),
        ];
        for (ours, theirs) in same {
            let own =
                gradients.keys().find(|k| k.starts_with(&format!("layers.{layer}.")) && k.ends_with(ours));
            let key = format!("model.layers.{layer}.{theirs}.weight");
            let (Some(own), Some(theirs)) = (own, expected.get(&key)) else { continue };
            close(own, &gradients[own], theirs.floats(), largest);
            compared += 1;
        }
    }
    assert!(compared >= 4, "{compared} of {:?}", gradients.keys());
}
