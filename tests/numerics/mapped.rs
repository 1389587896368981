//! Weights that stay in their file: the bits of the same weights owned, for every kind of layer
//! that there is a golden model of, in bf16 and in f32.

use crate::support::{Golden, every_golden, golden};
use dreamc_compiler::format::{Formats, Packed};
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Kernel, Launch, Operand, Plan, Space, Step};
use dreamc_compiler::rewrite::{RULES, Rewriting};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::ptx::PtxDevice;
use dreamc_device::{Device, DeviceError};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::checkpoint::Weights;
use dreamc_runtime::checkpoint::safetensors::{Dtype, write_stored};
use dreamc_runtime::generate::{Cached, NextLogits, Writing, compile_cached, likeliest};
use dreamc_runtime::model::{Model, ModelError, Scale};
use dreamc_runtime::quantise::{Choice, quantise};
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
                Dtype::F16 => out.write_all(&half::f16::from_f64(x).to_le_bytes())?,
                _ => out.write_all(&(x as f32).to_le_bytes())?,
            }
        }
        Ok(())
    })
    .unwrap();
    path
}

/// The same weights packed in a format.
fn packed(folder: &Path, spec: &Spec, weights: &Weights, format: &str) -> Weights {
    let to = folder.join(format);
    let choice = Choice::new(format, None).unwrap();
    quantise(spec, weights, &choice, &to, (&[], true)).unwrap();
    Weights::open(&to, None).unwrap()
}

/// The bits of the logits after a prompt, and of those after each token written then.
fn written(spec: &Spec, weights: &Weights, writing: &Writing) -> Vec<u32> {
    written_on(&device(), spec, weights, writing)
}

fn written_on(device: &dyn Device, spec: &Spec, weights: &Weights, writing: &Writing) -> Vec<u32> {
    let mut cached = Cached::load(device, compile_cached(spec, writing).unwrap()).unwrap();
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

/// Packed weights give, read in their file, the bits of the numbers that their blocks stand for: in
/// a scale for each row, which every matrix of the golden models has, and in sixteen bits; by the
/// rules that do not stack matrices, which packed ones are left out of.
#[test]
fn packed_weights_give_the_bits_of_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let apart: Vec<&str> =
        RULES.iter().map(|rule| rule.name).filter(|name| !name.starts_with("stack")).collect();
    for golden in every_golden() {
        let spec = Spec {
            model: dreamc_dsl::spec::Model { context: 16, ..golden.spec.model.clone() },
            ..golden.spec.clone()
        };
        let half = Weights::open(&file(folder.path(), &golden, Dtype::F16), None).unwrap();
        let rows = packed(folder.path(), &spec, &half, "int8");
        for (what, weights) in [("f16", &half), ("int8", &rows)] {
            for rewrite in [Rewriting::only(&apart), Rewriting::off()] {
                let of = |formats: Formats| {
                    let rewrite = rewrite.clone();
                    written(&spec, weights, &Writing { formats, rewrite, ..Writing::default() })
                };
                assert_eq!(of(Formats::default()), of(weights.formats()), "{} in {what}", golden.name);
            }
            // With activations in bf16 they are read, too.
            let narrow = Narrow::Storage;
            let writing = Writing { formats: weights.formats(), narrow, ..Writing::default() };
            let bits = written(&spec, weights, &writing);
            assert!(bits.iter().all(|x| f32::from_bits(*x).is_finite()), "{} in {what}", golden.name);
        }
    }
}

/// A model whose matrices are whole blocks of every format: attentions, latent ones too, experts
/// with shared ones, a loop, a mixer of the library.
const BLOCKS: &str = "model blocks {
  vocab 96  hidden 64  context 32  tie
  sa = sequence { heads 2  kv_heads 1  head_size 32 }
  la = sequence { heads 2  head_size 32  latent { query 32  kv 32  turned 8  value 32 } }
  ea = experts { count 4  active 2  intermediate 32  shared 1 }
  mlp = mlp { intermediate 96  biased  activation geglu_erf }
  mix = gated_delta { heads 2  size 32  value 32 }
  layer { sa > ea }
  layer { mix > mlp }
  recur 2 { la > ea }
}";

