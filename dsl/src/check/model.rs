//! The architecture and its components.

use indexmap::IndexMap;

use super::{Checker, Group};
use crate::ast::*;
use crate::keys::{self, Kind, Range, Type};
use crate::spec::*;

/// Words that have a meaning in a composition, or alone in its place.
const RESERVED: [&str; 9] = ["norm", "linear", "skip", "layer", "repeat", "recur", "none", "true", "false"];

impl Checker {
    pub(super) fn model(&mut self, group: &Group) -> Option<Model> {
        let name = self.text(group, "name");
        self.folder_name(name.as_deref(), "model.name", "model");
        let (vocab, hidden, context) =
            (self.int(group, "vocab"), self.int(group, "hidden"), self.int(group, "context"));
        (self.known.vocab, self.known.context) = (vocab, context);
        let tie = self.bool(group, "tie");
        self.known.tied = tie == Some(true);
        let embed_scale = self.embed_scale(group);
        let logit_softcap = self.real_or_none(group, "logit_softcap");
        let norm = self.section_or_default(group, "norm", &keys::NORM);
        let (eps, unit_offset) = (self.real(&norm, "eps"), self.bool(&norm, "unit_offset"));
        let stream = self.stream(group);
        self.known.turns = stream.as_ref().is_some_and(Stream::has_turns);
        self.known.attends = matches!(stream, Some(Stream::Attend { .. }));
        self.known.lanes = matches!(stream, Some(Stream::Lanes { .. }));
        let components = self.components(group, hidden);
        let body = self.body(group, components.as_ref());
        Some(Model {
            name: name?,
            vocab: vocab?,
            hidden: hidden?,
            context: context?,
            tie: tie?,
            embed_scale: embed_scale?,
            logit_softcap: logit_softcap?,
            norm: Norm { eps: eps?, unit_offset: unit_offset? },
            stream: stream?,
            components: components?.into_iter().filter_map(|(name, c)| Some((name, c?))).collect(),
            body: body?,
        })
    }

    fn stream(&mut self, group: &Group) -> Option<Stream> {
        let Some(value) = self.written(group, "stream") else { return Some(Stream::Sum) };
        let map = match &value.kind {
            ValueKind::Word(word) if word == "sum" => return Some(Stream::Sum),
            ValueKind::Word(word) if word == "attend" => return Some(Stream::Attend { block: 1 }),
            ValueKind::Word(word) if word == "lanes" => {
                let message = "`lanes` has no number";
                self.error(
                    "missing-key",
                    value.span,
                    message,
                    "write `stream lanes 4` (YAML: `stream: {lanes: 4}`)",
                );
                return None;
            }
            ValueKind::Map(map) => map,
            _ => {
                self.wrong_type("stream", &Self::kind(group, "stream"), value);
                return None;
            }
        };
        let own = self.group(&keys::STREAM, map, group.path("stream"), value.span);
        let (attend, lanes) = (self.has(&own, "attend"), self.has(&own, "lanes"));
        match (attend, lanes) {
            (true, true) => {
                let help = "a stream has one wiring: take one away";
                self.error_at("unknown-key", &own.path("lanes"), "`lanes` does not go with `attend`", help);
                None
            }
            (false, false) if own.meant.is_empty() => {
                let help = "write `stream: {lanes: 4}`, `stream: {attend: {block: 8}}` or `stream: sum`";
                self.error("missing-key", own.at, "`stream` names no wiring", help);
                None
            }
            (false, false) => None,
            (true, false) => {
                if self.has(&own, "kind") {
                    let help = "it is of `lanes`: take it away";
                    self.error_at("unknown-key", &own.path("kind"), "`kind` does not go with `attend`", help);
                }
                let attend = self.section(&own, "attend")?;
                Some(Stream::Attend { block: self.int(&attend, "block")? })
            }
            (false, true) => {
                let count = self.int(&own, "lanes");
                if let Some(count) = count.filter(|count| *count > keys::MOST_LANES) {
                    let message = format!("{count} lanes are too many");
                    let help = format!("each reads every other one: write at most {}", keys::MOST_LANES);
                    self.error_at("out-of-range", &own.path("lanes"), message, help);
                }
                let kind = match self.has(&own, "kind") {
                    true => self.word(&own, "kind"),
                    false => Some("static"),
                };
                let kind = match kind? {
                    "dynamic" => LaneKind::Dynamic,
                    "mhc" => LaneKind::Mhc,
                    _ => LaneKind::Static,
                };
                Some(Stream::Lanes { count: count?, kind })
            }
        }
    }

