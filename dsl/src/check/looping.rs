//! How the passes of a `recur` are run.
//!
//! In: the settings of a `recur`. Out: a [`Looping`], or an error at each that is wrong.

use super::body::MAX_APPLICATIONS;
use super::{Checker, Group};
use crate::ast::{Value, ValueKind};
use crate::keys::{self, Type};
use crate::spec::{DepthLaw, Depths, Looping};

impl Checker {
    /// `outermost` says whether the `recur` is an item of the body.
    pub(super) fn looping(&mut self, group: &Group, count: Option<u64>, outermost: bool) -> Option<Looping> {
        for key in ["backprop", "depth"] {
            if !outermost && self.has(group, key) {
                let message = format!(
                    "`{key}` is of a `recur` that is an item of the body, and this is inside another loop"
                );
                self.error_at(
                    "inner-loop",
                    &group.path(key),
                    message,
                    "take it away, or move the loop outside",
                );
            }
        }
        let backprop = match self.has(group, "backprop") {
            true => self.int(group, "backprop").map(Some),
            false => Some(None),
        };
        let depth = self.depths(group, count);
        Some(Looping { backprop: backprop?, depth: depth? })
    }

    fn depths(&mut self, owner: &Group, count: Option<u64>) -> Option<Option<Depths>> {
        match self.written(owner, "depth") {
            None => return Some(None),
            Some(Value { kind: ValueKind::Word(word), .. }) if word == "fixed" => return Some(None),
            Some(Value { kind: ValueKind::Map(_), .. }) => {}
            Some(value) => {
                let value = value.clone();
                self.wrong_type("depth", &Self::kind(owner, "depth"), &value);
                return None;
            }
        }
        let group = self.section(owner, "depth")?;
        let laws = ["uniform", "poisson", "lognormal_poisson"].map(|law| self.has(&group, law));
        if laws.iter().filter(|law| **law).count() != 1 {
            let help = "write `uniform 1 8`, `poisson 4` or `lognormal_poisson 32 0.5`";
            self.error("missing-key", group.at, "a distribution of depths has one law", help);
            return None;
        }
        if laws[0] {
            for bound in ["min", "max"] {
                if self.has(&group, bound) {
                    let message =
                        format!("`{bound}` does not go with `uniform`, whose numbers are the bounds");
                    self.error_at("depth", &group.path(bound), message, "take it away");
                }
            }
            let kind = Type::Int { min: 1 };
            let elements = self.elements(&group, "uniform")?;
            let bounds: Vec<u64> = elements
                .iter()
                .map(|(value, _)| self.whole("uniform", &kind, 1, value))
                .collect::<Option<_>>()?;
            let [min, max] = bounds[..] else {
                let message = "`uniform` has two numbers, the least depth and the greatest";
                self.error_at("depth", &group.path("uniform"), message, "write `uniform 1 8`");
                return None;
            };
            return self.bounded(&group, "uniform", DepthLaw::Uniform, min, max);
        }
        let law = match laws[1] {
            true => self.real(&group, "poisson").map(|mean| DepthLaw::Poisson { mean }),
            false => self.section(&group, "lognormal_poisson").and_then(|law| {
                let (mean, sigma) = (self.real(&law, "mean"), self.real(&law, "sigma"));
                Some(DepthLaw::LognormalPoisson { mean: mean?, sigma: sigma? })
            }),
        };
        let min = self.int(&group, "min");
        let max = match self.has(&group, "max") {
            true => self.int(&group, "max"),
            false => count.map(|count| 2 * count),
        };
        let (law, min, max) = (law?, min?, max?);
        self.bounded(&group, "min", law, min, max)
    }

    fn bounded(
        &mut self,
        group: &Group,
        at: &str,
        law: DepthLaw,
        min: u64,
        max: u64,
    ) -> Option<Option<Depths>> {
        if min > max {
            let message = format!("the least depth ({min}) is above the greatest ({max})");
            self.error_at("out-of-range", &group.path(at), message, "swap them");
            return None;
        }
        if max > MAX_APPLICATIONS {
            self.too_deep(self.sources.locate(&group.path("max")).unwrap_or(group.at));
            return None;
        }
        debug_assert!(std::ptr::eq(group.section, &keys::DEPTHS));
        Some(Some(Depths { law, min, max }))
    }
}
