//! Every rule: it fires where it should, refuses where it must, and what it gives is what there
//! was: proved in f64 on random tensors, and by gradients where it is used before differentiation.
//! Each failure names the seed.

use super::extract::Extractor;
use super::language::convert;
use super::price::{Seen, Standing};
use super::{Context, RULES, Rewriting, Stage, Target, explore, rewrite};
use crate::autodiff::{Seed, differentiate};
use crate::ir::interpret::{Data, Tensor, interpret};
use crate::ir::random::Rng;
use crate::ir::{Binding, DType, Function, Module, Port, parse, verify};

mod cases;
use cases::cases;

/// How often a rule is proved, each time with other sizes.
const SEEDS: u64 = 12;

/// A function on which a rule fires, or must not.
struct Case {
    rule: &'static str,
    /// The rules that may be used.
    with: &'static [&'static str],
    /// Parameters and nodes; `{a}` to `{e}` are sizes: random ones of 1 to 5, `{e}` even.
    text: String,
    /// Whether the rule fires.
    fires: bool,
}

fn context(stage: Stage) -> Context {
    Context { stage, uses: 1e6, indices: vec![("zero".into(), 0)], packed: vec![], narrow: false }
}

fn fill(text: &str, rng: &mut Rng, round: u64) -> String {
    let mut text = text.to_string();
    for name in ["a", "b", "c", "d", "e"] {
        // The first round has sizes of 1 alone, where 1 is even enough.
        let size = match name {
            "e" => 2 + 2 * rng.below(3),
            _ if round == 0 => 1,
            _ => 1 + rng.below(5),
        };
        text = text.replace(&format!("{{{name}}}"), &size.to_string());
        let next = size + 1;
        text = text.replace(&format!("{{{name}+1}}"), &next.to_string());
    }
    let (a, b) = (size_of(&text, "batch"), size_of(&text, "seq"));
    let k = size_of(&text, "k");
    text.replace("{slots}", &(a * b).to_string()).replace("{s}", &(a * b * k).to_string())
}

fn size_of(text: &str, dim: &str) -> u64 {
    let mut words = text.split_whitespace();
    words.find(|w| *w == dim);
    words.next().and_then(|w| w.parse().ok()).unwrap_or(1)
}

fn arguments(module: &Module, f: &Function, rng: &mut Rng) -> Vec<Tensor> {
    let tensor = |(p, ty): (&Port, &crate::ir::Type)| {
        let dims: Vec<usize> = ty.dims.iter().map(|&d| module.size(d) as usize).collect();
        let count: usize = dims.iter().product();
        match ty.dtype {
            DType::I32 => {
                // A known index is what it is known to be; ids and positions are below what is
                // there.
                let most = if p.binding.is_index() || p.name == "targets" { 1 } else { 4 };
                Tensor::int(&dims, (0..count).map(|_| rng.below(most) as i32).collect())
            }
            _ => Tensor::float(&dims, (0..count).map(|_| rng.between(-1.5, 1.5)).collect()),
        }
    };
    f.params.iter().zip(&f.types).map(tensor).collect()
}

/// Largest difference of float results, relative to the largest value.
fn difference(a: &[(String, Tensor)], b: &[(String, Tensor)]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mut worst = 0.0f64;
    for ((n, x), (m, y)) in a.iter().zip(b) {
        assert_eq!((n, &x.dims), (m, &y.dims));
        match (&x.data, &y.data) {
            (Data::Float(x), Data::Float(y)) => {
                let scale = x.iter().fold(1e-3f64, |s, v| s.max(v.abs()));
                for (a, b) in x.iter().zip(y) {
                    let d = (a - b).abs() / scale;
                    worst =
                        worst.max(if d.is_nan() && a.to_bits() != b.to_bits() { f64::INFINITY } else { d });
                }
            }
            (x, y) => assert!(x == y, "{n} differs"),
        }
    }
    worst
}

/// The function with what the rule made of it in place of the original, priced or not.
fn applied(module: &mut Module, f: &Function, case: &Case, stage: Stage) -> (Function, bool) {
    let rewriting = Rewriting::only(&[case.with, &[case.rule]].concat());
    super::rewrite_eagerly(module, f, &context(stage), &rewriting, case.rule).expect("it rewrites")
}

fn stage(rule: &str) -> Stage {
    super::rules::find(rule).expect("a rule").stage
}

