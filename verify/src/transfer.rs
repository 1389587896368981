//! Rules that carry a rate from size to size, once more and without the compiler's graph.
//!
//! *In*: a tensor here and its shape at the base. *Out*: the factors on its rate and on AdamW's ε,
//! and the power law of the deviation of its first values. The columns of Adam of table 3 of
//! *Tensor Programs V* (Yang et al., 2203.03466) tell tensors apart by the widths that they
//! connect:
//!
//! | sums over | for each of | variance of first values | rate |
//! |---|---|---|---|
//! | a size that stays | the width | `1` | `1` |
//! | the width | the width | `1 / width` | `1 / width` |
//! | the width | a size that stays | `1 / width²` | `1 / width` |
//!
//! A size that stays for each of one that stays is of the first kind, gains and biases too. The
//! depth is that of *Tensor Programs VI* (Yang et al., 2310.02244) and of CompleteP (2505.01618),
//! the rule of `muonh` that of 2603.28743. A matrix has its outputs as rows: the last dimension is
//! summed over.

use super::steps::whole;
use super::subject::Pipeline;
use dreamc_compiler::architecture::{Architecture, Work, components};
use dreamc_compiler::bind::{Adapted, Factor, Owner};
use dreamc_compiler::compiled::{Init, Tensor, TensorKind};
use dreamc_compiler::lower::{self, attention, choice, exit, mixture, skip, statement};
use dreamc_compiler::transfer::passes;
use dreamc_compiler::wiring::{attend, lanes};
use dreamc_compiler::{CompileError, Options};
use dreamc_dsl::Spec;
use dreamc_dsl::define::graph::{Graph, Purpose};
use dreamc_dsl::spec::{Activation, Component, Described, Known, Mixes, Pace, Stream, TransferRule};
use indexmap::IndexMap;

/// Shapes of tensors at the base, by name.
pub(super) type Shapes = IndexMap<String, Vec<u64>>;

/// Those of the base of a recipe's `transfer`.
pub(super) fn shapes(
    spec: &Spec,
    options: &Options,
    pipeline: &dyn Pipeline,
) -> Result<Shapes, CompileError> {
    let Some(transfer) = &spec.train.transfer else { return Ok(Shapes::new()) };
    let mut base = spec.clone();
    base.model = transfer.base(&spec.model).model;
    base.train.transfer = None;
    let compiled = pipeline.compile(&base, options)?;
    Ok(compiled.tensors.into_iter().map(|t| (t.name, t.shape)).collect())
}

/// How much more numbers a tensor sums over, and how many more sums it has.
fn grown(t: &Tensor, base: &Shapes) -> [f64; 2] {
    let base = base.get(&t.name).map_or(&t.shape[..], |shape| &shape[..]);
    let over = |here: &[u64], base: &[u64]| {
        here.iter().zip(base).map(|(a, b)| *a as f64 / *b as f64).product::<f64>()
    };
    let all = over(&t.shape, base);
    match t.shape[..] {
        [.., _] if stays(t) && t.kind != TensorKind::Head => [all, 1.0],
        [.., _, _] => {
            let n = t.shape.len();
            [over(&t.shape[n - 1..], &base[n - 1..]), over(&t.shape[n - 2..n - 1], &base[n - 2..n - 1])]
        }
        _ => [all, 1.0],
    }
}

/// The factors on a tensor's rate and on AdamW's ε by the recipe's `transfer`, in a model of
/// `depth` applications; `None` where this page has none.
pub(super) fn factors(spec: &Spec, depth: u64, base: &Shapes, t: &Tensor) -> Option<[f64; 2]> {
    match &spec.train.transfer {
        Some(rule) if rule.depth != depth && !ends_known(spec, t) => None,
        Some(rule) if rule.rule == TransferRule::Umup => Some([unit(spec, t)?, 1.0]),
        _ => Some(by_ratio(spec, depth, base, t)),
    }
}

