//! A component that the specification defines.

use std::sync::Arc;

use indexmap::IndexMap;
use serde::Serialize;

use super::*;
use crate::define::{self, Context, Definition, Graph};
use crate::diagnostic::{Diagnostic, Severity};
use crate::spec::Model;

/// A component of a `define`, with its settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Defined {
    /// What it computes.
    #[serde(serialize_with = "by_name")]
    pub definition: Arc<Definition>,
    /// Its settings by name, in the order of the definition.
    pub settings: IndexMap<String, Setting>,
    /// Whether it reads the stream through a norm of its own.
    pub pre_norm: bool,
    /// Whether the branch output has a norm of its own.
    pub post_norm: bool,
}

/// The value of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Setting {
    /// A whole number that is not negative: a size.
    Size(u64),
    /// Another number.
    Number(f64),
    /// What its default gives, which is arithmetic over other settings.
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
        let context = Context::new(model.hidden, &of, &names);
        let elaborated = define::elaborate(&self.definition, &self.settings, context);
        match elaborated.found.iter().any(|found| found.severity == Severity::Error) {
            true => Err(elaborated.found),
            false => Ok(elaborated.graph),
        }
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

    fn broken(&self, _model: &Model) -> Option<String> {
        None
    }

    fn shrink(&mut self, to: &mut Small) {
        for (name, setting) in &mut self.settings {
            if let Setting::Size(size) = setting {
                to.less(name, size, 4);
            }
        }
    }

    fn settle(&mut self, _: u64) {}

    fn widen(&mut self, k: u64) {
        for setting in self.settings.values_mut() {
            if let Setting::Size(size) = setting {
                *size *= k;
            }
        }
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
