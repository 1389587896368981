//! `dreamc fit` as people and programs see it.

use std::process::Command;

/// Exit code, standard output and standard error of `dreamc fit` in `examples/`.
fn fit(arguments: &[&str]) -> (Option<i32>, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_dreamc"))
        .arg("fit")
        .args(arguments)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples"))
        .output()
        .expect("starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (out.status.code(), text(out.stdout), text(out.stderr))
}

/// The example's losses were made with these constants and 0.3 % noise.
#[test]
fn the_example_gives_its_constants_back() {
    let (code, out, error) =
        fit(&["scaling-synthetic.csv", "--baseline", "layered", "--resamples", "200", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let arms: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&arms[0]["arm"], &arms[1]["arm"]), (&"layered".into(), &"looped".into()));
    assert_eq!(
        (&arms[0]["law"]["Ok"]["law"], &arms[1]["law"]["Ok"]["law"]),
        (&"plain".into(), &"loop".into())
    );
    for (arm, name, truth) in [(0, "alpha", 0.34), (0, "beta", 0.28), (1, "alpha", 0.34), (1, "phi", 0.46)] {
        let constants = arms[arm]["law"]["Ok"]["constants"].as_array().expect("a list");
        let c = constants.iter().find(|c| c["name"] == name).expect(name);
        let number = |key: &str| c[key].as_f64().expect("a number");
        assert!(number("low") <= truth && truth <= number("high"), "{c}");
        assert!((number("value") - truth).abs() < 0.05, "{c}");
    }
    assert_eq!(arms[1]["speedup"].as_array().map(Vec::len), Some(5));
}

#[test]
fn mistakes_are_named() {
    let (code, _, error) = fit(&["scaling-synthetic.csv", "--baseline", "la"]);
    assert_eq!(code, Some(2));
    assert_eq!(error, "error: scaling-synthetic.csv has no arm `la`; there are layered, looped\n");
    let (code, _, error) = fit(&["tiny-la.yaml"]);
    assert_eq!(code, Some(2));
    assert!(error.starts_with("error: tiny-la.yaml, line 3: unknown field `model:`"), "{error}");
}

#[test]
fn tables_that_hold_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::write(at("empty"), "").unwrap();
    std::fs::write(at("header"), "arm,params,tokens,flops,loss\n").unwrap();
    std::fs::write(at("bytes"), b"\x00\xff\xfe").unwrap();
    for name in ["empty", "header", "bytes"] {
        let (code, out, error) = fit(&[&at(name)]);
        assert!(code == Some(2) && out.is_empty() && error.contains("has no runs"), "{name}: {error}");
    }
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let (code, _, error) = fit(&[&at("pipe")]);
    assert!(code == Some(2) && error.contains("is a pipe or a device"), "{error}");
    let (code, _, error) = fit(&["scaling-synthetic.csv", "--resamples", "99999999999"]);
    assert!(code == Some(2) && error.contains("--resamples"), "{error}");
}
