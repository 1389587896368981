//! `dreamc serve`, as its clients meet it: over a socket, byte for byte.

use crate::support::sandbox::Sandbox;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SPEC: &str = "model:
  name: served
  vocab: 256
  hidden: 16
  context: 4096
  components:
    sa: {sequence: {heads: 2, head_size: 8}}
    mlp: {mlp: {intermediate: 32}}
  body: [\"sa > mlp\"]
data: {text: book.txt, validation: 0.2}
train: {steps: 30, batch: 8, sequence: 64, precision: f32, learning_rate: 0.01}
eval: {temperature: 1.0}
";

/// A run with a model that has learned a little.
fn trained() -> Sandbox {
    let book = "The quick brown fox jumps over the lazy dog; héllo wörld. ".repeat(200);
    let sandbox = Sandbox::with(&[("served.yaml", SPEC), ("book.txt", &book)]);
    sandbox.good(&["train", "served.yaml", "--out", "served"]);
    sandbox
}

/// A server that ends with its test.
pub struct Server {
    child: Child,
    address: SocketAddr,
}

/// A status, headers and a body.
struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}{}", self.head, self.body))
    }
}

impl Server {
    /// Serves the run in the folder `served`.
    pub fn start(sandbox: &Sandbox, more: &[&str]) -> Self {
        let mut command = sandbox.command(&[&["serve", "served", "--port", "0"], more].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(": ").next());
        let address = address.and_then(|a| a.parse().ok()).unwrap_or_else(|| panic!("no address: {line}"));
        Server { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// Sends bytes, and reads all that comes back.
    fn raw(&self, bytes: &[u8]) -> Reply {
        let mut stream = self.connect();
        let _ = stream.write_all(bytes);
        finish(stream)
    }

    /// Sends a request, with HTTP/1.0 so that its answer ends with the connection.
    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    fn get(&self, path: &str) -> Reply {
        finish(self.send("GET", path, "", ""))
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        finish(self.begin(path, body))
    }

    fn begin(&self, path: &str, body: &Value) -> TcpStream {
        self.send("POST", path, "Content-Type: application/json\r\n", &body.to_string())
    }

    pub fn complete(&self, body: Value) -> Value {
        let reply = self.post("/v1/completions", &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.body);
        reply.json()
    }

    /// A number of `/metrics`.
    fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").body;
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
    }

    fn wait_for(&self, name: &str, value: f64) {
        let begun = Instant::now();
        while self.metric(name) != value {
            assert!(begun.elapsed() < Duration::from_secs(60), "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn interrupt(&self) {
        let sent = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn finish(mut stream: TcpStream) -> Reply {
    let mut all = vec![];
    let _ = stream.read_to_end(&mut all);
    let all = String::from_utf8_lossy(&all).into_owned();
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    Reply { status, head: head.into(), body: body.into() }
}

fn text(answer: &Value, index: usize) -> &str {
    answer["choices"][index]["text"].as_str().unwrap()
}

#[test]
fn serving_gives_what_generate_gives_alone_and_among_others() {
    let sandbox = trained();
    let generated = |seed: &str| -> Value {
        let line = [
            "generate",
            "served",
            "The quick",
            "-n",
            "50",
            "--seed",
            seed,
            "--json",
            "-t",
            "1",
            "--no-rewrite",
        ];
        serde_json::from_str(&sandbox.good(&line)).unwrap()
    };
    let server = Server::start(&sandbox, &["--rows", "20"]);
    let ask = |seed: usize| json!({ "prompt": "The quick", "max_tokens": 50, "seed": seed });
    for seed in ["3", "4"] {
        let answer = server.complete(ask(seed.parse().unwrap()));
        assert_eq!(text(&answer, 0), generated(seed)["text"].as_str().unwrap());
    }
    let alone: Vec<Value> = (0..40).map(|seed| server.complete(ask(seed))["choices"].clone()).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let server = &server;
        let clients: Vec<_> = (0..40).map(|seed| scope.spawn(move || server.complete(ask(seed)))).collect();
        clients.into_iter().map(|client| client.join().unwrap()["choices"].clone()).collect()
    });
    assert_eq!(alone, together);
    // Lists of prompts, ids, and several choices: each by its index, with the stream of its number.
    let ids: Vec<u32> = "The quick".bytes().map(u32::from).collect();
    let several = server.complete(
        json!({ "prompt": [ids, [84, 104]], "n": 2, "max_tokens": 50, "seed": 3, "model": "served" }),
    );
    assert_eq!(several["choices"].as_array().unwrap().len(), 4);
    assert_eq!(text(&several, 0), text(&json!({ "choices": alone[3] }), 0));
    assert_ne!(text(&several, 0), text(&several, 1));
    assert_eq!(several["usage"]["prompt_tokens"], 9 + 2);
    let texts = server.complete(json!({ "prompt": ["The quick", "Th"], "max_tokens": 50, "seed": 3 }));
    assert_eq!((text(&texts, 0), text(&texts, 1)), (text(&several, 0), text(&several, 2)));
    // A stream is the same text in pieces; `echo` puts the prompt before it, `stop` ends it.
    let body = json!({ "prompt": "The quick", "max_tokens": 50, "seed": 3, "stream": true, "echo": true,
        "stream_options": { "include_usage": true } });
    let reply = server.post("/v1/completions", &body);
    assert!(
        reply.head.contains("text/event-stream") && reply.body.ends_with("data: [DONE]\n\n"),
        "{}",
        reply.body
    );
    let events = reply
        .body
        .split("\n\n")
        .filter_map(|e| serde_json::from_str::<Value>(e.strip_prefix("data: ")?).ok());
    let events: Vec<Value> = events.collect();
    let pieces: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces, format!("The quick{}", text(&several, 0)));
    assert_eq!(events.last().unwrap()["usage"]["prompt_tokens"], 9);
    let whole = text(&several, 0);
    let stop: String = whole.chars().skip(20).take(3).collect();
    let stopped =
        server.complete(json!({ "prompt": "The quick", "max_tokens": 50, "seed": 3, "stop": [stop] }));
    assert_eq!(text(&stopped, 0), &whole[..whole.find(&stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

#[test]
fn log_probabilities_are_those_of_the_tokens_that_were_written() {
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--rows", "4"]);
    let prompt = "The quick brown fox jumps over the lazy dog; and so on until it is longer than a chunk of ";
    let written =
        server.complete(json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3 }));
    let logprobs = &written["choices"][0]["logprobs"];
    // A byte that is no character is named by its number.
    let id = |name: &Value| {
        let name = name.as_str().unwrap();
        name.strip_prefix("token_id:").map_or(u64::from(name.as_bytes()[0]), |id| id.parse().unwrap())
    };
    let answer = logprobs["tokens"].as_array().unwrap().iter().map(id);
    let all: Vec<u64> = prompt.bytes().map(u64::from).chain(answer).collect();
    let again = json!({ "prompt": all, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true });
    let read = server.complete(again);
    let scored = &read["choices"][0]["logprobs"];
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(scored[key].as_array().unwrap().len(), all.len() + 1, "{key}");
    }
    assert!(scored["token_logprobs"][0].is_null() && scored["top_logprobs"][0].is_null());
    for (i, letter) in prompt.chars().enumerate() {
        assert_eq!(
            (&scored["tokens"][i], &scored["text_offset"][i]),
            (&json!(letter.to_string()), &json!(i))
        );
    }
    for i in 0..8 {
        let one = logprobs["token_logprobs"][i].as_f64().unwrap();
        let other = scored["token_logprobs"][prompt.len() + i].as_f64().unwrap();
        assert!((one - other).abs() < 1e-4, "token {i}: {one}, {other}");
        // The likeliest token was taken: its score is the largest, to the bit.
        let largest = |top: &Value| {
            top.as_object().unwrap().values().map(|v| v.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max)
        };
        assert_eq!(largest(&logprobs["top_logprobs"][i]), one);
        assert_eq!(logprobs["top_logprobs"][i].as_object().unwrap().len(), 3);
        assert_eq!(scored["top_logprobs"][prompt.len() + i].as_object().unwrap().len(), 1);
    }
    // No text at all, only the scores of the prompt.
    let none = server.complete(json!({ "prompt": "The", "max_tokens": 0, "logprobs": 0, "echo": true }));
    assert_eq!(none["choices"][0]["logprobs"]["tokens"], json!(["T", "h", "e"]));
    assert_eq!((text(&none, 0), none["usage"]["completion_tokens"].as_u64()), ("The", Some(0)));
    // The tokenizer by itself.
    let tokens = server.post("/tokenize", &json!({ "prompt": "hé", "add_special_tokens": false })).json();
    assert_eq!(tokens["tokens"], json!([104, 195, 169]));
    let back = server.post("/detokenize", &json!({ "tokens": [104, 195, 169] })).json();
    assert_eq!(back["prompt"], "hé");
    assert_eq!(server.get("/tokenizer_info").json()["eos_token"], "\0");
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], "served");
    assert_eq!(server.get("/health").status, 200);
    // The metric follows the answer within a step.
    server.wait_for("dreamc_texts_running", 0.0);
}

#[test]
fn requests_that_cannot_be_answered_are_refused_by_name() {
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--rows", "2", "--context", "64"]);
    for (body, status, says) in [
        (json!({ "prompt": "a", "model": "other" }), 404, "the model `other` does not exist"),
        (json!({ "prompt": "a", "max_token": 3 }), 400, "unknown field `max_token`"),
        (json!({ "prompt": 3 }), 400, "a list of token ids"),
        (json!({ "prompt": [] }), 400, "1 to 128 prompts"),
        (json!({ "prompt": [1, 256] }), 400, "there is no token 256"),
        (json!({ "prompt": "a", "max_tokens": 64 }), 400, "context is 64 tokens"),
        (json!({ "prompt": "a".repeat(64) }), 400, "context is 64 tokens"),
        (json!({ "prompt": "a", "max_tokens": u64::MAX }), 400, "context is 64 tokens"),
        (json!({ "prompt": "a", "temperature": -1 }), 400, "`temperature`"),
        (json!({ "prompt": "a", "top_p": 0 }), 400, "`top_p`"),
        (json!({ "prompt": "a", "top_k": 0 }), 400, "`top_k`"),
        (json!({ "prompt": "a", "logprobs": 21 }), 400, "`logprobs`"),
        (json!({ "prompt": "a", "n": 0 }), 400, "texts"),
        (json!({ "prompt": "a", "n": 1_000_000 }), 400, "texts"),
        (json!({ "prompt": "a", "best_of": 3 }), 400, "ranked"),
        (json!({ "prompt": "a", "presence_penalty": 1 }), 400, "penalties"),
        (json!({ "prompt": "a", "logit_bias": { "3": 1 } }), 400, "biases"),
        (json!({ "prompt": "a", "suffix": "b" }), 400, "after prompts"),
        (json!({ "prompt": "a", "stop": vec!["x"; 17] }), 400, "`stop`"),
    ] {
        let reply = server.post("/v1/completions", &body);
        let error = reply.json()["error"].clone();
        assert_eq!(reply.status, status, "{body}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{body}: {error}");
        assert!(
            error["type"].is_string() && error.get("param").is_some() && error["code"].is_string(),
            "{error}"
        );
    }
    let json = "Content-Type: application/json\r\n";
    for (method, path, headers, body, status) in [
        ("GET", "/v1/completions", "", "", 405),
        ("POST", "/health", json, "{}", 405),
        ("GET", "/v1/nothing", "", "", 404),
        ("POST", "/v1/chat/completions", json, "{}", 404),
        ("POST", "/v1/completions", "", "{\"prompt\": \"a\"}", 415),
        ("POST", "/v1/completions", json, "{\"prompt\": ", 400),
        ("POST", "/v1/completions", json, "\0\u{1}", 400),
    ] {
        let reply = finish(server.send(method, path, headers, body));
        assert_eq!(reply.status, status, "{method} {path}: {}", reply.body);
        assert!(reply.json()["error"]["message"].is_string());
    }
    // Nonsense, lines without end, a length that is not true.
    server.raw(b"\xff\xfe\0nonsense\r\n\r\n");
    server.raw(&[b"GET /".as_slice(), &vec![b'a'; 100_000], b" HTTP/1.1\r\n\r\n"].concat());
    let large = server.raw(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n");
    assert_eq!(large.status, 413, "{}", large.head);
    drop(server.send(
        "POST",
        "/v1/completions",
        "Content-Length: 50\r\nContent-Type: application/json\r\n",
        "{",
    ));
    server.complete(json!({ "prompt": "a", "max_tokens": 3 }));

    let closed = Server::start(&sandbox, &["--api-key", "secret"]);
    assert_eq!(closed.get("/v1/models").status, 401);
    let with =
        |key: &str| finish(closed.send("GET", "/v1/models", &format!("Authorization: Bearer {key}\r\n"), ""));
    assert_eq!((with("secret").status, with("secreT").status, with("").status), (200, 401, 401));
    assert_eq!(closed.get("/health").status, 200);
    drop(closed);
    for (line, says) in [
        (&["serve", "served", "--context", "9999"][..], "the model has a context of 4096"),
        (&["serve", "served", "--api-key", "a b"], "--api-key"),
        (&["serve", "served", "--port", &server.address.port().to_string()], "cannot listen at"),
        (&["serve", "served.yaml"], "a trained model is needed"),
    ] {
        let (code, error) = sandbox.bad(line);
        assert!(code == 2 && error.contains(says), "{line:?}: {code} {error}");
    }
}

#[test]
fn clients_that_leave_free_their_rows_and_others_wait_or_are_refused() {
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--rows", "2", "--queue", "3"]);
    // Greedy and long: it is under way for as long as a test needs.
    let long = json!({ "prompt": "The", "max_tokens": 4000, "temperature": 0 });
    let streamed = json!({ "prompt": "The", "max_tokens": 4000, "temperature": 0, "stream": true });
    let begun: Vec<TcpStream> =
        [&long, &streamed].into_iter().map(|body| server.begin("/v1/completions", body)).collect();
    server.wait_for("dreamc_texts_running", 2.0);
    let waiting: Vec<TcpStream> = (0..3).map(|_| server.begin("/v1/completions", &long)).collect();
    server.wait_for("dreamc_texts_waiting", 3.0);
    let refused = server.post("/v1/completions", &json!({ "prompt": "a" }));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.head.to_lowercase().contains("retry-after: "), "{}", refused.head);
    let too_many = server.post("/v1/completions", &json!({ "prompt": "a", "n": 4 }));
    assert_eq!(too_many.status, 400, "{}", too_many.body);
    drop(begun);
    drop(waiting);
    // A text that waits takes a free row before it is found gone: no text runs for good once none
    // waits.
    server.wait_for("dreamc_texts_waiting", 0.0);
    server.wait_for("dreamc_texts_running", 0.0);
    assert!(server.metric("dreamc_texts_gone_total") >= 4.0);
    server.complete(json!({ "prompt": "a", "max_tokens": 3 }));

    // Ctrl-C: what was begun is finished, what comes later is not begun.
    let last =
        server.begin("/v1/completions", &json!({ "prompt": "The", "max_tokens": 3000, "temperature": 0 }));
    server.wait_for("dreamc_texts_running", 1.0);
    server.interrupt();
    let reply = finish(last);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.json()["choices"][0]["finish_reason"].is_string());
    let mut server = server;
    assert!(server.child.wait().unwrap().success());
    assert!(TcpStream::connect(server.address).is_err());
}

