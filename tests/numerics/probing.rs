//! Values inside models: those that transformers' hooks find, those that a formula gives, and what
//! follows where one is replaced.

use crate::export::python;
use crate::import::{dreamc, good};
use crate::support::cpu;
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::{Binary, Binding, Function, Module, Op, Port, Value};
use dreamc_compiler::op::Constant;
use dreamc_compiler::probe::{Probe, points};
use dreamc_compiler::program::{Affine, BufferId, Operand, Plan, ProgramKey, Step};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{CompileError, Compiled, Options, Pass, compile, compile_watched};
use dreamc_data::Batch;
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::analysis::probe::{
    LENS, Part, ProbeError, Probing, heads, lens, without_experts, without_heads,
};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Loops, mixtures, both attentions, a definition with an attention of its own.
const MODEL: &str = "\
define soft(heads 2, size 4) {
  q = linear(x, [heads, size])
  k = linear(x, [heads, size])
  v = linear(x, [heads, size])
  seen = attend(q, k, v)
  return linear(seen, [hidden])
}

model inside {
  vocab 64  hidden 16  context 16
  sa = sequence { heads 4  kv_heads 2  head_size 4  window 5 }
  da = depth { heads 2  head_size 4 }
  ea = experts { count 6  active 2  intermediate 8  query 8 }
  so = soft {}
  layer { so > ea }
  recur 3 { (da | sa) > ea }
}
";

const ROWS: usize = 2;
const TOKENS: usize = 9;

fn spec(text: &str) -> Spec {
    let ast = dreamc_dsl::parse("inside.dream", text, Spelling::Dream).unwrap();
    dreamc_dsl::check(&ast, &[]).unwrap().0
}

fn batch(seed: i32) -> Batch {
    let mut batch = Batch::new(TOKENS);
    for i in 0..(ROWS * TOKENS) as i32 {
        batch.ids.push((i * 7 + i * i * seed) % 64);
        batch.targets.push((i * 11 + seed) % 64);
        batch.positions.push(i % TOKENS as i32);
        batch.segments.push(0);
    }
    batch
}

fn options(captured: &[&str], patched: &[&str]) -> Options {
    let names = |all: &[&str]| all.iter().map(|name| name.to_string()).collect();
    let probe = Probe { captured: names(captured), patched: names(patched) };
    Options { logits: true, probe, ..prepare::forward(ROWS as u64, TOKENS as u64) }
}

/// A model that is looked into, with weights of seed 5 whose norms are not all one.
fn probing(spec: &Spec, captured: &[&str], patched: &[&str]) -> Probing {
    let compiled = compile(spec, &options(captured, patched)).unwrap();
    let mut model = Model::load(&cpu(2), compiled).unwrap();
    model.initialise(5).unwrap();
    Probing::new(model).unwrap()
}

fn shape(probing: &Probing, name: &str) -> Vec<u64> {
    probing.points().iter().find(|probed| probed.point.name == name).unwrap().point.shape.clone()
}

/// The largest difference, as a share of the largest number expected.
fn apart(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1e-6f32, |most, x| most.max(x.abs()));
    found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

#[test]
fn names_are_of_every_application_and_of_every_part() {
    let spec = spec(MODEL);
    let all = points(&spec.model, &options(&[], &[])).unwrap();
    let names: Vec<&str> = all.iter().map(|point| point.name.as_str()).collect();
    for name in [
        "embed.out",
        "layers.0.in",
        "layers.0.so.in",
        "layers.0.so.q",
        "layers.0.so.seen",
        "layers.0.so.scores",
        "layers.0.so.heads",
        "layers.0.ea.chosen",
        "layers.0.ea.gates",
        "layers.1@0.in",
        "layers.1@2.da.scores",
        "layers.1@2.sa.scores",
        "layers.1@2.sa.v",
        "layers.1@1.ea.out",
        "layers.1@2.out",
        "head.stream",
        "head.norm",
        "head.logits",
    ] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    assert!(!names.contains(&"layers.1@3.in"), "{names:?}");
    let scores = all.iter().find(|point| point.name == "layers.1@0.sa.scores").unwrap();
    assert_eq!(scores.shape, [ROWS as u64, TOKENS as u64, 4, TOKENS as u64]);
    assert_eq!(scores.dims, ["batch", "seq", "heads", "keys"]);
    let mut distinct = names.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), names.len(), "{names:?}");
}

