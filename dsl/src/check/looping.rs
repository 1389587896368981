//! How the passes of a `recur` are run.
//!
//! In: the settings of a `recur`. Out: a [`Looping`], or an error at each that is wrong.

use super::body::MAX_APPLICATIONS;
use super::{Checker, Group};
use crate::ast::{Value, ValueKind};
use crate::keys::{self, Type};
use crate::spec::{DepthLaw, Depths, Exit, Looping};

impl Checker {
    /// `outermost` says whether the `recur` is an item of the body.
    pub(super) fn looping(&mut self, group: &Group, count: Option<u64>, outermost: bool) -> Option<Looping> {
        for key in ["backprop", "depth", "lora", "embed", "exit"] {
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
        let lora = match self.has(group, "lora") {
            true => self.int(group, "lora").map(Some),
            false => Some(None),
        };
        let embed = self.bool(group, "embed");
        if embed == Some(true) && self.known.attends {
            let message = "`embed` adds to a stream, and `stream attend` has none";
            let help = "components read mixtures of outputs: take it away";
            self.error_at("unknown-stream", &group.path("embed"), message, help);
        }
        let exit = self.exit(group, count);
        let depth = self.depths(group, count);
        let looping = Looping { backprop: backprop?, depth: depth?, lora: lora?, embed: embed?, exit: exit? };
        if let (true, Some(most), Some(depths)) = (looping.has_passes(), count, looping.depth)
            && depths.max > most
        {
            let key = if looping.embed { "embed" } else { "lora" };
            let message =
                format!("`{key}` has weights for {most} passes, and `depth` draws up to {}", depths.max);
            let help = format!("write `max {most}` behind the distribution, or a larger count");
            self.error_at("depth", &group.path("depth"), message, &help);
            return None;
        }
        Some(looping)
    }

    fn exit(&mut self, owner: &Group, count: Option<u64>) -> Option<Exit> {
        let exit = match self.written(owner, "exit") {
            None => return Some(Exit::Last),
            Some(Value { kind: ValueKind::Word(word), .. }) if word == "last" => return Some(Exit::Last),
            Some(Value { kind: ValueKind::Word(word), .. }) if word == "mean" => Some(Exit::Mean),
            Some(Value { kind: ValueKind::Map(_), .. }) => {
                self.section(owner, "exit").and_then(|group| self.real(&group, "gate")).map(Exit::Gate)
            }
            Some(value) => {
                let value = value.clone();
                self.wrong_type("exit", &Self::kind(owner, "exit"), &value);
                None
            }
        };
        if self.has(owner, "backprop") {
            let message =
                "losses of passes without a gradient would teach nothing: `exit` does not go with `backprop`";
            self.error_at("exit", &owner.path("exit"), message, "take one of the two away");
        }
        if self.known.wired {
            let message = "`exit` reads the stream behind a pass, and this model has more than one";
            self.error_at("exit", &owner.path("exit"), message, "take `exit` away, or write `stream sum`");
        }
        if count == Some(1) {
            let message = "a loop of one pass has one way out";
            self.error_at("exit", &owner.path("exit"), message, "take `exit` away, or write a larger count");
        }
        exit
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