/// Memory follows the tokens of the texts that there are; a text that leaves gives its own back.
#[test]
#[cfg(target_os = "linux")]
fn memory_follows_the_tokens_of_texts() {
    let wide =
        SPEC.replace("heads: 2, head_size: 8", "heads: 8, head_size: 64").replace("steps: 30", "steps: 2");
    let sandbox =
        Sandbox::with(&[("served.yaml", &wide), ("book.txt", &"The quick brown fox. ".repeat(400))]);
    sandbox.good(&["train", "served.yaml", "--out", "served"]);
    // 4 KiB a token and a layer, of texts of about 1,800 tokens: 7 MB a text.
    let server = Server::start(&sandbox, &["--rows", "8", "--keep", "128", "--cache-tokens", "16000"]);
    let resident = || -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1e3
    };
    let text = |i: usize, n: usize| format!("{i}{}", "the fox ".repeat(n));
    let ask =
        |i: usize, n: usize, more: u64| json!({ "prompt": text(i, n), "max_tokens": more, "temperature": 0 });
    server.complete(ask(0, 20, 2));
    let before = resident();
    let mut peaks = vec![];
    for _ in 0..2 {
        // Each writes on until it is dropped.
        let all: Vec<TcpStream> =
            (1..=6).map(|i| server.begin("/v1/completions", &ask(i, 220, 800))).collect();
        server.wait_for("dreamc_texts_running", 6.0);
        let begun = Instant::now();
        while server.metric("dreamc_cache_tokens") < 6.0 * 1761.0 {
            assert!(begun.elapsed() < Duration::from_secs(120), "{}", server.metric("dreamc_cache_tokens"));
        }
        assert_eq!(server.metric("dreamc_cache_tokens_reserved"), 6.0 * 2561.0);
        peaks.push(resident());
        drop(all);
        server.wait_for("dreamc_texts_running", 0.0);
        assert_eq!(server.metric("dreamc_cache_tokens"), 0.0);
        assert_eq!(server.metric("dreamc_cache_tokens_kept"), 128.0);
    }
    server.complete(ask(0, 20, 2));
    let after = resident();
    let said = format!("{before:.0} MB before, {peaks:.0?} with six texts, {after:.0} behind them");
    assert!(peaks.iter().all(|peak| peak - before > 6.0 * 7.0 * 0.8), "{said}");
    assert!(after - before < 0.25 * (peaks[0] - before), "{said}");
    assert!(peaks[1] - peaks[0] < 0.15 * (peaks[0] - before), "{said}");
}

