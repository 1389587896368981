//! Which experts are used at which depth: the paper's Figures 5 to 7 and what it reads off them.
//!
//! Experts of all sets of weights are numbered through: set by set in order of first use. With
//! `C[d][e]` the number of times expert `e` was chosen at depth `d`, `P(depth|expert)` is
//! `C[d][e] / Σ_d C[d][e]` and `P(expert|depth)` is `C[d][e] / Σ_e C[d][e]`; every token passes
//! every depth, so that neither needs another weight.

use super::Router;
use crate::statistics::{entropy, gini};
use dreamc_data::rng::Philox;
use serde::Serialize;

/// Share of an expert's choices that its depths are counted by.
const MOST: f64 = 0.9;

/// Points of a curve.
const POINTS: usize = 120;

/// The use of experts by depth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertUse {
    /// The component.
    pub component: String,
    /// Whether it chooses projections.
    pub projection: bool,
    /// Experts in all.
    pub experts: usize,
    /// Experts that each depth would have to itself if they were dealt out evenly: the layered
    /// baseline.
    pub layered: f64,
    /// Depths.
    pub depths: Vec<DepthUse>,
    /// How many experts were never chosen.
    pub dead: usize,
    /// Gini coefficient of the choices of all depths together.
    pub gini: f64,
    /// Entropy of the choices of all depths together, as a share of the most there can be.
    pub balance: f64,
    /// For each number of depths, from 1: how many experts have [`MOST`] of their choices in that
    /// number of depths.
    pub by_depths: Vec<usize>,
    /// Share of living experts that have [`MOST`] of their choices in one or two depths of the
    /// second half.
    pub late_specialists: f64,
    /// The same of the first half.
    pub early_specialists: f64,
    /// Share of living experts that need at least a fifth of the depths for [`MOST`] of their
    /// choices.
    pub generalists: f64,
    /// Living experts in the paper's order: by the number of depths they need, then by a depth
    /// sampled from their distributions.
    pub order: Vec<usize>,
    /// Share of choices and least share of experts that cover them, over all depths.
    pub lorenz: Vec<(f64, f64)>,
    /// Choices by depth and expert.
    pub counts: Vec<Vec<u64>>,
}

/// The use of experts at one depth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DepthUse {
    /// Depth, from 0.
    pub depth: u64,
    /// Experts chosen at least once.
    pub used: usize,
    /// Least number of experts that have [`MOST`] of the choices.
    pub most: usize,
    /// Exponential of the entropy of the choices: as many equally used experts are as diverse.
    pub effective: f64,
    /// Entropy of the choices over the most that the experts there allow.
    pub entropy: f64,
    /// Mean entropy of a token's scores over the most there can be.
    pub token_entropy: f64,
    /// Gini coefficient of the choices among the experts that can be chosen there.
    pub gini: f64,
    /// Share of choices and least share of all experts that cover them.
    pub lorenz: Vec<(f64, f64)>,
}

impl ExpertUse {
    /// Of what a router chose; `seed` samples the order.
    pub fn of(router: &Router, seed: u64) -> Self {
        let mut sets: Vec<(u64, usize)> = vec![];
        for d in &router.depths {
            if !sets.iter().any(|s| s.0 == d.set) {
                sets.push((d.set, d.counts.len()));
            }
        }
        let experts: usize = sets.iter().map(|s| s.1).sum();
        let first = |set: u64| sets.iter().take_while(|s| s.0 != set).map(|s| s.1).sum::<usize>();
        let mut counts = vec![vec![0; experts]; router.depths.len()];
        let mut depths = vec![];
        for (row, d) in counts.iter_mut().zip(&router.depths) {
            let from = first(d.set);
            row[from..from + d.counts.len()].copy_from_slice(&d.counts);
            let own: Vec<f64> = d.counts.iter().map(|c| *c as f64).collect();
            let most = (own.len() as f64).ln().max(f64::MIN_POSITIVE);
            depths.push(DepthUse {
                depth: d.depth,
                used: d.counts.iter().filter(|c| **c > 0).count(),
                most: covering(&d.counts),
                effective: entropy(&own).exp(),
                entropy: entropy(&own) / most,
                token_entropy: d.token_entropy / most,
                gini: gini(&own),
                lorenz: lorenz(row),
            });
        }
        let by_expert = |e: usize| counts.iter().map(|row| row[e]).collect::<Vec<u64>>();
        let all: Vec<u64> = (0..experts).map(|e| by_expert(e).iter().sum()).collect();
        let weights: Vec<f64> = all.iter().map(|c| *c as f64).collect();
        let mut by_depths = vec![0; router.depths.len()];
        let (mut late, mut early, mut general, mut living) = (0, 0, 0, 0);
        let mut keys = vec![];
        let half = router.depths.len() as f64 / 2.0;
        for e in (0..experts).filter(|e| all[*e] > 0) {
            let own = by_expert(e);
            let needed = covering(&own);
            living += 1;
            by_depths[needed - 1] += 1;
            let mut order: Vec<usize> = (0..own.len()).collect();
            order.sort_by_key(|d| std::cmp::Reverse(own[*d]));
            if needed <= 2 {
                late += usize::from(order[..needed].iter().all(|d| *d as f64 >= half));
                early += usize::from(order[..needed].iter().all(|d| (*d as f64) < half));
            }
            general += usize::from(needed as f64 >= 0.2 * own.len() as f64);
            keys.push((needed, sampled(&own, seed, e as u64), e));
        }
        keys.sort_unstable();
        let share = |n: usize| n as f64 / living.max(1) as f64;
        ExpertUse {
            component: router.component.clone(),
            projection: router.projection,
            experts,
            layered: experts as f64 / router.depths.len().max(1) as f64,
            depths,
            dead: experts - living,
            gini: gini(&weights),
            balance: entropy(&weights) / (experts as f64).ln().max(f64::MIN_POSITIVE),
            by_depths,
            late_specialists: share(late),
            early_specialists: share(early),
            generalists: share(general),
            order: keys.into_iter().map(|k| k.2).collect(),
            lorenz: lorenz(&all),
            counts,
        }
    }