/// The same of super-blocks.
const SUPER_BLOCKS: &str = "model blocks {
  vocab 96  hidden 256  context 32  tie
  sa = sequence { heads 2  kv_heads 1  head_size 128 }
  la = sequence { heads 2  head_size 128  latent { query 256  kv 256  turned 8  value 128 } }
  ea = experts { count 4  active 2  intermediate 256  shared 1 }
  mlp = mlp { intermediate 256  biased  activation geglu_erf }
  mix = gated_delta { heads 2  size 128  value 128 }
  layer { sa > ea }
  layer { mix > mlp }
  recur 2 { la > ea }
}";

fn blocks(folder: &Path) -> (Spec, Weights) {
    drawn(folder, BLOCKS)
}

fn drawn(folder: &Path, text: &str) -> (Spec, Weights) {
    let ast = dreamc_dsl::parse("blocks", text, Spelling::Dream).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap();
    let compiled = compile(&spec, &Options { sequence: 8, ..Options::default() }).unwrap();
    let mut model = Model::load(&device(), compiled).unwrap();
    model.initialise(7).unwrap();
    let path = folder.join("blocks.safetensors");
    let entries: Vec<_> =
        model.entries().into_iter().map(|(name, shape)| (name, shape, Dtype::F32)).collect();
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    let mut out = File::create(&path).unwrap();
    write_stored(&mut out, &[("spec", text.as_str())], &entries, |i, out| {
        model.get(&entries[i].0).unwrap().iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
    })
    .unwrap();
    (spec, Weights::open(&path, None).unwrap())
}

#[test]
fn blocks_give_the_bits_of_their_numbers_and_stay_in_their_file() {
    let folder = tempfile::tempdir().unwrap();
    for format in Packed::NAMES {
        let long = format.ends_with("_k") || format == "nvfp4";
        let (spec, weights) = drawn(folder.path(), if long { SUPER_BLOCKS } else { BLOCKS });
        let exact = written(&spec, &weights, &Writing::default());
        let packed = packed(folder.path(), &spec, &weights, format);
        let writing = Writing { formats: packed.formats(), ..Writing::default() };
        let found = written(&spec, &packed, &writing);
        assert_eq!(found, written(&spec, &packed, &Writing::default()), "{format}");
        // They are other weights, and near.
        let apart = exact.iter().zip(&found).map(|(x, y)| (f32::from_bits(*x) - f32::from_bits(*y)).abs());
        let apart = apart.fold(0.0, f32::max);
        let bound = match format {
            "q4_0" | "mxfp4" | "nvfp4" | "q4_k" => 1.0,
            // Of a wider model.
            "q6_k" => 0.3,
            _ => 0.1,
        };
        assert!(apart > 0.0 && apart < bound, "{format}: {apart}");
        for (name, _) in packed.entries() {
            let routes = name.contains("router");
            assert!(!routes || packed.stored(name).unwrap().packed.is_none(), "{name}");
        }
        let compiled = compile_cached(&spec, &writing).unwrap();
        let of = |space: Space| {
            let all = compiled.plan.buffers.iter().filter(|b| b.space == space);
            all.map(|b| b.bytes()).sum::<u64>()
        };
        let matrices = packed.entries().filter(|(_, shape)| shape.len() > 1);
        let numbers: u64 = matrices.map(|(_, shape)| shape.iter().product::<u64>()).sum();
        assert!(
            of(Space::Mapped) < 3 * numbers,
            "{format}: {} bytes of {numbers} numbers",
            of(Space::Mapped)
        );
    }
}

