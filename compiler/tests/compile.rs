//! From spec to launch list: every example compiles, quickly, and its length does not depend on
//! depth.

use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::{Function, Module, Output};
use dreamc_compiler::lower::Shape;
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::{Kernel, Plan, ProgramKey, Space, Step, listed};
use dreamc_compiler::rewrite::{Rewriting, Target};
use dreamc_compiler::{Cache, CompileError, Options, Pass, compile, compile_watched};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{Item, Shard};
use std::time::Duration;

mod clock;
use clock::thread_time;

fn example(name: &str) -> Spec {
    let path = format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    dreamc_dsl::load(&path, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

fn examples() -> Vec<String> {
    let folder = format!("{}/../examples", env!("CARGO_MANIFEST_DIR"));
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.ends_with(".yaml") && !n.contains("suite"))
        .collect();
    names.sort();
    names
}

fn options() -> Options {
    Options { batch: 2, sequence: 64, train: true, ..Options::default() }
}

/// Launches of all programs.
fn length(plan: &Plan) -> usize {
    plan.programs.values().map(|p| listed(&p.steps).count()).sum()
}

/// Two biases of one sum have one gradient, which is added to both.
#[test]
fn a_gradient_of_two_weights_is_added_to_both() {
    let text = "model m {
        vocab 17  hidden 12  context 8
        a = sequence { heads 2  head_size 6  bias out }
        b = depth { heads 3  head_size 4  bias out }
        repeat 2 { a | b }
    }";
    let ast = dreamc_dsl::parse("m.dream", text, dreamc_dsl::Spelling::Dream).unwrap();
    let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap();
    for (batch, sequence) in [(1, 1), (2, 8)] {
        let options = Options { batch, sequence, train: true, ..Options::default() };
        compile(&spec, &options).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn every_example_compiles_in_under_100_ms() {
    for name in examples() {
        let spec = example(&name);
        let best = (0..5)
            .map(|_| {
                let start = thread_time();
                compile(&spec, &options()).unwrap_or_else(|e| panic!("{name}: {e}"));
                thread_time() - start
            })
            .min();
        println!("{name}: {best:?}, {} launches", length(&compile(&spec, &options()).unwrap().plan));
        assert!(best.unwrap().as_millis() < 100, "{name} took {best:?}");
    }
}

/// A model with a definition of `operations` operations.
fn long_definition(operations: usize) -> String {
    let line = |n: usize| {
        let [a, b, c] = [1, 2, 3].map(|back: usize| n.saturating_sub(back));
        format!("  v{n} = tanh(v{a}) * 0.5 + sigmoid(v{c}) * v{b}\n")
    };
    let lines: String = (1..=operations / 5).map(line).collect();
    format!(
        "define long(heads 4, size 16) {{\n  v0 = linear(x, [heads, size])\n{lines}  \
         return linear(v{}, [hidden])\n}}\n\
         model m {{ vocab 256  hidden 64  context 128  w = long {{ }}  repeat 4 {{ w }} }}\n",
        operations / 5
    )
}

/// The least time of some runs.
fn least(mut f: impl FnMut()) -> Duration {
    let once = |_| {
        let start = thread_time();
        f();
        thread_time() - start
    };
    (0..5).map(once).min().unwrap_or_default()
}

/// `cargo test -p dreamc-compiler --test compile 500_operations -- --nocapture` prints the times.
#[test]
fn a_definition_of_500_operations_is_checked_in_20_ms_and_compiled_in_2_s() {
    let text = long_definition(500);
    let read = || {
        let ast = dreamc_dsl::parse("m.dream", &text, dreamc_dsl::Spelling::Dream).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
    };
    let spec = read();
    let checked = least(|| drop(read()));
    let compiled = least(|| drop(compile(&spec, &options()).unwrap_or_else(|e| panic!("{e}"))));
    println!("checked in {checked:?}, compiled in {compiled:?}");
    assert!(checked < Duration::from_millis(20), "{checked:?}");
    assert!(compiled < Duration::from_secs(2), "{compiled:?}");
}

#[test]
fn the_launch_list_does_not_grow_with_depth() {
    for name in ["la-16.yaml", "dr-da-16.yaml"] {
        let mut spec = example(name);
        let mut found = vec![];
        for depth in [16, 256] {
            for item in &mut spec.model.body {
                if let Item::Repeat { count, .. } | Item::Recur { count, .. } = item {
                    *count = depth;
                }
            }
            let compiled = compile(&spec, &options()).unwrap();
            found.push((length(&compiled.plan), compiled.plan.kernels.len()));
        }
        // Kernels of depth attention know the number of rows of their cache; nothing else may
        // differ.
        assert_eq!(found[0], found[1], "{name}");
    }
}

#[test]
fn buffers_that_live_together_do_not_overlap() {
    let compiled = compile(&example("tiny-dr-da.yaml"), &options()).unwrap();
    let mut fixed: Vec<_> = compiled
        .plan
        .buffers
        .iter()
        .filter(|b| !matches!(b.space, Space::Temporary | Space::Alias))
        .collect();
    fixed.sort_by_key(|b| b.offset);
    for pair in fixed.windows(2) {
        assert!(pair[0].offset + pair[0].bytes() <= pair[1].offset, "{} and {}", pair[0].name, pair[1].name);
    }
    for b in &compiled.plan.buffers {
        assert!(b.offset + b.bytes() <= compiled.plan.arena, "{} lies outside", b.name);
    }
}

#[test]
fn every_example_compiles_for_generation() {
    for name in examples() {
        let spec = example(&name);
        let options = Options {
            train: false,
            cache: Some(Cache { places: 32, chunk: 8, slack: f64::INFINITY, every: false }),
            ..options()
        };
        let compiled = compile(&spec, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
        let programs = compiled.plan.programs.keys().filter(|key| **key != ProgramKey::PREPARE);
        assert_eq!(programs.collect::<Vec<_>>(), [&ProgramKey::PREFILL, &ProgramKey::DECODE]);
        for buffer in ["prefill.logits", "decode.logits", "decode.slots", "key_positions"] {
            assert!(compiled.plan.find(buffer).is_some(), "{name} has no {buffer}");
        }
    }
}

/// The caches of programs that write: latents in the place of keys and values, where they are
/// shorter and a GPU's attention takes heads as long.
#[test]
fn caches_of_latent_attention_hold_latents() {
    let states = |heads: u64, keys: &str| -> Vec<String> {
        let text = format!(
            "model m {{ vocab 17  hidden 12  context 8
                a = sequence {{ heads {heads}  head_size 6  qk_norm none  latent {{ {keys}  value 4 }} }}
                repeat 2 {{ a }} }}"
        );
        let ast = dreamc_dsl::parse("m.dream", &text, dreamc_dsl::Spelling::Dream).unwrap();
        let (spec, _) = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}"));
        let cache = Some(Cache { places: 32, chunk: 8, slack: f64::INFINITY, every: false });
        let compiled = compile(&spec, &Options { train: false, cache, ..options() }).unwrap();
        let states = compiled.plan.buffers.iter().filter(|b| b.space == Space::State);
        states.map(|b| format!("{} {:?} of {:?}", b.name, b.instances, b.shape)).collect()
    };
    assert_eq!(states(4, "query 5  kv 7  turned 2"), ["layer0.a.latents 2 of [2, 32, 1, 9]"]);
    assert_eq!(states(1, "kv 9  turned 2"), ["layer0.a.latents 2 of [2, 32, 1, 11]"]);
    // Every head of keys has a part that turns, of its own pairs.
    assert_eq!(
        states(4, "kv 7  turned 2  norm none  keys 2  pairs [[0], [2]]"),
        ["layer0.a.latents 2 of [2, 32, 1, 11]"]
    );
    let expanded =
        |heads: u64| ["keys", "values"].map(|of| format!("layer0.a.{of} 2 of [2, 32, {heads}, 6]"));
    assert_eq!(states(1, "kv 10  turned 2"), expanded(1), "latents that are not shorter");
    assert_eq!(states(80, "kv 862  turned 2"), ["layer0.a.latents 2 of [2, 32, 1, 864]"]);
    assert_eq!(states(80, "kv 863  turned 2"), expanded(80), "latents that are too long");
}

