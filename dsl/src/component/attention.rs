//! Attention over the tokens of a sequence, or over the earlier depths of a token.

use serde::Serialize;

use super::*;
use crate::ast;
use crate::keys::{self, BALANCE_SHORT, COUNT, POSITIVE, QUERY_SHORT, ROUTER};
use crate::show::{self, or_none, rope, router, word};

/// Sequence or depth attention.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attention {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Head size `d`; even where there is RoPE.
    pub head_size: u64,
    /// Rotary positions (tokens for sequence attention, applications for depth attention).
    pub rope: Option<Rope>,
    /// Normalisation of queries and keys.
    pub qk_norm: QkNorm,
    /// Query `i` sees keys `j` with `0 <= i - j < window`.
    pub window: Option<u64>,
    /// `c·tanh(s/c)` on the scores, before the mask.
    pub softcap: Option<f64>,
    /// Factor on `q·k`; `1/sqrt(head_size)` where absent.
    pub scale: Option<f64>,
    /// Whether each head has a learned logit in the denominator of its softmax; sequence attention
    /// only.
    pub sink: bool,
    /// The component whose latest keys and values it reads, having none of its own; sequence
    /// attention only.
    pub kv_from: Option<String>,
    /// How queries, keys and values come of short vectors; sequence attention only.
    pub latent: Option<Latent>,
    /// Whether values are mixed with those of the component's first application; sequence attention
    /// only.
    pub value_residual: bool,
    /// Whether keys of the component's earlier applications for the same token are in the softmax.
    pub depth_keys: bool,
    /// Keys that it leaves in the model's depth stream, where its softmax is also over those of its
    /// token; sequence attention only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth_stream: Option<DepthStream>,
    /// Factor `sigmoid(W_g x)` on what heads give, before the output projection.
    pub gate: Option<HeadGate>,
    /// Projections that add a learned vector.
    pub bias: Option<Bias>,
    /// Whether it reads the stream through a norm of its own.
    pub pre_norm: bool,
    /// Whether the branch output has a norm of its own (Gemma 2).
    pub post_norm: bool,
    /// The mixture of projections in recurrent layers (section 5); `None` reuses one projection at
    /// every depth.
    pub projection: Option<Projection>,
}

/// Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1), and what attention over
/// heads becomes as it (MHA2MLA, 2502.14837, section 3).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latent {
    /// Size of the vector that queries are made of; the stream where absent.
    pub query: Option<u64>,
    /// Size of the vector that keys and values are made of.
    pub kv: u64,
    /// Elements of a head that turn, its last ones.
    pub turned: u64,
    /// Size of a head's value, at most that of a head.
    pub value: u64,
    /// Whether these vectors are RMS-normalised.
    pub norm: bool,
    /// Added to their mean squares; that of the model's norms where absent.
    pub eps: Option<f64>,
    /// Heads of the part of keys that turns, each for as many query heads; divides `heads`.
    pub keys: u64,
    /// The pairs of a whole head's rotation that turn, ascending: for each of `keys`, or one list
    /// for all; none where the elements that turn have a rotation of their own.
    pub pairs: Vec<Vec<u64>>,
}

impl Latent {
    /// The pairs that turn in keys of that head; none where they have a rotation of their own.
    pub fn pairs_of(&self, key: u64) -> Option<&[u64]> {
        let own = if self.pairs.len() == 1 { 0 } else { key as usize };
        self.pairs.get(own).map(Vec::as_slice)
    }
}

/// The longest head of whose rotation pairs are chosen.
pub const LONGEST_CHOSEN: u64 = 256;

/// Keys and values that an attention leaves in the depth stream of its model, before any norm and
/// rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DepthStream {
    /// Those of the sequence.
    Keys,
    /// Those of a matrix of their own.
    Own,
}

/// Elements of heads that have a gate each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadGate {
    /// All of a head have one.
    Head,
    /// Each has its own.
    Element,
}

/// Projections of an attention that add a learned vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    /// Queries and keys.
    Qk,
    /// Queries, keys and values.
    Qkv,
    /// The output.
    Out,
    /// All four.
    All,
}

impl Bias {
    /// Whether queries, keys and values have it.
    pub fn of_qkv(self) -> bool {
        matches!(self, Bias::Qkv | Bias::All)
    }

    /// Whether queries and keys have it, and values have none.
    pub fn of_qk(self) -> bool {
        self == Bias::Qk
    }

    /// Whether the output has it.
    pub fn of_out(self) -> bool {
        matches!(self, Bias::Out | Bias::All)
    }
}

/// Which vectors are RMS-normalised before the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Each head by itself, gain `[d]`.
    Rms,
    /// All heads as one vector (OLMoE), gain `[heads · d]`.
    RmsAll,
}

