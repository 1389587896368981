//! The CPU device against the reference: gradients, ten training steps, equal bits, cached
//! generation.

use crate::support::run::{Run, options};
use crate::support::{cpu, distance, error, every_golden, goldens};
use dreamc_compiler::compiled::TensorKind;
use dreamc_compiler::ir::interpret::Data;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{BufferId, ProgramKey, Space, Task};
use dreamc_compiler::{Cache, Compiled, Options, compile, compile_together};
use dreamc_runtime::generate::{Cached, NextLogits};
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::schedule;

#[test]
fn logits_loss_and_gradients_agree_with_the_reference() {
    for golden in every_golden() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let mut run = Run::new(&golden, &options(b, n), &cpu(2));
        let loss = run.backward(&golden, ids.ints(), b, n);
        let logits: Vec<f64> = run.read("logits");
        let e = error(&logits, golden.tensors["logits"].floats());
        assert!(e < 1e-5, "{}: logits differ by {e}", golden.name);
        let e = error(&[loss], golden.tensors["loss"].floats());
        assert!(e < 1e-5, "{}: loss differs by {e}", golden.name);
        // The oracle equals the reference to 1e-9 (tests/numerics/goldens.rs); on the weights
        // rounded to f32 it shows what the device itself adds.
        let z_loss = golden.spec.train.z_loss;
        let shape = Shape { batch: b as u64, sequence: n as u64, z_loss, ..Shape::default() };
        let oracle = Oracle::new(&golden.spec.model, shape, None).unwrap();
        let mut weights = golden.with_prefix("weights.");
        for tensor in weights.values_mut() {
            if let Data::Float(data) = &mut tensor.data {
                data.iter_mut().for_each(|x| *x = f64::from(*x as f32));
            }
        }
        let (ids, targets) = golden.batch(ids.ints(), n);
        let batch = Batch { ids, targets, ..Batch::default() };
        let expected = oracle.evaluate(&weights, &batch).unwrap();
        let bound = golden.bounds(10.0);
        for tensor in &run.compiled.tensors {
            let Some(gradient) = tensor.gradient else { continue };
            let mut found = vec![0.0f32; tensor.shape.iter().product::<u64>() as usize];
            run.session.read_at(gradient, tensor.instance, 0, &mut found).unwrap();
            let found: Vec<f64> = found.into_iter().map(f64::from).collect();
            let expected = expected.gradients[&tensor.name].floats();
            let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            // Gradients that are zero by nature hold rounding noise.
            let e = if largest(expected) < 1e-9 { largest(&found) } else { distance(&found, expected) };
            assert!(e < bound(&tensor.name), "{}: gradient of {} differs by {e}", golden.name, tensor.name);
        }
    }
}

#[test]
fn ten_training_steps_agree_with_the_reference() {
    for golden in every_golden() {
        let all = &golden.tensors["steps.ids"];
        let (b, n) = (all.dims[1], all.dims[2] - 1);
        let mut run = Run::new(&golden, &options(b, n), &cpu(2));
        let expected = golden.tensors["steps.losses"].floats();
        let mut worst = 0.0f64;
        for (step, ids) in all.ints().chunks_exact(b * (n + 1)).enumerate() {
            let loss = run.step(&golden, ids, b, n, step as i32);
            let e = error(&[loss], &[expected[step]]);
            // AdamW at this rate magnifies rounding from step to step, most where the model is
            // deepest (`nested`, depth 9).
            assert!(e < 1e-3, "{}: loss of step {step} differs by {e}", golden.name);
            worst = worst.max(e);
        }
        println!("{}: losses differ by {worst:.1e}", golden.name);
        for (name, found) in run.tensors() {
            let expected = golden.tensors[&format!("steps.weights.{name}")].floats();
            let began = golden.tensors[&format!("weights.{name}")].floats();
            // Where the gradient is zero by nature AdamW divides noise by noise: only the bound on
            // a step holds.
            let still = expected.iter().zip(began).all(|(a, b)| (a - b).abs() < 1e-12);
            let natural = golden
                .tensors
                .get(&format!("gradients.{name}"))
                .is_some_and(|g| g.floats().iter().all(|x| x.abs() < 1e-9));
            // Balancing that moves nothing, and what is frozen under adapters.
            if still && (name.ends_with(".bias") || golden.spec.model.adapt.is_some()) {
                assert_eq!(
                    found.iter().map(|x| *x as f32).collect::<Vec<_>>(),
                    expected.iter().map(|x| *x as f32).collect::<Vec<_>>()
                );
                continue;
            }
            if natural {
                continue;
            }
            let moved = expected.iter().zip(began).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(
                worst < 5e-2 * moved.max(1e-6),
                "{}: {name} differs by {worst} after moving by {moved}",
                golden.name
            );
        }
    }
}

