//! The `.dream` spelling: its blocks and its shorter forms, put into the shape of the tree.

use crate::ast::*;
use crate::comments;
use crate::diagnostic::Diagnostic;
use crate::grammar::{Lowering, Node, Rule, broken, extent, key_names, short_text};
use crate::keys::{self, Section, Type};
use crate::source::{SourceMap, Span};

/// Reads the sections of a file. Errors go to `found`.
pub(crate) fn read(source: &SourceMap, found: &mut Vec<Diagnostic>) -> Option<(FileKind, Map)> {
    let mut lowering = Lowering { at: &|offset| offset, found };
    let file = lowering.file(&source.text)?;
    let key_is = |node: &Node, names: &[&str]| {
        node.as_rule() == Rule::pair
            && node.clone().into_inner().next().is_some_and(|key| names.contains(&key.as_str()))
    };
    let mut nodes = file.clone().into_inner();
    let model = nodes.clone().any(|node| node.as_rule() == Rule::model);
    let suite = !model && nodes.any(|node| key_is(&node, &["variants", "baseline"]));
    let (kind, section) = match suite {
        true => (FileKind::Suite, &keys::SUITE),
        false => (FileKind::Spec, &keys::SPEC),
    };
    let mut map = Map { span: Span::new(0, source.text.len()), broken: true, ..Map::default() };
    lowering.entries(file, Some(Type::Section(section)), &mut map);
    let code = comments::code(&map);
    let mut comments = comments::in_dream(&source.text);
    comments.retain(|comment| !code.iter().any(|span| span.contains(comment.at)));
    comments::attach(&mut map, &source.text, Spelling::Dream, comments);
    Some((kind, map))
}

/// Reads one value, as the right side of a default is.
pub(crate) fn read_value(text: &str, kind: Option<Type>, found: &mut Vec<Diagnostic>) -> Value {
    let source = format!("rope {text}");
    let mut lowering = Lowering { at: &|offset| offset.saturating_sub("rope ".len()), found };
    let invalid = Value::new(ValueKind::Invalid, Span::default());
    let Some(file) = lowering.file(&source) else { return invalid };
    let Some(pair) = file.into_inner().find(|node| node.as_rule() == Rule::pair) else { return invalid };
    match pair.into_inner().find(|node| matches!(node.as_rule(), Rule::value | Rule::flagged)) {
        Some(value) => lowering.value(value, kind),
        None => invalid,
    }
}

/// Reads the keys of a component between braces, as they stand in a definition.
pub(crate) fn read_keys(
    text: &str,
    at: &dyn Fn(usize) -> usize,
    kind: Option<Type>,
    found: &mut Vec<Diagnostic>,
) -> Map {
    let mut lowering = Lowering { at, found };
    let block = lowering.parse(Rule::block, text);
    block.map_or_else(Map::default, |block| lowering.block(block, kind))
}

fn is(kind: Option<Type>, section: &Section) -> bool {
    kind.and_then(|kind| kind.section()).is_some_and(|own| std::ptr::eq(own, section))
}

