//! The checked specification: what both spellings mean once every name, default and value is
//! resolved.
//!
//! This is the only type that leaves the language; nothing in it refers to the spelling it came
//! from, save [`Spec::sources`], which finds the token of a field for later stages'
//! diagnostics. Sizes are `u64`, checked to be positive and below 2^48; real numbers are finite.

use indexmap::IndexMap;
use serde::Serialize;

pub use crate::component::{
    Activation, Attention, Bias, Component, Defined, DepthStream, Described, Experts, HeadGate, Kind, Known,
    Latent, Mixes, Mlp, Projection, QkNorm, Setting, Small,
};
pub use crate::optimizer::{Matrices, OptimizerKind, Pace};
pub use crate::task::TaskKind;
pub use crate::transfer::{BadBase, Base, Multiplier, Transfer, TransferRule};

/// A whole specification file, defaults filled in. Two are equal where they mean the same, wherever
/// they came from.
#[derive(Clone, Debug, Serialize)]
pub struct Spec {
    /// Weights that training begins from, in place of random ones: a run, a checkpoint or an
    /// imported model.
    pub weights: Option<String>,
    /// How the first weights come from a model of another architecture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transplant: Option<Transplant>,
    /// Values in which a teacher is matched, and when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heal: Option<Heal>,
    /// The architecture.
    pub model: Model,
    /// Where tokens come from; a spec that is only counted or compiled needs none.
    pub data: Option<Data>,
    /// The training recipe (Table 3 of the paper by default).
    pub train: Train,
    /// Measurements of `dreamc eval` and of the evaluations during training.
    pub eval: Eval,
    /// Fields that `dreamc match` varies, and its baseline.
    #[serde(rename = "match")]
    pub matching: Option<Match>,
    /// Finds the token of a field.
    #[serde(skip)]
    pub sources: crate::source::SourceMap,
}

impl Spec {
    /// Its paths: weights, donor, teacher and data.
    pub fn paths(&mut self) -> impl Iterator<Item = &mut String> {
        let donor = self.transplant.as_mut().and_then(|transplant| transplant.from.as_mut());
        let teacher = self.heal.as_mut().and_then(|heal| heal.teacher.as_mut());
        self.weights.iter_mut().chain(donor).chain(teacher).chain(self.data.iter_mut().flat_map(Data::paths))
    }

    /// The temperature of samples: that of `eval`; else 0 where the data are tasks or have prompts,
    /// which have right answers, and 0.8 for running text, whose likeliest continuation soon
    /// repeats itself.
    pub fn temperature(&self) -> f64 {
        let prompted = |source: &Source| match source {
            Source::Task(_) => true,
            Source::Text { .. } => false,
            Source::Jsonl { prompt, .. } | Source::Parquet { prompt, .. } => prompt.is_some(),
        };
        let right = self.data.iter().flat_map(|data| &data.sources).any(|(source, _)| prompted(source));
        self.eval.temperature.unwrap_or(if right { 0.0 } else { 0.8 })
    }
}

impl Source {
    /// The field of the worse answer of each row, where rows are pairs.
    pub fn rejected(&self) -> Option<&str> {
        match self {
            Source::Task(_) | Source::Text { .. } => None,
            Source::Jsonl { rejected, .. } | Source::Parquet { rejected, .. } => rejected.as_deref(),
        }
    }
}

impl Data {
    /// Its paths: sources, validation and tokenizer.
    pub fn paths(&mut self) -> impl Iterator<Item = &mut String> {
        let sources = self.sources.iter_mut().filter_map(|(source, _)| match source {
            Source::Text { path } | Source::Jsonl { path, .. } | Source::Parquet { path, .. } => Some(path),
            Source::Task(_) => None,
        });
        let tokenizer = match &mut self.tokenizer {
            Tokenizer::File(path) => Some(path),
            _ => None,
        };
        sources.chain(&mut self.validation_file).chain(tokenizer)
    }
}

impl PartialEq for Spec {
    fn eq(&self, other: &Spec) -> bool {
        let Spec { weights, transplant, heal, model, data, train, eval, matching, sources: _ } = self;
        *weights == other.weights
            && *transplant == other.transplant
            && *heal == other.heal
            && *model == other.model
            && *data == other.data
            && *train == other.train
            && *eval == other.eval
            && *matching == other.matching
    }
}

/// How the first weights of a model come from those of another, the donor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Transplant {
    /// The donor.
    pub from: Option<String>,
    /// The donor's layers for each application of a layer.
    pub depth: Option<Depth>,
    /// Tensors that do not come as is proposed; the entry of most words counts.
    pub map: Vec<Move>,
}

/// How training matches another model, the teacher, whose weights stay as they are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Heal {
    /// The teacher; the donor of a transplant where absent.
    pub teacher: Option<String>,
    /// Bytes of the teacher's values that are kept on disk; none where absent.
    pub cache: Option<u64>,
    /// Stages, one after another. Steps after the last have no teacher.
    pub stages: Vec<Stage>,
}

impl Heal {
    /// The stage of a step, counted from 1.
    pub fn stage(&self, step: u64) -> Option<&Stage> {
        let mut before = 0u64;
        self.stages.iter().find(|stage| {
            before = stage.steps.map_or(u64::MAX, |steps| before.saturating_add(steps));
            step <= before
        })
    }
}

/// Some steps of training, and what is matched in them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Values that are matched, each with its weight in the loss.
    pub matches: Vec<Lesson>,
    /// Both models' logits are divided by it.
    pub temperature: f64,
    /// The teacher's likeliest tokens that are kept; all where absent.
    pub top: Option<u64>,
    /// Weight of the data's own loss.
    pub loss: f64,
    /// Steps; those that are left where absent.
    pub steps: Option<u64>,
}

