//! Statistics of comparisons: summaries, tests of hypotheses, concentration, a linear probe.
//!
//! *In*: slices of numbers. *Out*: statistics with their degrees of freedom, p-values and effect
//! sizes. *Promise*: all p-values are two-sided; `None` where the numbers do not determine a test
//! (too few, or without variation), never a made-up value. Values agree with SciPy's and
//! scikit-learn's to the digits that the tests below state.

use serde::Serialize;

/// A sample in brief.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// How many numbers.
    pub n: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation of the population the sample is from (division by `n - 1`); `None` for
    /// one number.
    pub deviation: Option<f64>,
}

impl Summary {
    /// Of these numbers; `None` where there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let n = values.len();
        let mean = mean(values)?;
        Some(Summary { n, mean, deviation: variance(values).map(f64::sqrt) })
    }
}

/// Arithmetic mean; `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Variance with division by `n - 1`; `None` of fewer than two numbers.
pub fn variance(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    let squares: f64 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
    (values.len() > 1).then(|| squares / (values.len() - 1) as f64)
}

/// A t-test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TTest {
    /// Mean of the first sample less that of the second.
    pub difference: f64,
    /// The statistic.
    pub t: f64,
    /// Degrees of freedom.
    pub df: f64,
    /// Two-sided p-value.
    pub p: f64,
    /// The interval that covers the difference of means with 95 % confidence.
    pub interval: (f64, f64),
    /// Cohen's d: for pairs the mean difference over the deviation of the differences, else over
    /// the pooled deviation.
    pub d: f64,
}

/// Two samples whose entries belong together, such as two models trained with the same seeds.
pub fn paired(a: &[f64], b: &[f64]) -> Option<TTest> {
    if a.len() != b.len() {
        return None;
    }
    let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    let (difference, deviation) = (mean(&differences)?, variance(&differences)?.sqrt());
    let n = differences.len() as f64;
    t_test(difference, deviation / n.sqrt(), n - 1.0, deviation)
}

/// The difference of means that a paired test over `n` seeds finds four times in five, where runs
/// deviate by `deviation` and the 5 % of false alarms are shared by `tests` tests: a bound, since
/// pairs may deviate by less. `None` below two seeds.
pub fn detectable(deviation: f64, n: usize, tests: usize) -> Option<f64> {
    if n < 2 || tests == 0 {
        return None;
    }
    let df = n as f64 - 1.0;
    let quantiles = student_quantile(1.0 - 0.025 / tests as f64, df) + student_quantile(0.8, df);
    Some(quantiles * deviation * (2.0 / n as f64).sqrt())
}

/// Two independent samples of unequal variances (Welch).
pub fn welch(a: &[f64], b: &[f64]) -> Option<TTest> {
    let (n, m) = (a.len() as f64, b.len() as f64);
    let (va, vb) = (variance(a)?, variance(b)?);
    let (ea, eb) = (va / n, vb / m);
    let df = (ea + eb).powi(2) / (ea * ea / (n - 1.0) + eb * eb / (m - 1.0));
    let pooled = (((n - 1.0) * va + (m - 1.0) * vb) / (n + m - 2.0)).sqrt();
    t_test(mean(a)? - mean(b)?, (ea + eb).sqrt(), df, pooled)
}

fn t_test(difference: f64, error: f64, df: f64, deviation: f64) -> Option<TTest> {
    // Equal differences have a deviation of rounding alone.
    if !(error.is_finite() && error > f64::EPSILON * difference.abs()) {
        return None;
    }
    let t = difference / error;
    let half = student_quantile(0.975, df) * error;
    Some(TTest {
        difference,
        t,
        df,
        p: student_two_sided(t, df),
        interval: (difference - half, difference + half),
        d: difference / deviation,
    })
}

/// A correlation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Correlation {
    /// The coefficient.
    pub r: f64,
    /// Two-sided p-value of no correlation, by Student's t.
    pub p: f64,
    /// Pairs.
    pub n: usize,
}

/// Pearson's linear correlation.
pub fn pearson(x: &[f64], y: &[f64]) -> Option<Correlation> {
    if x.len() != y.len() || x.len() < 3 {
        return None;
    }
    let (mx, my) = (mean(x)?, mean(y)?);
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in x.iter().zip(y) {
        let (x, y) = (x - mx, y - my);
        xx += x * x;
        yy += y * y;
        xy += x * y;
    }
    if !(xx > 0.0 && yy > 0.0) {
        return None;
    }
    let r = (xy / (xx * yy).sqrt()).clamp(-1.0, 1.0);
    let df = (x.len() - 2) as f64;
    let p = if r.abs() == 1.0 { 0.0 } else { student_two_sided(r * (df / (1.0 - r * r)).sqrt(), df) };
    Some(Correlation { r, p, n: x.len() })
}

