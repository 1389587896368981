//! Properties of every specification, on random ones: the checker accepts them in both spellings,
//! every key of the language is drawn, and they compile. `tests/numerics/verify.rs` proves their
//! results.

use dreamc_compiler::lower::Shape;
use dreamc_compiler::{Options, compile, random};
use dreamc_dsl::keys::{self, Section, Type};
use dreamc_dsl::{Spelling, check, parse, show};
use std::collections::BTreeSet;

const SEEDS: u64 = 160;

fn shape(seed: u64) -> Shape {
    Shape { batch: 1 + seed % 2, sequence: 1 + seed % 4, ..Shape::default() }
}

#[test]
fn random_specifications_are_read_as_they_are_written() {
    for seed in 0..SEEDS {
        let spec = random::spec(seed);
        for spelling in [Spelling::Yaml, Spelling::Dream] {
            let text = show(&spec, spelling);
            let name = if spelling == Spelling::Yaml { "random.yaml" } else { "random.dream" };
            let ast = parse(name, &text, spelling).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
            let (again, _) = check(&ast, &[]).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
            // Line by line, so that a failure shows the difference.
            let lines = |spec: &dreamc_dsl::Spec| {
                format!("{spec:#?}").lines().map(str::to_string).collect::<Vec<_>>()
            };
            let differing = lines(&again).into_iter().zip(lines(&spec)).find(|(a, b)| a != b);
            assert!(again == spec, "seed {seed}: {differing:?}\n{text}");
        }
    }
}

/// The keys of a group and of all groups below it, and the words that their values may be.
fn keys_of(section: &Section, found: &mut BTreeSet<String>) {
    for key in section.keys {
        let name = format!("{}.{}", section.name, key.name);
        if !random::UNDRAWN.contains(&name.as_str()) && found.insert(name.clone()) {
            words_of(&name, &key.kind, found);
        }
    }
}

fn words_of(name: &str, kind: &Type, found: &mut BTreeSet<String>) {
    match kind {
        Type::Word(words) => found.extend(words.iter().map(|(word, _)| format!("{name} {word}"))),
        Type::Optional(inner) => {
            found.insert(format!("{name} none"));
            words_of(name, inner, found);
        }
        Type::List(inner) | Type::Names(inner) => words_of(name, inner, found),
        Type::Either(kinds) => kinds.iter().for_each(|kind| words_of(name, kind, found)),
        Type::Section(section) => keys_of(section, found),
        Type::Component => keys::COMPONENTS.iter().for_each(|kind| keys_of(kind, found)),
        Type::Layers => keys::ITEMS.iter().for_each(|item| keys_of(item, found)),
        Type::Composition => keys_of(&keys::SKIP, found),
        Type::Int { .. } | Type::Real(_) | Type::Bool | Type::Text | Type::Path | Type::Field | Type::Any => {
        }
    }
}

#[test]
fn every_key_and_word_of_the_language_is_drawn() {
    let mut missing = BTreeSet::new();
    keys_of(&keys::SPEC, &mut missing);
    let all = missing.len();
    assert!(all > 150, "{all} keys and words");
    // In a composition nothing is written as `none`: what is left out is.
    missing.retain(|key| key != "skip.causal none");
    let mut seed = 0;
    // Of loops that share keys there is one in some thousand specifications.
    while !missing.is_empty() && seed < 20000 {
        let drawn = random::drawn(seed);
        missing.retain(|key| !drawn.keys.contains(key));
        seed += 1;
    }
    println!("{all} keys and words in {seed} specifications");
    assert!(missing.is_empty(), "not drawn in {seed} specifications: {missing:?}");
}

#[test]
fn random_models_compile() {
    for seed in 0..SEEDS {
        let spec = random::spec(seed);
        let shape = shape(seed);
        for segments in [false, true] {
            let options = Options {
                batch: shape.batch,
                sequence: shape.sequence,
                train: true,
                logits: seed % 2 == 0,
                segments,
                ..Options::default()
            };
            compile(&spec, &options).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{:#?}", spec.model));
        }
    }
}
