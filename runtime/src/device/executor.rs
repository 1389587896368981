//! The executor: walks the launch lists of a plan, on any [backend](super::backend).
//!
//! *In*: a [`Plan`], a [`Group`], and a backend with the plan's memory. *Out*: a [`Session`].
//! *Promise*: a session launches exactly the programs' lists, in order; the plan is checked before
//! a backend is made ([`list`]), and no range outside a buffer is read or written.
//!
//! Launches of a program do not change between two runs: addresses follow from the arena, and
//! what changes from step to step (batches, the learning rate, scales) is in memory. So where a
//! backend can record launches, the second run of a program is recorded and later ones replay it; a
//! run that is measured or waited for launch by launch is not. `DREAMC_GRAPHS=0` launches one by
//! one, `DREAMC_GRAPHS=1` makes a recording that fails an error; otherwise what cannot be recorded
//! is launched. Programs with collectives are launched one by one: the group is the host's.

use super::backend::{Backend, Call, Value};
use super::check::check;
use super::{Choice, DeviceError, Group, Instrument, LaunchStats, RunStats, Session};
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::kernel::ints;
use dreamc_compiler::program::kernel::AllReduce;
use dreamc_compiler::program::{
    Affine, BufferId, Kernel, KernelId, KernelKind, Launch, Operand, Plan, Slot, Step,
};
use std::time::Instant;

/// An operand with everything known that does not depend on the loops; places count from the
/// arena's beginning, in bytes.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Tensor { base: u64, instance: Affine, instance_bytes: u64, stride: u64, dtype: DType },
    Index(Affine),
}

impl Place {
    fn of(plan: &Plan, operand: &Operand, slot: &Slot) -> Self {
        match operand {
            Operand::Index(affine) => Place::Index(affine.clone()),
            Operand::Tensor { buffer, instance, offset, stride } => {
                let b = plan.buffer(*buffer);
                Place::Tensor {
                    base: b.offset + offset * b.dtype.bytes(),
                    instance: instance.clone(),
                    instance_bytes: b.elements() * b.dtype.bytes(),
                    stride: match slot.in_rows() {
                        Some((_, length)) if *stride == 0 => length,
                        Some(_) | None => *stride,
                    },
                    dtype: b.dtype,
                }
            }
        }
    }

    fn at(&self, variables: &[u64]) -> Value {
        match self {
            Place::Index(affine) => Value::Index(affine.at(variables)),
            Place::Tensor { base, instance, instance_bytes, stride, dtype } => Value::Tensor {
                at: base + instance.at(variables) * instance_bytes,
                stride: *stride,
                dtype: *dtype,
            },
        }
    }
}

/// A launch of a program's list.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) kernel: KernelId,
    pub(crate) operands: Vec<Place>,
    pub(crate) places: Option<Place>,
    pub(crate) in_place: bool,
    pub(crate) origin: String,
}

impl Listed {
    /// The launch at these values of the loop variables; its operands go to `values`.
    pub(crate) fn call<'a>(
        &'a self,
        number: usize,
        plan: &'a Plan,
        variables: &[u64],
        values: &'a mut Vec<Value>,
    ) -> Call<'a> {
        values.clear();
        values.extend(self.operands.iter().map(|place| place.at(variables)));
        Call {
            number,
            id: self.kernel,
            kernel: plan.kernel(self.kernel),
            values,
            places: self.places.as_ref().map(|place| place.at(variables).at()),
            in_place: self.in_place,
            origin: &self.origin,
            counted: false,
            waited: false,
        }
    }
}

enum Walk {
    Launch(usize),
    Loop { variable: usize, count: u64, reverse: bool, steps: Vec<Walk> },
}

/// A program as a list of launches, and the order in which they take place.
pub(crate) struct Program {
    pub(crate) launches: Vec<Listed>,
    steps: Vec<Walk>,
    pub(crate) variables: usize,
    /// Whether some of it is done by the group.
    collective: bool,
}

