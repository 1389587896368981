//! First weights from a model of another architecture: proved where the function stays, trained on,
//! exported, and refused where they cannot be.

use crate::support::sandbox::{Sandbox, newest, texts};
use dreamc_runtime::checkpoint::safetensors::Tensors;
use serde_json::Value;
use std::fs;

const DENSE: &str = "\
model:
  name: dense
  vocab: 256
  hidden: 32
  context: 64
  components:
    sa: {sequence: {heads: 4, kv_heads: 2, head_size: 8, projection: none}}
    mlp: {mlp: {intermediate: 48}}
  body:
    - repeat: 2
      layers: [sa > mlp]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const EXPERTS: &str = "ea: {experts: {count: 4, active: 2, intermediate: 48, query: 8}}";

/// The same with experts.
fn sparse() -> String {
    let experts = DENSE.replace("mlp: {mlp: {intermediate: 48}}", EXPERTS);
    experts.replace("sa > mlp", "sa > ea").replace("name: dense", "name: sparse")
}

/// A specification that begins with a transplant.
fn from(spec: &str, transplant: &str) -> String {
    format!("transplant: {{{transplant}}}\n{spec}")
}

fn trained() -> Sandbox {
    let sandbox = Sandbox::with(&[("dense.yaml", DENSE), ("sparse.yaml", &sparse())]);
    sandbox.good(&["train", "dense.yaml", "--out", "runs/dense"]);
    sandbox
}

/// How much two models of the same function differ.
fn divergence(sandbox: &Sandbox, model: &str, other: &str) -> f64 {
    let json = sandbox.good(&["eval", model, "--against", other, "--json"]);
    let report: Value = serde_json::from_str(&json).unwrap();
    report[0]["against"]["divergence"].as_f64().unwrap()
}

#[test]
fn an_upcycled_model_begins_as_its_donor_and_goes_the_way_of_any_model() {
    let sandbox = trained();
    let said = sandbox.good(&["transplant", "sparse.yaml", "--from", "runs/dense", "--plan"]);
    assert!(said.contains("layers.0-1.mlp.up.weight") && said.contains("tile 4"), "{said}");
    assert!(said.contains("left over: nothing of the donor"), "{said}");
    assert!(said.contains("model: the donor's function at the start"), "{said}");
    assert!(!sandbox.path("imports").exists(), "a plan writes nothing");
    let json = sandbox.good(&["transplant", "sparse.yaml", "--from", "runs/dense", "--plan", "--json"]);
    let plan: Value = serde_json::from_str(&json).unwrap();
    let tensors = plan["moves"].as_array().unwrap();
    assert!(
        tensors.iter().any(|m| m["to"] == "layers.1.ea.gate.weight" && m["steps"][0]["tile"] == 4),
        "{plan}"
    );

    let said = sandbox.good(&["transplant", "sparse.yaml", "--from", "runs/dense", "-o", "up"]);
    assert!(said.contains("proved: the logits of 32 tokens") && said.contains("dreamc train up"), "{said}");
    assert!(divergence(&sandbox, "up", "runs/dense") < 1e-9);
    let file = Tensors::open(&sandbox.path("up/model.safetensors")).unwrap();
    assert!(file.metadata("donor_hash").is_some());
    // It trains, is gone on with, and leaves as any other.
    let said = sandbox.good(&["train", "up", "--out", "runs/up"]);
    assert!(said.contains("begins from the weights of"), "{said}");
    sandbox.good(&["resume", "runs/up", "--set", "train.steps=6"]);
    sandbox.good(&["generate", "up", "a", "-n", "2"]);
    sandbox.good(&["export", "hf", "up", "-o", "hf"]);
    // Noise is another function, and is said to be.
    let noisy =
        from(&sparse(), "from: runs/dense, map: [{to: layers.*.ea, from: layers.*.mlp, noise: 0.01}]");
    sandbox.write("noisy.yaml", &noisy);
    let said = sandbox.good(&["transplant", "noisy.yaml", "-o", "noisy"]);
    assert!(said.contains("has noise") && !said.contains("proved"), "{said}");
    assert!(divergence(&sandbox, "noisy", "runs/dense") > 0.0);
    // A specification that names its donor is trained as it is, one that names none is not.
    let said = sandbox.good(&["train", "noisy.yaml", "--out", "runs/noisy"]);
    assert!(
        said.contains("begins from a transplant of") && sandbox.path("runs/noisy/begin").exists(),
        "{said}"
    );
    sandbox.write("nobody.yaml", &from(&sparse(), "depth: spread"));
    let said = sandbox.error(&["train", "nobody.yaml", "--out", "runs/nobody"]);
    assert!(said.contains("does not say which") && !sandbox.path("runs/nobody").exists(), "{said}");
    // An arm of a suite begins from the folder.
    sandbox.write("arm.yaml", "base: up\nmodel: {name: up}\n");
    let suite = |arm: &str| {
        format!("name: s\nbaseline: sparse.yaml\nvariants: [{{name: up, spec: {arm}}}]\nseeds: [0]\n")
    };
    sandbox.write("up.suite.yaml", &suite("arm.yaml"));
    sandbox.good(&["compare", "up.suite.yaml", "--out", "compared"]);
    let kept = sandbox.read("compared/up.yaml");
    assert!(kept.contains("weights: "), "{kept}");
}

