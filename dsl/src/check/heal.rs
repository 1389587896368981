//! A teacher, and the stages in which training matches it.

use super::{Checker, Group};
use crate::ast::ValueKind;
use crate::keys::{self, Range, Type};
use crate::spec::{Heal, Lesson, Spec, Stage};

impl Checker {
    pub(super) fn heal(&mut self, group: &Group) -> Option<Heal> {
        let teacher = self.text_or_none(group, "teacher");
        let cache = self.memory(group, "cache");
        let mut stages = Some(vec![]);
        for (value, path) in self.elements(group, "stages")? {
            let kind = Type::Section(&keys::STAGE);
            let own = self.section_of(&keys::STAGE, &kind, "stages", value, path, value.span);
            let read = own.and_then(|own| self.stage(&own));
            stages = stages.zip(read).map(|(mut stages, read)| {
                stages.push(read);
                stages
            });
        }
        let stages = stages?;
        if stages.is_empty() {
            let help = "write what is matched, and for how many steps: `{match: logits, steps: 500}`";
            self.error_at("empty", &group.path("stages"), "there are no stages", help);
            return None;
        }
        let last = stages.len() - 1;
        if let Some(endless) = stages[..last].iter().position(|stage| stage.steps.is_none()) {
            let path = format!("{}[{endless}]", group.path("stages"));
            let help = "write its `steps`: the last stage alone may take those that are left";
            self.error_at("missing-key", &path, "no stage comes after one without `steps`", help);
            return None;
        }
        Some(Heal { teacher: teacher?, cache: cache?, stages })
    }

    fn stage(&mut self, group: &Group) -> Option<Stage> {
        let to = self.one_or_more(group, "match");
        let from =
            if self.has(group, "from") { self.one_or_more(group, "from").map(Some) } else { Some(None) };
        let weights = self.weights(group);
        let temperature = self.real(group, "temperature");
        let top = self.int_or_none(group, "top");
        let loss = self.real(group, "loss");
        let steps = self.int_or_none(group, "steps");
        let (to, from, weights) = (to?, from?, weights?);
        let mut fits = |key: &str, count: usize, single: bool| {
            if count == to.len() || (single && count == 1) {
                return Some(());
            }
            let message = format!("`{key}` has {count} entries, and `match` {}", to.len());
            self.error_at(
                "wrong-length",
                &group.path(key),
                message,
                "write one for each value that is matched",
            );
            None
        };
        fits("from", from.as_ref().map_or(to.len(), Vec::len), false)?;
        fits("weight", weights.len(), true)?;
        let matches: Vec<Lesson> = to
            .iter()
            .enumerate()
            .map(|(i, to)| Lesson {
                to: to.clone(),
                from: from.as_ref().map(|from| from[i].clone()).filter(|from| from != to),
                weight: weights[if weights.len() == 1 { 0 } else { i }],
            })
            .collect();
        for (i, lesson) in matches.iter().enumerate() {
            let other = matches[..i].iter().any(|other| other.to == lesson.to);
            let named = ["logits", "layers"].contains(&lesson.to.as_str());
            let found = match (other, named, &lesson.from) {
                (true, ..) => {
                    Some(("match", "is matched twice", "name each value once, and give it a weight"))
                }
                (_, true, Some(_)) => Some((
                    "from",
                    "are the teacher's own logits or layers",
                    "leave `from` out, or match values by their names",
                )),
                _ => None,
            };
            if let Some((key, what, help)) = found {
                let message = match key {
                    "from" => format!("`{}` {what}", lesson.to),
                    _ => format!("`{}` {what}", lesson.to),
                };
                self.error_at("bad-name", &group.path(key), message, help);
                return None;
            }
        }
        let probabilities = matches.iter().any(|lesson| lesson.to == "logits");
        if let (Some(key), false) =
            (["temperature", "top"].into_iter().find(|k| self.has(group, k)), probabilities)
        {
            let message = format!("`{key}` is of logits, which this stage does not match");
            self.error_at(
                "unknown-key",
                &group.path(key),
                message,
                "take it away, or add `logits` to `match`",
            );
            return None;
        }
        Some(Stage { matches, temperature: temperature?, top: top?, loss: loss?, steps: steps? })
    }

    /// A text, or a list of texts.
    fn one_or_more(&mut self, group: &Group, key: &'static str) -> Option<Vec<String>> {
        let found = match self.written(group, key).map(|value| &value.kind) {
            Some(ValueKind::List(_)) => self.texts(group, key)?,
            _ => vec![self.text(group, key)?],
        };
        if found.is_empty() {
            let help = "`logits`, `layers`, or names as `dreamc probe --list` has them";
            self.error_at("empty", &group.path(key), format!("`{key}` is empty"), help);
            return None;
        }
        Some(found)
    }

    /// A number, or a list of numbers.
    fn weights(&mut self, group: &Group) -> Option<Vec<f64>> {
        match self.written(group, "weight").map(|value| &value.kind) {
            Some(ValueKind::List(_)) => {
                let elements = self.elements(group, "weight")?;
                let kind = Type::Real(Range::NonNegative);
                let all: Vec<_> = elements
                    .iter()
                    .map(|(value, _)| self.real_of("weight", &kind, Range::NonNegative, value))
                    .collect();
                all.into_iter().collect()
            }
            _ => self.real(group, "weight").map(|weight| vec![weight]),
        }
    }

    /// Refuses stages that take more steps than training has, and a teacher that nobody names.
    pub(super) fn healed(&mut self, spec: &Spec) -> Option<()> {
        let Some(heal) = &spec.heal else { return Some(()) };
        let donor = spec.transplant.as_ref().and_then(|transplant| transplant.from.as_ref());
        if heal.teacher.is_none() && donor.is_none() && spec.transplant.is_none() {
            let help = "write `teacher`: a run, a checkpoint or an imported model";
            self.error_at("missing-key", "heal", "there is no teacher", help);
            return None;
        }
        if spec.train.dpo.is_some() {
            let help =
                "leave `train.dpo` or `heal` out, or train twice: the second run begins from the first";
            self.error_at(
                "out-of-range",
                "heal",
                "a run learns from preferences or from a teacher, not from both",
                help,
            );
            return None;
        }
        let steps: u64 = heal.stages.iter().filter_map(|stage| stage.steps).fold(0, u64::saturating_add);
        if steps > spec.train.steps {
            let message = format!("the stages take {steps} steps, and training has {}", spec.train.steps);
            let help = format!("set `train.steps` to {steps} or more, or shorten a stage");
            self.error_at("out-of-range", "heal.stages", message, help);
            return None;
        }
        Some(())
    }
}
