//! Tokens that skip: what must hold for every model, and what public code gets wrong.

use crate::support::{cpu, error};
use dreamc_compiler::compiled::Entry;
use dreamc_compiler::ir::interpret::{Tensor, evaluate};
use dreamc_compiler::ir::random::Rng;
use dreamc_compiler::ir::{Module, Op, Type};
use dreamc_compiler::lower::{Shape, attention};
use dreamc_compiler::op::TopTokens;
use dreamc_compiler::oracle::{self, Oracle};
use dreamc_compiler::precision::Narrow;
use dreamc_compiler::program::ProgramKey;
use dreamc_compiler::rewrite::Rewriting;
use dreamc_compiler::{Cache, CompileError, Compiled, Options, compile};
use dreamc_data::{Batch, Dataset, Settings};
use dreamc_device::{Device, Group, Instrument, Session};
use dreamc_dsl::{Spec, Spelling};
use dreamc_runtime::generate::{Cached, Growing, Next, NextLogits, Sampling, Writing, compile_cached};
use dreamc_runtime::model::{Model, ModelError, Scale};
use dreamc_runtime::train::health::Health;
use dreamc_runtime::train::prepare::health_observer;
use dreamc_verify::{Compiler, Task, verify};
use indexmap::IndexMap;

const BATCH: usize = 2;
const TOKENS: usize = 8;
const HIDDEN: usize = 6;

