//! The YAML spelling.
//!
//! An event parser reads the text, with the position of every token; `serde_yaml` says of each
//! scalar without quotes what it is: a number, a truth value, nothing, or a text. Aliases are
//! written out, within bounds.

use std::fmt;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde::de::{Deserialize, Deserializer, Visitor};

use crate::ast::*;
use crate::comments;
use crate::diagnostic::Diagnostic;
use crate::grammar::{Lowering, broken, text_kind, too_long};
use crate::keys::{self, Type};
use crate::source::{SourceMap, Span};

/// The deepest nesting of collections.
const MAX_NESTING: usize = 48;
/// Nodes of a file, aliases written out.
const MAX_NODES: usize = 100_000;

/// Reads the sections of a file. Errors go to `found`; the kind of the file is seen from its keys.
pub(crate) fn read(source: &SourceMap, found: &mut Vec<Diagnostic>) -> Option<(FileKind, Map)> {
    let offsets = Offsets::new(&source.text);
    let tokens = match tokens(&source.text, &offsets) {
        Ok(tokens) => tokens,
        Err(error) => {
            found.push(error);
            return None;
        }
    };
    let whole = Span::new(0, source.text.len());
    let (kind, pairs) = match &tokens.kind {
        TokenKind::Map { pairs, .. } => (kind_of(pairs), true),
        TokenKind::Scalar { text, .. } if text.is_empty() => (FileKind::Spec, false),
        _ => {
            let error = Diagnostic::error("wrong-type", "a specification is a group of keys");
            found.push(error.on(tokens.span).help("start with `model:`"));
            return None;
        }
    };
    if !pairs {
        let mut map = Map { span: whole, ..Map::default() };
        comments::attach(&mut map, &source.text, Spelling::Yaml, comments::in_yaml(&source.text, Vec::new()));
        return Some((kind, map));
    }
    let root: &'static keys::Section = if kind == FileKind::Suite { &keys::SUITE } else { &keys::SPEC };
    let mut reader = Reader { source, found };
    let value = reader.value(&tokens, Some(Type::Section(root)));
    match value.kind {
        ValueKind::Map(mut map) => {
            let mut scalars = Vec::new();
            tokens.scalars(&mut scalars);
            let comments = comments::in_yaml(&source.text, scalars);
            comments::attach(&mut map, &source.text, Spelling::Yaml, comments);
            Some((kind, map))
        }
        _ => None,
    }
}

/// Reads one value, as the right side of `--set` is; `at` is where it begins in the address space
/// of the source.
pub(crate) fn read_value(
    source: &SourceMap,
    text: &str,
    at: usize,
    kind: Option<Type>,
    found: &mut Vec<Diagnostic>,
) -> Value {
    let whole = Span::new(at, at + text.len());
    let shift = |span: Span| Span::new(span.start + at, span.end + at);
    let offsets = Offsets::new(text);
    match tokens(text, &offsets) {
        Err(error) => {
            found.push(Diagnostic::error("yaml", error.message).on(whole));
            Value::new(ValueKind::Invalid, whole)
        }
        Ok(mut tokens) => {
            tokens.each_span(&mut |span| *span = shift(*span));
            Reader { source, found }.value(&tokens, kind)
        }
    }
}

fn kind_of(pairs: &[(Token, Token)]) -> FileKind {
    let has = |name: &str| {
        pairs.iter().any(|(key, _)| matches!(&key.kind, TokenKind::Scalar { text, .. } if text == name))
    };
    if !has("model") && (has("variants") || has("baseline")) { FileKind::Suite } else { FileKind::Spec }
}

// Positions ---------------------------------------------------------------------------------------

/// Turns the event parser's offsets, in characters, into bytes.
struct Offsets {
    bytes: Option<Vec<usize>>,
    length: usize,
}

impl Offsets {
    fn new(text: &str) -> Offsets {
        let bytes = (!text.is_ascii()).then(|| text.char_indices().map(|(index, _)| index).collect());
        Offsets { bytes, length: text.len() }
    }

    fn byte(&self, character: usize) -> usize {
        match &self.bytes {
            None => character.min(self.length),
            Some(bytes) => bytes.get(character).copied().unwrap_or(self.length),
        }
    }
}