/// A value that is matched.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lesson {
    /// `logits`, `layers`, or a pattern of names as `dreamc probe` has them.
    pub to: String,
    /// The teacher's, where they are called otherwise.
    pub from: Option<String>,
    /// Its weight.
    pub weight: f64,
}

/// The donor's layers for each application of a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Depth {
    /// Layers at even distances.
    Spread,
    /// The first half from the donor's first layers, the other from its last (depth up-scaling,
    /// 2312.15166).
    Stack,
    /// Every layer of the donor, and copies between them that add nothing to the stream at first
    /// (2401.02415).
    Zero,
    /// The weighted mean of the two nearest.
    Interpolate,
    /// Means of those that stand together.
    Average,
    /// These: each the mean of its layers.
    Given(Vec<Vec<u64>>),
}

/// Where some tensors come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// The first words of their names; `*` for any word.
    pub to: String,
    /// The same of the donor's; empty for none, or for the same names.
    pub from: Vec<String>,
    /// How numbers of the donor become those of the model; as shapes allow where absent.
    pub how: Option<How>,
    /// Deviation of normal numbers that are added, as a share of the tensor's own.
    pub noise: f64,
}

/// How numbers of a donor become those of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Number by number.
    Copy,
    /// The first rows and columns.
    Slice,
    /// The donor's first, then those of the recipe.
    Pad,
    /// Means of neighbouring heads or experts.
    Group,
    /// One for several.
    Tile,
    /// A factor of the nearest product of low rank.
    Factor,
    /// By the recipe.
    Fresh,
    /// Zeros.
    Zero,
}

/// The architecture of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Its name: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Vocabulary size `V`.
    pub vocab: u64,
    /// Hidden size `h`.
    pub hidden: u64,
    /// Longest sequence `t` the model is built for.
    pub context: u64,
    /// Whether the head is the embedding matrix.
    pub tie: bool,
    /// Whether logits add a learned vector, before their factor and their cap (GPT-J, Phi).
    pub head_bias: bool,
    /// Factor on the embedding (Gemma 2: `sqrt(h)`, rounded to the weights' dtype).
    pub embed_scale: Option<EmbedScale>,
    /// Factor on logits, before their cap (Granite).
    pub logit_scale: Option<f64>,
    /// `c·tanh(logits/c)`.
    pub logit_softcap: Option<f64>,
    /// Factor on the output of every component (Granite).
    pub output_scale: Option<f64>,
    /// The form of every norm of the model.
    pub norm: Norm,
    /// Where components read, and where their outputs go.
    pub stream: Stream,
    /// Matrices of low rank that are added to those of components.
    pub adapt: Option<Adapt>,
    /// The attentions (and dense networks) that layers mix, by name, in order of definition.
    pub components: IndexMap<String, Component>,
    /// The layers, in order of application.
    pub body: Vec<Item>,
}

impl Model {
    /// Whether every application of a layer has weights of its own, inside loops, too: those of
    /// lanes.
    pub fn has_turns(&self) -> bool {
        self.stream.has_turns()
    }

    /// The first attention that reads its depth stream, whose keys are as all of them are.
    pub fn depth_reader(&self) -> Option<&Attention> {
        let mut attentions = self.components.values().filter_map(Component::attention);
        attentions.find(|a| a.depth_stream.is_some())
    }

    /// The names of its components.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.components.keys().map(String::as_str)
    }

    /// The names of the matrices of a component that adapters can add to, each once.
    pub fn matrices(&self, component: &str) -> Vec<String> {
        let Some(component) = self.components.get(component) else { return vec![] };
        let mut found = component.matrices(self);
        let mut seen = std::collections::HashSet::new();
        found.retain(|name| seen.insert(name.clone()));
        found
    }

    /// The most passes that the `recur` of the body can make, where each has weights or capacities
    /// of its own.
    pub fn most_passes(&self) -> Option<u64> {
        self.body.iter().find_map(|item| match item {
            Item::Recur { count, looping, items, .. } => {
                (looping.has_passes() || has_passes(items) || self.has_turns()).then_some(*count)
            }
            Item::Layer(_) | Item::Statement(_) | Item::Repeat { .. } => None,
        })
    }
}

impl Stream {
    /// Whether every application of a layer has weights of its own by which it is wired.
    pub fn has_turns(&self) -> bool {
        matches!(self, Stream::Lanes { kind: LaneKind::Static | LaneKind::Dynamic, .. })
    }
}

/// Adapters: a matrix `W` of these components becomes `W + alpha/rank · B A`. They alone are
/// trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Adapt {
    /// Names of components.
    pub components: Vec<String>,
    /// Names of their matrices, see [`Model::matrices`]; all of them where there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub matrices: Vec<String>,
    /// Rows of `A`.
    pub rank: u64,
    /// `rank` times the factor of what an adapter adds.
    pub alpha: f64,
    /// Whether rows of the sum have magnitudes of their own (DoRA).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dora: bool,
}

impl Adapt {
    /// The factor of what an adapter adds.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank.max(1) as f64
    }

    /// Whether a matrix of a component is adapted.
    pub fn reaches(&self, component: &str, matrix: &str) -> bool {
        self.components.iter().any(|name| name == component)
            && (self.matrices.is_empty() || self.matrices.iter().any(|name| name == matrix))
    }
}

