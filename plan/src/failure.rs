//! Failures: the best distance between checkpoints, and the time that is lost.
//!
//! Young (1974), *A first order approximation to the optimum checkpoint interval*: `√(2 δ M)` for a
//! checkpoint that stops the work for `δ` and a mean of `M` between failures. Daly (2006), *A
//! higher order estimate of the optimum checkpoint interval for restart dumps*, equation 37:
//! `√(2 δ M) [1 + ⅓ √(δ / 2M) + ⅑ δ / 2M] − δ` for `δ < 2 M`, else `M`.
//!
//! A checkpoint that is written while training goes on stops the work for the copy in memory alone.
//! It counts only once it is whole: a failure loses half a distance, and the time of writing.

use serde::Serialize;

/// Time of the work between two checkpoints by Young's formula.
pub fn young(delta: f64, between: f64) -> f64 {
    (2.0 * delta * between).sqrt()
}

/// The same by Daly's.
pub fn daly(delta: f64, between: f64) -> f64 {
    if delta >= 2.0 * between {
        return between;
    }
    let x = delta / (2.0 * between);
    young(delta, between) * (1.0 + x.sqrt() / 3.0 + x / 9.0) - delta
}

/// A job that fails now and then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// Seconds between failures.
    pub between: f64,
    /// Seconds for which a checkpoint stops the work.
    pub stops: f64,
    /// Seconds until it is whole.
    pub writes: f64,
    /// Seconds from a failure to the first step that is new or done again.
    pub restart: f64,
}

/// Costs of failures and of checkpoints against them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Losses {
    /// Seconds between failures of the job.
    pub between: f64,
    /// Seconds for which a checkpoint stops the work.
    pub stops: f64,
    /// Seconds until it is whole.
    pub writes: f64,
    /// The best distance by Young.
    pub young: f64,
    /// The best distance by Daly, no shorter than the time of writing.
    pub distance: f64,
    /// Seconds that a failure costs in the mean: work done again, and the restart.
    pub lost: f64,
    /// Share of the time that is no new work.
    pub share: f64,
}

impl Job {
    /// With checkpoints at the best distance.
    pub fn losses(&self) -> Losses {
        let Job { between, stops, writes, .. } = *self;
        let distance = daly(stops, between).max(writes);
        Losses {
            between,
            stops,
            writes,
            young: young(stops, between),
            distance,
            lost: self.lost(distance),
            share: self.share(distance),
        }
    }

    /// Seconds that a failure costs in the mean, with checkpoints at a distance.
    pub fn lost(&self, distance: f64) -> f64 {
        distance / 2.0 + self.writes + self.restart
    }

    /// Share of the time that is no new work, with checkpoints at a distance.
    pub fn share(&self, distance: f64) -> f64 {
        let stopped = self.stops / (distance + self.stops);
        (stopped + self.lost(distance) / self.between).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_distance_is_the_best() {
        for (stops, between) in [(1.0, 10_000.0), (20.0, 3600.0), (60.0, 86_400.0)] {
            let job = Job { between, stops, writes: 0.0, restart: 100.0 };
            let best = job.losses();
            let near = |d: f64| job.share(d) - best.share;
            // Flat there, and worse on both sides.
            assert!(near(best.distance * 2.0) > 0.0 && near(best.distance / 2.0) > 0.0);
            let steps = (1..4000).map(|i| job.share(best.distance * f64::from(i) / 1000.0));
            let least = steps.fold(f64::INFINITY, f64::min);
            assert!(best.share <= least * 1.01, "{} and {least}", best.share);
            assert!((best.young / best.distance - 1.0).abs() < 0.1);
        }
        // A checkpoint that takes longer than the machine holds.
        assert_eq!(daly(10.0, 4.0), 4.0);
    }

    /// Figures 3 to 5 of Daly's paper, in minutes: a dump of 5 minutes.
    #[test]
    fn the_formula_is_that_of_the_paper() {
        for (between, best) in [(24.0 * 60.0, 117.0), (6.0 * 60.0, 57.0), (15.0, 9.1)] {
            let found = daly(5.0, between);
            assert!((found / best - 1.0).abs() < 0.01, "{found} and {best}");
        }
    }

    /// Failures at random moments, steps done again: the share of the formula.
    #[test]
    fn the_share_is_that_of_a_run_with_random_failures() {
        let job = Job { between: 3600.0, stops: 10.0, writes: 30.0, restart: 60.0 };
        let losses = job.losses();
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let (mut time, mut done, wanted) = (0.0f64, 0.0f64, 3e7);
        let period = losses.distance + losses.stops;
        while done < wanted {
            let until = -random().ln() * job.between;
            // Whole checkpoints of this stretch: the last counts once it is written.
            let kept = ((until - job.writes).max(0.0) / period).floor();
            done += kept * losses.distance;
            time += until + job.restart;
        }
        let share = 1.0 - done / time;
        assert!((share / losses.share - 1.0).abs() < 0.05, "{share} and {}", losses.share);
    }
}
