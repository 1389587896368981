//! `dreamc check`: every error of a file, each at its place.
//!
//! A specification is read as the language has it, and against the files that it names: data that
//! are not there are a warning, since a specification is written before its data are fetched; a
//! tokenizer that has more tokens than the vocabulary is an error. Of a suite, its specifications
//! are checked too, with the changes that it makes in them.

use clap::Args;
use dreamc_data::Tokenizer;
use dreamc_dsl::spec::Tokenizer as Named;
use dreamc_dsl::suite::{Suite, Variant};
use dreamc_dsl::{Ast, Diagnostic, Diagnostics, FileKind, Severity, Spec};
use dreamc_study::compare::arms::no_fields;
use dreamc_study::failure::{Done, Failure};
use dreamc_study::output::Stream;
use dreamc_study::{output, say, show};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Check specifications and suites: every error of a file at once, each at its place, with what
/// would be right
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc check model.yaml
  dreamc check examples/*.yaml --json
  dreamc check model.yaml --set ea.count=1024
  dreamc check - < model.yaml

Exit code 1 where a file has errors, 2 where one cannot be read.")]
pub struct Arguments {
    /// Specifications or suites, YAML or .dream; `-` for standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Change a field of each first: `--set ea.count=1024`; may be given several times
    #[arg(long, value_name = "FIELD=VALUE")]
    set: Vec<String>,

    /// Print diagnostics as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(a: Arguments) -> Done {
    let (mut good, mut read) = (true, true);
    let mut reports = vec![];
    for path in &a.files {
        for (name, found) in file(path, &a.set) {
            let failed = found.has_errors();
            good &= !failed;
            read &= !found.list.iter().any(|d| d.code == "unreadable");
            if a.json {
                reports.push(json!({"file": name, "ok": !failed, "diagnostics": found.to_json()}));
            } else if found.list.is_empty() {
                if !output::quiet() {
                    say!("{name}: no errors")?;
                }
            } else {
                say!("{}", found.render(Stream::Out.has_color()).trim_end())?;
            }
        }
    }
    if a.json {
        show::json(&reports)?;
    }
    match (good, read) {
        (true, _) => Ok(()),
        (false, true) => Err(Failure::Said),
        (false, false) => Err(Failure::Unread),
    }
}

/// Findings in a file and, where it is a suite, in those it names.
fn file(path: &Path, set: &[String]) -> Vec<(String, Diagnostics)> {
    let name = path.display().to_string();
    let base = path.parent().unwrap_or(Path::new(""));
    let kind = match dreamc_dsl::parse_file(path) {
        Ok(ast) => ast.kind,
        Err(found) => return vec![(name, found)],
    };
    if kind == FileKind::Spec {
        return vec![(name, specification(path, set))];
    }
    let (suite, warnings) = match dreamc_dsl::load_suite(path, set) {
        Ok(read) => read,
        Err(found) => return vec![(name, found)],
    };
    let mut arms = vec![(base.join(&suite.baseline), vec![])];
    for variant in &suite.variants {
        let arm = (base.join(&variant.spec), variant.set.clone());
        if !arms.contains(&arm) {
            arms.push(arm);
        }
    }
    let found = [warnings, unmatched(&suite, base)].concat();
    let mut all = vec![(name, Diagnostics::new(suite.sources, found))];
    all.extend(arms.iter().map(|(path, set)| {
        let with = if set.is_empty() { String::new() } else { format!(" with {}", set.join(", ")) };
        let mut found = specification(path, set);
        // An arm may begin from a run that is trained before the suite, and not yet.
        for d in found.list.iter_mut().filter(|d| d.code == "bad-base") {
            d.severity = Severity::Warning;
        }
        (format!("{}{with}", path.display()), found)
    }));
    all
}

/// Fields of the variants' `match` that their models do not have.
fn unmatched(suite: &Suite, base: &Path) -> Vec<Diagnostic> {
    let of = |(i, variant): (usize, &Variant)| match dreamc_dsl::load(base.join(&variant.spec), &variant.set)
    {
        Ok((spec, _)) => no_fields(suite, i, &spec),
        // The errors of the specification are said of it.
        Err(_) => vec![],
    };
    suite.variants.iter().enumerate().flat_map(of).collect()
}

fn specification(path: &Path, set: &[String]) -> Diagnostics {
    found(dreamc_dsl::load(path, set), path.parent().unwrap_or(Path::new("")))
}

/// Findings in a specification and in the files that it names.
fn found(read: Result<(Spec, Vec<Diagnostic>), Diagnostics>, folder: &Path) -> Diagnostics {
    match read {
        Ok((spec, mut found)) => {
            found.extend(files(&spec, folder));
            found.extend(dreamc_compiler::transfer::findings(&spec));
            Diagnostics::new(spec.sources, found)
        }
        Err(found) => found,
    }
}

/// Findings in the tree of a file in `folder`.
pub fn tree(ast: Ast, folder: &Path) -> Diagnostics {
    match ast.kind {
        FileKind::Spec => found(dreamc_dsl::check_in(ast, folder, &[]), folder),
        FileKind::Suite => match dreamc_dsl::check_suite(&ast, &[]) {
            Ok((suite, warnings)) => {
                let found = [warnings, unmatched(&suite, folder)].concat();
                Diagnostics::new(suite.sources, found)
            }
            Err(found) => found,
        },
    }
}

/// Faults of the files that a specification names.
fn files(spec: &Spec, base: &Path) -> Vec<Diagnostic> {
    let mut found = vec![];
    let Some(data) = &spec.data else { return found };
    for path in spec.clone().paths().map(|path| path.clone()) {
        if !base.join(&path).exists() {
            let warning = Diagnostic::warning("missing-file", format!("there is no `{path}`"));
            let at = spec.sources.find(&path).unwrap_or_default();
            found.push(
                warning.on(at).help("paths are relative to the folder of this file; training needs it"),
            );
        }
    }
    if let Named::File(path) = &data.tokenizer
        && base.join(path).is_file()
    {
        match Tokenizer::from_file(&base.join(path)) {
            Err(error) => {
                found.push(
                    Diagnostic::error("bad-tokenizer", error.to_string()).at(&spec.sources, "data.tokenizer"),
                );
            }
            Ok(tokenizer) if tokenizer.vocab() as u64 > spec.model.vocab => {
                let (has, holds) = (tokenizer.vocab(), spec.model.vocab);
                let message = format!("the tokenizer has {has} tokens, and the vocabulary holds {holds}");
                let error = Diagnostic::error("small-vocab", message).at(&spec.sources, "model.vocab");
                found.push(error.help(format!("write `vocab: {has}`")));
            }
            Ok(_) => {}
        }
    }
    found
}
