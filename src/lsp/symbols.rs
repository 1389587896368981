//! The names that a file defines, and where they are used: components, numbers of `let`, and those
//! of definitions.
//!
//! *In*: a tree. *Out*: [`Symbol`]s with their tokens. *Promise*: renaming all symbols of a name
//! renames everything that the file means by it, but for patterns of tensors.

use dreamc_dsl::ast::{Arith, ArithKind, Ast, Layer, LayerKind, Map, Value, ValueKind};
use dreamc_dsl::define::{Definition, names};
use dreamc_dsl::keys::{self, Type};
use dreamc_dsl::{FileKind, Span};

/// The kinds of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A component of the model.
    Component,
    /// A number of `let`.
    Number,
    /// A definition.
    Definition,
    /// A value, a setting or a dimension of the definition of that number in the file.
    Value(usize),
}

/// A name where it is defined or used.
#[derive(Clone, Debug, PartialEq)]
pub struct Symbol {
    pub kind: Kind,
    pub name: String,
    pub span: Span,
    pub defines: bool,
}

/// All of a tree, definitions first.
pub fn of(ast: &Ast) -> Vec<Symbol> {
    let mut found = Finder { text: &ast.source.text, all: vec![] };
    let components = ast.root.get("model").and_then(|pair| pair.value.as_map()?.get("components"));
    found.define(Kind::Number, ast.root.get("let").and_then(|pair| pair.value.as_map()));
    found.define(Kind::Component, components.as_ref().and_then(|pair| pair.value.as_map()));
    let components = components.and_then(|pair| pair.value.as_map());
    for (place, definition) in names::definitions(ast).iter().enumerate() {
        for own in names::names(definition) {
            let kind = match own.of {
                names::Of::Definition => Kind::Definition,
                names::Of::Value => Kind::Value(place),
            };
            found.add(kind, &own.name, own.span, own.gives);
        }
        found.settings(components, definition, Kind::Value(place));
    }
    found.kinds(components);
    let root = match ast.kind {
        FileKind::Spec => Type::Section(&keys::SPEC),
        FileKind::Suite => Type::Section(&keys::SUITE),
    };
    found.map(&ast.root, Some(root));
    found.all
}

struct Finder<'a> {
    text: &'a str,
    all: Vec<Symbol>,
}

impl Finder<'_> {
    fn define(&mut self, kind: Kind, names: Option<&Map>) {
        for item in names.into_iter().flat_map(|names| &names.items) {
            let key = &item.node.key;
            self.add(kind, &key.text, key.span, true);
        }
    }

    /// The settings of a definition where components set them.
    fn settings(&mut self, components: Option<&Map>, definition: &Definition, kind: Kind) {
        let maps =
            components.into_iter().flat_map(|map| &map.items).filter_map(|item| item.node.value.as_map());
        for pair in maps.filter_map(|map| map.items.first()).map(|item| &item.node) {
            let own = pair.key.text == definition.name.text;
            for item in pair.value.as_map().filter(|_| own).into_iter().flat_map(|map| &map.items) {
                let key = &item.node.key;
                if definition.settings.iter().any(|setting| setting.name.text == key.text) {
                    self.add(kind, &key.text, key.span, false);
                }
            }
        }
    }

    /// The kinds of components that are definitions.
    fn kinds(&mut self, components: Option<&Map>) {
        let keys =
            components.into_iter().flat_map(|map| &map.items).filter_map(|item| item.node.value.as_map());
        for key in keys.filter_map(|map| map.items.first()).map(|item| &item.node.key) {
            if keys::COMPONENTS.iter().all(|kind| kind.name != key.text) {
                self.add(Kind::Definition, &key.text, key.span, false);
            }
        }
    }

    /// A name at its token, without its quotes.
    fn add(&mut self, kind: Kind, name: &str, span: Span, defines: bool) {
        let Some(text) = self.text.get(span.start..span.end) else { return };
        let Some(at) = text.find(name) else { return };
        let span = Span::new(span.start + at, span.start + at + name.len());
        self.all.push(Symbol { kind, name: name.to_string(), span, defines });
    }

    fn map(&mut self, map: &Map, kind: Option<Type>) {
        for item in &map.items {
            let pair = &item.node;
            if pair.key.text == "define" && kind.is_some_and(|kind| kind.child("define").is_some()) {
                continue;
            }
            let inner = kind.and_then(|kind| kind.child(&pair.key.text));
            // `{ea.count: 8}` names a field and its step.
            if kind.is_some_and(|kind| field(&kind)) {
                self.word(&pair.key.text, pair.key.span, Some(Type::Field));
            }
            self.value(&pair.value, inner);
        }
    }

    fn value(&mut self, value: &Value, kind: Option<Type>) {
        match &value.kind {
            ValueKind::Number(arith) => self.arith(arith),
            ValueKind::Layer(layer) => self.layer(layer),
            ValueKind::Map(map) => self.map(map, kind),
            ValueKind::List(list) => {
                let element = match kind {
                    Some(Type::Layers) => kind,
                    _ => kind.and_then(|kind| kind.element().copied()),
                };
                list.items.iter().for_each(|item| self.value(&item.node, element));
            }
            ValueKind::Word(word) | ValueKind::Text(word) => self.word(word, value.span, kind),
            ValueKind::Null | ValueKind::Bool(_) | ValueKind::Invalid => {}
        }
    }

    /// A word is a number's name where a number may stand, and `ea.count` names `ea`.
    fn word(&mut self, word: &str, span: Span, kind: Option<Type>) {
        let first = word.split('.').next().unwrap_or_default();
        let wanted = match kind {
            Some(kind) if field(&kind) => Kind::Component,
            Some(kind) if kind.numeric() => Kind::Number,
            _ => return,
        };
        if self.all.iter().any(|s| s.defines && s.kind == wanted && s.name == first) {
            self.add(wanted, first, span, false);
        }
    }

    fn arith(&mut self, arith: &Arith) {
        match &arith.kind {
            ArithKind::Name(name) => self.add(Kind::Number, name, arith.span, false),
            ArithKind::Negate(inner) | ArithKind::Group(inner) => self.arith(inner),
            ArithKind::Binary(_, left, right) => {
                self.arith(left);
                self.arith(right);
            }
            ArithKind::Literal(_) | ArithKind::Invalid => {}
        }
    }

    fn layer(&mut self, layer: &Layer) {
        match &layer.kind {
            LayerKind::Component(name) => self.add(Kind::Component, name, layer.span, false),
            LayerKind::Sequential(terms) | LayerKind::Parallel(terms) => {
                terms.iter().for_each(|term| self.layer(term));
            }
            LayerKind::Group(inner) => self.layer(inner),
            LayerKind::Skip(arguments, inner) => {
                self.map(arguments, Some(Type::Section(&keys::SKIP)));
                self.layer(inner);
            }
            LayerKind::Statement(_) | LayerKind::Invalid => {}
        }
    }
}

/// Whether a value of that type names a field, such as `ea.count`.
fn field(kind: &Type) -> bool {
    match kind {
        Type::Field => true,
        Type::Optional(inner) => field(inner),
        Type::Either(kinds) => kinds.iter().any(field),
        _ => false,
    }
}
