//! Sums over ranks that begin while the backward goes on: of each gradient once, after everything
//! that touches it, and nothing else changed.

mod unrolled;

use dreamc_compiler::program::{
    Affine, BufferId, Kernel, KernelKind, Launch, Operand, Plan, ProgramKey, Space,
};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::spec::Shard;
use std::ops::Range;
use std::path::Path;
use unrolled::{Placed, list};

/// Operands with their instances worked out.
fn placed(launch: &Launch, variables: &[u64]) -> Vec<(Option<BufferId>, [u64; 3])> {
    let at = |affine: &Affine| affine.at(variables);
    let of = |operand: &Operand| match operand {
        Operand::Tensor { buffer, instance, offset, stride } => {
            (Some(*buffer), [at(instance), *offset, *stride])
        }
        Operand::Index(index) => (None, [at(index), 0, 0]),
    };
    launch.operands.iter().chain(&launch.places).map(of).collect()
}

/// Ranges of the arena that a launch touches, in numbers.
fn touched(plan: &Plan, (launch, variables): &Placed) -> Vec<Range<u64>> {
    let slots = plan.kernel(launch.kernel).signature();
    let reach = |(operand, slot): (&Operand, &dreamc_compiler::op::kernel::Slot)| {
        let Operand::Tensor { buffer, instance, offset, stride } = operand else { return None };
        let b = plan.buffer(*buffer);
        let span = match slot.in_rows() {
            Some((0, _) | (_, 0)) => return None,
            Some((rows, length)) => (rows - 1) * if *stride == 0 { length } else { *stride } + length,
            None => slot.span(|_| 0),
        };
        let first = b.offset / 4 + instance.at(variables) * b.elements() + offset;
        (b.space == Space::Gradients || b.space == Space::Alias).then_some(first..first + span)
    };
    launch.operands.iter().zip(&slots).filter_map(reach).collect()
}

#[test]
fn each_gradient_is_summed_once_behind_everything_that_touches_it() {
    let names = ["quickstart", "tiny-dr", "tiny-dr-da"];
    // Left on all ranks, and cut over them.
    for (name, cut) in names.into_iter().flat_map(|name| [(name, Shard::None), (name, Shard::Optimizer)]) {
        let shard = cut.states();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}.yaml"));
        let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
        let options =
            Options { train: true, sequence: 8, ranks: 4, rank: 1, shard: cut, ..Options::default() };
        let plan = compile(&spec, &options).unwrap().plan;
        let is_sum = |launch: &Launch| match plan.kernel(launch.kernel) {
            Kernel::AllReduce(_) => !shard,
            Kernel::ReduceScatter(_) => shard,
            _ => false,
        };
        let (alone, with) = (list(&plan, ProgramKey::BACKWARD), list(&plan, ProgramKey::LAST));
        let rest: Vec<&Placed> = with.iter().filter(|(launch, _)| !is_sum(launch)).collect();
        assert_eq!(rest.len(), alone.len(), "{name}");
        for (a, b) in rest.into_iter().zip(&alone) {
            assert_eq!((a.0.kernel, &a.0.origin), (b.0.kernel, &b.0.origin), "{name}");
            assert_eq!(placed(a.0, &a.1), placed(b.0, &b.1), "{name}: {}", a.0.origin);
        }
        let mut sums = vec![0u8; (plan.arena / 4) as usize];
        let range = |r: &Range<u64>| r.start as usize..r.end as usize;
        for launch in &with {
            for r in touched(&plan, launch) {
                match is_sum(launch.0) {
                    true => sums[range(&r)].iter_mut().for_each(|n| *n += 1),
                    false => assert!(
                        sums[range(&r)].iter().all(|&n| n == 0),
                        "{name}: {} touches what was summed",
                        launch.0.origin
                    ),
                }
            }
        }
        let gradients = || plan.buffers.iter().filter(|b| b.space == Space::Gradients);
        let begin = gradients().map(|b| b.offset / 4).min().unwrap();
        for launch in with.iter().filter(|(launch, _)| shard && is_sum(launch)) {
            let [(_, _), (None, [first, ..])] = placed(launch.0, &launch.1)[..] else { panic!("{name}") };
            assert_eq!(touched(&plan, launch)[0].start - begin, first, "{name}: a part begins elsewhere");
        }
        for b in gradients() {
            let own = b.offset / 4..(b.offset + b.bytes()) / 4;
            assert!(sums[range(&own)].iter().all(|&n| n == 1), "{name}: {} is not summed once", b.name);
        }
        let first = with.iter().position(|(launch, _)| is_sum(launch)).unwrap();
        let behind = with[first..].iter().filter(|(launch, _)| !is_sum(launch)).count();
        assert!(behind > alone.len() / 4, "{name}: {behind} of {} launches are left", alone.len());
    }
}
