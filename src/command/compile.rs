//! `dreamc compile`: see what the compiler makes of a specification.

use crate::failure::Done;
use crate::rewriting::RewriteArguments;
use crate::say;
use crate::spec::SpecArguments;
use clap::{Args, ValueEnum};
use dreamc_compiler::architecture::Architecture;
use dreamc_compiler::lower::{Shape, lower};
use dreamc_compiler::{Options, compile};
use dreamc_runtime::train::prepare;
use std::io::Write;

/// Print what the compiler makes of a specification
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc compile model.yaml --emit ir
  dreamc compile model.yaml --emit plan
  dreamc compile model.yaml --emit tensors")]
pub struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    /// What to print
    #[arg(long, value_enum, default_value_t = Emit::Plan)]
    emit: Emit,

    /// Sequences in a batch; a micro-batch of the recipe by default
    #[arg(long, value_name = "N")]
    batch: Option<u64>,

    /// Tokens in a sequence; the recipe's by default
    #[arg(long, value_name = "N")]
    sequence: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Emit {
    /// Names, shapes and first values of the tensors
    Tensors,
    /// The tensor graph as lowered, one function for each distinct layer
    Ir,
    /// Buffers and launch lists
    Plan,
}

pub fn run(a: Arguments) -> Done {
    let spec = a.spec.load()?;
    let batch = a.batch.unwrap_or(spec.train.batch / spec.train.accumulate.max(1));
    let sequence = a.sequence.unwrap_or_else(|| prepare::sequence(&spec));
    let segments = prepare::masked(&spec);
    let rewrite = a.rewriting.rewriting()?;
    let options = Options { train: true, segments, rewrite, ..prepare::forward(batch, sequence) };
    if a.emit == Emit::Ir {
        let architecture = Architecture::new(&spec.model, None)?;
        let lowered = lower(&architecture, Shape { batch, sequence, segments, cache: None })?;
        write!(std::io::stdout(), "{}", lowered.module)?;
        return Ok(());
    }
    let compiled = compile(&spec, &options)?;
    match a.emit {
        Emit::Tensors => {
            for t in &compiled.tensors {
                say!("{:<48} {:<24} {:?}", t.name, format!("{:?}", t.shape), t.init)?;
            }
        }
        Emit::Ir | Emit::Plan => write!(std::io::stdout(), "{}", compiled.plan)?,
    }
    Ok(())
}
