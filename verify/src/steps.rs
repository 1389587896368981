//! Optimizer steps by their formulas, once more and without the compiler, in f64.
//!
//! *In*: a tensor, its clipped gradient and its two states. *Out*: all three after the step. The
//! formulas are those of the pages that `compiler::optim` names.

use dreamc_compiler::compiled::{Init, Tensor, TensorKind};
use dreamc_dsl::spec::{Matrices, OptimizerKind, Pace, Train};

/// A step under way.
pub(super) struct Law<'a> {
    pub train: &'a Train,
    /// Number of the step, from 1.
    pub step: i32,
    /// The learning rate of the tensor.
    pub rate: f64,
    /// Its weight decay.
    pub decay: f64,
    /// Its factor on AdamW's ε.
    pub eps: f64,
}

impl Law<'_> {
    /// Moves a tensor. Its elements whose move is a sign of rounding come back: f32 and f64 may
    /// differ in them.
    pub(super) fn apply(&self, t: &Tensor, g: &[f64], [w, m, v]: &mut [Vec<f64>; 3]) -> Vec<usize> {
        match self.train.optimizer {
            OptimizerKind::Lion => return self.lion(g, w, m),
            OptimizerKind::Sgd(momentum) => {
                for i in 0..w.len() {
                    m[i] = momentum * m[i] + g[i];
                    w[i] -= self.rate * (m[i] + self.decay * w[i]);
                }
            }
            OptimizerKind::Muon(how) if whole(self.train, t) => self.muon(how, false, t, g, [w, m]),
            OptimizerKind::MuonH(how) if whole(self.train, t) => self.muon(how, true, t, g, [w, m]),
            OptimizerKind::AdamW | OptimizerKind::Muon(_) | OptimizerKind::MuonH(_) => {
                self.adamw(g, w, m, v);
            }
        }
        vec![]
    }

    fn adamw(&self, g: &[f64], w: &mut [f64], m: &mut [f64], v: &mut [f64]) {
        let (b1, b2) = self.train.betas;
        let correct = |b: f64| 1.0 - b.powi(self.step);
        for i in 0..w.len() {
            m[i] = b1 * m[i] + (1.0 - b1) * g[i];
            v[i] = b2 * v[i] + (1.0 - b2) * g[i] * g[i];
            let step = (m[i] / correct(b1)) / ((v[i] / correct(b2)).sqrt() + self.eps * self.train.eps);
            w[i] -= self.rate * (step + self.decay * w[i]);
        }
    }

    fn lion(&self, g: &[f64], w: &mut [f64], m: &mut [f64]) -> Vec<usize> {
        let (b1, b2) = self.train.betas;
        let mut unsure = vec![];
        for i in 0..w.len() {
            let (old, new) = (b1 * m[i], (1.0 - b1) * g[i]);
            let toward = old + new;
            let sign = if toward == 0.0 { 0.0 } else { toward.signum() };
            if toward != 0.0 && toward.abs() < 1e-6 * (old.abs() + new.abs()) + f64::from(f32::MIN_POSITIVE) {
                unsure.push(i);
            }
            w[i] -= self.rate * (sign + self.decay * w[i]);
            m[i] = b2 * m[i] + (1.0 - b2) * g[i];
        }
        unsure
    }

    fn muon(&self, how: Matrices, sphere: bool, t: &Tensor, g: &[f64], [w, m]: [&mut Vec<f64>; 2]) {
        let [.., n, k] = t.shape[..] else { return };
        let (n, k, b) = (n as usize, k as usize, how.momentum);
        for ((w, m), g) in w.chunks_mut(n * k).zip(m.chunks_mut(n * k)).zip(g.chunks(n * k)) {
            let mut u = vec![0.0; n * k];
            for i in 0..n * k {
                m[i] = b * m[i] + (1.0 - b) * g[i];
                u[i] = b * m[i] + (1.0 - b) * g[i];
            }
            let x = orthogonal(&u, n, k);
            let rate = self.rate * how.rate;
            if sphere {
                let (radius, length) = (norm(w), norm(&x) + 1e-7);
                for i in 0..n * k {
                    w[i] -= rate * radius * x[i] / length;
                }
                let back = radius / norm(w).max(1e-30);
                w.iter_mut().for_each(|w| *w *= back);
            } else {
                let wide = (n as f64 / k as f64).max(1.0).sqrt();
                for i in 0..n * k {
                    w[i] = w[i] * (1.0 - rate * self.decay) - rate * wide * x[i];
                }
            }
        }
    }
}

/// Whether the recipe moves whole matrices of a tensor.
pub(super) fn whole(train: &Train, t: &Tensor) -> bool {
    let deep = match t.kind {
        TensorKind::Matrix | TensorKind::Shared => t.shape.len() > 1,
        TensorKind::Routed => t.shape.len() > 2,
        TensorKind::Embedding
        | TensorKind::Head
        | TensorKind::Router
        | TensorKind::Gain
        | TensorKind::Steady
        | TensorKind::Balance => false,
    };
    match train.optimizer.pace() {
        Pace::Alike | Pace::Gradients => false,
        Pace::Matrices => deep,
        Pace::Norms => deep && !matches!(t.init, Init::Constant(_)),
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Five steps of Newton and Schulz; a tall matrix is turned.
fn orthogonal(u: &[f64], n: usize, k: usize) -> Vec<f64> {
    let length = norm(u) + 1e-7;
    let turn = |x: &[f64], n: usize, k: usize| -> Vec<f64> {
        (0..k).flat_map(|j| (0..n).map(move |i| x[i * k + j])).collect()
    };
    let x: Vec<f64> = u.iter().map(|x| x / length).collect();
    let (mut x, p, q) = if n > k { (turn(&x, n, k), k, n) } else { (x, n, k) };
    let product = |a: &[f64], b: &[f64], n: usize, s: usize, k: usize| -> Vec<f64> {
        let of = |i: usize, j: usize| (0..s).map(|l| a[i * s + l] * b[l * k + j]).sum();
        (0..n * k).map(|at| of(at / k, at % k)).collect()
    };
    for _ in 0..5 {
        let a = product(&x, &turn(&x, p, q), p, q, p);
        let square = product(&a, &a, p, p, p);
        let b: Vec<f64> = a.iter().zip(&square).map(|(a, s)| -4.7750 * a + 2.0315 * s).collect();
        let by = product(&b, &x, p, p, q);
        x = x.iter().zip(by).map(|(x, y)| 3.4445 * x + y).collect();
    }
    if n > k { turn(&x, p, q) } else { x }
}
