//! Statements run on the CPU, an operation at a time.
//!
//! *In*: a [`Unit`], one of its entries, a [`Grid`], arguments and a [`Memory`]. *Out*: the memory,
//! changed. *Promise*: threads run in order, each to its end, and those of a block a statement at a
//! time where they are together ([`super::block`]); whole numbers wrap; an access that the memory
//! does not have, a division by zero and an entry that does not end are errors, and nothing panics.

use super::block::{self, Shared};
use super::{Entry, Expr, ExprKind, Function, Infix, Number, Prefix, Statement, Type, Unit};

/// Bytes by address.
pub trait Memory {
    /// The number in the `bytes` bytes at an address, or why there is none.
    fn load(&self, address: u64, bytes: u64) -> Result<u64, String>;

    /// Writes one.
    fn store(&mut self, address: u64, bytes: u64, value: u64) -> Result<(), String>;
}

/// A value of an argument or of an expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number or a truth.
    Int(i64),
    /// A float; of an f32, and of a bf16 as it is, too.
    Float(f64),
    /// An address.
    Address(u64),
    /// Fields, or numbers of an array.
    Many(Vec<Value>),
}

pub(super) type Result<T, E = String> = std::result::Result<T, E>;

/// A launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u64,
    /// Threads of a block.
    pub threads: u64,
    /// Bytes of shared memory that the launch gives.
    pub shared: u64,
}

/// Runs an entry.
pub fn run(
    unit: &Unit,
    entry: &Entry,
    grid: Grid,
    arguments: &[Value],
    memory: &mut dyn Memory,
) -> Result<()> {
    if arguments.len() != entry.function.params {
        return Err(format!("{} takes {} arguments", entry.function.name, entry.function.params));
    }
    let shared = Shared::new(grid.threads);
    let mut machine =
        Machine { unit, memory, shared, threads: grid.threads, block: 0, thread: 0, left: 0, depth: 0 };
    let together = unit.of_blocks();
    for block in 0..grid.blocks {
        machine.block = block;
        if together {
            machine.left = MOST;
            block::run(&mut machine, entry, grid, arguments)?;
            continue;
        }
        for thread in 0..grid.threads {
            machine.thread = thread;
            machine.left = MOST;
            machine.call(&entry.function, arguments.to_vec())?;
        }
    }
    Ok(())
}

/// Statements of a thread at most, or of a block.
const MOST: u64 = 1 << 32;

/// How a statement ends.
enum End {
    Next,
    Break,
    Continue,
    Return(Option<Value>),
}

pub(super) struct Machine<'u> {
    pub(super) unit: &'u Unit,
    memory: &'u mut dyn Memory,
    /// Memory of the block.
    pub(super) shared: Shared,
    /// Threads of a block.
    threads: u64,
    block: u64,
    /// Number of the thread in its block.
    pub(super) thread: u64,
    /// Statements that the thread may still run.
    left: u64,
    depth: usize,
}

/// A whole number as a variable of the type has it.
fn wrapped(n: i64, of: Number) -> i64 {
    match of {
        Number::Bool => i64::from(n != 0),
        Number::U8 => i64::from(n as u8),
        Number::U16 | Number::Bf16 => i64::from(n as u16),
        Number::I32 => i64::from(n as i32),
        Number::U32 => i64::from(n as u32),
        Number::I64 | Number::F32 | Number::Wide => n,
    }
}

/// A float rounded to the type.
fn rounded(x: f64, of: Number) -> f64 {
    if of == Number::F32 { f64::from(x as f32) } else { x }
}

