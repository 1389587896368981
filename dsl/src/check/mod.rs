//! From the tree to the checked specification.
//!
//! In: a tree of any content. Out: a [`Spec`] with every default filled in, or every error of the
//! file. A wrong value is reported where it stands and read as `None` from there on, so that it
//! hides no other error and causes none.

mod body;
mod define;
mod heal;
mod looping;
mod model;
mod recipe;
mod router;
mod schedule;
mod statement;
pub(crate) mod suite;
mod transplant;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use indexmap::IndexMap;

use crate::ast::*;
use crate::define::Definition;
use crate::diagnostic::Diagnostic;
use crate::grammar::LONGEST_NAME;
use crate::keys::{self, Fallback, Range, Section, Type};
use crate::number::{self, Lets, Number};
use crate::source::{SourceMap, Span};
use crate::spec::Spec;
use crate::suggest::{closest, listing, meant};

/// Sizes are below this.
const MAX_SIZE: i128 = 1 << 48;

/// A group of keys being read: a map, the table of its keys, and where it is.
pub(crate) struct Group<'a> {
    section: &'static Section,
    map: Option<&'a Map>,
    /// A value that stands for one key of the group.
    short: Option<&'a Value>,
    path: String,
    /// The token to point at for what is missing.
    at: Span,
    /// Keys that unknown ones seem to stand for: that they are missing is the same mistake.
    meant: Vec<&'static str>,
}

impl Group<'_> {
    /// The path of one of its keys.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }
}

pub(crate) struct Checker {
    pub(crate) sources: SourceMap,
    pub(crate) found: Vec<Diagnostic>,
    lets: Lets,
    known: Known,
    /// The definitions of the file.
    definitions: IndexMap<String, Arc<Definition>>,
    /// Names of definitions that are wrong, which was reported.
    broken: HashSet<String>,
    /// The dimensions of values of definitions, at their tokens.
    pub(crate) hints: Vec<(Span, String)>,
    /// Definitions that components are made by.
    used: HashSet<String>,
}

