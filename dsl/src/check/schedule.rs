//! The learning rate over a run: warm-up, schedule, and what a run is too short for.

use super::{Checker, Group};
use crate::ast::{Arith, ArithKind, Value, ValueKind};
use crate::keys::{self, Range, Type};
use crate::spec::{Schedule, warmup_steps};

/// Steps of warm-up where none are written and the run is long enough.
const WARMUP: u64 = 500;

/// Steps that a step is compared with before one can be a spike.
const BEFORE_SPIKES: u64 = 64;

impl Checker {
    /// Steps of warm-up, and the schedule after it.
    pub(super) fn rates(&mut self, group: &Group, steps: Option<u64>) -> (Option<u64>, Option<Schedule>) {
        let drawn = self.written(group, "schedule").and_then(Value::as_list).is_some();
        let warmup = self.warmup(group, steps, drawn);
        (warmup, if drawn { self.points(group, steps) } else { self.schedule(group, steps, warmup) })
    }

    fn warmup(&mut self, group: &Group, steps: Option<u64>, drawn: bool) -> Option<u64> {
        let Some(value) = self.written(group, "warmup") else {
            return Some(if drawn { 0 } else { WARMUP.min(steps? / 10) });
        };
        let warmup = self.span_of_steps("warmup", &Self::kind(group, "warmup"), value, steps)?;
        if drawn && warmup > 0 {
            let message = "`warmup` does not go with a schedule of points, which has the whole run";
            let help = "write `warmup: 0`, and a point `[0, 0]` to begin from";
            self.error_at("unreached", &group.path("warmup"), message, help);
        }
        if let Some(steps) = steps.filter(|steps| warmup > 1 && warmup >= *steps && !drawn) {
            let message = match warmup == steps {
                true => format!("the run of {steps} steps is all warm-up: only its last step has the peak"),
                false => format!(
                    "the run of {steps} steps ends within its warm-up of {warmup}: the learning rate comes to {:.0} % of its peak",
                    100.0 * steps as f64 / warmup as f64
                ),
            };
            let help =
                format!("write `warmup: {}`, a share such as `warmup: 10%`, or more `steps`", steps / 10);
            self.warning("short-run", value.span, message, help);
        }
        Some(warmup)
    }

    /// A number of steps, or their share.
    fn span_of_steps(&mut self, key: &str, kind: &Type, value: &Value, steps: Option<u64>) -> Option<u64> {
        let number = self.number(key, kind, value)?;
        let share = number.real();
        if percentage(value) && share > 1.0 {
            let message = format!("`{key}` is out of range: {} %", 100.0 * share);
            self.error("out-of-range", value.span, message, "a share of `steps` is at most 100 %");
            return None;
        }
        if percentage(value) || (number.whole().is_none() && (0.0..1.0).contains(&share)) {
            return steps.map(|steps| warmup_steps(share, steps));
        }
        self.whole(key, &keys::COUNT, 0, value)
    }

    /// A schedule by points, each a step and a factor.
    fn points(&mut self, group: &Group, steps: Option<u64>) -> Option<Schedule> {
        let mut points: Vec<(u64, f64)> = vec![];
        let mut right = true;
        for (value, _) in self.elements(group, "schedule")? {
            let [at, factor] = value.as_list().map(|list| &list.items[..]).unwrap_or_default() else {
                let help = "a point is a step and a factor: `[0, 0]`, `[10%, 1]`";
                self.error("wrong-type", value.span, "this is no point of a schedule", help);
                right = false;
                continue;
            };
            let step = self.span_of_steps("schedule", &keys::COUNT, &at.node, steps);
            let kind = Type::Real(Range::NonNegative);
            let factor = self.real_of("schedule", &kind, Range::NonNegative, &factor.node);
            let (Some(step), Some(factor)) = (step, factor) else {
                right = false;
                continue;
            };
            if let Some((last, _)) = points.last().filter(|(last, _)| *last >= step) {
                let message = format!("step {step} does not come after step {last}, the point before");
                self.error(
                    "out-of-range",
                    at.node.span,
                    message,
                    "write the points in the order of their steps",
                );
                right = false;
            }
            if let Some(steps) = steps.filter(|steps| step > *steps) {
                let message = format!("the run of {steps} steps ends before this point");
                let help = "write a share such as `100%`, or more `steps`";
                self.warning("short-run", at.node.span, message, help);
            }
            points.push((step, factor));
        }
        if right && points.iter().all(|(_, factor)| *factor == 0.0) {
            let help = "write at least one point with a factor above 0, such as `[10%, 1]`";
            self.error_at("empty", &group.path("schedule"), "the learning rate is 0 throughout", help);
            return None;
        }
        right.then_some(Schedule::Points(points))
    }

