//! Definitions on the command line and in editors.

use crate::lsp::{Client, edited, mark};
use crate::serve::Server;
use crate::support::sandbox::{Sandbox, newest};
use serde_json::json;
use std::fs;
use std::path::Path;

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
    let steps = sandbox.good(&["draw", "m.dream", "--open", "sa"]);
    assert!(steps.contains("attention over tokens"), "{steps}");
    let (code, refused) = sandbox.bad(&["draw", "m.dream", "--open", "sb"]);
    assert_eq!(code, 2);
    assert!(refused.contains("no such component; it has") && refused.contains("gdn"), "{refused}");
}

/// The example of the folder with a recipe of seconds.
fn example() -> Sandbox {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/gated-delta.dream");
    let text = fs::read_to_string(path).unwrap();
    let short = [
        ("steps 900", "steps 4"),
        ("batch 16", "batch 2"),
        ("sequence 128", "sequence 40"),
        ("evaluate { every 450 }", "evaluate { every 0 }"),
        ("examples 100", "examples 3"),
        ("max_tokens 12", "max_tokens 3"),
        ("size 16,", "size 4,"),
        ("hidden 64", "hidden 16"),
        ("intermediate 128", "intermediate 24"),
    ];
    let small = short.iter().fold(text, |text, (long, short)| {
        assert!(text.contains(long), "{long}");
        text.replace(long, short)
    });
    Sandbox::with(&[("gdn.dream", &small)])
}

#[test]
fn the_example_trains_goes_on_writes_and_is_measured() {
    let sandbox = example();
    sandbox.good(&["train", "gdn.dream", "--out", "served"]);
    sandbox.good(&["train", "gdn.dream", "--out", "cut", "--set", "train.steps=2"]);
    sandbox.good(&["resume", "cut", "--set", "train.steps=4"]);
    let bytes = |run: &str| fs::read(newest(&sandbox.path(run)).join("model.safetensors")).unwrap();
    assert!(bytes("served") == bytes("cut"), "a run that goes on has other weights");

    let write = ["generate", "served", "abcdefgh 1-2 = ", "-n", "9", "--temperature", "0"];
    let text = sandbox.good(&write);
    assert_eq!(sandbox.good(&[&write[..], &["--no-cache"]].concat()), text);
    let body = json!({"prompt": "abcdefgh 1-2 = ", "max_tokens": 9, "temperature": 0});
    let server = Server::start(&sandbox, &[]);
    let served = server.complete(body.clone());
    let served = served["choices"][0]["text"].as_str().unwrap().to_string();
    assert!(text.trim_end().ends_with(served.trim_end()), "{text:?} and {served:?}");
    assert_eq!(server.complete(body)["choices"][0]["text"], served, "a prompt whose pages are kept");
    assert!(sandbox.good(&["eval", "served"]).contains("perplexity"));

    sandbox.write("ids.json", "[[1, 2, 3, 4, 5]]");
    sandbox.good(&["export", "weights", "served", "-o", "weights.safetensors"]);
    for (of, to) in [("served", "a.safetensors"), ("cut", "b.safetensors")] {
        sandbox.good(&["probe", of, "--ids", "ids.json", "-o", to]);
    }
    assert!(
        fs::read(sandbox.path("a.safetensors")).unwrap() == fs::read(sandbox.path("b.safetensors")).unwrap()
    );
    assert!(sandbox.good(&["diff", "served", "cut"]).contains("steps"));
    let kept = fs::read_to_string(sandbox.path("served/spec.yaml")).unwrap();
    assert!(kept.contains("recurrence S [heads, value, size]"), "{kept}");
}