/// Texts wait until the caches have room for all that they may write; one that never fits is
/// refused.
#[test]
fn caches_have_a_bound() {
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--rows", "8", "--queue", "2", "--cache-tokens", "4000"]);
    let never = server.post("/v1/completions", &json!({ "prompt": "The", "max_tokens": 3998 }));
    let error = never.json()["error"].clone();
    assert_eq!((never.status, &error["param"]), (400, &json!("max_tokens")));
    let says = "to hold 4000 tokens; the prompt has 3 and 3998 are to be written";
    assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    let long = json!({ "prompt": "The", "max_tokens": 3000, "temperature": 0, "stream": true });
    let begun = server.begin("/v1/completions", &long);
    server.wait_for("dreamc_texts_running", 1.0);
    // A small one has room next to it; another long one has not, and those after it wait, too.
    server.complete(json!({ "prompt": "a", "max_tokens": 3 }));
    let waits = server.begin("/v1/completions", &long);
    server.wait_for("dreamc_texts_waiting", 1.0);
    let behind: Vec<TcpStream> =
        (0..2).map(|_| server.begin("/v1/completions", &json!({ "prompt": "a", "max_tokens": 3 }))).collect();
    server.wait_for("dreamc_texts_waiting", 3.0);
    assert_eq!(server.metric("dreamc_texts_running"), 1.0);
    assert_eq!(server.metric("dreamc_cache_tokens_reserved"), 3003.0);
    let refused = server.post("/v1/completions", &json!({ "prompt": "a" }));
    let says = "at most 2 texts may wait (1 in rows, 3003 tokens in caches)";
    assert!(refused.status == 429 && refused.body.contains(says), "{}", refused.body);
    drop(begun);
    assert!(behind.into_iter().map(finish).all(|reply| reply.status == 200));
    drop(waits);
    server.wait_for("dreamc_texts_running", 0.0);
    assert_eq!(server.metric("dreamc_cache_tokens_reserved"), 0.0);
}

