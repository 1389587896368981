//! How the passes of a `recur` are run.
//!
//! In: the settings of a `recur`. Out: a [`Looping`], or an error at each that is wrong.

use super::body::{Components, MAX_APPLICATIONS};
use super::{Checker, Group};
use crate::ast::{Value, ValueKind};
use crate::keys::{self, Type};
use crate::spec::{
    Attention, Component, DepthLaw, Depths, Exit, Expr, Item, Looping, PassKeys, SkipKv, SkipRule,
};

impl Checker {
    /// `outermost` says whether the `recur` is an item of the body.
    pub(super) fn looping(&mut self, group: &Group, count: Option<u64>, outermost: bool) -> Option<Looping> {
        for key in ["backprop", "depth", "lora", "embed", "exit", "kv"] {
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
        let kv = self.word(group, "kv").map(|kv| match kv {
            "first" => PassKeys::First,
            "replaced" => PassKeys::Replaced,
            _ => PassKeys::Own,
        });
        let looping =
            Looping { backprop: backprop?, depth: depth?, lora: lora?, embed: embed?, exit: exit?, kv: kv? };
        let own = looping.has_passes() || self.known.turns && outermost;
        if let (true, Some(most), Some(depths)) = (own, count, looping.depth)
            && depths.max > most
        {
            let key = match (looping.embed, looping.lora) {
                (true, _) => "embed",
                (false, Some(_)) => "lora",
                (false, None) => "stream",
            };
            let message =
                format!("`{key}` has weights for {most} passes, and `depth` draws up to {}", depths.max);
            let help = format!("write `max {most}` after the distribution, or a larger count");
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
                self.section(owner, "exit").and_then(|group| self.gate(&group))
            }
            Some(value) => {
                let value = value.clone();
                self.wrong_type("exit", &Self::kind(owner, "exit"), &value);
                None
            }
        };
        if self.has(owner, "backprop") {
            let message = "`backprop` keeps nothing of earlier passes, and their losses would reach the head and no layer: `exit` does not go with it";
            self.error_at("exit", &owner.path("exit"), message, "take one of the two away");
        }
        if count == Some(1) {
            let message = "a loop of one pass has one way out";
            self.error_at("exit", &owner.path("exit"), message, "take `exit` away, or write a larger count");
        }
        exit
    }

    /// A gate, whose shares are of losses or of logits.
    fn gate(&mut self, group: &Group) -> Option<Exit> {
        match (self.has(group, "gate"), self.has(group, "expected")) {
            (true, false) => self.real(group, "gate").map(Exit::Gate),
            (false, true) => self.real(group, "expected").map(Exit::Expected),
            (false, false) => {
                let help =
                    "write `gate 0.1` for shares of the loss, or `expected 0.1` for shares of the logits";
                self.error("missing-key", group.at, "an `exit` of its own has a weight of its gate", help);
                None
            }
            (true, true) => {
                let message = "`gate` shares out losses and `expected` logits: an `exit` has one of them";
                self.error_at("exit", &group.path("expected"), message, "take one of the two away");
                None
            }
        }
    }

    /// Loops whose passes use the keys and values of the first.
    pub(super) fn first_keys(&mut self, items: &[Item], components: &Components) {
        for (index, item) in items.iter().enumerate() {
            let Item::Recur { looping, items, .. } = item else { continue };
            let key = match looping.kv {
                PassKeys::Own => continue,
                PassKeys::First => "kv first",
                PassKeys::Replaced => "kv replaced",
            };
            let mut wrong: Vec<(String, String)> = match makers(items, components) {
                makers if makers.is_empty() => vec![(
                    "no attention inside makes keys of the sequence, which passes could share".into(),
                    format!("take `{key}` away"),
                )],
                makers => {
                    let unshared = |maker| unshared(maker, components, looping.kv);
                    let found = makers.into_iter().filter_map(unshared);
                    found
                        .map(|(message, change)| (message, format!("{change}, or take `{key}` away")))
                        .collect()
                }
            };
            if items.iter().any(|item| leaves_out(item, components)) {
                let message = match looping.kv {
                    PassKeys::Replaced => {
                        "tokens that skip the first pass have no keys there for later passes"
                    }
                    _ => "tokens that skip the first pass have no keys there, and later passes make none",
                };
                let help = format!("let the first pass process all of them, or take `{key}` away");
                wrong.push((message.into(), help));
            }
            if looping.kv == PassKeys::Replaced {
                if !items.iter().any(|item| skips_later(item, components)) {
                    let message = "every token makes keys of its own in every pass: none is left to replace";
                    let help = "let tokens skip later passes (`skip(capacity [1, 0.5], …)`), or take `kv replaced` away";
                    wrong.push((message.into(), help.into()));
                }
                if looping.exit.gate().is_some() {
                    let message =
                        "tokens that leave a loop have the keys of their last pass, not those of the first";
                    wrong.push((message.into(), "take the gate of `exit` or `kv replaced` away".into()));
                }
            }
            for (message, help) in wrong {
                self.error_at("kv-first", &format!("model.body[{index}].kv"), message, &help);
            }
        }
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
        let most = if self.has(group, "max") { "max" } else { at };
        self.too_many_depths(min, max, self.sources.locate(&group.path(most)).unwrap_or(group.at));
        debug_assert!(std::ptr::eq(group.section, &keys::DEPTHS));
        Some(Some(Depths { law, min, max }))
    }
}

