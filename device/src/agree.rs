//! Two devices side by side: whether every launch of a program does the same to the same memory.
//!
//! *In*: a plan, one of its programs, two devices. *Out*: an [`Agreement`] for each launch that
//! took place. *Promise*: both devices begin each launch with the same bytes (the first device's
//! results are copied to the second), so a difference is that launch's own and not what an earlier
//! one left.
//!
//! It is how the `ptx` device is calibrated where there is a GPU, and how kernels are compared with
//! the CPU where there is none: the sums of a launch may differ in the last bits, an integer may
//! not.

use super::{Device, DeviceError, Group, Session};
use dreamc_compiler::ir::DType;
use dreamc_compiler::program::{
    Affine, KernelKind, Launch, Operand, Plan, Program, ProgramKey, Step, Task, listed,
};

/// One launch on both devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// Its [`origin`](Launch::origin).
    pub origin: String,
    /// Its kernel in a few words.
    pub kernel: String,
    /// Whether all bytes that it wrote are equal.
    pub equal: bool,
    /// The largest difference of two numbers, relative to the largest number of the buffer;
    /// infinite where integers or codes differ or a NaN meets a number.
    pub difference: f64,
    /// The buffer it is in.
    pub buffer: String,
}

/// Runs `program` launch by launch on both devices. `prepare` writes weights and inputs to each
/// session.
pub fn compare(
    plan: &Plan,
    program: ProgramKey,
    first: &dyn Device,
    second: &dyn Device,
    prepare: &dyn Fn(&mut dyn Session) -> Result<(), DeviceError>,
) -> Result<Vec<Agreement>, DeviceError> {
    let (apart, launches) = apart(plan, program)?;
    let (mut a, mut b) = (first.load(&apart, &Group::alone())?, second.load(&apart, &Group::alone())?);
    prepare(a.as_mut())?;
    prepare(b.as_mut())?;
    let mut list = vec![];
    for (i, launch) in launches.iter().enumerate() {
        a.run(number(i))?;
        b.run(number(i))?;
        list.push(look(plan, launch, a.as_ref(), b.as_mut())?);
    }
    Ok(list)
}

/// The program of a launch by itself.
pub fn number(launch: usize) -> ProgramKey {
    ProgramKey::first(Task::Alone(launch as u64))
}

/// A plan with a program for each launch of `program` in turn, see [`number`], and those launches.
pub fn apart(plan: &Plan, program: ProgramKey) -> Result<(Plan, Vec<Launch>), DeviceError> {
    let Some(list) = plan.programs.get(&program) else {
        return Err(DeviceError::no_program(plan, program));
    };
    // Which rows nobody needs is for a device to use or not; compared is the work on all of them.
    let launches: Vec<Launch> =
        unrolled(list).into_iter().map(|(_, launch)| Launch { places: None, ..launch }).collect();
    let single = |launch: &Launch| Program { steps: vec![Step::Launch(launch.clone())], variables: 0 };
    let programs = launches.iter().enumerate().map(|(i, l)| (number(i), single(l))).collect();
    Ok((Plan { programs, ..plan.clone() }, launches))
}

/// The launches in the order in which they take place, with the loop variables filled in, and the
/// number of each in the program's list.
pub(super) fn unrolled(program: &Program) -> Vec<(usize, Launch)> {
    let mut list = vec![];
    unroll(&program.steps, 0, &mut vec![0; program.variables as usize], &mut list);
    list
}

/// Adds the launches of steps whose first has number `at`.
fn unroll(steps: &[Step], mut at: usize, variables: &mut Vec<u64>, list: &mut Vec<(usize, Launch)>) {
    for step in steps {
        at = match step {
            Step::Launch(launch) => {
                let mut launch = launch.clone();
                for operand in launch.operands.iter_mut().chain(&mut launch.places) {
                    let (Operand::Tensor { instance: affine, .. } | Operand::Index(affine)) = operand;
                    *affine = Affine::constant(affine.at(variables));
                }
                list.push((at, launch));
                at + 1
            }
            Step::Loop { variable, count, reverse, steps } => {
                for i in 0..*count {
                    variables[*variable as usize] = if *reverse { count - 1 - i } else { i };
                    unroll(steps, at, variables, list);
                }
                at + listed(steps).count()
            }
        };
    }
}

/// Compares what a launch wrote, and makes it the same.
fn look(
    plan: &Plan,
    launch: &Launch,
    a: &dyn Session,
    b: &mut dyn Session,
) -> Result<Agreement, DeviceError> {
    let kernel = plan.kernel(launch.kernel);
    let mut agreement = Agreement {
        origin: launch.origin.clone(),
        kernel: kernel.to_string(),
        equal: true,
        difference: 0.0,
        buffer: String::new(),
    };
    for (slot, operand) in kernel.signature().iter().zip(&launch.operands) {
        let Operand::Tensor { buffer, instance, .. } = operand else { continue };
        if !slot.role.writes() {
            continue;
        }
        let (id, b_of) = (*buffer, plan.buffer(*buffer));
        let instance = instance.at(&[]);
        // A launch that adds to a range of gradients writes to buffers of their own, too.
        let bytes = b_of.dtype.room(b_of.elements()) as usize;
        let (mut here, mut there) = (vec![0; bytes], vec![0; bytes]);
        a.read(id, instance, 0, &mut here)?;
        b.read(id, instance, 0, &mut there)?;
        if here == there {
            continue;
        }
        agreement.equal = false;
        let difference = distance(b_of.dtype, &here, &there);
        if difference >= agreement.difference {
            agreement.difference = difference;
            agreement.buffer = b_of.name.clone();
        }
        b.write(id, instance, 0, &here)?;
    }
    Ok(agreement)
}

fn distance(dtype: DType, a: &[u8], b: &[u8]) -> f64 {
    let floats = |bytes: &[u8]| -> Vec<f64> {
        match dtype {
            DType::F32 => bytes
                .chunks_exact(4)
                .map(|c| f64::from(f32::from_le_bytes([c[0], c[1], c[2], c[3]])))
                .collect(),
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|c| half::bf16::from_le_bytes([c[0], c[1]]).to_f64()).collect()
            }
            DType::I32 | DType::E4m3 => vec![],
            // Weights alone, which no kernel writes.
            DType::Packed(_) => vec![],
        }
    };
    if matches!(dtype, DType::I32 | DType::E4m3) {
        return f64::INFINITY;
    }
    let (a, b) = (floats(a), floats(b));
    let largest = a.iter().fold(0.0f64, |m, x| if x.is_finite() { m.max(x.abs()) } else { m });
    let apart = |(x, y): (&f64, &f64)| match (x - y).abs() {
        // Two equal infinities, or two NaNs of different payloads.
        d if d.is_nan() && (x == y || (x.is_nan() && y.is_nan())) => 0.0,
        d if d.is_nan() => f64::INFINITY,
        d => d,
    };
    a.iter().zip(&b).map(apart).fold(0.0, f64::max) / largest.max(f64::MIN_POSITIVE)
}