/// The programs of a plan that the check passes, in the plan's order.
pub(crate) fn list(plan: &Plan) -> Result<Vec<Program>, DeviceError> {
    let mut checked = check(plan)?.launches.into_iter();
    let programs = plan.programs.values().map(|program| {
        let mut launches = vec![];
        let mut listed = |launch: &Launch| {
            let slots = plan.kernel(launch.kernel).signature();
            let operands = launch.operands.iter().zip(&slots);
            launches.push(Listed {
                kernel: launch.kernel,
                operands: operands.map(|(o, slot)| Place::of(plan, o, slot)).collect(),
                places: launch.places.as_ref().map(|o| Place::of(plan, o, &ints("places", &[]))),
                in_place: checked.next().is_none_or(|c| c.in_place),
                origin: launch.origin.clone(),
            });
            launches.len() - 1
        };
        let steps = walk(&program.steps, &mut listed);
        let collective = launches.iter().any(|l| sum(plan.kernel(l.kernel)).is_some());
        Program { steps, launches, variables: program.variables as usize, collective }
    });
    Ok(programs.collect())
}

fn walk(steps: &[Step], listed: &mut dyn FnMut(&Launch) -> usize) -> Vec<Walk> {
    let step = |step: &Step| match step {
        Step::Launch(launch) => Walk::Launch(listed(launch)),
        Step::Loop { variable, count, reverse, steps } => Walk::Loop {
            variable: *variable as usize,
            count: *count,
            reverse: *reverse,
            steps: walk(steps, listed),
        },
    };
    steps.iter().map(step).collect()
}

/// A session of a plan: `make` allocates the memory of a backend and makes its launches ready, one
/// code each.
pub(crate) fn load<B: Backend>(
    plan: &Plan,
    group: &Group,
    make: impl FnOnce(&[Program]) -> Result<(B, Vec<Vec<B::Code>>), DeviceError>,
) -> Result<Box<dyn Session>, DeviceError> {
    Ok(Box::new(Executor::new(plan, group, Graphs::of_environment(), make)?))
}

/// Whether programs are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Graphs {
    Off,
    /// Where that works.
    Try,
    /// Where it does not, runs fail.
    Must,
}

impl Graphs {
    fn of_environment() -> Self {
        match std::env::var("DREAMC_GRAPHS").as_deref() {
            Ok("0") => Graphs::Off,
            Ok("1") => Graphs::Must,
            _ => Graphs::Try,
        }
    }
}

/// Runs of a recorded program for which what was counted of it is repeated.
const RECOUNT: u64 = 63;

/// How far a program is recorded.
enum Recording<R> {
    /// It has not run.
    Never,
    /// It ran once, so that what it does wrong had a name.
    Once,
    /// It is recorded, with so many launches.
    Whole(R, u64),
    /// It cannot be recorded.
    Refused,
}

/// A loaded plan.
pub(crate) struct Executor<B: Backend> {
    /// One for each program; released before the memory that they hold addresses of.
    recordings: Vec<Recording<B::Recording>>,
    /// The last counts of each program, and how often it ran since.
    counted: Vec<(Vec<LaunchStats>, u64)>,
    programs: Vec<Program>,
    /// One for each launch of each program.
    codes: Vec<Vec<B::Code>>,
    backend: B,
    plan: Plan,
    graphs: Graphs,
    instrument: Instrument,
    /// Operands of the launch under way.
    values: Vec<Value>,
    group: Group,
    /// Numbers on their way to the group and back.
    numbers: Vec<f32>,
}

/// Most numbers that go to the group at once.
const AT_ONCE: u64 = 1 << 20;

impl<B: Backend> Executor<B> {
    pub(crate) fn new(
        plan: &Plan,
        group: &Group,
        graphs: Graphs,
        make: impl FnOnce(&[Program]) -> Result<(B, Vec<Vec<B::Code>>), DeviceError>,
    ) -> Result<Self, DeviceError> {
        let programs = list(plan)?;
        let all = || programs.iter().flat_map(|program| &program.launches);
        let mut most = 0;
        for launch in all() {
            let Some(AllReduce { ranks, elements }) = sum(plan.kernel(launch.kernel)) else { continue };
            if *ranks != group.size() {
                let (origin, ranks, size) = (launch.origin.clone(), *ranks, group.size());
                return Err(DeviceError::OtherGroup { origin, ranks, size });
            }
            most = most.max((*elements).min(AT_ONCE));
        }
        let longest = all().map(|launch| launch.operands.len()).max().unwrap_or(0);
        let (backend, codes) = make(&programs)?;
        Ok(Executor {
            recordings: programs.iter().map(|_| Recording::Never).collect(),
            counted: vec![(vec![], 0); programs.len()],
            programs,
            codes,
            backend,
            plan: plan.clone(),
            graphs,
            instrument: Instrument::default(),
            values: Vec::with_capacity(longest),
            group: group.clone(),
            numbers: vec![0.0; most as usize],
        })
    }

