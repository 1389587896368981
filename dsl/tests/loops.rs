//! How the passes of a `recur` are run: both spellings, and every mistake at its token.

use dreamc_dsl::spec::{
    DepthLaw, Depths, Exit, Item, Looping, PassKeys, Scorer, SkipGate, SkipRule, depth_choice,
};
use dreamc_dsl::{Diagnostics, Spec, Spelling, check, format, parse};

fn read(text: &str, spelling: Spelling) -> Result<Spec, Diagnostics> {
    let ast = parse("spec", text, spelling)?;
    check(&ast, &[]).map(|(spec, _)| spec)
}

fn dream(body: &str) -> String {
    let s = "s = sequence { heads 1  head_size 4  projection none }\n  t = sequence { heads 1  head_size 4 }";
    format!("model m {{\n  vocab 7  hidden 4  context 4\n  a = mlp {{ intermediate 4 }}\n  {s}\n{body}\n}}\n")
}

fn yaml(body: &str) -> String {
    let s =
        "s: {sequence: {heads: 1, head_size: 4, projection: none}}, t: {sequence: {heads: 1, head_size: 4}}";
    format!(
        "model: {{name: m, vocab: 7, hidden: 4, context: 4, components: {{a: {{mlp: {{intermediate: 4}}}}, {s}}}, body: [{body}]}}\n"
    )
}