    fn embed_scale(&mut self, group: &Group) -> Option<Option<EmbedScale>> {
        let Some(value) = self.written(group, "embed_scale") else { return Some(None) };
        match &value.kind {
            ValueKind::Word(word) if word == "none" => Some(None),
            ValueKind::Word(word) if word == "sqrt_hidden" => Some(Some(EmbedScale::SqrtHidden)),
            _ => {
                let kind = Self::kind(group, "embed_scale");
                let scale = self.real_of("embed_scale", &kind, Range::NonZero, value)?;
                Some(Some(EmbedScale::Value(scale)))
            }
        }
    }

    /// The components by name; `None` for one that is wrong, so that its name is still known.
    fn components(
        &mut self,
        group: &Group,
        hidden: Option<u64>,
    ) -> Option<IndexMap<String, Option<Component>>> {
        self.setting(group, "components")?;
        let value = self.written(group, "components")?;
        let ValueKind::Map(map) = &value.kind else {
            self.wrong_type("components", &Self::kind(group, "components"), value);
            return None;
        };
        let mut components = IndexMap::new();
        for item in &map.items {
            let Pair { key, value } = &item.node;
            let lanes = key.text.strip_prefix("lanes").is_some_and(|n| n.parse::<u32>().is_ok());
            if !is_word(&key.text) || key.text.contains('.') || RESERVED.contains(&key.text.as_str()) || lanes
            {
                let help = "a name has letters, digits and `_`, begins with a letter, and is no word of the language";
                self.error("bad-name", key.span, format!("`{}` cannot name a component", key.text), help);
                continue;
            }
            if components.contains_key(&key.text) {
                let help = "choose another name";
                self.error("duplicate-key", key.span, format!("`{}` is defined twice", key.text), help);
                continue;
            }
            self.sources.fields.insert(format!("model.components.{}", key.text), key.span);
            let component = self.component(&key.text, key, value, hidden);
            components.insert(key.text.clone(), component);
        }
        self.sources_of_keys(&components);
        Some(components)
    }

    /// Whether components whose keys others read have such keys.
    fn sources_of_keys(&mut self, components: &IndexMap<String, Option<Component>>) {
        for (name, component) in components {
            let Some(Component::Sequence(reader)) = component else { continue };
            let Some(source) = &reader.kv_from else { continue };
            let path = format!("model.components.{name}.kv_from");
            let sequences = || {
                components.iter().filter_map(|(other, c)| match c {
                    Some(Component::Sequence(a)) if a.kv_from.is_none() && other != name => {
                        Some(other.as_str())
                    }
                    _ => None,
                })
            };
            let help = match crate::suggest::closest(source, sequences()) {
                Some(known) => format!("did you mean `{known}`?"),
                None => "name a `sequence` with keys and values of its own".into(),
            };
            match components.get(source) {
                None => {
                    let message = format!("there is no component `{source}`");
                    self.error_at("unknown-component", &path, message, help);
                }
                Some(None) => {}
                Some(Some(Component::Sequence(a))) if a.latent.is_some() => {
                    let message = format!("`{source}` is latent, and its keys are not read by others");
                    self.error_at("unreached", &path, message, "name a `sequence` that is not latent");
                }
                Some(Some(Component::Sequence(a))) if a.kv_from.is_none() && source != name => {
                    let (own, of) = ((reader.kv_heads, reader.head_size), (a.kv_heads, a.head_size));
                    if own != of {
                        let message = format!(
                            "`{source}` has {} key heads of size {}, and `{name}` reads {} of size {}",
                            of.0, of.1, own.0, own.1
                        );
                        let help = format!("write `kv_heads: {}` and `head_size: {}`", of.0, of.1);
                        self.error_at("indivisible", &path, message, help);
                    }
                }
                Some(Some(_)) => {
                    let message = format!("`{source}` has no keys and values of its own for the sequence");
                    self.error_at("unknown-component", &path, message, help);
                }
            }
        }
    }

