//! Diagnostics of broken files.

mod common;

use dreamc_dsl::spec::{Parallel, Shard};
use dreamc_dsl::{Ast, Diagnostics, Spelling, check, load, parse, parse_file};

fn file(name: &str) -> Ast {
    let path = format!("{}/tests/files/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap();
    parse(name, &text, Spelling::of(name)).unwrap_or_else(|diagnostics| panic!("{diagnostics}"))
}

fn errors(ast: &Ast) -> Diagnostics {
    check(ast, &[]).expect_err("the file is broken")
}

fn errors_of(text: &str) -> String {
    match parse("spec.yaml", text, Spelling::Yaml).and_then(|ast| check(&ast, &[])) {
        Ok((spec, warnings)) => warnings.iter().map(|warning| warning.render(&spec.sources, false)).collect(),
        Err(diagnostics) => diagnostics.to_string(),
    }
}

#[test]
fn every_error_of_a_yaml_file_at_once() {
    insta::assert_snapshot!(errors(&file("broken.yaml")).to_string());
}

#[test]
fn every_error_of_a_dream_file_at_once() {
    insta::assert_snapshot!(errors(&file("broken.dream")).to_string());
}

#[test]
fn every_slip_of_syntax_at_once() {
    insta::assert_snapshot!(errors(&file("slips.dream")).to_string());
}

#[test]
fn both_spellings_report_the_same_errors_at_the_same_tokens() {
    let list = |diagnostics: Diagnostics| {
        let token =
            |span| diagnostics.source.slice(span).trim_matches(['"', '[', ']', '{', '}', ' ']).to_string();
        let line = |d: &dreamc_dsl::Diagnostic| (d.code, d.message.clone(), d.span.map(token));
        diagnostics.list.iter().map(line).collect::<Vec<_>>()
    };
    let yaml = list(errors(&file("broken.yaml")));
    let dream = list(errors(&file("broken.dream")));
    assert!(yaml.len() > 35);
    assert_eq!(yaml, dream);
}

#[test]
fn json_names_file_line_and_column() {
    let json = errors(&file("broken.yaml")).to_json();
    let first = &json[0];
    assert_eq!(first["code"], "unknown-name");
    assert_eq!(first["at"]["file"], "broken.yaml");
    assert_eq!((&first["at"]["line"], &first["at"]["column"]), (&2.into(), &27.into()));
}

const MODEL: &str = "model:\n  vocab: 256\n  hidden: 64\n  context: 64\n  components:\n    sa: {sequence: {heads: 4}}\n    ea: {experts: {count: 8, active: 2, intermediate: 32}}\n    mlp: {mlp: {intermediate: 64}}\n";

#[test]
fn layers_are_located_inside_strings() {
    // Quoted with an escape, folded over lines, in a block scalar, and in single quotes.
    let bodies = [
        ("  body: [\"sa\\t> mpl > ea\"]\n", 9),
        ("  body:\n    - sa\n      > mpl\n      > ea\n", 11),
        ("  body:\n    - >-\n      sa\n      > mpl > ea\n", 12),
        ("  body: ['sa > mpl > ea']\n", 9),
    ];
    for (body, line) in bodies {
        let text = format!("{MODEL}{body}");
        let diagnostics =
            parse("spec.yaml", &text, Spelling::Yaml).and_then(|ast| check(&ast, &[])).unwrap_err();
        let error = diagnostics.list.iter().find(|d| d.code == "unknown-component").unwrap();
        assert_eq!(diagnostics.source.place(error.span.unwrap()).line, line, "{diagnostics}");
        assert_eq!(diagnostics.source.slice(error.span.unwrap()), "mpl", "{diagnostics}");
    }
}

#[test]
fn streams_that_mean_nothing() {
    let body = "  body: [\"sa > mlp > ea\"]\n";
    let attended = "  body: [\"sa | (mlp > ea)\", save e, \"sa > norm\", {recur: 2, residual_norm: true, layers: [\"sa > mlp\"]}]\n";
    let texts = [
        ("lanes", body),
        ("{}", body),
        ("{lane: 3}", body),
        ("{lanes: 17}", body),
        ("{lanes: 2, attend: {}}", body),
        ("{attend: {block: 0}, kind: mhc}", body),
        ("{lanes: 2, kind: dinamic}", body),
        ("{attend: {}, embed: true}", body),
        ("attend", attended),
    ];
    let found = texts.map(|(stream, body)| errors_of(&format!("{MODEL}{body}  stream: {stream}\n")));
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn positions_count_characters_not_bytes() {
    let text = format!(
        "# Grüße, 世界\n{MODEL}  body: [\"sa > mlp > ea\"]\ndata: {{text: \"Übung 日本.txt\", tokeniser: bytes}}\n"
    );
    insta::assert_snapshot!(errors_of(&text), @r#"
    error[unknown-key]: `tokeniser` is not a key of data
      --> spec.yaml:11:30
    11 | data: {text: "Übung 日本.txt", tokeniser: bytes}
       |                                ^^^^^^^^^
       = help: did you mean `tokenizer`?

    spec.yaml: 1 error
    "#);
}

#[test]
fn syntax_errors_of_yaml_have_a_place() {
    insta::assert_snapshot!(errors_of("model:\n  vocab: [1, 2\n  hidden: 3\n"));
    insta::assert_snapshot!(errors_of("model: {vocab: 1}\n---\nmodel: {vocab: 2}\n"));
    insta::assert_snapshot!(errors_of("model: !!set {vocab: 1}\n"));
    insta::assert_snapshot!(errors_of("[1, 2]\n"));
    insta::assert_snapshot!(errors_of(""));
}

#[test]
fn overrides_are_blamed_at_the_command_line() {
    let path = format!("{}/../examples/dr-da-16.yaml", env!("CARGO_MANIFEST_DIR"));
    let arguments = [
        "ea.count=0",
        "depth=deep",
        "sa.rope.half_reversed=true",
        "ea.quer=3",
        "hiden=3",
        "train.steps",
        "hidden=12x",
    ];
    let arguments: Vec<String> = arguments.iter().map(|text| text.to_string()).collect();
    let error = load(&path, &arguments).unwrap_err();
    let rendered: String =
        error.list.iter().map(|d| d.render(&error.source, false)).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(rendered);
}

#[test]
fn overrides_change_what_they_name() {
    let path = format!("{}/../examples/dr-da-16.yaml", env!("CARGO_MANIFEST_DIR"));
    let arguments = [
        "ea.count=2 * 512",
        "depth=8",
        "train.steps=10",
        "train.warmup=10%",
        "sa.rope.base=500",
        "da.rope=none",
        "ea.router.query=64",
        "model.body[0].residual_norm=false",
        "hidden=2048",
        "model.ea.balance={rate: 2e-3, law: proportional}",
        "train.evaluate.every=5",
        "train.only=[routers]",
        "model.body[0].layers[0]=sa > da > ea",
    ];
    let arguments: Vec<String> = arguments.iter().map(|text| text.to_string()).collect();
    let (spec, warnings) = load(&path, &arguments).unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
    assert!(warnings.is_empty(), "{warnings:?}");
    insta::assert_snapshot!(dreamc_dsl::show(&spec, Spelling::Dream));
    let span = spec.sources.locate("model.components.ea.count").unwrap();
    assert_eq!(spec.sources.slice(span), "2 * 512");
    assert_eq!(spec.sources.place(span).name, "--set");
}

#[test]
fn warnings_do_not_stop_the_work() {
    let text = format!("{MODEL}  body: [\"skip(capacity 0.5) {{ sa }} > ea\"]\n");
    insta::assert_snapshot!(errors_of(&text), @r#"
    warning[unused-component]: no layer uses `mlp`
     --> spec.yaml:8:5
    8 |     mlp: {mlp: {intermediate: 64}}
      |     ^^^
      = help: use it in a layer, or take it away
    warning[not-causal]: this model can be trained but not sampled: top-k looks at later tokens
     --> spec.yaml:9:15
    9 |   body: ["skip(capacity 0.5) { sa } > ea"]
      |               ^^^^^^^^^^^^^^
      = help: name an inference rule: `causal bce 0.01`
    "#);
}

#[test]
fn limits_hold() {
    let repeat =
        |count: &str| format!("{MODEL}  body:\n    - repeat: {count}\n      layers: [\"sa > ea > mlp\"]\n");
    assert_eq!(errors_of(&repeat("65536")), "");
    assert!(errors_of(&repeat("65537")).contains("more than 65536 layer applications"));
    assert!(
        errors_of(&repeat("100000000000 * 100000000000 * 100000000000 * 100000000000"))
            .contains("too large to compute")
    );
    assert!(errors_of(&repeat("9999999999999999999999999999999999999999999999")).contains("too large"));
    assert!(errors_of(&repeat("1 / (2 - 2)")).contains("this is zero"));
    let deep = format!("{MODEL}  body: [\"{}sa{}\"]\n", "(".repeat(3000), ")".repeat(3000));
    assert!(errors_of(&deep).contains("nested too deep"));
    let brackets = errors_of(&format!("model: {}{}", "[".repeat(100_000), "]".repeat(100_000)));
    assert!(brackets.contains("error[yaml]") || brackets.contains("nested too deep"), "{}", &brackets[..200]);
    let lists = errors_of(&format!("model: {}1{}", "[".repeat(60), "]".repeat(60)));
    assert!(lists.contains("nested too deep"), "{lists}");
    let dream = format!("model x {}", "{ a ".repeat(50_000));
    let error = parse("x.dream", &dream, Spelling::Dream).unwrap_err().to_string();
    assert!(error.contains("nested too deep"), "{error}");
    let large = format!("# {}\n", "x".repeat(1 << 20));
    assert!(errors_of(&large).contains("larger than 1 MiB"));
    let mut aliases = String::from("a0: &a0 [1, 1]\n");
    for level in 1..40 {
        let below = level - 1;
        aliases += &format!("a{level}: &a{level} [*a{below}, *a{below}, *a{below}, *a{below}]\n");
    }
    assert!(errors_of(&aliases).contains("aliases written out"));
    assert!(errors_of("a: &a [*a]\n").contains("alias"));
    let sum = format!("{MODEL}  body: [\"sa\"]\ntrain: {{steps: {}}}\n", "1 + ".repeat(5000) + "1");
    assert!(errors_of(&sum).contains("too long"));
}

#[test]
fn a_missing_file_says_so() {
    let error = load("no/such/file.yaml", &[]).unwrap_err().to_string();
    assert!(error.starts_with("error[unreadable]: no/such/file.yaml cannot be read"), "{error}");
    let folder = parse_file(env!("CARGO_MANIFEST_DIR")).unwrap_err().to_string();
    assert!(folder.contains("cannot be read"), "{folder}");
}

#[test]
fn memory_is_a_number_with_a_unit() {
    let set = |value: &str| {
        let changes = [format!("train.memory={value}")];
        let root = env!("CARGO_MANIFEST_DIR");
        load(format!("{root}/../examples/quickstart.yaml"), &changes)
    };
    for (written, bytes) in [("8GB", 8_000_000_000), ("1.5GiB", 3 << 29), ("640kB", 640_000), ("none", 0)] {
        assert_eq!(set(written).unwrap().0.train.memory.unwrap_or(0), bytes, "{written}");
    }
    for written in ["8", "GB", "8gb", "0GB", "-1GB", "1e3GB", "99999999TB"] {
        let error = set(written).unwrap_err().to_string();
        assert!(error.contains("7.5GiB") || error.contains("expected"), "{written}: {error}");
    }
}

#[test]
fn rules_of_transfer_go_with_their_optimizers() {
    let text = "model: {vocab: 7, hidden: 4, context: 4, components: {a: {mlp: {intermediate: 1}}}, body: [\"a\"]}\n";
    let ast = parse("m.yaml", text, Spelling::Yaml).unwrap();
    let set = |list: &[&str]| check(&ast, &list.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let mup = "train.transfer={rule: mup, width: 8, depth: 2}";
    let hyperp = "train.transfer={rule: hyperp, width: 8, depth: 2, tokens: 100}";
    let train = set(&[mup]).unwrap().0.train;
    assert_eq!(train.transfer.map(|t| (t.width, t.depth, t.tokens)), Some((8, 2, None)));
    assert!(set(&[hyperp, "train.optimizer=muonh"]).is_ok());
    let sized = set(&["train.transfer={rule: spectral, width: 3, depth: 2, sizes: {a.intermediate: 2}}"]);
    assert_eq!(sized.unwrap().0.train.transfer.unwrap().sizes["a.intermediate"], 2);
    // A head that is the embedding has its multiplier on logits; one that is written stays.
    let tied = |more: &[&str]| set(&[&[mup, "model.tie=true"], more].concat()).unwrap().0.model.logit_scale;
    assert_eq!((tied(&[]), tied(&["model.logit_scale=3"])), (Some(2.0), Some(3.0)));
    for (line, part) in [
        (vec![hyperp], "matrices of a fixed norm"),
        (vec![mup, "train.optimizer=muonh"], "`mup` has no rule for `muonh`, by which the matrices of `a`"),
        (
            vec!["train.transfer={rule: completep, width: 8, depth: 2}", "train.optimizer=muonh"],
            "no rule for `muonh`",
        ),
        (vec!["train.transfer={rule: mup, width: 3, depth: 2}"], "no whole number in proportion at 3"),
        (vec!["train.transfer={rule: mup, width: 8, depth: 2, sizes: {a.heads: 2}}"], "no size `a.heads`"),
        (vec!["train.transfer={rule: mup, width: 8, depth: 2, sizes: {a.intermediate: 0}}"], "at least 1"),
        (vec!["train.transfer={rule: mup, width: 8, depth: 2, passes: 2}"], "the body has no `recur`"),
        (vec!["train.transfer={rule: mup, width: 8, depth: 2, tokens: 3}"], "does not go with `mup`"),
        (
            vec!["train.transfer={rule: hyperp, width: 8, depth: 2}", "train.optimizer=muonh"],
            "`tokens` is missing",
        ),
        (vec!["train.transfer={rule: mup, width: 8}"], "`depth` is missing"),
    ] {
        let error = set(&line).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// A mean that keeps 0.999 of itself changes by less than half of the last bit of bf16.
#[test]
fn moments_that_stand_still_are_refused() {
    let path = format!("{}/../examples/tiny-dr.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let ast = parse("tiny-dr.yaml", &text, Spelling::Yaml).unwrap();
    let set = |list: &[&str]| check(&ast, &list.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let error = set(&["train.moments=bf16", "train.betas=[0.9, 0.999]"]).unwrap_err().to_string();
    assert!(error.contains("a mean that keeps 0.999 of itself stands still in bf16"), "{error}");
    assert!(error.contains("write `betas: [0.9, 0.95]`"), "{error}");
    assert!(set(&["train.moments=bf16", "train.betas=[0.9, 0.95]"]).is_ok());
    assert!(set(&["train.moments=f32", "train.betas=[0.9, 0.999]"]).is_ok());
}

#[test]
fn ranks_that_cannot_share_a_step_are_refused() {
    let path = format!("{}/../examples/tiny-dr.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let ast = parse("tiny-dr.yaml", &text, Spelling::Yaml).unwrap();
    let set = |list: &[&str]| check(&ast, &list.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let parts = ["train.batch=8", "train.accumulate=4"];
    let error = set(&[&parts[..], &["train.parallel.data=3"]].concat()).unwrap_err().to_string();
    assert!(error.contains("3 ranks cannot share 4 micro-batches equally"), "{error}");
    let error = set(&[&parts[..], &["train.parallel.shard=gradients"]].concat()).unwrap_err().to_string();
    assert!(error.contains("optimizer"), "{error}");
    let whole = set(&parts).unwrap().0;
    let (cut, _) = set(&[&parts[..], &["train.parallel={data: 4, shard: optimizer}"]].concat()).unwrap();
    assert_eq!((cut.train.parallel.data, cut.train.parallel.shard), (Some(4), Shard::Optimizer));
    // Specifications from before this key keep their text.
    let shown = |spec| dreamc_dsl::show(spec, Spelling::Yaml);
    assert!(!shown(&whole).contains("parallel") && shown(&cut).contains("shard: optimizer"));
    // Teams fill all ranks, and the ranks of a team own the same number of experts each.
    let of = |parallel: &str| set(&[&parts[..], &[&format!("train.parallel={parallel}")]].concat());
    let error = of("{data: 4, experts: 3}").unwrap_err().to_string();
    assert!(error.contains("teams of 3 ranks do not fill 4 ranks"), "{error}");
    let (shared, _) = of("{data: 4, experts: 2}").unwrap();
    assert_eq!(shared.train.parallel.experts, 2);
    assert!(shown(&shared).contains("experts: 2") && !shown(&cut).contains("experts: 1"));
    let error = of("{experts: 16}").unwrap_err().to_string();
    assert!(error.contains("16 ranks cannot own the 8 experts of `ea` equally"), "{error}");
    for (spelling, spec) in [(Spelling::Yaml, &cut), (Spelling::Dream, &cut), (Spelling::Dream, &shared)] {
        let text = dreamc_dsl::show(spec, spelling);
        let again = parse("spec", &text, spelling).and_then(|ast| check(&ast, &[])).unwrap().0;
        assert_eq!(again.train, spec.train);
    }
}

/// A mesh says in a line what `parallel` says key by key; what must divide what is checked at the
/// token that is wrong.
#[test]
fn a_mesh_of_ranks_is_read_and_checked() {
    let path = format!("{}/../examples/tiny-dr.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let (mut spec, _) =
        parse("tiny-dr.yaml", &text, Spelling::Yaml).and_then(|ast| check(&ast, &[])).unwrap();
    (spec.train.batch, spec.train.accumulate) = (16, 8);
    let (yaml, dream) = (Spelling::Yaml, Spelling::Dream);
    // The specification with a line in its recipe, or the first error: the text it is about, its
    // words.
    let read = |spelling: Spelling, line: &str| {
        let text = dreamc_dsl::show(&spec, spelling);
        let text = match spelling {
            Spelling::Yaml => text.replacen("train:\n", &format!("train:\n  {line}\n"), 1),
            Spelling::Dream => text.replacen("train {", &format!("train {{ {line}\n"), 1),
        };
        let read = parse("spec", &text, spelling).and_then(|ast| check(&ast, &[]));
        read.map(|(spec, _)| spec.train.parallel).map_err(|errors| {
            let token = errors.list[0].span.map(|span| errors.source.slice(span).to_string());
            (token.unwrap_or_default(), errors.list[0].message.clone())
        })
    };
    for (spelling, line, data, shard, experts) in [
        (dream, "ranks { shard 8  experts 4 }", Some(8), Shard::Weights, 4),
        (yaml, "ranks: {shard: 8, experts: 4}", Some(8), Shard::Weights, 4),
        (dream, "ranks { states 4 }", Some(4), Shard::Optimizer, 1),
        (dream, "ranks { data 2  experts 2 }", Some(2), Shard::None, 2),
        (yaml, "ranks: {experts: 2}", None, Shard::None, 2),
    ] {
        assert_eq!(read(spelling, line), Ok(Parallel { data, shard, experts }), "{line}");
    }
    for (line, token, words) in [
        ("ranks { shard 3 }", "3", "3 ranks cannot share 8 micro-batches equally"),
        ("ranks { shard 8  experts 3 }", "3", "teams of 3 ranks do not fill 8 ranks"),
        ("ranks { experts 16 }", "16", "16 ranks cannot own the 8 experts of `ea` equally"),
        ("ranks { data 2  shard 8 }", "8", "`data` and `shard` both count all ranks"),
        ("ranks { shard weights }", "weights", "`shard`"),
        ("ranks { pipeline 2 }", "pipeline", "`pipeline`"),
    ] {
        let (found, message) = read(dream, line).unwrap_err();
        assert!(found == token && message.contains(words), "{line}: `{found}`: {message}");
    }
    let (_, message) = read(dream, "ranks { shard 8 }  parallel { data 8 }").unwrap_err();
    assert!(message.contains("`parallel` says how ranks share the training, too"), "{message}");
}

#[test]
fn later_stages_point_at_fields() {
    let path = format!("{}/../examples/tiny-dr.yaml", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let (spec, _) = parse("tiny-dr.yaml", &text, Spelling::Yaml).and_then(|ast| check(&ast, &[])).unwrap();
    let error = dreamc_dsl::Diagnostic::error("no-loss", "no loss reaches this router")
        .at(&spec.sources, "model.components.ea.router.select")
        .help("add a balancing loss");
    insta::assert_snapshot!(error.render(&spec.sources, false));
}

/// The depth stream has keys of one kind, readers, and all tokens.
#[test]
fn what_the_depth_stream_refuses() {
    let with = |a: &str, more: &str, body: &str| {
        errors_of(&format!(
            "model:\n  vocab: 256\n  hidden: 64\n  context: 64\n  components:\n    a: {{sequence: {{heads: 4, {a}}}}}\n    {more}\n  body: [{body}]\n"
        ))
    };
    let mlp = "m: {mlp: {intermediate: 8, depth_stream: true}}";
    let refused = [
        (with("qk_norm: none", mlp, "a > m"), "no attention reads what `m` leaves in the depth stream"),
        (
            with("depth_stream: keys", "b: {sequence: {heads: 2, depth_stream: own}}", "a > b"),
            "the depth stream has 4 key heads of size 16 (`a`), and `b` has 2 of size 32",
        ),
        (
            with(
                "depth_stream: keys",
                "b: {sequence: {heads: 4, depth_stream: keys, qk_norm: none}}",
                "a > b",
            ),
            "keys of the depth stream are normed as those of `a`, and `b` has another `qk_norm`",
        ),
        (
            with("depth_stream: keys, qk_norm: rms_all", mlp, "a > m"),
            "keys of the depth stream are normed head by head, not as one vector",
        ),
        (
            with("depth_stream: keys, depth_keys: true", mlp, "a > m"),
            "`depth_stream` holds keys of earlier applications, as `depth_keys` does",
        ),
        (
            with("depth_stream: keys, softcap: 20", mlp, "a > m"),
            "`depth_stream` and `softcap` are not computed in one softmax",
        ),
        (
            with("depth_stream: keys", "b: {sequence: {heads: 4, kv_from: a, depth_stream: keys}}", "a > b"),
            "it makes no keys to leave: it reads those of `a`",
        ),
        (
            with("depth_stream: keys", mlp, "a, \"skip(capacity 0.5, causal bce 0.1) { m }\""),
            "`m` stands in a `skip`, whose tokens have depth streams of other lengths",
        ),
        (
            with("depth_stream: keys, projection: none", mlp, "{recur: 3, kv: first, layers: [a > m]}"),
            "`a` leaves keys of each pass (`depth_stream`)",
        ),
    ];
    for (found, message) in refused {
        assert!(found.contains(message), "{message}\n{found}");
    }
}

/// Keys and values that others read are made before, by all tokens.
#[test]
fn keys_are_read_where_they_were_made() {
    let with = |body: &str| {
        errors_of(&format!(
            "model:\n  vocab: 256\n  hidden: 64\n  context: 64\n  components:\n    a: {{sequence: {{heads: 4, value_residual: true, depth_keys: true}}}}\n    \
             b: {{sequence: {{heads: 4, kv_from: a}}}}\n    c: {{sequence: {{heads: 2, kv_from: a, depth_keys: true}}}}\n{body}"
        ))
    };
    let early = with("  body: [\"b > a > c\"]\n");
    assert!(early.contains("`b` is applied where `a` was not, whose keys it reads"), "{early}");
    assert!(early.contains("`a` has 4 key heads of size 16, and `c` reads 2 of size 32"), "{early}");
    assert!(early.contains("it makes no keys to see again: it reads those of `a`"), "{early}");
    let skipped = with("  body: [\"a\", \"skip(capacity 0.5, causal bce 0.1) { b > a }\"]\n");
    assert!(skipped.contains("`b` stands in a `skip`, where tokens have no keys of others"), "{skipped}");
    assert!(skipped.contains("`a` stands in a `skip`, whose tokens differ in their first"), "{skipped}");
    assert!(skipped.contains("`a` stands in a `skip`, whose tokens differ in what they were"), "{skipped}");
}
