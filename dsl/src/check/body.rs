//! Layers: how often they are applied, what they compose, what they skip. Statements between them
//! are read in `statement`.

use std::collections::HashSet;

use indexmap::IndexMap;

use super::{Checker, Group};
use crate::ast::{Item as Noted, Layer, LayerKind, List, Map, Value, ValueKind};
use crate::diagnostic::Diagnostic;
use crate::keys::{self, Range, Type};
use crate::number::{self, Number};
use crate::source::Span;
use crate::spec::*;
use crate::suggest::closest;

/// Layer applications of a model.
pub(super) const MAX_APPLICATIONS: u64 = 65_536;

/// Depths that a recipe draws from: training compiles a program for each.
const MOST_DEPTHS: u64 = 256;

/// Components by name; `None` for one whose definition is wrong.
pub(super) type Components = IndexMap<String, Option<Component>>;

/// The items of a list, each `None` where it is wrong, and how many layer applications they make.
type Items = (Vec<Option<Item>>, Option<u64>);

pub(super) struct Walk<'a> {
    components: Option<&'a Components>,
    /// Streams that are named so far, with the token of the first `save` and whether any `mix`
    /// reads them.
    pub(super) saved: IndexMap<String, (Span, bool)>,
    /// Names of gains, with the token of the first norm that has each and how many have it: of one
    /// in a `repeat`, two.
    pub(super) gains: IndexMap<String, (Span, u64)>,
    /// `repeat`s around.
    pub(super) copies: usize,
    /// Whether a `recur` came before.
    pub(super) looped: bool,
    used: HashSet<String>,
    /// Components used inside and outside `recur`.
    recurrent: HashSet<String>,
    /// Whether some layer could not be read, so that it is not known what it uses.
    unread: bool,
    /// `skip`s around: inside, every stream is a sum.
    summed: usize,
    /// The `recur`s around: their counts, and whether each is an item of the body.
    loops: Vec<(Option<u64>, bool)>,
}

/// Keys and values that are handed from application to application, and where they are made.
struct Handed<'a> {
    components: &'a Components,
    /// Components that were applied so far.
    seen: HashSet<&'a str>,
    /// Component, key, message and help of each mistake.
    wrong: Vec<(&'a str, &'static str, String, &'static str)>,
}

impl<'a> Handed<'a> {
    /// A loop's first pass has the fewest applications before it.
    fn items(&mut self, items: &'a [Item]) {
        for item in items {
            match item {
                Item::Layer(expr) => self.expr(expr, false),
                Item::Statement(_) => {}
                Item::Repeat { items, .. } | Item::Recur { items, .. } => self.items(items),
            }
        }
    }

    fn expr(&mut self, expr: &'a Expr, skipped: bool) {
        match expr {
            Expr::Sequential(terms) | Expr::Parallel(terms) => {
                terms.iter().for_each(|term| self.expr(term, skipped));
            }
            Expr::Skip(_, inner) => self.expr(inner, true),
            Expr::Norm => {}
            Expr::Component(name) => {
                if let Some(Some(Component::Sequence(a))) = self.components.get(name) {
                    self.attention(name, a, skipped);
                }
                let leaves = |c: &Option<Component>| c.as_ref().is_some_and(Component::leaves_depth);
                if skipped && self.components.get(name).is_some_and(leaves) {
                    let message = format!(
                        "`{name}` stands in a `skip`, whose tokens have depth streams of other lengths"
                    );
                    self.report(name, "depth_stream", message, "take it out of the `skip`");
                }
                self.seen.insert(name);
            }
        }
    }

    fn attention(&mut self, name: &'a str, a: &'a Attention, skipped: bool) {
        if let Some(source) = a.kv_from.as_deref().filter(|source| !self.seen.contains(source)) {
            let message = format!("`{name}` is applied where `{source}` was not, whose keys it reads");
            self.report(name, "kv_from", message, "apply the component that makes them before it");
        }
        if !skipped {
            return;
        }
        let help = "take it out of the `skip`";
        if a.kv_from.is_some() {
            let message = format!("`{name}` stands in a `skip`, where tokens have no keys of others");
            self.report(name, "kv_from", message, help);
        }
        if a.value_residual {
            let message =
                format!("`{name}` stands in a `skip`, whose tokens differ in their first application");
            self.report(name, "value_residual", message, help);
        }
        if a.depth_keys {
            let message =
                format!("`{name}` stands in a `skip`, whose tokens differ in what they were applied to");
            self.report(name, "depth_keys", message, help);
        }
        let readers = self.components.iter().find_map(|(reader, c)| match c {
            Some(Component::Sequence(r)) if r.kv_from.as_deref() == Some(name) => Some(reader.as_str()),
            _ => None,
        });
        if let Some(reader) = readers {
            let message = format!("`{reader}` reads keys of `{name}`, which some tokens skip");
            self.report(reader, "kv_from", message, "take their source out of the `skip`");
        }
    }

