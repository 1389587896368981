//! A checked specification back as a tree, with every default written out.
//!
//! Its output reads back as an equal specification, in both spellings.

use std::collections::HashSet;

use crate::ast::{Arith, ArithKind, Item as Noted, Key, Layer, LayerKind, List, Map, Pair, Value, ValueKind};
use crate::define::Definition;
use crate::source::Span;
use crate::spec::{self, *};

/// The tree of a specification.
pub(crate) fn tree(spec: &Spec) -> Map {
    let mut root = Fields::broken();
    if let Some(weights) = &spec.weights {
        root.put("weights", word(weights));
    }
    if let Some(transplant) = &spec.transplant {
        root.gap("transplant", transplant_tree(transplant));
    }
    if let Some(heal) = &spec.heal {
        root.gap("heal", heal_tree(heal));
    }
    if let Some(definitions) = definitions(&spec.model) {
        root.gap("define", definitions);
    }
    root.gap("model", model(&spec.model));
    if let Some(first) = root.0.items.first_mut() {
        first.blank = false;
    }
    if let Some(data) = &spec.data {
        root.gap("data", data_tree(data));
    }
    root.gap("train", train(&spec.train));
    root.gap("eval", eval(&spec.eval));
    if let Some(matching) = &spec.matching {
        root.gap("match", match_tree(matching));
    }
    root.0
}

fn transplant_tree(transplant: &Transplant) -> ValueKind {
    let mut fields = Fields::broken();
    if let Some(from) = &transplant.from {
        fields.put("from", word(from));
    }
    match &transplant.depth {
        Some(Depth::Given(layers)) => {
            let one = |layers: &Vec<u64>| match layers[..] {
                [layer] => int(layer),
                _ => list(layers.iter().map(|layer| int(*layer))),
            };
            fields.put("depth", list(layers.iter().map(one)));
        }
        Some(named) => fields.put("depth", name(named)),
        None => {}
    }
    let map = transplant.map.iter().map(|one| {
        let mut fields = Fields::inline();
        fields.put("to", word(&one.to));
        match &one.from[..] {
            [] => {}
            [from] => fields.put("from", word(from)),
            several => fields.put("from", list(several.iter().map(|from| word(from)))),
        }
        if let Some(how) = one.how {
            fields.put("how", name(how));
        }
        if one.noise > 0.0 {
            fields.put("noise", real(one.noise));
        }
        fields.map()
    });
    if !transplant.map.is_empty() {
        fields.put("map", broken_list(map));
    }
    fields.map()
}

fn heal_tree(heal: &Heal) -> ValueKind {
    let mut fields = Fields::broken();
    if let Some(teacher) = &heal.teacher {
        fields.put("teacher", word(teacher));
    }
    if let Some(bytes) = heal.cache {
        fields.put("cache", word(&crate::number::in_units(bytes)));
    }
    let stages = heal.stages.iter().map(|stage| {
        let mut fields = Fields::inline();
        let one = |values: Vec<ValueKind>| match <[ValueKind; 1]>::try_from(values) {
            Ok([value]) => value,
            Err(values) => list(values),
        };
        let all = |of: &dyn Fn(&Lesson) -> ValueKind| one(stage.matches.iter().map(of).collect());
        fields.put("match", all(&|lesson| word(&lesson.to)));
        if stage.matches.iter().any(|lesson| lesson.from.is_some()) {
            fields.put("from", all(&|lesson| word(lesson.from.as_ref().unwrap_or(&lesson.to))));
        }
        fields.put("weight", all(&|lesson| real(lesson.weight)));
        if stage.matches.iter().any(|lesson| lesson.to == "logits") {
            fields.put("temperature", real(stage.temperature));
            if let Some(top) = stage.top {
                fields.put("top", int(top));
            }
        }
        fields.put("loss", real(stage.loss));
        if let Some(steps) = stage.steps {
            fields.put("steps", int(steps));
        }
        fields.map()
    });
    fields.put("stages", broken_list(stages));
    fields.map()
}