#[test]
fn growth_ties_and_full_factors_keep_the_function() {
    let sandbox = trained();
    let proved = |name: &str, spec: &str, donor: &str| {
        sandbox.write(&format!("{name}.yaml"), spec);
        let said = sandbox.good(&["transplant", &format!("{name}.yaml"), "--from", donor, "-o", name]);
        assert!(said.contains("proved: "), "{name}: {said}");
        assert!(divergence(&sandbox, name, donor) < 1e-9, "{name}");
        said
    };
    // Layers that add nothing at first.
    let said = proved("deeper", &from(&DENSE.replace("repeat: 2", "repeat: 4"), "depth: zero"), "runs/dense");
    assert!(said.contains("adds nothing to the stream at the start"), "{said}");
    // A network that is wider.
    let wide =
        from(&DENSE.replace("intermediate: 48", "intermediate: 80"), "map: [{to: layers.*.mlp, how: pad}]");
    proved("wider", &wide, "runs/dense");
    // A key head for each query head.
    proved("heads", &DENSE.replace("kv_heads: 2", "kv_heads: 4"), "runs/dense");
    // A loop unrolled, and its equal layers tied again.
    let tied = "    - recur: 3\n      residual_norm: false\n      layers: [sa > mlp]";
    let untied = "    - repeat: 2\n      layers: [sa > mlp]";
    sandbox.write("looped.yaml", &DENSE.replace(untied, tied));
    sandbox.good(&["train", "looped.yaml", "--out", "runs/looped"]);
    let said = proved("unrolled", &DENSE.replace("repeat: 2", "repeat: 3"), "runs/looped");
    assert!(said.contains("layers.0-2.sa.out.weight"), "{said}");
    let said = proved("tied", &DENSE.replace(untied, tied), "unrolled");
    assert!(said.contains("mean of 3"), "{said}");
    // Layers that are not equal are another function, and nothing is claimed of them.
    let loop_of_two = DENSE.replace(untied, &tied.replace("recur: 3", "recur: 2"));
    sandbox.write("mean.yaml", &loop_of_two);
    let said = sandbox.good(&["transplant", "mean.yaml", "--from", "runs/dense", "-o", "mean"]);
    assert!(said.contains("where its layers are equal") && !said.contains("proved"), "{said}");
    // Passes with factors of full rank are the donor's layers, norms apart.
    let full = tied.replace("recur: 3", "recur: 2\n      lora: 48");
    let rank = |lora: &str| {
        sandbox.write("low.yaml", &DENSE.replace(untied, &full.replace("lora: 48", lora)));
        sandbox.good(&["transplant", "low.yaml", "--from", "runs/dense", "-o", "low", "--force"]);
        divergence(&sandbox, "low", "runs/dense")
    };
    let [low, high] = ["lora: 2", "lora: 32"].map(rank);
    assert!(high < low, "{high} {low}");
    // The least rank that keeps all of the differences is the full one.
    for (share, least) in [("1", 32), ("0.5", 2)] {
        let line =
            ["transplant", "low.yaml", "--from", "runs/dense", "-o", "sized", "--force", "--rank", share];
        sandbox.good(&line);
        let spec = sandbox.read("sized/spec.yaml");
        let lora =
            spec.lines().find_map(|line| line.trim().strip_prefix("lora: ")?.parse::<u64>().ok()).unwrap();
        assert!(lora >= least && lora <= 64, "{share}: {lora}");
    }
}

