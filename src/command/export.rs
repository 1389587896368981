//! `dreamc export`: models for other programs.

use crate::arguments::BaseArguments;
use clap::{Args, Subcommand, ValueEnum};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_data::Tokenizer;
use dreamc_data::files;
use dreamc_dsl::Spelling;
use dreamc_hf::export::{self, Model};
use dreamc_hf::gguf;
use dreamc_hf::peft;
use dreamc_runtime::checkpoint::Checkpoint;
use dreamc_runtime::checkpoint::safetensors::Dtype;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::number::grouped;
use dreamc_study::say;
use dreamc_study::show::bytes;
use dreamc_study::spec::Named;
use dreamc_study::spec::is_specification;
use std::path::{Path, PathBuf};

/// Export a model for other programs
#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    to: To,
}

#[derive(Subcommand)]
enum To {
    Hf(HuggingFace),
    Peft(Peft),
    Gguf(Gguf),
    Torch(Torch),
    Weights(Weights),
    Dcp(Distributed),
}

/// Export a folder that Hugging Face's transformers loads
#[derive(Args)]
#[command(after_help = "\
A model that transformers has a class for leaves as that class. Any other leaves as a package: its own code in Python, loaded
with trust_remote_code=True, which computes what the model computes. Tokenizer files and a model card go with it.

Examples:
  dreamc export hf runs/quickstart-001 -o exports/quickstart
  dreamc export hf imports/gemma-2-2b -o exports/gemma-2-2b
  dreamc export hf imports/gemma-2-2b -o exports/package --package --dtype bf16")]
struct HuggingFace {
    #[command(flatten)]
    from: From,

    /// The folder to write; nothing may be there
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Write a package with code of its own although transformers has a class for the model
    #[arg(long)]
    package: bool,
}

/// Export the adapters of a model as a folder that peft loads
#[derive(Args)]
#[command(after_help = "\
The base is not in it: PeftModel.from_pretrained(base, DIR) puts it on the model that the base was imported from. Matrices that
transformers keeps fused, and those of experts, have no module there and are refused by name.

Examples:
  dreamc export peft runs/lora-001 -o adapters/tuned
  dreamc export peft runs/lora-001 -o adapters/named --name meta-llama/Llama-3.2-1B --dtype bf16")]
struct Peft {
    #[command(flatten)]
    from: From,

    /// The folder to write; nothing may be there
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// The base as the adapter's configuration names it
    #[arg(long, value_name = "NAME", default_value = "")]
    name: String,
}

/// Export a GGUF file that llama.cpp runs
#[derive(Args)]
#[command(after_help = "\
For models of families that llama.cpp has: Llama, Mistral, Mixtral, Qwen 2 and 3 with and without experts, OLMo 2, OLMoE, Gemma 2 and 3,
gpt-oss. The tokenizer and the template of chats are in the file. Matrices leave as they are stored, blocks with their bits, or in
FORMAT; vectors and routers are f32.

Examples:
  dreamc export gguf imports/qwen3-0.6b -o qwen3.gguf --format q8_0
  dreamc export gguf imports/qwen3-0.6b -o qwen3-q4.gguf --format q4_k")]
struct Gguf {
    /// A run folder, a checkpoint, an import or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Format of matrices: f32, f16, bf16, q8_0, q4_0, q4_k, q6_k, mxfp4, nvfp4; as they are stored
    /// by default
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,

    /// The file to write; nothing may be there
    #[arg(short, long, value_name = "FILE.gguf")]
    out: PathBuf,

    #[command(flatten)]
    base: BaseArguments,
}

/// Export one readable PyTorch module
#[derive(Args)]
#[command(after_help = "\
The folder gets model.py, one class for each component, named as in the specification, and Model around them; README.md, how to load
it; spec.yaml; and of a run or a checkpoint model.safetensors. The code reads what training computes, without a cache: it is to be read,
changed and trained elsewhere. What has no form in PyTorch yet is refused by name.

Examples:
  dreamc export torch examples/tiny-dr-da.yaml -o exports/tiny
  dreamc export torch runs/quickstart-001 -o exports/quickstart-torch")]
struct Torch {
    #[command(flatten)]
    from: From,

    /// The folder to write; nothing may be there
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
}

/// Export the weights alone, under the names that every checkpoint has
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc export weights runs/book-001 -o book.safetensors
  dreamc export weights runs/book-001 -o half.safetensors --dtype bf16")]
