//! PTX text to statements: what is written, before anyone asks what it means.
//!
//! The grammar is the part of PTX that NVRTC writes: directives it does not need to understand
//! (debug sections, pragmas) are skipped, everything else that is unknown is an error with its
//! line. No text makes it panic, and its work is linear in the length of the text.

use super::finding::LoadError;

/// A whole PTX file.
#[derive(Debug, Default)]
pub struct Unit<'a> {
    /// `.target`, such as `sm_90a`.
    pub target: &'a str,
    /// `.file`: number and name.
    pub files: Vec<(u32, &'a str)>,
    /// Variables at module level.
    pub variables: Vec<Variable<'a>>,
    /// `.entry` functions.
    pub kernels: Vec<Entry<'a>>,
}

/// A state space that variables are declared in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Home {
    /// `.global`
    Global,
    /// `.const`
    Const,
    /// `.shared`
    Shared,
    /// `.local`
    Local,
}

/// A variable declaration.
#[derive(Debug)]
pub struct Variable<'a> {
    pub home: Home,
    pub name: &'a str,
    pub align: u64,
    pub bytes: u64,
    /// `.extern .shared x[]`: sized at launch.
    pub dynamic: bool,
    /// Initial bytes, as many as were given.
    pub initial: Vec<u8>,
}

/// A kernel parameter.
#[derive(Debug)]
pub struct Param<'a> {
    pub name: &'a str,
    pub align: u64,
    pub bytes: u64,
}

/// A kernel: its signature, its launch bounds and its body.
#[derive(Debug, Default)]
pub struct Entry<'a> {
    pub name: &'a str,
    pub params: Vec<Param<'a>>,
    /// `.maxntid`: no more threads than this.
    pub max_threads: Option<[u32; 3]>,
    /// `.minnctapersm`: this many blocks of a processor at once.
    pub resident: Option<u32>,
    /// `.reqntid`: exactly this block.
    pub required_block: Option<[u32; 3]>,
    /// `.reqnctapercluster`: blocks of a cluster.
    pub cluster: Option<[u32; 3]>,
    pub body: Vec<Statement<'a>>,
}

/// A statement and the line it starts on.
#[derive(Debug)]
pub struct Statement<'a> {
    pub line: u32,
    pub what: What<'a>,
}

