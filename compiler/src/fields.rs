//! Numeric fields of a model by path: what `dreamc match` varies.
//!
//! A path is `hidden`, or `ea.count` with the name of a component in front; `model.` and
//! `components.` may precede it.

use dreamc_dsl::spec::Model;
use thiserror::Error;

/// Why a path leads to no number.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FieldError {
    /// No component of that name.
    #[error("`{path}`: the model has no component `{component}`; it has {known}")]
    Component {
        /// As given.
        path: String,
        /// The part that is unknown.
        component: String,
        /// The values that exist.
        known: String,
    },
    /// No integer of that name.
    #[error("`{path}` is not an integer field; {place} has {known}")]
    Name {
        /// As given.
        path: String,
        /// Where it was looked for.
        place: String,
        /// The values that exist.
        known: String,
    },
    /// The field has no value that could be changed.
    #[error("`{path}` is not set; give it a number to start from")]
    Absent {
        /// As given.
        path: String,
    },
}

/// The field that a path names.
pub fn field<'m>(model: &'m mut Model, path: &str) -> Result<&'m mut u64, FieldError> {
    let short = path.strip_prefix("model.").unwrap_or(path);
    let short = short.strip_prefix("components.").unwrap_or(short);
    let Some((component, name)) = short.split_once('.') else {
        return pick(
            path,
            "the model",
            short,
            vec![
                ("vocab", Some(&mut model.vocab)),
                ("hidden", Some(&mut model.hidden)),
                ("context", Some(&mut model.context)),
            ],
        );
    };
    let known = listed(model.components.keys().map(String::as_str));
    let Some(found) = model.components.get_mut(component) else {
        return Err(FieldError::Component { path: path.into(), component: component.into(), known });
    };
    let place = format!("`{component}`");
    pick(path, &place, name, found.sizes())
}

/// Paths of the sizes that a model has a number for, without its vocabulary and its context, which
/// are those of the data.
pub fn sizes(model: &mut Model) -> Vec<String> {
    let mut found = vec!["hidden".to_string()];
    for (name, component) in &mut model.components {
        let set = component.sizes().into_iter().filter(|(_, value)| value.as_ref().is_some_and(|v| **v > 0));
        found.extend(set.map(|(size, _)| format!("{name}.{size}")));
    }
    found
}

fn pick<'m>(
    path: &str,
    place: &str,
    name: &str,
    fields: Vec<(&str, Option<&'m mut u64>)>,
) -> Result<&'m mut u64, FieldError> {
    let known = listed(fields.iter().map(|f| f.0));
    match fields.into_iter().find(|f| f.0 == name) {
        Some((_, Some(value))) => Ok(value),
        Some((_, None)) => Err(FieldError::Absent { path: path.into() }),
        None => Err(FieldError::Name { path: path.into(), place: place.into(), known }),
    }
}

fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

/// The first rule of the language that the sizes of a model break, with the numbers that break it.
pub fn broken_rule(model: &Model) -> Option<String> {
    let broken = model.components.iter().find_map(|(name, c)| Some((name, c.broken(model)?)));
    broken.map(|(name, rule)| format!("`{name}`: {rule}"))
}
