//! Weights that are cut over ranks: what a rank has, what its programs gather, and what they sum.

mod unrolled;

use dreamc_compiler::program::kernel::{Gathered, Scattered};
use dreamc_compiler::program::{BufferId, Kernel, KernelKind, Operand, Plan, ProgramKey, Space, Task};
use dreamc_compiler::{Compiled, Options, compile, compile_together};
use dreamc_dsl::spec::Shard;
use std::path::Path;
use unrolled::{Placed, list};

const RANKS: u64 = 4;

fn compiled(name: &str, shard: Shard, rank: u64) -> Compiled {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}.yaml"));
    let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    let ranks = RANKS;
    compile(&spec, &Options { train: true, sequence: 8, ranks, rank, shard, ..Options::default() }).unwrap()
}

/// Bytes of all buffers of a kind.
fn bytes(plan: &Plan, space: Space) -> u64 {
    plan.buffers.iter().filter(|b| b.space == space).map(|b| b.bytes()).sum()
}

/// The window of a launch, its first number among all that are cut, and how many they are; of a
/// launch that exchanges such numbers.
fn exchanged<'p>(plan: &'p Plan, (launch, variables): &Placed<'p>) -> Option<(BufferId, bool, u64, u64)> {
    let (gathers, elements) = if let Kernel::Gathered(Gathered { elements, .. }) = plan.kernel(launch.kernel)
    {
        (true, *elements)
    } else if let Kernel::Scattered(Scattered { elements, .. }) = plan.kernel(launch.kernel) {
        (false, *elements)
    } else {
        return None;
    };
    match &launch.operands[..] {
        [Operand::Tensor { buffer, .. }, Operand::Tensor { .. }, Operand::Index(first)] => {
            Some((*buffer, gathers, first.at(variables), elements))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_have_parts_that_are_all_of_the_weights() {
    for name in ["quickstart", "tiny-dr-da", "tiny-prelude-core-coda"] {
        let whole = compiled(name, Shard::None, 0).plan;
        let parts: Vec<Plan> = (0..RANKS).map(|rank| compiled(name, Shard::Weights, rank).plan).collect();
        for space in [Space::Weights, Space::Gradients] {
            let all: u64 = parts.iter().map(|plan| bytes(plan, space)).sum();
            let own = bytes(&whole, space);
            // Room between tensors is cut, too, and what is not trained is whole on every rank.
            assert!(all >= own && all < own + own / 10, "{name}: {space:?} {all} {own}");
        }
        for plan in &parts {
            assert!(plan.arena < whole.arena, "{name}: {} {}", plan.arena, whole.arena);
            assert!(!plan.programs.contains_key(&ProgramKey::LAST));
        }
    }
}

/// Uses that do not train gather the parts of the same ranks.
#[test]
fn all_uses_gather_by_the_rank_of_the_plan() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/quickstart.yaml");
    let (spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    let (ranks, rank, shard) = (RANKS, 2, Shard::Weights);
    let train = Options { train: true, sequence: 8, ranks, rank, shard, ..Options::default() };
    let score = Options { logits: true, sequence: 8, ..Options::default() };
    let all = compile_together(&spec, &[("", train), ("score", score)]).unwrap().0;
    let plan = &all[1].plan;
    let score = list(plan, all[1].program(Task::Evaluate));
    assert!(score.iter().any(|placed| exchanged(plan, placed).is_some()));
    for kernel in &plan.kernels {
        if let Kernel::Gathered(Gathered { parts, .. }) | Kernel::Scattered(Scattered { parts, .. }) = kernel
        {
            assert_eq!((parts.ranks(), parts.rank), (RANKS, 2));
        }
    }
}

/// Every gradient is summed once in a micro-batch, and its window is touched by nothing after that
/// until it begins again at zero; a window of weights is read as long as it has them.
#[test]
fn each_gradient_is_summed_once_and_each_window_is_read_while_it_lasts() {
    for name in ["quickstart", "tiny-dr-da", "tiny-prelude-core-coda", "tiny-recurrent-group"] {
        let plan = compiled(name, Shard::Weights, 1).plan;
        let all = list(&plan, ProgramKey::BACKWARD);
        let gradients = plan.buffers.iter().filter(|b| b.space == Space::Spread && b.name.starts_with("d."));
        let numbers = gradients.map(|b| (b.offset + b.bytes()) / 4).max().unwrap();
        let mut sums = vec![0u8; numbers as usize];
        // Which window has a byte of the arena.
        let mut holds: Vec<Option<BufferId>> = vec![None; (plan.arena / 4) as usize];
        let mut gathers = 0;
        for placed in &all {
            if let Some((_, gathered, first, elements)) = exchanged(&plan, placed) {
                gathers += u64::from(gathered);
                let range = first as usize..(first + elements) as usize;
                if !gathered {
                    sums[range].iter_mut().for_each(|n| *n += 1);
                }
            }
            let slots = plan.kernel(placed.0.kernel).signature();
            let operands = placed.0.operands.iter().zip(&slots);
            for writes in [false, true] {
                for (operand, slot) in operands.clone() {
                    let Operand::Tensor { buffer, .. } = operand else { continue };
                    let b = plan.buffer(*buffer);
                    assert!(b.space != Space::Spread, "{name}: {} is nowhere", b.name);
                    if b.space != Space::Temporary {
                        continue;
                    }
                    let range = (b.offset / 4) as usize..((b.offset + b.bytes()) / 4) as usize;
                    let overwrites = slot.role == dreamc_compiler::program::Role::Result;
                    if writes && overwrites {
                        holds[range].fill(Some(*buffer));
                    } else if !writes && slot.role.reads() && b.name.ends_with(".window") && !overwrites {
                        let own = holds[range].iter().all(|held| *held == Some(*buffer));
                        assert!(own, "{name}: {} reads {} of another", placed.0.origin, b.name);
                    }
                }
            }
        }
        for b in plan.buffers.iter().filter(|b| b.space == Space::Spread && b.name.starts_with("d.")) {
            let own = (b.offset / 4) as usize..((b.offset + b.bytes()) / 4) as usize;
            assert!(sums[own].iter().all(|&n| n == 1), "{name}: {} is not summed once", b.name);
        }
        assert!(gathers > 0, "{name}");
    }
}
