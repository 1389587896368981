//! Models that leave: `dreamc export hf` and `dreamc export weights`, against the folders they came
//! from, and against `transformers` where it is installed.

use crate::import::{CASES, dreamc, folder, good, logits_of, spec_of};
use crate::support::{cpu, error, models, read, root, specs};
use crate::tuned::{tune, tuned_leave_as_they_came};
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::{Options, compile, looks_ahead};
use dreamc_data::Batch;
use dreamc_data::rng::Philox;
use dreamc_dsl::spec::{Component, Item, Tokenizer, depth_choice, has_passes};
use dreamc_dsl::{Spec, Spelling};
use dreamc_hf::hugging_face;
use dreamc_runtime::checkpoint::safetensors::Tensors;
use dreamc_runtime::checkpoint::safetensors::{self as tensor_files, Dtype};
use dreamc_runtime::checkpoint::{Weights, open_model};
use dreamc_runtime::evaluate::argmax;
use dreamc_runtime::generate::{Cached, NextLogits, Uncached, Writing, compile_cached};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare;
use dreamc_verify::shrink;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Type, shape and bytes of a tensor.
pub type Found = (String, Vec<u64>, Vec<u8>);

/// Every tensor of the safetensors files of a folder.
pub fn tensors(folder: &Path) -> BTreeMap<String, Found> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("model") || !name.ends_with(".safetensors") {
            continue;
        }
        let file = Tensors::open(&entry.path()).unwrap();
        for (name, shape) in file.entries() {
            let stored = file.stored(name).unwrap();
            let content = (format!("{:?}", stored.dtype), shape.to_vec(), stored.bytes().unwrap());
            found.insert(name.to_string(), content);
        }
    }
    found
}

/// Runs a script of `tests/hf`.
pub fn python(script: &str, line: &[&str]) -> Option<String> {
    let python = dreamc_skip::transformers()?;
    let mut command = Command::new(python);
    command.arg(root(&format!("tests/hf/{script}"))).args(line);
    command
        .env("HF_HUB_OFFLINE", "1")
        .env("TRANSFORMERS_VERBOSITY", "error")
        .env("HF_MODULES_CACHE", line[1])
        // Tests run at the same time.
        .env("OMP_NUM_THREADS", "1");
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script} {line:?}:\n{out}{err}");
    Some(out.into_owned())
}

#[test]
fn what_is_exported_is_what_was_imported() {
    for case in CASES {
        let place = tempfile::tempdir().unwrap();
        let at = place.path();
        hugging_face(&folder(case), &at.join("model"), case, false, &[]).unwrap();
        let said = good(at, &["export", "hf", "model", "-o", "back"]);
        assert!(said.contains("ForCausalLM"), "{said}");
        assert_eq!(tensors(&folder(case)), tensors(&at.join("back")), "{case}");
        let config = |at: &Path| fs::read_to_string(at.join("config.json")).unwrap();
        assert_eq!(config(&folder(case)), config(&at.join("back")), "{case}");
        let tokenizer = |at: &Path| fs::read(at.join("tokenizer.json")).ok();
        assert_eq!(tokenizer(&folder(case)), tokenizer(&at.join("back")), "{case}");

        // Without the files that were kept, `config.json` is made anew and means the same.
        fs::copy(at.join("model/model.safetensors"), at.join("alone.safetensors")).unwrap();
        good(at, &["export", "hf", "alone.safetensors", "-o", "anew"]);
        assert_eq!(tensors(&folder(case)), tensors(&at.join("anew")), "{case}");
        let again = hugging_face(&at.join("anew"), &at.join("again"), case, false, &[]).unwrap();
        let first = spec_of(&Weights::open(&at.join("model"), None).unwrap());
        assert_eq!(again.spec.model, first.model, "{case}");
    }
}