/// The mixture of linear experts that replaces each projection of a recurrent attention.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Projection {
    /// Routed experts; how often the layer is applied where absent.
    pub count: Option<u64>,
    /// Whether there is also a shared, always active expert.
    pub shared: bool,
    /// The router: top-1, no gate normalisation.
    pub router: Router,
}

const QK_NORM: &[(&str, &str)] = &[
    ("rms", "each head by itself"),
    ("rms_all", "all heads as one vector (OLMoE)"),
    ("none", "not normalised"),
];

const SCALE: Key = key(
    "scale",
    Type::Optional(&Type::Real(keys::Range::NonZero)),
    Rule("`1/sqrt(head_size)`"),
    "Factor on `q·k`.",
);
const SOFTCAP: Key =
    key("softcap", Type::Optional(&POSITIVE), NONE, "*c* in `c·tanh(s/c)` on the scores, before the mask.");
const QK: Key = key(
    "qk_norm",
    Type::Word(QK_NORM),
    Value("rms"),
    "Which vectors of queries and keys are RMS-normalised before the rotation.",
);
const HEADS: Key = key("heads", SIZE, Required, "Query heads.");
const KV_HEADS: Key = key("kv_heads", SIZE, Rule("`heads`"), "Key and value heads; divides `heads`.");
const HEAD_SIZE: Key =
    key("head_size", SIZE, Rule("`hidden / heads`"), "Size of a head; even where there is a rotation.");
const GATE: Key = key(
    "gate",
    Type::Optional(&Type::Word(&[
        ("head", "a number for each head"),
        ("element", "a number for each element of each head"),
    ])),
    NONE,
    "Outputs of heads are multiplied by `sigmoid(W_g x̂)` before the output projection.",
);
const BIAS: Key = key(
    "bias",
    Type::Optional(&Type::Word(&[
        ("qk", "of queries and keys (Huginn)"),
        ("qkv", "of queries, keys and values"),
        ("out", "of the output"),
        ("all", "of queries, keys, values and the output"),
    ])),
    NONE,
    "Which projections add a learned vector; one for all experts of *projection*.",
);
const PROJECTION_KEY: Key = key(
    "projection",
    Type::Optional(&PROJECTION_TYPE),
    Rule("a mixture with the defaults of *projection*"),
    "The mixture of linear experts that replaces each projection in recurrent layers; `none` reuses one projection at every depth. Layers outside `recur` do not use it.",
);

/// Attention over the tokens of the sequence.
pub static SEQUENCE: Section = Section {
    name: "sequence",
    doc: "Causal attention over the tokens of the sequence.",
    short: None,
    keys: &[
        HEADS,
        KV_HEADS,
        HEAD_SIZE,
        key(
            "rope",
            Type::Optional(&Type::Section(&keys::ROPE)),
            Value("10000"),
            "Rotary positions of the tokens.",
        ),
        QK,
        key(
            "window",
            Type::Optional(&SIZE),
            NONE,
            "A query sees itself and the `window - 1` tokens before it.",
        ),
        SOFTCAP,
        SCALE,
        key(
            "sink",
            Type::Bool,
            FALSE,
            "Whether each head has a learned logit in the denominator of its softmax (gpt-oss).",
        ),
        key(
            "kv_from",
            Type::Optional(&Type::Text),
            NONE,
            "Name of the `sequence` whose keys and values it reads, those of its latest application; it makes and caches none of its own (YOCO, Gemma 3n).",
        ),
        key(
            "latent",
            Type::Optional(&LATENT_TYPE),
            NONE,
            "Queries, keys and values are projected from short vectors, and all heads share the rotated part of the keys (multi-head latent attention, DeepSeek V2). Has no `kv_heads`, `gate`, `bias` or mixture of projections, and `qk_norm` is `none`.",
        ),
        key(
            "value_residual",
            Type::Bool,
            FALSE,
            "Whether values are `λ v + (1 - λ) v_0`, `v_0` those of the component's first application and `λ` learned, 0.5 at the start.",
        ),
        key(
            "depth_keys",
            Type::Bool,
            FALSE,
            "Whether its softmax is also over the keys that the component's earlier applications made of the same token (Mixture-of-Depths Attention). They keep their rotation, and no window leaves them out.",
        ),
        key(
            "depth_stream",
            Type::Optional(&Type::Word(&[
                ("keys", "its keys and values"),
                ("own", "keys and values of a matrix of their own"),
            ])),
            NONE,
            "Keys and values of its token that it leaves in the model's depth stream, before norm and rotation. Its softmax is also over the keys of its token that are there by then, of all components with a `depth_stream`; it norms them by its own gain, and no window leaves them out (hustvl/MoDA). All have as many key heads, of one size, and one `qk_norm`, `rms` or `none`.",
        ),
        GATE,
        BIAS,
        PRE_NORM,
        POST_NORM,
        PROJECTION_KEY,
    ],
};