/// Spearman's correlation of ranks; equal numbers share the mean of their ranks.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<Correlation> {
    pearson(&ranks(x), &ranks(y))
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    while from < order.len() {
        let same = order[from..].iter().take_while(|&&i| values[i] == values[order[from]]).count();
        let rank = from as f64 + (same as f64 + 1.0) / 2.0;
        order[from..from + same].iter().for_each(|&i| ranks[i] = rank);
        from += same;
    }
    ranks
}

/// The exact binomial test: how likely a count at most as likely as `successes` is, where each of
/// `trials` succeeds with `chance`. `None` where the numbers describe no such experiment.
pub fn binomial(successes: u64, trials: u64, chance: f64) -> Option<f64> {
    if successes > trials || !(0.0..=1.0).contains(&chance) {
        return None;
    }
    if chance == 0.0 || chance == 1.0 {
        let certain = if chance == 0.0 { 0 } else { trials };
        return Some(if successes == certain { 1.0 } else { 0.0 });
    }
    let (n, ln_p, ln_q) = (trials as f64, chance.ln(), (-chance).ln_1p());
    let all = ln_gamma(n + 1.0);
    let likely = |k: u64| {
        let k = k as f64;
        all - ln_gamma(k + 1.0) - ln_gamma(n - k + 1.0) + k * ln_p + (n - k) * ln_q
    };
    // Outcomes as likely as the one found may differ from it by rounding.
    let most = likely(successes) + 1e-7;
    let sum: f64 = (0..=trials).map(likely).filter(|&l| l <= most).map(f64::exp).sum();
    Some(sum.min(1.0))
}

/// A p-value when `tests` tests were made (Bonferroni).
pub fn bonferroni(p: f64, tests: usize) -> f64 {
    (p * tests as f64).min(1.0)
}

/// Two-sided p-value of Student's t.
pub fn student_two_sided(t: f64, df: f64) -> f64 {
    if t.is_infinite() {
        return 0.0;
    }
    incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
}

/// The value that Student's t stays below with probability `p >= 0.5`.
pub fn student_quantile(p: f64, df: f64) -> f64 {
    let above = |t: f64| student_two_sided(t, df) / 2.0 > 1.0 - p;
    let mut high = 1.0;
    while above(high) && high < 1e300 {
        high *= 2.0;
    }
    let mut low = 0.0;
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if above(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

/// `ln Γ(x)` for `x > 0` (Lanczos, g = 7).
fn ln_gamma(x: f64) -> f64 {
    const C: [f64; 9] = [
        0.999_999_999_999_809_9,
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    if x < 0.5 {
        let pi = std::f64::consts::PI;
        return (pi / (pi * x).sin()).ln() - ln_gamma(1.0 - x);
    }
    let x = x - 1.0;
    let sum = C[1..].iter().enumerate().fold(C[0], |sum, (i, c)| sum + c / (x + i as f64 + 1.0));
    let t = x + 7.5;
    0.5 * (2.0 * std::f64::consts::PI).ln() + (x + 0.5) * t.ln() - t + sum.ln()
}

/// The regularised incomplete beta function, by its continued fraction (Lentz).
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return if x <= 0.0 { 0.0 } else { 1.0 };
    }
    // The fraction converges fast on this side of the mean.
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (-x).ln_1p()).exp() / a;
    let tiny = 1e-300;
    let bounded = |v: f64| if v.abs() < tiny { tiny } else { v };
    let (mut c, mut d) = (1.0, 1.0 / bounded(1.0 - (a + b) * x / (a + 1.0)));
    let mut fraction = d;
    for m in 1..10_000 {
        let m = m as f64;
        for numerator in [
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        ] {
            d = 1.0 / bounded(1.0 + numerator * d);
            c = bounded(1.0 + numerator / c);
            fraction *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-16 {
            break;
        }
    }
    front * fraction
}

/// The Gini coefficient of non-negative numbers: 0 where all are equal, `1 - 1/n` where one has
/// everything; 0 of nothing.
pub fn gini(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, total) = (sorted.len() as f64, sorted.iter().sum::<f64>());
    if total <= 0.0 {
        return 0.0;
    }
    let weighted: f64 = sorted.iter().enumerate().map(|(i, x)| (i as f64 + 1.0) * x).sum();
    2.0 * weighted / (n * total) - (n + 1.0) / n
}

