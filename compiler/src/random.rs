//! A small random specification over all axes of the language, for tests of properties that every
//! specification has.
//!
//! *In*: a seed. *Out*: a [`Drawn`]: a text that the checker accepts, its [`Spec`], and the keys
//! that are written in it. *Promise*: a seed stands for one specification as long as the language
//! stays as it is; tests print the seed.
//!
//! Keys and values come from the language's own table ([`keys`]), so a new key is drawn without a
//! line here. A group of keys is drawn until the checker accepts it alone (it refuses a rotation of
//! an odd head, for one), so no legal combination is left out. [`values`] lists values worth trying
//! where the type allows any; [`UNDRAWN`] lists the keys that name files or other specifications.

pub mod definition;

use crate::ir::random::Rng;
use dreamc_dsl::keys::{self, Fallback, Key, Range, Section, Type};
use dreamc_dsl::{Spec, Spelling, check, parse};
use std::collections::BTreeSet;

/// A specification that was drawn.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// It in YAML.
    pub text: String,
    /// The checker's reading of it.
    pub spec: Spec,
    /// The keys that are written in it, as `section.key`, and those whose value is a word as
    /// `section.key word` too.
    pub keys: BTreeSet<String>,
}

/// Keys that are not drawn: they name files, other specifications or other components, concern
/// files alone, are about several sizes of a model, or say once more what another key says.
/// Definitions have a generator of their own, [`definition`].
pub const UNDRAWN: [&str; 30] = [
    "sequence.kv_from",
    "train.transfer",
    "train.dpo",
    "train.ranks",
    "data.rejected",
    "source.rejected",
    "spec.let",
    "spec.include",
    "spec.define",
    "define.settings",
    "define.code",
    "spec.base",
    "spec.weights",
    "spec.transplant",
    "spec.heal",
    "spec.match",
    "data.text",
    "data.jsonl",
    "data.parquet",
    "data.prompt",
    "data.answer",
    "data.template",
    "data.tokenizer",
    "data.validation_file",
    "source.text",
    "source.jsonl",
    "source.parquet",
    "source.prompt",
    "source.answer",
    "source.template",
];

/// The specification of that seed.
pub fn spec(seed: u64) -> Spec {
    drawn(seed).spec
}

/// The specification of that seed, as it is written.
pub fn drawn(seed: u64) -> Drawn {
    let (r, keys) = (Rng::new(seed ^ 0x7370_6563_0000), BTreeSet::new());
    let mut w = Writer { r, keys, saved: vec![], looped: false, passes: None };
    loop {
        w.keys.clear();
        let text = w.specification(seed);
        if let Some(spec) = read(&text) {
            return Drawn { text, spec, keys: w.keys };
        }
    }
}

/// The specification of a text; none where the checker finds errors.
fn read(text: &str) -> Option<Spec> {
    let ast = parse("random.yaml", text, Spelling::Yaml).ok()?;
    check(&ast, &[]).ok().map(|(spec, _)| spec)
}

/// Names of components.
const NAMES: [&str; 12] =
    ["sa", "da", "ea", "mlp", "local", "a", "b", "far", "gated", "small", "x1", "Mixed_Case"];