    fn component(&mut self, name: &str, key: &Key, value: &Value, hidden: Option<u64>) -> Option<Component> {
        let path = format!("model.components.{name}");
        let example = format!("write `{name}: {{sequence: {{heads: 8, head_size: 64}}}}`");
        let kinds = crate::suggest::listing(keys::COMPONENTS.iter().map(|kind| kind.name));
        let map = match &value.kind {
            ValueKind::Map(map) => map,
            ValueKind::Invalid => return None,
            _ => {
                let help = format!("a component is {kinds} with its keys: {example}");
                self.error(
                    "wrong-type",
                    value.span,
                    format!("{} is not a component", super::capital(&value.describe())),
                    help,
                );
                return None;
            }
        };
        let (first, rest) = match map.items.split_first() {
            Some((first, rest)) => (&first.node, rest),
            None => {
                self.error("missing-key", key.span, format!("`{name}` has no kind"), example);
                return None;
            }
        };
        if let Some(extra) = rest.first() {
            let help = format!("it has one kind ({kinds}) and its keys stand under it: {example}");
            self.error("unknown-key", extra.node.key.span, format!("`{name}` has more than one kind"), help);
        }
        let of = |kind: &Kind| kind.section().name == first.key.text;
        let Some(kind) = Kind::ALL.into_iter().find(of) else {
            let names = keys::COMPONENTS.iter().map(|kind| kind.name);
            let help = match crate::suggest::closest(&first.key.text, names) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("a component is {kinds}"),
            };
            self.error(
                "unknown-key",
                first.key.span,
                format!("`{}` is not a kind of component", first.key.text),
                help,
            );
            return None;
        };
        let section = kind.section();
        self.known.components.push((name.to_string(), section));
        let ty = Type::Section(section);
        let group = self.section_of(section, &ty, section.name, &first.value, path, key.span)?;
        match kind {
            Kind::Sequence => self.attention(&group, hidden, false).map(Component::Sequence),
            Kind::Depth => self.attention(&group, hidden, true).map(Component::Depth),
            Kind::Experts => self.experts(&group).map(Component::Experts),
            Kind::Mlp => self.mlp(&group).map(Component::Mlp),
        }
    }

    fn attention(&mut self, group: &Group, hidden: Option<u64>, depth: bool) -> Option<Attention> {
        let heads = self.int(group, "heads");
        let kv_heads = if self.has(group, "kv_heads") { self.int(group, "kv_heads") } else { heads };
        if let (Some(heads), Some(kv_heads)) = (heads, kv_heads)
            && heads % kv_heads != 0
        {
            let message = format!("{heads} heads cannot share {kv_heads} key and value heads");
            let help = format!("`kv_heads` divides `heads`: {}", divisors(heads));
            self.error_at("indivisible", &group.path("kv_heads"), message, help);
        }
        let head_size = match (self.has(group, "head_size"), hidden, heads) {
            (true, ..) => self.int(group, "head_size"),
            (false, Some(hidden), Some(heads)) if hidden % heads == 0 => Some(hidden / heads),
            (false, Some(hidden), Some(heads)) => {
                let message = format!("hidden {hidden} is not divisible by {heads} heads");
                self.error_at("indivisible", &group.path("heads"), message, "write `head_size`");
                None
            }
            _ => None,
        };
        let is_latent = self.has(group, "latent") && !self.is_none(group, "latent");
        let rope = self.rope(group, depth);
        if let (Some(Some(rope)), Some(size)) = (&rope, head_size)
            && !is_latent
            && (rope.turning(size) % 2 == 1 || rope.turning(size) == 0)
        {
            let help = "a rotation turns pairs: make it even, or write `rope: none`";
            if rope.share == 1.0 {
                let message = format!("`head_size` is odd: {size}");
                self.error_at("odd-size", &group.path("head_size"), message, help);
            } else {
                self.odd_share(&group.path("rope"), rope, size);
            }
        }
        let qk_norm = self.word(group, "qk_norm").map(|word| match word {
            "rms" => QkNorm::Rms,
            "rms_all" => QkNorm::RmsAll,
            _ => QkNorm::None,
        });
        let window = if depth { Some(None) } else { self.int_or_none(group, "window") };
        let (softcap, scale) = (self.real_or_none(group, "softcap"), self.real_or_none(group, "scale"));
        let sink = if depth { Some(false) } else { self.bool(group, "sink") };
        let kv_from = if depth { Some(None) } else { self.text_or_none(group, "kv_from") };
        let value_residual = if depth { Some(false) } else { self.bool(group, "value_residual") };
        if let (Some(Some(source)), Some(true)) = (&kv_from, value_residual) {
            let message = format!("it has no values to mix: it reads those of `{source}`");
            let help = format!("write `value_residual` in `{source}`");
            self.error_at("unreached", &group.path("value_residual"), message, help);
        }
        let latent = match !depth && is_latent {
            true => self.latent(group, [heads, kv_heads, head_size], qk_norm).map(Some),
            false => Some(None),
        };
        let depth_keys = if depth { Some(false) } else { self.bool(group, "depth_keys") };
        if depth_keys == Some(true) {
            if let Some(Some(source)) = &kv_from {
                let message = format!("it makes no keys to see again: it reads those of `{source}`");
                let help = format!("write `depth_keys` in `{source}`");
                self.error_at("unreached", &group.path("depth_keys"), message, help);
            }
            if let Some(Some(_)) = softcap {
                let message = "`depth_keys` and `softcap` are not computed in one softmax";
                self.error_at("unreached", &group.path("depth_keys"), message, "take one of them away");
            }
        }
        let gate = self.word_or_none(group, "gate").map(|word| match word {
            Some("head") => Some(HeadGate::Head),
            Some(_) => Some(HeadGate::Element),
            None => None,
        });
        let bias = self.word_or_none(group, "bias").map(|word| match word {
            Some("qk") => Some(Bias::Qk),
            Some("qkv") => Some(Bias::Qkv),
            Some("out") => Some(Bias::Out),
            Some(_) => Some(Bias::All),
            None => None,
        });
        let (pre_norm, post_norm) = (self.bool(group, "pre_norm"), self.bool(group, "post_norm"));
        let plain = matches!(latent, Some(Some(_))) && !self.has(group, "projection");
        let projection = match plain || self.is_none(group, "projection") {
            true => Some(None),
            false => self.projection(group).map(Some),
        };
        Some(Attention {
            heads: heads?,
            kv_heads: kv_heads?,
            head_size: head_size?,
            rope: rope?,
            qk_norm: qk_norm?,
            window: window?,
            softcap: softcap?,
            scale: scale?,
            sink: sink?,
            kv_from: kv_from?,
            latent: latent?,
            value_residual: value_residual?,
            depth_keys: depth_keys?,
            gate: gate?,
            bias: bias?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
            projection: projection?,
        })
    }

    /// Latent attention of heads of this size.
    fn latent(
        &mut self,
        owner: &Group,
        [heads, kv_heads, head_size]: [Option<u64>; 3],
        qk_norm: Option<QkNorm>,
    ) -> Option<Latent> {
        let group = self.section(owner, "latent")?;
        let (query, kv) = (self.int_or_none(&group, "query"), self.int(&group, "kv"));
        let (turned, value) = (self.int(&group, "turned"), self.int(&group, "value"));
        let help = "take one of them away";
        for key in ["value_residual", "depth_keys"] {
            if self.has(owner, key) && self.bool(owner, key) == Some(true) {
                let message = format!("`{key}` is not computed with `latent`");
                self.error_at("unreached", &owner.path(key), message, help);
            }
        }
        for key in ["kv_from", "gate", "bias", "projection"] {
            if self.has(owner, key) && !self.is_none(owner, key) {
                let message = format!("`{key}` is not computed with `latent`");
                self.error_at("unreached", &owner.path(key), message, help);
            }
        }
        if qk_norm.is_some_and(|norm| norm != QkNorm::None) {
            let message = "`latent` normalises the vectors that queries and keys are made of, and not these";
            self.error_at("unreached", &owner.path("qk_norm"), message, "write `qk_norm: none`");
        }
        if heads != kv_heads {
            let message = "`latent` makes keys and values for every head";
            self.error_at("unreached", &owner.path("kv_heads"), message, "take `kv_heads` away");
        }
        let (turned, value, size) = (turned?, value?, head_size?);
        if turned % 2 == 1 || turned >= size {
            let message = format!("{turned} elements of a head of {size} cannot turn");
            let help = format!("write an even number below {size}");
            self.error_at("odd-size", &group.path("turned"), message, help);
        }
        if value > size {
            let message = format!("values of {value} are longer than heads of {size}");
            self.error_at("out-of-range", &group.path("value"), message, format!("write at most {size}"));
        }
        Some(Latent { query: query?, kv: kv?, turned, value })
    }

    fn projection(&mut self, owner: &Group) -> Option<Projection> {
        if self.has(owner, "projection") {
            let group = self.section(owner, "projection")?;
            return self.projection_of(&group);
        }
        let group = self.section_or_default(owner, "projection", &keys::PROJECTION);
        self.projection_of(&group)
    }

    fn projection_of(&mut self, group: &Group) -> Option<Projection> {
        let count = self.int_or_none(group, "count");
        let shared = self.bool(group, "shared");
        let router = self.router(group, true);
        Some(Projection { count: count?, shared: shared?, router: router? })
    }

    fn activation(&mut self, group: &Group) -> Option<Activation> {
        self.word(group, "activation").map(|word| match word {
            "geglu" => Activation::Geglu,
            "swiglu_clamped" => Activation::SwigluClamped,
            "relu" => Activation::Relu,
            "gelu" => Activation::Gelu,
            "relu2" => Activation::Relu2,
            _ => Activation::Swiglu,
        })
    }

    fn experts(&mut self, group: &Group) -> Option<Experts> {
        let (count, active) = (self.int(group, "count"), self.int(group, "active"));
        let (intermediate, noop) = (self.int(group, "intermediate"), self.int(group, "noop"));
        let activation = self.activation(group);
        if let (Some(count), Some(active), Some(noop)) = (count, active, noop)
            && active > count + noop
        {
            let message = format!("{active} experts cannot be active: there are {}", count + noop);
            let help = format!(
                "write at most {} (`count`{})",
                count + noop,
                if noop > 0 { " and `noop`" } else { "" }
            );
            self.error_at("out-of-range", &group.path("active"), message, help);
        }
        let (shared, shared_gate) = (self.int(group, "shared"), self.bool(group, "shared_gate"));
        if let (Some(0), Some(true)) = (shared, shared_gate) {
            let help = "write how many there are: `shared: 1`";
            let path = group.path("shared_gate");
            self.error_at("unreached", &path, "`shared_gate` gates shared experts, and there are none", help);
        }
        let biased = self.bool(group, "biased");
        let router = self.router(group, false);
        if let (Some(router), Some(count), Some(active), Some(noop)) = (&router, count, active, noop) {
            self.expert_groups(group, router, count + noop, active);
        }
        let (pre_norm, post_norm) = (self.bool(group, "pre_norm"), self.bool(group, "post_norm"));
        Some(Experts {
            count: count?,
            active: active?,
            intermediate: intermediate?,
            activation: activation?,
            noop: noop?,
            shared: shared?,
            shared_gate: shared_gate?,
            biased: biased?,
            router: router?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
        })
    }

    fn mlp(&mut self, group: &Group) -> Option<Mlp> {
        let intermediate = self.int(group, "intermediate");
        let activation = self.activation(group);
        let (pre_norm, post_norm) = (self.bool(group, "pre_norm"), self.bool(group, "post_norm"));
        Some(Mlp {
            intermediate: intermediate?,
            activation: activation?,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
        })
    }
}

/// The divisors of a small number, for help.
fn divisors(number: u64) -> String {
    if number > 4096 {
        return "write a divisor".into();
    }
    let divisors: Vec<String> =
        (1..=number).filter(|d| number.is_multiple_of(*d)).map(|d| d.to_string()).collect();
    divisors.join(", ")
}