/// The definitions that components of a model are made by, each after those that it applies.
pub(crate) fn definitions(model: &Model) -> Option<ValueKind> {
    fn add<'m>(definition: &'m Definition, found: &mut Vec<&'m Definition>) {
        if found.iter().any(|other| other.name.text == definition.name.text) {
            return;
        }
        definition.uses.values().for_each(|inner| add(inner, found));
        found.push(definition);
    }
    let mut found = Vec::new();
    for component in model.components.values() {
        if let Component::Defined(defined) = component {
            add(&defined.definition, &mut found);
        }
    }
    let mut fields = Fields::broken();
    for (place, definition) in found.iter().enumerate() {
        let value = self::definition(definition);
        if place == 0 {
            fields.put(&definition.name.text, value)
        } else {
            fields.gap(&definition.name.text, value)
        }
    }
    (!found.is_empty()).then(|| fields.map())
}

/// A definition as it is written.
fn definition(definition: &Definition) -> ValueKind {
    let mut fields = Fields::broken();
    let mut settings = Fields::inline();
    for setting in &definition.settings {
        let at = |_| 0;
        let mut found = Vec::new();
        let mut reader = crate::grammar::Lowering { at: &at, found: &mut found };
        let value = match setting.text.as_str() {
            "" => ValueKind::Null,
            text => crate::grammar::scalar_kind(reader.arith_text(text, Span::default())),
        };
        settings.put(&setting.name.text, value);
    }
    if !definition.settings.is_empty() {
        fields.put("settings", settings.map());
    }
    fields.put("code", ValueKind::Text(definition.text.clone()));
    fields.map()
}

/// A map being filled.
pub(crate) struct Fields(pub(crate) Map);

impl Fields {
    pub(crate) fn broken() -> Fields {
        Fields(Map { broken: true, ..Map::default() })
    }

    pub(crate) fn inline() -> Fields {
        Fields(Map::default())
    }

    pub(crate) fn put(&mut self, key: &str, value: ValueKind) {
        let key = Key { text: key.to_string(), span: Span::default() };
        self.0.items.push(Noted::new(Pair { key, value: Value::new(value, Span::default()) }));
    }

    /// A key with a blank line before it.
    fn gap(&mut self, key: &str, value: ValueKind) {
        self.put(key, value);
        if let Some(item) = self.0.items.last_mut() {
            item.blank = true;
        }
    }

    pub(crate) fn map(self) -> ValueKind {
        ValueKind::Map(self.0)
    }
}

pub(crate) fn word(text: &str) -> ValueKind {
    crate::grammar::text_kind(text.to_string())
}

/// The name that serde gives a unit variant: the same words as the language's.
pub(crate) fn name(value: impl serde::Serialize) -> ValueKind {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => word(&text),
        _ => ValueKind::Invalid,
    }
}

pub(crate) fn int(value: u64) -> ValueKind {
    ValueKind::Number(literal(value.to_string()))
}

pub(crate) fn real(value: f64) -> ValueKind {
    let size = value.abs();
    let plain = size == 0.0 || (1e-3..1e15).contains(&size);
    let digits = literal(if plain { format!("{size}") } else { format!("{size:e}") });
    ValueKind::Number(match value < 0.0 {
        true => Arith { kind: ArithKind::Negate(Box::new(digits)), span: Span::default() },
        false => digits,
    })
}

fn literal(text: String) -> Arith {
    Arith { kind: ArithKind::Literal(text), span: Span::default() }
}

pub(crate) fn or_none<T>(value: Option<T>, show: impl FnOnce(T) -> ValueKind) -> ValueKind {
    value.map_or_else(|| word("none"), show)
}

