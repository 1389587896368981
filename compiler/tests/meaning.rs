//! Meaning of operations, by other routes than the interpreter's: plain loops, other operations,
//! invariants.
//!
//! `gradients.rs` has the gradient operations.

use dreamc_compiler::ir::interpret::{Data, evaluate, round_bf16};
use dreamc_compiler::ir::random::{Instance, Rng, table};
use dreamc_compiler::ir::{
    Attention, Binary, DType, Dim, Mask, Module, Op, Positions, Rope, Tensor, Type, Unary,
};
use dreamc_compiler::op::attention::formula::{Pair, Place};
use dreamc_compiler::op::attention::{kept as kept_weight, threshold};
use dreamc_compiler::op::{
    ByHead, Contract, DepthAttention, Group, Grouped, HeadLoss, Rms, RoundGroups, Zeros,
};
use smallvec::smallvec;

/// Instances of an operation.
fn instances(name: &str) -> impl Iterator<Item = Instance> {
    let entry = table().into_iter().find(|e| e.name == name).unwrap_or_else(|| panic!("no entry {name}"));
    (0..80).map(move |seed| entry.instance(seed))
}

fn apply(module: &Module, op: Op, operands: &[(&Type, &Tensor)]) -> Vec<Tensor> {
    let types: Vec<&Type> = operands.iter().map(|o| o.0).collect();
    let tensors: Vec<Tensor> = operands.iter().map(|o| o.1.clone()).collect();
    evaluate(module, &op, &types, &tensors).unwrap_or_else(|e| panic!("{e}")).0
}

fn operand(i: &Instance, n: usize) -> (&Type, &Tensor) {
    let value = i.node().inputs[n];
    (i.function.ty(value), &i.args[value.index()])
}

fn operands(i: &Instance) -> Vec<(&Type, &Tensor)> {
    (0..i.node().inputs.len()).map(|n| operand(i, n)).collect()
}

fn results(i: &Instance) -> Vec<Tensor> {
    apply(&i.module, i.op().clone(), &operands(i))
}

#[track_caller]
fn close(a: &Tensor, b: &Tensor) {
    assert_eq!(a.dims, b.dims);
    for (a, b) in a.floats().iter().zip(b.floats()) {
        assert!(a == b || (a - b).abs() <= 1e-12 * (1.0 + a.abs()), "{a} is not {b}");
    }
}

fn size(i: &Instance, dim: Dim) -> usize {
    i.module.size(dim) as usize
}

// --- element-wise --------------------------------------------------------------------------------

