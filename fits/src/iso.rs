//! The optimum of each budget, and loss against compute.
//!
//! *In*: runs of one arm at a few budgets (runs whose FLOPs agree within a tolerance), several
//! sizes each. *Out*: for each budget the size and the loss at the vertex of a parabola in the log
//! of the parameters, and over the budgets `L(C) = E + K·C^-γ` and `N*(C) ∝ C^a`. *Promise*: a
//! vertex outside the sizes that were trained is marked, since a parabola says nothing there
//! (2603.22339 measures the bias).

use crate::law::{Constant, DELTA, Options, interval};
use crate::solve::{cholesky, minimise, solve};
use crate::{FitError, Run};
use serde::Serialize;

/// The optimum at one budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Optimum {
    /// Mean FLOPs of its runs.
    pub flops: f64,
    /// Parameters at the vertex.
    pub params: f64,
    /// Loss at the vertex, in nats a token.
    pub loss: f64,
    /// Different sizes that were trained.
    pub sizes: usize,
    /// Whether the vertex is a minimum inside the sizes that were trained.
    pub inside: bool,
}

/// Loss against compute.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Frontier {
    /// The optimum at each budget, least compute first.
    pub optima: Vec<Optimum>,
    /// `E`, `K`, `gamma`, and `size_exponent` of `N*(C)`.
    pub constants: Vec<Constant>,
    /// Resamples whose fit converged.
    pub resamples: usize,
    #[serde(skip)]
    theta: [f64; 3],
    #[serde(skip)]
    centre: f64,
    #[serde(skip)]
    parabolas: Vec<Parabola>,
    #[serde(skip)]
    drawn: Vec<Drawn>,
}

/// A resample: its law, and the loss at the optimum of each budget.
#[derive(Clone, Debug, PartialEq)]
struct Drawn {
    theta: [f64; 3],
    losses: Vec<f64>,
}

impl Frontier {
    /// Loss at `flops`, in nats a token.
    pub fn loss(&self, flops: f64) -> f64 {
        self.by(self.theta, flops)
    }

    fn by(&self, [e, k, gamma]: [f64; 3], flops: f64) -> f64 {
        e.exp() + (k - gamma * (flops.ln() - self.centre)).exp()
    }

    /// The 95 % interval of the loss at `flops`, in nats a token; not a number without resamples.
    pub fn band(&self, flops: f64) -> (f64, f64) {
        interval(self.loss(flops), self.drawn.iter().map(|d| self.by(d.theta, flops)).collect())
    }

    /// Loss at a size by the parabola of the budget of this number, in nats a token.
    pub fn at(&self, budget: usize, params: f64) -> Option<f64> {
        self.parabolas.get(budget).map(|p| p.loss(params.ln()))
    }

    /// FLOPs at which the loss is reached; `None` below the irreducible loss.
    pub fn flops(&self, loss: f64) -> Option<f64> {
        self.needed(self.theta, loss)
    }

    fn needed(&self, [e, k, gamma]: [f64; 3], loss: f64) -> Option<f64> {
        let left = loss - e.exp();
        (left > 0.0).then(|| (self.centre + (k - left.ln()) / gamma).exp())
    }

    /// The 95 % interval of the FLOPs at which the optimum of another arm's budget is reached:
    /// resamples of both laws, pair by pair. Without end where too many of them are below the
    /// irreducible loss; `None` without resamples.
    pub(crate) fn flops_of(&self, arm: &Frontier, budget: usize) -> Option<(f64, f64)> {
        let estimate = self.flops(arm.optima.get(budget)?.loss).unwrap_or(f64::MAX);
        let of = |(own, other): (&Drawn, &Drawn)| {
            Some(self.needed(own.theta, *other.losses.get(budget)?).unwrap_or(f64::MAX))
        };
        let samples: Vec<f64> = self.drawn.iter().zip(&arm.drawn).filter_map(of).collect();
        let (low, high) = interval(estimate, samples);
        let open = |x: f64| if x > f64::MAX / 1e6 { f64::INFINITY } else { x };
        (!low.is_nan()).then(|| (open(low), open(high)))
    }
}

