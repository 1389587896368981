//! From text to nodes: what the two spellings share, arithmetic and composition expressions, and
//! the values of `.dream`. The grammar (`dream.pest`) takes every text; what is wrong is reported
//! here, each slip at its token.

use pest::Parser;
use pest::iterators::Pair as Match;

use crate::ast::*;
use crate::diagnostic::Diagnostic;
use crate::keys::{self, Type};
use crate::source::Span;

#[derive(pest_derive::Parser)]
#[grammar = "dream.pest"]
pub(crate) struct Grammar;

/// The deepest nesting of brackets; the grammar and the passes after it recurse no deeper than a
/// multiple of this.
pub(crate) const MAX_NESTING: usize = 48;
/// Terms of one sum, product or composition.
const MAX_TERMS: usize = 64;
/// The longest key, in bytes; YAML reads at most 1024 characters of one, escapes included.
pub(crate) const LONGEST_NAME: usize = 200;

/// Reads one text. `at` turns an offset of it into one of the source.
pub(crate) struct Lowering<'a> {
    pub(crate) at: &'a dyn Fn(usize) -> usize,
    pub(crate) found: &'a mut Vec<Diagnostic>,
}

/// A node of the grammar.
pub(crate) type Node<'i> = Match<'i, Rule>;

/// The brackets of a text with their places; those in strings and comments do not count.
fn brackets(text: &str) -> impl Iterator<Item = (usize, u8)> {
    let bytes = text.as_bytes();
    let mut index = 0;
    std::iter::from_fn(move || {
        while index < bytes.len() {
            let at = index;
            index += 1;
            match bytes[at] {
                byte @ (b'(' | b'[' | b'{' | b')' | b']' | b'}') => return Some((at, byte)),
                b'"' => {
                    while index < bytes.len() && !matches!(bytes[index], b'"' | b'\n') {
                        index += if bytes[index] == b'\\' { 2 } else { 1 };
                    }
                    index += 1;
                }
                b'/' if bytes.get(index) == Some(&b'/') => {
                    while index < bytes.len() && bytes[index] != b'\n' {
                        index += 1;
                    }
                }
                _ => {}
            }
        }
        None
    })
}

/// Where brackets nest too deep, if they do.
pub(crate) fn too_deep(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (index, byte) in brackets(text) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            _ => depth = depth.saturating_sub(1),
        }
        if depth > MAX_NESTING {
            return Some(index);
        }
    }
    None
}

/// The brace that a person forgot to close, of one that is not closed: the first whose `}` begins
/// a line further left than its own.
fn culprit(text: &str, open: usize) -> usize {
    let line = |at: usize| text[..at].rfind('\n').map_or(0, |end| end + 1);
    let indent = |at: usize| text[line(at)..].bytes().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let mut around: Vec<usize> = Vec::new();
    for (at, byte) in brackets(text.get(open..).unwrap_or("")).map(|(at, byte)| (open + at, byte)) {
        match (byte, around.last()) {
            (b'{', _) => around.push(at),
            (b'}', Some(&last)) => {
                if text[line(at)..at].trim().is_empty() && indent(at) < indent(last) {
                    return last;
                }
                around.pop();
            }
            _ => {}
        }
    }
    open
}

/// The text of a value for help, where it is short.
pub(crate) fn short_text(node: &Node) -> String {
    let (start, end) = extent(node);
    let text = node.as_str().get(..end - start).unwrap_or("");
    if text.len() <= 32 && !text.contains('\n') { text.into() } else { "…".into() }
}

