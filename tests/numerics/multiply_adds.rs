//! The multiply-adds that a device executes are those that the plan's count says, to the last one.

use dreamc_compiler::count::executed::executed;
use dreamc_compiler::ir::Extents;
use dreamc_compiler::program::{ProgramKey, Task};
use dreamc_compiler::{Cache, Options, compile};
use dreamc_device::cpu::{CpuDevice, CpuOptions};
use dreamc_device::{Device, Group, Instrument};
use dreamc_dsl::Spec;

const TINY: [&str; 7] = [
    "tiny-la",
    "tiny-dr",
    "tiny-dr-da",
    "tiny-eq4",
    "tiny-eq6",
    "tiny-prelude-core-coda",
    "tiny-recurrent-group",
];

fn example(name: &str) -> Spec {
    let path = format!("{}/examples/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    dreamc_dsl::load(&path, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// Runs each program on zeros, which memory holds that nobody wrote, with the device counting.
/// `known` gives the extents that the plan leaves open.
fn compare(spec: &Spec, options: &Options, programs: &[ProgramKey], known: Extents) {
    let compiled = compile(spec, options).expect("compiles");
    let device = CpuDevice::new(CpuOptions { threads: Some(2) });
    let mut session = device.load(&compiled.plan, &Group::alone()).expect("loads");
    session.instrument(Instrument { count: true, time: false });
    for &program in programs {
        let expected = executed(&compiled.plan, program, &|_| known).expect("counts");
        let found = session.run(program).expect("runs");
        assert!(!expected.open(), "{} {program}: everything is known", spec.model.name);
        for (e, f) in expected.launches.iter().zip(&found.by_launch) {
            let (e, f) =
                ((&e.origin, e.times, e.multiply_adds), (&f.origin, f.count.into(), f.multiply_adds.into()));
            assert_eq!(e, f, "{} {program}", spec.model.name);
        }
        assert_eq!(expected.launches.len(), found.by_launch.len());
        assert_eq!(expected.multiply_adds, u128::from(found.multiply_adds()));
        assert!(expected.multiply_adds > 0);
    }
}

#[test]
fn training_and_evaluation() {
    for name in TINY {
        let options = Options { batch: 2, sequence: 12, train: true, ..Options::default() };
        compare(&example(name), &options, &[ProgramKey::BACKWARD, ProgramKey::EVALUATE], Extents::default());
    }
}

/// Positions are data: with all of them zero every query sees every place.
#[test]
fn prefill_and_decode() {
    let options = Options {
        batch: 2,
        sequence: 1,
        logits: true,
        cache: Some(Cache { places: 10, chunk: 4, slack: f64::INFINITY, every: true }),
        ..Options::default()
    };
    let spec = example("tiny-dr-da");
    for (program, tokens) in
        [(ProgramKey::PREFILL, 4), (ProgramKey::first(Task::PrefillEvery), 4), (ProgramKey::DECODE, 1)]
    {
        let known = Extents { pairs: Some(2 * 10 * tokens), ..Extents::default() };
        compare(&spec, &options, &[program], known);
    }
    // A prompt of two texts has the head of a token each, where not that of every token is asked
    // for.
    let compiled = compile(&spec, &options).expect("compiles");
    let known = Extents { pairs: Some(2 * 10 * 4), ..Extents::default() };
    let [last, every] = [ProgramKey::PREFILL, ProgramKey::first(Task::PrefillEvery)]
        .map(|program| executed(&compiled.plan, program, &|_| known).expect("counts").multiply_adds);
    let head = u128::from(spec.model.hidden * spec.model.vocab);
    assert_eq!(every - last, 2 * 3 * head);
}