#[test]
fn a_transplant_that_cannot_be_writes_nothing() {
    let sandbox = trained();
    let dense = |transplant: &str| from(DENSE, transplant);
    let cases = [
        (dense("from: runs/gone"), "the donor cannot be opened", "spec.yaml:1:"),
        (dense("from: runs/dense, depth: [0, 5]"), "the donor has no layer 5", "spec.yaml:1:"),
        (dense("from: runs/dense, depth: deep"), "`deep` is not a value of `depth`", "spec.yaml:1:"),
        (dense("from: runs/dense, depth: []"), "`depth` is empty", "spec.yaml:1:"),
        (
            dense("from: runs/dense, map: [{to: layers.*.mpl}]"),
            "names no tensor of the model",
            "spec.yaml:1:",
        ),
        (dense("from: runs/dense, map: [{from: layers.0.mlp}]"), "`to` is missing in move", "spec.yaml:1:"),
        (
            dense("from: runs/dense, map: [{to: layers.*.mlp, how: zero}, {to: layers.*.mlp, how: fresh}]"),
            "both name `layers.0.mlp",
            "spec.yaml:1:",
        ),
        (
            dense("from: runs/dense, map: [{to: layers.0.mlp, from: layers.*.mlp}]"),
            "has more `*` than `layers.0.mlp`",
            "spec.yaml:1:",
        ),
        (
            dense("from: runs/dense, map: [{to: layers.0.mlp, from: layers.1.mlp, how: zero}]"),
            "nothing comes from the donor this way",
            "spec.yaml:1:",
        ),
        (
            dense("from: runs/dense").replace("intermediate: 48", "intermediate: 64"),
            "layers.0.mlp.gate.weight` is [64, 32] and the donor's `layers.0.mlp.gate.weight` [48, 32]",
            "spec.yaml:",
        ),
        (
            dense("from: runs/dense").replace("repeat: 2", "repeat: 3"),
            "applies 3 layers and the donor 2",
            "`transplant.depth`",
        ),
        (
            dense("from: runs/dense")
                .replace("vocab: 256", "vocab: 300")
                .replace("data: {task: permutation, size: 4, max_steps: 2}\n", ""),
            "the vocabulary has 300 tokens and the donor's 256",
            "spec.yaml:",
        ),
    ];
    for (spec, words, place) in cases {
        sandbox.write("spec.yaml", &spec);
        let said = sandbox.error(&["transplant", "spec.yaml", "-o", "out"]);
        assert!(said.contains(words) && said.contains(place), "{words}: {said}");
        assert!(!sandbox.path("out").exists(), "{words}");
    }
    let said = sandbox.error(&["transplant", "dense.yaml", "-o", "out"]);
    assert!(said.contains("names no donor"), "{said}");
    let (code, said) = sandbox.bad(&["transplant", "dense.yaml", "--from", "nowhere", "-o", "out"]);
    assert!(code == 2 && said.contains("there is no such file or folder"), "{said}");
    // A model does not come of itself, and takes no other's place.
    sandbox.good(&["transplant", "sparse.yaml", "--from", "runs/dense", "-o", "up"]);
    let before = fs::read(sandbox.path("up/model.safetensors")).unwrap();
    for line in [
        &["transplant", "sparse.yaml", "--from", "up", "-o", "up", "--force"][..],
        &["transplant", "dense.yaml", "--from", "runs/dense", "-o", "runs/dense", "--force"],
        &["transplant", "sparse.yaml", "--from", "runs/dense", "-o", "up"],
    ] {
        let said = sandbox.error(line);
        assert!(
            said.contains("a model does not come of itself") || said.contains("exists already"),
            "{said}"
        );
    }
    // Nor does a run take the place of what it begins from or is taught by.
    let heal = |stages: &str| format!("heal: {{{stages}stages: [{{match: logits}}]}}\n{DENSE}");
    for (spec, what, out) in [
        (from(&sparse(), "from: runs/dense"), "donor", "runs/dense"),
        (from(&sparse(), "from: runs/dense"), "donor", "runs"),
        (heal("teacher: runs/dense, "), "teacher", "runs/dense"),
        (
            format!("weights: {}\n{DENSE}", newest(&sandbox.path("runs/dense")).display()),
            "weights",
            "runs/dense",
        ),
    ] {
        sandbox.write("cycle.yaml", &spec);
        let (code, said) = sandbox.bad(&["train", "cycle.yaml", "--out", out, "--force"]);
        assert!(code == 2 && said.contains(&format!("which holds the {what} of this model")), "{said}");
    }
    assert_eq!(fs::read(sandbox.path("up/model.safetensors")).unwrap(), before);
    assert!(newest(&sandbox.path("runs/dense")).exists() && !sandbox.path("out").exists());
}

