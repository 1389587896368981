//! The keys of the language: one table that the front ends, the checker, the formatter, "did you
//! mean", the JSON Schema and the reference page all read. Those of components stand in the files
//! of [`component`](crate::component). A key that is not in a section does not exist.

pub use crate::component::COMPONENTS;

/// A group of keys.
#[derive(Debug)]
pub struct Section {
    /// Its name in diagnostics and in the reference.
    pub name: &'static str,
    /// Purpose of the section.
    pub doc: &'static str,
    /// The key that a plain value stands for: `rope 500` is `rope {base 500}`.
    pub short: Option<&'static str>,
    /// Its keys.
    pub keys: &'static [Key],
}

/// One key.
#[derive(Debug)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// Values that it takes.
    pub kind: Type,
    /// Value where the key is not written.
    pub default: Fallback,
    /// Meaning of the key.
    pub doc: &'static str,
    /// The section's `type` that alone has this key.
    pub of: Option<&'static str>,
}

impl Key {
    const fn of(self, one: &'static str) -> Key {
        Key { of: Some(one), ..self }
    }
}

/// Values that a key takes.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// A whole number, at least `min`, below 2^48.
    Int {
        /// The least.
        min: u64,
    },
    /// A finite number.
    Real(Range),
    /// `true` or `false`.
    Bool,
    /// One of these words, each with its meaning.
    Word(&'static [(&'static str, &'static str)]),
    /// Any text.
    Text,
    /// A path to a file, relative to the folder of this one.
    Path,
    /// A numeric field of a spec, such as `ea.count`.
    Field,
    /// The value, or `none`.
    Optional(&'static Type),
    /// The first of these that fits.
    Either(&'static [Type]),
    /// A group of keys.
    Section(&'static Section),
    /// A list.
    List(&'static Type),
    /// A map from names to values.
    Names(&'static Type),
    /// A component: one key, its kind, with the keys of that kind.
    Component,
    /// Layers: composition expressions, `repeat` and `recur`.
    Layers,
    /// One composition expression.
    Composition,
    /// A number, a word or a text.
    Any,
}

/// Numbers that a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Above 0.
    Positive,
    /// 0 or above.
    NonNegative,
    /// Above 0, at most 1.
    Share,
    /// From 0 up to, not including, 1.
    Fraction,
    /// Any but 0.
    NonZero,
    /// Any.
    Any,
}

impl Range {
    /// Whether the number is in it.
    pub fn holds(self, value: f64) -> bool {
        match self {
            Range::Positive => value > 0.0,
            Range::NonNegative => value >= 0.0,
            Range::Share => value > 0.0 && value <= 1.0,
            Range::Fraction => (0.0..1.0).contains(&value),
            Range::NonZero => value != 0.0,
            Range::Any => true,
        }
    }

    /// It in words.
    pub fn describe(self) -> &'static str {
        match self {
            Range::Positive => "above 0",
            Range::NonNegative => "0 or above",
            Range::Share => "above 0 and at most 1",
            Range::Fraction => "at least 0 and below 1",
            Range::NonZero => "not 0",
            Range::Any => "of any size",
        }
    }
}

/// Value of a key that is not written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fallback {
    /// It must be written.
    Required,
    /// Nothing.
    Absent,
    /// This value.
    Value(&'static str),
    /// The value as text.
    Rule(&'static str),
}

impl Section {
    /// The key of that name.
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().find(|key| key.name == name)
    }
}

impl Type {
    /// The group of keys a map in this place has.
    pub fn section(&self) -> Option<&'static Section> {
        match self {
            Type::Section(section) => Some(section),
            Type::Optional(inner) => inner.section(),
            Type::Either(types) => types.iter().find_map(Type::section),
            _ => None,
        }
    }

    /// The type of list elements in this place.
    pub fn element(&self) -> Option<&'static Type> {
        match self {
            Type::List(element) => Some(element),
            Type::Optional(inner) => inner.element(),
            Type::Either(types) => types.iter().find_map(Type::element),
            _ => None,
        }
    }

    /// Whether a scalar in this place is a number, so that arithmetic may be written.
    pub fn numeric(&self) -> bool {
        match self {
            Type::Int { .. } | Type::Real(_) | Type::Any => true,
            Type::Optional(inner) => inner.numeric(),
            Type::Either(types) => types.iter().any(Type::numeric),
            Type::Section(section) => {
                section.short.and_then(|short| section.key(short)).is_some_and(|k| k.kind.numeric())
            }
            Type::Names(inner) => inner.numeric(),
            _ => false,
        }
    }

    /// Whether a scalar in this place is text, whatever it looks like.
    pub fn textual(&self) -> bool {
        match self {
            Type::Text | Type::Path | Type::Field => true,
            Type::Optional(inner) => inner.textual(),
            Type::Either(types) => types.iter().any(Type::textual),
            Type::Section(section) => {
                section.short.and_then(|short| section.key(short)).is_some_and(|key| key.kind.textual())
            }
            _ => false,
        }
    }

    /// The type of the value of a key of a map in this place; `None` where there is no such key.
    pub fn child(&self, key: &str) -> Option<Type> {
        match self {
            Type::Names(inner) => Some(**inner),
            // A kind that the language has not may be a definition, whose settings are numbers.
            Type::Component => match COMPONENTS.iter().find(|kind| kind.name == key) {
                Some(kind) => Some(Type::Section(kind)),
                None => crate::ast::is_word(key).then_some(Type::Names(&Type::Real(Range::Any))),
            },
            Type::Layers => ITEMS.iter().find_map(|item| item.key(key)).map(|key| key.kind),
            Type::Optional(inner) => inner.child(key),
            Type::Either(types) => types.iter().find_map(|kind| kind.child(key)),
            Type::Section(section) => section.key(key).map(|key| key.kind),
            _ => None,
        }
    }

    /// It in words, for help and the reference.
    pub fn describe(&self) -> String {
        match self {
            Type::Int { min: 0 } => "whole number".into(),
            Type::Int { min } => format!("whole number, at least {min}"),
            Type::Real(range) => format!("number, {}", range.describe()),
            Type::Bool => "`true` or `false`".into(),
            Type::Word(words) => crate::suggest::listing(words.iter().map(|(word, _)| *word)),
            Type::Text => "text".into(),
            Type::Path => "path".into(),
            Type::Field => "numeric field, such as `ea.count`".into(),
            Type::Optional(inner) => format!("{}; or `none`", inner.describe()),
            Type::Either(types) => types.iter().map(Type::describe).collect::<Vec<_>>().join("; or "),
            Type::Section(section) => match section.short {
                None => format!("the keys of *{}*", section.name),
                Some(short) => format!("`{short}` alone, or the keys of *{}*", section.name),
            },
            Type::List(inner) => format!("list of: {}", inner.describe()),
            Type::Names(inner) => format!("names, each with a {}", inner.describe()),
            Type::Component => {
                let kinds = crate::suggest::listing(COMPONENTS.iter().map(|kind| kind.name));
                format!("{kinds} with its keys")
            }
            Type::Layers => "layers".into(),
            Type::Composition => "a composition, such as `(da | sa) > ea`".into(),
            Type::Any => "value".into(),
        }
    }
}

pub(crate) const fn key(name: &'static str, kind: Type, default: Fallback, doc: &'static str) -> Key {
    Key { name, kind, default, doc, of: None }
}

pub(crate) const SIZE: Type = Type::Int { min: 1 };
pub(crate) const COUNT: Type = Type::Int { min: 0 };
pub(crate) const POSITIVE: Type = Type::Real(Range::Positive);
const WEIGHT: Type = Type::Real(Range::NonNegative);
pub(crate) const FALSE: Fallback = Fallback::Value("false");
pub(crate) const NONE: Fallback = Fallback::Value("none");

use Fallback::{Absent, Required, Rule, Value};

/// A specification file.
pub static SPEC: Section = Section {
    name: "spec",
    doc: "A specification file.",
    short: None,
    keys: &[
        key(
            "let",
            Type::Names(&Type::Real(Range::Any)),
            Absent,
            "Names for numbers. Every number of the file may be arithmetic (`+ - * /`, parentheses) over the names defined before it.",
        ),
        key(
            "include",
            Type::Either(&[Type::Path, Type::List(&Type::Path)]),
            Absent,
            "Files whose definitions this one uses, relative to it and in its folder or below.",
        ),
        key(
            "define",
            Type::Names(&Type::Section(&DEFINITION)),
            Absent,
            "Components that are written as formulas, by name: their settings with defaults, and the formulas as text. In `.dream`: \
             `define name(heads 4, size 16) {…}` before `model`. See *Definitions*.",
        ),
        key(
            "base",
            Type::Path,
            Absent,
            "The specification that this file changes: the folder of a run or of an imported model, from whose weights training then begins, or a \
             specification. Keys that are missing here keep their values there: `model`, `train` and `eval` key by key, components by name, \
             everything else as a whole.",
        ),
        key(
            "weights",
            Type::Path,
            Rule("the `base`, where it is a folder"),
            "Run, checkpoint or imported model whose weights training begins from; tensors it lacks begin at random. Where some tensors are \
             not trained, checkpoints hold the others alone and are bound to it by hash.",
        ),
        key(
            "transplant",
            Type::Section(&TRANSPLANT),
            Absent,
            "How `dreamc transplant` makes the model's first weights from those of a model of another architecture.",
        ),
        key(
            "heal",
            Type::Section(&HEAL),
            Absent,
            "Training matches a teacher: its logits, its hidden states, its attention maps or the output of components.",
        ),
        key("model", Type::Section(&MODEL), Rule("the `base`'s; required without"), "The architecture."),
        key(
            "data",
            Type::Section(&DATA),
            Absent,
            "Where tokens come from. A spec that is only counted or compiled needs none.",
        ),
        key(
            "train",
            Type::Section(&TRAIN),
            Absent,
            "The training recipe. Defaults are those of the paper's Table 3.",
        ),
        key("eval", Type::Section(&EVAL), Absent, "Measurements of evaluations."),
        key("match", Type::Section(&MATCH), Absent, "Fields that `dreamc match` varies, and its baseline."),
    ],
};

/// Weights of a model of another architecture.
pub static TRANSPLANT: Section = Section {
    name: "transplant",
    doc: "Weights from a model of another architecture, the donor. Tensors that no entry of `map` names are proposed from names, roles and shapes; \
          `dreamc transplant --plan` shows all of it.",
    short: None,
    keys: &[
        key("from", Type::Path, Rule("`--from`"), "The donor: a run, a checkpoint or an imported model."),
        key(
            "depth",
            Type::Either(&[
                Type::Word(&[
                    (
                        "spread",
                        "the donor's layers at even distances: some are left out, or taken several times",
                    ),
                    (
                        "stack",
                        "the first half of the layers from the donor's first, the other from its last (depth up-scaling)",
                    ),
                    (
                        "zero",
                        "every layer of the donor, and copies between them that add nothing to the stream at first",
                    ),
                    (
                        "interpolate",
                        "the mean of the two nearest layers of the donor, weighted by their distance",
                    ),
                    ("average", "the mean of layers of the donor that stand together"),
                ]),
                Type::List(&Type::Either(&[COUNT, Type::List(&COUNT)])),
            ]),
            Rule("one by one; required where the depths differ"),
            "The donor's layer for each application of a layer, by its depth from 0; a list stands for their mean: `[0, 1, [2, 3], 4]`. Layers \
             that are applied several times take the mean of all of theirs.",
        ),
        key("map", Type::List(&Type::Section(&MOVE)), Absent, "Tensors that do not come as is proposed."),
    ],
};

/// A teacher.
pub static HEAL: Section = Section {
    name: "heal",
    doc: "A teacher whose values training matches. Its weights stay as they are, and in their format; it runs on the same rows as the model.",
    short: None,
    keys: &[
        key(
            "teacher",
            Type::Path,
            Rule("the donor of the `transplant`"),
            "The teacher: a run, a checkpoint or an imported model of the same vocabulary.",
        ),
        key(
            "cache",
            Type::Optional(&Type::Text),
            NONE,
            "Most that is kept of the teacher's values on disk, such as `2GB`, by the content of rows: rows that come again are then not computed again.",
        ),
        key("stages", Type::List(&Type::Section(&STAGE)), Required, "Stages of training, one after another."),
    ],
};

/// Some steps of training.
pub static STAGE: Section = Section {
    name: "stage",
    doc: "Some steps of training, and what of the teacher is matched in them. Steps after the last stage have no teacher.",
    short: None,
    keys: &[
        key(
            "match",
            Type::Either(&[Type::Text, Type::List(&Type::Text)]),
            Required,
            "`logits` by their divergence `KL(teacher, model)`, times the temperature's square; `layers`, the stream after every layer; or values by \
             their names, as `dreamc probe --list` has them, `*` for any word: `layers.*.sa.out`. Values are matched by the mean of the squares of their differences.",
        ),
        key(
            "from",
            Type::Either(&[Type::Text, Type::List(&Type::Text)]),
            Rule("the same names"),
            "Names of the teacher's values, as many; of patterns the values correspond in their order by depth.",
        ),
        key(
            "weight",
            Type::Either(&[Type::Real(Range::NonNegative), Type::List(&Type::Real(Range::NonNegative))]),
            Value("1"),
            "Weight of each in the loss.",
        ),
        key("temperature", POSITIVE, Value("1"), "Logits of both are divided by it."),
        key(
            "top",
            Type::Optional(&SIZE),
            NONE,
            "Likeliest tokens of the teacher that are kept; their probabilities then sum to one. All of them without.",
        ),
        key("loss", Type::Real(Range::NonNegative), Value("0"), "Weight of the data's own loss."),
        key(
            "steps",
            Type::Optional(&SIZE),
            NONE,
            "Steps of the stage; those that are left without, of the last.",
        ),
    ],
};

/// Where some tensors come from.
pub static MOVE: Section = Section {
    name: "move",
    doc: "Where some tensors come from. Of entries that name the same tensor the one of most words counts, then the one with fewest `*`; two that are \
          equal in both are an error, and so is one that names nothing.",
    short: None,
    keys: &[
        key(
            "to",
            Type::Text,
            Required,
            "Tensors of the model: a name, or the first words of names. `*` stands for any word: `layers.*.mlp`.",
        ),
        key(
            "from",
            Type::Either(&[Type::Text, Type::List(&Type::Text)]),
            Rule("the tensors of the same names; none with `how` `fresh` or `zero`"),
            "Tensors of the donor, of as many words; `*` stands for what it stood for in `to`, in order. Of several, the mean. \
             `q`, `k` and `v` in the place of `qkv` are the rows of one kind.",
        ),
        key(
            "how",
            Type::Word(&[
                ("copy", "number by number"),
                ("slice", "the first rows and columns"),
                (
                    "pad",
                    "the donor's numbers first, then those of the recipe; zeros in what writes the stream",
                ),
                ("group", "means of neighbouring key heads, or experts"),
                ("tile", "again and again: key heads of a group, or one network for every expert"),
                ("factor", "by singular values; what the factors of a pass take of themselves"),
                ("fresh", "by the recipe, as in a model that begins from nothing"),
                ("zero", "zeros"),
            ]),
            Rule("the one that the shapes allow, `pad` and `slice` apart"),
            "How numbers of the donor become those of the model.",
        ),
        key(
            "noise",
            Type::Real(Range::NonNegative),
            Value("0"),
            "Deviation of normal numbers that are added, as a share of the tensor's own.",
        ),
    ],
};

/// A component that is written as formulas.
pub static DEFINITION: Section = Section {
    name: "define",
    doc: "A component that is written as formulas.",
    short: None,
    keys: &[
        key(
            "settings",
            Type::Names(&Type::Optional(&Type::Real(Range::Any))),
            Absent,
            "Its sizes and numbers by name, each with a default, which may be arithmetic over those before it and `hidden`, or with none.",
        ),
        key("code", Type::Text, Required, "Its statements, see *Definitions*."),
    ],
};

/// The architecture.
pub static MODEL: Section = Section {
    name: "model",
    doc: "The architecture.",
    short: None,
    keys: &[
        key(
            "name",
            Type::Text,
            Value("model"),
            "Name of the model: letters, digits, `-`, `_`, `.`. In `.dream` it follows `model`.",
        ),
        key("vocab", SIZE, Required, "Vocabulary size *V*."),
        key("hidden", SIZE, Required, "Hidden size *h*."),
        key("context", SIZE, Required, "Longest sequence the model is built for."),
        key("tie", Type::Bool, FALSE, "Whether the head is the embedding matrix."),
        key(
            "head_bias",
            Type::Bool,
            FALSE,
            "Whether the head adds a learned vector to its logits, before their factor and their cap (GPT-J, Phi). Training then \
             keeps the logits of a batch in memory.",
        ),
        key(
            "embed_scale",
            Type::Optional(&Type::Either(&[
                Type::Word(&[("sqrt_hidden", "√h, rounded to the weights' dtype (Gemma 2)")]),
                Type::Real(Range::NonZero),
            ])),
            NONE,
            "Factor on the embedding.",
        ),
        key("logit_scale", Type::Optional(&POSITIVE), NONE, "Factor on logits, before their cap (Granite)."),
        key("logit_softcap", Type::Optional(&POSITIVE), NONE, "*c* in `c·tanh(logits/c)`."),
        key(
            "output_scale",
            Type::Optional(&POSITIVE),
            NONE,
            "Factor on the output of every component, after its norm, before it is written to the stream (Granite).",
        ),
        key(
            "norm",
            Type::Section(&NORM),
            Rule("`eps` 1e-6, no offset"),
            "The form of every RMSNorm of the model.",
        ),
        key(
            "stream",
            Type::Either(&[
                Type::Word(&[
                    ("sum", "a component reads `x`, and its output is added to it"),
                    ("attend", "a component reads a mixture of all outputs before it"),
                ]),
                Type::Section(&STREAM),
            ]),
            Value("sum"),
            "Where components read, and where their outputs go: `sum`, `attend {block 8}` or `lanes 4 dynamic`.",
        ),
        key(
            "adapt",
            Type::Optional(&Type::Section(&ADAPT)),
            NONE,
            "Matrices of low rank added to those of components; they alone are trained, and the rest is frozen.",
        ),
        key(
            "components",
            Type::Names(&Type::Component),
            Required,
            "Components of the layers, by name. In `.dream`: `sa = sequence {…}`.",
        ),
        key(
            "body",
            Type::Layers,
            Required,
            "The layers in order of application. In `.dream` they are written straight into the model.",
        ),
    ],
};

/// Adapters of a model.
pub static ADAPT: Section = Section {
    name: "adapt",
    doc: "Adapters (LoRA, 2106.09685, section 4.1): a matrix `W` becomes `W + alpha/rank · B A`. `B` begins at zero, `A` uniform within \
          ±1/√in, as in `peft`. They alone are trained; a base stays in its file, in the format that it has there.",
    short: None,
    keys: &[
        key(
            "components",
            Type::List(&Type::Text),
            Required,
            "Components whose matrices are adapted, by name.",
        ),
        key(
            "matrices",
            Type::List(&Type::Text),
            Rule("all of them"),
            "The matrices of these that are adapted: `q`, `k`, `v`, `out`, `gate`, `up`, `down`, or what a definition calls its own.",
        ),
        key("rank", SIZE, Value("16"), "Rows of `A`, and columns of `B`."),
        key("alpha", POSITIVE, Rule("twice the rank"), "`alpha/rank` is the factor of what an adapter adds."),
        key(
            "dora",
            Type::Bool,
            FALSE,
            "DoRA (2402.09353, equation 5): row `i` of the sum is scaled to a magnitude `m_i` that is learned. `m` begins as the norms of `W`'s rows; the norm of the \
             sum is a constant to the gradient (section 4.3), as in `peft`.",
        ),
    ],
};

/// Lanes of the stream, at the most.
pub const MOST_LANES: u64 = 16;

/// Wirings of the stream.
pub static STREAM: Section = Section {
    name: "stream",
    doc: "Where components read, and where their outputs go. A `skip(…)` and, with `lanes`, a parallel group count as one component, and are sums inside.",
    short: None,
    keys: &[
        key(
            "attend",
            Type::Section(&ATTEND),
            Absent,
            "Attention Residuals: a component reads `Σ_j p_j v_j` over the embedding and all outputs so far, `p = softmax_j(w · RMSNorm(v_j; g))`, with `w` and `g` of its own. So does the final norm.",
        ),
        key(
            "lanes",
            SIZE,
            Absent,
            "Hyper-Connections: *N* streams, at most 16. A component reads `Σ_i α_i X_i`, and `X_i ← Σ_j M_ij X_j + β_i y`. At the end the lanes are summed and normalised.",
        ),
        key(
            "kind",
            Type::Word(&[
                ("static", "`α`, `β` and `M` are weights"),
                ("dynamic", "weights, and a part that depends on the lanes (Zhu et al.)"),
                ("mhc", "functions of the lanes, `M` doubly stochastic (DeepSeek V4)"),
            ]),
            Rule("`static`, with `lanes`"),
            "Where `α`, `β` and `M` come from. In `.dream` it stands after the number of lanes.",
        ),
        key(
            "embed",
            Type::Bool,
            FALSE,
            "With `lanes`: whether lane *i* begins as the embedding plus `E_i`, a vector of its own that begins at zero. In `.dream`: `stream { lanes 4  embed true }`.",
        ),
    ],
};

/// Attention Residuals.
pub static ATTEND: Section = Section {
    name: "attend",
    doc: "Attention over the outputs of components: `stream attend { block 8 }`.",
    short: None,
    keys: &[key(
        "block",
        SIZE,
        Value("1"),
        "Outputs that one source sums: sources are the embedding, completed runs of this many outputs, and the run so far.",
    )],
};

/// RMSNorm.
pub static NORM: Section = Section {
    name: "norm",
    doc: "RMSNorm, `x · rsqrt(mean(x²) + eps) · g`.",
    short: Some("eps"),
    keys: &[
        key("eps", POSITIVE, Value("1e-6"), "Added to the mean square."),
        key("unit_offset", Type::Bool, FALSE, "The stored weight is `g - 1` (Gemma 2)."),
    ],
};

/// Rotary positions.
pub static ROPE: Section = Section {
    name: "rope",
    doc: "Rotary position embedding: pairs `(i, i + d/2)`, angles `base^(-2i/d)`. `rope 500 half_reversed` in `.dream`.",
    short: Some("base"),
    keys: &[
        key("base", POSITIVE, Required, "Base of the geometric sequence of frequencies."),
        key(
            "half_reversed",
            Type::Bool,
            FALSE,
            "Odd pairs count from the last depth backwards; for `depth` and for routers only.",
        ),
        key(
            "share",
            Type::Real(Range::Share),
            Value("1"),
            "Share of a head that turns: its first `share · d` elements, an even number of them.",
        ),
        key(
            "scaling",
            Type::Optional(&Type::Section(&SCALING)),
            NONE,
            "How frequencies are lowered for contexts longer than those of training.",
        ),
    ],
};

/// Frequency scaling.
pub static SCALING: Section = Section {
    name: "scaling",
    doc: "Lowered frequencies of a rotation, as `transformers` computes them (`rope_type`).",
    short: None,
    keys: &[
        key(
            "type",
            Type::Word(&[
                ("llama3", "low frequencies are divided, high ones kept, those between blended (Llama 3.1)"),
                ("linear", "all frequencies are divided"),
                (
                    "yarn",
                    "pairs that turn less than `slow` times in `original_context` are divided, those that turn more than `fast` times kept, \
                     those between blended; queries and keys are multiplied by `attention` (YaRN)",
                ),
            ]),
            Value("llama3"),
            "Which frequencies are divided.",
        ),
        key("factor", POSITIVE, Required, "Division of the low frequencies."),
        key("low", POSITIVE, Value("1"), "`llama3`: wavelengths above `original_context / low` are divided.")
            .of("llama3"),
        key("high", POSITIVE, Value("4"), "`llama3`: wavelengths below `original_context / high` are kept.")
            .of("llama3"),
        key(
            "original_context",
            POSITIVE,
            Rule("required with `llama3` and `yarn`"),
            "Context the model was first trained with.",
        ),
        key("fast", POSITIVE, Value("32"), "`yarn`: turns above which a pair is kept (`beta_fast`).")
            .of("yarn"),
        key("slow", POSITIVE, Value("1"), "`yarn`: turns below which a pair is divided (`beta_slow`).")
            .of("yarn"),
        key(
            "attention",
            POSITIVE,
            Rule("`0.1 ln(factor) + 1`; 1 for a factor up to 1"),
            "`yarn`: factor on rotated queries and keys (`attention_factor`).",
        )
        .of("yarn"),
        key(
            "truncate",
            Type::Bool,
            Value("true"),
            "`yarn`: whether the pairs between which frequencies are blended are whole numbers.",
        )
        .of("yarn"),
    ],
};

pub(crate) const QUERY_SHORT: Key =
    key("query", SIZE, Rule("the router's"), "Short for `query` of the router.");
static BALANCE_TYPE: Type = Type::Section(&BALANCE);
pub(crate) const BALANCE_SHORT: Key =
    key("balance", Type::Optional(&BALANCE_TYPE), Rule("the router's"), "Short for `balance` of the router.");

const PRESETS: &[(&str, &str)] = &[
    (
        "dreamer",
        "low_rank 128 with rope 500 half_reversed, sigmoid, select logit, normalise, balance 1e-3 median sign",
    ),
    ("deepseek_v3", "linear, sigmoid, select score, normalise, scale 2.5, balance 1e-3 mean sign"),
    ("mixtral", "linear, softmax, select logit, normalise, load_balance_loss 0.02"),
    ("olmoe", "linear, softmax, select logit, no normalise, load_balance_loss 0.01, z_loss 0.001"),
];

/// How a mixture scores, chooses, gates and balances.
pub static ROUTER: Section = Section {
    name: "router",
    doc: "How a mixture scores, chooses, gates and balances its experts. The fields are orthogonal; a preset fills in those not written.",
    short: Some("preset"),
    keys: &[
        key("preset", Type::Word(PRESETS), Value("dreamer"), "Defaults of the other fields."),
        key(
            "form",
            Type::Word(&[
                ("low_rank", "`RoPE(RMSNorm(W_q x))·RMSNorm(K_e) / sqrt(query)`"),
                ("linear", "`W x`"),
            ]),
            Rule("the preset's"),
            "The form of the logits.",
        ),
        key("query", SIZE, Rule("the preset's, else 128"), "Size of queries and keys of `low_rank`."),
        key(
            "rope",
            Type::Optional(&Type::Section(&ROPE)),
            Rule("the preset's, else `500 half_reversed`"),
            "Rotation of the query of `low_rank` by the depth of the application.",
        ),
        key(
            "score",
            Type::Word(&[
                ("sigmoid", "each by itself"),
                ("softmax", "over all experts"),
                ("sqrtsoftplus", "each by itself, `sqrt(ln(1 + e^z))` (DeepSeek V4)"),
            ]),
            Rule("the preset's"),
            "From logit to score.",
        ),
        key(
            "select",
            Type::Word(&[("logit", "logit plus bias"), ("score", "score plus bias")]),
            Rule("the preset's"),
            "Values whose largest are chosen.",
        ),
        key(
            "groups",
            SIZE,
            Value("1"),
            "Groups of as many neighbouring experts; experts are chosen in the `topk_groups` best alone (DeepSeek V3). A group is as good as the sum of its two largest values.",
        ),
        key("topk_groups", SIZE, Rule("`groups`"), "Groups in which experts are chosen; at most `groups`."),
        key("normalise", Type::Bool, Rule("the preset's"), "Gates are divided by their sum over the chosen."),
        key("scale", POSITIVE, Rule("the preset's, else 1"), "Factor on the gates."),
        key(
            "balance",
            Type::Optional(&Type::Section(&BALANCE)),
            Rule(
                "the preset's; of experts without a written preset, a rate of 5 over `train.steps`, from 1e-3 to 2e-2",
            ),
            "Balancing by a bias that chooses and never gates.",
        ),
        key(
            "load_balance_loss",
            WEIGHT,
            Rule("the preset's, else 0"),
            "Weight of the Switch load-balancing loss.",
        ),
        key("z_loss", WEIGHT, Rule("the preset's, else 0"), "Weight of the router z-loss."),
    ],
};

/// Balancing by a bias.
pub static BALANCE: Section = Section {
    name: "balance",
    doc: "`b += rate · law(target(N) - N)` once per optimizer step.",
    short: Some("rate"),
    keys: &[
        key("rate", POSITIVE, Rule("the preset's"), "Step size."),
        key(
            "target",
            Type::Word(&[("median", "the median count"), ("mean", "the mean count")]),
            Rule("the preset's, else median"),
            "The count an expert should have.",
        ),
        key(
            "law",
            Type::Word(&[("sign", "by its sign"), ("proportional", "by the difference over the mean count")]),
            Rule("the preset's, else sign"),
            "How the difference moves the bias.",
        ),
    ],
};

/// One layer.
pub static LAYER: Section = Section {
    name: "layer",
    doc: "One application of a composition with weights of its own; a composition alone is short for it.",
    short: None,
    keys: &[key("layer", Type::Composition, Required, "The composition.")],
};

/// Copies with weights of their own.
pub static REPEAT: Section = Section {
    name: "repeat",
    doc: "Copies of layers with weights of their own: `repeat 16 { sa > ea }`.",
    short: None,
    keys: &[
        key("repeat", SIZE, Required, "Copies."),
        key("layers", Type::Layers, Required, "Layers that are copied."),
    ],
};

/// One set of weights, applied several times.
pub static RECUR: Section = Section {
    name: "recur",
    doc: "One set of weights applied several times: `recur 16 { (da | sa) > ea }`.",
    short: None,
    keys: &[
        key("recur", SIZE, Required, "Applications."),
        key(
            "residual_norm",
            Type::Bool,
            Value("true"),
            "Whether the residual stream, or each of its lanes, is normalised after every application inside. With `stream attend` there is none: it is `false`. In `.dream` it stands after the count.",
        ),
        key(
            "backprop",
            SIZE,
            Rule("all passes"),
            "Number of last passes that gradients flow through; earlier passes keep nothing for the backward. Of a `recur` that is an item of the body.",
        ),
        key(
            "depth",
            Type::Either(&[Type::Word(&[("fixed", "the count that is written")]), Type::Section(&DEPTHS)]),
            Rule("`fixed`"),
            "Number of passes of a training step, a function of seed and step; everything else runs the count that is written. \
             `depth uniform 1 8`, `depth poisson 4 max 16` or `depth lognormal_poisson 32 0.5 min 1 max 64` in `.dream`.",
        ),
        key(
            "lora",
            SIZE,
            Rule("none"),
            "Pass `p` uses `W + B_p A_p` for every matrix of an attention or an MLP inside, where `A_p` has this many rows. \
             Mixtures, routers and the depth stream have none. Of a `recur` that is an item of the body, which then runs at most the count that is written.",
        ),
        key(
            "embed",
            Type::Bool,
            FALSE,
            "Whether pass `p` begins with `x ← x + E_p`, a vector of its own that begins at zero. Of a `recur` that is an item of the body, \
             which then runs at most the count that is written.",
        ),
        key(
            "exit",
            Type::Either(&[
                Type::Word(&[
                    ("last", "the stream that leaves"),
                    (
                        "mean",
                        "the mean over passes of the loss of each pass's stream through the same norm and head",
                    ),
                ]),
                Type::Section(&EXIT),
            ]),
            Rule("`last`"),
            "The passes whose streams the loss of training sees; evaluation sees the stream that leaves. `exit mean`, `exit gate 0.1` or `exit expected 0.1` in `.dream`. \
             Of a `recur` that is the last item of the body; a `norm` may follow it, through which every pass goes. Such a loss is refused \
             with `backprop`: gradients of the passes before its last ones would reach the head alone. \
             With lanes or sources, the stream of a pass is the one that the final norm would read after it.",
        ),
        key(
            "kv",
            Type::Word(&[
                ("own", "those of the pass"),
                ("first", "those of the first pass, which are made and stored once"),
                (
                    "replaced",
                    "those of the pass, and of the first where a token skips it (Mixture-of-Recursions)",
                ),
            ]),
            Value("own"),
            "Keys and values that sequence attentions inside use. `first` and `replaced` are of a `recur` that is an item of the body, in whose first pass \
             all tokens take part; `first` is of attentions without a mixture of projections.",
        ),
        key("layers", Type::Layers, Required, "Layers that are applied."),
    ],
};

/// The loss of a loop that may be left at every pass.
pub static EXIT: Section = Section {
    name: "exit",
    doc: "A gate gives each pass its share (Ouro): `q_p = λ_p Π_{j<p} (1 - λ_j)`, `λ_p = sigmoid(w·x_p + c)`, and the last pass has the rest. \
          The section has one of these keys.",
    short: None,
    keys: &[
        key("gate", WEIGHT, Absent, "`β` of `Σ_p q_p ℓ_p - β H(q)`: shares of the loss."),
        key(
            "expected",
            WEIGHT,
            Absent,
            "`β` of `ℓ(head(Σ_p q_p n_p)) - β H(q)`, `n_p` what the head reads of pass `p`: shares of the logits, before their cap. \
             Evaluation and generation see the last pass, as without.",
        ),
    ],
};

/// A distribution of depths.
pub static DEPTHS: Section = Section {
    name: "depths",
    doc: "A distribution of the number of passes; it has one of the three laws. Training compiles a program for each number, at most 256.",
    short: None,
    keys: &[
        key(
            "uniform",
            Type::List(&SIZE),
            Absent,
            "Least and largest number of passes; all numbers between them are equally likely.",
        ),
        key("poisson", POSITIVE, Absent, "Poisson with this mean."),
        key(
            "lognormal_poisson",
            Type::Section(&LOGNORMAL),
            Absent,
            "One more than Poisson, whose rate is `exp(N(ln mean - sigma²/2, sigma))` (Huginn).",
        ),
        key("min", SIZE, Value("1"), "Least number of passes; a smaller draw is raised to it."),
        key(
            "max",
            SIZE,
            Rule("twice the count of the `recur`"),
            "Largest number of passes; a larger draw is lowered to it.",
        ),
    ],
};

/// A rate that is lognormal.
pub static LOGNORMAL: Section = Section {
    name: "lognormal",
    doc: "A rate that is lognormal.",
    short: None,
    keys: &[
        key("mean", POSITIVE, Required, "Mean of the rate."),
        key("sigma", POSITIVE, Required, "Deviation of its logarithm."),
    ],
};

/// A Mixture-of-Depths wrapper.
pub static SKIP: Section = Section {
    name: "skip",
    doc: "A Mixture-of-Depths wrapper around a part of a layer: `skip(capacity 0.125, causal bce 0.01) { sa > mlp }`. A key that is `true` is written alone.",
    short: None,
    keys: &[
        key(
            "threshold",
            Type::Bool,
            FALSE,
            "A token is processed iff `sigmoid(w·x) >= 0.5`, trained straight through; otherwise the `capacity · t` tokens with the largest score are.",
        ),
        key(
            "depth_choice",
            Type::Bool,
            FALSE,
            "Where the `recur` around begins, a token chooses how many of its passes it makes: `p = softmax(W x)`, passes 0 to `d = argmax(p + bias)`. Behind the loop \
             its stream is `x + p_d·y`, `x` that before the loop and `y` that after pass `d` (Mixture-of-Recursions, token choice). The `skip` is the whole body of a \
             `recur` with `residual_norm false`.",
        ),
        key(
            "balance",
            POSITIVE,
            Rule("`1e-3` with `depth_choice`"),
            "Step size of the bias by which `depth_choice` chooses each number of passes as often: once a step, by the sign of the distance to the median count.",
        ),
        key(
            "capacity",
            Type::Either(&[Type::Real(Range::Share), Type::List(&Type::Real(Range::Share))]),
            Rule("required, but with `depth_choice`"),
            "Share of the tokens processed; the target share with `threshold`. A list has one for each pass of the `recur` around: `capacity [1, 2/3, 1/3]`.",
        ),
        key(
            "causal",
            Type::Optional(&Type::Section(&CAUSAL)),
            NONE,
            "How a top-k router decides without looking ahead: `bce WEIGHT`, or `predictor SIZE`. A model without can be trained but not sampled.",
        ),
        key(
            "router",
            Type::Word(&[
                ("shared", "one for all passes"),
                ("pass", "one for each pass of the `recur` around"),
            ]),
            Value("shared"),
            "Routers of the passes of a `recur` (Mixture-of-Recursions).",
        ),
        key(
            "gate",
            Type::Word(&[
                ("score", "`r·f(x)`"),
                ("sigmoid", "`sigmoid(r)·f(x)`"),
                ("tanh", "`tanh(r)·f(x)`"),
            ]),
            Value("score"),
            "Factor on the update of a token that top-k chose by its score `r`.",
        ),
        key("gate_scale", POSITIVE, Value("1"), "Factor on that factor."),
        key(
            "whole",
            Type::Bool,
            FALSE,
            "Whether the factor is on the stream after the part, `x + f(x)`, not on `f(x)` alone (Mixture-of-Recursions).",
        ),
        key("temperature", POSITIVE, Value("1"), "The router reads the stream divided by it."),
        key(
            "network",
            Type::Optional(&SIZE),
            NONE,
            "Hidden size of a network without biases that scores in the place of a vector: `w·gelu(U x)`, GELU by the error function, within 1.5e-7. \
             Of `depth_choice`: `W gelu(U x)`.",
        ),
        key(
            "z_loss",
            WEIGHT,
            Value("0"),
            "Weight of the mean of `(ln Σ e^z)²` over tokens that could be chosen, `z` a token's scores: `r²` of top-k. It does not go with `threshold`.",
        ),
        key(
            "nested",
            Type::Bool,
            FALSE,
            "Whether a pass of the `recur` around chooses among the tokens that the pass before processed.",
        ),
        key(
            "penalty",
            POSITIVE,
            Rule("required with `threshold`"),
            "Weight of `ReLU(mean(mask) - capacity)`.",
        ),
        key("pooled", Type::Bool, FALSE, "Whether that mean is over all wrapped parts rather than for each."),
        key(
            "norm_only",
            Type::Bool,
            FALSE,
            "The router reads `scale·‖x‖ + bias` in place of the hidden state.",
        ),
        key(
            "level",
            Type::Word(&[
                ("token", "each token"),
                ("sequence", "each sequence, by the mean over its tokens"),
            ]),
            Value("token"),
            "Tokens that share one decision.",
        ),
        key(
            "kv",
            Type::Word(&[("all", "all tokens"), ("processed", "processed tokens")]),
            Rule("`all` with `threshold`, else `processed`"),
            "Which tokens write keys and values of the wrapped attention.",
        ),
        key(
            "merge",
            Type::Bool,
            FALSE,
            "A selected token is the mean of itself and those skipped since the one before it; skipped tokens share the update of the selected one before them.",
        ),
    ],
};

/// Decisions that do not look ahead.
pub static CAUSAL: Section = Section {
    name: "causal",
    doc: "How a top-k router decides without looking ahead.",
    short: None,
    keys: &[
        key(
            "bce",
            POSITIVE,
            Absent,
            "Binary cross-entropy of the score against membership, of this weight; then `score > 0`.",
        ),
        key("into_input", Type::Bool, FALSE, "With `bce`: whether the loss also reaches the router's input."),
        key(
            "predictor",
            SIZE,
            Absent,
            "A network of this hidden size on the stopped input, same loss; then its output `> 0`.",
        ),
        key("weight", POSITIVE, Value("0.01"), "With `predictor`: weight of the loss."),
    ],
};

const TASK: Key = key("task", Type::Word(crate::task::TASKS), Absent, "A generated reasoning task.");
const TEXT: Key = key("text", Type::Path, Absent, "A text file.");
const JSONL: Key = key("jsonl", Type::Path, Absent, "A file of JSON objects, one a line.");
const PARQUET: Key = key("parquet", Type::Path, Absent, "A Parquet file.");
const PROMPT: Key =
    key("prompt", Type::Optional(&Type::Text), NONE, "Field or column of the prompt; no loss on it.");
const ANSWER: Key = key("answer", Type::Text, Value("text"), "Field or column of the text to learn.");
const REJECTED: Key = key(
    "rejected",
    Type::Optional(&Type::Text),
    NONE,
    "Field or column of an answer that is worse than `answer`, for `train.dpo`: every row is a pair.",
);
const TEMPLATE: Key = key(
    "template",
    Type::Text,
    Rule("`{prompt}`, a line break and `{answer}`; `{answer}` where there is no prompt"),
    "How both are put together.",
);
const MIN_STEPS: Key = key("min_steps", SIZE, Value("1"), "Fewest steps of the task.");
const MAX_STEPS: Key = key(
    "max_steps",
    SIZE,
    Rule("the [task's own](tasks.md); 4 of the first three"),
    "Most steps of the task to learn from.",
);
const LONGER: Key = key(
    "longer",
    Type::Optional(&Type::List(&SIZE)),
    NONE,
    "Steps above `max_steps` that are asked in evaluation alone: whether what was learned goes on to longer problems.",
);
const TASK_LENGTH: Key = key(
    "length",
    SIZE,
    Rule("the [task's own](tasks.md)"),
    "Of tasks that have it: symbols of a text, places, numbers, or depth.",
);
const TASK_SIZE: Key = key(
    "size",
    SIZE,
    Rule("the [task's own](tasks.md)"),
    "A number of the task: a modulus, the symbols of a vocabulary, the elements that are permuted …",
);

/// One source of documents.
pub static SOURCE: Section = Section {
    name: "source",
    doc: "One source of documents: one of `task`, `text`, `jsonl` and `parquet`.",
    short: None,
    keys: &[
        TASK,
        TEXT,
        JSONL,
        PARQUET,
        PROMPT,
        ANSWER,
        REJECTED,
        TEMPLATE,
        MIN_STEPS,
        MAX_STEPS,
        LONGER,
        TASK_SIZE,
        TASK_LENGTH,
        key("weight", POSITIVE, Value("1"), "How often this source is drawn from, relative to the others."),
    ],
};

/// Where tokens come from.
pub static DATA: Section = Section {
    name: "data",
    doc: "Where tokens come from: one source written here, or several under `sources`.",
    short: None,
    keys: &[
        TASK,
        TEXT,
        JSONL,
        PARQUET,
        PROMPT,
        ANSWER,
        REJECTED,
        TEMPLATE,
        MIN_STEPS,
        MAX_STEPS,
        LONGER,
        TASK_SIZE,
        TASK_LENGTH,
        key("sources", Type::List(&Type::Section(&SOURCE)), Absent, "Several sources."),
        key(
            "tokenizer",
            Type::Path,
            Value("bytes"),
            "`bytes` for one token a byte, or the path of a `tokenizer.json`.",
        ),
        key(
            "validation",
            Type::Real(Range::Fraction),
            Value("0.05"),
            "Share of the documents of a file held out for validation, where no file is named for it.",
        ),
        key("validation_file", Type::Optional(&Type::Path), NONE, "A file of its own for validation."),
        key(
            "begin",
            Type::Bool,
            Rule("what the tokenizer does by itself"),
            "Whether rows of running text begin with the begin token; documents with prompts always do.",
        ),
        key("document_mask", Type::Bool, Value("true"), "Whether attention stops at document boundaries."),
        key(
            "bad_rows",
            Type::Word(&[("stop", "stop with file and line"), ("skip", "leave it out and count it")]),
            Value("stop"),
            "Treatment of a row that cannot be read.",
        ),
    ],
};

/// The training recipe.
pub static TRAIN: Section = Section {
    name: "train",
    doc: "The training recipe. Defaults are those of the paper's Table 3.",
    short: None,
    keys: &[
        key("steps", SIZE, Value("1000"), "Optimizer steps."),
        key("batch", SIZE, Value("32"), "Sequences in a step."),
        key("accumulate", SIZE, Value("1"), "Micro-batches a step is split into; divides `batch`."),
        key(
            "memory",
            Type::Optional(&Type::Text),
            NONE,
            "Most memory that training may take, a teacher's included, such as `8GB` or `16GiB`: where it would take more, layers are computed once more on the way back instead of kept, with the same bits.",
        ),
        key("sequence", Type::Optional(&SIZE), Rule("the model's `context`"), "Tokens in a sequence."),
        key("learning_rate", POSITIVE, Value("4e-4"), "Peak learning rate."),
        key(
            "warmup",
            Type::Either(&[COUNT, Type::Real(Range::Share)]),
            Rule("500, or a tenth of `steps` where that is less; none with a `schedule` of points"),
            "Steps of linear warm-up, or their share of `steps`, such as `10%`.",
        ),
        key(
            "schedule",
            Type::Either(&[
                Type::Section(&SCHEDULE),
                Type::List(&Type::List(&Type::Real(Range::NonNegative))),
            ]),
            Value("constant"),
            "Learning rates after the warm-up. Or points of the whole run, `[[0, 0], [10%, 1], [100%, 0.1]]`: each a step, or its share of `steps`, \
             and a factor on the learning rate; lines between them.",
        ),
        key("optimizer", Type::Section(&OPTIMIZER), Value("adamw"), "The law that moves weights."),
        key(
            "transfer",
            Type::Section(&TRANSFER),
            Absent,
            "The rule by which a rate that was tuned at another size is used at this one; a ladder writes it from its own `transfer`.",
        ),
        key(
            "betas",
            Type::List(&Type::Real(Range::Fraction)),
            Value("[0.9, 0.999]"),
            "Decay rates of the two means of AdamW and Lion; Lion is usual with `[0.9, 0.99]`.",
        ),
        key("eps", POSITIVE, Value("1e-8"), "AdamW's ε."),
        key(
            "moments",
            Type::Word(&[("f32", "4 bytes a number"), ("bf16", "2 bytes; wants `betas` of at most 0.99")]),
            Value("f32"),
            "Storage of the numbers that the optimizer keeps of each weight.",
        ),
        key("weight_decay", WEIGHT, Value("1e-3"), "Decoupled weight decay on matrices."),
        key("decay_embeddings", Type::Bool, FALSE, "Whether embeddings decay too."),
        key("clip", Type::Optional(&POSITIVE), Value("0.5"), "Largest global gradient norm."),
        key(
            "z_loss",
            WEIGHT,
            Value("0"),
            "Weight of `mean(logsumexp(logits)²)`, over tokens with a target, in the loss that is trained (PaLM).",
        ),
        key(
            "dpo",
            Type::Optional(&Type::Section(&DPO)),
            NONE,
            "Preferences in place of targets (DPO): the model that the run begins from is the reference.",
        ),
        key("seed", COUNT, Value("0"), "Seed of weights, order and sampling."),
        key(
            "precision",
            Type::Word(&[
                (
                    "bf16",
                    "bf16 storage and products; f32 accumulation, master weights, statistics and optimizer",
                ),
                ("f32", "f32 everywhere"),
                (
                    "fp8",
                    "as bf16, and matmuls of layers read e4m3 with scales of 128 numbers, forward and backward",
                ),
            ]),
            Value("bf16"),
            "Storage and products.",
        ),
        key(
            "only",
            Type::List(&Type::Text),
            Value("[]"),
            "Train only tensors whose names match one of these patterns (`*` stands for any text, `routers` for all router tensors).",
        ),
        key(
            "freeze",
            Type::List(&Type::Text),
            Value("[]"),
            "Do not train tensors whose names match one of these.",
        ),
        key(
            "groups",
            Type::List(&Type::Section(&GROUP)),
            Value("[]"),
            "Parameter groups; the first that matches a tensor counts.",
        ),
        key(
            "parallel",
            Type::Section(&PARALLEL),
            Rule("whole states on every rank"),
            "How ranks share a training.",
        ),
        key(
            "ranks",
            Type::Section(&RANKS),
            Rule("as `parallel` says"),
            "The same as a mesh: `ranks { shard 8 experts 4 }` stands for `parallel { data 8 shard weights experts 4 }`.",
        ),
        key(
            "random_depth",
            Type::Optional(&Type::Section(&RANDOM_DEPTH)),
            NONE,
            "Recurrent depth drawn anew each step, as a function of seed and step: the same as `depth uniform` of the `recur`.",
        ),
        key("evaluate", Type::Section(&EVALUATE), Rule("at the end"), "Evaluation during training."),
        key(
            "checkpoint",
            Type::Section(&CHECKPOINT),
            Rule("every ten minutes, and at the end"),
            "Checkpoints during training.",
        ),
        key(
            "patience",
            Type::Optional(&SIZE),
            NONE,
            "Stop when the validation loss has not improved for this many evaluations.",
        ),
        key(
            "on_nan",
            Type::Word(&[
                ("stop", "the run stops, and its last checkpoint is kept"),
                ("skip", "the step is left out and counted; a hundred in a row stop the run"),
            ]),
            Value("stop"),
            "Treatment of a step whose loss or gradient norm is not finite.",
        ),
        key(
            "spike",
            Type::Optional(&POSITIVE),
            NONE,
            "Leave out, and count, a step whose loss or gradient norm is more than this many standard deviations above the mean of the last 128 steps; 6 is usual.",
        ),
    ],
};

/// Training on preferences.
pub static DPO: Section = Section {
    name: "dpo",
    doc: "Direct preference optimisation (2305.18290, equation 7): of a pair of answers the loss is `-ln σ(z)`, `z = β·(ln π(chosen) - ln π(rejected) - \
          reference)`, where `reference` is the same difference of the model that the run begins from; the mean over pairs. Two sequences of `batch` are a pair.",
    short: None,
    keys: &[
        key("beta", POSITIVE, Value("0.1"), "`β`."),
        key(
            "smoothing",
            Type::Real(Range::Fraction),
            Value("0"),
            "The share `ε`, below a half, of pairs that are taken to be the wrong way round: `-(1 - ε) ln σ(z) - ε ln σ(-z)`.",
        ),
    ],
};

/// Learning rates after the warm-up.
pub static SCHEDULE: Section = Section {
    name: "schedule",
    doc: "Learning rates after the warm-up.",
    short: Some("kind"),
    keys: &[
        key(
            "kind",
            Type::Word(&[
                ("constant", "the peak until the end"),
                ("cosine", "half a cosine down to `floor`"),
                ("linear", "a line down to `floor`"),
                ("wsd", "the peak, then a line down to `floor` over the last `decay` steps"),
            ]),
            Required,
            "Which.",
        ),
        key("floor", Type::Real(Range::NonNegative), Value("0"), "Final share of the peak, at most 1."),
        key(
            "decay",
            Type::Either(&[SIZE, Type::Real(Range::Share)]),
            Rule("required with `wsd`"),
            "Steps of the decay of `wsd`, or their share of `steps`.",
        ),
    ],
};

/// The law that moves weights.
pub static OPTIMIZER: Section = Section {
    name: "optimizer",
    doc: "The law that moves weights. `optimizer muon` in `.dream`.",
    short: Some("kind"),
    keys: &[
        key("kind", Type::Word(&crate::optimizer::WORDS), Required, "Which."),
        key(
            "momentum",
            Type::Real(Range::Fraction),
            Value("0.95"),
            "Decay rate of the mean of `muon` and `muonh`, with Nesterov's look ahead; how much of the sum of gradients `sgd` keeps.",
        ),
        key(
            "matrix_rate",
            POSITIVE,
            Value("1"),
            "Factor on the learning rate of the matrices that `muon` and `muonh` orthogonalise; the rest moves by `learning_rate` itself.",
        ),
    ],
};

/// One rate at several sizes.
pub static TRANSFER: Section = Section {
    name: "transfer",
    doc: "One rate at several sizes: factors on the first values and the rates of tensors, each by the sizes that it connects here and at the \
          base, 1 at the base; `dreamc show SPEC --rates` prints them. `transfer { rule mup  width 64  depth 4 }` in `.dream`.",
    short: None,
    keys: &[
        key("rule", Type::Word(&RULES), Required, "Which."),
        key("width", SIZE, Required, "Hidden size of the base, where the rate was tuned."),
        key("depth", SIZE, Required, "Layer applications of the base."),
        key(
            "passes",
            SIZE,
            Rule("as many as here"),
            "Passes of the `recur` at the base: what a loop adds is divided by how many times more it makes here (2606.18524).",
        ),
        key(
            "sizes",
            Type::Names(&SIZE),
            Rule(
                "heads in number, intermediate sizes and latents in proportion to `width`; other sizes as here",
            ),
            "Sizes of components at the base: `{sa.heads: 4, sa.head_size: 16, mlp.intermediate: 128}`.",
        ),
        key(
            "tokens",
            SIZE,
            Absent,
            "With `hyperp`: training tokens of the base; `steps · batch · sequence` are those here.",
        ),
    ],
};

const RULES: [(&str, &str); 6] = [
    (
        "mup",
        "Maximal Update Parametrization (2203.03466, table 3) over the width, Depth-µP (2310.02244) over the depth; with `adamw`, `lion`, \
         `sgd` or `muon`",
    ),
    (
        "completep",
        "the same with branches by `depth^-1` and rates that keep (CompleteP, 2505.01618, table 1); with `adamw`, `lion`, `sgd` or `muon`",
    ),
    (
        "spectral",
        "first values by `fan_in^-1/2 · min(1, sqrt(fan_out / fan_in))`, rates by `1 / fan_in` (2310.17813); nothing over the depth; with \
         `adamw`, `lion`, `sgd` or `muon`",
    ),
    ("standard", "no factor at all: the rate of the base as it is"),
    (
        "hyperp",
        "matrices on their spheres by `depth^-1/2 · tokens^-0.32` (HyperP, 2603.28743), the rest by `mup`; with `muonh`",
    ),
    (
        "umup",
        "first values, rates and multipliers by the sizes themselves (u-µP, 2407.17465): `width` and `depth` say where the rate was tuned, \
         and nothing follows from them; with `adamw` or `lion`",
    ),
];

/// A parameter group.
pub static GROUP: Section = Section {
    name: "group",
    doc: "A parameter group.",
    short: None,
    keys: &[
        key("pattern", Type::Text, Required, "Pattern of tensor names; `*` stands for any text."),
        key("learning_rate", WEIGHT, Value("1"), "Factor on the learning rate."),
        key("weight_decay", Type::Optional(&WEIGHT), Rule("the recipe's"), "Weight decay."),
    ],
};

/// How ranks share a training.
pub static PARALLEL: Section = Section {
    name: "parallel",
    doc: "How the ranks of `dreamc launch`, `torchrun`, `srun` or `mpirun` share a training; one process has all of it.",
    short: None,
    keys: &[
        key(
            "data",
            Type::Optional(&SIZE),
            Rule("as many as there are"),
            "Ranks that share the micro-batches of a step; another number of ranks is refused.",
        ),
        key(
            "shard",
            Type::Word(&[
                ("none", "every rank keeps all of the optimizer's states"),
                (
                    "optimizer",
                    "each rank keeps the states of a part of the weights and moves that part (ZeRO-1, 1910.02054, section 5.1); \
                     matrices that `muon` and `muonh` orthogonalise stay whole",
                ),
                (
                    "weights",
                    "each rank keeps the weights, gradients and states of its part alone; weights are gathered for the layer that \
                     uses them, and dropped after it (ZeRO-3, section 5.3)",
                ),
            ]),
            Value("none"),
            "Tensors that are cut over the ranks. Checkpoints say nothing of it.",
        ),
        key(
            "experts",
            SIZE,
            Value("1"),
            "Successive ranks that own the experts of each mixture together, as many each: tokens go to the owners of their experts \
             and come back. It divides the number of ranks and the experts of every mixture; `data` counts all ranks. Checkpoints \
             say nothing of it.",
        ),
    ],
};

/// The ranks of a training as a mesh.
pub static RANKS: Section = Section {
    name: "ranks",
    doc: "The ranks of a training as a mesh. One of `data`, `states` and `shard` counts all of them, and says what is cut over them.",
    short: None,
    keys: &[
        key(
            "data",
            Type::Optional(&SIZE),
            NONE,
            "So many ranks, which share the micro-batches of a step; each has all weights and states.",
        ),
        key(
            "states",
            Type::Optional(&SIZE),
            NONE,
            "So many ranks, and the optimizer's states are cut over them: `parallel: {data: 8, shard: optimizer}`.",
        ),
        key(
            "shard",
            Type::Optional(&SIZE),
            NONE,
            "So many ranks, and weights, gradients and states are cut over them: `parallel: {data: 8, shard: weights}`.",
        ),
        key(
            "experts",
            SIZE,
            Value("1"),
            "Successive ranks that own the experts of each mixture together. It divides the number of ranks and the experts of \
             every mixture.",
        ),
    ],
};

/// Recurrent depth drawn anew each step.
pub static RANDOM_DEPTH: Section = Section {
    name: "random_depth",
    doc: "Bounds of the recurrent depth drawn at each step. Training compiles a program for each depth between them, at most 256.",
    short: None,
    keys: &[key("min", SIZE, Required, "Least depth."), key("max", SIZE, Required, "Greatest depth.")],
};

/// Evaluation during training.
pub static EVALUATE: Section = Section {
    name: "evaluate",
    doc: "Evaluation during training.",
    short: Some("every"),
    keys: &[
        key("every", COUNT, Value("0"), "Steps between evaluations; 0 for the end only."),
        key(
            "batches",
            SIZE,
            Value("8"),
            "Batches of held-out data each time, drawn from all of it. The last evaluation takes all there is, up to 524,288 tokens; of tasks, \
             which have no end, as many batches as the others.",
        ),
    ],
};

/// Checkpoints during training.
pub static CHECKPOINT: Section = Section {
    name: "checkpoint",
    doc: "Checkpoints during training.",
    short: Some("every"),
    keys: &[
        key("every", COUNT, Value("0"), "Steps between checkpoints; 0 for none by steps."),
        key(
            "minutes",
            WEIGHT,
            Value("10"),
            "Minutes between checkpoints; longer where writing them would take more than 1 % of the run, 0 for none by the clock. There is one at \
             the end in any case.",
        ),
        key("keep", SIZE, Value("2"), "How many of the newest are kept."),
        key("keep_every", COUNT, Value("0"), "Steps between checkpoints that are kept for good; 0 for none."),
        key("best", Type::Bool, FALSE, "Whether the best by validation loss is kept."),
    ],
};

/// Measurements of evaluations.
pub static EVAL: Section = Section {
    name: "eval",
    doc: "Measurements of evaluations.",
    short: None,
    keys: &[
        key(
            "examples",
            COUNT,
            Value("100"),
            "Examples scored by exact match on each difficulty of a task, or in all for a file.",
        ),
        key("max_tokens", SIZE, Value("64"), "Most tokens generated for an answer."),
        key(
            "prompts",
            Type::List(&Type::Text),
            Value("[]"),
            "Prompts of samples during training; by default problems of the tasks, or the beginning of held-out text.",
        ),
        key(
            "temperature",
            Type::Optional(&WEIGHT),
            Rule("0 where data are tasks or have prompts, else 0.8"),
            "Temperature of samples and of `dreamc generate`; 0 takes the likeliest token. Answers that are scored are always the likeliest.",
        ),
        key(
            "top_p",
            Type::Optional(&Type::Real(Range::Share)),
            Value("0.95"),
            "Only the fewest likeliest tokens whose probabilities reach this are drawn from.",
        ),
        key(
            "depths",
            Type::List(&SIZE),
            Value("[]"),
            "Depths to evaluate recurrent models at, apart from their own.",
        ),
        key(
            "stride",
            Type::Optional(&SIZE),
            Rule("the sequence length"),
            "Tokens a perplexity window advances by.",
        ),
    ],
};

const FIELD_STEP: Type = Type::Either(&[Type::Field, Type::Names(&SIZE)]);
const MATCH_FLOPS: Key = key(
    "flops",
    Type::Optional(&FIELD_STEP),
    NONE,
    "Field that meets the FLOPs of a generated token, with its step: `{ea.intermediate: 8}`, or `ea.intermediate` for steps of 1.",
);
const MATCH_TRAINING: Key = key(
    "training",
    Type::Optional(&FIELD_STEP),
    NONE,
    "Field that meets the FLOPs of a trained token, forward and backward, with its step.",
);
const MATCH_PARAMS: Key =
    key("params", Type::Optional(&FIELD_STEP), NONE, "Field that meets the parameters, with its step.");
const MATCH_MEMORY: Key =
    key("memory", Type::Optional(&FIELD_STEP), NONE, "Field that meets the memory, with its step.");

/// Fields that `dreamc match` varies.
pub static MATCH: Section = Section {
    name: "match",
    doc: "Fields that `dreamc match` varies, and its baseline.",
    short: None,
    keys: &[
        key("baseline", Type::Path, Required, "The baseline's spec."),
        MATCH_FLOPS,
        MATCH_TRAINING,
        MATCH_PARAMS,
        MATCH_MEMORY,
        key("tolerance", POSITIVE, Value("0.5%"), "Largest relative difference that counts as matched."),
    ],
};

/// A suite file.
pub static SUITE: Section = Section {
    name: "suite",
    doc: "A suite file: a baseline, variants of it, and what must be equal between them.",
    short: None,
    keys: &[
        key("let", Type::Names(&Type::Real(Range::Any)), Absent, "Names for numbers."),
        key("name", Type::Text, Value("suite"), "Name of the suite."),
        key("baseline", Type::Path, Required, "The baseline's spec."),
        key(
            "variants",
            Type::List(&Type::Section(&VARIANT)),
            Value("[]"),
            "Arms that are compared with it; without any, the baseline is trained alone with every seed.",
        ),
        key("data", Type::Section(&DATA), Absent, "Data of all arms, in place of their own."),
        key("train", Type::Section(&TRAIN), Absent, "Recipe of all arms, in place of their own."),
        key("eval", Type::Section(&EVAL), Absent, "Evaluation of all arms, in place of their own."),
        key(
            "equal",
            Type::Section(&EQUAL),
            Rule("everything it can name"),
            "Quantities that must be equal between the arms.",
        ),
        key("seeds", Type::List(&COUNT), Value("[0]"), "Every arm is trained once for each."),
        key(
            "sweep",
            Type::Names(&Type::List(&Type::Real(Range::Any))),
            Absent,
            "Values of fields that every arm tries, with the first seed, at the smallest cell of the ladder: `{train.learning_rate: [1e-3, 2e-3, 4e-3]}`. \
             Each arm goes on with those of its least held-out loss. Several fields make a grid.",
        ),
        key(
            "sweep_edge",
            Type::Word(&[
                ("refuse", "an error that says which value to add"),
                ("allow", "the arm goes on with it, and the report marks it"),
            ]),
            Value("refuse"),
            "The outcome where the best value stands at an end of its list, so that a better one may stand outside.",
        ),
        key("ladder", Type::Section(&LADDER), Absent, "Sizes and budgets that the arms are compared at."),
    ],
};

/// Cells of equal FLOPs.
pub static LADDER: Section = Section {
    name: "ladder",
    doc: "Cells of equal FLOPs: every size at every budget. `train.warmup`, the decay of `wsd`, and `train.evaluate.every` are those of \
          `train.steps` steps, and scale with the steps of a cell.",
    short: None,
    keys: &[
        key(
            "sizes",
            Type::Names(&Type::Names(&Type::Real(Range::Any))),
            Required,
            "Sizes by name, each with values of `let` names or fields of the specs: `{small: {h: 32}, large: {h: 64}}`.",
        ),
        key(
            "budgets",
            Type::List(&POSITIVE),
            Required,
            "FLOPs of training. The steps of a cell are the budget over the counted FLOPs of a step of the baseline.",
        ),
        key(
            "gate",
            Type::Bool,
            FALSE,
            "Whether an arm stops whose loss is above the baseline's by more than the noise at both of the two smallest cells. Needs two seeds.",
        ),
        key(
            "cooldown",
            Type::Optional(&Type::Real(Range::Fraction)),
            NONE,
            "Share of a cell's steps over which the rate falls to 0, in a branch of one trunk of constant rate for all budgets of a size. Takes the \
             place of the schedule.",
        ),
        key(
            "transfer",
            Type::Word(&[
                ("none", "every size uses it as it is"),
                ("mup", "by `train.transfer` with the rule `mup`, the first cell being the base"),
                ("completep", "the same with `completep`"),
                ("spectral", "the same with `spectral`"),
                ("standard", "the same with `standard`, which has no factors"),
                ("hyperp", "the same with `hyperp`; needs `muonh`, and goes without `cooldown`"),
                ("umup", "the same with `umup`, which has no base"),
            ]),
            Value("none"),
            "How the rate that was tuned at the smallest cell is used at the others.",
        ),
        key(
            "halving",
            Type::Optional(&Type::Int { min: 2 }),
            NONE,
            "Successive halving: the smallest cell tries all values of the sweep, and one in this number of them, the best, goes on to the next cell, \
             until one is left. Without `transfer` the cells are those of the smallest size.",
        ),
        key(
            "recheck",
            Type::Bool,
            FALSE,
            "Whether every arm tries half of its rate and twice of it at the first cell of another size, too: the report says what the carried one \
             lost. One seed each.",
        ),
    ],
};

/// One arm of a suite.
pub static VARIANT: Section = Section {
    name: "variant",
    doc: "One arm of a suite.",
    short: Some("spec"),
    keys: &[
        key("name", Type::Text, Rule("the name of its model"), "Name of the arm."),
        key("spec", Type::Path, Required, "Its spec."),
        key("set", Type::Names(&Type::Any), Absent, "Fields that differ from the spec: `{ea.count: 512}`."),
        key("match", Type::Section(&VARIANT_MATCH), Absent, "Fields that vary until it meets the baseline."),
    ],
};

/// Fields that vary until an arm meets the baseline.
pub static VARIANT_MATCH: Section = Section {
    name: "match of a variant",
    doc: "Fields that vary until an arm meets the baseline.",
    short: None,
    keys: &[MATCH_FLOPS, MATCH_TRAINING, MATCH_PARAMS, MATCH_MEMORY],
};

/// Quantities that must be equal between arms.
pub static EQUAL: Section = Section {
    name: "equal",
    doc: "Quantities that must be equal between the arms. A key alone is `true`.",
    short: None,
    keys: &[
        key(
            "flops",
            Type::Optional(&POSITIVE),
            Value("0.5%"),
            "Largest relative difference in FLOPs of a generated token.",
        ),
        key(
            "training",
            Type::Optional(&POSITIVE),
            NONE,
            "Largest relative difference in FLOPs of a trained token, forward and backward, a teacher's forward among them.",
        ),
        key(
            "budget",
            Type::Optional(&POSITIVE),
            NONE,
            "Largest relative difference in FLOPs of the whole training, a teacher's among them. Known once runs have begun.",
        ),
        key(
            "donor",
            Type::Bool,
            Value("false"),
            "Whether the FLOPs of a training count those that the donor of its transplant was trained with. The report says which.",
        ),
        key(
            "flops_processed",
            Type::Optional(&POSITIVE),
            NONE,
            "Largest relative difference in FLOPs per token at the shares of tokens that `skip` and no-op experts process in the evaluation after the \
             last step. Known after training: an arm that misses it is marked in the report.",
        ),
        key(
            "parameters",
            Type::Optional(&POSITIVE),
            Value("0.1%"),
            "Largest relative difference in parameters.",
        ),
        key(
            "memory",
            Type::Optional(&POSITIVE),
            NONE,
            "Largest relative difference in memory of generation.",
        ),
        key("tokens", Type::Bool, Value("true"), "Training tokens."),
        key("data", Type::Bool, Value("true"), "Data, by hash."),
        key("order", Type::Bool, Value("true"), "Order of the examples."),
        key("tokenizer", Type::Bool, Value("true"), "Tokenizer."),
        key(
            "tuning",
            Type::Bool,
            Rule("`true` where there is a `sweep`"),
            "Equal tuning in place of equal values: fields of the `sweep` may differ, since every arm tried the same values.",
        ),
        key("schedule", Type::Bool, Value("true"), "Learning rate and its schedule."),
        key("optimizer", Type::Bool, Value("true"), "Optimizer, decay and clipping."),
        key("batch", Type::Bool, Value("true"), "Batch and sequence length."),
        key("precision", Type::Bool, Value("true"), "Storage and products."),
        key("seeds", Type::Bool, Value("true"), "Seeds."),
    ],
};

/// The kinds of items of a body.
pub static ITEMS: [&Section; 3] = [&LAYER, &REPEAT, &RECUR];
