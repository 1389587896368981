//! Muon: a matrix moves by the orthogonalised mean of its gradients (Jordan et al., *Muon: An
//! optimizer for hidden layers in neural networks*, 2024): `m ← β m + (1 - β) g`,
//! `u = β m + (1 - β) g` (Nesterov), `w ← w · (1 - rate · decay) - rate · √max(1, n/k) · O(u)` of
//! an `n × k` matrix.
//!
//! `O` is five steps of Newton and Schulz on `X = u / (‖u‖ + 1e-7)`, `A = X Xᵀ`,
//! `X ← a X + (b A + c A²) X`, from the side that makes `A` the smaller: singular values come
//! between 0.7 and 1.2. Under `precision: bf16` its products read bf16 and add up in f32, as in
//! Jordan's program; under `f32` they are f32.

use super::{Moved, Optimizer, Rule, Stepping, Whole};
use crate::ir::{DType, Dim, Reduce, Unary, Value};

/// Added to the norm, so that zeros stay zeros.
const EPS: f64 = 1e-7;

/// Steps of Newton and Schulz, and the quintic's coefficients.
const STEPS: usize = 5;
const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Its constants.
pub(crate) struct Muon {
    /// How much of the mean is kept at each step.
    pub momentum: f64,
    /// Factor on the learning rate.
    pub rate: f64,
    /// The numbers that products of `O` read.
    pub products: DType,
    /// Whether a matrix stays at its Frobenius norm, and the rate is the angle of a step: then
    /// `w ← R · N(w - rate · R · N(O(u)))` with `N(x) = x / ‖x‖` and `R = ‖w‖`, without decay, to
    /// which the sphere is blind (*Rethinking Language Model Scaling under Transferable Hypersphere
    /// Optimization*, 2603.28743, section 3).
    pub sphere: bool,
}

impl Optimizer for Muon {
    fn name(&self) -> &'static str {
        if self.sphere { "muonh" } else { "muon" }
    }

    fn states(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn step(&self, s: &mut Stepping, _: &Rule, g: Value, states: &[Value]) -> (Moved, Vec<Value>) {
        let m = s.mean(states[0], self.momentum, g);
        (Moved::Gradient(s.mean(m, self.momentum, g)), vec![m])
    }

    fn whole(&self) -> Option<&dyn Whole> {
        Some(self)
    }
}

impl Whole for Muon {
    fn matrix(&self, s: &mut Stepping, rule: &Rule, (w, u): (Value, Value), [n, k]: [Dim; 2]) -> Value {
        let size = [n, k].map(|d| s.b.module.size(d));
        let x = orthogonal(s, u, [n, k], self.products);
        let rate = s.rate(rule);
        if self.sphere {
            let angle = s.b.scale(rate, self.rate);
            let radius = norm(s, w, [n, k]);
            let length = norm(s, x, [n, k]);
            let eps = s.b.constant(EPS);
            let length = s.b.add(length, eps);
            let step = s.b.mul(angle, radius);
            let step = s.b.div(step, length);
            let move_by = s.b.mul(x, step);
            let moved = s.b.sub(w, move_by);
            let length = norm(s, moved, [n, k]);
            // A matrix of zeros stays one.
            let tiny = s.b.constant(1e-30);
            let length = s.b.add(length, tiny);
            let back = s.b.div(radius, length);
            return s.b.mul(moved, back);
        }
        let wide = (size[0] as f64 / size[1] as f64).max(1.0).sqrt();
        let rate = s.b.scale(rate, self.rate);
        let kept = s.decayed(rule, w, rate);
        let step = s.b.scale(rate, wide);
        let moved = s.b.mul(x, step);
        s.b.sub(kept, moved)
    }
}

/// The Frobenius norm.
fn norm(s: &mut Stepping, x: Value, dims: [Dim; 2]) -> Value {
    let squares = s.b.unary(Unary::Square, x);
    let sum = s.b.reduce(Reduce::Sum, squares, &dims);
    s.b.unary(Unary::Sqrt, sum)
}

/// The nearest half-orthogonal matrix, about, by products that read numbers of that type.
fn orthogonal(s: &mut Stepping, u: Value, [n, k]: [Dim; 2], read: DType) -> Value {
    let size = [n, k].map(|d| s.b.module.size(d));
    let length = norm(s, u, [n, k]);
    let eps = s.b.constant(EPS);
    let length = s.b.add(length, eps);
    let mut x = s.b.div(u, length);
    let short = if size[0] <= size[1] { n } else { k };
    // The short side twice, for squares; their rows are `other`.
    let other = s.b.module.dim("other", size[0].min(size[1]));
    let third = s.b.module.dim("third", size[0].min(size[1]));
    for _ in 0..STEPS {
        let turned = if short == n { [other, k] } else { [n, other] };
        let x_read = s.as_stored(x, read);
        let again = s.b.reshape(x_read, &turned);
        let a = s.b.contract(again, x_read, &[if short == n { k } else { n }]);
        // Both factors are symmetric: `A Aᵀ` is `A²`.
        let a_read = s.as_stored(a, read);
        let a_third = s.b.reshape(a_read, &[third, short]);
        let a2 = s.b.contract(a_read, a_third, &[short]);
        let a2 = s.b.reshape(a2, &[other, short]);
        let (first, second) = (s.b.scale(a, QUINTIC[1]), s.b.scale(a2, QUINTIC[2]));
        let polynomial = s.b.add(first, second);
        let polynomial = s.as_stored(polynomial, read);
        // `P X`, or `X P` of a tall matrix.
        let product = if short == n {
            s.b.contract(polynomial, x_read, &[short])
        } else {
            s.b.contract(x_read, polynomial, &[short])
        };
        let product = s.b.reshape(product, &[n, k]);
        let kept = s.b.scale(x, QUINTIC[0]);
        x = s.b.add(kept, product);
    }
    x
}
