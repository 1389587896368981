//! The one syntax tree of both spellings.
//!
//! A file is a tree of maps, lists and scalars shaped as YAML shows it; the `.dream` front end puts
//! its shorter forms (`sa = sequence {…}`, `recur 16 {…}`, `rope 500 half_reversed`,
//! `let depth = 16`) into that shape, and the formatter takes them out again. Two kinds of leaves
//! have structure of their own: arithmetic ([`Arith`]) and composition expressions ([`Layer`]).
//! Every node has the span of its token; comments and blank lines belong to the item they precede
//! or follow. Nothing is resolved and nothing is checked here.

use crate::source::{SourceMap, Span};

/// The two ways to write a specification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spelling {
    /// YAML.
    #[default]
    Yaml,
    /// `.dream`.
    Dream,
}

impl Spelling {
    /// The spelling of a file by its name: `.dream`, or YAML for all else.
    pub fn of(name: &str) -> Spelling {
        if name.ends_with(".dream") { Spelling::Dream } else { Spelling::Yaml }
    }

    /// The spelling of a text without a name, by its first line that says anything: YAML has a
    /// colon after its first word.
    pub fn guess(text: &str) -> Spelling {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let first = lines.map(|line| line.trim_start_matches(['"', '\''])).next().unwrap_or("");
        let rest = first.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "_-".contains(c));
        let yaml =
            first.starts_with(['{', '-', '%']) || rest.trim_start_matches(['"', '\'']).starts_with(':');
        if yaml || first.is_empty() { Spelling::Yaml } else { Spelling::Dream }
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// One model with its data and recipe.
    Spec,
    /// A comparison: a baseline and variants of it.
    Suite,
}

/// A file as it was written.
#[derive(Clone, Debug)]
pub struct Ast {
    /// The text it was read from.
    pub source: SourceMap,
    /// How it was spelled.
    pub spelling: Spelling,
    /// The kind of the file.
    pub kind: FileKind,
    /// Its sections.
    pub root: Map,
    /// The slips of syntax that were read over; `check` reports them with its own.
    pub errors: Vec<crate::diagnostic::Diagnostic>,
}

/// Items between delimiters (or at one indentation).
#[derive(Clone, Debug, PartialEq)]
pub struct Block<T> {
    /// The items in order.
    pub items: Vec<Item<T>>,
    /// A comment after the opening delimiter.
    pub opening: Option<String>,
    /// Comments after the last item.
    pub closing: Vec<Comment>,
    /// Whether the author put the items on lines of their own.
    pub broken: bool,
    /// From delimiter to delimiter.
    pub span: Span,
}

impl<T> Default for Block<T> {
    fn default() -> Self {
        Block { items: Vec::new(), opening: None, closing: Vec::new(), broken: false, span: Span::default() }
    }
}

/// Keys and values.
pub type Map = Block<Pair>;
/// Values without keys.
pub type List = Block<Value>;

/// A node with what was written around it.
#[derive(Clone, Debug, PartialEq)]
pub struct Item<T> {
    /// Whether a blank line is right before it, after its comments.
    pub blank: bool,
    /// The comments before it.
    pub comments: Vec<Comment>,
    /// The node.
    pub node: T,
    /// The comment after it, in the same line.
    pub trailing: Option<String>,
}

impl<T> Item<T> {
    /// A node with nothing around it.
    pub fn new(node: T) -> Item<T> {
        Item { blank: false, comments: Vec::new(), node, trailing: None }
    }
}

/// A comment line, without its marker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comment {
    /// The text of the comment.
    pub text: String,
    /// Whether a blank line precedes it.
    pub blank: bool,
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The key.
    pub key: Key,
    /// Its value.
    pub value: Value,
}

/// The key of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its text.
    pub text: String,
    /// Its token.
    pub span: Span,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The value itself.
    pub kind: ValueKind,
    /// Its token.
    pub span: Span,
}

/// The kinds of values.
#[derive(Clone, Debug, PartialEq)]
pub enum ValueKind {
    /// No value where one could be.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A name: letters, digits and `_`, perhaps with dots between. The key decides what it names.
    Word(String),
    /// Any other text.
    Text(String),
    /// A number, or arithmetic that gives one.
    Number(Arith),
    /// Keys and values.
    Map(Map),
    /// Values.
    List(List),
    /// A composition expression.
    Layer(Layer),
    /// Something that was reported when it was read.
    Invalid,
}

/// An arithmetic expression.
#[derive(Clone, Debug, PartialEq)]
pub struct Arith {
    /// The expression itself.
    pub kind: ArithKind,
    /// Its token.
    pub span: Span,
}

/// The kinds of arithmetic expressions.
#[derive(Clone, Debug, PartialEq)]
pub enum ArithKind {
    /// A number as it was written: `128_256`, `1e-3`, `0.5%`.
    Literal(String),
    /// A `let` name.
    Name(String),
    /// `-a`
    Negate(Box<Arith>),
    /// `a + b`
    Binary(Operator, Box<Arith>, Box<Arith>),
    /// `(a)`
    Group(Box<Arith>),
    /// Something that was reported when it was read.
    Invalid,
}

/// An operator of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`
    Divide,
}

impl Operator {
    /// Its sign.
    pub fn sign(self) -> &'static str {
        match self {
            Operator::Add => "+",
            Operator::Subtract => "-",
            Operator::Multiply => "*",
            Operator::Divide => "/",
        }
    }
}

