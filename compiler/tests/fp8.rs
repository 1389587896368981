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

/// Stored in e4m3 the operands of all three matmuls are the same numbers, summed along their rows;
/// sizes that have no place there are stored in bf16.
#[test]
fn what_is_stored_in_e4m3_is_the_same() {
    for (sizes, expected) in [
        // Tokens are too few for the weight's gradient, or all sums are of whole tiles.
        ([2, 72, 128, 256], [true, true, false]),
        ([2, 64, 128, 256], [true; 3]),
        ([2, 64, 128, 136], [false; 3]),
    ] {
        let mut module = Module::default();
        let [batch, seq, inner, out] = sizes;
        let [b, t, i, o] = dims(&mut module, [("batch", batch), ("seq", seq), ("i", inner), ("o", out)]);
        let mut f = Function::new("f".to_string());
        let x = f.param("x", Binding::Value, Type::f32(&[b, t, i]));
        let w = f.param("w", Binding::Weight, Type::f32(&[o, i]));
        let y = f.add(&module, Contract { over: smallvec![i] }, &[x, w]).unwrap()[0];
        f.results = vec![("y".into(), y)];
        let tensor = |rows: &[u64], columns: u64, seed| {
            let shape: Vec<usize> = rows.iter().chain([&columns]).map(|n| *n as usize).collect();
            Tensor::float(&shape, numbers(rows.iter().product(), columns, seed))
        };
        let inputs =
            [tensor(&[batch, seq], inner, 1), tensor(&[out], inner, 2), tensor(&[batch, seq], out, 3)];
        let joint =
            differentiate(&mut module, &f, &[("y", Seed::Param)], &|p| p.name == "x" || p.name == "w")
                .unwrap();
        let of = |how| narrow(&module, &joint, how, &|_| DType::F32, &|_| false).unwrap();
        let (rounded, codes) = (of(Narrow::Fp8), of(Narrow::E4m3));
        for (result, expected) in ["y", "d.x", "d.w"].into_iter().zip(expected) {
            let mut v = codes.results.iter().find(|(port, _)| port.name == result).unwrap().1;
            // The result of a matmul may be a cast of it.
            let matmul = loop {
                let node = codes.nodes.iter().find(|node| node.results().any(|r| r == v)).unwrap();
                match node.op {
                    Op::Contract(_) => break node,
                    _ => v = node.inputs[0],
                }
            };
            let coded = matmul.inputs.iter().all(|v| codes.ty(*v).dtype == DType::E4m3);
            assert_eq!(coded, expected, "{result} of {sizes:?}\n{}", module.show_function(&codes));
        }
        let [a, c] = [&rounded, &codes].map(|g| interpret(&module, g, &inputs).unwrap());
        for ((name, a), (_, c)) in a.iter().zip(&c) {
            let largest = a.floats().iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let same = a.floats().iter().zip(c.floats()).all(|(a, c)| (a - c).abs() <= 1e-12 * largest);
            assert!(same, "{name} of {sizes:?}");
        }
    }
}
