//! Rewriting over the examples: the same decisions every time and at every depth.

use dreamc_compiler::count::executed::executed;
use dreamc_compiler::ir::Extents;
use dreamc_compiler::program::ProgramKey;
use dreamc_compiler::rewrite::{RULES, Report, Rewriting};
use dreamc_compiler::{CompileError, Options, compile, compile_with_report};
use dreamc_dsl::spec::{Item, Spec};

fn example(name: &str) -> Spec {
    let path = format!("{}/../examples/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    dreamc_dsl::load(&path, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

fn options() -> Options {
    Options { batch: 2, sequence: 64, train: true, ..Options::default() }
}

/// Decisions: rule, whether its result was used, and where.
fn decisions(report: &Report) -> Vec<(String, String, bool, Vec<String>)> {
    let of = |f: &dreamc_compiler::rewrite::Rewritten| {
        f.firings
            .iter()
            .map(|g| (f.function.clone(), g.rule.clone(), g.used, g.sites.clone()))
            .collect::<Vec<_>>()
    };
    report.functions.iter().flat_map(of).collect()
}

fn report(spec: &Spec) -> Report {
    compile_with_report(spec, &options()).unwrap_or_else(|e| panic!("{}: {e}", spec.model.name)).1
}

const NAMES: [&str; 6] = ["quickstart", "tiny-eq4", "la-16", "dr-16", "dr-da-16", "published/gemma-2-2b"];

#[test]
fn decisions_are_the_same_twice_within_the_limits() {
    for name in NAMES {
        let spec = example(name);
        let (a, b) = (report(&spec), report(&spec));
        assert_eq!(decisions(&a), decisions(&b), "{name}");
        for f in &a.functions {
            assert!(f.nodes < 20_000 && f.stopped.starts_with("no rule"), "{name}: {}", f.stopped);
        }
    }
}

#[test]
fn decisions_are_the_same_at_every_depth() {
    for name in ["la-16", "dr-da-16"] {
        let mut spec = example(name);
        let mut found = vec![];
        for depth in [16, 256] {
            for item in &mut spec.model.body {
                if let Item::Repeat { count, .. } | Item::Recur { count, .. } = item {
                    *count = depth;
                }
            }
            // The number of projection experts is the depth, and part of names.
            let strip = |s: String| s.replace(&format!("projections{depth}"), "projections");
            let used: Vec<(String, String, Vec<String>)> = decisions(&report(&spec))
                .into_iter()
                .filter(|d| d.2)
                .map(|d| (d.0, d.1, d.3.into_iter().map(strip).collect()))
                .collect();
            found.push(used);
        }
        let merged = found[0].iter().filter(|d| d.1 == "merge-shared").count();
        assert_eq!(merged, if name == "la-16" { 0 } else { 8 }, "{name}");
        assert_eq!(
            found[0].iter().filter(|d| d.1 == "merge-shared").collect::<Vec<_>>(),
            found[1].iter().filter(|d| d.1 == "merge-shared").collect::<Vec<_>>(),
            "{name}"
        );
        assert_eq!(found[0].len(), found[1].len(), "{name}");
    }
}

/// Launches of one pass of a program.
fn launches(spec: &Spec, program: ProgramKey, rewrite: Rewriting) -> u128 {
    let compiled = compile(spec, &Options { rewrite, ..options() }).unwrap();
    let executed = executed(&compiled.plan, program, &|_| Extents::default()).unwrap();
    executed.launches.iter().map(|l| l.times).sum()
}

#[test]
fn no_fusion_is_lost_with_depth() {
    for name in ["la-16", "dr-da-16"] {
        let mut spec = example(name);
        for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
            // One more application costs the same number of launches anywhere, and not more than
            // without rewriting.
            let mut count = |depth: u64, rewrite: Rewriting| {
                for item in &mut spec.model.body {
                    if let Item::Repeat { count, .. } | Item::Recur { count, .. } = item {
                        *count = depth;
                    }
                }
                launches(&spec, program, rewrite)
            };
            let mut each = |low: u64, high: u64, rewrite: Rewriting| {
                let more = count(high, rewrite.clone()) - count(low, rewrite);
                assert_eq!(more % u128::from(high - low), 0, "{name} {program}");
                more / u128::from(high - low)
            };
            let with = each(16, 17, Rewriting::default());
            assert_eq!(with, each(255, 256, Rewriting::default()), "{name} {program}");
            assert!(with <= each(16, 17, Rewriting::off()), "{name} {program}");
            assert!(with < each(16, 17, Rewriting::off()) || name == "la-16", "{name} {program}");
        }
    }
}

#[test]
fn a_rule_that_does_not_exist_is_refused() {
    let rewrite = Rewriting::only(&["merge-shard"]);
    match compile(&example("quickstart"), &Options { rewrite, ..options() }) {
        Err(CompileError::Rule { name, known }) => {
            assert_eq!(name, "merge-shard");
            assert!(RULES.iter().all(|r| known.contains(r.name)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_proof_names_the_rule() {
    let rewrite = Rewriting { proofs: true, ..Rewriting::only(&["head-loss"]) };
    let (_, report) = compile_with_report(&example("tiny-la"), &Options { rewrite, ..options() }).unwrap();
    let mut proofs = report.functions.iter().flat_map(|f| &f.firings).filter_map(|f| f.proof.as_ref());
    assert!(proofs.any(|p| p.contains("head-loss")));
}