/// Shapes of the logits of a prompt of three texts in chunks of eight.
#[test]
fn logits_of_a_prompt_are_of_one_token_a_text_or_of_every_one() {
    let spec = example("tiny-dr-da.yaml");
    let shapes = |every: bool| {
        let cache = Some(Cache { places: 32, chunk: 8, slack: f64::INFINITY, every });
        let compiled = compile(&spec, &Options { train: false, batch: 3, cache, ..options() }).unwrap();
        let of = |entry| {
            let logits = compiled.output(entry, Output::Logits);
            logits.map(|id| compiled.plan.buffer(id).shape.clone())
        };
        [Entry::Prefill, Entry::Every, Entry::Decode].map(of)
    };
    let (of_one, of_all) = (Some(vec![3, 1, spec.model.vocab]), Some(vec![3, 8, spec.model.vocab]));
    assert_eq!(shapes(false), [of_one.clone(), None, of_one.clone()]);
    assert_eq!(shapes(true), [of_one.clone(), of_all, of_one]);
}

/// Names are for people: words that the compiler has for things of its own name components as well
/// as others do.
#[test]
fn names_of_components_do_not_change_the_plan() {
    const WORDS: [&str; 14] = [
        "saved",
        "observed",
        "prepared",
        "d",
        "head",
        "embedding",
        "embed",
        "stream",
        "predictor",
        "router",
        "merged",
        "x",
        "keys",
        "hidden",
    ];
    let text = |a: &str, d: &str, e: &str| {
        format!(
            "model:\n  name: named\n  vocab: 32\n  hidden: 16\n  context: 8\n  components:\n    {a}: {{sequence: {{heads: 2, \
             head_size: 8}}}}\n    {d}: {{depth: {{heads: 1, head_size: 8}}}}\n    {e}: {{experts: {{count: 4, active: 2, \
             intermediate: 8, query: 8}}}}\n  body: [{{recur: 3, layers: [\"({d} | {a}) > {e}\"]}}]\n"
        )
    };
    let spec = |names: [&str; 3]| {
        let text = text(names[0], names[1], names[2]);
        let ast = dreamc_dsl::parse("named.yaml", &text, dreamc_dsl::Spelling::Yaml)
            .unwrap_or_else(|e| panic!("{e}"));
        dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
    };
    let cache = Some(Cache { places: 8, chunk: 4, slack: f64::INFINITY, every: false });
    let all = [
        Options { batch: 2, sequence: 8, train: true, logits: true, ..Options::default() },
        Options { batch: 2, sequence: 8, observe: true, ..Options::default() },
        Options { batch: 2, sequence: 8, cache, ..Options::default() },
    ];
    // Everything of a plan but the names of its buffers and the origins of its launches, which are
    // for messages.
    fn forget(steps: &mut [Step]) {
        for step in steps {
            match step {
                Step::Launch(launch) => launch.origin.clear(),
                Step::Loop { steps, .. } => forget(steps),
            }
        }
    }
    let anonymous = |names| {
        all.clone().map(|options| {
            let mut plan = compile(&spec(names), &options).unwrap_or_else(|e| panic!("{names:?}: {e}")).plan;
            plan.buffers.iter_mut().for_each(|b| b.name.clear());
            plan.programs.values_mut().for_each(|p| forget(&mut p.steps));
            plan
        })
    };
    let counts = |names| {
        let counts = dreamc_compiler::count::count(&spec(names), &Default::default()).unwrap();
        let flops: Vec<_> = counts.flops_per_token.decode_by_component.into_values().collect();
        let parameters: Vec<_> = counts.parameters.by_component.into_values().collect();
        (flops, counts.flops_per_token.decode_by_kind, parameters)
    };
    let plain = ["qsa", "qda", "qea"];
    let (expected, counted) = (anonymous(plain), counts(plain));
    for word in WORDS {
        for i in 0..3 {
            let mut names = plain;
            names[i] = word;
            assert_eq!(anonymous(names), expected, "{names:?}");
            assert_eq!(counts(names), counted, "{names:?}");
        }
    }
}

