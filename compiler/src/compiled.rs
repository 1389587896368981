//! What compilation hands to the runtime.

use crate::program::{BufferId, Plan};

/// A compiled model: the launch list and where every tensor lies in it.
///
/// Inputs and results of the programs are buffers of space `Io`, found by name with [`Plan::find`]:
///
/// | buffer | type | meaning |
/// |---|---|---|
/// | `ids` | `i32[batch, seq]` | input tokens |
/// | `targets` | `i32[batch, seq]` | next tokens; negative where no loss is taken |
/// | `positions` | `i32[batch, seq]` | position of each token in its document |
/// | `segments` | `i32[batch, seq]` | document of each token; only with document masks |
/// | `loss_scale` | `f32[1]` | one over the number of targets of the whole step |
/// | `loss` | `f32[1]` | `backward` adds `loss_scale · Σ nll`; the host zeroes it before a step |
/// | `nll` | `f32[batch, seq]` | loss of each token |
/// | `logits` | `f32[batch, seq, vocab]` | only in plans that ask for them |
/// | `scalars` | `f32[8]` | of the optimizer step, see [`crate::program::Kernel::AdamW`] |
/// | `norm` | `f32[1]` | global gradient norm before clipping |
///
/// Plans for generation ([`crate::Cache`]) have the programs `prefill` and `decode`, whose inputs and logits are named
/// `prefill.ids`, `decode.positions`, … Besides those above there are
///
/// | buffer | type | meaning |
/// |---|---|---|
/// | `{program}.slots` | `i32[batch, seq]` | place in the caches for each token; negative for padding |
/// | `key_positions` | `i32[batch, places]` | position of the token in each place, those of this call included; negative: none |
///
/// Programs: `backward` (and `backward@{depth}` for other recurrent depths) (one micro-batch; adds to the gradients), `norm` (global gradient norm of the step; to be looked at and
/// then used by `update`), `update` (one optimizer step; leaves gradients and counts zero), `evaluate` (forward alone: `nll`, and `logits` where asked for).
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The launch list.
    pub plan: Plan,
    /// Every tensor of the model, in checkpoint order.
    pub tensors: Vec<Tensor>,
    /// Total depth `L`: applications of layers.
    pub depth: u64,
    /// What `evaluate` leaves for the host, in plans that ask for it.
    pub observed: Vec<Observed>,
    /// Tokens a sequence may have, in plans with caches.
    pub places: Option<u64>,
}

/// What a layer leaves for the host about its routers and depth attentions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Observation {
    /// `i32[batch, seq, k]`: experts that a router chose; more than there are for a token that skips the component.
    Chosen,
    /// `f32[batch, seq]`: entropy in nats of a router's scores as shares of their sum.
    Entropy,
    /// `f32[batch, seq, heads, size]`: queries of a depth attention, rotated; its keys are the buffer `{component}.keys`.
    Queries,
    /// `f32[batch, seq]`: what a `skip` decided: 2 for a token that takes part, 1 for one that does not, 0 for one that never came to
    /// it, because it takes no part in what is around.
    Taking,
    /// `f32[batch, seq]`: the number that a `skip` decides by; 0 for tokens that never came to it.
    Score,
    /// `f32[batch, seq]`: Euclidean norm of what a `skip` reads; 0 for tokens that never came to it.
    Norm,
}

impl Observation {
    /// Name of the result, and of its buffer.
    pub(crate) fn result(self, component: &str) -> String {
        let what = match self {
            Observation::Chosen => "chosen",
            Observation::Entropy => "entropy",
            Observation::Queries => "queries",
            Observation::Taking => "taking",
            Observation::Score => "score",
            Observation::Norm => "norm",
        };
        format!("{OBSERVED}{component}.{what}")
    }
}

/// Prefix of the names of observations.
pub(crate) const OBSERVED: &str = "observed.";

/// An observation of a component, or of a `skip`, wherever it is applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The component's name; `skip.{j}` for the `j`-th `skip` of a layer, as its tensors are called.
    pub component: String,
    /// What it is.
    pub what: Observation,
    /// Where it lies: an instance for each depth of the model.
    pub buffer: BufferId,
    /// Where the component is applied.
    pub applications: Vec<Application>,
}

/// An application of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Application {
    /// Depth in the whole model, from 0.
    pub depth: u64,
    /// Which of the model's sets of weights it uses: `layers.{set}`.
    pub set: u64,
    /// How many applications before this one contain the component: its row in a depth cache. 0 for a `skip`.
    pub row: u64,
}

/// A named tensor (SEMANTICS section 11) and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in checkpoints.
    pub name: String,
    /// Its shape in checkpoints.
    pub shape: Vec<u64>,
    /// What it is.
    pub kind: TensorKind,
    /// How it begins.
    pub init: Init,
    /// Buffer of the values.
    pub weight: BufferId,
    /// Buffer of the gradient, where one is computed.
    pub gradient: Option<BufferId>,
    /// Buffers of AdamW's moments, where it is trained.
    pub moments: Option<(BufferId, BufferId)>,
    /// Buffer of selection counts, for a balancing bias.
    pub counts: Option<BufferId>,
    /// Which instance of each of them.
    pub instance: u64,
}

/// What a tensor is, for counting, decay and freezing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorKind {
    /// The embedding table.
    Embedding,
    /// The output head.
    Head,
    /// A matrix every token uses.
    Matrix,
    /// A routed mixture of matrices.
    Routed,
    /// The shared expert of a mixture.
    Shared,
    /// A router's matrices and gains.
    Router,
    /// A norm's gain.
    Gain,
    /// A balancing bias: no gradient, moved by balancing.
    Balance,
}

/// How a tensor begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with this standard deviation.
    Normal(f64),
    /// The same number everywhere.
    Constant(f64),
}