pub(super) fn zero(of: Type, unit: &Unit) -> Value {
    let number = |of: Number| match of {
        Number::F32 | Number::Wide => Value::Float(0.0),
        _ => Value::Int(0),
    };
    match of {
        Type::Void => Value::Int(0),
        Type::Number(of) => number(of),
        Type::Pointer { .. } => Value::Address(0),
        Type::Floats(width) => Value::Many(vec![Value::Float(0.0); width as usize]),
        Type::Array(of, length) => Value::Many(vec![number(of); length.min(1 << 16) as usize]),
        Type::Struct(n) => Value::Many(
            unit.structs.get(n).map_or(vec![], |s| s.fields.iter().map(|(_, of)| number(*of)).collect()),
        ),
    }
}

pub(super) fn wrong<T>() -> Result<T> {
    Err("a value of another type than its expression".into())
}

impl Value {
    pub(super) fn int(&self) -> Result<i64> {
        match self {
            Value::Int(n) => Ok(*n),
            _ => wrong(),
        }
    }

    pub(super) fn float(&self) -> Result<f64> {
        match self {
            Value::Float(x) => Ok(*x),
            _ => wrong(),
        }
    }

    pub(super) fn address(&self) -> Result<u64> {
        match self {
            Value::Address(at) => Ok(*at),
            _ => wrong(),
        }
    }

    /// Adjacent floats.
    fn floats(&self) -> Result<Vec<f32>> {
        match self {
            Value::Many(list) => list.iter().map(|x| x.float().map(|x| x as f32)).collect(),
            _ => wrong(),
        }
    }

    fn of_floats(list: &[f32]) -> Value {
        Value::Many(list.iter().map(|&x| Value::Float(f64::from(x))).collect())
    }
}

/// Values of a function's variables.
pub(super) type Frame = Vec<Value>;

/// Where a number is.
enum Place {
    Memory(u64, Number),
    /// A variable.
    Whole(usize),
    /// A number of a variable.
    Part(usize, usize),
}

impl<'u> Machine<'u> {
    fn call(&mut self, function: &'u Function, given: Vec<Value>) -> Result<Value> {
        let Some(body) = &function.body else { return self.word(function, &given) };
        if self.depth >= 100 {
            return Err(format!("{} is called too deep", function.name));
        }
        self.depth += 1;
        let mut frame = given;
        frame.extend(function.variables[function.params..].iter().map(|v| zero(v.of, self.unit)));
        let end = self.list(body, &mut frame)?;
        self.depth -= 1;
        match end {
            End::Return(Some(value)) => Ok(value),
            _ if function.result == Type::Void => Ok(Value::Int(0)),
            _ => Err(format!("{} ends without a value", function.name)),
        }
    }

