//! The generated kernels, interpreted, against the CPU device and the reference: gradients, training steps, generation.
//!
//! Where NVRTC is missing the tests say so and pass; in CI (`CI=true`) that is a failure.

mod support;

use dreamc_compiler::{Cache, Compiled, Options, PREPARE, compile};
use dreamc_runtime::device::cpu::CpuDevice;
use dreamc_runtime::device::ptx::{self, Checks, PtxDevice, Schedule};
use dreamc_runtime::device::{Device, Instrument, RunStats, Session};
use support::{Golden, distance, error, goldens};

/// The device, or a line that says why the test is skipped.
fn device(options: ptx::Options) -> Option<PtxDevice> {
    match PtxDevice::new(options) {
        Ok(device) => Some(device),
        Err(error) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{error}"),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn fast() -> ptx::Options {
    ptx::Options { checks: Checks::NONE, ..ptx::Options::default() }
}

fn options(b: usize, n: usize) -> Options {
    Options { batch: b as u64, sequence: n as u64, train: true, logits: true, ..Options::default() }
}

struct Run {
    compiled: Compiled,
    session: Box<dyn Session>,
}

impl Run {
    fn new(golden: &Golden, options: &Options, device: &dyn Device) -> Self {
        let compiled = compile(&golden.spec, options).unwrap();
        let session = device.load(&compiled.plan).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        let mut run = Run { compiled, session };
        for tensor in run.compiled.tensors.clone() {
            let values = golden.tensors[&format!("weights.{}", tensor.name)].floats();
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            run.session.write_at(tensor.weight, tensor.instance, 0, &values).unwrap();
        }
        run
    }

    fn write<T: dreamc_runtime::device::Element>(&mut self, name: &str, values: &[T]) {
        if let Some(id) = self.compiled.plan.find(name) {
            self.session.write_at(id, 0, 0, values).unwrap();
        }
    }

    fn read(&self, name: &str) -> Vec<f64> {
        let id = self.compiled.plan.find(name).unwrap_or_else(|| panic!("no buffer {name}"));
        self.session.read_all::<f32>(id).unwrap().into_iter().map(f64::from).collect()
    }

    fn run(&mut self, program: &str) -> RunStats {
        self.session.run(program).unwrap_or_else(|e| panic!("{program}: {e}"))
    }

    /// Loss and gradients of a batch, added to what is there.
    fn backward(&mut self, golden: &Golden, ids: &[i32], b: usize, n: usize) -> f64 {
        let (inputs, targets) = golden.batch(ids, n);
        self.write("ids", &inputs);
        self.write("targets", &targets);
        self.write("positions", &(0..b * n).map(|i| (i % n) as i32).collect::<Vec<_>>());
        self.write("loss_scale", &[1.0 / (b * n) as f32]);
        self.write("aux_scale", &[1.0f32]);
        self.write("loss", &[0.0f32]);
        self.run("backward");
        self.read("loss")[0]
    }

    fn step(&mut self, golden: &Golden, ids: &[i32], b: usize, n: usize, step: i32) -> f64 {
        let train = &golden.spec.train;
        let loss = self.backward(golden, ids, b, n);
        let rate = train.learning_rate * ((step + 1) as f64 / train.warmup as f64).min(1.0);
        let correct = |beta: f64| 1.0 / (1.0 - beta.powi(step + 1));
        let clip = train.clip.unwrap_or(f64::INFINITY);
        let scalars = [rate, correct(train.betas.0), correct(train.betas.1), clip, 0.0, 0.0, 0.0, 0.0]
            .map(|x| x as f32);
        self.write("scalars", &scalars);
        self.run("norm");
        self.run("update");
        loss
    }

    fn gradients(&self) -> Vec<(String, Vec<f64>)> {
        let with_gradient = self.compiled.tensors.iter().filter_map(|t| t.gradient.map(|g| (t, g)));
        with_gradient
            .map(|(t, gradient)| {
                let mut values = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
                self.session.read_at(gradient, t.instance, 0, &mut values).unwrap();
                (t.name.clone(), values.into_iter().map(f64::from).collect())
            })
            .collect()
    }

    fn weights(&self) -> Vec<f32> {
        let mut all = vec![];
        for t in &self.compiled.tensors {
            let mut values = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
            self.session.read_at(t.weight, t.instance, 0, &mut values).unwrap();
            all.extend(values);
        }
        all
    }
}

#[test]
fn logits_losses_and_gradients_agree_with_the_cpu_and_the_reference() {
    let Some(device) = device(fast()) else { return };
    let cpu = CpuDevice::default();
    for golden in goldens() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let begun = std::time::Instant::now();
        let mut run = Run::new(&golden, &options(b, n), &device);
        let loaded = begun.elapsed().as_secs_f64();
        let mut other = Run::new(&golden, &options(b, n), &cpu);
        let loss = run.backward(&golden, ids.ints(), b, n);
        println!("{}: loaded in {loaded:.2} s, all {:.2} s", golden.name, begun.elapsed().as_secs_f64());
        other.backward(&golden, ids.ints(), b, n);
        let e = error(&run.read("logits"), golden.tensors["logits"].floats());
        assert!(e < 1e-5, "{}: logits differ by {e}", golden.name);
        let e = error(&[loss], golden.tensors["loss"].floats());
        assert!(e < 1e-5, "{}: loss differs by {e}", golden.name);
        for ((name, found), (_, expected)) in run.gradients().into_iter().zip(other.gradients()) {
            let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            // Gradients that are zero by nature hold rounding noise.
            let e = if largest(&expected) < 1e-8 { largest(&found) } else { distance(&found, &expected) };
            // `nested` magnifies what goes in, as the tests of the CPU say.
            let bound = if golden.name == "nested" { 5e-5 } else { 1e-5 };
            assert!(e < bound, "{}: gradient of {name} differs by {e}", golden.name);
        }
    }
}