/// The IR and the launch list of the paper's block, as people read them.
#[test]
fn the_block_of_the_paper_as_ir_and_as_launches() {
    let mut spec = example("tiny-dr-da.yaml");
    spec.sources = Default::default();
    let options = Options { batch: 2, sequence: 16, ..options() };
    let architecture = dreamc_compiler::architecture::Architecture::new(&spec.model, None).unwrap();
    let shape = Shape { batch: 2, sequence: 16, ..Shape::default() };
    let lowered = dreamc_compiler::lower::lower(&architecture, shape).unwrap();
    insta::assert_snapshot!("tiny-dr-da.ir", lowered.module.to_string());
    insta::assert_snapshot!("tiny-dr-da.plan", compile(&spec, &options).unwrap().plan.to_string());
}

/// A function that is not well formed does not reach the next pass but one, and the error says
/// which pass left it.
#[test]
fn a_broken_function_is_found_between_passes() {
    if !cfg!(debug_assertions) {
        return;
    }
    let breaks = |pass: Pass, _: &mut Module, f: &mut Function| {
        let first = f.params.len();
        if let (Pass::Rewrite, Some(ty)) = (pass, f.types.get_mut(first)) {
            ty.dims.reverse();
        }
    };
    let found = compile_watched(&example("tiny-la.yaml"), &options(), &breaks).err();
    assert!(matches!(found, Some(CompileError::Pass { pass: "narrow", .. })), "{found:?}");
}

