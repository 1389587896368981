//! Paths of fields: `ea.count`, `train.steps`, `depth`, `model.body[0].recur`; overriding and
//! editing by them.
//!
//! A path names a field of the specification; this module finds the place in the tree where that
//! field is, or would be, written: under the kind of its component, as the short form of a group
//! (`rope: 10000` is `rope.base`), or as a short key next to the router.

use crate::ast::*;
use crate::diagnostic::Diagnostic;
use crate::keys::{self, Section, Type};
use crate::source::{SourceMap, Span};
use crate::suggest::closest;
use crate::yaml;

/// One step from a node to the next.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Key(String),
    Index(usize),
}

/// Applies `--set` arguments to a tree, in order.
pub(crate) fn apply(
    root: &mut Map,
    kind: FileKind,
    source: &mut SourceMap,
    arguments: &[String],
    found: &mut Vec<Diagnostic>,
) {
    for argument in arguments {
        let at = source.add_argument(argument);
        let whole = Span::new(at, at + argument.len());
        let Some((path, value)) = argument.split_once('=') else {
            let error = Diagnostic::error("argument", "an override is `PATH=VALUE`").on(whole);
            found.push(error.help("write, for instance, `--set ea.count=1024`"));
            continue;
        };
        let token = Span::new(at, at + path.len());
        let steps = match steps(root, kind, path.trim()) {
            Ok(steps) => steps,
            Err(error) => {
                found.push(error.on(token));
                continue;
            }
        };
        let place = type_at(kind, &steps);
        let begin = at + path.len() + 1 + (value.len() - value.trim_start().len());
        let value = yaml::read_value(source, value.trim(), begin, place, found);
        let mut top = Value::new(ValueKind::Map(std::mem::take(root)), whole);
        let set = put(&mut top, Some(root_type(kind)), &steps, value, token);
        if let ValueKind::Map(map) = top.kind {
            *root = map;
        }
        if let Err(error) = set {
            found.push(error.on(token));
        }
    }
}

/// The text with the value at `path` replaced; nothing else changes. A key that is not written is
/// added.
pub(crate) fn edit(text: &str, ast: &Ast, path: &str, value: &str) -> Result<String, Diagnostic> {
    let steps = steps(&ast.root, ast.kind, path)?;
    let mut place = Place::Map(&ast.root);
    let mut kind = Some(root_type(ast.kind));
    for (index, step) in steps.iter().enumerate() {
        let last = index + 1 == steps.len();
        match (step, place) {
            (Step::Key(key), Place::Map(map)) => match map.get(key) {
                Some(pair) => place = Place::of(&pair.value),
                None if last => return add(text, ast.spelling, map, key, value),
                None => return Err(unwritten(path)),
            },
            (Step::Index(index), Place::List(list)) => {
                place = Place::of(&list.items.get(*index).ok_or_else(|| unwritten(path))?.node);
            }
            // `rope: 10000` is written where `rope.base` is meant.
            (Step::Key(key), Place::Scalar(_)) if short_of(kind) == Some(key) => {}
            _ => return Err(unwritten(path)),
        }
        kind = kind.and_then(|kind| step_type(kind, step));
    }
    let span = match place {
        Place::Scalar(span) => span,
        Place::Map(map) => map.span,
        Place::List(list) => list.span,
    };
    match (text.get(..span.start), text.get(span.end..)) {
        (Some(before), Some(after)) => Ok(format!("{before}{value}{after}")),
        _ => Err(unwritten(path)),
    }
}

fn unwritten(path: &str) -> Diagnostic {
    let error = Diagnostic::error("unknown-field", format!("`{path}` is not written in the file"));
    error.help("write it there first")
}

