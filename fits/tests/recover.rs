//! Synthetic losses of known constants: the fits recover them, and their intervals cover them as
//! often as they say.

use dreamc_fits::iso::frontier;
use dreamc_fits::{FitError, Law, Options, Run, Table, fit, speedup};

const E: f64 = 1.69;
const ALPHA: f64 = 0.34;
const BETA: f64 = 0.28;
const PHI: f64 = 0.46;

fn loss(size: f64, tokens: f64) -> f64 {
    E + 406.4 * size.powf(-ALPHA) + 410.7 * tokens.powf(-BETA)
}

/// Five sizes around the optimum of six budgets, two seeds each; `noise` is the deviation of log
/// loss.
fn grid(random: &mut fastrand::Rng, noise: f64) -> Vec<Run> {
    let mut runs = vec![];
    for budget in 0..6 {
        let flops = 1e18 * 4f64.powi(budget);
        for step in -2..=2 {
            let params = 0.6 * flops.powf(BETA / (ALPHA + BETA)) * 1.6f64.powi(step);
            let tokens = flops / (6.0 * params);
            for seed in 0..2 {
                runs.push(Run {
                    arm: "a".into(),
                    params,
                    loop_params: 0.0,
                    passes: 1.0,
                    tokens,
                    flops,
                    loss: loss(params, tokens) * (noise * normal(random)).exp(),
                    seed,
                    seconds: None,
                });
            }
        }
    }
    runs
}

/// The same budgets for loops of 1, 2, 4 and 8 passes; FLOPs count every pass.
fn loops(random: &mut fastrand::Rng, noise: f64) -> Vec<Run> {
    let mut runs = vec![];
    for plain in grid(&mut fastrand::Rng::with_seed(0), 0.0).into_iter().filter(|r| r.seed == 0) {
        for passes in [1.0, 2.0, 4.0, 8.0] {
            let (once, inside) = (plain.params * 0.3, plain.params * 0.7);
            let applied = once + passes * inside;
            let tokens = plain.flops / (6.0 * applied);
            let size = once + passes.powf(PHI) * inside;
            runs.push(Run {
                params: once,
                loop_params: inside,
                passes,
                tokens,
                loss: loss(size, tokens) * (noise * normal(random)).exp(),
                ..plain.clone()
            });
        }
    }
    runs
}