    fn report(&mut self, name: &'a str, key: &'static str, message: String, help: &'static str) {
        if !self.wrong.iter().any(|w| (w.0, w.1) == (name, key)) {
            self.wrong.push((name, key, message, help));
        }
    }
}

impl Checker {
    pub(super) fn body(&mut self, group: &Group, components: Option<&Components>) -> Option<Vec<Item>> {
        self.setting(group, "body")?;
        let value = self.written(group, "body")?;
        let mut walk = Walk {
            components,
            saved: IndexMap::new(),
            gains: IndexMap::new(),
            copies: 0,
            looped: false,
            used: HashSet::new(),
            recurrent: HashSet::new(),
            unread: false,
            summed: 0,
            loops: vec![],
        };
        let (items, applications) = self.items(&mut walk, value, "body", "model.body", false)?;
        if applications.is_some_and(|applications| applications > MAX_APPLICATIONS) {
            self.too_deep(value.span);
        }
        self.known.recurrent = Some(!walk.recurrent.is_empty() || walk.unread);
        let recurs = |items: &[Option<Item>]| {
            items
                .iter()
                .map(|i| i.as_ref().map(|i| matches!(i, Item::Recur { .. })))
                .collect::<Option<Vec<_>>>()
        };
        self.known.outermost = recurs(&items).map(|all| all.into_iter().filter(|r| *r).count());
        if applications == Some(0) {
            let help = "write at least one layer, such as `sa > mlp`";
            self.error("empty", value.span, "`body` applies no layer", help);
        }
        self.unread_streams(&walk);
        let wired = self.known.attends || self.known.lanes;
        if let Some(all) = items.iter().cloned().collect::<Option<Vec<Item>>>() {
            self.lonely_gains(&walk, wired || !normalised(&all, false));
        }
        self.unused_components(&walk);
        if applications == Some(1) {
            self.lonely_depth(&walk);
        }
        let outermost = |item: &&Option<Item>| matches!(item, Some(Item::Recur { .. }));
        self.known.outermost =
            items.iter().all(Option::is_some).then(|| items.iter().filter(outermost).count());
        let own = items.iter().flatten().find_map(|item| match item {
            Item::Recur { count, looping, items, .. } => {
                (looping.has_passes() || has_passes(items) || self.known.turns).then_some(*count)
            }
            _ => None,
        });
        self.known.passes = own;
        for (index, item) in items.iter().enumerate() {
            let Some(Item::Recur { looping, .. }) = item else { continue };
            let behind = &items[index + 1..];
            let through =
                |item: &Option<Item>| matches!(item, None | Some(Item::Statement(Statement::Norm(_))));
            if !(looping.exit.is_last() || behind.len() < 2 && behind.iter().all(through)) {
                let message =
                    "every pass goes through what is after this loop, and that may be a `norm` alone";
                let help = "make the `recur` the last item of the body, or the last but a `norm`";
                self.error_at("exit", &format!("model.body[{index}].exit"), message, help);
            }
        }
        for (index, item) in items.iter().enumerate() {
            let Some(Item::Recur { looping: Looping { depth: Some(_), .. }, .. }) = item else { continue };
            self.known.drawn = true;
            if let Some(found) = self.known.outermost.filter(|found| *found > 1) {
                let message = format!(
                    "`depth` draws the count of the one `recur` that is an item of the body; this body has {found}"
                );
                let help = "make it one outermost `recur`, or take the key away";
                self.error_at("ambiguous-depth", &format!("model.body[{index}].depth"), message, help);
            }
        }
        let items: Option<Vec<Item>> = items.into_iter().collect();
        if let (Some(items), Some(components)) = (&items, components) {
            let mut handed = Handed { components, seen: HashSet::new(), wrong: vec![] };
            handed.items(items);
            for (component, key, message, help) in handed.wrong {
                let path = format!("model.components.{component}.{key}");
                self.error_at("unreached", &path, message, help);
            }
            self.first_keys(items, components);
        }
        items
    }