/// A spec with that body over `sa`, `near` (a window of 3), `mlp`, `ea` (one of its four candidates
/// does nothing), `da` and `capped`, a depth attention with a soft-cap.
fn spec(body: &str) -> Spec {
    let text = format!(
        "model:\n  name: skipping\n  vocab: 11\n  hidden: {HIDDEN}\n  context: 16\n  components:\n    \
         sa: {{sequence: {{heads: 2, kv_heads: 1, head_size: 4}}}}\n    \
         near: {{sequence: {{heads: 1, head_size: 4, window: 3}}}}\n    \
         mlp: {{mlp: {{intermediate: 5}}}}\n    \
         ea: {{experts: {{count: 3, active: 2, intermediate: 4, query: 4, noop: 1}}}}\n    \
         da: {{depth: {{heads: 2, kv_heads: 1, head_size: 4}}}}\n    \
         capped: {{depth: {{heads: 1, head_size: 4, softcap: 0.5}}}}\n  \
         body: {body}\ntrain: {{steps: 1, batch: {BATCH}}}\n"
    );
    let ast = dreamc_dsl::parse("test", &text, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
    dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0
}

struct Run {
    compiled: Compiled,
    session: Box<dyn Session>,
    /// One over the number of targets.
    loss_scale: f32,
}

impl Run {
    /// Weights are random, and the same for tensors of one name and size.
    fn new(spec: &Spec) -> Self {
        let options = Options {
            batch: BATCH as u64,
            sequence: TOKENS as u64,
            train: true,
            logits: true,
            ..Options::default()
        };
        let compiled = compile(spec, &options).unwrap();
        let session = cpu(2).load(&compiled.plan, &Group::alone()).unwrap();
        let mut run = Run { compiled, session, loss_scale: 1.0 };
        for t in run.compiled.tensors.clone() {
            let values = weight(&t.name, t.shape.iter().product());
            run.session.write_at(t.weight, t.instance, 0, &values).unwrap();
        }
        run
    }

    fn set(&mut self, name: &str, values: &[f32]) {
        let t = self.compiled.tensors.iter().find(|t| t.name == name).unwrap().clone();
        self.session.write_at(t.weight, t.instance, 0, values).unwrap();
    }

    fn run(&mut self, program: ProgramKey, ids: &[i32]) -> Vec<f32> {
        let positions: Vec<i32> = (0..BATCH * TOKENS).map(|i| (i % TOKENS) as i32).collect();
        for (name, values) in [("ids", ids), ("targets", ids), ("positions", &positions)] {
            if let Some(id) = self.compiled.plan.find(name) {
                self.session.write_at(id, 0, 0, values).unwrap();
            }
        }
        for (name, scale) in [("loss_scale", self.loss_scale), ("aux_scale", 1.0)] {
            if let Some(id) = self.compiled.plan.find(name) {
                self.session.write_at(id, 0, 0, &[scale]).unwrap();
            }
        }
        self.session.run(program).unwrap();
        self.read("logits")
    }

    /// The network of the first layer on one token's stream, without the residual.
    fn network(&mut self, x: &[f64]) -> Vec<f64> {
        // Every token embeds to this stream.
        let all: Vec<f32> = (0..11).flat_map(|_| x.iter().map(|x| *x as f32)).collect();
        self.set("embed.weight", &all);
        self.run(ProgramKey::EVALUATE, &[0; BATCH * TOKENS]);
        let stream = self.read("stream");
        let behind = &stream[BATCH * TOKENS * HIDDEN..][..HIDDEN];
        behind.iter().zip(&stream).map(|(y, x)| f64::from(*y) - f64::from(*x)).collect()
    }

    fn read(&self, name: &str) -> Vec<f32> {
        self.session.read_all(self.compiled.plan.find(name).unwrap()).unwrap()
    }

    /// Which tokens of each sequence differ in any bit between two instances of the stream.
    fn changed(&self, from: usize, to: usize) -> Vec<Vec<usize>> {
        let stream = self.read("stream");
        let row = |at: usize, i: usize| {
            let start = (at * BATCH * TOKENS + i) * HIDDEN;
            stream[start..start + HIDDEN].iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        };
        (0..BATCH)
            .map(|b| (0..TOKENS).filter(|&t| row(from, b * TOKENS + t) != row(to, b * TOKENS + t)).collect())
            .collect()
    }
}

fn weight(name: &str, n: u64) -> Vec<f32> {
    let seed = name.bytes().fold(7u64, |s, b| s.wrapping_mul(31).wrapping_add(u64::from(b)));
    let mut rng = Rng::new(seed);
    let wide = if name.ends_with("norm.weight") { 0.3 } else { 0.9 };
    let middle = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
    (0..n).map(|_| (middle + rng.between(-wide, wide)) as f32).collect()
}

fn ids(seed: u64) -> Vec<i32> {
    let mut rng = Rng::new(seed);
    (0..BATCH * TOKENS).map(|_| rng.below(11) as i32).collect()
}

#[test]
fn as_many_are_chosen_as_there_is_room_for_and_of_equals_the_first() {
    let mut module = Module::default();
    let (b, t) = (module.dim("b", 1), module.dim("t", 5));
    for (k, scores, expected) in [
        (3, [0.0, 0.0, 0.0, 0.0, 0.0], vec![0, 1, 2]),
        (2, [1.0, 2.0, 2.0, 0.0, 2.0], vec![1, 2]),
        (1, [-0.0, 0.0, -1.0, 0.0, -0.0], vec![0]),
        (2, [f64::NAN, -5.0, -7.0, f64::NAN, -6.0], vec![1, 4]),
        (5, [3.0, 1.0, 2.0, 5.0, 4.0], vec![0, 1, 2, 3, 4]),
    ] {
        let op = Op::TopTokens(TopTokens { k: module.dim(format!("k{k}"), k) });
        let r = Tensor::float(&[1, 5], scores.to_vec());
        let (found, _) = evaluate(&module, &op, &[&Type::f32(&[b, t])], &[r]).unwrap();
        assert_eq!(found[0].ints(), expected, "{k} of {scores:?}");
    }
    // The same on the device: one layer, eight tokens, room for three.
    let mut run = Run::new(&spec("[\"skip(capacity 0.4) { sa > mlp }\"]"));
    for seed in 0..5 {
        run.run(ProgramKey::BACKWARD, &ids(seed));
        assert!(run.changed(0, 1).iter().all(|changed| changed.len() == 3), "{:?}", run.changed(0, 1));
    }
    run.run(ProgramKey::BACKWARD, &[4; BATCH * TOKENS]);
    assert_eq!(run.changed(0, 1), vec![vec![0, 1, 2]; BATCH], "equal tokens have equal scores");
}

#[test]
fn a_share_that_is_whole_on_paper_is_whole_here() {
    // 0.29 · 100 is 28.999999999999996 in binary.
    let options = Options { batch: 1, sequence: 100, train: true, logits: true, ..Options::default() };
    let compiled = compile(&spec("[\"skip(capacity 0.29) { mlp }\"]"), &Options { ..options }).unwrap();
    assert!(compiled.plan.to_string().contains("top_tokens 1: 29 of 100"), "{}", compiled.plan);
}

#[test]
fn rows_of_tokens_that_skip_keep_their_bits() {
    let rules = [
        "skip(capacity 0.5, causal bce 0.1) { sa > ea }",
        "skip(capacity 0.5, causal predictor 3) { near | mlp }",
        "skip(threshold, capacity 0.5, penalty 0.1) { sa > mlp }",
    ];
    for rule in rules {
        let mut run = Run::new(&spec(&format!("[\"near\", \"{rule}\"]")));
        for program in [ProgramKey::BACKWARD, ProgramKey::EVALUATE] {
            let mut seen = vec![];
            for seed in 0..4 {
                run.run(program, &ids(seed));
                seen.extend(run.changed(1, 2));
            }
            let all: usize = seen.iter().map(Vec::len).sum();
            assert!(all > 0 && all < seen.len() * TOKENS, "{rule}, {program}: {seen:?}");
        }
    }
}

#[test]
fn a_later_token_changes_training_and_never_what_is_sampled() {
    let rule = "skip(capacity 0.5, causal bce 0.1) { sa > mlp }";
    let mut run = Run::new(&spec(&format!("[\"near\", \"{rule}\", \"{rule}\"]")));
    let (mut training, mut sampled) = (0.0f32, 0.0f32);
    for seed in 0..8 {
        let first = ids(seed);
        let mut second = first.clone();
        for b in 0..BATCH {
            second[b * TOKENS + TOKENS - 1] = (second[b * TOKENS + TOKENS - 1] + 3) % 11;
        }
        for (program, most) in [(ProgramKey::BACKWARD, &mut training), (ProgramKey::EVALUATE, &mut sampled)] {
            let (a, b) = (run.run(program, &first), run.run(program, &second));
            for (i, (a, b)) in a.chunks(11).zip(b.chunks(11)).enumerate() {
                if i % TOKENS < TOKENS - 1 {
                    *most = a.iter().zip(b).fold(*most, |m, (a, b)| m.max((a - b).abs()));
                }
            }
        }
    }
    assert!(training > 1e-3, "top-k takes no notice of later tokens: {training}");
    assert!(sampled < 1e-6, "evaluation looks ahead: {sampled}");
}

#[test]
fn a_model_that_looks_ahead_is_not_sampled() {
    let cache = Some(Cache { places: 8, chunk: 4, slack: f64::INFINITY, every: false });
    let options = Options { batch: 1, sequence: 4, cache, ..Options::default() };
    for body in
        ["skip(capacity 0.5) { sa }", "skip(threshold, level sequence, capacity 0.5, penalty 1) { sa }"]
    {
        let spec = spec(&format!("[\"{body}\"]"));
        assert_eq!(compile(&spec, &options).err(), Some(CompileError::LooksAhead));
        assert!(dreamc_compiler::looks_ahead(&spec.model));
        compile(&spec, &Options { train: true, cache: None, ..options.clone() }).unwrap();
    }
    // Where every token is processed there is nothing to look ahead for.
    let whole = spec("[\"skip(capacity 1) { sa }\"]");
    assert!(!dreamc_compiler::looks_ahead(&whole.model));
    compile(&whole, &options).unwrap();
}

/// Multiply-adds of the wrapped layer, by what the launches are: as many as the tokens that take
/// part, their queries and keys.
#[test]
fn tokens_that_skip_do_no_work() {
    let wrapped = "skip(capacity 0.5, causal bce 0.1, norm_only) { sa > mlp }";
    let mut run = Run::new(&spec(&format!("[\"{wrapped}\"]")));
    run.session.instrument(Instrument { count: true, time: false });
    let ids: Vec<i32> = (0..BATCH * TOKENS).map(|i| (i * 5 % 11) as i32).collect();
    let mut counted = |scale: f32, offset: f32| {
        run.set("layers.0.skip.0.router.scale.weight", &[scale]);
        run.set("layers.0.skip.0.router.offset.weight", &[offset]);
        run.run(ProgramKey::EVALUATE, &ids);
        let taking: Vec<u64> = run.changed(0, 1).iter().map(|c| c.len() as u64).collect();
        let stats = run.session.run(ProgramKey::EVALUATE).unwrap();
        let of = |kind: &str| {
            let own =
                stats.by_launch.iter().filter(|l| l.origin.contains("layer0") && l.origin.contains(kind));
            own.map(|l| l.multiply_adds).sum::<u64>()
        };
        (taking, of("contract"), of("attention"))
    };
    // Queries, keys and values, the output, and the three matrices of the network; two products a
    // pair and head.
    let (h, q, k, i) = (HIDDEN as u64, 8, 4, 5);
    let token = h * (q + 2 * k) + q * h + 3 * h * i;
    let expected = |taking: &[u64]| {
        let pairs: u64 = taking.iter().map(|n| n * (n + 1) / 2).sum();
        (taking.iter().sum::<u64>() * token, pairs * 2 * q)
    };
    let mut seen = std::collections::BTreeSet::new();
    for (scale, offset) in [(0.0, 1.0), (0.0, -1.0), (1.0, -1.0), (1.0, -1.3), (1.0, -1.6), (-1.0, 1.3)] {
        let (taking, products, attention) = counted(scale, offset);
        assert_eq!((products, attention), expected(&taking), "{scale}·‖x‖ + {offset}: {taking:?} take part");
        seen.insert(taking.iter().sum::<u64>());
    }
    assert!(seen.contains(&0) && seen.contains(&16) && seen.len() > 3, "{seen:?}");

    // In training, work of half of the tokens, and scores of all: forward, and two products back.
    let trained = |body: &str| {
        let mut run = Run::new(&spec(body));
        run.session.instrument(Instrument { count: true, time: false });
        run.run(ProgramKey::BACKWARD, &ids);
        let stats = run.session.run(ProgramKey::BACKWARD).unwrap();
        let own =
            stats.by_launch.iter().filter(|l| l.origin.contains("layer0") && l.origin.contains("contract"));
        own.map(|l| l.multiply_adds).sum::<u64>()
    };
    let (plain, half) = (trained("[\"sa > mlp\"]"), trained("[\"skip(capacity 0.5) { sa > mlp }\"]"));
    let scores = 3 * (BATCH * TOKENS * HIDDEN) as u64;
    assert!(half >= plain / 2 && half <= plain / 2 + scores, "{half} of {plain}");
}

/// Positions in a cache are those of the tokens that uncached evaluation processes, in order, and
/// nothing is after them.
#[test]
fn caches_hold_processed_tokens_alone() {
    let mut all = spec("[\"sa\", \"skip(capacity 0.5, causal bce 0.1) { near > mlp }\"]");
    all.model.context = TOKENS as u64;
    let mut run = Run::new(&all);
    let (mut some, mut most) = (0, 0);
    for seed in 0..6 {
        let ids = ids(seed);
        run.run(ProgramKey::EVALUATE, &ids);
        let taking = run.changed(1, 2);
        let device = cpu(1);
        let compiled = compile_cached(&all, &Writing { rows: BATCH as u64, ..Writing::default() }).unwrap();
        let mut cached = Cached::load(&device, compiled).unwrap();
        for t in cached.loaded().compiled().tensors.clone() {
            cached.model().set(&t.name, &weight(&t.name, t.shape.iter().product())).unwrap();
        }
        let text =
            |row: usize, n: usize| ids[row * TOKENS..row * TOKENS + n].iter().map(|i| *i as u32).collect();
        cached.start(&[text(0, 5), text(1, 5)]).unwrap();
        for i in 5..TOKENS {
            cached.advance(&[ids[i] as u32, ids[TOKENS + i] as u32]).unwrap();
        }
        let compiled = cached.loaded().compiled();
        let cache = compiled.caches(Entry::Prefill, attention::part::CACHED).next().unwrap().buffer;
        let positions = cached.loaded().read_ints(cache).unwrap();
        for (row, taking) in taking.iter().enumerate() {
            let mut expected: Vec<i32> = taking.iter().map(|i| *i as i32).collect();
            expected.resize(TOKENS, -1);
            assert_eq!(positions[row * TOKENS..(row + 1) * TOKENS], expected, "seed {seed}, row {row}");
            some += taking.len();
            most += TOKENS;
        }
        // Nothing was ever written after them.
        let compiled = cached.loaded().compiled();
        let owner = &compiled.caches(Entry::Prefill, attention::part::CACHED).next().unwrap().owner;
        let keys = compiled
            .caches(Entry::Prefill, attention::part::KEYS)
            .find(|c| c.owner == *owner)
            .unwrap()
            .buffer;
        let keys: Vec<f32> = cached.loaded().session().read_all(keys).unwrap();
        for (row, keys) in keys.chunks(TOKENS * 4).enumerate() {
            for (entry, key) in keys.chunks(4).enumerate() {
                assert_eq!(
                    key.iter().any(|x| *x != 0.0),
                    entry < taking[row].len(),
                    "row {row}, entry {entry}"
                );
            }
        }
        cached.start(&[text(0, 1)]).unwrap();
        assert!(cached.processed().unwrap()[0].1[0][1] == 0, "a new text begins with empty caches");
    }
    assert!(some > 0 && some < most, "{some} of {most}");
}

/// Mistakes of public code in place of the paper's function, each distinguished from our result.
mod mistakes_of_public_code {
    use super::*;

    /// The stream before and after the first layer of a model, row by row, for one sequence with
    /// these positions.
    fn layer(body: &str, ids: &[i32], positions: &[i32], program: ProgramKey) -> [Vec<Vec<f64>>; 2] {
        let options =
            Options { batch: 1, sequence: ids.len() as u64, train: true, logits: true, ..Options::default() };
        let compiled = compile(&spec(body), &options).unwrap();
        let session = cpu(1).load(&compiled.plan, &Group::alone()).unwrap();
        let mut run = Run { compiled, session, loss_scale: 1.0 };
        for t in run.compiled.tensors.clone() {
            run.set(&t.name, &weight(&t.name, t.shape.iter().product()));
        }
        for (name, values) in [("ids", ids), ("targets", ids), ("positions", positions)] {
            if let Some(id) = run.compiled.plan.find(name) {
                run.session.write_at(id, 0, 0, values).unwrap();
            }
        }
        run.session.run(program).unwrap();
        let stream = run.read("stream");
        let each: Vec<Vec<f64>> =
            stream.chunks(HIDDEN).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect();
        [each[..ids.len()].to_vec(), each[ids.len()..2 * ids.len()].to_vec()]
    }

    fn text(n: usize) -> (Vec<i32>, Vec<i32>) {
        ((0..n).map(|i| (i * 7 % 11) as i32).collect(), (0..n as i32).collect())
    }

    /// Scores of a router on a stream.
    fn scores(x: &[Vec<f64>]) -> Vec<f64> {
        let w = weight("layers.0.skip.0.router.weight", HIDDEN as u64);
        x.iter().map(|x| x.iter().zip(&w).map(|(x, w)| x * f64::from(*w)).sum()).collect()
    }

    /// The tokens of the `k` largest scores, in order.
    fn largest(r: &[f64], k: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..r.len()).collect();
        order.sort_by(|a, b| r[*b].total_cmp(&r[*a]).then(a.cmp(b)));
        let mut chosen = order[..k].to_vec();
        chosen.sort_unstable();
        chosen
    }

    fn combine(x: &[f64], f: &[f64], of: impl Fn(f64, f64) -> f64) -> Vec<f64> {
        x.iter().zip(f).map(|(x, f)| of(*x, *f)).collect()
    }

    /// Input, output, update by the network alone, score and number of a token.
    type Chosen = (Vec<f64>, Vec<f64>, Vec<f64>, f64, usize);

    /// Each chosen token of `skip(capacity 0.5) { mlp }`.
    fn chosen_of_a_network() -> Vec<Chosen> {
        let (ids, positions) = text(8);
        let [x, y] = layer("[\"skip(capacity 0.5) { mlp }\"]", &ids, &positions, ProgramKey::BACKWARD);
        let [_, plain] = layer("[\"mlp\"]", &ids, &positions, ProgramKey::BACKWARD);
        let r = scores(&x);
        let chosen = largest(&r, 4);
        let f = |i: usize| combine(&x[i], &plain[i], |x, y| y - x);
        chosen.iter().map(|&i| (x[i].clone(), y[i].clone(), f(i), r[i], i)).collect()
    }

    /// Our result, distinguished from a mistake.
    fn told(right: &dyn Fn(f64, f64, f64) -> f64, wrong: &dyn Fn(f64, f64, f64) -> f64) {
        let mut most = 0.0f64;
        for (x, y, f, r, i) in chosen_of_a_network() {
            let e = error(&y, &combine(&x, &f, |x, f| right(x, f, r)));
            assert!(e < 1e-5, "token {i} differs by {e}");
            most = most.max(error(&y, &combine(&x, &f, |x, f| wrong(x, f, r))));
        }
        assert!(most > 1e-2, "the mistake makes no difference: {most}");
    }

    #[test]
    fn residual_added_twice() {
        told(&|x, f, r| x + r * f, &|x, f, r| x + r * (x + f));
    }

    #[test]
    fn score_times_residual() {
        told(&|x, f, r| x + r * f, &|x, f, r| r * (x + f));
    }

    #[test]
    fn softmax_over_the_selected_set() {
        let all: f64 = chosen_of_a_network().iter().map(|c| c.3.exp()).sum();
        told(&|x, f, r| x + r * f, &|x, f, r| x + r.exp() / all * f);
    }

    #[test]
    fn k_minus_1_tokens_selected() {
        let (ids, positions) = text(8);
        for (capacity, k) in [("0.5", 4), ("0.125", 1), ("0.01", 1), ("0.99", 7), ("1", 8)] {
            let body = format!("[\"skip(capacity {capacity}) {{ sa > mlp }}\"]");
            let [x, y] = layer(&body, &ids, &positions, ProgramKey::BACKWARD);
            let changed: Vec<usize> = (0..8).filter(|&i| x[i] != y[i]).collect();
            assert_eq!(changed, largest(&scores(&x), k), "capacity {capacity}");
        }
    }

    #[test]
    fn positions_renumbered() {
        // Rotation sees distances: chosen tokens must not be neighbours.
        let apart = |body: &str| {
            let found = (0..20).find_map(|seed| {
                let ids = super::ids(seed)[..8].to_vec();
                let [x, y] = layer(body, &ids, &[0, 1, 2, 3, 4, 5, 6, 7], ProgramKey::BACKWARD);
                let chosen = largest(&scores(&x), 4);
                (chosen[3] - chosen[0] > 4).then_some((ids, x, y, chosen))
            });
            found.unwrap()
        };
        for (part, seen) in [("sa", 8), ("near", 3)] {
            let (ids, x, y, chosen) = apart(&format!("[\"skip(capacity 0.5) {{ {part} }}\"]"));
            let r = scores(&x);
            // The plain layer on the chosen tokens alone, one query at a time with the keys that it
            // should see.
            let by = |renumbered: bool| {
                let place = |n: usize| if renumbered { n } else { chosen[n] };
                let differs = (0..4).map(|n| {
                    let first = (0..=n).find(|&m| place(n) - place(m) < seen).unwrap();
                    let only: Vec<i32> = (first..=n).map(|m| ids[chosen[m]]).collect();
                    let places: Vec<i32> = (first..=n).map(|m| place(m) as i32).collect();
                    let [of, by] = layer(&format!("[\"{part}\"]"), &only, &places, ProgramKey::BACKWARD);
                    let f = combine(&of[n - first], &by[n - first], |x, y| y - x);
                    let i = chosen[n];
                    error(&y[i], &combine(&x[i], &f, |x, f| x + r[i] * f))
                });
                differs.fold(0.0, f64::max)
            };
            assert!(by(false) < 1e-5, "{part}: original positions differ by {}", by(false));
            assert!(by(true) > 1e-3, "{part}: the mistake makes no difference: {}", by(true));
        }
    }

    /// A token by itself is always among the largest: a choice by rank in generation skips nothing.
    #[test]
    fn top_k_at_decode_so_that_nothing_is_skipped() {
        let spec = spec("[\"skip(capacity 0.5, causal bce 0.1) { sa > mlp }\"]");
        let compiled = compile_cached(&spec, &Writing::default()).unwrap();
        let device = cpu(1);
        let mut cached = Cached::load(&device, compiled).unwrap();
        for t in cached.loaded().compiled().tensors.clone() {
            cached.model().set(&t.name, &weight(&t.name, t.shape.iter().product())).unwrap();
        }
        let (ids, positions) = text(8);
        let [x, _] = layer("[\"mlp\"]", &ids, &positions, ProgramKey::BACKWARD);
        let r = scores(&x);
        cached.start(&[vec![ids[0] as u32]]).unwrap();
        let mut taken = vec![cached.processed().unwrap()[0].1[0][0]];
        for id in &ids[1..] {
            cached.advance(&[*id as u32]).unwrap();
            taken.push(cached.processed().unwrap()[0].1[0][0]);
        }
        let expected: Vec<usize> = (0..8).map(|i| r[..=i].iter().filter(|r| **r > 0.0).count()).collect();
        assert_eq!(taken, expected, "{r:?}");
        assert!(taken[7] > 0 && taken[7] < 8, "{taken:?}");
    }

    /// Keys of zeros in the places of skipped tokens would take their share of every softmax.
    #[test]
    fn stale_zeros_in_the_cache() {
        let (ids, positions) = text(8);
        let [x, y] =
            layer("[\"skip(capacity 0.5, causal bce 0.1) { sa }\"]", &ids, &positions, ProgramKey::EVALUATE);
        let r = scores(&x);
        let taking: Vec<usize> = (0..8).filter(|&i| r[i] > 0.0).collect();
        assert!(taking.len() > 1 && taking.len() < 8);
        let only: Vec<i32> = taking.iter().map(|&i| ids[i]).collect();
        let places: Vec<i32> = taking.iter().map(|&i| i as i32).collect();
        let [of, by] = layer("[\"sa\"]", &only, &places, ProgramKey::BACKWARD);
        for (n, &i) in taking.iter().enumerate() {
            let f = combine(&of[n], &by[n], |x, y| y - x);
            let e = error(&y[i], &combine(&x[i], &f, |x, f| x + r[i] * f));
            assert!(e < 1e-5, "token {i} differs by {e}");
        }
        // And caches give what evaluation gives.
        let spec = spec("[\"skip(capacity 0.5, causal bce 0.1) { sa }\"]");
        let mut run = Run::new(&spec);
        let ids = super::ids(3);
        let evaluated: Vec<f64> = run.run(ProgramKey::EVALUATE, &ids).into_iter().map(f64::from).collect();
        let e = error(&by_caches(&spec, &ids), &evaluated);
        assert!(e < 1e-5, "caches differ by {e}");
    }
}

