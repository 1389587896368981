//! The laws, and their fit to the runs of one arm.
//!
//! | law | loss in nats a token |
//! |---|---|
//! | [`Law::Plain`] | `L = E + A·N^-α + B·D^-β` |
//! | [`Law::Loop`] | `L = E + A·(N_once + r^φ·N_loop)^-α + B·D^-β` |
//!
//! `N` counts parameters, `D` tokens, `r` passes of the loop. `φ` says what a pass is worth: 0, and
//! a pass adds nothing; 1, and it is worth as much as parameters of its own (2604.21106, equation
//! of the recurrence-equivalence exponent).

use crate::solve::{Minimum, cholesky, minimise, solve};
use crate::{FitError, Run};
use serde::Serialize;

/// Which formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Law {
    /// Parameters and tokens.
    Plain,
    /// Parameters outside and inside a loop, passes and tokens.
    Loop,
}

/// How a fit is made.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Options {
    /// Residuals of log loss beyond this count linearly; Hoffmann et al. take 1e-3. `None`: 1.345
    /// deviations of the residuals, estimated from their median, which keeps 95 % of the precision
    /// of least squares under normal noise (Huber, *Robust Statistics*, section 7.7).
    pub delta: Option<f64>,
    /// Resamples of each interval.
    pub resamples: usize,
    /// Seed of the resamples.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { delta: None, resamples: 1000, seed: 0 }
    }
}

/// A constant with its 95 % interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Constant {
    /// As in the formula.
    pub name: &'static str,
    /// The best value.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// A law fitted to runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The formula.
    pub law: Law,
    /// Its constants, then the exponents of the compute-optimal size and tokens where `C = k·N·D`.
    pub constants: Vec<Constant>,
    /// Log of the measured loss less log of the fitted one, a run each, in the order given.
    pub residuals: Vec<f64>,
    /// Residuals beyond this counted linearly.
    pub delta: f64,
    /// Resamples whose fit converged: the intervals rest on these.
    pub resamples: usize,
    /// Constants as the minimiser has them.
    #[serde(skip)]
    theta: Vec<f64>,
    /// Means of the logs that the constants are centred at.
    #[serde(skip)]
    centre: (f64, f64),
}

/// Positions in the minimiser's constants: logs of E and of the two terms at the centre, exponents.
const E: usize = 0;
const A: usize = 1;
const ALPHA: usize = 2;
const B: usize = 3;
const BETA: usize = 4;
const PHI: usize = 5;

impl Law {
    /// Name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Law::Plain => "L = E + A N^-alpha + B D^-beta",
            Law::Loop => "L = E + A (N_once + r^phi N_loop)^-alpha + B D^-beta",
        }
    }

    /// How many constants it has.
    pub fn constants(self) -> usize {
        match self {
            Law::Plain => 5,
            Law::Loop => 6,
        }
    }

    /// Log of the parameters that count, and its derivative with respect to `φ`.
    fn size(self, run: &Run, theta: &[f64]) -> (f64, f64) {
        match self {
            Law::Plain => ((run.params + run.loop_params).ln(), 0.0),
            Law::Loop => {
                let inside = run.passes.powf(theta[PHI]) * run.loop_params;
                let n = run.params + inside;
                (n.ln(), inside * run.passes.ln() / n)
            }
        }
    }

    /// Log of the loss, and its derivatives.
    fn log_loss(self, run: &Run, theta: &[f64], centre: (f64, f64), gradient: &mut [f64]) -> f64 {
        let (n, dn) = self.size(run, theta);
        let (n, d) = (n - centre.0, run.tokens.ln() - centre.1);
        let terms = [theta[E], theta[A] - theta[ALPHA] * n, theta[B] - theta[BETA] * d];
        let largest = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = terms.iter().map(|t| (t - largest).exp()).sum();
        let [e, a, b] = terms.map(|t| (t - largest).exp() / total);
        gradient[E] = e;
        gradient[A] = a;
        gradient[ALPHA] = -a * n;
        gradient[B] = b;
        gradient[BETA] = -b * d;
        if self == Law::Loop {
            gradient[PHI] = -a * theta[ALPHA] * dn;
        }
        largest + total.ln()
    }
}