/// Attention over the earlier depths of the same token.
pub static DEPTH: Section = Section {
    name: "depth",
    doc: "Attention over the earlier depths of the same token.",
    short: None,
    keys: &[
        HEADS,
        KV_HEADS,
        HEAD_SIZE,
        key(
            "rope",
            Type::Optional(&Type::Section(&keys::ROPE)),
            Value("500 half_reversed"),
            "Rotary positions of the layer applications.",
        ),
        QK,
        SOFTCAP,
        SCALE,
        GATE,
        BIAS,
        PRE_NORM,
        POST_NORM,
        PROJECTION_KEY,
    ],
};

static LATENT_TYPE: Type = Type::Section(&LATENT);

/// Multi-head latent attention.
pub static LATENT: Section = Section {
    name: "latent",
    doc: "Multi-head latent attention: `latent { query 1536  kv 512  turned 64  value 128 }`. Caches hold `kv` and `keys · turned` numbers of a token, for all heads: queries absorb the matrix that would make keys of them, and outputs the one of values. Where keys and values are no longer than these, or these are more than 864, caches hold keys and values of all heads.",
    short: None,
    keys: &[
        key(
            "query",
            Type::Optional(&SIZE),
            NONE,
            "Size of the vector that queries are made of; `none` makes them of the stream.",
        ),
        key("kv", SIZE, Required, "Size of the vector that keys and values are made of."),
        key(
            "turned",
            SIZE,
            Required,
            "Elements of a head that turn, its last ones; even, and at most `head_size`. Those of keys are made of the stream, `keys` times.",
        ),
        key("value", SIZE, Required, "Size of a head's value; at most `head_size`."),
        key(
            "norm",
            Type::Word(&[("rms", "RMS-normalised"), ("none", "as they are (MHA2MLA)")]),
            Value("rms"),
            "Whether the vectors of `query` and `kv` are normalised.",
        ),
        key(
            "keys",
            SIZE,
            Value("1"),
            "Heads of the part of keys that turns; divides `heads`. 1 is DeepSeek's, as many as a donor has key heads MHA2MLA's.",
        ),
        key(
            "pairs",
            Type::Either(&[
                Type::Word(&[
                    ("high", "the first, of the highest frequencies"),
                    ("low", "the last, of the lowest"),
                    ("uniform", "at even distances, from the first"),
                    ("none", "a rotation of `turned` elements of its own"),
                ]),
                Type::List(&Type::Either(&[COUNT, Type::List(&COUNT)])),
            ]),
            NONE,
            "Which `turned / 2` pairs of the rotation of a whole head turn, each at its frequency (partial RoPE, 2502.14837, section 3.1); `head_size` is at most 256. A list names them, \
             from 0 and ascending: `[0, 1, 4]`; lists in it are for each of `keys`.",
        ),
        key(
            "eps",
            Type::Optional(&POSITIVE),
            NONE,
            "Added to the mean squares of the normalised vectors; `none` for that of the model's `norm` (Kimi Linear has another).",
        ),
    ],
};

static PROJECTION_TYPE: Type = Type::Section(&PROJECTION);

/// Projection experts.
pub static PROJECTION: Section = Section {
    name: "projection",
    doc: "The mixture of linear experts that replaces the projections of a recurrent attention: top-1, one router for both projections.",
    short: None,
    keys: &[
        key("count", Type::Optional(&SIZE), Rule("how often the layer is applied"), "Routed experts."),
        key("shared", Type::Bool, Value("true"), "Whether there is a shared, always active expert as well."),
        QUERY_SHORT,
        BALANCE_SHORT,
        key(
            "router",
            Type::Section(&ROUTER),
            Rule("the preset `dreamer`, with `normalise` false and `balance` 1e-2"),
            "How an expert is chosen.",
        ),
    ],
};