/// The proofs of `dreamc verify`, for rules and places of `skip`: among it that gradients are
/// derivatives, and that all tokens with a score of 1 are the plain layer.
#[test]
fn every_proof_holds_wherever_a_skip_is() {
    let bodies = [
        "[\"near\", \"skip(capacity 0.5) { sa > mlp }\"]",
        "[\"sa > skip(capacity 0.6, causal bce 0.3 into_input) { near | mlp }\"]",
        "[\"near\", \"skip(capacity 0.7, norm_only, causal bce 0.2 into_input) { sa > skip(capacity 0.5) { near > mlp } }\"]",
        "[\"skip(capacity 0.5, causal predictor 3) { near | ea }\", \"skip(threshold, capacity 0.5, penalty 0.1) { sa > mlp }\"]",
        "[\"da > mlp\", \"skip(capacity 0.6) { (da | sa) > mlp }\", \"da\"]",
        "[\"capped > mlp\", \"skip(capacity 0.6) { (capped | sa) > mlp }\"]",
        "[\"da > mlp\", \"skip(threshold, capacity 0.5, penalty 0.1) { (da | sa) > mlp }\"]",
        "[\"capped > mlp\", \"skip(threshold, kv processed, capacity 0.5, penalty 0.1) { (capped | sa) > mlp }\"]",
        "[{recur: 2, layers: [\"skip(threshold, pooled, capacity 0.5, penalty 0.1) { ea > (da | sa) > mlp }\"]}]",
        "[\"near\", \"skip(capacity 0.5, merge, causal bce 0.2 into_input) { sa > mlp }\"]",
        "[\"near\", \"skip(threshold, merge, capacity 0.5, penalty 0.1) { sa > mlp }\", \"skip(capacity 0.6, merge) { near > skip(capacity 0.6, merge) { mlp } }\"]",
    ];
    for body in bodies {
        let task = Task {
            spec: &spec(body),
            weights: None,
            seed: 1,
            only: &[],
            devices: &[],
            pipeline: &Compiler,
            ranks: 1,
        };
        let report = verify(&task, &mut |_| {}).unwrap();
        assert!(report.holds(), "{body}\n{report}");
        let plain = report.proof("plain").unwrap().checks;
        assert!(plain > 20 || body.contains("recur") || body.contains("merge"), "{body}: {plain}");
    }
}

