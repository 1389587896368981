//! One learning rate for models of several sizes.
//!
//! *In*: a recipe with a `transfer`, a model, and a tensor by what its numbers connect ([`Role`]).
//! *Out*: a [`Share`]: factors on the deviation of its first values and on its learning rate.
//! *Promise*: at the size of the base every factor is 1, so that the base is trained bit for bit as
//! without a rule; a rule is one file.
//!
//! Widths of components are taken to grow with the hidden size: heads in number, intermediate
//! sizes, all at one head size. The number of experts does not grow.

mod hyperp;
mod mup;

use crate::architecture::Architecture;
use crate::bind::{Adapted, Factor, Owner, Part};
use crate::compiled::Init;
use crate::lower::Weight;
use dreamc_dsl::define::graph::Purpose;
use dreamc_dsl::spec::{Train, TransferRule};

/// Widths that the numbers of a tensor connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// From a size that stays to the width: the embedding.
    Input,
    /// From width to width.
    Hidden,
    /// From the width to a size that stays: the head, routers.
    Output,
    /// Between sizes that stay.
    Small,
    /// One number for each of the width, or fewer: gains, biases.
    Vector,
}

/// Where a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Outside the layers' components.
    Stream,
    /// Inside a component.
    Branch,
    /// The last thing before the output of a component, whose first values shrink with the depth.
    End,
}

/// A tensor as rules look at it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    role: Role,
    place: Place,
    /// Whether the optimizer moves its whole matrices.
    whole: bool,
}

/// How much larger than the base a run is.
#[derive(Clone, Copy, Debug)]
struct Growth {
    width: f64,
    depth: f64,
    tokens: f64,
}

/// Factors of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    /// On the standard deviation of its first values, over the default's.
    pub init: f64,
    /// On its learning rate. Weight decay keeps its product with the rate.
    pub rate: f64,
}

/// A rule.
trait Rule {
    fn share(&self, seen: Seen, growth: Growth) -> Share;
}

/// The factors of a tensor; 1 without a rule.
pub(crate) fn share(train: &Train, a: &Architecture, w: &Weight, whole: bool) -> Share {
    let Some(t) = train.transfer else { return Share { init: 1.0, rate: 1.0 } };
    let over = |here: u64, base: u64| here as f64 / base.max(1) as f64;
    let tokens = train.steps * train.batch * train.sequence.unwrap_or(a.model.context);
    let growth = Growth {
        width: over(a.model.hidden, t.width),
        depth: over(a.depth, t.depth),
        tokens: t.tokens.map_or(1.0, |base| over(tokens, base)),
    };
    let rule: &dyn Rule = match t.rule {
        TransferRule::Mup => &mup::Mup,
        TransferRule::Hyperp => &hyperp::Hyperp,
    };
    rule.share(Seen { role: role(w), place: place(w), whole }, growth)
}

/// How a tensor begins under its factor.
pub(crate) fn begins(init: Init, share: Share) -> Init {
    match init {
        Init::Normal(deviation) => Init::Normal(deviation * share.init),
        Init::Constant(_)
        | Init::Identity { .. }
        | Init::Pick { .. }
        | Init::Uniform(..)
        | Init::LogUniform(..)
        | Init::InverseSoftplusUniform(..) => init,
    }
}

fn place(w: &Weight) -> Place {
    let inside = match w.owner {
        Owner::Component(_) | Owner::Skip(_) => true,
        Owner::Embedding
        | Owner::Head
        | Owner::Stream
        | Owner::Pool(_)
        | Owner::Saved(_)
        | Owner::Norm(_)
        | Owner::Lanes(_)
        | Owner::Output
        | Owner::Sources
        | Owner::Loop
        | Owner::Exit
        | Owner::Members
        | Owner::Choice => false,
    };
    let end = matches!(
        w.part,
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
    match (inside, end) {
        (false, _) => Place::Stream,
        (true, false) => Place::Branch,
        (true, true) => Place::End,
    }
}

fn role(w: &Weight) -> Role {
    match w.part {
        Part::Table if w.owner == Owner::Embedding => Role::Input,
        Part::PassEmbedding | Part::Low(_, Factor::B) | Part::Adapter(_, Factor::B) => Role::Input,
        Part::Qkv
        | Part::QkvShared
        | Part::Out
        | Part::OutShared
        | Part::Gate
        | Part::Up
        | Part::Down
        | Part::SharedGate
        | Part::SharedUp
        | Part::SharedDown
        | Part::QueryDown
        | Part::QueryUp
        | Part::KvDown
        | Part::KvUp
        | Part::Linear
        | Part::Own(_, Purpose::Matrix | Purpose::Output) => Role::Hidden,
        // A norm stands behind them, so that their size is that of first values at every width.
        Part::RouterQuery => Role::Hidden,
        // A matrix of the stream, or a number for each application.
        Part::Mix => if w.dims.len() > 1 { Role::Hidden } else { Role::Vector },
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
        | Part::Adapter(_, Factor::A) => Role::Output,
        Part::RouterKeys | Part::PredictorDown => Role::Small,
        Part::Norm
        | Part::PostNorm
        | Part::FinalNorm
        | Part::ResidualNorm
        | Part::QueryNorm
        | Part::KeyNorm
        | Part::QueryDownNorm
        | Part::KvDownNorm
        | Part::QkvBias
        | Part::QueryBias
        | Part::KeyBias
        | Part::OutBias
        | Part::GateBias
        | Part::UpBias
        | Part::DownBias
        | Part::LogitBias
        | Part::Sink
        | Part::RouterQueryNorm
        | Part::RouterKeyNorm
        | Part::RouterBias
        | Part::Scale
        | Part::Offset
        | Part::Residual
        | Part::Gain
        | Part::Lambda
        | Part::Mu
        | Part::Delta
        | Part::Decay
        | Part::LaneAlpha
        | Part::LaneBeta
        | Part::LaneMix
        | Part::LaneAlphaScale
        | Part::LaneBetaScale
        | Part::LaneBias
        | Part::LaneScale
        | Part::LastLaneBias
        | Part::LastLaneScale
        | Part::ReadNorm
        | Part::ExitBias
        | Part::ChoiceBias
        | Part::Own(_, Purpose::Bias | Purpose::Gain | Purpose::Filter | Purpose::Own)
        // States, which no weight is.
        | Part::RouterCounts
        | Part::FirstValues
        | Part::DepthKeys
        | Part::DepthValues
        | Part::PassKeys
        | Part::PassValues
        | Part::HandedKeys
        | Part::HandedValues
        | Part::Keys
        | Part::Values
        | Part::Latents
        | Part::Cached
        | Part::Text(_)
        | Part::Pooled
        | Part::Stream
        | Part::Sources
        | Part::Left
        | Part::ChoiceCounts
        | Part::ChoiceLast
        | Part::ChoiceGate
        | Part::ChoiceStart
        | Part::Members
        | Part::Kept(_)
        | Part::Behind(_) => Role::Vector,
    }
}
