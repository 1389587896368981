//! Definitions of a specification, and components that are made by them.

use std::collections::HashSet;
use std::sync::Arc;

use indexmap::IndexMap;

use super::{Checker, Group};
use crate::ast::{Key, Map, Pair, Value, ValueKind};
use crate::component::{Component, DEFINED, Defined, Kind, Setting};
use crate::define::{Context, Definition, library, read};
use crate::diagnostic::{Diagnostic, Severity};
use crate::keys::{self, Range, Type};
use crate::number::Number;
use crate::source::{SourceMap, Span};
use crate::spec::{Expr, Item};
use crate::suggest::{closest, listing};

impl Checker {
    /// Reads the definitions of the file.
    pub(super) fn definitions(&mut self, group: &Group) {
        if self.has(group, "include") {
            let message = "`include` is read with the file that names it; this is no file";
            self.error_at("bad-include", "include", message, "write the definitions here, or a file");
        }
        let Some(value) = self.written(group, "define") else { return };
        let ValueKind::Map(map) = &value.kind else {
            self.wrong_type("define", &Self::kind(group, "define"), value);
            return;
        };
        let written = read::definitions(map, &self.sources, &mut self.found);
        self.definitions = read::link(written, &mut self.found);
        let names = map.items.iter().map(|item| item.node.key.text.clone());
        self.broken = names.filter(|name| !self.definitions.contains_key(name)).collect();
    }

    /// The definition of that name: of the file, else of the library.
    fn definition(&self, name: &str) -> Option<Arc<Definition>> {
        self.definitions.get(name).cloned().or_else(|| library::definition(name))
    }

    /// A component whose kind is a definition's name; `None` where no definition has that name.
    pub(super) fn defined(
        &mut self,
        kind: &str,
        value: &Value,
        path: String,
        at: Span,
    ) -> Option<Option<Component>> {
        if self.broken.contains(kind) {
            return Some(None);
        }
        let definition = self.definition(kind)?;
        self.used.insert(kind.to_string());
        let name = path.rsplit('.').next().unwrap_or_default().to_string();
        let settings = definition.settings.iter().map(|setting| setting.name.text.clone()).collect();
        self.known.defined.push((name, settings));
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
        Some(Defined {
            definition,
            settings: ordered,
            pre_norm: pre_norm?,
            post_norm: post_norm?,
            scores: vec![],
        })
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

    /// Elaborates every component that is made by a definition, in a model of that width and
    /// vocabulary: mistakes of its sizes are found here.
    pub(super) fn graphs(
        &mut self,
        components: &IndexMap<String, Option<Component>>,
        widths: Option<[u64; 2]>,
    ) {
        let Some(widths) = widths else { return };
        let names: Vec<&str> = components.keys().map(String::as_str).collect();
        let of = |name: &str| components.get(name).and_then(Option::as_ref);
        let context = Context::new(widths, &of, &names);
        for (name, component) in components {
            let Some(Component::Defined(defined)) = component else { continue };
            let at = self.sources.locate(&format!("model.components.{name}")).unwrap_or_default();
            let elaborated = crate::define::elaborate(&defined.definition, &defined.settings, context);
            if !defined.definition.library {
                self.hints.extend(elaborated.hints());
            }
            for mistake in elaborated.found {
                let mistake = self.of_definition(mistake, defined, name, at);
                if !self.found.contains(&mistake) {
                    self.found.push(mistake);
                }
            }
        }
        self.unmade(components, widths);
    }

    /// Elaborates definitions that no component is made by, where every setting has a default.
    fn unmade(&mut self, components: &IndexMap<String, Option<Component>>, widths: [u64; 2]) {
        let made = |name: &str| {
            components.values().flatten().any(|c| matches!(c, Component::Defined(own) if own.name() == name))
        };
        let rest: Vec<Arc<Definition>> =
            self.definitions.values().filter(|own| !made(&own.name.text)).cloned().collect();
        let names: Vec<&str> = components.keys().map(String::as_str).collect();
        let of = |name: &str| components.get(name).and_then(Option::as_ref);
        let context = Context::new(widths, &of, &names);
        for definition in &rest {
            if definition.settings.iter().any(|setting| setting.default.is_none()) {
                continue;
            }
            let elaborated = crate::define::elaborate(definition, &IndexMap::new(), context);
            self.hints.extend(elaborated.hints());
            // Its sizes, and the components around it, are those of another model.
            let of_model =
                |code: &str| matches!(code, "bad-size" | "sizes" | "division-by-zero" | "too-large");
            if !definition.values_of_others().is_empty() {
                continue;
            }
            let new = elaborated.found.into_iter();
            let new = new.filter(|own| own.severity == Severity::Error && !of_model(own.code));
            let new: Vec<Diagnostic> = new.filter(|mistake| !self.found.contains(mistake)).collect();
            self.found.extend(new);
        }
    }

    /// A mistake of a definition as it is shown: in the library there is no token of this file.
    fn of_definition(&self, mistake: Diagnostic, defined: &Defined, name: &str, at: Span) -> Diagnostic {
        if defined.definition.library {
            let message = format!("in std/{}: {}", defined.name(), mistake.message);
            return Diagnostic { message, span: Some(at), related: Vec::new(), ..mistake };
        }
        // Names and dimensions are wrong with any settings.
        match matches!(mistake.code, "bad-size" | "sizes" | "division-by-zero" | "too-large") {
            true => mistake.related(at, format!("with the settings of `{name}`")),
            false => mistake,
        }
    }

    /// Reports values of components that are not applied before the component that reads them.
    pub(super) fn values_before(&mut self, components: &IndexMap<String, Option<Component>>, body: &[Item]) {
        let mut walk =
            Before { components, applied: HashSet::new(), seen: HashSet::new(), found: Vec::new() };
        walk.items(body);
        for (reader, read, value, at) in walk.found {
            let (message, help) = if reader == read {
                (
                    format!("`{reader}` reads its own `{value}`"),
                    format!("the value of its last application is `earlier({value})`"),
                )
            } else {
                (
                    format!("`{reader}` reads `{read}.{value}`, and `{read}` is not applied before it"),
                    format!("put `{read}` before `{reader}` in the body: `{read} > {reader}`"),
                )
            };
            let place = self.sources.locate(&format!("model.components.{reader}")).unwrap_or_default();
            let error = Diagnostic::error("unreached", message).on(at.unwrap_or(place));
            let error =
                if at.is_some() { error.related(place, format!("`{reader}` is made here")) } else { error };
            self.found.push(error.help(help));
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
        // Of a file that is included not all need be used.
        let own = |definition: &Definition| definition.name.span.start < self.sources.text.len();
        let unused = self.definitions.values();
        let unused = unused.filter(|definition| !used.contains(&definition.name.text) && own(definition));
        let unused: Vec<(String, Span)> =
            unused.map(|definition| (definition.name.text.clone(), definition.name.span)).collect();
        for (name, span) in unused {
            let help = format!("take it away, or use it: `gd = {name} {{ }}` (YAML: `gd: {{{name}: {{}}}}`)");
            self.warning("unused-definition", span, format!("no component is made by `{name}`"), help);
        }
    }
}

/// The components that are applied so far, in the order of the body.
struct Before<'c> {
    components: &'c IndexMap<String, Option<Component>>,
    applied: HashSet<String>,
    seen: HashSet<String>,
    /// Reader, component, value, and its token where that is of this file.
    found: Vec<(String, String, String, Option<Span>)>,
}

impl Before<'_> {
    fn items(&mut self, items: &[Item]) {
        for item in items {
            match item {
                Item::Layer(expr) => self.expr(expr),
                Item::Statement(_) => {}
                Item::Repeat { items, .. } | Item::Recur { items, .. } => self.items(items),
            }
        }
    }

