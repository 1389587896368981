//! `dreamc generate`: let a model write.
//!
//! Prompts come from the command line, from a file, from standard input where that is a pipe or a
//! file, or line by line from a person. How tokens are drawn is the specification's
//! `eval.temperature` and `eval.top_p` unless the command line says otherwise.

mod interactive;

use crate::arguments::{Arithmetic, BaseArguments, DeviceArguments, PassArguments, RewriteArguments};
use clap::Args;
use dreamc_data::files;
use dreamc_data::task::{Problems, Split};
use dreamc_dsl::spec::{Precision, Source};
use dreamc_runtime::generate::{Sampling, Why, Written, generate};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::{Texts, Trained};
use dreamc_study::{note, output, say};
use serde::Serialize;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Prompts continued at once.
const ROWS: usize = 8;

/// Let a model write
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc generate runs/book-001 \"Once upon a time\"
  dreamc generate runs/book-001 \"Once upon a time\" --greedy --max-tokens 40
  echo \"Once upon a time\" | dreamc generate runs/book-001
  dreamc generate runs/book-001 --prompts prompts.txt --json > out.jsonl
  dreamc generate runs/book-001 --interactive
  dreamc generate runs/quickstart-001 \"abcdefgh 3-8 1-2 = \" --depth 8     prompts of a task end as it does")]
pub struct Arguments {
    /// A run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Text to continue; by default standard input where that is a pipe or a file, else an empty
    /// text
    #[arg(value_name = "PROMPT")]
    prompt: Vec<String>,

    /// Continue every line of this file, `-` for standard input: a text, or JSON objects with a
    /// field `prompt`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "interactive"])]
    prompts: Option<PathBuf>,

    /// Ask for prompts until the end of the input; `/help` there lists what can be changed
    #[arg(short, long, conflicts_with = "prompt")]
    interactive: bool,

    /// Most tokens written after a prompt
    #[arg(short = 'n', long, default_value_t = 200, value_name = "N")]
    max_tokens: usize,

    /// Divides the logits; 0 takes the likeliest token. The specification's by default: 0.8, or 0
    /// where it trains on tasks or prompts
    #[arg(short, long, value_name = "T")]
    temperature: Option<f64>,

    /// The likeliest token each time, as `--temperature 0`
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p"])]
    greedy: bool,

    /// Only the K likeliest tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,

    /// Only the fewest likeliest tokens whose probabilities reach P; the specification's by
    /// default: 0.95
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,

    /// Seed of the draws
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    /// Stop before this text, or at the special token that is written so; may be given several
    /// times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    #[command(flatten)]
    passes: PassArguments,

    /// Run the whole text through the model for every token: slow, and the same
    #[arg(long)]
    no_cache: bool,

    /// Precision of matmuls: the recipe's by default, where the device has it
    #[arg(long, value_enum)]
    precision: Option<Arithmetic>,

    /// Say on the error stream how fast it was
    #[arg(long)]
    stats: bool,

    /// Print one JSON object a prompt
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    rewriting: RewriteArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

#[derive(Serialize)]
struct Line<'a> {
    prompt: &'a str,
    text: &'a str,
    tokens: usize,
    ids: &'a [u32],
    why: Why,
}