/// Numbers and texts worth trying as the value of a key; any of its type where there are none.
fn values(section: &str, key: &str) -> &'static [&'static str] {
    match (section, key) {
        ("model", "vocab") => &["2", "3", "7", "13", "17"],
        ("model", "hidden") => &["1", "2", "3", "5", "8", "12"],
        ("model", "context") => &["1", "2", "5", "16", "24"],
        ("model", "embed_scale") => &["0.5", "-1.5", "2"],
        ("stream", "lanes") => &["1", "2", "3"],
        ("attend", "block") => &["1", "2", "3", "8"],
        ("norm", "eps") => &["1e-6", "1e-5", "1e-3", "0.1"],
        (_, "heads") => &["1", "2", "3", "4", "6"],
        (_, "kv_heads") => &["1", "2", "3"],
        (_, "head_size") => &["1", "2", "3", "4", "6", "8"],
        (_, "window") => &["1", "2", "3", "5", "100"],
        (_, "logit_scale" | "output_scale") => &["0.25", "0.7", "3"],
        (_, "softcap" | "logit_softcap") => &["0.5", "2", "30"],
        ("router", "scale") => &["0.5", "2.5"],
        (_, "scale") => &["0.05", "0.3", "2", "-0.5"],
        ("rope", "share") => &["0.5", "0.75", "1"],
        ("rope", "base") => &["1.5", "100", "500", "10000"],
        ("scaling", "factor") => &["0.5", "2", "8"],
        ("scaling", "fast") => &["4", "32"],
        ("scaling", "slow") => &["0.5", "1"],
        ("scaling", "attention") => &["0.7", "1.2"],
        ("scaling", "low") => &["0.5", "1"],
        ("scaling", "high") => &["2", "4", "8"],
        ("scaling", "original_context") => &["4", "32", "8192"],
        ("projection", "count") => &["1", "2", "3", "4"],
        ("experts", "count") => &["1", "2", "3", "5"],
        ("experts", "active") => &["1", "2", "3"],
        ("experts", "round") => &["1", "2", "3", "5"],
        ("experts", "shared") => &["0", "1", "2"],
        (_, "intermediate") => &["1", "3", "6", "7"],
        ("latent", "turned") => &["2", "4"],
        ("latent", "keys") => &["1", "2", "3"],
        ("latent", "value" | "kv" | "query") => &["1", "2", "3", "5"],
        (_, "query") => &["1", "2", "3", "4", "6"],
        ("router", "groups") => &["1", "2", "3"],
        ("router", "topk_groups") => &["1", "2"],
        ("balance", "rate") => &["1e-3", "1e-2", "0.1"],
        (_, "load_balance_loss" | "z_loss") => &["0", "0.01", "0.1", "1"],
        ("skip", "gate_scale") => &["0.1", "0.5", "2"],
        ("skip", "temperature") => &["0.5", "3"],
        ("skip", "network") => &["1", "2", "5"],
        ("skip", "capacity") => &["0.125", "0.3", "0.5", "0.75", "1"],
        ("skip", "penalty") | ("causal", "bce" | "weight") => &["0.01", "0.1", "1", "3"],
        ("causal", "predictor") => &["1", "2", "4", "5"],
        ("train", "steps") => &["6", "7", "9"],
        ("train", "batch") => &["2", "4", "6"],
        ("train", "accumulate") => &["1", "2"],
        ("train", "sequence") => &["1", "2", "3", "7", "16"],
        ("train", "learning_rate") => &["1e-3", "1e-2"],
        ("train", "warmup") => &["0", "1", "2", "0.5", "30%"],
        ("train", "schedule") => &["0", "0.5", "1", "3", "50%"],
        ("train", "betas") => &["0", "0.5", "0.8", "0.9", "0.999"],
        ("optimizer", "momentum") => &["0", "0.9", "0.95"],
        ("optimizer", "matrix_rate") => &["1", "3"],
        ("train", "eps") => &["1e-8", "1e-5"],
        (_, "weight_decay") => &["0", "1e-3", "0.1", "1"],
        ("parallel", "data" | "experts") => &["1"],
        ("train", "clip") => &["0.5", "100"],
        ("train", "spike") => &["6"],
        ("eval", "prompts") => &["ab", "\"a b\""],
        ("train", "only" | "freeze") | ("group", "pattern") => {
            &["\"*\"", "routers", "\"*norm*\"", "\"*.router.*\"", "embed.weight", "\"layers.0.*\""]
        }
        ("group", "learning_rate") => &["0", "0.1", "1", "3"],
        ("schedule", "floor") => &["0", "0.1", "1"],
        ("random_depth", "min") => &["1", "2"],
        ("random_depth", "max") => &["1", "2", "3"],
        ("task" | "source" | "data", "size") => &["2", "3", "5"],
        ("source", "weight") => &["0.5", "2"],
        (_, "validation") => &["0", "0.3"],
        _ => &[],
    }
}

/// One number of a range.
fn number(range: Range) -> &'static str {
    match range {
        Range::Positive | Range::NonZero | Range::Any => "1.5",
        Range::NonNegative | Range::Fraction => "0.25",
        Range::Share => "0.5",
    }
}

/// How often a group is drawn before the specification begins anew.
const TRIES: usize = 1000;

struct Writer {
    r: Rng,
    /// Streams that are named so far.
    saved: Vec<&'static str>,
    /// Whether there is a `recur` so far.
    looped: bool,
    /// Passes of the one loop around, where that is an item of the body.
    passes: Option<u64>,
    keys: BTreeSet<String>,
}