    /// For each expert in order, the shares of depths in its choices (Figure 5).
    pub fn depths_of_experts(&self) -> Vec<Vec<f64>> {
        let column = |e: &usize| {
            let own: Vec<f64> = self.counts.iter().map(|row| row[*e] as f64).collect();
            let total: f64 = own.iter().sum();
            own.into_iter().map(|c| c / total.max(1.0)).collect()
        };
        self.order.iter().map(column).collect()
    }

    /// For each depth, the share of each expert in order among its choices (Figure 7).
    pub fn experts_of_depths(&self) -> Vec<Vec<f64>> {
        let row = |counts: &Vec<u64>| {
            let total: u64 = counts.iter().sum();
            self.order.iter().map(|e| counts[*e] as f64 / total.max(1) as f64).collect()
        };
        self.counts.iter().map(row).collect()
    }
}

/// Least number of entries that have [`MOST`] of the sum.
fn covering(counts: &[u64]) -> usize {
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let total: u64 = sorted.iter().sum();
    let mut sum = 0;
    let needed = sorted.iter().position(|c| {
        sum += c;
        sum as f64 >= MOST * total as f64
    });
    if total == 0 { 0 } else { needed.map_or(sorted.len(), |i| i + 1) }
}

/// An index drawn with these weights.
fn sampled(weights: &[u64], seed: u64, number: u64) -> usize {
    let total: u64 = weights.iter().sum();
    let mut left = Philox::new(seed, "analysis/order").stream(number).below(total.max(1));
    for (i, w) in weights.iter().enumerate() {
        if left < *w {
            return i;
        }
        left -= w;
    }
    0
}

/// Shares of choices, and the least shares of entries that cover them.
fn lorenz(counts: &[u64]) -> Vec<(f64, f64)> {
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let total: u64 = sorted.iter().sum();
    let mut curve = vec![];
    let mut sum = 0;
    let every = (sorted.len() / POINTS).max(1);
    for (i, c) in sorted.iter().enumerate().take_while(|(_, c)| **c > 0) {
        sum += c;
        if i % every == 0 || sum == total {
            curve.push((sum as f64 / total as f64, (i + 1) as f64 / sorted.len() as f64));
        }
    }
    curve
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Choices;

    fn router(sets: &[u64], counts: &[&[u64]]) -> Router {
        let depths = sets.iter().zip(counts).enumerate().map(|(i, (&set, counts))| Choices {
            depth: i as u64,
            set,
            counts: counts.to_vec(),
            token_entropy: 0.0,
        });
        Router { component: "ea".into(), projection: false, depths: depths.collect() }
    }

    #[test]
    fn shared_experts_are_counted_over_depths() {
        // Expert 0 at all depths alike, 1 at the last alone, 2 at the first two, 3 never.
        let found = ExpertUse::of(
            &router(&[0; 4], &[&[5, 0, 5, 0], &[5, 0, 5, 0], &[5, 0, 0, 0], &[5, 10, 0, 0]]),
            0,
        );
        assert_eq!((found.experts, found.dead, found.layered), (4, 1, 1.0));
        assert_eq!(found.by_depths, [1, 1, 0, 1]);
        assert_eq!(found.order, [1, 2, 0]);
        assert_eq!(found.depths.iter().map(|d| d.used).collect::<Vec<_>>(), [2, 2, 1, 2]);
        let third = 1.0 / 3.0;
        assert!(
            (found.late_specialists - third).abs() < 1e-12 && (found.early_specialists - third).abs() < 1e-12
        );
        assert_eq!(found.generalists, 1.0);
        assert_eq!(found.depths_of_experts()[1], [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(found.experts_of_depths()[2], [0.0, 0.0, 1.0]);
        assert_eq!(found.lorenz.last(), Some(&(1.0, 0.75)));
    }

    #[test]
    fn layers_have_experts_of_their_own() {
        let found = ExpertUse::of(&router(&[0, 1], &[&[3, 3], &[6, 0]]), 0);
        assert_eq!((found.experts, found.dead, found.layered), (4, 1, 2.0));
        assert_eq!(found.counts, [[3, 3, 0, 0], [0, 0, 6, 0]]);
        assert_eq!(found.by_depths, [3, 0]);
        assert_eq!((found.depths[0].gini, found.depths[1].gini), (0.0, 0.5));
        assert!((found.depths[0].entropy - 1.0).abs() < 1e-12 && found.depths[1].entropy == 0.0);
    }

    #[test]
    fn what_was_never_run_has_no_figures_that_are_none() {
        let found = ExpertUse::of(&router(&[0], &[&[0, 0]]), 0);
        assert_eq!((found.dead, found.gini, found.lorenz.len()), (2, 0.0, 0));
        assert!(found.order.is_empty() && !found.balance.is_nan());
    }
}
