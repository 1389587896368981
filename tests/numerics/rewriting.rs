//! Rewritten programs compute what unrewritten ones do: losses, gradients and cached logits of
//! whole models on the CPU.

use crate::support::cpu;
use dreamc_compiler::program::{Buffer, Space};
use dreamc_compiler::rewrite::{Report, Rewriting, Rules, Target};
use dreamc_compiler::{Compiled, Options, compile, compile_with_report};
use dreamc_data::Batch;
use dreamc_dsl::Spec;
use dreamc_runtime::generate::{Cached, NextLogits, Writing, compile_cached};
use dreamc_runtime::model::{Model, Scale};

/// A model of those components and body.
fn model(components: &str, body: &str) -> Spec {
    let text = format!(
        "model:\n  name: small\n  vocab: 64\n  hidden: 32\n  context: 32\n  components:\n{components}  body:\n    - {body}\n\
         train: {{steps: 1, batch: 2, sequence: 16, learning_rate: 1e-3, warmup: 1, precision: f32}}\n"
    );
    let ast = dreamc_dsl::parse("small.yaml", &text, dreamc_dsl::Spelling::Yaml)
        .unwrap_or_else(|e| panic!("{e:?}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e:?}\n{text}")).0
}

const SA: &str = "    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 16}}\n";
const DA: &str = "    da: {depth: {heads: 1, head_size: 16}}\n";

/// A model, and a rule that it is there for.
fn models() -> Vec<(Spec, &'static str)> {
    let experts = |count: u64, active: u64| {
        format!("{SA}    ea: {{experts: {{count: {count}, active: {active}, intermediate: 16, query: 8}}}}\n")
    };
    let recurrent = "{recur: 3, layers: [\"(da | sa) > ea\"]}";
    vec![
        (model(&experts(4, 4), "{recur: 3, layers: [\"sa > ea\"]}"), "all-experts"),
        (model(&experts(4, 4), "{repeat: 2, layers: [\"sa > ea\"]}"), "all-experts"),
        (model(&experts(1, 1), "{repeat: 2, layers: [\"sa > ea\"]}"), "one-expert"),
        (model(&(experts(4, 2) + DA), recurrent), "merge-shared"),
    ]
}

fn batch() -> Batch {
    let mut batch = Batch::new(16);
    for row in 0..2 {
        batch.ids.extend((0..16).map(|i| (i * 7 + row * 11 + i * i) % 64));
        batch.targets.extend((1..17).map(|i| (i * 7 + row * 11 + i * i) % 64));
        batch.positions.extend(0..16);
        batch.segments.extend([0; 16]);
    }
    batch
}

fn options(rewrite: Rewriting) -> Options {
    Options { batch: 2, sequence: 16, train: true, logits: true, rewrite, ..Options::default() }
}

/// Losses, logits and every gradient.
fn outcome(spec: &Spec, rewrite: Rewriting) -> Vec<(String, Vec<f32>)> {
    let device = cpu(1);
    let mut model = Model::load(&device, compile(spec, &options(rewrite)).unwrap()).unwrap();
    model.initialise(3).unwrap();
    let batch = batch();
    let mut found = vec![("nll".into(), model.evaluate(&batch).unwrap())];
    found.push(("logits".into(), model.all_logits().unwrap()));
    model.begin_step().unwrap();
    model.backward(&batch, Scale { loss: 1.0 / 32.0, auxiliary: 1.0 }, None).unwrap();
    found.push(("loss".into(), vec![model.loss().unwrap()]));
    for tensor in model.compiled().tensors.clone() {
        if let Some(gradient) = model.gradient(&tensor).unwrap() {
            found.push((tensor.name, gradient));
        }
    }
    found
}

/// Logits of a prompt and of some tokens after it.
fn written(spec: &Spec, rewrite: &Rewriting, seed: u64) -> Vec<(String, Vec<f32>)> {
    let device = cpu(1);
    let compiled = compile_cached(spec, &Writing { rewrite: rewrite.clone(), ..Writing::default() }).unwrap();
    let mut cached = Cached::load(&device, compiled).unwrap();
    let mut found = vec![];
    // Other weights in the same memory: what is prepared must follow them.
    for seed in [seed + 1, seed] {
        cached.model().initialise(seed).unwrap();
        found.push(("prompt".to_string(), cached.start(&[vec![1, 2, 3, 5, 8]]).unwrap().remove(0)));
        for token in [13, 21, 34] {
            found.push((format!("after {token}"), cached.advance(&[token]).unwrap().remove(0)));
        }
    }
    found
}

