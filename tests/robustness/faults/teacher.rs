//! Faults in what a teacher gives a step: losses in f64, made of both models' own values, notice
//! each. Gradients are those of differences.

use dreamc_compiler::probe::Probe;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Options, compile};
use dreamc_data::{Batch, Tokenizer};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::{Spec, Spelling, check, parse, show};
use dreamc_runtime::analysis::probe::Probing;
use dreamc_runtime::checkpoint::safetensors::write;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare::forward;
use dreamc_runtime::train::teacher::{Plan, Teacher, own_loss};
use libtest_mimic::Failed;
use std::fs::File;
use std::io::BufWriter;

const ROWS: u64 = 2;
const TOKENS: u64 = 6;
const VOCAB: usize = 13;

/// Steps of the three stages: layers, logits, none.
const STEPS: [u64; 3] = [1, 4, 8];

/// A fault in what a step was given.
pub struct Fault {
    pub name: &'static str,
    step: u64,
    edit: fn(&Model),
}

pub fn faults() -> Vec<Fault> {
    vec![
        Fault {
            name: "the square of the temperature is forgotten",
            step: 4,
            edit: |m| weigh(m, "head.logits", 0.25),
        },
        Fault { name: "weights of a stage are ignored", step: 1, edit: |m| weigh(m, "layers", 2.0) },
        Fault {
            name: "tokens without a target count in the mean",
            step: 4,
            edit: |m| weigh(m, "head.logits", 9.0 / 12.0),
        },
        Fault { name: "one layer alone is matched", step: 1, edit: |m| weigh(m, "layers.1", 0.0) },
        Fault { name: "the loss of a stage goes on behind it", step: 8, edit: |m| set(m, "layers.0", 1.0) },
        Fault { name: "logits of the model are not softened", step: 4, edit: sharpen },
        Fault { name: "values of another row", step: 1, edit: |m| rotate(m, "layers.0") },
        Fault { name: "probabilities of the token before", step: 4, edit: |m| rotate(m, "head.logits") },
        Fault { name: "kept values of a row are given to another", step: 1, edit: |m| swap(m, "layers.1") },
        Fault {
            name: "kept probabilities of a row are given to another",
            step: 4,
            edit: |m| swap(m, "head.logits"),
        },
        Fault { name: "a stage that is over is matched on", step: 4, edit: |m| set(m, "layers.1", 0.5) },
    ]
}

/// Multiplies the weights of values whose names begin so.
fn weigh(model: &Model, name: &str, by: f32) {
    for taught in model.compiled().taught.iter().filter(|taught| taught.point.name.starts_with(name)) {
        let mut weight = [0f32];
        let mut session = model.session();
        session.read_at(taught.weight, taught.instance, 0, &mut weight).unwrap();
        session.write_at(taught.weight, taught.instance, 0, &[weight[0] * by]).unwrap();
    }
}

fn set(model: &Model, name: &str, weight: f32) {
    for taught in model.compiled().taught.iter().filter(|taught| taught.point.name.starts_with(name)) {
        model.session().write_at(taught.weight, taught.instance, 0, &[weight]).unwrap();
    }
}

fn sharpen(model: &Model) {
    for taught in &model.compiled().taught {
        if let Some(buffer) = taught.sharpness {
            model.session().write_at(buffer, taught.instance, 0, &[1f32]).unwrap();
        }
    }
}

fn rotate(model: &Model, name: &str) {
    turn(model, name, |shape| shape[2] as usize);
}

/// Half of the rows in the place of the others.
fn swap(model: &Model, name: &str) {
    turn(model, name, |shape| (shape.iter().product::<u64>() / 2) as usize);
}

