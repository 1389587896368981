//! The typed graph of a definition: every value with named dimensions, every size known.
//!
//! *Promise*: nodes stand in order, so that a value's operands come before it; every operand of an
//! element-wise function has dimensions that its result has too; a name of a dimension has one
//! size.

use crate::component::{Component, Mixes};
use crate::source::Span;

/// A definition with sizes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// The dimensions; a name stands once.
    pub dims: Vec<Dimension>,
    /// The weights, in the order of the text.
    pub weights: Vec<Weight>,
    /// The values. Its one result is what the component returns: per token, `[hidden]`.
    pub region: Region,
    /// Values whose means over the tokens are added to the loss in training: one number each.
    pub losses: Vec<ValueId>,
}

/// Values that are computed together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Region {
    /// The values, operands first.
    pub nodes: Vec<Node>,
    /// The values that it gives.
    pub results: Vec<ValueId>,
}

/// A value of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A dimension of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DimId(pub u32);

/// A weight of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// A dimension.
#[derive(Clone, Debug, PartialEq)]
pub struct Dimension {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size: u64,
    /// Where it appears first.
    pub span: Span,
}

/// A weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Its name in the component, of the value that it is written in: `q.weight`, `a.weight2`.
    pub path: String,
    /// Its dimensions; of a matrix those of its result, then those of its input, which may be the
    /// same (`hidden` to `hidden`).
    pub dims: Vec<DimId>,
    /// How many of the last dimensions an input is summed over: the fan in of a matrix, 0 of other
    /// tensors.
    pub inputs: usize,
    /// How it begins; nothing is the recipe's for a matrix of that fan in.
    pub init: Option<Init>,
    /// Its purpose.
    pub purpose: Purpose,
    /// Its token.
    pub span: Span,
}

impl Weight {
    /// Its name as a matrix, in the component: `q` of `q.weight`, `a2` of `a.weight2`.
    pub fn matrix(&self) -> String {
        beside(&self.path, "")
    }
}

/// The path of a weight with `to` in the place of its last `.weight`: `q.adapter_a` of `q.weight`,
/// `a.adapter_a2` of `a.weight2`.
pub fn beside(path: &str, to: &str) -> String {
    match path.rsplit_once(".weight") {
        Some((value, count)) => format!("{value}{to}{count}"),
        None => format!("{path}{to}"),
    }
}

/// The purpose of a weight: decay and optimizers treat matrices alone as such.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// The matrix of a `linear`.
    Matrix,
    /// The matrix of the `linear` that is returned.
    Output,
    /// Its bias.
    Bias,
    /// The gain of a norm.
    Gain,
    /// The filter of a `conv`.
    Filter,
    /// A tensor that `weight` makes.
    Own,
}

/// How a weight begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform between two numbers.
    Uniform(f64, f64),
    /// The first number in the first layer, the second in the last, evenly by depth between them.
    Ramp(f64, f64),
    /// The logarithm of a number that is uniform between two.
    LogUniform(f64, f64),
    /// The inverse softplus of a step size whose logarithm is uniform between those of two numbers.
    InverseSoftplusUniform(f64, f64),
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The function that gives it.
    pub function: Function,
    /// The values that it is given, of the same region.
    pub args: Vec<ValueId>,
    /// Its type.
    pub ty: Type,
    /// The name that it is assigned to.
    pub name: Option<String>,
    /// Its token.
    pub span: Span,
}

/// The type of a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Type {
    /// Its dimensions in order, without those of tokens.
    pub dims: Vec<DimId>,
    /// Whether each token has its own; else it is made of weights and settings alone.
    pub per_token: bool,
    /// The dimension whose places it holds, where it is a choice (`top`).
    pub places_of: Option<DimId>,
}