pub(crate) fn list(values: impl IntoIterator<Item = ValueKind>) -> ValueKind {
    let items = values.into_iter().map(|value| Noted::new(Value::new(value, Span::default()))).collect();
    ValueKind::List(List { items, ..List::default() })
}

fn broken_list(values: impl IntoIterator<Item = ValueKind>) -> ValueKind {
    match list(values) {
        ValueKind::List(list) => ValueKind::List(List { broken: !list.items.is_empty(), ..list }),
        other => other,
    }
}

fn model(model: &Model) -> ValueKind {
    let mut fields = Fields::broken();
    fields.put("name", word(&model.name));
    fields.put("vocab", int(model.vocab));
    fields.put("hidden", int(model.hidden));
    fields.put("context", int(model.context));
    fields.put("tie", ValueKind::Bool(model.tie));
    // Of few models, shown where it is written.
    if model.head_bias {
        fields.put("head_bias", ValueKind::Bool(true));
    }
    let scale = |scale| match scale {
        EmbedScale::SqrtHidden => word("sqrt_hidden"),
        EmbedScale::Value(value) => real(value),
    };
    fields.put("embed_scale", or_none(model.embed_scale, scale));
    // Two of few models, shown where they are written.
    model.logit_scale.into_iter().for_each(|scale| fields.put("logit_scale", real(scale)));
    fields.put("logit_softcap", or_none(model.logit_softcap, real));
    model.output_scale.into_iter().for_each(|scale| fields.put("output_scale", real(scale)));
    let mut norm = Fields::inline();
    norm.put("eps", real(model.norm.eps));
    norm.put("unit_offset", ValueKind::Bool(model.norm.unit_offset));
    fields.put("norm", norm.map());
    fields.put("stream", stream(model.stream));
    // Of models that are tuned, shown where it is written.
    model.adapt.iter().for_each(|adapt| fields.put("adapt", self::adapt(adapt)));
    let mut recurrent = HashSet::new();
    model.body.iter().for_each(|item| note_recurrent(item, false, &mut recurrent));
    let mut components = Fields::broken();
    for (name, value) in &model.components {
        components.put(name, value.show(recurrent.contains(name.as_str())));
    }
    fields.put("components", components.map());
    fields.put("body", broken_list(model.body.iter().map(item)));
    fields.map()
}

fn adapt(adapt: &Adapt) -> ValueKind {
    let mut fields = Fields::inline();
    let names = |names: &[String]| list(names.iter().map(|name| word(name)));
    fields.put("components", names(&adapt.components));
    if !adapt.matrices.is_empty() {
        fields.put("matrices", names(&adapt.matrices));
    }
    fields.put("rank", int(adapt.rank));
    fields.put("alpha", real(adapt.alpha));
    if adapt.dora {
        fields.put("dora", ValueKind::Bool(true));
    }
    fields.map()
}

fn stream(stream: Stream) -> ValueKind {
    let mut fields = Fields::inline();
    match stream {
        Stream::Sum => return word("sum"),
        Stream::Attend { block } => {
            let mut attend = Fields::inline();
            attend.put("block", int(block));
            fields.put("attend", attend.map());
        }
        Stream::Lanes { count, kind, embed } => {
            fields.put("lanes", int(count));
            fields.put("kind", name(kind));
            if embed {
                fields.put("embed", ValueKind::Bool(true));
            }
        }
    }
    fields.map()
}

/// The components that stand in a `recur`.
fn note_recurrent<'a>(item: &'a spec::Item, inside: bool, names: &mut HashSet<&'a str>) {
    fn each<'a>(expr: &'a Expr, names: &mut HashSet<&'a str>) {
        match expr {
            Expr::Component(name) => {
                names.insert(name);
            }
            Expr::Sequential(terms) | Expr::Parallel(terms) => {
                terms.iter().for_each(|term| each(term, names))
            }
            Expr::Skip(_, term) => each(term, names),
            Expr::Norm => {}
        }
    }
    match item {
        spec::Item::Layer(expr) if inside => each(expr, names),
        spec::Item::Layer(_) | spec::Item::Statement(_) => {}
        spec::Item::Repeat { items, .. } => items.iter().for_each(|item| note_recurrent(item, inside, names)),
        spec::Item::Recur { items, .. } => items.iter().for_each(|item| note_recurrent(item, true, names)),
    }
}

