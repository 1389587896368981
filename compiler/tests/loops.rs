//! Loops whose gradients flow through their last passes alone: what is kept, and what is counted.

use dreamc_compiler::architecture::{Architecture, for_each_application};
use dreamc_compiler::bind::Owner;
use dreamc_compiler::count::{self, Counts};
use dreamc_compiler::program::{ProgramKey, Space, Step};
use dreamc_compiler::{Options, compile};
use dreamc_dsl::{Spec, Spelling, check, parse};

/// A loop of eight passes with these settings, in a model with statements around it.
fn looped(settings: &str) -> Spec {
    let text = format!(
        "model m {{\n vocab 31 hidden 16 context 16\n sa = sequence {{ heads 2 projection none }}\n mlp = mlp {{ intermediate 24 }}\n \
         layer {{ sa > norm > mlp }}\n save e\n recur 8 residual_norm false {settings} {{\n mix e linear identity\n sa > mlp\n norm\n }}\n \
         layer {{ mlp }}\n}}\ntrain {{ precision f32 }}\n"
    );
    let ast = parse("m.dream", &text, Spelling::Dream).unwrap_or_else(|e| panic!("{text}\n{e}"));
    check(&ast, &[]).unwrap_or_else(|e| panic!("{text}\n{e}")).0
}

fn kept(settings: &str) -> u64 {
    let options = Options { batch: 2, sequence: 16, train: true, ..Options::default() };
    let compiled = compile(&looped(settings), &options).unwrap_or_else(|e| panic!("{settings}: {e}"));
    let buffers = &compiled.plan.buffers;
    buffers.iter().filter(|b| b.space == Space::Saved).map(|b| b.bytes()).sum()
}

