//! `dreamc analyze routing` on a model that dreamc trained: tables, JSON, figures and labels.

use crate::support::sandbox::Sandbox;
use serde_json::Value;
use std::fs;
use std::path::Path;

const MODEL: &str = "\
model:
  name: alternating
  vocab: 256
  hidden: 16
  context: 64
  components:
    local: {sequence: {heads: 2, head_size: 8, window: 8}}
    global: {sequence: {heads: 2, head_size: 8}}
    mlp: {mlp: {intermediate: 32}}
  body:
    - repeat: 2
      layers:
        - \"skip(threshold, capacity 0.5, penalty 0.1) { local } > mlp\"
        - \"skip(threshold, capacity 0.5, penalty 0.1) { global } > mlp\"
data: {text: book.txt, validation: 0.2}
train: {steps: 30, batch: 4, sequence: 32, learning_rate: 1e-2, warmup: 2, precision: f32}
";

fn sandbox() -> Sandbox {
    let line = |i: usize| format!("In {} Rome had {} roads, and Alba none.\n", 100 + i, i % 7);
    Sandbox::with(&[("model.yaml", MODEL), ("book.txt", &(0..400).map(line).collect::<String>())])
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn routing_of_a_trained_model() {
    let sandbox = sandbox();
    sandbox.good(&["train", "model.yaml", "--out", "run"]);
    let said = sandbox.good(&["analyze", "routing", "run", "--sequences", "40", "--first", "2"]);
    assert!(said.contains("local against global, depths 0–3") && said.contains("routing.html"), "{said}");
    let found = json(&sandbox.path("run/analysis/routing.json"));
    let (rows, tokens) = (found["sequences"].as_u64().unwrap(), found["tokens"].as_u64().unwrap());
    assert!(rows > 10 && tokens <= 30 * rows, "{rows} rows, {tokens} tokens");

    let parts = found["parts"].as_array().unwrap();
    let kinds: Vec<&str> = parts.iter().map(|p| p["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["local", "global", "local", "global"]);
    for part in parts {
        assert_eq!(part["tokens"], tokens);
        let rate = part["rate"].as_f64().unwrap();
        let classes = part["classes"].as_array().unwrap();
        let number = |c: &Value, key: &str| c[key].as_f64().unwrap();
        let all: f64 = classes.iter().map(|c| number(c, "tokens")).sum();
        let kept: f64 = classes.iter().map(|c| number(c, "tokens") * number(c, "rate")).sum();
        assert!(
            (kept / all - rate).abs() < 0.02,
            "classes share out the decisions: {} of {rate}",
            kept / all
        );
        for c in classes {
            let corrected = (number(c, "p") * classes.len() as f64).min(1.0);
            assert!((number(c, "corrected") - corrected).abs() < 1e-12);
        }
    }
    // The bytes of a text with digits, capitals and punctuation tell the routers something.
    assert!(parts.iter().any(|p| p["classes"].as_array().unwrap().len() >= 5));

    let kinds = &found["kinds"][0];
    let mean = |kind: &str| {
        let own = parts.iter().filter(|p| p["kind"] == kind).map(|p| p["rate"].as_f64().unwrap());
        own.sum::<f64>() / 2.0
    };
    assert!((kinds["rate"]["first"]["mean"].as_f64().unwrap() - mean("local")).abs() < 0.02);
    assert_eq!(kinds["rate"]["first"]["n"], rows);

    let ablation = &found["ablation"];
    let left_out = ablation["parts"].as_array().unwrap();
    assert_eq!(left_out.len(), 8, "four parts and the networks beside them");
    let whole = ablation["perplexity"].as_f64().unwrap();
    for part in left_out {
        let loss = part[0]["loss"].as_f64().unwrap();
        assert!((loss.exp() - whole - part[1].as_f64().unwrap()).abs() < 1e-9);
    }
    assert_eq!(ablation["tests"][0]["first_change"]["n"], 2);
    assert_eq!(ablation["controls"][0]["second"], "global");

    let page = fs::read_to_string(sandbox.path("run/analysis/routing.html")).unwrap();
    for heading in ["How much is processed", "Kinds of layers", "Parts left out", "Classes of tokens"] {
        assert!(page.contains(heading), "{heading}");
    }
    let svg = fs::read_to_string(sandbox.path("run/analysis/figures/routing-rates.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("global"), "{svg}");
    assert!(fs::read_to_string(sandbox.path("run/analysis/routing.md")).unwrap().contains("| local |"));

    // Ranges of depths, and classes of one's own: here, whether the place is even.
    let line = ["analyze", "routing", "run", "--sequences", "40", "--no-ablation", "--json"];
    sandbox.good(&[&line[..], &["--write-tokens", "tokens.jsonl"]].concat());
    let written = fs::read_to_string(sandbox.path("tokens.jsonl")).unwrap();
    let places =
        written.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["place"].as_u64().unwrap());
    let labels: String = places.map(|p| if p % 2 == 0 { "even\n" } else { "odd\n" }).collect();
    sandbox.write("labels.txt", &labels);
    let depths = ["--labels", "labels.txt", "--depths", "0-1", "--depths", "2-3"];
    let found: Value = serde_json::from_str(&sandbox.good(&[&line[..], &depths].concat())).unwrap();
    assert_eq!((&found["kinds"][0]["depths"][1], &found["kinds"][1]["depths"][0]), (&1.into(), &2.into()));
    let names: Vec<&str> = found["parts"][0]["classes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["class"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["even", "odd"]);
    sandbox.write("labels.txt", "noun\n");
    let few = sandbox.error(&[&line[..], &["--labels", "labels.txt"]].concat());
    assert!(few.contains("labels.txt: there are 1 labels for"), "{few}");
    let turned = sandbox.error(&[&line[..], &["--depths", "3-2"]].concat());
    assert!(turned.contains("two depths, the lower first"), "{turned}");
}

#[test]
fn a_model_whose_tokens_never_skip_has_no_routing() {
    let sandbox = sandbox();
    let dense = MODEL.replace("skip(threshold, capacity 0.5, penalty 0.1) { local }", "local");
    let dense = dense.replace("skip(threshold, capacity 0.5, penalty 0.1) { global }", "global");
    sandbox.write("model.yaml", &dense.replace("steps: 30", "steps: 1"));
    sandbox.good(&["train", "model.yaml", "--out", "run"]);
    let said = sandbox.error(&["analyze", "routing", "run"]);
    assert!(said.contains("no part of the model is wrapped in skip(…)"), "{said}");
}

/// Everything that a reading of a text has: a mixture, depth attention, a wrapped part, an exit.
const ROUTED: &str = "\
model routed {
  vocab 256  hidden 32  context 64
  sa = sequence { heads 2 }
  da = depth { heads 1  head_size 16 }
  ea = experts { count 4  active 2  intermediate 16  query 8  balance 1e-3 }
  recur 3 exit gate 0.1 {
    layer { (da | sa) > ea }
    layer { skip(capacity 0.5, causal bce 0.01) { sa > ea } }
  }
}

data { task permutation  size 4  max_steps 2 }
train { steps 4  batch 2  sequence 32  precision f32 }
";

/// The reading of a text is that of the model which writes: its likeliest next token is written,
/// and shares of experts, depths and exits are whole.
#[test]
fn a_text_is_read_token_by_token() {
    let sandbox = Sandbox::with(&[("routed.dream", ROUTED)]);
    sandbox.good(&["train", "routed.dream", "--out", "run"]);
    let read = |text: &str| -> Value {
        let json = sandbox.good(&["analyze", "tokens", "run", text, "--top", "100", "--json"]);
        serde_json::from_str(&json).unwrap()
    };
    let reading = read("abcd 1-2 = ");
    assert_eq!((&reading["model"], &reading["depth"]), (&"routed".into(), &6.into()));
    let tokens = reading["tokens"].as_array().unwrap();
    // Texts of tasks begin with the begin token.
    assert_eq!(tokens.len(), 12);
    let numbers = |list: &Value, key: &str| -> Vec<f64> {
        let of = |one: &Value| if key.is_empty() { one.as_f64() } else { one[key].as_f64() };
        list.as_array().unwrap().iter().map(|one| of(one).unwrap()).collect()
    };
    for (i, token) in tokens.iter().enumerate() {
        let likely = numbers(&token["next"], "probability");
        assert!(likely.is_sorted_by(|a, b| a >= b) && likely.iter().sum::<f64>() <= 1.0 + 1e-9);
        // A token has the probability that the one before gives it.
        if let Some(before) = i.checked_sub(1) {
            let next = tokens[before]["next"].as_array().unwrap();
            let own = next.iter().find(|next| next["id"] == token["id"]);
            if let Some(own) = own {
                assert_eq!(own["probability"], token["given"]);
            }
        } else {
            assert_eq!(token["given"], Value::Null);
        }
        // Projections of attentions are chosen, too.
        let chosen = token["experts"].as_array().unwrap().iter().filter(|c| c["component"] == "ea");
        let chosen: Vec<&Value> = chosen.collect();
        let parts = token["parts"].as_array().unwrap();
        let taken: Vec<&Value> = parts.iter().filter(|part| part["taken"] == true).collect();
        // The mixture is applied at every other depth, and where the token does not go around.
        assert_eq!((parts.len(), chosen.len()), (3, 3 + taken.len()), "{token}");
        for choice in chosen {
            let experts = choice["experts"].as_array().unwrap();
            assert!(experts.len() == 2 && experts[0] != experts[1], "{choice}");
            assert!(experts.iter().all(|e| e.as_u64().unwrap() < 4), "{choice}");
            let wrapped = choice["depth"].as_u64().unwrap() % 2 == 1;
            assert!(!wrapped || taken.iter().any(|part| part["depth"] == choice["depth"]), "{token}");
        }
        let looks = token["looks"].as_array().unwrap();
        assert_eq!(looks.len(), 3);
        for (pass, look) in looks.iter().enumerate() {
            let scores = numbers(&look["scores"], "");
            assert_eq!((scores.len(), look["depth"].as_u64()), (pass + 1, Some(2 * pass as u64)));
            assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{look}");
        }
        let exits = numbers(&token["exits"], "");
        assert!(exits.len() == 3 && (exits.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{token}");
    }
    let written = sandbox.good(&["generate", "run", "abcd 1-2 = ", "-n", "1", "--greedy", "--json"]);
    let written: Value = serde_json::from_str(&written).unwrap();
    assert_eq!(written["ids"][0], tokens[11]["next"][0]["id"]);
    let table = sandbox.good(&["analyze", "tokens", "run", "ab"]);
    assert!(table.contains("ea@0: ") && table.contains("leaves after pass "), "{table}");
    let refused = sandbox.error(&["analyze", "tokens", "run", &"a".repeat(65)]);
    assert!(refused.contains("66 tokens, and at most 64 are shown"), "{refused}");
    assert_eq!(read("")["tokens"].as_array().unwrap().len(), 1);
}
