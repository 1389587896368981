//! Every gradient operation equals finite differences of its forward operation, in f64.
//!
//! For a forward operation with results `y` and random cotangents `dy`, `L = Σ dy·y` is differenced
//! in every element of every float operand and compared with what the gradient operation says.
//! Autodiff, rewrites and devices rely on these formulas.

use dreamc_compiler::ir::interpret::{Data, evaluate};
use dreamc_compiler::ir::random::{Entry, Instance, Rng, table};
use dreamc_compiler::ir::{Binary, Op, Reduce, Rope, Tensor, Type, Unary};
use dreamc_compiler::op::attention::formula::Place;
use dreamc_compiler::op::{
    AttentionGrad, Concat, Contract, DepthAttention, DepthAttentionGrad, EmbedGrad, Grouped, GroupedOuter,
    HeadLoss, HeadLossGrad, PickGrad, Reduction, Reshape, Rms, RmsGrad, Split,
};
use smallvec::smallvec;

/// Instances of each operation.
const SEEDS: u64 = 60;
/// Relative error allowed.
const RELATIVE: f64 = 1e-6;
/// Absolute error allowed: what rounding does to differences of numbers near one.
const ABSOLUTE: f64 = 1e-9;

/// Gradients of an instance by the gradient operations: for each float operand, in order, its
/// gradient.
type Gradient = fn(&Instance, &[Tensor]) -> Vec<(usize, Tensor)>;

fn entry(name: &str) -> Entry {
    table().into_iter().find(|e| e.name == name).unwrap_or_else(|| panic!("no entry {name}"))
}

/// Results of `op` on operands given with their types.
fn apply(i: &Instance, op: Op, operands: &[(&Type, &Tensor)]) -> Vec<Tensor> {
    let types: Vec<&Type> = operands.iter().map(|o| o.0).collect();
    let tensors: Vec<Tensor> = operands.iter().map(|o| o.1.clone()).collect();
    evaluate(&i.module, &op, &types, &tensors).unwrap_or_else(|e| panic!("{e}\n{}", i.module)).0
}

/// Operand `n` with its type.
fn operand(i: &Instance, n: usize) -> (&Type, &Tensor) {
    let value = i.node().inputs[n];
    (i.function.ty(value), &i.args[value.index()])
}

fn results(i: &Instance) -> Vec<Tensor> {
    let operands: Vec<_> = (0..i.node().inputs.len()).map(|n| operand(i, n)).collect();
    apply(i, i.op().clone(), &operands)
}

fn result_type(i: &Instance, n: usize) -> Type {
    i.result_types()[n].clone()
}

fn loss(i: &Instance, cotangents: &[Tensor]) -> f64 {
    // A statistic may be infinite (a query that sees nothing); a zero cotangent leaves it out.
    let used = |(y, dy): (&f64, &f64)| if *dy == 0.0 { 0.0 } else { y * dy };
    let dot = |(y, dy): (&Tensor, &Tensor)| y.floats().iter().zip(dy.floats()).map(used).sum::<f64>();
    results(i).iter().zip(cotangents).map(dot).sum()
}

/// Derivative of the loss in one element: central differences at two steps, extrapolated to none.
fn difference(i: &mut Instance, cotangents: &[Tensor], arg: usize, element: usize) -> f64 {
    let mut at = |shift: f64| {
        let set = |i: &mut Instance, by: f64| match &mut i.args[arg].data {
            Data::Float(data) => data[element] += by,
            Data::Int(_) => unreachable!("floats are differenced"),
        };
        let kept = i.args[arg].clone();
        set(i, shift);
        let up = loss(i, cotangents);
        i.args[arg] = kept.clone();
        set(i, -shift);
        let down = loss(i, cotangents);
        i.args[arg] = kept;
        (up - down) / (2.0 * shift)
    };
    // Small against the narrowest feature: an RMS norm of one element turns within sqrt(eps) =
    // 0.03.
    let step = 4e-4;
    (4.0 * at(step / 2.0) - at(step)) / 3.0
}

