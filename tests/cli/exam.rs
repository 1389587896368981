//! Exams as their users meet them: planned, sat, killed and gone on with, reported, refused.

use crate::support::sandbox::{Sandbox, bits, metrics, texts};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

const MODEL: &str = "\
model:
  name: NAME
  vocab: 256
  hidden: 8
  context: 128
  components:
    sa: {sequence: {heads: 1, head_size: 8}}
    mlp: {mlp: {intermediate: 8}}
  body:
    - BODY
";

const SEEDS: [u64; 2] = [0, 1];

fn sandbox() -> Sandbox {
    let of = |name: &str, body: &str| MODEL.replace("NAME", name).replace("BODY", body);
    let (short, long) = (of("short", "sa > mlp"), of("long", "{repeat: 2, layers: [sa > mlp]}"));
    Sandbox::with(&[
        ("short.yaml", &short),
        ("long.yaml", &long),
        ("narrow.yaml", &short.replace("128", "48")),
    ])
}

/// An exam of two tasks that takes seconds.
fn line<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let line = ["exam", "short.yaml", "long.yaml", "--allow-unequal", "--tasks", "modular_sum,sorting"];
    let rest = ["--steps", "40", "--seeds", "2", "--out", out, "--threads", "1"];
    [&line[..], &rest, more].concat()
}