/// Facts that other sections are checked against, known even where the model has errors elsewhere.
#[derive(Default)]
struct Known {
    vocab: Option<u64>,
    context: Option<u64>,
    components: Vec<(String, &'static Section)>,
    /// Components that definitions make, with their settings.
    defined: Vec<(String, Vec<String>)>,
    /// Whether the stream is one of sources.
    attends: bool,
    /// Whether it is one of lanes.
    lanes: bool,
    /// Whether every application of a layer has weights by which the stream is wired.
    turns: bool,
    /// Whether a layer stands in a `recur`.
    recurrent: Option<bool>,
    /// Outermost `recur`s, where the whole body is right.
    outermost: Option<usize>,
    /// Whether a `recur` draws its depth.
    drawn: bool,
    /// How many passes have weights, where those of the outermost `recur` have their own.
    passes: Option<u64>,
    /// Steps that are trained, where they are written and right.
    steps: Option<u64>,
}

/// The value of a key: as written, or the table's default.
enum Setting<'a> {
    Written(&'a Value),
    Default(&'static str),
    Absent,
}

impl Checker {
    pub(crate) fn new(sources: SourceMap) -> Checker {
        Checker {
            sources,
            found: Vec::new(),
            lets: Lets::default(),
            known: Known::default(),
            definitions: IndexMap::new(),
            broken: HashSet::new(),
            hints: Vec::new(),
            used: HashSet::new(),
        }
    }

    /// The specification; `None` where an error was found.
    pub(crate) fn spec(&mut self, root: &Map) -> Option<Spec> {
        let at = root.items.first().map_or(Span::new(0, 0), |item| item.node.key.span);
        let group = self.group(&keys::SPEC, root, String::new(), at);
        self.lets(&group);
        self.definitions(&group);
        if self.has(&group, "base") {
            let help = "write the whole specification, or a file";
            self.error_at(
                "bad-base",
                "base",
                "a `base` is read with the file that names it; this is no file",
                help,
            );
        } else if !self.has(&group, "model") {
            let help =
                "write it; `model`: the architecture (the keys of *model*), or name a `base` that has one";
            self.error("missing-key", group.at, "`model` is missing in spec", help);
        }
        let weights = self.text_or_none(&group, "weights");
        let transplant = self.section(&group, "transplant").map(|group| self.transplant(&group));
        let heal = self.section(&group, "heal").map(|group| self.heal(&group));
        self.known.steps = self.peek(&group, "train", "steps");
        let model = self.section(&group, "model").and_then(|mut model| {
            // A key of the model that stands outside it is one mistake.
            let outside = root.items.iter().filter_map(|item| keys::MODEL.key(&item.node.key.text));
            model.meant.extend(outside.map(|key| key.name).filter(|name| keys::SPEC.key(name).is_none()));
            self.model(&model)
        });
        let data = self.section(&group, "data").map(|group| self.data(&group));
        let recipe = self.section_or_default(&group, "train", &keys::TRAIN);
        let train = self.train(&recipe);
        let eval = self.section_or_default(&group, "eval", &keys::EVAL);
        let eval = self.eval(&eval);
        let matching = self.section(&group, "match").map(|group| self.matching(&group));
        self.unused_lets(&group);
        self.unused_definitions();
        let mut spec = Spec {
            weights: weights?,
            transplant: flip(transplant)?,
            heal: flip(heal)?,
            model: model?,
            data: flip(data)?,
            train: train?,
            eval: eval?,
            matching: flip(matching)?,
            sources: SourceMap::default(),
        };
        self.preferences(&spec);
        self.teams(&spec, &recipe);
        let bad = spec.train.transfer.as_ref().and_then(|transfer| transfer.bad(&spec.model));
        if let Some(bad) = bad {
            self.error_at("bad-base", &format!("train.transfer.{}", bad.field), bad.message, bad.help);
            return None;
        }
        spec.carry();
        self.healed(&spec)?;
        Some(spec)
    }

    /// A whole number of a section that is read later, where it will be found right.
    fn peek(&self, group: &Group, section: &str, key: &str) -> Option<u64> {
        let value = &self.written(group, section)?.as_map()?.get(key)?.value;
        let number = match &value.kind {
            ValueKind::Number(arith) => number::evaluate(arith, &self.lets, &mut Vec::new())?,
            ValueKind::Word(word) => number::named(word, value.span, &self.lets, &mut Vec::new())?,
            _ => return None,
        };
        number.whole().and_then(|whole| u64::try_from(whole).ok())
    }

    // Diagnostics ---------------------------------------------------------------------------------

    fn error(&mut self, code: &'static str, span: Span, message: impl Into<String>, help: impl Into<String>) {
        self.found.push(Diagnostic::error(code, message).on(span).help(help));
    }

    fn warning(
        &mut self,
        code: &'static str,
        span: Span,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        self.found.push(Diagnostic::warning(code, message).on(span).help(help));
    }

    /// An error about a field, at its token.
    pub(crate) fn error_at(
        &mut self,
        code: &'static str,
        path: &str,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let span = self.sources.locate(path).unwrap_or_default();
        self.error(code, span, message, help);
    }

    pub(crate) fn wrong_type(&mut self, key: &str, kind: &Type, value: &Value) {
        if value.kind == ValueKind::Invalid {
            return;
        }
        let expected = format!("expected: {}", kind.describe());
        let mut message = match &value.kind {
            ValueKind::Null => format!("`{key}` has no value"),
            _ => format!("{} is not right for `{key}`", capital(&value.describe())),
        };
        let mut help = expected.clone();
        if let (ValueKind::Word(word) | ValueKind::Text(word), Some(words)) = (&value.kind, words(kind)) {
            message = format!("`{word}` is not a value of `{key}`");
            if let Some(known) = closest(word, words.iter().map(|(word, _)| *word)) {
                help = format!("did you mean `{known}`? ({expected})");
            }
        }
        self.error("wrong-type", value.span, message, help);
    }

    /// A warning about a field, at its token.
    fn warning_at(
        &mut self,
        code: &'static str,
        path: &str,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let span = self.sources.locate(path).unwrap_or_default();
        self.warning(code, span, message, help);
    }

    /// Refuses a name that files and folders could not be called by, so that none is written
    /// outside its folder.
    fn folder_name(&mut self, name: Option<&str>, path: &str, of: &str) {
        let Some(name) = name else { return };
        let right = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !name.bytes().all(right) || name.starts_with(['-', '.']) {
            let help = "write letters, digits, `-`, `_` and `.`, beginning with a letter, a digit or `_`";
            self.error_at("bad-name", path, format!("`{name}` cannot be the name of a {of}"), help);
        } else if name.len() > LONGEST_NAME {
            let message = format!("the name of the {of} has {} letters", name.len());
            self.error_at("bad-name", path, message, format!("at most {LONGEST_NAME} are read"));
        }
    }

    // Groups --------------------------------------------------------------------------------------

    /// A group over a map: reports keys that are unknown or written twice, and notes the token of
    /// every field.
    fn group<'a>(&mut self, section: &'static Section, map: &'a Map, path: String, at: Span) -> Group<'a> {
        let mut seen: HashMap<&str, Span> = HashMap::new();
        let mut meant = Vec::new();
        for item in &map.items {
            let key = &item.node.key;
            if let Some(first) = seen.insert(&key.text, key.span) {
                let error = Diagnostic::error("duplicate-key", format!("`{}` is written twice", key.text));
                self.found.push(error.on(key.span).related(first, "first here").help("take one away"));
            }
            if section.key(&key.text).is_none() {
                meant.extend(self.unknown_key(section, &item.node));
            }
        }
        let group = Group { section, map: Some(map), short: None, path, at, meant };
        self.note_fields(&group);
        group
    }

    /// Reports a key that does not exist; gives the key that it seems to stand for.
    fn unknown_key(&mut self, section: &'static Section, pair: &Pair) -> Option<&'static str> {
        let key = &pair.key;
        let message = format!("`{}` is not a key of {}", key.text, section.name);
        let names: Vec<&'static str> = section.keys.iter().map(|key| key.name).collect();
        // Words that begin a layer are not keys of the model, but stand where keys do.
        let layers: &[&'static str] =
            if std::ptr::eq(section, &keys::MODEL) { &["repeat", "recur", "layer"] } else { &[] };
        let meant = meant(&key.text, &[&names[..], layers].concat());
        let help = match meant {
            Some("repeat" | "recur" | "layer") if !layers.is_empty() => {
                let word = meant.unwrap_or_default();
                match word {
                    "layer" => "did you mean `layer`? Write `layer { sa > mlp }`".to_string(),
                    _ => {
                        let count = match &pair.value.kind {
                            ValueKind::Number(Arith { kind: ArithKind::Literal(count), .. }) => count,
                            _ => "12",
                        };
                        let what = match closest(&key.text, [word]) {
                            Some(_) => format!("did you mean `{word}`? Write"),
                            None => "layers are written in the body, and repeated there: write".into(),
                        };
                        format!(
                            "{what} `{word} {count} {{ sa > mlp }}` (YAML: `body: [{{{word}: {count}, layers: [sa > mlp]}}]`)"
                        )
                    }
                }
            }
            Some("betas") if key.text != "betas" => {
                "AdamW's keys are `betas`, `eps` and `weight_decay`".to_string()
            }
            Some(known) => format!("did you mean `{known}`?"),
            None => match elsewhere(section, &key.text) {
                Some(place) => format!("`{}` belongs to {place}", key.text),
                None => format!("its keys are {}", listing(names.iter().copied()).replace(" or ", " and ")),
            },
        };
        self.error("unknown-key", key.span, message, help);
        // A layer that was not read as one leaves the body empty.
        meant.map(|word| if layers.contains(&word) { "body" } else { word })
    }

    fn note_fields(&mut self, group: &Group) {
        if !group.path.is_empty() {
            self.sources.fields.entry(group.path.clone()).or_insert(group.at);
        }
        for key in group.section.keys {
            let span = match self.written(group, key.name) {
                Some(value) => value.span,
                None => group.at,
            };
            self.sources.fields.insert(group.path(key.name), span);
        }
    }

    pub(crate) fn written<'a>(&self, group: &Group<'a>, key: &str) -> Option<&'a Value> {
        if group.section.short == Some(key)
            && let Some(value) = group.short
        {
            return Some(value);
        }
        group.map.and_then(|map| map.get(key)).map(|pair| &pair.value)
    }

    /// The group of keys under a key, where it is written; reports a required one that is not.
    pub(crate) fn section<'a>(&mut self, group: &Group<'a>, key: &'static str) -> Option<Group<'a>> {
        let entry = group.section.key(key)?;
        let section = entry.kind.section()?;
        match self.setting(group, key)? {
            Setting::Written(value) => {
                let token = group.map.and_then(|map| map.get(key)).map_or(value.span, |pair| pair.key.span);
                self.section_of(section, &entry.kind, key, value, group.path(key), token)
            }
            _ => None,
        }
    }

    /// The group of keys that a value holds or, where the section has a short form, stands for.
    fn section_of<'a>(
        &mut self,
        section: &'static Section,
        kind: &Type,
        key: &str,
        value: &'a Value,
        path: String,
        at: Span,
    ) -> Option<Group<'a>> {
        match &value.kind {
            ValueKind::Map(map) => Some(self.group(section, map, path, at)),
            ValueKind::Null | ValueKind::List(_) | ValueKind::Layer(_) | ValueKind::Invalid => {
                self.wrong_type(key, kind, value);
                None
            }
            _ if section.short.is_some() => {
                let group =
                    Group { section, map: None, short: Some(value), path, at: value.span, meant: Vec::new() };
                self.note_fields(&group);
                Some(group)
            }
            _ => {
                self.wrong_type(key, kind, value);
                None
            }
        }
    }