/// Runs are of one budget where their FLOPs differ by no more than this share.
pub const SAME_BUDGET: f64 = 0.05;

/// Groups runs by budget and fits the optimum of each, then loss against compute.
///
/// # Errors
/// [`FitError`] where there are fewer than four budgets with three sizes each.
pub fn frontier(runs: &[&Run], options: &Options) -> Result<Frontier, FitError> {
    const NEEDED: usize = 4;
    let budgets: Vec<Vec<&Run>> = budgets(runs).into_iter().filter(|b| sizes(b) >= 3).collect();
    if budgets.len() < NEEDED {
        return Err(FitError::TooFew {
            law: "L = E + K C^-gamma over the optima of budgets with three sizes",
            constants: 3,
            needed: NEEDED,
            found: budgets.len(),
        });
    }
    let parabolas: Vec<Parabola> = budgets.iter().filter_map(|b| Parabola::fit(b, &losses(b))).collect();
    let optima: Vec<Optimum> = budgets.iter().zip(&parabolas).map(|(b, p)| p.optimum(b)).collect();
    let delta = options.delta.unwrap_or(DELTA);
    let centre = optima.iter().map(|o| o.flops.ln()).sum::<f64>() / optima.len() as f64;
    let theta = power(&optima, centre, delta, None)
        .ok_or(FitError::Diverged { law: "L = E + K C^-gamma", starts: 1 })?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let (mut samples, mut kept) = (vec![], vec![]);
    for _ in 0..options.resamples {
        let drawn: Vec<Optimum> = budgets
            .iter()
            .zip(&parabolas)
            .filter_map(|(b, p)| {
                let fitted: Vec<f64> = b.iter().map(|r| p.at(r)).collect();
                let spread = (b.len() as f64 / (b.len() as f64 - 3.0).max(1.0)).sqrt();
                let pool: Vec<f64> = b.iter().zip(&fitted).map(|(r, f)| (r.loss - f) * spread).collect();
                let losses: Vec<f64> = fitted.iter().map(|f| f + pool[random.usize(..pool.len())]).collect();
                Parabola::fit(b, &losses).map(|p| p.optimum(b))
            })
            .collect();
        if drawn.len() == budgets.len()
            && let Some(theta) = power(&drawn, centre, delta, Some(theta))
        {
            samples.push(quoted(&drawn, theta, centre));
            kept.push(Drawn { theta, losses: drawn.iter().map(|o| o.loss).collect() });
        }
    }
    let constants = quoted(&optima, theta, centre)
        .into_iter()
        .enumerate()
        .map(|(i, (name, value))| {
            let (low, high) = interval(value, samples.iter().map(|s| s[i].1).collect());
            Constant { name, value, low, high }
        })
        .collect();
    Ok(Frontier { optima, constants, resamples: samples.len(), theta, centre, parabolas, drawn: kept })
}

fn losses(runs: &[&Run]) -> Vec<f64> {
    runs.iter().map(|r| r.loss).collect()
}

fn params(run: &Run) -> f64 {
    run.params + run.loop_params
}

fn sizes(runs: &[&Run]) -> usize {
    let mut all: Vec<u64> = runs.iter().map(|r| params(r).to_bits()).collect();
    all.sort_unstable();
    all.dedup();
    all.len()
}

/// Runs of equal budgets, least compute first.
pub fn budgets<'r>(runs: &[&'r Run]) -> Vec<Vec<&'r Run>> {
    let mut order: Vec<&Run> = runs.to_vec();
    order.sort_by(|a, b| a.flops.total_cmp(&b.flops));
    let mut groups: Vec<Vec<&Run>> = vec![];
    for run in order {
        match groups.last_mut() {
            Some(group) if run.flops <= group[0].flops * (1.0 + SAME_BUDGET) => group.push(run),
            _ => groups.push(vec![run]),
        }
    }
    groups
}

/// `loss = c0 + c1·x + c2·x²`, `x` the log of the parameters less its mean.
#[derive(Clone, Debug, PartialEq)]
struct Parabola {
    c: [f64; 3],
    mean: f64,
}