/// The factors of the rules that have a base.
fn by_ratio(spec: &Spec, depth: u64, base: &Shapes, t: &Tensor) -> [f64; 2] {
    let (train, model) = (&spec.train, &spec.model);
    let Some(rule) = &train.transfer else { return [1.0, 1.0] };
    let d = depth as f64 / rule.depth as f64;
    let wide = model.hidden as f64 / rule.width as f64;
    let tokens = train.steps * train.batch * train.sequence.unwrap_or(model.context);
    let data = rule.tokens.map_or(1.0, |base| (tokens as f64 / base as f64).powf(-0.32));
    let whole = whole(train, t);
    if whole && train.optimizer.pace() == Pace::Norms {
        return [if rule.rule == TransferRule::Hyperp { data / d.sqrt() } else { 1.0 }, 1.0];
    }
    let alpha = match rule.rule {
        TransferRule::Mup | TransferRule::Hyperp | TransferRule::Umup => Some(0.5),
        TransferRule::Completep => Some(1.0),
        TransferRule::Spectral => None,
        TransferRule::Standard => return [1.0, 1.0],
    };
    let [m, n] = grown(t, base);
    let gradient = train.optimizer.pace() == Pace::Gradients;
    let width = match (sums_over_width(t), whole) {
        // In proportion to the gradient: the outputs over the inputs.
        (false, _) if gradient => m * n,
        (true, false) if gradient => n / m,
        (false, _) => 1.0,
        (true, true) => (n / m).sqrt() / taller(t, base),
        (true, false) => 1.0 / m,
    };
    let inside = matches!(t.owner, Owner::Component(_) | Owner::Skip(_));
    let averaged = matches!(model.stream, Stream::Attend { .. });
    let deep = match (inside && !averaged, alpha) {
        // A mean of sources: what they add to their sum, over its size.
        (false, Some(0.5)) if inside && !gradient => d.powf(-0.5),
        (false, _) | (true, None) => 1.0,
        (true, Some(_)) if gradient && ends(spec, t) => 1.0 / d,
        (true, Some(alpha)) if gradient => d.powf(2.0 * alpha - 1.0),
        (true, Some(alpha)) if ends(spec, t) => d.powf(alpha - 1.0) * d.powf(-alpha),
        (true, Some(alpha)) => d.powf(alpha - 1.0),
    };
    let eps = match (rule.rule, inside, t.kind) {
        (TransferRule::Completep, false, TensorKind::Head) => 1.0,
        (TransferRule::Completep, true, _) if !ends(spec, t) && !averaged => 1.0 / (wide * d),
        (TransferRule::Completep, _, _) => 1.0 / wide,
        (
            TransferRule::Mup
            | TransferRule::Hyperp
            | TransferRule::Spectral
            | TransferRule::Standard
            | TransferRule::Umup,
            ..,
        ) => 1.0,
    };
    [width * deep * data, eps]
}

/// The rate of a tensor of deviation 1 times its multiplier (2407.17465): with `i` the last
/// dimension and `l` layers, `i^-1/2` for embeddings, `1/i` for what sums over it, `l^-1/2` in
/// components, and for what ends one the numbers of its branch. Of a definition, which may end in
/// anything, it says nothing.
fn unit(spec: &Spec, t: &Tensor) -> Option<f64> {
    let i = t.shape.last().map_or(1.0, |i| *i as f64);
    let width = match t.kind {
        TensorKind::Embedding => i.powf(-0.5),
        _ if sums_over_width(t) => 1.0 / i,
        // Products over a size that stays.
        _ if matches!(
            t.part,
            mixture::part::ROUTER_KEYS
                | skip::part::PREDICTOR_DOWN
                | skip::part::NETWORK_DOWN
                | choice::part::NETWORK_DOWN
        ) || is_factor(t, Factor::B) =>
        {
            1.0 / i
        }
        _ => 1.0,
    };
    if !matches!(t.owner, Owner::Component(_) | Owner::Skip(_)) {
        return Some(width);
    }
    let a = Architecture::new(&spec.model, None).ok()?;
    let looped = a.bodies.iter().filter(|b| matches!(b.work, Work::Layer(_)) && b.recurrent.is_some());
    let looped: u64 = looped.map(|b| b.applications).sum();
    let passes = passes(&spec.model.body) as f64;
    let layers = (a.depth - looped.min(a.depth)) as f64 + looped as f64 / passes;
    let inside = width * layers.powf(-0.5);
    if !ends(spec, t) {
        return Some(inside);
    }
    let ended = inside * number(spec, t)?;
    if matches!(spec.model.stream, Stream::Attend { .. }) {
        return Some(ended);
    }
    let set = a.prefixes().find(|(prefix, _)| t.name.starts_with(&format!("{prefix}.")));
    let again = set.is_some_and(|(_, (body, _))| a.bodies[body].recurrent.is_some());
    Some(ended * layers.powf(-0.5) / if again { passes } else { 1.0 })
}

