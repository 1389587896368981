//! Every function of a definition: its spelling, its meaning, and what it becomes.
//!
//! The one list: the reader of definitions, hints for unknown names, completion in editors and the
//! reference page read it.

use super::graph::{Binary, Fact, Norm, Reduce, Unary};

/// A function of the language of definitions.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// How it is written.
    pub call: &'static str,
    /// Its value.
    pub doc: &'static str,
    /// The tokens that it reads: one or several.
    pub group: Group,
    /// How it is read.
    pub form: Form,
}

/// Functions that are listed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Element by element.
    Elements,
    /// Over dimensions of one token.
    Dimensions,
    /// Weights and products with them.
    Weights,
    /// Of several tokens, causal by construction.
    Tokens,
    /// Of several applications and components.
    Depths,
}

/// How a call is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One value, element by element.
    Unary(Unary),
    /// Two values, element by element.
    Binary(Binary),
    /// `where(c, a, b)`
    Where,
    /// `clip(v, low, high)`
    Clip,
    /// `f(v, over d…)`
    Reduce(Reduce),
    /// `softmax(v, over d)`
    Softmax,
    /// `f(v, over d…, gain, eps = 1e-6)`
    Norm(Norm),
    /// `dot(a, b, over d…)`
    Dot,
    /// `outer(a, b)`
    Outer,
    /// `linear(v, [dims], over d…, bias, init)`
    Linear,
    /// `weight([dims], init)`
    Weight,
    /// `embedding([dims], init)`
    Embedding,
    /// `split(v, over d, [dims])`
    Split,
    /// `merge(v, over d…, [dim])`
    Merge,
    /// `join(a, b, along d)`
    Join,
    /// `slice(v, over d, from, [dim])`
    Slice,
    /// `places(d)`
    Places,
    /// `top(v, n, over d)`
    Top,
    /// `pick(v, places)`
    Pick,
    /// `rope(v, base, at position)`
    Rope,
    /// `stop(v)`
    Stop,
    /// `noise(deviation)`
    Noise,
    /// `shift(v, n = 1)`
    Shift,
    /// `conv(v, width, bias)`
    Conv,
    /// `running(v, block = n)`
    Running,
    /// `average(v, batch)`
    Average,
    /// `choose(q, k, n, block = b, …)`
    ChooseKeys,
    /// `scores(choice)`
    Scores,
    /// `attend(q, k, v, …)`
    Attend,
    /// `mass(attention)`
    Mass,
    /// `depth_attend(q, k, v, scale = …)`
    DepthAttend,
    /// `earlier(name)`
    Earlier,
}

const fn entry(name: &'static str, call: &'static str, doc: &'static str, group: Group, form: Form) -> Entry {
    Entry { name, call, doc, group, form }
}

const fn one(name: &'static str, call: &'static str, doc: &'static str, f: Unary) -> Entry {
    entry(name, call, doc, Group::Elements, Form::Unary(f))
}

const fn two(name: &'static str, call: &'static str, doc: &'static str, f: Binary) -> Entry {
    entry(name, call, doc, Group::Elements, Form::Binary(f))
}

