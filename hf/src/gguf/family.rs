//! Families that llama.cpp has: their architectures, and the names of their tensors.
//!
//! *Promise*: one table for both ways. Where llama.cpp computes with a number that its files do not
//! say, the table has it, and a model with another number is refused.

use crate::config::{Config, Named};
use crate::family::{Role, Slot};
use crate::tensors::{Order, Part};

/// A family.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in `transformers`.
    pub kind: &'static str,
    /// `general.architecture`.
    pub name: &'static str,
    /// Whether pairs of a head that turn together are neighbours there.
    pub pairs: bool,
    /// Whether a head is written where it is the embedding.
    pub head: bool,
    /// Layers at multiples of this number, from 1, have no window, the others have one. `None`: no
    /// layer has one.
    pub windows: Option<usize>,
    /// Whether gates of chosen experts are divided by their sum, where a configuration says it.
    pub normalise: Option<bool>,
    /// The name of the norm before experts.
    pub before_experts: &'static str,
    /// Projections that may have biases.
    pub biases: bool,
    /// The number of layers of its size whose scores are divided by the root of another size.
    pub odd_scale: Option<u64>,
    /// Whether llama.cpp multiplies every matmul by the scale of its tensor, where a file has one.
    pub scales: bool,
}

const PLAIN: Family = Family {
    kind: "",
    name: "",
    pairs: false,
    head: false,
    windows: None,
    normalise: None,
    before_experts: "ffn_norm",
    biases: false,
    odd_scale: None,
    scales: false,
};

/// The families; an architecture is that of the first with its name whose experts fit.
pub static FAMILIES: [Family; 12] = [
    Family { kind: "llama", name: "llama", pairs: true, biases: true, scales: true, ..PLAIN },
    Family { kind: "mixtral", name: "llama", pairs: true, scales: true, ..PLAIN },
    Family { kind: "mistral", name: "llama", pairs: true, scales: true, ..PLAIN },
    Family { kind: "qwen2", name: "qwen2", biases: true, ..PLAIN },
    Family { kind: "qwen2_moe", name: "qwen2moe", head: true, normalise: Some(false), biases: true, ..PLAIN },
    Family { kind: "qwen3", name: "qwen3", scales: true, ..PLAIN },
    Family { kind: "qwen3_moe", name: "qwen3moe", normalise: Some(true), scales: true, ..PLAIN },
    Family { kind: "olmoe", name: "olmoe", head: true, normalise: Some(false), ..PLAIN },
    Family { kind: "olmo2", name: "olmo2", head: true, ..PLAIN },
    Family { kind: "gemma2", name: "gemma2", windows: Some(2), odd_scale: Some(46), ..PLAIN },
    Family { kind: "gemma3_text", name: "gemma3", windows: Some(6), odd_scale: Some(62), ..PLAIN },
    Family {
        kind: "gpt_oss",
        name: "gpt-oss",
        head: true,
        windows: Some(2),
        before_experts: "post_attention_norm",
        biases: true,
        ..PLAIN
    },
];

impl Family {
    /// That of a configuration.
    pub fn of(kind: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.kind == kind)
    }
}

/// The tensors of a layer that go by one name each: the role, our stem, theirs.
const STEMS: [(Role, &str, &str); 17] = [
    (Role::Attention, "norm", "attn_norm"),
    (Role::Attention, "post_norm", "post_attention_norm"),
    (Role::Attention, "out", "attn_output"),
    (Role::Attention, "q_norm", "attn_q_norm"),
    (Role::Attention, "k_norm", "attn_k_norm"),
    (Role::Mlp, "norm", "ffn_norm"),
    (Role::Mlp, "post_norm", "post_ffw_norm"),
    (Role::Mlp, "gate", "ffn_gate"),
    (Role::Mlp, "up", "ffn_up"),
    (Role::Mlp, "down", "ffn_down"),
    (Role::Experts, "router", "ffn_gate_inp"),
    (Role::Experts, "gate", "ffn_gate_exps"),
    (Role::Experts, "up", "ffn_up_exps"),
    (Role::Experts, "down", "ffn_down_exps"),
    (Role::Experts, "shared.gate", "ffn_gate_shexp"),
    (Role::Experts, "shared.up", "ffn_up_shexp"),
    (Role::Experts, "shared.down", "ffn_down_shexp"),
];

