//! Weights from another architecture: both spellings read alike, and mistakes have a place.

use dreamc_dsl::spec::{Depth, How, Move, Transplant};
use dreamc_dsl::{Diagnostics, Spec, Spelling, check, format, parse, show};

const MODEL: &str = "model m {\n vocab 7 hidden 4 context 4\n a = mlp { intermediate 4 }\n layer { a }\n}\n";

fn read(text: &str, spelling: Spelling) -> Result<Spec, Diagnostics> {
    Ok(check(&parse("spec", text, spelling)?, &[])?.0)
}

fn transplant(keys: &str) -> Result<Spec, Diagnostics> {
    read(&format!("transplant {{ {keys} }}\n{MODEL}"), Spelling::Dream)
}

#[test]
fn both_spellings_read_alike() {
    let keys = "from \"runs/a\"  depth [0, [1, 2], 3]  map [{ to \"layers.*.a\" from \"layers.*.b\" noise 0.01 }, \
                { to \"embed\" how fresh }, { to \"layers.0.a.up\" from [\"layers.0.b\", \"layers.1.b\"] how copy }]";
    let spec = transplant(keys).unwrap();
    let entry = |to: &str, from: &[&str], how, noise| Move {
        to: to.into(),
        from: from.iter().map(|from| from.to_string()).collect(),
        how,
        noise,
    };
    let expected = Transplant {
        from: Some("runs/a".into()),
        depth: Some(Depth::Given(vec![vec![0], vec![1, 2], vec![3]])),
        map: vec![
            entry("layers.*.a", &["layers.*.b"], None, 0.01),
            entry("embed", &[], Some(How::Fresh), 0.0),
            entry("layers.0.a.up", &["layers.0.b", "layers.1.b"], Some(How::Copy), 0.0),
        ],
    };
    assert_eq!(spec.transplant, Some(expected));
    for spelling in [Spelling::Yaml, Spelling::Dream] {
        let shown = show(&spec, spelling);
        assert_eq!(read(&shown, spelling).unwrap_or_else(|e| panic!("{e}\n{shown}")), spec, "{shown}");
    }
    let ast = parse("spec", &format!("transplant {{ {keys} }}\n{MODEL}"), Spelling::Dream).unwrap();
    let yaml = format(&ast, Spelling::Yaml).unwrap();
    assert_eq!(read(&yaml, Spelling::Yaml).unwrap().transplant, spec.transplant, "{yaml}");
    for (word, depth) in [
        ("spread", Depth::Spread),
        ("stack", Depth::Stack),
        ("zero", Depth::Zero),
        ("interpolate", Depth::Interpolate),
        ("average", Depth::Average),
    ] {
        let spec = transplant(&format!("depth {word}")).unwrap();
        assert_eq!(spec.transplant.as_ref().unwrap().depth, Some(depth));
        assert_eq!(read(&show(&spec, Spelling::Yaml), Spelling::Yaml).unwrap(), spec);
    }
}

#[test]
fn mistakes_are_refused_where_they_stand() {
    for (keys, message, place) in [
        ("depth deep", "`deep` is not a value of `depth`", "1:20"),
        ("depth []", "`depth` is empty", "1:20"),
        ("depth [0, []]", "these are no layers", "1:24"),
        ("depth [0, -1]", "`depth` is too small: -1", "1:24"),
        ("map [{ from \"a\" }]", "`to` is missing in move", "1:19"),
        ("map [{ to \"a\" how paste }]", "`paste` is not a value of `how`", "1:32"),
        ("map [{ to \"a\" noise -1 }]", "`noise` is out of range: -1", "1:34"),
        ("map [{ to \"a\" from \"b\" how zero }]", "nothing comes from the donor this way", "1:33"),
        ("map [{ to \"a.*\" from \"*.*\" }]", "has more `*` than `a.*`", "1:35"),
        ("form \"a\"", "did you mean `from`?", "1:14"),
    ] {
        let error = transplant(keys).map(|_| ()).expect_err(keys).to_string();
        assert!(error.contains(message) && error.contains(&format!("spec:{place}")), "{keys}: {error}");
    }
}
