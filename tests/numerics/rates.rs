//! Rates that carry from size to size, against the authors' packages `mup`
//! (`tests/reference/mup_values.py`) and `unit-scaling` (`tests/reference/umup_values.py`).

use crate::support::{cpu, load, read};
use dreamc_compiler::compiled::Init;
use dreamc_compiler::{Options, compile};
use dreamc_data::Batch;
use dreamc_dsl::Spec;
use dreamc_runtime::model::{Model, Scale};
use dreamc_runtime::train::prepare::forward;
use dreamc_runtime::train::schedule;
use indexmap::IndexMap;

/// How far the package and dreamc may be apart.
const APART: f64 = 1e-5;

fn deviations(spec: &Spec) -> IndexMap<String, f64> {
    let compiled = compile(spec, &Options { train: true, ..Options::default() }).unwrap();
    let each = compiled.tensors.into_iter().filter_map(|t| match t.init {
        Init::Normal(deviation) => Some((t.name, deviation)),
        _ => None,
    });
    each.collect()
}

/// Initial scales, multipliers, losses and three steps of an MLP and of a transformer.
#[test]
fn the_package_mup_agrees() {
    for name in ["mlp", "transformer"] {
        let spec = load(&format!("tests/goldens/mup/{name}.yaml"));
        let golden = read(&format!("tests/goldens/mup/{name}.safetensors"));
        let number = |key: &str| golden.get(key).map(|t| t.floats()[0]);
        let mut base = spec.clone();
        base.model = spec.train.transfer.as_ref().unwrap().base(&spec.model).model;
        base.train.transfer = None;
        let (here, there) = (deviations(&spec), deviations(&base));
        let mut compared = 0;
        for (tensor, deviation) in &here {
            let theirs = number(&format!("scale.{tensor}"));
            // Queries, keys and values are one tensor here.
            let theirs = theirs.or_else(|| number(&format!("scale.{}", tensor.replace("qkv", "q"))));
            let scale = deviation / there[tensor];
            assert!((scale - theirs.unwrap()).abs() < APART, "{name} {tensor} {scale} {theirs:?}");
            compared += 1;
        }
        assert!(compared >= 8, "{name}");
        if let Some(scale) = number("multiplier.sa") {
            let own = spec.model.components["sa"].attention().unwrap().scale.unwrap();
            // At the base it is 1/sqrt(d); theirs is over that of their package.
            assert!((own / scale - 1.0).abs() < APART, "{own} {scale}");
        }
        three_steps(name, &spec, &golden);
    }
}

/// Deviations of first values, multipliers, losses and three steps of the authors' own MLP and
/// transformer.
#[test]
fn the_package_unit_scaling_agrees() {
    for (name, compared) in [("mlp", 8), ("transformer", 12)] {
        let spec = load(&format!("tests/goldens/umup/{name}.yaml"));
        let golden = read(&format!("tests/goldens/umup/{name}.safetensors"));
        let number = |key: &str| golden.get(key).map(|t| t.floats()[0]);
        let here = deviations(&spec);
        assert_eq!(here.len(), compared, "{name}");
        for (tensor, deviation) in &here {
            let theirs = number(&format!("scale.{tensor}")).unwrap();
            assert!((deviation / theirs - 1.0).abs() < APART, "{name} {tensor} {deviation} {theirs}");
        }
        if let Some(scale) = number("multiplier.sa") {
            let own = spec.model.components["sa"].attention().unwrap().scale.unwrap();
            assert!((own / scale - 1.0).abs() < APART, "{own} {scale}");
        }
        assert!(dreamc_compiler::transfer::findings(&spec).is_empty(), "{name}");
        three_steps(name, &spec, &golden);
    }
}

fn three_steps(name: &str, spec: &Spec, golden: &IndexMap<String, dreamc_compiler::ir::interpret::Tensor>) {
    let ids = &golden["ids"];
    let (rows, n) = (ids.dims[0], ids.dims[1] - 1);
    let options = Options { train: true, ..forward(rows as u64, n as u64) };
    let mut model = Model::load(&cpu(1), compile(spec, &options).unwrap()).unwrap();
    let tensors = model.compiled().tensors.clone();
    for t in &tensors {
        // A package without gains.
        if !golden.contains_key(&format!("before.{}", t.name)) {
            assert!(t.gradient.is_none(), "{}", t.name);
            model.set(&t.name, &vec![1.0; t.shape.iter().product::<u64>() as usize]).unwrap();
            continue;
        }
        let values: Vec<f32> =
            golden[&format!("before.{}", t.name)].floats().iter().map(|&x| x as f32).collect();
        model.set(&t.name, &values).unwrap();
    }
    let part = |from: usize| -> Vec<i32> {
        let rows = ids.floats().chunks(n + 1);
        rows.flat_map(|row| row[from..from + n].iter().map(|&x| x as i32).collect::<Vec<_>>()).collect()
    };
    let mut batch = Batch::new(n);
    (batch.ids, batch.targets) = (part(0), part(1));
    batch.positions = (0..rows).flat_map(|_| 0..n as i32).collect();
    batch.segments = vec![0; rows * n];
    for step in 0..3 {
        model.begin_step().unwrap();
        model.backward(&batch, Scale { loss: 1.0 / (rows * n) as f32, auxiliary: 0.0 }, None).unwrap();
        let (loss, theirs) = (f64::from(model.loss().unwrap()), golden["losses"].floats()[step]);
        assert!((loss - theirs).abs() < APART * theirs, "{name}, step {step}: {loss} {theirs}");
        model.norm().unwrap();
        model.update(&schedule::scalars(&spec.train, step as u64 + 1)).unwrap();
    }
    for t in tensors.iter().filter(|t| t.gradient.is_some()) {
        let theirs = golden[&format!("after.{}", t.name)].floats();
        let found = model.get(&t.name).unwrap();
        let off = found.iter().zip(theirs).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(off < APART, "{name} {}: {off}", t.name);
    }
}
