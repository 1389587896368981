//! Modules against what is computed without PyTorch: the goldens of the reference, and the f64
//! interpreter, for logits, loss and every gradient. Real PyTorch runs them (`DREAMC_HF`).

use dreamc_compiler::compiled::Init;
use dreamc_compiler::ir::interpret::{Data, Tensor};
use dreamc_compiler::ir::random::Rng;
use dreamc_compiler::lower::Form;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle, Setup};
use dreamc_compiler::random;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::{Spec, Spelling};
use dreamc_torch::{Options, TorchError, module};
use indexmap::IndexMap;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn load(path: &str) -> Spec {
    dreamc_dsl::load(root(path), &[]).unwrap_or_else(|e| panic!("{path}: {e}")).0
}

/// Differences between modules of a folder and the tensors next to them.
fn compared(python: &Path, folder: &Path, names: &[String]) -> String {
    let mut command = Command::new(python);
    command.arg(root("tests/hf/modules.py")).arg(folder).args(names).env("OMP_NUM_THREADS", "1");
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn options(spec: &Spec) -> Options {
    Options { segments: false, z_loss: spec.train.z_loss }
}

/// A number of the kind that a tensor begins with, so that logarithms and steps stay in bounds.
fn number(rng: &mut Rng, init: Init, fan_in: f64) -> f64 {
    let noise = rng.between(-1.0, 1.0);
    match init {
        Init::Normal(_) => noise * (3.0 / fan_in).sqrt(),
        Init::Constant(c) | Init::Ramp(c, _) => c + 0.3 * noise,
        Init::Identity { .. } | Init::Pick { .. } => 0.5 * noise,
        Init::Uniform(a, b) => a + (b - a) * (noise + 1.0) / 2.0,
        Init::LogUniform(a, b) => (a.max(1e-3) + (b - a) * (noise + 1.0) / 2.0).ln(),
        Init::InverseSoftplusUniform(a, b) => (a + (b - a) * (noise + 1.0) / 2.0).exp_m1().ln(),
    }
}

fn bytes(data: &Data) -> (Dtype, Vec<u8>) {
    match data {
        Data::Float(x) => (Dtype::F64, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Data::Int(x) => (Dtype::I32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
    }
}

/// Writes the module of a specification and what the interpreter computes of random numbers.
fn write(folder: &Path, name: &str, spec: &Spec, (seed, segments): (u64, bool)) -> Result<(), TorchError> {
    let text = module(&spec.model, Options { segments, ..options(spec) })?.text;
    std::fs::write(folder.join(format!("{name}.py")), text).unwrap();
    let (b, t) = (2, spec.model.context.clamp(2, 9));
    let shape = Shape { batch: b, sequence: t, segments, z_loss: spec.train.z_loss, ..Shape::default() };
    let rewriting = Rewriting::off();
    let setup = Setup { recurrence: None, rewriting: &rewriting, form: Form::Training, watch: &|_, _, _| {} };
    let oracle = Oracle::with(&spec.model, shape, setup)?;
    let mut rng = Rng::new(seed);
    let mut weights = IndexMap::new();
    for (name, sizes, _, init) in oracle.tensors() {
        let fan_in = sizes.last().copied().unwrap_or(1).max(1) as f64;
        let n = sizes.iter().product::<u64>();
        let sizes: Vec<usize> = sizes.iter().map(|&n| n as usize).collect();
        weights.insert(name, Tensor::float(&sizes, (0..n).map(|_| number(&mut rng, init, fan_in)).collect()));
    }
    let n = (b * t) as usize;
    let ids: Vec<i32> = (0..n).map(|_| rng.below(spec.model.vocab) as i32).collect();
    let targets: Vec<i32> =
        (0..n).map(|i| if i % 5 == 4 { -1 } else { rng.below(spec.model.vocab) as i32 }).collect();
    let noise: Vec<f64> = (0..n * spec.model.hidden as usize).map(|_| rng.between(-1.0, 1.0)).collect();
    // Two documents, where there are marks of them.
    let documents: Vec<i32> = (0..n as i32).map(|i| i32::from(segments && i % t as i32 >= 4)).collect();
    let batch = Batch {
        ids: ids.clone(),
        targets: targets.clone(),
        noise: noise.clone(),
        segments: documents.clone(),
        ..Batch::default()
    };
    let found = oracle.evaluate(&weights, &batch).unwrap();
    let tokens = [b as usize, t as usize];
    let mut all: IndexMap<String, Tensor> = IndexMap::new();
    all.insert("ids".into(), Tensor::int(&tokens, ids));
    all.insert("targets".into(), Tensor::int(&tokens, targets));
    all.insert("segments".into(), Tensor::int(&tokens, documents));
    all.insert("noise".into(), Tensor::float(&[tokens[0], tokens[1], spec.model.hidden as usize], noise));
    all.insert("logits".into(), found.logits);
    all.insert("loss".into(), Tensor::float(&[1], vec![found.loss]));
    if !segments && !oracle.architecture().decides_anew() {
        let (prompt, written) = written(spec, &weights, 4)?;
        all.insert("prompt".into(), prompt);
        all.insert("written".into(), written);
    }
    all.extend(weights.into_iter().map(|(name, t)| (format!("weights.{name}"), t)));
    all.extend(found.gradients.into_iter().map(|(name, t)| (format!("gradients.{name}"), t)));
    let stored: Vec<(Dtype, Vec<u8>)> = all.values().map(|t| bytes(&t.data)).collect();
    let views = all
        .iter()
        .zip(&stored)
        .map(|((name, t), (dtype, data))| (name, TensorView::new(*dtype, t.dims.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join(format!("{name}.safetensors"))).unwrap();
    Ok(())
}

/// Two tokens, and what the likeliest tokens after them make of them, each of whole texts.
fn written(
    spec: &Spec,
    weights: &IndexMap<String, Tensor>,
    tokens: usize,
) -> Result<(Tensor, Tensor), TorchError> {
    let prompt = vec![0, i32::from(spec.model.vocab > 1)];
    let mut text = prompt.clone();
    for _ in 0..tokens {
        let shape = Shape { sequence: text.len() as u64, ..Shape::default() };
        let batch = Batch { ids: text.clone(), targets: vec![-1; text.len()], ..Batch::default() };
        let logits = Oracle::new(&spec.model, shape, None)?.forward(weights, &batch, None).unwrap().logits;
        let last = &logits.floats()[logits.floats().len() - spec.model.vocab as usize..];
        let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        text.push(best.map_or(0, |(k, _)| k as i32));
    }
    Ok((Tensor::int(&[1, 2], prompt), Tensor::int(&[1, text.len()], text)))
}

/// Writes all and compares; what is refused is counted and named.
fn check(all: Vec<(String, Spec)>) {
    check_with(all, false);
}

/// The same with marks of documents or without.
fn check_with(all: Vec<(String, Spec)>, segments: bool) {
    let Some(python) = dreamc_skip::transformers() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (mut names, mut refused) = (vec![], vec![]);
    for (k, (name, spec)) in all.iter().enumerate() {
        let name = name.replace(['/', '.'], "_");
        match write(folder.path(), &name, spec, (k as u64 + 1, segments)) {
            Ok(()) => names.push(name),
            // A specification that does not compile has nothing to export.
            Err(TorchError::Compile(e)) => println!("{name}: {e}"),
            Err(e) => refused.push(format!("{name}: {e}")),
        }
    }
    println!("{} modules; refused: {}", names.len(), refused.join("; "));
    let found = compared(&python, folder.path(), &names);
    if let Some((name, spec)) = all.iter().find(|(name, _)| found.starts_with(&format!("{name}:"))) {
        println!("{name}:\n{}", dreamc_dsl::show(spec, Spelling::Yaml));
    }
    assert!(found.is_empty(), "{found}");
    assert!(refused.is_empty(), "{refused:#?}");
}

fn folder(path: &str, of: impl Fn(&str) -> bool) -> Vec<String> {
    let mut files: Vec<String> = std::fs::read_dir(root(path))
        .unwrap()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    files.retain(|f| (f.ends_with(".yaml") || f.ends_with(".dream")) && !f.contains(".suite.") && of(f));
    files.sort();
    files
}

/// Every golden of the reference that is written in Python from the semantics alone.
#[test]
fn modules_compute_what_the_reference_computes() {
    let Some(python) = dreamc_skip::transformers() else { return };
    let place = tempfile::tempdir().unwrap();
    let mut names = vec![];
    for file in folder("tests/goldens", |_| true) {
        let name = file.trim_end_matches(".yaml").to_string();
        let spec = load(&format!("tests/goldens/{file}"));
        let text = module(&spec.model, options(&spec)).unwrap_or_else(|e| panic!("{name}: {e}")).text;
        std::fs::write(place.path().join(format!("{name}.py")), text).unwrap();
        let tensors = root(&format!("tests/goldens/{name}.safetensors"));
        std::fs::copy(tensors, place.path().join(format!("{name}.safetensors"))).unwrap();
        names.push(name);
    }
    assert!(names.len() > 40);
    let found = compared(&python, place.path(), &names);
    assert!(found.is_empty(), "{found}");
}

#[test]
fn every_small_example_leaves_as_it_is() {
    let tiny = |f: &str| f.starts_with("tiny");
    check(
        folder("examples", tiny).into_iter().map(|f| (f.clone(), load(&format!("examples/{f}")))).collect(),
    );
}

/// A small specification of a mixer of the library.
fn mixer(name: &str) -> Spec {
    // Some heads are of 64 channels.
    let hidden = if ["falcon_h1", "mamba2", "rwkv7"].contains(&name) { 64 } else { 16 };
    let sizes = match name {
        "dsa" => "indexers 2  index 8  tokens 5",
        "moba" => "block 3  blocks 2",
        "nsa" => "groups 2  block 3  window 5",
        _ => "",
    };
    let text = format!(
        "model m {{\n  vocab 19  hidden {hidden}  context 16\n  a = {name} {{ {sizes} }}\n  mlp = mlp {{ intermediate 8 }}\n  \
         repeat 2 {{ layer {{ a > mlp }} }}\n}}\n"
    );
    let ast = dreamc_dsl::parse(name, &text, Spelling::Dream).unwrap();
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{name}: {e}")).0
}

#[test]
fn every_mixer_of_the_library_leaves_as_it_is() {
    let names = dreamc_dsl::define::library::LIBRARY.iter().map(|(name, _)| (*name).to_string());
    let all: Vec<(String, Spec)> = names.map(|name| (name.clone(), mixer(&name))).collect();
    check(all.clone());
    check_with(all, true);
}

/// Definitions that are drawn, well typed by construction.
#[test]
fn random_definitions_leave_as_they_are() {
    let checked = |seed: u64, text: String| {
        let ast = dreamc_dsl::parse("drawn", &text, Spelling::Dream).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{seed}: {e}")).0
    };
    let text = random::definition::specification;
    let drawn = |seed: u64| checked(seed, text(seed));
    // Dropout is PyTorch's own: a module that evaluates is that of the specification without it.
    let drops = |seed: u64| text(seed).contains("dropout");
    let without = |seed: u64| checked(seed, text(seed).replace(", dropout = 0.3", ""));
    let kept: Vec<u64> = (1..25).filter(|&seed| !drops(seed)).collect();
    let dropped: Vec<u64> = (1..400).filter(|&seed| drops(seed)).take(2).collect();
    check(kept.into_iter().map(|seed| (format!("definition{seed}"), drawn(seed))).collect());
    let Some(python) = dreamc_skip::transformers() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut names = vec![];
    for seed in dropped {
        let name = format!("dropped{seed}");
        write(folder.path(), &name, &without(seed), (seed, false)).unwrap();
        let spec = drawn(seed);
        let text = module(&spec.model, options(&spec)).unwrap().text;
        std::fs::write(folder.path().join(format!("{name}.py")), text).unwrap();
        names.push(name);
    }
    assert!(!names.is_empty());
    assert_eq!(compared(&python, folder.path(), &names), "");
}

/// Passes whose gradients are not taken leave values of theirs, each in the row after that of its
/// application: no gradient flows through those.
#[test]
fn values_of_detached_passes_have_no_gradient() {
    let text = "define recalled(size 6) {
  v = linear(x, [size])
  return linear(v + earlier(v), [hidden])
}
model m {
  vocab 19  hidden 8  context 8
  r = recalled {}
  mlp = mlp { intermediate 9 }
  recur 4 backprop 2 { r > mlp }
}";
    let ast = dreamc_dsl::parse("recalled", text, Spelling::Dream).unwrap();
    check(vec![("recalled".into(), dreamc_dsl::check(&ast, &[]).unwrap().0)]);
}

/// Views that change nothing share the name of what they view: it is not given again before the
/// last of them is read.
#[test]
fn names_stay_while_views_are_read() {
    let text = "define d(heads 2, size 4, value 4) {
  f = running(log_sigmoid(linear(x, [heads])))
  a = attend(linear(x, [heads, size]), linear(x, [heads, size]), linear(x, [heads, value]), score = s + f[i] - f[j])
  b = attend(linear(x, [heads, size]), linear(x, [heads, size]), linear(x, [heads, value]), scale = 0.5, score = s + f[i] - f[j])
  return linear(tanh(a), [hidden]) + linear(tanh(linear(b, [value])), [hidden])
}
model m { vocab 64  hidden 8  context 16  d = d {}  body { d } }";
    let ast = dreamc_dsl::parse("views", text, Spelling::Dream).unwrap();
    check(vec![("views".into(), dreamc_dsl::check(&ast, &[]).unwrap().0)]);
}

/// The text of a few modules, for people to read.
#[test]
fn modules_read_as_their_papers() {
    let all = [("depth_recurrent", load("examples/tiny-dr-da.yaml")), ("gated_delta", mixer("gated_delta"))];
    for (name, spec) in all.into_iter().chain([("forgetting", mixer("forgetting"))]) {
        insta::assert_snapshot!(name, module(&spec.model, options(&spec)).unwrap().text);
    }
}

/// Specifications over all axes of the language; those with an operation that has no form yet are
/// named.
#[test]
fn random_specifications_leave_as_they_are() {
    check((1..40).map(|seed| (format!("random{seed}"), random::spec(seed))).collect());
}

/// A term of a module that is left out is noticed.
#[test]
fn a_module_that_lacks_a_term_is_noticed() {
    let Some(python) = dreamc_skip::transformers() else { return };
    let place = tempfile::tempdir().unwrap();
    let spec = load("tests/goldens/dr_da.yaml");
    let text = module(&spec.model, options(&spec)).unwrap().text;
    let faults = [
        ("x + da + self.ea(", "da + self.ea("),
        (" + shared\n", "\n"),
        (".detach()[..., None]", "[..., None]"),
        ("da = da + self.sa(x, positions, depth, depths)", "da = da"),
    ];
    let mut names = vec![];
    for (k, (term, without)) in faults.iter().enumerate() {
        assert!(text.contains(term), "{term}\n{text}");
        std::fs::write(place.path().join(format!("fault{k}.py")), text.replace(term, without)).unwrap();
        std::fs::copy(
            root("tests/goldens/dr_da.safetensors"),
            place.path().join(format!("fault{k}.safetensors")),
        )
        .unwrap();
        names.push(format!("fault{k}"));
    }
    let found = compared(&python, place.path(), &names);
    for (name, (term, _)) in names.iter().zip(faults) {
        assert!(found.contains(&format!("{name}:")), "`{term}` is left out and nothing differs");
    }
}

/// Without weights, magnitudes of adapters begin as the norms of their matrices' rows.
#[test]
fn magnitudes_begin_as_norms_of_rows() {
    const SPEC: &str = "model m { vocab 17 hidden 16 context 8
  sa = sequence { heads 4 kv_heads 2 head_size 4 }
  ea = experts { count 3 active 2 intermediate 8 }
  adapt { components [sa, ea] rank 2 dora }
  layer { sa > ea } }";
    const CHECK: &str = "
import sys
sys.path.insert(0, sys.argv[1])
import adapted
tensors = dict(adapted.Model().named_parameters())
of = lambda end: next(t for name, t in tensors.items() if name.endswith(end))
qkv = of('qkv.weight').norm(dim=-1)
right = {'q': qkv[:16], 'k': qkv[16:24], 'v': qkv[24:], 'out': of('out.weight').norm(dim=-1)}
right |= {name: of(f'ea.{name}.weight').norm(dim=-1) for name in ('gate', 'up', 'down')}
for name, norms in right.items():
    for end in ('magnitude', 'norm'):
        found = of(f'.{name}.adapter_{end}')
        assert found.shape == norms.shape and (found - norms).abs().max() < 1e-6, name
";
    let Some(python) = dreamc_skip::transformers() else { return };
    let place = tempfile::tempdir().unwrap();
    let ast = dreamc_dsl::parse("spec", SPEC, dreamc_dsl::Spelling::Dream).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}"));
    let text = module(&spec.model, options(&spec)).unwrap().text;
    std::fs::write(place.path().join("adapted.py"), text).unwrap();
    let output = Command::new(python).args(["-c", CHECK]).arg(place.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