/// All of them.
pub static FUNCTIONS: &[Entry] = &[
    one("exp", "exp(v)", "`e^v`", Unary::Exp),
    one("log", "log(v)", "The natural logarithm.", Unary::Log),
    one("sqrt", "sqrt(v)", "The root.", Unary::Sqrt),
    one("rsqrt", "rsqrt(v)", "One over the root.", Unary::Rsqrt),
    one("abs", "abs(v)", "The size without its sign.", Unary::Abs),
    one("square", "square(v)", "`v · v`", Unary::Square),
    one("sin", "sin(v)", "The sine.", Unary::Sin),
    one("cos", "cos(v)", "The cosine.", Unary::Cos),
    one("tanh", "tanh(v)", "The hyperbolic tangent.", Unary::Tanh),
    one("sigmoid", "sigmoid(v)", "`1 / (1 + e^-v)`", Unary::Sigmoid),
    one("log_sigmoid", "log_sigmoid(v)", "The logarithm of `sigmoid(v)`.", Unary::LogSigmoid),
    one("silu", "silu(v)", "`v · sigmoid(v)`", Unary::Silu),
    one("gelu", "gelu(v)", "GELU by the hyperbolic tangent.", Unary::Gelu),
    one("relu", "relu(v)", "`max(v, 0)`", Unary::Relu),
    one("relu2", "relu2(v)", "`max(v, 0)²`", Unary::Relu2),
    one("softplus", "softplus(v)", "`log(1 + e^v)`", Unary::Softplus),
    one("floor", "floor(v)", "The largest whole number that is not above.", Unary::Floor),
    two("min", "min(a, b)", "The smaller of two numbers.", Binary::Min),
    two("max", "max(a, b)", "The larger of two numbers.", Binary::Max),
    two("mod", "mod(a, b)", "`a - b · floor(a / b)`", Binary::Mod),
    entry("where", "where(c, a, b)", "`a` where `c` is not 0, else `b`.", Group::Elements, Form::Where),
    entry("clip", "clip(v, low, high)", "`v` between two numbers.", Group::Elements, Form::Clip),
    entry("sum", "sum(v, over d…)", "The sum over dimensions.", Group::Dimensions, Form::Reduce(Reduce::Sum)),
    entry(
        "mean",
        "mean(v, over d…)",
        "The mean over dimensions.",
        Group::Dimensions,
        Form::Reduce(Reduce::Mean),
    ),
    entry(
        "maximum",
        "maximum(v, over d…)",
        "The largest over dimensions.",
        Group::Dimensions,
        Form::Reduce(Reduce::Maximum),
    ),
    entry("softmax", "softmax(v, over d)", "`e^v / Σ e^v`", Group::Dimensions, Form::Softmax),
    entry(
        "rms",
        "rms(v, over d…, gain, eps = 1e-6)",
        "`v / sqrt(mean(v²) + eps)`; `gain` is a weight.",
        Group::Dimensions,
        Form::Norm(Norm::Rms),
    ),
    entry(
        "l2",
        "l2(v, over d…, gain, eps = 1e-6)",
        "`v / sqrt(sum(v²) + eps)`; `gain` is a weight.",
        Group::Dimensions,
        Form::Norm(Norm::L2),
    ),
    entry(
        "layer_norm",
        "layer_norm(v, over d…, gain, eps = 1e-6)",
        "`(v - mean(v)) / sqrt(var(v) + eps)`; `gain` is a weight.",
        Group::Dimensions,
        Form::Norm(Norm::Layer),
    ),
    entry("dot", "dot(a, b, over d…)", "`sum(a * b, over d…)`", Group::Dimensions, Form::Dot),
    entry(
        "outer",
        "outer(a, b)",
        "Products of elements, with the dimensions of both.",
        Group::Dimensions,
        Form::Outer,
    ),
    entry(
        "split",
        "split(v, over d, [a, b])",
        "One dimension as several, the last running fastest.",
        Group::Dimensions,
        Form::Split,
    ),
    entry(
        "merge",
        "merge(v, over a b, [d: a * b])",
        "Adjacent dimensions as one.",
        Group::Dimensions,
        Form::Merge,
    ),
    entry(
        "join",
        "join(a, b, along d)",
        "Values one after the other along a dimension.",
        Group::Dimensions,
        Form::Join,
    ),
    entry(
        "slice",
        "slice(v, over d, from, [part: n])",
        "The elements of a dimension from a place on.",
        Group::Dimensions,
        Form::Slice,
    ),
    entry("places", "places(d)", "The numbers 0, 1, … along a dimension.", Group::Dimensions, Form::Places),
    entry(
        "top",
        "top(v, n, over d)",
        "The places of the `n` largest elements, for `pick`.",
        Group::Dimensions,
        Form::Top,
    ),
    entry("pick", "pick(v, places)", "The elements at chosen places.", Group::Dimensions, Form::Pick),
    entry(
        "rope",
        "rope(v, base, over d, at position)",
        "A rotation of pairs by `position` or `depth`.",
        Group::Dimensions,
        Form::Rope,
    ),
    entry("stop", "stop(v)", "`v`, through which no gradient passes.", Group::Elements, Form::Stop),
    entry(
        "noise",
        "noise(deviation)",
        "Normal numbers `[hidden]`, by seed, step and token.",
        Group::Dimensions,
        Form::Noise,
    ),
    entry(
        "linear",
        "linear(v, [dims], over d…, bias, init)",
        "A product with a weight over all dimensions of `v`, or some.",
        Group::Weights,
        Form::Linear,
    ),
    entry("weight", "weight([dims], init)", "A trained tensor.", Group::Weights, Form::Weight),
    entry(
        "embedding",
        "embedding([dims], init)",
        "The row for the id of the token, of a trained table with one for every id.",
        Group::Weights,
        Form::Embedding,
    ),
    entry(
        "shift",
        "shift(v, n = 1)",
        "The value `n` tokens before, zero before the start.",
        Group::Tokens,
        Form::Shift,
    ),
    entry(
        "conv",
        "conv(v, width, bias)",
        "`Σ_{m<width} w_m ⊙ v[i-m]`, a weight of each channel.",
        Group::Tokens,
        Form::Conv,
    ),
    entry(
        "running",
        "running(v, block = n)",
        "The sum over all tokens up to this one, or over those of its own block of `n`.",
        Group::Tokens,
        Form::Running,
    ),
    entry(
        "average",
        "average(v, batch)",
        "The mean over the tokens of its sequence, or with `batch` of all sequences: for `loss` alone.",
        Group::Tokens,
        Form::Average,
    ),
    entry(
        "choose",
        "choose(q, k, n, block = b, near = m, first = m, over d…, relu, softmax, weights = w, scale = c)",
        "The numbers of `n` blocks of `b` tokens, of the largest scores of the keys at their ends.",
        Group::Tokens,
        Form::ChooseKeys,
    ),
    entry(
        "attend",
        "attend(q, k, v, window = n, every = b, among = c, sink, scale = c, score = …, mask = …, dropout = p)",
        "Attention over the tokens up to this one.",
        Group::Tokens,
        Form::Attend,
    ),
    entry(
        "scores",
        "scores(c)",
        "The scores by which `choose` gave the tokens `c`, `-1e20` where there is none: for `loss` alone.",
        Group::Tokens,
        Form::Scores,
    ),
    entry(
        "mass",
        "mass(y)",
        "The weights of the blocks that an attention reads `among`, summed over heads, without a gradient: for `loss` alone.",
        Group::Tokens,
        Form::Mass,
    ),
    entry(
        "depth_attend",
        "depth_attend(q, k, v, scale = c)",
        "Attention over this component's applications to the same token.",
        Group::Depths,
        Form::DepthAttend,
    ),
    entry(
        "earlier",
        "earlier(name)",
        "A named value of this component's last application to the token; zero at the first.",
        Group::Depths,
        Form::Earlier,
    ),
];

/// Numbers that have a name.
pub static FACTS: &[(&str, Fact, &str)] = &[
    ("depth", Fact::Depth, "Applications of layers before this one."),
    ("depths", Fact::Depths, "Applications of layers in all."),
    ("position", Fact::Position, "The place of the token in its document."),
    ("pass", Fact::Pass, "Which pass of its loop runs, from 0."),
];

/// How a weight begins: the word and how many numbers follow it.
pub static INITS: &[(&str, usize, &str)] = &[
    ("zero", 0, "Zero everywhere."),
    ("one", 0, "One everywhere."),
    ("normal", 1, "Normal with a standard deviation."),
    ("uniform", 2, "Uniform between two numbers."),
    ("ramp", 2, "From the first number in the first layer to the second in the last, evenly by depth."),
    ("log_uniform", 2, "The logarithm of a number that is uniform between two."),
    ("inverse_softplus_uniform", 2, "The inverse softplus of a step size, log-uniform between two."),
];

/// The function of that name.
pub fn function(name: &str) -> Option<&'static Entry> {
    FUNCTIONS.iter().find(|entry| entry.name == name)
}