impl Lowering<'_> {
    pub(crate) fn span(&self, node: &Node) -> Span {
        let (start, end) = extent(node);
        Span::new((self.at)(start), (self.at)(end))
    }

    pub(crate) fn error(&mut self, span: Span, message: impl Into<String>, help: impl Into<String>) {
        self.found.push(Diagnostic::error("syntax", message).on(span).help(help));
    }

    pub(crate) fn parse<'i>(&mut self, rule: Rule, text: &'i str) -> Option<Node<'i>> {
        if let Some(position) = too_deep(text) {
            let at = (self.at)(position);
            let help = format!("at most {MAX_NESTING} levels of brackets are read");
            self.error(Span::new(at, at + 1), "this is nested too deep", help);
            return None;
        }
        match Grammar::parse(rule, text) {
            Ok(mut nodes) => nodes.next(),
            // The grammar is total, so this is out of reach; an error is the answer all the same.
            Err(error) => {
                let at = match error.location {
                    pest::error::InputLocation::Pos(at) | pest::error::InputLocation::Span((at, _)) => at,
                };
                self.error(
                    Span::new((self.at)(at), (self.at)(at)),
                    "this cannot be read",
                    "see docs/language.md",
                );
                None
            }
        }
    }

    /// The file as the grammar has it.
    pub(crate) fn file<'i>(&mut self, text: &'i str) -> Option<Node<'i>> {
        self.parse(Rule::file, text)
    }

    /// A text that is nothing but arithmetic.
    pub(crate) fn arith_text(&mut self, text: &str, whole: Span) -> Arith {
        let Some(node) = self.parse(Rule::arith_text, text) else {
            return Arith { kind: ArithKind::Invalid, span: whole };
        };
        let mut result = Arith { kind: ArithKind::Invalid, span: whole };
        let stray = node.clone().into_inner().any(|part| part.as_rule() == Rule::text_stray);
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::sum => result = self.sum(part),
                Rule::missing if !stray => {
                    self.error(
                        whole,
                        "a number is missing here",
                        "write a number or arithmetic such as `2 * depth`",
                    );
                }
                Rule::text_stray => {
                    let help = "write a number or arithmetic such as `2 * depth`";
                    self.error(self.span(&part), format!("`{}` does not belong here", part.as_str()), help);
                    return Arith { kind: ArithKind::Invalid, span: whole };
                }
                _ => {}
            }
        }
        result
    }

    /// A text that is nothing but a composition expression.
    pub(crate) fn layer_text(&mut self, text: &str, whole: Span) -> Layer {
        let invalid = Layer { kind: LayerKind::Invalid, span: whole };
        let Some(node) = self.parse(Rule::layer_text, text) else { return invalid };
        let mut result = invalid.clone();
        let stray = node.clone().into_inner().any(|part| part.as_rule() == Rule::text_stray);
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::mixed => result = self.mixed(part),
                Rule::statement => result = self.statement(part),
                Rule::missing if !stray => {
                    let help = "write a composition such as `(da | sa) > ea`";
                    self.error(whole, "a composition is missing here", help);
                }
                Rule::text_stray => {
                    let help = "join components with `>` (one after the other) or `|` (side by side)";
                    self.error(self.span(&part), format!("`{}` does not belong here", part.as_str()), help);
                    return invalid;
                }
                _ => {}
            }
        }
        result
    }

    // Composition ---------------------------------------------------------------------------------

    pub(crate) fn mixed(&mut self, node: Node) -> Layer {
        let span = self.span(&node);
        let mut terms = Vec::new();
        let mut joins: Vec<(char, Span)> = Vec::new();
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::join => joins.push((part.as_str().chars().next().unwrap_or('>'), self.span(&part))),
                Rule::wrong_join => joins.push((self.wrong_join(&part), self.span(&part))),
                Rule::missing => {
                    let at = joins.last().map_or(span, |(_, at)| *at);
                    self.error(
                        at,
                        "a component is missing after this",
                        "name a component, or take the sign away",
                    );
                    terms.push(Layer { kind: LayerKind::Invalid, span: at });
                }
                _ => terms.push(self.term(part)),
            }
        }
        if terms.len() > MAX_TERMS {
            self.error(span, "this composition is too long", format!("at most {MAX_TERMS} terms are read"));
            return Layer { kind: LayerKind::Invalid, span };
        }
        let Some((first, _)) = joins.first().copied() else {
            return terms.pop().unwrap_or(Layer { kind: LayerKind::Invalid, span });
        };
        if let Some((sign, at)) = joins.iter().find(|(sign, _)| *sign != first) {
            let message = format!("`{sign}` and `{first}` are mixed without parentheses");
            self.error(*at, message, "add parentheses: `(da | sa) > ea` or `da | (sa > ea)`");
            return Layer { kind: LayerKind::Invalid, span };
        }
        let kind = if first == '|' { LayerKind::Parallel(terms) } else { LayerKind::Sequential(terms) };
        Layer { kind, span }
    }

    /// The sign that one of other programs stands for.
    fn wrong_join(&mut self, node: &Node) -> char {
        let (sign, does) = match node.as_str() {
            "+" | "&" => ('|', "side by side"),
            _ => ('>', "one after the other"),
        };
        let message = format!("`{}` joins no components", node.as_str());
        self.error(self.span(node), message, format!("write `{sign}`: {does}"));
        sign
    }

    /// A statement on the stream, as its words.
    pub(crate) fn statement(&mut self, node: Node) -> Layer {
        let span = self.span(&node);
        let words = node.into_inner().map(|part| Word { span: self.span(&part), text: part.as_str().into() });
        Layer { kind: LayerKind::Statement(words.collect()), span }
    }

    fn term(&mut self, node: Node) -> Layer {
        let span = self.span(&node);
        let kind = match node.as_rule() {
            Rule::component => LayerKind::Component(node.as_str().trim().to_string()),
            Rule::group => self.group(node, span),
            Rule::skip => self.skip(node, span),
            _ => LayerKind::Invalid,
        };
        Layer { kind, span }
    }

    fn group(&mut self, node: Node, span: Span) -> LayerKind {
        let (mut inner, mut closed) = (None, false);
        let before = self.found.len();
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::mixed => inner = Some(self.mixed(part)),
                Rule::close_paren => closed = true,
                _ => {}
            }
        }
        if !closed {
            // Its content is not known, nor its errors.
            self.found.truncate(before);
            let open = Span::new(span.start, span.start + 1);
            self.error(open, "this `(` is not closed", "add `)`");
            return LayerKind::Invalid;
        }
        match inner {
            Some(inner) => LayerKind::Group(Box::new(inner)),
            None => {
                self.error(span, "a composition is missing here", "write one between the parentheses");
                LayerKind::Invalid
            }
        }
    }

    fn skip(&mut self, node: Node, span: Span) -> LayerKind {
        let keyword = Span::new(span.start, span.start + "skip".len());
        let mut map = Map { span: keyword, ..Map::default() };
        let mut inner = None;
        let mut has_body = false;
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::arguments => self.arguments(part, &mut map),
                Rule::loose => self.loose(&part, &mut map),
                Rule::wrapped => {
                    has_body = true;
                    let open = (self.at)(part.as_span().start());
                    let mut closed = false;
                    for part in part.into_inner() {
                        match part.as_rule() {
                            Rule::mixed => inner = Some(self.mixed(part)),
                            Rule::close_brace => closed = true,
                            Rule::wrapped_stray => {
                                let help =
                                    "join components with `>` (one after the other) or `|` (side by side)";
                                let message = format!("`{}` does not belong here", part.as_str());
                                self.error(self.span(&part), message, help);
                            }
                            _ => {}
                        }
                    }
                    if !closed {
                        self.error(Span::new(open, open + 1), "this `{` is not closed", "add `}`");
                    }
                }
                _ => {}
            }
        }
        match inner {
            Some(inner) => LayerKind::Skip(map, Box::new(inner)),
            None => {
                let message = if has_body { "`skip` wraps nothing" } else { "`skip` needs what it wraps" };
                self.error(keyword, message, "write `skip(capacity 0.125, causal bce 0.01) { sa > mlp }`");
                LayerKind::Invalid
            }
        }
    }

    /// Settings of a `skip` without parentheses, which are reported and read.
    fn loose(&mut self, node: &Node, map: &mut Map) {
        let text = node.as_str().trim_end();
        let span = Span::new(self.span(node).start, (self.at)(node.as_span().start() + text.len()));
        let help = format!("write `skip({text}) {{ … }}`");
        self.error(span, "settings of `skip` stand without parentheses", help);
        let (outer, start) = (self.at, node.as_span().start());
        let at = |offset: usize| outer(start + offset.saturating_sub(1).min(text.len()));
        let mut inner = Lowering { at: &at, found: &mut *self.found };
        let enclosed = format!("({text})");
        if let Some(arguments) = inner.parse(Rule::arguments, &enclosed) {
            inner.arguments(arguments, map);
        }
    }

    fn arguments(&mut self, node: Node, map: &mut Map) {
        let span = self.span(&node);
        map.span = span;
        let mut closed = false;
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::argument => {
                    let pair = self.argument(part);
                    map.items.push(Item::new(pair));
                }
                Rule::close_paren => closed = true,
                Rule::argument_stray => {
                    let help = format!("write one of {}", key_names(&keys::SKIP));
                    self.error(self.span(&part), format!("`{}` does not belong here", part.as_str()), help);
                }
                _ => {}
            }
        }
        if !closed {
            self.error(Span::new(span.start, span.start + 1), "this `(` is not closed", "add `)`");
        }
    }

    fn argument(&mut self, node: Node) -> Pair {
        let mut parts = node.into_inner().peekable();
        let key = self.key(parts.next());
        if let Some(sign) = parts.next_if(|part| matches!(part.as_rule(), Rule::colon | Rule::equals)) {
            self.colon(&sign, &key, parts.peek());
        }
        let kind = keys::SKIP.key(&key.text).map(|key| key.kind);
        let value = match parts.next() {
            None => Value::new(ValueKind::Bool(true), key.span),
            Some(part) if part.as_rule() == Rule::tagged => self.tagged(part, kind),
            Some(part) => self.value(part, kind),
        };
        Pair { key, value }
    }

    /// Pairs without commas, the first with a value: `bce 0.01 into_input`.
    fn tagged(&mut self, node: Node, kind: Option<Type>) -> Value {
        let span = self.span(&node);
        let mut map = Map { span, ..Map::default() };
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::name | Rule::key => {
                    let key = self.key(Some(part));
                    let value = Value::new(ValueKind::Bool(true), key.span);
                    map.items.push(Item::new(Pair { key, value }));
                }
                Rule::number_value | Rule::block => {
                    let kind = map.items.last().and_then(|item| kind?.child(&item.node.key.text));
                    let value = self.value_part(part, kind);
                    if let Some(item) = map.items.last_mut() {
                        item.node.value = value;
                    }
                }
                _ => {}
            }
        }
        Value::new(ValueKind::Map(map), span)
    }

    /// A sign between a key and its value, such as YAML's `:`.
    pub(crate) fn colon(&mut self, sign: &Node, key: &Key, value: Option<&Node>) {
        let value = value.map_or("…".into(), short_text);
        let help = format!("write `{} {value}`", key.text);
        let message = format!("a key and its value stand without `{}`", sign.as_str().trim_end());
        self.error(self.span(sign), message, help);
    }

    /// A `{` that nothing closes. The one that is meant is the first inside it whose `}` stands
    /// further left than its line.
    pub(crate) fn unclosed(&mut self, text: &str, open: usize) {
        let at = (self.at)(culprit(text, open));
        self.error(Span::new(at, at + 1), "this `{` is not closed", "add `}`");
    }

    pub(crate) fn key(&mut self, node: Option<Node>) -> Key {
        match node {
            None => Key { text: String::new(), span: Span::default() },
            Some(node) => {
                let span = self.span(&node);
                let text = match node.as_str().starts_with(['"', '\'']) {
                    true => self.unquote(node.as_str(), span),
                    false => node.as_str().trim_end().to_string(),
                };
                self.found.extend(too_long(&text, span));
                Key { text, span }
            }
        }
    }

    // Values --------------------------------------------------------------------------------------

    /// The value in a node of the rule `value` or `flagged`, in a place of type `kind`.
    pub(crate) fn value(&mut self, node: Node, kind: Option<Type>) -> Value {
        let span = self.span(&node);
        if node.as_rule() == Rule::wired {
            return self.wired(node, kind);
        }
        let mut parts = node.into_inner();
        let Some(value) = parts.next().map(|part| self.value_part(part, kind)) else {
            return Value::new(ValueKind::Invalid, span);
        };
        let short = kind.and_then(|kind| kind.section()).and_then(|section| section.short);
        let (Some(flag), Some(short)) = (parts.next(), short) else { return value };
        // `500 half_reversed` is `{base 500 half_reversed true}`.
        let flag = self.key(Some(flag));
        let yes = Value::new(ValueKind::Bool(true), flag.span);
        let short = Key { text: short.to_string(), span: value.span };
        let pairs = [Pair { key: short, value }, Pair { key: flag, value: yes }];
        let map = Map { items: pairs.map(Item::new).into(), span, ..Map::default() };
        Value::new(ValueKind::Map(map), span)
    }

    /// `lanes 4 dynamic` is `{lanes 4 kind dynamic}`, `attend {block 8}` is `{attend {block 8}}`.
    fn wired(&mut self, node: Node, kind: Option<Type>) -> Value {
        let span = self.span(&node);
        let mut map = Map { span, ..Map::default() };
        let mut parts = node.into_inner();
        let key = self.key(parts.next());
        let inner = kind.and_then(|kind| kind.child(&key.text));
        let value = match parts.next() {
            Some(part) => self.value_part(part, inner),
            None => Value::new(ValueKind::Invalid, span),
        };
        map.items.push(Item::new(Pair { key, value }));
        if let Some(part) = parts.next().and_then(|part| part.into_inner().next()) {
            let at = self.span(&part);
            let key = Key { text: "kind".into(), span: at };
            let value = Value::new(text_kind(part.as_str().to_string()), at);
            map.items.push(Item::new(Pair { key, value }));
        }
        Value::new(ValueKind::Map(map), span)
    }

    pub(crate) fn value_part(&mut self, node: Node, kind: Option<Type>) -> Value {
        let span = self.span(&node);
        match node.as_rule() {
            Rule::block => {
                let map = self.block(node, kind);
                Value::new(ValueKind::Map(map), span)
            }
            Rule::list => self.list(node, kind),
            Rule::string => {
                let text = self.unquote(node.as_str(), span);
                if matches!(kind, Some(Type::Layers | Type::Composition)) {
                    let at = |offset: usize| (span.start + 1 + offset).min(span.end);
                    let layer = Lowering { at: &at, found: self.found }.layer_text(&text, span);
                    return Value::new(ValueKind::Layer(layer), span);
                }
                Value::new(text_kind(text), span)
            }
            Rule::scalar | Rule::number_value | Rule::element => match node.into_inner().next() {
                Some(part) => self.value_part(part, kind),
                None => Value::new(ValueKind::Invalid, span),
            },
            Rule::path | Rule::size => Value::new(text_kind(node.as_str().to_string()), span),
            Rule::sum => {
                let (start, end) = extent(&node);
                let source = node.as_str().get(..end - start).unwrap_or("");
                let textual = kind.is_some_and(|kind| kind.textual());
                if textual && !source.contains([' ', '\t', '\n', '\r', '"']) {
                    return Value::new(text_kind(source.to_string()), span);
                }
                let arith = self.sum(node);
                let span = arith.span;
                Value::new(scalar_kind(arith), span)
            }
            _ => Value::new(ValueKind::Invalid, span),
        }
    }

    fn list(&mut self, node: Node, kind: Option<Type>) -> Value {
        let span = self.span(&node);
        let element = match kind {
            Some(Type::Layers) => kind,
            kind => kind.and_then(|kind| kind.element().copied()),
        };
        let mut list = List { span, broken: broken(node.as_str()), ..List::default() };
        let mut closed = false;
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::element => {
                    let value = self.value_part(part, element);
                    list.items.push(Item::new(value));
                }
                Rule::close_bracket => closed = true,
                Rule::hash => {
                    self.error(self.span(&part), "`#` begins no comment", "a comment begins with `//`");
                }
                Rule::list_stray => {
                    let help = "a list is `[a, b, c]`";
                    self.error(self.span(&part), format!("`{}` does not belong here", part.as_str()), help);
                }
                _ => {}
            }
        }
        if !closed {
            self.error(Span::new(span.start, span.start + 1), "this `[` is not closed", "add `]`");
        }
        Value::new(ValueKind::List(list), span)
    }

    // Arithmetic ----------------------------------------------------------------------------------

    pub(crate) fn sum(&mut self, node: Node) -> Arith {
        let span = self.span(&node);
        let mut left: Option<Arith> = None;
        let mut operator = None;
        for (index, part) in node.into_inner().enumerate() {
            if index > 2 * MAX_TERMS {
                self.error(
                    span,
                    "this expression is too long",
                    format!("at most {MAX_TERMS} terms are read"),
                );
                return Arith { kind: ArithKind::Invalid, span };
            }
            let right = match part.as_rule() {
                Rule::sum_op | Rule::product_op => {
                    let sign = match part.as_str() {
                        "+" => Operator::Add,
                        "-" => Operator::Subtract,
                        "*" => Operator::Multiply,
                        _ => Operator::Divide,
                    };
                    operator = Some((sign, self.span(&part)));
                    continue;
                }
                Rule::product => self.sum(part),
                Rule::missing => {
                    let at = operator.map_or(span, |(_, at)| at);
                    self.error(at, "a number is missing after this", "write a number, or take the sign away");
                    Arith { kind: ArithKind::Invalid, span: at }
                }
                _ => self.unary(part),
            };
            left = Some(match (left, operator.take()) {
                (Some(left), Some((sign, _))) => {
                    let span = left.span.to(right.span);
                    Arith { kind: ArithKind::Binary(sign, Box::new(left), Box::new(right)), span }
                }
                _ => right,
            });
        }
        left.unwrap_or(Arith { kind: ArithKind::Invalid, span })
    }

    fn unary(&mut self, node: Node) -> Arith {
        let span = self.span(&node);
        let mut signs = 0;
        let mut atom = Arith { kind: ArithKind::Invalid, span };
        for part in node.into_inner() {
            let at = self.span(&part);
            let kind = match part.as_rule() {
                Rule::minus => {
                    signs += 1;
                    continue;
                }
                Rule::number => ArithKind::Literal(part.as_str().to_string()),
                Rule::let_name => ArithKind::Name(part.as_str().trim().to_string()),
                Rule::parens => self.parens(part, at),
                _ => continue,
            };
            atom = Arith { kind, span: at };
        }
        if signs > 2 {
            self.error(span, "this has too many signs", "write one `-`, or none");
            return Arith { kind: ArithKind::Invalid, span };
        }
        for _ in 0..signs {
            atom = Arith { kind: ArithKind::Negate(Box::new(atom)), span };
        }
        atom
    }

    fn parens(&mut self, node: Node, span: Span) -> ArithKind {
        let (mut inner, mut closed) = (None, false);
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::sum => inner = Some(self.sum(part)),
                Rule::close_paren => closed = true,
                _ => {}
            }
        }
        if !closed {
            self.error(Span::new(span.start, span.start + 1), "this `(` is not closed", "add `)`");
        }
        match inner {
            Some(inner) => ArithKind::Group(Box::new(inner)),
            None => {
                self.error(span, "a number is missing here", "write one between the parentheses");
                ArithKind::Invalid
            }
        }
    }

    /// The text of a quoted string.
    pub(crate) fn unquote(&mut self, quoted: &str, span: Span) -> String {
        if let Some(inner) = quoted.trim_end().strip_prefix('\'').and_then(|text| text.strip_suffix('\'')) {
            self.error(span, "text stands in other quotes", format!("write `\"{inner}\"`"));
            return inner.to_string();
        }
        let mut text = String::new();
        let mut closed = false;
        let mut letters = quoted.char_indices().skip(1);
        while let Some((index, letter)) = letters.next() {
            match letter {
                '"' => closed = true,
                '\\' => match letters.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, sign @ ('"' | '\\'))) => text.push(sign),
                    other => {
                        let length = 1 + other.map_or(0, |(_, letter)| letter.len_utf8());
                        let at = Span::new(span.start + index, span.start + index + length);
                        self.error(
                            at,
                            "this escape is not known",
                            "write `\\n`, `\\t`, `\\r`, `\\\"` or `\\\\`",
                        );
                    }
                },
                letter => text.push(letter),
            }
        }
        if !closed {
            self.error(span, "this text is not closed", "add `\"` at its end");
        }
        text
    }
}

