//! Exchanges that a device has under way by itself, while it computes.
//!
//! *In*: exchanges in the order of [`ahead`](dreamc_compiler::ahead), and a [`Backend`] that
//! exchanges. *Out*: what each leaves, at its place in the arena. *Promise*: the device waits for
//! an exchange where something reads what it leaves, by an event of its own; the host waits for it
//! where the host itself needs numbers. Bits are those of exchanges that are waited for one by one.
//!
//! Numbers that come wait in a slot of the [`Room`] while their window is still read, and are
//! copied there at their place; numbers that go are copied out of theirs when they begin. How many
//! rows of a turn go where is known for all turns of a loop before the first
//! ([`Tables`](super::rows::Tables)).

use super::DeviceError;
use super::backend::Backend;
use super::exchange::Collective;
use super::rows::{self, Tables};
use dreamc_compiler::ahead::{self, Exchange};
use dreamc_compiler::program::{Kernel, Plan, Program, listed};
use std::collections::VecDeque;

/// Bytes of a number.
const NUMBER: u64 = size_of::<f32>() as u64;

/// Memory of what is under way: slots of numbers, then tables of rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Room {
    slots: u64,
    /// Bytes of a table, and how many a program may need at a time.
    table: u64,
    tables: u64,
}

impl Room {
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut room = Room { slots: ahead::room(plan), ..Room::default() };
        for program in plan.programs.values() {
            let most = sent(program, plan).map(|bytes| bytes.next_multiple_of(16)).max();
            room.table = room.table.max(most.unwrap_or(0));
            room.tables = room.tables.max(sent(program, plan).count() as u64);
        }
        room
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.slots + self.tables * self.table
    }
}

/// Bytes of a table of each launch that sends rows.
fn sent<'p>(program: &'p Program, plan: &'p Plan) -> impl Iterator<Item = u64> + 'p {
    listed(&program.steps).filter_map(|launch| match plan.kernel(launch.kernel) {
        Kernel::Sent(sent) => Some(Tables::bytes(&sent.owners)),
        _ => None,
    })
}

/// An exchange that ends after its place.
struct Open<'p> {
    number: usize,
    collective: Collective<'p>,
    slot: u64,
}

/// Exchanges of a run of a program.
pub(crate) struct Staged<'p> {
    /// Where slots begin in the memory of the backend.
    room: u64,
    tables: Tables,
    /// The backend's number of each exchange that has begun.
    numbers: Vec<u64>,
    /// Sums and results on their way, in the order in which they began.
    sums: VecDeque<Open<'p>>,
    results: VecDeque<Open<'p>>,
}

impl<'p> Staged<'p> {
    /// Of a program with this number of exchanges; the room of its plan begins at `first`.
    pub(crate) fn new(room: &Room, first: u64, exchanges: usize) -> Self {
        Staged {
            room: first,
            tables: Tables::new(first + room.slots, room.table, room.tables),
            numbers: vec![0; exchanges],
            sums: VecDeque::new(),
            results: VecDeque::new(),
        }
    }

    /// Begins an exchange, of those whose numbers are at `at`.
    pub(crate) fn begin<B: Backend>(
        &mut self,
        backend: &mut B,
        (number, exchange): (usize, &Exchange),
        (collective, at): (Collective<'p>, u64),
    ) -> Result<(), DeviceError> {
        let slot = self.room + exchange.at;
        if let Some(over) = exchange.over {
            match collective {
                Collective::Scattered(..) => self.end_sums(backend, over)?,
                _ => self.end_results(backend, over)?,
            }
        }
        let open = Open { number, collective, slot };
        match collective {
            Collective::Gathered(..) => drop(backend.collective(collective, slot)?),
            Collective::Scattered(scattered, _) => {
                backend.copy(at, slot, scattered.elements * NUMBER)?;
                backend.collective(collective, slot)?;
                self.sums.push_back(open);
            }
            Collective::Sent(sent, moved) => {
                // A loop begins, whose turns have rows of their own.
                if !exchange.begun {
                    self.tables.forget();
                }
                rows::send(sent, moved, slot, &mut self.tables, backend)?;
            }
            Collective::Returned(returned, moved) => {
                rows::give_back(returned, moved, slot, &mut self.tables, backend)?;
                self.results.push_back(open);
            }
            Collective::Sum(_) | Collective::Scatter(..) | Collective::Gather(_) | Collective::Pooled(_) => {}
        }
        self.numbers[number] = backend.begun();
        Ok(())
    }

    /// Lets what follows have the result of an exchange.
    pub(crate) fn take<B: Backend>(
        &mut self,
        backend: &mut B,
        (number, exchange): (usize, &Exchange),
        (collective, at): (Collective<'p>, u64),
    ) -> Result<(), DeviceError> {
        let slot = self.room + exchange.at;
        match collective {
            Collective::Gathered(gathered, _) => {
                backend.after(self.numbers[number])?;
                backend.copy(slot, at, gathered.elements * NUMBER)
            }
            Collective::Sent(sent, moved) => {
                backend.after(self.numbers[number])?;
                rows::arrive(sent, moved, slot, &mut self.tables, backend)
            }
            Collective::Scattered(..) => self.end_sums(backend, number),
            Collective::Returned(..) => self.end_results(backend, number),
            Collective::Sum(_) | Collective::Scatter(..) | Collective::Gather(_) | Collective::Pooled(_) => {
                Ok(())
            }
        }
    }

    /// Ends all that is under way, where the program ends.
    pub(crate) fn end<B: Backend>(&mut self, backend: &mut B) -> Result<(), DeviceError> {
        self.end_results(backend, usize::MAX)?;
        self.end_sums(backend, usize::MAX)
    }

    /// Sums are over up to that exchange: the host adds this rank's part of each to its own.
    fn end_sums<B: Backend>(&mut self, backend: &mut B, last: usize) -> Result<(), DeviceError> {
        while self.sums.front().is_some_and(|open| open.number <= last)
            && let Some(open) = self.sums.pop_front()
        {
            backend.until(self.numbers[open.number])?;
            open.collective.end(backend, open.slot)?;
        }
        Ok(())
    }

    /// Results are there up to that exchange.
    fn end_results<B: Backend>(&mut self, backend: &mut B, last: usize) -> Result<(), DeviceError> {
        while self.results.front().is_some_and(|open| open.number <= last)
            && let Some(open) = self.results.pop_front()
        {
            backend.after(self.numbers[open.number])?;
        }
        Ok(())
    }
}
