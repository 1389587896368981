//! Threads of a block together: a statement at a time for all of them that are at it.
//!
//! *In*: an entry whose threads share memory. *Out*: the memories, changed. *Promise*: numbers are
//! joined over threads in the order of `kernels/prelude.cuh`; two threads that touch one float of
//! shared memory, one of them to write it, without a barrier between are an error, like a barrier
//! that not all of its threads come to and a float that is read before it is written.

use super::run::{Frame, Grid, Machine, Result, Value, moved, wrong, zero};
use super::{Entry, Expr, ExprKind, Number, Statement};

/// The first address of shared memory.
const SHARED: u64 = 1 << 62;
/// Lanes of a warp.
const WARP: u64 = 32;

/// The place of an address in shared memory.
pub(super) fn place(address: u64) -> Option<u64> {
    address.checked_sub(SHARED)
}

/// Two numbers, as a word whose name ends so joins them; NaN is passed over by the larger.
pub(super) fn joined(word: &str, a: f32, b: f32) -> f32 {
    match word.ends_with("largest") {
        true if b > a => b,
        true => a,
        false => a + b,
    }
}

/// An access: its thread, and how many barriers of the block and of the row the thread had passed.
#[derive(Clone, Copy)]
struct Mark {
    thread: u64,
    block: u64,
    row: u64,
}

#[derive(Clone, Default)]
struct Cell {
    bits: u32,
    written: Option<Mark>,
    read: Vec<Mark>,
}

/// The shared memory of a block, and the threads that touched each float of it.
pub(super) struct Shared {
    cells: Vec<Cell>,
    /// Barriers of the block so far.
    waited: u64,
    /// Barriers of a thread's row so far.
    rows: Vec<u64>,
    /// Threads that wait for each other at a barrier of a row.
    row: u64,
}

impl Shared {
    pub(super) fn new(threads: u64) -> Shared {
        Shared { cells: vec![], waited: 0, rows: vec![0; threads as usize], row: 1 }
    }

    /// Floats from a multiple of 16 bytes on; the address of the first.
    fn allocate(&mut self, floats: u64) -> u64 {
        let start = (self.cells.len() as u64).next_multiple_of(4);
        self.cells.resize((start + floats.min(1 << 20)) as usize, Cell::default());
        SHARED + 4 * start
    }

    fn mark(&self, thread: u64) -> Mark {
        let row = self.rows.get(thread as usize).copied().unwrap_or(0);
        Mark { thread, block: self.waited, row }
    }

    /// The thread of an access that nothing orders before one of `thread` now.
    fn races(&self, before: Mark, thread: u64) -> Option<u64> {
        let of_row = before.thread / self.row == thread / self.row;
        let row = self.rows.get(before.thread as usize).copied().unwrap_or(0);
        let ordered = before.thread == thread || self.waited > before.block || (of_row && row > before.row);
        (!ordered).then_some(before.thread)
    }

    fn cell(&mut self, at: u64) -> Result<&mut Cell> {
        let cell = self.cells.get_mut((at / 4) as usize).filter(|_| at.is_multiple_of(4));
        cell.ok_or_else(|| format!("byte {at} of shared memory, which it does not have"))
    }

    pub(super) fn load(&mut self, at: u64, thread: u64) -> Result<u64> {
        let mark = self.mark(thread);
        let Some(written) = self.cell(at)?.written else {
            return Err(format!("float {} of shared memory is read before it is written", at / 4));
        };
        if let Some(other) = self.races(written, thread) {
            return Err(format!(
                "thread {thread} reads float {} of shared memory, which thread {other} writes with no barrier between",
                at / 4
            ));
        }
        let cell = self.cell(at)?;
        cell.read.push(mark);
        Ok(cell.bits.into())
    }

    pub(super) fn store(&mut self, at: u64, thread: u64, bits: u64) -> Result<()> {
        let mark = self.mark(thread);
        let before = self.cell(at)?.clone();
        let others = before.written.into_iter().chain(before.read);
        if let Some(other) = others.into_iter().find_map(|mark| self.races(mark, thread)) {
            return Err(format!(
                "thread {thread} writes float {} of shared memory, which thread {other} touches with no barrier between",
                at / 4
            ));
        }
        *self.cell(at)? = Cell { bits: bits as u32, written: Some(mark), read: vec![] };
        Ok(())
    }
}

/// Runs a block.
pub(super) fn run<'u>(
    machine: &mut Machine<'u>,
    entry: &'u Entry,
    grid: Grid,
    given: &[Value],
) -> Result<()> {
    let function = &entry.function;
    let mut frame = given.to_vec();
    frame.extend(function.variables[function.params..].iter().map(|v| zero(v.of, machine.unit)));
    machine.shared = Shared::new(grid.threads);
    let frames = vec![frame; grid.threads as usize];
    let mut block = Block { machine, frames, alive: grid.threads as usize, dynamic: grid.shared / 4 };
    let all: Lanes = (0..grid.threads).collect();
    let body = function.body.as_deref().unwrap_or_default();
    block.list(body, all, &mut Flow::default())?;
    Ok(())
}

