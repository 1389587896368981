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
    /// Whether projections of attentions have biases.
    Bias,
}

/// The kind of number a quantity is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, at least 1.
    Whole,
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
            Slot::Eps => Kind::Real,
            Slot::Softcap | Slot::LogitSoftcap => Kind::Cap,
            Slot::Scalar => Kind::Either,
            Slot::Tie | Slot::Normalise | Slot::Bias => Kind::Flag,
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
    /// By `layer_types`, else all but every so-manieth; the number is the window's default.
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
}

/// The part of a layer that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The attention.
    Attention,
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
    /// Queries, keys and values, the rows of one behind those of the other.
    Heads([&'static str; 3]),
    /// The upper (0) or lower (1) half of the rows of one.
    Half(&'static str, u64),
    /// One of each expert, whose number stands for `{e}`.
    Each(&'static str),
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
    /// Fields with a quantity each.
    pub fields: &'static [Field],
    /// Fields that must be absent, null or false.
    pub off: &'static [&'static str],
    /// Fields that this family alone has, and that change nothing.
    pub harmless: &'static [&'static str],
    /// Name of the field of the activation, its one value, and ours.
    pub activation: (&'static str, &'static str, &'static str),
    /// Gains are stored less one, and the embedding is scaled by the root of its size: Gemma.
    pub gemma: bool,
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
    /// Tensors of a layer.
    pub tensors: &'static [&'static [(Role, &'static str, Source)]],
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

/// The families. Where a specification could be of several, the first is taken.
pub static FAMILIES: [Family; 11] = [
    Family {
        kind: "gemma2",
        class: "Gemma2ForCausalLM",
        title: "Gemma 2",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(8192)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(4)),
            ("head_dim", S::HeadSize, Whole(256)),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(true)),
            ("attention_bias", S::Bias, Flag(false)),
            ("query_pre_attn_scalar", S::Scalar, Real(256.0)),
            ("attn_logit_softcapping", S::Softcap, Real(50.0)),
            ("final_logit_softcapping", S::LogitSoftcap, Real(30.0)),
        ],
        off: &["use_bidirectional_attention"],
        // Its first files had `hidden_act: gelu` only, and meant the tanh form.
        harmless: &["hidden_act"],
        activation: ("hidden_activation", "gelu_pytorch_tanh", "geglu"),
        gemma: true,
        qk_norm: "none",
        bias: "all",
        windows: Windows::But(2, 4096),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &GEMMA_NORMS, &MLP],
    },
    Family {
        kind: "gemma3_text",
        class: "Gemma3ForCausalLM",
        title: "Gemma 3 (text)",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(131_072)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(4)),
            ("head_dim", S::HeadSize, Whole(256)),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(true)),
            ("attention_bias", S::Bias, Flag(false)),
            ("query_pre_attn_scalar", S::Scalar, Real(256.0)),
            ("final_logit_softcapping", S::LogitSoftcap, Nothing),
        ],
        // The class reads the cap of scores and does not apply it.
        off: &["use_bidirectional_attention", "attn_logit_softcapping"],
        harmless: &[],
        activation: ("hidden_activation", "gelu_pytorch_tanh", "geglu"),
        gemma: true,
        qk_norm: "rms",
        bias: "all",
        windows: Windows::But(6, 4096),
        rotation: Rotation::Two(1e6, 1e4),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &GEMMA_NORMS, &MLP, &QK_NORMS],
    },
    Family {
        kind: "llama",
        class: "LlamaForCausalLM",
        title: "Llama",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(2048)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Heads),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("attention_bias", S::Bias, Flag(false)),
        ],
        off: &["mlp_bias"],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "all",
        windows: Windows::Never,
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &NORMS, &MLP],
    },
    Family {
        kind: "mistral",
        class: "MistralForCausalLM",
        title: "Mistral",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(131_072)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(8)),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
        ],
        off: &["attention_bias", "mlp_bias"],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "none",
        windows: Windows::All(Some(4096)),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &NORMS, &MLP],
    },
    Family {
        kind: "phi3",
        class: "Phi3ForCausalLM",
        title: "Phi 3",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(4096)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Heads),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-5)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
        ],
        off: &["attention_bias"],
        // The last is read with a scaling alone.
        harmless: &["embd_pdrop", "resid_pdrop", "original_max_position_embeddings"],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "none",
        windows: Windows::All(None),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&[
            NORMS[0],
            NORMS[1],
            ATTENTION[1],
            (Role::Attention, "qkv", Source::One("self_attn.qkv_proj")),
            (Role::Mlp, "gate", Source::Half("mlp.gate_up_proj", 0)),
            (Role::Mlp, "up", Source::Half("mlp.gate_up_proj", 1)),
            MLP[2],
        ]],
    },
    Family {
        kind: "qwen2",
        class: "Qwen2ForCausalLM",
        title: "Qwen 2",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(32768)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(32)),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
        ],
        off: &[],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "qkv",
        windows: Windows::From(4096),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &NORMS, &MLP],
    },
    Family {
        kind: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        title: "Qwen 2 MoE",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(32768)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(16)),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Whole(5632)),
            ("moe_intermediate_size", S::ExpertIntermediate, Whole(1408)),
            ("shared_expert_intermediate_size", S::Shared, Whole(5632)),
            ("num_experts", S::Experts, Required),
            ("num_experts_per_tok", S::Active, Whole(4)),
            ("norm_topk_prob", S::Normalise, Flag(false)),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("qkv_bias", S::Bias, Flag(true)),
        ],
        off: &[],
        // Read with a window alone, which is refused.
        harmless: &["max_window_layers"],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "qkv",
        windows: Windows::Unused,
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Listed,
        router: ("olmoe", 0.001),
        tensors: &[
            &ATTENTION,
            &NORMS,
            &MLP,
            &EXPERTS,
            &[
                (Role::Experts, "shared.gate", Source::One("mlp.shared_expert.gate_proj")),
                (Role::Experts, "shared.up", Source::One("mlp.shared_expert.up_proj")),
                (Role::Experts, "shared.down", Source::One("mlp.shared_expert.down_proj")),
                (Role::Experts, "shared_gate", Source::Row("mlp.shared_expert_gate")),
            ],
        ],
    },
    Family {
        kind: "qwen3",
        class: "Qwen3ForCausalLM",
        title: "Qwen 3",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(32768)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(32)),
            ("head_dim", S::HeadSize, Whole(128)),
            ("intermediate_size", S::Intermediate, Required),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("attention_bias", S::Bias, Flag(false)),
        ],
        off: &[],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "rms",
        bias: "all",
        windows: Windows::From(4096),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Never,
        router: ("", 0.0),
        tensors: &[&ATTENTION, &NORMS, &MLP, &QK_NORMS],
    },
    Family {
        kind: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        title: "Qwen 3 MoE",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(32768)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(4)),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Whole(6144)),
            ("moe_intermediate_size", S::ExpertIntermediate, Whole(768)),
            ("num_experts", S::Experts, Required),
            ("num_experts_per_tok", S::Active, Whole(8)),
            ("norm_topk_prob", S::Normalise, Flag(false)),
            ("rms_norm_eps", S::Eps, Real(1e-6)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("attention_bias", S::Bias, Flag(false)),
        ],
        off: &[],
        // `transformers` reads it of the dense models alone.
        harmless: &["max_window_layers"],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "rms",
        bias: "all",
        windows: Windows::AllUsed(4096),
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::Listed,
        router: ("olmoe", 0.001),
        tensors: &[&ATTENTION, &NORMS, &MLP, &QK_NORMS, &EXPERTS],
    },
    Family {
        kind: "olmoe",
        class: "OlmoeForCausalLM",
        title: "OLMoE",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(4096)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Heads),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("num_experts", S::Experts, Required),
            ("num_experts_per_tok", S::Active, Required),
            ("norm_topk_prob", S::Normalise, Flag(false)),
            ("rms_norm_eps", S::Eps, Real(1e-5)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
            ("attention_bias", S::Bias, Flag(false)),
        ],
        off: &["clip_qkv"],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "rms_all",
        bias: "all",
        windows: Windows::Never,
        rotation: Rotation::One(Some(10000.0)),
        sparse: Sparse::All,
        router: ("olmoe", 0.01),
        tensors: &[&ATTENTION, &NORMS, &QK_NORMS, &EXPERTS],
    },
    Family {
        kind: "mixtral",
        class: "MixtralForCausalLM",
        title: "Mixtral",
        fields: &[
            ("vocab_size", S::Vocab, Required),
            ("hidden_size", S::Hidden, Required),
            ("max_position_embeddings", S::Context, Whole(131_072)),
            ("num_hidden_layers", S::Layers, Required),
            ("num_attention_heads", S::Heads, Required),
            ("num_key_value_heads", S::KvHeads, Whole(8)),
            ("head_dim", S::HeadSize, HiddenByHeads),
            ("intermediate_size", S::Intermediate, Required),
            ("num_local_experts", S::Experts, Required),
            ("num_experts_per_tok", S::Active, Required),
            ("rms_norm_eps", S::Eps, Real(1e-5)),
            ("tie_word_embeddings", S::Tie, Flag(false)),
        ],
        off: &["attention_bias", "mlp_bias"],
        harmless: &[],
        activation: ("hidden_act", "silu", "swiglu"),
        gemma: false,
        qk_norm: "none",
        bias: "none",
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
    },
];

const POST_NORMS: &str = "its branches have norms behind them and none before, and components here read the stream through \
                          a norm of their own";
const LATENT: &str = "its attention is multi-head latent attention, which the language lacks";
const LOOPED: &str = "its layers are looped, and loops are not imported";

/// Kinds of models that are known and not read, and why.
pub static UNREAD: [(&str, &str); 9] = [
    ("olmo2", POST_NORMS),
    ("olmo3", POST_NORMS),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("deepseek_v32", LATENT),
    ("kimi_k2", LATENT),
    (
        "gpt_oss",
        "its router and its experts have biases, and the experts an activation that clamps and adds one \
         (`(up + 1) · gate · sigmoid(1.702 gate)`), which the language lacks",
    ),
    ("huginn_raven", LOOPED),
    ("ouro", LOOPED),
];
