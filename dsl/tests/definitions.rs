//! Definitions: their graphs, and what stands around them.

use dreamc_dsl::define::graph::{Function, Graph, Reduce};
use dreamc_dsl::spec::{Component, Defined};
use dreamc_dsl::{Spec, Spelling, check, format, parse, show, sketch};

/// The example of the page of definitions.
const GATED_DELTA: &str = "define gated_delta(heads 4, size 16, value = 2 * size, width 4) {
  q = l2(silu(conv(linear(x, [heads, size]), width)), over size) * rsqrt(size)
  k = l2(silu(conv(linear(x, [heads, size]), width)), over size)
  v = silu(conv(linear(x, [heads, value]), width))
  a = exp(-exp(weight([heads], log_uniform 1 16)) * softplus(linear(x, [heads]) + weight([heads], zero)))
  b = sigmoid(linear(x, [heads]))
  recurrence S [heads, value, size] {
    S = a * S
    S = S + outer(b * (v - sum(S * k, over size)), k)
    o = sum(S * q, over size)
  }
  return linear(rms(o, over value, gain) * silu(linear(x, [heads, value])), [hidden])
}
";

const MODEL: &str = "
model m {
  vocab 256  hidden 64  context 128
  gdn = gated_delta { heads 4 }
  sa = sequence { heads 4 }
  mlp = mlp { intermediate 128 }
  repeat 2 { layer { gdn > mlp }  layer { gdn > mlp }  layer { gdn > mlp }  layer { sa > mlp } }
}
";

fn spec(text: &str, set: &[&str]) -> Spec {
    let ast = parse("m.dream", text, Spelling::Dream).unwrap_or_else(|found| panic!("{found}"));
    let set: Vec<String> = set.iter().map(|set| set.to_string()).collect();
    let (spec, warnings) = check(&ast, &set).unwrap_or_else(|found| panic!("{found}"));
    assert!(warnings.is_empty(), "{warnings:?}");
    spec
}

fn defined<'s>(spec: &'s Spec, name: &str) -> &'s Defined {
    let Some(Component::Defined(defined)) = spec.model.components.get(name) else { panic!("{name}") };
    defined
}

fn graph(spec: &Spec, name: &str) -> Graph {
    defined(spec, name).graph(&spec.model).unwrap()
}

/// The dimensions of a value, with their sizes.
fn dims(graph: &Graph, name: &str) -> Vec<(String, u64)> {
    let value = graph.value(name).unwrap_or_else(|| panic!("no value {name}"));
    let dims = &graph.region.node(value).ty.dims;
    dims.iter().map(|dim| (graph.name(*dim).to_string(), graph.size(*dim))).collect()
}

fn named(dims: &[(&str, u64)]) -> Vec<(String, u64)> {
    dims.iter().map(|(name, size)| (name.to_string(), *size)).collect()
}

#[test]
fn the_example_has_the_graph_that_its_formulas_say() {
    let spec = spec(&format!("{GATED_DELTA}{MODEL}"), &[]);
    let graph = graph(&spec, "gdn");
    assert_eq!(dims(&graph, "q"), named(&[("heads", 4), ("size", 16)]));
    assert_eq!(dims(&graph, "v"), named(&[("heads", 4), ("value", 32)]));
    assert_eq!(dims(&graph, "a"), named(&[("heads", 4)]));
    assert_eq!(dims(&graph, "o"), named(&[("heads", 4), ("value", 32)]));
    let paths: Vec<&str> = graph.weights.iter().map(|weight| weight.path.as_str()).collect();
    let expected = [
        "q.weight",
        "q.filter",
        "k.weight",
        "k.filter",
        "v.weight",
        "v.filter",
        "a.weight",
        "a.weight2",
        "a.weight3",
        "b.weight",
        "out.gain",
        "out.weight",
        "out.weight2",
    ];
    let sorted = |names: &[&str]| {
        let mut names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        names.sort();
        names
    };
    assert_eq!(sorted(&paths), sorted(&expected));
    let recurrence = graph.region.nodes.iter().find_map(|node| match &node.function {
        Function::Recurrence(inner) => Some((inner, node)),
        _ => None,
    });
    let (recurrence, node) = recurrence.unwrap();
    assert_eq!(recurrence.states.len(), 1);
    assert_eq!(recurrence.body.results.len(), 2);
    assert_eq!(node.args.len(), 5);
    // A sum of products is one function.
    let sums =
        recurrence.body.nodes.iter().filter(|node| matches!(node.function, Function::Reduce(Reduce::Sum, _)));
    assert_eq!(sums.count(), 0);
    assert_eq!(
        recurrence.body.nodes.iter().filter(|node| matches!(node.function, Function::Dot(_))).count(),
        2
    );
}

