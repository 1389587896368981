//! Matmuls in fp8, forward and back, are those of `tests/reference/fp8.py`.

use dreamc_compiler::autodiff::{Seed, differentiate};
use dreamc_compiler::ir::{Binding, DType, Dim, Function, Module, Op, Tensor, Type, interpret};
use dreamc_compiler::op::{Cast, Contract, Grouped};
use dreamc_compiler::precision::{Narrow, narrow};
use smallvec::smallvec;
use std::collections::HashMap;

/// The reference's results: by name, numbers at places.
fn golden() -> HashMap<String, Vec<(usize, f64)>> {
    let mut all: HashMap<String, Vec<(usize, f64)>> = HashMap::new();
    for line in include_str!("../../tests/goldens/formats/fp8.txt").lines() {
        let [name, at, number] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let number = f64::from_bits(u64::from_str_radix(number, 16).unwrap());
        all.entry(name.into()).or_default().push((at.parse().unwrap(), number));
    }
    all
}

/// The numbers that the reference makes, too.
fn numbers(rows: u64, columns: u64, seed: u64) -> Vec<f64> {
    let made = |i: u64| ((i * 2_654_435_761 + seed * 40503) % (1 << 32) % 2001) as f64 - 1000.0;
    let number = |i: u64| {
        let (r, c) = (i / columns, i % columns);
        made(i) * (-10.0 - (r % 5 * 4 + c / 40 % 4 * 4) as f64).exp2()
    };
    (0..rows * columns).map(number).collect()
}

/// The function with its derivative, narrowed.
fn narrowed(module: &mut Module, f: &Function) -> Function {
    let joint = differentiate(module, f, &[("y", Seed::Param)], &|p| p.name == "x" || p.name == "w").unwrap();
    narrow(module, &joint, Narrow::Fp8, &|_| DType::F32, &|_| false).unwrap()
}

/// Results that are not those of the reference.
fn apart(name: &str, module: &Module, g: &Function, inputs: &[Tensor]) -> Vec<String> {
    let found = interpret(module, g, inputs).unwrap();
    let golden = golden();
    let mut other = vec![];
    for (result, reference) in [("y", "y"), ("d.x", "dx"), ("d.w", "dw")] {
        let found = &found.iter().find(|(name, _)| name == result).unwrap().1;
        let expected = &golden[&format!("{name}.{reference}")];
        let largest = expected.iter().map(|(_, x)| x.abs()).fold(0.0, f64::max);
        let same = |(at, expected): &(usize, f64)| (found.floats()[*at] - expected).abs() <= 1e-12 * largest;
        if !expected.iter().all(same) {
            other.push(result.to_string());
        }
    }
    other
}

/// All results are those of the reference, and are no longer where one operand is not rounded, or
/// by tiles of another shape.
fn compare(name: &str, module: &mut Module, f: &Function, inputs: &[Tensor]) {
    let g = narrowed(module, f);
    assert_eq!(apart(name, module, &g, inputs), Vec::<String>::new());
    let rounded: Vec<usize> = (0..g.nodes.len()).filter(|&n| matches!(g.nodes[n].op, Op::Fp8(_))).collect();
    // Rows of the input and of the cotangent, columns of both, and the weight once for both ways.
    assert_eq!(rounded.len(), 5, "{}", module.show_function(&g));
    for n in rounded {
        let mut unrounded = g.clone();
        unrounded.nodes[n].op = Cast(DType::Bf16).into();
        unrounded.nodes[n].inputs.truncate(1);
        assert!(!apart(name, module, &unrounded, inputs).is_empty(), "node {n} is not rounded");
        let mut turned = g.clone();
        let Op::Fp8(tiles) = &mut turned.nodes[n].op else { panic!("{n}") };
        tiles.tile = if tiles.tile == [128, 128] { [1, 128] } else { [128, 128] };
        assert!(!apart(name, module, &turned, inputs).is_empty(), "node {n} has other tiles");
    }
}

fn dims<const N: usize>(module: &mut Module, dims: [(&str, u64); N]) -> [Dim; N] {
    dims.map(|(name, size)| module.dim(name, size))
}

#[test]
fn a_matmul_is_the_references() {
    let mut module = Module::default();
    let [b, t, i, o] = dims(&mut module, [("batch", 2), ("seq", 70), ("i", 130), ("o", 150)]);
    let mut f = Function::new("f".to_string());
    let x = f.param("x", Binding::Value, Type::f32(&[b, t, i]));
    let w = f.param("w", Binding::Weight, Type::f32(&[o, i]));
    let y = f.add(&module, Contract { over: smallvec![i] }, &[x, w]).unwrap()[0];
    f.results = vec![("y".into(), y)];
    let inputs = [
        Tensor::float(&[2, 70, 130], numbers(140, 130, 1)),
        Tensor::float(&[150, 130], numbers(150, 130, 2)),
        Tensor::float(&[2, 70, 150], numbers(140, 150, 3)),
    ];
    compare("dense", &mut module, &f, &inputs);
}

#[test]
fn a_matmul_of_groups_is_the_references() {
    let mut module = Module::default();
    let sizes = [("batch", 2), ("s", 260), ("i", 130), ("o", 20), ("e", 3), ("e1", 4)];
    let [_, s, i, o, e, ends] = dims(&mut module, sizes);
    let mut f = Function::new("f".to_string());
    let x = f.param("x", Binding::Value, Type::f32(&[s, i]));
    let w = f.param("w", Binding::Weight, Type::f32(&[e, o, i]));
    let offsets = f.param("offsets", Binding::Value, Type::i32(&[ends]));
    let y = f.add(&module, Grouped { over: i }, &[x, w, offsets]).unwrap()[0];
    f.results = vec![("y".into(), y)];
    let inputs = [
        Tensor::float(&[260, 130], numbers(260, 130, 4)),
        Tensor::float(&[3, 20, 130], (0..3).flat_map(|e| numbers(20, 130, 5 + e)).collect()),
        Tensor::int(&[4], vec![0, 100, 100, 240]),
        Tensor::float(&[260, 20], numbers(260, 20, 9)),
    ];
    compare("grouped", &mut module, &f, &inputs);
}