    /// The items of a list, each `None` where it is wrong, and how many layer applications they
    /// make.
    fn items(
        &mut self,
        walk: &mut Walk,
        value: &Value,
        key: &str,
        path: &str,
        recurrent: bool,
    ) -> Option<Items> {
        let single;
        let list = match &value.kind {
            ValueKind::List(list) => list,
            ValueKind::Layer(_) | ValueKind::Map(_) => {
                single = List { items: vec![Noted::new(value.clone())], span: value.span, ..List::default() };
                &single
            }
            _ => {
                let help = "write a list of compositions, `repeat` and `recur`: `[\"(da | sa) > ea\"]`";
                if value.kind != ValueKind::Invalid {
                    let message = format!("{} is not a list of layers", super::capital(&value.describe()));
                    self.error("wrong-type", value.span, message, help);
                }
                return None;
            }
        };
        if list.items.is_empty() {
            let help = "write at least one layer, such as `sa > mlp`";
            self.error("empty", value.span, format!("`{key}` holds no layers"), help);
            return None;
        }
        let mut applications = Some(0u64);
        let mut items = Vec::new();
        for (index, item) in list.items.iter().enumerate() {
            let path = format!("{path}[{index}]");
            self.sources.fields.insert(path.clone(), item.node.span);
            let (item, count) = self.item(walk, &item.node, &path, recurrent);
            applications = applications.zip(count).and_then(|(sum, count)| sum.checked_add(count));
            items.push(item);
        }
        Some((items, applications))
    }

    fn item(
        &mut self,
        walk: &mut Walk,
        value: &Value,
        path: &str,
        recurrent: bool,
    ) -> (Option<Item>, Option<u64>) {
        match &value.kind {
            ValueKind::Layer(layer) => self.layer_item(walk, layer, recurrent),
            ValueKind::Map(map) => self.group_item(walk, value, map, path, recurrent),
            ValueKind::Invalid => {
                walk.unread = true;
                (None, Some(1))
            }
            _ => {
                let message = format!("{} is not a layer", super::capital(&value.describe()));
                let help = "write a composition such as `(da | sa) > ea`, `repeat` or `recur`";
                self.error("wrong-type", value.span, message, help);
                (None, Some(1))
            }
        }
    }

    fn group_item(
        &mut self,
        walk: &mut Walk,
        value: &Value,
        map: &Map,
        path: &str,
        recurrent: bool,
    ) -> (Option<Item>, Option<u64>) {
        let section = keys::ITEMS.iter().find(|section| map.get(section.name).is_some());
        let Some(section) = section else {
            let key = map.items.first().map(|item| &item.node.key);
            let names = ["repeat", "recur", "layer"];
            let known = key.and_then(|key| closest(&key.text, names));
            let help = match known {
                Some(known) => format!("did you mean `{known}`?"),
                None => "write `- recur: 16` and, under it, `layers: [\"(da | sa) > ea\"]`".into(),
            };
            let (span, what) = key.map_or((value.span, "nothing"), |key| (key.span, key.text.as_str()));
            self.error("unknown-key", span, format!("`{what}` is not a kind of layer"), help);
            walk.unread = true;
            return (None, Some(1));
        };
        let at = map.get(section.name).map_or(value.span, |pair| pair.key.span);
        let group = self.group(section, map, path.to_string(), at);
        if section.name == "layer" {
            return match map.get("layer").map(|pair| &pair.value.kind) {
                Some(ValueKind::Layer(layer)) => self.layer_item(walk, layer, recurrent),
                _ => {
                    self.error("wrong-type", at, "`layer` holds no composition", "write `layer: sa > mlp`");
                    (None, Some(1))
                }
            };
        }
        let recur = section.name == "recur";
        let count = self.int(&group, section.name);
        let residual_norm = match recur {
            true if self.known.attends && !self.has(&group, "residual_norm") => Some(false),
            true => self.bool(&group, "residual_norm"),
            false => Some(true),
        };
        if let (Some(true), true) = (residual_norm, recur && self.known.attends) {
            let message = "`residual_norm` normalises a stream, and `stream attend` has none";
            let help = "components read mixtures of outputs, which their own norms normalise: take it away";
            self.error_at("out-of-range", &format!("{path}.residual_norm"), message, help);
        }
        walk.looped |= recur;
        let looping = match recur {
            true => self.looping(&group, count, !path.contains(".layers")),
            false => Some(Looping::default()),
        };
        let inner = match self.setting(&group, "layers") {
            Some(_) => self.written(&group, "layers").cloned(),
            None => None,
        };
        if recur {
            walk.loops.push((count, !path.contains(".layers")));
        }
        walk.copies += usize::from(!recur);
        let inner = inner.and_then(|value| {
            self.items(walk, &value, "layers", &format!("{path}.layers"), recurrent || recur)
        });
        if recur {
            walk.loops.pop();
        }
        walk.copies -= usize::from(!recur);
        if let Some((_, Some(0))) = &inner {
            let message = format!("`{}` applies no layer", section.name);
            let help = "write at least one layer in it, such as `sa > mlp`";
            self.error("empty", at, message, help);
        }
        let applications = match (count, inner.as_ref().and_then(|(_, applications)| *applications)) {
            (Some(count), Some(inner)) => {
                match inner.checked_mul(count).filter(|all| *all <= MAX_APPLICATIONS) {
                    Some(all) => Some(all),
                    None => {
                        self.too_deep(self.sources.locate(&format!("{path}.{}", section.name)).unwrap_or(at));
                        None
                    }
                }
            }
            _ => None,
        };
        let items = inner.and_then(|(items, _)| items.into_iter().collect::<Option<Vec<_>>>());
        if let (Some(items), Some(most), Some(Looping { depth: Some(depths), .. })) =
            (&items, count, &looping)
            && has_passes(items)
            && depths.max > most
        {
            let message = format!(
                "a `skip` has something for each of {most} passes, and `depth` draws up to {}",
                depths.max
            );
            let help = format!("write `max {most}` after the distribution, or a larger count");
            self.error_at("depth", &format!("{path}.depth"), message, help);
        }
        if let (Some(items), true) = (&items, recur) {
            self.choosing_loop(&group, items, looping.as_ref(), residual_norm);
        }
        let parts = count.zip(items).zip(residual_norm).zip(looping);
        let item = parts.map(|(((count, items), residual_norm), looping)| match recur {
            true => Item::Recur { count, residual_norm, items, looping },
            false => Item::Repeat { count, items },
        });
        (item, applications)
    }