#[test]
fn rules_fire_where_they_should_and_nowhere_else() {
    for case in cases() {
        let (mut fired, mut rng) = (0, Rng::new(7));
        for round in 0..SEEDS {
            let text = fill(&case.text, &mut rng, round);
            let mut module = parse(&text).unwrap_or_else(|e| panic!("{}: {e}\n{text}", case.rule));
            if let Err(e) = verify(&module) {
                panic!("{}: {e}\n{text}", case.rule);
            }
            let f = module.functions[0].clone();
            let (_, did) = applied(&mut module, &f, &case, stage(case.rule));
            fired += u64::from(did);
        }
        let all = if case.fires { SEEDS } else { 0 };
        assert_eq!(fired, all, "{} on\n{}", case.rule, case.text);
    }
}

/// Blocks would be unpacked to be laid under each other.
#[test]
fn packed_matrices_are_not_stacked() {
    for case in cases().iter().filter(|c| c.rule.starts_with("stack") && c.fires) {
        let text = fill(&case.text, &mut Rng::new(7), 1);
        let rewriting = Rewriting::only(&[case.with, &[case.rule]].concat());
        let fires = |packed: &dyn Fn(&Port) -> bool| {
            let mut module = parse(&text).unwrap();
            let f = module.functions[0].clone();
            let packed = f.params.iter().filter(|p| packed(p)).map(|p| p.name.clone()).collect();
            let context = Context { packed, ..context(Stage::Inference) };
            super::rewrite_eagerly(&mut module, &f, &context, &rewriting, case.rule).expect("it rewrites").1
        };
        assert!(fires(&|_| false), "{text}");
        assert!(!fires(&|port| port.binding.is_weights()), "{text}");
    }
}

#[test]
fn every_rule_has_a_case_for_and_a_case_against() {
    let cases = cases();
    for rule in RULES {
        for fires in [true, false] {
            let found = cases.iter().any(|c| c.rule == rule.name && c.fires == fires);
            assert!(found, "{} lacks a case that {}", rule.name, if fires { "fires" } else { "refuses" });
        }
    }
}

#[test]
fn both_sides_of_every_rule_are_equal() {
    for case in cases().iter().filter(|c| c.fires) {
        for seed in 0..SEEDS {
            let mut rng = Rng::new(seed);
            let text = fill(&case.text, &mut rng, seed);
            let mut module = parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let f = module.functions[0].clone();
            let (g, did) = applied(&mut module, &f, case, stage(case.rule));
            assert!(did && g != f, "{}, seed {seed}: nothing changed\n{text}", case.rule);
            let args = arguments(&module, &f, &mut rng);
            let of = |f: &Function| {
                interpret(&module, f, &args).unwrap_or_else(|e| {
                    panic!("{}, seed {seed}: {e}\n{}", case.rule, module.show_function(f))
                })
            };
            let d = difference(&of(&f), &of(&g));
            assert!(d < 1e-11, "{}, seed {seed}: differs by {d}\n{}", case.rule, module.show_function(&g));
            let types = |f: &Function| f.results.iter().map(|(_, v)| f.ty(*v).clone()).collect::<Vec<_>>();
            assert_eq!(types(&f), types(&g), "{}: precision or shape changed", case.rule);
            if stage(case.rule) == Stage::Differentiable {
                let d = gradients(&module, &f, &g, &args, &mut rng);
                assert!(d < 1e-10, "{}, seed {seed}: gradients differ by {d}", case.rule);
            }
        }
    }
}

/// Largest difference of the gradients of two functions of the same parameters.
fn gradients(module: &Module, f: &Function, g: &Function, args: &[Tensor], rng: &mut Rng) -> f64 {
    let float = |f: &Function, v: crate::ir::Value| f.ty(v).dtype.is_float();
    // State is threaded through calls by its own cotangents; statistics have none.
    let seeds: Vec<(&str, Seed)> = f
        .results
        .iter()
        .filter(|(p, v)| float(f, *v) && p.name != "lse")
        .map(|(p, _)| (p.name.as_str(), Seed::Param))
        .collect();
    let wanted = |p: &Port| p.binding != Binding::Buffer;
    let mut both = vec![];
    let mut cotangents: Vec<(String, Tensor)> = vec![];
    for function in [f, g] {
        let mut module = module.clone();
        let joint = differentiate(&mut module, function, &seeds, &wanted).expect("it has a derivative");
        let mut all = args.to_vec();
        for (p, ty) in joint.params.iter().zip(&joint.types).skip(args.len()) {
            if !cotangents.iter().any(|(n, _)| *n == p.name) {
                let mut t = Tensor::zeros(&module, ty);
                if let Data::Float(x) = &mut t.data {
                    x.iter_mut().for_each(|x| *x = rng.between(-1.0, 1.0));
                }
                cotangents.push((p.name.clone(), t));
            }
            all.push(cotangents.iter().find(|(n, _)| *n == p.name).expect("made").1.clone());
        }
        let results = interpret(&module, &joint, &all).expect("it runs");
        both.push(results.into_iter().filter(|(n, _)| n.starts_with("d.")).collect::<Vec<_>>());
    }
    difference(&both[0], &both[1])
}