pub(crate) fn rope(rope: Rope) -> ValueKind {
    let mut fields = Fields::inline();
    fields.put("base", real(rope.base));
    fields.put("half_reversed", ValueKind::Bool(rope.half_reversed));
    fields.put("share", real(rope.share));
    let scaling = |scaling: RopeScaling| {
        let mut fields = Fields::inline();
        match scaling {
            RopeScaling::Llama3 { factor, low, high, original_context } => {
                fields.put("type", word("llama3"));
                fields.put("factor", real(factor));
                fields.put("low", real(low));
                fields.put("high", real(high));
                fields.put("original_context", real(original_context));
            }
            RopeScaling::Linear { factor } => {
                fields.put("type", word("linear"));
                fields.put("factor", real(factor));
            }
            RopeScaling::Yarn { factor, fast, slow, original_context, attention, truncate } => {
                fields.put("type", word("yarn"));
                fields.put("factor", real(factor));
                fields.put("fast", real(fast));
                fields.put("slow", real(slow));
                fields.put("original_context", real(original_context));
                fields.put("attention", real(attention));
                fields.put("truncate", ValueKind::Bool(truncate));
            }
        }
        fields.map()
    };
    fields.put("scaling", or_none(rope.scaling, scaling));
    fields.map()
}

pub(crate) fn router(router: &Router) -> ValueKind {
    let mut fields = Fields::broken();
    match &router.form {
        RouterForm::Linear => fields.put("form", word("linear")),
        RouterForm::LowRank { query, rope } => {
            fields.put("form", word("low_rank"));
            fields.put("query", int(*query));
            fields.put("rope", or_none(*rope, self::rope));
        }
    }
    fields.put("score", name(router.score));
    fields.put("select", name(router.select));
    fields.put("groups", int(router.groups));
    fields.put("topk_groups", int(router.topk_groups));
    fields.put("normalise", ValueKind::Bool(router.normalise));
    fields.put("scale", real(router.scale));
    let balance = |balance: Balance| {
        let mut fields = Fields::inline();
        fields.put("rate", real(balance.rate));
        fields.put("target", name(balance.target));
        fields.put("law", name(balance.law));
        fields.map()
    };
    fields.put("balance", or_none(router.balance, balance));
    fields.put("load_balance_loss", real(router.load_balance_loss));
    fields.put("z_loss", real(router.z_loss));
    fields.map()
}

/// A gate whose shares are of what `key` says.
fn gate(key: &str, entropy: f64) -> ValueKind {
    let mut gate = Fields::inline();
    gate.put(key, real(entropy));
    gate.map()
}

fn item(item: &spec::Item) -> ValueKind {
    let (key, count, recur, items) = match item {
        spec::Item::Layer(expr) => return ValueKind::Layer(layer(expr)),
        spec::Item::Statement(s) => return ValueKind::Layer(statement(s)),
        spec::Item::Repeat { count, items } => ("repeat", count, None, items),
        spec::Item::Recur { count, residual_norm, items, looping } => {
            ("recur", count, Some((*residual_norm, looping)), items)
        }
    };
    let mut fields = Fields::broken();
    fields.put(key, int(*count));
    if let Some((norm, looping)) = recur {
        fields.put("residual_norm", ValueKind::Bool(norm));
        if let Some(backprop) = looping.backprop {
            fields.put("backprop", int(backprop));
        }
        if let Some(depths) = looping.depth {
            fields.put("depth", self::depths(depths));
        }
        if let Some(rank) = looping.lora {
            fields.put("lora", int(rank));
        }
        if looping.embed {
            fields.put("embed", ValueKind::Bool(true));
        }
        match looping.exit {
            Exit::Last => {}
            Exit::Mean => fields.put("exit", word("mean")),
            Exit::Gate(entropy) => fields.put("exit", gate("gate", entropy)),
            Exit::Expected(entropy) => fields.put("exit", gate("expected", entropy)),
        }
        if !looping.kv.is_own() {
            fields.put("kv", name(looping.kv));
        }
    }
    fields.put("layers", broken_list(items.iter().map(self::item)));
    fields.map()
}

