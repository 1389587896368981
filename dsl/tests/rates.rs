//! Warm-up and schedules: what fits a run, what is warned of, and both spellings of points.

use dreamc_dsl::spec::Schedule;
use dreamc_dsl::{Diagnostics, Spec, Spelling, check, format, parse, show};

const MODEL: &str = "model m {\n vocab 7 hidden 4 context 4\n a = mlp { intermediate 4 }\n layer { a }\n}\n";

fn read(text: &str, spelling: Spelling) -> Result<(Spec, Vec<String>), Diagnostics> {
    let (spec, warnings) = check(&parse("spec", text, spelling)?, &[])?;
    Ok((spec, warnings.iter().map(|warning| warning.message.clone()).collect()))
}

/// A recipe in `.dream`, and its warnings.
fn train(recipe: &str) -> (Spec, Vec<String>) {
    read(&format!("{MODEL}train {{ {recipe} }}\n"), Spelling::Dream)
        .unwrap_or_else(|e| panic!("{recipe}: {e}"))
}

fn refusal(recipe: &str) -> String {
    let text = format!("{MODEL}train {{ {recipe} }}\n");
    read(&text, Spelling::Dream).map(|_| ()).expect_err(recipe).to_string()
}

#[test]
fn the_default_warmup_fits_the_run() {
    for (steps, warmup) in [(1, 0), (60, 6), (1000, 100), (5000, 500), (100_000, 500)] {
        let (spec, warnings) = train(&format!("steps {steps}"));
        assert_eq!((spec.train.warmup, warnings.len()), (warmup, 0), "{steps} steps");
    }
    // So a decay fits, too, where only the default stood in its way.
    assert_eq!(train("steps 100  schedule { kind wsd  decay 20 }").0.train.warmup, 10);
}

#[test]
fn a_warmup_that_is_written_and_does_not_fit_is_warned_of() {
    let (spec, warnings) = train("steps 60  warmup 500");
    assert_eq!(spec.train.warmup, 500);
    assert_eq!(
        warnings,
        ["the run of 60 steps ends within its warm-up of 500: the learning rate comes to 12 % of its peak"]
    );
    let (_, warnings) = train("steps 60  warmup 60");
    assert_eq!(warnings, ["the run of 60 steps is all warm-up: only its last step has the peak"]);
    for recipe in ["steps 60  warmup 59", "steps 1  warmup 1", "steps 60  warmup 0"] {
        assert!(train(recipe).1.is_empty(), "{recipe}");
    }
}

#[test]
fn lengths_are_shares_of_the_steps() {
    for (written, warmup) in [("10%", 6), ("0.25", 15), ("6", 6), ("6.0", 6), ("0.1%", 1), ("0", 0), ("1", 1)]
    {
        assert_eq!(train(&format!("steps 60  warmup {written}")).0.train.warmup, warmup, "{written}");
    }
    let (spec, _) = train("steps 60  schedule { kind wsd  decay 20% }");
    assert_eq!(spec.train.schedule, Schedule::Wsd { decay: 12, floor: 0.0 });
    assert!(refusal("steps 60  warmup 150%").contains("`warmup` is out of range: 150 %"));
    assert!(refusal("steps 60  warmup 2.5").contains("`warmup` is not a whole number: 2.5"));
    assert!(refusal("steps 60  schedule { kind wsd  decay 0 }").contains("a decay over no steps"));
}

#[test]
fn points_read_alike_in_both_spellings_and_show_as_steps() {
    let points = Schedule::Points(vec![(0, 0.0), (6, 1.0), (40, 1.0), (60, 0.1)]);
    let dream = format!("{MODEL}train {{ steps 60  schedule [[0, 0], [10%, 1], [40, 1], [100%, 0.1]] }}\n");
    let ast = parse("spec", &dream, Spelling::Dream).unwrap();
    let yaml = format(&ast, Spelling::Yaml).unwrap();
    let (spec, warnings) = read(&dream, Spelling::Dream).unwrap();
    assert_eq!((&spec.train.schedule, spec.train.warmup), (&points, 0));
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(read(&yaml, Spelling::Yaml).unwrap().0.train, spec.train, "{yaml}");
    for spelling in [Spelling::Dream, Spelling::Yaml] {
        let shown = show(&spec, spelling);
        assert_eq!(read(&shown, spelling).unwrap().0.train, spec.train, "{shown}");
    }
}

#[test]
fn points_that_draw_no_schedule_are_refused_where_they_stand() {
    for (recipe, message) in [
        ("schedule [[0, 0], [10%, 1], [5%, 1]]", "step 50 does not come after step 100, the point before"),
        ("schedule [[0, 1, 2]]", "this is no point of a schedule"),
        ("schedule [1, 2]", "this is no point of a schedule"),
        ("schedule [[0, 0], [100, 0]]", "the learning rate is 0 throughout"),
        ("schedule []", "the learning rate is 0 throughout"),
        ("schedule [[0, -1]]", "`schedule` is out of range: -1"),
        ("schedule [[0.5, 1], [150%, 1]]", "`schedule` is out of range: 150 %"),
        ("schedule [[0, 1]]  warmup 10", "`warmup` does not go with a schedule of points"),
    ] {
        let refusal = refusal(recipe);
        assert!(refusal.contains(message), "{recipe}: {refusal}");
    }
    let (_, warnings) = train("steps 60  schedule [[0, 1], [100, 0]]");
    assert_eq!(warnings, ["the run of 60 steps ends before this point"]);
}

#[test]
fn what_never_acts_in_a_short_run_is_warned_of() {
    let (_, warnings) = train("steps 100  patience 5  evaluate { every 20 }");
    assert_eq!(
        warnings,
        [
            "`patience` never stops a run of 100 steps: the last of 6 evaluations, one every 20 steps, is not before its end"
        ]
    );
    assert!(train("steps 121  patience 5  evaluate { every 20 }").1.is_empty());
    let (_, warnings) = train("steps 64  spike 6");
    assert_eq!(
        warnings,
        ["`spike` leaves nothing out of a run of 64 steps: a step is compared with 64 before it"]
    );
    assert!(train("steps 65  spike 6").1.is_empty() && train("steps 9  spike none").1.is_empty());
}
