//! Connections and routes.
//!
//! *In*: a listener. *Out*: HTTP/1.1. *Promise*: a connection that stalls is closed; a request
//! whose client is gone is dropped, and with it the channel by which the engine knows; after `stop`
//! no connection is taken, and those there are end with their answer.

use crate::Shared;
use crate::engine::{Answer, Ask};
use crate::wire::{Assembly, Completion, Refusal, encode, read};
use bytes::Bytes;
use dreamc_http::{BodyError, Failed, accept, same};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

/// Bytes of a request's line and headers.
const HEAD: usize = 16 << 10;

/// Takes connections until `stop`, and waits for the answers that are under way.
pub async fn listen(
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    asks: Sender<Ask>,
    stop: &dyn Fn() -> bool,
) -> io::Result<()> {
    let (closing, closed) = watch::channel(false);
    let most = shared.options.limits.connections;
    let serve = |stream| connection(stream, shared.clone(), asks.clone(), closed.clone());
    let mut connections = accept(listener, most, &|| stop() || asks.is_closed(), serve).await?;
    drop(asks);
    let _ = closing.send(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}

async fn connection(
    stream: TcpStream,
    shared: Arc<Shared>,
    asks: Sender<Ask>,
    mut closed: watch::Receiver<bool>,
) {
    let patience = shared.options.limits.patience;
    let _ = stream.set_nodelay(true);
    let stream = Patient { stream, patience, waits: false, sleep: Box::pin(sleep(patience)) };
    let service = service_fn(|request| {
        let (shared, asks) = (shared.clone(), asks.clone());
        async move { Ok::<_, Infallible>(respond(request, shared, asks).await) }
    });
    shared.metrics.connections.add(1);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience).max_buf_size(HEAD);
    let mut served = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut closing = pin!(closed.wait_for(|closed| *closed));
    let mut told = false;
    // Of a connection that fails nobody is left to hear.
    let _ = poll_fn(|cx| {
        if !told && closing.as_mut().poll(cx).is_ready() {
            told = true;
            served.as_mut().graceful_shutdown();
        }
        served.as_mut().poll(cx)
    })
    .await;
    shared.metrics.connections.add(u64::MAX);
}

