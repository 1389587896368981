//! Definitions of a file: from its tree to linked [`Definition`]s.
//!
//! *In*: the `define` of a specification, and what else has names: files that it includes, and the
//! library. *Out*: every definition with those that it applies. *Promise*: no definition applies
//! itself, however far around.

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexMap;

use super::functions::function;
use super::parser;
use super::syntax::{Definition, Name, Setting};
use crate::ast::{Map, Pair, Spelling, Value, ValueKind};
use crate::component::Kind;
use crate::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::source::{SourceMap, Span};

/// Definitions of one file.
const MAX_DEFINITIONS: usize = 256;

/// Reads a text of nothing but definitions, as files of the library are.
pub fn parse(text: &str) -> Result<Vec<Arc<Definition>>, Diagnostics> {
    let ast = crate::parse("definitions", text, Spelling::Dream)?;
    let mut found = ast.errors;
    found.extend(only_definitions(&ast.root));
    let written = match ast.root.get("define").map(|pair| &pair.value.kind) {
        Some(ValueKind::Map(map)) => definitions(map, &ast.source, &mut found),
        _ => Vec::new(),
    };
    let linked = link(written, &mut found);
    if found.iter().any(|d| d.severity == Severity::Error) {
        return Err(Diagnostics::new(ast.source, found));
    }
    Ok(linked.into_values().collect())
}

/// Reports a key that is not allowed in a file of definitions.
pub(crate) fn only_definitions(root: &Map) -> Option<Diagnostic> {
    let other =
        root.items.iter().find(|item| !matches!(item.node.key.text.as_str(), "define" | "include"))?;
    let message = format!("`{}` stands in a file of definitions", other.node.key.text);
    let error = Diagnostic::error("unknown-key", message).on(other.node.key.span);
    Some(error.help("a file that others include holds `define` and `include` alone"))
}

/// The definitions of a `define`.
pub(crate) fn definitions(map: &Map, source: &SourceMap, found: &mut Vec<Diagnostic>) -> Vec<Definition> {
    let mut definitions: Vec<Definition> = Vec::new();
    for item in &map.items {
        let Pair { key, value } = &item.node;
        if definitions.len() == MAX_DEFINITIONS {
            let error = Diagnostic::error("too-large", "these are too many definitions").on(key.span);
            found.push(error.help(format!("at most {MAX_DEFINITIONS} are read")));
            break;
        }
        if !may_name(&key.text) {
            let message = format!("`{}` cannot name a definition", key.text);
            let error = Diagnostic::error("bad-name", message).on(key.span);
            found.push(error.help("a name has letters, digits and `_`, begins with a letter, and is no function, component or word"));
            continue;
        }
        if let Some(first) = definitions.iter().find(|other| other.name.text == key.text) {
            let error =
                Diagnostic::error("duplicate-key", format!("`{}` is defined twice", key.text)).on(key.span);
            found.push(error.related(first.name.span, "first here").help("choose another name"));
            continue;
        }
        let name = Name { text: key.text.clone(), span: key.span };
        definitions.extend(definition(name, value, source, found));
    }
    definitions
}

/// Whether a definition may have that name.
fn may_name(name: &str) -> bool {
    let kind = Kind::BUILT_IN.iter().any(|kind| kind.section().name == name);
    let word =
        ["model", "let", "define", "include", "repeat", "recur", "layer", "body", "skip", "none", "defined"];
    crate::ast::is_word(name)
        && !name.contains('.')
        && !kind
        && function(name).is_none()
        && !word.contains(&name)
}