/// A composition expression.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The expression itself.
    pub kind: LayerKind,
    /// Its token.
    pub span: Span,
}

/// The kinds of composition expressions.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerKind {
    /// A component by its name.
    Component(String),
    /// `a > b`
    Sequential(Vec<Layer>),
    /// `a | b`
    Parallel(Vec<Layer>),
    /// `(a)`
    Group(Box<Layer>),
    /// `skip(…) { a }`
    Skip(Map, Box<Layer>),
    /// A statement on the stream, such as `mix e linear`, which stands in the place of a layer.
    Statement(Vec<Word>),
    /// Something that was reported when it was read.
    Invalid,
}

/// A word of a statement: a name or a number.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// Its text.
    pub text: String,
    /// Its token.
    pub span: Span,
}

impl<T> Block<T> {
    /// Whether comments stand directly inside.
    pub(crate) fn commented(&self) -> bool {
        let noted = |item: &Item<T>| !item.comments.is_empty() || item.trailing.is_some();
        self.opening.is_some() || !self.closing.is_empty() || self.items.iter().any(noted)
    }
}

impl Map {
    /// The first pair of that key.
    pub fn get(&self, key: &str) -> Option<&Pair> {
        self.items.iter().map(|item| &item.node).find(|pair| pair.key.text == key)
    }

    /// The first pair of that key.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Pair> {
        self.items.iter_mut().map(|item| &mut item.node).find(|pair| pair.key.text == key)
    }
}

impl Value {
    /// A value at its token.
    pub fn new(kind: ValueKind, span: Span) -> Value {
        Value { kind, span }
    }

    /// Its pairs, where it is a map.
    pub fn as_map(&self) -> Option<&Map> {
        if let ValueKind::Map(map) = &self.kind { Some(map) } else { None }
    }

    /// Its elements, where it is a list.
    pub fn as_list(&self) -> Option<&List> {
        if let ValueKind::List(list) = &self.kind { Some(list) } else { None }
    }

    /// The kind of expression, for a reader.
    pub fn describe(&self) -> String {
        match &self.kind {
            ValueKind::Null => "nothing".into(),
            ValueKind::Bool(value) => format!("`{value}`"),
            ValueKind::Word(word) => format!("`{word}`"),
            ValueKind::Text(_) => "a text".into(),
            ValueKind::Number(arith) => match &arith.kind {
                ArithKind::Literal(literal) => format!("`{literal}`"),
                _ => "arithmetic".into(),
            },
            ValueKind::Map(_) => "a group of keys".into(),
            ValueKind::List(_) => "a list".into(),
            ValueKind::Layer(_) => "a composition".into(),
            ValueKind::Invalid => "an invalid value".into(),
        }
    }
}

/// Whether the text is a name, perhaps with dots between: what is written without quotes in both
/// spellings.
pub(crate) fn is_word(text: &str) -> bool {
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    !matches!(text, "true" | "false" | "null") && text.split('.').all(part)
}

impl Ast {
    /// The sections with every span taken away, so that trees of different texts can be compared.
    pub fn without_spans(&self) -> Map {
        let mut root = self.root.clone();
        root.place(Span::default());
        root
    }
}

impl Map {
    /// Gives every token below one place.
    pub(crate) fn place(&mut self, span: Span) {
        self.each_span(&|own| *own = span);
    }

    /// Moves every token.
    pub(crate) fn shift(&mut self, by: usize) {
        self.each_span(&|own| *own = Span::new(own.start + by, own.end + by));
    }

    fn each_span(&mut self, change: &dyn Fn(&mut Span)) {
        change(&mut self.span);
        for item in &mut self.items {
            change(&mut item.node.key.span);
            each_of_value(&mut item.node.value, change);
        }
    }
}

fn each_of_value(value: &mut Value, change: &dyn Fn(&mut Span)) {
    change(&mut value.span);
    match &mut value.kind {
        ValueKind::Map(map) => map.each_span(change),
        ValueKind::List(list) => {
            change(&mut list.span);
            list.items.iter_mut().for_each(|item| each_of_value(&mut item.node, change));
        }
        ValueKind::Number(arith) => each_of_arith(arith, change),
        ValueKind::Layer(layer) => each_of_layer(layer, change),
        _ => {}
    }
}

fn each_of_arith(arith: &mut Arith, change: &dyn Fn(&mut Span)) {
    change(&mut arith.span);
    match &mut arith.kind {
        ArithKind::Negate(inner) | ArithKind::Group(inner) => each_of_arith(inner, change),
        ArithKind::Binary(_, left, right) => {
            each_of_arith(left, change);
            each_of_arith(right, change);
        }
        _ => {}
    }
}

fn each_of_layer(layer: &mut Layer, change: &dyn Fn(&mut Span)) {
    change(&mut layer.span);
    match &mut layer.kind {
        LayerKind::Sequential(terms) | LayerKind::Parallel(terms) => {
            terms.iter_mut().for_each(|term| each_of_layer(term, change))
        }
        LayerKind::Group(inner) => each_of_layer(inner, change),
        LayerKind::Skip(arguments, inner) => {
            arguments.each_span(change);
            each_of_layer(inner, change);
        }
        LayerKind::Statement(words) => words.iter_mut().for_each(|word| change(&mut word.span)),
        LayerKind::Component(_) | LayerKind::Invalid => {}
    }
}
