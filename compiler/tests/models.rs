//! What must hold for every model, on random ones: derivatives, and the cut between forward and backward.

use dreamc_compiler::ir::interpret::{Data, Tensor};
use dreamc_compiler::ir::random::Rng;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_compiler::{Options, compile, random};
use dreamc_dsl::spec::{Component, Model};
use indexmap::IndexMap;

const SEEDS: u64 = 40;

fn shape(seed: u64) -> Shape {
    Shape { batch: 1 + seed % 2, sequence: 1 + seed % 4, ..Shape::default() }
}

fn weights(oracle: &Oracle, rng: &mut Rng) -> IndexMap<String, Tensor> {
    let tensor = |dims: &[u64], rng: &mut Rng| {
        let n = dims.iter().product::<u64>();
        let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
        Tensor::float(&dims, (0..n).map(|_| rng.between(-0.9, 0.9)).collect())
    };
    oracle.tensors().into_iter().map(|(name, dims, ..)| (name, tensor(&dims, rng))).collect()
}

fn batch(model: &Model, shape: Shape, rng: &mut Rng) -> Batch {
    let n = shape.batch * shape.sequence;
    let mut ids = || (0..n).map(|_| rng.below(model.vocab) as i32).collect::<Vec<i32>>();
    let (ids, mut targets) = (ids(), ids());
    if targets.len() > 1 {
        targets[0] = -1;
    }
    Batch { ids, targets, ..Batch::default() }
}

/// A stopped gradient is no derivative: without the shared experts, the only values that are stopped choose.
fn without_shared(mut model: Model) -> Model {
    for component in model.components.values_mut() {
        if let Component::Sequence(a) | Component::Depth(a) = component
            && let Some(p) = &mut a.projection
        {
            p.shared = false;
        }
    }
    model
}

#[test]
fn gradients_of_random_models_equal_finite_differences() {
    let mut checked = 0;
    for seed in 0..SEEDS {
        let model = without_shared(random::model(seed));
        let shape = shape(seed);
        let oracle = Oracle::new(&model, shape, None).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let mut rng = Rng::new(seed);
        let weights = weights(&oracle, &mut rng);
        let batch = batch(&model, shape, &mut rng);
        let base = oracle.evaluate(&weights, &batch).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        // One direction for each of some tensors.
        let some = 12.min(base.gradients.len());
        let first = rng.below(base.gradients.len() as u64) as usize;
        for (name, gradient) in base.gradients.iter().cycle().skip(first).step_by(5).take(some) {
            let direction: Vec<f64> = gradient.floats().iter().map(|_| rng.between(-1.0, 1.0)).collect();
            let slope: f64 = gradient.floats().iter().zip(&direction).map(|(a, b)| a * b).sum();
            let along = |h: f64| {
                let mut moved = weights.clone();
                if let Some(Data::Float(data)) = moved.get_mut(name).map(|t| &mut t.data) {
                    data.iter_mut().zip(&direction).for_each(|(x, d)| *x += h * d);
                }
                oracle.evaluate(&moved, &batch).unwrap()
            };
            // Fourth order, and the best of three step sizes: some random models curve sharply.
            let mut best = (f64::INFINITY, 0.0);
            for h in [1e-5, 1e-6, 1e-7] {
                let around = [along(2.0 * h), along(h), along(-h), along(-2.0 * h)];
                if around.iter().any(|e| e.counts != base.counts) {
                    continue;
                }
                let [a, b, c, d] = around.map(|e| e.loss);
                let numeric = (8.0 * (b - c) - (a - d)) / (12.0 * h);
                let scale = slope.abs().max(numeric.abs()).max(1e-2);
                let e = (numeric - slope).abs() / scale;
                if e < best.0 {
                    best = (e, numeric);
                }
                if e < 1e-6 {
                    break;
                }
            }
            let (e, numeric) = best;
            if e.is_infinite() {
                continue;
            }
            assert!(e < 1e-5, "seed {seed}: {name}: {slope} against {numeric}\n{model:#?}");
            checked += 1;
        }
    }
    assert!(checked > 300, "only {checked} derivatives were checked");
    println!("{checked} derivatives of {SEEDS} models");
}

#[test]
fn random_models_compile() {
    for seed in 0..4 * SEEDS {
        let mut spec =
            dreamc_dsl::load(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/tiny-la.yaml"), &[])
                .unwrap()
                .0;
        spec.model = random::model(seed);
        let shape = shape(seed);
        for segments in [false, true] {
            let options = Options {
                batch: shape.batch,
                sequence: shape.sequence,
                train: true,
                logits: seed % 2 == 0,
                segments,
                ..Options::default()
            };
            compile(&spec, &options).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{:#?}", spec.model));
        }
    }
}