#[test]
fn bits_are_the_same_every_time_and_on_any_number_of_threads() {
    for golden in goldens().into_iter().take(4) {
        let all = &golden.tensors["steps.ids"];
        let (b, n) = (all.dims[1], all.dims[2] - 1);
        let mut seen = vec![];
        for threads in [1, 2, 2, 3] {
            let mut run = Run::new(&golden, &options(b, n), &cpu(threads));
            for (step, ids) in all.ints().chunks_exact(b * (n + 1)).enumerate() {
                run.step(&golden, ids, b, n, step as i32);
            }
            let bits: Vec<u64> = run.tensors().into_values().flatten().map(f64::to_bits).collect();
            seen.push(bits);
        }
        assert!(seen.iter().all(|bits| *bits == seen[0]), "{}", golden.name);
    }
}

/// On a processor without instructions for it, bf16 is widened as it is read: the same numbers.
#[test]
fn bf16_changes_the_loss_little_and_is_the_same_on_any_number_of_threads() {
    for golden in goldens().into_iter().filter(|g| !g.name.contains("mod")).take(6) {
        let all = &golden.tensors["steps.ids"];
        let (b, n) = (all.dims[1], all.dims[2] - 1);
        let train = |narrow: Narrow, threads: usize| {
            let mut run = Run::new(&golden, &Options { narrow, ..options(b, n) }, &cpu(threads));
            let batches = all.ints().chunks_exact(b * (n + 1)).enumerate();
            let losses: Vec<f64> =
                batches.map(|(step, ids)| run.step(&golden, ids, b, n, step as i32)).collect();
            let bits: Vec<u64> = run.tensors().into_values().flatten().map(f64::to_bits).collect();
            (losses, bits)
        };
        let (exact, _) = train(Narrow::Nothing, 1);
        let (losses, bits) = train(Narrow::Storage, 1);
        assert!(bits == train(Narrow::Storage, 3).1, "{}", golden.name);
        // Of the first step, where a model so small may already choose another expert for some
        // token, as it does later on.
        let apart = (exact[0] - losses[0]).abs() / exact[0];
        println!("{}: first losses {apart:.1e} apart", golden.name);
        assert!(apart > 0.0 && apart < 0.05, "{}: {exact:?} {losses:?}", golden.name);
    }
}

#[test]
fn evaluation_does_not_look_ahead() {
    for golden in every_golden() {
        let Some(expected) = golden.tensors.get("inference.logits") else { continue };
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let mut run = Run::new(&golden, &options(b, n), &cpu(2));
        run.program(ProgramKey::EVALUATE, &golden, ids.ints(), b, n);
        let found: Vec<f64> = run.read("logits");
        let e = error(&found, expected.floats());
        assert!(e < 1e-5, "{}: logits differ by {e}", golden.name);
        let trained = error(golden.tensors["logits"].floats(), expected.floats());
        // Where tokens decide for themselves in training, too, there is one rule.
        let one = ["mod_threshold", "mixture_of_recursions_token", "choice_network"]
            .contains(&golden.name.as_str());
        assert!(one || trained > 1e-3, "{}: the rules agree", golden.name);
    }
}

#[test]
fn cached_generation_equals_uncached() {
    for golden in every_golden() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let (inputs, _) = golden.batch(ids.ints(), n);
        let expected = golden.written();
        let vocab = expected.len() / (b * n);
        let (places, chunk) = (n + 2, 3);
        let cache =
            Some(Cache { places: places as u64, chunk: chunk as u64, slack: f64::INFINITY, every: true });
        let mut run = Run::new(&golden, &Options { train: false, cache, ..options(b, n) }, &cpu(2));
        if run.compiled.plan.programs.contains_key(&ProgramKey::PREPARE) {
            run.run(ProgramKey::PREPARE);
        }
        run.empty_caches();
        let mut lengths = vec![0usize; b];
        let mut worst = 0.0f64;
        // Rows of different lengths: every second one begins with a token less, then all go on one
        // by one.
        let first: Vec<usize> = (0..b).map(|row| chunk - row % 2).collect();
        let mut takes = (first, ProgramKey::first(Task::PrefillEvery), chunk);
        while takes.0.iter().any(|&t| t > 0) {
            let (take, program, width) = takes;
            let (mut tokens, mut positions, mut slots) =
                (vec![0; b * width], vec![0; b * width], vec![-1; b * width]);
            let mut keys = vec![-1; b * places];
            for row in 0..b {
                for i in 0..take[row] {
                    let at = lengths[row] + i;
                    tokens[row * width + i] = inputs[row * n + at];
                    positions[row * width + i] = at as i32;
                    slots[row * width + i] = at as i32;
                }
                for at in 0..lengths[row] + take[row] {
                    keys[row * places + at] = at as i32;
                }
            }
            run.write(&format!("{program}.ids"), &tokens);
            run.write(&format!("{program}.positions"), &positions);
            run.write(&format!("{program}.slots"), &slots);
            run.write("key_positions", &keys);
            run.run(program);
            let logits = run.read(&format!("{program}.logits"));
            for row in 0..b {
                for i in 0..take[row] {
                    let found = &logits[(row * width + i) * vocab..][..vocab];
                    worst =
                        worst.max(error(found, &expected[(row * n + lengths[row] + i) * vocab..][..vocab]));
                }
                lengths[row] += take[row];
            }
            takes = (lengths.iter().map(|&l| usize::from(l < n)).collect(), ProgramKey::DECODE, 1);
        }
        assert!(lengths.iter().all(|&l| l == n));
        assert!(worst < 1e-5, "{}: cached logits differ by {worst}", golden.name);
    }
}

