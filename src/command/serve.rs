//! `dreamc serve`: a model for OpenAI's clients.
//!
//! The model is loaded once, and written with until Ctrl-C; requests that were taken by then are
//! answered. Nothing is rewritten, so that the bits of a text do not depend on how many are
//! written. How tokens are drawn is the specification's `eval.temperature` and `eval.top_p` where a
//! request does not say.

use crate::arguments::{Arithmetic, BaseArguments, DeviceArguments, PassArguments};
use clap::{Args, value_parser};
use dreamc_compiler::rewrite::Rewriting;
use dreamc_dsl::spec::Precision;
use dreamc_runtime::train::signal;
use dreamc_serve::{Limits, Options, serve};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::model::Trained;
use dreamc_study::{note, say, show};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;

/// Serve a model over HTTP, in the words of OpenAI's completions
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc serve runs/book-001
  dreamc serve runs/book-001 --port 8001 --api-key secret
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"Once upon\", \"max_tokens\": 40}'
  lm_eval --model local-completions --model_args model=book-001,base_url=http://localhost:8000/v1/completions --tasks TASK

Ctrl-C takes no more requests, answers those there are, and ends; a second one ends at once.")]
pub struct Arguments {
    /// A run folder, a checkpoint or a .safetensors file
    #[arg(value_name = "RUN|CHECKPOINT")]
    model: PathBuf,

    /// Address to listen at; one of another machine reaches it where this is no loopback address
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,

    /// Port to listen at; 0 takes any that is free, and says which
    #[arg(long, default_value_t = 8000, value_name = "N")]
    port: u16,

    /// Key that requests must carry: `Authorization: Bearer KEY`; the environment's DREAMC_API_KEY
    /// by default
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,

    /// Name of the model in requests and answers; that of its folder by default
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Texts written at once, at most
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = value_parser!(u64).range(1..=4096))]
    rows: u64,

    /// Texts that wait for a row, at most; a request for more is answered 429
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = value_parser!(u32).range(1..=65_536))]
    queue: u32,

    /// Tokens of a text, prompt included; the model's context by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(2..1 << 32))]
    context: Option<u64>,

    /// Tokens in caches, of all texts that have a row and of what they may yet write; rows times
    /// context by default. A text waits until there is room
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(2..1 << 48))]
    cache_tokens: Option<u64>,

    /// Tokens of prompts that are kept after their texts, for prompts that begin alike; four times
    /// the context by default
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(..1 << 48))]
    keep: Option<u64>,

    #[command(flatten)]
    passes: PassArguments,

    /// Precision of matmuls: the recipe's by default, where the device has it
    #[arg(long, value_enum)]
    precision: Option<Arithmetic>,

    #[command(flatten)]
    base: BaseArguments,

    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(a: Arguments) -> Done {
    let api_key = a.api_key.or_else(|| std::env::var("DREAMC_API_KEY").ok());
    if api_key.as_ref().is_some_and(|key| key.is_empty() || key.contains(|c: char| !c.is_ascii_graphic())) {
        return Err(Failure::Usage("--api-key must be letters, digits and signs, without spaces".into()));
    }
    let device = a.device.open()?;
    let mut trained = Trained::open(&a.model, a.base.moved(), &[], Rewriting::off())?;
    match a.precision {
        Some(Arithmetic::F32) => trained.spec.train.precision = Precision::F32,
        Some(Arithmetic::Bf16) => trained.spec.train.precision = Precision::Bf16,
        None => {}
    }
    if let Some(context) = a.context.filter(|c| *c > trained.spec.model.context) {
        let most = trained.spec.model.context;
        return Err(Failure::Usage(format!("--context {context}: the model has a context of {most}")));
    }
    let tokenizer = trained.tokenizer()?;
    let address = SocketAddr::new(a.host, a.port);
    let listener =
        TcpListener::bind(address).map_err(|e| Failure::Usage(format!("cannot listen at {address}: {e}")))?;
    let context = a.context.unwrap_or(trained.spec.model.context);
    let keep = a.keep.unwrap_or(context.saturating_mul(4)) as usize;
    let (decoder, memory) = trained.slots(device.as_ref(), a.rows, a.context, keep, *a.passes)?;
    let folder =
        a.model.canonicalize().ok().and_then(|p| Some(p.file_stem()?.to_string_lossy().into_owned()));
    let model = a.name.or(folder).unwrap_or_else(|| trained.spec.model.name.clone());
    if !a.host.is_loopback() && api_key.is_none() {
        note!("warning: whoever reaches {address} can use the model; --api-key KEY asks for a key");
    }
    signal::catch();
    let context = decoder.context().min(context as usize);
    say!(
        "serving {model} at http://{}: {} rows of {} tokens, {} (at most {} with caches)",
        listener.local_addr()?,
        decoder.rows(),
        context,
        device.name(),
        show::bytes(memory.total)
    )?;
    dreamc_study::output::flush()?;
    let options = Options {
        model,
        api_key,
        temperature: trained.spec.temperature(),
        top_p: trained.spec.eval.top_p,
        begins: trained.begins(&tokenizer),
        context,
        vocab: trained.spec.model.vocab.min(u64::from(u32::MAX)) as u32,
        limits: Limits {
            queue: a.queue as usize,
            cache_tokens: a.cache_tokens.map_or(usize::MAX, |n| n as usize),
            ..Limits::default()
        },
    };
    serve(decoder, tokenizer, options, listener, &|| signal::caught().is_some())?;
    Ok(())
}
