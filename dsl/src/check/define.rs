//! Definitions of a specification, and components that are made by them.

use std::sync::Arc;

use indexmap::IndexMap;

use super::{Checker, Group};
use crate::ast::*;
use crate::component::{Component, DEFINED, Defined, Kind, Setting};
use crate::define::{Context, Definition, library, read};
use crate::diagnostic::{Diagnostic, Severity};
use crate::keys::{self, Range, Type};
use crate::number::Number;
use crate::source::{SourceMap, Span};
use crate::suggest::{closest, listing};

impl Checker {
    /// Reads the definitions of the file.
    pub(super) fn definitions(&mut self, group: &Group) {
        let Some(value) = self.written(group, "define") else { return };
        let ValueKind::Map(map) = &value.kind else {
            self.wrong_type("define", &Self::kind(group, "define"), value);
            return;
        };
        let written = read::definitions(map, &self.sources, &mut self.found);
        self.definitions = read::link(written, &mut self.found);
    }

    /// The definition of that name: of the file, else of the library.
    fn definition(&self, name: &str) -> Option<Arc<Definition>> {
        self.definitions.get(name).cloned().or_else(|| library::definition(name))
    }

    /// A component whose kind is a definition's name; `None` where it is none.
    pub(super) fn defined(
        &mut self,
        kind: &str,
        value: &Value,
        path: String,
        at: Span,
    ) -> Option<Option<Component>> {
        let definition = self.definition(kind)?;
        self.used.insert(kind.to_string());
        Some(self.settings_of(&definition, value, path, at).map(Component::Defined))
    }

    /// The names that a component can have as its kind.
    pub(super) fn kinds(&self) -> Vec<&str> {
        let built_in = keys::COMPONENTS.iter().map(|kind| kind.name);
        let own = self.definitions.keys().map(String::as_str);
        built_in.chain(own).chain(library::LIBRARY.iter().map(|(name, _)| *name)).collect()
    }

    /// The settings of a component that is made by a definition.
    pub(crate) fn settings_of(
        &mut self,
        definition: &Arc<Definition>,
        value: &Value,
        path: String,
        at: Span,
    ) -> Option<Defined> {
        let empty = Map::default();
        let map = match &value.kind {
            ValueKind::Map(map) => map,
            ValueKind::Null => &empty,
            _ => {
                let help = format!("write `{} {{ … }}`", definition.name.text);
                self.error(
                    "wrong-type",
                    value.span,
                    format!("{} is no group of settings", value.describe()),
                    help,
                );
                return None;
            }
        };
        let before = self.errors();
        let mut norms = Map { span: map.span, ..Map::default() };
        let mut settings: IndexMap<String, Option<Setting>> = IndexMap::new();
        for item in &map.items {
            let Pair { key, value } = &item.node;
            if DEFINED.key(&key.text).is_some() {
                norms.items.push(item.clone());
                continue;
            }
            if !definition.settings.iter().any(|setting| setting.name.text == key.text) {
                self.unknown_setting(definition, key);
                continue;
            }
            self.sources.fields.insert(format!("{path}.{}", key.text), value.span);
            let set = self.one_setting(&key.text, value);
            if settings.insert(key.text.clone(), set).is_some() {
                let message = format!("`{}` is written twice", key.text);
                self.error("duplicate-key", key.span, message, "take one away");
            }
        }
        let mut ordered = IndexMap::new();
        for setting in &definition.settings {
            let name = &setting.name.text;
            self.sources.fields.entry(format!("{path}.{name}")).or_insert(at);
            let value = match (settings.get(name), &setting.default) {
                (Some(value), _) => *value,
                (None, Some(default)) => Some(literal(default).unwrap_or(Setting::Derived)),
                (None, None) => {
                    let message =
                        format!("`{name}` is missing: `{}` gives it no value", definition.name.text);
                    let mut error = Diagnostic::error("missing-key", message).on(at);
                    if !definition.library {
                        error = error.related(setting.name.span, "a setting without a default");
                    }
                    self.found.push(error.help(format!("write `{name}: 4`")));
                    None
                }
            };
            if let Some(value) = value {
                ordered.insert(name.clone(), value);
            }
        }
        let group = self.group(&DEFINED, &norms, path, at);
        let (pre_norm, post_norm) = (self.bool(&group, "pre_norm"), self.bool(&group, "post_norm"));
        if self.errors() > before {
            return None;
        }
        let definition = definition.clone();
        Some(Defined { definition, settings: ordered, pre_norm: pre_norm?, post_norm: post_norm? })
    }

    fn errors(&self) -> usize {
        self.found.iter().filter(|d| d.severity == Severity::Error).count()
    }

    fn one_setting(&mut self, name: &str, value: &Value) -> Option<Setting> {
        let number = self.number(name, &Type::Real(Range::Any), value)?;
        match number {
            Number::Int(whole) if (0..super::MAX_SIZE).contains(&whole) => Some(Setting::Size(whole as u64)),
            Number::Int(_) | Number::Real(_) => match number.whole() {
                Some(whole) if (0..super::MAX_SIZE).contains(&whole) => Some(Setting::Size(whole as u64)),
                _ => Some(Setting::Number(number.real())),
            },
        }
    }

    fn unknown_setting(&mut self, definition: &Definition, key: &Key) {
        let names: Vec<&str> = definition.settings.iter().map(|setting| setting.name.text.as_str()).collect();
        let all: Vec<&str> = names.iter().copied().chain(["pre_norm", "post_norm"]).collect();
        let help = match closest(&key.text, all.iter().copied()) {
            Some(known) => format!("did you mean `{known}`?"),
            None => format!("its settings are {}", listing(all).replace(" or ", " and ")),
        };
        let message = format!("`{}` is not a setting of `{}`", key.text, definition.name.text);
        self.error("unknown-key", key.span, message, help);
    }

