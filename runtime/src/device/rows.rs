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
use super::backend::{Backend, Value};
use super::executor::AT_ONCE;
use crate::group::{Group, GroupError};
use dreamc_compiler::program::Owners;
use dreamc_compiler::program::kernel::{Pooled, Returned, Sent};

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

/// Slots of a turn, and how they go.
struct Turn {
    owners: Owners,
    slots: u64,
    /// Bytes of a row.
    row: u64,
    /// The member whose rows are exchanged.
    source: u64,
    /// Where the slots of each expert begin on it.
    offsets: Vec<u64>,
    /// Rows of each member that one exchange brings, and how many exchanges there are.
    each: u64,
    pieces: u64,
}

fn refused(words: String) -> DeviceError {
    GroupError::Meeting(words).into()
}

/// Offsets of groups as they come; `None` for numbers that do not rise from 0 to `slots`.
fn offsets(bytes: &[u8], owners: &Owners, slots: u64) -> Option<Vec<u64>> {
    let numbers: Vec<i32> = bytemuck::pod_collect_to_vec(bytes);
    let all: Vec<u64> = numbers.iter().map(|&n| u64::try_from(n).ok()).collect::<Option<_>>()?;
    let fine = all.len() as u64 == owners.experts + 1
        && all.first() == Some(&0)
        && all.is_sorted()
        && all.last().is_some_and(|&last| last <= slots);
    fine.then_some(all)
}

/// The slots of a member's experts.
fn of_member(offsets: &[u64], owners: &Owners, member: u64) -> std::ops::Range<u64> {
    let at = |member: u64| offsets.get((member * owners.own()) as usize).copied().unwrap_or(0);
    at(member)..at(member + 1)
}

impl Turn {
    /// Asks all ranks how many rows their turn has.
    fn new<B: Backend>(
        backend: &B,
        group: &Group,
        owners: Owners,
        (slots, width, unit): (u64, u64, u64),
        (at, source): (u64, u64),
    ) -> Result<Self, DeviceError> {
        let mut own = vec![];
        if owners.member() == source {
            own = vec![0u8; 4 * (owners.experts as usize + 1)];
            backend.read(at, &mut own)?;
            if offsets(&own, &owners, slots).is_none() {
                return Err(refused("slots are grouped by numbers that are no offsets".into()));
            }
        }
        let all = group.gather(&own)?;
        let mut longest = 0;
        let mut found = None;
        for (rank, bytes) in (0..).zip(&all).filter(|(rank, _)| rank % owners.team == source) {
            let Some(of) = offsets(bytes, &owners, slots) else {
                return Err(refused(format!("rank {rank} groups its slots by numbers that are no offsets")));
            };
            let rows = |member| {
                let range = of_member(&of, &owners, member);
                range.end - range.start
            };
            longest = (0..owners.team).map(rows).fold(longest, u64::max);
            if rank == owners.first() + source {
                found = Some(of);
            }
        }
        let Some(offsets) = found else { return Err(refused("no rank has this turn".into())) };
        let each = (AT_ONCE / (width * owners.team).max(1)).max(1);
        let pieces = longest.div_ceil(each);
        Ok(Turn { owners, slots, row: width * unit, source, offsets, each, pieces })
    }

    fn is_source(&self) -> bool {
        self.owners.member() == self.source
    }

    /// Members other than this one.
    fn others(&self) -> impl Iterator<Item = u64> {
        let own = self.owners.member();
        (0..self.owners.team).filter(move |member| *member != own)
    }

    /// The rows of a piece among those of a member's experts: the first, and how many.
    fn piece(&self, member: u64, piece: u64) -> (u64, u64) {
        let range = of_member(&self.offsets, &self.owners, member);
        let first = (piece * self.each).min(range.end - range.start);
        (first, (range.end - range.start - first).min(self.each))
    }

    /// The first slot of a member's experts.
    fn first(&self, member: u64) -> u64 {
        of_member(&self.offsets, &self.owners, member).start
    }

    /// Copies this rank's rows for itself.
    fn keep<B: Backend>(&self, backend: &mut B, from: u64, to: u64) -> Result<(), DeviceError> {
        let member = self.owners.member();
        for piece in 0..self.pieces {
            let (first, count) = self.piece(member, piece);
            if count > 0 {
                let mut rows = vec![0u8; (count * self.row) as usize];
                backend.read(from + first * self.row, &mut rows)?;
                backend.write(to + first * self.row, &rows)?;
            }
        }
        Ok(())
    }

