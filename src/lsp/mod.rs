//! A language server: what `check`, `fmt`, `count` and the table of keys know, where one types.
//!
//! *In*: messages of the Language Server Protocol on standard input. *Out*: answers on standard
//! output. *Promise*: a document of any content is answered, files are read and never written, and
//! the server ends when its input ends.
//!
//! [`wire`] is the protocol's framing (a header and JSON: forty lines, so no library), [`text`]
//! converts places, [`place`] finds the keys for a place, [`symbols`] names and their uses,
//! [`pages`] is what people read. Documents are sent whole; requests are answered in order.

mod pages;
mod place;
mod symbols;
mod text;
mod wire;

use crate::command::check;
use crate::output;
use dreamc_dsl::component::DEFINED;
use dreamc_dsl::define::library::LIBRARY;
use dreamc_dsl::define::{Definition, functions, names};
use dreamc_dsl::keys::{self, Section, Type};
use dreamc_dsl::{Ast, Diagnostics, FileKind, Severity, Span, Spec, Spelling};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use symbols::{Kind, Symbol};
use wire::Fault;

/// An open document.
struct Document {
    path: PathBuf,
    spelling: Spelling,
    text: String,
}

/// How far the connection is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Fresh,
    Running,
    /// `shutdown` was asked for.
    Ending,
}

struct Server {
    state: State,
    documents: HashMap<String, Document>,
}

/// Answers standard input until it ends or says `exit`; whether it ended as the protocol wants.
pub fn serve() -> io::Result<bool> {
    let mut input = BufReader::new(io::stdin().lock());
    let mut server = Server { state: State::Fresh, documents: HashMap::new() };
    loop {
        let (answers, ended) = match server.next(&mut input)? {
            Some(answers) => answers,
            None => return Ok(server.state == State::Ending),
        };
        for answer in answers {
            output::write(&wire::frame(&answer))?;
        }
        output::flush()?;
        if ended || output::unread() {
            return Ok(server.state == State::Ending);
        }
    }
}

/// A connection of the studio's page, which opens documents at once.
pub struct Session(Server);

impl Default for Session {
    fn default() -> Self {
        Session(Server { state: State::Running, documents: HashMap::new() })
    }
}

impl Session {
    /// Answers a message about the document of the file `path`, whatever its address says.
    pub fn answer(&mut self, path: &Path, message: &Value) -> Vec<Value> {
        let uri = message.pointer("/params/textDocument/uri").and_then(Value::as_str).unwrap_or_default();
        if message.get("method").and_then(Value::as_str) == Some("textDocument/didOpen") {
            // One document is open in a page.
            self.0.documents.clear();
            self.0.open(uri, message.get("params").unwrap_or(&Value::Null), Some(path));
            return self.0.look(uri);
        }
        self.0.message(message)
    }
}

impl Server {
    /// Reads a message; gives what is to be sent, and whether it was the last. `None` at the end.
    fn next(&mut self, input: &mut impl BufRead) -> io::Result<Option<(Vec<Value>, bool)>> {
        let Some(body) = wire::read(input)? else { return Ok(None) };
        let message: Value = match serde_json::from_slice(&body) {
            Ok(message) => message,
            Err(error) => {
                let fault = Fault::parse(error.to_string());
                return Ok(Some((vec![wire::answer(Value::Null, Err(fault))], false)));
            }
        };
        let exits = message.get("method").and_then(Value::as_str) == Some("exit");
        match exits && message.get("id").is_none() {
            true => Ok(Some((vec![], true))),
            false => Ok(Some((self.message(&message), false))),
        }
    }

    /// The answers to a message.
    fn message(&mut self, message: &Value) -> Vec<Value> {
        let method = message.get("method").and_then(Value::as_str);
        let parameters = message.get("params").unwrap_or(&Value::Null);
        match (method, message.get("id")) {
            (Some(method), Some(id)) => vec![wire::answer(id.clone(), self.request(method, parameters))],
            (Some(method), None) => self.notification(method, parameters),
            // An answer to a request: none is sent.
            (None, _) => vec![],
        }
    }

    /// Takes a document in; its file is the one of its address where `path` names none.
    fn open(&mut self, uri: &str, parameters: &Value, path: Option<&Path>) {
        let words = |pointer: &str| parameters.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let path = path.map_or_else(|| path_of(uri), Path::to_path_buf);
        let dream = words("/textDocument/languageId") == "dream";
        let spelling = if dream { Spelling::Dream } else { Spelling::of(&path.to_string_lossy()) };
        let text = words("/textDocument/text").to_string();
        self.documents.insert(uri.to_string(), Document { path, spelling, text });
    }

