//! The learning rate and the depth of each step, and when a checkpoint is due by the clock.

use dreamc_compiler::bind::Input;
use dreamc_data::rng::{Philox, Stream, unit_open};
use dreamc_dsl::Spec;
use dreamc_dsl::spec::{DepthLaw, Depths, Item, Schedule, Train};
use std::time::Duration;

/// Checkpoints by the clock take at most one part in this number of a run.
const SHARE: u32 = 100;

/// When a checkpoint is due by the clock: a fixed time after the last, and longer where writing one
/// takes more than a hundredth of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    asked: Duration,
    cost: Duration,
}

impl Interval {
    /// Every `minutes` minutes; never for 0.
    pub fn new(minutes: f64) -> Option<Self> {
        let asked = Duration::try_from_secs_f64(60.0 * minutes).unwrap_or(Duration::MAX);
        (minutes > 0.0).then_some(Interval { asked, cost: Duration::ZERO })
    }

    /// Writing one took `cost`.
    pub fn took(&mut self, cost: Duration) {
        self.cost = cost;
    }

    /// Whether one is due `since` after the last.
    pub fn due(&self, since: Duration) -> bool {
        since >= self.asked.max(self.cost.saturating_mul(SHARE))
    }
}

/// The learning rate of step `step`, counted from 1: a linear warm-up to the peak, then what the
/// schedule says until the last step.
pub fn learning_rate(train: &Train, step: u64) -> f64 {
    let peak = train.learning_rate;
    if step <= train.warmup {
        return peak * step as f64 / train.warmup as f64;
    }
    // From 0 just after the warm-up to 1 at the last step.
    let length = train.steps.saturating_sub(train.warmup).max(1) as f64;
    let progress = ((step - train.warmup) as f64 / length).min(1.0);
    let toward = |floor: f64, share: f64| peak * (floor + (1.0 - floor) * share);
    match train.schedule {
        Schedule::Constant => peak,
        Schedule::Points(ref points) => peak * between(points, step),
        Schedule::Cosine { floor } => toward(floor, 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())),
        Schedule::Linear { floor } => toward(floor, 1.0 - progress),
        Schedule::Wsd { decay, floor } => {
            let start = train.steps.saturating_sub(decay);
            let gone = step.saturating_sub(start) as f64 / decay.max(1) as f64;
            toward(floor, 1.0 - gone.min(1.0))
        }
    }
}

/// The factor of a schedule by points: on the line between the two around the step, and that of the
/// nearest before the first and after the last.
fn between(points: &[(u64, f64)], step: u64) -> f64 {
    let after = points.partition_point(|(at, _)| *at < step);
    match (after.checked_sub(1).and_then(|before| points.get(before)), points.get(after)) {
        (Some((from, low)), Some((to, high))) => {
            low + (high - low) * (step - from) as f64 / (to - from).max(1) as f64
        }
        (Some((_, factor)), None) | (None, Some((_, factor))) => *factor,
        (None, None) => 1.0,
    }
}

/// Scalars that the optimizer reads: learning rate, corrections of the moments, clipping.
pub fn scalars(train: &Train, step: u64) -> [(Input, f32); 4] {
    let correction = |beta: f64| (1.0 / (1.0 - beta.powf(step as f64))) as f32;
    let clip = train.clip.map_or(f32::INFINITY, |c| c as f32);
    let (m, v) = train.betas;
    [
        (Input::LearningRate, learning_rate(train, step) as f32),
        (Input::FirstCorrection, correction(m)),
        (Input::SecondCorrection, correction(v)),
        (Input::Clip, clip),
    ]
}

/// The distribution of the recurrent depth, where it is drawn anew each step.
pub fn depths(spec: &Spec) -> Option<Depths> {
    let drawn = spec.model.body.iter().find_map(|item| match item {
        Item::Recur { looping, .. } => looping.depth,
        Item::Repeat { .. } | Item::Layer(_) | Item::Statement(_) => None,
    });
    let uniform = |(min, max)| Depths { law: DepthLaw::Uniform, min, max };
    drawn.or(spec.train.random_depth.map(uniform))
}