/// Factor on the embedding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EmbedScale {
    /// `sqrt(h)`.
    SqrtHidden,
    /// A given number.
    Value(f64),
}

/// RMSNorm: `x · rsqrt(mean(x²) + eps) · g`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Norm {
    /// Added to the mean square.
    pub eps: f64,
    /// The stored weight is `g - 1` (Gemma 2).
    pub unit_offset: bool,
}

/// The wiring of the stream. Components themselves never add.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// A component reads `x`, and its output is added to it.
    #[default]
    Sum,
    /// A component reads `Σ_j p_j v_j` over the sources `v_j` so far, `p = softmax_j(w ·
    /// RMSNorm(v_j; g))` (Attention Residuals).
    Attend {
        /// Outputs that one source sums; 1 makes every output a source.
        block: u64,
    },
    /// `N` streams: a component reads `Σ_i α_i X_i`, and `X_i ← Σ_j M_ij X_j + β_i y`
    /// (Hyper-Connections).
    Lanes {
        /// Lanes `N`.
        count: u64,
        /// Where `α`, `β` and `M` come from.
        kind: LaneKind,
        /// Whether lane `i` begins as the embedding plus a vector `E_i`.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        embed: bool,
    },
}

/// Where the weights of lanes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneKind {
    /// Weights of each application.
    Static,
    /// These, and a part that depends on what is read (Zhu et al.).
    Dynamic,
    /// Functions of the stream, `M` doubly stochastic (DeepSeek V4).
    Mhc,
}

impl Default for Norm {
    fn default() -> Self {
        Norm { eps: 1e-6, unit_offset: false }
    }
}

/// Rotary position embedding: pairs `(i, i + d/2)`, `θ_i = base^(-2i/d)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric sequence of frequencies.
    pub base: f64,
    /// Odd pairs count from the last depth backwards (`L - 1 - l`); depth attention and routers
    /// only.
    pub half_reversed: bool,
    /// Share of a head that turns, its first elements.
    pub share: f64,
    /// Lowered frequencies.
    pub scaling: Option<RopeScaling>,
}

impl Rope {
    /// Elements of a vector of `size` that turn, whether or not that is an even number.
    pub fn turning(&self, size: u64) -> u64 {
        // As `int(head_dim * partial_rotary_factor)` in transformers, except for a product that
        // rounding puts just below a whole number.
        ((self.share * size as f64 + 1e-9).floor() as u64).min(size)
    }

    /// Whether a vector of `size` has pairs to turn, and no element of a pair alone.
    pub fn turns_pairs(&self, size: u64) -> bool {
        let turning = self.turning(size);
        turning > 0 && turning.is_multiple_of(2)
    }
}

/// Lowered frequencies of a rotation, as `transformers` computes them (`rope_type`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Llama 3.1 and later.
    Llama3 {
        /// Division of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low` are divided.
        low: f64,
        /// Wavelengths below `original_context / high` are kept.
        high: f64,
        /// Context the model was first trained with.
        original_context: f64,
    },
    /// All frequencies are divided.
    Linear {
        /// Division of the frequencies.
        factor: f64,
    },
    /// YaRN (Peng et al., 2309.00071).
    Yarn {
        /// Division of the low frequencies.
        factor: f64,
        /// Turns in the original context above which a pair is kept.
        fast: f64,
        /// Turns below which a pair is divided.
        slow: f64,
        /// Context the model was first trained with.
        original_context: f64,
        /// Factor on rotated queries and keys.
        attention: f64,
        /// Whether the bounds between which pairs are blended are whole numbers.
        truncate: bool,
    },
}

impl RopeScaling {
    /// Factor on rotated vectors.
    pub fn attention(&self) -> f64 {
        match *self {
            RopeScaling::Llama3 { .. } | RopeScaling::Linear { .. } => 1.0,
            RopeScaling::Yarn { attention, .. } => attention,
        }
    }

    /// The frequencies alone: with a factor of 1.
    #[must_use]
    pub fn frequencies(mut self) -> Self {
        if let RopeScaling::Yarn { attention, .. } = &mut self {
            *attention = 1.0;
        }
        self
    }
}

/// How a mixture scores, chooses, gates and balances its experts. The fields are orthogonal
/// (section 4).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Router {
    /// The form of the logits.
    pub form: RouterForm,
    /// Logit to score.
    pub score: Score,
    /// Values whose `k` largest are chosen; the balancing bias, where there is one, is added to
    /// them.
    pub select: Select,
    /// Groups of neighbouring experts; 1 for all experts in one.
    pub groups: u64,
    /// Groups in which experts are chosen: those whose two largest values have the largest sums.
    pub topk_groups: u64,
    /// Gates are divided by their sum over the chosen.
    pub normalise: bool,
    /// Factor on the gates.
    pub scale: f64,
    /// Balancing by a bias that chooses and never gates.
    pub balance: Option<Balance>,
    /// Weight of the Switch load-balancing loss; 0 for none.
    pub load_balance_loss: f64,
    /// Weight of the router z-loss; 0 for none.
    pub z_loss: f64,
}

/// The form of a router's logits.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterForm {
    /// `RoPE(RMSNorm(W_q x))·RMSNorm(K_e) / sqrt(query)`
    LowRank {
        /// Size of queries and keys.
        query: u64,
        /// Rotation of the query by the depth of the application.
        rope: Option<Rope>,
    },
    /// `W x`, `W` of shape `[E, h]`.
    Linear,
}

/// Logit to score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Each by itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
    /// Each by itself, `sqrt(ln(1 + e^z))`.
    Sqrtsoftplus,
}