/// Kernels of a GPU read the blocks, too: what they write is what the CPU writes, and in bf16 near
/// it.
#[test]
fn a_gpu_reads_the_blocks_of_every_format() {
    let Some(gpu) = dreamc_skip::need(PtxDevice::fast()) else { return };
    let folder = tempfile::tempdir().unwrap();
    for format in Packed::NAMES {
        let long = format.ends_with("_k") || format == "nvfp4";
        let (spec, weights) = drawn(folder.path(), if long { SUPER_BLOCKS } else { BLOCKS });
        let packed = packed(folder.path(), &spec, &weights, format);
        for (narrow, bound) in [(Narrow::Nothing, 1e-4), (Narrow::Storage, 0.1)] {
            let writing = Writing { formats: packed.formats_on(&gpu), narrow, ..Writing::default() };
            let found = written_on(&gpu, &spec, &packed, &writing);
            let expected = written(&spec, &packed, &Writing::default());
            let both = found.iter().zip(&expected).map(|(x, y)| (f32::from_bits(*x), f32::from_bits(*y)));
            let apart =
                both.map(|(x, y)| (x - y).abs()).fold(0.0, |most, x| if x <= most { most } else { x });
            assert!(apart < bound, "{format}, {narrow:?}: {apart}");
            let plan = compile_cached(&spec, &writing).unwrap().plan;
            assert!(plan.mapped > 0 && plan.buffers.iter().any(|b| matches!(b.dtype, DType::Packed(_))));
        }
    }
}

/// Gradients through packed and mapped weights are those of the same numbers owned, and what no
/// step moves may be in a file while the rest is trained.
#[test]
fn gradients_go_through_weights_in_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let (mut spec, weights) = blocks(folder.path());
    spec.train.sequence = Some(8);
    let batch = {
        let mut batch = dreamc_data::Batch::new(8);
        batch.ids = (0..8).map(|i| (7 * i + 2) % 96).collect();
        batch.targets = (0..8).map(|i| (5 * i + 1) % 96).collect();
        batch.positions = (0..8).collect();
        batch.segments = vec![0; 8];
        batch
    };
    let gpu = dreamc_skip::need(PtxDevice::fast());
    for format in ["q8_0", "q4_0"] {
        let packed = packed(folder.path(), &spec, &weights, format);
        let gradients = |device: &dyn Device, formats: Formats| {
            let options = Options { sequence: 8, train: true, steps: false, formats, ..Options::default() };
            let mut model = Model::load(device, compile(&spec, &options).unwrap()).unwrap();
            model.restore(&packed).unwrap();
            model.begin_step().unwrap();
            model.backward(&batch, Scale { loss: 0.125, auxiliary: 1.0 }, None).unwrap();
            let tensors = model.compiled().tensors.clone();
            let of =
                |t| model.gradient(t).unwrap().map(|g| g.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            tensors.iter().map(of).collect::<Vec<_>>()
        };
        let cpu = device();
        let (owned, mapped) = (gradients(&cpu, Formats::default()), gradients(&cpu, packed.formats()));
        assert!(owned.iter().flatten().count() > 20);
        assert_eq!(owned, mapped, "{format}");
        if let Some(gpu) = &gpu {
            let found = gradients(gpu, packed.formats_on(gpu));
            for (t, (x, y)) in compile(&spec, &Options { sequence: 8, ..Options::default() })
                .unwrap()
                .tensors
                .iter()
                .zip(owned.iter().zip(&found))
            {
                let (Some(x), Some(y)) = (x, y) else { continue };
                let of = |bits: &[u32]| bits.iter().map(|b| f32::from_bits(*b)).collect::<Vec<f32>>();
                let (x, y) = (of(x), of(y));
                let largest = x.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
                let apart = x.iter().zip(&y).fold(0.0f32, |most, (x, y)| most.max((x - y).abs()));
                assert!(apart <= 1e-3 * largest, "{format}, {}: {apart} of {largest}", t.name);
            }
        }
        // Frozen matrices stay in the file; those that steps move are owned.
        let mut frozen = spec.clone();
        frozen.train.freeze = vec!["*.ea.*".into()];
        let options = Options { sequence: 8, train: true, formats: packed.formats(), ..Options::default() };
        let compiled = compile(&frozen, &options).unwrap();
        for t in compiled.tensors.iter().filter(|t| t.shape.len() > 1) {
            let space = compiled.plan.buffer(t.weight).space;
            assert_eq!(space == Space::Mapped, t.gradient.is_none(), "{}", t.name);
        }
        assert!(compiled.plan.mapped > 0);
    }
}