/// Tensors of a layer by their whole names.
const WHOLE: [(Role, &str, &str); 3] = [
    (Role::Attention, "sink", "attn_sinks.weight"),
    (Role::Experts, "router.logit_bias", "ffn_gate_inp.bias"),
    (Role::Experts, "shared_gate.weight", "ffn_gate_inp_shexp.weight"),
];

/// The name of the embedding there.
pub const EMBEDDING: &str = "token_embd.weight";
/// The name of the head there.
pub const HEAD: &str = "output.weight";
/// The divisors of frequencies, where they are scaled as in Llama 3.
pub const FREQUENCIES: &str = "rope_freqs.weight";

/// The parts of a tensor of ours, in order. A shape may be that of the bytes of packed rows.
pub fn parts(
    family: &Family,
    config: &Config,
    layers: &[Named],
    name: &str,
    shape: &[u64],
) -> Option<Vec<Part>> {
    let whole = |name: String| Some(vec![Part::whole(name, shape.to_vec())]);
    match name {
        "embed.weight" => return whole(EMBEDDING.into()),
        "head.weight" => return whole(HEAD.into()),
        "norm.weight" => return whole("output_norm.weight".into()),
        _ => {}
    }
    // `layers.{i}.{component}.{rest}`
    let mut words = name.splitn(4, '.');
    let ("layers", number, component, rest) = (words.next()?, words.next()?, words.next()?, words.next()?)
    else {
        return None;
    };
    let layer = layers.get(number.parse::<usize>().ok()?)?;
    let (_, role) = layer.parts.iter().find(|(name, _)| name == component)?;
    let theirs = |rest: String| format!("blk.{number}.{rest}");
    let known = |table: &[(Role, &'static str, &'static str)], ours: &str| {
        table.iter().find(|(of, stem, _)| of == role && *stem == ours).map(|(.., name)| *name)
    };
    if let Some(name) = known(&WHOLE, rest) {
        return whole(theirs(name.into()));
    }
    let (stem, kind) = rest.rsplit_once('.')?;
    if (*role, stem) == (Role::Attention, "qkv") {
        return heads(family, config, |which| theirs(format!("{which}.{kind}")), shape);
    }
    if (*role, stem) == (Role::Experts, "norm") {
        return whole(theirs(format!("{}.{kind}", family.before_experts)));
    }
    whole(theirs(format!("{}.{kind}", known(&STEMS, stem)?)))
}

/// Queries, keys and values, the rows of one after those of the other.
fn heads(
    family: &Family,
    config: &Config,
    name: impl Fn(&str) -> String,
    shape: &[u64],
) -> Option<Vec<Part>> {
    let (heads, kv, size) =
        (config.whole(Slot::Heads), config.whole(Slot::KvHeads), config.whole(Slot::HeadSize));
    let (&rows, wide) = shape.split_first()?;
    if rows != (heads + 2 * kv).checked_mul(size)? {
        return None;
    }
    let each: u64 = wide.iter().product();
    let part = |(which, heads, turns): (&str, u64, bool)| {
        let mut part = Part::whole(name(which), [&[heads * size], wide].concat());
        let sizes = vec![(2, each as i64), (size / 2, 2 * each as i64), (each, 1)];
        part.order = (family.pairs && turns).then_some(Order { blocks: heads, offset: 0, sizes });
        part
    };
    Some([("attn_q", heads, true), ("attn_k", kv, true), ("attn_v", kv, false)].map(part).into())
}