    /// A function of the dialect.
    fn word(&mut self, function: &Function, given: &[Value]) -> Result<Value> {
        let missing = || format!("{} lacks an argument", function.name);
        let at = |n: usize| given.get(n).ok_or_else(missing);
        let single = |n: usize| at(n)?.float().map(|x| x as f32);
        let float = |x: f32| Ok(Value::Float(f64::from(x)));
        match function.name.as_str() {
            "thread_number" => Ok(Value::Int((self.block * self.threads + self.thread) as i64)),
            "thread" => Ok(Value::Int(self.thread as i64)),
            "block" => Ok(Value::Int(self.block as i64)),
            "bits_of" => Ok(Value::Int(i64::from(single(0)?.to_bits()))),
            "float_of" | "__int_as_float" => float(f32::from_bits(at(0)?.int()? as u32)),
            "product_of" => float(single(0)? * single(1)?),
            "difference_of" => float(single(0)? - single(1)?),
            "report" => {
                let (status, launch) = (at(0)?.address()?, at(1)?.int()? as i32);
                let least = (self.memory.load(status, 4)? as u32 as i32).min(launch);
                self.memory.store(status, 4, u64::from(least as u32))?;
                Ok(Value::Int(0))
            }
            "value" => float(f32::from_bits((at(0)?.int()? as u32) << 16)),
            "put" => {
                let (to, x) = (at(0)?.address()?, at(1)?);
                let Some(Type::Pointer { to: of, .. }) = function.signature().next() else { return wrong() };
                let list = if let Value::Many(_) = x { x.floats()? } else { vec![single(1)?] };
                self.adjacent(to, list.len() as u64, of)?;
                for (i, x) in list.into_iter().enumerate() {
                    self.put(moved(to, i as i64, of), of, x)?;
                }
                Ok(Value::Int(0))
            }
            "load4" | "load8" => {
                let (from, Type::Floats(width)) = (at(0)?.address()?, function.result) else {
                    return wrong();
                };
                let Some(Type::Pointer { to: of, .. }) = function.signature().next() else { return wrong() };
                self.adjacent(from, width, of)?;
                let mut list = vec![];
                for i in 0..width {
                    list.push(match self.load(moved(from, i as i64, of), of)? {
                        Value::Int(bits) => f32::from_bits((bits as u32) << 16),
                        value => value.float()? as f32,
                    });
                }
                Ok(Value::of_floats(&list))
            }
            "with_lane" => {
                let (mut list, n, x) = (at(0)?.floats()?, at(1)?.int()?, single(2)?);
                usize::try_from(n).ok().and_then(|n| list.get_mut(n)).into_iter().for_each(|y| *y = x);
                Ok(Value::of_floats(&list))
            }
            "all_sum" | "all_largest" => {
                let mut list = at(0)?.floats()?;
                while list.len() > 1 {
                    let upper = list.split_off(list.len() / 2);
                    list.iter_mut().zip(upper).for_each(|(a, b)| *a = block::joined(&function.name, *a, b));
                }
                float(list.first().copied().unwrap_or(0.0))
            }
            "join_sums" | "join_largest" => {
                let (from, warps) = (at(0)?.address()?, at(1)?.int()? / 32);
                let mut all = self.load(from, Number::F32)?.float()? as f32;
                for warp in 1..warps {
                    let part = self.load(moved(from, warp, Number::F32), Number::F32)?.float()? as f32;
                    all = block::joined(&function.name, all, part);
                }
                float(all)
            }
            "sine_cosine" => {
                let (sine, cosine) = at(0)?.float()?.sin_cos();
                Ok(Value::of_floats(&[sine as f32, cosine as f32]))
            }
            "absent" => {
                self.memory.store(at(0)?.address()?, 2, 0x8000)?;
                Ok(Value::Int(0))
            }
            "expf" => float(single(0)?.exp()),
            "logf" => float(single(0)?.ln()),
            "tanhf" => float(single(0)?.tanh()),
            "sqrtf" => float(single(0)?.sqrt()),
            "floorf" => float(single(0)?.floor()),
            "fabsf" => float(single(0)?.abs()),
            "sinf" => float(single(0)?.sin()),
            "cosf" => float(single(0)?.cos()),
            "fmaxf" => float(single(0)?.max(single(1)?)),
            "fmaf" => float(single(0)?.mul_add(single(1)?, single(2)?)),
            "sqrt" => Ok(Value::Float(at(0)?.float()?.sqrt())),
            "floor" => Ok(Value::Float(at(0)?.float()?.floor())),
            name => Err(format!("{name} is not known here")),
        }
    }

    /// Refuses an access of adjacent numbers that is not aligned to itself, or to 16 bytes.
    fn adjacent(&self, address: u64, count: u64, of: Number) -> Result<()> {
        let bytes = (count * of.bytes()).min(16);
        match address.is_multiple_of(bytes) {
            true => Ok(()),
            false => {
                Err(format!("{bytes} bytes at {address:#x} in one access, which is no multiple of them"))
            }
        }
    }

    /// Stores a float; as bf16 to the nearest, ties to even; NaN stays NaN.
    fn put(&mut self, to: u64, of: Number, x: f32) -> Result<()> {
        if of != Number::Bf16 {
            return self.store(to, of, &Value::Float(f64::from(x)));
        }
        let bits = x.to_bits();
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        self.store(to, of, &Value::Int(i64::from(if x.is_nan() { 0x7fff } else { nearest })))
    }

