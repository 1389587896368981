//! The language of dreamc: from text to a checked [`Spec`].
//!
//! ```text
//! .dream ── dream.pest ──┐                    ┌── check ──> Spec, Suite   every error at its token
//!                        ├──> Ast ── --set ───┤
//! YAML ── yaml.rs ───────┘                    └── format ──> text         either spelling, nothing lost
//! ```
//!
//! In: any text. Out: a specification with every default filled in, or [`Diagnostics`], all errors
//! of the file at once. Nothing here panics, and time and memory are bounded by the limits in
//! `docs/language.md`.
//!
//! - [`ast`]: the one tree of both spellings. `dream` and `yaml` read it, `comments` gives comments
//!   to its items, `format` writes it.
//! - [`keys`]: the table of all keys with types, defaults and meanings. The readers, the checker,
//!   [`schema`] and the reference page ([`reference()`]) are driven by it: a new key is a line
//!   there and a line where it is read.
//! - [`component`]: the kinds of components, a file each with its keys, its checks and its facts.
//! - [`task`]: the generated tasks, an entry each with the numbers that it takes.
//! - [`define`]: components that a specification writes itself, as formulas.
//! - `check`: the meaning. [`spec`] and [`suite`] are its results and the only types that later
//!   stages see.
//! - [`diagnostic`], [`source`]: what is said, and about which token. Later stages speak through
//!   them too:
//!   `Diagnostic::error("code", "phrase").at(&spec.sources, "model.components.ea.count")`.
//!
//! ```
//! use dreamc_dsl::{Spelling, check, format, parse};
//!
//! let text = "model tiny { vocab 256 hidden 64 context 32 \
//!             sa = sequence { heads 4 } mlp = mlp { intermediate 128 } repeat 2 { sa > mlp } }";
//! let ast = parse("tiny.dream", text, Spelling::Dream)?;
//! let (spec, warnings) = check(&ast, &["mlp.intermediate=4 * 64".into()])?;
//! assert!(warnings.is_empty());
//! assert_eq!(spec.model.body.len(), 1);
//! assert!(format(&ast, Spelling::Yaml)?.contains("- repeat: 2"));
//! # Ok::<(), dreamc_dsl::Diagnostics>(())
//! ```

mod address;
pub mod ast;
mod base;
mod check;
mod comments;
pub mod component;
pub mod define;
pub mod diagnostic;
mod dream;
mod format;
mod grammar;
pub mod keys;
mod number;
mod optimizer;
mod reference;
mod schema;
mod show;
mod sketch;
pub mod source;
pub mod spec;
mod suggest;
pub mod suite;
pub mod task;
mod transfer;
mod yaml;

pub use ast::{Ast, FileKind, Spelling};
pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use reference::reference;
pub use schema::schema;
pub use source::{SourceMap, Span};
pub use spec::Spec;
pub use suggest::field_called;
pub use suite::Suite;

/// The longest file, in bytes.
const MAX_BYTES: usize = 1 << 20;

/// Reads a text. Slips of syntax that the reader could read over are in the tree ([`Ast::errors`]);
/// [`check`] reports them with its own, [`format`] refuses.
pub fn parse(name: &str, text: &str, spelling: Spelling) -> Result<Ast, Diagnostics> {
    let source = SourceMap { spelling, ..SourceMap::new(name, text) };
    let mut found = Vec::new();
    if text.len() > MAX_BYTES {
        let error = Diagnostic::error("too-large", "the file is larger than 1 MiB");
        return Err(Diagnostics::new(
            SourceMap::new(name, ""),
            vec![error.help("a specification has a few hundred lines")],
        ));
    }
    let read = match spelling {
        Spelling::Yaml => yaml::read(&source, &mut found),
        Spelling::Dream => dream::read(&source, &mut found),
    };
    match read {
        Some((kind, root)) => Ok(Ast { source, spelling, kind, root, errors: found }),
        None => Err(Diagnostics::new(source, found)),
    }
}

/// Checks the tree of a specification, with `--set` arguments (`ea.count=1024`) applied to it
/// first.
pub fn check(ast: &Ast, overrides: &[String]) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    let (spec, diagnostics) = run(ast, FileKind::Spec, overrides, check::Checker::spec)?;
    Ok((Spec { sources: *diagnostics.source, ..spec }, diagnostics.list))
}

/// Checks the tree of a suite, with `--set` arguments applied to it first.
pub fn check_suite(ast: &Ast, overrides: &[String]) -> Result<(Suite, Vec<Diagnostic>), Diagnostics> {
    let (suite, diagnostics) = run(ast, FileKind::Suite, overrides, check::Checker::suite)?;
    Ok((Suite { sources: *diagnostics.source, ..suite }, diagnostics.list))
}

/// Checks the tree of a specification in `folder`. First, definitions that it includes are added to
/// its own, and the specification that it names as its `base` is put below it.
pub fn check_in(
    ast: Ast,
    folder: &std::path::Path,
    overrides: &[String],
) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    check(&base::resolve(define::include::resolve(ast, folder)?, folder, 0)?, overrides)
}

/// The dimensions of values of definitions at their tokens, also where the tree has errors.
pub fn hints(ast: &Ast, folder: &std::path::Path) -> Vec<(Span, String)> {
    let Ok(ast) = define::include::resolve(ast.clone(), folder) else { return Vec::new() };
    let mut checker = check::Checker::new(ast.source.clone());
    checker.spec(&ast.root);
    checker.hints
}

