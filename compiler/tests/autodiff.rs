//! Derivatives against finite differences, in f64: every operation, and the groups that only occur
//! together.

use dreamc_compiler::autodiff::{Seed, differentiate, partition};
use dreamc_compiler::build::Builder;
use dreamc_compiler::ir::interpret::{Data, Tensor, interpret};
use dreamc_compiler::ir::random::{Rng, table};
use dreamc_compiler::ir::{Binding, Function, Module, Op, Type, verify_function};
use dreamc_compiler::op::chosen::ABSENT;
use dreamc_compiler::op::{Group, Grouped, Route};
use indexmap::IndexMap;

/// Operations that no derivative is taken of: gradients themselves, and what carries none.
const NONE: [&str; 31] = [
    "floor",
    "numbers",
    "append",
    "shift_state",
    "by_head",
    "constant",
    "conv_grad",
    "recurrence_grad",
    "linear_attention_grad",
    "zeros",
    "stop_gradient",
    "positive",
    "route",
    "group",
    "add_counts",
    "silu_grad",
    "gelu_grad",
    "rms_grad",
    "softmax_grad",
    "grouped_outer",
    "combine_grad",
    "combine_gates",
    "attention_grad",
    "depth_attention_grad",
    "read_sources_grad",
    "embed_grad",
    "cross_entropy_grad",
    "head_loss_grad",
    "largest",
    "key_mass",
    "key_scores_grad",
];

fn floats(t: &Tensor) -> bool {
    matches!(t.data, Data::Float(_))
}

/// `Σ weight · result` over the float results that `keep` names.
fn objective(module: &Module, f: &Function, args: &[Tensor], weights: &IndexMap<String, Vec<f64>>) -> f64 {
    let results = interpret(module, f, args).unwrap();
    // The score of a key that is not there is a constant in which differences of others are lost.
    let there = |x: &f64| *x > ABSENT;
    results
        .iter()
        .filter_map(|(n, t)| {
            let terms = |w: &Vec<f64>| {
                let all = w.iter().zip(t.floats()).filter(|(_, x)| there(x));
                all.map(|(a, b)| a * b).sum::<f64>()
            };
            weights.get(n).map(terms)
        })
        .sum()
}

/// Compares the derivative of a function with finite differences; the largest relative error.
fn check(
    module: &Module,
    f: &Function,
    args: &[Tensor],
    seeded: &[&str],
    rng: &mut Rng,
    split: bool,
) -> Result<f64, String> {
    let mut module = module.clone();
    let seeds: Vec<(&str, Seed)> = seeded.iter().map(|n| (*n, Seed::Param)).collect();
    let joint = differentiate(&mut module, f, &seeds, &|p| !p.name.starts_with("fixed"))
        .map_err(|e| e.to_string())?;
    verify_function(&module, &joint).map_err(|e| e.to_string())?;
    let mut weights = IndexMap::new();
    for name in seeded {
        let n = module.elements(&f.ty(f.find_result(name).unwrap()).dims);
        weights.insert(name.to_string(), (0..n).map(|_| rng.between(-1.0, 1.0)).collect::<Vec<f64>>());
    }
    let value = |g: &Function, more: &IndexMap<String, Tensor>| -> Vec<Tensor> {
        g.params
            .iter()
            .enumerate()
            .map(|(i, p)| {
                if let Some(v) = f.find_param(&p.name) {
                    return args[v.index()].clone();
                }
                let result = p.name.strip_prefix("d.").unwrap_or_default();
                match weights.get(result) {
                    Some(w) => Tensor { data: Data::Float(w.clone()), ..Tensor::zeros(&module, &g.types[i]) },
                    None => more[&p.name].clone(),
                }
            })
            .collect()
    };
    let results: IndexMap<String, Tensor> = if split {
        let (front, back) = partition(&module, &joint, f);
        verify_function(&module, &front).map_err(|e| e.to_string())?;
        verify_function(&module, &back).map_err(|e| e.to_string())?;
        let saved: IndexMap<String, Tensor> =
            interpret(&module, &front, &value(&front, &IndexMap::new())).unwrap().into_iter().collect();
        // State that the forward updated is what the way back finds in its place.
        let mut given = value(&back, &saved);
        for (i, p) in back.params.iter().enumerate() {
            if matches!(p.binding, Binding::State(_)) && saved.contains_key(&p.name) {
                given[i] = saved[&p.name].clone();
            }
        }
        interpret(&module, &back, &given).unwrap().into_iter().collect()
    } else {
        interpret(&module, &joint, &value(&joint, &IndexMap::new())).unwrap().into_iter().collect()
    };
    let mut worst = 0.0f64;
    for (k, p) in f.params.iter().enumerate() {
        if !floats(&args[k]) || p.name.starts_with("fixed") {
            continue;
        }
        let gradient = results[&format!("d.{}", p.name)].floats().to_vec();
        let scale = gradient.iter().fold(1e-3f64, |m, x| m.max(x.abs()));
        for i in 0..gradient.len() {
            let h = 1e-5;
            let moved = |delta: f64| {
                let mut args = args.to_vec();
                if let Data::Float(data) = &mut args[k].data {
                    data[i] += delta;
                }
                objective(&module, f, &args, &weights)
            };
            let numeric = (moved(h) - moved(-h)) / (2.0 * h);
            worst = worst.max((numeric - gradient[i]).abs() / scale.max(numeric.abs()));
        }
    }
    Ok(worst)
}