    /// Diagnostics of a document, published.
    fn look(&self, uri: &str) -> Vec<Value> {
        let found = self.documents.get(uri).map(Document::diagnostics);
        found.into_iter().map(|found| published(uri, found)).collect()
    }

    fn request(&mut self, method: &str, parameters: &Value) -> Result<Value, Fault> {
        match (self.state, method) {
            (State::Fresh, "initialize") => {
                self.state = State::Running;
                return Ok(capabilities());
            }
            (State::Fresh, _) => return Err(Fault::new(-32002, "the first request is `initialize`")),
            (State::Running, "shutdown") => {
                self.state = State::Ending;
                return Ok(Value::Null);
            }
            (State::Running, _) => {}
            (State::Ending, _) => return Err(Fault::request("the server was shut down")),
        }
        match method {
            "textDocument/completion" => self.at(parameters, |d, at| Ok(d.completion(at))),
            "textDocument/hover" => self.at(parameters, |d, at| Ok(d.hover(at).unwrap_or(Value::Null))),
            "textDocument/definition" => self.at(parameters, |d, at| {
                let uri = parameters.pointer("/textDocument/uri");
                let to = d.uses(at).into_iter().find(|s| s.defines);
                Ok(to.map_or(Value::Null, |s| json!({"uri": uri, "range": text::range(&d.text, s.span)})))
            }),
            "textDocument/references" => self.at(parameters, |d, at| {
                let uri = parameters.pointer("/textDocument/uri");
                let place = |s: Symbol| json!({"uri": uri, "range": text::range(&d.text, s.span)});
                Ok(d.uses(at).into_iter().map(place).collect())
            }),
            "textDocument/prepareRename" => self.at(parameters, |d, at| match d.symbol(at) {
                Some(s) => Ok(json!({"range": text::range(&d.text, s.span), "placeholder": s.name})),
                None => Err(Fault::refused(
                    "only components, numbers of `let`, and names of definitions are renamed",
                )),
            }),
            "textDocument/rename" => {
                let uri = parameters.pointer("/textDocument/uri").and_then(Value::as_str).unwrap_or_default();
                let name = parameters.get("newName").and_then(Value::as_str).unwrap_or_default();
                self.at(parameters, |d, at| {
                    let edits = d.rename(at, name)?;
                    Ok(json!({"changes": {uri: edits}}))
                })
            }
            "textDocument/formatting" => Ok(self.document(parameters)?.format()),
            _ => Err(Fault::method(method)),
        }
    }

    fn document(&self, parameters: &Value) -> Result<&Document, Fault> {
        let uri = parameters.pointer("/textDocument/uri").and_then(Value::as_str);
        let uri = uri.ok_or_else(|| Fault::parameters("a document has a `uri`"))?;
        self.documents.get(uri).ok_or_else(|| Fault::parameters(format!("`{uri}` is not open")))
    }

    /// The answer about a place in a document.
    fn at(
        &self,
        parameters: &Value,
        answer: impl FnOnce(&Document, usize) -> Result<Value, Fault>,
    ) -> Result<Value, Fault> {
        let document = self.document(parameters)?;
        let position = parameters.get("position").and_then(|p| text::offset(&document.text, p));
        answer(document, position.ok_or_else(|| Fault::parameters("a place has a line and a character"))?)
    }

    fn notification(&mut self, method: &str, parameters: &Value) -> Vec<Value> {
        let Some(uri) = parameters.pointer("/textDocument/uri").and_then(Value::as_str) else {
            return vec![];
        };
        match method {
            "textDocument/didOpen" => self.open(uri, parameters, None),
            "textDocument/didChange" => {
                let changes = parameters.get("contentChanges").and_then(Value::as_array);
                let last = changes.and_then(|c| c.last()?.get("text")?.as_str());
                if let (Some(document), Some(text)) = (self.documents.get_mut(uri), last) {
                    document.text = text.to_string();
                }
            }
            // A file that this one names may have changed, too.
            "textDocument/didSave" => {}
            "textDocument/didClose" => {
                self.documents.remove(uri);
                return vec![published(uri, vec![])];
            }
            _ => return vec![],
        }
        self.look(uri)
    }
}

