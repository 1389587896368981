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
//! is launched. A program with collectives is recorded in pieces, between one and the next:
//! collectives are asked for by the host at each replay, so that a rank that fails, ends or hangs
//! ends the others with its number, whichever way the numbers take.
//!
//! Sums that may overlap with later launches, whole or sharded over the ranks, begin where they
//! stand in the list, by the backend itself or by a thread that has the group meanwhile
//! ([`Overlap`]). The program waits for them at its end. That thread, or the device
//! ([`Staged`]), also gathers weights and moves rows ahead of their use, in the order of
//! [`ahead`](dreamc_compiler::ahead).

use super::backend::{Backend, Call, Value};
use super::check::check;
use super::exchange::{Collective, Overlap};
use super::staged::{Room, Staged};
use super::{Choice, DeviceError, Group, Instrument, LaunchStats, RunStats, Session};
use crate::mapped::Mapped;
use dreamc_compiler::ahead::{Ahead, Exchange, ahead};
use dreamc_compiler::ir::DType;
use dreamc_compiler::op::kernel::ints;
use dreamc_compiler::program::{
    Affine, BufferId, KernelId, KernelKind, Launch, Operand, Plan, ProgramKey, Slot, Space, Step,
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
    pub(crate) fn of(plan: &Plan, operand: &Operand, slot: &Slot) -> Self {
        match operand {
            Operand::Index(affine) => Place::Index(affine.clone()),
            Operand::Tensor { buffer, instance, offset, stride } => {
                let b = plan.buffer(*buffer);
                Place::Tensor {
                    base: b.offset + b.dtype.room(*offset),
                    instance: instance.clone(),
                    instance_bytes: b.dtype.room(b.elements()),
                    stride: match slot.in_rows() {
                        Some((_, length)) if *stride == 0 => length,
                        Some(_) | None => *stride,
                    },
                    dtype: b.dtype,
                }
            }
        }
    }

    pub(crate) fn at(&self, variables: &[u64]) -> Value {
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
    pub(crate) collective: bool,
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
        let collective = launches.iter().any(|l| Collective::of(plan.kernel(l.kernel)).is_some());
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
    /// It is recorded; the number counts its launches.
    Whole(Vec<Piece<R>>, u64),
    /// It cannot be recorded.
    Refused,
}

/// Launches of a program between two collectives, recorded.
struct Piece<R> {
    /// Absent where one collective follows another.
    launches: Option<R>,
    /// The collective after them: its number in the list, and its operands.
    collective: Option<(usize, Vec<Value>)>,
    /// Launches of the program that are done once both have run.
    done: u64,
}

/// A recording under way.
struct Recorder<R> {
    pieces: Vec<Piece<R>>,
    /// Whether the backend records: from the first launch of a piece on.
    under_way: bool,
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
    /// The thread that exchanges while launches go on.
    overlap: Option<Overlap>,
    /// Of each program: exchanges that begin before their place or end after it.
    ahead: Vec<Ahead>,
    /// The room of what is under way, of a device that exchanges by itself.
    room: Option<Room>,
}

/// Most numbers that go to the group at once.
pub const AT_ONCE: u64 = 1 << 20;

impl<B: Backend> Executor<B> {
    pub(crate) fn new(
        plan: &Plan,
        group: &Group,
        graphs: Graphs,
        make: impl FnOnce(&[Program]) -> Result<(B, Vec<Vec<B::Code>>), DeviceError>,
    ) -> Result<Self, DeviceError> {
        let programs = list(plan)?;
        let all = || programs.iter().flat_map(|program| &program.launches);
        let (mut most, mut overlap) = (0, false);
        for launch in all() {
            let Some(collective) = Collective::of(plan.kernel(launch.kernel)) else { continue };
            collective.check(group, &launch.origin)?;
            most = most.max(collective.at_once());
            overlap |= collective.overlaps();
        }
        let longest = all().map(|launch| launch.operands.len()).max().unwrap_or(0);
        let (mut backend, codes) = make(&programs)?;
        let itself = group.size() > 1 && backend.pass(&[])?;
        let early = group.size() > 1 && (itself || group.any_thread());
        let ahead: Vec<Ahead> =
            plan.programs.values().map(|p| if early { ahead(plan, p) } else { Ahead::default() }).collect();
        let some = ahead.iter().any(|ahead| !ahead.list.is_empty());
        let overlap = group.any_thread() && overlap || !itself && some;
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
            overlap: if overlap { Overlap::new(group.clone()) } else { None },
            ahead,
            room: itself.then(|| Room::of(plan)),
        })
    }

    /// Where a range of a buffer begins, in bytes from the arena's beginning.
    fn range(&self, id: BufferId, instance: u64, element: u64, bytes: u64) -> Result<u64, DeviceError> {
        let b = self.plan.buffers.get(id.0 as usize).filter(|b| b.space != Space::Spread);
        let b = b.ok_or(DeviceError::NoBuffer(id))?;
        let (unit, size) = (b.dtype.unit(), b.dtype.bytes());
        let start = instance.checked_mul(b.elements()).and_then(|i| i.checked_add(element));
        let start = start.filter(|start| start.is_multiple_of(unit)).map(|start| start / unit);
        let end = start.and_then(|s| s.checked_mul(size)).and_then(|s| s.checked_add(bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= b.bytes() && bytes.is_multiple_of(size) => {
                Ok(b.offset + start * size)
            }
            _ => Err(DeviceError::OutOfBounds {
                buffer: b.name.clone(),
                instance,
                element,
                elements: bytes / size * unit,
            }),
        }
    }
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
    overlap: Option<&'a mut Overlap>,
    ahead: &'a Ahead,
    /// Exchanges of it that the program has come to, and the jobs of those that have begun.
    come: usize,
    jobs: Vec<Option<u64>>,
    /// Those of a device that exchanges by itself.
    staged: Option<Staged<'a>>,
    instrument: Instrument,
    /// Every launch is waited for, so that a failure has a name.
    synchronous: bool,
    variables: Vec<u64>,
    stats: RunStats,
    /// Launches that have a pair of marks, in order.
    marked: Vec<usize>,
    /// Where launches go that are recorded.
    recorder: Option<Recorder<B::Recording>>,
    /// Launches that are done already, by a recording that failed half-way.
    done: u64,
}

