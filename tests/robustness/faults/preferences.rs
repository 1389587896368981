//! Faults in the loss of pairs: its value, and gradients that a model of tokens gives answer by
//! answer, notice each.

use super::{bypass, nodes};
use dreamc_compiler::ir::{Binary, Binding, Function, Module, Op, Unary, Value};
use dreamc_compiler::{Options, Pass, compile_watched};
use dreamc_data::{Batch, NO_LOSS};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_dsl::spec::Dpo;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_runtime::model::{Model, Scale};
use libtest_mimic::Failed;

/// A tensor by name.
type Named = (String, Vec<f32>);

const SPEC: &str = "model m { vocab 256 hidden 16 context 8
  sa = sequence { heads 2 head_size 8 }
  ea = experts { count 4 active 2 intermediate 16 query 8 }
  repeat 2 { sa > ea } }
data { jsonl p.jsonl  prompt q  answer good  rejected bad }
train { precision f32  batch 4  dpo { beta 0.4  smoothing 0.1 } }";

const ROWS: usize = 4;
const TOKENS: usize = 8;

/// A fault in what is read, or in the function that has the loss.
pub struct Fault {
    pub name: &'static str,
    read: fn(&mut Dpo),
    edit: fn(&mut Function) -> bool,
}

fn nothing(_: &mut Function) -> bool {
    true
}

fn reference(f: &Function) -> Option<Value> {
    use dreamc_compiler::bind::Input;
    let at = f.params.iter().position(|p| p.binding == Binding::Batch(Input::Reference))?;
    Some(Value(at as u32))
}

/// The difference that reads the reference, or the one of the two answers before it.
fn difference(f: &Function, of_reference: bool) -> Option<usize> {
    let reference = reference(f)?;
    let all = nodes(f, |op| matches!(op, Op::Binary(Binary::Sub)));
    all.into_iter().rfind(|&i| f.nodes[i].inputs.contains(&reference) == of_reference)
}

pub fn faults() -> Vec<Fault> {
    let edited = |name, edit| Fault { name, read: |_| {}, edit };
    vec![
        Fault { name: "twice the β", read: |dpo| dpo.beta *= 2.0, edit: nothing },
        Fault { name: "smoothing forgotten", read: |dpo| dpo.smoothing = 0.0, edit: nothing },
        edited("the worse answer preferred", |f| {
            let Some(i) = difference(f, false) else { return false };
            f.nodes[i].inputs.reverse();
            true
        }),
        edited("no reference", |f| difference(f, true).is_some_and(|i| bypass(f, i, 0))),
        edited("the reference added", |f| {
            let Some(i) = difference(f, true) else { return false };
            f.nodes[i].op = Op::Binary(Binary::Add);
            true
        }),
        edited("the better answer alone", |f| difference(f, false).is_some_and(|i| bypass(f, i, 1))),
        edited("a sigmoid in the place of its logarithm", |f| {
            let all = nodes(f, |op| matches!(op, Op::Unary(Unary::Softplus)));
            let Some(&i) = all.first() else { return false };
            f.nodes[i].op = Op::Unary(Unary::Sigmoid);
            true
        }),
    ]
}