#[test]
fn weights_leave_alone() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    hugging_face(&folder("qwen3_old"), &at.join("model"), "m", false, &[]).unwrap();
    good(at, &["export", "weights", "model", "-o", "plain.safetensors"]);
    let (ours, plain) =
        (open_model(&at.join("model")).unwrap().0, open_model(&at.join("plain.safetensors")).unwrap().0);
    for (name, shape) in ours.entries() {
        let bytes = |t: &Tensors| t.stored(name).map(|t| (t.shape.to_vec(), t.bytes().unwrap()));
        assert_eq!(bytes(&plain), bytes(&ours), "{name} {shape:?}");
    }
    assert_eq!(plain.entries().count(), ours.entries().count());
    // Every command opens the file by itself, and its metadata are those that transformers asks
    // for.
    good(at, &["export", "hf", "plain.safetensors", "-o", "native"]);
    assert_eq!(tensors(&at.join("native")), tensors(&folder("qwen3_old")));
    assert_eq!(plain.metadata("format"), Some("pt"));

    good(at, &["export", "weights", "model", "-o", "half.safetensors", "--dtype", "bf16"]);
    let half = open_model(&at.join("half.safetensors")).unwrap().0;
    for (name, _) in ours.entries() {
        let (before, after) = (ours.get(name).unwrap().unwrap().1, half.get(name).unwrap().unwrap().1);
        assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() <= a.abs() / 256.0), "{name}");
    }
    // Nothing is written over.
    let before = fs::read(at.join("half.safetensors")).unwrap();
    let again = dreamc(at, &["export", "weights", "model", "-o", "half.safetensors"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("half.safetensors exists already"), "{again:?}");
    assert_eq!(before, fs::read(at.join("half.safetensors")).unwrap());
}

#[test]
fn nothing_is_written_where_an_export_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    hugging_face(&folder("gemma2_new"), &at.join("model"), "m", false, &[]).unwrap();
    fs::create_dir(at.join("full")).unwrap();
    fs::write(at.join("full/mine.txt"), "mine").unwrap();
    let refused = dreamc(at, &["export", "hf", "model", "-o", "full"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("full exists already"), "{refused:?}");
    assert_eq!(fs::read_dir(at.join("full")).unwrap().count(), 1);
    let missing = dreamc(at, &["export", "hf", "nowhere", "-o", "out"]);
    assert!(!missing.status.success() && !at.join("out").exists());
}

/// How far logits may be from those of `transformers`: one bit of the weights moves those of Kimi
/// Linear by 8e-6.
fn bound(name: &str) -> f64 {
    if name == "kimi_linear" { 2e-5 } else { 1e-5 }
}

/// How far the gradients of the model in the folder `to` are from those that stand in the place of
/// weights in `theirs`, which come in as `place`: by the largest of its tensor, or by a thousandth
/// of the largest of all, since one that a norm after it annuls is rounding alone.
fn gradients_differ(theirs: &Path, place: &Path, to: &Path, ids: &Tensor) -> f64 {
    let (rows, n) = (ids.dims[0], ids.dims[1] - 1);
    let spec = hugging_face(theirs, place, "gradients", false, &[]).unwrap().spec;
    let options = Options { train: true, ..forward(rows as u64, n as u64) };
    let load = |folder: &Path| {
        let mut model = Model::load(&cpu(1), compile(&spec, &options).unwrap()).unwrap();
        model.restore(&Weights::open(folder, None).unwrap()).unwrap();
        model
    };
    let (mut model, expected) = (load(to), load(place));
    let part = |from: usize| -> Vec<i32> {
        ids.ints().chunks(n + 1).flat_map(|row| row[from..from + n].to_vec()).collect()
    };
    let mut batch = Batch::new(n);
    (batch.ids, batch.targets) = (part(0), part(1));
    batch.positions = (0..rows).flat_map(|_| 0..n as i32).collect();
    batch.segments = vec![0; rows * n];
    model.begin_step().unwrap();
    model.backward(&batch, Scale { loss: 1.0 / (rows * n) as f32, auxiliary: 0.0 }, None).unwrap();
    let tensors = model.compiled().tensors.clone();
    let pairs: Vec<(Vec<f32>, Vec<f32>)> = tensors
        .iter()
        .filter_map(|tensor| Some((model.gradient(tensor).unwrap()?, expected.get(&tensor.name).unwrap())))
        .collect();
    let largest = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max);
    let all = pairs.iter().map(|(_, right)| largest(right)).fold(0.0, f64::max);
    let differ = |(found, right): &(Vec<f32>, Vec<f32>)| {
        let distance: Vec<f32> = found.iter().zip(right).map(|(a, b)| a - b).collect();
        largest(&distance) / largest(right).max(1e-3 * all)
    };
    pairs.iter().map(differ).fold(0.0, f64::max)
}

