//! First weights of a model from those of a model of another architecture.
//!
//! *In*: two models ([`Side`]), and how one comes from the other
//! ([`Transplant`](dreamc_dsl::spec::Transplant)). *Out*: [`Plan`], for every tensor of the new
//! model where it comes from and how, what of the donor is left over, and which parts compute the
//! same function at the start; [`values`], the numbers of one tensor. *Promise*: [`plan`] reads no
//! number and writes nothing; each tensor of the new model is said once; what cannot be decided is
//! an error that lists the choices.

mod apply;
mod depth;
mod fit;
mod latent;
mod propose;
mod rules;
mod same;
mod side;
mod svd;

pub use apply::{Read, differences, values};
pub use latent::{Latent, Matrix, spectrum};
pub use same::{Claim, Same};
pub use side::{Layer, Place, Side, Weight};
pub use svd::{Decomposition, decompose};

use dreamc_compiler::CompileError;
use dreamc_compiler::lower::ends;
use dreamc_dsl::spec::{How, Transplant};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::Range;
use thiserror::Error;

/// Where every tensor of a model comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// One for each tensor of the model, in its order.
    pub moves: Vec<Move>,
    /// Tensors of the donor that nothing comes from.
    pub left: Vec<String>,
    /// For each application of a layer, the layers of the donor that it takes.
    pub depths: Vec<Taken>,
    /// Parts that begin as the donor's.
    pub claims: Vec<Claim>,
}

/// Where one tensor comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// Its name.
    pub to: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Tensors of the donor, each with its share of the mean; none for what begins anew.
    pub from: Vec<Source>,
    /// The steps on their mean, in order.
    pub steps: Vec<Step>,
    /// Deviation of normal numbers that are added, as a share of the tensor's own.
    pub noise: f64,
}

/// A tensor of the donor, or some rows of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// Its name.
    pub name: String,
    /// The rows that are taken; all where absent.
    pub rows: Option<Range<u64>>,
    /// Its share.
    pub share: f64,
}

/// A step on numbers of the donor.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// They are those of the recipe.
    Fresh,
    /// They are zero.
    Zero,
    /// The first of every dimension.
    Slice,
    /// They stand first; after them are those of the recipe, or zeros.
    Pad {
        /// Whether zeros are after them.
        zero: bool,
    },
    /// Means of neighbouring key and value heads.
    Group(Heads),
    /// Every key and value head several times.
    Repeat(Heads),
    /// Means of this number of neighbouring matrices.
    Merge(u64),
    /// The whole this number of times.
    Tile(u64),
    /// Each source is one of the stacked matrices, in order.
    Stack,
    /// A row of the donor's for every token of this vocabulary; -1 for the recipe's.
    Tokens(#[serde(skip)] Vec<i64>),
    /// A factor of what each source, in order, differs from the mean of `base` by.
    Factor {
        /// Tensors of the donor whose mean is the matrix that it is added to.
        base: Vec<Source>,
        /// Rows of `A`.
        rank: u64,
        /// Whether it is `A`, `[rank, in]`, or `B`, `[out, rank]`.
        first: bool,
    },
    /// A matrix of latent attention, of the fused one of queries, keys and values (2502.14837,
    /// section 3).
    Latent(Latent),
}

/// Heads whose keys and values are averaged or repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Heads {
    /// Query heads, whose rows stay.
    pub queries: u64,
    /// Key heads of the donor.
    pub from: u64,
    /// Key heads of the model.
    pub to: u64,
    /// Rows of a head.
    pub size: u64,
}

/// The donor's layers that an application takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Taken {
    /// The sets of weights, each with its share; none for an application that begins anew.
    pub layers: Vec<(usize, f64)>,
    /// Whether what it adds to the stream is zero at first.
    pub silent: bool,
}

/// The token of a specification that an error is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// None of it.
    Nowhere,
    /// A field: `transplant.depth`, `transplant.map[0].to`, `model.vocab`.
    Field(String),
}

/// Why there is no plan.
#[derive(Debug, Error)]
pub enum TransplantError {
    /// One of the two does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// A transplant that cannot be, or can be in several ways.
    #[error("{message}")]
    Refused {
        /// A stable name.
        code: &'static str,
        /// The mistake.
        message: String,
        /// Help: the right way.
        help: String,
        /// The token.
        at: At,
    },
    /// A tensor cannot be read.
    #[error("{0}")]
    Read(String),
}

impl TransplantError {
    pub(crate) fn new(code: &'static str, at: At, message: String, help: impl Into<String>) -> Self {
        TransplantError::Refused { code, message, help: help.into(), at }
    }
}

/// How the two vocabularies correspond.
#[derive(Clone, Debug, PartialEq)]
pub enum Vocabulary {
    /// Token for token.
    Same,
    /// For every token of the model the donor's token of the same text, -1 where it has none.
    ByText(Vec<i64>),
    /// Nobody knows.
    Unknown,
}

