//! Parts of authors' models that are said by definitions: each is its authors' formula, written
//! here once more as loops over numbers, and keeps the promises of `dreamc verify`.
//!
//! The part stands in both layers of a model; docs/zoo.md lists which text says what.

use crate::support::error;
use dreamc_compiler::ir::interpret::Tensor;
use dreamc_compiler::lower::Shape;
use dreamc_compiler::oracle::{Batch, Oracle};
use dreamc_data::rng::Philox;
use dreamc_dsl::{Spec, Spelling, check, parse};
use dreamc_verify::{Compiler, Task, verify};
use indexmap::IndexMap;

const HIDDEN: usize = 8;
const HEADS: usize = 2;
const SIZE: usize = 4;
const TOKENS: usize = 9;
const VOCAB: usize = 11;

/// A row of numbers for each token.
type Rows = Vec<Vec<f64>>;

/// The operands of a part of a layer.
struct Layer<'a> {
    weights: &'a IndexMap<String, Tensor>,
    number: usize,
    x: &'a Rows,
    ids: &'a [i32],
    /// Values that the first layer left.
    first: &'a mut Option<Rows>,
}

impl Layer<'_> {
    fn w(&self, name: &str) -> &[f64] {
        self.weights[&format!("layers.{}.own.{name}", self.number)].floats()
    }

    /// `x Wᵀ`
    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let w = self.w(name);
        x.iter().map(|x| w.chunks(x.len()).map(|row| dot(row, x)).collect()).collect()
    }

    /// The same of one row of heads.
    fn heads(&self, name: &str, x: &Rows) -> Vec<Rows> {
        self.linear(name, x).iter().map(|row| row.chunks(SIZE).map(<[f64]>::to_vec).collect()).collect()
    }
}

/// An authors' part: its name, the statements that say it, and its formula.
struct Part {
    of: &'static str,
    text: &'static str,
    formula: fn(&mut Layer) -> Rows,
    /// How far apart both may be.
    most: f64,
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// By its series, which converges everywhere.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

pub(crate) fn rms(x: &[f64], eps: f64) -> Vec<f64> {
    let root = (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().map(|x| x / root).collect()
}

/// `nn.LayerNorm`
fn layer_norm(x: &[f64], gain: &[f64], bias: &[f64], eps: f64) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    x.iter().zip(gain).zip(bias).map(|((x, g), b)| (x - mean) / (var + eps).sqrt() * g + b).collect()
}

/// Halves of a head turned by the token's place times frequencies.
fn turned(x: &[f64], place: usize, frequency: impl Fn(usize) -> f64) -> Vec<f64> {
    let half = x.len() / 2;
    let of = |i: usize| {
        let (s, c) = (place as f64 * frequency(i % half)).sin_cos();
        if i < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s }
    };
    (0..x.len()).map(of).collect()
}

/// `Σ_j softmax_j(q_i·k_j / √size) v_j` over `j ≤ i`, for every head.
fn attend(q: &[Rows], k: &[Rows], v: &[Rows]) -> Vec<Rows> {
    let row = |i: usize, h: usize| {
        let score = |j: usize| dot(&q[i][h], &k[j][h]) / (SIZE as f64).sqrt();
        let e: Vec<f64> = (0..=i).map(|j| score(j).exp()).collect();
        let all: f64 = e.iter().sum();
        let of = |c: usize| (0..=i).map(|j| e[j] / all * v[j][h][c]).sum();
        (0..v[0][h].len()).map(of).collect()
    };
    (0..q.len()).map(|i| (0..HEADS).map(|h| row(i, h)).collect()).collect()
}

fn each_head(x: Vec<Rows>, f: impl Fn(usize, Vec<f64>) -> Vec<f64>) -> Vec<Rows> {
    let token = |(i, heads): (usize, Rows)| heads.into_iter().map(|head| f(i, head)).collect();
    x.into_iter().enumerate().map(token).collect()
}

fn flat(x: Vec<Rows>) -> Rows {
    x.into_iter().map(|heads| heads.concat()).collect()
}