impl Fit {
    /// A constant by its name.
    pub fn constant(&self, name: &str) -> Option<&Constant> {
        self.constants.iter().find(|c| c.name == name)
    }
}

/// Fits a law to the runs of one arm.
///
/// # Errors
/// [`FitError`] where the runs are too few, or too alike, for the constants of the law.
pub fn fit(law: Law, runs: &[&Run], options: &Options) -> Result<Fit, FitError> {
    determined(law, runs)?;
    let logs: Vec<f64> = runs.iter().map(|r| r.loss.ln()).collect();
    let mean = |f: &dyn Fn(&Run) -> f64| runs.iter().map(|r| f(r)).sum::<f64>() / runs.len() as f64;
    let centre = (mean(&|r| (r.params + r.loop_params).ln()), mean(&|r| r.tokens.ln()));
    let mut delta = options.delta.unwrap_or(DELTA);
    let mut best = from_grid(law, runs, &logs, centre, delta)?;
    if options.delta.is_none() {
        delta = (1.345 * deviation(law, runs, &logs, centre, &best.at)).max(DELTA);
        best = search(law, runs, &logs, centre, &best.at, delta).unwrap_or(best);
    }
    let mut gradient = vec![0.0; law.constants()];
    let fitted: Vec<f64> = runs.iter().map(|r| law.log_loss(r, &best.at, centre, &mut gradient)).collect();
    let residuals: Vec<f64> = logs.iter().zip(&fitted).map(|(l, f)| l - f).collect();
    let problem = Problem { law, runs, centre, delta };
    let samples = problem.resample(&fitted, &residuals, &best.at, options);
    let constants = constants(&problem, &best.at, &logs, &samples);
    if options.resamples > 0
        && let Some(c) = constants.iter().find(|c| loose(c))
    {
        return Err(FitError::Undetermined { law: law.name(), constant: c.name, value: c.value });
    }
    Ok(Fit { law, constants, residuals, delta, resamples: samples.len(), theta: best.at, centre })
}

/// Whether the runs leave a constant open: it or its interval is no number, losses grow with an
/// exponent, or a pass is worth what no pass can be.
fn loose(c: &Constant) -> bool {
    const PASS: f64 = 4.0;
    ![c.value, c.low, c.high].iter().all(|x| x.is_finite())
        || (matches!(c.name, "alpha" | "beta") && c.value <= 0.0)
        || (c.name == "phi" && c.value.abs() > PASS)
}

fn determined(law: Law, runs: &[&Run]) -> Result<(), FitError> {
    let (constants, needed) = (law.constants(), law.constants() + 2);
    if runs.len() < needed {
        return Err(FitError::TooFew { law: law.name(), constants, needed, found: runs.len() });
    }
    let different = |f: &dyn Fn(&Run) -> f64| {
        let mut values: Vec<u64> = runs.iter().map(|r| f(r).to_bits()).collect();
        values.sort_unstable();
        values.dedup();
        values.len()
    };
    let mut asked: Vec<(&'static str, usize, usize)> = vec![
        ("the number of parameters", different(&|r| r.params + r.loop_params), 3),
        ("the number of tokens", different(&|r| r.tokens), 3),
    ];
    if law == Law::Loop {
        let worth = |r: &Run| if r.loop_params > 0.0 { r.passes } else { 1.0 };
        asked.push(("the number of passes", different(&worth), 2));
    }
    match asked.into_iter().find(|(_, found, needed)| found < needed) {
        Some((variable, found, needed)) => Err(FitError::Constant { variable, found, needed }),
        None => Ok(()),
    }
}

/// The Huber threshold of Hoffmann et al.
pub(crate) const DELTA: f64 = 1e-3;