/// Compares; cotangents of the results named in `without` are zero, as the gradient operation has
/// none of them.
fn check(name: &str, without: &[usize], gradient: Gradient) {
    let entry = entry(name);
    for seed in 0..SEEDS {
        let mut instance = entry.instance(seed);
        let mut rng = Rng::new(seed ^ 0x5eed);
        let cotangents: Vec<Tensor> = instance
            .result_types()
            .iter()
            .enumerate()
            .map(|(n, ty)| {
                let mut dy = Tensor::zeros(&instance.module, ty);
                if let (Data::Float(data), false) = (&mut dy.data, without.contains(&n)) {
                    data.iter_mut().for_each(|x| *x = rng.between(-1.0, 1.0));
                }
                dy
            })
            .collect();
        let found = gradient(&instance, &cotangents);
        let floats: Vec<usize> =
            (0..instance.args.len()).filter(|&n| matches!(instance.args[n].data, Data::Float(_))).collect();
        let covered: Vec<usize> = found.iter().map(|(n, _)| *n).collect();
        assert_eq!(covered, floats, "{name}: a gradient for each float operand");
        for (arg, gradient) in found {
            assert_eq!(gradient.dims, instance.args[arg].dims, "{name}, operand {arg}");
            for (element, &g) in gradient.floats().iter().enumerate() {
                let d = difference(&mut instance, &cotangents, arg, element);
                assert!(
                    (g - d).abs() <= RELATIVE * g.abs().max(d.abs()) + ABSOLUTE,
                    "{name}, seed {seed}, operand {arg}, element {element}: {g}, differences say {d}\n{}",
                    instance.module
                );
            }
        }
    }
}

// --- element-wise --------------------------------------------------------------------------------

/// `dy · f(x)` by operations.
fn times(i: &Instance, dy: &Tensor, f: Unary) -> Tensor {
    let (ty, x) = operand(i, 0);
    let slope = apply(i, Op::Unary(f), &[(ty, x)]).remove(0);
    apply(i, Op::Binary(Binary::Mul), &[(ty, dy), (ty, &slope)]).remove(0)
}

#[test]
fn silu_grad() {
    check("silu", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::SiluGrad))]);
}

#[test]
fn gelu_grad() {
    check("gelu", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::GeluGrad))]);
}

#[test]
fn relu_has_the_slope_positive() {
    check("relu", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::Positive))]);
}

#[test]
fn softplus_has_the_slope_sigmoid() {
    check("softplus", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::Sigmoid))]);
}

#[test]
fn exp_has_its_own_slope() {
    check("exp", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::Exp))]);
}

#[test]
fn log_has_the_slope_recip() {
    check("log", &[], |i, dy| vec![(0, times(i, &dy[0], Unary::Recip))]);
}

// --- rows ----------------------------------------------------------------------------------------

#[test]
fn rms_grad() {
    check("rms", &[], |i, dy| {
        let Op::Rms(Rms { inner, eps }) = *i.op() else { unreachable!() };
        let (ty, x) = operand(i, 0);
        vec![(0, apply(i, Op::RmsGrad(RmsGrad { inner, eps }), &[(ty, x), (ty, &dy[0])]).remove(0))]
    });
}

#[test]
fn softmax_grad() {
    check("softmax", &[], |i, dy| {
        let (ty, _) = operand(i, 0);
        let y = results(i).remove(0);
        vec![(0, apply(i, Op::SoftmaxGrad, &[(ty, &y), (ty, &dy[0])]).remove(0))]
    });
}

#[test]
fn rope_is_undone_by_its_inverse() {
    check("rope", &[], |i, dy| {
        let Op::Rope(rope) = *i.op() else { unreachable!() };
        let mut operands: Vec<_> = (0..i.node().inputs.len()).map(|n| operand(i, n)).collect();
        operands[0].1 = &dy[0];
        vec![(0, apply(i, Op::Rope(Rope { inverse: !rope.inverse, ..rope }), &operands).remove(0))]
    });
}

#[test]
fn sum_and_mean_are_undone_by_broadcasting() {
    for (name, f) in [("sum", Reduce::Sum), ("mean", Reduce::Mean)] {
        assert_eq!(Op::Reduce(Reduction { how: f, over: smallvec![] }).name(), name);
        check(name, &[], |i, dy| {
            let Op::Reduce(Reduction { how: f, over }) = i.op() else { unreachable!() };
            let n = if *f == Reduce::Mean { i.module.elements(over) as f64 } else { 1.0 };
            let ty = operand(i, 0).0;
            let share = Tensor::float(&operand(i, 0).1.dims, vec![1.0 / n; operand(i, 0).1.floats().len()]);
            let dx = apply(i, Op::Binary(Binary::Mul), &[(ty, &share), (&result_type(i, 0), &dy[0])]);
            vec![(0, dx.into_iter().next().expect("one result"))]
        });
    }
}