fn turn(model: &Model, name: &str, by: fn(&[u64]) -> usize) {
    for taught in model.compiled().taught.iter().filter(|taught| taught.point.name.starts_with(name)) {
        let shape = &taught.point.shape;
        let mut values = vec![0f32; shape.iter().product::<u64>() as usize];
        let mut session = model.session();
        session.read_at(taught.values, taught.instance, 0, &mut values).unwrap();
        values.rotate_right(by(shape));
        session.write_at(taught.values, taught.instance, 0, &values).unwrap();
    }
}

fn cpu() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(1) })
}

fn spec(text: &str) -> Spec {
    check(&parse("spec", text, Spelling::Dream).unwrap(), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

const MODEL: &str = "vocab 13 hidden 8 context 8 sa = sequence { heads 2 kv_heads 1 head_size 4 } \
                     mlp = mlp { intermediate 12 }";

/// Four layers teach a loop of two, twice.
fn models(teacher: &str) -> [Spec; 2] {
    let heal = format!(
        "heal {{ teacher \"{teacher}\" stages [{{ match layers weight 0.5 steps 3 }}, \
         {{ match logits temperature 2 top 5 loss 0.25 steps 4 }}] }}"
    );
    [
        spec(&format!("model teacher {{ {MODEL} repeat 4 {{ sa > mlp }} }}\ntrain {{ precision f32 }}")),
        spec(&format!(
            "{heal}\nmodel m {{ {MODEL} repeat 2 {{ sa > mlp }} }}\ntrain {{ steps 10 sequence 6 precision f32 }}"
        )),
    ]
}

fn batch() -> Batch {
    let all = (ROWS * TOKENS) as i32;
    let mut batch = Batch::new(TOKENS as usize);
    batch.ids = (0..all).map(|i| (i * 7 + 3) % VOCAB as i32).collect();
    // Three of them have no target.
    batch.targets = (0..all).map(|i| if i % 4 == 1 { -1 } else { (i * 5 + 1) % VOCAB as i32 }).collect();
    batch.positions = (0..all).map(|i| i % TOKENS as i32).collect();
    batch.segments = vec![0; all as usize];
    batch.bytes = vec![1; all as usize];
    batch
}

/// Logits and streams after the layers, of the weights of another model or of a seed.
fn values(spec: &Spec, weights: &[(String, Vec<f32>)]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let probe = Probe { captured: vec!["layers.*.out".into()], patched: vec![] };
    let options = Options { logits: true, probe, rewrite: Rewriting::off(), ..forward(ROWS, TOKENS) };
    let mut model = Model::load(&cpu(), compile(spec, &options).unwrap()).unwrap();
    for (name, values) in weights {
        model.set(name, values).unwrap();
    }
    let mut probing = Probing::new(model).unwrap();
    probing.model().evaluate(&batch()).unwrap();
    let names: Vec<String> = probing.captured().map(|probed| probed.point.name.clone()).collect();
    let streams = names.iter().filter(|name| name.split('.').count() == 3);
    let streams = streams.map(|name| probing.value(name).unwrap()).collect();
    (probing.model().all_logits().unwrap(), streams)
}

fn weights(model: &Model) -> Vec<(String, Vec<f32>)> {
    model.entries().iter().map(|(name, _)| (name.clone(), model.get(name).unwrap())).collect()
}

/// A model of random weights in a file.
fn file(spec: &Spec, folder: &std::path::Path) -> (std::path::PathBuf, Vec<(String, Vec<f32>)>) {
    let mut model = Model::load(&cpu(), compile(spec, &forward(1, 1)).unwrap()).unwrap();
    model.initialise(7).unwrap();
    let (entries, all) = (model.entries(), weights(&model));
    let text = show(spec, Spelling::Yaml);
    let path = folder.join("teacher.safetensors");
    let mut out = BufWriter::new(File::create(&path).unwrap());
    write(&mut out, &[("format", "dreamc"), ("spec", &text)], &entries, |i| Ok(all[i].1.clone())).unwrap();
    drop(out);
    (path, all)
}

/// Logarithms of the probabilities of logits.
fn softmax(z: &[f64]) -> Vec<f64> {
    let largest = z.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = z.iter().map(|z| (z - largest).exp()).sum();
    z.iter().map(|z| z - largest - sum.ln()).collect()
}

/// `KL(p, q)` of the likeliest tokens of one and all of the other.
fn divergence(teacher: &[f64], own: &[f64], top: usize) -> f64 {
    let mut order = teacher.to_vec();
    order.sort_by(|a, b| b.total_cmp(a));
    let kept: Vec<usize> = (0..teacher.len()).filter(|t| teacher[*t] >= order[top - 1]).collect();
    let p = softmax(&kept.iter().map(|t| teacher[*t]).collect::<Vec<_>>());
    let q = softmax(own);
    kept.iter().zip(p).map(|(t, p)| p.exp() * (p - q[*t])).sum()
}

/// `kl_div(log_softmax(s / 2), softmax(t / 2), reduction="batchmean") * 4` of PyTorch 2, of
/// `t = 2 sin(3r + i)` and `s = 2 cos(5r + 2i)` for `r < 3`, `i < 7`.
pub fn agrees_with_pytorch() -> Result<(), Failed> {
    const PYTORCH: f64 = 1.868_495_904_758_736_6;
    let row = |r: usize, of: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
        (0..7).map(|i| of(r as f64, i as f64)).collect()
    };
    let each = (0..3).map(|r| {
        let teacher = row(r, &|r, i| (3.0 * r + i).sin());
        divergence(&teacher, &row(r, &|r, i| (5.0 * r + 2.0 * i).cos()), 7)
    });
    let found = 4.0 * each.sum::<f64>() / 3.0;
    match (found - PYTORCH).abs() < 1e-12 {
        true => Ok(()),
        false => Err(format!("{found}, PyTorch says {PYTORCH}").into()),
    }
}

/// The losses of a step by their formulas: of the data, and of the teacher.
fn formulas(
    spec: &Spec,
    step: u64,
    own: &(Vec<f32>, Vec<Vec<f32>>),
    theirs: &(Vec<f32>, Vec<Vec<f32>>),
) -> f64 {
    let batch = batch();
    let learned: Vec<usize> = (0..batch.ids.len()).filter(|i| batch.targets[*i] >= 0).collect();
    let row = |all: &[f32], i: usize, by: f64| -> Vec<f64> {
        all[i * VOCAB..(i + 1) * VOCAB].iter().map(|z| f64::from(*z) / by).collect()
    };
    let mean = |of: &dyn Fn(usize) -> f64| learned.iter().map(|i| of(*i)).sum::<f64>() / learned.len() as f64;
    let nll = mean(&|i| -softmax(&row(&own.0, i, 1.0))[batch.targets[i] as usize]);
    let stage = spec.heal.as_ref().unwrap().stage(step);
    let Some(stage) = stage else { return nll };
    let mut loss = stage.loss * nll;
    if stage.matches[0].to == "logits" {
        loss += 4.0 * mean(&|i| divergence(&row(&theirs.0, i, 2.0), &row(&own.0, i, 2.0), 5));
    } else {
        // The last layer of two is that of four, the first the second.
        for (own, theirs) in own.1.iter().zip([&theirs.1[1], &theirs.1[3]]) {
            let wide = own.len() / batch.ids.len();
            loss += 0.5
                * mean(&|i| {
                    let each = own[i * wide..(i + 1) * wide].iter().zip(&theirs[i * wide..(i + 1) * wide]);
                    each.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / wide as f64
                });
        }
    }
    loss
}

/// A student and its teacher.
struct Class {
    spec: Spec,
    student: Model,
    teacher: Teacher,
    theirs: (Vec<f32>, Vec<Vec<f32>>),
    _folder: tempfile::TempDir,
}

impl Class {
    fn new() -> Class {
        let folder = tempfile::tempdir().unwrap();
        let [teacher, _] = models("runs/t");
        let (path, weights) = file(&teacher, folder.path());
        let theirs = values(&teacher, &weights);
        let [_, spec] = models(&path.to_string_lossy());
        let plan = Plan::of(&spec, ROWS, &cpu(), &Rewriting::default()).unwrap().unwrap();
        let options = Options { train: true, taught: plan.taught(), ..forward(ROWS, TOKENS) };
        let mut student = Model::load(&cpu(), compile(&spec, &options).unwrap()).unwrap();
        student.initialise(3).unwrap();
        let teacher = Teacher::load(plan, &spec, &cpu(), &Tokenizer::bytes()).unwrap();
        Class { spec, student, teacher, theirs, _folder: folder }
    }

    /// The loss of a step, with a fault.
    fn loss(&mut self, step: u64, edit: &dyn Fn(&Model)) -> f64 {
        let (batch, targets) = (batch(), batch().learned());
        let given = self.teacher.give(&mut self.student, &batch, (step, targets)).unwrap();
        edit(&self.student);
        self.student.begin_step().unwrap();
        let scale = Scale { loss: own_loss(&self.spec, step) / targets as f32, auxiliary: 1.0 };
        self.student.backward(&batch, scale, None).unwrap();
        let taught = self.student.taught().unwrap().unwrap_or(0.0);
        f64::from(self.student.loss().unwrap()) + f64::from(taught) + given.constant
    }

    fn expected(&self, step: u64) -> f64 {
        formulas(&self.spec, step, &values(&self.spec, &weights(&self.student)), &self.theirs)
    }
}

/// The fault changes the loss, which is that of the formulas without it.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    let mut class = Class::new();
    let expected = class.expected(fault.step);
    let (right, wrong) = (class.loss(fault.step, &|_| {}), class.loss(fault.step, &fault.edit));
    if (right - expected).abs() > 1e-5 * expected.abs() {
        return Err(format!("without a fault the loss is {right}, the formulas say {expected}").into());
    }
    match (wrong - expected).abs() > 1e-3 * expected.abs() {
        true => Ok(format!("teacher: the loss is {wrong:.4}, not {expected:.4}")),
        false => Err(format!("not noticed: {wrong} for {expected}").into()),
    }
}

