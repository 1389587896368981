//! Connections and routes.
//!
//! *In*: a listener. *Out*: HTTP/1.1. *Promise*: each request needs the token and one of the
//! server's own names in `Host`, so that neither another origin's page nor a name that was bound
//! to this machine afterwards is answered; bodies have a bound; work that takes long is done apart.

use crate::files::FileError;
use crate::{Exam, Job, Loops, Question, Studio};
use bytes::Bytes;
use dreamc_http::{BodyError, Failed, accept, same};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderValue, ORIGIN};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Time to send a request.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a request's body.
const BODY: usize = 8 << 20;
/// Connections at once.
const CONNECTIONS: usize = 64;

const PAGE: &str = include_str!("../page/index.html");
const STYLE: &str = include_str!("../page/style.css");
const SCRIPT: &str = include_str!("../page/bundle.js");

/// Takes connections until `stop`.
pub async fn listen(
    listener: std::net::TcpListener,
    studio: Arc<Studio>,
    stop: &dyn Fn() -> bool,
) -> io::Result<()> {
    let serve = |stream| {
        let studio = studio.clone();
        async move {
            let service = service_fn(|request| {
                let studio = studio.clone();
                async move { Ok::<_, Infallible>(respond(request, studio).await) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
            // Of a connection that fails nobody is left to hear.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        }
    };
    drop(accept(listener, CONNECTIONS, stop, serve).await?);
    Ok(())
}

/// Why a request has no answer.
struct Refusal(StatusCode, String);

impl Refusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Refusal(status, message.into())
    }
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Self {
        Refusal::new(error.status(), error.to_string())
    }
}

impl From<Failed> for Refusal {
    fn from(failed: Failed) -> Self {
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, failed.to_string())
    }
}

impl From<FileError> for Refusal {
    fn from(error: FileError) -> Self {
        let status = match error {
            FileError::Outside(_) | FileError::Kind(_) => StatusCode::FORBIDDEN,
            FileError::Gone(_) => StatusCode::NOT_FOUND,
            FileError::Changed(_) => StatusCode::CONFLICT,
            FileError::Large(_) => StatusCode::PAYLOAD_TOO_LARGE,
            FileError::Io(..) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Refusal(status, error.to_string())
    }
}

type Reply = Response<Full<Bytes>>;

async fn respond(request: Request<Incoming>, studio: Arc<Studio>) -> Reply {
    route(request, studio).await.unwrap_or_else(|Refusal(status, message)| {
        let mut reply = json_reply(&json!({ "error": message }));
        *reply.status_mut() = status;
        reply
    })
}

#[derive(Deserialize)]
struct Written {
    path: String,
    text: String,
    /// The version that was read; none for a new file.
    version: Option<String>,
}

#[derive(Deserialize)]
struct Seen {
    path: String,
    text: String,
    baseline: Option<String>,
    device: Option<String>,
    /// The component that is drawn from inside.
    inside: Option<String>,
    /// Whether passes of a loop are drawn one after the other.
    #[serde(default)]
    passes: bool,
    /// Whether the counts of what it is compared with are asked for.
    #[serde(default)]
    compare: bool,
}

#[derive(Deserialize)]
#[serde(tag = "about", rename_all = "snake_case")]
enum Told {
    Run { run: String },
    Difference { run: String, other: String },
    Continuation { run: String, prompt: String },
    Reading { run: String, prompt: String },
    Analysis { run: String },
}

#[derive(Deserialize)]
struct Named {
    path: String,
}

#[derive(Deserialize)]
struct Asking {
    path: Option<String>,
    exam: Option<Sitting>,
}

#[derive(Deserialize)]
struct Sitting {
    specs: Vec<String>,
    tasks: String,
    budget: String,
    steps: Option<u64>,
    seeds: u64,
}

#[derive(Deserialize)]
struct Asked {
    path: String,
    message: Value,
}

async fn route(request: Request<Incoming>, studio: Arc<Studio>) -> Result<Reply, Refusal> {
    authorise(&request, &studio)?;
    let path = request.uri().path().to_string();
    match (request.method().clone(), path.as_str()) {
        (Method::GET, "/") => Ok(page()),
        (Method::GET, "/files") => {
            let list = apart(move || {
                Ok(
                    json!({ "files": studio.folder.list(), "first": studio.first, "devices": studio.tools.devices() }),
                )
            });
            Ok(json_reply(&list.await?))
        }
        (Method::GET, "/file") => {
            let path = query(&request, "path").unwrap_or_default();
            let text = apart(move || Ok(studio.folder.read(&path)?)).await?;
            Ok(json_reply(&json!({ "text": text.text, "version": text.version })))
        }
        (Method::POST, "/file") => {
            let asked: Written = body(request).await?;
            let version =
                apart(move || Ok(studio.folder.write(&asked.path, &asked.text, asked.version.as_deref())?));
            Ok(json_reply(&json!({ "version": version.await? })))
        }
        (Method::POST, "/view") => {
            let asked: Seen = body(request).await?;
            Ok(json_reply(&apart(move || view(&studio, &asked)).await?))
        }
        (Method::POST, "/inside") => {
            let asked: Seen = body(request).await?;
            Ok(json_reply(&apart(move || inside(&studio, &asked)).await?))
        }
        (Method::POST, "/tell") => {
            let asked: Told = body(request).await?;
            Ok(json_reply(&apart(move || tell(&studio, &asked)).await?))
        }
        (Method::POST, "/match") => {
            let asked: Seen = body(request).await?;
            Ok(json_reply(&apart(move || matched(&studio, &asked)).await?))
        }
        (Method::GET, "/runs") => {
            let root = studio.folder.root().to_path_buf();
            let list = apart(move || {
                let (runs, said) = (studio.tools.runs(&root), studio.tools.said());
                Ok(json!({ "runs": runs, "said": said.failed, "notes": said.notes }))
            });
            Ok(json_reply(&list.await?))
        }
        (Method::GET, "/reports") => {
            let list = apart(move || Ok(json!({ "reports": studio.folder.reports() })));
            Ok(json_reply(&list.await?))
        }
        (Method::GET, "/report") => {
            let path = query(&request, "path").unwrap_or_default();
            Ok(report(apart(move || Ok(studio.folder.report(&path)?)).await?))
        }
        (Method::GET, "/metrics") => {
            let run = query(&request, "run").unwrap_or_default();
            let from = query(&request, "from").and_then(|from| from.parse().ok()).unwrap_or(0);
            let (lines, next, again) = apart(move || Ok(studio.folder.metrics(&run, from)?)).await?;
            Ok(json_reply(&json!({ "lines": lines, "next": next, "again": again })))
        }
        (Method::GET, "/account") => {
            let run = query(&request, "run").unwrap_or_default();
            let (samples, ledger) = apart(move || Ok(studio.folder.account(&run)?)).await?;
            let lines = samples.iter().filter_map(|line| serde_json::from_str(line).ok());
            let ledger: Option<Value> = ledger.and_then(|text| serde_json::from_str(&text).ok());
            Ok(json_reply(&json!({ "samples": lines.collect::<Vec<Value>>(), "ledger": ledger })))
        }
        (Method::POST, "/plan" | "/start") => {
            let asked: Asking = body(request).await?;
            Ok(json_reply(&apart(move || begin(&studio, &path, &asked)).await?))
        }
        (Method::POST, "/stop" | "/resume") => {
            let asked: Named = body(request).await?;
            Ok(json_reply(&apart(move || act(&studio, &path, &asked)).await?))
        }
        (Method::POST, "/lsp") => {
            let tab = request.headers().get("x-dreamc-tab").and_then(|tab| tab.to_str().ok());
            let tab = tab.unwrap_or_default().to_string();
            let asked: Asked = body(request).await?;
            let answers = apart(move || {
                let place = studio.folder.place(&asked.path)?;
                Ok(studio.tools.language(&tab, &place, &asked.message))
            });
            Ok(json_reply(&Value::Array(answers.await?)))
        }
        (_, "/" | "/files" | "/runs" | "/metrics" | "/account" | "/reports" | "/report") => {
            Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} takes GET")))
        }
        (
            _,
            "/file" | "/view" | "/inside" | "/tell" | "/match" | "/plan" | "/start" | "/stop" | "/resume"
            | "/lsp",
        ) => Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} takes POST"))),
        _ => Err(Refusal::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))),
    }
}