/// A node of the text with its positions.
#[derive(Clone, Debug)]
struct Token {
    kind: TokenKind,
    span: Span,
}

#[derive(Clone, Debug)]
enum TokenKind {
    Scalar { text: String, plain: bool, quoted: bool },
    Seq { elements: Vec<Token>, flow: bool },
    Map { pairs: Vec<(Token, Token)>, flow: bool },
}

impl Token {
    fn scalars(&self, spans: &mut Vec<Span>) {
        match &self.kind {
            TokenKind::Scalar { .. } => spans.push(self.span),
            TokenKind::Seq { elements, .. } => elements.iter().for_each(|token| token.scalars(spans)),
            TokenKind::Map { pairs, .. } => pairs.iter().for_each(|(key, value)| {
                key.scalars(spans);
                value.scalars(spans);
            }),
        }
    }

    fn each_span(&mut self, change: &mut dyn FnMut(&mut Span)) {
        change(&mut self.span);
        match &mut self.kind {
            TokenKind::Scalar { .. } => {}
            TokenKind::Seq { elements, .. } => elements.iter_mut().for_each(|token| token.each_span(change)),
            TokenKind::Map { pairs, .. } => pairs.iter_mut().for_each(|(key, value)| {
                key.each_span(change);
                value.each_span(change);
            }),
        }
    }
}

struct Walk<'t> {
    parser: Parser<'t, saphyr_parser::StrInput<'t>>,
    text: &'t str,
    offsets: &'t Offsets,
    anchors: Vec<(usize, Token, usize)>,
    nodes: usize,
}

fn tokens(text: &str, offsets: &Offsets) -> Result<Token, Diagnostic> {
    let mut walk = Walk { parser: Parser::new_from_str(text), text, offsets, anchors: Vec::new(), nodes: 0 };
    let mut root = None;
    loop {
        let (event, span) = walk.next()?;
        match event {
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            Event::StreamEnd => break,
            _ if root.is_some() => {
                let error = Diagnostic::error("yaml", "a second document begins here").on(span);
                return Err(error.help("a file holds one specification: take `---` away"));
            }
            event => root = Some(walk.node(event, span, 0)?),
        }
    }
    let empty = TokenKind::Scalar { text: String::new(), plain: true, quoted: false };
    Ok(root.unwrap_or(Token { kind: empty, span: Span::new(0, text.len()) }))
}