    pub(super) fn too_deep(&mut self, span: Span) {
        let message = format!("these are more than {MAX_APPLICATIONS} layer applications");
        self.error("out-of-range", span, message, "make the model less deep");
    }

    /// Refuses a range of depths that training would compile too many programs for.
    pub(super) fn too_many_depths(&mut self, min: u64, max: u64, span: Span) {
        let all = max.saturating_sub(min) + 1;
        if all > MOST_DEPTHS {
            let message = format!(
                "training compiles a program for each depth that is drawn: from {min} to {max} these are {all}, and {MOST_DEPTHS} are the most"
            );
            let help = format!("write a smaller `max`, such as {}", min.saturating_add(MOST_DEPTHS - 1));
            self.error("out-of-range", span, message, help);
        }
    }

    /// A layer or a statement, and how many layer applications it is.
    fn layer_item(&mut self, walk: &mut Walk, layer: &Layer, recurrent: bool) -> (Option<Item>, Option<u64>) {
        match &layer.kind {
            LayerKind::Statement(words) => {
                if self.known.attends {
                    let word = words.first().map_or("", |word| word.text.as_str());
                    self.no_stream(word, layer.span);
                }
                (self.statement(walk, words, layer.span, recurrent).map(Item::Statement), Some(0))
            }
            _ => (self.layer(walk, layer, recurrent).map(Item::Layer), Some(1)),
        }
    }

    fn layer(&mut self, walk: &mut Walk, layer: &Layer, recurrent: bool) -> Option<Expr> {
        let mut names: Vec<(String, Span)> = Vec::new();
        let expr = self.expr(walk, layer, &mut names, true);
        let bare = expr.as_ref().is_some_and(|_| names.is_empty());
        if bare {
            let help = "name a component, or write `norm` on a line of its own";
            self.error("empty", layer.span, "this layer has no component", help);
        }
        let mut seen: IndexMap<String, Span> = IndexMap::new();
        let mut twice = false;
        for (name, span) in names {
            if recurrent {
                walk.recurrent.insert(name.clone());
            }
            if let Some(first) = seen.get(&name) {
                let error =
                    Diagnostic::error("repeated-component", format!("`{name}` is twice in one layer"))
                        .on(span);
                let help = "a layer has one set of weights for each component: define a second one, or use two layers";
                self.found.push(error.related(*first, "first here").help(help));
                twice = true;
            } else {
                seen.insert(name, span);
            }
        }
        expr.filter(|_| !twice && !bare)
    }

    fn no_stream(&mut self, word: &str, span: Span) {
        let message = format!("`{word}` is of a stream, and `stream attend` has none");
        let help = "components read mixtures of outputs, which their own norms normalise: take it away";
        self.error("unknown-stream", span, message, help);
    }

