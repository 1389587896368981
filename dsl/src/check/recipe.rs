//! Data, training, evaluation and matching.

use super::body::MAX_APPLICATIONS;
use super::{Checker, Group, flip};
use crate::ast::{Value, ValueKind};
use crate::keys::{self, Type};
use crate::number;
use crate::optimizer::LAWS;
use crate::source::Span;
use crate::spec::*;
use crate::suggest::listing;
use crate::task::{Facts, Knob};
use indexmap::IndexMap;

/// Whether the loss sees the streams of passes that are not the last.
fn every_pass(items: &[Item]) -> bool {
    items.iter().any(|item| match item {
        Item::Layer(_) | Item::Statement(_) => false,
        Item::Repeat { items, .. } => every_pass(items),
        Item::Recur { items, looping, .. } => !looping.exit.is_last() || every_pass(items),
    })
}

impl Checker {
    pub(super) fn data(&mut self, group: &Group) -> Option<Data> {
        let sources = match self.has(group, "sources") {
            false => self.source(group).map(|source| vec![(source, 1.0)]),
            true => {
                for key in ["task", "text", "jsonl", "parquet"] {
                    if self.has(group, key) {
                        let help = "write it as one of `sources`";
                        self.error_at(
                            "duplicate-key",
                            &group.path(key),
                            format!("`{key}` stands next to `sources`"),
                            help,
                        );
                    }
                }
                self.sources_list(group)
            }
        };
        let tokenizer = self.text(group, "tokenizer").map(|text| match text.as_str() {
            "bytes" => Tokenizer::Bytes,
            path => Tokenizer::File(path.to_string()),
        });
        if let (Some(vocab), Some(Tokenizer::Bytes)) = (self.known.vocab, &tokenizer)
            && vocab < 256
        {
            let message = format!("a vocabulary of {vocab} cannot hold the 256 bytes");
            self.error_at(
                "out-of-range",
                "model.vocab",
                message,
                "write `vocab: 256` or more, or name a `tokenizer`",
            );
        }
        let validation = self.real(group, "validation");
        let validation_file = self.text_or_none(group, "validation_file");
        let begin = if self.has(group, "begin") { self.bool(group, "begin").map(Some) } else { Some(None) };
        let document_mask = self.bool(group, "document_mask");
        let bad_rows = self.word(group, "bad_rows");
        Some(Data {
            sources: sources?,
            tokenizer: tokenizer?,
            validation: validation?,
            validation_file: validation_file?,
            document_mask: document_mask?,
            begin: begin?,
            bad_rows: if bad_rows? == "skip" { BadRows::Skip } else { BadRows::Stop },
        })
    }

    fn sources_list(&mut self, group: &Group) -> Option<Vec<(Source, f64)>> {
        let elements = self.elements(group, "sources")?;
        if elements.is_empty() {
            self.error_at("empty", &group.path("sources"), "`sources` is empty", "write at least one source");
            return None;
        }
        let mut sources = Some(Vec::new());
        for (value, path) in elements {
            let group = self.section_of(
                &keys::SOURCE,
                &Type::Section(&keys::SOURCE),
                "sources",
                value,
                path,
                value.span,
            );
            let source = group.and_then(|group| {
                let (source, weight) = (self.source(&group), self.real(&group, "weight"));
                Some((source?, weight?))
            });
            sources = sources.zip(source).map(|(mut sources, source)| {
                sources.push(source);
                sources
            });
        }
        sources
    }

    fn source(&mut self, group: &Group) -> Option<Source> {
        let kinds: Vec<&'static str> =
            ["task", "text", "jsonl", "parquet"].into_iter().filter(|key| self.has(group, key)).collect();
        let kind = match kinds.as_slice() {
            [kind] => *kind,
            [] => {
                let help = "write one of `task`, `text`, `jsonl` and `parquet`, such as `task: arithmetic`";
                self.error("missing-key", group.at, format!("{} names no source", group.section.name), help);
                return None;
            }
            [first, second, ..] => {
                let message = format!("`{first}` and `{second}` are two sources");
                self.error_at("duplicate-key", &group.path(second), message, "list them under `sources`");
                if *first == "task" {
                    self.task(group);
                }
                return None;
            }
        };
        if kind != "task" {
            self.misplaced_in_data(group, &["min_steps", "max_steps", "longer", "size", "length"], "`task`");
        }
        if !matches!(kind, "jsonl" | "parquet") {
            self.misplaced_in_data(
                group,
                &["prompt", "answer", "rejected", "template"],
                "`jsonl` and `parquet`",
            );
        }
        match kind {
            "task" => self.task(group).map(Source::Task),
            "text" => Some(Source::Text { path: self.text(group, "text")? }),
            _ => {
                let path = self.text(group, kind);
                let prompt = self.text_or_none(group, "prompt");
                let answer = self.text(group, "answer");
                let rejected = self.text_or_none(group, "rejected");
                let template = self.template(group, prompt.as_ref().is_some_and(Option::is_some));
                let (path, prompt, answer, template) = (path?, prompt?, answer?, template?);
                let rejected = rejected?;
                if rejected.is_some() && prompt.is_none() {
                    let message = "`rejected` is the worse answer to a prompt, and there is no `prompt`";
                    self.error_at(
                        "missing-key",
                        &group.path("rejected"),
                        message,
                        "name the field of the prompt",
                    );
                    return None;
                }
                Some(match kind {
                    "jsonl" => Source::Jsonl { path, prompt, answer, rejected, template },
                    _ => Source::Parquet { path, prompt, answer, rejected, template },
                })
            }
        }
    }