/// Values that choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// Logit plus bias (Dreamer).
    Logit,
    /// Score plus bias (DeepSeek-V3).
    Score,
}

/// `b += rate · law(target(N) - N)` once per optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Balance {
    /// Step size λ.
    pub rate: f64,
    /// The count an expert should have.
    pub target: BalanceTarget,
    /// How the difference moves the bias.
    pub law: BalanceLaw,
}

/// The count an expert should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceTarget {
    /// The median count; the mean of the two middle ones for an even number of experts.
    Median,
    /// The mean count.
    Mean,
}

/// How the difference moves the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceLaw {
    /// By its sign.
    Sign,
    /// By the difference over the mean count.
    Proportional,
}

/// One item of a body.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Item {
    /// One application with weights of its own (unless a `recur` around it shares them).
    Layer(Expr),
    /// A map from the stream to a stream.
    Statement(Statement),
    /// `count` copies with weights of their own.
    Repeat {
        /// Copies.
        count: u64,
        /// Items that are copied.
        items: Vec<Item>,
    },
    /// One set of weights applied `count` times.
    Recur {
        /// Applications.
        count: u64,
        /// Whether the residual stream is normalised after every application inside.
        residual_norm: bool,
        /// Items that are applied.
        items: Vec<Item>,
        /// How it is run.
        #[serde(skip_serializing_if = "Looping::is_plain")]
        looping: Looping,
    },
}

/// How the passes of a `recur` are run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Looping {
    /// The number of last passes that gradients flow through.
    pub backprop: Option<u64>,
    /// The number of passes of a training step, where it is drawn.
    pub depth: Option<Depths>,
    /// The rank of the matrix that each pass adds to every matrix of a component inside: `W + B_p
    /// A_p` (Relaxed Recursive Transformers, 2410.20672, section 2.3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<u64>,
    /// Whether pass `p` begins with `x ← x + E_p`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub embed: bool,
    /// The passes whose streams the loss sees.
    #[serde(skip_serializing_if = "Exit::is_last")]
    pub exit: Exit,
    /// The keys and values that sequence attentions inside use.
    #[serde(skip_serializing_if = "PassKeys::is_own")]
    pub kv: PassKeys,
}

/// The keys and values that sequence attentions use in the passes of a loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PassKeys {
    /// Those of the pass.
    #[default]
    Own,
    /// Those of pass 0 (Mixture-of-Recursions, 2507.10524, section 2.2.2: recursive sharing).
    First,
    /// Those of the pass where a token takes part in it, those of pass 0 where it skips it
    /// (Mixture-of-Recursions' code: caches that are updated).
    Replaced,
}

impl PassKeys {
    /// Whether they are those of the pass, as of any loop.
    pub fn is_own(&self) -> bool {
        *self == PassKeys::Own
    }
}

/// The passes of a loop whose streams the loss of training sees. Evaluation sees the stream that
/// leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// The stream that leaves.
    #[default]
    Last,
    /// The mean over passes of the loss of each pass's stream through the same norm and head.
    Mean,
    /// `λ_p = sigmoid(w·x_p + c)`, `q_p = λ_p Π_{j<p} (1 - λ_j)`, `q_last` the rest: for each token
    /// `Σ_p q_p ℓ_p - β H(q)` (Ouro, 2510.25741, section 3.2).
    Gate(f64),
    /// The same shares of each pass's logits: the loss of `head(Σ_p q_p n_p)`, `n_p` what the head
    /// reads of pass `p`, less `β H(q)` (Ouro's code of its published models).
    Expected(f64),
}

impl Exit {
    /// Whether it is the stream that leaves, as of any loop.
    pub fn is_last(&self) -> bool {
        *self == Exit::Last
    }

    /// `β` of a gate, which shares out losses or logits.
    pub fn gate(&self) -> Option<f64> {
        match *self {
            Exit::Last | Exit::Mean => None,
            Exit::Gate(entropy) | Exit::Expected(entropy) => Some(entropy),
        }
    }
}

impl Looping {
    /// Whether every pass has weights of its own.
    pub fn has_passes(&self) -> bool {
        self.embed || self.lora.is_some()
    }

    /// Whether every pass is like the others, in every step.
    pub fn is_plain(&self) -> bool {
        *self == Looping::default()
    }
}

/// A distribution of the number of passes of a training step, a function of seed and step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Depths {
    /// Its form.
    pub law: DepthLaw,
    /// Least number; a smaller draw is raised to it.
    pub min: u64,
    /// Largest number; a larger draw is lowered to it.
    pub max: u64,
}

/// The form of a distribution of depths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DepthLaw {
    /// Each number from `min` to `max` as often.
    Uniform,
    /// `Poisson(mean)`
    Poisson {
        /// Its mean.
        mean: f64,
    },
    /// `Poisson(exp(N(ln mean - sigma²/2, sigma))) + 1` (Geiping et al., 2502.05171, section 3.3).
    LognormalPoisson {
        /// The mean of the rate.
        mean: f64,
        /// The deviation of its logarithm.
        sigma: f64,
    },
}

/// The gain of a norm of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormGain {
    /// A weight that no other norm has.
    Own,
    /// The weight of that name, which all norms of the name have ([`gain`]).
    Named(String),
    /// None: each row has a mean square of 1.
    Plain,
}

