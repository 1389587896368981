//! Suites.

use std::collections::HashSet;

use super::recipe::transfer_rule;
use super::{Checker, Group, flip};
use crate::ast::{Map, Value, ValueKind};
use crate::keys::{self, Type};
use crate::source::{SourceMap, Span};
use crate::spec::TransferRule;
use crate::suite::*;

/// Fields of the recipe that arms may tune.
pub const TUNED: [&str; 6] =
    ["learning_rate", "weight_decay", "warmup", "eps", "clip", "optimizer.matrix_rate"];

/// Fields of the recipe that a ladder scales with the steps of its cells.
const SCALED: [&str; 3] = ["train.warmup", "train.schedule", "train.evaluate.every"];

/// Whether a field is this one or one below it.
fn under(field: &str, above: &str) -> bool {
    field.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Checker {
    /// The suite; `None` where an error was found.
    pub(crate) fn suite(&mut self, root: &Map) -> Option<Suite> {
        let at = root.items.first().map_or(Span::new(0, 0), |item| item.node.key.span);
        let group = self.group(&keys::SUITE, root, String::new(), at);
        self.lets(&group);
        let (name, baseline) = (self.text(&group, "name"), self.text(&group, "baseline"));
        self.folder_name(name.as_deref(), "name", "suite");
        let variants = self.variants(&group);
        let data = self.section(&group, "data").map(|group| self.data(&group));
        let mut seed = false;
        let train = self.section(&group, "train").map(|group| {
            seed = self.has(&group, "seed");
            self.train(&group)
        });
        let eval = self.section(&group, "eval").map(|group| self.eval(&group));
        let sweep = self.sweep(&group);
        let sweep_edge = self.word(&group, "sweep_edge").map(|word| word == "allow");
        let equal = self.equal(&group, sweep.as_deref().unwrap_or_default());
        let seeds = self.seeds(&group);
        let ladder =
            self.section(&group, "ladder").map(|ladder| self.ladder(&ladder, &group, seeds.as_deref()));
        if let (Some(Some(ladder)), Some(Some(train))) = (&ladder, &train)
            && let Some(rule) = ladder.transfer
        {
            self.transferable("ladder.transfer", rule, train.optimizer);
            if train.transfer.is_some() {
                let message = "two rules: the ladder has one, too";
                self.error_at("duplicate-key", "train.transfer", message, "take one of them away");
            }
        }
        let cools = flip(ladder.clone()).flatten().is_some_and(|ladder| ladder.cooldown.is_some());
        if cools && self.has_schedule(&group, false) {
            let message = "`cooldown` of the ladder takes the place of a schedule";
            self.error_at("duplicate-key", "train.schedule", message, "take one of them away");
        }
        if let (Some(sweep), Some(false)) = (&sweep, sweep_edge) {
            for (field, _) in sweep.iter().filter(|(_, values)| values.len() < 3) {
                let message =
                    format!("`{field}` has fewer than three values: the best is at an end of the list");
                let help = "write three or more, or `sweep_edge: allow`";
                self.error_at("out-of-range", "sweep", message, help);
            }
        }
        self.once_said(variants.as_deref(), sweep.as_deref(), flip(ladder.clone()).flatten().as_ref());
        if seed {
            let help = "take it away, and write `seeds: [0, 1, 2]`";
            self.error_at("unreached", "train.seed", "the suite's `seeds` are those of all arms", help);
        }
        self.unused_lets(&group);
        Some(Suite {
            name: name?,
            baseline: baseline?,
            variants: variants?,
            data: flip(data)?,
            train: flip(train)?,
            eval: flip(eval)?,
            equal: equal?,
            seeds: seeds?,
            sweep: sweep?,
            sweep_edge: sweep_edge?,
            ladder: flip(ladder)?,
            sources: SourceMap::default(),
        })
    }

    /// Refuses a field of a variant that something else of the suite gives a value, too: one of the
    /// two would be lost. A field that `match` moves begins at the value that is set.
    fn once_said(
        &mut self,
        variants: Option<&[Variant]>,
        sweep: Option<&[(String, Vec<f64>)]>,
        ladder: Option<&Ladder>,
    ) {
        let sweep = sweep.unwrap_or_default();
        let sizes = ladder.map_or(&[][..], |ladder| &ladder.sizes);
        let sized = |field: &str| sizes.iter().find(|s| s.values.iter().any(|(f, _)| f == field));
        for (field, _) in sweep.iter().filter(|(field, _)| sized(field).is_some()) {
            let message = format!("the sizes of the ladder set `{field}`, too");
            self.error_at("duplicate-key", "sweep", message, "take it away in one of the two");
        }
        for (i, variant) in variants.unwrap_or_default().iter().enumerate() {
            for set in &variant.set {
                let field = set.split_once('=').map_or(&**set, |(field, _)| field);
                let (message, help) = if field == "train.seed" {
                    ("the suite's `seeds` are those of all arms".into(), "take it away")
                } else if field == "train.steps" && ladder.is_some() {
                    ("the budgets of the ladder give every cell its steps".into(), "take it away")
                } else if ladder.is_some() && SCALED.iter().any(|scaled| under(field, scaled)) {
                    (
                        format!("the ladder scales `{field}` of the suite with the steps of a cell"),
                        "write it in the suite's `train`, for all arms",
                    )
                } else if sweep.iter().any(|(swept, _)| swept == field) {
                    (format!("the sweep gives `{field}` its values"), "take it away in one of the two")
                } else if let Some(size) = sized(field) {
                    (
                        format!("the size `{}` of the ladder sets `{field}`", size.name),
                        "take it away in one of the two",
                    )
                } else {
                    continue;
                };
                self.error_at("duplicate-key", &format!("variants[{i}].set.{field}"), message, help);
            }
        }
    }

    fn variants(&mut self, group: &Group) -> Option<Vec<Variant>> {
        let elements = self.elements(group, "variants")?;
        let mut names = HashSet::new();
        let mut variants = Vec::new();
        for (value, path) in elements {
            let kind = Type::Section(&keys::VARIANT);
            let inner = self.section_of(&keys::VARIANT, &kind, "variants", value, path, value.span);
            let variant = inner.and_then(|group| self.variant(&group, &mut names));
            variants.push(variant);
        }
        variants.into_iter().collect()
    }

    fn variant(&mut self, group: &Group, names: &mut HashSet<String>) -> Option<Variant> {
        let name = self.text_or_none(group, "name");
        if let Some(Some(name)) = &name
            && !names.insert(name.clone())
        {
            let message = format!("two variants are called `{name}`");
            self.error_at("duplicate-key", &group.path("name"), message, "choose another name");
        }
        self.folder_name(name.as_ref().and_then(|n| n.as_deref()), &group.path("name"), "variant");
        let spec = self.text(group, "spec");
        let set = match self.written(group, "set") {
            None => Some(Vec::new()),
            Some(Value { kind: ValueKind::Map(map), .. }) => self.settings(map, &group.path("set")),
            Some(value) => {
                self.wrong_type("set", &Self::kind(group, "set"), value);
                None
            }
        };
        let matching = self.section(group, "match").map(|group| self.match_fields(&group));
        Some(Variant { name: name?, spec: spec?, set: set?, matching: flip(matching)? })
    }

    /// Overrides as `--set` takes them. Numbers are computed here, where the suite's `let` names
    /// are known.
    fn settings(&mut self, map: &Map, path: &str) -> Option<Vec<String>> {
        let mut settings = Some(Vec::new());
        for item in &map.items {
            let (key, value) = (&item.node.key, &item.node.value);
            self.sources.fields.insert(format!("{path}.{}", key.text), value.span);
            let known = |word: &str, names: &crate::number::Lets| names.names().any(|name| name == word);
            let text = match &value.kind {
                ValueKind::Word(word) if !known(word, &self.lets) => Some(word.clone()),
                ValueKind::Text(text) => Some(text.clone()),
                ValueKind::Bool(value) => Some(value.to_string()),
                _ => self.number(&key.text, &Type::Any, value).map(|number| number.to_string()),
            };
            settings = settings.zip(text).map(|(mut all, text)| {
                all.push(format!("{}={text}", key.text));
                all
            });
        }
        settings
    }

    /// Fields and the values that every arm tries, least first.
    fn sweep(&mut self, owner: &Group) -> Option<Vec<(String, Vec<f64>)>> {
        let map = match self.written(owner, "sweep") {
            None => return Some(vec![]),
            Some(Value { kind: ValueKind::Map(map), .. }) => map,
            Some(value) => {
                self.wrong_type("sweep", &Self::kind(owner, "sweep"), value);
                return None;
            }
        };
        self.once(map);
        let mut all = Some(vec![]);
        for item in &map.items {
            let (key, value) = (&item.node.key, &item.node.value);
            let known = key.text.strip_prefix("train.");
            if known.is_some_and(|field| !TUNED.contains(&field)) {
                let names = crate::suggest::listing(TUNED).replace(" or ", " and ");
                let message = format!("`{}` cannot be tuned by a sweep", key.text);
                let help = format!(
                    "of `train` the arms may tune {names}; a field of the model goes without `train.`"
                );
                self.error("unknown-field", key.span, message, help);
            }
            let ValueKind::List(list) = &value.kind else {
                self.wrong_type(&key.text, &Type::List(&Type::Real(keys::Range::Any)), value);
                all = None;
                continue;
            };
            let kind = Type::Real(keys::Range::Positive);
            let values: Vec<Option<f64>> = list
                .items
                .iter()
                .map(|v| self.real_of(&key.text, &kind, keys::Range::Positive, &v.node))
                .collect();
            let values: Option<Vec<f64>> = values.into_iter().collect();
            all = all.zip(values).map(|(mut all, mut values)| {
                values.sort_by(f64::total_cmp);
                values.dedup();
                all.push((key.text.clone(), values));
                all
            });
        }
        all
    }

    fn ladder(&mut self, group: &Group, owner: &Group, seeds: Option<&[u64]>) -> Option<Ladder> {
        let sizes = self.sizes(group);
        let budgets: Option<Vec<f64>> = {
            let elements = self.elements(group, "budgets")?;
            let kind = Type::Real(keys::Range::Positive);
            let budgets: Vec<_> = elements
                .iter()
                .map(|(value, _)| self.real_of("budgets", &kind, keys::Range::Positive, value))
                .collect();
            budgets.into_iter().collect()
        };
        let mut budgets = budgets?;
        budgets.sort_by(f64::total_cmp);
        budgets.dedup();
        if budgets.is_empty() {
            self.error_at(
                "empty",
                &group.path("budgets"),
                "`budgets` is empty",
                "write some, such as `[1e12, 4e12]`",
            );
        }
        let gate = self.bool(group, "gate");
        let cooldown = self.real_or_none(group, "cooldown");
        if cooldown == Some(Some(0.0)) {
            let help = "write a share such as `cooldown: 0.2`";
            self.error_at("out-of-range", &group.path("cooldown"), "a decay over no steps", help);
        }
        let transfer = self.word(group, "transfer").map(transfer_rule);
        let (halving, recheck) = (self.int_or_none(group, "halving"), self.bool(group, "recheck"));
        if halving.flatten().is_some() && !self.has(owner, "sweep") {
            let help = "write a `sweep`, such as `sweep: {train.learning_rate: [1e-3, 2e-3, 4e-3]}`";
            self.error_at("unreached", &group.path("halving"), "there are no values to try", help);
        }
        if let (Some(true), Some([_])) = (recheck, sizes.as_deref()) {
            let help = "write another size, or take `recheck` away";
            self.error_at("unreached", &group.path("recheck"), "the ladder has one size alone", help);
        }
        let steady = cooldown.flatten().is_some();
        if transfer == Some(Some(TransferRule::Hyperp)) && steady {
            let message =
                "`hyperp` gives every number of tokens a rate of its own, and a trunk has one for all";
            let help = "take `cooldown` away, or write `transfer: mup`";
            self.error_at("unreached", &group.path("transfer"), message, help);
        }
        if gate == Some(true) && seeds.is_some_and(|seeds| seeds.len() < 2) {
            let help = "write `seeds: [0, 1, 2]`, or take `gate` away";
            self.error_at(
                "unreached",
                &group.path("gate"),
                "one seed shows no noise to judge an arm by",
                help,
            );
        }
        if !self.has(owner, "train") {
            let help = "give the suite a `train` section: the steps of its cells follow from the budgets";
            self.error("missing-key", group.at, "a ladder without `train`", help);
        } else if !self.has(group, "cooldown") && !self.has_schedule(owner, true) {
            let help = "write `schedule: cosine`, `linear` or `{kind: wsd, decay: 200}` in `train`";
            let message = "a ladder compares the ends of runs, and a constant rate never decays to one";
            self.error("constant-rate", group.at, message, help);
        }
        Some(Ladder {
            sizes: sizes?,
            budgets,
            gate: gate?,
            cooldown: cooldown?,
            transfer: transfer?,
            halving: halving?,
            recheck: recheck?,
        })
    }

    /// Whether the suite's `train` has a schedule that decays; `otherwise` where there is no
    /// `train`.
    fn has_schedule(&mut self, owner: &Group, otherwise: bool) -> bool {
        let Some(Value { kind: ValueKind::Map(train), .. }) = self.written(owner, "train") else {
            return otherwise;
        };
        match train.get("schedule").map(|pair| &pair.value.kind) {
            None => false,
            Some(ValueKind::Word(word)) => word != "constant",
            Some(ValueKind::Map(map)) => {
                !matches!(map.get("kind").map(|pair| &pair.value.kind), Some(ValueKind::Word(w)) if w == "constant")
            }
            Some(_) => true,
        }
    }

    /// Refuses a name that a person gave twice: of two lists one would be lost.
    pub(super) fn once(&mut self, map: &Map) {
        let mut seen = HashSet::new();
        for key in map.items.iter().map(|item| &item.node.key).filter(|key| !seen.insert(&key.text)) {
            self.error(
                "duplicate-key",
                key.span,
                format!("`{}` is written twice", key.text),
                "take one away",
            );
        }
    }

    fn sizes(&mut self, group: &Group) -> Option<Vec<Size>> {
        let map = match self.written(group, "sizes") {
            Some(Value { kind: ValueKind::Map(map), .. }) if !map.items.is_empty() => map,
            Some(value) => {
                self.wrong_type("sizes", &Self::kind(group, "sizes"), value);
                return None;
            }
            None => {
                let help = "write `sizes: {small: {h: 32}, large: {h: 64}}`";
                self.error("missing-key", group.at, "`sizes` is missing in ladder", help);
                return None;
            }
        };
        self.once(map);
        let mut sizes = Some(vec![]);
        for item in &map.items {
            let (key, value) = (&item.node.key, &item.node.value);
            let path = group.path("sizes");
            self.sources.fields.insert(format!("{path}.{}", key.text), key.span);
            self.folder_name(Some(&key.text), &format!("{path}.{}", key.text), "size");
            let ValueKind::Map(values) = &value.kind else {
                self.wrong_type(&key.text, &Type::Names(&Type::Real(keys::Range::Any)), value);
                sizes = None;
                continue;
            };
            self.once(values);
            let mut found = Some(vec![]);
            for pair in &values.items {
                let number = self.number(&pair.node.key.text, &Type::Any, &pair.node.value);
                found = found.zip(number).map(|(mut all, number)| {
                    all.push((pair.node.key.text.clone(), number.real()));
                    all
                });
            }
            sizes = sizes.zip(found).map(|(mut all, values)| {
                all.push(Size { name: key.text.clone(), values });
                all
            });
        }
        sizes
    }

    fn equal(&mut self, owner: &Group, sweep: &[(String, Vec<f64>)]) -> Option<Equal> {
        let group = self.section_or_default(owner, "equal", &keys::EQUAL);
        let tuning = match self.has(&group, "tuning") {
            true => self.bool(&group, "tuning"),
            false => Some(!sweep.is_empty()),
        };
        if tuning == Some(true) && sweep.is_empty() {
            let help = "write `sweep: {train.learning_rate: [1e-3, 2e-3, 4e-3]}`, or take `tuning` away";
            self.error_at("unreached", &group.path("tuning"), "equal tuning without a `sweep`", help);
        }
        let tuned = tuning.map(|on| sweep.iter().filter(|_| on).map(|(field, _)| field.clone()).collect());
        let (flops, parameters) =
            (self.real_or_none(&group, "flops"), self.real_or_none(&group, "parameters"));
        let [training, budget, memory, processed] =
            ["training", "budget", "memory", "flops_processed"].map(|key| self.real_or_none(&group, key));
        let names =
            ["tokens", "data", "order", "tokenizer", "schedule", "optimizer", "batch", "precision", "seeds"];
        let [tokens, data, order, tokenizer, schedule, optimizer, batch, precision, seeds] =
            names.map(|key| self.bool(&group, key));
        let donor = self.bool(&group, "donor");
        Some(Equal {
            flops: flops?,
            flops_processed: processed?,
            training: training?,
            budget: budget?,
            donor: donor?,
            parameters: parameters?,
            memory: memory?,
            tuned: tuned?,
            tokens: tokens?,
            data: data?,
            order: order?,
            tokenizer: tokenizer?,
            schedule: schedule?,
            optimizer: optimizer?,
            batch: batch?,
            precision: precision?,
            seeds: seeds?,
        })
    }

    fn seeds(&mut self, group: &Group) -> Option<Vec<u64>> {
        if !self.has(group, "seeds") {
            return Some(vec![0]);
        }
        let elements = self.elements(group, "seeds")?;
        let kind = Type::Int { min: 0 };
        let seeds: Vec<_> = elements.iter().map(|(value, _)| self.whole("seeds", &kind, 0, value)).collect();
        let seeds: Vec<u64> = seeds.into_iter().collect::<Option<_>>()?;
        let mut seen = HashSet::new();
        for (seed, (value, _)) in seeds.iter().zip(&elements) {
            if !seen.insert(*seed) {
                let help = "a second run would repeat the first bit for bit";
                self.error("duplicate-key", value.span, format!("seed {seed} is listed twice"), help);
            }
        }
        if seeds.is_empty() {
            self.error_at("empty", "seeds", "`seeds` is empty", "write at least one, such as `[0]`");
        }
        Some(seeds)
    }
}