fn layer(expr: &Expr) -> Layer {
    let inner = |term: &Expr| match term {
        Expr::Sequential(_) | Expr::Parallel(_) => {
            Layer { kind: LayerKind::Group(Box::new(layer(term))), span: Span::default() }
        }
        _ => layer(term),
    };
    let kind = match expr {
        Expr::Component(name) => LayerKind::Component(name.clone()),
        Expr::Norm => LayerKind::Component("norm".into()),
        Expr::Sequential(terms) => LayerKind::Sequential(terms.iter().map(inner).collect()),
        Expr::Parallel(terms) => LayerKind::Parallel(terms.iter().map(inner).collect()),
        Expr::Skip(skip, term) => LayerKind::Skip(skip_keys(skip), Box::new(layer(term))),
    };
    Layer { kind, span: Span::default() }
}

fn depths(depths: Depths) -> ValueKind {
    let mut fields = Fields::inline();
    match depths.law {
        DepthLaw::Uniform => {
            fields.put("uniform", list([int(depths.min), int(depths.max)]));
            return fields.map();
        }
        DepthLaw::Poisson { mean } => fields.put("poisson", real(mean)),
        DepthLaw::LognormalPoisson { mean, sigma } => {
            let mut law = Fields::inline();
            law.put("mean", real(mean));
            law.put("sigma", real(sigma));
            fields.put("lognormal_poisson", law.map());
        }
    }
    fields.put("min", int(depths.min));
    fields.put("max", int(depths.max));
    fields.map()
}

/// Words that its defaults stand for are written.
fn statement(statement: &Statement) -> Layer {
    let beginning = |b: Beginning| match b {
        Beginning::Identity => "identity",
        Beginning::Normal => "normal",
    };
    let number;
    let words = match statement {
        Statement::StartZeros => vec!["start", "zeros"],
        Statement::StartNormal(sigma) => {
            number = format!("{sigma:?}");
            vec!["start", "normal", &number]
        }
        Statement::History(Steps::Every(1)) => vec!["mix", "history", "weighted"],
        Statement::History(Steps::Every(step)) => {
            number = step.to_string();
            vec!["mix", "history", "weighted", "every", &number]
        }
        Statement::History(Steps::Apart(step)) => {
            number = step.to_string();
            vec!["mix", "history", "weighted", "apart", &number]
        }
        Statement::Norm(NormGain::Own) => vec!["norm"],
        Statement::Norm(NormGain::Named(gain)) => vec!["norm", gain],
        Statement::Norm(NormGain::Plain) => vec!["norm", PLAIN],
        Statement::Linear(b) => vec!["linear", beginning(*b)],
        Statement::Save(name) => vec!["save", name],
        Statement::Mix { name, how } => {
            let how = match how {
                Mixing::Add => vec!["add"],
                Mixing::Linear(b) => vec!["linear", beginning(*b)],
                Mixing::Scaled => vec!["scaled"],
                Mixing::Diagonal => vec!["diagonal"],
            };
            [vec!["mix", name], how].concat()
        }
    };
    let word = |text: &str| crate::ast::Word { text: text.into(), span: Span::default() };
    Layer { kind: LayerKind::Statement(words.into_iter().map(word).collect()), span: Span::default() }
}

fn capacity_of(skip: &Skip, all: f64) -> ValueKind {
    match &skip.capacities[..] {
        [] => real(all),
        each => list(each.iter().map(|share| real(*share))),
    }
}