/// A statement on the stream: `[batch, seq, hidden]` to the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Statement {
    /// `x ← RMSNorm(x)`
    Norm(NormGain),
    /// `x ← W x`
    Linear(Beginning),
    /// `x ← 0`
    StartZeros,
    /// `x ← σ` times normal numbers cut at 3, drawn by (seed, step, sequence, token) in training
    /// and by (seed, position) otherwise.
    StartNormal(f64),
    /// Names the stream as it is here.
    Save(String),
    /// `x ← mix(x, e)` with the stream `e` of that name, as it was saved last.
    Mix {
        /// The name.
        name: String,
        /// How.
        how: Mixing,
    },
    /// `x ← Σ_j a_j x_j` over streams after layer applications so far, this one last (DenseFormer,
    /// 2402.02622, section 3).
    History(Steps),
}

/// Which streams of the past `mix history` reads, the embedding being the one after none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Steps {
    /// After every one of this many applications, from the embedding on.
    Every(u64),
    /// This many applications apart, from this stream back.
    Apart(u64),
}

impl Steps {
    /// How many applications before each of the streams that are read after `depth` of them,
    /// without the stream that is there.
    pub fn depths(self, depth: u64) -> Vec<u64> {
        let (first, step) = match self {
            Steps::Every(step) => (0, step.max(1)),
            Steps::Apart(step) => (depth % step.max(1), step.max(1)),
        };
        (first..depth.max(1)).step_by(usize::try_from(step).unwrap_or(usize::MAX)).collect()
    }
}

/// The name of the gain of a model's last norm.
pub const LAST_GAIN: &str = "final";

/// The word of a norm that has no gain.
pub const PLAIN: &str = "plain";

/// The tensor that is the gain of this name.
pub fn gain(name: &str) -> String {
    if name == LAST_GAIN { "norm.weight".into() } else { format!("norms.{name}.weight") }
}

/// Whether the last thing that items do to the stream is a norm. `inside` says whether one ends
/// each layer.
pub fn normalised(items: &[Item], inside: bool) -> bool {
    match items.iter().rfind(|item| !matches!(item, Item::Statement(Statement::Save(_)))) {
        None => false,
        Some(Item::Layer(_)) => inside,
        Some(Item::Statement(statement)) => matches!(statement, Statement::Norm(_)),
        Some(Item::Repeat { items, .. }) => normalised(items, inside),
        Some(Item::Recur { residual_norm, items, .. }) => normalised(items, *residual_norm),
    }
}

/// How a matrix of a statement begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Beginning {
    /// The identity; of `[x ; e]`, the half that reads `e`, and zeros.
    Identity,
    /// Normal, as any matrix.
    Normal,
}

/// How a stream is mixed with a saved one, `e`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixing {
    /// `x + e`
    Add,
    /// `W [x ; e]`
    Linear(Beginning),
    /// `λ x + μ e`
    Scaled,
    /// `Δ = softplus(a)`, `exp(-Δ ⊙ exp(A)) ⊙ x + Δ ⊙ (B e)` (Parcae)
    Diagonal,
}

/// A composition expression (section 6). `Sequential` and `Parallel` hold at least two terms and
/// never a term of their own kind; a component appears at most once in a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Expr {
    /// A component by name.
    Component(String),
    /// The stream normalised: a term of the outermost `>` of a layer alone.
    Norm,
    /// `a > b`
    Sequential(Vec<Expr>),
    /// `a | b`
    Parallel(Vec<Expr>),
    /// `skip(…) { a }` (section 8).
    Skip(Box<Skip>, Box<Expr>),
}

impl Expr {
    /// The wrapped parts in it in the order of the text, each with its contents.
    pub fn skips(&self) -> Vec<(&Skip, &Expr)> {
        match self {
            Expr::Component(_) | Expr::Norm => vec![],
            Expr::Sequential(terms) | Expr::Parallel(terms) => terms.iter().flat_map(Expr::skips).collect(),
            Expr::Skip(skip, inner) => [vec![(&**skip, &**inner)], inner.skips()].concat(),
        }
    }
}

/// The `skip` by which tokens of a loop of these items choose how many of its passes they make, and
/// how fast a bias balances these choices.
pub fn depth_choice(items: &[Item]) -> Option<(&Skip, f64)> {
    match items {
        [Item::Layer(Expr::Skip(skip, _))] => match skip.rule {
            SkipRule::DepthChoice { balance, .. } => Some((skip, balance)),
            SkipRule::TopK { .. } | SkipRule::Threshold { .. } => None,
        },
        _ => None,
    }
}

/// Whether a `skip` in these items of a loop has something for each of its passes.
pub fn has_passes(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Layer(expr) => expr.skips().iter().any(|(skip, _)| skip.has_passes()),
        Item::Statement(_) => false,
        Item::Repeat { items, .. } | Item::Recur { items, .. } => has_passes(items),
    })
}

/// A Mixture-of-Depths wrapper around a part of a layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skip {
    /// Which tokens are processed.
    pub rule: SkipRule,
    /// Input of the router.
    pub input: SkipInput,
    /// Tokens decide one by one, or whole sequences.
    pub level: SkipLevel,
    /// Which tokens write keys and values of the wrapped attention.
    pub kv: SkipKv,
    /// A selected token is the mean of itself and those skipped since the one before it; skipped
    /// tokens share the update of the selected one before them.
    pub merge: bool,
    /// Whether every pass of the loop around has a router of its own (Mixture-of-Recursions,
    /// 2507.10524, section 2.2.1).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub each_pass: bool,
    /// Factor on the update of a token that top-k chose.
    #[serde(skip_serializing_if = "SkipGate::is_score")]
    pub gate: SkipGate,
    /// Factor on that factor.
    #[serde(skip_serializing_if = "is_one")]
    pub gate_scale: f64,
    /// Whether it is on the stream after the part, not on the update alone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    /// The capacity of each pass of the loop around, the rule's first; empty where all have the
    /// rule's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub capacities: Vec<f64>,
    /// Whether a pass chooses among the tokens that the pass before processed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub nested: bool,
    /// How the router scores.
    #[serde(flatten)]
    pub scorer: Scorer,
}

