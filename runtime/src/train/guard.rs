//! Steps that are not taken.
//!
//! *In*: the loss and the gradient norm of each step, before its update. *Out*: why it is to be
//! left out, or nothing. *Promise*: a function of the recipe and of the steps before, and the
//! checkpoint has both: a run that was cut off leaves out the same steps.
//!
//! The rule of spikes is OLMo-core's `SkipStepOptimizer`: more than a given number of standard
//! deviations above the mean of the last [`WINDOW`] steps, once there are half as many.

use dreamc_dsl::spec::{OnNan, Train};
use serde::{Deserialize, Serialize};

/// Steps that a step is compared with.
pub const WINDOW: usize = 128;

/// This many steps left out one after another stop the run: it would not come back by itself.
pub const MOST_IN_A_ROW: u64 = 100;

/// Losses and norms of the steps before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Guard {
    /// Loss and gradient norm of the last steps that were taken, where spikes are looked for;
    /// oldest first.
    pub last: Vec<(f32, f32)>,
    /// Steps left out since the last that was taken.
    pub in_a_row: u64,
}

/// Whether to take a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It is taken.
    Take,
    /// It is left out, for this reason.
    Skip(String),
    /// The run stops: this is not finite.
    Stop(&'static str, f32),
}

impl Guard {
    /// Judges a step and remembers it.
    pub fn judge(&mut self, train: &Train, loss: f32, norm: f32) -> Verdict {
        for (what, value) in [("the loss", loss), ("the gradient norm", norm)] {
            if !value.is_finite() {
                self.in_a_row += 1;
                let skip = train.on_nan == OnNan::Skip && self.in_a_row < MOST_IN_A_ROW;
                return if skip {
                    Verdict::Skip(format!("{what} is {value}"))
                } else {
                    Verdict::Stop(what, value)
                };
            }
        }
        if let Some(factor) = train.spike {
            let losses = self.last.iter().map(|l| f64::from(l.0));
            let norms = self.last.iter().map(|l| f64::from(l.1));
            let found =
                above("the loss", loss, losses, factor).or(above("the gradient norm", norm, norms, factor));
            // A rise that lasts so long is no spike but the new level.
            if let Some(reason) = found.filter(|_| self.in_a_row + 1 < MOST_IN_A_ROW) {
                self.in_a_row += 1;
                return Verdict::Skip(reason);
            }
            if self.in_a_row + 1 >= MOST_IN_A_ROW {
                self.last.clear();
            }
            if self.last.len() == WINDOW {
                self.last.remove(0);
            }
            self.last.push((loss, norm));
        }
        self.in_a_row = 0;
        Verdict::Take
    }
}

/// Why `value` is a spike over these, if it is one.
fn above(
    what: &str,
    value: f32,
    last: impl ExactSizeIterator<Item = f64> + Clone,
    factor: f64,
) -> Option<String> {
    if last.len() < WINDOW / 2 {
        return None;
    }
    let n = last.len() as f64;
    let mean = last.clone().sum::<f64>() / n;
    let deviation = (last.map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
    let most = mean + factor * deviation;
    (f64::from(value) > most).then(|| format!("{what} is {value}, the steps before allow {most:.4}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::schedule::tests::recipe;

    #[test]
    fn infinities_stop_or_are_left_out_up_to_a_hundred_times() {
        let mut guard = Guard::default();
        assert_eq!(guard.judge(&recipe(), 1.0, 1.0), Verdict::Take);
        assert!(matches!(guard.judge(&recipe(), f32::NAN, 1.0), Verdict::Stop("the loss", _)));
        let skip = Train { on_nan: OnNan::Skip, ..recipe() };
        let mut guard = Guard::default();
        for _ in 1..MOST_IN_A_ROW {
            assert!(matches!(guard.judge(&skip, 1.0, f32::INFINITY), Verdict::Skip(_)));
        }
        assert!(matches!(guard.judge(&skip, 1.0, f32::INFINITY), Verdict::Stop("the gradient norm", _)));
        assert_eq!(guard.judge(&skip, 1.0, 1.0), Verdict::Take);
        assert_eq!(guard, Guard::default());
    }

    #[test]
    fn a_spike_is_left_out_and_a_new_level_is_not() {
        let train = Train { spike: Some(6.0), ..recipe() };
        let mut guard = Guard::default();
        let loss = |i: usize| 2.0 + 0.01 * (i % 10) as f32;
        for i in 0..WINDOW / 2 {
            assert_eq!(guard.judge(&train, if i == 3 { 2.2 } else { loss(i) }, 1.0), Verdict::Take);
        }
        let before = guard.clone();
        let Verdict::Skip(reason) = guard.judge(&train, 9.0, 1.0) else { panic!("a spike") };
        assert!(reason.contains("the loss is 9"), "{reason}");
        assert_eq!(guard.last, before.last);
        assert!(matches!(guard.judge(&train, 2.0, 1.01), Verdict::Skip(_)), "a norm that never varied");
        assert_eq!(guard.judge(&train, 2.0, 1.0), Verdict::Take);
        let judged: Vec<Verdict> = (0..MOST_IN_A_ROW).map(|_| guard.judge(&train, 9.0, 1.0)).collect();
        assert_eq!(judged.iter().filter(|v| **v == Verdict::Take).count(), 1);
        assert_eq!(guard.last, [(9.0, 1.0)]);
        for i in 0..10 * WINDOW {
            guard.judge(&train, loss(i), 1.0);
        }
        assert_eq!(guard.last.len(), WINDOW);
    }
}