/// Threads of a block, in order.
type Lanes = Vec<u64>;

/// Threads that left a round of the loop under way.
#[derive(Default)]
struct Flow {
    broken: Lanes,
    continued: Lanes,
}

struct Block<'m, 'u> {
    machine: &'m mut Machine<'u>,
    frames: Vec<Frame>,
    /// Threads that have not ended.
    alive: usize,
    /// Floats of shared memory that the launch gives.
    dynamic: u64,
}

/// Two lists as one.
fn merged(mut a: Lanes, b: Lanes) -> Lanes {
    a.extend(b);
    a.sort_unstable();
    a
}

impl<'u> Block<'_, 'u> {
    /// Runs statements; gives the threads that come to their end.
    fn list(&mut self, list: &'u [Statement], mut lanes: Lanes, flow: &mut Flow) -> Result<Lanes> {
        for statement in list {
            if lanes.is_empty() {
                break;
            }
            lanes = self.statement(statement, lanes, flow)?;
        }
        Ok(lanes)
    }

    /// The value of an expression for a thread.
    fn of(&mut self, x: &'u Expr, lane: u64) -> Result<Value> {
        self.machine.thread = lane;
        self.machine.expr(x, &mut self.frames[lane as usize])
    }

    /// The threads for which a condition holds, and the others.
    fn split(&mut self, condition: Option<&'u Expr>, lanes: Lanes) -> Result<(Lanes, Lanes)> {
        let Some(condition) = condition else { return Ok((lanes, vec![])) };
        let (mut yes, mut no) = (vec![], vec![]);
        for lane in lanes {
            self.machine.thread = lane;
            let holds = self.machine.truth(condition, &mut self.frames[lane as usize])?;
            if holds { yes.push(lane) } else { no.push(lane) }
        }
        Ok((yes, no))
    }

    fn statement(&mut self, statement: &'u Statement, lanes: Lanes, flow: &mut Flow) -> Result<Lanes> {
        self.machine.count()?;
        match statement {
            Statement::Let(list) => {
                for (n, value) in list {
                    let Some(value) = value else { continue };
                    let values = self.values(value, &lanes)?;
                    for (lane, value) in lanes.iter().zip(values) {
                        self.frames[*lane as usize][*n] = value;
                    }
                }
            }
            Statement::Do(x) => drop(self.values(x, &lanes)?),
            Statement::Shared(n, length) => {
                let address = self.machine.shared.allocate(length.unwrap_or(self.dynamic));
                lanes.iter().for_each(|lane| self.frames[*lane as usize][*n] = Value::Address(address));
            }
            Statement::If(condition, then, otherwise) => {
                let (yes, no) = self.split(Some(condition), lanes)?;
                let yes = self.list(then, yes, flow)?;
                let no = self.list(otherwise, no, flow)?;
                return Ok(merged(yes, no));
            }
            Statement::For(begin, condition, steps, body) => {
                let lanes = match begin {
                    Some(begin) => self.statement(begin, lanes, flow)?,
                    None => lanes,
                };
                return self.rounds(condition.as_ref(), steps, body, lanes);
            }
            Statement::While(condition, body) => return self.rounds(Some(condition), &[], body, lanes),
            Statement::Unrolled(_, counted) => return self.statement(counted, lanes, flow),
            Statement::Block(list) => return self.list(list, lanes, flow),
            Statement::Break => {
                flow.broken.extend(lanes);
                return Ok(vec![]);
            }
            Statement::Continue => {
                flow.continued.extend(lanes);
                return Ok(vec![]);
            }
            Statement::Return(_) => {
                self.alive -= lanes.len();
                return Ok(vec![]);
            }
        }
        Ok(lanes)
    }

    fn rounds(
        &mut self,
        condition: Option<&'u Expr>,
        steps: &'u [Expr],
        body: &'u [Statement],
        mut lanes: Lanes,
    ) -> Result<Lanes> {
        let mut after = vec![];
        loop {
            let (going, done) = self.split(condition, lanes)?;
            after.extend(done);
            if going.is_empty() {
                after.sort_unstable();
                return Ok(after);
            }
            self.machine.count()?;
            let mut flow = Flow::default();
            let through = self.list(body, going, &mut flow)?;
            after.extend(flow.broken);
            lanes = merged(through, flow.continued);
            for step in steps {
                for &lane in &lanes {
                    self.of(step, lane)?;
                }
            }
        }
    }

    /// The values of an expression, by thread; it may be what the threads do together.
    fn values(&mut self, x: &'u Expr, lanes: &[u64]) -> Result<Vec<Value>> {
        match &x.kind {
            ExprKind::Call(n, given) if self.machine.unit.together(*n) => {
                let mut list = vec![];
                for &lane in lanes {
                    list.push(given.iter().map(|x| self.of(x, lane)).collect::<Result<Vec<_>>>()?);
                }
                let name = self.machine.unit.functions.get(*n).map_or("", |f| &f.name);
                self.together(name, lanes, &list)
            }
            _ => lanes.iter().map(|&lane| self.of(x, lane)).collect(),
        }
    }

    /// A function that threads call together, with the values that each gives.
    fn together(&mut self, name: &str, lanes: &[u64], given: &[Vec<Value>]) -> Result<Vec<Value>> {
        let of = |n: usize| given.first().and_then(|list| list.get(n)).ok_or("an argument is missing");
        let none = vec![Value::Int(0); lanes.len()];
        match name {
            "wait_block" => self.wait_block(lanes).map(|()| none),
            "wait_row" => match of(0)?.int()? as u64 {
                threads if threads > WARP => self.wait_block(lanes).map(|()| none),
                threads => {
                    self.all_of(lanes, threads)?;
                    self.machine.shared.row = threads.max(1);
                    let rows = &mut self.machine.shared.rows;
                    lanes.iter().for_each(|lane| rows[*lane as usize] += 1);
                    Ok(none)
                }
            },
            "lanes_sum" | "lanes_largest" => {
                let (count, row) = (of(1)?.int()? as u64, of(2)?.int()? as u64);
                self.all_of(lanes, row)?;
                self.butterfly(name, lanes, given, count)
            }
            "leave_sum" | "leave_largest" => {
                self.all_of(lanes, WARP)?;
                let sums = self.butterfly(name, lanes, given, WARP)?;
                for ((&lane, list), sum) in lanes.iter().zip(given).zip(sums) {
                    if lane % WARP == 0 {
                        let to = list.get(1).ok_or("an argument is missing")?.address()?;
                        self.machine.thread = lane;
                        self.machine.store(
                            moved(to, (lane / WARP) as i64, Number::F32),
                            Number::F32,
                            &sum,
                        )?;
                    }
                }
                Ok(none)
            }
            "add_parts" => {
                self.wait_block(lanes)?;
                let (count, length) = (of(1)?.int()?, of(2)?.int()?);
                let warps = (self.frames.len() as u64 / WARP).max(1) as i64;
                given.iter().map(|list| self.added(list, (count, length), warps)).collect()
            }
            _ => Err(format!("{name} is not known here")),
        }
    }

    /// The sum of a column of parts: warps take parts in turns, and are added in order.
    fn added(&mut self, given: &[Value], (count, length): (i64, i64), warps: i64) -> Result<Value> {
        let [parts, _, _, column] = given else { return wrong() };
        let (parts, column) = (parts.address()?, column.int()?);
        let mut sum = 0.0f32;
        for warp in 0..warps {
            let mut own = 0.0f32;
            for part in (warp..count).step_by(warps as usize) {
                if column < length {
                    let at = moved(parts, part * length + column, Number::F32);
                    own += self.machine.load(at, Number::F32)?.float()? as f32;
                }
            }
            sum = if warp == 0 { own } else { sum + own };
        }
        Ok(Value::Float(sum.into()))
    }

    /// Numbers joined over `count` adjacent threads, each with that at half the distance.
    fn butterfly(&self, name: &str, lanes: &[u64], given: &[Vec<Value>], count: u64) -> Result<Vec<Value>> {
        let mut own = vec![];
        for list in given {
            own.push(list.first().ok_or("an argument is missing")?.float()? as f32);
        }
        let mut distance = count / 2;
        while distance > 0 {
            let before = own.clone();
            for (x, lane) in own.iter_mut().zip(lanes) {
                let other = lanes.binary_search(&(lane ^ distance));
                let other = other
                    .map_err(|_| format!("thread {lane} joins its number with one that is not there"))?;
                *x = joined(name, *x, before[other]);
            }
            distance /= 2;
        }
        Ok(own.into_iter().map(|x| Value::Float(x.into())).collect())
    }

    fn wait_block(&mut self, lanes: &[u64]) -> Result<()> {
        if lanes.len() != self.alive {
            return Err(format!(
                "{} of {} threads come to a barrier of their block",
                lanes.len(),
                self.alive
            ));
        }
        self.machine.shared.waited += 1;
        Ok(())
    }

    /// Refuses groups of `count` adjacent threads whose threads are not all here. A row's threads
    /// end together.
    fn all_of(&self, lanes: &[u64], count: u64) -> Result<()> {
        let count = count.max(1);
        let mut at = 0;
        while let Some(first) = lanes.get(at) {
            let group = first / count;
            let here = lanes[at..].iter().take_while(|lane| *lane / count == group).count();
            let whole = count.min(self.frames.len() as u64 - group * count);
            if here as u64 != whole {
                return Err(format!("{here} of {whole} threads that do this together are here"));
            }
            at += here;
        }
        Ok(())
    }
}
