//! Which parts compute the donor's function at the start.
//!
//! *Promise*: a claim is made of roles, settings and moves alone; where it holds only if tensors of
//! the donor are equal, it says which. `dreamc transplant` proves that of the whole model by the
//! logits of both programs before it writes anything.

use crate::side::Done;
use crate::{Move, Side, Step, Taken};
use dreamc_compiler::bind::{Factor, Part};
use dreamc_compiler::compiled::Init;
use dreamc_compiler::lower::mixture;
use dreamc_dsl::spec::{Attention, Component, Experts, Expr, Known, Latent, Mixes, Mlp, QkNorm, Score};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A part of the model, and how it begins.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// The part: `layers.0.ea`, or `model` for all of it.
    pub part: String,
    /// How it begins.
    pub same: Same,
}

/// How a part begins.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Same {
    /// As the donor's.
    Same,
    /// As the donor's if these tensors of it are equal, group by group.
    IfEqual(Vec<Vec<String>>),
    /// It adds nothing to the stream.
    Silent,
    /// Otherwise, and why.
    Otherwise(String),
}

/// The claims: one for each component of each layer, and one for the whole model.
pub(crate) fn claims((new, old): (&Side, &Side), moves: &[Move], depths: &[Taken]) -> Vec<Claim> {
    let by_name: BTreeMap<&str, &Move> = moves.iter().map(|m| (m.to.as_str(), m)).collect();
    let mut found = vec![];
    for (set, layer) in new.layers.iter().enumerate() {
        for name in &layer.components {
            let silent = layer.applied.iter().all(|depth| depths[*depth].silent);
            let same = part((new, old), set, name, &by_name);
            let same = if silent && adds_nothing(new, set, name, &by_name) { Same::Silent } else { same };
            found.push(Claim { part: format!("layers.{set}.{name}"), same });
        }
    }
    let whole = whole((new, old), &found, &by_name, depths);
    found.push(Claim { part: "model".into(), same: whole });
    found
}

fn otherwise(reason: impl Into<String>) -> Same {
    Same::Otherwise(reason.into())
}

/// Whether all that writes the stream is zero.
fn adds_nothing(new: &Side, set: usize, name: &str, moves: &BTreeMap<&str, &Move>) -> bool {
    let own = new.tensors.iter().filter(|t| t.set() == Some(set) && t.component() == Some(name));
    let mut writers = own.filter(|t| t.part.ends()).peekable();
    writers.peek().is_some()
        && writers.all(|t| {
            moves.get(t.name.as_str()).is_some_and(|m| m.steps == [Step::Zero] || starts_zero(m, t.init))
        })
}

fn starts_zero(m: &Move, init: Init) -> bool {
    m.steps == [Step::Fresh] && init == Init::Constant(0.0)
}