#[test]
fn training_at_other_depths_agrees_with_the_oracle() {
    let golden = goldens().into_iter().find(|g| g.name == "dr_da").unwrap();
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let depths = vec![2, 6];
    let mut run = Run::new(&golden, &Options { depths: depths.clone(), ..options(b, n) }, &cpu(2));
    let shape = Shape { batch: b as u64, sequence: n as u64, ..Shape::default() };
    let (inputs, targets) = golden.batch(ids.ints(), n);
    let batch = Batch { ids: inputs, targets, ..Batch::default() };
    for depth in depths {
        let loss = run.program(
            ProgramKey::first(Task::Backward { depth: Some(depth), last: false }),
            &golden,
            ids.ints(),
            b,
            n,
        );
        let oracle = Oracle::new(&golden.spec.model, shape, Some(depth)).unwrap();
        let expected = oracle.evaluate(&golden.with_prefix("weights."), &batch).unwrap();
        assert!(
            error(&[loss], &[expected.loss]) < 1e-5,
            "depth {depth}: loss {loss} against {}",
            expected.loss
        );
        for tensor in run.compiled.tensors.clone() {
            let Some(gradient) = tensor.gradient else { continue };
            let mut found = vec![0.0f32; tensor.shape.iter().product::<u64>() as usize];
            run.session.read_at(gradient, tensor.instance, 0, &mut found).unwrap();
            run.session.write_at(gradient, tensor.instance, 0, &vec![0.0f32; found.len()]).unwrap();
            let found: Vec<f64> = found.into_iter().map(f64::from).collect();
            let e = distance(&found, expected.gradients[&tensor.name].floats());
            assert!(e < 1e-4, "depth {depth}: gradient of {} differs by {e}", tensor.name);
        }
    }
}

/// Generated kernels compute AdamW to the bit, one rounding an operation: clipped by half
/// and not at all, with weight decay and without, for two steps.
#[test]
fn an_optimizer_step_is_its_formula_to_the_bit() {
    for golden in goldens().iter().take(3) {
        let (ids, train) = (&golden.tensors["ids"], &golden.spec.train);
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        for clip in [f32::INFINITY, 1e-3] {
            let mut run = Run::new(golden, &options(b, n), &cpu(2));
            let tensors = run.compiled.tensors.clone();
            let read = |run: &Run, buffer: BufferId, instance: u64| {
                let mut values = vec![0f32; run.compiled.plan.buffer(buffer).elements() as usize];
                run.session.read_at(buffer, instance, 0, &mut values).unwrap();
                values
            };
            for step in 1..=2i32 {
                run.backward(golden, ids.ints(), b, n);
                run.run(ProgramKey::NORM);
                let correct = |beta: f64| (1.0 / (1.0 - beta.powi(step))) as f32;
                let (first, second, rate) = (correct(train.betas.0), correct(train.betas.1), 3e-3f32);
                let given = [("learning_rate", rate), ("first_correction", first)];
                for (name, value) in given.into_iter().chain([("second_correction", second), ("clip", clip)])
                {
                    run.write(name, &[value]);
                }
                let norm = run.read("norm")[0] as f32;
                let share = if clip == f32::INFINITY { 1.0 } else { (clip / norm).min(1.0) };
                let mut expected = vec![];
                for t in tensors.iter().filter(|t| !t.states.is_empty()) {
                    let [m, v] = t.states[..] else { panic!("{} has two moments", t.name) };
                    let all = [t.weight, t.gradient.unwrap(), m.1, v.1].map(|id| read(&run, id, t.instance));
                    let [mut w, g, mut m, mut v] = all;
                    let decays = t.shape.len() >= 2 && t.kind != TensorKind::Embedding;
                    let kept = if decays { 1.0 - rate * train.weight_decay as f32 } else { 1.0 };
                    let (b1, b2) = train.betas;
                    for i in 0..w.len() {
                        let x = g[i] * share;
                        m[i] = b1 as f32 * m[i] + (1.0 - b1) as f32 * x;
                        v[i] = b2 as f32 * v[i] + (1.0 - b2) as f32 * (x * x);
                        let by = (m[i] * first) / ((v[i] * second).sqrt() + train.eps as f32);
                        w[i] = w[i] * kept - rate * by;
                    }
                    expected.push((t, [w, m, v]));
                }
                run.run(ProgramKey::UPDATE);
                for (t, expected) in expected {
                    let buffers = [t.weight, t.states[0].1, t.states[1].1];
                    for (buffer, expected) in buffers.into_iter().zip(expected) {
                        let found = read(&run, buffer, t.instance);
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert_eq!(bits(&found), bits(&expected), "{}, step {step}", t.name);
                    }
                    assert!(read(&run, t.gradient.unwrap(), t.instance).iter().all(|g| *g == 0.0));
                }
            }
        }
    }
}

