//! One token of one head on the state as a text keeps it, as decoding does.

use crate::backend::cpu::simd::{dot, fma, kernel_fn};

/// The operands of a token, of as many numbers as keys or values have; absent ones are empty.
pub(super) struct Token<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub u: &'a [f32],
    pub w: &'a [f32],
    /// Factors: one, or one of each channel.
    pub decay: &'a [f32],
    pub v: &'a [f32],
    /// Whether the output reads the state before the token.
    pub before: bool,
}

impl Token<'_> {
    #[inline(always)]
    fn factor(&self, c: usize) -> f32 {
        self.decay[if self.decay.len() == 1 { 0 } else { c }]
    }
}

/// `s = a ⊙ s + x k + p w`.
#[inline(always)]
fn advance<const FMA: bool>(t: &Token, x: f32, p: f32, s: &mut [f32]) {
    match t.decay {
        [a] => s.iter_mut().zip(t.k).for_each(|(s, k)| *s = fma::<FMA>(x, *k, *a * *s)),
        all => {
            let each = s.iter_mut().zip(t.k).zip(all);
            each.for_each(|((s, k), a)| *s = fma::<FMA>(x, *k, *a * *s));
        }
    }
    s.iter_mut().zip(t.w).for_each(|(s, w)| *s = fma::<FMA>(p, *w, *s));
}

kernel_fn! {
    /// A state whose rows are of values.
    pub(super) fn by_values(t: &Token, state: &mut [f32], o: &mut [f32]) {
        for ((s, v), o) in state.chunks_exact_mut(t.q.len()).zip(t.v).zip(o) {
            let p = if t.u.is_empty() { 0.0 } else { dot::<FMA>(s, t.u) };
            if t.before {
                *o = dot::<FMA>(s, t.q);
            }
            advance::<FMA>(t, if t.w.is_empty() { v + p } else { *v }, p, s);
            if !t.before {
                *o = dot::<FMA>(s, t.q);
            }
        }
    }

    /// A state whose rows are of keys; `x` and `p` are room for values.
    pub(super) fn by_keys(t: &Token, state: &mut [f32], o: &mut [f32], x: &mut [f32], p: &mut [f32]) {
        let n = t.v.len();
        p.fill(0.0);
        for (u, s) in t.u.iter().zip(state.chunks_exact(n)) {
            p.iter_mut().zip(s).for_each(|(p, s)| *p = fma::<FMA>(*u, *s, *p));
        }
        x.copy_from_slice(t.v);
        if t.w.is_empty() {
            x.iter_mut().zip(&*p).for_each(|(x, p)| *x += *p);
        }
        o.fill(0.0);
        for (c, s) in state.chunks_exact_mut(n).enumerate() {
            if t.before {
                o.iter_mut().zip(&*s).for_each(|(o, s)| *o = fma::<FMA>(t.q[c], *s, *o));
            }
            let (a, k) = (t.factor(c), t.k[c]);
            s.iter_mut().zip(&*x).for_each(|(s, x)| *s = fma::<FMA>(k, *x, a * *s));
            if let Some(w) = t.w.get(c) {
                s.iter_mut().zip(&*p).for_each(|(s, p)| *s = fma::<FMA>(*w, *p, *s));
            }
            if !t.before {
                o.iter_mut().zip(&*s).for_each(|(o, s)| *o = fma::<FMA>(t.q[c], *s, *o));
            }
        }
    }
}
