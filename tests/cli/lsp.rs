//! The language server, over its standard input and output, as an editor uses it.

use crate::support::root;
use crate::support::sandbox::Sandbox;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const DREAM: &str = "\
let depth = 2
model tiny {
  vocab 256
  hidden 16
  context 64
  sa = sequence { heads 2 kv_heads 1 head_size 8 }
  ea = experts { count 4 active 2 intermediate 16 router mixtral }
  recur depth { sa > ea }
}
data { task permutation size 4 max_steps 2 }
train { steps depth * 4 batch 4 sequence 32 precision f32 }
match { baseline \"la.yaml\" flops { ea.intermediate 8 } params ea.count }
";

const YAML: &str = "\
let: {depth: 2}
model:
  name: tiny
  vocab: 256
  hidden: 16
  context: 64
  components:
    sa: {sequence: {heads: 2, kv_heads: 1, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 16, query: 8}}
  body:
    - recur: depth
      layers: [\"sa > ea\"]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 8, batch: 4, sequence: 32, precision: f32}
";

/// A server with its client's end of the pipes.
pub struct Client {
    server: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    number: u64,
    folder: String,
}

impl Client {
    fn new(sandbox: &Sandbox) -> Client {
        let mut command = sandbox.command(&["lsp", "--stdio"]);
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (server.stdin.take(), BufReader::new(server.stdout.take().unwrap()));
        let folder = format!("file://{}", sandbox.path("").display());
        Client { server, input, output, number: 0, folder }
    }

    /// After the handshake.
    pub fn ready(sandbox: &Sandbox) -> Client {
        let mut client = Client::new(sandbox);
        let answer = client.ask("initialize", json!({"capabilities": {}}));
        assert_eq!(answer["result"]["capabilities"]["hoverProvider"], true);
        client.tell("initialized", json!({}));
        client
    }

    fn send(&mut self, body: &str) {
        let input = self.input.as_mut().unwrap();
        write!(input, "Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        input.flush().unwrap();
    }

    fn tell(&mut self, method: &str, parameters: Value) {
        self.send(&json!({"jsonrpc": "2.0", "method": method, "params": parameters}).to_string());
    }

    fn ask(&mut self, method: &str, parameters: Value) -> Value {
        self.number += 1;
        let id = self.number;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": parameters}).to_string());
        let answer = self.receive();
        assert_eq!(answer["id"], id, "{answer}");
        answer
    }

    fn receive(&mut self) -> Value {
        let mut length = 0;
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the server ended");
            match line.trim().strip_prefix("Content-Length: ") {
                Some(n) => length = n.parse().unwrap(),
                None => break,
            }
        }
        let mut body = vec![0; length];
        self.output.read_exact(&mut body).unwrap();
        serde_json::from_slice(&body).unwrap()
    }

    pub fn uri(&self, name: &str) -> String {
        format!("{}{name}", self.folder)
    }

    /// Opens a document; gives its diagnostics.
    pub fn open(&mut self, name: &str, text: &str) -> Vec<Value> {
        let language = if name.ends_with(".dream") { "dream" } else { "yaml" };
        let document = json!({"uri": self.uri(name), "languageId": language, "version": 1, "text": text});
        self.tell("textDocument/didOpen", json!({"textDocument": document}));
        self.diagnostics()
    }

    pub fn change(&mut self, name: &str, text: &str) -> Vec<Value> {
        let document = json!({"uri": self.uri(name), "version": 2});
        let changes = json!([{"text": text}]);
        self.tell("textDocument/didChange", json!({"textDocument": document, "contentChanges": changes}));
        self.diagnostics()
    }

    fn diagnostics(&mut self) -> Vec<Value> {
        let message = self.receive();
        assert_eq!(message["method"], "textDocument/publishDiagnostics", "{message}");
        message["params"]["diagnostics"].as_array().unwrap().clone()
    }

    /// Asks about the place of `^` in a text, which is sent without it.
    pub fn about(&mut self, name: &str, marked: &str, method: &str, more: Value) -> Value {
        let at = marked.find('^').unwrap();
        self.change(name, &marked.replacen('^', "", 1));
        let (line, start) =
            (marked[..at].matches('\n').count(), marked[..at].rfind('\n').map_or(0, |n| n + 1));
        let mut parameters = json!({
            "textDocument": {"uri": self.uri(name)},
            "position": {"line": line, "character": marked[start..at].encode_utf16().count()},
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            parameters[key] = value.clone();
        }
        self.ask(method, parameters)
    }

    pub fn labels(&mut self, name: &str, marked: &str) -> Vec<String> {
        let answer = self.about(name, marked, "textDocument/completion", json!({}));
        let items = answer["result"].as_array().unwrap().clone();
        items.iter().map(|item| item["label"].as_str().unwrap().to_string()).collect()
    }

    pub fn hover(&mut self, name: &str, marked: &str) -> String {
        let answer = self.about(name, marked, "textDocument/hover", json!({}));
        answer["result"]["contents"]["value"].as_str().unwrap_or_default().to_string()
    }

    /// Processor time of the server so far, in clock ticks of a hundredth of a second.
    pub fn ticks(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.server.id())).unwrap();
        let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11..13].iter().map(|n| n.parse::<u64>().unwrap()).sum()
    }

    /// Ends as the protocol wants; gives the exit code.
    pub fn end(mut self) -> i32 {
        assert!(self.ask("shutdown", Value::Null)["error"].is_null());
        self.tell("exit", Value::Null);
        self.server.wait().unwrap().code().unwrap()
    }
}