/// The number that brings what the end of a component reads to a deviation of 1 (`unit-scaling`
/// 0.3.5): of an attention over `t` tokens with heads of `d` by 1/d,
/// `e^(-(1 - 1/(1 + 4d)) ln √(ln t / t))`; of a product with `silu`, `2^3/4`; 1 of others.
fn number(spec: &Spec, t: &Tensor) -> Option<f64> {
    let Owner::Component(i) = t.owner else { return Some(1.0) };
    if !matches!(
        t.part,
        attention::part::OUT | attention::part::OUT_SHARED | mixture::part::DOWN | mixture::part::SHARED_DOWN
    ) {
        return Some(1.0);
    }
    let all = components(&spec.model);
    let component = all.get_index(i as usize)?.1;
    let over_tokens = component.kind().mixes() == Mixes::Tokens;
    Some(match component.known() {
        Known::Attention(a)
            if over_tokens && a.gate.is_none() && !a.sink && !a.depth_keys && a.depth_stream.is_none() =>
        {
            let tokens = spec.train.sequence.unwrap_or(spec.model.context);
            let tokens = a.window.map_or(tokens, |window| window.min(tokens)) as f64;
            let share = 1.0 - 1.0 / (1.0 + 4.0 * a.head_size as f64);
            if tokens > 1.0 { (tokens / tokens.ln()).powf(share / 2.0) } else { 1.0 }
        }
        Known::Mlp(m) if m.activation == Activation::Swiglu => 2f64.powf(0.75),
        Known::Experts(e) if e.activation == Activation::Swiglu => 2f64.powf(0.75),
        Known::Attention(_) | Known::Mlp(_) | Known::Experts(_) => 1.0,
        Known::Own => return None,
    })
}

/// How much longer an orthogonal step is than at the base, for the shape of its matrix.
fn taller(t: &Tensor, base: &Shapes) -> f64 {
    let tall = |shape: &[u64]| match shape {
        [.., n, k] => (*n as f64 / *k as f64).max(1.0).sqrt(),
        _ => 1.0,
    };
    tall(&t.shape) / base.get(&t.name).map_or(1.0, |shape| tall(shape))
}

/// Whether the end of a tensor's component is known without its graph: a definition may return
/// something else than a `linear`.
fn ends_known(spec: &Spec, t: &Tensor) -> bool {
    let Owner::Component(i) = t.owner else { return true };
    match components(&spec.model).get_index(i as usize) {
        Some((_, Component::Defined(own))) => {
            let output = |graph: Graph| graph.weights.iter().any(|w| w.purpose == Purpose::Output);
            own.norms().1 || own.graph(&spec.model).is_ok_and(output)
        }
        _ => true,
    }
}

/// Whether a tensor is the last before the output of its component: the gain of a norm after it,
/// where there is one.
fn ends(spec: &Spec, t: &Tensor) -> bool {
    let component = match t.owner {
        Owner::Component(i) => components(&spec.model).get_index(i as usize).map(|(_, c)| c.norms().1),
        _ => None,
    };
    if component == Some(true) {
        return t.part == lower::part::POST_NORM;
    }
    match factor(t) {
        Some((matrix, factor)) => factor == Factor::B && matrix.ends(),
        None => t.part.ends(),
    }
}

