//! The language of dreamc.
pub mod ast;
mod check;
pub mod diagnostic;
mod dream;
mod grammar;
pub mod keys;
mod number;
#[allow(dead_code)]
pub mod source;
pub mod spec;
mod suggest;
#[allow(dead_code)] // `--set` comes next
mod yaml;

pub use ast::{Ast, FileKind, Spelling};
pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use source::{SourceMap, Span};
pub use spec::Spec;

/// A file may have so many bytes.
const MAX_BYTES: usize = 1 << 20;

/// Reads a text.
pub fn parse(name: &str, text: &str, spelling: Spelling) -> Result<Ast, Diagnostics> {
    let source = SourceMap::new(name, text);
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

/// Checks a tree.
pub fn check(ast: &Ast) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    let mut checker = check::Checker::new(ast.source.clone());
    checker.found.extend(ast.errors.iter().cloned());
    let spec = checker.spec(&ast.root);
    let diagnostics = Diagnostics::new(checker.sources, checker.found);
    match spec {
        Some(mut spec) if !diagnostics.has_errors() => {
            spec.sources = *diagnostics.source;
            Ok((spec, diagnostics.list))
        }
        _ => Err(diagnostics),
    }
}

/// Reads and checks a file.
pub fn load(
    path: impl AsRef<std::path::Path>,
    overrides: &[String],
) -> Result<(Spec, Vec<Diagnostic>), Diagnostics> {
    let _ = overrides;
    check(&parse_file(path)?)
}

/// Reads a file.
pub fn parse_file(path: impl AsRef<std::path::Path>) -> Result<Ast, Diagnostics> {
    let path = path.as_ref();
    let name = path.to_string_lossy();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text, Spelling::of(&name)),
        Err(error) => {
            let error = Diagnostic::error("unreadable", format!("{name} cannot be read: {error}"));
            Err(Diagnostics::new(SourceMap::new(name, ""), vec![error]))
        }
    }
}