/// The bytes from a node's first token to its last; the rule itself may also have taken blanks and
/// comments.
pub(crate) fn extent(node: &Node) -> (usize, usize) {
    let start = node.as_span().start();
    let inner = |part: &Node| !matches!(part.as_rule(), Rule::missing | Rule::EOI);
    let end = match node.clone().into_inner().filter(inner).last() {
        Some(last) => extent(&last).1,
        None => start + node.as_str().trim_end().len(),
    };
    (start, end)
}

/// The names of the keys of a section, for help.
pub(crate) fn key_names(section: &keys::Section) -> String {
    crate::suggest::listing(section.keys.iter().map(|key| key.name))
}

/// A text as a value: a word where it can be one, so that both spellings agree whatever the quotes.
pub(crate) fn text_kind(text: String) -> ValueKind {
    if is_word(&text) { ValueKind::Word(text) } else { ValueKind::Text(text) }
}

/// An expression as a value: a lone name is a word, whose meaning the key decides.
pub(crate) fn scalar_kind(arith: Arith) -> ValueKind {
    match arith.kind {
        ArithKind::Name(name) => match name.as_str() {
            "true" => ValueKind::Bool(true),
            "false" => ValueKind::Bool(false),
            "null" => ValueKind::Null,
            _ => ValueKind::Word(name),
        },
        ArithKind::Invalid => ValueKind::Invalid,
        _ => ValueKind::Number(arith),
    }
}

/// The error of a key that YAML would not read back.
pub(crate) fn too_long(key: &str, span: Span) -> Option<Diagnostic> {
    let error = || Diagnostic::error("syntax", "this name is too long").on(span);
    (key.len() > LONGEST_NAME).then(|| error().help(format!("at most {LONGEST_NAME} bytes are read")))
}

/// Whether a line break follows the opening delimiter before anything else does.
pub(crate) fn broken(delimited: &str) -> bool {
    let inside = delimited.get(1..).unwrap_or("");
    let space = &inside[..inside.len() - inside.trim_start().len()];
    space.contains('\n') || inside.trim_start().starts_with("//") || inside.trim_start().starts_with('#')
}