/// A common beginning of prompts is read once, also when the text that read it has gone; with the
/// same answer.
#[test]
fn beginnings_are_kept_behind_their_texts() {
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--rows", "4", "--keep", "256"]);
    let none = Server::start(&sandbox, &["--rows", "4", "--keep", "0"]);
    let common = "The quick brown fox jumps over the lazy dog; héllo wörld. ".repeat(5);
    for (i, shared) in [(0, 0.0), (1, 256.0), (2, 512.0)] {
        let body = json!({ "prompt": format!("{common} {i}"), "max_tokens": 20, "seed": 1 });
        let (one, other) = (server.complete(body.clone()), none.complete(body));
        assert_eq!(one["choices"], other["choices"]);
        assert_eq!(server.metric("dreamc_prompt_tokens_shared_total"), shared);
    }
    assert_eq!(none.metric("dreamc_prompt_tokens_shared_total"), 0.0);
    assert_eq!(none.metric("dreamc_cache_tokens_kept"), 0.0);
}

#[test]
fn openai_reads_streams_and_is_refused() {
    let Some(python) = crate::support::python() else { return };
    let sandbox = trained();
    let server = Server::start(&sandbox, &["--api-key", "secret"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/openai_client.py");
    let base = format!("http://{}/v1", server.address);
    let output = Command::new(python).args([script, &base, "secret"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("all well"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// lm-evaluation-harness finds the accuracy that `dreamc eval --choices` finds on the same rows.
#[test]
fn lm_eval_agrees_with_eval() {
    let Some(python) = crate::support::python() else { return };
    let sandbox = trained();
    let words = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "héllo", "wörld", "The"];
    let rows = (0..40).map(|i| {
        let choice = |k: usize| format!(" {}", words[(i * k + k + i) % words.len()]);
        let prompt = format!("The {} brown {}", words[i % 10], words[(i * 3 + 1) % 10]);
        json!({ "prompt": prompt, "choices": [choice(1), choice(3), choice(7)], "answer": i % 3 }).to_string()
    });
    sandbox.write("rows.jsonl", &(rows.collect::<Vec<_>>().join("\n") + "\n"));
    let report = sandbox.good(&["eval", "served", "--choices", "rows.jsonl", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let right = report[0]["choices"]["right"].as_f64().unwrap() / 40.0;
    let server = Server::start(&sandbox, &["--context", "512"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/lm_eval_client.py");
    let base = format!("http://{}/v1/completions", server.address);
    let mut command = Command::new(python);
    command.args([script, &base, "served", "rows.jsonl"]).current_dir(sandbox.path(""));
    let output = command.env("HF_HOME", sandbox.path("hf")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let found = said.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    let found = found.unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(found["accuracy"].as_f64().unwrap(), right, "{found} {report}");
    assert!(found["word_perplexity"].as_f64().unwrap() > 1.0 && found["exact"].is_number(), "{found}");
}