/// The function that gives a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Function {
    /// The token's row of the stream, after the component's norm: `[hidden]`.
    Input,
    /// A number.
    Number(f64),
    /// A number of the token, or of the application.
    Fact(Fact),
    /// Normal numbers of this standard deviation, by seed, step and token.
    Noise(f64),
    /// A weight.
    Weight(WeightId),
    /// The row for the token's id of its operand, a weight whose first dimension is the vocabulary.
    Embedding,
    /// Element by element.
    Unary(Unary),
    /// Element by element of two values; the one without a dimension is repeated along it.
    Binary(Binary),
    /// `where(c, a, b)`: `a` where `c` is not zero, else `b`.
    Where,
    /// A product of elements with the dimensions of both, those that they share once.
    Outer,
    /// A reduction over dimensions, which go.
    Reduce(Reduce, Vec<DimId>),
    /// The softmax over a dimension.
    Softmax(DimId),
    /// A norm over dimensions; a second operand is its gain.
    Norm {
        /// Which norm.
        how: Norm,
        /// Its dimensions.
        over: Vec<DimId>,
        /// The number that it adds below the root.
        eps: f64,
    },
    /// The sum over dimensions of the product of two values.
    Dot(Vec<DimId>),
    /// The product with a weight, the second operand, whose last dimensions are summed over;
    /// a third operand is the bias. A dimension that both the value and the result of the weight
    /// have, and that is not summed over, has a matrix for each of its places.
    Linear(Vec<DimId>),
    /// One dimension as several: the last of them runs fastest.
    Split(DimId, Vec<DimId>),
    /// Several adjacent dimensions as one.
    Merge(Vec<DimId>, DimId),
    /// Values one after the other along a dimension; of each operand the dimension that becomes
    /// part of it.
    Join(DimId, Vec<DimId>),
    /// The elements of a dimension from a place on; their number is the size of another dimension.
    Slice {
        /// The dimension.
        of: DimId,
        /// Its first place.
        from: u64,
        /// The dimension in its stead.
        to: DimId,
    },
    /// The places of the largest elements of a dimension, in falling order, along another.
    Top {
        /// The dimension that is chosen from.
        over: DimId,
        /// The dimension of choices.
        choices: DimId,
    },
    /// The elements of the first operand at the places that the second holds.
    Pick,
    /// A rotation of the pairs `(i, i + size / 2)` of a dimension.
    Rope {
        /// The base of its frequencies.
        base: f64,
        /// The dimension.
        over: DimId,
        /// The number that turns it.
        at: Turn,
    },
    /// The value, through which no gradient passes.
    Stop,
    /// The value that number of tokens before; zero before the start.
    Shift(u64),
    /// `Σ_{m<width} w_m ⊙ v[i-m]`; operands are the value, its filter `[…, width]`, and a bias.
    Conv(DimId),
    /// The sum over all tokens up to this one, or over those in its own block of that size.
    Running(Option<u64>),
    /// The mean over the tokens of the token's sequence, or of all sequences; losses alone depend
    /// on it.
    Average {
        /// Of all sequences.
        all: bool,
    },
    /// The blocks of keys that a token reads: queries, keys, and weights of heads.
    Choose(Choice),
    /// The scores by which its operand chose tokens, [`ABSENT`] where it has none; losses alone
    /// depend on them.
    Scores,
    /// Attention over the tokens up to this one: queries, keys, values, and what its score and its
    /// mask read.
    Attend(Box<Attend>),
    /// The weights by which its operand, an attention, reads each block that was chosen, summed
    /// over the heads of a choice; its sink and its dropout leave them as they are. No gradient
    /// passes, and losses alone depend on them.
    Mass,
    /// Statements once a token over a state; operands are the values that they read. It has no
    /// value itself, see [`Function::Emitted`].
    Recurrence(Box<Recurrence>),
    /// That result of a recurrence, at every token.
    Emitted(u32),
    /// The softmax over this component's applications to the same token so far: queries, keys,
    /// values.
    DepthAttend {
        /// The factor of scores.
        scale: f64,
        /// Whether the text says it.
        written: bool,
    },
    /// A value of this component's last application to the same token.
    Earlier(String),
    /// A value of a component applied before to the same token.
    ValueOf(String, String),
    /// Another component, applied to a value of `[hidden]`.
    Apply(Box<Applied>),

    /// In a region: that operand of the node that the region belongs to, at this token.
    Read(u32),
    /// In a recurrence: that state, as the last token left it.
    State(u32),
    /// In a score or a mask: the scaled product of query and key.
    Score,
    /// The token of the query.
    QueryPlace,
    /// The token of the key.
    KeyPlace,
    /// The number of the head, along its dimension. Outside of scores the numbers 0, 1, … along a
    /// dimension, a constant: `places`.
    Head(DimId),
    /// That operand at the token of the query.
    AtQuery(u32),
    /// That operand at the token of the key.
    AtKey(u32),
    /// The element of the first operand, which is constant, at places of its dimensions in order;
    /// a dimension without a place stays.
    Look(Vec<Option<u32>>),
}