/// The drawing and counts of a text; where they are asked for, the counts of what it is compared
/// with: the baseline, or its own file as it was saved.
fn view(studio: &Studio, asked: &Seen) -> Result<Value, Refusal> {
    let place = studio.folder.place(&asked.path)?;
    let (device, loops) =
        (asked.device.as_deref(), if asked.passes { Loops::Unrolled } else { Loops::Folded });
    let own = studio.tools.view(&place, &asked.text, device, loops);
    let mut answer = match own {
        Some(own) => json!({ "svg": own.svg, "counts": own.counts, "components": own.components }),
        None => json!({}),
    };
    if asked.compare {
        let other = asked.baseline.as_ref().unwrap_or(&asked.path);
        answer["other"] = match (studio.folder.place(other), studio.folder.read(other)) {
            (Ok(place), Ok(text)) => {
                let view = studio.tools.view(&place, &text.text, device, Loops::Folded);
                view.map_or(Value::Null, |view| view.counts)
            }
            (Ok(_) | Err(_), Ok(_) | Err(_)) => Value::Null,
        };
    }
    Ok(answer)
}

/// The drawing of a component from inside.
fn inside(studio: &Studio, asked: &Seen) -> Result<Value, Refusal> {
    let place = studio.folder.place(&asked.path)?;
    let name = asked.inside.as_deref().unwrap_or_default();
    let svg = studio.tools.inside(&place, &asked.text, name);
    let none = || unfit(format!("the text has no component `{name}`"));
    Ok(json!({ "svg": svg.ok_or_else(none)? }))
}