#[derive(Clone, Copy)]
enum Place<'a> {
    Map(&'a Map),
    List(&'a List),
    Scalar(Span),
}

impl<'a> Place<'a> {
    fn of(value: &'a Value) -> Place<'a> {
        match &value.kind {
            ValueKind::Map(map) => Place::Map(map),
            ValueKind::List(list) => Place::List(list),
            _ => Place::Scalar(value.span),
        }
    }
}

/// Adds a key after the last of a map.
fn add(text: &str, spelling: Spelling, map: &Map, key: &str, value: &str) -> Result<String, Diagnostic> {
    let Some(last) = map.items.last() else { return Err(unwritten(key)) };
    let end = last.node.key.span.to(last.node.value.span).end;
    let start = last.node.key.span.start;
    let line = text.get(..start).and_then(|text| text.rfind('\n')).map_or(0, |newline| newline + 1);
    let indent = text.get(line..start).unwrap_or("");
    let flow = text.get(map.span.start..).is_some_and(|text| text.starts_with('{'));
    let own_line = map.broken && indent.trim_start_matches("- ").trim().is_empty();
    let pair = match (spelling, own_line) {
        (Spelling::Yaml, true) if !flow => format!("\n{}{key}: {value}", " ".repeat(indent.len())),
        (Spelling::Yaml, _) => format!(", {key}: {value}"),
        (Spelling::Dream, true) => format!("\n{}{key} {value}", " ".repeat(indent.len())),
        (Spelling::Dream, false) => format!("  {key} {value}"),
    };
    let end = match (own_line, text.get(end..).and_then(|rest| rest.find('\n'))) {
        // A comment after the last key stays with it.
        (true, Some(length)) => end + length,
        (true, None) => text.len(),
        _ => end,
    };
    match (text.get(..end), text.get(end..)) {
        (Some(before), Some(after)) => Ok(format!("{before}{pair}{after}")),
        _ => Err(unwritten(key)),
    }
}

fn root_type(kind: FileKind) -> Type {
    match kind {
        FileKind::Spec => Type::Section(&keys::SPEC),
        FileKind::Suite => Type::Section(&keys::SUITE),
    }
}

fn step_type(kind: Type, step: &Step) -> Option<Type> {
    match step {
        Step::Key(key) => kind.child(key),
        Step::Index(_) if matches!(kind, Type::Layers) => Some(Type::Layers),
        Step::Index(_) => kind.element().copied(),
    }
}

fn type_at(kind: FileKind, steps: &[Step]) -> Option<Type> {
    steps.iter().try_fold(root_type(kind), step_type)
}

fn short_of(kind: Option<Type>) -> Option<&'static str> {
    kind.and_then(|kind| kind.section()).and_then(|section| section.short)
}

/// Puts a value at a place, with the groups on the way there.
fn put(
    node: &mut Value,
    kind: Option<Type>,
    steps: &[Step],
    value: Value,
    token: Span,
) -> Result<(), Diagnostic> {
    let Some((step, rest)) = steps.split_first() else {
        *node = value;
        return Ok(());
    };
    let next = kind.and_then(|kind| step_type(kind, step));
    match step {
        Step::Index(index) => match &mut node.kind {
            ValueKind::List(list) if *index < list.items.len() => {
                put(&mut list.items[*index].node, next, rest, value, token)
            }
            ValueKind::List(list) => {
                let error = Diagnostic::error("unknown-field", format!("there is no element {index}"));
                Err(error.help(format!("the list has {}, counted from 0", list.items.len())))
            }
            _ => Err(Diagnostic::error("unknown-field", "this is not a list").help("leave `[…]` away")),
        },
        Step::Key(key) => {
            if !matches!(node.kind, ValueKind::Map(_)) {
                let short = short_of(kind);
                if short == Some(key) && rest.is_empty() && !matches!(node.kind, ValueKind::List(_)) {
                    *node = value;
                    return Ok(());
                }
                let mut map = Map { span: node.span, ..Map::default() };
                if let Some(short) = short
                    && !matches!(node.kind, ValueKind::Null | ValueKind::List(_))
                    && !matches!(&node.kind, ValueKind::Word(word) if word == "none")
                {
                    let key = Key { text: short.to_string(), span: node.span };
                    map.items.push(Item::new(Pair { key, value: node.clone() }));
                }
                node.kind = ValueKind::Map(map);
            }
            let ValueKind::Map(map) = &mut node.kind else { return Ok(()) };
            if map.get(key).is_none() {
                let pair = Pair {
                    key: Key { text: key.clone(), span: token },
                    value: Value::new(ValueKind::Null, token),
                };
                map.items.push(Item::new(pair));
            }
            match map.get_mut(key) {
                Some(pair) => put(&mut pair.value, next, rest, value, token),
                None => Ok(()),
            }
        }
    }
}

/// The steps to the field of that path.
fn steps(root: &Map, kind: FileKind, path: &str) -> Result<Vec<Step>, Diagnostic> {
    let mut names = split(path)?;
    let top: &Section = if kind == FileKind::Suite { &keys::SUITE } else { &keys::SPEC };
    let first = match names.first() {
        Some(Step::Key(name)) => name.clone(),
        _ => {
            return Err(
                Diagnostic::error("argument", "the path is empty").help("write, for instance, `ea.count`")
            );
        }
    };
    if kind == FileKind::Suite {
        return match top.key(&first) {
            Some(_) => Ok(names),
            None => Err(unknown(root, top, path, &first)),
        };
    }
    let components = root
        .get("model")
        .and_then(|pair| pair.value.as_map())
        .and_then(|model| model.get("components").and_then(|pair| pair.value.as_map()));
    let is_component = |name: &str| components.is_some_and(|components| components.get(name).is_some());
    let is_let =
        root.get("let").and_then(|pair| pair.value.as_map()).is_some_and(|lets| lets.get(&first).is_some());
    let mut steps: Vec<Step> = Vec::new();
    if is_component(&first) && names.len() > 1 {
        steps.extend([Step::Key("model".into()), Step::Key("components".into())]);
    } else if is_let && names.len() == 1 {
        steps.push(Step::Key("let".into()));
    } else if top.key(&first).is_some() {
        if let (true, Some(Step::Key(second))) = (first == "model" && names.len() > 2, names.get(1))
            && is_component(second)
        {
            names.insert(1, Step::Key("components".into()));
        }
    } else if keys::MODEL.key(&first).is_some() {
        steps.push(Step::Key("model".into()));
    } else {
        return Err(unknown(root, top, path, &first));
    }
    steps.append(&mut names);
    if steps.len() > 3 && steps[..2] == [Step::Key("model".into()), Step::Key("components".into())] {
        through_component(components, &mut steps)?;
    }
    check_known(root, kind, &steps, path)?;
    Ok(steps)
}

/// Adds the kind of the component to the path of one of its fields, and goes to where its router's
/// field is written.
fn through_component(components: Option<&Map>, steps: &mut Vec<Step>) -> Result<(), Diagnostic> {
    let Step::Key(name) = steps[2].clone() else { return Ok(()) };
    let component =
        components.and_then(|components| components.get(&name)).and_then(|pair| pair.value.as_map());
    let Some(pair) = component.and_then(|component| component.items.first()).map(|item| &item.node) else {
        return Err(Diagnostic::error("unknown-field", format!("no component is called `{name}`")));
    };
    // A definition may have a setting of its own name.
    let defined = keys::COMPONENTS.iter().all(|kind| kind.name != pair.key.text);
    if steps[3] != Step::Key(pair.key.text.clone()) || defined && steps.len() == 4 {
        steps.insert(3, Step::Key(pair.key.text.clone()));
    }
    // `query` and `balance` may be written next to the router or in it.
    let mut owner = pair.value.as_map();
    let mut depth = 4;
    if steps.get(4) == Some(&Step::Key("projection".into())) {
        owner = owner.and_then(|owner| owner.get("projection")).and_then(|pair| pair.value.as_map());
        depth = 5;
    }
    let written = |key: &str| owner.is_some_and(|owner| owner.get(key).is_some());
    let routed = |key: &str| {
        let router = owner.and_then(|owner| owner.get("router")).and_then(|pair| pair.value.as_map());
        router.is_some_and(|router| router.get(key).is_some())
    };
    for key in ["query", "balance"] {
        let own = steps.get(depth) == Some(&Step::Key(key.into()));
        let inner = steps.get(depth) == Some(&Step::Key("router".into()))
            && steps.get(depth + 1) == Some(&Step::Key(key.into()));
        if own && routed(key) && !written(key) {
            steps.insert(depth, Step::Key("router".into()));
        } else if inner && written(key) {
            steps.remove(depth);
        }
    }
    Ok(())
}

fn split(path: &str) -> Result<Vec<Step>, Diagnostic> {
    let bad = || {
        let error = Diagnostic::error("argument", format!("`{path}` is not the path of a field"));
        error.help("write names with dots between, such as `ea.count` or `model.body[0].recur`")
    };
    let mut steps = Vec::new();
    for part in path.split('.') {
        let (name, indices) = part.split_once('[').map_or((part, ""), |(name, rest)| (name, rest));
        if !is_word(name) {
            return Err(bad());
        }
        steps.push(Step::Key(name.to_string()));
        if part.contains('[') {
            for index in indices.strip_suffix(']').ok_or_else(bad)?.split("][") {
                steps.push(Step::Index(index.parse().map_err(|_| bad())?));
            }
        }
    }
    Ok(steps)
}

/// Every key on the way is one of the language, so that the error names the path and not a key
/// nobody wrote.
fn check_known(root: &Map, kind: FileKind, steps: &[Step], path: &str) -> Result<(), Diagnostic> {
    let mut place = root_type(kind);
    for step in steps {
        match step_type(place, step) {
            Some(next) => place = next,
            None => {
                let name = if let Step::Key(name) = step { name } else { return Ok(()) };
                let section = place.section().unwrap_or(&keys::SPEC);
                return Err(unknown(root, section, path, name));
            }
        }
    }
    Ok(())
}

fn unknown(root: &Map, section: &Section, path: &str, name: &str) -> Diagnostic {
    let mut names: Vec<String> = section.keys.iter().map(|key| key.name.to_string()).collect();
    if std::ptr::eq(section, &keys::SPEC) {
        let inside =
            |pair: Option<&Pair>| pair.and_then(|pair| pair.value.as_map()).cloned().unwrap_or_default();
        names.extend(inside(root.get("let")).items.into_iter().map(|item| item.node.key.text));
        let components = inside(inside(root.get("model")).get("components"));
        names.extend(components.items.into_iter().map(|item| item.node.key.text));
        names.extend(keys::MODEL.keys.iter().map(|key| key.name.to_string()));
    }
    let error = Diagnostic::error("unknown-field", format!("`{path}` is not a field: `{name}` is not known"));
    match closest(name, names.iter().map(String::as_str)) {
        Some(known) => error.help(format!("did you mean `{known}`?")),
        None => error.help("write a path such as `ea.count`, `train.steps` or the name of a `let`"),
    }
}