fn skip_keys(skip: &Skip) -> Map {
    let mut fields = Fields::inline();
    match &skip.rule {
        SkipRule::TopK { capacity, causal } => {
            fields.put("capacity", capacity_of(skip, *capacity));
            fields.put("causal", or_none(causal.as_ref(), causal_keys));
        }
        SkipRule::Threshold { capacity, penalty, pooled } => {
            fields.put("threshold", ValueKind::Bool(true));
            fields.put("capacity", capacity_of(skip, *capacity));
            fields.put("penalty", real(*penalty));
            fields.put("pooled", ValueKind::Bool(*pooled));
        }
        SkipRule::DepthChoice { capacity: _, balance } => {
            fields.put("depth_choice", ValueKind::Bool(true));
            fields.put("balance", real(*balance));
            scorer_keys(&mut fields, &skip.scorer);
            return fields.0;
        }
    }
    if skip.each_pass {
        fields.put("router", name("pass"));
    }
    if !skip.gate.is_score() {
        fields.put("gate", name(skip.gate));
    }
    if skip.gate_scale != 1.0 {
        fields.put("gate_scale", real(skip.gate_scale));
    }
    if skip.whole {
        fields.put("whole", ValueKind::Bool(true));
    }
    if skip.nested {
        fields.put("nested", ValueKind::Bool(true));
    }
    scorer_keys(&mut fields, &skip.scorer);
    fields.put("norm_only", ValueKind::Bool(skip.input == SkipInput::NormOnly));
    fields.put("level", name(skip.level));
    fields.put("kv", name(skip.kv));
    fields.put("merge", ValueKind::Bool(skip.merge));
    fields.0
}

fn scorer_keys(fields: &mut Fields, scorer: &Scorer) {
    if scorer.temperature != 1.0 {
        fields.put("temperature", real(scorer.temperature));
    }
    if let Some(size) = scorer.network {
        fields.put("network", int(size));
    }
    if scorer.z_loss != 0.0 {
        fields.put("z_loss", real(scorer.z_loss));
    }
}

fn causal_keys(causal: &CausalRule) -> ValueKind {
    let mut fields = Fields::inline();
    match causal {
        CausalRule::Bce { weight, into_input } => {
            fields.put("bce", real(*weight));
            fields.put("into_input", ValueKind::Bool(*into_input));
        }
        CausalRule::Predictor { hidden, weight } => {
            fields.put("predictor", int(*hidden));
            fields.put("weight", real(*weight));
        }
    }
    fields.map()
}

fn data_tree(data: &Data) -> ValueKind {
    let mut fields = Fields::broken();
    match data.sources.as_slice() {
        [(source, 1.0)] => source_keys(&mut fields, source),
        sources => {
            let sources = sources.iter().map(|(source, weight)| {
                let mut fields = Fields::broken();
                source_keys(&mut fields, source);
                fields.put("weight", real(*weight));
                fields.map()
            });
            fields.put("sources", broken_list(sources));
        }
    }
    match &data.tokenizer {
        Tokenizer::Bytes => fields.put("tokenizer", word("bytes")),
        Tokenizer::File(path) => fields.put("tokenizer", word(path)),
    }
    fields.put("validation", real(data.validation));
    fields.put("validation_file", or_none(data.validation_file.as_deref(), word));
    if let Some(begin) = data.begin {
        fields.put("begin", ValueKind::Bool(begin));
    }
    fields.put("document_mask", ValueKind::Bool(data.document_mask));
    fields.put("bad_rows", name(data.bad_rows));
    fields.map()
}

