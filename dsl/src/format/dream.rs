//! The `.dream` spelling, with its shorter forms wherever the tree has their shape.

use super::Lines;
use crate::ast::*;
use crate::keys::{self, Section, Type};
use crate::reference;

const MARKER: &str = "//";
const KEYWORDS: [&str; 7] = ["let", "model", "repeat", "recur", "layer", "body", "skip"];
/// Sections whose truths are other keys elsewhere, and are parted by commas.
const PARTED: [&str; 2] = ["equal", "skip"];
/// Truths that stand in headers, or are a choice in components.
const NO_FLAGS: [&str; 3] = ["residual_norm", "embed", "gate"];

/// Keys that are read as true where a word follows them in the same line: the truths of the key
/// table, which the grammar's `flag_name` lists.
fn flags() -> impl Iterator<Item = &'static str> {
    let own = reference::sections().into_iter().filter(|section| !PARTED.contains(&section.name));
    let keys = own.flat_map(|section| section.keys).filter(|key| matches!(key.kind, Type::Bool));
    keys.map(|key| key.name).filter(|name| !NO_FLAGS.contains(name))
}

pub(super) fn print(root: &Map) -> String {
    let mut lines = Lines::default();
    for item in &root.items {
        let Pair { key, value } = &item.node;
        match (key.text.as_str(), &value.kind) {
            ("let", ValueKind::Map(map)) if !map.items.is_empty() => {
                lines.head(item, MARKER);
                for item in &map.items {
                    lines.head(item, MARKER);
                    lines.begin();
                    lines.push(&format!(
                        "let {} = {}",
                        self::key(&item.node.key.text),
                        flow(&item.node.value, None)
                    ));
                    lines.trailing(item.trailing.as_ref(), MARKER);
                }
            }
            ("define", ValueKind::Map(map))
                if !map.items.is_empty() && map.items.iter().all(is_definition) =>
            {
                lines.head(item, MARKER);
                for item in &map.items {
                    lines.head(item, MARKER);
                    lines.begin();
                    definition(&mut lines, &item.node);
                    lines.trailing(item.trailing.as_ref(), MARKER);
                }
            }
            ("model", ValueKind::Map(map)) => {
                lines.head(item, MARKER);
                lines.begin();
                model(&mut lines, map);
                lines.trailing(item.trailing.as_ref(), MARKER);
            }
            _ => pair(&mut lines, item, root_kind(key)),
        }
    }
    lines.comments(&root.closing, MARKER);
    lines.finish()
}

fn root_kind(key: &Key) -> Option<Type> {
    keys::SPEC.key(&key.text).or_else(|| keys::SUITE.key(&key.text)).map(|key| key.kind)
}

/// Whether a pair is a definition as `define` writes it.
fn is_definition(item: &Item<Pair>) -> bool {
    let Pair { key, value } = &item.node;
    let ValueKind::Map(map) = &value.kind else { return false };
    let setting = |item: &Item<Pair>| {
        let Pair { key, value } = &item.node;
        let number = matches!(value.kind, ValueKind::Null | ValueKind::Number(_) | ValueKind::Word(_));
        is_word(&key.text) && !key.text.contains('.') && number
    };
    let right = |item: &Item<Pair>| match (item.node.key.text.as_str(), &item.node.value.kind) {
        ("settings", ValueKind::Map(map)) => map.items.iter().all(setting),
        ("code", ValueKind::Text(text) | ValueKind::Word(text)) => balanced(text),
        _ => false,
    };
    is_word(&key.text)
        && !key.text.contains('.')
        && map.items.iter().all(right)
        && map.items.last().is_some_and(|item| item.node.key.text == "code")
        && map.items.len() <= 2
        && !map.commented()
}

/// Whether the braces of formulas close one another.
fn balanced(code: &str) -> bool {
    let mut open = 0i64;
    for line in code.lines() {
        for letter in line.split("//").next().unwrap_or("").chars() {
            open += i64::from(letter == '{') - i64::from(letter == '}');
            if open < 0 {
                return false;
            }
        }
    }
    open == 0 && code.chars().all(|c| c == '\n' || !c.is_control())
}

/// Characters of the settings of a definition that stand on its line.
const LONGEST: usize = 100;