fn counted(settings: &str) -> Counts {
    count::count(&looped(settings), &count::Options::default()).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_arena_holds_the_passes_that_gradients_flow_through() {
    let all: Vec<u64> = (1..=7).map(|k| kept(&format!("backprop {k}"))).collect();
    let pass = all[1] - all[0];
    assert!(pass > 0);
    assert!(all.windows(2).all(|two| two[1] - two[0] == pass), "{all:?}");
    assert_eq!(kept(""), all[6] + pass);
    assert_eq!(kept("backprop 8"), kept(""));
    assert_eq!(kept("backprop 20"), kept(""));
}

#[test]
fn training_is_counted_as_it_runs() {
    let all: Vec<Counts> = (1..=7).map(|k| counted(&format!("backprop {k}"))).collect();
    let whole = counted("");
    let back = |c: &Counts| c.flops_per_token.training_backward.total;
    let again = |c: &Counts| c.flops_per_token.training_recomputation.total;
    for (two, what) in all.windows(2).zip(2..) {
        assert_eq!(back(&two[1]) - back(&two[0]), back(&all[1]) - back(&all[0]), "{what}");
        assert_eq!(again(&two[1]) - again(&two[0]), again(&all[1]) - again(&all[0]), "{what}");
        assert!(two[1].memory_bytes.activations > two[0].memory_bytes.activations);
    }
    assert_eq!(back(&whole) - back(&all[6]), back(&all[1]) - back(&all[0]));
    for c in &all {
        assert_eq!(c.flops_per_token.training_forward, whole.flops_per_token.training_forward);
        assert_eq!(c.flops_per_token.decode, whole.flops_per_token.decode);
        assert_eq!(c.parameters, whole.parameters);
    }
}

#[test]
fn the_way_back_has_no_launches_of_detached_passes() {
    let options = Options { batch: 2, sequence: 16, train: true, ..Options::default() };
    let compiled = compile(&looped("backprop 3"), &options).unwrap_or_else(|e| panic!("{e}"));
    let loops = |program: ProgramKey| {
        let of = |step: &Step| match step {
            Step::Loop { count, reverse, .. } => Some((*count, *reverse)),
            Step::Launch(_) => None,
        };
        compiled.plan.programs[&program].steps.iter().filter_map(of).filter(|l| l.0 > 1).collect::<Vec<_>>()
    };
    assert_eq!(loops(ProgramKey::BACKWARD), [(5, false), (3, false), (3, true)]);
    assert_eq!(loops(ProgramKey::EVALUATE), [(5, false), (3, false)]);
}

#[test]
fn statements_have_tensors_of_their_own() {
    let compiled = compile(&looped(""), &Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let shape = |name: &str| {
        let tensor = compiled.tensors.iter().find(|t| t.name == name);
        tensor.unwrap_or_else(|| panic!("no tensor {name}")).shape.clone()
    };
    assert_eq!(shape("layers.0.norm0.weight"), [16]);
    // `save` is statement 0.
    assert_eq!(shape("body.1.mix.weight"), [16, 32]);
    assert_eq!(shape("body.2.norm.weight"), [16]);
    assert_eq!(compiled.depth, 10);
}

/// Gradients end before detached passes in every state along depth that has one, each in a known
/// layout: a state that is not named is an error, and none of these is.
#[test]
fn every_state_along_depth_ends_before_detached_passes() {
    let model = |stream: &str, settings: &str, body: &str| {
        format!(
            "model m {{\n vocab 31 hidden 16 context 16 {stream}\n sa = sequence {{ heads 2 projection none }}\n vr = sequence {{ heads 2 \
             projection none value_residual }}\n da = depth {{ heads 1 head_size 8 projection none }}\n mlp = mlp {{ intermediate 24 }}\n \
             layer {{ (sa | vr | da) > mlp }}\n recur 4 residual_norm false {settings} backprop 1 {{\n layer {{ {body} }}\n }}\n}}\n\
             train {{ precision f32 }}\n"
        )
    };
    let options = Options { batch: 2, sequence: 16, train: true, ..Options::default() };
    for text in [
        model("", "", "(sa | da) > mlp"),
        model("", "", "vr > mlp"),
        model("", "kv first", "sa > mlp"),
        model("", "kv replaced", "skip(capacity [1, 0.5, 0.5, 0.5], nested, causal bce 0.1) { sa > mlp }"),
        model("", "", "skip(threshold, capacity 0.5, penalty 0.1, pooled) { sa > mlp }"),
        model("", "", "skip(depth_choice) { sa > mlp }"),
        model("stream attend", "", "sa > mlp"),
        model("stream lanes 2", "", "sa > mlp"),
    ] {
        let ast = parse("m.dream", &text, Spelling::Dream).unwrap_or_else(|e| panic!("{text}\n{e}"));
        let spec = check(&ast, &[]).unwrap_or_else(|e| panic!("{text}\n{e}")).0;
        compile(&spec, &options).unwrap_or_else(|e| panic!("{text}\n{e}"));
    }
}

/// All that components leave stands in one depth stream, a row for each application of each.
#[test]
fn what_components_leave_along_depth_has_rows_one_after_another() {
    let text = "model m {\n vocab 31 hidden 16 context 16\n sa = sequence { heads 2, depth_stream keys, projection none }\n \
                mlp = mlp { intermediate 24 depth_stream }\n plain = mlp { intermediate 24 }\n layer { sa > mlp }\n \
                recur 3 { layer { mlp } repeat 2 { plain > sa } }\n}\n";
    let ast = parse("m.dream", text, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
    let spec = check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0;
    let architecture = Architecture::new(&spec.model, None).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(architecture.rows_of(Owner::Depths), 2 + 3 * (1 + 2));
    let depths = architecture.cache_of(Owner::Depths).unwrap_or_else(|| panic!("no depth stream"));
    let mut rows = vec![];
    for_each_application(&architecture.blocks, architecture.variables, &mut |apply, variables| {
        rows.push(apply.rows[depths].at(variables));
    });
    assert_eq!(rows, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
}

/// Every part with a cache has the rows that its own applications write, whichever others are
/// there.
#[test]
fn every_part_finds_its_own_cache_rows() {
    let text = "model m {\n vocab 31 hidden 16 context 16\n sa = sequence { heads 2 projection none }\n da = depth { heads 1 head_size 8 }\n \
                mlp = mlp { intermediate 24 }\n layer { sa > mlp }\n save e\n save f\n \
                repeat 2 { layer { skip(threshold, capacity 0.5, penalty 0.1, pooled) { mlp } } }\n mix e linear identity\n mix f linear identity\n \
                recur 3 residual_norm false { layer { skip(depth_choice) { (sa | da) > mlp } } }\n}\n";
    let ast = parse("m.dream", text, Spelling::Dream).unwrap_or_else(|e| panic!("{e}"));
    let spec = check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0;
    let architecture = Architecture::new(&spec.model, None).unwrap_or_else(|e| panic!("{e}"));
    let component = |name: &str| {
        Owner::Component(
            spec.model.components.get_index_of(name).unwrap_or_else(|| panic!("no {name}")) as u32
        )
    };
    let expected = [
        (component("sa"), 1 + 3),
        (component("da"), 3),
        (component("mlp"), 1 + 2 + 3),
        (Owner::Pool(0), 2),
        (Owner::Saved(0), 1),
        (Owner::Saved(1), 1),
        (Owner::Choice, 1),
    ];
    for (owner, rows) in expected {
        assert_eq!(architecture.rows_of(owner), rows, "{owner:?}");
    }
    for absent in [Owner::Exit, Owner::Members, Owner::Sources, Owner::Pool(1), Owner::Saved(2)] {
        assert_eq!(architecture.cache_of(absent), None, "{absent:?}");
    }
    assert_eq!(architecture.caches().count(), expected.len());
    for (row, owner) in architecture.caches().enumerate() {
        assert_eq!(architecture.cache_of(owner), Some(row));
    }
}
