//! Proposals from names, roles and shapes, for tensors that no entry of `map` names.

use crate::fit::{steps, ways};
use crate::{At, Move, Place, Side, Source, Step, Taken, TransplantError, Weight};
use dreamc_compiler::bind::Factor;
use dreamc_compiler::lower::{attention, ends};
use dreamc_dsl::spec::{Component, Known};

/// A tensor that comes of nothing of the donor.
pub(crate) fn anew(to: &Weight, step: Step) -> Move {
    Move { to: to.name.clone(), shape: to.shape.clone(), from: vec![], steps: vec![step], noise: 0.0 }
}

/// Where a tensor comes from.
pub(crate) fn proposed(
    to: &Weight,
    (new, old): (&Side, &Side),
    depths: &[Taken],
) -> Result<Move, TransplantError> {
    let Place::Layer { set, component } = &to.place else { return outside(to, (new, old)) };
    let applied: Vec<&Taken> = new.layers[*set].applied.iter().map(|depth| &depths[*depth]).collect();
    if applied.iter().all(|taken| taken.silent) && to.part.ends() {
        return Ok(anew(to, Step::Zero));
    }
    let mut found = vec![];
    for taken in &applied {
        let mut of = vec![];
        for (layer, share) in &taken.layers {
            let part = match component {
                Some(name) => paired(name, *set, *layer, (new, old))?,
                None => None,
            };
            if component.is_some() && part.is_none() {
                return Ok(anew(to, Step::Fresh));
            }
            of.push((*layer, part, *share));
        }
        found.push(of);
    }
    if found.iter().any(Vec::is_empty) {
        return Ok(anew(to, Step::Fresh));
    }
    if let Some(latent) = latent(to, (new, old), &found)? {
        return Ok(latent);
    }
    if let Some((adapted, factor)) = to.part.low() {
        return Ok(low(to, old, &found, (adapted.path(), factor)));
    }
    if matches!(to.part, attention::part::QKV_SHARED | attention::part::OUT_SHARED)
        && !has(old, &found, &to.tail)
    {
        return Ok(anew(to, Step::Zero));
    }
    if !has(old, &found, &to.tail) {
        return Ok(anew(to, Step::Fresh));
    }
    if let Some(stacked) = stacked(to, old, &found) {
        return Ok(stacked);
    }
    let from = mean(old, &found, &to.tail);
    let first = from.first().and_then(|source| old.tensor(&source.name));
    let Some(first) = first else { return Ok(anew(to, Step::Fresh)) };
    let steps = match steps((new, to), (old, first), None, None) {
        Some(steps) => steps,
        None if component.is_none() => return Ok(anew(to, Step::Fresh)),
        None => return Err(unfit((new, to), (old, first))),
    };
    Ok(Move { to: to.name.clone(), shape: to.shape.clone(), from, steps, noise: 0.0 })
}

/// The layers of the donor for one application: set, component, share.
type Found<'a> = Vec<(usize, Option<&'a str>, f64)>;

/// Whether all of them have a tensor.
fn has(old: &Side, found: &[Found], tail: &str) -> bool {
    found.iter().flatten().all(|(layer, part, _)| old.of(*layer, *part, tail).is_some())
}

/// The mean over all applications, each tensor once.
fn mean(old: &Side, found: &[Found], tail: &str) -> Vec<Source> {
    let mut from: Vec<Source> = vec![];
    for (layer, part, share) in found.iter().flatten() {
        let Some(weight) = old.of(*layer, *part, tail) else { continue };
        let share = share / found.len() as f64;
        match from.iter_mut().find(|source| source.name == weight.name) {
            Some(source) => source.share += share,
            None => from.push(Source { name: weight.name.clone(), rows: None, share }),
        }
    }
    from
}

/// A matrix of latent attention, of a donor's attention over heads.
fn latent(to: &Weight, (new, old): (&Side, &Side), found: &[Found]) -> Result<Option<Move>, TransplantError> {
    let Some((layer, Some(part), _)) = found.iter().flatten().next() else { return Ok(None) };
    let Some(both) = crate::latent::becomes((new, to), old, part) else { return Ok(None) };
    let tail = attention::part::QKV.path();
    let (Some(fused), true) = (old.of(*layer, Some(part), tail), has(old, found, tail)) else {
        return Ok(None);
    };
    let Some(step) = crate::latent::step(to, both, fused)? else { return Ok(None) };
    let (to, shape, from) = (to.name.clone(), to.shape.clone(), mean(old, found, tail));
    Ok(Some(Move { to, shape, from, steps: vec![step], noise: 0.0 }))
}

/// A matrix for each application, of a mixture of projections.
fn stacked(to: &Weight, old: &Side, found: &[Found]) -> Option<Move> {
    let [count, one @ ..] = &to.shape[..] else { return None };
    if !matches!(to.part, attention::part::QKV | attention::part::OUT) || found.len() as u64 != *count {
        return None;
    }
    let mut from = vec![];
    for of in found {
        let [(layer, part, _)] = of[..] else { return None };
        let weight = old.of(layer, part, &to.tail).filter(|weight| weight.shape == one)?;
        from.push(Source { name: weight.name.clone(), rows: None, share: 1.0 });
    }
    let steps = vec![Step::Stack];
    Some(Move { to: to.name.clone(), shape: to.shape.clone(), from, steps, noise: 0.0 })
}

