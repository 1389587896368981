//! The checked suite: a comparison of variants with a baseline.

use serde::Serialize;

use crate::source::SourceMap;
use crate::spec::{Data, Eval, MatchFields, Train, TransferRule};

/// A suite file, defaults filled in.
#[derive(Clone, Debug, Serialize)]
pub struct Suite {
    /// Its name.
    pub name: String,
    /// The baseline's spec. Paths are relative to the suite's folder.
    pub baseline: String,
    /// The arms that are compared with it; with none, the baseline is trained alone.
    pub variants: Vec<Variant>,
    /// Data of all arms, in place of their own.
    pub data: Option<Data>,
    /// Recipe of all arms, in place of their own.
    pub train: Option<Train>,
    /// Evaluation of all arms, in place of their own.
    pub eval: Option<Eval>,
    /// Quantities that must be equal between the arms.
    pub equal: Equal,
    /// Every arm is trained once for each.
    pub seeds: Vec<u64>,
    /// Values of fields that every arm tries, least first.
    pub sweep: Vec<(String, Vec<f64>)>,
    /// Whether the best value may stand at an end of its list.
    pub sweep_edge: bool,
    /// Sizes and budgets that the arms are compared at.
    pub ladder: Option<Ladder>,
    /// Finds the token of a field: `variants[0].spec`, `equal.flops`, …
    #[serde(skip)]
    pub sources: SourceMap,
}

impl PartialEq for Suite {
    fn eq(&self, other: &Suite) -> bool {
        let Suite {
            name,
            baseline,
            variants,
            data,
            train,
            eval,
            equal,
            seeds,
            sweep,
            sweep_edge,
            ladder,
            sources: _,
        } = self;
        (name, baseline, variants, data, train, eval, equal, seeds, (sweep, sweep_edge, ladder))
            == (
                &other.name,
                &other.baseline,
                &other.variants,
                &other.data,
                &other.train,
                &other.eval,
                &other.equal,
                &other.seeds,
                (&other.sweep, &other.sweep_edge, &other.ladder),
            )
    }
}

/// Cells of equal FLOPs: every size at every budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ladder {
    /// Sizes, in the order of the file.
    pub sizes: Vec<Size>,
    /// FLOPs of training, least first.
    pub budgets: Vec<f64>,
    /// Whether an arm stops that is worse than the baseline at both of the two smallest cells.
    pub gate: bool,
    /// Share of a cell's steps that decay, in a branch of one trunk for all budgets of a size.
    pub cooldown: Option<f64>,
    /// The rule by which sizes share the rate of the smallest cell.
    pub transfer: Option<TransferRule>,
    /// Divides the number of values of the sweep that a cell tries: the best go on to the next.
    pub halving: Option<u64>,
    /// Whether the carried rate is tried against its half and its double at a larger size.
    pub recheck: bool,
}

/// A size of a ladder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// Its name.
    pub name: String,
    /// Values of `let` names or fields of the specs.
    pub values: Vec<(String, f64)>,
}

/// One arm of a suite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Variant {
    /// Its name; that of its model where absent.
    pub name: Option<String>,
    /// Its spec.
    pub spec: String,
    /// Overrides of the spec, as `--set` takes them: `ea.count=512`.
    pub set: Vec<String>,
    /// Fields that vary until the arm meets the baseline.
    #[serde(rename = "match")]
    pub matching: Option<MatchFields>,
}

/// Quantities that must be equal between the arms. A number is the largest relative difference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Equal {
    /// FLOPs per token.
    pub flops: Option<f64>,
    /// FLOPs per token at the shares of tokens that routers let through after training.
    pub flops_processed: Option<f64>,
    /// Training FLOPs per token.
    pub training: Option<f64>,
    /// FLOPs of all training.
    pub budget: Option<f64>,
    /// Whether these count the donor of a transplant.
    pub donor: bool,
    /// Parameters.
    pub parameters: Option<f64>,
    /// Memory of generation.
    pub memory: Option<f64>,
    /// Training tokens.
    pub tokens: bool,
    /// Data, by hash.
    pub data: bool,
    /// Order of the examples.
    pub order: bool,
    /// Tokenizer.
    pub tokenizer: bool,
    /// Fields that every arm tuned alike, so that their values may differ.
    pub tuned: Vec<String>,
    /// Learning rate and its schedule.
    pub schedule: bool,
    /// Optimizer, decay and clipping.
    pub optimizer: bool,
    /// Batch and sequence length.
    pub batch: bool,
    /// Storage and products.
    pub precision: bool,
    /// Seeds.
    pub seeds: bool,
}
