//! Attention along depth.
//!
//! Each token attends to a few rows of its own: no product is large enough for tiles, and what
//! counts is to read every key and value once. A task takes some tokens.

use super::Run;
use crate::backend::cpu::simd::{dot, exp, fma, kernel_fn, tanh};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use dreamc_compiler::ir::{ABSENT, Attention};
use dreamc_compiler::program::DepthShape;
use dreamc_compiler::program::kernel::{DepthAttention, DepthAttentionGrad};

/// Shapes and scores.
struct Depth {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    /// Rows of the cache that are seen.
    rows: std::ops::Range<usize>,
    scale: f32,
    softcap: Option<f32>,
}

impl Depth {
    fn new(shape: &DepthShape, attention: &Attention, row: usize) -> Self {
        let first = attention.window.map_or(0, |w| (row + 1).saturating_sub(w as usize));
        Depth {
            tokens: shape.rows as usize,
            heads: shape.heads as usize,
            kv_heads: shape.kv_heads as usize,
            size: shape.size as usize,
            rows: first..row + 1,
            scale: attention.scale as f32,
            softcap: attention.softcap.map(|c| c as f32),
        }
    }

    /// Offset of the key of a head among the rows of a cache.
    #[inline(always)]
    fn key(&self, row: usize, token: usize, head: usize) -> usize {
        (row * self.tokens + token) * self.kv_heads + head / (self.heads / self.kv_heads)
    }

    /// Runs a task for some tokens at a time.
    fn tokens(&self, cx: &Context, task: impl Fn(usize, &mut [f32]) + Sync) {
        let work = self.rows.len() * self.heads * self.size;
        let size = ((1 << 14) / work.max(1)).max(1);
        cx.parallel(self.tokens.div_ceil(size), |number, scratch| {
            for token in number * size..((number + 1) * size).min(self.tokens) {
                task(token, scratch);
            }
        });
    }

    /// Of one matmul for `tokens` tokens.
    fn multiply_adds(&self, tokens: usize) -> u64 {
        (self.rows.len() * tokens * self.heads * self.size) as u64
    }
}

/// Probabilities of one head of one token; scores are left in `scores`.
#[inline(always)]
fn probabilities<const FMA: bool>(
    s: &Depth,
    token: usize,
    head: usize,
    q: &[f32],
    k: View<f32>,
    scores: &mut [f32],
    p: &mut [f32],
) {
    let mut most = f32::NEG_INFINITY;
    for (score, row) in scores.iter_mut().zip(s.rows.clone()) {
        *score = dot::<FMA>(q, k.row(s.key(row, token, head))) * s.scale;
        if let Some(c) = s.softcap.filter(|_| *score >= ABSENT as f32) {
            *score = c * tanh::<FMA>(*score / c);
        }
        most = if *score > most { *score } else { most };
    }
    let mut sum = 0.0;
    for (p, score) in p.iter_mut().zip(&*scores) {
        *p = exp::<FMA>(*score - most);
        sum += *p;
    }
    let factor = 1.0 / sum;
    for p in p.iter_mut() {
        *p *= factor;
    }
}

kernel_fn! {
    fn token_forward(
        s: &Depth,
        token: usize,
        q: &[f32],
        k: View<f32>,
        v: View<f32>,
        o: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (scores, rest) = scratch.split_at_mut(s.rows.len());
        let p = &mut rest[..s.rows.len()];
        for head in 0..s.heads {
            let range = head * s.size..(head + 1) * s.size;
            probabilities::<FMA>(s, token, head, &q[range.clone()], k, scores, p);
            let o = &mut o[range];
            o.fill(0.0);
            for (p, row) in p.iter().zip(s.rows.clone()) {
                let v = v.row(s.key(row, token, head));
                for (o, v) in o.iter_mut().zip(v) {
                    *o = fma::<FMA>(*p, *v, *o);
                }
            }
        }
    }

    fn token_backward(
        s: &Depth,
        token: usize,
        q: &[f32],
        k: View<f32>,
        v: View<f32>,
        d: &[f32],
        dq: &mut [f32],
        dk: View<f32>,
        dv: View<f32>,
        scratch: &mut [f32],
    ) {
        let (scores, rest) = scratch.split_at_mut(s.rows.len());
        let (p, rest) = rest.split_at_mut(s.rows.len());
        let dp = &mut rest[..s.rows.len()];
        for head in 0..s.heads {
            let range = head * s.size..(head + 1) * s.size;
            let (q, d, dq) = (&q[range.clone()], &d[range.clone()], &mut dq[range]);
            probabilities::<FMA>(s, token, head, q, k, scores, p);
            let mut along = 0.0;
            for ((dp, p), row) in dp.iter_mut().zip(&*p).zip(s.rows.clone()) {
                let at = s.key(row, token, head);
                *dp = dot::<FMA>(d, v.row(at));
                along = fma::<FMA>(*dp, *p, along);
                for (dv, d) in dv.row_mut(at).iter_mut().zip(d) {
                    *dv = fma::<FMA>(*p, *d, *dv);
                }
            }
            dq.fill(0.0);
            for (i, row) in s.rows.clone().enumerate() {
                let at = s.key(row, token, head);
                let cap = s.softcap.filter(|_| scores[i] >= ABSENT as f32);
                let slope = cap.map_or(1.0, |c| 1.0 - (scores[i] / c) * (scores[i] / c));
                let ds = p[i] * (dp[i] - along) * slope * s.scale;
                for (dq, k) in dq.iter_mut().zip(k.row(at)) {
                    *dq = fma::<FMA>(ds, *k, *dq);
                }
                for (dk, q) in dk.row_mut(at).iter_mut().zip(q) {
                    *dk = fma::<FMA>(ds, *q, *dk);
                }
            }
        }
    }
}

impl Run for DepthAttention {
    fn scratch(&self) -> Scratch {
        Scratch::local(3 * self.shape.depths as usize)
    }

    /// Of tokens with a negative place nothing is computed.
    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Depth::new(&self.shape, &self.attention, args.index("row"));
        let (q, o) = (args.floats("q"), args.floats("o").rows_of(s.heads * s.size));
        let [k, v] = ["k", "v"].map(|name| args.floats(name).rows_of(s.size));
        let places = args.places(self.shape.rows);
        let taking = |places: &[i32]| places.iter().filter(|p| **p >= 0).count();
        cx.count(|| 2 * s.multiply_adds(places.map_or(s.tokens, taking)));
        s.tokens(cx, |token, scratch| {
            if places.is_some_and(|p| p[token] < 0) {
                return;
            }
            token_forward(&s, token, q.row(token), k, v, o.row_mut(token), scratch);
        });
    }
}

impl Run for DepthAttentionGrad {
    fn scratch(&self) -> Scratch {
        Scratch::local(3 * self.shape.depths as usize)
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Depth::new(&self.shape, &self.attention, args.index("row"));
        let (q, d, dq) = (args.floats("q"), args.floats("do").rows_of(s.heads * s.size), args.floats("dq"));
        let [k, v, dk, dv] = ["k", "v", "dk", "dv"].map(|name| args.floats(name).rows_of(s.size));
        cx.count(|| 5 * s.multiply_adds(s.tokens));
        s.tokens(cx, |token, scratch| {
            let (q, d, dq) = (q.row(token), d.row(token), dq.row_mut(token));
            token_backward(&s, token, q, k, v, d, dq, dk, dv, scratch);
        });
    }
}