/// Losses of all stages are those of formulas, and gradients those of differences along them.
pub fn sound() -> Result<(), Failed> {
    let mut class = Class::new();
    for step in STEPS {
        let (found, expected) = (class.loss(step, &|_| {}), class.expected(step));
        if (found - expected).abs() > 1e-5 * expected.abs() {
            return Err(format!("step {step}: {found}, the formulas say {expected}").into());
        }
        // The gradient so far is the sum of the steps before: this step's alone is its difference.
        class.student.drop_step().unwrap();
        class.loss(step, &|_| {});
        let tensors = class.student.compiled().tensors.clone();
        let gradients: Vec<_> = tensors
            .iter()
            .filter_map(|t| Some((t.name.clone(), class.student.gradient(t).unwrap()?)))
            .collect();
        let norm = gradients.iter().flat_map(|(_, g)| g).map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let start = weights(&class.student);
        let moved = |by: f64| -> f64 {
            let at = start.iter().map(|(name, values)| {
                let gradient = gradients.iter().find(|(other, _)| other == name).map(|(_, g)| g);
                let values = values.iter().enumerate().map(|(i, x)| {
                    let slope = gradient.map_or(0.0, |g| f64::from(g[i]));
                    (f64::from(*x) + by * slope / norm) as f32
                });
                (name.clone(), values.collect())
            });
            formulas(&class.spec, step, &values(&class.spec, &at.collect::<Vec<_>>()), &class.theirs)
        };
        let slope = (moved(1e-2) - moved(-1e-2)) / 2e-2;
        if (slope / norm - 1.0).abs() > 5e-3 {
            return Err(format!("step {step}: the slope is {slope}, the gradient {norm}").into());
        }
        class.student.drop_step().unwrap();
    }
    Ok(())
}