impl<'t> Walk<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), Diagnostic> {
        match self.parser.next_event() {
            None => Ok((Event::StreamEnd, Span::default())),
            Some(Ok((event, span))) => {
                let (start, end) =
                    (self.offsets.byte(span.start.index()), self.offsets.byte(span.end.index()));
                Ok((event, Span::new(start, end)))
            }
            Some(Err(error)) => {
                let at = self.offsets.byte(error.marker().index());
                Err(Diagnostic::error("yaml", error.info().to_string()).on(Span::new(at, at + 1)))
            }
        }
    }

    fn count(&mut self, more: usize, span: Span) -> Result<(), Diagnostic> {
        self.nodes = self.nodes.saturating_add(more);
        if self.nodes > MAX_NODES {
            let error =
                Diagnostic::error("too-large", "the file is too large here, aliases written out").on(span);
            return Err(error.help(format!("at most {MAX_NODES} values are read")));
        }
        Ok(())
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Token, Diagnostic> {
        self.count(1, span)?;
        if depth > MAX_NESTING {
            let error = Diagnostic::error("syntax", "this is nested too deep").on(span);
            return Err(error.help(format!("at most {MAX_NESTING} levels are read")));
        }
        let before = self.nodes;
        let (tag, anchor) = match &event {
            Event::Scalar(_, _, anchor, tag) => (tag.is_some(), *anchor),
            Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => (tag.is_some(), *anchor),
            _ => (false, 0),
        };
        if tag {
            let error = Diagnostic::error("yaml", "tags are not part of the language").on(span);
            return Err(error.help("write the value without `!`"));
        }
        let token = match event {
            Event::Alias(anchor) => {
                let known = self.anchors.iter().rev().find(|(id, ..)| *id == anchor).cloned();
                let Some((_, token, size)) = known else {
                    return Err(Diagnostic::error("yaml", "this alias is inside what it names").on(span));
                };
                self.count(size, span)?;
                Token { kind: token.kind, span }
            }
            Event::Scalar(text, style, ..) => {
                let plain = style == ScalarStyle::Plain;
                let quoted = matches!(style, ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted);
                let span = trimmed(self.text, span, style);
                Token { kind: TokenKind::Scalar { text: text.into_owned(), plain, quoted }, span }
            }
            Event::SequenceStart(..) => self.sequence(span, depth)?,
            Event::MappingStart(..) => self.mapping(span, depth)?,
            _ => return Err(Diagnostic::error("yaml", "a value is missing here").on(span)),
        };
        if anchor != 0 {
            self.anchors.push((anchor, token.clone(), self.nodes - before + 1));
        }
        Ok(token)
    }

    fn sequence(&mut self, start: Span, depth: usize) -> Result<Token, Diagnostic> {
        let flow = self.text[start.start..].starts_with('[');
        let mut elements: Vec<Token> = Vec::new();
        let end = loop {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                break span;
            }
            elements.push(self.node(event, span, depth + 1)?);
        };
        let inside = elements.first().zip(elements.last()).map(|(first, last)| first.span.to(last.span));
        let span = if flow { closed(start, end) } else { inside.unwrap_or(start) };
        // A block list begins at its first dash, which stands before the first element in the same
        // line or above.
        let span = if flow { span } else { Span::new(start.start.min(span.start), span.end) };
        Ok(Token { kind: TokenKind::Seq { elements, flow }, span })
    }

    fn mapping(&mut self, start: Span, depth: usize) -> Result<Token, Diagnostic> {
        let flow = self.text[start.start..].starts_with('{');
        let mut pairs: Vec<(Token, Token)> = Vec::new();
        let end = loop {
            let (event, span) = self.next()?;
            if event == Event::MappingEnd {
                break span;
            }
            let key = self.node(event, span, depth + 1)?;
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            pairs.push((key, value));
        };
        let inside = pairs
            .first()
            .zip(pairs.last())
            .map(|((first, _), (key, last))| first.span.to(key.span).to(last.span));
        let span = if flow { closed(start, end) } else { inside.unwrap_or(start) };
        Ok(Token { kind: TokenKind::Map { pairs, flow }, span })
    }
}

/// The span of a collection in brackets; the token of its end may go on to the next one, but begins
/// with the bracket.
fn closed(start: Span, end: Span) -> Span {
    Span::new(start.start, end.start + 1)
}

/// The span of a scalar alone: the event parser may go on to the next token.
fn trimmed(text: &str, span: Span, style: ScalarStyle) -> Span {
    let written = text.get(span.start..span.end).unwrap_or("");
    let bytes = written.as_bytes();
    let length = match style {
        ScalarStyle::SingleQuoted | ScalarStyle::DoubleQuoted => {
            let quote = if style == ScalarStyle::SingleQuoted { b'\'' } else { b'"' };
            let mut index = 1;
            while index < bytes.len() {
                match bytes[index] {
                    b'\\' if quote == b'"' => index += 2,
                    byte if byte == quote && quote == b'\'' && bytes.get(index + 1) == Some(&quote) => {
                        index += 2
                    }
                    byte if byte == quote => break,
                    _ => index += 1,
                }
            }
            (index + 1).min(bytes.len())
        }
        _ => written.trim_end().len(),
    };
    Span::new(span.start, span.start + length)
}

// Values ------------------------------------------------------------------------------------------

/// The type that `serde_yaml` sees in a scalar without quotes.
#[derive(Clone, Debug)]
enum Plain {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text,
}