/// The logits of every token by caches, a chunk of the text and then one token after the other.
fn by_caches(spec: &Spec, ids: &[i32]) -> Vec<f64> {
    let cache = Some(Cache { places: TOKENS as u64, chunk: 3, slack: f64::INFINITY, every: false });
    let options = Options { batch: BATCH as u64, sequence: 3, cache, logits: true, ..Options::default() };
    let mut model = Cached::load(&cpu(2), compile(spec, &options).unwrap()).unwrap();
    for t in model.loaded().compiled().tensors.clone() {
        model.model().set(&t.name, &weight(&t.name, t.shape.iter().product())).unwrap();
    }
    let text = |row: usize, to: usize| -> Vec<u32> {
        ids[row * TOKENS..row * TOKENS + to].iter().map(|i| *i as u32).collect()
    };
    let mut found = vec![vec![]; BATCH];
    for last in 0..TOKENS {
        // Texts of up to five tokens are read at once, later tokens one by one.
        let logits = if last < 5 {
            model.start(&[text(0, last + 1), text(1, last + 1)]).unwrap()
        } else {
            model.advance(&[ids[last] as u32, ids[TOKENS + last] as u32]).unwrap()
        };
        for (row, logits) in logits.into_iter().enumerate() {
            found[row].extend(logits.into_iter().map(f64::from));
        }
    }
    found.concat()
}

