//! How weights begin.
//!
//! *In*: a seed, a tensor's name, its distribution. *Out*: its values. *Promise*: element `i` of a
//! tensor depends on nothing else, so neither the order of tensors, nor threads, nor the device
//! change a bit; a model with one tensor more keeps the values of the others.

use dreamc_compiler::compiled::Init;
use dreamc_data::rng::{Philox, unit_open};
use std::f64::consts::TAU;

/// Elements a thread draws at least; below it threads cost more than they save.
const CHUNK: usize = 1 << 18;

/// The first values of the tensor of this name.
pub fn values(seed: u64, name: &str, init: Init, elements: usize) -> Vec<f32> {
    let mut out = vec![0.0; elements];
    fill(seed, name, init, &mut out);
    out
}

/// The same, into memory that exists.
pub fn fill(seed: u64, name: &str, init: Init, out: &mut [f32]) {
    match init {
        Init::Constant(value) | Init::Ramp(value, _) => out.fill(value as f32),
        Init::Identity { columns, from } => {
            for (i, value) in out.iter_mut().enumerate() {
                let (row, column) = (i as u64 / columns % columns, i as u64 % columns);
                *value = if column == row + from { 1.0 } else { 0.0 };
            }
        }
        Init::Pick { place, step, columns } => {
            let columns = columns.max(1);
            out.fill(0.0);
            for (row, values) in out.chunks_mut(columns as usize).enumerate() {
                let place = place.wrapping_add(step.wrapping_mul(row as u64)) % columns;
                values.iter_mut().skip(place as usize).take(1).for_each(|x| *x = 1.0);
            }
        }
        Init::Uniform(low, high) => uniform(seed, name, out, |u| low + (high - low) * u),
        Init::LogUniform(low, high) => uniform(seed, name, out, |u| (low + (high - low) * u).ln()),
        Init::InverseSoftplusUniform(low, high) => {
            let (low, high) = (low.ln(), high.ln());
            // `softplus(y) = x` at `y = x + ln(1 - e^-x)`.
            uniform(seed, name, out, |u| {
                let x = (low + (high - low) * u).exp();
                x + (-(-x).exp_m1()).ln()
            });
        }
        Init::Normal(deviation) => {
            let philox = Philox::new(seed, name);
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            let chunk = out.len().div_ceil(threads).max(CHUNK).next_multiple_of(2);
            std::thread::scope(|scope| {
                let mut rest = out.chunks_mut(chunk).enumerate().peekable();
                while let Some((i, part)) = rest.next() {
                    let mut work = move || normals(&philox, (i * chunk / 2) as u64, deviation, part);
                    if rest.peek().is_some() {
                        scope.spawn(work);
                    } else {
                        work();
                    }
                }
            });
        }
    }
}

/// A function of numbers that are uniform in (0, 1]: counter `i` gives elements `2i` and `2i + 1`.
fn uniform(seed: u64, name: &str, out: &mut [f32], of: impl Fn(f64) -> f64) {
    let philox = Philox::new(seed, name);
    for (i, pair) in out.chunks_mut(2).enumerate() {
        let b = philox.block(0, i as u64);
        let word = |k: usize| u64::from(b[k]) | u64::from(b[k + 1]) << 32;
        for (value, k) in pair.iter_mut().zip([0, 2]) {
            *value = of(unit_open(word(k))) as f32;
        }
    }
}

/// Normal numbers by Box–Muller: counter `i` gives elements `2i` and `2i + 1`.
fn normals(philox: &Philox, first: u64, deviation: f64, out: &mut [f32]) {
    for (i, pair) in out.chunks_mut(2).enumerate() {
        let b = philox.block(0, first + i as u64);
        let word = |k: usize| u64::from(b[k]) | u64::from(b[k + 1]) << 32;
        let radius = deviation * (-2.0 * unit_open(word(0)).ln()).sqrt();
        let (sin, cos) = (TAU * unit_open(word(2))).sin_cos();
        for (value, part) in pair.iter_mut().zip([cos, sin]) {
            *value = (radius * part) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_prefix_whatever_the_threads() {
        let large = values(7, "w", Init::Normal(0.5), 4 * CHUNK + 3);
        for n in [1, 2, 3, 1001, CHUNK + 1] {
            assert_eq!(values(7, "w", Init::Normal(0.5), n), large[..n]);
        }
    }

    #[test]
    fn names_and_seeds_are_unrelated() {
        let w = |seed, name| values(seed, name, Init::Normal(1.0), 64);
        assert_ne!(w(0, "a"), w(0, "b"));
        assert_ne!(w(0, "a"), w(1, "a"));
    }

    #[test]
    fn moments_are_those_asked_for() {
        let x = values(1, "m", Init::Normal(0.1), 200_000);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let second = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        let fourth = x.iter().map(|&v| f64::from(v).powi(4)).sum::<f64>() / n;
        assert!(mean.abs() < 1e-3 && (second - 0.01).abs() < 2e-4, "{mean} {second}");
        assert!((fourth / (3.0 * second * second) - 1.0).abs() < 0.05, "{fourth}");
    }
}
