//! Experts that ranks share: the experts that a rank has, the turns in which rows go to their
//! owners and come back, and the gradients that owners add up.

mod unrolled;

use dreamc_compiler::program::{Kernel, KernelKind, Operand, Plan, ProgramKey, Role, Space, Step, Task};
use dreamc_compiler::{CompileError, Compiled, Options, compile, compile_together};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::Shard;
use std::path::Path;
use unrolled::list;

const RANKS: u64 = 4;

/// Networks, projections of attentions in recurrent layers, and both in a prelude.
const NAMES: [&str; 3] = ["quickstart", "tiny-dr-da", "tiny-recurrent-group"];

fn spec(name: &str) -> Spec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/{name}.yaml"));
    let (mut spec, _) = dreamc_dsl::load(&path, &[]).unwrap();
    for component in spec.model.components.values_mut() {
        if let dreamc_dsl::spec::Component::Experts(e) = component {
            e.count = e.count.next_multiple_of(RANKS);
        } else if let dreamc_dsl::spec::Component::Sequence(a) | dreamc_dsl::spec::Component::Depth(a) =
            component
            && let Some(p) = &mut a.projection
        {
            p.count = Some(RANKS);
        }
    }
    spec
}

fn options(rank: u64, experts: u64, shard: Shard) -> Options {
    Options { train: true, sequence: 8, ranks: RANKS, rank, experts, shard, ..Options::default() }
}

fn compiled(name: &str, rank: u64, experts: u64, shard: Shard) -> Compiled {
    compile(&spec(name), &options(rank, experts, shard)).unwrap()
}

/// Bytes of all buffers of a kind.
fn bytes(plan: &Plan, space: Space) -> u64 {
    plan.buffers.iter().filter(|b| b.space == space).map(|b| b.bytes()).sum()
}

#[test]
fn ranks_of_a_team_have_all_experts_once_and_their_memory_alone() {
    for name in NAMES {
        for shard in Shard::ALL {
            let whole = compiled(name, 0, 1, shard);
            for team in [2, 4] {
                let parts: Vec<Compiled> = (0..RANKS).map(|rank| compiled(name, rank, team, shard)).collect();
                let mut routed = 0;
                for (i, t) in whole.tensors.iter().enumerate() {
                    let stack = t.experts().is_some();
                    routed += if stack { t.elements() } else { 0 };
                    for (rank, part) in (0..).zip(&parts) {
                        let own = &part.tensors[i];
                        assert_eq!(own.owners, if stack { team } else { 1 }, "{name}: {}", t.name);
                        if stack {
                            let each = t.elements() / team;
                            let first = rank % team * each;
                            assert_eq!(own.kept, first..first + each, "{name}: {} of rank {rank}", t.name);
                        }
                    }
                }
                assert!(routed > 0, "{name}");
                let (all, stacks) = (bytes(&whole.plan, Space::Weights), 4 * routed);
                // With weights cut a rank of the plan before has a part of experts, too.
                let others = all - if shard.weights() { stacks / RANKS } else { stacks };
                for part in &parts {
                    let own = bytes(&part.plan, Space::Weights);
                    let most = others + stacks / team;
                    // Buffers have room after them, and parts are cut by states.
                    assert!(
                        own <= most + most / 10 + (1 << 14),
                        "{name}, {shard:?}, {team}: {own} of {most}"
                    );
                    assert!(part.plan.buffers.iter().all(|b| !b.name.contains('@')), "{name}: two values");
                }
            }
        }
    }
}

/// In every turn each product has the rows of one member, all of them return, and nothing reads
/// experts that are not there.
#[test]
fn rows_go_to_the_owners_of_their_experts_and_return_in_turns() {
    for (name, team) in NAMES.into_iter().flat_map(|name| [(name, 2), (name, 4)]) {
        let c = compiled(name, 1, team, Shard::None);
        for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
            let (mut turns, mut sent, mut returned, mut products) = (vec![], 0, 0, 0);
            for (launch, variables) in list(&c.plan, program) {
                for operand in &launch.operands {
                    if let Operand::Tensor { buffer, .. } = operand {
                        let b = c.plan.buffer(*buffer);
                        assert!(b.space != Space::Spread, "{name}: {} is nowhere", b.name);
                    }
                }
                let turn = |operands: &[Operand]| match operands.last() {
                    Some(Operand::Index(turn)) => turn.at(&variables),
                    other => panic!("{other:?}"),
                };
                match c.plan.kernel(launch.kernel) {
                    Kernel::Sent(kernel) => {
                        assert_eq!((kernel.owners.team, kernel.owners.rank), (team, 1));
                        sent += 1;
                        turns.push(turn(&launch.operands));
                    }
                    Kernel::Returned(_) => {
                        returned += 1;
                        turns.push(turn(&launch.operands));
                    }
                    Kernel::Grouped(_) => products += 1,
                    _ => {}
                }
            }
            assert!(sent > 0 && returned > 0 && products >= returned, "{name}: {sent} {returned} {products}");
            for member in 0..team {
                let own = turns.iter().filter(|turn| **turn == member).count();
                assert_eq!(own * team as usize, turns.len(), "{name}: turns of member {member}");
            }
        }
    }
}