    /// Where a range of a buffer begins, in bytes from the arena's beginning.
    fn range(&self, id: BufferId, instance: u64, element: u64, bytes: usize) -> Result<u64, DeviceError> {
        let b = self.plan.buffers.get(id.0 as usize).ok_or(DeviceError::NoBuffer(id))?;
        let size = b.dtype.bytes();
        let start = instance.checked_mul(b.elements()).and_then(|i| i.checked_add(element));
        let end = start.and_then(|s| s.checked_mul(size)).and_then(|s| s.checked_add(bytes as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= b.bytes() && (bytes as u64).is_multiple_of(size) => {
                Ok(b.offset + start * size)
            }
            _ => Err(DeviceError::OutOfBounds {
                buffer: b.name.clone(),
                instance,
                element,
                elements: bytes as u64 / size,
            }),
        }
    }
}

/// The sum over a group that a kernel is.
fn sum(kernel: &Kernel) -> Option<&AllReduce> {
    if let Kernel::AllReduce(sum) = kernel { Some(sum) } else { None }
}

/// Sums numbers of the arena over the group, through the host and in parts: a sum of many is that
/// of each.
fn all_reduce<B: Backend>(
    backend: &mut B,
    group: &Group,
    numbers: &mut [f32],
    at: u64,
    elements: u64,
) -> Result<(), DeviceError> {
    for first in (0..elements).step_by(AT_ONCE as usize) {
        let part = &mut numbers[..(elements - first).min(AT_ONCE) as usize];
        let from = at + first * size_of::<f32>() as u64;
        backend.read(from, bytemuck::cast_slice_mut(part))?;
        group.all_reduce(part)?;
        backend.write(from, bytemuck::cast_slice(part))?;
    }
    Ok(())
}

/// State of a run.
struct Run<'a, B: Backend> {
    backend: &'a mut B,
    plan: &'a Plan,
    program: &'a Program,
    codes: &'a [B::Code],
    values: &'a mut Vec<Value>,
    group: &'a Group,
    numbers: &'a mut [f32],
    instrument: Instrument,
    /// Every launch is waited for, so that a failure has a name.
    synchronous: bool,
    variables: Vec<u64>,
    stats: RunStats,
}