/// A request that is understood and cannot be met.
fn unfit(message: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, message)
}

/// Words of a command about runs.
fn tell(studio: &Studio, asked: &Told) -> Result<Value, Refusal> {
    let (folder, root) = (&studio.folder, studio.folder.root());
    let answer = match asked {
        Told::Run { run } => studio.tools.tell(root, Question::Run(&folder.job(run)?)),
        Told::Difference { run, other } => {
            let (one, other) = (folder.either(run)?, folder.either(other)?);
            studio.tools.tell(root, Question::Difference(&one, &other))
        }
        Told::Continuation { run, prompt } => {
            studio.tools.tell(root, Question::Continuation(&folder.run(run)?, prompt))
        }
        Told::Reading { run, prompt } => {
            studio.tools.tell(root, Question::Reading(&folder.run(run)?, prompt))
        }
        Told::Analysis { run } => studio.tools.tell(root, Question::Analysis(&folder.run(run)?)),
    };
    Ok(json!({ "text": answer.map_err(unfit)? }))
}

/// Sizes at which a text meets its baseline.
fn matched(studio: &Studio, asked: &Seen) -> Result<Value, Refusal> {
    let place = studio.folder.place(&asked.path)?;
    let baseline = asked.baseline.as_ref().ok_or_else(|| unfit("choose a baseline to meet"))?;
    let (there, text) = (studio.folder.place(baseline)?, studio.folder.read(baseline)?);
    let found = studio.tools.matched((&place, &asked.text), (&there, &text.text)).map_err(unfit)?;
    Ok(json!({ "fields": found.fields, "residual": found.residual, "text": found.text }))
}