    /// Counts a statement.
    pub(super) fn count(&mut self) -> Result<()> {
        self.left = self.left.checked_sub(1).ok_or("a thread does not come to its end")?;
        Ok(())
    }

    fn list(&mut self, list: &'u [Statement], frame: &mut Frame) -> Result<End> {
        for statement in list {
            match self.statement(statement, frame)? {
                End::Next => {}
                end => return Ok(end),
            }
        }
        Ok(End::Next)
    }

    fn statement(&mut self, statement: &'u Statement, frame: &mut Frame) -> Result<End> {
        self.count()?;
        match statement {
            Statement::Let(list) => {
                for (n, value) in list {
                    let value = value.as_ref().map(|x| self.expr(x, frame)).transpose()?;
                    if let (Some(value), Some(place)) = (value, frame.get_mut(*n)) {
                        *place = value;
                    }
                }
            }
            Statement::Do(x) => drop(self.expr(x, frame)?),
            Statement::If(condition, then, otherwise) => {
                let list = if self.truth(condition, frame)? { then } else { otherwise };
                return self.list(list, frame);
            }
            Statement::For(begin, condition, steps, body) => {
                if let Some(begin) = begin {
                    self.statement(begin, frame)?;
                }
                loop {
                    if let Some(condition) = condition
                        && !self.truth(condition, frame)?
                    {
                        break;
                    }
                    match self.list(body, frame)? {
                        End::Break => break,
                        End::Return(value) => return Ok(End::Return(value)),
                        End::Next | End::Continue => {}
                    }
                    for step in steps {
                        self.expr(step, frame)?;
                    }
                    self.count()?;
                }
            }
            Statement::While(condition, body) => {
                while self.truth(condition, frame)? {
                    match self.list(body, frame)? {
                        End::Break => break,
                        End::Return(value) => return Ok(End::Return(value)),
                        End::Next | End::Continue => {}
                    }
                    self.count()?;
                }
            }
            Statement::Break => return Ok(End::Break),
            Statement::Continue => return Ok(End::Continue),
            Statement::Return(value) => {
                let value = value.as_ref().map(|x| self.expr(x, frame)).transpose()?;
                return Ok(End::Return(value));
            }
            Statement::Block(list) => return self.list(list, frame),
            Statement::Unrolled(_, counted) => return self.statement(counted, frame),
            Statement::Shared(..) => return Err("memory of a block in a function of a thread".into()),
        }
        Ok(End::Next)
    }

    pub(super) fn truth(&mut self, x: &'u Expr, frame: &mut Frame) -> Result<bool> {
        Ok(self.expr(x, frame)?.int()? != 0)
    }

    pub(super) fn load(&mut self, address: u64, of: Number) -> Result<Value> {
        let bits = match block::place(address) {
            Some(at) => self.shared.load(at, self.thread)?,
            None => self.memory.load(address, of.bytes())?,
        };
        Ok(match of {
            Number::F32 => Value::Float(f64::from(f32::from_bits(bits as u32))),
            Number::Wide => Value::Float(f64::from_bits(bits)),
            _ => Value::Int(wrapped(bits as i64, of)),
        })
    }

    pub(super) fn store(&mut self, address: u64, of: Number, value: &Value) -> Result<()> {
        let bits = match of {
            Number::F32 => u64::from((value.float()? as f32).to_bits()),
            Number::Wide => value.float()?.to_bits(),
            _ => value.int()? as u64,
        };
        match block::place(address) {
            Some(at) => self.shared.store(at, self.thread, bits),
            None => self.memory.store(address, of.bytes(), bits),
        }
    }