impl Language for Attention {
    fn check(c: &mut Checker, group: &Group, kind: Kind, hidden: Option<u64>) -> Option<Self> {
        let depth = kind == Kind::Depth;
        let heads = c.int(group, "heads");
        let kv_heads = if c.has(group, "kv_heads") { c.int(group, "kv_heads") } else { heads };
        if let (Some(heads), Some(kv_heads)) = (heads, kv_heads)
            && heads % kv_heads != 0
        {
            let message = format!("{heads} heads cannot share {kv_heads} key and value heads");
            let help = format!("`kv_heads` divides `heads`: {}", divisors(heads));
            c.error_at("indivisible", &group.path("kv_heads"), message, help);
        }
        let head_size = match (c.has(group, "head_size"), hidden, heads) {
            (true, ..) => c.int(group, "head_size"),
            (false, Some(hidden), Some(heads)) if hidden % heads == 0 => Some(hidden / heads),
            (false, Some(hidden), Some(heads)) => {
                let message = format!("hidden {hidden} is not divisible by {heads} heads");
                c.error_at("indivisible", &group.path("heads"), message, "write `head_size`");
                None
            }
            _ => None,
        };
        let is_latent = c.has(group, "latent") && !c.is_none(group, "latent");
        let rope = c.rope(group, depth);
        if let (Some(Some(rope)), Some(size)) = (&rope, head_size)
            && !is_latent
            && !rope.turns_pairs(size)
        {
            let help = "a rotation turns pairs: make it even, or write `rope: none`";
            if rope.share == 1.0 {
                let message = format!("`head_size` is odd: {size}");
                c.error_at("odd-size", &group.path("head_size"), message, help);
            } else {
                c.odd_share(&group.path("rope"), rope, size);
            }
        }
        let qk_norm = match is_latent && !c.has(group, "qk_norm") {
            true => Some(QkNorm::None),
            false => c.word(group, "qk_norm").map(|word| match word {
                "rms" => QkNorm::Rms,
                "rms_all" => QkNorm::RmsAll,
                _ => QkNorm::None,
            }),
        };
        let window = if depth { Some(None) } else { c.int_or_none(group, "window") };
        let (softcap, scale) = (c.real_or_none(group, "softcap"), c.real_or_none(group, "scale"));
        let sink = if depth { Some(false) } else { c.bool(group, "sink") };
        let kv_from = if depth { Some(None) } else { c.text_or_none(group, "kv_from") };
        let value_residual = if depth { Some(false) } else { c.bool(group, "value_residual") };
        if let (Some(Some(source)), Some(true)) = (&kv_from, value_residual) {
            let message = format!("it has no values to mix: it reads those of `{source}`");
            let help = format!("write `value_residual` in `{source}`");
            c.error_at("unreached", &group.path("value_residual"), message, help);
        }
        let latent = match !depth && is_latent {
            true => latent(c, group, [heads, kv_heads, head_size], (qk_norm, rope.flatten())).map(Some),
            false => Some(None),
        };
        if let (Some(Some(latent)), Some(Some(rope))) = (&latent, &rope)
            && latent.turned.is_multiple_of(2)
            && latent.pairs.is_empty()
            && !rope.turns_pairs(latent.turned)
        {
            c.odd_share(&group.path("rope"), rope, latent.turned);
        }
        let depth_keys = if depth { Some(false) } else { c.bool(group, "depth_keys") };
        if depth_keys == Some(true) {
            if let Some(Some(source)) = &kv_from {
                let message = format!("it makes no keys to see again: it reads those of `{source}`");
                let help = format!("write `depth_keys` in `{source}`");
                c.error_at("unreached", &group.path("depth_keys"), message, help);
            }
            if let Some(Some(_)) = softcap {
                let message = "`depth_keys` and `softcap` are not computed in one softmax";
                c.error_at("unreached", &group.path("depth_keys"), message, "take one of them away");
            }
        }
        let depth_stream = match depth {
            true => Some(None),
            false => c.word_or_none(group, "depth_stream").map(|word| match word {
                Some("keys") => Some(DepthStream::Keys),
                Some(_) => Some(DepthStream::Own),
                None => None,
            }),
        };
        if let Some(Some(_)) = depth_stream {
            let mut refuse = |message: String, help: String| {
                c.error_at("unreached", &group.path("depth_stream"), message, help);
            };
            if let Some(Some(source)) = &kv_from {
                let message = format!("it makes no keys to leave: it reads those of `{source}`");
                refuse(message, format!("write `depth_stream` in `{source}`"));
            }
            let help = "take one of them away";
            if depth_keys == Some(true) {
                refuse(
                    "`depth_stream` holds keys of earlier applications, as `depth_keys` does".into(),
                    help.into(),
                );
            }
            if qk_norm == Some(QkNorm::RmsAll) {
                let message = "keys of the depth stream are normed head by head, not as one vector";
                refuse(message.into(), "write `qk_norm: rms` or `qk_norm: none`".into());
            }
            if let Some(Some(_)) = softcap {
                refuse("`depth_stream` and `softcap` are not computed in one softmax".into(), help.into());
            }
        }
        let gate = c.word_or_none(group, "gate").map(|word| match word {
            Some("head") => Some(HeadGate::Head),
            Some(_) => Some(HeadGate::Element),
            None => None,
        });
        let bias = c.word_or_none(group, "bias").map(|word| match word {
            Some("qk") => Some(Bias::Qk),
            Some("qkv") => Some(Bias::Qkv),
            Some("out") => Some(Bias::Out),
            Some(_) => Some(Bias::All),
            None => None,
        });
        let (pre_norm, post_norm) = (c.bool(group, "pre_norm"), c.bool(group, "post_norm"));
        let plain = matches!(latent, Some(Some(_))) && !c.has(group, "projection");
        let projection = match plain || c.is_none(group, "projection") {
            true => Some(None),
            false => projection(c, group).map(Some),
        };
        Some(Attention {
            heads: heads?,
            kv_heads: kv_heads?,
            head_size: head_size?,
            rope: rope?,
            qk_norm: qk_norm?,
            window: window?,
            softcap: softcap?,
            scale: scale?,
            sink: sink?,
            kv_from: kv_from?,
            latent: latent?,
            value_residual: value_residual?,
            depth_keys: depth_keys?,
            depth_stream: depth_stream?,
            gate: gate?,
            bias: bias?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
            projection: projection?,
        })
    }