#[test]
fn the_example_is_proved_counted_matched_and_compared() {
    let sandbox = example();
    let proved = sandbox.good(&["verify", "gdn.dream", "--only", "cached,counts,plain"]);
    assert!(proved.contains("0 failed"), "{proved}");
    let count = |more: &[&str]| {
        let text = sandbox.good(&[&["count", "gdn.dream", "--json"], more].concat());
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["parameters"]["total"].as_u64().unwrap()
    };
    // Settings are sizes, and those that are made of them follow.
    assert!(count(&["--set", "gdn.size=8"]) > count(&[]));
    assert_eq!(count(&["--set", "gdn.gated_delta.size=8"]), count(&["--set", "gdn.size=8"]));
    assert_eq!(count(&["--set", "gdn.size=8", "--set", "gdn.value=16"]), count(&["--set", "gdn.size=8"]));
    let baseline = fs::read_to_string(sandbox.path("gdn.dream")).unwrap();
    let baseline = baseline
        .replace("layer { gdn > mlp }", "layer { sa > mlp }")
        .replace("model gated-delta", "model plain");
    let baseline = baseline.replace("  gdn = gated_delta { heads 4 }\n", "");
    sandbox.write("plain.dream", &baseline);
    let line = ["match", "gdn.dream", "--baseline", "plain.dream", "--set", "gdn.value=8"];
    let matched = sandbox.good(&[&line[..], &["--params", "gdn.value", "--tolerance", "5%"]].concat());
    assert!(matched.contains("gdn.value"), "{matched}");
    let refused = sandbox.error(&["count", "gdn.dream", "--set", "gdn.sise=3"]);
    assert!(refused.contains("`sise` is not a setting of `gated_delta`"), "{refused}");
    sandbox.write(
        "s.suite.yaml",
        "name: s\nbaseline: plain.dream\nvariants: [{name: gdn, spec: gdn.dream}]\n\
         equal: {flops: none, parameters: none}\nseeds: [0]\n",
    );
    sandbox.good(&["compare", "s.suite.yaml", "--out", "both"]);
    let report = fs::read_to_string(sandbox.path("both/report.md")).unwrap();
    assert!(report.contains("gdn"), "{report}");
    // A package for transformers has the module of `export torch`, and says what it lacks.
    sandbox.good(&["train", "gdn.dream", "--out", "run", "--set", "train.steps=1"]);
    let said = sandbox.good(&["export", "hf", "run", "-o", "package"]);
    assert!(said.contains("the package has no cache"), "{said}");
    let code = fs::read_to_string(sandbox.path("package/modeling_dreamc.py")).unwrap();
    assert!(code.contains("class Gdn(") && code.contains("class DreamcForCausalLM("), "{code}");
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

/// Forty keystrokes in a definition of 500 operations: `cargo test --test cli keystroke --
/// --nocapture` prints the time of one.
#[test]
fn an_answer_follows_a_keystroke_in_50_ms() {
    let sandbox = Sandbox::with(&[]);
    let mut client = Client::ready(&sandbox);
    let line = |n: usize| format!("  v{} = tanh(v{n}) * 0.5 + sigmoid(v{n}) * v{n}\n", n + 1);
    let lines: String = (0..100).map(line).collect();
    let text = format!(
        "define long(size 16) {{\n  v0 = linear(x, [size])\n{lines}  return linear(v100, [hidden])\n}}\n\n\
         model m {{\n  vocab 256\n  hidden 64\n  context 128\n  w = long {{}}\n  repeat 4 {{ w }}\n}}\n"
    );
    assert!(client.open("m.dream", &text).is_empty());
    let before = client.ticks();
    for n in 0..20 {
        let typed = text.replace("v50 = tanh", &format!("v50 = tan{} * tanh", "h".repeat(n)));
        client.change("m.dream", &typed);
        let page = client.hover("m.dream", &mark(&text, "v70 = ", 0));
        assert!(page.contains("size 16"), "{page}");
    }
    let each = (client.ticks() - before) as f64 * 10.0 / 40.0;
    println!("{each:.1} ms a keystroke");
    assert!(each < 50.0, "{each} ms");
    assert_eq!(client.end(), 0);
}