    /// `outermost` says whether this is the layer itself, or a term of its own `>`.
    fn expr(
        &mut self,
        walk: &mut Walk,
        layer: &Layer,
        names: &mut Vec<(String, Span)>,
        outermost: bool,
    ) -> Option<Expr> {
        match &layer.kind {
            LayerKind::Component(name) if name == "norm" => {
                if !outermost {
                    let message = "`norm` stands where there is an update and no stream to normalise";
                    let help = "make it a term of the layer's own `>`, outside `|` and `skip`";
                    self.error("misplaced-norm", layer.span, message, help);
                } else if self.known.attends {
                    self.no_stream("norm", layer.span);
                }
                outermost.then_some(Expr::Norm)
            }
            LayerKind::Component(name) => {
                walk.used.insert(name.clone());
                names.push((name.clone(), layer.span));
                let components = walk.components?;
                match components.get(name) {
                    Some(component) => component.is_some().then(|| Expr::Component(name.clone())),
                    None => {
                        self.unknown_component(components, name, layer.span);
                        walk.unread = true;
                        None
                    }
                }
            }
            LayerKind::Group(inner) => self.expr(walk, inner, names, outermost),
            LayerKind::Sequential(terms) => {
                let mut all = Some(Vec::new());
                for term in terms {
                    let term = self.expr(walk, term, names, outermost);
                    all = all.zip(term).map(|(mut all, term)| {
                        match term {
                            Expr::Sequential(inner) => all.extend(inner),
                            term => all.push(term),
                        }
                        all
                    });
                }
                all.map(Expr::Sequential)
            }
            LayerKind::Parallel(terms) => {
                let mut all = Some(Vec::new());
                for term in terms {
                    let span = term.span;
                    let term = self.expr(walk, term, names, false);
                    if let (Some(Expr::Sequential(_)), true) = (&term, self.known.attends && walk.summed == 0)
                    {
                        let message = "a `>` inside `|` has no order among the sources of `stream attend`";
                        let help = "write its components as terms of the layer's own `>`, or wrap the term in a `skip(…)`, which is a sum inside";
                        self.error("unknown-stream", span, message, help);
                    }
                    all = all.zip(term).map(|(mut all, term)| {
                        match term {
                            Expr::Parallel(inner) => all.extend(inner),
                            term => all.push(term),
                        }
                        all
                    });
                }
                all.map(Expr::Parallel)
            }
            LayerKind::Skip(arguments, inner) => {
                let skip = self.skip(walk, arguments);
                walk.summed += 1;
                let inner = self.expr(walk, inner, names, false);
                walk.summed -= 1;
                Some(Expr::Skip(Box::new(skip?), Box::new(inner?)))
            }
            LayerKind::Statement(_) => {
                let help = "write it on a line of its own between the layers";
                self.error("statement", layer.span, "a statement is no part of a composition", help);
                None
            }
            LayerKind::Invalid => {
                walk.unread = true;
                None
            }
        }
    }

    fn unknown_component(&mut self, components: &Components, name: &str, span: Span) {
        let help = match closest(name, components.keys().map(String::as_str)) {
            Some(known) => format!("did you mean `{known}`?"),
            None if components.is_empty() => format!(
                "define it: `{name} = mlp {{…}}` in .dream, `components: {{{name}: {{mlp: {{…}}}}}}` in YAML"
            ),
            None => format!(
                "define it next to the others; there {} {}",
                if components.len() == 1 { "is" } else { "are" },
                crate::suggest::listing(components.keys().map(String::as_str)).replace(" or ", " and ")
            ),
        };
        self.error("unknown-component", span, format!("no component is called `{name}`"), help);
    }

    fn unused_components(&mut self, walk: &Walk) {
        let Some(components) = walk.components else { return };
        for (name, component) in components {
            let span = self.sources.locate(&format!("model.components.{name}")).unwrap_or_default();
            if !walk.used.contains(name) && walk.unread {
                continue;
            }
            if !walk.used.contains(name) {
                let help = "use it in a layer, or take it away";
                self.warning("unused-component", span, format!("no layer uses `{name}`"), help);
                continue;
            }
            let attention = match component {
                Some(Component::Sequence(attention) | Component::Depth(attention)) => attention,
                _ => continue,
            };
            let path = format!("model.components.{name}.projection");
            let token = self.sources.locate(&path).filter(|token| *token != span);
            if let (Some(token), Some(_)) = (token, &attention.projection)
                && !walk.recurrent.contains(name)
            {
                let help = "projections are mixtures in `recur` only; take it away";
                self.warning("unused-key", token, format!("`{name}` is never recurrent"), help);
            }
        }
    }

    fn lonely_depth(&mut self, walk: &Walk) {
        let Some(components) = walk.components else { return };
        for (name, component) in components {
            if matches!(component, Some(Component::Depth(_))) && walk.used.contains(name) {
                let span = self.sources.locate(&format!("model.components.{name}")).unwrap_or_default();
                let help = "apply the layer more often with `recur` or `repeat`";
                self.warning(
                    "lonely-depth",
                    span,
                    format!("`{name}` has one depth to attend to, its own"),
                    help,
                );
            }
        }
    }

    // Skipping ------------------------------------------------------------------------------------