    fn misplaced_in_data(&mut self, group: &Group, names: &[&'static str], home: &str) {
        for name in names {
            if self.has(group, name) {
                let message = format!("`{name}` goes with {home}");
                self.error_at("unknown-key", &group.path(name), message, "take it away");
            }
        }
    }

    fn template(&mut self, group: &Group, prompt: bool) -> Option<String> {
        if !self.has(group, "template") {
            return Some(if prompt { "{prompt}\n{answer}" } else { "{answer}" }.to_string());
        }
        let template = self.text(group, "template")?;
        for (place, wanted) in [("{answer}", true), ("{prompt}", prompt)] {
            if template.contains(place) != wanted {
                let message =
                    format!("the template {} `{place}`", if wanted { "lacks" } else { "has no prompt for" });
                let help = "`{prompt}` and `{answer}` stand for the two fields";
                self.error_at("template", &group.path("template"), message, help);
                return None;
            }
        }
        Some(template)
    }

    fn task(&mut self, group: &Group) -> Option<Task> {
        let written = self.word(group, "task");
        let (min_steps, max_steps) = (self.int(group, "min_steps"), self.int(group, "max_steps"));
        let (size, length) = (self.int(group, "size"), self.int(group, "length"));
        let kind = TaskKind::ALL.iter().copied().find(|kind| Some(kind.facts().name) == written)?;
        let facts = kind.facts();
        let or = |has: bool, found: Option<u64>, default: u64| if has { found } else { Some(default) };
        let min_steps = or(self.has(group, "min_steps"), min_steps, facts.steps.least.max(1));
        let default = facts.steps.default.max(min_steps.unwrap_or(0));
        let max_steps = or(self.has(group, "max_steps"), max_steps, default);
        let size = or(self.has(group, "size"), size, facts.size.default);
        let length = match facts.length {
            None => {
                self.misplaced_in_data(group, &["length"], "tasks that have a length");
                Some(None)
            }
            Some(knob) => or(self.has(group, "length"), length, knob.default).map(Some),
        };
        if let (Some(min), Some(max)) = (min_steps, max_steps)
            && min > max
        {
            let message = format!("`min_steps` ({min}) is above `max_steps` ({max})");
            let path = if self.has(group, "min_steps") { "min_steps" } else { "max_steps" };
            self.error_at("out-of-range", &group.path(path), message, "swap them");
        }
        let written = [
            ("min_steps", facts.steps, min_steps),
            ("max_steps", facts.steps, max_steps),
            ("size", facts.size, size),
        ];
        for (key, knob, found) in written {
            self.of_task(group, key, facts, knob, found);
        }
        if let Some(knob) = facts.length {
            self.of_task(group, "length", facts, knob, length.flatten());
        }
        let longer = self.longer(group, facts, max_steps);
        Some(Task {
            kind,
            min_steps: min_steps?,
            max_steps: max_steps?,
            size: size?,
            length: length?,
            longer: longer?,
        })
    }

    /// Refuses a number that a task does not take.
    fn of_task(&mut self, group: &Group, key: &'static str, facts: &Facts, knob: Knob, found: Option<u64>) {
        let Some(found) = found.filter(|n| !knob.takes(*n)) else { return };
        let Knob { about, least, most, .. } = knob;
        let message = format!("`{key}` of {} is out of range: {found}", facts.name);
        let help = format!("{about}: {least} to {most}");
        self.error_at("out-of-range", &group.path(key), message, help);
    }

    /// Steps that are asked beyond those that are learned.
    fn longer(&mut self, group: &Group, facts: &Facts, most: Option<u64>) -> Option<Vec<u64>> {
        if !self.has(group, "longer") || self.is_none(group, "longer") {
            return Some(vec![]);
        }
        let mut all = vec![];
        for (value, path) in self.elements(group, "longer")? {
            let steps = self.whole("longer", &keys::SIZE, 1, value)?;
            let above = all.last().copied().or(most).unwrap_or(0);
            if steps <= above {
                let message = format!("`longer` has {steps} after {above}");
                self.error_at("out-of-range", &path, message, "steps above `max_steps`, in ascending order");
                return None;
            }
            if !facts.steps.takes(steps) {
                let message = format!("`longer` of {} is out of range: {steps}", facts.name);
                let help = format!("{}: at most {}", facts.steps.about, facts.steps.most);
                self.error_at("out-of-range", &path, message, help);
                return None;
            }
            all.push(steps);
        }
        Some(all)
    }

    pub(super) fn train(&mut self, group: &Group) -> Option<Train> {
        let (steps, batch, accumulate) =
            (self.int(group, "steps"), self.int(group, "batch"), self.int(group, "accumulate"));
        if let (Some(batch), Some(accumulate)) = (batch, accumulate)
            && batch % accumulate != 0
        {
            let message = format!("a batch of {batch} cannot be split into {accumulate} equal parts");
            self.error_at("indivisible", &group.path("accumulate"), message, "`accumulate` divides `batch`");
        }
        let memory = self.memory(group, "memory");
        let sequence = self.int_or_none(group, "sequence");
        if let (Some(Some(sequence)), Some(context)) = (sequence, self.known.context)
            && sequence > context
        {
            let message = format!("sequences of {sequence} do not fit the model's context of {context}");
            let help = "make `train.sequence` shorter or `model.context` longer";
            self.error_at("out-of-range", &group.path("sequence"), message, help);
        }
        let learning_rate = self.real(group, "learning_rate");
        let (warmup, schedule) = self.rates(group, steps);
        let optimizer = self.optimizer(group);
        let transfer = self.section(group, "transfer").map(|section| self.transfer(&section, optimizer));
        let betas = self.betas(group);
        let moments = self.moments(group, betas);
        let (eps, weight_decay) = (self.real(group, "eps"), self.real(group, "weight_decay"));
        let decay_embeddings = self.bool(group, "decay_embeddings");
        let clip = self.real_or_none(group, "clip");
        let z_loss = self.real(group, "z_loss");
        let dpo = self.dpo(group, (z_loss, batch, accumulate));
        let seed = self.int(group, "seed");
        let precision = self.word(group, "precision");
        let (only, freeze) = (self.texts(group, "only"), self.texts(group, "freeze"));
        let groups = self.groups(group);
        let parallel = self.parallel(group, accumulate);
        let random_depth = self.random_depth(group);
        let evaluate = self.section_or_default(group, "evaluate", &keys::EVALUATE);
        let evaluate = (self.int(&evaluate, "every"), self.int(&evaluate, "batches"));
        let checkpoint = self.section_or_default(group, "checkpoint", &keys::CHECKPOINT);
        let kept = (self.int(&checkpoint, "every"), self.int(&checkpoint, "keep"));
        let minutes = self.real(&checkpoint, "minutes");
        let kept_too = (self.int(&checkpoint, "keep_every"), self.bool(&checkpoint, "best"));
        let patience = self.int_or_none(group, "patience");
        if let (Some(Some(_)), Some(0)) = (patience, evaluate.0) {
            let help = "write `evaluate: {every: 200}` too";
            self.error_at(
                "unreached",
                &group.path("patience"),
                "patience needs evaluations during training",
                help,
            );
        }
        self.too_short(group, steps, evaluate.0);
        let (on_nan, spike) = (self.word(group, "on_nan"), self.real_or_none(group, "spike"));
        Some(Train {
            steps: steps?,
            batch: batch?,
            accumulate: accumulate?,
            memory: memory?,
            sequence: sequence?,
            learning_rate: learning_rate?,
            warmup: warmup?,
            schedule: schedule?,
            optimizer: optimizer?,
            transfer: flip(transfer)?,
            betas: betas?,
            eps: eps?,
            moments: moments?,
            weight_decay: weight_decay?,
            decay_embeddings: decay_embeddings?,
            clip: clip.or_else(|| (!self.has(group, "clip")).then_some(Some(0.5)))?,
            z_loss: z_loss?,
            dpo: dpo?,
            seed: seed?,
            precision: match precision? {
                "f32" => Precision::F32,
                "fp8" => Precision::Fp8,
                _ => Precision::Bf16,
            },
            only: only?,
            freeze: freeze?,
            groups: groups?,
            parallel: parallel?,
            random_depth: random_depth?,
            evaluate: Evaluate { every: evaluate.0?, batches: evaluate.1? },
            checkpoint: Checkpoint {
                every: kept.0?,
                minutes: minutes?,
                keep: kept.1?,
                keep_every: kept_too.0?,
                best: kept_too.1?,
            },
            patience: patience?,
            on_nan: if on_nan? == "skip" { OnNan::Skip } else { OnNan::Stop },
            spike: spike?,
        })
    }

    /// How ranks share the training: as a mesh, or key by key.
    fn parallel(&mut self, owner: &Group, accumulate: Option<u64>) -> Option<Parallel> {
        if self.has(owner, "ranks") {
            return self.mesh(owner, accumulate);
        }
        let group = self.section_or_default(owner, "parallel", &keys::PARALLEL);
        let (data, shard) = (self.int_or_none(&group, "data"), self.word(&group, "shard"));
        let experts = self.int(&group, "experts");
        self.shared(&group, ("data", data.flatten()), (experts, accumulate));
        Some(Parallel { data: data?, shard: Shard::of(shard?).unwrap_or_default(), experts: experts? })
    }

    /// The same as a mesh: the ranks in all, by what is cut over them, and the teams of experts.
    fn mesh(&mut self, owner: &Group, accumulate: Option<u64>) -> Option<Parallel> {
        let group = self.section(owner, "ranks")?;
        if self.has(owner, "parallel") {
            let message = "`parallel` says how ranks share the training, too";
            self.error_at("twice", &owner.path("ranks"), message, "take one of the two away");
        }
        let forms = [("data", Shard::None), ("states", Shard::Optimizer), ("shard", Shard::Weights)];
        let mut found: Vec<(&str, Option<u64>, Shard)> = vec![];
        for (name, shard) in forms {
            let ranks = self.int_or_none(&group, name)?;
            if ranks.is_some() {
                found.push((name, ranks, shard));
            }
        }
        let experts = self.int(&group, "experts");
        if let [(first, ..), (second, ..), ..] = found[..] {
            let message = format!("`{first}` and `{second}` both count all ranks");
            let help = "write one of them: `data 8` keeps all of it on each rank, `states 8` cuts the optimizer's states, \
                        `shard 8` cuts weights, gradients and states";
            self.error_at("twice", &group.path(second), message, help);
            return None;
        }
        let (name, data, shard) = found.pop().unwrap_or(("data", None, Shard::None));
        self.shared(&group, (name, data), (experts, accumulate));
        Some(Parallel { data, shard, experts: experts? })
    }

    /// Refuses ranks that cannot share the micro-batches of a step, or that teams do not fill.
    fn shared(
        &mut self,
        group: &Group,
        (name, ranks): (&str, Option<u64>),
        (experts, accumulate): (Option<u64>, Option<u64>),
    ) {
        let Some(ranks) = ranks else { return };
        if let Some(accumulate) = accumulate.filter(|accumulate| accumulate % ranks != 0) {
            let message = format!("{ranks} ranks cannot share {accumulate} micro-batches equally");
            let help = "make `accumulate` a multiple of the ranks";
            self.error_at("indivisible", &group.path(name), message, help);
        }
        if let Some(experts) = experts.filter(|experts| ranks % experts != 0) {
            let message = format!("teams of {experts} ranks do not fill {ranks} ranks");
            let help = format!(
                "`{name}` counts all ranks, and `experts` those that own the experts together: it divides `{name}`"
            );
            self.error_at("indivisible", &group.path("experts"), message, help);
        }
    }

    fn dpo(
        &mut self,
        owner: &Group,
        (z_loss, batch, accumulate): (Option<f64>, Option<u64>, Option<u64>),
    ) -> Option<Option<Dpo>> {
        if !self.has(owner, "dpo") || self.is_none(owner, "dpo") {
            return Some(None);
        }
        let group = self.section(owner, "dpo")?;
        let (beta, smoothing) = (self.real(&group, "beta"), self.real(&group, "smoothing"));
        if let Some(smoothing) = smoothing.filter(|&share| share >= 0.5) {
            let message = format!("`smoothing` is {smoothing}: most pairs would be the wrong way round");
            self.error_at("out-of-range", &group.path("smoothing"), message, "write less than 0.5");
        }
        if z_loss.is_some_and(|weight| weight != 0.0) {
            let message = "`z_loss` is of tokens that have a target, and `dpo` compares whole answers";
            self.error_at("unreached", &owner.path("z_loss"), message, "take one of them away");
        }
        if let (Some(batch), Some(accumulate)) = (batch, accumulate.filter(|&parts| parts > 0))
            && batch % accumulate == 0
            && !(batch / accumulate).is_multiple_of(2)
        {
            let rows = batch / accumulate;
            let message = format!("{rows} sequences at a time are no whole pairs");
            self.error_at(
                "indivisible",
                &owner.path("batch"),
                message,
                "`batch / accumulate` is even with `dpo`",
            );
        }
        Some(Some(Dpo { beta: beta?, smoothing: smoothing? }))
    }

    /// Refuses ranks that cannot own the experts of a mixture equally. How many projections an
    /// attention has may follow from its layers, which compiling finds.
    pub(super) fn teams(&mut self, spec: &Spec, train: &Group) {
        let team = spec.train.parallel.experts;
        let home = if self.has(train, "ranks") { "ranks" } else { "parallel" };
        let path = train.path(&format!("{home}.experts"));
        let experts = spec.model.components.iter().filter_map(|(name, c)| Some((name, c.owned()?)));
        let odd: Vec<(String, u64)> = experts
            .filter(|(_, count)| count % team != 0)
            .map(|(name, count)| (name.clone(), count))
            .collect();
        for (name, count) in odd {
            let message = format!("{team} ranks cannot own the {count} experts of `{name}` equally");
            let help = "make it divide the experts of every mixture";
            self.error_at("indivisible", &path, message, help);
        }
    }

    /// Preferences and pairs go together.
    pub(super) fn preferences(&mut self, spec: &Spec) {
        let Some(data) = &spec.data else { return };
        let pairs = data.sources.iter().filter(|(source, _)| source.rejected().is_some()).count();
        let data_path = if pairs > 0 && data.sources.len() == 1 { "data.rejected" } else { "data" };
        let (path, message, help) = match (spec.train.dpo, pairs) {
            (None, 0) => return,
            (Some(_), 1) if data.sources.len() == 1 => {
                if !every_pass(&spec.model.body) {
                    return;
                }
                let message = "`dpo` compares whole answers, and the loss of this model is of every pass";
                ("train.dpo", message.to_string(), "take the `exit` of the `recur` away")
            }
            (Some(_), 0) => {
                let help = "write `data: {jsonl: FILE, prompt: prompt, answer: chosen, rejected: rejected}`";
                ("train.dpo", "`dpo` learns from pairs, and `data` has none".to_string(), help)
            }
            (Some(_), _) => {
                let message = "pairs are read from one source, and there are several".to_string();
                ("data.sources", message, "join the files")
            }
            (None, _) => {
                let message = "rows with a `rejected` answer are pairs, for `train.dpo`".to_string();
                (data_path, message, "write `train: {dpo: {beta: 0.1}}`, or take `rejected` away")
            }
        };
        self.error_at("preferences", path, message, help);
    }

    fn optimizer(&mut self, owner: &Group) -> Option<OptimizerKind> {
        if !self.has(owner, "optimizer") {
            return Some(OptimizerKind::AdamW);
        }
        let group = self.section(owner, "optimizer")?;
        let kind = self.word(&group, "kind")?;
        let (momentum, rate) = (self.real(&group, "momentum"), self.real(&group, "matrix_rate"));
        let law = LAWS.iter().find(|law| law.word == kind)?;
        for key in ["momentum", "matrix_rate"] {
            if self.has(&group, key) && !law.constants.contains(&key) {
                let reads = LAWS.iter().filter(|law| law.constants.contains(&key));
                let reads: Vec<String> = reads.map(|law| format!("`{}`", law.word)).collect();
                let reads = listing(reads.iter().map(String::as_str)).replace(" or ", " and ");
                let message = format!("`{key}` does not go with `{kind}`: it is about {reads}");
                self.error_at("unknown-key", &group.path(key), message, "take it away");
            }
        }
        Some((law.of)(Matrices { momentum: momentum?, rate: rate? }))
    }

    pub(super) fn memory(&mut self, group: &Group, key: &'static str) -> Option<Option<u64>> {
        let Some(text) = self.text_or_none(group, key)? else { return Some(None) };
        let bytes = number::bytes(&text);
        if bytes.is_none() {
            let message = format!("`{text}` is no amount of memory");
            let help = "write a number and its unit: `500MB`, `8GB`, `7.5GiB`";
            self.error_at("wrong-type", &group.path(key), message, help);
        }
        bytes.map(Some)
    }

    fn transfer(&mut self, group: &Group, optimizer: Option<OptimizerKind>) -> Option<Transfer> {
        let rule = self.word(group, "rule").map(transfer_rule);
        let (width, depth) = (self.int(group, "width"), self.int(group, "depth"));
        let tokens = if self.has(group, "tokens") { self.int(group, "tokens").map(Some) } else { Some(None) };
        let passes = if self.has(group, "passes") { self.int(group, "passes").map(Some) } else { Some(None) };
        let sizes = self.sizes_at_base(group);
        let rule = rule.flatten()?;
        if let Some(optimizer) = optimizer {
            self.transferable(&group.path("rule"), rule, optimizer);
        }
        match (rule, tokens) {
            (TransferRule::Hyperp, Some(None)) => {
                let help = "write the training tokens of the run whose rate this is";
                self.error("missing-key", group.at, "`tokens` is missing in transfer", help);
            }
            (
                TransferRule::Mup
                | TransferRule::Completep
                | TransferRule::Spectral
                | TransferRule::Standard
                | TransferRule::Umup,
                Some(Some(_)),
            ) => {
                let message = format!(
                    "`tokens` does not go with `{}`, which looks at width and depth alone",
                    rule.word()
                );
                self.error_at("unknown-key", &group.path("tokens"), message, "take it away");
            }
            (
                TransferRule::Mup
                | TransferRule::Completep
                | TransferRule::Spectral
                | TransferRule::Standard
                | TransferRule::Hyperp
                | TransferRule::Umup,
                _,
            ) => {}
        }
        if passes.flatten().is_some() && self.known.recurrent == Some(false) {
            let help = "take it away, or write a `recur` in the body";
            self.error_at("unreached", &group.path("passes"), "the body has no `recur`", help);
        }
        let (passes, tokens) = (passes?, tokens?);
        Some(Transfer { rule, width: width?, depth: depth?, passes, tokens, sizes: sizes? })
    }

    /// Sizes of components by path.
    fn sizes_at_base(&mut self, group: &Group) -> Option<IndexMap<String, u64>> {
        let mut found = Some(IndexMap::new());
        let map = match self.written(group, "sizes") {
            None => return found,
            Some(Value { kind: ValueKind::Map(map), .. }) => map,
            Some(value) => {
                self.wrong_type("sizes", &Self::kind(group, "sizes"), value);
                return None;
            }
        };
        self.once(map);
        for item in &map.items {
            let (key, value) = (&item.node.key, &item.node.value);
            self.sources.fields.insert(format!("{}.{}", group.path("sizes"), key.text), key.span);
            let number = self.number(&key.text, &keys::SIZE, value);
            let size = number.as_ref().and_then(|n| u64::try_from(n.whole()?).ok()).filter(|size| *size > 0);
            if number.is_some() && size.is_none() {
                self.wrong_type(&key.text, &keys::SIZE, value);
            }
            found = found.zip(size).map(|(mut all, size)| {
                all.insert(key.text.clone(), size);
                all
            });
        }
        found
    }

    /// Refuses a rule that says nothing about the recipe's optimizer.
    pub(super) fn transferable(&mut self, field: &str, rule: TransferRule, optimizer: OptimizerKind) {
        let mut names = self.known.components.iter().map(|(name, _)| format!("`{name}`"));
        let matrices = match (names.next(), names.next()) {
            (None, _) => "matrices".to_string(),
            (Some(one), None) => format!("the matrices of {one}"),
            (Some(one), Some(_)) => format!("the matrices of {one} and of other components"),
        };
        let (message, help) = match (rule, optimizer.pace()) {
            (TransferRule::Mup | TransferRule::Completep | TransferRule::Spectral, Pace::Norms) => {
                let (rule, law) = (rule.word(), optimizer.word());
                (
                    format!("`{rule}` has no rule for `{law}`, by which {matrices} keep their norm"),
                    "write `hyperp`, or another optimizer",
                )
            }
            (TransferRule::Umup, Pace::Gradients | Pace::Matrices | Pace::Norms) => (
                format!(
                    "`umup` has no rule for steps of {matrices} that follow the size of gradients or whole matrices"
                ),
                "write `mup`, or `optimizer: adamw`",
            ),
            (TransferRule::Hyperp, Pace::Alike | Pace::Gradients | Pace::Matrices) => {
                ("`hyperp` is about matrices of a fixed norm".into(), "write `optimizer: muonh`, or `mup`")
            }
            (
                TransferRule::Mup | TransferRule::Completep | TransferRule::Spectral,
                Pace::Alike | Pace::Gradients | Pace::Matrices,
            )
            | (TransferRule::Standard, _)
            | (TransferRule::Umup, Pace::Alike)
            | (TransferRule::Hyperp, Pace::Norms) => return,
        };
        self.error_at("unreached", field, message, help);
    }

    /// In bf16 a mean stands still where a step changes it by less than half of its last bit.
    fn moments(&mut self, group: &Group, betas: Option<(f64, f64)>) -> Option<Precision> {
        const MOST: f64 = 1.0 - 1.0 / 256.0;
        let moments = self.word(group, "moments")?;
        if moments == "f32" {
            return Some(Precision::F32);
        }
        let (first, second) = betas?;
        if first.max(second) > MOST {
            let message = format!("a mean that keeps {} of itself stands still in bf16", first.max(second));
            let help = "write `betas: [0.9, 0.95]`, or leave `moments` at f32";
            self.error_at("out-of-range", &group.path("moments"), message, help);
            return None;
        }
        Some(Precision::Bf16)
    }

    fn betas(&mut self, group: &Group) -> Option<(f64, f64)> {
        if !self.has(group, "betas") {
            return Some((0.9, 0.999));
        }
        let kind = Type::Real(keys::Range::Fraction);
        let values: Vec<_> = self.elements(group, "betas")?;
        let betas: Vec<_> = values
            .iter()
            .map(|(value, _)| self.real_of("betas", &kind, keys::Range::Fraction, value))
            .collect();
        match betas.as_slice() {
            [first, second] => Some(((*first)?, (*second)?)),
            _ => {
                self.error_at(
                    "wrong-type",
                    &group.path("betas"),
                    "`betas` are two numbers",
                    "write `[0.9, 0.999]`",
                );
                None
            }
        }
    }

    pub(super) fn texts(&mut self, group: &Group, key: &'static str) -> Option<Vec<String>> {
        let elements = self.elements(group, key)?;
        let texts: Vec<_> = elements.iter().map(|(value, _)| self.text_of(key, &Type::Text, value)).collect();
        texts.into_iter().collect()
    }

    fn groups(&mut self, group: &Group) -> Option<Vec<crate::spec::Group>> {
        let mut groups = Vec::new();
        for (value, path) in self.elements(group, "groups")? {
            let kind = Type::Section(&keys::GROUP);
            let read =
                self.section_of(&keys::GROUP, &kind, "groups", value, path, value.span).and_then(|group| {
                    let pattern = self.text(&group, "pattern");
                    let learning_rate = self.real(&group, "learning_rate");
                    let weight_decay = self.real_or_none(&group, "weight_decay");
                    let (pattern, learning_rate) = (pattern?, learning_rate?);
                    Some(crate::spec::Group { pattern, learning_rate, weight_decay: weight_decay? })
                });
            groups.push(read);
        }
        groups.into_iter().collect()
    }

    fn random_depth(&mut self, owner: &Group) -> Option<Option<(u64, u64)>> {
        if !self.has(owner, "random_depth") || self.is_none(owner, "random_depth") {
            return Some(None);
        }
        if self.known.drawn {
            let message = "the `recur` draws its depth already";
            let help = "take it away: `depth uniform 1 8` of the `recur` says the same";
            self.error_at("ambiguous-depth", &owner.path("random_depth"), message, help);
        }
        let group = self.section(owner, "random_depth")?;
        let (min, max) = (self.int(&group, "min"), self.int(&group, "max"));
        let varies = self.varies_depth(owner, "random_depth");
        let (min, max) = (min?, max?);
        if min > max {
            let message = format!("`min` ({min}) is above `max` ({max})");
            self.error_at("out-of-range", &group.path("min"), message, "swap them");
        }
        let at = self.sources.locate(&group.path("max")).unwrap_or(group.at);
        if max > MAX_APPLICATIONS {
            self.too_deep(at);
        } else {
            self.too_many_depths(min, max, at);
        }
        self.passes(max, self.sources.locate(&group.path("max")).unwrap_or(group.at));
        Some(varies.then_some((min, max)))
    }

    /// Reports a depth at which passes would lack weights.
    fn passes(&mut self, depth: u64, at: Span) {
        if let Some(most) = self.known.passes.filter(|most| depth > *most) {
            let message =
                format!("this is {depth} passes, and the `recur` has weights of their own for {most}");
            let help = "`embed`, `lora` and lanes give each pass its weights: ask for no more passes than are written";
            self.error("depth", at, message, help);
        }
    }

    /// Whether depth can be varied. Warns where nothing is recurrent, and the key then has no
    /// effect; refuses where it is not clear which `recur` it is about.
    fn varies_depth(&mut self, group: &Group, key: &'static str) -> bool {
        let varies = self.known.recurrent != Some(false);
        if let (true, Some(found)) = (varies, self.known.outermost.filter(|n| *n != 1)) {
            let message = match found {
                0 => format!(
                    "`{key}` varies the count of a `recur` that is an item of the body; this body has none, only inner ones"
                ),
                n => format!(
                    "`{key}` varies the count of the one `recur` that is an item of the body; this body has {n}"
                ),
            };
            let help = "make it one outermost `recur`, or take the key away";
            self.error_at("ambiguous-depth", &group.path(key), message, help);
        }
        if !varies && let Some(span) = self.sources.locate(&group.path(key)) {
            let help = "depth can be varied in `recur` only; take it away";
            self.warning(
                "unused-key",
                span,
                format!("`{key}` has no effect: the model is not recurrent"),
                help,
            );
        }
        varies
    }

    pub(super) fn eval(&mut self, group: &Group) -> Option<Eval> {
        let (examples, max_tokens) = (self.int(group, "examples"), self.int(group, "max_tokens"));
        let depths = self.elements(group, "depths").and_then(|elements| {
            let kind = Type::Int { min: 1 };
            let depths: Vec<_> =
                elements.iter().map(|(value, _)| self.whole("depths", &kind, 1, value)).collect();
            for ((value, _), depth) in elements.iter().zip(&depths) {
                if depth.is_some_and(|depth| depth > MAX_APPLICATIONS) {
                    self.too_deep(value.span);
                }
                if let Some(depth) = depth {
                    self.passes(*depth, value.span);
                }
            }
            depths.into_iter().collect::<Option<Vec<_>>>()
        });
        let depths =
            depths.map(
                |depths| {
                    if depths.is_empty() || self.varies_depth(group, "depths") { depths } else { vec![] }
                },
            );
        let stride = self.int_or_none(group, "stride");
        let prompts = self.elements(group, "prompts").and_then(|elements| {
            let texts: Vec<_> =
                elements.iter().map(|(value, _)| self.text_of("prompts", &Type::Text, value)).collect();
            texts.into_iter().collect::<Option<Vec<_>>>()
        });
        let temperature = self.real_or_none(group, "temperature");
        let top_p = self.real_or_none(group, "top_p");
        Some(Eval {
            examples: examples?,
            max_tokens: max_tokens?,
            depths: depths?,
            stride: stride?,
            prompts: prompts?,
            temperature: temperature?,
            top_p: top_p?,
        })
    }

    pub(super) fn matching(&mut self, group: &Group) -> Option<Match> {
        let baseline = self.text(group, "baseline");
        let fields = self.match_fields(group);
        let tolerance = self.real(group, "tolerance");
        Some(Match { baseline: baseline?, fields: fields?, tolerance: tolerance? })
    }

    /// Fields that vary, at least one.
    pub(super) fn match_fields(&mut self, group: &Group) -> Option<MatchFields> {
        let [flops, training, params, memory] =
            ["flops", "training", "params", "memory"].map(|key| self.field_step_or_none(group, key));
        let fields = MatchFields { flops: flops?, training: training?, params: params?, memory: memory? };
        if fields.each().next().is_none() {
            let help =
                "name the field that varies, such as `flops: {ea.intermediate: 8}` or `params: ea.count`";
            self.error("missing-key", group.at, "`match` names no field", help);
        }
        let mut seen: Vec<(&str, &str)> = vec![];
        for (key, (path, _)) in fields.each() {
            let short = path.strip_prefix("model.").unwrap_or(path);
            let short = short.strip_prefix("components.").unwrap_or(short);
            match seen.iter().find(|(_, other)| *other == short) {
                Some((first, _)) => {
                    let message = format!("`{first}` varies `{path}` already");
                    let help = "name another field: one cannot meet two figures";
                    self.error_at("duplicate-key", &group.path(key), message, help);
                }
                None => seen.push((key, short)),
            }
        }
        Some(fields)
    }

    /// A field and its step: `{ea.intermediate: 8}`, or `ea.intermediate`.
    fn field_step_or_none(&mut self, group: &Group, key: &'static str) -> Option<Option<(String, u64)>> {
        match self.has(group, key) && !self.is_none(group, key) {
            true => self.field_step(group, key).map(Some),
            false => Some(None),
        }
    }

    fn field_step(&mut self, group: &Group, key: &'static str) -> Option<(String, u64)> {
        self.setting(group, key)?;
        let value = self.written(group, key)?;
        let (field, span, step) = match &value.kind {
            ValueKind::Word(field) => (field.clone(), value.span, Some(1)),
            ValueKind::Map(map) if map.items.len() == 1 => {
                let pair = &map.items[0].node;
                let step = self.whole("step", &Type::Int { min: 1 }, 1, &pair.value);
                (pair.key.text.clone(), pair.key.span, step)
            }
            ValueKind::Map(map) if map.items.len() > 1 => {
                let second = &map.items[1].node.key;
                let message = format!("`{key}` is met by one field; `{}` is a second", second.text);
                let first = &map.items[0].node.key.text;
                let help =
                    format!("keep one, such as `{key}: {{{first}: 8}}`; another figure may vary another");
                self.error("wrong-type", second.span, message, help);
                return None;
            }
            _ => {
                self.wrong_type(key, &Self::kind(group, key), value);
                return None;
            }
        };
        self.field(&field, span).then_some((field, step?))
    }

    /// Whether a path names a numeric field of the model; reports it where it does not. A suite
    /// knows no model.
    fn field(&mut self, field: &str, span: crate::source::Span) -> bool {
        if self.known.components.is_empty() && self.known.defined.is_empty() {
            return true;
        }
        let path = field.strip_prefix("model.").unwrap_or(field);
        let path = path.strip_prefix("components.").unwrap_or(path);
        let settings = |name: &str| self.known.defined.iter().find(|(own, _)| own == name);
        let own = path.split_once('.').and_then(|(name, rest)| Some((settings(name)?, rest)));
        if own.is_some_and(|((_, settings), rest)| settings.iter().any(|setting| setting == rest)) {
            return true;
        }
        let component = path.split_once('.').and_then(|(name, rest)| {
            let known = self.known.components.iter().find(|(known, _)| known == name);
            known.map(|(_, section)| (*section, rest))
        });
        let (mut section, rest) = component.unwrap_or((&keys::MODEL, path));
        let mut names = rest.split('.').peekable();
        while let Some(key) = names.next().and_then(|name| section.key(name)) {
            match (names.peek(), key.kind.section()) {
                (None, _) if key.kind.numeric() => return true,
                (Some(_), Some(inner)) => section = inner,
                _ => break,
            }
        }
        let fields = self.known.components.iter().flat_map(|(name, section)| {
            let sizes = ["count", "active", "intermediate", "heads", "kv_heads", "head_size"];
            let own = sizes.into_iter().filter(|key| section.key(key).is_some());
            own.map(move |key| format!("{name}.{key}"))
        });
        let settings = self
            .known
            .defined
            .iter()
            .flat_map(|(name, settings)| settings.iter().map(move |setting| format!("{name}.{setting}")));
        let fields: Vec<String> = fields.chain(settings).chain(["hidden".to_string()]).collect();
        let help = match crate::suggest::closest(field, fields.iter().map(String::as_str)) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("write a numeric field such as `{}`", fields[0]),
        };
        self.error("unknown-field", span, format!("`{field}` is not a numeric field of the model"), help);
        false
    }
}

/// The rule of a word; `None` for `none`.
pub(super) fn transfer_rule(word: &str) -> Option<TransferRule> {
    TransferRule::ALL.into_iter().find(|rule| rule.word() == word)
}