fn definition(
    name: Name,
    value: &Value,
    source: &SourceMap,
    found: &mut Vec<Diagnostic>,
) -> Option<Definition> {
    let ValueKind::Map(map) = &value.kind else {
        if value.kind != ValueKind::Invalid {
            let error =
                Diagnostic::error("wrong-type", format!("`{}` is no definition", name.text)).on(value.span);
            let help = format!(
                "write `define {0}(heads 4) {{ … }}` (YAML: `{0}: {{settings: {{heads: 4}}, code: …}}`)",
                name.text
            );
            found.push(error.help(help));
        }
        return None;
    };
    let mut settings = Vec::new();
    let mut code = None;
    for item in &map.items {
        let Pair { key, value } = &item.node;
        match (key.text.as_str(), &value.kind) {
            ("settings", ValueKind::Map(map)) => settings = self::settings(map, found),
            ("settings", ValueKind::Null | ValueKind::Invalid) => {}
            ("code", ValueKind::Text(text) | ValueKind::Word(text)) => {
                code = Some((text.clone(), value.span))
            }
            ("code", ValueKind::Invalid) => return None,
            ("settings" | "code", _) => {
                let help = if key.text == "code" {
                    "write `code: |` and statements below it"
                } else {
                    "write `settings: {heads: 4}`"
                };
                let message = format!("{} is not right for `{}`", value.describe(), key.text);
                found.push(Diagnostic::error("wrong-type", message).on(value.span).help(help));
                return None;
            }
            (other, _) => {
                let message = format!("`{other}` is not a key of a definition");
                found.push(
                    Diagnostic::error("unknown-key", message)
                        .on(key.span)
                        .help("its keys are `settings` and `code`"),
                );
            }
        }
    }
    let Some((text, span)) = code else {
        let message = format!("`{}` has no formulas", name.text);
        let help = "write `{ return … }` after it (YAML: `code: |`)";
        found.push(Diagnostic::error("missing-key", message).on(name.span).help(help));
        return None;
    };
    let lines = align(&text, source, span);
    let at = |offset: usize| place(&lines, offset, span);
    let body = parser::body(&text, &at, found);
    Some(Definition {
        span: name.span.to(span),
        name,
        settings,
        body,
        text,
        uses: IndexMap::new(),
        library: false,
    })
}

fn settings(map: &Map, found: &mut Vec<Diagnostic>) -> Vec<Setting> {
    let mut settings: Vec<Setting> = Vec::new();
    for item in &map.items {
        let Pair { key, value } = &item.node;
        let name = Name { text: key.text.clone(), span: key.span };
        let reserved =
            ["x", "hidden", "pre_norm", "post_norm", "and", "or", "not", "from", "over", "along", "at"];
        let fact = super::functions::FACTS.iter().any(|(fact, ..)| *fact == name.text);
        if !crate::ast::is_word(&name.text)
            || name.text.contains('.')
            || fact
            || reserved.contains(&name.text.as_str())
        {
            let message = format!("`{}` cannot name a setting", name.text);
            let error = Diagnostic::error("bad-name", message).on(name.span);
            found.push(error.help(
                "a name has letters, digits and `_`, begins with a letter, and is no word of the language",
            ));
            continue;
        }
        if let Some(first) = settings.iter().find(|other| other.name.text == name.text) {
            let error =
                Diagnostic::error("duplicate-name", format!("the setting `{}` is written twice", name.text));
            found.push(error.on(name.span).related(first.name.span, "first here").help("take one away"));
            continue;
        }
        let default = match &value.kind {
            ValueKind::Null | ValueKind::Invalid => None,
            ValueKind::Number(arith) => Some(arith.clone()),
            ValueKind::Word(word) if word != "none" => {
                Some(crate::ast::Arith { kind: crate::ast::ArithKind::Name(word.clone()), span: value.span })
            }
            _ => {
                let message = format!("{} is no number", value.describe());
                let help = "a setting has a number, arithmetic over settings before it, or nothing";
                found.push(Diagnostic::error("wrong-type", message).on(value.span).help(help));
                None
            }
        };
        let text = default.as_ref().map(crate::format::arith).unwrap_or_default();
        settings.push(Setting { name, default: default.as_ref().map(parser::arithmetic), text });
    }
    settings
}

// Places ------------------------------------------------------------------------------------------

