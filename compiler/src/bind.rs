//! Bindings of a function's parameters and results: passes ask the type here, names are for
//! people.
//!
//! *In*: nothing. *Out*: [`Port`], a parameter or a result with its name and its [`Binding`].
//! *Promise*: no pass decides anything by how a name begins or ends. Two ends of one function that
//! have the same name are the same thing (a state before and after); across functions a name means
//! something only together with its binding.

mod part;

pub use part::{Adapted, Counted, Factor, Part, Rows, Slice};

use std::fmt;

/// A parameter or a result of a function.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port {
    /// Its name; unique among the parameters, and among the results. For weights the tensor name
    /// inside the layer (`sa.qkv.weight`); for state the same before and after; `d.` and the name
    /// of what it belongs to for a cotangent.
    pub name: String,
    /// Its binding.
    pub binding: Binding,
}

impl Port {
    /// A port of that name.
    pub fn new(name: impl Into<String>, binding: Binding) -> Self {
        Port { name: name.into(), binding }
    }

    /// The cotangent of this one.
    pub fn cotangent(&self) -> Port {
        Port::new(format!("d.{}", self.name), Binding::Cotangent(self.binding.of()))
    }
}

/// A value of the caller of that name.
impl From<&str> for Port {
    fn from(name: &str) -> Self {
        Port::new(name, Binding::Value)
    }
}

/// A value of the caller of that name.
impl From<String> for Port {
    fn from(name: String) -> Self {
        Port::new(name, Binding::Value)
    }
}

impl From<Output> for Port {
    fn from(output: Output) -> Self {
        Port::new(output.name(), Binding::Output(output))
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The meaning of a port where its function is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Binding {
    /// A value of the caller, with no further meaning.
    Value,
    /// The stream: a layer reads the one before it and writes the one after it.
    Stream,
    /// Something the host gives for a batch or a step.
    Batch(Input),
    /// A trained tensor of the weight set.
    Weight,
    /// A trained tensor of the weight set, one for every pass of a loop.
    PassWeight,
    /// A tensor of the weight set, one for each of its applications.
    TurnWeight,
    /// A tensor of the weight set that no gradient reaches: a balancing bias.
    Buffer,
    /// Something computed of weights alone before the calls, for each weight set.
    Prepared,
    /// A tensor that outlives the call and is updated in place. The function returns its new value
    /// under the same name.
    State(Lifetime),
    /// A forward value kept for the backward function, for each application.
    Saved,
    /// An `i32` scalar that the loops of the program supply.
    Index(Index),
    /// Something the host reads.
    Output(Output),
    /// Something a layer leaves for the host, for each depth of the model.
    Observed,
    /// Something the host gives in the place of a value of a layer, for each depth of the model.
    Patched,
    /// The cotangent of such a port. Of a weight it is the gradient, to which every call adds.
    Cotangent(Of),
}

/// How many instances of a state there are, and how long they live.
///
/// A state that decoding keeps of a sequence, from program to program, is of one of two kinds. A
/// state *per token*, `[batch, entries, ..]`, is appended to: an entry belongs to the token whose
/// position is there, and what has no position is never read. A state *per text*, `[batch, ..]`, is
/// overwritten: it is zero where a text begins, and tokens that take no part leave it as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lifetime {
    /// One, handed from application to application of a program: a depth cache.
    Depth,
    /// Per token: a sequence cache.
    Token(PerToken),
    /// Per text, one for each application of a body.
    Text,
    /// One for each set of weights, kept until the optimizer step: selection counts.
    Set,
    /// One for each time that a stream is saved under a name. A function that returns it saves it,
    /// one that takes it reads the latest.
    Saved,
}

/// Which of the instances of a state per token a function has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PerToken {
    /// There is one for each application of a body, and it has its own.
    Application,
    /// There is one for each application of a component, which other components read, and it has
    /// its own.
    Row,
    /// That of the latest application of another component; it is read alone.
    Latest,
    /// That which the first pass of a loop left for all of its passes; it is read alone.
    First,
}