/// Prompts and the likeliest tokens after them, as many as `expected` has, from a cache.
fn greedy(folder: &Path, spec: &Spec, expected: &Tensor) -> Vec<i32> {
    const PROMPT: usize = 11;
    let (rows, all) = (expected.dims[0], expected.dims[1]);
    let writing = Writing { rows: rows as u64, ..Writing::default() };
    let mut cached = Cached::load(&cpu(1), compile_cached(spec, &writing).unwrap()).unwrap();
    cached.model().restore(&Weights::open(folder, None).unwrap()).unwrap();
    let mut texts: Vec<Vec<u32>> =
        expected.ints().chunks(all).map(|row| row[..PROMPT].iter().map(|id| *id as u32).collect()).collect();
    let mut next = cached.start(&texts).unwrap();
    for at in PROMPT..all {
        let tokens: Vec<u32> = next.iter().map(|logits| argmax(logits) as u32).collect();
        texts.iter_mut().zip(&tokens).for_each(|(text, token)| text.push(*token));
        if at + 1 < all {
            next = cached.advance(&tokens).unwrap();
        }
    }
    texts.into_iter().flatten().map(|id| id as i32).collect()
}

/// The scale of scores is folded into the gain of queries or into their rows, that of a tied head
/// into the last norm's gain: the class without these keys gives the logits of the run.
#[test]
fn multipliers_that_a_class_lacks_are_folded_into_weights() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    for (name, norm) in [("normed", "rms"), ("plain", "none")] {
        let text = format!(
            "model: {{name: m, vocab: 256, hidden: 48, context: 32, tie: true, components: {{sa: {{sequence: {{heads: 2, kv_heads: 1, head_size: 24, \
             qk_norm: {norm}}}}}, mlp: {{mlp: {{intermediate: 64}}}}}}, body: [{{repeat: 2, layers: [\"sa > mlp\"]}}]}}\n\
             data: {{task: permutation, max_steps: 2}}\ntrain: {{steps: 4, batch: 2, learning_rate: 1e-2, transfer: {{rule: mup, width: 16, depth: \
             2, sizes: {{sa.heads: 2, sa.kv_heads: 1, sa.head_size: 8, mlp.intermediate: 32}}}}}}\n"
        );
        fs::write(at.join(format!("{name}.yaml")), text).unwrap();
        good(at, &["train", &format!("{name}.yaml"), "--out", name]);
        let said = good(at, &["export", "hf", name, "-o", &format!("{name}-hf")]);
        for part in ["weights stand for it", "`sa.scale`", "`logit_scale`"] {
            assert!(said.contains(part), "{name}: {part}\n{said}");
        }
        let (spec, _) = dreamc_dsl::load(at.join(format!("{name}.yaml")), &[]).unwrap();
        let ids: Vec<i32> = (0..12).map(|i| 97 + (i * 7) % 23).collect();
        let run = at.join(name).join("checkpoints/step-00000004");
        let here = logits_of(&run, &spec, &ids, 12);
        let to = at.join(format!("{name}-back"));
        let back = hugging_face(&at.join(format!("{name}-hf")), &to, name, false, &[]).unwrap();
        assert!(back.spec.model.logit_scale.is_none(), "{name}");
        let e = error(&logits_of(&to, &back.spec, &ids, 12), &here);
        println!("{name}: folded logits differ by {e:.1e}");
        assert!(e < 1e-5, "{name}: {e}");
    }
}

