//! Overlays: what a short file changes of a model, and checkpoints that hold only what was trained.

mod support;

use dreamc_runtime::checkpoint::safetensors::Tensors;
use std::fs;
use support::house::{House, newest};

const BASE: &str = "\
model:
  name: small
  vocab: 256
  hidden: 16
  context: 64
  components:
    local: {sequence: {heads: 2, head_size: 8, window: 8}}
    global: {sequence: {heads: 2, head_size: 8}}
    ea: {experts: {count: 4, active: 2, intermediate: 64, query: 8}}
  body:
    - repeat: 2
      layers: [local > ea, global > ea]
data: {task: permutation, size: 4, max_steps: 2}
train: {steps: 4, batch: 4, sequence: 32, learning_rate: 1e-3, warmup: 2, precision: f32}
eval: {examples: 2, max_tokens: 4}
";

const ROUTERS: &str = "base: runs/small\ntrain: {only: [routers], steps: 4}\n";

fn house() -> House {
    House::with(&[("small.yaml", BASE)])
}

/// With a trained base.
fn trained() -> House {
    let house = house();
    house.good(&["train", "small.yaml", "--out", "runs/small"]);
    house
}

#[test]
fn an_overlay_changes_what_it_says_and_nothing_else() {
    let house = house();
    fs::create_dir_all(house.path("runs/small")).unwrap();
    house.write("runs/small/spec.yaml", BASE);
    house.write(
        "over.yaml",
        "base: runs/small\n\
         model:\n  components:\n    ea: {experts: {active: 3}}\n    global: {mlp: {intermediate: 32}}\n  body:\n    \
         - local > ea\n    - \"skip(threshold, capacity 0.5, penalty 0.1) { global > ea }\"\n\
         train: {only: [routers]}\n",
    );
    let shown = house.good(&["show", "over.yaml"]);
    let spec = dreamc_dsl::load(house.path("over.yaml"), &[]).unwrap().0;
    let base = dreamc_dsl::load(house.path("small.yaml"), &[]).unwrap().0;
    assert_eq!(spec.weights.as_deref(), Some("runs/small"));
    assert_eq!(spec.model.components["local"], base.model.components["local"]);
    let (dreamc_dsl::spec::Component::Experts(found), dreamc_dsl::spec::Component::Experts(before)) =
        (&spec.model.components["ea"], &base.model.components["ea"])
    else {
        panic!("{shown}")
    };
    assert_eq!(*found, dreamc_dsl::spec::Experts { active: 3, ..before.clone() });
    assert!(matches!(spec.model.components["global"], dreamc_dsl::spec::Component::Mlp(_)));
    assert_eq!(spec.model.body.len(), 2);
    assert!(shown.contains("skip(threshold") && shown.contains("weights: runs/small"), "{shown}");
    assert_eq!((spec.data, spec.train.steps), (base.data, 4));
    assert_eq!(spec.train.only, ["routers"]);

    // A specification is a base, too; its paths stay what they were.
    house.write(
        "runs/other.yaml",
        &BASE.replace("{task: permutation, size: 4, max_steps: 2}", "{text: book.txt}"),
    );
    house.write("over.yaml", "base: runs/other.yaml\nmodel: {name: other}\n");
    let shown = house.good(&["show", "over.yaml"]);
    assert!(shown.contains("text: runs/book.txt") && shown.contains("name: other"), "{shown}");
    assert!(!shown.contains("weights"), "{shown}");

    // Data of its own replace the base's, with the tokenizer that lies there.
    house.write("runs/small/tokenizer.json", "{}");
    house.write("over.yaml", "base: runs/small\ndata: {text: book.txt}\n");
    let shown = house.good(&["show", "over.yaml"]);
    assert!(
        shown.contains("tokenizer: runs/small/tokenizer.json") && !shown.contains("permutation"),
        "{shown}"
    );
}

