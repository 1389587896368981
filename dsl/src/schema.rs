//! The JSON Schema of the YAML spelling, for editors: completion, hover text and early errors. Made
//! from the table of keys.

use serde_json::{Map, Value, json};

use crate::ast::FileKind;
use crate::keys::{self, Fallback, Section, Type};

/// The schema of a specification or a suite.
pub fn schema(kind: FileKind) -> Value {
    let (root, title): (&'static Section, _) = match kind {
        FileKind::Spec => (&keys::SPEC, "dreamc specification"),
        FileKind::Suite => (&keys::SUITE, "dreamc suite"),
    };
    let mut sections = Vec::new();
    let body = section(root, &mut sections);
    let mut definitions = Map::new();
    let mut done = 0;
    while done < sections.len() {
        let next: &'static Section = sections[done];
        done += 1;
        let body = section(next, &mut sections);
        definitions.insert(next.name.to_string(), body);
    }
    definitions.insert("component".into(), component(&mut sections));
    definitions.insert("layers".into(), layers(&mut sections));
    while done < sections.len() {
        let next: &'static Section = sections[done];
        done += 1;
        let body = section(next, &mut sections);
        definitions.insert(next.name.to_string(), body);
    }
    let mut schema = json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title});
    merge(&mut schema, body);
    merge(&mut schema, json!({"$defs": definitions}));
    schema
}

fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

fn section(section: &'static Section, sections: &mut Vec<&'static Section>) -> Value {
    let mut properties = Map::new();
    for key in section.keys {
        let mut value = of(&key.kind, sections);
        merge(&mut value, json!({"description": describe(key)}));
        if let Fallback::Value(text) = key.default {
            merge(&mut value, json!({"default": default(&key.kind, text)}));
        }
        properties.insert(key.name.to_string(), value);
    }
    let required: Vec<_> =
        section.keys.iter().filter(|key| key.default == Fallback::Required).map(|k| k.name).collect();
    let mut body = json!({"type": "object", "description": section.doc, "properties": properties,
                          "additionalProperties": false});
    if !required.is_empty() {
        merge(&mut body, json!({"required": required}));
    }
    body
}

fn describe(key: &keys::Key) -> String {
    let default = match key.default {
        Fallback::Required | Fallback::Absent => String::new(),
        Fallback::Value(text) => format!(" Default: {text}."),
        Fallback::Rule(text) => format!(" Default: {text}."),
    };
    let words = match &key.kind {
        Type::Word(words) => words.iter().map(|(word, doc)| format!(" `{word}`: {doc}.")).collect(),
        _ => String::new(),
    };
    format!("{}{words}{default}", key.doc)
}

fn default(kind: &Type, text: &str) -> Value {
    match kind {
        Type::Bool => json!(text == "true"),
        Type::List(_) => serde_json::from_str(text).unwrap_or(json!(text)),
        _ if kind.numeric() => match crate::number::literal(text) {
            Some(crate::number::Number::Int(value)) => {
                i64::try_from(value).map_or(json!(text), |value| json!(value))
            }
            Some(crate::number::Number::Real(value)) if !text.ends_with('%') => json!(value),
            _ => json!(text),
        },
        _ => json!(text),
    }
}

/// Arithmetic over `let` names is a string to an editor.
const ARITHMETIC: &str = "^[A-Za-z0-9_.+*/()% -]+$";

fn of(kind: &Type, sections: &mut Vec<&'static Section>) -> Value {
    match kind {
        Type::Int { min } => {
            json!({"anyOf": [{"type": "integer", "minimum": min, "exclusiveMaximum": 1u64 << 48},
                                              {"type": "string", "pattern": ARITHMETIC}]})
        }
        Type::Real(_) => json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": ARITHMETIC}]}),
        Type::Bool => json!({"type": ["boolean", "null"]}),
        Type::Word(words) => json!({"enum": words.iter().map(|(word, _)| word).collect::<Vec<_>>()}),
        Type::Text | Type::Path => json!({"type": ["string", "number", "boolean"]}),
        Type::Field => json!({"type": "string"}),
        Type::Any => json!({"type": ["string", "number", "boolean"]}),
        Type::Optional(inner) => json!({"anyOf": [of(inner, sections), {"enum": ["none", null]}]}),
        Type::Either(kinds) => {
            json!({"anyOf": kinds.iter().map(|kind| of(kind, sections)).collect::<Vec<_>>()})
        }
        Type::Section(section) => {
            if !sections.iter().any(|known| std::ptr::eq(*known, *section)) {
                sections.push(section);
            }
            let group = json!({"$ref": format!("#/$defs/{}", section.name.replace(' ', "%20"))});
            match section.short.and_then(|short| section.key(short)) {
                Some(key) => json!({"anyOf": [of(&key.kind, sections), group]}),
                None => group,
            }
        }
        Type::List(inner) => json!({"type": "array", "items": of(inner, sections)}),
        Type::Names(inner) => json!({"type": "object", "additionalProperties": of(inner, sections)}),
        Type::Component => json!({"$ref": "#/$defs/component"}),
        Type::Layers => json!({"$ref": "#/$defs/layers"}),
        Type::Composition => json!({"type": "string"}),
    }
}

fn component(sections: &mut Vec<&'static Section>) -> Value {
    let kinds =
        keys::COMPONENTS.iter().map(|kind| (kind.name.to_string(), of(&Type::Section(kind), sections)));
    let properties: Map<String, Value> = kinds.collect();
    json!({"type": "object", "description": "A component: one key, its kind, or the name of a definition.",
           "properties": properties, "additionalProperties": {"type": ["object", "null"]}, "minProperties": 1, "maxProperties": 1})
}

fn layers(sections: &mut Vec<&'static Section>) -> Value {
    let mut forms = vec![json!({"type": "string", "description": "A composition such as `(da | sa) > ea`."})];
    forms.extend(keys::ITEMS.iter().map(|item| section(item, sections)));
    json!({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": forms}}]})
}
