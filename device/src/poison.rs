//! A device that poisons unwritten memory, so that every read of it shows.
//!
//! *In*: any device. *Out*: the same device, whose sessions run a program launch by launch and fill
//! memory that holds nothing with NaN, or with a wild number where it holds integers. *Promise*: a
//! program that reads only written memory gives the same bits as on the device alone; any other
//! gives NaN or an index out of range, on every device.
//!
//! Poison goes
//!
//! - when a plan is loaded: to inputs, results and prepared weights;
//! - when a program begins: to its temporaries and to activations that the forward keeps;
//! - before a launch: to the operands that it overwrites;
//! - after a launch: to the rows that [`Launch::places`] leaves out, also where the device computes
//!   them, and to temporaries that no later launch reads.
//!
//! Memory that [`Session::forget`] gives back holds numbers that are wild and finite: attention
//! multiplies values that it does not see by zero.
//!
//! Weights, gradients, moments, state and cotangents of depth caches begin as zeros, as
//! [`Device::load`] promises, and keep their values from program to program.
//!
//! Loops are unrolled, so this is for small models: `dreamc verify`, tests, and commands with
//! `DREAMC_POISON=1`.

use super::check::check;
use super::{Choice, Device, DeviceError, Group, Instrument, LaunchStats, RunStats, Session, agree};
use dreamc_compiler::ir::DType;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{
    Buffer, BufferId, Kernel, KernelKind, Launch, Layout, Operand, Plan, Program, ProgramKey, Role, Space,
    Step,
};
use dreamc_dsl::spec::Precision;
use indexmap::IndexMap;
use std::collections::HashSet;
use std::ops::Range;

/// The bytes of poison: NaN as f32 and as bf16, beyond every bound as i32.
const POISON: [u8; 4] = [0xc7, 0x7f, 0xc7, 0x7f];

/// The bytes of forgotten memory: 1e30 as f32 and as bf16, beyond every bound as i32.
const FORGOTTEN: [u8; 4] = [0x49, 0x71, 0x49, 0x71];

/// A device whose unwritten memory is poisoned.
pub struct Poisoned<'a>(pub Box<dyn Device + 'a>);

impl Device for Poisoned<'_> {
    fn name(&self) -> String {
        format!("{}, unwritten memory poisoned", self.0.name())
    }

    fn scratch_bytes(&self, plan: &Plan) -> Result<u64, DeviceError> {
        self.0.scratch_bytes(plan)
    }

    fn narrow(&self, asked: Precision) -> Narrow {
        self.0.narrow(asked)
    }

    fn writes(&self, asked: Precision) -> Narrow {
        self.0.writes(asked)
    }

    fn load(&self, plan: &Plan, group: &Group) -> Result<Box<dyn Session>, DeviceError> {
        Ok(Box::new(Poisoning::new(self.0.as_ref(), plan, group)?))
    }
}

/// Elements of a buffer: `rows` pieces of `length`, `stride` apart.
#[derive(Clone, Debug)]
struct Piece {
    buffer: BufferId,
    instance: u64,
    first: u64,
    rows: u64,
    length: u64,
    stride: u64,
}

impl Piece {
    /// A whole instance of a buffer.
    fn whole(plan: &Plan, buffer: BufferId, instance: u64) -> Self {
        let length = plan.buffer(buffer).elements();
        Piece { buffer, instance, first: 0, rows: 1, length, stride: length }
    }

    /// The same elements as `rows` rows, where they are one piece.
    fn as_rows(&self, rows: u64) -> Option<Piece> {
        let even = rows > 0 && self.length.is_multiple_of(rows);
        match self.rows {
            _ if self.rows == rows => Some(self.clone()),
            1 if even => {
                let length = self.length / rows;
                Some(Piece { rows, length, stride: length, ..*self })
            }
            _ => None,
        }
    }