impl Writer {
    fn one_of<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        let at = self.r.below(of.len() as u64) as usize;
        of.get(at).copied()
    }

    /// Draws until a text is accepted; an empty one where none is, which the checker then refuses
    /// as a whole.
    fn until(&mut self, draw: impl Fn(&mut Self) -> String, accepted: impl Fn(&str) -> bool) -> String {
        let before = self.keys.clone();
        for _ in 0..TRIES {
            let text = draw(self);
            if accepted(&text) {
                return text;
            }
            self.keys.clone_from(&before);
        }
        String::new()
    }

    /// Draws until there is something; none where there never is.
    fn until_some<T>(&mut self, draw: impl Fn(&mut Self) -> Option<T>) -> Option<T> {
        let before = self.keys.clone();
        (0..TRIES).find_map(|_| {
            let found = draw(self);
            if found.is_none() {
                self.keys.clone_from(&before);
            }
            found
        })
    }

    fn specification(&mut self, seed: u64) -> String {
        let data = if self.r.once_in(2) { String::new() } else { self.data() };
        let (model, depth) = self.model(seed, !data.is_empty());
        let of = |part: &str| format!("{model}{data}{part}");
        let train = self.until(
            |w| format!("train: {}\n", w.section(&keys::TRAIN, &["random_depth"][..usize::from(!depth)])),
            |train| read(&of(train)).is_some(),
        );
        let eval = self.until(
            |w| match w.r.once_in(2) {
                true => format!("eval: {}\n", w.section(&keys::EVAL, &["depths"][..usize::from(!depth)])),
                false => String::new(),
            },
            |eval| read(&of(eval)).is_some(),
        );
        let all = [("model", &model), ("data", &data), ("train", &train), ("eval", &eval)];
        let written = all.iter().filter(|(_, text)| !text.is_empty());
        self.keys.extend(written.map(|(key, _)| format!("spec.{key}")));
        of(&format!("{train}{eval}"))
    }

    /// The model, and whether its depth can be varied. The byte level of `data` has 256 tokens.
    fn model(&mut self, seed: u64, data: bool) -> (String, bool) {
        let mut lines = vec![format!("model:\n  name: random-{seed}")];
        let mut hidden = String::new();
        self.keys.insert("model.name".into());
        for key in keys::MODEL.keys {
            match key.name {
                "name" | "adapt" | "components" | "body" => continue,
                "vocab" if data => {
                    self.keys.insert("model.vocab".into());
                    lines.push("  vocab: 256".into());
                }
                // Half of all models: what a wiring changes, it changes everywhere.
                "stream" if self.r.once_in(2) => {
                    let value = self.stream(key);
                    lines.push(format!("  stream: {value}"));
                }
                "stream" => {}
                name if self.writes(key) => {
                    let value = self.value(&keys::MODEL, key.name, &key.kind);
                    if name == "hidden" {
                        hidden.clone_from(&value);
                    }
                    lines.push(format!("  {name}: {value}"));
                }
                _ => {}
            }
        }
        let mut names = NAMES.to_vec();
        let count = 2 + self.r.below(4);
        let mut components = vec![];
        lines.push("  components:".into());
        for _ in 0..count {
            let name = names.remove(self.r.below(names.len() as u64) as usize);
            let component = self.until(
                |w| {
                    let kind = keys::COMPONENTS[w.r.below(keys::COMPONENTS.len() as u64) as usize];
                    match kind.name == "sequence" && w.r.once_in(6) {
                        true => w.latent(kind),
                        false => format!("{{{}: {}}}", kind.name, w.section(kind, &["depth_stream"])),
                    }
                },
                |component| {
                    let model = format!("model: {{vocab: 7, hidden: {hidden}, context: 4, components: ");
                    read(&format!("{model}{{a: {component}}}, body: [\"a\"]}}\n")).is_some()
                },
            );
            lines.push(format!("    {name}: {component}"));
            components.push(name);
        }
        self.keys.insert("model.components".into());
        self.keys.insert("model.body".into());
        let before = lines.join("\n");
        let mut depth = false;
        // Layers that a wiring of the stream has no meaning for are drawn again.
        let body = self.until_some(|w| {
            w.saved.clear();
            (w.looped, w.passes) = (false, None);
            let (mut budget, mut outermost, mut items) = (9, 0, vec![]);
            let count = 1 + w.r.below(3);
            for number in 1..=count {
                let item = w.item(&components, 2, &mut budget, number == count);
                outermost += usize::from(item.starts_with("{recur"));
                items.push(item);
            }
            let body = format!("\n  body: [{}]\n", items.join(", "));
            read(&format!("{before}{body}")).is_some().then_some((body, outermost == 1))
        });
        let body = body.map_or(String::new(), |(body, varies)| {
            depth = varies;
            body
        });
        let model = self.depth_stream(seed, &components, format!("{before}{body}"));
        let adapt = self.adapt(seed, &components, &model);
        (format!("{model}{adapt}"), depth)
    }

    /// Keys in the depth stream of one model in four, of draws of their own: what else a seed says
    /// stays.
    fn depth_stream(&mut self, seed: u64, components: &[&str], model: String) -> String {
        let mut r = Rng::new(seed ^ 0x6465_7074_6800);
        for _ in 0..if r.once_in(4) { TRIES } else { 0 } {
            let (mut text, mut keys) = (model.clone(), vec![]);
            for name in components {
                for (kind, words) in [
                    ("sequence", &["keys", "own", "none"][..]),
                    ("experts", &["true", "false"]),
                    ("mlp", &["true"]),
                ] {
                    let (word, line) =
                        (words[r.below(words.len() as u64) as usize], format!("    {name}: {{{kind}: {{"));
                    if r.once_in(3) || !text.contains(&line) {
                        continue;
                    }
                    text = text.replace(&line, &format!("{line}depth_stream: {word}, "));
                    keys.extend([format!("{kind}.depth_stream"), format!("{kind}.depth_stream {word}")]);
                }
            }
            if !keys.is_empty() && read(&text).is_some() {
                self.keys.extend(keys);
                return text;
            }
        }
        model
    }

    /// Adapters of one model in four, of draws of their own: what else a seed says stays.
    fn adapt(&mut self, seed: u64, components: &[&str], model: &str) -> String {
        const MATRICES: [&str; 8] = ["q", "k", "v", "out", "gate", "up", "down", "qkv"];
        let mut r = Rng::new(seed ^ 0x6164_6170_7400);
        if !r.once_in(4) {
            return String::new();
        }
        self.keys.insert("model.adapt".into());
        let none = Rng::new(seed ^ 0x6164_6170_7401).once_in(8);
        for _ in 0..if none { 0 } else { TRIES } {
            let mut some = |all: &[&str]| {
                let own: Vec<&str> = all.iter().copied().filter(|_| r.once_in(2)).collect();
                own.join(", ")
            };
            let mut pairs = vec![("components", format!("[{}]", some(components)))];
            let matrices = some(&MATRICES);
            pairs.extend(r.once_in(2).then(|| ("matrices", format!("[{matrices}]"))));
            pairs.extend(r.once_in(2).then(|| ("rank", (1 + r.below(3)).to_string())));
            pairs.extend(r.once_in(2).then(|| ("alpha", format!("0.{}", 1 + r.below(9)))));
            pairs.extend(r.once_in(2).then(|| ("dora", r.once_in(2).to_string())));
            let written: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}: {value}")).collect();
            let text = format!("  adapt: {{{}}}\n", written.join(", "));
            if read(&format!("{model}{text}")).is_some() {
                self.keys.extend(pairs.iter().map(|(key, _)| format!("adapt.{key}")));
                return text;
            }
        }
        // That, too, is written; and where components have no matrix.
        self.keys.insert("model.adapt none".into());
        "  adapt: none\n".into()
    }

    /// A latent attention, without the keys that are not computed with it.
    fn latent(&mut self, kind: &'static Section) -> String {
        let without = [
            "kv_heads",
            "qk_norm",
            "latent",
            "value_residual",
            "depth_keys",
            "depth_stream",
            "gate",
            "bias",
            "projection",
        ];
        let rest = self.section(kind, &without);
        let rest = rest.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or_default();
        let latent = self.section(&dreamc_dsl::component::attention::LATENT, &[]);
        let written = ["sequence.latent", "sequence.qk_norm", "sequence.qk_norm none"];
        self.keys.extend(written.map(String::from));
        format!("{{sequence: {{qk_norm: none, latent: {latent}, {rest}}}}}")
    }

    fn stream(&mut self, key: &'static Key) -> String {
        self.until(
            |w| match w.r.once_in(3) {
                true => w.value(&keys::MODEL, key.name, &key.kind),
                false => {
                    w.keys.insert("model.stream".into());
                    w.section(&keys::STREAM, &[])
                }
            },
            |value| {
                let model =
                    "model: {vocab: 7, hidden: 4, context: 4, components: {a: {mlp: {intermediate: 1}}}, ";
                read(&format!("{model}body: [\"a\"], stream: {value}}}\n")).is_some()
            },
        )
    }

    fn data(&mut self) -> String {
        self.until(
            |w| format!("data: {}\n", w.section(&keys::DATA, &[])),
            |data| {
                let model = "model: {vocab: 256, hidden: 4, context: 4, components: {a: {mlp: {intermediate: 1}}}, body: [\"a\"]}\n";
                read(&format!("{model}{data}")).is_some()
            },
        )
    }

    /// Whether a key is written, where it may be left out.
    fn writes(&mut self, key: &Key) -> bool {
        key.default == Fallback::Required || self.r.once_in(3)
    }

    /// The keys of a group and their values, as a map; without those of these names.
    fn section(&mut self, section: &'static Section, without: &[&str]) -> String {
        let mut pairs = vec![];
        let mut of = None;
        for key in section.keys {
            let name = format!("{}.{}", section.name, key.name);
            let of_another = key.of.is_some() && key.of.map(str::to_string) != of;
            if UNDRAWN.contains(&name.as_str()) || without.contains(&key.name) || of_another {
                continue;
            }
            let value = self.writes(key).then(|| self.value(section, key.name, &key.kind));
            if let (Fallback::Value(default), "type") = (&key.default, key.name) {
                of = Some(value.clone().unwrap_or(default.to_string()));
            }
            if let Some(value) = value {
                pairs.push(format!("{}: {value}", key.name));
            }
        }
        format!("{{{}}}", pairs.join(", "))
    }

    /// A value of a key.
    fn value(&mut self, section: &'static Section, key: &'static str, kind: &Type) -> String {
        self.keys.insert(format!("{}.{key}", section.name));
        let worth = values(section.name, key);
        match kind {
            Type::Int { .. } | Type::Real(_) | Type::Text if !worth.is_empty() => {
                self.one_of(worth).unwrap_or_default().to_string()
            }
            Type::Int { min } => (min + self.r.below(3)).to_string(),
            Type::Real(range) => number(*range).into(),
            Type::Bool => self.r.once_in(2).to_string(),
            Type::Word(words) => {
                let word = self.one_of(words).map_or("", |(word, _)| word);
                self.keys.insert(format!("{}.{key} {word}", section.name));
                word.into()
            }
            Type::Optional(inner) => match self.r.once_in(4) {
                true => {
                    self.keys.insert(format!("{}.{key} none", section.name));
                    "none".into()
                }
                false => self.value(section, key, inner),
            },
            Type::Either(kinds) => {
                let at = self.r.below(kinds.len() as u64) as usize;
                self.value(section, key, &kinds[at])
            }
            Type::Section(inner) => {
                let short = inner.short.and_then(|short| inner.key(short));
                match short.filter(|_| self.r.once_in(2)) {
                    Some(short) => self.value(inner, short.name, &short.kind),
                    None => self.section(inner, &[]),
                }
            }
            Type::List(inner) => {
                let elements: Vec<String> =
                    (0..self.r.below(4)).map(|_| self.value(section, key, inner)).collect();
                format!("[{}]", elements.join(", "))
            }
            // Components and layers are written by `model`; paths and fields are in `UNDRAWN`.
            Type::Text
            | Type::Path
            | Type::Field
            | Type::Names(_)
            | Type::Component
            | Type::Layers
            | Type::Composition
            | Type::Any => String::new(),
        }
    }

    /// A distribution of depths.
    fn depths(&mut self) -> String {
        let law = match self.r.below(4) {
            0 => {
                self.keys.insert("recur.depth fixed".into());
                return "fixed".into();
            }
            1 => "uniform: [1, 2]",
            2 => "poisson: 1.5, max: 3",
            _ => "lognormal_poisson: {mean: 2, sigma: 0.5}, min: 1, max: 3",
        };
        let keys = ["uniform", "poisson", "lognormal_poisson", "min", "max", "mean", "sigma"];
        for key in keys.into_iter().filter(|key| law.contains(key)) {
            let section = if matches!(key, "mean" | "sigma") { "lognormal" } else { "depths" };
            self.keys.insert(format!("{section}.{key}"));
        }
        format!("{{{law}}}")
    }

    /// The passes that a loss sees.
    fn exit(&mut self) -> String {
        let (word, key) = match self.r.below(4) {
            0 => ("last", "recur.exit last"),
            1 => ("mean", "recur.exit mean"),
            2 => ("{gate: 0.3}", "exit.gate"),
            _ => ("{expected: 0.3}", "exit.expected"),
        };
        self.keys.insert(key.into());
        word.into()
    }

    /// A statement on the stream.
    fn statement(&mut self) -> String {
        match self.r.below(6) {
            0 => ["norm", "norm", "norm final", "norm g", "norm plain"][self.r.below(5) as usize].into(),
            // Not `start zeros`: a norm of zeros has a slope that differences do not see.
            5 => "start normal 0.5".into(),
            1 => ["linear", "linear normal", "linear identity"][self.r.below(3) as usize].into(),
            2 | 3 if !self.saved.is_empty() => {
                let name = self.one_of(&self.saved.clone()).unwrap_or_default();
                let hows = ["add", "linear", "linear identity", "linear normal", "scaled", "diagonal"];
                format!("mix {name} {}", self.one_of(&hows).unwrap_or_default())
            }
            _ => {
                let name = self.one_of(&["e", "x0", "mix"]).unwrap_or_default();
                self.saved.push(name);
                format!("save {name}")
            }
        }
    }

    /// An item of at most `budget` applications; `last` of the body.
    fn item(&mut self, components: &[&str], depth: u64, budget: &mut u64, last: bool) -> String {
        if self.r.once_in(4) {
            let history = depth == 2 && !self.looped;
            return match self.statement() {
                norm if norm == "norm" && history && self.r.once_in(2) => {
                    format!(
                        "\"mix history weighted{}\"",
                        ["", " every 2", " apart 2"][self.r.below(3) as usize]
                    )
                }
                statement => format!("\"{statement}\""),
            };
        }
        if depth == 0 || *budget < 2 || self.r.once_in(2) {
            *budget = budget.saturating_sub(1);
            let mut names = components.to_vec();
            let layer = match (self.composition(&mut names, 4), self.r.below(8)) {
                (layer, 0) => format!("{layer} > norm"),
                (layer, 1) => format!("norm > {layer} > norm"),
                (layer, _) => layer,
            };
            return match self.r.once_in(4) {
                true => {
                    self.keys.insert("layer.layer".into());
                    format!("{{layer: \"{layer}\"}}")
                }
                false => format!("\"{layer}\""),
            };
        }
        let count = 1 + self.r.below(3).min(*budget - 1);
        let mut inside = *budget / count;
        let section = if self.r.once_in(2) { &keys::REPEAT } else { &keys::RECUR };
        let around = self.passes;
        if section.name == "recur" {
            self.passes = Some(count).filter(|_| depth == 2);
        }
        let chosen = section.name == "recur" && depth == 2 && count > 1 && self.r.once_in(4);
        let items: Vec<String> = match chosen {
            true => vec![self.chosen(components)],
            false => (0..1 + self.r.below(2))
                .map(|_| self.item(components, depth - 1, &mut inside, false))
                .collect(),
        };
        self.passes = around;
        *budget = budget.saturating_sub(count);
        self.looped |= section.name == "recur";
        let mut pairs = vec![];
        for key in section.keys {
            let value = match key.name {
                "layers" => format!("[{}]", items.join(", ")),
                // Tokens that have made their passes stay as they are.
                "residual_norm" if chosen => "false".into(),
                "embed" | "exit" if chosen => continue,
                name if name == section.name => count.to_string(),
                "backprop" | "depth" | "lora" | "embed" | "exit" | "kv" if depth < 2 || !self.writes(key) => {
                    continue;
                }
                // Passes with weights of their own are as many as are written.
                "lora" | "embed" if pairs.iter().any(|pair: &String| pair.starts_with("depth")) => continue,
                // It is the last item that has exits.
                "exit"
                    if !last
                        || count < 2
                        || pairs.iter().any(|pair: &String| pair.starts_with("backprop")) =>
                {
                    continue;
                }
                "backprop" => (1 + self.r.below(2)).to_string(),
                "depth" => self.depths(),
                "exit" => self.exit(),
                name @ ("lora" | "embed" | "kv") => self.value(section, name, &key.kind),
                name if self.writes(key) => self.value(section, name, &key.kind),
                _ => continue,
            };
            self.keys.insert(format!("{}.{}", section.name, key.name));
            pairs.push(format!("{}: {value}", key.name));
        }
        format!("{{{}}}", pairs.join(", "))
    }

    /// A composition over some of the names, each used at most once.
    fn composition(&mut self, names: &mut Vec<&str>, depth: u64) -> String {
        if depth > 0 && self.r.once_in(5) {
            return format!("skip({}) {{ {} }}", self.skip(), self.composition(names, depth - 1));
        }
        if depth == 0 || names.len() < 2 || self.r.once_in(3) {
            return names.remove(self.r.below(names.len() as u64) as usize).to_string();
        }
        let join = if self.r.once_in(2) { " | " } else { " > " };
        let mut terms = vec![];
        for _ in 0..2 + self.r.below(2) {
            if !names.is_empty() {
                terms.push(self.composition(names, depth - 1));
            }
        }
        match &terms[..] {
            [one] => one.clone(),
            _ => format!("({})", terms.join(join)),
        }
    }

    /// A layer whose tokens choose how many passes of the loop around they make.
    fn chosen(&mut self, components: &[&str]) -> String {
        self.keys.insert("skip.depth_choice".into());
        let mut keys = String::new();
        for (key, value) in [("balance", "0.01"), ("temperature", "0.5"), ("network", "3"), ("z_loss", "0.3")]
        {
            if self.r.once_in(2) {
                self.keys.insert(format!("skip.{key}"));
                keys += &format!(", {key} {value}");
            }
        }
        let mut names = components.to_vec();
        let inner = self.composition(&mut names, 2);
        format!("\"skip(depth_choice{keys}) {{ {inner} }}\"")
    }

    /// The arguments of any other `skip`.
    fn skip(&mut self) -> String {
        let passes = self.passes;
        self.until(
            |w| w.arguments(&keys::SKIP, ", "),
            |arguments| {
                let model =
                    "model: {vocab: 7, hidden: 4, context: 4, components: {a: {mlp: {intermediate: 1}}}, ";
                let layer = format!("\"skip({arguments}) {{ a }}\"");
                let body = match passes {
                    Some(passes) => format!("{{recur: {passes}, layers: [{layer}]}}"),
                    None => layer,
                };
                read(&format!("{model}body: [{body}]}}\n")).is_some()
            },
        )
    }

    /// A share of tokens, or one for each pass of the loop around, none larger than that before.
    fn capacity(&mut self) -> String {
        self.keys.insert("skip.capacity".into());
        let mut shares = values("skip", "capacity").to_vec();
        let Some(passes) = self.passes.filter(|_| self.r.once_in(2)) else {
            return self.one_of(&shares).unwrap_or_default().into();
        };
        shares.reverse();
        let mut at = 0;
        let each = (0..passes).map(|_| {
            at = (at + self.r.below(2) as usize).min(shares.len() - 1);
            shares[at]
        });
        format!("[{}]", each.collect::<Vec<_>>().join(", "))
    }

    /// Keys in front of their values, as in a composition; one that is `true` stands alone, and one
    /// that is `false` not at all.
    fn arguments(&mut self, section: &'static Section, comma: &str) -> String {
        let mut all = vec![];
        for key in section.keys {
            let name = key.name;
            let written = match (section.name, name) {
                ("skip", "depth_choice" | "balance") => false,
                ("skip", "capacity") => true,
                _ => self.writes(key),
            };
            if !written {
                continue;
            }
            let inner = match &key.kind {
                Type::Section(inner) | Type::Optional(Type::Section(inner)) => Some(*inner),
                _ => None,
            };
            all.push(match (&key.kind, inner) {
                (Type::Bool, _) => name.to_string(),
                (Type::Either(_), _) if name == "capacity" => format!("capacity {}", self.capacity()),
                (_, Some(inner)) => format!("{name} {}", self.arguments(inner, " ")),
                (kind, None) => format!("{name} {}", self.value(section, name, kind)),
            });
            self.keys.insert(format!("{}.{name}", section.name));
        }
        all.join(comma)
    }
}