fn capabilities() -> Value {
    json!({
        "capabilities": {
            "positionEncoding": "utf-16",
            "textDocumentSync": {"openClose": true, "change": 1, "save": true},
            "completionProvider": {"triggerCharacters": ["{", " ", ":", "|", ">", "("]},
            "hoverProvider": true,
            "definitionProvider": true,
            "referencesProvider": true,
            "renameProvider": {"prepareProvider": true},
            "documentFormattingProvider": true,
        },
        "serverInfo": {"name": "dreamc", "version": env!("CARGO_PKG_VERSION")},
    })
}

fn published(uri: &str, diagnostics: Vec<Value>) -> Value {
    let parameters = json!({"uri": uri, "diagnostics": diagnostics});
    wire::notification("textDocument/publishDiagnostics", parameters)
}

/// The file of an address; one that is not saved has its address for a name.
fn path_of(uri: &str) -> PathBuf {
    let Some(path) = uri.strip_prefix("file://") else { return uri.into() };
    let mut bytes = vec![];
    let mut rest = path.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (byte, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned().into()
}

impl Document {
    fn parse(&self) -> Result<Ast, Diagnostics> {
        dreamc_dsl::parse(&self.path.to_string_lossy(), &self.text, self.spelling)
    }

    /// The folder that paths of the document are relative to.
    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    fn spec(&self) -> Option<Spec> {
        Some(dreamc_dsl::check_in(self.parse().ok()?, self.folder(), &[]).ok()?.0)
    }

    /// Whether it is a suite. A text that does not parse is one where it says `baseline`.
    fn kind(&self) -> FileKind {
        match self.parse() {
            Ok(ast) => ast.kind,
            Err(_) if self.text.lines().any(|line| line.starts_with("baseline:")) => FileKind::Suite,
            Err(_) => FileKind::Spec,
        }
    }

    fn diagnostics(&self) -> Vec<Value> {
        let found = match self.parse() {
            Ok(ast) => check::tree(ast, self.folder()),
            Err(found) => found,
        };
        // A mistake of a file that this one includes is shown where it is included.
        let include = || self.parse().ok().and_then(|ast| Some(ast.root.get("include")?.key.span));
        let own =
            |span: Span| if span.start <= self.text.len() { span } else { include().unwrap_or_default() };
        let place = |span: Span| text::range(&self.text, own(span));
        let related = |(span, note): &(Span, String)| json!({"location": {"uri": format!("file://{}", self.path.display()), "range": place(*span)}, "message": note});
        found
            .list
            .iter()
            .map(|d| {
                let spelled = |text: &str| found.source.spelled(text);
                let help = d.help.as_ref().map_or(String::new(), |help| format!("\nhelp: {}", spelled(help)));
                let mut shown = json!({
                    "range": place(d.span.unwrap_or_default()),
                    "severity": if d.severity == Severity::Error { 1 } else { 2 },
                    "code": d.code,
                    "source": "dreamc",
                    "message": format!("{}{help}", spelled(&d.message)),
                });
                if !d.related.is_empty() {
                    shown["relatedInformation"] = d.related.iter().map(related).collect();
                }
                shown
            })
            .collect()
    }

    fn symbols(&self) -> Vec<Symbol> {
        self.parse().map(|ast| symbols::of(&ast)).unwrap_or_default()
    }

    /// The name at a place.
    fn symbol(&self, at: usize) -> Option<Symbol> {
        self.symbols().into_iter().find(|s| s.span.start <= at && at <= s.span.end)
    }

    /// Everywhere that the name at a place stands.
    fn uses(&self, at: usize) -> Vec<Symbol> {
        let Some(symbol) = self.symbol(at) else { return vec![] };
        let same = |s: &Symbol| s.kind == symbol.kind && s.name == symbol.name;
        self.symbols().into_iter().filter(same).collect()
    }

    /// Edits that give the name at a place another name. Refused where the file would mean
    /// something else.
    fn rename(&self, at: usize, name: &str) -> Result<Vec<Value>, Fault> {
        let uses = self.uses(at);
        let Some(old) = uses.first() else {
            return Err(Fault::refused(
                "only components, numbers of `let`, and names of definitions are renamed",
            ));
        };
        if !uses.iter().any(|s| s.defines) {
            return Err(Fault::refused(format!("`{}` is not of this file", old.name)));
        }
        if self
            .symbols()
            .iter()
            .any(|s| s.defines && s.kind == old.kind && s.name == name && s.name != old.name)
        {
            return Err(Fault::refused(format!("there is a `{name}` already")));
        }
        let mut renamed =
            Document { path: self.path.clone(), spelling: self.spelling, text: self.text.clone() };
        let mut spans: Vec<Span> = uses.iter().map(|s| s.span).collect();
        spans.sort_by_key(|span| std::cmp::Reverse(span.start));
        spans.iter().for_each(|span| renamed.text.replace_range(span.start..span.end, name));
        let errors = |d: &Document| d.diagnostics().iter().filter(|d| d["severity"] == 1).count();
        if errors(&renamed) > errors(self) {
            let first = renamed.diagnostics().into_iter().find(|d| d["severity"] == 1);
            let why = first.and_then(|d| d["message"].as_str().map(str::to_string)).unwrap_or_default();
            return Err(Fault::refused(format!("`{name}` would be an error: {why}")));
        }
        let edit = |span: &Span| json!({"range": text::range(&self.text, *span), "newText": name});
        Ok(spans.iter().map(edit).collect())
    }

    /// One edit of the whole text, or nothing where it has errors of syntax or is formatted.
    fn format(&self) -> Value {
        match self.parse().and_then(|ast| dreamc_dsl::format(&ast, ast.spelling)) {
            Ok(text) if text != self.text => {
                let whole = text::range(&self.text, Span::new(0, self.text.len()));
                json!([{"range": whole, "newText": text}])
            }
            Ok(_) => json!([]),
            Err(_) => Value::Null,
        }
    }

    fn completion(&self, at: usize) -> Value {
        let partial = at - text::word(&self.text, at).start.min(at);
        let place = place::at(&self.text[..at], partial, self.spelling, self.kind());
        let mut items: Vec<Value> = vec![];
        let mut add = |label: &str, kind: u8, detail: String, page: String| {
            if items.iter().any(|item| item["label"] == label) {
                return;
            }
            items.push(json!({"label": label, "kind": kind, "detail": detail,
                              "documentation": {"kind": "markdown", "value": page}}));
        };
        // Kinds of the protocol: 3 function, 5 field, 6 variable, 7 class, 12 value, 14 keyword.
        if let Some(definition) = self.formulas(at) {
            self.in_formulas(&definition, &mut add);
            return Value::Array(items);
        }
        if let Some(key) = place.key.filter(|_| !place.layers) {
            for (word, doc) in pages::words(&key.kind) {
                add(word, 12, key.name.to_string(), doc.to_string());
            }
            if key.kind.numeric() {
                for s in self.symbols().iter().filter(|s| s.defines && s.kind == Kind::Number) {
                    add(&s.name, 6, "a number of `let`".into(), String::new());
                }
            }
            return Value::Array(items);
        }
        let model = place.section().is_some_and(|s| std::ptr::eq(s, &keys::MODEL));
        let dream = self.spelling == Spelling::Dream;
        if place.layers || (model && dream) {
            for s in self.symbols().iter().filter(|s| s.defines && s.kind == Kind::Component) {
                add(&s.name, 6, "a component".into(), String::new());
            }
            for word in ["skip", "recur", "repeat"].into_iter().chain(dream.then_some("layer")) {
                add(word, 14, "layers".into(), String::new());
            }
        }
        let sections: Vec<&Section> = match place.group {
            Type::Component => {
                keys::COMPONENTS
                    .iter()
                    .for_each(|kind| add(kind.name, 7, "a component".into(), pages::section(kind)));
                for own in self.definitions() {
                    let page = pages::definition(Some(&own), None).unwrap_or_default();
                    add(&own.name.text, 7, "a definition".into(), page);
                }
                for (name, text) in LIBRARY {
                    add(
                        name,
                        7,
                        "a definition of std".into(),
                        pages::definition(None, Some(text)).unwrap_or_default(),
                    );
                }
                vec![]
            }
            Type::Layers if !dream => keys::ITEMS.to_vec(),
            _ => place.section().into_iter().collect(),
        };
        for section in sections {
            for key in section.keys {
                add(key.name, 5, key.kind.describe(), pages::key(key, Some(section)));
            }
        }
        Value::Array(items)
    }

    fn hover(&self, at: usize) -> Option<Value> {
        let word = text::word(&self.text, at);
        let name = &self.text[word.start..word.end];
        if name.is_empty() {
            return None;
        }
        let shown = |page: String, span: Span| json!({"contents": {"kind": "markdown", "value": page}, "range": text::range(&self.text, span)});
        if let Some(page) = self.function(name, at) {
            return Some(shown(page, word));
        }
        if let Some(symbol) = self.symbol(at) {
            let page = match symbol.kind {
                Kind::Value(_) => self.value(&symbol)?,
                Kind::Definition => {
                    let library = LIBRARY.iter().find(|(name, _)| *name == symbol.name);
                    pages::definition(self.definition(&symbol.name).as_ref(), library.map(|(_, text)| *text))?
                }
                Kind::Component => match self.component(&symbol.name) {
                    Some(kind) => pages::component(&symbol.name, kind, self.spec().as_ref()),
                    None => pages::component(&symbol.name, &DEFINED, self.spec().as_ref()),
                },
                Kind::Number => {
                    let line = self.symbols().into_iter().find(|s| s.defines && s.name == symbol.name)?.span;
                    let rest = self.text[line.end..].lines().next().unwrap_or_default();
                    format!("**`{}`**{rest}", symbol.name)
                }
            };
            return Some(shown(page, symbol.span));
        }
        let place = place::at(&self.text[..word.start], 0, self.spelling, self.kind());
        let value = place.key.and_then(|key| pages::words(&key.kind).into_iter().find(|(w, _)| *w == name));
        let page = match (place.named(name), value) {
            (_, Some((word, doc))) if !doc.is_empty() => format!("**`{word}`**: {doc}"),
            (Some(key), _) => pages::key(key, place.section()),
            (None, _) => pages::section(keys::COMPONENTS.iter().find(|kind| kind.name == name)?),
        };
        Some(shown(page, word))
    }

    /// The definitions of the file.
    fn definitions(&self) -> Vec<Definition> {
        self.parse().map(|ast| names::definitions(&ast)).unwrap_or_default()
    }

    fn definition(&self, name: &str) -> Option<Definition> {
        self.definitions().into_iter().find(|own| own.name.text == name)
    }

    /// The definition whose formulas hold a place.
    fn formulas(&self, at: usize) -> Option<Definition> {
        self.definitions().into_iter().find(|own| own.name.span.end < at && at <= own.span.end)
    }

    /// A function of definitions at a place in one.
    fn function(&self, name: &str, at: usize) -> Option<String> {
        let entry = functions::function(name).filter(|_| self.formulas(at).is_some())?;
        let called = self.text[text::word(&self.text, at).end..].trim_start().starts_with('(');
        called.then(|| pages::function(entry))
    }

    /// A value of a definition with its dimensions.
    fn value(&self, symbol: &Symbol) -> Option<String> {
        let ast = self.parse().ok()?;
        let hints = dreamc_dsl::hints(&ast, self.folder());
        let at = |span: Span| hints.iter().find(|(own, _)| *own == span).map(|(_, dims)| dims.clone());
        let uses = self.symbols().into_iter().filter(|s| s.kind == symbol.kind && s.name == symbol.name);
        let dims = at(symbol.span).or_else(|| uses.into_iter().find_map(|own| at(own.span)));
        Some(match dims {
            Some(dims) => format!("**`{}`** {dims}", symbol.name),
            None => format!("**`{}`**: a setting or a dimension", symbol.name),
        })
    }

    /// Words that may stand in the formulas of a definition: functions, values and settings.
    fn in_formulas(&self, definition: &Definition, add: &mut dyn FnMut(&str, u8, String, String)) {
        for own in names::names(definition).into_iter().filter(|own| own.gives && own.of == names::Of::Value)
        {
            add(&own.name, 6, format!("of `{}`", definition.name.text), String::new());
        }
        for (name, detail) in [("x", "the row of the token"), ("hidden", "the width of the stream")] {
            add(name, 6, detail.to_string(), String::new());
        }
        for (name, _, doc) in functions::FACTS {
            add(name, 6, doc.to_string(), String::new());
        }
        for entry in functions::FUNCTIONS {
            add(entry.name, 3, entry.call.to_string(), pages::function(entry));
        }
        for word in ["recurrence", "loss", "return", "over"] {
            add(word, 14, "definitions".into(), String::new());
        }
    }

    /// The kind of a component.
    fn component(&self, name: &str) -> Option<&'static Section> {
        let ast = self.parse().ok()?;
        let components = ast.root.get("model")?.value.as_map()?.get("components")?.value.as_map()?;
        let kind = &components.get(name)?.value.as_map()?.items.first()?.node.key.text;
        keys::COMPONENTS.iter().copied().find(|section| section.name == kind)
    }
}