/// The text with `^` before the n-th `word`.
pub fn mark(text: &str, word: &str, n: usize) -> String {
    let at = text.match_indices(word).nth(n).unwrap().0;
    format!("{}^{}", &text[..at], &text[at..])
}

/// A text with edits applied.
pub fn edited(text: &str, edits: &Value) -> String {
    let offset = |p: &Value| {
        let line = p["line"].as_u64().unwrap() as usize;
        let start: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
        start + p["character"].as_u64().unwrap() as usize
    };
    let mut out = text.to_string();
    let mut edits = edits.as_array().unwrap().clone();
    edits.sort_by_key(|e| std::cmp::Reverse(offset(&e["range"]["start"])));
    for e in edits {
        let (start, end) = (offset(&e["range"]["start"]), offset(&e["range"]["end"]));
        out.replace_range(start..end, e["newText"].as_str().unwrap());
    }
    out
}

#[test]
fn diagnostics_follow_the_text_and_are_those_of_check() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::ready(&sandbox);
    assert_eq!(client.open("tiny.dream", DREAM), Vec::<Value>::new());
    let broken = DREAM.replace("// ", "").replace("heads 2 kv", "haeds 2 kv").replace("sa > ea", "sa > eb");
    let broken = format!("// ü 𝑑\n{broken}");
    let found = client.change("tiny.dream", &broken);
    sandbox.write("tiny.dream", &broken);
    let output = sandbox.run(&["check", "tiny.dream", "--json"]);
    let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checked = checked[0]["diagnostics"].as_array().unwrap();
    assert_eq!(found.len(), checked.len());
    for (shown, said) in found.iter().zip(checked) {
        assert_eq!((&shown["code"], &shown["source"]), (&said["code"], &json!("dreamc")));
        assert_eq!(shown["range"]["start"]["line"], said["at"]["line"].as_u64().unwrap() - 1);
        assert_eq!(shown["range"]["start"]["character"], said["at"]["column"].as_u64().unwrap() - 1);
        assert!(shown["message"].as_str().unwrap().starts_with(said["message"].as_str().unwrap()));
    }
    let unknown = found.iter().find(|d| d["code"] == "unknown-key").unwrap();
    assert!(unknown["message"].as_str().unwrap().contains("did you mean `heads`?"), "{unknown}");
    assert_eq!(client.change("tiny.dream", DREAM), Vec::<Value>::new());
    // Broken YAML, a suite, a closed document.
    assert!(!client.open("tiny.yaml", "model: {vocab: [}\n").is_empty());
    assert!(client.open("my.suite.yaml", "baseline: a.yaml\nvariants: [{spec: b.yaml}]\n").is_empty());
    let document = json!({"textDocument": {"uri": client.uri("tiny.yaml")}});
    client.tell("textDocument/didClose", document);
    assert!(client.diagnostics().is_empty());
    assert_eq!(client.end(), 0);
}

