//! Weights that come from a model of another architecture.

use super::{Checker, Group, words};
use crate::ast::{Value, ValueKind};
use crate::keys::{self, Type};
use crate::spec::{Depth, How, Move, Transplant};

impl Checker {
    pub(super) fn transplant(&mut self, group: &Group) -> Option<Transplant> {
        let from = self.text_or_none(group, "from");
        let depth = self.depth(group);
        let mut map = Some(vec![]);
        for (value, path) in self.elements(group, "map")? {
            let kind = Type::Section(&keys::MOVE);
            let own = self.section_of(&keys::MOVE, &kind, "map", value, path, value.span);
            let read = own.and_then(|own| self.moved(&own));
            map = map.zip(read).map(|(mut map, read)| {
                map.push(read);
                map
            });
        }
        Some(Transplant { from: from?, depth: depth?, map: map? })
    }

    /// The donor's layers for each application: a word, or a list.
    fn depth(&mut self, group: &Group) -> Option<Option<Depth>> {
        let Some(value) = self.written(group, "depth") else { return Some(None) };
        let kind = Self::kind(group, "depth");
        if matches!(&value.kind, ValueKind::List(_)) {
            let elements = self.elements(group, "depth")?;
            let layers: Vec<_> = elements.iter().map(|(value, _)| self.layers(value)).collect();
            let layers: Vec<Vec<u64>> = layers.into_iter().collect::<Option<_>>()?;
            if layers.is_empty() {
                let help = "write the donor's layer for each application of a layer, from 0";
                self.error("empty", value.span, "`depth` is empty", help);
                return None;
            }
            return Some(Some(Depth::Given(layers)));
        }
        let word = if let ValueKind::Word(word) = &value.kind { Some(word.as_str()) } else { None };
        let known = words(&kind).into_iter().flatten().map(|(word, _)| *word).find(|w| Some(*w) == word);
        let depth = match known {
            Some("spread") => Depth::Spread,
            Some("stack") => Depth::Stack,
            Some("zero") => Depth::Zero,
            Some("interpolate") => Depth::Interpolate,
            Some("average") => Depth::Average,
            Some(_) | None => {
                self.wrong_type("depth", &kind, value);
                return None;
            }
        };
        Some(Some(depth))
    }

    /// A layer of the donor, or several.
    fn layers(&mut self, value: &Value) -> Option<Vec<u64>> {
        let kind = keys::COUNT;
        let ValueKind::List(list) = &value.kind else {
            return self.whole("depth", &kind, 0, value).map(|layer| vec![layer]);
        };
        if list.items.is_empty() {
            let help = "a mean is of one layer or more";
            self.error("empty", value.span, "these are no layers", help);
            return None;
        }
        list.items.iter().map(|item| self.whole("depth", &kind, 0, &item.node)).collect()
    }

    fn moved(&mut self, group: &Group) -> Option<Move> {
        let to = self.text(group, "to");
        let from = match self.written(group, "from").map(|value| &value.kind) {
            Some(ValueKind::List(_)) => self.texts(group, "from"),
            _ => self.text_or_none(group, "from").map(|from| from.into_iter().collect()),
        };
        let how = self.word_or_none(group, "how");
        let noise = self.real(group, "noise");
        let how = how?.and_then(How::of);
        let (to, from, noise) = (to?, from?, noise?);
        if let (Some(How::Fresh | How::Zero), false) = (how, from.is_empty()) {
            let help = "take `from` away, or say how its numbers are taken";
            let message = "nothing comes from the donor this way, and `from` names tensors of it";
            self.error_at("unknown-key", &group.path("from"), message, help);
            return None;
        }
        let stars = |text: &str| text.split('.').filter(|word| *word == "*").count();
        let most = stars(&to);
        let more = from.iter().position(|from| stars(from) > most);
        if let Some(place) = more {
            let path = match self.written(group, "from").map(|value| &value.kind) {
                Some(ValueKind::List(_)) => format!("{}[{place}]", group.path("from")),
                _ => group.path("from"),
            };
            let message =
                format!("`{}` has more `*` than `{to}`, which says what they stand for", from[place]);
            self.error_at("bad-name", &path, message, "write a word for each that is too many");
            return None;
        }
        Some(Move { to, from, how, noise })
    }
}

impl How {
    /// The one of that name.
    pub fn of(word: &str) -> Option<How> {
        let all = [
            ("copy", How::Copy),
            ("slice", How::Slice),
            ("pad", How::Pad),
            ("group", How::Group),
            ("tile", How::Tile),
            ("factor", How::Factor),
            ("fresh", How::Fresh),
            ("zero", How::Zero),
        ];
        all.into_iter().find_map(|(name, how)| (name == word).then_some(how))
    }
}
