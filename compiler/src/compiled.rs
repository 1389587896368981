//! The result of compilation, for the runtime.

use crate::bind::{Input, Output, Owner, Part};
use crate::ir::DType;
use crate::probe::Probed;
use crate::program::{BufferId, Plan, ProgramKey, Task};
use crate::teach::Taught;
use dreamc_dsl::spec::Shard;

/// A compiled model: the launch list, and the buffer of every tensor.
///
/// Values that host and programs exchange ([`Input`], [`Output`]) are buffers of space `Io`:
/// [`Compiled::input`] and [`Compiled::output`] give them, for each [`Entry`] its own. A program
/// has only those that it uses. The host zeroes `loss` and `aux` before a step.
///
/// Programs: `backward` (and `backward@{depth}` for other recurrent depths) (one micro-batch; adds
/// to the gradients), `norm` (global gradient norm of the step; to be looked at and then used by
/// `update`), `update` (one optimizer step; leaves gradients and counts zero), `evaluate` (forward
/// alone: `nll`, and `logits` where asked for).
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The launch list, of all uses of the model.
    pub plan: Plan,
    /// The name of this use, see [`Compiled::program`].
    pub(crate) of: &'static str,
    /// Every tensor of the model, in checkpoint order.
    pub tensors: Vec<Tensor>,
    /// Total depth `L`: applications of layers.
    pub depth: u64,
    /// Values that host and programs exchange.
    pub(crate) ends: Vec<(Entry, End, BufferId)>,
    /// The streams before each application of a layer or a statement, and after the last.
    pub(crate) streams: Vec<(Entry, BufferId)>,
    /// States of layers that outlive a call.
    pub caches: Vec<StateBuffer>,
    /// All that decoding keeps of sequences from program to program, in plans with caches.
    pub sequence: Vec<SequenceState>,
    /// Observations that `evaluate` leaves for the host, in plans that ask for them.
    pub observed: Vec<Observed>,
    /// Values that `evaluate` leaves for the host or takes from it, in plans that ask for them.
    pub probed: Vec<Probed>,
    /// Values that training pulls towards those of a teacher.
    pub taught: Vec<Taught>,
    /// Tensors that are cut over ranks, where this plan is for the part of one: the optimizer's
    /// states are of the use that trains, weights of all uses.
    pub cut: Shard,
    /// Seed of the recipe; it decides the noise that streams start with and the weights that
    /// attentions drop.
    pub seed: u64,
    /// How many attentions of an application drop weights, at the most: application `a` reads
    /// instance `a · draws + n` of [`Input::Draws`] for the `n`-th.
    pub draws: u64,
    /// Tokens a sequence may have, in plans with caches.
    pub places: Option<u64>,
    /// Bytes of the buffers that this use has alone: neither weights nor what belongs to them, nor
    /// values of one program.
    pub own: u64,
    /// Values that bodies keep for the way back and could compute again, the most first.
    pub kept: Vec<Kept>,
}

/// Values that the applications of a body keep for the way back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The body's name.
    pub body: String,
    /// Bytes of all applications but one.
    pub bytes: u64,
    /// Whether it is computed again, so that they are not needed.
    pub again: bool,
}

/// Whose inputs, results and streams a buffer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Entry {
    /// Of whole sequences: training and evaluation.
    #[default]
    Whole,
    /// Of `prefill`, which reads texts into the caches, and gives the logits after one token of
    /// each.
    Prefill,
    /// Of `prefill_every`, which does the same and gives the logits after every token.
    Every,
    /// Of `decode`, which adds a token to each.
    Decode,
}

impl Entry {
    /// All of them.
    pub const ALL: [Entry; 4] = [Entry::Whole, Entry::Prefill, Entry::Every, Entry::Decode];

    /// Its forward program.
    pub fn task(self) -> Task {
        match self {
            Entry::Whole => Task::Evaluate,
            Entry::Prefill => Task::Prefill,
            Entry::Every => Task::PrefillEvery,
            Entry::Decode => Task::Decode,
        }
    }

    /// The prefix of the names of its buffers.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Entry::Whole => "",
            Entry::Prefill => "prefill.",
            Entry::Every => "prefill_every.",
            Entry::Decode => "decode.",
        }
    }
}

/// Something that host and programs exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The host gives it.
    Input(Input),
    /// The host reads it.
    Output(Output),
}

impl End {
    pub(crate) fn name(self) -> &'static str {
        match self {
            End::Input(input) => input.name(),
            End::Output(output) => output.name(),
        }
    }
}

/// A state of a component that outlives a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBuffer {
    /// For which programs.
    pub entry: Entry,
    /// Of what.
    pub owner: Owner,
    /// Which of its states.
    pub part: Part,
    /// The body whose applications have it, by its number; none for a state that bodies share.
    pub body: Option<usize>,
    /// Where it is: one instance, or one for each application of a body.
    pub buffer: BufferId,
}