fn compare(name: &str, a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)]) {
    assert_eq!(a.len(), b.len());
    for ((n, x), (m, y)) in a.iter().zip(b) {
        assert_eq!((n, x.len()), (m, y.len()));
        let scale = x.iter().fold(1e-3f32, |s, v| s.max(v.abs()));
        let worst = x.iter().zip(y).fold(0.0f32, |w, (x, y)| w.max((x - y).abs() / scale));
        assert!(worst < 2e-5, "{name}: {n} differs by {worst}");
    }
}

#[test]
fn rewritten_programs_compute_the_same() {
    for (spec, rule) in models() {
        let report = compile_with_report(&spec, &options(Rewriting::default())).unwrap().1;
        let found = |r: &Report| r.functions.iter().flat_map(|f| &f.firings).any(|f| f.rule == rule);
        assert!(found(&report), "{rule} finds nothing");
        println!("{rule}: {:?}", report.used());
        let off = outcome(&spec, Rewriting::off());
        compare(rule, &off, &outcome(&spec, Rewriting::default()));
        compare(rule, &off, &outcome(&spec, Rewriting::only(&[rule])));
    }
}

/// Gradients of gates without outputs of experts pay where these are large: not on the CPU, and not
/// in the small models above. No choice of a token is of the no-op alone, and some are.
#[test]
fn gradients_of_gates_need_no_outputs_of_experts() {
    let experts =
        format!("{SA}    ea: {{experts: {{count: 8, noop: 1, active: 8, intermediate: 16, query: 8}}}}\n");
    let mut spec = model(&experts, "{repeat: 2, layers: [\"sa > ea\"]}");
    (spec.model.hidden, spec.model.context, spec.train.sequence) = (256, 512, Some(512));
    let target = Target::named("h200").unwrap();
    let (rules, proofs) = (Rules::Only(vec!["gate-gradient".into()]), false);
    let rewrite = Rewriting { rules, target, proofs };
    let options = |rewrite| Options { batch: 8, sequence: 512, train: true, rewrite, ..Options::default() };
    let mut batch = Batch::new(512);
    for i in 0..8 * 512i32 {
        batch.ids.push((i * 7 + i * i % 11) % 64);
        batch.targets.push((i * 5 + 3) % 64);
        batch.positions.push(i % 512);
        batch.segments.push(0);
    }
    let saved = |compiled: &Compiled| -> u64 {
        compiled.plan.buffers.iter().filter(|b| b.space == Space::Saved).map(Buffer::bytes).sum()
    };
    let outcome = |rewrite: Rewriting| {
        let device = cpu(2);
        let compiled = compile(&spec, &options(rewrite)).unwrap();
        let bytes = saved(&compiled);
        let mut model = Model::load(&device, compiled).unwrap();
        model.initialise(3).unwrap();
        model.begin_step().unwrap();
        model.backward(&batch, Scale { loss: 1.0 / 4096.0, auxiliary: 1.0 }, None).unwrap();
        let mut found = vec![("loss".to_string(), vec![model.loss().unwrap()])];
        for tensor in model.compiled().tensors.clone() {
            found.extend(model.gradient(&tensor).unwrap().map(|gradient| (tensor.name, gradient)));
        }
        (bytes, found)
    };
    let report = compile_with_report(&spec, &options(rewrite.clone())).unwrap().1;
    let fired = report.functions.iter().flat_map(|f| &f.firings).filter(|f| f.rule == "gate-gradient");
    assert!(fired.filter(|f| f.used).count() > 0, "it does not pay");
    let ((kept, off), (less, on)) = (outcome(Rewriting::off()), outcome(rewrite));
    compare("gate-gradient", &off, &on);
    // The outputs of all slots, in each of two layers.
    assert_eq!(kept - less, 2 * 8 * 512 * 8 * 256 * 4);
}

#[test]
fn decoding_with_prepared_weights_computes_the_same_and_follows_new_weights() {
    for (spec, rule) in models() {
        let off = written(&spec, &Rewriting::off(), 5);
        compare(rule, &off, &written(&spec, &Rewriting::default(), 5));
    }
}