/// The deviation of a tensor's first values over that at the base, by the width; `None` of one that
/// begins at a number, or as a matrix that is known, and where the rule says nothing of it.
pub(super) fn deviation(spec: &Spec, base: &Shapes, t: &Tensor) -> Option<f64> {
    let Init::Normal(_) = t.init else { return None };
    let rule = spec.train.transfer.as_ref()?.rule;
    let [m, _] = grown(t, base);
    // A norm stands after a router's query, so that its size is that of first values anyway. A
    // sphere keeps what it began with, which is the default.
    let hidden =
        t.part == mixture::part::ROUTER_QUERY || rule == TransferRule::Hyperp && whole(&spec.train, t);
    let stays = stays(t) && !hidden;
    // The spectral rule looks at the sizes themselves, whatever stands after them.
    if (rule, t.part) == (TransferRule::Spectral, mixture::part::ROUTER_QUERY) {
        let by = |shape: &[u64]| match shape {
            [.., o, i] => (*i as f64).powf(-0.5) * (*o as f64 / *i as f64).sqrt().min(1.0),
            _ => 1.0,
        };
        return base.get(&t.name).map(|shape| by(&t.shape) / by(shape));
    }
    Some(match (rule, sums_over_width(t) || hidden, stays) {
        (TransferRule::Standard, ..) | (TransferRule::Spectral, _, true) => return None,
        (_, false, _) => 1.0,
        (_, true, false) => m.powf(-0.5),
        (_, true, true) => 1.0 / m,
    })
}

/// The matrix and the factor that a tensor is of what a pass, or an adapter, adds.
fn factor(t: &Tensor) -> Option<(Adapted, Factor)> {
    t.part.low().or(t.part.adapter())
}

/// Whether a tensor is that factor of a matrix of low rank.
fn is_factor(t: &Tensor, which: Factor) -> bool {
    factor(t).is_some_and(|(_, factor)| factor == which)
}

/// Whether a tensor's numbers are factors of a sum over the width.
fn sums_over_width(t: &Tensor) -> bool {
    match t.kind {
        TensorKind::Head => true,
        TensorKind::Embedding | TensorKind::Balance => false,
        TensorKind::Matrix | TensorKind::Shared | TensorKind::Routed => !is_factor(t, Factor::B),
        TensorKind::Router => {
            matches!(
                t.part,
                mixture::part::ROUTER
                    | skip::part::ROUTER
                    | mixture::part::ROUTER_QUERY
                    | skip::part::PREDICTOR_UP
                    | skip::part::NETWORK_UP
                    | choice::part::NETWORK_UP
                    | choice::part::TABLE
            )
        }
        TensorKind::Gain | TensorKind::Steady => {
            t.shape.len() > 1 && t.part == statement::part::MIX
                || matches!(
                    t.part,
                    mixture::part::SHARED_WEIGHT
                        | lanes::part::ALPHA_WEIGHT
                        | lanes::part::BETA_WEIGHT
                        | lanes::part::MIX_WEIGHT
                        | attend::part::QUERY
                        | exit::part::GATE
                        | skip::part::PREDICTOR_UP
                )
                || is_factor(t, Factor::A)
        }
    }
}

/// Whether there is such a sum for each of a size that stays.
fn stays(t: &Tensor) -> bool {
    matches!(
        t.part,
        lower::ends::part::TABLE
            | lanes::part::TABLE
            | mixture::part::SHARED_WEIGHT
            | mixture::part::ROUTER
            | skip::part::ROUTER
            | skip::part::PREDICTOR_UP
            | skip::part::NETWORK_UP
            | choice::part::NETWORK_UP
            | lanes::part::ALPHA_WEIGHT
            | lanes::part::BETA_WEIGHT
            | lanes::part::MIX_WEIGHT
            | lanes::part::LAST
            | attend::part::QUERY
            | exit::part::GATE
            | choice::part::TABLE
    ) || is_factor(t, Factor::A)
}