/// The form of the scores of a `skip`'s router, and their loss (Mixture-of-Recursions, 2507.10524,
/// section 2.2.1 and its code).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scorer {
    /// The router reads the stream divided by it.
    #[serde(skip_serializing_if = "is_one")]
    pub temperature: f64,
    /// Hidden size of a network that scores in the place of a vector, `V gelu(U x)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<u64>,
    /// Weight of the mean over tokens of `(ln Σ e^z)²` of a token's scores.
    #[serde(skip_serializing_if = "is_zero")]
    pub z_loss: f64,
}

impl Scorer {
    /// A product with a vector or a matrix, and no loss.
    pub const PLAIN: Scorer = Scorer { temperature: 1.0, network: None, z_loss: 0.0 };
}

impl Skip {
    /// Whether passes have weights or capacities of their own, so that their number is fixed.
    pub fn has_passes(&self) -> bool {
        self.each_pass || !self.capacities.is_empty()
    }

    /// As it is in that pass: with its one capacity there.
    pub fn in_pass(&self, pass: u64) -> Skip {
        let own = usize::try_from(pass).ok().and_then(|pass| self.capacities.get(pass));
        let mut skip = Skip { capacities: vec![], ..self.clone() };
        if let Some(own) = own.or(self.capacities.last()) {
            skip.rule.set_capacity(*own);
        }
        skip
    }

    /// The shares of passes that tokens reach which choose every number of passes as often.
    pub fn chosen_shares(passes: u64) -> Vec<f64> {
        (0..passes).map(|pass| (passes - pass) as f64 / passes as f64).collect()
    }
}

/// Factor on the update of a token that top-k chose by its score `r`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipGate {
    /// `r`
    #[default]
    Score,
    /// `sigmoid(r)`
    Sigmoid,
    /// `tanh(r)`
    Tanh,
}

// `skip_serializing_if` hands a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

fn is_zero(weight: &f64) -> bool {
    *weight == 0.0
}

impl SkipGate {
    /// Whether it is the score, as of any `skip`.
    pub fn is_score(&self) -> bool {
        *self == SkipGate::Score
    }
}

/// Which tokens a wrapped part processes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipRule {
    /// Expert choice: the `max(1, floor(capacity · t))` tokens with the largest score.
    TopK {
        /// Share of the tokens, in (0, 1].
        capacity: f64,
        /// How to decide without looking ahead; a model without can be trained but not sampled.
        causal: Option<CausalRule>,
    },
    /// `sigmoid(w·x) >= 0.5`, straight-through.
    Threshold {
        /// Target share `c*`.
        capacity: f64,
        /// Weight λ of `ReLU(mean(mask) - c*)`.
        penalty: f64,
        /// Whether the mean is over all wrapped parts rather than for each.
        pooled: bool,
    },
    /// Token choice: where the loop around begins, a token chooses how many of its passes it makes
    /// (Mixture-of-Recursions, 2507.10524, section 2.2.1).
    DepthChoice {
        /// Share of the tokens where all numbers of passes are chosen as often.
        capacity: f64,
        /// Step size of the bias that balances choices.
        balance: f64,
    },
}

impl SkipRule {
    /// Share of the tokens that are to be processed.
    pub fn capacity(&self) -> f64 {
        match self {
            SkipRule::TopK { capacity, .. }
            | SkipRule::Threshold { capacity, .. }
            | SkipRule::DepthChoice { capacity, .. } => *capacity,
        }
    }

    /// Makes it another share.
    pub fn set_capacity(&mut self, share: f64) {
        match self {
            SkipRule::TopK { capacity, .. }
            | SkipRule::Threshold { capacity, .. }
            | SkipRule::DepthChoice { capacity, .. } => *capacity = share,
        }
    }

    /// Whether tokens chose their number of passes.
    pub fn chosen(&self) -> bool {
        matches!(self, SkipRule::DepthChoice { .. })
    }
}

/// How a top-k router is sampled from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CausalRule {
    /// Binary cross-entropy of the score against membership; then `score > 0`.
    Bce {
        /// Weight of the loss.
        weight: f64,
        /// Whether the loss also reaches the input of the router.
        into_input: bool,
    },
    /// A small network on the stopped input, same loss; then its output `> 0`.
    Predictor {
        /// Its hidden size.
        hidden: u64,
        /// Weight of the loss.
        weight: f64,
    },
}

/// Input of a skip router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipInput {
    /// The hidden state.
    Hidden,
    /// `scale·‖x‖ + bias`.
    NormOnly,
}

/// Tokens that share one decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipLevel {
    /// Each token.
    Token,
    /// Each sequence, by the mean over its tokens.
    Sequence,
}

/// Which tokens write keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipKv {
    /// All.
    All,
    /// Processed ones.
    Processed,
}

/// Where tokens come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Data {
    /// Sources and their relative weights.
    pub sources: Vec<(Source, f64)>,
    /// How text becomes tokens.
    pub tokenizer: Tokenizer,
    /// Share of the documents of a file held out for validation, where no file is named for it.
    pub validation: f64,
    /// A file of its own for validation.
    pub validation_file: Option<String>,
    /// Whether attention stops at document boundaries.
    pub document_mask: bool,
    /// Whether rows of running text begin with the begin token; absent, they do where the tokenizer
    /// puts it by itself.
    pub begin: Option<bool>,
    /// Treatment of a row that cannot be read.
    pub bad_rows: BadRows,
}

