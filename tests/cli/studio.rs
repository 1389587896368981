//! The studio: its page in a browser, and whom it answers.

use crate::support::sandbox::{Sandbox, texts};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SMALL: &str = "\
model small {
  vocab 256  hidden 64  context 64
  sa = sequence { heads 4 }
  ff = mlp { intermediate 128 }
  repeat 2 { sa > ff }
}
";

/// A component that a definition makes.
const OWN: &str = "\
define mix(width 4) {
  return linear(silu(conv(linear(x, [hidden]), width)), [hidden])
}

model own {
  vocab 256  hidden 64  context 64
  mix = mix {}
  ff = mlp { intermediate 128 }
  repeat 2 { mix > ff }
}
";

/// A model whose step takes no time to speak of.
const TINY: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 8
  context: 64
  components:
    sa: {sequence: {heads: 2}}
    ff: {mlp: {intermediate: 8}}
  body: [\"sa > ff\"]
";

/// A model with everything that the page shows of a run from inside.
const ROUTED: &str = "\
model routed {
  vocab 256  hidden 32  context 64
  sa = sequence { heads 2 }
  da = depth { heads 1  head_size 16 }
  ea = experts { count 4  active 1  intermediate 16  query 8  balance 1e-3 }
  recur 3 exit gate 0.1 {
    layer { (da | sa) > ea }
    layer { skip(capacity 0.5, causal bce 0.01) { sa > ea } }
  }
}

data { task permutation  size 4  max_steps 2 }
train { steps 6  batch 2  sequence 32  precision f32  evaluate { every 3 } }
";

fn sandbox() -> Sandbox {
    let layers = |name: &str, count: u64| {
        format!(
            "model:\n  name: {name}\n  vocab: 256\n  hidden: 64\n  context: 64\n  components:\n    \
             sa: {{sequence: {{heads: 4}}}}\n    ff: {{mlp: {{intermediate: 200}}}}\n  body:\n    \
             - repeat: {count}\n      layers: [\"sa > ff\"]\n"
        )
    };
    let task = layers("task", 2)
        + "data: {task: permutation, size: 4, max_steps: 2}\n\
           train: {steps: 1000000, batch: 2, sequence: 32, precision: f32}\n";
    let sandbox = Sandbox::with(&[
        ("task.yaml", &task),
        ("own.dream", OWN),
        ("routed.dream", ROUTED),
        ("small.dream", SMALL),
        ("other.yaml", &layers("other", 2)),
        ("deep.yaml", &layers("deep", 4096)),
        ("tiny.yaml", TINY),
        ("quickstart.yaml", include_str!("../../examples/quickstart.yaml")),
    ]);
    sandbox.good(&[
        "check",
        "small.dream",
        "other.yaml",
        "deep.yaml",
        "task.yaml",
        "own.dream",
        "routed.dream",
    ]);
    sandbox
}

/// A studio that ends with its test.
struct Studio {
    child: Child,
    address: String,
    host: String,
    token: String,
}

impl Drop for Studio {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Studio {
    fn start(sandbox: &Sandbox, place: &str) -> Self {
        let mut child = sandbox.command(&["studio", place]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap_or_default().to_string();
        let split = address.strip_prefix("http://").and_then(|rest| rest.split_once("/?token="));
        let (host, token) = split.unwrap_or_else(|| panic!("no address: {line}"));
        let (host, token) = (host.to_string(), token.to_string());
        Studio { child, address, host, token }
    }

    /// Sends a request whose headers are these alone; its status and JSON.
    fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!("{method} {path} HTTP/1.0\r\nContent-Length: {}\r\n", body.len());
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status.unwrap_or_else(|| panic!("{answer}")), serde_json::from_str(body).unwrap_or(Value::Null))
    }

    /// As the page asks.
    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let origin = format!("http://{}", self.host);
        let headers = [
            ("Host", self.host.as_str()),
            ("Origin", &origin),
            ("x-dreamc-token", &self.token),
            ("Content-Type", "application/json"),
        ];
        self.send(method, path, &headers, &body.to_string())
    }
}