/// Where every tensor of `new` comes from.
pub fn plan(
    new: &Side,
    old: &Side,
    how: &Transplant,
    vocabulary: &Vocabulary,
) -> Result<Plan, TransplantError> {
    let tokens = same_tokens(new, old, vocabulary)?;
    let rules = rules::Rules::new(new, &how.map)?;
    let covered = new.tensors.iter().all(|t| t.set().is_none() || rules.of(t).is_some());
    let depths = depth::taken(new, old, how.depth.as_ref(), covered)?;
    let mut moves = vec![];
    for weight in &new.tensors {
        let mut found = match rules.of(weight) {
            Some(rule) => rules.moved(rule, weight, (new, old))?,
            None => propose::proposed(weight, (new, old), &depths)?,
        };
        if let (Some(tokens), ends::part::TABLE, [_]) = (&tokens, weight.part, &found.from[..]) {
            found.steps = vec![Step::Tokens(tokens.clone())];
        }
        moves.push(found);
    }
    rules.used(&moves, old)?;
    let used: BTreeSet<&str> = moves.iter().flat_map(|m| &m.from).map(|s| s.name.as_str()).collect();
    let left = old.tensors.iter().filter(|t| !used.contains(t.name.as_str())).map(|t| t.name.clone());
    let left = left.collect();
    let claims = same::claims((new, old), &moves, &depths);
    Ok(Plan { moves, left, depths, claims })
}

/// The rows of the donor's tables for those of the model's, where they are not the same.
fn same_tokens(new: &Side, old: &Side, vocabulary: &Vocabulary) -> Result<Option<Vec<i64>>, TransplantError> {
    let (ours, theirs) = (new.model.vocab, old.model.vocab);
    let at = At::Field("model.vocab".into());
    match vocabulary {
        Vocabulary::Same | Vocabulary::Unknown if ours == theirs => Ok(None),
        Vocabulary::Same | Vocabulary::Unknown => Err(TransplantError::new(
            "other-vocabulary",
            at,
            format!("the vocabulary has {ours} tokens and the donor's {theirs}"),
            "tokens are mapped by their texts where both models name a tokenizer: write `data.tokenizer`, or take the donor's vocabulary",
        )),
        Vocabulary::ByText(tokens) => {
            let known = tokens.iter().filter(|t| **t >= 0).count();
            if known == 0 {
                let message = format!("none of the {ours} tokens is one of the donor's {theirs}");
                return Err(TransplantError::new(
                    "other-vocabulary",
                    at,
                    message,
                    "take the donor's tokenizer",
                ));
            }
            let same = ours == theirs && tokens.iter().enumerate().all(|(i, t)| *t == i as i64);
            Ok((!same).then(|| tokens.clone()))
        }
    }
}

/// The word of the language for a way.
pub(crate) fn word(how: How) -> &'static str {
    match how {
        How::Copy => "copy",
        How::Slice => "slice",
        How::Pad => "pad",
        How::Group => "group",
        How::Tile => "tile",
        How::Factor => "factor",
        How::Fresh => "fresh",
        How::Zero => "zero",
    }
}

impl Move {
    /// The way in words: `mean of 3, factor of rank 8`.
    pub fn words(&self) -> String {
        let mut words = vec![];
        let stacked = self.steps.iter().any(|s| matches!(s, Step::Stack | Step::Factor { .. }));
        let weighted = self.from.windows(2).any(|pair| pair[0].share != pair[1].share);
        match self.from.len() {
            0 => {}
            1 if self.steps.is_empty() => words.push("copy".into()),
            1 => {}
            _ if stacked => {}
            2 if weighted => words.push("interpolate".into()),
            n => words.push(format!("mean of {n}")),
        }
        words.extend(self.steps.iter().map(Step::words));
        if self.noise > 0.0 {
            words.push(format!("noise {}", self.noise));
        }
        words.join(", ")
    }
}

impl Step {
    fn words(&self) -> String {
        match self {
            Step::Fresh => "fresh".into(),
            Step::Zero => "zero".into(),
            Step::Slice => "slice".into(),
            Step::Pad { zero: true } => "pad with zeros".into(),
            Step::Pad { zero: false } => "pad".into(),
            Step::Group(heads) => format!("group {} heads into {}", heads.from, heads.to),
            Step::Repeat(heads) => format!("tile {} heads to {}", heads.from, heads.to),
            Step::Merge(n) => format!("group by {n}"),
            Step::Tile(n) => format!("tile {n}"),
            Step::Stack => "stack".into(),
            Step::Tokens(tokens) => {
                let known = tokens.iter().filter(|t| **t >= 0).count();
                format!("by token text, {known} of {}", tokens.len())
            }
            Step::Factor { rank, first: true, .. } => format!("factor A of rank {rank}"),
            Step::Factor { rank, first: false, .. } => format!("factor B of rank {rank}"),
            Step::Latent(latent) => latent.words(),
        }
    }
}