#[test]
fn an_exam_is_sat_killed_and_gone_on_with_to_the_same_bits() {
    let s = sandbox();
    let plan = s.good(&line("whole", &["--dry-run"]));
    for part in ["modular_sum", "sorting", "3 to 16 digits", "2 tasks, 2 arms, 2 seeds", "as measured here"] {
        assert!(plan.contains(part), "{part} is missing:\n{plan}");
    }
    assert!(!s.path("whole").exists());

    let out = s.good(&line("whole", &[]));
    assert!(out.contains("task 2 of 2: sorting") && out.contains("mean over tasks"), "{out}");
    let report = s.read("whole/report.md");
    for part in [
        "## Capabilities",
        "problems harder than any that was learned from",
        "## Against the baseline",
        "too few seeds",
        "`modular_sum`: exact match by digits",
        "## Which heads answer",
        "without one head",
        "`layers.0.sa` 0 (",
        "## Cost",
        "All arms trained at one rate",
        "† `long` does not agree",
    ] {
        assert!(report.contains(part), "{part} is missing:\n{report}");
    }
    assert!(s.path("whole/figures/sorting.svg").is_file());
    // The score is the mean over the lengths that were learned from, and over seeds.
    let score = |seed: u64| {
        let last = metrics(&s.path(&format!("whole/modular_sum/short-seed{seed}"))).pop().unwrap();
        let of = |d: &serde_json::Value| (d[0].as_u64() <= Some(16)).then(|| d[1].as_f64().unwrap());
        let all: Vec<f64> = last["by_difficulty"].as_array().unwrap().iter().filter_map(of).collect();
        // Of eight sums of three digits none may be held out.
        assert!((13..=14).contains(&all.len()));
        all.iter().sum::<f64>() / all.len() as f64
    };
    let mean = format!("{:.1} % (", 100.0 * (score(0) + score(1)) / 2.0);
    let row = report.lines().find(|l| l.starts_with("| `modular_sum` | counting |")).unwrap();
    assert!(row.contains(&mean), "{mean} is missing: {row}");

    // Killed in its second task, an exam goes on with it.
    let mut child =
        s.command(&line("killed", &[])).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while !s.path("killed/sorting/short-seed0/metrics.jsonl").exists() {
        assert!(begun.elapsed() < Duration::from_secs(240) && child.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!s.path("killed/report.md").exists());
    let out = s.good(&["exam", "killed", "--threads", "1"]);
    assert!(out.contains("4 runs were trained before"), "{out}");
    for task in ["modular_sum", "sorting"] {
        for run in ["short", "long"].iter().flat_map(|arm| SEEDS.map(|seed| format!("{arm}-seed{seed}"))) {
            let (one, other) =
                (s.path(&format!("whole/{task}/{run}")), s.path(&format!("killed/{task}/{run}")));
            assert_eq!(bits(&one, 40), bits(&other, 40), "{task} {run}");
            assert_eq!(metrics(&one), metrics(&other), "{task} {run}");
        }
    }
    // Every command that reads a comparison reads an exam.
    let runs = s.good(&["watch", "whole", "--once"]);
    assert!(runs.contains("8 of 8 runs at their end") && runs.contains("sorting: long, seed 1"), "{runs}");
    let before = s.read("whole/report.md");
    s.good(&["report", "whole"]);
    assert_eq!(s.read("whole/report.md"), before);
    // A task is a suite.
    let said = s.good(&["compare", "whole/sorting.suite.yaml", "--out", "whole/sorting", "--allow-unequal"]);
    assert!(said.contains("4 runs were trained before"), "{said}");
    // Another exam is kept out of the folder.
    let (code, error) = s.bad(&["exam", "short.yaml", "--steps", "40", "--out", "whole"]);
    assert!(code == 2 && error.contains("whole is an exam of"), "{error}");
    let (code, error) = s.bad(&line("whole", &["--rates", "1e-3"]));
    assert!(code == 2 && error.contains("is an exam of the rates of exams, and this one of"), "{error}");
}

#[test]
fn a_budget_is_split_and_what_does_not_fit_is_refused() {
    let s = sandbox();
    let exam = |more: &[&str]| {
        let all = [&["exam", "short.yaml", "--out", "out", "--threads", "1", "--dry-run"], more].concat();
        let (out, error) = texts(&s.run(&all));
        assert!(!s.path("out").exists());
        out + &error
    };
    // Time for much: every arm tunes its rate.
    let said = exam(&["--tasks", "sorting", "--budget", "10h", "--seeds", "1"]);
    assert!(said.contains("every arm tunes its rate"), "{said}");
    let said = exam(&["--tasks", "sorting", "--budget", "0.01s"]);
    assert!(said.contains("fewer than 20 show nothing: use --budget"), "{said}");
    let said = exam(&["--tasks", "sortin"]);
    assert!(said.contains("there is no such task; there are arithmetic, "), "{said}");
    assert!(exam(&["--tasks", "sorting,sorting"]).contains("names sorting twice"));
    assert!(exam(&["--budget", "10"]).contains("write a time with its unit"));
    assert!(exam(&["--rates", "0"]).contains("write a rate above 0"));
    // A context that is too short, with the one that would do.
    let narrow =
        |tasks: &str| s.error(&["exam", "narrow.yaml", "--out", "out", "--tasks", tasks, "--dry-run"]);
    let error = narrow("mqar");
    assert!(
        error.contains("mqar") && error.contains("the model's context has 48; use context 128"),
        "{error}"
    );
    let error = narrow("copying");
    assert!(error.contains("the model's context has 48; use context 64, or at most"), "{error}");
    // So of a vocabulary.
    s.write("few.yaml", &s.read("short.yaml").replace("vocab: 256", "vocab: 100"));
    let error = s.error(&["exam", "few.yaml", "--out", "out", "--dry-run"]);
    assert!(error.contains("the model's vocab is 100; set vocab to 256"), "{error}");
    // A folder of something else is left alone.
    std::fs::create_dir(s.path("mine")).unwrap();
    s.write("mine/thesis.txt", "mine");
    let error = s.error(&["exam", "short.yaml", "--out", "mine"]);
    assert!(error.contains("holds thesis.txt and is not the folder of an exam"), "{error}");
}

/// Arms that cost differently are matched before anything is trained.
#[test]
fn arms_are_matched_to_the_baseline() {
    let s = sandbox();
    let wide = MODEL
        .replace("NAME", "wide")
        .replace("BODY", "sa > mlp")
        .replace("intermediate: 8", "intermediate: 64");
    s.write("wide.yaml", &wide.replace("hidden: 8", "hidden: 32"));
    s.write(
        "slim.yaml",
        &wide.replace("hidden: 8", "hidden: 32").replace("64", "48").replace("wide", "slim"),
    );
    let all =
        ["exam", "slim.yaml", "--baseline", "wide.yaml", "--tasks", "sorting", "--steps", "20", "--dry-run"];
    let said = s.good(&all);
    assert!(said.contains("mlp.intermediate"), "{said}");
}

#[test]
fn a_suite_over_a_task_is_written_with_its_model() {
    let s = Sandbox::with(&[]);
    let said = s.good(&["new", "exam", "mine"]);
    assert!(said.contains("dreamc compare mine.suite.yaml"), "{said}");
    s.good(&["check", "mine.suite.yaml"]);
    let out = s.good(&["compare", "mine.suite.yaml", "--out", "out", "--dry-run"]);
    assert!(out.contains("mine-twice") && !s.path("out").exists(), "{out}");
    for name in ["mine", "mine.dream"] {
        let (code, error) = s.bad(&["new", "exam", name]);
        assert!(code == 2 && error.contains("is there already"), "{error}");
    }
    s.write("other.suite.yaml", "mine");
    assert!(s.error(&["new", "exam", "other"]).contains("other.suite.yaml is there already"));
    assert!(!s.path("other.dream").exists());
}
