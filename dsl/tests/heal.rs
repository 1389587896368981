//! A teacher and its stages: both spellings read alike, and mistakes have a place.

use dreamc_dsl::spec::{Heal, Lesson, Stage};
use dreamc_dsl::{Diagnostics, Spec, Spelling, check, format, parse, show};

const MODEL: &str = "model m {\n vocab 7 hidden 4 context 4\n a = mlp { intermediate 4 }\n layer { a }\n}\ntrain { steps 3000 }\n";

fn read(text: &str, spelling: Spelling) -> Result<Spec, Diagnostics> {
    Ok(check(&parse("spec", text, spelling)?, &[])?.0)
}

fn heal(keys: &str) -> Result<Spec, Diagnostics> {
    read(&format!("heal {{ {keys} }}\n{MODEL}"), Spelling::Dream)
}

#[test]
fn both_spellings_read_alike() {
    let keys = "teacher \"runs/a\" cache 2GB stages [{ match layers steps 500 }, { match [logits, \"layers.0.a.out\"] \
                from [logits, \"layers.1.b.out\"] weight [1, 0.1] temperature 2 top 5 loss 0.5 steps 2000 }, { match logits }]";
    let spec = heal(keys).unwrap();
    let lesson =
        |to: &str, from: Option<&str>, weight| Lesson { to: to.into(), from: from.map(String::from), weight };
    let stage = |matches, (temperature, top), loss, steps| Stage { matches, temperature, top, loss, steps };
    let expected = Heal {
        teacher: Some("runs/a".into()),
        cache: Some(2_000_000_000),
        stages: vec![
            stage(vec![lesson("layers", None, 1.0)], (1.0, None), 0.0, Some(500)),
            stage(
                vec![lesson("logits", None, 1.0), lesson("layers.0.a.out", Some("layers.1.b.out"), 0.1)],
                (2.0, Some(5)),
                0.5,
                Some(2000),
            ),
            stage(vec![lesson("logits", None, 1.0)], (1.0, None), 0.0, None),
        ],
    };
    assert_eq!(spec.heal, Some(expected));
    let stage = |step| spec.heal.as_ref().unwrap().stage(step).map(|stage| stage.matches[0].to.clone());
    assert_eq!(
        [1, 500, 501, 2500, 2501].map(|step| stage(step).unwrap()),
        ["layers", "layers", "logits", "logits", "logits"]
    );
    for spelling in [Spelling::Yaml, Spelling::Dream] {
        let shown = show(&spec, spelling);
        assert_eq!(read(&shown, spelling).unwrap_or_else(|e| panic!("{e}\n{shown}")), spec, "{shown}");
    }
    let ast = parse("spec", &format!("heal {{ {keys} }}\n{MODEL}"), Spelling::Dream).unwrap();
    let yaml = format(&ast, Spelling::Yaml).unwrap();
    assert_eq!(read(&yaml, Spelling::Yaml).unwrap().heal, spec.heal, "{yaml}");
    let issue = "heal: {teacher: runs/base, stages: [{match: layers, steps: 500}, {match: logits, temperature: 2, steps: 2000}]}\n";
    let yaml = format!(
        "{issue}{}",
        format(&parse("spec", MODEL, Spelling::Dream).unwrap(), Spelling::Yaml).unwrap()
    );
    let spec = read(&yaml, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}\n{yaml}"));
    let heal = spec.heal.unwrap();
    assert_eq!(
        (heal.stage(2500).is_some(), heal.stage(2501)),
        (true, None),
        "no teacher behind the last stage"
    );
}

#[test]
fn mistakes_are_refused_where_they_stand() {
    for (keys, message) in [
        ("teacher \"a\" stages []", "there are no stages"),
        ("stages [{ match logits }]", "there is no teacher"),
        ("teacher \"a\" stages [{ steps 5 }]", "`match` is missing in stage"),
        ("teacher \"a\" stages [{ match [] }]", "`match` is empty"),
        (
            "teacher \"a\" stages [{ match logits }, { match layers }]",
            "no stage comes after one without `steps`",
        ),
        (
            "teacher \"a\" stages [{ match logits steps 4000 }]",
            "the stages take 4000 steps, and training has 3000",
        ),
        ("teacher \"a\" stages [{ match layers temperature 2 }]", "`temperature` is of logits"),
        ("teacher \"a\" stages [{ match layers top 2 }]", "`top` is of logits"),
        ("teacher \"a\" stages [{ match logits temperature 0 }]", "`temperature` is out of range"),
        ("teacher \"a\" stages [{ match [logits, logits] }]", "`logits` is matched twice"),
        ("teacher \"a\" stages [{ match logits from \"head.norm\" }]", "the teacher's own logits or layers"),
        (
            "teacher \"a\" stages [{ match [logits, layers] weight [1, 2, 3] }]",
            "`weight` has 3 entries, and `match` 2",
        ),
        ("teacher \"a\" stages [{ match logits weight -1 }]", "`weight` is out of range"),
        ("teacher \"a\" cache lots stages [{ match logits }]", "is no amount of memory"),
        ("teecher \"a\" stages [{ match logits }]", "did you mean `teacher`?"),
    ] {
        let error = heal(keys).map(|_| ()).expect_err(keys).to_string();
        assert!(error.contains(message) && error.contains("spec:1:"), "{keys}: {error}");
    }
}

#[test]
fn preferences_and_a_teacher_are_not_learned_from_at_once() {
    let text = format!("heal {{ teacher \"runs/a\" stages [{{ match logits }}] }}\n{MODEL}");
    let text = text.replace("train { steps 3000 }", "train { steps 3000 dpo { beta 0.1 } }");
    let said = read(&text, Spelling::Dream).unwrap_err().to_string();
    assert!(said.contains("from preferences or from a teacher, not from both"), "{said}");
}
