//! Weights that stay in their file: the bits of the same weights owned, for every kind of layer
//! that there is a golden model of, in bf16 and in f32.

use crate::support::{Golden, every_golden, golden};
use dreamc_compiler::format::Formats;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::Space;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::checkpoint::safetensors::{Dtype, write_stored};
use dreamc_runtime::device::DeviceError;
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
use dreamc_runtime::generate::{Cached, NextLogits, Writing, compile_cached, likeliest};
use dreamc_runtime::model::{Model, ModelError};
use dreamc_runtime::train::prepare;
use std::fs::File;
use std::path::{Path, PathBuf};

fn device() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(2) })
}

/// The weights of a golden model in a file of its own.
fn file(folder: &Path, golden: &Golden, dtype: Dtype) -> PathBuf {
    let path = folder.join("model.safetensors");
    let options = Options { sequence: 2, ..Options::default() };
    let tensors = compile(&golden.spec, &options).unwrap().tensors;
    let entries: Vec<_> = tensors.iter().map(|t| (t.name.clone(), t.shape.clone(), dtype)).collect();
    let text = dreamc_dsl::show(&golden.spec, Spelling::Yaml);
    let mut out = File::create(&path).unwrap();
    write_stored(&mut out, &[("spec", text.as_str())], &entries, |i, out| {
        let values = golden.tensors[&format!("weights.{}", entries[i].0)].floats();
        for &x in values {
            match dtype {
                Dtype::BF16 => out.write_all(&half::bf16::from_f64(x).to_le_bytes())?,
                _ => out.write_all(&(x as f32).to_le_bytes())?,
            }
        }
        Ok(())
    })
    .unwrap();
    path
}

/// The bits of the logits after a prompt, and of those after each token written then.
fn written(spec: &Spec, weights: &Weights, writing: &Writing) -> Vec<u32> {
    let mut cached = Cached::load(&device(), compile_cached(spec, writing).unwrap()).unwrap();
    cached.model().restore(weights).unwrap();
    let prompt: Vec<u32> = (0..5).map(|i| (3 * i + 1) % spec.model.vocab as u32).collect();
    let mut bits = vec![];
    let mut logits = cached.start(&[prompt]).unwrap();
    for _ in 0..4 {
        bits.extend(logits[0].iter().map(|x| x.to_bits()));
        let next = likeliest(&logits[0], 1)[0] as u32;
        logits = cached.advance(&[next]).unwrap();
    }
    bits
}

#[test]
fn weights_in_their_file_give_the_bits_of_owned_ones() {
    let folder = tempfile::tempdir().unwrap();
    for golden in every_golden() {
        let spec = Spec {
            model: dreamc_dsl::spec::Model { context: 16, ..golden.spec.model.clone() },
            ..golden.spec.clone()
        };
        for dtype in [Dtype::BF16, Dtype::F32] {
            let weights = Weights::open(&file(folder.path(), &golden, dtype), None).unwrap();
            for rewrite in [Rewriting::default(), Rewriting::off()] {
                let of = |formats: Formats, narrow: Narrow| {
                    let rewrite = rewrite.clone();
                    written(&spec, &weights, &Writing { formats, narrow, rewrite, ..Writing::default() })
                };
                for narrow in [Narrow::Nothing, Narrow::Storage] {
                    let (owned, mapped) = (of(Formats::default(), narrow), of(weights.formats(), narrow));
                    assert_eq!(owned, mapped, "{} from {dtype:?}, {narrow:?}", golden.name);
                }
            }
        }
    }
}

/// Losses of whole rows.
fn losses(golden: &Golden, weights: &Weights, formats: Formats, sequence: u64) -> Vec<u32> {
    let mut spec = golden.spec.clone();
    spec.train.sequence = Some(sequence);
    let storing = prepare::Storing { formats, ..prepare::Storing::default() };
    let compiled = prepare::measurer(&spec, None, &Rewriting::default(), storing).unwrap();
    let mut model = Model::load(&device(), compiled).unwrap();
    model.restore(weights).unwrap();
    let mut batch = dreamc_runtime::data::Batch::new(sequence as usize);
    let all = model.batch() * sequence as usize;
    let vocab = spec.model.vocab as usize;
    batch.ids = (0..all).map(|i| ((7 * i + 2) % vocab) as i32).collect();
    batch.targets = (0..all).map(|i| ((5 * i + 1) % vocab) as i32).collect();
    batch.positions = (0..all).map(|i| (i % sequence as usize) as i32).collect();
    batch.segments = vec![0; all];
    model.evaluate(&batch).unwrap().iter().map(|x| x.to_bits()).collect()
}

#[test]
fn losses_of_weights_in_their_file_have_the_bits_of_owned_ones() {
    let folder = tempfile::tempdir().unwrap();
    for golden in every_golden() {
        let weights = Weights::open(&file(folder.path(), &golden, Dtype::BF16), None).unwrap();
        let sequence = golden.spec.model.context.min(12);
        let owned = losses(&golden, &weights, Formats::default(), sequence);
        assert_eq!(owned, losses(&golden, &weights, weights.formats(), sequence), "{}", golden.name);
    }
}

/// Matrices are nobody's memory: what the plan owns has none of them.
#[test]
fn matrices_in_their_file_are_not_in_the_arena() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden("la");
    let weights = Weights::open(&file(folder.path(), &golden, Dtype::BF16), None).unwrap();
    let writing = Writing { formats: weights.formats(), ..Writing::default() };
    let compiled = compile_cached(&golden.spec, &writing).unwrap();
    for t in &compiled.tensors {
        let space = compiled.plan.buffer(t.weight).space;
        assert_eq!(space == Space::Mapped, t.shape.len() > 1, "{}", t.name);
    }
    let memory = Cached::load(&device(), compiled).unwrap().model().memory();
    let matrices: u64 =
        weights.entries().filter(|(_, s)| s.len() > 1).map(|(_, s)| 2 * s.iter().product::<u64>()).sum();
    assert_eq!(memory.mapped, matrices);
}

/// A plan for weights in a file refuses to run without one, to have them written, and to go on
/// after the file was cut.
#[test]
fn a_file_that_is_missing_written_to_or_cut_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden("la");
    let path = file(folder.path(), &golden, Dtype::BF16);
    let weights = Weights::open(&path, None).unwrap();
    let writing = Writing { formats: weights.formats(), ..Writing::default() };
    let load = || Cached::load(&device(), compile_cached(&golden.spec, &writing).unwrap()).unwrap();
    let error = load().start(&[vec![1]]).unwrap_err();
    assert!(matches!(error, ModelError::Device(DeviceError::NoFile { .. })), "{error}");
    let mut cached = load();
    cached.model().restore(&weights).unwrap();
    let name = "embed.weight";
    let values = cached.model().get(name).unwrap();
    let error = cached.model().set(name, &values).unwrap_err();
    assert!(matches!(error, ModelError::Device(DeviceError::ReadOnly { .. })), "{error}");
    cached.start(&[vec![1]]).unwrap();
    let length = path.metadata().unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
    let error = cached.advance(&[1]).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: was cut short while it was read"), "{error}");
    let error = Weights::open(&path, None).unwrap_err().to_string();
    assert!(error.contains("not a safetensors file"), "{error}");
}