/// Settings with commas between, on as few lines as they fit on.
fn filled(lines: &mut Lines, all: &[String]) {
    let mut taken = LONGEST;
    for (i, setting) in all.iter().enumerate() {
        let text = format!("{setting}{}", if i + 1 < all.len() { "," } else { "" });
        if taken + 1 + text.len() > LONGEST {
            lines.begin();
            taken = 0;
        } else {
            lines.push(" ");
            taken += 1;
        }
        lines.push(&text);
        taken += text.len();
    }
}

/// `define name(heads 4, value = 2 * heads) {` and formulas below; settings that are too long for
/// its line stand on lines of their own.
fn definition(lines: &mut Lines, pair: &Pair) {
    lines.push(&format!("define {}", pair.key.text));
    let ValueKind::Map(map) = &pair.value.kind else { return };
    if let Some(Pair { value: Value { kind: ValueKind::Map(settings), .. }, .. }) = map.get("settings") {
        let setting = |item: &Item<Pair>| {
            let Pair { key, value } = &item.node;
            match &value.kind {
                ValueKind::Null => key.text.clone(),
                ValueKind::Number(Arith { kind: ArithKind::Literal(number), .. }) => {
                    format!("{} {number}", key.text)
                }
                _ => format!("{} = {}", key.text, flow(value, None)),
            }
        };
        if settings.commented() {
            lines.push("(");
            lines.trailing(settings.opening.as_ref(), MARKER);
            lines.indent += 1;
            for item in &settings.items {
                lines.head(item, MARKER);
                lines.begin();
                lines.push(&setting(item));
                lines.push(",");
                lines.trailing(item.trailing.as_ref(), MARKER);
            }
            lines.comments(&settings.closing, MARKER);
            lines.indent -= 1;
            lines.begin();
            lines.push(")");
        } else {
            let all: Vec<String> = settings.items.iter().map(setting).collect();
            let joined = all.join(", ");
            if pair.key.text.len() + joined.len() <= LONGEST {
                lines.push(&format!("({joined})"));
            } else {
                lines.push("(");
                lines.indent += 1;
                filled(lines, &all);
                lines.indent -= 1;
                lines.begin();
                lines.push(")");
            }
        }
    }
    lines.push(" {");
    lines.indent += 1;
    if let Some(Pair { value: Value { kind: ValueKind::Text(code) | ValueKind::Word(code), .. }, .. }) =
        map.get("code")
    {
        lines.lines_of(code);
    }
    lines.indent -= 1;
    lines.begin();
    lines.push("}");
}

fn model(lines: &mut Lines, map: &Map) {
    lines.push("model ");
    let mut items = map.items.as_slice();
    if let Some((first, rest)) = items.split_first()
        && let (true, ValueKind::Word(name) | ValueKind::Text(name)) =
            (first.node.key.text == "name", &first.node.value.kind)
    {
        let bare = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        lines.push(&if bare { name.clone() } else { quote(name) });
        lines.push(" ");
        items = rest;
    }
    lines.push("{");
    lines.trailing(map.opening.as_ref(), MARKER);
    lines.indent += 1;
    for (index, item) in items.iter().enumerate() {
        let Pair { key, value } = &item.node;
        match (key.text.as_str(), &value.kind) {
            ("components", ValueKind::Map(map)) if !map.items.is_empty() => {
                if item.blank && index > 0 {
                    lines.blank();
                }
                map.items.iter().for_each(|item| component(lines, item));
            }
            ("body", ValueKind::List(list)) if !list.items.is_empty() && regular(list) => {
                if item.blank && index > 0 {
                    lines.blank();
                }
                for item in &list.items {
                    lines.head(item, MARKER);
                    lines.begin();
                    layers_item(lines, &item.node, false);
                    lines.trailing(item.trailing.as_ref(), MARKER);
                }
            }
            _ => pair(lines, item, keys::MODEL.key(&key.text).map(|key| key.kind)),
        }
    }
    lines.comments(&map.closing, MARKER);
    lines.indent -= 1;
    lines.begin();
    lines.push("}");
}

/// `sa = sequence {…}`, or what stands in its place.
fn component(lines: &mut Lines, item: &Item<Pair>) {
    lines.head(item, MARKER);
    lines.begin();
    let Pair { key, value } = &item.node;
    lines.push(&format!("{} = ", self::key(&key.text)));
    match &value.kind {
        ValueKind::Map(wrapper) if wrapper.items.len() == 1 => {
            let inner = &wrapper.items[0].node;
            let kind = Type::Component.child(&inner.key.text);
            match &inner.value.kind {
                ValueKind::Map(_) if is_word(&inner.key.text) && !inner.key.text.contains('.') => {
                    lines.push(&format!("{} ", inner.key.text));
                    self::value(lines, &inner.value, kind);
                }
                _ => lines.push(&flow(value, None)),
            }
        }
        _ => self::value(lines, value, None),
    }
    lines.trailing(item.trailing.as_ref(), MARKER);
}