/// A component of a layer.
fn part((new, old): (&Side, &Side), set: usize, name: &str, moves: &BTreeMap<&str, &Move>) -> Same {
    let Some(own) = new.components.get(name) else { return otherwise("it is no component") };
    let tensors: Vec<_> =
        new.tensors.iter().filter(|t| t.set() == Some(set) && t.component() == Some(name)).collect();
    let from =
        |m: &Move| m.from.first().and_then(|source| old.tensor(&source.name)).and_then(|t| t.component());
    let donor = tensors.iter().find_map(|t| moves.get(t.name.as_str()).and_then(|m| from(m)));
    let Some(theirs) = donor.and_then(|donor| old.components.get(donor)) else {
        return otherwise("it comes of nothing of the donor");
    };
    // Outside loops nobody reads a mixture of projections.
    let from_loop =
        |m: &Move| Some(old.layers[old.tensor(&m.from.first()?.name)?.set()?].recurrent.is_some());
    let mixes = [
        new.layers[set].recurrent.is_some(),
        tensors.iter().find_map(|t| from_loop(moves.get(t.name.as_str())?)).unwrap_or(false),
    ];
    let (own, theirs) = (read(own, mixes[0]), read(theirs, mixes[1]));
    let ignored = match becomes(&own, &theirs) {
        Ok(ignored) => ignored,
        Err(reason) => return otherwise(reason),
    };
    let mut groups = vec![];
    let factored = |tail: &str| {
        let factors =
            tensors.iter().filter(|t| t.part.low().is_some_and(|(matrix, _)| matrix.path() == tail));
        let full = |m: &Move| full_rank(m, old);
        let mut factors = factors.map(|t| moves.get(t.name.as_str()).is_some_and(|m| full(m))).peekable();
        factors.peek().is_some() && factors.all(|full| full)
    };
    for t in &tensors {
        let Some(m) = moves.get(t.name.as_str()) else { continue };
        if ignored.contains(&t.part) || (m.steps == [Step::Fresh] && t.part.adapter().is_some()) {
            continue;
        }
        if m.noise > 0.0 {
            return otherwise(format!("`{}` has noise", t.tail));
        }
        if let Some((_, factor)) = t.part.low() {
            // At full rank they make up for any difference, and of equal layers there is none.
            if factor == Factor::B && !matches!(m.steps[..], [Step::Factor { .. }]) && !starts_zero(m, t.init)
            {
                return otherwise(format!("`{}` adds something", t.tail));
            }
            continue;
        }
        let wide = m.from.first().and_then(|source| old.tensor(&source.name)?.shape.last().copied());
        let exact = match &m.steps[..] {
            [] | [Step::Tile(_)] | [Step::Repeat(_)] | [Step::Pad { .. }] => true,
            [Step::Latent(latent)] => wide.is_some_and(|wide| latent.full(wide)),
            _ => false,
        };
        if !exact || m.from.is_empty() {
            return otherwise(format!("`{}` is made by: {}", t.tail, m.words()));
        }
        if m.from.len() > 1 && !factored(&t.tail) {
            groups.push(m.from.iter().map(|source| source.name.clone()).collect());
        }
    }
    if groups.is_empty() { Same::Same } else { Same::IfEqual(groups) }
}

/// A component as a layer reads it: a mixture of projections is of loops alone.
fn read(component: &Component, mixes: bool) -> Cow<'_, Component> {
    if mixes {
        return Cow::Borrowed(component);
    }
    let mut own = component.clone();
    own.unmix();
    Cow::Owned(own)
}

/// Whether a factor is of as high a rank as the matrix.
fn full_rank(m: &Move, old: &Side) -> bool {
    let [Step::Factor { rank, .. }] = &m.steps[..] else { return false };
    let shape = m.from.first().and_then(|source| old.tensor(&source.name)).map(|t| &t.shape[..]);
    matches!(shape, Some([.., high, wide]) if rank >= high.min(wide))
}

/// Whether settings let one component compute another's function, and the tensors on which it then
/// does not depend.
fn becomes(own: &Component, theirs: &Component) -> Result<Vec<Part>, String> {
    let differ = || Err("its settings differ from the donor's".to_string());
    match (own.known(), theirs.known()) {
        (Known::Experts(own), Known::Mlp(theirs)) => upcycled(own, theirs),
        (Known::Mlp(own), Known::Mlp(theirs)) => {
            let wide = Mlp { intermediate: theirs.intermediate, ..own.clone() };
            match wide == *theirs && own.intermediate >= theirs.intermediate {
                true => Ok(vec![]),
                false => differ(),
            }
        }
        (Known::Attention(a), Known::Attention(b)) if own.kind() == theirs.kind() => {
            let mut alike = a.clone();
            if let (Some(l), None) = (&a.latent, &b.latent) {
                return latent(a, l, b).map_or_else(|reason| Err(reason.into()), |()| Ok(vec![]));
            }
            // Heads that are averaged are refused by their tensor, which says how.
            if a.latent.is_none() {
                alike.kv_heads = b.kv_heads;
            }
            match alike == *b {
                true => Ok(vec![]),
                false => differ(),
            }
        }
        (Known::Attention(_) | Known::Experts(_) | Known::Mlp(_) | Known::Own, _) => match own == theirs {
            true => Ok(vec![]),
            false => differ(),
        },
    }
}

