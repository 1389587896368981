//! Faults in weights that are cut over ranks: what a layer gathers, what is summed of its gradient,
//! and which windows share memory.

use super::{Fault, Stage, kernel, launches};
use dreamc_compiler::Compiled;
use dreamc_compiler::program::kernel::Scattered;
use dreamc_compiler::program::{Affine, BufferId, Kernel, Launch, Operand, Plan, ProgramKey, Step};

/// Layers with weights of their own, and one that recurs.
const LAYERS: &str = "
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 4}}
    mlp: {mlp: {intermediate: 7}}
    wide: {mlp: {intermediate: 9}}
  body: [{repeat: 3, layers: [\"sa > mlp\"]}, {recur: 2, layers: [\"sa > wide\"]}]";

/// Programs with gradients of plans whose weights are cut.
fn programs(c: &Compiled) -> Vec<ProgramKey> {
    let cut = c.cut.weights();
    c.plan.programs.keys().filter(|key| cut && key.is_backward()).copied().collect()
}

/// Edits launches of programs with gradients.
fn edited(c: &mut Compiled, edit: &mut dyn FnMut(&mut Launch, &mut Vec<Kernel>) -> bool) -> bool {
    let programs = programs(c);
    programs.into_iter().fold(false, |any, key| launches(&mut c.plan, key, edit) | any)
}

/// Where an exchange of cut numbers begins among them.
fn first(launch: &mut Launch) -> Option<&mut Affine> {
    match &mut launch.operands[..] {
        [_, _, Operand::Index(first)] => Some(first),
        _ => None,
    }
}

fn gathers(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Gathered(_))
}

fn scatters(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Scattered(_))
}

/// The first round of a loop in place of the round.
fn stands_still(c: &mut Compiled, is: fn(&Kernel) -> bool) -> bool {
    edited(c, &mut |launch, list| {
        let such = is(&list[launch.kernel.0 as usize]);
        first(launch).filter(|_| such).is_some_and(|first| !std::mem::take(&mut first.terms).is_empty())
    })
}

/// Takes one launch of such kernels out of each program with gradients, the last or the first.
fn without(c: &mut Compiled, is: fn(&Kernel) -> bool, last: bool) -> bool {
    fn take(steps: &mut Vec<Step>, is: &dyn Fn(&Step) -> bool, last: bool) -> bool {
        let mut order: Vec<usize> = (0..steps.len()).collect();
        if last {
            order.reverse();
        }
        for i in order {
            if is(&steps[i]) {
                steps.remove(i);
                return true;
            }
            if let Step::Loop { steps, .. } = &mut steps[i]
                && take(steps, is, last)
            {
                return true;
            }
        }
        false
    }
    let programs = programs(c);
    let Plan { programs: all, kernels, .. } = &mut c.plan;
    let is = |step: &Step| matches!(step, Step::Launch(l) if is(&kernels[l.kernel.0 as usize]));
    programs
        .iter()
        .fold(false, |any, name| all.get_mut(name).is_some_and(|p| take(&mut p.steps, &is, last)) | any)
}

fn window(launch: &Launch) -> Option<BufferId> {
    match launch.operands.first() {
        Some(Operand::Tensor { buffer, .. }) => Some(*buffer),
        Some(Operand::Index(_)) | None => None,
    }
}

/// Puts every window of a gradient where the window is that its program gathered last before it
/// begins: weights are lost before the backward has read them.
fn share(c: &mut Compiled) -> bool {
    let (mut moved, mut last) = (vec![], None);
    edited(c, &mut |launch, list| {
        let kernel = &list[launch.kernel.0 as usize];
        if gathers(kernel) {
            last = window(launch);
        } else if matches!(kernel, Kernel::Zero(_)) {
            moved.extend(window(launch).zip(last));
        }
        false
    });
    let cut = |id: &BufferId| c.plan.buffer(*id).name.ends_with(".window");
    moved.retain(|(one, other)| cut(one) && cut(other));
    for (gradient, weights) in &moved {
        c.plan.buffers[gradient.0 as usize].offset = c.plan.buffer(*weights).offset;
    }
    !moved.is_empty()
}

pub fn faults() -> Vec<Fault> {
    let of =
        |name, edit| Fault { name, spec: LAYERS, stage: Stage::Plan(edit), caught: "ranks", place: ["", ""] };
    vec![
        of("a layer gathers the weights of the first", |c| stands_still(c, gathers)),
        of("the gradients of a layer go to the first", |c| stands_still(c, scatters)),
        of("a layer reads what is left in its window", |c| without(c, gathers, false)),
        of("a gradient stays in its window", |c| without(c, scatters, false)),
        of("a window of gradients begins with the last layer's", |c| {
            edited(c, &mut |launch, list| {
                kernel(launch, list, |k| match k {
                    Kernel::Zero(zero) => std::mem::replace(&mut zero.elements, 1) > 1,
                    _ => false,
                })
            })
        }),
        of("windows share memory while both are read", share),
        of("a rank's part is left out of a sum", |c| {
            edited(c, &mut |launch, list| {
                kernel(launch, list, |k| match k {
                    Kernel::Scattered(Scattered { elements, .. }) => {
                        *elements -= *elements / 2;
                        *elements > 1
                    }
                    _ => false,
                })
            })
        }),
        of("the backward reads what the forward left", |c| without(c, gathers, true)),
    ]
}
