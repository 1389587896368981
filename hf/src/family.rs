//! The families: for each the fields of its `config.json` and the names of its tensors.
//!
//! *Promise*: the tables are the only place that knows a family, and both ways read them: importing
//! takes a field's value or its class's default, exporting writes the same field; importing puts
//! tensors together, exporting takes them apart.
//!
//! Fields and defaults are those of `transformers`' classes (`LlamaConfig`, `Gemma2Config` …, in
//! `models/*/configuration_*.py`), tensors those of their modules.

/// A quantity of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// Vocabulary size.
    Vocab,
    /// Hidden size.
    Hidden,
    /// Longest sequence.
    Context,
    /// Number of layers.
    Layers,
    /// Query heads.
    Heads,
    /// Key and value heads.
    KvHeads,
    /// Size of a head.
    HeadSize,
    /// Intermediate size of a dense network; of the experts, where there is no size of their own.
    Intermediate,
    /// Added to mean squares.
    Eps,
    /// Whether the head is the embedding.
    Tie,
    /// The scale of an attention is its inverse square root.
    Scalar,
    /// Soft-cap of scores.
    Softcap,
    /// Soft-cap of logits.
    LogitSoftcap,
    /// Experts of a layer.
    Experts,
    /// Experts of a token.
    Active,
    /// Intermediate size of an expert.
    ExpertIntermediate,
    /// Whether gates are divided by their sum.
    Normalise,
    /// Intermediate size of the expert that every token uses.
    Shared,
    /// How many experts every token uses.
    SharedCount,
    /// The first layers, which have no experts.
    Dense,
    /// Groups of experts.
    Groups,
    /// Groups in which experts are chosen.
    ActiveGroups,
    /// Factor on the gates.
    GateScale,
    /// Passes of the loop.
    Passes,
    /// The last passes, through which gradients flow.
    Backprop,
    /// Layers before the loop.
    Prelude,
    /// Layers of the loop.
    Core,
    /// Layers after the loop.
    Coda,
    /// Factor on the embedding.
    EmbedScale,
    /// Deviation of the numbers that a loop begins with.
    Noise,
    /// Size of the vector that queries are made of.
    QueryRank,
    /// Size of the vector that keys and values are made of.
    KvRank,
    /// Elements of a head that turn.
    Turned,
    /// Elements of a head that do not.
    Still,
    /// Size of a head's value.
    Value,
    /// Whether projections of attentions have biases.
    Bias,
    /// Whether matrices of dense networks have biases.
    MlpBias,
    /// Heads of a mixer.
    MixerHeads,
    /// Size of a head of a mixer.
    MixerSize,
    /// Groups of heads of a mixer.
    MixerGroups,
    /// Size of the state of a mixer.
    MixerState,
    /// Tokens of a mixer's convolution.
    MixerWidth,
    /// Elements of all heads of a mixer by the hidden size.
    MixerExpand,
    /// Experts of a layer, 0 for a dense network in their place.
    ExpertsOrNone,
    /// Factor on the scores of an attention.
    Scale,
    /// Factor on what every component gives.
    OutputScale,
    /// The divisor of logits.
    LogitDivisor,
    /// Factor on logits.
    LogitFactor,
    /// Elements of all heads of a mixer.
    MixerWide,
}

/// The kind of number a quantity is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, at least 1.
    Whole,
    /// A whole number, 0 for none.
    Count,
    /// A number above 0.
    Real,
    /// A number above 0, or null.
    Cap,
    /// A number above 0 that `transformers` writes as a whole one where it is one.
    Either,
    /// True or false.
    Flag,
}

impl Slot {
    /// Its kind.
    pub fn kind(self) -> Kind {
        match self {
            Slot::Vocab | Slot::Hidden | Slot::Context | Slot::Layers => Kind::Whole,
            Slot::Heads | Slot::KvHeads | Slot::HeadSize | Slot::Intermediate => Kind::Whole,
            Slot::Experts | Slot::Active | Slot::ExpertIntermediate | Slot::Shared => Kind::Whole,
            Slot::Groups | Slot::ActiveGroups => Kind::Whole,
            Slot::Passes | Slot::Backprop => Kind::Whole,
            Slot::MixerHeads | Slot::MixerSize | Slot::MixerGroups => Kind::Whole,
            Slot::MixerState | Slot::MixerWidth | Slot::MixerExpand | Slot::MixerWide => Kind::Whole,
            Slot::Prelude | Slot::Core | Slot::Coda => Kind::Whole,
            Slot::EmbedScale | Slot::Noise | Slot::Scale => Kind::Real,
            Slot::OutputScale | Slot::LogitDivisor | Slot::LogitFactor => Kind::Real,
            Slot::ExpertsOrNone => Kind::Count,
            Slot::KvRank | Slot::Turned | Slot::Still | Slot::Value => Kind::Whole,
            Slot::SharedCount | Slot::Dense | Slot::QueryRank => Kind::Count,
            Slot::Eps | Slot::GateScale => Kind::Real,
            Slot::Softcap | Slot::LogitSoftcap => Kind::Cap,
            Slot::Scalar => Kind::Either,
            Slot::Tie | Slot::Normalise | Slot::Bias | Slot::MlpBias => Kind::Flag,
        }
    }
}

/// The value of a field that the file lacks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    /// The file must have it.
    Required,
    /// A whole number.
    Whole(u64),
    /// A real number.
    Real(f64),
    /// A flag.
    Flag(bool),
    /// No number.
    Nothing,
    /// The number of query heads.
    Heads,
    /// The hidden size by the number of heads.
    HiddenByHeads,
}

/// A field: its name, its quantity, and its value where the file lacks it.
pub type Field = (&'static str, Slot, Absent);

/// Which layers have the window, and which fields say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// None; `sliding_window` must be null.
    Never,
    /// None; `use_sliding_window` must be false, and then `sliding_window` is not read.
    Unused,
    /// All, where `sliding_window` is a number, which is this where the file lacks it.
    All(Option<u64>),
    /// All, where `use_sliding_window` is true.
    AllUsed(u64),
    /// By `layer_types`, else all but those at multiples of the first number; the second is the
    /// window's default.
    But(usize, u64),
    /// By `layer_types`, else from `max_window_layers` on, where `use_sliding_window` is true.
    From(u64),
}

/// How the rotation's base is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rotation {
    /// One for all layers, this where the file lacks it; `None`: the file must have it.
    One(Option<f64>),
    /// One for layers without the window and `rope_local_base_freq` for those with it.
    Two(f64, f64),
    /// One for all layers, whose base is `rope_base`.
    Base(f64),
    /// One base, this where the file lacks it, and a scaling of layers without the window alone.
    Full(f64),
    /// None: heads do not turn.
    Still,
    /// One for all layers, this where the file lacks it, where `position_embedding_type` is `rope`.
    Typed(f64),
}

/// The order in which layers are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One after the other.
    Straight,
    /// All of them and a norm, several times; a gate says where a token leaves (Ouro).
    Looped,
    /// A prelude, a core that is looped from noise and mixes the prelude in, and a coda; a norm
    /// after each addition to the stream (Huginn). Its class needs a table that is no weight, so
    /// that nothing goes back to it.
    Recurrent,
}

/// The norms of a layer's two branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Each reads the stream through one.
    Before,
    /// That, and the output of each has one.
    Around,
    /// The output of each has one, and it reads the stream itself.
    Behind,
}

impl Norms {
    /// Whether there are norms before, and after.
    pub fn places(self) -> (bool, bool) {
        (self != Norms::Behind, self != Norms::Before)
    }
}

/// Which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sparse {
    /// None.
    Never,
    /// All.
    All,
    /// By `mlp_only_layers` and `decoder_sparse_step`.
    Listed,
    /// All but the first, as many as [`Slot::Dense`] says.
    Later,
    /// All, where [`Slot::ExpertsOrNone`] is not 0; what stands in for them is the network of all
    /// tokens.
    Counted,
}

/// The part of a layer that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The layer itself: its norms between components.
    Layer,
    /// The attention.
    Attention,
    /// The mixer of a layer without one.
    Mixer,
    /// A dense network.
    Mlp,
    /// Experts.
    Experts,
}

