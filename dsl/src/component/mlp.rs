//! One dense network, and the non-linearities that it shares with [`Experts`](super::Experts).

use serde::Serialize;

use super::*;

/// One dense network.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mlp {
    /// Intermediate size `I`.
    pub intermediate: u64,
    /// Non-linearity.
    pub activation: Activation,
    /// Whether what each matrix gives has a learned vector added.
    pub biased: bool,
    /// Whether it leaves keys and values in the depth stream of its model.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub depth_stream: bool,
    /// Whether it reads the stream through a norm of its own.
    pub pre_norm: bool,
    /// Whether the branch output has a norm of its own.
    pub post_norm: bool,
}

/// Non-linearity of a network. The gated ones have a `gate` matrix, the others only `up` and
/// `down`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate x) ⊙ up x`
    Swiglu,
    /// `gelu_tanh(gate x) ⊙ up x`
    Geglu,
    /// `gelu(gate x) ⊙ up x` by the error function, within 1.5e-7 of it.
    GegluErf,
    /// `g · sigmoid(1.702 g) ⊙ (u + 1)`, `g` at most 7 and `u` between -7 and 7.
    SwigluClamped,
    /// `relu(up x)`
    Relu,
    /// `gelu_tanh(up x)`
    Gelu,
    /// `relu(up x)²`
    Relu2,
}

impl Activation {
    /// Whether there is a `gate` matrix.
    pub fn gated(self) -> bool {
        match self {
            Activation::Swiglu | Activation::Geglu | Activation::GegluErf | Activation::SwigluClamped => true,
            Activation::Relu | Activation::Gelu | Activation::Relu2 => false,
        }
    }

    /// The names of the matrices of a network, each with `prefix` before it.
    pub(super) fn matrices(self, prefix: &str) -> impl Iterator<Item = String> {
        let names = if self.gated() { &["gate", "up", "down"][..] } else { &["up", "down"] };
        names.iter().map(move |name| format!("{prefix}{name}"))
    }

    /// The language's word.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Swiglu => "swiglu",
            Activation::Geglu => "geglu",
            Activation::GegluErf => "geglu_erf",
            Activation::SwigluClamped => "swiglu_clamped",
            Activation::Relu => "relu",
            Activation::Gelu => "gelu",
            Activation::Relu2 => "relu2",
        }
    }
}

const ACTIVATION: &[(&str, &str)] = &[
    ("swiglu", "`silu(gate x) ⊙ up x`"),
    ("geglu", "`gelu_tanh(gate x) ⊙ up x`"),
    (
        "geglu_erf",
        "`gelu(gate x) ⊙ up x` by the error function, within 1.5e-7 (Abramowitz and Stegun, 7.1.26)",
    ),
    (
        "swiglu_clamped",
        "`min(g, 7) · sigmoid(1.702 · min(g, 7)) ⊙ (clamp(u, -7, 7) + 1)`, `g = gate x`, `u = up x` (gpt-oss)",
    ),
    ("relu", "`relu(up x)`"),
    ("gelu", "`gelu_tanh(up x)`"),
    ("relu2", "`relu(up x)²`"),
];
pub(super) const ACTIVATION_KEY: Key =
    key("activation", Type::Word(ACTIVATION), Value("swiglu"), "Non-linearity.");

/// Whether a network leaves something in the depth stream.
pub(super) const DEPTH_STREAM: Key = key(
    "depth_stream",
    Type::Bool,
    FALSE,
    "Whether it leaves keys and values of its token in the model's depth stream, by a matrix of what it reads, for attentions with a `depth_stream` (hustvl/MoDA).",
);

/// One dense network.
pub static MLP: Section = Section {
    name: "mlp",
    doc: "One dense network.",
    short: None,
    keys: &[
        key("intermediate", SIZE, Required, "Intermediate size."),
        ACTIVATION_KEY,
        key("biased", Type::Bool, FALSE, "Whether the matrices add learned vectors."),
        DEPTH_STREAM,
        PRE_NORM,
        POST_NORM,
    ],
};

/// A few words for drawings.
pub(super) fn about(size: String, depth_stream: bool) -> String {
    if depth_stream { size + ", keys for depth" } else { size }
}

/// The non-linearity of a network.
pub(super) fn activation(c: &mut Checker, group: &Group) -> Option<Activation> {
    c.word(group, "activation").map(|word| match word {
        "geglu" => Activation::Geglu,
        "geglu_erf" => Activation::GegluErf,
        "swiglu_clamped" => Activation::SwigluClamped,
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "relu2" => Activation::Relu2,
        _ => Activation::Swiglu,
    })
}

impl Language for Mlp {
    fn check(c: &mut Checker, group: &Group, _: Kind, _: Option<u64>) -> Option<Self> {
        let intermediate = c.int(group, "intermediate");
        let activation = activation(c, group);
        let (biased, depth_stream) = (c.bool(group, "biased"), c.bool(group, "depth_stream"));
        let (pre_norm, post_norm) = (c.bool(group, "pre_norm"), c.bool(group, "post_norm"));
        Some(Mlp {
            intermediate: intermediate?,
            activation: activation?,
            biased: biased?,
            depth_stream: depth_stream?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
        })
    }

    fn show(&self, keys: &mut Fields, _: bool) {
        keys.put("intermediate", int(self.intermediate));
        keys.put("activation", name(self.activation));
        keys.put("biased", ValueKind::Bool(self.biased));
        keys.put("depth_stream", ValueKind::Bool(self.depth_stream));
        keys.put("pre_norm", ValueKind::Bool(self.pre_norm));
        keys.put("post_norm", ValueKind::Bool(self.post_norm));
    }
}

impl Described for Mlp {
    fn norms(&self) -> (bool, bool) {
        (self.pre_norm, self.post_norm)
    }

    fn known(&self) -> Known<'_> {
        Known::Mlp(self)
    }

    fn router(&self) -> Option<&Router> {
        None
    }

    fn about(&self) -> Option<String> {
        Some(about(format!("{} wide", self.intermediate), self.depth_stream))
    }

    fn sizes(&mut self) -> Vec<(&str, Option<&mut u64>)> {
        vec![("intermediate", Some(&mut self.intermediate))]
    }

    fn broken(&self, _: &Model) -> Option<String> {
        None
    }

    fn owned(&self) -> Option<u64> {
        None
    }

    fn attends(&self, _: &Model) -> bool {
        false
    }

    fn sees_by_place(&self, _: &Model) -> bool {
        false
    }

    fn reads_by_name(&self) -> bool {
        false
    }

    fn steps(&self, _: Mixes, hidden: u64) -> Option<Vec<(String, String)>> {
        Some(vec![
            ("up, activation".into(), format!("n × {}", self.intermediate)),
            ("down".into(), format!("n × {hidden}")),
        ])
    }

    fn formula(&self, _: Mixes) -> String {
        "A gated network: down(act(gate x) ⊙ up x) (Shazeer, 2002.05202).".into()
    }

    fn unmix(&mut self) {}

    fn matrices(&self, _: &Model) -> Vec<String> {
        self.activation.matrices("").collect()
    }

    fn shrink(&mut self, to: &mut Small) {
        to.less("intermediate", &mut self.intermediate, 7);
    }

    fn settle(&mut self, least: u64) {
        self.intermediate = self.intermediate.max(least);
    }

    fn widths(&mut self) -> Vec<(&'static str, &mut u64)> {
        vec![("intermediate", &mut self.intermediate)]
    }
}