/// The values that a function is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// None: it is a number, a weight, or given.
    Nothing,
    /// Those of its own token, element by element or over dimensions.
    Token,
    /// The same, turned by the place of the token or of the application; or by which token it is.
    Place,
    /// Those that losses alone may depend on: of all tokens, or of attention.
    Losses,
    /// Those of several tokens.
    Tokens,
    /// Those of other applications.
    Depths,
    /// Those of the region that it stands in: of a recurrence, a score or a mask.
    Region,
}

impl Function {
    /// The values that it is made of. By this one list, each place where formulas stand takes
    /// functions or refuses them.
    pub fn reads(&self) -> Reads {
        match self {
            Function::Input
            | Function::Number(_)
            | Function::Fact(_)
            | Function::Noise(_)
            | Function::Weight(_)
            | Function::Head(_) => Reads::Nothing,
            Function::Unary(_)
            | Function::Binary(_)
            | Function::Where
            | Function::Outer
            | Function::Reduce(..)
            | Function::Softmax(_)
            | Function::Norm { .. }
            | Function::Dot(_)
            | Function::Linear(_)
            | Function::Split(..)
            | Function::Merge(..)
            | Function::Join(..)
            | Function::Slice { .. }
            | Function::Top { .. }
            | Function::Pick
            | Function::Stop
            | Function::Emitted(_) => Reads::Token,
            Function::Rope { .. } | Function::Embedding => Reads::Place,
            Function::Average { .. } | Function::Scores | Function::Mass => Reads::Losses,
            Function::Shift(_)
            | Function::Conv(_)
            | Function::Running(_)
            | Function::Choose(_)
            | Function::Attend(_)
            | Function::Recurrence(_) => Reads::Tokens,
            Function::DepthAttend { .. } | Function::Earlier(_) | Function::ValueOf(..) => Reads::Depths,
            Function::Apply(applied) => match applied.component.kind().mixes() {
                Mixes::Tokens => Reads::Tokens,
                Mixes::Depths => Reads::Depths,
                Mixes::Features => Reads::Token,
            },
            Function::Read(_)
            | Function::State(_)
            | Function::Score
            | Function::QueryPlace
            | Function::KeyPlace
            | Function::AtQuery(_)
            | Function::AtKey(_)
            | Function::Look(_) => Reads::Region,
        }
    }
}