    fn schedule(&mut self, owner: &Group, steps: Option<u64>, warmup: Option<u64>) -> Option<Schedule> {
        if !self.has(owner, "schedule") {
            return Some(Schedule::Constant);
        }
        let group = self.section(owner, "schedule")?;
        let kind = self.word(&group, "kind");
        let floor = self.real(&group, "floor");
        if floor.is_some_and(|floor| floor > 1.0) {
            let help = "it is a share of the peak, at most 1";
            self.error_at("out-of-range", &group.path("floor"), "`floor` is above the peak", help);
        }
        let kind = kind?;
        if kind == "constant" {
            self.misplaced_in_schedule(&group, "floor", "`constant`");
        }
        if kind != "wsd" {
            self.misplaced_in_schedule(&group, "decay", &format!("`{kind}`"));
        }
        Some(match kind {
            "cosine" => Schedule::Cosine { floor: floor? },
            "linear" => Schedule::Linear { floor: floor? },
            "wsd" => {
                if !self.has(&group, "decay") {
                    let help = "write `schedule: {kind: wsd, decay: 20%}`";
                    self.error("missing-key", group.at, "`decay` is missing in schedule", help);
                }
                let value = self.written(&group, "decay")?;
                let decay = self.span_of_steps("decay", &Self::kind(&group, "decay"), value, steps)?;
                if decay == 0 {
                    let help = "write a number of steps, or their share, such as `20%`";
                    self.error("out-of-range", value.span, "a decay over no steps", help);
                }
                if let (Some(steps), Some(warmup)) = (steps, warmup)
                    && decay.saturating_add(warmup) > steps
                {
                    let message =
                        format!("{warmup} steps of warm-up and {decay} of decay are more than {steps}");
                    self.error_at("out-of-range", &group.path("decay"), message, "make one shorter");
                }
                Schedule::Wsd { decay, floor: floor? }
            }
            _ => Schedule::Constant,
        })
    }

    fn misplaced_in_schedule(&mut self, group: &Group, key: &'static str, kind: &str) {
        if self.has(group, key) {
            let message = format!("`{key}` does not go with {kind}");
            self.error_at("unknown-key", &group.path(key), message, "take it away");
        }
    }

    /// Warns of a stop and of a guard that a run is too short for.
    pub(super) fn too_short(&mut self, group: &Group, steps: Option<u64>, every: Option<u64>) {
        let Some(steps) = steps else { return };
        let patience = self.written(group, "patience").and(self.int_or_none(group, "patience").flatten());
        if let (Some(patience), Some(every)) = (patience, every.filter(|every| *every > 0))
            // The first evaluation has nothing to improve on.
            && every.saturating_mul(patience.saturating_add(1)) >= steps
        {
            let message = format!(
                "`patience` never stops a run of {steps} steps: the last of {} evaluations, one every {every} steps, is not before its end",
                patience.saturating_add(1)
            );
            let help = "evaluate more often, lower it, or take it away";
            self.warning_at("short-run", &group.path("patience"), message, help);
        }
        if self.has(group, "spike") && !self.is_none(group, "spike") && steps <= BEFORE_SPIKES {
            let message = format!(
                "`spike` leaves nothing out of a run of {steps} steps: a step is compared with {BEFORE_SPIKES} before it"
            );
            self.warning_at("short-run", &group.path("spike"), message, "take it away, or train more steps");
        }
    }
}

/// Whether a value is written with a percent sign.
fn percentage(value: &Value) -> bool {
    matches!(&value.kind, ValueKind::Number(Arith { kind: ArithKind::Literal(text), .. }) if text.ends_with('%'))
}
