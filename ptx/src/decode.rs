//! Statements to a program: names become register rows, labels become places, opcodes become
//! operations.
//!
//! Immediates, special registers, parameters and addresses of variables become rows of registers
//! that are filled before a warp starts, so that an operation reads nothing but rows. An operation,
//! a modifier or an operand that is not known exactly is refused here, by name; nothing is guessed
//! at run time.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::alu::{self, Alu, File};
use super::finding::LoadError;
use super::hopper;
use super::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use super::parse::{Entry, Home, Instruction, Operand, Unit, Variable, What, type_bytes};
use super::program::{
    Address, AsyncCopy, Atomic, AtomicKind, Barrier, BarrierKind, Collective, CollectiveKind, Instr, Kernel,
    LaneMask, Line, ModuleVariable, Needs, Op, Order, ParamSlot, Program, Reg, SHARED_BASE, Scope, Shuffle,
    Space, Special, Transfer, Value, Vote,
};
use super::tensor;

/// Resolves a parsed file; `source` is the text of the CUDA file that the kernels are written in.
pub(super) fn decode(unit: &Unit, source: Option<&str>) -> Result<Program, LoadError> {
    let mut variables = Vec::new();
    let mut names = HashMap::new();
    for variable in &unit.variables {
        if matches!(variable.home, Home::Global | Home::Const) {
            names.insert(variable.name, Entity::Variable(variables.len() as u32));
            variables.push(ModuleVariable {
                bytes: variable.bytes,
                initial: variable.initial.clone(),
                constant: variable.home == Home::Const,
            });
        }
    }
    let mut kernels = Vec::new();
    for entry in &unit.kernels {
        kernels.push(Decoder::new(unit, entry, &names)?.run(entry)?);
    }
    // The file that kernels start in: the one the given source is the text of.
    let main =
        kernels.iter().flat_map(|kernel| &kernel.lines).find_map(|line| line.source.last()).map(|at| at.0);
    Ok(Program {
        kernels,
        variables,
        shared_limit: shared_limit(unit.target),
        files: unit.files.iter().map(|&(number, name)| (number, name.to_owned())).collect(),
        source: main.zip(source.map(|text| text.lines().map(str::to_owned).collect())),
    })
}

/// Shared memory per block that each architecture offers on request.
fn shared_limit(target: &str) -> u32 {
    let digits: String = target.chars().filter(char::is_ascii_digit).collect();
    let kibibytes = match digits.parse().unwrap_or(0u32) {
        90 | 100..=119 => 227,
        80 | 87 => 163,
        86 | 89 | 120.. => 99,
        _ => 48,
    };
    kibibytes * 1024
}

#[derive(Debug, Clone, Copy)]
enum Entity {
    Register(Reg),
    /// Global or constant.
    Variable(u32),
    /// An address in a space of its own: of shared memory, or of another.
    Shared(u64),
    Place(u64),
    Param(u32),
    Label(u32),
}

/// One `{}`.
#[derive(Debug, Default)]
struct Names<'a> {
    names: HashMap<&'a str, Entity>,
    /// `%r<12>`: first row and count.
    families: HashMap<&'a str, (File, u16, u32)>,
    parent: usize,
}

struct Decoder<'a> {
    scopes: Vec<Names<'a>>,
    scope: usize,
    outside: &'a HashMap<&'a str, Entity>,
    code: Vec<Instr>,
    lines: Vec<Line>,
    line: Line,
    /// Where each label stands, by its number.
    labels: Vec<u32>,
    rows: [usize; 3],
    constants: HashMap<(File, Value), u16>,
    scratch: HashMap<(File, u8), u16>,
    guard: Option<(u16, bool)>,
    /// Rows of the 16-bit registers.
    narrow: Vec<Range<u16>>,
    /// 32-bit registers that the statement names, and that each instruction so far does.
    used: Vec<u16>,
    uses: Vec<Vec<u16>>,
    params: Vec<ParamSlot>,
    param_bytes: u32,
    shared_bytes: u32,
    dynamic_at: u32,
    local_bytes: u32,
    needs: Needs,
}