#[test]
fn models_of_transformers_come_and_go() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let models = at.to_str().unwrap();
    if python("families.py", &["make", models]).is_none() {
        return;
    }
    let mut count = 0;
    let folders: Vec<PathBuf> = fs::read_dir(at).unwrap().flatten().map(|e| e.path()).collect();
    for from in folders.iter().filter(|f| f.join("config.json").is_file()) {
        let name = from.file_name().unwrap().to_str().unwrap();
        let to = at.join(format!("{name}-dreamc"));
        let imported = hugging_face(from, &to, name, false, &[]).unwrap_or_else(|e| panic!("{name}: {e}"));
        let expected = read(from.join("expected.safetensors").to_str().unwrap());
        let ids = &expected["ids"];
        let found = logits_of(&to, &imported.spec, ids.ints(), ids.dims[1]);
        let e = error(&found, expected["logits"].floats());
        println!("{name}: logits differ by {e:.1e}");
        assert!(e < bound(name), "{name}: logits differ by {e}");
        let e = gradients_differ(&from.join("gradients"), &at.join(format!("{name}-gradients")), &to, ids);
        println!("{name}: gradients differ by {e:.1e}");
        assert!(e < 10.0 * bound(name), "{name}: gradients differ by {e}");
        assert_eq!(greedy(&to, &imported.spec, &expected["greedy"]), expected["greedy"].ints(), "{name}");
        good(at, &["export", "hf", to.to_str().unwrap(), "-o", &format!("{name}-back")]);
        fs::copy(to.join("model.safetensors"), at.join(format!("{name}.safetensors"))).unwrap();
        good(at, &["export", "hf", &format!("{name}.safetensors"), "-o", &format!("{name}-new")]);
        assert_eq!(tensors(from), tensors(&at.join(format!("{name}-back"))), "{name}");
        tuned_leave_as_they_came(from, &at.join(format!("{name}-tuned")));
        count += 1;
    }
    let said = python("families.py", &["check", models]).unwrap();
    assert_eq!(said.trim(), format!("{count} models"));
    let said = python("families.py", &["faults", models]).unwrap();
    assert!(said.contains("faults noticed"), "{said}");
    let said = python("families.py", &["tuned", models]).unwrap();
    assert_eq!(said.trim(), format!("{count} tuned models"));
    for from in folders.iter().filter(|f| f.join("config.json").is_file()) {
        let name = from.file_name().unwrap().to_str().unwrap();
        let tuned = at.join(format!("{name}-tuned"));
        let said = read(tuned.join("said.safetensors").to_str().unwrap());
        let ids = &said["ids"];
        let spec = spec_of(&Weights::open(&tuned.join("model"), None).unwrap());
        let found = logits_of(&tuned.join("folder"), &spec, ids.ints(), ids.dims[1]);
        let e = error(&found, said["logits"].floats());
        assert!(e < bound(name), "{name}: logits of the tuned model differ by {e}");
    }
}

/// Experts packed as MXFP4 come in as the numbers that transformers unpacks, and leave as bf16.
#[test]
fn packed_experts_come_in() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    if python("packed.py", &["make", at.to_str().unwrap()]).is_none() {
        return;
    }
    let (from, to) = (at.join("packed"), at.join("model"));
    let imported = hugging_face(&from, &to, "model", false, &[]).unwrap();
    assert!(imported.notes.iter().any(|note| note.contains("MXFP4")), "{:?}", imported.notes);
    let expected = read(from.join("expected.safetensors").to_str().unwrap());
    let ids = &expected["ids"];
    let found = logits_of(&to, &imported.spec, ids.ints(), ids.dims[1]);
    let e = error(&found, expected["logits"].floats());
    assert!(e < 1e-5, "logits differ by {e}");
    good(at, &["export", "hf", "model", "-o", "back"]);
    let config = fs::read_to_string(at.join("back/config.json")).unwrap();
    assert!(!config.contains("quantization_config"), "{config}");
    assert_eq!(python("packed.py", &["check", at.to_str().unwrap()]).unwrap().trim(), "equal");
}

/// Ouro and Huginn, whose classes are not in transformers, against a plain implementation of each.
#[test]
fn looped_models_come_in() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    if python("loops.py", &["make", at.to_str().unwrap()]).is_none() {
        return;
    }
    for name in ["ouro", "huginn"] {
        let (from, to) = (at.join(name), at.join(format!("{name}-dreamc")));
        let imported = hugging_face(&from, &to, name, false, &[]).unwrap_or_else(|e| panic!("{name}: {e}"));
        let expected = read(from.join("expected.safetensors").to_str().unwrap());
        let ids = &expected["ids"];
        let found = logits_of(&to, &imported.spec, ids.ints(), ids.dims[1]);
        let e = error(&found, expected["logits"].floats());
        assert!(e < 1e-5, "{name}: logits differ by {e}");
    }
    good(at, &["export", "hf", "ouro-dreamc", "-o", "ouro-back"]);
    assert_eq!(tensors(&at.join("ouro")), tensors(&at.join("ouro-back")));
    let config = |folder: &str| fs::read(at.join(folder).join("config.json")).unwrap();
    assert_eq!(config("ouro"), config("ouro-back"));
    // Huginn's class needs a table that is no weight: it leaves as a package.
    let said = good(at, &["export", "hf", "huginn-dreamc", "-o", "huginn-back"]);
    assert!(said.contains("no class of transformers computes it"), "{said}");
    tuned_leave_as_they_came(&at.join("ouro"), &at.join("ouro-tuned"));
    for (run, said) in tune(&at.join("huginn"), &at.join("huginn-tuned")) {
        assert!(said.contains("no class of transformers computes it"), "{run}: {said}");
    }
}