    fn skip(&mut self, walk: &Walk, arguments: &Map) -> Option<Skip> {
        // Fields of a skip have no path of their own: several layers may hold one.
        let group = self.group(&keys::SKIP, arguments, "skip".into(), arguments.span);
        let threshold = self.bool(&group, "threshold");
        if self.bool(&group, "depth_choice")? {
            let skip = self.depth_choice(walk, &group);
            self.sources.fields.retain(|path, _| path != "skip" && !path.starts_with("skip."));
            return skip;
        }
        self.misplaced(&group, &["balance"], "this rule; it goes with `depth_choice`");
        let capacities = self.capacities(&group);
        if capacities.as_ref().is_some_and(Vec::is_empty) && !self.has(&group, "capacity") {
            self.missing(&group, "capacity");
        }
        let capacity = match &capacities {
            Some(each) if !each.is_empty() => each.first().copied(),
            Some(_) => self.real(&group, "capacity"),
            None => None,
        };
        let threshold_rule = threshold?;
        let least = capacities.iter().flatten().copied().fold(capacity.unwrap_or(1.0), f64::min);
        let rule = match threshold_rule {
            true => self.threshold(&group, capacity),
            false => self.top_k(&group, capacity, least),
        };
        let each_pass = self.word(&group, "router").map(|router| router == "pass");
        let gate = self.word(&group, "gate");
        let (gate_scale, whole) = (self.real(&group, "gate_scale"), self.bool(&group, "whole"));
        let nested = self.bool(&group, "nested");
        let scorer = self.scorer(&group);
        let recursion = self.recursion(walk, &group, (threshold_rule, capacities.as_deref()));
        let input = self.bool(&group, "norm_only");
        let level = self.word(&group, "level");
        let kv = match self.has(&group, "kv") {
            true => self.word(&group, "kv"),
            false => Some(if threshold_rule { "all" } else { "processed" }),
        };
        let merge = self.bool(&group, "merge");
        if whole == Some(true) && merge == Some(true) {
            let help = "take one of them away";
            self.error_at("skip", "skip.whole", "`merge` shares updates, which `whole` has none of", help);
        }
        if !threshold_rule && level == Some("sequence") {
            let help = "take `level` away, or use `threshold`";
            self.error_at("skip", "skip.level", "top-k chooses tokens, not sequences", help);
        }
        if !threshold_rule && kv == Some("all") {
            let help = "take `kv` away, or use `threshold`";
            self.error_at("skip", "skip.kv", "tokens that top-k leaves out have no keys and values", help);
        }
        self.sources.fields.retain(|path, _| path != "skip" && !path.starts_with("skip."));
        Some(Skip {
            rule: rule?,
            input: if input? { SkipInput::NormOnly } else { SkipInput::Hidden },
            level: if level? == "sequence" { SkipLevel::Sequence } else { SkipLevel::Token },
            kv: if kv? == "all" { SkipKv::All } else { SkipKv::Processed },
            merge: merge?,
            each_pass: each_pass?,
            gate: match gate? {
                "sigmoid" => SkipGate::Sigmoid,
                "tanh" => SkipGate::Tanh,
                _ => SkipGate::Score,
            },
            gate_scale: gate_scale?,
            whole: whole?,
            capacities: capacities?,
            nested: nested?,
            scorer: scorer?,
        })
        .filter(|_| recursion)
    }

    /// A `skip` whose tokens choose where their loop begins how many passes they make. The rules
    /// about its loop are in [`Checker::choosing_loop`].
    fn depth_choice(&mut self, walk: &Walk, group: &Group) -> Option<Skip> {
        let before = self.found.len();
        let others = [
            "threshold",
            "capacity",
            "causal",
            "router",
            "gate",
            "gate_scale",
            "whole",
            "nested",
            "penalty",
            "pooled",
            "norm_only",
            "level",
            "kv",
            "merge",
        ];
        self.misplaced(group, &others, "`depth_choice`, which has one rule and one router");
        let place = group.path("depth_choice");
        let passes = match walk.loops[..] {
            [(count, true)] => count,
            [] => {
                let message =
                    "`depth_choice` chooses among the passes of a `recur`, and this layer stands in none";
                self.error_at("skip", &place, message, "write the layer in a `recur` of the body");
                None
            }
            _ => {
                let message = "`depth_choice` is of the passes of one `recur` of the body, and this layer stands in more than one loop";
                self.error_at("skip", &place, message, "write the layer in a `recur` of the body alone");
                None
            }
        };
        if passes == Some(1) {
            let message = "a loop of one pass leaves no choice";
            self.error_at("skip", &place, message, "write a larger count, or take the `skip` away");
        }
        if walk.summed > 0 {
            let message =
                "`depth_choice` stands in another `skip`, which lets other tokens through in every pass";
            self.error_at("skip", &place, message, "take one of the two away");
        }
        let balance = if self.has(group, "balance") { self.real(group, "balance") } else { Some(1e-3) };
        let rule = SkipRule::DepthChoice { capacity: 1.0, balance: balance? };
        let capacities = Skip::chosen_shares(passes?.min(MAX_APPLICATIONS));
        let skip = Skip {
            rule,
            input: SkipInput::Hidden,
            level: SkipLevel::Token,
            kv: SkipKv::Processed,
            merge: false,
            each_pass: false,
            gate: SkipGate::Score,
            gate_scale: 1.0,
            whole: false,
            capacities,
            nested: false,
            scorer: self.scorer(group)?,
        };
        (self.found.len() == before).then_some(skip)
    }

