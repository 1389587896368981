//! Factors of weights by their place in the graph: at the base, for every part of the language, and
//! by hand.

use dreamc_compiler::compiled::Init;
use dreamc_compiler::transfer::{Line, Table, table};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Transfer, TransferRule};
use indexmap::IndexMap;

/// Models of the golden files, which have every part of the language.
fn goldens() -> Vec<(String, Spec)> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens");
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|e| e == "yaml") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            found.push((name, dreamc_dsl::load(&path, &[]).unwrap().0));
        }
    }
    assert!(found.len() > 30, "{}", found.len());
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn deviations(spec: &Spec) -> IndexMap<String, f64> {
    let compiled = compile(spec, &Options { train: true, ..Options::default() }).unwrap();
    let each = compiled.tensors.into_iter().filter_map(|t| match t.init {
        Init::Normal(deviation) => Some((t.name, deviation)),
        _ => None,
    });
    each.collect()
}

fn transfer(rule: TransferRule, spec: &Spec, depth: u64) -> Transfer {
    Transfer { rule, width: spec.model.hidden, depth, passes: None, tokens: None, sizes: IndexMap::new() }
}

fn depth(spec: &Spec) -> u64 {
    dreamc_compiler::architecture::Architecture::new(&spec.model, None).unwrap().depth
}

fn line<'t>(table: &'t Table, weight: &str) -> &'t Line {
    table.lines.iter().find(|line| line.weight == weight).unwrap()
}

/// Every component, wiring, loop, skip and definition of the golden files: each weight has a role,
/// and at the base every factor is 1.
#[test]
fn every_weight_has_a_role_and_no_factor_at_the_base() {
    let (mut seen, mut roles) = (0, std::collections::BTreeSet::new());
    for (name, spec) in goldens() {
        for rule in [TransferRule::Mup, TransferRule::Completep, TransferRule::Spectral] {
            let mut spec = spec.clone();
            spec.train.transfer = Some(transfer(rule, &spec, depth(&spec)));
            let table = table(&spec).unwrap();
            for line in &table.lines {
                assert_ne!(line.role, "unknown", "{name} {line:?}");
                let all = [line.init, line.rate, line.decay, line.eps];
                assert_eq!(all.map(f64::to_bits), [1f64; 4].map(f64::to_bits), "{name} {line:?}");
                roles.insert(line.role);
                seen += 1;
            }
            let mut plain = spec.clone();
            plain.train.transfer = None;
            assert_eq!(deviations(&spec), deviations(&plain), "{name}");
        }
    }
    assert!(seen > 1000, "{seen}");
    for role in ["bias", "fixed", "gain", "hidden", "input", "output", "scale"] {
        assert!(roles.contains(role), "{role}: {roles:?}");
    }
}

/// Twice the width and the layers of models of every kind: roles decide, and components that end
/// nothing are named.
#[test]
fn factors_follow_the_roles_at_twice_the_size() {
    let mut wider = 0;
    for (name, spec) in goldens() {
        let mut wide = spec.clone();
        wide.train.transfer = Some(transfer(TransferRule::Mup, &spec, depth(&spec)));
        wide.model.hidden *= 2;
        for component in wide.model.components.values_mut() {
            component.widths().into_iter().for_each(|(_, size)| *size *= 2);
        }
        // A few have sizes that do not fit twice the width.
        let Ok(table) = table(&wide) else { continue };
        wider += 1;
        for line in &table.lines {
            let of = |role| line.role == role;
            let once = line.fan_in[0] == 2 * line.fan_in[1];
            let number = line.optimizer == Some("adamw");
            assert!(!(of("output") && once && number) || line.rate == 0.5, "{name} {line:?}");
            assert!(!(of("hidden") && once && number) || line.rate == 0.5, "{name} {line:?}");
            assert!(!(of("input") || of("gain") || of("bias")) || line.rate == 1.0, "{name} {line:?}");
        }
        if !wide.model.tie {
            assert_eq!(line(&table, "head.weight").role, "output", "{name}");
        }
        assert_eq!(line(&table, "embed.weight").role, "input", "{name}");
    }
    assert!(wider > 25, "{wider}");
}

