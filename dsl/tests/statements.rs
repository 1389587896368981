//! Statements on the stream: both spellings, and every mistake at its word.

use dreamc_dsl::{Diagnostics, Spec, Spelling, check, format, parse};

const DREAM: &str = "model m {
  vocab 7
  hidden 4
  context 4
  a = mlp { intermediate 4 }
  b = mlp { intermediate 4 }
  norm
  save x0
  layer { a > norm > b > norm }
  // a comment
  linear
  recur 2 {
    mix x0 linear identity
    a | b
    norm g
    save e
  }
  repeat 2 { mix e diagonal, layer { a } }
  norm g
  norm final
  mix x0 scaled
  start normal 0.02
  norm plain
  linear normal
}
";

const YAML: &str = "model:
  name: m
  vocab: 7
  hidden: 4
  context: 4
  components:
    a: {mlp: {intermediate: 4}}
    b: {mlp: {intermediate: 4}}
  body:
    - norm
    - save x0
    - a > norm > b > norm
    - linear identity
    - recur: 2
      layers:
        - mix x0 linear identity
        - a | b
        - norm g
        - save e
    - repeat: 2
      layers: [mix e diagonal, a]
    - norm g
    - norm final
    - mix x0 scaled
    - start normal 0.02
    - norm plain
    - linear normal
";

fn read(text: &str, spelling: Spelling) -> Result<Spec, Diagnostics> {
    let ast = parse("spec", text, spelling)?;
    check(&ast, &[]).map(|(spec, _)| spec)
}

#[test]
fn both_spellings_say_the_same() {
    let spec = read(DREAM, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(spec, read(YAML, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}")));
    let [dream, yaml] = [(DREAM, Spelling::Dream), (YAML, Spelling::Yaml)].map(|(text, spelling)| {
        let ast = parse("spec", text, spelling).unwrap_or_else(|e| panic!("{e}"));
        for to in [Spelling::Dream, Spelling::Yaml] {
            let there = format(&ast, to).unwrap_or_else(|e| panic!("{e}"));
            let back = parse("spec", &there, to).unwrap_or_else(|e| panic!("{there}\n{e}"));
            assert_eq!(check(&back, &[]).unwrap_or_else(|e| panic!("{there}\n{e}")).0, spec);
            assert_eq!(format(&back, to).unwrap_or_else(|e| panic!("{e}")), there);
        }
        format(&ast, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"))
    });
    assert!(dream.contains("repeat 2 { mix e diagonal, layer { a } }"), "{dream}");
    assert!(yaml.contains("\n  norm\n") && yaml.contains("\n  mix x0 scaled\n"), "{yaml}");
}

#[test]
fn every_mistake_is_reported_at_its_word() {
    let cases = [
        ("save 3x", "3x", "cannot name a stream"),
        ("save history", "history", "cannot name a stream"),
        ("save x extra", "extra", "does not belong here"),
        ("norm g-x", "g-x", "cannot name a gain"),
        ("norm g extra", "extra", "does not belong here"),
        ("norm plain g", "g", "does not belong here"),
        ("mix e add", "e", "no stream is saved as `e` before this"),
        ("save e, mix e", "mix e", "does not say how"),
        ("save e, mix e ad", "ad", "is not a way to mix"),
        ("save e, mix e linear ident", "ident", "is not a way to begin"),
        ("save e, mix e add 3", "3", "does not belong here"),
        ("linear randomly", "randomly", "is not a way to begin"),
        ("start zeroes", "zeroes", "is not a way to start"),
        ("start normal", "start normal", "needs a deviation"),
        ("start normal -1", "-1", "a deviation is above 0"),
        ("start normal 0", "0", "a deviation is above 0"),
        ("layer { a | norm }", "norm", "an update and no stream"),
        ("layer { skip(capacity 0.5, causal bce 0.1) { norm } }", "norm", "an update and no stream"),
        ("layer { norm > norm }", "norm > norm", "has no component"),
        ("recur 2 { norm }", "recur", "applies no layer"),
        ("layer { nrom > a }", "nrom", "no component is called"),
    ];
    for (body, token, message) in cases {
        let text = format!(
            "model m {{\n  vocab 7  hidden 4  context 4\n  a = mlp {{ intermediate 4 }}\n  recur 1 {{ {body}, layer {{ a }} }}\n}}\n"
        );
        let found = read(&text, Spelling::Dream).expect_err(&text);
        let found = found.list.iter().find(|d| d.message.contains(message));
        let found = found.unwrap_or_else(|| panic!("`{body}` has no error `{message}`"));
        let span = found.span.unwrap_or_default();
        assert_eq!(&text[span.start..span.end], token, "{body}: {}", found.message);
    }
}

#[test]
fn a_norm_with_a_value_is_the_key_of_the_model() {
    for written in ["norm 1e-5", "norm { eps 1e-5 }", "norm\n    1e-5"] {
        let text = DREAM.replacen("  norm\n", &format!("  {written}\n"), 1);
        let spec = read(&text, Spelling::Dream).unwrap_or_else(|e| panic!("{text}\n{e}"));
        assert_eq!((spec.model.norm.eps, spec.model.body.len()), (1e-5, 11), "{written}");
    }
}

/// A gain of the last norm needs one, and a name that one norm alone has is a slip.
#[test]
fn gains_are_of_norms_that_are_there() {
    let text = |body: &str| {
        format!("model m {{\n  vocab 7  hidden 4  context 4\n  a = mlp {{ intermediate 4 }}\n  {body}\n}}\n")
    };
    let last = text("norm final\n  layer { a }\n  norm");
    let found = read(&last, Spelling::Dream).expect_err(&last);
    assert!(found.list.iter().any(|d| d.message.contains("none has the gain `final`")), "{found}");
    let wired = text("stream lanes 2\n  norm final\n  layer { a }\n  norm");
    assert!(read(&wired, Spelling::Dream).is_ok());
    let lonely = text("norm g\n  layer { a }\n  norm h\n  layer { a }\n  norm h");
    let found = read(&lonely, Spelling::Dream).expect_err(&lonely);
    assert!(found.list.iter().all(|d| d.message == "no other norm has the gain `g`"), "{found}");
    for body in ["repeat 2 { norm g, layer { a } }", "norm final\n  layer { a }"] {
        assert!(read(&text(body), Spelling::Dream).is_ok(), "{body}");
    }
}

#[test]
fn streams_that_nothing_reads_are_warned_of() {
    let text = YAML.replace("    - mix x0 scaled\n", "    - save rest\n");
    let ast = parse("spec", &text, Spelling::Yaml).unwrap();
    let (_, warnings) = check(&ast, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert!(warnings.iter().any(|w| w.message == "nothing reads `rest`"), "{warnings:?}");
}