    /// Bytes of the arena from the first element to the last.
    fn bytes(&self, plan: &Plan) -> Range<u64> {
        let b = plan.buffer(self.buffer);
        let elements = match self.rows {
            0 => 0,
            rows => (rows - 1) * self.stride + self.length,
        };
        let from = b.offset + b.dtype.room(self.instance * b.elements() + self.first);
        from..from + b.dtype.room(elements)
    }
}

/// One launch of an unrolled program.
struct Single {
    /// Its program in the plan of single launches.
    program: ProgramKey,
    /// Its number in the program's list.
    number: usize,
    /// Operands that it overwrites and that share no memory with those it reads.
    before: Vec<Piece>,
    /// Temporaries whose last reader it is.
    dead: Vec<Piece>,
    /// Its places, and the operands whose rows it may leave out where a place is negative.
    skipped: Option<(Piece, Vec<Piece>)>,
}

/// A program, unrolled.
struct Unrolled {
    /// Temporaries and kept activations, which hold nothing when it begins.
    empty: Vec<Piece>,
    launches: Vec<Single>,
    /// The launches of its list, with measurements of 0.
    listed: Vec<LaunchStats>,
}

struct Poisoning {
    plan: Plan,
    programs: IndexMap<ProgramKey, Unrolled>,
    inner: Box<dyn Session>,
    instrument: Instrument,
}

impl Poisoning {
    fn new(device: &dyn Device, plan: &Plan, group: &Group) -> Result<Self, DeviceError> {
        // Unrolling relies on loops and operands that fit together.
        check(plan)?;
        let mut single = Plan { programs: IndexMap::new(), ..plan.clone() };
        let mut programs = IndexMap::new();
        for (key, program) in &plan.programs {
            programs.insert(*key, unrolled(plan, program, &mut single));
        }
        let inner = device.load(&single, group)?;
        let mut session =
            Poisoning { plan: plan.clone(), programs, inner, instrument: Instrument::default() };
        let unset = |b: &Buffer| matches!(b.space, Space::Prepared | Space::Io);
        for (i, b) in plan.buffers.iter().enumerate().filter(|(_, b)| unset(b)) {
            for instance in 0..b.instances {
                poison(session.inner.as_mut(), &Piece::whole(plan, BufferId(i as u32), instance))?;
            }
        }
        Ok(session)
    }
}

fn poison(session: &mut dyn Session, piece: &Piece) -> Result<(), DeviceError> {
    fill(session, piece, POISON)
}

fn fill(session: &mut dyn Session, piece: &Piece, with: [u8; 4]) -> Result<(), DeviceError> {
    let dtype = session.plan().buffer(piece.buffer).dtype;
    let bytes: Vec<u8> = with.iter().copied().cycle().take(dtype.room(piece.length) as usize).collect();
    for row in 0..piece.rows {
        session.write(piece.buffer, piece.instance, piece.first + row * piece.stride, &bytes)?;
    }
    Ok(())
}