    /// The group of keys under a key; an empty one, all defaults, where it is not written.
    pub(crate) fn section_or_default<'a>(
        &mut self,
        group: &Group<'a>,
        key: &'static str,
        section: &'static Section,
    ) -> Group<'a> {
        if let Some(section) = self.section(group, key) {
            return section;
        }
        let group =
            Group { section, map: None, short: None, path: group.path(key), at: group.at, meant: Vec::new() };
        self.note_fields(&group);
        group
    }

    pub(crate) fn has(&self, group: &Group, key: &str) -> bool {
        self.written(group, key).is_some()
    }

    /// Whether `none` is written.
    pub(crate) fn is_none(&self, group: &Group, key: &str) -> bool {
        self.written(group, key).is_some_and(is_none)
    }

    /// The value set for a key; `None` where it is required and missing, which is reported.
    fn setting<'a>(&mut self, group: &Group<'a>, key: &'static str) -> Option<Setting<'a>> {
        let entry = group.section.key(key);
        debug_assert!(entry.is_some(), "`{key}` is not in the table of {}", group.section.name);
        if let Some(value) = self.written(group, key) {
            return Some(Setting::Written(value));
        }
        let entry = entry?;
        match entry.default {
            Fallback::Value(text) => Some(Setting::Default(text)),
            Fallback::Absent | Fallback::Rule(_) => Some(Setting::Absent),
            Fallback::Required if group.meant.contains(&key) => None,
            Fallback::Required => {
                self.missing(group, key);
                None
            }
        }
    }

    /// Reports that a key is not there.
    fn missing(&mut self, group: &Group, key: &'static str) {
        let Some(entry) = group.section.key(key).filter(|_| !group.meant.contains(&key)) else { return };
        let message = format!("`{key}` is missing in {}", group.section.name);
        let help = format!("`{key}`: {}", decapital(entry.doc));
        let help = format!("write it; {help} ({})", entry.kind.describe());
        self.error("missing-key", group.at, message, help);
    }

    /// The key as the author knows it: `schedule` where `schedule: cosine` stands for its `kind`.
    fn label<'k>(group: &'k Group, key: &'k str) -> &'k str {
        let short = group.short.is_some() && group.section.short == Some(key);
        if short { group.path.rsplit('.').next().unwrap_or(key) } else { key }
    }

    pub(crate) fn kind(group: &Group, key: &str) -> Type {
        group.section.key(key).map_or(Type::Any, |key| key.kind)
    }

    // Scalars: `None` where the value is wrong, which is reported, or absent ----------------------

    fn number(&mut self, key: &str, kind: &Type, value: &Value) -> Option<Number> {
        match &value.kind {
            ValueKind::Number(arith) => number::evaluate(arith, &self.lets, &mut self.found),
            ValueKind::Word(word)
                if !word.contains('.') && word != "none" && self.lets.names().next().is_some() =>
            {
                number::named(word, value.span, &self.lets, &mut self.found)
            }
            ValueKind::Word(word) if words(kind).is_none() => {
                let help = crate::suggest::elsewhere(key, word).unwrap_or_else(|| {
                    format!("expected: {}, or a name that `let` gives a number", kind.describe())
                });
                self.error("wrong-type", value.span, format!("`{word}` is not a value of `{key}`"), help);
                None
            }
            _ => {
                self.wrong_type(key, kind, value);
                None
            }
        }
    }

    pub(crate) fn whole(&mut self, key: &str, kind: &Type, min: u64, value: &Value) -> Option<u64> {
        let number = self.number(key, kind, value)?;
        let range = |size: &str| format!("`{key}` is {size}: {number}");
        let limit = "sizes are below 2^48";
        match number.whole() {
            None if number.real() >= MAX_SIZE as f64 => {
                self.error("out-of-range", value.span, range("too large"), limit)
            }
            None => {
                let help = format!("expected: {}", kind.describe());
                self.error(
                    "out-of-range",
                    value.span,
                    format!("`{key}` is not a whole number: {number}"),
                    help,
                );
            }
            Some(whole) if whole >= MAX_SIZE => {
                self.error("out-of-range", value.span, range("too large"), limit)
            }
            Some(whole) if whole < i128::from(min) => {
                let help = format!("expected: {}", kind.describe());
                self.error("out-of-range", value.span, range("too small"), help);
            }
            Some(whole) => return u64::try_from(whole).ok(),
        }
        None
    }

    fn real_of(&mut self, key: &str, kind: &Type, range: Range, value: &Value) -> Option<f64> {
        let number = self.number(key, kind, value)?.real();
        if range.holds(number) {
            return Some(number);
        }
        let help = format!("expected: number, {}", range.describe());
        self.error("out-of-range", value.span, format!("`{key}` is out of range: {number}"), help);
        None
    }

    /// A whole number.
    pub(crate) fn int(&mut self, group: &Group, key: &'static str) -> Option<u64> {
        let kind = Self::kind(group, key);
        match self.setting(group, key)? {
            Setting::Written(value) => self.whole(Self::label(group, key), &kind, least(&kind), value),
            Setting::Default(text) => {
                number::literal(text)?.whole().and_then(|value| u64::try_from(value).ok())
            }
            Setting::Absent => None,
        }
    }

    /// A whole number or `none`: `Some(None)` for none.
    pub(crate) fn int_or_none(&mut self, group: &Group, key: &'static str) -> Option<Option<u64>> {
        if self.is_none(group, key) || !self.has(group, key) {
            return Some(None);
        }
        self.int(group, key).map(Some)
    }

    /// A number.
    fn real(&mut self, group: &Group, key: &'static str) -> Option<f64> {
        let kind = Self::kind(group, key);
        match self.setting(group, key)? {
            Setting::Written(value) => self.real_of(Self::label(group, key), &kind, range(&kind), value),
            Setting::Default(text) => number::literal(text).map(Number::real),
            Setting::Absent => None,
        }
    }

    /// A number or `none`: `Some(None)` for none.
    pub(crate) fn real_or_none(&mut self, group: &Group, key: &'static str) -> Option<Option<f64>> {
        if self.is_none(group, key) {
            return Some(None);
        }
        match self.setting(group, key)? {
            Setting::Absent | Setting::Default("none") => Some(None),
            _ => self.real(group, key).map(Some),
        }
    }

    pub(crate) fn bool(&mut self, group: &Group, key: &'static str) -> Option<bool> {
        match self.setting(group, key)? {
            Setting::Written(Value { kind: ValueKind::Bool(value), .. }) => Some(*value),
            // A flag written alone is set: `tie`, `equal: {tokens, order}`.
            Setting::Written(Value { kind: ValueKind::Null, .. }) => Some(true),
            Setting::Written(value) => {
                self.wrong_type(key, &Type::Bool, value);
                None
            }
            Setting::Default(text) => Some(text == "true"),
            Setting::Absent => None,
        }
    }

    /// One of the words of the table.
    pub(crate) fn word(&mut self, group: &Group, key: &'static str) -> Option<&'static str> {
        let kind = Self::kind(group, key);
        let words = words(&kind)?;
        let known = |text: &str| words.iter().map(|(word, _)| *word).find(|word| *word == text);
        match self.setting(group, key)? {
            Setting::Written(value) => {
                let word = if let ValueKind::Word(word) = &value.kind { known(word) } else { None };
                if word.is_none() {
                    self.wrong_type(Self::label(group, key), &kind, value);
                }
                word
            }
            Setting::Default(text) => known(text),
            Setting::Absent => None,
        }
    }

    /// One of the words of a key, or none.
    pub(crate) fn word_or_none(&mut self, group: &Group, key: &'static str) -> Option<Option<&'static str>> {
        if self.is_none(group, key) || !self.has(group, key) {
            return Some(None);
        }
        self.word(group, key).map(Some)
    }

    fn text(&mut self, group: &Group, key: &'static str) -> Option<String> {
        let kind = Self::kind(group, key);
        match self.setting(group, key)? {
            Setting::Written(value) => self.text_of(Self::label(group, key), &kind, value),
            Setting::Default(text) => Some(text.to_string()),
            Setting::Absent => None,
        }
    }

    pub(crate) fn text_or_none(&mut self, group: &Group, key: &'static str) -> Option<Option<String>> {
        if self.is_none(group, key) || !self.has(group, key) {
            return Some(None);
        }
        self.text(group, key).map(Some)
    }

    fn text_of(&mut self, key: &str, kind: &Type, value: &Value) -> Option<String> {
        match &value.kind {
            ValueKind::Word(text) | ValueKind::Text(text) if !text.trim().is_empty() => Some(text.clone()),
            ValueKind::Text(_) => {
                self.error(
                    "wrong-type",
                    value.span,
                    format!("`{key}` is empty"),
                    format!("expected: {}", kind.describe()),
                );
                None
            }
            ValueKind::Number(_) => {
                let help = "put the text in quotes";
                self.error(
                    "wrong-type",
                    value.span,
                    format!("{} is not a text", capital(&value.describe())),
                    help,
                );
                None
            }
            _ => {
                self.wrong_type(key, kind, value);
                None
            }
        }
    }

    /// The elements of a list, with their paths; nothing where it is not written.
    pub(crate) fn elements<'a>(
        &mut self,
        group: &Group<'a>,
        key: &'static str,
    ) -> Option<Vec<(&'a Value, String)>> {
        let path = group.path(key);
        match self.setting(group, key)? {
            Setting::Written(Value { kind: ValueKind::List(list), .. }) => {
                let elements = list.items.iter().map(|item| &item.node).enumerate();
                let elements: Vec<_> =
                    elements.map(|(index, value)| (value, format!("{path}[{index}]"))).collect();
                for (value, path) in &elements {
                    self.sources.fields.insert(path.clone(), value.span);
                }
                Some(elements)
            }
            Setting::Written(value) => {
                self.wrong_type(key, &Self::kind(group, key), value);
                None
            }
            _ => Some(Vec::new()),
        }
    }

    // Names for numbers ---------------------------------------------------------------------------

    fn lets(&mut self, group: &Group) {
        let kind = Self::kind(group, "let");
        let Some(value) = self.written(group, "let") else { return };
        let ValueKind::Map(map) = &value.kind else {
            self.wrong_type("let", &kind, value);
            return;
        };
        for item in &map.items {
            let Pair { key, value } = &item.node;
            if !is_word(&key.text) || key.text.contains('.') || matches!(key.text.as_str(), "none" | "let") {
                let help = "a name has letters, digits and `_`, and begins with a letter";
                self.error("bad-name", key.span, format!("`{}` cannot be a name", key.text), help);
                continue;
            }
            if self.lets.names().any(|name| name == key.text) {
                let help = "choose another name";
                self.error("duplicate-key", key.span, format!("`{}` is defined twice", key.text), help);
                continue;
            }
            self.sources.fields.insert(format!("let.{}", key.text), value.span);
            let number = self.number(&key.text, &Type::Real(Range::Any), value);
            self.lets.define(&key.text, number);
        }
    }

    fn unused_lets(&mut self, group: &Group) {
        let unused: Vec<String> = self.lets.unused().map(str::to_string).collect();
        let map = self.written(group, "let").and_then(Value::as_map);
        for name in unused {
            if let Some(pair) = map.and_then(|map| map.get(&name)) {
                self.warning(
                    "unused-name",
                    pair.key.span,
                    format!("`{name}` is never used"),
                    "take it away, or use it",
                );
            }
        }
    }
}