#[test]
fn a_specification_is_written_and_seen_in_a_browser() {
    let Some(python) = crate::support::python() else { return };
    let sandbox = sandbox();
    sandbox.good(&["train", "routed.dream", "--out", "runs/routed"]);
    let studio = Studio::start(&sandbox, "small.dream");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/studio_client.py");
    let output =
        Command::new(python).arg(script).arg(&studio.address).arg(sandbox.path(".")).output().unwrap();
    let (out, err) = texts(&output);
    if out.contains("no Chromium") {
        return dreamc_skip::skip("no Chromium: apt-get install chromium");
    }
    assert!(output.status.success() && out.contains("all well"), "{out}{err}");
    print!("{out}");
    // The run that the page began goes on when the studio is killed, and the next one finds it.
    drop(studio);
    let run = sandbox.path("runs/task-001");
    let length = || std::fs::metadata(run.join("metrics.jsonl")).unwrap().len();
    let before = length();
    let until = Instant::now() + Duration::from_secs(60);
    while length() == before {
        assert!(Instant::now() < until, "the run ended with the studio");
        std::thread::sleep(Duration::from_millis(50));
    }
    let studio = Studio::start(&sandbox, ".");
    let scene = Scene { studio: &studio, sandbox: &sandbox };
    scene.wait("runs/task-001", |row| row["trains"] == true);
    let (status, answer) = scene.post("/stop", json!({"path": "runs/task-001"}));
    assert_eq!(status, 200, "{answer}");
    while !std::fs::read_to_string(run.join("ledger.json")).unwrap().contains("\"interrupted\"") {
        assert!(Instant::now() < until, "the run does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A studio and the folder that it shows, with a run that ended.
struct Scene<'a> {
    studio: &'a Studio,
    sandbox: &'a Sandbox,
}

impl Scene<'_> {
    /// The status of a request with these headers alone.
    fn bare(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> u16 {
        self.studio.send(method, path, headers, "").0
    }

    fn get(&self, path: &str) -> (u16, Value) {
        self.studio.ask("GET", path, &Value::Null)
    }

    fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.studio.ask("POST", path, &body)
    }

    /// Whether a request was refused so, in a sentence with these words.
    fn refused(&self, (status, answer): (u16, Value), expected: u16, words: &str) {
        let said = answer["error"].as_str().unwrap_or_default();
        assert!(status == expected && said.contains(words), "{status}: {said}; not {expected}: {words}");
    }

    /// Paths are refused wherever one is taken.
    fn outside(&self, path: &str) {
        let escaped: String = path.bytes().map(|byte| format!("%{byte:02x}")).collect();
        assert_eq!(self.get(&format!("/file?path={escaped}")).0, 403, "{path}");
        let wrote = json!({"path": path, "text": "gone", "version": null});
        assert_eq!(self.post("/file", wrote).0, 403, "{path}");
        let seen = json!({"path": path, "text": SMALL, "baseline": null});
        assert_eq!(self.post("/view", seen.clone()).0, 403, "{path}");
        assert_eq!(self.post("/inside", seen).0, 403, "{path}");
        assert_eq!(self.post("/plan", json!({"path": path})).0, 403, "{path}");
        let exam = json!({"specs": [path], "tasks": "", "budget": "1s", "seeds": 1});
        assert_eq!(self.post("/start", json!({"exam": exam})).0, 403, "{path}");
        assert_eq!(self.post("/lsp", json!({"path": path, "message": {}})).0, 403, "{path}");
    }

    /// The row of a run in the list.
    fn row(&self, path: &str) -> Value {
        let (_, answer) = self.get("/runs");
        let rows = answer["runs"].as_array().cloned().unwrap_or_default();
        rows.into_iter().find(|row| row["path"] == path).unwrap_or(Value::Null)
    }

    /// Waits until the row of a run is as it should be.
    fn wait(&self, path: &str, ready: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            let row = self.row(path);
            if ready(&row) {
                return row;
            }
            assert!(Instant::now() < until, "{path}: {row}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn exam(&self, specs: &[&str], tasks: &str, budget: &str) -> (u16, Value) {
        self.post("/plan", json!({"exam": {"specs": specs, "tasks": tasks, "budget": budget, "seeds": 1}}))
    }
}

/// A fault by its name, and how the studio takes it.
type Fault = (&'static str, fn(&Scene));

/// Requests of others than the page.
const STRANGERS: &[Fault] = &[
    ("no token", |s| assert_eq!(s.bare("GET", "/files", &[("Host", &s.studio.host)]), 403)),
    ("another server's token", |s| {
        let token = "0123456789abcdef0123456789abcdef";
        assert_eq!(s.bare("GET", "/files", &[("Host", &s.studio.host), ("x-dreamc-token", token)]), 403);
    }),
    ("the beginning of the token", |s| {
        let token = &s.studio.token[..31];
        assert_eq!(s.bare("GET", "/files", &[("Host", &s.studio.host), ("x-dreamc-token", token)]), 403);
    }),
    ("a token in the address of a route", |s| {
        let path = format!("/files?token={}", s.studio.token);
        assert_eq!(s.bare("GET", &path, &[("Host", &s.studio.host)]), 403);
    }),
    ("the page without a token", |s| assert_eq!(s.bare("GET", "/", &[("Host", &s.studio.host)]), 403)),
    ("a report without a token", |s| {
        assert_eq!(s.bare("GET", "/report?path=report.html", &[("Host", &s.studio.host)]), 403);
    }),
    ("a name that was bound to this machine", |s| {
        let headers = [("Host", "attacker.example"), ("x-dreamc-token", s.studio.token.as_str())];
        assert_eq!(s.bare("GET", "/files", &headers), 403);
    }),
    ("no name", |s| assert_eq!(s.bare("GET", "/files", &[("x-dreamc-token", &s.studio.token)]), 403)),
    ("another port", |s| {
        let headers = [("Host", "127.0.0.1:1"), ("x-dreamc-token", s.studio.token.as_str())];
        assert_eq!(s.bare("GET", "/files", &headers), 403);
    }),
    ("another origin", |s| from(s, "http://attacker.example")),
    ("an origin that is hidden", |s| from(s, "null")),
    ("an origin of another scheme", |s| from(s, &format!("https://{}", s.studio.host))),
];

fn from(s: &Scene, origin: &str) {
    let headers = [("Host", s.studio.host.as_str()), ("Origin", origin), ("x-dreamc-token", &s.studio.token)];
    for (method, path) in
        [("GET", "/files"), ("GET", "/file?path=small.dream"), ("POST", "/view"), ("POST", "/start")]
    {
        assert_eq!(s.bare(method, path, &headers), 403, "{method} {path}");
    }
}

/// Requests without sense.
const NONSENSE: &[Fault] = &[
    ("a form, which cannot say that it sends JSON", |s| {
        let own = format!("http://{}", s.studio.host);
        let headers =
            [("Host", s.studio.host.as_str()), ("Origin", &own), ("x-dreamc-token", &s.studio.token)];
        assert_eq!(s.bare("POST", "/view", &headers), 415);
    }),
    ("JSON without the fields", |s| s.refused(s.post("/view", json!({})), 400, "missing field")),
    ("a body without end", |s| {
        // It is refused by its length, before any of it is read.
        let mut stream = TcpStream::connect(&s.studio.host).unwrap();
        let (host, token) = (&s.studio.host, &s.studio.token);
        let head = format!(
            "POST /view HTTP/1.1\r\nHost: {host}\r\nx-dreamc-token: {token}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            9 << 20
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413");
    }),
    ("another method", |s| s.refused(s.studio.ask("DELETE", "/file", &Value::Null), 405, "takes POST")),
    ("an address of nothing", |s| s.refused(s.get("/elsewhere"), 404, "nothing at /elsewhere")),
    ("a connection that says something else", |s| {
        let mut stream = TcpStream::connect(&s.studio.host).unwrap();
        stream.write_all(b"\x16\x03\x01 hello\r\n\r\n").unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        assert!(!answer.contains(" 200 "), "{answer}");
    }),
    ("clients that say nothing", |s| {
        let silent: Vec<_> = (0..60).map(|_| TcpStream::connect(&s.studio.host).unwrap()).collect();
        assert_eq!(s.get("/files").0, 200);
        drop(silent);
    }),
    ("a message that no editor sends", |s| {
        let message = json!({"jsonrpc": "2.0", "id": 1, "method": "textDocument/hover", "params": [1, 2]});
        assert_eq!(s.post("/lsp", json!({"path": "small.dream", "message": message})).0, 200);
    }),
];

/// Paths that lead elsewhere.
const PATHS: &[Fault] = &[
    ("the folder above", |s| s.outside("../small.dream")),
    ("the root", |s| s.outside("/etc/passwd.yaml")),
    ("up again from below", |s| s.outside("own.dream/../../small.dream")),
    ("no specification", |s| s.outside("notes.txt")),
    ("no path", |s| s.outside("")),
    ("a path of another system", |s| s.outside("..\\small.dream")),
    ("a link to a file outside", |s| s.outside("link.yaml")),
    ("a link to a folder outside", |s| s.outside("away/small.dream")),
    ("a report outside", |s| {
        let path = format!("/report?path=..%2Freport.html&token={}", s.studio.token);
        assert_eq!(s.bare("GET", &path, &[("Host", &s.studio.host)]), 403);
    }),
    ("a file that is no report", |s| {
        let path = format!("/report?path=own.dream&token={}", s.studio.token);
        assert_eq!(s.bare("GET", &path, &[("Host", &s.studio.host)]), 404);
    }),
    ("a name with an end of text", |s| assert!(s.get("/file?path=a%00.yaml").0 >= 403)),
];

/// Files that are not as they were.
const FILES: &[Fault] = &[
    ("a file that is gone", |s| s.refused(s.get("/file?path=none.yaml"), 404, "does not exist")),
    ("a file that another program changed", |s| {
        std::fs::write(s.sandbox.path("inner/theirs.dream"), SMALL).unwrap();
        let (_, read) = s.get("/file?path=theirs.dream");
        std::fs::write(s.sandbox.path("inner/theirs.dream"), "# theirs\n").unwrap();
        let wrote = json!({"path": "theirs.dream", "text": "# mine\n", "version": read["version"]});
        s.refused(s.post("/file", wrote), 409, "open it again");
        assert_eq!(s.sandbox.read("inner/theirs.dream"), "# theirs\n");
    }),
    ("a new file where there is one", |s| {
        let wrote = json!({"path": "own.dream", "text": "# mine\n", "version": null});
        s.refused(s.post("/file", wrote), 409, "changed by another program");
        assert_eq!(s.sandbox.read("inner/own.dream"), SMALL);
    }),
    ("a file that was removed while it was written", |s| {
        let wrote = json!({"path": "removed.dream", "text": "# mine\n", "version": "0123"});
        s.refused(s.post("/file", wrote), 409, "changed by another program");
        assert!(!s.sandbox.path("inner/removed.dream").exists());
    }),
    ("a file of 5 MiB", |s| {
        std::fs::write(s.sandbox.path("inner/large.yaml"), vec![b'#'; 5 << 20]).unwrap();
        s.refused(s.get("/file?path=large.yaml"), 413, "4 MiB");
    }),
    ("a file that is no text", |s| {
        std::fs::write(s.sandbox.path("inner/bytes.yaml"), [0xff, 0xfe, 0x00]).unwrap();
        s.refused(s.get("/file?path=bytes.yaml"), 500, "not UTF-8");
    }),
    ("a folder with the name of a file", |s| {
        std::fs::create_dir(s.sandbox.path("inner/folder.yaml")).unwrap();
        assert_eq!(s.get("/file?path=folder.yaml").0, 500);
    }),
    ("a text with an error", |s| {
        let (status, answer) =
            s.post("/view", json!({"path": "own.dream", "text": "model {", "compare": true}));
        assert!(status == 200 && answer["svg"].is_null() && answer["other"].is_object(), "{answer}");
    }),
    ("a component that is not there", |s| {
        let asked = json!({"path": "own.dream", "text": SMALL, "inside": "none"});
        s.refused(s.post("/inside", asked), 422, "no component `none`");
    }),
    ("no baseline to meet", |s| {
        s.refused(s.post("/match", json!({"path": "own.dream", "text": SMALL})), 422, "choose a baseline");
    }),
    ("a baseline with errors", |s| {
        std::fs::write(s.sandbox.path("inner/wrong.dream"), "model {").unwrap();
        let asked = json!({"path": "own.dream", "text": SMALL, "baseline": "wrong.dream"});
        s.refused(s.post("/match", asked), 422, "mend them first");
    }),
];

/// Runs that are not as they were, and those that cannot begin.
const RUNS: &[Fault] = &[
    ("training without data", |s| s.refused(s.post("/plan", json!({"path": "own.dream"})), 422, "data")),
    ("training a text with errors", |s| {
        std::fs::write(s.sandbox.path("inner/wrong.dream"), "model {").unwrap();
        assert_eq!(s.post("/plan", json!({"path": "wrong.dream"})).0, 422);
    }),
    ("neither a file nor an exam", |s| s.refused(s.post("/start", json!({})), 422, "a file or an exam")),
    ("an exam of nothing", |s| assert_eq!(s.exam(&[], "", "1s").0, 422)),
    ("an exam of a task that is not there", |s| {
        s.refused(s.exam(&["own.dream"], "chess", "1s"), 422, "no such task");
    }),
    ("an exam of no time", |s| assert_eq!(s.exam(&["own.dream"], "", "soon").0, 422)),
    ("a stop where nothing trains", |s| {
        s.refused(s.post("/stop", json!({"path": "runs/first"})), 422, "no process trains there");
    }),
    ("a stop of no run", |s| assert_eq!(s.post("/stop", json!({"path": "runs"})).0, 404)),
    ("a stop outside", |s| assert_eq!(s.post("/stop", json!({"path": "../runs/other"})).0, 403)),
    ("metrics of no run", |s| assert_eq!(s.get("/metrics?run=runs").0, 404)),
    ("a ledger that is damaged", |s| {
        copy(s, "damaged");
        std::fs::write(s.sandbox.path("inner/runs/damaged/ledger.json"), "{damaged").unwrap();
        assert_eq!(s.row("runs/damaged")["status"], "begins");
        assert_eq!(s.get("/account?run=runs/damaged").1["ledger"], Value::Null);
    }),
    ("metrics that became fewer", |s| {
        copy(s, "fewer");
        let (_, read) = s.get("/metrics?run=runs/fewer&from=0");
        std::fs::write(s.sandbox.path("inner/runs/fewer/metrics.jsonl"), "{\"step\":1}\n").unwrap();
        let (_, again) = s.get(&format!("/metrics?run=runs/fewer&from={}", read["next"]));
        assert_eq!((&again["again"], &again["next"]), (&json!(true), &json!(11)), "{again}");
    }),
    ("a run without weights", |s| {
        copy(s, "bare");
        let asked = json!({"about": "reading", "run": "runs/bare", "prompt": "a"});
        assert_eq!(s.post("/tell", asked).0, 422);
    }),
    ("a prompt that looks like an option", |s| {
        let asked = json!({"about": "reading", "run": "runs/first", "prompt": "--help"});
        let (status, answer) = s.post("/tell", asked);
        assert!(status == 200 && !answer["text"].as_str().unwrap().contains("Usage"), "{answer}");
    }),
    ("a prompt that is too long", |s| {
        let asked = json!({"about": "reading", "run": "runs/first", "prompt": "ab ".repeat(2000)});
        s.refused(s.post("/tell", asked), 422, "tokens, and at most");
    }),
    ("a run that is killed while it is watched", |s| {
        assert_eq!(s.post("/start", json!({"path": "task.yaml"})).0, 200);
        let row = s.wait("runs/task-001", |row| row["trains"] == true && row["steps"] != Value::Null);
        assert_eq!(row["kind"], "run");
        s.refused(s.post("/resume", json!({"path": "runs/task-001"})), 422, "trains there already");
        let process = s.sandbox.read("inner/runs/task-001/run.lock");
        assert!(Command::new("kill").args(["-KILL", process.trim()]).status().unwrap().success());
        s.wait("runs/task-001", |row| row["status"] == "stopped without a word" && row["trains"] == false);
    }),
    ("a run that was stopped while the studio was gone goes on", |s| {
        // Without a checkpoint it begins anew; steps of the one that was killed do not count.
        let metrics = s.sandbox.path("inner/runs/task-001/metrics.jsonl");
        std::fs::write(&metrics, "").unwrap();
        assert_eq!(s.post("/resume", json!({"path": "runs/task-001"})).0, 200);
        s.wait("runs/task-001", |row| row["trains"] == true);
        let metrics = || std::fs::read_to_string(&metrics).unwrap_or_default().lines().count();
        let until = Instant::now() + Duration::from_secs(60);
        // A last write of the killed process may have come after the file was emptied. The other
        // one hears signals from its first step on.
        let begun = metrics();
        while metrics() < begun + 2 {
            assert!(Instant::now() < until, "no step is taken");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(s.post("/stop", json!({"path": "runs/task-001"})).0, 200);
        s.wait("runs/task-001", |row| row["status"] == "interrupted");
    }),
];

/// A copy of the run that ended, without its weights.
fn copy(s: &Scene, name: &str) {
    let to = s.sandbox.path(&format!("inner/runs/{name}"));
    std::fs::create_dir_all(&to).unwrap();
    for file in ["ledger.json", "metrics.jsonl", "spec.yaml"] {
        std::fs::copy(s.sandbox.path("inner/runs/first").join(file), to.join(file)).unwrap();
    }
}

/// Nothing that a stranger, a file or a run does ends the studio, reaches outside its folder, or
/// loses a text.
#[test]
fn faults_are_met() {
    let sandbox = sandbox();
    std::fs::create_dir(sandbox.path("inner")).unwrap();
    std::fs::write(sandbox.path("inner/own.dream"), SMALL).unwrap();
    std::fs::write(sandbox.path("report.html"), "<p>").unwrap();
    std::fs::copy(sandbox.path("task.yaml"), sandbox.path("inner/task.yaml")).unwrap();
    std::os::unix::fs::symlink(sandbox.path("small.dream"), sandbox.path("inner/link.yaml")).unwrap();
    std::os::unix::fs::symlink(sandbox.path("."), sandbox.path("inner/away")).unwrap();
    let short = ["--set", "train.steps=2", "--out", "inner/runs/first"];
    sandbox.good(&[&["train", "task.yaml"], &short[..]].concat());
    let studio = Studio::start(&sandbox, "inner");
    let scene = Scene { studio: &studio, sandbox: &sandbox };
    let listed = json!(["own.dream", "task.yaml"]);
    let all: Vec<&Fault> = [STRANGERS, NONSENSE, PATHS, FILES, RUNS].into_iter().flatten().collect();
    for (name, fault) in &all {
        println!("{name}");
        fault(&scene);
        assert_eq!(scene.get("/files").0, 200, "the studio is gone after: {name}");
    }
    assert!(all.len() >= 40, "{}", all.len());
    println!("{} faults", all.len());
    assert_eq!(sandbox.read("small.dream"), SMALL);
    let files = scene.get("/files").1["files"].clone();
    let own: Vec<&Value> =
        files.as_array().unwrap().iter().filter(|f| listed.as_array().unwrap().contains(f)).collect();
    assert_eq!(own.len(), 2, "{files}");
    let again = sandbox.error(&["studio", "nowhere"]);
    assert!(again.contains("nowhere"), "{again}");
    std::fs::write(sandbox.path("notes.txt"), "n").unwrap();
    assert!(sandbox.error(&["studio", "notes.txt"]).contains("is no specification"));
}

/// Thousands of runs are listed, those that train first, and each is what its ledger says.
#[test]
fn five_thousand_runs_are_listed() {
    let sandbox = sandbox();
    sandbox.good(&["train", "task.yaml", "--set", "train.steps=2", "--out", "runs/first"]);
    let (ledger, metrics) =
        (sandbox.read("runs/first/ledger.json"), sandbox.read("runs/first/metrics.jsonl"));
    for n in 0..4999 {
        let folder = sandbox.path(&format!("runs/{n:04}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("ledger.json"), &ledger).unwrap();
        std::fs::write(folder.join("metrics.jsonl"), &metrics).unwrap();
    }
    std::fs::write(sandbox.path("runs/4711/ledger.json"), "{damaged").unwrap();
    let studio = Studio::start(&sandbox, ".");
    let begin = Instant::now();
    let (status, answer) = studio.ask("GET", "/runs", &Value::Null);
    let took = begin.elapsed();
    let runs = answer["runs"].as_array().unwrap();
    assert_eq!((status, runs.len()), (200, 5000));
    let first = runs.iter().find(|run| run["path"] == "runs/first").unwrap();
    assert_eq!((&first["status"], &first["steps"]), (&json!("finished"), &json!(2)));
    let damaged = runs.iter().find(|run| run["path"] == "runs/4711").unwrap();
    assert_eq!(damaged["status"], "begins");
    println!("5,000 runs are listed in {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    // Neither of these trains.
    for path in ["runs/first", "runs/0001"] {
        let (status, answer) = studio.ask("POST", "/stop", &json!({"path": path}));
        assert_eq!(status, 422, "{answer}");
    }
    for path in ["runs", "../runs/first", "runs/none", ""] {
        assert!(studio.ask("POST", "/stop", &json!({"path": path})).0 >= 403, "{path}");
        assert!(studio.ask("GET", &format!("/metrics?run={path}"), &Value::Null).0 >= 403, "{path}");
    }
    let question = json!({"about": "difference", "run": "runs/first", "other": "runs/first"});
    let (_, told) = studio.ask("POST", "/tell", &question);
    assert!(told["text"].is_string(), "{told}");
}

/// The page has what its sources make, where the tools to build it are installed.
#[test]
fn the_bundle_is_built_from_its_sources() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/studio/page");
    let esbuild = format!("{page}/node_modules/.bin/esbuild");
    if !std::path::Path::new(&esbuild).is_file() {
        return dreamc_skip::skip("no esbuild: npm ci in studio/page");
    }
    let made = tempfile::tempdir().unwrap();
    let out = made.path().join("bundle.js");
    let package: Value =
        serde_json::from_str(&std::fs::read_to_string(format!("{page}/package.json")).unwrap()).unwrap();
    let options = package["scripts"]["build"].as_str().unwrap().split(' ').filter(|o| o.starts_with("--"));
    let options = options.filter(|o| !o.starts_with("--outfile"));
    let status = Command::new(esbuild)
        .current_dir(page)
        .arg("studio.mjs")
        .args(options)
        .arg(format!("--outfile={}", out.display()))
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let built = std::fs::read(out).unwrap();
    let kept = std::fs::read(format!("{page}/bundle.js")).unwrap();
    assert!(built == kept, "bundle.js is not what its sources make: npm run build in studio/page");
    assert!(kept.len() < 3 << 19, "{} bytes", kept.len());
}
