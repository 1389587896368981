//! Kernel statements: the typed form of naive kernels and of row kernels, between a plan and the
//! text of a dialect.
//!
//! *In*: a text in the C that they are written in (`op/NAME/naive.cuh`, recurrences, and what
//! `codegen/rows` generates). *Out*: a [`Unit`] of typed functions and entries, printed for
//! CUDA, HIP or Metal ([`print`]), and run on the CPU ([`run`]). *Promise*: a unit that parses is
//! well typed: every conversion is a node, every function is called with its own types, and a
//! pointer points to memory of one space.
//!
//! ```text
//! text ── expand ──> tokens ── parse ──> Unit ──┬── print ──> CUDA, HIP, Metal
//!         macros              types, names      └── run ────> the CPU, an operation at a time
//! ```
//!
//! The language has loops, conditions, loads, stores, selects, calls, structures of numbers,
//! short arrays of a thread, and constant tables. A thread of a naive kernel knows its number and
//! nothing of others; one word, `status`, takes the smallest of what threads report.
//!
//! Threads of a row kernel are a block together ([`ROW_WORDS`]): they know their place in it, share
//! memory (`shared float memory[64];`), wait for each other and join their numbers, and take four
//! or eight adjacent floats at a time (`floats4`, `floats8`). A function that threads call together
//! ([`Unit::together`]) is a statement of its own, with one value or none.

mod block;
mod expand;
mod parse;
pub mod print;
pub mod run;

use std::fmt;
use thiserror::Error;

/// A text that is not statements, or is not well typed: a bug of the kernel's author.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line} of its statements: {message}")]
pub struct StatementError {
    /// Line of the text, from 1.
    pub line: usize,
    /// The mistake.
    pub message: String,
}

impl StatementError {
    fn at(line: usize, message: String) -> Self {
        StatementError { line, message }
    }
}

/// A number's type. Arithmetic is in `I32`, `U32`, `I64`, `F32` or `Wide`; the others are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Number {
    /// A truth.
    Bool,
    /// A byte.
    U8,
    /// Two bytes.
    U16,
    /// `int`
    I32,
    /// Four bytes.
    U32,
    /// Eight bytes with a sign.
    I64,
    /// A float.
    F32,
    /// The widest float of a dialect: f64 but on Metal.
    Wide,
    /// bf16, which is read by `value` and written by `put`.
    Bf16,
}

impl Number {
    const ALL: [Number; 9] = {
        use Number::*;
        [Bool, U8, U16, I32, U32, I64, F32, Wide, Bf16]
    };

    /// Its name in a text.
    pub fn name(self) -> &'static str {
        match self {
            Number::Bool => "bool",
            Number::U8 => "u8",
            Number::U16 => "u16",
            Number::I32 => "int",
            Number::U32 => "u32",
            Number::I64 => "i64",
            Number::F32 => "float",
            Number::Wide => "Wide",
            Number::Bf16 => "bf16",
        }
    }

    /// Bytes in memory.
    pub fn bytes(self) -> u64 {
        match self {
            Number::Bool | Number::U8 => 1,
            Number::U16 | Number::Bf16 => 2,
            Number::I32 | Number::U32 | Number::F32 => 4,
            Number::I64 | Number::Wide => 8,
        }
    }

    /// Whether it is not an integer.
    pub fn floats(self) -> bool {
        matches!(self, Number::F32 | Number::Wide | Number::Bf16)
    }
}

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// None.
    Void,
    /// A number.
    Number(Number),
    /// Four or eight adjacent floats of a thread.
    Floats(u64),
    /// An address.
    Pointer {
        /// The numbers there.
        to: Number,
        /// Whether it is only read.
        constant: bool,
        /// Whether the memory is the block's; else it is the device's.
        shared: bool,
    },
    /// An array of a thread, or a table: the type of its numbers, and their count.
    Array(Number, u64),
    /// The structure of that number.
    Struct(usize),
}

/// Numbers by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    /// Its name.
    pub name: String,
    /// Names and types of its fields.
    pub fields: Vec<(String, Number)>,
}

/// Constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Their type.
    pub of: Number,
    /// The values.
    pub values: Vec<f64>,
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name; another variable of the function may have it in another block.
    pub name: String,
    /// Its type.
    pub of: Type,
    /// Whether it is declared `const`.
    pub constant: bool,
}

/// A function, or an entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name; functions of other parameters may have it, too.
    pub name: String,
    /// The type of its value.
    pub result: Type,
    /// How many of the variables are parameters.
    pub params: usize,
    /// Parameters, and then the variables of its blocks.
    pub variables: Vec<Variable>,
    /// Its statements; a function of the dialect has none.
    pub body: Option<Vec<Statement>>,
}