/// Standard deviation of the residuals of log loss, from their median size.
fn deviation(law: Law, runs: &[&Run], logs: &[f64], centre: (f64, f64), at: &[f64]) -> f64 {
    let mut gradient = vec![0.0; law.constants()];
    let mut sizes: Vec<f64> =
        runs.iter().zip(logs).map(|(r, l)| (law.log_loss(r, at, centre, &mut gradient) - l).abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let spent = law.constants() as f64 / runs.len() as f64;
    sizes[sizes.len() / 2] / 0.6745 / (1.0 - spent).sqrt()
}

/// The best of the minima reached from the starts that fit best.
fn from_grid(
    law: Law,
    runs: &[&Run],
    logs: &[f64],
    centre: (f64, f64),
    delta: f64,
) -> Result<Minimum, FitError> {
    const STARTS: usize = 12;
    let exponents = [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.1];
    let phis: &[f64] = if law == Law::Loop { &[0.0, 0.25, 0.5, 0.75, 1.0] } else { &[0.0] };
    let mut starts = vec![];
    for &alpha in &exponents {
        for &beta in &exponents {
            for &phi in phis {
                let mut theta = vec![0.0, 0.0, alpha, 0.0, beta];
                theta.extend((law == Law::Loop).then_some(phi));
                starts.extend(linear(law, runs, logs, centre, theta));
            }
        }
    }
    starts.sort_by(|x, y| x.loss.total_cmp(&y.loss));
    starts.truncate(STARTS);
    let minima = starts.iter().filter_map(|s| search(law, runs, logs, centre, &s.at, delta));
    let best = minima.min_by(|x, y| x.loss.total_cmp(&y.loss));
    best.ok_or(FitError::Diverged { law: law.name(), starts: starts.len() })
}

/// Least squares of the losses over E, A and B at fixed exponents, all of them kept above 0.
fn linear(law: Law, runs: &[&Run], logs: &[f64], centre: (f64, f64), mut theta: Vec<f64>) -> Option<Minimum> {
    let features: Vec<[f64; 3]> = runs
        .iter()
        .map(|r| {
            let (n, _) = law.size(r, &theta);
            let d = r.tokens.ln();
            [1.0, (-theta[ALPHA] * (n - centre.0)).exp(), (-theta[BETA] * (d - centre.1)).exp()]
        })
        .collect();
    let mut normal = [0.0; 9];
    let mut right = [0.0; 3];
    for (f, l) in features.iter().zip(logs) {
        for a in 0..3 {
            right[a] += f[a] * l.exp();
            for b in 0..3 {
                normal[3 * a + b] += f[a] * f[b];
            }
        }
    }
    for a in 0..3 {
        normal[4 * a] *= 1.0 + 1e-10;
    }
    cholesky(&mut normal, 3)?;
    let x = solve(&normal, &right);
    let least = 1e-3 * logs.iter().map(|l| l.exp()).fold(f64::INFINITY, f64::min);
    let x: Vec<f64> = x.iter().map(|x| x.max(least)).collect();
    let loss = features
        .iter()
        .zip(logs)
        .map(|(f, l)| ((f[0] * x[0] + f[1] * x[1] + f[2] * x[2]).ln() - l).powi(2))
        .sum();
    (theta[E], theta[A], theta[B]) = (x[0].ln(), x[1].ln(), x[2].ln());
    Some(Minimum { at: theta, loss })
}

fn search(
    law: Law,
    runs: &[&Run],
    logs: &[f64],
    centre: (f64, f64),
    start: &[f64],
    delta: f64,
) -> Option<Minimum> {
    let residual =
        |i: usize, at: &[f64], gradient: &mut [f64]| law.log_loss(runs[i], at, centre, gradient) - logs[i];
    minimise(start, runs.len(), delta, &residual)
}

/// A fit's data, formula and threshold.
struct Problem<'a> {
    law: Law,
    runs: &'a [&'a Run],
    centre: (f64, f64),
    delta: f64,
}

/// The quoted constants of one fit, on the scale of their intervals, with their standard errors.
type Quoted = Vec<(f64, f64)>;