/// The result of a reader of a tree, or every error.
fn run<T>(
    ast: &Ast,
    kind: FileKind,
    overrides: &[String],
    read: impl FnOnce(&mut check::Checker, &ast::Map) -> Option<T>,
) -> Result<(T, Diagnostics), Diagnostics> {
    let (mut root, mut source, mut found) = (ast.root.clone(), ast.source.clone(), ast.errors.clone());
    if ast.kind != kind {
        let (message, help) = match kind {
            FileKind::Spec => {
                ("this is a suite, not a specification", "name one of the specifications it compares")
            }
            FileKind::Suite => {
                ("this is a specification, not a suite", "a suite has `baseline` and `variants`")
            }
        };
        return Err(Diagnostics::new(source, vec![Diagnostic::error("wrong-file", message).help(help)]));
    }
    address::apply(&mut root, ast.kind, &mut source, overrides, &mut found);
    let mut checker = check::Checker::new(source);
    checker.found = found;
    let value = read(&mut checker, &root);
    let mut found = checker.found;
    // Of a file that is not understood it is not known what nothing uses.
    if found.iter().any(|d| d.severity == Severity::Error) {
        found.retain(|d| d.severity == Severity::Error || !d.code.starts_with("unused-"));
    }
    let diagnostics = Diagnostics::new(checker.sources, found);
    match value {
        Some(value) if !diagnostics.has_errors() => Ok((value, diagnostics)),
        _ => Err(diagnostics),
    }
}

/// Reads and checks a file; the specification it names as its `base` is put below it.
pub fn load(
    path: impl AsRef<std::path::Path>,
    overrides: &[String],
) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    load_below(path.as_ref(), overrides, 0)
}

/// Reads and checks a file that is the base of a base of …, `depth` times.
fn load_below(
    path: &std::path::Path,
    overrides: &[String],
    depth: usize,
) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    let folder = path.parent().unwrap_or(std::path::Path::new(""));
    let ast = define::include::resolve(parse_file(path)?, folder)?;
    check(&base::resolve(ast, folder, depth)?, overrides)
}

/// Reads and checks a suite file.
pub fn load_suite(
    path: impl AsRef<std::path::Path>,
    overrides: &[String],
) -> Result<(Suite, Vec<Diagnostic>), Diagnostics> {
    check_suite(&parse_file(path)?, overrides)
}

/// Reads a file, or standard input where the path is `-`; that once, however often it is asked for.
pub fn parse_file(path: impl AsRef<std::path::Path>) -> Result<Ast, Diagnostics> {
    let path = path.as_ref();
    let (name, read, spelling) = match path.to_str() {
        Some("-") => {
            let text = standard_input();
            let spelling = text.as_deref().map_or(Spelling::Yaml, Spelling::guess);
            ("standard input".into(), text, spelling)
        }
        _ => (path.to_string_lossy(), file_text(path), Spelling::of(&path.to_string_lossy())),
    };
    match read {
        Ok(text) => parse(&name, &text, spelling),
        Err(error) => {
            let error = Diagnostic::error("unreadable", format!("{name} cannot be read: {error}"));
            Err(Diagnostics::new(SourceMap::new(name, ""), vec![error]))
        }
    }
}

/// The text of a file, no more of it than a specification may have. A named pipe may wait for ever;
/// those a shell makes for `<(…)` do not.
fn file_text(path: &std::path::Path) -> std::io::Result<String> {
    let by_shell = path.starts_with("/dev") || path.starts_with("/proc");
    #[cfg(unix)]
    if !by_shell
        && std::fs::metadata(path).is_ok_and(|m| std::os::unix::fs::FileTypeExt::is_fifo(&m.file_type()))
    {
        let what = "it is a pipe; write `-` and give it as standard input";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what));
    }
    bounded(std::fs::File::open(path)?)
}

fn standard_input() -> std::io::Result<String> {
    static TEXT: std::sync::OnceLock<Result<String, String>> = std::sync::OnceLock::new();
    let text = TEXT.get_or_init(|| bounded(std::io::stdin().lock()).map_err(|error| error.to_string()));
    text.clone().map_err(std::io::Error::other)
}

fn bounded(from: impl std::io::Read) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    from.take(MAX_BYTES as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

/// Writes a tree in either spelling.
pub fn format(ast: &Ast, spelling: Spelling) -> Result<String, Diagnostics> {
    match ast.errors.is_empty() {
        true => Ok(format::print(&ast.root, spelling)),
        false => Err(Diagnostics::new(ast.source.clone(), ast.errors.clone())),
    }
}

/// The text of a file with the value at `path` (`ea.count`) replaced and not another byte changed.
pub fn edit(name: &str, text: &str, path: &str, value: &str) -> Result<String, Diagnostics> {
    let ast = parse(name, text, Spelling::of(name))?;
    address::edit(text, &ast, path, value).map_err(|error| Diagnostics::new(ast.source, vec![error]))
}

/// The model of a specification in `.dream` as its author would write it, defaults left out; it
/// reads back as the same model.
pub fn sketch(spec: &Spec) -> String {
    sketch::sketch(spec)
}

/// A specification with every default written out; it reads back as an equal one.
pub fn show(spec: &Spec, spelling: Spelling) -> String {
    format::print(&show::tree(spec), spelling)
}