impl Function {
    /// Types of the parameters.
    pub fn signature(&self) -> impl Iterator<Item = Type> + '_ {
        self.variables[..self.params].iter().map(|v| v.of)
    }
}

/// A function that is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The work of its threads.
    pub function: Function,
    /// Threads of a block, and blocks of a processor at least.
    pub bounds: (u32, u32),
}

/// A statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Statement {
    /// Variables, which hold anything where they begin with nothing.
    Let(Vec<(usize, Option<Expr>)>),
    /// An expression for what it changes.
    Do(Expr),
    /// A condition, what follows, and what else.
    If(Expr, Vec<Statement>, Vec<Statement>),
    /// Memory of the block, and the variable with its address: a number of floats, or as many as
    /// the launch gives.
    Shared(usize, Option<u64>),
    /// Beginning, condition, step, body.
    For(Option<Box<Statement>>, Option<Expr>, Vec<Expr>, Vec<Statement>),
    /// A loop, and how many times it is unrolled.
    Unrolled(u64, Box<Statement>),
    /// Condition, body.
    While(Expr, Vec<Statement>),
    /// Ends the loop.
    Break,
    /// Begins its next round.
    Continue,
    /// Ends the function.
    Return(Option<Expr>),
    /// Several.
    Block(Vec<Statement>),
}

/// An operator of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// `-`
    Minus,
    /// `!`
    Not,
    /// `~`
    Flip,
}

/// An operator of two numbers, both of one type except for shifts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the operators of C by their usual names")]
pub enum Infix {
    Add,
    Sub,
    Mul,
    Div,
    Rest,
    Left,
    Right,
    And,
    Or,
    Xor,
    Less,
    Greater,
    AtMost,
    AtLeast,
    Equal,
    Other,
    Both,
    Either,
}

impl Infix {
    /// Operators, their marks, and how tightly each binds.
    const ALL: [(Infix, &'static str, u8); 18] = {
        use Infix::*;
        [
            (Either, "||", 1),
            (Both, "&&", 2),
            (Or, "|", 3),
            (Xor, "^", 4),
            (And, "&", 5),
            (Equal, "==", 6),
            (Other, "!=", 6),
            (Less, "<", 7),
            (Greater, ">", 7),
            (AtMost, "<=", 7),
            (AtLeast, ">=", 7),
            (Left, "<<", 8),
            (Right, ">>", 8),
            (Add, "+", 9),
            (Sub, "-", 9),
            (Mul, "*", 10),
            (Div, "/", 10),
            (Rest, "%", 10),
        ]
    };

    fn row(self) -> (Infix, &'static str, u8) {
        Infix::ALL.into_iter().find(|(operator, ..)| *operator == self).unwrap_or(Infix::ALL[0])
    }

    fn of(mark: &str) -> Option<(Infix, u8)> {
        Infix::ALL
            .into_iter()
            .find(|(_, other, _)| *other == mark)
            .map(|(operator, _, binds)| (operator, binds))
    }

    /// Whether it gives a truth.
    pub fn compares(self) -> bool {
        let (_, _, binds) = self.row();
        matches!(binds, 1 | 2 | 6 | 7)
    }
}

impl fmt::Display for Infix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().1)
    }
}

/// An expression and its type.
#[derive(Clone, Debug, PartialEq)]
pub struct Expr {
    /// The type.
    pub of: Type,
    /// The computation.
    pub kind: ExprKind,
}

/// The computation of an expression.
#[derive(Clone, Debug, PartialEq)]
pub enum ExprKind {
    /// An integer.
    Int(i64),
    /// A float, as it is written.
    Float(f64),
    /// No address.
    Null,
    /// A variable.
    Variable(usize),
    /// A table.
    Table(usize),
    /// A number of an array or at an address.
    Element(Box<Expr>, Box<Expr>),
    /// An address, and the count of numbers to move it by.
    Offset(Box<Expr>, Box<Expr>),
    /// A field.
    Field(Box<Expr>, usize),
    /// An operator before.
    Prefix(Prefix, Box<Expr>),
    /// An operator between.
    Infix(Infix, Box<Expr>, Box<Expr>),
    /// Condition, value, other value.
    Select(Box<Expr>, Box<Expr>, Box<Expr>),
    /// A number or an address of another type; whether the text says so.
    Convert(Box<Expr>, bool),
    /// Function, arguments.
    Call(usize, Vec<Expr>),
    /// A function of floats, of each of adjacent ones.
    Each(usize, Vec<Expr>),
    /// Fields of a structure, numbers of an array, or adjacent floats.
    Build(Vec<Expr>),
    /// A place, an operator that joins its old value, a value. The place's new value.
    Assign(Box<Expr>, Option<Infix>, Box<Expr>),
    /// A place, by how much it changes, whether the value is the new one.
    Step(Box<Expr>, i64, bool),
}

