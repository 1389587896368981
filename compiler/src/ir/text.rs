//! The printed form of the graph, and its parser.
//!
//! *In*: a [`Module`], or text. *Out*: the other. *Promise*: `parse(print(m)) == m` for every
//! module that satisfies [`verify`](super::verify()), floats to the bit and names of any characters
//! included, and [`parse`] neither panics nor runs long on any text. The parser checks syntax and
//! names alone: types are taken as written, so that the verifier's tests can write wrong ones.
//!
//! ```text
//! dims { batch 2  seq 8  hidden 16 }
//!
//! func @layer0 {
//!   stream %x              : f32[batch, seq, hidden]     a parameter: binding, name, type
//!   weight %sa.norm.weight : f32[hidden]
//!
//!   %0 = rms %x inner 1 eps 1e-6 : f32[batch, seq, hidden]
//!   %1 = mul %0, %sa.norm.weight : f32[batch, seq, hidden]
//!   return stream y = %1                                 a result: binding, name, value
//! }
//! ```
//!
//! A node is `%results = operation %operands attributes : types`. Nodes' results are numbered from
//! `%0` in order; parameters go by their names. An attribute is a word and its value, a list of
//! dimensions is in brackets, and names that are not words are quoted. A result without a binding
//! is a value of the caller, or the new value of the state of its name. `;` starts a comment. Line
//! breaks are spaces.

use super::{
    Binding, DType, Dim, Dims, Function, Index, Input, Lifetime, Module, Node, Of, Op, Output, Port, Type,
    Value,
};
use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::sync::Arc;
use thiserror::Error;

/// Statements up to this width have their types aligned; longer ones push theirs to the right.
const ALIGNED: usize = 76;
/// Lines of the table of dimensions are broken here.
const WIDTH: usize = 100;
/// Longest text that is read, in bytes.
const LONGEST: usize = 64 << 20;

// --- printing ------------------------------------------------------------------------------------

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&dims_table(self))?;
        for function in self.functions.values() {
            write!(f, "\n{}", self.show_function(function))?;
        }
        Ok(())
    }
}

fn dims_table(module: &Module) -> String {
    let entries: Vec<String> = module.dims.iter().map(|(n, size)| format!("{} {size}", name(n))).collect();
    let line = entries.join("  ");
    if entries.is_empty() {
        return "dims { }\n".into();
    }
    if line.chars().count() + "dims {  }".len() <= WIDTH {
        return format!("dims {{ {line} }}\n");
    }
    let (mut out, mut column) = (String::from("dims {"), WIDTH);
    for entry in entries {
        let width = entry.chars().count() + 2;
        if column + width > WIDTH {
            out.push('\n');
            column = 0;
        }
        column += width;
        out.push_str("  ");
        out.push_str(&entry);
    }
    out + "\n}\n"
}

impl Module {
    /// A function as the text form prints it.
    pub fn show_function(&self, function: &Function) -> String {
        format!("func @{} {{\n{}}}\n", name(&function.name), self.show_body(function))
    }

    /// The lines between the braces of a function.
    fn show_body(&self, function: &Function) -> String {
        let mut out = String::new();
        let names: Vec<String> =
            (0..function.params.len()).map(|i| show_value(function, Value(i as u32))).collect();
        let bindings: Vec<String> = function.params.iter().map(|p| p.binding.words()).collect();
        let binding_width = width(bindings.iter().map(String::as_str));
        let name_width = width(names.iter().map(String::as_str)).min(ALIGNED);
        for ((binding, name), ty) in bindings.iter().zip(&names).zip(&function.types) {
            let ty = self.show_type(ty);
            let _ = writeln!(out, "  {binding:binding_width$} {name:name_width$} : {ty}");
        }
        if !function.params.is_empty() {
            out.push('\n');
        }
        let left: Vec<String> = function.nodes.iter().map(|n| show_results(function, n)).collect();
        let left_width = width(left.iter().map(String::as_str)).min(ALIGNED / 4);
        let statements: Vec<String> = function
            .nodes
            .iter()
            .zip(&left)
            .map(|(n, l)| format!("{l:left_width$} = {}", self.show_operation(function, n)))
            .collect();
        let type_column =
            width(statements.iter().map(String::as_str).filter(|s| s.chars().count() <= ALIGNED));
        for (node, statement) in function.nodes.iter().zip(&statements) {
            let _ = writeln!(out, "  {statement:type_column$} : {}", self.show_result_types(function, node));
        }
        out.push_str("  return");
        for (i, (port, v)) in function.results.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let (binding, port) = (show_result_binding(function, port), name(&port.name));
            let _ = write!(out, "{comma} {binding}{port} = {}", show_value(function, *v));
        }
        out.push('\n');
        out
    }

    /// A node as the text form prints it, for messages: `%1 = mul %0, %g : f32[batch, hidden]`.
    pub fn show_node(&self, function: &Function, node: &Node) -> String {
        let operation = self.show_operation(function, node);
        format!("{} = {operation} : {}", show_results(function, node), self.show_result_types(function, node))
    }

    fn show_operation(&self, function: &Function, node: &Node) -> String {
        let operands: Vec<String> = node.inputs.iter().map(|v| show_value(function, *v)).collect();
        let mut out = String::from(node.op.name());
        if !operands.is_empty() {
            out.push(' ');
            out.push_str(&operands.join(", "));
        }
        out + &self.show_attributes(&node.op)
    }

    fn show_result_types(&self, function: &Function, node: &Node) -> String {
        let types = node
            .results()
            .map(|v| function.types.get(v.index()).map_or_else(|| "?".into(), |t| self.show_type(t)));
        types.collect::<Vec<_>>().join(", ")
    }

    /// As [`Module::show`], names quoted where the parser needs it.
    fn show_type(&self, ty: &Type) -> String {
        format!("{}{}", ty.dtype.name(), self.show_dims(&ty.dims))
    }

    fn show_dims(&self, dims: &[Dim]) -> String {
        let names: Vec<String> = dims.iter().map(|&d| name(self.name(d))).collect();
        format!("[{}]", names.join(", "))
    }

    /// Everything about an operation but its name: each attribute after a space.
    fn show_attributes(&self, op: &Op) -> String {
        let mut printer = Printer { module: self, out: String::new() };
        // Printing refuses nothing.
        let _ = op.clone().attributes(&mut printer);
        printer.out
    }
}

