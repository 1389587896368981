//! Where a failure is: the layer from the first stream or tensor that differs, the component by
//! leaving the others out.
//!
//! A layer is found where something was compared layer by layer. For the component the proof is
//! tried again on models whose layers have one component each: if exactly one of them fails alone,
//! it is that one. A failure that needs several components is one of how they are put together, and
//! has no component.

use super::{Checks, Place, Proof, Subject, VerifyError};
use dreamc_compiler::architecture::{Architecture, for_each_application, names};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Expr, Item};

/// The place of what failed.
pub fn place(proof: &dyn Proof, subject: &Subject, checks: &Checks) -> Place {
    let told = checks.failed.iter().find(|c| c.place.layer.is_some()).map(|c| c.place.clone());
    component(proof, subject, told.unwrap_or_default())
}

/// The place of an error, which may name a launch: `layer0: …`.
pub fn of_error(proof: &dyn Proof, subject: &Subject, error: &VerifyError) -> Place {
    let text = error.to_string();
    let words = text.split(|c: char| !c.is_alphanumeric());
    let places = words.map(|word| of_origin(subject, word));
    let told = places.into_iter().find(|place| place.layer.is_some());
    component(proof, subject, told.unwrap_or_default())
}

/// The place with the component that the proof fails for alone.
fn component(proof: &dyn Proof, subject: &Subject, mut place: Place) -> Place {
    // Ranks share all components alike.
    if matches!(place.layer.as_deref(), Some("embed" | "head")) || proof.name() == super::ranks::NAME {
        return place;
    }
    let used = used(&subject.spec);
    let blamed: Vec<&String> = match used.as_slice() {
        [one] => vec![one],
        _ => used.iter().filter(|c| fails_alone(proof, subject, c)).collect(),
    };
    match blamed.as_slice() {
        [one] => place.component = Some(one.to_string()),
        // Something that none has alone, or all have.
        several if several.is_empty() || several.len() == used.len() => {}
        several if place.component.as_ref().is_some_and(|c| several.contains(&c)) => {}
        several => {
            let names: Vec<&str> = several.iter().map(|c| c.as_str()).collect();
            place.component = Some(names.join(", "));
        }
    }
    place
}

/// The set of weights that application number `l` uses, and its component where it has one.
pub fn application(subject: &Subject, l: usize) -> Place {
    let Ok(a) = Architecture::new(&subject.spec.model, None) else { return Place::default() };
    let (mut at, mut place) = (0, Place::default());
    for_each_application(&a.blocks, a.variables, &mut |apply, variables| {
        if at == l {
            let key = (a.leader(apply.body), apply.set.at(variables));
            let names = a.bodies[apply.body].names();
            let component = if let [one] = names[..] { Some(one.to_string()) } else { None };
            let layer = a.prefixes().find(|(_, set)| *set == key).map(|(prefix, _)| prefix);
            place = Place { layer, component };
        }
        at += 1;
    });
    place
}

/// The first application whose stream differs, of streams before each and after the last.
pub fn first_stream(subject: &Subject, found: &[Vec<f64>], expected: &[Vec<f64>], tolerance: f64) -> Place {
    // Passes without a gradient share their streams on a device.
    if found.len() != expected.len() {
        return Place::default();
    }
    for (l, (a, b)) in found.iter().zip(expected).enumerate() {
        if super::error(a, b) > tolerance {
            return match l.checked_sub(1) {
                None => Place { layer: Some("embed".into()), component: None },
                Some(l) => application(subject, l),
            };
        }
    }
    Place { layer: (!found.is_empty()).then(|| "head".into()), component: None }
}

/// The layer that a launch's origin names: bodies are numbered as they are first used, and so are
/// their first weights.
pub fn of_origin(s: &Subject, origin: &str) -> Place {
    let name = origin.split([':', '.', ' ']).next().unwrap_or_default();
    let layer = match name {
        "embed" | "head" => Some(name.to_string()),
        _ => Architecture::new(&s.spec.model, None).ok().and_then(|a| {
            let body = a.bodies.iter().position(|body| body.name == name)?;
            a.prefixes().find(|(_, set)| set.0 == a.leader(body)).map(|(prefix, _)| prefix)
        }),
    };
    Place { layer, component: None }
}

fn used(spec: &Spec) -> Vec<String> {
    fn walk(items: &[Item], found: &mut Vec<String>) {
        for item in items {
            match item {
                Item::Layer(e) => found.extend(names(e).into_iter().map(str::to_string)),
                Item::Statement(_) => {}
                Item::Repeat { items, .. } | Item::Recur { items, .. } => walk(items, found),
            }
        }
    }
    let mut found = vec![];
    walk(&spec.model.body, &mut found);
    found.sort();
    found.dedup();
    found
}

fn fails_alone(proof: &dyn Proof, subject: &Subject, component: &str) -> bool {
    let mut spec = subject.spec.clone();
    spec.model.body = items(&spec.model.body, component);
    if !applies(&spec.model.body) {
        return false;
    }
    let Ok(alone) = Subject::new(spec, subject.seed, None, subject.devices, subject.pipeline) else {
        return true;
    };
    let mut checks = Checks::default();
    let result = proof.prove(&alone, &mut checks);
    !checks.failed.is_empty() || !matches!(result, Ok(_) | Err(VerifyError::IllConditioned { .. }))
}

/// Whether a layer is among the items.
fn applies(items: &[Item]) -> bool {
    items.iter().any(|item| !matches!(item, Item::Statement(_)))
}

/// The body with one component alone.
fn items(all: &[Item], component: &str) -> Vec<Item> {
    let keep = |item: &Item| match item {
        Item::Layer(e) => expr(e, component).map(Item::Layer),
        // Alone it is no model, and a `mix` may need any of them.
        Item::Statement(s) => Some(Item::Statement(s.clone())),
        Item::Repeat { count, items: inner } => {
            let items = items(inner, component);
            applies(&items).then_some(Item::Repeat { count: *count, items })
        }
        Item::Recur { count, residual_norm, items: inner, looping } => {
            let items = items(inner, component);
            let (residual_norm, looping) = (*residual_norm, looping.clone());
            applies(&items).then_some(Item::Recur { count: *count, residual_norm, items, looping })
        }
    };
    all.iter().filter_map(keep).collect()
}

fn expr(e: &Expr, component: &str) -> Option<Expr> {
    match e {
        Expr::Component(name) => (name == component).then(|| e.clone()),
        Expr::Norm => None,
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().find_map(|t| expr(t, component)),
        Expr::Skip(skip, inner) => {
            expr(inner, component).map(|inner| Expr::Skip(skip.clone(), Box::new(inner)))
        }
    }
}