/// Looking changes no bit, whatever is looked at; and so does a patch that gives nothing.
#[test]
fn looking_changes_no_bit() {
    let spec = spec(MODEL);
    let batch = batch(3);
    let mut plain = Model::load(&cpu(2), compile(&spec, &options(&[], &[])).unwrap()).unwrap();
    plain.initialise(5).unwrap();
    plain.evaluate(&batch).unwrap();
    let expected = plain.all_logits().unwrap();
    for (captured, patched) in
        [(&["*"][..], &[][..]), (&["*.scores", "*.q"], &[]), (&[], &["*.out", "*.heads"])]
    {
        let mut probing = probing(&spec, captured, patched);
        probing.model().evaluate(&batch).unwrap();
        assert!(apart(&probing.model().all_logits().unwrap(), &expected) < 1e-6, "{captured:?} {patched:?}");
    }
}

/// Probabilities are those that mix the values into what the heads say; of a window, of depth, of a
/// definition.
#[test]
fn scores_mix_values_into_heads() {
    let spec = spec(MODEL);
    let mut probing = probing(&spec, &["*.scores", "*.v", "*.heads"], &[]);
    probing.model().evaluate(&batch(3)).unwrap();
    for component in ["layers.0.so", "layers.1@0.sa", "layers.1@2.sa"] {
        let value = |name: &str| probing.value(&format!("{component}.{name}")).unwrap();
        let (scores, values, heads) = (value("scores"), value("v"), value("heads"));
        let (many, size) = (shape(&probing, &format!("{component}.scores"))[2] as usize, 4);
        let groups = values.len() / (ROWS * TOKENS * size);
        let mut expected = vec![0f32; heads.len()];
        for row in 0..ROWS * TOKENS {
            let (b, i) = (row / TOKENS, row % TOKENS);
            for h in 0..many {
                let of = &scores[(row * many + h) * TOKENS..][..TOKENS];
                assert!((of.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{component}: {of:?}");
                assert!(of[i + 1..].iter().all(|p| *p == 0.0), "{component} looks ahead: {of:?}");
                if component.ends_with("sa") && i >= 5 {
                    assert!(of[..i - 4].iter().all(|p| *p == 0.0), "{component} leaves its window: {of:?}");
                }
                for (j, p) in of.iter().enumerate() {
                    let group = h / (many / groups);
                    let v = &values[((b * TOKENS + j) * groups + group) * size..][..size];
                    let out = &mut expected[(row * many + h) * size..][..size];
                    out.iter_mut().zip(v).for_each(|(out, v)| *out += p * v);
                }
            }
        }
        assert!(apart(&heads, &expected) < 1e-5, "{component}");
    }
    // Over depth: pass 2 sees itself and two passes before.
    let scores = probing.value("layers.1@1.da.scores").unwrap();
    for of in scores.chunks(3) {
        assert!((of[0] + of[1] - 1.0).abs() < 1e-5 && of[2] == 0.0, "{of:?}");
    }
}

/// A value of a pass can be replaced in that pass alone, and what follows from it follows; of a
/// text's own value nothing does.
#[test]
fn a_patch_is_of_its_pass_and_token() {
    let spec = spec(MODEL);
    let names = ["layers.1@1.out", "layers.1@0.out", "layers.1@2.out", "layers.0.so.v"];
    let mut probing = probing(&spec, &["layers.*.out", "*.v"], &names);
    probing.model().evaluate(&batch(3)).unwrap();
    let (a, of_a) = (probing.model().all_logits().unwrap(), names.map(|name| probing.value(name).unwrap()));
    probing.model().evaluate(&batch(5)).unwrap();
    let b = probing.model().all_logits().unwrap();
    let streams = ["layers.0.out", "layers.1@0.out"].map(|name| probing.value(name).unwrap());
    for (name, value) in names.iter().zip(&of_a) {
        let shape = shape(&probing, name);
        probing.change(name, (&shape, value), |_| true).unwrap();
        probing.model().evaluate(&batch(5)).unwrap();
        assert!(apart(&probing.model().all_logits().unwrap(), &b) > 1e-3, "{name} changes nothing");
        assert_eq!(probing.value(name).unwrap(), *value, "{name} is not what was given");
        if *name == "layers.1@1.out" {
            // Streams before it are as they were.
            let before = ["layers.0.out", "layers.1@0.out"].map(|name| probing.value(name).unwrap());
            assert_eq!(before, streams);
        }
        // The text's own value changes nothing.
        probing.model().evaluate(&batch(3)).unwrap();
        assert!(apart(&probing.model().all_logits().unwrap(), &a) < 1e-6, "{name}");
        probing.clear().unwrap();
    }
    // The last stream decides alone; of one token, the logits of that token.
    let last = shape(&probing, names[2]);
    let width = last[2] as usize;
    probing.change(names[2], (&last, &of_a[2]), |i| i / width % TOKENS == 4).unwrap();
    probing.model().evaluate(&batch(5)).unwrap();
    let found = probing.model().all_logits().unwrap();
    for (row, (found, (a, b))) in found.chunks(64).zip(a.chunks(64).zip(b.chunks(64))).enumerate() {
        let expected = if row % TOKENS == 4 { a } else { b };
        assert!(apart(found, expected) < 1e-6, "token {row}");
    }
}

#[test]
fn wrong_names_and_shapes_are_refused_and_change_nothing() {
    let spec = spec(MODEL);
    let refused =
        |captured: &[&str], patched: &[&str]| compile(&spec, &options(captured, patched)).unwrap_err();
    let error = refused(&["layers.1@0.sa.score"], &[]);
    assert!(matches!(error, CompileError::Point { .. }), "{error}");
    assert!(error.to_string().contains("`layers.1@0.sa.scores`"), "{error}");
    let error = refused(&[], &["layers.0.ea.chosen"]);
    assert!(matches!(error, CompileError::Fixed { .. }) && error.to_string().contains("`gates`"), "{error}");
    let error = refused(&[], &["layers.1@1.sa.scores"]);
    assert!(matches!(error, CompileError::Fixed { .. }) && error.to_string().contains("`heads`"), "{error}");
    let train = Options { train: true, ..options(&["*"], &[]) };
    assert_eq!(compile(&spec, &train).unwrap_err(), CompileError::Exclude("probe", "train"));

    let mut probing = probing(&spec, &[], &["layers.0.out"]);
    probing.model().evaluate(&batch(3)).unwrap();
    let before = probing.model().all_logits().unwrap();
    let error = probing.change("layers.0.out", (&[1, 2, 16], &[1.0; 32]), |_| true).unwrap_err();
    assert!(matches!(error, ProbeError::Shape { .. }), "{error}");
    let error = probing.change("layers.0.ou", (&[1], &[1.0]), |_| true).unwrap_err();
    assert!(error.to_string().contains("`layers.0.out`"), "{error}");
    probing.model().evaluate(&batch(3)).unwrap();
    assert_eq!(probing.model().all_logits().unwrap(), before);
}

/// The lens of the last stream is the model; heads and experts are taken out by name.
#[test]
fn the_lens_ends_at_the_model_and_parts_are_taken_out() {
    let spec = spec(MODEL);
    let batch = batch(3);
    let mut seen = probing(&spec, &LENS[..1], &LENS[1..]);
    let looks = lens(&mut seen, &batch).unwrap();
    let names: Vec<&str> = looks.iter().map(|look| look.name.as_str()).collect();
    assert_eq!(names, ["layers.0.out", "layers.1@0.out", "layers.1@1.out", "layers.1@2.out"]);
    let whole = seen.loss(&batch).unwrap();
    assert!((looks[3].loss - whole).abs() < 1e-6 && looks[3].agrees == 1.0, "{looks:?}");
    assert!((looks[0].loss - whole).abs() > 1e-4);

    let patterns = Part::Heads.patterns();
    let changed: Vec<&str> = patterns[1].iter().take(1).map(String::as_str).collect();
    let mut seen = probing(&spec, &[], &changed);
    assert_eq!(heads(&seen).len(), 1 + 3 * 2);
    let mut measure = |model: &mut Model| -> Result<f64, ProbeError> {
        let losses = model.evaluate(&batch).map_err(ProbeError::from)?;
        Ok(losses.iter().map(|x| f64::from(*x)).sum::<f64>() / losses.len() as f64)
    };
    let found = without_heads(&mut seen, &mut measure).unwrap();
    assert_eq!(found.len(), 2 + 3 * (2 + 4));
    assert!(found.iter().all(|without| (without.measure - whole).abs() > 1e-7), "{found:?}");
    // A head without its rows of the output projection is a head whose output is zero.
    let name = "layers.0.so.linear4.weight";
    let model = seen.model();
    let tensors: Vec<String> = model.entries().into_iter().map(|(name, _)| name).collect();
    let out = tensors.iter().filter(|name| name.starts_with("layers.0.so.")).find(|name| {
        let entry = model.entries().into_iter().find(|(n, _)| n == *name);
        entry.is_some_and(|(_, shape)| shape == [16, 2, 4] || shape == [16, 8])
    });
    let out = out.unwrap_or_else(|| panic!("no {name} among {tensors:?}")).clone();
    let mut weights = model.get(&out).unwrap();
    weights.iter_mut().enumerate().filter(|(i, _)| i % 8 < 4).for_each(|(_, w)| *w = 0.0);
    model.set(&out, &weights).unwrap();
    let without = measure(seen.model()).unwrap();
    assert!((without - found[0].measure).abs() < 1e-5, "{without} {:?}", found[0]);

    let [looked, changed] = Part::Experts.patterns();
    let of = |all: &[String]| all.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let (looked, changed) = (of(&looked), of(&changed));
    let names = |all: &'_ [String]| all.iter().map(|name| name.clone().leak() as &str).collect::<Vec<_>>();
    let mut seen = probing(&spec, &names(&looked), &names(&changed));
    let found = without_experts(&mut seen, &batch).unwrap();
    let expert = found.iter().find(|without| without.name == "layers.0.ea").unwrap().clone();
    // An expert without its last matrix gives nothing.
    let down = "layers.0.ea.down.weight";
    let model = seen.model();
    let mut weights = model.get(down).unwrap();
    let each = weights.len() / 6;
    weights[expert.number as usize * each..][..each].fill(0.0);
    model.set(down, &weights).unwrap();
    let without = seen.loss(&batch).unwrap();
    assert!((without - expert.measure).abs() < 1e-5, "{without} {expert:?}");
}

/// The properties of a program that is looked into: the logits are those of `plain`, streams are
/// those that layers hand on, probabilities mix values into heads, and a patch is of its place.
fn sound(compiled: Compiled, plain: &[f32]) -> Result<(), String> {
    let mut model = Model::load(&cpu(2), compiled).unwrap();
    model.initialise(5).unwrap();
    let mut probing = Probing::new(model).unwrap();
    probing.model().evaluate(&batch(3)).unwrap();
    let logits = probing.model().all_logits().unwrap();
    let same = |found: &[f32], expected: &[f32], what: &str| match apart(found, expected) < 1e-5 {
        true => Ok(()),
        false => Err(what.to_string()),
    };
    same(&logits, plain, "logits")?;
    let names = ["layers.0.out", "layers.1@0.out", "layers.1@1.out", "layers.1@2.out"];
    let streams = |probing: &mut Probing, at: usize| {
        let model = probing.model();
        let buffer = model.compiled().stream(Entry::Whole).unwrap();
        let mut values = vec![0f32; ROWS * TOKENS * 16];
        model.session().read_at(buffer, at as u64 + 1, 0, &mut values).unwrap();
        values
    };
    for (at, name) in names.iter().enumerate() {
        let handed = streams(&mut probing, at);
        same(&probing.value(name).unwrap(), &handed, "a stream")?;
    }
    let value = |name: &str| probing.value(&format!("layers.1@1.sa.{name}")).unwrap();
    let (scores, values, heads) = (value("scores"), value("v"), value("heads"));
    let mut expected = vec![0f32; heads.len()];
    for (i, p) in scores.iter().enumerate() {
        let (row, h, j) = (i / TOKENS / 4, i / TOKENS % 4, i % TOKENS);
        let v = &values[((row / TOKENS * TOKENS + j) * 2 + h / 2) * 4..][..4];
        expected[(row * 4 + h) * 4..][..4].iter_mut().zip(v).for_each(|(out, v)| *out += p * v);
    }
    same(&heads, &expected, "probabilities")?;
    let own = probing.value(names[2]).unwrap();
    probing.model().evaluate(&batch(5)).unwrap();
    let before = probing.value(names[1]).unwrap();
    probing.change(names[2], (&[ROWS as u64, TOKENS as u64, 16], &own), |_| true).unwrap();
    probing.model().evaluate(&batch(5)).unwrap();
    same(&probing.value(names[1]).unwrap(), &before, "a stream before the patch")?;
    let (given, handed) = (probing.value(names[2]).unwrap(), streams(&mut probing, 2));
    same(&given, &own, "a patched stream")?;
    same(&handed, &own, "the stream behind a patch")
}

type Edit = fn(&mut Function) -> bool;

/// The last node of an operation with a mask of the host as operand.
fn masked(f: &Function, op: Binary) -> Option<usize> {
    let is_mask = |v: &Value| f.params.get(v.index()).is_some_and(|port| port.name.starts_with("given."));
    f.nodes.iter().rposition(|node| node.op == Op::Binary(op) && node.inputs.iter().any(is_mask))
}

/// Faults of looking and changing, one at a time: each is noticed.
#[test]
fn seeded_faults_are_noticed() {
    let spec = spec(MODEL);
    let mut options = options(&["layers.*.out", "*.scores", "*.v", "*.heads"], &["layers.*.out"]);
    options.rewrite = Rewriting::off();
    let bare = Options { probe: Probe::default(), ..options.clone() };
    let mut plain = Model::load(&cpu(2), compile(&spec, &bare).unwrap()).unwrap();
    plain.initialise(5).unwrap();
    plain.evaluate(&batch(3)).unwrap();
    let plain = plain.all_logits().unwrap();
    assert_eq!(sound(compile(&spec, &options).unwrap(), &plain), Ok(()));

    let faults: [(&str, Pass, Edit); 4] = [
        ("a captured stream is the one before", Pass::Rewrite, |f| {
            let Some(x) = f.params.iter().position(|port| port.binding == Binding::Stream) else {
                return false;
            };
            let x = Value(x as u32);
            let ty = f.ty(x).clone();
            let stream = |(port, v): &&mut (Port, Value)| {
                port.binding == Binding::Observed && f.types[v.index()] == ty
            };
            f.results.iter_mut().rfind(stream).map(|(_, v)| *v = x).is_some()
        }),
        ("the model's own value is not taken out", Pass::Rewrite, |f| {
            let Some(sub) = masked(f, Binary::Sub) else { return false };
            let (kept, one) = (f.nodes[sub].first, f.nodes[sub].inputs[0]);
            let at = f
                .nodes
                .iter()
                .position(|node| node.op == Op::Binary(Binary::Where) && node.inputs[1] == kept);
            at.map(|at| f.nodes[at].inputs[1] = one).is_some()
        }),
        ("the host's value is taken whether it gives it or not", Pass::Rewrite, |f| {
            let Some(at) = masked(f, Binary::Where) else { return false };
            f.nodes[at].op = Op::Binary(Binary::Add);
            true
        }),
        ("unit vectors begin at another key", Pass::Lower, |f| {
            let first = f.nodes.iter_mut().find(|node| node.op == Op::Constant(Constant(4.0)));
            first.map(|node| node.op = Op::Constant(Constant(3.0))).is_some()
        }),
    ];
    for (name, stage, edit) in faults {
        let seeded = AtomicBool::new(false);
        let watch = |pass: Pass, _: &mut Module, f: &mut Function| {
            if pass == stage && f.name == "layer1" && edit(f) {
                seeded.store(true, Relaxed);
            }
        };
        let compiled = compile_watched(&spec, &options, &watch).unwrap().0;
        assert!(seeded.load(Relaxed), "{name} is nowhere");
        assert!(sound(compiled, &plain).is_err(), "{name} is not noticed");
    }
    // Every pass leaves its values in, and takes them from, the place of the first.
    for word in ["probe.", "patch.", "given."] {
        let mut compiled = compile(&spec, &options).unwrap();
        let Plan { buffers, programs, .. } = &mut compiled.plan;
        let is = |id: BufferId| buffers[id.0 as usize].name.starts_with(word);
        let program = programs.get_mut(&ProgramKey::EVALUATE).unwrap();
        assert!(first_instances(&mut program.steps, &is) > 0, "{word}");
        assert!(sound(compiled, &plain).is_err(), "`{word}` of the first pass is not noticed");
    }
}

/// Makes operands in such buffers those of the first instance; says how many moved with a loop.
fn first_instances(steps: &mut [Step], is: &dyn Fn(BufferId) -> bool) -> usize {
    let of = |step: &mut Step| match step {
        Step::Loop { steps, .. } => first_instances(steps, is),
        Step::Launch(launch) => {
            let mut moved = 0;
            for operand in &mut launch.operands {
                if let Operand::Tensor { buffer, instance, .. } = operand
                    && is(*buffer)
                    && !instance.terms.is_empty()
                {
                    *instance = Affine::constant(instance.base);
                    moved += 1;
                }
            }
            moved
        }
    };
    steps.iter_mut().map(of).sum()
}

/// The values that hooks in transformers find inside a model, and what follows where they replace a
/// value.
#[test]
fn hooks_of_transformers_find_the_same() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path();
    if python("hooks.py", &["make", at.to_str().unwrap()]).is_none() {
        return;
    }
    let get = |file: &Path, name: &str| {
        let tensors = Tensors::open(file).unwrap();
        let (shape, values) = tensors.get(name).unwrap().unwrap_or_else(|| panic!("no {name}"));
        (shape.to_vec(), values)
    };
    for (model, components) in [("llama", ["sa", "sa", "sa"]), ("qwen3", ["global", "local", "local"])] {
        good(at, &["import", "hf", model]);
        let imported = format!("imports/{model}");
        let line =
            ["probe", &imported, "--ids", "a.json", "-o", "a.safetensors", "--capture", "layers.*.out"];
        good(at, &[&line[..], &["--capture", "*.scores"]].concat());
        let (ours, theirs) = (at.join("a.safetensors"), at.join(format!("{model}.safetensors")));
        let same = |ours: (Vec<u64>, Vec<f32>), name: &str, of: &str| {
            let (shape, values) = get(&theirs, name);
            assert_eq!(ours.0, shape, "{model}: {of}");
            let apart = apart(&ours.1, &values);
            assert!(apart < 2e-5, "{model}: {of} is {apart} from {name}");
        };
        same(get(&ours, "logits"), "logits", "logits");
        for (i, component) in components.iter().enumerate() {
            for (name, of) in [
                (format!("stream.{i}"), format!("layers.{i}.out")),
                (format!("mlp.{i}"), format!("layers.{i}.mlp.out")),
                (format!("scores.{i}"), format!("layers.{i}.{component}.scores")),
            ] {
                same(get(&ours, &of), &name, &of);
            }
        }
        for (patch, tokens, name) in
            [("layers.1.mlp.out", Some("3..5"), "patched"), ("layers.0.out", None, "streamed")]
        {
            let given = format!("{patch}=a.safetensors");
            let mut line =
                vec!["probe", &imported, "--ids", "b.json", "-o", "b.safetensors", "--patch", &given];
            line.extend(tokens.iter().flat_map(|tokens| ["--tokens", tokens]));
            let said = good(at, &line);
            assert!(said.contains("of the way") && said.contains(patch), "{said}");
            same(get(&at.join("b.safetensors"), "logits"), name, patch);
        }
        // A file that is not there, a name that is not in it, another text's length.
        std::fs::write(at.join("short.json"), "[[1, 2, 3]]").unwrap();
        for (ids, patch, problem) in [
            ("b.json", "layers.1.mlp.act=a.safetensors", "lacks `layers.1.mlp.act`"),
            ("b.json", "layers.9.out=a.safetensors", "nearest are `layers.0.out`"),
            ("short.json", "layers.1.out=a.safetensors", "is [2, 9, 24] there and [1, 2, 24]"),
            ("b.json", "layers.1.out=none.safetensors", "none.safetensors"),
        ] {
            let line = ["probe", &imported, "--ids", ids, "-o", "no.safetensors", "--patch", patch];
            let refused = dreamc(at, &line);
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && said.contains(problem), "{said}");
            assert!(!at.join("no.safetensors").exists(), "{patch} left a file");
        }
    }
}
