//! Attention over sources in depth.
//!
//! Each token reads a few rows of its own by one query of all tokens: every source is read from
//! memory once for its score and, still in the cache, once more for the result. A task takes some
//! tokens.

use super::Run;
use crate::backend::cpu::simd::{dot, exp, fma, kernel_fn};
use crate::backend::cpu::{Arguments, Context, Scratch, Stored, View};
use dreamc_compiler::program::SourcesShape;
use dreamc_compiler::program::kernel::{ReadSources, ReadSourcesGrad};

/// Shapes, and how many rows of the sources are read.
struct Sources {
    tokens: usize,
    width: usize,
    rows: usize,
    eps: f32,
}

impl Sources {
    fn new(shape: &SourcesShape, rows: usize) -> Self {
        Sources { tokens: shape.rows as usize, width: shape.width as usize, rows, eps: shape.eps.0 as f32 }
    }

    /// Runs a task for some tokens at a time.
    fn tokens(&self, cx: &Context, task: impl Fn(usize, &mut [f32]) + Sync) {
        let work = (self.rows + 1) * self.width;
        let size = ((1 << 14) / work.max(1)).max(1);
        cx.parallel(self.tokens.div_ceil(size), |number, scratch| {
            for token in number * size..((number + 1) * size).min(self.tokens) {
                task(token, scratch);
            }
        });
    }

    fn multiply_adds(&self) -> u64 {
        ((self.rows + 1) * self.tokens * self.width) as u64
    }
}

/// Weights of all sources of a token in `p`, and the factors that normalise them in `roots`.
#[inline(always)]
fn weights<const FMA: bool>(
    s: &Sources,
    token: usize,
    sources: View<f32>,
    x: &[f32],
    q: &[f32],
    roots: &mut [f32],
    p: &mut [f32],
) {
    let mut most = f32::NEG_INFINITY;
    for (i, (root, p)) in roots.iter_mut().zip(&mut *p).enumerate() {
        let v = if i < s.rows { sources.row(i * s.tokens + token) } else { x };
        *root = 1.0 / (dot::<FMA>(v, v) / s.width as f32 + s.eps).sqrt();
        *p = dot::<FMA>(q, v) * *root;
        most = if *p > most { *p } else { most };
    }
    let mut sum = 0.0;
    for p in p.iter_mut() {
        *p = exp::<FMA>(*p - most);
        sum += *p;
    }
    let factor = 1.0 / sum;
    for p in p.iter_mut() {
        *p *= factor;
    }
}

kernel_fn! {
    fn token_forward(
        s: &Sources,
        token: usize,
        sources: View<f32>,
        x: &[f32],
        q: &[f32],
        u: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (roots, rest) = scratch.split_at_mut(s.rows + 1);
        let p = &mut rest[..s.rows + 1];
        weights::<FMA>(s, token, sources, x, q, roots, p);
        u.fill(0.0);
        for (i, p) in p.iter().enumerate() {
            let v = if i < s.rows { sources.row(i * s.tokens + token) } else { x };
            for (u, v) in u.iter_mut().zip(v) {
                *u = fma::<FMA>(*p, *v, *u);
            }
        }
    }

    fn token_backward(
        s: &Sources,
        token: usize,
        sources: View<f32>,
        x: &[f32],
        q: &[f32],
        du: &[f32],
        dx: &mut [f32],
        dq: &mut [f32],
        dsources: View<f32>,
        scratch: &mut [f32],
    ) {
        let (roots, rest) = scratch.split_at_mut(s.rows + 1);
        let (p, rest) = rest.split_at_mut(s.rows + 1);
        let dp = &mut rest[..s.rows + 1];
        weights::<FMA>(s, token, sources, x, q, roots, p);
        let mut along = 0.0;
        for (i, (dp, p)) in dp.iter_mut().zip(&*p).enumerate() {
            let v = if i < s.rows { sources.row(i * s.tokens + token) } else { x };
            *dp = dot::<FMA>(du, v);
            along = fma::<FMA>(*dp, *p, along);
        }
        dq.fill(0.0);
        dx.fill(0.0);
        for i in 0..=s.rows {
            let v = if i < s.rows { sources.row(i * s.tokens + token) } else { x };
            let ds = p[i] * (dp[i] - along) * roots[i];
            let back = -ds * dot::<FMA>(q, v) * roots[i] * roots[i] / s.width as f32;
            let to = if i < s.rows { dsources.row_mut(i * s.tokens + token) } else { &mut *dx };
            for ((to, d), (q, v)) in to.iter_mut().zip(du).zip(q.iter().zip(v)) {
                let part = fma::<FMA>(ds, *q, back * *v);
                *to = fma::<FMA>(p[i], *d, *to + part);
            }
            for (dq, v) in dq.iter_mut().zip(v) {
                *dq = fma::<FMA>(ds, *v, *dq);
            }
        }
    }
}

impl Run for ReadSources {
    fn scratch(&self) -> Scratch {
        Scratch::local(3 * (self.0.sources as usize + 1))
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sources::new(&self.0, args.index("row"));
        let (sources, u) = (args.floats("sources").rows_of(s.width), args.floats("u").rows_of(s.width));
        let (x, q) = (args.floats("x"), args.floats("q").rows_of(s.width));
        cx.count(|| 2 * s.multiply_adds());
        s.tokens(cx, |token, scratch| {
            token_forward(&s, token, sources, x.row(token), q.row(0), u.row_mut(token), scratch);
        });
    }
}

impl Run for ReadSourcesGrad {
    fn scratch(&self) -> Scratch {
        Scratch::local(3 * (self.0.sources as usize + 1))
    }

    fn run<T: Stored>(&self, cx: &Context, args: &Arguments) {
        let s = Sources::new(&self.0, args.index("row"));
        let [sources, du, dx, dq, dsources, q] =
            ["sources", "du", "dx", "dq", "dsources", "q"].map(|name| args.floats(name).rows_of(s.width));
        let x = args.floats("x");
        cx.count(|| 6 * s.multiply_adds());
        s.tokens(cx, |token, scratch| {
            let (dx, dq) = (dx.row_mut(token), dq.row_mut(token));
            let (x, q, du) = (x.row(token), q.row(0), du.row(token));
            token_backward(&s, token, sources, x, q, du, dx, dq, dsources, scratch);
        });
    }
}