const PARTS: &[Part] = &[
    Part {
        // DenseFormer, experiments/models/base.py: LayerNorm with a bias, GELU by the error
        // function (Abramowitz and Stegun 7.1.26, within 1.5e-7 of it).
        of: "LayerNorm and GELU by the error function",
        text: "n = layer_norm(x, over hidden, gain, eps = 1e-5) + weight([hidden], zero)
               a = linear(n, [wide: 12], bias)
               z = abs(a) * rsqrt(2)
               t = 1 / (1 + 0.3275911 * z)
               p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
               return linear(0.5 * (a + abs(a) * (1 - p * exp(-z * z))), [hidden], bias)",
        formula: |l| {
            let norm = |x: &Vec<f64>| layer_norm(x, l.w("n.gain"), l.w("n.weight"), 1e-5);
            let inner = l.linear("a.weight", &l.x.iter().map(norm).collect());
            let gelu = |x: f64| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()));
            let act = |row: &Vec<f64>| row.iter().zip(l.w("a.bias")).map(|(x, b)| gelu(x + b)).collect();
            let out = l.linear("out.weight", &inner.iter().map(act).collect());
            out.iter().map(|row| row.iter().zip(l.w("out.bias")).map(|(x, b)| x + b).collect()).collect()
        },
        most: 1e-6,
    },
    Part {
        // nanochat, nanochat/gpt.py: norms without a gain, after the rotation and times 1.2;
        // values and a row of a table for the id, by a gate of each head that reads some channels.
        of: "attention with embeddings of values",
        text: "n = rms(x, over hidden, eps = 1e-5)
               q = 1.2 * rms(rope(linear(n, [heads, size]), 100), over size, eps = 1e-5)
               k = 1.2 * rms(rope(linear(n, [heads, size]), 100), over size, eps = 1e-5)
               few = slice(n, over hidden, 0, [channels: 3])
               gate = 2 * sigmoid(linear(few, [heads]))
               table = embedding([heads, value: size], normal 1)
               v = linear(n, [heads, value]) + gate * table
               return linear(attend(q, k, v), [hidden])",
        formula: |l| {
            let n: Rows = l.x.iter().map(|x| rms(x, 1e-5)).collect();
            let turn = |name: &str| {
                each_head(l.heads(name, &n), |i, head| {
                    let head = turned(&head, i, |k| 100f64.powf(-2.0 * k as f64 / SIZE as f64));
                    rms(&head, 1e-5).iter().map(|x| 1.2 * x).collect()
                })
            };
            let few = n.iter().map(|n| n[..3].to_vec()).collect();
            let gate = l.linear("gate.weight", &few);
            let own = l.heads("v.weight", &n);
            let table = l.w("table.weight");
            let value = |i: usize, h: usize, c: usize| {
                let row = &table[l.ids[i] as usize * HEADS * SIZE..][..HEADS * SIZE];
                own[i][h][c] + 2.0 * sigmoid(gate[i][h]) * row[h * SIZE + c]
            };
            let head = |i, h| (0..SIZE).map(|c| value(i, h, c)).collect();
            let v: Vec<Rows> = (0..TOKENS).map(|i| (0..HEADS).map(|h| head(i, h)).collect()).collect();
            l.linear("out.weight", &flat(attend(&turn("q.weight"), &turn("k.weight"), &v)))
        },
        most: 1e-9,
    },
    Part {
        // nanochat: the smear of the token before, by a gate that reads some channels.
        of: "the smear of the token before",
        text: "few = slice(x, over hidden, 0, [channels: 3])
               return weight([], 0.5) * sigmoid(linear(few, [])) * shift(x)",
        formula: |l| {
            let gate = l.w("out.weight2");
            let row = |i: usize| {
                let share = l.w("out.weight")[0] * sigmoid(dot(gate, &l.x[i][..3]));
                let before = |c: usize| if i > 0 { share * l.x[i - 1][c] } else { 0.0 };
                (0..HIDDEN).map(before).collect()
            };
            (0..TOKENS).map(row).collect()
        },
        most: 1e-9,
    },
    Part {
        // x-transformers, `learned_value_residual_mix`: each head of each token says how much of
        // the first layer's values it takes.
        of: "value residuals by shares of tokens",
        text: "n = rms(x, over hidden, gain, eps = 1e-5)
               own = linear(n, [heads, value: size])
               first = where(depth == 0, own, earlier(first))
               share = sigmoid(linear(n, [heads], bias))
               v = own + share * (first - own)
               y = attend(linear(n, [heads, size]), linear(n, [heads, size]), v)
               return linear(y, [hidden])",
        formula: |l| {
            let n: Rows =
                l.x.iter().map(|x| rms(x, 1e-5).iter().zip(l.w("n.gain")).map(|(x, g)| x * g).collect()).collect();
            let own = l.linear("own.weight", &n);
            let first = l.first.get_or_insert_with(|| own.clone()).clone();
            let z = l.linear("share.weight", &n);
            let value = |i: usize, h: usize, c: usize| {
                let share = sigmoid(z[i][h] + l.w("share.bias")[h]);
                let at = h * SIZE + c;
                own[i][at] + share * (first[i][at] - own[i][at])
            };
            let head = |i, h| (0..SIZE).map(|c| value(i, h, c)).collect();
            let v: Vec<Rows> = (0..TOKENS).map(|i| (0..HEADS).map(|h| head(i, h)).collect()).collect();
            let y = attend(&l.heads("y.weight", &n), &l.heads("y.weight2", &n), &v);
            l.linear("out.weight", &flat(y))
        },
        most: 1e-9,
    },
    Part {
        // YOCO (microsoft/unilm): frequencies base^-linspace(0, 1, size / 2).
        of: "frequencies of one's own",
        text: "q = linear(x, [heads, size])
               k = linear(x, [heads, size])
               q1 = slice(q, over size, 0, [half: size / 2])
               turn = position * exp(-log(100) * places(half) / (size / 2 - 1))
               c = cos(turn)
               s = sin(turn)
               q2 = slice(q, over size, size / 2, [half])
               k1 = slice(k, over size, 0, [half])
               k2 = slice(k, over size, size / 2, [half])
               qr = join(q1 * c - q2 * s, q2 * c + q1 * s, along size)
               kr = join(k1 * c - k2 * s, k2 * c + k1 * s, along size)
               return linear(attend(qr, kr, linear(x, [heads, value: size])), [hidden])",
        formula: |l| {
            let turn = |name: &str| {
                let space = |k: usize| k as f64 / (SIZE as f64 / 2.0 - 1.0);
                each_head(l.heads(name, l.x), |i, head| turned(&head, i, |k| 100f64.powf(-space(k))))
            };
            // The inner product of `return` is the first.
            let v = l.heads("out.weight", l.x);
            l.linear("out.weight2", &flat(attend(&turn("q.weight"), &turn("k.weight"), &v)))
        },
        most: 1e-9,
    },
    Part {
        // YOCO's gated retention: a state that decays by a number of each head and token.
        of: "gated retention",
        text: "n = rms(x, over hidden, gain)
               q = linear(n, [heads, size])
               k = linear(n, [heads, size])
               v = linear(n, [heads, value: size])
               keep = exp(log_sigmoid(linear(n, [heads])) / 16)
               recurrence S [heads, value, size] {
                 S = keep * S + outer(v, k)
                 o = sum(S * q, over size)
               }
               g = silu(linear(n, [heads, value]))
               return linear(rms(o, over value) * g, [hidden])",
        formula: |l| {
            let n: Rows =
                l.x.iter().map(|x| rms(x, 1e-6).iter().zip(l.w("n.gain")).map(|(x, g)| x * g).collect()).collect();
            let [q, k, v, g] = ["q.weight", "k.weight", "v.weight", "g.weight"].map(|name| l.heads(name, &n));
            let decay = l.linear("keep.weight", &n);
            let mut state = vec![vec![vec![0.0; SIZE]; SIZE]; HEADS];
            let token = |i: usize| {
                let mut heads = vec![];
                for (h, state) in state.iter_mut().enumerate() {
                    let keep = sigmoid(decay[i][h]).powf(1.0 / 16.0);
                    for (row, v) in state.iter_mut().zip(&v[i][h]) {
                        row.iter_mut().zip(&k[i][h]).for_each(|(s, k)| *s = keep * *s + v * k);
                    }
                    let read: Vec<f64> = state.iter().map(|row| dot(row, &q[i][h])).collect();
                    let gated = rms(&read, 1e-6).into_iter().zip(&g[i][h]).map(|(x, g)| x * silu(*g));
                    heads.extend(gated);
                }
                heads
            };
            let out: Rows = (0..TOKENS).map(token).collect();
            l.linear("out.weight", &out)
        },
        most: 1e-9,
    },
    Part {
        // MoEUT, moeut/layers (SwitchHead): every head has experts for values and for outputs,
        // which its scores choose and weigh; queries and keys have none, and are normed alone.
        of: "experts of values and outputs",
        text: "n = rms(x, over hidden, gain, eps = 1e-5)
               q = linear(n, [heads, size])
               k = linear(n, [heads, size])
               sv = sigmoid(linear(n, [heads, count: 3]))
               best = top(sv, 2, over count)
               all = linear(x, [heads, count, value: size])
               v = sum(pick(all, best) * pick(sv, best), over choices)
               y = attend(q, k, v)
               so = sigmoid(linear(n, [heads, count]))
               chosen = top(so, 2, over count)
               outs = linear(y, [heads, count, hidden], over value)
               return sum(pick(outs, chosen) * pick(so, chosen), over choices heads)",
        formula: |l| {
            const COUNT: usize = 3;
            let n: Rows =
                l.x.iter().map(|x| rms(x, 1e-5).iter().zip(l.w("n.gain")).map(|(x, g)| x * g).collect()).collect();
            let (sv, so) = (l.linear("sv.weight", &n), l.linear("so.weight", &n));
            let best = |scores: &[f64], h: usize| -> Vec<(usize, f64)> {
                let mut all: Vec<(usize, f64)> =
                    scores[h * COUNT..][..COUNT].iter().map(|z| sigmoid(*z)).enumerate().collect();
                all.sort_by(|a, b| b.1.total_cmp(&a.1));
                all.truncate(2);
                all
            };
            let (of_v, of_o) = (l.w("all.weight"), l.w("outs.weight"));
            let value = |i: usize, h: usize| -> Vec<f64> {
                let mut v = vec![0.0; SIZE];
                for (e, share) in best(&sv[i], h) {
                    let rows = of_v[(h * COUNT + e) * SIZE * HIDDEN..].chunks(HIDDEN);
                    v.iter_mut().zip(rows).for_each(|(v, row)| *v += share * dot(row, &l.x[i]));
                }
                v
            };
            let v: Vec<Rows> = (0..TOKENS).map(|i| (0..HEADS).map(|h| value(i, h)).collect()).collect();
            let y = attend(&l.heads("q.weight", &n), &l.heads("k.weight", &n), &v);
            let out = |i: usize| -> Vec<f64> {
                let mut out = vec![0.0; HIDDEN];
                for (h, head) in y[i].iter().enumerate() {
                    for (e, share) in best(&so[i], h) {
                        let rows = of_o[(h * COUNT + e) * HIDDEN * SIZE..].chunks(SIZE);
                        out.iter_mut().zip(rows).for_each(|(out, row)| *out += share * dot(row, head));
                    }
                }
                out
            };
            (0..TOKENS).map(out).collect()
        },
        most: 1e-9,
    },
    Part {
        // MoEUT, moeut/moeut.py (SigmaMoE): scores read a norm, networks the stream.
        of: "networks that scores of a norm choose",
        text: "n = rms(x, over hidden, gain, eps = 1e-5)
               s = sigmoid(linear(n, [count: 4]))
               best = top(s, 2, over count)
               inner = relu(linear(x, [count, wide: 3]))
               outs = linear(inner, [count, hidden], over wide)
               return sum(pick(outs, best) * pick(s, best), over choices)",
        formula: |l| {
            const WIDE: usize = 3;
            let n: Rows =
                l.x.iter().map(|x| rms(x, 1e-5).iter().zip(l.w("n.gain")).map(|(x, g)| x * g).collect()).collect();
            let scores = l.linear("s.weight", &n);
            let (up, down) = (l.w("inner.weight"), l.w("outs.weight"));
            let token = |(x, scores): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
                let mut shares: Vec<(usize, f64)> = scores.iter().map(|z| sigmoid(*z)).enumerate().collect();
                shares.sort_by(|a, b| b.1.total_cmp(&a.1));
                let mut out = vec![0.0; HIDDEN];
                for (e, share) in shares.into_iter().take(2) {
                    let rows = up[e * WIDE * HIDDEN..].chunks(HIDDEN).take(WIDE);
                    let inner: Vec<f64> = rows.map(|row| dot(row, x).max(0.0)).collect();
                    let rows = down[e * HIDDEN * WIDE..].chunks(WIDE);
                    out.iter_mut().zip(rows).for_each(|(y, row)| *y += share * dot(row, &inner));
                }
                out
            };
            l.x.iter().zip(&scores).map(token).collect()
        },
        most: 1e-9,
    },
    Part {
        // Huginn's sandwich with one gain of two norms.
        of: "one gain of two norms",
        text: "g = weight([hidden], one)
               a = linear(rms(x, over hidden, eps = 1e-5) * g, [hidden])
               return rms(x + a, over hidden, eps = 1e-5) * g - x",
        formula: |l| {
            let g = l.w("g.weight");
            let norm = |x: &[f64]| -> Vec<f64> { rms(x, 1e-5).iter().zip(g).map(|(x, g)| x * g).collect() };
            let a = l.linear("a.weight", &l.x.iter().map(|x| norm(x)).collect());
            let row = |i: usize| {
                let sum: Vec<f64> = l.x[i].iter().zip(&a[i]).map(|(x, a)| x + a).collect();
                norm(&sum).iter().zip(&l.x[i]).map(|(y, x)| y - x).collect()
            };
            (0..TOKENS).map(row).collect()
        },
        most: 1e-9,
    },
];