#[test]
fn settings_are_sizes_that_arguments_change() {
    let text = format!("{GATED_DELTA}{MODEL}");
    let spec = spec(&text, &["gdn.size=8", "gdn.heads=2 * 3"]);
    let graph = graph(&spec, "gdn");
    assert_eq!(dims(&graph, "v"), named(&[("heads", 6), ("value", 16)]));
}

#[test]
fn operands_stand_before_what_reads_them() {
    let spec = spec(&format!("{GATED_DELTA}{MODEL}"), &[]);
    let graph = graph(&spec, "gdn");
    for (place, node) in graph.region.nodes.iter().enumerate() {
        assert!(node.args.iter().all(|arg| (arg.0 as usize) < place), "{node:?}");
    }
}

const COMMENTED: &str = "// Mixers of our own.
define scan(
  heads 4,  // of the state
  size,  // has no default
) {
  // Keys before values.
  k = linear(x, [heads, size]) // a matrix

  v = linear(x, [heads, size])
  recurrence S [heads, size] from 0 {
    S = S + k * v
  }
  return linear(S, [hidden])
}

// Returns what it reads.
define same {
  return x
}

model m {
  vocab 256
  hidden 64
  context 128
  a = scan { size 8 }
  b = same {}
  layer { a > b }
}
";

#[test]
fn both_spellings_hold_a_definition_with_its_comments() {
    let ast = parse("m.dream", COMMENTED, Spelling::Dream).unwrap();
    assert_eq!(format(&ast, Spelling::Dream).unwrap(), COMMENTED);
    let yaml = format(&ast, Spelling::Yaml).unwrap();
    insta::assert_snapshot!(yaml);
    let back = parse("m.yaml", &yaml, Spelling::Yaml).unwrap();
    assert_eq!(format(&back, Spelling::Dream).unwrap(), COMMENTED);
    assert_eq!(format(&back, Spelling::Yaml).unwrap(), yaml);
    assert_eq!(check(&ast, &[]).unwrap().0, check(&back, &[]).unwrap().0);
}

#[test]
fn a_resolved_specification_keeps_its_definitions() {
    let spec = spec(&format!("{GATED_DELTA}{MODEL}"), &["gdn.size=8"]);
    for spelling in [Spelling::Dream, Spelling::Yaml] {
        let text = show(&spec, spelling);
        let back = check(&parse("m", &text, spelling).unwrap(), &[])
            .unwrap_or_else(|found| panic!("{found}\n{text}"))
            .0;
        assert_eq!(back, spec, "{text}");
    }
    let sketch = sketch(&spec);
    let back = check(&parse("m", &sketch, Spelling::Dream).unwrap(), &[]).unwrap().0;
    assert_eq!(back.model, spec.model, "{sketch}");
}

#[test]
fn a_mistake_in_yaml_stands_at_its_token_inside_the_block() {
    let text = "define:
  d:
    settings: {heads: 4}
    code: |
      q = linear(x, [heads])
      return linear(qq, [hidden])
model:
  vocab: 256
  hidden: 64
  context: 128
  components: {a: {d: {}}}
  body: [a]
";
    let found = check(&parse("m.yaml", text, Spelling::Yaml).unwrap(), &[]).unwrap_err();
    let error = found.list.iter().find(|d| d.code == "unknown-name").unwrap_or_else(|| panic!("{found}"));
    let place = found.source.place(error.span.unwrap());
    assert_eq!((place.line, place.column), (6, 21));
    assert_eq!(error.help.as_deref(), Some("did you mean `q`?"));
}

