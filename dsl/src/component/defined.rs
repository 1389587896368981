//! A component that the specification defines.

use std::sync::Arc;

use indexmap::IndexMap;
use serde::Serialize;

use super::*;
use crate::define::graph::{Attend, Function, Node, Purpose};
use crate::define::library::LIBRARY;
use crate::define::{self, Context, Definition, Graph};
use crate::diagnostic::{Diagnostic, Severity};
use crate::spec::Model;

/// A component of a `define`, with its settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Defined {
    /// Its formulas.
    #[serde(serialize_with = "by_name")]
    pub definition: Arc<Definition>,
    /// Its settings by name, in the order of the definition.
    pub settings: IndexMap<String, Setting>,
    /// Whether it reads the stream through a norm of its own.
    pub pre_norm: bool,
    /// Whether the branch output has a norm of its own.
    pub post_norm: bool,
    /// Factors of scores of its attentions, by number, that a rule of the recipe gives those whose
    /// scale it does not write.
    #[serde(skip)]
    pub scores: Vec<Option<f64>>,
}

/// The value of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// A whole number that is not negative: a size.
    Size(u64),
    /// Another number.
    Number(f64),
    /// The value of its default, which is arithmetic over other settings.
    Derived,
}

/// The keys that every defined component has besides its settings.
pub static DEFINED: Section = Section {
    name: "defined",
    doc: "A component of a `define`: its settings are its keys.",
    short: None,
    keys: &[PRE_NORM, POST_NORM],
};

fn by_name<S: serde::Serializer>(definition: &Arc<Definition>, to: S) -> Result<S::Ok, S::Error> {
    definition.serialize(to)
}

impl Defined {
    /// The name of its definition.
    pub fn name(&self) -> &str {
        &self.definition.name.text
    }

    /// Its typed graph in a model; where its sizes do not fit, every mistake at its token.
    pub fn graph(&self, model: &Model) -> Result<Graph, Vec<Diagnostic>> {
        let names: Vec<&str> = model.components.keys().map(String::as_str).collect();
        let of = |name: &str| model.components.get(name);
        let context = Context::new([model.hidden, model.vocab], &of, &names);
        let mut elaborated = define::elaborate(&self.definition, &self.settings, context);
        elaborated.graph.scale_scores(&self.scores);
        match elaborated.found.iter().any(|found| found.severity == Severity::Error) {
            true => Err(elaborated.found),
            false => Ok(elaborated.graph),
        }
    }
}

impl Defined {
    /// The settings that count its parts, where its arithmetic has them: where they grow with the
    /// hidden size, the size of a part stays. `heads` of `gated_delta` is one. Of several it is the
    /// first whose dimension nothing is summed over. After it come those that must grow as well for
    /// the number of heads of keys to grow, as `groups` of `nsa`.
    pub fn counts(&self, model: &Model) -> Vec<String> {
        self.counted(model).unwrap_or_default()
    }