#[test]
fn reshape_is_undone_by_reshape() {
    check("reshape", &[], |i, dy| {
        let back = Op::Reshape(Reshape(operand(i, 0).0.dims.clone()));
        vec![(0, apply(i, back, &[(&result_type(i, 0), &dy[0])]).remove(0))]
    });
}

#[test]
fn split_is_undone_by_concat() {
    check("split", &[], |i, dy| {
        let types = i.result_types();
        let parts: Vec<_> = types.iter().zip(dy).collect();
        let last = *operand(i, 0).0.dims.last().expect("it is split");
        vec![(0, apply(i, Op::Concat(Concat(last)), &parts).remove(0))]
    });
}

#[test]
fn concat_is_undone_by_split() {
    check("concat", &[], |i, dy| {
        let parts = i.operand_types().iter().map(|t| *t.dims.last().expect("it is joined")).collect();
        apply(i, Op::Split(Split(parts)), &[(&result_type(i, 0), &dy[0])]).into_iter().enumerate().collect()
    });
}

// --- products ------------------------------------------------------------------------------------

/// `tensor` of type `from` with its dimensions in the order of `to`: what a sum over no dimension
/// of ones would do.
fn transpose(i: &Instance, from: &Type, tensor: &Tensor, to: &Type) -> Tensor {
    let zeros = Tensor::zeros(&i.module, to);
    let stride = |ty: &Type, axis: usize| i.module.elements(&ty.dims[axis + 1..]) as usize;
    let mut data = vec![0.0; zeros.floats().len()];
    for (n, &x) in tensor.floats().iter().enumerate() {
        let at = from.dims.iter().enumerate().map(|(axis, d)| {
            let index = n / stride(from, axis) % i.module.size(*d) as usize;
            let axis = to.dims.iter().position(|x| x == d).expect("the same dimensions");
            index * stride(to, axis)
        });
        data[at.sum::<usize>()] = x;
    }
    Tensor::float(&zeros.dims, data)
}

#[test]
fn contract_is_differentiated_by_contract() {
    check("contract", &[], |i, dy| {
        let Op::Contract(Contract { over }) = i.op() else { unreachable!() };
        let (a, b) = (operand(i, 0), operand(i, 1));
        let ty = result_type(i, 0);
        let side = |this: (&Type, &Tensor), other: (&Type, &Tensor)| {
            let free = other.0.without(over);
            if free.is_empty() {
                // An outer product, which is no `Contract`: the broadcast product of both.
                let dims = [ty.dims.clone(), other.0.dims.clone()].concat();
                let all = Type::f32(&dims);
                let ones = Tensor::float(
                    &Tensor::zeros(&i.module, &all).dims,
                    vec![1.0; i.module.elements(&dims) as usize],
                );
                let with = apply(i, Op::Binary(Binary::Mul), &[(&all, &ones), (&ty, &dy[0])]).remove(0);
                let outer = apply(i, Op::Binary(Binary::Mul), &[(&all, &with), other]).remove(0);
                return transpose(i, &all, &outer, this.0);
            }
            let d =
                apply(i, Op::Contract(Contract { over: free.clone() }), &[(&ty, &dy[0]), other]).remove(0);
            let from = Type::f32(&[ty.without(&free), other.0.without(&free)].concat());
            transpose(i, &from, &d, this.0)
        };
        vec![(0, side(a, b)), (1, side(b, a))]
    });
}

#[test]
fn grouped_is_differentiated_by_grouped_and_grouped_outer() {
    check("grouped", &[], |i, dy| {
        let Op::Grouped(Grouped { over }) = *i.op() else { unreachable!() };
        let (x, w, offsets) = (operand(i, 0), operand(i, 1), operand(i, 2));
        let ty = result_type(i, 0);
        let dx = apply(i, Op::Grouped(Grouped { over: ty.dims[1] }), &[(&ty, &dy[0]), w, offsets]).remove(0);
        // w[e, o, i]: the columns are those summed over, or those of the result.
        let (rows, columns) = if w.0.dims[2] == over { ((&ty, &dy[0]), x) } else { (x, (&ty, &dy[0])) };
        let experts = w.0.dims[0];
        let dw = apply(i, Op::GroupedOuter(GroupedOuter { experts }), &[rows, columns, offsets]).remove(0);
        vec![(0, dx), (1, dw)]
    });
}