    fn place(&mut self, x: &'u Expr, frame: &mut Frame) -> Result<Place> {
        let part = |of: &Expr, n: usize| match of.kind {
            ExprKind::Variable(v) => Ok(Place::Part(v, n)),
            _ => wrong(),
        };
        match &x.kind {
            ExprKind::Variable(n) => Ok(Place::Whole(*n)),
            ExprKind::Field(of, n) => part(of, *n),
            ExprKind::Element(of, index) => match of.of {
                Type::Pointer { to, .. } => {
                    let (at, by) = (self.expr(of, frame)?.address()?, self.expr(index, frame)?.int()?);
                    Ok(Place::Memory(moved(at, by, to), to))
                }
                _ => {
                    let index = self.expr(index, frame)?.int()?;
                    part(of, usize::try_from(index).map_err(|_| "a place before an array".to_string())?)
                }
            },
            _ => wrong(),
        }
    }

    fn get(&mut self, place: &Place, frame: &Frame) -> Result<Value> {
        match place {
            Place::Memory(at, of) => self.load(*at, *of),
            Place::Whole(n) => frame.get(*n).cloned().ok_or_else(|| "no such variable".into()),
            Place::Part(n, at) => match frame.get(*n) {
                Some(Value::Many(list)) => {
                    list.get(*at).cloned().ok_or_else(|| "a place outside an array".into())
                }
                _ => wrong(),
            },
        }
    }

    fn set(&mut self, place: &Place, frame: &mut Frame, value: &Value) -> Result<()> {
        match place {
            Place::Memory(at, of) => return self.store(*at, *of, value),
            Place::Whole(n) => frame[*n] = value.clone(),
            Place::Part(n, at) => match frame.get_mut(*n) {
                Some(Value::Many(list)) if *at < list.len() => list[*at] = value.clone(),
                _ => return Err("a place outside an array".into()),
            },
        }
        Ok(())
    }

