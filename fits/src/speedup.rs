//! Effective speedup: the compute that a baseline needs for another arm's loss.

use crate::iso::Frontier;
use serde::Serialize;

/// The worth of an arm at one budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Speedup {
    /// FLOPs of the arm.
    pub flops: f64,
    /// Loss of the arm at its optimum there, in nats a token.
    pub loss: f64,
    /// FLOPs of the baseline for that loss over FLOPs of the arm; `None` below the baseline's
    /// irreducible loss.
    pub factor: Option<f64>,
    /// Its 95 % interval; infinite where the loss may be beyond the baseline.
    pub interval: Option<(f64, f64)>,
    /// Whether the baseline's FLOPs stand beyond its own budgets.
    pub extrapolated: bool,
}

/// The speedup of `arm` over `baseline` at each of the arm's budgets.
pub fn speedup(baseline: &Frontier, arm: &Frontier) -> Vec<Speedup> {
    let trained = |c: f64| {
        let (first, last) = (baseline.optima.first(), baseline.optima.last());
        first.is_some_and(|o| c >= o.flops) && last.is_some_and(|o| c <= o.flops)
    };
    arm.optima
        .iter()
        .enumerate()
        .map(|(i, o)| {
            let needed = baseline.flops(o.loss);
            Speedup {
                flops: o.flops,
                loss: o.loss,
                factor: needed.map(|c| c / o.flops),
                interval: baseline.flops_of(arm, i).map(|(low, high)| (low / o.flops, high / o.flops)),
                extrapolated: !needed.is_some_and(trained),
            }
        })
        .collect()
}