impl Problem<'_> {
    /// Fits to fitted losses plus residuals drawn again, each divided by the root of the share that
    /// the fit leaves it (one less its leverage), which the fit had taken from it.
    fn resample(&self, fitted: &[f64], residuals: &[f64], best: &[f64], options: &Options) -> Vec<Quoted> {
        let mut random = fastrand::Rng::with_seed(options.seed);
        let left = self.shares_left(best);
        let whole: Vec<f64> = residuals.iter().zip(left).map(|(r, left)| r / left.sqrt()).collect();
        let mean = whole.iter().sum::<f64>() / self.runs.len() as f64;
        let pool: Vec<f64> = whole.iter().map(|r| r - mean).collect();
        (0..options.resamples)
            .filter_map(|_| {
                let logs: Vec<f64> = fitted.iter().map(|f| f + pool[random.usize(..pool.len())]).collect();
                let at = search(self.law, self.runs, &logs, self.centre, best, self.delta)?.at;
                self.quote(&at, &logs)
            })
            .collect()
    }

    /// Derivatives of every run's log loss, and the factored normal matrix; `None` where the
    /// constants cannot be separated.
    fn normal(&self, at: &[f64]) -> Option<(Vec<Vec<f64>>, Vec<f64>)> {
        let p = self.law.constants();
        let row = |r: &&Run| {
            let mut gradient = vec![0.0; p];
            self.law.log_loss(r, at, self.centre, &mut gradient);
            gradient
        };
        let rows: Vec<Vec<f64>> = self.runs.iter().map(row).collect();
        let mut normal = vec![0.0; p * p];
        for g in &rows {
            for a in 0..p {
                for b in 0..p {
                    normal[a * p + b] += g[a] * g[b];
                }
            }
        }
        for a in 0..p {
            normal[a * p + a] *= 1.0 + 1e-10;
        }
        cholesky(&mut normal, p)?;
        Some((rows, normal))
    }

    /// One less the leverage of each run: the share of a residual's variance that least squares
    /// leaves.
    fn shares_left(&self, at: &[f64]) -> Vec<f64> {
        let Some((rows, normal)) = self.normal(at) else {
            return vec![1.0 - self.law.constants() as f64 / self.runs.len() as f64; self.runs.len()];
        };
        let leverage = |g: &Vec<f64>| solve(&normal, g).iter().zip(g).map(|(x, g)| x * g).sum::<f64>();
        rows.iter().map(|g| (1.0 - leverage(g)).max(0.05)).collect()
    }

    /// The quoted constants with their standard errors by the delta method.
    fn quote(&self, at: &[f64], logs: &[f64]) -> Option<Quoted> {
        let p = self.law.constants();
        let (_, normal) = self.normal(at)?;
        let mut gradient = vec![0.0; p];
        let squares: f64 = self
            .runs
            .iter()
            .zip(logs)
            .map(|(r, l)| (self.law.log_loss(r, at, self.centre, &mut gradient) - l).powi(2))
            .sum();
        let variance = squares / (self.runs.len() - p) as f64;
        let values = |at: &[f64]| -> Vec<f64> {
            quoted(self.law, at, self.centre).into_iter().map(|(_, scale, v)| scale.to(v)).collect()
        };
        let here = values(at);
        let steps: Vec<Vec<f64>> = (0..p)
            .map(|i| {
                let mut moved = at.to_vec();
                moved[i] += 1e-6;
                values(&moved).iter().zip(&here).map(|(m, h)| (m - h) / 1e-6).collect()
            })
            .collect();
        let error = |k: usize| {
            let g: Vec<f64> = steps.iter().map(|s| s[k]).collect();
            (variance * solve(&normal, &g).iter().zip(&g).map(|(x, g)| x * g).sum::<f64>()).sqrt()
        };
        Some(here.iter().enumerate().map(|(k, v)| (*v, error(k))).collect())
    }
}

/// The scale on which a constant's interval is made.
#[derive(Clone, Copy)]
enum Scale {
    Plain,
    Log,
}

impl Scale {
    fn to(self, v: f64) -> f64 {
        match self {
            Scale::Plain => v,
            Scale::Log => v.ln(),
        }
    }

    fn from(self, v: f64) -> f64 {
        match self {
            Scale::Plain => v,
            Scale::Log => v.exp(),
        }
    }
}