    pub(super) fn expr(&mut self, x: &'u Expr, frame: &mut Frame) -> Result<Value> {
        let number = match x.of {
            Type::Number(of) => of,
            _ => Number::I64,
        };
        match &x.kind {
            ExprKind::Int(n) => Ok(Value::Int(*n)),
            ExprKind::Float(value) => Ok(Value::Float(rounded(*value, number))),
            ExprKind::Null => Ok(Value::Address(0)),
            ExprKind::Variable(n) => frame.get(*n).cloned().ok_or_else(|| "no such variable".into()),
            ExprKind::Table(_) => Err("a table is read by its elements".into()),
            ExprKind::Element(of, index) if matches!(of.kind, ExprKind::Table(_)) => {
                let ExprKind::Table(n) = of.kind else { return wrong() };
                let index = self.expr(index, frame)?.int()?;
                let table = &self.unit.tables[n];
                let found = usize::try_from(index).ok().and_then(|at| table.values.get(at));
                let value = found.ok_or_else(|| format!("{} has no element {index}", table.name))?;
                Ok(if table.of.floats() {
                    Value::Float(rounded(*value, table.of))
                } else {
                    Value::Int(*value as i64)
                })
            }
            ExprKind::Element(of, index)
                if matches!(of.of, Type::Floats(_)) && !matches!(of.kind, ExprKind::Variable(_)) =>
            {
                let (list, at) = (self.expr(of, frame)?.floats()?, self.expr(index, frame)?.int()?);
                let x = usize::try_from(at).ok().and_then(|at| list.get(at)).ok_or("no such float")?;
                Ok(Value::Float(f64::from(*x)))
            }
            ExprKind::Field(of, n) if !matches!(of.kind, ExprKind::Variable(_)) => {
                match self.expr(of, frame)? {
                    Value::Many(list) => list.get(*n).cloned().ok_or_else(|| "no such field".into()),
                    _ => wrong(),
                }
            }
            ExprKind::Element(..) | ExprKind::Field(..) => {
                let place = self.place(x, frame)?;
                self.get(&place, frame)
            }
            ExprKind::Offset(at, by) => {
                let Type::Pointer { to, .. } = x.of else { return wrong() };
                let (at, by) = (self.expr(at, frame)?.address()?, self.expr(by, frame)?.int()?);
                Ok(Value::Address(moved(at, by, to)))
            }
            ExprKind::Prefix(operator, of) => {
                let value = self.expr(of, frame)?;
                Ok(match (operator, value) {
                    (Prefix::Minus, Value::Float(x)) => Value::Float(-x),
                    (Prefix::Minus, value @ Value::Many(_)) => {
                        Value::of_floats(&value.floats()?.into_iter().map(|x| -x).collect::<Vec<_>>())
                    }
                    (Prefix::Minus, value) => Value::Int(wrapped(value.int()?.wrapping_neg(), number)),
                    (Prefix::Not, value) => Value::Int(i64::from(value.int()? == 0)),
                    (Prefix::Flip, value) => Value::Int(wrapped(!value.int()?, number)),
                })
            }
            ExprKind::Infix(Infix::Both, a, b) => {
                Ok(Value::Int(i64::from(self.truth(a, frame)? && self.truth(b, frame)?)))
            }
            ExprKind::Infix(Infix::Either, a, b) => {
                Ok(Value::Int(i64::from(self.truth(a, frame)? || self.truth(b, frame)?)))
            }
            ExprKind::Infix(operator, a, b) => {
                let of = if let Type::Number(of) = a.of { of } else { Number::F32 };
                match (self.expr(a, frame)?, self.expr(b, frame)?) {
                    (Value::Many(a), Value::Many(b)) => {
                        let each = a.iter().zip(&b).map(|(a, b)| infix(*operator, of, a, b));
                        Ok(Value::Many(each.collect::<Result<_>>()?))
                    }
                    (a, b) => infix(*operator, of, &a, &b),
                }
            }
            ExprKind::Select(c, a, b) => {
                let chosen = if self.truth(c, frame)? { a } else { b };
                self.expr(chosen, frame)
            }
            ExprKind::Convert(from, _) => {
                let value = self.expr(from, frame)?;
                converted(value, x.of)
            }
            ExprKind::Call(n, given) => {
                let given = given.iter().map(|x| self.expr(x, frame)).collect::<Result<_>>()?;
                let function = self.unit.functions.get(*n).ok_or("no such function")?;
                self.call(function, given)
            }
            ExprKind::Each(n, given) => {
                let Type::Floats(width) = x.of else { return wrong() };
                let function = self.unit.functions.get(*n).ok_or("no such function")?;
                let given: Vec<Vec<f32>> =
                    given.iter().map(|x| self.expr(x, frame)?.floats()).collect::<Result<_>>()?;
                let mut list = vec![];
                for i in 0..width as usize {
                    let one = given.iter().map(|x| x.get(i).map(|x| Value::Float(f64::from(*x))));
                    let one = one.collect::<Option<_>>().ok_or("no such float")?;
                    list.push(self.call(function, one)?);
                }
                Ok(Value::Many(list))
            }
            ExprKind::Build(list) => {
                Ok(Value::Many(list.iter().map(|x| self.expr(x, frame)).collect::<Result<_>>()?))
            }
            ExprKind::Assign(to, operator, value) => {
                let value_of = value.of;
                let value = self.expr(value, frame)?;
                let place = self.place(to, frame)?;
                let value = match (operator, to.of, value_of) {
                    (None, ..) => value,
                    (Some(operator), Type::Number(own), Type::Number(other)) => {
                        let shift = matches!(operator, Infix::Left | Infix::Right);
                        let of = if shift { own } else { own.max(Number::I32).max(other) };
                        let old = converted(self.get(&place, frame)?, Type::Number(of))?;
                        converted(infix(*operator, of, &old, &value)?, to.of)?
                    }
                    _ => return wrong(),
                };
                self.set(&place, frame, &value)?;
                Ok(value)
            }
            ExprKind::Step(to, by, new) => {
                let place = self.place(to, frame)?;
                let old = self.get(&place, frame)?;
                let next = match (&old, to.of) {
                    (Value::Address(at), Type::Pointer { to, .. }) => Value::Address(moved(*at, *by, to)),
                    (Value::Float(x), _) => Value::Float(rounded(x + *by as f64, number)),
                    _ => Value::Int(wrapped(old.int()?.wrapping_add(*by), number)),
                };
                self.set(&place, frame, &next)?;
                Ok(if *new { next } else { old })
            }
        }
    }
}