#[test]
fn a_lone_definition_is_read() {
    let definitions = dreamc_dsl::define::parse(GATED_DELTA).unwrap();
    assert_eq!(definitions[0].settings.len(), 4);
    assert!(dreamc_dsl::define::parse("define a { return b(x) }\ndefine b { return a(x) }").is_err());
    assert!(dreamc_dsl::define::parse("define a {").is_err());
    assert!(dreamc_dsl::define::parse("model m {}").is_err());
}

#[test]
fn every_definition_of_the_library_has_a_graph() {
    for (name, text) in dreamc_dsl::define::library::LIBRARY {
        assert!(text.starts_with("// "), "{name} names its paper");
        let text =
            format!("model m {{ vocab 256  hidden 128  context 32  a = {name} {{}}  repeat 2 {{ a }} }}");
        let spec = spec(&text, &[]);
        let graph = graph(&spec, "a");
        assert!(!graph.weights.is_empty(), "{name}");
        let shown = show(&spec, Spelling::Yaml);
        let back = check(&parse("m.yaml", &shown, Spelling::Yaml).unwrap(), &[]).unwrap().0;
        assert_eq!(back, spec, "{name}");
        let short = sketch(&spec);
        assert!(!short.contains("define"), "{short}");
    }
}

#[test]
fn definitions_of_files_in_the_folder_are_included_and_none_of_others() {
    let folder = std::env::temp_dir().join(format!("dreamc-include-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("in/mixers")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write(
        "in/mixers/one.dream",
        "include \"two.yaml\"\ndefine one(heads 4) {\n  return two(linear(linear(x, [heads]), [hidden])) { size 8 }\n}\n",
    );
    write(
        "in/mixers/two.yaml",
        "define:\n  two:\n    settings: {size: 16}\n    code: |\n      return linear(linear(x, [size]), [hidden])\n",
    );
    write("outside.dream", "define three { return x }\n");
    let model = "model m { vocab 256  hidden 64  context 32  a = one { heads 2 }  repeat 2 { a } }\n";
    let load = |text: &str| {
        write("in/m.dream", text);
        dreamc_dsl::load(folder.join("in/m.dream"), &[])
    };
    let (spec, warnings) =
        load(&format!("include \"mixers/one.dream\"\n{model}")).unwrap_or_else(|e| panic!("{e}"));
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(graph(&spec, "a").weights.len(), 2);
    // A specification that a run keeps needs the files no more.
    let shown = show(&spec, Spelling::Yaml);
    assert_eq!(check(&parse("m.yaml", &shown, Spelling::Yaml).unwrap(), &[]).unwrap().0, spec);
    for outside in ["../outside.dream", "mixers/../../outside.dream"] {
        let error = load(&format!("include \"{outside}\"\n{model}")).unwrap_err().to_string();
        assert!(error.contains("leads out of the folder"), "{error}");
    }
    let link = folder.join("in/link.dream");
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.join("outside.dream"), &link).unwrap();
    #[cfg(unix)]
    assert!(load(&format!("include \"link.dream\"\n{model}")).unwrap_err().to_string().contains("leads out"));
    // A mistake of a file stands in it.
    write(
        "in/mixers/two.yaml",
        "define:\n  two:\n    settings: {size: 16}\n    code: |\n      return linear(x, [sise])\n",
    );
    let error = load(&format!("include \"mixers/one.dream\"\n{model}")).unwrap_err().to_string();
    assert!(error.contains("mixers/two.yaml:5:25"), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// A definition with that number of operations.
fn long(operations: usize) -> String {
    let mut text = String::from("define long(heads 4, size 16) {\n  v0 = linear(x, [heads, size])\n");
    for place in 1..operations / 4 {
        text += &format!("  v{place} = silu(v{0} * 0.5 + v{0}) + v0\n", place - 1);
    }
    text + &format!("  return linear(v{}, [hidden])\n}}\n", operations / 4 - 1)
}

#[test]
fn a_definition_of_500_operations_is_checked_in_20_milliseconds() {
    let text = long(500) + "model m { vocab 256  hidden 64  context 32  a = long {}  repeat 2 { a } }\n";
    let once = || {
        let start = std::time::Instant::now();
        check(&parse("m.dream", &text, Spelling::Dream).unwrap(), &[]).unwrap();
        start.elapsed()
    };
    let best = (0..9).map(|_| once()).min().unwrap();
    // Without optimization it takes some times longer.
    let bound = if cfg!(debug_assertions) { 100 } else { 20 };
    assert!(best.as_millis() < bound, "{best:?}");
}

#[test]
fn a_definition_of_any_content_is_answered() {
    let words = [
        "q",
        "=",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        "over",
        "heads",
        "size",
        "linear",
        "sum",
        "recurrence",
        "S",
        "from",
        "0",
        "return",
        "x",
        "attend",
        "score",
        "s",
        "i",
        "j",
        "*",
        "-",
        "+",
        ".",
        ":",
        "\n",
        "1e-3",
        "where",
        "top",
        "pick",
        "é",
        "//",
        "<",
        "not",
        "and",
        "earlier",
        "join",
        "along",
        "sequence",
        "a",
        "mlp",
        "\"",
        "hidden",
        "/",
    ];
    let mut state = 7u64;
    let mut next = |most: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % most
    };
    for _ in 0..200 {
        let code: Vec<&str> = (0..next(40)).map(|_| words[next(words.len())]).collect();
        let code = code.join(" ");
        let text = format!(
            "define a(heads 4, size 16) {{\n{code}\n}}\nmodel m {{ vocab 9  hidden 64  context 8  a = a {{}}  body {{ a }} }}\n"
        );
        if let Ok(ast) = parse("m.dream", &text, Spelling::Dream) {
            let _ = check(&ast, &[]);
            if let Ok(once) = format(&ast, Spelling::Dream) {
                let again = parse("m.dream", &once, Spelling::Dream).unwrap();
                assert_eq!(format(&again, Spelling::Dream).unwrap(), once, "{text}");
            }
        }
        // The example with some of its words changed.
        let mut bytes: Vec<String> = GATED_DELTA.split(' ').map(str::to_string).collect();
        for _ in 0..1 + next(3) {
            let place = next(bytes.len());
            bytes[place] = words[next(words.len())].to_string();
        }
        let text = bytes.join(" ") + MODEL;
        if let Ok(ast) = parse("m.dream", &text, Spelling::Dream) {
            let _ = check(&ast, &[]);
        }
    }
}

#[test]
fn settings_are_fields_that_match_varies() {
    let text = format!(
        "{GATED_DELTA}{MODEL}match {{ baseline \"other.yaml\"  flops mlp.intermediate  params gdn.size }}\n"
    );
    assert!(spec(&text, &[]).matching.is_some());
    let wrong = text.replace("params gdn.size", "params gdn.sise");
    let found = check(&parse("m.dream", &wrong, Spelling::Dream).unwrap(), &[]).unwrap_err().to_string();
    assert!(found.contains("did you mean `gdn.size`?"), "{found}");
}

#[test]
fn a_small_form_of_every_definition_of_the_library_fits() {
    for (name, _) in dreamc_dsl::define::library::LIBRARY {
        let text =
            format!("model m {{ vocab 256  hidden 128  context 32  a = {name} {{}}  repeat 2 {{ a }} }}");
        let mut spec = spec(&text, &[]);
        spec.model.hidden = 12;
        let mut changed = Vec::new();
        let mut lower = |path: &str, size: &mut u64, most: u64| {
            changed.push(path.to_string());
            *size = most.min(*size);
        };
        let mut small = dreamc_dsl::spec::Small { hidden: 12, context: 32, sequence: 8, lower: &mut lower };
        spec.model.components["a"].shrink(&mut small);
        assert_eq!(spec.model.components["a"].broken(&spec.model), None, "{name}");
        assert!(!changed.iter().any(|path| path == "base"), "{name}: {changed:?}");
    }
}

#[test]
fn values_of_components_before_and_of_applications_before_have_dimensions() {
    let text = "define writer(heads 4) {
  v = linear(x, [heads])
  return linear(v, [hidden])
}
define reader(heads 4) {
  w = 0.5 * linear(x, [heads]) + maker.v + earlier(w)
  return linear(w, [hidden])
}
model m {
  vocab 256  hidden 64  context 128
  maker = writer {}
  reader = reader {}
  repeat 2 { layer { maker > reader } }
}
";
    let spec = spec(text, &[]);
    let graph = graph(&spec, "reader");
    assert_eq!(dims(&graph, "w"), named(&[("heads", 4)]));
    let has = |function: &Function| graph.region.nodes.iter().any(|node| node.function == *function);
    assert!(has(&Function::ValueOf("maker".into(), "v".into())));
    assert!(has(&Function::Earlier("w".into())));
}