/// The lines between two braces without what all are indented by.
pub(crate) fn dedent(raw: &str) -> String {
    let mut lines: Vec<String> = raw
        .split('\n')
        .map(|line| {
            let line = line.trim_end();
            let blanks = line.len() - line.trim_start().len();
            line[..blanks].replace('\t', "  ") + &line[blanks..]
        })
        .collect();
    if let Some(first) = lines.first_mut() {
        *first = first.trim_start().to_string();
    }
    let indent = |line: &String| line.len() - line.trim_start().len();
    let least = lines.iter().skip(1).filter(|line| !line.is_empty()).map(indent).min().unwrap_or(0);
    for line in lines.iter_mut().skip(1) {
        let from = least.min(line.len());
        line.replace_range(..from, "");
    }
    let first = lines.iter().position(|line| !line.is_empty()).unwrap_or(lines.len());
    let last = lines.iter().rposition(|line| !line.is_empty()).map_or(first, |last| last + 1);
    lines[first..last].join("\n")
}

/// Where each line of a text begins after its indentation: in the text and in the source.
fn align(text: &str, source: &SourceMap, span: Span) -> Vec<(usize, usize)> {
    let written = source.slice(span);
    let (mut cursor, mut start) = (0, 0);
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let plain = line.trim();
        let found = written.get(cursor..).and_then(|rest| rest.find(plain)).filter(|_| !plain.is_empty());
        if let Some(place) = found {
            let indent = line.len() - line.trim_start().len();
            lines.push((start + indent, span.start + cursor + place));
            cursor += place + plain.len();
        }
        start += line.len() + 1;
    }
    lines
}

fn place(lines: &[(usize, usize)], offset: usize, span: Span) -> usize {
    let before = lines.partition_point(|(start, _)| *start <= offset);
    match before.checked_sub(1).and_then(|place| lines.get(place)) {
        Some((start, at)) => at + (offset - start),
        None => span.start,
    }
}

// Links -------------------------------------------------------------------------------------------

/// Gives every definition those that it applies.
pub(crate) fn link(
    written: Vec<Definition>,
    found: &mut Vec<Diagnostic>,
) -> IndexMap<String, Arc<Definition>> {
    let names: Vec<String> = written.iter().map(|definition| definition.name.text.clone()).collect();
    let mut table: HashMap<String, Definition> =
        written.into_iter().map(|definition| (definition.name.text.clone(), definition)).collect();
    let mut linked = HashMap::new();
    for name in &names {
        one(name, &mut table, &mut linked, &mut Vec::new(), found);
    }
    names.into_iter().filter_map(|name| Some((name.clone(), linked.get(&name)?.clone()))).collect()
}

/// Links one definition, and before it those that it applies.
fn one(
    name: &str,
    table: &mut HashMap<String, Definition>,
    linked: &mut HashMap<String, Arc<Definition>>,
    around: &mut Vec<String>,
    found: &mut Vec<Diagnostic>,
) -> Option<Arc<Definition>> {
    if let Some(done) = linked.get(name) {
        return Some(done.clone());
    }
    let Some(mut own) = table.remove(name) else { return super::library::definition(name) };
    around.push(name.to_string());
    let calls: Vec<Name> = own
        .calls()
        .into_iter()
        .map(|call| call.name.clone())
        .filter(|call| call.text != own.name.text && function(&call.text).is_none())
        .collect();
    for call in calls {
        if own.uses.contains_key(&call.text) {
            continue;
        }
        if let Some(place) = around.iter().position(|other| *other == call.text) {
            let circle =
                around[place..].iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" applies ");
            let message = format!("{circle} applies `{}`", call.text);
            let help = "a definition applies others, not itself, however far around";
            found.push(Diagnostic::error("circle", message).on(call.span).help(help));
            continue;
        }
        if let Some(definition) = one(&call.text, table, linked, around, found) {
            own.uses.insert(call.text, definition);
        }
    }
    around.pop();
    let own = Arc::new(own);
    linked.insert(name.to_string(), own.clone());
    Some(own)
}