/// The address `by` numbers further.
pub(super) fn moved(at: u64, by: i64, of: Number) -> u64 {
    at.wrapping_add_signed(by.wrapping_mul(of.bytes() as i64))
}

fn converted(value: Value, to: Type) -> Result<Value> {
    if let (Type::Floats(width), Value::Float(x)) = (to, &value) {
        return Ok(Value::of_floats(&vec![*x as f32; width as usize]));
    }
    let Type::Number(of) = to else { return Ok(value) };
    Ok(match (value, of) {
        (Value::Int(n), Number::Bool) => Value::Int(i64::from(n != 0)),
        (Value::Float(x), Number::Bool) => Value::Int(i64::from(x != 0.0)),
        // From the integer at once: by way of an f64 it might be rounded twice.
        (Value::Int(n), Number::F32) => Value::Float(f64::from(n as f32)),
        (Value::Int(n), Number::Wide) => Value::Float(n as f64),
        (Value::Float(x), of) if of.floats() => Value::Float(rounded(x, of)),
        (Value::Float(x), of) => Value::Int(wrapped(x as i64, of)),
        (Value::Int(n), of) => Value::Int(wrapped(n, of)),
        (value, _) => value,
    })
}

fn infix(operator: Infix, of: Number, a: &Value, b: &Value) -> Result<Value> {
    if let (Value::Float(x), Value::Float(y)) = (a, b) {
        let truth = |t: bool| Ok(Value::Int(i64::from(t)));
        // In f64 sums, products and quotients of two f32 are exact enough to be rounded once more.
        let result = match operator {
            Infix::Add => x + y,
            Infix::Sub => x - y,
            Infix::Mul => x * y,
            Infix::Div => x / y,
            Infix::Less => return truth(x < y),
            Infix::Greater => return truth(x > y),
            Infix::AtMost => return truth(x <= y),
            Infix::AtLeast => return truth(x >= y),
            Infix::Equal => return truth(x == y),
            Infix::Other => return truth(x != y),
            _ => return wrong(),
        };
        return Ok(Value::Float(rounded(result, of)));
    }
    let (x, y) = (a.int()?, b.int()?);
    let whole = || "a division by zero".to_string();
    // Numbers of 32 bits are at home in 64, with their sign or without.
    let result = match operator {
        Infix::Add => x.wrapping_add(y),
        Infix::Sub => x.wrapping_sub(y),
        Infix::Mul => x.wrapping_mul(y),
        Infix::Div => x.checked_div(y).ok_or_else(whole)?,
        Infix::Rest => x.checked_rem(y).ok_or_else(whole)?,
        Infix::Left => x.checked_shl(y as u32).unwrap_or(0),
        Infix::Right => x.checked_shr(y as u32).unwrap_or(0),
        Infix::And => x & y,
        Infix::Or => x | y,
        Infix::Xor => x ^ y,
        Infix::Less => i64::from(x < y),
        Infix::Greater => i64::from(x > y),
        Infix::AtMost => i64::from(x <= y),
        Infix::AtLeast => i64::from(x >= y),
        Infix::Equal => i64::from(x == y),
        Infix::Other => i64::from(x != y),
        Infix::Both | Infix::Either => return wrong(),
    };
    Ok(Value::Int(if operator.compares() { result } else { wrapped(result, of) }))
}