fn model(part: &Part) -> Spec {
    let text = format!(
        "define own_part(heads {HEADS}, size {SIZE}) {{\n{}\n}}
         model m {{
           vocab {VOCAB}  hidden {HIDDEN}  context 16
           own = own_part {{ pre_norm false }}
           repeat 2 {{ own }}
         }}
         train {{ batch 2  sequence {TOKENS} }}",
        part.text
    );
    let ast = parse("m.dream", &text, Spelling::Dream).unwrap_or_else(|found| panic!("{found}"));
    check(&ast, &[]).unwrap_or_else(|found| panic!("{found}")).0
}

/// Logits of the model, with the formula in the place of the part.
fn expected(spec: &Spec, part: &Part, weights: &IndexMap<String, Tensor>, ids: &[i32]) -> Vec<f64> {
    let embed = weights["embed.weight"].floats();
    let mut x: Rows = ids.iter().map(|&id| embed[id as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    let mut first = None;
    for number in 0..2 {
        let y = (part.formula)(&mut Layer { weights, number, x: &x, ids, first: &mut first });
        x.iter_mut().zip(&y).for_each(|(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
    }
    let gain = weights["norm.weight"].floats();
    let head = weights["head.weight"].floats();
    let logits = |x: &Vec<f64>| -> Vec<f64> {
        let x: Vec<f64> = rms(x, spec.model.norm.eps).iter().zip(gain).map(|(x, g)| x * g).collect();
        head.chunks(HIDDEN).map(|row| dot(row, &x)).collect()
    };
    x.iter().flat_map(logits).collect()
}

#[test]
fn parts_of_authors_models_are_their_formulas() {
    let only = std::env::var("DREAMC_DEFINITION").ok();
    for part in PARTS.iter().filter(|p| only.as_ref().is_none_or(|o| p.of.contains(o.as_str()))) {
        let spec = model(part);
        let shape = Shape { batch: 1, sequence: TOKENS as u64, ..Shape::default() };
        let oracle = Oracle::new(&spec.model, shape, None).unwrap_or_else(|e| panic!("{}: {e}", part.of));
        let mut weights: IndexMap<String, Tensor> = IndexMap::new();
        for (name, dims, ..) in oracle.tensors() {
            let mut random = Philox::new(7, &name).stream(0);
            let values = (0..dims.iter().product::<u64>()).map(|_| random.unit() * 1.4 - 0.7).collect();
            let dims: Vec<usize> = dims.iter().map(|&d| d as usize).collect();
            weights.insert(name, Tensor::float(&dims, values));
        }
        let mut random = Philox::new(8, part.of).stream(0);
        let ids: Vec<i32> = (0..TOKENS).map(|_| random.below(VOCAB as u64) as i32).collect();
        let batch = Batch { targets: ids.clone(), ids: ids.clone(), ..Batch::default() };
        let found = oracle.forward(&weights, &batch, None).unwrap();
        let e = error(found.logits.floats(), &expected(&spec, part, &weights, &ids));
        println!("{}: {e:.1e}", part.of);
        assert!(e < part.most, "{}: logits differ by {e:.1e}", part.of);
    }
}

#[test]
fn parts_of_authors_models_keep_every_promise() {
    let only = ["formulas", "cached", "gradients"].map(String::from);
    for part in PARTS {
        let spec = model(part);
        let (devices, pipeline) = (&[], &Compiler);
        let task = Task { spec: &spec, weights: None, seed: 1, only: &only, devices, pipeline, ranks: 1 };
        let report = verify(&task, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", part.of));
        assert!(report.holds(), "{}\n{report}", part.of);
    }
}