/// Training, scoring and generation on one set of weights compute the same bits as models of their
/// own, before a step and after it; and the weights are there once.
#[test]
fn uses_of_one_set_of_weights_are_as_models_of_their_own() {
    for golden in goldens().iter().take(4) {
        let (spec, device) = (&golden.spec, cpu(2));
        let n = golden.tensors["ids"].dims[1] - 1;
        let scoring = Options { batch: 3, logits: true, train: false, ..options(3, n) };
        let cache = Some(Cache { places: n as u64, chunk: 4, slack: f64::INFINITY, every: false });
        let writing = Options { batch: 2, cache, train: false, ..options(2, 4) };
        let uses = [("", options(2, n)), ("score", scoring), ("write", writing)];
        let Ok((all, _)) = compile_together(spec, &uses) else { continue };
        let bytes = |compiled: &Compiled| {
            let weights = compiled.plan.buffers.iter().filter(|b| b.space == Space::Weights);
            weights.map(|b| b.bytes()).sum::<u64>()
        };
        assert_eq!(bytes(&all[0]), bytes(&compile(spec, &uses[0].1).unwrap()));
        let mut model = Model::load(&device, all[0].clone()).unwrap();
        let mut scorer = model.beside(all[1].clone()).unwrap();
        let mut writer = Cached::over(model.beside(all[2].clone()).unwrap()).unwrap();
        model.initialise(7).unwrap();
        let ids = |rows: usize| {
            let ids: Vec<i32> = (0..rows * n).map(|i| (i * 5 % spec.model.vocab as usize) as i32).collect();
            let positions = (0..rows * n).map(|i| (i % n) as i32).collect();
            dreamc_data::Batch {
                sequence: n,
                targets: ids.clone(),
                ids,
                positions,
                segments: vec![0; rows * n],
                bytes: vec![0; rows * n],
                ..dreamc_data::Batch::default()
            }
        };
        for step in 0..2 {
            if step > 0 {
                model.begin_step().unwrap();
                model.backward(&ids(2), Scale { loss: 0.1, auxiliary: 1.0 }, None).unwrap();
                model.norm().unwrap();
                model.update(&schedule::scalars(&spec.train, 1)).unwrap();
            }
            let alone = |model: &Model, options: &Options| {
                let mut alone = Model::load(&device, compile(spec, options).unwrap()).unwrap();
                for (name, _) in model.entries() {
                    alone.set(&name, &model.get(&name).unwrap()).unwrap();
                }
                alone
            };
            let expected = alone(&model, &uses[1].1).evaluate(&ids(3)).unwrap();
            assert_eq!(scorer.evaluate(&ids(3)).unwrap(), expected, "{}: scores", golden.name);
            let expected = alone(&model, &uses[0].1).evaluate(&ids(2)).unwrap();
            assert_eq!(model.evaluate(&ids(2)).unwrap(), expected, "{}: losses", golden.name);
            let prompts = vec![vec![1, 2, 3], vec![3, 1]];
            let mut expected = Cached::over(alone(&model, &uses[2].1)).unwrap();
            assert_eq!(writer.start(&prompts).unwrap(), expected.start(&prompts).unwrap());
            let (next, other) = (writer.advance(&[2, 2]).unwrap(), expected.advance(&[2, 2]).unwrap());
            assert_eq!(next, other, "{}: what is written behind step {step}", golden.name);
        }
    }
}