/// Values of the constants that people quote.
fn quoted(law: Law, theta: &[f64], centre: (f64, f64)) -> Vec<(&'static str, Scale, f64)> {
    use Scale::{Log, Plain};
    let (alpha, beta) = (theta[ALPHA], theta[BETA]);
    let mut all = vec![
        ("E", Log, theta[E].exp()),
        ("A", Log, (theta[A] + alpha * centre.0).exp()),
        ("alpha", Plain, alpha),
        ("B", Log, (theta[B] + beta * centre.1).exp()),
        ("beta", Plain, beta),
    ];
    if law == Law::Loop {
        all.push(("phi", Plain, theta[PHI]));
    }
    // Minimising L at C = k·N·D gives N ∝ C^(β/(α+β)) and D ∝ C^(α/(α+β)).
    all.push(("size_exponent", Plain, beta / (alpha + beta)));
    all.push(("token_exponent", Plain, alpha / (alpha + beta)));
    all
}

fn constants(problem: &Problem, best: &[f64], logs: &[f64], samples: &[Quoted]) -> Vec<Constant> {
    let errors = problem.quote(best, logs);
    quoted(problem.law, best, problem.centre)
        .into_iter()
        .enumerate()
        .map(|(i, (name, scale, value))| {
            let (low, high) = errors
                .as_ref()
                .map_or((f64::NAN, f64::NAN), |errors| studentised(errors[i], samples.iter().map(|s| s[i])));
            Constant { name, value, low: scale.from(low), high: scale.from(high) }
        })
        .collect()
}

/// The 95 % interval of an estimate with a standard error, from resamples with theirs (bootstrap-t:
/// Efron and Tibshirani, *An Introduction to the Bootstrap*, section 12.5). Not a number where
/// there are no resamples.
fn studentised((value, error): (f64, f64), samples: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    let t = samples.map(|(v, e)| (v - value) / e).collect();
    let (low, high) = middle(t);
    (value - high * error, value - low * error)
}

/// The middle 95 % of samples; not a number where there are none.
fn middle(mut samples: Vec<f64>) -> (f64, f64) {
    samples.retain(|s| s.is_finite());
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| match samples.len() {
        0 => f64::NAN,
        n => {
            let x = share * (n - 1) as f64;
            let (i, f) = (x.floor() as usize, x.fract());
            samples[i] * (1.0 - f) + samples[(i + 1).min(n - 1)] * f
        }
    };
    (at(0.025), at(0.975))
}

/// The 95 % interval of an estimate from its resamples, corrected for their bias: where half of the
/// resamples are not below the estimate, both ends move by that much (Efron, *Better Bootstrap
/// Confidence Intervals*, 1987, section 2). Not a number where there are none.
pub(crate) fn interval(estimate: f64, mut samples: Vec<f64>) -> (f64, f64) {
    samples.retain(|s| s.is_finite());
    if samples.is_empty() {
        return (f64::NAN, f64::NAN);
    }
    samples.sort_by(f64::total_cmp);
    let n = samples.len() as f64;
    let below = samples.iter().filter(|s| **s < estimate).count() as f64;
    let bias = normal_quantile((below / n).clamp(0.5 / n, 1.0 - 0.5 / n));
    let at = |z: f64| {
        let x = normal_share(2.0 * bias + z) * (n - 1.0);
        let (i, f) = (x.floor() as usize, x.fract());
        samples[i] * (1.0 - f) + samples[(i + 1).min(samples.len() - 1)] * f
    };
    (at(-1.959_964), at(1.959_964))
}

/// The normal distribution function (Abramowitz and Stegun, 26.2.17; error below 7.5e-8).
fn normal_share(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let terms = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = terms.iter().rev().fold(0.0, |sum, c| (sum + c) * t);
    let tail = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt() * sum;
    if z < 0.0 { tail } else { 1.0 - tail }
}

/// Its inverse, by bisection: the function is monotone.
fn normal_quantile(share: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if normal_share(middle) < share { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution_is_that_of_tables() {
        for (z, share) in [(0.0, 0.5), (1.0, 0.841_344_7), (-1.959_964, 0.025), (2.575_829, 0.995)] {
            assert!((normal_share(z) - share).abs() < 1e-6);
            assert!((normal_quantile(share) - z).abs() < 1e-5);
        }
    }

    #[test]
    fn resamples_around_the_estimate_give_their_middle() {
        let samples: Vec<f64> = (0..=1000).map(|i| f64::from(i) / 1000.0).collect();
        let (low, high) = interval(0.5, samples);
        assert!((low - 0.025).abs() < 2e-3 && (high - 0.975).abs() < 2e-3);
    }
}
