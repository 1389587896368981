//! The pace of ranks: which of them all others wait for.
//!
//! *In*: of each step, seconds that every rank took for micro-batches of its own, without waiting.
//! *Out*: words, once, where one takes much longer than the median. *Promise*: nothing of it
//! reaches the numbers of a run.

/// Steps before anything is said.
const STEPS: u64 = 5;

/// A rank becomes slow at the first of these multiples of the median time, and stops being slow at
/// the second.
const SLOW: f64 = 1.5;
const FINE: f64 = 1.2;

/// Weight of a step in the means.
const NEW: f64 = 0.25;

/// Means of the ranks.
#[derive(Debug, Default)]
pub struct Pace {
    means: Vec<f64>,
    steps: u64,
    said: Vec<bool>,
}

impl Pace {
    /// Takes a step's seconds, by rank; gives words where a rank has become slow.
    pub fn step(&mut self, seconds: &[f64]) -> Option<String> {
        if self.means.len() != seconds.len() {
            *self = Pace { means: seconds.to_vec(), steps: 0, said: vec![false; seconds.len()] };
        }
        for (mean, new) in self.means.iter_mut().zip(seconds) {
            *mean += NEW * (new - *mean);
        }
        self.steps += 1;
        let mut sorted = self.means.clone();
        sorted.sort_by(f64::total_cmp);
        // Of two ranks the faster one.
        let median = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
        let (slowest, &mean) = self.means.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
        for (said, mean) in self.said.iter_mut().zip(&self.means) {
            *said &= *mean > FINE * median;
        }
        if self.steps < STEPS || mean <= SLOW * median || self.said[slowest] {
            return None;
        }
        self.said[slowest] = true;
        Some(format!(
            "rank {slowest} is slow: its part of a step takes {:.1} ms, {:.1} times the median of the ranks; all wait for it",
            1e3 * mean,
            mean / median.max(f64::MIN_POSITIVE)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_stays_slow_is_named_once() {
        let mut pace = Pace::default();
        let even = [0.010, 0.011, 0.010, 0.012];
        let slow = [0.010, 0.011, 0.030, 0.012];
        assert!((0..50).all(|_| pace.step(&even).is_none()));
        let said: Vec<String> = (0..50).filter_map(|_| pace.step(&slow)).collect();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("rank 2 is slow: its part of a step takes "), "{said:?}");
        // One step is no pace, and one that has come back may be slow again.
        assert!((0..50).all(|_| pace.step(&even).is_none()));
        assert!(pace.step(&slow).is_none());
        assert_eq!((0..50).filter_map(|_| pace.step(&slow)).count(), 1);
        // Of two, the other is the measure.
        let mut two = Pace::default();
        let said: Vec<String> = (0..9).filter_map(|_| two.step(&[0.02, 0.01])).collect();
        assert!(said.len() == 1 && said[0].starts_with("rank 0 is slow"), "{said:?}");
    }
}