/// A state that decoding keeps of sequences from program to program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceState {
    /// Its name inside its layer.
    pub name: String,
    /// Where it is: an instance for each application that has one of its own.
    pub buffer: BufferId,
    /// How many instances there are.
    pub instances: u64,
    /// Texts at once: each has a row of every instance.
    pub rows: u64,
    /// Its type.
    pub dtype: DType,
    /// How long its rows are, and what they hold.
    pub per: Per,
    /// Sizes of an entry, or of all that a row holds where it is per text.
    pub shape: Vec<u64>,
}

/// Whether a state is of tokens or of their text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Per {
    /// Positions of the tokens that have entries, side by side; -1 after them. A row of a text that
    /// begins is -1.
    Position {
        /// Entries of a row.
        entries: u64,
    },
    /// An entry is of one token: it is appended, and is read only where something says which token
    /// it is of.
    Token {
        /// Entries of a row.
        entries: u64,
        /// The states of positions that say so, by their numbers in [`Compiled::sequence`].
        positions: Vec<usize>,
        /// Whether an entry is, in some instance, of the token whose position is its number.
        by_place: bool,
    },
    /// Of the text so far: overwritten. A row of a text that begins is zero.
    Text,
}

impl SequenceState {
    /// Entries of a row; one where it is per text.
    pub fn entries(&self) -> u64 {
        match self.per {
            Per::Position { entries } | Per::Token { entries, .. } => entries,
            Per::Text => 1,
        }
    }

    /// Elements of an entry.
    pub fn width(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one text in all instances, with every entry.
    pub fn bytes(&self) -> u64 {
        self.entries() * self.width() * self.dtype.bytes() * self.instances
    }
}

impl Compiled {
    /// Which program of the plan does that for this use.
    pub fn program(&self, task: Task) -> ProgramKey {
        ProgramKey { of: self.of, task }
    }

    /// Whether this use has a program.
    pub fn has(&self, task: Task) -> bool {
        self.plan.programs.contains_key(&self.program(task))
    }

    /// The buffer of something that the host gives; none where the programs do not read it.
    pub fn input(&self, entry: Entry, input: Input) -> Option<BufferId> {
        self.end(entry, End::Input(input))
    }

    /// The buffer of something that the host reads; none where the programs do not make it.
    pub fn output(&self, entry: Entry, output: Output) -> Option<BufferId> {
        self.end(entry, End::Output(output))
    }

    fn end(&self, entry: Entry, end: End) -> Option<BufferId> {
        self.ends.iter().find(|(e, found, _)| (*e, *found) == (entry, end)).map(|(_, _, id)| *id)
    }

    /// The streams before each application of a layer or a statement, and after the last.
    pub fn stream(&self, entry: Entry) -> Option<BufferId> {
        self.streams.iter().find(|(e, _)| *e == entry).map(|(_, id)| *id)
    }

    /// The buffers of a state, one for each body that has it; of one that bodies share, one.
    pub fn caches(&self, entry: Entry, part: Part) -> impl Iterator<Item = &StateBuffer> {
        self.caches.iter().filter(move |c| (c.entry, c.part) == (entry, part))
    }
}

/// An observation of a layer's routers and depth attentions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Observation {
    /// `i32[batch, seq, k]`: experts that a router chose; more than there are for a token that
    /// skips the component.
    Chosen,
    /// `f32[batch, seq]`: entropy in nats of a router's scores as shares of their sum.
    Entropy,
    /// `f32[batch, seq, heads, size]`: queries of a depth attention, rotated; its keys are in a
    /// [`StateBuffer`].
    Queries,
    /// `f32[batch, seq]`: what a `skip` decided: 2 for a token that takes part, 1 for one that does
    /// not, 0 for one that never came to it, because it takes no part in what is around.
    Taking,
    /// `f32[batch, seq]`: the number that a `skip` decides by; 0 for tokens that never came to it.
    Score,
    /// `f32[batch, seq]`: Euclidean norm of what a `skip` reads; 0 for tokens that never came to
    /// it.
    Norm,
    /// `f32[batch, seq]`: loss in nats of the stream after a pass of a loop whose loss sees all
    /// passes, for each pass but the last.
    Loss,
    /// `f32[batch, seq]`: the share `q` of a token that leaves after that pass.
    Share,
}

impl Observation {
    /// Those of a component.
    pub(crate) const OF_COMPONENT: [Observation; 3] =
        [Observation::Chosen, Observation::Entropy, Observation::Queries];

    /// Those of a `skip`.
    pub(crate) const OF_SKIP: [Observation; 3] = [Observation::Taking, Observation::Score, Observation::Norm];

