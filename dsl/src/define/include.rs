//! Definitions of other files.
//!
//! `include` names files of definitions relative to its own. *Promise*: nothing outside the folder
//! of the specification is read, however the path leads there, and no file is read twice.

use std::path::{Path, PathBuf};

use super::read::only_definitions;
use crate::ast::{Ast, Item, Key, Map, Pair, Spelling, Value, ValueKind};
use crate::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::source::{SourceMap, Span};

/// Files that one specification may include.
const MOST_FILES: usize = 64;

/// Adds the definitions of the files that a specification in `folder` includes to its own.
pub(crate) fn resolve(mut ast: Ast, folder: &Path) -> Result<Ast, Diagnostics> {
    let includes = |item: &Item<Pair>| item.node.key.text == "include";
    if !ast.root.items.iter().any(includes) {
        return Ok(ast);
    }
    let mut reader = Reader {
        root: root_of(folder),
        source: ast.source.clone(),
        read: Vec::new(),
        found: Vec::new(),
        definitions: Vec::new(),
    };
    let written: Vec<Item<Pair>> = ast.root.items.extract_if(.., |item| includes(item)).collect();
    let whole = written.first().map(|item| item.node.key.span).unwrap_or_default();
    for item in &written {
        reader.files(&item.node, Path::new(""));
    }
    let Reader { source, found, definitions, .. } = reader;
    ast.source = source;
    ast.errors.extend(found);
    if ast.errors.iter().any(|error| error.severity == Severity::Error) {
        return Err(Diagnostics::new(ast.source, ast.errors));
    }
    if definitions.is_empty() {
        return Ok(ast);
    }
    match ast.root.get_mut("define").map(|pair| &mut pair.value.kind) {
        Some(ValueKind::Map(map)) => map.items.extend(definitions),
        Some(_) => {}
        None => {
            let map = Map { items: definitions, broken: true, span: whole, ..Map::default() };
            let key = Key { text: "define".into(), span: whole };
            let value = Value::new(ValueKind::Map(map), whole);
            ast.root.items.push(Item::new(Pair { key, value }));
        }
    }
    Ok(ast)
}

/// The folder itself, without links: an empty path is the one that the program runs in.
fn root_of(folder: &Path) -> PathBuf {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf())
}

struct Reader {
    /// The folder that nothing outside is read of.
    root: PathBuf,
    source: SourceMap,
    read: Vec<PathBuf>,
    found: Vec<Diagnostic>,
    definitions: Vec<Item<Pair>>,
}

impl Reader {
    fn error(&mut self, span: Span, message: impl Into<String>, help: impl Into<String>) {
        self.found.push(Diagnostic::error("bad-include", message).on(span).help(help));
    }

    /// The files of one `include`, of a file in that folder below the root.
    fn files(&mut self, pair: &Pair, folder: &Path) {
        let own = std::slice::from_ref(&pair.value);
        let listed: Vec<Value> = match &pair.value.kind {
            ValueKind::List(list) => list.items.iter().map(|item| item.node.clone()).collect(),
            _ => own.to_vec(),
        };
        for value in &listed {
            match &value.kind {
                ValueKind::Word(name) | ValueKind::Text(name) => self.file(name, value.span, folder),
                ValueKind::Invalid => {}
                _ => self.error(
                    value.span,
                    "this is no path",
                    "write `include \"mixers.dream\"` (YAML: `include: mixers.dream`)",
                ),
            }
        }
    }

    fn file(&mut self, name: &str, span: Span, folder: &Path) {
        let path = folder.join(name);
        let file = self.root.join(&path);
        let Ok(real) = file.canonicalize() else {
            let help = "the path is relative to the file that includes it";
            return self.error(span, format!("there is no `{}`", path.display()), help);
        };
        if Path::new(name).is_absolute() || !real.starts_with(&self.root) {
            let help = "move the file into the folder of the specification, or below it";
            return self.error(span, format!("`{name}` leads out of the folder of the specification"), help);
        }
        if self.read.contains(&real) {
            return;
        }
        if self.read.len() >= MOST_FILES {
            return self.error(span, "too many files are included", format!("at most {MOST_FILES} are read"));
        }
        self.read.push(real.clone());
        let text = match crate::file_text(&real) {
            Ok(text) => text,
            Err(error) => {
                return self.error(
                    span,
                    format!("`{name}` cannot be read: {error}"),
                    "include a file of definitions",
                );
            }
        };
        let base = self.source.add_file(&path.to_string_lossy(), &text);
        let (root, found) = match crate::parse(name, &text, Spelling::of(name)) {
            Ok(ast) => (Some(ast.root), ast.errors),
            Err(found) => (None, found.list),
        };
        let found = found.into_iter().chain(root.as_ref().and_then(only_definitions));
        self.found.extend(found.map(|error| moved(error, base)));
        let Some(mut root) = root else { return };
        root.shift(base);
        for item in root.items {
            match (item.node.key.text.as_str(), item.node.value.kind) {
                ("define", ValueKind::Map(map)) => self.definitions.extend(map.items),
                ("include", kind) => {
                    let pair = Pair { value: Value::new(kind, item.node.value.span), key: item.node.key };
                    self.files(&pair, path.parent().unwrap_or(Path::new("")));
                }
                _ => {}
            }
        }
    }
}

/// A mistake of a file whose first byte has that place.
fn moved(mut mistake: Diagnostic, base: usize) -> Diagnostic {
    let shift = |span: Span| Span::new(span.start + base, span.end + base);
    mistake.span = mistake.span.map(shift);
    mistake.related.iter_mut().for_each(|(span, _)| *span = shift(*span));
    mistake
}