/// An integer that loops supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Index {
    /// Whatever the caller says.
    Given,
    /// Applications of layers before this one.
    Depth,
    /// Applications of layers in all.
    Depths,
    /// Which pass of the outermost loop runs.
    Pass,
    /// Applications before this one that write a row of that cache: an entry of
    /// [`Architecture::rows`](crate::architecture::Architecture::rows).
    Row(u32),
    /// The row before: that of the latest of those applications.
    Latest(u32),
    /// The row `by` rows later.
    Next {
        /// The cache.
        cache: u32,
        /// How many.
        by: u32,
    },
    /// The first row.
    First,
    /// The row of the first pass of the loop around, at this place of the pass.
    FirstPass {
        /// The cache.
        cache: u32,
        /// Rows that a pass writes.
        by: u32,
    },
    /// Runs of outputs that are complete, the embedding among them, before output `offset` of this
    /// application.
    Run {
        /// Outputs before the application: an entry of [`Index::Row`].
        cache: u32,
        /// Which output of it.
        offset: u32,
        /// Outputs of a run.
        block: u32,
    },
    /// 1 where that output continues a run, 0 where it begins one.
    Continues {
        /// As in [`Index::Run`].
        cache: u32,
        /// As in [`Index::Run`].
        offset: u32,
        /// As in [`Index::Run`].
        block: u32,
    },
}

/// Inputs of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Input {
    /// `i32[batch, seq]`: input tokens.
    Ids,
    /// `i32[batch, seq]`: next tokens; negative where no loss is taken.
    Targets,
    /// `i32[batch, seq]`: position of each token in its document.
    Positions,
    /// `i32[batch, seq]`: document of each token; only with document masks.
    Segments,
    /// `i32[batch, seq]`: place in the caches for each token; negative for padding.
    Slots,
    /// `i32[batch, places]`: position of the token in each place of the caches, those of this call
    /// included; negative for none.
    KeyPositions,
    /// `i32[batch, 1]`: which token of each sequence the logits are of; of programs that read texts
    /// for what follows them.
    Asked,
    /// `f32[batch, seq, hidden]`: normal numbers that a stream starts with.
    Noise,
    /// `i32[batch, seq]`: a random number of every query, from which an attention that drops
    /// weights derives those that it keeps. Each attention of each application has its own
    /// ([`Input::draws`]).
    Draws,
    /// `f32[batch / 2]`: of pairs of sequences, how much more likely the first was before training
    /// than the second, in nats.
    Reference,
    /// `f32[1]`: one over the number of targets of the whole step, or of its pairs.
    LossScale,
    /// `f32[1]`: the weight of the auxiliary losses of a micro-batch.
    AuxScale,
    /// `f32[1]`: the learning rate of the step.
    LearningRate,
    /// `f32[1]`: what corrects the mean of gradients for its beginning at zero, `1 / (1 - β1^t)`.
    FirstCorrection,
    /// `f32[1]`: the same of the mean of squares, `1 / (1 - β2^t)`.
    SecondCorrection,
    /// `f32[1]`: the largest gradient norm; infinite for none.
    Clip,
}

/// Outputs for the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Output {
    /// `f32[1]`: `loss_scale · Σ nll`, added to what is there.
    Loss,
    /// `f32[1]`: the auxiliary losses of routers, added to what is there.
    Aux,
    /// `f32[1]`: the losses of a teacher, added to what is there.
    Taught,
    /// `f32[batch, seq]`: the loss of each token.
    Nll,
    /// `f32[batch, seq, vocab]`, or `f32[batch, 1, vocab]` of the tokens of [`Input::Asked`].
    Logits,
    /// `f32[1]`: global gradient norm before clipping.
    Norm,
}

/// The kind of port that a cotangent belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Of {
    /// A value without further meaning.
    Value,
    /// The stream.
    Stream,
    /// A weight.
    Weight,
    /// A state; it is state itself.
    State(Lifetime),
    /// A result of the host.
    Output(Output),
}