/// Tokens of the rows whose logits are compared, and tokens generated after a prompt.
const ROW: u64 = 24;
const STEPS: usize = 8;

fn forward(rows: u64, n: u64) -> Options {
    Options { logits: true, ..prepare::forward(rows, n) }
}

/// A model compiled for rows of `n` tokens, its weights drawn so wide that routers, gains and
/// biases matter, and no wider, since rounding grows with them from layer to layer.
pub fn drawn(spec: &Spec, rows: u64, n: u64, depth: Option<u64>) -> Model {
    let options = Options { depth, ..forward(rows, n) };
    let mut model = Model::load(&cpu(1), compile(spec, &options).unwrap()).unwrap();
    model.initialise(7).unwrap();
    for (name, shape) in model.entries() {
        let mut random = Philox::new(7, &name).stream(1);
        let width = if shape.len() > 1 { 2.0 / (*shape.last().unwrap() as f64).sqrt() } else { 0.6 };
        let values = model.get(&name).unwrap();
        let values: Vec<f32> = values.iter().map(|x| x + (width * (random.unit() - 0.5)) as f32).collect();
        model.set(&name, &values).unwrap();
    }
    model
}

/// Logits of rows of tokens.
fn logits(model: &mut Model, ids: &[i32], n: usize) -> Vec<f32> {
    let rows = ids.len() / n;
    let mut batch = Batch::new(n);
    batch.ids = ids.to_vec();
    batch.targets = vec![0; rows * n];
    batch.positions = (0..rows).flat_map(|_| 0..n as i32).collect();
    batch.segments = vec![0; rows * n];
    model.evaluate(&batch).unwrap();
    model.all_logits().unwrap()
}

/// A tensor to be written: name, shape, type, bytes.
pub type Expected = (String, Vec<u64>, Dtype, Vec<u8>);

fn whole(name: &str, values: &[u32]) -> Expected {
    let bytes = values.iter().flat_map(|x| i64::from(*x).to_le_bytes()).collect();
    (name.into(), vec![values.len() as u64], Dtype::I64, bytes)
}

