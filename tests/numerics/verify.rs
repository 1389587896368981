//! `dreamc verify` over everything there is: examples, golden models, random specifications, and
//! files of what it found once.

use crate::support::minimise::minimise;
use crate::support::{load, models, root, specs};
use dreamc_compiler::random;
use dreamc_device::Device;
use dreamc_device::ptx::{Options, PtxDevice, Schedule};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Component, Matrices, OptimizerKind, Transfer, TransferRule};
use dreamc_verify::{Compiler, Proved, Report, Task, Verdict, verify};
use indexmap::IndexMap;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// All proofs of a specification.
fn prove(spec: &Spec, seed: u64, only: &[&str], devices: &[(String, &dyn Device)]) -> Report {
    let only: Vec<String> = only.iter().map(|s| s.to_string()).collect();
    let task = Task { spec, weights: None, seed, only: &only, devices, pipeline: &Compiler, ranks: 1 };
    verify(&task, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", spec.model.name))
}

#[test]
fn every_example_keeps_every_promise() {
    let begun = Instant::now();
    let examples = models([specs("examples"), specs("examples/published"), specs("examples/zoo")].concat());
    for (name, spec) in &examples {
        let report = prove(spec, 1, &[], &[]);
        println!("{name}: {:.1} s", report.seconds);
        assert!(report.holds(), "{name}\n{report}");
        assert_eq!(report.proofs.len(), 14);
        for proof in &report.proofs {
            let nothing = matches!(proof.verdict, Verdict::Nothing { .. });
            let may = match proof.proof {
                "plain" | "coordinates" | "memory" => true,
                // A definition of it reads a value of a component by its name.
                "names" => name.ends_with("x0-scaled.dream"),
                _ => false,
            };
            assert!(!nothing || may, "{name}\n{report}");
            assert!(nothing || proof.checks > 0, "{name}\n{report}");
        }
    }
    println!("{} models, {:.1} s", examples.len(), begun.elapsed().as_secs_f64());
}

/// A number from the environment.
fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Some each time it is asked for:
/// `DREAMC_SPECS=500 DREAMC_SEED=1000 cargo test --test numerics verify::random`. A failure is made
/// as small as it gets, printed, and left in the folder `DREAMC_FOUND`, to be kept in
/// `tests/regressions`.
#[test]
fn random_specifications_keep_every_promise() {
    let (specs, first) = (from_environment("DREAMC_SPECS", 25), from_environment("DREAMC_SEED", 0));
    random_ones(specs, first, 0, &random::spec, &|_| vec![]);
}

/// The same of specifications with a random definition:
/// `DREAMC_SPECS=500 DREAMC_SEED=1000 cargo test --test numerics verify::random_definitions`.
#[test]
#[ignore = "minutes"]
fn random_definitions_keep_every_promise() {
    let (specs, first) = (from_environment("DREAMC_SPECS", 12), from_environment("DREAMC_SEED", 0));
    random_ones(specs, first, 0, &random::definition::spec, &|_| vec![]);
}

/// The same specifications, and those with a random definition, trained by four ranks with all of
/// the model, with a part of the states, and with a part of the weights:
/// `DREAMC_SPECS=99 cargo test --test numerics verify::random_specifications_train`.
#[test]
fn random_specifications_train_over_ranks() {
    let (specs, first) = (from_environment("DREAMC_SPECS", 4), from_environment("DREAMC_SEED", 0));
    random_ones(specs, first, 0, &random::spec, &|_| vec!["ranks"]);
    random_ones(specs, first, 0, &random::definition::spec, &|_| vec!["ranks"]);
}

/// The same of specifications that have experts, which four ranks share in teams of two and four,
/// alone and with states and weights cut:
/// `DREAMC_SPECS=9 cargo test --test numerics verify::random_mixtures`.
#[test]
fn random_mixtures_train_over_ranks_that_share_experts() {
    let (specs, first) = (from_environment("DREAMC_SPECS", 3), from_environment("DREAMC_SEED", 0));
    let mixture = |spec: &Spec| spec.model.components.values().any(|c| matches!(c, Component::Experts(_)));
    // Of each hundred seeds the first whose specification has some.
    let draw = |seed: u64| {
        let seeds = (100 * seed + 50..).map(random::spec);
        seeds.into_iter().find(mixture).expect("one of them has experts")
    };
    random_ones(specs, first, 0, &draw, &|_| vec!["ranks"]);
}

/// A hundred random definitions. Of each one proof, by turns, so that every proof sees as many of
/// every kind; the proof of the formulas, which is dearest, sees every twelfth.
#[test]
fn a_hundred_random_definitions_keep_a_promise_each() {
    const TURNS: [&str; 12] = [
        "formulas",
        "cached",
        "counts",
        "rewritten",
        "devices",
        "batch",
        "names",
        "causal",
        "gradients",
        "resume",
        "plain",
        "threads",
    ];
    let (specs, first) = (from_environment("DREAMC_SPECS", 100), from_environment("DREAMC_SEED", 0));
    random_ones(specs, first, 0, &random::definition::spec, &|seed| vec![TURNS[seed as usize % 12]]);
}

/// Proves specifications of seeds. At most `refusable` of them may be refused by name as not
/// compiled yet; each gets the proofs of its seed, or all where there are none.
fn random_ones(
    specs: u64,
    first: u64,
    refusable: u64,
    draw: &dyn Fn(u64) -> Spec,
    proofs: &dyn Fn(u64) -> Vec<&'static str>,
) {
    println!("DREAMC_SPECS={specs} DREAMC_SEED={first}");
    let begun = Instant::now();
    let (mut proved, mut unproved, mut checks, mut failed) = (0, 0, 0, vec![]);
    let (mut took, mut all, mut refused) = (BTreeMap::new(), 0.0, 0);
    for seed in first..first + specs {
        let spec = draw(seed);
        let only = |names: &[&str], spec: &Spec| {
            let only: Vec<String> = names.iter().map(|s| s.to_string()).collect();
            let ranks = if names.contains(&"ranks") { 4 } else { 1 };
            let pipeline = &Compiler;
            let task = Task { spec, weights: None, seed, only: &only, devices: &[], pipeline, ranks };
            verify(&task, &mut |_| {})
        };
        match only(&proofs(seed), &spec) {
            Ok(report) if report.holds() => {
                proved += report.proofs.iter().filter(|p| p.verdict == Verdict::Proved).count();
                unproved += report.unproved();
                checks += report.proofs.iter().map(|p| p.checks).sum::<u64>();
                report.proofs.iter().for_each(|p| *took.entry(p.proof).or_insert(0.0) += p.seconds);
                all += report.seconds;
            }
            Err(error) if refused < refusable && error.to_string().contains("cannot be compiled yet") => {
                println!("seed {seed}: {error}");
                refused += 1;
            }
            result => {
                // As it was drawn, since a smaller one may fail for another reason.
                let text = dreamc_dsl::show(&spec, dreamc_dsl::Spelling::Yaml);
                match &result {
                    Ok(report) => println!("seed {seed}, as drawn:\n{report}\n{text}"),
                    Err(error) => println!("seed {seed}, as drawn: {error}\n{text}"),
                }
                let names: Vec<&str> = match &result {
                    Ok(report) => {
                        let of = |p: &&Proved| matches!(p.verdict, Verdict::Failed { .. });
                        report.proofs.iter().filter(of).map(|p| p.proof).take(1).collect()
                    }
                    Err(_) => vec![],
                };
                let fails = |spec: &Spec| match only(&names, spec) {
                    Ok(report) => !report.holds() && result.is_ok(),
                    Err(_) => result.is_err(),
                };
                let small = minimise(&spec, 400, &fails);
                let text = dreamc_dsl::show(&small, dreamc_dsl::Spelling::Yaml);
                let why = match only(&names, &small) {
                    Ok(report) => report.to_string(),
                    Err(error) => error.to_string(),
                };
                println!("seed {seed}, made smaller:\n{why}\n{text}");
                if let Ok(folder) = std::env::var("DREAMC_FOUND") {
                    std::fs::write(PathBuf::from(folder).join(format!("{seed}.yaml")), &text).unwrap();
                }
                failed.push(seed);
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{specs} specifications, {refused} refused, {proved} proofs, {unproved} not proved, {checks} comparisons, {seconds:.1} s"
    );
    let proofs: f64 = took.values().sum();
    let took: Vec<String> = took.iter().map(|(proof, seconds)| format!("{proof} {seconds:.1}")).collect();
    println!("seconds: {}; draws of weights and tokens {:.1}", took.join(", "), all - proofs);
    assert!(failed.is_empty(), "seeds {failed:?}");
    assert!(unproved * 10 <= proved + 10, "{unproved} proofs say nothing");
}

/// The rules of `train.transfer` over bodies of every kind: rates by tensor, and the coordinate
/// check.
#[test]
fn transferred_rates_keep_sizes_at_every_width() {
    let base = |rule, tokens| {
        Some(Transfer { rule, width: 16, depth: 2, passes: None, tokens, sizes: IndexMap::new() })
    };
    let matrices = Matrices { momentum: 0.95, rate: 3.0 };
    let recipes = [
        (OptimizerKind::AdamW, base(TransferRule::Mup, None)),
        (OptimizerKind::Lion, base(TransferRule::Mup, None)),
        (OptimizerKind::Sgd(0.9), base(TransferRule::Mup, None)),
        (OptimizerKind::Muon(matrices), base(TransferRule::Mup, None)),
        (OptimizerKind::MuonH(matrices), base(TransferRule::Hyperp, Some(1000))),
        (OptimizerKind::AdamW, base(TransferRule::Completep, None)),
        (OptimizerKind::AdamW, base(TransferRule::Spectral, None)),
        (OptimizerKind::Lion, base(TransferRule::Standard, None)),
        (OptimizerKind::AdamW, base(TransferRule::Umup, None)),
    ];
    for (name, spec) in models(specs("examples/ladder")) {
        let all = if name.contains("dr-da") { &recipes[..] } else { &recipes[..1] };
        for (optimizer, transfer) in all {
            let mut spec = spec.clone();
            (spec.train.optimizer, spec.train.transfer) = (*optimizer, transfer.clone());
            let report = prove(&spec, 1, &["devices", "coordinates"], &[]);
            assert!(report.holds(), "{name} {optimizer:?} {transfer:?}\n{report}");
            assert!(report.proofs[1].checks > 4, "{name}\n{report}");
        }
    }
}

/// Files that random specifications that failed were made into.
#[test]
fn regressions_stay_fixed() {
    let found = specs("tests/regressions");
    assert!(!found.is_empty());
    for (name, spec) in found {
        for seed in 0..3 {
            let report = prove(&spec, seed, &[], &[]);
            assert!(report.holds(), "{name}\n{report}");
        }
    }
}

#[test]
fn kernels_of_small_models_agree_with_the_cpu_under_two_schedules() {
    let device = |schedule| PtxDevice::new(Options { schedule, ..Options::default() });
    let both = device(Schedule::Forward).and_then(|a| Ok((a, device(Schedule::Random(3))?)));
    let Some((a, b)) = &dreamc_skip::need(both) else { return };
    let devices: [(String, &dyn Device); 2] = [("in order".into(), a), ("in random order".into(), b)];
    for name in ["tiny-mod", "tiny-dr-da"] {
        let report = prove(&load(&format!("examples/{name}.yaml")), 1, &["devices"], &devices);
        println!("{report}");
        assert!(report.holds(), "{report}");
        assert!(report.proofs[0].checks > 400);
    }
}

/// Weights for which the stream has no square in f32 are drawn again.
#[test]
fn squares_are_numbers() {
    let spec = load("tests/regressions/squares-beyond-f32.yaml");
    for seed in [23, 20166] {
        let report = prove(&spec, seed, &["devices"], &[]);
        assert!(report.holds() && report.proofs[0].checks > 50, "{report}");
    }
}

/// All tokens tie where a norm is of one number and a router reads the norm: no weights change
/// that.
#[test]
fn what_no_weights_can_show_is_said() {
    let report = prove(&load("tests/regressions/ties-of-one-number.yaml"), 1, &[], &[]);
    assert!(report.holds(), "{report}");
    let verdict = |name: &str| &report.proof(name).unwrap().verdict;
    for name in ["devices", "gradients", "rewritten"] {
        let Verdict::Unproved { why } = verdict(name) else { panic!("{name}\n{report}") };
        assert!(why.contains("none of 12 draws") && why.contains("a router decides by"), "{why}");
    }
    for name in ["counts", "threads", "resume"] {
        assert_eq!(*verdict(name), Verdict::Proved, "{report}");
    }
    let said = report.to_string();
    assert!(
        said.contains("? devices") && said.contains("failed, ") && said.contains(" not proved, "),
        "{said}"
    );
}

struct Sandbox(tempfile::TempDir);

impl Sandbox {
    fn dreamc(&self, line: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dreamc"));
        command.args(line).current_dir(self.0.path()).env("DREAMC_CACHE", self.0.path().join("cache"));
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }
}

#[test]
fn the_command_reports_to_people_and_programs() {
    let sandbox = Sandbox(tempfile::tempdir().unwrap());
    let example = root("examples/tiny-dr-da.yaml");
    let example = example.to_str().unwrap();
    let (code, out, _) = sandbox.dreamc(&["verify", example]);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.contains("made smaller: vocab 256 -> 17"), "{out}");
    assert!(out.contains("✓ cached     cached decoding equals uncached"), "{out}");
    assert!(out.contains("nothing to prove: no skip"), "{out}");

    let (code, out, _) =
        sandbox.dreamc(&["verify", example, "--json", "--only", "counts,causal", "--seed", "3"]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["seed"], 3);
    let proofs = json["proofs"].as_array().unwrap();
    assert_eq!(proofs.iter().map(|p| p["proof"].as_str().unwrap()).collect::<Vec<_>>(), ["counts", "causal"]);
    assert!(proofs.iter().all(|p| p["verdict"] == "proved" && p["checks"].as_u64().unwrap() > 0));

    let (code, _, err) = sandbox.dreamc(&["verify", example, "--only", "cache"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("there is no proof `cache`; there are devices, gradients"), "{err}");
    let (code, _, err) = sandbox.dreamc(&["verify", root("examples/mod.suite.yaml").to_str().unwrap()]);
    assert_eq!(code, Some(2));
    assert!(err.contains("this is a suite, not a specification"), "{err}");
}

#[test]
fn a_small_run_is_looked_at_with_its_own_weights() {
    let sandbox = Sandbox(tempfile::tempdir().unwrap());
    let example = root("examples/tiny-la.yaml");
    let sizes = ["--set", "model.hidden=16", "--set", "train.steps=2", "--set", "train.batch=2"];
    let (code, _, err) =
        sandbox.dreamc(&[&["train", example.to_str().unwrap(), "--out", "run"], &sizes[..]].concat());
    assert_eq!(code, Some(0), "{err}");
    let (code, out, err) = sandbox.dreamc(&["verify", "run", "--only", "cached,causal,counts"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("its own weights") && !out.contains("made smaller"), "{out}");
}