/// A composition, `repeat` or `recur`; a composition alone in its braces needs no `layer`.
fn layers_item(lines: &mut Lines, value: &Value, alone: bool) {
    match &value.kind {
        ValueKind::Layer(layer) if alone || is_statement(value) => lines.push(&super::layer(layer)),
        ValueKind::Layer(layer) => lines.push(&format!("layer {{ {} }}", super::layer(layer))),
        ValueKind::Map(map) => {
            for (index, item) in map.items.iter().enumerate() {
                let Pair { key, value } = &item.node;
                if index > 0 {
                    lines.push(" ");
                }
                match &value.kind {
                    ValueKind::List(list) if key.text == "layers" => {
                        layers(lines, list);
                        lines.trailing(item.trailing.as_ref(), MARKER);
                    }
                    _ => {
                        let value = setting(key, value).unwrap_or_else(|| flow(value, None));
                        lines.push(&format!("{} {value}", self::key_of_item(index, &key.text)))
                    }
                }
            }
        }
        _ => lines.push(&flow(value, None)),
    }
}

/// `lognormal_poisson 32 0.5 min 1 max 64` for the `depth` of a `recur`, `gate 0.1` or `expected
/// 0.1` for its `exit`, where they have that shape.
fn setting(key: &Key, value: &Value) -> Option<String> {
    let ValueKind::Map(map) = &value.kind else { return None };
    let number = |value: &Value| match &value.kind {
        ValueKind::Number(arith) if !matches!(arith.kind, ArithKind::Negate(_)) => Some(super::arith(arith)),
        _ => None,
    };
    if let ("exit", [gate], false) = (key.text.as_str(), &map.items[..], map.commented()) {
        let Pair { key, value } = &gate.node;
        let known = keys::EXIT.key(&key.text).is_some();
        return known.then(|| number(value)).flatten().map(|entropy| format!("{} {entropy}", key.text));
    }
    let (law, bounds) = map.items.split_first().filter(|_| key.text == "depth" && !map.commented())?;
    let Pair { key, value } = &law.node;
    let numbers = match (key.text.as_str(), &value.kind) {
        ("uniform", ValueKind::List(list)) if list.items.len() == 2 && !list.commented() => {
            list.items.iter().map(|item| number(&item.node)).collect::<Option<Vec<_>>>()?
        }
        ("poisson", _) => vec![number(value)?],
        ("lognormal_poisson", ValueKind::Map(map)) if !map.commented() => {
            let names: Vec<&str> = map.items.iter().map(|item| item.node.key.text.as_str()).collect();
            if names != ["mean", "sigma"] {
                return None;
            }
            map.items.iter().map(|item| number(&item.node.value)).collect::<Option<Vec<_>>>()?
        }
        _ => return None,
    };
    let mut text = format!("{} {}", key.text, numbers.join(" "));
    for item in bounds {
        let Pair { key, value } = &item.node;
        if !matches!(key.text.as_str(), "min" | "max") {
            return None;
        }
        text += &format!(" {} {}", key.text, number(value)?);
    }
    Some(text)
}

/// Whether it is a statement on the stream, which ends with its line or at a comma.
fn is_statement(value: &Value) -> bool {
    matches!(&value.kind, ValueKind::Layer(Layer { kind: LayerKind::Statement(_), .. }))
}

fn key_of_item(index: usize, name: &str) -> String {
    if index == 0 { name.to_string() } else { key(name) }
}

/// Whether a list of layers has the shape that the forms of `.dream` have; another is written as
/// the list it is.
fn regular(list: &List) -> bool {
    list.items.iter().all(|item| match &item.node.kind {
        ValueKind::Layer(_) => true,
        ValueKind::Map(map) => {
            let scalar = |value: &Value| {
                matches!(value.kind, ValueKind::Bool(_) | ValueKind::Word(_) | ValueKind::Number(_))
            };
            let ends = map.items.first().zip(map.items.last()).is_some_and(|(first, last)| {
                matches!(first.node.key.text.as_str(), "recur" | "repeat")
                    && matches!(first.node.value.kind, ValueKind::Number(_) | ValueKind::Word(_))
                    && last.node.key.text == "layers"
            });
            ends && map.items.iter().all(|item| match &item.node.value.kind {
                ValueKind::List(list) => item.node.key.text == "layers" && regular(list),
                _ => {
                    let Pair { key, value } = &item.node;
                    key.text != "layers" && (scalar(value) || setting(key, value).is_some())
                }
            })
        }
        _ => false,
    })
}

