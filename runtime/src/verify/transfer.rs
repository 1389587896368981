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
use dreamc_compiler::architecture::components;
use dreamc_compiler::bind::{Adapted, Factor, Owner, Part};
use dreamc_compiler::compiled::{Init, Tensor, TensorKind};
use dreamc_compiler::{CompileError, Options};
use dreamc_dsl::Spec;
use dreamc_dsl::define::graph::Purpose;
use dreamc_dsl::spec::{OptimizerKind, Stream, TransferRule};
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

/// The factors on a tensor's rate and on AdamW's ε by the recipe's `transfer`, in a model of so
/// many applications.
pub(super) fn factors(spec: &Spec, depth: u64, base: &Shapes, t: &Tensor) -> [f64; 2] {
    let (train, model) = (&spec.train, &spec.model);
    let Some(rule) = &train.transfer else { return [1.0, 1.0] };
    let d = depth as f64 / rule.depth as f64;
    let wide = model.hidden as f64 / rule.width as f64;
    let tokens = train.steps * train.batch * train.sequence.unwrap_or(model.context);
    let data = rule.tokens.map_or(1.0, |base| (tokens as f64 / base as f64).powf(-0.32));
    let whole = whole(train, t);
    if whole && matches!(train.optimizer, OptimizerKind::MuonH(_)) {
        return [if rule.rule == TransferRule::Hyperp { data / d.sqrt() } else { 1.0 }, 1.0];
    }
    let alpha = match rule.rule {
        TransferRule::Mup | TransferRule::Hyperp => Some(0.5),
        TransferRule::Completep => Some(1.0),
        TransferRule::Spectral => None,
        TransferRule::Standard => return [1.0, 1.0],
    };
    let [m, n] = grown(t, base);
    let gradient = matches!(train.optimizer, OptimizerKind::Sgd(_));
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
        (TransferRule::Mup | TransferRule::Hyperp | TransferRule::Spectral | TransferRule::Standard, ..) => {
            1.0
        }
    };
    [width * deep * data, eps]
}

/// How much longer an orthogonal step is than at the base, for the shape of its matrix.
fn taller(t: &Tensor, base: &Shapes) -> f64 {
    let tall = |shape: &[u64]| match shape {
        [.., n, k] => (*n as f64 / *k as f64).max(1.0).sqrt(),
        _ => 1.0,
    };
    tall(&t.shape) / base.get(&t.name).map_or(1.0, |shape| tall(shape))
}

/// Whether a tensor is the last before the output of its component: the gain of a norm behind it,
/// where there is one.
fn ends(spec: &Spec, t: &Tensor) -> bool {
    let component = match t.owner {
        Owner::Component(i) => components(&spec.model).get_index(i as usize).map(|(_, c)| c.norms().1),
        _ => None,
    };
    if component == Some(true) {
        return t.part == Part::PostNorm;
    }
    matches!(
        t.part,
        Part::Out
            | Part::OutShared
            | Part::OutBias
            | Part::Down
            | Part::DownBias
            | Part::SharedDown
            | Part::Own(_, Purpose::Output)
            | Part::Low(Adapted::Out | Adapted::Down | Adapted::Own(_, Purpose::Output), Factor::B)
            | Part::Adapter(
                Adapted::Out | Adapted::Down | Adapted::SharedDown | Adapted::Own(_, Purpose::Output),
                Factor::B
            )
    )
}

/// The deviation of a tensor's first values over that at the base, by the width; `None` of one that
/// begins at a number, or as a matrix that is known, and where the rule says nothing of it.
pub(super) fn deviation(spec: &Spec, base: &Shapes, t: &Tensor) -> Option<f64> {
    let Init::Normal(_) = t.init else { return None };
    let rule = spec.train.transfer.as_ref()?.rule;
    let [m, _] = grown(t, base);
    // A norm stands behind a router's query, so that its size is that of first values anyway. A
    // sphere keeps what it began with, which is the default.
    let hidden = t.part == Part::RouterQuery || rule == TransferRule::Hyperp && whole(&spec.train, t);
    let stays = stays(t) && !hidden;
    // The spectral rule looks at the sizes themselves, whatever stands behind.
    if (rule, t.part) == (TransferRule::Spectral, Part::RouterQuery) {
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

/// Whether a tensor's numbers are factors of a sum over the width.
fn sums_over_width(t: &Tensor) -> bool {
    match t.kind {
        TensorKind::Head => true,
        TensorKind::Embedding | TensorKind::Balance => false,
        TensorKind::Matrix | TensorKind::Shared | TensorKind::Routed => {
            !matches!(t.part, Part::Low(_, Factor::B) | Part::Adapter(_, Factor::B))
        }
        TensorKind::Router => {
            matches!(t.part, Part::Router | Part::RouterQuery | Part::PredictorUp | Part::ChoiceTable)
        }
        TensorKind::Gain | TensorKind::Steady => {
            t.shape.len() > 1 && t.part == Part::Mix
                || matches!(
                    t.part,
                    Part::SharedWeight
                        | Part::LaneAlphaWeight
                        | Part::LaneBetaWeight
                        | Part::LaneMixWeight
                        | Part::ReadQuery
                        | Part::ExitGate
                        | Part::PredictorUp
                        | Part::Low(_, Factor::A)
                        | Part::Adapter(_, Factor::A)
                )
        }
    }
}

/// Whether there is such a sum for each of a size that stays.
fn stays(t: &Tensor) -> bool {
    matches!(
        t.part,
        Part::Table
            | Part::SharedWeight
            | Part::Router
            | Part::PredictorUp
            | Part::LaneAlphaWeight
            | Part::LaneBetaWeight
            | Part::LaneMixWeight
            | Part::LastLanes
            | Part::ReadQuery
            | Part::ExitGate
            | Part::ChoiceTable
            | Part::Low(_, Factor::A)
            | Part::Adapter(_, Factor::A)
    )
}
