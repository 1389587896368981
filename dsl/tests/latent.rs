//! Latent attention: what is not computed with it, and sizes that do not fit, each at its token.

use dreamc_dsl::spec::{Component, QkNorm};
use dreamc_dsl::{Spelling, check, parse};

/// The diagnostics of an attention with these keys; empty where it is right.
fn said(keys: &str) -> String {
    let model = "vocab: 7, hidden: 12, context: 4";
    let more = "b: {sequence: {heads: 2, head_size: 6, kv_from: a}}";
    let text = format!(
        "model: {{{model}, components: {{a: {{sequence: {{{keys}}}}}, {more}}}, body: [\"a > b\"]}}\n"
    );
    let ast = parse("spec.yaml", &text, Spelling::Yaml).unwrap();
    check(&ast, &[]).err().map_or(String::new(), |found| found.render(false))
}

#[test]
fn what_latent_attention_has_not_is_refused() {
    let plain = "heads: 2, head_size: 6, qk_norm: none";
    let latent = "latent: {query: 5, kv: 7, turned: 2, value: 4}";
    for (keys, message) in [
        (format!("{plain}, {latent}"), "`a` is latent, and its keys are not read by others"),
        (format!("{plain}, {latent}, bias: all"), "`bias` is not computed with `latent`"),
        (format!("{plain}, {latent}, gate: head"), "`gate` is not computed with `latent`"),
        (format!("{plain}, {latent}, value_residual: true"), "`value_residual` is not computed with"),
        (format!("{plain}, {latent}, depth_keys: true"), "`depth_keys` is not computed with `latent`"),
        (format!("{plain}, {latent}, kv_heads: 1"), "`latent` makes keys and values for every head"),
        (format!("heads: 2, head_size: 6, qk_norm: rms, {latent}"), "take `qk_norm` away"),
        (format!("{plain}, latent: {{kv: 7, turned: 3, value: 4}}"), "3 elements of a head of 6 cannot turn"),
        (format!("{plain}, latent: {{kv: 7, turned: 8, value: 4}}"), "8 elements of a head of 6 cannot turn"),
        (
            format!("{plain}, latent: {{kv: 7, turned: 2, value: 8}}"),
            "values of 8 are longer than heads of 6",
        ),
        (
            format!("{plain}, rope: {{base: 100, share: 0.75}}, latent: {{kv: 7, turned: 4, value: 4}}"),
            "a share of 0.75 turns 3 of 4 elements",
        ),
    ] {
        let found = said(&keys);
        assert!(found.contains(message), "{keys}:\n{found}");
    }
    assert_eq!(said(plain), "");
}

/// A key that it lacks needs no word.
#[test]
fn latent_alone_is_right() {
    let text = "model t { vocab 7 hidden 12 context 4 \
                a = sequence { heads 2 head_size 6 latent { query 5 kv 7 turned 2 value 4 } } a }";
    let ast = parse("spec.dream", text, Spelling::Dream).unwrap();
    let (spec, warnings) = check(&ast, &[]).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    let Component::Sequence(a) = &spec.model.components["a"] else { panic!("no attention") };
    assert_eq!(a.qk_norm, QkNorm::None);
    let written = text.replace("latent", "qk_norm rms latent");
    let error = check(&parse("spec.dream", &written, Spelling::Dream).unwrap(), &[]).unwrap_err();
    assert!(error.list.len() == 1 && error.to_string().contains("take `qk_norm` away"), "{error}");
}

/// Which pairs of a whole head turn: named, or listed for all heads of keys or for each.
#[test]
fn pairs_that_turn_are_those_of_a_head() {
    let pairs = |latent: &str, rope: &str| {
        let text = format!(
            "model t {{ vocab 7 hidden 12 context 4 a = sequence {{ heads 4 head_size 8 {rope} latent {{ kv 7 value 4 {latent} }} }} a }}"
        );
        check(&parse("spec.dream", &text, Spelling::Dream).unwrap(), &[]).map(|(spec, _)| {
            match &spec.model.components["a"] {
                Component::Sequence(a) => a.latent.clone().unwrap().pairs,
                _ => panic!("no attention"),
            }
        })
    };
    for (latent, expected) in [
        ("turned 4", vec![]),
        ("turned 4 pairs high", vec![vec![0, 1]]),
        ("turned 4 pairs low", vec![vec![2, 3]]),
        ("turned 4 pairs uniform", vec![vec![0, 2]]),
        ("turned 4 pairs [1, 3]", vec![vec![1, 3]]),
        ("turned 4 keys 2 pairs [[0, 1], [2, 3]]", vec![vec![0, 1], vec![2, 3]]),
        ("turned 4 keys 2 pairs [[0, 1], [0, 1]]", vec![vec![0, 1]]),
    ] {
        assert_eq!(pairs(latent, "").unwrap_or_else(|e| panic!("{latent}: {e}")), expected, "{latent}");
    }
    for (latent, rope, message) in [
        ("turned 4 pairs [0]", "", "`pairs` names 1 pairs, and 4 elements are 2"),
        ("turned 4 pairs [1, 0]", "", "these are no 2 of 4 pairs in their order"),
        ("turned 4 pairs [0, 4]", "", "these are no 2 of 4 pairs in their order"),
        ("turned 4 keys 4 pairs [[0, 1], [2, 3]]", "", "`pairs` has 2 lists for 4 heads of keys"),
        ("turned 4 keys 2 pairs [[0, 1], 2]", "", "one head has a list of pairs, and here is none"),
        ("turned 4 pairs some", "", "`some` is not a value of `pairs`"),
        ("turned 4 pairs high", "rope none", "there is no rotation whose pairs to choose"),
        ("turned 4 pairs high", "rope { base 10 share 0.25 }", "2 pairs of 1 cannot turn"),
        ("turned 4 keys 3", "", "4 heads cannot share 3 turned parts of keys"),
    ] {
        let found = pairs(latent, rope).unwrap_err();
        assert!(found.to_string().contains(message), "{latent}: {found}");
    }
}
