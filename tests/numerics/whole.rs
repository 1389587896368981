//! Files of the zoo that are exact: each computes what its authors' code does, written here once
//! more as loops over numbers, over the weights of the file.
//!
//! Two orders are free and are those of the file: of channels that a rotation turns together
//! (neighbours there, halves here), which queries and keys have alike, and of names.

use crate::authors::{dot, rms, sigmoid, silu};
use crate::support::{error, load};
use dreamc_compiler::compiled::Init;
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_data::rng::Philox;
use indexmap::IndexMap;

/// Beyond the windows of `x0-scaled`.
const TOKENS: usize = 37;
const HIDDEN: usize = 64;
const HEADS: usize = 4;
const SIZE: usize = 16;
/// The epsilon of `F.rms_norm` on f32 where a call gives none.
const SMALL: f64 = 1.1920929e-7;

type Row = Vec<f64>;
type Rows = Vec<Row>;

struct Weights(IndexMap<String, Tensor>);

impl Weights {
    fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("no `{name}` in {:?}", self.0.keys())).floats()
    }

    fn number(&self, name: &str) -> f64 {
        self.get(name)[0]
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let w = self.get(name);
        x.iter().map(|x| w.chunks(x.len()).map(|row| dot(row, x)).collect()).collect()
    }

    /// Rows of a table.
    fn rows(&self, name: &str, ids: &[i32], width: usize) -> Rows {
        ids.iter().map(|&id| self.get(name)[id as usize * width..][..width].to_vec()).collect()
    }

    /// An RMS norm with its gain.
    fn norm(&self, name: &str, x: &Rows, eps: f64) -> Rows {
        let gain = self.get(name);
        x.iter().map(|x| rms(x, eps).iter().zip(gain).map(|(x, g)| x * g).collect()).collect()
    }
}

fn relu2(x: f64) -> f64 {
    x.max(0.0).powi(2)
}

fn each(x: &Rows, f: impl Fn(f64) -> f64) -> Rows {
    x.iter().map(|row| row.iter().map(|x| f(*x)).collect()).collect()
}

fn sum(a: &Rows, b: &Rows, f: impl Fn(f64, f64) -> f64) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()).collect()
}

fn add(a: &Rows, b: &Rows) -> Rows {
    sum(a, b, |a, b| a + b)
}

/// Every head of every token, turned by its place times a frequency of each pair.
fn turned(x: &Rows, frequency: impl Fn(usize) -> f64) -> Rows {
    let head = |place: usize, x: &[f64]| -> Row {
        let half = SIZE / 2;
        let of = |c: usize| {
            let (sin, cos) = (place as f64 * frequency(c % half)).sin_cos();
            if c < half { x[c] * cos - x[c + half] * sin } else { x[c] * cos + x[c - half] * sin }
        };
        (0..SIZE).map(of).collect()
    };
    x.iter().enumerate().map(|(i, x)| x.chunks(SIZE).flat_map(|x| head(i, x)).collect()).collect()
}

fn each_head(x: &Rows, f: impl Fn(&[f64]) -> Row) -> Rows {
    x.iter().map(|x| x.chunks(SIZE).flat_map(&f).collect()).collect()
}

/// Softmax attention over the token and those before it, at most `before` of them.
fn attend(q: &Rows, k: &Rows, v: &Rows, before: usize) -> Rows {
    let groups = HEADS * SIZE / k[0].len();
    let head = |i: usize, h: usize| -> Row {
        let part = |x: &Row, h: usize| x[h * SIZE..][..SIZE].to_vec();
        let seen = i.saturating_sub(before)..i + 1;
        let score = |j| dot(&part(&q[i], h), &part(&k[j], h / groups)) / (SIZE as f64).sqrt();
        let e: Vec<f64> = seen.clone().map(|j: usize| f64::exp(score(j))).collect();
        let all: f64 = e.iter().sum();
        let of = |c| seen.clone().zip(&e).map(|(j, e)| e / all * part(&v[j], h / groups)[c]).sum();
        (0..SIZE).map(of).collect()
    };
    (0..q.len()).map(|i| (0..HEADS).flat_map(|h| head(i, h)).collect()).collect()
}