#[test]
fn binary_broadcasts_by_name() {
    let mut m = Module::default();
    let (b, t, h) = (m.dim("b", 2), m.dim("t", 1), m.dim("h", 3));
    let (all, some) = (Type::f32(&[b, t, h]), Type::f32(&[b, h]));
    let x = Tensor::float(&[2, 1, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let y = Tensor::float(&[2, 3], vec![10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    let column = (Type::f32(&[b]), Tensor::float(&[2], vec![100.0, 200.0]));
    let sub = Op::Binary(Binary::Sub);
    let one = apply(&m, sub.clone(), &[(&some, &y), (&all, &x)]).remove(0);
    assert_eq!(one.floats(), [9.0, 18.0, 27.0, 36.0, 45.0, 54.0]);
    let two = apply(&m, sub, &[(&all, &x), (&column.0, &column.1)]).remove(0);
    assert_eq!(two.floats(), [-99.0, -98.0, -97.0, -196.0, -195.0, -194.0]);
}

/// Adding half of the last kept bit (less one where that bit is even) and cutting is rounding to
/// nearest even.
#[test]
fn bf16_rounds_to_nearest_even() {
    let mut rng = Rng::new(3);
    for _ in 0..100_000 {
        let bits = rng.bits() as u32;
        let x = f32::from_bits(bits);
        if !x.is_finite() {
            continue;
        }
        let rounded = f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
        assert_eq!(round_bf16(f64::from(x)), f64::from(rounded), "{x:e}");
    }
    for exact in [0.0, -0.0, 1.0, f64::INFINITY, 2f64.powi(-133)] {
        assert_eq!(round_bf16(exact).to_bits(), exact.to_bits());
    }
    assert!(round_bf16(f64::NAN).is_nan());
    // Half a spacing from 1 is a tie, a hair more is not: no rounding through f32 may come between.
    assert_eq!(round_bf16(1.0 + 2f64.powi(-8)), 1.0);
    assert_eq!(round_bf16(1.0 + 2f64.powi(-8) + 2f64.powi(-40)), 1.0 + 2f64.powi(-7));
    assert_eq!(round_bf16(1e39), f64::INFINITY);
}

#[test]
fn functions_keep_their_range() {
    let mut m = Module::default();
    let n = m.dim("n", 5);
    let ty = Type::f32(&[n]);
    let x = Tensor::float(&[5], vec![-800.0, -1.0, 0.0, 1.0, 800.0]);
    let of = |f| apply(&m, Op::Unary(f), &[(&ty, &x)]).remove(0).floats().to_vec();
    assert_eq!(of(Unary::Sigmoid)[0..1], [0.0]);
    assert_eq!(of(Unary::Sigmoid)[4], 1.0);
    assert_eq!(of(Unary::Softplus)[4], 800.0);
    assert!((of(Unary::Softplus)[2] - 2f64.ln()).abs() < 1e-15);
    assert_eq!(of(Unary::Positive), [0.0, 0.0, 0.0, 1.0, 1.0]);
    // Published values of the tanh form.
    assert!((of(Unary::Gelu)[3] - 0.841_191_990_608_3).abs() < 1e-12, "{}", of(Unary::Gelu)[3]);
    assert!((of(Unary::Silu)[3] - 0.731_058_578_630_0).abs() < 1e-12);
}

#[test]
fn turns_and_whole_numbers() {
    let mut m = Module::default();
    let n = m.dim("n", 4);
    let ty = Type::f32(&[n]);
    let x = Tensor::float(&[4], vec![-1.5, 0.0, 0.25, 3.0]);
    let of = |f| apply(&m, Op::Unary(f), &[(&ty, &x)]).remove(0).floats().to_vec();
    assert_eq!(of(Unary::Floor), [-2.0, 0.0, 0.0, 3.0]);
    let circle = of(Unary::Sin).into_iter().zip(of(Unary::Cos)).map(|(s, c)| s * s + c * c);
    assert!(circle.into_iter().all(|r| (r - 1.0).abs() < 1e-15));
}

/// A value that is not kept is zero, whatever it was.
#[test]
fn where_keeps_what_is_not_zero() {
    let mut m = Module::default();
    let n = m.dim("n", 3);
    let ty = Type::f32(&[n]);
    let a = Tensor::float(&[3], vec![f64::NAN, 2.0, 3.0]);
    let b = Tensor::float(&[3], vec![0.0, -0.5, 1.0]);
    let y = apply(&m, Op::Binary(Binary::Where), &[(&ty, &a), (&ty, &b)]).remove(0);
    assert_eq!(y.floats(), [0.0, 2.0, 3.0]);
}

/// Turned around, and repeated along a new dimension in the middle.
#[test]
fn arrange_moves_dimensions_by_their_names() {
    let mut m = Module::default();
    let (a, b, c) = (m.dim("a", 2), m.dim("b", 3), m.dim("c", 2));
    let x = Tensor::float(&[2, 3], (0..6).map(f64::from).collect());
    let to = vec![b, c, a];
    let y =
        apply(&m, Op::Arrange(dreamc_compiler::op::Arrange { to: to.into() }), &[(&Type::f32(&[a, b]), &x)]);
    assert_eq!(y[0].floats(), [0.0, 3.0, 0.0, 3.0, 1.0, 4.0, 1.0, 4.0, 2.0, 5.0, 2.0, 5.0]);
}

// --- rows ----------------------------------------------------------------------------------------

#[test]
fn rms_leaves_a_mean_square_of_one() {
    for i in instances("rms") {
        let Op::Rms(Rms { inner, .. }) = *i.op() else { unreachable!() };
        let (ty, x) = operand(&i, 0);
        let y = apply(&i.module, Op::Rms(Rms { inner, eps: 0.0 }), &[(ty, x)]).remove(0);
        let n: usize = x.dims[x.dims.len() - inner..].iter().product();
        for (x, y) in x.floats().chunks(n).zip(y.floats().chunks(n)) {
            let mean = y.iter().map(|y| y * y).sum::<f64>() / n as f64;
            assert!((mean - 1.0).abs() < 1e-12);
            assert!(x.iter().zip(y).all(|(x, y)| x * y >= 0.0));
        }
    }
}

#[test]
fn softmax_is_a_distribution_in_the_ratios_of_exponentials() {
    for i in instances("softmax") {
        let y = results(&i).remove(0);
        let x = operand(&i, 0).1;
        let n = *x.dims.last().expect("rows have a size");
        for (x, y) in x.floats().chunks(n).zip(y.floats().chunks(n)) {
            assert!((y.iter().sum::<f64>() - 1.0).abs() < 1e-12);
            assert!(x.iter().zip(y).all(|(a, p)| (p / y[0] - (a - x[0]).exp()).abs() < 1e-10));
        }
    }
}

/// As complex numbers: pair `(i, i + d/2)` times `e^(i·angle)`.
#[test]
fn rope_turns_pairs_by_their_position() {
    let mut m = Module::default();
    let (t, d) = (m.dim("t", 3), m.dim("d", 4));
    let (ty, of_positions) = (Type::f32(&[t, d]), Type::i32(&[t]));
    let rope =
        |positions| Op::Rope(Rope { base: 100.0, positions, scaling: None, inverse: false, chosen: None });
    let x = Tensor::float(&[3, 4], vec![1.0; 12]);
    let positions = Tensor::int(&[3], vec![0, 1, 7]);
    let y = apply(&m, rope(Positions::Tokens), &[(&ty, &x), (&of_positions, &positions)]).remove(0);
    for (row, p) in [0.0, 1.0, 7.0].into_iter().enumerate() {
        for pair in 0..2 {
            let angle: f64 = p * [1.0, 0.1][pair];
            let expected = [angle.cos() - angle.sin(), angle.cos() + angle.sin()];
            let found = [y.floats()[row * 4 + pair], y.floats()[row * 4 + pair + 2]];
            assert!((found[0] - expected[0]).abs() < 1e-12 && (found[1] - expected[1]).abs() < 1e-12);
        }
    }
    // At depth 3 of 10, odd pairs stand at 6.
    let scalar = Type::i32(&[]);
    let (depth, depths) = (Tensor::index(3), Tensor::index(10));
    let depth_operands = [(&ty, &x), (&scalar, &depth), (&scalar, &depths)];
    let y = apply(&m, rope(Positions::Depth { half_reversed: true }), &depth_operands).remove(0);
    assert!((y.floats()[0] - (3f64.cos() - 3f64.sin())).abs() < 1e-12);
    assert!((y.floats()[1] - (0.6f64.cos() - 0.6f64.sin())).abs() < 1e-12);
}

// --- products ------------------------------------------------------------------------------------

#[test]
fn contract_is_a_matrix_product() {
    let mut m = Module::default();
    let (r, i, o) = (m.dim("r", 3), m.dim("i", 5), m.dim("o", 2));
    let mut rng = Rng::new(4);
    let mut random = |n: usize| -> Vec<f64> { (0..n).map(|_| rng.between(-1.0, 1.0)).collect() };
    let (x, w) = (random(15), random(10));
    // The second operand either way round: the dimensions' names say what is summed.
    let transposed: Vec<f64> = (0..10).map(|n| w[n % 2 * 5 + n / 2]).collect();
    let (x_ty, w_ty, t_ty) = (Type::f32(&[r, i]), Type::f32(&[o, i]), Type::f32(&[i, o]));
    let x_tensor = Tensor::float(&[3, 5], x.clone());
    let product = |ty: &Type, dims: &[usize], w: Vec<f64>| {
        apply(
            &m,
            Op::Contract(Contract { over: smallvec![i] }),
            &[(&x_ty, &x_tensor), (ty, &Tensor::float(dims, w))],
        )
        .remove(0)
    };
    let mut expected = vec![0.0; 6];
    for r in 0..3 {
        for o in 0..2 {
            for i in 0..5 {
                expected[r * 2 + o] += x[r * 5 + i] * w[o * 5 + i];
            }
        }
    }
    let expected = Tensor::float(&[3, 2], expected);
    close(&product(&w_ty, &[2, 5], w), &expected);
    close(&product(&t_ty, &[5, 2], transposed), &expected);
}

/// Rows of each group by a `contract` of their own; the rest zero.
#[test]
fn grouped_is_a_contract_for_each_group() {
    for i in instances("grouped") {
        let Op::Grouped(Grouped { over }) = *i.op() else { unreachable!() };
        let ((x_ty, x), (w_ty, w), (_, offsets)) = (operand(&i, 0), operand(&i, 1), operand(&i, 2));
        let y = results(&i).remove(0);
        let (n, width) = (x.dims[1], y.dims[1]);
        let matrix = w_ty.dims[1..].iter().map(|&d| size(&i, d)).product::<usize>();
        let mut expected = vec![];
        for (e, pair) in offsets.ints().windows(2).enumerate() {
            for row in pair[0] as usize..pair[1] as usize {
                let row = Tensor::float(&[n], x.floats()[row * n..(row + 1) * n].to_vec());
                let w = Tensor::float(&w.dims[1..], w.floats()[e * matrix..(e + 1) * matrix].to_vec());
                let types = [Type::f32(&x_ty.dims[1..]), Type::f32(&w_ty.dims[1..])];
                let op = Op::Contract(Contract { over: smallvec![over] });
                expected.extend(apply(&i.module, op, &[(&types[0], &row), (&types[1], &w)])[0].floats());
            }
        }
        expected.resize(y.dims[0] * width, 0.0);
        close(&y, &Tensor::float(&y.dims, expected));
    }
}

/// Each head's vector by a `contract` of its own, with some rows of its matrix.
#[test]
fn by_head_is_a_contract_for_each_head() {
    let (mut rows_summed, mut later) = (0, 0);
    for i in instances("by_head") {
        let Op::ByHead(ByHead { over, part, first }) = *i.op() else { unreachable!() };
        let ((x_ty, x), (w_ty, w)) = (operand(&i, 0), operand(&i, 1));
        let y = results(&i).remove(0);
        let (k, columns, rows) = (size(&i, over), w.dims[2], size(&i, part));
        let mut expected = vec![];
        for (number, vector) in x.floats().chunks(k).enumerate() {
            let from = (number % w.dims[0] * w.dims[1] + first as usize) * columns;
            let matrix = w.floats()[from..from + rows * columns].to_vec();
            let types = [Type::f32(&x_ty.dims[x_ty.dims.len() - 1..]), Type::f32(&[part, w_ty.dims[2]])];
            let (vector, matrix) =
                (Tensor::float(&[k], vector.to_vec()), Tensor::float(&[rows, columns], matrix));
            let op = Op::Contract(Contract { over: smallvec![over] });
            expected.extend(apply(&i.module, op, &[(&types[0], &vector), (&types[1], &matrix)])[0].floats());
        }
        close(&y, &Tensor::float(&y.dims, expected));
        rows_summed += usize::from(over == part);
        later += usize::from(first > 0);
    }
    assert!(rows_summed > 0 && later > 0);
}

// --- routing -------------------------------------------------------------------------------------

#[test]
fn route_takes_the_largest_and_the_first_of_equals() {
    for i in instances("route") {
        let (_, z) = operand(&i, 0);
        let chosen = results(&i).remove(0);
        let (e, k) = (*z.dims.last().expect("experts"), *chosen.dims.last().expect("choices"));
        for (z, chosen) in z.floats().chunks(e).zip(chosen.ints().chunks(k)) {
            for (rank, &c) in chosen.iter().enumerate() {
                let c = c as usize;
                let before = (0..e).filter(|&o| z[o] > z[c] || (z[o] == z[c] && o < c)).count();
                assert_eq!(before, rank, "{chosen:?} of {z:?}");
            }
        }
    }
}

#[test]
fn group_sorts_by_expert_and_keeps_order_within() {
    for i in instances("group") {
        let Op::Group(Group { experts, .. }) = *i.op() else { unreachable!() };
        let experts = size(&i, experts) as i32;
        let chosen = operand(&i, 0).1.ints();
        let [order, offsets, inverse] = &results(&i)[..] else { unreachable!() };
        for (place, &slot) in order.ints().iter().enumerate() {
            assert_eq!(inverse.ints()[slot as usize] as usize, place, "the inverse undoes the order");
        }
        let key = |slot: i32| (chosen[slot as usize].min(experts), slot);
        assert!(order.ints().windows(2).all(|w| key(w[0]) < key(w[1])));
        for e in 0..experts {
            let count = chosen.iter().filter(|&&c| c == e).count() as i32;
            assert_eq!(offsets.ints()[e as usize + 1] - offsets.ints()[e as usize], count);
        }
        assert_eq!(offsets.ints()[0], 0);
    }
}

/// Numbers of experts are whole tiles and at most one tile away, no slot that is let go is better
/// than one that is kept, and spare slots are taken where all others are.
#[test]
fn round_groups_fills_tiles_with_the_best() {
    let (mut up, mut down) = (0, 0);
    for i in instances("round_groups") {
        let Op::RoundGroups(RoundGroups { experts, tile, spare, none }) = *i.op() else { unreachable!() };
        let (score, chosen) = (operand(&i, 0).1.floats(), operand(&i, 1).1.ints());
        let k = *operand(&i, 1).1.dims.last().expect("choices");
        let kept = results(&i).remove(0);
        let is_spare = |slot: usize| slot % k + spare as usize >= k;
        for e in 0..size(&i, experts) as i32 {
            let of: Vec<usize> = (0..chosen.len()).filter(|&s| chosen[s] == e).collect();
            let stays = |s: &usize| kept.ints()[*s] == e;
            assert!(of.iter().all(|s| stays(s) || kept.ints()[*s] == none as i32));
            let (own, spares): (Vec<usize>, Vec<usize>) = of.iter().partition(|&&s| !is_spare(s));
            let [own_kept, taken] = [&own, &spares].map(|s| s.iter().filter(|s| stays(s)).count());
            let (count, tile) = (own_kept + taken, tile as usize);
            assert!(count % tile == 0 && count.abs_diff(own.len()) < tile, "{count} of {}", own.len());
            assert!(taken == 0 || own_kept == own.len());
            let nearest = (own.len() + tile / 2) / tile * tile;
            assert!(count == nearest || (count + tile == nearest && own.len() + spares.len() < nearest));
            up += u32::from(count > own.len());
            down += u32::from(count < own.len());
            for slots in [&own, &spares] {
                let (stay, go): (Vec<usize>, Vec<usize>) = slots.iter().partition(|s| stays(s));
                let worse = |a: usize, b: usize| score[a] > score[b] || (score[a] == score[b] && a < b);
                assert!(stay.iter().all(|&a| go.iter().all(|&b| worse(a, b))));
            }
        }
        let others = (0..chosen.len()).filter(|&s| chosen[s] >= size(&i, experts) as i32);
        assert!(others.into_iter().all(|s| kept.ints()[s] == chosen[s]));
    }
    assert!(up > 3 && down > 3, "{up} up, {down} down");
}

/// Every slot takes its token's row along, wherever the order puts it: combined again, each token
/// has itself `k` times.
#[test]
fn gather_then_combine_is_k_times_the_tokens() {
    for i in instances("gather") {
        let (x, order) = (operand(&i, 0), operand(&i, 1));
        let k = i.module.dims["k"];
        let y = results(&i).remove(0);
        let mut inverse = vec![0; order.1.ints().len()];
        for (place, &slot) in order.1.ints().iter().enumerate() {
            inverse[slot as usize] = place as i32;
        }
        let k_dim = Dim(i.module.dims.get_index_of("k").expect("choices") as u32);
        let mut choices = x.0.dims.clone();
        *choices.last_mut().expect("rows") = k_dim;
        let inverse_type = Type::i32(&choices);
        let sizes: Vec<usize> = choices.iter().map(|&d| size(&i, d)).collect();
        let inverse = Tensor::int(&sizes, inverse);
        let y_type = &i.result_types()[0];
        let whole = apply(&i.module, Op::Combine, &[(y_type, &y), (&inverse_type, &inverse)]).remove(0);
        let expected = x.1.floats().iter().map(|x| x * k as f64).collect();
        close(&whole, &Tensor::float(&x.1.dims, expected));
    }
}

#[test]
fn add_counts_counts_every_grouped_slot() {
    for i in instances("add_counts") {
        let ((_, counts), (_, offsets)) = (operand(&i, 0), operand(&i, 1));
        let added = results(&i).remove(0);
        let sum = |t: &Tensor| t.floats().iter().sum::<f64>();
        assert_eq!(sum(&added) - sum(counts), f64::from(*offsets.ints().last().expect("offsets")));
    }
}

// --- attention -----------------------------------------------------------------------------------

/// Dense softmax over all keys with -inf where there is none, written out again from its
/// definition.
#[test]
fn attention_is_a_masked_softmax() {
    for i in instances("attention") {
        let Op::Attention(a) = i.op().clone() else { unreachable!() };
        let (q, k, v) = (operand(&i, 0).1, operand(&i, 1).1, operand(&i, 2).1);
        let [b, t, heads, d] = q.dims[..] else { unreachable!() };
        let [_, s, groups, _] = k.dims[..] else { unreachable!() };
        let mask: Vec<&[i32]> = (3..a.reads()).map(|n| operand(&i, n).1.ints()).collect();
        let mut o = vec![];
        let mut statistics = vec![];
        for row in 0..b * t * heads {
            let (bi, ti, h) = (row / heads / t, row / heads % t, row % heads);
            let group = h * groups / heads;
            let mut z = vec![f64::NEG_INFINITY; s];
            for (j, z) in z.iter_mut().enumerate() {
                let (query, key) = match a.mask {
                    Mask::Causal => (ti as i32, j as i32),
                    Mask::Positions => (mask[0][bi * t + ti], mask[1][bi * s + j]),
                };
                let distance = query - key;
                let other_segment = a.segments && {
                    let segments = mask[a.mask_operands().1.expect("there are segments")];
                    segments[bi * t + ti] != segments[bi * t + j]
                };
                if key < 0 || distance < 0 || a.window.is_some_and(|w| distance as u64 >= w) || other_segment
                {
                    continue;
                }
                let score: f64 = (0..d)
                    .map(|x| q.floats()[row * d + x] * k.floats()[((bi * s + j) * groups + group) * d + x])
                    .sum();
                let read = |n: usize, index: Option<f64>| {
                    let (of, x) = (a.read()[n], operand(&i, a.reads() + n).1);
                    let (each, own) = if of.heads { (heads, h) } else { (1, 0) };
                    x.floats()[match of.place {
                        Place::Query => (bi * t + ti) * each + own,
                        Place::Key => (bi * s + j) * each + own,
                        Place::All => own,
                        Place::Table => {
                            let last = x.dims[x.dims.len() - 1] - 1;
                            let index = index.expect("a table is read by index").floor();
                            own * (last + 1) + index.clamp(0.0, last as f64) as usize
                        }
                    }]
                };
                let (query, key) = (f64::from(query), f64::from(key));
                let at = Pair { score: score * a.scale, query, key, head: h as f64, read: &read };
                let program = a.program.clone().unwrap_or_default();
                if program.mask.as_ref().is_some_and(|mask| mask.evaluate(&at) <= 0.0) {
                    continue;
                }
                *z = match &program.score {
                    Some(of) => of.evaluate(&at),
                    None => a.softcap.map_or(at.score, |c| c * (at.score / c).tanh()),
                };
            }
            let sum: f64 = z.iter().map(|z| z.exp()).sum();
            statistics.push(sum.ln());
            for x in 0..d {
                let value = |j: usize| v.floats()[((bi * s + j) * groups + group) * d + x];
                let factor = |j: usize| match a.dropout {
                    Some(p) if kept_weight(mask[a.draws()][bi * t + ti], h, j, threshold(p)) => {
                        1.0 / (1.0 - p)
                    }
                    Some(_) => 0.0,
                    None => 1.0,
                };
                let dot: f64 = (0..s).map(|j| z[j].exp() * factor(j) * value(j)).sum();
                o.push(if sum == 0.0 { 0.0 } else { dot / sum });
            }
        }
        let found = results(&i);
        close(&found[0], &Tensor::float(&q.dims, o));
        close(&found[1], &Tensor::float(&q.dims[..3], statistics));
    }
}

/// Depth attention at a row is causal attention over the depths, of the query of that row,
/// positions in the batch.
#[test]
fn depth_attention_is_attention_of_one_query_over_depths() {
    for mut i in instances("depth_attention") {
        let Op::DepthAttention(DepthAttention(a)) = i.op().clone() else { unreachable!() };
        let (q, k, v) = (operand(&i, 0).1.clone(), operand(&i, 1).1.clone(), operand(&i, 2).1.clone());
        let row = operand(&i, 3).1.ints()[0];
        let found = results(&i).remove(0);
        let (n, m) = (q.dims.len(), k.dims.len());
        let (heads, d, groups, depths) = (q.dims[n - 2], q.dims[n - 1], k.dims[m - 2], k.dims[0]);
        let positions: usize = q.dims[..n - 2].iter().product();
        // [depths, positions, ..] to [positions, depths, ..].
        let each = groups * d;
        let turned = |x: &Tensor| -> Vec<f64> {
            let at = |p: usize, r: usize| &x.floats()[(r * positions + p) * each..][..each];
            (0..positions).flat_map(|p| (0..depths).flat_map(move |r| at(p, r))).copied().collect()
        };
        let sizes = [positions, 1, heads, d, depths, groups];
        let names = ["positions", "one", "heads_", "d_", "depths_", "groups_"];
        let made: Vec<Dim> = names.iter().zip(sizes).map(|(n, s)| i.module.dim(*n, s as u64)).collect();
        let [p, one, h, d_, r, g] = made[..] else { unreachable!() };
        let op = Op::Attention(Attention { mask: Mask::Positions, ..a });
        let (q_ty, k_ty) = (Type::f32(&[p, one, h, d_]), Type::f32(&[p, r, g, d_]));
        let (query_ty, key_ty) = (Type::i32(&[p, one]), Type::i32(&[p, r]));
        let kv_dims = [positions, depths, groups, d];
        let q4 = Tensor::float(&[positions, 1, heads, d], q.floats().to_vec());
        let (k4, v4) = (Tensor::float(&kv_dims, turned(&k)), Tensor::float(&kv_dims, turned(&v)));
        let query = Tensor::int(&[positions, 1], vec![row; positions]);
        let keys = Tensor::int(&[positions, depths], (0..positions).flat_map(|_| 0..depths as i32).collect());
        let operands = [(&q_ty, &q4), (&k_ty, &k4), (&k_ty, &v4), (&query_ty, &query), (&key_ty, &keys)];
        let expected = apply(&i.module, op, &operands).remove(0);
        close(&found, &Tensor::float(&found.dims, expected.floats().to_vec()));
    }
}

#[test]
fn a_taken_row_written_back_is_the_cache() {
    for i in instances("cache_take") {
        let ((ty, cache), row) = (operand(&i, 0), operand(&i, 1));
        let taken = results(&i);
        assert_ne!(taken[1], *cache, "zeros stand in its place");
        let types = i.result_types();
        let back =
            apply(&i.module, Op::CacheWrite, &[(ty, &taken[1]), (&types[0], &taken[0]), row]).remove(0);
        assert_eq!(back, *cache);
    }
}

// --- ends ----------------------------------------------------------------------------------------

#[test]
fn cross_entropy_is_minus_the_logarithm_of_softmax() {
    for i in instances("cross_entropy") {
        let (logits, (_, targets)) = (operand(&i, 0), operand(&i, 1));
        let p = apply(&i.module, Op::Softmax, &[logits]).remove(0);
        let vocab = *p.dims.last().expect("a vocabulary");
        let nll = results(&i).remove(0);
        for (row, &target) in targets.ints().iter().enumerate() {
            let expected = if target < 0 { 0.0 } else { -p.floats()[row * vocab + target as usize].ln() };
            assert!((nll.floats()[row] - expected).abs() < 1e-12);
        }
    }
}

#[test]
fn head_loss_is_product_cap_and_cross_entropy() {
    for i in instances("head_loss") {
        let Op::HeadLoss(HeadLoss { softcap }) = *i.op() else { unreachable!() };
        let (x, w, targets) = (operand(&i, 0), operand(&i, 1), operand(&i, 2));
        let h = *x.0.dims.last().expect("x has a last dimension");
        let mut logits = apply(&i.module, Op::Contract(Contract { over: smallvec![h] }), &[x, w]).remove(0);
        if let (Some(c), Data::Float(z)) = (softcap, &mut logits.data) {
            z.iter_mut().for_each(|z| *z = c * (*z / c).tanh());
        }
        let ty = Type::f32(&[x.0.without(&[h]), smallvec![w.0.dims[0]]].concat());
        let expected = apply(&i.module, Op::CrossEntropy, &[(&ty, &logits), targets]);
        for (a, b) in results(&i).iter().zip(&expected) {
            close(a, b);
        }
    }
}

#[test]
fn embed_takes_rows() {
    for i in instances("embed") {
        let ((_, table), (_, ids)) = (operand(&i, 0), operand(&i, 1));
        let rows = results(&i).remove(0);
        for (row, &id) in rows.floats().chunks(table.dims[1]).zip(ids.ints()) {
            assert_eq!(row, &table.floats()[id as usize * table.dims[1]..][..table.dims[1]]);
        }
    }
}

/// Indices are values, so no type can promise them: each is checked where it is read.
#[test]
fn an_index_out_of_range_is_an_error() {
    let checked = [
        "grouped",
        "grouped_outer",
        "group",
        "pick",
        "pick_grad",
        "gather",
        "combine",
        "combine_grad",
        "combine_gates",
        "add_counts",
        "cache_write",
        "append",
        "cache_take",
        "depth_attention",
        "depth_attention_grad",
        "embed",
        "embed_grad",
        "cross_entropy",
        "cross_entropy_grad",
        "head_loss",
        "head_loss_grad",
    ];
    for name in checked {
        let (mut tried, mut refused) = (0, 0);
        for i in instances(name) {
            for bad in [i32::MAX, i32::MIN] {
                let types: Vec<&Type> = i.operand_types();
                let mut tensors: Vec<Tensor> = operands(&i).into_iter().map(|(_, t)| t.clone()).collect();
                let at = types.iter().position(|t| t.dtype == DType::I32).expect("an index operand");
                let Data::Int(data) = &mut tensors[at].data else { unreachable!() };
                *data.last_mut().expect("indices") = bad;
                tried += 1;
                let outcome = evaluate(&i.module, i.op(), &types, &tensors);
                // A negative target is no target, a negative slot is not written; an expert beyond
                // the last is a no-op; counts have no slots to exceed.
                let legal = if bad < 0 {
                    name.contains("cross") || name.contains("head") || name == "append"
                } else {
                    ["group", "add_counts"].contains(&name)
                };
                assert_eq!(outcome.is_ok(), legal, "{name} with {bad}: {outcome:?}");
                refused += u32::from(outcome.is_err());
            }
        }
        assert!(tried > 0 && refused > 0, "{name}");
    }
}

#[test]
fn what_is_too_large_is_refused_at_once() {
    let mut m = Module::default();
    let (a, b) = (m.dim("a", 1 << 40), m.dim("b", 1 << 40));
    let elements = evaluate(&m, &Op::Zeros(Zeros(smallvec![a])), &[], &[]).expect_err("a terabyte");
    assert!(elements.to_string().contains("1099511627776 elements"), "{elements}");
    let wide =
        evaluate(&m, &Op::Zeros(Zeros(smallvec![a, b])), &[], &[]).expect_err("does not fit an address");
    assert!(wide.to_string().contains("more than 2^48 elements"), "{wide}");
    let (r, i, o) = (m.dim("r", 1 << 13), m.dim("i", 1 << 11), m.dim("o", 1 << 13));
    let (x, w) = (Type::f32(&[r, i]), Type::f32(&[o, i]));
    let zeros = [Tensor::float(&[1], vec![0.0]), Tensor::float(&[1], vec![0.0])];
    let work =
        evaluate(&m, &Op::Contract(Contract { over: smallvec![i] }), &[&x, &w], &zeros).expect_err("an hour");
    assert!(work.to_string().contains("137438953472 operations"), "{work}");
}