/// Latent attention computes what attention over heads did where all that turned goes on turning
/// and nothing is normalised on the way (2502.14837, section 3).
fn latent(own: &Attention, l: &Latent, theirs: &Attention) -> Result<(), &'static str> {
    let (projection, kv_heads) = (theirs.projection.clone(), theirs.kv_heads);
    let alike = Attention { latent: None, rope: theirs.rope, projection, kv_heads, ..own.clone() };
    match () {
        _ if theirs.qk_norm != QkNorm::None => Err("the donor normalises queries and keys"),
        _ if alike != *theirs => Err("its settings differ from the donor's"),
        _ if l.norm => Err("its latents are normalised"),
        _ if !crate::latent::turns_alike(own, theirs) => Err("not all turns that turned in the donor"),
        _ if !l.keys.is_multiple_of(theirs.kv_heads) => Err("heads share keys that turn"),
        _ => Ok(()),
    }
}

/// Experts that are all one network compute it where gates sum to one (sparse upcycling,
/// 2212.05055), wherever a token is sent.
fn upcycled(own: &Experts, theirs: &Mlp) -> Result<Vec<Part>, String> {
    let router = &own.router;
    let all = router.score == Score::Softmax && own.active == own.count + own.noop;
    let norms = (own.pre_norm, own.post_norm) == (theirs.pre_norm, theirs.post_norm);
    let wide = own.intermediate >= theirs.intermediate;
    match () {
        _ if own.activation != theirs.activation => Err("its activation is another".into()),
        _ if own.biased || theirs.biased => Err("experts and networks add vectors otherwise".into()),
        _ if !norms => Err("its norms stand elsewhere".into()),
        _ if !wide => Err("its intermediate size is smaller".into()),
        _ if own.depth_stream || theirs.depth_stream => Err("they leave keys in the depth stream".into()),
        _ if own.noop > 0 => Err("some experts return nothing".into()),
        _ if own.shared > 0 => Err("shared experts add something".into()),
        _ if router.scale != 1.0 || !(router.normalise || all) => Err("its gates do not sum to one".into()),
        _ => Ok(vec![
            mixture::part::ROUTER,
            mixture::part::ROUTER_QUERY,
            mixture::part::ROUTER_KEYS,
            mixture::part::ROUTER_QUERY_NORM,
            mixture::part::ROUTER_KEY_NORM,
            mixture::part::ROUTER_BIAS,
            mixture::part::LOGIT_BIAS,
        ]),
    }
}

/// The whole model.
fn whole(
    (new, old): (&Side, &Side),
    claims: &[Claim],
    moves: &BTreeMap<&str, &Move>,
    depths: &[Taken],
) -> Same {
    if let Err(reason) = ends((new, old), moves) {
        return otherwise(reason);
    }
    let of = |set: usize, name: &str| claims.iter().find(|c| c.part == format!("layers.{set}.{name}"));
    let (mut groups, mut depth, mut theirs) = (vec![], 0, old.work.iter());
    let changed = new.depths.len() != old.depths.len();
    for done in &new.work {
        let Done::Layer { set, expr, norm } = done else {
            match theirs.next() {
                Some(other) if other == done => continue,
                _ => return otherwise("what is done to the stream between layers differs"),
            }
        };
        let taken = &depths[depth];
        depth += 1;
        let mut names = vec![];
        components(expr, &mut names);
        let parts: Vec<_> = names.iter().filter_map(|name| of(*set, name)).collect();
        if taken.silent && !norm && parts.iter().all(|claim| claim.same == Same::Silent) {
            continue;
        }
        let Some(Done::Layer { set: from, expr: other, norm: normed }) = theirs.next() else {
            return otherwise("the donor has no layer at this depth");
        };
        if taken.layers != [(*from, 1.0)] || norm != normed {
            return otherwise(format!("layer {set} does not come of the donor's at its depth"));
        }
        if !fits(expr, other, &|name, other| donor(new, old, *set, name, moves, *from) == Some(other)) {
            return otherwise(format!("layer {set} is composed otherwise"));
        }
        for claim in parts {
            match &claim.same {
                Same::Same => {}
                Same::IfEqual(own) => groups.extend(own.iter().cloned()),
                Same::Silent => return otherwise(format!("{} adds nothing", claim.part)),
                Same::Otherwise(reason) => return otherwise(format!("{}: {reason}", claim.part)),
            }
        }
    }
    if theirs.next().is_some() {
        return otherwise("layers of the donor are left out");
    }
    let mixes = |side: &Side| side.layers.iter().any(|layer| layer.recurrent.is_some());
    let sees = |side: &Side| side.components.values().any(|component| sees_depth(component, mixes(side)));
    if changed && (sees(old) || sees(new)) {
        return otherwise("components that see the depth stand at other depths");
    }
    groups.sort();
    groups.dedup();
    if groups.is_empty() { Same::Same } else { Same::IfEqual(groups) }
}

