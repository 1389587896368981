//! The launches of a program in the order in which a device makes them.

use dreamc_compiler::program::{Launch, Plan, ProgramKey, Step};

/// A launch at values of the loop variables.
pub type Placed<'p> = (&'p Launch, Vec<u64>);

fn unroll<'p>(steps: &'p [Step], variables: &mut Vec<u64>, list: &mut Vec<Placed<'p>>) {
    for step in steps {
        match step {
            Step::Launch(launch) => list.push((launch, variables.clone())),
            Step::Loop { variable, count, reverse, steps } => {
                for i in 0..*count {
                    variables[*variable as usize] = if *reverse { count - 1 - i } else { i };
                    unroll(steps, variables, list);
                }
            }
        }
    }
}

/// Those of a program, its loops unrolled.
pub fn list<'p>(plan: &'p Plan, program: ProgramKey) -> Vec<Placed<'p>> {
    let program = &plan.programs[&program];
    let mut all = vec![];
    unroll(&program.steps, &mut vec![0; program.variables as usize], &mut all);
    all
}
