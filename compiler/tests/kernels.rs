//! Kernels of all operations: what their signatures and their work say.

use dreamc_compiler::ir::random::{Instance, table};
use dreamc_compiler::ir::{Attention, DType, Extents, Mask, Tensor, cost};
use dreamc_compiler::op::kernel::Of;
use dreamc_compiler::program::{
    Affine, AttentionShape, Buffer, BufferId, Kernel, KernelId, KernelKind, Launch, Operand, Plan, Program,
    ProgramKey, Space, Step, kernel,
};
use dreamc_compiler::schedule::{Bind, schedule};

/// The kernels of an instance of one operation; `None` where the schedule takes it only among
/// others, as an element-wise operation that broadcasts over some of the row dimensions.
fn kernels(instance: &Instance) -> Option<Vec<Kernel>> {
    let bind = vec![Bind::Ignore; instance.function.results.len()];
    let scheduled = schedule(&instance.module, &instance.function, &bind).ok()?;
    Some(scheduled.launches.into_iter().map(|l| l.kernel).collect())
}

/// A kernel is priced without its operation, and costs what that costs.
#[test]
fn work_is_that_of_the_operation() {
    let mut products = vec![];
    for entry in table() {
        for seed in 0..100 {
            let i = entry.instance(seed);
            let Some(kernels) = kernels(&i) else { continue };
            let operands: Vec<&Tensor> = i.node().inputs.iter().map(|v| &i.args[v.index()]).collect();
            let known = Extents::observe(i.op(), &operands);
            for extents in [known, Extents::default()] {
                let results = i.result_types();
                let results: Vec<_> = results.iter().collect();
                let cost = cost(&i.module, i.op(), &i.operand_types(), &results, &extents).expect("small");
                let (mut multiply_adds, mut elementwise) = (0, 0);
                for work in kernels.iter().map(|k| k.work()).filter(|w| w.multiplies()) {
                    let units = work.units.known(&extents).expect("small");
                    let amount = work.of(1, units).expect("small");
                    multiply_adds += amount.multiply_adds;
                    elementwise += amount.elementwise;
                    products.push(entry.name);
                }
                assert_eq!(2 * multiply_adds, cost.flops, "seed {seed}: {extents:?}\n{}", i.module);
                if cost.flops > 0 {
                    assert_eq!(elementwise, cost.elementwise, "seed {seed}: {extents:?}\n{}", i.module);
                }
            }
        }
    }
    products.dedup();
    assert_eq!(products.len(), 18, "{products:?}");
}

/// A signature has every operand and every result of its operation once, and no two operands of one
/// name.
#[test]
fn signatures_have_each_operand_and_result_once() {
    for entry in table() {
        let instances = (0..100).map(|seed| entry.instance(seed));
        let found = instances.filter_map(|i| kernels(&i).map(|k| (i, k))).next();
        let (i, kernels) = found.expect("some are scheduled");
        let own = |k: &&Kernel| !matches!(k, Kernel::Rows(_) | Kernel::Zero(_));
        for kernel in kernels.iter().filter(own) {
            let (mut operands, mut results) = (vec![], vec![]);
            let (mut operand, mut result) = (0.., 0..);
            let signature = kernel.signature();
            for slot in &signature {
                let next = |list: &mut std::ops::RangeFrom<usize>| list.next().unwrap_or_default();
                match slot.of {
                    Some(Of::Operand(k) | Of::Gathered(k)) => operands.push(k),
                    Some(Of::Order(_)) => {}
                    Some(Of::Result(k)) => results.push(k),
                    Some(Of::State { operand, result }) => {
                        operands.push(operand);
                        results.push(result);
                    }
                    None if slot.role.writes() => results.push(next(&mut result)),
                    None => operands.push(next(&mut operand)),
                }
            }
            operands.sort_unstable();
            results.sort_unstable();
            assert_eq!(operands, Vec::from_iter(0..i.node().inputs.len()), "{kernel}\n{}", i.module);
            assert_eq!(results, Vec::from_iter(0..i.result_types().len()), "{kernel}\n{}", i.module);
            let mut names: Vec<&str> = signature.iter().map(|slot| slot.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), signature.len(), "{kernel}");
        }
    }
}

/// The longest heads whose values are their keys have a kernel on every GPU, and longer ones none.
#[test]
fn the_longest_shared_heads_fit_into_shared_memory() {
    use dreamc_compiler::codegen::{CodegenError, Variant, generate};
    let longest = dreamc_compiler::op::attention::kernel::LONGEST_SHARED;
    let of = |size, shared| {
        let shape = AttentionShape { batch: 1, queries: 1, keys: 64, heads: 4, kv_heads: 1, size };
        let attention = Attention { mask: Mask::Positions, ..Attention::default() };
        generate(&kernel::Attention { shape, attention, shared, lengths: vec![] }.into(), Variant::default())
    };
    assert!(of(longest, true).is_ok_and(|source| source.is_some()));
    for (size, shared) in [(longest, false), (longest + 1, true)] {
        assert!(matches!(of(size, shared), Err(CodegenError::Shared { .. })), "{size} {shared}");
    }
    let page = dreamc_dsl::component::attention::LATENT.doc;
    assert!(page.contains(&format!("or these are more than {longest}, caches hold keys")), "{page}");
}

fn tensor(number: u32) -> Operand {
    Operand::Tensor { buffer: BufferId(number), instance: Affine::default(), offset: 0, stride: 0 }
}

/// The plan's text once printed `documents`, which is read, as a result.
#[test]
fn a_plan_prints_results_behind_the_arrow() {
    let buffer = |name: &str| Buffer {
        name: name.into(),
        space: Space::Io,
        dtype: DType::I32,
        shape: vec![1, 8],
        instances: 1,
        offset: 0,
    };
    let launch = Launch {
        kernel: KernelId(0),
        operands: (0..3).map(tensor).collect(),
        places: None,
        origin: "test".into(),
    };
    let plan = Plan {
        buffers: ["places", "documents", "runs"].map(buffer).into(),
        kernels: vec![kernel::Runs { batch: 1, tokens: 8, begins: true }.into()],
        programs: [(ProgramKey::ALONE, Program { steps: vec![Step::Launch(launch)], variables: 0 })].into(),
        arena: 0,
        mapped: 0,
    };
    let text = plan.to_string();
    assert!(text.contains("runs 1×8 begins (places, documents) -> (runs) "), "{text}");
}

/// Kernels of one operation that differ in a number alone are different, also where the number is
/// NaN.
#[test]
fn kernels_are_equal_by_their_bits() {
    use std::collections::HashSet;
    let loss = |cap: f64| {
        let softcap = Some(dreamc_compiler::op::Bits(cap));
        Kernel::from(kernel::HeadLoss { rows: 1, vocab: 2, width: 3, softcap, stored: false })
    };
    let set: HashSet<Kernel> = [1.0, 1.0, 2.0, f64::NAN, f64::NAN].map(loss).into();
    assert_eq!(set.len(), 3);
}