/// Box and Muller.
fn normal(random: &mut fastrand::Rng) -> f64 {
    (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos()
}

fn refs(runs: &[Run]) -> Vec<&Run> {
    runs.iter().collect()
}

#[test]
fn exact_losses_give_exact_constants() {
    let options = Options { resamples: 0, ..Options::default() };
    let random = &mut fastrand::Rng::with_seed(1);
    let plain = fit(Law::Plain, &refs(&grid(random, 0.0)), &options).expect("a fit");
    let looped = fit(Law::Loop, &refs(&loops(random, 0.0)), &options).expect("a fit");
    for (fit, name, truth) in [
        (&plain, "E", E),
        (&plain, "alpha", ALPHA),
        (&plain, "beta", BETA),
        (&plain, "size_exponent", BETA / (ALPHA + BETA)),
        (&looped, "E", E),
        (&looped, "alpha", ALPHA),
        (&looped, "beta", BETA),
        (&looped, "phi", PHI),
    ] {
        let found = fit.constant(name).expect(name).value;
        assert!((found / truth - 1.0).abs() < 1e-4, "{name}: {found}, not {truth}");
    }
}

/// 200 draws: the share of intervals that hold the true constant. A share of 0.95 has a standard
/// error of 0.015 over 200 draws, so that 0.91 to 0.99 is within three of them.
fn coverage(law: Law, draw: &dyn Fn(&mut fastrand::Rng) -> Vec<Run>, truths: &[(&str, f64)]) {
    const DRAWS: u64 = 200;
    let mut held = vec![0; truths.len()];
    for seed in 0..DRAWS {
        let runs = draw(&mut fastrand::Rng::with_seed(seed));
        let options = Options { resamples: 200, seed, ..Options::default() };
        let fit = fit(law, &refs(&runs), &options).expect("a fit");
        for (held, (name, truth)) in held.iter_mut().zip(truths) {
            let c = fit.constant(name).expect("a constant");
            *held += u64::from(c.low <= *truth && *truth <= c.high);
        }
    }
    for (held, (name, _)) in held.iter().zip(truths) {
        let share = *held as f64 / DRAWS as f64;
        println!("{law:?} {name}: {share}");
        assert!((0.91..=0.99).contains(&share), "{law:?}: the interval of {name} covers it in {share}");
    }
}

#[test]
fn intervals_of_the_plain_law_cover_its_constants() {
    let truths = [("E", E), ("alpha", ALPHA), ("beta", BETA), ("size_exponent", BETA / (ALPHA + BETA))];
    coverage(Law::Plain, &|r| grid(r, 0.003), &truths);
}

#[test]
fn intervals_of_the_loop_law_cover_its_constants() {
    let truths = [("E", E), ("alpha", ALPHA), ("beta", BETA), ("phi", PHI)];
    coverage(Law::Loop, &|r| loops(r, 0.003), &truths);
}

#[test]
fn a_frontier_finds_the_optimum_of_every_budget() {
    let runs = grid(&mut fastrand::Rng::with_seed(3), 0.0);
    let found = frontier(&refs(&runs), &Options { resamples: 0, ..Options::default() }).expect("a frontier");
    assert_eq!(found.optima.len(), 6);
    for o in &found.optima {
        // The optimum of the law itself, by a fine search.
        let best = (0..4000)
            .map(|i| o.flops.powf(0.3 + i as f64 * 1e-4))
            .min_by(|a, b| loss(*a, o.flops / (6.0 * a)).total_cmp(&loss(*b, o.flops / (6.0 * b))))
            .expect("a size");
        assert!(o.inside && (o.params / best - 1.0).abs() < 0.12, "{} {best}", o.params);
        assert!((o.loss / loss(best, o.flops / (6.0 * best)) - 1.0).abs() < 1e-3);
    }
}

#[test]
fn intervals_of_the_frontier_cover_its_exponents() {
    const DRAWS: u64 = 200;
    let truths = [("gamma", ALPHA * BETA / (ALPHA + BETA)), ("size_exponent", BETA / (ALPHA + BETA))];
    let mut held = [0; 2];
    for seed in 0..DRAWS {
        let runs = grid(&mut fastrand::Rng::with_seed(seed), 0.003);
        let options = Options { resamples: 200, seed, ..Options::default() };
        let found = frontier(&refs(&runs), &options).expect("a frontier");
        for (held, (name, truth)) in held.iter_mut().zip(truths) {
            let c = found.constants.iter().find(|c| c.name == name).expect("a constant");
            *held += u64::from(c.low <= truth && truth <= c.high);
        }
    }
    for (held, (name, _)) in held.iter().zip(truths) {
        let share = *held as f64 / DRAWS as f64;
        println!("frontier {name}: {share}");
        assert!((0.91..=0.99).contains(&share), "the interval of {name} covers it in {share}");
    }
}

#[test]
fn an_arm_that_needs_half_the_compute_is_twice_as_fast() {
    let runs = grid(&mut fastrand::Rng::with_seed(4), 0.0);
    let half: Vec<Run> = runs.iter().map(|r| Run { flops: r.flops / 2.0, ..r.clone() }).collect();
    let options = Options { resamples: 0, ..Options::default() };
    let (baseline, arm) = (frontier(&refs(&runs), &options), frontier(&refs(&half), &options));
    for s in speedup(&baseline.expect("a frontier"), &arm.expect("a frontier")) {
        let factor = s.factor.expect("above the irreducible loss");
        assert!((factor - 2.0).abs() < 0.05, "{factor}");
    }
}

#[test]
fn intervals_of_the_speedup_hold_it() {
    let (mut held, mut all) = (0, 0);
    for seed in 0..20 {
        let runs = grid(&mut fastrand::Rng::with_seed(seed), 0.003);
        let mut other = grid(&mut fastrand::Rng::with_seed(seed + 100), 0.003);
        other.iter_mut().for_each(|r| r.flops /= 2.0);
        let options = Options { resamples: 200, seed, ..Options::default() };
        let frontiers = (frontier(&refs(&runs), &options), frontier(&refs(&other), &options));
        let (Ok(baseline), Ok(arm)) = frontiers else { panic!("no frontier") };
        for s in speedup(&baseline, &arm) {
            let (low, high) = s.interval.expect("resamples");
            held += usize::from(low <= 2.0 && 2.0 <= high);
            all += 1;
        }
    }
    assert!(held * 100 >= 85 * all, "{held} of {all}");
}

#[test]
fn too_few_runs_and_constant_variables_are_refused() {
    let mut runs = grid(&mut fastrand::Rng::with_seed(5), 0.0);
    let options = Options::default();
    let few = fit(Law::Plain, &refs(&runs[..6]), &options).expect_err("six runs");
    assert_eq!(few, FitError::TooFew { law: Law::Plain.name(), constants: 5, needed: 7, found: 6 });
    let once = fit(Law::Loop, &refs(&runs), &options).expect_err("no loop");
    assert_eq!(once, FitError::Constant { variable: "the number of passes", found: 1, needed: 2 });
    runs.iter_mut().for_each(|r| r.tokens = 1e9);
    let same = fit(Law::Plain, &refs(&runs), &options).expect_err("one number of tokens");
    assert_eq!(same, FitError::Constant { variable: "the number of tokens", found: 1, needed: 3 });
}

#[test]
fn tables_are_refused_at_their_line() {
    let read = |text: &str| Table::read(text.as_bytes()).map_err(|e| e.to_string());
    let table = read("arm,params,tokens,flops,loss,seed\nla, 1e6, 2e7, 1.2e14, 3.5, 1\n").expect("a table");
    assert_eq!((table.runs[0].seed, table.runs[0].passes, table.runs[0].params), (1, 1.0, 1e6));
    insta::assert_snapshot!(
        read("arm,params,tokens,flops,loss\nla,1e6,2e7,1.2e14,-3\n").expect_err("a negative loss")
    );
    insta::assert_snapshot!(
        read("arm,params,tokens,flops,loss\nla,1e6,many,1.2e14,3\n").expect_err("a word")
    );
    insta::assert_snapshot!(
        read("arm,params,tokens,flops,loss,lr\nla,1e6,1,1.2e14,3,4\n").expect_err("a column")
    );
    insta::assert_snapshot!(read("arm,params,tokens,flops,loss\nla,1e6\n").expect_err("a short line"));
}