#[test]
fn depth_attention_inside_any_rule() {
    let rules = [
        "threshold, capacity 0.5, penalty 0.1",
        "threshold, kv processed, capacity 0.5, penalty 0.1",
        "capacity 0.5, causal bce 0.1",
    ];
    for rule in rules {
        for component in ["da", "capped"] {
            let inside = format!("skip({rule}) {{ ({component} | sa) > mlp }}");
            let nested = format!("skip(capacity 0.75, causal bce 0.1) {{ near > {inside} }}");
            for body in [
                format!("[{{recur: 3, layers: [\"{inside}\"]}}]"),
                format!("[\"{component} > mlp\", \"{inside}\", \"{component} | near\"]"),
                format!("[{{recur: 2, layers: [\"{nested}\"]}}]"),
                format!("[{{recur: 2, layers: [\"skip({rule}) {{ ea > ({component} | sa) > mlp }}\"]}}]"),
            ] {
                let spec = spec(&body);
                let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<f64>>();
                let mut run = Run::new(&spec);
                run.loss_scale = 1.0 / (BATCH * TOKENS) as f32;
                let ids = ids(5);
                let training = wide(run.run(ProgramKey::BACKWARD, &ids));
                let evaluated = wide(run.run(ProgramKey::EVALUATE, &ids));
                let e = error(&by_caches(&spec, &ids), &evaluated);
                assert!(e < 1e-5, "{body}: caches differ by {e}");

                let shape = Shape { batch: BATCH as u64, sequence: TOKENS as u64, ..Shape::default() };
                let oracle = Oracle::new(&spec.model, shape, None).unwrap();
                let named = |(name, dims, ..): oracle::TensorSpec| {
                    let values = weight(&name, dims.iter().product()).into_iter().map(f64::from).collect();
                    (name, Tensor::float(&dims.iter().map(|&d| d as usize).collect::<Vec<_>>(), values))
                };
                let weights: IndexMap<String, Tensor> = oracle.tensors().into_iter().map(named).collect();
                let batch = oracle::Batch { targets: ids.clone(), ids: ids.clone(), ..Default::default() };
                let expected = oracle.evaluate(&weights, &batch).unwrap();
                let e = error(&training, expected.logits.floats());
                assert!(e < 1e-5, "{body}: training differs from the oracle by {e}");
                if rule.starts_with("threshold") && !body.contains("0.75") {
                    let e = error(&evaluated, &training);
                    assert!(e < 1e-5, "{body}: evaluation differs from training by {e}");
                }
                for t in run.compiled.tensors.clone() {
                    let Some(gradient) = t.gradient else { continue };
                    let mut found = vec![0.0f32; t.shape.iter().product::<u64>() as usize];
                    run.session.read_at(gradient, t.instance, 0, &mut found).unwrap();
                    let expected = expected.gradients[&t.name].floats();
                    let most = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
                    let off =
                        found.iter().zip(expected).fold(0f64, |m, (a, b)| m.max((f64::from(*a) - b).abs()));
                    assert!(off < 1e-4 * most.max(1.0), "{body}: {}: {off} of {most}", t.name);
                }
            }
        }
    }
}

