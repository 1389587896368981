//! Which tensors are trained, and how: the patterns of a recipe.

use crate::bind::Factor;
use crate::compiled::TensorKind;
use crate::lower::Weight;
use crate::optim::{Rule, matrix};
use dreamc_dsl::spec::Train;

/// Which tensors are trained, and how: by tensor name. `None` is frozen: of a model that `adapts`
/// all but its adapters, whose norms are the base's.
pub(crate) fn recipe((train, adapts): (&Train, bool), name: &str, w: &Weight, shape: &[u64]) -> Option<Rule> {
    // Passes are a dimension of the tensor in checkpoints.
    let (dims, kind) = (shape.len() + usize::from(w.passes.is_some()), w.kind);
    let hit = |p: &String| if p == "routers" { kind == TensorKind::Router } else { matches(p, name) };
    if kind == TensorKind::Balance
        || (adapts && w.part.adapter().is_none())
        || matches!(w.part.adapter(), Some((_, Factor::Norm)))
        || (!train.only.is_empty() && !train.only.iter().any(hit))
        || train.freeze.iter().any(hit)
    {
        return None;
    }
    let decays =
        dims >= 2 && kind != TensorKind::Steady && (kind != TensorKind::Embedding || train.decay_embeddings);
    let mut chosen = (if decays { train.weight_decay } else { 0.0 }, 1.0);
    for group in &train.groups {
        if hit(&group.pattern) {
            chosen = (group.weight_decay.unwrap_or(chosen.0), group.learning_rate);
        }
    }
    Some(Rule { decay: chosen.0, factor: chosen.1, eps: 1.0, matrix: matrix(train, w, shape) })
}

/// Whether a name matches a pattern in which `*` stands for any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let Some(mut rest) = pieces.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let pieces: Vec<&str> = pieces.collect();
    let Some((last, middle)) = pieces.split_last() else { return rest.is_empty() };
    for piece in middle {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}