/// `Some(None)` for what is absent and right.
fn flip<T>(value: Option<Option<T>>) -> Option<Option<T>> {
    match value {
        None => Some(None),
        Some(None) => None,
        Some(Some(value)) => Some(Some(value)),
    }
}

fn is_none(value: &Value) -> bool {
    matches!(&value.kind, ValueKind::Null) || matches!(&value.kind, ValueKind::Word(word) if word == "none")
}

fn least(kind: &Type) -> u64 {
    match kind {
        Type::Int { min } => *min,
        Type::Optional(inner) => least(inner),
        _ => 0,
    }
}

fn range(kind: &Type) -> Range {
    match kind {
        Type::Real(range) => *range,
        Type::Optional(inner) => range(inner),
        Type::Either(kinds) => {
            kinds.iter().map(range).find(|range| *range != Range::Any).unwrap_or(Range::Any)
        }
        _ => Range::Any,
    }
}

/// The words that a value of this type can be.
pub(crate) fn words(kind: &Type) -> Option<&'static [(&'static str, &'static str)]> {
    match kind {
        Type::Word(words) => Some(words),
        Type::Optional(inner) => words(inner),
        Type::Either(kinds) => kinds.iter().find_map(words),
        Type::Section(section) => {
            section.short.and_then(|short| section.key(short)).and_then(|key| words(&key.kind))
        }
        _ => None,
    }
}

/// Where a key that is unknown here would be at home.
fn elsewhere(section: &Section, key: &str) -> Option<String> {
    let own = section.keys.iter().filter_map(|entry| Some((entry.name, entry.kind.section()?)));
    let mut inner = own.filter(|(_, inner)| inner.key(key).is_some());
    if let Some((name, _)) = inner.next() {
        return Some(format!("`{name}`"));
    }
    let others: [&Section; 4] = [&keys::MODEL, &keys::TRAIN, &keys::DATA, &keys::EVAL];
    let mut kinds = keys::COMPONENTS.into_iter().chain(others);
    kinds.find(|other| other.key(key).is_some()).map(|other| format!("*{}*", other.name))
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    match letters.next() {
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => String::new(),
    }
}

fn decapital(text: &str) -> String {
    let mut letters = text.chars();
    match letters.next() {
        Some(first) => {
            first.to_lowercase().chain(letters).collect::<String>().trim_end_matches('.').to_string()
        }
        None => String::new(),
    }
}