#[test]
fn extraction_is_close_to_the_best_there_is() {
    let mut compared = 0;
    for case in cases().iter().filter(|c| c.fires) {
        for seed in 0..4 {
            let mut rng = Rng::new(seed + 100);
            let text = fill(&case.text, &mut rng, seed)
                .replace("hidden 1 ", "hidden 64 ")
                .replace("out 1 ", "out 32 ");
            let Ok(mut module) = parse(&text) else { continue };
            if verify(&module).is_err() {
                continue;
            }
            let f = module.functions[0].clone();
            let context = Context { uses: 8.0, ..context(Stage::Inference) };
            let Some((found, best)) = super::against_exact(&mut module, &f, &context, &Rewriting::default())
            else {
                continue;
            };
            compared += 1;
            assert!(found <= best * (1.0 + 1e-9), "{}, seed {seed}: {found} s, best {best} s", case.rule);
        }
    }
    println!("{compared} graphs compared");
    assert!(compared > 20, "only {compared} graphs were small enough");
}

#[test]
fn unequal_facts_do_not_merge() {
    let module =
        parse("dims { n 2 m 3 } func @f { input %x : f32[n] input %y : f32[m] return x = %x, y = %y }")
            .unwrap();
    let f = &module.functions[0];
    let mut c = convert(&module, f, &context(Stage::Inference), false);
    c.graph.union_trusted(c.values[0], c.values[1], "a lie");
    c.graph.rebuild();
    assert!(c.graph.analysis.contradiction.is_some());
    let numbers =
        parse("dims { } func @f { %0 = constant 1 : f32[] %1 = constant 2 : f32[] return a = %0, b = %1 }")
            .unwrap();
    let mut c = convert(&numbers, &numbers.functions[0], &context(Stage::Inference), false);
    c.graph.union_trusted(c.values[0], c.values[1], "another");
    c.graph.rebuild();
    assert!(c.graph.analysis.contradiction.is_some());
}

#[test]
fn a_function_comes_back_as_it_was() {
    let mut rng = Rng::new(3);
    for case in cases().iter().filter(|c| c.rule != "unit") {
        let module = parse(&fill(&case.text, &mut rng, 1)).unwrap();
        let f = &module.functions[0];
        let none = Rewriting::only(&[]);
        let (g, _) = rewrite(&mut module.clone(), f, &context(Stage::Differentiable), &none).unwrap();
        assert_eq!(crate::autodiff::prune_nodes(f), g);
    }
}

#[test]
fn sharing_is_counted_once() {
    // Twenty layers of x + x: a tree has a million nodes, the graph twenty.
    let mut text = String::from("dims { n 8 } func @f { input %x : f32[n] %0 = add %x, %x : f32[n] ");
    for i in 1..20 {
        text += &format!("%{i} = add %{}, %{} : f32[n] ", i - 1, i - 1);
    }
    let module = parse(&(text + "return y = %19 }")).unwrap();
    let c = convert(&module, &module.functions[0], &context(Stage::Inference), false);
    let x = Extractor::new(&c.graph, c.root, Target::CPU, &context(Stage::Inference));
    let price = x.price(&x.original(&c.order)).unwrap();
    assert_eq!(price.launches, 1.0);
    assert!(price.seconds < 1e-5, "{price:?}");
}