fn source_keys(fields: &mut Fields, source: &Source) {
    let (kind, path, prompt, answer, template) = match source {
        Source::Task(task) => {
            fields.put("task", name(task.kind));
            fields.put("min_steps", int(task.min_steps));
            fields.put("max_steps", int(task.max_steps));
            if !task.longer.is_empty() {
                fields.put("longer", list(task.longer.iter().copied().map(int)));
            }
            fields.put("size", int(task.size));
            if let Some(length) = task.length {
                fields.put("length", int(length));
            }
            return;
        }
        Source::Text { path } => return fields.put("text", word(path)),
        Source::Jsonl { path, prompt, answer, template, .. } => ("jsonl", path, prompt, answer, template),
        Source::Parquet { path, prompt, answer, template, .. } => ("parquet", path, prompt, answer, template),
    };
    fields.put(kind, word(path));
    fields.put("prompt", or_none(prompt.as_deref(), word));
    fields.put("answer", word(answer));
    // Only where rows are pairs: runs of before keep their hash.
    if let Some(rejected) = source.rejected() {
        fields.put("rejected", word(rejected));
    }
    fields.put("template", word(template));
}

fn train(train: &Train) -> ValueKind {
    let mut fields = Fields::broken();
    fields.put("steps", int(train.steps));
    fields.put("batch", int(train.batch));
    fields.put("accumulate", int(train.accumulate));
    // Only where there is one, for the same reason as the optimizer's.
    if let Some(bytes) = train.memory {
        fields.put("memory", word(&crate::number::in_units(bytes)));
    }
    fields.put("sequence", or_none(train.sequence, int));
    fields.put("learning_rate", real(train.learning_rate));
    fields.put("warmup", int(train.warmup));
    fields.put("schedule", schedule(&train.schedule));
    // Only where it is not AdamW: runs of before keep their hash.
    if let Some(optimizer) = optimizer(train.optimizer) {
        fields.put("optimizer", optimizer);
    }
    if let Some(transfer) = &train.transfer {
        let mut rule = Fields::inline();
        rule.put("rule", name(transfer.rule));
        rule.put("width", int(transfer.width));
        rule.put("depth", int(transfer.depth));
        if let Some(passes) = transfer.passes {
            rule.put("passes", int(passes));
        }
        if let Some(tokens) = transfer.tokens {
            rule.put("tokens", int(tokens));
        }
        if !transfer.sizes.is_empty() {
            let mut sizes = Fields::inline();
            for (path, size) in &transfer.sizes {
                sizes.put(path, int(*size));
            }
            rule.put("sizes", sizes.map());
        }
        fields.put("transfer", rule.map());
    }
    fields.put("betas", list([real(train.betas.0), real(train.betas.1)]));
    fields.put("eps", real(train.eps));
    if train.moments == Precision::Bf16 {
        fields.put("moments", name(train.moments));
    }
    fields.put("weight_decay", real(train.weight_decay));
    fields.put("decay_embeddings", ValueKind::Bool(train.decay_embeddings));
    fields.put("clip", or_none(train.clip, real));
    fields.put("z_loss", real(train.z_loss));
    if let Some(Dpo { beta, smoothing }) = train.dpo {
        let mut dpo = Fields::inline();
        dpo.put("beta", real(beta));
        dpo.put("smoothing", real(smoothing));
        fields.put("dpo", dpo.map());
    }
    fields.put("seed", int(train.seed));
    fields.put("precision", name(train.precision));
    fields.put("only", list(train.only.iter().map(|pattern| word(pattern))));
    fields.put("freeze", list(train.freeze.iter().map(|pattern| word(pattern))));
    let groups = train.groups.iter().map(|group| {
        let mut fields = Fields::inline();
        fields.put("pattern", word(&group.pattern));
        fields.put("learning_rate", real(group.learning_rate));
        if let Some(decay) = group.weight_decay {
            fields.put("weight_decay", real(decay));
        }
        fields.map()
    });
    fields.put("groups", broken_list(groups));
    // Only where something is asked for: runs of before keep their hash.
    if !train.parallel.is_default() {
        let mut parallel = Fields::inline();
        if let Some(data) = train.parallel.data {
            parallel.put("data", int(data));
        }
        parallel.put("shard", word(train.parallel.shard.name()));
        if train.parallel.experts != 1 {
            parallel.put("experts", int(train.parallel.experts));
        }
        fields.put("parallel", parallel.map());
    }
    let random_depth = |(min, max)| {
        let mut fields = Fields::inline();
        fields.put("min", int(min));
        fields.put("max", int(max));
        fields.map()
    };
    fields.put("random_depth", or_none(train.random_depth, random_depth));
    let mut evaluate = Fields::inline();
    evaluate.put("every", int(train.evaluate.every));
    evaluate.put("batches", int(train.evaluate.batches));
    fields.put("evaluate", evaluate.map());
    let mut checkpoint = Fields::inline();
    checkpoint.put("every", int(train.checkpoint.every));
    checkpoint.put("minutes", real(train.checkpoint.minutes));
    checkpoint.put("keep", int(train.checkpoint.keep));
    checkpoint.put("keep_every", int(train.checkpoint.keep_every));
    checkpoint.put("best", ValueKind::Bool(train.checkpoint.best));
    fields.put("checkpoint", checkpoint.map());
    fields.put("patience", or_none(train.patience, int));
    fields.put("on_nan", word(if train.on_nan == OnNan::Skip { "skip" } else { "stop" }));
    fields.put("spike", or_none(train.spike, real));
    fields.map()
}