    /// Elaborates every component that is made by a definition: mistakes of its sizes are found
    /// here.
    pub(super) fn graphs(&mut self, components: &IndexMap<String, Option<Component>>, hidden: Option<u64>) {
        let Some(hidden) = hidden else { return };
        let names: Vec<&str> = components.keys().map(String::as_str).collect();
        let of = |name: &str| components.get(name).and_then(Option::as_ref);
        let context = Context::new(hidden, &of, &names);
        for (name, component) in components {
            let Some(Component::Defined(defined)) = component else { continue };
            let at = self.sources.locate(&format!("model.components.{name}")).unwrap_or_default();
            let found = crate::define::elaborate(&defined.definition, &defined.settings, context).found;
            for mistake in found {
                let mistake = self.of_definition(mistake, defined, name, at);
                if !self.found.contains(&mistake) {
                    self.found.push(mistake);
                }
            }
        }
    }

    /// A mistake of a definition as it is shown: in the library there is no token of this file.
    fn of_definition(&self, mistake: Diagnostic, defined: &Defined, name: &str, at: Span) -> Diagnostic {
        if defined.definition.library {
            let message = format!("in std/{}: {}", defined.name(), mistake.message);
            return Diagnostic { message, span: Some(at), related: Vec::new(), ..mistake };
        }
        match mistake.severity {
            Severity::Warning => mistake,
            Severity::Error => mistake.related(at, format!("with the settings of `{name}`")),
        }
    }

    /// Warns of definitions that nothing uses.
    pub(super) fn unused_definitions(&mut self) {
        let mut used = self.used.clone();
        let mut open: Vec<String> = used.iter().cloned().collect();
        while let Some(name) = open.pop() {
            let Some(definition) = self.definitions.get(&name) else { continue };
            open.extend(definition.uses.keys().filter(|name| used.insert((*name).clone())).cloned());
        }
        let unused = self.definitions.values().filter(|definition| !used.contains(&definition.name.text));
        let unused: Vec<(String, Span)> =
            unused.map(|definition| (definition.name.text.clone(), definition.name.span)).collect();
        for (name, span) in unused {
            let help = format!("take it away, or use it: `gd = {name} {{ }}` (YAML: `gd: {{{name}: {{}}}}`)");
            self.warning("unused-definition", span, format!("no component is made by `{name}`"), help);
        }
    }
}

/// The setting that a default is, where it is a number and no arithmetic over others.
fn literal(default: &crate::define::syntax::Expr) -> Option<Setting> {
    let number = constant(default)?;
    match number.whole() {
        Some(whole) if (0..super::MAX_SIZE).contains(&whole) => Some(Setting::Size(whole as u64)),
        _ => Some(Setting::Number(number.real())),
    }
}

fn constant(expr: &crate::define::syntax::Expr) -> Option<Number> {
    use crate::define::syntax::ExprKind;
    match &expr.bare().kind {
        ExprKind::Number(text) => crate::number::literal(text),
        ExprKind::Negate(inner) => match constant(inner)? {
            Number::Int(whole) => Some(Number::Int(whole.checked_neg()?)),
            Number::Real(number) => Some(Number::Real(-number)),
        },
        ExprKind::Name(_)
        | ExprKind::Not(_)
        | ExprKind::Binary(..)
        | ExprKind::Group(_)
        | ExprKind::Call(_)
        | ExprKind::Value(..)
        | ExprKind::Index(..)
        | ExprKind::Invalid => None,
    }
}

/// A checker of the keys of one component that a definition applies, in which its settings have
/// their values.
fn inner(settings: Vec<(String, Option<Number>)>) -> Checker {
    let mut checker = Checker::new(SourceMap::default());
    for (name, number) in settings {
        checker.lets.define(&name, number);
    }
    checker
}

impl Kind {
    /// A component of this kind inside a definition: without a norm of its own where none is
    /// written.
    pub(crate) fn applied(
        self,
        keys: &Map,
        at: Span,
        settings: Vec<(String, Option<Number>)>,
        hidden: u64,
    ) -> (Option<Component>, Vec<Diagnostic>) {
        let mut checker = inner(settings);
        let group = checker.group(self.section(), keys, String::new(), at);
        let component = self.check(&mut checker, &group, Some(hidden));
        let component = component.map(|mut component| {
            if keys.get("pre_norm").is_none() {
                component.without_pre_norm();
            }
            component
        });
        (component, checker.found)
    }
}

impl Defined {
    /// A component of a definition inside another.
    pub(crate) fn applied(
        definition: &Arc<Definition>,
        keys: &Map,
        at: Span,
        settings: Vec<(String, Option<Number>)>,
        hidden: u64,
    ) -> (Option<Component>, Vec<Diagnostic>) {
        let mut checker = inner(settings);
        let value = Value::new(ValueKind::Map(keys.clone()), keys.span);
        let component = checker.settings_of(definition, &value, String::new(), at);
        let mut found = checker.found;
        let Some(mut component) = component else { return (None, found) };
        if keys.get("pre_norm").is_none() {
            component.pre_norm = false;
        }
        let none = |_: &str| None;
        let context = Context::new(hidden, &none, &[]);
        let inside = crate::define::elaborate(definition, &component.settings, context).found;
        let errors = inside.into_iter().filter(|mistake| mistake.severity == Severity::Error);
        found.extend(errors.map(|mistake| match definition.library {
            true => {
                let message = format!("in std/{}: {}", definition.name.text, mistake.message);
                Diagnostic { message, span: Some(at), related: Vec::new(), ..mistake }
            }
            false => mistake.related(at, "applied here"),
        }));
        (Some(Component::Defined(component)), found)
    }
}