/// Rows that several products read are sent once, and the rows of a turn are as many as a rank's
/// own slots.
#[test]
fn products_of_the_same_rows_share_their_turns() {
    let c = compiled("quickstart", 0, 4, Shard::None);
    fn loops<'p>(steps: &'p [Step], all: &mut Vec<&'p [Step]>) {
        for step in steps {
            if let Step::Loop { steps, .. } = step {
                all.push(steps);
                loops(steps, all);
            }
        }
    }
    let mut all = vec![];
    loops(&c.plan.programs[&ProgramKey::EVALUATE].steps, &mut all);
    let kernels = |steps: &[Step]| -> Vec<Kernel> {
        let launches = steps.iter().filter_map(|step| match step {
            Step::Launch(launch) => Some(c.plan.kernel(launch.kernel).clone()),
            Step::Loop { .. } => None,
        });
        launches.collect()
    };
    let turns: Vec<Vec<Kernel>> = all.into_iter().map(kernels).collect();
    let shares = |turns: &Vec<Kernel>| {
        let of = |is: fn(&Kernel) -> bool| turns.iter().filter(|k| is(k)).count();
        (of(|k| matches!(k, Kernel::Sent(_))), of(|k| matches!(k, Kernel::Returned(_)))) == (1, 2)
    };
    assert!(turns.iter().any(shares), "gate and up have one loop of turns");
    for kernel in turns.iter().flatten() {
        if let Kernel::Sent(sent) = kernel {
            let slots = kernel.signature();
            let rows = slots.iter().find(|slot| slot.name == "rows").unwrap();
            assert_eq!((rows.role, rows.elements()), (Role::Result, sent.slots * sent.width));
        }
    }
}

/// Owners of the same experts sum their gradients once in a step; owners of all do not.
#[test]
fn gradients_of_experts_are_pooled_over_ranks_that_own_the_same() {
    for (team, sums) in [(2, 1), (4, 0)] {
        let c = compiled("quickstart", 3, team, Shard::Optimizer);
        let pooled = list(&c.plan, ProgramKey::NORM).into_iter().filter_map(|(launch, _)| {
            let Kernel::Pooled(pooled) = c.plan.kernel(launch.kernel) else { return None };
            Some(pooled.owners.alike().collect::<Vec<u64>>())
        });
        let expected: Vec<Vec<u64>> = vec![vec![1, 3]; sums];
        assert_eq!(pooled.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn uses_that_do_not_train_share_experts_by_the_rank_of_the_plan() {
    let train = options(2, 4, Shard::None);
    let score = Options { logits: true, sequence: 8, ..Options::default() };
    let all = compile_together(&spec("quickstart"), &[("", train), ("score", score)]).unwrap().0;
    let plan = &all[1].plan;
    let sent = list(plan, all[1].program(Task::Evaluate)).into_iter().find_map(|(launch, _)| {
        let Kernel::Sent(sent) = plan.kernel(launch.kernel) else { return None };
        Some(sent.owners)
    });
    let owners = sent.expect("rows are sent");
    assert_eq!((owners.rank, owners.ranks, owners.team), (2, RANKS, 4));
}

#[test]
fn experts_that_ranks_cannot_share_are_refused() {
    let mut odd = spec("quickstart");
    for component in odd.model.components.values_mut() {
        if let dreamc_dsl::spec::Component::Experts(e) = component {
            e.count = 6;
        }
    }
    let error = compile(&odd, &options(0, 4, Shard::None)).unwrap_err();
    assert!(matches!(error, CompileError::Experts { experts: 6, team: 4, .. }), "{error}");
    let error = compile(&spec("tiny-prelude-core-coda"), &options(0, 2, Shard::None));
    if let Err(error) = error {
        assert_eq!(error, CompileError::NoExperts, "{error}");
    }
    let error = compile(&spec("quickstart"), &Options { ranks: 6, ..options(0, 4, Shard::None) });
    assert!(error.is_err());
    let alone = Options { experts: 2, ..Options::default() };
    assert!(matches!(compile(&spec("quickstart"), &alone), Err(CompileError::Exclude(..))));
}