/// Loss by step, and the weights at the end.
fn train(golden: &Golden, device: &dyn Device, steps: usize) -> (Vec<f64>, Vec<f32>) {
    let all = &golden.tensors["steps.ids"];
    let (b, n) = (all.dims[1], all.dims[2] - 1);
    let mut run = Run::new(golden, &options(b, n), device);
    let batches = all.ints().chunks_exact(b * (n + 1)).take(steps).enumerate();
    let losses = batches.map(|(step, ids)| run.step(golden, ids, b, n, step as i32)).collect();
    (losses, run.weights())
}

#[test]
fn training_steps_agree_with_the_reference() {
    let Some(device) = device(fast()) else { return };
    for golden in goldens() {
        let (losses, _) = train(&golden, &device, 4);
        let expected = golden.tensors["steps.losses"].floats();
        for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
            let e = error(&[*loss], &[*expected]);
            // AdamW magnifies rounding from step to step; the CPU has the same bound.
            assert!(e < 1e-3, "{}: loss of step {step} differs by {e}", golden.name);
        }
    }
}

#[test]
fn no_schedule_finds_anything_or_changes_a_bit() {
    if device(fast()).is_none() {
        return;
    }
    for golden in goldens().into_iter().filter(|g| ["dr_da", "gemma", "switch"].contains(&g.name.as_str())) {
        let mut seen: Option<(Vec<f64>, Vec<f32>)> = None;
        for (schedule, threads) in [(Schedule::Forward, 2), (Schedule::Reverse, 1), (Schedule::Random(7), 1)]
        {
            let options = ptx::Options { schedule, threads, ..ptx::Options::default() };
            let Some(device) = device(options) else { return };
            let found = train(&golden, &device, 1);
            match &seen {
                None => seen = Some(found),
                Some(first) => {
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(found.0, first.0, "{}: {schedule:?}", golden.name);
                    assert_eq!(bits(&found.1), bits(&first.1), "{}: {schedule:?}", golden.name);
                }
            }
        }
    }
}

#[test]
fn cached_generation_equals_uncached() {
    let Some(device) = device(fast()) else { return };
    for golden in goldens() {
        let ids = &golden.tensors["ids"];
        let (b, n) = (ids.dims[0], ids.dims[1] - 1);
        let (inputs, _) = golden.batch(ids.ints(), n);
        let expected = golden.tensors["logits"].floats();
        let vocab = expected.len() / (b * n);
        let (places, chunk) = (n + 2, 3);
        let cache = Some(Cache { places: places as u64, chunk: chunk as u64 });
        let mut run = Run::new(&golden, &Options { train: false, cache, ..options(b, n) }, &device);
        if run.compiled.plan.programs.contains_key(PREPARE) {
            run.run(PREPARE);
        }
        let mut worst = 0.0f64;
        let mut done = 0;
        while done < n {
            let (program, width) = if done == 0 { ("prefill", chunk) } else { ("decode", 1) };
            let at = |row: usize, i: usize| (row * width + i, done + i);
            let (mut tokens, mut positions) = (vec![0; b * width], vec![0; b * width]);
            let mut keys = vec![-1; b * places];
            for row in 0..b {
                for i in 0..width {
                    let (slot, position) = at(row, i);
                    tokens[slot] = inputs[row * n + position];
                    positions[slot] = position as i32;
                }
                (0..done + width).for_each(|key| keys[row * places + key] = key as i32);
            }
            run.write(&format!("{program}.ids"), &tokens);
            run.write(&format!("{program}.positions"), &positions);
            run.write(&format!("{program}.slots"), &positions);
            run.write("key_positions", &keys);
            run.run(program);
            let logits = run.read(&format!("{program}.logits"));
            for row in 0..b {
                for i in 0..width {
                    let (slot, position) = at(row, i);
                    let expected = &expected[(row * n + position) * vocab..][..vocab];
                    worst = worst.max(error(&logits[slot * vocab..][..vocab], expected));
                }
            }
            done += width;
        }
        assert!(worst < 1e-5, "{}: cached logits differ by {worst}", golden.name);
    }
}

#[test]
fn multiply_adds_are_those_that_the_cpu_counts() {
    let Some(device) = device(fast()) else { return };
    let golden = goldens().into_iter().find(|g| g.name == "dr_da").unwrap();
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let count = |device: &dyn Device| {
        let mut run = Run::new(&golden, &options(b, n), device);
        run.session.instrument(Instrument { count: true, time: false });
        run.backward(&golden, ids.ints(), b, n);
        let stats = run.run("backward");
        stats.by_launch.iter().map(|l| (l.origin.clone(), l.count, l.multiply_adds)).collect::<Vec<_>>()
    };
    assert_eq!(count(&device), count(&CpuDevice::default()));
}

#[test]
fn an_index_out_of_range_names_its_launch() {
    let Some(device) = device(fast()) else { return };
    let golden = goldens().into_iter().find(|g| g.name == "la").unwrap();
    let ids = &golden.tensors["ids"];
    let (b, n) = (ids.dims[0], ids.dims[1] - 1);
    let mut run = Run::new(&golden, &options(b, n), &device);
    run.write("ids", &vec![1_000_000; b * n]);
    let error = run.session.run("backward").unwrap_err().to_string();
    assert!(error.contains("embed") && error.contains("out of range"), "{error}");
    // The session goes on.
    run.backward(&golden, ids.ints(), b, n);
}