    fn read<B: Backend>(&self, backend: &B, at: u64, count: u64) -> Result<Vec<u8>, DeviceError> {
        let mut rows = vec![0u8; (count * self.row) as usize];
        if count > 0 {
            backend.read(at, &mut rows)?;
        }
        Ok(rows)
    }

    fn write<B: Backend>(
        &self,
        backend: &mut B,
        at: u64,
        (rank, count, rows): (u64, u64, &[u8]),
    ) -> Result<(), DeviceError> {
        if rows.len() as u64 != count * self.row {
            return Err(refused(format!("rank {rank} brought other rows than its turn has")));
        }
        if count > 0 { backend.write(at, rows) } else { Ok(()) }
    }
}

/// Brings the rows of a turn to the owners of their experts.
pub(crate) fn send<B: Backend>(
    sent: &Sent,
    moved: Moved,
    backend: &mut B,
    group: &Group,
) -> Result<(), DeviceError> {
    let &Sent { slots, width, owners } = sent;
    let [x, counts, rows, begins] = moved.places;
    let turn = Turn::new(backend, group, owners, (slots, width, moved.unit), (counts, moved.source))?;
    let first = owners.first();
    for piece in 0..turn.pieces {
        let mut parts = vec![vec![]; group.size() as usize];
        if turn.is_source() {
            for member in turn.others() {
                let (from, count) = turn.piece(member, piece);
                let at = x + (turn.first(member) + from) * turn.row;
                parts[(first + member) as usize] = turn.read(backend, at, count)?;
            }
        }
        let come = group.all_to_all(&parts)?;
        if !turn.is_source() {
            let (from, count) = turn.piece(owners.member(), piece);
            let rank = first + turn.source;
            turn.write(backend, rows + from * turn.row, (rank, count, &come[rank as usize]))?;
        }
    }
    if turn.is_source() {
        turn.keep(backend, x + turn.first(owners.member()) * turn.row, rows)?;
    }
    let own = owners.member() * owners.own();
    let of_own = &turn.offsets[own as usize..=(own + owners.own()) as usize];
    let of_own: Vec<i32> = of_own.iter().map(|offset| (offset - of_own[0]) as i32).collect();
    backend.write(begins, bytemuck::cast_slice(&of_own))
}

/// Brings the rows of a turn back.
pub(crate) fn give_back<B: Backend>(
    returned: &Returned,
    moved: Moved,
    backend: &mut B,
    group: &Group,
) -> Result<(), DeviceError> {
    let &Returned { slots, width, owners } = returned;
    let [rows, counts, y, _] = moved.places;
    let turn = Turn::new(backend, group, owners, (slots, width, moved.unit), (counts, moved.source))?;
    let first = owners.first();
    for piece in 0..turn.pieces {
        let mut parts = vec![vec![]; group.size() as usize];
        if !turn.is_source() {
            let (from, count) = turn.piece(owners.member(), piece);
            parts[(first + turn.source) as usize] = turn.read(backend, rows + from * turn.row, count)?;
        }
        let come = group.all_to_all(&parts)?;
        if turn.is_source() {
            for member in turn.others() {
                let (from, count) = turn.piece(member, piece);
                let (at, rank) = (y + (turn.first(member) + from) * turn.row, first + member);
                turn.write(backend, at, (rank, count, &come[rank as usize]))?;
            }
        }
    }
    if turn.is_source() {
        turn.keep(backend, rows, y + turn.first(owners.member()) * turn.row)?;
        let used = turn.offsets.last().copied().unwrap_or(0);
        let zeros = vec![0u8; ((turn.slots - used) * turn.row) as usize];
        if !zeros.is_empty() {
            backend.write(y + used * turn.row, &zeros)?;
        }
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
                return Err(refused(format!("rank {} sums other numbers", alike[i])));
            }
            match i {
                0 => sum.copy_from_slice(part),
                _ => sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
            }
        }
        let sums = exchanged(alike.iter().map(|&rank| (rank, &sum[..])).collect())?.concat();
        if sums.len() != count {
            return Err(refused("ranks that own the same experts sum different numbers".into()));
        }
        backend.write(place, bytemuck::cast_slice(&sums))?;
    }
    Ok(())
}