/// Whether what a component gives depends on the depth at which it stands.
fn sees_depth(component: &Component, mixes: bool) -> bool {
    match component.known() {
        Known::Own => true,
        Known::Attention(_) if component.kind().mixes() == Mixes::Depths => true,
        Known::Attention(a) => {
            mixes && a.projection.is_some() || a.depth_keys || a.depth_stream.is_some() || a.value_residual
        }
        // Keys that one leaves in the depth stream are read at other depths.
        Known::Experts(Experts { depth_stream, .. }) | Known::Mlp(Mlp { depth_stream, .. }) => *depth_stream,
    }
}

/// The embedding, the head, and what the model says of the stream.
fn ends((new, old): (&Side, &Side), moves: &BTreeMap<&str, &Move>) -> Result<(), String> {
    let (a, b) = (&new.model, &old.model);
    let scales = a.embed_scale == b.embed_scale
        && a.head_bias == b.head_bias
        && a.logit_scale == b.logit_scale
        && a.logit_softcap == b.logit_softcap
        && a.output_scale == b.output_scale
        && a.norm == b.norm;
    if !scales || a.stream != b.stream {
        return Err("scales, norms or the stream of the model differ".into());
    }
    if a.hidden != b.hidden || a.vocab != b.vocab {
        return Err("its vocabulary or its hidden size is another".into());
    }
    if old.model.adapt.is_some() {
        return Err("the donor has adapters: merge them first".into());
    }
    let others = new.tensors.iter().filter(|t| t.component().is_none());
    for t in others {
        let Some(m) = moves.get(t.name.as_str()) else { continue };
        let silent = m.steps == [Step::Zero];
        if !silent && (m.from.len() != 1 || !m.steps.is_empty() || m.noise > 0.0) {
            return Err(format!("`{}` is made by: {}", t.name, m.words()));
        }
    }
    if new.model.tie && !old.model.tie {
        return Err("the donor's head is another matrix than its embedding".into());
    }
    Ok(())
}

/// The component of the donor that one of a layer comes of.
fn donor<'a>(
    new: &Side,
    old: &'a Side,
    set: usize,
    name: &str,
    moves: &BTreeMap<&str, &Move>,
    from: usize,
) -> Option<&'a str> {
    let own = new.tensors.iter().filter(|t| t.set() == Some(set) && t.component() == Some(name));
    let mut sources = own.filter_map(|t| moves.get(t.name.as_str())).flat_map(|m| &m.from);
    sources.find_map(|s| old.tensor(&s.name).filter(|t| t.set() == Some(from)).and_then(|t| t.component()))
}

/// The components of a composition.
fn components<'a>(expr: &'a Expr, found: &mut Vec<&'a str>) {
    match expr {
        Expr::Component(name) => found.push(name),
        Expr::Norm => {}
        Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().for_each(|e| components(e, found)),
        Expr::Skip(_, inner) => components(inner, found),
    }
}

/// Whether two compositions are the same with components in each other's places.
fn fits(a: &Expr, b: &Expr, same: &dyn Fn(&str, &str) -> bool) -> bool {
    let all = |a: &[Expr], b: &[Expr]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| fits(a, b, same));
    match (a, b) {
        (Expr::Component(a), Expr::Component(b)) => same(a, b),
        (Expr::Norm, Expr::Norm) => true,
        (Expr::Sequential(a), Expr::Sequential(b)) | (Expr::Parallel(a), Expr::Parallel(b)) => all(a, b),
        (Expr::Skip(own, a), Expr::Skip(other, b)) => own == other && fits(a, b, same),
        (Expr::Component(_) | Expr::Norm | Expr::Sequential(_) | Expr::Parallel(_) | Expr::Skip(..), _) => {
            false
        }
    }
}