/// Every recurrent depth that a step may have.
pub fn possible_depths(spec: &Spec) -> Vec<u64> {
    depths(spec).map_or(vec![], |depths| (depths.min..=depths.max).collect())
}

/// The recurrent depth of a step, where it is drawn anew each step: a function of seed and step.
pub fn depth(spec: &Spec, step: u64) -> Option<u64> {
    let Depths { law, min, max } = depths(spec)?;
    let mut random = Philox::new(spec.train.seed, "depth").stream(step);
    let drawn = match law {
        DepthLaw::Uniform => return Some(min + random.below(max.saturating_sub(min) + 1)),
        DepthLaw::Poisson { mean } => poisson(mean, max, &mut random),
        DepthLaw::LognormalPoisson { mean, sigma } => {
            // By Box–Muller.
            let radius = (-2.0 * unit_open(random.bits()).ln()).sqrt();
            let normal = radius * (std::f64::consts::TAU * unit_open(random.bits())).cos();
            let rate = (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp();
            poisson(rate, max, &mut random).saturating_add(1)
        }
    };
    Some(drawn.clamp(min, max))
}

/// How many arrivals there are in one unit of time, at most `most`, where intervals are
/// exponential.
fn poisson(rate: f64, most: u64, random: &mut Stream) -> u64 {
    let (mut time, mut arrivals) = (0.0, 0);
    while arrivals < most {
        time -= unit_open(random.bits()).ln() / rate;
        if time > 1.0 {
            break;
        }
        arrivals += 1;
    }
    arrivals
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use dreamc_dsl::spec::{Checkpoint, Evaluate, OnNan, OptimizerKind, Parallel, Precision};

    pub(crate) fn recipe() -> Train {
        Train {
            steps: 100,
            batch: 4,
            accumulate: 1,
            sequence: None,
            learning_rate: 1.0,
            warmup: 10,
            schedule: Schedule::Constant,
            optimizer: OptimizerKind::AdamW,
            transfer: None,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-3,
            memory: None,
            moments: Precision::F32,
            decay_embeddings: false,
            clip: Some(0.5),
            z_loss: 0.0,
            dpo: None,
            seed: 0,
            precision: Precision::F32,
            only: vec![],
            freeze: vec![],
            groups: vec![],
            parallel: Parallel::default(),
            random_depth: None,
            evaluate: Evaluate { every: 0, batches: 1 },
            checkpoint: Checkpoint { every: 0, minutes: 0.0, keep: 1, keep_every: 0, best: false },
            patience: None,
            on_nan: OnNan::Stop,
            spike: None,
        }
    }

    fn rates(schedule: Schedule, steps: &[u64]) -> Vec<f64> {
        let train = Train { schedule, ..recipe() };
        steps.iter().map(|&s| (learning_rate(&train, s) * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn schedules_pass_through_their_corners() {
        let steps = [1, 5, 10, 55, 100, 200];
        assert_eq!(rates(Schedule::Constant, &steps), [0.1, 0.5, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Schedule::Cosine { floor: 0.0 }, &steps), [0.1, 0.5, 1.0, 0.5, 0.0, 0.0]);
        assert_eq!(rates(Schedule::Linear { floor: 0.1 }, &steps), [0.1, 0.5, 1.0, 0.55, 0.1, 0.1]);
        let wsd = Schedule::Wsd { decay: 20, floor: 0.0 };
        assert_eq!(rates(wsd, &[1, 80, 90, 100, 101]), [0.1, 1.0, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn a_schedule_of_points_is_lines_between_them() {
        let rate = |points: &[(u64, f64)], step| {
            let schedule = Schedule::Points(points.to_vec());
            learning_rate(&Train { schedule, warmup: 0, learning_rate: 2.0, ..recipe() }, step)
        };
        let points = [(0, 0.0), (10, 1.0), (50, 1.0), (100, 0.5)];
        assert_eq!(
            [1, 5, 10, 11, 50, 75, 100, 101].map(|s| rate(&points, s)),
            [0.2, 1.0, 2.0, 2.0, 2.0, 1.5, 1.0, 1.0]
        );
        // Before the first point and after the last their factors hold.
        assert_eq!([1, 20, 30, 90].map(|s| rate(&[(20, 0.25), (40, 1.0)], s)), [0.5, 0.5, 1.25, 2.0]);
        // It begins as a warm-up does.
        let warm = |step| learning_rate(&Train { schedule: Schedule::Constant, ..recipe() }, step);
        for step in 1..=10 {
            assert!((warm(step) - rate(&[(0, 0.0), (10, 0.5)], step)).abs() < 1e-12, "{step}");
        }
    }

    #[test]
    fn scalars_are_those_of_adamw() {
        assert_eq!(scalars(&recipe(), 1).map(|s| s.1), [0.1, 10.0, 1000.0, 0.5]);
        assert_eq!(scalars(&Train { clip: None, ..recipe() }, 1)[3].1, f32::INFINITY);
        assert!((scalars(&recipe(), 100_000)[2].1 - 1.0).abs() < 1e-6);
    }

    /// A model whose `recur` has these settings.
    fn looped(settings: &str) -> Spec {
        let text = format!(
            "model m {{\n vocab 7 hidden 4 context 4\n a = mlp {{ intermediate 4 }}\n recur 8 {settings} {{ a }}\n}}\n"
        );
        let ast = dreamc_dsl::parse("m.dream", &text, dreamc_dsl::Spelling::Dream).unwrap();
        dreamc_dsl::check(&ast, &[]).unwrap().0
    }

    #[test]
    fn depths_are_drawn_by_step() {
        let mut spec = looped("");
        assert_eq!(depth(&spec, 7), None);
        spec.train.random_depth = Some((2, 5));
        let drawn: Vec<u64> = (1..100).filter_map(|s| depth(&spec, s)).collect();
        assert!((2..=5).all(|d| drawn.contains(&d)) && drawn.iter().all(|d| (2..=5).contains(d)));
        assert_eq!(depth(&spec, 7), depth(&spec, 7));
        // Both spellings of a uniform depth draw the same.
        let same: Vec<u64> = (1..100).filter_map(|s| depth(&looped("depth uniform 2 5"), s)).collect();
        assert_eq!(drawn, same);
    }

    #[test]
    fn laws_of_depth_have_their_moments() {
        let moments = |settings: &str| {
            let spec = looped(settings);
            let drawn: Vec<f64> = (0..20_000).filter_map(|s| depth(&spec, s)).map(|d| d as f64).collect();
            let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
            (mean, drawn.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / drawn.len() as f64)
        };
        let (mean, variance) = moments("depth poisson 12 max 100");
        assert!((mean - 12.0).abs() < 0.1 && (variance - 12.0).abs() < 0.5, "{mean} {variance}");
        // The rate has mean 32 and variance 32² (exp(sigma²) - 1).
        let (mean, variance) = moments("depth lognormal_poisson 32 0.5 min 1 max 256");
        let expected = 32.0 + 32.0 * 32.0 * (0.25f64.exp() - 1.0);
        assert!((mean - 33.0).abs() < 0.5 && (variance / expected - 1.0).abs() < 0.1, "{mean} {variance}");
        let (mean, variance) = moments("depth poisson 50 max 3");
        assert_eq!((mean, variance), (3.0, 0.0));
    }

    #[test]
    fn checkpoints_by_the_clock_cost_less_than_a_hundredth() {
        let seconds = Duration::from_secs;
        assert_eq!(Interval::new(0.0), None);
        let mut interval = Interval::new(10.0).unwrap();
        assert!(!interval.due(seconds(599)) && interval.due(seconds(600)));
        interval.took(seconds(6));
        assert!(interval.due(seconds(600)));
        interval.took(seconds(60));
        assert!(!interval.due(seconds(5999)) && interval.due(seconds(6000)));
        assert!(!Interval::new(f64::MAX).unwrap().due(seconds(1 << 40)));
    }

    #[test]
    fn no_warmup_begins_at_the_peak() {
        let train = Train { warmup: 0, steps: 0, ..recipe() };
        assert_eq!(learning_rate(&train, 1), 1.0);
    }
}