    fn show(&self, keys: &mut Fields, recurrent: bool) {
        keys.put("heads", int(self.heads));
        keys.put("kv_heads", int(self.kv_heads));
        keys.put("head_size", int(self.head_size));
        keys.put("rope", or_none(self.rope, rope));
        keys.put("qk_norm", name(self.qk_norm));
        keys.put("window", or_none(self.window, int));
        keys.put("softcap", or_none(self.softcap, real));
        keys.put("scale", or_none(self.scale, real));
        keys.put("sink", ValueKind::Bool(self.sink));
        keys.put("kv_from", or_none(self.kv_from.as_deref(), word));
        keys.put("latent", or_none(self.latent.as_ref(), show_latent));
        keys.put("value_residual", ValueKind::Bool(self.value_residual));
        keys.put("depth_keys", ValueKind::Bool(self.depth_keys));
        keys.put("depth_stream", or_none(self.depth_stream, name));
        keys.put("gate", or_none(self.gate, name));
        keys.put("bias", or_none(self.bias, name));
        keys.put("pre_norm", ValueKind::Bool(self.pre_norm));
        keys.put("post_norm", ValueKind::Bool(self.post_norm));
        // Outside `recur` nothing reads it; written out, it would be warned about.
        if recurrent || self.projection != Some(Projection::default()) {
            keys.put("projection", or_none(self.projection.as_ref(), show_projection));
        }
    }
}

/// Latent attention of heads of this size.
fn latent(
    c: &mut Checker,
    owner: &Group,
    [heads, kv_heads, head_size]: [Option<u64>; 3],
    (qk_norm, rope): (Option<QkNorm>, Option<Rope>),
) -> Option<Latent> {
    let group = c.section(owner, "latent")?;
    let (query, kv) = (c.int_or_none(&group, "query"), c.int(&group, "kv"));
    let (turned, value) = (c.int(&group, "turned"), c.int(&group, "value"));
    let (eps, keys) = (c.real_or_none(&group, "eps"), c.int(&group, "keys"));
    let norm = c.word(&group, "norm").map(|word| word == "rms");
    let help = "take one of them away";
    for key in ["value_residual", "depth_keys"] {
        if c.has(owner, key) && c.bool(owner, key) == Some(true) {
            let message = format!("`{key}` is not computed with `latent`");
            c.error_at("unreached", &owner.path(key), message, help);
        }
    }
    for key in ["kv_from", "depth_stream", "gate", "bias", "projection"] {
        if c.has(owner, key) && !c.is_none(owner, key) {
            let message = format!("`{key}` is not computed with `latent`");
            c.error_at("unreached", &owner.path(key), message, help);
        }
    }
    if qk_norm.is_some_and(|norm| norm != QkNorm::None) {
        let message = "`latent` normalises the vectors that queries and keys are made of, and not these";
        c.error_at("unreached", &owner.path("qk_norm"), message, "take `qk_norm` away");
    }
    if heads != kv_heads {
        let message = "`latent` makes keys and values for every head";
        c.error_at("unreached", &owner.path("kv_heads"), message, "take `kv_heads` away");
    }
    let (turned, value, size) = (turned?, value?, head_size?);
    if turned % 2 == 1 || turned > size {
        let message = format!("{turned} elements of a head of {size} cannot turn");
        let help = format!("write an even number up to {size}");
        c.error_at("odd-size", &group.path("turned"), message, help);
    }
    if value > size {
        let message = format!("values of {value} are longer than heads of {size}");
        c.error_at("out-of-range", &group.path("value"), message, format!("write at most {size}"));
    }
    let (keys, heads) = (keys?, heads?);
    if heads % keys != 0 {
        let message = format!("{heads} heads cannot share {keys} turned parts of keys");
        let help = format!("`keys` divides `heads`: {}", divisors(heads));
        c.error_at("indivisible", &group.path("keys"), message, help);
    }
    let pairs = pairs(c, &group, rope, [size, turned, keys])?;
    Some(Latent { query: query?, kv: kv?, turned, value, norm: norm?, eps: eps?, keys, pairs })
}