/// Treatment of a row that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BadRows {
    /// Stop with file and line.
    Stop,
    /// Leave it out and count it.
    Skip,
}

/// One source of documents. Paths are relative to the spec's folder.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A generated reasoning task.
    Task(Task),
    /// A text file.
    Text {
        /// Its path.
        path: String,
    },
    /// JSON objects, one a line.
    Jsonl {
        /// Its path.
        path: String,
        /// Field of the prompt; no loss on it. The whole text is in `answer` where absent.
        prompt: Option<String>,
        /// Field of the text to learn.
        answer: String,
        /// Field of an answer that is worse; every row is a pair then.
        #[serde(skip_serializing_if = "Option::is_none")]
        rejected: Option<String>,
        /// How both are put together; `{prompt}` and `{answer}` are replaced.
        template: String,
    },
    /// A Parquet file; columns as the fields of `Jsonl`.
    Parquet {
        /// Its path.
        path: String,
        /// Column of the prompt.
        prompt: Option<String>,
        /// Column of the text to learn.
        answer: String,
        /// As for `Jsonl`.
        #[serde(skip_serializing_if = "Option::is_none")]
        rejected: Option<String>,
        /// As for `Jsonl`.
        template: String,
    },
}

/// A generated task whose difficulty is a number of composed steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Task {
    /// Which.
    pub kind: TaskKind,
    /// Fewest steps.
    pub min_steps: u64,
    /// Most steps.
    pub max_steps: u64,
    /// The number of [`Facts::size`](crate::task::Facts).
    pub size: u64,
    /// The number of [`Facts::length`](crate::task::Facts), where the task has it.
    pub length: Option<u64>,
    /// Steps beyond `max_steps` that are asked and never trained on: whether what was learned goes
    /// on. Ascending.
    pub longer: Vec<u64>,
}

impl Task {
    /// A task with these steps, and other numbers as they are by default.
    pub fn new(kind: TaskKind, min_steps: u64, max_steps: u64) -> Self {
        let facts = kind.facts();
        let length = facts.length.map(|knob| knob.default);
        Task { kind, min_steps, max_steps, size: facts.size.default, length, longer: vec![] }
    }

    /// The difficulties that are asked, in order.
    pub fn difficulties(&self) -> impl Iterator<Item = u64> + '_ {
        (self.min_steps..=self.max_steps).chain(self.longer.iter().copied())
    }
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tokenizer {
    /// One token a byte.
    Bytes,
    /// A `tokenizer.json`.
    File(String),
}

/// Direct preference optimisation (2305.18290).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Dpo {
    /// Factor of the differences of log probabilities.
    pub beta: f64,
    /// Share of pairs that are taken to be the wrong way round.
    pub smoothing: f64,
}

/// The training recipe. Defaults are those of Table 3.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Train {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences in a step.
    pub batch: u64,
    /// Micro-batches a step is split into; divides `batch`.
    pub accumulate: u64,
    /// Most bytes that training may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Tokens in a sequence; the model's context where absent.
    pub sequence: Option<u64>,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Learning rates after the warm-up.
    pub schedule: Schedule,
    /// The law that moves weights.
    pub optimizer: OptimizerKind,
    /// The rule by which a rate of another size is used.
    pub transfer: Option<Transfer>,
    /// Decay rates of the two means of AdamW and Lion.
    pub betas: (f64, f64),
    /// AdamW's ε.
    pub eps: f64,
    /// Storage of the optimizer's states.
    pub moments: Precision,
    /// Decoupled weight decay on matrices.
    pub weight_decay: f64,
    /// Whether embeddings decay too.
    pub decay_embeddings: bool,
    /// Largest global gradient norm; `None` for no clipping.
    pub clip: Option<f64>,
    /// Weight of `mean(logsumexp(logits)²)` in the loss that is trained; 0 for none.
    pub z_loss: f64,
    /// Preferences in place of targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dpo: Option<Dpo>,
    /// Seed of weights, order and sampling.
    pub seed: u64,
    /// Storage and products.
    pub precision: Precision,
    /// Train only tensors whose names match one of these patterns (`routers` is short for all
    /// router tensors).
    pub only: Vec<String>,
    /// Do not train tensors whose names match one of these.
    pub freeze: Vec<String>,
    /// Parameter groups: pattern, factor on the learning rate, weight decay.
    pub groups: Vec<Group>,
    /// How ranks share the training.
    #[serde(skip_serializing_if = "Parallel::is_default")]
    pub parallel: Parallel,
    /// Recurrent depth drawn anew each step between these (as a function of seed and step).
    pub random_depth: Option<(u64, u64)>,
    /// Evaluation during training.
    pub evaluate: Evaluate,
    /// Checkpoints during training.
    pub checkpoint: Checkpoint,
    /// Stop when the validation loss has not improved for this number of evaluations.
    pub patience: Option<u64>,
    /// Treatment of a step whose loss or gradient norm is not finite.
    pub on_nan: OnNan,
    /// Leave out a step whose loss or gradient norm is more than this number of standard deviations
    /// above the mean of those before.
    pub spike: Option<f64>,
}