pub fn run(a: Arguments) -> Done {
    let usage = |what: &str| Err(Failure::Usage(what.into()));
    if a.temperature.is_some_and(|t| !(t >= 0.0 && t.is_finite())) {
        return usage("--temperature must be 0 or larger");
    }
    if a.top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
        return usage("--top-p must be above 0 and at most 1");
    }
    if a.top_k == Some(0) || a.max_tokens == 0 {
        return usage("--top-k and --max-tokens must be at least 1");
    }
    let device = a.device.open()?;
    let mut trained = Trained::open(&a.model, a.base.moved(), &[], a.rewriting.on(device.as_ref())?)?;
    match a.precision {
        Some(Arithmetic::F32) => trained.spec.train.precision = Precision::F32,
        Some(Arithmetic::Bf16) => trained.spec.train.precision = Precision::Bf16,
        None => {}
    }
    let tokenizer = trained.tokenizer()?;
    let eval = &trained.spec.eval;
    let sampling = Sampling {
        temperature: if a.greedy { 0.0 } else { a.temperature.unwrap_or(trained.spec.temperature()) },
        top_k: a.top_k,
        top_p: a.top_p.or(eval.top_p),
        seed: a.seed,
        max_tokens: a.max_tokens,
        stop: a.stop.clone(),
    };
    if a.interactive {
        let session = interactive::Session {
            trained: &trained,
            device: device.as_ref(),
            tokenizer: &tokenizer,
            passes: *a.passes,
            cache: !a.no_cache,
            sampling,
        };
        return session.run();
    }
    let prompts = match &a.prompts {
        Some(path) => read_prompts(path)?,
        None if !a.prompt.is_empty() => a.prompt.clone(),
        None if io::stdin().is_terminal() => vec![String::new()],
        None => vec![piped()?],
    };
    let ids = prompts.iter().map(|p| trained.prompt(&tokenizer, p)).collect::<Result<Vec<_>, _>>()?;
    for (prompt, ids) in prompts.iter().zip(&ids) {
        remarks(&trained, prompt, ids.len());
    }
    let texts = Texts::after(&ids, a.max_tokens, ROWS);
    let mut decoder = trained.decoder(device.as_ref(), texts, *a.passes, !a.no_cache)?;
    // A single prompt is heard as it is written; several would be mixed up.
    let live = !a.json && prompts.len() == 1;
    let mut broken = if live { say_now(&prompts[0]).err() } else { None };
    let begun = std::time::Instant::now();
    let written = generate(decoder.as_mut(), &tokenizer, &ids, &sampling, &mut |_, piece| {
        if live && broken.is_none() {
            broken = say_now(piece).err();
        }
    })?;
    if let Some(error) = broken {
        return Err(error.into());
    }
    let (seconds, tokens) =
        (begun.elapsed().as_secs_f64(), written.iter().map(|w| w.tokens.len()).sum::<usize>());
    if live {
        say!()?;
    }
    if a.stats {
        let rate = tokens as f64 / seconds.max(1e-9);
        output::complain(&format!("{tokens} tokens in {seconds:.2} s: {rate:.1} tokens/s\n"));
    }
    if written.iter().any(|w| w.why == Why::Context) {
        note!("stopped where the model's context of {} tokens is full", trained.spec.model.context);
    }
    if live {
        return Ok(());
    }
    for (prompt, Written { text, tokens, why }) in prompts.iter().zip(&written) {
        if a.json {
            let line = Line { prompt, text, tokens: tokens.len(), ids: tokens, why: *why };
            say!("{}", serde_json::to_string(&line)?)?;
        } else {
            say!("{prompt}{text}\n")?;
        }
    }
    Ok(())
}

fn say_now(text: &str) -> io::Result<()> {
    output::write(text.as_bytes())?;
    output::flush()
}

/// Says what of a prompt does not fit, and where one is not as the model learned them.
fn remarks(trained: &Trained, prompt: &str, tokens: usize) {
    let context = trained.spec.model.context;
    let fits = context.max(2) - 1;
    if tokens as u64 > fits {
        let begin: String = prompt.chars().take(20).collect();
        note!(
            "warning: the prompt {begin:?}… has {tokens} tokens, the model's context is {context}: its first {} are left out, and one token can \
             be written",
            tokens as u64 - fits
        );
    }
    if let Some(ending) = ending(trained).filter(|e| !prompt.is_empty() && !prompt.ends_with(e.as_str())) {
        note!(
            "the model was trained on prompts that end with {ending:?}, the space included; this one does not"
        );
    }
}

/// How prompts of the task end that a model was trained on.
fn ending(trained: &Trained) -> Option<String> {
    let [(Source::Task(task), _)] = trained.spec.data.as_ref()?.sources.as_slice() else { return None };
    let prompt = Problems::new(task, trained.spec.train.seed, Split::Test).ok()?.at(0).ok()?.prompt;
    let own = prompt.trim_end_matches(|c: char| !c.is_alphanumeric());
    prompt.strip_prefix(own).map(|e| e.trim_start().to_string()).filter(|e| e.ends_with(' '))
}

/// All of standard input as one prompt, without the line break that ends it.
fn piped() -> Result<String, Failure> {
    let mut text = String::new();
    io::stdin().lock().read_to_string(&mut text).map_err(|e| files::about(Path::new("standard input"), e))?;
    let text = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
    Ok(text.to_string())
}

/// Prompts of a file: lines of text, or JSON objects with a field `prompt`.
fn read_prompts(path: &Path) -> Result<Vec<String>, Failure> {
    let text = if path == Path::new("-") {
        piped()?
    } else {
        files::read_text(path).map_err(|e| files::about(path, e))?
    };
    let json = path.extension().is_some_and(|e| e == "jsonl" || e == "ndjson");
    let mut prompts = vec![];
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        if !json {
            prompts.push(line.to_string());
            continue;
        }
        let row: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let Some(prompt) = row.get("prompt").and_then(|p| p.as_str()) else {
            let what = "not a JSON object with a text `prompt`";
            return Err(Failure::Usage(format!("{}:{}: {what}", path.display(), i + 1)));
        };
        prompts.push(prompt.to_string());
    }
    if prompts.is_empty() {
        return Err(Failure::Usage(format!("{}: holds no prompt", path.display())));
    }
    Ok(prompts)
}
