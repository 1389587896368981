//! `dreamc import`: models of other programs.

use crate::command::quantize::beside;
use clap::{Args, Subcommand};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_hf::gguf;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::number::grouped;
use dreamc_study::say;
use dreamc_study::show::bytes;
use std::path::{Path, PathBuf};

/// Import a model of another program
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    source: Source,
}

#[derive(Subcommand)]
enum Source {
    Hf(HuggingFace),
    Peft(Peft),
    Gguf(Gguf),
}

/// Import a Hugging Face folder: Llama, Mistral, Phi 3, Gemma 2 and 3, Qwen 3, mixtures
#[derive(Args)]
#[command(after_help = "\
DIR holds config.json, model.safetensors (or shards with model.safetensors.index.json) and, to read and write text,
tokenizer.json. Unknown settings are refused by name; weights are copied as they are stored.

Examples:
  dreamc import hf gemma-2-2b -o imports/gemma-2-2b
  dreamc generate imports/gemma-2-2b \"The capital of France is\" --max-tokens 20
  dreamc eval imports/gemma-2-2b --data book.txt --sequence 16 --stride 8
  dreamc count imports/gemma-2-2b")]
struct HuggingFace {
    /// The folder of the model
    #[arg(value_name = "DIR")]
    from: PathBuf,

    /// Where it goes; `imports/DIR` by default
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,

    /// Replace the model that is in OUT
    #[arg(long)]
    force: bool,

    /// Import although config.json has this field, which dreamc does not know; may be given several
    /// times
    #[arg(long, value_name = "FIELD")]
    ignore: Vec<String>,
}

/// Import an adapter of peft, on an imported model
#[derive(Args)]
#[command(after_help = "\
DIR holds adapter_config.json and adapter_model.safetensors of a LoRA. OUT is a model of its own, of the adapters alone: it names the
file of its base, by its hash. Every command opens it, `dreamc train OUT` goes on with it, `dreamc merge` makes one model of both.

Examples:
  dreamc import hf llama-1b -o imports/llama
  dreamc import peft my-lora --base imports/llama -o imports/my-lora")]
struct Peft {
    /// The folder of the adapter
    #[arg(value_name = "DIR")]
    from: PathBuf,

    /// The model that it was trained on, as it was imported
    #[arg(long, value_name = "IMPORT")]
    base: PathBuf,

    /// Where it goes; `imports/DIR` by default
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,

    /// Replace the model that is in OUT
    #[arg(long)]
    force: bool,
}

/// Import a GGUF file of llama.cpp: Llama, Mixtral, Qwen, OLMo 2, OLMoE, Gemma, gpt-oss
#[derive(Args)]
#[command(after_help = "\
Tensors are f32, f16, bf16, q8_0, q4_0, q4_k, q6_k, mxfp4 or nvfp4. Blocks keep their bits, and every command reads them in their file.
Keys and tensors that dreamc does not know are refused by name.

Examples:
  dreamc import gguf qwen3-0.6b-q8_0.gguf -o imports/qwen3-q8
  dreamc generate imports/qwen3-q8 \"The capital of France is\" --max-tokens 20")]
struct Gguf {
    /// The file
    #[arg(value_name = "FILE.gguf")]
    from: PathBuf,

    /// Where it goes; `imports/FILE` by default
    #[arg(short, long, value_name = "OUT")]
    out: Option<PathBuf>,

    /// Replace the model that is in OUT
    #[arg(long)]
    force: bool,
}

pub fn run(a: Arguments) -> Done {
    match a.source {
        Source::Hf(a) => {
            let name = name(a.out.as_deref().unwrap_or(&a.from))?;
            let out = a.out.unwrap_or_else(|| Path::new("imports").join(&name));
            report(&dreamc_hf::hugging_face(&a.from, &out, &name, a.force, &a.ignore)?, &name, &out)
        }
        Source::Gguf(a) => {
            let stem = a.from.with_extension("");
            let name = name(a.out.as_deref().unwrap_or(&stem))?;
            let out = a.out.unwrap_or_else(|| Path::new("imports").join(&name));
            report(&gguf::import::import(&a.from, &out, &name, a.force)?, &name, &out)
        }
        Source::Peft(a) => adapter(&a),
    }
}

fn adapter(a: &Peft) -> Done {
    let name = name(a.out.as_deref().unwrap_or(&a.from))?;
    let out = a.out.clone().unwrap_or_else(|| Path::new("imports").join(&name));
    let base = Trained::open(&a.base, None, &[], Rewriting::off())?;
    let kept = beside(&base)?;
    let mut spec = base.spec.clone();
    spec.model.name.clone_from(&name);
    let moved = dreamc_hf::peft::import(&a.from, (&spec, &base.tensors), &out, (&kept, a.force))?;
    say!("{name}: adapters of {} matrices, {} numbers", moved.modules, grouped(moved.numbers.into()))?;
    let out = out.display();
    say!(
        "left in {out}; next:\n  dreamc generate {out} \"Once upon a time\"\n  dreamc merge {out} -o {out}-merged"
    )?;
    Ok(())
}

fn report(imported: &dreamc_hf::Imported, name: &str, out: &Path) -> Done {
    let (parameters, size) = (grouped(imported.parameters.into()), bytes(imported.bytes));
    say!("{name}: {parameters} parameters, {size}")?;
    for note in &imported.notes {
        say!("  note  {note}")?;
    }
    let out = out.display();
    if imported.reads_text {
        say!("left in {out}; next:\n  dreamc generate {out} \"Once upon a time\"")?;
    } else {
        // Ids are read where text is not.
        say!("left in {out}; next:\n  dreamc probe {out} --ids ids.json -o probe.safetensors")?;
    }
    Ok(())
}

/// The name of a model by its folder.
pub fn name(folder: &Path) -> Result<String, Failure> {
    let full = folder.canonicalize().or_else(|_| std::path::absolute(folder))?;
    let name = full.file_name().unwrap_or_default().to_string_lossy();
    let right = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = name.chars().map(|c| if right(c) { c } else { '-' }).collect();
    let name = name.trim_start_matches(|c: char| !c.is_ascii_alphabetic()).to_string();
    Ok(if name.is_empty() { "model".into() } else { name })
}