/// The kinds of statement in a body.
#[derive(Debug)]
pub enum What<'a> {
    /// `{`
    Open,
    /// `}`
    Close,
    /// `.reg`: type and names; a count where the name is a family such as `%r<12>`.
    Registers {
        kind: &'a str,
        names: Vec<(&'a str, Option<u32>)>,
    },
    Variable(Variable<'a>),
    Label(&'a str),
    /// `.loc`, with the place a call was inlined at.
    Location {
        at: (u32, u32),
        inlined_at: Option<(u32, u32)>,
    },
    Instruction(Instruction<'a>),
}

/// `@!guard opcode operands;`
#[derive(Debug)]
pub struct Instruction<'a> {
    /// Predicate register, and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    pub opcode: &'a str,
    pub operands: Vec<Operand<'a>>,
    /// Bit `i`: a load uses byte `i`, as `.pragma "used_bytes_mask"` says. The compiler reads more
    /// bytes than a program asked for where that takes one access less.
    pub used: Option<u64>,
}

/// An operand as written.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand<'a> {
    /// A register, variable or label, with a constant added (`table+16`).
    Name(&'a str, i64),
    /// An integer, its sign extended to 64 bits.
    Integer(i64),
    /// `0f…`
    Single(u32),
    /// `0d…`
    Double(u64),
    /// `{a, b}`
    Vector(Vec<Operand<'a>>),
    /// `[base+offset]`, `[base, {coordinates}]`
    Memory { base: Box<Operand<'a>>, coordinates: Vec<Operand<'a>> },
    /// `d|p`
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
    /// `!p`
    Not(&'a str),
    /// `_`
    Sink,
}

/// Parses a whole file.
pub fn parse(text: &str) -> Result<Unit<'_>, LoadError> {
    let mut parser = Parser { text, at: 0, line: 1, used: None };
    let mut unit = Unit::default();
    while let Some(start) = parser.peek() {
        match start {
            b';' => parser.bump(),
            b'.' => parser.module_directive(&mut unit)?,
            _ => return Err(parser.unexpected("a directive")),
        }
    }
    Ok(unit)
}

/// Bytes of a scalar type, `None` where there is no such type.
pub fn type_bytes(kind: &str) -> Option<u64> {
    Some(match kind.trim_start_matches('.') {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}

/// Nothing real declares a variable or parameter near this size; it keeps sizes away from overflow.
const LARGEST: u64 = 1 << 32;

struct Parser<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    /// For the next instruction: see [`Instruction::used`].
    used: Option<u64>,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a [u8] {
        &self.text.as_bytes()[self.at..]
    }

    fn bump(&mut self) {
        if let Some(&byte) = self.rest().first() {
            self.at += 1;
            self.line += u32::from(byte == b'\n');
        }
    }

    /// The next byte that is neither space nor comment, left in place.
    fn peek(&mut self) -> Option<u8> {
        loop {
            let rest = self.rest();
            match *rest.first()? {
                byte if byte.is_ascii_whitespace() => self.bump(),
                b'/' if rest.starts_with(b"//") => {
                    while self.rest().first().is_some_and(|&byte| byte != b'\n') {
                        self.at += 1;
                    }
                }
                b'/' if rest.starts_with(b"/*") => {
                    while !self.rest().is_empty() && !self.rest().starts_with(b"*/") {
                        self.bump();
                    }
                    self.at = (self.at + 2).min(self.text.len());
                }
                byte => return Some(byte),
            }
        }
    }

    fn error(&self, message: impl Into<String>) -> LoadError {
        LoadError::Syntax { line: self.line, message: message.into() }
    }

    fn unexpected(&mut self, wanted: &str) -> LoadError {
        match self.peek() {
            Some(_) => {
                let found: String =
                    self.text[self.at..].chars().take_while(|c| !c.is_whitespace()).take(24).collect();
                self.error(format!("`{found}` where {wanted} was expected"))
            }
            None => self.error(format!("the text ends where {wanted} was expected")),
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.bump();
        }
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), LoadError> {
        if self.eat(byte) { Ok(()) } else { Err(self.unexpected(&format!("`{}`", byte as char))) }
    }

    /// The longest run of bytes that `belongs` allows, which may be empty. `belongs` takes ASCII
    /// only, so the slice ends on a character boundary.
    fn run(&mut self, belongs: impl Fn(u8) -> bool) -> &'a str {
        self.peek();
        let start = self.at;
        while self.rest().first().is_some_and(|&byte| byte.is_ascii() && belongs(byte)) {
            self.at += 1;
        }
        &self.text[start..self.at]
    }

    /// A name: of a register (`%tid.x`), variable, label, or a directive with its dot.
    fn name(&mut self) -> Result<&'a str, LoadError> {
        let name = self.run(|byte| byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte));
        if name.is_empty() { Err(self.unexpected("a name")) } else { Ok(name) }
    }

    fn unsigned<T: TryFrom<u64>>(&mut self) -> Result<T, LoadError> {
        let digits = self.run(|byte| byte.is_ascii_alphanumeric());
        let digits = digits.trim_end_matches('U');
        let value = match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
            Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16),
            None => digits.parse(),
        };
        let value = value.map_err(|_| self.error(format!("`{digits}` is no number")))?;
        T::try_from(value).map_err(|_| self.error(format!("{value} is too large")))
    }

    fn skip_statement(&mut self) {
        while !matches!(self.peek(), None | Some(b';')) {
            if self.eat(b'"') {
                while self.rest().first().is_some_and(|&byte| byte != b'"') {
                    self.bump();
                }
            }
            self.bump();
        }
        self.eat(b';');
    }

    fn module_directive(&mut self, unit: &mut Unit<'a>) -> Result<(), LoadError> {
        match self.name()? {
            ".version" => {
                self.name()?;
            }
            ".address_size" => {
                let bits: u64 = self.unsigned()?;
                if bits != 64 {
                    return Err(self.error("only .address_size 64"));
                }
            }
            ".target" => {
                unit.target = self.name()?;
                while self.eat(b',') {
                    self.name()?;
                }
            }
            ".file" => unit.files.push(self.file()?),
            ".section" => {
                self.name()?;
                self.expect(b'{')?;
                while !matches!(self.peek(), None | Some(b'}')) {
                    self.bump();
                }
                self.expect(b'}')?;
            }
            ".visible" | ".weak" | ".common" => {}
            ".extern" => {
                let home = self.name()?;
                let Some(home) = home_of(home) else {
                    return Err(self.error(format!(".extern {home}: only variables may be external")));
                };
                let variable = self.variable(home, true)?;
                if !(variable.dynamic && variable.home == Home::Shared) {
                    return Err(self.error(format!(
                        ".extern {}: only unsized shared memory may be external",
                        variable.name
                    )));
                }
                unit.variables.push(variable);
            }
            ".entry" => {
                let entry = self.entry()?;
                unit.kernels.push(entry);
            }
            ".func" => {
                return Err(LoadError::Unsupported {
                    line: self.line,
                    what: ".func".into(),
                    instead: "force-inline every device function: calls are not interpreted".into(),
                });
            }
            directive => match home_of(directive) {
                Some(home) => {
                    let variable = self.variable(home, false)?;
                    unit.variables.push(variable);
                }
                None => return Err(self.error(format!("unknown directive `{directive}`"))),
            },
        }
        Ok(())
    }

    fn file(&mut self) -> Result<(u32, &'a str), LoadError> {
        let number = self.unsigned()?;
        self.expect(b'"')?;
        let start = self.at;
        while self.rest().first().is_some_and(|&byte| byte != b'"') {
            self.bump();
        }
        let name = &self.text[start..self.at];
        self.expect(b'"')?;
        while self.eat(b',') {
            self.unsigned::<u64>()?;
        }
        Ok((number, name))
    }

    /// The rest of a variable after its state space: `.align 4 .b8 name[16] = {…};`
    fn variable(&mut self, home: Home, external: bool) -> Result<Variable<'a>, LoadError> {
        let mut align = 0;
        let element = loop {
            match self.name()? {
                ".align" => align = self.alignment()?,
                kind => break kind,
            }
        };
        let element =
            type_bytes(element).ok_or_else(|| self.error(format!("a variable of type `{element}`")))?;
        let name = self.name()?;
        let mut bytes = element;
        let mut dynamic = false;
        while self.eat(b'[') {
            if self.eat(b']') {
                dynamic = external;
                bytes = 0;
                continue;
            }
            let count: u64 = self.unsigned()?;
            self.expect(b']')?;
            bytes = bytes
                .checked_mul(count)
                .filter(|&bytes| bytes <= LARGEST)
                .ok_or_else(|| self.error("too large"))?;
        }
        let mut initial = Vec::new();
        if self.eat(b'=') {
            let braced = self.eat(b'{');
            loop {
                let value = match self.operand()? {
                    Operand::Integer(value) => value as u64,
                    Operand::Single(bits) => u64::from(bits),
                    Operand::Double(bits) => bits,
                    _ => return Err(self.error(format!("the initial value of {name} is no plain number"))),
                };
                initial.extend_from_slice(&value.to_le_bytes()[..element as usize]);
                if !(braced && self.eat(b',')) {
                    break;
                }
            }
            if braced {
                self.expect(b'}')?;
            }
            if initial.len() as u64 > bytes {
                return Err(self.error(format!("{name} has more initial values than places")));
            }
        }
        self.expect(b';')?;
        Ok(Variable { home, name, align: if align == 0 { element } else { align }, bytes, dynamic, initial })
    }

    fn alignment(&mut self) -> Result<u64, LoadError> {
        let align: u64 = self.unsigned()?;
        if align.is_power_of_two() && align <= 4096 {
            Ok(align)
        } else {
            Err(self.error(format!("an alignment of {align}")))
        }
    }

    fn entry(&mut self) -> Result<Entry<'a>, LoadError> {
        let mut entry = Entry { name: self.name()?, ..Entry::default() };
        if self.eat(b'(') {
            while !self.eat(b')') {
                entry.params.push(self.param()?);
                self.eat(b',');
            }
        }
        loop {
            match self.peek() {
                Some(b'{') => break,
                Some(b'.') => {}
                _ => return Err(self.unexpected("`{`")),
            }
            match self.name()? {
                ".maxntid" => entry.max_threads = Some(self.triple()?),
                ".reqntid" => entry.required_block = Some(self.triple()?),
                ".minnctapersm" => entry.resident = Some(self.unsigned()?),
                ".reqnctapercluster" => entry.cluster = Some(self.triple()?),
                ".explicitcluster" => {}
                ".maxnreg" | ".maxnctapersm" => {
                    self.unsigned::<u64>()?;
                }
                ".pragma" => self.skip_statement(),
                other => {
                    return Err(LoadError::Unsupported {
                        line: self.line,
                        what: other.into(),
                        instead: "bounds of threads, registers and clusters".into(),
                    });
                }
            }
        }
        self.expect(b'{')?;
        let mut depth = 0u32;
        loop {
            self.peek();
            let line = self.line;
            let what = match self.peek() {
                None => return Err(self.unexpected("`}`")),
                Some(b';') => {
                    self.bump();
                    continue;
                }
                Some(b'}') if depth == 0 => break,
                Some(b'}') => {
                    depth -= 1;
                    What::Close
                }
                Some(b'{') => {
                    depth += 1;
                    What::Open
                }
                _ => match self.statement()? {
                    Some(what) => what,
                    None => continue,
                },
            };
            if matches!(what, What::Open | What::Close) {
                self.bump();
            }
            entry.body.push(Statement { line, what });
        }
        self.expect(b'}')?;
        Ok(entry)
    }

    fn triple(&mut self) -> Result<[u32; 3], LoadError> {
        let mut triple = [1; 3];
        for (i, value) in triple.iter_mut().enumerate() {
            if i > 0 && !self.eat(b',') {
                break;
            }
            *value = self.unsigned()?;
        }
        Ok(triple)
    }

    /// `.param .align 64 .b8 name[128]`, `.param .u64 .ptr .global .align 16 name`
    fn param(&mut self) -> Result<Param<'a>, LoadError> {
        let mut align = 0;
        let mut bytes = 0;
        let mut pointer = false;
        let name = loop {
            match self.name()? {
                ".param" | ".const" | ".global" | ".shared" | ".local" => {}
                ".ptr" => pointer = true,
                // After `.ptr` it is the alignment of what is pointed to.
                ".align" if pointer => {
                    self.alignment()?;
                }
                ".align" => align = self.alignment()?,
                word if word.starts_with('.') => {
                    bytes = type_bytes(word)
                        .ok_or_else(|| self.error(format!("a parameter of type `{word}`")))?;
                }
                name => break name,
            }
        };
        if align == 0 {
            align = bytes.max(1);
        }
        if self.eat(b'[') {
            let count: u64 = self.unsigned()?;
            self.expect(b']')?;
            bytes = bytes.saturating_mul(count);
        }
        // The most that the ABI passes.
        if bytes > 32_764 {
            return Err(self.error(format!("parameter {name} of {bytes} bytes")));
        }
        Ok(Param { name, align, bytes })
    }

    fn statement(&mut self) -> Result<Option<What<'a>>, LoadError> {
        if self.peek() == Some(b'.') {
            return self.body_directive();
        }
        let mut guard = None;
        if self.eat(b'@') {
            let negated = self.eat(b'!');
            guard = Some((self.name()?, negated));
        }
        let opcode = self.run(|byte| byte.is_ascii_alphanumeric() || b"_$%.:".contains(&byte));
        // `$L__BB0_1:` is read whole by the run above; a label may also stand off its colon.
        if guard.is_none() {
            if let Some(label) = opcode.strip_suffix(':') {
                return Ok(Some(What::Label(label)));
            }
            if !opcode.is_empty() && self.eat(b':') {
                return Ok(Some(What::Label(opcode)));
            }
        }
        if opcode.is_empty() {
            return Err(self.unexpected("an instruction"));
        }
        let mut operands = Vec::new();
        while !self.eat(b';') {
            operands.push(self.operand()?);
            if !self.eat(b',') {
                self.expect(b';')?;
                break;
            }
        }
        Ok(Some(What::Instruction(Instruction { guard, opcode, operands, used: self.used.take() })))
    }

    fn body_directive(&mut self) -> Result<Option<What<'a>>, LoadError> {
        Ok(Some(match self.name()? {
            ".reg" => {
                let kind = self.name()?;
                let mut names = Vec::new();
                loop {
                    let name = self.name()?;
                    let mut count = None;
                    if self.eat(b'<') {
                        count = Some(self.unsigned()?);
                        self.expect(b'>')?;
                    }
                    names.push((name, count));
                    if !self.eat(b',') {
                        break;
                    }
                }
                self.expect(b';')?;
                What::Registers { kind, names }
            }
            ".loc" => {
                let at = (self.unsigned()?, self.unsigned()?);
                self.unsigned::<u64>()?;
                let mut inlined_at = None;
                while self.eat(b',') {
                    match self.name()? {
                        "function_name" => {
                            self.name()?;
                            if self.eat(b'+') {
                                self.unsigned::<u64>()?;
                            }
                        }
                        "inlined_at" => {
                            inlined_at = Some((self.unsigned()?, self.unsigned()?));
                            self.unsigned::<u64>()?;
                        }
                        other => return Err(self.error(format!("`.loc` with `{other}`"))),
                    }
                }
                What::Location { at, inlined_at }
            }
            ".pragma" => {
                let from = self.at;
                self.skip_statement();
                let words = self.text[from..self.at].split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let mut words = words.skip_while(|word| *word != "used_bytes_mask").skip(1);
                self.used = words.find_map(|word| word.parse().ok()).or(self.used);
                return Ok(None);
            }
            directive => match home_of(directive) {
                Some(home) => What::Variable(self.variable(home, false)?),
                None => {
                    return Err(LoadError::Unsupported {
                        line: self.line,
                        what: directive.into(),
                        instead: "nothing that NVRTC writes for a force-inlined kernel needs it".into(),
                    });
                }
            },
        }))
    }

    fn operand(&mut self) -> Result<Operand<'a>, LoadError> {
        let first = self.plain_operand()?;
        if self.eat(b'|') {
            let second = self.plain_operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn plain_operand(&mut self) -> Result<Operand<'a>, LoadError> {
        match self.peek() {
            Some(b'{') => {
                self.bump();
                Ok(Operand::Vector(self.simple_operands(b'}')?))
            }
            Some(b'[') => {
                self.bump();
                let base = Box::new(self.simple_operand()?);
                let mut coordinates = Vec::new();
                if self.eat(b',') {
                    self.expect(b'{')?;
                    coordinates = self.simple_operands(b'}')?;
                }
                self.expect(b']')?;
                Ok(Operand::Memory { base, coordinates })
            }
            Some(b'!') => {
                self.bump();
                Ok(Operand::Not(self.name()?))
            }
            _ => self.simple_operand(),
        }
    }

    fn simple_operands(&mut self, end: u8) -> Result<Vec<Operand<'a>>, LoadError> {
        let mut operands = Vec::new();
        while !self.eat(end) {
            operands.push(self.simple_operand()?);
            if !self.eat(b',') {
                self.expect(end)?;
                break;
            }
        }
        Ok(operands)
    }

    /// A name with an optional constant added, or a number.
    fn simple_operand(&mut self) -> Result<Operand<'a>, LoadError> {
        match self.peek() {
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                let name = self.name()?;
                if name == "_" {
                    return Ok(Operand::Sink);
                }
                let mut offset = 0;
                if self.eat(b'+') {
                    let Operand::Integer(constant) = self.number()? else {
                        return Err(self.error("an address plus something that is no integer"));
                    };
                    offset = constant;
                }
                Ok(Operand::Name(name, offset))
            }
        }
    }

    fn number(&mut self) -> Result<Operand<'a>, LoadError> {
        let negative = self.eat(b'-');
        let digits = self.run(|byte| byte.is_ascii_alphanumeric());
        let wrong = |parser: &Self| parser.error(format!("`{digits}` is no number"));
        let bits = |hexadecimal: &str, length: usize| {
            u64::from_str_radix(hexadecimal, 16).ok().filter(|_| hexadecimal.len() == length)
        };
        let lower = digits.get(..2).unwrap_or_default();
        match lower {
            "0f" | "0F" => {
                let bits = bits(&digits[2..], 8).ok_or_else(|| wrong(self))? as u32;
                Ok(Operand::Single(bits ^ (u32::from(negative) << 31)))
            }
            "0d" | "0D" => {
                let bits = bits(&digits[2..], 16).ok_or_else(|| wrong(self))?;
                Ok(Operand::Double(bits ^ (u64::from(negative) << 63)))
            }
            _ => {
                let plain = digits.trim_end_matches('U');
                let value = match lower {
                    "0x" | "0X" => u64::from_str_radix(&plain[2..], 16),
                    "0b" | "0B" => u64::from_str_radix(&plain[2..], 2),
                    _ => plain.parse(),
                };
                let value = value.map_err(|_| wrong(self))? as i64;
                Ok(Operand::Integer(if negative { value.wrapping_neg() } else { value }))
            }
        }
    }
}

fn home_of(directive: &str) -> Option<Home> {
    Some(match directive {
        ".global" => Home::Global,
        ".const" => Home::Const,
        ".shared" => Home::Shared,
        ".local" => Home::Local,
        _ => return None,
    })
}