    fn counted(&self, model: &Model) -> Option<Vec<String>> {
        let twice = |settings: &[&str]| {
            let (mut own, mut model) = (self.clone(), model.clone());
            model.hidden = model.hidden.saturating_mul(2);
            for name in settings {
                if let Some(Setting::Size(size)) = own.settings.get_mut(*name) {
                    *size = size.saturating_mul(2);
                }
            }
            own.graph(&model).ok()
        };
        let here = self.graph(model).ok()?;
        let size = |graph: &Graph, of: &str| graph.dims.iter().find(|dim| dim.name == of).map(|dim| dim.size);
        let grown = |other: &Graph| -> Vec<String> {
            let own = here.dims.iter().map(|dim| &dim.name);
            own.filter(|of| *of != "hidden" && size(other, of) != size(&here, of)).cloned().collect()
        };
        let wide = twice(&[])?;
        let follow = grown(&wide);
        if follow.is_empty() {
            return None;
        }
        let reduced = here.reduced();
        let summed = |name: &str| reduced.iter().any(|dim| here.name(*dim) == name);
        let sizes = self.settings.iter().filter(|(_, own)| matches!(own, Setting::Size(size) if *size > 0));
        let sizes: Vec<&String> = sizes.map(|(name, _)| name).collect();
        let counts = sizes.iter().copied().filter(|name| {
            twice(&[name]).is_some_and(|wide| grown(&wide).iter().all(|dim| !follow.contains(dim)))
        });
        let counts: Vec<&String> = counts.collect();
        let found = *counts.iter().find(|name| !summed(name)).or(counts.first())?;
        // Heads may read keys of fewer heads, a divisor of their number. The count of numbers that
        // `linear` gives of a token then stays unless the heads of keys grow in number, too.
        let given = |graph: &Graph| -> Vec<u64> {
            let linear = |node: &&Node| matches!(node.function, Function::Linear(_));
            let size = |node: &Node| node.ty.dims.iter().map(|dim| graph.size(*dim)).product();
            graph.region.nodes.iter().filter(linear).map(size).collect()
        };
        let (now, many) = (given(&here), twice(&[found])?);
        let alone = given(&many);
        let quotients: Vec<&str> = many.dims.iter().map(|dim| dim.name.as_str()).collect();
        let quotients = quotients.iter().filter(|of| *of != found && size(&many, of) > size(&wide, of));
        let quotients: Vec<&str> = quotients.copied().collect();
        let grows = |name: &&&String| {
            let Some(both) = twice(&[found, name]) else { return false };
            let more = given(&both);
            let mut products = more.iter().zip(&alone).zip(&now);
            quotients.iter().any(|of| size(&both, of) == size(&wide, of))
                && products.any(|((both, alone), now)| alone == now && both > now)
        };
        let others = sizes.iter().filter(|name| **name != found).filter(grows);
        Some([&found].into_iter().chain(others).map(|name| (*name).clone()).collect())
    }

    /// Small bounds of sizes with which its formulas still fit, by name.
    fn small(&self, hidden: u64) -> Vec<(String, u64)> {
        let sizes = self.definition.sizes();
        let names: Vec<String> = sizes
            .into_iter()
            .filter(|name| matches!(self.settings.get(*name), Some(Setting::Size(size)) if *size > 1))
            .map(str::to_string)
            .collect();
        // Values of other components are not known here.
        let alone = self.definition.values_of_others().is_empty();
        let with = |bounds: &[u64]| -> Vec<(String, u64)> {
            names.iter().cloned().zip(bounds.iter().copied()).collect()
        };
        let fits = |bounds: &[u64]| {
            let mut settings = self.settings.clone();
            for (name, most) in with(bounds) {
                if let Some(Setting::Size(size)) = settings.get_mut(&name) {
                    *size = most.min(*size);
                }
            }
            let none = |_: &str| None;
            let found =
                define::elaborate(&self.definition, &settings, Context::new([hidden, 1], &none, &[])).found;
            found.iter().all(|found| found.severity != Severity::Error)
        };
        const BOUNDS: [u64; 4] = [4, 2, 3, 1];
        let uniform = BOUNDS.map(|bound| vec![bound; names.len()]);
        let mixed = (0..4usize.pow(names.len().min(4) as u32)).map(|number| {
            (0..names.len()).map(|place| BOUNDS[(number / 4usize.pow(place.min(3) as u32)) % 4]).collect()
        });
        let found = uniform.into_iter().chain(mixed).find(|bounds| !alone || fits(bounds));
        found.map(|bounds| with(&bounds)).unwrap_or_default()
    }
}

impl Described for Defined {
    fn norms(&self) -> (bool, bool) {
        (self.pre_norm, self.post_norm)
    }