/// Values and gated rows of a table, `gate` numbers of each head.
fn with_table(v: &Rows, table: &Rows, gate: &Rows) -> Rows {
    let row = |i: usize| (0..v[i].len()).map(|c| v[i][c] + gate[i][c / SIZE] * table[i][c]).collect();
    (0..v.len()).map(row).collect()
}

fn first_channels(x: &Rows, n: usize) -> Rows {
    x.iter().map(|x| x[..n].to_vec()).collect()
}

/// nanochat/gpt.py of karpathy/nanochat, `GPT.forward`.
fn nanochat(w: &Weights, ids: &[i32]) -> Rows {
    let norm = |x: &Rows| -> Rows { x.iter().map(|x| rms(x, SMALL)).collect() };
    let e = norm(&w.rows("embed.weight", ids, HIDDEN));
    let gate = w.linear("layers.0.sm.more.weight2", &first_channels(&e, 24));
    let smeared = |i: usize| {
        let share = w.number("layers.0.sm.more.weight") * sigmoid(gate[i][0]);
        (0..HIDDEN).map(|c| e[i][c] + if i > 0 { share * e[i - 1][c] } else { 0.0 }).collect()
    };
    let x0: Rows = (0..ids.len()).map(smeared).collect();
    let (layers, frequency) = (6, |k: usize| 1e5f64.powf(-2.0 * k as f64 / SIZE as f64));
    let (mut x, mut middle) = (x0.clone(), None);
    for i in 0..layers {
        // `SSSL`, and the last is long; embeddings of values in every second layer, the last one
        // too.
        let long = i % 4 == 3 || i == layers - 1;
        let tagged = i % 2 == (layers - 1) % 2;
        let name = if i == 4 { "middle" } else { "bl" };
        let [keep, again] =
            ["keep", "again"].map(|part| w.number(&format!("layers.{i}.{name}.{part}.weight")));
        x = sum(&x, &x0, |x, x0| keep * x + again * x0);
        let n = norm(&x);
        let name = match (tagged, long) {
            (false, _) => "near",
            (true, false) => "tag",
            (true, true) => "full",
        };
        let own = |part: &str| format!("layers.{i}.{name}.{part}.weight");
        let mut v = w.linear(&own("v"), &n);
        if tagged {
            let gate = each(&w.linear(&own("gate"), &first_channels(&n, 12)), |z| 3.0 * sigmoid(z));
            v = with_table(&v, &w.rows(&own("table"), ids, HEADS * SIZE), &gate);
        }
        let [q, k] = ["q", "k"].map(|part| {
            let heads = turned(&w.linear(&own(part), &n), frequency);
            each_head(&heads, |head| rms(head, SMALL).iter().map(|x| 1.2 * x).collect())
        });
        let y = attend(&q, &k, &v, if long { ids.len() } else { 32 });
        x = add(&x, &w.linear(&own("out"), &y));
        let [up, down] = ["weight", "weight2"].map(|part| format!("layers.{i}.ff.out.{part}"));
        let inner = each(&w.linear(&up, &norm(&x)), relu2);
        x = add(&x, &w.linear(&down, &inner));
        if i == layers / 2 {
            middle = Some(x.clone());
        }
    }
    let back = w.number("layers.5.back.out.weight");
    let x = norm(&sum(&x, &middle.unwrap_or_default(), |x, middle| x - back * middle));
    each(&w.linear("head.weight", &x), |z| 15.0 * (z / 15.0).tanh())
}