fn layers(lines: &mut Lines, list: &List) {
    let alone = list.items.len() == 1;
    if !list.broken {
        lines.push("{ ");
        for (index, item) in list.items.iter().enumerate() {
            if index > 0 {
                let before = &list.items[index - 1].node;
                lines.push(if is_statement(before) || is_statement(&item.node) { ", " } else { " " });
            }
            layers_item(lines, &item.node, alone);
        }
        lines.push(" }");
        return;
    }
    lines.push("{");
    lines.trailing(list.opening.as_ref(), MARKER);
    lines.indent += 1;
    for item in &list.items {
        lines.head(item, MARKER);
        lines.begin();
        layers_item(lines, &item.node, alone);
        lines.trailing(item.trailing.as_ref(), MARKER);
    }
    lines.comments(&list.closing, MARKER);
    lines.indent -= 1;
    lines.begin();
    lines.push("}");
}

fn pair(lines: &mut Lines, item: &Item<Pair>, kind: Option<Type>) {
    lines.head(item, MARKER);
    lines.begin();
    lines.push(&key_with(&item.node));
    if item.node.value.kind == ValueKind::Null {
        // The comma keeps the next key from being the value.
        lines.push(",");
    } else {
        lines.push(" ");
        value(lines, &item.node.value, kind);
    }
    lines.trailing(item.trailing.as_ref(), MARKER);
}

fn value(lines: &mut Lines, value: &Value, kind: Option<Type>) {
    match &value.kind {
        ValueKind::Map(map) if map.broken => {
            lines.push("{");
            lines.trailing(map.opening.as_ref(), MARKER);
            lines.indent += 1;
            for item in &map.items {
                pair(lines, item, kind.and_then(|kind| kind.child(&item.node.key.text)));
            }
            lines.comments(&map.closing, MARKER);
            lines.indent -= 1;
            lines.begin();
            lines.push("}");
        }
        ValueKind::List(list) if list.broken => {
            lines.push("[");
            lines.trailing(list.opening.as_ref(), MARKER);
            lines.indent += 1;
            let element = kind.and_then(|kind| kind.element().copied());
            for item in &list.items {
                lines.head(item, MARKER);
                lines.begin();
                self::value(lines, &item.node, element);
                lines.trailing(item.trailing.as_ref(), MARKER);
            }
            lines.comments(&list.closing, MARKER);
            lines.indent -= 1;
            lines.begin();
            lines.push("]");
        }
        _ => lines.push(&flow(value, kind)),
    }
}

/// A value on one line.
fn flow(value: &Value, kind: Option<Type>) -> String {
    match &value.kind {
        ValueKind::Null | ValueKind::Invalid => "null".into(),
        ValueKind::Bool(value) => value.to_string(),
        ValueKind::Word(word) if matches!(word.as_str(), "repeat" | "recur" | "let" | "half_reversed") => {
            quote(word)
        }
        ValueKind::Word(word) => word.clone(),
        ValueKind::Text(text) if crate::number::bytes(text).is_some() && !text.contains(' ') => text.clone(),
        ValueKind::Text(text) => quote(text),
        ValueKind::Number(arith) => super::arith(arith),
        ValueKind::Map(map) if map.items.is_empty() => "{}".into(),
        ValueKind::Map(map) => {
            if let Some(text) =
                kind.and_then(|kind| kind.section()).and_then(|section| with_flags(map, section))
            {
                return text;
            }
            if let Some(text) = wired(map, kind) {
                return text;
            }
            let inner = |key: &str| kind.and_then(|kind| kind.child(key));
            let pair = |item: &Item<Pair>| {
                let Pair { key, value } = &item.node;
                match value.kind {
                    ValueKind::Null => self::key(&key.text),
                    _ => format!("{} {}", key_with(&item.node), flow(value, inner(&key.text))),
                }
            };
            let alone = map.items.iter().any(|item| item.node.value.kind == ValueKind::Null);
            let gap = if alone { ", " } else { "  " };
            format!("{{ {} }}", map.items.iter().map(pair).collect::<Vec<_>>().join(gap))
        }
        ValueKind::List(list) => {
            let element = kind.and_then(|kind| kind.element().copied());
            let elements: Vec<String> = list.items.iter().map(|item| flow(&item.node, element)).collect();
            format!("[{}]", elements.join(", "))
        }
        ValueKind::Layer(layer) => quote(&super::layer(layer)),
    }
}