/// The price of a move by what it changes is the difference of two whole prices, whether the move
/// is kept or taken back.
#[test]
fn moves_are_priced_as_whole_selections_are() {
    let mut rng = Rng::new(11);
    let mut modules: Vec<(Module, Function)> = vec![];
    for case in cases() {
        let module = parse(&fill(&case.text, &mut rng, 1)).unwrap();
        modules.push((module.clone(), module.functions[0].clone()));
    }
    modules.extend(functions_of("tiny-mod-dr.yaml"));
    let mut kept = 0;
    for (module, f) in &modules {
        let context = Context { uses: 3.0, ..context(Stage::Differentiable) };
        let explored = explore(module, f, &context, &Rewriting::default()).unwrap();
        let x = Extractor::new(&explored.graph, explored.root, Target::CPU, &context);
        let mut moves = explored.moves(&x);
        moves.extend(x.singles().map(|one| vec![one]));
        let mut selection = x.original(&explored.order);
        let mut now = Standing::new(&x, selection.clone()).unwrap();
        for round in 0..100.min(4 * moves.len()) {
            let mut to = vec![];
            for _ in 0..1 + rng.below(3) {
                to.extend(&moves[rng.below(moves.len() as u64) as usize]);
            }
            let mut moved = selection.clone();
            to.iter().for_each(|&(class, node)| moved[class] = node);
            let (before, after) = (x.price(&selection).unwrap(), x.price(&moved));
            let change = now.clone().step(&to);
            assert_eq!(change.is_some(), after.is_some(), "{}, move {round}: {to:?}", f.name);
            let (Some(change), Some(after)) = (change, after) else { continue };
            let near = |a: f64, b: f64, of: f64| (a - b).abs() <= 1e-9 * of.abs();
            let context = || format!("{}, move {round}: {change:?} of {before:?} to {after:?}", f.name);
            assert!(near(change.seconds, after.seconds - before.seconds, before.seconds), "{}", context());
            assert!(near(change.flops, after.flops - before.flops, before.flops), "{}", context());
            assert!(near(change.bytes, after.bytes - before.bytes, before.bytes), "{}", context());
            assert!(
                near(change.launches, after.launches - before.launches, before.launches),
                "{}",
                context()
            );
            if rng.once_in(3) {
                now.step(&to);
                selection = moved;
                kept += 1;
            } else if now.improve(&to, &mut None, &mut usize::MAX.clone()) {
                selection = moved;
                kept += 1;
            }
            assert_eq!(now.clone().into_selection(), selection, "{}, move {round}", f.name);
        }
    }
    assert!(kept > 100, "{kept}");
}

/// A move that was not worth it is not tried again until something changes that its price depends
/// on: each that the search leaves out is still worth nothing.
#[test]
fn moves_left_out_are_worth_nothing() {
    let (mut left_out, mut kept) = (0, 0);
    for example in ["tiny-dr-da.yaml", "tiny-la.yaml", "tiny-mod-dr.yaml"] {
        for (module, f) in functions_of(example) {
            let context = context(Stage::Final);
            let explored = explore(&module, &f, &context, &Rewriting::default()).unwrap();
            let x = Extractor::new(&explored.graph, explored.root, Target::CPU, &context);
            let original = x.original(&explored.order);
            let mut all = explored.moves(&x);
            all.extend(x.singles().map(|one| vec![one]));
            let mut now = Standing::new(&x, original).unwrap();
            let mut seen: Vec<Option<Seen>> = all.iter().map(|_| None).collect();
            for round in 0..5 {
                if round == 3 {
                    // As the search does: what was tried before holds where this changed nothing.
                    now = now.settled(&explored.moves(&x), &mut usize::MAX.clone());
                }
                for (to, seen) in all.iter().zip(&mut seen) {
                    if seen.as_ref().is_some_and(|seen| now.is_as(seen)) {
                        let total = now.total().seconds;
                        let change = now.clone().step(to).map_or(0.0, |change| change.seconds);
                        assert!(change >= -1e-11 * total, "{}: {to:?} is worth {change} of {total}", f.name);
                        left_out += 1;
                    }
                    kept += usize::from(now.improve(to, seen, &mut usize::MAX.clone()));
                }
            }
        }
    }
    assert!(left_out > 200 && kept > 10, "{left_out} left out, {kept} kept");
}

/// The differentiated functions of an example.
fn functions_of(example: &str) -> Vec<(Module, Function)> {
    let path = format!("{}/../examples/{example}", env!("CARGO_MANIFEST_DIR"));
    let spec = dreamc_dsl::load(&path, &[]).unwrap_or_else(|e| panic!("{e}")).0;
    let options = crate::Options { batch: 2, sequence: 64, train: true, ..Default::default() };
    let found = std::cell::RefCell::new(vec![]);
    let watch = |pass, module: &mut Module, f: &mut Function| {
        if pass == crate::Pass::Differentiate {
            found.borrow_mut().push((module.clone(), f.clone()));
        }
    };
    crate::compile_watched(&spec, &options, &watch).unwrap();
    found.into_inner()
}
