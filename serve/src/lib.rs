//! A server for one model, in the words of OpenAI's completions.
//!
//! *In*: a [`NextLogits`], its tokenizer, a listener. *Out*: answers over HTTP, until `stop` says
//! so and all that was begun is done. *Promise*: a text is the one that `dreamc generate` writes
//! for its prompt and seed with the same programs, whoever else asks; texts are taken in order of
//! arrival; nothing that a client sends or leaves out ends the server, keeps a row, or takes memory
//! without bound ([`Limits`]).
//!
//! [`engine`] owns the model on a thread of its own and knows nothing of HTTP; `wire` has requests
//! and answers as JSON, `http` connections and routes, `metrics` what is counted.

pub mod engine;
mod http;
mod metrics;
mod wire;

use dreamc_data::Tokenizer;
use dreamc_runtime::generate::NextLogits;
use metrics::Metrics;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// Bounds on what clients may ask for and how long they may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Texts that wait for a row.
    pub queue: usize,
    /// Tokens of all texts that have a row, those included that they may yet write.
    pub cache_tokens: usize,
    /// Bytes of a request's body.
    pub body: usize,
    /// Connections at once.
    pub connections: usize,
    /// Time to send a request, and to take a part of an answer.
    pub patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (queue, cache_tokens, connections) = (256, usize::MAX, 1024);
        Limits { queue, cache_tokens, body: 4 << 20, connections, patience: Duration::from_secs(30) }
    }
}

/// Facts about the model, and values for fields that requests leave out.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model's name: requests name it, or none.
    pub model: String,
    /// The key that requests carry, where one is needed.
    pub api_key: Option<String>,
    /// Temperature where a request has none.
    pub temperature: f64,
    /// Probability of the tokens that are drawn from, where a request has none.
    pub top_p: Option<f64>,
    /// Whether texts begin with the begin token.
    pub begins: bool,
    /// Tokens of a text, prompt included; no more than the rows have room for.
    pub context: usize,
    /// Ids of tokens are below this.
    pub vocab: u32,
    /// Bounds.
    pub limits: Limits,
}

/// Everything that requests read.
struct Shared {
    options: Options,
    tokenizer: Tokenizer,
    context: usize,
    metrics: Metrics,
}

/// Serves until `stop`, which is asked several times a second, and all requests that were taken are
/// answered.
pub fn serve(
    decoder: Box<dyn NextLogits + Send>,
    tokenizer: Tokenizer,
    options: Options,
    listener: TcpListener,
    stop: &dyn Fn() -> bool,
) -> io::Result<()> {
    let context = decoder.context().min(options.context);
    let shared = Arc::new(Shared { options, tokenizer, context, metrics: Metrics::default() });
    let (asks, queue) = tokio::sync::mpsc::channel(shared.options.limits.queue.max(1));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(2)
        .build()?;
    let engine = std::thread::Builder::new().name("engine".into()).spawn({
        let shared = shared.clone();
        move || {
            let most = shared.options.limits.cache_tokens;
            engine::run(decoder, &shared.tokenizer, queue, most, &shared.metrics);
        }
    })?;
    let served = runtime.block_on(http::listen(listener, shared, asks, stop));
    // Its queue is closed: it ends with its last text.
    engine.join().map_err(|_| io::Error::other("the thread of the model panicked"))?;
    served
}