    /// The form of a router's scores.
    fn scorer(&mut self, group: &Group) -> Option<Scorer> {
        let temperature = self.real(group, "temperature");
        let network = self.int_or_none(group, "network");
        let z_loss = self.real(group, "z_loss");
        let norm_only = self.has(group, "norm_only") && self.bool(group, "norm_only") == Some(true);
        if norm_only && network.flatten().is_some() {
            self.misplaced(group, &["network"], "`norm_only`, whose router reads one number");
            return None;
        }
        Some(Scorer { temperature: temperature?, network: network?, z_loss: z_loss? })
    }

    /// Why tokens of a loop cannot choose how many of its passes they make. `items` are those of
    /// the `recur`, whose keys are `group`'s.
    fn choosing_loop(
        &mut self,
        group: &Group,
        items: &[Item],
        looping: Option<&Looping>,
        residual_norm: Option<bool>,
    ) {
        let chooses = |expr: &Expr| expr.skips().iter().any(|(skip, _)| skip.rule.chosen());
        let chosen = items.iter().any(|item| match item {
            Item::Layer(expr) => chooses(expr),
            Item::Repeat { items, .. } => items.iter().any(|i| matches!(i, Item::Layer(e) if chooses(e))),
            Item::Statement(_) | Item::Recur { .. } => false,
        });
        if !chosen {
            return;
        }
        let mut refuse = |key: &str, message: &str, help: &str| {
            self.error_at("skip", &group.path(key), message, help);
        };
        if depth_choice(items).is_none() {
            let message = "with `depth_choice` a token that has made its passes is in no part of later ones: the `skip` is the whole body of its loop";
            refuse("layers", message, "wrap the composition of one layer, and write nothing next to it");
        }
        if residual_norm == Some(true) {
            let message = "`residual_norm` normalises tokens that have made their passes, too, which `depth_choice` leaves as they are";
            refuse("residual_norm", message, "write `residual_norm false`");
        }
        if looping.is_some_and(|looping| looping.embed) {
            let message = "`embed` adds to tokens that have made their passes, too, which `depth_choice` leaves as they are";
            refuse("embed", message, "take one of the two away");
        }
        if looping.is_some_and(|looping| !looping.exit.is_last()) {
            let message =
                "with `depth_choice` every token has chosen where it leaves: `exit` does not go with it";
            refuse("exit", message, "take one of the two away");
        }
        if self.known.attends || self.known.lanes {
            let message = "with `depth_choice` a token that has made its passes stays as it is, and this `stream` mixes it further";
            let help = "write `stream sum`, or take `depth_choice` away";
            self.error_at("skip", "model.stream", message, help);
        }
    }

    /// The capacities of passes, where they are a list; none where all have one.
    fn capacities(&mut self, group: &Group) -> Option<Vec<f64>> {
        match self.written(group, "capacity") {
            Some(Value { kind: ValueKind::List(_), .. }) => {}
            _ => return Some(vec![]),
        }
        let elements = self.elements(group, "capacity")?;
        if elements.is_empty() {
            let help = "write a share for each pass: `capacity [1, 2/3, 1/3]`";
            self.error_at("empty", &group.path("capacity"), "`capacity` has no shares", help);
            return None;
        }
        let (kind, range) = (Type::Real(Range::Share), Range::Share);
        elements.iter().map(|(value, _)| self.real_of("capacity", &kind, range, value)).collect()
    }