impl<'a, B: Backend> Run<'a, B> {
    /// All launches, now or from a recording that is made the second time.
    fn all(&mut self, recording: &mut Recording<B::Recording>, graphs: Graphs) -> Result<(), DeviceError> {
        let program = self.program;
        for &number in &self.ahead.first {
            self.begin(number)?;
        }
        let measured = self.instrument != Instrument::default();
        if !B::RECORDS || graphs == Graphs::Off || self.synchronous || measured {
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
            Recording::Whole(pieces, launches) => match (self.replay(pieces)?, graphs) {
                (None, _) => {
                    self.stats.launches = *launches;
                    self.stats.replayed = true;
                    return Ok(());
                }
                (Some(refusal), Graphs::Must) => return Err(refusal),
                // Nothing of the piece has run: it can be launched, and so can the pieces after it.
                (Some(_), _) => *recording = Recording::Refused,
            },
            Recording::Never => *recording = Recording::Once,
            Recording::Once | Recording::Refused => {}
        }
        self.stats.launches = 0;
        self.steps(&program.steps)
    }

    /// The launches as the backend keeps them.
    fn record(&mut self) -> Result<Vec<Piece<B::Recording>>, DeviceError> {
        self.recorder = Some(Recorder { pieces: vec![], under_way: false });
        let program = self.program;
        let launched = self.steps(&program.steps);
        // Ended in any case: what follows is to run again.
        let ended = self.end_piece(None);
        let pieces = self.recorder.take().map_or(vec![], |recorder| recorder.pieces);
        launched.and(ended).map(|()| pieces)
    }