#[test]
fn errors_of_an_overlay_point_into_it() {
    let house = house();
    let say = |text: &str| {
        house.write("over.yaml", text);
        String::from_utf8(house.run(&["check", "over.yaml"]).stdout).unwrap()
    };
    let missing = say("base: nowhere\n");
    assert!(missing.contains("there is no `nowhere`") && missing.contains("over.yaml:1:7"), "{missing}");
    fs::create_dir_all(house.path("empty")).unwrap();
    assert!(say("base: empty\n").contains("`empty` is not the folder of a model: it has no spec.yaml"));
    assert!(say("train: {steps: 3}\n").contains("`model` is missing"));
    fs::create_dir_all(house.path("runs/small")).unwrap();
    house.write("runs/small/spec.yaml", BASE);
    let unknown = say("base: runs/small\nmodel: {components: {ea: {experts: {activ: 3}}}}\n");
    assert!(unknown.contains("did you mean `active`?") && unknown.contains("over.yaml:2:"), "{unknown}");
    let twice = say("base: runs/small\ntrain: {steps: 3, steps: 4}\n");
    assert!(twice.contains("twice"), "{twice}");
    house.write("runs/small/spec.yaml", "base: .\n");
    assert!(say("base: runs/small\n").contains("more than 8 bases"));
}

#[test]
fn a_checkpoint_holds_only_what_was_trained_and_is_bound_to_its_base() {
    let house = trained();
    house.write("routers.yaml", ROUTERS);
    house.good(&["train", "routers.yaml", "--out", "runs/tuned"]);
    let artifact = newest(&house.path("runs/tuned")).join("model.safetensors");
    let (tuned, base) = (
        Tensors::open(&artifact).unwrap(),
        Tensors::open(&newest(&house.path("runs/small")).join("model.safetensors")).unwrap(),
    );
    assert!(tuned.entries().count() > 0 && tuned.entries().all(|(name, _)| name.contains(".router.")));
    assert!(tuned.bytes().len() < 20_000 && tuned.bytes().len() * 2 < base.bytes().len());
    let differs = |name: &str| tuned.stored(name).unwrap().bytes != base.stored(name).unwrap().bytes;
    assert!(tuned.entries().any(|(name, _)| differs(name)));

    // It is complete: what was not trained is the base's.
    house.write("ids.json", "[[1, 2, 3, 4, 5]]");
    house.good(&["probe", "runs/tuned", "--ids", "ids.json", "--weights", "-o", "probe.safetensors"]);
    let probe = Tensors::open(&house.path("probe.safetensors")).unwrap();
    for (name, _) in base.entries() {
        let from = if tuned.stored(name).is_some() { &tuned } else { &base };
        let found = probe.stored(&format!("weights.{name}")).unwrap();
        assert_eq!(found.bytes, from.stored(name).unwrap().bytes, "{name}");
    }
    house.good(&["generate", "runs/tuned", "a", "-n", "2"]);
    house.good(&["eval", "runs/tuned"]);

    // Another base is refused; the right one is taken from anywhere.
    house.good(&["train", "small.yaml", "--out", "runs/other", "--set", "train.seed=1"]);
    let line = ["generate", "runs/tuned", "a", "-n", "2", "--base"];
    let other = house.error(&[&line[..], &["runs/other"]].concat());
    assert!(other.contains("was trained on other weights than runs/other: BLAKE3"), "{other}");
    fs::rename(house.path("runs/small"), house.path("moved")).unwrap();
    let gone = house.error(&line[..5]);
    assert!(
        gone.contains("its base cannot be opened") && gone.contains("name the base with --base"),
        "{gone}"
    );
    house.good(&[&line[..], &["moved"]].concat());
}

#[test]
fn a_tuned_run_goes_on_to_the_same_bits() {
    let house = trained();
    house.write("routers.yaml", ROUTERS);
    house.good(&["train", "routers.yaml", "--out", "runs/a", "--set", "train.steps=6"]);
    house.good(&["train", "routers.yaml", "--out", "runs/b"]);
    house.good(&["resume", "runs/b", "--set", "train.steps=6"]);
    let bytes = |run: &str| fs::read(newest(&house.path(run)).join("model.safetensors")).unwrap();
    assert!(bytes("runs/a") == bytes("runs/b"));
}

#[test]
fn everything_trained_needs_no_base_any_more() {
    let house = trained();
    house.write("tune.yaml", "base: runs/small\ntrain: {steps: 2}\n");
    let begun = house.good(&["train", "tune.yaml", "--out", "runs/whole"]);
    assert!(!begun.contains("begin anew"), "{begun}");
    fs::remove_dir_all(house.path("runs/small")).unwrap();
    house.good(&["generate", "runs/whole", "a", "-n", "2"]);
}