/// The sequence attentions of a composition that make keys and values, by name.
fn makers_in<'a>(expr: &'a Expr, components: &'a Components) -> Vec<(&'a str, &'a Attention)> {
    match expr {
        Expr::Norm => vec![],
        Expr::Sequential(terms) | Expr::Parallel(terms) => {
            terms.iter().flat_map(|term| makers_in(term, components)).collect()
        }
        Expr::Skip(_, inner) => makers_in(inner, components),
        Expr::Component(name) => match components.get(name) {
            Some(Some(Component::Sequence(a))) if a.kv_from.is_none() => vec![(name, a)],
            _ => vec![],
        },
    }
}

fn makers<'a>(items: &'a [Item], components: &'a Components) -> Vec<(&'a str, &'a Attention)> {
    let each = items.iter().flat_map(|item| match item {
        Item::Layer(expr) => makers_in(expr, components),
        Item::Statement(_) => vec![],
        Item::Repeat { items, .. } | Item::Recur { items, .. } => makers(items, components),
    });
    let mut seen = std::collections::HashSet::new();
    each.filter(|(name, _)| seen.insert(*name)).collect()
}

/// Why passes cannot use the first's keys of an attention, and a way out.
fn unshared(
    (name, a): (&str, &Attention),
    components: &Components,
    kv: PassKeys,
) -> Option<(String, &'static str)> {
    if a.projection.is_some() && kv == PassKeys::First {
        let message = format!(
            "`{name}` mixes projections, which give each pass keys of its own; `kv first` has those of the first alone"
        );
        return Some((message, "write `projection none` in the attention"));
    }
    if a.latent.is_some() {
        let message = format!("`{name}` makes its keys of latent vectors of the pass");
        return Some((message, "take `latent` away"));
    }
    if a.depth_keys {
        let message =
            format!("`{name}` sees keys of its earlier passes (`depth_keys`), which are those of the first");
        return Some((message, "take `depth_keys` away"));
    }
    if a.depth_stream.is_some() {
        let message = format!("`{name}` leaves keys of each pass (`depth_stream`)");
        return Some((message, "take `depth_stream` away"));
    }
    let reader = components.iter().find_map(|(reader, c)| match c {
        Some(Component::Sequence(r)) if r.kv_from.as_deref() == Some(name) => Some(reader),
        _ => None,
    });
    reader.map(|reader| {
        let message = match kv {
            PassKeys::Replaced => {
                format!("`{reader}` reads the latest keys of `{name}`, some of which are of the first pass")
            }
            _ => format!("`{reader}` reads the latest keys of `{name}`, and later passes make none"),
        };
        (message, "give it keys of its own")
    })
}

/// Whether some token may skip an attention in a pass after the first.
fn skips_later(item: &Item, components: &Components) -> bool {
    let layers = match item {
        Item::Layer(expr) => return expr_skips_later(expr, components),
        Item::Statement(_) => return false,
        Item::Repeat { items, .. } | Item::Recur { items, .. } => items,
    };
    layers.iter().any(|item| skips_later(item, components))
}

fn expr_skips_later(expr: &Expr, components: &Components) -> bool {
    match expr {
        Expr::Component(_) | Expr::Norm => false,
        Expr::Sequential(terms) | Expr::Parallel(terms) => {
            terms.iter().any(|term| expr_skips_later(term, components))
        }
        Expr::Skip(skip, inner) => {
            let leaves = skip.rule.chosen() || skip.capacities.iter().skip(1).any(|share| *share < 1.0);
            leaves && !makers_in(inner, components).is_empty() || expr_skips_later(inner, components)
        }
    }
}

/// Whether some token may skip an attention in the first pass and leave no keys there.
fn leaves_out(item: &Item, components: &Components) -> bool {
    fn within(expr: &Expr, components: &Components) -> bool {
        match expr {
            Expr::Component(_) | Expr::Norm => false,
            Expr::Sequential(terms) | Expr::Parallel(terms) => {
                terms.iter().any(|term| within(term, components))
            }
            Expr::Skip(skip, inner) => {
                let all = match skip.rule {
                    SkipRule::TopK { capacity, .. } => capacity >= 1.0,
                    SkipRule::Threshold { .. } => skip.kv == SkipKv::All,
                    // No token chooses to make no pass.
                    SkipRule::DepthChoice { .. } => true,
                };
                !all && !makers_in(inner, components).is_empty() || within(inner, components)
            }
        }
    }
    match item {
        Item::Layer(expr) => within(expr, components),
        Item::Statement(_) => false,
        Item::Repeat { items, .. } | Item::Recur { items, .. } => {
            items.iter().any(|item| leaves_out(item, components))
        }
    }
}