/// A factor of what each pass's layer differs from the mean by (2410.20672, section 2.3: the
/// largest singular values of the difference, `B = U Σ` and `A = Vᵀ`).
fn low(to: &Weight, old: &Side, found: &[Found], (tail, factor): (&str, Factor)) -> Move {
    let [passes, high, wide] = to.shape[..] else { return anew(to, Step::Fresh) };
    let mut from = vec![];
    for of in found {
        let (1, Some((layer, part, _))) = (of.len(), of.first()) else { return anew(to, Step::Fresh) };
        let Some(weight) = old.of(*layer, *part, tail) else { return anew(to, Step::Fresh) };
        from.push(Source { name: weight.name.clone(), rows: None, share: 1.0 });
    }
    if from.len() as u64 != passes || !has(old, found, tail) {
        return anew(to, Step::Fresh);
    }
    let first = factor == Factor::A;
    let rank = if first { high } else { wide };
    let steps = vec![Step::Factor { base: mean(old, found, tail), rank, first }];
    Move { to: to.name.clone(), shape: to.shape.clone(), from, steps, noise: 0.0 }
}

/// A tensor in no layer: of the same name; the head of a donor without one is its embedding.
fn outside(to: &Weight, (new, old): (&Side, &Side)) -> Result<Move, TransplantError> {
    let table = to.part == ends::part::TABLE;
    let named = old.tensor(&to.name).filter(|found| found.part == to.part);
    let embedding = || old.tensor("embed.weight").filter(|_| table && old.model.tie);
    let Some(from) = named.or_else(embedding) else { return Ok(anew(to, Step::Fresh)) };
    let wide = from.shape.last() == to.shape.last();
    if from.shape != to.shape && !(table && wide) {
        return Err(unfit((new, to), (old, from)));
    }
    let from = vec![Source { name: from.name.clone(), rows: None, share: 1.0 }];
    Ok(Move { to: to.name.clone(), shape: to.shape.clone(), from, steps: vec![], noise: 0.0 })
}

/// Whether two components are of one kind.
fn alike(a: &Component, b: &Component) -> bool {
    match (a, b) {
        (Component::Defined(a), Component::Defined(b)) => a.definition.name.text == b.definition.name.text,
        (a, b) => a.kind() == b.kind(),
    }
}

/// The component of a donor's layer that one of the model takes; none where there is none. Of
/// several that would do, an error lists them.
fn paired<'a>(
    name: &str,
    set: usize,
    layer: usize,
    (new, old): (&Side, &'a Side),
) -> Result<Option<&'a str>, TransplantError> {
    let Some(own) = new.components.get(name) else { return Ok(None) };
    let there = &old.layers[layer].components;
    let becomes = |other: &&String| match old.components.get(*other) {
        Some(other) => {
            alike(own, other) || matches!((own.known(), other.known()), (Known::Experts(_), Known::Mlp(_)))
        }
        None => false,
    };
    if let Some(same) = there.iter().find(|other| *other == name).filter(becomes) {
        return Ok(Some(same));
    }
    // Parts of definitions are found by name alone, and none takes what another has by name.
    let taken = |other: &&String| new.layers[set].components.contains(other);
    let free = |other: &&String| !other.contains('.') && !taken(other);
    if name.contains('.') {
        return Ok(None);
    }
    let same = |other: &&String| old.components.get(*other).is_some_and(|other| alike(own, other));
    let of_kind: Vec<&String> = there.iter().filter(free).filter(same).collect();
    let others: Vec<&String> = there.iter().filter(free).filter(becomes).collect();
    let found = if of_kind.is_empty() { others } else { of_kind };
    match found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => {
            let listing = found.iter().map(|name| format!("`layers.{layer}.{name}`")).collect::<Vec<_>>();
            let message =
                format!("`{name}` of layer {set} could come from {} of the donor", listing.join(" or "));
            let help = format!(
                "say which in `transplant.map`: `{{to: layers.{set}.{name}, from: layers.{layer}.{}}}`",
                found[0]
            );
            Err(TransplantError::new(
                "undecided",
                At::Field(format!("model.components.{name}")),
                message,
                help,
            ))
        }
    }
}

/// Shapes that no way leads to without being asked.
pub(crate) fn unfit((new, to): (&Side, &Weight), (old, from): (&Side, &Weight)) -> TransplantError {
    let message = format!(
        "`{}` is {} and the donor's `{}` {}",
        to.name,
        sizes(&to.shape),
        from.name,
        sizes(&from.shape)
    );
    let words = match (to.set(), to.component()) {
        (Some(_), Some(component)) => format!("layers.*.{component}"),
        _ => to.name.clone(),
    };
    let help = format!(
        "say in `transplant.map` how `{{to: {words}, how: …}}` comes of it: {}",
        ways((new, to), (old, from))
    );
    let at = match to.component() {
        Some(component) => At::Field(format!("model.components.{component}")),
        None => At::Field("model.hidden".into()),
    };
    TransplantError::new("shape", at, message, help)
}

/// A shape as people write it.
pub(crate) fn sizes(shape: &[u64]) -> String {
    let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
    format!("[{}]", sizes.join(", "))
}