/// The tensors of a layer of theirs that one of ours is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// One.
    One(&'static str),
    /// One that is a matrix of one row there and a vector here.
    Row(&'static str),
    /// Queries, keys and values, the rows of one after those of the other.
    Heads([&'static str; 3]),
    /// The upper (0) or lower (1) half of the rows of one.
    Half(&'static str, u64),
    /// The same of the rows of each expert.
    HalfEach(&'static str, u64),
    /// One of each expert, whose number stands for `{e}`.
    Each(&'static str),
    /// Matrices of experts that stand transposed, their columns interleaved with those of a number
    /// of our tensors: every that many columns, from this one on.
    Turned(&'static str, u64, u64),
    /// Vectors of experts, their elements interleaved likewise.
    Among(&'static str, u64, u64),
    /// Queries, keys and values, of whose heads the elements that turn together are neighbours.
    Pairs(&'static str),
    /// Queries, of whose heads the last elements turn, neighbours together: made of a short vector,
    /// or of the stream.
    LastPairs(&'static str, &'static str),
    /// A vector that keys and values are made of, and the part of keys that turns in that order.
    LatentPairs(&'static str),
    /// Of vectors added to queries and keys, in the same order, those of queries (0) or keys (1).
    PairsOf(&'static str, u64),
    /// One that is a vector there, whatever its dimensions are here.
    Flat(&'static str),
    /// Of a mixer's parts, whose rows stand one after another from the first of these up to the
    /// second: the rows of the third. The parts of Mamba-2 are gate, values, keys, queries and
    /// steps, those of Gated DeltaNet queries, keys and values.
    Stacked(&'static str, [usize; 2], usize),
    /// Of a mixer's parts, which stand one after another for each head of keys: the rows of the
    /// part of this number.
    ByHead(&'static str, &'static [Rows], usize),
    /// Queries, keys and values, where the rows of a gate stand after those of each head's query.
    GatedHeads([&'static str; 3]),
    /// The rows of these gates.
    Gates(&'static str),
    /// The first where queries are made of a short vector, the second where of the stream.
    Either(&'static str, &'static str),
    /// A filter of each channel, which ends with the token itself.
    Filter(&'static str),
    /// A vector with these numbers of dimensions of one element before it, and after it.
    Ones(&'static str, [usize; 2]),
}

/// Rows that a mixer has for each head of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The elements of a key.
    Keys,
    /// The elements of the values of all its heads.
    Values,
    /// One for each head of values.
    Members,
}

/// A mixer of tokens in the place of an attention: definitions of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// `std/mamba2`.
    Mamba2,
    /// `std/gated_delta`.
    GatedDelta,
    /// `std/kda`.
    Kda,
    /// `std/falcon_h1`, which attends as well.
    FalconH1,
}

impl Mixer {
    /// All of them.
    pub const ALL: [Mixer; 4] = [Mixer::Mamba2, Mixer::GatedDelta, Mixer::Kda, Mixer::FalconH1];

    /// The name of its definition.
    pub fn name(self) -> &'static str {
        match self {
            Mixer::Mamba2 => "mamba2",
            Mixer::GatedDelta => "gated_delta",
            Mixer::Kda => "kda",
            Mixer::FalconH1 => "falcon_h1",
        }
    }
}

/// How a file says which layers have a mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// All of them.
    Every,
    /// All but those of `attn_layer_indices`.
    Indices,
    /// Those that `layer_types` names so, else all but those at multiples of
    /// `full_attention_interval`.
    Types,
    /// Those that `layer_types` names so, in the words of earlier versions, else all.
    Named,
    /// Those of `linear_attn_config`, counted from 1, else those that `layer_types` names so.
    Config,
    /// Every layer is one component, that of its letter in `hybrid_override_pattern` or of its word
    /// in `layers_block_type`.
    Single,
}

/// A factor of a part of a layer, a number of the file that is a setting of a definition of the
/// library; 1 where the file lacks it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factor {
    /// The definition's component.
    pub role: Role,
    /// The setting.
    pub setting: &'static str,
    /// The field.
    pub field: &'static str,
    /// Its place in a field that is a list.
    pub place: Option<usize>,
}

/// A kind of model.
#[derive(Debug, PartialEq)]
pub struct Family {
    /// `model_type`.
    pub kind: &'static str,
    /// `architectures`.
    pub class: &'static str,
    /// For people.
    pub title: &'static str,
    /// Fields with a quantity each, some of them common to families.
    pub fields: &'static [&'static [Field]],
    /// Fields that must be absent, null, false or 0.
    pub off: &'static [&'static str],
    /// Fields that must be absent, null or true.
    pub on: &'static [&'static str],
    /// Other names of fields, by those of `fields`.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Fields that this family alone has, and that change nothing.
    pub harmless: &'static [&'static str],
    /// Name of the field of the activation, and its values with ours; the first is the class's
    /// default.
    pub activation: (&'static str, &'static [(&'static str, &'static str)]),
    /// Gains are stored less one, and the embedding is scaled by the root of its size: Gemma.
    pub gemma: bool,
    /// Gains are stored less one.
    pub unit_offset: bool,
    /// The order of its layers.
    pub form: Form,
    /// Norms of branches.
    pub norms: Norms,
    /// Whether heads have sinks.
    pub sinks: bool,
    /// Whether the router and the experts have biases.
    pub biased: bool,
    /// Whether what every token's expert gives is multiplied by a gate.
    pub shared_gate: bool,
    /// Whether attentions are latent.
    pub latent: bool,
    /// Whether outputs of attentions are multiplied by gates, whose rows of queries' matrix stand
    /// after those of their head.
    pub gated: bool,
    /// The mixer of layers without an attention, and how a file says which they are.
    pub mixer: Option<(Mixer, Placed)>,
    /// Factors of parts of layers; dense networks are those of `std/scaled_mlp` where some are
    /// theirs.
    pub factors: &'static [Factor],
    /// Share of a head that turns.
    pub share: f64,
    /// Normalisation of queries and keys, in the language's word.
    pub qk_norm: &'static str,
    /// Projections that have biases, in the language's word: always, or where [`Slot::Bias`] is a
    /// field and true.
    pub bias: &'static str,
    /// Windows.
    pub windows: Windows,
    /// Rotation.
    pub rotation: Rotation,
    /// Experts.
    pub sparse: Sparse,
    /// Preset of the router, and the weight of its balancing loss where the file lacks it.
    pub router: (&'static str, f64),
    /// Fields of numbers that the class computes with and that have one value here.
    pub fixed: &'static [(&'static str, f64)],
    /// Fields of words that have one value here.
    pub words: &'static [(&'static str, &'static str)],
    /// Tensors outside of the layers, apart from embedding, head and last norm: our name, theirs,
    /// and whether theirs is a matrix of one row.
    pub beside: &'static [(&'static str, &'static str, bool)],
    /// Names of the tensors of the embedding, the head and the last norm, and what those of layers
    /// begin with.
    pub ends: [&'static str; 4],
    /// Tensors that are stored and that every version computes.
    pub computed: &'static [&'static str],
    /// Parts of names that a version of `transformers` writes, and those of the family's own files,
    /// which every version reads.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Beginnings of names of tensors that its class does not read: layers that predict
    /// further tokens.
    pub unread: &'static [&'static str],
    /// Tensors of a layer: of modules by our stem and theirs, or one by its whole name here and
    /// there.
    pub tensors: &'static [&'static [(Role, &'static str, Source)]],
}

impl Family {
    /// Fields with a quantity each.
    pub fn fields(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().copied().flatten()
    }
}

use Absent::{Flag, Heads, HiddenByHeads, Nothing, Real, Required, Whole};
use Slot as S;

const QKV: Source = Source::Heads(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
const ATTENTION: [(Role, &str, Source); 2] =
    [(Role::Attention, "qkv", QKV), (Role::Attention, "out", Source::One("self_attn.o_proj"))];
const NORMS: [(Role, &str, Source); 3] = [
    (Role::Attention, "norm", Source::One("input_layernorm")),
    (Role::Mlp, "norm", Source::One("post_attention_layernorm")),
    (Role::Experts, "norm", Source::One("post_attention_layernorm")),
];
const QK_NORMS: [(Role, &str, Source); 2] = [
    (Role::Attention, "q_norm", Source::One("self_attn.q_norm")),
    (Role::Attention, "k_norm", Source::One("self_attn.k_norm")),
];
const MLP: [(Role, &str, Source); 3] = [
    (Role::Mlp, "gate", Source::One("mlp.gate_proj")),
    (Role::Mlp, "up", Source::One("mlp.up_proj")),
    (Role::Mlp, "down", Source::One("mlp.down_proj")),
];
const EXPERTS: [(Role, &str, Source); 4] = [
    (Role::Experts, "router", Source::One("mlp.gate")),
    (Role::Experts, "gate", Source::Each("mlp.experts.{e}.gate_proj")),
    (Role::Experts, "up", Source::Each("mlp.experts.{e}.up_proj")),
    (Role::Experts, "down", Source::Each("mlp.experts.{e}.down_proj")),
];
const GEMMA_NORMS: [(Role, &str, Source); 4] = [
    (Role::Attention, "norm", Source::One("input_layernorm")),
    (Role::Attention, "post_norm", Source::One("post_attention_layernorm")),
    (Role::Mlp, "norm", Source::One("pre_feedforward_layernorm")),
    (Role::Mlp, "post_norm", Source::One("post_feedforward_layernorm")),
];

const BIASES_OF_EXPERTS: [(Role, &str, Source); 5] = [
    (Role::Experts, "router.logit_bias", Source::One("mlp.router.bias")),
    (Role::Experts, "gate.bias", Source::Among("mlp.experts.gate_up_proj_bias", 2, 0)),
    (Role::Experts, "up.bias", Source::Among("mlp.experts.gate_up_proj_bias", 2, 1)),
    (Role::Experts, "down.bias", Source::One("mlp.experts.down_proj_bias")),
    (Role::Attention, "sink", Source::One("self_attn.sinks")),
];
const BEHIND: [(Role, &str, Source); 2] = [
    (Role::Attention, "post_norm", Source::One("post_attention_layernorm")),
    (Role::Mlp, "post_norm", Source::One("post_feedforward_layernorm")),
];
const SHARED_EXPERTS: [(Role, &str, Source); 3] = [
    (Role::Experts, "shared.gate", Source::One("mlp.shared_experts.gate_proj")),
    (Role::Experts, "shared.up", Source::One("mlp.shared_experts.up_proj")),
    (Role::Experts, "shared.down", Source::One("mlp.shared_experts.down_proj")),
];

const SHARED_GATED: [(Role, &str, Source); 4] = [
    (Role::Experts, "shared.gate", Source::One("mlp.shared_expert.gate_proj")),
    (Role::Experts, "shared.up", Source::One("mlp.shared_expert.up_proj")),
    (Role::Experts, "shared.down", Source::One("mlp.shared_expert.down_proj")),
    (Role::Experts, "shared_gate", Source::Row("mlp.shared_expert_gate")),
];
/// The parts of queries and keys that turn, where neighbours turn together.
const LATENT_PAIRS: [(Role, &str, Source); 2] = [
    (Role::Attention, "q_up", Source::LastPairs("self_attn.q_b_proj", "self_attn.q_proj")),
    (Role::Attention, "kv_down", Source::LatentPairs("self_attn.kv_a_proj_with_mqa")),
];
const LATENT_ATTENTION: [(Role, &str, Source); 5] = [
    (Role::Attention, "q_down", Source::One("self_attn.q_a_proj")),
    (Role::Attention, "q_down_norm", Source::One("self_attn.q_a_layernorm")),
    (Role::Attention, "kv_down_norm", Source::One("self_attn.kv_a_layernorm")),
    (Role::Attention, "kv_up", Source::One("self_attn.kv_b_proj")),
    (Role::Attention, "out", Source::One("self_attn.o_proj")),
];

/// The fields that most families name alike, with the values of those that the file lacks.
struct Usual {
    context: u64,
    kv_heads: Absent,
    head_size: Absent,
    intermediate: Absent,
    eps: f64,
    tie: bool,
}

const USUAL: Usual = Usual {
    context: 2048,
    kv_heads: Heads,
    head_size: HiddenByHeads,
    intermediate: Required,
    eps: 1e-6,
    tie: false,
};

impl Usual {
    const fn fields(self) -> [Field; 10] {
        [
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(self.context)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, self.kv_heads),
            ("head_dim", S::HeadSize, self.head_size),
            ("intermediate_size", S::Intermediate, self.intermediate),
            ("rms_norm_eps", S::Eps, Real(self.eps)),
            ("tie_word_embeddings", S::Tie, Flag(self.tie)),
        ]
    }

    /// Of models whose attentions are latent, which have routed and shared experts.
    const fn latent(self) -> [Field; 18] {
        let [vocab, hidden, context, layers, heads, kv_heads, _, intermediate, eps, tie] = self.fields();
        [
            vocab,
            hidden,
            context,
            layers,
            heads,
            kv_heads,
            ("q_lora_rank", S::QueryRank, Nothing),
            ("kv_lora_rank", S::KvRank, Whole(512)),
            ("qk_rope_head_dim", S::Turned, Whole(64)),
            ("qk_nope_head_dim", S::Still, Whole(128)),
            ("v_head_dim", S::Value, Whole(128)),
            intermediate,
            ("moe_intermediate_size", S::ExpertIntermediate, Required),
            ("n_routed_experts", S::Experts, Required),
            ("n_shared_experts", S::SharedCount, Required),
            ("num_experts_per_tok", S::Active, Required),
            eps,
            tie,
        ]
    }
}

/// Of a layer whose mixer is Mamba-2, in the names of `std/mamba2`, and the name of its norm.
macro_rules! mamba {
    ($stem:literal, $norm:literal) => {
        [
            (Role::Mixer, "norm", Source::One($norm)),
            (Role::Mixer, "z.weight", Source::Stacked(concat!($stem, ".in_proj.weight"), [0, 5], 0)),
            (Role::Mixer, "v.weight", Source::Stacked(concat!($stem, ".in_proj.weight"), [0, 5], 1)),
            (Role::Mixer, "B.weight", Source::Stacked(concat!($stem, ".in_proj.weight"), [0, 5], 2)),
            (Role::Mixer, "C.weight", Source::Stacked(concat!($stem, ".in_proj.weight"), [0, 5], 3)),
            (Role::Mixer, "step.weight", Source::Stacked(concat!($stem, ".in_proj.weight"), [0, 5], 4)),
            (Role::Mixer, "v.filter", Source::Stacked(concat!($stem, ".conv1d.weight"), [1, 4], 1)),
            (Role::Mixer, "B.filter", Source::Stacked(concat!($stem, ".conv1d.weight"), [1, 4], 2)),
            (Role::Mixer, "C.filter", Source::Stacked(concat!($stem, ".conv1d.weight"), [1, 4], 3)),
            (Role::Mixer, "v.bias", Source::Stacked(concat!($stem, ".conv1d.bias"), [1, 4], 1)),
            (Role::Mixer, "B.bias", Source::Stacked(concat!($stem, ".conv1d.bias"), [1, 4], 2)),
            (Role::Mixer, "C.bias", Source::Stacked(concat!($stem, ".conv1d.bias"), [1, 4], 3)),
            (Role::Mixer, "step.weight2", Source::Flat(concat!($stem, ".dt_bias"))),
            (Role::Mixer, "a.weight", Source::Flat(concat!($stem, ".A_log"))),
            (Role::Mixer, "y.weight", Source::Flat(concat!($stem, ".D"))),
            (Role::Mixer, "out.weight", Source::Flat(concat!($stem, ".norm.weight"))),
            (Role::Mixer, "out.weight2", Source::One(concat!($stem, ".out_proj.weight"))),
        ]
    };
}

const MAMBA: [(Role, &str, Source); 17] = mamba!("mamba", "input_layernorm");

/// Of a layer whose mixer is Gated DeltaNet, in the names of `std/gated_delta`.
const GATED_DELTA: [(Role, &str, Source); 14] = {
    const ROWS: &str = "linear_attn.in_proj_qkvz.weight";
    const RATES: &str = "linear_attn.in_proj_ba.weight";
    const FILTERS: &str = "linear_attn.conv1d.weight";
    const PARTS: &[Rows] = &[Rows::Keys, Rows::Keys, Rows::Values, Rows::Values];
    const BOTH: &[Rows] = &[Rows::Members, Rows::Members];
    [
        (Role::Mixer, "norm", Source::One("input_layernorm")),
        (Role::Mixer, "q.weight", Source::ByHead(ROWS, PARTS, 0)),
        (Role::Mixer, "k.weight", Source::ByHead(ROWS, PARTS, 1)),
        (Role::Mixer, "v.weight", Source::ByHead(ROWS, PARTS, 2)),
        (Role::Mixer, "out.weight", Source::ByHead(ROWS, PARTS, 3)),
        (Role::Mixer, "b.weight", Source::ByHead(RATES, BOTH, 0)),
        (Role::Mixer, "step.weight", Source::ByHead(RATES, BOTH, 1)),
        (Role::Mixer, "q.filter", Source::Stacked(FILTERS, [0, 3], 0)),
        (Role::Mixer, "k.filter", Source::Stacked(FILTERS, [0, 3], 1)),
        (Role::Mixer, "v.filter", Source::Stacked(FILTERS, [0, 3], 2)),
        (Role::Mixer, "step.weight2", Source::Flat("linear_attn.dt_bias")),
        (Role::Mixer, "a.weight", Source::Flat("linear_attn.A_log")),
        (Role::Mixer, "out.gain", Source::One("linear_attn.norm.weight")),
        (Role::Mixer, "out.weight2", Source::One("linear_attn.out_proj.weight")),
    ]
};

/// Of a layer whose mixer is Kimi Delta Attention, in the names of `std/kda`.
const KDA: [(Role, &str, Source); 16] = [
    (Role::Mixer, "norm", Source::One("input_layernorm")),
    (Role::Mixer, "q.weight", Source::One("self_attn.q_proj.weight")),
    (Role::Mixer, "k.weight", Source::One("self_attn.k_proj.weight")),
    (Role::Mixer, "v.weight", Source::One("self_attn.v_proj.weight")),
    (Role::Mixer, "q.filter", Source::Filter("self_attn.q_conv1d.weight")),
    (Role::Mixer, "k.filter", Source::Filter("self_attn.k_conv1d.weight")),
    (Role::Mixer, "v.filter", Source::Filter("self_attn.v_conv1d.weight")),
    (Role::Mixer, "step.weight", Source::One("self_attn.f_a_proj.weight")),
    (Role::Mixer, "step.weight2", Source::One("self_attn.f_b_proj.weight")),
    (Role::Mixer, "step.weight3", Source::Flat("self_attn.dt_bias")),
    (Role::Mixer, "a.weight", Source::Ones("self_attn.A_log", [2, 1])),
    (Role::Mixer, "b.weight", Source::One("self_attn.b_proj.weight")),
    (Role::Mixer, "gate.weight", Source::One("self_attn.g_a_proj.weight")),
    (Role::Mixer, "gate.weight2", Source::One("self_attn.g_b_proj.weight")),
    (Role::Mixer, "out.gain", Source::One("self_attn.o_norm.weight")),
    (Role::Mixer, "out.weight", Source::One("self_attn.o_proj.weight")),
];

/// Of a layer of Falcon-H1 without its network, in the names of `std/falcon_h1`.
const FALCON: [(Role, &str, Source); 21] = {
    let [norm, z, v, b, c, step, v_filter, b_filter, c_filter, v_bias, b_bias, c_bias, steps, a, y, _, _] =
        mamba!("mamba", "input_layernorm");
    [
        norm,
        z,
        v,
        b,
        c,
        step,
        v_filter,
        b_filter,
        c_filter,
        v_bias,
        b_bias,
        c_bias,
        steps,
        a,
        y,
        (Role::Mixer, "out.weight", Source::One("mamba.out_proj.weight")),
        (Role::Mixer, "q.weight", Source::One("self_attn.q_proj.weight")),
        (Role::Mixer, "k.weight", Source::One("self_attn.k_proj.weight")),
        (Role::Mixer, "w.weight", Source::One("self_attn.v_proj.weight")),
        (Role::Mixer, "out.weight2", Source::One("self_attn.o_proj.weight")),
        (Role::Mlp, "norm", Source::One("pre_ff_layernorm")),
    ]
};
/// Its network, in the names of `std/scaled_mlp`.
const FALCON_MLP: [(Role, &str, Source); 3] = [
    (Role::Mlp, "a.weight", Source::One("feed_forward.gate_proj.weight")),
    (Role::Mlp, "a.weight2", Source::One("feed_forward.up_proj.weight")),
    (Role::Mlp, "out.weight", Source::One("feed_forward.down_proj.weight")),
];
/// Its factors.
const FALCON_FACTORS: [Factor; 12] = {
    const fn one(role: Role, setting: &'static str, field: &'static str, place: Option<usize>) -> Factor {
        Factor { role, setting, field, place }
    }
    [
        one(Role::Mixer, "read", "ssm_in_multiplier", None),
        one(Role::Mixer, "gate", "ssm_multipliers", Some(0)),
        one(Role::Mixer, "values", "ssm_multipliers", Some(1)),
        one(Role::Mixer, "keys", "ssm_multipliers", Some(2)),
        one(Role::Mixer, "queries", "ssm_multipliers", Some(3)),
        one(Role::Mixer, "steps", "ssm_multipliers", Some(4)),
        one(Role::Mixer, "mixed", "ssm_out_multiplier", None),
        one(Role::Mixer, "seen", "attention_in_multiplier", None),
        one(Role::Mixer, "key", "key_multiplier", None),
        one(Role::Mixer, "attended", "attention_out_multiplier", None),
        one(Role::Mlp, "gate", "mlp_multipliers", Some(0)),
        one(Role::Mlp, "down", "mlp_multipliers", Some(1)),
    ]
};

const BIAS: Field = ("attention_bias", S::Bias, Flag(false));

/// Activations of gated networks.
const GATED: &[(&str, &str)] =
    &[("silu", "swiglu"), ("gelu_pytorch_tanh", "geglu"), ("gelu_new", "geglu"), ("gelu", "geglu_erf")];

/// The values that most families have.
const PLAIN: Family = Family {
    kind: "",
    class: "",
    title: "",
    fields: &[],
    off: &[],
    on: &[],
    aliases: &[],
    harmless: &[],
    activation: ("hidden_act", GATED),
    gemma: false,
    unit_offset: false,
    form: Form::Straight,
    norms: Norms::Before,
    sinks: false,
    biased: false,
    shared_gate: false,
    latent: false,
    gated: false,
    mixer: None,
    factors: &[],
    share: 1.0,
    qk_norm: "none",
    bias: "none",
    windows: Windows::Never,
    rotation: Rotation::One(Some(10000.0)),
    sparse: Sparse::Never,
    router: ("", 0.0),
    fixed: &[],
    words: &[],
    beside: &[],
    ends: ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers"],
    computed: &[],
    renamed: &[],
    unread: &[],
    tensors: &[],
};

/// DeepSeek's from V2 on: latent attention, and experts after the first layers.
const DEEPSEEK: Family = Family {
    fixed: &[("moe_layer_freq", 1.0)],
    latent: true,
    sparse: Sparse::Later,
    tensors: &[
        &LATENT_ATTENTION,
        &LATENT_PAIRS,
        &NORMS,
        &MLP,
        &EXPERTS,
        &SHARED_EXPERTS,
        &[(Role::Experts, "router.bias", Source::One("mlp.gate.e_score_correction_bias"))],
    ],
    ..PLAIN
};

/// The families. Where a specification could be of several, the first is taken.
pub static FAMILIES: [Family; 26] = [
    Family {
        kind: "gemma2",
        class: "Gemma2ForCausalLM",
        title: "Gemma 2",
        fields: &[
            &Usual { context: 8192, kv_heads: Whole(4), head_size: Whole(256), tie: true, ..USUAL }.fields(),
            &[
                BIAS,
                ("query_pre_attn_scalar", S::Scalar, Real(256.0)),
                ("attn_logit_softcapping", S::Softcap, Real(50.0)),
                ("final_logit_softcapping", S::LogitSoftcap, Real(30.0)),
            ],
        ],
        off: &["use_bidirectional_attention"],
        // Its first files had `hidden_act: gelu` only, and meant the tanh form.
        harmless: &["hidden_act"],
        activation: ("hidden_activation", &[("gelu_pytorch_tanh", "geglu")]),
        gemma: true,
        norms: Norms::Around,
        bias: "all",
        windows: Windows::But(2, 4096),
        tensors: &[&ATTENTION, &GEMMA_NORMS, &MLP],
        ..PLAIN
    },
    Family {
        kind: "gemma3_text",
        class: "Gemma3ForCausalLM",
        title: "Gemma 3 (text)",
        fields: &[
            &Usual { context: 131_072, kv_heads: Whole(4), head_size: Whole(256), tie: true, ..USUAL }
                .fields(),
            &[
                BIAS,
                ("query_pre_attn_scalar", S::Scalar, Real(256.0)),
                ("final_logit_softcapping", S::LogitSoftcap, Nothing),
            ],
        ],
        // The class reads the cap of scores and does not apply it.
        off: &["use_bidirectional_attention", "attn_logit_softcapping"],
        activation: ("hidden_activation", &[("gelu_pytorch_tanh", "geglu")]),
        gemma: true,
        norms: Norms::Around,
        qk_norm: "rms",
        bias: "all",
        windows: Windows::But(6, 4096),
        rotation: Rotation::Two(1e6, 1e4),
        tensors: &[&ATTENTION, &GEMMA_NORMS, &MLP, &QK_NORMS],
        ..PLAIN
    },
    Family {
        kind: "llama",
        class: "LlamaForCausalLM",
        title: "Llama",
        fields: &[&USUAL.fields(), &[BIAS, ("mlp_bias", S::MlpBias, Flag(false))]],
        bias: "all",
        tensors: &[&ATTENTION, &NORMS, &MLP],
        ..PLAIN
    },
    Family {
        kind: "mistral",
        class: "MistralForCausalLM",
        title: "Mistral",
        fields: &[&Usual { context: 131_072, kv_heads: Whole(8), ..USUAL }.fields()],
        off: &["attention_bias", "mlp_bias"],
        windows: Windows::All(Some(4096)),
        tensors: &[&ATTENTION, &NORMS, &MLP],
        ..PLAIN
    },
    Family {
        kind: "phi3",
        class: "Phi3ForCausalLM",
        title: "Phi 3",
        fields: &[&Usual { context: 4096, eps: 1e-5, ..USUAL }.fields()],
        off: &["attention_bias"],
        // The last is read with a scaling alone.
        harmless: &["embd_pdrop", "resid_pdrop", "original_max_position_embeddings"],
        windows: Windows::All(None),
        tensors: &[&[
            NORMS[0],
            NORMS[1],
            ATTENTION[1],
            (Role::Attention, "qkv", Source::One("self_attn.qkv_proj")),
            (Role::Mlp, "gate", Source::Half("mlp.gate_up_proj", 0)),
            (Role::Mlp, "up", Source::Half("mlp.gate_up_proj", 1)),
            MLP[2],
        ]],
        ..PLAIN
    },
    Family {
        kind: "qwen2",
        class: "Qwen2ForCausalLM",
        title: "Qwen 2",
        fields: &[&Usual { context: 32768, kv_heads: Whole(32), ..USUAL }.fields()],
        bias: "qkv",
        windows: Windows::From(4096),
        tensors: &[&ATTENTION, &NORMS, &MLP],
        ..PLAIN
    },
    Family {
        kind: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        title: "Qwen 2 MoE",
        fields: &[
            &Usual { context: 32768, kv_heads: Whole(16), intermediate: Whole(5632), ..USUAL }.fields(),
            &[
                ("moe_intermediate_size", S::ExpertIntermediate, Whole(1408)),
                ("shared_expert_intermediate_size", S::Shared, Whole(5632)),
                ("num_experts", S::Experts, Required),
                ("num_experts_per_tok", S::Active, Whole(4)),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                ("qkv_bias", S::Bias, Flag(true)),
            ],
        ],
        // Read with a window alone, which is refused.
        harmless: &["max_window_layers"],
        shared_gate: true,
        bias: "qkv",
        windows: Windows::Unused,
        sparse: Sparse::Listed,
        router: ("olmoe", 0.001),
        tensors: &[&ATTENTION, &NORMS, &MLP, &EXPERTS, &SHARED_GATED],
        ..PLAIN
    },
    Family {
        kind: "qwen3",
        class: "Qwen3ForCausalLM",
        title: "Qwen 3",
        fields: &[
            &Usual { context: 32768, kv_heads: Whole(32), head_size: Whole(128), ..USUAL }.fields(),
            &[BIAS],
        ],
        qk_norm: "rms",
        bias: "all",
        windows: Windows::From(4096),
        tensors: &[&ATTENTION, &NORMS, &MLP, &QK_NORMS],
        ..PLAIN
    },
    Family {
        kind: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        title: "Qwen 3 MoE",
        fields: &[
            &Usual { context: 32768, kv_heads: Whole(4), intermediate: Whole(6144), ..USUAL }.fields(),
            &[
                ("moe_intermediate_size", S::ExpertIntermediate, Whole(768)),
                ("num_experts", S::Experts, Required),
                ("num_experts_per_tok", S::Active, Whole(8)),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                BIAS,
            ],
        ],
        // `transformers` reads it of the dense models alone.
        harmless: &["max_window_layers"],
        qk_norm: "rms",
        bias: "all",
        windows: Windows::AllUsed(4096),
        sparse: Sparse::Listed,
        router: ("olmoe", 0.001),
        tensors: &[&ATTENTION, &NORMS, &MLP, &QK_NORMS, &EXPERTS],
        ..PLAIN
    },
    Family {
        kind: "olmoe",
        class: "OlmoeForCausalLM",
        title: "OLMoE",
        fields: &[
            &Usual { context: 4096, eps: 1e-5, ..USUAL }.fields(),
            &[
                ("num_experts", S::Experts, Required),
                ("num_experts_per_tok", S::Active, Required),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                BIAS,
            ],
        ],
        off: &["clip_qkv"],
        qk_norm: "rms_all",
        bias: "all",
        sparse: Sparse::All,
        router: ("olmoe", 0.01),
        tensors: &[&ATTENTION, &NORMS, &QK_NORMS, &EXPERTS],
        ..PLAIN
    },
    Family {
        kind: "mixtral",
        class: "MixtralForCausalLM",
        title: "Mixtral",
        fields: &[
            &Usual { context: 131_072, kv_heads: Whole(8), eps: 1e-5, ..USUAL }.fields(),
            &[("num_local_experts", S::Experts, Required), ("num_experts_per_tok", S::Active, Required)],
        ],
        off: &["attention_bias", "mlp_bias"],
        windows: Windows::All(None),
        rotation: Rotation::One(None),
        sparse: Sparse::All,
        router: ("mixtral", 0.001),
        tensors: &[
            &ATTENTION,
            &NORMS,
            &[
                (Role::Experts, "router", Source::One("block_sparse_moe.gate")),
                (Role::Experts, "gate", Source::Each("block_sparse_moe.experts.{e}.w1")),
                (Role::Experts, "up", Source::Each("block_sparse_moe.experts.{e}.w3")),
                (Role::Experts, "down", Source::Each("block_sparse_moe.experts.{e}.w2")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "olmo2",
        class: "Olmo2ForCausalLM",
        title: "OLMo 2",
        fields: &[&Usual { context: 2048, eps: 1e-5, ..USUAL }.fields(), &[BIAS]],
        norms: Norms::Behind,
        qk_norm: "rms_all",
        bias: "all",
        tensors: &[&ATTENTION, &BEHIND, &MLP, &QK_NORMS],
        ..PLAIN
    },
    Family {
        kind: "olmo3",
        class: "Olmo3ForCausalLM",
        title: "OLMo 3",
        fields: &[&Usual { context: 2048, eps: 1e-5, ..USUAL }.fields(), &[BIAS]],
        norms: Norms::Behind,
        qk_norm: "rms_all",
        bias: "all",
        windows: Windows::But(4, 4096),
        rotation: Rotation::Full(500_000.0),
        tensors: &[&ATTENTION, &BEHIND, &MLP, &QK_NORMS],
        ..PLAIN
    },
    Family {
        kind: "gpt_oss",
        class: "GptOssForCausalLM",
        title: "gpt-oss",
        fields: &[
            &Usual { context: 131_072, kv_heads: Whole(8), head_size: Whole(64), eps: 1e-5, ..USUAL }
                .fields(),
            &[
                ("num_local_experts", S::Experts, Whole(128)),
                ("num_experts_per_tok", S::Active, Whole(4)),
                ("attention_bias", S::Bias, Flag(true)),
            ],
        ],
        // `num_experts_per_tok` and `rope_scaling` say the same.
        harmless: &["experts_per_token", "initial_context_length"],
        activation: ("hidden_act", &[("silu", "swiglu_clamped")]),
        sinks: true,
        biased: true,
        bias: "all",
        windows: Windows::But(2, 128),
        rotation: Rotation::One(Some(150_000.0)),
        sparse: Sparse::All,
        router: ("mixtral", 0.001),
        fixed: &[("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)],
        tensors: &[
            &ATTENTION,
            &NORMS,
            &BIASES_OF_EXPERTS,
            &[
                (Role::Experts, "router", Source::One("mlp.router")),
                (Role::Experts, "gate.weight", Source::Turned("mlp.experts.gate_up_proj", 2, 0)),
                (Role::Experts, "up.weight", Source::Turned("mlp.experts.gate_up_proj", 2, 1)),
                (Role::Experts, "down.weight", Source::Turned("mlp.experts.down_proj", 1, 0)),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "deepseek",
        class: "DeepseekForCausalLM",
        title: "DeepSeek MoE",
        fields: &[
            &USUAL.fields(),
            &[
                ("moe_intermediate_size", S::ExpertIntermediate, Whole(1407)),
                ("n_routed_experts", S::Experts, Required),
                ("n_shared_experts", S::SharedCount, Whole(0)),
                ("num_experts_per_tok", S::Active, Required),
                ("first_k_dense_replace", S::Dense, Whole(0)),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                BIAS,
            ],
        ],
        // The weight of a loss of training, which the class adds for every sequence by itself.
        harmless: &["aux_loss_alpha", "seq_aux"],
        bias: "all",
        words: &[("scoring_func", "softmax")],
        sparse: Sparse::Later,
        router: ("olmoe", 0.0),
        fixed: &[("moe_layer_freq", 1.0)],
        tensors: &[&ATTENTION, &NORMS, &MLP, &EXPERTS, &SHARED_EXPERTS],
        ..PLAIN
    },
    Family {
        kind: "dots1",
        class: "Dots1ForCausalLM",
        title: "dots.llm1",
        fields: &[
            &Usual { context: 2048, kv_heads: Whole(32), intermediate: Whole(10944), ..USUAL }.fields(),
            &[
                ("moe_intermediate_size", S::ExpertIntermediate, Whole(1408)),
                ("n_routed_experts", S::Experts, Required),
                ("n_shared_experts", S::SharedCount, Required),
                ("num_experts_per_tok", S::Active, Required),
                ("n_group", S::Groups, Whole(1)),
                ("topk_group", S::ActiveGroups, Whole(1)),
                ("first_k_dense_replace", S::Dense, Whole(0)),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                ("routed_scaling_factor", S::GateScale, Real(1.0)),
                BIAS,
            ],
        ],
        // Its class scores by sigmoids whatever the first says.
        harmless: &["max_window_layers", "scoring_func"],
        words: &[("topk_method", "noaux_tc")],
        qk_norm: "rms",
        bias: "all",
        sparse: Sparse::Later,
        router: ("deepseek_v3", 0.0),
        fixed: &[("moe_layer_freq", 1.0)],
        tensors: &[
            &ATTENTION,
            &NORMS,
            &MLP,
            &QK_NORMS,
            &EXPERTS,
            &SHARED_EXPERTS,
            &[(Role::Experts, "router.bias", Source::One("mlp.gate.e_score_correction_bias"))],
        ],
        ..PLAIN
    },
    Family {
        kind: "bamba",
        class: "BambaForCausalLM",
        title: "Bamba",
        fields: &[
            &Usual { context: 262_144, kv_heads: Whole(8), eps: 1e-5, ..USUAL }.fields(),
            &[
                BIAS,
                ("mamba_n_heads", S::MixerHeads, Whole(128)),
                ("mamba_d_head", S::MixerSize, Nothing),
                ("mamba_n_groups", S::MixerGroups, Whole(1)),
                ("mamba_d_state", S::MixerState, Whole(256)),
                ("mamba_d_conv", S::MixerWidth, Whole(4)),
                ("mamba_expand", S::MixerExpand, Whole(2)),
            ],
        ],
        off: &["mlp_bias", "mamba_proj_bias"],
        on: &["mamba_conv_bias"],
        // How its kernels and its training go.
        harmless: &["mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"],
        bias: "all",
        mixer: Some((Mixer::Mamba2, Placed::Indices)),
        share: 0.5,
        ends: ["model.embed_tokens.weight", "lm_head.weight", "model.final_layernorm.weight", "model.layers"],
        tensors: &[
            &ATTENTION,
            &MAMBA,
            &[
                (Role::Attention, "norm", Source::One("input_layernorm")),
                (Role::Mlp, "norm", Source::One("pre_ff_layernorm")),
                (Role::Mlp, "gate", Source::One("feed_forward.gate_proj")),
                (Role::Mlp, "up", Source::One("feed_forward.up_proj")),
                (Role::Mlp, "down", Source::One("feed_forward.down_proj")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "falcon_h1",
        class: "FalconH1ForCausalLM",
        title: "Falcon-H1",
        fields: &[
            &Usual { context: 8192, kv_heads: Whole(8), intermediate: Whole(14336), eps: 1e-5, ..USUAL }
                .fields(),
            &[
                ("mamba_d_ssm", S::MixerWide, Whole(1024)),
                ("mamba_n_heads", S::MixerHeads, Whole(128)),
                ("mamba_d_head", S::MixerSize, Nothing),
                ("mamba_n_groups", S::MixerGroups, Whole(1)),
                ("mamba_d_state", S::MixerState, Whole(256)),
                ("mamba_d_conv", S::MixerWidth, Whole(4)),
                ("embedding_multiplier", S::EmbedScale, Real(1.0)),
                ("lm_head_multiplier", S::LogitFactor, Real(1.0)),
            ],
        ],
        off: &[
            "attention_bias",
            "attn_layer_indices",
            "mamba_proj_bias",
            "mamba_rms_norm",
            "mlp_bias",
            "projectors_bias",
        ],
        on: &["mamba_conv_bias"],
        // How its kernels go, a size that `mamba_d_ssm` says, and where a norm stands that the
        // published models lack.
        harmless: &[
            "mamba_chunk_size",
            "mamba_expand",
            "mamba_norm_before_gate",
            "mamba_use_mlp",
            "mlp_expansion_factor",
            "num_logits_to_keep",
        ],
        activation: ("hidden_act", &[("silu", "swiglu")]),
        mixer: Some((Mixer::FalconH1, Placed::Every)),
        factors: &FALCON_FACTORS,
        ends: ["model.embed_tokens.weight", "lm_head.weight", "model.final_layernorm.weight", "model.layers"],
        tensors: &[&FALCON, &FALCON_MLP],
        ..PLAIN
    },
    Family {
        kind: "granitemoehybrid",
        class: "GraniteMoeHybridForCausalLM",
        title: "Granite 4 hybrid",
        fields: &[&[
            ("vocab_size", S::Vocab, Whole(32000)),
            ("hidden_size", S::Hidden, Whole(4096)),
            ("max_position_embeddings", S::Context, Whole(2048)),
            ("num_hidden_layers", S::Layers, Whole(32)),
            ("num_attention_heads", S::Heads, Whole(32)),
            ("num_key_value_heads", S::KvHeads, Heads),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::ExpertIntermediate, Whole(11008)),
            ("shared_intermediate_size", S::Shared, Whole(1024)),
            ("num_local_experts", S::ExpertsOrNone, Whole(8)),
            ("num_experts_per_tok", S::Active, Whole(2)),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("embedding_multiplier", S::EmbedScale, Real(1.0)),
            ("attention_multiplier", S::Scale, Real(1.0)),
            ("residual_multiplier", S::OutputScale, Real(1.0)),
            ("logits_scaling", S::LogitDivisor, Real(1.0)),
            ("mamba_n_heads", S::MixerHeads, Whole(128)),
            ("mamba_d_head", S::MixerSize, Nothing),
            ("mamba_n_groups", S::MixerGroups, Whole(1)),
            ("mamba_d_state", S::MixerState, Whole(256)),
            ("mamba_d_conv", S::MixerWidth, Whole(4)),
            ("mamba_expand", S::MixerExpand, Whole(2)),
        ]],
        off: &["attention_bias", "mamba_proj_bias"],
        on: &["mamba_conv_bias"],
        harmless: &["init_method", "mamba_chunk_size"],
        words: &[("normalization_function", "rmsnorm")],
        mixer: Some((Mixer::Mamba2, Placed::Named)),
        rotation: Rotation::Typed(10000.0),
        sparse: Sparse::Counted,
        router: ("mixtral", 0.001),
        tensors: &[
            &ATTENTION,
            &MAMBA,
            &NORMS,
            &[
                (Role::Mlp, "gate", Source::Half("shared_mlp.input_linear", 0)),
                (Role::Mlp, "up", Source::Half("shared_mlp.input_linear", 1)),
                (Role::Mlp, "down", Source::One("shared_mlp.output_linear")),
                (Role::Experts, "router", Source::One("block_sparse_moe.router.layer")),
                (Role::Experts, "gate", Source::HalfEach("block_sparse_moe.input_linear", 0)),
                (Role::Experts, "up", Source::HalfEach("block_sparse_moe.input_linear", 1)),
                (Role::Experts, "down", Source::One("block_sparse_moe.output_linear")),
                (Role::Experts, "shared.gate", Source::Half("shared_mlp.input_linear", 0)),
                (Role::Experts, "shared.up", Source::Half("shared_mlp.input_linear", 1)),
                (Role::Experts, "shared.down", Source::One("shared_mlp.output_linear")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "qwen3_next",
        class: "Qwen3NextForCausalLM",
        title: "Qwen3-Next",
        fields: &[
            &Usual {
                context: 32768,
                kv_heads: Whole(2),
                head_size: Whole(256),
                intermediate: Whole(5632),
                ..USUAL
            }
            .fields(),
            &[
                ("moe_intermediate_size", S::ExpertIntermediate, Whole(512)),
                ("shared_expert_intermediate_size", S::Shared, Whole(512)),
                ("num_experts", S::Experts, Whole(512)),
                ("num_experts_per_tok", S::Active, Whole(10)),
                ("norm_topk_prob", S::Normalise, Flag(true)),
                ("linear_num_value_heads", S::MixerHeads, Whole(32)),
                ("linear_num_key_heads", S::MixerGroups, Whole(16)),
                ("linear_value_head_dim", S::MixerSize, Whole(128)),
                ("linear_key_head_dim", S::MixerState, Whole(128)),
                ("linear_conv_kernel_dim", S::MixerWidth, Whole(4)),
            ],
        ],
        // Biases of a query's gate have no place here.
        off: &["attention_bias", "mlp_bias"],
        unit_offset: true,
        gated: true,
        shared_gate: true,
        mixer: Some((Mixer::GatedDelta, Placed::Types)),
        share: 0.25,
        qk_norm: "rms",
        sparse: Sparse::Listed,
        router: ("olmoe", 0.001),
        unread: &["mtp."],
        tensors: &[
            &GATED_DELTA,
            &NORMS,
            &MLP,
            &QK_NORMS,
            &EXPERTS,
            &SHARED_GATED,
            &[
                (
                    Role::Attention,
                    "qkv.weight",
                    Source::GatedHeads([
                        "self_attn.q_proj.weight",
                        "self_attn.k_proj.weight",
                        "self_attn.v_proj.weight",
                    ]),
                ),
                (Role::Attention, "gate.weight", Source::Gates("self_attn.q_proj.weight")),
                ATTENTION[1],
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "nemotron_h",
        class: "NemotronHForCausalLM",
        title: "Nemotron-H",
        fields: &[&[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(4096)),
            ("num_hidden_layers", S::Layers, Nothing),
            ("num_attention_heads", S::Heads, Whole(32)),
            ("num_key_value_heads", S::KvHeads, Whole(8)),
            ("head_dim", S::HeadSize, Whole(128)),
            ("intermediate_size", S::Intermediate, Whole(21504)),
            ("layer_norm_epsilon", S::Eps, Real(1e-5)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("mamba_num_heads", S::MixerHeads, Whole(128)),
            ("mamba_head_dim", S::MixerSize, Whole(64)),
            ("n_groups", S::MixerGroups, Whole(8)),
            ("ssm_state_size", S::MixerState, Whole(128)),
            ("conv_kernel", S::MixerWidth, Whole(4)),
            ("n_routed_experts", S::Experts, Whole(8)),
            ("num_experts_per_tok", S::Active, Whole(2)),
            ("moe_intermediate_size", S::ExpertIntermediate, Whole(7688)),
            ("moe_shared_expert_intermediate_size", S::Shared, Whole(7688)),
            ("n_group", S::Groups, Whole(1)),
            ("topk_group", S::ActiveGroups, Whole(1)),
            ("norm_topk_prob", S::Normalise, Flag(true)),
            ("routed_scaling_factor", S::GateScale, Real(1.0)),
        ]],
        off: &[
            "attention_bias",
            "mamba_proj_bias",
            "mlp_bias",
            "moe_latent_size",
            "num_nextn_predict_layers",
            "sliding_window",
            "use_bias",
        ],
        on: &["use_conv_bias"],
        aliases: &[("head_dim", "attention_head_dim")],
        // How its kernels and its training go, and sizes that its class does not read.
        harmless: &[
            "chunk_size",
            "expand",
            "hidden_dropout",
            "layer_types",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "n_shared_experts",
            "norm_eps",
            "num_logits_to_keep",
            "output_router_logits",
            "partial_rotary_factor",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rms_norm_eps",
            "rope_scaling",
            "rope_theta",
            "time_step_floor",
            "time_step_max",
            "use_mamba_kernels",
        ],
        activation: ("mlp_hidden_act", &[("relu2", "relu2")]),
        words: &[("mamba_hidden_act", "silu")],
        mixer: Some((Mixer::Mamba2, Placed::Single)),
        rotation: Rotation::Still,
        router: ("deepseek_v3", 0.0),
        ends: ["backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight", "backbone.layers"],
        unread: &["mtp."],
        tensors: &[
            &mamba!("mixer", "norm"),
            &[
                (Role::Attention, "norm", Source::One("norm")),
                (Role::Attention, "qkv", Source::Heads(["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"])),
                (Role::Attention, "out", Source::One("mixer.o_proj")),
                (Role::Mlp, "norm", Source::One("norm")),
                (Role::Mlp, "up", Source::One("mixer.up_proj")),
                (Role::Mlp, "down", Source::One("mixer.down_proj")),
                (Role::Experts, "norm", Source::One("norm")),
                (Role::Experts, "router", Source::One("mixer.gate")),
                (Role::Experts, "router.bias", Source::One("mixer.gate.e_score_correction_bias")),
                (Role::Experts, "up", Source::Each("mixer.experts.{e}.up_proj")),
                (Role::Experts, "down", Source::Each("mixer.experts.{e}.down_proj")),
                (Role::Experts, "shared.up", Source::One("mixer.shared_experts.up_proj")),
                (Role::Experts, "shared.down", Source::One("mixer.shared_experts.down_proj")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "kimi_linear",
        class: "KimiLinearForCausalLM",
        title: "Kimi Linear",
        fields: &[&[
            ("vocab_size", S::Vocab, Whole(163_840)),
            ("hidden_size", S::Hidden, Whole(2304)),
            ("model_max_length", S::Context, Whole(1_048_576)),
            ("num_hidden_layers", S::Layers, Whole(27)),
            ("num_attention_heads", S::Heads, Whole(32)),
            ("num_key_value_heads", S::KvHeads, Whole(32)),
            ("q_lora_rank", S::QueryRank, Nothing),
            ("kv_lora_rank", S::KvRank, Whole(512)),
            ("qk_rope_head_dim", S::Turned, Whole(64)),
            ("qk_nope_head_dim", S::Still, Whole(128)),
            ("v_head_dim", S::Value, Whole(128)),
            ("intermediate_size", S::Intermediate, Whole(9216)),
            ("moe_intermediate_size", S::ExpertIntermediate, Whole(1024)),
            ("num_experts", S::Experts, Whole(256)),
            ("num_shared_experts", S::SharedCount, Whole(1)),
            ("num_experts_per_token", S::Active, Whole(8)),
            ("num_expert_group", S::Groups, Whole(1)),
            ("topk_group", S::ActiveGroups, Whole(1)),
            ("first_k_dense_replace", S::Dense, Whole(1)),
            ("moe_renormalize", S::Normalise, Flag(true)),
            ("routed_scaling_factor", S::GateScale, Real(2.446)),
            ("rms_norm_eps", S::Eps, Real(1e-5)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("linear_num_heads", S::MixerHeads, Whole(32)),
            ("linear_head_dim", S::MixerSize, Whole(128)),
            ("linear_conv_kernel_dim", S::MixerWidth, Whole(4)),
        ]],
        off: &["attention_bias", "num_nextn_predict_layers"],
        on: &["mla_use_nope"],
        aliases: &[
            ("model_max_length", "max_position_embeddings"),
            ("moe_renormalize", "norm_topk_prob"),
            ("num_expert_group", "n_group"),
            ("num_experts", "num_local_experts"),
            ("num_experts_per_token", "num_experts_per_tok"),
            ("num_shared_experts", "n_shared_experts"),
        ],
        // Sizes that follow from others, and rotations, which its class lacks.
        harmless: &["head_dim", "qk_head_dim", "rope_scaling", "rope_theta", "use_grouped_topk"],
        words: &[("moe_router_activation_func", "sigmoid")],
        latent: true,
        mixer: Some((Mixer::Kda, Placed::Config)),
        rotation: Rotation::Still,
        sparse: Sparse::Later,
        router: ("deepseek_v3", 0.0),
        fixed: &[("moe_layer_freq", 1.0)],
        // Version 5 gives its dense networks the name of its experts.
        renamed: &[
            (".block_sparse_moe.gate_proj.", ".mlp.gate_proj."),
            (".block_sparse_moe.up_proj.", ".mlp.up_proj."),
            (".block_sparse_moe.down_proj.", ".mlp.down_proj."),
        ],
        tensors: &[
            &KDA,
            &LATENT_ATTENTION,
            &NORMS,
            &MLP,
            &[
                (Role::Attention, "q_up", Source::Either("self_attn.q_b_proj", "self_attn.q_proj")),
                (Role::Attention, "kv_down", Source::One("self_attn.kv_a_proj_with_mqa")),
                (Role::Experts, "router", Source::One("block_sparse_moe.gate")),
                (Role::Experts, "router.bias", Source::One("block_sparse_moe.gate.e_score_correction_bias")),
                (Role::Experts, "gate", Source::Each("block_sparse_moe.experts.{e}.w1")),
                (Role::Experts, "up", Source::Each("block_sparse_moe.experts.{e}.w3")),
                (Role::Experts, "down", Source::Each("block_sparse_moe.experts.{e}.w2")),
                (Role::Experts, "shared.gate", Source::One("block_sparse_moe.shared_experts.gate_proj")),
                (Role::Experts, "shared.up", Source::One("block_sparse_moe.shared_experts.up_proj")),
                (Role::Experts, "shared.down", Source::One("block_sparse_moe.shared_experts.down_proj")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "ouro",
        class: "OuroForCausalLM",
        title: "Ouro",
        fields: &[&Usual { context: 32768, ..USUAL }.fields(), &[("total_ut_steps", S::Passes, Whole(4))]],
        off: &["attention_bias", "early_exit_step"],
        // How much of a text its class reads at once.
        harmless: &["chunk_size"],
        form: Form::Looped,
        norms: Norms::Around,
        windows: Windows::From(4096),
        // A lower one leaves the loop early.
        fixed: &[("early_exit_threshold", 1.0)],
        beside: &[
            ("body.0.norm.weight", "model.norm.weight", false),
            ("loops.0.exit.weight", "model.early_exit_gate.weight", true),
            ("loops.0.exit.bias", "model.early_exit_gate.bias", false),
        ],
        tensors: &[
            &ATTENTION,
            &MLP,
            &[
                (Role::Attention, "norm", Source::One("input_layernorm")),
                (Role::Attention, "post_norm", Source::One("input_layernorm_2")),
                (Role::Mlp, "norm", Source::One("post_attention_layernorm")),
                (Role::Mlp, "post_norm", Source::One("post_attention_layernorm_2")),
            ],
        ],
        ..PLAIN
    },
    Family {
        kind: "huginn_raven",
        class: "RavenForCausalLM",
        title: "Huginn",
        fields: &[&[
            ("padded_vocab_size", S::Vocab, Required),
            ("n_embd", S::Hidden, Required),
            ("block_size", S::Context, Whole(4096)),
            ("n_layers", S::Layers, Required),
            ("n_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Heads),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("norm_eps", S::Eps, Real(1e-6)),
            ("tie_embeddings", S::Tie, Flag(true)),
            ("n_layers_in_prelude", S::Prelude, Whole(2)),
            ("n_layers_in_recurrent_block", S::Core, Whole(4)),
            ("n_layers_in_coda", S::Coda, Whole(2)),
            ("mean_recurrence", S::Passes, Whole(32)),
            ("mean_backprop_depth", S::Backprop, Whole(8)),
            ("qk_bias", S::Bias, Flag(true)),
        ]],
        off: &["bias"],
        // How it was trained, and sizes that follow from others.
        harmless: &[
            "activation_checkpoint_impl",
            "effective_expected_depth",
            "hidden_size",
            "init_orthogonal",
            "init_strategy",
            "mcleish_throttle",
            "num_attention_heads",
            "num_hidden_layers",
            "padding_multiple",
            "sampling_scheme",
            "test_time_noise_type",
            "tie_word_embeddings",
            "vocab_size",
        ],
        activation: ("nonlin_name", &[("SiLU", "swiglu")]),
        form: Form::Recurrent,
        bias: "qk",
        rotation: Rotation::Base(50_000.0),
        words: &[
            ("architecture_class_name", "RecurrentGPT"),
            ("block_class_name", "SandwichBlock"),
            ("injection_type", "linear"),
            ("mlp_class_name", "GatedMLP"),
            ("norm_class_name", "RMSNorm_llama"),
            ("state_init", "like-init"),
        ],
        ends: ["transformer.wte.weight", "lm_head.weight", "transformer.ln_f.weight", "transformer"],
        computed: &["freqs_cis"],
        // One gain, used twice.
        beside: &[("body.2.mix.weight", "transformer.adapter.weight", false)],
        tensors: &[&[
            (Role::Attention, "norm", Source::One("norm_1")),
            (Role::Attention, "qkv.weight", Source::Pairs("attn.Wqkv.weight")),
            (Role::Attention, "q.bias", Source::PairsOf("attn.qk_bias", 0)),
            (Role::Attention, "k.bias", Source::PairsOf("attn.qk_bias", 1)),
            (Role::Attention, "out", Source::One("attn.proj")),
            (Role::Layer, "norm0", Source::One("norm_2")),
            (Role::Mlp, "norm", Source::One("norm_3")),
            (Role::Mlp, "gate", Source::Half("mlp.fc", 0)),
            (Role::Mlp, "up", Source::Half("mlp.fc", 1)),
            (Role::Mlp, "down", Source::One("mlp.proj")),
            (Role::Layer, "norm1", Source::One("norm_4")),
        ]],
        ..PLAIN
    },
    Family {
        kind: "deepseek_v2",
        class: "DeepseekV2ForCausalLM",
        title: "DeepSeek V2",
        fields: &[
            &USUAL.latent(),
            &[
                ("first_k_dense_replace", S::Dense, Whole(0)),
                ("norm_topk_prob", S::Normalise, Flag(false)),
                ("routed_scaling_factor", S::GateScale, Real(1.0)),
            ],
        ],
        // The class does not read the last, and divides no gate.
        off: &["attention_bias", "mlp_bias", "norm_topk_prob"],
        // Fields of groups are read with groups alone, which are refused.
        harmless: &[
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "n_group",
            "qk_head_dim",
            "seq_aux",
            "topk_group",
        ],
        router: ("olmoe", 0.0),
        words: &[("scoring_func", "softmax"), ("topk_method", "greedy")],
        ..DEEPSEEK
    },
    Family {
        kind: "deepseek_v3",
        class: "DeepseekV3ForCausalLM",
        title: "DeepSeek V3",
        fields: &[
            &Usual { context: 4096, ..USUAL }.latent(),
            &[
                ("n_group", S::Groups, Whole(8)),
                ("topk_group", S::ActiveGroups, Whole(4)),
                ("first_k_dense_replace", S::Dense, Whole(3)),
                ("norm_topk_prob", S::Normalise, Flag(true)),
                ("routed_scaling_factor", S::GateScale, Real(2.5)),
            ],
        ],
        off: &["attention_bias"],
        // The layers of the last two predict tokens further on, and are refused where there are
        // any.
        harmless: &[
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "qk_head_dim",
            "seq_aux",
            "num_mtp_layers",
            "num_nextn_predict_layers",
        ],
        router: ("deepseek_v3", 0.0),
        words: &[("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")],
        ..DEEPSEEK
    },
];

const WITHOUT_CLASS: &str = "its attention chooses keys by an index, which the language lacks";

/// Kinds of models that are known and not read, and why.
pub static UNREAD: [(&str, &str); 2] = [
    ("deepseek_v32", WITHOUT_CLASS),
    ("kimi_k2", "its class is DeepSeek V3's under another name; write `model_type: deepseek_v3`"),
];
