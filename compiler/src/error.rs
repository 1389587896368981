//! Reasons for which a checked spec does not become a program.

use crate::ir::TypeError;
use thiserror::Error;

/// Why compilation failed.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum CompileError {
    /// A part of the language that this stage cannot compile.
    #[error("{0} cannot be compiled yet")]
    Unsupported(&'static str),
    /// Caches were asked of a model that decides by later tokens which tokens skip.
    #[error(
        "this model can be trained and evaluated but not sampled: a `skip` of it looks at later tokens; give a top-k \
         router an inference rule, such as `causal bce 0.01`, and let a threshold decide by `level token`"
    )]
    LooksAhead,
    /// Options of one use that exclude one another.
    #[error("`{0}` does not go with `{1}` in one use of a model: compile two uses together")]
    Exclude(&'static str, &'static str),
    /// Another depth was asked of a model that has no single outermost `recur`.
    #[error("only a model with exactly one outermost `recur` can be run at another depth")]
    Depth,
    /// More passes were asked of a loop than have weights of their own.
    #[error(
        "every pass of this loop has weights of its own (`embed`, `lora`, lanes, a router), and there are {most} passes"
    )]
    Passes {
        /// Passes that have weights.
        most: u64,
    },
    /// The base of a `transfer` has no such weight, or one of other dimensions.
    #[error(
        "the base of `train.transfer` has no `{0}` of as many dimensions: a base has the parts of the model in other sizes"
    )]
    Base(String),
    /// Tokens were to leave a loop that has no gate.
    #[error("tokens leave a `recur` by its gate, and this model has none with `exit gate`")]
    NoGate,
    /// Tokens were to leave a loop in which some of them skip a part.
    #[error(
        "tokens that skip a part have no keys of their last pass to leave: with a `skip` in its loop a model runs all passes"
    )]
    LeavesSkip,
    /// Tokens were to leave a loop whose components read sources.
    #[error(
        "under `stream attend` components read all outputs, and a token that left would have none: such a model runs all passes"
    )]
    LeavesSources,
    /// A share of a token that cannot be exceeded, or below 0.
    #[error("a token leaves where more than a share of it has left, from 0 to below 1; {0} is no such share")]
    Share(f64),
    /// A size does not fit into 64 bits.
    #[error("{0} is too large: it does not fit into 64 bits")]
    Overflow(&'static str),
    /// A pass built an operation that does not fit its operands.
    #[error("internal error, please report it: {0}")]
    Type(#[from] TypeError),
    /// A pass met a graph that it cannot schedule.
    #[error("internal error, please report it: {0}")]
    Schedule(String),
    /// Rewriting broke one of its own promises.
    #[error("internal error, please report it: rewriting {0}")]
    Rewrite(String),
    /// A pass left a function that is not well formed.
    #[error("internal error, please report it: {pass} left a function that is not well formed: {problem}")]
    Pass {
        /// Its name.
        pass: &'static str,
        /// The mistake.
        problem: String,
    },
    /// Ranks cannot share the experts of a mixture equally.
    #[error(
        "{team} ranks cannot own the {experts} experts of `{tensor}` equally: make `train.parallel.experts` divide the experts of every mixture"
    )]
    Experts {
        /// The name of its matrices in a layer.
        tensor: String,
        /// How many it has.
        experts: u64,
        /// The ranks that own them together.
        team: u64,
    },
    /// Ranks were to share experts that there are not.
    #[error("`train.parallel.experts` shares the experts of mixtures over ranks, and this model has none")]
    NoExperts,
    /// Experts that ranks share are read in a way that asks for all of them.
    #[error(
        "experts cannot be shared by ranks where more than grouped products touches them: {what}; leave `train.parallel.experts` out"
    )]
    ExpertsRead {
        /// The launch, and the weight.
        what: String,
    },
    /// Training does not fit.
    #[error("training takes at least {least} bytes, and may take {most}")]
    Memory {
        /// Bytes that it may take.
        most: u64,
        /// Bytes with everything computed again that can be.
        least: u64,
    },
    /// Nothing inside the model has that name.
    #[error("nothing in the model is called `{name}`: {nearest}")]
    Point {
        /// The name or pattern asked for.
        name: String,
        /// The nearest names, as a sentence.
        nearest: String,
    },
    /// A value that cannot be given from outside.
    #[error("`{name}` can be looked at, not changed: {reason}")]
    Fixed {
        /// Its name.
        name: String,
        /// Why, and what can be changed instead.
        reason: &'static str,
    },
    /// A value that no teacher can teach.
    #[error("`{name}` cannot be matched: {reason}")]
    Untaught {
        /// Its name.
        name: String,
        /// Why.
        reason: &'static str,
    },
    /// No rewriting rule has that name.
    #[error("there is no rule `{name}`; the rules are {known}")]
    Rule {
        /// The name asked for.
        name: String,
        /// All names.
        known: String,
    },
}