    /// Whether what a `skip` says about the passes of the loop around has a meaning there.
    fn recursion(
        &mut self,
        walk: &Walk,
        group: &Group,
        (threshold, capacities): (bool, Option<&[f64]>),
    ) -> bool {
        let before = self.found.len();
        let is = |this: &mut Self, key, word| this.has(group, key) && this.word(group, key) == Some(word);
        let nested = self.has(group, "nested") && self.bool(group, "nested") == Some(true);
        let each = capacities.filter(|each| !each.is_empty());
        let of_passes =
            [("router", is(self, "router", "pass")), ("nested", nested), ("capacity", each.is_some())];
        for (key, _) in of_passes.into_iter().filter(|(_, written)| *written) {
            let place = match walk.loops[..] {
                [(_, true)] => continue,
                [] => "stands in none",
                _ => "stands in more than one loop",
            };
            let what = if key == "capacity" { "a list of shares" } else { "it" };
            let message = format!(
                "`{key}`: {what} is of the passes of one `recur` of the body, and this layer {place}"
            );
            let help = "write the layer in a `recur` that is an item of the body, or take the key away";
            self.error_at("skip", &group.path(key), message, help);
        }
        if let (Some(each), [(Some(count), true)]) = (each, &walk.loops[..])
            && each.len() as u64 != *count
        {
            let message = format!("`capacity` has {} shares, and the loop makes {count} passes", each.len());
            self.error_at("skip", &group.path("capacity"), message, "write one for each pass");
        }
        if threshold {
            let keys = ["gate", "gate_scale", "whole"];
            self.misplaced(group, &keys, "`threshold`, whose decision is the factor");
            self.misplaced(group, &["z_loss"], "`threshold`, whose loss is of the share of tokens");
            if nested {
                let message = "`nested` does not go with `threshold`: its loss is of the share of all tokens";
                self.error_at("skip", &group.path("nested"), message, "take one of the two away");
            }
            if each.is_some() && self.has(group, "pooled") && self.bool(group, "pooled") == Some(true) {
                let message = "`pooled` has one target for all parts, and this list has one for each pass";
                self.error_at("skip", &group.path("capacity"), message, "take one of the two away");
            }
        }
        if !nested {
            return self.found.len() == before;
        }
        if walk.summed > 0 {
            let message = "`nested` stands in another `skip`, which lets other tokens through in every pass";
            self.error_at("skip", &group.path("nested"), message, "take one of the two away");
        }
        if self.has(group, "merge") && self.bool(group, "merge") == Some(true) {
            let message = "`merge` gives tokens that have left the updates of later passes, which `nested` keeps from them";
            self.error_at("skip", &group.path("merge"), message, "take one of the two away");
        }
        let grows = each.and_then(|each| (1..each.len()).find(|&pass| each[pass] > each[pass - 1]));
        if let Some(pass) = grows {
            let message = "with `nested` a pass processes no more tokens than came through the one before it";
            let help = "write shares that do not grow, or take `nested` away";
            self.error_at("skip", &group.path(&format!("capacity[{pass}]")), message, help);
        }
        self.found.len() == before
    }

    fn misplaced(&mut self, group: &Group, names: &[&'static str], rule: &str) {
        for name in names {
            if self.has(group, name) {
                let message = format!("`{name}` does not go with {rule}");
                self.error_at("skip", &group.path(name), message, "take it away");
            }
        }
    }

    fn threshold(&mut self, group: &Group, capacity: Option<f64>) -> Option<SkipRule> {
        self.misplaced(group, &["causal"], "`threshold`");
        if !self.has(group, "penalty") {
            let message = "a threshold router without `penalty` has a target that no loss reaches";
            self.error("unreached-router", group.at, message, "add `penalty 0.1`");
        }
        let zero = self.written(group, "penalty").filter(|value| match &value.kind {
            ValueKind::Number(arith) => {
                number::evaluate(arith, &self.lets, &mut Vec::new()) == Some(Number::Int(0))
            }
            _ => false,
        });
        let penalty = match zero {
            Some(value) => {
                let message = "with `penalty` 0 no loss reaches the target";
                self.error(
                    "unreached-router",
                    value.span,
                    message,
                    "write a weight above 0, such as `penalty 0.1`",
                );
                None
            }
            None => self.real(group, "penalty"),
        };
        let pooled = self.bool(group, "pooled");
        Some(SkipRule::Threshold { capacity: capacity?, penalty: penalty?, pooled: pooled? })
    }

    fn top_k(&mut self, group: &Group, capacity: Option<f64>, least: f64) -> Option<SkipRule> {
        self.misplaced(group, &["penalty", "pooled"], "top-k; it goes with `threshold`");
        let causal = match self.has(group, "causal") && !self.is_none(group, "causal") {
            true => self.causal(group).map(Some),
            false => Some(None),
        };
        if causal == Some(None) && least < 1.0 {
            let message = "this model can be trained but not sampled: top-k looks at later tokens";
            self.warning("not-causal", group.at, message, "name an inference rule: `causal bce 0.01`");
        }
        Some(SkipRule::TopK { capacity: capacity?, causal: causal? })
    }

    fn causal(&mut self, owner: &Group) -> Option<CausalRule> {
        let group = self.section(owner, "causal")?;
        match (self.has(&group, "bce"), self.has(&group, "predictor")) {
            (true, false) => {
                self.misplaced(&group, &["weight"], "`bce`, whose number is the weight");
                let (weight, into_input) = (self.real(&group, "bce"), self.bool(&group, "into_input"));
                Some(CausalRule::Bce { weight: weight?, into_input: into_input? })
            }
            (false, true) => {
                self.misplaced(&group, &["into_input"], "`predictor`");
                let (hidden, weight) = (self.int(&group, "predictor"), self.real(&group, "weight"));
                Some(CausalRule::Predictor { hidden: hidden?, weight: weight? })
            }
            _ => {
                let help = "write `causal bce 0.01` or `causal predictor 64`";
                self.error("missing-key", group.at, "an inference rule is either `bce` or `predictor`", help);
                None
            }
        }
    }
}