    /// Ends the piece that is recorded, with the collective after it.
    fn end_piece(&mut self, collective: Option<(usize, Vec<Value>)>) -> Result<(), DeviceError> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let under_way = std::mem::replace(&mut recorder.under_way, false);
        let launches = under_way.then(|| self.backend.recorded()).transpose()?;
        let done = self.stats.launches + u64::from(collective.is_some());
        recorder.pieces.push(Piece { launches, collective, done });
        Ok(())
    }

    /// Runs what is recorded; gives the error of a piece that the backend refused; nothing of that
    /// piece runs.
    fn replay(&mut self, pieces: &[Piece<B::Recording>]) -> Result<Option<DeviceError>, DeviceError> {
        let mut done = 0;
        for piece in pieces {
            if let Some(Err(refusal)) = piece.launches.as_ref().map(|own| self.backend.replay(own)) {
                self.done = done;
                return Ok(Some(refusal));
            }
            if let Some((number, values)) = &piece.collective {
                self.exchange(*number, values)?;
            }
            done = piece.done;
        }
        Ok(None)
    }

    /// Exchanges numbers with the other ranks; where the collective overlaps, begins to.
    fn exchange(&mut self, number: usize, values: &[Value]) -> Result<(), DeviceError> {
        let kernel = self.plan.kernel(self.program.launches[number].kernel);
        let Some(collective) = Collective::of(kernel).map(|collective| collective.with(values)) else {
            return Ok(());
        };
        let at = values.first().map_or(0, Value::at);
        if collective.goes_ahead() && !self.ahead.list.is_empty() {
            return self.come_to();
        }
        let overlap = self.overlap.as_mut().filter(|_| collective.overlaps());
        if self.backend.collective(collective, at)? {
            if !collective.overlaps() {
                self.stats.exchanged += self.backend.joined()?;
            }
        } else if let Some(overlap) = overlap {
            overlap.begin(collective.job(self.backend, at)?, false);
        } else {
            // The thread has the group until it is done with what was begun before.
            self.joined()?;
            let begun = Instant::now();
            collective.run(self.backend, self.group, self.numbers, at)?;
            // Nothing else is done meanwhile.
            let seconds = begun.elapsed().as_secs_f64();
            self.stats.exchanged += seconds;
            self.stats.waited += seconds;
        }
        Ok(())
    }

    /// The collective of an exchange of those that may be ahead of their place, and where its
    /// numbers are.
    fn ahead(&self, number: usize) -> Option<(&'a Exchange, Collective<'a>, u64)> {
        let (program, plan) = (self.program, self.plan);
        let exchange = self.ahead.list.get(number)?;
        let launch = program.launches.get(exchange.launch)?;
        let values: Vec<Value> = launch.operands.iter().map(|place| place.at(&exchange.variables)).collect();
        let collective = Collective::of(plan.kernel(launch.kernel))?.with(&values);
        Some((exchange, collective, values.first().map_or(0, Value::at)))
    }

    /// Begins an exchange, of those that may be ahead of their place.
    fn begin(&mut self, number: usize) -> Result<(), DeviceError> {
        let Some((exchange, collective, at)) = self.ahead(number) else { return Ok(()) };
        if let Some(staged) = self.staged.as_mut() {
            self.jobs[number] = Some(0);
            return staged.begin(self.backend, (number, exchange), (collective, at));
        }
        let Some(overlap) = self.overlap.as_mut() else { return Ok(()) };
        if let Some(job) = exchange.over.and_then(|before| self.jobs[before]) {
            overlap.until(job, self.backend)?;
        }
        let job = collective.job(self.backend, at)?;
        self.jobs[number] = Some(overlap.begin(job, exchange.waits));
        Ok(())
    }

    /// Comes to the place of the next exchange of those.
    fn come_to(&mut self) -> Result<(), DeviceError> {
        let number = self.come;
        self.come += 1;
        let Some((exchange, collective, at)) = self.ahead(number) else { return Ok(()) };
        if self.jobs[number].is_none() {
            self.begin(number)?;
        }
        match (exchange.waits, self.jobs[number], self.staged.as_mut(), self.overlap.as_mut()) {
            (true, Some(_), Some(staged), _) => {
                staged.take(self.backend, (number, exchange), (collective, at))?;
            }
            (true, Some(job), None, Some(overlap)) => overlap.take(job, self.backend)?,
            _ => {}
        }
        exchange.then.iter().try_for_each(|&next| self.begin(next))
    }

    /// Ends what a device has under way by itself.
    fn end(&mut self) -> Result<(), DeviceError> {
        self.staged.as_mut().map_or(Ok(()), |staged| staged.end(self.backend))
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
        if self.stats.launches < self.done {
            self.stats.launches += 1;
            return Ok(());
        }
        let launch = &self.program.launches[number];
        if Collective::of(self.plan.kernel(launch.kernel)).is_some() {
            let values: Vec<Value> = launch.operands.iter().map(|place| place.at(&self.variables)).collect();
            match self.recorder {
                Some(_) => self.end_piece(Some((number, values)))?,
                None => self.timed(number, |run| run.exchange(number, &values))?,
            }
            self.stats.launches += 1;
            return Ok(());
        }
        if let Some(recorder) = self.recorder.as_mut().filter(|recorder| !recorder.under_way) {
            self.backend.record()?;
            recorder.under_way = true;
        }
        self.timed(number, |run| {
            let call = Call {
                counted: run.instrument.count,
                waited: run.synchronous,
                ..launch.call(number, run.plan, &run.variables, run.values)
            };
            run.backend.launch(&run.codes[number], &call)
        })?;
        self.stats.launches += 1;
        if let Some(measured) = self.stats.by_launch.get_mut(number)
            && self.instrument.count
        {
            let call = launch.call(number, self.plan, &self.variables, self.values);
            let work = self.backend.work(&call)?;
            measured.multiply_adds += work.multiply_adds;
            measured.instructions += work.instructions;
        }
        if B::SYNCHRONOUS { self.look_for_bad_index() } else { Ok(()) }
    }

    /// Does a launch, and measures its time where that is asked for. A pair of marks on the
    /// device's clock for each launch is read when the program has ended: the host waits for
    /// nothing in between. Where there is no such clock the host's is read.
    fn timed(
        &mut self,
        number: usize,
        launch: impl FnOnce(&mut Self) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let pair = 2 * self.marked.len();
        let marked = self.instrument.time && self.backend.mark(pair)?;
        let begun = (self.instrument.time && !marked).then(Instant::now);
        launch(self)?;
        if marked {
            self.backend.mark(pair + 1)?;
            self.marked.push(number);
        } else if begun.is_some() {
            self.backend.finish()?;
        }
        if let Some(measured) = self.stats.by_launch.get_mut(number) {
            measured.count += 1;
            measured.seconds += begun.map_or(0.0, |b| b.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Waits for the exchanges that were begun.
    fn join(&mut self) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let seconds = self.backend.joined()?;
        if seconds > 0.0 {
            self.stats.exchanged += seconds;
            self.stats.waited += begun.elapsed().as_secs_f64();
        }
        let joined = self.joined();
        if let Some(overlap) = self.overlap.as_mut() {
            overlap.forget();
            self.stats.exchanged += std::mem::take(&mut overlap.seconds);
            self.stats.waited += std::mem::take(&mut overlap.waited);
        }
        joined
    }

    /// Waits for the thread that has the group, and takes its results.
    fn joined(&mut self) -> Result<(), DeviceError> {
        self.overlap.as_mut().map_or(Ok(()), |overlap| overlap.join(self.backend))
    }

    /// The times of launches by the device's clock, once all have ended.
    fn read_marks(&mut self) -> Result<(), DeviceError> {
        for (i, &number) in self.marked.iter().enumerate() {
            let seconds = self.backend.between(2 * i, 2 * i + 1)?;
            if let Some(measured) = self.stats.by_launch.get_mut(number) {
                measured.seconds += seconds;
            }
        }
        Ok(())
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

    fn copies(&self) -> bool {
        B::COPIES
    }

    fn write(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let at = self.range(buffer, instance, element, bytes.len() as u64)?;
        let b = self.plan.buffer(buffer);
        if b.space == Space::Mapped {
            return Err(DeviceError::ReadOnly { buffer: b.name.clone() });
        }
        if bytes.is_empty() { Ok(()) } else { self.backend.write(at, bytes) }
    }

    fn read(
        &self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let at = self.range(buffer, instance, element, bytes.len() as u64)?;
        if bytes.is_empty() { Ok(()) } else { self.backend.read(at, bytes) }
    }

    fn map(&mut self, buffer: BufferId, instance: u64, numbers: Mapped) -> Result<(), DeviceError> {
        let at = self.range(buffer, instance, 0, numbers.bytes)?;
        match self.plan.buffer(buffer) {
            b if b.space == Space::Mapped => self.backend.map(at, numbers, b.dtype),
            _ => Err(DeviceError::NoBuffer(buffer)),
        }
    }

    fn forget(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        elements: u64,
    ) -> Result<(), DeviceError> {
        // A length beyond all integers is beyond the buffer, too.
        let bytes = self.plan.buffers.get(buffer.0 as usize).map_or(elements, |b| b.dtype.room(elements));
        let at = self.range(buffer, instance, element, bytes)?;
        if self.plan.buffer(buffer).space == Space::Mapped {
            return Ok(());
        }
        self.backend.forget(at, bytes)
    }

    fn run(&mut self, program: ProgramKey) -> Result<RunStats, DeviceError> {
        let begun = Instant::now();
        let Some(number) = self.plan.programs.get_index_of(&program) else {
            return Err(DeviceError::no_program(&self.plan, program));
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
        let by_launch =
            program.launches.iter().filter(|_| measured).map(|l| LaunchStats::of(&l.origin, l.kernel));
        let first = self.backend.room();
        let mut run = Run {
            stats: RunStats { by_launch: by_launch.collect(), ..RunStats::default() },
            backend: &mut self.backend,
            plan: &self.plan,
            program,
            codes: &self.codes[number],
            values: &mut self.values,
            group: &self.group,
            numbers: &mut self.numbers,
            overlap: self.overlap.as_mut(),
            ahead: &self.ahead[number],
            come: 0,
            jobs: vec![None; self.ahead[number].list.len()],
            staged: self.room.map(|room| Staged::new(&room, first, self.ahead[number].list.len())),
            instrument,
            synchronous: !B::SYNCHRONOUS && std::env::var_os("DREAMC_SYNCHRONOUS").is_some_and(|v| v != "0"),
            variables: vec![0; program.variables],
            marked: vec![],
            recorder: None,
            done: 0,
        };
        let ran = run.all(&mut self.recordings[number], self.graphs).and_then(|()| run.end());
        // Also where a launch failed: the other ranks wait for the sums that were begun.
        let joined = run.join();
        ran.and(joined)?;
        run.backend.finish()?;
        run.read_marks()?;
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

    fn choice(&self, program: ProgramKey, launch: usize) -> Option<&Choice> {
        let program = self.plan.programs.get_index_of(&program)?;
        self.backend.choice(self.codes.get(program)?.get(launch)?)
    }
}