#[test]
fn definitions_that_apply_one_another_too_often_are_refused_at_once() {
    let mut text = String::from("define d0(heads 4) {\n  return linear(linear(x, [heads]), [hidden])\n}\n");
    for place in 1..40 {
        let inner = place - 1;
        text += &format!("define d{place} {{\n  return d{inner}(d{inner}(x) {{}}) {{}}\n}}\n");
    }
    for (last, whole) in [(3, true), (7, true), (8, false), (9, false), (39, false)] {
        let text =
            format!("{text}model m {{ vocab 9  hidden 64  context 8  a = d{last} {{}}  layer {{ a }} }}\n");
        let start = std::time::Instant::now();
        let found = check(&parse("m.dream", &text, Spelling::Dream).unwrap(), &[]);
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
        let own =
            |found: &dreamc_dsl::Diagnostics| found.list.iter().filter(|d| d.code == "too-large").count();
        match found {
            Ok(_) => assert!(whole, "{last}"),
            Err(found) => assert!(!whole && own(&found) > 0, "{last}: {found}"),
        }
    }
}

#[test]
fn a_definition_of_another_model_is_not_blamed() {
    let text = "define odd(heads 5, size = hidden / heads) {
  return linear(linear(x, [heads, size]) + other.value, [hidden])
}
model m { vocab 9  hidden 64  context 8  mlp = mlp { intermediate 8 }  layer { mlp } }
";
    let (_, warnings) = check(&parse("m.dream", text, Spelling::Dream).unwrap(), &[]).unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
}

#[test]
fn a_component_inside_a_definition_leaves_nothing_along_depth() {
    let text = "define mixer() {
  return mlp(x) { intermediate 8  depth_stream }
}
model m {
  vocab 256  hidden 64  context 128
  sa = sequence { heads 4  depth_stream keys }
  own = mixer {}
  layer { sa > own }
}
";
    let ast = parse("m.dream", text, Spelling::Dream).unwrap();
    let found = check(&ast, &[]).unwrap_err().to_string();
    assert!(found.contains("leaves nothing in the model's depth stream"), "{found}");
    assert!(found.contains("m.dream:2:35"), "{found}");
}

#[test]
fn a_component_inside_a_definition_has_keys_of_its_own() {
    let text = "define mixer() {
  return sequence(x) { heads 4  kv_from sa }
}
model m {
  vocab 256  hidden 64  context 128
  sa = sequence { heads 4 }
  own = mixer {}
  layer { sa > own }
}
";
    let ast = parse("m.dream", text, Spelling::Dream).unwrap();
    let found = check(&ast, &[]).unwrap_err().to_string();
    assert!(found.contains("`kv_from` is one of the model's"), "{found}");
    assert!(found.contains("m.dream:2:33"), "{found}");
}