/// Depth, passes of a loop, sources, norms after components, tied heads and sizes of heads.
#[test]
fn branches_loops_and_multipliers_have_factors_of_their_own() {
    let read = |text: &str| -> Result<Spec, String> {
        let ast = dreamc_dsl::parse("m.yaml", text, dreamc_dsl::Spelling::Yaml).unwrap();
        dreamc_dsl::check(&ast, &[]).map(|(spec, _)| spec).map_err(|e| e.to_string())
    };
    let model = |keys: &str, body: &str, transfer: &str| {
        format!(
            "model: {{name: m, vocab: 9, hidden: 16, context: 8{keys}, components: {{sa: {{sequence: {{heads: 2, kv_heads: 2, head_size: \
             16}}}}, mlp: {{mlp: {{intermediate: 32}}}}, after: {{mlp: {{intermediate: 8, post_norm: true}}}}}}, body: {body}}}\n\
             train: {{transfer: {transfer}}}\n"
        )
    };
    let layers = "[{repeat: 8, layers: [\"sa > mlp > after\"]}]";
    let found = |text: String| table(&read(&text).unwrap()).unwrap();
    let mup = found(model("", layers, "{rule: mup, width: 16, depth: 2}"));
    assert_eq!(line(&mup, "layers.0.mlp.up.weight").rate, 0.5);
    assert_eq!(line(&mup, "layers.0.mlp.down.weight").rate, 0.25);
    // A norm after it takes the size of the last matrix away: its gain ends the branch.
    assert_eq!(line(&mup, "layers.0.after.down.weight").rate, 0.5);
    let gain = line(&mup, "layers.0.after.post_norm.weight");
    assert_eq!((gain.init, gain.rate), (0.5, 0.25));
    let complete = found(model("", layers, "{rule: completep, width: 8, depth: 2}"));
    let up = line(&complete, "layers.0.mlp.up.weight");
    assert_eq!((up.rate, up.decay, up.eps), (0.5, 2.0, 0.125));
    let down = line(&complete, "layers.0.mlp.down.weight");
    assert_eq!((down.rate, down.eps), (0.125, 0.5));
    // Outputs of a loop are divided by its passes; its weights keep the rate of their layers.
    let looped = found(model(
        "",
        "[{recur: 8, layers: [\"sa > mlp > after\"]}]",
        "{rule: mup, width: 16, depth: 2, passes: 2}",
    ));
    assert_eq!(line(&looped, "layers.0.mlp.up.weight").rate, 1.0);
    assert_eq!(line(&looped, "layers.0.mlp.down.weight").rate, 0.25);
    let averaged = found(model(", stream: {attend: {block: 1}}", layers, "{rule: mup, width: 16, depth: 2}"));
    let down = line(&averaged, "layers.0.mlp.down.weight");
    // Its first values are those of the base; by default they are smaller.
    assert_eq!((down.init, down.rate), (2.0, 0.5));
    assert!(averaged.warnings.is_empty(), "{:?}", averaged.warnings);
    let unknown =
        found(model(", stream: {attend: {block: 1}}", layers, "{rule: completep, width: 16, depth: 2}"));
    assert_eq!(line(&unknown, "layers.0.mlp.down.weight").rate, 1.0);
    assert!(unknown.warnings.iter().any(|w| w.weight == "model.stream"), "{:?}", unknown.warnings);
    // Multipliers are keys of the model, which export and every other program read.
    let heads = model("", layers, "{rule: mup, width: 16, depth: 8, sizes: {sa.head_size: 4}}");
    assert_eq!(read(&heads).unwrap().model.components["sa"].attention().unwrap().scale, Some(2.0 / 16.0));
    let tied = model(", tie: true", layers, "{rule: mup, width: 8, depth: 8}");
    assert_eq!(read(&tied).unwrap().model.logit_scale, Some(0.5));
    for (transfer, part) in [
        ("{rule: mup, width: 16, depth: 8, sizes: {sa.size: 4}}", "the model has no size `sa.size`"),
        (
            "{rule: mup, width: 4, depth: 8, sizes: {sa.heads: 3}}",
            "`sa.kv_heads` is 2 at a hidden size of 16",
        ),
        ("{rule: mup, width: 3, depth: 8}", "no whole number in proportion at 3"),
        ("{rule: mup, width: 8, depth: 8, sizes: {sa.heads: 3, sa.kv_heads: 2}}", "the base breaks a rule"),
        ("{rule: mup, width: 8, depth: 8, passes: 2}", "the body has no `recur`"),
    ] {
        let error = read(&model("", layers, transfer)).unwrap_err();
        assert!(error.contains(part) && error.contains("m.yaml:2"), "{transfer}: {error}");
    }
}