/// `500 half_reversed` for a map of the section's short key and that flag.
fn with_flags(map: &Map, section: &Section) -> Option<String> {
    let [first, flag] = map.items.as_slice() else { return None };
    let plain = !matches!(first.node.value.kind, ValueKind::Map(_) | ValueKind::List(_) | ValueKind::Null);
    let flagged = flag.node.key.text == "half_reversed" && flag.node.value.kind == ValueKind::Bool(true);
    let short = section.short == Some(first.node.key.text.as_str());
    (plain && flagged && short).then(|| format!("{} half_reversed", flow(&first.node.value, None)))
}

/// `lanes 4 dynamic` or `attend { block 8 }` for a map of these keys in the place of a stream.
fn wired(map: &Map, kind: Option<Type>) -> Option<String> {
    let stream = kind.and_then(|kind| kind.section()).is_some_and(|own| std::ptr::eq(own, &keys::STREAM));
    let pairs: Vec<&Pair> = map.items.iter().filter(|_| stream).map(|item| &item.node).collect();
    let number = |value: &Value| matches!(value.kind, ValueKind::Number(_));
    match &pairs[..] {
        [attend] if attend.key.text == "attend" && matches!(attend.value.kind, ValueKind::Map(_)) => {
            Some(format!("attend {}", flow(&attend.value, Some(Type::Section(&keys::ATTEND)))))
        }
        [lanes] if lanes.key.text == "lanes" && number(&lanes.value) => {
            Some(format!("lanes {}", flow(&lanes.value, None)))
        }
        [lanes, kind] if lanes.key.text == "lanes" && kind.key.text == "kind" && number(&lanes.value) => {
            let known = |word: &&str| matches!(&kind.value.kind, ValueKind::Word(own) if own == *word);
            let word = ["static", "dynamic", "mhc"].into_iter().find(known)?;
            Some(format!("lanes {} {word}", flow(&lanes.value, None)))
        }
        _ => None,
    }
}

/// An argument of `skip`.
pub(super) fn argument(pair: &Pair) -> String {
    let Pair { key, value } = pair;
    let name = self::key(&key.text);
    match &value.kind {
        ValueKind::Bool(true) => name,
        ValueKind::Map(map) if !map.items.is_empty() && tagged(map) => {
            let parts: Vec<String> = map.items.iter().map(|item| argument(&item.node)).collect();
            format!("{name} {}", parts.join(" "))
        }
        _ => format!("{name} {}", flow(value, keys::SKIP.key(&key.text).map(|key| key.kind))),
    }
}

/// Whether a map can be written as pairs without braces: names, the first with a number.
fn tagged(map: &Map) -> bool {
    let number = |value: &Value| matches!(&value.kind, ValueKind::Number(_) | ValueKind::Word(_));
    let simple = |pair: &Pair| number(&pair.value) || pair.value.kind == ValueKind::Bool(true);
    map.items
        .iter()
        .all(|item| simple(&item.node) && is_word(&item.node.key.text) && !item.node.key.text.contains('.'))
        && map.items.first().is_some_and(|item| number(&item.node.value))
}

/// The key of a pair. A flag whose value is a word is quoted, so that the value stays its own.
fn key_with(pair: &Pair) -> String {
    match &pair.value.kind {
        ValueKind::Bool(_) | ValueKind::Null => key(&pair.key.text),
        ValueKind::Number(Arith { kind: ArithKind::Literal(_), .. }) => key(&pair.key.text),
        _ if flags().any(|flag| flag == pair.key.text) => quote(&pair.key.text),
        _ => key(&pair.key.text),
    }
}

fn key(name: &str) -> String {
    if is_word(name) && !KEYWORDS.contains(&name) { name.to_string() } else { quote(name) }
}

fn quote(text: &str) -> String {
    super::quote(text, |_| false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn flags_of_the_grammar_are_those_of_the_table() {
        let grammar = include_str!("../dream.pest");
        let line = grammar.lines().find(|line| line.starts_with("flag_name")).unwrap();
        let listed: BTreeSet<&str> = line.split('"').skip(1).step_by(2).collect();
        assert_eq!(listed, flags().collect());
    }
}
