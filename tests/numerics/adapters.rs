//! Adapters of frozen matrices: those of `peft` come in with their logits and gradients and go
//! back, and on every kind of matrix a model with adapters is the model that they are merged into.

use crate::export::python;
use crate::import::{good, logits_of, spec_of};
use crate::support::{error, read};
use dreamc_compiler::compiled::Tensor;
use dreamc_compiler::format::Formats;
use dreamc_compiler::program::Space;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::{Spec, Spelling};
use dreamc_hf::hugging_face;
use dreamc_runtime::adapt::{Adapter, adapters, merge, tensors};
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::checkpoint::safetensors::{Dtype, write_stored};
use dreamc_runtime::generate::{Cached, NextLogits, Writing, compile_cached};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::quantise::{Choice, quantise};
use dreamc_runtime::train::prepare::forward;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

const CASES: [&str; 6] = ["llama", "qwen3", "gemma2", "olmo2", "llama-dora", "qwen2-dora"];

fn device() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(2) })
}

/// The gradients of the mean loss with respect to what is trained, by name, weights in these
/// formats.
fn gradients(
    spec: &Spec,
    weights: &Weights,
    ids: &[i32],
    n: usize,
    formats: Formats,
) -> BTreeMap<String, Vec<f64>> {
    let rows = ids.len() / n;
    let options = Options { train: true, formats, ..forward(rows as u64, n as u64 - 1) };
    let mut model = Model::load(&device(), compile(spec, &options).unwrap()).unwrap();
    model.restore(weights).unwrap();
    let part = |from: usize| ids.chunks(n).flat_map(|row| row[from..from + n - 1].to_vec()).collect();
    let mut batch = Batch::new(n - 1);
    (batch.ids, batch.targets) = (part(0), part(1));
    batch.positions = (0..rows).flat_map(|_| 0..n as i32 - 1).collect();
    batch.segments = vec![0; rows * (n - 1)];
    model.begin_step().unwrap();
    let scale = Scale { loss: 1.0 / (rows * (n - 1)) as f32, auxiliary: 0.0 };
    model.backward(&batch, scale, None).unwrap();
    let tensors: Vec<Tensor> = model.compiled().tensors.clone();
    let wide = |t: &Tensor| {
        let gradient = model.gradient(t).unwrap()?;
        Some((t.name.clone(), gradient.into_iter().map(f64::from).collect()))
    };
    tensors.iter().filter_map(wide).collect()
}

