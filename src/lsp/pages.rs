//! Pages for people: a key, a group of keys, a component with its counts. Markdown.

use dreamc_compiler::count::{Counts, Options, count};
use dreamc_compiler::matching::TOKENS;
use dreamc_dsl::Spec;
use dreamc_dsl::define::Definition;
use dreamc_dsl::define::functions::Entry;
use dreamc_dsl::define::syntax::Setting;
use dreamc_dsl::keys::{Fallback, Key, Section, Type};
use dreamc_study::number::{decimals, grouped};
use std::fmt::Write;

/// A key: its values, its default, its meaning, its words.
pub fn key(key: &Key, section: Option<&Section>) -> String {
    let of = section.map_or(String::new(), |s| format!(" of *{}*", s.name));
    let mut page = format!("**`{}`**{of}: {}", key.name, key.kind.describe());
    page += &match key.default {
        Fallback::Required => "; required".into(),
        Fallback::Absent => String::new(),
        Fallback::Value(text) => format!("; default `{text}`"),
        Fallback::Rule(text) => format!("; default: {text}"),
    };
    let _ = write!(page, "\n\n{}", key.doc);
    for (word, doc) in words(&key.kind) {
        let _ = write!(page, "\n- `{word}`: {doc}");
    }
    page
}

/// The words that a value may be, each with its meaning.
pub fn words(kind: &Type) -> Vec<(&'static str, &'static str)> {
    match kind {
        Type::Word(words) => words.to_vec(),
        Type::Bool => vec![("true", ""), ("false", "")],
        Type::Optional(inner) => [words(inner), vec![("none", "")]].concat(),
        Type::Either(kinds) => kinds.iter().flat_map(words).collect(),
        Type::Section(section) => match section.short.and_then(|short| section.key(short)) {
            Some(key) => words(&key.kind),
            None => vec![],
        },
        Type::Int { .. }
        | Type::Real(_)
        | Type::Text
        | Type::Path
        | Type::Field
        | Type::List(_)
        | Type::Names(_)
        | Type::Component
        | Type::Layers
        | Type::Composition
        | Type::Any => vec![],
    }
}

/// A group of keys.
pub fn section(section: &Section) -> String {
    let names: Vec<String> = section.keys.iter().map(|key| format!("`{}`", key.name)).collect();
    format!("**{}**: {}\n\nKeys: {}", section.name, section.doc, names.join(", "))
}

/// A component of a specification with its share of parameters and FLOPs.
pub fn component(name: &str, kind: &Section, spec: Option<&Spec>) -> String {
    let mut page = format!("**`{name}`**: {}. {}", kind.name, kind.doc);
    let Some(spec) = spec else { return page };
    let tokens = TOKENS.min(spec.model.context);
    match count(spec, &Options { tokens, device: None }) {
        Ok(counts) => page += &counted(name, &counts),
        Err(error) => {
            let _ = write!(page, "\n\nNot counted: {error}");
        }
    }
    page
}

fn counted(name: &str, counts: &Counts) -> String {
    let p = &counts.parameters;
    let own = p.by_component.get(name).copied().unwrap_or_default();
    let share = |part: f64, whole: f64| 100.0 * part / whole.max(1.0);
    let mut page = format!(
        "\n\n- parameters: {} ({:.1} % of {})",
        grouped(own),
        share(own as f64, p.total as f64),
        decimals(p.total as f64)
    );
    let f = &counts.flops_per_token;
    if let Some(flops) = f.decode_by_component.get(name) {
        let (part, whole) = (flops.mean(), f.decode.mean());
        let _ = write!(
            page,
            "\n- FLOPs for a generated token: {} ({:.1} % of {})",
            decimals(part),
            share(part, whole),
            decimals(whole)
        );
    }
    page
}

/// A function of definitions.
pub fn function(entry: &Entry) -> String {
    format!("**`{}`**\n\n{}", entry.call, entry.doc)
}

/// A definition of the file, or one of the library.
pub fn definition(own: Option<&Definition>, library: Option<&str>) -> Option<String> {
    let text = match own {
        Some(own) => {
            let setting = |setting: &Setting| match setting.text.as_str() {
                "" => setting.name.text.clone(),
                default => format!("{} = {default}", setting.name.text),
            };
            let settings: Vec<String> = own.settings.iter().map(setting).collect();
            let code: Vec<String> = own.text.lines().map(|line| format!("  {line}")).collect();
            format!("define {}({}) {{\n{}\n}}", own.name.text, settings.join(", "), code.join("\n"))
        }
        None => library?.trim_end().to_string(),
    };
    Some(format!("```dream\n{text}\n```"))
}