/// A program as single launches, which are programs of their own in `single`.
fn unrolled(plan: &Plan, program: &Program, single: &mut Plan) -> Unrolled {
    let list = agree::unrolled(program);
    let mut launches: Vec<Single> = vec![];
    let mut empty: Vec<Piece> = vec![];
    let mut seen = HashSet::new();
    for (number, launch) in &list {
        let touched = touched(plan, launch);
        for (piece, access) in &touched {
            // Cotangents of depth caches begin at zero: their last reader leaves them so.
            let adds = access.reads()
                && access.writes()
                && !matches!(plan.kernel(launch.kernel), Kernel::CacheWrite(_));
            let fresh = match plan.buffer(piece.buffer).space {
                Space::Temporary => true,
                Space::Saved => !adds,
                Space::Weights | Space::Mapped | Space::Gradients | Space::Optimizer | Space::State => {
                    continue;
                }
                Space::Prepared | Space::Io | Space::Alias | Space::Spread => continue,
            };
            if seen.insert((piece.buffer, piece.instance)) && fresh {
                empty.push(Piece::whole(plan, piece.buffer, piece.instance));
            }
        }
        let written = || touched.iter().filter(|(_, access)| *access == Role::Result).map(|(p, _)| p);
        let kept: Vec<Range<u64>> =
            touched.iter().filter(|(_, a)| *a != Role::Result).map(|(p, _)| p.bytes(plan)).collect();
        let before = written().filter(|p| !overlaps(&p.bytes(plan), &kept)).cloned().collect();
        let places = launch.places.as_ref().and_then(|places| {
            let rows = plan.kernel(launch.kernel).rows()?;
            let Operand::Tensor { buffer, instance, offset, .. } = places else { return None };
            let places = Piece {
                buffer: *buffer,
                instance: instance.at(&[]),
                first: *offset,
                rows: 1,
                length: rows,
                stride: rows,
            };
            Some((places, written().filter_map(|p| p.as_rows(rows)).collect()))
        });
        let program = agree::number(single.programs.len());
        let steps = vec![Step::Launch(launch.clone())];
        single.programs.insert(program, Program { steps, variables: 0 });
        launches.push(Single { program, number: *number, before, dead: vec![], skipped: places });
    }
    // Backwards from the end: a temporary is alive as long as a later launch reads it.
    let mut alive: HashSet<(BufferId, u64)> = HashSet::new();
    for ((_, launch), single) in list.iter().zip(&mut launches).rev() {
        let touched = touched(plan, launch);
        let own: Vec<Range<u64>> =
            touched.iter().filter(|(_, a)| a.writes()).map(|(p, _)| p.bytes(plan)).collect();
        for (piece, access) in &touched {
            let (key, whole) =
                ((piece.buffer, piece.instance), Piece::whole(plan, piece.buffer, piece.instance));
            let last = plan.buffer(piece.buffer).space == Space::Temporary && !alive.contains(&key);
            if last && !access.writes() && !overlaps(&whole.bytes(plan), &own) {
                single.dead.push(whole);
            }
        }
        for (piece, access) in &touched {
            if *access == Role::Result {
                alive.remove(&(piece.buffer, piece.instance));
            }
        }
        for (piece, access) in &touched {
            if *access != Role::Result {
                alive.insert((piece.buffer, piece.instance));
            }
        }
    }
    let unmeasured = |launch: &Launch| LaunchStats::of(&launch.origin, launch.kernel);
    let listed = dreamc_compiler::program::listed(&program.steps).map(unmeasured).collect();
    Unrolled { empty, launches, listed }
}

fn overlaps(range: &Range<u64>, others: &[Range<u64>]) -> bool {
    others.iter().any(|o| o.start < range.end && range.start < o.end)
}

/// The operands of a launch with their access; its places are read.
fn touched(plan: &Plan, launch: &Launch) -> Vec<(Piece, Role)> {
    let mut all = vec![];
    for (slot, operand) in plan.kernel(launch.kernel).signature().iter().zip(&launch.operands) {
        let Operand::Tensor { buffer, instance, offset, stride } = operand else { continue };
        let piece = |rows, length, stride| Piece {
            buffer: *buffer,
            instance: instance.at(&[]),
            first: *offset,
            rows,
            length,
            stride,
        };
        let piece = match slot.layout {
            Layout::Rows(_) => {
                let (rows, length) = slot.in_rows().unwrap_or((1, slot.elements()));
                piece(rows, length, if *stride == 0 { length } else { *stride })
            }
            Layout::Dense => {
                let pieces = across(plan, piece(1, slot.elements(), slot.elements()));
                all.extend(pieces.map(|piece| (piece, slot.role)));
                continue;
            }
            // No kernel overwrites such an extent, so its bounds are enough.
            Layout::Matrix(_) | Layout::UpTo(_) => {
                let rest = plan.buffer(*buffer).elements() - offset;
                piece(1, rest, rest)
            }
            Layout::Index(_) => continue,
        };
        all.push((piece, slot.role));
    }
    if let Some(Operand::Tensor { buffer, instance, .. }) = &launch.places {
        all.push((Piece::whole(plan, *buffer, instance.at(&[])), Role::Input));
    }
    all
}

