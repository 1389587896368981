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
        ("small.dream", SMALL),
        ("other.yaml", &layers("other", 2)),
        ("deep.yaml", &layers("deep", 4096)),
    ]);
    sandbox.good(&["check", "small.dream", "other.yaml", "deep.yaml", "task.yaml", "own.dream"]);
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
    let Some(python) = crate::serve::python() else { return };
    let sandbox = sandbox();
    let studio = Studio::start(&sandbox, "small.dream");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/studio_client.py");
    let output =
        Command::new(python).arg(script).arg(&studio.address).arg(sandbox.path(".")).output().unwrap();
    let (out, err) = texts(&output);
    if out.contains("no Chromium") {
        return dreamc_skip::skip("no Chromium: apt-get install chromium");
    }
    assert!(output.status.success() && out.contains("all well"), "{out}{err}");
    // The run that the page began goes on when the studio is gone.
    drop(studio);
    let runs: Vec<_> = std::fs::read_dir(sandbox.path("runs")).unwrap().flatten().collect();
    let run = runs[0].path();
    let length = || std::fs::metadata(run.join("metrics.jsonl")).unwrap().len();
    let before = length();
    let until = Instant::now() + Duration::from_secs(60);
    while length() == before {
        assert!(Instant::now() < until, "the run ended with the studio");
        std::thread::sleep(Duration::from_millis(50));
    }
    let process = std::fs::read_to_string(run.join("run.lock")).unwrap();
    assert!(Command::new("kill").args(["-INT", process.trim()]).status().unwrap().success());
    while !std::fs::read_to_string(run.join("ledger.json")).unwrap().contains("\"interrupted\"") {
        assert!(Instant::now() < until, "the run does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn only_the_page_is_answered() {
    let sandbox = sandbox();
    let studio = Studio::start(&sandbox, ".");
    let (host, token) = (studio.host.as_str(), studio.token.as_str());
    let own = format!("http://{host}");
    let refused: [&[(&str, &str)]; 6] = [
        &[("Host", host)],
        &[("Host", host), ("x-dreamc-token", "0123456789abcdef0123456789abcdef")],
        &[("Host", "attacker.example"), ("x-dreamc-token", token)],
        &[("x-dreamc-token", token)],
        &[("Host", host), ("Origin", "http://attacker.example"), ("x-dreamc-token", token)],
        &[("Host", host), ("Origin", "null"), ("x-dreamc-token", token)],
    ];
    for headers in refused {
        for (method, path) in
            [("GET", "/files"), ("GET", "/file?path=small.dream"), ("POST", "/view"), ("GET", "/")]
        {
            let (status, answer) = studio.send(method, path, headers, "");
            assert_eq!(status, 403, "{method} {path} {headers:?}: {answer}");
        }
    }
    let good = [("Host", host), ("Origin", own.as_str()), ("x-dreamc-token", token)];
    let (status, answer) = studio.send("GET", "/files", &good, "");
    assert_eq!(
        (status, &answer["files"]),
        (200, &json!(["deep.yaml", "other.yaml", "own.dream", "small.dream", "task.yaml"]))
    );
    // A form of another page cannot say that it sends JSON.
    assert_eq!(studio.send("POST", "/view", &good, "{}").0, 415);
    assert_eq!(studio.ask("POST", "/view", &json!({})).0, 400);
    assert_eq!(studio.ask("DELETE", "/file", &Value::Null).0, 405);
    assert_eq!(studio.ask("GET", "/elsewhere", &Value::Null).0, 404);
}

#[test]
fn no_file_outside_is_reached_and_none_is_overwritten() {
    let sandbox = sandbox();
    std::fs::create_dir(sandbox.path("inner")).unwrap();
    std::fs::copy(sandbox.path("small.dream"), sandbox.path("inner/own.dream")).unwrap();
    let studio = Studio::start(&sandbox, "inner");
    for path in ["../small.dream", "/etc/passwd.yaml", "own.dream/../../small.dream", "notes.txt", ""] {
        let (status, _) =
            studio.ask("GET", &format!("/file?path={}", path.replace('/', "%2F")), &Value::Null);
        assert_eq!(status, 403, "{path}");
        let wrote = json!({"path": path, "text": "gone", "version": null});
        assert_eq!(studio.ask("POST", "/file", &wrote).0, 403, "{path}");
        let seen = json!({"path": path, "text": SMALL, "baseline": null});
        assert_eq!(studio.ask("POST", "/view", &seen).0, 403, "{path}");
    }
    assert_eq!(sandbox.read("small.dream"), SMALL);
    assert_eq!(studio.ask("GET", "/file?path=none.yaml", &Value::Null).0, 404);
    let (_, read) = studio.ask("GET", "/file?path=own.dream", &Value::Null);
    std::fs::write(sandbox.path("inner/own.dream"), "# theirs\n").unwrap();
    let wrote = json!({"path": "own.dream", "text": "# mine\n", "version": read["version"]});
    let (status, answer) = studio.ask("POST", "/file", &wrote);
    assert_eq!(status, 409, "{answer}");
    assert!(answer["error"].as_str().unwrap_or_default().contains("open it again"), "{answer}");
    assert_eq!(sandbox.read("inner/own.dream"), "# theirs\n");
    let again = sandbox.error(&["studio", "nowhere"]);
    assert!(again.contains("nowhere"), "{again}");
    let notes = sandbox.path("notes.txt");
    std::fs::write(&notes, "n").unwrap();
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
    let (_, told) = studio.ask("POST", "/tell", &json!({"run": "runs/first", "other": "runs/first"}));
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
