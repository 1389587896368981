//! Rules that carry a rate from size to size, once more and without the compiler.
//!
//! *In*: a tensor and the recipe's `transfer`. *Out*: the factor on its rate, and the power of the
//! width that the deviation of its first values follows. The columns of Adam of table 3 of *Tensor
//! Programs V* (Yang et al., 2203.03466) tell tensors apart by the widths that they connect:
//!
//! | sums over | for each of | variance of first values | rate |
//! |---|---|---|---|
//! | a size that stays | the width | `1` | `1` |
//! | the width | the width | `1 / width` | `1 / width` |
//! | the width | a size that stays | `1 / width²` | `1 / width` |
//!
//! A size that stays for each of one that stays is of the first kind, gains and biases too. The
//! depth is that of *Tensor Programs VI* (Yang et al., 2310.02244), the rule of `muonh` that of
//! 2603.28743.

use super::steps::whole;
use dreamc_compiler::bind::{Adapted, Factor, Owner, Part};
use dreamc_compiler::compiled::{Init, Tensor, TensorKind};
use dreamc_dsl::Spec;
use dreamc_dsl::define::graph::Purpose;
use dreamc_dsl::spec::{OptimizerKind, TransferRule};

/// The factor on a tensor's rate by the recipe's `transfer`, in a model of so many applications.
pub(super) fn rate(spec: &Spec, depth: u64, t: &Tensor) -> f64 {
    let (train, model) = (&spec.train, &spec.model);
    let Some(rule) = train.transfer else { return 1.0 };
    let m = model.hidden as f64 / rule.width as f64;
    let d = depth as f64 / rule.depth as f64;
    let tokens = train.steps * train.batch * train.sequence.unwrap_or(model.context);
    let data = rule.tokens.map_or(1.0, |base| (tokens as f64 / base as f64).powf(-0.32));
    let whole = whole(train, t);
    if whole && matches!(train.optimizer, OptimizerKind::MuonH(_)) {
        return data / d.sqrt();
    }
    let width = match (sums_over_width(t), whole, stays(t)) {
        (false, ..) | (true, true, false) => 1.0,
        (true, true, true) => m.powf(-0.5),
        (true, false, _) => 1.0 / m,
    };
    let adds = matches!(
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
    );
    let inside = matches!(t.owner, Owner::Component(_) | Owner::Skip(_));
    let depth = match (inside, adds) {
        (false, _) => 1.0,
        (true, false) => d.powf(-0.5),
        (true, true) => 1.0 / d,
    };
    width * depth * data
}

/// The power of the width that the deviation of a tensor's first values follows; `None` of one that
/// begins at a number, or as a matrix that is known.
pub(super) fn deviation(spec: &Spec, t: &Tensor) -> Option<f64> {
    let Init::Normal(_) = t.init else { return None };
    let rule = spec.train.transfer?.rule;
    // A norm stands behind a router's query, so that its size is that of first values anyway. A
    // sphere keeps what it began with, which is the default.
    let hidden = t.part == Part::RouterQuery || rule == TransferRule::Hyperp && whole(&spec.train, t);
    Some(match (sums_over_width(t) || hidden, stays(t) && !hidden) {
        (false, _) => 0.0,
        (true, false) => -0.5,
        (true, true) => -1.0,
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
