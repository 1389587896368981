//! Faults in experts that ranks share: the turns in which rows go to their owners and come back,
//! the gradients that owners add up, and the bytes between them.

use super::{Fault, Stage, launches, wrong};
use dreamc_compiler::Compiled;
use dreamc_compiler::program::kernel::Pooled;
use dreamc_compiler::program::{Kernel, Launch, Operand, Plan, ProgramKey, Step, Task};
use dreamc_device::group::{Collective, Group};

/// Networks in layers with weights of their own, and projections of an attention that recurs.
pub const MIXTURES: &str = "
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 4}}
    ea: {experts: {count: 4, active: 2, intermediate: 6, query: 4}}
  body: [{repeat: 2, layers: [\"sa > ea\"]}, {recur: 3, layers: [\"sa > ea\"]}]";

/// Whether ranks share the experts of a plan.
fn shares(c: &Compiled) -> bool {
    c.tensors.iter().any(|t| t.owners > 1)
}

/// Edits launches of the programs that train.
fn edited(c: &mut Compiled, edit: &mut dyn FnMut(&mut Launch, &Kernel) -> bool) -> bool {
    let trained: Vec<ProgramKey> =
        c.plan.programs.keys().filter(|key| shares(c) && trains(**key)).copied().collect();
    let mut own = |launch: &mut Launch, list: &mut Vec<Kernel>| {
        let kernel = list[launch.kernel.0 as usize].clone();
        edit(launch, &kernel)
    };
    trained.into_iter().fold(false, |any, key| launches(&mut c.plan, key, &mut own) | any)
}

fn trains(key: ProgramKey) -> bool {
    matches!(key.task, Task::Backward { .. } | Task::Norm | Task::Update)
}

/// Edits the list of steps of each loop in the programs that train, and that of each program.
fn lists(c: &mut Compiled, edit: &dyn Fn(&mut Vec<Step>, &[Kernel]) -> bool) -> bool {
    fn all(
        steps: &mut Vec<Step>,
        kernels: &[Kernel],
        edit: &dyn Fn(&mut Vec<Step>, &[Kernel]) -> bool,
    ) -> bool {
        let inside = steps.iter_mut().fold(false, |any, step| match step {
            Step::Loop { steps, .. } => all(steps, kernels, edit) | any,
            Step::Launch(_) => any,
        });
        edit(steps, kernels) | inside
    }
    let sound = shares(c);
    let Plan { programs, kernels, .. } = &mut c.plan;
    let own = programs.iter_mut().filter(|(name, _)| sound && trains(**name));
    own.fold(false, |any, (_, program)| all(&mut program.steps, kernels, edit) | any)
}

/// Leaves launches of such kernels out of the programs that train, the first of each list.
fn without(c: &mut Compiled, is: fn(&Kernel) -> bool) -> bool {
    lists(c, &|steps, kernels| {
        let such = |step: &Step| matches!(step, Step::Launch(l) if is(&kernels[l.kernel.0 as usize]));
        steps.iter().position(such).map(|at| steps.remove(at)).is_some()
    })
}

/// Whether a list is that of turns.
fn is_turn(steps: &[Step], kernels: &[Kernel]) -> bool {
    let sends = |step: &Step| matches!(step, Step::Launch(l) if matches!(kernels[l.kernel.0 as usize], Kernel::Sent(_)));
    steps.iter().any(sends)
}

/// The last member of each team has no turn.
fn no_last_turn(c: &mut Compiled) -> bool {
    lists(c, &|steps, kernels| {
        steps.iter_mut().fold(false, |any, step| match step {
            Step::Loop { count, steps, .. } if *count > 1 && is_turn(steps, kernels) => {
                *count -= 1;
                true
            }
            Step::Loop { .. } | Step::Launch(_) => any,
        })
    })
}

/// A turn of another member than the loop's: the first always.
fn first_turn(launch: &mut Launch) -> bool {
    match launch.operands.last_mut() {
        Some(Operand::Index(turn)) => !std::mem::take(&mut turn.terms).is_empty(),
        Some(Operand::Tensor { .. }) | None => false,
    }
}

/// The experts of the first set of weights in place of the loop's.
fn first_set(launch: &mut Launch) -> bool {
    match launch.operands.get_mut(1) {
        Some(Operand::Tensor { instance, .. }) => !std::mem::take(&mut instance.terms).is_empty(),
        Some(Operand::Index(_)) | None => false,
    }
}

/// Changes the rows that a rank brings, after the lengths for each.
fn rows_change(group: &Group, what: Collective, bytes: &mut [u8]) {
    if what == Collective::AllToAll {
        let head = 8 * group.size() as usize;
        bytes[head..].chunks_exact_mut(4).for_each(|n| n[3] ^= 0x80);
    }
}

pub fn faults() -> Vec<Fault> {
    let of = |name, edit| Fault {
        name,
        spec: MIXTURES,
        stage: Stage::Plan(edit),
        caught: "ranks",
        place: ["", ""],
    };
    vec![
        of("rows return into the slots of another rank", |c| {
            edited(c, &mut |launch, k| matches!(k, Kernel::Returned(_)) && first_turn(launch))
        }),
        of("owners multiply the rows of the first rank in every turn", |c| {
            edited(c, &mut |launch, k| matches!(k, Kernel::Sent(_)) && first_turn(launch))
        }),
        of("rows do not return", |c| without(c, |k| matches!(k, Kernel::Returned(_)))),
        of("the last rank of a team has no turn", no_last_turn),
        of("an owner forgets what rows give to the gradient of its experts", |c| {
            lists(c, &|steps, kernels| {
                let outer = |step: &Step| matches!(step, Step::Launch(l) if matches!(kernels[l.kernel.0 as usize], Kernel::GroupedOuter(_)));
                let found = is_turn(steps, kernels).then(|| steps.iter().position(outer)).flatten();
                found.map(|at| steps.remove(at)).is_some()
            })
        }),
        of("an owner multiplies by the experts of the first layer", |c| {
            edited(c, &mut |launch, k| matches!(k, Kernel::Grouped(_)) && first_set(launch))
        }),
        of("ranks that own the same experts do not sum their gradients", |c| {
            without(c, |k| matches!(k, Kernel::Pooled(_)))
        }),
        of("half of the gradients of experts are summed", |c| {
            let sound = shares(c);
            c.plan.kernels.iter_mut().filter(|_| sound).fold(false, |any, k| match k {
                Kernel::Pooled(Pooled { elements, .. }) => {
                    *elements /= 2;
                    true
                }
                _ => any,
            })
        }),
        of("the norm of gradients leaves those of experts out", |c| {
            edited(c, &mut |launch, k| {
                let norm = matches!(k, Kernel::Norm(_)) && launch.origin == "norm of a part";
                match launch.operands.get_mut(1) {
                    // The place of a rank's second part, where its first has been.
                    Some(Operand::Tensor { offset, .. }) if norm && *offset % 2 == 1 => {
                        *offset -= 1;
                        true
                    }
                    _ => false,
                }
            })
        }),
        of("gradients of experts are those of the step before, too", |c| {
            let found = c.plan.find("gradients.experts").map(|id| c.plan.buffer(id).offset);
            let Some(offset) = found else { return false };
            let at: Vec<bool> = c.plan.buffers.iter().map(|b| b.offset == offset).collect();
            lists(c, &|steps, kernels| {
                let zero = |step: &Step| {
                    let Step::Launch(l) = step else { return false };
                    let Some(Operand::Tensor { buffer, .. }) = l.operands.first() else { return false };
                    matches!(kernels[l.kernel.0 as usize], Kernel::Zero(_)) && at[buffer.0 as usize]
                };
                steps.iter().position(zero).map(|at| steps.remove(at)).is_some()
            })
        }),
        of("a rank has the states of another's experts", |c| {
            let team = c.tensors.iter().map(|t| t.owners).max().unwrap_or(1);
            let own = c.tensors.iter_mut().filter(|t| t.owners > 1 && t.kept.start > 0);
            own.map(|t| t.kept = 0..t.kept.end - t.kept.start).count() > 0 && team > 1
        }),
        Fault {
            name: "a rank sends the negatives of its rows",
            spec: MIXTURES,
            stage: Stage::Ranks(|group| match group.rank() {
                1 => wrong(group, |group, what, bytes| rows_change(group, what, bytes)),
                _ => group,
            }),
            caught: "ranks",
            place: ["", ""],
        },
    ]
}