/// The pairs of a whole head's rotation that turn.
fn pairs(
    c: &mut Checker,
    group: &Group,
    rope: Option<Rope>,
    [size, turned, keys]: [u64; 3],
) -> Option<Vec<Vec<u64>>> {
    let Some(value) = c.written(group, "pairs") else { return Some(vec![]) };
    let kind = Checker::kind(group, "pairs");
    let (all, chosen) = (rope.map_or(0, |rope| rope.turning(size) / 2), turned / 2);
    let word = if let ast::ValueKind::Word(word) = &value.kind { Some(word.as_str()) } else { None };
    if word == Some("none") {
        return Some(vec![]);
    }
    let at = group.path("pairs");
    if rope.is_none() {
        c.error_at("unreached", &at, "there is no rotation whose pairs to choose", "take `pairs` away");
        return None;
    }
    if size > LONGEST_CHOSEN {
        let message = format!("pairs are chosen of heads of up to {LONGEST_CHOSEN}, and these are of {size}");
        c.error_at("out-of-range", &at, message, "take `pairs` away");
        return None;
    }
    if chosen > all {
        let message = format!("{chosen} pairs of {all} cannot turn");
        c.error_at("out-of-range", &at, message, format!("write `turned: {}` or less", 2 * all));
        return None;
    }
    let lists = match (word, &value.kind) {
        (Some("high"), _) => vec![(0..chosen).collect()],
        (Some("low"), _) => vec![(all - chosen..all).collect()],
        (Some("uniform"), _) => vec![(0..chosen).map(|i| i * all / chosen.max(1)).collect()],
        (None, ast::ValueKind::List(_)) => {
            let elements = c.elements(group, "pairs")?;
            let nested = elements.iter().any(|(value, _)| matches!(value.kind, ast::ValueKind::List(_)));
            let mut lists: Vec<Vec<u64>> = vec![];
            for (value, path) in elements {
                match (&value.kind, nested) {
                    (ast::ValueKind::List(list), _) => {
                        let numbers = list.items.iter().map(|item| c.whole("pairs", &COUNT, 0, &item.node));
                        lists.push(numbers.collect::<Option<_>>()?);
                    }
                    (_, true) => {
                        let message = "one head has a list of pairs, and here is none";
                        c.error_at("wrong-type", &path, message, "write a list for each of `keys`");
                        return None;
                    }
                    (_, false) => {
                        let number = c.whole("pairs", &COUNT, 0, value)?;
                        match lists.last_mut() {
                            Some(list) => list.push(number),
                            None => lists.push(vec![number]),
                        }
                    }
                }
            }
            lists
        }
        _ => {
            c.wrong_type("pairs", &kind, value);
            return None;
        }
    };
    if lists.len() != 1 && lists.len() as u64 != keys {
        let message = format!("`pairs` has {} lists for {keys} heads of keys", lists.len());
        c.error_at("out-of-range", &at, message, "write one list, or one for each of `keys`");
        return None;
    }
    for list in &lists {
        if list.len() as u64 != chosen {
            let message = format!("`pairs` names {} pairs, and {turned} elements are {chosen}", list.len());
            c.error_at("out-of-range", &at, message, "write as many as half of `turned`");
            return None;
        }
        if !list.is_sorted_by(|a, b| a < b) || list.last().is_some_and(|last| *last >= all) {
            let message = format!("these are no {chosen} of {all} pairs in their order");
            let help = format!("write numbers from 0 to {}, each once, ascending", all.saturating_sub(1));
            c.error_at("out-of-range", &at, message, help);
            return None;
        }
    }
    let same = lists.iter().all(|list| *list == lists[0]);
    Some(if same { lists.into_iter().take(1).collect() } else { lists })
}

fn projection(c: &mut Checker, owner: &Group) -> Option<Projection> {
    if c.has(owner, "projection") {
        let group = c.section(owner, "projection")?;
        return projection_of(c, &group);
    }
    let group = c.section_or_default(owner, "projection", &PROJECTION);
    projection_of(c, &group)
}

fn projection_of(c: &mut Checker, group: &Group) -> Option<Projection> {
    let count = c.int_or_none(group, "count");
    let shared = c.bool(group, "shared");
    let router = c.router(group, true);
    Some(Projection { count: count?, shared: shared?, router: router? })
}

/// The divisors of a small number, for help.
fn divisors(number: u64) -> String {
    if number > 4096 {
        return "write a divisor".into();
    }
    let divisors: Vec<String> =
        (1..=number).filter(|d| number.is_multiple_of(*d)).map(|d| d.to_string()).collect();
    divisors.join(", ")
}

