//! The YAML spelling.

use super::Lines;
use crate::ast::*;

const MARKER: &str = "#";

pub(super) fn print(root: &Map) -> String {
    let mut lines = Lines::default();
    pairs(&mut lines, root, false);
    lines.finish()
}

/// The pairs of a broken map, each on lines of its own; with `inline` the first goes on in the line
/// begun (`- `).
fn pairs(lines: &mut Lines, map: &Map, inline: bool) {
    for (index, item) in map.items.iter().enumerate() {
        if index > 0 || !inline {
            lines.head(item, MARKER);
            lines.begin();
        }
        lines.push(&key(&item.node.key.text));
        lines.push(":");
        match &item.node.value.kind {
            ValueKind::Text(code) if item.node.key.text == "code" && is_block(code) => {
                // A first line that is indented does not say how far the others are.
                lines.push(if code.starts_with(' ') { " |2" } else { " |" });
                lines.indent += 1;
                lines.lines_of(code);
                lines.indent -= 1;
            }
            _ => value(lines, &item.node.value),
        }
        lines.trailing(item.trailing.as_ref(), MARKER);
    }
    lines.comments(&map.closing, MARKER);
}

/// Whether a text can stand below its key as it is.
fn is_block(text: &str) -> bool {
    let line = |line: &str| !line.ends_with(char::is_whitespace) && !line.contains(hidden);
    !text.is_empty() && !text.starts_with('\n') && !text.ends_with('\n') && text.split('\n').all(line)
}

/// The value of a pair, after its colon.
fn value(lines: &mut Lines, value: &Value) {
    match &value.kind {
        ValueKind::Map(map) if map.broken && !map.items.is_empty() => {
            lines.trailing(map.opening.as_ref(), MARKER);
            lines.indent += 1;
            pairs(lines, map, false);
            lines.indent -= 1;
        }
        ValueKind::List(list) if list.broken && !list.items.is_empty() => {
            lines.trailing(list.opening.as_ref(), MARKER);
            lines.indent += 1;
            elements(lines, list);
            lines.indent -= 1;
        }
        ValueKind::Map(Block { opening, closing, .. }) | ValueKind::List(Block { opening, closing, .. }) => {
            lines.push(" ");
            lines.push(&flow(value));
            lines.trailing(opening.as_ref(), MARKER);
            lines.indent += 1;
            lines.comments(closing, MARKER);
            lines.indent -= 1;
        }
        ValueKind::Layer(layer) => {
            lines.push(" ");
            lines.push(&plain_layer(layer));
        }
        ValueKind::Null => {}
        _ => {
            lines.push(" ");
            lines.push(&flow(value));
        }
    }
}

fn elements(lines: &mut Lines, list: &List) {
    for item in &list.items {
        lines.head(item, MARKER);
        lines.begin();
        lines.push("- ");
        match &item.node.kind {
            ValueKind::Map(map) if map.broken && !map.items.is_empty() => {
                lines.indent += 1;
                pairs(lines, map, true);
                lines.indent -= 1;
            }
            ValueKind::Layer(layer) => lines.push(&plain_layer(layer)),
            _ => lines.push(&flow(&item.node)),
        }
        lines.trailing(item.trailing.as_ref(), MARKER);
    }
    lines.comments(&list.closing, MARKER);
}

/// A value on one line.
fn flow(value: &Value) -> String {
    match &value.kind {
        ValueKind::Null | ValueKind::Invalid => "null".into(),
        ValueKind::Bool(value) => value.to_string(),
        ValueKind::Word(word) => text(word),
        ValueKind::Text(words) => text(words),
        ValueKind::Number(arith) => super::arith(arith),
        ValueKind::Map(map) => {
            let pair = |item: &Item<Pair>| match &item.node.value.kind {
                ValueKind::Null => key(&item.node.key.text),
                _ => format!("{}: {}", key(&item.node.key.text), flow(&item.node.value)),
            };
            format!("{{{}}}", map.items.iter().map(pair).collect::<Vec<_>>().join(", "))
        }
        ValueKind::List(list) => {
            let element = |item: &Item<Value>| flow(&item.node);
            format!("[{}]", list.items.iter().map(element).collect::<Vec<_>>().join(", "))
        }
        ValueKind::Layer(layer) => quote(&super::layer(layer)),
    }
}

/// A composition on a line of its own, which needs no quotes.
fn plain_layer(layer: &Layer) -> String {
    let text = super::layer(layer);
    if text.contains(['"', '#', ':']) { quote(&text) } else { text }
}

fn key(name: &str) -> String {
    text(name)
}

/// A text, in quotes where it would be read as something else without.
fn text(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '.' | '/'))
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte))
        && !matches!(
            text.to_ascii_lowercase().as_str(),
            "true" | "false" | "null" | ".inf" | ".nan" | "." | "..."
        )
        && !text.strip_prefix('.').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if plain { text.to_string() } else { quote(text) }
}

/// Letters that stand in no YAML.
fn hidden(letter: char) -> bool {
    letter.is_control() || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

fn quote(text: &str) -> String {
    super::quote(text, hidden)
}