fn optimizer(kind: OptimizerKind) -> Option<ValueKind> {
    if kind == OptimizerKind::AdamW {
        return None;
    }
    let constants = kind.constants();
    if constants.is_empty() {
        return Some(word(kind.word()));
    }
    let mut fields = Fields::inline();
    fields.put("kind", word(kind.word()));
    for (key, value) in constants {
        fields.put(key, real(value));
    }
    Some(fields.map())
}

fn schedule(schedule: &Schedule) -> ValueKind {
    let mut fields = Fields::inline();
    match *schedule {
        Schedule::Constant => return word("constant"),
        Schedule::Points(ref points) => {
            return list(points.iter().map(|(step, factor)| list([int(*step), real(*factor)])));
        }
        Schedule::Cosine { floor } => {
            fields.put("kind", word("cosine"));
            fields.put("floor", real(floor));
        }
        Schedule::Linear { floor } => {
            fields.put("kind", word("linear"));
            fields.put("floor", real(floor));
        }
        Schedule::Wsd { decay, floor } => {
            fields.put("kind", word("wsd"));
            fields.put("decay", int(decay));
            fields.put("floor", real(floor));
        }
    }
    fields.map()
}

fn eval(eval: &Eval) -> ValueKind {
    let mut fields = Fields::broken();
    fields.put("examples", int(eval.examples));
    fields.put("max_tokens", int(eval.max_tokens));
    fields.put("depths", list(eval.depths.iter().map(|depth| int(*depth))));
    fields.put("stride", or_none(eval.stride, int));
    fields.put("prompts", list(eval.prompts.iter().map(|prompt| word(prompt))));
    fields.put("temperature", or_none(eval.temperature, real));
    fields.put("top_p", or_none(eval.top_p, real));
    fields.map()
}

fn match_tree(matching: &Match) -> ValueKind {
    let field = |(field, step): &(String, u64)| {
        let mut fields = Fields::inline();
        fields.put(field, int(*step));
        fields.map()
    };
    let mut fields = Fields::broken();
    fields.put("baseline", word(&matching.baseline));
    fields.put("flops", or_none(matching.fields.flops.as_ref(), field));
    fields.put("training", or_none(matching.fields.training.as_ref(), field));
    fields.put("params", or_none(matching.fields.params.as_ref(), field));
    fields.put("memory", or_none(matching.fields.memory.as_ref(), field));
    fields.put("tolerance", real(matching.tolerance));
    fields.map()
}