#[test]
fn grouped_outer_is_differentiated_by_grouped() {
    check("grouped_outer", &[], |i, dw| {
        let (y, x, offsets) = (operand(i, 0), operand(i, 1), operand(i, 2));
        let ty = result_type(i, 0);
        let dy = apply(i, Op::Grouped(Grouped { over: x.0.dims[1] }), &[x, (&ty, &dw[0]), offsets]).remove(0);
        let dx = apply(i, Op::Grouped(Grouped { over: y.0.dims[1] }), &[y, (&ty, &dw[0]), offsets]).remove(0);
        vec![(0, dy), (1, dx)]
    });
}

// --- routing -------------------------------------------------------------------------------------

#[test]
fn pick_grad() {
    check("pick", &[], |i, dy| {
        let experts = *operand(i, 0).0.dims.last().expect("a table has experts");
        vec![(
            0,
            apply(i, Op::PickGrad(PickGrad { experts }), &[(&result_type(i, 0), &dy[0]), operand(i, 1)])
                .remove(0),
        )]
    });
}

#[test]
fn pick_grad_is_differentiated_by_pick() {
    check("pick_grad", &[], |i, dy| {
        vec![(0, apply(i, Op::Pick, &[(&result_type(i, 0), &dy[0]), operand(i, 1)]).remove(0))]
    });
}

/// The permutation that undoes `order`, with the sizes of `like`.
fn inverted(order: &Tensor, like: &[usize]) -> Tensor {
    let mut inverse = vec![0; order.ints().len()];
    for (place, &slot) in order.ints().iter().enumerate() {
        inverse[slot as usize] = place as i32;
    }
    Tensor::int(like, inverse)
}

#[test]
fn gather_is_undone_by_combine() {
    check("gather", &[], |i, dy| {
        let (x, order) = (operand(i, 0), operand(i, 1));
        // The module of the instance has the dimension of choices, `k`, in addition to those of the
        // rows.
        let k = i.module.dims.get_index_of("k").expect("routing has choices");
        let mut choices = x.0.dims.clone();
        *choices.last_mut().expect("x has rows") = dreamc_compiler::ir::Dim(k as u32);
        let ty = Type::i32(&choices);
        let inverse = inverted(order.1, &Tensor::zeros(&i.module, &ty).dims);
        vec![(0, apply(i, Op::Combine, &[(&result_type(i, 0), &dy[0]), (&ty, &inverse)]).remove(0))]
    });
}

#[test]
fn combine_grad_and_combine_gates() {
    check("combine", &[], |i, d| {
        let (y, inverse) = (operand(i, 0), operand(i, 1));
        let order_type = Type::i32(&[y.0.dims[0]]);
        let order = inverted(inverse.1, &y.1.dims[..1]);
        let (order, d) = ((&order_type, &order), (&result_type(i, 0), &d[0]));
        if i.node().inputs.len() == 2 {
            return vec![(0, apply(i, Op::Gather, &[d, order]).remove(0))];
        }
        let dy = apply(i, Op::CombineGrad, &[d, order, operand(i, 2)]).remove(0);
        let dgates = apply(i, Op::CombineGates, &[d, y, inverse]).remove(0);
        vec![(0, dy), (2, dgates)]
    });
}

// --- attention -----------------------------------------------------------------------------------

#[test]
fn attention_grad() {
    check("attention", &[1], attention_gradient);
}

fn attention_gradient(i: &Instance, cotangents: &[Tensor]) -> Vec<(usize, Tensor)> {
    let Op::Attention(a) = i.op().clone() else { unreachable!() };
    let types = i.result_types();
    let forward = results(i);
    let mut operands = vec![operand(i, 0), operand(i, 1), operand(i, 2)];
    operands.extend([(&types[0], &forward[0]), (&types[1], &forward[1]), (&types[0], &cotangents[0])]);
    operands.extend((3..a.reads()).map(|n| operand(i, n)));
    let reads = a.reads()..i.node().inputs.len();
    if a.program.is_some() {
        operands.push((&types[1], &cotangents[1]));
    }
    operands.extend(reads.clone().map(|n| operand(i, n)));
    // Operands that the mask alone reads have no gradient.
    let moved = a.moved();
    let still = reads.filter(|n| !moved.contains(&(n - a.reads())));
    let still: Vec<_> = still.map(|n| (n, Tensor::zeros(&i.module, operand(i, n).0))).collect();
    let places = (0..3).chain(moved.iter().map(|n| n + a.reads()));
    let found = apply(i, Op::AttentionGrad(AttentionGrad(a.clone())), &operands);
    let mut found: Vec<_> = places.zip(found).chain(still).collect();
    found.sort_by_key(|(n, _)| *n);
    found
}

