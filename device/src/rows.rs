//! Exchanges of the ranks that share the experts of a mixture.
//!
//! *In*: slots of a rank, sorted by expert, and where those of each expert begin. *Out*: rows of
//! all experts of a rank with it, and back. *Promise*: a turn brings the rows of one member of each
//! team alone, so that a buffer of its slots has room for all that come, whatever routers choose;
//! rows arrive by expert, in the order that they have on their rank. Nothing is sent of slots that
//! chose no expert. Sums over the ranks that own the same experts are taken in the order of the
//! ranks.
//!
//! All ranks of the group take part in every exchange, as many of them as the longest of all teams
//! needs; ranks of other teams bring one another nothing.

use super::DeviceError;
use super::backend::{Backend, Pass, Value};
use super::exchange::Done;
use super::executor::AT_ONCE;
use crate::group::{Group, GroupError};
use dreamc_compiler::program::Owners;
use dreamc_compiler::program::kernel::{Pooled, Returned, Sent};
use std::ops::Range;

/// Operands of a launch that moves rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    /// Where the tensors begin, in bytes, in the order of the kernel's signature.
    places: [u64; 4],
    /// Bytes of an element of a row.
    unit: u64,
    /// The member of each team whose turn it is.
    source: u64,
}

impl Moved {
    pub(crate) fn of(values: &[Value]) -> Self {
        let unit = match values.first() {
            Some(Value::Tensor { dtype, .. }) => dtype.bytes(),
            Some(Value::Index(_)) | None => 0,
        };
        let places = std::array::from_fn(|i| values.get(i).map_or(0, Value::at));
        Moved { places, unit, source: values.last().map_or(0, Value::index) }
    }
}

/// Slots of a turn.
#[derive(Clone, Copy)]
struct Turn {
    owners: Owners,
    slots: u64,
    width: u64,
    /// Bytes of a row.
    row: u64,
    /// The member whose rows are exchanged.
    source: u64,
}

fn refused(words: String) -> GroupError {
    GroupError::Meeting(words)
}

fn unsorted() -> GroupError {
    refused("slots are grouped by numbers that are no offsets".into())
}

/// So many offsets of groups as they come; `None` for numbers that do not rise inside the slots.
fn offsets(bytes: &[u8], count: u64, slots: u64) -> Option<Vec<u64>> {
    let numbers: Vec<i32> = bytemuck::pod_collect_to_vec(bytes);
    let all: Vec<u64> = numbers.iter().map(|&n| u64::try_from(n).ok()).collect::<Option<_>>()?;
    let fine = all.len() as u64 == count && all.is_sorted() && all.last().is_some_and(|&last| last <= slots);
    fine.then_some(all)
}

/// Where the slots of each expert begin on a rank: from 0 on.
fn of_all(bytes: &[u8], owners: &Owners, slots: u64) -> Option<Vec<u64>> {
    offsets(bytes, owners.experts + 1, slots).filter(|all| all.first() == Some(&0))
}