/// A number of the token or of the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fact {
    /// Applications of layers before this one.
    Depth,
    /// Applications of layers in all.
    Depths,
    /// The place of the token in its document.
    Position,
    /// Which pass of its loop runs.
    Pass,
}

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// `-x`
    Neg,
    /// 1 where `x` is 0, else 0.
    Not,
    /// `e^x`
    Exp,
    /// The natural logarithm.
    Log,
    /// The root.
    Sqrt,
    /// One over the root.
    Rsqrt,
    /// The size without its sign.
    Abs,
    /// `x²`
    Square,
    /// The sine.
    Sin,
    /// The cosine.
    Cos,
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x · sigmoid(x)`
    Silu,
    /// `x · Φ(x)` by the hyperbolic tangent.
    Gelu,
    /// `max(x, 0)`
    Relu,
    /// `max(x, 0)²`
    Relu2,
    /// `log(1 + e^x)`
    Softplus,
    /// `-softplus(-x)`
    LogSigmoid,
    /// The largest whole number that is not above.
    Floor,
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// The smaller.
    Min,
    /// The larger.
    Max,
    /// 1 where `a < b`, else 0; so the others.
    Less,
    /// `a <= b`
    LessEqual,
    /// `a > b`
    Greater,
    /// `a >= b`
    GreaterEqual,
    /// `a == b`
    Equal,
    /// `a != b`
    NotEqual,
    /// 1 where neither is 0.
    And,
    /// 1 where one is not 0.
    Or,
    /// `a - b · floor(a / b)`
    Mod,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// `Σ`
    Sum,
    /// The sum over the number of elements.
    Mean,
    /// The largest.
    Maximum,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// `x / sqrt(mean(x²) + eps)`
    Rms,
    /// `x / sqrt(sum(x²) + eps)`
    L2,
    /// `(x - mean(x)) / sqrt(var(x) + eps)`
    Layer,
}

/// The number that turns a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// The position of the token.
    Position,
    /// The depth of the application.
    Depth,
}

/// A choice of blocks of keys, without a gradient. The key at the end of a block stands for it:
/// what is made of its tokens alone, by `running` in blocks. Numbers of blocks are in increasing
/// order along the last dimension, -1 where there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The tokens of a block.
    pub block: u64,
    /// Blocks up to the token's own that are chosen whatever their scores.
    pub near: u64,
    /// Blocks from the beginning on, likewise.
    pub first: u64,
    /// How scaled products become terms, which are summed over the heads that the result has not.
    pub measure: Measure,
    /// Whether a third operand has a weight of each head.
    pub weighed: bool,
    /// The factor of products.
    pub scale: f64,
    /// The dimension of choices.
    pub choices: DimId,
}

/// The score of a token that no choice has: its exponential is zero.
pub const ABSENT: f64 = -1e20;

/// How scaled products become terms of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Measure {
    /// As they are.
    Products,
    /// `max(s, 0)`
    Relu,
    /// The softmax over the keys.
    Softmax,
}

/// An attention over tokens. Queries have dimensions of heads and, last, the one that is summed
/// over; keys the same, or fewer heads, which groups of query heads share.
#[derive(Clone, Debug, PartialEq)]
pub struct Attend {
    /// The number of tokens whose keys a query sees, its own included.
    pub window: Option<u64>,
    /// The tokens of a block; only the key at its end is seen.
    pub every: Option<u64>,
    /// The operand that says which blocks are seen, and the tokens of one.
    pub among: Option<(u32, u64)>,
    /// The operand that holds one more logit of every head, of no value.
    pub sink: Option<u32>,
    /// The factor of scores.
    pub scale: f64,
    /// Whether the text says it.
    pub written: bool,
    /// The probability with which a weight is dropped in training.
    pub dropout: f64,
    /// The score of a pair, in place of the scaled product.
    pub score: Option<Region>,
    /// Whether a pair is seen: not zero.
    pub mask: Option<Region>,
}

/// A recurrence. Results of its body are first the new states, in order, then values that are read
/// outside.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrence {
    /// Its states.
    pub states: Vec<State>,
    /// One step.
    pub body: Region,
}

/// A state of a recurrence.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Its name.
    pub name: String,
    /// Its dimensions.
    pub dims: Vec<DimId>,
    /// Its value before the first token.
    pub from: From,
}

/// The value of a state before the first token of a document.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum From {
    /// The same number everywhere.
    Number(f64),
    /// That operand of the recurrence, which is constant.
    Operand(u32),
}

/// Another component, applied inside a definition.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// The component with its settings.
    pub component: Component,
    /// The name of the value that it gives, with which the names of its weights begin.
    pub path: String,
}

impl Graph {
    /// The size of a dimension.
    pub fn size(&self, dim: DimId) -> u64 {
        self.dims.get(dim.0 as usize).map_or(1, |dim| dim.size)
    }

    /// The name of a dimension.
    pub fn name(&self, dim: DimId) -> &str {
        self.dims.get(dim.0 as usize).map_or("", |dim| &dim.name)
    }

    /// Elements of dimensions together.
    pub fn elements(&self, dims: &[DimId]) -> u64 {
        dims.iter().map(|&dim| self.size(dim)).fold(1, u64::saturating_mul)
    }

    /// The value of that name, assigned last.
    pub fn value(&self, name: &str) -> Option<ValueId> {
        let named = |node: &Node| node.name.as_deref() == Some(name);
        self.region.nodes.iter().rposition(named).map(|place| ValueId(place as u32))
    }
}

impl Region {
    /// A value.
    pub fn node(&self, value: ValueId) -> &Node {
        &self.nodes[value.0 as usize]
    }
}

/// The factor of scores of an attention in a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// The name that its value is assigned to.
    pub name: Option<String>,
    /// How many products a score is the sum of.
    pub size: u64,
    /// The factor.
    pub scale: f64,
    /// Whether the text says it.
    pub written: bool,
}

impl Graph {
    /// Its attentions over tokens and over depth, those that it applies among them, in the order of
    /// the text.
    pub fn attentions(&self) -> Vec<Scores> {
        let scores = |node: &Node| {
            let (scale, written) = match &node.function {
                Function::Attend(a) => (a.scale, a.written),
                Function::DepthAttend { scale, written } => (*scale, *written),
                Function::Apply(applied) => {
                    let own = applied.component.attention()?;
                    let scale = own.scale.unwrap_or_else(|| (own.head_size as f64).sqrt().recip());
                    let (name, size) = (Some(applied.path.clone()), own.head_size);
                    return Some(Scores { name, size, scale, written: own.scale.is_some() });
                }
                _ => return None,
            };
            let queries = self.region.nodes.get(node.args.first()?.0 as usize)?;
            let size = self.size(*queries.ty.dims.last()?);
            Some(Scores { name: node.name.clone(), size, scale, written })
        };
        self.region.nodes.iter().filter_map(scores).collect()
    }

    /// Gives attentions whose text says no factor of scores another than the default, by number.
    pub(crate) fn scale_scores(&mut self, scores: &[Option<f64>]) {
        let mut given = scores.iter();
        for node in &mut self.region.nodes {
            match &mut node.function {
                Function::Attend(a) => {
                    let by = given.next().copied().flatten();
                    a.scale = by.filter(|_| !a.written).unwrap_or(a.scale);
                }
                Function::DepthAttend { scale, written } => {
                    let by = given.next().copied().flatten();
                    *scale = by.filter(|_| !*written).unwrap_or(*scale);
                }
                Function::Apply(applied) => {
                    if let Component::Sequence(a) | Component::Depth(a) = &mut applied.component {
                        a.scale = a.scale.or(given.next().copied().flatten());
                    }
                }
                _ => {}
            }
        }
    }

    /// The dimensions that sums, norms and softmaxes go over, those in recurrences among them.
    pub fn reduced(&self) -> Vec<DimId> {
        fn of(region: &Region, found: &mut Vec<DimId>) {
            for node in &region.nodes {
                match &node.function {
                    Function::Reduce(_, over) | Function::Dot(over) | Function::Norm { over, .. } => {
                        found.extend(over);
                    }
                    Function::Softmax(over) => found.push(*over),
                    Function::Recurrence(recurrence) => of(&recurrence.body, found),
                    _ => {}
                }
            }
        }
        let mut found = vec![];
        of(&self.region, &mut found);
        found
    }
}