#[test]
fn other_depths_share_every_buffer_that_outlives_a_step() {
    let spec = example("tiny-dr-da.yaml");
    let plain = compile(&spec, &options()).unwrap();
    let random = compile(&spec, &Options { depths: vec![2, 4, 6], ..options() }).unwrap();
    let programs: Vec<String> = random.plan.programs.keys().map(ToString::to_string).collect();
    assert_eq!(
        programs,
        ["backward@6", "backward@4", "backward", "backward@2", "norm", "update", "evaluate"]
    );
    for (a, b) in plain.tensors.iter().zip(&random.tensors) {
        assert_eq!(a.name, b.name);
        assert_eq!(plain.plan.buffer(a.weight).offset, random.plan.buffer(b.weight).offset);
    }
}

/// Training of the paper's models computes logits again instead of storing them, on every device's
/// account.
#[test]
fn logits_of_large_heads_are_not_stored() {
    for target in ["cpu", "h100"] {
        let rewrite = Rewriting { target: Target::named(target).unwrap(), ..Rewriting::default() };
        let options = Options {
            batch: 4,
            sequence: 1024,
            train: true,
            narrow: Narrow::Storage,
            rewrite,
            ..Options::default()
        };
        for name in ["dr-da-16.yaml", "la-16.yaml"] {
            let plan = compile(&example(name), &options).unwrap().plan;
            let has = |wanted: &dyn Fn(&Kernel) -> bool| plan.kernels.iter().any(wanted);
            assert!(has(&|k| matches!(k, Kernel::HeadLossGrad(_))), "{name} for {target}");
            assert!(!has(&|k| matches!(k, Kernel::CrossEntropyGrad(_))), "{name} for {target}");
        }
    }
}

/// Of two options that exclude one another none is ignored: the use is refused.
#[test]
fn options_that_exclude_one_another_are_refused() {
    let spec = example("tiny-la.yaml");
    let plain = Options { batch: 1, sequence: 8, ..Options::default() };
    let cache = Some(Cache { places: 8, chunk: 4, slack: 1.0, every: false });
    let train = Options { train: true, ..plain.clone() };
    for (options, pair) in [
        (Options { observe: true, ..train.clone() }, ("observe", "train")),
        (Options { observe: true, cache, ..plain.clone() }, ("observe", "cache")),
        (Options { cache, ..train.clone() }, ("train", "cache")),
        (Options { exit: Some(0.5), ..train.clone() }, ("train", "exit")),
        (Options { as_trained: true, cache, ..plain.clone() }, ("as_trained", "cache")),
        (Options { depths: vec![2], ..plain.clone() }, ("depths", "train: false")),
        (Options { again: 1, ..plain.clone() }, ("again", "train: false")),
        (Options { shard: Shard::Weights, ..plain.clone() }, ("shard", "train: false")),
    ] {
        assert_eq!(compile(&spec, &options).err(), Some(CompileError::Exclude(pair.0, pair.1)));
    }
    assert!(compile(&spec, &train).is_ok() && compile(&spec, &plain).is_ok());
}
