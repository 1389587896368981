//! Observation leaves a model as it is, and what it sees is what the model does.

use dreamc_compiler::{Options, compile};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::analysis::observe;
use dreamc_runtime::data::{Dataset, Settings};
use dreamc_runtime::device::cpu::{CpuDevice, CpuOptions};
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

#[test]
fn observation_changes_no_bit_and_sees_every_choice() {
    let folder = tempfile::tempdir().unwrap();
    for text in [MODEL.to_string(), MODEL.replace("query: 8", "query: 8, router: {score: softmax}")] {
        let spec = spec(&text);
        let dataset = dataset(&spec, folder.path());
        let device = CpuDevice::new(CpuOptions { threads: Some(2) });
        let options = Options { observe: true, ..prepare::forward(4, 32) };
        let mut model = Model::load(&device, compile(&spec, &options).unwrap()).unwrap();
        let mut plain = Model::load(&device, compile(&spec, &prepare::forward(4, 32)).unwrap()).unwrap();
        model.initialise(3).unwrap();
        plain.copy_from(&model).unwrap();
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

        // Queries of nothing look everywhere alike.
        model.set("layers.1.da.q_norm.weight", &[0.0; 8]).unwrap();
        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 4).unwrap();
        assert!(seen.depth_attention[0].scores[2].iter().all(|s| (s - 1.0 / 3.0).abs() < 1e-9));
        // A router whose candidates are all alike is as uncertain as can be, and chooses the first of them.
        model.set("layers.0.ea.router.query.weight", &[0.0; 8 * 16]).unwrap();
        let mut held = dataset.validation().unwrap().unwrap();
        let seen = observe(&mut model, &spec, &mut held, 4).unwrap();
        let first = &seen.routers.iter().find(|r| r.component == "ea").unwrap().depths[0];
        assert_eq!(first.counts, [seen.tokens, seen.tokens, 0, 0, 0, 0]);
        assert!((first.token_entropy - 6f64.ln()).abs() < 1e-5, "{}", first.token_entropy);
    }
}