    fn known(&self) -> Known<'_> {
        Known::Own
    }

    fn router(&self) -> Option<&Router> {
        None
    }

    fn about(&self) -> Option<String> {
        Some(self.name().to_string())
    }

    fn sizes(&mut self) -> Vec<(&str, Option<&mut u64>)> {
        let size = |setting| match setting {
            &mut Setting::Size(ref mut size) => Some(Some(size)),
            Setting::Number(_) => None,
            Setting::Derived => Some(None),
        };
        self.settings.iter_mut().filter_map(|(name, setting)| Some((name.as_str(), size(setting)?))).collect()
    }

    fn broken(&self, model: &Model) -> Option<String> {
        self.graph(model)
            .err()?
            .into_iter()
            .find(|found| found.severity == Severity::Error)
            .map(|found| found.message)
    }

    fn owned(&self) -> Option<u64> {
        None
    }

    fn attends(&self, model: &Model) -> bool {
        self.graph(model).is_ok_and(|graph| !graph.attentions().is_empty())
    }

    fn sees_by_place(&self, model: &Model) -> bool {
        let place = |node: &Node| matches!(node.function, Function::QueryPlace | Function::KeyPlace);
        let near = |a: &Attend| {
            a.window.is_some()
                || a.every.is_some()
                || a.among.is_some()
                || a.mask.as_ref().is_some_and(|mask| mask.nodes.iter().any(place))
        };
        let nodes = self.graph(model).map(|graph| graph.region.nodes).unwrap_or_default();
        nodes.iter().any(|node| match &node.function {
            Function::Attend(a) => near(a),
            Function::Apply(applied) => applied.component.sees_by_place(model),
            _ => false,
        })
    }

    fn reads_by_name(&self) -> bool {
        !self.definition.values_of_others().is_empty()
    }

    fn steps(&self, _: Mixes, _: u64) -> Option<Vec<(String, String)>> {
        None
    }

    fn formula(&self, _: Mixes) -> String {
        let definition = &self.definition;
        let library = LIBRARY.iter().find(|(own, _)| definition.library && *own == definition.name.text);
        match library {
            Some((_, text)) => text.trim().to_string(),
            None => format!("define {}\n{}", definition.name.text, definition.text.trim_end()),
        }
    }

    fn unmix(&mut self) {}

    fn matrices(&self, model: &Model) -> Vec<String> {
        let Ok(graph) = self.graph(model) else { return vec![] };
        let matrix = |purpose| matches!(purpose, Purpose::Matrix | Purpose::Output);
        let own = graph.weights.iter().filter(|w| matrix(w.purpose)).map(|w| w.matrix());
        let inner = graph.region.nodes.iter().flat_map(|node| match &node.function {
            Function::Apply(applied) => {
                let all = applied.component.matrices(model).into_iter();
                all.map(|name| format!("{}.{name}", applied.path)).collect()
            }
            _ => vec![],
        });
        own.chain(inner).collect()
    }

    fn shrink(&mut self, to: &mut Small) {
        let bounds = self.small(to.hidden);
        for (name, most) in bounds {
            if let Some(Setting::Size(size)) = self.settings.get_mut(&name) {
                to.less(&name, size, most);
            }
        }
    }

    fn settle(&mut self, _: u64) {}

    fn widths(&mut self) -> Vec<(&'static str, &mut u64)> {
        vec![]
    }
}

impl Language for Defined {
    fn check(_: &mut Checker, _: &Group, _: Kind, _: Option<u64>) -> Option<Self> {
        None
    }

    fn show(&self, keys: &mut Fields, _: bool) {
        for (setting, value) in &self.settings {
            match *value {
                Setting::Size(size) => keys.put(setting, int(size)),
                Setting::Number(number) => keys.put(setting, real(number)),
                Setting::Derived => {}
            }
        }
        keys.put("pre_norm", ValueKind::Bool(self.pre_norm));
        keys.put("post_norm", ValueKind::Bool(self.post_norm));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts grow with the number of parts, and groups of parts with both.
    #[test]
    fn settings_that_count_parts_are_found() {
        let counts = |component: &str| {
            let text = format!(
                "model:\n  name: m\n  vocab: 17\n  hidden: 16\n  context: 8\n  components:\n    a: {component}\n  body: [a]\n"
            );
            let ast = crate::parse("m.yaml", &text, crate::Spelling::Yaml).unwrap();
            let spec = crate::check(&ast, &[]).unwrap().0;
            match &spec.model.components["a"] {
                Component::Defined(own) => own.counts(&spec.model).join(" "),
                _ => String::new(),
            }
        };
        assert_eq!(counts("{gated_delta: {heads: 2}}"), "heads");
        assert_eq!(counts("{moba: {heads: 2}}"), "heads");
        assert_eq!(counts("{nsa: {heads: 2}}"), "heads groups");
        assert_eq!(counts("{mamba2: {size: 4}}"), "groups");
        assert_eq!(counts("{canon: {}}"), "");
    }
}