#[test]
fn both_spellings_say_the_same() {
    let lognormal = DepthLaw::LognormalPoisson { mean: 4.0, sigma: 0.5 };
    let cases = [
        (
            "recur 8 backprop 2 depth lognormal_poisson 4 0.5 min 2 max 16 { a }",
            "{recur: 8, backprop: 2, depth: {lognormal_poisson: {mean: 4, sigma: 0.5}, min: 2, max: 16}, layers: [a]}",
            Looping {
                backprop: Some(2),
                depth: Some(Depths { law: lognormal, min: 2, max: 16 }),
                ..Looping::default()
            },
        ),
        (
            "recur 3 residual_norm false lora 2 embed { a }",
            "{recur: 3, residual_norm: false, lora: 2, embed: true, layers: [a]}",
            Looping { lora: Some(2), embed: true, ..Looping::default() },
        ),
        (
            "recur 3 embed depth uniform 1 3 exit mean { a }",
            "{recur: 3, embed: true, depth: {uniform: [1, 3]}, exit: mean, layers: [a]}",
            Looping {
                embed: true,
                depth: Some(Depths { law: DepthLaw::Uniform, min: 1, max: 3 }),
                exit: Exit::Mean,
                ..Looping::default()
            },
        ),
        (
            "recur 3 exit gate 0.1 lora 4 { a }\n  norm",
            "{recur: 3, exit: {gate: 0.1}, lora: 4, layers: [a]}, norm",
            Looping { exit: Exit::Gate(0.1), lora: Some(4), ..Looping::default() },
        ),
        (
            "recur 3 exit expected 0.1 embed { a }\n  norm",
            "{recur: 3, exit: {expected: 0.1}, embed: true, layers: [a]}, norm",
            Looping { exit: Exit::Expected(0.1), embed: true, ..Looping::default() },
        ),
        (
            "recur 3 kv replaced { skip(capacity [1, 0.5, 0.5], causal bce 0.1) { s > a } }",
            "{recur: 3, kv: replaced, layers: [\"skip(capacity [1, 0.5, 0.5], causal bce 0.1) { s > a }\"]}",
            Looping { kv: PassKeys::Replaced, ..Looping::default() },
        ),
        (
            "recur 3 kv first lora 2 { s > a }",
            "{recur: 3, kv: first, lora: 2, layers: [s > a]}",
            Looping { kv: PassKeys::First, lora: Some(2), ..Looping::default() },
        ),
        ("recur 3 kv own { s }", "{recur: 3, kv: own, layers: [s]}", Looping::default()),
        ("recur 3 exit last { a }", "{recur: 3, exit: last, layers: [a]}", Looping::default()),
    ];
    for (body, other, expected) in cases {
        let (text, other) = (dream(body), yaml(other));
        let spec = read(&text, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(spec, read(&other, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}")));
        let Some(Item::Recur { looping, .. }) = spec.model.body.first() else { panic!("{body}") };
        assert_eq!(*looping, expected, "{body}");
        for (text, from) in [(text, Spelling::Dream), (other, Spelling::Yaml)] {
            let ast = parse("spec", &text, from).unwrap_or_else(|e| panic!("{e}"));
            for to in [Spelling::Dream, Spelling::Yaml] {
                let there = format(&ast, to).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(read(&there, to).unwrap_or_else(|e| panic!("{there}\n{e}")), spec, "{there}");
                assert!(to == Spelling::Yaml || !body.contains("gate") || there.contains("exit gate 0.1"));
            }
        }
    }
}

#[test]
fn every_mistake_is_reported_at_its_token() {
    let cases = [
        ("recur 2 { recur 2 embed { a } }", "embed", "inside another loop"),
        ("recur 2 { recur 2 lora 2 { a } }", "2", "inside another loop"),
        ("recur 2 { recur 2 exit mean { a } }", "mean", "inside another loop"),
        ("recur 2 lora 0 { a }", "0", "`lora` is too small"),
        ("recur 2 embed depth uniform 1 4 { a }", "uniform 1 4", "weights for 2 passes"),
        ("recur 4 backprop 2 exit mean { a }", "mean", "would reach the head and no layer"),
        ("recur 1 exit mean { a }", "mean", "one way out"),
        ("recur 2 exit expected { a }", "expected", "`expected` is not a value of `exit`"),
        ("recur 3 backprop 1 exit expected 0.1 { a }", "expected 0.1", "would reach the head and no layer"),
        ("recur 2 { recur 2 kv first { s } }", "first", "inside another loop"),
        ("recur 2 { recur 2 kv replaced { s } }", "replaced", "inside another loop"),
        ("recur 2 kv first { a }", "first", "no attention inside makes keys"),
        ("recur 2 kv first { t }", "first", "`t` mixes projections"),
        ("recur 2 kv first { skip(capacity 0.5, causal bce 0.1) { s } }", "first", "have no keys there"),
        ("recur 2 kv last { s }", "last", "`kv`"),
        ("recur 2 kv replaced { s }", "replaced", "none is left to replace"),
        (
            "recur 2 kv replaced { skip(capacity 0.5, causal bce 0.1) { s } }",
            "replaced",
            "no keys there for later",
        ),
        (
            "recur 2 exit gate 0.1 kv replaced { skip(capacity [1, 0.5], causal bce 0.1) { s } }",
            "replaced",
            "have the keys of their last pass",
        ),
        ("layer { skip(capacity 0.5, causal bce 0.1, nested) { a } }", "nested", "this layer stands in none"),
        ("recur 2 { recur 2 { skip(capacity 1, router pass) { a } } }", "pass", "more than one loop"),
        ("repeat 2 { recur 2 { skip(capacity 1, router pass) { a } } }", "pass", "more than one loop"),
        (
            "recur 2 { skip(capacity [1, 0.5, 0.2], causal bce 0.1) { a } }",
            "[1, 0.5",
            "the loop makes 2 passes",
        ),
        ("recur 2 { skip(capacity [1, 1.5], causal bce 0.1) { a } }", "1.5", "out of range"),
        ("recur 2 { skip(capacity [], causal bce 0.1) { a } }", "[]", "has no shares"),
        ("recur 2 { skip(capacity [0.2, 0.5], nested, causal bce 0.1) { a } }", "0.5", "no more tokens than"),
        ("recur 2 { skip(threshold, capacity 0.5, penalty 1, nested) { a } }", "nested", "with `threshold`"),
        (
            "recur 2 { skip(threshold, capacity 0.5, penalty 1, z_loss 1) { a } }",
            "1",
            "does not go with `threshold`",
        ),
        ("recur 2 { skip(capacity 0.5, norm_only, network 4) { a } }", "4", "reads one number"),
        ("recur 2 { skip(capacity 0.5, temperature 0) { a } }", "0", "`temperature` is out of range"),
        ("recur 2 { skip(capacity 0.5, network 0) { a } }", "0", "`network` is too small"),
        (
            "recur 2 { skip(threshold, capacity 0.5, penalty 1, gate sigmoid) { a } }",
            "sigmoid",
            "`gate` does not",
        ),
        (
            "recur 2 { skip(threshold, capacity 0.5, penalty 1, gate_scale 0.5) { a } }",
            "0.5",
            "`gate_scale` does not",
        ),
        (
            "recur 2 { skip(capacity 0.5, causal bce 0.1, whole, merge) { a } }",
            "whole",
            "`merge` shares updates",
        ),
        ("recur 2 { skip(capacity 0.5, causal bce 0.1, gate_scale 0) { a } }", "0", "`gate_scale`"),
        ("recur 2 { skip(threshold, capacity [1, 0.5], penalty 1, pooled) { a } }", "[1", "one target"),
        (
            "recur 2 { skip(capacity 0.5, causal bce 0.1, nested, merge) { a } }",
            "merge",
            "tokens that have left",
        ),
        (
            "recur 2 { skip(capacity 1) { skip(capacity 0.5, causal bce 0.1, nested) { a } } }",
            "nested",
            "in another `skip`",
        ),
        (
            "recur 2 depth uniform 1 3 { skip(capacity 1, router pass) { a } }",
            "uniform 1 3",
            "something for each of 2 passes",
        ),
        (
            "recur 2 kv first { skip(capacity [0.5, 0.2], causal bce 0.1) { s } }",
            "first",
            "have no keys there",
        ),
        ("skip(depth_choice) { a }", "depth_choice", "stands in none"),
        ("recur 1 residual_norm false { skip(depth_choice) { a } }", "depth_choice", "leaves no choice"),
        ("recur 2 { recur 2 { skip(depth_choice) { a } } }", "depth_choice", "more than one loop"),
        ("recur 2 { skip(capacity 1) { skip(depth_choice) { a } } }", "depth_choice", "in another `skip`"),
        ("recur 2 { skip(depth_choice, capacity 0.5) { a } }", "0.5", "`capacity` does not go with"),
        ("recur 2 { skip(depth_choice, nested) { a } }", "nested", "`nested` does not go with"),
        ("recur 2 { skip(depth_choice, balance 0) { a } }", "0", "out of range"),
        ("recur 2 { skip(capacity 1, balance 0.1) { a } }", "0.1", "`balance` does not go with"),
        ("recur 2 { skip(causal bce 0.1) { a } }", "(causal", "`capacity` is missing"),
        ("recur 2 residual_norm true { skip(depth_choice) { a } }", "true", "`residual_norm` normalises"),
        ("recur 2 { skip(depth_choice) { a } }", "recur", "`residual_norm` normalises"),
        (
            "recur 2 residual_norm false embed { skip(depth_choice) { a } }",
            "embed",
            "`embed` adds to tokens that have",
        ),
        (
            "recur 2 residual_norm false exit mean { skip(depth_choice) { a } }",
            "mean",
            "has chosen where it leaves",
        ),
        (
            "recur 2 residual_norm false { layer { skip(depth_choice) { a } } layer { s } }",
            "{",
            "the whole body of its loop",
        ),
        (
            "recur 2 residual_norm false { layer { skip(depth_choice) { a } > s } }",
            "{",
            "the whole body of its loop",
        ),
        ("recur 2 exit mean { a }\n  a", "mean", "every pass goes through what is after"),
        ("recur 2 exit mean { a }\n  linear", "mean", "every pass goes through what is after"),
        ("recur 2 { a }\n  mix history weighted", "mix history weighted", "another one in every pass"),
        ("mix history", "mix history", "does not say how the history is mixed"),
        ("mix history added", "added", "is not a way to mix the history"),
        ("mix history weighted every 0", "0", "is no number of layers"),
        ("mix history weighted each 2", "each", "is not a choice of streams"),
        ("mix history weighted apart", "apart", "needs a number of layers"),
        ("mix history weighted apart 0", "0", "is no number of layers"),
        ("mix history weighted every 2 3", "3", "does not belong here"),
    ];
    for (body, token, message) in cases {
        let text = dream(&format!("  {body}\n  layer {{ a }}"));
        let text = if body.contains("exit") { dream(&format!("  {body}")) } else { text };
        let found = read(&text, Spelling::Dream).expect_err(&text);
        let messages: Vec<&str> = found.list.iter().map(|d| d.message.as_str()).collect();
        let found = found.list.iter().find(|d| d.message.contains(message));
        let found = found.unwrap_or_else(|| panic!("`{body}` has no error `{message}`: {messages:?}"));
        let span = found.span.unwrap_or_default();
        assert!(text[span.start..span.end].starts_with(token), "{body}: {}", &text[span.start..span.end]);
    }
}

#[test]
fn an_exit_of_its_own_has_one_weight() {
    for (exit, message) in [
        ("{}", "an `exit` of its own has a weight of its gate"),
        ("{gate: 0.1, expected: 0.1}", "an `exit` has one of them"),
    ] {
        let text = yaml(&format!("{{recur: 2, exit: {exit}, layers: [a]}}"));
        let found = read(&text, Spelling::Yaml).expect_err(&text);
        assert!(found.list.iter().any(|d| d.message.contains(message)), "{exit}: {found}");
    }
}

#[test]
fn a_skip_says_what_passes_do() {
    let skip = "skip(capacity [1, 2/3, 1/3], causal bce 0.1, router pass, gate sigmoid, gate_scale 0.1, whole, nested, temperature 2, network 8, z_loss 1e-3)";
    let (body, other) = (
        format!("recur 3 kv first {{ {skip} {{ s > a }} }}"),
        format!("{{recur: 3, kv: first, layers: [\"{skip} {{ s > a }}\"]}}"),
    );
    let (text, other) = (dream(&body), yaml(&other));
    let spec = read(&text, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(spec, read(&other, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}")));
    assert_eq!(spec.model.most_passes(), Some(3));
    let Some(Item::Recur { items, .. }) = spec.model.body.first() else { panic!("{body}") };
    let Some(Item::Layer(layer)) = items.first() else { panic!("{body}") };
    let (found, _) = layer.skips()[0];
    assert!(found.each_pass && found.nested && found.gate == SkipGate::Sigmoid);
    assert!(found.gate_scale == 0.1 && found.whole);
    assert_eq!(found.scorer, Scorer { temperature: 2.0, network: Some(8), z_loss: 1e-3 });
    assert_eq!(found.capacities, [1.0, 2.0 / 3.0, 1.0 / 3.0]);
    let SkipRule::TopK { capacity, .. } = found.in_pass(2).rule else { panic!("{body}") };
    assert_eq!(capacity, 1.0 / 3.0);
    for (text, from) in [(text, Spelling::Dream), (other, Spelling::Yaml)] {
        let ast = parse("spec", &text, from).unwrap_or_else(|e| panic!("{e}"));
        for to in [Spelling::Dream, Spelling::Yaml] {
            let there = format(&ast, to).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(read(&there, to).unwrap_or_else(|e| panic!("{there}\n{e}")), spec, "{there}");
        }
    }
    let shown = dreamc_dsl::show(&spec, Spelling::Dream);
    assert_eq!(read(&shown, Spelling::Dream).unwrap_or_else(|e| panic!("{shown}\n{e}")), spec, "{shown}");
}

#[test]
fn tokens_choose_how_many_passes_they_make() {
    let body = "recur 3 residual_norm false { skip(depth_choice, network 4, z_loss 0.1) { s > a } }";
    let other =
        "{recur: 3, residual_norm: false, layers: [\"skip(depth_choice, network 4, z_loss 0.1) { s > a }\"]}";
    let (text, other) = (dream(body), yaml(other));
    let spec = read(&text, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(spec, read(&other, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}")));
    assert_eq!(spec.model.most_passes(), Some(3));
    let Some(Item::Recur { items, .. }) = spec.model.body.first() else { panic!("{body}") };
    assert_eq!(depth_choice(items).map(|(_, rate)| rate), Some(1e-3));
    let Some(Item::Layer(layer)) = items.first() else { panic!("{body}") };
    let (found, _) = layer.skips()[0];
    // Where every number of passes is chosen equally often, passes have these shares of the tokens.
    let shares = [0, 1, 2].map(|pass| found.in_pass(pass).rule.capacity());
    assert_eq!(shares, [1.0, 2.0 / 3.0, 1.0 / 3.0]);
    for (text, from) in [(text, Spelling::Dream), (other, Spelling::Yaml)] {
        let ast = parse("spec", &text, from).unwrap_or_else(|e| panic!("{e}"));
        for to in [Spelling::Dream, Spelling::Yaml] {
            let there = format(&ast, to).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(read(&there, to).unwrap_or_else(|e| panic!("{there}\n{e}")), spec, "{there}");
        }
    }
    let shown = dreamc_dsl::show(&spec, Spelling::Dream);
    assert!(shown.contains("skip(depth_choice, balance 0.001, network 4, z_loss 0.1)"), "{shown}");
    assert_eq!(read(&shown, Spelling::Dream).unwrap_or_else(|e| panic!("{shown}\n{e}")), spec, "{shown}");
}

#[test]
fn a_choice_of_depth_needs_a_stream_that_is_a_sum() {
    for stream in ["lanes: 2", "attend: {block: 2}"] {
        let text = yaml("{recur: 2, residual_norm: false, layers: [\"skip(depth_choice) { a }\"]}");
        let text = text.replacen("body:", &format!("stream: {{{stream}}}, body:"), 1);
        let found = read(&text, Spelling::Yaml).expect_err(&text);
        assert!(found.list.iter().any(|d| d.message.contains("mixes it further")), "{text}");
    }
}

#[test]
fn no_more_passes_are_asked_for_than_have_weights() {
    let text = yaml("{recur: 3, embed: true, layers: [a]}");
    for (more, token) in
        [("train: {random_depth: {min: 1, max: 4}}\n", "4"), ("eval: {depths: [1, 3, 5]}\n", "5")]
    {
        let text = format!("{text}{more}");
        let found = read(&text, Spelling::Yaml).expect_err(&text);
        let found = found.list.iter().find(|d| d.message.contains("weights of their own for 3")).expect(more);
        let span = found.span.unwrap_or_default();
        assert_eq!(&text[span.start..span.end], token, "{more}");
    }
}
