//! Definitions: their graphs, and what stands around them.

use dreamc_dsl::define::graph::{Function, Graph, Reduce};
use dreamc_dsl::spec::{Component, Defined};
use dreamc_dsl::{Spec, Spelling, check, parse};

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