#[test]
fn a_table_comes_by_the_texts_of_tokens() {
    let sandbox = trained();
    // The same bytes, and some numbers after them that no text has.
    sandbox.write("large.yaml", &DENSE.replace("vocab: 256", "vocab: 300"));
    let said = sandbox.good(&["transplant", "large.yaml", "--from", "runs/dense", "-o", "large"]);
    assert!(said.contains("by token text, 256 of 300"), "{said}");
    let rows = |path: &str| {
        let file = Tensors::open(&sandbox.path(path)).unwrap();
        file.get("embed.weight").unwrap().unwrap().1
    };
    let run = newest(&sandbox.path("runs/dense")).join("model.safetensors");
    let run = run.strip_prefix(sandbox.path("")).unwrap().to_str().unwrap().to_string();
    assert_eq!(rows("large/model.safetensors")[..256 * 32], rows(&run)[..]);
}

#[test]
fn layers_of_the_least_influence_are_left_out() {
    let sandbox = trained();
    // Layers that were added and do nothing are those to leave out again.
    let deeper = from(&DENSE.replace("repeat: 2", "repeat: 4"), "from: runs/dense, depth: zero");
    sandbox.write("deeper.yaml", &deeper);
    sandbox.good(&["transplant", "deeper.yaml", "-o", "deeper"]);
    let json = sandbox.good(&["analyze", "deeper", "--sequences", "8", "--out", "inside", "--json"]);
    let analysis: Value = serde_json::from_str(&json).unwrap();
    let influence: Vec<f64> = analysis["observations"]["streams"]["influence"]
        .as_array()
        .unwrap()
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect();
    assert_eq!(influence.len(), 4);
    for (depth, influence) in influence.iter().enumerate() {
        assert_eq!(*influence < 1e-9, depth % 2 == 1, "{depth}: {influence}");
    }
    sandbox.good(&["transplant", "dense.yaml", "--from", "deeper", "--drop", "-o", "shallow"]);
    assert!(divergence(&sandbox, "shallow", "runs/dense") < 1e-9);
    // Layers that are equal add what is alike, and are tied.
    sandbox.good(&["transplant", "dense.yaml", "--from", "deeper", "--tie", "-o", "tied"]);
    let json = sandbox.good(&["analyze", "runs/dense", "--sequences", "8", "--importance", "--json"]);
    let analysis: Value = serde_json::from_str(&json).unwrap();
    let similarity = &analysis["observations"]["streams"]["similarity"];
    assert_eq!((similarity[0][0].as_f64(), similarity[0][1] == similarity[1][0]), (Some(1.0), true));
    let ranks = analysis["ranks"].as_array().unwrap();
    assert!(
        ranks.iter().any(|rank| rank["name"] == "layers.1.sa.out.weight" && rank["full"] == 32),
        "{ranks:?}"
    );
    assert!(ranks.iter().all(|rank| rank["effective"].as_f64() <= rank["full"].as_f64()), "{ranks:?}");
    // Four heads in each of two layers.
    assert_eq!(analysis["importance"].as_array().unwrap().len(), 8);
    let said = sandbox.error(&["transplant", "deeper.yaml", "--from", "deeper", "--drop", "-o", "out"]);
    assert!(said.contains("`transplant.depth` names them"), "{said}");
    sandbox.write("deepest.yaml", &DENSE.replace("repeat: 2", "repeat: 6"));
    let said = sandbox.error(&["transplant", "deepest.yaml", "--from", "deeper", "--drop", "-o", "out"]);
    assert!(said.contains("the model applies 6, the donor 4") && !sandbox.path("out").exists(), "{said}");
}