/// The slots of a member's experts.
fn of_member(offsets: &[u64], owners: &Owners, member: u64) -> Range<u64> {
    let at = |member: u64| offsets.get((member * owners.own()) as usize).copied().unwrap_or(0);
    at(member)..at(member + 1)
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

impl Turn {
    fn is_source(&self) -> bool {
        self.owners.member() == self.source
    }

    /// The rank whose turn it is.
    fn rank(&self) -> u64 {
        self.owners.first() + self.source
    }

    /// Members of the team other than this one, with their ranks.
    fn others(&self) -> impl Iterator<Item = (u64, u64)> {
        let (own, first) = (self.owners.member(), self.owners.first());
        (0..self.owners.team).filter(move |member| *member != own).map(move |member| (member, first + member))
    }

    /// Where the slots of each expert begin here.
    fn own_offsets<B: Backend>(&self, backend: &B, at: u64) -> Result<Vec<u8>, DeviceError> {
        let mut own = vec![0u8; 4 * (self.owners.experts as usize + 1)];
        backend.read(at, &mut own)?;
        match of_all(&own, &self.owners, self.slots) {
            Some(_) => Ok(own),
            None => Err(unsorted().into()),
        }
    }

    /// Rows of this rank's experts that a turn has brought, by where those of each begin.
    fn come<B: Backend>(&self, backend: &B, begins: u64) -> Result<u64, DeviceError> {
        let mut all = vec![0u8; 4 * (self.owners.own() as usize + 1)];
        backend.read(begins, &mut all)?;
        let all = offsets(&all, self.owners.own() + 1, self.slots).ok_or_else(unsorted)?;
        Ok(all.last().copied().unwrap_or(0))
    }

    fn read<B: Backend>(&self, backend: &B, at: u64, rows: u64) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0u8; (rows * self.row) as usize];
        if rows > 0 {
            backend.read(at, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// The offsets of all ranks with this turn: those of this team, and the rows of the longest
    /// member of any.
    fn agree(&self, group: &Group, own: &[u8]) -> Result<(Vec<u64>, u64), GroupError> {
        let Turn { owners, slots, source, .. } = self;
        let (mut longest, mut found) = (0, None);
        let all = group.gather(own)?;
        for (rank, bytes) in (0..).zip(&all).filter(|(rank, _)| rank % owners.team == *source) {
            let Some(of) = of_all(bytes, owners, *slots) else {
                return Err(refused(format!("rank {rank} groups its slots by numbers that are no offsets")));
            };
            let rows = (0..owners.team).map(|member| length(&of_member(&of, owners, member)));
            longest = rows.fold(longest, u64::max);
            if rank == self.rank() {
                found = Some(of);
            }
        }
        Ok((found.ok_or_else(|| refused("no rank has this turn".into()))?, longest))
    }

    /// Exchanges rows piece by piece: those that this rank has for a member, and where those of a
    /// member go.
    fn pass(
        &self,
        group: &Group,
        longest: u64,
        away: bool,
        offsets: &[u64],
        (from, to): (&[u8], &mut [u8]),
    ) -> Result<(), GroupError> {
        let Turn { owners, row, .. } = *self;
        let each = (AT_ONCE / (self.width * owners.team).max(1)).max(1);
        let piece = |member: u64, first: u64| {
            let range = of_member(offsets, &owners, member);
            let first = first.min(length(&range));
            // A source has the slots of all members, the others those of their own experts.
            let before = if self.is_source() { range.start } else { 0 };
            let count = (length(&range) - first).min(each);
            ((before + first) * row) as usize..((before + first + count) * row) as usize
        };
        let gives = self.is_source() == away;
        for first in (0..longest).step_by(each as usize) {
            let others = || self.others().filter(|(member, _)| self.is_source() || *member == self.source);
            let of = |member: u64| if self.is_source() { member } else { owners.member() };
            let mut parts = vec![vec![]; group.size() as usize];
            for (member, rank) in others().filter(|_| gives) {
                parts[rank as usize] = from.get(piece(of(member), first)).unwrap_or_default().to_vec();
            }
            let come = group.all_to_all(&parts)?;
            for (member, rank) in others().filter(|_| !gives) {
                let range = piece(of(member), first);
                match to.get_mut(range) {
                    Some(to) if to.len() == come[rank as usize].len() => {
                        to.copy_from_slice(&come[rank as usize])
                    }
                    Some(_) | None => {
                        let words = format!("rank {rank} brought other rows than its turn has");
                        return Err(refused(words));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Rows on their way to the owners of their experts, or back.
pub(crate) struct Going {
    turn: Turn,
    /// Whether they go to owners.
    away: bool,
    /// Of the rank whose turn it is: where the slots of each expert begin.
    offsets: Vec<u8>,
    /// Rows of this rank: its slots, or those of its experts.
    rows: Vec<u8>,
    /// Where what comes goes, and of rows that go to owners where those of each expert begin.
    to: u64,
    begins: u64,
}

fn turn(owners: Owners, (slots, width): (u64, u64), moved: &Moved) -> Turn {
    Turn { owners, slots, width, row: width * moved.unit, source: moved.source }
}

impl Going {
    /// Takes the rows of a turn from their slots.
    pub(crate) fn away<B: Backend>(sent: &Sent, moved: Moved, backend: &B) -> Result<Self, DeviceError> {
        let [x, counts, to, begins] = moved.places;
        let turn = turn(sent.owners, (sent.slots, sent.width), &moved);
        let (mut offsets, mut rows) = (vec![], vec![]);
        if turn.is_source() {
            offsets = turn.own_offsets(backend, counts)?;
            let all = of_all(&offsets, &turn.owners, turn.slots).unwrap_or_default();
            rows = turn.read(backend, x, all.last().copied().unwrap_or(0))?;
        }
        Ok(Going { turn, away: true, offsets, rows, to, begins })
    }

    /// Takes results from the owners of experts.
    pub(crate) fn back<B: Backend>(
        returned: &Returned,
        moved: Moved,
        backend: &B,
    ) -> Result<Self, DeviceError> {
        let [rows, counts, begins, to] = moved.places;
        let turn = turn(returned.owners, (returned.slots, returned.width), &moved);
        let offsets = if turn.is_source() { turn.own_offsets(backend, counts)? } else { vec![] };
        let count = turn.come(backend, begins)?;
        let rows = turn.read(backend, rows, count)?;
        Ok(Going { turn, away: false, offsets, rows, to, begins })
    }

    /// Brings them there.
    pub(crate) fn run(self, group: &Group) -> Result<Done, GroupError> {
        let Going { turn, away, offsets, rows, to, begins } = self;
        let (all, longest) = turn.agree(group, &offsets)?;
        let own = of_member(&all, &turn.owners, turn.owners.member());
        let bytes = |rows: u64| (rows * turn.row) as usize;
        let kept = bytes(own.start)..bytes(own.end);
        let mut done = Done::default();
        if away {
            let mut come = vec![0u8; if turn.is_source() { 0 } else { bytes(length(&own)) }];
            turn.pass(group, longest, away, &all, (&rows, &mut come))?;
            if turn.is_source() {
                come = rows.get(kept).ok_or_else(unsorted)?.to_vec();
            }
            done.put(to, come);
            let first = (turn.owners.member() * turn.owners.own()) as usize;
            let of_own = &all[first..=first + turn.owners.own() as usize];
            let of_own: Vec<i32> = of_own.iter().map(|offset| (offset - of_own[0]) as i32).collect();
            done.put(begins, bytemuck::cast_slice(&of_own).to_vec());
            return Ok(done);
        }
        // Slots of no expert become zero.
        let mut come = vec![0u8; if turn.is_source() { bytes(turn.slots) } else { 0 }];
        turn.pass(group, longest, away, &all, (&rows, &mut come))?;
        if turn.is_source() {
            match come.get_mut(kept) {
                Some(to) if to.len() == rows.len() => to.copy_from_slice(&rows),
                Some(_) | None => return Err(unsorted()),
            }
            done.put(to, come);
        }
        Ok(done)
    }
}

/// Rows of each expert that every member has in a loop of turns, for devices that pass bytes to one
/// another. Ranks learn it once for all turns, so that no turn waits for the host.
pub(crate) struct Tables {
    /// Where the first table is in the memory of the backend, bytes of each, and how many there may
    /// be.
    first: u64,
    bytes: u64,
    most: u64,
    /// By the place of a rank's own offsets: those of every member, its own of all experts and
    /// those of others of this rank's.
    known: Vec<(u64, Vec<Vec<u64>>)>,
}

impl Tables {
    pub(crate) fn new(first: u64, bytes: u64, most: u64) -> Self {
        Tables { first, bytes, most, known: vec![] }
    }

    /// Bytes of a table: of each member where the rows of this rank's experts begin.
    pub(crate) fn bytes(owners: &Owners) -> u64 {
        owners.team * Tables::line(owners)
    }

    fn line(owners: &Owners) -> u64 {
        size_of::<i32>() as u64 * (owners.own() + 1)
    }

    /// Another loop begins.
    pub(crate) fn forget(&mut self) {
        self.known.clear();
    }

    /// Where the table is that has the offsets at a place, and what every member has; the members
    /// exchange them where nobody has asked so far.
    fn of<B: Backend>(
        &mut self,
        turn: &Turn,
        counts: u64,
        backend: &mut B,
    ) -> Result<(u64, &[Vec<u64>]), DeviceError> {
        let number = self.known.iter().position(|(place, _)| *place == counts).unwrap_or(self.known.len());
        let at = self.first + number as u64 * self.bytes;
        if number == self.known.len() {
            if number as u64 >= self.most {
                return Err(refused("a loop of turns has more groupings than its plan".into()).into());
            }
            let lines = exchange_offsets(turn, counts, at, backend)?;
            self.known.push((counts, lines));
        }
        Ok((at, self.known.get(number).map_or(&[], |(_, lines)| lines)))
    }
}

/// Brings every member's offsets to the owners of the experts, and leaves a table of them, which
/// count from 0 on in each line.
fn exchange_offsets<B: Backend>(
    turn: &Turn,
    counts: u64,
    table: u64,
    backend: &mut B,
) -> Result<Vec<Vec<u64>>, DeviceError> {
    let (owners, size) = (turn.owners, Tables::line(&turn.owners));
    let own = turn.own_offsets(backend, counts)?;
    let own = of_all(&own, &owners, turn.slots).ok_or_else(unsorted)?;
    let gives = |(member, rank)| Pass::to(rank, counts + 4 * member * owners.own(), size);
    let takes = |(member, rank)| Pass::of(rank, table + member * size, size);
    let list: Vec<Pass> = turn.others().map(gives).chain(turn.others().map(takes)).collect();
    pass(backend, &list)?;
    backend.until(backend.begun())?;
    let mut bytes = vec![0u8; Tables::bytes(&owners) as usize];
    backend.read(table, &mut bytes)?;
    let (mut lines, mut begins) = (vec![], vec![]);
    for (member, line) in (0..owners.team).zip(bytes.chunks(size as usize)) {
        let found = match member == owners.member() {
            true => own.clone(),
            false => offsets(line, owners.own() + 1, turn.slots).ok_or_else(unsorted)?,
        };
        let first = if member == owners.member() { (member * owners.own()) as usize } else { 0 };
        let of_own = &found[first..=first + owners.own() as usize];
        begins.extend(of_own.iter().map(|offset| (offset - of_own[0]) as i32));
        lines.push(found);
    }
    backend.write(table, bytemuck::cast_slice(&begins))?;
    Ok(lines)
}

impl Turn {
    /// Rows that this rank has of its own experts in the turn, by what every member has.
    fn own_rows(&self, lines: &[Vec<u64>]) -> Range<u64> {
        let line = lines.get(self.source as usize).map_or(&[][..], Vec::as_slice);
        match self.is_source() {
            true => of_member(line, &self.owners, self.owners.member()),
            false => line.first().copied().unwrap_or(0)..line.last().copied().unwrap_or(0),
        }
    }

    /// The rows of the source of the turn for each other member, by its own offsets.
    fn parts(&self, lines: &[Vec<u64>]) -> Vec<(u64, Range<u64>)> {
        let line = lines.get(self.source as usize).map_or(&[][..], Vec::as_slice);
        self.others().map(|(member, rank)| (rank, of_member(line, &self.owners, member))).collect()
    }
}

/// Begins to bring the rows of a turn to the owners of their experts, each to a slot.
pub(crate) fn send<B: Backend>(
    sent: &Sent,
    moved: Moved,
    slot: u64,
    tables: &mut Tables,
    backend: &mut B,
) -> Result<(), DeviceError> {
    let [x, counts, ..] = moved.places;
    let turn = turn(sent.owners, (sent.slots, sent.width), &moved);
    let (_, lines) = tables.of(&turn, counts, backend)?;
    let (own, row) = (turn.own_rows(lines), turn.row);
    if !turn.is_source() {
        return pass(backend, &[Pass::of(turn.rank(), slot, length(&own) * row)]);
    }
    let to = |(rank, rows): (u64, Range<u64>)| Pass::to(rank, x + rows.start * row, length(&rows) * row);
    pass(backend, &turn.parts(lines).into_iter().map(to).collect::<Vec<_>>())?;
    backend.copy(x + own.start * row, slot, length(&own) * row)
}

/// Leaves rows of a turn that have come where launches read them.
pub(crate) fn arrive<B: Backend>(
    sent: &Sent,
    moved: Moved,
    slot: u64,
    tables: &mut Tables,
    backend: &mut B,
) -> Result<(), DeviceError> {
    let [_, counts, rows, begins] = moved.places;
    let turn = turn(sent.owners, (sent.slots, sent.width), &moved);
    let (table, lines) = tables.of(&turn, counts, backend)?;
    let (own, size) = (turn.own_rows(lines), Tables::line(&turn.owners));
    backend.copy(slot, rows, length(&own) * turn.row)?;
    backend.copy(table + turn.source * size, begins, size)
}

/// Begins to bring results of a turn back to their slots.
pub(crate) fn give_back<B: Backend>(
    returned: &Returned,
    moved: Moved,
    slot: u64,
    tables: &mut Tables,
    backend: &mut B,
) -> Result<(), DeviceError> {
    let [rows, counts, _, y] = moved.places;
    let turn = turn(returned.owners, (returned.slots, returned.width), &moved);
    let (_, lines) = tables.of(&turn, counts, backend)?;
    let (own, row) = (turn.own_rows(lines), turn.row);
    let bytes = length(&own) * row;
    if !turn.is_source() {
        backend.copy(rows, slot, bytes)?;
        return pass(backend, &[Pass::to(turn.rank(), slot, bytes)]);
    }
    let of = |(rank, rows): (u64, Range<u64>)| Pass::of(rank, y + rows.start * row, length(&rows) * row);
    let used = lines.get(turn.source as usize).and_then(|line| line.last()).copied().unwrap_or(0);
    pass(backend, &turn.parts(lines).into_iter().map(of).collect::<Vec<_>>())?;
    backend.copy(rows, y + own.start * row, bytes)?;
    // Slots of no expert become zero.
    backend.zero(y + used * row, (turn.slots - used) * row)
}

/// Begins to pass what there is to pass.
fn pass<B: Backend>(backend: &mut B, list: &[Pass]) -> Result<(), DeviceError> {
    let some: Vec<Pass> = list.iter().filter(|pass| pass.bytes > 0).copied().collect();
    if !some.is_empty() && !backend.pass(&some)? {
        return Err(refused("a device passes no bytes to other ranks any more".into()).into());
    }
    Ok(())
}

/// Sums numbers over the ranks that own the same experts: each adds an equal part of them.
pub(crate) fn pool<B: Backend>(
    pooled: &Pooled,
    at: u64,
    backend: &mut B,
    group: &Group,
) -> Result<(), DeviceError> {
    let alike: Vec<u64> = pooled.owners.alike().collect();
    let own = alike.iter().position(|rank| *rank == group.rank()).unwrap_or(0);
    let exchanged = |parts: Vec<(u64, &[f32])>| -> Result<Vec<Vec<f32>>, DeviceError> {
        let mut all = vec![vec![]; group.size() as usize];
        parts.iter().for_each(|(rank, part)| all[*rank as usize] = bytemuck::cast_slice(part).to_vec());
        let come = group.all_to_all(&all)?;
        Ok(alike.iter().map(|&rank| bytemuck::pod_collect_to_vec(&come[rank as usize])).collect())
    };
    for first in (0..pooled.elements).step_by(AT_ONCE as usize) {
        let count = (pooled.elements - first).min(AT_ONCE) as usize;
        let mut numbers = vec![0.0f32; count];
        let place = at + first * size_of::<f32>() as u64;
        backend.read(place, bytemuck::cast_slice_mut(&mut numbers))?;
        let each = count.div_ceil(alike.len().max(1));
        let part = |i: usize| &numbers[(i * each).min(count)..((i + 1) * each).min(count)];
        let parts = exchanged(alike.iter().enumerate().map(|(i, &rank)| (rank, part(i))).collect())?;
        let mut sum = vec![0.0f32; part(own).len()];
        for (i, part) in parts.iter().enumerate() {
            if part.len() != sum.len() {
                return Err(refused(format!("rank {} sums other numbers", alike[i])).into());
            }
            match i {
                0 => sum.copy_from_slice(part),
                _ => sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
            }
        }
        let sums = exchanged(alike.iter().map(|&rank| (rank, &sum[..])).collect())?.concat();
        if sums.len() != count {
            return Err(refused("ranks that own the same experts sum different numbers".into()).into());
        }
        backend.write(place, bytemuck::cast_slice(&sums))?;
    }
    Ok(())
}