fn spec(text: &str) -> Spec {
    let (name, spelling) = match text.starts_with("model:") {
        true => ("m.yaml", dreamc_dsl::Spelling::Yaml),
        false => ("m.dream", dreamc_dsl::Spelling::Dream),
    };
    let ast = dreamc_dsl::parse(name, text, spelling).unwrap_or_else(|e| panic!("{e}\n{text}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}\n{text}")).0
}

fn defined(define: &str, setting: &str, transfer: &str) -> Spec {
    spec(&format!(
        "define own(heads 2, size 8) {{\n{define}\n}}\nmodel m {{\n  vocab 9\n  hidden 16\n  context 8\n  c = own {{ {setting} }}\n  repeat 4 \
         {{ c }}\n}}\ntrain {{ transfer {{ rule mup  width 16  {transfer} }} }}\n"
    ))
}

/// The end of a component is read off the graph: after a gate, after a norm's gain.
#[test]
fn ends_are_those_of_the_graph() {
    let init = |define: &str, weight: &str| {
        let table = table(&defined(define, "", "depth 1")).unwrap();
        let found = table.lines.iter().find(|l| l.weight == format!("layers.0.c.{weight}"));
        found.unwrap_or_else(|| panic!("{weight}: {:?}", table.lines)).init
    };
    // A gated product that is returned: its matrix, and not its gate's.
    let gated = "a = silu(linear(x, [size]))\ny = linear(a, [hidden])\ng = sigmoid(linear(x, [hidden]))\nreturn g * y";
    assert_eq!(init(gated, "y.weight"), 0.5);
    assert_eq!(init(gated, "g.weight"), 1.0);
    assert_eq!(init(gated, "a.weight"), 1.0);
    // After a norm its gain.
    let normed = "y = linear(silu(linear(x, [size])), [hidden])\nz = rms(y, over hidden, gain)\nreturn z";
    assert_eq!(init(normed, "y.weight"), 1.0);
    let ended = table(&defined(normed, "", "depth 1")).unwrap();
    let ended = ended.lines.iter().filter(|l| l.reason.contains("ends a branch")).collect::<Vec<_>>();
    assert!(ended.len() == 1 && ended[0].role == "gain" && ended[0].init == 0.5, "{ended:?}");
    // Nothing that has the size of the output: a warning names it, at its token.
    let bounded = defined("y = linear(x, [hidden])\nreturn tanh(y)", "", "depth 1");
    let found = dreamc_compiler::transfer::findings(&bounded);
    assert!(
        found.iter().any(|d| d.message.contains("no weight is in proportion to what `c` adds")),
        "{found:?}"
    );
    assert!(found.iter().all(|d| d.span.is_some()), "{found:?}");
}

