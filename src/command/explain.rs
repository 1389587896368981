//! `dreamc explain`: what rewriting does to a specification, and why.

use crate::arguments::{RewriteArguments, SpecArguments};
use clap::{Args, value_parser};
use dreamc_compiler::{Options, compile_with_report};
use dreamc_runtime::generate::Writing;
use dreamc_runtime::train::prepare;
use dreamc_study::failure::Done;
use dreamc_study::say;

/// Explain which rewriting rules fire where, what each saves, and why rewriting stopped
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc explain model.yaml
  dreamc explain model.yaml --writing
  dreamc explain model.yaml --target h100 --json
  dreamc explain model.yaml --only merge-shared --proof")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    /// Show egg's proof of each equality
    #[arg(long)]
    proof: bool,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    /// Explain what writing runs, over caches, instead of training and evaluation
    #[arg(long, conflicts_with = "sequence")]
    writing: bool,

    /// Sequences in a batch; a micro-batch of the recipe by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 20))]
    batch: Option<u64>,

    /// Tokens in a sequence; the recipe's by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..1 << 24))]
    sequence: Option<u64>,
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    let rows = if a.writing { 1 } else { spec.train.batch / spec.train.accumulate.max(1) };
    let batch = a.batch.unwrap_or(rows).max(1);
    let sequence = a.sequence.unwrap_or_else(|| prepare::sequence(&spec));
    let mut rewrite = a.rewriting.rewriting()?;
    rewrite.proofs = a.proof;
    let options = match a.writing {
        true => Writing { rows: batch, rewrite, ..Writing::default() }.options(&spec),
        false => {
            let segments = prepare::masked(&spec);
            Options { train: true, segments, rewrite, ..prepare::forward(batch, sequence) }
        }
    };
    let (_, report) = compile_with_report(&spec, &options)?;
    if a.json {
        say!("{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(());
    }
    let target = options.rewrite.target.name;
    say!(
        "{} for {target}, {batch} × {} tokens, {:.1} ms\n",
        spec.model.name,
        options.sequence,
        report.micros() as f64 / 1e3
    )?;
    say!("{report}")?;
    Ok(())
}
