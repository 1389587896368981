//! Definitions on the command line and in editors.

use crate::lsp::{Client, edited, mark};
use crate::support::sandbox::Sandbox;
use serde_json::json;

const DREAM: &str = "\
define gated_delta(heads 4, size 16, value = 2 * size, width 4) {
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

model m {
  vocab 256
  hidden 64
  context 128
  gdn = gated_delta { heads 4 }
  sa = sequence { heads 4 }
  mlp = mlp { intermediate 128 }
  repeat 2 {
    layer { gdn > mlp }
    layer { gdn > mlp }
    layer { gdn > mlp }
    layer { sa > mlp }
  }
}
";

#[test]
fn the_example_is_checked_shown_formatted_and_drawn() {
    let sandbox = Sandbox::with(&[("m.dream", DREAM)]);
    sandbox.good(&["check", "m.dream"]);
    sandbox.good(&["fmt", "m.dream", "--check"]);
    let shown = sandbox.good(&["show", "m.dream"]);
    sandbox.write("m.yaml", &shown);
    assert_eq!(sandbox.good(&["show", "m.yaml"]), shown);
    let drawn = sandbox.good(&["draw", "m.dream", "--open", "gdn"]);
    for text in ["recurrence S [heads, value, size]", "[heads, size]", ">q<", ">o<", "a.weight2"] {
        assert!(drawn.contains(text), "{text} is not in the drawing");
    }
    let (code, refused) = sandbox.bad(&["draw", "m.dream", "--open", "sa"]);
    assert_eq!(code, 2);
    assert!(refused.contains("those that are: gdn"), "{refused}");
}

#[test]
fn the_library_is_listed_and_printed() {
    let sandbox = Sandbox::with(&[]);
    let list = sandbox.good(&["show", "std"]);
    for (name, text) in dreamc_dsl::define::library::LIBRARY {
        assert!(list.lines().any(|line| line.starts_with(name)), "{list}");
        assert_eq!(sandbox.good(&["show", &format!("std/{name}")]), *text);
    }
    assert!(sandbox.bad(&["show", "std/nothing"]).1.contains("gated_delta"));
}

#[test]
fn editors_see_dimensions_functions_and_names() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::ready(&sandbox);
    client.open("m.dream", DREAM);
    let page = client.hover("m.dream", &mark(DREAM, "q, over size)", 0));
    assert!(page.contains("[heads 4, size 16]"), "{page}");
    let page = client.hover("m.dream", &mark(DREAM, "softplus(", 0));
    assert!(page.contains("log(1 + e^v)"), "{page}");
    let labels = client.labels("m.dream", &DREAM.replace("b = sigmoid", "b = ^sigmoid"));
    for word in ["softplus", "q", "heads", "position", "recurrence"] {
        assert!(labels.iter().any(|label| label == word), "{word}: {labels:?}");
    }
    let labels = client.labels("m.dream", &DREAM.replace("gdn = gated", "gdn = ^gated"));
    assert!(
        labels.contains(&"gated_delta".to_string()) && labels.contains(&"retnet".to_string()),
        "{labels:?}"
    );
    let found =
        client.about("m.dream", &mark(DREAM, "gated_delta {", 0), "textDocument/definition", json!({}));
    assert_eq!(found["result"]["range"]["start"]["line"], 0, "{found}");
    // A setting is renamed where components set it, too.
    let marked = mark(DREAM, "heads", 0);
    let answer = client.about("m.dream", &marked, "textDocument/rename", json!({"newName": "groups"}));
    let after = edited(DREAM, &answer["result"]["changes"][client.uri("m.dream")]);
    assert!(after.contains("gated_delta { groups 4 }") && after.contains("sequence { heads 4 }"), "{after}");
    assert!(client.change("m.dream", &after).is_empty());
    assert_eq!(client.end(), 0);
}