// --- attributes ----------------------------------------------------------------------------------

/// A visitor of an operation's attributes in the order of the text form: printing reads them,
/// parsing sets them.
pub(crate) trait Attributes {
    /// A word that is always there.
    fn word(&mut self, word: &'static str) -> Parsed<()>;
    /// A dimension.
    fn dim(&mut self, dim: &mut Dim) -> Parsed<()>;
    /// A list of dimensions in brackets.
    fn dims(&mut self, dims: &mut Dims) -> Parsed<()>;
    /// A type.
    fn dtype(&mut self, dtype: &mut DType) -> Parsed<()>;
    /// A number, to the bit.
    fn float(&mut self, x: &mut f64) -> Parsed<()>;
    /// A whole number.
    fn integer(&mut self, n: &mut u64) -> Parsed<()>;
    /// A word that is there where the flag is set.
    fn flag(&mut self, word: &'static str, flag: &mut bool) -> Parsed<()>;
    /// One of several words, by its number.
    fn choice(&mut self, words: &[&'static str], chosen: &mut usize) -> Parsed<()>;
    /// A function in braces, whose name is left out. It holds no other.
    fn function(&mut self, function: &mut Function) -> Parsed<()>;
    /// A text in a notation of its own, quoted.
    fn text(&mut self, text: &mut String) -> Parsed<()>;
    /// Attributes that do not fit together, for this reason.
    fn refuse(&mut self, problem: String) -> Parsed<()>;
}

struct Printer<'m> {
    module: &'m Module,
    out: String,
}

impl Printer<'_> {
    fn push(&mut self, text: &str) -> Parsed<()> {
        self.out.push(' ');
        self.out.push_str(text);
        Ok(())
    }
}

impl Attributes for Printer<'_> {
    fn word(&mut self, word: &'static str) -> Parsed<()> {
        self.push(word)
    }

    fn dim(&mut self, dim: &mut Dim) -> Parsed<()> {
        self.push(&name(self.module.name(*dim)))
    }

    fn dims(&mut self, dims: &mut Dims) -> Parsed<()> {
        self.push(&self.module.show_dims(dims))
    }

    fn dtype(&mut self, dtype: &mut DType) -> Parsed<()> {
        self.push(dtype.name())
    }

    fn float(&mut self, x: &mut f64) -> Parsed<()> {
        self.push(&float(*x))
    }

    fn integer(&mut self, n: &mut u64) -> Parsed<()> {
        self.push(&n.to_string())
    }

    fn flag(&mut self, word: &'static str, flag: &mut bool) -> Parsed<()> {
        if *flag { self.push(word) } else { Ok(()) }
    }

    fn choice(&mut self, words: &[&'static str], chosen: &mut usize) -> Parsed<()> {
        self.push(words[*chosen])
    }

    fn function(&mut self, function: &mut Function) -> Parsed<()> {
        let body = self.module.show_body(function);
        let lines: Vec<String> =
            body.lines().map(|l| if l.is_empty() { String::new() } else { format!("  {l}") }).collect();
        self.push(&format!("{{\n{}\n  }}", lines.join("\n")))
    }

    fn text(&mut self, text: &mut String) -> Parsed<()> {
        self.push(&name(text))
    }

    fn refuse(&mut self, _: String) -> Parsed<()> {
        // A function that is printed was built.
        Ok(())
    }
}

struct Reader<'r, 'a> {
    module: &'r Module,
    parser: &'r mut Parser<'a>,
}

impl Attributes for Reader<'_, '_> {
    fn word(&mut self, word: &'static str) -> Parsed<()> {
        self.parser.word(word)
    }

    fn dim(&mut self, dim: &mut Dim) -> Parsed<()> {
        *dim = self.parser.dim(self.module)?;
        Ok(())
    }

    fn dims(&mut self, dims: &mut Dims) -> Parsed<()> {
        *dims = self.parser.dim_list(self.module)?;
        Ok(())
    }

    fn dtype(&mut self, dtype: &mut DType) -> Parsed<()> {
        *dtype = self.parser.dtype()?;
        Ok(())
    }

    fn float(&mut self, x: &mut f64) -> Parsed<()> {
        *x = self.parser.float()?;
        Ok(())
    }

    fn integer(&mut self, n: &mut u64) -> Parsed<()> {
        *n = self.parser.integer()?;
        Ok(())
    }

    fn flag(&mut self, word: &'static str, flag: &mut bool) -> Parsed<()> {
        *flag = self.parser.accept(word)?;
        Ok(())
    }

    fn choice(&mut self, words: &[&'static str], chosen: &mut usize) -> Parsed<()> {
        for (i, word) in words.iter().enumerate() {
            if self.parser.accept(word)? {
                *chosen = i;
                return Ok(());
            }
        }
        let words: Vec<String> = words.iter().map(|w| format!("`{w}`")).collect();
        self.parser.expected(&words.join(" or "))
    }

    fn function(&mut self, function: &mut Function) -> Parsed<()> {
        if std::mem::replace(&mut self.parser.within, true) {
            return self.parser.expected("no function within another's operation");
        }
        let name = std::mem::take(&mut function.name);
        *function = self.parser.body(self.module, name)?;
        self.parser.within = false;
        Ok(())
    }

    fn text(&mut self, text: &mut String) -> Parsed<()> {
        *text = self.parser.name("a text in quotes")?;
        Ok(())
    }

    fn refuse(&mut self, problem: String) -> Parsed<()> {
        Err(self.parser.error_at(self.parser.start, problem, "correct the attributes before this place"))
    }
}

/// A visitor of dimensions alone; it prints nothing, since each function is verified after each
/// pass.
struct EachDim<'v>(&'v mut dyn FnMut(&mut Dim));

impl Attributes for EachDim<'_> {
    fn word(&mut self, _: &'static str) -> Parsed<()> {
        Ok(())
    }

    fn dim(&mut self, dim: &mut Dim) -> Parsed<()> {
        (self.0)(dim);
        Ok(())
    }

    fn dims(&mut self, dims: &mut Dims) -> Parsed<()> {
        dims.iter_mut().for_each(&mut *self.0);
        Ok(())
    }

    fn dtype(&mut self, _: &mut DType) -> Parsed<()> {
        Ok(())
    }

    fn float(&mut self, _: &mut f64) -> Parsed<()> {
        Ok(())
    }

    fn integer(&mut self, _: &mut u64) -> Parsed<()> {
        Ok(())
    }

    fn flag(&mut self, _: &'static str, _: &mut bool) -> Parsed<()> {
        Ok(())
    }

    fn choice(&mut self, _: &[&'static str], _: &mut usize) -> Parsed<()> {
        Ok(())
    }

    fn function(&mut self, function: &mut Function) -> Parsed<()> {
        each_dim_of(function, self.0);
        Ok(())
    }

    fn text(&mut self, _: &mut String) -> Parsed<()> {
        Ok(())
    }

    fn refuse(&mut self, _: String) -> Parsed<()> {
        Ok(())
    }
}

/// The dimensions among an operation's attributes.
pub(crate) fn named_dims(op: &Op) -> Dims {
    let mut named = vec![];
    each_dim(&mut op.clone(), &mut |d| named.push(*d));
    named.into()
}

fn each_dim(op: &mut Op, visit: &mut dyn FnMut(&mut Dim)) {
    // Nothing is refused.
    let _ = op.attributes(&mut EachDim(visit));
}

/// Visits the dimensions of a function's types and operations.
pub(super) fn each_dim_of(function: &mut Function, visit: &mut dyn FnMut(&mut Dim)) {
    function.types.iter_mut().flat_map(|ty| &mut ty.dims).for_each(&mut *visit);
    function.nodes.iter_mut().for_each(|node| each_dim(&mut node.op, visit));
}

/// The words of a result's binding, then a blank; empty for a value of the caller, and for the new
/// value of a state parameter.
fn show_result_binding(function: &Function, port: &Port) -> String {
    let state = port.binding.is_state() && function.params.contains(port);
    if state || port.binding == Binding::Value { String::new() } else { format!("{} ", port.binding.words()) }
}

fn show_results(function: &Function, node: &Node) -> String {
    node.results().map(|v| show_value(function, v)).collect::<Vec<_>>().join(", ")
}

/// A value as the text form names it; `%?n` where there is none of that index.
pub(super) fn show_value(function: &Function, value: Value) -> String {
    let params = function.params.len();
    match function.params.get(value.index()) {
        Some(param) => format!("%{}", name(&param.name)),
        None if value.index() < function.types.len() => format!("%{}", value.index() - params),
        None => format!("%?{}", value.0),
    }
}

fn width<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(|t| t.chars().count()).max().unwrap_or(0)
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && text.chars().all(is_word_char)
}

fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// A name, quoted where it is not a word.
fn name(text: &str) -> String {
    if is_word(text) {
        return text.into();
    }
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => {
                let _ = write!(out, "\\u{{{:x}}}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The shortest text that parses back to the same bits.
fn float(x: f64) -> String {
    if x.is_nan() {
        return format!("{:#018x}", x.to_bits());
    }
    let text = format!("{x:?}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

// --- parsing -------------------------------------------------------------------------------------

/// Text that is not a module.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{line}:{column}: {problem}; {help}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The fault.
    pub problem: String,
    /// The right form.
    pub help: String,
}

/// Reads a module from its printed form.
pub fn parse(text: &str) -> Result<Module, ParseError> {
    if text.len() > LONGEST {
        return Err(ParseError {
            line: 1,
            column: 1,
            problem: format!("the text has {} bytes", text.len()),
            help: format!("at most {LONGEST} are read"),
        });
    }
    let mut parser = Parser::new(text)?;
    let mut module = Module::default();
    parser.dims(&mut module)?;
    while parser.token != Token::End {
        let start = parser.start;
        let function = parser.function(&module)?;
        let name = function.name.clone();
        if module.functions.insert(name.clone(), function).is_some() {
            return Err(parser.error_at(
                start,
                format!("function `@{name}` is defined twice"),
                "give each function a name of its own",
            ));
        }
    }
    Ok(module)
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A bare word: a keyword or a name.
    Word(String),
    /// A quoted name, which is never a keyword.
    Quoted(String),
    /// `%0`
    Numbered(u32),
    /// `%name`
    Named(String),
    /// `@name`
    Function(String),
    /// Digits, sign, point, exponent; read when its kind is known.
    Number(String),
    /// One of `{ } [ ] : , =`.
    Punctuation(char),
    End,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(w) => write!(f, "`{w}`"),
            Token::Quoted(w) => write!(f, "`{}`", name(w)),
            Token::Numbered(n) => write!(f, "`%{n}`"),
            Token::Named(n) => write!(f, "`%{}`", name(n)),
            Token::Function(n) => write!(f, "`@{}`", name(n)),
            Token::Number(n) => write!(f, "`{n}`"),
            Token::Punctuation(c) => write!(f, "`{c}`"),
            Token::End => f.write_str("the end of the text"),
        }
    }
}

/// One token of look-ahead over the text. A function may stand within an operation of another, and
/// no deeper, so nothing recurses further.
struct Parser<'a> {
    text: &'a str,
    /// Byte after the current token.
    position: usize,
    /// The current token, and its first byte.
    token: Token,
    start: usize,
    /// Whether the function under way stands within an operation.
    within: bool,
}

pub(crate) type Parsed<T> = Result<T, ParseError>;

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Parsed<Self> {
        let mut parser = Parser { text, position: 0, token: Token::End, start: 0, within: false };
        parser.advance()?;
        Ok(parser)
    }

    // --- tokens ---

    /// Steps to the next token and returns the current one.
    fn advance(&mut self) -> Parsed<Token> {
        self.skip_blanks();
        self.start = self.position;
        let token = match self.peek() {
            None => Token::End,
            Some(c @ ('{' | '}' | '[' | ']' | ':' | ',' | '=')) => {
                self.position += 1;
                Token::Punctuation(c)
            }
            Some('"') => Token::Quoted(self.quoted()?),
            Some('%') => {
                self.position += 1;
                self.value_name()?
            }
            Some('@') => {
                self.position += 1;
                Token::Function(self.bare_or_quoted("a function's name follows `@`")?)
            }
            Some(c) if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => {
                Token::Number(self.take(|c| is_word_char(c) || c == '+').into())
            }
            Some(c) if is_word_char(c) => Token::Word(self.take(is_word_char).into()),
            Some(c) => {
                return Err(self.error_at(
                    self.start,
                    format!("unexpected character `{}`", c.escape_debug()),
                    "names of other characters are quoted",
                ));
            }
        };
        Ok(std::mem::replace(&mut self.token, token))
    }

    fn peek(&self) -> Option<char> {
        self.text[self.position..].chars().next()
    }

    fn skip_blanks(&mut self) {
        loop {
            self.take(char::is_whitespace);
            if self.peek() != Some(';') {
                return;
            }
            self.take(|c| c != '\n');
        }
    }

    fn take(&mut self, accept: impl Fn(char) -> bool) -> &'a str {
        let rest = &self.text[self.position..];
        let end = rest.find(|c| !accept(c)).unwrap_or(rest.len());
        self.position += end;
        &rest[..end]
    }