#[test]
fn a_pooled_penalty_is_of_the_mean_over_all_parts() {
    let part = |pooled: &str, penalty: f64| {
        format!("skip(threshold, norm_only, capacity 0.25, penalty {penalty}{pooled}) {{ sa }}")
    };
    // The loss and the gradients of two routers that process all, or nothing.
    let trained = |body: &str, offsets: [f64; 2]| {
        let model = spec(body).model;
        let shape = Shape { batch: 2, sequence: 5, ..Shape::default() };
        let oracle = Oracle::new(&model, shape, None).unwrap();
        let routers: Vec<String> = oracle
            .tensors()
            .into_iter()
            .map(|t| t.0)
            .filter(|n| n.ends_with("router.offset.weight"))
            .collect();
        assert_eq!(routers.len(), 2);
        let named = |(name, dims, ..): oracle::TensorSpec| {
            let n = dims.iter().product();
            let values = match routers.iter().position(|r| *r == name) {
                Some(i) => vec![offsets[i]],
                None if name.ends_with("router.scale.weight") => vec![0.0],
                None => weight(&name, n).into_iter().map(f64::from).collect(),
            };
            (name, Tensor::float(&dims.iter().map(|&d| d as usize).collect::<Vec<_>>(), values))
        };
        let weights: IndexMap<String, Tensor> = oracle.tensors().into_iter().map(named).collect();
        let ids: Vec<i32> = ids(1)[..10].to_vec();
        let found = oracle
            .evaluate(&weights, &oracle::Batch { targets: ids.clone(), ids, ..Default::default() })
            .unwrap();
        let of = |r: &String| found.gradients[r].floats()[0];
        (found.loss, [of(&routers[0]), of(&routers[1])])
    };
    let body = |pooled: &str, penalty: f64| {
        let part = part(pooled, penalty);
        format!("[\"{part}\", \"near\", \"{part} > mlp\"]")
    };
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
    for (offsets, mean) in [([1.0, 1.0], 1.0), ([1.0, -1.0], 0.5), ([-1.0, -1.0], 0.0)] {
        let (none, base) = trained(&body("", 1e-12), offsets);
        let (loss, gradients) = trained(&body(", pooled", 3.0), offsets);
        let excess = f64::max(mean - 0.25, 0.0);
        assert!(close(loss - none, 3.0 * excess), "{offsets:?}: {} instead of {}", loss - none, 3.0 * excess);
        for i in 0..2 {
            // The mean is over two parts, and `p` of every token has the slope `p·(1 - p)`.
            let p = 1.0 / (1.0 + f64::exp(-offsets[i]));
            let slope = if excess > 0.0 { 3.0 * p * (1.0 - p) / 2.0 } else { 0.0 };
            assert!(close(gradients[i] - base[i], slope), "{offsets:?}: {}", gradients[i] - base[i]);
        }
    }
    // The same in a loop, on a device: several micro-batches leave nothing for each other.
    let looped = format!("[{{recur: 3, layers: [\"{} > mlp\"]}}]", part(", pooled", 3.0));
    let model = spec(&looped);
    let mut run = Run::new(&model);
    let gradient = |run: &mut Run| {
        let t =
            run.compiled.tensors.iter().find(|t| t.name.ends_with("router.offset.weight")).unwrap().clone();
        let mut found = [0.0f32];
        run.session.read_at(t.gradient.unwrap(), t.instance, 0, &mut found).unwrap();
        f64::from(found[0])
    };
    run.run(ProgramKey::BACKWARD, &ids(2));
    let once = gradient(&mut run);
    run.run(ProgramKey::BACKWARD, &ids(2));
    assert!(once != 0.0 && (gradient(&mut run) - 2.0 * once).abs() < 1e-5 * once.abs(), "{once}");
}

/// Counts of `sa` inside a threshold of one half, by hand.
#[test]
fn keys_of_all_tokens_are_counted() {
    use dreamc_compiler::count::{Options, count};
    let counted = |kv: &str| {
        let spec = spec(&format!("[\"skip(threshold, {kv}, capacity 0.5, penalty 0.1) {{ sa }}\"]"));
        let counts = count(&spec, &Options { tokens: 8, ..Options::default() }).unwrap();
        let kind = |name: &str| counts.flops_per_token.decode_by_kind[name].total;
        (
            kind("dense"),
            kind("sequence_attention"),
            counts.memory_bytes.sequence_cache,
            counts.flops_per_token.training.total,
        )
    };
    let (h, q, k) = (HIDDEN as u128, 8, 4);
    let (all, processed) = (counted("kv all"), counted("kv processed"));
    assert_eq!(processed.0, 2 * 4 * (h * (q + 2 * k) + q * h));
    assert_eq!(all.0, 2 * (8 * h * (q + 2 * k) + 4 * q * h));
    // Of 8·9/2 pairs, those of every second query; two products each.
    assert_eq!(all.1, 2 * 2 * (36 / 2) * q);
    assert_eq!(processed.1, 2 * 2 * 10 * q);
    assert_eq!(all.2, 2 * processed.2);
    // Training asks what every token would get.
    let dense = count(&spec("[\"sa\"]"), &Options { tokens: 8, ..Options::default() }).unwrap();
    assert!(
        all.3 >= dense.flops_per_token.training.total,
        "{} {}",
        all.3,
        dense.flops_per_token.training.total
    );
}