#[test]
fn adapters_of_peft_come_in_and_go_back() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let models = at.to_str().unwrap();
    if python("adapters.py", &["make", models]).is_none() {
        return;
    }
    for name in CASES {
        hugging_face(&at.join(name), &at.join(format!("{name}-base")), name, false, &[]).unwrap();
        let (lora, base, ours) = (format!("{name}-lora"), format!("{name}-base"), format!("{name}-ours"));
        let said = good(at, &["import", "peft", &lora, "--base", &base, "-o", &ours]);
        assert!(said.contains("adapters of "), "{said}");
        let weights = Weights::open(&at.join(&ours), None).unwrap();
        let spec = spec_of(&weights);
        let expected = read(at.join(&lora).join("expected.safetensors").to_str().unwrap());
        let ids = &expected["ids"];
        let found = logits_of(&at.join(&ours), &spec, ids.ints(), ids.dims[1]);
        let e = error(&found, expected["logits"].floats());
        assert!(e < 1e-5, "{name}: logits differ by {e}");
        // Gradients are of the adapters alone, and those of peft.
        let found = gradients(&spec, &weights, ids.ints(), ids.dims[1], weights.formats());
        assert_eq!(found.len() + 2, expected.len(), "{name}");
        let scale = expected.iter().filter(|(key, _)| key.contains("lora_"));
        let largest = scale.flat_map(|(_, g)| g.floats()).fold(0f64, |x, g| x.max(g.abs()));
        for Adapter { a, b, tensor, first, dora, .. } in adapters(&tensors(&spec).unwrap()).unwrap() {
            let layer: usize = tensor.split('.').nth(1).unwrap().parse().unwrap();
            let module = a.split('.').rev().nth(1).unwrap();
            let module = match module {
                "out" => "o_proj".to_string(),
                other => format!("{other}_proj"),
            };
            let magnitude = dora.iter().map(|[m, _]| ("lora_magnitude_vector", m));
            for (factor, own) in [("lora_A", &a), ("lora_B", &b)].into_iter().chain(magnitude) {
                let is = |key: &&String| {
                    key.contains(&format!(".layers.{layer}.")) && key.contains(&format!(".{module}.{factor}"))
                };
                let key =
                    expected.keys().find(is).unwrap_or_else(|| panic!("{name}: {own}, {module}, {first}"));
                let theirs = expected[key.as_str()].floats();
                let apart = found[own].iter().zip(theirs).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
                assert!(
                    apart < 1e-5 * largest.max(1e-3),
                    "{name}: the gradient of {own} differs by {apart:e}"
                );
            }
        }
        // Merged they are one model of the family.
        let merged = format!("{name}-merged");
        good(at, &["merge", &ours, "-o", &merged]);
        let plain = spec_of(&Weights::open(&at.join(&merged), None).unwrap());
        assert!(plain.model.adapt.is_none());
        let found = logits_of(&at.join(&merged), &plain, ids.ints(), ids.dims[1]);
        let e = error(&found, expected["logits"].floats());
        assert!(e < 1e-5, "{name}: merged logits differ by {e}");
        good(at, &["export", "hf", &merged, "-o", &format!("{name}-whole")]);
        good(at, &["export", "peft", &ours, "-o", &format!("{name}-back")]);
    }
    assert_eq!(python("adapters.py", &["check", models]).unwrap().trim(), "6 adapters");
}

/// Every kind of matrix: attentions, latent and depth ones too, with a gate; experts with shared
/// ones, a mixture of projections in a loop, a mixer of the library.
const EVERY: &str = "model every {
  vocab 96  hidden 64  context 32  tie
  adapt { components [sa, la, da, pa, ea, mlp, mix]  rank 3  alpha 4.5 }
  sa = sequence { heads 2  kv_heads 1  head_size 32  gate head  bias qkv }
  la = sequence { heads 2  head_size 32  latent { query 32  kv 32  turned 8  value 32 } }
  da = depth { heads 2  head_size 32 }
  pa = sequence { heads 2  head_size 32 }
  ea = experts { count 4  active 2  intermediate 32  shared 1 }
  mlp = mlp { intermediate 96  biased  activation geglu_erf }
  mix = gated_delta { heads 2  size 32  value 32 }
  layer { sa > ea }
  layer { mix > mlp }
  recur 2 { (da | pa) > ea }
  layer { la > ea }
}
train { precision f32 }";

/// The model with random numbers in all tensors, in a file of `dtype`, but adapters, which are f32,
/// of DoRA with magnitudes that are others than the norms.
fn every(folder: &Path, dtype: Dtype, dora: bool) -> (Spec, Weights) {
    let text = if dora { &EVERY.replace("rank 3", "rank 3  dora") } else { EVERY };
    let ast = dreamc_dsl::parse("every", text, Spelling::Dream).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|d| panic!("{d}"));
    let compiled = compile(&spec, &forward(1, 8)).unwrap();
    let mut model = Model::load(&device(), compiled).unwrap();
    model.initialise(7).unwrap();
    let path = folder.join("every.safetensors");
    let entries: Vec<_> = model
        .entries()
        .into_iter()
        .map(|(name, shape)| {
            let dtype = if name.contains("adapter") { Dtype::F32 } else { dtype };
            (name, shape, dtype)
        })
        .collect();
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    let mut out = File::create(&path).unwrap();
    write_stored(&mut out, &[("spec", text.as_str())], &entries, |i, out| {
        let (name, _, dtype) = &entries[i];
        let mut values = model.get(name).unwrap();
        if name.contains("adapter_b") {
            let philox = Philox::new(3, name);
            for (j, x) in values.iter_mut().enumerate() {
                *x = (philox.block(0, j as u64)[0] as f32 / u32::MAX as f32 - 0.5) * 0.3;
            }
        }
        if name.contains("adapter_magnitude") {
            values.iter_mut().enumerate().for_each(|(j, x)| *x *= 0.7 + 0.1 * (j % 7) as f32);
        }
        values.iter().try_for_each(|x| match dtype {
            Dtype::BF16 => out.write_all(&half::bf16::from_f32(*x).to_le_bytes()),
            _ => out.write_all(&x.to_le_bytes()),
        })
    })
    .unwrap();
    (spec, Weights::open(&path, None).unwrap())
}