impl Binding {
    /// Whether it is the same for all tokens and all calls between two optimizer steps.
    pub fn is_weights(self) -> bool {
        matches!(self, Binding::Weight | Binding::Buffer | Binding::Prepared)
    }

    /// Whether it is updated in place.
    pub fn is_state(self) -> bool {
        matches!(self, Binding::State(_) | Binding::Cotangent(Of::State(_)))
    }

    /// Whether it is a scalar that loops supply.
    pub fn is_index(self) -> bool {
        matches!(self, Binding::Index(_))
    }

    /// Whether it is the cotangent of something.
    pub fn is_cotangent(self) -> bool {
        matches!(self, Binding::Cotangent(_))
    }

    /// The kind of port, for its cotangent.
    pub fn of(self) -> Of {
        match self {
            Binding::Stream => Of::Stream,
            Binding::Weight | Binding::PassWeight | Binding::TurnWeight => Of::Weight,
            Binding::State(lifetime) => Of::State(lifetime),
            Binding::Output(output) => Of::Output(output),
            Binding::Value
            | Binding::Batch(_)
            | Binding::Buffer
            | Binding::Prepared
            | Binding::Saved
            | Binding::Index(_)
            | Binding::Observed
            | Binding::Patched
            | Binding::Cotangent(_) => Of::Value,
        }
    }

    /// The words that the text form has for it.
    pub fn words(self) -> String {
        match self {
            Binding::Value => "input".into(),
            Binding::Stream => "stream".into(),
            Binding::Batch(input) => format!("batch {}", input.name()),
            Binding::Weight => "weight".into(),
            Binding::PassWeight => "pass".into(),
            Binding::TurnWeight => "turn".into(),
            Binding::Buffer => "buffer".into(),
            Binding::Prepared => "prepared".into(),
            Binding::State(Lifetime::Depth) => "state".into(),
            Binding::State(lifetime) => format!("state {}", lifetime.name()),
            Binding::Saved => "saved".into(),
            Binding::Index(Index::Given) => "index".into(),
            Binding::Index(Index::Depth) => "index depth".into(),
            Binding::Index(Index::Depths) => "index depths".into(),
            Binding::Index(Index::Pass) => "index pass".into(),
            Binding::Index(Index::Row(cache)) => format!("index row {cache}"),
            Binding::Index(Index::Latest(cache)) => format!("index latest {cache}"),
            Binding::Index(Index::Next { cache, by: 1 }) => format!("index next {cache}"),
            Binding::Index(Index::Next { cache, by }) => format!("index next {cache} by {by}"),
            Binding::Index(Index::First) => "index first".into(),
            Binding::Index(Index::FirstPass { cache, by }) => format!("index first_pass {cache} {by}"),
            Binding::Index(Index::Run { cache, offset, block }) => {
                format!("index run {cache} {offset} {block}")
            }
            Binding::Index(Index::Continues { cache, offset, block }) => {
                format!("index continues {cache} {offset} {block}")
            }
            Binding::Output(output) => format!("output {}", output.name()),
            Binding::Observed => "observed".into(),
            Binding::Patched => "patched".into(),
            Binding::Cotangent(Of::Value) => "cotangent".into(),
            Binding::Cotangent(Of::Stream) => "cotangent stream".into(),
            Binding::Cotangent(Of::Weight) => "cotangent weight".into(),
            Binding::Cotangent(Of::State(lifetime)) => {
                format!("cotangent {}", Binding::State(lifetime).words())
            }
            Binding::Cotangent(Of::Output(output)) => format!("cotangent output {}", output.name()),
        }
    }

    /// The words with which bindings begin.
    pub const WORDS: [&str; 15] = [
        "input",
        "stream",
        "batch",
        "weight",
        "pass",
        "turn",
        "buffer",
        "prepared",
        "state",
        "saved",
        "index",
        "output",
        "observed",
        "patched",
        "cotangent",
    ];
}