/// A part sees only the tokens that enter it: `kv all` of a part inside another is of the tokens
/// that the other lets through. A token that it leaves out changes nothing, whichever token it is.
#[test]
fn all_keys_inside_a_part_are_those_of_its_tokens() {
    for outer in ["capacity 0.5, causal bce 0.1", "threshold, kv processed, capacity 0.5, penalty 0.1"] {
        let body =
            format!("[\"skip({outer}) {{ mlp > skip(threshold, capacity 0.5, penalty 0.1) {{ sa }} }}\"]");
        let mut all = spec(&body);
        all.model.context = TOKENS as u64;
        let mut run = Run::new(&all);
        let w = weight("layers.0.skip.0.router.weight", HIDDEN as u64);
        let embed = weight("embed.weight", 11 * HIDDEN as u64);
        let score = |id: usize| (0..HIDDEN).map(|h| w[h] * embed[id * HIDDEN + h]).sum::<f32>();
        let left_out: Vec<i32> = (0..11).filter(|&id| score(id) < 0.0).map(|id| id as i32).collect();
        assert!(left_out.len() > 1 && left_out.len() < 10);
        let mut moved = 0.0f64;
        for seed in 0..4 {
            let first = ids(seed);
            let mut second = first.clone();
            for id in second.iter_mut().filter(|id| left_out.contains(id)) {
                let at = left_out.iter().position(|other| other == id).unwrap();
                *id = left_out[(at + 1) % left_out.len()];
            }
            let programs: &[ProgramKey] = if outer.contains("threshold") {
                &[ProgramKey::EVALUATE, ProgramKey::BACKWARD]
            } else {
                &[ProgramKey::EVALUATE]
            };
            for &program in programs {
                let (a, b) = (run.run(program, &first), run.run(program, &second));
                for (i, (a, b)) in a.chunks(11).zip(b.chunks(11)).enumerate() {
                    if !left_out.contains(&first[i]) {
                        assert_eq!(a, b, "{outer}, {program}, token {i}");
                    }
                }
            }
            // And the caches are of those tokens alone, and give the same.
            let evaluated: Vec<f64> =
                run.run(ProgramKey::EVALUATE, &first).into_iter().map(f64::from).collect();
            let e = error(&by_caches(&all, &first), &evaluated);
            assert!(e < 1e-5, "{outer}: caches differ by {e}");
            // The inner part does something: among the tokens that come to it, some attend to
            // others.
            let mut other = first.clone();
            let kept = (0..TOKENS - 1).find(|&i| !left_out.contains(&first[i])).unwrap();
            other[kept] = (0..11).find(|id| !left_out.contains(id) && *id != first[kept]).unwrap();
            let changed: Vec<f64> =
                run.run(ProgramKey::EVALUATE, &other).into_iter().map(f64::from).collect();
            moved = moved
                .max(error(&changed[(kept + 1) * 11..TOKENS * 11], &evaluated[(kept + 1) * 11..TOKENS * 11]));
        }
        assert!(moved > 1e-3, "{outer}: {moved}");
    }
}

/// A step begins without the losses of routers of the one before.
#[test]
fn a_step_begins_without_a_loss_of_routers() {
    let spec = spec("[\"skip(capacity 0.5, causal bce 0.3) { sa }\"]");
    let options = Options { batch: BATCH as u64, sequence: TOKENS as u64, train: true, ..Options::default() };
    let device = cpu(1);
    let mut model = Model::load(&device, compile(&spec, &options).unwrap()).unwrap();
    let mut batch = Batch::new(TOKENS);
    batch.ids = ids(1);
    batch.targets = ids(2);
    batch.positions = (0..BATCH * TOKENS).map(|i| (i % TOKENS) as i32).collect();
    batch.segments = vec![0; BATCH * TOKENS];
    let mut step = |micro: usize| {
        model.begin_step().unwrap();
        for _ in 0..micro {
            model.backward(&batch, Scale { loss: 1.0, auxiliary: 1.0 }, None).unwrap();
        }
        model.auxiliary().unwrap().unwrap()
    };
    let once = step(1);
    assert!(once > 0.0);
    assert_eq!(step(1), once);
    assert_eq!(step(2), 2.0 * once);
}

#[test]
fn caches_reserve_what_capacity_needs_and_grow() {
    let spec = |capacity: f64| {
        let mut all =
            spec(&format!("[\"skip(capacity {capacity}, causal bce 0.1, norm_only) {{ near > mlp }}\"]"));
        all.model.context = 256;
        all
    };
    let device = cpu(1);
    let writing = |slack: f64| Writing { rows: 2, slack, ..Writing::default() };
    let caches = |compiled: &Compiled| {
        let all =
            compiled.plan.buffers.iter().filter(|b| b.name.ends_with(".keys") || b.name.ends_with(".values"));
        all.map(|b| b.elements() * b.instances).sum::<u64>()
    };
    let reserved: Vec<u64> =
        [1.0, 0.5, 0.25, 0.125].map(|c| caches(&compile_cached(&spec(c), &writing(1.0)).unwrap())).to_vec();
    // Keys and values of size 4 in two rows; a chunk of 64 tokens is always room for.
    assert_eq!(reserved, [256, 128 + 64, 64 + 64, 32 + 64].map(|n| 2 * 2 * 4 * n));
    assert_eq!(caches(&compile_cached(&spec(0.125), &writing(f64::INFINITY)).unwrap()), reserved[0]);

    // A router that processes everything, whatever its capacity says.
    let spec = spec(0.125);
    let load = |slack: f64| {
        let mut cached = Cached::load(&device, compile_cached(&spec, &writing(slack))?)?;
        for t in cached.loaded().compiled().tensors.clone() {
            let greedy = t.name.contains(".router.offset.");
            let values = if greedy { vec![1e3] } else { weight(&t.name, t.shape.iter().product()) };
            cached.model().set(&t.name, &values)?;
        }
        Ok(cached)
    };
    let mut growing = Growing::new(load).unwrap();
    let mut whole = load(f64::INFINITY).unwrap();
    let prompts = vec![(0..70).map(|i| i % 11).collect::<Vec<u32>>(), vec![3, 1, 4]];
    let same = |a: Vec<Vec<f32>>, b: Vec<Vec<f32>>, at: usize| {
        let wide = |x: Vec<Vec<f32>>| x.concat().into_iter().map(f64::from).collect::<Vec<f64>>();
        let e = error(&wide(a), &wide(b));
        assert!(e < 1e-5, "token {at}: {e}");
    };
    let begun = caches(growing.cached().loaded().compiled());
    same(growing.start(&prompts).unwrap(), whole.start(&prompts).unwrap(), 0);
    for i in 0..120 {
        let next = [i % 11, (i * 7) % 11];
        same(growing.advance(&next).unwrap(), whole.advance(&next).unwrap(), i as usize + 1);
    }
    assert_eq!(growing.cached().processed().unwrap()[0].1[0], [190, 123]);
    assert!(caches(growing.cached().loaded().compiled()) > begun);
    let refused = load(1.0).unwrap().start(&[(0..200).map(|i| i % 11).collect()]).unwrap_err();
    assert!(refused.to_string().contains("no room left"), "{refused}");
}

