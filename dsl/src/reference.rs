//! The reference page (`docs/language.md`): an introduction, and every key from the table.

use std::fmt::Write as _;

use crate::define::functions::{FACTS, FUNCTIONS, Group, INITS};
use crate::define::library::LIBRARY;
use crate::keys::{self, Fallback, Section, Type};

/// The reference page as Markdown.
pub fn reference() -> String {
    let mut page = include_str!("reference.md").trim_end().to_string();
    page.push_str("\n\n");
    for section in sections() {
        let _ = writeln!(page, "## {}\n\n{}\n", section.name, section.doc);
        page.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
        for key in section.keys {
            let short = if section.short == Some(key.name) { " *(short)*" } else { "" };
            let default = match key.default {
                Fallback::Required => "required".to_string(),
                Fallback::Absent => "–".to_string(),
                Fallback::Value(text) => format!("`{text}`"),
                Fallback::Rule(text) => text.to_string(),
            };
            let words = match &key.kind {
                Type::Word(words) => words.iter().map(|(word, doc)| format!(" `{word}`: {doc}.")).collect(),
                _ => String::new(),
            };
            let cells = [key.kind.describe(), default, format!("{}{words}", key.doc)];
            let [kind, default, doc] = cells.map(|cell| cell.replace('|', "\\|"));
            let _ = writeln!(page, "| `{}`{short} | {kind} | {default} | {doc} |", key.name);
        }
        page.push('\n');
    }
    page.push_str(&definitions());
    page.trim_end().to_string() + "\n"
}

/// The language of definitions: an introduction, and every function from the one list.
fn definitions() -> String {
    let mut page = include_str!("definitions.md").trim_end().to_string() + "\n\n";
    let groups = [
        (Group::Elements, "Of elements"),
        (Group::Dimensions, "Of dimensions"),
        (Group::Weights, "Of weights"),
        (Group::Tokens, "Of several tokens"),
        (Group::Depths, "Of several applications"),
    ];
    for (group, title) in groups {
        let _ = writeln!(page, "### {title}\n\n| function | value |\n|---|---|");
        for entry in FUNCTIONS.iter().filter(|entry| entry.group == group) {
            let _ = writeln!(page, "| `{}` | {} |", entry.call, entry.doc);
        }
        page.push('\n');
    }
    page.push_str("### Numbers with a name\n\n| name | value |\n|---|---|\n");
    for (name, _, doc) in FACTS {
        let _ = writeln!(page, "| `{name}` | {doc} |");
    }
    page.push_str("\n### Beginnings of weights\n\n| written | value |\n|---|---|\n");
    for (word, numbers, doc) in INITS {
        let numbers = [" `a`", " `b`"][..*numbers].concat().replace('`', "");
        let _ = writeln!(page, "| `{word}{numbers}` | {doc} |");
    }
    page.push_str("\n### The library\n\n| definition | source |\n|---|---|\n");
    for (name, text) in LIBRARY {
        let about = text.lines().next().unwrap_or("").trim_start_matches("// ").trim_end_matches('.');
        let _ = writeln!(page, "| `{name}` | {about} |");
    }
    page
}

/// All sections, each after the one that first refers to it.
pub(crate) fn sections() -> Vec<&'static Section> {
    let mut all: Vec<&'static Section> = Vec::new();
    let mut next = vec![&keys::SUITE as &'static Section, &keys::SPEC];
    while let Some(section) = next.pop() {
        if all.iter().any(|known| std::ptr::eq(*known, section)) {
            continue;
        }
        all.push(section);
        let mut inner: Vec<&'static Section> =
            section.keys.iter().flat_map(|key| inside(&key.kind)).collect();
        inner.reverse();
        next.extend(inner);
    }
    all
}

fn inside(kind: &Type) -> Vec<&'static Section> {
    match kind {
        Type::Section(section) => vec![section],
        Type::Optional(inner) | Type::List(inner) | Type::Names(inner) => inside(inner),
        Type::Either(kinds) => kinds.iter().flat_map(inside).collect(),
        Type::Component => keys::COMPONENTS.to_vec(),
        Type::Layers => keys::ITEMS.iter().copied().chain([&keys::SKIP as &'static Section]).collect(),
        _ => Vec::new(),
    }
}