/// A seeded fault: a derivative that forgets what a score reads at the key.
#[test]
fn a_derivative_that_forgets_the_key_is_noticed() {
    let forgetful: Gradient = |i, cotangents| {
        let Op::Attention(a) = i.op() else { unreachable!() };
        let mut found = attention_gradient(i, cotangents);
        for (n, gradient) in &mut found {
            if *n >= a.reads() && a.read()[*n - a.reads()].place == Place::Key {
                *gradient = Tensor::zeros(&i.module, operand(i, *n).0);
            }
        }
        found
    };
    assert!(std::panic::catch_unwind(|| check("attention", &[], forgetful)).is_err());
}

#[test]
fn depth_attention_grad() {
    check("depth_attention", &[], |i, dy| {
        let Op::DepthAttention(DepthAttention(a)) = i.op().clone() else { unreachable!() };
        let (q, k, v, row) = (operand(i, 0), operand(i, 1), operand(i, 2), operand(i, 3));
        // The gradient adds to what the caches' cotangents hold.
        let held = Tensor::float(&k.1.dims, (0..k.1.floats().len()).map(|n| n as f64).collect());
        let held_of = (k.0, &held);
        let operands = [q, k, v, row, (q.0, &dy[0]), held_of, held_of];
        let mut found = apply(i, Op::DepthAttentionGrad(DepthAttentionGrad(a)), &operands);
        for d in &mut found[1..] {
            *d = apply(i, Op::Binary(Binary::Sub), &[(k.0, d), held_of]).remove(0);
        }
        found.into_iter().enumerate().collect()
    });
}

#[test]
fn cache_write_is_undone_by_cache_take() {
    check("cache_write", &[], |i, dy| {
        let mut taken = apply(i, Op::CacheTake, &[(operand(i, 0).0, &dy[0]), operand(i, 2)]);
        let dcache = taken.remove(1);
        vec![(0, dcache), (1, taken.remove(0))]
    });
}

#[test]
fn cache_take_is_undone_by_cache_write() {
    check("cache_take", &[], |i, d| {
        let (x, cache) = (&d[0], &d[1]);
        let (ty, row) = (result_type(i, 0), operand(i, 1));
        vec![(0, apply(i, Op::CacheWrite, &[(operand(i, 0).0, cache), (&ty, x), row]).remove(0))]
    });
}

// --- ends ----------------------------------------------------------------------------------------

#[test]
fn embed_grad() {
    check("embed", &[], |i, dy| {
        let vocab = operand(i, 0).0.dims[0];
        vec![(
            0,
            apply(i, Op::EmbedGrad(EmbedGrad { vocab }), &[(&result_type(i, 0), &dy[0]), operand(i, 1)])
                .remove(0),
        )]
    });
}

#[test]
fn cross_entropy_grad() {
    check("cross_entropy", &[1], |i, d| {
        let (types, lse) = (i.result_types(), results(i).remove(1));
        let operands = [operand(i, 0), operand(i, 1), (&types[1], &lse), (&types[0], &d[0])];
        vec![(0, apply(i, Op::CrossEntropyGrad, &operands).remove(0))]
    });
}

#[test]
fn head_loss_grad() {
    check("head_loss", &[1], |i, d| {
        let Op::HeadLoss(HeadLoss { softcap }) = *i.op() else { unreachable!() };
        let (types, lse) = (i.result_types(), results(i).remove(1));
        let operands = [operand(i, 0), operand(i, 1), operand(i, 2), (&types[1], &lse), (&types[0], &d[0])];
        apply(i, Op::HeadLossGrad(HeadLossGrad { softcap }), &operands).into_iter().enumerate().collect()
    });
}