pub fn real(name: &str, shape: &[u64], values: &[f32]) -> Expected {
    (name.into(), shape.to_vec(), Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

pub fn write(path: &Path, metadata: &[(&str, &str)], list: &[Expected]) {
    let entries: Vec<_> = list.iter().map(|(n, s, d, _)| (n.clone(), s.clone(), *d)).collect();
    let mut file = fs::File::create(path).unwrap();
    tensor_files::write_stored(&mut file, metadata, &entries, |i, out| out.write_all(&list[i].3)).unwrap();
}

/// Writes the weights of a small form of a model, exports them, and writes its logits and texts.
fn prepare_package(spec: &Spec, at: &Path, name: &str) {
    let mut spec = shrink(spec, false).spec;
    spec.model.context = spec.model.context.max(ROW + STEPS as u64);
    let (vocab, n) = (spec.model.vocab, ROW);
    // Files of tokenizers are not here, and a small vocabulary holds no bytes.
    spec.data = spec.data.filter(|data| data.tokenizer == Tokenizer::Bytes && vocab >= 256);
    let mut model = drawn(&spec, 2, n, None);
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    let weights: Vec<Expected> =
        model.entries().iter().map(|(name, shape)| real(name, shape, &model.get(name).unwrap())).collect();
    write(&at.join(format!("{name}.safetensors")), &[("format", "dreamc"), ("spec", &text)], &weights);
    good(at, &["export", "hf", "--package", &format!("{name}.safetensors"), "-o", name]);

    let mut random = Philox::new(3, name).stream(0);
    let mut draw = |n: u64| -> Vec<u32> { (0..n).map(|_| random.below(vocab) as u32).collect() };
    let ids = draw(2 * n);
    let rows: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let shape = [2, n, vocab];
    let mut expected = vec![real("logits", &shape, &logits(&mut model, &rows, n as usize))];
    let mut given = whole("ids", &ids);
    given.1 = vec![2, n];
    expected.push(given);
    let counts: Vec<(u64, bool)> = spec
        .model
        .body
        .iter()
        .filter_map(|item| match item {
            Item::Recur { count, looping, items, .. } => Some((
                *count,
                looping.has_passes()
                    || has_passes(items)
                    || depth_choice(items).is_some()
                    || spec.model.has_turns(),
            )),
            _ => None,
        })
        .collect();
    // Passes with weights of their own are as many as these.
    let defined = spec.model.components.values().any(|c| matches!(c, Component::Defined(_)));
    if let ([(count, false)], false) = (&counts[..], defined) {
        let mut deep = drawn(&spec, 2, n, Some(count + 2));
        // Weights are drawn by depth; these are the same at both.
        for (name, _) in model.entries() {
            deep.set(&name, &model.get(&name).unwrap()).unwrap();
        }
        expected.push(whole("recur", &[*count as u32 + 2]));
        expected.push(real("deep", &shape, &logits(&mut deep, &rows, n as usize)));
    }
    if name.contains("ouro") || name == "passes_dream" {
        let options = Options { exit: Some(0.4), ..forward(2, n) };
        let mut leaving = Model::load(&cpu(1), compile(&spec, &options).unwrap()).unwrap();
        for (name, _) in model.entries() {
            leaving.set(&name, &model.get(&name).unwrap()).unwrap();
        }
        expected.push(real("exit", &[1], &[0.4]));
        expected.push(real("left", &shape, &logits(&mut leaving, &rows, n as usize)));
    }
    if !looks_ahead(&spec.model) {
        let prompts = [1, 6, 11].map(&mut draw);
        let mut from = Uncached::new(drawn(&spec, prompts.len() as u64, n, None));
        let mut next = from.start(&prompts).unwrap();
        let mut written = vec![vec![]; prompts.len()];
        for step in 0..STEPS {
            let tokens: Vec<u32> = next.iter().map(|logits| argmax(logits) as u32).collect();
            written.iter_mut().zip(&tokens).for_each(|(text, token)| text.push(*token));
            if step + 1 < STEPS {
                next = from.advance(&tokens).unwrap();
            }
        }
        for (i, (prompt, written)) in prompts.iter().zip(&written).enumerate() {
            expected.push(whole(&format!("prompt.{i}"), prompt));
            expected.push(whole(&format!("written.{i}"), written));
        }
    }
    write(&at.join(format!("{name}.expected.safetensors")), &[], &expected);
}

#[test]
fn packages_compute_what_dreamc_computes() {
    if dreamc_skip::transformers().is_none() {
        return;
    }
    let place = match std::env::var_os("DREAMC_HF_KEEP") {
        Some(folder) => PathBuf::from(folder),
        None => tempfile::tempdir().unwrap().keep(),
    };
    let all = [
        specs("examples"),
        specs("examples/published"),
        specs("examples/zoo"),
        specs("tests/goldens"),
        specs("tests/hf"),
    ]
    .concat();
    for (file, spec) in models(all) {
        // The library's mixers are in the goldens; models of it are no other code.
        let defined = |c: &Component| matches!(c, Component::Defined(_));
        if spec.model.components.values().any(defined) && file.starts_with("examples/") {
            continue;
        }
        // Adapters leave by `export peft`, or merged.
        if spec.model.adapt.is_some() {
            continue;
        }
        let name = file.rsplit('/').next().unwrap().replace(['.', '-'], "_");
        prepare_package(&spec, &place, &name);
    }
    println!("{}", python("packages.py", &["all", place.to_str().unwrap()]).unwrap());
    if std::env::var_os("DREAMC_HF_KEEP").is_none() {
        fs::remove_dir_all(place).unwrap();
    }
}

/// A model of Llama's class, of bytes.
const LLAMA: &str = "\
model:
  name: llama
  vocab: 256
  hidden: 24
  context: 64
  tie: true
  components:
    sa: {sequence: {heads: 3, kv_heads: 1, head_size: 8, qk_norm: none, projection: none}}
    mlp: {mlp: {intermediate: 40}}
  body:
    - repeat: 4
      layers: [\"sa > mlp\"]
";

/// The sections of a specification that training needs.
const HEALED: &str = "\
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 2, sequence: 48, learning_rate: 1e-3, warmup: 1, precision: f32, evaluate: {every: 0}}
eval: {examples: 2, max_tokens: 4}
";

/// The whole way, of a shape that `docs/results/transplant.md` has at the size of SmolLM2-135M: a
/// folder of theirs comes in, becomes another architecture, is healed, leaves, and computes there
/// what it computes here.
#[test]
fn an_imported_donor_is_turned_healed_and_leaves() {
    if dreamc_skip::transformers().is_none() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    let write_text = |name: &str, text: &str| fs::write(at.join(name), text).unwrap();
    write_text("llama.yaml", LLAMA);
    let ast = dreamc_dsl::parse("llama.yaml", LLAMA, Spelling::Yaml).unwrap();
    let spec = dreamc_dsl::check(&ast, &[]).unwrap().0;
    let model = drawn(&spec, 1, 8, None);
    let text = dreamc_dsl::show(&spec, Spelling::Yaml);
    let weights: Vec<Expected> =
        model.entries().iter().map(|(name, shape)| real(name, shape, &model.get(name).unwrap())).collect();
    write(&at.join("llama.safetensors"), &[("format", "dreamc"), ("spec", &text)], &weights);
    assert!(good(at, &["export", "hf", "llama.safetensors", "-o", "theirs"]).contains("LlamaForCausalLM"));
    good(at, &["import", "hf", "theirs", "-o", "donor"]);

    let experts = LLAMA
        .replace(
            "mlp: {mlp: {intermediate: 40}}",
            "ea: {experts: {count: 4, active: 2, intermediate: 40, query: 8}}",
        )
        .replace("sa > mlp", "sa > ea");
    let delta = LLAMA
        .replace("    mlp: ", "    gdn: {gated_delta: {heads: 3, size: 8, value: 8}}\n    mlp: ")
        .replace(
            "repeat: 4\n      layers: [\"sa > mlp\"]",
            "repeat: 3\n      layers: [\"gdn > mlp\"]\n    - sa > mlp",
        );
    let latent = LLAMA.replace(
        "kv_heads: 1, head_size: 8, qk_norm: none, projection: none",
        "head_size: 8, latent: {kv: 10, turned: 4, value: 8, norm: none, pairs: uniform}",
    );
    for (name, text, proved) in
        [("upcycled", experts, true), ("delta", delta, false), ("latent", latent, false)]
    {
        let named = text.replace("name: llama", &format!("name: {name}"));
        let heal = "heal: {stages: [{match: layers, steps: 1}, {match: logits, temperature: 2, loss: 0.5}]}";
        write_text(&format!("{name}.yaml"), &format!("transplant: {{from: donor}}\n{heal}\n{named}{HEALED}"));
        let said = good(
            at,
            &["transplant", &format!("{name}.yaml"), "--from", "donor", "-o", &format!("made/{name}")],
        );
        assert_eq!(said.contains("proved: "), proved, "{name}: {said}");
        good(at, &["train", &format!("made/{name}"), "--out", &format!("runs/{name}")]);
        good(at, &["export", "hf", &format!("runs/{name}"), "-o", name]);
        // The logits of the run.
        let weights = Weights::open(&at.join("runs").join(name), None).unwrap();
        let spec = spec_of(&weights);
        let mut model = Model::load(&cpu(1), compile(&spec, &forward(2, ROW)).unwrap()).unwrap();
        model.restore(&weights).unwrap();
        let mut random = Philox::new(3, name).stream(0);
        let ids: Vec<u32> = (0..2 * ROW).map(|_| random.below(256) as u32).collect();
        let rows: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let mut given = whole("ids", &ids);
        given.1 = vec![2, ROW];
        let expected = [real("logits", &[2, ROW, 256], &logits(&mut model, &rows, ROW as usize)), given];
        write(&at.join(format!("{name}.expected.safetensors")), &[], &expected);
    }
    let said = python("packages.py", &["each", at.to_str().unwrap()]).unwrap();
    assert!(said.contains("3 of 3 packages"), "{said}");
}
