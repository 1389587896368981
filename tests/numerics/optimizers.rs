//! Optimizers against the reference in NumPy (`tests/reference/optimizers.py`): ten steps from
//! gradients that both sides compute.

use crate::support::{cpu, distance, load, read};
use dreamc_compiler::program::{ProgramKey, Space};
use dreamc_compiler::{Options, compile};
use dreamc_device::{Device, Group};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Matrices, OptimizerKind, Precision};
use dreamc_runtime::train::schedule;
use dreamc_verify::{Compiler, Task, verify};

fn ten_steps(name: &str, optimizer: OptimizerKind) {
    steps_within(name, optimizer, Precision::F32, 2e-4);
}

/// Ten steps, with weights off by at most that share of the longest move.
fn steps_within(name: &str, optimizer: OptimizerKind, precision: Precision, bound: f64) {
    let mut spec = load("tests/goldens/dr_da.yaml");
    spec.train.optimizer = optimizer;
    spec.train.betas = (0.9, 0.99);
    spec.train.warmup = 0;
    spec.train.precision = precision;
    let golden = read("tests/goldens/dr_da.safetensors");
    let expected = read(&format!("tests/goldens/optimizers/{name}.safetensors"));
    let options = Options { batch: 2, sequence: 7, train: true, ..Options::default() };
    let compiled = compile(&spec, &options).unwrap();
    let device = cpu(2);
    let mut session = device.load(&compiled.plan, &Group::alone()).unwrap();
    for (i, b) in compiled.plan.buffers.iter().enumerate() {
        let id = dreamc_compiler::program::BufferId(i as u32);
        if b.name == "gradients" || compiled.tensors.iter().any(|t| t.counts == Some(id)) {
            session.write_at(id, 0, 0, &vec![0f32; (b.elements() * b.instances) as usize]).unwrap();
        }
    }
    for t in &compiled.tensors {
        let values: Vec<f32> =
            golden[&format!("weights.{}", t.name)].floats().iter().map(|&x| x as f32).collect();
        session.write_at(t.weight, t.instance, 0, &values).unwrap();
        for &(_, state) in &t.states {
            session.write_at(state, t.instance, 0, &vec![0f32; values.len()]).unwrap();
        }
    }
    for step in 1..=10u64 {
        for t in &compiled.tensors {
            let Some(gradient) = t.gradient else { continue };
            let g = golden[&format!("gradients.{}", t.name)].floats();
            let turn = |i: usize| (0.7 * step as f64 + 0.1 * i as f64).cos();
            let g: Vec<f32> = g.iter().enumerate().map(|(i, g)| (g * turn(i)) as f32).collect();
            session.write_at(gradient, t.instance, 0, &g).unwrap();
        }
        for (input, value) in schedule::scalars(&spec.train, step) {
            if let Some(id) = compiled.plan.find(input.name()) {
                session.write_at(id, 0, 0, &[value]).unwrap();
            }
        }
        session.run(ProgramKey::NORM).unwrap();
        session.run(ProgramKey::UPDATE).unwrap();
    }
    for t in compiled.tensors.iter().filter(|t| t.gradient.is_some()) {
        let mut found = vec![0f32; t.shape.iter().product::<u64>() as usize];
        session.read_at(t.weight, t.instance, 0, &mut found).unwrap();
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        let began: Vec<f64> = golden[&format!("weights.{}", t.name)].floats().to_vec();
        let expected = expected[&t.name].floats();
        let moved = expected.iter().zip(&began).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        let off = expected.iter().zip(&found).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(moved > 0.0, "{name}: {} does not move", t.name);
        // Where the gradient is zero by nature AdamW and Lion magnify noise.
        let noise = golden[&format!("gradients.{}", t.name)].floats().iter().all(|g| g.abs() < 1e-12);
        assert!(noise || off < bound * moved, "{name}: {} is off by {off} of {moved}", t.name);
        assert!(distance(&found, expected) < 0.1, "{name}: {}", t.name);
    }
}

#[test]
fn adamw_takes_the_steps_of_the_reference() {
    ten_steps("adamw", OptimizerKind::AdamW);
}

#[test]
fn lion_takes_the_steps_of_the_reference() {
    ten_steps("lion", OptimizerKind::Lion);
}

#[test]
fn sgd_takes_the_steps_of_the_reference() {
    // Its shortest moves are near the rounding of weights of 1.
    steps_within("sgd", OptimizerKind::Sgd(0.95), Precision::F32, 1e-3);
}

#[test]
fn muon_takes_the_steps_of_the_reference() {
    ten_steps("muon", OptimizerKind::Muon(Matrices { momentum: 0.95, rate: 2.0 }));
}

#[test]
fn muonh_takes_the_steps_of_the_reference() {
    ten_steps("muonh", OptimizerKind::MuonH(Matrices { momentum: 0.95, rate: 2.0 }));
}

/// Products that read bf16 give the same step but for what rounding makes of small singular values.
#[test]
fn muon_in_bf16_takes_nearly_the_steps_of_the_reference() {
    let muon = OptimizerKind::Muon(Matrices { momentum: 0.95, rate: 2.0 });
    steps_within("muon", muon, Precision::Bf16, 0.2);
}

/// Every proof holds with states of two bytes, which take half the memory.
#[test]
fn states_in_bf16_keep_every_promise() {
    for optimizer in [OptimizerKind::AdamW, OptimizerKind::Muon(Matrices { momentum: 0.95, rate: 2.0 })] {
        let mut spec = load("tests/goldens/dr_da.yaml");
        (spec.train.optimizer, spec.train.betas) = (optimizer, (0.9, 0.95));
        let bytes = |spec: &Spec| {
            let plan = compile(spec, &Options { batch: 2, sequence: 7, train: true, ..Options::default() });
            let plan = plan.unwrap().plan;
            let of_optimizer = plan.buffers.iter().filter(|b| b.space == Space::Optimizer);
            of_optimizer.map(|b| b.bytes()).sum::<u64>()
        };
        let before = bytes(&spec);
        spec.train.moments = Precision::Bf16;
        assert_eq!(2 * bytes(&spec), before);
        let (only, devices, pipeline) = (&[][..], &[][..], &Compiler);
        let task = Task { spec: &spec, weights: None, seed: 3, only, devices, pipeline, ranks: 1 };
        let report = verify(&task, &mut |_| {}).unwrap();
        assert!(report.holds(), "{report}");
    }
}