/// A number that cannot be packed, or a wrong file, is an error at its tensor, and nothing is left.
#[test]
fn what_cannot_be_packed_is_an_error_at_its_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, weights) = blocks(folder.path());
    let path = folder.path().join("blocks.safetensors");
    let to = folder.path().join("out");
    let say = |weights: &Weights, format: &str, parts: Option<&str>| {
        let choice = Choice::new(format, parts).unwrap();
        let error = quantise(&spec, weights, &choice, &to, (&[], false)).unwrap_err().to_string();
        assert!(!to.exists(), "{error}");
        error
    };
    let error = say(&weights, "q8_0", Some("sa: q4_0, nothing: q8_0"));
    assert!(
        error.contains("no part `nothing`") && error.contains("ea, embed, embedding, experts"),
        "{error}"
    );
    let error = say(&weights, "keep", None);
    assert!(error.contains("all parts are kept"), "{error}");
    // NaN in the middle of a matrix.
    let (_, place) = weights.mapped("layers.1.mlp.up.weight").unwrap().unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = place.start as usize + 4 * 100;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let bad = folder.path().join("bad.safetensors");
    std::fs::write(&bad, &bytes).unwrap();
    let error = say(&Weights::open(&bad, None).unwrap(), "q4_0", None);
    assert!(
        error.contains("tensor layers.1.mlp.up.weight: number 100 is NaN, which q4_0 cannot hold"),
        "{error}"
    );
    // Packed twice.
    let once = packed(folder.path(), &spec, &weights, "q8_0");
    let error = say(&once, "q4_0", None);
    assert!(error.contains("is q8_0 already"), "{error}");
    // A scale that is NaN, in the file: at its tensor, when it is read.
    let file = folder.path().join("q8_0/model.safetensors");
    let (_, place) = once.mapped("layers.1.mlp.up.weight").unwrap().unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let at = place.start as usize + 34 * 5;
    bytes[at..at + 2].copy_from_slice(&[0xff, 0x7f]);
    std::fs::write(&bad, &bytes).unwrap();
    let damaged = Weights::open(&bad, None).unwrap();
    let writing = Writing { formats: damaged.formats(), ..Writing::default() };
    let mut cached = Cached::load(&device(), compile_cached(&spec, &writing).unwrap()).unwrap();
    cached.model().restore(&damaged).unwrap();
    let error = cached.start(&[vec![1, 2]]).unwrap_err().to_string();
    assert!(
        error.ends_with("tensor layers.1.mlp.up.weight: the scale of block 5 is not a finite number"),
        "{error}"
    );
    let error = damaged.get("layers.1.mlp.up.weight").unwrap_err().to_string();
    assert!(error.contains("tensor layers.1.mlp.up.weight: the scale of block 5"), "{error}");
    // A file that says of bytes what they are not.
    for (from, to, what) in [
        (r#"\"q8_0\""#, r#"\"q9_0\""#, "is packed as `q9_0`"),
        (r#"\"q8_0\""#, r#"\"q4_0\""#, "no multiple of 18"),
        (r#"\"embed.weight\":"#, r#"\"embed.waight\":"#, "names a tensor embed.waight"),
    ] {
        let text = std::fs::read(&file).unwrap();
        let at = text.windows(from.len()).position(|w| w == from.as_bytes());
        let Some(at) = at else { panic!("{from} is not in the header") };
        let mut text = text.clone();
        text[at..at + from.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&bad, &text).unwrap();
        let error = Weights::open(&bad, None).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    // A file that ends early.
    let text = std::fs::read(&file).unwrap();
    std::fs::write(&bad, &text[..text.len() - 1000]).unwrap();
    let error = Weights::open(&bad, None).unwrap_err().to_string();
    assert!(error.contains("its tensors end at byte"), "{error}");
}

/// Losses of whole rows.
fn losses(golden: &Golden, weights: &Weights, formats: Formats, sequence: u64) -> Vec<u32> {
    let mut spec = golden.spec.clone();
    spec.train.sequence = Some(sequence);
    let storing = prepare::Storing { formats, ..prepare::Storing::default() };
    let compiled = prepare::measurer(&spec, None, &Rewriting::default(), storing).unwrap();
    losses_of(&device(), &spec, compiled, weights).iter().map(|x| x.to_bits()).collect()
}

fn losses_of(device: &dyn Device, spec: &Spec, compiled: Compiled, weights: &Weights) -> Vec<f32> {
    let sequence = spec.train.sequence.unwrap();
    let mut model = Model::load(device, compiled).unwrap();
    model.restore(weights).unwrap();
    let mut batch = dreamc_data::Batch::new(sequence as usize);
    let all = model.batch() * sequence as usize;
    let vocab = spec.model.vocab as usize;
    batch.ids = (0..all).map(|i| ((7 * i + 2) % vocab) as i32).collect();
    batch.targets = (0..all).map(|i| ((5 * i + 1) % vocab) as i32).collect();
    batch.positions = (0..all).map(|i| (i % sequence as usize) as i32).collect();
    batch.segments = vec![0; all];
    model.evaluate(&batch).unwrap()
}

/// The loss of a packed head reads rows in bf16 where activations are, and is near that of f32.
#[test]
fn losses_of_packed_heads_read_rows_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let (mut spec, weights) = blocks(folder.path());
    spec.train.sequence = Some(8);
    let packed = packed(folder.path(), &spec, &weights, "q8_0");
    let compiled = |formats: Formats, narrow: Narrow| {
        let storing = prepare::Storing { formats, narrow };
        prepare::measurer(&spec, None, &Rewriting::default(), storing).unwrap()
    };
    let cpu = device();
    let exact = losses_of(&cpu, &spec, compiled(packed.formats(), Narrow::Nothing), &packed);
    let gpu = dreamc_skip::need(PtxDevice::fast());
    let devices = [Some(&cpu as &dyn Device), gpu.as_ref().map(|gpu| gpu as &dyn Device)];
    for device in devices.into_iter().flatten() {
        let compiled = compiled(packed.formats_on(device), Narrow::Storage);
        let heads = compiled.plan.kernels.iter().filter(|kernel| matches!(kernel, Kernel::HeadLoss(_)));
        assert_eq!(heads.count(), 1);
        assert_eq!(read_by_heads(&compiled.plan), [DType::Bf16, DType::Packed(Packed::Q8)]);
        let found = losses_of(device, &spec, compiled, &packed);
        let apart = exact.iter().zip(&found).fold(0f32, |most, (x, y)| most.max((x - y).abs()));
        assert!(apart > 0.0 && apart < 0.1, "{}: {apart}", device.name());
    }
}

/// Types of the first two operands of the head's loss.
fn read_by_heads(plan: &Plan) -> Vec<DType> {
    let launches = plan.programs.values().flat_map(|program| &program.steps).filter_map(|step| match step {
        Step::Launch(launch) => Some(launch),
        Step::Loop { .. } => None,
    });
    let of = |launch: &&Launch| matches!(plan.kernel(launch.kernel), Kernel::HeadLoss(_));
    let launch = launches.into_iter().find(of).unwrap();
    let dtype = |operand: &Operand| match operand {
        Operand::Tensor { buffer, .. } => Some(plan.buffer(*buffer).dtype),
        Operand::Index(_) => None,
    };
    launch.operands.iter().take(2).filter_map(dtype).collect()
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