#[test]
fn the_table_of_keys_completes() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::ready(&sandbox);
    client.open("a.dream", "");
    client.open("a.yaml", "");
    let has = |labels: &[String], wanted: &[&str], not: &[&str]| {
        assert!(wanted.iter().all(|w| labels.iter().any(|l| l == w)), "{wanted:?} of {labels:?}");
        assert!(not.iter().all(|w| labels.iter().all(|l| l != w)), "{not:?} of {labels:?}");
    };
    has(&client.labels("a.dream", "^"), &["model", "data", "train"], &["heads"]);
    has(
        &client.labels("a.dream", &DREAM.replace("heads 2 kv", "he^ kv")),
        &["heads", "kv_heads"],
        &["vocab"],
    );
    has(
        &client.labels("a.dream", &DREAM.replace("router mixtral", "router ^")),
        &["mixtral", "olmoe"],
        &["count"],
    );
    has(
        &client.labels("a.dream", &DREAM.replace("sa > ea }", "sa > ^ }")),
        &["sa", "ea", "skip"],
        &["count"],
    );
    has(&client.labels("a.dream", &DREAM.replace("= sequence", "= ^")), &["sequence", "experts"], &["vocab"]);
    has(&client.labels("a.dream", &DREAM.replace("steps depth * 4", "steps ^")), &["depth"], &["batch"]);
    has(&client.labels("a.yaml", &YAML.replace("{heads: 2", "{^: 2")), &["heads", "window"], &["vocab"]);
    has(
        &client.labels("a.yaml", &YAML.replace("  hidden: 16\n", "  hidden: 16\n  ^\n")),
        &["tie"],
        &["steps"],
    );
    has(
        &client.labels("a.yaml", &YAML.replace("precision: f32", "precision: ^")),
        &["bf16", "f32"],
        &["steps"],
    );
    has(&client.labels("a.yaml", &YAML.replace("sa > ea", "sa > ^")), &["sa", "ea"], &["heads"]);
    // Every word that is offered for a value is accepted there.
    for word in client.labels("a.dream", &DREAM.replace("router mixtral", "router ^")) {
        let text = DREAM.replace("router mixtral", &format!("router {word}"));
        let found = client.change("a.dream", &text);
        assert!(found.iter().all(|d| d["severity"] != 1), "{word}: {found:?}");
    }
    assert_eq!(client.end(), 0);
}

#[test]
fn hover_shows_pages_and_counts() {
    let sandbox = Sandbox::with(&[("a.dream", DREAM)]);
    let mut client = Client::ready(&sandbox);
    client.open("a.dream", DREAM);
    client.open("a.yaml", YAML);
    let counts: Value = serde_json::from_str(&sandbox.good(&["count", "a.dream", "--json"])).unwrap();
    let ea = &counts["parameters"]["by_component"]["ea"];
    for (name, text) in [("a.dream", DREAM), ("a.yaml", YAML)] {
        let page = client.hover(name, &mark(text, "heads", 0));
        assert!(page.contains("*sequence*") && page.contains("Query heads."), "{page}");
    }
    let page = client.hover("a.dream", &DREAM.replace("sa > ea", "sa > ^ea"));
    let parameters = ea.as_u64().unwrap().to_string();
    assert!(
        page.contains("experts") && page.replace(',', "").contains(&format!("parameters: {parameters} ")),
        "{page}"
    );
    assert!(page.contains("FLOPs for a generated token"), "{page}");
    let page = client.hover("a.yaml", &YAML.replace("    ea:", "    ^ea:"));
    assert!(page.contains("FLOPs for a generated token"), "{page}");
    let page = client.hover("a.dream", &DREAM.replace("mixtral", "^mixtral"));
    assert!(page.contains("load_balance_loss"), "{page}");
    let page = client.hover("a.dream", &DREAM.replace("steps depth", "steps ^depth"));
    assert!(page.contains("= 2"), "{page}");
    assert_eq!(client.hover("a.dream", &DREAM.replace("256", "^256")), "");
    assert_eq!(client.end(), 0);
}

