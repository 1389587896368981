//! `.dream` takes what YAML takes, one mistake is one error, and words of other programs are known.

use dreamc_dsl::{Diagnostics, Spec, Spelling, check, check_suite, format, parse, sketch};

const DREAM: &str = "\
model tiny {
  vocab 256
  hidden 64
  context 32
  tie
  sa = sequence { heads 4  post_norm }
  mlp = mlp { intermediate 128 }

  sa > mlp
  mlp
  (sa | mlp)
  skip(capacity 0.5, causal bce 0.01) { sa > mlp }
  repeat 2 {
    sa > mlp
    mlp
  }
}
train { steps 10 }
";

const YAML: &str = "\
model:
  name: tiny
  vocab: 256
  hidden: 64
  context: 32
  tie:
  components:
    sa: {sequence: {heads: 4, post_norm: true}}
    mlp: {mlp: {intermediate: 128}}
  body:
    - sa > mlp
    - mlp
    - (sa | mlp)
    - 'skip(capacity 0.5, causal bce 0.01) { sa > mlp }'
    - repeat: 2
      layers: [sa > mlp, mlp]
train: {steps: 10}
";

fn read(text: &str, spelling: Spelling) -> Result<Spec, Diagnostics> {
    check(&parse("t", text, spelling)?, &[]).map(|(spec, _)| spec)
}

/// Codes and help of the errors, warnings left out.
fn errors(text: &str, spelling: Spelling) -> Vec<(String, String)> {
    let found = read(text, spelling).unwrap_err();
    let all = found.list.iter().filter(|d| d.severity == dreamc_dsl::Severity::Error);
    all.map(|d| (d.message.clone(), d.help.clone().unwrap_or_default())).collect()
}

#[test]
fn bare_compositions_and_flags_are_read_as_in_yaml() {
    let (dream, yaml) = (read(DREAM, Spelling::Dream).unwrap(), read(YAML, Spelling::Yaml).unwrap());
    assert_eq!(dream, yaml);
    // Through the formatter and the other spelling nothing changes.
    let ast = parse("t", DREAM, Spelling::Dream).unwrap();
    for spelling in [Spelling::Dream, Spelling::Yaml] {
        let text = format(&ast, spelling).unwrap();
        assert_eq!(read(&text, spelling).unwrap_or_else(|d| panic!("{text}\n{d}")), dream, "{text}");
    }
    let one_line = "model t { vocab 256 hidden 64 tie context 32 sa = sequence { heads 4 } sa | sa }";
    let found = errors(one_line, Spelling::Dream);
    assert!(found.iter().all(|(message, _)| !message.contains("tie")), "{found:?}");
}

#[test]
fn line_ends_of_windows_mean_the_same() {
    let windows = |text: &str| text.replace('\n', "\r\n");
    assert_eq!(read(&windows(DREAM), Spelling::Dream).unwrap(), read(DREAM, Spelling::Dream).unwrap());
    assert_eq!(read(&windows(YAML), Spelling::Yaml).unwrap(), read(DREAM, Spelling::Dream).unwrap());
    let commented = windows(&DREAM.replace("  tie\n", "  tie  // shared\n  // a remark\n"));
    assert_eq!(read(&commented, Spelling::Dream).unwrap(), read(DREAM, Spelling::Dream).unwrap());
    let ast = parse("t", &commented, Spelling::Dream).unwrap();
    assert!(!format(&ast, Spelling::Dream).unwrap().contains('\r'));
}