/// A piece by the instances of its buffer that it goes through.
fn across(plan: &Plan, piece: Piece) -> impl Iterator<Item = Piece> {
    let each = plan.buffer(piece.buffer).elements().max(1);
    let (begin, end) = (piece.first, piece.first + piece.length);
    (begin / each..end.div_ceil(each).max(begin / each + 1)).map(move |more| {
        let (first, last) = (begin.max(more * each), end.min((more + 1) * each));
        let length = last.saturating_sub(first);
        let (instance, first) = (piece.instance + more, first - more * each);
        Piece { instance, first, length, stride: length, ..piece.clone() }
    })
}

impl Session for Poisoning {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn scratch_bytes(&self) -> u64 {
        self.inner.scratch_bytes()
    }

    fn write(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        self.inner.write(buffer, instance, element, bytes)
    }

    fn read(
        &self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.inner.read(buffer, instance, element, bytes)
    }

    fn forget(
        &mut self,
        buffer: BufferId,
        instance: u64,
        element: u64,
        elements: u64,
    ) -> Result<(), DeviceError> {
        self.inner.forget(buffer, instance, element, elements)?;
        let piece = Piece { buffer, instance, first: element, rows: 1, length: elements, stride: elements };
        fill(self.inner.as_mut(), &piece, FORGOTTEN)
    }

    fn run(&mut self, program: ProgramKey) -> Result<RunStats, DeviceError> {
        let Some(unrolled) = self.programs.get(&program) else {
            return Err(DeviceError::no_program(&self.plan, program));
        };
        let session = self.inner.as_mut();
        let mut all = RunStats::default();
        if self.instrument != Instrument::default() {
            all.by_launch.clone_from(&unrolled.listed);
        }
        for piece in &unrolled.empty {
            poison(session, piece)?;
        }
        for launch in &unrolled.launches {
            for piece in &launch.before {
                poison(session, piece)?;
            }
            let places = launch.skipped.as_ref().map(|(places, _)| read_ints(session, places)).transpose()?;
            let stats = session.run(launch.program)?;
            all.seconds += stats.seconds;
            all.launches += stats.launches;
            if let (Some(sum), Some(one)) = (all.by_launch.get_mut(launch.number), stats.by_launch.first()) {
                sum.count += one.count;
                sum.seconds += one.seconds;
                sum.multiply_adds += one.multiply_adds;
                sum.instructions += one.instructions;
            }
            if let (Some((_, pieces)), Some(places)) = (&launch.skipped, places) {
                let rows = places.iter().enumerate().filter(|(_, place)| **place < 0);
                for (row, piece) in rows.flat_map(|(row, _)| pieces.iter().map(move |p| (row as u64, p))) {
                    let first = piece.first + row * piece.stride;
                    poison(session, &Piece { first, rows: 1, ..piece.clone() })?;
                }
            }
            for piece in &launch.dead {
                poison(session, piece)?;
            }
        }
        Ok(all)
    }

    fn instrument(&mut self, instrument: Instrument) {
        self.instrument = instrument;
        self.inner.instrument(instrument);
    }

    fn choice(&self, program: ProgramKey, launch: usize) -> Option<&Choice> {
        let of = self.programs.get(&program)?.launches.iter().find(|l| l.number == launch)?;
        self.inner.choice(of.program, 0)
    }
}

fn read_ints(session: &dyn Session, piece: &Piece) -> Result<Vec<i32>, DeviceError> {
    debug_assert_eq!(session.plan().buffer(piece.buffer).dtype, DType::I32);
    let mut values = vec![0i32; piece.length as usize];
    session.read(piece.buffer, piece.instance, piece.first, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}
