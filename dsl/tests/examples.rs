//! Every example reads, checks clean, is quick to check, and survives every way of writing it.

mod common;

use std::time::{Duration, Instant};

use dreamc_dsl::{Ast, Diagnostics, FileKind, Spelling, check, check_suite, format, parse, parse_file, show};

fn examples() -> Vec<(String, Ast)> {
    let paths = common::files("../examples");
    let read =
        |path: &std::path::PathBuf| parse_file(path).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
    paths.iter().map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), read(path))).collect()
}

/// What a file means, as text that two spellings can be compared by.
fn meaning(ast: &Ast) -> Result<(String, usize), Diagnostics> {
    Ok(match ast.kind {
        FileKind::Spec => check(ast, &[]).map(|(spec, warnings)| (format!("{spec:#?}"), warnings.len()))?,
        FileKind::Suite => {
            check_suite(ast, &[]).map(|(suite, warnings)| (format!("{suite:#?}"), warnings.len()))?
        }
    })
    .map(|(text, warnings)| (text.split("sources: SourceMap").next().unwrap().to_string(), warnings))
}

fn read(text: &str, spelling: Spelling) -> Ast {
    parse("text", text, spelling).unwrap_or_else(|diagnostics| panic!("{diagnostics}\n{text}"))
}

#[test]
fn examples_check_clean_and_fast() {
    for (name, ast) in examples() {
        let text = ast.source.text.clone();
        let start = Instant::now();
        let ast = parse(&name, &text, ast.spelling).unwrap();
        let (_, warnings) = meaning(&ast).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
        let time = start.elapsed();
        assert_eq!(warnings, 0, "{name}");
        // The promise is 50 ms for an optimised build on an idle machine; this is neither.
        assert!(time < Duration::from_millis(200), "{name} took {time:?}");
    }
}

#[test]
fn examples_are_formatted() {
    for (name, ast) in examples() {
        assert_eq!(format(&ast, ast.spelling).unwrap(), ast.source.text, "{name} is not as `fmt` writes it");
    }
}

#[test]
fn both_spellings_of_an_example_mean_the_same() {
    for (name, ast) in examples() {
        let yaml = format(&ast, Spelling::Yaml).unwrap();
        let dream = format(&ast, Spelling::Dream).unwrap();
        let (from_yaml, from_dream) = (read(&yaml, Spelling::Yaml), read(&dream, Spelling::Dream));
        assert_eq!(format(&from_dream, Spelling::Yaml).unwrap(), yaml, "{name}");
        assert_eq!(format(&from_yaml, Spelling::Dream).unwrap(), dream, "{name}");
        assert_eq!(from_yaml.without_spans(), from_dream.without_spans(), "{name}");
        let expected = meaning(&ast).unwrap().0;
        assert_eq!(meaning(&from_yaml).unwrap().0, expected, "{name}");
        assert_eq!(meaning(&from_dream).unwrap().0, expected, "{name}");
    }
}

#[test]
fn what_is_shown_reads_back_as_the_same() {
    for (name, ast) in examples().into_iter().filter(|(_, ast)| ast.kind == FileKind::Spec) {
        let (spec, _) = check(&ast, &[]).unwrap();
        for spelling in [Spelling::Yaml, Spelling::Dream] {
            let shown = show(&spec, spelling);
            let (again, warnings) =
                check(&read(&shown, spelling), &[]).unwrap_or_else(|d| panic!("{d}\n{shown}"));
            assert_eq!(again, spec, "{name}");
            assert!(warnings.is_empty(), "{name}: {warnings:?}");
            assert_eq!(show(&again, spelling), shown, "{name}");
        }
    }
}

#[test]
fn every_key_of_a_checked_spec_has_a_token() {
    for (name, ast) in examples().into_iter().filter(|(_, ast)| ast.kind == FileKind::Spec) {
        let (spec, _) = check(&ast, &[]).unwrap();
        for (path, span) in &spec.sources.fields {
            assert!(span.end <= ast.source.text.len(), "{name}: {path} has {span:?}");
            assert_eq!(spec.sources.locate(path), Some(*span));
        }
        for component in spec.model.components.keys() {
            assert!(spec.sources.locate(&format!("model.components.{component}.router.query")).is_some());
        }
        assert!(spec.sources.fields.contains_key("train.steps"), "{name}");
        assert!(spec.sources.fields.contains_key("model.body[0]"), "{name}");
    }
}
