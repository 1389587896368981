//! Every example reads, checks clean, is quick to check, and survives every way of writing it.

mod common;

use std::time::{Duration, Instant};

use dreamc_dsl::spec::{Component, Expr, Item, Known, Model, QkNorm};
use dreamc_dsl::{
    Ast, Diagnostics, FileKind, Spec, Spelling, check, check_suite, format, load, parse, parse_file, show,
};

fn examples() -> Vec<(String, Ast)> {
    let folders = ["../examples", "../examples/published", "../examples/zoo"];
    let paths: Vec<_> = folders.into_iter().flat_map(common::files).collect();
    let read =
        |path: &std::path::PathBuf| parse_file(path).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
    paths.iter().map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), read(path))).collect()
}

/// The meaning of a file, as text that two spellings can be compared by.
fn meaning(ast: &Ast) -> Result<(String, usize), Diagnostics> {
    Ok(match ast.kind {
        FileKind::Spec => check(ast, &[]).map(|(spec, warnings)| (format!("{spec:#?}"), warnings.len()))?,
        FileKind::Suite => {
            check_suite(ast, &[]).map(|(suite, warnings)| (format!("{suite:#?}"), warnings.len()))?
        }
    })
    .map(|(text, warnings)| {
        // The place of a definition in its file does not change its meaning.
        let place = |line: &&str| ["start: ", "end: "].iter().any(|of| line.trim_start().starts_with(of));
        let text = text.split("sources: SourceMap").next().unwrap();
        (text.lines().filter(|line| !place(line)).collect(), warnings)
    })
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

/// Parameters by hand, for models of `repeat n { a > b }` without depth recurrence.
fn parameters(spec: &Spec) -> u64 {
    let Model { vocab, hidden, tie, components, body, .. } = &spec.model;
    let of = |component: &Component| match component.known() {
        Known::Attention(a) => {
            let (q, kv) = (a.heads * a.head_size, a.kv_heads * a.head_size);
            let norms = match a.qk_norm {
                QkNorm::None => 0,
                QkNorm::Rms => 2 * a.head_size,
                QkNorm::RmsAll => q + kv,
            };
            (q + 2 * kv) * hidden
                + q * hidden
                + norms
                + hidden * (u64::from(a.pre_norm) + u64::from(a.post_norm))
        }
        Known::Mlp(mlp) => {
            let matrices = 2 + u64::from(mlp.activation.gated());
            matrices * mlp.intermediate * hidden
                + hidden * (u64::from(mlp.pre_norm) + u64::from(mlp.post_norm))
        }
        // A linear router has a row for each expert.
        Known::Own => panic!("a kind of its own"),
        Known::Experts(e) => e.count * (3 * e.intermediate * hidden + hidden) + hidden,
    };
    let [Item::Repeat { count, items }] = body.as_slice() else { panic!("one `repeat`") };
    let layers: u64 = items
        .iter()
        .map(|item| match item {
            Item::Layer(Expr::Sequential(terms)) => terms
                .iter()
                .map(|term| match term {
                    Expr::Component(name) => of(&components[name]),
                    _ => panic!("a component"),
                })
                .sum::<u64>(),
            _ => panic!("a layer"),
        })
        .sum();
    (if *tie { 1 } else { 2 }) * vocab * hidden + count * layers + hidden
}

#[test]
fn published_models_have_their_published_sizes() {
    // Llama:   128256·2048 + 16·(48·64·2048 + 2048² + 3·8192·2048 + 2·2048) + 2048
    // Mixtral: 2·32000·4096 + 32·(48·128·4096 + 4096² + 8·3·14336·4096 + 8·4096 + 2·4096) + 4096
    // OLMoE:   2·50304·2048 + 16·(4·2048² + 2·2048 + 64·3·1024·2048 + 64·2048 + 2·2048) + 2048
    // Gemma 2: 256000·2304 + 26·(16·256·2304 + 2048·2304 + 3·9216·2304 + 4·2304) + 2304
    let published = [
        ("published/llama-3.2-1b.yaml", 1_235_814_400),
        ("published/mixtral-8x7b.yaml", 46_702_792_704),
        ("published/olmoe-1b-7b.yaml", 6_919_161_856),
        ("published/gemma-2-2b.yaml", 2_614_341_888),
    ];
    for (name, total) in published {
        let path = format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"));
        let (spec, _) = load(path, &[]).unwrap();
        assert_eq!(parameters(&spec), total, "{name}");
    }
}

#[test]
fn an_example_in_both_spellings_is_one() {
    let mut pairs = 0;
    let twin = |path: &&std::path::PathBuf| {
        path.extension().is_some_and(|e| e == "dream") && path.with_extension("yaml").exists()
    };
    for path in common::files("../examples").iter().filter(twin) {
        let (dream, _) = load(path, &[]).unwrap();
        let (yaml, _) = load(path.with_extension("yaml"), &[]).unwrap();
        assert_eq!(dream, yaml, "{}", path.display());
        pairs += 1;
    }
    assert!(pairs >= 2);
}
