//! Rates that carry from size to size, as people and programs see them.

use crate::support::sandbox::Sandbox;

const MODEL: &str = "model:\n  name: rates\n  vocab: 256\n  hidden: 32\n  context: 16\n  components:\n    sa: {sequence: {heads: 2, \
                     kv_heads: 1, head_size: 16}}\n    mlp: {mlp: {intermediate: 48}}\n  body: [{repeat: 2, layers: [\"sa > mlp\"]}]\n\
                     data: {task: permutation, max_steps: 2}\ntrain: {steps: 3, batch: 2, transfer: {rule: mup, width: 16, depth: 1, sizes: \
                     {sa.heads: 2, sa.kv_heads: 1, sa.head_size: 4}}}\n";

#[test]
fn rates_are_printed_with_their_reasons() {
    let sandbox = Sandbox::with(&[("model.yaml", MODEL)]);
    let out = sandbox.good(&["show", "model.yaml", "--rates"]);
    for part in [
        "mup, rate",
        "width ×2, layers ×2",
        "layers.0.mlp.down.weight",
        "ends a branch: layers ×2",
        "sa.scale",
        "1/d for heads",
    ] {
        assert!(out.contains(part), "{part}\n{out}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&sandbox.good(&["show", "model.yaml", "--rates", "--json"])).unwrap();
    let lines = json["lines"].as_array().unwrap();
    let line = |name: &str| lines.iter().find(|line| line["weight"] == name).unwrap();
    assert_eq!((&line("head.weight")["role"], &line("head.weight")["rate"]), (&"output".into(), &0.5.into()));
    assert_eq!(line("embed.weight")["rate"], 1.0);
    // The model is printed with its multiplier, and reads back as the same.
    let shown = sandbox.good(&["show", "model.yaml"]);
    assert!(shown.contains("scale: 0.125") && shown.contains("sizes: {sa.heads: 2"), "{shown}");
    sandbox.write("again.yaml", &shown);
    assert_eq!(sandbox.good(&["show", "again.yaml"]), shown);
    let dream = sandbox.good(&["show", "model.yaml", "--to", "dream"]);
    sandbox.write("again.dream", &dream);
    assert_eq!(sandbox.good(&["show", "again.dream"]), shown);
}

#[test]
fn transfers_are_checked_and_bad_bases_refused_at_their_token() {
    let sandbox = Sandbox::with(&[("model.yaml", MODEL)]);
    let out = sandbox.good(&["check-transfer", "model.yaml"]);
    for part in ["over widths", "by the size of heads", "over depths", "sa.out", "logits", "flat"] {
        assert!(out.contains(part), "{part}\n{out}");
    }
    let rule = |set: &str| sandbox.bad(&["check-transfer", "model.yaml", "--set", set]);
    // One rate for all sizes: the line that is off names a weight.
    let output = sandbox.run(&["check-transfer", "model.yaml", "--set", "train.transfer.rule=standard"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("NOT FLAT: ") && said.contains(".weight"), "{said}");
    let (code, error) = rule("train.transfer={rule: mup, width: 5, depth: 1}");
    assert!(code == 1 && error.contains("no whole number in proportion at 5"), "{error}");
    let (code, error) = rule("train.transfer={rule: mup, width: 16, depth: 1, sizes: {sa.layers: 2}}");
    assert!(code == 1 && error.contains("the model has no size `sa.layers`"), "{error}");
}

/// A part without a known rule is reported where people look: by `check` and `train` as a warning
/// at its token, by `compare` for each arm.
#[test]
fn what_no_rule_is_known_of_is_a_warning_at_its_token() {
    let model = MODEL.replace("context: 16", "context: 32");
    let written = model.replace("head_size: 16}", "head_size: 16, scale: 0.3}");
    let sandbox = Sandbox::with(&[("model.yaml", &model), ("written.yaml", &written)]);
    let checked = sandbox.good(&["check", "written.yaml"]);
    for part in
        ["warning[no-rule]", "`sa.scale`: it is written as 0.3, and is 0.125 by the rule", "written.yaml:7:"]
    {
        assert!(checked.contains(part), "{part}\n{checked}");
    }
    let said = |line: &[&str]| {
        let output = sandbox.run(line);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let trained = said(&["train", "written.yaml", "--dry-run"]);
    assert!(trained.contains("warning[no-rule]"), "{trained}");
    let compared = said(&["compare", "model.yaml", "written.yaml", "--allow-unequal", "--dry-run"]);
    assert_eq!(compared.matches("warning[no-rule]").count(), 1, "{compared}");
    // A depth that the body does not make, and an optimizer without a rule.
    let depth = "train.transfer={rule: mup, width: 16, depth: 0, sizes: {sa.heads: 2, sa.kv_heads: 1, sa.head_size: 4}}";
    let (code, error) = sandbox.bad(&["show", "model.yaml", "--set", depth]);
    assert!(code == 1 && !error.is_empty(), "{error}");
    let error = sandbox.error(&["show", "model.yaml", "--set", "train.optimizer=muonh"]);
    assert!(error.contains("`mup` has no rule for `muonh`") && error.contains("`sa`"), "{error}");
}

/// Bad input: each is refused at its token, or warned of, with the name of the weight or of its
/// component, and what would be right.
#[test]
fn bad_input_names_the_weight_and_a_way_out() {
    let defined = MODEL
        .replace("mlp: {mlp: {intermediate: 48}}", "gd: {gated_delta: {heads: 4}}")
        .replace("sa > mlp", "sa > gd");
    let sandbox = Sandbox::with(&[("model.yaml", MODEL), ("defined.yaml", &defined)]);
    let said = |file: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", *set]);
        let line: Vec<&str> = ["check", file].into_iter().chain(sets).collect();
        let output = sandbox.run(&line);
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.success(), text.concat())
    };
    let base = |width: u64, depth: u64, sizes: &str| {
        format!("train.transfer={{rule: mup, width: {width}, depth: {depth}, sizes: {{{sizes}}}}}")
    };
    let heads = "sa.heads: 2, sa.kv_heads: 1, sa.head_size: 4";
    // A base of another topology is a warning, with the weights that it is about.
    let (good, text) =
        said("model.yaml", &["model.body=[{repeat: 2, layers: [sa, mlp]}]", &base(16, 3, heads)]);
    assert!(good, "{text}");
    for part in ["warning[no-rule]", "another topology", "none makes 3 of it", "`sa.norm.weight`"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let errors: [(&str, Vec<String>, &[&str]); 7] = [
        // Heads that are no whole number at the base.
        ("model.yaml", vec![base(5, 1, "")], &["`sa.heads` is 2", "no whole number", "sizes: {sa.heads: …}"]),
        // Groups of heads that do not divide.
        (
            "model.yaml",
            vec![base(16, 1, "sa.heads: 3, sa.kv_heads: 2")],
            &["the base breaks a rule of the language", "`sa`", "3 heads"],
        ),
        // Heads of a definition that are no whole size.
        ("defined.yaml", vec![base(12, 1, heads)], &["the base breaks a rule of the language", "`gd`"]),
        // Optimizers without a rule.
        (
            "model.yaml",
            vec![base(16, 1, heads), "train.optimizer=muonh".into()],
            &["`mup` has no rule for `muonh`", "`sa`", "`hyperp`"],
        ),
        (
            "model.yaml",
            vec![
                base(16, 1, heads).replace("mup", "umup"),
                "train.optimizer={kind: sgd, momentum: 0.9}".into(),
            ],
            &["`umup` has no rule", "the matrices of `sa`", "`optimizer: adamw`"],
        ),
        (
            "model.yaml",
            vec![base(16, 1, heads).replace("mup", "umup"), "train.optimizer=muon".into()],
            &["`umup` has no rule", "whole matrices"],
        ),
        (
            "model.yaml",
            vec![format!(
                "train.transfer={{rule: hyperp, width: 16, depth: 1, tokens: 100, sizes: {{{heads}}}}}"
            )],
            &["`hyperp` is about matrices of a fixed norm", "muonh"],
        ),
    ];
    for (file, sets, parts) in errors {
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let (good, text) = said(file, &sets);
        assert!(!good, "{sets:?}\n{text}");
        for part in parts {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}

/// `--rates` and `explain` of a component that is written as formulas.
#[test]
fn rates_of_definitions_are_printed() {
    let defined = MODEL
        .replace("mlp: {mlp: {intermediate: 48}}", "gd: {gated_delta: {heads: 4}}")
        .replace("sa > mlp", "sa > gd");
    let sandbox = Sandbox::with(&[("defined.yaml", &defined)]);
    let out = sandbox.good(&["show", "defined.yaml", "--rates"]);
    for part in
        ["layers.0.gd.q.weight", "layers.0.gd.b.weight", "to a size that stays", "filter", "ends a branch"]
    {
        assert!(out.contains(part), "{part}\n{out}");
    }
    let unit = sandbox.good(&["show", "defined.yaml", "--rates", "--set", "train.transfer.rule=umup"]);
    for part in ["umup, rate", "fan in 32", "a row of 32 is looked up", "2 layers"] {
        assert!(unit.contains(part), "{part}\n{unit}");
    }
}