async fn respond(request: Request<Incoming>, shared: Arc<Shared>, asks: Sender<Ask>) -> Response<Reply> {
    let metrics = shared.clone();
    let response = route(request, shared, asks).await.unwrap_or_else(|refusal| {
        let mut response = json_reply(&refusal.json());
        *response.status_mut() =
            StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if let Some(seconds) = refusal.again {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    });
    metrics.metrics.answered(response.status().as_u16());
    response
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokenize {
    prompt: String,
    #[serde(default)]
    add_special_tokens: bool,
    #[serde(rename = "model")]
    _model: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Detokenize {
    tokens: Vec<u32>,
    #[serde(rename = "model")]
    _model: Option<String>,
}

async fn route(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    asks: Sender<Ask>,
) -> Result<Response<Reply>, Refusal> {
    let path = request.uri().path().to_string();
    if path != "/health" {
        authorise(&request, &shared)?;
    }
    let get = request.method() == Method::GET || request.method() == Method::HEAD;
    let post = request.method() == Method::POST;
    match path.as_str() {
        "/health" if get => match asks.is_closed() {
            true => Err(Refusal::new(503, "the model is gone")),
            false => Ok(json_reply(&json!({ "status": "ok" }))),
        },
        "/metrics" if get => {
            let page = Response::new(Reply::Whole(Full::from(shared.metrics.page())));
            Ok(with_type(page, "text/plain; version=0.0.4; charset=utf-8"))
        }
        "/v1/models" if get => Ok(json_reply(&json!({ "object": "list", "data": [model(&shared)] }))),
        "/tokenizer_info" if get => {
            let tokenizer = &shared.tokenizer;
            let (eos, bos) = (tokenizer.token(tokenizer.end()), tokenizer.token(tokenizer.begin()));
            Ok(json_reply(&json!({
                "tokenizer_class": "dreamc", "eos_token": eos, "bos_token": bos, "pad_token": null,
                "add_bos_token": shared.options.begins, "vocab_size": shared.options.vocab,
                "model_max_length": shared.context, "chat_template": null,
            })))
        }
        "/tokenize" if post => {
            let body = body(request, &shared).await?;
            let answer = apart(move || {
                let asked: Tokenize = read(&body)?;
                let begins = asked.add_special_tokens && shared.options.begins;
                let tokens = encode(&asked.prompt, begins, &shared.tokenizer)?;
                Ok(json!({ "tokens": tokens, "count": tokens.len(), "max_model_len": shared.context }))
            });
            Ok(json_reply(&answer.await?))
        }
        "/detokenize" if post => {
            let body = body(request, &shared).await?;
            let answer = apart(move || {
                let asked: Detokenize = read(&body)?;
                let vocab = shared.options.vocab;
                match asked.tokens.iter().find(|id| **id >= vocab) {
                    Some(id) => {
                        Err(Refusal::new(400, format!("there is no token {id}: ids are below {vocab}")))
                    }
                    None => Ok(json!({ "prompt": shared.tokenizer.decode(&asked.tokens) })),
                }
            });
            Ok(json_reply(&answer.await?))
        }
        "/v1/completions" if post => complete(request, shared, asks).await,
        "/v1/chat/completions" => {
            let message = "there are no chats: the model continues texts, by /v1/completions";
            Err(Refusal::new(404, message))
        }
        "/health" | "/metrics" | "/v1/models" | "/tokenizer_info" => {
            Err(Refusal::new(405, format!("{path} takes GET")))
        }
        "/tokenize" | "/detokenize" | "/v1/completions" => {
            Err(Refusal::new(405, format!("{path} takes POST")))
        }
        path => match path.strip_prefix("/v1/models/") {
            Some(name) if get && name == shared.options.model => Ok(json_reply(&model(&shared))),
            Some(name) => Err(Refusal::new(404, format!("the model `{name}` does not exist"))),
            None => Err(Refusal::new(404, format!("there is nothing at {path}"))),
        },
    }
}

fn model(shared: &Shared) -> Value {
    let (id, context) = (&shared.options.model, shared.context);
    json!({ "id": id, "object": "model", "created": 0, "owned_by": "dreamc", "max_model_len": context })
}

/// Whether a request has the key.
fn authorise(request: &Request<Incoming>, shared: &Shared) -> Result<(), Refusal> {
    let Some(key) = &shared.options.api_key else { return Ok(()) };
    let given = request.headers().get(AUTHORIZATION).and_then(|h| h.as_bytes().strip_prefix(b"Bearer "));
    if given.is_some_and(|given| same(given, key.as_bytes())) {
        Ok(())
    } else {
        Err(Refusal::new(401, "the key of the server is needed: `Authorization: Bearer KEY`"))
    }
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Self {
        Refusal::new(error.status().as_u16(), error.to_string())
    }
}

impl From<Failed> for Refusal {
    fn from(failed: Failed) -> Self {
        Refusal::new(500, failed.to_string())
    }
}

/// Does slow work on another thread than the connections.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    dreamc_http::apart(work).await
}

/// The body of a request.
async fn body(request: Request<Incoming>, shared: &Shared) -> Result<Bytes, Refusal> {
    let limits = &shared.options.limits;
    Ok(dreamc_http::body(request, limits.body, limits.patience).await?)
}

async fn complete(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    asks: Sender<Ask>,
) -> Result<Response<Reply>, Refusal> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let body = body(request, &shared).await?;
    let reading = shared.clone();
    let completion = apart(move || Completion::read(&body, &reading)).await?;
    let (answer, mut answers) = unbounded_channel();
    let texts = completion.asks(&answer);
    drop(answer);
    if texts.len() > asks.max_capacity() {
        let most = asks.max_capacity();
        return Err(Refusal::new(400, format!("more texts than may wait at once, {most}")));
    }
    match asks.try_reserve_many(texts.len()) {
        Ok(places) => places.zip(texts).for_each(|(place, text)| place.send(text)),
        Err(TrySendError::Full(())) => {
            let metrics = &shared.metrics;
            let again = Some(metrics.whole.mean().ceil().clamp(1.0, 60.0) as u64);
            let (most, running) = (asks.max_capacity(), metrics.running.get());
            let message = format!(
                "at most {most} texts may wait ({running} in rows, {} tokens in caches): ask again later",
                metrics.reserved_tokens.get()
            );
            return Err(Refusal { again, ..Refusal::new(429, message) });
        }
        Err(TrySendError::Closed(())) => return Err(Refusal::new(503, "the model is gone")),
    }
    let id = format!("cmpl-{}", NUMBER.fetch_add(1, Relaxed));
    let mut assembly = Assembly::new(&completion, id, &shared);
    if completion.stream {
        let mut response = Response::new(Reply::Events(Events { answers, assembly, shared, over: false }));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        return Ok(with_type(response, "text/event-stream"));
    }
    while let Some(part) = answers.recv().await {
        assembly.take(part, &shared.tokenizer);
        if let Some(message) = assembly.failed.take() {
            return Err(Refusal::new(500, message));
        }
    }
    if !assembly.is_whole() {
        return Err(Refusal::new(503, "the model is gone"));
    }
    Ok(json_reply(&assembly.whole()))
}

fn json_reply(value: &Value) -> Response<Reply> {
    with_type(Response::new(Reply::Whole(Full::from(value.to_string()))), "application/json")
}

fn with_type(mut response: Response<Reply>, kind: &'static str) -> Response<Reply> {
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// The body of an answer.
enum Reply {
    Whole(Full<Bytes>),
    Events(Events),
}

/// Answers as they come.
struct Events {
    answers: UnboundedReceiver<(usize, Answer)>,
    assembly: Assembly,
    shared: Arc<Shared>,
    over: bool,
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let events = match self.get_mut() {
            Reply::Whole(whole) => return Pin::new(whole).poll_frame(cx),
            Reply::Events(events) => events,
        };
        while !events.over {
            let Some(part) = ready!(events.answers.poll_recv(cx)) else { break };
            let event = events.assembly.stream(part, &events.shared.tokenizer);
            events.over = events.assembly.failed.is_some();
            if !event.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(event.into()))));
            }
        }
        Poll::Ready(None)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(whole) => whole.size_hint(),
            Reply::Events(_) => SizeHint::default(),
        }
    }
}

/// A connection whose other side must take what is written within some time.
struct Patient {
    stream: TcpStream,
    patience: Duration,
    waits: bool,
    sleep: Pin<Box<Sleep>>,
}

impl Patient {
    fn timed<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waits = false;
            return written;
        }
        if !self.waits {
            self.waits = true;
            self.sleep.as_mut().reset(Instant::now() + self.patience);
        }
        self.sleep.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.timed(written, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.timed(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.timed(shut, cx)
    }
}
