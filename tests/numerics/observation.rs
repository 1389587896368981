//! Observation leaves a model as it is, and what it sees is what the model does.

use crate::support::cpu;
use dreamc_compiler::{Options, compile, compile_together};
use dreamc_data::{Dataset, Settings};
use dreamc_device::Device;
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::analysis::observe;
use dreamc_runtime::analysis::skips::{ablate, decisions, held_out};
use dreamc_runtime::model::Model;
use dreamc_runtime::train::prepare;
use std::path::Path;

const MODEL: &str = "\
model:
  name: seen
  vocab: 256
  hidden: 16
  context: 32
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    da: {depth: {heads: 2, kv_heads: 1, head_size: 8}}
    ea: {experts: {count: 6, active: 2, intermediate: 16, query: 8}}
  body:
    - layer: sa > ea
    - recur: 3
      layers: [\"(da | sa) > ea\"]
data: {task: permutation, size: 4, max_steps: 3}
train: {sequence: 32, precision: f32}
";

fn spec(text: &str) -> Spec {
    let ast = dreamc_dsl::parse("seen.yaml", text, Spelling::Yaml).unwrap();
    dreamc_dsl::check(&ast, &[]).unwrap().0
}

fn dataset(spec: &Spec, cache: &Path) -> Dataset {
    let settings = Settings { base: Path::new(""), cache, sequence: 32, vocab: 256, seed: 0, stride: None };
    Dataset::open(spec.data.as_ref().unwrap(), &settings, &mut |_| {}).unwrap()
}

/// An observed model, and another use of its weights that is not observed.
fn with_plain(device: &dyn Device, spec: &Spec, observed: Options) -> (Model, Model) {
    let uses = [("", observed), ("plain", prepare::forward(4, 32))];
    let mut all = compile_together(spec, &uses).unwrap().0.into_iter();
    let model = Model::load(device, all.next().unwrap()).unwrap();
    let plain = model.beside(all.next().unwrap()).unwrap();
    (model, plain)
}

const EXITS: &str = "\
model:
  name: left
  vocab: 256
  hidden: 16
  context: 32
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8, projection: none}}
    mlp: {mlp: {intermediate: 16}}
  body:
    - layer: sa > mlp
    - {recur: 3, residual_norm: false, exit: {gate: 0.1}, layers: [\"sa > mlp\"]}
    - norm
data: {task: permutation, size: 4, max_steps: 3}
train: {sequence: 32, precision: f32}
";

#[test]
fn passes_are_worth_what_the_model_is_at_their_depth() {
    let folder = tempfile::tempdir().unwrap();
    let gated = spec(EXITS);
    let mean = spec(&EXITS.replace("{gate: 0.1}", "mean"));
    for spec in [gated, mean] {
        let dataset = dataset(&spec, folder.path());
        let device = cpu(2);
        let options = Options { observe: true, ..prepare::forward(4, 32) };
        let (mut model, mut plain) = with_plain(&device, &spec, options);
        model.initialise(3).unwrap();
        let batch = dataset.validation().unwrap().unwrap().take(4).unwrap().unwrap();
        assert_eq!(model.evaluate(&batch).unwrap(), plain.evaluate(&batch).unwrap());
        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 4).unwrap();
        assert_eq!(seen.passes.len(), 3);
        for (i, pass) in seen.passes.iter().enumerate() {
            let options = Options { depth: Some(i as u64 + 1), ..prepare::forward(4, 32) };
            let mut shallow = Model::load(&device, compile(&spec, &options).unwrap()).unwrap();
            for (name, _) in shallow.entries() {
                shallow.set(&name, &model.get(&name).unwrap()).unwrap();
            }
            let nll = shallow.evaluate(&batch).unwrap();
            let learned = nll.iter().zip(&batch.targets).filter(|(_, target)| **target >= 0);
            let losses: Vec<f64> = learned.map(|(nll, _)| f64::from(*nll)).collect();
            let loss = losses.iter().sum::<f64>() / losses.len() as f64;
            assert_eq!(pass.targets, losses.len() as u64);
            assert!((pass.loss - loss).abs() < 1e-5, "pass {i}: {} is not {loss}", pass.loss);
        }
        let shares: Vec<f64> = seen.passes.iter().filter_map(|pass| pass.share).collect();
        let all: f64 = shares.iter().sum();
        match shares[..] {
            [] => assert!(spec.model.body.iter().all(|item| !format!("{item:?}").contains("Gate"))),
            _ => assert!((all - 1.0).abs() < 1e-6 && shares.iter().all(|q| *q > 0.0), "{shares:?}"),
        }
    }
}

#[test]
fn observation_changes_no_bit_and_sees_every_choice() {
    let folder = tempfile::tempdir().unwrap();
    for text in [MODEL.to_string(), MODEL.replace("query: 8", "query: 8, router: {score: softmax}")] {
        let spec = spec(&text);
        let dataset = dataset(&spec, folder.path());
        let device = cpu(2);
        let options = Options { observe: true, ..prepare::forward(4, 32) };
        let (mut model, mut plain) = with_plain(&device, &spec, options);
        model.initialise(3).unwrap();
        let batch = dataset.validation().unwrap().unwrap().take(4).unwrap().unwrap();
        assert_eq!(model.evaluate(&batch).unwrap(), plain.evaluate(&batch).unwrap());

        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 10).unwrap();
        assert_eq!((seen.depth, seen.sequences), (4, 10));
        let ea = seen.routers.iter().find(|r| r.component == "ea").unwrap();
        assert_eq!(
            ea.depths.iter().map(|d| (d.depth, d.set)).collect::<Vec<_>>(),
            [(0, 0), (1, 1), (2, 1), (3, 1)]
        );
        for d in &ea.depths {
            assert_eq!(d.counts.iter().sum::<u64>(), 2 * seen.tokens);
            assert!(d.token_entropy > 0.0 && d.token_entropy <= 6f64.ln() + 1e-5, "{}", d.token_entropy);
        }
        assert_eq!(seen.routers.iter().filter(|r| r.projection).count(), 2);
        let da = &seen.depth_attention[0];
        assert_eq!(da.depths, [1, 2, 3]);
        for row in &da.scores {
            assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        }
        assert!((da.scores[2][0] - 1.0 / 3.0).abs() > 1e-6);

        // A pass that adds nothing but what it normalises away moves the stream, and no norm is 0.
        let depths: Vec<u64> = seen.streams.norms.iter().map(|n| n.depth).collect();
        assert_eq!(depths, [0, 1, 2, 3, 4]);
        assert!(seen.streams.norms.iter().all(|n| n.norm > 0.0));
        // After a norm whose gain has learned nothing, a stream of 16 is 4 long.
        assert!(seen.streams.norms[2..].iter().all(|n| (n.norm - 4.0).abs() < 1e-2), "{:?}", seen.streams);
        let passes: Vec<(u64, u64)> = seen.streams.passes.iter().map(|p| (p.pass, p.depth)).collect();
        assert_eq!(passes, [(0, 2), (1, 3), (2, 4)]);
        assert!(seen.streams.passes.iter().all(|p| p.movement > 0.0 && p.movement < 2.0));

        // Queries of nothing look everywhere alike.
        model.set("layers.1.da.q_norm.weight", &[0.0; 8]).unwrap();
        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 4).unwrap();
        assert!(seen.depth_attention[0].scores[2].iter().all(|s| (s - 1.0 / 3.0).abs() < 1e-9));
        // A router whose candidates are all alike is as uncertain as can be, and chooses the first
        // of them.
        model.set("layers.0.ea.router.query.weight", &[0.0; 8 * 16]).unwrap();
        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 4).unwrap();
        let first = &seen.routers.iter().find(|r| r.component == "ea").unwrap().depths[0];
        assert_eq!(first.counts, [seen.tokens, seen.tokens, 0, 0, 0, 0]);
        assert!((first.token_entropy - 6f64.ln()).abs() < 1e-5, "{}", first.token_entropy);
    }
}