struct Weights {
    #[command(flatten)]
    from: From,

    /// The file to write; nothing may be there
    #[arg(short, long, value_name = "FILE.safetensors")]
    out: PathBuf,
}

/// Export a checkpoint that PyTorch's torch.distributed.checkpoint loads
#[derive(Args)]
#[command(after_help = "\
The folder holds a state dict of three parts: `model`, weights under the names that every checkpoint has; `optimizer`, the moments
NAME.m and NAME.v; and `step`. Of an import there is `model` alone. Any number of ranks reads it, each its part:
  state = {'model': {name: torch.empty(shape)}}
  torch.distributed.checkpoint.load(state, checkpoint_id=DIR)

Examples:
  dreamc export dcp runs/book-001 -o exports/book-dcp
  dreamc export dcp runs/book-001 -o exports/book-8 --files 8")]
struct Distributed {
    #[command(flatten)]
    from: From,

    /// The folder to write; nothing may be there
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Files of about equal bytes; tensors are cut along their first dimension
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    files: u16,
}

#[derive(Args)]
struct From {
    /// A run folder, a checkpoint, an import or a .safetensors file; for `torch` a specification
    /// too
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// The type to store weights in; as they are stored by default
    #[arg(long, value_enum)]
    dtype: Option<Stored>,

    #[command(flatten)]
    base: BaseArguments,
}

#[derive(Clone, Copy, ValueEnum)]
enum Stored {
    F32,
    Bf16,
    F16,
}

impl Stored {
    fn dtype(self) -> Dtype {
        match self {
            Stored::F32 => Dtype::F32,
            Stored::Bf16 => Dtype::BF16,
            Stored::F16 => Dtype::F16,
        }
    }
}

pub fn run(a: Arguments) -> Done {
    match a.to {
        To::Hf(a) => hugging_face(&a),
        To::Peft(a) => adapters(&a),
        To::Gguf(a) => gguf(a),
        To::Torch(a) => torch(&a),
        To::Weights(a) => weights(&a),
        To::Dcp(a) => distributed(&a),
    }
}

fn hugging_face(a: &HuggingFace) -> Done {
    let trained = open(&a.from)?;
    let tokenizer = tokenizer(&trained)?;
    let exported = export::hugging_face(&model(&trained, tokenizer.as_ref(), &a.from), &a.out, !a.package)?;
    let out = a.out.display();
    say!("{out}: {}, {} tensors, {}", exported.class, exported.tensors, bytes(exported.bytes))?;
    for note in &exported.notes {
        say!("  note  {note}")?;
    }
    let trust = if exported.package { ", trust_remote_code=True" } else { "" };
    say!("AutoModelForCausalLM.from_pretrained(\"{out}\"{trust}) loads it; to compare its logits:")?;
    say!("  echo '[[1, 2, 3, 4, 5]]' > ids.json")?;
    say!(
        "  dreamc probe {} --ids ids.json -o probe.safetensors     `logits` are those of [[1, 2, 3, 4]]",
        a.from.model.display()
    )?;
    Ok(())
}

fn adapters(a: &Peft) -> Done {
    let trained = open(&a.from)?;
    let moved = peft::export(&model(&trained, None, &a.from), &a.name, &a.out)?;
    let (out, numbers) = (a.out.display(), grouped(moved.numbers.into()));
    say!("{out}: LoRA of {} modules, {numbers} numbers", moved.modules)?;
    say!(
        "peft.PeftModel.from_pretrained(base, \"{out}\") puts it on the model that the base was imported from"
    )?;
    Ok(())
}

fn gguf(a: Gguf) -> Done {
    let from = From { model: a.model, dtype: None, base: a.base };
    let trained = open(&from)?;
    let tokenizer = tokenizer(&trained)?;
    let exported =
        gguf::export::export(&model(&trained, tokenizer.as_ref(), &from), &a.out, a.format.as_deref())?;
    let (out, arch) = (a.out.display(), &exported.class);
    say!("{out}: {arch}, {} tensors, {}", exported.tensors, bytes(exported.bytes))?;
    for note in &exported.notes {
        say!("  note  {note}")?;
    }
    say!("llama.cpp reads it:\n  llama-cli -m {out} -p \"Once upon a time\"")?;
    Ok(())
}