impl Lifetime {
    /// All of them.
    pub const ALL: [Lifetime; 8] = [
        Lifetime::Depth,
        Lifetime::Token(PerToken::Application),
        Lifetime::Token(PerToken::Row),
        Lifetime::Token(PerToken::Latest),
        Lifetime::Token(PerToken::First),
        Lifetime::Text,
        Lifetime::Set,
        Lifetime::Saved,
    ];

    /// As the text form prints it.
    pub fn name(self) -> &'static str {
        match self {
            Lifetime::Depth => "depth",
            Lifetime::Token(PerToken::Application) => "token",
            Lifetime::Token(PerToken::Row) => "row",
            Lifetime::Token(PerToken::Latest) => "latest",
            Lifetime::Token(PerToken::First) => "first",
            Lifetime::Text => "text",
            Lifetime::Set => "set",
            Lifetime::Saved => "saved",
        }
    }
}

impl Input {
    /// All of them.
    pub const ALL: [Input; 16] = [
        Input::Ids,
        Input::Targets,
        Input::Positions,
        Input::Segments,
        Input::Slots,
        Input::KeyPositions,
        Input::Asked,
        Input::Noise,
        Input::Draws,
        Input::Reference,
        Input::LossScale,
        Input::AuxScale,
        Input::LearningRate,
        Input::FirstCorrection,
        Input::SecondCorrection,
        Input::Clip,
    ];

    /// The name of the parameter and of its buffer.
    pub fn name(self) -> &'static str {
        match self {
            Input::Ids => "ids",
            Input::Targets => "targets",
            Input::Positions => "positions",
            Input::Segments => "segments",
            Input::Slots => "slots",
            Input::KeyPositions => "key_positions",
            Input::Asked => "asked",
            Input::Noise => "noise",
            Input::Draws => "draws",
            Input::Reference => "reference",
            Input::LossScale => "loss_scale",
            Input::AuxScale => "aux_scale",
            Input::LearningRate => "learning_rate",
            Input::FirstCorrection => "first_correction",
            Input::SecondCorrection => "second_correction",
            Input::Clip => "clip",
        }
    }

    /// The name of the parameter of [`Input::Draws`] for the attention of that number in an
    /// application.
    pub fn draws(number: u32) -> String {
        format!("{}.{number}", Input::Draws.name())
    }

    /// The number of an attention from the name of its parameter.
    pub fn drawn(name: &str) -> Option<u64> {
        name.strip_prefix(Input::Draws.name())?.strip_prefix('.')?.parse().ok()
    }
}

impl Output {
    /// All of them.
    pub const ALL: [Output; 6] =
        [Output::Loss, Output::Aux, Output::Taught, Output::Nll, Output::Logits, Output::Norm];

    /// The name of the result and of its buffer.
    pub fn name(self) -> &'static str {
        match self {
            Output::Loss => "loss",
            Output::Aux => "aux",
            Output::Taught => "taught",
            Output::Nll => "nll",
            Output::Logits => "logits",
            Output::Norm => "norm",
        }
    }
}

/// Which part of a model a tensor, a state or a dimension belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// The embedding table.
    Embedding,
    /// The output head.
    Head,
    /// The stream: norms that no component has.
    Stream,
    /// The component of that number in the model.
    Component(u32),
    /// The `skip` of that number in its layer.
    Skip(u32),
    /// The pool of that number in the architecture.
    Pool(u32),
    /// The saved stream of that number in the architecture.
    Saved(u32),
    /// The norm of that number among the terms of its layer.
    Norm(u32),
    /// The lanes around the unit of that number in its layer.
    Lanes(u32),
    /// The reading of the stream after the last layer.
    Output,
    /// Sources that units read: the embedding and their outputs.
    Sources,
    /// The loop around an application: what each of its passes has.
    Loop,
    /// The exit of a loop whose loss sees every pass.
    Exit,
    /// Choices of the `skip`s of a loop whose later passes choose among the tokens of earlier ones.
    Members,
    /// The choice of every token how many passes of a loop it makes.
    Choice,
    /// Keys and values along depth that components leave for all attentions that read them.
    Depths,
}