impl<B: Backend> Run<'_, B> {
    /// All launches, now or from a recording that is made the second time.
    fn all(&mut self, recording: &mut Recording<B::Recording>, graphs: Graphs) -> Result<(), DeviceError> {
        let program = self.program;
        let measured = self.instrument != Instrument::default();
        let plain =
            !B::RECORDS || graphs == Graphs::Off || self.synchronous || measured || program.collective;
        if plain {
            if let Recording::Never = recording {
                *recording = Recording::Once;
            }
            return self.steps(&program.steps);
        }
        if let Recording::Once = recording {
            *recording = match (self.record(), graphs) {
                (Ok(graph), _) => Recording::Whole(graph, std::mem::take(&mut self.stats.launches)),
                (Err(error), Graphs::Must) => return Err(error),
                (Err(_), _) => Recording::Refused,
            };
        }
        match recording {
            Recording::Whole(graph, launches) => {
                match (self.backend.replay(graph), graphs) {
                    (Ok(()), _) => {
                        self.stats.launches = *launches;
                        self.stats.replayed = true;
                        return Ok(());
                    }
                    (Err(error), Graphs::Must) => return Err(error),
                    // None of it runs, so that it can be launched.
                    (Err(_), _) => *recording = Recording::Refused,
                }
            }
            Recording::Never => *recording = Recording::Once,
            Recording::Once | Recording::Refused => {}
        }
        self.stats.launches = 0;
        self.steps(&program.steps)
    }

    /// The launches as the backend keeps them.
    fn record(&mut self) -> Result<B::Recording, DeviceError> {
        self.backend.record()?;
        let program = self.program;
        let launched = self.steps(&program.steps);
        // Ended in any case: what follows is to run again.
        let recording = self.backend.recorded();
        launched.and(recording)
    }

    fn steps(&mut self, steps: &[Walk]) -> Result<(), DeviceError> {
        for step in steps {
            match step {
                Walk::Launch(number) => self.launch(*number)?,
                Walk::Loop { variable, count, reverse, steps } => {
                    for i in 0..*count {
                        self.variables[*variable] = if *reverse { count - 1 - i } else { i };
                        self.steps(steps)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn launch(&mut self, number: usize) -> Result<(), DeviceError> {
        let launch = &self.program.launches[number];
        let call = Call {
            counted: self.instrument.count,
            waited: self.synchronous,
            ..launch.call(number, self.plan, &self.variables, self.values)
        };
        let begun = self.instrument.time.then(Instant::now);
        let summed = sum(call.kernel);
        match summed {
            None => self.backend.launch(&self.codes[number], &call)?,
            Some(AllReduce { elements, .. }) => {
                let at = call.values.first().map_or(0, Value::at);
                all_reduce(self.backend, self.group, self.numbers, at, *elements)?;
            }
        }
        if self.instrument.time {
            self.backend.finish()?;
        }
        self.stats.launches += 1;
        if let Some(measured) = self.stats.by_launch.get_mut(number) {
            measured.count += 1;
            measured.seconds += begun.map_or(0.0, |b| b.elapsed().as_secs_f64());
            if call.counted && summed.is_none() {
                let work = self.backend.work(&call)?;
                measured.multiply_adds += work.multiply_adds;
                measured.instructions += work.instructions;
            }
        }
        if B::SYNCHRONOUS { self.look_for_bad_index() } else { Ok(()) }
    }

    /// Whether a kernel met an index out of range, and whose it was.
    fn look_for_bad_index(&mut self) -> Result<(), DeviceError> {
        let Some(number) = self.backend.bad_index()? else { return Ok(()) };
        let launch = self.program.launches.get(number);
        Err(DeviceError::BadIndex { origin: launch.map_or("a launch".into(), |l| l.origin.clone()) })
    }
}

impl<B: Backend> Session for Executor<B> {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn scratch_bytes(&self) -> u64 {
        self.backend.scratch_bytes()
    }

    fn write(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let at = self.range(buffer, instance, element, bytes.len())?;
        if bytes.is_empty() { Ok(()) } else { self.backend.write(at, bytes) }
    }

    fn read(
        &self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let at = self.range(buffer, instance, element, bytes.len())?;
        if bytes.is_empty() { Ok(()) } else { self.backend.read(at, bytes) }
    }

    fn run(&mut self, program: &str) -> Result<RunStats, DeviceError> {
        let begun = Instant::now();
        let Some(number) = self.plan.programs.get_index_of(program) else {
            return Err(DeviceError::NoProgram {
                program: program.into(),
                known: self.plan.programs.keys().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", "),
            });
        };
        let program = &self.programs[number];
        // Counting reads memory between launches, so what is recorded is counted now and then, and
        // repeated in between.
        let recorded = matches!(self.recordings[number], Recording::Once | Recording::Whole(..));
        let only_counts = self.instrument == Instrument { count: true, time: false };
        let counts = only_counts && B::RECORDS && self.graphs != Graphs::Off;
        let (counted, since) = &self.counted[number];
        let repeats = counts && recorded && !counted.is_empty() && *since < RECOUNT;
        let instrument = if repeats { Instrument::default() } else { self.instrument };
        let measured = instrument != Instrument::default();
        let by_launch = program.launches.iter().filter(|_| measured).map(|l| LaunchStats {
            origin: l.origin.clone(),
            kernel: l.kernel,
            count: 0,
            seconds: 0.0,
            multiply_adds: 0,
            instructions: 0,
        });
        let mut run = Run {
            stats: RunStats { by_launch: by_launch.collect(), ..RunStats::default() },
            backend: &mut self.backend,
            plan: &self.plan,
            program,
            codes: &self.codes[number],
            values: &mut self.values,
            group: &self.group,
            numbers: &mut self.numbers,
            instrument,
            synchronous: !B::SYNCHRONOUS && std::env::var_os("DREAMC_SYNCHRONOUS").is_some_and(|v| v != "0"),
            variables: vec![0; program.variables],
        };
        run.all(&mut self.recordings[number], self.graphs)?;
        run.backend.finish()?;
        run.look_for_bad_index()?;
        let mut stats = run.stats;
        stats.seconds = begun.elapsed().as_secs_f64();
        match (repeats, &mut self.counted[number]) {
            (true, (counted, since)) => {
                stats.by_launch = counted.clone();
                *since += 1;
            }
            (false, counted) if counts => *counted = (stats.by_launch.clone(), 0),
            _ => {}
        }
        Ok(stats)
    }

    fn instrument(&mut self, instrument: Instrument) {
        self.instrument = instrument;
    }

    fn choice(&self, program: &str, launch: usize) -> Option<&Choice> {
        let program = self.plan.programs.get_index_of(program)?;
        self.backend.choice(self.codes.get(program)?.get(launch)?)
    }
}
