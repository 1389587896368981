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
        (format!("{plain}, latent: {{kv: 7, turned: 6, value: 4}}"), "6 elements of a head of 6 cannot turn"),
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
