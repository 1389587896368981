//! Noise that a stream begins with, and the numbers by which attentions drop weights.
//!
//! *In*: a seed, and which token each row is of. *Out*: standard normal numbers, cut at 3; or an
//! integer of each token. *Promise*: in training they are a function of (seed, step, sequence,
//! token) and so the same in whatever micro-batches a step is taken; otherwise of (seed, position),
//! so that a token which is decoded has those that it has in its whole text.

use dreamc_data::rng::{Philox, unit_open};
use std::f64::consts::TAU;

/// Larger ones are drawn again.
const CUT: f64 = 3.0;
/// Most tries: that all are larger has a chance of 1e-20.
const TRIES: u64 = 8;

/// Of tokens at these positions.
pub fn of_positions(seed: u64, positions: &[i32], hidden: usize) -> Vec<f32> {
    let philox = Philox::new(seed, "start");
    positions.iter().flat_map(|&p| row(&philox, u64::from(p.unsigned_abs()), hidden)).collect()
}

/// For `tokens` tokens of a training step, the first of them token number `first` of the whole
/// batch.
pub fn of_step(seed: u64, step: u64, first: u64, tokens: usize, hidden: usize) -> Vec<f32> {
    let philox = Philox::new(seed, &format!("start/{step}"));
    (0..tokens as u64).flat_map(|token| row(&philox, first + token, hidden)).collect()
}

/// Integers of tokens at these positions.
pub fn draws_of_positions(seed: u64, positions: &[i32]) -> Vec<i32> {
    let philox = Philox::new(seed, "dropout");
    positions.iter().map(|&p| draw(&philox, u64::from(p.unsigned_abs()))).collect()
}

/// Integers of `tokens` tokens of a training step, as [`of_step`] numbers them.
pub fn draws_of_step(seed: u64, step: u64, first: u64, tokens: usize) -> Vec<i32> {
    let philox = Philox::new(seed, &format!("dropout/{step}"));
    (0..tokens as u64).map(|token| draw(&philox, first + token)).collect()
}

fn draw(philox: &Philox, number: u64) -> i32 {
    philox.block(0, number)[0] as i32
}

fn row(philox: &Philox, number: u64, hidden: usize) -> impl Iterator<Item = f32> + '_ {
    (0..hidden as u64).map(move |i| normal(philox, number * hidden as u64 + i))
}

/// By Box–Muller; try `k` is counter `k` of the element.
fn normal(philox: &Philox, element: u64) -> f32 {
    let mut tries = (0..TRIES).map(|k| {
        let b = philox.block(k, element);
        let word = |k: usize| u64::from(b[k]) | u64::from(b[k + 1]) << 32;
        (-2.0 * unit_open(word(0)).ln()).sqrt() * (TAU * unit_open(word(2))).cos()
    });
    tries.find(|x| x.abs() <= CUT).unwrap_or(0.0) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_normal_and_cut() {
        let x = of_step(1, 3, 0, 4000, 16);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let second = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        // The variance of a normal number cut at 3 is 0.9733.
        assert!(mean.abs() < 0.02 && (second - 0.9733).abs() < 0.02, "{mean} {second}");
        assert!(x.iter().all(|v| v.abs() <= 3.0));
    }

    #[test]
    fn micro_batches_and_positions_do_not_change_it() {
        let whole = of_step(1, 3, 0, 12, 5);
        assert_eq!(of_step(1, 3, 8, 4, 5), whole[40..]);
        assert_ne!(of_step(1, 4, 0, 12, 5), whole);
        let text = of_positions(1, &[0, 1, 2, 3, 0, 1], 5);
        assert_eq!(of_positions(1, &[2], 5), text[10..15]);
        assert_eq!(text[20..25], text[..5]);
        let draws = draws_of_step(1, 3, 0, 12);
        assert_eq!(draws_of_step(1, 3, 8, 4), draws[8..]);
        assert_ne!(draws_of_step(1, 4, 0, 12), draws);
    }
}