impl Plain {
    /// The type of a scalar: as an element of a list, where no text begins another construct.
    fn of(text: &str) -> Plain {
        if text.contains('\n') {
            return Plain::Text;
        }
        let element: Result<(Plain,), _> = serde_yaml::from_str(&format!("- {text}"));
        // A text with a colon at its end or another mark of syntax is itself.
        element.map_or(Plain::Text, |(plain,)| plain)
    }
}

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Plain, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Plain;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a scalar")
            }
            fn visit_unit<E>(self) -> Result<Plain, E> {
                Ok(Plain::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Plain, E> {
                Ok(Plain::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Plain, E> {
                Ok(Plain::Int(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Plain, E> {
                Ok(Plain::Int(value.into()))
            }
            fn visit_i128<E>(self, value: i128) -> Result<Plain, E> {
                Ok(Plain::Int(value))
            }
            fn visit_u128<E>(self, value: u128) -> Result<Plain, E> {
                Ok(i128::try_from(value).map_or(Plain::Float(value as f64), Plain::Int))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Plain, E> {
                Ok(Plain::Float(value))
            }
            fn visit_str<E>(self, _: &str) -> Result<Plain, E> {
                Ok(Plain::Text)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

struct Reader<'a> {
    source: &'a SourceMap,
    found: &'a mut Vec<Diagnostic>,
}

impl Reader<'_> {
    fn error(&mut self, code: &'static str, span: Span, message: impl Into<String>, help: impl Into<String>) {
        self.found.push(Diagnostic::error(code, message).on(span).help(help));
    }

    fn value(&mut self, token: &Token, kind: Option<Type>) -> Value {
        let span = token.span;
        let value = match &token.kind {
            TokenKind::Map { pairs, flow } => {
                let broken = if *flow { broken(self.source.slice(span)) } else { true };
                let mut map = Map { span, broken, ..Map::default() };
                for (key, value) in pairs {
                    let TokenKind::Scalar { text, .. } = &key.kind else {
                        self.error("yaml", key.span, "a key must be a name", "write `name: value`");
                        continue;
                    };
                    let mut value = self.value(value, kind.and_then(|kind| kind.child(text)));
                    if value.kind == ValueKind::Null {
                        value.span = key.span;
                    }
                    self.found.extend(too_long(text, key.span));
                    let key = Key { text: text.clone(), span: key.span };
                    map.items.push(Item::new(Pair { key, value }));
                }
                ValueKind::Map(map)
            }
            TokenKind::Seq { elements, flow } => {
                let broken = if *flow { broken(self.source.slice(span)) } else { true };
                let inner = match kind {
                    Some(Type::Layers) => Some(Type::Layers),
                    kind => kind.and_then(|kind| kind.element().copied()),
                };
                let mut list = List { span, broken, ..List::default() };
                for token in elements {
                    let value = self.value(token, inner);
                    list.items.push(Item::new(value));
                }
                ValueKind::List(list)
            }
            TokenKind::Scalar { text, plain, quoted } => {
                self.scalar(&Scalar { text, plain: *plain, quoted: *quoted, span }, kind)
            }
        };
        Value::new(value, span)
    }

    fn scalar(&mut self, scalar: &Scalar, kind: Option<Type>) -> ValueKind {
        let is = if scalar.plain { Plain::of(scalar.text) } else { Plain::Text };
        match kind {
            Some(Type::Layers | Type::Composition) if !matches!(is, Plain::Null) => {
                let aligned = scalar.align(self.source);
                let at = |offset: usize| aligned.get(offset).copied().unwrap_or(scalar.span.end);
                let layer = Lowering { at: &at, found: self.found }.layer_text(scalar.text, scalar.span);
                return ValueKind::Layer(layer);
            }
            Some(kind) if kind.textual() && !matches!(is, Plain::Null) => {
                return text_kind(scalar.text.to_string());
            }
            _ => {}
        }
        let numeric = kind.is_some_and(|kind| kind.numeric() && !matches!(kind, Type::Any));
        match is {
            Plain::Null => ValueKind::Null,
            Plain::Bool(value) => ValueKind::Bool(value),
            Plain::Int(value) => self.literal(scalar, value.to_string(), value < 0),
            Plain::Float(value) if value.is_finite() => {
                self.literal(scalar, format!("{value:?}"), value < 0.0)
            }
            Plain::Float(_) => {
                self.error("out-of-range", scalar.span, "this number is not finite", "write a finite number");
                ValueKind::Invalid
            }
            _ if is_word(scalar.text) => ValueKind::Word(scalar.text.to_string()),
            // Where the table says nothing, only what has no quotes and looks like arithmetic is. A
            // path is one in both spellings.
            _ if (numeric || (scalar.plain && looks_arithmetic(scalar.text))) && !is_path(scalar.text) => {
                let aligned = scalar.align(self.source);
                let at = |offset: usize| aligned.get(offset).copied().unwrap_or(scalar.span.end);
                let arith = Lowering { at: &at, found: self.found }.arith_text(scalar.text, scalar.span);
                crate::grammar::scalar_kind(arith)
            }
            _ => text_kind(scalar.text.to_string()),
        }
    }

    /// A number as it was written, where the language writes numbers so too; `0x10` and `.5` are
    /// rewritten.
    fn literal(&mut self, scalar: &Scalar, value: String, negative: bool) -> ValueKind {
        let span = scalar.span;
        let written = scalar.text.strip_prefix('-').unwrap_or(scalar.text);
        let plain = written.starts_with(|c: char| c.is_ascii_digit())
            && written.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'))
            && !written.ends_with('.')
            && !written.contains(".e");
        let text = if plain { written } else { value.trim_start_matches('-') };
        let literal = Arith { kind: ArithKind::Literal(text.to_string()), span };
        ValueKind::Number(match negative {
            true => Arith { kind: ArithKind::Negate(Box::new(literal)), span },
            false => literal,
        })
    }
}

fn looks_arithmetic(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b" _.+-*/()%".contains(&b))
        && text.contains(|c: char| c.is_ascii_digit() || "+*/".contains(c))
}

/// Whether `.dream` reads a text as a path: it has a dot with a letter after it.
fn is_path(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || "_./".contains(c))
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_./-".contains(&b))
        && !text.contains("//")
        && text.as_bytes()[1..].windows(2).any(|pair| pair[0] == b'.' && pair[1].is_ascii_alphabetic())
}

struct Scalar<'a> {
    text: &'a str,
    plain: bool,
    quoted: bool,
    span: Span,
}

impl Scalar<'_> {
    /// The source byte of every byte of the decoded text: both are walked together, and what the
    /// decoding folded or unescaped is stepped over.
    fn align(&self, source: &SourceMap) -> Vec<usize> {
        let written = source.slice(self.span);
        let base = self.span.start;
        let skip = usize::from(self.quoted);
        if self.plain && written == self.text {
            return (base..=base + written.len()).collect();
        }
        let double = self.quoted && written.starts_with('"');
        let single = self.quoted && !double;
        let mut places = Vec::with_capacity(self.text.len() + 1);
        let mut position = skip;
        let blanks = |position: usize| {
            let rest = written.get(position..).unwrap_or("");
            rest.len() - rest.trim_start().len()
        };
        for letter in self.text.chars() {
            if double && written.get(position..).is_some_and(|rest| rest.starts_with("\\\n")) {
                position += 1 + blanks(position + 1);
            }
            let rest = written.get(position..).unwrap_or("");
            let length = match rest.chars().next() {
                Some('\\') if double => escape_length(rest),
                Some('\'') if single => 2,
                Some(found) if found == letter => letter.len_utf8(),
                // A folded line break: the text has a space where the source has a break and an
                // indentation.
                _ if letter.is_whitespace() => blanks(position),
                _ => {
                    position += blanks(position);
                    letter.len_utf8()
                }
            };
            places.extend(
                (0..letter.len_utf8()).map(|byte| base + position + byte.min(length.saturating_sub(1))),
            );
            position = (position + length).min(written.len());
        }
        places.push((base + position).min(self.span.end));
        places
    }
}

/// The bytes of the escape that a double-quoted text goes on with.
fn escape_length(text: &str) -> usize {
    match text.as_bytes().get(1) {
        Some(b'x') => 4,
        Some(b'u') => 6,
        Some(b'U') => 10,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_is_what_it_is_as_the_value_of_a_key() {
        let texts =
            "~ null true yes 1 -1 +3 017 0x10 0o7 1_000 1e3 .5 -.5 1. .inf .nan 1:30 2026-11-28 a a-b x.y <<";
        for text in texts.split(' ') {
            let value: std::collections::BTreeMap<String, Plain> =
                serde_yaml::from_str(&format!("key: {text}")).unwrap();
            assert_eq!(format!("{:?}", Plain::of(text)), format!("{:?}", value["key"]), "{text}");
        }
        for text in ["a:", "- x", "[", "two\nlines"] {
            assert!(matches!(Plain::of(text), Plain::Text), "{text}");
        }
    }
}