fn show_latent(latent: &Latent) -> ValueKind {
    let mut fields = Fields::inline();
    fields.put("query", or_none(latent.query, int));
    fields.put("kv", int(latent.kv));
    fields.put("turned", int(latent.turned));
    fields.put("value", int(latent.value));
    fields.put("norm", word(if latent.norm { "rms" } else { "none" }));
    fields.put("keys", int(latent.keys));
    let of = |list: &Vec<u64>| show::list(list.iter().map(|pair| int(*pair)));
    let pairs = match &latent.pairs[..] {
        [] => word("none"),
        [one] => of(one),
        several => show::list(several.iter().map(of)),
    };
    fields.put("pairs", pairs);
    fields.put("eps", or_none(latent.eps, real));
    fields.map()
}

fn show_projection(projection: &Projection) -> ValueKind {
    let mut fields = Fields::broken();
    fields.put("count", or_none(projection.count, int));
    fields.put("shared", ValueKind::Bool(projection.shared));
    fields.put("router", router(&projection.router));
    fields.map()
}

impl Described for Attention {
    fn norms(&self) -> (bool, bool) {
        (self.pre_norm, self.post_norm)
    }

    fn known(&self) -> Known<'_> {
        Known::Attention(self)
    }

    fn router(&self) -> Option<&Router> {
        self.projection.as_ref().map(|p| &p.router)
    }

    fn about(&self) -> Option<String> {
        let window = self.window.map(|window| format!("window of {window}"));
        let depth = self.depth_stream.map(|_| "keys of depth".to_string());
        let all: Vec<String> = window.into_iter().chain(depth).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    fn sizes(&mut self) -> Vec<(&str, Option<&mut u64>)> {
        let (count, query) = match &mut self.projection {
            Some(p) => (p.count.as_mut(), p.router.query()),
            None => (None, None),
        };
        let (turned, value) = match &mut self.latent {
            Some(latent) => (Some(&mut latent.turned), Some(&mut latent.value)),
            None => (None, None),
        };
        vec![
            ("heads", Some(&mut self.heads)),
            ("kv_heads", Some(&mut self.kv_heads)),
            ("head_size", Some(&mut self.head_size)),
            ("latent.turned", turned),
            ("latent.value", value),
            ("window", self.window.as_mut()),
            ("projection.count", count),
            ("projection.router.query", query),
        ]
    }

    fn owned(&self) -> Option<u64> {
        self.projection.as_ref()?.count
    }

    fn attends(&self, _: &Model) -> bool {
        true
    }

    fn sees_by_place(&self, _: &Model) -> bool {
        self.window.is_some()
    }

    fn reads_by_name(&self) -> bool {
        false
    }

    fn steps(&self, mixes: Mixes, hidden: u64) -> Option<Vec<(String, String)>> {
        let value = self.latent.as_ref().map_or(self.head_size, |latent| latent.value);
        let heads = |count, size| format!("n × {count} × {size}");
        let mut steps = vec![("queries".into(), heads(self.heads, self.head_size))];
        if let Some(latent) = &self.latent {
            steps.push(("latent of keys, values".into(), format!("n × {}", latent.kv)));
        }
        let keys = self.kv_from.as_ref().map_or("keys".into(), |of| format!("keys of {of}"));
        let over = match mixes {
            Mixes::Depths => "attention over depths of a token",
            Mixes::Tokens | Mixes::Features => "attention over tokens",
        };
        steps.extend([
            (keys, heads(self.kv_heads, self.head_size)),
            ("values".into(), heads(self.kv_heads, value)),
            (over.into(), heads(self.heads, value)),
            ("output".into(), format!("n × {hidden}")),
        ]);
        Some(steps)
    }

    fn formula(&self, mixes: Mixes) -> String {
        match mixes {
            Mixes::Depths => {
                "Attention along depth: a token's query reads keys and values of earlier layers of the \
                 same token (depth-recurrent attention mixtures)."
            }
            Mixes::Tokens | Mixes::Features => {
                "Attention along the sequence: softmax(q k^T) v of heads, over the tokens so far \
                 (Vaswani et al., 1706.03762)."
            }
        }
        .into()
    }

    fn unmix(&mut self) {
        self.projection = None;
    }

    fn matrices(&self, _: &Model) -> Vec<String> {
        let makes = match (&self.latent, &self.kv_from, &self.projection) {
            (Some(Latent { query: Some(_), .. }), ..) => &["q_down", "q_up", "kv_down", "kv_up"][..],
            (Some(Latent { query: None, .. }), ..) => &["q_up", "kv_down", "kv_up"],
            (None, Some(_), None) => &["q"],
            (None, None, None) => &["q", "k", "v"],
            // In a loop one matrix of each routed expert makes all three.
            (None, Some(_), Some(_)) => &["q", "qkv"],
            (None, None, Some(_)) => &["q", "k", "v", "qkv"],
        };
        let gate = self.gate.is_some().then_some("gate");
        makes.iter().copied().chain(["out"]).chain(gate).map(String::from).collect()
    }

    fn broken(&self, model: &Model) -> Option<String> {
        if let Some(first) = model.depth_reader().filter(|_| self.depth_stream.is_some())
            && (first.kv_heads, first.head_size) != (self.kv_heads, self.head_size)
        {
            let own = format!("{} kv_heads of {}", self.kv_heads, self.head_size);
            let (heads, size) = (first.kv_heads, first.head_size);
            return Some(format!("the depth stream has {heads} of {size}, and it has {own}"));
        }
        if !self.heads.is_multiple_of(self.kv_heads.max(1)) {
            Some(format!("{} heads are no multiple of {} kv_heads", self.heads, self.kv_heads))
        } else if let Some(latent) =
            self.latent.as_ref().filter(|l| !self.heads.is_multiple_of(l.keys.max(1)))
        {
            Some(format!("{} heads are no multiple of {} latent.keys", self.heads, latent.keys))
        } else if let (Some(rope), Some(latent)) = (self.rope, &self.latent)
            && let all = rope.turning(self.head_size) / 2
            && latent.pairs.iter().flatten().any(|pair| *pair >= all)
        {
            Some(format!("latent.pairs names one of {all} pairs that is not there"))
        } else if let (Some(rope), Some(latent)) = (self.rope, &self.latent)
            && latent.pairs.is_empty()
            && !rope.turns_pairs(latent.turned)
        {
            Some(format!("a rotation needs an even latent.turned, not {}", latent.turned))
        } else if self.latent.is_none() && self.rope.is_some_and(|rope| !rope.turns_pairs(self.head_size)) {
            Some(format!("a rotation needs an even head_size, not {}", self.head_size))
        } else {
            self.router().and_then(Router::broken)
        }
    }

    fn shrink(&mut self, to: &mut Small) {
        match &mut self.latent {
            // Heads that share a head of keys, and heads that do not.
            Some(l) if l.keys > 1 => {
                let group = (self.heads / l.keys).min(2);
                to.less("latent.keys", &mut l.keys, 2);
                to.less("kv_heads", &mut self.kv_heads, l.keys * group);
                to.less("heads", &mut self.heads, l.keys * group);
            }
            _ => {
                let group = (self.heads / self.kv_heads.max(1)).min(3);
                to.less("kv_heads", &mut self.kv_heads, 2);
                to.less("heads", &mut self.heads, self.kv_heads * group);
            }
        }
        if let Some(l) = &mut self.latent {
            // A part that turns, one that does not, and values that are shorter.
            if l.pairs.is_empty() {
                to.turned("latent.turned", &mut self.rope, &mut l.turned);
                to.less("head_size", &mut self.head_size, l.turned + 3);
            } else {
                to.less("latent.turned", &mut l.turned, 2);
                to.turned("head_size", &mut self.rope, &mut self.head_size);
                let all = self.rope.map_or(0, |rope| rope.turning(self.head_size) / 2);
                for list in &mut l.pairs {
                    list.truncate((l.turned / 2) as usize);
                    let last = all.saturating_sub(list.len() as u64);
                    list.iter_mut().zip(last..).for_each(|(pair, last)| *pair = (*pair).min(last));
                }
            }
            to.less("latent.keys", &mut l.keys, self.heads);
            if !self.heads.is_multiple_of(l.keys.max(1)) {
                l.keys = self.heads;
            }
            if l.pairs.len() as u64 != l.keys {
                l.pairs.truncate(1);
            }
            to.less("latent.value", &mut l.value, self.head_size.min(4));
            to.less("latent.kv", &mut l.kv, 5);
            if let Some(query) = &mut l.query {
                to.less("latent.query", query, 4);
            }
        } else {
            to.turned("head_size", &mut self.rope, &mut self.head_size);
        }
        if let Some(window) = &mut self.window {
            let shorter = *window < to.context;
            let most = if shorter { 3.min(to.sequence - 1).max(1) } else { to.sequence };
            to.less("window", window, most);
        }
        if let Some(p) = &mut self.projection {
            if let Some(count) = &mut p.count {
                to.less("projection.count", count, 4);
            }
            p.router.shrink("projection.query", to);
        }
    }

    fn settle(&mut self, _: u64) {
        if let Some(p) = &mut self.projection {
            p.count = Some(1);
            p.router.unbalance();
        }
    }

    fn widths(&mut self) -> Vec<(&'static str, &mut u64)> {
        let mut widths = vec![("heads", &mut self.heads), ("kv_heads", &mut self.kv_heads)];
        if let Some(latent) = &mut self.latent {
            widths.extend(latent.query.as_mut().map(|size| ("latent.query", size)));
            widths.push(("latent.kv", &mut latent.kv));
        }
        widths
    }
}
