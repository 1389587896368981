//! Shapes: how numbers of a donor's tensor become those of a tensor.

use crate::{Heads, Side, Step, Weight, word};
use dreamc_compiler::lower::attention::part;
use dreamc_dsl::spec::{Attention, How};

/// The steps from the shape of one tensor to that of another; none where no such way leads there.
/// Without a way said, those that roles and shapes allow.
pub(crate) fn steps(
    (new, to): (&Side, &Weight),
    (old, from): (&Side, &Weight),
    rows: Option<u64>,
    how: Option<How>,
) -> Option<Vec<Step>> {
    let mut shape = from.shape.clone();
    if let (Some(rows), [.., high, _]) = (rows, &mut shape[..]) {
        *high = rows;
    }
    let equal = to.shape == shape;
    match how {
        None if equal => Some(vec![]),
        None => grouped((new, to), (old, from)).or_else(|| experts(to, &shape)),
        Some(How::Copy) => equal.then(Vec::new),
        Some(How::Slice) => fits(&to.shape, &shape).then(|| vec![Step::Slice]),
        Some(How::Pad) => fits(&shape, &to.shape).then(|| vec![Step::Pad { zero: to.part.ends() }]),
        Some(How::Group) => match grouped((new, to), (old, from)) {
            Some(steps) => Some(steps).filter(|steps| matches!(steps[..], [Step::Group(_)])),
            None if equal => Some(vec![]),
            None => merged(&to.shape, &shape),
        },
        Some(How::Tile) => match grouped((new, to), (old, from)) {
            Some(steps) => Some(steps).filter(|steps| matches!(steps[..], [Step::Repeat(_)])),
            None if equal => Some(vec![]),
            None => experts(to, &shape).or_else(|| repeated(&to.shape, &shape)),
        },
        Some(How::Factor | How::Fresh | How::Zero) => None,
    }
}

/// Whether a shape is within another.
fn fits(small: &[u64], large: &[u64]) -> bool {
    small.len() == large.len() && small.iter().zip(large).all(|(a, b)| a <= b)
}

fn attention<'a>(side: &'a Side, weight: &Weight) -> Option<&'a Attention> {
    side.components.get(weight.component()?)?.attention()
}

/// Another number of key and value heads for as many query heads.
fn grouped((new, to): (&Side, &Weight), (old, from): (&Side, &Weight)) -> Option<Vec<Step>> {
    let (ours, theirs) = (attention(new, to)?, attention(old, from)?);
    let fused = matches!(to.part, part::QKV | part::QKV_BIAS) && to.part == from.part;
    let alike = (ours.heads, ours.head_size) == (theirs.heads, theirs.head_size);
    let plain = ours.latent.is_none() && theirs.latent.is_none() && theirs.kv_heads != ours.kv_heads;
    if !fused || !alike || !plain {
        return None;
    }
    let heads = Heads { queries: ours.heads, from: theirs.kv_heads, to: ours.kv_heads, size: ours.head_size };
    match (heads.from, heads.to) {
        (from, to) if from > to && from.is_multiple_of(to) => Some(vec![Step::Group(heads)]),
        (from, to) if to > from && to.is_multiple_of(from) => Some(vec![Step::Repeat(heads)]),
        _ => None,
    }
}

/// One matrix for each of several experts.
fn experts(to: &Weight, from: &[u64]) -> Option<Vec<Step>> {
    match &to.shape[..] {
        [count, one @ ..] if one == from => Some(vec![Step::Tile(*count)]),
        _ => None,
    }
}

/// A number of neighbouring matrices as one.
fn merged(to: &[u64], from: &[u64]) -> Option<Vec<Step>> {
    match (to, from) {
        ([small, to @ ..], [large, from @ ..]) if to == from && large.is_multiple_of(*small) => {
            Some(vec![Step::Merge(large / small)])
        }
        (to, [large, from @ ..]) if to == from => Some(vec![Step::Merge(*large)]),
        _ => None,
    }
}

/// All of them several times.
fn repeated(to: &[u64], from: &[u64]) -> Option<Vec<Step>> {
    match (to, from) {
        ([large, to @ ..], [small, from @ ..]) if to == from && large.is_multiple_of(*small) => {
            Some(vec![Step::Tile(large / small)])
        }
        _ => None,
    }
}

/// The ways that lead from one shape to another, in words.
pub(crate) fn ways(new: (&Side, &Weight), old: (&Side, &Weight)) -> String {
    let all = [How::Slice, How::Pad, How::Group, How::Tile];
    let mut known: Vec<String> = all
        .into_iter()
        .filter(|how| steps(new, old, None, Some(*how)).is_some())
        .map(|how| format!("`how: {}`", word(how)))
        .collect();
    known.push("`how: fresh`".into());
    known.join(", ")
}