/// parcae_lm/models/parcae/parcae.py of sandyresearch/parcae, `Parcae.forward` with a state that
/// begins at zero.
fn parcae(w: &Weights, ids: &[i32]) -> Rows {
    const EPS: f64 = 1e-5;
    let layer = |i: usize, x: &Rows| {
        let name = if i % 2 == 1 { "tag" } else { "sa" };
        let own = |part: &str| format!("layers.{i}.{name}.{part}.weight");
        let n = w.norm(&own("norm"), x, EPS);
        let mut v = w.linear(&own("v"), &n);
        if i % 2 == 1 {
            let gate = each(&w.linear(&own("gate"), &first_channels(&n, 32)), |z| 2.0 * sigmoid(z));
            v = with_table(&v, &w.rows(&own("table"), ids, HEADS * SIZE), &gate);
        }
        let [q, k] = ["q", "k"].map(|part| {
            let heads = turned(&w.linear(&own(part), &n), |k| 5e4f64.powf(-2.0 * k as f64 / SIZE as f64));
            each_head(&heads, |head| rms(head, SMALL))
        });
        let x = add(x, &w.linear(&own("out"), &attend(&q, &k, &v, ids.len())));
        let own = |part: &str| format!("layers.{i}.mlp.{part}.weight");
        let inner = each(&w.linear(&own("up"), &w.norm(&own("norm"), &x, EPS)), relu2);
        add(&x, &w.linear(&own("down"), &inner))
    };
    let mut x = w.rows("embed.weight", ids, HIDDEN);
    x = layer(1, &layer(0, &x));
    let e = w.norm("body.0.norm.weight", &x, EPS);
    let step: Row = w.get("body.3.mix.delta").iter().map(|x| x.exp().ln_1p()).collect();
    let decay = w.get("body.3.mix.decay");
    let read = w.linear("body.3.mix.weight", &e);
    x = vec![vec![0.0; HIDDEN]; ids.len()];
    for _ in 0..8 {
        for (x, read) in x.iter_mut().zip(&read) {
            for c in 0..HIDDEN {
                x[c] = (-step[c] * decay[c].exp()).exp() * x[c] + step[c] * read[c];
            }
        }
        x = layer(3, &layer(2, &x));
    }
    x = w.linear("body.4.linear.weight", &x);
    x = layer(5, &layer(4, &x));
    w.linear("embed.weight", &w.norm("norm.weight", &x, EPS))
}

/// YOCO/yoco/models/decoder/yoco.py of microsoft/unilm, `YOCO.forward` with gated retention in its
/// parallel form (`parallel_gate_retention`).
fn yoco(w: &Weights, ids: &[i32]) -> Rows {
    const EPS: f64 = 1e-5;
    let network = |i: usize, x: &Rows| {
        let own = |part: &str| format!("layers.{i}.mlp.{part}.weight");
        let n = w.norm(&own("norm"), x, EPS);
        let inner = sum(&w.linear(&own("gate"), &n), &w.linear(&own("up"), &n), |g, u| silu(g) * u);
        add(x, &w.linear(&own("down"), &inner))
    };
    // theta^-linspace(0, 1, size / 2)
    let turn = |x: &Rows| turned(x, |k| 1e4f64.powf(-(k as f64) / (SIZE as f64 / 2.0 - 1.0)));
    let root = (HIDDEN as f64).sqrt();
    let mut x = each(&w.rows("embed.weight", ids, HIDDEN), |x| x * root);
    for i in 0..3 {
        let own = |part: &str| format!("layers.{i}.near.{part}.weight");
        let n = w.norm(&own("norm"), &x, EPS);
        let [q, k] = ["q", "k"].map(|part| turn(&w.linear(&own(part), &n)));
        let v = w.linear(&own("v"), &n);
        let logs = each(&w.linear(&own("keep"), &n), |z| sigmoid(z).ln() / 16.0);
        let head = |i: usize, h: usize| -> Row {
            let part = |x: &Row| x[h * SIZE..][..SIZE].to_vec();
            let share = |j: usize| {
                let kept: f64 = (j + 1..=i).map(|l| logs[l][h]).sum();
                kept.exp() * dot(&part(&q[i]), &part(&k[j])) / (SIZE as f64).sqrt()
            };
            rms(
                &(0..SIZE).map(|c| (0..=i).map(|j| share(j) * v[j][h * SIZE + c]).sum()).collect::<Row>(),
                EPS,
            )
        };
        let o: Rows = (0..ids.len()).map(|i| (0..HEADS).flat_map(|h| head(i, h)).collect()).collect();
        let gate = w.linear(&format!("layers.{i}.near.out.weight"), &n);
        let gated = sum(&gate, &o, |g, o| silu(g) * o);
        x = network(i, &add(&x, &w.linear(&format!("layers.{i}.near.out.weight2"), &gated)));
    }
    // Rows of keys and values stand after those of the first layer's queries; their gain is that
    // layer's.
    let n = w.norm("layers.3.full.norm.weight", &x, EPS);
    let all = w.linear("layers.3.full.qkv.weight", &n);
    let cut = |from: usize, to: usize| -> Rows { all.iter().map(|row| row[from..to].to_vec()).collect() };
    let (k, v) = (turn(&cut(HIDDEN, HIDDEN + 32)), cut(HIDDEN + 32, HIDDEN + 64));
    for i in 3..6 {
        let (name, qkv) = if i == 3 { ("full", cut(0, HIDDEN)) } else { ("cross", vec![]) };
        let own = |part: &str| format!("layers.{i}.{name}.{part}.weight");
        let q = match i {
            3 => qkv,
            _ => w.linear(&own("qkv"), &w.norm(&own("norm"), &x, EPS)),
        };
        let y = attend(&turn(&q), &k, &v, ids.len());
        x = network(i, &add(&x, &w.linear(&own("out"), &y)));
    }
    w.linear("head.weight", &w.norm("norm.weight", &x, EPS))
}