#[test]
fn names_are_found_and_renamed() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::ready(&sandbox);
    for (name, text) in [("a.dream", DREAM), ("a.yaml", YAML)] {
        client.open(name, text);
        let use_of = text.replace("sa > ea", "sa > ^ea");
        let found = client.about(name, &use_of, "textDocument/definition", json!({}));
        let line = text.lines().position(|l| l.trim_start().starts_with("ea")).unwrap();
        assert_eq!(found["result"]["range"]["start"]["line"], line, "{found}");
        for (old, marked) in [("ea", use_of), ("depth", mark(text, "depth", 0))] {
            let new = format!("{old}_2");
            let answer = client.about(name, &marked, "textDocument/rename", json!({"newName": new}));
            let after = edited(text, &answer["result"]["changes"][client.uri(name)]);
            let errors = |found: Vec<Value>| found.iter().filter(|d| d["severity"] == 1).count();
            assert_eq!(errors(client.change(name, &after)), 0, "{after}");
            assert!(after.matches(&new).count() >= 2, "{after}");
            if name == "a.dream" {
                assert_eq!(after.matches(&new).count(), if old == "ea" { 4 } else { 3 }, "{after}");
            }
        }
        for bad in ["sa", "3d", "a b", ""] {
            let use_of = text.replace("sa > ea", "sa > ^ea");
            let answer = client.about(name, &use_of, "textDocument/rename", json!({"newName": bad}));
            assert!(answer["error"]["message"].is_string(), "{bad}: {answer}");
        }
        let key = mark(text, "vocab", 0);
        let answer = client.about(name, &key, "textDocument/prepareRename", json!({}));
        assert!(answer["error"].is_object(), "{answer}");
    }
    assert_eq!(client.end(), 0);
}

#[test]
fn formatting_is_that_of_fmt() {
    let sandbox = Sandbox::with(&[("a.dream", DREAM)]);
    let mut client = Client::ready(&sandbox);
    client.open("a.dream", DREAM);
    let wanted = sandbox.good(&["fmt", "a.dream", "--to", "dream"]);
    let answer =
        client.about("a.dream", &format!("^{DREAM}"), "textDocument/formatting", json!({"options": {}}));
    assert_eq!(edited(DREAM, &answer["result"]), wanted);
    let answer = client.about("a.dream", &format!("^{wanted}"), "textDocument/formatting", json!({}));
    assert_eq!(answer["result"], json!([]));
    let answer = client.about("a.dream", "^model {", "textDocument/formatting", json!({}));
    assert_eq!(answer["result"], Value::Null);
    assert_eq!(client.end(), 0);
}

#[test]
fn damage_is_answered_and_ends_nothing() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::new(&sandbox);
    assert_eq!(client.ask("textDocument/hover", json!({}))["error"]["code"], -32002);
    client.ask("initialize", json!({"capabilities": {}}));
    client.send("{");
    assert_eq!(client.receive()["error"]["code"], -32700);
    assert_eq!(client.ask("no/such", json!({}))["error"]["code"], -32601);
    assert_eq!(client.ask("textDocument/hover", json!({}))["error"]["code"], -32602);
    client.tell("no/such", json!({}));
    client.open("a.dream", "");
    // Every beginning of a file, with a question at its end.
    for text in [DREAM, YAML] {
        let name = if text == DREAM { "a.dream" } else { "a.yaml" };
        client.open(name, "");
        for end in (0..=text.len()).step_by(7) {
            let marked = format!("{}^", &text[..end]);
            for method in ["completion", "hover", "definition", "references"] {
                let answer = client.about(name, &marked, &format!("textDocument/{method}"), json!({}));
                assert!(answer["error"].is_null(), "{marked}: {answer}");
            }
        }
    }
    assert_eq!(client.end(), 0);
    // Without `shutdown` the end is a failure, as the protocol wants, and so is a damaged header.
    let mut client = Client::ready(&sandbox);
    drop(client.input.take());
    assert_eq!(client.server.wait().unwrap().code(), Some(1));
    let mut client = Client::ready(&sandbox);
    client.input.as_mut().unwrap().write_all(b"hello\r\n\r\n").unwrap();
    assert_eq!(client.server.wait().unwrap().code(), Some(1));
}

/// A client that others wrote, `pytest-lsp`, drives the same server: `editors/test_lsp.py`.
#[test]
fn another_client_agrees() {
    let found = std::env::var_os("DREAMC_PYTHON").unwrap_or_else(|| "python3".into());
    let has = Command::new(&found).args(["-c", "import pytest_lsp"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        return dreamc_skip::skip(
            "pytest-lsp is not installed: pip install pytest-lsp, DREAMC_PYTHON=…/python",
        );
    }
    let mut command = Command::new(&found);
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).arg(root("editors/test_lsp.py"));
    let output = command.env("DREAMC", env!("CARGO_BIN_EXE_dreamc")).output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