fn plain(spec: &Spec) -> Spec {
    Spec { model: dreamc_dsl::spec::Model { adapt: None, ..spec.model.clone() }, ..spec.clone() }
}

fn ids(n: usize) -> Vec<i32> {
    (0..n as i32).map(|i| (7 * i + 5 * (i / 3) + 2) % 96).collect()
}

/// Logits after a prompt and after each token written then, weights in these formats.
fn written(spec: &Spec, weights: &Weights, formats: Formats) -> Vec<f64> {
    let writing = Writing { formats, ..Writing::default() };
    let mut cached = Cached::load(&device(), compile_cached(spec, &writing).unwrap()).unwrap();
    cached.model().restore(weights).unwrap();
    let prompt: Vec<u32> = ids(5).into_iter().map(|id| id as u32).collect();
    let mut logits = cached.start(&[prompt]).unwrap();
    let mut all = vec![];
    for next in [3, 50, 17] {
        all.extend(logits[0].iter().map(|x| f64::from(*x)));
        logits = cached.advance(&[next]).unwrap();
    }
    all
}

#[test]
fn adapters_on_every_matrix_are_the_merged_model() {
    merged_is_the_same(false);
}

/// With magnitudes `m`, too: row `i` of the gradient of `W + s B A` is `m_i / n_i` times that of
/// the merged row, where the norm `n` is a constant, and that of `m_i` is `dW_i · row_i / n_i`.
#[test]
fn adapters_with_magnitudes_are_the_merged_model() {
    merged_is_the_same(true);
}

