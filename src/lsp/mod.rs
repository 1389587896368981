//! A language server: what `check`, `fmt`, `count` and the table of keys know, where one types.
//!
//! *In*: messages of the Language Server Protocol on standard input. *Out*: answers on standard
//! output. *Promise*: a document of any content is answered, files are read and never written, and
//! the server ends when its input ends.
//!
//! [`wire`] is the protocol's framing (a header and JSON: forty lines, so no library), types of
//! messages are those of `lsp_types`, [`text`] converts places, [`place`] finds the keys for a
//! place, [`symbols`] names and their uses, [`pages`] is what people read. Documents are sent
//! whole; requests are answered in order.

mod pages;
mod place;
mod symbols;
mod text;
mod wire;

use crate::command::check;
use dreamc_dsl::component::DEFINED;
use dreamc_dsl::define::library::LIBRARY;
use dreamc_dsl::define::{Definition, functions, names};
use dreamc_dsl::keys::{self, Section, Type};
use dreamc_dsl::{Ast, Diagnostics, FileKind, Severity, Span, Spec, Spelling};
use dreamc_study::output;
use lsp_types::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use symbols::{Kind, Symbol};
use wire::Fault;

/// An open document.
struct Document {
    uri: Uri,
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
        if message.get("method").and_then(Value::as_str) == Some("textDocument/didOpen") {
            let parameters = message.get("params").unwrap_or(&Value::Null);
            let Ok(opened) = read::<DidOpenTextDocumentParams>(parameters) else { return vec![] };
            // One document is open in a page.
            self.0.documents.clear();
            return self.0.open(opened.text_document, Some(path));
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
    fn open(&mut self, opened: TextDocumentItem, path: Option<&Path>) -> Vec<Value> {
        let TextDocumentItem { uri, language_id, text, .. } = opened;
        let path = path.map_or_else(|| path_of(uri.as_str()), Path::to_path_buf);
        let dream = language_id == "dream";
        let spelling = if dream { Spelling::Dream } else { Spelling::of(&path.to_string_lossy()) };
        let key = uri.as_str().to_string();
        self.documents.insert(key, Document { uri: uri.clone(), path, spelling, text });
        self.look(&uri)
    }

    /// Diagnostics of a document, published.
    fn look(&self, uri: &Uri) -> Vec<Value> {
        let found = self.documents.get(uri.as_str()).map(Document::diagnostics);
        found.into_iter().map(|found| published(uri.clone(), found)).collect()
    }

    fn request(&mut self, method: &str, parameters: &Value) -> Result<Value, Fault> {
        match (self.state, method) {
            (State::Fresh, "initialize") => {
                self.state = State::Running;
                return shown(capabilities());
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
            "textDocument/completion" => self.at(parameters, |d, at| shown(d.completion(at))),
            "textDocument/hover" => self.at(parameters, |d, at| shown(d.hover(at))),
            "textDocument/definition" => self.at(parameters, |d, at| {
                let to = d.uses(at).into_iter().find(|s| s.defines);
                shown(to.map(|s| d.location(s.span)))
            }),
            "textDocument/references" => self.at(parameters, |d, at| {
                shown(d.uses(at).into_iter().map(|s| d.location(s.span)).collect::<Vec<_>>())
            }),
            "textDocument/prepareRename" => self.at(parameters, |d, at| match d.symbol(at) {
                Some(s) => shown(PrepareRenameResponse::RangeWithPlaceholder {
                    range: text::range(&d.text, s.span),
                    placeholder: s.name,
                }),
                None => Err(Fault::refused(
                    "only components, numbers of `let`, and names of definitions are renamed",
                )),
            }),
            "textDocument/rename" => {
                let RenameParams { text_document_position: place, new_name, .. } = read(parameters)?;
                self.of(&place, |d, at| {
                    let edits = d.rename(at, &new_name)?;
                    #[expect(clippy::mutable_key_type, reason = "hashes and compares the text alone")]
                    let changes = HashMap::from([(place.text_document.uri.clone(), edits)]);
                    shown(WorkspaceEdit { changes: Some(changes), ..WorkspaceEdit::default() })
                })
            }
            "textDocument/formatting" => {
                // Its options are of tabs and ends of lines, which the language settles.
                let of = parameters.get("textDocument").unwrap_or(&Value::Null);
                let document: TextDocumentIdentifier = read(of)?;
                shown(self.document(&document.uri)?.format())
            }
            _ => Err(Fault::method(method)),
        }
    }

    fn document(&self, uri: &Uri) -> Result<&Document, Fault> {
        let uri = uri.as_str();
        self.documents.get(uri).ok_or_else(|| Fault::parameters(format!("`{uri}` is not open")))
    }

    /// The answer about the place that a request names.
    fn at(
        &self,
        parameters: &Value,
        answer: impl FnOnce(&Document, usize) -> Result<Value, Fault>,
    ) -> Result<Value, Fault> {
        self.of(&read(parameters)?, answer)
    }

    /// The answer about a place in a document.
    fn of(
        &self,
        place: &TextDocumentPositionParams,
        answer: impl FnOnce(&Document, usize) -> Result<Value, Fault>,
    ) -> Result<Value, Fault> {
        let document = self.document(&place.text_document.uri)?;
        answer(document, text::offset(&document.text, place.position))
    }

    fn notification(&mut self, method: &str, parameters: &Value) -> Vec<Value> {
        self.notified(method, parameters).unwrap_or_default()
    }

    /// Messages that follow from a notification; an unknown one has nothing.
    fn notified(&mut self, method: &str, parameters: &Value) -> Result<Vec<Value>, Fault> {
        match method {
            "textDocument/didOpen" => {
                let opened: DidOpenTextDocumentParams = read(parameters)?;
                Ok(self.open(opened.text_document, None))
            }
            "textDocument/didChange" => {
                let mut changed: DidChangeTextDocumentParams = read(parameters)?;
                let uri = changed.text_document.uri;
                let last = changed.content_changes.pop();
                if let (Some(document), Some(last)) = (self.documents.get_mut(uri.as_str()), last) {
                    document.text = last.text;
                }
                Ok(self.look(&uri))
            }
            // A file that this one names may have changed, too.
            "textDocument/didSave" => {
                let saved: DidSaveTextDocumentParams = read(parameters)?;
                Ok(self.look(&saved.text_document.uri))
            }
            "textDocument/didClose" => {
                let closed: DidCloseTextDocumentParams = read(parameters)?;
                self.documents.remove(closed.text_document.uri.as_str());
                Ok(vec![published(closed.text_document.uri, vec![])])
            }
            _ => Ok(vec![]),
        }
    }
}

/// The parameters of a message.
fn read<P: DeserializeOwned>(parameters: &Value) -> Result<P, Fault> {
    P::deserialize(parameters).map_err(|error| Fault::parameters(error.to_string()))
}

/// The result of a request.
fn shown(result: impl Serialize) -> Result<Value, Fault> {
    serde_json::to_value(result).map_err(|error| Fault::refused(error.to_string()))
}

fn capabilities() -> InitializeResult {
    let letters = ["{", " ", ":", "|", ">", "("].map(String::from);
    let synchronised = TextDocumentSyncOptions {
        open_close: Some(true),
        change: Some(TextDocumentSyncKind::FULL),
        save: Some(true.into()),
        ..TextDocumentSyncOptions::default()
    };
    let renames = RenameOptions {
        prepare_provider: Some(true),
        work_done_progress_options: WorkDoneProgressOptions::default(),
    };
    InitializeResult {
        capabilities: ServerCapabilities {
            position_encoding: Some(PositionEncodingKind::UTF16),
            text_document_sync: Some(synchronised.into()),
            completion_provider: Some(CompletionOptions {
                trigger_characters: Some(letters.into()),
                ..CompletionOptions::default()
            }),
            hover_provider: Some(true.into()),
            definition_provider: Some(OneOf::Left(true)),
            references_provider: Some(OneOf::Left(true)),
            rename_provider: Some(OneOf::Right(renames)),
            document_formatting_provider: Some(OneOf::Left(true)),
            ..ServerCapabilities::default()
        },
        server_info: Some(ServerInfo {
            name: "dreamc".into(),
            version: Some(env!("CARGO_PKG_VERSION").into()),
        }),
    }
}

fn published(uri: Uri, diagnostics: Vec<Diagnostic>) -> Value {
    let parameters = PublishDiagnosticsParams { uri, diagnostics, version: None };
    let parameters = serde_json::to_value(parameters).unwrap_or_default();
    wire::notification("textDocument/publishDiagnostics", parameters)
}

/// Text for people.
fn markdown(value: String) -> MarkupContent {
    MarkupContent { kind: MarkupKind::Markdown, value }
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

    /// The place of a span of the text.
    fn location(&self, span: Span) -> Location {
        Location { uri: self.uri.clone(), range: text::range(&self.text, span) }
    }

    fn diagnostics(&self) -> Vec<Diagnostic> {
        let found = match self.parse() {
            Ok(ast) => check::tree(ast, self.folder()),
            Err(found) => found,
        };
        // A mistake of a file that this one includes is shown where it is included.
        let include = || self.parse().ok().and_then(|ast| Some(ast.root.get("include")?.key.span));
        let own =
            |span: Span| if span.start <= self.text.len() { span } else { include().unwrap_or_default() };
        let related = |(span, note): &(Span, String)| DiagnosticRelatedInformation {
            location: self.location(own(*span)),
            message: note.clone(),
        };
        let one = |d: &dreamc_dsl::Diagnostic| {
            let spelled = |text: &str| found.source.spelled(text);
            let help = d.help.as_ref().map_or(String::new(), |help| format!("\nhelp: {}", spelled(help)));
            let error = d.severity == Severity::Error;
            Diagnostic {
                range: text::range(&self.text, own(d.span.unwrap_or_default())),
                severity: Some(if error { DiagnosticSeverity::ERROR } else { DiagnosticSeverity::WARNING }),
                code: Some(NumberOrString::String(d.code.into())),
                source: Some("dreamc".into()),
                message: format!("{}{help}", spelled(&d.message)),
                related_information: (!d.related.is_empty()).then(|| d.related.iter().map(related).collect()),
                ..Diagnostic::default()
            }
        };
        found.list.iter().map(one).collect()
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
    fn rename(&self, at: usize, name: &str) -> Result<Vec<TextEdit>, Fault> {
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
        let mut renamed = Document {
            uri: self.uri.clone(),
            path: self.path.clone(),
            spelling: self.spelling,
            text: self.text.clone(),
        };
        let mut spans: Vec<Span> = uses.iter().map(|s| s.span).collect();
        spans.sort_by_key(|span| std::cmp::Reverse(span.start));
        spans.iter().for_each(|span| renamed.text.replace_range(span.start..span.end, name));
        let error = |d: &Diagnostic| d.severity == Some(DiagnosticSeverity::ERROR);
        let errors = |d: &Document| d.diagnostics().into_iter().filter(error).collect::<Vec<_>>();
        let found = errors(&renamed);
        if found.len() > errors(self).len() {
            let why = found.into_iter().next().map(|d| d.message).unwrap_or_default();
            return Err(Fault::refused(format!("`{name}` would be an error: {why}")));
        }
        let edit = |span: &Span| TextEdit::new(text::range(&self.text, *span), name.into());
        Ok(spans.iter().map(edit).collect())
    }

    /// One edit of the whole text, or nothing where it has errors of syntax or is formatted.
    fn format(&self) -> Option<Vec<TextEdit>> {
        match self.parse().and_then(|ast| dreamc_dsl::format(&ast, ast.spelling)) {
            Ok(text) if text != self.text => {
                let whole = text::range(&self.text, Span::new(0, self.text.len()));
                Some(vec![TextEdit::new(whole, text)])
            }
            Ok(_) => Some(vec![]),
            Err(_) => None,
        }
    }

    fn completion(&self, at: usize) -> Vec<CompletionItem> {
        let partial = at - text::word(&self.text, at).start.min(at);
        let place = place::at(&self.text[..at], partial, self.spelling, self.kind());
        let mut items: Vec<CompletionItem> = vec![];
        let mut add = |label: &str, kind: CompletionItemKind, detail: String, page: String| {
            if items.iter().any(|item| item.label == label) {
                return;
            }
            items.push(CompletionItem {
                label: label.into(),
                kind: Some(kind),
                detail: Some(detail),
                documentation: Some(Documentation::MarkupContent(markdown(page))),
                ..CompletionItem::default()
            });
        };
        if let Some(definition) = self.formulas(at) {
            self.in_formulas(&definition, &mut add);
            return items;
        }
        if let Some(key) = place.key.filter(|_| !place.layers) {
            for (word, doc) in pages::words(&key.kind) {
                add(word, CompletionItemKind::VALUE, key.name.to_string(), doc.to_string());
            }
            if key.kind.numeric() {
                for s in self.symbols().iter().filter(|s| s.defines && s.kind == Kind::Number) {
                    add(&s.name, CompletionItemKind::VARIABLE, "a number of `let`".into(), String::new());
                }
            }
            return items;
        }
        let model = place.section().is_some_and(|s| std::ptr::eq(s, &keys::MODEL));
        let dream = self.spelling == Spelling::Dream;
        if place.layers || (model && dream) {
            for s in self.symbols().iter().filter(|s| s.defines && s.kind == Kind::Component) {
                add(&s.name, CompletionItemKind::VARIABLE, "a component".into(), String::new());
            }
            for word in ["skip", "recur", "repeat"].into_iter().chain(dream.then_some("layer")) {
                add(word, CompletionItemKind::KEYWORD, "layers".into(), String::new());
            }
        }
        let sections: Vec<&Section> = match place.group {
            Type::Component => {
                keys::COMPONENTS.iter().for_each(|kind| {
                    add(kind.name, CompletionItemKind::CLASS, "a component".into(), pages::section(kind))
                });
                for own in self.definitions() {
                    let page = pages::definition(Some(&own), None).unwrap_or_default();
                    add(&own.name.text, CompletionItemKind::CLASS, "a definition".into(), page);
                }
                for (name, text) in LIBRARY {
                    add(
                        name,
                        CompletionItemKind::CLASS,
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
                add(key.name, CompletionItemKind::FIELD, key.kind.describe(), pages::key(key, Some(section)));
            }
        }
        items
    }

    fn hover(&self, at: usize) -> Option<Hover> {
        let word = text::word(&self.text, at);
        let name = &self.text[word.start..word.end];
        if name.is_empty() {
            return None;
        }
        let shown = |page: String, span: Span| Hover {
            contents: HoverContents::Markup(markdown(page)),
            range: Some(text::range(&self.text, span)),
        };
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
    fn in_formulas(
        &self,
        definition: &Definition,
        add: &mut dyn FnMut(&str, CompletionItemKind, String, String),
    ) {
        for own in names::names(definition).into_iter().filter(|own| own.gives && own.of == names::Of::Value)
        {
            add(
                &own.name,
                CompletionItemKind::VARIABLE,
                format!("of `{}`", definition.name.text),
                String::new(),
            );
        }
        for (name, detail) in [("x", "the row of the token"), ("hidden", "the width of the stream")] {
            add(name, CompletionItemKind::VARIABLE, detail.to_string(), String::new());
        }
        for (name, _, doc) in functions::FACTS {
            add(name, CompletionItemKind::VARIABLE, doc.to_string(), String::new());
        }
        for entry in functions::FUNCTIONS {
            add(entry.name, CompletionItemKind::FUNCTION, entry.call.to_string(), pages::function(entry));
        }
        for word in ["recurrence", "loss", "return", "over"] {
            add(word, CompletionItemKind::KEYWORD, "definitions".into(), String::new());
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
