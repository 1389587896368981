//! Numeric fields of a model by path: what `dreamc match` varies.
//!
//! A path is `hidden`, or `ea.count` with the name of a component in front; `model.` and
//! `components.` may precede it.

use dreamc_dsl::spec::{Attention, Component, Model, RouterForm};
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

/// The field behind a path.
pub fn field<'m>(model: &'m mut Model, path: &str) -> Result<&'m mut u64, FieldError> {
    let short = path.strip_prefix("model.").unwrap_or(path);
    let short = short.strip_prefix("components.").unwrap_or(short);
    let Some((component, name)) = short.split_once('.') else {
        return pick(
            path,
            "the model",
            short,
            [
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
    match found {
        Component::Sequence(a) | Component::Depth(a) => attention(path, &place, name, a),
        Component::Experts(e) => pick(
            path,
            &place,
            name,
            [
                ("count", Some(&mut e.count)),
                ("active", Some(&mut e.active)),
                ("intermediate", Some(&mut e.intermediate)),
                ("noop", Some(&mut e.noop)),
                ("round", e.round.as_mut()),
                ("shared", Some(&mut e.shared)),
                ("query", query(&mut e.router.form)),
            ],
        ),
        Component::Mlp(m) => pick(path, &place, name, [("intermediate", Some(&mut m.intermediate))]),
    }
}

fn attention<'m>(
    path: &str,
    place: &str,
    name: &str,
    a: &'m mut Attention,
) -> Result<&'m mut u64, FieldError> {
    let (count, router) = match &mut a.projection {
        Some(p) => (p.count.as_mut(), query(&mut p.router.form)),
        None => (None, None),
    };
    pick(
        path,
        place,
        name,
        [
            ("heads", Some(&mut a.heads)),
            ("kv_heads", Some(&mut a.kv_heads)),
            ("head_size", Some(&mut a.head_size)),
            ("window", a.window.as_mut()),
            ("projection.count", count),
            ("projection.router.query", router),
        ],
    )
}

fn query(form: &mut RouterForm) -> Option<&mut u64> {
    match form {
        RouterForm::LowRank { query, .. } => Some(query),
        RouterForm::Linear => None,
    }
}

fn pick<'m, const N: usize>(
    path: &str,
    place: &str,
    name: &str,
    fields: [(&str, Option<&'m mut u64>); N],
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
    let odd_query = |name: &str, form: &RouterForm| match form {
        RouterForm::LowRank { query, rope: Some(rope) } if !rope.turning(*query).is_multiple_of(2) => {
            Some(format!("`{name}`: a rotation needs an even query, not {query}"))
        }
        _ => None,
    };
    model.components.iter().find_map(|(name, c)| match c {
        Component::Sequence(a) | Component::Depth(a) => {
            if !a.heads.is_multiple_of(a.kv_heads.max(1)) {
                Some(format!("`{name}`: {} heads are no multiple of {} kv_heads", a.heads, a.kv_heads))
            } else if a.rope.is_some_and(|rope| !rope.turning(a.head_size).is_multiple_of(2)) {
                Some(format!("`{name}`: a rotation needs an even head_size, not {}", a.head_size))
            } else {
                a.projection.as_ref().and_then(|p| odd_query(name, &p.router.form))
            }
        }
        Component::Experts(e) if e.active > e.count.saturating_add(e.noop) => {
            Some(format!("`{name}`: {} active experts of {}", e.active, e.count.saturating_add(e.noop)))
        }
        Component::Experts(e) => {
            let (all, groups) = (e.count.saturating_add(e.noop), e.router.groups.max(1));
            if !all.is_multiple_of(groups) {
                Some(format!("`{name}`: {all} experts are no multiple of {groups} groups"))
            } else if e.active > e.router.topk_groups.saturating_mul(all / groups) {
                Some(format!("`{name}`: {} groups have no {} experts", e.router.topk_groups, e.active))
            } else {
                odd_query(name, &e.router.form)
            }
        }
        Component::Mlp(_) => None,
    })
}