fn merged_is_the_same(dora: bool) {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let (spec, weights) = every(at, Dtype::F32, dora);
    let all = tensors(&spec).unwrap();
    let pairs = adapters(&all).unwrap();
    assert!(pairs.len() > 30, "{} pairs", pairs.len());
    for name in spec.model.names() {
        assert!(pairs.iter().any(|pair| pair.a.contains(&format!(".{name}."))), "{name}");
    }
    merge(&spec, &weights, &at.join("merged"), (&[], false)).unwrap();
    let merged = Weights::open(&at.join("merged"), None).unwrap();
    let (ids, n) = (ids(24), 12);
    let own = logits_of(&at.join("every.safetensors"), &spec, &ids, n);
    let (one, without) = (logits_of(&at.join("merged"), &plain(&spec), &ids, n), {
        // Not the base: adapters change the model.
        let mut none = spec.clone();
        none.model.adapt.as_mut().unwrap().alpha = 1e-9;
        logits_of(&at.join("every.safetensors"), &none, &ids, n)
    });
    let (e, apart) = (error(&own, &one), error(&own, &without));
    assert!(e < 1e-5 && apart > 1e-2, "{e:e}, {apart:e}");
    let (own, one) =
        (written(&spec, &weights, Formats::default()), written(&plain(&spec), &merged, Formats::default()));
    let e = error(&own, &one);
    assert!(e < 1e-5, "written: {e:e}");
    let mapped = written(&spec, &weights, weights.formats());
    assert_eq!(own, mapped);

    // `dA = s Bᵀ dW` and `dB = s dW Aᵀ`, with the gradient of the merged matrix.
    let found = gradients(&spec, &weights, &ids, n, weights.formats());
    let whole = gradients(&plain(&spec), &merged, &ids, n, Formats::default());
    assert_eq!(found.len(), (2 + usize::from(dora)) * pairs.len());
    let scale = spec.model.adapt.as_ref().unwrap().scale();
    for Adapter { tensor, shape, first, rows, a, b, dora } in &pairs {
        let magnitudes = dora.as_ref().map(|[m, _]| (m, weights.get(m).unwrap().unwrap().1));
        let plain = weights.get(tensor).unwrap().unwrap().1;
        let [a_is, b_is] = [a, b].map(|name| weights.get(name).unwrap().unwrap().1);
        let [high, wide] = shape[shape.len() - 2..] else { panic!("{tensor}") };
        let (high, wide, first, rows) = (high as usize, wide as usize, *first as usize, *rows as usize);
        let (rank, many) = (3, whole[tensor].len() / (high * wide));
        let (mut of_a, mut of_b) = (vec![0.0; a_is.len()], vec![0.0; b_is.len()]);
        let mut of_m = vec![0.0; many * rows];
        for m in 0..many {
            for (i, r) in (0..rows).flat_map(|i| (0..rank).map(move |r| (i, r))) {
                let at = ((m * high) + first + i) * wide;
                let mut d = whole[tensor][at..][..wide].to_vec();
                if let Some((_, magnitudes)) = &magnitudes {
                    let low = |j: usize| -> f64 {
                        let term =
                            |r: usize| b_is[(m * rows + i) * rank + r] * a_is[(m * rank + r) * wide + j];
                        (0..rank).map(|r| f64::from(term(r))).sum()
                    };
                    let row: Vec<f64> =
                        (0..wide).map(|j| f64::from(plain[at + j]) + scale * low(j)).collect();
                    let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
                    of_m[m * rows + i] = row.iter().zip(&d).map(|(x, d)| x * d).sum::<f64>() / norm;
                    d.iter_mut().for_each(|d| *d *= f64::from(magnitudes[m * rows + i]) / norm);
                }
                let (ar, bi) = ((m * rank + r) * wide, (m * rows + i) * rank + r);
                for j in 0..wide {
                    of_a[ar + j] += scale * f64::from(b_is[bi]) * d[j];
                    of_b[bi] += scale * d[j] * f64::from(a_is[ar + j]);
                }
            }
        }
        let of_m = magnitudes.map(|(name, _)| (name, of_m));
        for (name, expected) in [(a, of_a), (b, of_b)].into_iter().chain(of_m) {
            let largest = expected.iter().fold(1e-4f64, |x, g| x.max(g.abs()));
            let apart = found[name].iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-4 * largest, "the gradient of {name} differs by {apart:e} of {largest:e}");
        }
    }
}

/// The base stays in its file in the format that it has there, packed ones too; nothing of it has a
/// gradient or a state, and gradients have the bits of those with weights of one's own.
#[test]
fn the_base_stays_in_its_file_in_any_format() {
    [false, true].into_iter().for_each(stays);
}

fn stays(dora: bool) {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let (spec, weights) = every(at, Dtype::BF16, dora);
    let ids = ids(24);
    let mut all = vec![("bf16".to_string(), at.join("every.safetensors"))];
    for format in ["int8", "q8_0", "q4_0", "mxfp4", "f16"] {
        let to = at.join(format);
        quantise(&spec, &weights, &Choice::new(format, None).unwrap(), &to, (&[], true)).unwrap();
        all.push((format.to_string(), to));
    }
    for (format, path) in all {
        let weights = Weights::open(&path, None).unwrap();
        let options = Options { train: true, formats: weights.formats(), ..forward(2, 11) };
        let compiled = compile(&spec, &options).unwrap();
        for t in &compiled.tensors {
            let buffer = compiled.plan.buffer(t.weight);
            let adapter = t.name.contains("adapter_");
            let trains = adapter && !t.name.contains("adapter_norm");
            assert_eq!(t.gradient.is_some(), trains, "{format}: {}", t.name);
            assert_eq!(!t.states.is_empty(), trains, "{format}: {}", t.name);
            let mapped = !trains && t.shape.len() > 1;
            assert_eq!(buffer.space == Space::Mapped, mapped, "{format}: {}", t.name);
        }
        let own = gradients(&spec, &weights, &ids, 12, Formats::default());
        let mapped = gradients(&spec, &weights, &ids, 12, weights.formats());
        assert_eq!(own, mapped, "{format}");
    }
}
