//! The architecture and its components.

use indexmap::IndexMap;

use super::{Checker, Group};
use crate::ast::*;
use crate::keys::{self, Range, Type};
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
        let head_bias = self.bool(group, "head_bias");
        let embed_scale = self.embed_scale(group);
        let logit_softcap = self.real_or_none(group, "logit_softcap");
        let logit_scale = self.real_or_none(group, "logit_scale");
        let output_scale = self.real_or_none(group, "output_scale");
        let norm = self.section_or_default(group, "norm", &keys::NORM);
        let (eps, unit_offset) = (self.real(&norm, "eps"), self.bool(&norm, "unit_offset"));
        let stream = self.stream(group);
        self.known.turns = stream.as_ref().is_some_and(Stream::has_turns);
        self.known.attends = matches!(stream, Some(Stream::Attend { .. }));
        self.known.lanes = matches!(stream, Some(Stream::Lanes { .. }));
        let components = self.components(group, hidden, vocab);
        let body = self.body(group, components.as_ref());
        if let (Some(components), Some(body)) = (&components, &body) {
            self.values_before(components, body);
        }
        let model = Model {
            name: name?,
            vocab: vocab?,
            hidden: hidden?,
            context: context?,
            tie: tie?,
            head_bias: head_bias?,
            embed_scale: embed_scale?,
            logit_scale: logit_scale?,
            logit_softcap: logit_softcap?,
            output_scale: output_scale?,
            norm: Norm { eps: eps?, unit_offset: unit_offset? },
            stream: stream?,
            adapt: None,
            components: components?.into_iter().filter_map(|(name, c)| Some((name, c?))).collect(),
            body: body?,
        };
        let adapt = self.adapt(group, &model)?;
        Some(Model { adapt, ..model })
    }

    /// Adapters of components that are there, and of matrices that these have.
    fn adapt(&mut self, group: &Group, model: &Model) -> Option<Option<Adapt>> {
        if !self.has(group, "adapt") || self.is_none(group, "adapt") {
            return Some(None);
        }
        let own = self.section(group, "adapt")?;
        let (rank, alpha) = (self.int(&own, "rank"), self.real_or_none(&own, "alpha"));
        let dora = self.bool(&own, "dora");
        let components = self.texts(&own, "components");
        let matrices = self.texts(&own, "matrices");
        let (components, matrices) = (components?, matrices?);
        if components.is_empty() {
            let help = format!("name components: {}", crate::suggest::listing(model.names()));
            self.error_at("missing-key", &own.path("components"), "nothing is adapted", help);
            return None;
        }
        let mut right = true;
        for (i, name) in
            components.iter().enumerate().filter(|(_, name)| !model.components.contains_key(*name))
        {
            let help = match crate::suggest::closest(name, model.names()) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("there are {}", crate::suggest::listing(model.names())),
            };
            let path = format!("{}[{i}]", own.path("components"));
            self.error_at("unknown-component", &path, format!("there is no component `{name}`"), help);
            right = false;
        }
        let known: Vec<String> = components.iter().flat_map(|name| model.matrices(name)).collect();
        let checked = if right { &matrices[..] } else { &[] };
        for (i, name) in checked.iter().enumerate().filter(|(_, name)| !known.contains(name)) {
            let all = known.iter().map(String::as_str);
            let message = format!("no matrix of these components is called `{name}`");
            let help = format!("they are {}", crate::suggest::listing(all));
            self.error_at("unknown-name", &format!("{}[{i}]", own.path("matrices")), message, help);
            right = false;
        }
        if right && known.is_empty() {
            let message = "these components have no matrix";
            self.error_at("unreached", &own.path("components"), message, "name components that have one");
            right = false;
        }
        let (rank, alpha, dora) = (rank?, alpha?, dora?);
        let alpha = alpha.unwrap_or(2.0 * rank as f64);
        right.then_some(Some(Adapt { components, matrices, rank, alpha, dora }))
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
                for key in ["kind", "embed"] {
                    if self.has(&own, key) {
                        let message = format!("`{key}` does not go with `attend`");
                        let help = "it is of `lanes`: take it away";
                        self.error_at("unknown-key", &own.path(key), message, help);
                    }
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
                Some(Stream::Lanes { count: count?, kind, embed: self.bool(&own, "embed")? })
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
        vocab: Option<u64>,
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
        self.depth_streams(&components);
        self.graphs(&components, hidden.zip(vocab).map(|(hidden, vocab)| [hidden, vocab]));
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

    /// Whether keys of the depth stream are of one size, and somebody reads them.
    fn depth_streams(&mut self, components: &IndexMap<String, Option<Component>>) {
        fn leave<'a>(
            (name, c): (&'a String, &'a Option<Component>),
        ) -> Option<(&'a String, Option<&'a Attention>)> {
            let component = c.as_ref().filter(|c| c.leaves_depth())?;
            Some((name, component.attention()))
        }
        let all: Vec<(&String, Option<&Attention>)> = components.iter().filter_map(leave).collect();
        let first = all.iter().find_map(|(name, a)| Some((*name, (*a)?)));
        let known = components.values().all(Option::is_some);
        for (name, own) in all {
            let path = format!("model.components.{name}.depth_stream");
            match (first, own) {
                (None, _) if known => {
                    let message = format!("no attention reads what `{name}` leaves in the depth stream");
                    self.error_at("unreached", &path, message, "write `depth_stream keys` in a `sequence`");
                }
                (Some((other, a)), Some(own))
                    if (own.kv_heads, own.head_size) != (a.kv_heads, a.head_size) =>
                {
                    let (heads, of) = (a.kv_heads, a.head_size);
                    let message = format!(
                        "the depth stream has {heads} key heads of size {of} (`{other}`), and `{name}` has {} of size {}",
                        own.kv_heads, own.head_size
                    );
                    let help = format!("write `kv_heads: {heads}` and `head_size: {of}`");
                    self.error_at("indivisible", &path, message, help);
                }
                (Some((other, a)), Some(own)) if own.qk_norm != a.qk_norm => {
                    let message = format!(
                        "keys of the depth stream are normed as those of `{other}`, and `{name}` has another `qk_norm`"
                    );
                    self.error_at("unreached", &path, message, "give both one `qk_norm`");
                }
                _ => {}
            }
        }
    }

    fn component(&mut self, name: &str, key: &Key, value: &Value, hidden: Option<u64>) -> Option<Component> {
        let path = format!("model.components.{name}");
        let example = format!(
            "write `{name} = sequence {{ heads 8  head_size 64 }}` (YAML: `{name}: {{sequence: {{heads: 8, head_size: 64}}}}`)"
        );
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
        let Some(kind) = Kind::BUILT_IN.into_iter().find(of) else {
            if let Some(defined) = self.defined(&first.key.text, &first.value, path, key.span) {
                return defined;
            }
            let help = match crate::suggest::closest(&first.key.text, self.kinds()) {
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
        kind.check(self, &group, hidden)
    }
}
