//! `dreamc merge`: adapters and their base as one model.

use crate::arguments::BaseArguments;
use crate::command::import::name;
use crate::command::quantize::beside;
use clap::Args;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_runtime::adapt::merge;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::say;
use dreamc_study::show::bytes;
use std::path::{Path, PathBuf};

/// Make one model of adapters and their base
#[derive(Args)]
#[command(after_help = "\
Every matrix becomes W + alpha/rank B A, in the type that it has in the base's file; packed ones become f32. OUT is a model like an
import, which `generate`, `serve`, `export hf` and `quantize` read. Without merging every command reads adapters beside their base.

Examples:
  dreamc merge runs/lora-001 -o imports/tuned
  dreamc export hf imports/tuned -o exports/tuned")]
pub struct Arguments {
    /// A run folder, a checkpoint or an imported adapter
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Where it goes; `imports/MODEL-merged` by default
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,

    /// Replace the model that is in OUT
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    base: BaseArguments,
}

pub fn run(a: Arguments) -> Done {
    let trained = Trained::open(&a.model, a.base.moved(), &[], Rewriting::off())?;
    let out = match &a.out {
        Some(out) => out.clone(),
        None => Path::new("imports").join(format!("{}-merged", name(&a.model)?)),
    };
    let kept = beside(&trained)?;
    let merged = merge(&trained.spec, &trained.tensors, &out, (&kept, a.force))
        .map_err(|error| Failure::Error(Box::new(error)))?;
    let (out, size) = (out.display(), bytes(merged.bytes));
    say!("{}: adapters are in {} matrices, {size}", trained.spec.model.name, merged.matrices)?;
    if merged.unpacked > 0 {
        say!("  note  {} packed matrices are f32 now", merged.unpacked)?;
    }
    say!("left in {out}; next:\n  dreamc eval {out} --against {}", a.model.display())?;
    Ok(())
}