impl Parabola {
    fn fit(runs: &[&Run], losses: &[f64]) -> Option<Parabola> {
        let mean = runs.iter().map(|r| params(r).ln()).sum::<f64>() / runs.len() as f64;
        let mut normal = [0.0; 9];
        let mut right = [0.0; 3];
        for (r, l) in runs.iter().zip(losses) {
            let x = params(r).ln() - mean;
            let f = [1.0, x, x * x];
            for a in 0..3 {
                right[a] += f[a] * l;
                for b in 0..3 {
                    normal[3 * a + b] += f[a] * f[b];
                }
            }
        }
        cholesky(&mut normal, 3)?;
        let c = solve(&normal, &right);
        Some(Parabola { c: [c[0], c[1], c[2]], mean })
    }

    fn at(&self, run: &Run) -> f64 {
        self.loss(params(run).ln())
    }

    /// At a log of the parameters.
    fn loss(&self, log: f64) -> f64 {
        let x = log - self.mean;
        self.c[0] + x * (self.c[1] + x * self.c[2])
    }

    /// The vertex; where it is no minimum inside the sizes, the size that the parabola likes best.
    fn optimum(&self, runs: &[&Run]) -> Optimum {
        let xs = runs.iter().map(|r| params(r).ln() - self.mean);
        let (least, most) = xs.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), x| (l.min(x), m.max(x)));
        let vertex = -self.c[1] / (2.0 * self.c[2]);
        let inside = self.c[2] > 0.0 && vertex > least && vertex < most;
        let value = |x: f64| self.c[0] + x * (self.c[1] + x * self.c[2]);
        let x = match inside {
            true => vertex,
            false if value(least) < value(most) => least,
            false => most,
        };
        Optimum {
            flops: runs.iter().map(|r| r.flops).sum::<f64>() / runs.len() as f64,
            params: (x + self.mean).exp(),
            loss: value(x),
            sizes: sizes(runs),
            inside,
        }
    }
}

/// Logs of E and of K at the centre, and γ.
fn power(optima: &[Optimum], centre: f64, delta: f64, from: Option<[f64; 3]>) -> Option<[f64; 3]> {
    let least = optima.iter().map(|o| o.loss).fold(f64::INFINITY, f64::min);
    if least.is_nan() || least <= 0.0 {
        return None;
    }
    let residual = |i: usize, at: &[f64], gradient: &mut [f64]| {
        let c = optima[i].flops.ln() - centre;
        let (e, k) = (at[0].exp(), (at[1] - at[2] * c).exp());
        gradient[0] = e / (e + k);
        gradient[1] = k / (e + k);
        gradient[2] = -c * k / (e + k);
        (e + k).ln() - optima[i].loss.ln()
    };
    let starts: Vec<[f64; 3]> = match from {
        Some(start) => vec![start],
        None => [0.3, 0.6, 0.8, 0.95]
            .iter()
            .flat_map(|share| [0.02, 0.05, 0.1, 0.2, 0.4].map(|g| (share, g)))
            .map(|(share, g)| [(least * share).ln(), (least * (1.0 - share)).ln(), g])
            .collect(),
    };
    let minima = starts.iter().filter_map(|s| minimise(s, optima.len(), delta, &residual));
    let best = minima.min_by(|x, y| x.loss.total_cmp(&y.loss))?;
    Some([best.at[0], best.at[1], best.at[2]])
}

fn quoted(optima: &[Optimum], theta: [f64; 3], centre: f64) -> [(&'static str, f64); 4] {
    let n = optima.len() as f64;
    let mean = |f: &dyn Fn(&Optimum) -> f64| optima.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(&|o| o.flops.ln()), mean(&|o| o.params.ln()));
    let covariance = mean(&|o| (o.flops.ln() - x) * (o.params.ln() - y));
    let variance = mean(&|o| (o.flops.ln() - x).powi(2));
    [
        ("E", theta[0].exp()),
        ("K", (theta[1] + theta[2] * centre).exp()),
        ("gamma", theta[2]),
        ("size_exponent", covariance / variance),
    ]
}