/// Shannon entropy in nats of counts or shares.
pub fn entropy(weights: &[f64]) -> f64 {
    let total: f64 = weights.iter().sum();
    let shares = weights.iter().map(|w| w / total).filter(|p| *p > 0.0);
    if total > 0.0 { shares.map(|p| -p * p.ln()).sum::<f64>().max(0.0) } else { 0.0 }
}

/// A logistic regression: `P(yes) = sigmoid(weights · x + intercept)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Logistic {
    /// One for each feature.
    pub weights: Vec<f64>,
    /// Not penalised.
    pub intercept: f64,
}

impl Logistic {
    /// Minimises `Σ log-loss + ‖weights‖²/2` by Newton's method. `features` are rows of `width`
    /// numbers. `None` where there are no rows, only one class, or a NaN or an infinity among the
    /// features.
    pub fn fit(features: &[f64], width: usize, labels: &[bool]) -> Option<Self> {
        let n = labels.len();
        let yes = labels.iter().filter(|l| **l).count();
        if n == 0 || yes == 0 || yes == n || features.len() != n * width {
            return None;
        }
        let size = width + 1;
        let mut model = Logistic { weights: vec![0.0; width], intercept: 0.0 };
        let mut objective = model.objective(features, labels);
        for _ in 0..100 {
            let mut gradient = vec![0.0; size];
            let mut hessian = vec![0.0; size * size];
            for (row, &label) in features.chunks_exact(width.max(1)).zip(labels) {
                let p = model.probability(row);
                let (error, weight) = (p - f64::from(label), p * (1.0 - p));
                let entry = |i: usize| if i == width { 1.0 } else { row[i] };
                for i in 0..size {
                    gradient[i] += error * entry(i);
                    let scaled = weight * entry(i);
                    for j in 0..=i {
                        hessian[i * size + j] += scaled * entry(j);
                    }
                }
            }
            for i in 0..width {
                gradient[i] += model.weights[i];
                hessian[i * size + i] += 1.0;
            }
            hessian[size * size - 1] += 1e-12;
            let step = solve(hessian, size, &gradient)?;
            // Newton's step is halved until it helps.
            let mut share = 1.0;
            let mut better = None;
            while share > 1e-10 && better.is_none() {
                let weights = model.weights.iter().zip(&step).map(|(w, s)| w - share * s).collect();
                let next = Logistic { weights, intercept: model.intercept - share * step[width] };
                let value = next.objective(features, labels);
                better = (value < objective).then_some((next, value));
                share /= 2.0;
            }
            let Some((next, value)) = better else { break };
            let done = objective - value < 1e-13 * objective.abs();
            (model, objective) = (next, value);
            if done {
                break;
            }
        }
        objective.is_finite().then_some(model)
    }

    /// Probability of yes.
    pub fn probability(&self, row: &[f64]) -> f64 {
        1.0 / (1.0 + (-self.logit(row)).exp())
    }

    fn logit(&self, row: &[f64]) -> f64 {
        self.intercept + self.weights.iter().zip(row).map(|(w, x)| w * x).sum::<f64>()
    }

    fn objective(&self, features: &[f64], labels: &[bool]) -> f64 {
        let rows = features.chunks_exact(self.weights.len().max(1)).zip(labels);
        let loss: f64 = rows
            .map(|(row, &label)| {
                let z = if label { -self.logit(row) } else { self.logit(row) };
                z.max(0.0) + (-z.abs()).exp().ln_1p()
            })
            .sum();
        loss + 0.5 * self.weights.iter().map(|w| w * w).sum::<f64>()
    }
}

/// Solves `a · x = b` for a positive definite `a`, given by its lower half (Cholesky).
fn solve(mut a: Vec<f64>, n: usize, b: &[f64]) -> Option<Vec<f64>> {
    for i in 0..n {
        for j in 0..=i {
            let (upper, lower) = a.split_at(i * n);
            let row = if j == i { &lower[..j] } else { &upper[j * n..j * n + j] };
            let sum: f64 = lower[..j].iter().zip(row).map(|(x, y)| x * y).sum();
            let value = a[i * n + j] - sum;
            a[i * n + j] = if i == j {
                if value.is_nan() || value <= 0.0 {
                    return None;
                }
                value.sqrt()
            } else {
                value / a[j * n + j]
            };
        }
    }
    let mut x = b.to_vec();
    for i in 0..n {
        let sum: f64 = (0..i).map(|j| a[i * n + j] * x[j]).sum();
        x[i] = (x[i] - sum) / a[i * n + i];
    }
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|j| a[j * n + i] * x[j]).sum();
        x[i] = (x[i] - sum) / a[i * n + i];
    }
    Some(x)
}

#[cfg(test)]
mod tests;