    fn expr(&mut self, expr: &Expr) {
        match expr {
            Expr::Component(name) => self.component(name),
            Expr::Norm => {}
            Expr::Skip(_, inner) => self.expr(inner),
            Expr::Sequential(terms) => terms.iter().for_each(|term| self.expr(term)),
            // Terms side by side know nothing of one another.
            Expr::Parallel(terms) => {
                let before = self.applied.clone();
                let mut after = before.clone();
                for term in terms {
                    self.applied.clone_from(&before);
                    self.expr(term);
                    after.extend(self.applied.drain());
                }
                self.applied = after;
            }
        }
    }

    fn component(&mut self, name: &str) {
        if self.seen.insert(name.to_string())
            && let Some(Some(Component::Defined(defined))) = self.components.get(name)
        {
            for (read, value) in defined.definition.values_of_others() {
                if !self.applied.contains(&read.text) && self.components.contains_key(&read.text) {
                    let at = (!defined.definition.library).then_some(read.span.to(value.span));
                    self.found.push((name.to_string(), read.text.clone(), value.text.clone(), at));
                }
            }
        }
        self.applied.insert(name.to_string());
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
        if let Some(pair) = keys.get("kv_from")
            && component.as_ref().and_then(Component::attention).is_some_and(|a| a.kv_from.is_some())
        {
            let message =
                "a component inside a definition has keys of its own: `kv_from` is one of the model's";
            let error = Diagnostic::error("nested", message).on(pair.key.span);
            checker
                .found
                .push(error.help("leave `kv_from` out, or read values of another component: `NAME.value`"));
            return (None, checker.found);
        }
        if let Some(pair) = keys.get("depth_stream")
            && component.as_ref().is_some_and(Component::leaves_depth)
        {
            let message = "a component inside a definition leaves nothing in the model's depth stream";
            let error = Diagnostic::error("nested", message).on(pair.key.span);
            checker.found.push(error.help("leave `depth_stream` out"));
            return (None, checker.found);
        }
        (component, checker.found)
    }
}

impl Defined {
    /// A component of a definition inside another.
    pub(crate) fn applied<'c>(
        definition: &'c Arc<Definition>,
        keys: &Map,
        at: Span,
        settings: Vec<(String, Option<Number>)>,
        context: Context<'c>,
    ) -> (Option<Component>, Vec<Diagnostic>) {
        let mut checker = inner(settings);
        let value = Value::new(ValueKind::Map(keys.clone()), keys.span);
        let component = checker.settings_of(definition, &value, String::new(), at);
        let mut found = checker.found;
        let Some(mut component) = component else { return (None, found) };
        if keys.get("pre_norm").is_none() {
            component.pre_norm = false;
        }
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
