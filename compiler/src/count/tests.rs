//! Declared counts against the interpreter, which executes every application and counts its
//! multiply-adds one by one.

use super::*;
use crate::architecture::{Apply, continues, for_each_application, run_of};
use crate::ir::interpret::{Tensor, execute};
use crate::ir::{Index, Module};
use dreamc_dsl::spec::{Component, Item, LaneKind, Stream};
use std::cell::Cell;

thread_local! {
    /// The operation whose cost is made wrong by one multiply-add.
    static PERTURBED: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// The cost, wrong where a test wants it so.
pub(super) fn perturbed(op: &Op, cost: Cost) -> Cost {
    if PERTURBED.get() == Some(op.name()) { Cost { flops: cost.flops + 2, ..cost } } else { cost }
}

fn example(name: &str) -> Spec {
    let path = format!("{}/../examples/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    dreamc_dsl::load(&path, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

/// Multiply-adds of a call at an application: values do not matter, but routing must be a routing.
fn executed(module: &Module, f: &Function, at: Option<(&Architecture, &Apply, &[u64])>) -> u128 {
    let arg = |(i, p): (usize, &Port)| {
        if let (Binding::Index(Index::Run { .. }), None) = (p.binding, at) {
            // The head reads all rows of the sources.
            let rows = f.nodes.iter().find(|n| matches!(n.op, Op::ReadSources(_)));
            let rows = rows.map_or(1, |n| module.size(f.ty(n.inputs[0]).dims[0]));
            return Tensor::index(rows as i32 - 1);
        }
        if let (Binding::Index(index), Some((architecture, apply, variables))) = (p.binding, at) {
            return Tensor::index(match index {
                Index::Row(cache) => apply.rows[cache as usize].at(variables) as i32,
                Index::Latest(cache) => apply.rows[cache as usize].at(variables) as i32 - 1,
                Index::Next { cache, by } => apply.rows[cache as usize].at(variables) as i32 + by as i32,
                Index::First => 0,
                Index::FirstPass { cache, by } => {
                    let pass = apply.pass.at(variables) as i32;
                    apply.rows[cache as usize].at(variables) as i32 - pass * by as i32
                }
                Index::Depth => apply.depth.at(variables) as i32,
                Index::Pass => apply.pass.at(variables) as i32,
                Index::Run { cache, offset, block } => {
                    run_of(&apply.rows[cache as usize], offset, block).at(variables) as i32
                }
                Index::Continues { cache, offset, block } => {
                    continues(&apply.rows[cache as usize], offset, block).at(variables) as i32
                }
                Index::Depths | Index::Given => architecture.depth as i32,
            });
        }
        let mut tensor = Tensor::zeros(module, &f.types[i]);
        if let crate::ir::interpret::Data::Float(x) = &mut tensor.data {
            x.iter_mut().enumerate().for_each(|(k, x)| *x = ((k * 7 + i) % 11) as f64 / 10.0 - 0.45);
        }
        tensor
    };
    let args: Vec<Tensor> = f.params.iter().enumerate().map(arg).collect();
    execute(module, f, &args).expect("runs").multiply_adds.into_iter().map(u128::from).sum()
}

/// FLOPs of the forward, and of forward and way back, application by application.
fn interpreted(spec: &Spec, batch: u64, sequence: u64) -> (u128, u128) {
    let architecture = Architecture::new(&spec.model, None).unwrap();
    let form = Form::new(&architecture, batch, sequence).unwrap();
    let mut module = form.lowered.module.clone();
    let mut pair = |name: &str, seeds: &[(&str, Seed)]| {
        let f = form.function(name).clone();
        let wanted = |p: &Port| has_derivative(p, |_| true);
        let joint = differentiate(&mut module, &f, seeds, &wanted).unwrap();
        (f, prune(&joint, &|_| true))
    };
    let mut functions = vec![];
    for body in &architecture.bodies {
        let f = form.function(&body.name);
        functions.push(pair(&body.name, &body_seeds(f, Seed::Param)));
    }
    let embed = pair(EMBED, &[("x", Seed::Param)]);
    let head = pair(HEAD, &head_seeds(form.function(HEAD)));
    let (mut forward, mut all) = (0, 0);
    for (f, joint) in [&embed, &head] {
        forward += executed(&module, f, None);
        all += executed(&module, joint, None);
    }
    for_each_application(&architecture.blocks, architecture.variables, &mut |apply, variables| {
        let (f, joint) = &functions[apply.body];
        forward += executed(&module, f, Some((&architecture, apply, variables)));
        all += executed(&module, joint, Some((&architecture, apply, variables)));
    });
    (2 * forward, 2 * all)
}

/// Whether the declared counts of a spec are what the interpreter executes.
fn agrees(spec: &Spec, expected: ((u128, u128), (u128, u128))) -> bool {
    let tokens = 7;
    let counts = count(spec, &Options { tokens, device: None }).unwrap();
    let f = &counts.flops_per_token;
    let (decode, training) = (expected.0.0, expected.1);
    f.decode.total == decode && (f.training_forward.total, f.training.total) == training
}

fn small(name: &str) -> Spec {
    let mut spec = example(name);
    (spec.train.batch, spec.train.accumulate, spec.train.sequence) = (4, 2, Some(5));
    spec
}

fn expected(spec: &Spec) -> ((u128, u128), (u128, u128)) {
    (interpreted(spec, 1, 7), interpreted(spec, 2, 5))
}

#[test]
fn declared_counts_are_what_the_interpreter_executes() {
    let names = [
        "tiny-la",
        "tiny-dr",
        "tiny-dr-da",
        "tiny-eq4",
        "tiny-eq6",
        "tiny-prelude-core-coda",
        "tiny-recurrent-group",
    ];
    for name in names {
        let mut spec = small(name);
        assert!(agrees(&spec, expected(&spec)), "{name}");
        // The same with windows shorter than sequence and depth, and one matrix for embedding and
        // head.
        spec.model.tie = true;
        for component in spec.model.components.values_mut() {
            if let Component::Sequence(a) | Component::Depth(a) = component {
                a.window = Some(3);
            }
        }
        assert!(agrees(&spec, expected(&spec)), "{name} with windows");
    }
}

/// The same of every wiring of the stream: runs of outputs begin and end anywhere in layers and
/// loops.
#[test]
fn wirings_cost_what_the_interpreter_executes() {
    let lanes = |kind| Stream::Lanes { count: 3, kind, embed: false };
    let attend = [1, 2, 3, 5, 64].map(|block| Stream::Attend { block });
    let all = [LaneKind::Static, LaneKind::Dynamic, LaneKind::Mhc].map(lanes).into_iter().chain(attend);
    for stream in all {
        for name in ["tiny-la", "tiny-prelude-core-coda", "tiny-recurrent-group"] {
            let mut spec = small(name);
            spec.model.stream = stream;
            for item in &mut spec.model.body {
                if let Item::Recur { residual_norm, .. } = item {
                    *residual_norm = false;
                }
            }
            assert!(agrees(&spec, expected(&spec)), "{name} with {stream:?}");
        }
    }
}

/// The comparison above sees one multiply-add too many in any operation with products.
#[test]
fn an_operation_that_costs_one_multiply_add_more_is_noticed() {
    let spec = small("tiny-dr-da");
    let expected = expected(&spec);
    let products = [
        "contract",
        "grouped",
        "grouped_outer",
        "attention",
        "attention_grad",
        "depth_attention",
        "depth_attention_grad",
    ];
    for op in products {
        PERTURBED.set(Some(op));
        assert!(!agrees(&spec, expected), "a wrong {op} goes unnoticed");
    }
    PERTURBED.set(None);
    assert!(agrees(&spec, expected));
}

/// Counting follows loops: an application more is a row more, however deep.
#[test]
fn depth_costs_no_time() {
    use dreamc_dsl::spec::Item;
    let mut spec = example("dr-da-16");
    let start = std::time::Instant::now();
    let mut flops = vec![];
    for depth in [1, 2, 3, 60_000] {
        if let Some(Item::Recur { count, .. }) = spec.model.body.first_mut() {
            *count = depth;
        }
        // The size of the mixtures follows the depth; hold it.
        for component in spec.model.components.values_mut() {
            if let Component::Sequence(a) | Component::Depth(a) = component {
                a.projection.as_mut().unwrap().count = Some(16);
            }
        }
        flops.push(figures(&spec.model, Precision::Bf16, 1024).unwrap().flops_per_token.total);
    }
    let (first, second, third) = (flops[0], flops[1] - flops[0], flops[2] - flops[1]);
    // Each depth has the work of the one before it and one key more for depth attention.
    let key = third - second;
    assert_eq!(key, 1024 * 4 * 128);
    let n = 60_000;
    assert_eq!(flops[3], first + (n - 1) * second + key * ((n - 1) * (n - 2) / 2));
    assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
}

#[test]
fn what_does_not_fit_is_refused_and_never_wrapped() {
    let mut spec = example("dr-da-16");
    let ea = |spec: &mut Spec, f: &dyn Fn(&mut dreamc_dsl::spec::Experts)| {
        if let Some(Component::Experts(e)) = spec.model.components.get_mut("ea") {
            f(e)
        }
    };
    // A thousand million experts are counted.
    ea(&mut spec, &|e| e.count = 1_000_000_000);
    let counts = count(&spec, &Options::default()).unwrap();
    assert_eq!(
        counts.parameters.by_component["ea"],
        1024 + 128 * 1024 + 256 + 1_000_000_000 * (128 + 3 * 480 * 1024)
    );
    // The largest sizes that the language has exceed 64 bits, and are counted or refused.
    let largest = (1 << 48) - 1;
    ea(&mut spec, &|e| (e.count, e.intermediate) = (largest, largest));
    spec.model.hidden = largest;
    match count(&spec, &Options::default()) {
        Ok(counts) => assert!(counts.parameters.total > u128::from(largest) * u128::from(largest)),
        Err(e) => assert!(!e.to_string().is_empty()),
    }
    spec.model.vocab = largest;
    (spec.train.batch, spec.train.accumulate) = (largest, 1);
    let error = count(&spec, &Options { tokens: largest, device: None }).unwrap_err().to_string();
    assert!(error.contains("too large") || error.contains("exceeds"), "{error}");
    for component in spec.model.components.values_mut() {
        if let Component::Sequence(a) = component {
            (a.heads, a.kv_heads, a.head_size) = (largest, largest, largest - 1);
        }
    }
    let error = count(&spec, &Options::default()).unwrap_err().to_string();
    assert!(error.contains("too large") || error.contains("exceeds"), "{error}");
}

/// FLOPs at shares are those of a model that declares them: as it declares, and at any other.
#[test]
fn flops_at_shares_are_those_of_models_that_declare_them() {
    let text = |capacity: f64| {
        let text = format!(
            "model m {{\n vocab 31 hidden 16 context 64\n sa = sequence {{ heads 2 }}\n mlp = mlp {{ intermediate 24 }}\n layer {{ mlp }}\n \
             repeat 3 {{ layer {{ skip(capacity {capacity}, causal bce 0.01) {{ sa > mlp }} }} }}\n}}\n"
        );
        let ast = dreamc_dsl::parse("m.dream", &text, dreamc_dsl::Spelling::Dream).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap().0.model
    };
    let declared = |capacity: f64| figures(&text(capacity), Precision::F32, 64).unwrap().flops_per_token;
    let model = text(0.5);
    let body =
        Architecture::new(&model, None).unwrap().bodies.iter().position(|b| !b.skips().is_empty()).unwrap();
    for capacity in [0.5, 0.25, 1.0, 0.125] {
        let shares = Shares { parts: [((body, 0), capacity)].into(), ..Shares::default() };
        assert_eq!(flops_at(&model, None, 64, &shares).unwrap(), declared(capacity), "{capacity}");
    }
    assert_eq!(flops_at(&model, None, 64, &Shares::default()).unwrap(), declared(0.5));
    // None at all leaves what is around.
    let none = Shares { parts: [((body, 0), 0.0)].into(), ..Shares::default() };
    assert!(flops_at(&model, None, 64, &none).unwrap().total < declared(0.125).total);
}

/// No-op experts take the share of choices that is declared, or the one that was seen.
#[test]
fn flops_of_no_op_experts_follow_their_share() {
    let text = "model m {\n vocab 31 hidden 16 context 32\n ea = experts { count 6  active 2  intermediate 24  noop 2 }\n layer { ea }\n}\n";
    let ast = dreamc_dsl::parse("m.dream", text, dreamc_dsl::Spelling::Dream).unwrap();
    let model = dreamc_dsl::check(&ast, &[]).unwrap().0.model;
    let at = |share: f64| {
        let shares = Shares { experts: [("ea".to_string(), share)].into(), ..Shares::default() };
        flops_at(&model, None, 32, &shares).unwrap().total
    };
    assert_eq!(at(0.75), figures(&model, Precision::F32, 32).unwrap().flops_per_token.total);
    assert_eq!(at(1.0) - at(0.5), at(0.5) - at(0.0));
    assert!(at(0.5) < at(0.75));
}