/// Plans or starts a job.
fn begin(studio: &Studio, route: &str, asked: &Asking) -> Result<Value, Refusal> {
    let job = match (&asked.path, &asked.exam) {
        (Some(path), None) => Job::File(studio.folder.place(path)?),
        (None, Some(exam)) => {
            let specs = exam.specs.iter().map(|spec| studio.folder.place(spec));
            let (tasks, budget) = (exam.tasks.clone(), exam.budget.clone());
            let (steps, seeds) = (exam.steps, exam.seeds);
            Job::Exam(Exam { specs: specs.collect::<Result<_, _>>()?, tasks, budget, steps, seeds })
        }
        (Some(_), Some(_)) | (None, None) => return Err(unfit("name a file or an exam")),
    };
    let (tools, root) = (&studio.tools, studio.folder.root());
    match route {
        "/plan" => Ok(json!({ "plan": tools.plan(root, &job).map_err(unfit)? })),
        _ => tools.start(root, &job).map_err(unfit).map(|()| json!({})),
    }
}

/// Stops or continues what trains.
fn act(studio: &Studio, route: &str, asked: &Named) -> Result<Value, Refusal> {
    let (tools, job) = (&studio.tools, studio.folder.job(&asked.path)?);
    let done = match route {
        "/resume" => tools.resume(studio.folder.root(), &job),
        _ => tools.stop(&job),
    };
    done.map_err(unfit).map(|()| json!({}))
}

/// Whether a request comes from the page: it has the token, in its header or, for the page itself
/// and for reports, in its address; it names this server; and where it says its origin, that is
/// this server, too.
fn authorise(request: &Request<Incoming>, studio: &Studio) -> Result<(), Refusal> {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let own = |authority: &str| studio.hosts.iter().any(|host| host == authority);
    let refused = |message: &str| Err(Refusal::new(StatusCode::FORBIDDEN, message));
    if !header(HOST.as_str()).is_some_and(own) {
        return refused("the studio answers to the name of this machine alone");
    }
    if header(ORIGIN.as_str()).is_some_and(|origin| !origin.strip_prefix("http://").is_some_and(own)) {
        return refused("the studio does not answer pages of another origin");
    }
    let given = match request.uri().path() {
        "/" | "/report" => query(request, "token"),
        _ => header("x-dreamc-token").map(str::to_string),
    };
    match given.is_some_and(|given| same(given.as_bytes(), studio.token.as_bytes())) {
        true => Ok(()),
        false => refused(
            "the token is missing or is another server's: use the address that `dreamc studio` printed",
        ),
    }
}

/// A field of the address.
fn query(request: &Request<Incoming>, name: &str) -> Option<String> {
    let fields = request.uri().query()?.split('&');
    let value = fields.filter_map(|field| field.split_once('=')).find(|(key, _)| *key == name)?.1;
    let mut bytes = vec![];
    let mut rest = value.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            b'+' => b' ',
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Does slow work on another thread than the connections.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    dreamc_http::apart(work).await
}

/// The body of a request.
async fn body<T: for<'a> Deserialize<'a>>(request: Request<Incoming>) -> Result<T, Refusal> {
    let bytes = dreamc_http::body(request, BODY, PATIENCE).await?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, format!("the body: {error}")))
}

/// The page, whole: it loads nothing, and may ask this server alone.
fn page() -> Reply {
    let nonce = blake3::hash(format!("{:?}", std::time::SystemTime::now()).as_bytes()).to_hex().to_string();
    let page = PAGE.replace("{{style}}", STYLE).replace("{{nonce}}", &nonce).replace("{{script}}", SCRIPT);
    let mut reply = Response::new(Full::from(page));
    let rules = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; frame-src 'self'; img-src data:; \
         frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    );
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Ok(rules) = HeaderValue::from_str(&rules) {
        headers.insert(CONTENT_SECURITY_POLICY, rules);
    }
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    reply
}

/// A report, which may run its own scripts, in an origin of its own, and ask nobody.
fn report(page: Vec<u8>) -> Reply {
    let mut reply = Response::new(Full::from(page));
    let rules = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; sandbox allow-scripts";
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(rules));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    reply
}

fn json_reply(value: &Value) -> Reply {
    let mut reply = Response::new(Full::from(value.to_string()));
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    reply
}
