//! A golden model on a device.

use super::Golden;
use dreamc_compiler::program::{BufferId, ProgramKey};
use dreamc_compiler::{Compiled, Options, compile};
use dreamc_device::{Device, Element, Group, RunStats, Session};
use indexmap::IndexMap;

/// Training `b` sequences of `n` tokens, with logits.
pub fn options(b: usize, n: usize) -> Options {
    Options { batch: b as u64, sequence: n as u64, train: true, logits: true, ..Options::default() }
}

pub struct Run {
    pub compiled: Compiled,
    pub session: Box<dyn Session>,
}

impl Run {
    pub fn new(golden: &Golden, options: &Options, device: &dyn Device) -> Self {
        let compiled = compile(&golden.spec, options).unwrap();
        let session =
            device.load(&compiled.plan, &Group::alone()).unwrap_or_else(|e| panic!("{}: {e}", golden.name));
        let mut run = Run { compiled, session };
        for tensor in run.compiled.tensors.clone() {
            let values = golden.tensors[&format!("weights.{}", tensor.name)].floats();
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            run.session.write_at(tensor.weight, tensor.instance, 0, &values).unwrap();
        }
        run
    }

    /// Writes a buffer, where the plan has it.
    pub fn write<T: Element>(&mut self, name: &str, values: &[T]) {
        if let Some(id) = self.compiled.plan.find(name) {
            self.session.write_at(id, 0, 0, values).unwrap();
        }
    }

    pub fn read(&self, name: &str) -> Vec<f64> {
        let id = self.compiled.plan.find(name).unwrap_or_else(|| panic!("no buffer {name}"));
        self.session.read_all::<f32>(id).unwrap().into_iter().map(f64::from).collect()
    }

    pub fn run(&mut self, program: ProgramKey) -> RunStats {
        self.session.run(program).unwrap_or_else(|e| panic!("{program}: {e}"))
    }

    /// Says of every cache of processed tokens that nothing is in it.
    pub fn empty_caches(&mut self) {
        for (i, b) in self.compiled.plan.buffers.iter().enumerate() {
            if b.name.ends_with(".cached") {
                let none = vec![-1; (b.elements() * b.instances) as usize];
                self.session.write_at(BufferId(i as u32), 0, 0, &none).unwrap();
            }
        }
    }

    /// Loss and gradients of a batch, added to what is there.
    pub fn backward(&mut self, golden: &Golden, ids: &[i32], b: usize, n: usize) -> f64 {
        self.program(ProgramKey::BACKWARD, golden, ids, b, n)
    }

    /// Runs a program on a batch; gives its loss, of routers too.
    pub fn program(&mut self, program: ProgramKey, golden: &Golden, ids: &[i32], b: usize, n: usize) -> f64 {
        let (inputs, targets) = golden.batch(ids, n);
        self.write("ids", &inputs);
        self.write("targets", &targets);
        self.write("positions", &(0..b * n).map(|i| (i % n) as i32).collect::<Vec<_>>());
        self.write("loss_scale", &[1.0 / (b * n) as f32]);
        self.write("aux_scale", &[1.0f32]);
        self.write("loss", &[0.0f32]);
        self.write("aux", &[0.0f32]);
        self.run(program);
        self.read("loss")[0] + self.compiled.plan.find("aux").map_or(0.0, |_| self.read("aux")[0])
    }

    pub fn step(&mut self, golden: &Golden, ids: &[i32], b: usize, n: usize, step: i32) -> f64 {
        let train = &golden.spec.train;
        let loss = self.backward(golden, ids, b, n);
        let rate = train.learning_rate * ((step + 1) as f64 / train.warmup as f64).min(1.0);
        let correct = |beta: f64| 1.0 / (1.0 - beta.powi(step + 1));
        let clip = train.clip.unwrap_or(f64::INFINITY);
        let scalars = [
            ("learning_rate", rate),
            ("first_correction", correct(train.betas.0)),
            ("second_correction", correct(train.betas.1)),
            ("clip", clip),
        ];
        for (name, value) in scalars {
            self.write(name, &[value as f32]);
        }
        self.run(ProgramKey::NORM);
        self.run(ProgramKey::UPDATE);
        loss
    }

    pub fn gradients(&self) -> Vec<(String, Vec<f64>)> {
        let with_gradient = self.compiled.tensors.iter().filter_map(|t| t.gradient.map(|g| (t, g)));
        with_gradient.map(|(t, g)| (t.name.clone(), self.instance(g, t.instance, &t.shape))).collect()
    }

    pub fn tensors(&self) -> IndexMap<String, Vec<f64>> {
        let read = |t: &dreamc_compiler::compiled::Tensor| self.instance(t.weight, t.instance, &t.shape);
        self.compiled.tensors.iter().map(|t| (t.name.clone(), read(t))).collect()
    }

    fn instance(&self, buffer: BufferId, instance: u64, shape: &[u64]) -> Vec<f64> {
        let mut values = vec![0.0f32; shape.iter().product::<u64>() as usize];
        self.session.read_at(buffer, instance, 0, &mut values).unwrap();
        values.into_iter().map(f64::from).collect()
    }
}