#[test]
fn one_mistake_is_one_error_with_the_answer() {
    let wrong = |from: &str, to: &str| errors(&DREAM.replace(from, to), Spelling::Dream);
    let one = |found: Vec<(String, String)>, message: &str, help: &str| {
        assert!(found.len() == 1 && found[0].0.contains(message) && found[0].1.contains(help), "{found:?}");
    };
    one(wrong("hidden 64", "hiden 64"), "hiden", "`hidden`");
    one(wrong("hidden 64", "d_model 64"), "d_model", "`hidden`");
    one(wrong("repeat 2 {", "recurr 2 {"), "recurr", "`recur`");
    let braced = "recur { passes 2  residual_norm false } {";
    one(
        wrong("repeat 2 {", braced),
        "settings of `recur` stand in braces",
        "before the braces: `recur 3 residual",
    );
    one(wrong("repeat 2 {", "repeat { 2 } {"), "settings of `repeat` stand", "`repeat 3 { sa > mlp }`");
    one(wrong("steps 10", "steps 10 lr 1e-3"), "lr", "`learning_rate`");
    one(wrong("steps 10", "steps 10 optimizer adam"), "adam", "`adamw`");
    one(wrong("steps 10", "steps 10 adam_beta1 0.9"), "adam_beta1", "`betas`");
    let misplaced = "steps 10 optimizer { kind lion momentum 0.9 }";
    one(wrong("steps 10", misplaced), "`momentum` does not go with `lion`", "take it away");
    one(wrong("tie\n", "n_layers 12\n"), "n_layers", "repeat 12 { sa > mlp }");
    one(wrong("(sa | mlp)", "(sa | moe)"), "moe", "next to the others");
    let only = "model t { vocab 256 hidden 64 context 32 sa = sequence { heads 4 } recurr 4 { sa } }";
    one(errors(only, Spelling::Dream), "recurr", "`recur`");
}

#[test]
fn names_stay_in_their_folder() {
    for name in ["..", "../x", "/tmp/x", ".hidden", "-x", "a/b"] {
        let suite = format!("name: s\nbaseline: a.yaml\nvariants: [{{name: '{name}', spec: b.yaml}}]\n");
        let ast = parse("s", &suite, Spelling::Yaml).unwrap();
        let found = check_suite(&ast, &[]).unwrap_err();
        assert!(found.list[0].message.contains("cannot be the name of a variant"), "{found}");
        // The name itself is underlined.
        assert_eq!(ast.source.slice(found.list[0].span.unwrap()).trim_matches('\''), name);
        let ast = parse("s", &suite.replace("name: s", &format!("name: '{name}'")), Spelling::Yaml).unwrap();
        assert!(check_suite(&ast, &[]).unwrap_err().list.len() == 2);
        let found = errors(&YAML.replace("name: tiny", &format!("name: '{name}'")), Spelling::Yaml);
        assert!(found[0].0.contains("cannot be the name of a model"), "{found:?}");
    }
}

#[test]
fn depths_have_bounds_and_need_a_recur() {
    let recurrent = "model t { vocab 256 hidden 64 context 32 mlp = mlp { intermediate 8 } recur 2 { mlp } }";
    let with = |train: &str| format!("{recurrent}\n{train}\n");
    assert!(read(&with("train { steps 1 random_depth { min 1 max 4 } }"), Spelling::Dream).is_ok());
    let found = errors(&with("train { steps 1 random_depth { min 1 max 1000000000 } }"), Spelling::Dream);
    assert!(found[0].0.contains("layer applications"), "{found:?}");
    // Each depth has a program, so that a compilation of very many never ends.
    let found = errors(&with("train { steps 1 random_depth { min 3 max 65536 } }"), Spelling::Dream);
    assert!(found.len() == 1 && found[0].0.contains("from 3 to 65536 these are 65534"), "{found:?}");
    assert!(read(&with("train { steps 1 random_depth { min 3 max 258 } }"), Spelling::Dream).is_ok());
    for law in ["uniform 1 257", "poisson 4 max 257"] {
        let found = errors(&recurrent.replace("recur 2", &format!("recur 2 depth {law}")), Spelling::Dream);
        assert!(found.len() == 1 && found[0].0.contains("these are 257, and 256 are the most"), "{found:?}");
    }
    let two =
        with("train { steps 1 random_depth { min 1 max 4 } }").replace("recur 2", "recur 3 { mlp } recur 2");
    let found = errors(&two, Spelling::Dream);
    assert!(found.len() == 1 && found[0].0.contains("the one `recur`"), "{found:?}");
}