    /// Those of an exit.
    pub(crate) const OF_EXIT: [Observation; 2] = [Observation::Loss, Observation::Share];

    /// The last word of the name of its buffer.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Observation::Chosen => "chosen",
            Observation::Entropy => "entropy",
            Observation::Queries => "queries",
            Observation::Taking => "taking",
            Observation::Score => "score",
            Observation::Norm => "norm",
            Observation::Loss => "loss",
            Observation::Share => "share",
        }
    }
}

/// An observation of a component, of a `skip` or of an exit, wherever it is applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The component's name; `skip.{j}` for the `j`-th `skip` of a layer, as its tensors are
    /// called.
    pub component: String,
    /// Which part of the model it is of.
    pub owner: Owner,
    /// Its kind.
    pub what: Observation,
    /// Its buffer: an instance for each depth of the model.
    pub buffer: BufferId,
    /// Where the component is applied.
    pub applications: Vec<Application>,
}

/// An application of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Application {
    /// Depth in the whole model, from 0.
    pub depth: u64,
    /// Which of the model's sets of weights it uses: `layers.{set}`.
    pub set: u64,
    /// How many applications before this one contain the component: its row in a depth cache. 0 for
    /// a `skip`.
    pub row: u64,
}

/// A named tensor (`docs/dev/semantics.md` section 11) and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in checkpoints.
    pub name: String,
    /// Its shape in checkpoints.
    pub shape: Vec<u64>,
    /// Which part of the model it belongs to.
    pub owner: Owner,
    /// Which of its tensors it is.
    pub part: Part,
    /// Its kind.
    pub kind: TensorKind,
    /// How it begins.
    pub init: Init,
    /// Buffer of the values.
    pub weight: BufferId,
    /// Buffer of the gradient, where one is computed.
    pub gradient: Option<BufferId>,
    /// The optimizer's states by name, where it is trained: `m` and `v` of AdamW.
    pub states: Vec<(&'static str, BufferId)>,
    /// Buffer of selection counts, for a balancing bias.
    pub counts: Option<BufferId>,
    /// Which instance of weight, gradient and counts.
    pub instance: u64,
    /// Which of its numbers have states in this plan: all of them, unless the optimizer's states
    /// are cut over ranks.
    pub kept: std::ops::Range<u64>,
    /// The place in the states' buffers of the first that is kept, in elements.
    pub first_kept: u64,
    /// Whether the buffers of weight and gradient have the numbers that are kept alone, as those of
    /// states have them.
    pub cut: bool,
    /// Successive ranks that have its experts together, each as many, where that is what is cut;
    /// ranks as far apart have the same ones. 1 for all else.
    pub owners: u64,
}

impl Tensor {
    /// How many numbers it has.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// How many experts it has a matrix of, where ranks can share them.
    pub fn experts(&self) -> Option<u64> {
        let factor = self.part.adapter().is_some();
        match self.shape[..] {
            [experts, _, _] if self.kind == TensorKind::Routed && !factor => Some(experts),
            _ => None,
        }
    }
}

/// The kind of a tensor, for counting, decay and freezing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorKind {
    /// The embedding table.
    Embedding,
    /// The output head.
    Head,
    /// A matrix every token uses.
    Matrix,
    /// A routed mixture of matrices.
    Routed,
    /// The shared expert of a mixture.
    Shared,
    /// A router's matrices and gains.
    Router,
    /// A vector that no matmul reads: a norm's gain, a bias, the sinks of a softmax; and the
    /// numbers by which the stream is wired.
    Gain,
    /// A tensor of a statement, or one of a definition that no product reads: it does not decay.
    Steady,
    /// A balancing bias: no gradient, moved by balancing.
    Balance,
}

/// How a tensor begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with this standard deviation.
    Normal(f64),
    /// The same number everywhere.
    Constant(f64),
    /// A matrix whose columns from `from` on are the identity, the others zero; `columns` is their
    /// number, any for a square matrix.
    Identity {
        /// Columns.
        columns: u64,
        /// The first column of the identity.
        from: u64,
    },
    /// In row `t` 1 in place `place + t · step`, counted around, else 0.
    Pick {
        /// Of the first row.
        place: u64,
        /// From row to row.
        step: u64,
        /// Elements of a row.
        columns: u64,
    },
    /// Uniform between two numbers.
    Uniform(f64, f64),
    /// The same number everywhere, by the depth of the first application of the set of weights: the
    /// first number where that is 0, the second where it is the last depth, evenly between.
    Ramp(f64, f64),
    /// The logarithm of a number that is uniform between two.
    LogUniform(f64, f64),
    /// The inverse of softplus at a number whose logarithm is uniform between those of two.
    InverseSoftplusUniform(f64, f64),
}