/// A model whose tokens skip by every rule, one part inside another.
const SKIPPING: &str = "\
model:
  name: skipping
  vocab: 256
  hidden: 16
  context: 32
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    near: {sequence: {heads: 2, head_size: 8, window: 4}}
    mlp: {mlp: {intermediate: 16}}
    ea: {experts: {count: 4, active: 2, intermediate: 16, query: 8}}
  body:
    - \"skip(capacity 0.5, causal bce 0.1) { sa } > mlp\"
    - \"skip(threshold, capacity 0.5, penalty 0.1) { near } > mlp\"
    - \"skip(capacity 0.5, causal predictor 4) { sa > skip(threshold, capacity 0.5, penalty 0.1) { ea } }\"
    - \"skip(capacity 0.25) { sa > skip(capacity 0.5, norm_only) { mlp } }\"
data: {task: permutation, size: 4, max_steps: 3}
train: {sequence: 32, precision: f32}
";

#[test]
fn decisions_to_skip_are_those_the_model_makes() {
    let folder = tempfile::tempdir().unwrap();
    let spec = spec(SKIPPING);
    let dataset = dataset(&spec, folder.path());
    let device = cpu(2);
    let options = Options { observe: true, ..prepare::forward(4, 32) };
    let (mut model, mut plain) = with_plain(&device, &spec, options);
    model.initialise(3).unwrap();
    // Routers of thresholds begin at 0, where every token is processed.
    for (layer, skip, size) in [(1, 0, 16), (2, 1, 16)] {
        let values: Vec<f32> = (0..size).map(|i| ((i * 7 + layer) % 5) as f32 - 2.0).collect();
        model.set(&format!("layers.{layer}.skip.{skip}.router.weight"), &values).unwrap();
    }
    let batch = dataset.validation().unwrap().unwrap().take(4).unwrap().unwrap();
    assert_eq!(model.evaluate(&batch).unwrap(), plain.evaluate(&batch).unwrap());

    let mut held = dataset.validation().unwrap().unwrap();
    let mut seen = decisions(&mut model, &spec.model, &mut held, 10).unwrap();
    let all: usize = seen.decisions.sequences.iter().sum();
    assert_eq!((seen.decisions.sequences.len(), all), (10, seen.tokens.len()));
    let parts = &seen.decisions.parts;
    let named: Vec<(u64, u64, &str)> = parts.iter().map(|p| (p.depth, p.number, p.kind.as_str())).collect();
    let outer = "sa > skip { ea }";
    assert_eq!(
        named,
        [
            (0, 0, "sa"),
            (1, 0, "near"),
            (2, 0, outer),
            (2, 1, "ea"),
            (3, 0, "sa > skip { mlp }"),
            (3, 1, "mlp")
        ]
    );
    for (part, bound) in parts.iter().zip([Some(0.0), Some(0.5), Some(0.0), Some(0.5), None, None]) {
        let around = parts.iter().find(|p| p.depth == part.depth && p.number + 1 == part.number);
        for i in 0..all {
            let came = around.is_none_or(|outer| outer.kept[i]);
            assert_eq!(part.reached[i], came, "{}", part.kind);
            let above = bound
                .map_or(part.kept[i], |b| if b == 0.5 { part.scores[i] >= b } else { part.scores[i] > b });
            assert_eq!(part.kept[i], came && above, "{}: score {}", part.kind, part.scores[i]);
            assert!(!came || part.norms[i] > 0.0);
        }
        let kept = part.kept.iter().filter(|k| **k).count();
        assert!(kept > 0 && kept < all, "{}: {kept} of {all}", part.kind);
    }
    // Where the choice is by rank, 8 of 32 tokens, and half of those.
    let mut from = 0;
    for &n in &seen.decisions.sequences {
        if n == 32 {
            let kept = |p: usize| parts[p].kept[from..from + n].iter().filter(|k| **k).count();
            assert_eq!((kept(4), kept(5)), (8, 4));
        }
        from += n;
    }
    // The tokens sent to the experts are those that they get.
    let mut held = dataset.validation().unwrap().unwrap();
    let routed = observe(&mut model, &spec, &mut held, 10).unwrap();
    let ea = routed.routers.iter().find(|r| r.component == "ea").unwrap();
    let kept = parts[3].kept.iter().filter(|k| **k).count() as u64;
    assert_eq!(ea.depths[0].counts.iter().sum::<u64>(), 2 * kept);
    assert!(ea.depths[0].token_entropy > 0.0 && ea.depths[0].token_entropy <= 4f64.ln() + 1e-5);

    seen.built_in(&dataset.tokenizer);
    assert!(seen.decisions.classes.contains(&"space".to_string()), "{:?}", seen.decisions.classes);

    // A part that is left out is left out, and comes back.
    let whole = held_out(&mut model, &dataset, 2).unwrap().mean();
    let parts = ablate(&mut model, &spec.model, &dataset, 2).unwrap();
    assert_eq!(held_out(&mut model, &dataset, 2).unwrap().mean(), whole);
    let found = |kind: &str, routed: bool| parts.iter().find(|p| p.kind == kind && p.routed == routed);
    assert_eq!(found(outer, false), None, "there is nothing else in that layer");
    assert_eq!(found("near", false).unwrap().part, "mlp");
    assert_eq!(parts.iter().filter(|p| p.routed).count(), 6);
    for p in parts.iter().filter(|p| p.routed && p.kind != "mlp") {
        assert!(p.loss != whole, "{}: {} against {whole}", p.kind, p.loss);
    }
    let out = model.get("layers.1.near.out.weight").unwrap();
    model.set("layers.1.near.out.weight", &vec![0.0; out.len()]).unwrap();
    assert_eq!(held_out(&mut model, &dataset, 2).unwrap().mean(), found("near", true).unwrap().loss);
}