fn torch(a: &Torch) -> Done {
    let out = a.out.display();
    let trained = if is_specification(&a.from.model) { None } else { Some(open(&a.from)?) };
    let spec = match &trained {
        Some(trained) => trained.spec.clone(),
        None => Named { spec: a.from.model.clone(), set: vec![] }.load()?,
    };
    let segments = spec.data.as_ref().is_some_and(|d| d.document_mask);
    let options = dreamc_torch::Options { segments, z_loss: spec.train.z_loss };
    let module = dreamc_torch::module(&spec.model, options).map_err(|e| Failure::Error(Box::new(e)))?;
    if a.out.symlink_metadata().is_ok() {
        return Err(Failure::Usage(format!(
            "{out} exists already, and nothing is written over; name another folder"
        )));
    }
    let failed = |error| Failure::Error(Box::new(files::about(&a.out, error)));
    std::fs::create_dir_all(&a.out).map_err(failed)?;
    let shown = dreamc_dsl::show(&spec, Spelling::Yaml);
    let readme = dreamc_torch::readme(&spec.model, trained.is_some());
    for (name, text) in [("model.py", &module.text), ("README.md", &readme), ("spec.yaml", &shown)] {
        std::fs::write(a.out.join(name), text).map_err(failed)?;
    }
    let lines = module.text.lines().count();
    say!("{out}/model.py: {lines} lines, {} classes", module.text.matches("\nclass ").count())?;
    if let Some(trained) = &trained {
        let exported = export::weights(&model(trained, None, &a.from), &a.out.join("model.safetensors"))?;
        say!("{out}/model.safetensors: {} tensors, {}", exported.tensors, bytes(exported.bytes))?;
    }
    Ok(())
}

fn weights(a: &Weights) -> Done {
    let trained = open(&a.from)?;
    let exported = export::weights(&model(&trained, None, &a.from), &a.out)?;
    say!("{}: {} tensors, {}", a.out.display(), exported.tensors, bytes(exported.bytes))?;
    Ok(())
}

fn distributed(a: &Distributed) -> Done {
    let trained = open(&a.from)?;
    // A checkpoint's optimizer is in the folder of its weights.
    let folder = trained.tensors.path().parent().filter(|folder| folder.join("state.json").is_file());
    let checkpoint = folder.map(Checkpoint::open).transpose().map_err(|e| Failure::Error(Box::new(e)))?;
    let model = model(&trained, None, &a.from);
    let exported = export::distributed(&model, checkpoint.as_ref(), a.files.into(), &a.out)?;
    let out = a.out.display();
    say!("{out}: {} tensors, {} of weights", exported.tensors, bytes(exported.bytes))?;
    say!(
        "torch.distributed.checkpoint.load(state, checkpoint_id=\"{out}\") fills the tensors of a state dict"
    )?;
    Ok(())
}

fn open(from: &From) -> Result<Trained, Failure> {
    Trained::open(&from.model, from.base.moved(), &[], Rewriting::off())
}

/// The tokenizer; weights without a tokenizer next to them are exported without one.
fn tokenizer(trained: &Trained) -> Result<Option<Tokenizer>, Failure> {
    let named = trained.spec.data.is_some() || trained.tokenizer_file().is_some();
    named.then(|| trained.tokenizer()).transpose()
}

fn model<'a>(trained: &'a Trained, tokenizer: Option<&'a Tokenizer>, from: &From) -> Model<'a> {
    let parent = |path: &Path| path.parent().map(Path::to_path_buf);
    let file = trained.tokenizer_file();
    let base = trained.spec.weights.as_deref().map(PathBuf::from);
    let mut beside = vec![];
    beside.extend(parent(trained.tensors.path()));
    beside.extend(file.as_deref().and_then(parent));
    beside.extend(from.base.moved().map(Path::to_path_buf));
    beside.extend(trained.tensors.base().and_then(parent));
    beside.extend(base);
    // A run's ledger is some folders above its checkpoint.
    let above = trained.tensors.path().ancestors().skip(1).take(4).map(|p| p.join("ledger.json"));
    let ledger = above.filter_map(|path| dreamc_data::files::read_text(&path).ok()).next();
    let dtype = from.dtype.map(Stored::dtype);
    Model { spec: &trained.spec, weights: &trained.tensors, tokenizer, beside, dtype, ledger }
}