/// All of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Structures.
    pub structs: Vec<Struct>,
    /// Tables.
    pub tables: Vec<Table>,
    /// Functions, those of the dialect first; each calls those before it alone.
    pub functions: Vec<Function>,
    /// How many of the structures and of the functions are the dialect's and the library's.
    pub given: (usize, usize),
    /// Functions that are launched.
    pub entries: Vec<Entry>,
}

/// Functions that every dialect has: result, name, parameters.
const WORDS: &str = "
i64 thread_number();
u32 bits_of(float x);
float float_of(u32 bits);
float __int_as_float(int bits);
float product_of(float a, float b);
float difference_of(float a, float b);
void report(int *status, int launch);
float value(bf16 x);
void put(bf16 *to, float x);
void absent(bf16 *to);
float expf(float x);
float logf(float x);
float tanhf(float x);
float sqrtf(float x);
float floorf(float x);
float fabsf(float x);
float sinf(float x);
float cosf(float x);
float fmaxf(float a, float b);
float fmaf(float a, float b, float c);
Wide sqrt(Wide x);
Wide floor(Wide x);
";

/// The same for threads of a block: their place, the barriers of a block and of the threads of a
/// row, adjacent floats at a time, and numbers joined over threads. `lanes` adjacent threads of a
/// warp join a number, and `row` threads of it do so at once; in larger rows warps leave their
/// parts in a buffer, and after a barrier each of `threads` threads joins these. A `const` argument
/// is written as a number wherever the function is called.
pub const ROW_WORDS: &str = "
struct Angle {
    float sine, cosine;
};
Angle sine_cosine(Wide angle);
int thread();
int block();
void wait_block();
void wait_row(const int threads);
floats4 load4(const float *from);
floats4 load4(const bf16 *from);
floats4 load4(const shared float *from);
floats8 load8(const float *from);
floats8 load8(const bf16 *from);
floats8 load8(const shared float *from);
void put(float *to, floats4 x);
void put(bf16 *to, floats4 x);
void put(shared float *to, floats4 x);
void put(float *to, floats8 x);
void put(bf16 *to, floats8 x);
void put(shared float *to, floats8 x);
floats4 with_lane(floats4 x, int at, float value);
floats8 with_lane(floats8 x, int at, float value);
float all_sum(floats4 x);
float all_sum(floats8 x);
float all_largest(floats4 x);
float all_largest(floats8 x);
float lanes_sum(float x, const int lanes, const int row);
float lanes_largest(float x, const int lanes, const int row);
void leave_sum(float x, shared float *buffer);
void leave_largest(float x, shared float *buffer);
float join_sums(const shared float *buffer, const int threads);
float join_largest(const shared float *buffer, const int threads);
float add_parts(const float *parts, const int count, const int length, int column);
";

/// Functions in the language itself, which all texts may call.
const LIBRARY: &str = include_str!("../../../kernels/library.cuh");

impl Unit {
    /// A text with the library before it.
    pub fn parse(text: &str) -> Result<Unit, StatementError> {
        parse::unit(text)
    }

    /// Whether threads of a block do a function of [`ROW_WORDS`] together: it waits for others, or
    /// reads their numbers.
    pub fn together(&self, function: usize) -> bool {
        self.functions.get(function).is_some_and(|f| {
            f.body.is_none()
                && matches!(
                    f.name.as_str(),
                    "wait_block"
                        | "wait_row"
                        | "lanes_sum"
                        | "lanes_largest"
                        | "leave_sum"
                        | "leave_largest"
                        | "add_parts"
                )
        })
    }

    /// Whether its entries are of threads that are a block together.
    pub fn of_blocks(&self) -> bool {
        let row_word = |n: usize| {
            self.functions
                .get(n)
                .is_some_and(|f| f.body.is_none() && matches!(f.name.as_str(), "thread" | "block"))
        };
        let mut found = false;
        for entry in &self.entries {
            let mut see = |x: &Expr| found |= matches!(x.kind, ExprKind::Call(n, _) if row_word(n));
            entry.function.body.iter().flatten().for_each(|s| s.expressions(&mut see));
        }
        found
    }
}