/// How ranks share a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Parallel {
    /// Ranks that share the micro-batches of a step, all that there are; any number where absent.
    pub data: Option<u64>,
    /// Tensors that are cut over the ranks.
    pub shard: Shard,
    /// Ranks that have the experts of a mixture together, the same number each: successive ranks
    /// among those that share the micro-batches.
    pub experts: u64,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel { data: None, shard: Shard::None, experts: 1 }
    }
}

/// Tensors of a training that are cut over its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Shard {
    /// Nothing: every rank keeps all of it.
    #[default]
    None,
    /// The optimizer's states.
    Optimizer,
    /// Weights that are trained, their gradients and the optimizer's states.
    Weights,
}

impl Shard {
    /// All of them, the least that is cut first.
    pub const ALL: [Shard; 3] = [Shard::None, Shard::Optimizer, Shard::Weights];

    /// The word of the language.
    pub fn name(self) -> &'static str {
        match self {
            Shard::None => "none",
            Shard::Optimizer => "optimizer",
            Shard::Weights => "weights",
        }
    }

    /// That of a word; `None` for one that the language does not have.
    pub fn of(word: &str) -> Option<Self> {
        Shard::ALL.into_iter().find(|shard| shard.name() == word)
    }

    /// Whether a rank keeps the optimizer's states of its part of the weights alone.
    pub fn states(self) -> bool {
        self != Shard::None
    }

    /// Whether a rank keeps its part of the weights and of their gradients alone.
    pub fn weights(self) -> bool {
        self == Shard::Weights
    }
}

impl Parallel {
    /// Whether nothing was asked for.
    pub fn is_default(&self) -> bool {
        *self == Parallel::default()
    }
}

/// Treatment of a step whose numbers are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnNan {
    /// The run stops.
    Stop,
    /// The step is left out.
    Skip,
}

/// The steps that a share of a run is: at least one.
pub fn warmup_steps(share: f64, steps: u64) -> u64 {
    ((share * steps as f64).round() as u64).max(u64::from(share > 0.0))
}

/// Learning rates after the warm-up.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// The peak until the end.
    Constant,
    /// Half a cosine down to `floor` times the peak.
    Cosine {
        /// Final share of the peak.
        floor: f64,
    },
    /// A line down to `floor` times the peak.
    Linear {
        /// Final share of the peak.
        floor: f64,
    },
    /// Warm-up, stable, decay: the peak, then a line to `floor` over the last `decay` steps.
    Wsd {
        /// Length of the decay.
        decay: u64,
        /// Final share of the peak.
        floor: f64,
    },
    /// Lines between these steps and shares of the peak, over the whole run, warm-up included.
    Points(Vec<(u64, f64)>),
}

/// Storage and products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// f32 everywhere.
    F32,
    /// bf16 storage and products; f32 accumulation, master weights, statistics and optimizer.
    Bf16,
    /// As bf16, with matmuls of layers reading operands rounded to e4m3.
    Fp8,
}

/// A parameter group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// Pattern of tensor names; `*` stands for any text.
    pub pattern: String,
    /// Factor on the learning rate.
    pub learning_rate: f64,
    /// Weight decay in place of the recipe's.
    pub weight_decay: Option<f64>,
}

/// Evaluation during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluate {
    /// Steps between evaluations; 0 for the end only.
    pub every: u64,
    /// Batches of validation data each time.
    pub batches: u64,
}

/// Checkpoints during training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checkpoint {
    /// Steps between checkpoints; 0 for none by steps.
    pub every: u64,
    /// Minutes between checkpoints; 0 for none by the clock.
    pub minutes: f64,
    /// How many of the newest are kept.
    pub keep: u64,
    /// Steps between checkpoints that are kept for good; 0 for none.
    pub keep_every: u64,
    /// Whether the best by validation loss is kept.
    pub best: bool,
}

/// Measurements of evaluations.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Eval {
    /// Examples scored by exact match on each difficulty of a task, or in all for a file.
    pub examples: u64,
    /// Most tokens generated for an answer.
    pub max_tokens: u64,
    /// Depths to evaluate recurrent models at, besides their own.
    pub depths: Vec<u64>,
    /// Tokens a perplexity window advances by; the sequence length where absent.
    pub stride: Option<u64>,
    /// Prompts of samples; those that the data suggest where this is empty.
    pub prompts: Vec<String>,
    /// Divides the logits of samples; 0 takes the likeliest token. Where absent,
    /// [`Spec::temperature`] decides by the data.
    pub temperature: Option<f64>,
    /// Only the fewest likeliest tokens whose probabilities reach this are drawn from.
    pub top_p: Option<f64>,
}

/// Fields that `dreamc match` varies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Match {
    /// The baseline's spec.
    pub baseline: String,
    /// The fields that vary.
    #[serde(flatten)]
    pub fields: MatchFields,
    /// Largest relative difference that counts as matched.
    pub tolerance: f64,
}

/// Fields that vary until a model meets its baseline, each with its step; at least one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MatchFields {
    /// Meets the FLOPs of a generated token.
    pub flops: Option<(String, u64)>,
    /// Meets the FLOPs of a trained token.
    pub training: Option<(String, u64)>,
    /// Meets the parameters.
    pub params: Option<(String, u64)>,
    /// Meets the memory of generation.
    pub memory: Option<(String, u64)>,
}

impl MatchFields {
    /// Those there are, with their keys, in the order of the search.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, &(String, u64))> {
        let all = [
            ("flops", &self.flops),
            ("training", &self.training),
            ("params", &self.params),
            ("memory", &self.memory),
        ];
        all.into_iter().filter_map(|(key, field)| Some((key, field.as_ref()?)))
    }
}