impl Lowering<'_> {
    /// The pairs between two braces.
    pub(crate) fn block(&mut self, node: Node, kind: Option<Type>) -> Map {
        let span = self.span(&node);
        let mut map = Map { span, broken: broken(node.as_str()), ..Map::default() };
        self.entries(node, kind, &mut map);
        map
    }

    fn entries(&mut self, node: Node, kind: Option<Type>, map: &mut Map) {
        let open = !matches!(node.as_rule(), Rule::file | Rule::open_model | Rule::component_parens);
        let input = node.get_input();
        let start = extent(&node).0;
        let mut closed = !open;
        // A `}` too many ends the model early: what follows is the model's all the same.
        let early = node.as_rule() == Rule::file
            && node.clone().into_inner().any(|part| part.as_rule() == Rule::brace_stray);
        // Whether the entry before is a key that does not exist: braces after it are its own.
        let mut unknown = false;
        // Up to there, what cannot be read follows from the error before.
        let mut slip = 0;
        let mut parts = node.into_inner().peekable();
        while let Some(part) = parts.next() {
            let at = self.span(&part);
            let (from, rule) = (part.as_span().start(), part.as_rule());
            let stranger = std::mem::take(&mut unknown);
            if early && self.belongs_to_model(&part, map) {
                continue;
            }
            match rule {
                Rule::pair => {
                    if is(kind, &keys::MODEL)
                        && let Some(block) = parts.next_if(|next| is_component(&part, next))
                    {
                        self.without_equals(part, block, map);
                        continue;
                    }
                    let pair = self.pair(part, kind);
                    if pair.value.kind == ValueKind::Null && is(kind, &keys::MODEL) && defined(map, &pair.key)
                    {
                        let layer = Layer { kind: LayerKind::Component(pair.key.text), span: at };
                        add_to_body(map, at, [Value::new(ValueKind::Layer(layer), at)]);
                        continue;
                    }
                    let known =
                        kind.and_then(|k| k.section()).is_none_or(|s| s.key(&pair.key.text).is_some());
                    if from < slip && (!known || pair.value.kind == ValueKind::Null) {
                        continue;
                    }
                    unknown = !known;
                    let pair = self.section_in_braces(pair, kind, input, &mut slip);
                    map.items.push(Item::new(pair));
                }
                Rule::define if is(kind, &keys::MODEL) => {
                    let help = "move it above `model`";
                    let keyword = Span::new(at.start, at.start + "define".len());
                    self.error(keyword, "a definition stands in the model", help);
                }
                Rule::define => self.define(part, map),
                Rule::let_ => self.let_(part, map),
                Rule::model => self.model(part, kind, map),
                Rule::definition => self.definition(part, kind, map),
                Rule::bare | Rule::statement if from < slip => {}
                Rule::repeat | Rule::recur | Rule::layer | Rule::body | Rule::statement | Rule::bare => {
                    if has_no_layers(&part) {
                        slip = line_end(input, from);
                    }
                    self.body_item(part, kind, map);
                }
                Rule::close_brace => closed = true,
                Rule::hash => self.comment(at),
                Rule::stray => {
                    if from >= slip {
                        self.stray(&part, kind, map, stranger);
                    }
                    slip = line_end(input, from);
                }
                Rule::stray_block if stranger || from < slip => {
                    let mut ignored = Vec::new();
                    let mut silent = Lowering { at: self.at, found: &mut ignored };
                    silent.entries(part, None, &mut Map::default());
                }
                Rule::stray_block => {
                    self.error(
                        Span::new(at.start, at.start + 1),
                        "this group has no key",
                        "write its key before it",
                    );
                    self.entries(part, None, &mut Map::default());
                }
                Rule::brace_stray => self.brace_stray(at, map),
                _ => {}
            }
        }
        if !closed {
            self.unclosed(input, start);
        }
    }

    /// A text that stands where a key should be. After a key without a value it is the value's
    /// mistake, after a key that does not exist it is the key's.
    fn stray(&mut self, node: &Node, kind: Option<Type>, map: &mut Map, stranger: bool) {
        let (at, text) = (self.span(node), node.as_str());
        if stranger {
            return;
        }
        let before = |pair: &Pair| {
            let between = node.get_input().get(pair.key.span.end..node.as_span().start()).unwrap_or("\n");
            pair.value.kind == ValueKind::Null && between.chars().all(|c| c == ' ' || c == '\t')
        };
        if let Some(key) = value_left_out(kind, map, self.span(node).start) {
            map.items.push(Item::new(Pair { value: Value::new(ValueKind::Invalid, at), key }));
            return;
        }
        let last = map.items.last_mut().map(|item| &mut item.node).filter(|pair| before(pair));
        let key = last.as_ref().and_then(|pair| kind?.section()?.key(&pair.key.text));
        if let (Some(pair), Some(key)) = (last, key) {
            pair.value.kind = ValueKind::Invalid;
            let message = format!("`{text}` is not right for `{}`", key.name);
            self.error(at, message, format!("expected: {}", key.kind.describe()));
            return;
        }
        let help = "keys and values alternate: `vocab 256  hidden 64`";
        self.error(at, format!("`{text}` stands where a key should be"), help);
    }

    /// A section such as `train steps 10` without its braces is reported, with the line.
    fn section_in_braces(&mut self, pair: Pair, kind: Option<Type>, input: &str, slip: &mut usize) -> Pair {
        let outermost = is(kind, &keys::SPEC) || is(kind, &keys::SUITE);
        let section = kind.filter(|_| outermost).and_then(|kind| kind.child(&pair.key.text)?.section());
        let bare = matches!(pair.value.kind, ValueKind::Word(_) | ValueKind::Text(_));
        let own = |section: &Section, value: &Value| match &value.kind {
            ValueKind::Word(word) | ValueKind::Text(word) => section.key(word).is_some(),
            _ => false,
        };
        if !section.is_some_and(|section| bare && own(section, &pair.value)) {
            return pair;
        }
        let end = line_end(input, pair.key.span.start);
        let rest = input.get(pair.value.span.start..end).unwrap_or("").trim_end();
        let message = format!("the keys of `{}` stand without braces", pair.key.text);
        self.error(pair.key.span, message, format!("write `{} {{ {rest} }}`", pair.key.text));
        *slip = end;
        Pair { value: Value::new(ValueKind::Invalid, pair.value.span), ..pair }
    }

    /// A component without its `=`.
    fn without_equals(&mut self, pair: Node, block: Node, map: &mut Map) {
        let span = self.span(&pair).to(self.span(&block));
        let mut parts = pair.into_inner();
        let key = self.key(parts.next());
        let Some(name) = parts.find(|part| part.as_rule() == Rule::value) else { return };
        let name = self.key(Some(name));
        let help = format!("write `{} = {} {{ … }}`", key.text, name.text);
        self.error(key.span.to(name.span), "a component stands without `=`", help);
        let value = self.kind_and_keys(name, block);
        add_to_group(map, "components", key.span, span, Pair { key, value });
    }

    /// Takes an entry of the file into the model above it, where it belongs; whether it does.
    fn belongs_to_model(&mut self, node: &Node, map: &mut Map) -> bool {
        let own = match node.as_rule() {
            Rule::definition
            | Rule::repeat
            | Rule::recur
            | Rule::layer
            | Rule::body
            | Rule::statement
            | Rule::bare => true,
            Rule::pair => {
                let key = node.clone().into_inner().next();
                key.is_some_and(|key| {
                    let name = key.as_str().trim_end();
                    keys::MODEL.key(name).is_some() && keys::SPEC.key(name).is_none()
                })
            }
            _ => false,
        };
        let Some(Pair { value: Value { kind: ValueKind::Map(model), .. }, .. }) = map.get_mut("model") else {
            return false;
        };
        if own {
            self.entry_of_model(node.clone(), model);
        }
        own
    }

    fn entry_of_model(&mut self, node: Node, model: &mut Map) {
        let kind = Some(Type::Section(&keys::MODEL));
        match node.as_rule() {
            Rule::pair => {
                let pair = self.pair(node, kind);
                model.items.push(Item::new(pair));
            }
            Rule::definition => self.definition(node, kind, model),
            _ => self.body_item(node, kind, model),
        }
    }

    fn brace_stray(&mut self, at: Span, map: &Map) {
        let error = Diagnostic::error("syntax", "this `}` closes nothing").on(at).help("take one away");
        let model = map.get("model").filter(|pair| pair.value.as_map().is_some());
        let end = model.map(|pair| Span::new(pair.value.span.end.saturating_sub(1), pair.value.span.end));
        self.found.push(match end {
            Some(end) => error.related(end, "`model` ends here"),
            None => error,
        });
    }

    /// A comment as YAML has it.
    fn comment(&mut self, at: Span) {
        self.error(Span::new(at.start, at.start + 1), "`#` begins no comment", "a comment begins with `//`");
    }

    fn pair(&mut self, node: Node, kind: Option<Type>) -> Pair {
        let mut parts = node.into_inner().peekable();
        let key = self.key(parts.next());
        let inner = kind.and_then(|kind| kind.child(&key.text));
        if let Some(colon) = parts.next_if(|part| part.as_rule() == Rule::colon) {
            self.colon(&colon, &key, parts.peek());
        }
        let value = match parts.next() {
            Some(part) => self.value(part, inner),
            None => Value::new(ValueKind::Null, key.span),
        };
        Pair { key, value }
    }

    fn let_(&mut self, node: Node, map: &mut Map) {
        let span = self.span(&node);
        let keyword = Span::new(span.start, span.start + "let".len());
        let (mut name, mut value) = (None, None);
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::let_key => name = Some(self.key(Some(part))),
                Rule::value => value = Some(self.value(part, Some(Type::Real(keys::Range::Any)))),
                _ => {}
            }
        }
        match (name, value) {
            (Some(key), Some(value)) => {
                add_to_group(map, "let", keyword, span, Pair { key, value });
            }
            _ => self.error(span, "this definition is not complete", "write `let depth = 16`"),
        }
    }

    /// `define name(settings) { … }` as the map that YAML has.
    pub(crate) fn define(&mut self, node: Node, map: &mut Map) {
        let span = self.span(&node);
        let keyword = Span::new(span.start, span.start + "define".len());
        let input = node.get_input();
        let (mut name, mut settings, mut code) = (None, None, None);
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::define_name => name = Some(self.key(Some(part))),
                Rule::define_settings => settings = Some(self.define_settings(part)),
                Rule::code => code = Some(self.code(part, input)),
                _ => {}
            }
        }
        let Some(key) = name else { return };
        let pair =
            |text: &str, at: Span, value| Item::new(Pair { key: Key { text: text.into(), span: at }, value });
        let mut items = Vec::new();
        if let Some(settings) =
            settings.filter(|settings: &Map| !settings.items.is_empty() || settings.commented())
        {
            let at = settings.span;
            items.push(pair("settings", at, Value::new(ValueKind::Map(settings), at)));
        }
        match code {
            Some(code) => items.push(pair("code", code.span, code)),
            None => {
                let help = format!("write `define {}(…) {{ return … }}`", key.text);
                self.error(keyword.to(key.span), "this definition has no formulas", help);
                return;
            }
        }
        let value = Value::new(ValueKind::Map(Map { items, span, broken: true, ..Map::default() }), span);
        add_to_group(map, "define", keyword, span, Pair { key, value });
    }

    fn define_settings(&mut self, node: Node) -> Map {
        let span = self.span(&node);
        let mut map = Map { span, broken: broken(node.as_str()), ..Map::default() };
        let mut closed = false;
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::define_setting => {
                    let mut parts = part.into_inner();
                    let key = self.key(parts.next());
                    let value = parts
                        .find(|part| part.as_rule() == Rule::sum)
                        .map(|part| self.value_part(part, None));
                    let value = value.unwrap_or(Value::new(ValueKind::Null, key.span));
                    map.items.push(Item::new(Pair { key, value }));
                }
                Rule::close_paren => closed = true,
                Rule::setting_stray => {
                    let help = "settings are `(heads 4, size 16, value = 2 * size)`";
                    self.error(self.span(&part), format!("`{}` does not belong here", part.as_str()), help);
                }
                _ => {}
            }
        }
        if !closed {
            self.error(Span::new(span.start, span.start + 1), "this `(` is not closed", "add `)`");
        }
        map
    }

    /// The formulas of a definition, as text.
    fn code(&mut self, node: Node, input: &str) -> Value {
        let start = extent(&node).0;
        let mut closed = false;
        let mut code = Value::new(ValueKind::Invalid, self.span(&node));
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::code_text => {
                    let (from, end) = (part.as_span().start(), part.as_span().end());
                    let text = crate::define::read::dedent(part.as_str());
                    code = Value::new(ValueKind::Text(text), Span::new((self.at)(from), (self.at)(end)));
                }
                Rule::close_brace => closed = true,
                _ => {}
            }
        }
        if !closed {
            self.unclosed(input, start);
            code.kind = ValueKind::Invalid;
        }
        code
    }

    fn model(&mut self, node: Node, kind: Option<Type>, map: &mut Map) {
        let span = self.span(&node);
        let keyword = Span::new(span.start, span.start + "model".len());
        let inner = kind.and_then(|kind| kind.child("model"));
        let mut name = None;
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::bare_name => name = Some(self.key(Some(part))),
                Rule::open_name => {
                    let key = self.key(Some(part));
                    let help = format!("write `model {} {{`", key.text);
                    self.error(keyword.to(key.span), "`model` stands without its `{`", help);
                    name = Some(key);
                }
                Rule::model_block | Rule::open_model => {
                    let mut model = self.block(part, inner);
                    model.broken = true;
                    if let Some(name) = name.take() {
                        let key = Key { text: "name".into(), span: name.span };
                        let value = Value::new(crate::grammar::text_kind(name.text), name.span);
                        model.items.insert(0, Item::new(Pair { key, value }));
                    }
                    let key = Key { text: "model".into(), span: keyword };
                    let value = Value::new(ValueKind::Map(model), span);
                    map.items.push(Item::new(Pair { key, value }));
                }
                _ => {}
            }
        }
    }

    fn definition(&mut self, node: Node, kind: Option<Type>, map: &mut Map) {
        let span = self.span(&node);
        let mut parts = node.into_inner().peekable();
        let key = self.key(parts.next());
        if let Some(colon) = parts.next_if(|part| part.as_rule() == Rule::colon) {
            let help = format!("write `{} = …`", key.text);
            self.error(self.span(&colon), "a component is defined with `=`", help);
        }
        let component = parts.peek().is_some_and(|part| part.as_rule() == Rule::kind);
        let is_key = kind.and_then(|kind| kind.section()).is_some_and(|s| s.key(&key.text).is_some());
        let in_model = is(kind, &keys::MODEL);
        if let (false, true, Some(value)) = (component, is_key || !in_model, parts.peek()) {
            let value = value.clone();
            self.equals(key, value, kind, map);
            return;
        }
        let value = match (parts.next(), parts.next()) {
            (Some(name), Some(block)) if name.as_rule() == Rule::kind => {
                let name = self.key(Some(name));
                self.kind_and_keys(name, block)
            }
            (Some(value), None) => self.value(value, None),
            _ => Value::new(ValueKind::Null, key.span),
        };
        if !in_model {
            let help = format!("write `{} …` without `=`, or define the component inside `model`", key.text);
            self.error(span, "a component is defined outside `model`", help);
            return;
        }
        add_to_group(map, "components", key.span, span, Pair { key, value });
    }

    /// A component's kind with the keys in its braces.
    fn kind_and_keys(&mut self, name: Key, block: Node) -> Value {
        let at = self.span(&block);
        if block.as_rule() == Rule::component_parens {
            let help = format!("write `{} {{ … }}`", name.text);
            self.error(at, "keys of a component stand in braces", help);
        }
        let whole = name.span.to(at);
        let keys = self.block(block, Type::Component.child(&name.text));
        let value = Value::new(ValueKind::Map(keys), whole);
        let pairs = vec![Item::new(Pair { key: name, value })];
        Value::new(ValueKind::Map(Map { items: pairs, broken: false, span: whole, ..Map::default() }), whole)
    }

    /// A key and its value with `=` between them, or a name for a number without `let`.
    fn equals(&mut self, key: Key, value: Node, kind: Option<Type>, map: &mut Map) {
        let (at, text) = (self.span(&value), short_text(&value));
        let whole = key.span.to(at);
        let section = kind.and_then(|kind| kind.section());
        if section.is_some_and(|section| section.key("let").is_some() && section.key(&key.text).is_none()) {
            let help = format!("write `let {} = {text}`", key.text);
            self.error(whole, "a number gets its name by `let`", help);
            let value = self.value(value, Some(Type::Real(keys::Range::Any)));
            add_to_group(map, "let", key.span, whole, Pair { key, value });
            return;
        }
        let help = format!("write `{} {text}`", key.text);
        self.error(whole, "a key and its value stand without `=`", help);
        let value = self.value(value, kind.and_then(|kind| kind.child(&key.text)));
        map.items.push(Item::new(Pair { key, value }));
    }

    fn body_item(&mut self, node: Node, kind: Option<Type>, map: &mut Map) {
        let span = self.span(&node);
        let word = node.as_str().split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or("").len();
        let keyword = Span::new(span.start, span.start + word);
        if !is(kind, &keys::MODEL) {
            let at = if node.as_rule() == Rule::bare { span } else { keyword };
            self.error(at, "layers stand outside `model`", "move them into the braces of `model`");
            return;
        }
        let items: Vec<Value> = match node.as_rule() {
            Rule::bare => node
                .into_inner()
                .map(|mixed| {
                    let layer = self.mixed(mixed);
                    Value::new(ValueKind::Layer(layer), span)
                })
                .collect(),
            Rule::statement => {
                let layer = self.statement(node);
                vec![Value::new(ValueKind::Layer(layer), span)]
            }
            Rule::body if node.clone().into_inner().any(|part| part.as_rule() == Rule::kw_layers) => {
                let message = "`layers` is not a key of model";
                self.error(keyword, message, "did you mean `body`?");
                vec![Value::new(ValueKind::Invalid, span)]
            }
            Rule::body => match node.into_inner().find(|part| part.as_rule() == Rule::layers) {
                Some(layers) => self.layers(layers).items.into_iter().map(|item| item.node).collect(),
                None => Vec::new(),
            },
            _ => self.item(node).into_iter().collect(),
        };
        add_to_body(map, span, items);
    }

    /// `repeat`, `recur` or `layer`.
    fn item(&mut self, node: Node) -> Option<Value> {
        let span = self.span(&node);
        if node.as_rule() == Rule::layer {
            let layers = node.into_inner().find(|part| part.as_rule() == Rule::layers)?;
            let keyword = Span::new(span.start, span.start + "layer".len());
            let before = self.found.len();
            let mut list = self.layers(layers);
            let slipped = self.found.len() > before;
            return match list.items.pop().map(|item| item.node) {
                Some(Value { kind: ValueKind::Layer(layer), span }) if list.items.is_empty() => {
                    Some(Value::new(ValueKind::Layer(layer), span))
                }
                _ if slipped => Some(Value::new(ValueKind::Invalid, span)),
                Some(_) => {
                    let help = "join the terms with `>` or `|`; `repeat` and `recur` stand outside `layer`";
                    self.error(keyword, "a layer holds one composition", help);
                    None
                }
                None => {
                    self.error(keyword, "this layer is empty", "write `layer { sa > mlp }`");
                    None
                }
            };
        }
        let word = if node.as_rule() == Rule::repeat { "repeat" } else { "recur" };
        let keyword = Span::new(span.start, span.start + word.len());
        if has_no_layers(&node) {
            let help = format!("write `{word} 2 {{ sa > mlp }}`");
            self.error(keyword, format!("the layers of `{word}` stand without braces"), help);
            return Some(Value::new(ValueKind::Invalid, span));
        }
        let mut map = Map { span, broken: true, ..Map::default() };
        let missing = Value::new(ValueKind::Null, keyword);
        map.items.push(Item::new(Pair { key: Key { text: word.into(), span: keyword }, value: missing }));
        for part in node.into_inner() {
            match part.as_rule() {
                Rule::header => self.header(part, &mut map),
                Rule::braced => {
                    let settings = if word == "recur" { " residual_norm false" } else { "" };
                    let help = format!("they stand before the braces: `{word} 3{settings} {{ sa > mlp }}`");
                    self.error(self.span(&part), format!("settings of `{word}` stand in braces"), help);
                    map.items[0].node.value.kind = ValueKind::Invalid;
                }
                Rule::layers => {
                    let at = self.span(&part);
                    let list = self.layers(part);
                    let key = Key { text: "layers".into(), span: keyword };
                    map.items.push(Item::new(Pair { key, value: Value::new(ValueKind::List(list), at) }));
                }
                _ => {}
            }
        }
        Some(Value::new(ValueKind::Map(map), span))
    }

    fn header(&mut self, node: Node, map: &mut Map) {
        let mut words = Vec::new();
        for part in node.into_inner() {
            let span = self.span(&part);
            match part.as_rule() {
                Rule::sum => {
                    let arith = self.sum(part);
                    map.items[0].node.value = Value::new(crate::grammar::scalar_kind(arith), span);
                }
                Rule::string | Rule::scalar => words.push(self.value_part(part, None)),
                _ => {}
            }
        }
        let mut words = words.into_iter().peekable();
        while let Some(word) = words.next() {
            let (ValueKind::Word(text) | ValueKind::Text(text)) = word.kind else {
                let help = format!("after the count stand settings: {}", key_names(&keys::RECUR));
                self.error(word.span, "this stands where a setting should be", help);
                continue;
            };
            let key = Key { text, span: word.span };
            let kind = keys::RECUR.key(&key.text).map(|key| key.kind);
            let value = match (key.text.as_str(), kind) {
                ("depth", _) => depths(&mut words, key.span),
                ("exit", _) => exit(&mut words, key.span),
                (_, Some(Type::Bool)) => {
                    let value = words.next_if(|next| matches!(next.kind, ValueKind::Bool(_)));
                    value.unwrap_or(Value::new(ValueKind::Bool(true), key.span))
                }
                _ => words.next().unwrap_or(Value::new(ValueKind::Null, key.span)),
            };
            map.items.push(Item::new(Pair { key, value }));
        }
    }

    fn layers(&mut self, node: Node) -> List {
        let span = self.span(&node);
        let input = node.get_input();
        let start = extent(&node).0;
        let mut list = List { span, broken: broken(node.as_str()), ..List::default() };
        let mut closed = false;
        let mut bare: Option<Span> = None;
        // Up to there, what cannot be read follows from the error before.
        let mut slip = 0;
        // Where the composition before ended, and whether a comma follows it: lines and commas part
        // compositions.
        let (mut end, mut comma) = (0, false);
        for part in node.into_inner() {
            let at = self.span(&part);
            match part.as_rule() {
                Rule::mixed => {
                    let apart = bare
                        .take_if(|_| comma || part.get_input()[end..part.as_span().start()].contains('\n'));
                    comma = false;
                    let part_start = part.as_span().start();
                    end = extent(&part).1;
                    let layer = self.mixed(part);
                    if bare.is_some() && apart.is_none() && part_start >= slip {
                        let help = "join them with `>` or `|`, or write each on a line of its own";
                        self.error(at, "two compositions stand side by side", help);
                    }
                    bare = Some(at);
                    list.items.push(Item::new(Value::new(ValueKind::Layer(layer), at)));
                }
                Rule::repeat | Rule::recur | Rule::layer => {
                    bare = None;
                    if has_no_layers(&part) {
                        slip = line_end(input, part.as_span().start());
                    }
                    list.items.extend(self.item(part).map(Item::new));
                }
                Rule::statement => {
                    bare = None;
                    let layer = self.statement(part);
                    list.items.push(Item::new(Value::new(ValueKind::Layer(layer), at)));
                }
                Rule::layer_comma => comma = true,
                Rule::close_brace => closed = true,
                Rule::hash => self.comment(at),
                Rule::layer_stray => {
                    if part.as_span().start() >= slip {
                        let help = "write a composition such as `(da | sa) > ea`, a statement, `layer`, `repeat` or `recur`";
                        self.error(at, format!("`{}` does not belong here", part.as_str()), help);
                    }
                    slip = line_end(input, part.as_span().start());
                }
                _ => {}
            }
        }
        if !closed {
            self.unclosed(input, start);
        }
        list
    }
}