#[test]
fn every_operation_has_its_derivative() {
    let mut checked = 0;
    for entry in table() {
        for seed in 0..4 {
            let instance = entry.instance(seed);
            let name = instance.op().name();
            // Gather and Combine find their inverse at the `group` they come from: see below.
            if NONE.contains(&name)
                || matches!(instance.op(), Op::Gather | Op::Combine | Op::Cast(_) | Op::Fp8(_))
            {
                continue;
            }
            let f = &instance.function;
            // Nothing is trained through a state of decoding.
            if f.find_param("slots").is_some() {
                continue;
            }
            // The log-sum of attention and cross-entropy is for their own gradient.
            let seeded: Vec<&str> = f
                .results
                .iter()
                .enumerate()
                .filter(|(i, (_, v))| {
                    f.ty(*v).dtype.is_float()
                        && (*i == 0 || matches!(instance.op(), Op::Split(_) | Op::Recurrence(_)))
                })
                .map(|(_, (p, _))| p.name.as_str())
                .collect();
            let mut rng = Rng::new(seed + 100);
            let e = match check(&instance.module, f, &instance.args, &seeded, &mut rng, false) {
                // Contractions that would need a transposition are refused, loudly; lowering makes
                // none.
                Err(e) if name == "contract" && e.contains("transposition") => continue,
                other => other.unwrap_or_else(|e| panic!("{name} seed {seed}: {e}")),
            };
            checked += 1;
            assert!(e < 1e-6, "{name} seed {seed}: derivative off by {e}");
        }
    }
    assert!(checked > 100, "only {checked} derivatives were checked");
}

#[test]
fn operations_without_a_derivative_say_so() {
    for entry in table() {
        let instance = entry.instance(0);
        let f = &instance.function;
        let name = instance.op().name();
        let others = matches!(instance.op(), Op::GroupedOuter(_) | Op::CombineGates | Op::ByHead(_));
        if !name.ends_with("_grad") && !others {
            continue;
        }
        if matches!(instance.op(), Op::PickGrad(_)) {
            continue;
        }
        let seeds = [(f.results[0].0.name.as_str(), Seed::Param)];
        let e = differentiate(&mut instance.module.clone(), f, &seeds, &|_| true).unwrap_err();
        assert!(e.to_string().contains("no derivative"), "{name}: {e}");
    }
}

/// A small mixture of networks: routing, groups, gathers and combination as lowering makes them.
fn mixture(k: u64) -> (Module, Function, Vec<Tensor>) {
    let mut rng = Rng::new(k);
    let mut module = Module::default();
    let (b, t, h, i, e) = (2, 3, 4, 5, 3);
    let batch = module.dim("batch", b);
    let seq = module.dim("seq", t);
    let hidden = module.dim("hidden", h);
    let inner = module.dim("inner", i);
    let experts = module.dim("experts", e);
    let offsets = module.dim("experts+1", e + 1);
    let active = module.dim("active", k);
    let slots = module.dim("slots", b * t * k);
    let mut builder = Builder::new(&mut module, "mixture");
    let x = builder.param("x", Binding::Value, Type::f32(&[batch, seq, hidden]));
    let router = builder.param("router", Binding::Weight, Type::f32(&[experts, hidden]));
    let up = builder.param("up", Binding::Weight, Type::f32(&[experts, inner, hidden]));
    let down = builder.param("down", Binding::Weight, Type::f32(&[experts, hidden, inner]));
    let z = builder.contract(x, router, &[hidden]);
    let chosen = builder.op(Op::Route(Route { k: active }), &[z]);
    let groups = builder.ops(Op::Group(Group { experts, offsets, slots }), &[chosen]);
    let gates = builder.op(Op::Pick, &[z, chosen]);
    let rows = builder.op(Op::Gather, &[x, groups[0]]);
    let a = builder.op(Op::Grouped(Grouped { over: hidden }), &[rows, up, groups[1]]);
    let a = builder.unary(dreamc_compiler::ir::Unary::Silu, a);
    let y = builder.op(Op::Grouped(Grouped { over: inner }), &[a, down, groups[1]]);
    let gated = builder.op(Op::Combine, &[y, groups[2], gates]);
    let plain = builder.op(Op::Combine, &[y, groups[2]]);
    let y = builder.add(gated, plain);
    let y = builder.add(x, y);
    builder.result("y", y);
    let f = builder.finish().unwrap();
    let args = f
        .types
        .iter()
        .take(f.params.len())
        .map(|ty| {
            let zeros = Tensor::zeros(&module, ty);
            let n = module.elements(&ty.dims);
            Tensor { data: Data::Float((0..n).map(|_| rng.between(-1.0, 1.0)).collect()), ..zeros }
        })
        .collect();
    (module, f, args)
}

#[test]
fn mixtures_have_their_derivative_whole_and_cut_in_two() {
    for k in 1..=3 {
        let (module, f, args) = mixture(k);
        for split in [false, true] {
            let e = check(&module, &f, &args, &["y"], &mut Rng::new(7), split).unwrap();
            assert!(e < 1e-6, "k = {k}, split {split}: off by {e}");
        }
    }
}