#[test]
fn balance_follows_the_steps_where_no_preset_is_written() {
    let rate = |experts: &str, train: &str| {
        let text = format!(
            "model t {{ vocab 256 hidden 64 context 32 ea = experts {{ count 4 active 2 intermediate 8 {experts} }} layer {{ ea }} }} {train}"
        );
        let spec = read(&text, Spelling::Dream).unwrap_or_else(|d| panic!("{d}"));
        let dreamc_dsl::spec::Component::Experts(experts) = &spec.model.components["ea"] else { panic!() };
        experts.router.balance.unwrap().rate
    };
    assert_eq!(rate("", ""), 1e-3);
    assert_eq!(rate("", "train { steps 250 }"), 0.02);
    assert_eq!(rate("", "train { steps 1000 }"), 0.005);
    assert_eq!(rate("", "train { steps 100000 }"), 1e-3);
    assert_eq!(rate("balance 3e-3", "train { steps 250 }"), 3e-3);
    assert_eq!(rate("router dreamer", "train { steps 250 }"), 1e-3);
}

#[test]
fn spellings_without_a_name_are_guessed() {
    for (text, spelling) in [(DREAM, Spelling::Dream), (YAML, Spelling::Yaml)] {
        assert_eq!(Spelling::guess(text), spelling);
        assert_eq!(Spelling::guess(&format!("\n  # c\n{text}").replace("  # c", "")), spelling);
    }
    assert_eq!(Spelling::guess("// a remark\nmodel t {"), Spelling::Dream);
    assert_eq!(Spelling::guess("# a remark\nbaseline: a.yaml"), Spelling::Yaml);
    assert_eq!(Spelling::guess("name \"s\"\nbaseline \"a\""), Spelling::Dream);
    assert_eq!(Spelling::guess("{\"model\": {}}"), Spelling::Yaml);
}

#[test]
fn a_sketch_is_short_and_means_the_same() {
    let spec = read(DREAM, Spelling::Dream).unwrap();
    let text = sketch(&spec);
    assert_eq!(read(&text, Spelling::Dream).unwrap().model, spec.model, "{text}");
    assert!(text.lines().count() < 24 && !text.contains("rope") && !text.contains("eps"), "{text}");
    // Of wrappers inside repeats, too.
    assert!(!text.contains("merge") && !text.contains("into_input"), "{text}");
    insta::assert_snapshot!("sketch", text);
}

/// A value that something else of the suite would take the place of is refused at its token.
#[test]
fn what_a_suite_says_twice_is_refused() {
    let suite = |variant: &str, rest: &str| {
        let text = format!("name: s\nbaseline: a.yaml\nvariants:\n  - {variant}\n{rest}\n");
        let found = check_suite(&parse("s", &text, Spelling::Yaml).unwrap(), &[]).err();
        found.map(|f| {
            f.list.into_iter().map(|d| (d.span.is_some_and(|s| s.start > 0), d.message)).collect::<Vec<_>>()
        })
    };
    let ladder = "train: {steps: 9, schedule: cosine}\nladder: {sizes: {xs: {h: 8}}, budgets: [1e12]}";
    let cases = [
        ("{spec: b.yaml, set: {train.seed: 3}}", "", "seeds"),
        ("{spec: b.yaml, set: {train.steps: 3}}", ladder, "budgets of the ladder"),
        ("{spec: b.yaml, set: {h: 3}}", ladder, "the size `xs`"),
        ("{spec: b.yaml, set: {train.warmup: 3}}", ladder, "the ladder scales `train.warmup`"),
        ("{spec: b.yaml, set: {train.eps: 3}}", "sweep: {train.eps: [1, 2, 3]}", "the sweep gives"),
        ("{spec: b.yaml}", "train: {seed: 3}", "the suite's `seeds`"),
        ("{spec: b.yaml}", &format!("sweep: {{h: [1, 2, 3]}}\n{ladder}"), "sizes of the ladder set `h`"),
    ];
    for (variant, rest, words) in cases {
        let found = suite(variant, rest).unwrap_or_default();
        assert!(found.len() == 1 && found[0].0 && found[0].1.contains(words), "{variant} {rest}: {found:?}");
    }
    assert!(suite("{spec: b.yaml, set: {ea.count: 3}}", ladder).is_none());
    // Matching begins at the value that is set.
    assert!(suite("{spec: b.yaml, set: {ea.count: 3}, match: {flops: ea.count}}", "").is_none());
}