fn spec() -> Spec {
    check(&parse("spec", SPEC, Spelling::Dream).unwrap(), &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// Two pairs with answers of several lengths.
fn batch() -> Batch {
    let mut batch = Batch::new(TOKENS);
    for (row, length) in [6, 8, 5, 7].into_iter().enumerate() {
        for i in 0..TOKENS {
            let token = |i: usize| ((5 * i * i + 3 * i + 7 * row) % 23) as i32;
            batch.ids.push(token(i));
            batch.targets.push(if (3..length).contains(&i) { token(i + 1) } else { NO_LOSS });
            batch.positions.push(i as i32);
            batch.segments.push(i32::from(i >= length));
        }
    }
    batch.reference = vec![0.7, -1.3];
    batch
}

/// The loss and the gradients of a model of this specification, by one way over all rows.
type Found = (f64, Vec<(String, Vec<f32>)>);

fn load(spec: &Spec, edit: Option<&Fault>) -> Result<(Model, bool), Failed> {
    let options = Options { train: true, batch: ROWS as u64, sequence: TOKENS as u64, ..Options::default() };
    let put = std::cell::Cell::new(false);
    let watch = |pass, _: &mut Module, f: &mut Function| {
        if let (Pass::Lower, Some(fault)) = (pass, edit)
            && reference(f).is_some()
        {
            put.set((fault.edit)(f));
        }
    };
    let compiled = compile_watched(spec, &options, &watch)?.0;
    let mut model = Model::load(&CpuDevice::new(CpuOptions { threads: Some(1) }), compiled)?;
    model.initialise(3)?;
    model.begin_step()?;
    Ok((model, put.get()))
}

fn gradients(model: &Model) -> Result<Vec<(String, Vec<f32>)>, Failed> {
    let mut all = vec![];
    for tensor in model.compiled().tensors.clone() {
        all.extend(model.gradient(&tensor)?.map(|gradient| (tensor.name.clone(), gradient)));
    }
    Ok(all)
}

/// By the loss of pairs.
fn paired(spec: &Spec, fault: Option<&Fault>) -> Result<(Found, bool), Failed> {
    let (mut model, put) = load(spec, fault)?;
    model.backward(&batch(), Scale { loss: 0.5, auxiliary: 0.0 }, None)?;
    Ok(((f64::from(model.loss()?), gradients(&model)?), put))
}

/// By the formulas, from the losses of tokens: each answer goes back by itself.
fn formulas(spec: &Spec) -> Result<Found, Failed> {
    let dpo = spec.train.dpo.ok_or("no preferences")?;
    let mut plain = spec.clone();
    plain.train.dpo = None;
    let (mut model, _) = load(&plain, None)?;
    let batch = batch();
    let nll = model.evaluate(&batch)?;
    let answer = |row: usize| -> f64 {
        let all = (row * TOKENS..(row + 1) * TOKENS).filter(|&i| batch.targets[i] >= 0);
        all.map(|i| f64::from(nll[i])).sum()
    };
    model.begin_step()?;
    let mut loss = 0.0;
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (pair, reference) in batch.reference.iter().enumerate() {
        let z = dpo.beta * (answer(2 * pair + 1) - answer(2 * pair) - f64::from(*reference));
        loss -= 0.5 * ((1.0 - dpo.smoothing) * sigmoid(z).ln() + dpo.smoothing * sigmoid(-z).ln());
        let slope = 0.5 * dpo.beta * (dpo.smoothing * sigmoid(z) - (1.0 - dpo.smoothing) * sigmoid(-z));
        for (side, weight) in [-slope, slope].into_iter().enumerate() {
            let mut own = batch.clone();
            for i in (0..ROWS * TOKENS).filter(|i| i / TOKENS != 2 * pair + side) {
                own.targets[i] = NO_LOSS;
            }
            model.backward(&own, Scale { loss: weight as f32, auxiliary: 0.0 }, None)?;
        }
    }
    Ok((loss, gradients(&model)?))
}

/// Where two ways are apart, if they are.
fn apart((loss, gradients): &Found, (expected, others): &Found) -> Option<String> {
    if (loss - expected).abs() > 1e-5 {
        return Some(format!("the loss is {loss}, not {expected}"));
    }
    let largest = others.iter().flat_map(|(_, g)| g).fold(0f32, |most, x| most.max(x.abs()));
    let differs = |((name, own), (_, other)): (&Named, &Named)| {
        let most = own.iter().zip(other).map(|(x, y)| (x - y).abs()).fold(0f32, f32::max);
        (most > 1e-4 * largest).then(|| format!("the gradient of {name} differs by {most:e}"))
    };
    gradients.iter().zip(others).find_map(differs)
}

/// The loss of pairs is that of the formulas.
pub fn sound() -> Result<(), Failed> {
    let spec = spec();
    let found = paired(&spec, None)?.0;
    if found.1.len() < 10 {
        return Err("gradients are missing".into());
    }
    apart(&found, &formulas(&spec)?).map_or(Ok(()), |why| Err(why.into()))
}

/// How a fault is noticed.
pub fn noticed(fault: &Fault) -> Result<String, Failed> {
    let spec = spec();
    let mut wrong = spec.clone();
    wrong.train.dpo.iter_mut().for_each(fault.read);
    let (found, put) = paired(&wrong, Some(fault))?;
    if !put {
        return Err("was never put in".into());
    }
    apart(&found, &formulas(&spec)?).ok_or_else(|| "is not noticed".into())
}