    /// The name after `%`: digits alone number a node's result, anything else names a parameter.
    fn value_name(&mut self) -> Parsed<Token> {
        if self.peek().is_some_and(|c| c.is_ascii_digit()) {
            let digits = self.take(is_word_char);
            let canonical = digits == "0" || !digits.starts_with('0');
            return match digits.parse() {
                Ok(n) if canonical => Ok(Token::Numbered(n)),
                _ => Err(self.error_at(
                    self.start,
                    format!("`%{digits}` is neither a number nor a name"),
                    "quote a parameter's name that starts with a digit",
                )),
            };
        }
        Ok(Token::Named(self.bare_or_quoted("a parameter's name or a number follows `%`")?))
    }

    fn bare_or_quoted(&mut self, help: &str) -> Parsed<String> {
        match self.peek() {
            Some('"') => self.quoted(),
            Some(c) if c.is_ascii_alphabetic() || c == '_' => Ok(self.take(is_word_char).into()),
            _ => Err(self.error_at(self.start, "a name is missing", help)),
        }
    }

    fn quoted(&mut self) -> Parsed<String> {
        let open = self.position;
        let unclosed = "a quoted name ends with `\"` on its line";
        self.position += 1;
        let mut out = String::new();
        loop {
            let at = self.position;
            let c = self.next_char().ok_or_else(|| self.error_at(open, "unclosed name", unclosed))?;
            match c {
                '"' => return Ok(out),
                '\n' => return Err(self.error_at(open, "unclosed name", unclosed)),
                '\\' => match self.next_char() {
                    Some('n') => out.push('\n'),
                    Some(c @ ('"' | '\\')) => out.push(c),
                    Some('u') if self.peek() == Some('{') => {
                        self.position += 1;
                        let digits = self.take(|c| c.is_ascii_hexdigit());
                        let c = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32);
                        match (c, self.next_char()) {
                            (Some(c), Some('}')) => out.push(c),
                            _ => {
                                return Err(self.error_at(
                                    at,
                                    "not a character",
                                    "write `\\u{` hexadecimal digits `}`",
                                ));
                            }
                        }
                    }
                    _ => {
                        return Err(self.error_at(
                            at,
                            "unknown escape",
                            "`\\\"`, `\\\\`, `\\n` and `\\u{…}` are known",
                        ));
                    }
                },
                c => out.push(c),
            }
        }
    }

    fn next_char(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.position += c.len_utf8();
        Some(c)
    }

    // --- errors ---

    fn error_at(&self, byte: usize, problem: impl Into<String>, help: impl Into<String>) -> ParseError {
        let before = &self.text[..byte];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ParseError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            problem: problem.into(),
            help: help.into(),
        }
    }

    fn expected<T>(&self, what: &str) -> Parsed<T> {
        Err(self.error_at(self.start, format!("unexpected {}", self.token), format!("expected {what}")))
    }

    // --- pieces ---

    fn punctuation(&mut self, c: char) -> Parsed<()> {
        if self.token != Token::Punctuation(c) {
            return self.expected(&format!("`{c}`"));
        }
        self.advance().map(drop)
    }

    /// Steps over the word if it is next.
    fn accept(&mut self, word: &str) -> Parsed<bool> {
        let found = matches!(&self.token, Token::Word(w) if w == word);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn word(&mut self, word: &str) -> Parsed<()> {
        if self.accept(word)? { Ok(()) } else { self.expected(&format!("`{word}`")) }
    }

    fn name(&mut self, what: &str) -> Parsed<String> {
        match &self.token {
            Token::Word(w) | Token::Quoted(w) => {
                let w = w.clone();
                self.advance()?;
                Ok(w)
            }
            _ => self.expected(what),
        }
    }

    fn integer(&mut self) -> Parsed<u64> {
        let what = "a whole number";
        let Token::Number(digits) = &self.token else { return self.expected(what) };
        let Ok(n) = digits.parse() else { return self.expected(what) };
        self.advance()?;
        Ok(n)
    }

    fn float(&mut self) -> Parsed<f64> {
        let (Token::Number(text) | Token::Word(text)) = &self.token else { return self.expected("a number") };
        let parsed = match text.strip_prefix("0x") {
            Some(bits) => u64::from_str_radix(bits, 16).ok().map(f64::from_bits),
            None => text.parse().ok(),
        };
        let Some(x) = parsed else { return self.expected("a number") };
        self.advance()?;
        Ok(x)
    }

    fn dim(&mut self, module: &Module) -> Parsed<Dim> {
        let start = self.start;
        let name = self.name("a dimension")?;
        match module.dims.get_index_of(&name) {
            Some(i) => Ok(Dim(i as u32)),
            None => {
                let known: Vec<&str> = module.dims.keys().take(12).map(String::as_str).collect();
                let more = if module.dims.len() > known.len() { ", …" } else { "" };
                Err(self.error_at(
                    start,
                    format!("unknown dimension `{name}`"),
                    format!("the table has: {}{more}", known.join(", ")),
                ))
            }
        }
    }

    /// `[a, b]`
    fn dim_list(&mut self, module: &Module) -> Parsed<Dims> {
        self.punctuation('[')?;
        let mut dims = vec![];
        while self.token != Token::Punctuation(']') {
            if !dims.is_empty() {
                self.punctuation(',')?;
            }
            dims.push(self.dim(module)?);
        }
        self.punctuation(']')?;
        Ok(dims.into())
    }

    fn dtype(&mut self) -> Parsed<DType> {
        for dtype in DType::ALL {
            if self.accept(dtype.name())? {
                return Ok(dtype);
            }
        }
        self.expected("`f32`, `bf16` or `i32`")
    }

    fn ty(&mut self, module: &Module) -> Parsed<Type> {
        Ok(Type { dtype: self.dtype()?, dims: self.dim_list(module)? })
    }

    // --- statements ---

    fn dims(&mut self, module: &mut Module) -> Parsed<()> {
        self.word("dims")?;
        self.punctuation('{')?;
        while self.token != Token::Punctuation('}') {
            let start = self.start;
            let name = self.name("a dimension's name or `}`")?;
            let size = self.integer()?;
            if Arc::make_mut(&mut module.dims).insert(name.clone(), size).is_some() {
                return Err(self.error_at(
                    start,
                    format!("dimension `{name}` is given twice"),
                    "give each dimension one size",
                ));
            }
        }
        self.punctuation('}')
    }

    fn function(&mut self, module: &Module) -> Parsed<Function> {
        self.word("func")?;
        let Token::Function(name) = self.token.clone() else {
            return self.expected("the function's `@name`");
        };
        self.advance()?;
        self.body(module, name)
    }

    /// A function in braces.
    fn body(&mut self, module: &Module, name: String) -> Parsed<Function> {
        self.punctuation('{')?;
        let mut function = Function::new(name);
        let mut names = HashMap::new();
        while let Some(binding) = self.binding()? {
            self.param(module, &mut function, &mut names, binding)?;
        }
        while matches!(self.token, Token::Numbered(_) | Token::Named(_)) {
            self.node(module, &mut function, &names)?;
        }
        if !self.accept("return")? {
            let words: Vec<String> = Binding::WORDS.iter().map(|w| format!("`{w}`")).collect();
            let param =
                if function.nodes.is_empty() { format!("{}, ", words.join(", ")) } else { String::new() };
            return self.expected(&format!("{param}`%{}` or `return`", function.types.len() - names.len()));
        }
        let mut results = HashSet::new();
        while self.token != Token::Punctuation('}') {
            if !function.results.is_empty() {
                self.punctuation(',')?;
            }
            let start = self.start;
            let first = self.name("a result's name or `}`")?;
            // A word with nothing after it is the name.
            let (name, binding) = if self.token == Token::Punctuation('=') {
                let state = names.get(&first).map(|v| function.params[v.index()].binding);
                (first, state.filter(|b| b.is_state()).unwrap_or(Binding::Value))
            } else {
                let Some(binding) = self.binding_after(&first)? else { return self.expected("`=`") };
                (self.name("the result's name")?, binding)
            };
            self.punctuation('=')?;
            let value = self.value(&function, &names)?;
            if !results.insert(name.clone()) {
                return Err(self.error_at(
                    start,
                    format!("result `{name}` is given twice"),
                    "give each result a name of its own",
                ));
            }
            function.results.push((Port::new(name, binding), value));
        }
        self.punctuation('}')?;
        Ok(function)
    }

    /// The binding of a parameter, if one is next.
    fn binding(&mut self) -> Parsed<Option<Binding>> {
        for word in Binding::WORDS {
            if self.accept(word)? {
                return self.binding_after(word);
            }
        }
        Ok(None)
    }

    /// An integer; the largest where it is larger.
    fn small(&mut self) -> Parsed<u32> {
        Ok(u32::try_from(self.integer()?).unwrap_or(u32::MAX))
    }

    /// The binding that begins with the word before; [`Binding::words`] wrote it.
    fn binding_after(&mut self, word: &str) -> Parsed<Option<Binding>> {
        Ok(Some(match word {
            "input" => Binding::Value,
            "stream" => Binding::Stream,
            "batch" => match self.one_of(&Input::ALL, Input::name)? {
                Some(input) => Binding::Batch(input),
                None => return self.expected("what the host gives: `ids`, `targets`, `loss_scale`, …"),
            },
            "weight" => Binding::Weight,
            "pass" => Binding::PassWeight,
            "turn" => Binding::TurnWeight,
            "buffer" => Binding::Buffer,
            "prepared" => Binding::Prepared,
            "state" => {
                Binding::State(self.one_of(&Lifetime::ALL, Lifetime::name)?.unwrap_or(Lifetime::Depth))
            }
            "saved" => Binding::Saved,
            "index" => Binding::Index(if self.accept("depth")? {
                Index::Depth
            } else if self.accept("depths")? {
                Index::Depths
            } else if self.accept("pass")? {
                Index::Pass
            } else if self.accept("row")? {
                Index::Row(self.small()?)
            } else if self.accept("latest")? {
                Index::Latest(self.small()?)
            } else if self.accept("next")? {
                let cache = self.small()?;
                Index::Next { cache, by: if self.accept("by")? { self.small()? } else { 1 } }
            } else if self.accept("first")? {
                Index::First
            } else if self.accept("first_pass")? {
                Index::FirstPass { cache: self.small()?, by: self.small()? }
            } else if self.accept("run")? {
                Index::Run { cache: self.small()?, offset: self.small()?, block: self.small()? }
            } else if self.accept("continues")? {
                Index::Continues { cache: self.small()?, offset: self.small()?, block: self.small()? }
            } else {
                Index::Given
            }),
            "output" => match self.one_of(&Output::ALL, Output::name)? {
                Some(output) => Binding::Output(output),
                None => return self.expected("what the host reads: `loss`, `aux`, `nll`, …"),
            },
            "observed" => Binding::Observed,
            "patched" => Binding::Patched,
            "cotangent" => {
                for of in ["stream", "weight", "state", "output"] {
                    if self.accept(of)? {
                        let of = self.binding_after(of)?;
                        return Ok(of.map(|of| Binding::Cotangent(of.of())));
                    }
                }
                Binding::Cotangent(Of::Value)
            }
            _ => return Ok(None),
        }))
    }

    /// The one of that name, if it is next.
    fn one_of<T: Copy>(&mut self, all: &[T], name: fn(T) -> &'static str) -> Parsed<Option<T>> {
        for &one in all {
            if self.accept(name(one))? {
                return Ok(Some(one));
            }
        }
        Ok(None)
    }

    fn param(
        &mut self,
        module: &Module,
        function: &mut Function,
        names: &mut HashMap<String, Value>,
        binding: Binding,
    ) -> Parsed<()> {
        let start = self.start;
        let Token::Named(name) = self.token.clone() else { return self.expected("the parameter's `%name`") };
        self.advance()?;
        self.punctuation(':')?;
        let ty = self.ty(module)?;
        let value = Value(function.types.len() as u32);
        if names.insert(name.clone(), value).is_some() {
            return Err(self.error_at(
                start,
                format!("parameter `%{name}` is given twice"),
                "give each parameter a name of its own",
            ));
        }
        function.params.push(Port::new(name, binding));
        function.types.push(ty);
        Ok(())
    }

    /// A value defined so far.
    fn value(&mut self, function: &Function, names: &HashMap<String, Value>) -> Parsed<Value> {
        let params = function.params.len();
        let found = match &self.token {
            Token::Named(name) => names.get(name).copied(),
            Token::Numbered(n) => {
                Some(params + *n as usize).filter(|&i| i < function.types.len()).map(|i| Value(i as u32))
            }
            _ => return self.expected("a value"),
        };
        let Some(value) = found else {
            return Err(self.error_at(
                self.start,
                format!("{} is not defined here", self.token),
                "an operand is a parameter or the result of an earlier node",
            ));
        };
        self.advance()?;
        Ok(value)
    }

    /// `%0, %1 = operation operands attributes : types`
    fn node(
        &mut self,
        module: &Module,
        function: &mut Function,
        names: &HashMap<String, Value>,
    ) -> Parsed<()> {
        let first = function.types.len();
        let mut count = 0;
        loop {
            let next = (first - function.params.len() + count) as u32;
            if self.token != Token::Numbered(next) {
                let hint = match (&self.token, function.nodes.is_empty()) {
                    (Token::Named(_), true) => {
                        "; a parameter has its binding (`input`, `weight`, …) before its name"
                    }
                    _ => ": results are numbered in order",
                };
                return self.expected(&format!("`%{next}`{hint}"));
            }
            self.advance()?;
            count += 1;
            if self.token != Token::Punctuation(',') {
                break;
            }
            self.advance()?;
        }
        self.punctuation('=')?;
        let op_start = self.start;
        let op_name = self.name("an operation")?;
        let mut inputs = vec![];
        while matches!(self.token, Token::Numbered(_) | Token::Named(_)) {
            inputs.push(self.value(function, names)?);
            if self.token != Token::Punctuation(',') {
                break;
            }
            self.advance()?;
        }
        let op = self.op(module, &op_name, op_start)?;
        self.punctuation(':')?;
        let mut types = vec![self.ty(module)?];
        while self.token == Token::Punctuation(',') {
            self.advance()?;
            types.push(self.ty(module)?);
        }
        if types.len() != count {
            return Err(self.error_at(
                op_start,
                format!("`{op_name}` has {count} results but {} types", types.len()),
                "give each result its type, with commas between",
            ));
        }
        function.push(op, inputs, types);
        Ok(())
    }

    /// The operation of that name with its attributes.
    fn op(&mut self, module: &Module, name: &str, start: usize) -> Parsed<Op> {
        let Some(mut op) = Op::blanks().into_iter().find(|op| op.name() == name) else {
            return Err(self.error_at(
                start,
                format!("unknown operation `{name}`"),
                "operations are listed in compiler/src/op/mod.rs",
            ));
        };
        op.attributes(&mut Reader { module, parser: self })?;
        Ok(op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::random::{Rng, table};
    use crate::ir::{Tensor, interpret, verify};
    use crate::op::Concat;

    #[test]
    fn floats_print_to_the_bit() {
        let mut rng = Rng::new(1);
        let mut all =
            vec![0.0, -0.0, 0.1, 1.0 / 3.0, 1e-6, 1e16, 10000.0, f64::MAX, f64::MIN_POSITIVE, 5e-324];
        all.extend([f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -f64::NAN]);
        all.extend((0..5000).map(|_| f64::from_bits(rng.bits())));
        for x in all {
            let text = float(x);
            let parsed = Parser::new(&text).unwrap().float().unwrap();
            assert_eq!(parsed.to_bits(), x.to_bits(), "{x:?} as {text}");
        }
        assert_eq!([10000.0, 0.25, 1e-6, -2.0].map(float), ["10000", "0.25", "1e-6", "-2"]);
    }

    #[test]
    fn names_of_any_characters_are_kept() {
        let names = [
            "x",
            "",
            "0",
            "3x",
            "to",
            "over",
            "a b",
            "a\"b",
            "\\",
            "line\nbreak",
            "\u{7}é",
            ";",
            "é",
            "-",
            "f32",
        ];
        let mut module = Module::default();
        for (i, n) in names.into_iter().enumerate() {
            let d = module.dim(n, i as u64 + 1);
            let mut f = Function::new(n);
            for n in names {
                f.param(n, Binding::Value, Type::f32(&[d]));
            }
            f.add(&module, Op::Concat(Concat(d)), &[Value(0)]).unwrap();
            f.results = names.iter().map(|n| ((*n).into(), Value(1))).collect();
            module.functions.insert(n.into(), f);
        }
        verify(&module).unwrap();
        let text = module.to_string();
        assert_eq!(parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}")), module);
    }

    #[test]
    fn a_long_table_of_dimensions_is_broken() {
        let mut module = Module::default();
        for i in 0..40 {
            module.dim(format!("dimension{i}"), i + 1);
        }
        let text = module.to_string();
        assert!(text.lines().all(|l| l.len() <= WIDTH), "{text}");
        assert_eq!(parse(&text).unwrap(), module);
    }

    /// Damage of many kinds to every kind of node: an error, or a module that prints, verifies and
    /// runs as any other.
    #[test]
    fn no_text_panics() {
        let mut rng = Rng::new(2);
        let texts: Vec<String> = table().iter().map(|e| e.instance(5).module.to_string()).collect();
        let (mut parsed, mut valid) = (0, 0);
        for round in 0..60_000 {
            let mut bytes = texts[round % texts.len()].clone().into_bytes();
            for _ in 0..1 + rng.below(3) {
                damage(&mut rng, &mut bytes, &texts);
            }
            let text = String::from_utf8_lossy(&bytes);
            let module = match parse(&text) {
                Ok(module) => module,
                Err(e) => {
                    let lines = text.matches('\n').count() + 1;
                    assert!((1..=lines).contains(&e.line) && e.column >= 1, "{e}\n{text}");
                    continue;
                }
            };
            parsed += 1;
            let printed = module.to_string();
            assert_eq!(parse(&printed).map(|m| m.to_string()), Ok(printed));
            if verify(&module).is_err() {
                continue;
            }
            valid += 1;
            for f in module.functions.values() {
                if f.types.iter().all(|t| module.elements(&t.dims) < 5000) {
                    let args: Vec<Tensor> =
                        f.types[..f.params.len()].iter().map(|t| Tensor::zeros(&module, t)).collect();
                    let _ = interpret(&module, f, &args);
                }
            }
        }
        assert!(parsed > 1000 && valid > 500, "damage leaves some whole: {parsed} parsed, {valid} valid");
    }

    fn damage(rng: &mut Rng, bytes: &mut Vec<u8>, texts: &[String]) {
        let at = rng.below(bytes.len() as u64) as usize;
        let end = (at + 1 + rng.below(6) as usize).min(bytes.len());
        match rng.below(5) {
            0 if !bytes.is_empty() => bytes[at] = rng.below(256) as u8,
            1 => drop(bytes.drain(at..end)),
            2 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
            3 if !bytes.is_empty() => bytes[at] = b"{}[]:,=%@;\"0 9-\n"[rng.below(16) as usize],
            _ => {
                let other = texts[rng.below(texts.len() as u64) as usize].as_bytes();
                let from = rng.below(other.len() as u64) as usize;
                let piece = other[from..(from + 20).min(other.len())].to_vec();
                drop(bytes.splice(at..end, piece));
            }
        }
    }
}