/// The donor whose heads become latents: queries and keys are not normalised.
fn with_heads() -> Sandbox {
    let heads = DENSE.replace("projection: none", "qk_norm: none, projection: none");
    let sandbox = Sandbox::with(&[("heads.yaml", &heads)]);
    sandbox.good(&["train", "heads.yaml", "--out", "runs/heads"]);
    sandbox
}

/// The same with latent attention.
fn with_latents(latent: &str) -> String {
    let own = format!("sa: {{sequence: {{heads: 4, head_size: 8, latent: {{{latent}}}}}}}");
    DENSE.replace("sa: {sequence: {heads: 4, kv_heads: 2, head_size: 8, projection: none}}", &own)
}

#[test]
fn heads_become_latents_and_are_the_donor_at_full_rank() {
    let sandbox = with_heads();
    let made = |name: &str, latent: &str, more: &[&str]| {
        sandbox.write(&format!("{name}.yaml"), &with_latents(latent));
        let spec = format!("{name}.yaml");
        let line = [&["transplant", &spec, "--from", "runs/heads", "-o", name, "--force"], more].concat();
        let output = sandbox.run(&line);
        let (out, notes) = texts(&output);
        assert!(output.status.success(), "{line:?}: {out}\n{notes}");
        out + &notes
    };
    // Values alone are factored where all of every head turns; they have 16 rows.
    let said = made("full", "kv: 16, turned: 8, value: 8, norm: none, keys: 2, pairs: high", &[]);
    assert!(said.contains("proved: ") && said.contains("factor A of rank 16 of keys and values"), "{said}");
    assert!(divergence(&sandbox, "full", "runs/heads") < 1e-9);
    // More is kept at a higher rank, and caches of latents write what the whole model does.
    let far = |kv: &str| {
        let said =
            made("part", &format!("kv: {kv}, turned: 4, value: 8, norm: none, keys: 2, pairs: uniform"), &[]);
        assert!(
            said.contains("not all turns that turned in the donor") && !said.contains("proved"),
            "{said}"
        );
        divergence(&sandbox, "part", "runs/heads")
    };
    let [low, high] = ["2", "24"].map(far);
    assert!(high < low, "{high} {low}");
    sandbox.good(&["verify", "part.yaml", "--only", "gradients,cached"]);
    // Pairs of most contribution, and the rank that keeps a share.
    let said = made(
        "chosen",
        "kv: 2, turned: 4, value: 8, norm: none, keys: 2, pairs: high",
        &["--pairs", "--rank", "0.99"],
    );
    assert!(said.contains("contribute most to scores") && said.contains("has latents of"), "{said}");
    let spec = sandbox.read("chosen/spec.yaml");
    assert!(!spec.contains("kv: 2,") && spec.contains("pairs: ["), "{spec}");
    assert!(divergence(&sandbox, "chosen", "runs/heads") < low);
    // It trains, writes, and leaves.
    sandbox.good(&["train", "chosen", "--out", "runs/chosen"]);
    sandbox.good(&["generate", "runs/chosen", "a", "-n", "2"]);
    sandbox.good(&["export", "hf", "runs/chosen", "-o", "hf"]);
    // Nothing to choose or to size is said.
    sandbox.write("same.yaml", &sandbox.read("heads.yaml"));
    for (flag, words) in
        [("--pairs", "none comes of heads of the donor"), ("--rank=0.5", "sizes the factors of a loop")]
    {
        let said = sandbox.error(&["transplant", "same.yaml", "--from", "runs/heads", flag, "-o", "out"]);
        assert!(said.contains(words) && !sandbox.path("out").exists(), "{said}");
    }
}