/// Merging by hand: a network sees the mean of a run that ends in a chosen token, and the tokens
/// after it share its update.
#[test]
fn skipped_tokens_merge_with_the_next_chosen_one_and_share_the_update_of_the_last() {
    for (rule, program) in [
        ("capacity 0.5, merge", ProgramKey::BACKWARD),
        ("capacity 0.5, merge, causal bce 0.1", ProgramKey::EVALUATE),
        ("threshold, merge, capacity 0.5, penalty 0.1", ProgramKey::BACKWARD),
        ("threshold, merge, capacity 0.5, penalty 0.1", ProgramKey::EVALUATE),
    ] {
        let mut run = Run::new(&spec(&format!("[\"skip({rule}) {{ mlp }}\"]")));
        let mut plain = Run::new(&spec("[\"mlp\"]"));
        let mut skipped = 0;
        for seed in 0..4 {
            run.run(program, &ids(seed));
            let stream: Vec<f64> = run.read("stream").into_iter().map(f64::from).collect();
            let row = |at: usize, i: usize| &stream[(at * BATCH * TOKENS + i) * HIDDEN..][..HIDDEN];
            let w = weight("layers.0.skip.0.router.weight", HIDDEN as u64);
            let score = |i: usize| row(0, i).iter().zip(&w).map(|(x, w)| x * f64::from(*w)).sum::<f64>();
            for b in 0..BATCH {
                let r: Vec<f64> = (0..TOKENS).map(|t| score(b * TOKENS + t)).collect();
                let mut order: Vec<usize> = (0..TOKENS).collect();
                order.sort_by(|a, c| r[*c].total_cmp(&r[*a]).then(a.cmp(c)));
                let top = program == ProgramKey::BACKWARD && !rule.contains("threshold");
                let taking = |t: usize| if top { order[..TOKENS / 2].contains(&t) } else { r[t] >= 0.0 };
                let mut update = vec![0.0; HIDDEN];
                let mut from = 0;
                for (t, &score) in r.iter().enumerate() {
                    let at = b * TOKENS + t;
                    if taking(t) {
                        let n = (t + 1 - from) as f64;
                        let mean: Vec<f64> = (0..HIDDEN)
                            .map(|h| (from..=t).map(|t| row(0, b * TOKENS + t)[h]).sum::<f64>() / n)
                            .collect();
                        let gate = if rule.contains("threshold") { 1.0 } else { score };
                        update = plain.network(&mean).into_iter().map(|f| gate * f).collect();
                        from = t + 1;
                    } else {
                        skipped += 1;
                    }
                    let expected: Vec<f64> = row(0, at).iter().zip(&update).map(|(x, u)| x + u).collect();
                    let e = error(row(1, at), &expected);
                    assert!(e < 1e-5, "{rule}, {program}, token {t} differs by {e}");
                }
            }
        }
        assert!(skipped > 4);
    }
}

/// A decoder that counts, from its caches, what a wrapped part processed of written tokens.
struct Counting {
    cached: Cached,
    /// Entries of each row's cache after its prompt.
    begun: Vec<Option<usize>>,
    /// Written tokens that were read, and of these the processed.
    read: usize,
    taken: usize,
}

impl Counting {
    fn entries(&self, row: usize) -> usize {
        self.cached.processed().unwrap()[0].1[0][row]
    }
}

impl NextLogits for Counting {
    fn rows(&self) -> usize {
        self.cached.rows()
    }

    fn context(&self) -> usize {
        self.cached.context()
    }

    fn admit(&mut self) -> Result<Option<usize>, ModelError> {
        self.cached.admit()
    }

    fn step(&mut self, next: &[Next]) -> Result<Vec<Vec<f32>>, ModelError> {
        let logits = self.cached.step(next)?;
        for n in next {
            match n.prompt {
                true => self.begun[n.row] = Some(self.entries(n.row)),
                false => self.read += n.tokens.len(),
            }
        }
        Ok(logits)
    }

    fn release(&mut self, row: usize) -> Result<(), ModelError> {
        if let Some(begun) = self.begun[row].take() {
            self.taken += self.entries(row) - begun;
        }
        self.cached.release(row)
    }
}

/// The share of generation is that of the caches which wrote: of written tokens, none of a prompt.
#[test]
fn the_share_of_generation_is_of_tokens_that_were_written() {
    let mut all = spec("[\"sa\", \"skip(capacity 0.5, causal bce 0.1) { near > mlp }\"]");
    (all.model.vocab, all.model.context) = (256, 64);
    let data = "data: {task: permutation, size: 4, max_steps: 2}\n";
    let with = |text: &str| {
        let ast = dreamc_dsl::parse("test", text, Spelling::Yaml).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap().0
    };
    let all = with(&(dreamc_dsl::show(&all, Spelling::Yaml) + data));
    let home = tempfile::tempdir().unwrap();
    let base = std::path::Path::new("");
    let settings = Settings { base, cache: home.path(), sequence: 64, vocab: 256, seed: 0, stride: None };
    let dataset = Dataset::open(all.data.as_ref().unwrap(), &settings, &mut |_| {}).unwrap();
    let device = cpu(1);
    let weights = |model: &mut Model| {
        for t in model.compiled().tensors.clone() {
            model.set(&t.name, &weight(&t.name, t.shape.iter().product())).unwrap();
        }
    };
    let observer = health_observer(&all, None, &Rewriting::default(), Narrow::Nothing).unwrap().unwrap();
    let mut observer = Model::load(&device, observer).unwrap();
    weights(&mut observer);
    let writing = Writing { rows: 3, ..Writing::default() };
    let mut cached = Cached::load(&device, compile_cached(&all, &writing).unwrap()).unwrap();
    weights(cached.model());
    let mut decoder = Counting { cached, begun: vec![None; 3], read: 0, taken: 0 };

    let held = || dataset.drawn(8).unwrap().unwrap();
    let mut health = Health::look(&mut observer, &all.model, None, held()).unwrap().unwrap();
    assert_eq!((health.parts[0].generation, health.written), (None, 0));
    let sampling = Sampling { max_tokens: 20, ..Health::sampling(&all) };
    let (to, of) = ((&mut decoder as &mut dyn NextLogits, &*dataset.tokenizer), (held(), sampling));
    health.write(&mut observer, &all.model, None, to, of).unwrap();
    for row in 0..3 {
        decoder.release(row).unwrap();
    }
    let Counting { read, taken, .. } = decoder;
    assert!(taken > 0 && taken < read && read > 40, "{taken} of {read}");
    assert_eq!(health.written, read as u64);
    assert_eq!(health.parts[0].generation, Some(taken as f64 / read as f64));
    assert_ne!(health.parts[0].generation, Some(health.parts[0].processed));
}

/// An attention outside a loop has no mixture of projections, whatever it says of one: evaluations
/// of a dense model, which may be large, run it no second time to look at routers.
#[test]
fn models_without_routers_are_not_looked_at() {
    let looked_at = |body: &str| {
        let text = format!(
            "model:\n  name: m\n  vocab: 32\n  hidden: 16\n  context: 16\n  components:\n    sa: {{sequence: \
             {{heads: 2, kv_heads: 1, head_size: 8}}}}\n    mlp: {{mlp: {{intermediate: 24}}}}\n    ea: {{experts: \
             {{count: 4, active: 2, intermediate: 8}}}}\n  body: {body}\n"
        );
        let ast = dreamc_dsl::parse("test", &text, Spelling::Yaml).unwrap_or_else(|e| panic!("{e}"));
        let spec = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{e}")).0;
        health_observer(&spec, None, &Rewriting::default(), Narrow::Nothing).unwrap().is_some()
    };
    assert!(!looked_at("[{repeat: 2, layers: [sa > mlp]}]"));
    assert!(looked_at("[{repeat: 2, layers: [sa > ea]}]"));
    assert!(looked_at("[{recur: 2, layers: [sa > mlp]}]"));
    assert!(looked_at("[\"sa > skip(capacity 0.5) { mlp }\"]"));
}