impl<'a> Decoder<'a> {
    fn new(
        unit: &Unit<'a>,
        entry: &Entry<'a>,
        outside: &'a HashMap<&'a str, Entity>,
    ) -> Result<Decoder<'a>, LoadError> {
        let needs = Needs { shared_grain: 16, global_grain: 16, ..Needs::default() };
        let mut decoder = Decoder {
            scopes: vec![Names::default()],
            scope: 0,
            outside,
            code: Vec::new(),
            lines: Vec::new(),
            line: Line::default(),
            labels: Vec::new(),
            rows: [0; 3],
            constants: HashMap::new(),
            scratch: HashMap::new(),
            guard: None,
            narrow: Vec::new(),
            used: Vec::new(),
            uses: Vec::new(),
            params: Vec::new(),
            param_bytes: 0,
            shared_bytes: 0,
            dynamic_at: 0,
            local_bytes: 0,
            needs,
        };
        for param in &entry.params {
            let offset = decoder.param_bytes.next_multiple_of(param.align as u32);
            decoder.param_bytes = offset + param.bytes as u32;
            if decoder.param_bytes > 32_764 {
                return Err(decoder.wrong("more parameters than the ABI passes"));
            }
            let bytes = param.bytes as u32;
            decoder.params.push(ParamSlot { name: param.name.into(), offset, bytes });
            decoder.scopes[0].names.insert(param.name, Entity::Param(offset));
        }
        let shared = |dynamic: bool| {
            let all = unit.variables.iter().filter(|variable| variable.home == Home::Shared);
            all.filter(move |variable| variable.dynamic == dynamic)
        };
        for variable in shared(false) {
            decoder.declare(variable)?;
        }
        let inner = entry.body.iter().filter_map(|statement| match &statement.what {
            What::Variable(variable) if variable.home == Home::Shared => Some(variable),
            _ => None,
        });
        for variable in inner {
            decoder.place_shared(variable)?;
        }
        // Dynamic shared memory is put where its declaration is just met: twice its alignment would
        // be luck.
        let align = shared(true).map(|variable| variable.align as u32).max().unwrap_or(16).max(16);
        let end = (SHARED_BASE + decoder.shared_bytes).next_multiple_of(align);
        decoder.dynamic_at = if end % (2 * align) == 0 { end + align } else { end };
        for variable in shared(true) {
            decoder.scopes[0].names.insert(variable.name, Entity::Shared(u64::from(decoder.dynamic_at)));
        }
        Ok(decoder)
    }

    fn run(mut self, entry: &Entry<'a>) -> Result<Kernel, LoadError> {
        let cluster = match entry.cluster {
            None => 1,
            Some([blocks @ 1..=8, 1, 1]) => blocks,
            Some(other) => {
                let what = format!("clusters of {other:?} blocks");
                return Err(self.unsupported(&what, "up to eight blocks along x"));
            }
        };
        self.declare_labels(entry)?;
        let mut open = vec![0];
        let mut next_scope = 1;
        let mut inlined = HashMap::new();
        for statement in &entry.body {
            self.line.ptx = statement.line;
            match &statement.what {
                What::Open => {
                    open.push(next_scope);
                    next_scope += 1;
                }
                What::Close => {
                    open.pop();
                }
                What::Registers { kind, names } => {
                    for &(name, count) in names {
                        self.declare_registers(kind, name, count)?;
                    }
                }
                What::Variable(variable) if variable.home == Home::Shared => {
                    // Placed before; here its name comes into scope.
                    let at = self.shared_place(variable.name);
                    self.scopes[self.scope].names.insert(variable.name, at);
                }
                What::Variable(variable) => self.declare(variable)?,
                What::Label(name) => {
                    if let Some(Entity::Label(number)) = self.lookup(name) {
                        self.labels[number as usize] = self.code.len() as u32;
                    }
                }
                What::Location { at, inlined_at } => {
                    if at.1 == 0 {
                        continue;
                    }
                    if let Some(outer) = inlined_at {
                        inlined.insert(*at, *outer);
                    } else {
                        inlined.remove(at);
                    }
                    let mut source = vec![*at];
                    let mut outer = *inlined_at;
                    while let Some(place) = outer.filter(|_| source.len() < 8) {
                        source.push(place);
                        outer = inlined.get(&place).copied();
                    }
                    self.line.source = source;
                }
                What::Instruction(instruction) => {
                    self.used = self.registers_named(&instruction.operands);
                    self.instruction(instruction)?;
                }
            }
            self.scope = open.last().copied().unwrap_or(0);
        }
        // Falling off the end is a return.
        self.guard = None;
        self.emit(Op::Exit);
        for instr in &mut self.code {
            if let Op::Jump(label) = &mut instr.op {
                *label = self.labels[*label as usize];
            }
        }
        let touches = self.note_touches();
        let constants = self.constants.iter().map(|(&(file, value), &row)| ((file, row), value)).collect();
        Ok(Kernel {
            name: entry.name.to_owned(),
            params: self.params,
            param_bytes: self.param_bytes,
            max_threads: entry.max_threads.map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z)),
            resident: entry.resident,
            required_block: entry.required_block,
            cluster,
            code: self.code,
            lines: self.lines,
            rows: self.rows,
            constants,
            shared_bytes: self.shared_bytes,
            dynamic_at: self.dynamic_at,
            local_bytes: self.local_bytes,
            needs: self.needs,
            touches,
        })
    }

    /// The 32-bit registers among operands.
    fn registers_named(&self, operands: &[Operand<'a>]) -> Vec<u16> {
        let mut rows = Vec::new();
        for operand in operands {
            match operand {
                Operand::Name(name, _) => {
                    if let Some(Entity::Register((File::W, row))) = self.lookup(name) {
                        rows.push(row);
                    }
                }
                Operand::Vector(elements) => rows.extend(self.registers_named(elements)),
                Operand::Pair(first, second) => {
                    rows.extend(self.registers_named(std::slice::from_ref(first)));
                    rows.extend(self.registers_named(std::slice::from_ref(second)));
                }
                _ => {}
            }
        }
        rows
    }

    /// Marks the instructions that access registers which a `wgmma` uses.
    fn note_touches(&mut self) -> HashMap<u32, Vec<u16>> {
        let product = |instr: &Instr| match &instr.op {
            Op::Hopper(op) => match &**op {
                hopper::Op::Wgmma(wgmma) => Some(wgmma.registers().collect::<Vec<u16>>()),
                _ => None,
            },
            _ => None,
        };
        let owned: HashSet<u16> = self.code.iter().filter_map(product).flatten().collect();
        let mut touches = HashMap::new();
        for (pc, (instr, used)) in self.code.iter_mut().zip(&self.uses).enumerate() {
            let rows: Vec<u16> = used.iter().copied().filter(|row| owned.contains(row)).collect();
            if !rows.is_empty() && product(instr).is_none() {
                instr.touches = true;
                touches.insert(pc as u32, rows);
            }
        }
        touches
    }

    // Names

    fn wrong(&self, message: impl Into<String>) -> LoadError {
        LoadError::Operand { line: self.line.ptx, message: message.into() }
    }

    fn unsupported(&self, what: &str, instead: &str) -> LoadError {
        LoadError::Unsupported { line: self.line.ptx, what: what.into(), instead: instead.into() }
    }

    fn rows(&mut self, file: File, count: u32) -> Result<u16, LoadError> {
        let rows = &mut self.rows[file as usize];
        let first = *rows;
        *rows += count as usize;
        if *rows > usize::from(u16::MAX) {
            return Err(self.wrong("more registers than any kernel has"));
        }
        Ok(first as u16)
    }

    fn declare_registers(&mut self, kind: &str, name: &'a str, count: Option<u32>) -> Result<(), LoadError> {
        let file = match (kind, type_bytes(kind)) {
            (".pred", _) => File::P,
            (_, Some(1..=4)) => File::W,
            (_, Some(8)) => File::D,
            _ => return Err(self.unsupported(&format!(".reg {kind}"), "registers have up to 64 bits here")),
        };
        let first = self.rows(file, count.unwrap_or(1))?;
        if type_bytes(kind) == Some(2) {
            self.narrow.push(first..self.rows[File::W as usize] as u16);
        }
        match count {
            Some(count) => {
                self.scopes[self.scope].families.insert(name, (file, first, count));
            }
            None => {
                self.scopes[self.scope].names.insert(name, Entity::Register((file, first)));
            }
        }
        Ok(())
    }

    fn declare(&mut self, variable: &Variable<'a>) -> Result<(), LoadError> {
        match variable.home {
            Home::Shared => self.place_shared(variable)?,
            Home::Local => {
                let at = u64::from(self.local_bytes).next_multiple_of(variable.align);
                let end = at + variable.bytes;
                // The most local memory a thread can have.
                if end > 512 << 10 {
                    return Err(self.wrong(format!("{} makes {end} bytes of local memory", variable.name)));
                }
                self.local_bytes = end as u32;
                self.scopes[self.scope].names.insert(variable.name, Entity::Place(at));
            }
            Home::Global | Home::Const => {
                return Err(self.unsupported("a global variable inside a kernel", "declare it outside"));
            }
        }
        Ok(())
    }

    fn place_shared(&mut self, variable: &Variable<'a>) -> Result<(), LoadError> {
        let at = u64::from(SHARED_BASE + self.shared_bytes).next_multiple_of(variable.align);
        let end = at + variable.bytes - u64::from(SHARED_BASE);
        if end > 48 << 10 {
            return Err(self.wrong(format!("{end} bytes of static shared memory; a kernel may have 49152")));
        }
        self.shared_bytes = end as u32;
        self.scopes[0].names.insert(variable.name, Entity::Shared(at));
        Ok(())
    }

    fn shared_place(&self, name: &str) -> Entity {
        self.scopes[0].names.get(name).copied().unwrap_or(Entity::Shared(0))
    }

    fn lookup(&self, name: &str) -> Option<Entity> {
        let mut scope = self.scope;
        loop {
            let names = &self.scopes[scope];
            if let Some(&entity) = names.names.get(name) {
                return Some(entity);
            }
            let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
            let (prefix, number) = name.split_at(digits);
            if let Some(&(file, first, count)) = names.families.get(prefix)
                && let Ok(number) = number.parse::<u32>()
                && number < count
            {
                return Some(Entity::Register((file, first + number as u16)));
            }
            if scope == 0 {
                return self.outside.get(name).copied();
            }
            scope = names.parent;
        }
    }

    /// Labels may be used before they stand, so all of them are entered first, numbered in order;
    /// [`Op::Jump`] holds the number until the whole body is decoded.
    fn declare_labels(&mut self, entry: &Entry<'a>) -> Result<(), LoadError> {
        let mut open = vec![0];
        let mut labels = 0;
        for statement in &entry.body {
            let scope = open.last().copied().unwrap_or(0);
            match &statement.what {
                What::Open => {
                    if open.len() > 64 {
                        self.line.ptx = statement.line;
                        return Err(self.wrong("blocks nested deeper than 64"));
                    }
                    open.push(self.scopes.len());
                    self.scopes.push(Names { parent: scope, ..Names::default() });
                }
                What::Close => {
                    open.pop();
                }
                What::Label(name) => {
                    if self.scopes[scope].names.insert(name, Entity::Label(labels)).is_some() {
                        self.line.ptx = statement.line;
                        return Err(self.wrong(format!("`{name}` stands twice")));
                    }
                    labels += 1;
                }
                _ => {}
            }
        }
        self.labels = vec![0; labels as usize];
        Ok(())
    }

    // Operands

    fn emit(&mut self, op: Op) {
        let (guard, negated) = self.guard.map_or((None, false), |(row, negated)| (Some(row), negated));
        self.code.push(Instr { guard, negated, touches: false, op });
        self.lines.push(self.line.clone());
        self.uses.push(self.used.clone());
    }

    fn alu(&mut self, opcode: &str, to: u16, from: &[u16]) -> Result<(), LoadError> {
        match alu::find(opcode) {
            Some(alu) => {
                self.emit_alu(alu, to, from);
                Ok(())
            }
            None => Err(self.refuse(opcode)),
        }
    }

    fn emit_alu(&mut self, alu: Alu, to: u16, from: &[u16]) {
        let mut slots = [0; 8];
        slots[0] = to;
        slots[1..=from.len()].copy_from_slice(from);
        slots[from.len() + 1..from.len() + 4].copy_from_slice(&alu.constants);
        self.emit(Op::Alu(alu.run, slots));
    }

    fn refuse(&self, opcode: &str) -> LoadError {
        let instead = "use an operation that the README of dreamc-ptx lists, or add it to its tables";
        self.unsupported(opcode, instead)
    }

    fn constant(&mut self, file: File, value: Value) -> Result<u16, LoadError> {
        if let Some(&row) = self.constants.get(&(file, value)) {
            return Ok(row);
        }
        let row = self.rows(file, 1)?;
        self.constants.insert((file, value), row);
        Ok(row)
    }

    /// A row for an intermediate result of one statement; `which` tells several apart.
    fn scratch(&mut self, file: File, which: u8) -> Result<u16, LoadError> {
        if let Some(&row) = self.scratch.get(&(file, which)) {
            return Ok(row);
        }
        let row = self.rows(file, 1)?;
        self.scratch.insert((file, which), row);
        Ok(row)
    }

    fn register(&self, operand: &Operand) -> Result<Reg, LoadError> {
        match operand {
            Operand::Name(name, 0) => match self.lookup(name) {
                Some(Entity::Register(reg)) => Ok(reg),
                _ => Err(self.wrong(format!("`{name}` is no register declared here"))),
            },
            other => Err(self.wrong(format!("{other:?} where a register was expected"))),
        }
    }

    fn register_of(&self, operand: &Operand, file: File) -> Result<u16, LoadError> {
        let (found, row) = self.register(operand)?;
        if found == file {
            Ok(row)
        } else {
            Err(self.wrong(format!("{operand:?} has not the width of the operation")))
        }
    }

    /// A register to write to, or none for `_`.
    fn destination(&self, operand: &Operand) -> Result<Option<Reg>, LoadError> {
        if *operand == Operand::Sink { Ok(None) } else { self.register(operand).map(Some) }
    }

    /// The row of a source of a kind: a register, or a constant made for it.
    fn source(&mut self, operand: &Operand, file: File) -> Result<u16, LoadError> {
        let value = match (operand, file) {
            (&Operand::Integer(value), File::W) => Value::Bits(value as u64 & 0xffff_ffff),
            (&Operand::Integer(value), File::D) => Value::Bits(value as u64),
            (&Operand::Integer(value), File::P) => {
                Value::Bits(if value == 0 { 0 } else { u64::from(u32::MAX) })
            }
            (&Operand::Single(bits), File::W) => Value::Bits(u64::from(bits)),
            (&Operand::Double(bits), File::D) => Value::Bits(bits),
            (Operand::Not(name), File::P) => {
                let plain = self.register_of(&Operand::Name(name, 0), File::P)?;
                let row = self.scratch(File::P, 7)?;
                self.alu("not.pred", row, &[plain])?;
                return Ok(row);
            }
            (&Operand::Name(name, offset), _) => match self.lookup(name) {
                Some(Entity::Register((found, row))) if found == file && offset == 0 => return Ok(row),
                Some(Entity::Register(_)) => {
                    return Err(self.wrong(format!("`{name}` has not the width of the operation")));
                }
                Some(Entity::Variable(index)) if file == File::D => Value::Variable { index, offset },
                Some(Entity::Place(at)) if file != File::P => Value::Bits(at.wrapping_add_signed(offset)),
                Some(Entity::Shared(at)) if file != File::P => Value::Shared(at.wrapping_add_signed(offset)),
                Some(Entity::Param(at)) if file == File::D => {
                    Value::Bits(u64::from(at).wrapping_add_signed(offset))
                }
                Some(_) => return Err(self.wrong(format!("`{name}` cannot stand here"))),
                None => match special(name) {
                    Some(value) if file != File::P => value,
                    _ if matches!(
                        name,
                        "%clock"
                            | "%clock64"
                            | "%clock_hi"
                            | "%globaltimer"
                            | "%globaltimer_lo"
                            | "%smid"
                            | "%nsmid"
                            | "%gridid"
                    ) =>
                    {
                        return Err(
                            self.unsupported(name, "no kernel whose results are to repeat may depend on it")
                        );
                    }
                    _ => return Err(self.wrong(format!("`{name}` is not declared"))),
                },
            },
            _ => return Err(self.wrong(format!("{operand:?} cannot be a source of this operation"))),
        };
        self.constant(file, value)
    }

    /// A source that may have either width, as its register says; constants take `default`.
    fn any_source(&mut self, operand: &Operand, default: File) -> Result<Reg, LoadError> {
        if let Operand::Name(name, 0) = operand
            && let Some(Entity::Register(reg)) = self.lookup(name)
        {
            return Ok(reg);
        }
        Ok((default, self.source(operand, default)?))
    }

    fn address(&mut self, operand: &Operand) -> Result<Address, LoadError> {
        let Operand::Memory { base, coordinates } = operand else {
            return Err(self.wrong(format!("{operand:?} where an address was expected")));
        };
        if !coordinates.is_empty() {
            return Err(self.wrong("coordinates where none are taken"));
        }
        self.place(base)
    }

    fn place(&mut self, base: &Operand) -> Result<Address, LoadError> {
        if let Operand::Name(name, offset) = base
            && let Some(Entity::Register(reg)) = self.lookup(name)
        {
            if reg.0 == File::P {
                return Err(self.wrong(format!("`{name}` is a predicate, no address")));
            }
            return Ok(Address { base: reg, offset: *offset });
        }
        Ok(Address { base: (File::D, self.source(base, File::D)?), offset: 0 })
    }

    fn exactly<'o, const N: usize>(
        &self,
        operands: &'o [Operand<'a>],
    ) -> Result<&'o [Operand<'a>; N], LoadError> {
        let found = operands.len();
        operands.try_into().map_err(|_| self.wrong(format!("{found} operands where {N} are taken")))
    }

    fn immediate(&self, operand: &Operand) -> Result<i64, LoadError> {
        match operand {
            Operand::Integer(value) => Ok(*value),
            _ => Err(self.wrong("a constant is needed here")),
        }
    }

    // Instructions

    fn instruction(&mut self, instruction: &Instruction<'a>) -> Result<(), LoadError> {
        self.guard = None;
        if let Some((name, negated)) = instruction.guard {
            self.guard = Some((self.register_of(&Operand::Name(name, 0), File::P)?, negated));
        }
        let opcode = instruction.opcode;
        let operands = &instruction.operands[..];
        let parts: Vec<&str> = opcode.split('.').collect();
        match (parts[0], &parts[1..]) {
            ("mov", [kind]) => return self.mov(kind, operands),
            ("setp", rest) => return self.setp(opcode, rest, operands),
            ("cvta", rest) => return self.window(opcode, rest, operands),
            ("ld", rest) => return self.transfer(opcode, rest, operands, true, instruction.used),
            ("st", rest) => return self.transfer(opcode, rest, operands, false, None),
            ("atom" | "red", rest) => return self.atomic(opcode, rest, operands),
            ("bra", [] | ["uni"]) => return self.jump(operands),
            ("ret" | "exit", [] | ["uni"]) => {
                self.exactly::<0>(operands)?;
                self.emit(Op::Exit);
                return Ok(());
            }
            ("barrier", ["cluster", ..]) => return self.hopper(opcode, operands),
            ("bar" | "barrier", rest) => return self.barrier(opcode, rest, operands),
            ("shfl" | "vote" | "redux" | "elect", ["sync", rest @ ..]) => {
                return self.collective(opcode, parts[0], rest, operands);
            }
            ("match", [how, "sync", kind]) => {
                return self.collective(opcode, "match", &[how, kind], operands);
            }
            ("cp", ["async", "bulk", ..])
            | ("wgmma" | "mbarrier" | "mapa", _)
            | (
                "fence",
                ["mbarrier_init", "release", "cluster"]
                | ["release", "sync_restrict::shared::cta", "cluster"]
                | ["acquire", "sync_restrict::shared::cluster", "cluster"],
            ) => {
                return self.hopper(opcode, operands);
            }
            ("cp", ["async", rest @ ..]) => return self.async_copy(opcode, rest, operands),
            ("ldmatrix" | "stmatrix" | "mma", _) => return self.matrix(opcode, operands),
            ("call", _) => return Err(self.unsupported(opcode, "force-inline every device function")),
            _ => {}
        }
        let simple = match opcode {
            "trap" => Some(Op::Trap),
            "membar.cta" | "fence.acq_rel.cta" | "fence.sc.cta" => Some(Op::Fence { scope: Scope::Block }),
            "membar.gl" | "membar.sys" | "fence.acq_rel.gpu" | "fence.acq_rel.sys" | "fence.sc.gpu"
            | "fence.sc.sys" => {
                self.needs.ordering = true;
                Some(Op::Fence { scope: Scope::Device })
            }
            "fence.proxy.async" | "fence.proxy.async.shared::cta" | "fence.proxy.async.global" => {
                let (shared, global) = (!opcode.ends_with(".global"), !opcode.ends_with("::cta"));
                self.needs.asynchronous = true;
                self.needs.shows_global |= global;
                Some(Op::ProxyFence { shared, global })
            }
            "griddepcontrol.wait" | "griddepcontrol.launch_dependents" => Some(Op::Nothing),
            _ => None,
        };
        if let Some(op) = simple {
            self.exactly::<0>(operands)?;
            self.emit(op);
            return Ok(());
        }
        match opcode {
            "nanosleep.u32" => {
                self.exactly::<1>(operands)?;
                self.emit(Op::Yield);
            }
            "prefetch.global.L1" | "prefetch.global.L2" | "prefetch.tensormap" => {
                let [place] = self.exactly(operands)?;
                self.address(place)?;
                self.emit(Op::Nothing);
            }
            "setmaxnreg.inc.sync.aligned.u32" | "setmaxnreg.dec.sync.aligned.u32" => {
                let [count] = self.exactly(operands)?;
                let count = self.immediate(count)?;
                if !(24..=256).contains(&count) || count % 8 != 0 {
                    return Err(
                        self.wrong(format!("setmaxnreg {count}: a multiple of 8 from 24 to 256 is taken"))
                    );
                }
                self.emit(Op::Registers { count: count as u32, takes: opcode.contains(".inc.") });
            }
            "activemask.b32" => {
                let [to] = self.exactly(operands)?;
                let to = self.register_of(to, File::W)?;
                self.emit(Op::ActiveMask { to });
            }
            _ => return self.arithmetic(opcode, operands),
        }
        Ok(())
    }

    fn arithmetic(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let Some(alu) = alu::find(opcode).filter(|_| !is_internal(opcode)) else {
            return Err(self.refuse(opcode));
        };
        let [to, from @ ..] = operands else { return Err(self.wrong("no operands")) };
        if from.len() != alu.ins.len() {
            return Err(self.wrong(format!("{} sources where {} are taken", from.len(), alu.ins.len())));
        }
        let Some(to) = self.destination(to)? else { return Ok(()) };
        let narrow = opcode.rsplit('.').next().and_then(type_bytes) == Some(2);
        let mut rows = [0; 4];
        for (row, (operand, &file)) in rows.iter_mut().zip(from.iter().zip(alu.ins)) {
            *row = match operand {
                // A 16-bit register holds its value zero-extended, and so must a constant in its
                // place.
                Operand::Integer(value) if narrow => self.source(&Operand::Integer(value & 0xffff), file)?,
                // `cvt` may read a register that is wider than its type.
                Operand::Name(..)
                    if file == File::W
                        && opcode.starts_with("cvt.")
                        && matches!(self.register(operand), Ok((File::D, _))) =>
                {
                    let wide = self.source(operand, File::D)?;
                    let low = self.scratch(File::W, 5)?;
                    self.alu("cvt.u32.u64", low, &[wide])?;
                    low
                }
                _ => self.source(operand, file)?,
            };
        }
        let rows = &rows[..from.len()];
        match (to.0, alu.out) {
            (found, wanted) if found == wanted => self.emit_alu(alu, to.1, rows),
            // `cvt` may write a register that is wider than its type.
            (File::D, File::W) if opcode.starts_with("cvt.") => {
                let narrow = self.scratch(File::W, 6)?;
                self.emit_alu(alu, narrow, rows);
                let kind = opcode.split('.').rev().nth(1).unwrap_or_default();
                let extend = if kind.starts_with('s') { "cvt.s64.s32" } else { "cvt.u64.u32" };
                self.alu(extend, to.1, &[narrow])?;
            }
            _ => return Err(self.wrong("the destination has not the width of the operation")),
        }
        Ok(())
    }

    fn jump(&mut self, operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let [Operand::Name(name, 0)] = self.exactly::<1>(operands)? else {
            return Err(self.wrong("a jump to something that is no label"));
        };
        match self.lookup(name) {
            Some(Entity::Label(number)) => {
                self.emit(Op::Jump(number));
                Ok(())
            }
            _ => Err(self.wrong(format!("`{name}` is no label"))),
        }
    }

    fn mov(&mut self, kind: &str, operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let [to, from] = self.exactly(operands)?;
        match (to, from) {
            (Operand::Vector(to), from) => match (kind, &to[..]) {
                ("b32", [low, high]) => {
                    let from = self.source(from, File::W)?;
                    self.halves("low.b32", "high.b32", [low, high], from)
                }
                ("b64", [low, high]) => {
                    let from = self.source(from, File::D)?;
                    self.halves("low.b64", "high.b64", [low, high], from)
                }
                ("b64", [a, b, c, d]) => {
                    let from = self.source(from, File::D)?;
                    let words = [self.scratch(File::W, 0)?, self.scratch(File::W, 1)?];
                    self.alu("low.b64", words[0], &[from])?;
                    self.alu("high.b64", words[1], &[from])?;
                    self.halves("low.b32", "high.b32", [a, b], words[0])?;
                    self.halves("low.b32", "high.b32", [c, d], words[1])
                }
                _ => Err(self.refuse(&format!("mov.{kind} to {} parts", to.len()))),
            },
            (to, Operand::Vector(from)) => match (kind, &from[..]) {
                ("b32", [low, high]) => {
                    let to = self.register_of(to, File::W)?;
                    let rows = [self.source(low, File::W)?, self.source(high, File::W)?];
                    self.alu("pack.b32", to, &rows)
                }
                ("b64", [low, high]) => {
                    let to = self.register_of(to, File::D)?;
                    let rows = [self.source(low, File::W)?, self.source(high, File::W)?];
                    self.alu("pack.b64", to, &rows)
                }
                ("b64", [a, b, c, d]) => {
                    let to = self.register_of(to, File::D)?;
                    let words = [self.scratch(File::W, 0)?, self.scratch(File::W, 1)?];
                    for (word, pair) in words.into_iter().zip([[a, b], [c, d]]) {
                        let rows = [self.source(pair[0], File::W)?, self.source(pair[1], File::W)?];
                        self.alu("pack.b32", word, &rows)?;
                    }
                    self.alu("pack.b64", to, &words)
                }
                _ => Err(self.refuse(&format!("mov.{kind} from {} parts", from.len()))),
            },
            _ => self.arithmetic(&format!("mov.{kind}"), operands),
        }
    }

    fn halves(&mut self, low: &str, high: &str, to: [&Operand<'a>; 2], from: u16) -> Result<(), LoadError> {
        // The source may be one of the destinations' registers only where that is written last.
        let rows = [self.destination(to[0])?, self.destination(to[1])?];
        let copied = self.scratch(File::W, 5)?;
        let from = if low == "low.b32" {
            self.alu("mov.b32", copied, &[from])?;
            copied
        } else {
            from
        };
        for (opcode, row) in [low, high].into_iter().zip(rows) {
            match row {
                Some((File::W, row)) => self.alu(opcode, row, &[from])?,
                Some(_) => return Err(self.wrong("a part has not the width of the operation")),
                None => {}
            }
        }
        Ok(())
    }

    /// `setp.cmp{.bool}{.ftz}.type p{|q}, a, b{, {!}c}`: q is the comparison's opposite, each then
    /// joined with c.
    fn setp(&mut self, opcode: &str, parts: &[&str], operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let joins: Vec<&str> =
            parts.iter().copied().filter(|part| matches!(*part, "and" | "or" | "xor")).collect();
        let plain = match joins[..] {
            [] => opcode.to_owned(),
            [join] => opcode.replacen(&format!(".{join}"), "", 1),
            _ => return Err(self.refuse(opcode)),
        };
        let Some(alu) = alu::find(&plain) else { return Err(self.refuse(opcode)) };
        let (to, from, with) = match (operands, &joins[..]) {
            ([to, a, b], []) => (to, [a, b], None),
            ([to, a, b, c], [join]) => (to, [a, b], Some((c, *join))),
            _ => return Err(self.wrong("a number of operands that setp does not take")),
        };
        let narrow = plain.rsplit('.').next().and_then(type_bytes) == Some(2);
        let mut rows = [0; 2];
        for (row, operand) in rows.iter_mut().zip(from) {
            *row = match operand {
                Operand::Integer(value) if narrow => {
                    self.source(&Operand::Integer(value & 0xffff), alu.ins[0])?
                }
                _ => self.source(operand, alu.ins[0])?,
            };
        }
        let (p, q) = match to {
            Operand::Pair(p, q) => (self.destination(p)?, self.destination(q)?),
            _ => (self.destination(to)?, None),
        };
        let predicate = |reg: Option<Reg>| match reg {
            Some((File::P, row)) => Ok(Some(row)),
            Some(_) => Err(self.wrong("setp writes predicates")),
            None => Ok(None),
        };
        let (p, q) = (predicate(p)?, predicate(q)?);
        if let (Some(p), None, None) = (p, q, with) {
            self.emit_alu(alu, p, &rows);
            return Ok(());
        }
        let (yes, no) = (self.scratch(File::P, 0)?, self.scratch(File::P, 1)?);
        self.emit_alu(alu, yes, &rows);
        self.alu("not.pred", no, &[yes])?;
        let mut results = [(p, yes), (q, no)];
        if let Some((c, join)) = with {
            let c = self.source(c, File::P)?;
            for (_, row) in &mut results {
                self.alu(&format!("{join}.pred"), *row, &[*row, c])?;
            }
        }
        for (to, row) in results {
            if let Some(to) = to {
                self.alu("mov.pred", to, &[row])?;
            }
        }
        Ok(())
    }

    /// `cvta` for the spaces that have a window of the generic one.
    fn window(&mut self, opcode: &str, parts: &[&str], operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let [to, from] = self.exactly(operands)?;
        let (base, add) = match parts {
            ["to", "shared" | "shared::cta", "u64"] => (SHARED_WINDOW, false),
            ["shared" | "shared::cta", "u64"] => (SHARED_WINDOW, true),
            ["to", "local", "u64"] => (LOCAL_WINDOW, false),
            ["local", "u64"] => (LOCAL_WINDOW, true),
            ["to", "param", "u64"] => (PARAM_WINDOW, false),
            ["param", "u64"] => (PARAM_WINDOW, true),
            _ => return self.arithmetic(opcode, operands),
        };
        let to = self.register_of(to, File::D)?;
        let from = self.source(from, File::D)?;
        let base = self.constant(File::D, Value::Bits(base))?;
        self.alu(if add { "add.u64" } else { "sub.u64" }, to, &[from, base])
    }

    /// The modifiers that loads, stores and atomics share; gives back those it does not know.
    fn access<'p>(&self, parts: &[&'p str]) -> (Space, Order, Scope, Vec<&'p str>) {
        let (mut space, mut order, mut scope) = (Space::Generic, Order::Weak, Scope::Device);
        let mut rest = Vec::new();
        for &part in parts {
            match part {
                "global" => space = Space::Global,
                "shared" | "shared::cta" => space = Space::Shared,
                "local" => space = Space::Local,
                "param" => space = Space::Param,
                "const" => space = Space::Const,
                "volatile" | "relaxed" => order = Order::Relaxed,
                "acquire" => order = Order::Acquire,
                "release" => order = Order::Release,
                "acq_rel" => order = Order::Both,
                "cta" => scope = Scope::Block,
                "gpu" | "sys" => scope = Scope::Device,
                "weak"
                | "ca"
                | "cg"
                | "cs"
                | "lu"
                | "cv"
                | "wb"
                | "wt"
                | "L1::evict_normal"
                | "L1::evict_unchanged"
                | "L1::evict_first"
                | "L1::evict_last"
                | "L1::no_allocate"
                | "L2::64B"
                | "L2::128B"
                | "L2::256B" => {}
                other => rest.push(other),
            }
        }
        (space, order, scope, rest)
    }

    fn note_access(&mut self, space: Space, bytes: u64, order: Order) {
        if matches!(space, Space::Shared | Space::Generic) {
            self.needs.shared_grain = self.needs.shared_grain.min(bytes);
        }
        if matches!(space, Space::Global | Space::Generic) {
            self.needs.global_grain = self.needs.global_grain.min(bytes);
            self.needs.ordering |= order != Order::Weak;
            self.needs.alone |= order != Order::Weak;
        }
    }

    fn transfer(
        &mut self,
        opcode: &str,
        parts: &[&str],
        operands: &[Operand<'a>],
        load: bool,
        used: Option<u64>,
    ) -> Result<(), LoadError> {
        let (space, order, scope, rest) = self.access(parts);
        let (constant, rest) = match &rest[..] {
            ["nc", rest @ ..] if load && space == Space::Global => (true, rest),
            rest => (false, rest),
        };
        let (count, kind) = match rest {
            [kind] => (1, *kind),
            ["v2", kind] => (2, *kind),
            ["v4", kind] => (4, *kind),
            ["v8", kind] => (8, *kind),
            _ => return Err(self.refuse(opcode)),
        };
        let Some(bytes) = type_bytes(kind).filter(|bytes| bytes * count <= 32) else {
            return Err(self.refuse(opcode));
        };
        let directed = match order {
            Order::Acquire => load,
            Order::Release => !load,
            Order::Both => false,
            Order::Weak | Order::Relaxed => true,
        };
        if !directed || !load && matches!(space, Space::Param | Space::Const) {
            return Err(self.refuse(opcode));
        }
        let (data, place) = match (operands, load) {
            ([data, place], true) | ([place, data], false) => (data, place),
            _ => return Err(self.wrong("two operands are taken")),
        };
        let elements = match data {
            Operand::Vector(elements) => &elements[..],
            one => std::slice::from_ref(one),
        };
        if elements.len() as u64 != count {
            return Err(self.wrong(format!("{} registers where {count} are taken", elements.len())));
        }
        let width = if bytes == 8 { File::D } else { File::W };
        let mut regs = Vec::new();
        for element in elements {
            let reg = match load {
                true => self.destination(element)?,
                false => Some(self.any_source(element, width)?),
            };
            if reg.is_some_and(|(file, _)| file == File::P || bytes == 8 && file == File::W) {
                return Err(self.wrong("a register has not the width of the operation"));
            }
            regs.push(reg);
        }
        let signed = kind.starts_with('s');
        let Operand::Memory { base, .. } = place else { return Err(self.wrong("an address is needed")) };
        if space == Space::Param
            && let Operand::Name(name, offset) = **base
            && let Some(Entity::Param(at)) = self.lookup(name)
        {
            return self.load_param(&regs, i64::from(at).wrapping_add(offset), bytes as u8, signed);
        }
        let Address { base, offset } = self.address(place)?;
        self.note_access(space, bytes * count, order);
        // From the first byte that is used to the last, of 32 at most.
        let all = (bytes * count) as u8;
        let used = match used {
            Some(mask) if mask != 0 => {
                (mask.trailing_zeros() as u8).min(all)..(64 - mask.leading_zeros() as u8).min(all)
            }
            _ => 0..all,
        };
        let bytes = bytes as u8;
        let transfer =
            Box::new(Transfer { space, order, scope, bytes, signed, constant, base, offset, regs, used });
        if !load {
            self.emit(Op::Store(transfer));
            return Ok(());
        }
        let loaded = transfer.regs.clone();
        self.emit(Op::Load(transfer));
        if signed {
            self.cut_narrow(&loaded)?;
        }
        Ok(())
    }

    /// Restores that 16-bit registers are zero-extended, after a load that extended by the sign.
    fn cut_narrow(&mut self, regs: &[Option<Reg>]) -> Result<(), LoadError> {
        for &(file, row) in regs.iter().flatten() {
            if file == File::W && self.narrow.iter().any(|rows| rows.contains(&row)) {
                let low = self.constant(File::W, Value::Bits(0xffff))?;
                self.alu("and.b32", row, &[row, low])?;
            }
        }
        Ok(())
    }

    /// A parameter read at a place known now is a constant.
    fn load_param(
        &mut self,
        regs: &[Option<Reg>],
        at: i64,
        bytes: u8,
        signed: bool,
    ) -> Result<(), LoadError> {
        for (i, reg) in regs.iter().enumerate() {
            let offset = at.wrapping_add(i as i64 * i64::from(bytes));
            if offset < 0 || offset + i64::from(bytes) > i64::from(self.param_bytes) {
                return Err(self.wrong("a read outside the parameters"));
            }
            let Some((file, to)) = *reg else { continue };
            let from = self.constant(file, Value::Param { offset: offset as u32, bytes, signed })?;
            self.alu(if file == File::D { "mov.b64" } else { "mov.b32" }, to, &[from])?;
        }
        if signed { self.cut_narrow(regs) } else { Ok(()) }
    }

    fn atomic(&mut self, opcode: &str, parts: &[&str], operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let (space, order, scope, rest) = self.access(parts);
        if !matches!(space, Space::Generic | Space::Global | Space::Shared) {
            return Err(self.refuse(opcode));
        }
        if rest
            .last()
            .is_some_and(|kind| matches!(*kind, "f32" | "f64" | "f16" | "f16x2" | "bf16" | "bf16x2"))
        {
            self.needs.ordering = true;
            self.emit(Op::FloatAtomic(opcode.into()));
            return Ok(());
        }
        let (kind, bytes) = match rest[..] {
            ["add", "u32" | "s32"] => (AtomicKind::Add, 4),
            ["add", "u64" | "s64"] => (AtomicKind::Add, 8),
            ["min", "u32"] => (AtomicKind::Min, 4),
            ["max", "u32"] => (AtomicKind::Max, 4),
            ["min", "s32"] => (AtomicKind::MinSigned, 4),
            ["max", "s32"] => (AtomicKind::MaxSigned, 4),
            ["min", "u64"] => (AtomicKind::Min, 8),
            ["max", "u64"] => (AtomicKind::Max, 8),
            ["min", "s64"] => (AtomicKind::MinSigned, 8),
            ["max", "s64"] => (AtomicKind::MaxSigned, 8),
            ["inc", "u32"] => (AtomicKind::Increment, 4),
            ["dec", "u32"] => (AtomicKind::Decrement, 4),
            ["and", "b32"] => (AtomicKind::And, 4),
            ["or", "b32"] => (AtomicKind::Or, 4),
            ["xor", "b32"] => (AtomicKind::Xor, 4),
            ["and", "b64"] => (AtomicKind::And, 8),
            ["or", "b64"] => (AtomicKind::Or, 8),
            ["xor", "b64"] => (AtomicKind::Xor, 8),
            ["exch", "b32"] => (AtomicKind::Exchange, 4),
            ["exch", "b64"] => (AtomicKind::Exchange, 8),
            ["cas", "b32"] => (AtomicKind::CompareExchange, 4),
            ["cas", "b64"] => (AtomicKind::CompareExchange, 8),
            _ => return Err(self.refuse(opcode)),
        };
        let file = if bytes == 8 { File::D } else { File::W };
        let (to, operands) = if opcode.starts_with("atom") {
            let [to, rest @ ..] = operands else { return Err(self.wrong("no operands")) };
            (self.destination(to)?, rest)
        } else {
            (None, operands)
        };
        if to.is_some_and(|(found, _)| found != file) {
            return Err(self.wrong("the destination has not the width of the operation"));
        }
        let (place, value, new) = match (operands, kind) {
            ([place, value, new], AtomicKind::CompareExchange) => (place, value, new),
            ([place, value], _) if kind != AtomicKind::CompareExchange => (place, value, value),
            _ => return Err(self.wrong("a number of operands that the operation does not take")),
        };
        let Address { base, offset } = self.address(place)?;
        let value = (file, self.source(value, file)?);
        let new = (file, self.source(new, file)?);
        let order = if order == Order::Weak { Order::Relaxed } else { order };
        self.note_access(space, u64::from(bytes), order);
        // Counts do not depend on the order of blocks; slots taken from a counter do, and 8 bytes
        // are two words.
        self.needs.alone |= space != Space::Shared && (bytes == 8 || to.is_some());
        self.emit(Op::Atomic(Box::new(Atomic {
            kind,
            space,
            order,
            scope,
            bytes,
            base,
            offset,
            to,
            value,
            new,
        })));
        Ok(())
    }

    fn barrier(&mut self, opcode: &str, parts: &[&str], operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let short = opcode.starts_with("bar.");
        let rest = match parts {
            ["warp", "sync"] if short => {
                let [mask] = self.exactly(operands)?;
                let mask = self.source(mask, File::W)?;
                self.emit(Op::WarpSync { mask });
                return Ok(());
            }
            ["cta", rest @ ..] => rest,
            rest => rest,
        };
        let (rest, aligned) = match rest {
            [rest @ .., "aligned"] if !short => (rest, true),
            ["red", how, "aligned", kind] if !short => (&["red", *how, *kind][..], true),
            rest => (rest, short),
        };
        let (kind, id, count) = match (rest, operands) {
            (["sync"], [id]) => (BarrierKind::Wait, id, None),
            (["sync"], [id, count]) => (BarrierKind::Wait, id, Some(count)),
            (["arrive"], [id, count]) => (BarrierKind::Arrive, id, Some(count)),
            (["red", how, kind], [to, id, count @ .., of]) if count.len() <= 1 => {
                let of = self.source(of, File::P)?;
                let kind = match (*how, *kind) {
                    ("popc", "u32") => BarrierKind::Count { to: self.register_of(to, File::W)?, of },
                    ("and", "pred") => BarrierKind::All { to: self.register_of(to, File::P)?, of },
                    ("or", "pred") => BarrierKind::Any { to: self.register_of(to, File::P)?, of },
                    _ => return Err(self.refuse(opcode)),
                };
                (kind, id, count.first())
            }
            _ => return Err(self.refuse(opcode)),
        };
        let id = self.source(id, File::W)?;
        let count = count.map(|count| self.source(count, File::W)).transpose()?;
        self.emit(Op::Barrier(Box::new(Barrier { id, count, kind, aligned })));
        Ok(())
    }

    fn collective(
        &mut self,
        opcode: &str,
        what: &str,
        parts: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<(), LoadError> {
        let pair = |decoder: &Self, operand: &Operand<'a>| -> Result<(Option<Reg>, Option<u16>), LoadError> {
            match operand {
                Operand::Pair(first, second) => {
                    let second = match decoder.destination(second)? {
                        Some((File::P, row)) => Some(row),
                        Some(_) => return Err(decoder.wrong("the second result is a predicate")),
                        None => None,
                    };
                    Ok((decoder.destination(first)?, second))
                }
                one => Ok((decoder.destination(one)?, None)),
            }
        };
        let word = |decoder: &mut Self, reg: Option<Reg>| match reg {
            Some((File::W, row)) => Ok(row),
            Some(_) => Err(decoder.wrong("the result has 32 bits")),
            None => decoder.scratch(File::W, 4),
        };
        let (kind, mask) = match (what, parts, operands) {
            ("shfl", [mode, "b32"], [to, from, lane, bounds, mask]) => {
                let mode = match *mode {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Butterfly,
                    "idx" => Shuffle::Index,
                    _ => return Err(self.refuse(opcode)),
                };
                let (to, valid) = pair(self, to)?;
                let to = word(self, to)?;
                let from = self.source(from, File::W)?;
                let lane = self.source(lane, File::W)?;
                let bounds = self.source(bounds, File::W)?;
                (CollectiveKind::Shuffle { mode, to, valid, from, lane, bounds }, mask)
            }
            ("vote", [vote, kind], [to, of, mask]) => {
                let (vote, file) = match (*vote, *kind) {
                    ("all", "pred") => (Vote::All, File::P),
                    ("any", "pred") => (Vote::Any, File::P),
                    ("uni", "pred") => (Vote::Uniform, File::P),
                    ("ballot", "b32") => (Vote::Ballot, File::W),
                    _ => return Err(self.refuse(opcode)),
                };
                let to = self.register_of(to, file)?;
                (CollectiveKind::Vote { vote, to, of: self.source(of, File::P)? }, mask)
            }
            ("match", [how, kind @ ("b32" | "b64")], [to, of, mask]) => {
                let file = if *kind == "b64" { File::D } else { File::W };
                let of = (file, self.source(of, file)?);
                let (to, all) = pair(self, to)?;
                let to = word(self, to)?;
                match *how {
                    "any" if all.is_none() => (CollectiveKind::MatchAny { to, of }, mask),
                    "all" => (CollectiveKind::MatchAll { to, all, of }, mask),
                    _ => return Err(self.refuse(opcode)),
                }
            }
            ("redux", [how, kind], [to, of, mask]) => {
                let how = match (*how, *kind) {
                    ("add", "u32" | "s32") => AtomicKind::Add,
                    ("min", "u32") => AtomicKind::Min,
                    ("max", "u32") => AtomicKind::Max,
                    ("min", "s32") => AtomicKind::MinSigned,
                    ("max", "s32") => AtomicKind::MaxSigned,
                    ("and", "b32") => AtomicKind::And,
                    ("or", "b32") => AtomicKind::Or,
                    ("xor", "b32") => AtomicKind::Xor,
                    _ => return Err(self.refuse(opcode)),
                };
                let to = self.register_of(to, File::W)?;
                (CollectiveKind::Reduce { how, to, of: self.source(of, File::W)? }, mask)
            }
            ("elect", [], [Operand::Pair(to, chosen), mask]) => {
                let to = self.destination(to)?.map(|reg| word(self, Some(reg))).transpose()?;
                let chosen = self.register_of(chosen, File::P)?;
                (CollectiveKind::Elect { to, chosen }, mask)
            }
            _ => return Err(self.refuse(opcode)),
        };
        let mask = self.source(mask, File::W)?;
        self.emit(Op::Collective(Box::new(Collective { kind, mask })));
        Ok(())
    }

    fn async_copy(
        &mut self,
        opcode: &str,
        parts: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<(), LoadError> {
        match (parts, operands) {
            (["commit_group"], []) => self.emit(Op::CopyCommit),
            (["wait_all"], []) => {
                self.emit(Op::CopyCommit);
                self.emit(Op::CopyWait(0));
            }
            (["wait_group"], [groups]) => {
                let groups = self.immediate(groups)?;
                let groups = u32::try_from(groups).map_err(|_| self.wrong("a negative number of groups"))?;
                self.emit(Op::CopyWait(groups));
            }
            (["mbarrier", ..], _) => return self.hopper(opcode, operands),
            (
                [cache @ ("ca" | "cg"), "shared" | "shared::cta", "global", hints @ ..],
                [to, from, bytes, more @ ..],
            ) if hints.iter().all(|hint| matches!(*hint, "L2::64B" | "L2::128B" | "L2::256B")) => {
                let bytes = self.immediate(bytes)?;
                if !(bytes == 16 || *cache == "ca" && (bytes == 4 || bytes == 8)) {
                    return Err(self.wrong(format!("cp.async.{cache} of {bytes} bytes")));
                }
                let (mut source_bytes, mut ignore) = (None, None);
                match more {
                    [] => {}
                    [Operand::Name(name, 0)]
                        if matches!(self.lookup(name), Some(Entity::Register((File::P, _)))) =>
                    {
                        ignore = Some(self.source(&more[0], File::P)?);
                    }
                    [negated @ Operand::Not(_)] => {
                        // The row of a negation is scratch, so it is kept in one of its own.
                        ignore = Some(self.source(negated, File::P)?);
                    }
                    [bytes] => source_bytes = Some(self.source(bytes, File::W)?),
                    _ => return Err(self.refuse(opcode)),
                }
                let (to, from) = (self.address(to)?, self.address(from)?);
                let bytes = bytes as u32;
                self.note_access(Space::Shared, u64::from(bytes), Order::Weak);
                // Fewer source bytes make the read end anywhere.
                let read = if source_bytes.is_some() { 4 } else { u64::from(bytes) };
                self.note_access(Space::Global, read, Order::Weak);
                self.emit(Op::Copy(Box::new(AsyncCopy { to, from, bytes, source_bytes, ignore })));
            }
            _ => return Err(self.refuse(opcode)),
        }
        Ok(())
    }

    fn matrix(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Result<(), LoadError> {
        let op = match tensor::decode(self, opcode, operands)? {
            Some(op) => op,
            None => return Err(self.refuse(opcode)),
        };
        if matches!(op, Op::Matrix(_)) {
            // Lanes are charged with four bytes each.
            self.note_access(Space::Shared, 4, Order::Weak);
        }
        self.emit(op);
        Ok(())
    }

    fn hopper(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Result<(), LoadError> {
        match hopper::decode(self, opcode, operands)? {
            Some(op) => {
                self.needs.asynchronous = true;
                self.emit(Op::Hopper(Box::new(op)));
                Ok(())
            }
            None => Err(self.refuse(opcode)),
        }
    }
}

/// The face of the decoder that the families of instructions in other files see.
pub(super) trait Operands<'a> {
    /// The rows of `count` 32-bit registers, in braces or alone.
    fn words(&mut self, operand: &Operand<'a>, count: usize, write: bool) -> Result<Vec<u16>, LoadError>;
    /// `[register+constant]`
    fn address_of(&mut self, operand: &Operand<'a>) -> Result<Address, LoadError>;
    /// A source of a kind.
    fn row(&mut self, operand: &Operand<'a>, file: File) -> Result<u16, LoadError>;
    /// A result of a kind.
    fn result(&mut self, operand: &Operand<'a>, file: File) -> Result<u16, LoadError>;
    /// A constant.
    fn number(&self, operand: &Operand<'a>) -> Result<i64, LoadError>;
    /// Says that an operand is wrong.
    fn fault(&self, message: &str) -> LoadError;
}

impl<'a> Operands<'a> for Decoder<'a> {
    fn words(&mut self, operand: &Operand<'a>, count: usize, write: bool) -> Result<Vec<u16>, LoadError> {
        let elements = match operand {
            Operand::Vector(elements) => &elements[..],
            one => std::slice::from_ref(one),
        };
        if elements.len() != count {
            return Err(self.wrong(format!("{} registers where {count} are taken", elements.len())));
        }
        let rows = elements.iter().map(|element| match write {
            true => self.register_of(element, File::W),
            false => self.source(element, File::W),
        });
        rows.collect()
    }

    fn address_of(&mut self, operand: &Operand<'a>) -> Result<Address, LoadError> {
        self.address(operand)
    }

    fn row(&mut self, operand: &Operand<'a>, file: File) -> Result<u16, LoadError> {
        self.source(operand, file)
    }

    fn result(&mut self, operand: &Operand<'a>, file: File) -> Result<u16, LoadError> {
        self.register_of(operand, file)
    }

    fn number(&self, operand: &Operand<'a>) -> Result<i64, LoadError> {
        self.immediate(operand)
    }

    fn fault(&self, message: &str) -> LoadError {
        self.wrong(message)
    }
}

/// Operations of the table that no PTX text may name.
fn is_internal(opcode: &str) -> bool {
    matches!(opcode.split('.').next(), Some("pack" | "low" | "high"))
}

fn special(name: &str) -> Option<Value> {
    if let Some((vector, axis)) = name.rsplit_once('.') {
        let axis = match axis {
            "x" => 0,
            "y" => 1,
            "z" => 2,
            _ => return None,
        };
        return Some(match vector {
            "%tid" => Value::Special(Special::Tid(axis)),
            "%ntid" => Value::Special(Special::Ntid(axis)),
            "%clusterid" if axis == 0 => Value::Special(Special::Cluster),
            "%nclusterid" if axis == 0 => Value::Special(Special::Clusters),
            "%ctaid" | "%clusterid" => Value::Special(Special::Ctaid(axis)),
            "%nctaid" | "%nclusterid" => Value::Special(Special::Nctaid(axis)),
            "%cluster_ctaid" if axis == 0 => Value::Special(Special::Rank),
            "%cluster_nctaid" if axis == 0 => Value::Special(Special::Blocks),
            "%cluster_ctaid" => Value::Bits(0),
            "%cluster_nctaid" => Value::Bits(1),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Value::Special(Special::Lane),
        "%warpid" => Value::Special(Special::Warp),
        "%nwarpid" => Value::Special(Special::Warps),
        "%lanemask_eq" => Value::Special(Special::Mask(LaneMask::Equal)),
        "%lanemask_lt" => Value::Special(Special::Mask(LaneMask::Less)),
        "%lanemask_le" => Value::Special(Special::Mask(LaneMask::LessEqual)),
        "%lanemask_gt" => Value::Special(Special::Mask(LaneMask::Greater)),
        "%lanemask_ge" => Value::Special(Special::Mask(LaneMask::GreaterEqual)),
        "%dynamic_smem_size" => Value::Special(Special::DynamicShared),
        "%cluster_ctarank" => Value::Special(Special::Rank),
        "%cluster_nctarank" => Value::Special(Special::Blocks),
        "WARP_SZ" => Value::Bits(32),
        _ => return None,
    })
}