type Forward = fn(&Weights, &[i32]) -> Rows;

const MODELS: [(&str, Forward); 3] = [("x0-scaled", nanochat), ("parcae", parcae), ("yoco", yoco)];

#[test]
fn files_of_the_zoo_are_their_authors_models() {
    for (name, forward) in MODELS {
        let spec = load(&format!("examples/zoo/{name}.dream"));
        let shape = Shape { batch: 1, sequence: TOKENS as u64, ..Shape::default() };
        let oracle = Oracle::new(&spec.model, shape, None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut weights: IndexMap<String, Tensor> = IndexMap::new();
        for (tensor, dims, ..) in oracle.tensors() {
            let mut random = Philox::new(7, &tensor).stream(0);
            let fan_in = if dims.len() > 1 { dims[dims.len() - 1] as f64 } else { 1.0 };
            let values =
                (0..dims.iter().product::<u64>()).map(|_| (2.0 * random.unit() - 1.0) / fan_in.sqrt());
            let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
            weights.insert(tensor, Tensor::float(&dims, values.collect()));
        }
        let mut random = Philox::new(8, name).stream(0);
        let ids: Vec<i32> = (0..TOKENS).map(|_| random.below(spec.model.vocab) as i32).collect();
        let batch = Batch { targets: ids.clone(), ids: ids.clone(), ..Batch::default() };
        let found = oracle.forward(&weights, &batch, None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let e = error(found.logits.floats(), &forward(&Weights(weights), &ids).concat());
        println!("{name}: {e:.1e}");
        assert!(e < 1e-9, "{name}: logits differ by {e:.1e}");
    }
}

/// λ and μ begin as nanochat's `init_weights` says: 1.15 to 1.05 and 0.2 to 0.05, by layer.
#[test]
fn first_values_are_those_of_their_layer() {
    let spec = load("examples/zoo/x0-scaled.dream");
    let oracle = Oracle::new(&spec.model, Shape::default(), None).unwrap();
    let begins: IndexMap<String, Init> = oracle.tensors().into_iter().map(|t| (t.0, t.3)).collect();
    for i in 0..6 {
        let name = if i == 4 { "middle" } else { "bl" };
        for (part, first, less) in [("keep", 1.15, 0.1), ("again", 0.2, 0.15)] {
            let Init::Constant(found) = begins[&format!("layers.{i}.{name}.{part}.weight")] else {
                panic!("{part} of layer {i} is drawn")
            };
            let expected = first - less * f64::from(i) / 5.0;
            assert!((found - expected).abs() < 1e-15, "{part} of layer {i}: {found}, not {expected}");
        }
    }
}