/// Scales of scores in definitions: `attend` has that of the rule, and a sum of products that a
/// definition scales itself is named.
#[test]
fn definitions_have_the_scale_of_the_rule_or_a_warning() {
    let of = |last: &str| {
        let code = format!(
            "q = linear(x, [heads, size])\nk = linear(x, [heads, size])\nv = linear(x, [heads, size])\n{last}\nreturn linear(y, [hidden])"
        );
        defined(&code, "size 32", "depth 4  sizes { c.size 8 }")
    };
    let carried = of("y = attend(q, k, v)");
    let found = table(&carried).unwrap();
    let scale = found.multipliers.iter().find(|m| m.field == "c.y").unwrap();
    assert!((scale.value[0] - 8f64.sqrt() / 32.0).abs() < 1e-12, "{scale:?}");
    assert!(found.warnings.is_empty(), "{:?}", found.warnings);
    let architecture = dreamc_compiler::architecture::Architecture::new(&carried.model, None).unwrap();
    let lowered =
        dreamc_compiler::lower::lower(&architecture, dreamc_compiler::lower::Shape::default()).unwrap();
    let text = lowered.module.to_string();
    assert!(text.contains("0.0883883"), "{text}");
    let written = dreamc_compiler::transfer::findings(&of("y = attend(q, k, v, scale = 0.25)"));
    assert!(written.iter().any(|d| d.message.contains("it is written as 0.25")), "{written:?}");
    let own = dreamc_compiler::transfer::findings(&of("y = v * dot(q, k, over size) * rsqrt(size)"));
    assert!(own.iter().any(|d| d.message.contains("by a scale that it writes itself")), "{own:?}");
}

/// A base that no number of repeats makes, and the rates of steps in proportion to gradients.
#[test]
fn other_topologies_are_named_and_gradients_have_their_column() {
    let text = |depth: u64, more: &str| {
        format!(
            "model: {{name: m, vocab: 9, hidden: 32, context: 8, components: {{sa: {{sequence: {{heads: 4}}}}, mlp: {{mlp: {{intermediate: \
             64}}}}}}, body: [mlp, {{repeat: 4, layers: [\"sa > mlp\", mlp]}}]}}\ntrain: {{transfer: {{rule: mup, width: 16, depth: {depth}}}{more}}}\n"
        )
    };
    assert!(dreamc_compiler::transfer::findings(&spec(&text(3, ""))).is_empty());
    let found = dreamc_compiler::transfer::findings(&spec(&text(4, "")));
    assert!(found.len() == 1 && found[0].message.contains("another topology"), "{found:?}");
    // Table 3 of 2203.03466: fan out for inputs, 1 for hidden weights, one over the fan in for the
    // head.
    let sgd = table(&spec(&text(9, ", optimizer: {kind: sgd, momentum: 0.9}"))).unwrap();
    assert_eq!(line(&sgd, "embed.weight").rate, 2.0);
    assert_eq!(line(&sgd, "head.weight").rate, 0.5);
    assert_eq!(line(&sgd, "layers.1.mlp.up.weight").rate, 1.0);
    assert_eq!(line(&sgd, "norm.weight").rate, 2.0);
}

/// Definitions of the library with heads of twice the size: norms and quotients take sizes away,
/// and two read numbers that grow.
#[test]
fn sums_of_the_library_are_followed() {
    let named = |component: &str| -> Vec<String> {
        let spec = spec(&format!(
            "model m {{ vocab 9 hidden 64 context 8 c = {component} repeat 2 {{ c }} }}\ntrain {{ transfer {{ rule mup width 32 depth 2 }} }}"
        ));
        let own =
            |w: &dreamc_compiler::transfer::Warning| w.message.contains("by a scale that it writes itself");
        table(&spec).unwrap().warnings.into_iter().filter(own).map(|w| w.weight).collect()
    };
    for component in [
        "alibi { heads 4 }",
        "canon { width 3 }",
        "deltanet { heads 4 }",
        "forgetting { heads 4 }",
        "gated_delta { heads 4 }",
        "gla { heads 4 }",
        "kda { heads 4 }",
        "lightning { heads 4 }",
        "linear_attention { heads 4 }",
        "mamba2 { size 8 state 8 }",
        "retnet { heads 4 }",
        "rwkv7 { size 8 }",
    ] {
        assert_eq!(named(component), [""; 0], "{component}");
    }
    assert_eq!(named("differential { heads 4 }"), ["c.more", "c.less"]);
    assert_eq!(named("mlstm { heads 4 }"), ["c.o"]);
}