/// The key that stands where the value of the last pair should (`heads window 8`): that pair then
/// has no value.
fn value_left_out(kind: Option<Type>, map: &mut Map, next: usize) -> Option<Key> {
    let section = kind?.section()?;
    let last = &mut map.items.last_mut()?.node;
    let ValueKind::Word(word) = &last.value.kind else { return None };
    let words = crate::check::words(&section.key(&last.key.text)?.kind);
    let is_value = words.is_some_and(|words| words.iter().any(|(name, _)| name == word));
    if is_value || section.key(word).is_none() || next != last.value.span.end + 1 {
        return None;
    }
    let key = Key { text: word.clone(), span: last.value.span };
    last.value = Value::new(ValueKind::Null, last.key.span);
    Some(key)
}

/// Whether a pair and the braces after it are a component whose `=` is missing: `sa sequence {`.
fn is_component(pair: &Node, next: &Node) -> bool {
    let mut parts = pair.clone().into_inner();
    let (key, value) = (parts.next(), parts.next());
    let word = |node: &Node| {
        let text = node.as_str().trim_end();
        node.as_rule() == Rule::value
            && !text.starts_with(|first: char| first.is_ascii_digit())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    next.as_rule() == Rule::stray_block
        && value.is_some_and(|value| word(&value))
        && key.is_some_and(|key| keys::MODEL.key(key.as_str().trim_end()).is_none())
}

/// Whether it is a `repeat` or `recur` without braces.
fn has_no_layers(node: &Node) -> bool {
    matches!(node.as_rule(), Rule::repeat | Rule::recur)
        && !node.clone().into_inner().any(|part| matches!(part.as_rule(), Rule::layers | Rule::braced))
}

/// Where the line that holds a place ends.
fn line_end(text: &str, from: usize) -> usize {
    text.get(from..).and_then(|rest| rest.find('\n')).map_or(text.len(), |length| from + length)
}

type Words = std::iter::Peekable<std::vec::IntoIter<Value>>;

/// `uniform 1 8`, `lognormal_poisson 32 0.5 min 1 max 64` and so on as the map that YAML has; a
/// word alone where it is not a law.
fn depths(words: &mut Words, at: Span) -> Value {
    let Some(law) = words.next() else { return Value::new(ValueKind::Null, at) };
    let ValueKind::Word(name) = &law.kind else { return law };
    let name = name.clone();
    let pair = |text: &str, span, value| Item::new(Pair { key: Key { text: text.into(), span }, value });
    let value = match name.as_str() {
        "uniform" => {
            let numbers: Vec<Value> = (0..2).map_while(|_| number(words)).collect();
            let span = numbers.iter().fold(law.span, |span, value| span.to(value.span));
            let items = numbers.into_iter().map(Item::new).collect();
            Value::new(ValueKind::List(List { items, span, ..List::default() }), span)
        }
        "poisson" => number(words).unwrap_or(Value::new(ValueKind::Null, law.span)),
        "lognormal_poisson" => {
            let numbers = ["mean", "sigma"].map(|key| number(words).map(|value| (key, value)));
            let items: Vec<_> =
                numbers.into_iter().flatten().map(|(key, value)| pair(key, value.span, value)).collect();
            let span = items.iter().fold(law.span, |span, item| span.to(item.node.value.span));
            Value::new(ValueKind::Map(Map { items, span, ..Map::default() }), span)
        }
        _ => return law,
    };
    let mut map = Map { span: law.span.to(value.span), ..Map::default() };
    map.items.push(pair(&name, law.span, value));
    let bound = |value: &Value| matches!(&value.kind, ValueKind::Word(w) if w == "min" || w == "max");
    while let Some(word) = words.next_if(bound) {
        let ValueKind::Word(name) = &word.kind else { break };
        let value = number(words).unwrap_or(Value::new(ValueKind::Null, word.span));
        map.span = map.span.to(value.span);
        map.items.push(pair(name, word.span, value));
    }
    let span = map.span;
    Value::new(ValueKind::Map(map), span)
}

/// `gate 0.1` or `expected 0.1` as the map that YAML has; another word alone.
fn exit(words: &mut Words, at: Span) -> Value {
    let Some(how) = words.next() else { return Value::new(ValueKind::Null, at) };
    let ValueKind::Word(word) = &how.kind else { return how };
    let known = keys::EXIT.key(word).is_some();
    let Some(entropy) = known.then(|| number(words)).flatten() else { return how };
    let span = how.span.to(entropy.span);
    let key = Key { text: word.clone(), span: how.span };
    let items = vec![Item::new(Pair { key, value: entropy })];
    Value::new(ValueKind::Map(Map { items, span, ..Map::default() }), span)
}

/// The next word where it is a number, or may name one.
fn number(words: &mut Words) -> Option<Value> {
    words.next_if(|value| match &value.kind {
        ValueKind::Number(_) => true,
        ValueKind::Word(word) => word != "min" && word != "max" && keys::RECUR.key(word).is_none(),
        _ => false,
    })
}

/// Whether a component of that name is defined above.
fn defined(map: &Map, key: &Key) -> bool {
    let components = map.get("components").and_then(|pair| pair.value.as_map());
    components.is_some_and(|components| components.get(&key.text).is_some())
        && keys::MODEL.key(&key.text).is_none()
}

/// Adds layers to the body of a model, which is made where there is none.
fn add_to_body(map: &mut Map, span: Span, items: impl IntoIterator<Item = Value>) {
    if map.get("body").is_none() {
        let key = Key { text: "body".into(), span };
        let list = List { span, broken: true, ..List::default() };
        map.items.push(Item::new(Pair { key, value: Value::new(ValueKind::List(list), span) }));
    }
    if let Some(Pair { value: Value { kind: ValueKind::List(list), span: whole }, .. }) = map.get_mut("body")
    {
        list.span = list.span.to(span);
        *whole = list.span;
        list.items.extend(items.into_iter().map(Item::new));
    }
}

/// Adds a pair to the map of that key, which is made where there is none.
fn add_to_group(map: &mut Map, name: &str, at: Span, span: Span, pair: Pair) {
    let is_group = |item: &Item<Pair>| item.node.key.text == name && item.node.value.as_map().is_some();
    if !map.items.iter().any(is_group) {
        let inner = Map { span, broken: true, ..Map::default() };
        let key = Key { text: name.into(), span: at };
        map.items.push(Item::new(Pair { key, value: Value::new(ValueKind::Map(inner), span) }));
    }
    if let Some(item) = map.items.iter_mut().find(|item| is_group(item))
        && let Value { kind: ValueKind::Map(inner), span: whole } = &mut item.node.value
    {
        inner.span = inner.span.to(span);
        *whole = inner.span;
        inner.items.push(Item::new(pair));
    }
}
